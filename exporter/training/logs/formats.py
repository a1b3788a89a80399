"""Parses the log lines of Megatron-LM, torchtitan, MaxText, nanotron and Hugging Face's Trainer into `LogEvent`s.

A framework is added by one row of LOG_FORMATS and its functions. Prefixes of terminals, launchers and container
runtimes are removed first. Each format's sources and dialects are listed above its patterns.
"""

import calendar
import math
import re
from collections.abc import Callable, Iterable
from typing import Literal, cast

from msgspec import Struct

from exporter.core.model import NARROW_DTYPES

# Events and number parsing, common to all frameworks.


EventKind = Literal[
    "step",  # a training step was completed
    "bar",  # a progress bar is at `step` of `total`
    "metrics",  # loss or epoch, without a step
    "save",  # saving a checkpoint starts
    "saved",  # a checkpoint was saved
    "detached",  # a checkpoint is saved asynchronously
    "load",  # loading a checkpoint starts
    "loaded",  # a checkpoint was loaded
    "start",  # training starts, after `step`
    "validate",  # a validation starts
    "evaluated",  # a validation took `seconds`
    "validated",  # a validation returned `value`
    "end",  # the training is complete
    "facts",  # constants of the job
]
Fact = tuple[str, float | str]
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,3})?|\.\d{1,30}|nan|inf)", re.IGNORECASE)
_MOST_DIGITS = 15


class LogEvent(Struct, frozen=True):
    """The content of one log line. Fields are None where the line does not contain them."""

    kind: EventKind
    step: int | None = None
    """Number of the last completed step; a run's first step is 1."""
    total: int | None = None
    step_seconds: float | None = None
    """Seconds per step, averaged since the last line."""
    flops: float | None = None
    """Model FLOP/s per GPU."""
    hardware_flops: float | None = None
    """Model FLOP/s plus recomputation, per GPU."""
    mfu: float | None = None
    """0-1, relative to the peak that the log has printed (fact `peak`)."""
    tokens: float | None = None
    """Tokens per second and GPU."""
    samples: float | None = None
    """Samples per step, over all GPUs."""
    unpadded_tokens: float | None = None
    """Tokens per step without padding, over all GPUs."""
    loss: float | None = None
    epoch: float | None = None
    seconds: float | None = None
    """Duration of the completed save, load or validation."""
    value: float | None = None
    """Validation loss: lower is better."""
    facts: tuple[Fact, ...] = ()


def parse_number(text: str | None) -> float | None:
    """Parse a number, with or without thousands separators; None if the text is not one."""
    stripped = (text or "").strip()
    return float(stripped.replace(",", "")) if _NUMBER.fullmatch(stripped) else None


def parse_amount(text: str | None) -> float | None:
    """Parse a finite, non-negative number; None otherwise."""
    found = parse_number(text)
    return found if found is not None and 0.0 <= found < math.inf else None


def scaled(value: float | None, factor: float | None) -> float | None:
    """`value` times `factor`; None if one of them is missing."""
    return None if value is None or factor is None else value * factor


def parse_count(text: str | None) -> int | None:
    """Parse a count of up to 15 decimal digits; None otherwise."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and len(stripped) <= _MOST_DIGITS else None


def last_match(pattern: re.Pattern[str], text: str) -> tuple[re.Match[str], str] | None:
    """The last match and the text after it; an incomplete line of a killed process may precede it."""
    found = None
    for found in pattern.finditer(text):  # noqa: B007  only the last match is used
        pass
    return None if found is None else (found, text[found.end() :].rstrip())


# Removal of terminal colours, rank labels and timestamps that terminals, launchers and container runtimes add.


_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}\x07|[\x00-\x08\x0b-\x1f]")
"""Colours and cursor movements (ECMA-48), terminal titles, and control characters except tabs."""
_PREFIX = re.compile(
    r"\s*(?:"
    r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?:stdout|stderr) [FP] "  # container log files (CRI)
    r"|\[(?P<mpi>\d{1,6},\d{1,6})\]<std(?:out|err)>:? ?"  # mpirun --tag-output
    r"|(?P<srun>\d{1,6}): "  # srun --label
    r"|\[(?P<elastic>[A-Za-z_-]{0,32}\d{1,6})\]: ?"  # torchrun: [rank0]: or [default0]:
    r")"
)
_MOST_PREFIXES = 4
_STAMPED_CHARS = 160
"""A line's timestamp is searched in this many characters."""
_YEAR_FIRST = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_YEAR_LAST = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")


