"""The timers of one GPU's timed states: credits, flags, and the signs of the current and the last full minute.

A credit is nanoseconds that fill while an indicator holds and drain while it does not; a state begins at the
millisecond its credit is full. A credit is linear in time, so the result does not depend on how time is divided into
readings.
"""

from dataclasses import dataclass, field
from itertools import compress
from math import sqrt

from exporter.core.criteria import LONG_RUN, MINUTE, UNLIMITED, Criteria, hang_window, zombie_window
from exporter.core.evidence import NO_SPIN, SPIN, Evidence
from exporter.core.model import MS, NEVER, PPM, SECOND, Allocation, Process, Reading
from exporter.core.policy import Policy

_COUNTER_ERROR = 0.1
"""E: the counters of a link's two directions disagree by up to this share about traffic that goes both ways."""
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
even; for a part of it, it was evenly partial, with kernels that leave SMs idle: they wait for the CPU that launches
them."""
NO_SIGNS: frozenset[str] = frozenset()
_LONGEST = 10 * SECOND
"""E: a step takes less, so that longer readings are the means of several."""
_LAUNCHES_SHARE, _LAUNCHES_SPREAD, _TENSOR_WORK = 0.1, 0.12, 1_000 * PPM
"""E: share of a minute that must be so, how much engine activity may vary in it, and a second of tensor work at the
peak. The edges between work and waiting are less, and waiting that differs from step to step varies more. Without
tensor work such gaps have other causes: a renderer waits for its next frame."""


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
    last_ran: dict[str, int] = field(default_factory=dict)
    """By the job ID of its holders, when a kernel last ran that did not spin, or when the GPU was allocated to it."""
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
    hang: int = UNLIMITED
    suspect: int = UNLIMITED
    hang_leave: int = 0
    """Credit thresholds in nanoseconds; with several holders the longest limit applies."""
    own_hang: int = UNLIMITED
    """The holders' own limit, from which `hang` was last reset."""
    seen: int = 0
    engine_sum: int = 0
    engine_squares: int = 0
    sm_sum: int = 0
    input_sum: int = 0
    used_sum: int = 0
    arrived_sum: int = 0
    work_sum: int = 0
    gapped: int = 0
    gapped_sum: int = 0
    gapped_squares: int = 0
    """Sums over the current minute, weighted by milliseconds."""
    mixtures: int = 0
    """Milliseconds of it in readings of several steps."""
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
        self.hung = self.zombie = self.unowned = self.proven = False
        self.worked_at, self.excused_until, self.cpu_until = at, NEVER, NEVER
        self.last_ran = {allocation.owner.job_id: at for allocation in holders}
        self.spin_since = self.celsius = self.bare_since = None
        self.pcie_least = self.pcie_most = 0.0
        self.forget_past(worked=worked)

    def forget_past(self, *, worked: bool) -> None:
        """Reset what the holders have done and reported, but not for how long they have idled or spun."""
        self.longest_spin = self.work_done = self.tensor_work = 0
        self.hung = self.hung and not self.looping
        self.computed = self.loaded = self.unloaded = self.looping = False
        self.attempts = self.work_before = 0
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

    def change_holders(
        self, holders: tuple[Allocation, ...], criteria: Criteria, *, at: int, departed: bool, spins_on: bool
    ) -> None:
        """Go on for several holders of whom some came or went and some stay.

        `departed`: some went; `spins_on`: the kernel that spins, if any, is not theirs. The GPU has idled no longer for
        those who are left than they have held it.
        """
        if departed:
            self.unserved = False
        if not spins_on:
            self.looping = False
            self.clear_spin()
        self.last_ran = {each.owner.job_id: self.last_ran.get(each.owner.job_id, at) for each in holders}
        held = at - min(allocation.start for allocation in holders)
        idled_longer = self.quiet > held
        self.quiet = min(self.quiet, held)
        self.update_holders(holders, criteria)
        if idled_longer:  # else some work since does not end a zombie
            self.zombie = self.zombie and self.quiet >= self.window

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
        own = max((hang_window(criteria, owner) for owner in owners), default=UNLIMITED)
        if own != self.own_hang:  # else `hang` stays what the job's other GPUs made it
            self.own_hang = self.hang = own
            self.suspect = min(criteria.hang_suspect, own) if owners else UNLIMITED
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
        elif RESTARTED in self.flags and 2 * self.startup_work >= self.startup_goal:
            self.attempts, self.failing_since = 0, at  # a short program: an attempt that fails does less before it
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

    def update_last_ran(self, ev: Evidence, jobs: frozenset[str], end: int) -> None:
        """Note that kernels ran until `end` that did not spin: those of `jobs`, of any holder if there are none."""
        if ev.kernel_runs and ev.spin == NO_SPIN:
            self.last_ran |= dict.fromkeys(jobs or self.last_ran, end)

    def update_saving(self, ev: Evidence, policy: Policy) -> None:
        """Notice that state is copied to the host; the wait from then until kernels run again is for the same save."""
        works = ev.engine >= policy.checkpoint_engine and ev.spin != SPIN
        self.computed = self.computed or works
        if self.computed and BEGINNING not in self.flags and saves(ev, policy):
            if SAVING not in self.flags:
                self._set_flags(self.flags | {SAVING})
        elif works and SAVING in self.flags:
            self._set_flags(self.flags - {SAVING})

    def end_startup(self) -> None:
        """The job has done enough to be working."""
        self._set_flags(self.flags - {BEGINNING, RESTARTED})
        if self.looping:
            self.hung = self.looping = False

    def _begin_minute(self) -> None:
        self.seen = self.engine_sum = self.engine_squares = 0
        self.sm_sum = self.input_sum = self.used_sum = self.arrived_sum = self.work_sum = 0
        self.gapped = self.gapped_sum = self.gapped_squares = self.mixtures = 0
        self.memory_before = self.memory

    def add_to_minute(self, ev: Evidence, start: int, end: int, policy: Policy) -> None:
        """Add [start, end), which lies within one minute, to the current minute."""
        ms = (end - start) // MS
        engine = PPM - ev.wait
        self.seen += ms
        self.mixtures += ms if is_mixture(ev) else 0
        self.engine_sum += ms * engine
        self.engine_squares += ms * engine * engine
        self.work_sum += ms * ev.own_work
        if ev.spin == NO_SPIN:
            self.used_sum += ms * engine
        if has_gaps(ev, policy):
            self.gapped += ms
            self.gapped_sum += ms * engine
            self.gapped_squares += ms * engine * engine
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
            self.zombie = self.zombie and self.quiet > zombie_end(self, criteria)
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
        fed = self.input_sum >= policy.input_bytes_per_second * self.seen
        resolved = not (fed and self.mixtures)
        even = resolved and _spread(self.engine_sum, self.engine_squares, self.seen) <= policy.flat_spread
        starved = (
            fed and mean >= policy.input_engine * PPM and self.sm_sum >= policy.small_kernel_share * self.engine_sum
        )
        launches = (
            resolved
            and self.tensor_work >= _TENSOR_WORK
            and self.gapped >= _LAUNCHES_SHARE * self.seen
            and (even or _spread(self.gapped_sum, self.gapped_squares, self.gapped) <= _LAUNCHES_SPREAD)
        )
        return frozenset(compress((STARVED, STEADY, LAUNCHES), (starved, even, launches)))


