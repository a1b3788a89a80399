"""Applies what workloads report: training reports, serving engines, timed collectives and CPU use.

A report that is not credible, or about no known job, is counted as refused and changes nothing.
"""

from collections.abc import Sequence

from exporter.core.collectives import CollectiveStats, is_credible_communication
from exporter.core.host import is_credible_usage
from exporter.core.ledger import Gpu, Job, Ledger
from exporter.core.model import MS, SECOND, CollectiveReport, HostUsage, ServingReport, TrainingReport
from exporter.core.progress import TrainingProgress, TrainingRun, run_key
from exporter.core.serving import ServingStats
from exporter.core.workload import (
    PHASES_WITHOUT_KERNELS,
    WorkloadCredit,
    flops_at_peak,
    is_credible_report,
    is_credible_serving,
    peak_flops_of,
)


def apply_reports(ledger: Ledger, reports: Sequence[TrainingReport], at: int) -> None:
    """Apply training reports; each that is not credible is counted as refused. Time is booked up to `at`.

    Which GPUs the processes use is taken from all of them before the first is applied: it decides on which it counts.
    """
    ranks: dict[str, dict[str, TrainingReport]] = {}
    for report in reports:
        ranks.setdefault(report.job_id, {})[report.rank] = report
    for report in reports:
        _apply_report(ledger, report, at, ranks[report.job_id])


def _apply_report(ledger: Ledger, report: TrainingReport, at: int, ranks: dict[str, TrainingReport]) -> None:
    """`ranks`: the job's reports of the same observation, by rank."""
    job_gpus = _gpus_of_job(ledger, report.job_id, (), report.start)
    own = [gpu for gpu in job_gpus if gpu.device.uuid in report.uuids]
    job = _reporting_job(ledger, report.job_id, job_gpus if own or not report.uuids else [])
    gpus = report.gpus or len(job_gpus)
    peak = max((peak_flops_of(gpu.device, report.dtype) for gpu in job_gpus), default=0.0)
    fastest = peak or max((peak_flops_of(gpu.device) for gpu in job_gpus), default=0.0)
    most = fastest * gpus * ledger.policy.most_reported_share or 1e24
    worked_until = None if job is None or job.progress is None else job.progress.worked_until(report)
    credible = is_credible_report(report, at, most=most, worked_until=worked_until)
    if job is None or not credible or (job.progress and job.progress.is_duplicate(report)):
        ledger.refused["report"] += 1
        return
    if job.progress is None:
        job.progress = TrainingProgress(run=TrainingRun.starting_at(job.start))
    progress = job.progress
    if report.run:
        progress.set_run(_training_run(ledger, job, progress, report.run), report.run)
    own, share = _gpus_worked_on(report, own, progress, ranks)
    others = len(job_gpus) if report.each else max(0, gpus - len(own))
    # The leader's report covers GPUs without one of their own, as when rank 0 reports for the whole job.
    silent = [gpu for gpu in job_gpus if gpu not in own and gpu.has_no_own_report(report.job_id, at)]
    gpus_reported = own + (silent[:others] if progress.leads(report) else [])
    # A process may have contexts on more GPUs than it works on: count its figures once.
    counted_gpus = gpus if report.each else max(gpus, len(gpus_reported))
    rework = progress.add_report(report, here=len(gpus_reported), gpus=counted_gpus, policy=ledger.policy)
    for gpu in gpus_reported:
        credit = gpu.credits.setdefault(report.job_id, WorkloadCredit())
        credit.own_report_at = at if gpu in own else credit.own_report_at
        since = gpu.book.since
        measured, gpu.timers.startup_seen = gpu.timers.startup_seen, 0
        credit.add_report(
            report, gpu.device, at, policy=ledger.policy, gpus=counted_gpus, rework=rework, since=since,
            measured=measured, share=share,
        )  # fmt: skip
    _apply_progress(ledger, report, job_gpus, gpus_reported, at)
    if report.model_flops is not None and peak:
        alike = flops_at_peak(report, gpus_reported[0].device) if gpus_reported else 0.0
        job.book.reported += alike * len(gpus_reported) / counted_gpus
        job.book.reportable += (
            sum(peak_flops_of(gpu.device, report.dtype) for gpu in gpus_reported) * (report.end - report.start) / SECOND
        )


def _gpus_worked_on(
    report: TrainingReport, own: list[Gpu], progress: TrainingProgress, ranks: dict[str, TrainingReport]
) -> tuple[list[Gpu], float]:
    """Of its GPUs those that the process works on, and what part of each of them is its own.

    Many programs create a context on the first GPU too, or on all. Of more GPUs than the figures are of, those count
    that the fewest other processes of the job use; if these are still more, and not its alone, a part of each.
    """
    if report.each or not 0 < report.gpus < len(own):
        return own, 1.0
    users = progress.other_users(report, ranks)
    most = sorted(users[gpu.device.uuid] for gpu in own)[report.gpus - 1]
    chosen = [gpu for gpu in own if users[gpu.device.uuid] <= most]
    return chosen, report.gpus / len(chosen) if most else 1.0


