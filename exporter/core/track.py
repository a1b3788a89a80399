"""What a GPU was doing a moment ago: the memory that timed states need, one `Track` a GPU.

Timed states are *credits*: nanoseconds that fill while the sign is there and drain while it is not; a state begins
at the millisecond its credit is full. A credit is linear in time and whole, so cutting a reading in two changes
nothing, and nothing counts ticks. Owns the cutting of a reading into pieces; refuses to name states.
"""

from itertools import compress, product
from math import sqrt

from msgspec import Struct

from exporter.core.evidence import IF_FLAT, NO, YES, Evidence, activity
from exporter.core.model import MS, PPM, SECOND, Allocation, Owner
from exporter.core.policy import Policy

MINUTE = 60 * SECOND


class Limits(Struct, frozen=True):
    """The policy's timed thresholds in nanoseconds and parts per million, worked out once."""

    hang: int
    suspect: int
    stray_cost: int
    hang_leave: int
    duty: int
    windows: dict[str, int]
    wake_window: int
    wake_full: int
    unowned: int
    stale: int


def limits(policy: Policy) -> Limits:
    """Integer thresholds of `policy`; every duration is rounded to whole milliseconds."""
    wake, window = _ns(policy.wake_seconds), _ns(policy.wake_window_seconds)
    stray = round(PPM * (1 - policy.hang_stray_share) / policy.hang_stray_share)
    hang = _ns(policy.hang_seconds)
    return Limits(
        hang=hang,
        suspect=_ns(policy.hang_suspect_seconds),
        stray_cost=stray,
        hang_leave=max(0, hang - wake * stray // PPM),
        duty=round(1 / policy.zombie_duty),
        windows={
            "batch": _ns(policy.zombie_batch_seconds),
            "interactive": _ns(policy.zombie_interactive_seconds),
            "serving": _ns(policy.zombie_serving_seconds),
        },
        wake_window=max(2, window // wake),
        wake_full=wake * (max(2, window // wake) - 1),
        unowned=_ns(policy.unowned_seconds),
        stale=_ns(policy.allocation_stale_seconds),
    )


def zombie_window(rules: Limits, owner: Owner) -> int:
    """How long `owner` may rest: its own limit, else its class's, else batch work's."""
    if owner.zombie_seconds is not None:
        return _ns(owner.zombie_seconds)
    return rules.windows.get(owner.workload_class, rules.windows["batch"])


def _ns(seconds: float) -> int:
    """Whole milliseconds, at least one: a credit that is full at nothing would flip without end."""
    return max(1, round(seconds * 1000)) * MS


BEGINNING, STARVED, EVEN, PCIE_FLAT = "beginning", "starved", "even", "pcie_flat"
"""Signs of a stretch that one reading cannot show: the owner has not worked yet; in the last full minute the GPU worked
or rested and nothing between, while input came in bursts; its activity was even; its PCIe traffic was."""
NO_SIGNS: frozenset[str] = frozenset()
_VERDICTS = {
    there: frozenset(compress((STARVED, EVEN, PCIE_FLAT), there)) for there in product((False, True), repeat=3)
}


class Track:
    """Memory of one GPU: credits, flags and the running minute. A change of owner begins anew."""

    __slots__ = (
        "engine_squares",
        "engine_sum",
        "holders",
        "hung",
        "leaked",
        "pcie_peak",
        "pcie_sum",
        "quiet",
        "rx_peak",
        "rx_sum",
        "seen",
        "signs",
        "spin",
        "unowned",
        "verdict",
        "wake",
        "window",
        "zombie",
    )

    def __init__(self) -> None:
        self.begin(())

    def begin(self, holders: tuple[Allocation, ...], *, window: int = 0, worked: bool = False) -> None:
        """A new ownership: all credits empty. `worked`: its beginning was not seen, so it is past its start-up."""
        self.holders, self.window = holders, window
        self.spin = self.quiet = self.wake = self.leaked = 0
        self.hung = self.zombie = self.unowned = False
        self.verdict = NO_SIGNS
        self.signs = NO_SIGNS if worked else frozenset({BEGINNING})
        self._begin_minute()

    def _begin_minute(self) -> None:
        self.seen = self.engine_sum = self.engine_squares = 0
        self.rx_sum = self.rx_peak = self.pcie_sum = self.pcie_peak = 0

    def unchanged_since(self, piece: "Piece") -> bool:
        """Would the next piece say the same as this one?"""
        same = self.hung is piece.hung and self.zombie is piece.zombie and self.unowned is piece.leaked
        return same and self.signs == piece.signs

    def remember(self, ev: Evidence, start: int, end: int) -> None:
        """Add [start, end), which lies within one minute, to the running minute."""
        ms = (end - start) // MS
        engine = PPM - ev.wait
        rx, tx = int(ev.pcie_rx or 0), int(ev.pcie_tx or 0)
        busier = rx if rx > tx else tx
        self.seen += ms
        self.engine_sum += ms * engine
        self.engine_squares += ms * engine * engine
        self.rx_sum += ms * rx
        if rx > self.rx_peak:
            self.rx_peak = rx
        self.pcie_sum += ms * busier
        if busier > self.pcie_peak:
            self.pcie_peak = busier

    def work(self) -> None:
        """The owner's beginning is over."""
        self.signs = self.verdict

    def turn(self, policy: Policy) -> None:
        """A minute is over: judge it if at least half of it was seen, and begin the next."""
        self.verdict = self._judged(policy) if self.seen * MS * 2 >= MINUTE else NO_SIGNS
        self.signs = self.verdict | {BEGINNING} if BEGINNING in self.signs else self.verdict
        self._begin_minute()

    def _judged(self, policy: Policy) -> frozenset[str]:
        mean = self.engine_sum / self.seen
        spread = sqrt(max(0.0, self.engine_squares / self.seen - mean * mean)) / PPM
        bursts = self.rx_peak >= max(policy.input_burst_bytes_per_second, 2 * self.rx_sum / self.seen)
        starved = spread > policy.bimodal_spread and bursts
        even = spread <= policy.flat_spread
        return _VERDICTS[starved, even, self.pcie_peak * 4 * self.seen <= 5 * self.pcie_sum]


class Piece(Struct, gc=False):
    """A stretch of one reading throughout which nothing about its GPU changes."""

    start: int
    end: int
    holders: tuple[Allocation, ...]
    hung: bool = False
    zombie: bool = False
    leaked: bool = False
    signs: frozenset[str] = NO_SIGNS
    culprit: bool = False
    owner_known: bool = True

    def between(self, start: int, end: int, *, culprit: bool) -> "Piece":
        """The same over [start, end)."""
        flags = self.hung, self.zombie, self.leaked, self.signs
        return Piece(start, end, self.holders, *flags, culprit, self.owner_known)


def spins(ev: Evidence, signs: frozenset[str]) -> bool:
    """Does this reading look like a kernel that polls and does nothing else?"""
    return ev.spin == YES or (ev.spin == IF_FLAT and PCIE_FLAT in signs)


def pieces(
    track: Track, ev: Evidence, start: int, end: int, *, holders: tuple[Allocation, ...], rules: Limits, policy: Policy
) -> list[Piece]:
    """[start, end) of one owner's reading, cut where a timed state or the verdict on the last minute changes."""
    if holders:
        if ev.work * rules.duty >= PPM and BEGINNING in track.signs:
            track.work()
    elif not computes_unowned(ev):
        track.leaked, track.unowned = 0, False
    cut: list[Piece] = []
    now = start
    while now < end:
        turn = (now // MINUTE + 1) * MINUTE
        rates = _rates(track, ev, owned=bool(holders), rules=rules, policy=policy)
        stop = min(end, turn, now + _until_change(track, ev, rates, rules)) if rates else min(end, turn)
        if cut and track.unchanged_since(cut[-1]):
            cut[-1].end = stop
        else:
            cut.append(Piece(now, stop, holders, track.hung, track.zombie, track.unowned, track.signs))
        if rates:
            _move(track, ev, rates, (stop - now) // MS, rules=rules)
        track.remember(ev, now, stop)
        now = stop
        if now == turn:
            track.turn(policy)
    return cut


Rates = tuple[int, int, int]
"""Parts per million gained each second by the credits of spinning, of quiet or waking, and of a leak."""


def _rates(track: Track, ev: Evidence, *, owned: bool, rules: Limits, policy: Policy) -> Rates | None:
    """How fast each credit moves during this reading; None when none does, as while a GPU simply works."""
    if not owned:
        return (0, 0, PPM) if not track.unowned and computes_unowned(ev) else None
    quiet = rules.wake_window * ev.work - PPM if track.zombie else PPM - rules.duty * ev.work
    if quiet <= 0 and ev.spin == NO and not (track.spin or track.quiet or track.wake):
        return None
    return _spin_rate(track, ev, rules, policy), quiet, 0


def _until_change(track: Track, ev: Evidence, rates: Rates, rules: Limits) -> int:
    """Nanoseconds until one of the credits flips its state."""
    spin, quiet, leak = rates
    level, goal = (track.wake, rules.wake_full) if track.zombie else (track.quiet, track.window)
    soonest = min(_time_to(level, goal, quiet), _time_to(track.leaked, rules.unowned, leak))
    if track.hung:
        return min(soonest, _time_to(-track.spin, -rules.hang_leave, -spin))
    return soonest if ev.suspect_only else min(soonest, _time_to(track.spin, rules.hang, spin))


def _move(track: Track, ev: Evidence, rates: Rates, ms: int, *, rules: Limits) -> None:
    """Let all credits run for `ms` milliseconds, and flip what is full or empty."""
    spin, quiet, leak = rates
    _move_spin(track, ev, ms * spin, rules=rules)
    _move_quiet(track, ms * quiet)
    if track.zombie and track.wake >= rules.wake_full:
        track.zombie, track.wake, track.quiet = False, 0, 0
    track.leaked += ms * leak
    track.unowned = track.unowned or track.leaked >= rules.unowned


def _spin_rate(track: Track, ev: Evidence, rules: Limits, policy: Policy) -> int:
    """Parts per million of a second gained each second. Before a hang, real work costs what it did."""
    if spins(ev, track.signs):
        return PPM
    if track.hung:
        return -rules.stray_cost
    worst = rules.hang // SECOND * PPM
    return -min(max(rules.stray_cost, activity(ev, policy) * PPM), max(worst, rules.stray_cost))


def _time_to(level: int, goal: int, rate: int) -> int:
    """Nanoseconds on whole milliseconds until a credit rising at `rate` ppm meets `goal`; very long if never."""
    return -(-(goal - level) // rate) * MS if rate > 0 else 1 << 62


def _move_spin(track: Track, ev: Evidence, gain: int, *, rules: Limits) -> None:
    ceiling = rules.hang
    if ev.suspect_only and not track.hung:
        ceiling = max(track.spin, rules.suspect)
    track.spin = min(ceiling, max(0, track.spin + gain))
    if track.hung and track.spin <= rules.hang_leave:
        track.hung, track.spin = False, 0
    elif not track.hung and track.spin >= rules.hang:
        track.hung = True


def _move_quiet(track: Track, gain: int) -> None:
    if track.zombie:
        track.wake = max(0, track.wake + gain)
        return
    track.quiet = max(0, track.quiet + gain)
    track.zombie = track.window > 0 and track.quiet >= track.window


def computes_unowned(ev: Evidence) -> bool:
    """A kernel ran, and the driver's process list, where it can be seen, names somebody."""
    processes = ev.reading.processes
    return ev.runs and (processes is None or len(processes) > 0)


def blind(track: Track, duration: int) -> None:
    """Time that was not seen: a spin is forgotten as fast as it was learnt, the rest is kept as it is."""
    track.spin = track.spin if track.hung else max(0, track.spin - duration)
