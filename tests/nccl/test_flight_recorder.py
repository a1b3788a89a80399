"""PyTorch's Flight Recorder: recorded and real ranks over Gloo, and files and sockets of jobs that lead elsewhere.

The recordings are of PyTorch 2.10 (gloo_rank.py, two ranks). The control plane here is a stand-in that serves them over
HTTP on a unix socket; where a PyTorch with a Flight Recorder is installed, the real one is asked.
"""

import json
import os
import pickle
import shutil
import socket
import stat
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.config import HangSettings
from exporter.core.model import SECOND
from exporter.nccl.connection import NoAnswerError
from exporter.nccl.flight_recorder import (
    MOST_GROUPS,
    MOST_VALUES,
    RankTrace,
    RecordedCollective,
    compare_traces,
    dump_and_read,
    last_frame,
    read_handlers,
    read_stack,
    remembered,
    to_trace,
)
from exporter.nccl.job_files import open_owned
from exporter.nccl.pickle_reader import read_pickle
from exporter.nccl.processes import LocalProcess
from exporter.workloads import WorkloadProcess
from tests.nccl.test_investigator import Rig, wait_until
from tests.waiting import PATIENCE

PROC = Path("/proc")
RECORDED = Path(__file__).with_name("recorded")
ME = os.getpid()


def recorded(rank: int) -> Any:
    return json.loads((RECORDED / f"gloo_rank{rank}.json").read_bytes())


def process(rank: int = 0, *, pid: int = ME, **variables: str) -> LocalProcess:
    return LocalProcess(pid, pid, frozenset(), f"{rank}", variables=variables)


def trace(rank: int, changes: Mapping[str, int] | None = None, *, done: Mapping[str, int] | None = None) -> RankTrace:
    found = to_trace(process(rank, pid=100 + rank), recorded(rank))
    enqueued, completed = {**found.enqueued, **(changes or {})}, {**found.completed, **(done or {})}
    return replace(found, enqueued=enqueued, completed=completed)


# Dumps.


def test_the_progress_of_each_process_group_is_read_from_json() -> None:
    waiting, behind = trace(0), trace(1)
    assert (waiting.enqueued, waiting.completed) == ({"0": 6, "1": 1}, {"0": 5, "1": 1})
    assert behind.enqueued == {"0": 5, "1": 1}
    assert waiting.collectives[-1] == RecordedCollective("0", 6, "gloo:all_reduce", "scheduled", None, "")
    assert [each.state for each in waiting.collectives[:-1]] == ["completed"] * 6


def test_a_pickle_has_stacks_too() -> None:
    found = to_trace(process(), read_pickle((RECORDED / "gloo_rank0.pickle").read_bytes()))
    assert found.enqueued == {"0": 5, "1": 1}
    assert last_frame(found).startswith("train (train.py:")
    assert last_frame(trace(0)) == ""


def test_the_lowest_sequence_number_is_the_culprit_s() -> None:
    found = compare_traces([trace(0), trace(1)], [trace(0), trace(1)])
    assert found.culprit is not None
    assert (found.moving, found.culprit.process[1], found.culprit.rank) == (False, 101, "1")
    assert (found.culprit.collective, found.culprit.sequence) == ("gloo:all_reduce", 6)


def test_a_rank_that_is_not_known_is_not_made_up() -> None:
    unknown = [replace(each, process=replace(each.process, rank="")) for each in (trace(0), trace(1))]
    found = compare_traces(unknown, unknown).culprit
    assert found is not None
    assert (found.process[1], found.rank) == (101, "")


@pytest.mark.parametrize(
    "later", [trace(0, {"0": 7}), trace(0, {"1": 2}), trace(0, done={"0": 6})], ids=["begun", "other group", "ended"]
)
def test_any_progress_acquits(later: RankTrace) -> None:
    assert compare_traces([trace(0), trace(1)], [later, trace(1)]).moving


def test_equal_ranks_have_no_culprit() -> None:
    found = compare_traces([trace(1)], [trace(1)])
    assert (found.related, found.moving, found.culprit) == (True, False, None)
    assert not compare_traces([trace(0)], [trace(1)]).related


def test_nccl_s_entries_are_read_as_gloo_s() -> None:
    entry = {
        "collective_seq_id": 9, "pg_id": 3, "process_group": ["7", "tp"], "profiling_name": "nccl:all_gather",
        "state": "started", "time_discovered_started_ns": 5, "is_p2p": False,
    }  # fmt: skip
    sent = {**entry, "profiling_name": "nccl:send", "is_p2p": True, "collective_seq_id": 99}
    status = {"3": {"last_enqueued_collective": 9, "last_completed_collective": 8}, "4": {}, "x": {}}
    found = to_trace(process(), {"entries": [sent, entry], "pg_config": {"7": {}}, "pg_status": status})
    assert found.collectives == (RecordedCollective("7", 9, "nccl:all_gather", "started", 5, ""),)
    assert (found.enqueued, found.completed) == ({"7": 9}, {"7": 8})


