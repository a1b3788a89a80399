"""Turns a world into the telemetry a monitoring agent would have read, in the project's trace format.

Profiling ratios and byte rates are exact means over each window, as DCGM's profiling fields are; ratios have six
decimals, as its exporter prints. The driver's utilization is the mean of the last second before the reading, in whole
percent. Board power is a mean of the same second on boards for which NVML says so (H100), and the latest value on
others (A100); it has a slow share from leakage, a fixed gain error and noise. Clock, temperature and memory are the
latest values.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal, TextIO

from tests.truth.loads import Load
from tests.truth.reports import Reports, report_lines, serving_lines
from tests.truth.tracks import Integrals
from tests.truth.world import Gpu, Holding, World

ZERO_NS = 86_400_000_000_000
"""The world's beginning on the monotonic clock, nanoseconds: the host had been up for a day."""
WALL_NS = 1_760_000_000_000_000_000
"""The world's beginning, Unix nanoseconds."""
MS_NS = 1_000_000
BURST_MS = 100
"""Length of a reading in a burst."""
BEHIND_MS = 1_000
"""The driver's utilization and mean power look back this far."""
NO_CONTEXT_BYTES = 0.62e9
"""Memory the driver itself uses."""

Fields = Literal["full", "stock"]

_RATIOS = (
    "gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active",
    "fp16_active",
)  # fmt: skip
_RATES = (
    "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second", "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second",
)  # fmt: skip
_STOCK = {
    "gr_engine_active", "tensor_active", "dram_active", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second",
}  # fmt: skip
"""Profiling fields of a DCGM exporter as it is installed."""
_DRIVER, _POWER, _CLOCK, _CONTEXT = 12, 13, 14, 15
_PROFILING = len(_RATIOS) + len(_RATES)


@dataclass(frozen=True)
class Options:
    """How a world is read."""

    reading_seconds: float = 1.0
    fields: Fields = "full"
    reports: Reports = "none"
    missing: float = 0.0
    """Probability that a profiling field of a reading is blank."""
    jitter: float = 0.02
    """Largest deviation of a reading's time stamp, as a share of the reading interval; never more than 50 ms."""
    bursts: tuple[tuple[float, float], ...] = ()
    """Stretches, as begin and end in seconds, that are read every 100 ms."""


def _telemetry(gpu: Gpu) -> Callable[[Load], Sequence[float]]:
    """Return the function that turns a load into the quantities the sampler integrates."""

    def rates(load: Load) -> Sequence[float]:
        power, clock = gpu.condition.power_and_clock(load)
        return (
            load.resident, load.sm, load.occupancy, load.tensor, load.dram, load.fp64, load.fp32, load.fp16,
            load.pcie_tx, load.pcie_rx, load.nvlink_tx, load.nvlink_rx, load.driver, power, clock, float(load.context),
        )  # fmt: skip

    return rates


def edges_of(world: World, options: Options) -> list[int]:
    """Return the boundaries of the reading windows, milliseconds."""
    interval = options.reading_seconds * 1e3
    spread = min(options.jitter * interval, 50.0)
    rng = world.random(f"stamps:{options.reading_seconds}")
    edges = [0]
    count = int(world.milliseconds / interval)
    edges.extend(round(k * interval + rng.uniform(-spread, spread)) for k in range(1, count))
    edges.append(world.milliseconds)
    if options.bursts:
        bursts = [(round(begin * 1e3), min(round(end * 1e3), world.milliseconds)) for begin, end in options.bursts]
        kept = {edge for edge in edges if not any(begin < edge < end for begin, end in bursts)}
        edges = sorted(kept.union(*(range(begin, end + 1, BURST_MS) for begin, end in bursts)))
    return edges


def _means(integrals: Integrals, edges: Sequence[int], channels: Sequence[int]) -> list[list[float]]:
    rows = integrals.until(edges, channels)
    spans = [(b - a) / 1e3 for a, b in pairwise(edges)]
    return [
        [(b - a) / span for a, b, span in zip(row, row[1:], spans, strict=False)] if any(row) else [0.0] * len(spans)
        for row in rows
    ]


def _trailing(integrals: Integrals, edges: Sequence[int], channel: int) -> list[float]:
    """Mean of a channel over the second that ends at each edge but the first."""
    begins = [max(0, edge - BEHIND_MS) for edge in edges[1:]]
    before, after = integrals.until(begins, [channel])[0], integrals.until(edges[1:], [channel])[0]
    spans = [(b - a) / 1e3 for a, b in zip(begins, edges[1:], strict=True)]
    return [(b - a) / span for a, b, span in zip(before, after, spans, strict=True)]


