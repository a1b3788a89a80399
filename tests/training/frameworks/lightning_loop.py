"""A real Lightning Trainer on the CPU, with the callback; writes its own counts and times to a file.

Needs `client.py` in the same folder. Arguments: FOLDER STEPS lightning|pytorch_lightning [CHECKPOINT]. Trains a tiny
model on slow data. Expected values come from the Trainer and from stopwatches, never from the client.
"""

import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]

_FOLDER, _STEPS, _NAME = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if _NAME == "pytorch_lightning":
    sys.modules["lightning"] = None  # type: ignore[assignment] # as if it were not installed
pl: Any = importlib.import_module("lightning.pytorch" if _NAME == "lightning" else _NAME)

from client import lightning  # type: ignore[import-not-found] # noqa: E402 - after the other package is hidden

LENGTH = 16
SLOW = 0.005
"""Seconds to read an item."""
TOOK = Counter[str]()


class Slow(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random tokens, read slowly."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, place: int) -> dict[str, Any]:
        time.sleep(SLOW)
        TOOK["items"] += 1
        return {"input_ids": torch.randint(0, 100, [LENGTH])}


class Model(pl.LightningModule):  # type: ignore[misc]
    """Two layers, slow to validate and slow to save.

    Its stopwatches: one within each evaluation and checkpoint, one between two batches around both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
        self._between: set[str] = set()
        self._ended = time.perf_counter()

    def training_step(self, batch: Any, _: int) -> Any:
        self.between_ends()
        time.sleep(0.01)
        loss = torch.nn.functional.cross_entropy(
            self.layers(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten()
        )
        self._ended = time.perf_counter()
        return loss

    def between_ends(self) -> None:
        for name in self._between:
            TOOK[f"{name} at most"] += time.perf_counter() - self._ended  # type: ignore[assignment]
        self._between.clear()

    def validation_step(self, *_: Any) -> None:
        self._slow("evaluation", 0.02)

    def on_save_checkpoint(self, _: Any) -> None:
        TOOK["checkpoints"] += 1
        self._slow("checkpoint", 0.05)

    def _slow(self, name: str, seconds: float) -> None:
        if not self.trainer.sanity_checking:
            self._between.add(name)
            began = time.perf_counter()
            time.sleep(seconds)
            TOOK[name] += time.perf_counter() - began  # type: ignore[assignment]

    def _register_sharded_tensor_state_dict_hooks_if_available(self) -> None:
        """PyTorch 1.13, which is Debian's, cannot import its sharded tensors in Python 3.11; none are needed here."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    trainer = pl.Trainer(
        max_steps=_STEPS, accelerator="cpu", devices=1, accumulate_grad_batches=2, logger=False, val_check_interval=10,
        callbacks=[
            lightning(run="pl", every=0.2),
            pl.callbacks.ModelCheckpoint(dirpath=_FOLDER / "out", every_n_train_steps=5, save_top_k=-1),
        ],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Slow(), batch_size=4)
    model = Model()
    trainer.fit(model, loader, loader, ckpt_path=sys.argv[4] if sys.argv[4:] else None)
    model.between_ends()
    truth = {"step": trainer.global_step, "patched": "save_checkpoint" in vars(trainer), **TOOK}
    (_FOLDER / "truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    main()
