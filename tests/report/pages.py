"""Hand-made reports with everything, and reports that are hard to draw."""

from math import sin
from typing import Any

from msgspec.structs import replace

from exporter.core.leaks import LEAKS
from exporter.report.analysis import compare_reports
from exporter.report.model import (
    CourseInterval,
    JobIdentity,
    JobReport,
    LayerRatios,
    NodeShare,
    QualityMetric,
    RankSummary,
    ReportComparison,
    RunPeriod,
    TargetReached,
    TrainingSummary,
    WaterfallPart,
)
from exporter.report.summary import RentComparison, SummaryRow, TrendPoint, UsageSummary
from tests.report.answers import receipt

H100 = "NVIDIA H100 80GB HBM3"
_ROWS = {leak.name: leak for leak in LEAKS}
PRICE = 2.0
"""USD a GPU-hour."""
RUDE = (
    '<script>alert(1)</script>"\'><img src=x onerror=alert(1)>', "\u202etxt.exe", "\x1b[2J\x00\r\n", "]]>--><!--",
    "&lt;b&gt;", "w" * 400, "\u05d0\u05d1\u05d2 abc", "a b" * 50, "{{7*7}}", "url(javascript:alert(1))", "",
)  # fmt: skip
"""Malicious or unusual names."""


def part(name: str, hours: float, whole: float, *, price: float | None = PRICE) -> WaterfallPart:
    """Build a part of a known leak or an outcome."""
    money = None if price is None else hours * price
    if name not in _ROWS:
        return WaterfallPart(name=name, layer=name, gpu_hours=hours, share=hours / whole, money=money)
    row = _ROWS[name]
    return WaterfallPart(
        name=name, layer=row.layer, gpu_hours=hours, share=hours / whole, money=money, evidence=row.evidence,
        team=row.team, watch=row.watch, fix=row.fix,
    )  # fmt: skip


def parts(hours: dict[str, float], *, price: float | None = PRICE) -> tuple[WaterfallPart, ...]:
    """Sort parts as in a report: losses by size, then the outcomes."""
    whole = sum(hours.values())
    made = [part(name, value, whole, price=price) for name, value in hours.items()]
    losses = [each for each in made if each.layer in ("gau", "ectr", "emfu")]
    return (*sorted(losses, key=lambda each: -each.gpu_hours), *(each for each in made if each not in losses))


def layers(hours: dict[str, float]) -> LayerRatios:
    """Compute layer ratios by the formulas of docs/accounting.md."""
    seen = sum(hours.values()) - hours.get("unobserved", 0)
    lost = {
        layer: sum(value for name, value in hours.items() if name in _ROWS and _ROWS[name].layer == layer)
        for layer in ("gau", "ectr", "emfu")
    }
    working, unresolved = seen - lost["gau"], hours.get("unresolved", 0)
    computing, useful = working - lost["ectr"], hours.get("useful", 0)
    known = computing - unresolved
    emfu = useful / known if known else None
    product = (working / seen) * (computing / working) * (emfu or 0)
    return LayerRatios(gau=working / seen, ectr=computing / working, emfu=emfu, product=product, floor=useful / seen)


FORTY_ONE = {
    "exposed_communication": 3.95, "throttled": 3.95, "data_stall": 3.2, "memory_bound": 3.2, "checkpoint": 1.6,
    "idle_allocation": 1.6, "useful": 14.3, "unobserved": 0.2,
}  # fmt: skip


def made(hours: dict[str, float], *, price: float | None = PRICE, **changed: Any) -> JobReport:
    """Build a report from GPU-hours by leak."""
    whole = sum(hours.values())
    seen = whole - hours.get("unobserved", 0)
    priced = {"currency": "", "money": None} if price is None else {"currency": "USD", "money": whole * price}
    known: dict[str, Any] = {
        "parts": parts(hours, price=price), "layers": layers(hours), "gpu_hours": whole, "seen_gpu_hours": seen,
        "coverage": seen / whole, "models": (H100,), **priced,
    }  # fmt: skip
    return receipt(**known | changed)