class LogLine(Struct, frozen=True):
    """A line of a log."""

    text: str
    """The line without prefixes."""
    writer: str = ""
    """Launcher's label of the process that wrote the line; empty without a label."""
    timestamp: float | None = None
    """Seconds in an unknown time zone, usable for differences only; None without a timestamp."""


def parse_line(raw: bytes) -> LogLine:
    """Decode a line and remove its prefixes; accepts any bytes."""
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
    if found := _YEAR_FIRST.search(text):
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


# Hugging Face's Trainer: metric dictionaries and tqdm's progress bar.
#
# Sources: `ProgressCallback` and `PrinterCallback` in src/transformers/trainer_callback.py of
# huggingface/transformers (numbers to 4.x, read at 55093b7; text in %.4g since 5), `_inner_training_loop` in trainer.py
# ("Continuing training from global step", "Saving model checkpoint to", "***** Running Evaluation *****", at log level
# info only; "train_runtime" in the last dictionary), tqdm's `format_meter` (tqdm/std.py). Dialects: {'loss': 1.2},
# {'loss': '1.2'}, nan, other trainers' keys (TRL) between.
#
# A dictionary contains no step; the bar does, on the standard error (2>&1). Evaluations, downloads and tokenizers have
# bars too. The Trainer's own bar is redrawn right after a dictionary with a loss (tqdm.write refreshes), which
# identifies its total. FLOPs are not printed; samples and tokens cover an unknown number of GPUs and are ignored.


_HUGGINGFACE_MARKERS = (
    b"'loss'", b"'eval_loss'", b"'train_runtime'", b"%|", b"Continuing training", b"Saving model", b"Running Eval",
)  # fmt: skip
_HUGGINGFACE_FIELDS = re.compile(r"\{('[^{}]{1,4000})\}")
_HUGGINGFACE_FIELD = re.compile(r"'([\w/.@-]{1,64})': '?([-+\w.]{1,40})'?(?:,|$)")
_HUGGINGFACE_BAR = re.compile(r"\s{0,200}\d{1,3}%\|[^|]{0,400}\| (\d{1,15})/(\d{1,15}) \[[\d:]{4,12}<[\d:?]{1,12}, ")
_HUGGINGFACE_START = re.compile(r"Continuing training from global step (\d{1,15})")
_HUGGINGFACE_SAVE = re.compile(r"Saving model checkpoint to \S")
_HUGGINGFACE_VALIDATE = re.compile(r"\*{5} Running Evaluation \*{5}")


def read_huggingface(text: str) -> LogEvent | None:
    """Parse a line of the Trainer; None if it is not one."""
    if found := _HUGGINGFACE_BAR.match(text):
        return LogEvent("bar", step=int(found[1]), total=int(found[2]))
    if found := _HUGGINGFACE_FIELDS.search(text):
        return _huggingface_dictionary(dict(_HUGGINGFACE_FIELD.findall(found[1])))
    if found := _HUGGINGFACE_START.search(text):
        return LogEvent("start", step=int(found[1]))
    if _HUGGINGFACE_SAVE.search(text):
        return LogEvent("save")
    return LogEvent("validate") if _HUGGINGFACE_VALIDATE.search(text) else None


def _huggingface_dictionary(fields: dict[str, str]) -> LogEvent | None:
    epoch = parse_number(fields.get("epoch"))
    if "eval_loss" in fields:
        return LogEvent("validated", value=parse_number(fields["eval_loss"]), epoch=epoch)
    if "train_runtime" in fields:
        return LogEvent("end")
    if "loss" not in fields or epoch is None:
        return None
    return LogEvent("metrics", loss=parse_number(fields["loss"]), epoch=epoch)


# MaxText, on GPUs.
#
# Sources, all AI-Hypercomputer/maxtext: `write_metrics` in MaxText/train.py (2023), the same in
# MaxText/metric_logger.py (2025; read at 12cfd47) and src/maxtext/common/metric_logger.py (2026; read at 000e6d8),
# checkpointing.py and max_utils.py's "Num_devices". Dialects: without and with "Tokens/s/device" and "total_weights"
# (2024), more losses after "loss" (2025), "[Rampup Batch Size Phase]" before a line without FLOPs, three forms of the
# evaluation's line, "Saved a checkpoint" and "saved a checkpoint", asynchronous saves. At the start pyconfig.py lists
# "Config param NAME: VALUE" (since 2025 also use_sft and use_dpo; in 2026 with values like QuantizationType.FP8).
#
# MaxText counts steps from 0: "completed step: 0" is the first completed step, 1 here. "total_weights" are the tokens
# with a weight in the loss, over all devices; the remaining tokens of a step are padding, or prompts in fine-tuning. In
# preference training (dpo_loss_fn in trainers/post_train/dpo) they are pairs of answers.


