"""Determines the state of each GPU: board health, the timers of timed states, and the ordered RULES.

Timed states (hung, zombie, unowned) use *credits*: nanoseconds that fill while an indicator holds and drain while it
does not; a state begins at the millisecond its credit is full. A credit is linear in time, so the result does not
depend on how time is divided into readings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from math import sqrt

from msgspec import Struct

from exporter.core.evidence import FUTILE, NO_SPIN, SPIN, SPIN_IF_FLAT, Evidence, activity_over_limits
from exporter.core.model import MS, NEVER, PPM, SECOND, Allocation, Health, Owner, Process, Reading, State
from exporter.core.policy import Policy

CLOCK_LIMITERS = {"power": 0x04, "thermal": 0x20 | 0x40, "hardware": 0x08 | 0x80, "settings": 0x02 | 0x10 | 0x100}
"""Groups of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*): software power cap; software and hardware
thermal slowdown; hardware slowdown and power brake; application and display clocks, sync boost. 0x01 is GPU idle."""


class BoardHealth(Struct, eq=False):
    """One board's latest Health, and counters since the daemon first saw the board.

    A MIG instance has no Health of its own; its board's applies.
    """

    health: Health | None = None
    xids: int = 0
    last_xid: int = 0
    fatal_since: int | None = None
    """When the latest fatal Xid was reported; None: never."""
    outlived: int | None = None
    """Start of the first reading after it in which a kernel ran, which disproves it; None: not yet."""
    limited: dict[str, int] = {}
    """Nanoseconds with the clock limited, by group of CLOCK_LIMITERS; empty until clock event reasons are available."""

    def update(self, health: Health, at: int, fatal_xids: tuple[int, ...]) -> None:
        """Store the Health read at `at`."""
        self.health = health
        self.xids += len(health.xids)
        if health.xids:
            self.last_xid = health.xids[-1]
        if any(xid in fatal_xids for xid in health.xids):
            self.fatal_since, self.outlived = at, None

    def add_clock_limits(self, ev: Evidence) -> None:
        """Add one reading of the device itself to `limited`."""
        bits = ev.reading.clock_event_reasons
        if bits is None or ev.distrust:
            return
        if not self.limited:
            self.limited = dict.fromkeys(CLOCK_LIMITERS, 0)
        if bits > 1:
            for name, mask in CLOCK_LIMITERS.items():
                if bits & mask:
                    self.limited[name] += ev.reading.end - ev.reading.start

    def check_outlived(self, ev: Evidence, fatal_since: int) -> None:
        """Check one reading of the board or an instance: a kernel that runs after a fatal Xid disproves it."""
        start = ev.reading.start
        if ev.kernel_runs and not ev.distrust and start >= fatal_since:
            self.outlived = start if self.outlived is None else min(start, self.outlived)

    def condition(self, start: int) -> str:
        """After a fatal Xid: "xid" if the GPU is unusable from `start` on, "" if a kernel has run since the error."""
        return "xid" if self.outlived is None or start < self.outlived else ""

    @property
    def power_smoothed(self) -> bool:
        """Power smoothing is enabled."""
        return self.health is not None and bool(self.health.power_smoothing)


MINUTE = 60 * SECOND
TENSOR_JOB = 60_000 * PPM
"""E: a minute of tensor work at the peak, in milliseconds times parts per million: the job uses the tensor cores, and
a busy engine without any other activity is no other kind of work, whatever its power."""
LONG_RUN = 300_000 * PPM
"""E: five minutes of effective work, likewise: shorter programs may run one after another."""
_UNLIMITED = 1 << 62
_FLAT_RATIO = 2.5
_COUNTER_ERROR = 0.1
"""E: the counters of a link's two directions disagree by up to this share about traffic that goes both ways."""


class Criteria(Struct, frozen=True):
    """The policy of one GPU model, with its timed thresholds in nanoseconds and parts per million."""

    policy: Policy
    hang: int
    hang_peer: int
    hang_suspect: int
    stray_cost: int
    hang_margin: int
    """Nanoseconds of credit that a hang loses before it ends."""
    duty: int
    windows: dict[str, int]
    zombie_margin: int
    """Nanoseconds of credit that a zombie loses before it ends: the mirror of how it began."""
    worked: int
    """Effective work after which a batch job may wait longer, nanoseconds times parts per million."""
    startup_work: int
    """Effective work that ends the start-up of batch jobs, nanoseconds times parts per million."""
    attempts: int
    """Restarts in a row without work after which the job is hung."""
    unowned: int
    allocations_stale: int