def stage(rank: int, *, collectives: int, transfers: int) -> RankTrace:
    """A stage of a pipeline, whose group has both; PyTorch's status has the number of whichever came last."""
    entry = {"pg_id": 3, "process_group": ["7", "pp"], "state": "completed", "is_p2p": False}
    reduced = [{**entry, "collective_seq_id": number} for number in range(1, collectives + 1)]
    sent = [{**entry, "collective_seq_id": transfers, "is_p2p": True}] * transfers
    status = {"3": {"last_enqueued_collective": transfers, "last_completed_collective": transfers - 1}}
    dump = {"entries": reduced + sent, "pg_config": {"7": {}}, "pg_status": status}
    return to_trace(process(rank, pid=100 + rank), dump)


def test_transfers_between_stages_of_a_pipeline_make_no_culprit() -> None:
    """Each stage sends and receives its own number of them, in a job that is well."""
    stages = [stage(0, collectives=4, transfers=40), stage(1, collectives=4, transfers=12)]
    assert [each.enqueued for each in stages] == [{"7": 4}, {"7": 4}]
    assert compare_traces(stages, stages).culprit is None
    behind = [stages[0], stage(1, collectives=3, transfers=55)]
    found = compare_traces(behind, behind).culprit
    assert found is not None
    assert (found.rank, found.sequence) == ("1", 4)
    assert compare_traces(stages, [stages[0], stage(1, collectives=4, transfers=13)]).moving


def test_a_process_that_only_sends_and_receives_has_an_answer(serve: "Serve") -> None:
    entry = {"pg_id": 3, "process_group": ["7", "pp"], "is_p2p": True}
    dump = {"entries": [entry], "pg_config": {"7": {}}, "pg_status": {"3": {"last_completed_collective": 8}}}
    server, asked = serve({"dump_nccl_trace_json": json.dumps(dump).encode()})
    assert read_handlers(asked, PROC, seconds=PATIENCE).completed == {"7": 8}
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "value",
    [
        None, [], {"entries": 3}, {"pg_status": [1]}, {"entries": [{"collective_seq_id": "x"}]},
        {"entries": [{"frames": 3}]}, {"entries": [{"frames": {"a": 1}}]}, {"entries": [{"frames": [3]}]},
        {"entries": [{"process_group": {"a": 1}}]}, {"pg_status": {"0": 3}}, {"pg_status": {1: {}}},
    ],
)  # fmt: skip
def test_what_is_no_dump_is_malformed(value: object) -> None:
    with pytest.raises(NoAnswerError) as failure:
        to_trace(process(), value)
    assert failure.value.outcome == "recorder_malformed"


@pytest.mark.slow
def test_one_large_value_in_many_places_is_cut_before_it_is_converted() -> None:
    """A pickle of some kilobytes that would be 10^10 frames."""
    frames = [{"name": "f", "filename": "a.py", "line": 1}] * 100_000
    entries = [{"frames": frames, "process_group": ["0", "d"], "collective_seq_id": 1}] * 100_000
    assert len(to_trace(process(), {"entries": entries}).collectives) == 20_000


def test_texts_are_cut_before_they_are_converted() -> None:
    """A pickle of one text of megabytes, in 20,000 places."""
    text = "/" + "x" * (1 << 20) + "/train.py"
    frame = {"name": "train", "filename": text, "line": 3}
    entry = {"collective_seq_id": 1, "profiling_name": text, "state": text, "frames": [frame] * 9}
    dump = {
        "entries": [{**entry, "process_group": [f"{number}{text}", text]} for number in range(20)] * 20,
        "pg_config": [text] * 20, "pg_status": {f"{number}{text}": {} for number in range(20)},
    }  # fmt: skip
    tracemalloc.start()
    try:
        found = to_trace(process(), dump)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert {each.frame for each in found.collectives} == {"train (train.py:3)"}
    assert max(len(text) for each in found.collectives for text in (each.group, each.name, each.state)) < 1000


def test_a_status_of_many_fields_is_one() -> None:
    """It would be walked once for each process group."""
    many = {"last_completed_collective": 4} | {f"{number}": number for number in range(100_000)}
    dump = {"pg_config": ["0"], "pg_status": {f"{number}": many for number in range(100_000)}}
    assert to_trace(process(), dump).completed == {"0": 4}


