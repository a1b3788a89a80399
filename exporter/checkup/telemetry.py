"""Checks the sources of telemetry: opens each, reads it once, then samples the selected one for three intervals.

Distinguishes an absent source from a broken one. Opens nothing during a pause, since DCGM would take the counters from
a profiler. Does not receive training reports.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.agent.pause import PauseFile
from exporter.checkup.base import (
    FAIL,
    INFO,
    OK,
    WARN,
    CheckContext,
    Finding,
    Findings,
    failed,
    findings_of,
    split_advice,
)
from exporter.checkup.machine import profiling_check
from exporter.config import Config, ConfigError
from exporter.core.model import MS, SECOND, Allocation, Device, Fault, Reading
from exporter.core.prices import unmatched_models, unpriced_models
from exporter.registry import SOURCES
from exporter.schedulers.base import Scheduler, SchedulerError, SchedulerState, choose_scheduler
from exporter.schedulers.page_labels import DCGM_EXPORTER, PageOwners, open_page_owners
from exporter.schedulers.privacy import MaskedScheduler, UserMask, open_mask
from exporter.schedulers.procfs import read_uuids
from exporter.sources.base import ReadResult, SourceError, TelemetrySource, open_source
from exporter.sources.dcgm.connection import describe_dcgm, host_engine_version
from exporter.sources.selector import SourceSelector, open_selector

TELEMETRY = "telemetry"
_TENSOR_SIGNAL = "tensor_active"
_REFUSED = ("profiling_refused",)


def check_pause(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Report a pause, during which no source is opened."""
    if not context.config.sampling.pause_file:
        return
    status = PauseFile(context.config.sampling.pause_file).poll()
    if status:
        do = "`gpu-efficiency resume` when the profiler is done, then check again"
        yield Finding(TELEMETRY, "pause", WARN, f"sources are not opened: {status}", do)


def paused(before: Findings) -> bool:
    """Whether a pause is active."""
    return any(findings_of(before, "pause"))


def requires_source(name: str) -> Callable[[Config], bool]:
    """Return a function: whether the configuration names that source."""
    return lambda config: config.source == name


def check_dcgm(context: CheckContext, before: Findings) -> Iterator[Finding]:
    """Check bindings, library, host engine, its GPUs, and the profiling module."""
    if not context.tries_source("dcgm") or paused(before):
        return
    try:
        dcgm = describe_dcgm(context.config)
    except SourceError as err:
        absent = "are not in" in str(err) and not context.config.dcgm.bindings
        yield _refused(context, "dcgm", err, absent=absent)
        return
    library = dcgm.library or "of an unknown version"
    yield Finding(TELEMETRY, "dcgm bindings", OK, f"bindings in {dcgm.location}, libdcgm {library}")
    if context.config.dcgm.address != "embedded":
        try:
            version = host_engine_version(context.config)
        except SourceError as err:
            yield _refused(context, "dcgm", err)
            return
        message = f"the host engine at {context.config.dcgm.address} answers{f', version {version}' if version else ''}"
        yield Finding(TELEMETRY, "dcgm engine", OK, message)
    yield from _read_source(context, "dcgm")


def check_dcgm_exporter(context: CheckContext, before: Findings) -> Iterator[Finding]:
    """Check that its metrics can be read, are of this machine's GPUs, and have the profiling fields."""
    if not context.tries_source("dcgm-exporter") or paused(before):
        return
    yield from _read_source(context, "dcgm-exporter", absent=lambda message: "Connection refused" in message)


def check_nvml(context: CheckContext, before: Findings) -> Iterator[Finding]:
    """Check NVML as a source."""
    if not context.tries_source("nvml") or paused(before):
        return
    yield from _read_source(context, "nvml", absent=lambda message: "not found" in message)


