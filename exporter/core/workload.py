"""Processes reports of training jobs and serving engines: validates them and keeps the credit that each leak may draw.

A report describes an interval that is already booked, and entries are never reversed. So every reported time becomes a
*balance* in nanoseconds of one GPU (`WorkloadCredit`): it fills when the report arrives, and the matching leak, or
`useful`, draws it down from then on, never beyond what was reported or what the hardware's own pool holds.
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct, field

from exporter.core.collectives import CommunicationLine
from exporter.core.model import (
    MS,
    NARROW_DTYPES,
    NEVER,
    PPM,
    SECOND,
    CollectiveReport,
    Device,
    ServingReport,
    TrainingReport,
)
from exporter.core.policy import Policy
from exporter.core.serving import ServingShares, queued_requests, serving_shares

DATA, CHECKPOINT, RESTORE, STARTUP, COMMUNICATION, BUBBLE, MODEL, REPEATED, RECOMPUTATION = range(9)
"""Balances: waiting for input, saving, restoring, starting, exposed communication, pipeline bubbles; FLOPs of new
steps and of repeated steps; tensor work explained by recomputation."""
_PHASE_OF_BALANCE = ("data", "checkpoint", "restore", "startup", "communication", "bubble")
PHASES_WITHOUT_KERNELS = frozenset({"startup", "restore", "data", "checkpoint", "evaluation", "idle"})
"""Phases in which other processes of the job may wait for the reporting one in a collective."""
_PHASES_WITHOUT_STEPS = frozenset({"startup", "evaluation", "idle"})
"""Phases in which tensor work belongs to no training step, so that reports contain no FLOPs for it."""
FULL_RECOMPUTE = PPM // 4
"""Recomputation's share of tensor work: the second forward pass is 2 of 8 FLOPs per parameter and token."""
_LONGEST_INTERVAL = 300 * SECOND
"""Longest configurable time between two readings."""
_MEMORY = 3600 * SECOND
"""E: a job saves, or evaluates, more often."""
_MAX_SKEW = 10 * SECOND
"""E: upper bound of the skew between reports, readings and the GPU's kernel queue."""


class Rework(NamedTuple):
    """Repeated steps in a report."""

    share: float
    """Share of the interval's steps that are repeated."""
    continues: bool
    """The next step is repeated too."""


