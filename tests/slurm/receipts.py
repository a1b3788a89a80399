"""Installs the epilog that writes job reports in a rig, with this project's own command.

Each node's store is a file of its own, because the nodes of a rig share one machine; the address of its daemon is in a
file beside it.
"""

import os
import shutil
import sys
from pathlib import Path

from tests.slurm.rig import SlurmRig

_SCRIPT = Path(__file__).resolve().parents[2] / "exporter/data/slurm-receipt.sh"
_WRAPPER = """#!/bin/sh
export RECEIPT_CONF={inner}/receipts.conf RECEIPT_LOCKS={inner}/locks
exec {inner}/slurm-receipt.sh
"""
_CONF = """
places="{places}"
config=
command={command}
{more}
"""
_REPORT = """#!/bin/sh
export GPU_EFFICIENCY_HISTORY_FILE={stores}/$SLURMD_NODENAME.db
export GPU_EFFICIENCY_WEB_LISTEN_ADDRESS=$(cat {stores}/$SLURMD_NODENAME.address)
exec {python} -m exporter "$@" 2>>{etc}/../log/receipts.log
"""
_OUTSIDE = """#!/bin/sh
exec nsenter --target {pid} --mount --root --wd {etc}/report "$@"
"""
"""Runs this machine's command from the root of another Slurm (nsenter(1))."""


def install(rig: SlurmRig, places: str, *, stores: Path, more: str = "") -> None:
    """Install it for all further jobs; `more` is added to receipts.conf. Stores are named after their nodes."""
    etc = rig.directory / "etc"
    inner = rig.inside.seen(etc)
    known = {"etc": etc, "inner": inner, "places": places, "stores": stores, "python": sys.executable, "more": more}
    known |= {"pid": os.getpid(), "command": f"{inner}/{'report' if rig.plan.root == Path('/') else 'outside'}"}
    shutil.copy2(_SCRIPT, etc)
    (etc / "receipts.conf").write_text(_CONF.format(**known))
    scripts = {"report": _REPORT, "outside": _OUTSIDE, "epilog.d/60-receipt.sh": _WRAPPER}
    for name, text in scripts.items():
        (etc / name).write_text(text.format(**known))
        (etc / name).chmod(0o755)
