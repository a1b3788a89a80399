"""Advances the ledger by one observation.

Applies inventory, owners and workload reports, rejects malformed readings, attributes, finds the timed states of every
GPU, then classifies each interval, splits it into leaks and posts it. Two passes, because whether an idle GPU is a hung
job's culprit depends on the job's other GPUs. Unobserved time is represented by a distrusted reading.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from msgspec.structs import replace

from exporter.core.attribution import divide_proportionally, sm_use_by_holder
from exporter.core.communication import UNKNOWN_LEVELS, Part, SmLevels
from exporter.core.criteria import TENSOR_JOB, hang_windows, own_hang_window
from exporter.core.evidence import NO_SPIN, SPIN, SPIN_IF_FLAT, UTILIZATION_LAG, Evidence, evaluate
from exporter.core.findings import apply_finding
from exporter.core.holders import jobs_that_compute, last_known, owned_intervals, owner_unknown, update_holders
from exporter.core.host import apply_hosts
from exporter.core.leaks import MEMORY_BOUND_INDEX, REPORTING, LeakShares, Span, split_into_leaks
from exporter.core.ledger import Gpu, Job, Ledger, PeakDemand, conserved, counter_amounts
from exporter.core.model import (
    MS,
    NEVER,
    PPM,
    Allocation,
    Device,
    Observation,
    Owner,
    Reading,
    State,
)
from exporter.core.peers import GpuIntervals, beside_saves, group_of, times_of_hangs, times_of_saves, with_culprits
from exporter.core.pipes import NONE, TENSOR, pools_of
from exporter.core.policy import Policy
from exporter.core.reports import apply_collectives, apply_host_usage, apply_reports, apply_serving
from exporter.core.states import StateInterval, classify, skip_unobserved, split_at_changes, update_activity
from exporter.core.timers import BEGINNING
from exporter.core.workload import (
    MODEL,
    REPEATED,
    WorkloadCredit,
)

Activity = tuple[Mapping[str, int], frozenset[str]]
"""UUIDs of the GPUs that spin, with the start of the first such reading, and of those that work, in the readings of one
observation."""
_NO_ACTIVITY: Activity = {}, frozenset()
_HARMLESS_FAULTS = frozenset({
    "controller_silent", "engine_failed", "host_unread", "listening_failed", "processes_unseen", "reports_failed",
    "scheduler_failed", "scheduler_refused", "unknown_model",
})  # fmt: skip
"""Faults that do not prevent a GPU from being read."""


def advance(ledger: Ledger, observation: Observation) -> None:
    """Advance the ledger to `observation`. Never raises on bad values: they are rejected and counted by reason."""
    if ledger.at is not None and observation.at < ledger.at:
        ledger.refused["clock_step"] += 1
        return
    gpu_intervals = _apply_inputs(ledger, observation)
    evaluated = [(gpu, _evaluate_reading(ledger, gpu, reading)) for gpu, reading in _timeline(ledger, observation)]
    activity = _activity_of(evaluated)
    gpu_intervals += [(gpu, ev, _split_reading(ledger, gpu, ev, activity)) for gpu, ev in evaluated]
    hangs, saves = times_of_hangs(gpu_intervals), times_of_saves(gpu_intervals)
    if saves:
        gpu_intervals = [(gpu, ev, list(beside_saves(gpu, ev, parts, saves))) for gpu, ev, parts in gpu_intervals]
    _measure_levels(ledger, gpu_intervals)
    for gpu, ev, parts in gpu_intervals:
        intervals = _joined(ledger, parts)
        _post(ledger, gpu, ev, with_culprits(gpu, ev, intervals, hangs) if hangs else intervals)
    for gpu in ledger.gpus.values():
        if not conserved(gpu.book):
            ledger.conservation_errors += 1
    ledger.evict(observation.at)


def _apply_inputs(ledger: Ledger, observation: Observation) -> list[GpuIntervals]:
    """Apply everything but the readings; return intervals that a change of MIG layout closes."""
    ledger.at, ledger.wall = observation.at, observation.wall
    ledger.first = ledger.first or (observation.at, observation.wall)
    ledger.source = observation.source or ledger.source
    for fault in observation.faults:
        ledger.faults[fault.kind] += 1
    ledger.allocations_at = observation.at if observation.allocations_at is None else observation.allocations_at
    if observation.allocations is not None:
        ledger.set_allocations(observation.allocations)
    closed = [] if observation.devices is None else _update_inventory(ledger, observation, observation.devices)
    apply_reports(ledger, observation.reports, observation.at)
    for serving in observation.serving:
        apply_serving(ledger, serving, observation.at)
    for usage in observation.hosts:
        apply_host_usage(ledger, usage)
    apply_hosts(ledger, observation)
    for finding in observation.findings:
        apply_finding(ledger, finding)
    for collectives in observation.collectives:
        apply_collectives(ledger, collectives, observation.at)
    for health in observation.health:
        board = ledger.gpus.get(health.uuid)
        if board is not None:
            board.board_health.update(health, observation.at, ledger.policy.fatal_xids)
    return closed


def _update_inventory(ledger: Ledger, observation: Observation, devices: Iterable[Device]) -> list[GpuIntervals]:
    """Apply the inventory: a device no longer in it is no longer paid for, but its book is kept."""
    known: dict[str, list[Gpu]] = {}
    for gpu in ledger.gpus.values():
        known.setdefault(gpu.device.parent or gpu.device.uuid, []).append(gpu)
    listed: dict[str, dict[str, Device]] = {}
    for device in devices:
        listed.setdefault(device.parent or device.uuid, {})[device.uuid] = device
    closed: list[GpuIntervals] = []
    for board in known | listed:
        gpus, parts = known.get(board, []), listed.get(board, {})
        if {gpu.device.uuid: gpu.book.weight for gpu in gpus if gpu.listed} != {u: d.weight for u, d in parts.items()}:
            closed += _repartition(ledger, observation, gpus, parts)
        for uuid, device in parts.items():
            ledger.gpus[uuid].device = device
            ledger.gpus[uuid].criteria = ledger.criteria_for(device)
    return closed


def _repartition(
    ledger: Ledger, observation: Observation, known: Sequence[Gpu], parts: dict[str, Device]
) -> list[GpuIntervals]:
    """Change the MIG layout of a board. Together with its instances it is one paid GPU, so all change at one instant.

    That is the latest end of their books, as entries are never reversed; the other books are closed up to it.
    """
    until = [gpu.book.until for gpu in known if gpu.listed]
    first = min((_first_moment(ledger, uuid, observation) for uuid in parts), default=NEVER)
    edge = max(until) if until else max([first, *(gpu.book.until for gpu in known)])
    gaps = [(gpu, _gap_reading(gpu, edge, observation)) for gpu in known if gpu.listed and gpu.book.until < edge]
    evaluated = [(gpu, _evaluate_reading(ledger, gpu, gap)) for gpu, gap in gaps]
    closed = [(gpu, ev, _split_reading(ledger, gpu, ev, _NO_ACTIVITY)) for gpu, ev in evaluated]
    for gpu in known:
        gpu.listed = False
    for uuid, device in parts.items():
        gpu = ledger.gpus.get(uuid) or ledger.gpus.setdefault(
            uuid, Gpu.starting_at(edge, device, ledger.criteria_for(device))
        )
        gpu.book.skip_to(edge)
        gpu.book.set_weight(device.weight)
        gpu.listed = True
    return closed


def _first_moment(ledger: Ledger, uuid: str, observation: Observation) -> int:
    """When a GPU begins to be paid for: where an earlier ledger ended, else with its first reading or observation."""
    if uuid in ledger.paid_since:
        return ledger.paid_since[uuid]
    starts = [r.start for r in observation.readings if r.uuid == uuid and not _interval_error(r, observation.at)]
    return min([_settled(observation), *starts])


def _settled(observation: Observation) -> int:
    """The time before which no more readings will arrive, on whole milliseconds."""
    settled = observation.at if observation.settled is None else min(observation.settled, observation.at)
    return settled - settled % MS


def _timeline(ledger: Ledger, observation: Observation) -> Iterator[tuple[Gpu, Reading]]:
    """Valid readings in time order, with every gap up to the settled time filled by a distrusted reading."""
    for reading in sorted(observation.readings, key=attrgetter("start")):
        gpu = ledger.gpus.get(reading.uuid)
        error = "unknown_gpu" if gpu is None or not gpu.listed else _interval_error(reading, observation.at)
        if gpu is None or error or reading.start < gpu.book.until:
            (gpu.rejected if gpu is not None and gpu.listed else ledger.refused)[error or "overlap"] += 1
            continue
        if reading.start > gpu.book.until:
            yield gpu, _gap_reading(gpu, reading.start, observation)
        gpu.reading, gpu.book.until = reading, reading.end
        yield gpu, reading
    settled = _settled(observation)
    for gpu in ledger.gpus.values():
        if gpu.book.until < settled and gpu.listed:
            yield gpu, _gap_reading(gpu, settled, observation)


def _interval_error(reading: Reading, at: int) -> str:
    if reading.start % MS or reading.end % MS or reading.end <= reading.start:
        return "bad_interval"
    return "future" if reading.end > at else ""


def _gap_reading(gpu: Gpu, end: int, observation: Observation) -> Reading:
    """A distrusted reading for time no reading covers; the reason is a fault of the GPU, or "gap"."""
    uuid, start = gpu.device.uuid, gpu.book.until
    uuids = (uuid, gpu.device.parent, "")
    kinds = [f.kind for f in observation.faults if f.uuid in uuids and f.kind not in _HARMLESS_FAULTS]
    gpu.book.until = end
    return Reading(uuid, start, end, distrust=kinds[0] if kinds else "gap")


def _evaluate_reading(ledger: Ledger, gpu: Gpu, reading: Reading) -> Evidence:
    """Evaluate a reading and update the board's health from it."""
    board = ledger.gpus.get(gpu.device.parent, gpu).board_health
    ev = evaluate(
        reading,
        gpu.device,
        gpu.criteria.policy,
        power_smoothed=board.power_smoothed,
        held_clock=gpu.held_clock,
        tensor_job=gpu.timers.tensor_work >= TENSOR_JOB,
        driver_lags=reading.end - gpu.worked_at <= UTILIZATION_LAG,
        shared=len(gpu.timers.holders) > 1,
    )
    if not ev.distrust and ev.engine > 0.0:
        gpu.worked_at = reading.end
    if ev.clock_known:
        gpu.held_clock = ev.clock
    for reason in ev.rejected:
        gpu.rejected[reason] += 1
    gpu.board_health.add_clock_limits(ev)
    if board.in_trouble:
        board.check_outlived(ev)
    return ev


