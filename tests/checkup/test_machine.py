"""Tests the checks of this process's rights, the machine and the kernel's clock with fake trees."""

import errno
from pathlib import Path
from typing import Any

import pytest

from exporter.checkup.base import INFO, OK, WARN, CheckContext, Finding
from exporter.checkup.machine import Timex, check_clock, check_program, check_user, rights
from exporter.config import Config, HostSettings

STATUS = """\
Name:\tpython
Uid:\t1000\t998\t998\t998
CapEff:\t{:016x}
NoNewPrivs:\t1
Seccomp:\t2
"""
PTRACE, ADMIN, PERFMON = 1 << 19, 1 << 21, 1 << 38


def tree(folder: Path, capabilities: int = 0, **config: Any) -> CheckContext:
    (folder / "self").mkdir(parents=True, exist_ok=True)
    (folder / "self/status").write_text(STATUS.format(capabilities))
    return CheckContext(config=Config(**config), environ={}, proc=folder, etc=folder / "etc", root=folder, host="n1")


def only(found: Any) -> Finding:
    (finding,) = found
    assert isinstance(finding, Finding)
    return finding


def test_rights_are_those_in_effect(tmp_path: Path) -> None:
    tree(tmp_path, PTRACE | PERFMON)
    mine = rights(tmp_path)
    assert (mine.uid, mine.no_new_privileges, mine.seccomp) == (998, True, "2")
    assert mine.has("SYS_PTRACE")
    assert mine.has("SYS_ADMIN", "PERFMON")
    assert not mine.has("SYS_ADMIN")
    assert mine.description == "2 capabilities (SYS_PTRACE, PERFMON)"


def test_no_capability_and_all_of_them_are_said_as_such(tmp_path: Path) -> None:
    tree(tmp_path)
    assert rights(tmp_path).description == "no capability"
    tree(tmp_path, (1 << 41) - 1)
    assert rights(tmp_path).description == "all capabilities"
    tree(tmp_path, 1 << 5)
    assert rights(tmp_path).description == "1 capabilities (none that matters here)"


def test_another_user_than_the_daemon_s_is_told_how_to_be_that_one(tmp_path: Path) -> None:
    here = tree(tmp_path)
    (tmp_path / "etc").mkdir()
    passwd = tmp_path / "etc/passwd"
    passwd.write_text("root:x:0:0::/:/bin/sh\ngpu-efficiency:x:997:997::/:/usr/sbin/nologin\n")
    mine, other = check_user(here, ())
    assert "uid 998, with no capability; a seccomp filter, no new privileges" in mine.message
    assert (other.verdict, other.check) == (INFO, "same user")
    assert "runuser -u gpu-efficiency" in other.do
    passwd.write_text("gpu-efficiency:x:998:998::/:/usr/sbin/nologin\n")
    assert only(check_user(here, ())).verdict is OK


def test_the_machine_is_told_and_whether_it_is_a_container(tmp_path: Path) -> None:
    (tmp_path / "cgroup").mkdir()
    here = tree(tmp_path, host=HostSettings(cgroup=f"{tmp_path / 'cgroup'}"))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('ID=debian\nPRETTY_NAME="Debian 99"\n')
    versions, machine, cgroup = check_program(here, ())
    assert "nvidia-ml-py " in versions.message
    assert machine.message.startswith("n1: Debian 99, Linux ")
    assert machine.message.endswith("not in a known container")
    assert cgroup.verdict is INFO
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "cgroup/cgroup.controllers").touch()
    _, machine, cgroup = check_program(here, ())
    assert machine.message.endswith(", in a container")
    assert cgroup.verdict is OK


@pytest.mark.parametrize(
    ("returned", "status", "verdict"),
    [(0, 0x2001, OK), (5, 0, WARN), (0, 0x40, WARN), (5, 0x2041, WARN), (1, 0x11, OK)],
    ids=["well", "error without the bit", "bit without the error", "both", "a leap second to come"],
)
def test_the_clock_is_right_where_the_kernel_says_so(returned: int, status: int, verdict: str) -> None:
    def asked(timex: Timex) -> int:
        assert timex.modes == 0, "it only asks"
        timex.status, timex.maxerror = status, 250_000
        return returned

    finding = only(check_clock(CheckContext(config=Config()), (), asked))
    assert finding.verdict == verdict
    assert ("wrong by 0.250 s at most" in finding.message) == (verdict is OK)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EFAULT])
def test_a_kernel_that_may_not_be_asked_is_no_wrong_clock(number: int) -> None:
    def refused(_: Timex) -> int:
        raise OSError(number, "refused")

    finding = only(check_clock(CheckContext(config=Config()), (), refused))
    assert (finding.verdict, "seccomp" in finding.message) == (INFO, number == errno.EPERM)


def test_this_kernel_is_asked_for_real() -> None:
    finding = only(check_clock(CheckContext(config=Config()), ()))
    assert finding.check == "synchronised"
    assert "failed" not in finding.message