def test_no_more_groups_are_remembered_than_a_process_has() -> None:
    entries = [{"process_group": [f"{number}"], "collective_seq_id": 1} for number in range(MOST_GROUPS + 9)]
    status = {f"{number}": {"last_completed_collective": 1} for number in range(MOST_GROUPS + 9)}
    found = to_trace(process(), {"entries": [*entries, {**entries[0], "collective_seq_id": 2}], "pg_status": status})
    assert (len(found.enqueued), len(found.completed), found.enqueued["0"]) == (MOST_GROUPS, MOST_GROUPS, 2)


def test_what_is_remembered_compares_as_the_whole_does() -> None:
    pickled = to_trace(process(STATE="x" * 1000), read_pickle((RECORDED / "gloo_rank0.pickle").read_bytes()))
    kept = remembered(pickled)
    assert (kept.enqueued, kept.completed) == (pickled.enqueued, pickled.completed)
    assert (last_frame(kept), len(kept.collectives), kept.process.variables) == (last_frame(pickled), 1, {})
    whole = [trace(0), trace(1)]
    assert compare_traces([remembered(each) for each in whole], whole) == compare_traces(whole, whole)


# The control plane.


class ControlPlane:
    """A stand-in for PyTorch's worker server: HTTP on a unix socket, with recorded replies by handler."""

    def __init__(self, path: Path, replies: Mapping[str, bytes]) -> None:
        self.replies, self.asked = dict(replies), list[str]()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"{path}")
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client, suppress(OSError):
                head = client.recv(4096).decode()
                if not head:  # the client has not liked this server's process
                    continue
                handler = head.split()[1].removeprefix("/handler/")
                self.asked.append(handler)
                found = self.replies.get(handler.partition("?")[0])
                status = "200 OK" if found is not None else "404 Not Found"
                body = b"no" if found is None else found
                client.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def gloo(rank: int) -> dict[str, bytes]:
    return {
        "dump_nccl_trace_json": (RECORDED / "no_nccl.json").read_bytes(),
        "fr_trace_json": (RECORDED / f"gloo_rank{rank}.json").read_bytes(),
        "dump_traceback": (RECORDED / f"stack_rank{rank}.txt").read_bytes(),
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="f") as made:
        yield Path(made)


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[[Mapping[str, bytes]], tuple[ControlPlane, LocalProcess]]]:
    with ExitStack() as stack:

        def serve(replies: Mapping[str, bytes]) -> tuple[ControlPlane, LocalProcess]:
            path = folder / "s"
            path.unlink(missing_ok=True)
            server = ControlPlane(path, replies)
            stack.callback(server.close)
            return server, process(TORCH_WORKER_SERVER_SOCKET=f"{path}")

        yield serve


Serve = Callable[[Mapping[str, bytes]], tuple[ControlPlane, LocalProcess]]


def outcome(call: Callable[[], object]) -> str:
    with pytest.raises(NoAnswerError) as failure:
        call()
    return failure.value.outcome


@pytest.mark.parametrize("value", [b'{"":0}', b"[0]", b"{}", b"0"])
def test_a_dump_of_many_values_is_refused_before_they_are_made(serve: Serve, value: bytes) -> None:
    """8 MiB of the smallest objects would be 225 MiB of memory."""
    _, asked = serve({"dump_nccl_trace_json": b'{"entries":[' + b",".join([value] * (MOST_VALUES + 1)) + b"]}"})
    tracemalloc.start()
    try:
        assert outcome(lambda: read_handlers(asked, PROC, seconds=PATIENCE)) == "recorder_too_large"
        assert tracemalloc.get_traced_memory()[1] < 32 << 20, "the bytes themselves, twice or thrice"
    finally:
        tracemalloc.stop()


def test_the_control_plane_is_asked_for_nccl_first_then_for_others(serve: Serve) -> None:
    server, asked = serve(gloo(0))
    assert read_handlers(asked, PROC, seconds=PATIENCE).enqueued == {"0": 6, "1": 1}
    assert server.asked == ["dump_nccl_trace_json?onlyactive=false", "fr_trace_json"]


@pytest.mark.parametrize(("rank", "frame"), [(0, "train (train.py:34)"), (1, "save_checkpoint (train.py:19)")])
def test_the_stack_is_the_main_thread_s(serve: Serve, rank: int, frame: str) -> None:
    _, asked = serve(gloo(rank))
    assert read_stack(asked, PROC, seconds=PATIENCE) == frame


