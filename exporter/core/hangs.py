"""The hang that a job is in now: since when, on which GPUs, what it has cost so far, and what to do about it.

A hang begins when its GPUs begin to spin, minutes before it is confirmed. The ledger books the time before that as
other leaks and does not rewrite it, so whoever shows a hang shows these seconds as part of it.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from exporter.core.findings import describe_culprit
from exporter.core.ledger import Gpu
from exporter.core.model import PPM, SECOND, Device, HangFinding, State

HUNG = State.HUNG.value
"""The leak of a hang has the name of the state."""
CULPRIT = "culprit"
"""Reason of a hung GPU that does not spin itself."""
_NAMED_PIDS = 4
_SHOWN_HOURS = 0.005
"""Fewer GPU-hours round to 0.00."""


class HungGpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU of a job that hangs."""

    gpu: str
    """The driver's index, or the UUID."""
    spins: bool
    """False: the others wait for it."""
    since: float
    """Unix seconds at which it began to make no progress in this hang."""
    pids: tuple[int, ...] = ()


class Hang(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hang of one job on one node that lasts."""

    since: float
    """Unix seconds at which the first GPU began to spin; in a crash loop, at which the first attempt failed."""
    count: int
    """Number of its GPUs."""
    gpus: tuple[HungGpu, ...] = ()
    """Empty: only their number is known."""
    seconds: float = 0.0
    """GPU-seconds since then; a MIG instance or a shared GPU counts by its share."""
    unconfirmed_seconds: float = 0.0
    """Those of them before the hang was confirmed: they are booked as other leaks."""
    culprit: str = ""
    """The rank that the others wait for, for display; empty: not known."""
    culprit_pid: int = 0
    culprit_host: str = ""
    crash_loop: bool = False
    """The job's processes crash again and again without getting to work."""


def current_hang(name: str, holding: Iterable[Gpu], finding: HangFinding | None, *, at: int, wall: int) -> Hang | None:
    """Return the job's hang at monotonic time `at`, which is Unix time `wall`; None if none is confirmed."""
    hung = [gpu for gpu in holding if gpu.state_of(name) is State.HUNG]
    if not hung:
        return None
    own = [_times(gpu) for gpu in hung if gpu.reason != CULPRIT] or [(gpu.since, gpu.since) for gpu in hung]
    began, confirmed = min(start for start, _ in own), min(sure for _, sure in own)
    gpus, seconds, unconfirmed = list[HungGpu](), 0.0, 0.0
    for gpu in hung:
        start, sure = _times(gpu) if gpu.reason != CULPRIT else _times_of_culprit(gpu, began, confirmed)
        gpus.append(_hung_gpu(gpu, since=(wall - (at - start)) / SECOND))
        seconds += _share(gpu) * (at - start) / SECOND
        unconfirmed += _share(gpu) * (sure - start) / SECOND
    return Hang(
        since=(wall - (at - began)) / SECOND,
        count=len(hung),
        gpus=tuple(gpus),
        seconds=seconds,
        unconfirmed_seconds=unconfirmed,
        culprit="" if finding is None else describe_culprit(finding),
        culprit_pid=0 if finding is None else finding.pid,
        culprit_host="" if finding is None else finding.host,
        crash_loop=all(_crashes(gpu) for gpu in hung),
    )


def _crashes(gpu: Gpu) -> bool:
    return gpu.timers.looping and gpu.timers.spin_since is None


def _times(gpu: Gpu) -> tuple[int, int]:
    """Return when a GPU stopped to make progress, and when that was confirmed, monotonic nanoseconds.

    Its state may be younger than the hang: it also begins anew after a reading that is missing.
    """
    timers = gpu.timers
    if timers.spin_since is None:
        return (min(timers.failing_since, gpu.since) if timers.looping else gpu.since), gpu.since
    start = min(timers.spin_since, gpu.since)
    return start, min(gpu.since, start + timers.hang)


def _times_of_culprit(gpu: Gpu, began: int, confirmed: int) -> tuple[int, int]:
    """Return the same of a GPU for which the others have been waiting since `began`: it may have worked after that."""
    start = min(max(began, gpu.timers.worked_at), gpu.since)
    return start, max(start, min(confirmed, gpu.since))


def _share(gpu: Gpu) -> float:
    return gpu.device.weight / PPM / max(1, len(gpu.holders))


def _hung_gpu(gpu: Gpu, *, since: float) -> HungGpu:
    processes = (gpu.reading and gpu.reading.processes) or ()
    return HungGpu(
        gpu=gpu_name(gpu.device),
        spins=gpu.reason != CULPRIT,
        since=since,
        pids=tuple(sorted(process.pid for process in processes)),
    )


def gpu_name(device: Device) -> str:
    """Return the driver's index, or the UUID if the driver has none."""
    return device.index or device.uuid


# -- as text --


def describe_hang(hang: Hang) -> str:
    """Say which GPUs do what: "GPUs 0, 1 spin without progress; GPU 2 (pid 7) does not, the others wait for it"."""
    if hang.crash_loop:
        return f"its processes on {_named(hang.gpus) or _counted(hang)} crash again and again and never get to work"
    spinning, waited_for = [gpu for gpu in hang.gpus if gpu.spins], _waited_for(hang)
    spin = f"{_named(spinning)} spin{'s' if len(spinning) == 1 else ''} without progress" if spinning else ""
    waits = f"waits for {hang.culprit}" if hang.culprit else ""
    if waited_for and not waits:
        waits = (
            f"{_named(waited_for, pids=True)} {'does' if len(waited_for) == 1 else 'do'} not, the others wait for it"
        )
    return "; ".join(filter(None, (spin or f"{_counted(hang)} hang{'s' if hang.count == 1 else ''}", waits)))


def names_rank(hang: Hang) -> bool:
    """Whether the rank or the GPU that the others wait for is known."""
    return bool(hang.culprit or _waited_for(hang))


def hang_advice(hang: Hang, *, node: str = "") -> str:
    """Say what to do, in a sentence; with `node`, on which node."""
    if hang.crash_loop:
        return "Read the log of its latest crash, end the job, and mend the cause before it starts again."
    waited_for = _waited_for(hang)
    pid = hang.culprit_pid or next((pid for gpu in waited_for or hang.gpus for pid in gpu.pids), 0)
    place = hang.culprit_host or node if node else ""
    return (
        f"Dump the stacks of {'that rank' if names_rank(hang) else 'two ranks'}"
        f" (py-spy dump{f' --pid {pid}' if pid else ''}{f' on {place}' if place else ''}),"
        " then restart from the last checkpoint."
    )


def hang_cost(hours: float, unconfirmed: float) -> str:
    """Say what a hang has cost, in GPU-hours: "2.00 GPU-hours so far, 0.33 of them before it was confirmed"."""
    text = f"{hours:,.2f} GPU-hours so far"
    return f"{text}, {unconfirmed:,.2f} of them before it was confirmed" if unconfirmed >= _SHOWN_HOURS else text


def _counted(hang: Hang) -> str:
    return f"{hang.count} GPU{'s' if hang.count != 1 else ''}"


def _waited_for(hang: Hang) -> list[HungGpu]:
    return [gpu for gpu in hang.gpus if not gpu.spins]


def _named(gpus: Iterable[HungGpu], *, pids: bool = False) -> str:
    names = [f"{gpu.gpu}{list_pids(gpu.pids, ' (pid {})') if pids else ''}" for gpu in gpus]
    return f"GPU{'s' if len(names) != 1 else ''} {', '.join(names)}" if names else ""


def list_pids(pids: Sequence[int], text: str = "{}") -> str:
    """List process ids within a text, not more than four; empty if there are none."""
    listed = ", ".join(map(str, pids[:_NAMED_PIDS])) + (", ..." if pids[_NAMED_PIDS:] else "")
    return text.format(listed) if pids else ""
