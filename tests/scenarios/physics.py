"""The accounting worked out a second time, by hand, from raw readings or from the simulation's truth.

Owns the examiner's arithmetic: plain floats, one reading at a time, after `accounting.md` sections 3 to 5. Imports
nothing of the core but its values, so that two mistakes would have to agree. Refuses the running minute: what
splits waiting into its estimated causes is bounded in the tests instead.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from exporter.core.model import SECOND, Reading
from exporter.simulate.plan import GroundTruth
from tests.scenarios.stage import Run


class Facts(NamedTuple):
    """A board's figures, typed anew. Hertz, bytes per second, watts."""

    ceiling: float
    """The share of DRAM bandwidth that copy kernels reach: 0.92 HBM3, 0.80 A100-era (accounting, section 4)."""
    clock: float
    """SM clock of the dense tensor peak."""
    link: float
    """One direction, of what joins the GPUs."""
    bandwidth: float
    context_watts: float
    limit_watts: float
    nvlink: bool = True


FACTS: dict[str, Facts] = {
    "H100-SXM5-80GB": Facts(0.92, 1830e6, 450e9, 3.35e12, 114, 700),
    "A100-SXM4-80GB": Facts(0.80, 1411e6, 300e9, 2.039e12, 75, 400),
    "L40S": Facts(0.80, 2490e6, 31.5e9, 864e9, 84, 350, nvlink=False),
}
WINDOWS = {"batch": 30 * 60 * SECOND, "interactive": 120 * 60 * SECOND, "serving": 5 * 3600 * SECOND}
HANG = 300 * SECOND


class Means(NamedTuple):
    """What a stretch of time looked like: g, s, t, d as shares, clock over reference, link over capacity."""

    engine: float
    sm: float
    tensor: float
    dram: float
    clock: float
    link: float


def measured(reading: Reading, facts: Facts) -> Means:
    """A raw reading's own figures; a reading of the simulation lacks none of them."""
    clock = reading.sm_clock_hz
    assert clock is not None
    return Means(
        _number(reading.gr_engine_active),
        _number(reading.sm_active),
        _number(reading.tensor_active),
        _number(reading.dram_active),
        min(1.0, clock / facts.clock),
        max(wires(reading, nvlink=facts.nvlink)) / facts.link,
    )


def wires(reading: Reading, *, nvlink: bool) -> tuple[float, float]:
    """Bytes per second out and in, over NVLink or over PCIe."""
    if nvlink:
        return _number(reading.nvlink_tx_bytes_per_second), _number(reading.nvlink_rx_bytes_per_second)
    return _number(reading.pcie_tx_bytes_per_second), _number(reading.pcie_rx_bytes_per_second)


def _number(value: float | None) -> float:
    assert value is not None
    return value


def split(means: Means, facts: Facts, *, peers: int, spinning: bool = False) -> dict[str, float]:
    """Shares of a stretch by leak (section 4); what waits is left whole, under "wait"."""
    g, s, t, d, c, _ = means
    slack = g - t
    exposed = min(slack, _exposed(means, facts, spinning=spinning)) if peers > 1 else 0.0
    left = slack - exposed
    memory = left * min(1.0, d / (facts.ceiling * g)) if g else 0.0
    empty = (left - memory) * (1 - s / g) if g else 0.0
    return {
        "wait": 1 - g,
        "exposed_communication": exposed,
        "memory_bound": memory,
        "low_parallelism": empty,
        "other_compute": left - memory - empty,
        "throttled": t * (1 - c),
        "useful": t * c,
    }


def _exposed(means: Means, facts: Facts, *, spinning: bool) -> float:
    """All of the slack while it spins or only moves data, else what link and empty SMs show in a mixed second."""
    g, s, t, d, _, link = means
    own = d - 2 * link * facts.link / facts.bandwidth
    if spinning or (link >= 0.1 * g and t < 0.1 * g and own < 0.35 * g):
        return 1.0
    return min(link / 0.75, (g - s) / 0.8)


def spins(reading: Reading, facts: Facts) -> bool:
    """Section 5's signs of a kernel that polls and does nothing else, the FP pipes seen."""
    pipes = (reading.fp64_active, reading.fp32_active, reading.fp16_active)
    host = max(wires(reading, nvlink=False))
    peers = max(wires(reading, nvlink=True)) if facts.nvlink else 0.0
    return (
        _number(reading.gr_engine_active) >= 0.98
        and _number(reading.tensor_active) < 0.002
        and _number(reading.dram_active) < 0.01
        and max(map(_number, pipes)) < 0.01
        and peers < 0.1e9
        and host < 10e6
        and _number(reading.power_watts) <= facts.context_watts + 0.15 * facts.limit_watts
    )