def _power(gpu: Gpu, integrals: Integrals, edges: Sequence[int], rng: Random) -> tuple[list[float], list[float]]:
    """Return the power readings (watts) and temperatures (degrees Celsius)."""
    board = gpu.condition.board
    watts = integrals.latest(edges[1:], _POWER) if board.instant_power else _trailing(integrals, edges, _POWER)
    means = _means(integrals, edges, [_POWER])[0]
    gain, room = rng.gauss(1.0, 0.008), rng.uniform(26.0, 31.0)
    degrees = room + 0.055 * means[0]
    readings, temperatures = [], []
    for now, mean, begin, end in zip(watts, means, edges, edges[1:], strict=False):
        degrees += (room + 0.055 * mean - degrees) * min(1.0, (end - begin) / 40e3)
        leakage = 1.0 + 0.0006 * (degrees - 55.0)
        noisy = now * gain * leakage + rng.gauss(0.0, 0.006 * now + 0.3)
        readings.append(min(noisy, gpu.condition.limit_watts * 1.02))
        temperatures.append(degrees)
    return readings, temperatures


def _clocks(gpu: Gpu, integrals: Integrals, edges: Sequence[int], rng: Random) -> list[int]:
    """SM clocks in MHz; a loaded board varies by a step or two."""
    top = gpu.condition.board.max_hz
    result = []
    for clock in integrals.latest(edges[1:], _CLOCK):
        lower = rng.choice((0, 0, 0, 15, 30)) if clock < top else 0
        result.append(round(clock / 1e6) - lower)
    return result


def _memory(gpu: Gpu, edges: Sequence[int]) -> list[float]:
    changes = sorted(gpu.memory)
    result, position, used = [], 0, NO_CONTEXT_BYTES
    for edge in edges[1:]:
        while position < len(changes) and changes[position][0] <= edge:
            used = changes[position][1]
            position += 1
        result.append(used)
    return result


def _columns(gpu: Gpu, edges: Sequence[int], options: Options, rng: Random) -> list[tuple[str, list[str]]]:
    """Return the fields of a GPU's readings as JSON text, one text a window."""
    integrals = Integrals(gpu.track, _telemetry(gpu))
    names = (*_RATIOS, *_RATES)
    skipped = {n for n in names if n.startswith("nvlink")} if gpu.condition.board.nvlink_bytes is None else set[str]()
    wanted = [
        (k, name) for k, name in enumerate(names)
        if name not in skipped and (options.fields == "full" or name in _STOCK)
    ]  # fmt: skip
    columns = []
    for (k, name), row in zip(wanted, _means(integrals, edges, [k for k, _ in wanted]), strict=True):
        form = "%.6f" if k < len(_RATIOS) else "%.0f"
        columns.append((name, [f',"{name}":' + form % value for value in row]))
    watts, degrees = _power(gpu, integrals, edges, rng)
    energy = integrals.until(edges, [_POWER])[0]
    util = _trailing(integrals, edges, _DRIVER)
    total = gpu.condition.board.memory_gb * 1.0717e9
    columns += [
        ("gpu_utilization", [f',"gpu_utilization":{round(value * 100) / 100}' for value in util]),
        ("power_watts", [f',"power_watts":{value:.3f}' for value in watts]),
        ("energy_joules", [f',"energy_joules":{b - a:.3f}' for a, b in pairwise(energy)]),
        ("temperature_celsius", [f',"temperature_celsius":{value:.0f}' for value in degrees]),
        ("sm_clock_hz", [f',"sm_clock_hz":{mhz}e6' for mhz in _clocks(gpu, integrals, edges, rng)]),
        (
            "memory_used_bytes",
            [f',"memory_used_bytes":{value:.0f},"memory_total_bytes":{total:.0f}' for value in _memory(gpu, edges)],
        ),
    ]
    if options.fields == "full":
        columns.append(("reasons", _reasons(gpu, integrals, edges)))
    return columns


def _reasons(gpu: Gpu, integrals: Integrals, edges: Sequence[int]) -> list[str]:
    """Power limit and NVML's clock event reasons: 1 idle, 4 software power cap, 2 applications clocks."""
    limit = gpu.condition.limit_watts
    latest = zip(
        integrals.latest(edges[1:], _POWER), integrals.latest(edges[1:], 0), integrals.latest(edges[1:], _CONTEXT),
        strict=True,
    )  # fmt: skip
    result = []
    for power, resident, context in latest:
        reasons = 4 if power >= limit - 1e-6 else 0
        if gpu.condition.locked_hz is not None and context:
            reasons |= 2
        if resident == 0.0:
            reasons = 1
        result.append(f',"enforced_power_limit_watts":{limit},"clock_event_reasons":{reasons}')
    return result


