"""Logs with several ranks, restarts, checkpoints and evaluations; expected values are computed by hand."""

from collections.abc import Iterable
from typing import Any

import pytest

from exporter.core.model import SECOND
from exporter.training.logs.formats import LineReader, parse_line
from exporter.training.logs.tracker import LineTime, LogTracker
from exporter.training.message import Degrees, Message, Quality, Schedule
from tests.training import follow_logs as logs

TITAN_APPLIED = "Applied {} activation checkpointing to the model"


class Job:
    """A job whose lines are parsed at once, at `now` seconds."""

    def __init__(self, *, fresh: bool = True) -> None:
        self.progress, self.reader = LogTracker(), LineReader()
        if fresh:
            self.progress.start_fresh()

    def parse(self, *lines: str, now: float = 0.0, writer: str = "file ") -> list[Message]:
        messages = []
        for text in lines:
            line = parse_line(text.encode())
            said = self.reader.read(line.text)
            if said is not None:
                at = LineTime(line.timestamp, int(now * SECOND))
                messages += self.progress.handle(said, writer=writer + line.writer, at=at)
        return [one.message for one in [*messages, *self.progress.flush_bar()]]


def approx(value: float) -> Any:
    """Equal within rounding."""
    return pytest.approx(value)


def short(messages: Iterable[Message], *names: str) -> list[Any]:
    return [tuple(getattr(message, name) for name in names) for message in messages]


def test_megatrons_figures() -> None:
    """10 steps of 5.3616 s: 53.616 s; 128 samples a step over 16 GPUs are 80 of each, and those 4096 tokens each."""
    job = Job()
    assert job.parse(*logs.megatron_start()) == []
    first, second = job.parse(logs.megatron(10, ms=5361.6), logs.megatron(20, ms=5000.0, loss=1.75))
    assert first == Message(
        seconds=approx(53.616), world_size=16, gpus=1, step=10, steps=10, samples=80.0, tokens=327680.0,
        model_flops=approx(243.6e12 * 53.616), dtype="bf16", recompute="full", loss=1.818812,
        parallel=Degrees(tensor=2, pipeline=4, data=2), pipeline=Schedule(4, 8, 2, "interleaved"),
    )  # fmt: skip
    assert (second.steps, second.seconds, second.model_flops) == (10, 50.0, approx(243.6e12 * 50))


def test_without_the_worlds_size_only_what_is_of_one_gpu_is_told() -> None:
    (message,) = Job().parse(logs.megatron(10, ms=1000.0))
    assert (message.gpus, message.world_size, message.samples, message.tokens) == (1, None, None, None)
    assert message.model_flops == 2.436e15


@pytest.mark.parametrize(
    ("fp4", "fp8", "bf16", "dtype"),
    [
        ("None", "hybrid", "True", "fp8"), ("None", "None", "False", ""), ("None", "None", "True", "bf16"),
        ("e2m1", "None", "True", "fp4"), ("e2m1", "hybrid", "True", "fp4"),
    ],
)  # fmt: skip
def test_megatrons_number_format(fp4: str, fp8: str, bf16: str, dtype: str) -> None:
    job = Job()
    job.parse(f"  fp4 ...... {fp4}", f"  fp8 ...... {fp8}", f"  bf16 ..... {bf16}", "  recompute_granularity .... None")
    assert short(job.parse(logs.megatron(1, ms=1.0)), "dtype", "recompute") == [(dtype, "none")]


@pytest.mark.parametrize(
    ("lines", "step", "recompute"),
    [
        ([], logs.megatron(1, ms=1.0), ""), ([], logs.titan(1, tps=1), ""), ([], logs.maxtext(0, seconds=1.0), ""),
        (["Peak FLOPS used for computing MFU: 9.890e+14"], logs.titan(1, tps=1), "none"),
        ([TITAN_APPLIED.format("full"), "Peak FLOPS used for computing MFU: 9.890e+14"], logs.titan(1, tps=1), "full"),
        ([TITAN_APPLIED.format("memory_budget")], logs.titan(1, tps=1), ""),
        (["Config param remat_policy: full"], logs.maxtext(0, seconds=1.0), "full"),
        (["Config param remat_policy: minimal"], logs.maxtext(0, seconds=1.0), "selective"),
        (["Config param remat_policy: save_qkv_proj"], logs.maxtext(0, seconds=1.0), ""),
    ],
)  # fmt: skip
def test_which_recomputation_a_log_names(lines: list[str], step: str, recompute: str) -> None:
    job = Job()
    job.parse(*lines)
    (message,) = job.parse(step)
    assert (message.recompute, message.hardware_flops) == (recompute, None)


