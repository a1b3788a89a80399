"""Queries to a controller: by commands that a shell script simulates, over HTTP to a local server, on the thread."""

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import ClassVar

import pytest

from exporter.core.model import SECOND
from exporter.schedulers.slurm.client import (
    CommandClient,
    Commands,
    MissingCommandError,
    SlurmUnavailableError,
    UnknownJobError,
)
from exporter.schedulers.slurm.controller import ControllerQueries, Updates
from exporter.schedulers.slurm.local_node import GpuMap, JobTasks, parse_slots
from exporter.schedulers.slurm.notation import Gres
from exporter.schedulers.slurm.parsing import SlurmJob
from exporter.schedulers.slurm.restd import RestClient
from exporter.schedulers.slurm.slurmd import list_gpus
from tests.schedulers.slurm_rig import BEGIN, NODE, RECORDED, Answers, Here, Proc, job, recorded
from tests.waiting import wait_for


class Script:
    """A folder with a scontrol, sinfo and slurmd that log their arguments and do what a test sets."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder, self.log = folder, folder / "log"
        self.write("scontrol", f'case "$*" in *version) echo "slurm-wlm {version}";; *) exit 1;; esac')

    def write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.log}\n{body}\n')
        path.chmod(0o755)

    def answer(self, version: str, *cases: tuple[str, str]) -> None:
        """Have scontrol run a shell command for each pattern of its arguments."""
        said = "\n".join(f"{pattern}) {command};;" for pattern, command in cases)
        self.write("scontrol", f'case "$*" in *version) echo "slurm-wlm {version}";;\n{said}\n*) exit 9;; esac')

    @property
    def asked(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "version" not in line]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path, "22.05.8")


@pytest.fixture
def commands(script: Script) -> Iterator[CommandClient]:
    made = CommandClient(Commands(bin_dir=str(script.folder), timeout=20.0))
    yield made
    made.close()


def cat(name: str) -> str:
    return f"cat {RECORDED / name}"


def test_old_versions_are_asked_for_text(script: Script, commands: CommandClient) -> None:
    script.answer(
        "22.05.8",
        ("'--local show job 2'", cat("slurm-22.05/running.txt")),
        ("'--local -d show job 2'", cat("slurm-22.05/running.d.txt")),
    )
    said = commands.job("2")
    assert (said.user, said.given) == ("alice", None)
    detail = commands.detail("2")
    assert detail is not None
    assert detail.given is not None
    assert script.asked == ["scontrol --local show job 2", "scontrol --local -d show job 2"]


def test_text_that_may_be_forged_is_asked_for_again_in_columns_that_cannot_be(
    script: Script, commands: CommandClient
) -> None:
    script.answer("22.05.8", ("'--local show job 5'", cat("slurm-22.05/evil_name.txt")))
    script.write("squeue", cat("slurm-22.05/spoof.columns.txt"))
    said = commands.job("5")
    assert (said.user, said.account, said.partition, said.gpus, said.name) == ("alice", "", "gpu", 2, "")
    assert [line.partition(" -O")[0] for line in script.asked] == [
        "scontrol --local show job 5", "squeue --local -h -j 5",
    ]  # fmt: skip
    script.write("squeue", "echo 'JOBID|STATE|'")
    with pytest.raises(ValueError, match="0 lines of job 5"):
        commands.job("5")


def test_new_versions_are_asked_for_json_and_need_no_detail(script: Script, commands: CommandClient) -> None:
    script.answer("24.11.5", ("'--local show job 2 --json'", cat("slurm-24.11/running.json")))
    assert commands.job("2").given is not None
    assert commands.detail("2") == commands.job("2")
    assert script.asked == ["scontrol --local show job 2 --json"] * 3


def test_without_the_json_plugin_text_is_asked_for_from_then_on(script: Script, commands: CommandClient) -> None:
    script.answer(
        "24.11.5", ("*--json", "echo no plugin; exit 0"), ("'--local show job 2'", cat("slurm-24.11/running.txt"))
    )
    assert [commands.job("2").user for _ in range(2)] == ["alice", "alice"]
    assert [line.endswith("--json") for line in script.asked] == [True, False, False]


def test_a_job_whose_json_cannot_be_read_turns_json_off_for_no_other(script: Script, commands: CommandClient) -> None:
    unreadable = f"sed 's|gres/gpu:h100|gres/!|' {RECORDED / 'slurm-24.11/running.json'}"
    in_text = [cat(f"slurm-24.11/running{detail}.txt") for detail in ("", ".d")]
    cases = [("'--local show job 2'", in_text[0]), ("'--local -d show job 2'", in_text[1])]
    script.answer("24.11.5", ("*--json", unreadable), *cases)
    detail = commands.detail("2")
    assert (commands.job("2").user, commands.job("2").given) == ("alice", None)
    assert detail is not None
    assert detail.given is not None, "only -d shows them"
    script.answer("24.11.5", ("*--json", cat("slurm-24.11/running.json")))
    assert commands.job("2").given is not None


def test_json_of_which_no_job_can_be_read_is_asked_for_no_more(script: Script, commands: CommandClient) -> None:
    """The fourth job in a row, and all queries after it, cost one RPC again."""
    accepted = cat("slurm-24.11/running.json")
    unreadable = f"{accepted} | sed 's|gres/gpu:h100|gres/!|'"
    text = f'{cat("slurm-24.11/running.txt")} | sed "s/JobId=2/JobId=$4/"'
    script.answer("24.11.5", ("*--json", unreadable), ("*", text))
    for job_id in ("3", "3", "3", "4"):
        assert commands.job(job_id).job_id == job_id
    script.answer("24.11.5", ("*--json", accepted))
    assert commands.job("2").given is not None, "one that is accepted begins the row anew"
    script.answer("24.11.5", ("*--json", unreadable), ("*", text))
    script.log.unlink()
    for job_id in ("5", "6", "7", "8", "8"):
        assert commands.job(job_id).job_id == job_id
    assert [line.endswith("--json") for line in script.asked] == [True, False] * 3 + [False, False]


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_a_job_that_the_controller_does_not_know(script: Script, commands: CommandClient, version: str) -> None:
    text = "{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }"
    script.answer(version, ("*--json", cat("slurm-24.11/unknown.json")), ("*", text))
    with pytest.raises(UnknownJobError):
        commands.job("2")


def test_silence_is_told_in_the_command_s_own_words(script: Script, commands: CommandClient) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    script.answer("22.05.8", ("*", f"echo '{said}' >&2; exit 1"))
    with pytest.raises(SlurmUnavailableError, match=r"scontrol --local show job 2: exit 1: .*\(connect failure\)"):
        commands.job("2")


def test_a_command_that_hangs_is_killed_with_its_children(script: Script, tmp_path: Path) -> None:
    script.answer("22.05.8", ("*", f"sleep 600 & echo $! > {tmp_path}/child; wait"))
    hasty = Commands(bin_dir=str(tmp_path), timeout=20.0)
    hasty.output("scontrol", "--version")
    hasty._timeout = 0.3
    with pytest.raises(SlurmUnavailableError, match=r"no answer within 0.3 s: is slurmctld up"):
        hasty.output("scontrol", "show", "job")
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child))


def test_close_ends_a_question_in_the_middle(script: Script, commands: CommandClient, tmp_path: Path) -> None:
    script.answer("22.05.8", ("*", f"echo > {tmp_path}/asked; sleep 600"))
    failed: list[Exception] = []

    def ask() -> None:
        try:
            commands.job("2")
        except SlurmUnavailableError as err:
            failed.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    until((tmp_path / "asked").exists)
    commands.close()
    thread.join(10)
    assert not thread.is_alive()
    assert failed
    with pytest.raises(SlurmUnavailableError, match="being stopped"):
        commands.job("2")


def test_a_missing_command_says_which_and_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnavailableError, match=r"no/scontrol: cannot be started: .*Set slurm.bin_dir"):
        CommandClient(Commands(bin_dir=str(tmp_path / "no"))).job("2")


def test_a_command_that_cannot_be_started_for_a_moment_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(SlurmUnavailableError, match=r"slurmd: cannot be started: Resource temp") as raised:
        Commands().run("slurmd", "-G")
    assert not isinstance(raised.value, MissingCommandError)


def test_the_environment_is_our_own(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "all")
    made = Commands(bin_dir=str(script.folder), conf="/etc/other.conf", timeout=20.0)
    script.write("sinfo", "env")
    said = made.output("sinfo").splitlines()
    assert {"TZ=UTC0", "LC_ALL=C", "SLURM_CONF=/etc/other.conf"} <= set(said)
    assert not any(line.startswith("SLURM_CLUSTERS") for line in said)


SLURMD = """
folder=${SLURM_CONF%/*}
case $(cat "$folder/cgroup.conf") in
  *PLUGIN) cat "$SLURM_CONF" "$folder/gres.conf" "$folder/more/nodes.conf" >&2 ;;
  *) echo "Couldn't find the specified plugin name" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(("plugin", "runs"), [("disabled", 1), ("cgroup/v1", 2), ("cgroup/v2", 3)])
def test_slurmd_lists_gpus_by_the_site_s_files_without_its_control_groups(
    script: Script, tmp_path: Path, plugin: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """22.05 does not know `disabled`; the last is the site's own."""
    etc, places = tmp_path / "etc", tmp_path / "places"
    (etc / "more").mkdir(parents=True)
    places.mkdir()
    monkeypatch.setattr("tempfile.tempdir", f"{places}")
    (etc / "our.conf").write_text("slurmd: Gres Name=gpu Type=a Count=1 File=/dev/nvidia4\n")
    (etc / "gres.conf").write_text("slurmd: Gres Name=gpu Type=b Count=1 File=/dev/nvidia0\n")
    (etc / "more/nodes.conf").write_text("slurmd: Gres Name=gpu Type=c Count=1 File=/dev/nvidia2\n")
    (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v2\n")
    script.write("slurmd", SLURMD.replace("PLUGIN", plugin))
    said = list_gpus(Commands(bin_dir=str(script.folder), conf=f"{etc / 'our.conf'}", timeout=20.0), "n1")
    assert [slot.minor for slot in parse_slots(said)["gpu"]] == [4, 0, 2]
    assert script.asked == ["slurmd -N n1 -G"] * runs
    assert list(places.iterdir()) == [], "its own files are gone"


def test_without_a_place_for_a_copy_slurmd_has_the_site_s_configuration(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path / 'none'}")
    script.write("slurmd", 'echo "Gres Name=gpu $SLURM_CONF" >&2')
    conf = f"{tmp_path / 'slurm.conf'}"
    for given, said in ((conf, conf), ("", "")):
        commands = Commands(bin_dir=str(script.folder), conf=given, timeout=20.0)
        assert list_gpus(commands, "n1") == f"Gres Name=gpu {said}\n"
    assert script.asked == ["slurmd -N n1 -G"] * 2


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("slurmd -DZ --conf", "-Z --conf Gres=gpu:2"),
        ("slurmd -Z -N n1 --conf=", "-Z --conf Gres=gpu:2"),
        ("slurmd -D -N n2 -Z --conf", ""),
        ("slurmd -D --conf", ""),
        ("bash -Z --conf", ""),
    ],
)
def test_a_dynamic_node_is_listed_with_the_options_of_its_slurmd(
    script: Script, tmp_path: Path, words: str, options: str
) -> None:
    """slurm.conf does not have it."""
    proc = Proc(tmp_path / "proc")
    proc.add(70, parent=1, comm=words.split(maxsplit=1)[0])
    sep = "" if words.endswith("=") else "\0"
    (proc.root / "70/cmdline").write_text("\0".join(words.split()) + f"{sep}Gres=gpu:2\0")
    script.write("slurmd", 'case "$*" in *-Z*) echo "Gres Name=gpu" >&2;; *) exit 1;; esac')
    said = list_gpus(Commands(bin_dir=str(script.folder), timeout=20.0), "n1", proc=proc.root)
    assert ("Gres" in said) == bool(options)
    assert script.asked == ["slurmd -N n1 -G", *([f"slurmd -N n1 {options} -G"] if options else [])]


def test_a_users_slurmd_says_nothing_of_this_nodes_gpus(script: Script, tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    proc.add(70, parent=1, comm="slurmd")
    (proc.root / "70/status").write_text("Name:\tslurmd\nUid:\t4321\t4321\t4321\t4321\n")
    (proc.root / "70/cmdline").write_text("slurmd\0-Z\0--conf\0Gres=gpu:2\0")
    script.write("slurmd", "exit 1")
    assert list_gpus(Commands(bin_dir=str(script.folder), timeout=20.0), "n1", proc=proc.root) == ""
    assert script.asked == ["slurmd -N n1 -G"]


def test_slurmd_may_take_longer_than_a_question_to_the_controller(script: Script) -> None:
    """AutoDetect=nvml initializes the driver at boot."""
    script.write("slurmd", "sleep 0.5; echo Gres Name=gpu >&2")
    assert "Gres" in list_gpus(Commands(bin_dir=str(script.folder), timeout=0.1), "n1")


def test_slurmd_of_an_installation_from_source_is_in_sbin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("slurm/bin", "slurm/sbin", "else"):
        (tmp_path / folder).mkdir(parents=True)
    commands = Commands(bin_dir=f"{tmp_path}/slurm/bin/", timeout=20.0)
    monkeypatch.setenv("PATH", f"{tmp_path / 'else'}:{os.environ['PATH']}")
    on_path = Commands(bin_dir=f"{tmp_path}/slurm/bin/", timeout=20.0)
    for folder in ("slurm/bin", "slurm/sbin", "else"):
        Script(tmp_path / folder, "").write("slurmd", f"echo Gres Name={folder} >&2")
    assert list_gpus(on_path, "n1") == "Gres Name=slurm/bin\n"
    (tmp_path / "slurm/bin/slurmd").unlink()
    assert list_gpus(commands, "n1") == "Gres Name=slurm/sbin\n"
    (tmp_path / "slurm/sbin/slurmd").unlink()
    assert list_gpus(on_path, "n1") == "Gres Name=else\n"
    for folder in ("slurm/bin", "slurm/sbin"):
        (tmp_path / folder / "scontrol").unlink()
    with pytest.raises(SlurmUnavailableError, match=r"slurm/bin/scontrol: cannot be started"):
        on_path.output("scontrol")


def test_the_node_is_asked_for_with_sinfo(script: Script, commands: CommandClient) -> None:
    script.write("sinfo", cat("slurm-22.05/sinfo.draining.txt"))
    assert commands.node("node1").condition == "draining"
    # Without -a a node of hidden partitions is not listed, without --local another cluster of a federation may answer.
    assert script.asked == ["sinfo -a --local -h -N -n node1 -O NodeList:|,StateLong:|"]
    with pytest.raises(ValueError, match=r"does not know node n9: set slurm.node_name"):
        commands.node("n9")


# slurmrestd.


class Handler(BaseHTTPRequestHandler):
    """Answers with recorded responses of slurmrestd."""

    pages: ClassVar[dict[str, tuple[int, str]]] = {
        "/slurm/v0.0.38/job/27": (200, "slurm-22.05/restd.job.json"),
        "/slurm/v0.0.38/job/424242": (500, "slurm-22.05/restd.unknown.json"),
        "/slurm/v0.0.38/node/node1": (200, "slurm-22.05/restd.node.json"),
        "/slurm/v0.0.38/node/n9": (500, "slurm-22.05/restd.no_node.json"),
        "/slurm/v0.0.38/node/n8": (200, '{"errors": [], "nodes": []}'),
        "/slurm/v0.0.38/node/n7": (
            500,
            '{"errors": [{"description": "Failure to query node n7", "error_number": -1}]}',
        ),
    }
    asked: ClassVar[list[str]] = []
    tokens: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.tokens.append(self.headers.get("X-SLURM-USER-TOKEN"))
        status, page = self.pages.get(self.path, (404, ""))
        body = recorded(page).encode() if page.endswith(".json") else page.encode()
        body = body or b"Unable find requested URL."
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the base class has it
        """Say nothing."""


class UnixServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[object, tuple[str, int]]:  # type: ignore[override]  # a unix client has no address
        request, _ = super().get_request()
        return request, ("local", 0)


@pytest.fixture(params=["http", "unix"])
def restd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    Handler.asked.clear()
    Handler.tokens.clear()
    path = tmp_path / "r.sock"
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler) if request.param == "http" else None
    server = http or UnixServer(str(path), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}" if http else f"unix:{path}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_slurmrestd_is_asked_in_its_own_version_found_once(restd: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    asker = RestClient(restd, token_file=str(tmp_path / "token"), timeout=20.0)
    said = asker.job("27")
    assert (said.user, said.given is not None, asker.detail("27")) == ("alice", True, None)
    probed = len(Handler.asked)
    assert asker.node("node1").condition == ""
    with pytest.raises(UnknownJobError):
        asker.job("424242")
    with pytest.raises(ValueError, match=r"set slurm\.node_name"):
        asker.node("n9")
    with pytest.raises(ValueError, match=r"does not know node n8: set slurm\.node_name"):
        asker.node("n8")
    with pytest.raises(SlurmUnavailableError, match=r"query node n7.*If there is no such node, set slurm\.node_name"):
        asker.node("n7")
    assert (probed, len(Handler.asked)) == (8, 13)
    assert set(Handler.tokens) == {"secret"}
    asker.close()
    with pytest.raises(SlurmUnavailableError):
        asker.job("27")


def test_slurmrestd_is_upgraded_to_one_without_the_version_that_was_found(
    restd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 26.05 answers about a node that it does not know is a success without nodes."""
    asker = RestClient(restd, timeout=20.0)
    assert asker.job("27").user == "alice"
    base, folder = "/slurm/v0.0.45", "slurm-26.05"
    pages = {
        f"{base}/job/1": (200, f"{folder}/restd.job.json"),
        f"{base}/job/424242": (404, f"{folder}/restd.unknown.json"),
        f"{base}/node/node1": (200, f"{folder}/restd.node.json"),
        f"{base}/node/n9": (200, f"{folder}/restd.no_node.json"),
    }
    monkeypatch.setattr(Handler, "pages", pages)
    job = asker.job("1")
    assert (job.user, job.given) == ("games", {"node1": (Gres("gpu", "h100", 3, (0, 1, 2)),)})
    asked = len(Handler.asked)
    assert asker.node("node1").state == "allocated"
    with pytest.raises(UnknownJobError):
        asker.job("424242")
    with pytest.raises(ValueError, match=r"does not know node n9: set slurm\.node_name"):
        asker.node("n9")
    assert Handler.asked[asked:] == [f"{base}/{path}" for path in ("node/node1", "job/424242", "node/n9")]
    asker.close()


def test_what_is_no_slurmrestd_is_silence(restd: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff")
    for url, token, why in (
        (restd, "", r"supports none of v0.0.38 to v0.0.45"),
        (restd, f"{tmp_path}/none", r"restd_token_file: .*/none: cannot be read"),
        (restd, f"{tmp_path}/token", r"restd_token_file: .*/token: cannot be read"),
        ("http://127.0.0.1:1", "", "is slurmrestd up"),
    ):
        asker = RestClient(url, token_file=token, timeout=20.0)
        with pytest.raises(SlurmUnavailableError, match=why):
            asker.job("1")
        asker.close()
    with pytest.raises(ValueError, match="neither http"):
        RestClient("slurm:6820")


