"""Runs the command `nccl`: prints how to have NCCL time all communication of a node's jobs, and checks that it does.

Exit status of `--check` 0: all processes that use NCCL are timed; 1: one is not, or there is none.
"""

import argparse
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from exporter.cli.wiring import config_file_argument, configure
from exporter.formatting import format_amount, format_duration
from exporter.nccl.diagnosis import ProcessDiagnosis, diagnose_processes
from exporter.report.text import printable

_INSPECTOR = """\
NCCL Inspector comes with NCCL 2.28 and later (github.com/NVIDIA/nccl, plugins/profiler/inspector or, in 2.28,
ext-profiler/inspector). It writes a line per collective; the daemon reads them: how much of the time each rank
communicates, in which collectives, how fast, and which rank the others wait for. No job has to be changed. As root, on
each node:

1. Build the plugin from the sources of the NCCL that the jobs use, and copy it to a path that containers can have too:

     make -C plugins/profiler/inspector CUDA_HOME=/usr/local/cuda
     install -D -m 0755 plugins/profiler/inspector/libnccl-profiler-inspector.so /opt/nccl/libnccl-profiler-inspector.so

2. /etc/nccl.conf, which NCCL reads when a job starts (a job's own variables win):

     NCCL_PROFILER_PLUGIN=/opt/nccl/libnccl-profiler-inspector.so
     NCCL_INSPECTOR_ENABLE=1
     NCCL_INSPECTOR_DUMP_DIR=/var/tmp/nccl-inspector
     NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=100000

   With NCCL 2.28 set the interval to 500: its Inspector keeps only the last collective between two dumps.
   NCCL_INSPECTOR_DUMP_VERBOSE=1 adds the time at which each kernel ended, and some 200 bytes per channel; without it
   collectives are placed by the time of the dump, one after the other. NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (8192)
   leaves out smaller messages.

3. /etc/tmpfiles.d/nccl-inspector.conf, so that the folder exists and old files go; then `systemd-tmpfiles --create`.
   A collective takes some 600 bytes, so a busy process writes about a gigabyte an hour:

     d /var/tmp/nccl-inspector 1777 root root 6h
"""
_EMPTIED = """
   A process keeps its file open, so nothing removes it while the job runs. /etc/cron.hourly/nccl-files, with mode 0755,
   empties what has grown beyond a gigabyte; the daemon reads on, and loses about a second of it.
   dd follows no link and creates no file, as somebody else's in a folder for all (fs.protected_regular) demands:

     #!/bin/sh
     exec find {folder} -maxdepth 1 -type f -links 1 -size +1G \\
       -execdir dd if=/dev/null of={{}} oflag=nofollow conv=nocreat status=none \\;
"""
_COMMA = """\
CoMMA (github.com/google/CoMMA) is a profiler plugin for NCCL 2.23 and later. It writes a line per collective; the
daemon reads them: how much of the time each rank communicates, in which collectives, and which rank the others wait
for. No job has to be changed. As root, on each node:

1. Build the plugin (cargo build --release), and copy it to a path that containers can have too:

     install -D -m 0755 target/release/libnccl_profiler.so /opt/nccl/libnccl-profiler-comma.so

2. /etc/nccl.conf, which NCCL reads when a job starts (a job's own variables win):

     NCCL_PROFILER_PLUGIN=/opt/nccl/libnccl-profiler-comma.so
     NCCL_PROFILER_LATENCY_FILE=/var/tmp/nccl-comma/%p.txt
     NCCL_PROFILER_USE_GPUVIZ=false
     NCCL_PROFILER_TRACK_KERNEL_CH=true

   The last line times collectives within a node too. Collectives of up to 64 KiB other than AllReduce, and nine of ten
   receives, are left out: NCCL_PROFILER_SKIP_SMALL_COLLECTIVE=false and NCCL_PROFILER_P2P_RECV_SAMPLE_RATE=1.0 add
   them. CoMMA does not report bus bandwidth.

3. /etc/tmpfiles.d/nccl-comma.conf, so that the folder exists and old files go; then `systemd-tmpfiles --create`:

     d /var/tmp/nccl-comma 1777 root root 6h
"""
_COMMON = """
4. Containers need the three paths of the host. Docker, Podman:

     -v /etc/nccl.conf:/etc/nccl.conf:ro -v /opt/nccl:/opt/nccl:ro -v {folder}:{folder}

   Slurm with pyxis and enroot, in /etc/enroot/mounts.d/nccl.fstab:

     /etc/nccl.conf /etc/nccl.conf none x-create=file,bind,ro
     /opt/nccl /opt/nccl none x-create=dir,bind,ro
     {folder} {folder} none x-create=dir,bind

   Kubernetes: three volumes of type hostPath, by a mutating policy for pods with GPUs or in the job template.

5. The daemon must see the jobs' processes, as for ranks and followed logs: docs/security.md, "Privileges".
   Start a job, and run `gpu-efficiency nccl --check` on its node.
"""
GUIDES = {
    "inspector": _INSPECTOR + (_EMPTIED + _COMMON).format(folder="/var/tmp/nccl-inspector"),  # noqa: S108  as it is printed  # nosec B108
    "comma": _COMMA + (_EMPTIED + _COMMON).format(folder="/var/tmp/nccl-comma"),  # noqa: S108  as it is printed  # nosec B108
}


def nccl(args: argparse.Namespace) -> int:
    """Print the guide, or check the processes of this node."""
    if not args.check:
        print(GUIDES[args.plugin], end="")
        return 0
    found = list(diagnose_processes(Path(configure(args).host.proc), wall=time.time_ns()))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print("\n".join(_text_lines(found)))
    return int(not found or any(process.problems for process in found))


def _text_lines(found: list[ProcessDiagnosis]) -> Iterator[str]:
    if not found:
        yield "No process on this node uses NCCL, as far as this user may see: run this as root while a job runs."
    for process in found:
        yield f"process {process.pid} ({printable(process.command)}) of {_user_name(process.user)}"
        yield from (f"  {line}" for line in _state_lines(process))
        for problem in process.problems:
            yield f"  problem: {printable(problem.message)}"
            yield f"       do: {printable(problem.do)}"


def _state_lines(process: ProcessDiagnosis) -> Iterator[str]:
    if process.plugin:
        yield f"plugin {printable(process.plugin)}, set by {printable(process.origin)}"
    yield from (f"loaded {printable(path)}" for path in process.loaded)
    if process.file:
        yield f"file {printable(process.file)}, {format_amount(process.bytes)}B"
    if process.age_seconds is not None:
        yield f"last collective {process.last_event}, {format_duration(max(0.0, process.age_seconds))} ago"


def _user_name(uid: int) -> str:
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"user {uid}"


def nccl_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `nccl`."""
    config_file_argument(command)
    command.add_argument("--plugin", choices=sorted(GUIDES), default="inspector", help="which one; default inspector")
    command.add_argument("--check", action="store_true", help="check the processes that run on this node now")
    command.add_argument("--json", action="store_true", help="with --check: for programs")
