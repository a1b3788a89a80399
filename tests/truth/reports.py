"""Writes what a training process would report about itself, from what it knows.

The process knows its steps, their model FLOPs, and the time it waited for data or saved; only a process that times its
collectives knows its communication, and announces its phases as they begin. It reports every few seconds, at the end
of a step, for the time since its last report. In some jobs every rank reports, in others rank 0 does for all. A server
reports its batch, its queue and its tokens.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

from tests.truth.world import Progress, Served, World

Reports = Literal["none", "usual", "timed"]

EVERY_MS = 20_000
"""A process reports at the first end of a step after this time."""
MS_NS = 1_000_000


def _stretches(rows: Sequence[Progress]) -> list[list[Progress]]:
    """Divide a job's progress into stretches of one report each; what precedes the first step has its own."""
    result: list[list[Progress]] = []
    current: list[Progress] = []
    for row in rows:
        if row.phase and current and row.phase in {"startup", "restore"}:
            result.append(current)
            current = []
        current.append(row)
        if (row.steps and row.end - current[0].start >= EVERY_MS) or row.phase in {"startup", "restore"}:
            result.append(current)
            current = []
    if current:
        result.append(current)
    return result


def _phases(rows: Sequence[Progress], rank: int, reports: Reports, whole: int) -> list[list[object]]:
    """Nanoseconds by phase in the order of the first occurrence, never more than `whole` milliseconds together."""
    spent: dict[str, float] = {}
    for row in rows:
        if row.phase:
            spent[row.phase] = spent.get(row.phase, 0.0) + (row.end - row.start)
        for phase, ranks in row.waits:
            if phase == "bubble" and reports != "timed":
                continue
            spent[phase] = spent.get(phase, 0.0) + ranks[rank]
        if reports == "timed" and row.communication:
            spent["communication"] = spent.get("communication", 0.0) + row.communication[rank]
    room, result = whole * MS_NS, list[list[object]]()
    for phase, value in spent.items():
        part = min(room, round(value * MS_NS))
        room -= part
        if part > 0:
            result.append([phase, part])
    return result


def _report(world: World, rows: Sequence[Progress], step: int, reports: Reports, zero_ns: int) -> list[str]:
    """Return the report of each rank on this node for one stretch."""
    job_id = rows[0].job_id
    gpus = next(h.gpus for h in world.holdings if h.job.job_id == job_id)
    start, end = rows[0].start, rows[-1].end
    reporters = [list(gpus)] if world.one_reporter else [[gpu] for gpu in gpus]
    texts = []
    for rank, own in enumerate(reporters):
        report: dict[str, object] = {
            "job_id": job_id,
            "start": zero_ns + start * MS_NS,
            "end": zero_ns + end * MS_NS,
            "gpus": len(own),
            "uuids": [world.gpus[gpu].uuid for gpu in own],
            "rank": str(rank),
            "run": f"run-{job_id}",
            "step": step,
            "steps": sum(row.steps for row in rows),
            "phases": _phases(rows, rank, reports, end - start),
        }
        flops = sum(row.flops for row in rows) * len(own)
        if flops:
            report["model_flops"] = flops
        saved = sum(row.phase == "checkpoint" for row in rows)
        if saved:
            report["checkpoints"] = saved
        if any(row.phase == "restore" for row in rows):
            report["restart"] = True
        if world.dtype:
            report["dtype"] = world.dtype
        texts.append(json.dumps(report, separators=(",", ":")))
    return texts


def _serving(world: World, rows: Sequence[Served], zero_ns: int) -> str:
    """Return a server's figures for some stretches of its work, as JSON."""
    return json.dumps(
        {
            "job_id": rows[0].job_id,
            "start": zero_ns + rows[0].start * MS_NS,
            "end": zero_ns + rows[-1].end * MS_NS,
            "engine": "vllm",
            "gpus": len(rows[0].gpus),
            "uuids": [world.gpus[gpu].uuid for gpu in rows[0].gpus],
            "running": rows[-1].running,
            "waiting": rows[-1].waiting,
            "slots": rows[-1].slots,
            "generated_tokens": round(sum(row.generated for row in rows)),
            "prompt_tokens": round(sum(row.prompted for row in rows)),
        },
        separators=(",", ":"),
    )


def serving_lines(world: World, edges: Sequence[int], reports: Reports, *, zero_ns: int) -> dict[int, list[str]]:
    """Return the servers' figures as JSON, by the number of the window in which each arrives."""
    result: dict[int, list[str]] = {}
    if reports == "none":
        return result
    by_job: dict[str, list[Served]] = {}
    for row in world.served:
        by_job.setdefault(row.job_id, []).append(row)
    for rows in by_job.values():
        stretch: list[Served] = []
        for row in rows:
            if stretch and row.end - stretch[0].start > EVERY_MS:
                window = max(0, bisect_left(edges, stretch[-1].end) - 1)
                result.setdefault(window, []).append(_serving(world, stretch, zero_ns))
                stretch = []
            stretch.append(row)
    return result


def _announcements(world: World, row: Progress, zero_ns: int) -> list[tuple[int, str]]:
    """Return the notices that a phase begins and that computation goes on, with their milliseconds."""
    gpus = next(h.gpus for h in world.holdings if h.job.job_id == row.job_id)
    result = []
    for at, phase in ((row.start, row.phase), (row.end, "compute")):
        moment = zero_ns + at * MS_NS
        result += [
            (at, json.dumps(
                {"job_id": row.job_id, "start": moment, "end": moment, "gpus": 1, "uuids": [world.gpus[gpu].uuid],
                 "rank": str(rank), "run": f"run-{row.job_id}", "phase": phase}, separators=(",", ":"),
            ))
            for rank, gpu in enumerate(gpus)
        ]  # fmt: skip
    return result


def report_lines(world: World, edges: Sequence[int], reports: Reports, *, zero_ns: int) -> dict[int, list[str]]:
    """Return the reports as JSON, by the number of the window in which each arrives, in the order of their ends."""
    arrived: list[tuple[int, str]] = []
    if reports == "none":
        return {}
    for job_id in dict.fromkeys(row.job_id for row in world.progress):
        rows = [row for row in world.progress if row.job_id == job_id]
        step = 0
        for stretch in _stretches(rows):
            step += sum(row.steps for row in stretch)
            texts = _report(world, stretch, step, reports, zero_ns)
            arrived.extend((stretch[-1].end, text) for text in texts)
        if reports == "timed":
            for row in rows:
                arrived.extend(_announcements(world, row, zero_ns) if row.phase else ())
    arrived.sort(key=lambda pair: pair[0])
    result: dict[int, list[str]] = {}
    for at, text in arrived:
        result.setdefault(max(0, bisect_left(edges, at) - 1), []).append(text)
    return result