# The thread.


def until(holds: Callable[[], bool]) -> None:
    wait_for(holds, "it holds", step=0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def controller(answers: Answers) -> Iterator[ControllerQueries]:
    made = ControllerQueries(answers, Here(), node=NODE, clock=time.monotonic_ns)
    yield made
    made.close()
    assert answers.closed


def collected(controller: ControllerQueries, *, until_holds: Callable[[Updates], bool]) -> None:
    until(lambda: until_holds(controller.take_updates()))


def test_the_thread_answers_and_settle_waits_for_it(controller: ControllerQueries, answers: Answers) -> None:
    answers.jobs["7"] = job("7", 0)
    controller.request_gpu_map()
    controller.query("7", 1)
    controller.query("8", 2)
    controller.request_node_state()
    controller.wait_settled(20.0)
    news = controller.take_updates()
    assert {(a.job_id, a.run) for a in news.answers if a.job or a.gone} == {("7", 1), ("8", 2)}
    assert sum(a.tasks is not None for a in news.answers) == 2
    assert news.gpu_map is not None
    if news.node is None:
        collected(controller, until_holds=lambda n: n.node is not None)
    assert controller.take_updates() == Updates()


def test_an_answer_that_cannot_be_read_delays_no_other_job(
    controller: ControllerQueries, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers.jobs["8"] = job("8", 0)
    known = answers.job

    def odd(job_id: str) -> SlurmJob:
        if job_id == "7":
            raise KeyError("tres")
        return known(job_id)

    monkeypatch.setattr(answers, "job", odd)
    controller.query("7", 1)
    controller.query("8", 2)
    controller.wait_settled(20.0)
    found = {answer.job_id: answer for answer in controller.take_updates().answers if answer.refused or answer.job}
    assert found["7"].refused == "KeyError('tres')"
    assert found["8"].job is not None
    assert "about job 7 cannot be read; please report this" in caplog.text


def test_an_inspection_that_fails_is_a_fault_and_queries_go_on(answers: Answers) -> None:
    class Odd(Here):
        def gpu_map(self) -> GpuMap:
            raise RuntimeError("odd")

    odd = ControllerQueries(answers, Odd(), node=NODE, clock=time.monotonic_ns)
    answers.jobs["7"] = job("7", 0)
    odd.request_gpu_map()
    odd.query("7", 1)
    found: list[Updates] = []

    def both() -> bool:
        found.append(odd.take_updates())
        return any(each.faults for each in found) and any(a.job for each in found for a in each.answers)

    until(both)
    assert {fault.kind for each in found for fault in each.faults} == {"scheduler_failed"}
    odd.close()


def test_the_first_list_of_gpus_comes_before_queries_and_each_other_after_them(answers: Answers) -> None:
    done: list[str] = answers.asked

    class Noted(Here):
        def gpu_map(self) -> GpuMap:
            done.append("list")
            return super().gpu_map()

        def inspect_jobs(self, jobs: Iterable[str]) -> dict[str, JobTasks]:
            done.extend(f"inspect {each}" for each in jobs)
            return super().inspect_jobs(jobs)

    queries = ControllerQueries(answers, Noted(), node=NODE, clock=lambda: BEGIN, threaded=False)
    for number in ("7", "8"):
        queries.request_gpu_map()
        queries.query(number, 1)
        queries.request_node_state()
        while queries.step():
            pass
    assert done == ["list", "inspect 7", "7", f"node {NODE}", "inspect 8", "8", f"node {NODE}", "list"]


def test_a_query_that_waits_for_a_minute_is_unanswered_though_it_never_failed(answers: Answers) -> None:
    """As behind a look at slurm.conf on a network file system whose server is gone."""
    now = BEGIN
    queries = ControllerQueries(answers, Here(), node=NODE, clock=lambda: now, threaded=False)
    queries.query("7", 1)
    now += 59 * SECOND
    assert queries.unanswered_since is None
    now += SECOND
    assert queries.unanswered_since == BEGIN
    while queries.step():
        pass
    assert queries.unanswered_since is None


def test_settle_waits_for_what_is_being_done(answers: Answers) -> None:
    begun = threading.Event()

    class Slow(Here):
        def gpu_map(self) -> GpuMap:
            begun.set()
            time.sleep(0.1)
            return super().gpu_map()

    slow = ControllerQueries(answers, Slow(), node=NODE, clock=time.monotonic_ns)
    slow.request_gpu_map()
    assert begun.wait(20)
    slow.wait_settled(20.0)
    assert slow.take_updates().gpu_map is not None
    slow.close()


def test_settle_is_bounded_and_does_not_wait_for_the_silent(answers: Answers) -> None:
    release = threading.Event()

    class Slow(Answers):
        def job(self, job_id: str) -> SlurmJob:
            release.wait(20)
            return super().job(job_id)

    slow = ControllerQueries(Slow(), Here(), node=NODE, clock=time.monotonic_ns)
    slow.query("7", 1)
    slow.wait_settled(0.05)
    assert not [a for a in slow.take_updates().answers if a.gone]
    release.set()
    collected(slow, until_holds=lambda n: any(a.gone for a in n.answers))
    slow.close()
    answers.silent = "down"
    quiet = ControllerQueries(answers, Here(), node=NODE, clock=time.monotonic_ns)
    quiet.query("7", 1)
    quiet.wait_settled(20.0)
    assert [fault.kind for fault in quiet.take_updates().faults] == ["controller_silent"]
    quiet.close()


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (1.0, [0, 5, 15, 35, 75, *range(135, 2000, 60)]),
        (0.0, [0, 3, 8, 18, 38, *range(68, 2000, 30)]),
    ],
)
def test_pauses_double_and_end_with_an_answer(answers: Answers, phase: float, expected: list[int]) -> None:
    """Half of each pause is random: many nodes whose queries failed together do not repeat them together."""
    now = [0]
    made = ControllerQueries(answers, Here(), node=NODE, clock=lambda: now[0], phase=lambda: phase, threaded=False)
    answers.silent = "down"
    made.query("7", 1)
    tries = []
    for second in range(2000):
        now[0] = second * SECOND
        before = len(answers.asked)
        while made.step():
            pass
        tries += [second] * (len(answers.asked) - before)
    assert tries == expected
    assert made.unanswered_since == 0
    answers.silent = ""
    now[0] = 2200 * SECOND
    while made.step():
        pass
    assert made.unanswered_since is None
    assert any(a.gone for a in made.take_updates().answers)


def test_questions_about_jobs_that_are_gone_are_dropped(answers: Answers) -> None:
    made = ControllerQueries(answers, Here(), node=NODE, clock=lambda: 0, threaded=False)
    for number in range(100):
        made.query(str(number), number)
    made.drop_others(["7"])
    while made.step():
        pass
    assert answers.asked == ["7"]
