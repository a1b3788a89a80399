"""Asking jobs that may hang: real processes and sockets of this machine, a stand-in for RAS, a clock of the test's."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.config import HangSettings
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Fault, HangFinding, Owner, State
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.nccl.comparison import Comparison, Culprit
from exporter.nccl.flight_recorder import RankTrace
from exporter.nccl.investigator import (
    GAPS,
    MOST_JOBS,
    HangInvestigator,
    LatestSnapshot,
    SuspectedJob,
    _Evidence,
    _Investigation,
    _Job,
    local_ranks,
    printable,
    suspected_jobs,
)
from exporter.nccl.processes import LocalProcess, read_processes
from exporter.nccl.ras import parse_answer
from exporter.procfs import innermost_pid
from exporter.worker import Worker
from exporter.workloads import WorkloadProcess
from tests.clocks import JumpClock
from tests.nccl.ras_server import RasServer, communicator, document, missing_rank, rank_of
from tests.worlds import JOB, RESTING, SPINNING, WORKING, device, first, held, reading, seen

PROC = Path("/proc")
ME = os.getpid()
SLEEPER = "import time; print(flush=True); time.sleep(600)"
ASKER = (
    "import socket; server = socket.create_server(('127.0.0.1', 0))\n"
    "line = socket.create_connection(server.getsockname()); line.sendall(b'POST /generate/')\n"
    "print(flush=True); line.recv(1)"
)
"""Rank 0 of a trainer whose inference server runs elsewhere: it waits for the reply and does nothing."""


def own_pid(pid: int = ME) -> int:
    return innermost_pid(PROC / f"{pid}")


class Rig:
    """A node with a job on two GPUs that spin from second 0 on, and an investigator whose steps the test calls."""

    def __init__(self, server: RasServer | None = None, **settings: Any) -> None:
        self.clock, self.ledger, self.findings = JumpClock(), Ledger(), list[HangFinding]()
        self.processes: list[WorkloadProcess] = [WorkloadProcess(ME, "41", ("GPU-0",), "0")]
        ports = (server.port,) if server else ()
        self.investigator = HangInvestigator(
            HangSettings(ras_ports=ports, **settings), self.clock, latest=self.snapshot, proc=PROC
        )
        self.investigator._worker = Worker("none", self.investigator._stop.wait, stop=self.investigator._stop)
        owner = replace(JOB, hang_seconds=300.0)  # its operator's limit for counters alone
        holds = [held("GPU-0", owner=owner), held("GPU-1", owner=owner)]
        advance(self.ledger, first([device("GPU-0", "5"), device("GPU-1", "6")], holds))
        self._now, self.uuids = 0, ("GPU-0", "GPU-1")

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.ledger, DaemonMetadata(host="n7"))

    def spin(
        self, seconds: int, *, signals: dict[str, Any] | None = None, others: dict[str, dict[str, Any]] | None = None
    ) -> "Rig":
        """Let readings of a second pass, each followed by a step of the investigator, as the daemon does.

        `others`: signals of single GPUs.
        """
        for _ in range(seconds):
            self._now += 1
            self.clock.wait(self._now * SECOND, self.investigator._stop)
            shown = dict.fromkeys(self.uuids, signals or SPINNING) | (others or {})
            readings = [reading(self._now - 1, self._now, shown[uuid], uuid) for uuid in self.uuids]
            update = self._poll()
            self.findings += update.findings
            advance(self.ledger, seen(self._now, *readings, findings=update.findings))
            self.investigator._step()
        return self

    def _poll(self) -> Any:
        return self.investigator.poll(self.clock.now(), self.processes, lambda _: {})

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._poll().counts)

    def state(self, uuid: str = "GPU-0") -> State:
        return self.ledger.gpus[uuid].state


def mine(rank: int = 0, *, pid: int = ME, **counts: int) -> dict[str, Any]:
    return rank_of(rank, "127.0.0.1", own_pid(pid), 0, **counts)


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[], str]], RasServer]]:
    with ExitStack() as stack:

        def serve(answer: Callable[[], str]) -> RasServer:
            server = RasServer(answer)
            stack.callback(server.close)
            return server

        yield serve


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python program; returns once it has printed a line."""
    with ExitStack() as stack:

        def child(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-S", "-E", "-c", program, *arguments]
            started = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
            )
            process = stack.enter_context(started)
            stack.callback(process.kill)
            assert process.stdout
            process.stdout.readline()
            return process

        yield child


