"""A machine with the wheel installed as docs/bare-metal.md says: its commands are read from there and run.

Owns the wheel, the commands, the stand-in of NVML and the daemon's unit. Refuses to judge.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.running import ROOT, Page
from tests.nvml_stub.build import LIBRARY, build
from tests.systemd.machine import SITE, Machine, have
from tests.waiting import wait_for

UNIT, CLUSTER = "gpu-efficiency.service", "gpu-efficiency-cluster.service"
GATEWAY = "gpu-efficiency-gateway.service"
CONFIG = "/etc/gpu-efficiency/config.toml"
DROP_INS = "/opt/gpu-efficiency/share/gpu-efficiency/systemd/drop-ins"
_UNIT_FOLDER = "/etc/systemd/system/gpu-efficiency.service.d"
WORLD = "/srv/world.txt"
_OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
_LEFT = ("jobs", "old", "pause", "probe")
"""What tests leave beside the daemon's socket."""
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "exporter", "systemd", "docs/bare-metal.md")


def wheel(folder: Path) -> Path:
    """Build it from a copy of the tree; give the file."""
    source = folder / "source"
    for name in _SOURCES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", f"{folder}", f"{source}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@cache
def blocks(heading: str) -> tuple[str, ...]:
    """The commands below a heading of the page, block by block."""
    page = (ROOT / "docs/bare-metal.md").read_text()
    part = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return tuple(re.findall(r"```sh\n(.*?)```", part, re.DOTALL))


class Node:
    """The machine with the daemon on it."""

    def __init__(self, machine: Machine, package: Path) -> None:
        self.machine = machine
        shutil.copy(package, machine.path("/srv"))
        have(machine, build() / LIBRARY)
        self.world()
        self.drop_in("stand-in", f"[Service]\nEnvironment=NVML_STUB_SCRIPT={WORLD}\n")
        first, *others = blocks("Quick start")
        self.follow(first)
        self._add_dependencies()
        for block in others:
            self.follow(block)
        self.original = machine.path(CONFIG).read_text()

    def follow(self, block: str) -> str:
        """Run commands of the page as they stand; the first that fails fails the test."""
        return self.machine.run("sh", "-ec", f"cd /srv\n{block}", **_OFFLINE)

    def _add_dependencies(self) -> None:
        """An index would give them: here they are those of the tests' own environment."""
        (folder,) = self.machine.path("/opt/gpu-efficiency/lib").glob("python*/site-packages")
        (folder / "dependencies.pth").write_text(f"{SITE}\n")

    def world(self, *lines: str) -> None:
        """What the stand-in's GPUs do from now on."""
        draft = self.machine.path(f"{WORLD}.draft")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.chmod(0o644)
        draft.replace(self.machine.path(WORLD))

    def drop_in(self, name: str, text: str) -> None:
        folder = self.machine.path(_UNIT_FOLDER)
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.conf").write_text(text)

    def configure(self, text: str = "") -> None:
        self.machine.path(CONFIG).write_text(f"{text}\n{self.original}")

    def reset(self) -> None:
        """As it was after the quick start, and running."""
        self.world()
        self.machine.run("rm", "-rf", *(f"/run/gpu-efficiency/{name}" for name in _LEFT), "/var/lib/kubelet")
        foreign = [path for path in self.machine.path(_UNIT_FOLDER).glob("*.conf") if path.stem != "stand-in"]
        if not foreign and self.machine.path(CONFIG).read_text() == self.original and self.page():
            return
        for path in foreign:
            path.unlink()
        self.machine.path(CONFIG).write_text(self.original)
        self.machine.run("systemctl", "daemon-reload")
        self.restart()

    def restart(self) -> None:
        self.machine.run("systemctl", "reset-failed")
        self.machine.run("systemctl", "restart", UNIT)
        self.until(lambda page: page.total("ticks_total"), "it samples")

    def page(self) -> Page | None:
        done = self.machine.tried("curl", "--silent", "--fail", "http://localhost:19400/metrics")
        return Page(done.stdout).keeps_the_law() if not done.returncode else None

    def until(self, true: Any, what: str) -> Page:
        """Scrape until it is true of a page, and give that page."""

        def look() -> Page | None:
            page = self.page()
            return page if page and true(page) else None

        try:
            return wait_for(look, what)
        except AssertionError as err:
            err.add_note(self.said())
            raise

    def said(self) -> str:
        """The end of the daemon's log, from the journal."""
        return self.machine.tried("journalctl", "--no-pager", "-o", "cat", "-n", "40", "-u", UNIT).stdout

    def state(self, unit: str = UNIT) -> tuple[str, str]:
        return self.machine.show(unit, "ActiveState"), self.machine.show(unit, "SubState")

    def pid(self) -> int:
        return int(self.machine.show(UNIT, "MainPID"))

    def status(self, name: str) -> str:
        """A line of the daemon's own /proc/PID/status."""
        lines = self.machine.path(f"/proc/{self.pid()}/status").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:"))

    @contextmanager
    def process(self, *words: str) -> Iterator[int]:
        """A program of user games, as a service of its own, for the length of a block; gives its pid."""
        unit = "of-another.service"
        text = f"[Service]\nUser=games\nEnvironment=RANK=3\nExecStart={' '.join(words)}\n"
        self.machine.path(f"/run/systemd/system/{unit}").parent.mkdir(exist_ok=True)
        self.machine.path(f"/run/systemd/system/{unit}").write_text(text)
        self.machine.run("systemctl", "daemon-reload")
        self.machine.run("systemctl", "start", unit)
        try:
            yield int(self.machine.show(unit, "MainPID"))
        finally:
            self.machine.run("systemctl", "stop", unit)

    def probe(self, other: int, *drop_ins: str) -> dict[str, str]:
        """What may be done under the unit with these drop-ins: name -> error, empty for none."""
        machine, name, answer = self.machine, "probe.service", "/var/lib/gpu-efficiency/answer"
        shutil.copy(ROOT / "tests/systemd/probe.py", machine.path("/srv"))
        unit = machine.path(f"/etc/systemd/system/{UNIT}").read_text()
        start = f"ExecStart=/opt/gpu-efficiency/bin/python /srv/probe.py {other} {answer}"
        folder = machine.path(f"/run/systemd/system/{name}.d")
        folder.mkdir(parents=True)
        unit = re.sub(r"(?m)^RestartForceExitStatus=.*\n", "", unit)  # refused in a unit of this type
        (folder.parent / name).write_text(
            re.sub(r"(?m)^ExecStart=.*", start, unit).replace("Type=exec", "Type=oneshot")
        )
        for drop_in in drop_ins:
            shutil.copy(machine.path(f"{DROP_INS}/{drop_in}.conf"), folder)
        try:
            machine.run("systemctl", "daemon-reload")
            machine.run("systemctl", "start", name)
            return dict(json.loads(machine.path(answer).read_text()))
        finally:
            shutil.rmtree(folder)
            (folder.parent / name).unlink()
            for left in (answer, "/var/lib/gpu-efficiency/probe", "/run/gpu-efficiency/probe"):
                machine.path(left).unlink(missing_ok=True)
