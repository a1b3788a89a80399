"""Runs `slurmd -G`, which lists this node's GPUs in Slurm's order, and keeps it away from control groups.

slurmd first takes a control group for itself. With control groups v2 that fails for an unprivileged user, and no list
is printed (run: 22.05, 24.11 and 26.05). So it gets the site's configuration with a cgroup.conf that has it do nothing.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from exporter.schedulers.slurm.client import Commands

SECONDS = 30.0
"""Timeout of one command: AutoDetect in gres.conf first initializes the driver's library."""
_LISTED = "Gres Name="
_CGROUP_PLUGINS = ("disabled", "cgroup/v1")
"""CgroupPlugin in cgroup.conf(5). 22.05 does not know the first; the second does nothing where v1 is not mounted."""
_CGROUP_CONF = "cgroup.conf"


def list_gpus(commands: Commands, node: str) -> str:
    """Return what `slurmd -G` prints to standard error, whatever its status. Raises SlurmUnavailableError.

    It sends no RPC, but needs munge, as all commands do.
    """
    printed = ""
    for plugin in _CGROUP_PLUGINS:
        printed += _printed(commands, node, plugin)
        if _LISTED in printed:
            break
    return printed


def _printed(commands: Commands, node: str, plugin: str) -> str:
    try:
        with TemporaryDirectory(prefix="gpu-efficiency-", ignore_cleanup_errors=True) as folder:
            conf = _copy(Path(commands.conf), Path(folder), plugin) if commands.conf else ""
            return commands.run("slurmd", "-N", node, "-G", conf=conf, timeout=SECONDS).stderr
    except OSError:  # no place for a copy: as it is
        return commands.run("slurmd", "-N", node, "-G", timeout=SECONDS).stderr


def _copy(conf: Path, folder: Path, plugin: str) -> str:
    """Make `folder` that of slurm.conf, by links, with another cgroup.conf; return slurm.conf there."""
    for path in conf.absolute().parent.iterdir():
        if path.name != _CGROUP_CONF:
            (folder / path.name).symlink_to(path)
    (folder / _CGROUP_CONF).write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
    return f"{folder / conf.name}"
