"""What the job itself reported, over its run. Owns these figures; refuses what only hardware knows.

Tokens, samples and FLOPs of a node are those of its GPUs that reports speak of: they are divided by the GPU-seconds of
these. Steps, checkpoints and restarts are the whole job's: the node that heard most has them. Daemons count all of them
once a job reports anything: none at all is not told.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median

from exporter.receipt.asking import Place
from exporter.receipt.books import HOUR, SECOND, Books, nanoseconds
from exporter.receipt.facts import Facts
from exporter.receipt.figures import Figures, weighed
from exporter.receipt.model import Quality, Rank, Target, Truth

_GOOD = ("compute", "communication", "bubble")
"""Phases of a new step: what is repeated is `rework`."""


def truth(facts: Figures, books: Books, *, qualities: tuple[Quality, ...]) -> Truth | None:
    """None: it reported nothing."""
    told = facts.rows.sum("reported_gpu_seconds")
    if not told:
        return None
    known = _efficiency(facts) | _time(facts) | _progress(facts) | _throughput(facts, books, told) | _trouble(facts)
    return Truth(
        told_share=min(1.0, told * SECOND / sum(books.seen.values())),
        checkpoint_gpu_hours=books.sums().get("checkpoint", 0.0) / HOUR,
        checkpoint_money=books.money(books.of_leak("checkpoint")),
        loss_events={event: count for event, count in sorted(_events(facts).items()) if count},
        qualities=qualities,
        target=_target(facts, books),
        phases=_phases(facts),
        **known,
    )


def ratio(part: float | None, whole: float | None) -> float | None:
    """None where either is not told or there is nothing to divide by."""
    return part / whole if part is not None and whole else None


def _efficiency(facts: Figures) -> dict[str, float | None]:
    """Means of the run, weighed with the GPU-seconds reports speak of. The gap is of daemons that have both."""
    weights = facts.rows.by_place("reported_gpu_seconds")
    mfu = {row.place: row.value for row in facts.mean("reported_mfu_ratio")}
    hfu = {row.place: row.value for row in facts.mean("reported_hfu_ratio")}
    gap = {place: hfu[place] - mfu[place] for place in hfu.keys() & mfu.keys()}
    return {name: _weighed(of, weights) for name, of in (("mfu", mfu), ("hfu", hfu), ("gap", gap))}


def _weighed(of: Mapping[Place, float], weights: Mapping[Place, float]) -> float | None:
    return weighed((value, weights.get(place, 0.0)) for place, value in of.items())


def _phases(facts: Figures) -> dict[str, float]:
    """Share of the time of all nodes, the largest first."""
    found = facts.rows.by("phase", "run_seconds")
    total = sum(found.values())
    return {phase: found[phase] / total for phase in sorted(found, key=lambda each: -found[each]) if found[phase]}


def _time(facts: Figures) -> dict[str, float | None]:
    phases = facts.rows.by("phase", "run_seconds")
    good = sum(phases.get(phase, 0.0) for phase in _GOOD)
    checkpoints, restarts = facts.rows.most("checkpoints") or None, facts.rows.most("restarts") or None
    return {
        "goodput": ratio(good, sum(phases.values())),
        "checkpoints": checkpoints,
        "checkpoint_seconds": ratio(facts.rows.most("run_seconds", phase="checkpoint"), checkpoints),
        "restarts": restarts,
        "recovery_seconds": ratio(facts.rows.most("recovery_seconds"), restarts),
        "bubble": facts.rows.latest("bubble_ratio"),
    }


def _progress(facts: Figures) -> dict[str, float | None]:
    steps, rework = facts.rows.most("steps") or None, facts.rows.most("rework_steps")
    repeated = ratio(rework, steps)
    return {
        "step": facts.rows.latest("step"),
        "steps": steps,
        "rework_steps": rework,
        "progress": None if repeated is None else 1.0 - repeated,
    }


def _throughput(facts: Figures, books: Books, told: float) -> dict[str, float | None]:
    tokens, samples = facts.rows.sum("tokens") or None, facts.rows.sum("samples") or None
    spent = books.cost(nanoseconds(facts.rows.by_node("reported_gpu_seconds")))
    each = ratio(tokens, told)
    return {
        "tokens": tokens,
        "tokens_per_gpu_second": each,
        "tokens_per_second": None if each is None else each * sum(books.gpus.values()),
        "samples": samples,
        "samples_per_gpu_second": ratio(samples, told),
        "padding": ratio(facts.rows.sum("padding_tokens"), tokens),
        "cost_per_step": ratio(books.cost(books.seen), facts.rows.most("steps")),
        "cost_per_token": ratio(spent, tokens),
        "cost_per_sample": ratio(spent, samples),
        "tokens_per_cost": ratio(tokens, spent),
    }


def _trouble(facts: Figures) -> dict[str, float | None]:
    return {
        "loss": facts.rows.latest("loss"),
        "loss_spread": facts.rows.latest("loss_spread_ratio"),
        "lost_bytes_per_second": facts.rows.latest("tensor_parallel_lost_bytes_per_second"),
    }


def _events(facts: Figures) -> dict[str, float]:
    kinds = {count.labels.get("event", "") for count in facts.rows.counts("loss_events")}
    return {kind: facts.rows.most("loss_events", event=kind) or 0.0 for kind in kinds}


def _target(facts: Figures, books: Books) -> Target | None:
    """The first moment at which any node says so."""
    reached = [row.value for row in facts.rows.gauges("target_reached_timestamp_seconds")]
    if not reached:
        return None
    seconds = min(reached) - facts.start
    return Target(seconds=seconds, cost=books.per_hour() * seconds * SECOND / HOUR)


def qualities(facts: Facts, books: Books) -> tuple[Quality, ...]:
    """Each with its whole track."""
    points: dict[str, list[tuple[float, float]]] = {}
    for track in facts.tracks("quality"):
        points.setdefault(track.labels.get("name", ""), []).extend(track.points)
    starts: dict[str, tuple[float, float]] = {}
    for track in facts.tracks("quality_start"):
        name = track.labels.get("name", "")
        starts[name] = min(track.points[0], starts.get(name, track.points[0]))
    targets = {row.labels.get("name", ""): row.value for row in facts.rows.gauges("quality_target")}
    cost, began = books.cost(books.seen), facts.start
    found: list[Quality] = []
    for name in sorted(points):
        run = [(at - began, value) for at, value in sorted(points[name])]
        start = starts[name][1] if name in starts else run[0][1]
        values, changes = [value for _, value in run], tuple(_changes(run))
        found.append(gained(name, values, start=start, target=targets.get(name), cost=cost, track=changes))
    return tuple(found)


def gained(
    name: str,
    values: Sequence[float],
    *,
    start: float,
    target: float | None,
    cost: float,
    track: tuple[tuple[float, float], ...],
) -> Quality:
    """What became of a figure that had these values, the last of them last; less is better where the target says so."""
    last = values[-1]
    rises = last >= start if target is None or target == start else target > start
    gain = last - start if rises else start - last
    return Quality(
        name=name,
        start=start,
        last=last,
        best=max(values) if rises else min(values),
        rises=rises,
        target=target,
        gained=gain,
        cost_per_unit=cost / gain if gain > 0 else None,
        track=track,
    )


def _changes(track: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Only the first of equal values that follow one another."""
    return [next(run) for _, run in groupby(track, key=lambda point: point[1])]


def ranks(facts: Figures) -> tuple[Rank, ...]:
    """How long a step keeps each rank busy, the slowest first; none where one alone says so."""
    busy: dict[str, tuple[float, str]] = {}
    for row in facts.mean("rank_busy_seconds", series=8):
        node = facts.nodes.get(row.place, "")
        busy[row.labels.get("rank", "")] = max((row.value, node), busy.get(row.labels.get("rank", ""), (0.0, "")))
    if len(busy) < 2:  # noqa: PLR2004  nobody to be compared with
        return ()
    middle = median(seconds for seconds, _ in busy.values())
    found = [
        Rank(rank=rank, node=node, busy_seconds=seconds, of_median=seconds / middle if middle else 1.0)
        for rank, (seconds, node) in busy.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.busy_seconds, each.rank)))
