"""Defines the drills of `demo --drill`: for each alert a scenario that makes it fire within minutes, to test a pager.

Hours of a scenario can be simulated before its start, so nearly all drills keep the thresholds that are in force. One
table; a test demands a row of every alert and measures `minutes`.
"""

from collections.abc import Callable, Mapping
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from exporter.simulate import programs, reporting
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner, impatient, whole_node
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.workload import (
    FOREVER_MS,
    HOUR_MS,
    MINUTE_MS,
    Program,
    ReportingOptions,
    Stages,
    absent,
    as_program,
)


class Drill(Struct, frozen=True, kw_only=True):
    """How one alert is made to fire."""

    scenario: str = "healthy_training"
    """A key of DRILL_SCENARIOS; not used if `cluster`."""
    about: str
    """What the operator will see: a sentence."""
    minutes: int
    """Until the alert fires, at most, from Prometheus' first scrape; scrapes every 15 seconds, rules as shipped."""
    preroll_seconds: int = 0
    """Time of the scenario that is simulated before the start."""
    gpus: int = 2
    nodes: int = 1
    """Processes to start, each with another --node."""
    cluster: bool = False
    """Whether the metrics are those of `gpu-efficiency cluster`, about a simulated scheduler."""
    scrape_jobs: int = 1
    """Scrape jobs that have the same target."""
    history: bool = True
    """Whether the history can be written."""
    books: bool = True
    """Whether the daemon's books are right, as always; if not, it counts an error that never was."""
    past: Mapping[str, float] = {}
    """Recorded series of the drill's cluster that Prometheus must hold of the day before, and their value."""
    settings: Mapping[str, object] = {}
    """What of the configuration is replaced: dotted names and values."""
    companions: tuple[str, ...] = ()
    """Other alerts that the same trouble causes."""


_START_MS, _CANCELLED_MS = 2 * MINUTE_MS, 30 * MINUTE_MS
"""When trouble that must be preceded by a healthy state begins; when the deadlocked job is cancelled."""


def _training(setting: Setting) -> Plan:
    return Plan(jobs=(whole_node(setting, "pretrain", programs.training(setting.board, setting.gpus)),))


def _during(setting: Setting, *, end_ms: int = FOREVER_MS) -> tuple[tuple[int, int], ...]:
    """Trouble from two minutes after the start."""
    return ((setting.preroll_ms + _START_MS, end_ms),)


def _deadlock(setting: Setting) -> Plan:
    """The job is cancelled in the end: the page for a hang is held while its nodes are silent, up to a day."""
    program = programs.deadlocking(setting.board, setting.gpus, after_ms=2 * MINUTE_MS)
    job = whole_node(setting, "pretrain", program, hold_ms=setting.preroll_ms + _CANCELLED_MS)
    return Plan(jobs=(impatient(job),))


def _spinning(setting: Setting) -> Plan:
    """Without performance counters a hang can only be suspected."""
    plan = SCENARIOS["spin_kernel"].plan(setting)
    return replace(plan, profiler_ms=((0, FOREVER_MS),))


def _without_process(setting: Setting) -> Plan:
    def stages(_: Random) -> Stages:
        yield absent("the image is pulled", FOREVER_MS)

    return Plan(jobs=(SimulatedJob(owner=batch_owner(setting, 1, "sweep"), slots=setting.slots, stages=stages),))


_OVERCOUNTED = 3.0
"""Factor of the FLOPs that a program reports: as with the peak of another dtype, or parameters that are not used."""


@as_program
def _overcounting(rng: Random, program: Program) -> Stages:
    for stage in program(rng):
        step = stage.step
        yield (
            stage
            if step is None
            else replace(stage, step=replace(step, model_flops=_OVERCOUNTED * step.model_flops, hardware_flops=None))
        )


def _misreported(setting: Setting) -> Plan:
    trained = reporting.reporting_trainer(programs.training(setting.board, setting.gpus), setting.board)
    job = whole_node(setting, "pretrain", _overcounting(trained))
    return Plan(jobs=(replace(job, reporting=ReportingOptions(run="drill")),))


