"""The sources of telemetry, each opened, read once and closed again, in the order in which the ladder asks them.

Owns which of them is here, which sees tensor activity, and the difference between one that is absent and one that is
broken. Refuses to read while somebody has asked for a pause: opening DCGM would take the counters from his profiler.
DCGM is made to watch for the second that this takes, and forgets it with the connection.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from exporter.agent.pause import PauseFile
from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Findings, Here, Verdict, named, said_and_do
from exporter.checkup.driver import SEES
from exporter.config import Config
from exporter.core.model import MS
from exporter.schedulers.slurm.places import read_uuids
from exporter.sources import SOURCES, Batch, Source, SourceError, open_source
from exporter.sources.dcgm.describing import describe_dcgm, engine_version

TELEMETRY = "telemetry"
_SIGHT = "tensor_active"
_REFUSED = ("profiling_refused",)


def look_for_pause(here: Here, _: Findings) -> Iterator[Finding]:
    """A pause keeps us from the counters, as it does the daemon."""
    if not here.config.sampling.pause_file:
        return
    words = PauseFile(here.config.sampling.pause_file).look()
    if words:
        do = "`gpu-efficiency resume` when the profiler is done, then check again"
        yield Finding(TELEMETRY, "pause", WARN, f"sources are not opened: {words}", do)


def paused(before: Findings) -> bool:
    """Whether nothing may be opened."""
    return any(named(before, "pause"))


def needs(name: str) -> Callable[[Config], bool]:
    """Whether the configuration names that source and no other."""
    return lambda config: config.source == name


def look_at_dcgm(here: Here, before: Findings) -> Iterator[Finding]:
    """Bindings, library, host engine, its GPUs, the profiling module."""
    if not here.wants("dcgm") or paused(before):
        return
    try:
        told = describe_dcgm(here.config)
    except SourceError as err:
        absent = "are not in" in str(err) and not here.config.dcgm.bindings
        yield _refused(here, "dcgm", err, absent=absent)
        return
    library = told.library or "of an unknown version"
    yield Finding(TELEMETRY, "dcgm bindings", OK, f"bindings in {told.place}, libdcgm {library}")
    if here.config.dcgm.address != "embedded":
        try:
            version = engine_version(here.config)
        except SourceError as err:
            yield _refused(here, "dcgm", err)
            return
        said = f"the host engine at {here.config.dcgm.address} answers{f', version {version}' if version else ''}"
        yield Finding(TELEMETRY, "dcgm engine", OK, said)
    yield from _opened(here, "dcgm")


def look_at_dcgm_exporter(here: Here, before: Findings) -> Iterator[Finding]:
    """The page, whose GPUs are on it, and whether it has the profiling fields."""
    if not here.wants("dcgm-exporter") or paused(before):
        return
    yield from _opened(here, "dcgm-exporter", absent=lambda said: "Connection refused" in said)


def look_at_nvml(here: Here, before: Findings) -> Iterator[Finding]:
    """The driver's own library, as a source."""
    if not here.wants("nvml") or paused(before):
        return
    yield from _opened(here, "nvml", absent=lambda said: "not found" in said)


