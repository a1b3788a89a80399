"""Lines and pieces: text with a look that has a name. Which colour that is, if any, is the terminal's module's.

Owns their width: no line is ever wider than it may be. Refuses colours, and characters outside `Signs`.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from exporter.top.signs import Signs, cells, cut, padded

Piece = tuple[str, str]
"""Text and look: "", strong, soft, bad, or a layer."""


class Line(Struct, frozen=True):
    """One row of the terminal."""

    pieces: tuple[Piece, ...] = ()
    chosen: bool = False
    """It is the one the keys act on; shown inverted from end to end."""

    @property
    def text(self) -> str:
        """Its words alone."""
        return "".join(text for text, _ in self.pieces)


def line(*pieces: Piece | str, chosen: bool = False) -> Line:
    """A line of pieces; a bare text has no look."""
    return Line(tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces), chosen)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that look the same made one: less for a slow line to carry."""
    return [("".join(text for text, _ in run), look) for look, run in groupby(pieces, key=itemgetter(1))]


def fitted(drawn: Line, width: int, signs: Signs) -> Line:
    """Its beginning, in so many columns at most."""
    if cells(drawn.text) <= width:
        return drawn
    left, kept = width, list[Piece]()
    for text, look in drawn.pieces:
        kept.append((cut(text, left, signs), look))
        left -= cells(text)
        if left <= 0:
            break
    if left == 0 and kept:  # cut between two pieces: the sign says that there was more
        text, look = kept[-1]
        kept[-1] = cut(text + signs.cut, cells(text), signs) if text else "", look
    return Line(tuple(kept), drawn.chosen)


def apart(left: Iterable[Piece | str], right: Iterable[Piece | str], width: int, signs: Signs) -> Line:
    """One part at each end; the left one gives way."""
    end = line(*right)
    room = width - cells(end.text)
    begin = fitted(line(*left), max(0, room - 1), signs)
    blank = padded("", max(0, room - cells(begin.text)))
    return fitted(Line((*begin.pieces, (blank, ""), *end.pieces)), width, signs)
