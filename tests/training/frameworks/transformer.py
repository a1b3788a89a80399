"""A small transformer trained on the CPU, with a crash: it reports, and writes its own counts and times to a file.

Needs `client.py` in the same folder. Runs until it crashes, and again to resume from its checkpoint (`--help` lists
the options). Writes expected values to truth-START.json, from its own counts and stopwatches outside and inside each
part, never from the client. The file is written after each step, so that it survives a crash.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from client import Reporter  # type: ignore[import-not-found]
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed  # type: ignore[import-not-found]

HEADS = 4
VOCABULARY = 512
COUNTS = ("steps", "repeated", "tokens", "padding", "flops", "hardware_flops", "checkpoints")


class Truth:
    """Stopwatches and counts.

    Each part has two stopwatches, one begun before the client's and one after it: what the client reports lies between
    them even where a busy machine suspends this process in the midst of its calls.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.most: dict[str, float] = defaultdict(float)
        self.least: dict[str, float] = defaultdict(float)
        self.said: dict[str, Any] = {"began": time.monotonic(), "least": self.least, "most": self.most, "history": []}
        self.said.update(dict.fromkeys(COUNTS, 0))

    @contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """Around the client's stopwatch."""
        with _timed(self.most, name):
            yield

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Within the client's stopwatch."""
        with _timed(self.least, name):
            yield

    @contextmanager
    def part(self, name: str, reported: AbstractContextManager[object]) -> Iterator[None]:
        with self.outside(name), reported, self.inside(name):
            yield

    def mark(self, moment: str) -> None:
        """Note when something happened, the first time that it does."""
        self.said.setdefault(moment, time.monotonic())

    def write(self) -> None:
        """Write all counts to disk, and the time."""
        self.said["until"] = time.monotonic()
        self._path.write_text(json.dumps(self.said))


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] += time.monotonic() - began


class Block(nn.Module):  # type: ignore[misc]
    """One layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.queries(self.first(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) / (width // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ parts[2]
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.second(x))))


class Model(nn.Module):  # type: ignore[misc]
    """A decoder whose layers are computed again in the backward pass."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens)
        for block in self.blocks:
            x = recomputed(block, x) if x.requires_grad else block(x)
        return self.head(x)


def batches(args: argparse.Namespace, start: int) -> Iterator[tuple[Any, int]]:
    """Batches of sequences of different length, padded with zeros; slow, and identical after every start."""
    for step in range(start, args.steps):
        yield _batch(args, step)


