"""Parses the log lines of Megatron-LM, torchtitan, MaxText, nanotron and Hugging Face's Trainer into `LogEvent`s.

Owns the registry of formats: one row and two functions add a framework. Prefixes of terminals, launchers and container
runtimes are removed first. Each format's sources and dialects are listed above its patterns.
"""

import calendar
import math
import re
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

# What a line of a training log says, in words that all frameworks share.
#
# Owns those words and the reading of numbers. Refuses to know any framework.


EventKind = Literal[
    "step",  # steps ended
    "bar",  # a progress bar stands at `step` of `total`
    "words",  # loss or epoch, without a step
    "save",  # a checkpoint begins to be written
    "saved",  # one was
    "detached",  # one is being written beside the training
    "load",  # a checkpoint begins to be read
    "loaded",
    "start",  # training begins, after `step`
    "validate",  # a validation begins
    "evaluated",  # one has lasted that long
    "validated",  # one has given a value
    "facts",
]
Fact = tuple[str, float | str]
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,3})?|\.\d{1,30}|nan|inf)", re.IGNORECASE)
_MOST_DIGITS = 15


class LogEvent(Struct, frozen=True):
    """One line. None: it does not say."""

    kind: EventKind
    step: int | None = None
    """The last that ended, the first step of a run being 1."""
    total: int | None = None
    step_seconds: float | None = None
    """Seconds of one step, a mean over those since the last line."""
    flops: float | None = None
    """Model FLOP/s of one GPU."""
    hardware_flops: float | None = None
    """The same with recomputation."""
    mfu: float | None = None
    """0-1, of the peak that the log has told as a fact."""
    tokens: float | None = None
    """A second, of one GPU."""
    samples: float | None = None
    """Of one step, of all GPUs."""
    unpadded_tokens: float | None = None
    """Tokens of one step that are no padding, of all GPUs."""
    loss: float | None = None
    epoch: float | None = None
    seconds: float | None = None
    """Seconds of what has ended."""
    value: float | None = None
    """Of a validation: less is better."""
    facts: tuple[Fact, ...] = ()


def parse_number(text: str | None) -> float | None:
    """The number that the text is, with commas between thousands or without; None where it is none."""
    stripped = (text or "").strip()
    return float(stripped.replace(",", "")) if _NUMBER.fullmatch(stripped) else None


def parse_amount(text: str | None) -> float | None:
    """The same, finite and not negative."""
    found = parse_number(text)
    return found if found is not None and 0.0 <= found < math.inf else None


def scaled(value: float | None, factor: float) -> float | None:
    """Their product; None where there is no value."""
    return None if value is None else value * factor


def parse_count(text: str | None) -> int | None:
    """A count: decimal digits alone, no more than a counter of steps has."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and len(stripped) <= _MOST_DIGITS else None


def last_match(pattern: re.Pattern[str], text: str) -> tuple[re.Match[str], str] | None:
    """Its last match and what follows: before it may be a line that was cut, when its writer was killed."""
    found = None
    for found in pattern.finditer(text):  # noqa: B007  the last is wanted
        pass
    return None if found is None else (found, text[found.end() :].rstrip())


# One line of a log, without what terminals, launchers and container runtimes put around it.
#
# Owns colours, the names of ranks and the stamps of time before a line. Refuses to know what the line says.


_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}\x07|[\x00-\x08\x0b-\x1f]")
"""Colours and cursor movements (ECMA-48), titles of terminals, and control characters but tabs."""
_PREFIX = re.compile(
    r"\s*(?:"
    r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?:stdout|stderr) [FP] "  # kubelet's files of containers (CRI)
    r"|\[(?P<mpi>\d{1,6},\d{1,6})\]<std(?:out|err)>:? ?"  # mpirun --tag-output
    r"|(?P<srun>\d{1,6}): "  # srun --label
    r"|\[(?P<elastic>[A-Za-z_-]{0,32}\d{1,6})\]: ?"  # torchrun: [rank0]: or [default0]:
    r")"
)
_MOST_PREFIXES = 4
_STAMPED_CHARS = 160
"""A line's time is in its first characters."""
_YEAR_FIRST = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_YEAR_LAST = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")


