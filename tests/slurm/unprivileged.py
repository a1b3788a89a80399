"""Runs a node's daemon as an unprivileged user, as systemd/gpu-efficiency.service does, beside a real Slurm.

What the daemon reads is bind-mounted to places that everybody may read, because a checkout may lie below a home. The
unit itself is run in tests/e2e/test_systemd.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.running import ROOT
from tests.nvml_stub.build import build
from tests.slurm.rig import SlurmRig

_START = """
set -e
mount -t tmpfs -o mode=755 tmpfs /mnt
for name in python packages tree library boards slurm; do
  mkdir "/mnt/$name"
  mount --bind "$1" "/mnt/$name"
  shift
done
chmod 0755 /mnt/boards /mnt/library
if [ -n "$1" ]; then  # another version of Slurm: its programs before the machine's own, and the /tmp of its cluster
  mount --bind /mnt/slurm/tmp /tmp
  mount -t overlay -o lowerdir=/mnt/slurm/usr:/usr overlay /usr
fi
shift 2
exec setpriv --reuid=nobody --regid=nogroup --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \\
  env LD_LIBRARY_PATH=/mnt/library:/mnt/python/lib PYTHONPATH=/mnt/tree:/mnt/packages TMPDIR=/tmp \\
  NVML_STUB_SCRIPT=/mnt/boards/boards.txt GPU_EFFICIENCY_REPORTS_SOCKET= /mnt/python/bin/python3 "$@"
"""
_COMMAND = """#!/bin/sh
printf "%s\\n" "{name} $*" >>{asked}
export SLURM_CONF=${{SLURM_CONF:-{conf}}}
exec {program} "$@"
"""


class Unprivileged:
    """What a program needs to run as nobody beside a rig: call it with a command line and the folder of its boards."""

    def __init__(self, rig: SlurmRig, *commands: str) -> None:
        """`commands`: of Slurm, which it runs; each use is logged in `asked`."""
        self._rig = rig
        folder = rig.directory / "bin/nobody"
        folder.mkdir()
        self.bin_dir, self.conf = rig.inside.seen(folder), rig.inside.seen(rig.conf)
        """As it sees them."""
        self._asked = folder / "asked"
        self._asked.touch()
        self._asked.chmod(0o666)
        for name in commands:
            program = rig.inside.path(name)
            known = {"name": name, "asked": f"{self.bin_dir}/asked", "conf": self.conf, "program": program}
            (folder / name).write_text(_COMMAND.format(**known))
            (folder / name).chmod(0o755)

    def __call__(self, words: Sequence[str], folder: Path) -> list[str]:
        """Return the command line that runs `words` as user nobody without capabilities."""
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        root = self._rig.plan.root
        places = [sys.base_prefix, packages, f"{ROOT}", f"{build()}", f"{folder}", f"{root}"]
        more = ["" if root == Path("/") else "yes"]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "sh", *places, *more, *words]

    def asked(self) -> list[str]:
        """Return the command lines of Slurm that it has run."""
        return self._asked.read_text(encoding="utf-8").splitlines()

    def settings(self, node: str) -> dict[str, str]:
        """Return what a daemon of that node must be told."""
        seen = self._rig.inside.seen
        return {
            "SLURM_CONF": self.conf,
            "SLURM_BIN_DIR": self.bin_dir,
            "SLURM_SPOOL_DIR": seen(self._rig.spool(node)),
            "SLURM_MAPPING_DIR": seen(self._rig.mapping(node)),
        }
