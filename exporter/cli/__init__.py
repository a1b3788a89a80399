"""Runs the command `gpu-efficiency`: finds the subcommand by name, imports its module and returns its exit status.

Owns the table of commands. Only the chosen command's module is imported, so that a daemon does not pay for the others.
Exit status 0: done; 1: failed while running; 2: wrong usage or configuration; 3: no usable source of telemetry.
"""

import argparse
import io
import signal
import sys
import threading
from importlib import import_module

from exporter import __version__

PROGRAM, DESCRIPTION = "gpu-efficiency", "Where every paid GPU-second goes."
_COMMANDS = (
    (
        "serve", "serve:serve", "wiring:config_arguments", "watch this node's GPUs and serve their metrics",
        ("with all defaults: page and metrics on port 19400", "serve"),
        ("with settings of a file, over an existing dcgm-exporter",
         "serve --config my.toml --source dcgm-exporter --dcgm-exporter-url localhost:9400/metrics"),
    ),
    (
        "demo", "simulate:demo", "simulate:demo_arguments", "serve a simulated node of 8 GPUs, marked as such",
        ("on http://localhost:19400", "demo"),
        ("another scenario and node, three hours in", "demo zombie_notebook --node 3 --preroll 3h"),
        ("test the pager: make an alert fire", "demo --drill GPUEfficiencyJobDeadlocked"),
    ),
    (
        "record", "serve:record", "serve:record_arguments", "record this node's telemetry in a trace file",
        ("until Ctrl-C, compressed", "record trace.jsonl.gz"),
        ("an hour and a half, two samples a second",
         "record --duration 1h30m --sampling.interval-seconds 0.5 trace.jsonl.gz"),
    ),
    (
        "replay", "simulate:replay_trace", "simulate:replay_arguments", "recompute the accounting of a trace",
        ("where the time of a recording went", "replay trace.jsonl.gz"),
        ("serve it on http://localhost:19400, ten times as fast", "replay --serve --speed 10 trace.jsonl.gz"),
    ),
    (
        "preview", "preview:preview", "preview:preview_arguments",
        "show which jobs other thresholds would have flagged, and the GPU-hours freed",
        ("two thresholds for idle batch jobs, over a recording",
         "preview --policy zombie.batch=15m,1h trace.jsonl.gz"),
        ("a threshold for hangs, over the last two weeks of a Prometheus",
         "preview --policy hang=20m --prometheus prometheus:9090 --since 14d"),
    ),
    (
        "backfill", "backfill:backfill", "backfill:backfill_arguments",
        "convert recordings or a history store into old samples for Prometheus",
        ("of a recording, as one document for promtool", "backfill trace.jsonl.gz -o history.om"),
        ("of a node's store, with a label that scrapes add",
         "backfill --store history.db --label cluster=alps --folder history"),
    ),
    (
        "report", "report:report", "report:report_arguments", "show what a job cost and where its time went",
        ("a job of this node", "report 4711"),
        ("who lost how much in 30 days, from a Prometheus",
         "report --all --by account --since 30d --prometheus prometheus:9090"),
    ),
    (
        "advise", "advise:advise", "advise:advise_arguments",
        "show how many GPUs to reserve, and in which hours to rent more on demand",
        ("at two prices of a GPU-hour, by the last four weeks",
         "advise --prometheus prometheus:9090 --reserved-price 2.10 --on-demand-price 3.90"),
        ("the share of the time in which each GPU was in use, and local hours of the week",
         "advise --prometheus prometheus:9090 --timezone Europe/Paris"),
    ),
    (
        "top", "top:top", "top:top_arguments", "watch nodes, GPUs and jobs live in a terminal",
        ("two nodes, jobs first", "top --jobs --url node7:19400 --url node8:19400"),
        ("once, for a script", "top --once --filter zombie"),
    ),
    (
        "simulate", "simulate:write_simulation", "simulate:simulate_arguments", "write a simulated node's trace",
        ("list the scenarios", "simulate"),
        ("two hours of a deadlock, and its ground truth",
         "simulate deadlock --duration 2h -o trace.jsonl --truth truth.jsonl"),
    ),
    (
        "cluster", "cluster:cluster", "cluster:cluster_arguments", "serve metrics of a whole cluster's scheduler",
        ("of Slurm, on port 19401", "cluster --cluster.scheduler slurm"),
        ("polled every two minutes, on another port",
         "cluster --cluster.refresh-seconds 2m --cluster.listen-address :9500"),
    ),
    (
        "gateway", "gateway:gateway", "gateway:gateway_arguments", "answer each user for his own jobs, on a login node",
        ("of the nodes that [gateway] names", "gateway --config /etc/gpu-efficiency/config.toml"),
        ("on another socket",
         "gateway --config /etc/gpu-efficiency/config.toml --gateway.socket /run/site/gateway.sock"),
    ),
    (
        "pause", "pause:pause", "pause:pause_arguments", "release the hardware counters for a profiler",
        ("for half an hour", "pause"),
        ("for an hour and a half, with the reason for the log", "pause --for 1h30m --reason 'Nsight, GPU 3'"),
    ),
    (
        "resume", "pause:resume", "wiring:config_file_argument", "end a pause early",
        ("of the daemon with default settings", "resume"),
        ("of a daemon with a file of its own", "resume --config /etc/gpu-efficiency/config.toml"),
    ),
    (
        "check-config", "tables:check_config", "wiring:config_arguments", "print the configuration in force",
        ("defaults and environment variables", "check-config"),
        ("check a file before a reload", "check-config --config /etc/gpu-efficiency/config.toml"),
    ),
    (
        "install-check", "install_check:install_check", "install_check:install_check_arguments",
        "check what works on this node, and how to fix what does not",
        ("as the daemon with that file runs", "install-check --config /etc/gpu-efficiency/config.toml"),
        ("pack what a bug report needs, with two minutes of trace",
         "install-check --bundle report.tar.gz --anonymous --trace-seconds 2m"),
    ),
    (
        "nccl", "nccl:nccl", "nccl:nccl_arguments",
        "show how to install an NCCL profiler plugin that times communication, or check it",
        ("how to switch NCCL Inspector on for all jobs of a node", "nccl"),
        ("whether it times the jobs that run on this node now, and what to do", "nccl --check"),
    ),
    (
        "leaks", "tables:leaks", "tables:leaks_arguments", "print all 24 leaks and what to do first",
        ("for reading", "leaks"),
        ("for programs", "leaks --json"),
    ),
    (
        "cardinality", "cardinality:cardinality", "cardinality:cardinality_arguments",
        "estimate how many series a fleet will have",
        ("100 nodes of 8 GPUs, scraped every 30 seconds", "cardinality --nodes 100 --gpus 8 --interval 30s"),
        ("what to write into Prometheus' configuration to keep less", "cardinality --profile jobs --relabel"),
    ),
    (
        "metrics", "tables:metrics", "tables:metrics_arguments", "print every metric and its meaning",
        ("for reading", "metrics"),
        ("as docs/metrics.md", "metrics --markdown"),
    ),
    (
        "completion", "completion:completion", "completion:completion_arguments", "print a shell's completion script",
        ("in ~/.bashrc: source <(gpu-efficiency completion bash)", "completion bash"),
        ("saved as ~/.config/fish/completions/gpu-efficiency.fish", "completion fish"),
    ),
)  # fmt: skip
"""Name, function that runs it, function that adds its arguments, description; functions as "module:name".

Then its examples: what each does, and its command line after `gpu-efficiency`.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] in (["serve"], ["cluster"]) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, lambda *_: None)  # a reload before the configuration is read must not end it
    args = build_parser(arguments[0] if arguments else "").parse_args(arguments)
    wiring = import_module("exporter.cli.wiring")
    _print_all_characters()
    return int(wiring.run_guarded(args.run, args))


def _print_all_characters() -> None:
    """Let output in an encoding that lacks a character, such as of a user's job name, show `?` instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser with the arguments of one command; None: with those of all, which imports all their modules."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, arguments, about, *examples in _COMMANDS:
        command = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog="\n".join(("examples:", *(f"  # {what}\n  {PROGRAM} {line}" for what, line in examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if chosen in (name, None):
            _load(arguments)(command)
            command.set_defaults(run=_load(run))
    return parser


def _load(target: str):  # type: ignore[no-untyped-def]  # noqa: ANN202  any function of the table
    module, name = target.split(":")
    return getattr(import_module(f"exporter.cli.{module}"), name)
