"""Asks a job that may hang who waits for whom: NCCL's RAS for the whole job, PyTorch's Flight Recorder for this node.

One thread, which no sample waits for. A job is asked once its GPUs have spun for a while, again some seconds later, and
then ever more seldom while they do. What moves acquits the job. Where nothing moves, a rank that cannot be reached, or
ranks in different collectives, prove a hang at once. A rank that is merely behind is named and proves nothing: it may
save, evaluate, or wait for a reply from elsewhere, which no figure of its process distinguishes from a hang.

A job may have several NCCL applications on a node. Only processes whose GPUs have spun long enough are asked, and what
their application answers is about its own processes' GPUs alone.

One question gathers the whole job, so the node of rank 0 asks first; the others follow much later, to acquit or confirm
their own GPUs, and in case that node has died. It also asks first if rank 0 alone has died.
"""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from exporter.clock import Clock
from exporter.config import Config, HangSettings
from exporter.core.model import SECOND, HangFinding
from exporter.core.snapshot import Snapshot
from exporter.nccl.comparison import (
    Comparison,
    Culprit,
    compare,
    connected,
    first_process,
    lost_processes,
    present_processes,
)
from exporter.nccl.connection import NoAnswerError
from exporter.nccl.flight_recorder import (
    RankTrace,
    compare_traces,
    dump_and_read,
    last_frame,
    read_handlers,
    read_stack,
    remembered,
)
from exporter.nccl.namespace import open_socket
from exporter.nccl.processes import LocalProcess, RasEndpoint, ras_endpoints, read_processes
from exporter.nccl.ras import MOST_VALUES, Process, RasAnswer, ask
from exporter.sockets import connection_inode, socket_inodes
from exporter.worker import Worker
from exporter.workloads import ProcessLookup, WorkloadListener, WorkloadProcess, WorkloadUpdate

TICK_SECONDS = 0.5
GAPS = (7, 30, 30, 60, 120, 300)
"""Seconds from one question to the next; the last repeats."""
OTHERS_DELAY = 60
OTHERS_SPREAD = 60
"""Seconds by which nodes without rank 0 ask later, and by how much more at most."""
MOST_ENDPOINTS = 4
MOST_ATTEMPTS = 8
"""Connections to one port, which several applications of one user may share (SO_REUSEPORT)."""
MOST_JOBS = 32
MOST_TRACES = 16
MOST_EXCUSED = 1000
"""Ranks of a job of which is remembered that it moved on without them."""
MOST_KEPT = 2 * MOST_VALUES
"""Values of all jobs together that are kept for the next comparison."""
RECORDER_SECONDS = 3.0
"""Time for one request to a Flight Recorder."""
TEXT_LENGTH = 120
VERDICTS = ("hang_moving", "hang_stuck", "hang_waiting", "hang_unknown")
"""Outcomes of a comparison: moving; proven; a rank is waited for; nothing moves and no rank is behind."""


class LatestSnapshot:
    """The newest Snapshot of an agent that is created later than the investigator."""

    def __init__(self) -> None:
        self._read: Callable[[], Snapshot | None] = lambda: None

    def connect(self, read: Callable[[], Snapshot | None]) -> None:
        """Return what `read` returns from now on; it must be thread-safe."""
        self._read = read

    def __call__(self) -> Snapshot | None:
        """Return the newest Snapshot; None: none yet."""
        return self._read()


class SuspectedJob(Struct, frozen=True):
    """A job whose GPUs spin."""

    spinning: frozenset[str]
    """UUIDs of its GPUs that spin now."""
    suspects: frozenset[str]
    """Those that have spun for long enough to ask why."""
    indexes: Mapping[str, str]
    """The driver's index of each GPU of this node, by UUID."""
    node: str


