"""Asks a job that may hang who waits for whom: NCCL's RAS for the whole job, PyTorch's Flight Recorder for this node.

One thread, which no sample waits for. A job is asked once its GPUs have spun for a while, again some seconds later, and
then ever more seldom while they do. What moves acquits the job. Where nothing moves, a rank that cannot be reached, or
ranks in different collectives, prove a hang at once. A rank that is merely behind is named and proves nothing: it may
save, evaluate, or wait for a reply from elsewhere, which no figure of its process distinguishes from a hang.

One question gathers the whole job, so the node of rank 0 asks first; the others follow much later, to acquit or confirm
their own GPUs, and in case that node has died.
"""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.clock import Clock
from exporter.config import Config, HangSettings
from exporter.core.model import SECOND, HangFinding
from exporter.core.snapshot import Snapshot
from exporter.nccl.comparison import Comparison, Culprit, compare, connected
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
    indexes: Mapping[str, str]
    """The driver's index of each GPU of this node, by UUID."""
    node: str


def suspected_jobs(snapshot: Snapshot, *, after: int) -> dict[str, SuspectedJob]:
    """Return the jobs one of whose GPUs has spun for `after` nanoseconds."""
    spinning: dict[str, set[str]] = {}
    suspected: set[str] = set()
    for gpu in snapshot.gpus:
        if gpu.spin_since is not None:
            for owner in gpu.owners:
                spinning.setdefault(owner.job_id, set()).add(gpu.device.uuid)
                if snapshot.wall - gpu.spin_since >= after:
                    suspected.add(owner.job_id)
    indexes = {gpu.device.uuid: gpu.device.index for gpu in snapshot.gpus}
    node = snapshot.meta.terms.node or snapshot.meta.host
    return {job: SuspectedJob(frozenset(spinning[job]), indexes, node) for job in sorted(suspected)[:MOST_JOBS]}