def full() -> JobReport:
    """Build the report of job 41 of the documentation, with nearly every field set."""
    return made(
        FORTY_ONE, who=JobIdentity(job_id="41", cluster="a", name="train-41", user="ada", account="nlp"), gpus=16,
        when=RunPeriod(start=1_767_225_600, end=1_767_232_800, running=False), energy_kwh=23.9,
        nodes=(
            NodeShare(name="n1", gpus=8, gpu_hours=16, product=0.4, worst="data_stall", worst_share=0.2),
            NodeShare(name="n2", gpus=8, gpu_hours=16, product=0.5, worst="throttled", worst_share=0.247),
        ),
        evidence={"measured": 0.5, "reported": 0.5}, ofu=0.45, activity={"p10": 0.2, "p50": 0.8, "p90": 1.0},
        activity_deviation=0.25, truth=truth(), course=course(24),
        ranks=tuple(
            RankSummary(rank=rank, node=node, busy_seconds=busy, of_median=busy / 1.15)
            for rank, node, busy in (("9", "n2", 2.2), ("8", "n2", 1.2), ("1", "n1", 1.1), ("0", "n1", 1.0))
        ),
        unseen=("node n2: 0.20 GPU-hours are unobserved: its daemon was down or not scraped",
                "daemons that began anew in the run: n2; what they had counted before is added"),
    )  # fmt: skip


def truth() -> TrainingSummary:
    """Build a training summary with a quality metric that reaches its target."""
    quality = QualityMetric(
        name="accuracy", start=0.2, last=0.7, best=0.7, rises=True, target=0.65, gained=0.5, cost_per_unit=127.2,
        track=((0, 0.2), (1800, 0.4), (3600, 0.6), (5400, 0.7)),
    )  # fmt: skip
    return TrainingSummary(
        told_share=0.751, mfu=0.367, hfu=0.484, gap=0.117, goodput=0.75, phases={"compute": 0.67, "data": 0.05},
        progress=0.95, steps=720, rework_steps=36, tokens=887_520, tokens_per_gpu_second=10.33, checkpoints=4,
        checkpoint_seconds=180, checkpoint_gpu_hours=1.6, checkpoint_money=3.2, restarts=2, recovery_seconds=120,
        loss=2.5, loss_events={"spike": 3}, cost_per_step=0.0883, cost_per_token=5.378e-05, qualities=(quality,),
        target=TargetReached(seconds=5400, cost=48),
    )  # fmt: skip


def course(pieces: int, seconds: float = 300) -> tuple[CourseInterval, ...]:
    """Build a course that varies, with an unobserved interval."""
    return tuple(
        CourseInterval(
            start=n * seconds, end=(n + 1) * seconds, gpus=16, coverage=0.5 if n == pieces // 3 else 1.0,
            gau=0.3 if n == 0 else 0.98, ectr=0.7 + 0.1 * sin(n / 2), floor=0.0 if n == 0 else 0.45 + 0.08 * sin(n / 2),
            watts=9600,
        )
        for n in range(pieces)
    )  # fmt: skip


def second() -> JobReport:
    """Build the report of a smaller, more efficient job."""
    hours = {"data_stall": 2.4, "memory_bound": 2.4, "useful": 7.2}
    return made(hours, price=2.5, who=JobIdentity(job_id="42", name="train-42", user="ada"), gpus=4)


def two() -> ReportComparison:
    """Compare the two jobs."""
    return compare_reports(full(), second())