def _split_reading(ledger: Ledger, gpu: Gpu, ev: Evidence, activity: Activity) -> list[StateInterval]:
    """First pass: split one reading where owner, timed states or indicators change."""
    board = ledger.gpus.get(gpu.device.parent, gpu).board_health
    if board.in_trouble:
        board.set_condition(ev)
    intervals: list[StateInterval] = []
    suspect_only = ev.suspect_only
    for start, end, holders in owned_intervals(ledger, ev):
        if holders is None or owner_unknown(holders):
            for credit in gpu.credits.values():
                credit.unobserved += end - start  # what a report says of this time is booked on no known job
        if ev.distrust or holders is None:
            skip_unobserved(gpu.timers, end - start)
            intervals.append(StateInterval(start, end, holders or (), owner_known=holders is not None))
            continue
        known = last_known(gpu, holders, ev)
        if known is not gpu.timers.holders:
            update_holders(gpu, known, ev, at=start, since=ledger.watched_since)
        update_activity(gpu.timers, ev, start, end, gpu.criteria)
        computing = jobs_that_compute(ev, known)
        gpu.timers.update_last_ran(ev, computing, end)
        if ev.spin != NO_SPIN and holders and not gpu.timers.polls:
            _set_hang_window(ledger, gpu, activity, start, end)
        # Of several holders, nobody can be called hung while it is unknown whose kernel spins.
        spinner_unknown = len(known) > 1 and not computing
        ev.suspect_only = suspect_only or spinner_unknown
        parts = split_at_changes(gpu.timers, ev, start, end, holders=holders, criteria=gpu.criteria)
        for part in parts if spinner_unknown or known is not holders else ():
            part.hung = part.hung and not spinner_unknown
            part.last_known = known
        intervals += parts
    if not ev.distrust:
        gpu.last_evidence = ev
    return intervals


