"""The accounting worked out a second time, by hand, from raw readings or from the simulation's truth.

Owns the examiner's arithmetic: plain floats, one reading at a time, after docs/accounting.md. Imports nothing of the
core but its values, so that two mistakes would have to agree. Refuses the running minute: what splits waiting into its
estimated causes is bounded in the tests instead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from exporter.core.model import MS, SECOND, Reading
from exporter.simulate.plan import GroundTruth
from tests.scenarios.stage import Run


class Facts(NamedTuple):
    """A board's figures, typed anew. Hertz, bytes per second, watts."""

    ceiling: float
    """The share of DRAM bandwidth that copy kernels reach: 0.92 HBM3, 0.80 A100-era."""
    clock: float
    """SM clock of the dense tensor peak."""
    link: float
    """One direction, of what joins the GPUs."""
    bandwidth: float
    context_watts: float
    limit_watts: float
    host: float
    """One direction of PCIe."""
    nvlink: bool = True


FACTS: dict[str, Facts] = {
    "H100-SXM5-80GB": Facts(0.92, 1830e6, 450e9, 3.35e12, 114, 700, 63e9),
    "A100-SXM4-80GB": Facts(0.80, 1411e6, 300e9, 2.039e12, 75, 400, 31.5e9),
    "L40S": Facts(0.80, 2490e6, 31.5e9, 864e9, 84, 350, 31.5e9, nvlink=False),
}
MINUTE = 60 * SECOND
WINDOWS = {"batch": 30 * MINUTE, "interactive": 120 * MINUTE, "serving": 5 * 60 * MINUTE}
WORKED_WINDOW = 60 * MINUTE
"""A batch job's window after a minute of work."""
HANG, HANG_OF_SOME = 600 * SECOND, 1800 * SECOND
"""How long a job without a limit of its own spins until it is hung: all its GPUs, or some while another one rests."""
COMPUTING, COMMUNICATING = 0.955, 0.14
"""Assumed SM activity of kernels that compute (S), and of those that communicate (sc)."""


class Means(NamedTuple):
    """What a stretch of time looked like: g, s, t, d as shares, clock over reference, link over capacity."""

    engine: float
    sm: float
    tensor: float
    dram: float
    clock: float
    link: float
    pipes: float
    """The busiest of the tensor and FP pipes."""


def measured(reading: Reading, facts: Facts, *, clock: float) -> Means:
    """A raw reading's own figures; a reading of the simulation lacks none of them."""
    tensor = _number(reading.tensor_active)
    return Means(
        _number(reading.gr_engine_active),
        _number(reading.sm_active),
        tensor,
        _number(reading.dram_active),
        clock,
        max(wires(reading, nvlink=facts.nvlink)) / facts.link,
        max(tensor, _number(reading.fp64_active), _number(reading.fp32_active)),
    )


def wires(reading: Reading, *, nvlink: bool) -> tuple[float, float]:
    """Bytes per second out and in, over NVLink or over PCIe."""
    if nvlink:
        return _number(reading.nvlink_tx_bytes_per_second), _number(reading.nvlink_rx_bytes_per_second)
    return _number(reading.pcie_tx_bytes_per_second), _number(reading.pcie_rx_bytes_per_second)


def _number(value: float | None) -> float:
    assert value is not None
    return value


def split(means: Means, facts: Facts, *, peers: int, dense: bool, spinning: bool = False) -> dict[str, float]:
    """Shares of a stretch by leak; what waits is left whole, under "wait"."""
    g, s, t, _, c, _, _ = means
    delivered = min(g, t * c)
    slack = g - max(t, delivered)
    exposed, most = (0.0, 0.0) if peers == 1 else (slack, slack)
    if peers != 1 and not spinning:
        exposed, most = _exposed(means, facts, slack, dense=dense)
    left = slack - exposed
    own = _own_dram(means, facts)
    reached = 0.96 * facts.ceiling
    limited = max(0.0, own - 0.35 * means.pipes) / max(reached / 2, reached - (means.dram - own))
    memory = min(left, max(0.0, min(limited * s / g, s - t - exposed * COMMUNICATING))) if g else 0.0
    empty = min(left - memory, max(0.0, g - s - most * (1 - COMMUNICATING)))
    return {
        "wait": 1 - g,
        "exposed_communication": exposed,
        "memory_bound": memory,
        "low_parallelism": empty,
        "other_compute": left - memory - empty,
        "throttled": max(0.0, t - delivered),
        "useful": delivered,
    }


