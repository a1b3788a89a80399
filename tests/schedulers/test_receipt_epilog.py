"""The Slurm epilog that writes job reports, in a real shell: its files, their owners, and that it never fails.

Slurm's own commands are stand-ins here, which record their arguments; a real slurmd and slurmdbd are in
tests/e2e/test_slurm_receipts.py. Files are written by the real setpriv, and so by root alone.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import wait_for

SCRIPT = Path(__file__).parents[2] / "exporter/data/slurm-receipt.sh"
SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]
LINE, SHORT = "job 4711: 40.0 % useful of 1.20 GPU-hours on 8 GPUs in 9 min; most lost to hung, 9.0 %", "first\nsecond"
PROGRAMS = {
    "gpu-efficiency": f"""
case " $* " in
    *" --line "*) printf '%s\\n' "${{LINE-{LINE}}}" ;;
    *) printf '%s\\n' "${{SHORT-{SHORT}}}" ;;
esac
exit "${{MISSING:-0}}" """,
    "sacct": """
case " $* " in
    *" --format=JobIDRaw,JobID "*) printf '%s\\n' "$RECORDS" | cut -d '|' -f 1,2 ;;
    *) printf '%s\\n' "${COMMENT-$(printf '%s\\n' "$RECORDS" | sed -n "s/^[0-9]*|$5|//p")}" ;;
esac""",
    "sacctmgr": 'echo "${DENIED:-}"; [ -z "${DENIED:-}" ]',
    "scontrol": "printf 'n1\\nn2\\n'",
    "logger": "",
}
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
OTHER, OTHERS = 5, 60
"""A user and group that every Debian has: games."""


def program(root: Path, name: str, body: str = "") -> None:
    """Make a program that records its arguments."""
    note = f"{{ printf '%s' {name}; for word; do printf ' [%s]' \"$word\"; done; echo; }} >>'{root}/told'\n"
    (root / "bin" / name).write_text(f"#!/bin/sh\n{note}{body}\n")
    (root / "bin" / name).chmod(0o755)


class Node:
    """A node with these programs, a job's folder, and the programs' recorded arguments."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.shell = root, root / "work", "sh"
        self.folder.mkdir()
        (root / "bin").mkdir()
        for name, body in PROGRAMS.items():
            program(root, name, body)
        self.settings = {"places": "admin_comment"}
        self.environ = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_UID": f"{OTHER}",
            "SLURM_JOB_GID": f"{OTHERS}",
            "SLURM_JOB_WORK_DIR": f"{self.folder}",
            "SLURMD_NODENAME": "n1",
            "RECORDS": "4711|4711|",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        shell = shutil.which(self.shell)
        assert shell
        fixed = {"command": f"{self.root}/bin/gpu-efficiency", "config": "", "PATH": f"{self.root}/bin:$PATH"}
        lines = [f'{name}="{value}"' for name, value in (fixed | self.settings).items()]
        (self.root / "conf").write_text("\n".join(lines))
        where = {
            "RECEIPT_CGROUP": f"{self.root}/cgroup",
            "RECEIPT_CONF": f"{self.root}/conf",
            "RECEIPT_LOCKS": f"{self.root}/locks",
        }
        return subprocess.Popen(
            [shell, f"{SCRIPT}", *words],
            env=where | self.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *words: str) -> str:
        """Run it and return its errors. It must always succeed: a failure drains the node."""
        child = self.start(*words)
        said, complaints = child.communicate()
        assert (child.returncode, said) == (0, "")
        return complaints

    def write(self) -> str:
        """Run in the foreground what the epilog starts in a session of its own."""
        return self.run("detached")

    def told(self, program: str) -> list[str]:
        """Its recorded arguments, each time."""
        file = self.root / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == program]

    def comment(self) -> str:
        """The text that was written."""
        (told,) = self.told("sacctmgr")
        found = re.fullmatch(r"\[-i\] \[modify\] \[job\] \[where\] \[jobid=\S+\] \[set\] \[AdminComment=(.*)\]", told)
        assert found, told
        return found[1]

    @property
    def file(self) -> Path:
        return self.folder / "slurm-4711.gpu-efficiency.txt"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def placed(node: Node) -> Node:
    """Write into another user's folder, below folders that the user may enter."""
    node.settings["places"] = "file"
    for path in (node.root, *node.root.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o711)
    os.chown(node.folder, OTHER, OTHERS)
    return node


