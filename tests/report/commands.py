"""Runs the command in this process and returns its status, output and standard error."""

import argparse
import io
import shlex
from contextlib import redirect_stderr, redirect_stdout

from exporter.cli.report import report, report_arguments
from exporter.cli.wiring import run_guarded


def run(line: str) -> tuple[int, str, str]:
    """Run `gpu-efficiency report LINE`."""
    out, err = io.StringIO(), io.StringIO()
    parser = argparse.ArgumentParser(prog="gpu-efficiency report")
    report_arguments(parser)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = run_guarded(report, parser.parse_args(shlex.split(line)))
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()