def works(reading: Reading) -> bool:
    """Effective work for 1 % of the reading or more: an engine with tensor, DRAM or FP activity."""
    pipes = (reading.fp64_active, reading.fp32_active, reading.fp16_active)
    touches = (
        _number(reading.tensor_active) >= 0.002
        or _number(reading.dram_active) >= 0.01
        or max(map(_number, pipes)) >= 0.01
    )
    return touches and _number(reading.gr_engine_active) >= 0.01


class Hold(NamedTuple):
    """A stretch of one GPU's time under one job, or under none."""

    start: int
    end: int
    gpus: int
    """GPUs of the job; 0: nobody's."""
    kind: str = "batch"


def holds(run: Run, uuid: str) -> list[Hold]:
    """Who had the GPU when, from the script itself."""
    slot = run.uuids.index(uuid)
    taken = sorted(
        Hold(_ns(job.start_ms, run), _ns(job.end_ms, run), job.gpus or len(job.slots), job.owner.workload_class)
        for job in run.simulation.plan.jobs
        if slot in job.slots
    )
    edges = [0, *[edge for hold in taken for edge in (hold.start, hold.end)], run.end]
    free = [Hold(a, b, 0) for a, b in list(pairwise(edges))[::2] if a < b]
    return sorted([*taken, *free])


def _ns(ms: int, run: Run) -> int:
    return min(ms * 1_000_000, run.end)


def spin_begin(run: Run, uuid: str) -> int | None:
    """Start of the first reading from which the GPU spins for 300 s without a break; None: it never does."""
    facts, begin = FACTS[run.case.board], None
    for reading in run.readings(uuid):
        if not spins(reading, facts):
            begin = None
            continue
        begin = reading.start if begin is None else begin
        if reading.end - begin >= HANG:
            return begin
    return None


def hang_begin(run: Run, uuid: str) -> int | None:
    """300 s of spinning; a resting GPU shares the fate of its job's first other GPU that hangs."""
    own = spin_begin(run, uuid)
    if own is not None:
        return own + HANG
    siblings = [begin for other in run.uuids if (begin := spin_begin(run, other)) is not None]
    one_job = len(run.simulation.plan.jobs) == 1
    return min(siblings) + HANG if siblings and one_job else None


def zombie_begin(run: Run, uuid: str) -> int:
    """A full window of the owner's class after its last work, or after the allocation if it never worked."""
    hold = next(hold for hold in reversed(holds(run, uuid)) if hold.gpus)
    last = max((r.end for r in run.readings(uuid) if works(r)), default=hold.start)
    return max(hold.start, last) + WINDOWS[hold.kind]


def first_work(run: Run, uuid: str) -> int:
    """Start of the first reading with effective work; the end of the story if there is none."""
    return next((r.start for r in run.readings(uuid) if works(r)), run.end)


def off_the_bus(run: Run, uuid: str) -> int:
    """Since when the GPU has been gone, if it has: the end of its last reading."""
    gone = any(entry.phase == "off the bus" for entry in run.truth(uuid))
    return run.readings(uuid)[-1].end if gone else run.end


def expected(run: Run, uuid: str) -> dict[str, float]:
    """Seconds by leak from raw readings; waiting in its estimated causes together, as "wait"."""
    script = _script(run, uuid)
    total: defaultdict[str, float] = defaultdict(float)
    seen = 0
    for reading in run.readings(uuid):
        seen += reading.end - reading.start
        for start, end in _cut(reading, script.cuts):
            for name, share in _judged(reading, start, FACTS[run.case.board], script=script).items():
                total[name] += share * (end - start) / SECOND
    dead = off_the_bus(run, uuid)
    total["unavailable"] = (run.end - dead) / SECOND
    total["unobserved"] = (dead - seen) / SECOND
    return total


class Script(NamedTuple):
    """When one GPU's states begin, all in ns."""

    holds: list[Hold]
    worked: int
    hang: int
    zombie: int

    @property
    def cuts(self) -> list[int]:
        return [*(hold.end for hold in self.holds), self.hang, self.zombie]


