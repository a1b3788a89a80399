"""What `report --json` says, as JSON Schema: `docs/receipt.schema.json` is printed from it. Owns nothing else."""

import json

import msgspec

from exporter.receipt.comparing import Comparison
from exporter.receipt.model import Receipt


def schema_text() -> str:
    """Give the same as `docs/receipt.schema.json` has it."""
    (found, comparison), components = msgspec.json.schema_components(
        [Receipt, Comparison], ref_template="#/$defs/{name}"
    )
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What `gpu-efficiency report JOBID --json` and `report --compare JOBID JOBID --json` say",
        "anyOf": [found, comparison],
        "$defs": components,
    }
    return json.dumps(whole, indent=2) + "\n"