def suspected_jobs(snapshot: Snapshot, *, after: int) -> dict[str, SuspectedJob]:
    """Return the jobs one of whose GPUs has spun for `after` nanoseconds."""
    spinning: dict[str, set[str]] = {}
    suspects: dict[str, set[str]] = {}
    for gpu in snapshot.gpus:
        if gpu.spin_since is not None:
            for owner in gpu.owners:
                spinning.setdefault(owner.job_id, set()).add(gpu.device.uuid)
                if snapshot.wall - gpu.spin_since >= after:
                    suspects.setdefault(owner.job_id, set()).add(gpu.device.uuid)
    indexes = {gpu.device.uuid: gpu.device.index for gpu in snapshot.gpus}
    return {
        job: SuspectedJob(frozenset(spinning[job]), frozenset(suspects[job]), indexes, snapshot.meta.node)
        for job in sorted(suspects)[:MOST_JOBS]
    }


class _Investigation(Struct, eq=False):
    """What is known about a job that has been under suspicion since some moment."""

    due: int
    late: bool = False
    """Rank 0 is elsewhere, so that its node should have asked long before."""
    asked: int = 0
    answer: RasAnswer | None = None
    long_dead: frozenset[Process] = frozenset()
    """What RAS already considered dead in the first answer."""
    traces: list[RankTrace] = []

    @property
    def values(self) -> int:
        """How much is kept of the job; a process group has as much as a rank."""
        groups = sum(len(trace.enqueued) + len(trace.completed) for trace in self.traces)
        return (self.answer.values if self.answer else 0) + 5 * (groups + len(self.long_dead))

    def next_gap(self) -> int:
        """Nanoseconds to the next question."""
        self.asked += 1
        return GAPS[min(self.asked, len(GAPS)) - 1] * SECOND


class _Evidence(Struct, frozen=True):
    """A comparison, and of which processes of this node it is."""

    found: Comparison
    source: str
    processes: Sequence[LocalProcess]


