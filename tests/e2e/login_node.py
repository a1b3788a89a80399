"""A login node: the gateway's process, and `gpu-efficiency report` as a user of that host runs it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.running import Program, environment, running
from tests.waiting import PATIENCE, wait_for

_AS_USER = """
import contextlib, io, os, sys
from exporter.cli import main
from exporter.specs import find_spec
find_spec("")
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(sys.argv[2:])
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
sys.exit(main(sys.argv[2:]))
"""
"""Once as root, which loads all that is used, for the interpreter's tree may be closed to others; then as the user."""


@contextmanager
def serving(words: list[str], said: Path, path: Path) -> Iterator[Program]:
    """Run that command line of the gateway, which listens at `path`; it ends as it should."""
    with running(words, said, environment()) as program:
        wait_for(lambda: program.alive() and "serving each user" in program.log(), "it listens")
        yield program
        assert program.end() == 0
        assert not path.exists()
        assert "Traceback" not in program.log()


def report(uid: int, path: Path, *words: str, store: str = "") -> subprocess.CompletedProcess[str]:
    """What `gpu-efficiency report` says to a user of a host that has a gateway at `path` and that store, or none."""
    env = environment(GPU_EFFICIENCY_GATEWAY_SOCKET=f"{path}", GPU_EFFICIENCY_HISTORY_FILE=store)
    return subprocess.run(
        [sys.executable, "-c", _AS_USER, f"{uid}", "report", "--quiet", *words],
        env=env, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
