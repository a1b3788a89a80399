# ruff: noqa: INP001  a script beside the chart, not a package
"""Writes the choices of values.schema.json that come from the registries: `source` and `scheduler`.

The rest of that file is written by hand and stays as it is.

Usage, from the root of the project: python -m helm.build_schema
"""

import json
from pathlib import Path

from exporter.registry import SCHEDULERS, SOURCES

SCHEMA = Path(__file__).parent / "gpu-efficiency" / "values.schema.json"


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


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