class _Investigation(Struct, eq=False):
    """What is known about a job that has been under suspicion since some moment."""

    due: int
    asked: int = 0
    answer: RasAnswer | None = None
    traces: list[RankTrace] = []

    @property
    def values(self) -> int:
        """How much is kept of the job; a process group has as much as a rank."""
        groups = sum(len(trace.enqueued) + len(trace.completed) for trace in self.traces)
        return (self.answer.values if self.answer else 0) + 5 * groups

    def next_gap(self) -> int:
        """Nanoseconds to the next question."""
        self.asked += 1
        return GAPS[min(self.asked, len(GAPS)) - 1] * SECOND


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
        self._too_large &= {process.job_id for process in processes}
        for job_id, job in suspected.items():
            members = [process for process in processes if process.job_id == job_id]
            if members and not self._stop.is_set():
                self._ask_if_due(job_id, job, members)

    def _ask_if_due(self, job_id: str, job: SuspectedJob, members: Sequence[WorkloadProcess]) -> None:
        now = self._clock.now()
        investigation = self._investigations.setdefault(job_id, _Investigation(now + _delay(members)))
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
        processes = read_processes(members, self._proc)
        ras = None if job_id in self._too_large else self._compare_answers(job_id, processes, known, job.spinning)
        recorded = self._compare_recorders(processes, known)
        found, source = _stronger(ras, recorded)
        finding = None if found is None else self._finding(_Job(job_id, job, processes, known), found, source)
        self._forget_largest()
        return finding

    def _forget_largest(self) -> None:
        """Begin anew with the jobs of which most is kept, while more is kept of all than may be."""
        kept = sorted(self._investigations.values(), key=lambda each: each.values)
        while kept and sum(each.values for each in kept) > MOST_KEPT:
            largest = kept.pop()
            largest.answer, largest.traces = None, []

    # NCCL RAS.

    def _compare_answers(
        self, job_id: str, processes: Sequence[LocalProcess], known: _Investigation, spinning: frozenset[str]
    ) -> Comparison | None:
        answer = self._ask_ras(job_id, processes)
        before = known.answer
        if answer is None:
            return None
        local = local_ranks(answer, processes)
        known.answer = RasAnswer(tuple(connected(answer, local)))
        if before is None:
            return None
        local |= local_ranks(before, processes)
        waiting = [rank for rank, process in local.items() if spinning & set(process.uuids)]
        resting = [rank for rank, process in local.items() if process.uuids and not spinning & set(process.uuids)]
        return compare(before, answer, processes=list(local), spinning=waiting, resting=resting)

    def _ask_ras(self, job_id: str, processes: Sequence[LocalProcess]) -> RasAnswer | None:
        """Ask the endpoints of the job until one knows a process of it; count what the others did."""
        endpoints = list(ras_endpoints(processes, self._proc, ports=self._settings.ras_ports))[:MOST_ENDPOINTS]
        if not endpoints:
            self._count("ras_no_socket")
        for endpoint in endpoints:
            for _ in range(MOST_ATTEMPTS):
                try:
                    answer = self._ask_endpoint(endpoint)
                except NoAnswerError as err:
                    self._count(err.outcome)
                    if err.outcome == "ras_too_large":
                        self._too_large.add(job_id)
                        return None
                    if err.outcome == "ras_foreign":
                        continue
                    break
                if local_ranks(answer, processes):
                    self._count("ras_answer")
                    return answer
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
        """Raise NoAnswerError unless a process of the job has accepted the connection."""
        if endpoint.private:  # no process can be looked into: the kernel has named the socket's user, and no more
            return
        peer, own = sock.getpeername()[:2], sock.getsockname()[:2]
        try:
            inode = connection_inode(self._proc / str(endpoint.pid), local=peer, remote=own)
        except (OSError, ValueError):
            inode = 0
        if not inode or not any(inode in socket_inodes(self._proc / str(pid)) for pid in endpoint.pids):
            raise NoAnswerError("ras_foreign", "another application of the same user has accepted the connection")

    # PyTorch's Flight Recorder.

    def _compare_recorders(self, processes: Sequence[LocalProcess], known: _Investigation) -> Comparison | None:
        traces = list(self._read_recorders(processes))
        before, known.traces = known.traces, [remembered(trace) for trace in traces]
        return compare_traces(before, traces) if before and traces else None

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

    def _finding(self, job: "_Job", found: Comparison, source: str) -> HangFinding:
        now, culprit = self._clock.now(), found.culprit
        if found.moving or culprit is None:
            self._count("hang_moving" if found.moving else "hang_unknown")
            return HangFinding(job.job_id, now, moving=found.moving, source=source)
        local = job.process_of(culprit, source)
        self._count("hang_stuck" if found.proven else "hang_waiting")
        return HangFinding(
            job.job_id,
            now,
            moving=False,
            stuck=found.proven,
            rank=(local.rank if local else "") or culprit.rank,
            host=job.suspected.node if local else printable(culprit.process[0]),
            pid=local.pid if local else max(0, culprit.process[1]),
            gpu=job.gpu_of(local) or (f"{culprit.nvml_device}" if culprit.nvml_device >= 0 else ""),
            collective=printable(culprit.collective),
            sequence=culprit.sequence,
            stack=printable(self._stack(local, job.known)) if local else "",
            source=source,
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

    def process_of(self, culprit: Culprit, source: str) -> LocalProcess | None:
        """The culprit's process, if it is on this node."""
        if source == "flight_recorder":  # its ranks are named by the host's pids
            return next((process for process in self.processes if process.pid == culprit.process[1]), None)
        return next((process for process in self.processes if process.is_process(culprit.process)), None)

    def gpu_of(self, process: LocalProcess | None) -> str:
        """The driver's index of the process's GPU; empty: several or none."""
        if process is None or len(process.uuids) != 1:
            return ""
        return self.suspected.indexes.get(process.uuids[0], "")


def local_ranks(answer: RasAnswer, processes: Sequence[LocalProcess]) -> dict[Process, LocalProcess]:
    """Return the ranks of the answer that are these processes."""
    by_pid: dict[int, list[LocalProcess]] = {}
    for process in processes:
        by_pid.setdefault(process.own_pid, []).append(process)
    found: dict[Process, LocalProcess] = {}
    for communicator in answer.communicators:
        for rank in communicator.ranks:
            if rank.process not in found:
                matching = (process for process in by_pid.get(rank.pid, ()) if process.is_process(rank.process))
                found.update((rank.process, process) for process in islice(matching, 1))
    return found


def _stronger(ras: Comparison | None, recorded: Comparison | None) -> tuple[Comparison | None, str]:
    """The comparison that shows more: movement, then RAS' culprit, which is that of the whole job."""
    pairs = [(ras, "nccl_ras"), (recorded, "flight_recorder")]
    known = [(found, source) for found, source in pairs if found is not None and found.related]
    for shows in (lambda found: found.moving, lambda found: found.culprit is not None, lambda _: True):
        for found, source in known:
            if shows(found):
                return found, source
    return None, ""


def _delay(members: Sequence[WorkloadProcess]) -> int:
    """Nanoseconds that this node waits before its first question."""
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