def criteria_of(policy: Policy) -> Criteria:
    """Derive the thresholds of `policy`; every duration is rounded to whole milliseconds."""
    wake, duty = _ns(policy.wake_seconds), round(1 / policy.zombie_duty)
    stray = round(PPM * (1 - policy.hang_stray_share) / policy.hang_stray_share)
    hang = _ns(policy.hang_seconds)
    return Criteria(
        policy,
        hang=hang,
        hang_peer=max(hang, _ns(policy.hang_peer_seconds)),
        hang_suspect=_ns(policy.hang_suspect_seconds),
        stray_cost=stray,
        hang_margin=wake * stray // PPM,
        duty=duty,
        windows={
            "batch": _ns(policy.zombie_batch_seconds),
            "interactive": _ns(policy.zombie_interactive_seconds),
            "serving": _ns(policy.zombie_serving_seconds),
        },
        zombie_margin=wake * duty,
        worked=_ns(policy.zombie_worked_seconds) // MS * PPM,
        startup_work=_ns(policy.startup_work_seconds) // MS * PPM,
        attempts=policy.crash_loop_restarts,
        unowned=_ns(policy.unowned_seconds),
        allocations_stale=_ns(policy.allocation_stale_seconds),
    )


def zombie_window(criteria: Criteria, owner: Owner) -> int:
    """Nanoseconds `owner` may idle: its own limit, else its workload class's, else that of batch."""
    if owner.zombie_seconds is not None:
        return _ns(owner.zombie_seconds)
    return criteria.windows.get(owner.workload_class, criteria.windows["batch"])


def hang_window(criteria: Criteria, owner: Owner) -> int:
    """Nanoseconds `owner` may spin before it counts as hung: its own limit, else the policy's."""
    return own_hang_window(owner) or criteria.hang


def own_hang_window(owner: Owner) -> int:
    """The limit that the operator set for the job, in nanoseconds; 0: none."""
    return 0 if owner.hang_seconds is None else _ns(owner.hang_seconds)


def hang_windows(
    criteria: Criteria, *, own: int, longest: int, begun: bool, alone: bool, works: bool
) -> tuple[int, int]:
    """How long a GPU must spin to be hung, and to be suspected to be, in nanoseconds.

    `own`: the limit that the operator set for the job, which then applies to every case, or 0; `longest`: how long the
    job spun before, and then worked; `begun`: it has worked; `alone`: no other GPU of the job does anything else.
    Where one rests, or before the first work, a process may compute or save on the CPU; where one works, the others
    wait for it, and only after twice that time it is taken to work for ever.
    """
    policy = criteria.policy
    if own or (alone and begun):
        hang = own or max(criteria.hang, round(longest * policy.hang_earlier_factor))
        return hang, min(hang, criteria.hang_suspect)
    hang = max(criteria.hang_peer, round(longest * policy.hang_earlier_peer_factor))
    if works:
        return 2 * hang, hang
    return hang, min(hang, criteria.hang_suspect) if alone else hang - hang // 6


def _ns(seconds: float) -> int:
    """Nanoseconds, on whole milliseconds, at least one: a credit with a threshold of 0 would toggle forever."""
    return max(1, round(seconds * 1000)) * MS