class LogLine(Struct, frozen=True):
    """A line of a log."""

    text: str
    """What the program wrote."""
    writer: str = ""
    """What a launcher calls the process that wrote it; empty: the line does not say."""
    timestamp: float | None = None
    """Seconds by the line's own clock, of an unknown time zone: good for differences alone."""


def parse_line(raw: bytes) -> LogLine:
    """Any bytes are a line."""
    whole = _CONTROL.sub("", raw.decode(errors="replace"))
    text, writer = whole, ""
    for _ in range(_MOST_PREFIXES):
        found = _PREFIX.match(text)
        if found is None:
            break
        text = text[found.end() :]
        writer += next((f"{name}:{value} " for name, value in found.groupdict().items() if value), "")
    return LogLine(text, writer, _timestamp(whole[:_STAMPED_CHARS]))


def _timestamp(text: str) -> float | None:
    found = _YEAR_FIRST.search(text)
    if found:
        year, month, day, *clock, part = found.groups(default="0")
    else:
        found = _YEAR_LAST.search(text)
        if not found:
            return None
        month, day, year, *clock = found.groups()
        part = "0"
    try:
        whole = calendar.timegm((int(year), int(month), int(day), *map(int, clock)))
    except ValueError:
        return None
    return whole + float(f"0.{part}")


# What Hugging Face's Trainer prints: its dictionaries, and tqdm's bar.
#
# Owns their formats. Sources: `ProgressCallback` and `PrinterCallback` in src/transformers/trainer_callback.py of
# huggingface/transformers (numbers to 4.x, read at 55093b7; text in %.4g since 5), `_inner_training_loop` in trainer.py
# ("Continuing training from global step", "Saving model checkpoint to", "***** Running Evaluation *****", at log level
# info only), tqdm's `format_meter` (tqdm/std.py). Dialects: {'loss': 1.2}, {'loss': '1.2'}, nan, other trainers' keys
# (TRL) between.
#
# A dictionary names no step: the bar does, in the standard error (2>&1). Evaluations, downloads and tokenizers have
# bars too. The Trainer's is drawn anew right after it wrote a dictionary with a loss (tqdm.write refreshes), and that
# is how its total is known. Nothing tells FLOPs; samples and tokens are of an unknown number of GPUs and are left
# alone.


_HUGGINGFACE_MARKERS = (b"'loss'", b"'eval_loss'", b"%|", b"Continuing training", b"Saving model", b"Running Eval")
_HUGGINGFACE_FIELDS = re.compile(r"\{('[^{}]{1,4000})\}")
_HUGGINGFACE_FIELD = re.compile(r"'([\w/.@-]{1,64})': '?([-+\w.]{1,40})'?(?:,|$)")
_HUGGINGFACE_BAR = re.compile(r"\s{0,200}\d{1,3}%\|[^|]{0,400}\| (\d{1,15})/(\d{1,15}) \[[\d:]{4,12}<[\d:?]{1,12}, ")
_HUGGINGFACE_START = re.compile(r"Continuing training from global step (\d{1,15})")
_HUGGINGFACE_SAVE = re.compile(r"Saving model checkpoint to \S")
_HUGGINGFACE_VALIDATE = re.compile(r"\*{5} Running Evaluation \*{5}")


def read_huggingface(text: str) -> LogEvent | None:
    """What the line says; None where it is none of the Trainer's."""
    found = _HUGGINGFACE_BAR.match(text)
    if found:
        return LogEvent("bar", step=int(found[1]), total=int(found[2]))
    found = _HUGGINGFACE_FIELDS.search(text)
    if found:
        return _huggingface_dictionary(dict(_HUGGINGFACE_FIELD.findall(found[1])))
    found = _HUGGINGFACE_START.search(text)
    if found:
        return LogEvent("start", step=int(found[1]))
    if _HUGGINGFACE_SAVE.search(text):
        return LogEvent("save")
    return LogEvent("validate") if _HUGGINGFACE_VALIDATE.search(text) else None


