"""Megatron-LM's lines, and those of programs that have kept its training loop (Megatron-DeepSpeed, MindSpeed).

Owns their formats. Sources, all NVIDIA/Megatron-LM: `training_log` and `evaluate_and_print_results` in
megatron/training.py (2019 to core 0.5) and megatron/training/training.py (since; read at 001b00c), `save_checkpoint`
and `load_checkpoint` in megatron/training/checkpointing.py, the arguments' table and "using world size" in
arguments.py, micro-batches in num_microbatches_calculator.py. Dialects: lines without and with "[date time.us]",
without and with "throughput per GPU" (--log-throughput, 2023) or Megatron-DeepSpeed's "TFLOPs" (recomputation
counted), "skipped samples" and energy between, "saved checkpoint at" (to 2024) and "from" iteration, asynchronous
saves.

The last rank prints steps, rank 0 all else. The time of an iteration leaves checkpoints and validations out. Since
2025 iteration 1 is printed too and is part of the first mean after it. A loss that is not finite is not printed by
the older ones: their count of nan iterations tells it.
"""

import math
import re

from exporter.reports.follow.said import Fact, Said, amount, last, number, times, whole

MARKS = (b"iteration", b"....", b"world size", b"batches to constant", b"evaluate .")
_STEP = re.compile(r"iteration\s{1,10}(\d{1,15})/\s{0,10}(\d{1,15}) \|")
_EVENT = re.compile(
    r"(?P<saved>successfully saved checkpoint (?:at|from) iteration)\s{1,10}(?P<n1>\d{1,15})"
    r"|(?P<detached>scheduled an async checkpoint save at iteration)\s{1,10}(?P<n2>\d{1,15})"
    r"|(?P<save>saving checkpoint at iteration)\s{1,10}(?P<n3>\d{1,15})"
    r"|(?P<start>successfully loaded checkpoint from) .{1,2000} at iteration (?P<n4>\d{1,15})"
    r"|(?P<load>loading (?:\w{1,20} )?checkpoint from) .{1,2000} at iteration (?P<n5>\d{1,15})"
)
_VALIDATED = re.compile(r"validation loss at (?!.{0,200}test).{0,200}?\| lm loss value: (\S{1,40})")
_EVALUATED = re.compile(r"\s{0,8}evaluate \.{1,60}: \([\d.]{1,20}, ([\d.]{1,20})\)")
_ARGUMENT = re.compile(r"\s{0,10}([a-z_0-9]{2,60}) \.{2,60} (\S{1,40})\s{0,4}")
_WORLD = re.compile(r"using world size: (\d{1,7})")
_DEGREE = re.compile(r"(tensor-model|pipeline-model|context|data)-parallel[ -]size: (\d{1,7})")
_MICROBATCHES = re.compile(r"setting number of micro-?batches to constant (\d{1,7})")
_ARGUMENTS = {
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
_DEGREES = {"tensor-model": "tensor", "pipeline-model": "pipeline", "context": "context", "data": "data"}
_LOSSES = ("lm loss", "loss", "lm_loss", "total loss")


def read(text: str) -> Said | None:
    """What the line says; None where it is none of Megatron's."""
    step = last(_STEP, text)
    if step:
        return _step(int(step[0][1]), step[1])
    return _event(text) or _validation(text) or _facts(text)


def _step(step: int, rest: str) -> Said | None:
    fields = dict(part.partition(":")[::2] for part in map(str.strip, rest.split("|")))
    each = amount(fields.get("elapsed time per iteration (ms)"))
    if not rest.endswith("|") or each is None:
        return None
    loss = next((fields[key] for key in _LOSSES if key in fields), None)
    broken = bool(whole(fields.get("number of nan iterations")))
    return Said(
        "step",
        step=step,
        each=each / 1e3,
        flops=times(amount(fields.get("throughput per GPU (TFLOP/s/GPU)")), 1e12),
        hardware_flops=times(amount(fields.get("TFLOPs")), 1e12),
        tokens=amount(fields.get("tokens per gpu per second (tgs)")),
        samples=amount(fields.get("global batch size")),
        loss=math.nan if loss is None and broken else number(loss),
    )


def _event(text: str) -> Said | None:
    found = _EVENT.search(text)
    if found is None:
        return None
    step = int(next(n for name, n in found.groupdict().items() if name[0] == "n" and n))
    if found["saved"]:
        return Said("saved", step)
    if found["detached"]:
        return Said("detached", step)
    if found["save"]:
        return Said("save", step)
    return Said("start" if found["start"] else "load", step)


def _validation(text: str) -> Said | None:
    found = _VALIDATED.search(text)
    if found:
        return Said("validated", value=number(found[1]))
    found = _EVALUATED.fullmatch(text.rstrip())
    return Said("evaluated", lasted=times(amount(found[1]), 1e-3)) if found else None


def _facts(text: str) -> Said | None:
    found: list[Fact] = []
    world, microbatches = _WORLD.search(text), _MICROBATCHES.search(text)
    if world:
        found.append(("world", float(world[1])))
        found += [(_DEGREES[name], float(size)) for name, size in _DEGREE.findall(text)]
    if microbatches:
        found.append(("microbatches", float(microbatches[1])))
    argument = _ARGUMENT.fullmatch(text)
    if argument and argument[1] in _ARGUMENTS:
        size = amount(argument[2])
        found.append((_ARGUMENTS[argument[1]], argument[2] if size is None else size))
    return Said("facts", facts=tuple(found)) if found else None