_STARTED_MINUTES, _STARTED_SHARE = 3, 0.002
"""E: a job whose kernels run for that share of so many minutes in a row is at work, however few they are."""
_STILL_MINUTES, _GROWTH = 3, 1.01
"""E: a job that holds memory, of which no more than a hundredth is new, and loads nothing for so many minutes waits for
something else than its start-up."""
BEGINNING, RESTARTED, SAVING, STARVED, STEADY = "beginning", "restarted", "saving", "starved", "even"
LAUNCHES = "launches"
"""Indicators that a single reading cannot show: the owner has not worked yet; its processes are others than those that
worked; it copied state to the host and has not worked since; in the last full minute, more data came
from the host than went to it, and kernels that fill the SMs used it; in the last full minute, engine activity was
even; and it was partial, with kernels that leave SMs idle: they wait for the CPU that launches them."""
NO_SIGNS: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class GpuTimers:
    """Timed state of one GPU: credits, flags and the current minute. Reset when the owner changes."""

    hangs: int = 0
    zombies: int = 0
    to_hang: int = 0
    to_zombie: int = 0
    """Number of detections, and total nanoseconds from first indicator to detection, over all owners."""
    holders: tuple[Allocation, ...] = ()
    spin: int = 0
    quiet: int = 0
    leaked: int = 0
    hung: bool = False
    zombie: bool = False
    unowned: bool = False
    worked_at: int = 0
    """When the GPU last did effective work, or was allocated to its holders."""
    spin_since: int | None = None
    proven: bool = False
    """The job's own collectives prove that the current spin is a hang."""
    celsius: float | None = None
    """Temperature when the spin began."""
    pcie_least: float = 0.0
    pcie_most: float = 0.0
    """Range of PCIe bytes per second since then, over readings in which only PCIe traffic may rule out a spin."""
    bare_since: int | None = None
    """Since when the driver has listed no process on the GPU."""
    longest_spin: int = 0
    """Longest spin of these holders that ended in work, nanoseconds."""
    excused_until: int = NEVER
    """Until when a phase that a process of the job reports explains its spinning."""
    cpu_until: int = NEVER
    """Until when the job's CPU use is known to show work."""
    tensor_work: int = 0
    """Tensor activity of these holders, milliseconds times parts per million."""
    work_done: int = 0
    """Effective work of these holders, milliseconds times parts per million."""
    verdict: frozenset[str] = NO_SIGNS
    flags: frozenset[str] = frozenset({BEGINNING})
    signs: frozenset[str] = frozenset({BEGINNING})
    """Indicators that last until something ends them, and these with the last minute's."""
    pids: frozenset[int] = frozenset()
    """Processes that the driver last listed."""
    computed: bool = False
    """Kernels have kept it busy, so that there is state to save."""
    startup_work: int = 0
    """Effective work since the start-up began, milliseconds times parts per million."""
    startup_goal: int = 0
    """Work that ends the start-up."""
    startup_seen: int = 0
    """Nanoseconds of start-up that were measured and not yet compared with a report."""
    polls: bool = False
    """All holders are servers, which may poll for requests: spinning does not indicate a hang."""
    unserved: bool = False
    """A serving engine reports requests and no token for them."""
    batch: bool = False
    """A holder is a batch job; others wait for requests or for a person, once they have started."""
    window: int = 0
    own_window: bool = False
    """The operator set how long a holder may idle."""
    loaded: bool = False
    """More memory is used than a context needs."""
    unloaded: bool = False
    """That memory was freed again: the processes have ended."""
    work_before: int = 0
    """`work_done` when the current processes started."""
    broke: bool = False
    """The last run that got to work was a long one: the next attempts do not fail by design."""
    attempts: int = 0
    """Restarts in a row after which the job did not get to work."""
    failing_since: int = 0
    """When the first of them began."""
    looping: bool = False
    """So many that the job is hung: it crashes again and again."""
    hang: int = _UNLIMITED
    suspect: int = _UNLIMITED
    hang_leave: int = 0
    """Credit thresholds in nanoseconds; with several holders the longest limit applies."""
    own_hang: int = _UNLIMITED
    """The holders' own limit, from which `hang` was last reset."""
    seen: int = 0
    engine_sum: int = 0
    engine_squares: int = 0
    sm_sum: int = 0
    input_sum: int = 0
    used_sum: int = 0
    arrived_sum: int = 0
    work_sum: int = 0
    """Sums over the current minute, weighted by milliseconds."""
    memory: float = 0.0
    memory_before: float = 0.0
    """Bytes in use, now and at the end of the last minute."""
    working_minutes: int = 0
    """Minutes in a row with kernels that work."""
    still_minutes: int = 0
    """Minutes in a row in which it held memory, ran no kernel and loaded nothing."""

    def begin_ownership(self, holders: tuple[Allocation, ...], criteria: Criteria, *, at: int, worked: bool) -> None:
        """Reset all credits for new holders. `worked`: their start was not observed; start-up counts as over."""
        self.holders, self.unserved, self.own_hang = holders, False, 0
        self._set_limits(criteria)
        self.spin = self.quiet = self.leaked = 0
        self.longest_spin = self.work_done = self.tensor_work = 0
        self.excused_until = self.cpu_until = NEVER
        self.hung = self.zombie = self.unowned = False
        self.worked_at = at
        self.spin_since = self.celsius = self.bare_since = None
        self.computed = self.proven = self.loaded = self.unloaded = self.looping = False
        self.attempts = self.work_before = 0
        self.pcie_least = self.pcie_most = 0.0
        self.verdict = NO_SIGNS
        self.startup_work = self.startup_seen = self.working_minutes = self.still_minutes = 0
        self.memory = self.memory_before = 0.0
        self.pids = frozenset()
        self._set_flags(NO_SIGNS if worked else frozenset({BEGINNING}))
        self._begin_minute()

    def update_holders(self, holders: tuple[Allocation, ...], criteria: Criteria) -> None:
        """Update attributes of the same holders, such as the workload class, and re-evaluate states."""
        self.holders, own, window = holders, self.own_hang, self.window
        self._set_limits(criteria)
        if self.window != window:
            self.zombie = self.zombie and self.quiet >= self.window
        if self.own_hang != own:
            self.hung = self.looping or (self.hung and self.spin >= self.hang)
        if self.polls:
            self.clear_spin()

    def update_criteria(self, criteria: Criteria) -> None:
        """Apply a new policy. Credits are kept, so a state can begin or end immediately."""
        self.update_holders(self.holders, criteria)
        self.unowned = self.unowned and self.leaked >= criteria.unowned

    def clear_spin(self, at: int | None = None) -> None:
        """Reset the spin: the job has reported progress, or (at `at`) worked again."""
        if at is not None and self.spin_since is not None:
            self.longest_spin = max(self.longest_spin, at - self.spin_since)
        self.spin, self.spin_since, self.hung, self.proven = 0, None, self.looping, False

    def confirm_spin(self) -> None:
        """Let the current spin, if any, count as a hang from the next reading on in which it lasts."""
        if self.spin_since is not None and not self.hung:
            self.spin, self.proven = self.hang, True

    def set_unserved(self, criteria: Criteria, *, unserved: bool) -> None:
        """Apply what a serving engine reports: whether it has requests and produces no token."""
        if unserved is not self.unserved:
            self.unserved = unserved
            self.update_holders(self.holders, criteria)

    def set_hang(self, criteria: Criteria, *, hang: int, suspect: int) -> None:
        """Set how long the GPU may spin before it counts as hung, given what the job's other GPUs do.

        A hang that is confirmed stays one, and so does the limit of one that other evidence has proven.
        """
        if not self.hung and not self.proven:
            self.hang, self.suspect = hang, suspect
            self.hang_leave = max(0, hang - criteria.hang_margin)

    def _set_limits(self, criteria: Criteria) -> None:
        owners = [allocation.owner for allocation in self.holders]
        self.polls = bool(owners) and all(owner.workload_class == "serving" for owner in owners) and not self.unserved
        self.window = max((zombie_window(criteria, owner) for owner in owners), default=0)
        self.own_window = any(owner.zombie_seconds is not None for owner in owners)
        if owners:
            self.batch = any(owner.workload_class == "batch" for owner in owners)
            self.startup_goal = criteria.startup_work if self.batch else criteria.startup_work // 10
        own = max((hang_window(criteria, owner) for owner in owners), default=_UNLIMITED)
        if own != self.own_hang:  # else `hang` stays what the job's other GPUs made it
            self.own_hang = self.hang = own
            self.suspect = min(criteria.hang_suspect, own) if owners else _UNLIMITED
        self.hang_leave = max(0, self.hang - criteria.hang_margin) if owners else 0

    def _set_flags(self, flags: frozenset[str]) -> None:
        self.flags, self.signs = flags, self.verdict | flags
        if self.still_minutes >= _STILL_MINUTES:
            self.signs -= {BEGINNING}

    def update_processes(self, processes: tuple[Process, ...], at: int, criteria: Criteria) -> None:
        """Notice that other processes have replaced those that worked: a restart inside the allocation."""
        pids = frozenset(process.pid for process in processes)
        if self.pids and pids.isdisjoint(self.pids):
            self._restart(at, criteria)
        self.pids = pids

    def update_memory(self, reading: Reading, at: int, criteria: Criteria) -> None:
        """Notice that memory was freed and is used again: without a list of processes, that shows a restart."""
        used, total = reading.memory_used_bytes, reading.memory_total_bytes
        if used is None or not total:
            return
        self.memory = used
        loaded = used >= criteria.policy.loaded_memory_share * total
        self.unloaded = self.unloaded or (self.loaded and not loaded)
        if loaded and self.unloaded:
            self.unloaded = False
            if reading.processes is None:
                self._restart(at, criteria)
        self.loaded = loaded

    def _restart(self, at: int, criteria: Criteria) -> None:
        """Begin another start-up, if the job has worked; count those in a row that do not end in work."""
        if BEGINNING not in self.flags:
            self.attempts, self.failing_since = 0, at
            self.broke = self.work_done - self.work_before >= LONG_RUN
            self._set_flags(self.flags | {BEGINNING, RESTARTED})
        elif RESTARTED in self.flags:
            self._fail(at, criteria)
        self.startup_work, self.work_before = 0, self.work_done
        self.working_minutes = self.still_minutes = self.work_sum = 0

    def _fail(self, at: int, criteria: Criteria) -> None:
        """Count an attempt that did not get to work; nobody at a keyboard waits for a page."""
        self.attempts += 1
        long = self.attempts >= criteria.attempts and at - self.failing_since >= criteria.hang
        interactive = any(allocation.owner.workload_class == "interactive" for allocation in self.holders)
        if self.broke and long and not (self.hung or interactive):
            self.hung = self.looping = True
            self.hangs += 1
            self.to_hang += at - self.failing_since

    def update_saving(self, ev: Evidence, policy: Policy) -> None:
        """Notice that state is copied to the host; the wait from then until kernels run again is for the same save."""
        if ev.engine >= policy.checkpoint_engine:
            self.computed = True
            if SAVING in self.flags:
                self._set_flags(self.flags - {SAVING})
        elif self.computed and BEGINNING not in self.flags and saves(ev, policy) and SAVING not in self.flags:
            self._set_flags(self.flags | {SAVING})

    def end_startup(self) -> None:
        """The job has done enough to be working."""
        self._set_flags(self.flags - {BEGINNING, RESTARTED})
        if self.looping:
            self.hung = self.looping = False

    def _begin_minute(self) -> None:
        self.seen = self.engine_sum = self.engine_squares = 0
        self.sm_sum = self.input_sum = self.used_sum = self.arrived_sum = self.work_sum = 0
        self.memory_before = self.memory

    def unchanged_since(self, interval: "StateInterval") -> bool:
        """Whether flags and indicators are still those of `interval`."""
        same = self.hung is interval.hung and self.zombie is interval.zombie and self.unowned is interval.leaked
        return same and self.signs == interval.signs

    def add_to_minute(self, ev: Evidence, start: int, end: int) -> None:
        """Add [start, end), which lies within one minute, to the current minute."""
        ms = (end - start) // MS
        engine = PPM - ev.wait
        self.seen += ms
        self.engine_sum += ms * engine
        self.engine_squares += ms * engine * engine
        self.work_sum += ms * ev.own_work
        if ev.spin == NO_SPIN:
            self.used_sum += ms * engine
        if ev.sm:
            self.sm_sum += ms * int(ev.sm * PPM)
        if ev.pcie_rx:
            self.arrived_sum += ms * int(ev.pcie_rx)
            if BEGINNING not in self.flags:  # before that, weights arrive
                self.input_sum += ms * _input_rate(ev.pcie_rx, ev.pcie_tx or 0.0)

    def end_minute(self, criteria: Criteria) -> None:
        """Evaluate the finished minute, if at least half of it was observed, and begin the next."""
        policy = criteria.policy
        self.verdict = self._minute_signs(policy) if self.seen * MS * 2 >= MINUTE else NO_SIGNS
        # Low use that goes on, minute after minute, is no zombie; a keeper computes once in half an hour.
        if self.used_sum > policy.minute_engine * PPM * self.seen:
            self.quiet = max(0, self.quiet - 2 * MINUTE)
            self.zombie = self.zombie and self.quiet > _zombie_end(self, criteria)
        self._watch_startup(policy)
        self._set_flags(self.flags)
        self._begin_minute()

    def _watch_startup(self, policy: Policy) -> None:
        """Notice that a job whose kernels are few is at work, and that one that loads nothing is not starting up."""
        works = self.work_sum > _STARTED_SHARE * PPM * self.seen
        self.working_minutes = self.working_minutes + 1 if works else 0
        if self.working_minutes >= _STARTED_MINUTES:
            self.end_startup()
        loads = self.memory > _GROWTH * self.memory_before or self.arrived_sum >= (
            policy.input_bytes_per_second * self.seen
        )
        still = self.batch and self.loaded and not (self.engine_sum or loads)
        self.still_minutes = self.still_minutes + 1 if still else 0

    def _minute_signs(self, policy: Policy) -> frozenset[str]:
        mean = self.engine_sum / self.seen
        spread = sqrt(max(0.0, self.engine_squares / self.seen - mean * mean)) / PPM
        starved = (
            self.input_sum >= policy.input_bytes_per_second * self.seen
            and mean >= policy.input_engine * PPM
            and self.sm_sum >= policy.small_kernel_share * self.engine_sum
        )
        even = spread <= policy.flat_spread
        launches = (
            even
            and policy.host_bound_engine_low * PPM <= mean < policy.host_gap_engine * PPM
            and self.sm_sum < policy.launch_bound_sm * self.engine_sum
        )
        return frozenset(compress((STARVED, STEADY, LAUNCHES), (starved, even, launches)))