def _script(run: Run, uuid: str) -> Script:
    hang = hang_begin(run, uuid)
    never = run.end + 1
    return Script(holds(run, uuid), first_work(run, uuid), never if hang is None else hang, zombie_begin(run, uuid))


def _cut(reading: Reading, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    inside = {cut for cut in cuts if reading.start < cut < reading.end}
    return pairwise(sorted({reading.start, reading.end, *inside}))


def _judged(reading: Reading, start: int, facts: Facts, *, script: Script) -> Mapping[str, float]:
    """One piece of a reading by section 3's states, then poured."""
    peers = next(hold.gpus for hold in script.holds if hold.start <= start < hold.end)
    if not peers:
        return {"idle_allocation": 1.0}
    if start >= script.hang:  # no scenario works its way out of a hang
        return {"hung": 1.0}
    shares = split(measured(reading, facts), facts, peers=peers, spinning=spins(reading, facts))
    waited = shares.pop("wait")
    saved = _number(reading.pcie_tx_bytes_per_second) >= 2e9 and _number(reading.gr_engine_active) < 0.3
    if start >= script.zombie:
        return shares | {"idle_allocation": waited}
    return shares | {"startup" if start < script.worked else "checkpoint" if saved else "wait": waited}


def foreseen(run: Run, uuid: str) -> dict[str, float]:
    """Seconds by leak from the truth alone, no sensor asked: what the scenario's author put into it."""
    facts = FACTS[run.case.board]
    total: defaultdict[str, float] = defaultdict(float)
    hang, zombie = _true_hang(run, uuid), _true_zombie(run, uuid)
    blind = _true_silence(run)
    for phase in _phases(run, uuid):
        cuts = {t for t in (hang, zombie, *blind) if phase.start < t < phase.end}
        for start, end in pairwise(sorted({phase.start, phase.end, *cuts})):
            unseen = blind[0] <= start < blind[1]
            shares = {"unobserved": 1.0} if unseen else _told(phase, facts, hung=start >= hang, zombie=start >= zombie)
            for name, share in shares.items():
                total[name] += share * (end - start) / SECOND
    return total


class Phase(NamedTuple):
    """A stretch of one GPU's truth, with its job's size."""

    start: int
    end: int
    truth: GroundTruth
    gpus: int


def _phases(run: Run, uuid: str) -> list[Phase]:
    entries, script = run.truth(uuid), holds(run, uuid)
    ends = [*[entry.at for entry in entries[1:]], run.end]
    return [
        Phase(entry.at, end, entry, next(hold.gpus for hold in script if hold.start <= entry.at < hold.end))
        for entry, end in zip(entries, ends, strict=True)
        if entry.at < end
    ]


def _told(phase: Phase, facts: Facts, *, hung: bool, zombie: bool) -> Mapping[str, float]:
    truth = phase.truth
    if truth.phase == "off the bus":
        return {"unavailable": 1.0}
    if not phase.gpus:
        return {"idle_allocation": 1.0}
    if hung:
        return {"hung": 1.0}
    means = Means(
        truth.engine_active,
        truth.sm_active,
        truth.tensor_active,
        truth.dram_active,
        min(1.0, truth.clock_ratio),
        truth.peer_bytes_per_second / 2 / facts.link,
    )
    shares = split(means, facts, peers=phase.gpus, spinning=truth.waiting_peer_share == 1)
    return shares | {"wait": 0.0, "idle_allocation": shares["wait"]} if zombie else shares


def _true_hang(run: Run, uuid: str) -> int:
    """300 s after a rank of this GPU's job began to do nothing but wait for its peers."""
    others = run.uuids if len(run.simulation.plan.jobs) == 1 else (uuid,)
    stuck = [entry.at for other in others for entry in run.truth(other) if entry.waiting_peer_share == 1]
    return min(stuck) + HANG if stuck else run.end


def _true_zombie(run: Run, uuid: str) -> int:
    hold = next(hold for hold in reversed(holds(run, uuid)) if hold.gpus)
    worked = [phase.end for phase in _phases(run, uuid) if phase.truth.engine_active and phase.gpus]
    return max(worked, default=hold.start) + WINDOWS[hold.kind]


def _true_silence(run: Run) -> tuple[int, int]:
    """The silence, and the reading after it, which only sets the counters' baseline."""
    begun = [entry.at for entry in run.simulation.truth if entry.phase.endswith("silent")]
    return (begun[0], begun[0] + HANG + run.period) if begun else (run.end, run.end)