def _measure_levels(ledger: Ledger, gpu_intervals: Iterable[GpuIntervals]) -> None:
    """Learn the SM activity and the pipe of the kernels of jobs. New jobs are opened, so that none is missed."""
    parts: dict[str, list[Part]] = {}
    for gpu, ev, intervals in gpu_intervals:
        for interval in intervals:
            for allocation in interval.holders:
                job_id = allocation.owner.job_id
                if job_id not in ledger.jobs:
                    ledger.open_job(gpu, allocation, interval.start)
                if len(interval.holders) == 1:
                    begun, alone = BEGINNING not in interval.signs, allocation.gpus == 1
                    parts.setdefault(job_id, []).append(Part(ev, interval.start, interval.end, begun, alone))
    for job_id, of_job in parts.items():
        ledger.jobs[job_id].level_tracker.add(of_job, ledger.policy)


def _joined(ledger: Ledger, intervals: list[StateInterval]) -> list[StateInterval]:
    """The intervals of a reading, without the minutes at which nothing changed, not even what the job's kernels are."""
    if len(intervals) < 2:  # noqa: PLR2004  as nearly always
        return intervals
    joined = intervals[:1]
    for interval in intervals[1:]:
        last = joined[-1]
        same = last.end == interval.start and last.holders is interval.holders and last.culprits == interval.culprits
        if same and _flags(last) == _flags(interval) and (_levels_at(ledger, last) == _levels_at(ledger, interval)):
            last.end = interval.end
        else:
            joined.append(interval)
    return joined


