"""One case with one seed, played through the real core, node by node in step, and what it said when.

Owns the twists an observation takes on its way, and the reading of snapshots. Refuses to know what is true.
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.detection.cases import Case, Detector, Draw, draw
from benchmarks.detection.page import Pager
from exporter.core.ledger import Ledger
from exporter.core.model import MS, PPM, SECOND, Allocation, Device, Observation, Reading, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, GpuView, Snapshot, take_snapshot
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from tests.hidden import without
from tests.lookalikes import LOOKALIKES

NO_PROCESS, UNOWNED, TICKET = 2700 * SECOND, 600 * SECOND, 600 * SECOND
"""How long before a GPU without a process, one that is nobody's, and a suspicion are told to anyone."""
_HARD = ("lost", "missing", "xid", "recovery", "reset_required")
_DARK = (450, 1200)
"""Seconds in which the node of rank 0 is not seen."""
_RESTART, _STALE = 480 * SECOND, 600 * SECOND
_STRAY = 90
_META = DaemonMetadata()

Told = dict[str, int]
"""Nanoseconds from the story's beginning at which something was said of a job or a GPU, by its name."""


class Findings(Struct, frozen=True):
    """When what was said first, of whom; jobs for a hang, GPUs for the rest."""

    by: dict[Detector, Told] = field(default_factory=dict)
    suspected: Told = field(default_factory=dict)
    ungated: Told = field(default_factory=dict)
    """A job some of whose GPUs hang, whether or not another of them works."""
    tickets: Told = field(default_factory=dict)
    """A job that has been suspected for ten minutes without a break, and was not paged for."""

    def say(self, told: Told, name: str, at: int) -> None:
        """Keep the first time."""
        told.setdefault(name, at)


def simulations(case: Case, seed: int, drawn: Draw) -> list[Simulation]:
    """The case's nodes."""
    return [_noisy(_simulated(case, seed, drawn, node), drawn) for node in range(case.nodes)]


def _simulated(case: Case, seed: int, drawn: Draw, node: int) -> Simulation:
    return simulate(
        case.story,
        seed=seed,
        board=drawn.board,
        period_seconds=drawn.period,
        duration_seconds=case.seconds,
        gpus=case.gpus,
        node=node,
        start=drawn.start_ms * MS,
        stories={**SCENARIOS, **LOOKALIKES},
    )


def _noisy(simulation: Simulation, drawn: Draw) -> Simulation:
    plan = replace(simulation.plan, noise=drawn.noise, profiler_leaves=drawn.leftover)
    return replace(simulation, plan=plan)


def stories(case: Case, seed: int) -> list[list[Observation]]:
    """What each node's daemon is told, in full."""
    drawn = draw(case, seed)
    told = []
    for node, simulation in enumerate(simulations(case, seed, drawn)):
        story: Iterable[Observation] = simulation.observations
        if drawn.missing:
            story = without(story, signals=drawn.missing)
        told.append(list(_twisted(case, seed, node, story, start=drawn.start_ms * MS)))
    return told


def _twisted(case: Case, seed: int, node: int, story: Iterable[Observation], *, start: int) -> Iterable[Observation]:
    if case.twist == "mig":
        return map(_as_instances, story)
    if case.twist == "stray":
        return _stray(story, first=seed % _STRAY)
    if case.twist == "stale_owners":
        return _stale(story, start + _STALE)
    if case.twist == "dark_chief" and node == 0:
        return (replace(o, readings=()) if _dark(o.at - start) else o for o in story)
    return story


def _dark(since: int) -> bool:
    return _DARK[0] * SECOND <= since < _DARK[1] * SECOND


def _as_instances(observation: Observation) -> Observation:
    """Each board is cut in two: the work goes on in an instance of three slices of seven."""
    devices = observation.devices and tuple(part for d in observation.devices for part in _cut(d))
    held = observation.allocations and tuple(replace(a, uuid=_mig(a.uuid)) for a in observation.allocations)
    readings = tuple(part for r in observation.readings for part in _parts(r))
    return replace(observation, devices=devices, allocations=held, readings=readings)


def _mig(uuid: str) -> str:
    return uuid.replace("GPU-", "MIG-")


def _cut(device: Device) -> tuple[Device, Device]:
    slices = PPM * 3 // 7
    instance = replace(
        device, uuid=_mig(device.uuid), parent=device.uuid, profile="3g.40gb", weight=slices,
        lacks=("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"),
    )  # fmt: skip
    return replace(device, weight=PPM - slices), instance


