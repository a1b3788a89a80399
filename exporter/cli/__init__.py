"""Runs the command `gpu-efficiency`: finds the subcommand by name, imports its module and returns its exit status.

Owns the table of commands. Only the chosen command's module is imported, so that a daemon does not pay for the others.
Exit status 0: done; 1: failed while running; 2: wrong usage or configuration; 3: no usable source of telemetry.
"""

import argparse
import sys
from importlib import import_module

from exporter import __version__

_COMMANDS = (
    ("serve", "serve:serve", "wiring:config_arguments", "watch this node's GPUs and serve their metrics"),
    ("demo", "simulate:demo", "simulate:demo_arguments", "serve a simulated node of 8 GPUs, marked as such"),
    ("record", "serve:record", "serve:record_arguments", "record what the hardware reports to a trace"),
    ("replay", "simulate:replay_trace", "simulate:replay_arguments", "run a trace through the ledger"),
    ("preview", "preview:preview", "preview:preview_arguments", "show what other thresholds would have freed and hit"),
    ("backfill", "backfill:backfill", "backfill:backfill_arguments", "write history for a Prometheus that missed it"),
    ("report", "report:report", "report:report_arguments", "show what a job cost and where its time went"),
    ("top", "top:top", "top:top_arguments", "watch nodes, GPUs and jobs live in a terminal"),
    ("simulate", "simulate:write_simulation", "simulate:simulate_arguments", "write a simulated node's trace"),
    ("cluster", "cluster:cluster", "cluster:cluster_arguments", "serve metrics of a whole cluster's scheduler"),
    ("pause", "pause:pause", "pause:pause_arguments", "release the hardware counters for a profiler"),
    ("resume", "pause:resume", "wiring:config_file_argument", "end a pause early"),
    ("check-config", "tables:check_config", "wiring:config_arguments", "print the configuration in force"),
    (
        "install-check",
        "install_check:install_check",
        "install_check:install_check_arguments",
        "check what works on this node and what to do",
    ),
    ("leaks", "tables:leaks", "tables:leaks_arguments", "print the twelve leaks and what to do first"),
    (
        "cardinality",
        "cardinality:cardinality",
        "cardinality:cardinality_arguments",
        "estimate how many series a fleet will have",
    ),
    ("metrics", "tables:metrics", "tables:metrics_arguments", "print every metric and its meaning"),
)
"""Name, function that runs it, function that adds its arguments, description; functions as "module:name"."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser(arguments[0] if arguments else "").parse_args(arguments)
    wiring = import_module("exporter.cli.wiring")
    return int(wiring.run_guarded(args.run, args))


def _parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-efficiency", description="Where every paid GPU-second goes.")
    parser.add_argument("--version", action="version", version=f"gpu-efficiency {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, arguments, about in _COMMANDS:
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name == chosen:
            _load(arguments)(command)
            command.set_defaults(run=_load(run))
    return parser


def _load(target: str):  # type: ignore[no-untyped-def]  # noqa: ANN202  any function of the table
    module, name = target.split(":")
    return getattr(import_module(f"exporter.cli.{module}"), name)
