"""Tests the publisher of job reports that the configuration selects."""

import logging
from pathlib import Path

import pytest

from exporter.cli.serve import job_report_writer, short_report
from exporter.config import Config, ReceiptSettings
from exporter.core.job_record import JobRecord
from exporter.core.model import Owner
from exporter.registry import KubernetesSettings
from tests.kubernetes.api import ApiServer
from tests.kubernetes.cluster import pod_object
from tests.waiting import wait_for

END = 1_780_000_000.0
OWNER = Owner("ml/job/train", "kubernetes", namespace="ml", pod="train-0", name="train", kind="job", nodes=2)
STATEMENT = JobRecord(
    node="node-1",
    life="a",
    owner=OWNER,
    start=END - 3600,
    end=END,
    running=False,
    paid=2 * 3600 * 10**9,
    parts={"useful": 3600 * 10**9, "data_wait": 3600 * 10**9},
    energy={},
    gpus={"GPU-0": "0", "GPU-1": "1"},
    whole_gpus=2.0,
)


def test_the_words_are_the_receipts_own_line() -> None:
    said = short_report(STATEMENT)
    assert said.startswith("job ml/job/train: ")
    assert "2.00 GPU-hours" in said
    assert "1 of 2 nodes" in said, "it is a part"


def test_by_default_nothing_is_placed() -> None:
    with job_report_writer(Config(), "node-1") as place:
        place(STATEMENT)


def test_without_an_api_server_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(receipts=ReceiptSettings(kubernetes="event"), kubernetes=KubernetesSettings(api_url=""))
    with job_report_writer(config, "node-1") as place:
        place(STATEMENT)
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "receipts.kubernetes = 'event', but no API server: no job report is published"
    ]


def test_an_event_is_made_of_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token of a")
    server = ApiServer(tmp_path)
    server.token, server.writable = "token of a", True
    server.has(pod_object("train-0"))
    known = KubernetesSettings(api_url=server.url, token_file=f"{tmp_path / 'token'}", ca_file=f"{server.ca}")
    try:
        with job_report_writer(
            Config(receipts=ReceiptSettings(kubernetes="event"), kubernetes=known), "node-1"
        ) as place:
            place(STATEMENT)
            wait_for(lambda: server.written, "it is written")
    finally:
        server.stop()
    ((path, event),) = server.written
    assert path == "POST /api/v1/namespaces/ml/events"
    assert event["message"] == short_report(STATEMENT)
    assert event["source"]["host"] == "node-1"