def _huggingface_dictionary(fields: dict[str, str]) -> LogEvent | None:
    epoch = parse_number(fields.get("epoch"))
    if "eval_loss" in fields:
        return LogEvent("validated", value=parse_number(fields["eval_loss"]), epoch=epoch)
    if "loss" not in fields or epoch is None:
        return None
    return LogEvent("words", loss=parse_number(fields["loss"]), epoch=epoch)


# MaxText's lines, on GPUs.
#
# Owns their formats. Sources, all AI-Hypercomputer/maxtext: `write_metrics` in MaxText/train.py (2023), the same in
# MaxText/metric_logger.py (2025; read at 12cfd47) and src/maxtext/common/metric_logger.py (2026; read at 000e6d8),
# checkpointing.py and max_utils.py's "Num_devices". Dialects: without and with "Tokens/s/device" and "total_weights"
# (2024), more losses after "loss" (2025), "[Rampup Batch Size Phase]" before a line without FLOPs, three forms of the
# evaluation's line, "Saved a checkpoint" and "saved a checkpoint", asynchronous saves.
#
# Steps are counted from 0 there: "completed step: 0" is the first that ended, and is 1 here. "total_weights" are the
# tokens that have a weight in the loss, of all devices: what is left of a step's tokens is padding.


_MAXTEXT_MARKERS = (b"step", b"Num_devices")
_MAXTEXT_STEP = re.compile(r"completed step: (\d{1,15}), ")
_MAXTEXT_FIELD = re.compile(r"([\w/ -]{1,40}): (\S{1,40})")
_MAXTEXT_VALIDATED = re.compile(
    r"(?:eval metrics after step: |Completed eval after train step |average loss after step=)\d{1,15}[,:]"
    r" (?:eval_)?loss=([^,\s]{1,40}),"
)
_MAXTEXT_SAVED = re.compile(
    r"(?:[Ss]aved a checkpoint at step|Started an asynchronous checkpoint save for step) (\d{1,15})"
)
_MAXTEXT_LOAD = re.compile(r"restoring from this run's directory (?:latest )?step\s{1,20}(\d{1,15})")
_MAXTEXT_DEVICES = re.compile(r"Num_devices: (\d{1,7}), shape")


def read_maxtext(text: str) -> LogEvent | None:
    """What the line says; None where it is none of MaxText's."""
    step = last_match(_MAXTEXT_STEP, text)
    if step:
        return _maxtext_step(int(step[0][1]) + 1, step[1])
    found = _MAXTEXT_VALIDATED.search(text)
    if found:
        return LogEvent("validated", value=parse_number(found[1]))
    found = _MAXTEXT_SAVED.search(text)
    if found:
        return LogEvent("saved", step=int(found[1]) + 1)
    found = _MAXTEXT_LOAD.search(text)
    if found:
        return LogEvent("load", step=int(found[1]) + 1)
    found = _MAXTEXT_DEVICES.search(text)
    return LogEvent("facts", facts=(("world", float(found[1])),)) if found else None


def _maxtext_step(step: int, rest: str) -> LogEvent | None:
    parts = [_MAXTEXT_FIELD.fullmatch(part) for part in rest.split(", ")]
    fields = {part[1]: part[2] for part in parts if part}
    step_seconds = parse_amount(fields.get("seconds"))
    if step_seconds is None or "loss" not in fields or not all(parts):  # two lines in one, or a cut one
        return None
    return LogEvent(
        "step",
        step=step,
        step_seconds=step_seconds,
        flops=scaled(parse_amount(fields.get("TFLOP/s/device")), 1e12),
        tokens=parse_amount(fields.get("Tokens/s/device")),
        unpadded_tokens=parse_amount(fields.get("total_weights")),
        loss=parse_number(fields.get("loss")),
    )


