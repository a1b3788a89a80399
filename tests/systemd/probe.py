"""What a service may do, tried: run in the place of the daemon, under its unit, by a real systemd.

Prints one JSON object of name -> "" where it went, else the error's name. Standard library only. Refuses to judge.
"""

import ctypes
import errno
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

SIGNED = ctypes.CDLL(None, use_errno=True)
NEW_USER, PTRACE_ATTACH, SCHED_FIFO = 0x10000000, 16, 1


def call(name: str, *arguments: object) -> None:
    """Call libc; raises OSError."""
    if getattr(SIGNED, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def read(path: str) -> None:
    """Read something; what stands in the place of a file that is hidden is empty."""
    with Path(path).open("rb", buffering=0) as file:
        if not file.read(16):
            raise OSError(errno.ENODATA, path)


def see(folder: str) -> None:
    """List something; likewise."""
    if not os.listdir(folder):  # noqa: PTH208  a Path would say the same in more words
        raise OSError(errno.ENODATA, folder)


def write(path: str) -> None:
    Path(path).write_text("")


def memory() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def connect(family: int, kind: int, protocol: int = 0) -> None:
    socket.socket(family, kind, protocol).close()


def tries(other: str) -> dict[str, Callable[[], object]]:
    """By name; `other` is a process of another user."""
    return {
        "open a GPU": lambda: os.open("/dev/nvidia0", os.O_RDWR),
        "open the GPUs' control": lambda: os.open("/dev/nvidiactl", os.O_RDWR),
        "open another device": lambda: os.open("/dev/fuse", os.O_RDWR),
        "open the kernel's log": lambda: os.open("/dev/kmsg", os.O_RDONLY),
        "make a device": lambda: os.mknod("/run/gpu-efficiency/device", 0o20666, os.makedev(195, 1)),
        "write /etc": lambda: write("/etc/probe"),
        "write /usr": lambda: write("/usr/probe"),
        "write /var/lib": lambda: write("/var/lib/probe"),
        "write /run": lambda: write("/run/probe"),
        "write a folder in /run that is everybody's": lambda: write("/run/open/probe"),
        "write its own state": lambda: write("/var/lib/gpu-efficiency/probe"),
        "write a socket's folder": lambda: write("/run/gpu-efficiency/probe"),
        "write a job's file": lambda: write("/run/gpu-efficiency/jobs/0"),
        "put the jobs' folder elsewhere": lambda: Path("/run/gpu-efficiency/jobs").rename("/run/gpu-efficiency/old"),
        "end a pause of root's": lambda: Path("/run/gpu-efficiency/pause").unlink(),
        "write a control group": lambda: write("/sys/fs/cgroup/cgroup.procs"),
        "write a kernel setting": lambda: write("/proc/sys/kernel/hostname"),
        "read the configuration": lambda: read("/etc/gpu-efficiency/config.toml"),
        "read the password file": lambda: read("/etc/shadow"),
        "see root's home": lambda: see("/root"),
        "read a log in a home": lambda: read("/home/job/log"),
        "read a log for everybody in a home": lambda: read("/home/job/open"),
        "reach the kubelet": lambda: read("/var/lib/kubelet/pod-resources/kubelet.sock"),
        "see others' temporary files": lambda: read("/tmp/of-another"),  # noqa: S108  this very folder
        "see another's status": lambda: read(f"/proc/{other}/status"),
        "see another's control group": lambda: read(f"/proc/{other}/cgroup"),
        "see another's command": lambda: read(f"/proc/{other}/cmdline"),
        "see another's environment": lambda: read(f"/proc/{other}/environ"),
        "see another's descriptors": lambda: see(f"/proc/{other}/fd"),
        "see another's sockets": lambda: read(f"/proc/{other}/net/tcp"),
        "stop another": lambda: os.kill(int(other), 0),
        "attach to another": lambda: call("ptrace", PTRACE_ATTACH, int(other), None, None),
        "become root": lambda: os.setuid(0),
        "have memory to write and run": memory,
        "make a user namespace": lambda: call("unshare", NEW_USER),
        "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "be real time": lambda: os.sched_setscheduler(0, SCHED_FIFO, os.sched_param(1)),
        "be nicer to itself": lambda: os.nice(-1),
        "give way to others": lambda: os.nice(1),
        "speak TCP": lambda: connect(socket.AF_INET, socket.SOCK_STREAM),
        "speak to a unix socket": lambda: connect(socket.AF_UNIX, socket.SOCK_SEQPACKET),
        "speak netlink": lambda: connect(socket.AF_NETLINK, socket.SOCK_RAW),
        "speak raw": lambda: connect(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "speak packets": lambda: connect(socket.AF_PACKET, socket.SOCK_RAW),
    }


def tried(what: Callable[[], object]) -> str:
    """Empty where it went; the error's name where it did not."""
    try:
        what()
    except OSError as err:
        return errno.errorcode.get(err.errno or 0, str(err))
    return ""


def main(other: str, answer: str) -> None:
    """Try all, and write what came of it."""
    Path(answer).write_text(json.dumps({name: tried(what) for name, what in tries(other).items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
