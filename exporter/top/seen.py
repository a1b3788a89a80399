"""What is known of the nodes at a moment: their last answers, and which of these may not be called the present.

Owns that judgement. Times are of a monotonic clock, so that no two machines' clocks have to agree.
"""

from msgspec import Struct

from exporter.top.answers import Accounts, Gpus, Jobs, Node, Receipts
from exporter.top.signs import Signs
from exporter.top.trend import Trends
from exporter.top.words import brief


class Seen(Struct, frozen=True, kw_only=True):
    """One node as it was last seen."""

    address: str
    """Without secrets, for people; no two are the same."""
    gpus: Gpus | None = None
    jobs: Jobs | None = None
    at: float = 0.0
    """When it answered last."""
    problem: str = ""
    """Why it does not answer; empty: it does."""
    since: float = 0.0
    """Since when."""
    accounts: Accounts | None = None
    receipts: Receipts | None = None
    """Of the job that is asked for; None: not asked, or not answered."""

    @property
    def node(self) -> Node | None:
        """What it said of itself."""
        return None if self.gpus is None else self.gpus.node

    @property
    def live(self) -> bool:
        """Its figures are the present."""
        return self.gpus is not None and not self.problem

    def age(self, now: float) -> float:
        """How old its figures are, by its own word and by what has passed since."""
        return (self.node.age_seconds if self.node else 0.0) + max(0.0, now - self.at)

    def passed(self, now: float) -> float:
        """Seconds from the sample to now; to the last answer where there is none any more: nobody saw it go on."""
        return self.age(now if self.live else self.at)

    def trouble(self, now: float) -> str:
        """One sentence; empty where all is well."""
        if not self.problem:
            return ""
        old = f"; figures are {brief(self.age(now))} old" if self.gpus else ""
        return f"NOT ANSWERING for {brief(now - self.since)}{old}: {self.problem}"


class View(Struct, frozen=True, kw_only=True):
    """All that is drawn, at one moment."""

    nodes: tuple[Seen, ...]
    now: float
    """Of the monotonic clock."""
    wall: float
    """Unix seconds."""
    trends: Trends
    signs: Signs
    names: tuple[str, ...] = ()
    """Of the nodes in the same order, as they are shown."""

    @property
    def many(self) -> bool:
        """Rows have to say whose they are."""
        return len(self.nodes) > 1


def names(nodes: tuple[Seen, ...], signs: Signs) -> tuple[str, ...]:
    """The host's name; the address where there is none yet, or where two nodes say the same."""
    hosts = [seen.node.host if seen.node else "" for seen in nodes]
    return tuple(
        signs.name(host if host and hosts.count(host) == 1 else seen.address.partition("://")[2])
        for host, seen in zip(hosts, nodes, strict=True)
    )