def _opened(here: Here, name: str, absent: Callable[[str], bool] = lambda _: False) -> Iterator[Finding]:
    try:
        source = open_source(name, here.config)
    except SourceError as err:
        yield _refused(here, name, err, absent=absent(str(err)))
        return
    try:
        batch = source.read(time.monotonic_ns() // MS * MS)
        yield from _told(here, name, source, batch)
    except SourceError as err:
        yield _refused(here, name, err)
    finally:
        source.close()


def _refused(here: Here, name: str, err: SourceError, *, absent: bool = False) -> Finding:
    verdict: Verdict = FAIL if needs(name)(here.config) else INFO if absent else WARN
    return Finding(TELEMETRY, name, verdict, *said_and_do(str(err), _ADVICE[name]))


_ADVICE = {
    "dcgm": "set dcgm.bindings, dcgm.library and dcgm.address to what is here, or name another source",
    "dcgm-exporter": "set dcgm_exporter.url to this node's own exporter, or name another source",
    "nvml": "run `nvidia-smi` as this user, or name another source",
}


def _told(here: Here, name: str, source: Source, batch: Batch) -> Iterator[Finding]:
    boards = [device for device in batch.devices if not device.parent]
    if not boards:
        yield _refused(here, name, SourceError("opens, but lists no GPU: does `nvidia-smi -L`?"))
        return
    yield Finding(TELEMETRY, name, OK, f"opens, and lists {len(boards)} GPUs")
    ill = [f"GPU {board.index or board.uuid} is {board.condition}" for board in boards if board.condition]
    if ill:
        yield Finding(TELEMETRY, f"{name} boards", WARN, "; ".join(ill), "find the Xid in `dmesg`, reset or drain it")
    if name == "dcgm-exporter":
        yield from _same_machine(here, {board.uuid for board in boards})
    yield from _sight(here, name, source, batch)


def _sight(here: Here, name: str, source: Source, batch: Batch) -> Iterator[Finding]:
    """Whether the counters are seen, on all boards or on some."""
    check, needed = f"{name} profiling", needs(name)(here.config)
    sees, refused = _SIGHT in source.signals, [f.message for f in batch.faults if f.kind in _REFUSED]
    if sees:
        yield Finding(TELEMETRY, check, OK, "gives tensor activity and the other profiling signals")
    elif not refused:
        said = "gives no tensor activity: kernel time stays unresolved"
        yield Finding(TELEMETRY, check, WARN if needed else INFO, said, _MORE[name])
    if refused:
        boards = sum(not device.parent for device in batch.devices)
        said = f"{len(refused)} of {boards} GPUs are not profiled: {refused[0]}"
        verdict: Verdict = WARN if sees or needed else INFO
        yield Finding(TELEMETRY, f"{name} unprofiled" if sees else check, verdict, said, _MORE[name])


_MORE = {
    "dcgm": "install datacenter-gpu-manager-4-proprietary for its profiling module, and run the host engine as root",
    "dcgm-exporter": "give dcgm-exporter a counters file (-f) with DCGM_FI_PROF_* fields, and what they need to run",
    "nvml": "boards before Hopper have no counters in NVML: install DCGM",
}


def _same_machine(here: Here, listed: set[str]) -> Iterator[Finding]:
    """The driver's list of UUIDs beside the page's: an address that another node answers gives bills to the wrong."""
    here_uuids = set(read_uuids(Path(here.config.host.proc)).values())
    if here_uuids and listed.isdisjoint(here_uuids):
        said = f"the page shows {len(listed)} GPUs, none of them is one of the {len(here_uuids)} of this machine"
        do = "set dcgm_exporter.url to this node's own exporter (host IP and port): a Service answers for any node"
        yield Finding(TELEMETRY, "dcgm-exporter host", FAIL, said, do)
    elif here_uuids:
        yield Finding(TELEMETRY, "dcgm-exporter host", OK, "the page's GPUs are this machine's")


def look_at_choice(_: Here, before: Findings) -> Iterator[Finding]:
    """Which source the daemon will use, or that there is none."""
    if paused(before):
        return
    works = [finding.check for finding in named(before, *SOURCES) if finding.verdict is OK]
    sees = [name for name in works if any(f.verdict is OK for f in named(before, f"{name} profiling"))]
    if not works:
        said = "no source of telemetry works: there is nothing to watch"
        do = "see above what each one said; `gpu-efficiency demo` serves a simulated node meanwhile"
        yield Finding(TELEMETRY, "source", FAIL, said, do)
        return
    said = f"the daemon will read {(sees or works)[0]}"
    if sees:
        yield Finding(TELEMETRY, "source", OK, f"{said}, which sees tensor activity")
        return
    do = "; ".join(dict.fromkeys(finding.do for finding in named(before, *SEES) if finding.do))
    yield Finding(TELEMETRY, "source", WARN, f"{said}, and no source here sees tensor activity", do)


def no_source(findings: Findings) -> bool:
    """Whether there is nothing to watch."""
    return any(finding.verdict is FAIL for finding in named(findings, "source"))
