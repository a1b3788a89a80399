"""Followed logs of a job: much text, lines of a gigabyte, odd names, FIFOs, links to what only root may read."""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.redteam.child import Child
from tests.fuzz.redteam.tally import Tally
from tests.fuzz.redteam.target import LOGGING, Episode, Target, enter

_FILES, _PER_SECOND = 12, 290_000
_GIB = 1 << 30
_STEP = (
    " [2026-01-01 00:00:00] iteration {step:8d}/ 9999999 | consumed samples: {step:12d} | elapsed time per iteration"
    " (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {flops} | learning rate: 1.0E-05 | global batch size:    16 |"
    " lm loss: {loss} | loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)


def line(step: int, *, ms: float = 500.0, flops: str = "400.0", loss: str = "2.1E+00") -> str:
    """Return a line of Megatron-LM."""
    return _STEP.format(step=step, ms=ms, flops=flops, loss=loss)


def attack(episode: Episode) -> None:
    """Write them as the job's user, with one process on the job's GPU whose standard output is such a file."""
    child = Child(
        _Writer(episode, Random(episode.dice.getrandbits(32))),  # noqa: S311  dice, no secret
        uid=LOGGING.uid,
        first=lambda: enter(LOGGING, episode.target.cgroups),
    )
    episode.target.show_on_gpu(LOGGING, child.pid)
    episode.tally.add(child.wait(max(episode.left(), 0) + 6))
    emptied(episode.target)


def emptied(target: Target) -> None:
    """Take away what was written, so that the disk does not fill up."""
    folder = target.logs(LOGGING)
    away = folder.with_name(folder.name + "-away")
    if folder.is_symlink():
        folder.unlink()
    if away.exists():
        away.rename(folder)
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class _Writer:
    def __init__(self, episode: Episode, dice: Random) -> None:
        self._episode, self._dice = episode, dice
        self._folder = episode.target.logs(LOGGING)
        self._files = [self._folder / f"rank{n}.log" for n in range(_FILES)]
        self._step = 1

    def __call__(self, tally: Tally) -> None:
        os.umask(0o022)
        self._stdout()
        traps = [*_TRAPS]
        self._dice.shuffle(traps)
        began, written = time.monotonic(), 0
        rate = self._episode.target.many(_PER_SECOND)
        while not self._episode.over():
            ahead = written / rate - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(min(ahead, max(self._episode.left(), 0)))
            for path in self._files:
                tally.attempt()
                tally.came(self._append(path, rate // 4))
            written += rate // 4
            if traps or self._dice.random() < 0.2:
                trap = traps.pop() if traps else self._dice.choice(_TRAPS)
                tally.attempt()
                tally.came(f"{trap.__name__.strip('_').replace('_', ' ')}: {self._set(trap)}")

    def _stdout(self) -> None:
        path = self._folder / "stdout.txt"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(path, flags, 0o644)
        os.dup2(descriptor, 1)

    def _append(self, path: Path, size: int) -> str:
        kind = self._dice.choice(("steps", "steps", "text", "bytes", "one line"))
        if kind == "steps":
            text = b""
            while len(text) < size:
                self._step += 1
                text += line(self._step).encode() * 20
        elif kind == "text":
            text = (b"loss nan \x1b[31m 100%|####| 1/2 [00:00<?, ?it/s]\r\n" * (size // 45 + 1))[:size]
        elif kind == "bytes":
            text = self._dice.randbytes(size)
        else:
            text = b"x" * size
        try:
            with path.open("ab") as file:
                file.write(text)
        except OSError as error:
            return f"{kind}: {os.strerror(error.errno or 0)}"
        return f"{kind}: written"

    def _set(self, trap: Callable[[Path, Random, Target], None]) -> str:
        try:
            trap(self._folder, self._dice, self._episode.target)
        except OSError as error:
            return os.strerror(error.errno or 0)
        return "set"


def _sparse_gigabyte(folder: Path, dice: Random, _: Target) -> None:
    path = folder / f"sparse{dice.randrange(3)}.log"
    path.touch()
    os.truncate(path, _GIB)
    if dice.random() < 0.5:
        with path.open("ab") as file:
            file.write(b"\n" + line(5).encode())


def _odd_names(folder: Path, dice: Random, _: Target) -> None:
    odd = dice.choice(
        ("a\nb", "\x1b[2Jred", "\udcff\udcfe", "x" * 250, "..", "{job_id}", "*", "%s%n", "\u202egol", "'\";rm")
    )
    name = os.fsencode(f"{odd}{dice.randrange(4)}"[:251]) + b".log"
    with (folder / os.fsdecode(name)).open("a") as file:
        file.write(line(dice.randrange(1000)))


def _fifo(folder: Path, dice: Random, _: Target) -> None:
    os.mkfifo(folder / f"fifo{dice.randrange(10_000)}.log")


def _unix_socket(folder: Path, dice: Random, _: Target) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(folder / f"s{dice.randrange(10_000)}.log"))


def _link(folder: Path, dice: Random, target: Target) -> None:
    to = dice.choice(
        (
            "/etc/shadow", "/dev/zero", "/dev/tty", "/proc/kmsg", "/proc/self/mem", "/dev/stdin", "/", ".", "loop.log",
            f"{target.folder}/secret.log", f"{target.folder}/web.yml", f"/proc/{target.pid}/environ", "/proc/1/environ",
            f"{target.folder}/../{target.folder.name}/secret.log",
            f"/proc/{os.getpid()}/root{target.folder}/secret.log",
        )
    )  # fmt: skip
    (folder / f"link{dice.randrange(10_000)}.log").symlink_to(to)


def _hard_link(folder: Path, dice: Random, target: Target) -> None:
    os.link(target.folder / "secret.log", folder / f"hard{dice.randrange(10_000)}.log")


def _folder(folder: Path, dice: Random, _: Target) -> None:
    (folder / f"folder{dice.randrange(10_000)}.log").mkdir()


def _link_for_the_folder(folder: Path, _: Random, target: Target) -> None:
    """The path's {job_id} part is a link for a moment."""
    away = folder.with_name(folder.name + "-away")
    folder.rename(away)
    try:
        folder.symlink_to(target.folder)
        time.sleep(0.3)
        folder.unlink()
    finally:
        away.rename(folder)


def _swapped(folder: Path, dice: Random, target: Target) -> None:
    """A file that is now regular, now a link to another's."""
    path, file, link = folder / "swap.log", folder / "swap.a", folder / "swap.b"
    for _ in range(dice.choice((100, 1000))):
        file.write_text(line(3))
        file.replace(path)
        link.symlink_to(target.folder / "secret.log")
        link.replace(path)


def _many_files(folder: Path, dice: Random, _: Target) -> None:
    for n in range(1000):
        (folder / f"many{dice.randrange(2)}-{n}.log").write_text(line(n) if n % 2 else "")


def _truncated(folder: Path, dice: Random, _: Target) -> None:
    os.truncate(folder / f"rank{dice.randrange(_FILES)}.log", 0)


def _renamed(folder: Path, dice: Random, _: Target) -> None:
    a, b = (folder / f"rank{n}.log" for n in dice.sample(range(_FILES), 2))
    a.replace(b)


def _absurd(folder: Path, dice: Random, _: Target) -> None:
    """Figures of a known format that cannot be."""
    odd = ("nan", "inf", "-inf", "1e308", "9" * 300, "-1", "1E+9999", "0x1", "1_000")
    with (folder / "absurd.log").open("a") as file:
        for _step in range(200):
            step = dice.choice((0, 1, 2**31, 2**63, 10**40))
            file.write(line(step, ms=dice.choice((1e-9, 1e300, 0.0)), flops=dice.choice(odd), loss=dice.choice(odd)))


_TRAPS: tuple[Callable[[Path, Random, Target], None], ...] = (
    _sparse_gigabyte, _odd_names, _odd_names, _fifo, _unix_socket, _link, _link, _link, _hard_link, _folder,
    _link_for_the_folder, _swapped, _many_files, _truncated, _renamed, _absurd,
)  # fmt: skip
