"""What a whole daemon costs a node: `gpu-efficiency serve` on eight GPUs at one reading a second.

Owns these measurements, taken from outside while the daemons run side by side, each for a minute or more. The
stand-in NVML costs next to nothing, so what real drivers and boards take for an answer is not in them.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

from msgspec import Struct

from benchmarks.figures import Row, row
from benchmarks.group import Group, Measured
from benchmarks.rig import page_of_dcgm
from benchmarks.rig.client import Client
from benchmarks.rig.daemon import Daemon, cpu_seconds, memory, running, switches
from tests.nvml_stub.build import build

CPU_BUDGET_PERCENT = 1.0
RSS_BUDGET_MIB = 80.0
_WARM_UP_SECONDS = 10.0
_SLICES = 7
_SLICE_SECONDS = 10.0
_SERVE = ("-m", "exporter", "serve", "--web.listen-address", "127.0.0.1:0")
_GPUS = 8


class _Watched(Struct, frozen=True):
    """A daemon under measurement, and whether somebody scrapes it."""

    about: str
    daemon: Daemon
    client: Client | None = None


class _Look(Struct, frozen=True):
    """What /proc said of a daemon at one moment (`time.perf_counter` seconds)."""

    at: float
    cpu: float
    switches: int


def serve() -> list[Row]:
    """Watch three daemons for a minute: alone, scraped every ten seconds, and on a dcgm-exporter's page."""
    stand_in = {"LD_LIBRARY_PATH": str(build())}
    with ExitStack() as stack:
        alone = stack.enter_context(running([*_serve("nvml")], stand_in))
        scraped = stack.enter_context(running([*_serve("nvml")], stand_in))
        url = stack.enter_context(page_of_dcgm.served())
        remote = stack.enter_context(running([*_serve("dcgm-exporter"), "--dcgm-exporter-url", url]))
        watched = [
            _Watched("stand-in NVML", alone),
            _Watched("stand-in NVML, scraped every 10 s", scraped, stack.enter_context(Client(scraped.port))),
            _Watched("dcgm-exporter's page", remote),
        ]
        return _watch(watched) + _from_within(scraped)


def _serve(source: str) -> Sequence[str]:
    return (*_SERVE, "--source", source)


def _watch(watched: Sequence[_Watched]) -> list[Row]:
    time.sleep(_WARM_UP_SECONDS)
    looks: list[list[_Look]] = [[_look(one.daemon.pid)] for one in watched]
    for _ in range(_SLICES):
        time.sleep(_SLICE_SECONDS)
        for one, seen in zip(watched, looks, strict=True):
            if one.client is not None:
                one.client.get()
            seen.append(_look(one.daemon.pid))
    return [line for one, seen in zip(watched, looks, strict=True) for line in _rows(one, seen)]


def _look(pid: int) -> _Look:
    return _Look(time.perf_counter(), cpu_seconds(pid), switches(pid))


def _rows(one: _Watched, seen: Sequence[_Look]) -> list[Row]:
    percents = [100 * (after.cpu - before.cpu) / (after.at - before.at) for before, after in pairwise(seen)]
    seconds = seen[-1].at - seen[0].at
    whole = 100 * (seen[-1].cpu - seen[0].cpu) / seconds
    often, resident = f"{_SLICES} x {_SLICE_SECONDS:.0f} s", memory(one.daemon.pid)
    rate = (seen[-1].switches - seen[0].switches) / seconds
    spread = f"{min(percents):.2f} - {max(percents):.2f}, whole time {whole:.2f}"
    return [
        row(
            "serve", f"CPU of one core, {_GPUS} GPUs at 1 s ({one.about})", often=often, values=percents, unit="%",
            digits=2, budget=CPU_BUDGET_PERCENT, judged=whole, spread=spread,
        ),
        row(
            "serve", f"Resident memory ({one.about})", often=f"after {seconds:.0f} s", values=[resident.now],
            unit="MiB", budget=RSS_BUDGET_MIB, judged=resident.peak, spread=f"peak {resident.peak:.1f}",
        ),
        row(
            "serve", f"Context switches a second ({one.about})", often=f"over {seconds:.0f} s", values=[rate],
            unit="/s", spread="-",
        ),
    ]  # fmt: skip


def _from_within(scraped: Daemon) -> list[Row]:
    """What the daemon counts of itself: wall time of a tick's parts, with the caches as cold as they are at 1 Hz."""
    with Client(scraped.port) as client:
        ticks = client.value("gpu_efficiency_ticks_total")
        core = client.value("gpu_efficiency_core_seconds_total") / ticks / _GPUS * 1e6
        read = client.value("gpu_efficiency_read_seconds_total") / ticks * 1e3
    often = f"mean of {ticks:.0f} ticks"
    return [
        row(
            "serve", "Observation to ledger, a reading, once a second (wall, idle caches)", often=often,
            values=[core], unit="us", spread="-",
        ),
        row(
            "serve", "Source and scheduler, a tick of 8 GPUs (wall, stand-in NVML)", often=often,
            values=[read], unit="ms", digits=2, spread="-",
        ),
    ]  # fmt: skip


SERVE = Group(
    name="serve",
    title="The daemon",
    about=(
        "`gpu-efficiency serve` on eight GPUs at one reading a second, watched from outside through the process's CPU "
        "clock and /proc, after ten seconds to warm up. The stand-in NVML (`tests/nvml_stub`) has the interface of "
        "NVIDIA's library and no driver behind it. CPU is judged over the whole time, memory by its peak (VmHWM). The "
        "dcgm-exporter page has the stock fields, figures made up, and changes every 30 s; what serves it is not "
        "counted."
    ),
    measures=(
        "exporter/agent",
        "exporter/cli",
        "exporter/core",
        "exporter/web",
        "exporter/schedulers",
        "exporter/sources",
    ),
    run=lambda: Measured(rows=serve()),
)