class HangInvestigator:
    """The WorkloadListener that returns findings about jobs that may hang; its thread starts with the first process."""

    def __init__(
        self, settings: HangSettings, clock: Clock, *, latest: Callable[[], Snapshot | None], proc: Path
    ) -> None:
        """`latest` returns the newest Snapshot; it is called by the thread."""
        self._settings, self._clock, self._latest, self._proc = settings, clock, latest, proc
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._processes: tuple[WorkloadProcess, ...] = ()
        self._findings: list[HangFinding] = []
        self._counts = Counter(dict.fromkeys(VERDICTS, 0))
        self._investigations: dict[str, _Investigation] = {}
        self._too_large: set[str] = set()
        """Jobs of which RAS says more than is read: they are not asked again, for each question gathers all ranks."""
        self._excused: dict[str, frozenset[Process]] = {}
        """Ranks of a job that were dead for RAS while it moved: it does not wait for them later."""
        self._leading: set[str] = set()
        """Jobs whose rank 0 is on this node, or was."""
        self._worker = Worker("hangs", self._run, stop=self._stop)

    def poll(self, _now: int, processes: Sequence[WorkloadProcess], _lookup: ProcessLookup) -> WorkloadUpdate:
        """See WorkloadListener."""
        with self._lock:
            self._processes = tuple(processes)
            findings, self._findings = self._findings, []
            counts = tuple(self._counts.items())
        if processes:
            self._worker.start()
        return WorkloadUpdate(findings=tuple(findings), faults=self._worker.faults("listening_failed"), counts=counts)

    def close(self) -> None:
        """See WorkloadListener. A question in flight ends with its own time limit."""
        self._stop.set()
        self._worker.join(2.0)

    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            self._step()

    def _step(self) -> None:
        """Ask each suspected job that is due."""
        snapshot = self._latest()
        if snapshot is None:
            return
        suspected = suspected_jobs(snapshot, after=round(self._settings.ask_after_seconds * SECOND))
        self._investigations = {job: known for job, known in self._investigations.items() if job in suspected}
        with self._lock:
            processes = self._processes
        running = {process.job_id for process in processes}
        self._too_large &= running
        self._leading = self._leading & running | {process.job_id for process in processes if process.rank == "0"}
        self._excused = {job: ranks for job, ranks in self._excused.items() if job in running}
        for job_id, job in suspected.items():
            members = [process for process in processes if process.job_id == job_id]
            if members and not self._stop.is_set():
                self._ask_if_due(job_id, job, members)

    def _ask_if_due(self, job_id: str, job: SuspectedJob, members: Sequence[WorkloadProcess]) -> None:
        now = self._clock.now()
        delay = 0 if job_id in self._leading else _delay(members)
        investigation = self._investigations.setdefault(job_id, _Investigation(now + delay, late=delay > 0))
        if now < investigation.due:
            return
        finding = self._investigate(job_id, job, members, investigation)
        investigation.due = self._clock.now() + investigation.next_gap()
        if finding is not None:
            with self._lock:
                self._findings.append(finding)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1

    def _investigate(
        self, job_id: str, job: SuspectedJob, members: Sequence[WorkloadProcess], known: _Investigation
    ) -> HangFinding | None:
        """Ask RAS and the Flight Recorders once; return a finding if there is an earlier answer to compare with."""
        asked = _Job(job_id, job, read_processes(members, self._proc), known)
        ras = None if job_id in self._too_large else self._compare_answers(asked)
        evidence = _stronger(ras, self._compare_recorders(asked))
        finding = None if evidence is None else self._finding(asked, evidence)
        self._forget_largest()
        return finding

    def _forget_largest(self) -> None:
        """Begin anew with the jobs of which most is kept, while more is kept of all than may be."""
        kept = sorted(self._investigations.values(), key=lambda each: each.values)
        while kept and sum(each.values for each in kept) > MOST_KEPT:
            largest = kept.pop()
            largest.answer, largest.long_dead, largest.traces = None, frozenset(), []

    # NCCL RAS.

    def _compare_answers(self, job: "_Job") -> _Evidence | None:
        answer, before = self._ask_ras(job), job.known.answer
        if answer is None:
            return None
        job.known.answer = answer
        known = self._excused.get(job.job_id, frozenset()) - present_processes(answer)
        local = local_ranks(answer, job.processes)
        found = Comparison(related=False)
        if before is not None:
            local |= local_ranks(before, job.processes)
            found = compare(
                before,
                answer,
                processes=list(local),
                spinning=[rank for rank, matching in local.items() if all(map(job.spins, matching))],
                resting=[rank for rank, matching in local.items() if any(map(job.rests, matching))],
                excused=_excused_ranks(job, answer, known),
                # Nobody could ask before the death of rank 0 if that was its node's.
                long_dead=job.known.long_dead - (first_process(answer) if job.known.late else set()),
            )
        if not found.related:
            job.known.long_dead = frozenset(lost_processes(answer, dead=True))
        if found.moving:  # what has died only now may be what the rest of the job is about to wait for
            known |= lost_processes(answer, dead=True) & job.known.long_dead
        self._excused[job.job_id] = frozenset(sorted(known)[:MOST_EXCUSED])
        return _Evidence(found, "nccl_ras", [process for matching in local.values() for process in matching])

    def _ask_ras(self, job: "_Job") -> RasAnswer | None:
        """Ask the endpoints of suspects until one knows a suspect; count what the others did.

        Returns what the answer has of that application.
        """
        suspects = job.suspects()
        endpoints = list(ras_endpoints(suspects, self._proc, ports=self._settings.ras_ports))[:MOST_ENDPOINTS]
        if not endpoints:
            self._count("ras_no_socket")
        for endpoint in endpoints:
            for _ in range(MOST_ATTEMPTS):
                try:
                    answer = self._ask_endpoint(endpoint)
                except NoAnswerError as err:
                    self._count(err.outcome)
                    if err.outcome == "ras_too_large":
                        self._too_large.add(job.job_id)
                        return None
                    if err.outcome == "ras_foreign":
                        continue
                    break
                if known := local_ranks(answer, suspects):
                    self._count("ras_answer")
                    return RasAnswer(tuple(connected(answer, known)))
                self._count("ras_unrelated")
        return None

    def _ask_endpoint(self, endpoint: RasEndpoint) -> RasAnswer:
        family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
        with open_socket(endpoint.pid, family, self._proc) as sock:
            sock.settimeout(self._settings.timeout_seconds)
            try:
                sock.connect((endpoint.address, endpoint.port))
            except TimeoutError as err:
                raise NoAnswerError("ras_timeout", f"RAS accepts no connection: {err}") from err
            except OSError as err:
                raise NoAnswerError("ras_refused", f"RAS accepts no connection: {err}") from err
            seconds = self._settings.timeout_seconds
            return ask(sock, seconds=seconds, verify=lambda: self._verify_acceptor(sock, endpoint))

    def _verify_acceptor(self, sock: socket.socket, endpoint: RasEndpoint) -> None:
        """Raise NoAnswerError unless one of the processes that are asked has accepted the connection."""
        if endpoint.private:  # no process can be looked into: the kernel has named the socket's user, and no more
            return
        peer, own = sock.getpeername()[:2], sock.getsockname()[:2]
        try:
            inode = connection_inode(self._proc / str(endpoint.pid), local=peer, remote=own)
        except (OSError, ValueError):
            inode = 0
        if not inode or not any(inode in socket_inodes(self._proc / str(pid)) for pid in endpoint.pids):
            raise NoAnswerError("ras_foreign", "another process of the same user has accepted the connection")

    # PyTorch's Flight Recorder.

    def _compare_recorders(self, job: "_Job") -> _Evidence | None:
        processes = job.application()
        traces = list(self._read_recorders(processes))
        before, job.known.traces = job.known.traces, [remembered(trace) for trace in traces]
        if not before or not traces:
            return None
        return _Evidence(compare_traces(before, traces), "flight_recorder", processes)

    def _read_recorders(self, processes: Sequence[LocalProcess]) -> Iterator[RankTrace]:
        for process in processes[:MOST_TRACES] if self._settings.flight_recorder else ():
            served = process.variables.get("TORCH_WORKER_SERVER_SOCKET")
            piped = process.variables.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") and self._settings.flight_recorder_dump
            if not served and not piped:
                continue
            read = read_handlers if served else dump_and_read
            try:
                trace = read(process, self._proc, seconds=RECORDER_SECONDS)
            except NoAnswerError as err:
                self._count(err.outcome)
            else:
                self._count("recorder_answer")
                yield trace

    # Findings.

    def _finding(self, job: "_Job", evidence: _Evidence) -> HangFinding:
        now, found, source = self._clock.now(), evidence.found, evidence.source
        culprit, uuids = found.culprit, job.gpus_of(evidence.processes)
        if found.moving or culprit is None:
            self._count("hang_moving" if found.moving else "hang_unknown")
            return HangFinding(job.job_id, now, moving=found.moving, source=source, uuids=uuids)
        matching = job.processes_of(culprit, source)
        local = matching[0] if len(matching) == 1 and not culprit.namesake else None
        certain = local is not None or not matching
        self._count("hang_stuck" if found.proven else "hang_waiting")
        return HangFinding(
            job.job_id,
            now,
            moving=False,
            stuck=found.proven,
            rank=(local.rank if local else "") or culprit.rank,
            host=job.suspected.node if matching else printable(culprit.process[0]),
            pid=local.pid if local else max(0, culprit.process[1]) if certain else 0,
            gpu=job.gpu_of(local) or (f"{culprit.nvml_device}" if certain and culprit.nvml_device >= 0 else ""),
            collective=printable(culprit.collective),
            sequence=culprit.sequence,
            stack=printable(self._stack(local, job.known)) if local else "",
            source=source,
            uuids=uuids,
        )

    def _stack(self, process: LocalProcess, known: _Investigation) -> str:
        """Top of the process's stack, now or, if that cannot be read, at its last collective."""
        if self._settings.flight_recorder and process.variables.get("TORCH_WORKER_SERVER_SOCKET"):
            try:
                return read_stack(process, self._proc, seconds=RECORDER_SECONDS)
            except NoAnswerError as err:
                self._count(err.outcome)
        return next((last_frame(trace) for trace in known.traces if trace.process.pid == process.pid), "")


