"""What each of several processes on one GPU used of it, as the driver samples it.

Owns the meaning of NVML's per-process samples, and up to where those of a GPU have been taken. Refuses to ask for a GPU
with one process, of which the whole is its own, or in MIG mode, where NVML has no such samples.

Facts, of nvml.h 13 (nvmlDeviceGetProcessUtilization; nvmlDeviceGetProcessesUtilizationInfo says the same of the SMs and
adds JPEG and optical flow): an entry a process with some use since a time stamp, in whole percent; Maxwell and newer;
NOT_FOUND when there is no entry; time stamps are the CPU's, in microseconds; not on a GPU in MIG mode. Of NVIDIA's open
kernel modules (ctrl2080perf.h): the driver keeps the last 72 samples (100 in older ones), and each names one process
for the SMs. nvidia-smi(1) has such samples taken every 1/6 to 1 s. So a second's shares are coarse, a minute's are
fair, and a process between two samples has none.

Of no document, but seen by others (nvtop's issue 110): entries of no process, over 100 %, or older than asked for.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from exporter.core.model import Process

Samples = Callable[[Any, int], list[Any]]
"""Takes a handle and a time stamp, gives what is newer; raises NVMLError."""
_ALL = 100
"""Percent."""
_SILENCE = 30
"""Reads in a row without a new sample after which the time stamp is not believed: a clock set back, or a stray stamp
from years ahead, would hide every sample to come."""


class Taken:
    """Up to where a GPU's samples have been taken."""

    def __init__(self) -> None:
        self.stamp: int | None = None
        """In microseconds, 0 when there has been no sample; None: not known, so what is there may be old."""
        self.silence = 0
        """Reads in a row without a new sample."""


def samples_of(nvml: Any) -> tuple[Samples, ...]:
    """Give the binding's calls, the one that every driver has first."""
    return nvml.nvmlDeviceGetProcessUtilization, nvml.nvmlDeviceGetProcessesUtilizationInfo


def with_use(
    nvml: Any, samples: Samples, *, handle: Any, taken: Taken, listed: tuple[Process, ...]
) -> tuple[Process, ...]:
    """Give `listed` with each one's `sm_active`, the mean of its samples since the last time; raises NVMLError.

    Without a sample while others have some it is 0. None: nobody listed has any (which may be rest, or a sampler slower
    than we are), its only ones are no percentage, or it is the first time and they may be from before.
    """
    since, taken.stamp = taken.stamp, None
    newer = [each for each in _asked(nvml, samples, handle, since or 0) if each.timeStamp > (since or 0)]
    sound = [each for each in newer if each.smUtil <= _ALL]
    if not sound:
        taken.silence += 1
        taken.stamp = (since or 0) if taken.silence % _SILENCE else None
        return listed
    taken.silence, taken.stamp = 0, max(each.timeStamp for each in sound)
    by_pid = _by_pid(sound)
    if since is None or not any(process.pid in by_pid for process in listed):
        return listed
    unsound = {each.pid for each in newer} - by_pid.keys()
    return tuple(process if process.pid in unsound else _used(process, by_pid) for process in listed)


def _asked(nvml: Any, samples: Samples, handle: Any, since: int) -> list[Any]:
    try:
        return samples(handle, since)
    except nvml.NVMLError as error:
        # The binding also raises when a driver has nothing to say and calls that a success.
        if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS):
            raise
        return []


def _by_pid(sound: list[Any]) -> dict[int, list[int]]:
    """Collect percentages by process: NVML promises one entry each, two would both count."""
    by_pid: dict[int, list[int]] = {}
    for each in sound:
        by_pid.setdefault(each.pid, []).append(each.smUtil)
    return by_pid


def _used(process: Process, by_pid: dict[int, list[int]]) -> Process:
    found = by_pid.get(process.pid, [0])
    return replace(process, sm_active=sum(found) / len(found) / _ALL)
