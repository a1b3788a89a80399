"""The Chargeback board: the bill of owners, its money and leaks, and what nobody is billed for, out of the books.

The rules of owners look every four minutes at rates of five: what they add up to is near the books, not equal.
"""

from collections.abc import Callable, Iterable

from tests.dashboards.expected.row import Expected
from tests.dashboards.scheduler import GPUS as ON_A_NODE
from tests.dashboards.stories import PER_KWH, PRICE, Played

HOUR = 3600
LOSSES = ("gau", "ectr", "emfu")
SEEN = (*LOSSES, "useful", "unresolved")


def owners(played: Played) -> dict[str, dict[str, str]]:
    """Who answers for each job that is there at the end."""
    return {
        job.owner.job_id: {
            "team": job.owner.team, "account": job.owner.account, "workload_namespace": job.owner.namespace,
            "user": job.owner.user,
        }
        for node in played.nodes for job in node.last.jobs
    }  # fmt: skip


def layers(played: Played, minutes: float, jobs: Iterable[str]) -> dict[str, float]:
    """GPU-hours of jobs together by layer."""
    found: dict[str, float] = {}
    for job in jobs:
        for layer, seconds in played.layers(minutes, job=job).items():
            found[layer] = found.get(layer, 0.0) + seconds / HOUR
    return found


def of(label: str, name: str, minutes: float = 60) -> Callable[[Played], dict[str, float]]:
    """GPU-hours by layer of the jobs of one owner."""
    return lambda played: layers(played, minutes, (j for j, who in owners(played).items() if who[label] == name))


def every(played: Played) -> set[str]:
    """All jobs there ever were."""
    return {job for node in played.nodes for moment in node.moments for job in moment.jobs}


def paid(played: Played, minutes: float) -> float:
    """GPU-hours of all GPUs that were heard."""
    return sum(played.leaks(minutes).values()) / HOUR


def unheld(played: Played, minutes: float) -> float:
    """GPU-hours that no job had."""
    return paid(played, minutes) - sum(layers(played, minutes, every(played)).values())


def held(label: str, name: str) -> Callable[[Played], float]:
    """GPU-hours that an owner held in the last hour."""
    return lambda played: sum(of(label, name)(played).values())


def lost(label: str, name: str) -> Callable[[Played], float]:
    """USD that an owner lost in it."""
    return lambda played: PRICE * sum(of(label, name)(played)[layer] for layer in LOSSES)


def useful(label: str, name: str) -> Callable[[Played], float]:
    """The useful part of what was seen of an owner's time in it."""

    def worth(played: Played) -> float:
        found = of(label, name)(played)
        return found["useful"] / sum(found[layer] for layer in SEEN)

    return worth


def by_leak(leak: str, minutes: float) -> Callable[[Played], float]:
    """GPU-hours of a leak."""
    return lambda played: played.leaks(minutes)[leak] / HOUR


ROWS = (
    # Five hours in which four jobs hold all four GPUs.
    Expected(panel="GPU-hours", scenario="carpenter", minutes=300, worth=lambda played: paid(played, 300)),
    Expected(
        panel="Paid", scenario="carpenter", minutes=300, where={"currency": "USD"},
        worth=lambda played: PRICE * paid(played, 300),
    ),
    *(
        Expected(
            panel=panel, scenario="carpenter", minutes=300, letter=letter, where=where | {"currency": "USD"},
            worth=lambda played: PER_KWH * sum(played.joules(300).values()) / 3.6e6,
        )
        for panel, letter, where in (("Paid", "B", {}), ("Teams", "I", {"team": "science"}))
    ),
    Expected(
        panel="Lost of it", scenario="carpenter", minutes=300, where={"currency": "USD"},
        worth=lambda played: PRICE * sum(played.layers(300)[layer] for layer in LOSSES) / HOUR,
    ),
    # All eight hours, of which nobody had the GPUs in the first two.
    Expected(
        panel="Billed to nobody", scenario="carpenter", minutes=480, within=0.03,
        worth=lambda played: unheld(played, 480) / paid(played, 480),
    ),
    Expected(
        panel="All that was paid for", scenario="carpenter", minutes=480, where={"what": "free GPUs"},
        worth=lambda played: unheld(played, 480), within=0.03,
    ),
    Expected(
        panel="Idle of it", scenario="zombie_notebook", minutes=60, where={"currency": "USD"}, within=0.03,
        worth=lambda played: PRICE * by_leak("idle_allocation", 60)(played),
    ),
    Expected(
        panel="GPU-hours", scenario="fleet", variables={"team": "perception"}, worth=held("team", "perception"),
        within=0.03,
    ),
    *(
        Expected(panel=panel, scenario="fleet", letter=letter, where=where, worth=worth, within=0.03)
        for panel, letter, where, worth in (
            ("Teams", "A", {"team": "perception"}, held("team", "perception")),
            ("Teams", "C", {"team": "perception", "currency": "USD"}, lost("team", "perception")),
            ("Teams", "E", {"team": "perception"}, useful("team", "perception")),
            ("Accounts", "A", {"account": "vision"}, held("account", "vision")),
            ("Accounts", "A", {"account": "(none)"}, held("account", "")),
            ("Namespaces", "C", {"workload_namespace": "inference"}, lost("workload_namespace", "inference")),
            ("Users", "A", {"user": "grace"}, held("user", "grace")),
            ("Users", "C", {"user": "(none)", "currency": "USD"}, lost("user", "")),
        )
    ),
    *(
        Expected(
            panel="GPU-hours lost by leak", scenario="fleet", where={"leak": leak},
            worth=by_leak(leak, 60), within=0.04,
        )
        for leak in ("data_stall", "hung", "memory_bound")
    ),
    Expected(
        panel="What each leak costs, and what to do first", scenario="fleet", letter="B", where={"leak": "data_stall"},
        worth=lambda played: PRICE * by_leak("data_stall", 60)(played), within=0.04,
    ),
    Expected(
        panel="Where these GPU-hours went", scenario="training_waterfall", letter="C", minutes=480, within=0.03,
        worth=lambda played: played.layers(480)["emfu"] / HOUR,
    ),
    Expected(
        panel="Jobs that lose most now", scenario="fleet", where={"job_id": "45001"},
        worth=lambda played: PRICE * sum(layers(played, 5, ("45001",))[layer] for layer in LOSSES) * 12,
    ),
    Expected(
        panel="All that was paid for", scenario="fleet", where={"what": "GPUs not reporting"},
        within=0.04, worth=lambda _: ON_A_NODE,
    ),
    Expected(
        panel="Used by no job", scenario="leaked_process", within=0, worth=lambda played: played.states()["unowned"],
    ),
)  # fmt: skip
