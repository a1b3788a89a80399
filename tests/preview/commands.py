"""Runs the command in this process; returns its status, standard output and standard error."""

import io
import logging
import shlex
from contextlib import redirect_stderr, redirect_stdout

from exporter.cli import main


def preview(line: str) -> tuple[int, str, str]:
    """Run `gpu-efficiency preview LINE`, and restore the logging configuration."""
    out, err, root = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                status = main(["preview", *shlex.split(line)])
            except SystemExit as end:
                status = int(end.code or 0)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return status, out.getvalue(), err.getvalue()
