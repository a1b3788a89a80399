"""The Zombies board: who hangs, since when, what it costs, who is the culprit, and the signs, of stories of trouble."""

from collections.abc import Callable

from exporter.core.model import SECOND, State
from exporter.core.snapshot import JobView
from tests.dashboards.expected.fleet import PRICE, in_state
from tests.dashboards.expected.node import USD, gpu, reading, state
from tests.dashboards.expected.row import Expected
from tests.dashboards.stories import Played

STUCK = {"job_id": "41001"}
WORST = "The worst now: call its owner"
MILLISECOND = SECOND / 1000
"""Nanoseconds."""
TROUBLE = "Jobs that hang, and jobs that hold GPUs for nothing"
DETECTED = "Time to detect, and the longest hang now"
TICKET = 2
"""Weight of the severity: the job has fewer GPUs than a hang pages for."""


def job(played: Played, name: str) -> JobView:
    """One job as it is at the end."""
    return next(each for each in played.nodes[0].last.jobs if each.owner.job_id == name)


def ago(moment: int | None, played: Played) -> float:
    """Seconds before the end."""
    assert moment is not None
    return played.end - moment / SECOND


def cost_of(name: str) -> Callable[[Played], float]:
    """An hour of the GPUs in a state, at the end."""
    return lambda played: in_state(name)(played) * PRICE


def cost(leak: str, minutes: int) -> Callable[[Played], float]:
    """Money that a leak took."""
    return lambda played: played.leaks(minutes)[leak] / 3600 * PRICE


def found(which: State) -> Callable[[Played], float]:
    """Mean seconds from the first sign to the state."""

    def worth(played: Played) -> float:
        count, spent = next((n, ns) for name, n, ns in played.nodes[0].last.detections if name is which)
        return spent / SECOND / count

    return worth


def sign(name: str, index: str) -> Callable[[Played], float]:
    """What a sign says of a GPU at the end."""
    return lambda played: float(dict(gpu(played, index).hang_signs)[name])


def confidence(played: Played) -> float:
    """Of the signs of GPU 1."""
    return gpu(played, "1").hang_confidence or 0.0


