"""Stand-ins of NCCL's profiler plugins: lines as NCCL Inspector and CoMMA write them, and a process that writes them.

Written after NVIDIA/nccl (ext-profiler/inspector and plugins/profiler/inspector: inspector.cc, inspector_json.cc and
the README's examples) and google/CoMMA (src/event.rs, docs/json-format.md). They stand in for the plugins alone: the
process, its environment, its open file and its /proc are real.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exporter.core.model import SECOND
from tests.waiting import PATIENCE

US = 1_000_000
"""Microseconds of a second."""
PROGRAM = """
import os, sys
name, namespace = sys.argv[1], os.getpid()
print(namespace, flush=True)
file = None
for line in sys.stdin:
    if file is None:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        file = open(name.replace("%p", str(namespace)), "w")
    file.write(line)
    file.flush()
    print(len(line), flush=True)
"""


def header(**more: Any) -> dict[str, Any]:
    return {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1} | more


def metadata(at: int, version: str = "v4.0") -> dict[str, Any]:
    """`at` is the time of the dump, Unix microseconds."""
    return {
        "inspector_output_format_version": version, "git_rev": "", "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": at, "hostname": "elsewhere", "pid": 1,
    }  # fmt: skip


def coll_perf(us: float, *, kernel_stop: int = 0, **more: Any) -> dict[str, Any]:
    """`us` of execution; `kernel_stop` adds the event trace of NCCL_INSPECTOR_DUMP_VERBOSE=1, Unix microseconds."""
    body: dict[str, Any] = {
        "coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 1 << 24, "coll_exec_time_us": us,
        "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.210914, "coll_busbw_gbs": 485.119099,
    } | more  # fmt: skip
    if kernel_stop:
        channels = [
            {"channel_id": n, "kernel_start_ts": kernel_stop - round(us), "kernel_stop_ts": kernel_stop - n,
             "kernel_record_ts": kernel_stop}
            for n in range(2)
        ]  # fmt: skip
        body["event_trace_sn"] = {"coll_start_sn": 1, "coll_stop_sn": 2, "kernel_events": [{"channel_id": 0}]}
        body["event_trace_ts"] = {"coll_start_ts": 1, "coll_stop_ts": 2, "kernel_events": channels}
    return body


def p2p_perf(us: float, peer: int, **more: Any) -> dict[str, Any]:
    return {
        "p2p": "Send", "p2p_sn": 3, "p2p_peer": peer, "p2p_msg_size_bytes": 4096, "p2p_exec_time_us": us,
        "p2p_timing_source": "kernel_gpu", "p2p_algobw_gbs": 1.0, "p2p_busbw_gbs": 1.0,
    } | more  # fmt: skip


def line(**parts: Any) -> bytes:
    return json.dumps(parts).encode()


def collective(at: int, us: float, *, version: str = "v4.0", comm: str = "0x1", rank: int = 2, **more: Any) -> bytes:
    """A line of the formats v4.0 to v4.2: each has header and metadata."""
    return line(header=header(id=comm, rank=rank), metadata=metadata(at, version), coll_perf=coll_perf(us, **more))


def dump(at: int, *, version: str = "v4.3", dropped: int = 0, comm: str = "0x1", **more: Any) -> bytes:
    """The line before the operations of one dump, since v4.2; in v4.3 only it has header and metadata."""
    stats = {
        "coll_records": 1, "coll_dropped_total": dropped, "coll_dropped_since_last_dump": dropped, "p2p_records": 0,
        "p2p_dropped_total": 0, "p2p_dropped_since_last_dump": 0,
    }  # fmt: skip
    return line(header=header(id=comm, **more), metadata=metadata(at, version), dump_stats=stats)


def comma(ts: int, dur: int, child_dur: int | None, **more: Any) -> bytes:
    """A record of CoMMA, enqueued at `ts`, Unix microseconds."""
    record: dict[str, Any] = {
        "args": {"size": 20971520}, "cat": "COLL", "comm_hash": "0x58aecebabb9e37af", "dur": dur, "name": "all_reduce",
        "ph": "X", "rank": 0, "seq_num": 57, "ts": ts, "algo": "RING", "n_max_channel": 8,
    } | more  # fmt: skip
    if child_dur is not None:
        record |= {"child_dur": child_dur, "child_start_ts": ts + dur - child_dur}
    return json.dumps(record).encode()


class JobProcess:
    """A real process that has a file of a plugin open, as the plugin has within a rank of a job."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        """`name` is the file's path with %p for the pid; it is created with the first line."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environ},
        )
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())
        self.path = Path(name.replace("%p", str(self.pid)))

    def write(self, *lines: bytes) -> None:
        """Have the process write lines, and wait until it has."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for each in lines:
            self.process.stdin.write(each + b"\n")
            self.process.stdin.flush()
            assert int(self.process.stdout.readline()) == len(each) + 1

    def close(self) -> None:
        """End the process, as at the end of its job."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


def microseconds(nanoseconds: int) -> int:
    return nanoseconds * US // SECOND
