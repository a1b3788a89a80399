"""What a policy's episodes add up to. Owns the sums and the shape of the answer; refuses to judge.

Times are Unix seconds, durations seconds.
"""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from exporter.core.money import Price

HOUR = 3600.0


class Person(Struct, frozen=True):
    """A job, as its owner knows it."""

    job_id: str
    name: str = ""
    user: str = ""
    cluster: str = ""
    """Whose job ids these are, where several clusters are looked at."""

    @property
    def key(self) -> tuple[str, str]:
        """Unlike any other job's."""
        return self.cluster, self.job_id


class Episode(Struct, frozen=True, kw_only=True):
    """A GPU taken back once: from whom, when, and what came of it."""

    uuid: str
    jobs: tuple[Person, ...]
    start: float
    seconds: float
    """Until the job worked again, or its hold or the recording ended."""
    worked: bool
    """It worked again."""
    weight: float = 1.0
    """Share of a GPU, for a MIG instance."""
    price: Price | None = None
    """That held when it was taken; None: there are no prices."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours, of a MIG instance its share."""
        return self.seconds * self.weight / HOUR


class Hit(Struct, kw_only=True):
    """A job that would have lost a GPU and worked on it again."""

    job_id: str
    name: str
    user: str
    cluster: str
    taken_at: float
    after_seconds: float
    """From there until it worked again; of several times the shortest."""
    gpus: set[str]
    times: int = 0
    gpu_hours: float = 0.0
    """Wrongly freed."""


class Score(Struct, frozen=True, kw_only=True):
    """One row of the answer."""

    label: str
    settings: dict[str, float]
    episodes: int
    gpu_hours_freed: float
    money_freed: dict[str, float]
    """By currency; empty without prices."""
    gpu_hours_wrongly_freed: float
    money_wrongly_freed: dict[str, float]
    jobs_reclaimed: int
    jobs_hit: int
    hits: tuple[Hit, ...]
    """Those hit soonest first, all of them."""


class Answer(Struct, frozen=True, kw_only=True):
    """The whole preview."""

    source: str
    since: float
    until: float
    gpu_hours_held: float
    taken_back_when: tuple[str, ...]
    """States that take a GPU back."""
    rows: tuple[Score, ...]
    notes: tuple[str, ...] = ()

    def json(self) -> bytes:
        """The same for programs."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2)


class Tally:
    """Adds up the episodes of one row, over any number of recordings."""

    def __init__(self, label: str, settings: dict[str, float]) -> None:
        self._label, self._settings = label, settings
        self._episodes = 0
        self._hours = {False: 0.0, True: 0.0}
        self._money: dict[bool, dict[str, float]] = {False: {}, True: {}}
        """By whether it was wrong."""
        self._reclaimed: set[tuple[str, str]] = set()
        self._hits: dict[tuple[str, str], Hit] = {}

    def add(self, episode: Episode) -> None:
        """Count an episode whose end is known."""
        self._episodes += 1
        self._hours[episode.worked] += episode.gpu_hours
        self._reclaimed |= {job.key for job in episode.jobs}
        if episode.price is not None:
            money, price = self._money[episode.worked], episode.price
            money[price.currency] = money.get(price.currency, 0.0) + episode.gpu_hours * price.per_gpu_hour
        if episode.worked:
            for job in episode.jobs:
                self._hit(job, episode)

    def _hit(self, job: Person, episode: Episode) -> None:
        hit = self._hits.get(job.key)
        if hit is None:
            hit = self._hits[job.key] = Hit(
                job_id=job.job_id, name=job.name, user=job.user, cluster=job.cluster,
                taken_at=episode.start, after_seconds=episode.seconds, gpus=set(),
            )  # fmt: skip
        elif episode.seconds < hit.after_seconds:
            hit.taken_at, hit.after_seconds = episode.start, episode.seconds
        hit.gpus.add(episode.uuid)
        hit.times += 1
        hit.gpu_hours += episode.gpu_hours / len(episode.jobs)

    def score(self) -> Score:
        """What it came to."""
        return Score(
            label=self._label,
            settings=self._settings,
            episodes=self._episodes,
            gpu_hours_freed=self._hours[False],
            money_freed=self._money[False],
            gpu_hours_wrongly_freed=self._hours[True],
            money_wrongly_freed=self._money[True],
            jobs_reclaimed=len(self._reclaimed),
            jobs_hit=len(self._hits),
            hits=tuple(sorted(self._hits.values(), key=_soonest)),
        )


def _soonest(hit: Hit) -> tuple[float, str, str]:
    return hit.after_seconds, hit.cluster, hit.job_id


def priced(price: Price) -> Price | None:
    """None where the table of prices had nothing that fits: no sum of money may hold it."""
    return None if price.currency == "GPU-hours" else price


def listed(jobs: Iterable[str]) -> str:
    """Some of the names, for a note."""
    names = sorted(jobs)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004  as shown