UNUSABLE = "Leaked, out of service, or not seen now"
RUNBOOKS = {"runbooks": "https://wiki.example/runbooks"}
ROWS = (
    *(
        Expected(panel=panel, scenario=story, letter=letter, worth=in_state(name), within=0)
        for panel, story, letter, name in (
            ("GPUs in trouble now", "deadlock", "A", "hung"),
            ("GPUs in trouble now", "zombie_notebook", "C", "zombie"),
            (UNUSABLE, "leaked_process", "A", "unowned"),
            (UNUSABLE, "lost_gpu", "B", "unavailable"),
        )
    ),
    *(
        Expected(
            panel=WORST, scenario=story, letter=letter, where=where, worth=worth, within=within, variables=RUNBOOKS
        )
        for story, letter, where, worth, within in (
            ("deadlock", "A", STUCK | {"runbook": "GPUEfficiencyJobDeadlocked"}, in_state("hung"), 0),
            ("deadlock", "B", STUCK | USD, cost_of("hung"), 1e-6),
            ("deadlock", "E", STUCK | {"gpu": "0", "rank": "0"}, lambda _: 1, 0),
            ("deadlock", "F", STUCK, lambda played: (job(played, "41001").spin_since or 0) / MILLISECOND, 1e-9),
            ("zombie_notebook", "A", {"runbook": "GPUEfficiencyGPUZombie"}, lambda _: 1, 0),
        )
    ),
    Expected(panel="Lost an hour, now", scenario="deadlock", where=USD, worth=cost_of("hung")),
    Expected(panel="Lost an hour, now", scenario="zombie_notebook", where=USD, worth=cost_of("zombie")),
    Expected(
        panel="Lost over the time shown", scenario="training_waterfall", minutes=600, where=USD,
        worth=cost("hung", 600), leak="hung", within=0.03,
    ),
    Expected(
        panel="Lost over the time shown", scenario="zombie_notebook", minutes=180, letter="B", where=USD,
        worth=cost("idle_allocation", 180), leak="idle_allocation", within=0.04,
    ),
    Expected(
        panel=DETECTED, scenario="deadlock", where={"state": "hung"}, worth=found(State.HUNG), within=0.01,
    ),
    Expected(
        panel=DETECTED, scenario="deadlock", letter="B",
        worth=lambda played: ago(job(played, "41001").spin_since, played), within=1e-3,
    ),
    Expected(panel=TROUBLE, scenario="deadlock", where=STUCK | {"user": "ada"}, worth=in_state("hung"), within=0),
    Expected(panel=TROUBLE, scenario="deadlock", letter="B", where=STUCK | USD, worth=cost_of("hung")),
    Expected(
        panel=TROUBLE, scenario="deadlock", letter="H", where=STUCK,
        worth=lambda played: ago(job(played, "41001").spin_since, played),
    ),
    Expected(
        panel=TROUBLE, scenario="deadlock", letter="K", where=STUCK, within=1e-9,
        worth=lambda played: (job(played, "41001").spin_since or 0) / MILLISECOND,
    ),
    Expected(
        panel=TROUBLE, scenario="deadlock", letter="I", where=STUCK,
        worth=lambda played: ago(job(played, "41001").worked_at, played),
    ),
    Expected(
        panel="Firing alerts on jobs and GPUs", scenario="deadlock", letter="C",
        where={"alertname": "GPUEfficiencyJobDeadlocked", "runbook": "GPUEfficiencyJobDeadlocked"} | STUCK,
        variables=RUNBOOKS,
        worth=lambda played: TICKET * (played.states()["hung"] > 0), within=0,
    ),
    Expected(
        panel="Firing alerts on jobs and GPUs", scenario="fleet", letter="B", within=0,
        where={"alertname": "GPUEfficiencyGPUZombie", "user": "grace"}, worth=in_state("zombie"),
    ),
    Expected(
        panel="Culprits of hangs", scenario="deadlock", where=STUCK | {"gpu": "0"}, within=0,
        worth=lambda played: gpu(played, "0").reason == "culprit",
    ),
    *(
        Expected(
            panel="Leaked processes, and GPUs out of service", scenario=story, where={"state": name}, leak=leak,
            worth=in_state(name), within=0,
        )
        for story, name, leak in (("lost_gpu", "unavailable", "unavailable"), ("leaked_process", "unowned", ""))
    ),
    Expected(panel="Money an hour", scenario="deadlock", minutes=30, worth=cost_of("hung"), leak="hung"),
    Expected(
        panel="Money an hour", scenario="lost_gpu", minutes=30, letter="C", worth=cost_of("unavailable"),
        leak="unavailable",
    ),
    Expected(
        panel="Signs of a hang", scenario="deadlock", letter="B", where={"gpu": "1"}, variables=STUCK,
        worth=confidence,
    ),
    Expected(
        panel="Signs of a hang", scenario="deadlock", letter="G", where={"gpu": "1"}, variables=STUCK, within=0,
        worth=sign("nvlink_rest", "1"),
    ),
    Expected(
        panel="Signs of a hang", scenario="deadlock", letter="C", where={"gpu": "0"}, variables=STUCK, within=0,
        worth=lambda played: 2 * (gpu(played, "0").reason == "culprit"),
    ),
    Expected(
        panel="State", scenario="deadlock", minutes=30, where={"gpu": "1"}, variables=STUCK, within=0,
        worth=state("1"),
    ),
    Expected(
        panel="Power draw against the limit", scenario="deadlock", minutes=30, where={"gpu": "1"}, variables=STUCK,
        worth=reading("power_watts", "1"),
    ),
    Expected(
        panel="Power draw against the limit", scenario="deadlock", minutes=30, letter="E", variables=STUCK,
        worth=reading("enforced_power_limit_watts", "1"),
    ),
)  # fmt: skip