def test_torchtitans_selective_recomputation_repeats_half_of_the_forward_pass() -> None:
    """Every second product, or every second layer: 1 of 6 FLOPs per parameter and token."""
    job = Job()
    start = logs.stamped("Training starts at step 1.", "2025-06-16 22:30:00,000")
    job.parse(TITAN_APPLIED.format("selective"), start)
    (message,) = job.parse(logs.titan(1, tps=1, tflops=300.0, stamp="2025-06-16 22:30:10,000"))
    assert (message.recompute, message.model_flops, message.hardware_flops) == ("selective", 3e15, approx(3.5e15))


@pytest.mark.parametrize(
    ("lines", "step", "dtype"),
    [
        (["Float8 tensorwise scaled training active"], logs.titan(1, tps=1), "fp8"),
        (["Config param quantization: te_fp8_delayedscaling"], logs.maxtext(0, seconds=1.0), "fp8"),
        (["Config param quantization: te_nvfp4"], logs.maxtext(0, seconds=1.0), "fp4"),
        (["Config param quantization: "], logs.maxtext(0, seconds=1.0), ""),
    ],
)
def test_other_frameworks_number_format(lines: list[str], step: str, dtype: str) -> None:
    job = Job()
    job.parse(*lines)
    assert short(job.parse(step), "dtype", "model_flops_16bit") == [(dtype, None)]


def test_attention_and_the_output_layer_of_megatrons_fp8_are_in_16_bits() -> None:
    """Per token: attention 12 * 32 * 32 * 128 * 4096 / 2, output 6 * 4096 * 128,000; 327,680 tokens a GPU."""
    table = {"num_layers": 32, "num_attention_heads": 32, "kv_channels": 128, "hidden_size": 4096, "fp8": "hybrid"}
    shape = [f"  {name} ..... {value}" for name, value in table.items()]
    vocabulary = " > padded vocab (size: 127900) with 100 dummy tokens (new size: 128000)"
    expected = 327_680 * (12 * 32 * 32 * 128 * 4096 / 2 + 6 * 4096 * 128_000)
    for more, found in (([vocabulary], approx(expected)), ([], None), ([vocabulary, "  fp8 ..... None"], None),
                        ([vocabulary, "  multi_latent_attention ..... True"], None)):  # fmt: skip
        job = Job()
        job.parse(*logs.megatron_start(), *shape, *more)
        assert short(job.parse(logs.megatron(10, ms=5361.6)), "model_flops_16bit") == [(found,)], more


def test_absurd_facts_are_none() -> None:
    job = Job()
    job.parse("  world_size .... 0", "  tensor_model_parallel_size .... 99999999", "  context_parallel_size .... -3")
    assert short(job.parse(logs.megatron(1, ms=1.0)), "world_size", "parallel") == [(None, None)]


def test_torchtitans_figures_are_over_the_time_between_its_stamps() -> None:
    job = Job()
    start = logs.stamped("Training starts at step 1, with local batch size 8", "2025-06-16 22:30:00,000")
    lines = [
        logs.titan(1, tps=100, tflops=10.0, stamp="2025-06-16 22:30:05,000"),
        logs.titan(10, tps=5856, tflops=339.16, stamp="2025-06-16 22:30:18,500"),
    ]
    first, second = job.parse(start, *lines)
    assert (first.steps, first.seconds, first.tokens, first.model_flops, first.restart) == (1, 5.0, 500.0, 5e13, False)
    assert (second.steps, second.seconds, second.tokens) == (9, 13.5, 5856 * 13.5)
    assert second.model_flops == approx(339.16e12 * 13.5)


def test_torchtitan_of_2024_tells_its_flops_by_the_peak() -> None:
    job = Job()
    job.parse("Peak FLOPS used for computing MFU: 9.890e+14", logs.titan(1, tps=1, stamp="2024-06-16 22:30:05,000"))
    (message,) = job.parse(logs.titan(10, tps=5000, dialect="2024", stamp="2024-06-16 22:30:15,000"))
    assert (message.tokens, message.model_flops) == (50000.0, approx(0.3429 * 9.89e14 * 10))


def test_torchtitans_validation_is_not_in_the_interval_after_it() -> None:
    job = Job()
    job.parse(logs.titan(10, tps=1, stamp="2025-06-16 22:30:00,000"))
    validate = "validate step: 10  loss:  5.1234  memory: 49.66GiB(52.28%)  tps: 9,000"
    (quality,) = job.parse(logs.stamped(validate, "2025-06-16 22:30:40,000"))
    assert quality == Message(quality=Quality(5.1234, "validation loss", falls=True))
    assert short(job.parse(logs.titan(20, tps=1, stamp="2025-06-16 22:30:50,000")), "seconds", "steps") == [(10.0, 10)]