def _own_dram(means: Means, facts: Facts) -> float:
    """Each byte on the link is read or written twice."""
    return max(0.0, means.dram - 2 * means.link * facts.link / facts.bandwidth)


def _exposed(means: Means, facts: Facts, slack: float, *, dense: bool) -> tuple[float, float]:
    """All of the slack if it only moves data, else a point between what the link needs and what all else allows.

    With it the most that it may be.
    """
    g, s, t, _, _, link, _ = means
    own = _own_dram(means, facts)
    if link and link >= 0.1 * g and t < 0.1 * g and own < 0.35 * g:
        return slack, slack
    by_idle_sms = (COMPUTING * g - s) / (COMPUTING - COMMUNICATING)
    by_other_work = g - max(t / 0.88, own / (0.96 * facts.ceiling))
    most = max(0.0, min(by_idle_sms, slack, by_other_work))
    least = min(link / 0.75, most)
    return least + (0.85 if dense else 0.1) * (most - least), most


def _touches(reading: Reading) -> bool:
    """A kernel that computes: by its tensor, DRAM or FP activity."""
    pipes = (reading.fp64_active, reading.fp32_active, reading.fp16_active)
    return (
        _number(reading.tensor_active) >= 0.002
        or _number(reading.dram_active) >= 0.01
        or max(map(_number, pipes)) >= 0.01
    )


def _near_idle(reading: Reading, facts: Facts) -> bool:
    return _number(reading.power_watts) <= facts.context_watts + 0.15 * facts.limit_watts


def spins(reading: Reading, facts: Facts) -> bool:
    """The signs of a kernel that polls and does nothing else, the FP pipes seen."""
    host = max(wires(reading, nvlink=False))
    peers = max(wires(reading, nvlink=True)) if facts.nvlink else 0.0
    polls = _number(reading.gr_engine_active) >= 0.98 and not _touches(reading)
    return polls and peers < 0.1e9 and host < 10e6 and _near_idle(reading, facts)


def own_work(reading: Reading, facts: Facts) -> float:
    """Share of the reading with a kernel that computes, of NVLink's width, or of the rate at which results are sent."""
    sent = _number(reading.pcie_tx_bytes_per_second)
    return max(_driven(reading, facts), min(1.0, sent / (1e9 if sent >= 1e8 else facts.host)))


def _driven(reading: Reading, facts: Facts) -> float:
    engine = _number(reading.gr_engine_active)
    computes = _touches(reading) or (engine >= 0.01 and not _near_idle(reading, facts))
    peers = max(wires(reading, nvlink=True)) / facts.link if facts.nvlink else 0.0
    return max(engine if computes else 0.0, min(1.0, peers))


def effective_work(reading: Reading, facts: Facts) -> float:
    """The same, and what is loaded from the host, in whole parts per million: the driver's polling is one or two."""
    host = max(wires(reading, nvlink=False)) / facts.host
    return round(max(_driven(reading, facts), min(1.0, host)), 6)


def works(reading: Reading, facts: Facts) -> bool:
    """Effective work for 0.5 % of the reading or more."""
    return effective_work(reading, facts) >= 0.005


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


def _spin_stretches(run: Run, uuid: str) -> list[tuple[int, int]]:
    """From the start of the first to the end of the last of readings, one after another, in which the GPU spins."""
    stretches: list[tuple[int, int]] = []
    for reading in run.readings(uuid):
        if spins(reading, FACTS[run.case.board]):
            goes_on = stretches and stretches[-1][1] == reading.start
            stretches[-1:] = (
                [(stretches[-1][0], reading.end)] if goes_on else [*stretches[-1:], (reading.start, reading.end)]
            )
    return stretches


def patience(run: Run) -> int:
    """The owner's own limit (it is the same for all here), else ten minutes if all GPUs spin so long, else thirty."""
    own = {job.owner.hang_seconds for job in run.simulation.plan.jobs}.pop()
    if own is not None:
        return round(own) * SECOND
    lengths = [max((end - begin for begin, end in _spin_stretches(run, uuid)), default=0) for uuid in run.uuids]
    return HANG if min(lengths) >= HANG else HANG_OF_SOME


