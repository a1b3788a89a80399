"""Every dialect of every framework's lines; each parsed value is compared with the printed one."""

import math
import re
import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.training.logs.formats import (
    LOG_FORMATS,
    LineReader,
    LogEvent,
    parse_amount,
    parse_count,
    parse_line,
    parse_number,
)
from tests.training import follow_logs as logs

STAGED = "Finished saving the checkpoint (or staging if async is enabled)"


def approx(value: float) -> Any:
    """Equal within rounding."""
    return pytest.approx(value)


def parse(text: str, framework: str = "auto") -> LogEvent | None:
    """Parse one line with a new reader."""
    raw, reader = text.encode(), LineReader(framework)
    return reader.read(parse_line(raw).text) if reader.may_match(raw) else None


@pytest.mark.parametrize("dialect", ["2019", "core", "dated"])
def test_megatrons_step(dialect: str) -> None:
    told = dialect != "2019"
    assert parse(logs.megatron(500, ms=5361.6, dialect=dialect)) == LogEvent(
        "step", step=500, total=1000, step_seconds=5.3616, flops=243.6e12 if told else None, samples=128.0,
        loss=1.818812,
    )  # fmt: skip


def test_a_fork_of_megatron_writes_seconds_and_another_name_of_the_loss() -> None:
    line = logs.megatron(500, ms=5361.6, dialect="core")
    line = line.replace("iteration (ms): 5361.6", "iteration (s): 5.3616").replace("lm loss:", "lm-loss:")
    said = parse(line)
    assert said is not None
    assert (said.step, said.step_seconds, said.loss) == (500, 5.3616, 1.818812)


def test_megatron_deepspeeds_flops_have_recomputation_in_them() -> None:
    said = parse(logs.megatron(7, ms=1000.0, dialect="deepspeed", tflops=150.25))
    assert said is not None
    assert (said.flops, said.hardware_flops) == (None, 150.25e12)


def test_a_loss_that_megatron_does_not_print_is_no_number() -> None:
    said = parse(logs.megatron(7, ms=1000.0, loss=None))
    assert said is not None
    assert said.loss is not None
    assert math.isnan(said.loss)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("saving checkpoint at iteration     500 to /ckpt in torch_dist format", LogEvent("save", 500)),
        ("global rank 0 is saving checkpoint at iteration     500 to /ckpt", LogEvent("save", 500)),
        ("  successfully saved checkpoint at iteration     500 to /ckpt", LogEvent("saved", 500)),
        ("  successfully saved checkpoint from iteration     500 to /ckpt", LogEvent("saved", 500)),
        ("  scheduled an async checkpoint save at iteration     500 to /ckpt", LogEvent("detached", 500)),
        (" loading checkpoint from /ckpt at iteration 500", LogEvent("load", 500)),
        (" loading distributed checkpoint from /ckpt at iteration 500", LogEvent("load", 500)),
        ("  successfully loaded checkpoint from /ckpt [ t 1/2, p 1/4 ] at iteration 500", LogEvent("start", 500)),
        ("  successfully loaded checkpoint from /ckpt [ t 0, p 0 ] at iteration 500", LogEvent("start", 500)),
        ("    evaluate .......................: (12345.67, 12346.89)", LogEvent("evaluated", seconds=12.34689)),
        (" validation loss at iteration 1000 | lm loss value: 2.504220E+00 | lm loss PPL: 1.223399E+01 | ",
         LogEvent("validated", value=2.50422)),
        (" validation loss at iteration 1000 on validation set | lm loss value: 2.5E+00 | lm loss PPL: 1.2E+01 | ",
         LogEvent("validated", value=2.5)),
        (" validation loss at iteration 1000 on test set | lm loss value: 2.5E+00 | lm loss PPL: 1.2E+01 | ", None),
        ("setting number of micro-batches to constant 8", LogEvent("facts", facts=(("microbatches", 8.0),))),
        ("  seq_length ...................................... 4096", LogEvent("facts", facts=(("sequence", 4096.0),))),
        ("  fp8 ............................................. hybrid", LogEvent("facts", facts=(("fp8", "hybrid"),))),
        ("  padded_vocab_size ............................... 50304",
         LogEvent("facts", facts=(("vocabulary", 50304.0),))),
        (" > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)",
         LogEvent("facts", facts=(("vocabulary", 50304.0),))),
        ("[after training is done] datetime: 2025-06-16 22:30:50 ", LogEvent("end")),
        ("  data_path ....................................... /secret", None),
        ("using world size: 8, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline-model-parallel size: 1 ",
         LogEvent("facts", facts=(("world", 8.0), ("data", 2.0), ("tensor", 4.0), ("pipeline", 1.0)))),
    ],
)  # fmt: skip
def test_megatrons_other_lines(line: str, said: LogEvent | None) -> None:
    got = parse(line, "megatron")
    assert (got and got.kind, got and got.step, got and got.facts) == (
        said and said.kind,
        said and said.step,
        said and said.facts,
    )
    assert (
        got is None
        or said is None
        or (got.value, got.seconds) == (said.value, pytest.approx(said.seconds) if said.seconds else None)
    )


