"""What training and serving can lose, out of the tables of leaks, and how it is asked for.

Owns which losses a side has, what each is called and expects there, and their queries: a new row of LEAKS or TWELVE is
one more loss here. Zero is said only where somebody would have told of more: a loss that only a job's report or an
engine tells of has no figure while none speaks. Refuses panels (`leaks`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from dashboards.parts import Variable
from dashboards.series import a_month, at, part, total
from exporter.core.leak_guide import (
    EXAMPLE_WATERFALLS,
    LEAK_GUIDE,
    OTHER_LEAKS,
    ExpectedLoss,
    LeakGuideEntry,
    OtherLeak,
)
from exporter.core.leaks import LEAKS, Leak

SECONDS, COST = "class_leak:gpu_efficiency_seconds:rate5m", "class_leak:gpu_efficiency_cost:per_hour"
TAKEN, PRICE = "job_leak:gpu_efficiency_seconds:rate5m", "job:gpu_efficiency_price:per_hour"
INFO = "job:gpu_efficiency_info"
LAYERS = "class_layer:gpu_efficiency_seconds:rate5m"
_FLEET_COST = "cluster_leak:gpu_efficiency_cost:per_hour"
_VOICES = {"reported": "class:gpu_efficiency_reported:gpus", "engine": "class:gpu_efficiency_engine:gpus"}
_ROWS: Mapping[str, Leak] = {leak.name: leak for leak in LEAKS}
_NEEDS = {
    "measured": "hardware counters",
    "estimated": "hardware counters (an estimate)",
    "reported": "the job's report",
    "engine": "the serving engine's metrics",
}
_WATCHED: Mapping[str, tuple[str, ...]] = {
    "unavailable": ("cluster_reason:gpu_efficiency_unavailable:gpus",),
    "startup": ("job:gpu_efficiency_first_work:seconds",),
    "padding": ("job:gpu_efficiency_padding:ratio_rate5m",),
}
"""What to watch of rows that are none of the twelve, where it is more than their share, which the waterfall has."""


CHOSEN_LEAK = 'leak=~"$leak"'


class Side(Struct, frozen=True, kw_only=True):
    """Training or serving."""

    name: str
    """As the tables of leaks have it."""
    jobs: str
    where: str
    """What selects its jobs."""
    alike: str
    """What selects those of them that are compared with one another."""
    who: str
    """What selects them where they are named one by one."""
    voice: str
    """Who speaks beside the counters: reported, engine."""


TRAINING = Side(
    name="training", jobs="training jobs", where='workload_class!="serving"', alike='workload_class="batch"',
    who='workload_class!="serving"', voice="reported",
)  # fmt: skip
INFERENCE = Side(
    name="inference", jobs="servers", where='workload_class="serving"', alike='workload_class="serving"',
    who='workload_class="serving",workload_namespace=~"$namespace"', voice="engine",
)  # fmt: skip


class Loss(Struct, frozen=True, kw_only=True):
    """One of the twelve, or a row of LEAKS that is none of them, as one side has it."""

    key: str
    """Two digits, by which tables tell it from others: the number of one of the twelve, or a later one."""
    name: str
    rows: tuple[str, ...]
    team: str
    fix: str
    evidence: tuple[str, ...]
    needs: str
    watch: str
    series: tuple[str, ...]
    expected: ExpectedLoss
    runbook: str
    of_twelve: bool = True

    @property
    def title(self) -> str:
        """With its number, if it has one."""
        return f"{int(self.key)} {self.name}" if self.of_twelve else self.name.replace("_", " ")

    @property
    def leaks(self) -> str:
        """What selects its rows."""
        return f'leak=~"{"|".join(self.rows)}"' if len(self.rows) > 1 else f'leak="{self.rows[0]}"'

    def example(self, side: Side) -> float:
        """Hours that the example of 100 has of it."""
        return sum(EXAMPLE_WATERFALLS[side.name].get(row, 0) for row in self.rows)


def losses(side: Side) -> tuple[Loss, ...]:
    """All that a side can lose, the twelve first."""
    seeds = ((seed, getattr(seed, side.name)) for seed in LEAK_GUIDE)
    others = (_other(row, number, side) for number, row in enumerate(OTHER_LEAKS, len(LEAK_GUIDE) + 1))
    return (*(_seed(seed, expected) for seed, expected in seeds if expected is not None), *others)


def _seed(seed: LeakGuideEntry, expected: ExpectedLoss) -> Loss:
    return Loss(
        key=f"{seed.number:02}", name=seed.name, rows=seed.rows, team=seed.team, fix=seed.fix, evidence=seed.evidence,
        needs=seed.needs, watch=seed.watch, series=seed.series,
        expected=expected, runbook=seed.runbook,
    )  # fmt: skip


def _other(row: OtherLeak, number: int, side: Side) -> Loss:
    leak = _ROWS[row.row]
    evidence = tuple(leak.evidence.split(" or "))
    return Loss(
        key=f"{number:02}", name=row.row, rows=(row.row,), team=leak.team, fix=leak.fix, evidence=evidence,
        needs="; else ".join(_NEEDS[kind] for kind in evidence), watch=leak.watch,
        series=_WATCHED.get(row.row, ()), expected=getattr(row, side.name),
        runbook=row.runbook, of_twelve=False,
    )  # fmt: skip


def choice(side: Side) -> Variable:
    """The variable by which one of them is chosen; its value is a regular expression of rows of LEAKS."""
    titles = {"|".join(loss.rows): loss.title for loss in losses(side)}
    return Variable(name="leak", label="Leak", choices=titles, says="For the rows of the leak chosen at the top.")


def booked(loss: Loss) -> Iterator[Leak]:
    """The rows of LEAKS that book it."""
    return (_ROWS[row] for row in loss.rows)


# -- what is asked --


def paid(side: Side) -> str:
    """All GPU time of its jobs."""
    return total(LAYERS, side.where)


def _seen(side: Side) -> str:
    return total(LAYERS, side.where, 'layer!="unobserved"')


def told(loss: Loss) -> bool:
    """Whether only a report or an engine tells of it."""
    return set(loss.evidence) <= set(_VOICES)


def _voice(loss: Loss, side: Side) -> str:
    """Who tells most of it: the side's own voice if that tells of it, or the only one that does; else counters."""
    if side.voice in loss.evidence:
        return side.voice
    return loss.evidence[0] if told(loss) else ""


