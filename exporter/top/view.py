"""Holds what every part of the screen is made of: nodes as last seen, trends, glyphs, and styled lines of text.

Decides which values are old; times are of the monotonic clock. No line is wider than its terminal, and text that
somebody chose cannot control it. Styles are names, no colours. Refuses to invent values for a time without answers.
"""

from collections.abc import Hashable, Iterable
from itertools import groupby
from operator import itemgetter
from unicodedata import category, east_asian_width, normalize

from msgspec import Struct

from exporter.core.leaks import LEAKS
from exporter.formatting import share, short_duration
from exporter.web.api import AccountsOut, GpusOut, JobsOut, NodeOut, OwnerOut, ReceiptsOut, WindowOut
from exporter.web.summary import Missing, ratio_or_missing

NO_VALUE = "-"
"""Nothing to divide by."""
UNSEEN = "?"
WINDOWS = {"last_5_minutes": "5 min", "last_hour": "1 h"}
FIX_BY_LEAK = {leak.name: leak.fix for leak in LEAKS} | {
    "unresolved": "a source with tensor activity: see gpu-efficiency install-check",
    "unobserved": "see why it cannot be seen: gpu-efficiency install-check",
}
"""What to do first."""


def ratio(window: WindowOut, name: str) -> str:
    """One of a window's ratios in percent, without the sign."""
    value = ratio_or_missing(window, name)
    if isinstance(value, Missing):
        return NO_VALUE if value is Missing.UNDEFINED else UNSEEN
    return share(value)


def percent(window: WindowOut, name: str) -> str:
    """The same with its sign, for a sentence."""
    text = ratio(window, name)
    return text if text in (NO_VALUE, UNSEEN) else f"{text} %"


def index_ranges(indices: list[str]) -> str:
    """0,1,2,5 as 0-2,5; what is no number stays as it is."""
    runs: list[list[str]] = []
    for index in indices:
        follows = runs and index.isdecimal() and runs[-1][-1].isdecimal() and int(index) == int(runs[-1][-1]) + 1
        if follows:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class Glyphs(Struct, frozen=True, kw_only=True):
    """One set."""

    ascii: bool
    states: dict[str, str]
    """By state."""
    suspect: str
    unknown_state: str
    """Of a state that is not known here."""
    fills: dict[str, str]
    """Of a bar, by layer."""
    levels: str
    """Of a trend, from 0 up."""
    gap: str
    """In a trend: nothing was seen."""
    times: str
    ellipsis: str
    dot: str
    down: str
    up: str
    cursor: str
    rule: str

    def printable(self, text: str) -> str:
        """Make text that somebody chose safe to show, one cell or two a sign."""
        shown = "".join(map(_printable_char, normalize("NFC", text)))
        return shown.encode("ascii", "replace").decode() if self.ascii else shown


def _printable_char(char: str) -> str:
    if char.isascii():
        return char if char.isprintable() else "?"
    return "?" if not char.isprintable() or category(char)[0] == "M" else char


UNICODE = Glyphs(
    ascii=False,
    states={
        "unavailable": "✕", "hung": "■", "unobserved": "?", "unowned": "▲", "zombie": "◌", "unallocated": "○",
        "stalled": "◐", "active": "●",
    },
    suspect="!",
    unknown_state="·",
    fills={"useful": "█", "emfu": "▓", "ectr": "▒", "gau": "░", "unresolved": "~", "unobserved": "?"},
    levels="▁▂▃▄▅▆▇█",
    gap="·",
    times="\N{MULTIPLICATION SIGN}",
    ellipsis="…",
    dot="·",
    down="▾",
    up="▴",
    cursor="▸",
    rule="─",
)  # fmt: skip
ASCII = Glyphs(
    ascii=True,
    states={
        "unavailable": "X", "hung": "#", "unobserved": "?", "unowned": "^", "zombie": "z", "unallocated": "o",
        "stalled": "-", "active": "*",
    },
    suspect="!",
    unknown_state=".",
    fills={"useful": "#", "emfu": "+", "ectr": "-", "gau": ".", "unresolved": "~", "unobserved": "?"},
    levels="_.:-=+*#",
    gap=" ",
    times="x",
    ellipsis="~",
    dot="-",
    down="v",
    up="^",
    cursor=">",
    rule="-",
)  # fmt: skip