def _input_rate(received: float, sent: float) -> int:
    """Bytes per second that only input explains: peers over PCIe send as much as they get, within counter errors."""
    surplus = received - sent
    return int(surplus) if surplus > _COUNTER_ERROR * received else 0


class StateInterval(Struct, gc=False):
    """A part of one reading throughout which owner, timed states and indicators stay the same."""

    start: int
    end: int
    holders: tuple[Allocation, ...]
    hung: bool = False
    zombie: bool = False
    leaked: bool = False
    signs: frozenset[str] = NO_SIGNS
    culprits: frozenset[str] = NO_SIGNS
    """Job IDs of holders that are hung on other GPUs, while this one is idle."""
    owner_known: bool = True


def update_activity(timers: GpuTimers, ev: Evidence, start: int, end: int, criteria: Criteria) -> None:
    """Update since when the GPU has had no process, when it last worked, and the conditions of a spin."""
    processes = ev.reading.processes
    if processes == ():
        timers.bare_since = start if timers.bare_since is None else timers.bare_since
    else:
        timers.bare_since = None
        if processes is not None and timers.holders:
            timers.update_processes(processes, start, criteria)
    timers.update_saving(ev, criteria.policy)
    if timers.holders:
        timers.update_memory(ev.reading, start, criteria)
    if ev.work * criteria.duty >= PPM:
        timers.worked_at = end
    if timers.spin == 0:
        timers.celsius = ev.reading.temperature_celsius
        timers.pcie_least = timers.pcie_most = 0.0
    if ev.spin == SPIN_IF_FLAT:
        ev.spin = _spin_if_flat(timers, ev)


