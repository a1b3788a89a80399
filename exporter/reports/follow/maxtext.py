"""MaxText's lines, on GPUs.

Owns their formats. Sources, all AI-Hypercomputer/maxtext: `write_metrics` in MaxText/train.py (2023), the same in
MaxText/metric_logger.py (2025; read at 12cfd47) and src/maxtext/common/metric_logger.py (2026; read at 000e6d8),
checkpointing.py and max_utils.py's "Num_devices". Dialects: without and with "Tokens/s/device" and "total_weights"
(2024), more losses after "loss" (2025), "[Rampup Batch Size Phase]" before a line without FLOPs, three forms of the
evaluation's line, "Saved a checkpoint" and "saved a checkpoint", asynchronous saves.

Steps are counted from 0 there: "completed step: 0" is the first that ended, and is 1 here. "total_weights" are the
tokens that have a weight in the loss, of all devices: what is left of a step's tokens is padding.
"""

import re

from exporter.reports.follow.said import Said, amount, last, number, times

MARKS = (b"step", b"Num_devices")
_STEP = re.compile(r"completed step: (\d{1,15}), ")
_FIELD = re.compile(r"([\w/ -]{1,40}): (\S{1,40})")
_VALIDATED = re.compile(
    r"(?:eval metrics after step: |Completed eval after train step |average loss after step=)\d{1,15}[,:]"
    r" (?:eval_)?loss=([^,\s]{1,40}),"
)
_SAVED = re.compile(r"(?:[Ss]aved a checkpoint at step|Started an asynchronous checkpoint save for step) (\d{1,15})")
_LOAD = re.compile(r"restoring from this run's directory (?:latest )?step\s{1,20}(\d{1,15})")
_DEVICES = re.compile(r"Num_devices: (\d{1,7}), shape")


def read(text: str) -> Said | None:
    """What the line says; None where it is none of MaxText's."""
    step = last(_STEP, text)
    if step:
        return _step(int(step[0][1]) + 1, step[1])
    found = _VALIDATED.search(text)
    if found:
        return Said("validated", value=number(found[1]))
    found = _SAVED.search(text)
    if found:
        return Said("saved", step=int(found[1]) + 1)
    found = _LOAD.search(text)
    if found:
        return Said("load", step=int(found[1]) + 1)
    found = _DEVICES.search(text)
    return Said("facts", facts=(("world", float(found[1])),)) if found else None


def _step(step: int, rest: str) -> Said | None:
    parts = [_FIELD.fullmatch(part) for part in rest.split(", ")]
    fields = {part[1]: part[2] for part in parts if part}
    each = amount(fields.get("seconds"))
    if each is None or "loss" not in fields or not all(parts):  # two lines in one, or a cut one
        return None
    return Said(
        "step",
        step=step,
        each=each,
        flops=times(amount(fields.get("TFLOP/s/device")), 1e12),
        tokens=amount(fields.get("Tokens/s/device")),
        trained=amount(fields.get("total_weights")),
        loss=number(fields.get("loss")),
    )
