"""Defines what all parts of the screen share: states of nodes, trends, glyphs, and styled lines of text.

Decides which values are old; times are on the monotonic clock. No line is wider than the terminal, and text that users
chose cannot control it. Styles are names, not colours. Does not interpolate values while a node does not respond.
"""

from collections.abc import Hashable, Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from unicodedata import category, east_asian_width, normalize

from msgspec import Struct

from exporter.core.leaks import LEAKS
from exporter.formatting import NO_VALUE, share, short_duration
from exporter.web.api import AccountsOut, GpusOut, JobsOut, NodeOut, OwnerOut, ReceiptsOut, WindowOut
from exporter.web.summary import STATE_SYMBOLS, Missing, ratio_or_missing

UNSEEN = "?"
"""Shown for a value that was not observed or that the board cannot report."""
WINDOWS = {"last_5_minutes": "5 min", "last_hour": "1 h"}
FIX_BY_LEAK = {leak.name: leak.fix for leak in LEAKS} | {
    "unresolved": "a source with tensor activity: see gpu-efficiency install-check",
    "unobserved": "see why it cannot be seen: gpu-efficiency install-check",
}
"""First remedy of each leak."""


def ratio(window: WindowOut, name: str) -> str:
    """Format one of a window's ratios in percent, without the sign."""
    value = ratio_or_missing(window, name)
    if isinstance(value, Missing):
        return NO_VALUE if value is Missing.UNDEFINED else UNSEEN
    return share(value)


def percent(window: WindowOut, name: str) -> str:
    """Format one of a window's ratios in percent with the sign."""
    text = ratio(window, name)
    return text if text in (NO_VALUE, UNSEEN) else f"{text} %"


def index_ranges(indices: list[str]) -> str:
    """Format indices with ranges, 0,1,2,5 as 0-2,5; other texts stay as they are."""
    runs: list[list[str]] = []
    for index in indices:
        follows = runs and index.isdecimal() and runs[-1][-1].isdecimal() and int(index) == int(runs[-1][-1]) + 1
        if follows:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class Glyphs(Struct, frozen=True, kw_only=True):
    """A set of characters to draw with."""

    ascii: bool
    states: dict[str, str]
    """Symbol of each state."""
    suspect: str
    unknown_state: str
    """Symbol of a state that this version does not know."""
    fills: dict[str, str]
    """Fill character of a bar's segments, by layer."""
    levels: str
    """Characters of a sparkline, from 0 upwards."""
    gap: str
    """Character of a sparkline for an interval without values."""
    times: str
    ellipsis: str
    dot: str
    down: str
    up: str
    cursor: str
    rule: str

    def printable(self, text: str) -> str:
        """Make text that a user chose safe to show, each character one or two cells wide."""
        shown = "".join(map(_printable_char, normalize("NFC", text)))
        return shown.encode("ascii", "replace").decode() if self.ascii else shown


def _printable_char(char: str) -> str:
    if char.isascii():
        return char if char.isprintable() else "?"
    return "?" if not char.isprintable() or category(char)[0] == "M" else char


_FILLS = {"useful": "█#", "emfu": "▓+", "ectr": "▒-", "gau": "░.", "unresolved": "~~", "unobserved": "??"}
"""Fill characters by layer in the order of a bar's segments: Unicode, ASCII."""
_CHARACTERS = {
    "suspect": "!!", "unknown_state": "·.", "gap": "· ", "times": "\N{MULTIPLICATION SIGN}x", "ellipsis": "…~",
    "dot": "·-", "down": "▾v", "up": "▴^", "cursor": "▸>", "rule": "─-",
}  # fmt: skip
"""Other characters by field of Glyphs: Unicode, ASCII."""


def _glyphs(column: int, *, states: Iterable[str], levels: str) -> Glyphs:
    return Glyphs(
        ascii=column == 1,
        states=dict(zip(STATE_SYMBOLS, states, strict=True)),
        fills={layer: pair[column] for layer, pair in _FILLS.items()},
        levels=levels,
        **{name: pair[column] for name, pair in _CHARACTERS.items()},
    )


UNICODE = _glyphs(0, states=STATE_SYMBOLS.values(), levels="▁▂▃▄▅▆▇█")
ASCII = _glyphs(1, states="X#?^zo-*", levels="_.:-=+*#")


def cell_width(text: str) -> int:
    """Return the terminal columns that a text from `Glyphs.printable` takes."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def truncate(text: str, width: int, glyphs: Glyphs) -> str:
    """Truncate at the end to at most `width` columns."""
    return text if cell_width(text) <= width else _prefix(text, width - 1) + glyphs.ellipsis if width > 0 else ""


def truncate_middle(text: str, width: int, glyphs: Glyphs) -> str:
    """Truncate in the middle, because ids and names differ at their ends."""
    if cell_width(text) <= width or width < 5:  # noqa: PLR2004  an ellipsis and two characters at each end
        return truncate(text, width, glyphs)
    end = _prefix(text[::-1], (width - 1) // 2)[::-1]
    return _prefix(text, width - 1 - cell_width(end)) + glyphs.ellipsis + end


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Pad with spaces to `width` columns."""
    blank = " " * (width - cell_width(text))
    return blank + text if right else text + blank