def test_steps_between_two_lines_count_that_were_made_before_a_validation() -> None:
    """Lines every ten steps of 2 s, a validation after step 15: how long it took follows from the steps after it."""
    job = Job()
    job.parse(logs.titan(10, tps=1, stamp="2025-06-16 22:30:00,000"))
    validate = "validate step: 15  loss:  5.1234  memory: 49.66GiB(52.28%)  tps: 9,000"
    job.parse(logs.stamped(validate, "2025-06-16 22:30:25,000"))
    assert short(job.parse(logs.titan(20, tps=1, stamp="2025-06-16 22:30:35,000")), "seconds", "steps") == [(20.0, 10)]
    assert short(job.parse(logs.titan(30, tps=1, stamp="2025-06-16 22:30:55,000")), "seconds", "steps") == [(20.0, 10)]
    job.parse(logs.stamped(validate.replace("15", "40"), "2025-06-16 22:31:25,000"))
    assert short(job.parse(logs.titan(40, tps=1, stamp="2025-06-16 22:31:26,000")), "seconds", "steps") == [(0.0, 0)]


def test_torchtitans_checkpoint_between_two_lines_is_no_time_of_its_steps() -> None:
    job = Job()
    job.parse(logs.titan(10, tps=1, stamp="2025-06-16 22:30:00,000"))
    job.parse(logs.stamped("Saving the checkpoint (or staging if async is enabled).", "2025-06-16 22:30:10,000"))
    saved = "Finished saving the checkpoint (or staging if async is enabled)in 8.00 seconds."
    assert short(job.parse(logs.stamped(saved, "2025-06-16 22:30:18,000")), "checkpoints", "phase") == [(1, "compute")]
    assert short(job.parse(logs.titan(20, tps=1, stamp="2025-06-16 22:30:28,000")), "seconds", "steps") == [(20.0, 10)]


def test_torchtitans_rates_are_means_over_its_checkpoints_too() -> None:
    """9000 tokens/s for 30 s before; 10 steps with a save of 60 s in between are 3000 tokens/s over 90 s."""
    job = Job()
    job.parse(logs.titan(10, tps=9000, stamp="2025-06-16 22:30:00,000"))
    job.parse(logs.stamped("Saving the checkpoint.", "2025-06-16 22:30:00,000"))
    job.parse(logs.stamped("Finished saving the checkpoint in 60.00 seconds.", "2025-06-16 22:31:00,000"))
    (message,) = job.parse(logs.titan(20, tps=3000, tflops=133.0, stamp="2025-06-16 22:31:30,000"))
    assert (message.seconds, message.tokens, message.model_flops) == (30.0, approx(270e3), approx(133e12 * 90))
    job.parse(logs.stamped("Saving the checkpoint.", "2025-06-16 22:31:30,000"))
    job.parse(logs.stamped("Finished saving the checkpoint in 60.00 seconds.", "2025-06-16 22:32:30,000"))
    validate = "validate step: 25  loss:  5.1234  memory: 49.66GiB(52.28%)  tps: 9,000"
    job.parse(logs.stamped(validate, "2025-06-16 22:33:00,000"))
    (message,) = job.parse(logs.titan(30, tps=9000, stamp="2025-06-16 22:33:15,000"))
    assert (message.seconds, message.tokens) == (30.0, approx(270e3)), "a validation begins new means"


def test_the_trainers_steps_before_an_evaluation_in_the_same_look_count() -> None:
    job = Job()
    job.parse(logs.bar(0, 500), now=0)
    job.parse(logs.trainer(loss=2.0, epoch=0.02), logs.bar(10, 500), now=10)
    evaluation = "***** Running Evaluation *****"
    messages = job.parse(logs.bar(15, 500), evaluation, now=15)
    assert short(messages, "step", "steps", "seconds", "phase") == [(15, 5, 5.0, ""), (None, 0, 0.0, "evaluation")]
    job.parse("{'eval_loss': 2.5, 'epoch': 0.02}", now=45)
    assert short(job.parse(logs.bar(20, 500), now=50), "step", "steps", "seconds") == [(20, 5, 5.0)]


def test_maxtexts_figures() -> None:
    """Tokens of a device 4096 a second for 2 s; 16 devices had 98,304 that count, 6,144 each: 2,048 are padding."""
    job = Job()
    job.parse("Num_devices: 16, shape (16,)", logs.NO_TUNING)
    first, second = job.parse(logs.maxtext(0, seconds=2.0, weights=98304), logs.maxtext(1, seconds=2.0, weights=131072))
    assert (first.step, first.steps, first.tokens, first.padding) == (1, 1, 8192.0, 2048.0)
    assert first.model_flops == approx(123.456e12 * 2)
    assert (second.step, second.padding, second.world_size) == (2, 0.0, 16)


@pytest.mark.parametrize(
    "line", ["Config param use_sft: True", "an older MaxText", f"Config param use_dpo: True\n{logs.NO_TUNING}"]
)
def test_maxtexts_prompts_are_no_padding(line: str) -> None:
    """Fine-tuning on completions: the tokens without a weight are prompts, or padding; nobody knows how many."""
    job = Job()
    job.parse("Num_devices: 16, shape (16,)", *line.splitlines())
    (message,) = job.parse(logs.maxtext(0, seconds=2.0, weights=98304))
    assert (message.tokens, message.padding) == (8192.0, None)


