"""Tests the path of training reports from a listener to the ledger, with a fake listener."""

import logging
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from exporter.core.model import SECOND, Fault, Process, ServingReport, TrainingReport
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.workloads import ProcessLookup, WorkloadProcess, WorkloadUpdate
from tests.rigs import FakeScheduler, Rig
from tests.worlds import WORKING, held


class Listens:
    """Returns its update once, and records the calls."""

    def __init__(self) -> None:
        self.says = WorkloadUpdate()
        self.trouble: Exception | None = None
        self.asked: list[tuple[int, tuple[WorkloadProcess, ...]]] = []
        self.wants: Sequence[int] = ()
        self.knows: dict[int, WorkloadProcess] = {}
        self.closes = 0

    def poll(self, now: int, guests: Sequence[WorkloadProcess], whose: ProcessLookup) -> WorkloadUpdate:
        self.asked.append((now, tuple(guests)))
        self.knows = dict(whose(self.wants))
        if self.trouble is not None:
            raise self.trouble
        says, self.says = self.says, WorkloadUpdate(counts=self.says.counts)
        return says

    def uuids(self) -> list[tuple[str, ...]]:
        """The GPUs of each process in the last call."""
        return [guest.uuids for guest in self.asked[-1][1]]

    def close(self) -> None:
        self.closes += 1


@pytest.fixture(name="listens")
def _listens() -> Listens:
    return Listens()


@pytest.fixture(name="rig")
def _rig(rigs: Callable[..., Rig], listens: Listens) -> Rig:
    """Two GPUs of job 41; a process of its rank 3 on the first, and one without a job on the second."""
    server = replace(held("GPU-0", start=1000.0, gpus=2).owner, workload_class="serving")
    scheduler = FakeScheduler(*(held(uuid, server, start=1000.0, gpus=2) for uuid in ("GPU-0", "GPU-1")))
    members = {7: Member("41", "3"), 8: Member("41"), 9: Member("gone")}
    scheduler.word = SchedulerState((), 0, members=members)
    rig = rigs(scheduler, listeners=[listens], interval=1.0)
    rig.source.signals_of = {
        "GPU-0": WORKING | {"processes": (Process(7), Process(1))},
        "GPU-1": WORKING | {"processes": (Process(7), Process(9))},
    }
    return rig


def test_a_listener_is_told_who_is_on_the_gpus_and_whose_any_process_is(rig: Rig, listens: Listens) -> None:
    """Pid 1 has no job, and the job of pid 9 holds no GPU here."""
    listens.wants = (8, 9, 5)
    rig.tick(3)
    now, guests = listens.asked[-1]
    assert guests == (WorkloadProcess(7, "41", ("GPU-0", "GPU-1"), "3", "serving"),)
    assert now <= rig.clock.now()
    assert listens.knows == {8: WorkloadProcess(8, "41", (), "", "serving")}


def test_processes_of_a_gpu_without_a_reading_or_a_list_are_those_that_it_listed_last(
    rig: Rig, listens: Listens
) -> None:
    """DCGM's values come after every third read or so, and the driver's list of processes may fail for a while."""
    rig.tick(3)
    known = listens.asked[-1][1]
    rig.source.empty = 2
    rig.tick(3)
    for uuid in ("GPU-0", "GPU-1"):
        rig.source.signals_of[uuid] = WORKING | {"processes": None}
        rig.tick(2)
    assert [guests for _, guests in listens.asked[-7:]] == [known] * 7
    rig.source.empty, rig.scheduler.trouble = 1, SchedulerError("gone for a moment")
    rig.tick(2)
    assert [guests for _, guests in listens.asked[-2:]] == [known] * 2


def test_processes_are_gone_with_the_next_list_their_allocation_or_themselves(rig: Rig, listens: Listens) -> None:
    rig.tick(3)
    rig.source.signals_of["GPU-0"] = WORKING | {"processes": ()}
    rig.tick()
    assert listens.uuids() == [("GPU-1",)]
    rig.source.empty, rig.scheduler.said = 3, rig.scheduler.said[:1]
    rig.tick()
    assert listens.asked[-1][1] == ()
    rig.scheduler.said += (replace(rig.scheduler.said[0], uuid="GPU-1"),)
    rig.source.empty = 0
    rig.tick()
    assert listens.uuids() == [("GPU-1",)]
    rig.source.empty, rig.scheduler.proves = 1, False
    rig.tick()
    assert listens.asked[-1][1] == ()


def test_what_is_heard_reaches_the_ledger(rig: Rig, listens: Listens) -> None:
    rig.tick(3)
    now = rig.clock.now()
    listens.says = WorkloadUpdate(
        reports=(TrainingReport("41", now - 2 * SECOND, now - SECOND, step=5, steps=1),),
        serving=(ServingReport("41", now - 2 * SECOND, now - SECOND, "vllm", running=3.0),),
        counts=(("malformed", 2), ("taken", 1)),
    )
    said = rig.tick()
    assert (len(said.reports), len(said.serving)) == (1, 1)
    job = rig.ledger.jobs["41"]
    assert job.progress.step == 5
    assert job.service.latest[()].running == 3.0
    quiet = rig.tick()
    assert (quiet.reports, quiet.serving) == ((), ())
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert snapshot.meta.messages == (("malformed", 2), ("taken", 1))


def test_a_listener_s_fault_is_told(rig: Rig, listens: Listens, caplog: pytest.LogCaptureFixture) -> None:
    listens.says = WorkloadUpdate(faults=(Fault("reports_failed", "the socket is taken"),))
    rig.tick(3)
    assert "reports_failed: the socket is taken" in caplog.text
    assert rig.ledger.faults["reports_failed"] == 1


def test_a_listener_that_fails_is_told_and_costs_nothing(
    rig: Rig, listens: Listens, caplog: pytest.LogCaptureFixture
) -> None:
    listens.trouble = RuntimeError("oh no")
    with caplog.at_level(logging.ERROR):
        rig.tick(4)
    assert "listening to workloads failed" in caplog.text
    assert rig.ledger.faults["listening_failed"] > 0
    assert rig.seconds("unobserved") == 0.0
    assert rig.paid() == 3.0
    assert caplog.text.count("listening to workloads failed") == 1


def test_closing_closes_the_listeners(rig: Rig, listens: Listens) -> None:
    rig.tick(2)
    rig.hands.close()
    assert listens.closes == 1


def test_a_process_on_a_gpu_whose_job_is_only_its_own_word_is_no_guest(rig: Rig, listens: Listens) -> None:
    """A forged environment on another job's GPU: the scheduler lists the process, which proves nothing."""
    rig.scheduler.proves = False
    rig.tick(3)
    assert listens.asked[-1][1] == ()


def test_a_process_that_is_proven_to_be_another_job_s_is_no_guest(
    rig: Rig, listens: Listens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.scheduler, "members", lambda pids: {pid: Member("42") for pid in pids})
    rig.tick(3)
    assert listens.asked[-1][1] == ()
