"""What /proc says of a job's processes: sockets, namespaces and variables."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.nccl.connection import NoAnswerError
from exporter.nccl.namespace import open_socket
from exporter.nccl.processes import LocalProcess, ras_endpoints, read_processes
from exporter.procfs import command_name, environment, innermost_pid, parent_pid, user_id
from exporter.sockets import connection_inode, socket_inodes
from exporter.workloads import WorkloadProcess

PROC = Path("/proc")
ME = os.getpid()


def me(**changes: Any) -> LocalProcess:
    (found,) = read_processes([WorkloadProcess(ME, "41", rank="3")], PROC)
    return LocalProcess(**{name: getattr(found, name) for name in found.__struct_fields__} | changes)


@contextmanager
def running(**environ: str) -> Iterator[int]:
    """Yield the pid of a process that has answered: before that the kernel may not show its environment yet."""
    with subprocess.Popen(["cat"], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        yield process.pid
        process.communicate()


def test_a_rank_may_come_from_the_process_s_own_environment() -> None:
    with running(RANK="12") as one, running(RANK="x") as other:
        found = read_processes([WorkloadProcess(pid, "41") for pid in (one, other)], PROC)
    assert [process.rank for process in found] == ["12", ""]


# Files of /proc.


def proc_file(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_small_files_of_proc(tmp_path: Path) -> None:
    fields = " ".join(map(str, range(4, 53)))
    folder = proc_file(
        tmp_path, stat=f"7 (a b) c) D {fields}", status="Name:\tx\nUid:\t1000\t0\t0\t0\nNSpid:\t700\t12\t3\n",
        environ="A=1\0NCCL_RAS_ADDR=a=b:1\0B\0",
    )  # fmt: skip
    assert (command_name(folder), parent_pid(folder)) == ("a b) c", 4)
    assert (innermost_pid(folder), user_id(folder)) == (3, 1000)
    assert environment(folder, ("NCCL_RAS_ADDR", "C")) == {"NCCL_RAS_ADDR": "a=b:1"}
    gone = tmp_path / "gone"
    assert (command_name(gone), parent_pid(gone), innermost_pid(gone), user_id(gone)) == ("", 0, 0, -1)
    (folder / "status").write_text("")
    assert (innermost_pid(folder), user_id(folder)) == (0, -1)


# Endpoints.


@pytest.mark.parametrize(
    ("address", "port"),
    [("localhost:4000", 4000), ("[::1]:4001", 4001), ("10.0.0.1", None), ("x:0", None), ("x:70000", None),
     ("x:9y", None), ("x:" + "9" * 5000, None), ("", None), ("x:\u0664\u0664", None)],
)  # fmt: skip
def test_the_port_of_ras_from_the_job_s_variable(address: str, port: int | None) -> None:
    from exporter.nccl.processes import _moved_port  # noqa: PLC0415

    assert _moved_port(me(variables={"NCCL_RAS_ADDR": address})) == (() if port is None else (port,))


def test_sockets_of_the_process_on_the_port_are_found_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)):
        port = server.getsockname()[1]
        (found,) = ras_endpoints([me(), me()], PROC, ports=(port,))
        assert (found.address, found.port, found.pid, found.pids) == ("127.0.0.1", port, ME, (ME, ME))
        assert list(ras_endpoints([me(variables={"NCCL_RAS_ENABLE": "0"})], PROC, ports=(port,))) == []
        assert list(ras_endpoints([me(pid=1 << 30)], PROC, ports=(port,))) == []


def test_a_server_on_all_addresses_is_reached_on_loopback() -> None:
    with socket.create_server(("", 0)) as server:
        (found,) = ras_endpoints([me()], PROC, ports=server.getsockname()[1:])
        assert found.address == "127.0.0.1"


def test_without_privileges_the_socket_s_user_must_be_the_job_s() -> None:
    """The daemon may not look into processes of others; the kernel's table of sockets has their users."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = server.getsockname()[1:]
        (found,) = ras_endpoints([me(private=True)], PROC, ports=ports)
        assert found.private
        with subprocess.Popen(["sleep", "600"], user=65534 if os.getuid() == 0 else None) as other:
            theirs = list(ras_endpoints([me(private=True, pid=other.pid)], PROC, ports=ports))
            other.kill()
        assert bool(theirs) is (os.getuid() != 0)