class WorkloadCredit(Struct, eq=False):
    """Balances from one job's reports, for one GPU."""

    credit: list[int] = field(default_factory=lambda: [0] * 9)
    """Nanoseconds of this GPU by balance."""
    last: list[int] = field(default_factory=lambda: [0] * 9)
    """The part of them that the last report added."""
    accrued: list[int] = field(default_factory=lambda: [0] * 9)
    """The part of them added by an open phase since the last report."""
    known: set[int] = set()
    """Balances that were ever reported; for all others the estimate from hardware counters applies."""
    phase: int = -1
    """Balance that the open phase fills; -1: none."""
    phase_since: int = 0
    flops_reported: bool = False
    """Reports cover the current work with model FLOPs."""
    flops_changed_at: int = NEVER
    """When that last changed."""
    flops_until: int = NEVER
    """Until when the last report counts for it."""
    stale_at: int = NEVER
    """When the last report expires."""
    report_interval: int = 0
    """Recent maximum of nanoseconds between reports."""
    longest_interval: int = 0
    longest_at: int = NEVER
    """The longest of about an hour, and when it ended: a job that saved for minutes will do so again."""
    booking_interval: int = 0
    """Recent maximum of nanoseconds booked at a time."""
    unobserved: int = 0
    """Unobserved nanoseconds since the last report; what the next report says about them was not booked."""
    own_report_at: int = NEVER
    """When a process that uses this GPU last reported."""
    recompute: int = 0
    """Share of tensor work due to recomputation, ppm."""
    explained: bool = True
    """What tensor work beyond the reported FLOPs and recomputation is: padding. Otherwise it may be useful."""
    model_rate: float = 0.0
    """Recent maximum of the tensor time at the peak that reports account for, per time."""
    rework: bool = False
    """The current step is repeated, and reports contain no FLOPs."""
    queued: bool = False
    """Requests were queued at the serving engine's last report."""
    shares: ServingShares = ServingShares()
    shares_until: int = NEVER
    communication: CommunicationLine = field(default_factory=CommunicationLine)
    """Communication that a profiler plugin timed."""

    def add_report(
        self,
        report: TrainingReport,
        device: Device,
        at: int,
        *,
        policy: Policy,
        gpus: int,
        rework: Rework,
        since: int = NEVER,
        measured: int = 0,
        share: float = 1.0,
    ) -> None:
        """Apply a report at time `at`, up to which time is booked; its figures are totals of `gpus` GPUs.

        `since`: start of the GPU's book; `measured`: nanoseconds that are booked as start-up already; `share`: the part
        of the process's phases that this GPU spends in them.
        """
        duration, first = report.end - report.start, MODEL not in self.known
        if duration:
            self._update_interval(duration, at, age=at - report.end)
            if duration >= self.longest_interval or at - self.longest_at > _MEMORY:
                self.longest_interval, self.longest_at = duration, at
            self.stale_at = max(self.stale_at, at + self.longest_interval + self.longest_interval // 2)
            unseen, self.unobserved = self.unobserved + max(0, since - report.start), 0
            seen = max(0, duration - unseen) / duration
            times = [round(nanoseconds * share) for nanoseconds in _phase_times(report)]
            self._settle_report(report, device, times, gpus=gpus, repeated=rework.share, seen=seen, measured=measured)
        self._set_recompute(report, policy)
        phase = report.phase
        self.rework = rework.continues and MODEL not in self.known and phase not in _PHASES_WITHOUT_STEPS
        self.phase = _PHASE_OF_BALANCE.index(phase) if phase in _PHASE_OF_BALANCE else -1
        self.phase_since = report.end
        self._set_flops_reported(
            MODEL in self.known and phase not in _PHASES_WITHOUT_STEPS, report.start if first else report.end
        )
        if self.phase >= 0:
            self.known.add(self.phase)
            self.stale_at = max(self.stale_at, at + round(policy.phase_patience_seconds * 1000) * MS)

    def _update_interval(self, duration: int, at: int, *, age: int) -> None:
        self.report_interval = max(duration, self.report_interval // 2)
        self.booking_interval = max(self.booking_interval, min(age, _LONGEST_INTERVAL))
        self.stale_at = at + max(60 * SECOND, 3 * self.report_interval)
        self.flops_until = at + self.report_interval + self.report_interval // 2 + 2 * SECOND

    def _settle_report(
        self,
        report: TrainingReport,
        device: Device,
        phase_times: Iterable[int],
        *,
        gpus: int,
        repeated: float,
        seen: float,
        measured: int,
    ) -> None:
        """Add the reported times, scaled to the observed part, less what open phases have already added."""
        weight, room = device.weight, self._max_balance()
        named = {name for name, _ in report.phases}
        for balance, nanoseconds in enumerate(phase_times):
            if nanoseconds or _PHASE_OF_BALANCE[balance] in named:
                self.known.add(balance)
            if balance in {STARTUP, RESTORE}:
                booked = min(nanoseconds, measured)
                nanoseconds, measured = nanoseconds - booked, measured - booked  # noqa: PLW2901
            self.last[balance] = round(nanoseconds * seen) * weight // PPM
            self._add(balance, self.last[balance] - self.accrued[balance], room=room * weight // PPM)
            self.accrued[balance] = 0
        # What polled and is not in its report, such as the first minutes of a hang, is no other time's communication.
        self.credit[COMMUNICATION] = max(0, self.credit[COMMUNICATION])
        peak = peak_flops_of(device, report.dtype)
        if report.model_flops is None or not peak:
            return
        self.known.add(MODEL)
        self.explained = not report.each or _names_all_work(report)
        unpadded = 1.0 - (report.padding or 0.0) / report.tokens if report.tokens else 1.0
        model = flops_at_peak(report, device) * unpadded * seen / gpus / peak * SECOND * weight / PPM
        # A step that stalled has a low rate, and must not cut what the steps before it left.
        self.model_rate = max(model / (report.end - report.start), self.model_rate / 2)
        limit = round(self.model_rate * room)
        self._add(MODEL, round(model * (1.0 - repeated)), room=limit)
        self._add(REPEATED, round(model * repeated), room=limit)

    def _max_balance(self) -> int:
        """Upper limit of a balance, nanoseconds: time that may be reported before it can be booked, plus the skew."""
        return 2 * (self.report_interval + self.booking_interval) + _MAX_SKEW

    def _add(self, balance: int, nanoseconds: int, *, room: int) -> None:
        """Add to a balance within `room`, without cutting what earlier reports of longer intervals left in it."""
        before = self.credit[balance]
        self.credit[balance] = max(min(-room, before), min(max(room, before), before + nanoseconds))

    def _set_recompute(self, report: TrainingReport, policy: Policy) -> None:
        if report.hardware_flops and report.model_flops is not None:
            self.recompute = round((1.0 - report.model_flops / report.hardware_flops) * PPM)
        elif report.hardware_flops is None and report.recompute:
            selective = round(policy.selective_recompute_share * PPM)
            self.recompute = {"full": FULL_RECOMPUTE, "selective": selective}.get(report.recompute, 0)

    def add_serving(self, serving: ServingReport, device: Device, at: int, *, policy: Policy) -> None:
        """Apply a serving engine's report; its first one has an empty interval."""
        duration = serving.end - serving.start
        # A gauge describes one moment: requests that wait at a single report may start at once.
        self.shares = shares = serving_shares(serving, policy, queued=self.queued)
        self.queued = queued_requests(serving) > 0
        self._update_interval(duration, at, age=at - serving.end)
        self.shares_until = at + 3 * duration + 5 * SECOND
        peak = peak_flops_of(device)
        if serving.flops is not None and peak and duration:
            self.known.add(MODEL)
            useful = 1.0 - (shares.rejected_drafts + shares.recomputed) / PPM
            model = serving.flops * useful / peak * SECOND * device.weight / PPM
            self._add(MODEL, round(model), room=round(model * (self._max_balance() / duration)))
        self._set_flops_reported(MODEL in self.known, serving.start)

    def add_collectives(self, report: CollectiveReport) -> None:
        """Apply what a profiler plugin timed: an upper bound of exposed communication, for it includes overlap."""
        self.communication.add(report.start, report.end, report.busy)

    def collective_share(self, start: int, end: int) -> int | None:
        """Share of [start, end) in which collectives executed, ppm; None where no report covers it.

        By the reports that reach this time in the delay line, which describe an earlier time: see `core.collectives`.
        Each interval is asked for once, in order of time; asking for the last one again gives the same share.
        """
        return self.communication.take(start, end)

    def _set_flops_reported(self, reported: bool, since: int) -> None:  # noqa: FBT001  it sets the attribute
        if reported is not self.flops_reported:
            self.flops_reported, self.flops_changed_at = reported, since

    def advance(self, start: int, end: int, weight: int, *, seen: bool = True) -> bool:
        """Whether the last report is still valid in [start, end); an open phase fills its balance if `seen`."""
        self.unobserved += 0 if seen else end - start
        if start > self.stale_at or not seen:
            return False
        self.booking_interval = max(end - start, self.booking_interval - self.booking_interval // 16)
        if start > self.shares_until:
            self.shares = ServingShares()
        if self.phase >= 0 and end > self.phase_since:
            duration = (end - max(start, self.phase_since)) // MS * weight * MS // PPM
            self.credit[self.phase] += duration
            self.accrued[self.phase] += duration
        return True

    def has_flops_for(self, start: int, end: int) -> bool:
        """Whether model FLOPs cover most of [start, end), so that its tensor work is compared with them."""
        turned_later = self.flops_changed_at > (start + end) // 2
        return self.flops_reported is not turned_later and end <= self.flops_until

    def add_recomputation(self, tensor: int, ms: int) -> None:
        """Add recomputation's share of `tensor` ppm of `ms` milliseconds to its balance."""
        share = tensor * self.recompute // PPM * ms
        self._add(RECOMPUTATION, share, room=self._max_balance() // MS * share // ms if ms else 0)

    def available(self, balance: int, ms: int, *, beyond_last: bool = False) -> int:
        """The balance in parts per million of `ms` milliseconds; 0 if negative. `beyond_last`: of earlier reports."""
        credit = self.credit[balance] - (self.last[balance] if beyond_last else 0)
        return credit // ms if credit > 0 else 0

    def spend(self, balance: int, ppm: int, ms: int) -> None:
        """Deduct `ppm` of `ms` milliseconds that were booked.

        Of all balances only that of communication is overdrawn: a kernel that polls is booked at once, and the report
        that names its time comes later.
        """
        credit = self.credit[balance]
        least = -self._max_balance() if balance == COMMUNICATION else 0
        self.credit[balance] = max(credit - ppm * ms, min(credit, least))


def peak_flops_of(device: Device, dtype: str = "") -> float:
    """Dense peak FLOP/s in a number format; 0 if unknown."""
    return (device.spec.peak(dtype) if device.spec is not None else None) or 0.0


def flops_at_peak(report: TrainingReport, device: Device) -> float:
    """Model FLOPs in the report's number format that take as long at the peak as its FLOPs in all formats."""
    flops, peak, slower = report.model_flops or 0.0, peak_flops_of(device, report.dtype), peak_flops_of(device)
    return flops + (report.model_flops_16bit or 0.0) * (peak / slower - 1.0) if slower else flops


def _names_all_work(report: TrainingReport) -> bool:
    """Whether it names its recomputation, and, if most of its work is in a narrow format, the 16-bit part."""
    recomputation = bool(report.recompute) or report.hardware_flops is not None
    return recomputation and (report.dtype not in NARROW_DTYPES or report.model_flops_16bit is not None)


def _phase_times(report: TrainingReport) -> tuple[int, ...]:
    """Reported nanoseconds of the interval for each phase balance.

    If no bubble phase is reported, the bubble is derived from the schedule's bubble share and deducted from
    communication, as which the program measures waiting for a neighbour stage. Without that share, all communication of
    a pipeline is taken for its bubble (E).
    """
    phases = dict(report.phases)
    times = [phases.get(name, 0) for name in _PHASE_OF_BALANCE]
    if times[BUBBLE] or (not times[COMMUNICATION] and report.bubble is None):
        return tuple(times)
    if report.bubble is not None:
        times[BUBBLE] = bubble_time(report)
        times[COMMUNICATION] = max(0, times[COMMUNICATION] - times[BUBBLE])
    elif report.parallel is not None and report.parallel.pipeline > 1:
        times[BUBBLE], times[COMMUNICATION] = times[COMMUNICATION], 0
    return tuple(times)


def bubble_time(report: TrainingReport) -> int:
    """Nanoseconds of the interval's steps that are pipeline bubble, by the reported share."""
    other_phases = sum(duration for name, duration in report.phases if name not in ("compute", "communication"))
    steps = max(0, report.end - report.start - other_phases)
    return round((report.bubble or 0.0) * steps)


_LARGEST_AMOUNT = 1e30
"""Larger amounts are rejected because their sums could become infinite."""


def _are_amounts(values: Iterable[float]) -> bool:
    return all(0 <= value <= _LARGEST_AMOUNT for value in values)


def is_credible_report(report: TrainingReport, at: int, *, most: float, worked_until: int | None = None) -> bool:
    """Whether a report is plausible: not in the future, with finite amounts, and at most `most` FLOP/s.

    `worked_until`: end of the last work that the same process reported. A step that began then may be reported in the
    message that ends it, many messages later: with gradient accumulation a step takes minutes.
    """
    duration = report.end - report.start
    computing = duration if worked_until is None else max(duration, report.end - worked_until)
    amounts = (
        report.model_flops, report.hardware_flops, report.model_flops_16bit, report.tokens, report.padding,
        report.samples,
    )  # fmt: skip
    figures = [amount for amount in amounts if amount is not None]
    phases = [nanoseconds for _, nanoseconds in report.phases]
    return (
        duration >= 0 and report.end <= at
        and _are_amounts(figures) and _are_amounts(phases) and sum(phases) <= duration
        and (duration > 0 or (not any(figures) and not report.steps))
        and max(report.model_flops or 0.0, report.hardware_flops or 0.0) * SECOND <= most * computing
        and (report.padding or 0.0) <= (report.tokens or 0.0)
        and (report.model_flops or 0.0) <= (report.hardware_flops or report.model_flops or 0.0)
        and (report.model_flops_16bit or 0.0) <= (report.model_flops or 0.0)
        and 0 <= report.steps <= (report.step or 0)
        and 0.0 <= (report.bubble or 0.0) < 1.0
        and (not report.rank or report.rank.isdecimal())
    )  # fmt: skip


def is_credible_serving(serving: ServingReport, most: float) -> bool:
    """Whether all figures are finite and not negative, and FLOPs per GPU are at most `most` per second."""
    duration = serving.end - serving.start
    latencies = [seconds for latency in serving.latencies for seconds in (latency.p50, latency.p95, latency.p99)]
    figures = [
        getattr(serving, name)
        for name in serving.__struct_fields__
        if name not in {"job_id", "engine", "start", "end", "uuids", "latencies"}
    ]
    amounts = _are_amounts([value for value in figures if value is not None]) and _are_amounts(latencies)
    return amounts and (not duration or (serving.flops or 0.0) * SECOND <= most * duration)
