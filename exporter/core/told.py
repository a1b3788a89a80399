"""What a workload has said, as the leaks of one GPU draw on it: one `Voice` a GPU and job.

A report says how long a phase lasted, or how many FLOPs moved the model, over an interval that is past and booked.
Entries are never reversed; so what is told is a *balance*, in nanoseconds of this GPU, that fills when the report comes
and that the matching leak, or `useful`, draws down from then on: never more than was told, never more than the
hardware's own pool holds. A phase that is told when it begins fills its balance as it goes on; if it turns out to have
been shorter the balance owes the rest. Owns the balances; refuses the figures of a whole job, which are `progress`'s.
"""

from typing import NamedTuple

from exporter.core.model import MS, NEVER, PPM, SECOND, Device, Report, Serving
from exporter.core.policy import Policy
from exporter.core.served import Shares, shares_of

DATA, CHECKPOINT, RESTORE, STARTUP, COMMUNICATION, BUBBLE, MODEL, AGAIN, EXPLAINED = range(9)
"""Balances: waiting for input, saving, restoring, starting, exposed communication, pipeline bubbles; FLOPs of steps
that moved the model, and of steps that had been made before; tensor work that recomputation explains."""
_PHASE_OF = ("data", "checkpoint", "restore", "startup", "communication", "bubble")
_UNJUDGED = frozenset({"startup", "evaluation", "idle"})
"""Phases in which tensor work is no training step, and no FLOPs are told of it."""
FULL_RECOMPUTE = PPM // 4
"""Of tensor work: 2 of 8 FLOPs a parameter and token are the second forward pass."""
_LONGEST = 300 * SECOND
"""Between two readings, by configuration."""
_STEADY = 10 * SECOND
"""E: reports, readings and the GPU's queue of kernels are out of step by less than this."""


class Rework(NamedTuple):
    """What a report tells of steps that were made before."""

    share: float
    """Of the interval's steps."""
    goes_on: bool
    """The next step is one too."""