@pytest.mark.parametrize(("dialect", "color"), list(product(["2024", "early2025", "2025"], [False, True])))
def test_torchtitans_step(dialect: str, color: bool) -> None:
    assert parse(logs.titan(200, tps=5856, dialect=dialect, color=color)) == LogEvent(
        "step",
        step=200,
        tokens=5856.0,
        flops=None if dialect == "2024" else 339.16e12,
        mfu=approx(0.3429),
        loss=6.1384,
    )


def test_torchtitan_without_a_known_peak_and_on_another_stage() -> None:
    line = "step:  4  loss: -1.0000  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: N/A"
    assert parse(logs.stamped(line, "2026-02-24 19:46:17,508")) == LogEvent(
        "step", step=4, tokens=10050.0, flops=314.71e12
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Peak FLOPS used for computing MFU: 9.890e+14", LogEvent("facts", facts=(("peak", 9.89e14),))),
        ("Training starts at step 1, with local batch size 8, global batch size 64", LogEvent("start", 0)),
        ("Applied full activation checkpointing to the model", LogEvent("facts", facts=(("recompute", "full"),))),
        ("Applied selective activation checkpointing to the model", LogEvent("facts", facts=(("recompute", "half"),))),
        ("Float8 tensorwise scaled training active", LogEvent("facts", facts=(("fp8", "float8"),))),
        ("Float8 training active with recipe rowwise", LogEvent("facts", facts=(("fp8", "float8"),))),
        ("Float8 training active", LogEvent("facts", facts=(("fp8", "float8"),))),
        ("Training completed", LogEvent("end")),
        ("Training starts at step 501.", LogEvent("start", 500)),
        ("Saving the checkpoint (or staging if async is enabled).", LogEvent("save")),
        ("Saving the checkpoint.", LogEvent("save")),
        ("Saving a full checkpoint at last step, step 644.", LogEvent("save", 644)),
        ("Saving a model only checkpoint in torch.bfloat16 at last step, step 10.", LogEvent("save", 10)),
        ("Saving a model weights only checkpoint in torch.float32 at step 10", LogEvent("save", 10)),
        ("Finished saving the checkpoint in 0.60 seconds.", LogEvent("saved", seconds=0.6)),
        (f"{STAGED}in 5.53 seconds.", LogEvent("saved", seconds=5.53)),
        (f"{STAGED} in 5.53 seconds.", LogEvent("saved", seconds=5.53)),
        ("Last step checkpoint completed in 0.12s", LogEvent("saved", seconds=0.12)),
        ("Loading the checkpoint at step 500.", LogEvent("load")),
        ("Loading the checkpoint from ./outputs/checkpoint/step-500.", LogEvent("load")),
        ("Finished loading the checkpoint in 12.30 seconds.", LogEvent("loaded", seconds=12.3)),
        ("validate step: 20  loss:  5.1234  memory: 49.66GiB(52.28%)  tps: 9,000",
         LogEvent("validated", 20, value=5.1234)),
        ("step: 10  loss:  6.1384  memory: 49.66GiB(52.28%)  tps: 5,856  tflops: 339.16  mfu: 34.2", None),
        ("step: 10  loss:  6.1384  memory: 49.", None),
    ],
)  # fmt: skip
def test_torchtitans_other_lines(line: str, said: LogEvent | None) -> None:
    assert parse(logs.stamped(line, "2025-06-16 22:30:50,322"), "torchtitan") == said