_MAXTEXT_MARKERS = (
    b"step", b"Num_devices", b"Config param use_sft", b"Config param use_dpo", b"Config param remat_policy",
    b"Config param quantization:",
)  # fmt: skip
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
_MAXTEXT_PARAMETER = re.compile(
    r"Config param (use_sft|use_dpo|remat_policy|quantization|steps): (?:\w{1,40}\.)?(\w{1,40})"
)
_MAXTEXT_PREFERENCES = {"dpo_loss", "reward_accuracy"}
_MAXTEXT_RECOMPUTE = {"none": "None", "full": "full", "minimal": "selective"}
"""By remat_policy; `minimal` keeps the products with weights. Others keep some of them: how much is not known."""


def read_maxtext(text: str) -> LogEvent | None:
    """Parse a line of MaxText; None if it is not one."""
    if step := last_match(_MAXTEXT_STEP, text):
        return _maxtext_step(int(step[0][1]) + 1, step[1])
    if found := _MAXTEXT_VALIDATED.search(text):
        return LogEvent("validated", value=parse_number(found[1]))
    if found := _MAXTEXT_SAVED.search(text):
        return LogEvent("saved", step=int(found[1]) + 1)
    if found := _MAXTEXT_LOAD.search(text):
        return LogEvent("load", step=int(found[1]) + 1)
    if found := _MAXTEXT_PARAMETER.search(text):
        return LogEvent("facts", facts=_maxtext_parameter(found[1], found[2]))
    found = _MAXTEXT_DEVICES.search(text)
    return LogEvent("facts", facts=(("world", float(found[1])),)) if found else None


def _maxtext_parameter(name: str, value: str) -> tuple[Fact, ...]:
    if name == "steps":
        return (("steps", float(value)),) if value.isdecimal() else ()
    if name == "remat_policy":
        return (("recompute", _MAXTEXT_RECOMPUTE.get(value.lower(), "")),)
    if name == "quantization":
        return tuple((narrow, value) for narrow in NARROW_DTYPES if narrow in value.lower())
    return ((name, value),)


def _maxtext_step(step: int, rest: str) -> LogEvent | None:
    parts = [_MAXTEXT_FIELD.fullmatch(part) for part in rest.split(", ")]
    fields = {part[1]: part[2] for part in parts if part}
    step_seconds = parse_amount(fields.get("seconds"))
    if step_seconds is None or "loss" not in fields or not all(parts):  # two lines mixed, or an incomplete line
        return None
    return LogEvent(
        "step",
        step=step,
        step_seconds=step_seconds,
        flops=scaled(parse_amount(fields.get("TFLOP/s/device")), 1e12),
        tokens=parse_amount(fields.get("Tokens/s/device")),
        unpadded_tokens=None if _MAXTEXT_PREFERENCES & fields.keys() else parse_amount(fields.get("total_weights")),
        loss=parse_number(fields.get("loss")),
    )


# Megatron-LM, and programs with its training loop (Megatron-DeepSpeed, MindSpeed).
#
# Sources, all NVIDIA/Megatron-LM: `training_log` and `evaluate_and_print_results` in
# megatron/training.py (2019 to core 0.5) and megatron/training/training.py (since; read at 001b00c), `save_checkpoint`
# and `load_checkpoint` in megatron/training/checkpointing.py, the arguments' table and "using world size" in
# arguments.py, micro-batches in num_microbatches_calculator.py. Dialects: lines without and with "[date time.us]",
# without and with "throughput per GPU" (--log-throughput, 2023) or Megatron-DeepSpeed's "TFLOPs" (recomputation
# counted), "(s)" for the time and "lm-loss" in forks, "skipped samples" and energy between, "saved checkpoint at" (to
# 2024) and "from" iteration, asynchronous saves.
#
# The last rank prints steps, rank 0 everything else, at last "[after training is done]". The time per iteration
# excludes checkpoints and validations. Since 2025 iteration 1 is printed too and is part of the first mean after it.
# Older versions do not print a loss that is not finite; their number of nan iterations indicates it. The padded size of
# the vocabulary is printed when the tokenizer is built, after the table.