def cell_width(text: str) -> int:
    """Columns that a text of `Signs.name` takes."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def truncate(text: str, width: int, glyphs: Glyphs) -> str:
    """The beginning of it, in so many columns at most."""
    return text if cell_width(text) <= width else _prefix(text, width - 1) + glyphs.ellipsis if width > 0 else ""


def truncate_middle(text: str, width: int, glyphs: Glyphs) -> str:
    """Both ends of it: ids and names differ there."""
    if cell_width(text) <= width or width < 5:  # noqa: PLR2004  a sign in the middle and two at each end
        return truncate(text, width, glyphs)
    end = _prefix(text[::-1], (width - 1) // 2)[::-1]
    return _prefix(text, width - 1 - cell_width(end)) + glyphs.ellipsis + end


def pad(text: str, width: int, *, right: bool = False) -> str:
    """With blanks up to the width."""
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
"""Text and look: "", strong, soft, bad, or a layer."""


class StyledLine(Struct, frozen=True):
    """One row of the terminal."""

    segments: tuple[StyledText, ...] = ()
    selected: bool = False
    """It is the one the keys act on; shown inverted from end to end."""

    @property
    def text(self) -> str:
        """Its words alone."""
        return "".join(text for text, _ in self.segments)


def styled_line(*segments: StyledText | str, selected: bool = False) -> StyledLine:
    """A line of pieces; a bare text has no look."""
    return StyledLine(tuple((segment, "") if isinstance(segment, str) else segment for segment in segments), selected)


def merge_segments(segments: Iterable[StyledText]) -> list[StyledText]:
    """Neighbours that look the same made one: less for a slow line to carry."""
    return [("".join(text for text, _ in group), style) for style, group in groupby(segments, key=itemgetter(1))]


def truncate_line(line: StyledLine, width: int, glyphs: Glyphs) -> StyledLine:
    """Its beginning, in so many columns at most."""
    if cell_width(line.text) <= width:
        return line
    remaining, kept = width, list[StyledText]()
    for text, style in line.segments:
        kept.append((truncate(text, remaining, glyphs), style))
        remaining -= cell_width(text)
        if remaining <= 0:
            break
    if remaining == 0 and kept:  # cut between two pieces: the sign says that there was more
        text, style = kept[-1]
        kept[-1] = truncate(text + glyphs.ellipsis, cell_width(text), glyphs) if text else "", style
    return StyledLine(tuple(kept), line.selected)


def justify_line(
    left: Iterable[StyledText | str], right: Iterable[StyledText | str], width: int, glyphs: Glyphs
) -> StyledLine:
    """One part at each end; the left one gives way."""
    end = styled_line(*right)
    room = width - cell_width(end.text)
    begin = truncate_line(styled_line(*left), max(0, room - 1), glyphs)
    blank = pad("", max(0, room - cell_width(begin.text)))
    return truncate_line(StyledLine((*begin.segments, (blank, ""), *end.segments)), width, glyphs)


MAX_INTERVALS = 256
_SCALES = (0.1, 0.25, 0.5, 1.0)


class Trends:
    """Means by row and stretch; times are of a monotonic clock, in seconds."""

    def __init__(self, start: float, interval_seconds: float) -> None:
        self.start, self.interval_seconds, self.last, self._latest = start, interval_seconds, 0, 0
        self._means: dict[Hashable, dict[int, tuple[float, int]]] = {}

    def add(self, row: Hashable, value: float | None, now: float) -> None:
        """Note a row's figure; None: it has none now."""
        self.advance(now)
        if value is not None:
            means = self._means.setdefault(row, {})
            total, count = means.get(self.last, (0.0, 0))
            means[self.last] = total + value, count + 1
            self._latest = self.last

    def advance(self, now: float) -> None:
        """Let time pass."""
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
        """Forget all other rows."""
        retained = set(rows)
        self._means = {row: means for row, means in self._means.items() if row in retained}

    def scale_of(self, rows: Iterable[Hashable]) -> float:
        """The end of a scale on which all these can be drawn."""
        highest = max((total / count for row in rows for total, count in self._means.get(row, {}).values()), default=0)
        return next((scale for scale in _SCALES if highest <= scale), 1.0)

    def points(self, row: Hashable, width: int) -> list[float | None]:
        """Its figures from the first look on, in at most so many columns; a stretch that has only begun may wait."""
        means, intervals = self._means.get(row, {}), max(self._latest, self.last - 1) + 1
        columns = min(width, intervals)
        sums = [(0.0, 0)] * columns
        for index, (total, count) in means.items():
            at = index * columns // intervals
            sums[at] = sums[at][0] + total, sums[at][1] + count
        return [total / count if count else None for total, count in sums]


