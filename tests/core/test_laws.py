"""The laws of the ledger, on inputs that hypothesis makes up.

Each docstring names the mutation under which the law was seen to fail.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.core import leaks
from exporter.core.attribution import attribute
from exporter.core.evidence import evaluate
from exporter.core.exposition import render
from exporter.core.leaks import LEAK_NAMES, LEAKS, Span, split_into_leaks
from exporter.core.ledger import Ledger, conserved
from exporter.core.metrics import METRICS
from exporter.core.model import (
    MS,
    PHASES,
    PPM,
    Allocation,
    Device,
    Observation,
    Owner,
    Process,
    Reading,
    ServingReport,
    State,
    TrainingReport,
)
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.core.states import BEGINNING, NO_SIGNS, STARVED, STEADY
from tests.worlds import H100, RESTING, SPINNING, WORKING, device

# Thresholds short enough for made-up minutes to cross every one of them.
POLICY = Policy(
    hang_suspect_seconds=1.0,
    hang_seconds=2.5,
    wake_seconds=0.4,
    wake_window_seconds=2.0,
    zombie_batch_seconds=4.0,
    zombie_interactive_seconds=6.0,
    zombie_serving_seconds=8.0,
    unowned_seconds=1.5,
    allocation_stale_seconds=6.0,
    job_linger_seconds=20.0,
    max_jobs=3,
)
GPUS = ("GPU-0", "GPU-1")
SIGNS = st.sampled_from([BEGINNING, STARVED, STEADY])
ratios = st.one_of(st.none(), st.sampled_from([0.0, 0.005, 0.99, 1.0]), st.floats(0, 1))
wild = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
rates = st.one_of(st.none(), st.sampled_from([0.0, 5e6, 2e9, 3e9]), st.floats(0, 1e12))
kinds = st.sampled_from([WORKING, RESTING, SPINNING])


SHARING = (Process(1, job_id="a", sm_active=0.3), Process(2, job_id="b", sm_active=0.01))


@st.composite
def signals(draw: st.DrawFn) -> dict[str, Any]:
    """A plain kind of second, a made-up one, or garbage."""
    base = dict(draw(kinds))
    if draw(st.booleans()):
        values = draw(st.sampled_from([ratios, wild]))
        for name in ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active", "gpu_utilization"):
            base[name] = draw(values)
        for name in ("pcie_tx_bytes_per_second", "nvlink_rx_bytes_per_second", "power_watts", "sm_clock_hz"):
            base[name] = draw(st.one_of(rates, wild))
    base["processes"] = draw(st.sampled_from([None, (), (Process(1),), SHARING]))
    base["distrust"] = draw(st.sampled_from(["", "", "", "stale"]))
    return base


@st.composite
def allocations(draw: st.DrawFn) -> tuple[Allocation, ...]:
    """Up to three owners on each GPU, beginning and ending anywhere."""
    made = []
    for uuid in GPUS:
        for job in draw(st.lists(st.sampled_from(["a", "b", "c"]), max_size=3)):
            start = draw(st.integers(-5_000, 30_000)) * MS
            lasts = draw(st.one_of(st.none(), st.integers(1, 20_000)))
            account = draw(st.sampled_from(["", "nlp", "vision"]))
            owner = Owner(
                job, account=account, workload_class=draw(st.sampled_from(["batch", "interactive", "serving", "odd"]))
            )
            made.append(
                Allocation(
                    uuid=uuid,
                    owner=owner,
                    start=start,
                    end=None if lasts is None else start + lasts * MS,
                    gpus=draw(st.integers(1, 2)),
                    restarts=draw(st.integers(0, 1)),
                )
            )
    return tuple(made)


@st.composite
def traces(draw: st.DrawFn) -> list[Observation]:
    """A node's story: readings of any length, gaps, lost GPUs, owners that come and go."""
    now = draw(st.integers(-3, 3)) * 1000 * MS
    devices = tuple(device(uuid, str(i), spec=draw(st.sampled_from([H100, None]))) for i, uuid in enumerate(GPUS))
    story = [Observation(now, now, devices=devices, allocations=draw(allocations()))]
    for _ in range(draw(st.integers(1, 8))):
        before, now = now, now + draw(st.integers(1, 9_000)) * MS
        readings = tuple(Reading(uuid, before, now, **draw(signals())) for uuid in GPUS if draw(st.integers(0, 9)))
        story.append(
            Observation(
                now,
                now,
                readings=readings,
                devices=draw(st.sampled_from([None, None, devices, _lost(devices)])),
                allocations=draw(st.one_of(st.none(), st.none(), allocations())),
                allocations_at=draw(st.sampled_from([None, None, story[0].at])),
            )
        )
    return story


said = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 1e15, -1.0, 1e40]), st.floats(0, 1e16))


@st.composite
def reports(draw: st.DrawFn, at: int) -> TrainingReport:
    """What a process might say, true or not."""
    end = at - draw(st.integers(-1, 5_000)) * MS
    lasted = draw(st.integers(-1, 5_000))
    phases = draw(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(-1, 2_000)), max_size=2))
    return TrainingReport(
        draw(st.sampled_from("abcd")),
        end - lasted * MS,
        end,
        model_flops=draw(said),
        hardware_flops=draw(said),
        gpus=draw(st.integers(0, 4)),
        uuids=draw(st.sampled_from([(), ("GPU-0",), ("GPU-1",), ("GPU-9",)])),
        rank=draw(st.sampled_from(["", "0", "1", "x"])),
        run=draw(st.sampled_from(["", "r"])),
        step=draw(st.one_of(st.none(), st.integers(0, 50))),
        steps=draw(st.integers(0, 3)),
        highest_step=draw(st.one_of(st.none(), st.integers(0, 50))),
        tokens=draw(said),
        padding=draw(said),
        dtype=draw(st.sampled_from(["", "fp8"])),
        recompute=draw(st.sampled_from(["", "none", "selective", "full"])),
        phase=draw(st.sampled_from(["", *PHASES])),
        phases=tuple((name, spent * MS) for name, spent in phases),
        bubble=draw(st.sampled_from([None, 0.0, 0.3, 1.0])),
        restart=draw(st.booleans()),
        loss=draw(st.sampled_from([None, 2.0, 100.0, float("inf")])),
    )


@st.composite
def words(draw: st.DrawFn, at: int) -> ServingReport:
    """What a serving engine might say."""
    end = at - draw(st.integers(-1, 5_000)) * MS
    names = (
        "running", "waiting", "slots", "kv_use", "prompt_tokens", "generated_tokens", "recomputed_tokens",
        "drafted_tokens", "accepted_tokens", "flops", "bytes", "inter_token_seconds", "calm_inter_token_seconds",
    )  # fmt: skip
    figures: dict[str, Any] = {name: draw(st.sampled_from([None, 0.0, 0.96, 1.0, 8.0, 1e3, -1.0])) for name in names}
    job, uuids = draw(st.sampled_from("abcd")), draw(st.sampled_from([(), ("GPU-0",)]))
    return ServingReport(job, end - draw(st.integers(0, 5_000)) * MS, end, "vllm", uuids=uuids, **figures)


@st.composite
def spoken(draw: st.DrawFn) -> list[Observation]:
    """A node's story in which workloads speak."""
    story = draw(traces())
    return [
        msgspec.structs.replace(
            o,
            reports=tuple(draw(st.lists(reports(o.at), max_size=3))),
            serving=tuple(draw(st.lists(words(o.at), max_size=1))),
        )
        for o in story
    ]