def _flags(interval: StateInterval) -> tuple[object, ...]:
    owners = interval.owner_known, interval.newcomers
    return interval.hung, interval.zombie, interval.leaked, interval.signs, interval.peers_save, *owners


def _levels_at(ledger: Ledger, interval: StateInterval) -> list[SmLevels]:
    jobs = [ledger.jobs.get(allocation.owner.job_id) for allocation in interval.holders]
    return [job.level_tracker.at(interval.start) for job in jobs if job is not None]


def _activity_of(evaluated: Iterable[tuple[Gpu, Evidence]]) -> Activity:
    busy: dict[str, int] = {}
    for gpu, ev in evaluated:
        if ev.spin in {SPIN, SPIN_IF_FLAT}:
            busy.setdefault(gpu.device.uuid, ev.reading.start)
    works = (gpu.device.uuid for gpu, ev in evaluated if ev.kernel_runs and ev.spin == NO_SPIN and not ev.distrust)
    return busy, frozenset(works)


def _set_hang_window(ledger: Ledger, gpu: Gpu, activity: Activity, start: int, end: int) -> None:
    """Set how long a GPU may spin, by what the GPUs of its job do; of several holders the longest window counts."""
    hang, suspect = max(
        _hang_windows_of_job(gpu, _gpus_between(ledger, holder, start, end), activity, holder.owner, start)
        for holder in gpu.timers.holders
    )
    gpu.timers.set_hang(gpu.criteria, hang=hang, suspect=suspect)


