"""Runs every command of an installed wheel, with nothing installed but what a set of its extras names.

Each command must end as it does on a machine without a GPU, and not by a traceback: a module of an extra that is
imported where the extra is absent shows here alone, because the tests' environment has all of them.
"""

import os
import pty
import re
import select
import time
from collections.abc import Iterable
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired, run

from release import installed
from release.build import ReleaseError
from release.installed import ENVIRONMENT, PATIENCE

EXTRAS = ("", "kubernetes", "otlp", "top", "kubernetes,otlp,top")
"""Sets of extras for those who run the exporter; `dev` and `image` are for those who build it."""
_NOBODY = "http://127.0.0.1:9"
_SETTINGS = f"""[reports]
socket = ""
[sampling]
pause_file = "pause"
[history]
file = ""
[kubernetes]
api_url = "{_NOBODY}"
[gateway]
nodes = ["{_NOBODY}"]
"""
_CONFIG = ("--config", "config.toml")
_NO_SOURCE = ("--source", "dcgm-exporter", "--dcgm-exporter-url", f"{_NOBODY}/metrics")
_LISTEN = ("--cluster.listen-address", "127.0.0.1:0")
_NODE = "{node}"
RUNS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("simulate", "deadlock", "--duration", "2m", "-o", "trace.jsonl.gz"), 0),
    (("replay", "trace.jsonl.gz"), 0),
    (("preview", "--policy", "zombie.batch=15m,1h", "trace.jsonl.gz"), 0),
    (("backfill", "--simulated", "--label", "of=test", "trace.jsonl.gz", "-o", "history.om"), 0),
    (("top", "--once", "--url", _NODE), 0),
    (("report", "--all", "--node", _NODE), 0),
    (("advise", "--prometheus", _NOBODY, "--reserved-price", "2", "--on-demand-price", "3"), 1),
    (("serve", *_CONFIG, *_NO_SOURCE), 3),
    (("record", *_CONFIG, *_NO_SOURCE, "recording.jsonl"), 3),
    (("install-check", *_CONFIG, *_NO_SOURCE), 3),
    (("pause", *_CONFIG), 0),
    (("resume", *_CONFIG), 0),
    (("check-config", *_CONFIG), 0),
    (("nccl",), 0),
    (("leaks", "--json"), 0),
    (("cardinality",), 0),
    (("metrics", "--markdown"), 0),
    (("completion", "bash"), 0),
)
"""Arguments and exit status; `{node}` is the address of a simulated node that the same wheel serves."""
SERVERS: tuple[tuple[str, ...], ...] = (
    ("cluster", *_CONFIG, "--cluster.scheduler", "slurm", *_LISTEN),
    ("cluster", *_CONFIG, "--cluster.scheduler", "kubernetes", *_LISTEN),
    ("gateway", *_CONFIG, "--gateway.socket", "socket"),
)
"""Commands that serve until they are ended; so does `demo`, beside which all others run."""
_SERVES = re.compile(" serving ")


def all_run(python: Path, folder: Path, *, live: bool) -> None:
    """Run every command in `folder`. `live`: the live view of `top` can be shown. Raises ReleaseError."""
    command = python.with_name("gpu-efficiency")
    (folder / "config.toml").write_text(_SETTINGS, encoding="ascii")
    with installed.demo(command) as node:
        for words, status in RUNS:
            ended(command, [word.format(node=node) for word in words], status, folder)
        shown(command, ["top", "--url", node], 0 if live else 1, folder)
    for words in SERVERS:
        with installed.serving([f"{command}", *words], _SERVES, folder):
            pass


def ended(command: Path, words: Iterable[str], status: int, folder: Path) -> None:
    """Run a command to its end. Raises ReleaseError if it has another exit status, or printed a traceback."""
    line = [f"{command}", *words]
    try:
        done = run(
            line, cwd=folder, env=ENVIRONMENT, stdin=DEVNULL, capture_output=True, text=True, check=False,
            timeout=PATIENCE,
        )  # fmt: skip
    except TimeoutExpired as err:
        raise ReleaseError(f"{' '.join(line)}: did not end in {PATIENCE:g} s") from err
    _judge(line, done.returncode, status, done.stdout + done.stderr)


def shown(command: Path, words: Iterable[str], status: int, folder: Path) -> None:
    """Run a command on a terminal, press q until it ends. Raises ReleaseError."""
    line, (screen, terminal) = [f"{command}", *words], pty.openpty()
    said, limit = b"", time.monotonic() + PATIENCE
    with Popen(line, cwd=folder, env=ENVIRONMENT, stdin=terminal, stdout=terminal, stderr=terminal) as program:
        while program.poll() is None and time.monotonic() < limit:
            if select.select([screen], [], [], 0.5)[0]:
                said += os.read(screen, 65536)
            else:
                os.write(screen, b"q")
        program.kill()
    os.close(terminal)
    os.close(screen)
    _judge(line, program.returncode, status, said.decode(errors="replace"))


def _judge(line: list[str], status: int, expected: int, said: str) -> None:
    if status != expected or "Traceback" in said:
        raise ReleaseError(f"{' '.join(line)}: exit {status}, not {expected}\n{said[-3000:]}")