class Voice:
    """What one job says, as far as it is about one GPU."""

    __slots__ = (
        "accrued", "credit", "judged", "judged_until", "opened", "own_at", "pace", "phase", "recompute",
        "rework", "shares", "shares_until", "speaks", "stale", "stride", "turned", "unseen",
    )  # fmt: skip

    def __init__(self) -> None:
        self.credit, self.accrued = [0] * 9, [0] * 9
        """Nanoseconds of this GPU, and those of them that an open phase has added since the last report."""
        self.speaks: set[int] = set()
        """Balances that were ever told of: of the others the hardware's estimate holds."""
        self.phase, self.opened = -1, 0
        """The balance that an open phase fills, and since when; -1: none."""
        self.judged, self.turned, self.judged_until = False, NEVER, NEVER
        """Model FLOPs are told of what the GPU does now; since when that is so, or is not; and until when the last
        report speaks for it."""
        self.stale = NEVER
        """When what was said last is too old."""
        self.pace = self.stride = 0
        """Nanoseconds from report to report, and those booked at a time, at most, of late."""
        self.unseen = 0
        """Nanoseconds since the last report in which nobody saw the GPU: what was told of them was not booked."""
        self.own_at = NEVER
        """When a process that works on this very GPU spoke last."""
        self.recompute = 0
        """Share of the tensor work that the recomputation policy explains, ppm."""
        self.rework = False
        """The step that is being made was made before, and no FLOPs are told of it."""
        self.shares, self.shares_until = Shares(), NEVER

    def hear(
        self, report: Report, device: Device, at: int, *, policy: Policy, gpus: int, rework: Rework, since: int = NEVER
    ) -> None:
        """Take in a report, at whose moment `at` nothing after `at` is booked; its figures are of `gpus` GPUs.

        The GPU has been watched since `since`.
        """
        lasted, first = report.end - report.start, MODEL not in self.speaks
        if lasted:
            self._keep_pace(lasted, at, age=at - report.end)
            unseen, self.unseen = self.unseen + max(0, since - report.start), 0
            seen = max(0, lasted - unseen) / lasted
            self._settle(report, device, gpus=gpus, again=rework.share, seen=seen)
        self._explain(report, policy)
        phase = report.phase
        self.rework = rework.goes_on and MODEL not in self.speaks and phase not in _UNJUDGED
        self.phase = _PHASE_OF.index(phase) if phase in _PHASE_OF else -1
        self.opened = report.end
        self._judge(MODEL in self.speaks and phase not in _UNJUDGED, report.start if first else report.end)
        if self.phase >= 0:
            self.speaks.add(self.phase)
            self.stale = max(self.stale, at + round(policy.phase_patience_seconds * 1000) * MS)

    def _keep_pace(self, lasted: int, at: int, *, age: int) -> None:
        self.pace = max(lasted, self.pace // 2)
        self.stride = max(self.stride, min(age, _LONGEST))
        self.stale = at + max(60 * SECOND, 3 * self.pace)
        self.judged_until = at + self.pace + self.pace // 2 + 2 * SECOND

    def _settle(self, report: Report, device: Device, *, gpus: int, again: float, seen: float) -> None:
        """Add what the interval was told to hold, as far as it was seen, less what open phases have added already."""
        weight, room = device.weight, self._room()
        named = {name for name, _ in report.phases}
        for cause, told in enumerate(_told(report)):
            if told or _PHASE_OF[cause] in named:
                self.speaks.add(cause)
            self._add(cause, round(told * seen) * weight // PPM - self.accrued[cause], room=room * weight // PPM)
            self.accrued[cause] = 0
        peak = peak_of(device, report.dtype)
        if report.model_flops is None or not peak:
            return
        self.speaks.add(MODEL)
        real = 1.0 - (report.padding or 0.0) / report.tokens if report.tokens else 1.0
        model = report.model_flops * real * seen / gpus / peak * SECOND * weight / PPM
        most = round(model * (room / (report.end - report.start)))
        self._add(MODEL, round(model * (1.0 - again)), room=most)
        self._add(AGAIN, round(model * again), room=most)

    def _room(self) -> int:
        """The most that a balance may hold: what may be told before it can be booked, and a little."""
        return 2 * (self.pace + self.stride) + _STEADY

    def _add(self, cause: int, nanoseconds: int, *, room: int) -> None:
        self.credit[cause] = max(-room, min(room, self.credit[cause] + nanoseconds))

    def _explain(self, report: Report, policy: Policy) -> None:
        if report.hardware_flops and report.model_flops is not None:
            self.recompute = round((1.0 - report.model_flops / report.hardware_flops) * PPM)
        elif report.recompute:
            selective = round(policy.selective_recompute_share * PPM)
            self.recompute = {"full": FULL_RECOMPUTE, "selective": selective}.get(report.recompute, 0)

    def attend(self, serving: Serving, device: Device, at: int, *, policy: Policy) -> None:
        """Take in what a serving engine says of this GPU; its first word is of a moment, not of an interval."""
        lasted = serving.end - serving.start
        self.shares = shares = shares_of(serving, policy)
        self._keep_pace(lasted, at, age=at - serving.end)
        self.shares_until = at + 3 * lasted + 5 * SECOND
        peak = peak_of(device)
        if serving.flops is not None and peak and lasted:
            self.speaks.add(MODEL)
            useful = 1.0 - (shares.rejected + shares.again) / PPM
            model = serving.flops * useful / peak * SECOND * device.weight / PPM
            self._add(MODEL, round(model), room=round(model * (self._room() / lasted)))
        self._judge(MODEL in self.speaks, serving.start)

    def _judge(self, judged: bool, since: int) -> None:  # noqa: FBT001  what it is and since when, of one attribute
        if judged is not self.judged:
            self.judged, self.turned = judged, since

    def listen(self, start: int, end: int, weight: int, *, seen: bool = True) -> bool:
        """Whether anything said still holds in [start, end); an open phase fills its balance, of what is `seen`."""
        self.unseen += 0 if seen else end - start
        if start > self.stale or not seen:
            return False
        self.stride = max(end - start, self.stride - self.stride // 16)
        if start > self.shares_until:
            self.shares = Shares()
        if self.phase >= 0 and end > self.opened:
            lasted = (end - max(start, self.opened)) // MS * weight * MS // PPM
            self.credit[self.phase] += lasted
            self.accrued[self.phase] += lasted
        return True

    def judges(self, start: int, end: int) -> bool:
        """Whether tensor work in [start, end) is to be compared with model FLOPs; what most of that time was counts."""
        turned_later = self.turned > (start + end) // 2
        return self.judged is not turned_later and end <= self.judged_until

    def explain(self, tensor: int, ms: int) -> None:
        """Of `tensor` ppm of `ms` milliseconds recomputation may be its share."""
        share = tensor * self.recompute // PPM * ms
        self._add(EXPLAINED, share, room=self._room() // MS * share // ms if ms else 0)

    def can(self, cause: int, ms: int) -> int:
        """Parts per million of `ms` milliseconds that the balance still covers."""
        credit = self.credit[cause]
        return credit // ms if credit > 0 else 0

    def spend(self, cause: int, ppm: int, ms: int) -> None:
        """So much of `ms` milliseconds was booked; what was booked beyond what was told is no debt."""
        credit = self.credit[cause]
        self.credit[cause] = max(credit - ppm * ms, min(credit, 0))


def peak_of(device: Device, dtype: str = "") -> float:
    """Dense FLOP/s in that number format; 0 where it is not known."""
    return (device.spec.peak(dtype) if device.spec is not None else None) or 0.0


def _told(report: Report) -> tuple[int, ...]:
    """Nanoseconds of the interval by balance, MODEL left out.

    A pipeline's bubble is what its schedule leaves empty of the steps, if no phase says it; the program sees it as
    waiting for a neighbour, which is communication to it. Where neither schedule nor bubble is told, a pipeline's
    communication is taken for its bubble (E).
    """
    phases = dict(report.phases)
    told = [phases.get(name, 0) for name in _PHASE_OF]
    if told[BUBBLE] or (not told[COMMUNICATION] and report.bubble is None):
        return tuple(told)
    if report.bubble is not None:
        told[BUBBLE] = bubble_of(report)
        told[COMMUNICATION] = max(0, told[COMMUNICATION] - told[BUBBLE])
    elif report.parallel is not None and report.parallel.pipeline > 1:
        told[BUBBLE], told[COMMUNICATION] = told[COMMUNICATION], 0
    return tuple(told)


def bubble_of(report: Report) -> int:
    """Nanoseconds of the interval's steps that the pipeline's schedule left empty."""
    beside = sum(lasted for name, lasted in report.phases if name not in ("compute", "communication"))
    steps = max(0, report.end - report.start - beside)
    return round((report.bubble or 0.0) * steps)
