"""What Hugging Face's Trainer prints: its dictionaries, and tqdm's bar.

Owns their formats. Sources: `ProgressCallback` and `PrinterCallback` in src/transformers/trainer_callback.py of
huggingface/transformers (numbers to 4.x, read at 55093b7; text in %.4g since 5), `_inner_training_loop` in trainer.py
("Continuing training from global step", "Saving model checkpoint to", "***** Running Evaluation *****", at log level
info only), tqdm's `format_meter` (tqdm/std.py). Dialects: {'loss': 1.2}, {'loss': '1.2'}, nan, other trainers' keys
(TRL) between.

A dictionary names no step: the bar does, in the standard error (2>&1). Evaluations, downloads and tokenizers have
bars too. The Trainer's is drawn anew right after it wrote a dictionary with a loss (tqdm.write refreshes), and that is
how its total is known. Nothing tells FLOPs; samples and tokens are of an unknown number of GPUs and are left alone.
"""

import re

from exporter.reports.follow.said import Said, number

MARKS = (b"'loss'", b"'eval_loss'", b"%|", b"Continuing training", b"Saving model", b"Running Eval")
_FIELDS = re.compile(r"\{('[^{}]{1,4000})\}")
_FIELD = re.compile(r"'([\w/.@-]{1,64})': '?([-+\w.]{1,40})'?(?:,|$)")
_BAR = re.compile(r"\s{0,200}\d{1,3}%\|[^|]{0,400}\| (\d{1,15})/(\d{1,15}) \[[\d:]{4,12}<[\d:?]{1,12}, ")
_START = re.compile(r"Continuing training from global step (\d{1,15})")
_SAVE = re.compile(r"Saving model checkpoint to \S")
_VALIDATE = re.compile(r"\*{5} Running Evaluation \*{5}")


def read(text: str) -> Said | None:
    """What the line says; None where it is none of the Trainer's."""
    found = _BAR.match(text)
    if found:
        return Said("bar", step=int(found[1]), total=int(found[2]))
    found = _FIELDS.search(text)
    if found:
        return _dictionary(dict(_FIELD.findall(found[1])))
    found = _START.search(text)
    if found:
        return Said("start", step=int(found[1]))
    if _SAVE.search(text):
        return Said("save")
    return Said("validate") if _VALIDATE.search(text) else None


def _dictionary(fields: dict[str, str]) -> Said | None:
    epoch = number(fields.get("epoch"))
    if "eval_loss" in fields:
        return Said("validated", value=number(fields["eval_loss"]), epoch=epoch)
    if "loss" not in fields or epoch is None:
        return None
    return Said("words", loss=number(fields["loss"]), epoch=epoch)
