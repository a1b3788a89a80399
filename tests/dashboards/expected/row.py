"""One line of a table of expectations."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from tests.dashboards.stories import Played


class Expected(Struct, frozen=True, kw_only=True):
    """The number that a panel shows of a story, and what the story's ledger says it is."""

    panel: str
    """Its title."""
    scenario: str
    """The story; its cluster has that name."""
    worth: Callable[[Played], float]
    """Out of the ledger's own counters, never out of a query."""
    letter: str = "A"
    """Which of the panel's queries."""
    where: Mapping[str, str] = {}
    """Labels of the one series that is meant; of a range query its last value counts."""
    variables: Mapping[str, str] = {}
    """Chosen at the top, beside cluster=<scenario>."""
    minutes: int = 60
    """How long the time shown is; it ends with the story."""
    within: float = 0.02
    """Of it; rates reach over the ends of the time shown."""
    leak: str = ""
    """The row of LEAKS whose panel this is."""