def _prefix(text: str, width: int) -> str:
    taken = 0
    for index, char in enumerate(text):
        taken += cell_width(char)
        if taken > width:
            return text[:index]
    return text


StyledText = tuple[str, str]
"""Text and style: "", strong, soft, bad, or a layer."""


class StyledLine(Struct, frozen=True):
    """One line of the terminal."""

    segments: tuple[StyledText, ...] = ()
    selected: bool = False
    """True for the row that keys act on; shown inverted over the full width."""

    @property
    def text(self) -> str:
        """The text without styles."""
        return "".join(text for text, _ in self.segments)


def styled_line(*segments: StyledText | str, selected: bool = False) -> StyledLine:
    """Build a line from segments; a plain string has no style."""
    return StyledLine(tuple((segment, "") if isinstance(segment, str) else segment for segment in segments), selected)


def merge_segments(segments: Iterable[StyledText]) -> list[StyledText]:
    """Merge adjacent segments of the same style, so that fewer bytes are sent to the terminal."""
    return [("".join(text for text, _ in group), style) for style, group in groupby(segments, key=itemgetter(1))]


def truncate_line(line: StyledLine, width: int, glyphs: Glyphs) -> StyledLine:
    """Truncate at the end to at most `width` columns."""
    if cell_width(line.text) <= width:
        return line
    remaining, kept = width, list[StyledText]()
    for text, style in line.segments:
        kept.append((truncate(text, remaining, glyphs), style))
        remaining -= cell_width(text)
        if remaining <= 0:
            break
    if remaining == 0 and kept:  # cut between two segments: the ellipsis replaces the last character
        text, style = kept[-1]
        kept[-1] = truncate(text + glyphs.ellipsis, cell_width(text), glyphs) if text else "", style
    return StyledLine(tuple(kept), line.selected)


def justify_line(
    left: Iterable[StyledText | str], right: Iterable[StyledText | str], width: int, glyphs: Glyphs
) -> StyledLine:
    """Align `left` and `right` at the ends of a line; truncates `left` if there is not enough room."""
    end = styled_line(*right)
    room = width - cell_width(end.text)
    begin = truncate_line(styled_line(*left), max(0, room - 1), glyphs)
    blank = pad("", max(0, room - cell_width(begin.text)))
    return truncate_line(StyledLine((*begin.segments, (blank, ""), *end.segments)), width, glyphs)


MAX_INTERVALS = 256
_SCALES = (0.1, 0.25, 0.5, 1.0)


