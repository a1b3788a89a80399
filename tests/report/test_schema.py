"""The stored JSON Schema matches the output of `report --json`."""

import json
from pathlib import Path

from jsonschema_rs import Draft202012Validator

from exporter.report.analysis import compare_reports, estimate_changes
from exporter.report.model import report_schema_text
from exporter.report.records import join_records
from tests.report.answers import receipt
from tests.report.stated import BEGIN, sample, serves, stated, trained

FILE = Path(__file__).parents[2] / "docs" / "receipt.schema.json"


def test_the_file_is_the_schema() -> None:
    assert FILE.read_text(encoding="utf-8") == report_schema_text()


def test_what_is_said_is_as_the_schema_says() -> None:
    schema = Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))
    full = stated(training=trained(), service=serves(), samples=(sample(0, 0), sample(60, 7200)), happened={"hung": 1})
    found = join_records([full], job_id="7", at=BEGIN + 1e6)
    for each in (receipt(what_if=estimate_changes(receipt())), found, compare_reports(found, found)):
        schema.validate(json.loads(each.json()))
    assert not schema.is_valid({"who": {"job_id": "7"}})