@pytest.mark.parametrize("shell", ["sh", *SHELLS])
def test_the_record_gets_one_line(node: Node, shell: str) -> None:
    node.shell = shell
    assert node.write() == ""
    assert node.told("gpu-efficiency") == ["[report] [4711] [--line] [--wait] [15]"]
    assert node.comment() == f"gpu-efficiency: {LINE}"
    assert not node.told("scontrol"), "the controller has no part in it"


def test_the_configuration_and_further_flags_are_handed_on(node: Node) -> None:
    config = node.root / "config.toml"
    config.touch()
    node.settings |= {"config": f"{config}", "flags": "--prometheus http://p:9090", "wait": "0"}
    node.write()
    wanted = f"[report] [4711] [--prometheus] [http://p:9090] [--config] [{config}] [--line]"
    assert node.told("gpu-efficiency") == [wanted]


def test_two_scrapes_are_waited_for_before_a_prometheus_is_asked(node: Node) -> None:
    """Outside the lock: many jobs may wait at once."""
    sleep = node.root / "bin/sleep"
    sleep.write_text(f"#!/bin/sh\necho \"sleep [$1] $(ls '{node.root}')\" >>'{node.root}/told'\n")
    sleep.chmod(0o755)
    program(node.root, "timeout", 'while [ "$1" = -k ]; do shift 2; done; shift; exec "$@"')
    node.settings["flags"] = "--prometheus=http://p:9090"
    node.write()
    (told,) = node.told("sleep")
    assert told.startswith("[150]")
    assert "locks" not in told
    assert node.comment() == f"gpu-efficiency: {LINE}"
    assert node.told("timeout")[0].startswith("[-k] [5] [60] "), "the wait is over when the report begins"


def test_what_the_report_says_beside_its_line_is_not_in_the_comment(node: Node) -> None:
    program(node.root, "gpu-efficiency", f"echo 'the clock is off' >&2; echo '{LINE}'")
    node.write()
    assert node.comment() == f"gpu-efficiency: {LINE}"


def test_a_job_without_gpus_is_asked_about_once(node: Node) -> None:
    program(node.root, "gpu-efficiency", "echo 'no job 4711 held a GPU' >&2; exit 1")
    assert "job 4711: no receipt: no job 4711 held a GPU" in node.write()
    assert len(node.told("gpu-efficiency")) == 1


