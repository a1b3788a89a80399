"""The Training board: each leak in its own story, where the table, the curves and the figures must have the books'."""

from collections.abc import Callable, Iterator
from string import ascii_uppercase

from dashboards.leaks import rows
from dashboards.losses import TRAINING, losses
from tests.dashboards.expected.row import Expected
from tests.dashboards.stories import Played

PRICE, MONTH = 2.5, 730
STORIES = {
    "memory_bound": "memory_bound",
    "low_parallelism": "low_parallelism",
    "idle_allocation": "zombie_notebook",
    "oversized_allocation": "oversized_allocation",
    "host_overhead": "host_overhead",
    "hung": "hung",
    "failure_recovery": "failure_recovery",
    "checkpoint": "checkpoint",
    "rework": "rework",
    "exposed_communication": "exposed_communication",
    "pipeline_bubble": "pipeline_bubble",
    "recomputation": "recomputation",
    "data_stall": "data_stall",
    "padding": "padding",
    "throttled": "throttled",
    "other_compute": "healthy_training",
    "unattributed_stall": "carpenter",
}
"""In which the curve of a leak that is chosen ends with a loss."""
CURVE = "Of 100 GPU-hours, over time"
TABLE = "What training jobs lose, whose it is, which signal it needs"


def of_a_hundred(rows: tuple[str, ...], minutes: float, whole: float = 100) -> Callable[[Played], float]:
    """Hours of 100, or of another whole; in these stories jobs hold every GPU."""

    def worth(played: Played) -> float:
        leaks = played.leaks(minutes)
        return whole * sum(leaks[row] for row in rows) / sum(leaks.values())

    return worth


def a_month(rows: tuple[str, ...], minutes: float) -> Callable[[Played], float]:
    """Money for so much of it in a month as in these minutes."""

    def worth(played: Played) -> float:
        leaks = played.leaks(minutes)
        return sum(leaks[row] for row in rows) / (minutes * 60) * PRICE * MONTH

    return worth


def lost_a_month(minutes: float) -> Callable[[Played], float]:
    """The same of all losses."""
    return lambda played: (
        sum(played.layers(minutes)[layer] for layer in ("gau", "ectr", "emfu")) / (minutes * 60) * PRICE * MONTH
    )


def goodput(played: Played) -> float:
    """Of the one job's time what was not spent on being ready, since its start."""
    leaks = played.leaks()
    ready = ("unavailable", "idle_allocation", "hung", "failure_recovery", "startup", "checkpoint", "rework")
    return 1 - sum(leaks[name] for name in ready) / (sum(leaks.values()) - leaks["unobserved"])


def mfu(played: Played) -> float:
    """By the jobs' own count: useful time, where it alone is resolved and counted."""
    leaks = played.leaks(5)
    return leaks["useful"] / sum(leaks.values())


def curves() -> Iterator[Expected]:
    """Of each row of LEAKS, at the end: a mean of five minutes."""
    for loss in losses(TRAINING):
        for row in loss.rows:
            if row in STORIES:
                yield Expected(
                    panel=CURVE, scenario=STORIES[row], variables={"leak": "|".join(loss.rows)}, where={"leak": row},
                    worth=of_a_hundred((row,), 5), leak=row, within=0.001,
                )  # fmt: skip


def table() -> Iterator[Expected]:
    """Of each of the twelve in its first row's story, from its beginning to its end; a job takes seconds to start."""
    for loss in losses(TRAINING):
        if loss.of_twelve and STORIES[loss.rows[0]] == loss.rows[0]:
            yield Expected(
                panel=TABLE, scenario=loss.rows[0], where={"loss": loss.key}, minutes=180,
                worth=of_a_hundred(loss.rows, 180), within=0.06, leak=loss.rows[0],
            )  # fmt: skip


def watched(title: str, leak: str) -> str:
    """The letter of the last metric to watch of a leak on one of their panels."""
    (panel,) = (panel for panel in rows(TRAINING)[1].panels if panel.title == title)
    asked = zip(ascii_uppercase, panel.queries, strict=False)
    return [letter for letter, query in asked if f'"chosen", "{leak}"' in query.expr][-1]


ROWS = (
    *curves(),
    *table(),
    Expected(
        panel="Amounts", scenario="lost_gpu", variables={"leak": "unavailable"}, where={"chosen": "unavailable"},
        leak="unavailable", letter=watched("Amounts", "unavailable"),
        worth=lambda played: played.states()["unavailable"],
    ),
    Expected(
        panel=CURVE, scenario="memory_bound", variables={"leak": "padding"}, letter="C", leak="padding",
        worth=lambda _: next(loss for loss in losses(TRAINING) if loss.name == "padding").expected.high, within=0,
    ),
    Expected(
        panel=TABLE, scenario="training_waterfall", where={"loss": "14"}, minutes=600, within=0.3, leak="startup",
        worth=of_a_hundred(("startup",), 600),
    ),
    *(
        Expected(
            panel=TABLE, scenario="training_waterfall", letter=letter, where={"loss": "01", "currency": "USD"},
            minutes=600, within=0.02, worth=a_month(("memory_bound", "low_parallelism"), 600),
        )
        for letter in "CD"
    ),
    *(
        Expected(
            panel="Shares and ratios", scenario=leak, variables={"leak": leak},
            letter=watched("Shares and ratios", leak), where={"spread": "p50"}, within=0.001,
            worth=of_a_hundred((leak,), 5, whole=1),
        )
        for leak in ("exposed_communication", "pipeline_bubble")
    ),
    Expected(panel="Lost", scenario="hung", minutes=20, within=0.03, worth=lost_a_month(20)),
    Expected(panel="Reports", scenario="memory_bound", worth=lambda _: 1.0),
    Expected(panel="Reports", scenario="healthy_training", worth=lambda _: 0.0),
    Expected(panel="MFU", scenario="recomputation", worth=mfu, within=0.001),
    Expected(panel="Goodput", scenario="checkpoint", worth=goodput, within=0.001),
)  # fmt: skip
