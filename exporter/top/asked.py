"""What the person at the keyboard has asked for, and what each key changes of it.

Owns the keys: one table, which the help and the last line are made of. Pure: a key and what there was give what is.
The chosen row is remembered by what it is of, so that it stays chosen wherever sorting puts it.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from exporter.top.rows import SORTS, Key, Kind
from exporter.top.words import WINDOWS

MAX_FILTER = 60


class Asked(Struct, frozen=True, kw_only=True):
    """What is wanted on the screen."""

    kind: Kind = "gpus"
    window: str = "last_5_minutes"
    sorts: tuple[tuple[Kind, int], ...] = (("gpus", 0), ("jobs", 0))
    reverse: bool = False
    text: str = ""
    """Rows have all of these words."""
    typing: bool = False
    chosen: Key | None = None
    opened: Key | None = None
    help: bool = False
    first: int = 0
    """Of the lines of what is opened, the first that is shown."""
    held: bool = False
    """Nothing moves until it is let go."""
    quit: bool = False

    @property
    def sort(self) -> int:
        """Place in SORTS of what the present list is sorted by."""
        return dict(self.sorts)[self.kind]


class Before(Struct, frozen=True, kw_only=True):
    """What was on the screen when the key came."""

    rows: Sequence[Key]
    page: int
    """Rows or lines that a screen shows."""
    lines: int = 0
    """Of what is opened."""
    job_of: Callable[[Key], Key | None] = lambda _: None
    """The job that has the row's GPU."""


def _move(by: Callable[[Before], int]) -> Callable[[Asked, Before], Asked]:
    def moved(asked: Asked, before: Before) -> Asked:
        if asked.opened or asked.help:
            last = max(0, before.lines - before.page)
            return replace(asked, first=min(last, max(0, asked.first + by(before))))
        if not before.rows:
            return asked
        at = before.rows.index(asked.chosen) if asked.chosen in before.rows else 0
        return replace(asked, chosen=before.rows[min(len(before.rows) - 1, max(0, at + by(before)))])

    return moved


def _open(asked: Asked, before: Before) -> Asked:
    if asked.opened or asked.help or asked.chosen not in before.rows or asked.chosen is None:
        return asked
    return replace(asked, opened=before.job_of(asked.chosen) or asked.chosen, first=0)


def _open_gpu(asked: Asked, before: Before) -> Asked:
    if asked.opened or asked.help or asked.chosen not in before.rows:
        return asked
    return replace(asked, opened=asked.chosen, first=0)


def _back(asked: Asked, _: Before) -> Asked:
    """One step: what is over the list first, then the filter."""
    if asked.help:
        return replace(asked, help=False, first=0)
    if asked.opened:
        return replace(asked, opened=None, first=0)
    return replace(asked, text="")


def _leave(asked: Asked, before: Before) -> Asked:
    return _back(asked, before) if asked.help or asked.opened else replace(asked, quit=True)


def _other(asked: Asked, _: Before) -> Asked:
    kind: Kind = "jobs" if asked.kind == "gpus" else "gpus"
    return replace(asked, kind=kind, opened=None, help=False, chosen=None, first=0, reverse=False)


def _window(asked: Asked, _: Before) -> Asked:
    names = list(WINDOWS)
    return replace(asked, window=names[(names.index(asked.window) + 1) % len(names)])


def _sort(asked: Asked, _: Before) -> Asked:
    further = dict(asked.sorts)
    further[asked.kind] = (asked.sort + 1) % len(SORTS[asked.kind])
    return replace(asked, sorts=tuple(further.items()), reverse=False)


def _type(asked: Asked, _: Before) -> Asked:
    return replace(asked, typing=True, opened=None, help=False, first=0)


def _screenful(before: Before) -> int:
    """One line less than is shown, so that the eye finds where it was."""
    return max(1, before.page - 1)


_ALL = 1 << 30
KEYS: tuple[tuple[tuple[str, ...], Callable[[Asked, Before], Asked], str, str, str], ...] = (
    (("enter",), _open, "Enter", "open", "open the chosen row's job; a GPU that nobody has: the GPU"),
    (("d",), _open_gpu, "d", "", "open the chosen row itself: a GPU's signs and health"),
    (("escape", "backspace"), _back, "Esc", "", "back; in a list: show all rows again"),
    (("tab", "shift+tab"), _other, "Tab", "{kind}", "from GPUs to jobs and back"),
    (("w",), _window, "w", "{window}", "from the last 5 minutes to the last hour and back"),
    (("s",), _sort, "s", "sort", "sort by the next thing; an arrow marks its column"),
    (("r",), lambda a, _: replace(a, reverse=not a.reverse), "r", "", "turn the order around"),
    (("slash",), _type, "/", "filter", "only rows with all of these words: user, job, state, leak, node"),
    (("space",), lambda a, _: replace(a, held=not a.held), "Space", "", "hold the screen still, and let it go"),
    (("up", "k"), _move(lambda _: -1), "Up k", "", "one row up"),
    (("down", "j"), _move(lambda _: 1), "Down j", "", "one row down"),
    (("pageup",), _move(lambda before: -_screenful(before)), "PgUp", "", "a screen up"),
    (("pagedown",), _move(_screenful), "PgDn", "", "a screen down"),
    (("home", "g"), _move(lambda _: -_ALL), "Home g", "", "to the first"),
    (("end", "G"), _move(lambda _: _ALL), "End G", "", "to the last"),
    (("question_mark", "h", "f1"), lambda a, _: replace(a, help=not a.help, first=0), "?", "help", "this help"),
    (("q",), _leave, "q", "quit", "leave what is opened, then the program; Ctrl-C leaves at once"),
)
"""Keys in Textual's names, what they do, how they are written, their word in the last line, and in the help."""
_BY_KEY = {key: does for keys, does, *_ in KEYS for key in keys}


def pressed(asked: Asked, key: str, before: Before, *, sign: str | None = None) -> Asked:
    """What is wanted after the key. `sign`: the character it types, if any."""
    if key in ("ctrl+c", "ctrl+q"):
        return replace(asked, quit=True)
    if asked.typing:
        return _typed(asked, key, sign, before)
    does = _BY_KEY.get(key)
    return does(asked, before) if does else asked


def _typed(asked: Asked, key: str, sign: str | None, before: Before) -> Asked:
    if key == "escape":
        return replace(asked, typing=False, text="")
    if key == "enter":
        return replace(asked, typing=False)
    if key == "backspace":
        return replace(asked, text=asked.text[:-1])
    if key == "ctrl+u":
        return replace(asked, text="")
    if sign and sign.isprintable():
        return replace(asked, text=(asked.text + sign)[:MAX_FILTER])
    return _BY_KEY[key](asked, before) if key in ("up", "down", "pageup", "pagedown") else asked
