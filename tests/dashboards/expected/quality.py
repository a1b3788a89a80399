"""The Quality board: what is owned, heard and seen, what is not and why, and who says so."""

from collections.abc import Callable

from tests.dashboards.expected.row import Expected
from tests.dashboards.scheduler import DOWN
from tests.dashboards.scheduler import GPUS as ON_A_NODE
from tests.dashboards.stories import Played
from tests.dashboards.weeks import GPUS, OWNED

HOUR = 3600
READ_SECONDS, CORE_SECONDS = 0.002, 0.0005
"""A tick's, as every story has them."""


def unseen(played: Played, minutes: float) -> float:
    """GPU-hours that nobody saw."""
    return played.leaks(minutes)["unobserved"] / HOUR


def faults(played: Played) -> float:
    """All that there were."""
    return sum(count for node in played.nodes for _, count in node.last.faults)


def always(figure: float) -> Callable[[Played], float]:
    """What the world is made with."""
    return lambda _: figure


ROWS = (
    Expected(panel="Coverage", scenario="fleet", worth=always(GPUS / OWNED), within=1e-6),
    Expected(panel="Coverage", scenario="blind", worth=always(0.0)),
    *(
        Expected(panel="GPUs owned, heard, silent", scenario="fleet", letter=letter, worth=always(n), within=0)
        for letter, n in (("A", OWNED), ("B", GPUS), ("C", OWNED - GPUS))
    ),
    Expected(panel="Silent nodes", scenario="fleet", worth=always(1), within=0),
    Expected(panel="Simulated", scenario="fleet", worth=lambda played: len(played.nodes), within=0),
    Expected(panel="Failed scrapes", scenario="blind", worth=always(1), within=0),
    Expected(panel="Booked wrongly", scenario="fleet", worth=always(0), within=0),
    # Five minutes are shorter than two looks at them: what is counted is near.
    Expected(panel="Faults", scenario="telemetry_outage", worth=faults, within=0.1),
    Expected(
        panel="Nodes with faults", scenario="telemetry_outage", where={"kind": "source_failed"}, worth=faults,
        within=0.1,
    ),
    Expected(
        panel="GPU-hours not seen, by reason", scenario="telemetry_outage", where={"reason": "source_failed"},
        worth=lambda played: unseen(played, 60), within=0.1,
    ),
    Expected(
        panel="GPU-hours not seen, by reason", scenario="blind", where={"reason": "source_failed"}, minutes=30,
        worth=lambda played: unseen(played, 30), within=0.08,
    ),
    Expected(
        panel="GPU-hours not seen, by reason", scenario="blind", where={"reason": "node not reporting"}, minutes=30,
        worth=always(ON_A_NODE / 2), within=0.15,
    ),
    Expected(panel="GPUs not seen", scenario="blind", letter="D", worth=lambda played: unseen(played, 5) * 12),
    Expected(panel="GPUs not seen", scenario="blind", letter="G", worth=always(ON_A_NODE), within=0),
    Expected(
        panel="Nodes not reporting now", scenario="fleet", where={"node": DOWN}, worth=always(ON_A_NODE), within=0,
    ),
    Expected(
        panel="Nodes seen least, now", scenario="blind", letter="B", where={"node": "gpu-node-02"},
        worth=lambda played: unseen(played, 5) * 12,
    ),
    Expected(
        panel="Alerts on the exporter", scenario="telemetry_outage", letter="B",
        where={"alertname": "GPUEfficiencyExporterBlind"}, worth=always(1), within=0,
    ),
    Expected(
        panel="Where figures come from", scenario="fleet", where={"source": "simulation"},
        worth=lambda played: len(played.nodes), within=0,
    ),
    Expected(panel="Seconds a tick", scenario="fleet", letter="A", worth=always(READ_SECONDS)),
    Expected(panel="Seconds a tick", scenario="fleet", letter="B", worth=always(CORE_SECONDS)),
)  # fmt: skip