def test_a_receipt_that_waits_in_vain_for_others_is_told(node: Node) -> None:
    (node.root / "locks").mkdir()
    node.settings["limit"] = "0"
    with (node.root / "locks" / f"{4711 % 4}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "job 4711: no receipt: those of other jobs have taken longer than 0 s" in node.write()
    assert not node.told("gpu-efficiency")


def test_slurmd_is_not_made_to_wait_and_may_kill_the_epilogs_group(node: Node) -> None:
    """Right after the epilog has ended, which is before the report begins."""
    node.environ["LINE"] = "late"
    stop = node.root / "stop"
    slow = node.root / "bin/gpu-efficiency"
    slow.write_text(slow.read_text().replace("case", f"until [ -e '{stop}' ]; do sleep 0.05; done\ncase", 1))
    child = node.start()
    said, complaints = child.communicate()
    with suppress(ProcessLookupError):  # no process is left, as wanted
        os.killpg(child.pid, signal.SIGKILL)
    stop.touch()
    assert (child.returncode, said, complaints) == (0, "", "")
    wait_for(lambda: node.told("sacctmgr"), "it is written all the same")
    assert node.comment() == "gpu-efficiency: late"


def test_an_array_task_is_named_so_that_no_other_is_changed(node: Node) -> None:
    """The last task of an array has the array's own number, which sacctmgr would take for all tasks."""
    node.environ["RECORDS"] = "4712|4711_1|not mine\n4711|4711_3|\n4713|4711_2|not mine"
    node.write()
    assert "[jobid=4711_3]" in node.told("sacctmgr")[0]


OURS = f"gpu-efficiency: {LINE}"


@pytest.mark.parametrize(
    ("there", "append", "then"),
    [
        ("", "no", OURS),
        ("(null)", "no", OURS),
        ("gpu-efficiency: of an earlier run", "no", OURS),
        ("JS1:abc", "no", None),
        ("JS1:abc", "yes", f"JS1:abc | {OURS}"),
        ("mine | gpu-efficiency: of an earlier run", "no", f"mine | {OURS}"),
        ("a|b", "yes", f"a|b | {OURS}"),
    ],
)
def test_somebody_elses_comment_is_left_alone(node: Node, there: str, append: str, then: str | None) -> None:
    node.environ["RECORDS"] = f"4711|4711|{there}"
    node.settings["append"] = append
    complaints = node.write()
    if then is None:
        assert not node.told("sacctmgr")
        assert "AdminComment is somebody else's and is left alone" in complaints
    else:
        assert (node.comment(), complaints) == (then, "")


def test_a_comment_with_lines_in_it_reaches_no_other_job(node: Node) -> None:
    """`sbatch --comment` takes line feeds, so a user can write what looks like the record of another job."""
    node.settings |= {"places": "comment", "append": "yes"}
    node.environ["COMMENT"] = "mine\n4711|1002|theirs"
    assert node.write() == ""
    (told,) = node.told("sacctmgr")
    assert "[jobid=4711] [set] [Comment=mine 4711|1002|theirs | gpu-efficiency: " in told


def test_the_users_own_comment_is_another_field(node: Node) -> None:
    node.settings["places"] = "comment"
    node.write()
    assert "[--format=Comment]" in node.told("sacct")[1]
    assert f"[Comment={OURS}]" in node.told("sacctmgr")[0]


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("a\tb\x1b[31m\x7fc", "a b [31m c"),
        ("x" * 3000, "x" * 984),
        ("é" * 3000, "é" * 492),
        ("a; $(touch /x) `id` 'b' \"c\" =,|", "a; $(touch /x) `id` 'b' \"c\" =,|"),
    ],
    ids=["control characters", "long", "half a character", "shell"],
)
def test_a_comment_is_one_short_line_of_whole_characters(node: Node, line: str, written: str) -> None:
    node.environ |= {"LINE": line, "LC_ALL": "C.UTF-8"}
    node.write()
    assert node.comment() == f"gpu-efficiency: {written}"


def test_of_several_nodes_the_first_writes_and_says_whose_part_it_is(node: Node) -> None:
    node.environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "n[1-2]"}
    node.write()
    assert node.comment() == f"{OURS} (part of node n1, one of 2)"
    assert node.told("scontrol") == ["[show] [hostnames] [n[1-2]]"]
    node.environ["SLURMD_NODENAME"] = "n2"
    (node.root / "told").unlink()
    node.write()
    assert node.told("scontrol")
    assert not node.told("gpu-efficiency")


def test_who_asks_a_prometheus_has_all_nodes(node: Node) -> None:
    node.environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "n[1-2]"}
    node.settings |= {"flags": "--prometheus http://p:9090", "wait": "0"}
    node.write()
    assert node.comment() == OURS


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"MISSING": "1"}, "no receipt: job 4711: 40.0 % useful"),
        ({"RECORDS": "sacct: error: Sending PersistInit msg: refused"}, "no record to write into: sacct: error"),
        ({"RECORDS": "47110|47110|"}, "no record to write into"),
        ({"DENIED": "no privilege"}, "sacctmgr: no privilege"),
        ({"SLURM_JOB_ID": "../4711"}, r"SLURM_JOB_ID is no number: '\.\./4711'"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is no number"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line_and_drains_no_node(
    node: Node, environ: dict[str, str], complaint: str
) -> None:
    node.environ |= environ
    complaints = node.write()
    assert re.search(complaint, complaints)
    assert complaints.count("\n") == 1
    assert node.told("logger")


@pytest.mark.parametrize("shell", ["sh", *SHELLS])
@pytest.mark.parametrize("line", ["if then", "exit 3", "no-such-command"])
def test_settings_that_are_broken_drain_no_node(node: Node, shell: str, line: str) -> None:
    node.shell, node.settings["places"] = shell, f'none"\n{line}\nwait="1'
    node.run()
    assert not node.told("gpu-efficiency")