def every_leak() -> JobReport:
    """Build a report with every leak, the smallest a thousandth of the largest, and many nodes."""
    losses = [leak.name for leak in LEAKS if leak.layer in ("gau", "ectr", "emfu")]
    hours = {name: 100_000 * 0.75**n for n, name in enumerate(losses)}
    nodes = tuple(
        NodeShare(name=f"gpu-node-{n:04}.cluster.example", gpus=8, gpu_hours=1e4, product=n / 200, worst="data_stall",
             worst_share=0.3 - n / 1000)
        for n in range(128)
    )  # fmt: skip
    ranks = tuple(
        RankSummary(rank=str(n), node=nodes[n // 8].name, busy_seconds=3 - n / 1000, of_median=(3 - n / 1000) / 2.5)
        for n in range(1024)
    )
    return made(
        hours | {"useful": 150_000, "unresolved": 40_000, "unobserved": 12_000}, gpus=1024, nodes=nodes, ranks=ranks,
        who=JobIdentity(
            job_id="1234567_89", name="llama-405b-pretrain-stage-2-continued", user="someone", account="research",
        ),
        course=course(1000, 3600),
    )  # fmt: skip


def one_leak() -> JobReport:
    """Build a report with one loss and nothing useful."""
    return made({"hung": 3.0}, price=None, gpus=1)


def all_useful() -> JobReport:
    """Build a report without losses."""
    return made({"useful": 5.0})


def unseen() -> JobReport:
    """Build a report in which everything is unobserved."""
    unknown = LayerRatios(gau=None, ectr=None, emfu=None, product=None, floor=None)
    return receipt(
        parts=parts({"unobserved": 4.0}, price=None), layers=unknown, gpu_hours=4, seen_gpu_hours=0, coverage=0.0,
        nodes=(NodeShare(name="a", gpus=1, gpu_hours=4, product=None, worst="", worst_share=0, unseen_gpu_hours=4),),
    )  # fmt: skip


def empty() -> JobReport:
    """Build a report of a job that held a GPU for 0 seconds."""
    unknown = LayerRatios(gau=None, ectr=None, emfu=None, product=None, floor=None)
    return receipt(parts=(), layers=unknown, gpu_hours=0, seen_gpu_hours=0, coverage=None, nodes=())


def many(last: str = "rosalind") -> UsageSummary:
    """Build a summary of nine users over two weeks: GPU-hours grow, and the useful share falls."""
    names = ("ada", "grace", "kathleen", "mary", "barbara", "katherine", "joan", "radia", last)
    rows = tuple(line(name, 400.0 / (n + 1), useful=0.3 + n / 20) for n, name in enumerate(names))
    hours = {name: value * 40 for name, value in FORTY_ONE.items()}
    whole = made(hours)
    start = 1_767_225_600.0
    trend = tuple(day(n, start + n * 86_400) for n in range(14))
    rent = RentComparison(
        name="cloud", per_gpu_hour=4.0, utilisation=0.95, per_useful_hour=4.21, own_per_useful_hour=6.67,
        break_even=0.475, instead=2400.0,
    )  # fmt: skip
    return UsageSummary(
        about="all", by="user", every="1d", start=start, end=start + 14 * 86_400, source="stores", currency="USD",
        whole=line("all", whole.gpu_hours, useful=0.45), rows=rows, parts=whole.parts, trend=trend, rents=(rent,),
    )  # fmt: skip


def day(n: int, start: float) -> TrendPoint:
    """Return the trend; the fourth period was not observed."""
    held, useful = 60 + 5.0 * n, None if n == 3 else 0.6 - n / 50
    lost = held * (1 - (useful or 1))
    return TrendPoint(
        start=start, end=start + 86_400, gpu_hours=held, product=useful, lost_gpu_hours=lost, lost_money=None
    )


def line(name: str, hours: float, *, useful: float) -> SummaryRow:
    """Build a row with this useful share; the rest is lost."""
    known = LayerRatios(gau=1.0, ectr=useful, emfu=1.0, product=useful, floor=useful)
    lost = hours * (1 - useful)
    return SummaryRow(
        name=name, jobs=3, gpu_hours=hours, coverage=1.0, layers=known, money=hours * PRICE, lost_gpu_hours=lost,
        lost_money=lost * PRICE, worst="data_stall"
    )  # fmt: skip


def rude(name: str) -> JobReport:
    """Build a report in which every free-form name is `name`."""
    found = full()
    who = JobIdentity(job_id=name, cluster=name, name=name, user=name, account=name, team=name, namespace=name)
    odd = replace(found.parts[0], name=name, fix=name, team=name, watch=name)
    assert found.truth is not None
    qualities = tuple(replace(each, name=name) for each in found.truth.qualities)
    return replace(
        found, who=who, models=(name,), unseen=(name,), currency=name or "USD", parts=(odd, *found.parts[1:]),
        nodes=tuple(replace(node, name=name, worst=name) for node in found.nodes),
        ranks=tuple(replace(rank, rank=name, node=name) for rank in found.ranks),
        truth=replace(found.truth, qualities=qualities, phases={name: 0.5}, loss_events={name: 1.0}),
    )  # fmt: skip
