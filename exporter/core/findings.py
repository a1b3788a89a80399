"""Applies findings about hangs: whether a job's collectives move, and which rank the others wait for.

Such evidence is the job's own, not the counters': it acquits a GPU that spins, or confirms a hang before its time, also
on boards whose counters can only raise a suspicion. A finding is about one NCCL application, of which a job may have
several on a node.
"""

from collections.abc import Iterable

from exporter.core.ledger import Gpu, Job, Ledger
from exporter.core.model import HangFinding


def apply_finding(ledger: Ledger, finding: HangFinding) -> None:
    """Apply a finding to those of its GPUs that its job alone holds. One about a job that is not known is dropped.

    The job keeps a culprit of another application whose hang is proven.
    """
    job = ledger.jobs.get(finding.job_id)
    if job is None:
        return
    holding = [gpu for gpu in ledger.gpus.values() if gpu.listed and gpu.held_by(finding.job_id)]
    kept = current_finding(job, holding)
    if kept is None or not kept.stuck or finding.stuck or not _are_of_two(kept, finding):
        job.finding = finding
    for gpu in holding:
        if len(gpu.holders) == 1 and _is_about(finding, gpu):
            if finding.moving:
                gpu.timers.clear_spin(finding.at)
            elif finding.stuck:
                gpu.timers.confirm_spin()


def _are_of_two(one: HangFinding, other: HangFinding) -> bool:
    """Whether they are about two applications of a job."""
    return bool(one.uuids and other.uuids) and not set(one.uuids) & set(other.uuids)


def _is_about(finding: HangFinding, gpu: Gpu) -> bool:
    return not finding.uuids or gpu.device.uuid in finding.uuids


def current_finding(job: Job, holding: Iterable[Gpu]) -> HangFinding | None:
    """The job's latest finding while the spin that it is about lasts; None if it names no rank and no process."""
    finding = job.finding
    if finding is None or finding.moving or not (finding.rank or finding.pid):
        return None
    spun = [gpu.timers.spin_since for gpu in holding if _is_about(finding, gpu)]
    spins = any(since is not None and since <= finding.at for since in spun)
    return finding if spins else None


def describe_culprit(finding: HangFinding) -> str:
    """Name the rank that the others wait for, in part of a sentence: "rank 3 (host n1, pid 77, GPU 1), ..."."""
    place = [
        f"{name} {value}"
        for name, value in (("host", finding.host), ("pid", finding.pid or ""), ("GPU", finding.gpu))
        if value != ""
    ]
    text = f"rank {finding.rank or 'unknown'}"
    if place:
        text += f" ({', '.join(place)})"
    if finding.collective:
        text += f", in {finding.collective}"
    if finding.sequence is not None:
        text += f" number {finding.sequence}"
    return f"{text}; top of its stack: {finding.stack}" if finding.stack else text
