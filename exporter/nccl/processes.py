"""Reads from /proc what is needed to ask a job's own processes about its collectives.

A server speaks for a job only if a process of that job has its socket open, which the kernel says. An unprivileged
daemon may not look into processes of other users; then the socket must belong to the same user as the job's process.
"""

from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.nccl.ras import Process
from exporter.procfs import environment, innermost_pid, user_id
from exporter.sockets import ListeningSocket, addresses, listeners, network_namespace, socket_inodes
from exporter.workloads import WorkloadProcess

RAS_VARIABLES = ("NCCL_RAS_ADDR", "NCCL_RAS_ENABLE")
RECORDER_VARIABLES = (
    "TORCH_WORKER_SERVER_SOCKET", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "RANK",
)  # fmt: skip
MOST_PROCESSES = 256
"""Processes of one job on this node that are looked at."""


class LocalProcess(Struct, frozen=True):
    """A process of a job on this node, with what others know it by."""

    pid: int
    own_pid: int
    """The pid in its own pid namespace, which is what NCCL reports."""
    hosts: frozenset[str]
    """Addresses of its network namespace."""
    rank: str = ""
    uuids: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    """Those of RAS_VARIABLES and RECORDER_VARIABLES that it was started with; empty if that may not be read."""
    private: bool = False
    """The daemon may not look into it."""

    def is_process(self, process: Process) -> bool:
        """Whether NCCL's `process` is this one."""
        return process[1] == self.own_pid and (process[0] in self.hosts or _is_loopback(process[0]))


def _is_loopback(address: str) -> bool:
    """A job whose bootstrap uses the loopback interface is on one node."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def read_processes(processes: Iterable[WorkloadProcess], proc: Path) -> list[LocalProcess]:
    """Read the processes of one job; those that have ended are left out."""
    read = (_read_process(process, proc) for process in islice(processes, MOST_PROCESSES))
    return [process for process in read if process is not None]


def _read_process(process: WorkloadProcess, proc: Path) -> LocalProcess | None:
    folder = proc / str(process.pid)
    own_pid = innermost_pid(folder)
    if not own_pid:
        return None
    hosts = frozenset(address.strip("[]") for address in addresses(folder))
    try:
        variables, private = environment(folder, (*RAS_VARIABLES, *RECORDER_VARIABLES)), False
    except OSError:
        variables, private = {}, True
    rank = process.rank or variables.get("RANK", "")
    return LocalProcess(
        process.pid, own_pid, hosts, rank if rank.isdecimal() else "", process.uuids, variables, private
    )


class RasEndpoint(Struct, frozen=True):
    """A listening socket of a job's process on the port of RAS."""

    address: str
    port: int
    pid: int
    """The process that has it open, or whose user has; its network namespace has the address."""
    pids: tuple[int, ...]
    """All processes that may speak for the job there."""
    private: bool = False
    """Only the socket's user is known."""


def ras_endpoints(processes: Sequence[LocalProcess], proc: Path, *, ports: Sequence[int]) -> Iterator[RasEndpoint]:
    """Yield where RAS of these processes may listen, one for each network namespace, address and port."""
    pids = tuple(process.pid for process in processes)
    seen: set[tuple[str, str, int]] = set()
    for process in processes:
        if process.variables.get("NCCL_RAS_ENABLE") == "0":
            continue
        wanted = (*_moved_port(process), *ports)
        for namespace, sock in _own_sockets(process, proc):
            key = namespace, sock.address, sock.port
            if sock.port in wanted and key not in seen:
                seen.add(key)
                yield RasEndpoint(_connectable(sock.address), sock.port, process.pid, pids, process.private)


def _moved_port(process: LocalProcess) -> tuple[int, ...]:
    """The port of NCCL_RAS_ADDR, which is host:port or [address]:port."""
    port = process.variables.get("NCCL_RAS_ADDR", "").rpartition(":")[2]
    return (int(port),) if port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536 else ()  # noqa: PLR2004


def _own_sockets(process: LocalProcess, proc: Path) -> Iterator[tuple[str, ListeningSocket]]:
    """The process's listening sockets, with its network namespace."""
    folder = proc / str(process.pid)
    try:
        if process.private:  # in the daemon's own namespace, as far as can be known
            user = user_id(folder)
            yield from (("", sock) for sock in listeners(proc / "self") if sock.uid == user)
            return
        namespace, inodes = network_namespace(folder), socket_inodes(folder)
        yield from ((namespace, sock) for sock in listeners(folder) if sock.inode in inodes)
    except (OSError, ValueError):  # it has just ended
        return


def _connectable(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104  bound by a workload