def test_rounding_is_no_padding() -> None:
    job = Job()
    job.parse("Num_devices: 1, shape (1,)", logs.NO_TUNING)
    (message,) = job.parse(logs.maxtext(0, seconds=0.05, tokens=81956.0, weights=4096.0))
    assert (message.tokens, message.padding) == (approx(4097.8), 0.0)


def test_nanotrons_figures() -> None:
    job = Job(fresh=False)
    job.parse(logs.nanotron(100, ms="11.5K"))
    (message,) = job.parse(logs.nanotron(101, ms="11.5K"))
    assert (message.steps, message.seconds, message.tokens) == (1, 11.5, 131100.0)
    assert message.model_flops == approx(38.3e12 * 11.5)
    assert message.hardware_flops == approx(40.2e12 * 11.5)


def test_hardware_flops_below_the_models_are_rounding() -> None:
    job = Job()
    assert short(job.parse(logs.nanotron(1, ms="1000", tflops="40.3")), "hardware_flops") == [(40.3e12,)]


def test_the_trainers_bar_tells_steps_once_a_look() -> None:
    job = Job()
    assert job.parse(logs.bar(1, 500), logs.bar(9, 500), now=1) == []  # not known yet to be the training's bar
    words = job.parse(logs.trainer(loss=2.0, epoch=0.02), logs.bar(10, 500), now=2)
    assert short(words, "step", "steps", "loss", "epoch") == [(None, 0, 2.0, 0.02), (10, 9, None, None)]
    assert words[1].seconds == 1.0, "from its first position on"
    assert short(job.parse(logs.bar(11, 500), logs.bar(12, 500), now=4), "step", "steps", "seconds") == [(12, 2, 2.0)]
    (bar, loss) = job.parse(logs.bar(20, 500), logs.trainer(loss=1.9, epoch=0.04), now=8)
    assert (bar.step, bar.steps, bar.seconds) == (20, 8, 4.0)
    assert (loss.step, loss.loss, loss.epoch) == (20, 1.9, 0.04)
    assert job.parse(logs.bar(20, 500), now=20) == []  # redrawn


def test_a_bar_that_jumps_resumes() -> None:
    """From a checkpoint of step 5000, at log level warning: the bar is drawn at 0, and then after a step."""
    job = Job()
    job.parse(logs.bar(0, 10_000), now=0)
    job.parse(logs.bar(5001, 10_000), logs.bar(5002, 10_000), now=20)
    job.parse(logs.trainer(loss=1.2, epoch=0.5), now=30)
    assert short(job.parse(logs.bar(5010, 10_000), now=30), "step", "steps", "seconds") == [(5010, 10, 30.0)]


def test_a_bar_that_is_drawn_from_its_first_step_on_counts_all() -> None:
    job = Job()
    job.parse(logs.bar(0, 500), logs.bar(1, 500), logs.bar(9, 500), now=1)
    job.parse(logs.trainer(loss=1.2, epoch=0.5), now=2)
    assert short(job.parse(logs.bar(10, 500), now=11), "step", "steps", "seconds") == [(10, 10, 10.0)]


def test_steps_of_no_time_are_in_the_next_interval() -> None:
    """A second bar position in the same poll has no duration: its steps count in the next interval."""
    job = Job()
    job.parse(logs.trainer(loss=2.0, epoch=0.02), logs.bar(10, 500), now=1)
    messages = job.parse(logs.bar(14, 500), logs.trainer(loss=1.9, epoch=0.03), logs.bar(16, 500), now=2)
    assert short(messages, "step", "steps", "seconds") == [(14, 4, 1.0), (14, 0, 0.0), (16, 0, 0.0)]
    assert short(job.parse(logs.bar(20, 500), now=4), "step", "steps", "seconds") == [(20, 6, 2.0)]


def test_the_trainers_evaluation() -> None:
    job = Job()
    job.parse(logs.trainer(loss=2.0, epoch=0.02), logs.bar(10, 500), now=1)
    assert short(job.parse(logs.bar(1, 32), logs.bar(2, 32), now=2), "phase") == [("evaluation",)]
    messages = job.parse(
        "{'eval_loss': 2.5, 'epoch': 0.02}", logs.bar(10, 500), logs.bar(32, 32), logs.bar(10, 500), now=9
    )
    assert messages == [Message(quality=Quality(2.5, "validation loss", falls=True), epoch=0.02, phase="compute")]


def test_megatrons_checkpoint() -> None:
    job = Job()
    job.parse(logs.megatron(10, ms=1000.0))
    saving = "saving checkpoint at iteration      10 to /ckpt in torch_dist format"
    saved = "  successfully saved checkpoint from iteration      10 to /ckpt"
    assert job.parse(saving) == [Message(phase="checkpoint")]
    assert job.parse(saving) == []
    assert job.parse(saved, saved) == [Message(checkpoints=1, phase="compute")]
    assert short(job.parse(logs.megatron(20, ms=1000.0)), "phase", "checkpoints") == [("", 0)]


