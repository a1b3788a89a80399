"""What a GPU was doing a moment ago: the memory that timed states need, one `Track` a GPU.

Timed states are *credits*: nanoseconds that fill while the sign is there and drain while it is not; a state begins
at the millisecond its credit is full. A credit is linear in time and whole, so cutting a reading in two changes
nothing, and nothing counts ticks. Owns the cutting of a reading into pieces; refuses to name states.
"""

from dataclasses import dataclass
from itertools import compress, product
from math import sqrt

from msgspec import Struct

from exporter.core.evidence import IF_FLAT, NO, YES, Evidence, activity
from exporter.core.model import MS, PPM, SECOND, Allocation, Owner
from exporter.core.policy import Policy

MINUTE = 60 * SECOND
_NEVER_FULL = 1 << 62
_EVEN = 1.25


class Limits(Struct, frozen=True):
    """The policy's timed thresholds in nanoseconds and parts per million, worked out once."""

    hang: int
    suspect: int
    stray_cost: int
    forgiven: int
    """Credit of a hang that the work which ends it costs."""
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
        forgiven=wake * stray // PPM,
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


def hang_window(rules: Limits, owner: Owner) -> int:
    """How long `owner` may spin before it hangs: its own limit, else the policy's."""
    return rules.hang if owner.hang_seconds is None else _ns(owner.hang_seconds)


def _ns(seconds: float) -> int:
    """Whole milliseconds, at least one: a credit that is full at nothing would flip without end."""
    return max(1, round(seconds * 1000)) * MS


BEGINNING, STARVED, EVEN = "beginning", "starved", "even"
"""Signs of a stretch that one reading cannot show: the owner has not worked yet; in the last full minute the GPU worked
or rested and nothing between, while input came in bursts; its activity was even."""
NO_SIGNS: frozenset[str] = frozenset()
_VERDICTS = {there: frozenset(compress((STARVED, EVEN), there)) for there in product((False, True), repeat=2)}