_MEGATRON_MARKERS = (
    b"iteration", b"....", b"world size", b"batches to constant", b"evaluate .", b"[after training",
    b"padded vocab",
)  # fmt: skip
_MEGATRON_STEP = re.compile(r"iteration\s{1,10}(\d{1,15})/\s{0,10}(\d{1,15}) \|")
_MEGATRON_EVENT = re.compile(
    r"successfully saved checkpoint (?:at|from) iteration\s{1,10}(?P<saved>\d{1,15})"
    r"|scheduled an async checkpoint save at iteration\s{1,10}(?P<detached>\d{1,15})"
    r"|saving checkpoint at iteration\s{1,10}(?P<save>\d{1,15})"
    r"|successfully loaded checkpoint from .{1,2000} at iteration (?P<start>\d{1,15})"
    r"|loading (?:\w{1,20} )?checkpoint from .{1,2000} at iteration (?P<load>\d{1,15})"
)
"""The group that matches is named after the event's kind and contains its step."""
_MEGATRON_VALIDATED = re.compile(r"validation loss at (?!.{0,200}test).{0,200}?\| lm loss value: (\S{1,40})")
_MEGATRON_EVALUATED = re.compile(r"\s{0,8}evaluate \.{1,60}: \([\d.]{1,20}, ([\d.]{1,20})\)")
_MEGATRON_ARGUMENT = re.compile(r"\s{0,10}([a-z_0-9]{2,60}) \.{2,60} (\S{1,40})\s{0,4}")
_MEGATRON_WORLD = re.compile(r"using world size: (\d{1,7})")
_MEGATRON_DEGREE = re.compile(r"(tensor-model|pipeline-model|context|data)-parallel[ -]size: (\d{1,7})")
_MEGATRON_VOCABULARY = re.compile(r"> padded vocab \(size: \d{1,9}\) with \d{1,9} dummy tokens \(new size: (\d{1,9})\)")
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
    "num_layers": "layers",
    "num_attention_heads": "heads",
    "kv_channels": "head_size",
    "hidden_size": "hidden",
    "multi_latent_attention": "latent",
    "padded_vocab_size": "vocabulary",
    "fp4": "fp4",
    "fp8": "fp8",
    "fp16": "fp16",
    "bf16": "bf16",
}
_MEGATRON_DEGREES = {"tensor-model": "tensor", "pipeline-model": "pipeline", "context": "context", "data": "data"}
_MEGATRON_LOSSES = ("lm loss", "lm-loss", "loss", "lm_loss", "total loss")


def read_megatron(text: str) -> LogEvent | None:
    """Parse a line of Megatron-LM; None if it is not one."""
    if step := last_match(_MEGATRON_STEP, text):
        return _megatron_step(int(step[0][1]), int(step[0][2]), step[1])
    if "[after training is done]" in text:
        return LogEvent("end")
    return _megatron_event(text) or _megatron_validation(text) or _megatron_facts(text)