# Megatron-LM's lines, and those of programs that have kept its training loop (Megatron-DeepSpeed, MindSpeed).
#
# Owns their formats. Sources, all NVIDIA/Megatron-LM: `training_log` and `evaluate_and_print_results` in
# megatron/training.py (2019 to core 0.5) and megatron/training/training.py (since; read at 001b00c), `save_checkpoint`
# and `load_checkpoint` in megatron/training/checkpointing.py, the arguments' table and "using world size" in
# arguments.py, micro-batches in num_microbatches_calculator.py. Dialects: lines without and with "[date time.us]",
# without and with "throughput per GPU" (--log-throughput, 2023) or Megatron-DeepSpeed's "TFLOPs" (recomputation
# counted), "skipped samples" and energy between, "saved checkpoint at" (to 2024) and "from" iteration, asynchronous
# saves.
#
# The last rank prints steps, rank 0 all else. The time of an iteration leaves checkpoints and validations out. Since
# 2025 iteration 1 is printed too and is part of the first mean after it. A loss that is not finite is not printed by
# the older ones: their count of nan iterations tells it.


_MEGATRON_MARKERS = (b"iteration", b"....", b"world size", b"batches to constant", b"evaluate .")
_MEGATRON_STEP = re.compile(r"iteration\s{1,10}(\d{1,15})/\s{0,10}(\d{1,15}) \|")
_MEGATRON_EVENT = re.compile(
    r"(?P<saved>successfully saved checkpoint (?:at|from) iteration)\s{1,10}(?P<n1>\d{1,15})"
    r"|(?P<detached>scheduled an async checkpoint save at iteration)\s{1,10}(?P<n2>\d{1,15})"
    r"|(?P<save>saving checkpoint at iteration)\s{1,10}(?P<n3>\d{1,15})"
    r"|(?P<start>successfully loaded checkpoint from) .{1,2000} at iteration (?P<n4>\d{1,15})"
    r"|(?P<load>loading (?:\w{1,20} )?checkpoint from) .{1,2000} at iteration (?P<n5>\d{1,15})"
)
_MEGATRON_VALIDATED = re.compile(r"validation loss at (?!.{0,200}test).{0,200}?\| lm loss value: (\S{1,40})")
_MEGATRON_EVALUATED = re.compile(r"\s{0,8}evaluate \.{1,60}: \([\d.]{1,20}, ([\d.]{1,20})\)")
_MEGATRON_ARGUMENT = re.compile(r"\s{0,10}([a-z_0-9]{2,60}) \.{2,60} (\S{1,40})\s{0,4}")
_MEGATRON_WORLD = re.compile(r"using world size: (\d{1,7})")
_MEGATRON_DEGREE = re.compile(r"(tensor-model|pipeline-model|context|data)-parallel[ -]size: (\d{1,7})")
_MEGATRON_MICROBATCHES = re.compile(r"setting number of micro-?batches to constant (\d{1,7})")
_MEGATRON_ARGUMENTS = {
    "world_size": "world",
    "seq_length": "sequence",
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "expert_model_parallel_size": "expert",
    "virtual_pipeline_model_parallel_size": "chunks",
    "recompute_granularity": "recompute",
    "fp8": "fp8",
    "fp16": "fp16",
    "bf16": "bf16",
}
_MEGATRON_DEGREES = {"tensor-model": "tensor", "pipeline-model": "pipeline", "context": "context", "data": "data"}
_MEGATRON_LOSSES = ("lm loss", "loss", "lm_loss", "total loss")


def read_megatron(text: str) -> LogEvent | None:
    """What the line says; None where it is none of Megatron's."""
    step = last_match(_MEGATRON_STEP, text)
    if step:
        return _megatron_step(int(step[0][1]), step[1])
    return _megatron_event(text) or _megatron_validation(text) or _megatron_facts(text)