@dataclass(slots=True, eq=False)
class Track:
    """Memory of one GPU: credits, flags and the running minute. A change of owner begins anew."""

    hangs: int = 0
    zombies: int = 0
    to_hang: int = 0
    to_zombie: int = 0
    """How many were found, and nanoseconds from the first sign to the state of all; whoever held the GPU."""
    holders: tuple[Allocation, ...] = ()
    spin: int = 0
    quiet: int = 0
    wake: int = 0
    leaked: int = 0
    hung: bool = False
    zombie: bool = False
    unowned: bool = False
    worked_at: int = 0
    """When it last did effective work, or was given to its holders."""
    spin_since: int | None = None
    celsius: float | None = None
    """Its temperature then."""
    pcie_least: float = 0.0
    pcie_most: float = 0.0
    """PCIe bytes per second since then, of readings in which these alone may speak against a spin."""
    bare_since: int | None = None
    """Since when the driver has listed no process on it."""
    verdict: frozenset[str] = NO_SIGNS
    signs: frozenset[str] = frozenset({BEGINNING})
    polls: bool = False
    """A server may poll for requests: its spinning proves nothing."""
    window: int = 0
    hang: int = _NEVER_FULL
    suspect: int = _NEVER_FULL
    hang_leave: int = 0
    """Nanoseconds of each credit that begin a state; of several holders the most patient one counts."""
    seen: int = 0
    engine_sum: int = 0
    engine_squares: int = 0
    rx_sum: int = 0
    rx_peak: int = 0
    """The running minute, in milliseconds."""

    def begin(
        self, holders: tuple[Allocation, ...], *, at: int, rules: Limits | None = None, worked: bool = False
    ) -> None:
        """A new ownership: all credits empty. `worked`: its beginning was not seen, so it is past its start-up.

        `rules`: needed where there are holders.
        """
        self.holders = holders
        self._limit(rules)
        self.spin = self.quiet = self.wake = self.leaked = 0
        self.hung = self.zombie = self.unowned = False
        self.worked_at = at
        self.spin_since = self.celsius = self.bare_since = None
        self.pcie_least = self.pcie_most = 0.0
        self.verdict = NO_SIGNS
        self.signs = NO_SIGNS if worked else frozenset({BEGINNING})
        self._begin_minute()

    def learn(self, holders: tuple[Allocation, ...], rules: Limits) -> None:
        """More is known of the same holders, such as their class: what was judged by another limit is judged anew."""
        self.holders, hang = holders, self.hang
        self._limit(rules)
        self.zombie = self.zombie and self.quiet >= self.window
        if self.hang != hang:
            self.hung = self.hung and self.spin >= self.hang
        if self.polls:
            self.acquit()

    def adopt(self, rules: Limits) -> None:
        """Another policy holds from now on. Credits stay: what has been true for long enough by it already, begins."""
        self.learn(self.holders, rules)
        self.unowned = self.unowned and self.leaked >= rules.unowned

    def acquit(self) -> None:
        """The job says that it moves: whatever looked like a spin is none."""
        self.spin, self.spin_since, self.hung = 0, None, False

    def _limit(self, rules: Limits | None) -> None:
        owners = [held.owner for held in self.holders]
        self.polls = bool(owners) and all(owner.workload_class == "serving" for owner in owners)
        self.window, self.hang, self.suspect, self.hang_leave = 0, _NEVER_FULL, _NEVER_FULL, 0
        if rules is not None and owners:
            self.window = max(zombie_window(rules, owner) for owner in owners)
            self.hang = max(hang_window(rules, owner) for owner in owners)
            self.suspect = min(rules.suspect, self.hang)
            self.hang_leave = max(0, self.hang - rules.forgiven)

    def _begin_minute(self) -> None:
        self.seen = self.engine_sum = self.engine_squares = 0
        self.rx_sum = self.rx_peak = 0

    def unchanged_since(self, piece: "Piece") -> bool:
        """Would the next piece say the same as this one?"""
        same = self.hung is piece.hung and self.zombie is piece.zombie and self.unowned is piece.leaked
        return same and self.signs == piece.signs

    def remember(self, ev: Evidence, start: int, end: int) -> None:
        """Add [start, end), which lies within one minute, to the running minute."""
        ms = (end - start) // MS
        engine = PPM - ev.wait
        rx = int(ev.pcie_rx or 0)
        self.seen += ms
        self.engine_sum += ms * engine
        self.engine_squares += ms * engine * engine
        self.rx_sum += ms * rx
        if rx > self.rx_peak:
            self.rx_peak = rx

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
        return _VERDICTS[starved, even]


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


def look(track: Track, ev: Evidence, start: int, end: int, rules: Limits) -> None:
    """Keep since when a held GPU has had no process, and when it last worked."""
    processes = ev.reading.processes
    if processes == ():
        track.bare_since = start if track.bare_since is None else track.bare_since
    else:
        track.bare_since = None
    if ev.work * rules.duty >= PPM:
        track.worked_at = end
    if track.spin == 0:
        track.celsius = ev.reading.temperature_celsius
        track.pcie_least = track.pcie_most = 0.0
    if ev.spin == IF_FLAT:
        ev.spin = _if_even(track, ev)


def _if_even(track: Track, ev: Evidence) -> int:
    """A spin, if what it moves over PCIe has stayed the same since it began: it polls. Within a quarter (E)."""
    rate = max(ev.pcie_rx or 0.0, ev.pcie_tx or 0.0)
    track.pcie_least = min(track.pcie_least or rate, rate)
    track.pcie_most = max(track.pcie_most, rate)
    return YES if track.pcie_most <= _EVEN * track.pcie_least else NO


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
        elif stop > now:
            cut.append(Piece(now, stop, holders, track.hung, track.zombie, track.unowned, track.signs))
        if rates:
            _move(track, ev, rates, now, stop)
            _flip(track, rules)
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
    spinning = ev.spin != NO and not track.polls
    if quiet <= 0 and not (spinning or track.spin or track.quiet or track.wake):
        return None
    return _spin_rate(track, ev, rules, policy), quiet, 0