def _megatron_step(step: int, total: int, rest: str) -> LogEvent | None:
    fields = dict(part.partition(":")[::2] for part in map(str.strip, rest.split("|")))
    milliseconds = parse_amount(fields.get("elapsed time per iteration (ms)"))
    seconds = parse_amount(fields.get("elapsed time per iteration (s)"))
    step_seconds = seconds if milliseconds is None else milliseconds / 1e3
    if not rest.endswith("|") or step_seconds is None:
        return None
    loss = next((fields[key] for key in _MEGATRON_LOSSES if key in fields), None)
    broken = bool(parse_count(fields.get("number of nan iterations")))
    return LogEvent(
        "step",
        step=step,
        total=total,
        step_seconds=step_seconds,
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
    kind = cast("EventKind", found.lastgroup)
    return LogEvent(kind, step=int(found[kind]))


def _megatron_validation(text: str) -> LogEvent | None:
    if found := _MEGATRON_VALIDATED.search(text):
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
    if vocabulary := _MEGATRON_VOCABULARY.search(text):
        found.append(("vocabulary", float(vocabulary[1])))
    argument = _MEGATRON_ARGUMENT.fullmatch(text)
    if argument and argument[1] in _MEGATRON_ARGUMENTS:
        size = parse_amount(argument[2])
        found.append((_MEGATRON_ARGUMENTS[argument[1]], argument[2] if size is None else size))
    return LogEvent("facts", facts=tuple(found)) if found else None


# nanotron.
#
# Sources, all huggingface/nanotron: `train_step_logs` and `save_checkpoint` in
# src/nanotron/trainer.py, `LoggerWriter` in src/nanotron/logging (and brrr before it), issues 23 (2024) and 390 (2025)
# for whole lines. Dialects: plain numbers ("consumed_samples", 2023) or three digits and K, M, G, T;
# "elapsed_time_per_iteration_ms" or "time_per_iteration_ms" (2025); the fields in any order; "MM/DD/YYYY hh:mm:ss
# [INFO|DP=0|PP=0|TP=0|host]: " before.
#
# With three digits, values are accurate to 0.5 %. "global_batch_size" was samples and is tokens since 2025: not used.
# If not every iteration is printed, the time is that of the last iteration.


_NANOTRON_MARKERS = (b"iteration", b"aving checkpoint")
_NANOTRON_STEP = re.compile(r"iteration: (\d{1,15}) / (\d{1,15}) \| ")
_NANOTRON_START = re.compile(r"\bstart_iteration_step: (\d{1,15})\b")
_NANOTRON_SAVE = re.compile(r"\bSaving checkpoint at \S")
_NANOTRON_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def read_nanotron(text: str) -> LogEvent | None:
    """Parse a line of nanotron; None if it is not one."""
    if step := last_match(_NANOTRON_STEP, text):
        return _nanotron_step(int(step[0][1]), int(step[0][2]), step[1])
    if found := _NANOTRON_START.search(text):
        return LogEvent("start", step=int(found[1]))
    return LogEvent("save") if _NANOTRON_SAVE.search(text) else None


def _nanotron_step(step: int, total: int, rest: str) -> LogEvent | None:
    parts = [part.partition(": ") for part in rest.split(" | ")]
    fields = {key: value for key, _, value in parts}
    step_seconds = _nanotron_amount(fields.get("elapsed_time_per_iteration_ms") or fields.get("time_per_iteration_ms"))
    if step_seconds is None or "lm_loss" not in fields:
        return None
    return LogEvent(
        "step",
        step=step,
        total=total,
        step_seconds=step_seconds / 1e3,
        flops=scaled(_nanotron_amount(fields.get("model_tflops_per_gpu")), 1e12),
        hardware_flops=scaled(_nanotron_amount(fields.get("hardware_tflops_per_gpu")), 1e12),
        tokens=_nanotron_amount(fields.get("tokens_per_sec_per_gpu")),
        loss=parse_number(fields["lm_loss"]),
    )


def _nanotron_amount(text: str | None) -> float | None:
    """Parse a number with a unit: 11.5K is 11,500."""
    unit = _NANOTRON_UNITS.get((text or "")[-1:])
    return parse_amount(text) if unit is None else scaled(parse_amount((text or "")[:-1]), unit)


# torchtitan.
#
# Sources, all pytorch/torchtitan: train.py (2024; read at 0011fb9: "wps", no "tflops"), `log` and
# `log_validation` in torchtitan/components/metrics.py (since 2025; read at 00fbaaf: "tps", "tflops", "grad_norm"),
# torchtitan/components/checkpoint.py, logging.py's "[titan] date time,ms - root - INFO - ". Dialects: colours, "wps" or
# "tps" (both a second and GPU), with and without "grad_norm" and "tflops", "mfu: N/A", the checkpoint's lines with and
# without "(or staging if async is enabled)", also with no space before "in". `apply_ac` in
# distributed/activation_checkpoint.py (before: in parallelize_llama.py) names the mode; nothing is printed for none.
# Selective: every second product with weights, or, by default, every second layer, is recomputed. components/float8.py
# has "Float8 training active" (2024, and with a recipe) and "Float8 tensorwise scaled training active" (2025).
#
# Lines do not contain the length of their interval: it is the difference of the timestamps to the previous line, or to
# the end of a validation in between. Their rates are means over that interval, with the checkpoints in it. Without
# "tflops" the FLOPs are mfu times the peak that the program has printed. If several ranks print, those without the loss
# (other pipeline stages) print -1 or -2.


_TORCHTITAN_MARKERS = (b"step", b"heckpoint", b"Peak FLOPS", b"Float8 t", b"Training completed")
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
_TORCHTITAN_RECOMPUTE = re.compile(r"\bApplied (\w{1,40}) activation checkpointing to the model")
_TORCHTITAN_FLOAT8 = re.compile(r"\bFloat8 (?:tensorwise scaled )?training active\b")
_TORCHTITAN_END = re.compile(r"\bTraining completed\.?\s*$")
_TORCHTITAN_NO_LOSS = (-1.0, -2.0)


def read_torchtitan(text: str) -> LogEvent | None:
    """Parse a line of torchtitan; None if it is not one."""
    if step := last_match(_TORCHTITAN_STEP, text):
        return _torchtitan_step(int(step[0][1]), step[1])
    if found := _TORCHTITAN_VALIDATED.search(text):
        return LogEvent("validated", step=int(found[1]), value=parse_number(found[2]))
    if found := _TORCHTITAN_START.search(text):
        return LogEvent("start", step=max(0, int(found[1]) - 1))
    if _TORCHTITAN_END.search(text):
        return LogEvent("end")
    return _torchtitan_facts(text) or _torchtitan_checkpoint(text)


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


def _torchtitan_facts(text: str) -> LogEvent | None:
    if found := _TORCHTITAN_PEAK.search(text):
        return LogEvent("facts", facts=(("peak", float(found[1])),))
    if found := _TORCHTITAN_RECOMPUTE.search(text):
        return LogEvent("facts", facts=(("recompute", "half" if found[1] == "selective" else found[1]),))
    return LogEvent("facts", facts=(("fp8", "float8"),)) if _TORCHTITAN_FLOAT8.search(text) else None


def _torchtitan_checkpoint(text: str) -> LogEvent | None:
    if saved := _TORCHTITAN_SAVED.search(text):
        return LogEvent("saved", seconds=parse_amount(saved[1] or saved[2]))
    if _TORCHTITAN_SAVE.search(text):
        return LogEvent("save", step=parse_count(text.rstrip(". ").rpartition("step ")[2]))
    if loaded := _TORCHTITAN_LOADED.search(text):
        return LogEvent("loaded", seconds=parse_amount(loaded[1]))
    return LogEvent("load") if _TORCHTITAN_LOAD.search(text) else None


# The supported frameworks, and the detection of a log's framework.


class LogFormat(Struct, frozen=True):
    """The log format of one framework."""

    markers: tuple[bytes, ...]
    """Every relevant line contains one of these."""
    read: Callable[[str], LogEvent | None]
    """Parses a line; returns None if it is not one of the framework's."""


LOG_FORMATS = {
    "megatron": LogFormat(_MEGATRON_MARKERS, read_megatron),
    "torchtitan": LogFormat(_TORCHTITAN_MARKERS, read_torchtitan),
    "maxtext": LogFormat(_MAXTEXT_MARKERS, read_maxtext),
    "nanotron": LogFormat(_NANOTRON_MARKERS, read_nanotron),
    "huggingface": LogFormat(_HUGGINGFACE_MARKERS, read_huggingface),
}
_DECIDING_KINDS = ("step", "metrics")
"""Events whose line is unique to one framework."""


class LineReader:
    """Parses the lines of one file; with `auto`, the first line of a `_DECIDING_KINDS` event selects the framework."""

    def __init__(self, name: str = "auto") -> None:
        self._auto = name == "auto"
        self._choose(LOG_FORMATS if self._auto else (name,))

    def _choose(self, names: Iterable[str]) -> None:
        self._formats = {name: LOG_FORMATS[name] for name in names}
        self._markers = tuple({marker for log_format in self._formats.values() for marker in log_format.markers})

    def may_match(self, raw: bytes) -> bool:
        """Whether the line contains a marker of a possible framework."""
        return any(marker in raw for marker in self._markers)

    def read(self, text: str) -> LogEvent | None:
        """Parse a line; None if it contains no event."""
        for name, log_format in self._formats.items():
            event = log_format.read(text)
            if event is not None:
                if self._auto and len(self._formats) > 1 and event.kind in _DECIDING_KINDS:
                    self._choose((name,))
                return event
        return None

    def reset(self) -> None:
        """Restart the detection: the file was replaced."""
        if self._auto:
            self._choose(LOG_FORMATS)