@pytest.mark.parametrize("dialect", ["2023", "2025", "2026"])
def test_maxtexts_step(dialect: str) -> None:
    told = dialect != "2023"
    assert parse(logs.maxtext(5, seconds=1.234, dialect=dialect)) == LogEvent(
        "step", step=6, step_seconds=1.234, flops=123.456e12, loss=8.921,
        tokens=4096.0 if told else None, unpadded_tokens=65536.0 if told else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[Rampup Batch Size Phase], completed step: 5, seconds: 1.234, total_weights: 1, loss: 8.921",
         LogEvent("step", step=6, step_seconds=1.234, unpadded_tokens=1.0, loss=8.921)),
        ("completed step: 5, seconds: 1.234, total_weights: 64, loss: 0.693, dpo_loss: 0.693, reward_accuracy: 0.5",
         LogEvent("step", step=6, step_seconds=1.234, loss=0.693)),
        ("completed step: 5, seconds: 1.2", None),
        ("completed step: 5, seconds: 1.234, TFLOP/s/device: 123.456, lo", None),
        ("completed step: 5, seconds: 1.234, TFLOP/s/device: 123.456, lossEpoch 3 of 7", None),
        ("completed profiler activation/deactivation step: 5, total_weights: 1, loss: 8.921", None),
        ("eval metrics after step: 10, loss=2.512, total_weights=4096.0", LogEvent("validated", value=2.512)),
        ("Completed eval after train step 10, loss=2.512, perplexity=12.3", LogEvent("validated", value=2.512)),
        ("average loss after step=10: eval_loss=2.512, total_weights=4096.0", LogEvent("validated", value=2.512)),
        ("Completed eval step: 3, seconds: 0.1, running loss=2.5", None),
        ("saved a checkpoint at step 100", LogEvent("saved", 101)),
        ("Saved a checkpoint at step 100.", LogEvent("saved", 101)),
        ("Started an asynchronous checkpoint save for step 100", LogEvent("saved", 101)),
        ("restoring from this run's directory step 100", LogEvent("load", 101)),
        ("restoring from this run's directory latest step           100", LogEvent("load", 101)),
        ("Num_devices: 16, shape OrderedDict([('data', 1)])", LogEvent("facts", facts=(("world", 16.0),))),
        ("Config param use_sft: True", LogEvent("facts", facts=(("use_sft", "True"),))),
        ("Config param use_sft_cache: True", None),
        ("Config param use_dpo: True", LogEvent("facts", facts=(("use_dpo", "True"),))),
        ("Config param remat_policy: full", LogEvent("facts", facts=(("recompute", "full"),))),
        ("Config param remat_policy: RematPolicy.MINIMAL", LogEvent("facts", facts=(("recompute", "selective"),))),
        ("Config param remat_policy: none", LogEvent("facts", facts=(("recompute", "None"),))),
        ("Config param remat_policy: custom", LogEvent("facts", facts=(("recompute", ""),))),
        ("Config param quantization: fp8", LogEvent("facts", facts=(("fp8", "fp8"),))),
        ("Config param quantization: QuantizationType.TE_NVFP4", LogEvent("facts", facts=(("fp4", "TE_NVFP4"),))),
        ("Config param quantization: int8", LogEvent("facts")),
        ("Config param quantization: ", None),
        ("Config param steps: 150001", LogEvent("facts", facts=(("steps", 150001.0),))),
        ("Config param steps: -1", None),
    ],
)  # fmt: skip
def test_maxtexts_other_lines(line: str, said: LogEvent | None) -> None:
    assert parse(line, "maxtext") == said


@pytest.mark.parametrize(
    ("dialect", "ms", "tokens"),
    [("2023", "11500.0", "1.140000E+04"), ("2024", "11.5K", "11.4K"), ("2025", "11.5K", "11.4K")],
)
def test_nanotrons_step(dialect: str, ms: str, tokens: str) -> None:
    assert parse(logs.nanotron(327281, ms=ms, tokens=tokens, dialect=dialect)) == LogEvent(
        "step", step=327281, total=378950, step_seconds=11.5, flops=38.3e12, hardware_flops=approx(40.2e12),
        tokens=11400.0, loss=2.38,
    )  # fmt: skip


