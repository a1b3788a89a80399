"""Parses the thresholds to preview, adds up what each would have freed, and renders the result as text.

Times are Unix seconds, durations seconds.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import product
from textwrap import wrap

import msgspec
from msgspec import Struct, structs
from msgspec.structs import replace

from exporter import formatting
from exporter.config import ConfigError
from exporter.core.policy import Policy
from exporter.core.prices import Price
from exporter.durations import parse_duration
from exporter.formatting import format_time, shorten
from exporter.preview.real_work import DEFINITION, is_real_work

SHORT_NAMES = {
    "zombie.batch": "zombie_batch_seconds",
    "zombie.interactive": "zombie_interactive_seconds",
    "zombie.serving": "zombie_serving_seconds",
    "zombie.duty": "zombie_duty",
    "hang": "hang_seconds",
    "no_process": "no_process_seconds",
}
BASELINE = "as configured"
MAX_ROWS = 24
"""Each row needs its own ledger, or a pass over all pauses."""
ZOMBIE, HUNG, NO_PROCESS = "zombie", "hung", "no_process"


class PolicyRow(Struct, frozen=True):
    """A policy to preview, with its label: one row of the result."""

    label: str
    settings: dict[str, float]
    """Thresholds that differ from the configuration, by field of Policy."""
    policy: Policy


def policy_rows(configured: Policy, policy_texts: Iterable[str]) -> list[PolicyRow]:
    """The configured policy, then one row for each combination of the given values; raises ConfigError."""
    choices: dict[str, list[tuple[str, float]]] = {}
    for text in policy_texts:
        name, values = _parse_choice(text)
        choices.setdefault(name, []).extend(values)
    rows = [PolicyRow(BASELINE, {}, configured)]
    for combination in product(*choices.values()):
        settings = {_policy_field(name): value for name, (_, value) in zip(choices, combination, strict=True)}
        label = " ".join(f"{name}={text}" for name, (text, _) in zip(choices, combination, strict=True))
        rows.append(PolicyRow(label, settings, _policy_with(configured, settings, label)))
    if len(rows) > MAX_ROWS:
        raise ConfigError(f"--policy: {len(rows) - 1} combinations of values; {MAX_ROWS - 1} at most")
    return rows


def _parse_choice(text: str) -> tuple[str, list[tuple[str, float]]]:
    """Parse NAME=VALUE[,VALUE...] to a name and its values, each as text and number."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--policy {text}: is not NAME=VALUE (example: zombie.batch=30m)")
    return name, [(value.strip(), _parse_value(text, _policy_field(name), value)) for value in values.split(",")]


def _policy_field(name: str) -> str:
    field = SHORT_NAMES.get(name, name)
    if field not in _numeric_fields():
        known = ", ".join((*SHORT_NAMES, *sorted(set(_numeric_fields()) - set(SHORT_NAMES.values()))))
        raise ConfigError(f"--policy: there is no threshold {name!r}; known are {known}")
    return field


def _numeric_fields() -> list[str]:
    """Fields of Policy that are a number."""
    return [field.name for field in structs.fields(Policy) if not isinstance(field.default, tuple)]


def _parse_value(text: str, field: str, value: str) -> float:
    try:
        return parse_duration(value) if field.endswith("_seconds") else float(value)
    except ValueError as err:
        reason = str(err) if field.endswith("_seconds") else f"{value!r} is not a number"
        raise ConfigError(f"--policy {text}: {reason}") from err


def _policy_with(configured: Policy, settings: dict[str, float], label: str) -> Policy:
    try:
        return msgspec.convert(structs.asdict(configured) | settings, Policy, strict=False)
    except msgspec.ValidationError as err:
        raise ConfigError(f"--policy {label}: {err}") from err


def trigger_states(rows: Sequence[PolicyRow]) -> frozenset[str]:
    """States in which a GPU is reclaimed, in every row: those that the previewed thresholds define."""
    names = {name for row in rows for name in row.settings}
    return frozenset(_trigger_state(name) for name in names)


def _trigger_state(field: str) -> str:
    if field == SHORT_NAMES["no_process"]:
        return NO_PROCESS
    return HUNG if field.startswith(("hang_", "spin_")) else ZOMBIE


HOUR_SECONDS = 3600.0


class PreviewJob(Struct, frozen=True):
    """A job, with the names that its owner knows."""

    job_id: str
    name: str = ""
    user: str = ""
    cluster: str = ""
    """Cluster of the job id, if there are several clusters."""

    @property
    def key(self) -> tuple[str, str]:
        """Unique key."""
        return self.cluster, self.job_id