class _Job(Struct, frozen=True):
    """A suspected job and its processes on this node."""

    job_id: str
    suspected: SuspectedJob
    processes: list[LocalProcess]
    known: _Investigation

    def spins(self, process: LocalProcess) -> bool:
        """Whether a GPU of the process is known to spin."""
        return bool(self.suspected.spinning & set(process.uuids))

    def rests(self, process: LocalProcess) -> bool:
        """Whether the process's GPUs are known not to spin."""
        return bool(process.uuids) and not self.spins(process)

    def suspects(self) -> list[LocalProcess]:
        """Processes whose GPUs have spun for long enough; all, if no GPU lists such a process."""
        return [each for each in self.processes if self.suspected.suspects & set(each.uuids)] or self.processes

    def application(self) -> list[LocalProcess]:
        """Processes of one application: all, or the suspects, if a rank occurs twice, so that there are several."""
        ranks = [process.rank for process in self.processes if process.rank]
        return self.processes if len(ranks) == len(set(ranks)) else self.suspects()

    def processes_of(self, culprit: Culprit, source: str) -> list[LocalProcess]:
        """The culprit's process, if it is on this node; several, if NCCL has one name for them."""
        if source == "flight_recorder":  # its ranks are named by the host's pids
            return [process for process in self.processes if process.pid == culprit.process[1]]
        matching = [process for process in self.processes if process.is_process(culprit.process)]
        named = [process for process in matching if process.rank and process.rank == culprit.rank]
        return named if len(matching) > 1 and len(named) == 1 else matching

    def gpus_of(self, processes: Sequence[LocalProcess]) -> tuple[str, ...]:
        """UUIDs of one application's GPUs, and of those that spin for nobody known; empty: all are its own."""
        own, pids = {uuid for each in processes for uuid in each.uuids}, {each.pid for each in processes}
        others = {uuid for each in self.processes if each.pid not in pids for uuid in each.uuids} - own
        return tuple(sorted((own | self.suspected.spinning) - others)) if others else ()

    def gpu_of(self, process: LocalProcess | None) -> str:
        """The driver's index of the process's GPU; empty: several or none."""
        if process is None or len(process.uuids) != 1:
            return ""
        return self.suspected.indexes.get(process.uuids[0], "")


