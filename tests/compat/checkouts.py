"""One checkout of this project, driven from outside: its command line, and the daemons it starts.

Owns the processes, their environment and their time, which stands where `clockwork/sitecustomize.py` is told. Refuses
to import any of the project: module names may be others in the next checkout.
"""

import http.client
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.ports import free_port

CLOCKWORK = Path(__file__).parent / "clockwork"
BYTECODE = Path(__file__).resolve().parents[2] / ".cache/compat/bytecode"
SECOND = 1_000_000_000
NOW = 1_795_392_000
"""Unix seconds at which every command runs: 2026-11-23 00:00 UTC."""
UPTIME = 864_000
"""Seconds for which the host has been up by then."""
PATIENCE = 300.0
"""Real seconds until something that does not come is given up; reached only where it does not come."""
_POLL = 0.05
_LOOKS, _LOOK = 4, 0.005
_LAST_SECONDS = 10.0
_KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH")
"""Of the environment; what else is set there must not change an answer."""


class DriverError(Exception):
    """Something could not even be asked; the message says what."""


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    words: tuple[str, ...]
    status: int
    out: str
    err: str


class Checkout(NamedTuple):
    """A working tree, and the interpreter that runs it."""

    path: Path
    python: Path

    def environment(
        self, folder: Path, *, wall: float = NOW, uptime: float = UPTIME, chance: int = 0
    ) -> dict[str, str]:
        """That of a program in `folder`, whose clocks stand at `wall` and `uptime` seconds."""
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return kept | {
            "PYTHONPATH": f"{CLOCKWORK}{os.pathsep}{self.path}",
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPYCACHEPREFIX": f"{BYTECODE}",
            "HOME": f"{folder}",
            "TMPDIR": f"{temporary}",
            "TZ": "UTC",
            "LC_ALL": "C.UTF-8",
            "COLUMNS": "120",
            "NO_PROXY": "127.0.0.1",
            "COMPAT_WALL": f"{round(wall * SECOND)}",
            "COMPAT_MONOTONIC": f"{round(uptime * SECOND)}",
            "COMPAT_CHANCE": f"{chance}",
        }

    def run(self, folder: Path, *words: str, wall: float = NOW) -> Said:
        """Run one command in `folder` to its end."""
        out, err = folder / "tmp/out", folder / "tmp/err"
        process = Process(self, words, folder, self.environment(folder, wall=wall), out=out, err=err)
        try:
            status = process.wait()
        finally:
            process.kill()
        return Said(words, status, *(file.read_text(encoding="utf-8", errors="replace") for file in (out, err)))

    def imported(self, folder: Path) -> Path:
        """The package that a program of this checkout imports."""
        return Path(self._printed(folder, "-c", "import exporter; print(exporter.__file__)")).resolve()

    def version(self, folder: Path) -> str:
        """What it calls itself."""
        return self._printed(folder, "-m", "exporter", "--version").split()[-1]

    def _printed(self, folder: Path, *words: str) -> str:
        line = [f"{self.python}", *words]
        env = self.environment(folder)
        return subprocess.run(line, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout.strip()

    @contextmanager
    def daemon(
        self,
        folder: Path,
        *words: str,
        port_flag: str = "--web.listen-address",
        wall: float = NOW,
        uptime: float = UPTIME,
        chance: int = 0,
        begun: bool = False,
    ) -> "Iterator[Daemon]":
        """Run a command that serves, until the block ends. `begun`: time goes on from the start, when it is moved."""
        port, moved, log = free_port(), folder / "moved", folder / "log"
        moved.unlink(missing_ok=True)
        env = self.environment(folder, wall=wall, uptime=uptime, chance=chance) | {"COMPAT_MOVED": f"{moved}"}
        process = Process(self, (*words, port_flag, f"127.0.0.1:{port}"), folder, env, out=folder / "out", err=log)
        daemon = Daemon(process, port, folder, wall)
        try:
            if begun:
                daemon.move(0, 0)
            yield daemon
        finally:
            daemon.close()
            process.kill()


class Spawner:
    """A process that starts those of one thread; see clockwork/spawner.py."""

    def __init__(self, checkout: Checkout, environ: Mapping[str, str]) -> None:
        line = [f"{checkout.python}", "-m", "spawner"]
        self._process = subprocess.Popen(
            line, cwd=CLOCKWORK, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        package = Path(self._line().strip())
        if package.resolve() != checkout.path.resolve() / "exporter/__init__.py":
            self.close()
            raise DriverError(f"{checkout.path}: {package} would be imported instead")

    def ask(self, **request: object) -> int:
        """The answer to a request, which may take its time."""
        if self._process.stdin is None:
            raise DriverError("the spawner has no pipe")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], PATIENCE)[0]:
            self.close()
            raise DriverError(f"no answer in {PATIENCE:g} s")
        line = stdout.readline()
        if not line:
            self.close()
            raise DriverError(f"the spawner ended with status {self._process.returncode}")
        return line.decode()

    def works(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let it end, or end it where it waits for what does not come."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_mine = threading.local()
_spawners: list[Spawner] = []


def spawner(checkout: Checkout, environ: Mapping[str, str]) -> Spawner:
    """This thread's own for that checkout."""
    mine: dict[Checkout, Spawner] = _mine.__dict__.setdefault("spawners", {})
    if checkout not in mine or not mine[checkout].works():
        mine[checkout] = Spawner(checkout, environ)
        _spawners.append(mine[checkout])
    return mine[checkout]


def close_spawners() -> None:
    """Of all threads, which must rest."""
    while _spawners:
        _spawners.pop().close()


class Process:
    """One running command. Belongs to the thread that started it."""

    def __init__(
        self,
        checkout: Checkout,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        out: Path,
        err: Path,
    ) -> None:
        self._spawner = spawner(checkout, environ)
        request = {"words": list(words), "cwd": f"{folder}", "environ": dict(environ)}
        self.pid = self._spawner.ask(**request, out=f"{out}", err=f"{err}")
        self._status: int | None = None

    def running(self) -> bool:
        """Whether it has not ended yet."""
        if self._status is not None:
            return False
        return _state(Path(f"/proc/{self.pid}/stat")) not in {"", "Z"}

    def rests(self) -> bool:
        """Whether none of its threads runs or would; seen several times, for those who wait look at the clock."""
        for _ in range(_LOOKS):
            time.sleep(_LOOK)
            if "R" in {_state(file) for file in Path(f"/proc/{self.pid}/task").glob("*/stat")}:
                return False
        return True

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        if self._status is None:
            self._status = self._spawner.ask(wait=self.pid)
        return self._status

    def stop(self) -> int:
        """Tell it to stop, and wait."""
        if self._status is None:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._status is None:
            with suppress(ProcessLookupError, DriverError):
                os.kill(self.pid, signal.SIGKILL)
                self.wait()


def _state(file: Path) -> str:
    """Of a process or a thread: R runs or would, S waits, Z has ended (proc(5)); empty: it is gone."""
    try:
        return file.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Answer(NamedTuple):
    """What was answered."""

    status: int
    headers: Mapping[str, str]
    body: str


class Daemon:
    """A program that serves, and its clock."""

    def __init__(self, process: Process, port: int, folder: Path, wall: float) -> None:
        self._process, self.port, self._folder, self._wall = process, port, folder, wall
        self.url = f"http://127.0.0.1:{port}"
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        """Ask for a page, over one connection as long as it lasts. Raises OSError and HTTPException."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            self._connection.request(method, path, headers=named)
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        told = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, told, body.decode(errors="replace"))

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def move(self, clocks: float, waits: float) -> None:
        """Let it be so many seconds later than at the start, and wake those who waited for `waits` seconds.

        Not before all that it does at this moment is done: who is about to wait must not find that it is later.
        """
        self.until(self._process.rests, "it does not come to rest")
        part = self._folder / "moved.part"
        part.write_text(f"{round(clocks * SECOND)} {round(waits * SECOND)}", encoding="ascii")
        part.replace(self._folder / "moved")

    def until_sampled(self, moment: float) -> None:
        """Wait until it has a sample of that many seconds after the start, or a later one."""
        self.until(lambda: self._sampled() >= self._wall + moment, f"no sample of {moment:g} s after the start")

    def until(self, true: Callable[[], bool], otherwise: str) -> None:
        """Wait until it is true."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            if not self._process.running():
                raise DriverError(f"the daemon ended with status {self._process.wait()}: {self.log()[-2000:]}")
            if time.monotonic() > deadline:
                raise DriverError(f"{otherwise}: {self.log()[-2000:]}")
            time.sleep(_POLL)

    def status(self, path: str) -> int:
        """Of an answer; 0: there is none."""
        try:
            return self.get(path).status
        except (OSError, http.client.HTTPException):
            return 0

    def _sampled(self) -> float:
        try:
            answer = self.get("/api/v1/node")
        except (OSError, http.client.HTTPException):
            return 0.0
        return float(json.loads(answer.body)["node"]["sampled_at"]) if answer.status == http.client.OK else 0.0

    def end(self) -> int:
        """Tell it to stop; its exit status."""
        self.close()
        return self._process.stop()

    def log(self) -> str:
        """What it has said on its standard error."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")


def shown(said: Said, folder: Path, files: Sequence[str] = ()) -> str:
    """A command as one text: its words, its exit status, what it printed, and files that it wrote."""
    parts = [f"$ gpu-efficiency {' '.join(said.words)}\nexit status {said.status}\n"]
    parts += [f"--- {name}\n{text}" for name, text in (("stdout", said.out), ("stderr", said.err)) if text]
    for name in files:
        path = folder / name
        parts.append(f"--- {name}\n{path.read_text(encoding='utf-8') if path.exists() else '(no such file)'}")
    return "\n".join(parts)
