"""Determines the state of each GPU: divides a reading where a timed state changes, and applies the ordered RULES."""

from collections.abc import Callable

from msgspec import Struct

from exporter.core.criteria import (
    MINUTE,
    Criteria,
    zombie_window,
)
from exporter.core.evidence import FUTILE, NO_SPIN, SPIN, SPIN_IF_FLAT, Evidence, activity_over_limits
from exporter.core.model import MS, PPM, SECOND, Allocation, State
from exporter.core.timers import (
    BEGINNING,
    NO_SIGNS,
    RESTARTED,
    GpuTimers,
    zombie_end,
)

_FLAT_RATIO = 2.5


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
    last_known: tuple[Allocation, ...] = ()
    """Whom the state is about while the holders are unknown: those before."""
    newcomers: frozenset[str] = NO_SIGNS
    """Job IDs of several holders of a zombie that have not held it for as long as they may idle."""
    peers_save: int = 0
    """The part of it in which other GPUs of the job save, ppm."""

    def agrees_with(self, timers: GpuTimers) -> bool:
        """Whether flags and indicators are still those of this interval."""
        same = timers.hung is self.hung and timers.zombie is self.zombie and timers.unowned is self.leaked
        return same and timers.signs == self.signs


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
    patient = [(a.start + zombie_window(criteria, a.owner), a.owner.job_id) for a in holders] if holders[1:] else []
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
        until = [edge for edge, _ in patient]
        edges = (edge for edge in (timers.excused_until, timers.cpu_until, begun, *until) if edge > now)
        stop = min(end, minute_end, change, *edges)
        newcomers = frozenset(job_id for edge, job_id in patient if edge > now) if timers.zombie else NO_SIGNS
        same = bool(intervals) and intervals[-1].agrees_with(timers) and intervals[-1].newcomers == newcomers
        if same and not levels_change:
            intervals[-1].end = stop
        elif stop > now:
            flags = timers.hung, timers.zombie, timers.unowned
            intervals.append(StateInterval(now, stop, holders, *flags, timers.signs, newcomers=newcomers))
        if rates:
            _advance_credits(timers, ev, rates, criteria, now=now, stop=stop)
        if BEGINNING in timers.flags:
            timers.startup_seen += stop - now
            timers.startup_work += (stop - now) // MS * ev.own_work
        timers.work_done += (stop - now) // MS * ev.work
        timers.tensor_work += (stop - now) // MS * ev.ofu
        timers.add_to_minute(ev, now, stop, criteria.policy)
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
        idle = _time_to(-timers.quiet, -zombie_end(timers, criteria), -quiet)
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
        timers.zombie = timers.quiet > zombie_end(timers, criteria)
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
    blocked = ev.condition in _BLOCKING_CONDITIONS and not ev.usable_by_holders
    return ev.condition if blocked or not interval.holders else ""


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
