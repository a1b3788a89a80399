"""Says who holds a GPU, also while the scheduler does not, and what a change of holders means for its timed states."""

from collections.abc import Sequence
from itertools import compress

from exporter.core.attribution import OwnedInterval, attribute, sm_use_by_holder
from exporter.core.evidence import Evidence
from exporter.core.ledger import Gpu, Ledger
from exporter.core.model import MS, NEVER, UNKNOWN_JOB, Allocation, Owner

UNKNOWN_OWNER = Owner(UNKNOWN_JOB, name="the scheduler's word is too old to tell")


def owned_intervals(ledger: Ledger, ev: Evidence) -> Sequence[tuple[int, int, tuple[Allocation, ...] | None]]:
    """Attribute a reading; where the allocation data is stale, the owner is unknown, which is not unallocated.

    A GPU with a process or a running kernel is then attributed to UNKNOWN_OWNER, an idle one to None. The unpartitioned
    remainder of a board in MIG mode is always unallocated.
    """
    uuid, start, end = ev.reading.uuid, ev.reading.start, ev.reading.end
    allocations = ledger.allocations.get(uuid, ())
    reach = ledger.allocations_at + ledger.criteria.allocations_stale
    if end <= reach or ev.device.unpartitioned:
        return _drop_uncertain_holders(ev, attribute(start, end, allocations))
    known_until = max(start, reach - reach % MS)
    parts = attribute(start, known_until, allocations) if start < known_until else []
    unknown_owner = (known_until, end, (Allocation(uuid, UNKNOWN_OWNER, start=reach),))
    return _drop_uncertain_holders(ev, [*parts, unknown_owner])


def _drop_uncertain_holders(
    ev: Evidence, parts: list[OwnedInterval]
) -> Sequence[tuple[int, int, tuple[Allocation, ...] | None]]:
    """Replace the holders by None where an idle GPU is held by the unknown job alone and may be unallocated."""
    if ev.reading.processes or ev.kernel_runs:
        return parts
    return [(start, end, None if owner_unknown(holders) else holders) for start, end, holders in parts]


def owner_unknown(holders: tuple[Allocation, ...]) -> bool:
    """Whether the GPU is held, and by whom is unknown."""
    return len(holders) == 1 and holders[0].owner.job_id == UNKNOWN_JOB


def last_known(gpu: Gpu, holders: tuple[Allocation, ...], ev: Evidence) -> tuple[Allocation, ...]:
    """The holders; while they are unknown, those before: a scheduler that does not answer ends no hang and no zombie.

    If others hold the GPU by then, the timers begin anew when these are known, or when only other processes are left;
    but in a crash loop these are the job's next attempt.
    """
    timers = gpu.timers
    if not timers.holders or not owner_unknown(holders):
        return holders
    pids = {process.pid for process in ev.reading.processes or ()}
    replaced = bool(pids) and pids.isdisjoint(timers.pids) and not timers.looping
    return holders if replaced else timers.holders


def update_holders(gpu: Gpu, holders: tuple[Allocation, ...], ev: Evidence, *, at: int, since: int) -> None:
    """Let the timers go on for the same holders, and for those that stay; begin anew for others.

    `since`: when this process began to observe. A spin goes on if a process of a holder that stays uses the SMs now.
    What was done on the GPU so far is taken for the work of the holder that came first, and forgotten when it goes; but
    who has used the SMs since it came does not start up again.
    """
    timers = gpu.timers
    before, now = ([allocation.owner.job_id for allocation in each] for each in (timers.holders, holders))
    if before == now:
        timers.update_holders(holders, gpu.criteria)
        return
    worked = not all(gpu.saw_start(allocation, since) for allocation in holders)
    if gpu.credits:
        gpu.credits = {name: credit for name, credit in gpu.credits.items() if name in now}
    staying = set(before) & set(now)
    if staying:
        departed = bool(set(before) - staying)
        spins_on = not departed or (ev.kernel_runs and not staying.isdisjoint(jobs_that_compute(ev, timers.holders)))
        began = min(allocation.start for allocation in timers.holders)
        if any(each.start == began and each.owner.job_id not in staying for each in timers.holders):
            stayers = (each for each in timers.holders if each.owner.job_id in staying)
            ran = any(timers.last_ran.get(each.owner.job_id, NEVER) > each.start for each in stayers)
            timers.forget_past(worked=worked or ran)
        timers.change_holders(holders, gpu.criteria, at=at, departed=departed, spins_on=spins_on)
        return
    timers.begin_ownership(holders, gpu.criteria, at=at, worked=worked)


def jobs_that_compute(ev: Evidence, holders: tuple[Allocation, ...]) -> frozenset[str]:
    """The holders whose processes use the SMs: only these may be hung. Of several, none if their use is unknown."""
    jobs = [allocation.owner.job_id for allocation in holders]
    if len(jobs) == 1:
        return frozenset(jobs)
    use = sm_use_by_holder(ev.reading.processes, holders) or [0] * len(jobs)
    return frozenset(compress(jobs, use))
