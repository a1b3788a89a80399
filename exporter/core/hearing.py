"""What workloads say, taken into the ledger: which GPUs it is about, whether it can be true, and who is told.

Owns what is believed of a claim, and the memory of runs. Refuses pools, which are `told`'s, and figures, `progress`'s.
"""

from collections.abc import Iterable

from exporter.core.ledger import Gpu, Job, Ledger
from exporter.core.model import SECOND, Report, Serving
from exporter.core.progress import Progress, Run
from exporter.core.served import Service
from exporter.core.told import Voice, peak_of

_LARGEST = 1e30
"""Of any amount: sums of larger ones would soon be infinite."""


def hear(ledger: Ledger, report: Report, at: int) -> None:
    """Take in what a process says of itself, if it can be true; at `at` nothing after `at` is booked."""
    whole = _about(ledger, report.job_id, (), report.start)
    own = [gpu for gpu in whole if gpu.device.uuid in report.uuids]
    job = _job(ledger, report.job_id, whole if own or not report.uuids else [])
    gpus = report.gpus or len(whole)
    peak = max((peak_of(gpu.device, report.dtype) for gpu in whole), default=0.0)
    fastest = peak or max((peak_of(gpu.device) for gpu in whole), default=0.0)
    if job is None or not _credible(report, at, most=fastest * gpus * ledger.policy.most_reported_share or 1e24):
        ledger.refused["report"] += 1
        return
    progress = job.progress or _begin(ledger, job, report)
    if progress.replays(report):
        ledger.refused["report"] += 1
        return
    if report.run and progress.takes_up(report):
        progress.turn(_run(ledger, job, report.run), report.run)
    most = len(whole) if report.each else max(0, gpus - len(own))
    about = own + (_spoken_for(whole, own, report.job_id, at)[:most] if progress.leads(report) else [])
    # A process may have contexts on more GPUs than it works on: what it says is said once.
    together = gpus if report.each else max(gpus, len(about))
    rework = progress.hear(report, here=len(about), gpus=together, policy=ledger.policy)
    for gpu in about:
        voice = gpu.voices.setdefault(report.job_id, Voice())
        voice.own_at = at if gpu in own else voice.own_at
        since = gpu.book.since
        voice.hear(report, gpu.device, at, policy=ledger.policy, gpus=gpus, rework=rework, since=since)
        if report.steps:
            gpu.track.acquit()
    if report.model_flops is not None and peak:
        job.book.reported += report.model_flops * len(about) / together
        job.book.reportable += (
            sum(peak_of(gpu.device, report.dtype) for gpu in about) * (report.end - report.start) / SECOND
        )


def _spoken_for(whole: list[Gpu], own: list[Gpu], job_id: str, at: int) -> list[Gpu]:
    """GPUs for which nobody else speaks: as where rank 0 alone tells what the whole job did."""
    return [gpu for gpu in whole if gpu not in own and gpu.unspoken_for(job_id, at)]


def attend(ledger: Ledger, serving: Serving, at: int) -> None:
    """Take in what a serving engine says."""
    about = _about(ledger, serving.job_id, serving.uuids, serving.start)
    job = _job(ledger, serving.job_id, about)
    most = max((peak_of(gpu.device) for gpu in about), default=0.0) * ledger.policy.most_reported_share or 1e24
    if job is None or not serving.start <= serving.end <= at or not _counts(serving, most):
        ledger.refused["serving"] += 1
        return
    job.service = job.service or Service()
    job.service.hear(serving)
    for gpu in about:
        voice = gpu.voices.setdefault(serving.job_id, Voice())
        voice.attend(serving, gpu.device, at, policy=ledger.policy)
        peak = peak_of(gpu.device)
        if serving.flops is not None and peak:
            job.book.reported += serving.flops
            job.book.reportable += peak * (serving.end - serving.start) / SECOND


def _about(ledger: Ledger, job_id: str, uuids: tuple[str, ...], since: int) -> list[Gpu]:
    """GPUs of which a job may speak: those it has held since then, and of them those named, if any are."""
    held = (
        uuid for uuid, all_held in ledger.allocations.items()
        if any(each.owner.job_id == job_id and (each.end is None or each.end > since) for each in all_held)
    )  # fmt: skip
    return [gpu for uuid in held if (not uuids or uuid in uuids) and (gpu := ledger.gpus.get(uuid)) and gpu.listed]


def _job(ledger: Ledger, job_id: str, about: list[Gpu]) -> Job | None:
    """The job's books; opened if it has spoken before it was seen."""
    if not about:
        return None
    first = about[0]
    held = next(each for each in ledger.allocations[first.device.uuid] if each.owner.job_id == job_id)
    start = max(first.book.until, held.start)
    return ledger.jobs.get(job_id) or ledger.open(held, start, awaits_work=first.saw_begin(held, ledger.watched_since))


def _begin(ledger: Ledger, job: Job, report: Report) -> Progress:
    progress = job.progress = Progress(_run(ledger, job, report.run))
    progress.run_id = report.run
    return progress


def _run(ledger: Ledger, job: Job, name: str) -> Run:
    """The run of that name, of that user and namespace: nobody else can say how far it has come."""
    if not name:
        return Run.begun(job.start)
    key = (job.owner.user, job.owner.namespace, name)
    run = ledger.runs.pop(key) if key in ledger.runs else Run.begun(job.start)
    ledger.runs[key] = run
    while len(ledger.runs) > ledger.policy.max_runs:
        del ledger.runs[next(iter(ledger.runs))]
    return run


def _credible(report: Report, at: int, *, most: float) -> bool:
    """Whether a report can be true: its time has been, its amounts are amounts, and nobody is that fast."""
    lasted = report.end - report.start
    amounts = (
        report.model_flops, report.hardware_flops, report.tokens, report.padding, report.samples,
    )  # fmt: skip
    given = [amount for amount in amounts if amount is not None]
    phases = [spent for _, spent in report.phases]
    return (
        lasted >= 0 and report.end <= at
        and _are_amounts(given) and _are_amounts(phases) and sum(phases) <= lasted
        and (lasted > 0 or (not any(given) and not report.steps))
        and max(report.model_flops or 0.0, report.hardware_flops or 0.0) * SECOND <= most * lasted
        and (report.padding or 0.0) <= (report.tokens or 0.0)
        and (report.model_flops or 0.0) <= (report.hardware_flops or report.model_flops or 0.0)
        and 0 <= report.steps <= (report.step or 0)
        and 0.0 <= (report.bubble or 0.0) < 1.0
        and (not report.rank or report.rank.isdecimal())
    )  # fmt: skip


def _counts(serving: Serving, most: float) -> bool:
    """Whether all its figures are amounts, and no GPU makes more than `most` FLOPs a second."""
    lasted = serving.end - serving.start
    taken = [each for latency in serving.latencies for each in (latency.p50, latency.p95, latency.p99)]
    given = [
        getattr(serving, name)
        for name in serving.__struct_fields__
        if name not in {"job_id", "engine", "start", "end", "uuids", "latencies"}
    ]
    amounts = _are_amounts([value for value in given if value is not None]) and _are_amounts(taken)
    return amounts and (not lasted or (serving.flops or 0.0) * SECOND <= most * lasted)


def _are_amounts(values: Iterable[float]) -> bool:
    return all(0 <= value <= _LARGEST for value in values)
