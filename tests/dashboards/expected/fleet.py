"""The Fleet board: the factors, where 100 GPU-hours went, money, and the worst, of stories with known books."""

from collections.abc import Callable

from tests.dashboards.expected.chargeback import held, unheld, useful
from tests.dashboards.expected.chargeback import lost as lost_by
from tests.dashboards.expected.row import Expected
from tests.dashboards.scheduler import DOWN, LOST
from tests.dashboards.scheduler import GPUS as ON_A_NODE
from tests.dashboards.stories import Played
from tests.dashboards.weeks import GPUS, fleet

PRICE = 2.5
MONTH = 730
PER_KWH, KG_PER_KWH = 0.12, 0.38
SILENT = 1800
"""Seconds for which a daemon of the cluster blind has not been heard."""
LOSSES = ("gau", "ectr", "emfu")
ABOVE_BELOW = {
    "gau": (("ectr", "emfu", "useful", "unresolved"), ("gau", "ectr", "emfu", "useful", "unresolved")),
    "ectr": (("emfu", "useful", "unresolved"), ("ectr", "emfu", "useful", "unresolved")),
    "emfu": (("useful",), ("emfu", "useful")),
    "product": (("useful",), ("gau", "ectr", "emfu", "useful")),
}
"""Layers above and below the line of each ratio, after the accounting; the product's where nothing is unresolved."""


def share(which: str, minutes: int) -> Callable[[Played], float]:
    """One of the ratios out of the books."""

    def worth(played: Played) -> float:
        layers = played.layers(minutes)
        above, below = (sum(layers.get(name, 0.0) for name in names) for names in ABOVE_BELOW[which])
        return above / below

    return worth


def of_a_hundred(leak: str, minutes: int) -> Callable[[Played], float]:
    """Hours of 100 paid."""

    def worth(played: Played) -> float:
        leaks = played.leaks(minutes)
        return 100 * leaks[leak] / sum(leaks.values())

    return worth


def unseen(played: Played, minutes: float) -> float:
    """GPU-hours of daemons that report, which they did not see."""
    return played.leaks(minutes)["unobserved"] / 3600


def useful_hours(played: Played) -> float:
    """GPU-hours of the last hour."""
    return played.leaks(60)["useful"] / 3600


def week_ago(played: Played, leak: str) -> float:
    """GPU-hours of the fleet's last hour, a week earlier."""
    end = played.end - 7 * 86_400
    found = [fleet(end - 60 * minute)[leak] for minute in range(60)]
    return sum(found) / len(found)


def gpus(played: Played) -> int:
    """Boards of the cluster."""
    return sum(played.states().values())


def in_state(state: str) -> Callable[[Played], float]:
    """GPUs in a state at the end."""
    return lambda played: played.states().get(state, 0)


def lost(minutes: int) -> Callable[[Played], float]:
    """Share of the money that is lost: every GPU costs the same."""

    def worth(played: Played) -> float:
        layers = played.layers(minutes)
        return sum(layers.get(name, 0.0) for name in LOSSES) / sum(layers.values())

    return worth


def recoverable(played: Played) -> float:
    """GPUs, of an hour, with the product at 0.85 x 0.9 x 0.5."""
    layers = played.layers(60)
    useful = layers["useful"] / 3600
    return (sum(layers.values()) - layers.get("unobserved", 0.0)) / 3600 - useful / 0.3825


