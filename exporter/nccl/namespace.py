"""Opens sockets in the network namespace of a job's process, where a pod's loopback interface is.

setns(2) changes the calling thread alone, so a thread is started for it and ends with it; the socket stays in the
namespace. It needs CAP_SYS_ADMIN in the user namespaces of both.
"""

import ctypes
import os
import socket
import threading
from pathlib import Path

from exporter.nccl.connection import NoAnswerError
from exporter.sockets import network_namespace

_CLONE_NEWNET = 0x40000000
"""include/uapi/linux/sched.h."""


def open_socket(pid: int, family: socket.AddressFamily, proc: Path) -> socket.socket:
    """Return a stream socket in the network namespace of process `pid`. Raises NoAnswerError."""
    folder = proc / str(pid)
    try:
        if network_namespace(folder) == network_namespace(proc / "self"):
            return socket.socket(family)
    except PermissionError:  # a process of another user, for a daemon without privileges: see `processes`
        return socket.socket(family)
    except OSError as err:
        raise NoAnswerError("ras_gone", f"process {pid} has ended: {err}") from err
    return _socket_in_namespace(folder / "ns" / "net", family)


def _socket_in_namespace(path: Path, family: socket.AddressFamily) -> socket.socket:
    made: list[socket.socket] = []
    failures: list[OSError] = []

    def enter() -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _setns(descriptor)
            finally:
                os.close(descriptor)
            made.append(socket.socket(family))
        except OSError as err:
            failures.append(err)

    thread = threading.Thread(target=enter, name="namespace", daemon=True)
    thread.start()
    thread.join()
    if not made:
        raise NoAnswerError("ras_namespace", f"the job's network namespace cannot be joined: {failures[0]}")
    return made[0]


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