def saves(ev: Evidence, policy: Policy) -> bool:
    """Whether clearly more data goes to the host than comes from it, and no kernel works; GPUDirect goes both ways."""
    surplus = (ev.pcie_tx or 0.0) - (ev.pcie_rx or 0.0)
    return surplus >= policy.checkpoint_pcie_bytes_per_second and ev.engine < policy.checkpoint_engine


def _spin_if_flat(timers: GpuTimers, ev: Evidence) -> int:
    """SPIN if PCIe traffic has stayed within a factor of 2.5 since the spin began (E): it polls host memory."""
    rate = max(ev.pcie_rx or 0.0, ev.pcie_tx or 0.0)
    timers.pcie_least = min(timers.pcie_least or rate, rate)
    timers.pcie_most = max(timers.pcie_most, rate)
    return SPIN if timers.pcie_most <= _FLAT_RATIO * timers.pcie_least else NO_SPIN


def split_at_changes(
    timers: GpuTimers,
    ev: Evidence,
    start: int,
    end: int,
    *,
    holders: tuple[Allocation, ...],
    criteria: Criteria,
) -> list[StateInterval]:
    """Split [start, end) of one owner's reading where a timed state or the last minute's indicators change."""
    if not holders and not computes_unowned(ev):
        timers.leaked, timers.unowned = 0, False
    intervals: list[StateInterval] = []
    now = start
    while now < end:
        minute_end = (now // MINUTE + 1) * MINUTE
        rates = _credit_rates(timers, ev, now, owned=bool(holders), criteria=criteria)
        change = now + _time_until_change(timers, ev, rates, criteria) if rates else end
        begun = now + _time_to(timers.startup_work, timers.startup_goal, ev.own_work)
        if begun == now and BEGINNING in timers.flags and ev.own_work:
            timers.end_startup()
            timers.update_saving(ev, criteria.policy)  # as if the reading began here
        levels_change = bool(holders) and now % MINUTE == 0  # and the pipe
        edges = (edge for edge in (timers.excused_until, timers.cpu_until, begun) if edge > now)
        stop = min(end, minute_end, change, *edges)
        if intervals and timers.unchanged_since(intervals[-1]) and not levels_change:
            intervals[-1].end = stop
        elif stop > now:
            intervals.append(
                StateInterval(now, stop, holders, timers.hung, timers.zombie, timers.unowned, timers.signs)
            )
        if rates:
            _advance_credits(timers, ev, rates, criteria, now=now, stop=stop)
        if BEGINNING in timers.flags:
            timers.startup_seen += stop - now
            timers.startup_work += (stop - now) // MS * ev.own_work
        timers.work_done += (stop - now) // MS * ev.work
        timers.tensor_work += (stop - now) // MS * ev.ofu
        timers.add_to_minute(ev, now, stop)
        now = stop
        if now == minute_end:
            timers.end_minute(criteria)
    return intervals


CreditRates = tuple[int, int, int]
"""Rates of the credits `spin`, `quiet` and `leaked`, parts per million of elapsed time."""


def _credit_rates(timers: GpuTimers, ev: Evidence, now: int, *, owned: bool, criteria: Criteria) -> CreditRates | None:
    """Rates of the credits from `now` on; None if none changes, as while a GPU simply works."""
    if not owned:
        return (0, 0, PPM) if not timers.unowned and computes_unowned(ev) else None
    quiet = -PPM if now < timers.cpu_until else PPM - criteria.duty * ev.work
    spinning = ev.spin != NO_SPIN and not timers.polls
    if quiet <= 0 and not (spinning or timers.spin or timers.quiet):
        return None
    spin = 0 if spinning and now < timers.excused_until and not timers.hung else _spin_rate(timers, ev, criteria)
    return spin, quiet, 0


def _time_until_change(timers: GpuTimers, ev: Evidence, rates: CreditRates, criteria: Criteria) -> int:
    """Nanoseconds until a credit changes its state."""
    spin, quiet, leak = rates
    if timers.zombie:
        idle = _time_to(-timers.quiet, -_zombie_end(timers, criteria), -quiet)
    else:
        idle = _time_to(timers.quiet, _zombie_start(timers, criteria), quiet)
    soonest = min(idle, _time_to(timers.leaked, criteria.unowned, leak))
    if timers.looping:
        return soonest
    if timers.hung:
        return min(soonest, _time_to(-timers.spin, -timers.hang_leave, -spin))
    if timers.spin and spin < 0:
        return min(soonest, _time_to(-timers.spin, 0, -spin))
    return soonest if ev.suspect_only else min(soonest, _time_to(timers.spin, timers.hang, spin))


def _advance_credits(
    timers: GpuTimers, ev: Evidence, rates: CreditRates, criteria: Criteria, *, now: int, stop: int
) -> None:
    """Advance all credits over [now, stop)."""
    spin, quiet, leak = rates
    _advance_spin(timers, ev, now, stop, spin)
    _advance_quiet(timers, stop, stop - now, quiet, criteria)
    timers.leaked += (stop - now) // MS * leak
    timers.unowned = timers.unowned or timers.leaked >= criteria.unowned


def _zombie_start(timers: GpuTimers, criteria: Criteria) -> int:
    """The credit at which idleness makes a zombie; longer for a batch job that has worked, or prepares its first work.

    That one holds memory and was seen to start: its first stage may run on the CPU. A keeper has worked a little.
    """
    prepares = timers.loaded and BEGINNING in timers.flags and not timers.startup_work
    patient = prepares or timers.work_done >= criteria.worked
    if timers.own_window or timers.window != criteria.windows["batch"] or not patient:
        return timers.window
    return round(timers.window * criteria.policy.zombie_worked_factor)


def _zombie_end(timers: GpuTimers, criteria: Criteria) -> int:
    """The credit at which work ends a zombie."""
    return max(0, timers.window - criteria.zombie_margin)


def _spin_rate(timers: GpuTimers, ev: Evidence, criteria: Criteria) -> int:
    """Rate of the spin credit in ppm. Before a hang, work drains it in proportion to the activity."""
    if timers.polls:
        return -PPM
    if ev.spin in {SPIN, FUTILE}:
        return PPM
    if timers.hung:
        return -criteria.stray_cost
    least, most = criteria.stray_cost, timers.hang // SECOND * PPM
    return -max(least, min(activity_over_limits(ev, criteria.policy) * PPM, most))


def _time_to(level: int, goal: int, rate: int) -> int:
    """Nanoseconds, on whole milliseconds, until a credit rising at `rate` ppm reaches `goal`; very large if never.

    0 if it is already beyond, as after a policy change lowered the goal: booked time is never reversed.
    """
    return max(0, -(-(goal - level) // rate)) * MS if rate > 0 else 1 << 62


def _advance_spin(timers: GpuTimers, ev: Evidence, now: int, stop: int, rate: int) -> None:
    ceiling = timers.hang
    unproven = ev.suspect_only and not timers.proven
    if unproven and not timers.hung:
        ceiling = max(timers.spin, timers.suspect)
    if rate > 0 and timers.spin_since is None:
        timers.spin_since = now
    timers.spin = min(ceiling, max(0, timers.spin + (stop - now) // MS * rate))
    worked_at = stop if ev.work else None
    if timers.hung and timers.spin <= timers.hang_leave and not timers.looping:
        timers.clear_spin(worked_at)
    elif not timers.hung and timers.spin >= timers.hang and not unproven:
        timers.hung = True
        timers.hangs += 1
        timers.to_hang += stop - (now if timers.spin_since is None else timers.spin_since)
    if timers.spin == 0:
        timers.clear_spin(worked_at)


def _advance_quiet(timers: GpuTimers, stop: int, duration: int, rate: int, criteria: Criteria) -> None:
    """Advance the idle credit. It stops at the level of a zombie, so that as much work ends one as would prevent it."""
    goal = _zombie_start(timers, criteria)
    top = timers.window if timers.zombie else goal
    timers.quiet = min(top, max(0, timers.quiet + duration // MS * rate))
    if timers.zombie:
        timers.zombie = timers.quiet > _zombie_end(timers, criteria)
    elif goal and timers.quiet >= goal:
        timers.zombie = True
        timers.quiet = timers.window
        timers.zombies += 1
        timers.to_zombie += stop - timers.worked_at


def computes_unowned(ev: Evidence) -> bool:
    """Whether a kernel ran and the driver's process list, if available, is not empty."""
    processes = ev.reading.processes
    return ev.kernel_runs and (processes is None or len(processes) > 0)


def skip_unobserved(timers: GpuTimers, duration: int) -> None:
    """Skip unobserved time: the spin credit decays at the rate it was gained, other credits are kept."""
    if not timers.hung:
        timers.spin = max(0, timers.spin - duration)
        timers.spin_since = timers.spin_since if timers.spin else None


_BLOCKING_CONDITIONS = frozenset({"lost", "missing", "xid", "recovery", "reset_required"})
"""Conditions that make a GPU unusable; any other ("drained") only prevents new allocations."""


Rule = Callable[[Evidence, StateInterval], str]
"""Returns the reason the state applies, or "" if it does not."""


def _unavailable(ev: Evidence, interval: StateInterval) -> str:
    condition = ev.condition
    if condition in _BLOCKING_CONDITIONS:
        return condition
    return "" if interval.holders else condition


def _hung(ev: Evidence, interval: StateInterval) -> str:
    return "crash_loop" if RESTARTED in interval.signs and ev.spin == NO_SPIN else "spinning"


def _zombie(ev: Evidence, interval: StateInterval) -> str:
    if not interval.zombie:
        return ""
    return "idle_spin" if _polls_for_requests(ev, interval) else _idle_reason(ev)


def _idle_reason(ev: Evidence) -> str:
    """Reason of an idle GPU: with an idle context, without a process, or with an unavailable process list."""
    processes = ev.reading.processes
    if processes is None:
        return "processes_unseen"
    return "idle_context" if processes else "no_process"


def _polls_for_requests(ev: Evidence, interval: StateInterval) -> bool:
    """Whether the spinning kernel belongs to servers only, which may be polling for requests."""
    return ev.spin == SPIN and all(allocation.owner.workload_class == "serving" for allocation in interval.holders)


def _active(ev: Evidence, interval: StateInterval) -> str:
    return "idle_spin" if ev.spin == SPIN and _polls_for_requests(ev, interval) else "computing"


RULES: tuple[tuple[State, Rule], ...] = (
    (State.UNAVAILABLE, _unavailable),
    (State.UNOBSERVED, lambda ev, span: ev.distrust or ("" if span.owner_known else "owner_unknown")),
    (State.UNOWNED, lambda _, span: "leaked_process" if span.leaked and not span.holders else ""),
    (State.UNALLOCATED, lambda ev, span: "" if span.holders else "stranded" if ev.device.stranded else "free"),
    (State.HUNG, lambda ev, span: _hung(ev, span) if span.hung else "culprit" if span.culprits else ""),
    (State.ZOMBIE, _zombie),
    (State.STALLED, lambda ev, _: "" if ev.kernel_runs else _idle_reason(ev)),
    (State.ACTIVE, _active),
)
"""Evaluated in order; the first rule that returns a reason wins, and the last always does."""


def classify(ev: Evidence, interval: StateInterval) -> tuple[State, str]:
    """The state of an interval, with its reason as one word."""
    if (
        ev.kernel_runs
        and interval.holders
        and not (interval.hung or interval.zombie or interval.culprits or ev.distrust or ev.condition)
    ):
        return State.ACTIVE, _active(ev, interval)  # fast path for most intervals: no other rule could match
    for state, rule in RULES:
        reason = rule(ev, interval)
        if reason:
            return state, reason
    raise AssertionError("the last rule always holds")