def spin_begin(run: Run, uuid: str) -> int | None:
    """Start of the first reading from which the GPU spins as long as its job may; None: it never does."""
    long = (begin for begin, end in _spin_stretches(run, uuid) if end - begin >= patience(run))
    return next(long, None)


def hang_begin(run: Run, uuid: str) -> int | None:
    """When its spinning has lasted too long; a resting GPU shares the fate of its job's first other GPU that hangs."""
    own = spin_begin(run, uuid)
    if own is not None:
        return own + patience(run)
    siblings = [begin for other in run.uuids if (begin := spin_begin(run, other)) is not None]
    one_job = len(run.simulation.plan.jobs) == 1
    return min(siblings) + patience(run) if siblings and one_job else None


def first_work(run: Run, uuid: str) -> int:
    """Start of the first reading with half a percent of work of its own; the end of the story if there is none."""
    facts = FACTS[run.case.board]
    return next((r.start for r in run.readings(uuid) if own_work(r, facts) >= 0.005), run.end)


def _held(run: Run, uuid: str) -> tuple[Hold, list[tuple[Reading, int, int]]]:
    """The one job that has the GPU in these stories, and the parts of readings in which it does."""
    (hold,) = (hold for hold in holds(run, uuid) if hold.gpus)
    parts = ((r, max(r.start, hold.start), min(r.end, hold.end)) for r in run.readings(uuid))
    return hold, [part for part in parts if part[1] < part[2]]


def startup_end(run: Run, uuid: str) -> int:
    """The millisecond in which 10 s of its own work are done, 1 s for what is no batch job."""
    hold, parts = _held(run, uuid)
    left = 10_000.0 if hold.kind == "batch" else 1000.0
    for reading, start, end in parts:
        work = own_work(reading, FACTS[run.case.board])
        if work * (end - start) / MS >= left:
            return start + ceil(left / work - 1e-6) * MS
        left -= work * (end - start) / MS
    return run.end


def zombie_begin(run: Run, uuid: str) -> int:
    """When idling that work shortens 200 times, and each minute of any use by two, has filled the window.

    No story here works its way out of it.
    """
    hold, parts = _held(run, uuid)
    facts, idle, worked, used = FACTS[run.case.board], 0.0, 0.0, 0.0
    for reading, start, end in parts:
        work = effective_work(reading, facts)
        rate = 1 - 200 * work
        window = WORKED_WINDOW if hold.kind == "batch" and worked >= 60 * SECOND else WINDOWS[hold.kind]
        if idle + rate * (end - start) >= window:
            return start + ceil((window - idle) / rate / MS - 1e-6) * MS
        idle = max(0.0, idle + rate * (end - start))
        worked += work * (end - start)
        used += 0.0 if spins(reading, facts) else _number(reading.gr_engine_active) * (end - start)
        if end % MINUTE == 0:
            idle = max(0.0, idle - 2 * MINUTE) if used > 0.001 * MINUTE else idle
            used = 0.0
    return run.end + 1


def saved(run: Run, uuid: str) -> frozenset[int]:
    """Starts of readings from one in which much more goes to the host than comes from it, until kernels run again."""
    saving, found, begun = False, set[int](), startup_end(run, uuid)
    for r in run.readings(uuid):
        surplus = _number(r.pcie_tx_bytes_per_second) - _number(r.pcie_rx_bytes_per_second)
        rests = _number(r.gr_engine_active) < 0.3
        saving = rests and (saving or (surplus >= 1e9 and r.start >= begun))
        found |= {r.start} if saving else set()
    return frozenset(found)


def clocks(run: Run, uuid: str) -> dict[int, float]:
    """By start of a reading the clock over its reference: the last one that was read while the GPU worked."""
    facts, clock, by_start = FACTS[run.case.board], 1.0, {}
    for r in run.readings(uuid):
        if _number(r.gpu_utilization) >= 0.2 and _number(r.power_watts) > 1.25 * facts.context_watts:
            clock = _number(r.sm_clock_hz) / facts.clock
        by_start[r.start] = clock
    return by_start