def _spread(total: int, squares: int, ms: int) -> float:
    """Standard deviation of the activity in `ms` milliseconds with that sum and sum of squares; ppm -> 0-1."""
    mean = total / ms
    return sqrt(max(0.0, squares / ms - mean * mean)) / PPM


def has_gaps(ev: Evidence, policy: Policy) -> bool:
    """Whether kernels that leave SMs idle run for a part of a reading."""
    partial = policy.host_bound_engine_low <= ev.engine < policy.host_gap_engine
    return partial and ev.sm is not None and ev.sm < policy.launch_bound_sm * ev.engine


def _input_rate(received: float, sent: float) -> int:
    """Bytes per second that only input explains: peers over PCIe send as much as they get, within counter errors."""
    surplus = received - sent
    return int(surplus) if surplus > _COUNTER_ERROR * received else 0


def is_mixture(ev: Evidence) -> bool:
    """Whether the reading is the mean of several steps, which looks even whatever happens in them."""
    return ev.reading.end - ev.reading.start > _LONGEST


def saves(ev: Evidence, policy: Policy) -> bool:
    """Whether clearly more data goes to the host than comes from it, and no kernel works; GPUDirect goes both ways.

    A long reading also holds the work before the save or after it.
    """
    surplus = (ev.pcie_tx or 0.0) - (ev.pcie_rx or 0.0)
    still = ev.engine < policy.checkpoint_engine or is_mixture(ev)
    return still and surplus >= policy.checkpoint_pcie_bytes_per_second


def zombie_end(timers: GpuTimers, criteria: Criteria) -> int:
    """The credit at which work ends a zombie."""
    return max(0, timers.window - criteria.zombie_margin)