def _parts(reading: Reading) -> tuple[Reading, Reading]:
    """The board has its sensors, the instance its counters."""
    board = Reading(reading.uuid, reading.start, reading.end, gr_engine_active=0.0, power_watts=reading.power_watts)
    instance = replace(
        reading, uuid=_mig(reading.uuid), power_watts=None, energy_joules=None, temperature_celsius=None,
        gpu_utilization=None, nvlink_tx_bytes_per_second=None, nvlink_rx_bytes_per_second=None,
    )  # fmt: skip
    return board, instance


def _stray(story: Iterable[Observation], *, first: int) -> Iterator[Observation]:
    """One reading in ninety shows traffic that was not there."""
    for number, observation in enumerate(story):
        stray = number % _STRAY == first
        readings = tuple(replace(r, dram_active=0.03) for r in observation.readings)
        yield replace(observation, readings=readings) if stray else observation


def _stale(story: Iterable[Observation], since: int) -> Iterator[Observation]:
    """The scheduler's last word is of `since`."""
    for observation in story:
        late = observation.at > since
        yield replace(observation, allocations=None, allocations_at=since) if late else observation


def played(
    told: list[list[Observation]], *, restart: bool = False, policy: Policy | None = None,
    look: Callable[[list[Snapshot]], None] | None = None,
) -> Findings:  # fmt: skip
    """Tell every node its story, in step, and note what the snapshots say."""
    ledgers = [Ledger(policy) for _ in told]
    found = Findings({"hang": {}, "zombie": {}, "no_process": {}, "unowned": {}, "lost": {}})
    bare: Told = {}
    suspicion: Told = {}
    pager = Pager()
    first = told[0][0].at
    for together in zip(*told, strict=True):
        now = together[0].at - first
        if restart and now - _RESTART in range(together[0].at - (ledgers[0].at or first)):
            ledgers = [_restarted(ledger, policy) for ledger in ledgers]
        for ledger, observation in zip(ledgers, together, strict=True):
            advance(ledger, observation)
        views = [take_snapshot(ledger, _META) for ledger in ledgers]
        _note_jobs(found, views, pager.deadlocked(views), suspicion, now)
        for view in views:
            for gpu in view.gpus:
                _note_gpu(found, gpu, view.wall, bare, now)
        if look is not None:
            look(views)
    if any(ledger.conservation_errors for ledger in ledgers):
        raise RuntimeError("the ledger's law is broken: these findings are worth nothing")
    return found


def _restarted(ledger: Ledger, policy: Policy | None) -> Ledger:
    """A daemon that comes back with nothing but the inventory and the owners, as the scheduler tells them again."""
    fresh = Ledger(policy)
    held: tuple[Allocation, ...] = tuple(a for owners in ledger.allocations.values() for a in owners)
    devices = tuple(gpu.device for gpu in ledger.gpus.values())
    advance(fresh, Observation(ledger.at or 0, ledger.wall, devices=devices, allocations=held))
    return fresh


def _note_jobs(found: Findings, views: list[Snapshot], paged: set[str], suspicion: Told, now: int) -> None:
    """Hangs of single GPUs, the pages they end in, and the tickets for suspicions that last."""
    gpus = [gpu for view in views for gpu in view.gpus]
    hung = _jobs(gpu for gpu in gpus if gpu.state is State.HUNG)
    suspects = hung | _jobs(gpu for gpu in gpus if gpu.hang_suspected)
    for told, jobs in ((found.suspected, suspects), (found.ungated, hung), (found.by["hang"], paged)):
        for job in jobs:
            found.say(told, job, now)
    for job in suspicion.keys() - (suspects - paged):
        del suspicion[job]
    for job in suspects - paged:
        if now - suspicion.setdefault(job, now) >= TICKET:
            found.say(found.tickets, job, now)


def _jobs(gpus: Iterable[GpuView]) -> set[str]:
    return {owner.job_id for gpu in gpus for owner in gpu.owners}


def _note_gpu(found: Findings, gpu: GpuView, wall: int, bare: Told, now: int) -> None:
    uuid = gpu.device.uuid
    since = wall - gpu.since
    if gpu.owners and gpu.reason == "no_process":
        bare.setdefault(uuid, now)
    else:
        bare.pop(uuid, None)
    signs: tuple[tuple[Detector, bool], ...] = (
        ("zombie", gpu.state is State.ZOMBIE),
        ("no_process", uuid in bare and now - bare[uuid] >= NO_PROCESS),
        ("unowned", gpu.state is State.UNOWNED and since >= UNOWNED),
        ("lost", gpu.state is State.UNAVAILABLE and gpu.reason in _HARD),
    )
    for detector, there in signs:
        if there:
            found.say(found.by[detector], uuid, now)
