"""Measures CPU time and memory of an idle `top`: python -m tests.top.cost COLUMNS LINES URL ... (see docs/top.md).

Owns the measuring, from /proc. Refuses to judge: it is no test.
"""

import os
import sys
import time
from pathlib import Path

from tests.e2e.running import command, environment
from tests.top.terminal import Terminal, terminal

SETTLE_SECONDS, MEASURED_SECONDS = 5.0, 40.0


def main(words: list[str]) -> int:
    """Print one line."""
    columns, lines, *urls = words
    flags = [word for url in urls for word in ("--url", url)]
    env = environment(LANG="C.UTF-8")
    with terminal(command("top", *flags), columns=int(columns), lines=int(lines), env=env) as top:
        top.shows("q quit")
        _read(top, SETTLE_SECONDS)
        cpu, written, at = _cpu(top), len(top.written), time.monotonic()
        _read(top, MEASURED_SECONDS)
        took = time.monotonic() - at
        share, sent = (_cpu(top) - cpu) / took, (len(top.written) - written) / took
        said = f"{100 * share:.1f} % of a core, {_resident(top):.0f} MiB, {sent / 1000:.1f} kB/s to the terminal"
    sys.stdout.write(said + "\n")
    return 0


def _read(top: Terminal, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        top.drain(0.2)


def _cpu(top: Terminal) -> float:
    """Return user and system CPU seconds."""
    figures = Path(f"/proc/{top.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(figures[11]) + int(figures[12])) / os.sysconf("SC_CLK_TCK")


def _resident(top: Terminal) -> float:
    pages = int(Path(f"/proc/{top.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