def _readings(world: World, gpu: Gpu, edges: Sequence[int], options: Options) -> list[str]:
    """Return one reading a window, as JSON."""
    rng = world.random(f"sensors:{gpu.index}:{options.reading_seconds}:{options.fields}")
    columns = _columns(gpu, edges, options, rng)
    if options.missing > 0:
        for name, texts in columns:
            if name in _RATIOS or name in _RATES:
                texts[:] = ["" if rng.random() < options.missing else text for text in texts]
    rows = map("".join, zip(*(texts for _, texts in columns), strict=True))
    head = f'{{"uuid":"{gpu.uuid}","start":'
    stamps = [ZERO_NS + edge * MS_NS for edge in edges]
    return [
        f'{head}{a},"end":{b}{row}}}' for row, a, b in zip(rows, stamps, stamps[1:], strict=False)
    ]  # fmt: skip


def _devices(world: World) -> str:
    devices = []
    for gpu in world.gpus:
        board = gpu.condition.board
        device: dict[str, object] = {
            "uuid": gpu.uuid, "index": str(gpu.index), "model": board.model, "spec": board.spec(),
        }  # fmt: skip
        if board.nvlink_bytes is None:
            device["lacks"] = ["nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"]
        devices.append(device)
    return json.dumps(devices, separators=(",", ":"))


def _allocation(world: World, holding: Holding, gpu: int, now: int) -> dict[str, object]:
    job = holding.job
    owner: dict[str, object] = {
        "job_id": job.job_id, "scheduler": "slurm", "user": job.user, "account": job.account, "partition": "gpu",
        "name": job.name or world.name, "workload_class": job.workload_class, "nodes": job.nodes,
    }  # fmt: skip
    result: dict[str, object] = {
        "uuid": world.gpus[gpu].uuid,
        "owner": owner,
        "start": ZERO_NS + holding.start * MS_NS,
        "gpus": job.gpus,
        "restarts": holding.restarts,
        "ranks": str(holding.gpus.index(gpu)),
    }
    if holding.end is not None and holding.end <= now:
        result["end"] = ZERO_NS + holding.end * MS_NS
    return result


def _allocations(world: World, before: int, now: int) -> str | None:
    """Return the allocations as JSON when any began or ended in (before, now], or at the beginning (now 0)."""
    changed = now == 0
    rows = []
    for holding in world.holdings:
        end = holding.end
        if holding.start > now or (end is not None and end <= before):
            continue
        changed = changed or before < holding.start or (end is not None and before < end <= now)
        rows += [_allocation(world, holding, gpu, now) for gpu in holding.gpus]
    return json.dumps(rows, separators=(",", ":")) if changed else None


def trace_lines(world: World, options: Options) -> Iterator[str]:
    """Yield the lines of the trace, each with its newline."""
    header = {
        "format": "gpu-efficiency-trace", "version": 1, "host": "node1", "simulated": True, "created_wall": WALL_NS,
        "note": f"{world.name}, seed {world.seed}",
    }  # fmt: skip
    yield json.dumps(header, separators=(",", ":")) + "\n"
    first = f'{{"at":{ZERO_NS},"wall":{WALL_NS},"source":"dcgm","devices":{_devices(world)}'
    yield f'{first},"allocations":{_allocations(world, -1, 0)}}}\n'
    edges = edges_of(world, options)
    readings = [_readings(world, gpu, edges, options) for gpu in world.gpus]
    reports = report_lines(world, edges, options.reports, zero_ns=ZERO_NS)
    serving = serving_lines(world, edges, options.reports, zero_ns=ZERO_NS)
    turns = sorted({x for h in world.holdings for x in (h.start, h.end) if x is not None})
    for k, rows in enumerate(zip(*readings, strict=True)):
        before, now = edges[k], edges[k + 1]
        line = f'{{"at":{ZERO_NS + now * MS_NS},"wall":{WALL_NS + now * MS_NS},"readings":[{",".join(rows)}]'
        if any(before < turn <= now for turn in turns):
            line += f',"allocations":{_allocations(world, before, now)}'
        if reports.get(k):
            line += f',"reports":[{",".join(reports[k])}]'
        if serving.get(k):
            line += f',"serving":[{",".join(serving[k])}]'
        yield line + "}\n"


def write_trace(
    world: World,
    target: str | Path | TextIO,
    *,
    reading_seconds: float,
    fields: Fields = "full",
    reports: Reports = "none",
    missing: float = 0.0,
) -> None:
    """Write the trace of a world to a path or an open text file; an existing file is overwritten."""
    options = Options(reading_seconds=reading_seconds, fields=fields, reports=reports, missing=missing)
    if isinstance(target, (str, Path)):
        with Path(target).open("w", encoding="utf-8") as file:
            file.writelines(trace_lines(world, options))
    else:
        target.writelines(trace_lines(world, options))
