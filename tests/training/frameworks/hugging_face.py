"""A real transformers.Trainer on the CPU, with the callback; writes its own counts and times to a file.

Needs `client.py` in the same folder. Trains a tiny GPT-2 on slow data. Expected values come from the Trainer and from a
stopwatch around its methods, never from the client.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from client import hugging_face  # type: ignore[import-not-found]
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # type: ignore[import-not-found]

LENGTH = 32
SLOW = 0.005
"""Seconds to read an item."""


class Slow(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random tokens, read slowly."""

    def __init__(self, items: int) -> None:
        self._items = torch.randint(0, 100, [items, LENGTH])

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> dict[str, Any]:
        time.sleep(SLOW)
        return {"input_ids": self._items[place], "labels": self._items[place]}


class Watched(Trainer):  # type: ignore[misc]
    """The Trainer with stopwatches: one within each evaluation and checkpoint, one between two batches around both."""

    def __init__(self, **options: Any) -> None:
        self.took = Counter[str]()
        self._between: set[str] = set()
        self._began = self._ended = 0.0
        super().__init__(**options)

    def training_step(self, *args: Any, **named: Any) -> Any:
        self.between_ends()
        self._began = self._began or time.perf_counter()
        answer = super().training_step(*args, **named)
        self._ended = time.perf_counter()
        self.took["trained"] = self._ended - self._began  # type: ignore[assignment]
        return answer

    def between_ends(self) -> None:
        for name in self._between:
            self.took[f"{name} at most"] += time.perf_counter() - self._ended  # type: ignore[assignment]
        self._between.clear()

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        return self._watched("evaluation", super().evaluation_loop, *args, **named)

    def _save_checkpoint(self, *args: Any, **named: Any) -> Any:
        self.took["checkpoints"] += 1
        return self._watched("checkpoint", super()._save_checkpoint, *args, **named)

    def _watched(self, name: str, call: Any, *args: Any, **named: Any) -> Any:
        self._between.add(name)
        began = time.perf_counter()
        answer = call(*args, **named)
        self.took[name] += time.perf_counter() - began  # type: ignore[assignment]
        return answer


def main(folder: Path, steps: int, resume: bool) -> None:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        per_device_eval_batch_size=4, logging_steps=2, eval_strategy="steps", eval_steps=5, save_strategy="steps",
        save_steps=5, use_cpu=True, report_to=[], disable_tqdm=True, include_num_input_tokens_seen=True,
    )  # fmt: skip
    callback = hugging_face(run="hf", every=0.2)
    trainer = Watched(model=model, args=arguments, train_dataset=Slow(400), eval_dataset=Slow(8), callbacks=[callback])
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.between_ends()
    truth = {
        "wall": time.perf_counter() - began,
        "step": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "flops": trainer.state.total_flos,
        "epoch": trainer.state.epoch,
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        **trainer.took,
    }
    (folder / "truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), resume=sys.argv[3:] == ["resume"])
