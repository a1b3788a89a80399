"""A scheduler's word and a source's readings, put together by the loop."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.agent.sampler import RankTracker, with_condition, with_job_ids
from exporter.core.model import SECOND, Device, Fault, Process, State
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from tests.rigs import Rig
from tests.worlds import WORKING, device, held, reading

TWO_RANKS = {7: Member("41", "4"), 8: Member("41", "12"), 9: Member("41")}


def listing(*pids: int) -> Any:
    return reading(0, 1, WORKING | {"processes": tuple(Process(pid) for pid in pids)})


def test_a_job_has_on_a_gpu_the_ranks_of_its_processes_there_as_numbers() -> None:
    joining = RankTracker()
    word = SchedulerState((held(), held("GPU-1")), 0, members=TWO_RANKS | {10: Member("k", "1")})
    assert [a.ranks for a in joining.allocations(word, [listing(8, 7, 9, 10, 11)])] == ["4,12", ""]


def test_ranks_are_remembered_while_the_job_holds_the_gpu_and_no_longer() -> None:
    joining = RankTracker()
    word = SchedulerState((held(),), 0, members=TWO_RANKS)
    joining.allocations(word, [listing(7)])
    assert [a.ranks for a in joining.allocations(word, [reading(1, 2, WORKING | {"processes": None})])] == ["4"]
    assert [a.ranks for a in joining.allocations(word, [listing(8)])] == ["12"]
    joining.allocations(SchedulerState((), 0), [])
    assert [a.ranks for a in joining.allocations(SchedulerState((held(),), 0), [])] == [""]


def test_each_process_is_told_which_job_it_belongs_to() -> None:
    (told,) = with_job_ids((listing(7, 1),), SchedulerState((), 0, members=TWO_RANKS))
    assert told.processes is not None
    assert [(p.pid, p.job_id) for p in told.processes] == [(7, "41"), (1, "")]
    unseen = (reading(0, 1, WORKING | {"processes": None}),)
    assert with_job_ids(unseen, SchedulerState((), 0, members=TWO_RANKS)) == unseen


def test_a_node_s_condition_is_that_of_every_device_that_has_none_of_its_own() -> None:
    devices = (device("GPU-0"), device("GPU-1", condition="lost"))
    assert [d.condition for d in with_condition(devices, "drained")] == ["drained", "lost"]
    assert with_condition(devices, "") == devices


def states(rig: Rig) -> list[tuple[State, str]]:
    return [(gpu.state, gpu.reason) for gpu in rig.ledger.gpus.values()]


def test_on_a_drained_node_what_is_free_is_unavailable_until_it_is_back(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.scheduler.said = rig.scheduler.said[:1]
    rig.scheduler.word = SchedulerState((), 0, condition="drained")
    rig.tick(3)
    assert states(rig) == [(State.ACTIVE, "computing"), (State.UNAVAILABLE, "drained")]
    rig.scheduler.trouble = SchedulerError("gone")
    rig.tick(2)
    assert states(rig)[1] == (State.UNAVAILABLE, "drained"), "not heard of again, not changed"
    rig.scheduler.trouble, rig.scheduler.word = None, SchedulerState((), 0)
    rig.tick(2)
    assert states(rig)[1][0] is State.UNALLOCATED


def test_a_word_that_is_too_old_makes_owners_unknown_not_free(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.source.signals_of = {"GPU-0": WORKING | {"gr_engine_active": 0.0, "processes": None}}
    rig.tick(3)
    rig.scheduler.age = 91 * SECOND
    rig.tick(3)
    assert [o.job_id for o in take_snapshot(rig.ledger, DaemonMetadata()).gpus[1].owners] == ["unknown"]
    assert rig.seconds("idle_allocation", "GPU-1") == 0.0
    rig.scheduler.age = 89 * SECOND
    rig.tick(2)
    assert [o.job_id for o in take_snapshot(rig.ledger, DaemonMetadata()).gpus[1].owners] == ["41"]


def test_what_the_scheduler_refuses_is_counted_and_an_open_question_has_an_age(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    silent = Fault("controller_silent", "slurmctld does not answer")
    rig.scheduler.word = SchedulerState((), 0, faults=(silent,), unanswered_since=rig.clock.now())
    rig.tick(4)
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.meta.unanswered_seconds == 15.0
    assert dict(snapshot.faults)["controller_silent"] == 4
    assert snapshot.meta.last_error == "slurmctld does not answer"
    rig.scheduler.word = SchedulerState((), 0)
    rig.tick()
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.meta.unanswered_seconds == 0.0


def test_the_devices_a_scheduler_is_asked_about_are_those_accounted_for(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, asked = rigs(), []

    def look(now: int, devices: tuple[Device, ...], _: Any) -> SchedulerState:
        asked.append([d.uuid for d in devices])
        return SchedulerState((), now)

    monkeypatch.setattr(rig.scheduler, "poll", look)
    rig.tick()
    rig.source.devices = rig.source.devices[:1]
    rig.tick()
    assert [sorted(uuids) for uuids in asked] == [["GPU-0", "GPU-1"]] * 2


def test_members_reach_the_core(rigs: Callable[..., Rig]) -> None:
    """Two jobs on one GPU, told apart by what their processes used."""
    both = WORKING | {"processes": (Process(7, sm_active=0.3), Process(8, sm_active=0.1))}
    rig = rigs()
    rig.source.signals_of = {"GPU-0": both}
    owners = [replace(held().owner, job_id=job) for job in ("a", "b")]
    rig.scheduler.said = tuple(held("GPU-0", owner, start=1000) for owner in owners)
    rig.scheduler.word = SchedulerState((), 0, members={7: Member("a"), 8: Member("b")})
    rig.tick(3)
    assert set(rig.ledger.gpus["GPU-0"].shared) == {"sm"}
    assert rig.ledger.jobs["a"].book.parts > rig.ledger.jobs["b"].book.parts