Serve = Callable[[Callable[[], str]], RasServer]
Child = Callable[..., subprocess.Popen[str]]


def moving() -> Callable[[], str]:
    """A job whose counts grow."""
    counter = iter(range(1, 1000))
    return lambda: document(communicator("a", [mine(AllReduce=next(counter)), rank_of(1, host="10.9.9.9")]))


def lost(**status: bool) -> str:
    return document(communicator("a", [mine(AllReduce=7)], [missing_rank(1, host="10.9.9.9", pid=55, **status)]))


def behind(pid: int = 55, host: str = "10.9.9.9") -> str:
    other = rank_of(1, host=host, pid=pid, device=1, AllReduce=6)
    return document(communicator("a", [mine(AllReduce=7), other]))


def test_a_true_hang_is_confirmed_within_two_minutes(serve: Serve) -> None:
    """A rank of another node is missing: both GPUs here spin, and count as hung 53 s after it began."""
    rig = Rig(serve(lost)).spin(60)
    assert rig.state() is State.HUNG
    assert rig.findings == [
        HangFinding("41", 52 * SECOND, moving=False, stuck=True, rank="1", host="10.9.9.9", pid=55, gpu="1",
                    collective="AllReduce", sequence=7, source="nccl_ras")
    ]  # fmt: skip
    assert rig.snapshot().jobs[0].finding == rig.findings[0]
    assert (rig.counts["ras_answer"], rig.counts["hang_stuck"]) == (2, 1)