def _megatron_step(step: int, rest: str) -> LogEvent | None:
    fields = dict(part.partition(":")[::2] for part in map(str.strip, rest.split("|")))
    step_seconds = parse_amount(fields.get("elapsed time per iteration (ms)"))
    if not rest.endswith("|") or step_seconds is None:
        return None
    loss = next((fields[key] for key in _MEGATRON_LOSSES if key in fields), None)
    broken = bool(parse_count(fields.get("number of nan iterations")))
    return LogEvent(
        "step",
        step=step,
        step_seconds=step_seconds / 1e3,
        flops=scaled(parse_amount(fields.get("throughput per GPU (TFLOP/s/GPU)")), 1e12),
        hardware_flops=scaled(parse_amount(fields.get("TFLOPs")), 1e12),
        tokens=parse_amount(fields.get("tokens per gpu per second (tgs)")),
        samples=parse_amount(fields.get("global batch size")),
        loss=math.nan if loss is None and broken else parse_number(loss),
    )


def _megatron_event(text: str) -> LogEvent | None:
    found = _MEGATRON_EVENT.search(text)
    if found is None:
        return None
    step = int(next(n for name, n in found.groupdict().items() if name[0] == "n" and n))
    if found["saved"]:
        return LogEvent("saved", step)
    if found["detached"]:
        return LogEvent("detached", step)
    if found["save"]:
        return LogEvent("save", step)
    return LogEvent("start" if found["start"] else "load", step)


def _megatron_validation(text: str) -> LogEvent | None:
    found = _MEGATRON_VALIDATED.search(text)
    if found:
        return LogEvent("validated", value=parse_number(found[1]))
    found = _MEGATRON_EVALUATED.fullmatch(text.rstrip())
    return LogEvent("evaluated", seconds=scaled(parse_amount(found[1]), 1e-3)) if found else None


def _megatron_facts(text: str) -> LogEvent | None:
    found: list[Fact] = []
    world, microbatches = _MEGATRON_WORLD.search(text), _MEGATRON_MICROBATCHES.search(text)
    if world:
        found.append(("world", float(world[1])))
        found += [(_MEGATRON_DEGREES[name], float(size)) for name, size in _MEGATRON_DEGREE.findall(text)]
    if microbatches:
        found.append(("microbatches", float(microbatches[1])))
    argument = _MEGATRON_ARGUMENT.fullmatch(text)
    if argument and argument[1] in _MEGATRON_ARGUMENTS:
        size = parse_amount(argument[2])
        found.append((_MEGATRON_ARGUMENTS[argument[1]], argument[2] if size is None else size))
    return LogEvent("facts", facts=tuple(found)) if found else None


# nanotron's lines.
#
# Owns their formats. Sources, all huggingface/nanotron: `train_step_logs` and `save_checkpoint` in
# src/nanotron/trainer.py, `LoggerWriter` in src/nanotron/logging (and brrr before it), issues 23 (2024) and 390 (2025)
# for whole lines. Dialects: plain numbers ("consumed_samples", 2023) or three digits and K, M, G, T;
# "elapsed_time_per_iteration_ms" or "time_per_iteration_ms" (2025); the fields in any order; "MM/DD/YYYY hh:mm:ss
# [INFO|DP=0|PP=0|TP=0|host]: " before.
#
# Three digits: figures are within 0.5 %. "global_batch_size" has been samples and, since 2025, tokens: it is not used.
# Where not every iteration is printed the time is that of the last one.


_NANOTRON_MARKERS = (b"iteration", b"aving checkpoint")
_NANOTRON_STEP = re.compile(r"iteration: (\d{1,15}) / \d{1,15} \| ")
_NANOTRON_START = re.compile(r"\bstart_iteration_step: (\d{1,15})\b")
_NANOTRON_SAVE = re.compile(r"\bSaving checkpoint at \S")
_NANOTRON_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def read_nanotron(text: str) -> LogEvent | None:
    """What the line says; None where it is none of nanotron's."""
    step = last_match(_NANOTRON_STEP, text)
    if step:
        return _nanotron_step(int(step[0][1]), step[1])
    found = _NANOTRON_START.search(text)
    if found:
        return LogEvent("start", step=int(found[1]))
    return LogEvent("save") if _NANOTRON_SAVE.search(text) else None


