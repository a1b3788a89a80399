"""The job tracker's cost, samples, GPUs and events, and which job record a job's time goes to."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Self

import pytest
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, NodeEvent
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Health, Observation, Owner
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.history.job_tracker import MOST_CLOSED, MOST_SAMPLES, JobTracker
from exporter.history.recorder import MOST_QUEUED, WriteQueue
from exporter.history.store import ClosedBook
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import simulate
from tests.worlds import WORKING, device, first, held, reading, seen

TWO = (device("GPU-0", "0"), device("GPU-1", "1"))


class World:
    """A job tracker with a ledger: plays seconds, and collects job records and events."""

    def __init__(self, *, sample_seconds: float = 300.0, policy: Policy | None = None) -> None:
        self.ledger = Ledger(policy)
        self.memory = JobTracker(node="node", ledger_id="life", sample_seconds=sample_seconds)
        self.meta = DaemonMetadata(source="nvml")
        self.events: list[NodeEvent] = []
        self.ended: list[JobRecord] = []
        self.at = 0

    def see(self, observation: Observation) -> None:
        advance(self.ledger, observation)
        events, ended = self.memory.update(take_snapshot(self.ledger, self.meta))
        self.events += events
        self.ended += ended

    def begin(self, *allocations: Allocation) -> Self:
        self.see(first(TWO, allocations))
        return self

    def play(self, seconds: int, signals: dict[str, Any] = WORKING, *, step: int = 10, **more: Any) -> None:
        for at in range(self.at, self.at + seconds, step):
            readings = [reading(at, at + step, signals, uuid=one.uuid) for one in TWO]
            self.see(seen(at + step, *readings, **(more if at == self.at else {})))
        self.at += seconds

    def now(self) -> dict[str, JobRecord]:
        snapshot = take_snapshot(self.ledger, self.meta)
        return {one.owner.job_id: one for one in self.memory.running_records(snapshot)}


def priced(*prices: Price) -> DaemonMetadata:
    return DaemonMetadata(source="nvml", terms=Terms(prices=prices))


def test_a_job_costs_what_its_gpus_cost_by_the_price_of_the_time() -> None:
    world = World()
    world.meta = priced(Price(3.6))
    world.begin(held(), held("GPU-1"))
    world.play(1000)
    world.meta = priced(Price(7.2, currency="EUR"))
    world.play(1000)
    world.play(10, allocations=())
    (statement,) = world.ended
    assert statement.money.keys() == {"USD", "EUR"}
    assert statement.money["USD"] == pytest.approx(2.0, rel=0.07), "two GPUs, 1000 s at 0.001 a second each"
    assert statement.money["EUR"] == pytest.approx(4.0, rel=0.07)
    (change,) = statement.price_changes
    assert change.money == {"USD": pytest.approx(0.001 * change.paid / SECOND)}
    assert change.paid / SECOND == pytest.approx(2000, rel=0.07)
    hours = {"USD": 3.6, "EUR": 7.2}
    assert sum(cost / hours[of] for of, cost in statement.money.items()) == pytest.approx(
        statement.paid / SECOND / 3600
    )


def test_of_many_changes_of_its_price_some_are_kept_and_the_cost_stays() -> None:
    world = World()
    world.meta = priced(Price(3.6))
    world.begin(held())
    for number in range(2 * MOST_SAMPLES):
        world.meta = priced(Price(3.6 if number % 2 else 7.2))
        world.play(60, step=60)
    changes = world.now()["41"].price_changes
    assert MOST_SAMPLES // 2 <= len(changes) <= MOST_SAMPLES
    assert [change.paid for change in changes] == sorted({change.paid for change in changes})
    assert changes[-1].money["USD"] == pytest.approx(0.0015 * changes[-1].paid / SECOND, rel=0.02)


def test_without_a_price_it_costs_nothing_that_is_known() -> None:
    world = World().begin(held())
    world.play(100, allocations=None)
    world.play(10, allocations=())
    assert world.ended[0].money == {}


def test_time_before_the_price_was_known_is_charged_at_that_price() -> None:
    """A table that arrives while the job runs, as at a first reload, or that is away for a while."""
    world = World().begin(held(), held("GPU-1"))
    for price in ((), (Price(3.6),), (), (Price(3.6),)):
        world.meta = priced(*price)
        world.play(1000)
    now = world.now()["41"]
    assert now.money == {"USD": pytest.approx(0.001 * now.paid / SECOND)}


def test_two_on_one_gpu_share_its_price_and_its_size() -> None:
    other = Owner(job_id="42", user="bob")
    world = World()
    world.meta = priced(Price(3.6))
    world.begin(held(), held(owner=other))
    world.play(600)
    now = world.now()
    assert now["41"].whole_gpus == now["42"].whole_gpus == 0.5
    total = sum(now[job].money["USD"] for job in ("41", "42"))
    assert total == pytest.approx(0.6, rel=1e-6)


def test_it_is_known_which_gpus_a_job_has_held_and_how_many_at_once() -> None:
    world = World().begin(held())
    world.play(100)
    world.play(100, allocations=(held("GPU-1"),))
    assert world.now()["41"].gpus == {"GPU-0": "0", "GPU-1": "1"}
    assert world.now()["41"].whole_gpus == 1.0
    world.play(100, allocations=(held(), held("GPU-1")))
    assert world.now()["41"].whole_gpus == 2.0
    assert world.now()["41"].models == ("NVIDIA H100 80GB HBM3",)


def test_samples_lie_apart_and_of_a_long_job_every_other_one_goes() -> None:
    world = World(sample_seconds=60.0).begin(held())
    world.play(60 * 600, step=60)
    samples = world.now()["41"].samples
    assert MOST_SAMPLES // 2 <= len(samples) <= MOST_SAMPLES + 1
    apart = [b.at - a.at for a, b in pairwise(samples)]
    assert len(set(apart[1:-1])) <= 2
    assert samples[0].at <= 120, "the first is never forgotten"
    for field in ("at", "paid", "seen", "occupied", "computing", "useful", "joules"):
        values = [getattr(sample, field) for sample in samples]
        assert values == sorted(values), field
    assert samples[-1].paid == pytest.approx(world.now()["41"].paid / SECOND)


def test_a_job_that_comes_back_while_its_book_is_open_goes_on_in_its_statement() -> None:
    world = World().begin(held())
    world.play(100)
    world.play(100, allocations=())
    world.play(100, allocations=(held(),))
    world.play(10, allocations=())
    assert [one.paid / SECOND for one in world.ended] == pytest.approx([100, 200], abs=21)
    assert len({(one.owner.job_id, one.life, one.start) for one in world.ended}) == 1


def test_one_that_comes_back_after_its_book_was_closed_has_a_statement_of_its_own() -> None:
    world = World(policy=Policy(job_linger_seconds=60.0)).begin(held())
    world.play(100)
    world.play(200, allocations=())
    world.play(100, allocations=(held(),))
    world.play(200, allocations=())
    last = {(one.owner.job_id, one.life, one.start): one for one in world.ended}
    assert len(last) == 2
    before, after = sorted(last.values(), key=lambda one: one.start)
    assert before.end <= after.start
    assert [one.paid / SECOND for one in (before, after)] == pytest.approx([100, 100], abs=21)


def test_that_is_so_over_a_restart_as_well() -> None:
    world = World(policy=Policy(job_linger_seconds=60.0)).begin(held())
    world.play(100)
    world.play(200, allocations=())
    memory = JobTracker(node="node", ledger_id="life")
    memory.load(world.memory.dump_tallies(), world.memory.dump_samples())
    world.memory = memory
    world.play(100, allocations=(held(),))
    assert world.now()["41"].start == world.ended[-1].end


class Shifted(World):
    """A world whose wall clock is `ahead` of the monotonic one, and read up to a millisecond late."""

    ahead = 10_000 * SECOND
    late = 0

    def see(self, observation: Observation) -> None:
        self.late = (self.late + 618_034) % 1_000_000
        super().see(replace(observation, wall=observation.at + self.ahead + self.late))

    def records(self) -> dict[tuple[str, str, float], JobRecord]:
        """As the store keeps them: the latest of each key."""
        return {(one.owner.job_id, one.life, one.start): one for one in self.ended}


def test_a_clock_that_is_set_back_while_a_job_runs_gives_it_one_record() -> None:
    world = Shifted(policy=Policy(job_linger_seconds=60.0)).begin(held())
    world.play(100)
    world.ahead -= 3600 * SECOND
    world.play(500)
    world.play(100, allocations=())
    assert len(world.ended) == 2, "when it ended, and when its series did"
    (record,) = world.records().values()
    assert (record.start, record.end) == pytest.approx((6400, 7000), abs=11)
    assert record.paid / SECOND == pytest.approx(600, abs=11)


def test_a_clock_that_is_set_back_after_a_job_has_ended_gives_it_no_second_record() -> None:
    world = Shifted(policy=Policy(job_linger_seconds=100.0)).begin(held())
    world.play(200)
    world.play(30, allocations=())
    world.ahead -= 3600 * SECOND
    world.play(100, allocations=(held(),))
    world.play(200, allocations=())
    assert len(world.ended) == 3, "when it ended first, when it ended again, and when its series did"
    (record,) = world.records().values()
    assert (record.start, record.end) == pytest.approx((10_000, 10_330), abs=11)
    assert record.paid / SECOND == pytest.approx(300, abs=21)
    world.play(100, allocations=(held(start=530),))
    assert world.now()["41"].start == pytest.approx(6930, abs=11)


def test_of_jobs_that_are_gone_only_so_many_are_remembered() -> None:
    world = World(policy=Policy(job_linger_seconds=1.0, max_jobs=1)).begin()
    for number in range(MOST_CLOSED + 20):
        owner = Owner(job_id=f"{number}", user="ada")
        world.play(10, allocations=(held(owner=owner, start=world.at),))
    assert len(world.memory.closed_until) == MOST_CLOSED
    assert len(world.memory.tallies) <= 3


def told(scenario: str) -> World:
    world = World()
    for observation in simulate(scenario, stories=SCENARIOS).observations:
        world.see(observation)
    return world


@pytest.mark.slow
def test_what_begins_and_what_is_over_are_events_and_the_job_remembers_it() -> None:
    world = told("demo")
    kinds = [event.kind for event in world.events]
    assert kinds.count("hung") >= kinds.count("hung_over") > 0
    hung = next(event for event in world.events if event.kind == "hung")
    assert hung.job_id
    assert hung.uuid
    last = {one.owner.job_id: one for one in [*world.ended, *world.now().values()]}
    assert sum(one.happened.get("hung", 0) for one in last.values()) == kinds.count("hung")
    assert [event.at for event in world.events] == sorted(event.at for event in world.events)


@pytest.mark.slow
def test_errors_that_come_every_second_are_one_event_a_minute_and_all_are_their_job_s() -> None:
    world = World().begin(held())
    world.play(1, step=1)
    for _ in range(129):
        world.play(1, step=1, health=(Health("GPU-0", xids=(13,)),))
    assert [event.text for event in world.events] == [
        "the driver told critical error 13",
        "the driver told critical error 13 (60 since the event before)",
        "the driver told critical error 13 (60 since the event before)",
    ]
    assert world.now()["41"].happened["xid"] == 129
    world.play(100)
    world.play(10, health=(Health("GPU-0", xids=(13, 31)),))
    assert world.events[-1].text == "the driver told critical error 31 (10 since the event before)"


def test_another_error_within_the_minute_is_an_event_of_its_own_but_not_any_number_of_them() -> None:
    world = World().begin(held())
    world.play(1, step=1)
    for _ in range(2):
        for xid in (31, 79):
            world.play(1, step=1, health=(Health("GPU-0", xids=(xid,)),))
    for xid in range(200, 220):
        world.play(1, step=1, health=(Health("GPU-0", xids=(xid,)),))
    texts = [event.text for event in world.events if event.kind == "xid"]
    assert texts[:3] == [
        "the driver told critical error 31",
        "the driver told critical error 79",
        "the driver told critical error 200 (3 since the event before)",
    ]
    assert len(texts) == 8
    assert world.now()["41"].happened["xid"] == 24


@pytest.mark.slow
def test_nothing_happens_on_a_node_that_works() -> None:
    assert told("healthy_training").events == []


def statements_of(jobs: Iterable[int], end: float = 1.0) -> list[JobRecord]:
    return [
        JobRecord(node="n", life="l", owner=Owner(job_id=f"{n}"), start=0.0, end=end, running=False, paid=0, parts={},
                  energy={})
        for n in jobs
    ]  # fmt: skip


def test_what_came_while_others_were_written_goes_on_waiting() -> None:
    waiting = WriteQueue()
    waiting.add(job_records=statements_of((1, 2)), events=[NodeEvent(at=1.0, kind="a")], closed=[book("A")])
    batch = waiting.batch()
    waiting.add(job_records=statements_of((2, 3), end=2.0), events=[NodeEvent(at=2.0, kind="b")], closed=[book("B")])
    waiting.remove_written(batch)
    left = waiting.batch()
    assert [(one.owner.job_id, one.end) for one in left.job_records] == [("2", 2.0), ("3", 2.0)]
    assert [event.kind for event in left.events] == ["b"]
    assert [each.uuid for each in left.closed] == ["B"]


def test_only_so_much_waits_and_what_was_written_is_not_forgotten_for_what_was_not() -> None:
    waiting = WriteQueue()
    waiting.add(
        events=[NodeEvent(at=float(n), kind="old") for n in range(MOST_QUEUED)],
        job_records=statements_of(range(MOST_QUEUED + 5)),
    )
    assert len(waiting.batch().job_records) == MOST_QUEUED
    assert waiting.batch().job_records[-1].owner.job_id == f"{MOST_QUEUED + 4}"
    batch = waiting.batch()
    waiting.add(events=[NodeEvent(at=-1.0, kind="new")] * 10)
    waiting.remove_written(batch)
    assert [event.kind for event in waiting.batch().events] == ["new"] * 10
    assert waiting.events_since(0.0) == []


def book(uuid: str) -> ClosedBook:
    return ClosedBook(uuid=uuid, life="l", since=0.0, until=1.0, paid=0, parts={})
