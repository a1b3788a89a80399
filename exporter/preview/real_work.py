"""Judges from readings alone how long a GPU did real work; independent of the core's states, timers and wake rule.

A reading counts with the share of its time in which the engine worked, so sums do not depend on the length of readings.
In doubt a reading is work: the doubt counts against taking a GPU back.
"""

from collections.abc import Iterable
from operator import attrgetter

from msgspec import Struct

from exporter.core.model import PPM, SECOND, Device, Observation, Reading
from exporter.core.policy import Policy

REAL_WORK_SHARE = 0.01
"""E: of the remaining time; a keep-alive script that computes a second in 29 minutes stays below."""
REAL_WORK_SECONDS = 600.0
"""E: in all; a long-lived service that is rarely asked has worked after ten minutes."""
DEFINITION = (
    f"Right: until its allocation or the recording ended, the GPU did no real work. Real work: effective work for more"
    f" than {REAL_WORK_SHARE * 100:g} % of that time or more than {REAL_WORK_SECONDS / 60:g} min in all, by the"
    " readings: engine time with tensor, FP or DRAM activity or with power clearly above idle, and use of the video"
    " engines."
)
PLAIN_RULE = "engine at 0 for 300 min"
PLAIN_SECONDS = 18_000.0
"""The plain rule's time without engine activity, whatever the workload class."""
_SHOWN_AS_ZERO = 0.005
"""Engine activity below half a percent, which dashboards and `nvidia-smi` show as 0 %."""
_BUSY_AT_IDLE_POWER = 0.5
"""E: a kernel that runs for more than this draws more than an idle context if it computes; a shorter one may not."""
_ROUNDING = 0.05
"""E: a ratio this far above one is rounding; beyond it the value is not believed."""
_VIDEO_NOISE = 0.01
"""E: the driver reports whole percents; one of them may be rounding."""


def is_real_work(work_seconds: float, observed_seconds: float) -> bool:
    """Whether so many seconds of effective work, of so many observed ones, are real work."""
    return work_seconds > min(REAL_WORK_SHARE * observed_seconds, REAL_WORK_SECONDS)


class Activity(Struct, frozen=True):
    """What one reading shows of [start, end), in nanoseconds as those of readings."""

    start: int
    end: int
    work: int
    """Effective work, parts per million of the time."""
    resting: bool = False
    """The engine's activity is shown as 0 %."""


class ActivityReader:
    """Turns the readings of one recording into activities; untrusted and overlapping ones are left out."""

    def __init__(self, policy: Policy) -> None:
        """`policy` has the thresholds of tensor, FP and DRAM activity and of power."""
        self._policy = policy
        self._devices: dict[str, Device] = {}
        self._power_smoothed: set[str] = set()
        """Boards that draw power while idle."""
        self._until: dict[str, int] = {}

    def read(self, observation: Observation) -> dict[str, list[Activity]]:
        """Return the activities of one observation by UUID, in order of time."""
        self._devices.update((device.uuid, device) for device in observation.devices or ())
        for health in observation.health:
            (self._power_smoothed.add if health.power_smoothing else self._power_smoothed.discard)(health.uuid)
        found: dict[str, list[Activity]] = {}
        for reading in sorted(observation.readings, key=attrgetter("start")):
            activity = self._activity(reading, observation.at)
            if activity is not None:
                found.setdefault(reading.uuid, []).append(activity)
        return found

    def _activity(self, reading: Reading, at: int) -> Activity | None:
        uuid, device = reading.uuid, self._devices.get(reading.uuid)
        if (
            device is None
            or reading.distrust
            or not self._until.get(uuid, reading.start) <= reading.start < reading.end
        ):
            return None
        smoothed = uuid in self._power_smoothed or device.parent in self._power_smoothed
        work = work_share(reading, device, self._policy, power_usable=not smoothed)
        if work is None or reading.end > at:
            return None
        self._until[uuid] = reading.end
        engine = _engine(reading, self._policy)
        return Activity(
            reading.start, reading.end, round(work * PPM), resting=engine is not None and engine < _SHOWN_AS_ZERO
        )


def work_share(reading: Reading, device: Device, policy: Policy, *, power_usable: bool = True) -> float | None:
    """Share of a reading's time in effective work, 0-1; None if it has no signal that shows work.

    `power_usable`: an idle board of this kind draws less than one that works.
    """
    engine, pipes = _engine(reading, policy), _pipes_active(reading, policy)
    powered = _power_above_idle(reading, device, policy) if power_usable else None
    videos = [use for use in map(_ratio, (reading.encoder_utilization, reading.decoder_utilization)) if use is not None]
    if engine is None and powered is None and not videos:
        return None
    video = max(videos, default=0.0)
    busy = float(powered is True) if engine is None else engine
    works = powered or pipes or (pipes is None and not _certainly_idle(reading, busy, powered=powered, policy=policy))
    return max(busy if works and busy >= policy.stalled_engine else 0.0, video if video > _VIDEO_NOISE else 0.0)


