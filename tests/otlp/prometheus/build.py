"""Builds Prometheus 3 from its Go module: Debian's, in all releases, is built without the receiver of OTLP.

go.mod beside this file pins its version and go.sum the hashes; the program lies in `.cache/prometheus-otlp`. Service
discovery is left out, which would need five times the code. Needs Go (go.dev) on the PATH.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(__file__).resolve().parents[3] / ".cache" / "prometheus-otlp"
PROGRAM, _STAMP = FOLDER / "prometheus", FOLDER / ".built"
_PACKAGE = "github.com/prometheus/prometheus/cmd/prometheus"


def build() -> None:
    """Build the program unless it is there. Raises CalledProcessError, or SystemExit without Go."""
    files = (HERE / "go.mod", HERE / "go.sum")
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    if _STAMP.is_file() and _STAMP.read_text() == digest:
        return
    go = shutil.which("go")
    if go is None:
        sys.exit("Prometheus with a receiver of OTLP cannot be built without Go: install it from go.dev/doc/install")
    FOLDER.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"Building {_PACKAGE} ...\n")
    sys.stdout.flush()
    flags = f"-s -w -X github.com/prometheus/common/version.Version={version()}"
    subprocess.run(
        [go, "build", "-p", "2", "-tags", "remove_all_sd", "-ldflags", flags, "-o", PROGRAM, _PACKAGE],
        cwd=HERE,
        check=True,
    )
    _STAMP.write_text(digest)


def version() -> str:
    """Return Prometheus' version, which its module has as v0.316.0 for 3.16.0."""
    found = re.search(r"github.com/prometheus/prometheus v0\.(\d)(\d\d)\.(\d+)", (HERE / "go.mod").read_text())
    assert found, "go.mod requires no Prometheus"
    major, minor, patch = map(int, found.groups())
    return f"{major}.{minor}.{patch}"
