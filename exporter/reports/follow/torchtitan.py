"""torchtitan's lines.

Owns their formats. Sources, all pytorch/torchtitan: train.py (2024; read at 0011fb9: "wps", no "tflops"), `log` and
`log_validation` in torchtitan/components/metrics.py (since 2025; read at 00fbaaf: "tps", "tflops", "grad_norm"),
torchtitan/components/checkpoint.py, logging.py's "[titan] date time,ms - root - INFO - ". Dialects: colours, "wps" or
"tps" (both a second and GPU), with and without "grad_norm" and "tflops", "mfu: N/A", the checkpoint's lines with and
without "(or staging if async is enabled)", also with no space before "in".

No line says how long its interval was: that is from the line before, by the stamps. It is since the end of a
validation where one came between. Without "tflops" the FLOPs are mfu times the peak that the program itself has
told. Where not only one rank prints, those without the loss (other pipeline stages) give -1 or -2.
"""

import re

from exporter.reports.follow.said import Said, amount, last, number, times, whole

MARKS = (b"step", b"heckpoint", b"Peak FLOPS")
_STEP = re.compile(r"(?<!validate )\bstep:\s{1,10}(\d{1,15})(?:/\d{1,15} = [\d.]{1,9}%)?  ")
_FIELD = re.compile(r"\b(loss|tps|wps|tflops):\s{1,10}(\S{1,40})")
_MFU = re.compile(r"\bmfu: {1,4}(?:([\d.]{1,12})%|N/A)")
_VALIDATED = re.compile(r"\bvalidate step:\s{1,10}(\d{1,15})  loss:\s{1,10}(\S{1,40})  .{1,200}[tw]ps: ")
_SAVED = re.compile(
    r"Finished saving the checkpoint.{0,60}?in ([\d.]{1,12}) seconds|Last step checkpoint completed in ([\d.]{1,12})s"
)
_SAVE = re.compile(r"Saving (?:the|a (?:full|model[\w ]{0,20}?)) ?checkpoint")
_LOADED = re.compile(r"Finished loading the checkpoint in ([\d.]{1,12}) seconds")
_LOAD = re.compile(r"Loading the checkpoint (?:at step|from )")
_START = re.compile(r"Training starts at step (\d{1,15})\b")
_PEAK = re.compile(r"Peak FLOPS used for computing MFU: ([\d.]{1,12}e\+?\d{1,3})")
_NO_LOSS = (-1.0, -2.0)


def read(text: str) -> Said | None:
    """What the line says; None where it is none of torchtitan's."""
    step = last(_STEP, text)
    if step:
        return _step(int(step[0][1]), step[1])
    found = _VALIDATED.search(text)
    if found:
        return Said("validated", step=int(found[1]), value=number(found[2]))
    found = _START.search(text)
    if found:
        return Said("start", step=max(0, int(found[1]) - 1))
    found = _PEAK.search(text)
    if found:
        return Said("facts", facts=(("peak", float(found[1])),))
    return _checkpoint(text)


def _step(step: int, rest: str) -> Said | None:
    fields, mfu = dict(_FIELD.findall(rest)), _MFU.search(rest)
    tokens = amount(fields.get("tps") or fields.get("wps"))
    if mfu is None or tokens is None:
        return None
    loss = number(fields.get("loss"))
    return Said(
        "step",
        step=step,
        tokens=tokens,
        flops=times(amount(fields.get("tflops")), 1e12),
        mfu=times(amount(mfu[1]), 0.01),
        loss=None if loss in _NO_LOSS else loss,
    )


def _checkpoint(text: str) -> Said | None:
    saved = _SAVED.search(text)
    if saved:
        return Said("saved", lasted=amount(saved[1] or saved[2]))
    if _SAVE.search(text):
        return Said("save", step=whole(text.rstrip(". ").rpartition("step ")[2]))
    loaded = _LOADED.search(text)
    if loaded:
        return Said("loaded", lasted=amount(loaded[1]))
    return Said("load") if _LOAD.search(text) else None
