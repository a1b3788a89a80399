"""Tests the main loop with fake sources and schedulers that work, fail, hang, respond late and recover.

Every tick also checks the ledger's invariants, whatever the test is about.
"""

import logging
import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from exporter.agent import agent as module
from exporter.agent.agent import Agent, paced, when_due
from exporter.agent.sampler import Collector, Sampler
from exporter.clock import SystemClock
from exporter.core.checkpoint import dump_ledger
from exporter.core.ledger import OTHER_ACCOUNTS
from exporter.core.model import SECOND, Fault, Health, Observation, Owner, State
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata
from exporter.schedulers.base import SchedulerError
from exporter.schedulers.processes import ProcessesScheduler
from exporter.sources.base import SourceError, TelemetrySource
from exporter.sources.selector import QUICK_TRIES, RECHECK_INTERVAL, SourceSelector
from tests.clocks import JumpClock
from tests.rigs import TWO, FakeScheduler, FakeSource, Rig, ladder
from tests.waiting import PATIENCE
from tests.worlds import JOB, RESTING, device, first, held, reading, seen


def test_the_first_tick_brings_the_inventory_and_the_next_ones_fill_every_second(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    first = rig.tick()
    assert (first.devices, first.readings) == (TWO, ())
    rig.tick(12)
    assert (rig.paid("GPU-0"), rig.paid("GPU-1")) == (60.0, 60.0)
    assert rig.seconds("unobserved") == 0.0
    assert rig.seconds("useful") == pytest.approx(0.45 * 60)
    assert rig.ledger.rejected == {}
    assert rig.source.opens == 1


def test_what_has_not_changed_is_not_said_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    said = [rig.tick() for _ in range(4)]
    assert [o.devices for o in said if o.devices is not None] == [TWO]
    assert [o.allocations for o in said if o.allocations is not None] == [rig.scheduler.said]
    assert said[-1].allocations_at == said[-1].settled
    rig.scheduler.said = rig.scheduler.said[:1]
    assert rig.tick().allocations == rig.scheduler.said
    rig.source.devices = (replace(TWO[0], condition="drained"), TWO[1])
    assert rig.tick().devices == rig.source.devices
    quiet = rig.tick()
    assert (quiet.devices, quiet.allocations) == (None, None)


def test_before_there_is_a_reading_nobody_is_said_to_hold_nothing(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ProcessesScheduler())
    rig.source.signals_of = {uuid: RESTING | {"processes": None} for uuid in ("GPU-0", "GPU-1")}
    rig.tick(10)
    assert {gpu.reason for gpu in rig.ledger.gpus.values()} == {"owner_unknown"}
    assert rig.seconds("idle_allocation") == 0.0
    assert rig.paid() == rig.seconds("unobserved") == 45.0


def test_a_source_that_fails_is_dropped_and_opened_again_every_second_then_after_pauses_up_to_a_minute(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(interval=1.0)
    rig.tick(3)
    broken_at = rig.clock.now() // SECOND + 1
    rig.source.reads.clear()
    rig.source.trouble.extend(SourceError(f"no answer, try {n}") for n in range(QUICK_TRIES + 8))
    rig.tick(160)
    after = [moment // SECOND - broken_at for moment in rig.source.reads]
    assert after == [*range(QUICK_TRIES + 1), 31, 33, 37, 45, 61, 93, 153]
    assert rig.source.closes == QUICK_TRIES + 8
    assert rig.agent.last_error() == "fake: opened, but the first read failed: no answer, try 37 (next try in 54 s)"
    rig.tick(56)
    assert [moment // SECOND - broken_at for moment in rig.source.reads[QUICK_TRIES + 8 : QUICK_TRIES + 10]] == [
        213,
        214,
    ]
    assert rig.agent.last_error() == ""


def test_a_success_makes_the_pauses_short_again(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0)
    for _ in range(3):
        rig.source.trouble.extend([SourceError("once"), SourceError("twice")])
        rig.tick(6)
        assert rig.agent.last_error() == ""


def test_after_a_failure_the_time_is_unobserved_and_counting_goes_on(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.tick(7)
    rig.source.trouble.append(SourceError("the driver was unloaded"))
    failed = rig.tick()
    assert [fault.kind for fault in failed.faults] == ["source_failed"]
    assert rig.agent.last_error() == "the driver was unloaded"
    assert rig.ledger.gpus["GPU-0"].state is State.UNOBSERVED
    useful = rig.seconds("useful")
    rig.tick(11)
    assert rig.paid() == 90.0
    assert rig.seconds("unobserved") == 10.0
    assert rig.seconds("useful") == pytest.approx(useful + 0.45 * 50)
    assert rig.ledger.unobserved["source_failed"] == 2 * 5 * SECOND
    assert rig.ledger.faults["source_failed"] == 1
    assert rig.source.opens == 2
    assert rig.ledger.rejected == {}


def test_one_gpu_s_fault_leaves_the_other_s_data_alone_and_is_logged(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    rig.tick(3)
    rig.source.faults = (Fault("gpu_lost", "GPU 1 is lost", "GPU-1"),)
    rig.source.devices = (TWO[0], replace(TWO[1], condition="lost"))
    rig.source.signals_of = {"GPU-1": {"distrust": "blank"}}
    rig.tick(6)
    assert rig.seconds("unavailable", "GPU-1") == 30.0
    assert rig.seconds("unobserved", "GPU-0") == 0.0
    assert rig.seconds("useful", "GPU-0") == pytest.approx(0.45 * 40)
    assert rig.agent.last_error() == "GPU 1 is lost"
    assert any("GPU 1 is lost" in record.message for record in caplog.records)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the sampler's log, without duplicates."""
    return [record.message for record in caplog.records if record.name == "exporter.agent.sampler"]


def test_a_fault_is_told_when_it_appears_and_when_it_is_over_and_not_between(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(interval=1.0)
    rig.tick(3)
    for n in range(60):
        rig.source.faults = (
            Fault("gpu_lost", f"GPU 1 is lost, look {n}", "GPU-1"),
            Fault("nvml_unknown", "?", "GPU-0"),
        )
        assert [fault.kind for fault in rig.tick().faults] == ["gpu_lost", "nvml_unknown"]
    rig.source.faults = (Fault("gpu_lost", "GPU 0 too", "GPU-0"),)
    rig.tick(12)
    rig.source.faults = ()
    rig.tick(10)
    assert told(caplog) == [
        "gpu_lost: GPU 1 is lost, look 0",
        "nvml_unknown: ?",
        "gpu_lost: GPU 0 too",
        "gpu_lost of GPU-1 is over after 60 s",
        "nvml_unknown of GPU-0 is over after 60 s",
        "gpu_lost of GPU-0 is over after 12 s",
    ]
    rig.source.faults = (Fault("gpu_lost", "once more", "GPU-1"),)
    rig.tick(2)
    assert told(caplog)[6:] == ["gpu_lost: once more"]


def test_a_tick_that_saw_nothing_does_not_end_the_faults_of_gpus(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(interval=1.0)
    rig.source.faults = (Fault("gpu_lost", "GPU 1 is lost", "GPU-1"),)
    rig.tick(3)
    rig.source.trouble.append(SourceError("the driver was reloaded"))
    rig.tick(5)
    assert told(caplog) == [
        "gpu_lost: GPU 1 is lost",
        "source_failed: the driver was reloaded",
        "source_failed is over after 1 s",
    ]


def test_a_hang_is_told_once_and_its_end_too(rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(interval=1.0, deadline=10.0, slow=True)
    rig.source.faults = (Fault("gpu_lost", "GPU 1 is lost", "GPU-1"),)
    rig.tick(3)
    rig.slow.away = 30
    rig.tick(35)
    assert told(caplog) == [
        "gpu_lost: GPU 1 is lost",
        "source_hung: fake: no answer for 11 s; still waiting",
        "source answers again",
        "source_hung is over after 20 s",
    ]


def test_what_only_happens_is_not_told_to_be_over(rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(interval=1.0)
    rig.tick(2)
    for _ in range(2):
        rig.source.faults = (Fault("clock_step", "the wall clock was set"), Fault("unknown_model", "?", "GPU-0"))
        rig.tick(2)
        rig.source.faults = ()
        rig.tick(2)
    assert told(caplog) == ["clock_step: the wall clock was set", "unknown_model: ?"] * 2


class Strange(Exception):  # noqa: N818  a vendor's library throws what it likes
    """An exception that no code expects."""


def test_an_exception_nobody_knows_counts_as_a_failure_and_is_logged_with_its_place(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    rig.tick(2)
    rig.source.trouble.append(Strange("0xdeadbeef"))
    assert [fault.kind for fault in rig.tick().faults] == ["source_failed"]
    assert any(record.exc_info and "unexpected error" in record.message for record in caplog.records)
    rig.tick(3)
    assert rig.ledger.gpus["GPU-0"].state is State.ACTIVE
    assert rig.errors() == {"core": 0, "history": 0, "record": 0, "snapshot": 0}


def test_values_that_come_late_are_waited_for_as_long_as_the_source_says(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0)
    rig.source.late = 3 * SECOND
    rig.tick()
    said = [rig.tick() for _ in range(5)]
    assert [o.at - (o.settled or 0) for o in said] == [3 * SECOND] * 5
    rig.source.late = -5 * SECOND  # nothing is settled before it was asked for
    ahead = rig.tick()
    assert ahead.settled == ahead.at


def test_health_is_passed_on_as_it_is(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.source.health = (Health("GPU-1", xids=(63,), recovery_action=0),)
    assert rig.tick().health == rig.source.health
    rig.source.health = ()
    assert rig.tick().health == ()


def test_an_open_time_stays_open_where_the_source_had_left_it(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0, slow=True)
    rig.source.late = 3 * SECOND
    last = rig.tick(6)
    rig.slow.away = 4
    assert {rig.tick().settled for _ in range(4)} == {last.settled}
    assert last.settled == last.at - 3 * SECOND


def test_a_source_that_cannot_be_opened_at_first_is_opened_later(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.source.trouble.append(SourceError("not yet"))
    assert rig.tick().devices is None
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.gpus == ()
    rig.tick(4)
    assert rig.paid() > 0
    assert rig.seconds("unobserved") == 0.0


class Two:
    """A good source and a fallback that can fail or hang while opening."""

    def __init__(self) -> None:
        self.good, self.other = FakeSource(), FakeSource()
        self.other.signals = frozenset({"gpu_utilization"})
        self.refused = self.hangs = False
        self.gate, self.inside = threading.Event(), threading.Event()

    def open(self, name: str) -> TelemetrySource:
        if name == "other":
            return self.other.open(name)
        if self.hangs:
            self.inside.set()
            self.gate.wait(PATIENCE)
        if self.refused:
            raise SourceError("nothing listens on localhost:5555")
        return self.good.open(name)

    def rungs(self) -> SourceSelector:
        return SourceSelector(("good", "other"), self.open, chance=lambda: 0.5)


def test_another_source_takes_over_and_hands_back_without_a_second_counted_twice(rigs: Callable[..., Rig]) -> None:
    two = Two()
    rig = rigs(interval=1.0, rungs=two.rungs())
    assert rig.tick(10).source == "good"
    two.refused = True
    two.good.trouble.append(SourceError("the connection is not valid any more"))
    rig.tick(18)
    assert rig.observer.name == "other"
    assert rig.seconds("unobserved") == 9.0  # eight tries a second apart, and the read that failed
    two.refused = False
    rig.tick(RECHECK_INTERVAL // SECOND)
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.meta.source == "good"
    assert snapshot.meta.source_reason == "good: sees tensor activity on 2 of 2 GPUs; in place of other"
    assert rig.seconds("unobserved") == 10.0
    assert rig.paid() == 27.0 + RECHECK_INTERVAL // SECOND
    assert (two.good.opens, two.good.closes, two.other.closes) == (2, 1, 1)
    assert rig.ledger.gpus["GPU-0"].rejected == {}


def test_a_better_source_that_hangs_while_it_is_opened_delays_no_reading_but_the_next(rigs: Callable[..., Rig]) -> None:
    two = Two()
    two.refused = True
    rig = rigs(interval=0.05, deadline=1000.0, rungs=two.rungs())
    rig.tick(3)
    two.hangs = True
    rig.clock.wait(rig.clock.now() + RECHECK_INTERVAL, threading.Event())
    assert rig.tick().readings != ()
    assert two.inside.wait(PATIENCE)
    during = [rig.tick() for _ in range(5)]
    assert [observation for observation in during if observation.readings or observation.faults] == []
    two.gate.set()
    rig.until(lambda: rig.ledger.at == rig.ledger.gpus["GPU-0"].book.until)
    assert rig.seconds("unobserved") == 0.0


def test_a_bug_on_the_reading_thread_is_told_and_survived(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(interval=1.0)
    rig.tick(3)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(SourceSelector, "read", broken)
        assert [fault.message for fault in rig.tick().faults] == ["collecting failed: a bug of ours"]
    with monkeypatch.context() as patch:
        patch.setattr(SourceSelector, "try_better", broken)
        rig.tick(2)
    rig.tick(2)
    assert rig.ledger.gpus["GPU-0"].state is State.ACTIVE
    assert sum(record.exc_info is not None for record in caplog.records) >= 2


def test_what_the_first_visit_brought_home_is_the_first_observation() -> None:
    source, clock = FakeSource(), JumpClock(start=1000 * SECOND)
    source.health, source.faults = (Health("GPU-0", xids=(79,)),), (Fault("unknown_model", "no peak", "GPU-0"),)
    hands = Collector(ladder(source), FakeScheduler())
    first = hands.collect_now(clock.now() - 2 * SECOND)
    observer = Sampler(hands, clock, interval=1.0, deadline=10.0, first=first)
    assert (observer.name, source.reads) == ("fake", [998 * SECOND])
    came = observer.observations(threading.Event())
    opening, then, last = next(came), next(came), next(came)
    hands.close()
    assert (opening.devices, opening.readings, opening.settled) == (TWO, (), 998 * SECOND)
    assert (opening.health, opening.faults) == (source.health, source.faults)
    spans = [(r.start // SECOND, r.end // SECOND) for r in (*then.readings, *last.readings) if r.uuid == "GPU-0"]
    assert spans == [(998, 1001), (1001, 1002)]
    assert source.resyncs == 0


def test_what_a_late_answer_says_beside_its_readings_is_not_lost(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0, deadline=10.0, slow=True)
    rig.tick(3)
    rig.source.health = (Health("GPU-0", xids=(79,)),)
    rig.source.faults = (Fault("gpu_lost", "GPU 0 is lost", "GPU-0"),)
    rig.slow.away = 15
    rig.tick(15)
    late = rig.tick()
    assert (late.readings, late.health) == ((), rig.source.health)
    assert [fault.kind for fault in late.faults] == ["source_hung", "gpu_lost"]


def test_slow_within_the_deadline_leaves_the_time_open_and_then_covers_it(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0, deadline=10.0, slow=True)
    rig.tick(10)
    rig.slow.away = 7
    during = [rig.tick() for _ in range(7)]
    assert {observation.settled for observation in during} == {1009 * SECOND}
    assert all(observation.faults == () for observation in during)
    assert rig.paid() == 9.0
    rig.tick(3)
    assert rig.paid() == 19.0
    assert rig.seconds("unobserved") == 0.0
    assert rig.ledger.unobserved == {}
    assert rig.source.resyncs == 0


def test_hung_beyond_the_deadline_the_time_is_given_up_and_the_late_answer_dropped(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0, deadline=10.0, slow=True)
    rig.tick(10)
    useful = rig.seconds("useful")
    rig.slow.away = 30
    during = [rig.tick() for _ in range(30)]
    assert [observation.faults != () for observation in during] == [False] * 11 + [True] * 19
    assert {fault.kind for observation in during for fault in observation.faults} == {"source_hung"}
    assert "no answer for 29 s" in rig.agent.last_error()
    assert rig.seconds("unobserved") == 30.0
    late = rig.tick()
    assert late.readings == ()
    assert rig.seconds("useful") == useful
    assert len(rig.slow.asked) == 11
    rig.tick(11)
    assert rig.slow.asked[11] == (1041 * SECOND, True)
    assert [resync for _, resync in rig.slow.asked[12:]] == [False] * 10
    assert rig.paid() == 51.0
    assert rig.seconds("unobserved") == 32.0
    assert rig.seconds("useful") == pytest.approx(useful + 0.45 * 10)
    assert rig.ledger.unobserved["source_hung"] == 2 * 31 * SECOND
    assert rig.ledger.rejected == {}


def test_a_hang_on_a_real_thread_blocks_nobody_and_ends_well(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=0.05, deadline=0.2)
    rig.until(lambda: rig.seconds("useful") > 0 if rig.ledger.gpus else False)
    rig.source.inside.clear()
    rig.source.gate.clear()
    rig.until(lambda: rig.ledger.faults["source_hung"] > 2)
    assert rig.source.inside.is_set()
    assert rig.ledger.gpus["GPU-0"].state is State.UNOBSERVED
    assert rig.ledger.gpus["GPU-0"].reason == "source_hung"
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.at == rig.clock.now()
    reads, useful = len(rig.source.reads), rig.seconds("useful")
    rig.source.gate.set()
    rig.until(lambda: rig.seconds("useful") > useful)
    assert rig.source.resyncs >= 1
    assert len(rig.source.reads) > reads
    assert rig.ledger.unobserved["source_hung"] > 0
    assert rig.ledger.rejected == {}


def test_a_silent_scheduler_makes_owners_unknown_after_the_policy_s_time_and_nobody_unallocated(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(FakeScheduler(held("GPU-0", start=1000.0)))
    rig.source.signals_of = {"GPU-1": RESTING | {"processes": ()}}
    rig.tick(13)
    assert rig.ledger.gpus["GPU-1"].state is State.UNALLOCATED
    rig.scheduler.trouble = SchedulerError("slurmctld does not answer")
    ages = []
    for _ in range(18):
        rig.tick()
        snapshot = rig.agent.latest()
        assert snapshot is not None
        ages.append(snapshot.allocations_age)
    assert ages == [age * SECOND for age in range(5, 95, 5)]
    assert rig.ledger.gpus["GPU-1"].state is State.UNALLOCATED
    assert rig.seconds("idle_allocation", "GPU-1") == 60.0 + 90.0
    rig.tick(12)
    busy, free = rig.ledger.gpus["GPU-0"], rig.ledger.gpus["GPU-1"]
    assert (busy.state, [h.owner.job_id for h in busy.holders]) == (State.ACTIVE, ["unknown"])
    assert (free.state, free.reason) == (State.UNOBSERVED, "owner_unknown")
    assert rig.seconds("idle_allocation", "GPU-1") == 150.0
    assert rig.seconds("idle_allocation", "GPU-0") == 0.0
    assert rig.seconds("unobserved", "GPU-0") == 0.0
    assert rig.agent.last_error() == "slurmctld does not answer"
    assert rig.ledger.faults["scheduler_failed"] == 30


def test_a_policy_of_shorter_patience_reaches_the_ledger(rigs: Callable[..., Rig]) -> None:
    rig = rigs(FakeScheduler(held("GPU-0", start=1000.0)), policy=Policy(allocation_stale_seconds=10.0))
    rig.tick(2)
    rig.scheduler.trouble = SchedulerError("gone")
    rig.tick(4)
    assert [h.owner.job_id for h in rig.ledger.gpus["GPU-0"].holders] == ["unknown"]


def test_a_scheduler_that_answers_again_is_believed_again(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(FakeScheduler(held("GPU-0", start=1000.0)))
    rig.tick(2)
    rig.scheduler.trouble = Strange("a bug in the scheduler's adapter")
    rig.tick(30)
    assert any(record.exc_info and record.message == "scheduler failed" for record in caplog.records)
    rig.scheduler.trouble = None
    rig.tick()
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.allocations_age == 0
    rig.tick()
    assert [h.owner for h in rig.ledger.gpus["GPU-0"].holders] == [JOB]
    assert rig.agent.last_error() == ""


def test_a_gpu_that_vanishes_is_missing_and_still_paid_for(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.tick(4)
    rig.source.devices = TWO[:1]
    said = rig.tick().devices
    assert said is not None
    assert {d.uuid: d.condition for d in said} == {"GPU-0": "", "GPU-1": "missing"}
    assert rig.tick(3).devices is None
    gone = rig.ledger.gpus["GPU-1"]
    assert (gone.state, gone.reason) == (State.UNAVAILABLE, "missing")
    assert rig.paid("GPU-1") == rig.paid("GPU-0") == 35.0
    assert rig.seconds("unavailable", "GPU-1") == 20.0
    rig.source.devices = TWO
    assert rig.tick().devices == TWO
    rig.tick()
    assert rig.ledger.gpus["GPU-1"].state is State.ACTIVE


def test_a_gpu_lost_while_the_source_was_down_is_missing_too(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.tick(3)
    rig.source.trouble.append(SourceError("the driver was reloaded"))
    rig.source.devices = TWO[:1]
    rig.tick(5)
    assert rig.ledger.gpus["GPU-1"].device.condition == "missing"
    assert rig.ledger.gpus["GPU-0"].state is State.ACTIVE


def test_a_snapshot_never_changes_once_it_is_out(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    assert rig.agent.latest() is None
    rig.tick(3)
    early = rig.agent.latest()
    assert early is not None
    kept = [(gpu.counters.now.parts, gpu.counters.now.paid, gpu.state) for gpu in early.gpus]
    rig.source.signals_of = {"GPU-0": RESTING}
    rig.tick(3)
    assert rig.agent.latest() is not early
    assert [(gpu.counters.now.parts, gpu.counters.now.paid, gpu.state) for gpu in early.gpus] == kept


def test_readers_in_other_threads_always_find_one_whole_moment(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slow=True)
    rig.tick(2)
    done, torn, seen = threading.Event(), [], set()

    def read() -> None:
        before = 0
        while not done.is_set():
            snapshot = rig.agent.latest()
            assert snapshot is not None
            seen.add(snapshot.at)
            paid = {gpu.counters.now.paid for gpu in snapshot.gpus}
            whole = all(sum(gpu.counters.now.parts) == gpu.counters.now.paid for gpu in snapshot.gpus)
            if snapshot.at < before or len(paid) != 1 or not whole:
                torn.append(snapshot.at)
            before = snapshot.at

    reader = threading.Thread(target=read)
    reader.start()
    rig.until(lambda: len(seen) > 20, ticks=100_000)
    done.set()
    reader.join(PATIENCE)
    assert torn == []


def test_a_bug_in_the_core_is_counted_told_and_survived(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    rig.tick(3)

    def broken(_ledger: object, _observation: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(module, "advance", broken)
        rig.tick(2)
    assert rig.errors() == {"core": 2, "history": 0, "record": 0, "snapshot": 0}
    assert rig.agent.last_error() == "core: a bug of ours"
    assert any(record.exc_info for record in caplog.records)
    rig.tick(2)
    assert rig.errors()["core"] == 2
    assert rig.agent.last_error() == ""
    assert rig.paid() == 30.0
    assert rig.seconds("unobserved") == 10.0


def test_a_bug_in_the_picture_or_in_the_observing_is_survived_too(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs()
    rig.tick(3)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(module, "take_snapshot", broken)
        rig.tick(2)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_observe", broken)
        assert [fault.message for fault in rig.tick().faults] == ["observing failed: a bug of ours"]
    rig.tick(3)
    assert rig.errors() == {"core": 0, "history": 0, "record": 0, "snapshot": 2}
    assert rig.ledger.gpus["GPU-0"].state is State.ACTIVE
    assert rig.paid() == 40.0


def test_a_recording_that_fails_is_counted_and_the_books_go_on(rigs: Callable[..., Rig]) -> None:
    kept: list[Observation] = []

    def record(observation: Observation) -> None:
        if len(kept) == 2:
            raise OSError(28, "No space left on device")
        kept.append(observation)

    rig = rigs(record=record)
    rig.tick(5)
    assert rig.errors() == {"core": 0, "history": 0, "record": 3, "snapshot": 0}
    assert "No space left on device" in rig.agent.last_error()
    assert len(kept) == 2
    assert rig.paid() == 20.0


def test_what_the_agent_says_of_itself(rigs: Callable[..., Rig]) -> None:
    rig = rigs(slow=True)
    rig.tick(4)
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert (snapshot.meta.source, snapshot.meta.ticks, snapshot.meta.late_ticks) == ("fake", 4, 0)
    assert snapshot.meta.source_reason == "told to"
    assert snapshot.meta.read_seconds == 1.0
    assert snapshot.meta.core_seconds > 0


def test_a_late_tick_is_counted_and_the_next_one_is_on_the_old_grid(rigs: Callable[..., Rig]) -> None:
    rig = rigs(interval=1.0)
    first = rig.tick(3).at
    rig.clock.wait(rig.clock.now() + 3_700 * SECOND // 1000, threading.Event())
    at = rig.tick().at
    assert rig.observer.late == 1
    assert (at - first) % SECOND == 0
    rig.tick(5)
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert (snapshot.meta.late_ticks, snapshot.meta.ticks) == (1, 9)
    assert rig.seconds("unobserved") == 0.0


def test_steps_of_the_wall_clock_change_nothing_in_the_books(rigs: Callable[..., Rig]) -> None:
    still, stepped = rigs(), rigs()
    for step in (0, 3600, -86_400, 7, -1_000_000_000):
        stepped.clock.step_wall(step * SECOND)
        assert still.tick(4).at == stepped.tick(4).at
    books = [
        [(gpu.book.parts, gpu.book.paid, gpu.book.energy, gpu.state, gpu.since) for gpu in rig.ledger.gpus.values()]
        for rig in (still, stepped)
    ]
    assert books[0] == books[1]
    assert stepped.ledger.rejected == {}
    assert stepped.ledger.wall != still.ledger.wall


def test_closing_gives_source_and_scheduler_back(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.tick()
    rig.close()
    assert (rig.source.closes, rig.scheduler.closes) == (1, 1)


def test_a_waiting_agent_stops_at_once() -> None:
    source, scheduler, stop = FakeSource(), FakeScheduler(), threading.Event()
    hands = Collector(ladder(source), scheduler)
    observer = Sampler(hands, SystemClock(), interval=300.0, deadline=10.0)
    agent = Agent(meta=DaemonMetadata(), sampler=observer)
    loop = threading.Thread(target=agent.run, args=(observer.observations(stop),), daemon=True)
    loop.start()
    assert source.inside.wait(PATIENCE)
    stop.set()
    loop.join(PATIENCE)
    assert not loop.is_alive()
    hands.close()


def moments(*seconds: int) -> list[Observation]:
    return [Observation(second * SECOND, 0) for second in seconds]


@pytest.mark.parametrize("speed", [1.0, 4.0, 0.5])
def test_a_trace_comes_at_its_own_pace_times_the_speed(speed: float) -> None:
    clock, stop = JumpClock(start=77 * SECOND), threading.Event()
    came = [(o.at // SECOND, clock.now() / SECOND) for o in paced(moments(100, 104, 112), clock, stop, speed=speed)]
    assert came == [(100, 77.0), (104, 77.0 + 4 / speed), (112, 77.0 + 12 / speed)]


def test_a_paced_trace_stops_in_the_middle_when_told() -> None:
    stop, came = threading.Event(), []
    for observation in paced(moments(1, 2, 3, 4), JumpClock(), stop):
        came.append(observation.at // SECOND)
        if len(came) == 2:
            stop.set()
    assert came == [1, 2]


def test_observations_of_the_past_come_at_once_and_those_after_them_when_they_are_due() -> None:
    """However long the past takes: a node that waited from its end on would stay as far behind."""
    clock, stop, came = JumpClock(start=10 * SECOND), threading.Event(), []
    for observation in when_due(moments(1, 9, 10, 11, 12, 40, 41), clock, stop):
        came.append((observation.at // SECOND, clock.now() // SECOND))
        if observation.at == 9 * SECOND:
            clock.wait(35 * SECOND, stop)  # a busy machine
    assert came == [(1, 10), (9, 10), (10, 35), (11, 35), (12, 35), (40, 40), (41, 41)]


def test_observations_end_when_told() -> None:
    stop, came = threading.Event(), []
    for observation in when_due(moments(1, 2, 3, 4), JumpClock(), stop):
        came.append(observation.at // SECOND)
        if len(came) == 2:
            stop.set()
    assert came == [1, 2]


def test_the_first_account_without_room_is_logged_once_after_each_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = Agent(meta=DaemonMetadata(), policy=Policy(max_accounts=1))
    agent.process(first([device()], [held(owner=Owner("1", account="a"))]))
    agent.process(seen(1, reading(0, 1)))
    assert caplog.records == []
    two = tuple(held(owner=Owner(job, account=job)) for job in "ab")
    for at in (2, 3):
        agent.process(seen(at, reading(at - 1, at), allocations=two))
    (record,) = caplog.records
    assert "than policy.max_accounts = 1 have jobs here" in record.getMessage()
    again = Agent(meta=DaemonMetadata(), policy=Policy(max_accounts=1))
    again.resume(dump_ledger(agent.ledger), now=4 * SECOND, reason="restarted")
    for at in (4, 5):
        again.process(seen(at, reading(at - 1, at), allocations=two))
    assert [each.getMessage() for each in caplog.records] == 2 * [record.getMessage()]


def test_an_account_that_once_had_no_room_is_no_news_at_a_start(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(meta=DaemonMetadata(), policy=Policy(max_accounts=1, job_linger_seconds=0.5))
    agent.process(first([device()], [held(owner=Owner("1", account="a"))]))
    agent.process(seen(1, reading(0, 1), allocations=tuple(held(owner=Owner(job, account=job)) for job in "ab")))
    agent.process(seen(2, reading(1, 2), allocations=(held(owner=Owner("a", account="a")),)))
    agent.process(seen(4, reading(2, 4), allocations=(held(owner=Owner("a", account="a")),)))
    assert OTHER_ACCOUNTS in agent.ledger.accounts
    caplog.clear()
    again = Agent(meta=DaemonMetadata(), policy=Policy(max_accounts=1))
    again.resume(dump_ledger(agent.ledger), now=4 * SECOND, reason="restarted")
    again.process(seen(5, reading(4, 5), allocations=(held(owner=Owner("a", account="a")),)))
    assert caplog.records == []