def _until_change(track: Track, ev: Evidence, rates: Rates, rules: Limits) -> int:
    """Nanoseconds until one of the credits flips its state."""
    spin, quiet, leak = rates
    level, goal = (track.wake, rules.wake_full) if track.zombie else (track.quiet, track.window)
    soonest = min(_time_to(level, goal, quiet), _time_to(track.leaked, rules.unowned, leak))
    if track.hung:
        return min(soonest, _time_to(-track.spin, -track.hang_leave, -spin))
    return soonest if ev.suspect_only else min(soonest, _time_to(track.spin, track.hang, spin))


def _move(track: Track, ev: Evidence, rates: Rates, now: int, stop: int) -> None:
    """Let all credits run over [now, stop)."""
    spin, quiet, leak = rates
    _move_spin(track, ev, now, stop, spin)
    _move_quiet(track, now, stop, quiet)
    track.leaked += (stop - now) // MS * leak


def _flip(track: Track, rules: Limits) -> None:
    if track.zombie and track.wake >= rules.wake_full:
        track.zombie, track.wake, track.quiet = False, 0, 0
    track.unowned = track.unowned or track.leaked >= rules.unowned


def _spin_rate(track: Track, ev: Evidence, rules: Limits, policy: Policy) -> int:
    """Parts per million of a second gained each second. Before a hang, real work costs what it did."""
    if track.polls:
        return -PPM
    if ev.spin == YES:
        return PPM
    if track.hung:
        return -rules.stray_cost
    worst = track.hang // SECOND * PPM
    return -min(max(rules.stray_cost, activity(ev, policy) * PPM), max(worst, rules.stray_cost))


def _time_to(level: int, goal: int, rate: int) -> int:
    """Nanoseconds on whole milliseconds until a credit rising at `rate` ppm meets `goal`; very long if never.

    0 where it is beyond it, which it is when the goal was set lower meanwhile: what was booked is not reversed.
    """
    return max(0, -(-(goal - level) // rate)) * MS if rate > 0 else 1 << 62


def _move_spin(track: Track, ev: Evidence, now: int, stop: int, rate: int) -> None:
    ceiling = track.hang
    if ev.suspect_only and not track.hung:
        ceiling = max(track.spin, track.suspect)
    if rate > 0 and track.spin_since is None:
        track.spin_since = now
    track.spin = min(ceiling, max(0, track.spin + (stop - now) // MS * rate))
    if track.hung and track.spin <= track.hang_leave:
        track.hung, track.spin = False, 0
    elif not track.hung and track.spin >= track.hang:
        track.hung = True
        track.hangs += 1
        track.to_hang += stop - (now if track.spin_since is None else track.spin_since)
    if track.spin == 0:
        track.spin_since = None


def _move_quiet(track: Track, now: int, stop: int, rate: int) -> None:
    ms = (stop - now) // MS
    if track.zombie:
        track.wake = max(0, track.wake + ms * rate)
        return
    track.quiet = max(0, track.quiet + ms * rate)
    track.zombie = track.window > 0 and track.quiet >= track.window
    if track.zombie:
        track.zombies += 1
        track.to_zombie += stop - track.worked_at


def computes_unowned(ev: Evidence) -> bool:
    """A kernel ran, and the driver's process list, where it can be seen, names somebody."""
    processes = ev.reading.processes
    return ev.runs and (processes is None or len(processes) > 0)


def blind(track: Track, duration: int) -> None:
    """Time that was not seen: a spin is forgotten as fast as it was learnt, the rest is kept as it is."""
    if not track.hung:
        track.spin = max(0, track.spin - duration)
        track.spin_since = track.spin_since if track.spin else None