# The scheduler has one node of eight more, which is down.
ROWS = (
    *(
        Expected(
            panel="GAU x ECTR x eMFU = useful", scenario="carpenter_told", minutes=600, letter=letter,
            worth=share(which, 600),
        )
        for letter, which in zip("ACEG", ("gau", "ectr", "emfu", "product"), strict=True)
    ),
    Expected(
        panel="What we get", scenario="carpenter_told", minutes=600,
        worth=lambda played: 100 * share("product", 600)(played),
    ),
    *(
        Expected(
            panel="Of 100 GPU-hours paid", scenario=story, minutes=minutes, where={"leak": leak},
            worth=of_a_hundred(leak, minutes), within=0.04,
        )
        for story, minutes, leak in (
            ("training_waterfall", 600, "useful"),
            ("training_waterfall", 600, "memory_bound"),
            ("training_waterfall", 600, "exposed_communication"),
            ("inference_waterfall", 600, "kv_cache_pressure"),
            ("inference_waterfall", 600, "idle_allocation"),
        )
    ),
    Expected(
        panel="Of 100 GPU-hours paid", scenario="training_waterfall", minutes=600, letter="C",
        where={"leak": "memory_bound"}, within=0.04,
        worth=lambda played: of_a_hundred("memory_bound", 600)(played) / 100 * gpus(played) * PRICE * MONTH,
    ),
    Expected(
        panel="The biggest leaks", scenario="training_waterfall", minutes=600, where={"leak": "memory_bound"},
        within=0.04,
        worth=lambda played: of_a_hundred("memory_bound", 600)(played) / 100 * gpus(played) * PRICE * MONTH,
    ),
    Expected(
        panel="The biggest leaks", scenario="training_waterfall", minutes=600, letter="B",
        where={"leak": "memory_bound", "team": "foundation"}, within=0.04,
        worth=lambda played: of_a_hundred("memory_bound", 600)(played) / 100 * gpus(played) * PRICE * 10,
    ),
    Expected(
        panel="Cost at the rate of the time shown", scenario="fleet", minutes=60, letter="B", where={"currency": "USD"},
        worth=lambda played: gpus(played) * PRICE * MONTH,
    ),
    Expected(
        panel="Cost at the rate of the time shown", scenario="fleet", minutes=60, where={"currency": "USD"},
        worth=lambda played: lost(60)(played) * gpus(played) * PRICE * MONTH,
    ),
    Expected(
        panel="Energy a month", scenario="fleet", minutes=60, where={"currency": "USD"},
        worth=lambda played: sum(played.joules(60).values()) / 3.6e6 * PER_KWH * MONTH,
    ),
    Expected(
        panel="Energy a month", scenario="fleet", minutes=60, letter="B",
        worth=lambda played: sum(played.joules(60).values()) / 3.6e6 * KG_PER_KWH * MONTH,
    ),
    Expected(
        panel="A useful hour", scenario="fleet", minutes=60, where={"currency": "USD"},
        worth=lambda played: PRICE * sum(played.leaks(60).values()) / played.leaks(60)["useful"],
    ),
    *(
        Expected(
            panel="Useful and its factors, without rules", scenario="training_waterfall", minutes=600, letter=letter,
            worth=share(which, 600), within=0.03,
        )
        for letter, which in (("A", "product"), ("B", "gau"), ("C", "ectr"), ("D", "emfu"))
    ),
    Expected(
        panel="Paid and lost an hour, without rules", scenario="deadlock", where={"currency": "USD"},
        worth=lambda played: gpus(played) * PRICE,
    ),
    Expected(
        panel="Of 100 GPU-hours, without rules", scenario="training_waterfall", minutes=600,
        where={"leak": "memory_bound"}, worth=of_a_hundred("memory_bound", 600), within=0.03,
    ),
    *(
        Expected(
            panel="Who hangs, and who holds GPUs for nothing, without rules", scenario="deadlock", letter=letter,
            where={"job_id": "41001"} | more, worth=worth, within=within,
        )
        for letter, more, worth, within in (
            ("A", {"user": "ada", "state": "hung"}, in_state("hung"), 0),
            ("B", {"currency": "USD"}, lambda played: in_state("hung")(played) * PRICE, 1e-6),
            ("D", {"gpu": "0", "rank": "0"}, lambda _: 1, 0),
        )
    ),
    *(
        Expected(
            panel="Teams, and what nobody holds", scenario="fleet", letter=letter, where={"team": team} | more,
            worth=worth, within=0.04,
        )
        for letter, team, more, worth in (
            ("A", "perception", {}, held("team", "perception")),
            ("A", "nobody: free GPUs", {}, lambda played: unheld(played, 60)),
            ("A", "nobody: GPUs not reporting", {}, lambda _: ON_A_NODE),
            ("B", "nobody: free GPUs", {"currency": "USD"}, lambda played: unheld(played, 60) * PRICE),
            ("C", "nobody: free GPUs", {"currency": "USD"}, lambda played: unheld(played, 60) * PRICE),
            ("C", "perception", {"currency": "USD"}, lost_by("team", "perception")),
            ("D", "perception", {}, useful("team", "perception")),
        )
    ),
    *(
        Expected(
            panel="Change against a week ago", scenario="fleet", letter=letter, where={"what": what, "in": unit},
            worth=worth, within=within,
        )
        for letter, what, unit, worth, within in (
            ("A", "useful", "GPU-hours", useful_hours, 0.03),
            ("B", "useful", "GPU-hours", lambda played: week_ago(played, "useful"), 0.03),
            ("C", "useful", "GPU-hours", lambda played: useful_hours(played) - week_ago(played, "useful"), 0.05),
            ("C", "lost", "USD", lambda played: PRICE * (week_ago(played, "useful") - useful_hours(played)), 0.05),
            ("C", "paid", "USD", lambda played: PRICE * (gpus(played) - GPUS), 1e-4),
        )
    ),
    Expected(
        panel="Jobs that lose most, now", scenario="fleet", where={"job_id": "45001", "whose": "foundation"},
        worth=lambda played: PRICE * (played.leaks(5, job="45001")["hung"]) / 300,
    ),
    Expected(panel="Recoverable, if 38 % were useful", scenario="fleet", minutes=60, worth=recoverable),
    Expected(panel="GPUs owned", scenario="fleet", worth=lambda played: gpus(played) + 8, within=0),
    # A node that is expected and was never heard, one whose daemon is silent, and one whose daemon sees nothing.
    *(
        Expected(
            panel="GPUs not seen now, by node", scenario=story, minutes=minutes, letter=letter,
            where={"node": node} | more, worth=worth, within=within,
        )
        for story, minutes, node, letter, more, worth, within in (
            ("fleet", 60, DOWN, "A", {"why": "no exporter"}, lambda _: ON_A_NODE, 0),
            ("fleet", 60, DOWN, "C", {}, lambda _: ON_A_NODE, 0.07),
            ("blind", 60, "gpu-node-06", "A", {"why": "silent"}, lambda _: ON_A_NODE, 0),
            ("blind", 60, "gpu-node-06", "B", {}, lambda _: SILENT, 0.15),
            ("blind", 60, "gpu-node-06", "C", {}, lambda _: ON_A_NODE * SILENT / 3600, 0.15),
            ("blind", 10, "gpu-node-06", "C", {}, lambda _: ON_A_NODE / 6, 0.3),
            ("blind", 60, "gpu-node-06", "D", {"currency": "USD"}, lambda _: ON_A_NODE * PRICE, 1e-6),
            ("blind", 60, "gpu-node-02", "A", {"why": "sees no GPU"}, lambda played: unseen(played, 5) * 12, 0.02),
            ("blind", 30, "gpu-node-02", "C", {}, lambda played: unseen(played, 30), 0.08),
            ("blind", 60, "gpu-node-02", "D", {}, lambda played: unseen(played, 5) * 12 * PRICE, 0.02),
        )
    ),
    *(
        Expected(
            panel="Preemptions: who gave way to whom", scenario="fleet", letter=letter, within=1e-6,
            where={"partition": "spot", "qos": "low", "by_partition": "gpu", "by_qos": "high"}, worth=worth,
        )
        for letter, worth in (("A", lambda _: 2), ("B", lambda _: 2 * ON_A_NODE * LOST / 3600))
    ),
    Expected(
        panel="Jobs whose start cost others most", scenario="fleet", where={"job_id": "40000"}, within=0,
        worth=lambda _: 2 * ON_A_NODE * LOST / 3600,
    ),
    *(
        Expected(
            panel="Hung and zombie GPUs now: whose they are, dearest first", scenario=story, letter=letter,
            where={"state": name} | more, worth=worth, within=within,
        )
        for story, name, letter, more, worth, within in (
            ("deadlock", "hung", "A", {"user": "ada"}, in_state("hung"), 0),
            ("deadlock", "hung", "E", {"job_id": "41001"}, in_state("hung"), 0),
            ("deadlock", "hung", "B", {"currency": "USD"}, lambda played: in_state("hung")(played) * PRICE, 1e-6),
            ("zombie_notebook", "zombie", "A", {}, in_state("zombie"), 0),
        )
    ),
)  # fmt: skip