def _lost(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    return (msgspec.structs.replace(devices[0], condition="lost"), *devices[1:])


def run(story: Iterable[Observation]) -> Ledger:
    ledger = Ledger(POLICY)
    for observation in story:
        advance(ledger, observation)
    return ledger


def totals(ledger: Ledger) -> dict[str, Any]:
    """Everything that must not depend on how time was cut."""
    gpus = {uuid: (gpu.book.paid, tuple(gpu.book.parts)) for uuid, gpu in ledger.gpus.items()}
    jobs = {name: (job.book.paid, tuple(job.book.parts)) for name, job in ledger.jobs.items()}
    return {"gpus": gpus, "jobs": jobs, "states": {u: g.state for u, g in ledger.gpus.items()}}


relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(spoken())
def test_conservation(story: list[Observation]) -> None:
    """Every nanosecond paid is in exactly one part, of every GPU and of every job.

    Fails when `leaks.pour` forgets to subtract what it gave, or `Book.post` skips a part.
    """
    ledger = run(story)
    for gpu in ledger.gpus.values():
        assert sum(gpu.book.parts) == gpu.book.paid == story[-1].at - story[0].at
        assert conserved(gpu.book)
    for job in ledger.jobs.values():
        assert sum(job.book.parts) == job.book.paid
    assert ledger.conservation_errors == 0


@relaxed
@given(traces(), st.sampled_from([0.001, 1e6]))
def test_accounts_hold_what_all_jobs_paid_and_never_less_than_before(story: list[Observation], linger: float) -> None:
    """Fails when a job that is gone, or whose account became known, takes its past with it, or leaves it twice."""
    ledger = Ledger(msgspec.structs.replace(POLICY, job_linger_seconds=linger, max_jobs=99))
    before: dict[Any, tuple[int, ...]] = {}
    for observation in story:
        advance(ledger, observation)
        bills = ledger.account_totals()
        assert all(a <= b for key, parts in before.items() for a, b in zip(parts, bills[key], strict=True))
        before = bills
    billed, here = sum(map(sum, before.values())), sum(job.book.paid for job in ledger.jobs.values())
    assert billed == here if linger > 1 else billed >= here


@relaxed
@given(signals(), st.integers(1, 4), st.integers(1, 9_000), st.integers(1, 3))
def test_sharers_divide_every_leak_among_them(made: dict[str, Any], sharers: int, length: int, gpus: int) -> None:
    """What the GPU's book holds of each leak is what its owners' books hold together, to the nanosecond.

    Fails when sharers are each given the whole pools in `pipeline._poured`.
    """
    owners = [Allocation("GPU-0", Owner(job_id=k), start=0, gpus=gpus) for k in "abcd"[:sharers]]
    end = length * MS
    ledger = run([
        Observation(0, 0, devices=(device(),), allocations=tuple(owners)),
        Observation(end, end, readings=(Reading("GPU-0", 0, end, **made),)),
    ])  # fmt: skip
    together = [sum(column) for column in zip(*(job.book.parts for job in ledger.jobs.values()), strict=True)]
    assert together == ledger.gpus["GPU-0"].book.parts
    assert sum(job.book.paid for job in ledger.jobs.values()) == end


@given(
    st.integers(0, 10_000),
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(-9, 20_000), st.one_of(st.none(), st.integers(1, 9_000)), st.sampled_from("abc"))),
)
def test_partition(start: int, length: int, holds: list[tuple[int, int | None, str]]) -> None:
    """Attribution cuts an interval into parts that touch and never overlap, each with exactly its holders.

    Fails when `attribute` drops the cut at an allocation's end.
    """
    ends = [None if n is None else (a + n) * MS for a, n, _ in holds]
    made = tuple(Allocation("GPU-0", Owner(job_id=h[2]), h[0] * MS, end) for h, end in zip(holds, ends, strict=True))
    parts = attribute(start * MS, (start + length) * MS, made)
    assert parts[0][0] == start * MS
    assert parts[-1][1] == (start + length) * MS
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    for begin, end, holders in parts:
        assert begin < end
        for moment in (begin, (begin + end) // 2):
            holding = {h.owner.job_id for h in made if h.start <= moment and (h.end is None or moment < h.end)}
            assert {h.owner.job_id for h in holders} == holding


@relaxed
@given(traces(), st.data())
def test_cutting_a_reading_changes_no_total(story: list[Observation], data: st.DataObject) -> None:
    """Two half readings that say the same as the whole one are worth the same, to the nanosecond.

    Fails when each reading adds so much as a millisecond to a credit, or a state is decided by counting readings.
    """
    cut: list[Observation] = []
    for observation in story:
        at = data.draw(st.integers(1, 9_000)) * MS
        starts = [r.start for r in observation.readings]
        middle = starts[0] + at if starts else 0
        if starts and middle < observation.at:
            cut.append(_part(observation, None, middle))
            cut.append(_part(observation, middle, observation.at))
        else:
            cut.append(observation)
    assert totals(run(cut)) == totals(run(story))


def halved(story: Iterable[Observation]) -> list[Observation]:
    """Each reading in two, both in the same observation, with the cut on a whole millisecond."""
    replace = msgspec.structs.replace

    def two(whole: Reading) -> list[Reading]:
        middle = whole.start + (whole.end - whole.start) // 3 // MS * MS
        return [whole] if middle == whole.start else [replace(whole, end=middle), replace(whole, start=middle)]

    return [replace(o, readings=tuple(half for r in o.readings for half in two(r))) for o in story]


def _part(observation: Observation, start: int | None, end: int) -> Observation:
    replace = msgspec.structs.replace
    readings = tuple(replace(r, start=r.start if start is None else start, end=end) for r in observation.readings)
    whole = replace(observation, readings=readings, at=end, wall=end)
    if observation.allocations_at is None:
        whole = replace(whole, allocations_at=observation.at)
    return whole


@relaxed
@given(spoken())
def test_replay_is_deterministic(story: list[Observation]) -> None:
    """The same trace gives the same bytes, through JSON and back.

    Fails when `take_snapshot` leaves jobs in the order of their addresses.
    """
    again = [msgspec.json.decode(msgspec.json.encode(o), type=Observation) for o in finite(story)]
    once = render(take_snapshot(run(finite(story)), DaemonMetadata()), metrics=METRICS)
    assert render(take_snapshot(run(again), DaemonMetadata()), metrics=METRICS) == once


def finite(story: list[Observation]) -> list[Observation]:
    """JSON has no NaN: what a source cannot write down it cannot have said."""
    replace = msgspec.structs.replace
    names = Reading.__struct_fields__

    def clean(r: Reading) -> Reading:
        values = {n: getattr(r, n) for n in names}
        bad = {n: None for n, v in values.items() if isinstance(v, float) and not abs(v) < float("inf")}
        return replace(r, **bad) if bad else r

    def numbers(r: TrainingReport) -> TrainingReport:
        return replace(r, loss=None) if r.loss is not None and not abs(r.loss) < float("inf") else r

    return [replace(o, readings=tuple(map(clean, o.readings)), reports=tuple(map(numbers, o.reports))) for o in story]


@relaxed
@given(spoken())
def test_no_counter_ever_decreases(story: list[Observation]) -> None:
    """Fails when `Book.post` subtracts the energy it should add."""
    ledger = Ledger(POLICY)
    before: dict[str, tuple[float, ...]] = {}
    for observation in story:
        advance(ledger, observation)
        for gpu in ledger.gpus.values():
            now = (*gpu.book.parts, gpu.book.paid, gpu.book.engine, *gpu.book.energy, gpu.book.flops)
            was = before.get(gpu.device.uuid, (0,) * len(now))
            assert all(a >= b for a, b in zip(now, was, strict=True))
            before[gpu.device.uuid] = now
        for name, job in ledger.jobs.items():
            told = job.progress
            if told is not None:
                now = (*told.phases.values(), told.steps, told.rework_steps, told.tokens, told.recovery, told.gpu_time)
                was = before.get(f"{name} {job.start}", (0,) * len(now))
                assert all(a >= b for a, b in zip(now, was, strict=True))
                before[f"{name} {job.start}"] = now


@relaxed
@given(spoken())
def test_no_more_is_booked_on_a_word_than_was_said(story: list[Observation]) -> None:
    """Of phases that only a job can know: bubbles, and what the estimates have no sign of.

    Fails when `_spend` forgets to draw on a balance, or an open phase fills it twice.
    """
    ledger = run(story)
    bubble = LEAK_NAMES.index("pipeline_bubble")
    for name, job in ledger.jobs.items():
        told = sum(
            (report.end - report.start)
            for observation in story
            for report in observation.reports
            if report.job_id == name and report.end >= report.start
        )
        open_since = [r.end for o in story for r in o.reports if r.job_id == name and r.phase == "bubble"]
        ongoing = story[-1].at - min(open_since) if open_since else 0
        assert job.book.parts[bubble] <= (told + ongoing) * len(GPUS)


@relaxed
@given(signals(), st.sampled_from(list(State)), st.integers(1, 2), st.frozensets(SIGNS))
def test_a_leak_takes_no_less_than_nothing_and_no_more_than_is_left(
    made: dict[str, Any], state: State, gpus: int, signs: frozenset[str]
) -> None:
    """The pouring gives out exactly the whole, in parts that are never negative.

    Fails when `pour` trusts a detector's figure without clipping it.
    """
    ev = evaluate(Reading("GPU-0", 0, 1000 * MS, **made), device(), POLICY)
    pools = [ev.wait, ev.slack, ev.clock_loss, ev.ofu, ev.unresolved]
    assert sum(pools) == PPM
    assert min(pools) >= 0
    taken = split_into_leaks(Span(ev, state, POLICY, pools, PPM, gpus, 0, signs))
    assert all(amount > 0 for _, amount in taken)
    assert sum(amount for _, amount in taken) == PPM
    assert len({index for index, _ in taken}) == len(taken)


@pytest.mark.parametrize("greed", [-5, 0, 1, PPM, 10 * PPM])
def test_a_greedy_or_negative_detector_is_clipped(greed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a detector asks for, nothing is made and nothing vanishes."""
    ev = evaluate(Reading("GPU-0", 0, 1000 * MS, **WORKING), device(), POLICY)
    plan = tuple((-1, leak.pools, ((i, lambda *_: greed),)) for i, leak in enumerate(LEAKS) if leak.detector)
    monkeypatch.setitem(leaks._plans, (State.ACTIVE, NO_SIGNS), plan)
    taken = split_into_leaks(
        Span(ev, State.ACTIVE, POLICY, [ev.wait, ev.slack, ev.clock_loss, ev.ofu, ev.unresolved], PPM)
    )
    assert all(amount > 0 for _, amount in taken)
    left = PPM - sum(amount for _, amount in taken)
    assert left == (0 if greed >= PPM else left)
    assert left >= 0
