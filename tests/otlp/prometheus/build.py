"""Builds Prometheus 3 from its Go module: Debian's, in all releases, is built without the receiver of OTLP.

go.mod beside this file pins its version and go.sum the hashes; the program lies in `.cache/prometheus-otlp`. Service
discovery is left out, which would need five times the code.
"""

import re
from pathlib import Path

from tests import go_module

HERE = Path(__file__).parent
PROGRAM = go_module.ROOT / ".cache" / "prometheus-otlp" / "prometheus"


def build() -> None:
    """Build the program unless it is there."""
    flags = f"-s -w -X github.com/prometheus/common/version.Version={version()}"
    package = "github.com/prometheus/prometheus/cmd/prometheus"
    go_module.build(HERE, package, PROGRAM, "-tags", "remove_all_sd", "-ldflags", flags)


def version() -> str:
    """Return Prometheus' version, which its module has as v0.316.0 for 3.16.0."""
    found = re.search(r"github.com/prometheus/prometheus v0\.(\d)(\d\d)\.(\d+)", (HERE / "go.mod").read_text())
    assert found, "go.mod requires no Prometheus"
    major, minor, patch = map(int, found.groups())
    return f"{major}.{minor}.{patch}"