def test_an_asynchronous_checkpoint_holds_nobody_up() -> None:
    job = Job()
    job.parse(logs.megatron(10, ms=1000.0))
    messages = job.parse(
        "saving checkpoint at iteration 10 to /c", "scheduled an async checkpoint save at iteration 10 to /c"
    )
    assert short(messages, "phase", "checkpoints") == [("checkpoint", 0), ("compute", 0)]
    job.parse(logs.megatron(20, ms=1000.0))
    assert job.parse("  successfully saved checkpoint from iteration 10 to /c") == [Message(checkpoints=1)]


def test_eight_ranks_of_torchtitan_save_once() -> None:
    """Lines of several ranks arrive in any order."""
    job = Job()
    at = "2025-06-16 22:30:00,000"
    job.parse(logs.titan(10, tps=1, stamp=at))
    saving, saved = "Saving the checkpoint.", "Finished saving the checkpoint in 5.53 seconds."
    lines = [f"[rank{rank}]:" + logs.stamped(line, at) for line, rank in
             [(saving, 0), (saving, 1), (saved, 1), (saving, 2), (saved, 0), (saved, 2)]]  # fmt: skip
    assert short(job.parse(*lines), "phase", "checkpoints") == [("checkpoint", 0), ("compute", 1)]


def test_torchtitan_saves_again_after_a_step() -> None:
    job = Job()
    lines = [
        logs.stamped("Saving the checkpoint.", "2025-06-16 22:30:00,000"),
        logs.stamped("Finished saving the checkpoint in 5.53 seconds.", "2025-06-16 22:30:05,530"),
    ]
    messages = job.parse(*lines, logs.titan(20, tps=1, stamp="2025-06-16 22:30:10,000"), *lines)
    assert [message.checkpoints for message in messages] == [0, 1, 0, 0, 1]


def test_a_checkpoint_whose_beginning_was_not_seen_has_its_seconds() -> None:
    line = logs.stamped("Finished saving the checkpoint in 5.53 seconds.", "2025-06-16 22:30:00,000")
    assert Job().parse(line) == [Message(seconds=5.53, phases={"checkpoint": 5.53}, checkpoints=1)]


def test_a_checkpoint_that_is_not_said_to_end_ends_with_the_next_step() -> None:
    job = Job()
    job.parse(logs.nanotron(1, ms="1000"))
    messages = job.parse("Saving checkpoint at /c/1", logs.nanotron(2, ms="1000"))
    assert short(messages, "phase", "checkpoints", "step") == [("checkpoint", 0, None), ("compute", 1, 2)]


def test_megatrons_evaluation_has_lasted() -> None:
    job = Job()
    line = "    evaluate .......................................: (12345.67, 12346.00)"
    assert job.parse(line) == [Message(seconds=12.346, phases={"evaluation": 12.346})]


def test_the_first_of_a_step_counts() -> None:
    """All ranks print each step: at the same time, milliseconds later, or after another rank's next step."""
    job = Job()
    lines = [logs.titan(step, tps=100, stamp=f"2025-06-16 22:30:{second:02},{ms:03}") for step, second, ms in
             [(10, 0, 0), (10, 0, 0), (10, 0, 7), (20, 10, 0), (10, 0, 9), (20, 10, 5), (30, 20, 0)]]  # fmt: skip
    assert short(job.parse(*lines), "step", "seconds", "restart") == [
        (10, 0.0, False), (20, 10.0, False), (30, 20.0 - 10.0, False),
    ]  # fmt: skip


def test_copies_without_stamps_come_at_once() -> None:
    job = Job()
    lines = [logs.maxtext(step, seconds=1.0) for step in (0, 1, 2, 0, 1, 2)]
    assert short(job.parse(*lines), "step", "restart") == [(1, False), (2, False), (3, False)]


def test_another_ranks_lines_may_come_much_later() -> None:
    """Each rank's output is buffered separately."""
    job = Job()
    assert len(job.parse(*(logs.maxtext(step, seconds=1.0) for step in range(10)), writer="a ")) == 10
    assert job.parse(*(logs.maxtext(step, seconds=1.0) for step in range(10)), writer="b ", now=20) == []
    assert len(job.parse(*(logs.maxtext(step, seconds=1.0) for step in range(10, 20)), writer="a ", now=25)) == 10


def test_who_is_silent_for_long_is_relieved() -> None:
    job = Job()
    job.parse(logs.maxtext(0, seconds=1.0), writer="a ")
    assert job.parse(logs.maxtext(1, seconds=1.0), writer="b ", now=30) == []
    assert short(job.parse(logs.maxtext(2, seconds=1.0), writer="b ", now=31), "step", "steps") == [(3, 2)]
    assert job.parse(logs.maxtext(2, seconds=1.0), writer="a ", now=32) == []