def test_without_the_program_nothing_is_written(node: Node) -> None:
    (node.root / "bin/gpu-efficiency").unlink()
    assert "no receipt" in node.write()
    assert not node.told("sacct")


def test_none_is_nowhere_and_a_slip_is_told(node: Node) -> None:
    node.settings["places"] = "none"
    node.run()
    assert not (node.root / "told").exists()
    node.settings["places"] = "admincomment"
    assert "there is no admincomment; it is of admin_comment, comment, file and none" in node.write()
    assert not node.told("sacctmgr")


# -- the file --


@ROOT
def test_the_file_is_the_users_own(placed: Node) -> None:
    assert placed.write() == ""
    assert placed.file.read_text() == f"{SHORT}\n"
    about = placed.file.stat()
    assert (about.st_uid, about.st_gid, about.st_mode & 0o777) == (OTHER, OTHERS, 0o600)
    assert [path.name for path in placed.folder.iterdir()] == [placed.file.name]
    assert not placed.told("sacct")


@ROOT
def test_a_later_run_of_the_job_replaces_it(placed: Node) -> None:
    placed.write()
    placed.file.write_text("of an earlier run, and longer than the one that follows it\n" * 9)
    placed.write()
    assert placed.file.read_text() == f"{SHORT}\n"


@ROOT
def test_the_part_of_one_node_says_how_to_have_the_whole(placed: Node) -> None:
    placed.environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "n[1-2]"}
    placed.write()
    last = "This is the part of node n1, one of 2; each of the others shows its own: gpu-efficiency report 4711"
    assert placed.file.read_text() == f"{SHORT}\n{last}\n"


@ROOT
def test_a_command_that_works_on_a_login_node_is_of_the_whole(placed: Node) -> None:
    short = "first\n  all of it, on a login node: gpu-efficiency report 4711"
    placed.environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "n[1-2]", "SHORT": short}
    placed.write()
    assert placed.file.read_text() == f"{short}\nThis is the part of node n1, one of 2.\n"


@ROOT
def test_a_planted_link_is_replaced_and_not_followed(placed: Node) -> None:
    precious = placed.root / "precious"
    precious.write_text("of somebody")
    os.chown(precious, OTHER, OTHERS)  # even if the job's user could write it
    placed.file.symlink_to(precious)
    placed.write()
    assert precious.read_text() == "of somebody"
    assert not placed.file.is_symlink()
    assert placed.file.read_text() == f"{SHORT}\n"


@ROOT
@pytest.mark.parametrize("what", ["folder", "fifo", "link to a folder"])
def test_whatever_else_is_in_its_place_keeps_nobody_waiting(placed: Node, what: str) -> None:
    inside = placed.root / "inside"
    inside.mkdir()
    if what == "folder":
        placed.file.mkdir()
    elif what == "fifo":
        os.mkfifo(placed.file)
    else:
        placed.file.symlink_to(inside)
    complaints = placed.write()
    assert ("no file in" in complaints) == (what == "folder")
    assert placed.file.is_file() == (what != "folder")
    assert not list(inside.iterdir())
    assert len(list(placed.folder.iterdir())) == 1, "no half of a file is left"


@ROOT
def test_a_folder_that_only_root_may_write_is_left_alone(placed: Node) -> None:
    os.chown(placed.folder, 0, 0)
    placed.folder.chmod(0o755)
    assert re.search(r"no file in .*/work: .*Permission denied", placed.write())
    assert not list(placed.folder.iterdir())


@ROOT
def test_a_folder_that_has_gone_or_cannot_be_is_told(placed: Node) -> None:
    placed.folder.rmdir()
    placed.environ["SLURM_JOB_WORK_DIR"] += "\nan entry of the log's"
    assert re.fullmatch(r".*no file in .*work an entry of.*\n", placed.write()), "one line, whatever it is called"
    placed.environ["SLURM_JOB_WORK_DIR"] = f"{placed.folder}"
    placed.folder.symlink_to("/etc")
    assert "Permission denied" in placed.write()
    assert not Path("/etc/slurm-4711.gpu-efficiency.txt").exists()


