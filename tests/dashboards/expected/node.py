"""The Node board: the factors, where a node's hours went, its GPUs' states, power and heat, of stories on one node."""

from collections.abc import Callable

from dashboards import words
from exporter.core.leaks import LAYER_OF, LEAK_NAMES
from exporter.core.snapshot import GpuView
from tests.dashboards.expected.fleet import PRICE, gpus, lost, of_a_hundred, share
from tests.dashboards.expected.row import Expected
from tests.dashboards.stories import Played

USD = {"currency": "USD"}
STATES = list(words.STATES)
LAYER_OF_LEAK = dict(zip(LEAK_NAMES, LAYER_OF, strict=True))
LAYERS = ("useful", "unresolved", "emfu", "ectr", "gau", "unobserved")
"""In the order of the panels' queries."""


def gpu(played: Played, index: str) -> GpuView:
    """One GPU of the story's node as it is at the end."""
    return next(each for each in played.nodes[0].last.gpus if each.device.index == index)


def reading(name: str, index: str) -> Callable[[Played], float]:
    """What was read last of a GPU."""
    return lambda played: float(getattr(gpu(played, index).reading, name))


def state(index: str) -> Callable[[Played], float]:
    """The number of a GPU's state at the end, as the stripes have it."""
    return lambda played: STATES.index(gpu(played, index).state.value) + 1


def kernels(played: Played) -> float:
    """Share of all paid time with a kernel on the GPU."""
    marks = [each.counters.now for each in played.nodes[0].last.gpus]
    return sum(mark.engine for mark in marks) / sum(mark.paid for mark in marks)


def coverage(minutes: int) -> Callable[[Played], float]:
    """Seen of what was paid."""

    def worth(played: Played) -> float:
        layers = played.layers(minutes)
        return 1 - layers["unobserved"] / sum(layers.values())

    return worth


def hours_of(leak: str, minutes: int) -> Callable[[Played], float]:
    """GPU-hours that a leak took."""
    return lambda played: played.leaks(minutes)[leak] / 3600


def watts(layer: str) -> Callable[[Played], float]:
    """Mean power of a layer in the last five minutes."""
    names = [name for name, of in LAYER_OF_LEAK.items() if of == layer]
    return lambda played: sum(played.joules(5)[name] for name in names) / 300


def share_of_gpu(played: Played) -> float:
    """Useful of what was seen of the only GPU there is."""
    layers = played.layers(600)
    return layers["useful"] / (sum(layers.values()) - layers["unobserved"])


ROWS = (
    *(
        Expected(panel=panel, scenario="training_waterfall", minutes=600, worth=share(which, 600), within=0.03)
        for which, panel in {
            "product": "Useful",
            "gau": "GAU",
            "ectr": "ECTR",
            "emfu": "eMFU",
        }.items()
    ),
    Expected(panel="nvidia-smi", scenario="training_waterfall", minutes=600, worth=kernels, within=0.03),
    Expected(panel="Coverage", scenario="telemetry_outage", minutes=30, worth=coverage(30), within=0.03),
    Expected(panel="GPUs", scenario="deadlock", worth=gpus, within=0),
    Expected(panel="Paid an hour", scenario="deadlock", where=USD, worth=lambda played: gpus(played) * PRICE),
    Expected(
        panel="Lost an hour", scenario="deadlock", where=USD,
        worth=lambda played: lost(5)(played) * gpus(played) * PRICE,
    ),
    Expected(
        panel="GPUs now", scenario="carpenter_told", minutes=600, letter="E", where={"gpu": "0"}, worth=share_of_gpu,
    ),
    Expected(
        panel="GPUs now", scenario="deadlock", letter="J", where={"gpu": "1"},
        worth=lambda played: reading("power_watts", "1")(played)
        / reading("enforced_power_limit_watts", "1")(played),
    ),
    *(
        Expected(
            panel="States over time", scenario=story, minutes=10, where={"gpu": index}, worth=state(index), within=0
        )
        for story, index in (("deadlock", "1"), ("lost_gpu", "2"), ("leaked_process", "0"), ("zombie_notebook", "0"))
    ),
    *(
        Expected(
            panel="Of 100 GPU-hours of the chosen GPUs", scenario=story, minutes=minutes, where={"leak": leak},
            worth=of_a_hundred(leak, minutes), leak=leak, within=0.03,
        )
        for story, minutes, leak in (
            ("hung", 30, "hung"),
            ("lost_gpu", 40, "unavailable"),
            ("throttled", 30, "throttled"),
            ("telemetry_outage", 30, "unobserved"),
            ("zombie_notebook", 180, "idle_allocation"),
        )
    ),
    *(
        Expected(
            panel="What the node lost", scenario="training_waterfall", minutes=600, where={"leak": leak},
            worth=hours_of(leak, 600), leak=leak, within=0.03,
        )
        for leak in ("unavailable", "idle_allocation", "hung", "throttled")
    ),
    Expected(
        panel="What the node lost", scenario="training_waterfall", minutes=600, letter="B",
        where={"leak": "unavailable"} | USD, worth=lambda played: PRICE * hours_of("unavailable", 600)(played),
        leak="unavailable", within=0.03,
    ),
    Expected(
        panel="The chosen GPUs by what they did", scenario="deadlock", minutes=30, letter="D", where={"leak": "hung"},
        worth=lambda played: played.leaks(5)["hung"] / 300, leak="hung",
    ),
    *(
        Expected(
            panel="Power by what it was spent on", scenario=story, minutes=30, letter="ABCDEF"[LAYERS.index(layer)],
            worth=watts(layer),
        )
        for story, layer in (("deadlock", "ectr"), ("healthy_training", "useful"))
    ),
    Expected(
        panel="Temperature", scenario="deadlock", minutes=30, where={"gpu": "1"},
        worth=reading("temperature_celsius", "1"),
    ),
    Expected(
        panel="Memory used", scenario="deadlock", minutes=30, where={"gpu": "1"},
        worth=reading("memory_used_bytes", "1"),
    ),
    Expected(
        panel="Errors", scenario="lost_gpu", letter="B", where={"gpu": "2"}, within=0,
        worth=lambda played: gpu(played, "2").last_xid,
    ),
)  # fmt: skip