def _read_source(
    context: CheckContext, name: str, absent: Callable[[str], bool] = lambda _: False
) -> Iterator[Finding]:
    try:
        source = open_source(name, context.config)
    except SourceError as err:
        yield _refused(context, name, err, absent=absent(str(err)))
        return
    try:
        batch = source.read(time.monotonic_ns() // MS * MS)
        yield from _source_findings(context, name, source, batch)
    except SourceError as err:
        yield _refused(context, name, err)
    finally:
        source.close()


def _refused(context: CheckContext, name: str, err: SourceError, *, absent: bool = False) -> Finding:
    message, do = split_advice(str(err), SOURCES[name].advice)
    return failed(TELEMETRY, name, message, do, needed=context.config.source == name, absent=absent)


def _source_findings(context: CheckContext, name: str, source: TelemetrySource, batch: ReadResult) -> Iterator[Finding]:
    boards = [device for device in batch.devices if not device.parent]
    if not boards:
        yield _refused(context, name, SourceError("opens, but lists no GPU: does `nvidia-smi -L`?"))
        return
    yield Finding(TELEMETRY, name, OK, f"opens, and lists {len(boards)} GPUs")
    ill = [f"GPU {board.index or board.uuid} is {board.condition}" for board in boards if board.condition]
    if ill:
        yield Finding(TELEMETRY, f"{name} boards", WARN, "; ".join(ill), "find the Xid in `dmesg`, reset or drain it")
    if name == "dcgm-exporter":
        yield from _same_machine(context, {board.uuid for board in boards})
    yield from _tensor_findings(context, name, source, batch)


def _tensor_findings(context: CheckContext, name: str, source: TelemetrySource, batch: ReadResult) -> Iterator[Finding]:
    """Report whether all or some boards have profiling signals."""
    check, needed, given = profiling_check(name), context.config.source == name, _given_signals(source)
    advice = SOURCES[name].profiling_advice
    sees, refused = _TENSOR_SIGNAL in source.signals, [f.message for f in batch.faults if f.kind in _REFUSED]
    if sees:
        missing = _missing_signals(source, batch)
        others = f", but not {', '.join(missing)}" if missing else ""
        yield Finding(TELEMETRY, check, OK, f"gives {', '.join(('tensor activity', *given))}{others}")
        if missing:
            message = f"{', '.join(missing)}: not given, so that leaks are told apart less well"
            yield Finding(TELEMETRY, f"{check} signals", WARN if needed else INFO, message, advice)
    elif not refused:
        only = f", only {', '.join(given)}" if given else ""
        message = f"gives no tensor activity{only}: kernel time stays unresolved"
        yield Finding(TELEMETRY, check, WARN if needed else INFO, message, advice)
    if refused:
        boards = sum(not device.parent for device in batch.devices)
        message = f"{len(refused)} of {boards} GPUs are not profiled: {refused[0]}"
        unprofiled = f"{name} unprofiled" if sees else check
        yield Finding(TELEMETRY, unprofiled, WARN if sees or needed else INFO, message, advice)


_PROFILING_SIGNALS = {
    "gr_engine_active": "engine activity",
    "sm_active": "SM activity",
    "dram_active": "DRAM activity",
    "fp64_active": "FP64 activity",
    "fp32_active": "FP32 activity",
    "fp16_active": "FP16 activity",
    "pcie_tx_bytes_per_second": "PCIe traffic",
    "nvlink_tx_bytes_per_second": "NVLink traffic",
}


def _given_signals(source: TelemetrySource) -> list[str]:
    return [words for name, words in _PROFILING_SIGNALS.items() if name in source.signals]


def _missing_signals(source: TelemetrySource, batch: ReadResult) -> list[str]:
    """Profiling signals that the source does not give although some board has them."""
    boards = [device for device in batch.devices if not device.parent]
    return [
        words
        for name, words in _PROFILING_SIGNALS.items()
        if name not in source.signals and not all(name in board.lacks for board in boards)
    ]


def _same_machine(context: CheckContext, listed: set[str]) -> Iterator[Finding]:
    """Compare the page's UUIDs with the driver's: a page of another node would charge the wrong jobs."""
    here_uuids = set(read_uuids(Path(context.config.host.proc)).values())
    if here_uuids and listed.isdisjoint(here_uuids):
        message = f"the page shows {len(listed)} GPUs, none of them is one of the {len(here_uuids)} of this machine"
        do = "set dcgm_exporter.url to this node's own exporter (host IP and port): a Service answers for any node"
        yield Finding(TELEMETRY, "dcgm-exporter host", FAIL, message, do)
    elif here_uuids:
        yield Finding(TELEMETRY, "dcgm-exporter host", OK, "the page's GPUs are this machine's")


def check_source_choice(_: CheckContext, before: Findings) -> Iterator[Finding]:
    """Report the source that the daemon will use, or that none works."""
    if paused(before):
        return
    works = [finding.check for finding in findings_of(before, *SOURCES) if finding.verdict is OK]
    sees = [name for name in works if any(f.verdict is OK for f in findings_of(before, profiling_check(name)))]
    if not works:
        message = "no source of telemetry works: there is nothing to watch"
        do = "see the findings on each source above; `gpu-efficiency demo` serves a simulated node meanwhile"
        yield Finding(TELEMETRY, "source", FAIL, message, do)
        return
    message = f"the daemon will read {(sees or works)[0]}"
    if sees:
        yield Finding(TELEMETRY, "source", OK, f"{message}, which sees tensor activity")
        return
    do = "; ".join(
        dict.fromkeys(finding.do for finding in findings_of(before, *map(profiling_check, SOURCES)) if finding.do)
    )
    yield Finding(TELEMETRY, "source", WARN, f"{message}, and no source here sees tensor activity", do)


def no_source(findings: Findings) -> bool:
    """Whether no source of telemetry works."""
    return any(finding.verdict is FAIL for finding in findings_of(findings, "source"))


SAMPLE = "sample"
POLLS = 4
"""Number of reads; the first is the baseline of three intervals."""
_MAX_INTERVAL_SECONDS = 1.0
"""Most seconds between two reads, even if the daemon's interval is longer."""
_FIRST_STATE_SECONDS = 4.0
"""Seconds to wait for the scheduler's first state."""
_EXPECTED_SIGNALS = (
    "gr_engine_active", "sm_active", "tensor_active", "dram_active", "power_watts", "energy_joules", "sm_clock_hz",
    "memory_used_bytes", "pcie_tx_bytes_per_second", "nvlink_tx_bytes_per_second", "processes",
)  # fmt: skip
"""Signals of which each missing one is reported."""


class SampledStatus(Struct):
    """Result of all reads and polls."""

    began: int = 0
    ended: int = 0
    source: str = ""
    devices: tuple[Device, ...] = ()
    readings: list[Reading] = []
    state: SchedulerState | None = None
    trouble: str = ""
    """Error of the scheduler's last poll, or ""."""
    faults: dict[str, Fault] = {}
    """The newest fault by kind."""


def check_sample(context: CheckContext, before: Findings) -> Iterator[Finding]:
    """Report GPUs, signals, the observed share of time, and allocations in a short sample."""
    if paused(before) or no_source(before) or any("gave no answer" in finding.message for finding in before):
        yield Finding(SAMPLE, "sample", INFO, "nothing is sampled: see the findings above")
        return
    try:
        mask = open_mask(context.config.privacy)
        with closing(_scheduler(context, mask)) as scheduler, closing(open_selector(context.config)) as selector:
            page_owners = open_page_owners(context.config, scheduler)
            interval = min(context.config.sampling.interval_seconds, _MAX_INTERVAL_SECONDS)
            sampled = _take_samples(selector, scheduler, page_owners, interval)
    except (SourceError, SchedulerError, ConfigError) as err:
        yield Finding(SAMPLE, "sample", FAIL, *split_advice(str(err), "see above"))
        return
    for finding in (*_sample_findings(sampled, scheduler.name), *_prices(context, sampled)):
        yield finding if mask is None else replace(finding, message=mask.text(finding.message))


def _scheduler(context: CheckContext, mask: UserMask | None) -> Scheduler:
    """Open the scheduler as the daemon does, with user names as privacy.users requires."""
    scheduler = choose_scheduler(context.config)
    return scheduler if mask is None else MaskedScheduler(scheduler, mask)


def _take_samples(
    selector: SourceSelector, scheduler: Scheduler, page_owners: PageOwners | None, interval: float
) -> SampledStatus:
    """Read at least POLLS times; continue for a while until the scheduler has its first state."""
    sampled, number, deadline = SampledStatus(), 0, time.monotonic() + _FIRST_STATE_SECONDS
    while number < POLLS or (sampled.state is None and time.monotonic() < deadline):
        if number:
            time.sleep(interval)
        now = time.monotonic_ns() // MS * MS
        sampled.began = sampled.began if number else now
        batch = selector.read(now)
        sampled.ended, sampled.devices = now, batch.devices
        sampled.readings += batch.readings
        sampled.faults |= {fault.kind: fault for fault in batch.faults}
        named = page_owners and page_owners.poll(now, batch.devices, batch.owner_labels)
        if named:
            sampled.state, sampled.trouble = named, ""
            sampled.faults |= {fault.kind: fault for fault in named.faults}
        else:
            _poll_scheduler(sampled, scheduler, now, batch.readings)
        number += 1
    sampled.source = selector.name
    return sampled


def _poll_scheduler(sampled: SampledStatus, scheduler: Scheduler, now: int, readings: tuple[Reading, ...]) -> None:
    try:
        state = scheduler.poll(now, sampled.devices, readings)
    except SchedulerError as err:
        sampled.trouble = str(err)
        return
    sampled.trouble, sampled.state = "", state or sampled.state
    if state is not None:
        sampled.faults |= {fault.kind: fault for fault in state.faults}


def _sample_findings(sampled: SampledStatus, scheduler: str) -> Iterator[Finding]:
    boards = [device for device in sampled.devices if not device.parent]
    cut = len(sampled.devices) - len(boards)
    more = f", {cut} MIG instances" if cut else ""
    yield Finding(SAMPLE, "gpus", OK, f"{len(boards)} GPUs{more}, by {sampled.source}")
    yield _observed_share(sampled)
    yield from _signals(sampled)
    yield _holders(sampled, scheduler)
    for fault in sampled.faults.values():
        yield Finding(SAMPLE, fault.kind, WARN, *split_advice(fault.message, "see the daemon's log for more"))


def _prices(context: CheckContext, sampled: SampledStatus) -> Iterator[Finding]:
    """Report boards that no configured price fits."""
    config = context.config
    if not config.prices:
        return
    prices, pool = tuple(row.price for row in config.prices), config.host.pool
    missing = unpriced_models(prices, sampled.devices, pool=pool, wall_ns=time.time_ns())
    if missing:
        message = f"no row of [[prices]] fits {', '.join(missing)}: what these GPUs cost is counted in GPU-hours"
        do = "add a row with that model, or one without a model, which fits all"
        yield Finding(SAMPLE, "prices", WARN, message, do)
    else:
        yield Finding(SAMPLE, "prices", OK, "every GPU has a price")
    elsewhere = unmatched_models(prices, sampled.devices)
    unknown = [model for model in elsewhere if model in config.unknown_price_models]
    if elsewhere:
        here = sorted({device.model for device in sampled.devices if not device.parent})
        message = f"rows of [[prices]] for {', '.join(elsewhere)} fit no GPU here: these are {', '.join(here)}"
        do = f"correct {', '.join(unknown)}: no table of specifications knows such a model" if unknown else ""
        yield Finding(SAMPLE, "prices elsewhere", WARN if unknown else INFO, message, do)


def _observed_share(sampled: SampledStatus) -> Finding:
    """Share of time that trusted readings of all devices cover; the last reading may not cover the end yet."""
    expected = [device for device in sampled.devices if device.weight]
    whole = (sampled.ended - sampled.began) * len(expected)
    believed = sum(
        reading.end - max(reading.start, sampled.began) for reading in sampled.readings if not reading.distrust
    )
    share = min(1.0, believed / whole) if whole else 0.0
    message = (
        f"{100 * share:.0f} % of {(sampled.ended - sampled.began) / SECOND:.1f} s observed on {len(expected)} devices"
    )
    if share > 0:
        return Finding(SAMPLE, "observed", OK, message)
    kinds = Counter(reading.distrust for reading in sampled.readings)
    details = f"{message}: {', '.join(kinds) or 'no reading came'}"
    return Finding(SAMPLE, "observed", WARN, details, "check again in a minute; if it stays, send a --bundle")


def _signals(sampled: SampledStatus) -> Iterator[Finding]:
    if not sampled.readings:
        return
    lacking = {device.uuid: set(device.lacks) for device in sampled.devices}
    missing = [
        name for name in _EXPECTED_SIGNALS if not any(_provides(reading, name, lacking) for reading in sampled.readings)
    ]
    if missing:
        message = f"missing on all GPUs: {', '.join(missing)}"
        yield Finding(SAMPLE, "signals", INFO, message, "docs/sources.md lists the signals of each source")
    else:
        yield Finding(SAMPLE, "signals", OK, f"all {len(_EXPECTED_SIGNALS)} expected signals")


def _provides(reading: Reading, name: str, lacking: dict[str, set[str]]) -> bool:
    value: Any = getattr(reading, name)
    return value is not None or name in lacking.get(reading.uuid, ())


def _holders(sampled: SampledStatus, scheduler: str) -> Finding:
    if sampled.trouble:
        return Finding(SAMPLE, "holders", FAIL, *split_advice(sampled.trouble, "see the scheduler's findings above"))
    if sampled.state is None:
        message = f"{scheduler} has not reported allocations yet"
        return Finding(
            SAMPLE, "holders", INFO, message, "it needs an answer from its controller: check again in a minute"
        )
    held: dict[str, Allocation] = {each.uuid: each for each in sampled.state.allocations if each.end is None}
    jobs = {allocation.owner.job_id for allocation in held.values()}
    if any(allocation.owner.scheduler == DCGM_EXPORTER for allocation in held.values()):
        scheduler = "labels of dcgm-exporter's page, at second hand"
    return Finding(SAMPLE, "holders", OK, f"{scheduler}: allocated GPUs or instances: {len(held)}, jobs: {len(jobs)}")
