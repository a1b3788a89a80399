"""The directory of a cluster: its configuration, scripts, device nodes, and commands that log their use."""

import os
import secrets
import shlex
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.ports import free_port
from tests.shared_library import built
from tests.slurm.inside import Inside
from tests.slurm.plan import OWNER, Place, Plan, around_job, cgroup_conf, gres_conf, slurm_conf, slurmdbd_conf

_SCRIPTS = Path(__file__).resolve().parents[2] / "exporter/data"
_MAJOR = 60
"""For local use (Linux, devices.txt): no device is behind these nodes."""
UNIFIED = "unified.so"
"""In the directory, if the plan has control groups v2: see unified/unified.c."""
_COMMANDS = ("scontrol", "sinfo", "slurmd", "squeue")


def lay_out(directory: Path, plan: Plan, nodes: Sequence[str], inside: Inside) -> None:
    """Create it for these nodes; `directory` is as the host sees it."""
    directory.chmod(0o755)
    for name in ("etc", "log", "state", "spool", "munge", "dev", "given", "jobs", "out", "bin"):
        (directory / name).mkdir()
    (directory / "out").chmod(0o777)
    inner = inside.seen(directory)
    if plan.unified:
        shutil.copy2(built(Path(__file__).with_name("unified"), UNIFIED) / UNIFIED, directory)
    host = socket.gethostname().partition(".")[0]
    ports = {node: free_port() for node in nodes}
    _configure(directory / "etc", plan, Place(inner, host, free_port(), free_port(), ports))
    for number in range(plan.gpus):
        os.mknod(directory / f"dev/nvidia{number}", 0o020666, os.makedev(_MAJOR, number))
    for node in nodes:
        (directory / "spool" / node).mkdir()
        (directory / "jobs" / node).mkdir()
        preload = f"{inner}/{UNIFIED}" if plan.unified else ""
        _lay_out_commands(directory / "bin" / node, inside, preload, conf=directory / "etc/slurm.conf")
    (directory / "munge/key").write_bytes(secrets.token_bytes(1024))
    (directory / "munge/key").chmod(0o400)
    logs = [f"log/{name}.log" for name in ("slurmctld", "slurmdbd")]
    for log in logs:
        (directory / log).touch()
    inside.run("chown", "-R", "munge:munge", f"{inner}/munge")
    inside.run("chmod", "711", f"{inner}/munge")
    inside.run("chown", OWNER, *(f"{inner}/{name}" for name in ("state", "etc/slurmdbd.conf", *logs)))


def _configure(etc: Path, plan: Plan, place: Place) -> None:
    (etc / "slurm.conf").write_text(slurm_conf(plan, place))
    (etc / "slurmdbd.conf").write_text(slurmdbd_conf(place))
    (etc / "slurmdbd.conf").chmod(0o600)
    (etc / "gres.conf").write_text(gres_conf(plan, place))
    (etc / "cgroup.conf").write_text(cgroup_conf(plan))
    for script in ("prolog", "epilog"):
        (etc / f"{script}.d").mkdir()
        for name, text in around_job(plan, place, script).items():
            _program(etc / f"{script}.d" / name, text)
        shutil.copy2(_SCRIPTS / f"slurm-{script}.sh", etc)


def _lay_out_commands(folder: Path, inside: Inside, preload: str, *, conf: Path) -> None:
    """`preload`: of slurmd, which then is confined as systemd/gpu-efficiency.service confines the daemon's commands."""
    folder.mkdir()
    (folder / "asked").touch()
    for name in _COMMANDS:
        slurmd = ("env", f"LD_PRELOAD={preload}", inside.path(name))
        words = inside.confined(*slurmd) if preload and name == "slurmd" else inside.words(inside.path(name))
        note = f'printf "%s\\n" "{name} $*" >>{folder}/asked'
        known = f"export SLURM_CONF=${{SLURM_CONF:-{conf}}}"
        _program(folder / name, f'#!/bin/sh\n{note}\n{known}\nexec {shlex.join(words)} "$@"\n')


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
