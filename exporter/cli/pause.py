"""Runs the commands `pause` and `resume`, which make a running daemon release the hardware counters for a profiler.

They write or remove the pause file, which the daemon reads before each sample. `pause` also checks that one listens.
"""

import argparse
import socket
import time
from pathlib import Path

from exporter.agent.pause import LONGEST_SECONDS, Pause, clock_time, write_pause
from exporter.cli.wiring import config_file_argument, configure, duration_argument, fail
from exporter.config import Config, ConfigError, split_address

_LONGEST_REASON = 200
"""Characters; the daemon logs no more."""


def pause(args: argparse.Namespace) -> int:
    """Stop the daemon's reads for a while; the time is unobserved, with reason "paused"."""
    config = configure(args)
    path = _pause_file(config)
    until = time.time() + args.seconds
    try:
        write_pause(path, Pause(until, args.reason))
    except OSError as err:
        return _not_permitted(path, "cannot be written", err)
    if _daemon_listens(config):
        print(f"paused until {clock_time(until)}, at the daemon's next sample: {path}; `gpu-efficiency resume` ends it")
    else:
        print(
            f"no daemon listens on {config.web.listen_address}, so nothing is paused now; one that starts before"
            f" {clock_time(until)} starts paused: {path}; `gpu-efficiency resume` ends it"
        )
    return 0


def resume(args: argparse.Namespace) -> int:
    """End a pause. Succeeds if there is none."""
    path = _pause_file(configure(args))
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        print(f"nothing was paused: there is no {path}")
        return 0
    except OSError as err:
        return _not_permitted(path, "cannot be removed", err)
    print(f"the pause is over at the daemon's next sample: {path} is removed")
    return 0


def _daemon_listens(config: Config) -> bool:
    """Whether something accepts connections where the daemon would."""
    host, port = split_address(config.web.listen_address)
    try:
        socket.create_connection((host or "127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _pause_file(config: Config) -> Path:
    file = config.sampling.pause_file
    if not file:
        raise ConfigError("sampling.pause_file is empty, so that the daemon cannot be paused: set it to a file")
    return Path(file)


def _not_permitted(path: Path, what: str, err: OSError) -> int:
    return fail(
        f"{path} {what}: {err.strerror or err}: run this as root or as the daemon's user, or have sampling.pause_file"
        " name a file that you may write, for the daemon too"
    )


def _pause_length(text: str) -> float:
    """Argument type: a duration from a second to the longest pause, in seconds; a unit is required."""
    seconds = duration_argument(1, bare_seconds=False)(text)
    if seconds > LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is longer than 24h: a pause that was forgotten must not blind a node for good; pause again when"
            " it ends"
        )
    return seconds


def _reason(text: str) -> str:
    if len(text) > _LONGEST_REASON:
        raise argparse.ArgumentTypeError(f"{len(text)} characters; {_LONGEST_REASON} at most")
    return text


def pause_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `pause`."""
    config_file_argument(command)
    command.add_argument(
        "--for", dest="seconds", type=_pause_length, default="30m", metavar="TIME", help="30s, 1h30m; default 30m"
    )
    command.add_argument("--reason", type=_reason, default="", metavar="TEXT", help="shown in the daemon's log")