class Verdict(StrEnum):
    """Whether it was right to take a GPU back, by what happened later."""

    RIGHT = "right"
    """It did no real work afterwards."""
    WRONG = "wrong"
    UNJUDGED = "unjudged"
    """No real work was seen, but less than half of the remaining time was observed."""


_JUDGED_SHARE = 0.5
"""E: with less of the remaining time observed, no work seen does not mean no work done."""


class Episode(Struct, frozen=True, kw_only=True):
    """One time that a GPU is reclaimed: from which jobs, when, and what it did in the rest of its allocation."""

    uuid: str
    jobs: tuple[PreviewJob, ...]
    workload_class: str
    start: float
    seconds: float
    """Seconds until its allocation or the recording ended."""
    observed_seconds: float
    """The part of them in which the GPU was observed."""
    work_seconds: float = 0.0
    """Effective work in them."""
    worked_after: float | None = None
    """Seconds until the first of it; None: there was none."""
    weight: float = 1.0
    """Share of a GPU, for a MIG instance."""
    price: Price | None = None
    """Price at the start; None: unknown."""

    @property
    def verdict(self) -> Verdict:
        """Whether it was right."""
        if is_real_work(self.work_seconds, self.observed_seconds):
            return Verdict.WRONG
        return Verdict.RIGHT if self.observed_seconds >= _JUDGED_SHARE * self.seconds else Verdict.UNJUDGED

    @property
    def gpu_hours(self) -> float:
        """GPU-hours; of a MIG instance its share."""
        return self.seconds * self.weight / HOUR_SECONDS

    @property
    def work_gpu_hours(self) -> float:
        """GPU-hours of effective work that would not have been done."""
        return self.work_seconds * self.weight / HOUR_SECONDS


def common_class(classes: Iterable[str]) -> str:
    """The workload class of all jobs that share a GPU; "mixed" if they differ."""
    found = set(classes)
    return found.pop() if len(found) == 1 else "mixed"


class Hit(Struct, kw_only=True):
    """A job that would have lost a GPU and did real work on it later."""

    job_id: str
    name: str
    user: str
    cluster: str
    taken_at: float
    after_seconds: float
    """Seconds until it worked again; of several GPUs the shortest."""
    gpus: set[str]
    times: int = 0
    """Times a GPU was reclaimed wrongly; more than its GPUs if it held one of them more than once."""
    gpu_hours: float = 0.0
    """GPU-hours that were freed wrongly."""
    work_gpu_hours: float = 0.0
    """GPU-hours of work that it would have lost."""


class Score(Struct, frozen=True, kw_only=True):
    """One row of the result: a threshold, or a workload class of it."""

    label: str
    settings: dict[str, float]
    episodes: int
    episodes_right: int
    episodes_wrong: int
    episodes_unjudged: int
    precision: float | None
    """Right episodes over right and wrong ones; None if there are none."""
    gpu_hours_freed: float
    """Rightly."""
    money_freed: dict[str, float]
    """Amount by currency; empty without prices."""
    gpu_hours_wrongly_freed: float
    money_wrongly_freed: dict[str, float]
    gpu_hours_unjudged: float
    gpu_hours_work_lost: float
    """Later effective work that a reclaim would have destroyed, below the limit of real work or not."""
    jobs_reclaimed: int
    jobs_hit: int
    hits: tuple[Hit, ...]
    """All jobs that were hit, those that worked again soonest first."""
    by_class: tuple["Score", ...] = ()
    """The same by workload class, without the list of jobs."""


