"""The stored JSON Schema matches the output of `report --json`.

`python -m tests.report.test_schema` writes it.
"""

import json
from inspect import cleandoc
from pathlib import Path

import msgspec
from jsonschema_rs import Draft202012Validator

from exporter.report.analysis import compare_reports, estimate_changes
from exporter.report.model import JobReport, ReportComparison
from exporter.report.records import join_records
from tests.report.answers import receipt
from tests.report.stated import BEGIN, sample, serves, stated, trained

FILE = Path(__file__).parents[2] / "docs" / "receipt.schema.json"


def schema_text() -> str:
    """Return the JSON Schema of a report or a comparison."""
    (report, comparison), components = msgspec.json.schema_components(
        [JobReport, ReportComparison], ref_template="#/$defs/{name}"
    )
    for component in components.values():
        if "description" in component:  # docstrings, whose indentation is no longer kept from Python 3.13 on
            component["description"] = cleandoc(component["description"])
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What `gpu-efficiency report JOBID --json` and `report --compare JOBID JOBID --json` say",
        "anyOf": [report, comparison],
        "$defs": components,
    }
    return json.dumps(schema, indent=2) + "\n"


def test_the_file_is_the_schema() -> None:
    assert FILE.read_text(encoding="utf-8") == schema_text()


def test_what_is_said_is_as_the_schema_says() -> None:
    schema = Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))
    full = stated(training=trained(), service=serves(), samples=(sample(0, 0), sample(60, 7200)), happened={"hung": 1})
    found = join_records([full], job_id="7", at=BEGIN + 1e6)
    for each in (receipt(what_if=estimate_changes(receipt())), found, compare_reports(found, found)):
        schema.validate(json.loads(each.json()))
    assert not schema.is_valid({"who": {"job_id": "7"}})


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
