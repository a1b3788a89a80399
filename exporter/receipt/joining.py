"""The receipt of a job, joined of what its nodes say of it: `Statement`s of stores or of nodes, any number of lives.

Owns the books and the figures that follow. Sums are integers until the last division. Refuses to know how a statement
was had.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from exporter.core.money import NO_PRICE
from exporter.core.statement import Statement
from exporter.receipt.asking import ReceiptError
from exporter.receipt.books import HOUR, LAYERS_OF, Books
from exporter.receipt.course import course
from exporter.receipt.model import Quality, Receipt, When, Who
from exporter.receipt.putting import Known, put_together
from exporter.receipt.recalled import Recalled
from exporter.receipt.runs import Run, last_run, unseen
from exporter.receipt.truth import gained
from exporter.specs import find_spec
from exporter.wording import amount, moment, percent


class Asked(Struct, frozen=True, kw_only=True):
    """Who was asked, as far as the receipt has to say it."""

    source: str = "stores"
    """stores or nodes."""
    silent: tuple[str, ...] = ()
    """Who gave no answer, and why: a sentence each."""
    notes: tuple[str, ...] = ()
    """What is to be known of those who did."""
    grams_co2_per_kwh: float | None = None


_STORES = Asked()


def joined(statements: Sequence[Statement], *, job_id: str, at: float, asked: Asked = _STORES) -> Receipt:
    """The receipt of the job's last run that began before `at`, Unix seconds. Raises ReceiptError."""
    run = _run(statements, job_id, at, asked)
    figures, books, told = Recalled(run), books_of(run), run.statements
    energy = _summed(told, "energy")
    joules = sum(energy.values())
    known = Known(
        source=asked.source,
        who=_who(run),
        when=When(start=run.start, end=run.end, running=run.running),
        models=tuple(sorted({model for each in told for model in each.models})),
        joules=joules or None,
        energy_useful=energy.get("useful", 0.0) / joules if joules else None,
        grams_co2_per_kwh=asked.grams_co2_per_kwh,
        ofu=_ofu(told),
        qualities=tuple(_qualities(run, books)),
        fitting=next((stay.last.fitting for stay in run.stays if stay.last.fitting), ""),
        unneeded=sum(each.unneeded for each in told) / HOUR,
        expected_nodes=max(each.owner.nodes for each in told),
        course=course(run),
        simulated=any(each.simulated for each in told),
        unseen=tuple(_unseen(run, asked)),
    )
    return put_together(known, figures, books)


def _run(statements: Sequence[Statement], job_id: str, at: float, asked: Asked) -> Run:
    try:
        return last_run(statements, job_id=job_id, at=at)
    except ReceiptError as err:
        raise ReceiptError("; ".join((str(err), *asked.silent))) from None


def books_of(run: Run) -> Books:
    """Parts by node: exactly what the ledgers hold."""
    parts: dict[str, dict[str, int]] = {stay.node: _added(stay.lives) for stay in run.stays}
    missing = {stay.node: time for stay in run.stays if (time := unseen(stay, run)) > 0}
    seen = {stay.node: sum(life.paid for life in stay.lives) for stay in run.stays}
    currency, rates = _prices(run, seen)
    return Books(
        parts=parts,
        seen=seen,
        unseen=missing,
        gpus={stay.node: stay.gpus for stay in run.stays},
        currency=currency,
        rates=rates,
        layer_of=defaultdict(lambda: "emfu", LAYERS_OF),
        phases=Recalled(run).rows.by("phase", "run_seconds"),
    )


def _added(lives: Sequence[Statement]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for life in lives:
        found.update(life.parts)
    return dict(found)


def _summed(told: Sequence[Statement], field: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for each in told:
        for name, value in getattr(each, field).items():
            found[name] += value
    return dict(found)


def _prices(run: Run, seen: Mapping[str, int]) -> tuple[str, dict[str, float]]:
    """The one currency, and a GPU-hour's price by node; one that tells none has the mean of the rest."""
    currencies = {currency for each in run.statements for currency in each.money} - {NO_PRICE.currency}
    if len(currencies) != 1:
        return "", {}
    currency = currencies.pop()
    spent = {stay.node: sum(life.money.get(currency, 0.0) for life in stay.lives) for stay in run.stays}
    priced = {stay.node: sum(life.paid for life in stay.lives if currency in life.money) for stay in run.stays}
    usual = sum(spent.values()) * HOUR / sum(priced.values()) if any(priced.values()) else 0.0
    return currency, {node: spent[node] * HOUR / priced[node] if priced[node] else usual for node in seen}


def _who(run: Run) -> Who:
    """What most of its nodes say."""
    owner = Counter(stay.last.owner for stay in run.stays).most_common(1)[0][0]
    names = ("job_id", "name", "user", "account", "team", "partition", "namespace", "workload_class")
    return Who(**{name: getattr(owner, name) for name in names})


def _ofu(told: Sequence[Statement]) -> float | None:
    """Delivered FLOPs over what the boards could have done while that was seen; None of boards of several kinds."""
    models = {model for each in told for model in each.models}
    spec = find_spec(models.pop()) if len(models) == 1 else None
    seen = sum(each.tensor_seen for each in told)
    if spec is None or not spec.peak_flops or not seen:
        return None
    return sum(each.flops for each in told) / (seen * spec.peak_flops)


def _qualities(run: Run, books: Books) -> Iterator[Quality]:
    """Of a figure a node keeps the first value, the last, and when the target was reached: nothing between."""
    told = {stay.last.training.quality[0]: stay for stay in run.stays
            if stay.last.training is not None and stay.last.training.quality is not None}  # fmt: skip
    for name, stay in sorted(told.items()):
        first = next(life.training for life in stay.lives if life.training is not None)
        last = stay.last.training
        if last is None or last.quality is None:
            continue
        _, value, start, target = last.quality
        start = first.quality[2] if first.quality is not None and first.quality[0] == name else start
        reached = None if last.target_at is None else last.target_at / 1e9 - run.start
        track = ((reached, target),) if reached is not None and target is not None else ()
        yield gained(name, (start, value), start=start, target=target, cost=books.cost(books.seen), track=track)


# -- what was not seen --


def _unseen(run: Run, asked: Asked) -> Iterator[str]:
    yield from (f"{sentence}: what it saw of the job is not in this receipt" for sentence in asked.silent)
    yield from asked.notes
    yield from _absent(run)
    for stay in run.stays:
        if len(stay.lives) > 1:
            yield f"the daemon of {stay.node} began anew in the run: its {len(stay.lives)} parts are added"
    if run.earlier is not None:
        yield f"an earlier run under the same id ended {moment(run.earlier)}: --at with a time before shows it"
    if any(each.service is not None for each in run.statements):
        yield "requests, batch fill, KV cache and latencies are those told last: a node keeps no mean of them"


def _absent(run: Run) -> Iterator[str]:
    """How much of the job nobody tells of, as far as its other nodes can say."""
    expected, known = max(each.owner.nodes for each in run.statements), len(run.stays)
    if known < expected:
        gpus = sum(stay.gpus for stay in run.stays)
        world = max((each.training.world for each in run.statements if each.training is not None), default=0)
        missing = world - gpus if world > gpus else gpus / known * (expected - known)
        hours = missing * (run.end - run.start) / 3600
        yield (
            f"{expected - known} of the job's {expected} nodes told nothing: about {amount(missing)} GPUs,"
            f" {hours:,.2f} GPU-hours, {percent(missing / (missing + gpus))} of the job; all figures are of the others"
        )