def _certainly_idle(reading: Reading, busy: float, *, powered: bool | None, policy: Policy) -> bool:
    """Whether a busy engine did nothing although no pipe was measured: at idle power, or without any process.

    The driver's utilization of an idle board without a process was once seen at 100 % for a long time.
    """
    if powered is False and busy >= _BUSY_AT_IDLE_POWER:
        return True
    return reading.processes == () and not _profiled(reading, policy)


def _ratio(value: float | None) -> float | None:
    """A ratio; None if it is missing or implausible."""
    return min(1.0, value) if value is not None and 0.0 <= value <= 1.0 + _ROUNDING else None


def _zero_filled(reading: Reading, policy: Policy) -> bool:
    """Whether the profiler's counters are all zero while the driver reports a busy board: they were not measured."""
    return reading.gr_engine_active == 0.0 and (_ratio(reading.gpu_utilization) or 0.0) >= policy.zero_fill_utilization


def _profiled(reading: Reading, policy: Policy) -> bool:
    return _ratio(reading.gr_engine_active) is not None and not _zero_filled(reading, policy)


def _engine(reading: Reading, policy: Policy) -> float | None:
    """Share of time with a kernel: the profiler's, else the driver's; None if neither measured it."""
    return _ratio(reading.gr_engine_active if _profiled(reading, policy) else reading.gpu_utilization)


def _pipes_active(reading: Reading, policy: Policy) -> bool | None:
    """Whether tensor cores, FP pipes or DRAM were active; None if that was not measured."""
    tensor, dram = _ratio(reading.tensor_active), _ratio(reading.dram_active)
    pipes = (reading.fp64_active, reading.fp32_active, reading.fp16_active)
    fp = max((use for use in map(_ratio, pipes) if use is not None), default=0.0)
    if (tensor or 0.0) >= policy.working_tensor or (dram or 0.0) >= policy.working_dram or fp >= policy.working_fp:
        return True
    measured = tensor is not None and dram is not None and not _zero_filled(reading, policy)
    return False if measured else None


def _power_above_idle(reading: Reading, device: Device, policy: Policy) -> bool | None:
    """Whether the board draws clearly more than with an idle context; None if that cannot be determined."""
    idle = None if device.spec is None else device.spec.idle_context_watts
    power, limit = reading.power_watts, reading.enforced_power_limit_watts
    if idle is None or power is None or not limit or not 0.0 <= power < float("inf"):
        return None
    return power > idle + policy.spin_power_share_with_fp * limit


class WorkMeter(Struct):
    """Adds up the activities of one GPU since `since`; those after the settled time are kept, and may be dropped."""

    since: int
    work_ppm_ns: int = 0
    """Effective work, parts per million times nanoseconds: exact, however time is divided."""
    observed_ns: int = 0
    first_work: int | None = None
    """When the first effective work was seen."""
    pending: list[Activity] = []

    @property
    def work_seconds(self) -> float:
        """Effective work in the settled time."""
        return self.work_ppm_ns / PPM / SECOND

    def add(self, activities: Iterable[Activity]) -> None:
        """Add activities in order of time; equal neighbours are kept as one."""
        for activity in activities:
            last = self.pending[-1] if self.pending else None
            if last is not None and (last.end, last.work) == (activity.start, activity.work):
                self.pending[-1] = Activity(last.start, activity.end, last.work)
            elif activity.end > self.since:
                self.pending.append(Activity(max(activity.start, self.since), activity.end, activity.work))

    def observed_between(self, start: int, end: int) -> int:
        """Nanoseconds of [start, end), which is not settled yet, that were observed."""
        return sum(max(0, min(end, each.end) - max(start, each.start)) for each in self.pending)

    def settle(self, until: int) -> None:
        """Count everything up to `until`: the GPU still belonged to the same jobs then."""
        rest: list[Activity] = []
        for activity in self.pending:
            start, end = activity.start, min(activity.end, until)
            if end > start:
                self._count(start, end, activity.work)
            if activity.end > until:
                rest.append(Activity(max(activity.start, until), activity.end, activity.work))
        self.pending = rest

    def _count(self, start: int, end: int, work: int) -> None:
        self.observed_ns += end - start
        self.work_ppm_ns += work * (end - start)
        if work and self.first_work is None:
            self.first_work = start
