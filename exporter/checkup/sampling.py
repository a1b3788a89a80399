"""What a scrape would show: the configured source and scheduler, looked at as the daemon does, for three intervals.

Owns a few looks and the shares they give. Refuses to write anything down, to take what workloads report (a running
daemon has their socket), and to go on when something does not answer.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Findings, Here, said_and_do
from exporter.checkup.telemetry import no_source, paused
from exporter.config import ConfigError
from exporter.core.model import MS, SECOND, Allocation, Device, Fault, Reading
from exporter.schedulers import Scheduler, SchedulerError, Word
from exporter.schedulers.choice import choose
from exporter.schedulers.telling import Mask, Telling, open_mask
from exporter.sources import SourceError
from exporter.sources.ladder import Ladder, open_ladder

SAMPLE = "sample"
LOOKS = 4
"""The first sets the baseline: three intervals."""
_LONGEST = 1.0
"""Seconds between two looks, however long the daemon's own interval is."""
_FIRST_WORD = 4.0
"""Seconds that a scheduler is given for it."""
_WANTED = (
    "gr_engine_active", "sm_active", "tensor_active", "dram_active", "power_watts", "energy_joules", "sm_clock_hz",
    "memory_used_bytes", "pcie_tx_bytes_per_second", "nvlink_tx_bytes_per_second", "processes",
)  # fmt: skip
"""Signals without which something cannot be told."""


class Seen(Struct):
    """All looks together."""

    began: int = 0
    ended: int = 0
    source: str = ""
    devices: tuple[Device, ...] = ()
    readings: list[Reading] = []
    word: Word | None = None
    trouble: str = ""
    """Why the scheduler could not be asked, the last time."""
    faults: dict[str, Fault] = {}
    """By kind, the newest."""


def look_at_sample(here: Here, before: Findings) -> Iterator[Finding]:
    """GPUs, signals, the share of time that was seen, holders."""
    if paused(before) or no_source(before) or any("gave no answer" in finding.said for finding in before):
        yield Finding(SAMPLE, "sample", INFO, "nothing is sampled: see above what is in the way")
        return
    try:
        mask = open_mask(here.config.privacy)
        with closing(_scheduler(here, mask)) as scheduler, closing(open_ladder(here.config)) as ladder:
            seen = _looked(ladder, scheduler, min(here.config.sampling.interval_seconds, _LONGEST))
    except (SourceError, SchedulerError, ConfigError) as err:
        yield Finding(SAMPLE, "sample", FAIL, *said_and_do(str(err), "see above"))
        return
    for finding in _told(seen, scheduler.name):
        yield finding if mask is None else replace(finding, said=mask.text(finding.said))


def _scheduler(here: Here, mask: Mask | None) -> Scheduler:
    """As the daemon has it: people are told as privacy.users says."""
    scheduler = choose(here.config)
    return scheduler if mask is None else Telling(scheduler, mask)


def _looked(ladder: Ladder, scheduler: Scheduler, interval: float) -> Seen:
    """At least so many looks; more of them while a scheduler, which asks somebody else, has not said a word yet."""
    seen, number, deadline = Seen(), 0, time.monotonic() + _FIRST_WORD
    while number < LOOKS or (seen.word is None and time.monotonic() < deadline):
        if number:
            time.sleep(interval)
        now = time.monotonic_ns() // MS * MS
        seen.began = seen.began if number else now
        batch = ladder.read(now)
        seen.ended, seen.devices = now, batch.devices
        seen.readings += batch.readings
        seen.faults |= {fault.kind: fault for fault in batch.faults}
        _listen(seen, scheduler, now, batch.readings)
        number += 1
    seen.source = ladder.name
    return seen


def _listen(seen: Seen, scheduler: Scheduler, now: int, readings: tuple[Reading, ...]) -> None:
    try:
        word = scheduler.look(now, seen.devices, readings)
    except SchedulerError as err:
        seen.trouble = str(err)
        return
    seen.trouble, seen.word = "", word or seen.word
    if word is not None:
        seen.faults |= {fault.kind: fault for fault in word.faults}


def _told(seen: Seen, scheduler: str) -> Iterator[Finding]:
    boards = [device for device in seen.devices if not device.parent]
    cut = len(seen.devices) - len(boards)
    more = f", {cut} MIG instances" if cut else ""
    yield Finding(SAMPLE, "gpus", OK, f"{len(boards)} GPUs{more}, by {seen.source}")
    yield _share(seen)
    yield from _signals(seen)
    yield _holders(seen, scheduler)
    for fault in seen.faults.values():
        yield Finding(SAMPLE, fault.kind, WARN, *said_and_do(fault.message, "see the daemon's log for more"))


def _share(seen: Seen) -> Finding:
    """Time that trusted readings cover, of all devices: late sources have not told the end of it yet."""
    expected = [device for device in seen.devices if device.weight]
    whole = (seen.ended - seen.began) * len(expected)
    believed = sum(reading.end - max(reading.start, seen.began) for reading in seen.readings if not reading.distrust)
    share = min(1.0, believed / whole) if whole else 0.0
    said = f"{100 * share:.0f} % of {(seen.ended - seen.began) / SECOND:.1f} s were seen on {len(expected)} devices"
    if share > 0:
        return Finding(SAMPLE, "observed", OK, said)
    kinds = Counter(reading.distrust for reading in seen.readings)
    words = f"{said}: {', '.join(kinds) or 'no reading came'}"
    return Finding(SAMPLE, "observed", WARN, words, "look again in a minute; if it stays, send a --bundle")


def _signals(seen: Seen) -> Iterator[Finding]:
    if not seen.readings:
        return
    lacking = {device.uuid: set(device.lacks) for device in seen.devices}
    missing = [name for name in _WANTED if not any(_gives(reading, name, lacking) for reading in seen.readings)]
    if missing:
        said = f"not seen on any GPU: {', '.join(missing)}"
        yield Finding(SAMPLE, "signals", INFO, said, "docs/sources.md says which source gives what")
    else:
        yield Finding(SAMPLE, "signals", OK, f"all {len(_WANTED)} that are looked for")


def _gives(reading: Reading, name: str, lacking: dict[str, set[str]]) -> bool:
    value: Any = getattr(reading, name)
    return value is not None or name in lacking.get(reading.uuid, ())


def _holders(seen: Seen, scheduler: str) -> Finding:
    if seen.trouble:
        return Finding(SAMPLE, "holders", FAIL, *said_and_do(seen.trouble, "see above what the scheduler said"))
    if seen.word is None:
        said = f"{scheduler} has not said yet who holds the GPUs"
        return Finding(SAMPLE, "holders", INFO, said, "it needs an answer from its controller: look again in a minute")
    held: dict[str, Allocation] = {one.uuid: one for one in seen.word.allocations if one.end is None}
    jobs = {one.owner.job_id for one in held.values()}
    return Finding(SAMPLE, "holders", OK, f"{scheduler}: {len(jobs)} jobs hold {len(held)} GPUs or instances")