def test_what_was_written_before_the_last_step_is_no_rollback() -> None:
    """A copy of the log is found under another followed name, long after the job's last message."""
    job = Job()
    lines = [logs.titan(step, tps=1, stamp=f"2025-06-16 22:{step}:00,000") for step in (10, 20, 30)]
    assert len(job.parse(*lines, writer="a ")) == 3
    assert job.parse(*lines[:2], writer="b ", now=3600) == []
    assert job.parse(logs.titan(15, tps=1, stamp="2025-06-16 22:15:00,000"), writer="a ", now=3600) == []
    messages = job.parse(logs.titan(20, tps=1, stamp="2025-06-16 22:40:00,000"), writer="b ", now=3600)
    assert short(messages, "step", "restart") == [(20, True)]


def test_who_is_gone_is_relieved_at_once() -> None:
    job = Job()
    job.parse(logs.maxtext(0, seconds=1.0), writer="a ")
    job.progress.sequence.remove_writers("a ")
    assert short(job.parse(logs.maxtext(1, seconds=1.0), writer="b ", now=1), "step") == [(2,)]


def test_a_step_going_back_is_a_rollback() -> None:
    """A line every 10 steps: these were repeated."""
    job = Job()
    job.parse(logs.megatron(10, ms=1000.0), logs.megatron(20, ms=1000.0), logs.megatron(30, ms=1000.0))
    messages = job.parse(logs.megatron(20, ms=1000.0), now=40)
    assert short(messages, "step", "steps", "seconds", "restart") == [(20, 10, 10.0, True)]
    assert short(job.parse(logs.megatron(30, ms=1000.0), now=50), "step", "restart") == [(30, False)]


def test_a_rollback_is_known_by_the_stamps_too() -> None:
    job = Job()
    lines = [
        logs.titan(step, tps=1, stamp=f"2025-06-16 22:{minute}:00,000")
        for step, minute in [(30, 10), (40, 11), (30, 20)]
    ]
    assert short(job.parse(*lines), "step", "restart") == [(30, False), (40, False), (30, True)]


def test_a_restart_from_a_checkpoint() -> None:
    """Resumed at 500: the line of 510 covers 10 steps and is the first message after the restart."""
    job = Job()
    job.parse(logs.megatron(510, ms=1000.0), logs.megatron(520, ms=1000.0))
    messages = job.parse(
        " loading checkpoint from /c at iteration 500",
        "  successfully loaded checkpoint from /c [ t 1/1, p 1/1 ] at iteration 500",
        logs.megatron(510, ms=1000.0), logs.megatron(520, ms=1000.0),
    )  # fmt: skip
    assert short(messages, "phase", "step", "steps", "restart") == [
        ("restore", None, 0, False), ("startup", None, 0, False), ("compute", 510, 10, True), ("", 520, 10, False),
    ]  # fmt: skip


def test_a_restart_that_goes_on_from_the_last_step_is_one_too() -> None:
    job = Job()
    job.parse(logs.maxtext(9, seconds=1.0))
    messages = job.parse("restoring from this run's directory step 9", logs.maxtext(10, seconds=1.0))
    assert short(messages, "phase", "step", "steps", "restart") == [
        ("restore", None, 0, False),
        ("compute", 11, 1, True),
    ]


def test_eight_ranks_start_once() -> None:
    job = Job()
    at = "2025-06-16 22:30:00,000"
    start, step = (
        logs.stamped("Training starts at step 501.", at),
        logs.titan(501, tps=1, stamp="2025-06-16 22:30:01,000"),
    )
    messages = job.parse(f"[rank0]:{start}", f"[rank0]:{step}", f"[rank1]:{start}", f"[rank1]:{step}",
                    "[rank0]:" + logs.titan(510, tps=1, stamp="2025-06-16 22:30:11,000"))  # fmt: skip
    assert short(messages, "step", "steps", "restart") == [(501, 1, True), (510, 9, False)]


def test_a_run_that_begins_at_its_beginning_is_no_restart() -> None:
    job = Job()
    line = logs.stamped("Training starts at step 1.", "2025-06-16 22:30:00,000")
    assert short(job.parse(line, logs.titan(1, tps=1)), "restart", "steps") == [(False, 1)]


def test_the_first_line_of_an_unknown_run_speaks_of_one_step() -> None:
    (message,) = Job(fresh=False).parse(logs.megatron(500, ms=1000.0))
    assert (message.step, message.steps, message.seconds) == (500, 1, 1.0)
    (message,) = Job().parse(logs.megatron(500, ms=1000.0))
    assert (message.step, message.steps) == (500, 1)


def test_after_a_gap_a_line_speaks_of_one_step() -> None:
    job = Job()
    job.parse(logs.megatron(10, ms=1000.0), logs.megatron(20, ms=1000.0))
    job.progress.sequence.mark_gap()
    assert short(job.parse(logs.megatron(520, ms=1000.0)), "steps", "seconds") == [(1, 1.0)]
    assert short(job.parse(logs.megatron(530, ms=1000.0)), "steps", "seconds") == [(10, 10.0)]