def sparkline(points: list[float | None], scale: float, glyphs: Glyphs) -> str:
    """One sign a column; before the first figure there is nothing, and not a gap."""
    highest, text = len(glyphs.levels) - 1, ""
    for point in points:
        if point is None:
            text += glyphs.gap if text.strip() else " "
        else:
            text += glyphs.levels[min(highest, round(highest * point / scale))]
    return text


class PolledNode(Struct, frozen=True, kw_only=True):
    """One node as it was last seen."""

    address: str
    """Without secrets, for people; no two are the same."""
    gpus: GpusOut | None = None
    jobs: JobsOut | None = None
    at: float = 0.0
    """When it answered last."""
    problem: str = ""
    """Why it does not answer; empty: it does."""
    since: float = 0.0
    """Since when."""
    accounts: AccountsOut | None = None
    receipts: ReceiptsOut | None = None
    """Of the job that is asked for; None: not asked, or not answered."""

    @property
    def node(self) -> NodeOut | None:
        """What it said of itself."""
        return None if self.gpus is None else self.gpus.node

    @property
    def live(self) -> bool:
        """Its figures are the present."""
        return self.gpus is not None and not self.problem

    def age(self, now: float) -> float:
        """How old its figures are, by its own word and by what has passed since."""
        return (self.node.age_seconds if self.node else 0.0) + max(0.0, now - self.at)

    def seconds_since_sample(self, now: float) -> float:
        """Seconds from the sample to now; to the last answer where there is none any more: nobody saw it go on."""
        return self.age(now if self.live else self.at)

    def problem_text(self, now: float) -> str:
        """One sentence; empty where all is well."""
        if not self.problem:
            return ""
        old = f"; figures are {short_duration(self.age(now))} old" if self.gpus else ""
        return f"NOT ANSWERING for {short_duration(now - self.since)}{old}: {self.problem}"


_UNKNOWN_OUTCOMES = ("unresolved", "unobserved")
"""Outcomes that are neither useful nor a leak."""


def loss_shares(window: WindowOut) -> list[tuple[str, float]]:
    """(name, share of the paid time) of every outcome above 0 but useful, the largest first."""
    shares = ((name, part / window.seconds) for name, part in window.leaks.items() if name != "useful" and part > 0)
    return sorted(shares, key=lambda pair: -pair[1]) if window.seconds else []


def known_losses(window: WindowOut) -> list[tuple[str, float]]:
    """The shares of the leaks alone: without time whose worth is unknown."""
    return [pair for pair in loss_shares(window) if pair[0] not in _UNKNOWN_OUTCOMES]


def lost_share(window: WindowOut) -> float:
    """Share of the paid time that leaked."""
    return sum(share for _, share in known_losses(window))


def hourly_loss(accounts: AccountsOut, window: str) -> tuple[float, float, str] | None:
    """Money that leaks in an hour, the price of that hour, and the currency; None unless there is just one currency."""
    costs = getattr(accounts, window).money
    if len(accounts.prices) != 1 or costs is None:
        return None
    (currency, price), *_ = accounts.prices.items()
    parts = costs.get(currency, {})
    total = sum(parts.values())
    kept = sum(parts.get(name, 0.0) for name in ("useful", *_UNKNOWN_OUTCOMES))
    return (price * (1 - kept / total), price, currency) if total else None


def contact(owner: OwnerOut) -> str:
    """Whom to talk to."""
    return owner.user or owner.namespace or owner.account


class TopView(Struct, frozen=True, kw_only=True):
    """All that is drawn, at one moment."""

    nodes: tuple[PolledNode, ...]
    now: float
    """Of the monotonic clock."""
    wall: float
    """Unix seconds."""
    trends: Trends
    glyphs: Glyphs
    names: tuple[str, ...] = ()
    """Of the nodes in the same order, as they are shown."""

    @property
    def has_many_nodes(self) -> bool:
        """Rows have to say whose they are."""
        return len(self.nodes) > 1


def host_names(nodes: tuple[PolledNode, ...], glyphs: Glyphs) -> tuple[str, ...]:
    """The host's name; the address where there is none yet, or where two nodes say the same."""
    hosts = [node.node.host if node.node else "" for node in nodes]
    return tuple(
        glyphs.printable(host if host and hosts.count(host) == 1 else node.address.partition("://")[2])
        for host, node in zip(hosts, nodes, strict=True)
    )
