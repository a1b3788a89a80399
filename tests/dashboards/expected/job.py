"""The Job board: every leak of a job that loses by it, the receipt, hangs, steps and latencies, out of the job's books.

All of a job's figures are since it began, and told to the minute on which the story ends: they are equal, not near.
"""

from collections.abc import Callable
from statistics import median

from exporter.core.model import SECOND
from exporter.core.snapshot import JobView
from tests.dashboards.expected.row import Expected
from tests.dashboards.stories import PER_KWH, Played

PRICE = 2.5
EXACTLY = 1e-6
TRAINER, SERVER, ALONE = "41000", "inference/chat-0-0", "41001"
"""Jobs of the stories: of the twelve, of those of servers, and of the scenarios."""
JOBS = {
    "idle_allocation": ("idle_allocation", "inference/chat-0-1"),
    "oversized_allocation": ("oversized_allocation", "41003"),
    "hung": ("hung", TRAINER),
    "failure_recovery": ("failure_recovery", TRAINER),
    "startup": ("unpriced", ALONE),
    "checkpoint": ("checkpoint", TRAINER),
    "data_stall": ("data_stall", TRAINER),
    "pipeline_bubble": ("pipeline_bubble", TRAINER),
    "kv_cache_wait": ("kv_cache_wait", SERVER),
    "batching": ("batching", SERVER),
    "host_overhead": ("host_overhead", TRAINER),
    "unattributed_stall": ("straggler", ALONE),
    "exposed_communication": ("exposed_communication", TRAINER),
    "prefill_decode_interference": ("prefill_decode_interference", SERVER),
    "memory_bound": ("memory_bound", TRAINER),
    "low_parallelism": ("low_parallelism", TRAINER),
    "other_compute": ("throttled", ALONE),
    "throttled": ("throttled", ALONE),
    "rejected_speculation": ("rejected_speculation", SERVER),
    "kv_cache_pressure": ("kv_cache_pressure", SERVER),
    "recomputation": ("recomputation", TRAINER),
    "padding": ("padding", TRAINER),
    "rework": ("rework", TRAINER),
}
"""Leak -> a story and a job in it that loses by it. No job keeps a GPU that is unavailable to its story's end."""
ABOVE_BELOW = {
    "GAU": (("ectr", "emfu", "useful"), ("gau", "ectr", "emfu", "useful")),
    "ECTR": (("emfu", "useful"), ("ectr", "emfu", "useful")),
    "eMFU": (("useful",), ("emfu", "useful")),
    "Useful": (("useful",), ("gau", "ectr", "emfu", "useful")),
}
"""Layers above and below the line, where nothing is unresolved."""


def view(played: Played, job: str) -> JobView:
    """The job in the last page's books; all of it is on one node."""
    return next(each for each in played.nodes[0].last.jobs if each.owner.job_id == job)


def hours(leak: str, job: str) -> Callable[[Played], float]:
    """GPU-hours of a leak since the job began."""
    return lambda played: played.leaks(job=job)[leak] / 3600


def layers(which: str, job: str) -> Callable[[Played], float]:
    """One of the ratios since the job began."""

    def worth(played: Played) -> float:
        found = played.layers(job=job)
        above, below = (sum(found.get(name, 0.0) for name in names) for names in ABOVE_BELOW[which])
        return above / below

    return worth


def lost(job: str) -> Callable[[Played], float]:
    """Money."""
    return lambda p: PRICE / 3600 * sum(p.layers(job=job).get(name, 0.0) for name in ("gau", "ectr", "emfu"))


def told(which: Callable[[JobView], float], job: str = TRAINER) -> Callable[[Played], float]:
    """Something of the job's last page."""
    return lambda played: which(view(played, job))


def steps(job: JobView) -> int:
    assert job.progress
    return job.progress.steps


def recovery(job: JobView) -> float:
    """Mean seconds from the last new step before a restart to the first after it."""
    assert job.progress
    return job.progress.recovery / job.progress.restarts / SECOND


def rollbacks(job: JobView) -> int:
    assert job.progress
    return dict(job.progress.events)["rollback"]


def a_checkpoint(job: JobView) -> float:
    """Mean seconds."""
    assert job.progress
    return dict(job.progress.phases)["checkpoint"] / job.progress.checkpoints / SECOND


def in_rework(job: JobView) -> float:
    """Share of the job's time as reported by training."""
    assert job.progress
    phases = dict(job.progress.phases)
    return phases["rework"] / sum(phases.values())