def _batch(args: argparse.Namespace, step: int) -> tuple[Any, int]:
    source = torch.Generator().manual_seed(step)
    time.sleep(args.load_seconds)
    tokens = torch.randint(1, VOCABULARY, [args.batch, args.length], generator=source)
    lengths = torch.randint(args.length // 2, args.length + 1, [args.batch], generator=source)
    tokens[torch.arange(args.length)[None] >= lengths[:, None]] = 0
    return tokens, int(args.batch * args.length - lengths.sum())


def _watched(args: argparse.Namespace, start: int, truth: Truth) -> Iterator[tuple[Any, int]]:
    """The batches of the training, with the stopwatch that runs within the client's."""
    truth.mark("loaded")
    items = batches(args, start)
    while True:
        with truth.inside("data"):
            item = next(items, None)
        if item is None:
            return
        yield item


def loss_of(model: Model, tokens: Any) -> Any:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def flops_of(args: argparse.Namespace, parameters: int) -> float:
    """FLOPs of one step: one multiply-add per parameter forward, two backward; plus causal attention."""
    tokens = args.batch * args.length
    products = 2 * tokens * parameters * 3
    attention = 2 * 2 * args.batch * args.layers * args.length * args.length * args.width * 3 / 2
    return float(products + attention)


def main() -> None:
    args = _arguments()
    truth = Truth(args.folder / f"truth-{len(list(args.folder.glob('truth-*.json')))}.json")
    shape = {"layers": args.layers, "heads": HEADS, "head_size": args.width // HEADS, "sequence": args.length}
    torch.manual_seed(0)
    model = Model(args.width, args.layers)
    parameters = sum(each.numel() for each in model.parameters())
    reporter = Reporter(
        run=args.run, model={"parameters": parameters, **shape}, recompute="full", every=args.every,
        world_size=args.gpus, gpus=args.gpus,
    )  # fmt: skip
    truth.mark("created")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    time.sleep(args.startup_seconds)
    start = _restore(args, truth, reporter, model=model, optimizer=optimizer)
    step = start
    items = iter(reporter.iterate(_watched(args, start, truth)))
    truth.mark("started")
    while True:
        with truth.outside("data"):
            item = next(items, None)
        if item is None:
            break
        tokens, padding = item
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        step += 1
        _count(args, truth, step, padding=padding, parameters=parameters)
        reporter.step(tokens=tokens.numel(), padding=padding, samples=len(tokens), loss=loss, step=step)
        _between(args, truth, reporter, step=step, model=model, optimizer=optimizer)
        (args.folder / "highest").write_text(str(max(step, _highest(args))))
        truth.write()
        if step == args.crash and not start:
            os._exit(17)  # nothing is flushed, closed or reported
    truth.mark("ended")
    reporter.close()
    truth.mark("closed")
    truth.said.update(dropped=reporter.dropped, refusal=reporter.refusal, error=reporter.error)
    truth.write()


def _between(args: argparse.Namespace, truth: Truth, reporter: Any, *, step: int, model: Model, optimizer: Any) -> None:
    """Checkpoint and evaluate at their intervals."""
    if step % args.evaluate_every == 0:
        with truth.part("evaluation", reporter.evaluation()), torch.no_grad():
            losses = [float(loss_of(model, tokens)) for tokens, _ in batches(_some(args), args.steps)]
        reporter.quality("evaluation loss", sum(losses) / len(losses), args.target, falls=True)
    if step % args.save_every == 0:
        with truth.part("checkpoint", reporter.checkpoint()):
            draft = args.folder / "draft.pt"
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
            time.sleep(args.save_seconds)
            draft.replace(args.folder / "checkpoint.pt")
        truth.said["checkpoints"] += 1


def _some(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "steps": args.steps + 4, "load_seconds": 0.0})


def _restore(args: argparse.Namespace, truth: Truth, reporter: Any, *, model: Model, optimizer: Any) -> int:
    """Resume from the checkpoint, if there is one; returns its step."""
    saved = args.folder / "checkpoint.pt"
    if not saved.exists():
        return 0
    with truth.part("restore", reporter.phase("restore")):
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        time.sleep(args.restore_seconds)
    step = int(state["step"])
    reporter.restored(step, highest_step=_highest(args) if args.tell_highest else None)
    truth.said["resumed"] = step
    return step


def _highest(args: argparse.Namespace) -> int:
    file = args.folder / "highest"
    return int(file.read_text()) if file.exists() else 0


def _count(args: argparse.Namespace, truth: Truth, step: int, *, padding: int, parameters: int) -> None:
    truth.said["steps"] += 1
    truth.said["repeated"] += step <= _highest(args)
    truth.said["tokens"] += args.batch * args.length
    truth.said["padding"] += padding
    truth.said["flops"] += flops_of(args, parameters)
    truth.said["hardware_flops"] += flops_of(args, parameters) * 4 / 3
    so_far = {name: truth.said[name] for name in COUNTS}
    truth.said["history"].append({"step": step, "at": time.monotonic(), **so_far})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the checkpoint and the truth; the same after a crash")
    numbers = {"steps": 60, "crash": 37, "save-every": 10, "evaluate-every": 15, "batch": 4, "length": 64}
    for name, value in {**numbers, "width": 64, "layers": 4, "gpus": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    seconds = {"load-seconds": 0.03, "save-seconds": 0.5, "startup-seconds": 1.0, "restore-seconds": 0.7}
    for name, pause in {**seconds, "every": 2.0, "target": 6.0}.items():
        parser.add_argument(f"--{name}", type=float, default=pause)
    parser.add_argument("--run", default="transformer")
    parser.add_argument("--tell-highest", action="store_true", help="else only the daemon can know what was repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