# Connections and namespaces.


def test_the_server_s_end_of_a_connection_is_found_by_inode() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ends = {"local": client.getpeername(), "remote": client.getsockname()}
        folder = PROC / "self"
        assert connection_inode(folder, **ends) == 0, "not accepted yet"
        with server.accept()[0] as accepted:
            assert connection_inode(folder, **ends) == os.fstat(accepted.fileno()).st_ino
            assert connection_inode(folder, **ends) in socket_inodes(folder)
        assert connection_inode(folder, local=("127.0.0.1", 1), remote=("127.0.0.1", 2)) == 0


def test_an_ipv4_connection_of_an_ipv6_server_is_found() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        address = "127.0.0.1", server.getsockname()[1]
        with socket.create_connection(address) as client, server.accept()[0] as accepted:
            found = connection_inode(PROC / "self", local=address, remote=client.getsockname())
            assert found == os.fstat(accepted.fileno()).st_ino


def test_in_the_daemon_s_own_namespace_a_socket_is_just_opened() -> None:
    with open_socket(ME, socket.AF_INET, PROC) as found:
        assert found.family == socket.AF_INET


def test_a_process_that_has_ended_has_no_namespace() -> None:
    with pytest.raises(NoAnswerError) as failure:
        open_socket(1 << 30, socket.AF_INET, PROC)
    assert failure.value.outcome == "ras_gone"


SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 28028))
print(flush=True)
while True:
    server.accept()[0].sendall(b"from the pod")
"""


@contextmanager
def pod() -> Iterator[int]:
    """A server on the loopback interface of a network namespace of its own, as a pod has; yields its pid."""
    import sys  # noqa: PLC0415

    up = f"ip link set lo up && exec {sys.executable} -S -E -c '{SERVER}'"
    with ExitStack() as stack:
        started = subprocess.Popen(["unshare", "--net", "sh", "-c", up], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process = stack.enter_context(started)
        stack.callback(process.kill)
        assert process.stdout
        if not process.stdout.readline():
            pytest.skip("needs a network namespace of its own")
        yield process.pid


def test_the_loopback_of_a_pod_is_reached_through_its_namespace() -> None:
    with pod() as pid:
        (found,) = ras_endpoints(read_processes([WorkloadProcess(pid, "41")], PROC), PROC, ports=(28028,))
        assert (found.address, found.pid) == ("127.0.0.1", pid)
        with open_socket(pid, socket.AF_INET, PROC) as sock:
            sock.settimeout(60)
            sock.connect((found.address, found.port))
            assert sock.recv(100) == b"from the pod"
        with socket.socket() as outside, pytest.raises(ConnectionRefusedError):
            outside.connect((found.address, found.port))


def test_a_namespace_that_may_not_be_joined_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_descriptor: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("exporter.nccl.namespace._setns", refused)
    with pod() as pid, pytest.raises(NoAnswerError, match="Operation not permitted") as failure:
        open_socket(pid, socket.AF_INET, PROC)
    assert failure.value.outcome == "ras_namespace"


def test_the_kernel_s_own_refusal_is_raised() -> None:
    from exporter.nccl.namespace import _setns  # noqa: PLC0415

    with Path("/dev/null").open() as file, pytest.raises(OSError, match="Invalid argument"):
        _setns(file.fileno())


def test_nccl_s_processes_are_recognized_by_pid_and_address() -> None:
    process = LocalProcess(1234, 7, frozenset({"10.0.0.1", "fd00::1"}))
    assert process.is_process(("10.0.0.1", 7, 0))
    assert process.is_process(("fd00::1", 7, 3))
    assert process.is_process(("::1", 7, 0))
    assert not process.is_process(("10.0.0.2", 7, 0))
    assert not process.is_process(("10.0.0.1", 1234, 0))
    assert not process.is_process(("unknown", 7, 0))
