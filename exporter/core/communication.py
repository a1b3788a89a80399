"""Estimates exposed communication: the time in which a GPU's only kernel moves data between GPUs or waits for a peer.

A communication kernel occupies few SMs, a computing one most of them. With both levels known, SM activity per engine
activity tells how much of a reading of any length was communication. The levels are measured per job from readings
short enough to hold a single kernel (100 ms); without them they are assumed, and the result lies between two bounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.core.evidence import NO_SPIN, Evidence, busier
from exporter.core.model import MS, NEVER, PPM, SECOND, Reading
from exporter.core.pipes import TENSOR, PipeUse
from exporter.core.policy import Policy
from exporter.core.stages import NO_BUBBLES, Bubbles, StageReading, StageWaits

MINUTE = 60 * SECOND
LINK_BYTES_IN_DRAM = 2
"""DRAM bytes read or written per byte on the link (E)."""
SHORTEST_BURST, LONGEST_BURST = 50 * MS, 250 * MS
"""Length of a reading that may hold a single kernel; shorter ones are rests of others."""
_MIN_COLLECTIVES = 400
"""Milliseconds of readings that only communicate, from which on their level is known."""
_MIN_EXCHANGES = 10_000
"""The same of longer readings, in which the links move data meanwhile."""
_MIN_SHARES = 0.01, 0.1
"""Share of all busy readings that must communicate only, and that must compute only."""
_FULL_TRUST = 0.05
"""E: with this share of busy readings that communicate only, few kernels that communicate hide in the others."""
_FULL_TRUST_OF_LONG = 0.1
"""E: the same for longer readings: most of them hold kernels of both kinds."""
_MIN_DISTANCE = 0.08
"""Smallest difference of the two levels that can be told from noise."""
LEVEL_ERROR = 0.07
"""E: how far the measured SM activity of computing kernels may be from the true one; smaller than the distance of the
two levels."""
_HIDDEN_TRAFFIC = 0.25
"""E: short collectives reach this share of the links' rate, mostly waiting for each other."""
_NETWORK_BYTES = 1e8
"""E: bytes per second on PCIe, over which all goes to other nodes, that a job's inputs and commands hardly reach."""
_BINS = 50
_BUSY, _NO_TENSOR, _NO_DRAM, _NO_FP, _FEW_SMS = 0.5, 0.02, 0.06, 0.025, 0.5
"""E: limits of a reading that only communicates: engine activity; tensor, own DRAM and SM activity per engine activity;
FP pipe activity."""


class Estimate(Struct, frozen=True):
    """A share of a reading's time, 0-1, with its bounds."""

    value: float
    low: float
    high: float
    evidence: str = "estimated"
    """measured; calibrated: by levels that were measured for this job; or estimated."""


NOTHING = Estimate(0.0, 0.0, 0.0)


class SmLevels(Struct, frozen=True):
    """SM activity per engine activity, 0-1, of a job's kernels, and the pipe that they compute with."""

    computing: float
    communicating: float
    trust: float = 0.0
    """How far both were measured for this job, 0-1; 0: they are the policy's."""
    dense: bool = False
    """Its kernels fill most SMs for most of the time."""
    pipe: str = TENSOR
    """One of PIPES."""
    bubbles: Bubbles = NO_BUBBLES
    """What of its waiting are the bubbles of a pipeline."""


UNKNOWN_LEVELS = SmLevels(0.955, 0.14)
"""Before any reading of the job; the policy's values, which see."""


class ShortReading(Struct, array_like=True, frozen=True):
    """A reading short enough to hold a single kernel."""

    end: int
    ms: int
    sm: float
    engine: float
    communicates: bool
    follows: bool = False
    """The reading before it communicates."""
    link: float = 0.0
    """Share of its time that the link's traffic would take alone, 0-1. Last: checkpoints store fields by place."""