def local_ranks(answer: RasAnswer, processes: Sequence[LocalProcess]) -> dict[Process, list[LocalProcess]]:
    """Return the ranks of the answer, missing ones included, that are these processes.

    In pods with the host's network several may have the same name.
    """
    by_pid: dict[int, list[LocalProcess]] = {}
    for process in processes:
        by_pid.setdefault(process.own_pid, []).append(process)
    found: dict[Process, list[LocalProcess]] = {}
    for communicator in answer.communicators:
        for rank in communicator.members:
            if rank.process not in found and rank.pid in by_pid:
                matching = [process for process in by_pid[rank.pid] if process.is_process(rank.process)]
                if matching:
                    found[rank.process] = matching
    return found


def _excused_ranks(job: _Job, answer: RasAnswer, known: Collection[Process]) -> set[Process]:
    """Ranks that RAS does not reach, but that are known not to be waited for, or whose process lives on this node.

    A process that answers is not the one of that name that is missing: another pod with the host's network.
    """
    missing = lost_processes(answer) - present_processes(answer)
    return {rank for rank in missing if rank in known or sum(each.is_process(rank) for each in job.processes) == 1}


def _stronger(ras: _Evidence | None, recorded: _Evidence | None) -> _Evidence | None:
    """The comparison that shows more: movement, then RAS' culprit, which is that of the whole job."""
    known = [each for each in (ras, recorded) if each is not None and each.found.related]
    for shows in (lambda found: found.moving, lambda found: found.culprit is not None, lambda _: True):
        for each in known:
            if shows(each.found):
                return each
    return None


def _delay(members: Sequence[WorkloadProcess]) -> int:
    """Nanoseconds that this node waits before its first query."""
    ranks = [int(process.rank) for process in members if process.rank.isdecimal()]
    if not ranks or min(ranks) == 0:
        return 0
    return (OTHERS_DELAY + min(ranks) % OTHERS_SPREAD) * SECOND


def printable(text: str) -> str:
    """One line of bounded length without control characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:TEXT_LENGTH]).strip()


def open_investigator(config: Config, clock: Clock, latest: Callable[[], Snapshot | None]) -> WorkloadListener:
    """Create the listener that asks jobs which may hang, as configured in [hangs]."""
    return HangInvestigator(config.hangs, clock, latest=latest, proc=Path(config.host.proc))