def _nanotron_step(step: int, rest: str) -> LogEvent | None:
    parts = [part.partition(": ") for part in rest.split(" | ")]
    fields = {key: value for key, _, value in parts}
    step_seconds = _nanotron_amount(fields.get("elapsed_time_per_iteration_ms") or fields.get("time_per_iteration_ms"))
    if step_seconds is None or "lm_loss" not in fields:
        return None
    return LogEvent(
        "step",
        step=step,
        step_seconds=step_seconds / 1e3,
        flops=scaled(_nanotron_amount(fields.get("model_tflops_per_gpu")), 1e12),
        hardware_flops=scaled(_nanotron_amount(fields.get("hardware_tflops_per_gpu")), 1e12),
        tokens=_nanotron_amount(fields.get("tokens_per_sec_per_gpu")),
        loss=parse_number(fields["lm_loss"]),
    )


def _nanotron_amount(text: str | None) -> float | None:
    """11.5K is 11,500."""
    unit = _NANOTRON_UNITS.get((text or "")[-1:])
    return parse_amount(text) if unit is None else scaled(parse_amount((text or "")[:-1]), unit)


# torchtitan's lines.
#
# Owns their formats. Sources, all pytorch/torchtitan: train.py (2024; read at 0011fb9: "wps", no "tflops"), `log` and
# `log_validation` in torchtitan/components/metrics.py (since 2025; read at 00fbaaf: "tps", "tflops", "grad_norm"),
# torchtitan/components/checkpoint.py, logging.py's "[titan] date time,ms - root - INFO - ". Dialects: colours, "wps" or
# "tps" (both a second and GPU), with and without "grad_norm" and "tflops", "mfu: N/A", the checkpoint's lines with and
# without "(or staging if async is enabled)", also with no space before "in".
#
# No line says how long its interval was: that is from the line before, by the stamps. It is since the end of a
# validation where one came between. Without "tflops" the FLOPs are mfu times the peak that the program itself has
# told. Where not only one rank prints, those without the loss (other pipeline stages) give -1 or -2.


_TORCHTITAN_MARKERS = (b"step", b"heckpoint", b"Peak FLOPS")
_TORCHTITAN_STEP = re.compile(r"(?<!validate )\bstep:\s{1,10}(\d{1,15})(?:/\d{1,15} = [\d.]{1,9}%)?  ")
_TORCHTITAN_FIELD = re.compile(r"\b(loss|tps|wps|tflops):\s{1,10}(\S{1,40})")
_TORCHTITAN_MFU = re.compile(r"\bmfu: {1,4}(?:([\d.]{1,12})%|N/A)")
_TORCHTITAN_VALIDATED = re.compile(r"\bvalidate step:\s{1,10}(\d{1,15})  loss:\s{1,10}(\S{1,40})  .{1,200}[tw]ps: ")
_TORCHTITAN_SAVED = re.compile(
    r"Finished saving the checkpoint.{0,60}?in ([\d.]{1,12}) seconds|Last step checkpoint completed in ([\d.]{1,12})s"
)
_TORCHTITAN_SAVE = re.compile(r"Saving (?:the|a (?:full|model[\w ]{0,20}?)) ?checkpoint")
_TORCHTITAN_LOADED = re.compile(r"Finished loading the checkpoint in ([\d.]{1,12}) seconds")
_TORCHTITAN_LOAD = re.compile(r"Loading the checkpoint (?:at step|from )")
_TORCHTITAN_START = re.compile(r"Training starts at step (\d{1,15})\b")
_TORCHTITAN_PEAK = re.compile(r"Peak FLOPS used for computing MFU: ([\d.]{1,12}e\+?\d{1,3})")
_TORCHTITAN_NO_LOSS = (-1.0, -2.0)


