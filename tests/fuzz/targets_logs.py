"""What a training job writes to its log, in five formats, behind the real tail. Owns this door alone."""

import os
import weakref
from collections import Counter
from collections.abc import Callable

from exporter.core.model import SECOND
from exporter.job_files import FileTail
from exporter.training.logs.formats import LOG_FORMATS, LineReader, parse_line
from exporter.training.logs.tracker import LineTime, LogTracker
from tests.fuzz.trying import Feed, Target, promise
from tests.training import follow_logs as logs

_LOGS: dict[str, Callable[[], list[str]]] = {
    "megatron": lambda: [
        *logs.megatron_start(),
        *(logs.megatron(n, ms=900.0, dialect=d) for n in (1, 2) for d in ("2019", "core", "dated", "deepspeed")),
    ],
    "torchtitan": lambda: [
        logs.titan(n, tps=4000, dialect=d, color=n % 2 == 1) for n in (1, 2, 3) for d in ("2024", "early2025", "2025")
    ],
    "maxtext": lambda: [logs.maxtext(n, seconds=1.5, dialect=d) for n in (0, 1, 2) for d in ("2023", "2025", "2026")],
    "nanotron": lambda: [logs.nanotron(n, ms="812", dialect=d) for n in (1, 2, 3) for d in ("2023", "2024", "2025")],
    "huggingface": lambda: (
        [logs.bar(n, 500) for n in (1, 2, 250, 500)]
        + [logs.trainer(loss=2.5, epoch=0.1, text=t) for t in (True, False)]
    ),
}


def _log_samples(name: str) -> list[bytes]:
    lines = _LOGS[name]()
    prefixed = [f"2026-01-02T03:04:05.678Z stdout F [rank0]: {line}" for line in lines[:4]]
    return [line.encode() for line in lines] + ["\n".join([*lines, *prefixed]).encode()]


def _log(name: str) -> Feed:
    reader, progress, now = LineReader(name), LogTracker(), 0
    counts: Counter[str] = Counter()
    file = os.memfd_create("log")
    tail = FileTail(file, counts, offset=0)

    def feed(data: bytes) -> None:
        nonlocal now
        os.ftruncate(file, 0)
        os.pwrite(file, data + b"\n", 0)
        raws: list[bytes] = []
        while (written := tail.read(1 << 20)).size:
            raws += written.lines
        for raw in raws:
            now += SECOND
            line = parse_line(raw)
            said = reader.read(line.text) if reader.may_match(raw) else None
            counts["understood"] += said is not None
            told = progress.handle(said, writer=line.writer, at=LineTime(line.timestamp, now)) if said else []
            for one in (*told, *progress.flush_bar()):
                promise(one.seconds >= 0, "an interval of negative length")

    weakref.finalize(feed, tail.close)
    return feed


def _logged(name: str) -> Target:
    return Target(
        name=f"log: {name}",
        what="a training job's log",
        samples=lambda: _log_samples(name),
        make=lambda: _log(name),
        modules=("exporter.training.logs",),
    )


LOGS: tuple[Target, ...] = tuple(map(_logged, LOG_FORMATS))