def test_nanotrons_other_lines() -> None:
    start = "[Start training] datetime: 2025-10-17 | mbs: 4 | start_iteration_step: 100 | consumed_tokens: 9"
    assert parse(start, "nanotron") == LogEvent("start", 100)
    assert parse("Saving checkpoint at /ckpt/100", "nanotron") == LogEvent("save")
    assert parse(logs.nanotron(1, ms="268")[:200], "nanotron") is None


@pytest.mark.parametrize("text", [False, True])
def test_the_trainers_dictionaries(text: bool) -> None:
    assert parse(logs.trainer(loss=1.234, epoch=0.5, text=text)) == LogEvent("metrics", loss=1.234, epoch=0.5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'eval_loss': 2.5, 'eval_runtime': 1.2, 'epoch': 1.0}", LogEvent("validated", value=2.5, epoch=1.0)),
        ("{'eval_loss': '2.5', 'eval_runtime': '1.2', 'epoch': '1'}", LogEvent("validated", value=2.5, epoch=1.0)),
        ("{'train_runtime': 30.1, 'train_samples_per_second': 16.6, 'train_loss': 1.6, 'epoch': 1.0}", LogEvent("end")),
        ("{'loss': 1.2, 'grad_norm': 2.", None),
        ("{'loss': 'the password', 'epoch': 1.0}", None),
        ("Evaluating:  10%|█         | 50/500 [00:30<04:30,  1.66it/s]", None),
        (logs.bar(50, 500), LogEvent("bar", step=50, total=500)),
        (logs.bar(500, 500, elapsed="1:02:03"), LogEvent("bar", step=500, total=500)),
        ("Map:  10%|█         | 50/500 [00:30<04:30,  1.66 examples/s]", None),
        ("  Continuing training from global step 500", LogEvent("start", 500)),
        ("Saving model checkpoint to out/checkpoint-500", LogEvent("save")),
        ("***** Running Evaluation *****", LogEvent("validate")),
    ],
)  # fmt: skip
def test_the_trainers_other_lines(line: str, said: LogEvent | None) -> None:
    assert parse(line, "huggingface") == said


def test_a_loss_that_is_no_number_is_told() -> None:
    said = parse("{'loss': nan, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.5}")
    assert said is not None
    assert said.loss is not None
    assert math.isnan(said.loss)


STEPS = {
    "megatron": logs.megatron(512, ms=1234.5),
    "torchtitan": logs.titan(512, tps=5856),
    "maxtext": logs.maxtext(512, seconds=1.234),
    "nanotron": logs.nanotron(512, ms="11.5K"),
    "huggingface": logs.trainer(loss=1.0, epoch=1.0),
}


@pytest.mark.parametrize("name", LOG_FORMATS)
def test_a_line_is_one_frameworks_alone_and_decides(name: str) -> None:
    assert [each for each in LOG_FORMATS if parse(STEPS[name], each)] == [name]
    reader = LineReader()
    assert reader.read(parse_line(STEPS[name].encode()).text) is not None
    for another in set(LOG_FORMATS) - {name}:
        assert reader.read(parse_line(STEPS[another].encode()).text) is None
    reader.reset()
    assert all(reader.may_match(line.encode()) for line in STEPS.values())


@pytest.mark.parametrize(
    ("before", "writer"),
    [
        ("", ""),
        ("[rank0]:", "elastic:rank0 "),
        ("[default3]:", "elastic:default3 "),
        ("12: ", "srun:12 "),
        (" 3: [rank7]: ", "srun:3 elastic:rank7 "),
        ("[1,5]<stdout>:", "mpi:1,5 "),
        ("[1,5]<stderr>: ", "mpi:1,5 "),
        ("2025-05-01T12:00:00.123456789Z stdout F ", ""),
        ("2025-05-01T12:00:00.123456789+02:00 stderr F [rank1]:", "elastic:rank1 "),
        ("\033[36m(worker pid=1)\033[0m ", ""),
    ],
)
@pytest.mark.parametrize("name", LOG_FORMATS)
def test_what_launchers_and_runtimes_put_before_a_line(name: str, before: str, writer: str) -> None:
    line = parse_line((before + STEPS[name]).encode())
    assert line.writer.replace(" ", "") == re.sub(r"(\w+):", r"\1:", writer).replace(" ", "")
    assert LineReader().read(line.text) == parse(STEPS[name])