class PreviewResult(Struct, frozen=True, kw_only=True):
    """The result of a preview."""

    source: str
    since: float
    until: float
    gpu_hours_held: float
    taken_back_when: tuple[str, ...]
    """States in which a GPU is reclaimed."""
    rows: tuple[Score, ...]
    plain_rule: Score | None = None
    """What the plain rule would have freed and hit; None if no previewed threshold finds idle GPUs."""
    definition: str = DEFINITION
    """When taking back a GPU counts as right."""
    notes: tuple[str, ...] = ()

    def json(self) -> bytes:
        """The result as JSON."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2)


class EpisodeScorer:
    """Adds up the episodes of one row, over any number of recordings."""

    def __init__(self, label: str, settings: dict[str, float]) -> None:
        self._label, self._settings = label, settings
        self._episodes = dict.fromkeys(Verdict, 0)
        self._hours = dict.fromkeys(Verdict, 0.0)
        self._work_lost = 0.0
        self._money: dict[Verdict, dict[str, float]] = {verdict: {} for verdict in Verdict}
        self._reclaimed: set[tuple[str, str]] = set()
        self._hits: dict[tuple[str, str], Hit] = {}
        self._by_class: dict[str, EpisodeScorer] = {}

    def add(self, episode: Episode, *, by_class: bool = True) -> None:
        """Add an ended episode, to the sums and to those of its class."""
        verdict, kind = episode.verdict, episode.workload_class
        if by_class:
            self._by_class.setdefault(kind, EpisodeScorer(kind, {})).add(episode, by_class=False)
        self._episodes[verdict] += 1
        self._hours[verdict] += episode.gpu_hours
        self._work_lost += episode.work_gpu_hours
        self._reclaimed |= {job.key for job in episode.jobs}
        if episode.price is not None:
            money, price = self._money[verdict], episode.price
            money[price.currency] = money.get(price.currency, 0.0) + episode.gpu_hours * price.per_gpu_hour
        if verdict is Verdict.WRONG:
            for job in episode.jobs:
                self._hit(job, episode)

    def _hit(self, job: PreviewJob, episode: Episode) -> None:
        hit = self._hits.get(job.key)
        after = episode.seconds if episode.worked_after is None else episode.worked_after
        if hit is None:
            hit = self._hits[job.key] = Hit(
                job_id=job.job_id, name=job.name, user=job.user, cluster=job.cluster,
                taken_at=episode.start, after_seconds=after, gpus=set(),
            )  # fmt: skip
        elif after < hit.after_seconds:
            hit.taken_at, hit.after_seconds = episode.start, after
        hit.gpus.add(episode.uuid)
        hit.times += 1
        hit.gpu_hours += episode.gpu_hours / len(episode.jobs)
        hit.work_gpu_hours += episode.work_gpu_hours / len(episode.jobs)

    def score(self) -> Score:
        """Return the sums as a row."""
        right, wrong = self._episodes[Verdict.RIGHT], self._episodes[Verdict.WRONG]
        return Score(
            label=self._label,
            settings=self._settings,
            episodes=sum(self._episodes.values()),
            episodes_right=right,
            episodes_wrong=wrong,
            episodes_unjudged=self._episodes[Verdict.UNJUDGED],
            precision=right / (right + wrong) if right + wrong else None,
            gpu_hours_freed=self._hours[Verdict.RIGHT],
            money_freed=self._money[Verdict.RIGHT],
            gpu_hours_wrongly_freed=self._hours[Verdict.WRONG],
            money_wrongly_freed=self._money[Verdict.WRONG],
            gpu_hours_unjudged=self._hours[Verdict.UNJUDGED],
            gpu_hours_work_lost=self._work_lost,
            jobs_reclaimed=len(self._reclaimed),
            jobs_hit=len(self._hits),
            hits=tuple(sorted(self._hits.values(), key=_hit_order)),
            by_class=tuple(replace(self._by_class[kind].score(), hits=()) for kind in sorted(self._by_class)),
        )


def _hit_order(hit: Hit) -> tuple[float, str, str]:
    return hit.after_seconds, hit.cluster, hit.job_id


def known_price(price: Price) -> Price | None:
    """Return None for the placeholder price of a GPU without one, which must not be added to money."""
    return None if price.currency == "GPU-hours" else price


def name_some(jobs: Iterable[str]) -> str:
    """The first three names, and the number of others."""
    names = sorted(jobs)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004  as shown


def limit_note(jobs: Collection[str], limit: str = "") -> str:
    """Note on jobs whose own limit the previewed thresholds do not change."""
    which = limit and f" ({limit})"
    return f"jobs with a limit of their own{which}, which no row changes: {len(jobs)} ({name_some(jobs)})"


def left_alone_notes(exempt_jobs: Collection[str], when: str, unknown_gpus: Collection[object]) -> Iterator[str]:
    """Notes on GPUs that are not reclaimed in any row, if there are any."""
    if exempt_jobs:
        yield f"jobs with an exemption{when}: {len(exempt_jobs)} ({name_some(exempt_jobs)})"
    if unknown_gpus:
        yield f"GPUs left alone because the scheduler did not report their owner: {len(unknown_gpus)}"


def unjudged_notes(rows: Iterable[Score]) -> Iterator[str]:
    """Note on episodes that are neither right nor wrong, if there are any."""
    counts = [f"{row.label} {row.episodes_unjudged}" for row in rows if row.episodes_unjudged]
    if counts:
        yield (
            "reclaimed, and neither right nor wrong because less than half of the time afterwards was observed: "
            + ", ".join(counts)
        )


WIDTH = 80
MAX_HITS = 10
"""Jobs listed per row."""
_LABEL_WIDTH = 24
_STATE_TEXTS = {
    "zombie": "it is a zombie",
    "hung": "it hangs",
    "no_process": "it has had no process for too long",
}


def preview_text(result: PreviewResult) -> str:
    """Render for a terminal: the source, the definition, the table, the jobs that each row hits, and the notes."""
    compared = () if result.plain_rule is None else (result.plain_rule,)
    return (
        "\n".join(
            [
                *_heading_lines(result),
                "",
                *_score_lines((*result.rows, *compared)),
                *_hits_lines((*result.rows, *compared)),
                *_note_lines(result.notes),
            ]
        )
        + "\n"
    )


def _heading_lines(result: PreviewResult) -> Iterator[str]:
    yield from wrap(result.source, WIDTH)
    yield f"{format_time(result.since)} to {format_time(result.until)}, {result.gpu_hours_held:,.1f} GPU-hours held"
    yield from wrap(
        "Assumed: a GPU is reclaimed when " + " or ".join(_STATE_TEXTS[s] for s in result.taken_back_when) + ".", WIDTH
    )
    yield from wrap(result.definition, WIDTH)


def _score_lines(rows: Sequence[Score]) -> Iterator[str]:
    priced = any(row.money_freed or row.money_wrongly_freed for row in rows)
    money = f"{'money':>16}" if priced else ""
    yield f"{'':{_LABEL_WIDTH}}{'':>6}{'GPU-hours freed':>18}{'work':>8}{'':{len(money)}}{'jobs':>8}"
    yield f"{'threshold':{_LABEL_WIDTH}}{'times':>6}{'rightly':>9}{'wrongly':>9}{'lost':>8}{money}{'hit':>8}"
    for row in rows:
        yield from _score_row(row, priced=priced)
        for kind in row.by_class:
            yield from _score_row(kind, priced=priced, indent="  ")


def _score_row(row: Score, *, priced: bool, indent: str = "") -> Iterator[str]:
    """One row of the table; long labels and further currencies need more lines."""
    *lines, label = wrap(
        row.label, _LABEL_WIDTH, break_long_words=True, initial_indent=indent, subsequent_indent=indent
    ) or [""]
    yield from lines
    sums = [f"{amount:,.2f} {currency}" for currency, amount in sorted(row.money_freed.items())] or ["0"]
    money = f"{sums[0]:>16}" if priced else ""
    hours = f"{row.gpu_hours_freed:>9,.1f}{row.gpu_hours_wrongly_freed:>9,.1f}{row.gpu_hours_work_lost:>8,.1f}"
    hit = f"{row.jobs_hit}/{row.jobs_reclaimed}"
    yield f"{label:{_LABEL_WIDTH}}{row.episodes:>6}{hours}{money}{hit:>8}"
    for more in sums[1:]:
        yield f"{more:>{_LABEL_WIDTH + 48}}"


def _hits_lines(rows: Sequence[Score]) -> Iterator[str]:
    for row in rows:
        if row.hits:
            yield ""
            yield from wrap(f"{row.label} would have hit, soonest first:", WIDTH)
            for hit in row.hits[:MAX_HITS]:
                yield from _hit_lines(hit)
        if len(row.hits) > MAX_HITS:
            yield f"  and {len(row.hits) - MAX_HITS} more; --json lists them all"


def _hit_lines(hit: Hit) -> Iterator[str]:
    name_and_user = f"{shorten(hit.name or hit.job_id, 28):28} {shorten(hit.user or '-', 12):12}"
    yield f"  {name_and_user} worked {elapsed_text(hit.after_seconds)} later for {hit.work_gpu_hours:,.1f} h"
    times = f", {hit.times} times" if hit.times > 1 else ""
    gpus = "1 GPU" if len(hit.gpus) == 1 else f"{len(hit.gpus)} GPUs"
    where = f" in {shorten(hit.cluster, 16)}" if hit.cluster else ""
    yield from wrap(
        f"job {shorten(hit.job_id, 24)}{where}, reclaimed {format_time(hit.taken_at)}, {gpus}{times}",
        WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
    )


def elapsed_text(seconds: float) -> str:
    """Format a duration; below a minute in whole seconds, the distance of two samples."""
    return f"{seconds:.0f} s" if seconds < 60 else formatting.format_duration(seconds)  # noqa: PLR2004  a minute


def _note_lines(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield ""
    for note in notes:
        yield from wrap(f"- {note}", WIDTH, subsequent_indent="  ")
