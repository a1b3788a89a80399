"""The Inference board: each leak of servers in its own story, and what an engine said last, on the panels beside."""

from collections.abc import Callable, Iterator

from dashboards.losses import INFERENCE, losses
from exporter.core.serving import ServingView
from tests.dashboards.expected.row import Expected
from tests.dashboards.expected.training import CURVE, of_a_hundred
from tests.dashboards.stories import Played

STORIES = {
    "memory_bound": "memory_bound_decode",
    "low_parallelism": "memory_bound_decode",
    "exposed_communication": "memory_bound_decode",
    "kv_cache_wait": "kv_cache_wait",
    "kv_cache_pressure": "kv_cache_pressure",
    "prefill_decode_interference": "prefill_decode_interference",
    "batching": "batching",
    "rejected_speculation": "rejected_speculation",
}
"""In which the curve of a leak that is chosen ends with a loss, of servers alone."""
NOW = "All servers now"
TABLE = "What servers lose, whose it is, which signal it needs"


def curves() -> Iterator[Expected]:
    """Of each row of LEAKS, at the end: a mean of five minutes."""
    for loss in losses(INFERENCE):
        for row in loss.rows:
            if row in STORIES:
                yield Expected(
                    panel=CURVE, scenario=STORIES[row], variables={"leak": "|".join(loss.rows)}, where={"leak": row},
                    worth=of_a_hundred((row,), 5), within=0.001, leak=row,
                )  # fmt: skip


def table() -> Iterator[Expected]:
    """Of what only engines tell of, from the beginning of its story to its end; a server takes seconds to start."""
    for loss in losses(INFERENCE):
        if STORIES.get(loss.rows[0]) == loss.rows[0]:
            yield Expected(
                panel=TABLE, scenario=loss.rows[0], where={"loss": loss.key}, minutes=180,
                worth=of_a_hundred(loss.rows, 180), within=0.06, leak=loss.rows[0],
            )  # fmt: skip


def of_the_idle_server(played: Played) -> float:
    """Hours of 100 that the server nobody asks holds; the other job trains."""
    jobs = {job: played.leaks(5, job=job) for node in played.nodes for job in node.moments[-1].jobs}
    leaks = next(found for job, found in jobs.items() if job.startswith("inference/"))
    return 100 * leaks["idle_allocation"] / sum(leaks.values())


def served(what: Callable[[ServingView], float | None]) -> Callable[[Played], float]:
    """What the one server's engine said last."""

    def worth(played: Played) -> float:
        (view,) = (job.service for job in played.nodes[0].last.jobs if job.service is not None)
        found = what(view)
        assert found is not None
        return found

    return worth


def p99(kind: str) -> Callable[[ServingView], float | None]:
    """The 99th percentile of a kind of latency."""
    return lambda view: next(each.p99 for each in view.latencies if each.kind == kind)


ROWS = (
    *curves(),
    *table(),
    Expected(
        panel=CURVE, scenario="idle_allocation", variables={"leak": "idle_allocation"},
        where={"leak": "idle_allocation"}, worth=of_the_idle_server, within=0.001, leak="idle_allocation",
    ),
    Expected(panel="Engines", scenario="batching", worth=lambda _: 1.0),
    Expected(panel="Engines", scenario="memory_bound_decode", worth=lambda _: 0.0),
    Expected(panel=NOW, scenario="batching", letter="E", worth=served(lambda view: view.waiting)),
    Expected(
        panel="Batch fill", scenario="batching", where={"spread": "p50"}, worth=served(lambda view: view.fill),
    ),
    Expected(
        panel="KV cache in use", scenario="kv_cache_pressure", where={"spread": "p90"},
        worth=served(lambda view: view.kv_use),
    ),
    Expected(panel=NOW, letter="C", scenario="prefill_decode_interference", worth=served(p99("ttft"))),
    Expected(panel=NOW, letter="D", scenario="prefill_decode_interference", worth=served(p99("itl"))),
    *(
        Expected(
            panel="Servers", letter=letter, scenario="rejected_speculation", worth=served(what), within=0.001,
        )
        for letter, what in (
            ("K", lambda view: view.per_pass), ("L", lambda view: view.acceptance), ("C", lambda view: view.running),
        )
    ),
)  # fmt: skip
