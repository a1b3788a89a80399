"""Runs `slurmd -G`, which lists this node's GPUs in Slurm's order, and keeps it away from control groups.

slurmd first takes a control group for itself. With control groups v2 that fails for an unprivileged user, and no list
is printed (run: 22.05, 24.11 and 26.05). So it gets the site's configuration with a cgroup.conf that has it do nothing.
A dynamic node is in no configuration: its slurmd was started with its GPUs, `slurmd -Z --conf "Gres=..."`.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from exporter.files import readable_part
from exporter.procfs import command_name, read_bytes, user_id
from exporter.schedulers.slurm.client import Commands

SECONDS = 30.0
"""Timeout of one command: AutoDetect in gres.conf first initializes the driver's library."""
_LISTED = "Gres Name="
_CGROUP_PLUGINS = ("disabled", "cgroup/v1")
"""CgroupPlugin in cgroup.conf(5). 22.05 does not know the first; the second does nothing where v1 is not mounted.

A version that knows neither has the site's own cgroup.conf.
"""
_CGROUP_CONF = "cgroup.conf"
_DYNAMIC = re.compile(r"-[A-Za-z]*Z[A-Za-z]*")
"""The option -Z (slurmd(8)), perhaps with other letters."""
_MOST_BYTES = 64 * 1024


def list_gpus(commands: Commands, node: str, *, proc: Path = Path("/proc")) -> str:
    """Return what `slurmd -G` prints to standard error, whatever its status. Raises SlurmUnavailableError.

    It sends no RPC, but needs munge, as all commands do. /proc is searched only for a node that slurm.conf lacks.
    """
    printed = _listed(commands, ("-N", node, "-G"))
    for options in () if _LISTED in printed else _dynamic_options(proc, node):
        printed += _listed(commands, ("-N", node, *options, "-G"))
    return printed


def _dynamic_options(proc: Path, node: str) -> Iterator[tuple[str, ...]]:
    """Yield the options with which a slurmd of this name was started here as a dynamic node."""
    for folder in readable_part(proc.glob("[0-9]*")):
        if command_name(folder) != "slurmd" or user_id(folder) not in {0, os.geteuid()}:
            continue
        try:
            words = read_bytes(folder / "cmdline", _MOST_BYTES).decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(map(_DYNAMIC.fullmatch, words)) and _value(words, "-N") in {"", node}:
            yield "-Z", "--conf", _value(words, "--conf")


def _value(words: list[str], option: str) -> str:
    """Return the value of an option, in this word or the next; empty if there is none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option or word.startswith(f"{option}="):
            return word[len(option) + 1 :] or following
    return ""


def _listed(commands: Commands, arguments: tuple[str, ...]) -> str:
    """Return what slurmd prints with the first cgroup.conf that lets it list anything, the site's last, or with all."""
    printed = ""
    for plugin in (*_CGROUP_PLUGINS, "") if commands.conf else ("",):
        printed += _printed(commands, arguments, plugin)
        if _LISTED in printed:
            break
    return printed


def _printed(commands: Commands, arguments: tuple[str, ...], plugin: str) -> str:
    """Return what slurmd prints with another CgroupPlugin, or as it is if `plugin` is empty or no copy can be made."""
    if not plugin:
        return commands.run("slurmd", *arguments, timeout=SECONDS).stderr
    try:
        with TemporaryDirectory(prefix="gpu-efficiency-", ignore_cleanup_errors=True) as folder:
            conf = _copy(Path(commands.conf), Path(folder), plugin)
            return commands.run("slurmd", *arguments, conf=conf, timeout=SECONDS).stderr
    except OSError:
        return _printed(commands, arguments, "")


def _copy(conf: Path, folder: Path, plugin: str) -> str:
    """Make `folder` that of slurm.conf, by links, with another cgroup.conf; return slurm.conf there."""
    for path in conf.absolute().parent.iterdir():
        if path.name != _CGROUP_CONF:
            (folder / path.name).symlink_to(path)
    (folder / _CGROUP_CONF).write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
    return f"{folder / conf.name}"
