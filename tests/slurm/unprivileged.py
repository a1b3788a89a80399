"""Runs a node's daemon as an unprivileged user, as systemd/gpu-efficiency.service does, beside a real Slurm.

What the daemon reads is bind-mounted to places that everybody may read, because a checkout may lie below a home. The
unit itself is run in tests/e2e/test_systemd.py.
"""

import sys
from pathlib import Path

from tests.e2e.running import ROOT
from tests.nvml_stub.build import build

_START = """
set -e
mount -t tmpfs -o mode=755 tmpfs /mnt
for name in python packages tree library boards; do
  mkdir "/mnt/$name"
  mount --bind "$1" "/mnt/$name"
  shift
done
chmod 0755 /mnt/boards /mnt/library
shift
exec setpriv --reuid=nobody --regid=nogroup --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \\
  env LD_LIBRARY_PATH=/mnt/library:/mnt/python/lib PYTHONPATH=/mnt/tree:/mnt/packages \\
  NVML_STUB_SCRIPT=/mnt/boards/boards.txt GPU_EFFICIENCY_REPORTS_SOCKET= /mnt/python/bin/python3 "$@"
"""


def as_nobody(words: list[str], folder: Path) -> list[str]:
    """Return the command line that runs `words` as user nobody without capabilities; `folder` has the boards."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    places = [sys.base_prefix, packages, f"{ROOT}", f"{build()}", f"{folder}"]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "sh", *places, *words]