class LevelTracker(Struct, eq=False):
    """Measures the levels and the pipe of one job from the readings of all its GPUs on this node.

    What a minute shows is used from the next minute on, so that it does not matter how time is cut into readings.
    """

    minute: int = NEVER
    """The minute that readings are added to, counted by the monotonic clock."""
    recent: dict[int, SmLevels] = {}
    """By minute, the levels used in it, of the minutes that the latest readings cover."""
    pending: dict[str, ShortReading] = {}
    """By UUID, the latest short reading, which counts once its successor is known."""
    computing_sm: float = 0.0
    computing_engine: float = 0.0
    computing_link: float = 0.0
    """Time that the links' traffic meanwhile would take alone, milliseconds."""
    computing: int = 0
    communicating: int = 0
    busy: int = 0
    """Milliseconds of short readings by kind."""
    collective_bins: list[int] = field(default_factory=list)
    """Milliseconds of short readings that communicate only, by SM activity per engine activity."""
    density_bins: list[int] = field(default_factory=list)
    """Milliseconds of all busy readings by SM activity per engine activity."""
    pipes: PipeUse = field(default_factory=PipeUse)
    stages: StageWaits = field(default_factory=StageWaits)
    exchange_bins: list[int] = field(default_factory=list)
    """Milliseconds of longer readings in which the links moved data and nothing else happened, likewise."""

    def add(self, parts: Sequence["Part"], policy: Policy) -> None:
        """Add what all the job's GPUs did in one observation."""
        usable = [part for part in parts if not part.ev.distrust]
        if not any(part.ev.kernel_runs or part.ev.video for part in usable):
            return
        by_minute = _divide_by_minute(usable)
        first = min(by_minute)
        oldest = max((minute for minute in self.recent if minute <= first), default=first)
        self.recent = {minute: levels for minute, levels in self.recent.items() if minute >= oldest}
        for minute, of_minute in sorted(by_minute.items()):
            if minute > self.minute or not self.recent:
                self.minute = max(minute, self.minute)
                self.recent[minute] = levels = self._levels(policy)
                self.stages = StageWaits(seen_before=self.stages.seen_before or levels.bubbles != NO_BUBBLES)
            self._add_stages(of_minute, policy)
            for ev, start, end, begun, alone in of_minute:
                if not (ev.kernel_runs or ev.video):
                    continue
                if begun:
                    self.pipes.add(ev, (end - start) // MS)
                if ev.sm is not None and ev.kernel_runs and not alone:
                    self._add_part(ev, start, end, policy)

    def at(self, time: int) -> SmLevels:
        """The levels to use for an interval that begins at `time`."""
        minute = time // MINUTE
        levels = self.recent.get(minute)
        if levels is None:
            known = [each for each in self.recent if each <= minute]
            levels = self.recent[max(known)] if known else UNKNOWN_LEVELS
        return levels

    def _add_stages(self, parts: Sequence["Part"], policy: Policy) -> None:
        """Add the parts of a minute that several GPUs have in common."""
        found: dict[tuple[int, int], list[StageReading]] = {}
        for ev, start, end, _, alone in parts:
            if ev.sm is not None and not alone:
                idle = (ev.wait - ev.video) / PPM
                polling = _polling(ev, ev.sm, policy)
                exchanges = (_link_rate_and_capacity(ev)[0] or 0.0) >= policy.spin_nvlink_bytes_per_second
                stage = StageReading(
                    ev.reading.uuid,
                    idle,
                    polling,
                    max(0.0, 1.0 - idle - polling),
                    exchanges,
                    _link_time(ev, policy) / _HIDDEN_TRAFFIC,
                    hides_turns=ev.spin == NO_SPIN and not _leaves_node(ev),
                )
                found.setdefault((start, end), []).append(stage)
        for (start, end), readings in found.items():
            if len(readings) > 1:
                self.stages.add(readings, (end - start) // MS)

    def _add_part(self, ev: Evidence, start: int, end: int, policy: Policy) -> None:
        """Add [start, end) of a reading, which lies within one minute."""
        reading, sm = ev.reading, ev.sm or 0.0
        ms = (end - start) // MS
        _add_to_bin(self.density_bins, sm / ev.engine, ms)
        if reading.end - reading.start > LONGEST_BURST and exchanges_only(ev, policy):
            _add_to_bin(self.exchange_bins, sm / ev.engine, ms)
        if start != reading.start or not SHORTEST_BURST <= reading.end - reading.start <= LONGEST_BURST:
            return
        self.busy += ms
        communicates = ev.tensor is not None and only_communicates(ev)
        if communicates:
            self.communicating += ms
            _add_to_bin(self.collective_bins, sm / ev.engine, ms)
        link = _link_time(ev, policy)
        self._add_short(ShortReading(reading.end, ms, sm, ev.engine, communicates=communicates, link=link), reading)

    def _add_short(self, short: ShortReading, reading: Reading) -> None:
        """Count the reading before this one as computing, unless it or one of its neighbours communicates.

        A collective rarely begins with a reading, so that its neighbours hold a part of it.
        """
        before = self.pending.pop(reading.uuid, None)
        if before is None or before.end != reading.start:
            self.pending[reading.uuid] = short
            return
        if not (before.communicates or before.follows or short.communicates):
            self.computing_sm += before.sm * before.ms
            self.computing_engine += before.engine * before.ms
            self.computing_link += before.link * before.ms
            self.computing += before.ms
        self.pending[reading.uuid] = replace(short, follows=before.communicates)

    def _levels(self, policy: Policy) -> SmLevels:
        """The levels measured so far, or the policy's."""
        dense, pipe = _quantile(self.density_bins, 0.95) >= policy.dense_kernel_sm, self.pipes.pipe()
        bubbles = self.stages.bubbles()
        few, some = _MIN_SHARES
        if (
            self.communicating >= max(_MIN_COLLECTIVES, few * self.busy)
            and self.computing >= some * self.busy
            and self.computing_engine > 0
        ):
            communicating = _quantile(self.collective_bins, 0.5)
            computing = self._computing_level(communicating, policy)
            if computing - communicating >= _MIN_DISTANCE:
                trust = min(1.0, self.communicating / self.busy / _FULL_TRUST)
                return SmLevels(computing, communicating, trust, dense, pipe, bubbles)
        exchanging, busy = sum(self.exchange_bins), sum(self.density_bins)
        if exchanging >= max(_MIN_EXCHANGES, few * busy):
            computing, communicating = _quantile(self.density_bins, 0.95), _quantile(self.exchange_bins, 0.5)
            if computing - communicating >= _MIN_DISTANCE:
                trust = min(1.0, exchanging / busy / _FULL_TRUST_OF_LONG)
                return SmLevels(computing, communicating, trust, dense, pipe, bubbles)
        return SmLevels(policy.computing_sm, policy.collective_sm, dense=dense, pipe=pipe, bubbles=bubbles)

    def _computing_level(self, communicating: float, policy: Policy) -> float:
        """SM activity of computing kernels, without that of collectives too short for a reading of their own.

        SMs that are idle while the links move data are idle in such collectives; without traffic, in small kernels.
        """
        level = self.computing_sm / self.computing_engine
        idle = policy.computing_sm - level
        if idle <= 0.0 or policy.computing_sm <= communicating:
            return level
        needed = _HIDDEN_TRAFFIC * idle / (policy.computing_sm - communicating)
        return level + idle * min(1.0, self.computing_link / self.computing_engine / needed)


class Part(NamedTuple):
    """The part of a reading that one job held."""

    ev: Evidence
    start: int
    end: int
    begun: bool
    """Its start-up is over, with its trial kernels."""
    alone: bool
    """It has one GPU, so that nothing communicates and its pipe is all that matters."""


def _divide_by_minute(parts: Sequence[Part]) -> dict[int, list[Part]]:
    """The parts by minute, those that cross its end divided, in their order."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        for minute in range(part.start // MINUTE, (part.end - 1) // MINUTE + 1):
            start, end = max(part.start, minute * MINUTE), min(part.end, (minute + 1) * MINUTE)
            found.setdefault(minute, []).append(part._replace(start=start, end=end))
    return found


def _add_to_bin(bins: list[int], share: float, amount: int) -> None:
    """Add to the bin of a share, 0-1; most jobs never need the bins."""
    if not bins:
        bins += [0] * _BINS
    bins[min(_BINS - 1, int(share * _BINS))] += amount


def _quantile(bins: list[int], share: float) -> float:
    """Middle of the bin that holds the quantile, 0-1; 0 without any entry."""
    total, below = sum(bins), 0
    for index, amount in enumerate(bins):
        below += amount
        if total and below >= share * total:
            return (index + 0.5) / _BINS
    return 0.0


def only_communicates(ev: Evidence) -> bool:
    """Whether nothing but a communication kernel ran: busy, on few SMs, without tensor, FP or own DRAM activity."""
    engine = ev.engine
    reading = ev.reading
    fp = busier(busier(reading.fp64_active, reading.fp32_active), reading.fp16_active) or 0.0
    return (
        engine > _BUSY
        and (ev.tensor or 0.0) < _NO_TENSOR * engine
        and own_dram(ev) < _NO_DRAM * engine
        and fp < _NO_FP
        and (ev.sm or 0.0) < _FEW_SMS * engine
    )


def exchanges_only(ev: Evidence, policy: Policy) -> bool:
    """Whether nothing but a communication kernel ran, and the links moved data."""
    rate = _link_rate_and_capacity(ev)[0]
    return rate is not None and rate >= policy.spin_nvlink_bytes_per_second and only_communicates(ev)


def own_dram(ev: Evidence) -> float:
    """DRAM activity beyond the link's own traffic, 0-1."""
    spec, dram = ev.device.spec, ev.dram or 0.0
    bandwidth = spec.memory_bandwidth_bytes_per_second if spec is not None else None
    rate = _link_rate_and_capacity(ev)[0]
    return max(0.0, dram - LINK_BYTES_IN_DRAM * rate / bandwidth) if bandwidth and rate else dram


def _link_rate_and_capacity(ev: Evidence) -> tuple[float | None, float | None]:
    """Rate and one-way capacity of NVLink, or of PCIe on a board without it; bytes per second."""
    spec = ev.device.spec
    if spec is None:
        return None, None
    if spec.nvlink_bytes_per_second and "nvlink_tx_bytes_per_second" not in ev.device.lacks:
        return ev.nvlink, spec.nvlink_bytes_per_second
    return busier(ev.pcie_tx, ev.pcie_rx), spec.pcie_bytes_per_second


def _leaves_node(ev: Evidence) -> bool:
    """Whether data may have gone to other nodes."""
    pcie = busier(ev.pcie_tx, ev.pcie_rx)
    return pcie is None or pcie >= _NETWORK_BYTES


def _link_time(ev: Evidence, policy: Policy) -> float:
    """Share of time that the link's traffic takes at the rate that collectives reach; 0 if it is unknown."""
    rate, capacity = _link_rate_and_capacity(ev)
    return rate / capacity / policy.link_achieved if rate is not None and capacity else 0.0


def estimate_communication(
    ev: Evidence, levels: SmLevels, policy: Policy, timed: float | None = None, *, launches: bool = False
) -> Estimate:
    """Share of the reading in which only communication kernels ran; never more than its slack.

    `timed`: the share of time in which collectives executed, as a profiler plugin timed them; it includes those that
    overlap with computation, so that idle SMs still decide. `launches`: the job's kernels are small and wait for the
    CPU that launches them, so that idle SMs are their own.
    """
    rate, capacity = _link_rate_and_capacity(ev)
    slack = ev.slack / PPM
    if _moves_data_only(ev, rate, capacity, policy):
        return Estimate(slack, slack, slack, "measured")
    if ev.sm is None:
        return NOTHING
    assumed = _assumed(ev, ev.sm, policy, dense=levels.dense and not launches)
    measured = _measured(ev, ev.sm, levels) if levels.trust else replace(assumed, value=assumed.high)
    if timed is not None:
        value = min(timed, measured.value)
        return Estimate(value, min(value, measured.low), value, "calibrated")
    if not levels.trust:
        return assumed
    doubt = 1.0 - levels.trust
    value = measured.value + doubt * 0.5 * (assumed.value - measured.value)
    low = measured.low + doubt * (assumed.low - measured.low)
    high = measured.high + doubt * (assumed.high - measured.high)
    return Estimate(value, min(value, low), max(value, high), "calibrated")


def _measured(ev: Evidence, sm: float, levels: SmLevels) -> Estimate:
    """The estimate with measured levels, between those that the level of computing kernels could be mistaken for."""
    communicating = levels.communicating
    low, value, high = (
        _idle_sms(ev, sm, levels.computing + error, communicating) for error in (-LEVEL_ERROR, 0.0, LEVEL_ERROR)
    )
    return Estimate(value, low, high)


def _polling(ev: Evidence, sm: float, policy: Policy) -> float:
    """Share of time in which idle SMs look like those of kernels that communicate or wait for a peer."""
    return ev.engine if ev.spin != NO_SPIN else _idle_sms(ev, sm, policy.computing_sm, policy.collective_sm)


def _idle_sms(ev: Evidence, sm: float, computing: float, communicating: float) -> float:
    """Share of time in which SMs were idle as they are while communicating; at most the slack."""
    return min(ev.slack / PPM, max(0.0, (computing * ev.engine - sm) / (computing - communicating)))


def _assumed(ev: Evidence, sm: float, policy: Policy, *, dense: bool) -> Estimate:
    """The estimate with assumed levels: between what the link's rate needs and what idle SMs and other work allow.

    Traffic may overlap with computing, so that idle SMs limit also what it explains.
    """
    spec = ev.device.spec
    ceiling = spec.dram_ceiling if spec is not None else 1.0
    computes = max((ev.tensor or 0.0) / policy.tensor_of_kernel, own_dram(ev) / (policy.dram_reached * ceiling))
    idle = _idle_sms(ev, sm, policy.computing_sm, policy.collective_sm)
    high = max(0.0, min(idle, ev.engine - computes))
    low = min(_link_time(ev, policy), high)
    share = policy.exposed_share_dense if dense else policy.exposed_share_sparse
    if exchanges_only(ev, policy):
        share = 1.0
    return Estimate(low + share * (high - low), low, high)


def _moves_data_only(ev: Evidence, rate: float | None, capacity: float | None, policy: Policy) -> bool:
    """Whether the link is busy and nothing is computed."""
    if not rate or not capacity or ev.tensor is None or ev.dram is None:
        return False
    if rate < policy.link_busy * ev.engine * capacity:
        return False
    return ev.tensor < policy.link_tensor * ev.engine and own_dram(ev) < policy.link_dram * ev.engine
