"""Tests the check of other users' processes with a fake /proc, and the choice of the scheduler."""

from pathlib import Path
from typing import Any

import pytest

from exporter.checkup.base import FAIL, INFO, OK, WARN, CheckContext, Finding
from exporter.checkup.schedulers import (
    check_kubernetes,
    check_mapping_dir,
    check_processes,
    check_scheduler_choice,
    check_slurm,
)
from exporter.config import Config, HostSettings
from exporter.registry import KubernetesSettings, MappingDirSettings, SlurmSettings

PTRACE = 1 << 19
MOUNTS = "1 2 0:1 / / rw - ext4 /dev/root rw\n3 4 0:5 / {} rw,nosuid{} - proc proc rw{}\n"


def node(
    proc: Path, capabilities: int = 0, *, host: Path | None = None, mounts: str = "", **config: Any
) -> CheckContext:
    (proc / "self/ns").mkdir(parents=True, exist_ok=True)
    (proc / "self/status").write_text(f"Uid:\t1\t1\t1\t1\nCapEff:\t{capabilities:016x}\n")
    (proc / "self/mountinfo").write_text(mounts)
    found = Config(host=HostSettings(proc=f"{host or proc}"), **config)
    return CheckContext(config=found, environ={}, proc=proc, root=proc)


def only(found: Any) -> Finding:
    (finding,) = found
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.parametrize(
    ("option", "hides"),
    [("hidepid=2", True), ("hidepid=invisible", True), ("hidepid=0", False), ("hidepid=off", False)],
)
def test_a_proc_that_hides_processes_is_told_of_but_not_to_who_may_trace(
    tmp_path: Path, option: str, hides: bool
) -> None:
    mounts = MOUNTS.format(tmp_path, "", f",{option}")
    finding = only(check_processes(node(tmp_path, mounts=mounts), ()))
    assert finding.verdict == (WARN if hides else OK)
    assert ("hidepid" in finding.message) == hides
    named = only(check_processes(node(tmp_path, mounts=mounts, scheduler="processes"), ()))
    assert named.verdict is (FAIL if hides else OK)
    assert "hidepid" not in only(check_processes(node(tmp_path, PTRACE, mounts=mounts), ())).message


def test_another_mount_s_option_is_not_ours(tmp_path: Path) -> None:
    mounts = MOUNTS.format("/somewhere/else", "", ",hidepid=2")
    assert "hidepid" not in only(check_processes(node(tmp_path, mounts=mounts), ())).message


def test_a_pid_namespace_of_one_s_own_is_told_of(tmp_path: Path) -> None:
    """The file has another inode than the host's namespace."""
    here = node(tmp_path)
    (tmp_path / "self/ns/pid").touch()
    finding = only(check_processes(here, ()))
    assert (finding.verdict, finding.do) == (INFO, "in a pod set hostPID: true")
    assert only(check_processes(node(tmp_path, scheduler="processes"), ())).verdict is FAIL


def test_the_host_s_proc_mounted_elsewhere_is_the_host_s(tmp_path: Path) -> None:
    (tmp_path / "host/1").mkdir(parents=True)
    (tmp_path / "host/1/environ").touch()
    here = node(tmp_path / "own", host=tmp_path / "host")
    (tmp_path / "own/self/ns/pid").touch()
    assert only(check_processes(here, ())).verdict is OK


def test_absent_schedulers_are_told_and_named_ones_fail(tmp_path: Path) -> None:
    nowhere: dict[str, Any] = {
        "kubernetes": KubernetesSettings(pod_resources_socket=f"{tmp_path / 'x'}", api_url=""),
        "mapping_dir": MappingDirSettings(f"{tmp_path / 'y'}"),
        "slurm": SlurmSettings(spool_dir=f"{tmp_path / 'z'}"),
    }
    for name, look in (("kubernetes", check_kubernetes), ("mapping-dir", check_mapping_dir)):
        assert [one.verdict for one in look(node(tmp_path, **nowhere), ())] == [INFO], name
        assert next(iter(look(node(tmp_path, **nowhere), ()))).do
        first, *_ = look(node(tmp_path, scheduler=name, **nowhere), ())
        assert first.verdict is FAIL
    assert only(check_slurm(node(tmp_path, **nowhere), ())).verdict is WARN, "spool_dir is configured"
    assert only(check_slurm(node(tmp_path, scheduler="slurm", **nowhere), ())).verdict is FAIL
    for look in (check_kubernetes, check_mapping_dir, check_slurm):
        assert list(look(node(tmp_path, scheduler="processes", **nowhere), ())) == []


def test_a_node_without_slurmd_is_warned_of_for_the_daemon_works_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, which has no slurmd and queries slurmrestd."""
    monkeypatch.setenv("PATH", f"{tmp_path}")
    slurm = SlurmSettings(spool_dir=f"{tmp_path}", node_name="n1", restd_url="http://127.0.0.1:1")
    found = check_slurm(node(tmp_path, scheduler="slurm", slurm=slurm), ())
    gpus = only(each for each in found if each.check == "slurm gpus")
    assert gpus.verdict is WARN
    assert (
        gpus.message == "slurmd: cannot be started: No such file or directory: gres index N is taken for /dev/nvidiaN"
    )
    assert gpus.do.startswith("set slurm.bin_dir; where there is no slurmd (a container), look whether gres.conf")


def test_the_first_that_works_is_taken_and_none_is_an_end_where_one_is_named(tmp_path: Path) -> None:
    works = Finding("jobs", "kubernetes", OK, ""), Finding("jobs", "mapping-dir", OK, "")
    broken = (Finding("jobs", "slurm", WARN, ""),)
    assert only(check_scheduler_choice(node(tmp_path), (*broken, *works))).message == "the daemon will use kubernetes"
    assert "will use processes" in only(check_scheduler_choice(node(tmp_path), broken)).message
    assert "will use processes" in only(check_scheduler_choice(node(tmp_path, scheduler="processes"), works)).message
    assert only(check_scheduler_choice(node(tmp_path, scheduler="slurm"), broken)).verdict is FAIL
    assert only(check_scheduler_choice(node(tmp_path, scheduler="kubernetes"), works)).verdict is OK
