"""What ships for bare metal: the units as systemd itself reads and rates them, the files they need, and the page.

They are run in tests/e2e/test_systemd.py.
"""

import os
import re
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.cli import main, wiring
from exporter.config import Config, load
from tests.systemd.probe import tries

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "systemd"
PAGE = (ROOT / "docs/bare-metal.md").read_text()
UNITS = ("gpu-efficiency.service", "gpu-efficiency-cluster.service", "gpu-efficiency-gateway.service")
SHARE = "share/gpu-efficiency"
RATED = re.findall(r"^\| (?:with )?`([\w.-]+)` \| ([\d.]+) \|$", PAGE, re.MULTILINE)
"""Unit or drop-in, and its exposure, as the page says."""
PROGRAM = "/opt/gpu-efficiency/bin/gpu-efficiency"
by_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """Sections of a unit: each setting with its values in order (systemd.syntax(7))."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """A tree with the units where they are installed, and with what they start."""
    for name in UNITS:
        target = tmp_path / "etc/systemd/system" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / name, target)
    for program in (PROGRAM, "/bin/kill"):
        place = tmp_path / program.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    for name in ("sysinit.target", "basic.target", "shutdown.target", "network.target", "multi-user.target"):
        (tmp_path / "etc/systemd/system" / name).write_text("[Unit]\nDefaultDependencies=no\n")
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def verify(root: Path) -> str:
    """What systemd-analyze has against the units; empty: nothing."""
    units = [f"{root}/etc/systemd/system/{name}" for name in UNITS]
    done = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=yes", f"--root={root}", *units)
    return (done.stdout + done.stderr).strip() or ("" if done.returncode == 0 else f"exit {done.returncode}")


@by_systemd
def test_systemd_has_nothing_against_the_units(root: Path) -> None:
    assert verify(root) == ""


@by_systemd
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("ProtectSystem=strict", "ProtectSystem=strictly"),
        ("Type=exec", "Tipe=exec"),
        ("[Service]", "[Servise]"),
        (PROGRAM, "/opt/elsewhere/gpu-efficiency"),
        ("SystemCallFilter=@system-service", "SystemCallFilter=@system-services"),
    ],
)
def test_systemd_would_have_something_against_a_slip(root: Path, good: str, bad: str) -> None:
    path = root / "etc/systemd/system" / UNITS[0]
    assert good in path.read_text()
    path.write_text(path.read_text().replace(good, bad))
    assert verify(root)


def exposure(tmp_path: Path, name: str) -> float:
    """What systemd-analyze says of a unit, or of the node's with a drop-in."""
    file = name if name in UNITS else UNITS[0]
    shutil.copy(FOLDER / file, tmp_path)
    if name != file:
        (tmp_path / f"{file}.d").mkdir()
        shutil.copy(FOLDER / "drop-ins" / name, tmp_path / f"{file}.d")
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", f"{tmp_path}/{file}")
    found = re.search(r"Overall exposure level for \S+: ([\d.]+) ", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


def test_the_page_rates_each_unit_and_each_drop_in_once() -> None:
    assert sorted(name for name, _ in RATED) == sorted(
        [*UNITS, *(path.name for path in (FOLDER / "drop-ins").iterdir())]
    )


@by_systemd
@pytest.mark.parametrize(("name", "said"), RATED)
def test_the_exposure_is_what_the_page_says(tmp_path: Path, name: str, said: str) -> None:
    """By systemd 252; another one may weigh a little differently."""
    leeway = 0.0 if run("systemctl", "--version").stdout.startswith("systemd 252 ") else 0.5
    assert exposure(tmp_path, name) == pytest.approx(float(said), abs=leeway + 0.01)


def test_drop_ins_lie_where_no_systemd_takes_them_for_the_units() -> None:
    """Whoever copies the whole folder gets no privilege by it."""
    assert not list(FOLDER.glob("*.service.d"))


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_a_command_that_there_is(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (start,) = unit(name)["Service"]["ExecStart"]
    program, command, *words = start.split()
    assert (program, words) == (PROGRAM, ["--config", "/etc/gpu-efficiency/config.toml"])
    assert main([command, "--config", f"{tmp_path}/none.toml"]) == wiring.USAGE
    assert "none.toml" in capsys.readouterr().err


@pytest.mark.parametrize("name", UNITS)
def test_only_what_cannot_mend_itself_is_not_tried_again(name: str) -> None:
    service = unit(name)["Service"]
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"] == [f"{wiring.USAGE}"]
    assert service["RestartForceExitStatus"] == ["SIGHUP"], "systemd takes the end by it for a success"
    assert unit(name)["Unit"]["StartLimitIntervalSec"] == ["0"]


def test_the_page_gives_a_reason_for_each_limit() -> None:
    limits = {
        line
        for key in ("MemoryMax", "CPUQuota", "CPUWeight", "TasksMax", "LimitNOFILE")
        for line in unit(UNITS[0])["Service"][key]
    }
    told = re.findall(r"^\| `(\w+)=(\S+)` \| \S", PAGE.split("\n## Limits\n")[1].split("\n## ")[0], re.MULTILINE)
    assert {value for _, value in told} == limits
    assert all(unit(UNITS[0])["Service"][key] == [value] for key, value in told)


def test_the_nodes_unit_starts_after_whom_it_asks() -> None:
    after = set(" ".join(unit(UNITS[0])["Unit"]["After"]).split())
    assert {f"{name}.service" for name in ("nvidia-persistenced", "nvidia-dcgm", "slurmd", "munge", "kubelet")} < after
    assert "Wants" not in unit(UNITS[0])["Unit"]
    assert all(unit(name)["Install"]["WantedBy"] == ["multi-user.target"] for name in UNITS)


def test_the_units_differ_only_in_what_their_work_differs_in() -> None:
    ours, theirs, gateways = (unit(name)["Service"] for name in UNITS)
    own = {
        "ExecStart",
        "CPUWeight",
        "MemoryMax",
        "StateDirectory",
        "StateDirectoryMode",
        "ReadWritePaths",
    }
    devices_and_processes = {"DeviceAllow", "PrivateDevices", "ProtectProc", "ProcSubset"}
    differ = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert differ == own | devices_and_processes
    differ = {key for key in gateways.keys() | theirs.keys() if gateways.get(key) != theirs.get(key)}
    assert differ == {"ExecStart", "ExecReload", "ReadWritePaths", "SystemCallFilter"}, "it checks no password"


def tmpfiles() -> Iterator[list[str]]:
    for path in (FOLDER / "tmpfiles.d").iterdir():
        yield from (line.split() for line in path.read_text().splitlines() if not line.startswith("#"))


def test_the_folders_are_those_that_the_daemon_uses() -> None:
    config = load(None, environ={})
    made = {path for _, path, *_ in tmpfiles()}
    assert f"{Path(config.reports.socket).parent}" in made
    assert f"{Path(config.sampling.pause_file).parent}" in made
    assert config.mapping_dir.path in made
    (writable,) = unit(UNITS[0])["Service"]["ReadWritePaths"]
    assert writable == f"{Path(config.reports.socket).parent}"
    assert unit(UNITS[2])["Service"]["ReadWritePaths"] == [writable] == [f"{Path(config.gateway.socket).parent}"]


def test_only_who_has_a_prolog_has_its_folder() -> None:
    """`scheduler = "auto"` takes it for one."""
    lines = (FOLDER / "tmpfiles.d/gpu-efficiency.conf").read_text()
    assert "/jobs" not in re.sub(r"(?m)^#.*$", "", lines)


@pytest.fixture(name="made")
def _made(tmp_path: Path) -> Path:
    """A root in which systemd-sysusers and systemd-tmpfiles have done as these files say."""
    if os.geteuid():
        pytest.skip("only root gives files away")
    (tmp_path / "etc").mkdir()
    for program, folder, words in (("sysusers", "sysusers.d", []), ("tmpfiles", "tmpfiles.d", ["--create"])):
        files = [f"{path}" for path in sorted((FOLDER / folder).iterdir())]
        done = run(f"systemd-{program}", f"--root={tmp_path}", *words, *files)
        assert (done.returncode, re.sub(r"(?m)^Creating .*\n", "", done.stderr)) == (0, "")
    return tmp_path


def test_the_user_cannot_log_in_and_is_in_no_other_group(made: Path) -> None:
    (row,) = (line.split(":") for line in (made / "etc/passwd").read_text().splitlines())
    assert (row[0], row[5], row[6]) == ("gpu-efficiency", "/var/lib/gpu-efficiency", "/usr/sbin/nologin")
    assert 0 < int(row[2]) < 1000
    (group,) = (line.split(":") for line in (made / "etc/group").read_text().splitlines())
    assert (group[0], group[2], group[3]) == ("gpu-efficiency", row[3], "")
    (shadow,) = (line.split(":") for line in (made / "etc/shadow").read_text().splitlines())
    assert shadow[1].startswith("!")


@pytest.mark.parametrize(
    ("path", "mode", "ours"),
    [
        ("run/gpu-efficiency", 0o1775, True),
        ("run/gpu-efficiency/jobs", 0o755, False),
        ("etc/gpu-efficiency", 0o750, True),
    ],
)
def test_the_folders_are_roots(made: Path, path: str, mode: int, *, ours: bool) -> None:
    """With the sticky bit on what the daemon may write to: what is root's there stays root's."""
    found = (made / path).stat()
    assert stat.S_IMODE(found.st_mode) == mode
    assert found.st_uid == 0
    group = int((made / "etc/group").read_text().split(":")[2])
    assert found.st_gid == (group if ours else 0)


def test_the_example_changes_nothing_but_the_memory_of_gpus() -> None:
    config, bare = load(FOLDER / "config.toml", environ={}), load(None, environ={})
    assert config.inventory.file.startswith("/var/lib/gpu-efficiency/")
    assert _but_inventory(config) == _but_inventory(bare)


def _but_inventory(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__ if name != "inventory"}


def test_each_line_of_the_example_can_be_taken(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^# (?=[\[\w]+.*[=\]])", "", (FOLDER / "config.toml").read_text())
    (tmp_path / "all.toml").write_text(text)
    config = load(tmp_path / "all.toml", environ={})
    assert (config.log.format, config.inventory.expected_gpus, len(config.prices)) == ("json", 8, 1)
    assert config.slurm.mapping_dir == config.mapping_dir.path
    assert config.privacy.key_file


def test_the_web_example_has_the_words_of_prometheus_exporters() -> None:
    said = yaml.safe_load((FOLDER / "web.yaml").read_text())
    text = (FOLDER / "web.yaml").read_text()
    whole = yaml.safe_load(re.sub(r"(?m)^( *)# (?=( *\w+:)( |$)(?!the))", r"\1", text))
    assert set(said) == {"tls_server_config"}
    assert set(whole) == {"tls_server_config", "basic_auth_users"}
    assert set(whole["tls_server_config"]) == {
        "cert_file",
        "key_file",
        "min_version",
        "client_auth_type",
        "client_ca_file",
    }


def test_the_wheel_brings_all_of_it() -> None:
    brought = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    files = {path: f"{target}/{path.name}" for target, globs in brought.items() for g in globs for path in ROOT.glob(g)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == {p for p in files if FOLDER in p.parents}
    assert {path.relative_to(ROOT).as_posix() for path in files if FOLDER not in path.parents} == {
        "docs/bare-metal.md",
        "docs/gpu-efficiency.1",
        "exporter/data/slurm-epilog.sh",
        "exporter/data/slurm-prolog.sh",
        "exporter/data/slurm-receipt.sh",
    }
    for name in UNITS:
        (page,) = unit(name)["Unit"]["Documentation"]
        assert page.removeprefix("file:///opt/gpu-efficiency/") in files.values()


def test_every_file_that_the_page_installs_is_in_the_wheel() -> None:
    brought = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    there = {f"{target}/{path.name}" for target, globs in brought.items() for g in globs for path in ROOT.glob(g)}
    named = set(re.findall(r"(?<![\w/])(?:systemd|sysusers\.d|tmpfiles\.d|examples|slurm)/[\w./-]+\.\w+", PAGE))
    assert named
    assert {f"{SHARE}/{name}" for name in named if not name.endswith("test_systemd.py")} <= there


def test_the_page_says_how_many_things_are_tried() -> None:
    said = re.search(r"in the daemon's place tries (\d+) things", PAGE)
    assert said
    assert int(said[1]) == len(tries("1"))


def test_the_page_has_slurms_scripts_where_the_other_page_and_the_script_itself_have_them() -> None:
    for text in (PAGE, (ROOT / "docs/schedulers.md").read_text(), (ROOT / "exporter/data/slurm-prolog.sh").read_text()):
        assert "Prolog=/etc/slurm/prolog.d/*" in text
        assert "Epilog=/etc/slurm/epilog.d/*" in text
        assert "/etc/slurm/prolog.d/50-gpu-efficiency.sh" in text