def _speaker(loss: Loss, side: Side) -> str:
    """GPU time of jobs for which that one speaks."""
    voice = _voice(loss, side)
    return total(_VOICES[voice], side.where) if voice else _seen(side)


def share(loss: Loss, side: Side, whole: float = 100) -> str:
    """Hours of 100 that its jobs held; 0 if somebody speaks and nothing was taken, nothing if nobody does."""
    silent = _speaker(loss, side) if told(loss) else _seen(side)
    return f"{whole:g} * ({total(SECONDS, side.where, loss.leaks)} or 0 * {silent}) / ({paid(side)} > 0)"


def heard(loss: Loss, side: Side) -> str:
    """The part of its jobs' GPU time for which the one speaks who tells most of the loss."""
    return f"clamp_max(({_speaker(loss, side)} or 0 * {paid(side)}) / ({paid(side)} > 0), 1)"


def price(loss: Loss, side: Side) -> str:
    """Money a month, by currency."""
    return a_month(COST, side.where, loss.leaks, by="currency")


def fleet_price(loss: Loss) -> str:
    """Money a month, by currency, whoever has the GPU, or nobody."""
    return a_month(_FLEET_COST, loss.leaks, by="currency")


def by_loss(these: Iterable[Loss], query: Callable[[Loss], str]) -> str:
    """All their answers, told apart by the label `loss`."""
    return " or ".join(f'label_replace({query(loss)}, "loss", "{loss.key}", "", "")' for loss in these)


def lost_by_job() -> str:
    """The share of each job's time that goes now to the leak that is chosen at the top."""
    return f"sum by (cluster, job_id) ({at(TAKEN, CHOSEN_LEAK)}) / on (cluster, job_id) {at(part('job', 'paid'))}"


def by_job(side: Side) -> str:
    """Money an hour that each job loses now to the leak that is chosen at the top."""
    cost = f"{lost_by_job()} * on (cluster, job_id) group_right () {at(PRICE)}"
    return f"{cost} and on (cluster, job_id) {at(INFO, side.who)}"


# -- what is asked of the leak that is chosen at the top --

_CHOSEN = 'label_replace(vector(1), "chosen", "${leak:raw}", "", "")'


def if_chosen(loss: Loss, expr: str) -> str:
    """An answer, if the loss is the one that is chosen; else nothing."""
    return f'label_replace({expr}, "chosen", "{"|".join(loss.rows)}", "", "") and on (chosen) {_CHOSEN}'


def chosen_shares(side: Side) -> str:
    """Hours of 100 of its jobs at each moment, by the rows of LEAKS that book it; 0 only where somebody would tell."""
    whole = f"sum({at(LAYERS, side.where)})"
    speakers = dict.fromkeys(_voice(loss, side) if told(loss) else "" for loss in losses(side))
    zeros = " or on (leak) ".join(_zeros(voice, side) for voice in speakers)
    taken = f"sum by (leak) ({at(SECONDS, side.where, CHOSEN_LEAK)})"
    return f"100 * ({taken} or on (leak) {zeros}) / on () group_left () ({whole} > 0)"


def _zeros(voice: str, side: Side) -> str:
    """A 0 of each row of the chosen loss, if that one would tell of it, and speaks."""
    speaks = at(_VOICES[voice] if voice else LAYERS, side.where)
    these = (loss for loss in losses(side) if (_voice(loss, side) if told(loss) else "") == voice)
    rows = " or ".join(
        if_chosen(loss, f'label_replace(vector(0), "leak", "{row}", "", "")') for loss in these for row in loss.rows
    )
    return f"sum by (leak) ({rows}) * on () group_left () sum({speaks})"


def chosen_bound(side: Side, bound: Callable[[ExpectedLoss], float]) -> str:
    """One end of the range to expect of the chosen loss."""
    return " or ".join(if_chosen(loss, f"vector({bound(loss.expected):g})") for loss in losses(side))


def chosen_note(label: str, side: Side, parts: Iterable[str]) -> str:
    """A line of each row of LEAKS that books the chosen loss, and of each part of its note.

    Under that label is `part:rows of the loss`, for which a cell has the text.
    """
    booking = " or ".join(
        if_chosen(loss, f'label_replace(vector(0.{number}), "what", "{row}", "", "")')
        for loss in losses(side)
        for number, row in enumerate(loss.rows)
    )
    lines = " or ".join(
        f'label_replace(vector({number}), "what", "{part}", "", "")' for number, part in enumerate(parts, 1)
    )
    every = f'{booking} or label_replace({lines}, "chosen", "${{leak:raw}}", "", "")'
    return f'sort(label_join({every}, "{label}", ":", "what", "chosen"))'
