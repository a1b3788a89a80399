"""Hand-made Prometheus responses and job reports."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.report import build
from exporter.report.model import (
    JobIdentity,
    JobReport,
    LayerRatios,
    NodeShare,
    RunPeriod,
    TrainingSummary,
    WaterfallPart,
)


class Row(Struct, frozen=True):
    """A series of a response."""

    metric: dict[str, str]
    value: tuple[float, str] = (0.0, "0")
    values: tuple[tuple[float, str], ...] = ()


class Scripted:
    """Returns the rows of the first key contained in a query, or none; records the queries."""

    def __init__(self, answers: Mapping[str, Sequence[Row]] = MappingProxyType({})) -> None:
        self.answers = answers
        self.asked: list[tuple[str, float]] = []

    def instant_query(self, query: str, at: float) -> Sequence[Row]:
        self.asked.append((query, at))
        return next((rows for text, rows in self.answers.items() if text in query), ())


def row(value: float, **labels: str) -> Row:
    """Build an instant vector's series."""
    return Row(metric=labels, value=(0.0, repr(value)))


def track(*points: tuple[float, float], **labels: str) -> Row:
    """Build a range vector's series."""
    return Row(metric=labels, values=tuple((at, repr(value)) for at, value in points))


def part(name: str, hours: float, *, share: float, layer: str = "ectr", evidence: str = "measured") -> WaterfallPart:
    return WaterfallPart(
        name=name, layer=layer, gpu_hours=hours, share=share, money=None, evidence=evidence, team="training",
        watch="it", fix="mend it",
    )  # fmt: skip


_RECEIPT = JobReport(
    who=JobIdentity(job_id="7"),
    when=RunPeriod(start=0, end=36_000, running=False),
    nodes=(NodeShare(name="a", gpus=8, gpu_hours=80, product=0.5, worst="data_stall", worst_share=0.5),),
    models=(),
    gpus=8,
    gpu_hours=80,
    seen_gpu_hours=80,
    coverage=1,
    currency="",
    money=None,
    energy_kwh=None,
    layers=LayerRatios(gau=1, ectr=0.5, emfu=1, product=0.5, floor=0.5),
    parts=(part("data_stall", 40, share=0.5), part("useful", 40, share=0.5, layer="useful", evidence="")),
    evidence={"measured": 1.0},
    ofu=None,
    activity={},
    activity_deviation=None,
    truth=None,
    served=None,
    ranks=(),
    unseen=(),
)


def receipt(**changed: Any) -> JobReport:
    """Build a report of 8 GPUs for ten hours, half of it useful, without a price."""
    return replace(_RECEIPT, **changed)


def told(**known: Any) -> TrainingSummary:
    """Build a training summary."""
    return TrainingSummary(told_share=1.0, **known)


def layers(parts: Mapping[str, float]) -> LayerRatios:
    """Compute layer ratios from GPU-hours by leak."""
    return build.layer_ratios(parts)