def _row(plan: Callable[[Setting], Plan]) -> Scenario:
    return Scenario(plan, HOUR_MS // 1000, "")


DRILL_SCENARIOS: Mapping[str, Scenario] = {
    **SCENARIOS,
    **LEAK_SCENARIOS,
    "drill_still": _row(lambda s: replace(_training(s), still_ms=_during(s, end_ms=s.preroll_ms + 15 * MINUTE_MS))),
    "drill_silent": _row(lambda s: replace(_training(s), silent_ms=_during(s))),
    "drill_refused": _row(lambda s: replace(_training(s), profiler_ms=_during(s), profiler_leaves="refusal")),
    "drill_clock": _row(lambda s: replace(_training(s), clock_ahead_ms=_START_MS)),
    "drill_unanswered": _row(lambda s: replace(_training(s), unanswered_ms=_during(s))),
    "drill_deadlock": _row(_deadlock),
    "drill_spinning": _row(_spinning),
    "drill_without_process": _row(_without_process),
    "drill_misreported": _row(_misreported),
    "drill_unallocated": _row(lambda _: Plan()),
}

DRILLS: Mapping[str, Drill] = {
    "GPUEfficiencyConservationBroken": Drill(
        minutes=4, books=False, about="the daemon counts an error in its books, although there is none",
    ),
    "GPUEfficiencyExporterBlind": Drill(
        scenario="drill_silent", minutes=18,
        about="two minutes after the start the telemetry source stops answering",
    ),
    "GPUEfficiencyExporterClockSkew": Drill(
        scenario="drill_clock", minutes=14, about="the node's clock is two minutes ahead",
    ),
    "GPUEfficiencyExporterDown": Drill(
        scenario="drill_still", minutes=11,
        about="two minutes after the start the daemon stops answering scrapes, for 13 minutes. Prometheus must have"
        " scraped it before. The ticket ends after it answers again",
    ),
    "GPUEfficiencyExporterMissing": Drill(
        cluster=True, minutes=22, companions=("GPUEfficiencyLowAllocationWithQueue",),
        about="a simulated Slurm has a node without an exporter",
    ),
    "GPUEfficiencyExporterProfilingBlocked": Drill(
        scenario="drill_refused", minutes=18,
        about="two minutes after the start the driver refuses the performance counters",
    ),
    "GPUEfficiencyExemptionExpired": Drill(
        minutes=4, about="an exemption expired on 1 January 2026",
        settings={"exemptions": ({
            "id": "drill", "reason": "a drill of the pager", "expires": "2026-01-01", "name": "drill",
        },)},
    ),
    "GPUEfficiencyFleetBlind": Drill(
        scenario="drill_silent", minutes=26, nodes=2, companions=("GPUEfficiencyExporterBlind",),
        about="two minutes after the start the telemetry of two nodes stops answering. Start both nodes. The rules"
        " remember the nodes for a day after you stop them:"
        ' silence cluster="drill-GPUEfficiencyFleetBlind" for that time',
    ),
    "GPUEfficiencyGPUAllocatedWithoutProcess": Drill(
        scenario="drill_without_process", minutes=3, preroll_seconds=3000,
        about="a job has held two GPUs for 50 minutes without a process",
    ),
    "GPUEfficiencyGPULost": Drill(
        scenario="lost_gpu", gpus=3, minutes=3, preroll_seconds=720,
        about="a GPU fell off the bus two minutes before the start, and its job waits",
    ),
    "GPUEfficiencyGPUOversized": Drill(
        scenario="oversized_allocation", minutes=12, preroll_seconds=4200, gpus=1,
        about="a job that needs a small part of its GPU has run for 70 minutes",
    ),
    "GPUEfficiencyGPUThrottledCostly": Drill(
        scenario="throttled", minutes=14, preroll_seconds=360, gpus=1, settings={"policy.throttled_share": 0.02},
        about="heat lowers the clocks. The alert counts the last half hour, so the drill sets throttled_share to 2 %",
    ),
    "GPUEfficiencyGPUUnownedProcess": Drill(
        scenario="leaked_process", minutes=10, preroll_seconds=1320,
        about="a process has continued for 12 minutes after its job ended",
    ),
    "GPUEfficiencyGPUZombie": Drill(
        scenario="idle_context", gpus=1, minutes=3, preroll_seconds=2700,
        about="a batch job has kept a CUDA context for 45 minutes and run no kernel",
    ),
    "GPUEfficiencyHistoryFailing": Drill(
        minutes=20, history=False, about="from the start, the daemon's history cannot be written",
    ),
    "GPUEfficiencyIdleAllocationCost": Drill(
        scenario="drill_unallocated", minutes=21, settings={"budget.idle_per_hour": 0.01},
        about="no GPU is allocated, and the drill sets the budget for idle GPUs to 0.01 an hour",
    ),
    "GPUEfficiencyJobDeadlocked": Drill(
        scenario="drill_deadlock", gpus=8, minutes=5, preroll_seconds=2400,
        about="a job of eight GPUs has hung for 38 minutes. 30 minutes after the start it is cancelled, which ends the"
        " page. Let the drill run until then: a page stays while the job's nodes do not respond",
    ),
    "GPUEfficiencyJobFlopsMisreported": Drill(
        scenario="drill_misreported", minutes=27, preroll_seconds=600, gpus=1,
        about="a training job reports three times the FLOPs that it executes",
    ),
    "GPUEfficiencyJobHungSuspected": Drill(
        scenario="drill_spinning", gpus=1, minutes=14, preroll_seconds=300,
        about="a kernel has spun for five minutes, and the counters that could prove a hang are missing",
    ),
    "GPUEfficiencyLowAllocationWithQueue": Drill(
        cluster=True, minutes=16, companions=("GPUEfficiencyExporterMissing",),
        about="a simulated Slurm has a pending job that would fit its free GPUs",
    ),
    "GPUEfficiencyNodeScrapedTwice": Drill(
        minutes=16, scrape_jobs=2, gpus=1, about="two scrape jobs have the same target",
    ),
    "GPUEfficiencyRegressed": Drill(
        scenario="drill_unallocated", minutes=45,
        about="no GPU is allocated; on the day before, which you load into Prometheus, 90 % of the time was",
        past={"cluster:gpu_efficiency_owned:gpus": 2.0, "cluster:gpu_efficiency_gau:ratio_rate5m": 0.9},
    ),
    "GPUEfficiencySchedulerDataStale": Drill(
        scenario="drill_unanswered", minutes=16, companions=("GPUEfficiencyExporterBlind",),
        about="two minutes after the start the scheduler stops answering. Later the owners of the GPUs are unknown, so"
        " their time is unobserved too",
    ),
    "GPUEfficiencyStragglerRank": Drill(
        scenario="straggler", minutes=44, preroll_seconds=300, gpus=8,
        about="every step of a job waits for one rank with a slow host",
    ),
}  # fmt: skip
