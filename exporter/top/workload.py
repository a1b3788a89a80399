"""What a job says of itself, in a few words for a list and in full for its own page.

Owns these words. Refuses to judge them: they are the job's own.
"""

from exporter.top.answers import Job, Latency, Serving, Training
from exporter.top.words import brief, plain, share

_SHOWN = ("ttft", "itl")


def own_word(job: Job) -> str:
    """Empty where it says nothing."""
    told, said = job.training, job.serving
    found = [*(_training(told)[:4] if told else ()), *(_serving(said)[:5] if said else ())]
    return ", ".join(found)


def full_word(job: Job) -> list[tuple[str, str]]:
    """All of it, by who says it."""
    told, said = job.training, job.serving
    found = []
    if told and (words := _training(told)):
        found.append(("training", ", ".join(words)))
    if told and told.phase_seconds:
        found.append(("phases", _phases(told.phase_seconds)))
    if said and (words := _serving(said)):
        found.append((said.engine or "serving", ", ".join(words)))
    return found


def _training(told: Training) -> list[str]:
    words = [
        f"step {told.step:,}" if told.step is not None else "",
        f"MFU {share(told.mfu)} %" if told.mfu is not None else "",
        f"goodput {share(told.goodput)} %" if told.goodput is not None else "",
        f"{told.rework_steps:,} steps again" if told.rework_steps else "",
        _times(told.restarts, "restart"),
        f"{brief(told.recovery_seconds)} recovering" if told.recovery_seconds else "",
        _times(told.checkpoints, "checkpoint"),
        f"loss {told.loss:.4g}" if told.loss is not None else "",
    ]
    return list(filter(None, words))


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}" if count else ""


def _phases(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{plain(phase)} {share(spent / whole)} %" for phase, spent in ordered if spent > 0)


def _serving(said: Serving) -> list[str]:
    words = [
        f"{said.running:.0f} running" if said.running is not None else "",
        f"{said.waiting:.0f} waiting" if said.waiting is not None else "",
        f"KV {share(said.kv_cache)} %" if said.kv_cache is not None else "",
        *(f"{kind} p99 {_latency(one)}" for kind, one in said.latency_seconds.items() if kind in _SHOWN),
        f"batch {share(said.batch_fill)} % full" if said.batch_fill is not None else "",
        f"drafts {share(said.draft_acceptance)} % taken" if said.draft_acceptance is not None else "",
        f"{said.preemptions:.0f} preempted" if said.preemptions else "",
    ]
    return list(filter(None, words))


def _latency(one: Latency) -> str:
    return f"{1000 * one.p99:.0f} ms" if one.p99 < 1 else f"{one.p99:.1f} s"