def test_an_older_pytorch_has_no_handlers(serve: Serve) -> None:
    _, asked = serve({})
    assert outcome(lambda: read_handlers(asked, PROC, seconds=PATIENCE)) == "recorder_empty"
    assert outcome(lambda: read_stack(asked, PROC, seconds=PATIENCE)) == "recorder_no_handler"
    _, asked = serve({"dump_nccl_trace_json": b"{", "dump_traceback": b"nothing"})
    assert outcome(lambda: read_handlers(asked, PROC, seconds=PATIENCE)) == "recorder_malformed"
    assert read_stack(asked, PROC, seconds=PATIENCE) == ""


def test_a_socket_that_another_process_serves_is_not_asked(serve: Serve) -> None:
    server, asked = serve(gloo(0))
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            theirs = replace(asked, pid=other.pid)
            assert outcome(lambda: read_handlers(theirs, PROC, seconds=PATIENCE)) == "recorder_foreign"
        finally:
            other.kill()
    assert server.asked == []


@pytest.mark.parametrize("kind", ["link", "folder link", "file", "nothing", "relative", "up", "no path"])
def test_paths_that_lead_elsewhere_are_not_followed(serve: Serve, folder: Path, kind: str) -> None:
    """The variable is the job's to choose, so it may name any socket of the host."""
    server, _ = serve(gloo(0))
    (folder / "link").symlink_to(folder / "s")
    (folder / "elsewhere").symlink_to(folder)
    (folder / "file").write_text("no socket")
    path = {
        "link": f"{folder}/link", "folder link": f"{folder}/elsewhere/s", "file": f"{folder}/file",
        "nothing": f"{folder}/nothing", "relative": "s", "up": f"{folder}/../{folder.name}/s", "no path": "",
    }[kind]  # fmt: skip
    asked = process(TORCH_WORKER_SERVER_SOCKET=path)
    assert outcome(lambda: read_handlers(asked, PROC, seconds=PATIENCE)) == "recorder_file"
    assert server.asked == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_files_of_another_user_are_not_opened(folder: Path) -> None:
    (folder / "file").write_text("theirs")
    os.chown(folder / "file", 65534, 65534)
    with pytest.raises(NoAnswerError, match="another user"), _open(folder / "file"):
        raise AssertionError


def _open(path: Path) -> AbstractContextManager[int]:
    return open_owned(f"{path}", process(), PROC, kind=stat.S_ISREG)


