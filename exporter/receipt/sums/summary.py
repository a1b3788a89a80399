"""What many jobs, or a fleet, held and lost, in the shape it is told in. Owns the shape; refuses to add up.

Units are those of a receipt: Unix seconds, GPU-hours, ratios 0 to 1; money in `currency`, None where no price is
known, or several currencies. What nobody tells is None. Lost is what the three layers' leaks took; what nobody saw and
what cannot be judged is neither lost nor useful.
"""

import msgspec
from msgspec import Struct

from exporter.receipt.model import Layers, Part

YEAR_HOURS = 8760.0
HOUR = 3600.0
"""Seconds."""


class Line(Struct, frozen=True, kw_only=True):
    """What one of those that are ranked held and lost."""

    name: str
    about: str = ""
    """Of a job: its name and whose it is."""
    jobs: int
    gpu_hours: float
    coverage: float | None
    layers: Layers
    money: float | None
    lost_gpu_hours: float
    lost_money: float | None
    worst: str
    """The leak that took most; empty: none took anything."""
    leaks: dict[str, float] = {}
    """GPU-hours by leak, the largest first."""
    track: tuple[float | None, ...] = ()
    """The product of each period; None: it held nothing, or nothing was seen."""


class Stretch(Struct, frozen=True, kw_only=True):
    """A period's sums: a point of the trend."""

    start: float
    end: float
    gpu_hours: float
    product: float | None
    lost_gpu_hours: float
    lost_money: float | None


class Fleet(Struct, frozen=True, kw_only=True):
    """GPUs of a whole fleet. On average, where nothing else is said."""

    gpus: float | None
    """Paid for; None: nobody tells."""
    gpus_peak: float | None
    held: float
    """That somebody had."""
    held_peak: float | None
    grain_seconds: float = 0.0
    """The peak is of means over so long; 0: of every moment."""

    @property
    def idle(self) -> float | None:
        """What the peak needs and the mean does not."""
        return None if self.held_peak is None else max(0.0, self.held_peak - self.held)


class Rent(Struct, frozen=True, kw_only=True):
    """Another's GPUs at a price an hour, of whose time such a share would be useful."""

    name: str
    per_gpu_hour: float
    utilisation: float
    per_useful_hour: float
    own_per_useful_hour: float | None
    """None: nothing was useful."""
    break_even: float
    """The share of one's own time that has to be useful for both to cost the same."""
    instead: float | None
    """What the same useful hours would have cost there."""


class Raised(Struct, frozen=True, kw_only=True):
    """What a higher eMFU would give back; the other layers as they are."""

    emfu: float
    gpus: float
    """GPUs whose whole work that is."""
    gpu_hours: float
    money: float | None
    time_saved: float
    """Share of the time that the same work would take less."""


class Summary(Struct, frozen=True, kw_only=True):
    """All of it. Times are Unix seconds."""

    about: str
    """Whose jobs: "user ada", "all"."""
    by: str
    every: str
    start: float
    end: float
    """Of what is known of the time that was asked for."""
    source: str
    currency: str
    """Empty: no price is known, or several currencies."""
    whole: Line
    rows: tuple[Line, ...]
    """Who lost most first."""
    parts: tuple[Part, ...]
    """Losses, the largest first; then useful, unresolved, unobserved."""
    trend: tuple[Stretch, ...]
    models: tuple[str, ...] = ()
    fleet: Fleet | None = None
    rents: tuple[Rent, ...] = ()
    raised: tuple[Raised, ...] = ()
    unseen: tuple[str, ...] = ()
    """What could not be seen, in sentences."""
    simulated: bool = False
    """Any part of it is of a simulated node."""

    def json(self) -> bytes:
        """For programs, with what is worked out of the rest."""
        more = {"hours": self.hours, "gpus": self.gpus, "work": self.work, "per_gpu_hour": self.per_gpu_hour}
        return msgspec.json.encode(msgspec.to_builtins(self) | more)

    @property
    def hours(self) -> float:
        """How long it was."""
        return (self.end - self.start) / HOUR

    @property
    def gpus(self) -> float:
        """On average."""
        return self.whole.gpu_hours / self.hours if self.hours > 0 else 0.0

    @property
    def work(self) -> float | None:
        """GPUs whose whole work was done, on average."""
        return None if self.whole.layers.product is None else self.gpus * self.whole.layers.product

    @property
    def per_gpu_hour(self) -> float | None:
        """What an hour of a GPU cost."""
        money, hours = self.whole.money, self.whole.gpu_hours
        return None if money is None or not hours else money / hours

    @property
    def a_year(self) -> float:
        """How many times that is in a year."""
        return YEAR_HOURS / self.hours if self.hours > 0 else 0.0