class Trends:
    """Means of values by row and interval, at most MAX_INTERVALS; times are monotonic seconds.

    When the intervals are used up, neighbours are merged and the interval doubles.
    """

    def __init__(self, start: float, interval_seconds: float) -> None:
        self.start, self.interval_seconds, self.last, self._latest = start, interval_seconds, 0, 0
        self._means: dict[Hashable, dict[int, tuple[float, int]]] = {}

    def add(self, row: Hashable, value: float | None, now: float) -> None:
        """Add a row's value at `now`; None: it has none."""
        self.advance(now)
        if value is not None:
            means = self._means.setdefault(row, {})
            total, count = means.get(self.last, (0.0, 0))
            means[self.last] = total + value, count + 1
            self._latest = self.last

    def advance(self, now: float) -> None:
        """Move to the interval that contains `now`."""
        self.last = max(self.last, int((now - self.start) / self.interval_seconds))
        while self.last >= MAX_INTERVALS:
            self._halve()

    def _halve(self) -> None:
        self.interval_seconds *= 2
        self.last, self._latest = self.last // 2, self._latest // 2
        for row, means in self._means.items():
            merged: dict[int, tuple[float, int]] = {}
            for index, (total, count) in means.items():
                before = merged.get(index // 2, (0.0, 0))
                merged[index // 2] = before[0] + total, before[1] + count
            self._means[row] = merged

    def retain(self, rows: Iterable[Hashable]) -> None:
        """Remove all rows except these."""
        retained = set(rows)
        self._means = {row: means for row, means in self._means.items() if row in retained}

    def scale_of(self, rows: Iterable[Hashable]) -> float:
        """Return the smallest scale maximum that fits the values of all these rows."""
        highest = max((total / count for row in rows for total, count in self._means.get(row, {}).values()), default=0)
        return next((scale for scale in _SCALES if highest <= scale), 1.0)

    def points(self, row: Hashable, width: int) -> list[float | None]:
        """Return the row's means since the start in at most `width` columns; leaves out an unfinished interval."""
        means, intervals = self._means.get(row, {}), max(self._latest, self.last - 1) + 1
        columns = min(width, intervals)
        sums = [(0.0, 0)] * columns
        for index, (total, count) in means.items():
            at = index * columns // intervals
            sums[at] = sums[at][0] + total, sums[at][1] + count
        return [total / count if count else None for total, count in sums]


def sparkline(points: list[float | None], scale: float, glyphs: Glyphs) -> str:
    """Draw one character per point; spaces before the first value, gaps after it."""
    highest, text = len(glyphs.levels) - 1, ""
    for point in points:
        if point is None:
            text += glyphs.gap if text.strip() else " "
        else:
            text += glyphs.levels[min(highest, round(highest * point / scale))]
    return text


class PolledNode(Struct, frozen=True, kw_only=True):
    """The latest responses of one node."""

    address: str
    """For display, without secrets; unique."""
    gpus: GpusOut | None = None
    jobs: JobsOut | None = None
    at: float = 0.0
    """Monotonic time of the last response."""
    problem: str = ""
    """Why the latest poll failed; empty if it succeeded."""
    since: float = 0.0
    """Monotonic time of the first failed poll in a row."""
    accounts: AccountsOut | None = None
    receipts: ReceiptsOut | None = None
    """Records of the opened job; None: not requested, or no response."""

    @property
    def node(self) -> NodeOut | None:
        """The node's description in its latest response."""
        return None if self.gpus is None else self.gpus.node

    @property
    def live(self) -> bool:
        """Whether the values are current."""
        return self.gpus is not None and not self.problem

    def age(self, now: float) -> float:
        """Return the age of the values in seconds: the age that the node reported, plus the time since then."""
        return (self.node.age_seconds if self.node else 0.0) + max(0.0, now - self.at)

    def seconds_since_sample(self, now: float) -> float:
        """Return the seconds from the sample to now, or to the last response if the node no longer responds."""
        return self.age(now if self.live else self.at)

    def problem_text(self, now: float) -> str:
        """Describe the problem in one sentence; empty if there is none."""
        if not self.problem:
            return ""
        old = f"; values are {short_duration(self.age(now))} old" if self.gpus else ""
        return f"NOT RESPONDING for {short_duration(now - self.since)}{old}: {self.problem}"


_UNKNOWN_OUTCOMES = ("unresolved", "unobserved")
"""Outcomes that are neither useful nor a leak."""


def loss_shares(window: WindowOut) -> list[tuple[str, float]]:
    """List (name, share of paid time) of every outcome above 0 except useful, the largest first."""
    shares = ((name, part / window.seconds) for name, part in window.leaks.items() if name != "useful" and part > 0)
    return sorted(shares, key=lambda pair: -pair[1]) if window.seconds else []


def known_losses(window: WindowOut) -> list[tuple[str, float]]:
    """List (name, share of paid time) of leaks only, without unresolved and unobserved time."""
    return [pair for pair in loss_shares(window) if pair[0] not in _UNKNOWN_OUTCOMES]


def lost_share(window: WindowOut) -> float:
    """Return the share of paid time that leaked."""
    return sum(share for _, share in known_losses(window))


def hourly_loss(accounts: AccountsOut, window: str) -> tuple[float, float, str] | None:
    """Return money lost per hour, the price per hour, and the currency; None unless there is exactly one currency."""
    costs = getattr(accounts, window).money
    if len(accounts.prices) != 1 or costs is None:
        return None
    (currency, price), *_ = accounts.prices.items()
    parts = costs.get(currency, {})
    total = sum(parts.values())
    kept = sum(parts.get(name, 0.0) for name in ("useful", *_UNKNOWN_OUTCOMES))
    return (price * (1 - kept / total), price, currency) if total else None


def amounts(money: Mapping[str, float]) -> str:
    """Format amounts by currency, without symbols, which not every terminal has; empty for none."""
    return ", ".join(f"{amount:,.2f} {currency}" for currency, amount in money.items())


def contact(owner: OwnerOut) -> str:
    """Return the owner's user, or else namespace or account."""
    return owner.user or owner.namespace or owner.account


class TopView(Struct, frozen=True, kw_only=True):
    """All data that a screen is drawn from, at one moment."""

    nodes: tuple[PolledNode, ...]
    now: float
    """Monotonic seconds."""
    wall: float
    """Unix seconds."""
    trends: Trends
    glyphs: Glyphs
    names: tuple[str, ...] = ()
    """Displayed names of the nodes, in the same order."""

    @property
    def has_many_nodes(self) -> bool:
        """Whether rows need the name of their node."""
        return len(self.nodes) > 1


def node_names(nodes: tuple[PolledNode, ...], glyphs: Glyphs) -> tuple[str, ...]:
    """Return each node's name, or its address if the name is not known yet or not unique."""
    names = [node.node.node or node.node.host if node.node else "" for node in nodes]
    return tuple(
        glyphs.printable(name if name and names.count(name) == 1 else node.address.partition("://")[2])
        for name, node in zip(names, nodes, strict=True)
    )
