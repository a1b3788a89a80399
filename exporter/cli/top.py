"""Runs the command `top`: shows GPUs, their jobs and their cost, live in a terminal or once as plain text."""

import argparse
import os
import shutil
import sys
import time
from importlib.util import find_spec

from exporter.cli.wiring import (
    FAILED,
    ca_file_argument,
    duration_argument,
    fail,
    parse_headers,
    tls_context,
    url_argument,
)
from exporter.config import ConfigError
from exporter.top.client import NodeAddressError, NodeTarget, parse_target, poll_once
from exporter.top.screen import ViewState, render_text
from exporter.top.view import ASCII, UNICODE, Glyphs, TopView, Trends, node_names

DEFAULT_URL = "http://127.0.0.1:19400"
_PIPED_COLUMNS = 160
"""Width of text that is not written to a terminal."""
_NO_TEXTUAL = (
    "the live view needs the package textual: pip install 'gpu-efficiency-exporter[top]'; --once does without it"
)


def top(args: argparse.Namespace) -> int:
    """Show the live view, or print it once."""
    endpoints = _endpoints(args)
    symbols = ASCII if args.ascii or not _supports_unicode() else UNICODE
    selection = ViewState(kind="jobs" if args.jobs else "gpus", window="last_hour" if args.hour else "last_5_minutes",
                  text=args.filter)  # fmt: skip
    why = "" if args.once else _why_not_live()
    if why == _NO_TEXTUAL:
        return fail(why)
    if args.once or why:
        if why:
            print(f"gpu-efficiency: {why}: this is one look, as --once gives it", file=sys.stderr)
        return _once(endpoints, selection, symbols)
    from exporter.top.app import run_live  # noqa: PLC0415  Textual is optional, and slow to import

    run_live(
        endpoints,
        selection,
        glyphs=symbols,
        interval=args.interval,
        coloured=not (args.no_color or os.environ.get("NO_COLOR")),
    )
    return 0


def _endpoints(args: argparse.Namespace) -> list[NodeTarget]:
    """Nodes in the order given, without duplicates."""
    given, verify = parse_headers(args.header), tls_context(args.ca_file)
    try:
        endpoints = [parse_target(url, headers=given, verify=verify) for url in args.url or [DEFAULT_URL]]
    except NodeAddressError as err:
        raise ConfigError(f"top: {err}") from err
    return list({endpoint.address: endpoint for endpoint in endpoints}.values())


def _why_not_live() -> str:
    """Return why the live view is not possible; empty: it is."""
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # Textual draws on the last
        return "standard input, output or error is no terminal"
    unnamed = "dumb" if find_spec("termios") else "console"  # Windows names none
    if os.environ.get("TERM", unnamed) in ("", "dumb", "unknown"):
        return "TERM names no terminal that can be drawn on"
    return "" if find_spec("textual") else _NO_TEXTUAL


def _supports_unicode() -> bool:
    return (sys.stdout.encoding or "").casefold().replace("-", "") == "utf8"


def _once(endpoints: list[NodeTarget], selection: ViewState, symbols: Glyphs) -> int:
    """Print the view once; return 1 if a node did not answer."""
    nodes = poll_once(endpoints)
    now = time.monotonic()
    view = TopView(
        nodes=nodes, now=now, wall=time.time(), trends=Trends(now, 1.0), glyphs=symbols,
        names=node_names(nodes, symbols),
    )  # fmt: skip
    width = shutil.get_terminal_size((_PIPED_COLUMNS, 1)).columns if sys.stdout.isatty() else _PIPED_COLUMNS
    sys.stdout.write(render_text(view, selection, width=width))
    failed = [node for node in nodes if node.problem]
    for node in failed:
        print(f"gpu-efficiency: {node.address}: {symbols.printable(node.problem)}", file=sys.stderr)
    return FAILED if failed else 0


def top_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `top`."""
    url_argument(command, "--url", action="append", help=f"a node; repeatable; {DEFAULT_URL}")
    command.add_argument("--header", action="append", default=[], metavar="LINE", help="HTTP header; @FILE: its lines")
    ca_file_argument(command, "nodes")
    command.add_argument("--once", action="store_true", help="print once as text; status 1 if a node is silent")
    command.add_argument("--jobs", action="store_true", help="show jobs first")
    command.add_argument("--hour", action="store_true", help="the last hour instead of the last 5 minutes")
    command.add_argument("--filter", default="", metavar="TEXT", help="only rows that contain all these words")
    command.add_argument(
        "--interval", type=duration_argument(0.5), default=2.0, metavar="TIME", help="time between two polls; 2s"
    )
    command.add_argument("--no-color", action="store_true", help="as NO_COLOR in the environment")
    command.add_argument("--ascii", action="store_true", help="only ASCII characters, as in locales without UTF-8")