def _apply_progress(
    ledger: Ledger, report: TrainingReport, job_gpus: Sequence[Gpu], gpus_reported: Sequence[Gpu], at: int
) -> None:
    """End spins and start-up by completed steps; a phase without kernels explains the job's spins for a while.

    Steps that began after a phase was announced end it: a report of earlier ones may arrive after the announcement.
    """
    excused = report.phase in PHASES_WITHOUT_KERNELS
    patience = round(ledger.policy.phase_patience_seconds * 1000) * MS
    for gpu in gpus_reported if report.steps else ():
        gpu.timers.clear_spin(at)
        gpu.timers.end_startup()
        if report.start >= gpu.timers.excused_until - patience:
            gpu.timers.excused_until = min(at, gpu.timers.excused_until)
    for gpu in job_gpus if excused else gpus_reported if report.phase else ():
        gpu.timers.excused_until = at + patience if excused else at


def apply_serving(ledger: Ledger, serving: ServingReport, at: int) -> None:
    """Apply a serving engine's report, or count it as refused if it is not credible."""
    gpus_reported = _gpus_of_job(ledger, serving.job_id, serving.uuids, serving.start)
    job = _reporting_job(ledger, serving.job_id, gpus_reported)
    most = (
        max((peak_flops_of(gpu.device) for gpu in gpus_reported), default=0.0) * ledger.policy.most_reported_share
        or 1e24
    )
    if job is None or not serving.start <= serving.end <= at or not is_credible_serving(serving, most):
        ledger.refused["serving"] += 1
        return
    job.service = job.service or ServingStats()
    job.service.add(serving)
    requests = (serving.running or 0.0) + (serving.waiting or 0.0)
    unserved = requests > 0 and not serving.generated_tokens and not serving.prompt_tokens
    for gpu in gpus_reported:
        if serving.end > serving.start:
            gpu.timers.set_unserved(gpu.criteria, unserved=unserved)
        credit = gpu.credits.setdefault(serving.job_id, WorkloadCredit())
        credit.add_serving(serving, gpu.device, at, policy=ledger.policy)
        peak = peak_flops_of(gpu.device)
        if serving.flops is not None and peak:
            job.book.reported += serving.flops
            job.book.reportable += peak * (serving.end - serving.start) / SECOND


_CPU_HOLDS = 60 * SECOND
"""How long a report about CPU use holds: several of its intervals."""


def apply_host_usage(ledger: Ledger, usage: HostUsage) -> None:
    """A job that keeps several CPU cores busy works there, and is no zombie meanwhile."""
    if usage.cpu_seconds is None or not is_credible_usage(usage, ledger.at or 0):
        return
    if usage.cpu_seconds / (usage.end - usage.start) * SECOND < ledger.policy.working_cpu_cores:
        return
    for gpu in _gpus_of_job(ledger, usage.job_id, (), usage.start):
        gpu.timers.cpu_until = max(gpu.timers.cpu_until, usage.end - usage.end % MS + _CPU_HOLDS)


def apply_collectives(ledger: Ledger, report: CollectiveReport, at: int) -> None:
    """Apply what a profiler plugin timed of one process, or count it as refused if it is not credible."""
    gpus_reported = _gpus_of_job(ledger, report.job_id, report.uuids, report.start)
    job = _reporting_job(ledger, report.job_id, gpus_reported)
    if job is None or not is_credible_communication(report, at):
        ledger.refused["collectives"] += 1
        return
    job.communication = job.communication or CollectiveStats()
    job.communication.add(report)
    for gpu in gpus_reported:
        gpu.credits.setdefault(report.job_id, WorkloadCredit()).add_collectives(report)


def _gpus_of_job(ledger: Ledger, job_id: str, uuids: tuple[str, ...], since: int) -> list[Gpu]:
    """GPUs that a job's report may concern: held at some time after `since`, and in `uuids` unless that is empty."""
    held_uuids = (
        uuid for uuid, allocations in ledger.allocations.items()
        if any(
            allocation.owner.job_id == job_id and (allocation.end is None or allocation.end > since)
            for allocation in allocations
        )
    )  # fmt: skip
    return [
        gpu for uuid in held_uuids if (not uuids or uuid in uuids) and (gpu := ledger.gpus.get(uuid)) and gpu.listed
    ]


def _reporting_job(ledger: Ledger, job_id: str, gpus_reported: list[Gpu]) -> Job | None:
    """The reporting job; created if its report arrives before its first interval is posted."""
    if not gpus_reported:
        return None
    first = gpus_reported[0]
    allocation = next(each for each in ledger.allocations[first.device.uuid] if each.owner.job_id == job_id)
    start = max(first.book.until, allocation.start)
    return ledger.jobs.get(job_id) or ledger.open_job(first, allocation, start)


def _training_run(ledger: Ledger, job: Job, progress: TrainingProgress, name: str) -> TrainingRun:
    """The run of that name of the job's user and namespace; now the latest."""
    key = run_key(job.owner, name)
    run = ledger.runs.pop(key, None) or (
        progress.run if name == progress.run_id else TrainingRun.starting_at(job.start)
    )
    ledger.runs[key] = run
    while len(ledger.runs) > ledger.policy.max_runs:
        del ledger.runs[next(iter(ledger.runs))]
    return run