def waiting(job: JobView) -> float:
    """Requests."""
    assert job.service
    return job.service.waiting or 0.0


def slowest(job: JobView) -> float:
    """Seconds of its step for which the slowest rank works."""
    assert job.progress
    return max(busy for _, _, busy in job.progress.ranks)


def power(played: Played) -> float:
    """Of the one GPU of the notebook, watts."""
    (own,) = (gpu for gpu in played.nodes[0].last.gpus if NOTEBOOK[1] in {owner.job_id for owner in gpu.owners})
    assert own.reading
    return own.reading.power_watts or 0.0


def middle_power(played: Played) -> float:
    """Of the GPUs that the job holds, watts; its node has GPUs of others."""
    own = [gpu for gpu in played.nodes[0].last.gpus if ALONE in {owner.job_id for owner in gpu.owners}]
    assert len(own) < len(played.nodes[0].last.gpus)
    return median(gpu.reading.power_watts or 0.0 for gpu in own if gpu.reading)


def row(
    panel: str, of: tuple[str, str], worth: Callable[[Played], float], *, letter: str = "A", **where: str
) -> Expected:
    """Of a story and its job. Who selects a leak means that one."""
    story, job = of
    return Expected(
        panel=panel, scenario=story, variables={"job_id": job}, worth=worth, letter=letter, where=where,
        leak=where.get("leak", ""), minutes=180, within=EXACTLY,
    )  # fmt: skip


NOTEBOOK = ("demo", "41505")
"""A zombie, on a node of eight GPUs of which others hold seven: the one series there is must be its own."""
HUNG, REWORK = ("hung", TRAINER), ("rework", TRAINER)
LEAKS_ROWS = tuple(row("GPU-hours by leak", of, hours(leak, of[1]), leak=leak) for leak, of in JOBS.items())
RECEIPT = (
    *(row(which, HUNG, layers(which, TRAINER)) for which in ABOVE_BELOW),
    row("GAU", JOBS["idle_allocation"], layers("GAU", "inference/chat-0-1"), letter="B"),
    row("Cost so far", REWORK, lambda p: PRICE / 3600 * sum(p.leaks(job=TRAINER).values()), currency="USD"),
    row("Energy", REWORK, told(lambda job: PER_KWH * sum(job.counters.energy) / 3.6e9), letter="B",
        currency="USD"),
    row("Lost so far", REWORK, lost(TRAINER), currency="USD"),
    row("Energy", REWORK, told(lambda job: sum(job.counters.energy) / 3.6e9)),
    row("GPU-hours", ("telemetry_outage", ALONE), lambda p: sum(p.leaks(job=ALONE).values()) / 3600),
    row("How long yet", REWORK, told(lambda job: 1200 / (job.owner.time_limit_seconds or 0)), letter="D"),
    row("How long yet", REWORK, told(lambda job: job.owner.time_limit_seconds or 0), letter="C"),
    row("What it costs and what to do first", JOBS["exposed_communication"],
        lambda p: PRICE * hours("exposed_communication", TRAINER)(p), letter="C", leak="exposed_communication",
        currency="USD"),
)  # fmt: skip
ALIVE = (
    row("In trouble now", HUNG, lambda p: p.states()["hung"]),
    row("Last work ago", HUNG, lambda p: p.end - (view(p, TRAINER).worked_at or 0) / SECOND),
    row("What its GPUs did", HUNG, lambda _: 3, gpu="3"),
    row("Who the others wait for", HUNG, lambda _: 1, why="culprit", gpu="3"),
    row("What its GPUs did", NOTEBOOK, lambda _: 4),
    row("Its GPUs now, the worst first", NOTEBOOK, power, letter="F"),
    row("Power across its GPUs", ("demo", ALONE), middle_power, letter="B"),
    row("Seconds of a step across ranks", REWORK, told(slowest), letter="B"),
)
TOLD = (
    row("Steps and checkpoints", REWORK, told(steps)),
    row("Steps and checkpoints", ("checkpoint", TRAINER), told(a_checkpoint), letter="E"),
    row("Failures", REWORK, told(recovery), letter="B"),
    row("Failures", REWORK, told(rollbacks), letter="E"),
    row("Its time as reported by training", REWORK, told(in_rework), phase="rework"),
    row("Requests", ("kv_cache_pressure", SERVER), told(waiting, SERVER), are="waiting"),
)
ROWS = (*LEAKS_ROWS, *RECEIPT, *ALIVE, *TOLD)