def test_an_interval_of_more_than_a_day_is_none() -> None:
    job = Job()
    job.parse(logs.megatron(1, ms=1000.0))
    assert short(job.parse(logs.megatron(100_000, ms=1000.0)), "step", "steps", "seconds") == [(100_000, 0, 0.0)]


def test_what_was_written_before_is_the_base_of_what_comes() -> None:
    job = Job(fresh=False)
    job.parse(logs.titan(10, tps=1, stamp="2025-06-16 22:30:00,000"), writer="")
    job.progress.end_history()
    messages = job.parse(logs.titan(20, tps=7, stamp="2025-06-16 22:30:10,000"), now=3)
    assert short(messages, "steps", "seconds", "tokens", "restart") == [(10, 10.0, 70.0, False)]


def clock(seconds: int, *, hour: int = 1) -> str:
    """A timestamp of torchtitan's, `seconds` after the hour."""
    return f"2026-10-25 {hour + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02},000"


@pytest.mark.parametrize("change", [-3600, 3600])
def test_a_clock_change_neither_loses_nor_makes_time(change: int) -> None:
    """A line every 60 s; in the middle the clock is an hour slower or faster."""
    job, found = Job(), []
    for line in range(1, 9):
        stamp = clock(60 * line + (change if line > 4 else 0), hour=5)
        found += job.parse(logs.titan(10 * line, tps=1, stamp=stamp), now=60.0 * line + 0.4)
    assert short(found[1:], "steps", "seconds") == [(10, 60.0)] * 3 + [(10, approx(60.0))] * 4
    stamp = clock(60 * 10 + change, hour=5)
    assert short(job.parse(logs.titan(60, tps=1, stamp=stamp), now=600.4), "step", "restart") == [(60, True)]


def followed(*runs: tuple[float, int, int], seconds: float, last: int, write: Any) -> list[Message]:
    """Lines of trainings that write one log: (start, first step, writer); a line each `seconds`."""
    job, found = Job(), []
    lines = sorted(
        (start + seconds * step, first + step, writer) for start, first, writer in runs for step in range(1, last)
    )
    for at, step, writer in lines:
        found += job.parse(*write(step), now=at, writer=f"{writer} ")
    return found


def test_of_trainings_beside_each_other_in_one_file_nothing_is_told() -> None:
    """Eight trainings of 199 steps of 4 s, each 41 s later than the one before; the first rollbacks are believed."""
    runs = [(41.0 * run, 0, 0) for run in range(8)]
    found = followed(*runs, seconds=4.0, last=200, write=lambda step: [logs.maxtext(step, seconds=4.0)])
    assert 0 < len(found) < 40
    assert sum(message.steps for message in found) < 80


def test_trainings_beside_each_other_that_seldom_write_are_known_too() -> None:
    """Two of them, a line of 10 steps every 400 s, in one file."""
    runs = [(0.0, 40, 0), (150.0, 20, 0)]
    found = followed(*runs, seconds=400.0, last=30, write=lambda step: [logs.megatron(10 * step, ms=40_000.0)])
    assert len(found) < 8


@pytest.mark.parametrize(
    ("line", "steps", "run"),
    [
        (" loading checkpoint from /c at iteration 600", 10, ""),
        ("[after training is done] datetime: 2025-06-16 22:30:50 ", 1, "#1750113050"),
        ("", None, ""),
    ],
)
def test_after_trainings_beside_each_other_the_next_start_or_end_counts_again(
    line: str, steps: int | None, run: str
) -> None:
    job = Job()
    for step in range(200, 300, 10):
        for first, at in ((0, 0), (300, 5)):
            job.parse(logs.megatron(first + step, ms=1000.0, total=1000), now=step + at)
    found = job.parse(line, *(logs.megatron(step, ms=1000.0, total=1000) for step in (610, 620)), now=2000)
    counted = [message for message in found if message.step]
    if steps is None:
        assert counted == []
    else:
        assert short(counted, "run", "step", "steps") == [(run, 610, steps), (run, 620, 10)]


@pytest.mark.parametrize("back", [100, 200, 300])
def test_a_training_that_fails_again_and_again_is_one(back: int) -> None:
    """A line every 500 s, six until it fails, in a file without lines of the start."""
    job, found, step, now = Job(), [], 0, 0
    for _ in range(10):
        for _ in range(6):
            step, now = step + 100, now + 500
            found += job.parse(logs.megatron(step, ms=5000.0, total=10**6), now=now)
        step -= back
    assert (len(found), sum(message.restart for message in found)) == (60, 9)


def test_old_lines_whose_times_are_unknown_are_not_of_several_trainings() -> None:
    job = Job(fresh=False)
    job.parse(*(logs.megatron(step, ms=1000.0, total=1000) for step in (100, 200, 150, 250, 210, 310, 290, 390)))
    job.progress.end_history()
    assert short(job.parse(logs.megatron(490, ms=1000.0, total=1000), now=10), "step") == [(490,)]