def read_torchtitan(text: str) -> LogEvent | None:
    """What the line says; None where it is none of torchtitan's."""
    step = last_match(_TORCHTITAN_STEP, text)
    if step:
        return _torchtitan_step(int(step[0][1]), step[1])
    found = _TORCHTITAN_VALIDATED.search(text)
    if found:
        return LogEvent("validated", step=int(found[1]), value=parse_number(found[2]))
    found = _TORCHTITAN_START.search(text)
    if found:
        return LogEvent("start", step=max(0, int(found[1]) - 1))
    found = _TORCHTITAN_PEAK.search(text)
    if found:
        return LogEvent("facts", facts=(("peak", float(found[1])),))
    return _torchtitan_checkpoint(text)


def _torchtitan_step(step: int, rest: str) -> LogEvent | None:
    fields, mfu = dict(_TORCHTITAN_FIELD.findall(rest)), _TORCHTITAN_MFU.search(rest)
    tokens = parse_amount(fields.get("tps") or fields.get("wps"))
    if mfu is None or tokens is None:
        return None
    loss = parse_number(fields.get("loss"))
    return LogEvent(
        "step",
        step=step,
        tokens=tokens,
        flops=scaled(parse_amount(fields.get("tflops")), 1e12),
        mfu=scaled(parse_amount(mfu[1]), 0.01),
        loss=None if loss in _TORCHTITAN_NO_LOSS else loss,
    )


def _torchtitan_checkpoint(text: str) -> LogEvent | None:
    saved = _TORCHTITAN_SAVED.search(text)
    if saved:
        return LogEvent("saved", seconds=parse_amount(saved[1] or saved[2]))
    if _TORCHTITAN_SAVE.search(text):
        return LogEvent("save", step=parse_count(text.rstrip(". ").rpartition("step ")[2]))
    loaded = _TORCHTITAN_LOADED.search(text)
    if loaded:
        return LogEvent("loaded", seconds=parse_amount(loaded[1]))
    return LogEvent("load") if _TORCHTITAN_LOAD.search(text) else None


# The table of frameworks whose logs can be followed, and how one is told by its lines.
#
# Owns the choice. One row and one module add a framework.


class LogFormat(Struct, frozen=True):
    """How the lines of one framework are read."""

    markers: tuple[bytes, ...]
    """A line that has none of these is none of its."""
    read: Callable[[str], LogEvent | None]


LOG_FORMATS = {
    "megatron": LogFormat(_MEGATRON_MARKERS, read_megatron),
    "torchtitan": LogFormat(_TORCHTITAN_MARKERS, read_torchtitan),
    "maxtext": LogFormat(_MAXTEXT_MARKERS, read_maxtext),
    "nanotron": LogFormat(_NANOTRON_MARKERS, read_nanotron),
    "huggingface": LogFormat(_HUGGINGFACE_MARKERS, read_huggingface),
}
_DECIDING_KINDS = ("step", "words")
"""What only one of them would say so."""


class LineReader:
    """Reads the lines of one file; with `auto` the first line that only one framework writes decides for good."""

    def __init__(self, name: str = "auto") -> None:
        self._auto = name == "auto"
        self._choose(LOG_FORMATS if self._auto else (name,))

    def _choose(self, names: Iterable[str]) -> None:
        self._formats = {name: LOG_FORMATS[name] for name in names}
        self._markers = tuple({marker for log_format in self._formats.values() for marker in log_format.markers})

    def may_match(self, raw: bytes) -> bool:
        """Whether the line is worth a closer look."""
        return any(marker in raw for marker in self._markers)

    def read(self, text: str) -> LogEvent | None:
        """What the line says."""
        for name, log_format in self._formats.items():
            event = log_format.read(text)
            if event is not None:
                if self._auto and len(self._formats) > 1 and event.kind in _DECIDING_KINDS:
                    self._choose((name,))
                return event
        return None

    def reset(self) -> None:
        """The file is another one now."""
        if self._auto:
            self._choose(LOG_FORMATS)
