"""Exporters that start late, end and restart while one looks, and a 64-GPU hang seven minutes after it began.

Truth is the books of all daemons that a node had, and of the hang also the story itself: when it begins, and on how
many GPUs. What nobody heard is known by arithmetic: which exporter was silent for how long.
"""

from collections.abc import Callable, Mapping

from tests.dashboards.expected.chargeback import by_leak, paid
from tests.dashboards.expected.fleet import PRICE, lost, of_a_hundred, share
from tests.dashboards.expected.row import Expected
from tests.dashboards.expected.zombies import DETECTED, TROUBLE, UNUSABLE, WORST
from tests.dashboards.hang import GPUS, HUNG_FOR, JOB, NODES
from tests.dashboards.stories import Played
from tests.dashboards.world import ENDED, MOVES

USD = {"currency": "USD"}
MINUTES = MOVES // 60
"""All of the story."""
ON_A_NODE = 2
"""GPUs of each node of the cluster moves."""
UNHEARD = ON_A_NODE * (ENDED - 300) / 3600
"""GPU-hours of the exporter that ends: a node does not report after five minutes, so that a restart is no outage.
Before an exporter's start nobody knows of its node."""
BIG = NODES * GPUS
STUCK = {"job_id": JOB}
RESTARTED, LATE_JOB = "gpu-node-06", "40000"


def always(figure: float) -> Callable[[Played], float]:
    """What the story is made with."""
    return lambda _: figure


def of_node(host: str, leak: str) -> Callable[[Played], float]:
    """GPU-hours of a leak on one node, by all its daemons."""

    def worth(played: Played) -> float:
        (node,) = (each for each in played.nodes if each.host == host)
        return Played(played.cluster, played.end, (node,)).leaks(MINUTES)[leak] / 3600

    return worth


def a_useful_hour(played: Played) -> float:
    """Money of all that is paid for, heard or not, for a useful GPU-hour."""
    return PRICE * (paid(played, MINUTES) + UNHEARD) / by_leak("useful", MINUTES)(played)


def moves(
    panel: str, worth: Callable[[Played], float], *, letter: str = "A", within: float = 0.03,
    where: Mapping[str, str] = {},
) -> Expected:  # fmt: skip
    """A panel over all of the story."""
    return Expected(
        panel=panel, scenario="moves", minutes=MINUTES, letter=letter, where=where, worth=worth, within=within
    )  # fmt: skip


def hang(
    panel: str, worth: Callable[[Played], float] | float, *, letter: str = "A", within: float = 0.0,
    where: Mapping[str, str] = {},
) -> Expected:  # fmt: skip
    """A panel of an hour that ends seven minutes into the hang."""
    told = worth if callable(worth) else always(worth)
    return Expected(panel=panel, scenario="hang_across", letter=letter, where=where, worth=told, within=within)


ROWS: Mapping[str, tuple[Expected, ...]] = {
    "fleet": (
        *(
            moves("GAU x ECTR x eMFU = useful", share(which, MINUTES), letter=letter)
            for letter, which in (("C", "ectr"), ("E", "emfu"), ("G", "product"))
        ),
        moves("What we get", lambda played: 100 * share("product", MINUTES)(played)),
        *(
            moves("Useful and its factors, without rules", share(which, MINUTES), letter=letter)
            for letter, which in (("A", "product"), ("C", "ectr"), ("D", "emfu"))
        ),
        *(
            moves(panel, of_a_hundred(leak, MINUTES), where={"leak": leak})
            for panel in ("Of 100 GPU-hours paid", "Of 100 GPU-hours, without rules")
            for leak in ("memory_bound", "throttled", "useful")
        ),
        moves("A useful hour", a_useful_hour, where=USD),
        moves(
            "Teams, and what nobody holds", always(UNHEARD), where={"team": "nobody: GPUs not reporting"}, within=0.05
        ),
    ),
    "chargeback": (
        moves("GPU-hours", lambda played: paid(played, MINUTES)),
        moves("Paid", lambda played: PRICE * paid(played, MINUTES), where=USD),
        moves("Lost of it", lambda played: PRICE * lost(MINUTES)(played) * paid(played, MINUTES), where=USD),
        *(
            moves("GPU-hours lost by leak", by_leak(leak, MINUTES), where={"leak": leak})
            for leak in ("memory_bound", "throttled")
        ),
        moves("All that was paid for", always(UNHEARD), where={"what": "GPUs not reporting"}, within=0.05),
    ),
    "quality": (
        moves("GPU-hours not seen, by reason", always(UNHEARD), where={"reason": "node not reporting"}, within=0.05),
        moves("GPUs owned, heard, silent", always(4 * ON_A_NODE), within=0),
        moves("GPUs owned, heard, silent", always(3 * ON_A_NODE), letter="B", within=0),
        hang("GPUs owned, heard, silent", 0, letter="C"),
    ),
    "node": tuple(
        Expected(
            panel="What the node lost",
            scenario="moves",
            minutes=MINUTES,
            variables={"node": RESTARTED},
            where={"leak": leak},
            worth=of_node(RESTARTED, leak),
            leak=leak,
            within=0.03,
        )
        for leak in ("throttled", "memory_bound")
    ),
    "job": (
        Expected(
            panel="GPU-hours",
            scenario="moves",
            minutes=MINUTES,
            variables={"job_id": LATE_JOB},
            within=1e-6,
            worth=lambda played: sum(played.leaks(job=LATE_JOB).values()) / 3600,
        ),
    ),
    "training": (hang("Time to detect, time to recover", 300, where={"state": "hung"}, within=0.01),),
    "zombies": (
        *(hang("GPUs in trouble now", figure, letter=letter) for letter, figure in (("A", BIG), ("B", 0))),
        hang(UNUSABLE, 0, letter="C"),
        hang(WORST, BIG, where=STUCK),
        hang(WORST, BIG * PRICE, letter="B", where=STUCK | USD, within=1e-6),
        hang(WORST, HUNG_FOR, letter="C", where=STUCK, within=1e-6),
        hang(WORST, BIG * PRICE * HUNG_FOR / 3600, letter="D", where=STUCK | USD, within=1e-6),
        hang(WORST, 1, letter="E", where=STUCK | {"node": "gpu-node-00", "gpu": "0"}),
        hang(WORST, lambda played: 1000 * (played.end - HUNG_FOR), letter="F", where=STUCK, within=1e-9),
        hang("Lost an hour, now", BIG * PRICE, where=USD, within=1e-6),
        # Rates of five minutes, recorded every four: of the last four minutes a fifth is still to come.
        hang("Lost over the time shown", lambda played: PRICE * by_leak("hung", 60)(played), where=USD, within=0.21),
        hang(DETECTED, 300, where={"state": "hung"}, within=0.01),
        hang(DETECTED, HUNG_FOR, letter="B", within=1e-6),
        hang(TROUBLE, BIG, letter="C", where=STUCK),
        hang("GPUs newly found hung or zombie", BIG, where={"state": "hung"}, within=0.05),
    ),
}
