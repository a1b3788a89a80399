"""Zombie thresholds on recorded GPU series of real serving pods, beside the plain rule of 300 minutes at zero.

Owns the reading of the series, which lie in `../shared/samples/serving-series` and are not part of this repository.
Refuses to run without them: nothing made up can stand in for what real pods do after hours of silence.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.figures import Row
from benchmarks.group import Group, Measured, Table
from benchmarks.machine import ROOT
from exporter.core.ledger import Ledger
from exporter.core.model import MS, Allocation, Device, Observation, Owner, Reading
from exporter.core.policy import Policy
from exporter.preview.replay import TracePreview
from exporter.preview.scoring import PolicyRow, Score

SERIES = Path(ROOT) / "../shared/samples/serving-series"
COLUMNS = ("timestamp_anon", "value", "container_ip")
"""Seconds, percent and the pod: the columns of `pod_gpu_duty_cycle_anon.csv` in Alibaba's GenTD26
(alibaba/clusterdata, cluster-trace-v2026-GenAI)."""
_NO_POD = ("", "None", "NULL", None)
LONGEST_GAP = 3.0
"""Periods between two samples; in a longer gap the pod was not observed."""
CLASSES = ("batch", "interactive", "serving")
QUICK_PODS = 20
Samples = list[tuple[float, float]]
"""Seconds and percent, in order of time; of several GPUs of a pod the busiest."""


class Scores(Struct, frozen=True):
    """What each rule did to all pods."""

    rows: tuple[Score, ...]
    pods: int
    gpu_hours: float


def series(folder: Path) -> dict[str, Samples]:
    """Read all pods of all files in a folder; raise RuntimeError if there is none."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise RuntimeError(
            f"no recorded series: put CSV files with the columns {', '.join(COLUMNS)} into ../shared/samples/"
            f"{SERIES.name}, beside this repository (pod_gpu_duty_cycle_anon.csv of Alibaba's GenTD26 has them)"
        )
    pods: dict[str, dict[float, float]] = {}
    for path in paths:
        for at, percent, pod in _samples(path):
            samples = pods.setdefault(pod, {})
            samples[at] = max(percent, samples.get(at, 0.0))
    return {pod: sorted(samples.items()) for pod, samples in pods.items()}


def _samples(path: Path) -> Iterator[tuple[float, float, str]]:
    """Time, percent and pod of each line that has them."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if not set(COLUMNS) <= set(lines.fieldnames or ()):
            raise RuntimeError(f"{path.name} lacks one of the columns {', '.join(COLUMNS)}")
        for line in lines:
            try:
                at, percent = float(line["timestamp_anon"]), float(line["value"])
            except (TypeError, ValueError):
                continue
            if isfinite(at) and 0.0 <= percent <= 100.0 and line["container_ip"] not in _NO_POD:
                yield at, percent, line["container_ip"]


def recording(pod: str, samples: Samples, workload_class: str) -> Iterator[Observation]:
    """One pod's samples as the recording of a GPU that it held from the first to the last of them."""
    begin = samples[0][0]
    times = [round((at - begin) * 1000) * MS for at, _ in samples]
    period = median(after - before for before, after in pairwise(times))
    held = Allocation("GPU-0", Owner(pod, workload_class=workload_class), 0, gpus=1)
    yield Observation(0, 0, devices=(Device("GPU-0"),), allocations=(held,))
    for before, at, (_, percent) in zip(times, times[1:], samples[1:], strict=False):
        start = before if at - before <= LONGEST_GAP * period else at - round(period / MS) * MS
        if start < at:
            reading = Reading("GPU-0", start, at, gpu_utilization=percent / 100)
            yield Observation(at, at, readings=(reading,))


def score(pods: dict[str, Samples]) -> Scores:
    """Replay every pod as a job of each class, and once more for the plain rule."""
    previews = [_preview(kind, pods) for kind in CLASSES]
    results = [preview.result("") for preview in previews]
    plain = results[0].plain_rule
    rows = (*(result.rows[0] for result in results), *([] if plain is None else [plain]))
    return Scores(rows, len(pods), results[0].gpu_hours_held)


def _preview(kind: str, pods: dict[str, Samples]) -> TracePreview:
    field = f"zombie_{kind}_seconds"
    seconds: float = getattr(Policy(), field)
    row = PolicyRow(f"zombie of class {kind}, {seconds / 60:g} min", {field: seconds}, Policy())
    preview = TracePreview([row], open_ledger=Ledger, price_of=lambda _device, _wall: None)
    for pod, samples in pods.items():
        preview.run(recording(pod, samples, kind))
    return preview


_HEAD = (
    "rule", "times", "right", "wrong", "not judged", "precision", "GPU-hours freed rightly", "wrongly",
    "GPU-hours of work lost", "pods hit",
)  # fmt: skip


def table(scores: Scores) -> Table:
    """Each rule on a line."""
    about = "A pod is taken back once; the rest of its series then shows whether that was right:"
    return Table(about=about, head=_HEAD, rows=tuple(_line(row) for row in scores.rows))


def _line(row: Score) -> tuple[str, ...]:
    return (
        row.label, f"{row.episodes}", f"{row.episodes_right}", f"{row.episodes_wrong}", f"{row.episodes_unjudged}",
        "-" if row.precision is None else f"{row.precision:.3f}", f"{row.gpu_hours_freed:,.1f}",
        f"{row.gpu_hours_wrongly_freed:,.1f}", f"{row.gpu_hours_work_lost:,.1f}",
        f"{row.jobs_hit}/{row.jobs_reclaimed}",
    )  # fmt: skip


def zombies(*, quick: bool = False) -> Measured:
    """Score all pods; quick: the first few. Raises RuntimeError without recorded series."""
    found = {pod: samples for pod, samples in series(SERIES).items() if len(samples) > 1}
    scores = score(dict(list(found.items())[:QUICK_PODS]) if quick else found)
    return Measured(rows=list(_rows(scores)), tables=[table(scores)])


def _rows(scores: Scores) -> Sequence[Row]:
    """A line a rule, for those who look for one figure."""
    often = f"{scores.pods} pods, {scores.gpu_hours:,.0f} GPU-hours"
    return [
        Row(
            group="zombies", what=row.label, often=often,
            median="never took one back" if row.precision is None else f"precision {row.precision:.3f}",
            spread=f"freed {row.gpu_hours_freed:,.1f} GPU-hours rightly, {row.gpu_hours_wrongly_freed:,.1f} wrongly",
        )
        for row in scores.rows
    ]  # fmt: skip


ZOMBIES = Group(
    name="zombies",
    title="Whether zombies are right, on recorded serving series",
    about=(
        "Series of real serving pods, each replayed through the real core as a job of each workload class, and beside "
        "them the plain rule: the engine at zero for 300 minutes. A pod that is taken back is judged by what it did "
        "later, from the series alone (`exporter/preview/real_work.py`): wrong if it worked for more than 1 % of the "
        "rest or more than 10 minutes in all. The series have the driver's utilization and nothing else, so neither "
        "rule sees more than that, and no pod is seen to its end. They lie in `../shared/samples/serving-series` "
        "beside this repository, in the columns of Alibaba's GenTD26 (`pod_gpu_duty_cycle_anon.csv`); without them "
        "nothing is measured."
    ),
    measures=("benchmarks/truth/zombies.py", "exporter/core", "exporter/preview"),
    run=zombies,
    needs=SERIES,
    quick=lambda: zombies(quick=True),
)  # fmt: skip