def test_counts_that_move_acquit_for_as_long_as_they_do(serve: Serve) -> None:
    rig = Rig(serve(moving())).spin(700)
    assert rig.state() is State.ACTIVE
    assert all(finding.moving for finding in rig.findings)
    assert [finding.at // SECOND for finding in rig.findings[:3]] == [52, 104, 156], "45 s after each, and 7 s later"


def test_without_an_answer_a_hang_is_confirmed_as_before(serve: Serve) -> None:
    rig = Rig(serve(lambda: "not JSON")).spin(299)
    assert rig.state() is State.ACTIVE
    assert rig.spin(2).state() is State.HUNG
    assert rig.findings == []
    assert rig.counts["ras_malformed"] == len([at for at in (45, 52, 82, 112, 172) if at < 301]) + 1


def test_a_job_is_asked_ever_more_seldom(serve: Serve) -> None:
    server = serve(lambda: document(communicator("a", [mine(AllReduce=7)])))
    rig = Rig(server).spin(45 + sum(GAPS) + 310)
    assert len([command for command in server.received if command == "VERBOSE STATUS"]) == len(GAPS) + 2
    assert rig.counts["hang_unknown"] == len(GAPS) + 1
    assert {finding.rank for finding in rig.findings} == {""}


def test_a_job_whose_answer_is_too_large_is_asked_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question would gather thousands of ranks, for an answer that is not read."""
    monkeypatch.setattr("exporter.nccl.ras.LIMIT_BYTES", 1000)
    server = serve(lost)
    rig = Rig(server).spin(120)
    assert server.received.count("VERBOSE STATUS") == 1
    assert (rig.counts["ras_too_large"], rig.findings) == (1, [])
    members, rig.processes = rig.processes, []
    rig.spin(1).processes = members
    assert rig.spin(60).counts["ras_too_large"] == 2, "a job that has ended is forgotten"


def test_of_an_answer_only_the_job_s_own_application_is_kept(serve: Serve) -> None:
    """A user's server may add to it what belongs to nobody."""
    others = [communicator(f"{number}", [rank_of(0, host="10.9.9.9", pid=number)]) for number in range(50, 90)]
    own = communicator("a", [mine(AllReduce=7)], [missing_rank(1, host="10.9.9.9", pid=7)])
    rig = Rig(serve(lambda: document(own, *others))).spin(60)
    kept = rig.investigator._investigations["41"].answer
    assert kept is not None
    assert [each.hash for each in kept.communicators] == ["0xa"]
    assert rig.counts["hang_stuck"] == 1


def test_the_answers_of_all_jobs_together_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest nothing is kept, so that it is never compared; others are."""
    rig = Rig(serve(lost)).spin(46)
    known = rig.investigator._investigations["41"]
    assert known.values == 3 + 5 * 2 + 5
    other = _Investigation(due=1 << 62, answer=known.answer)
    trace = RankTrace(LocalProcess(1, 1, frozenset()), (), {"0": 1}, {"0": 1})
    rig.investigator._investigations["42"] = largest = _Investigation(due=1 << 62, answer=known.answer, traces=[trace])
    rig.investigator._investigations["43"] = other
    monkeypatch.setattr("exporter.nccl.investigator.MOST_KEPT", 2 * known.values)
    rig.investigator._forget_largest()
    assert (largest.answer, largest.traces) == (None, [])
    assert None not in (known.answer, other.answer)


def test_no_more_is_kept_than_may_be(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.nccl.investigator.MOST_KEPT", 1)
    rig = Rig(serve(lost)).spin(60)
    assert (rig.counts["ras_answer"], rig.findings) == (2, [])
    assert rig.investigator._investigations["41"].answer is None


def test_a_job_that_works_again_is_forgotten(serve: Serve) -> None:
    server = serve(lost)
    rig = Rig(server).spin(46)
    rig.spin(60, signals=SPINNING | {"tensor_active": 0.5, "dram_active": 0.5, "power_watts": 600.0})
    assert len(server.received) == 4, "once"
    assert rig.spin(44).investigator._investigations == {}


def test_a_missing_rank_proves_nothing_while_a_rank_of_this_node_rests(serve: Serve, child: Child) -> None:
    """Its count does not differ: the others wait for it in a transfer, which RAS does not count."""
    rank0 = child(SLEEPER)
    ranks = [mine(AllReduce=7), mine(1, pid=rank0.pid, AllReduce=7)]
    rig = Rig(serve(lambda: document(communicator("a", ranks, [missing_rank(2)]))))
    rig.processes.append(WorkloadProcess(rank0.pid, "41", ("GPU-1",), "1"))
    rig.spin(60, others={"GPU-1": RESTING})
    assert [(finding.rank, finding.stuck) for finding in rig.findings] == [("2", False)]


def test_a_rank_that_was_dead_at_the_first_question_proves_nothing(serve: Serve) -> None:
    """RAS forgets no death: the process may live behind a network that has come back, and save now."""
    rig = Rig(serve(lambda: lost(dead=True))).spin(290)
    assert rig.state() is State.ACTIVE
    assert {(finding.rank, finding.stuck) for finding in rig.findings} == {("1", False)}


def test_a_rank_that_dies_meanwhile_stays_proven(serve: Serve) -> None:
    answers = iter([False] * 2)
    rig = Rig(serve(lambda: lost(dead=next(answers, True)))).spin(150)
    assert rig.state() is State.HUNG
    assert [finding.stuck for finding in rig.findings] == [True] * 3


def test_a_job_that_moved_without_a_dead_rank_does_not_wait_for_it_later(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([1, 2])
    missing = [missing_rank(1, host="10.9.9.9", pid=55, dead=True)]
    server = serve(lambda: document(communicator("a", [mine(AllReduce=next(counts, 3))], missing)))
    rig = Rig(server).spin(150)
    assert [(finding.moving, finding.rank) for finding in rig.findings] == [(True, ""), (False, ""), (False, "")]
    missing[:] = [missing_rank(1, host="10.9.9.9", pid=56)]
    assert rig.spin(100).findings[-1].rank == "1", "another process is"
    monkeypatch.setattr("exporter.nccl.investigator.MOST_EXCUSED", 0)
    rig.spin(130)
    assert rig.investigator._excused == {"41": frozenset()}, "no more is remembered than may be"
    members, rig.processes = rig.processes, []
    rig.spin(1).processes = members
    assert rig.investigator._excused == {}, "a job that has ended is forgotten"


def test_a_rank_that_ras_has_not_reached_once_is_waited_for_when_it_dies(serve: Serve) -> None:
    """RAS skips a process that is silent for five seconds; neither that nor a death that ended excuses it for good."""
    far, asked = rank_of(1, host="10.9.9.9", pid=55, AllReduce=1), iter(range(1, 1000))

    def answer() -> str:
        number = next(asked)
        present = [far] if number in (1, 3, 4) else []
        absent = [] if present else [missing_rank(1, host="10.9.9.9", pid=55)]
        return document(communicator("a", [mine(AllReduce=min(number, 5)), *present], absent))

    rig = Rig(serve(answer)).spin(110)
    assert {finding.moving for finding in rig.findings} == {True}
    rig.spin(10, signals=WORKING).spin(60)
    assert [(finding.moving, finding.stuck, finding.rank) for finding in rig.findings[2:]] == [(False, True, "1")]


def test_a_dead_rank_that_answers_again_is_no_longer_excused(serve: Serve) -> None:
    present: list[dict[str, Any]] = []
    absent, counts = [missing_rank(1, host="10.9.9.9", pid=55, dead=True)], iter([1, 2])
    rig = Rig(serve(lambda: document(communicator("a", [mine(AllReduce=next(counts, 3)), *present], absent))))
    assert rig.spin(60).investigator._excused == {"41": frozenset({("10.9.9.9", 55, 1)})}
    present.append(rank_of(1, host="10.9.9.9", pid=55))
    absent.clear()
    assert rig.spin(60).investigator._excused == {"41": frozenset()}


def test_a_rank_that_died_while_the_others_still_moved_is_not_excused(serve: Serve) -> None:
    """Another replica computes on until it needs the dead one."""
    counts = iter([1, 2])
    rig = Rig(serve(lambda: document(communicator(
        "a", [mine(AllReduce=next(counts, 3))],
        [missing_rank(1, host="10.9.9.9", pid=55, dead=rig.clock.now() > 50 * SECOND)],
    ))))  # fmt: skip
    rig.spin(110)
    assert [(finding.moving, finding.rank) for finding in rig.findings] == [(True, ""), (False, "1")]


# A node dies, in jobs whose survivors are behind one another on several nodes. Each survivor's node is asked.

Node = tuple[int, int]
"""Pipeline stage or place in the shard group, and replica."""
NODES = [(place, replica) for place in range(4) for replica in range(2)]


def crash(dead: Node, asking: Node, *, sharded: bool, given_up: bool) -> str:
    """Two replicas of four nodes, each with a rank: pipeline stages, or a shard group. Replica 1 is one step ahead."""

    def group(name: str, members: Sequence[Node], count: Callable[[Node], int]) -> dict[str, Any]:
        ranks, missing = [], []
        for own, (place, replica) in enumerate(members):
            host = f"10.0.{replica}.{place}"
            if (place, replica) == dead:
                missing.append(missing_rank(own, host=host, pid=55, dead=given_up) | {"cuda_dev": 0})
            elif (place, replica) == asking:
                ranks.append(mine(own, AllReduce=count(asking)))
            else:
                ranks.append(rank_of(own, host=host, pid=55, device=0, AllReduce=count((place, replica))))
        return communicator(name, ranks, missing)

    replicas = [group(f"d{p}", [(p, 0), (p, 1)], lambda node: 99 + node[1]) for p in range(4)]
    if not sharded:
        return document(group("w", sorted(NODES, key=lambda node: node[::-1]), lambda _: 5), *replicas)
    shards = [group(f"s{r}", [(p, r) for p in range(4)], lambda _: 50) for r in range(2)]
    return document(*shards, *replicas)


@pytest.mark.parametrize("sharded", [False, True], ids=["pipeline", "HSDP"])
@pytest.mark.parametrize("asking", [node for node in NODES if node != (1, 0)], ids=str)
def test_a_node_that_dies_proves_a_hang_from_every_other_node(serve: Serve, asking: Node, *, sharded: bool) -> None:
    rig = Rig(serve(lambda: crash((1, 0), asking, sharded=sharded, given_up=False)))
    rig.processes = [WorkloadProcess(ME, "41", ("GPU-0",))]
    rig.spin(60)
    assert [(finding.host, finding.stuck) for finding in rig.findings] == [("10.0.0.1", True)]
    assert rig.state() is State.HUNG


@pytest.mark.parametrize("sharded", [False, True], ids=["pipeline", "HSDP"])
@pytest.mark.parametrize("asking", [(1, 0), (0, 1)], ids=str)
def test_the_death_of_rank_0_s_node_is_proven_by_the_others(serve: Serve, asking: Node, *, sharded: bool) -> None:
    """They ask a minute later, when RAS has given it up: nobody could ask first."""
    rig = Rig(serve(lambda: crash((0, 0), asking, sharded=sharded, given_up=rig.clock.now() > 60 * SECOND)))
    rig.processes = [WorkloadProcess(ME, "41", ("GPU-0",), "4")]
    rig.spin(45 + 64 + 8)
    assert [(finding.host, finding.stuck) for finding in rig.findings] == [("10.0.0.0", True)]
    assert rig.state() is State.HUNG


def test_other_ranks_that_are_long_dead_prove_nothing_to_nodes_that_ask_late(serve: Serve) -> None:
    rig = Rig(serve(lambda: crash((1, 0), (2, 0), sharded=False, given_up=True)))
    rig.processes = [WorkloadProcess(ME, "41", ("GPU-0",), "4")]
    assert {finding.stuck for finding in rig.spin(45 + 64 + 8).findings} == {False}


@pytest.mark.parametrize("dead", ["0", "1"])
def test_a_process_that_dies_proves_a_hang_on_its_own_node(serve: Serve, child: Child, dead: str) -> None:
    """Rank 0 too, though it is no longer among the processes when the spin is long enough to ask."""
    process = child(SLEEPER)
    pid, other = own_pid(process.pid), "1" if dead == "0" else "0"
    rig = Rig(serve(lambda: document(communicator(
        "a", [mine(int(other), AllReduce=7)], [missing_rank(int(dead), pid=pid, dead=rig.clock.now() > 60 * SECOND)]
    ))))  # fmt: skip
    rig.processes = [
        WorkloadProcess(ME, "41", ("GPU-0",), other), WorkloadProcess(process.pid, "41", ("GPU-1",), dead)
    ]  # fmt: skip
    rig.spin(2)
    process.kill()
    process.wait(20)
    del rig.processes[1]
    rig.spin(58)
    assert [(finding.at // SECOND, finding.rank, finding.stuck) for finding in rig.findings] == [(52, dead, True)]
    assert rig.state() is State.HUNG


def test_a_process_of_this_node_that_lives_is_not_missing(serve: Serve, child: Child) -> None:
    alive = child(SLEEPER)
    absent = missing_rank(1, pid=own_pid(alive.pid))
    rig = Rig(serve(lambda: document(communicator("a", [mine(AllReduce=7)], [absent]))))
    rig.processes.append(WorkloadProcess(alive.pid, "41", ("GPU-1",), "1"))
    assert {finding.rank for finding in rig.spin(100).findings} == {""}


# Several applications of one job.

HEALTHY = (
    "import itertools, os, sys\nsys.path.insert(0, os.environ['ROOT'])\nimport time\n"
    "from tests.nccl.ras_server import RasServer, communicator, document, rank_of\n"
    "count = itertools.count()\n"
    "RasServer(lambda: document(communicator('b', [rank_of(0, pid=os.getpid(), AllReduce=next(count))])),\n"
    "          port=int(sys.argv[1]))\nprint(flush=True)\ntime.sleep(600)"
)
"""Another application of the job, whose collectives move."""


def with_healthy(serve: Serve, child: Child, answer: Callable[[], str]) -> Rig:
    """A job of two applications on this node; the one that is healthy would be asked first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hung = serve(answer)
    healthy = child(HEALTHY, f"{port}", ROOT=f"{Path(__file__).parents[2]}")
    rig = Rig()
    rig.investigator._settings = HangSettings(ras_ports=(port, hung.port))
    rig.processes.insert(0, WorkloadProcess(healthy.pid, "41", ("GPU-1",), "0"))
    return rig


def test_a_healthy_application_does_not_acquit_another_one_of_its_job(serve: Serve, child: Child) -> None:
    rig = with_healthy(serve, child, lost).spin(60, others={"GPU-1": WORKING})
    assert rig.state() is State.HUNG
    assert [(finding.stuck, finding.uuids) for finding in rig.findings] == [(True, ("GPU-0",))]


def test_an_application_that_moves_acquits_its_own_gpus(serve: Serve, child: Child) -> None:
    rig = with_healthy(serve, child, lost).spin(60)
    assert [(finding.moving, finding.uuids) for finding in rig.findings] == [(True, ("GPU-1",))]
    since = {gpu.device.uuid: gpu.spin_since for gpu in rig.snapshot().gpus}
    assert since["GPU-0"] is not None
    assert since["GPU-1"] is not None
    assert since["GPU-1"] - since["GPU-0"] == 52 * SECOND


def job_of(*processes: LocalProcess, spinning: Sequence[str] = ("a",)) -> _Job:
    gpus = frozenset(spinning)
    return _Job("41", SuspectedJob(gpus, gpus, {"a": "0", "b": "1"}, "n7"), list(processes), _Investigation(due=0))


def test_without_a_known_gpu_any_process_may_be_asked() -> None:
    one, other = LocalProcess(1, 1, frozenset(), uuids=("a",)), LocalProcess(2, 2, frozenset(), uuids=("b",))
    assert job_of(one, other).suspects() == [one]
    unknown = replace(one, uuids=()), replace(other, uuids=())
    assert job_of(*unknown).suspects() == list(unknown)
    assert job_of(one, other).gpus_of([one]) == ("a",)
    assert job_of(one, other, spinning="ac").gpus_of([one]) == ("a", "c"), "nobody known spins there"
    assert job_of(one, other).gpus_of([one, other]) == (), "all of the job's"


def test_recorders_of_a_rank_that_occurs_twice_are_of_several_applications() -> None:
    spins, rests = LocalProcess(1, 1, frozenset(), "0", ("a",)), LocalProcess(2, 2, frozenset(), "1", ("b",))
    assert job_of(spins, rests).application() == [spins, rests]
    assert job_of(spins, replace(rests, rank="0")).application() == [spins]
    assert len(job_of(*(replace(each, rank="") for each in (spins, rests))).application()) == 2


# Pods with the host's network, each with a pid namespace of its own.


def test_of_processes_with_one_name_the_culprit_is_that_of_the_rank() -> None:
    pods = [LocalProcess(100 + rank, 1, frozenset({"10.0.0.1"}), f"{rank}", (uuid,)) for rank, uuid in enumerate("ab")]
    found = Comparison(related=True, culprit=Culprit(("10.0.0.1", 1, 0), rank="1", nvml_device=0))
    job, rig = job_of(*pods), Rig()

    def named(found: Comparison) -> tuple[str, str, int, str]:
        finding = rig.investigator._finding(job, _Evidence(found, "nccl_ras", pods))
        return finding.rank, finding.host, finding.pid, finding.gpu

    assert named(found) == ("1", "n7", 101, "1")
    unknown = Comparison(related=True, culprit=Culprit(("10.0.0.1", 1, 0), nvml_device=0))
    assert named(unknown) == ("", "n7", 0, ""), "any of them"
    elsewhere = Comparison(related=True, culprit=Culprit(("10.0.0.2", 1, 0), rank="2", nvml_device=0))
    assert named(elsewhere) == ("2", "10.0.0.2", 1, "0")
    answer = parse_answer(document(communicator("a", [rank_of(0, host="10.0.0.1", pid=1, device=0)])).encode())
    assert local_ranks(answer, pods) == {("10.0.0.1", 1, 0): pods}


@pytest.mark.parametrize("apart", [False, True], ids=["one communicator", "two"])
def test_a_pod_that_has_died_is_missing_though_others_of_its_name_live(serve: Serve, *, apart: bool) -> None:
    dead = missing_rank(1, pid=own_pid()) | {"cuda_dev": 0}
    far = rank_of(2, host="10.9.9.9", pid=55, AllReduce=7)
    alive = communicator("a", [mine(AllReduce=7), far], [] if apart else [dead])
    rig = Rig(serve(lambda: document(alive, *([communicator("b", [far], [dead])] if apart else []))))
    rig.spin(60)
    named = [(finding.rank, finding.host, finding.pid, finding.gpu, finding.stuck) for finding in rig.findings]
    assert named == [("" if apart else "1", "n7", 0, "", True)]


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_processes_with_one_name_wait_only_if_all_do(serve: Serve, *, rests: bool, lag: int) -> None:
    """Both are this process here, as NCCL sees them; one of them is known by another GPU."""
    ranks = [mine(AllReduce=7 - lag), rank_of(2, host="10.9.9.9", AllReduce=7)]
    rig = Rig(serve(lambda: document(communicator("a", ranks, [missing_rank(1, host="10.9.9.9", pid=55)]))))
    rig.processes.append(WorkloadProcess(ME, "41", ("GPU-1",), "1"))
    rig.spin(60, others={"GPU-1": RESTING} if rests else {})
    assert [finding.stuck for finding in rig.findings] == [not rests]


@pytest.mark.parametrize("program", [SLEEPER, ASKER], ids=["sleeps", "waits for a reply"])
def test_a_rank_that_does_nothing_is_named_and_proves_nothing(serve: Serve, child: Child, program: str) -> None:
    """What it waits for may be alive: a server, a child process, an upload."""
    idle = child(program)
    rig = Rig(serve(lambda: behind(own_pid(idle.pid), "127.0.0.1")))
    rig.processes.append(WorkloadProcess(idle.pid, "41", ("GPU-1",), "3"))
    assert rig.spin(299).state() is State.ACTIVE
    assert {finding.stuck for finding in rig.findings} == {False}
    named = rig.findings[0]
    assert (named.rank, named.host, named.pid, named.gpu) == ("3", "n7", idle.pid, "6")
    assert (rig.counts["hang_waiting"], rig.counts["hang_stuck"]) == (len(rig.findings), 0)
    assert rig.spin(2).state() is State.HUNG, "after the time of counters alone"


def test_ranks_in_different_collectives_prove_a_hang(serve: Serve) -> None:
    ranks = [mine(AllReduce=7, Broadcast=3), rank_of(1, host="10.9.9.9", pid=55, AllReduce=6, Broadcast=4)]
    rig = Rig(serve(lambda: document(communicator("a", ranks)))).spin(60)
    assert rig.state() is State.HUNG
    assert [finding.stuck for finding in rig.findings] == [True]


def test_what_a_rank_of_another_node_does_is_not_known(serve: Serve) -> None:
    rig = Rig(serve(behind)).spin(290)
    assert rig.state() is State.ACTIVE
    assert rig.snapshot().jobs[0].finding == rig.findings[-1]
    assert (rig.findings[-1].stuck, rig.findings[-1].rank, rig.findings[-1].host) == (False, "1", "10.9.9.9")


@pytest.mark.parametrize(("ranks", "at"), [(("0",), 45), (("",), 45), (("8", "9"), 45 + 68), (("64",), 45 + 64)])
def test_the_node_of_rank_0_asks_first(serve: Serve, ranks: Sequence[str], at: int) -> None:
    server = serve(lost)
    rig = Rig(server)
    rig.processes = [WorkloadProcess(ME, "41", ("GPU-0",), rank) for rank in ranks]
    assert rig.spin(at - 1).investigator._investigations.keys() <= {"41"}
    assert server.received == []
    rig.spin(1)
    assert server.received


def test_only_sockets_of_the_job_s_own_processes_are_asked(serve: Serve, child: Child) -> None:
    """The server belongs to this process, which is no process of the job, though of the same user."""
    server = serve(lost)
    rig = Rig(server)
    rig.processes = [WorkloadProcess(child(SLEEPER).pid, "41", ("GPU-0",), "0")]
    rig.spin(60)
    assert server.received == []
    assert rig.counts["ras_no_socket"] == 2


def test_an_application_of_the_same_user_cannot_answer_on_the_same_port(child: Child) -> None:
    """Two processes listen on one port (SO_REUSEPORT); connections that reach the other one are given up."""
    program = (
        "import socket, sys\n"
        "server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "server.bind(('127.0.0.1', int(sys.argv[1]))); server.listen(); print(server.getsockname()[1], flush=True)\n"
        "while True:\n"
        "    line = server.accept()[0]; line.recv(100); line.sendall(b'SERVER PROTOCOL 2\\n')\n"
        "    print(line.recv(100), file=sys.stderr, flush=True)\n"
    )
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", 0))
        own.listen()
        foreign = child(program, f"{own.getsockname()[1]}")
        rig = Rig()
        rig.investigator._settings = HangSettings(ras_ports=own.getsockname()[1:], timeout_seconds=0.3)
        rig.spin(45)
        assert foreign.poll() is None
        assert rig.counts.get("ras_answer", 0) == 0
        assert rig.counts.get("ras_foreign", 0) + rig.counts.get("ras_timeout", 0) >= 1


def test_ras_moves_with_the_job_s_own_variable(child: Child) -> None:
    """The port is read from the environment of the process, which was started with it."""
    program = (
        "import os, sys\nsys.path.insert(0, os.environ['ROOT'])\nimport time\n"
        "from tests.nccl.ras_server import RasServer, communicator, document, missing_rank, rank_of\n"
        "pid = os.getpid()\n"
        "ranks = [rank_of(0, pid=pid, AllReduce=7)]\n"
        "RasServer(lambda: document(communicator('a', ranks, [missing_rank(1)])), port=int(sys.argv[1]))\n"
        "print(flush=True)\ntime.sleep(600)"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = f"{Path(__file__).parents[2]}"
    moved = child(program, f"{port}", ROOT=root, NCCL_RAS_ADDR=f"localhost:{port}")
    rig = Rig()
    rig.processes = [WorkloadProcess(moved.pid, "41", ("GPU-0",), "0")]
    assert rig.spin(60).state() is State.HUNG
    disabled = child(SLEEPER, NCCL_RAS_ADDR=f"localhost:{port}", NCCL_RAS_ENABLE="0")
    rig = Rig()
    rig.processes = [WorkloadProcess(disabled.pid, "41", ("GPU-0",), "0")]
    assert rig.spin(60).counts["ras_no_socket"] == 2


def test_another_job_s_answer_is_not_related(serve: Serve) -> None:
    rig = Rig(serve(lambda: document(communicator("a", [rank_of(0, pid=9, AllReduce=7)], [missing_rank(1)])))).spin(60)
    assert (rig.findings, rig.counts["ras_unrelated"]) == ([], 2 * 8)


def test_a_dead_socket_and_a_slow_server_are_counted() -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)
        rig = Rig()
        rig.investigator._settings = HangSettings(ras_ports=dead.getsockname()[1:], timeout_seconds=0.2)
        assert rig.spin(46).counts["ras_timeout"] == 1


def test_only_spinning_gpus_of_long_enough_make_a_suspect() -> None:
    rig = Rig().spin(20)
    assert suspected_jobs(rig.snapshot(), after=21 * SECOND) == {}
    (found,) = suspected_jobs(rig.snapshot(), after=20 * SECOND).values()
    assert found.spinning == found.suspects == {"GPU-0", "GPU-1"}
    assert (found.indexes, found.node) == ({"GPU-0": "5", "GPU-1": "6"}, "n7")


def test_of_many_suspects_only_so_many_are_asked() -> None:
    seen = Rig().spin(20).snapshot()
    owners = tuple(Owner(job_id=f"{number}") for number in range(100, 100 + 2 * MOST_JOBS))
    crowded = replace(seen, gpus=tuple(replace(gpu, owners=owners) for gpu in seen.gpus))
    assert list(suspected_jobs(crowded, after=20 * SECOND)) == [owner.job_id for owner in owners[:MOST_JOBS]]


def test_hosts_tell_processes_of_two_nodes_with_the_same_pid_apart() -> None:
    """In pods most pids are small."""
    answer = parse_answer(document(communicator("a", [
        rank_of(0, host="10.0.0.1", pid=7), rank_of(1, host="10.0.0.2", pid=7), rank_of(2, host="junk", pid=7),
        rank_of(3, host="127.0.0.1", pid=8),
    ])).encode())  # fmt: skip
    here = LocalProcess(100, 7, frozenset({"10.0.0.2"}))
    assert local_ranks(answer, [here, LocalProcess(101, 8, frozenset())]).keys() == {
        ("10.0.0.2", 7, 1), ("127.0.0.1", 8, 3),
    }  # fmt: skip


def test_a_process_that_has_ended_is_left_out(child: Child) -> None:
    ended = child("print()")
    ended.wait(20)
    members = [WorkloadProcess(ended.pid, "41"), WorkloadProcess(ME, "41")]
    assert [process.pid for process in read_processes(members, PROC)] == [ME]


def test_text_of_a_job_is_one_short_line() -> None:
    assert printable("a\nb\x1b[2J\u202e" + "x" * 500) == "a b [2J " + "x" * (120 - 8)


# The thread itself.


def test_the_thread_asks_on_its_own_and_ends(serve: Serve) -> None:
    server, rig = serve(lost), Rig()
    rig.spin(50)
    latest = LatestSnapshot()
    assert latest() is None
    latest.connect(rig.snapshot)
    settings = HangSettings(ras_ports=(server.port,))
    investigator = HangInvestigator(settings, rig.clock, latest=latest, proc=PROC)
    try:
        assert investigator.poll(0, [], lambda _: {}).findings == ()
        assert not investigator._worker.alive, "nothing to ask"
        investigator.poll(0, rig.processes, lambda _: {})
        wait_until(lambda: "VERBOSE STATUS" in server.received)
    finally:
        investigator.close()
    assert not investigator._worker.alive


def test_a_bug_becomes_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Snapshot:
        raise RuntimeError("no")

    investigator = HangInvestigator(HangSettings(), JumpClock(), latest=fails, proc=PROC)
    investigator.poll(0, [WorkloadProcess(ME, "41")], lambda _: {})
    faults: list[Fault] = []

    def failed() -> bool:
        faults.extend(investigator.poll(0, [], lambda _: {}).faults)
        return bool(faults)

    wait_until(failed)
    assert "thread hangs failed and began anew (RuntimeError('no'))" in faults[0].message
    assert "please report this" in caplog.text
    investigator.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