def test_stamps_tell_differences() -> None:
    stamps = [
        parse_line(text.encode()).timestamp
        for text in (
            logs.titan(1, tps=1, stamp="2025-12-31 23:59:59,500"),
            logs.titan(1, tps=1, stamp="2026-01-01 00:00:01,750"),
            logs.nanotron(1, ms="1", stamp="01/01/2026 00:00:03"),
            logs.megatron(1, ms=1.0, dialect="dated", stamp="2026-01-01 00:00:04.000250"),
            "2026-01-01T00:00:05.5Z stdout F hello",
        )
    ]
    assert None not in stamps
    assert [round(float(stamp or 0.0) - float(stamps[0] or 0.0), 6) for stamp in stamps] == [
        0.0,
        2.25,
        3.5,
        4.50025,
        6.0,
    ]
    assert parse_line(b"9999-99-99 99:99:99 hello").timestamp is None
    assert parse_line(b"hello").timestamp is None


def test_numbers() -> None:
    assert [parse_number(text) for text in ("1,234.5", "-2E-3", " 7 ", ".5", "1_0", "0x1", "", None, "1" * 60)] == [
        1234.5, -0.002, 7.0, 0.5, None, None, None, None, None,
    ]  # fmt: skip
    assert [parse_amount(text) for text in ("nan", "inf", "-1", "1e999", "3")] == [None, None, None, None, 3.0]
    assert [parse_count(text) for text in ("12", "-1", "1" * 16, "٣", None)] == [12, None, None, None, None]


@given(st.one_of(st.binary(max_size=400), st.text(max_size=400).map(str.encode)))
def test_any_bytes_are_read(raw: bytes) -> None:
    text = parse_line(raw).text
    for row in LOG_FORMATS.values():
        row.read(text)


def other(name: str) -> str:
    """The line of the next step, with a later timestamp."""
    return (
        STEPS[name].replace("512", "513").replace("1234.5", "9876.5").replace("1.234", "9.876").replace("11.5K", "9.9K")
    )


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "maxtext", "nanotron"])
def test_a_line_behind_one_that_was_cut_is_read(name: str) -> None:
    """Without a newline between them: the first writer was killed."""
    line = STEPS[name]
    begin = max(line.find(word) for word in (" iteration", "step: ", "completed step: ", "iteration: "))
    for cut in range(begin + 12, len(line) - 5, 7):
        assert parse(line[:cut] + other(name), name) == parse(other(name), name)


@pytest.mark.parametrize("name", ["megatron", "maxtext"])
def test_a_line_with_something_behind_it_is_none(name: str) -> None:
    assert parse(STEPS[name] + " and more", name) is None


@given(st.sampled_from(sorted(STEPS)), st.integers(0, 400))
def test_of_a_line_that_was_cut_step_and_time_are_whole(name: str, cut: int) -> None:
    full, said = parse(STEPS[name], name), LOG_FORMATS[name].read(parse_line(STEPS[name][:cut].encode()).text)
    assert full is not None
    assert said is None or (said.kind, said.step, said.step_seconds) == (full.kind, full.step, full.step_seconds)


@given(st.sampled_from(sorted(STEPS)), st.integers(0, 400), st.integers(0, 400), st.text(max_size=5))
def test_mixed_lines_are_no_other_step(name: str, cut: int, again: int, between: str) -> None:
    line = STEPS[name]
    said = LOG_FORMATS[name].read(line[:cut] + between + line[again:])
    assert said is None or said.step is None or said.step >= 0


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]" * 8000, "\x1b[" + "0" * 16000, "iteration " * 1600, "'a': 1, " * 2000, "{'" * 8000, "step:  " * 2000,
        "loading checkpoint from " * 600, "completed step: 1, " + "a" * 16000, "Saving a model " * 1000,
        "evaluate " + "." * 16000, " " * 16000, "1%|" * 5000, "Finished saving the checkpoint" * 500,
        "validation loss at " * 800, "iteration: 1 / 1 | " * 800, "iteration 1/ 1 | " * 800, "step: 1  " * 1600,
    ],
)  # fmt: skip
def test_no_line_takes_long(text: str) -> None:
    begin = time.perf_counter()
    cleaned = parse_line(text.encode()).text
    for row in LOG_FORMATS.values():
        row.read(cleaned)
    assert time.perf_counter() - begin < 1.0
