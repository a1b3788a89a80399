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
command={inner}/report
{more}
"""
_REPORT = """#!/bin/sh
export GPU_EFFICIENCY_HISTORY_FILE={stores}/$SLURMD_NODENAME.db
export GPU_EFFICIENCY_WEB_LISTEN_ADDRESS=$(cat {stores}/$SLURMD_NODENAME.address)
exec {enter} {python} -m exporter "$@" 2>>{inner}/../log/receipts.log
"""
_HERE = "nsenter --target {pid} --mount --root --wd"
"""Runs a command of this machine from the root of another Slurm (nsenter(1))."""


def install(rig: SlurmRig, places: str, *, stores: Path, more: str = "") -> None:
    """Install it for all further jobs; `more` is added to receipts.conf. Stores are named after their nodes."""
    etc = rig.directory / "etc"
    enter = "" if rig.plan.root == Path("/") else _HERE.format(pid=os.getpid())
    known = {"inner": rig.inside.seen(etc), "places": places, "stores": stores, "enter": enter, "more": more}
    known["python"] = sys.executable
    shutil.copy2(_SCRIPT, etc)
    (etc / "receipts.conf").write_text(_CONF.format(**known))
    for path, text in ((etc / "report", _REPORT), (etc / "epilog.d/60-receipt.sh", _WRAPPER)):
        path.write_text(text.format(**known))
        path.chmod(0o755)
