# ruff: noqa: INP001  a script beside the chart, not a package
"""Writes what the chart has from the registries: choices in values.schema.json, and the default ports of engines.

The rest of the schema is written by hand and stays as it is.

Usage, from the root of the project: python -m helm.build_schema
"""

import json
from pathlib import Path

from exporter.registry import SCHEDULERS, SOURCES, engine_ports

CHART = Path(__file__).parent / "gpu-efficiency"
SCHEMA = CHART / "values.schema.json"
ENGINE_PORTS = CHART / "files" / "engine-ports.json"
"""Read by the network policy."""


def schema() -> str:
    """The text of the file."""
    tree = json.loads(SCHEMA.read_text(encoding="utf-8"))
    choices = {
        "source": ["auto", *SOURCES],
        "scheduler": [name for name, entry in SCHEDULERS.items() if entry.in_pods],
    }
    for key, names in choices.items():
        tree["properties"][key]["enum"] = names
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def ports() -> str:
    """The text of the list of ports."""
    return json.dumps({"ports": engine_ports()}) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
    ENGINE_PORTS.write_text(ports(), encoding="utf-8")