def density(stretches: Iterable[tuple[int, int, float, float]]) -> Callable[[int], bool]:
    """Whether by the begin of a time's minute kernels had filled 35 % of the SMs for a twentieth of the busy time.

    `stretches`: begin, end, g and s of all GPUs of a job.
    """
    full, busy = defaultdict[int, int](int), defaultdict[int, int](int)
    for start, end, g, s in stretches:
        for minute in range(start // MINUTE, -(-end // MINUTE)):
            length = min(end, (minute + 1) * MINUTE) - max(start, minute * MINUTE)
            busy[minute] += length if g >= 0.01 else 0
            full[minute] += length if g >= 0.01 and s >= 0.36 * g else 0

    def dense(at: int) -> bool:
        before = [minute for minute in busy if minute < at // MINUTE]
        return sum(full[minute] for minute in before) > 0.05 * sum(busy[minute] for minute in before)

    return dense


def _mates(run: Run, uuid: str) -> list[str]:
    """All GPUs of the job that has this one."""
    slot = run.uuids.index(uuid)
    return [run.uuids[other] for job in run.simulation.plan.jobs if slot in job.slots for other in job.slots]


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
    """When one GPU's states begin, all in ns, and what lasts from one reading to the next."""

    holds: list[Hold]
    worked: int
    hang: int
    zombie: int
    saved: frozenset[int]
    clocks: dict[int, float]
    dense: Callable[[int], bool]

    @property
    def cuts(self) -> list[int]:
        edges = (edge for hold in self.holds for edge in (hold.start, hold.end))
        return [*edges, self.worked, self.hang, self.zombie]


def _script(run: Run, uuid: str) -> Script:
    hang = hang_begin(run, uuid)
    never = run.end + 1
    return Script(
        holds(run, uuid),
        startup_end(run, uuid),
        never if hang is None else hang,
        zombie_begin(run, uuid),
        saved(run, uuid),
        clocks(run, uuid),
        density(
            (start, end, _number(r.gr_engine_active), _number(r.sm_active))
            for mate in _mates(run, uuid)
            for r, start, end in _held(run, mate)[1]
        ),
    )


def _cut(reading: Reading, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    inside = {cut for cut in cuts if reading.start < cut < reading.end}
    return pairwise(sorted({reading.start, reading.end, *inside}))


def _judged(reading: Reading, start: int, facts: Facts, *, script: Script) -> Mapping[str, float]:
    """One piece of a reading by its state, then poured."""
    hold = next(hold for hold in script.holds if hold.start <= start < hold.end)
    if not hold.gpus:
        return {"idle_allocation": 1.0}
    if start >= script.hang:  # no scenario works its way out of a hang
        return {"hung": 1.0}
    means, spinning = measured(reading, facts, clock=script.clocks[reading.start]), spins(reading, facts)
    if spinning and start < script.worked:
        return {"startup": 1.0}
    shares = split(means, facts, peers=hold.gpus, dense=script.dense(start), spinning=spinning)
    waited = shares.pop("wait")
    return shares | {_waiting(reading, start, script, serves=hold.kind == "serving"): waited}


def _waiting(reading: Reading, start: int, script: Script, *, serves: bool) -> str:
    """What waiting is called: of a server that runs few kernels it is a lack of requests."""
    if start < script.worked:
        return "startup" if start < script.zombie else "idle_allocation"
    if start >= script.zombie or (serves and _number(reading.gr_engine_active) < 0.3):
        return "idle_allocation"
    return "checkpoint" if reading.start in script.saved else "wait"


def foreseen(run: Run, uuid: str) -> dict[str, float]:
    """Seconds by leak from the truth alone, no sensor asked: what the scenario's author put into it."""
    facts = FACTS[run.case.board]
    total: defaultdict[str, float] = defaultdict(float)
    begun, hang, zombie = _true_start(run, uuid), _true_hang(run, uuid), _true_zombie(run, uuid)
    blind = _true_silence(run)
    dense = density(
        (p.start, p.end, p.truth.engine_active, p.truth.sm_active)
        for mate in _mates(run, uuid)
        for p in _phases(run, mate)
        if p.gpus
    )
    for phase in _phases(run, uuid):
        minutes = range(phase.start - phase.start % MINUTE + MINUTE, phase.end, MINUTE)
        cuts = {t for t in (begun, hang, zombie, *blind) if phase.start < t < phase.end}
        for start, end in pairwise(sorted({phase.start, phase.end, *cuts, *minutes})):
            unseen = blind[0] <= start < blind[1]
            times = Times(begun=start >= begun, hung=start >= hang, zombie=start >= zombie, dense=dense(start))
            shares = {"unobserved": 1.0} if unseen else _told(phase, facts, times)
            for name, share in shares.items():
                total[name] += share * (end - start) / SECOND
    return total


class Times(NamedTuple):
    """What has begun at some time."""

    begun: bool
    hung: bool
    zombie: bool
    dense: bool


class Phase(NamedTuple):
    """A stretch of one GPU's truth, with its job's size."""

    start: int
    end: int
    truth: GroundTruth
    gpus: int
    kind: str


def _phases(run: Run, uuid: str) -> list[Phase]:
    entries, script = run.truth(uuid), holds(run, uuid)
    ends = [*[entry.at for entry in entries[1:]], run.end]
    owners = [next(hold for hold in script if hold.start <= entry.at < hold.end) for entry in entries]
    return [
        Phase(entry.at, end, entry, owner.gpus, owner.kind)
        for entry, end, owner in zip(entries, ends, owners, strict=True)
        if entry.at < end
    ]


def _told(phase: Phase, facts: Facts, times: Times) -> Mapping[str, float]:
    truth = phase.truth
    if truth.phase == "off the bus":
        return {"unavailable": 1.0}
    if not phase.gpus:
        return {"idle_allocation": 1.0}
    if times.hung:
        return {"hung": 1.0}
    spinning = truth.waiting_peer_share == 1
    if spinning and not times.begun:
        return {"wait": 1.0}
    means = Means(
        truth.engine_active,
        truth.sm_active,
        truth.tensor_active,
        truth.dram_active,
        truth.clock_ratio,
        truth.peer_bytes_per_second / 2 / facts.link,
        truth.tensor_active,  # the truth has no FP pipes; no kernel here keeps them much busier
    )
    shares = split(means, facts, peers=phase.gpus, dense=times.dense, spinning=spinning)
    unasked = times.begun and phase.kind == "serving" and truth.engine_active < 0.3
    return shares | {"wait": 0.0, "idle_allocation": shares["wait"]} if times.zombie or unasked else shares


def _true_start(run: Run, uuid: str) -> int:
    """When kernels that compute have run for 10 s, or for 1 s in what is no batch job."""
    done = 0.0
    for phase in _phases(run, uuid):
        rate = phase.truth.engine_active if phase.gpus and phase.truth.computing_share else 0.0
        left = (10 if phase.kind == "batch" else 1) * SECOND - done
        if rate * (phase.end - phase.start) >= left:
            return phase.start + round(left / rate)
        done += rate * (phase.end - phase.start)
    return run.end


def _true_hang(run: Run, uuid: str) -> int:
    """The job's patience after a rank of it began to do nothing but wait for its peers; never if it ends before."""
    others = run.uuids if len(run.simulation.plan.jobs) == 1 else (uuid,)
    stuck = [
        phase.start
        for other in others
        for phase in _phases(run, other)
        if phase.truth.waiting_peer_share == 1 and phase.gpus and phase.end - phase.start >= patience(run)
    ]
    return min(stuck) + patience(run) if stuck else run.end


def _true_zombie(run: Run, uuid: str) -> int:
    """A window after the last minute with a kernel, or after the allocation if there was none."""
    (hold,) = (hold for hold in holds(run, uuid) if hold.gpus)
    worked = [phase for phase in _phases(run, uuid) if phase.truth.engine_active and phase.gpus]
    if not worked:
        return hold.start + WINDOWS[hold.kind]
    long = sum(phase.truth.engine_active * (phase.end - phase.start) for phase in worked) >= 60 * SECOND
    window = WORKED_WINDOW if long and hold.kind == "batch" else WINDOWS[hold.kind]
    return -(-worked[-1].end // MINUTE) * MINUTE + window


def _true_silence(run: Run) -> tuple[int, int]:
    """The silence, and the reading after it, which only sets the counters' baseline."""
    begun = [entry.at for entry in run.simulation.truth if entry.phase.endswith("silent")]
    return (begun[0], begun[0] + 300 * SECOND + run.period) if begun else (run.end, run.end)
