"""Finds the job that a user names as squeue and sacct do: `6_1`, `7+0`, or a step of it such as `6_1.batch`.

Sources hold jobs by their raw ids. A name that may mean several jobs is refused with a list of them.
"""

import re
from collections.abc import Iterable

from exporter.report.model import JobIdentity, JobReport, ReportError

_STEP = re.compile(r"(\d{1,10}(?:[_+]\d{1,10})?)\.(\d{1,10}(?:\+\d{1,10})?|batch|extern|interactive)", re.ASCII)
"""sacct's JobID of a step (sacct(1)); of a heterogeneous step with its offset."""
_MOST_NAMES = 10
"""Jobs listed in a message."""


def split_step(name: str) -> tuple[str, str]:
    """Return the job's id and the step of `4711.0` or `6_1.batch`; the step is empty for any other name."""
    match = _STEP.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def find_named(name: str, jobs: Iterable[JobIdentity]) -> JobIdentity | None:
    """Return the job with this raw id, else the one that users know by that name; None if there is none.

    Raises ReportError if several raw ids had the name.
    """
    found = {(job.cluster, job.job_id): job for job in jobs if name in (job.job_id, job.display_id)}
    exact = [job for job in found.values() if job.job_id == name]
    if exact or len(found) <= 1:
        return next(iter((*exact, *found.values())), None)
    raw = sorted(f"{job_id} in {cluster}" if cluster else job_id for cluster, job_id in found)
    raise ReportError(
        f"{name} has been the name of {len(found)} jobs: give the one that is meant by its raw id, sacct's JobIDRaw"
        f" ({_listed(raw)}), or narrow the time with --since and --at"
    )


def members_message(name: str, jobs: Iterable[JobIdentity]) -> str:
    """Return what to ask for instead of a whole array or heterogeneous job; empty if none of its jobs is known."""
    shown = dict[tuple[str, str], str]()
    for job in sorted(jobs, key=lambda job: job.shown_id != job.job_id):  # of records with and without its name, that
        shown[job.cluster, job.job_id] = job.shown_id
    names = sorted(set(shown.values()), key=_order)
    if not names:
        return ""
    member, whole = ("component", "heterogeneous job") if "+" in names[0] else ("task", "array")
    members = f"{len(names)} {member}{'s' if len(names) > 1 else ''}"
    return (
        f"there is no job {name} of its own, but {members} of {whole} {name}: {_listed(names)}."
        f" Name one of them, such as `gpu-efficiency report {names[0]}`"
    )


def naming_notes(report: JobReport, name: str, step: str) -> tuple[str, ...]:
    """Return how the report differs from what the name may mean, in sentences."""
    notes = []
    shown = report.who.shown_id
    if step:
        notes.append(f"step {step} has no report of its own: this one is of all steps of job {shown}")
    if name == report.who.job_id and re.match(rf"{re.escape(name)}[_+]", shown):
        kind = "heterogeneous job" if "+" in shown else "array"
        notes.append(f"{name} is also the id of the whole {kind}: this report is of {shown} alone")
    return tuple(notes)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _order(name: str) -> tuple[int, str]:
    """By task or offset as a number."""
    last = re.split(r"[_+]", name)[-1]
    return int(last) if last.isdecimal() else 0, name