def test_a_file_for_each_of_two_trainings_counts_the_steps_of_one() -> None:
    """A line every 100 s, the other file's 65 s later: the first is not silent, it writes seldom."""
    runs = [(0.0, 3, 0), (65.0, 0, 1)]
    found = followed(*runs, seconds=100.0, last=60, write=lambda step: [logs.megatron(10 * step, ms=10_000.0)])
    assert (sum(message.steps for message in found), any(message.restart for message in found)) == (10 * 62, False)


def test_restarts_without_a_word_are_no_trainings_beside_each_other() -> None:
    """MaxText begins at its first step again five times: each run is told."""
    job = Job()
    found = [
        message
        for run in range(6)
        for step in range(20)
        for message in job.parse(logs.maxtext(step, seconds=1.0), now=100.0 * run + step)
    ]
    assert (len(found), sum(message.restart for message in found)) == (120, 5)


def test_restarts_far_from_each_other_are_none_either() -> None:
    job, found = Job(), []
    for run in range(6):
        found += [
            message
            for step in range(200, 230)
            for message in job.parse(logs.maxtext(step, seconds=1.0), now=400.0 * run + step)
        ]
    assert (len(found), sum(message.restart for message in found)) == (180, 5)


@pytest.mark.parametrize(
    ("last", "end"),
    [(50, ""), (43, "[after training is done] datetime: 2025-06-16 22:30:50 ")],
)
def test_a_training_after_the_end_of_another_is_a_run_of_its_own(last: int, end: str) -> None:
    job = Job()
    found = []
    for run in range(3):
        steps = [logs.megatron(step, ms=1000.0, total=50) for step in (10, 20, 30, 40, last)]
        found += job.parse(*steps, end, now=100.0 * run)
    assert short(found, "run", "step", "steps", "restart") == [
        (run, step, step - before, False)
        for run in ("", "#100", "#200")
        for before, step in ((0, 10), (10, 20), (20, 30), (30, 40), (40, last))
    ]


@pytest.mark.parametrize("stamped", [True, False])
def test_a_run_keeps_its_name_and_no_other_gets_it_when_the_daemon_starts_again(stamped: bool) -> None:
    """Without timestamps a run that was there has no name: it goes on as the one that was reported last."""

    def training(run: int) -> list[str]:
        stamp = f" [2025-06-16 22:{run:02}:00] " if stamped else ""
        return [stamp + logs.megatron(step, ms=1000.0, total=50) for step in (10, 20, 30, 40, 50)]

    names = []
    for run in range(1, 5):
        job = Job(fresh=False)
        job.parse(*training(run - 1), now=100.0 * run)
        job.progress.end_history()
        names += [message.run for message in job.parse(*training(run), now=100.0 * run + 10.0)]
        again = Job(fresh=False)
        again.parse(*training(run - 1), now=100.0 * run + 20.0)
        again.parse(*training(run)[:3], now=100.0 * run + 30.0)
        again.progress.end_history()
        later = again.parse(*training(run)[3:], now=100.0 * run + 40.0)
        assert short(later, "run", "steps") == [(names[-1] if stamped else "", 10)] * 2
    assert "" not in names
    assert len(set(names)) == 4


def test_a_training_that_goes_on_beyond_its_end_is_the_same_run() -> None:
    job = Job()
    job.parse(logs.megatron(40, ms=1000.0, total=50), logs.megatron(50, ms=1000.0, total=50))
    more = [" loading checkpoint from /c at iteration 50", logs.megatron(60, ms=1000.0, total=100)]
    assert short(job.parse(*more, now=100), "run", "step", "restart") == [("", None, False), ("", 60, True)]


@pytest.mark.parametrize("total", [100, 80])
def test_each_training_of_the_trainer_is_a_run(total: int) -> None:
    """Two folds, with a bar each second, a loss every ten steps, and an evaluation in between."""
    job, now, found = Job(), 0.0, []
    for steps in (100, total):
        for step in range(steps + 1):
            lines = [logs.bar(step, steps)]
            lines += [logs.trainer(loss=1.0, epoch=0.1), logs.bar(step, steps)] if step and step % 10 == 0 else []
            now += 1
            found += job.parse(*lines, now=now)
        found += job.parse("{'train_runtime': 100.0, 'train_loss': 1.6, 'epoch': 1.0}", logs.bar(steps, steps), now=now)
        for step in range(1, 8):
            found += job.parse(logs.bar(step, 7), now=now + step)
        found += job.parse("{'eval_loss': 2.5, 'epoch': 0.02}", now=now + 8)
        now += 60
    second = next(message.run for message in found if message.run)
    for run, steps in (("", 100), (second, total)):
        of_run = [message for message in found if message.run == run and message.steps]
        assert (sum(message.steps for message in of_run), of_run[-1].step) == (steps, steps)
        assert sum(message.seconds for message in of_run) == approx(float(steps))
    assert not any(message.restart for message in found)