def _hang_windows_of_job(gpu: Gpu, gpus: list[Gpu], activity: Activity, owner: Owner, start: int) -> tuple[int, int]:
    """The windows of a GPU that spins from `start` on at the latest, by what all GPUs of one job on this node do."""
    busy, works = activity
    uuids = {each.device.uuid for each in gpus}
    alone = uuids <= busy.keys()
    timers = [each.timers for each in gpus if any(held.owner.job_id == owner.job_id for held in each.timers.holders)]
    longest = sorted(each.longest_spin for each in timers)
    begun = any(BEGINNING not in each.flags for each in timers)
    since = _spin_since(gpu, start)
    others = [
        _spin_since(each, busy[each.device.uuid]) if alone else each.timers.last_ran.get(owner.job_id, NEVER)
        for each in gpus
        if alone or each.device.uuid not in busy
    ]
    return hang_windows(
        gpu.criteria,
        own=own_hang_window(owner),
        longest=longest[len(longest) // 2] if longest else 0,
        begun=begun,
        alone=alone,
        works=not uuids.isdisjoint(works),
        earlier=max(0, max(others, default=since) - since),
    )


def _spin_since(gpu: Gpu, start: int) -> int:
    """When its spin began, which may be with the reading that begins at `start`."""
    return start if gpu.timers.spin_since is None else gpu.timers.spin_since


def _gpus_between(ledger: Ledger, holder: Allocation, start: int, end: int) -> list[Gpu]:
    """The listed GPUs that the holder's job, or its group, holds at some time in [start, end)."""
    return [
        ledger.gpus[uuid]
        for uuid, allocations in ledger.allocations.items()
        if uuid in ledger.gpus and ledger.gpus[uuid].listed and any(
            group_of(allocation) == group_of(holder) and allocation.start < end
            and (allocation.end is None or allocation.end > start)
            for allocation in allocations
        )
    ]  # fmt: skip


def _post(ledger: Ledger, gpu: Gpu, ev: Evidence, intervals: Iterable[StateInterval]) -> None:
    """Second pass: classify every interval of one reading, split it into leaks, and post it to both books."""
    for interval in intervals:
        state, reason = classify(ev, interval)
        if state is not gpu.state:
            gpu.state, gpu.since = state, interval.start
            ledger.state_entries[state] += 1
        gpu.reason, gpu.holders = reason, interval.holders
        gpu.bystanders = _bystanders(ev, interval)
        gpu.states_beside = _states_beside(gpu, ev, interval)
        ms = (interval.end - interval.start) // MS
        if state is State.UNOBSERVED:
            gpu.unobserved[reason] += ms * ev.device.weight
        counted = counter_amounts(ev, ms)
        gpu.book.observe(counted)
        owned = _split_among_owners(ledger, gpu, ev, interval, state)
        energies = _divide_energy(ev, interval, [span.whole for _, _, span, _ in owned])
        for (allocation, share, span, taken), energy in zip(owned, energies, strict=True):
            gpu.book.post(taken, span.whole, ms, energy)
            if allocation is None:
                gpu.book.post_unheld(taken, ms)
                continue
            job = ledger.jobs.get(allocation.owner.job_id) or ledger.open_job(gpu, allocation, interval.start)
            job.book.post(taken, span.whole, ms, energy)
            job.uncertainty.add(span, taken, ms)
            job.add_activity(ev, interval.end, ms, counted if share == PPM else counter_amounts(ev, ms, share))
            _update_job(job, gpu, ev, interval, taken)
    if gpu.book.until >= gpu.book.next_sample:
        gpu.book.sample()


def _divide_energy(ev: Evidence, interval: StateInterval, shares: list[int]) -> list[int]:
    """Divide an interval's part of the reading's energy among its owners, in proportion to their time."""
    if not ev.energy or not any(shares):
        return [0] * len(shares)
    begin, length = ev.reading.start, ev.reading.end - ev.reading.start
    until = ev.energy * (interval.end - begin) // length  # cumulatively, so that the intervals' parts add up
    return divide_proportionally(until - ev.energy * (interval.start - begin) // length, shares)


def _update_job(job: Job, gpu: Gpu, ev: Evidence, interval: StateInterval, taken: LeakShares) -> None:
    """Update the job's peak demand, first work and potential savings by speculative decoding."""
    if len(interval.holders) == 1 and interval.holders[0].gpus == 1 and ev.device.weight == PPM:
        if job.peak_demand is None and interval.holders[0].group:
            job.peak_demand = PeakDemand()  # the job's first replica had several GPUs, or an older version opened it
        if job.peak_demand is not None:
            job.peak_demand.add_interval(ev, interval.start, interval.end, owner=job.owner, policy=gpu.criteria.policy)
    if job.awaits_work and ev.kernel_runs and not ev.distrust:
        job.first_work, job.awaits_work = interval.start - job.start, False
    credit = gpu.credits.get(job.owner.job_id) if gpu.credits else None
    if credit is not None and credit.shares.no_drafts and job.service is not None:
        slow = sum(ppm for index, ppm in taken if index == MEMORY_BOUND_INDEX)
        job.service.undrafted += (
            round(slow * gpu.criteria.policy.draft_gain_share) * (interval.end - interval.start) // MS
        )


def _split_among_owners(
    ledger: Ledger, gpu: Gpu, ev: Evidence, interval: StateInterval, state: State
) -> list[tuple[Allocation | None, int, Span, LeakShares]]:
    """Each owner with its ppm of the activity, its span, and its leaks. Pools are divided among owners first.

    Waiting is divided equally, as all hold the GPU; the rest by the SM time of their processes, if known.
    """
    policy, whole = gpu.criteria.policy, ev.device.weight
    pipe = _pipe(ledger, interval)
    pools = pools_of(ev, pipe)
    if whole != PPM:
        pools = divide_proportionally(whole, pools)
    if not interval.holders:
        span = Span(ev, state, policy, pools, whole)
        return [(None, PPM, span, split_into_leaks(span))]
    if len(interval.holders) == 1:
        allocation = interval.holders[0]
        span = _span(ledger, ev, interval, allocation, pools, state=state, policy=policy, share=whole)
        span.pipe = pipe
        if allocation.gpus == 1 and whole == PPM:
            span.surplus = _surplus(ledger.jobs.get(allocation.owner.job_id))
        return [(allocation, PPM, span, _leaks_of_owner(gpu, allocation, span, interval))]
    shares: list[tuple[Allocation | None, int, Span, LeakShares]] = []
    for allocation, ran, own in _divide_pools(gpu, ev, interval, pools):
        each = gpu.state_of(allocation.owner.job_id)
        span = _span(ledger, ev, interval, allocation, own, state=each, policy=policy, share=ran * whole // PPM)
        shares.append((allocation, ran, span, _leaks_of_owner(gpu, allocation, span, interval)))
    return shares


def _pipe(ledger: Ledger, interval: StateInterval) -> str:
    """The pipe whose activity is useful to the only holder, by a rule of the operator or as seen; else the tensor's."""
    if len(interval.holders) != 1:
        return TENSOR
    owner = interval.holders[0].owner
    job = ledger.jobs.get(owner.job_id)
    return owner.useful_pipe or (TENSOR if job is None else job.level_tracker.at(interval.start).pipe)


def _bystanders(ev: Evidence, interval: StateInterval) -> frozenset[str]:
    """Of several holders, those without a part in a hang; none if it is unknown who has."""
    if len(interval.holders) < 2:  # noqa: PLR2004  most intervals
        return frozenset()
    involved = interval.culprits or jobs_that_compute(ev, interval.holders)
    jobs = frozenset(allocation.owner.job_id for allocation in interval.holders)
    return jobs - involved if involved else frozenset()


def _states_beside(gpu: Gpu, ev: Evidence, interval: StateInterval) -> dict[str, State]:
    """By job ID, the state of bystanders while the GPU is hung, and of newcomers while it is a zombie."""
    jobs = {State.HUNG: gpu.bystanders, State.ZOMBIE: interval.newcomers}.get(gpu.state)
    if not jobs:
        return {}
    new = classify(ev, replace(interval, hung=False, zombie=False, culprits=frozenset()))[0]
    return {job_id: State.ZOMBIE if interval.zombie and job_id not in interval.newcomers else new for job_id in jobs}


def _span(
    ledger: Ledger,
    ev: Evidence,
    interval: StateInterval,
    allocation: Allocation,
    pools: list[int],
    *,
    state: State,
    policy: Policy,
    share: int,
) -> Span:
    """One owner's part of an interval, with `share` ppm of the activity."""
    job = ledger.jobs.get(allocation.owner.job_id)
    return Span(
        ev,
        state,
        policy,
        pools,
        sum(pools),
        share=share,
        gpus=allocation.gpus,
        restarts=allocation.restarts,
        serves=allocation.owner.workload_class == "serving",
        signs=interval.signs,
        peers_save=interval.peers_save,
        levels=UNKNOWN_LEVELS if job is None else job.level_tracker.at(interval.start),
    )


def _leaks_of_owner(gpu: Gpu, allocation: Allocation, span: Span, interval: StateInterval) -> LeakShares:
    if gpu.credits:
        _apply_credit(span, gpu.credits.get(allocation.owner.job_id), interval)
    return split_into_leaks(span)


def _divide_pools(
    gpu: Gpu, ev: Evidence, interval: StateInterval, pools: list[int]
) -> Iterator[tuple[Allocation, int, list[int]]]:
    """Each of several owners with its ppm of the activity, and its pools."""
    equal = [1] * len(interval.holders)
    use = sm_use_by_holder(ev.reading.processes, interval.holders)
    gpu.shared["equal" if use is None else "sm"] += interval.end - interval.start
    split = [divide_proportionally(pools[0], equal), *(divide_proportionally(pool, use or equal) for pool in pools[1:])]
    ran = divide_proportionally(PPM, use or equal)
    for allocation, active, own in zip(interval.holders, ran, zip(*split, strict=True), strict=True):
        yield allocation, active, list(own)


def _surplus(job: Job | None) -> int:
    """The part of its GPU that a single-GPU job has never needed, ppm."""
    fitting = None if job is None or job.peak_demand is None else job.peak_demand.fitting
    return 0 if fitting is None else PPM - fitting.compute


def _apply_credit(span: Span, credit: WorkloadCredit | None, interval: StateInterval) -> None:
    """Attach the owner's credit to its span, if its reports are still valid."""
    weight = span.ev.device.weight
    seen = span.state is not State.UNOBSERVED
    if credit is not None:
        timed = credit.collective_share(interval.start, interval.end)
        span.timed = None if timed is None else timed / PPM
    if credit is None or not credit.advance(interval.start, interval.end, weight, seen=seen):
        return
    span.credit, span.ms, span.signs = credit, (interval.end - interval.start) // MS, span.signs | {REPORTING}
    if span.pipe in (TENSOR, NONE) and credit.has_flops_for(interval.start, interval.end):
        span.model_ppm = credit.available(MODEL, span.ms) + credit.available(REPEATED, span.ms)