def test_what_is_no_http_is_malformed(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/s")
        server.listen()

        def reply() -> None:
            for text in (b"SSH-2.0", b"HTTP/1.1 500 No\r\n\r\n"):
                with server.accept()[0] as client:
                    client.recv(1000)
                    client.sendall(text)

        threading.Thread(target=reply, daemon=True).start()
        asked = process(TORCH_WORKER_SERVER_SOCKET=f"{folder}/s")
        assert outcome(lambda: read_stack(asked, PROC, seconds=PATIENCE)) == "recorder_malformed"
        assert outcome(lambda: read_stack(asked, PROC, seconds=PATIENCE)) == "recorder_status"
        server.shutdown(socket.SHUT_RDWR)
        assert outcome(lambda: read_stack(asked, PROC, seconds=PATIENCE)) == "recorder_closed"


# The dump through the pipe.


def dumping(folder: Path, content: bytes, name: str = "dump_0") -> LocalProcess:
    """A thread in PyTorch's place: it waits for a write to the pipe, then writes the dump."""
    os.mkfifo(folder / "pipe0.pipe")
    (folder / name).write_bytes(b"an earlier dump")
    os.utime(folder / name, (1, 1))
    reader = os.open(folder / "pipe0.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def dump() -> None:
        while not _read(reader):
            time.sleep(0.02)
        (folder / name).write_bytes(content)
        os.close(reader)

    threading.Thread(target=dump, daemon=True).start()
    return process(TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{folder}/pipe", TORCH_FR_DUMP_TEMP_FILE=f"{folder}/dump_")


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 100)
    except BlockingIOError:
        return b""


def test_a_write_to_the_pipe_makes_the_process_dump(folder: Path) -> None:
    asked = dumping(folder, (RECORDED / "gloo_rank0.pickle").read_bytes())
    assert dump_and_read(asked, PROC, seconds=PATIENCE).enqueued == {"0": 5, "1": 1}


def test_a_dump_that_would_run_something_is_refused(folder: Path) -> None:
    asked = dumping(folder, pickle.dumps(Path("/x")))
    assert outcome(lambda: dump_and_read(asked, PROC, seconds=PATIENCE)) == "recorder_malformed"


def test_a_dump_behind_a_link_is_not_read(folder: Path) -> None:
    asked = dumping(folder, b"x", name="target")
    (folder / "dump_0").symlink_to(folder / "target")
    assert outcome(lambda: dump_and_read(asked, PROC, seconds=PATIENCE)) == "recorder_file"


def test_a_huge_dump_is_not_read(folder: Path) -> None:
    asked = dumping(folder, b"N" * ((8 << 20) + 1))
    assert outcome(lambda: dump_and_read(asked, PROC, seconds=PATIENCE)) == "recorder_too_large"


def test_a_process_that_reads_no_pipe_or_writes_no_dump(folder: Path) -> None:
    assert outcome(lambda: dump_and_read(process(), PROC, seconds=0.3)) == "recorder_no_handler"
    os.mkfifo(folder / "home0.pipe")
    nowhere = process(TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{folder}/home")
    with os.fdopen(os.open(folder / "home0.pipe", os.O_RDONLY | os.O_NONBLOCK), "rb") as unasked:
        assert outcome(lambda: dump_and_read(nowhere, PROC, seconds=0.3)) == "recorder_no_handler"
        assert not unasked.read(), "it would dump into its user's home"
    asked = process(TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{folder}/pipe", TORCH_FR_DUMP_TEMP_FILE=f"{folder}/dump_")
    assert outcome(lambda: dump_and_read(asked, PROC, seconds=0.3)) == "recorder_file"
    os.mkfifo(folder / "pipe0.pipe")
    assert outcome(lambda: dump_and_read(asked, PROC, seconds=0.3)) == "recorder_file", "nobody reads it"
    reader = os.open(folder / "pipe0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert outcome(lambda: dump_and_read(asked, PROC, seconds=0.3)) == "recorder_timeout"
    os.close(reader)


# The investigator, and real ranks.


def test_the_investigator_merges_the_ranks_of_this_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """One process stands for both ranks, so it is its variables that differ."""
    server, asked = serve(gloo(1))
    monkeypatch.setattr("exporter.nccl.investigator.read_processes", lambda *_: [asked])
    rig = Rig().spin(60)
    assert (rig.counts["recorder_answer"], rig.counts["hang_unknown"], rig.counts["ras_no_socket"]) == (2, 1, 2)
    assert rig.findings[0].source == "flight_recorder"
    rig = Rig()
    rig.investigator._settings = HangSettings(flight_recorder=False)
    server.asked.clear()
    assert rig.spin(60).findings == []
    assert server.asked == []
    assert folder.exists()


def recorder_python() -> str | None:
    """A Python with a PyTorch that has a Flight Recorder for Gloo (2.9 or newer)."""
    candidates = [os.environ.get("FLIGHT_RECORDER_PYTHON", ""), ".venv/training/bin/python"]
    check = "from torch._C._distributed_c10d import _WorkerServer, _dump_fr_trace"
    found = [path for path in candidates if path and shutil.which(path)]
    return next((path for path in found if _succeeds([path, "-c", check])), None)


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_real_ranks_over_gloo_name_the_one_that_saves(folder: Path) -> None:
    python = recorder_python()
    if python is None:
        pytest.skip("needs a PyTorch with a Flight Recorder")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = f"{free.getsockname()[1]}"
    with ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            variables = {
                "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "TORCH_FR_BUFFER_SIZE": "100", "TORCH_WORKER_SERVER_SOCKET": f"{folder}/{rank}",
            }  # fmt: skip
            command = [python, f"{Path(__file__).with_name('gloo_rank.py')}", f"{folder}"]
            started = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
            ranks.append(stack.enter_context(started))
            stack.callback(started.kill)
        for started in ranks:
            assert started.stdout
            assert any(line == "ready\n" for line in started.stdout)
        rig = Rig()
        rig.processes = [
            WorkloadProcess(started.pid, "41", (f"GPU-{rank}",), f"{rank}") for rank, started in enumerate(ranks)
        ]
        wait_until((folder / "rank1.pickle").exists)
        assert last_frame(to_trace(process(), read_pickle((folder / "rank1.pickle").read_bytes())))
        rig.spin(53)
    (found,) = rig.findings
    assert (found.rank, found.pid, found.gpu, found.host) == ("1", ranks[1].pid, "6", "n7")
    assert (found.collective, found.sequence) == ("gloo:all_reduce", 6)
    assert found.stack.startswith("save_checkpoint (gloo_rank.py:")
    assert (found.at, found.source) == (52 * SECOND, "flight_recorder")