@ROOT
def test_a_disk_that_is_full_leaves_no_half(placed: Node) -> None:
    """In a mount namespace where the folder is a file system of one page."""
    mount = (
        f'mount -t tmpfs -o size=4k,uid={OTHER},mode=700 none "$1" && head -c 4096 /dev/zero >"$1/full"; shift; "$@"'
    )
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", f"{placed.folder}"]
    look = f'sh {SCRIPT} detached; ls -A "{placed.folder}"'
    child = placed.start("none-of-its-business")  # writes the settings
    child.communicate()
    where = {
        "RECEIPT_CONF": f"{placed.root}/conf",
        "RECEIPT_LOCKS": f"{placed.root}/locks",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        [*words, "sh", "-c", look], env=where | placed.environ, capture_output=True, text=True, check=True, timeout=30
    )
    assert "No space left on device" in done.stderr
    assert done.stdout == "full\n"


@ROOT
def test_roots_job_has_no_file(placed: Node) -> None:
    placed.environ["SLURM_JOB_UID"] = "0"
    assert "it is root's" in placed.write()
    assert not list(placed.folder.iterdir())


@ROOT
@pytest.mark.parametrize("name", ["SLURM_JOB_UID", "SLURM_JOB_GID", "SLURM_JOB_WORK_DIR"])
def test_an_older_slurm_that_does_not_say_whose_it_is(placed: Node, name: str) -> None:
    del placed.environ[name]
    assert "neither whose it is nor its folder" in placed.write()
    assert not list(placed.folder.iterdir())


@ROOT
def test_a_user_that_this_node_does_not_know_by_name_has_one(placed: Node) -> None:
    os.chown(placed.folder, 54321, 54321)
    placed.environ |= {"SLURM_JOB_UID": "54321", "SLURM_JOB_GID": "54321"}
    assert placed.write() == ""
    assert placed.file.stat().st_uid == 54321


JOBS_GROUPS = {
    "0::/system.slice/slurmstepd.scope/job_4711/step_extern/slurm": True,
    "0::/gpu.slice/n1_slurmstepd.scope/sBB1M8KV2K4M00/step_extern/slurm": True,
    "6:freezer:/slurm_n1/uid_5/job_4711\n1:name=systemd:/": True,
    "0::/system.slice/slurmd.service": False,
    "0::/system.slice/n1_slurmstepd.scope/slurmd": False,
    "0::/user.slice/user-0.slice/session-1.scope": False,
}


@pytest.mark.parametrize("shell", SHELLS)
def test_in_its_jobs_control_group_it_goes_on_as_a_service(tmp_path: Path, shell: str) -> None:
    """PrologFlags=RunInJob: what stays in that group is killed with the job (run: 24.11)."""
    for number, (group, inside) in enumerate(JOBS_GROUPS.items()):
        (root := tmp_path / f"{number}").mkdir()
        node = Node(root)
        node.shell = shell
        (root / "cgroup").write_text(f"{group}\n")
        program(root, "systemd-run")
        node.environ["SLURM_JOB_WORK_DIR"] = "/of a user/$(x)"
        assert node.run() == ""
        if inside:
            (told,) = node.told("systemd-run")
            assert told.startswith("[--quiet] [--collect] [--no-block] [--setenv=SLURM_JOB_ID=4711] "), group
            assert "[--setenv=SLURM_JOB_WORK_DIR=/of a user/$(x)]" in told
            assert told.endswith(f"[/bin/sh] [{SCRIPT}] [detached]")
            assert not node.told("gpu-efficiency")
        else:
            assert not node.told("systemd-run"), group
            wait_for(lambda node=node: node.told("sacctmgr"), "it goes on by itself")  # type: ignore[misc]


def test_without_systemd_it_goes_on_in_its_jobs_group(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "cgroup").write_text(next(iter(JOBS_GROUPS)))
    program(tmp_path, "systemd-run", "exit 1")
    assert node.run() == ""
    wait_for(lambda: node.told("sacctmgr"), "it goes on by itself")
    assert len(node.told("systemd-run")) == 1
