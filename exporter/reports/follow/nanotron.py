"""nanotron's lines.

Owns their formats. Sources, all huggingface/nanotron: `train_step_logs` and `save_checkpoint` in
src/nanotron/trainer.py, `LoggerWriter` in src/nanotron/logging (and brrr before it), issues 23 (2024) and 390 (2025)
for whole lines. Dialects: plain numbers ("consumed_samples", 2023) or three digits and K, M, G, T;
"elapsed_time_per_iteration_ms" or "time_per_iteration_ms" (2025); the fields in any order; "MM/DD/YYYY hh:mm:ss
[INFO|DP=0|PP=0|TP=0|host]: " before.

Three digits: figures are within 0.5 %. "global_batch_size" has been samples and, since 2025, tokens: it is not used.
Where not every iteration is printed the time is that of the last one.
"""

import re

from exporter.reports.follow.said import Said, amount, last, number, times

MARKS = (b"iteration", b"aving checkpoint")
_STEP = re.compile(r"iteration: (\d{1,15}) / \d{1,15} \| ")
_START = re.compile(r"\bstart_iteration_step: (\d{1,15})\b")
_SAVE = re.compile(r"\bSaving checkpoint at \S")
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def read(text: str) -> Said | None:
    """What the line says; None where it is none of nanotron's."""
    step = last(_STEP, text)
    if step:
        return _step(int(step[0][1]), step[1])
    found = _START.search(text)
    if found:
        return Said("start", step=int(found[1]))
    return Said("save") if _SAVE.search(text) else None


def _step(step: int, rest: str) -> Said | None:
    parts = [part.partition(": ") for part in rest.split(" | ")]
    fields = {key: value for key, _, value in parts}
    each = _amount(fields.get("elapsed_time_per_iteration_ms") or fields.get("time_per_iteration_ms"))
    if each is None or "lm_loss" not in fields:
        return None
    return Said(
        "step",
        step=step,
        each=each / 1e3,
        flops=times(_amount(fields.get("model_tflops_per_gpu")), 1e12),
        hardware_flops=times(_amount(fields.get("hardware_tflops_per_gpu")), 1e12),
        tokens=_amount(fields.get("tokens_per_sec_per_gpu")),
        loss=number(fields["lm_loss"]),
    )


def _amount(text: str | None) -> float | None:
    """11.5K is 11,500."""
    unit = _UNITS.get((text or "")[-1:])
    return amount(text) if unit is None else times(amount((text or "")[:-1]), unit)
