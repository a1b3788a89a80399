"""The thread that pushes, against a real receiver: an outage costs freshness alone."""

import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from exporter.cli.wiring import open_pusher
from exporter.config import ConfigError, OtlpSettings
from exporter.core.ledger import Ledger
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.otlp.pusher import Pusher
from exporter.web.app import LatestSnapshot
from tests.certificates import Authority
from tests.otlp.receiver import Push, Receiver
from tests.waiting import wait_for
from tests.worlds import device, first, held, reading, seen

PAID = "gpu_efficiency_paid_seconds_total"


class Node:
    """A node that works for a second at each tick, and its pusher."""

    def __init__(self, endpoint: str, **settings: object) -> None:
        self.ledger, self.ticks, self.problem = Ledger(), 0, ""
        advance(self.ledger, first([device()], [held()]))
        settings = {"timeout_seconds": 0.5, "endpoint": endpoint, **settings}
        pusher = open_pusher(OtlpSettings(**settings), self.latest)  # type: ignore[arg-type]
        assert pusher is not None
        self.pusher = pusher

    def latest(self) -> LatestSnapshot:
        taken = take_snapshot(self.ledger, DaemonMetadata(host="node7", pushes=self.pusher.counts()))
        return LatestSnapshot(taken, problem=self.problem)

    def tick(self) -> None:
        """Work for a second, then push."""
        self.ticks += 1
        advance(self.ledger, seen(self.ticks, reading(self.ticks - 1, self.ticks)))
        self.pusher.push()

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.pusher.counts())


def paid(push: Push) -> float:
    """Return the paid seconds of a push."""
    (value,) = push.samples(PAID).values()
    return value


@pytest.fixture(name="receiver")
def _receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    with receiver.listening():
        yield receiver


@pytest.fixture(name="nodes")
def _nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(endpoint: str, **settings: object) -> Node:
        made.append(Node(endpoint, **settings))
        return made[-1]

    yield make
    for node in made:
        node.pusher.close()


def test_the_receiver_goes_and_comes_back(nodes: Callable[..., Node], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    receiver = Receiver()
    with receiver.listening():
        node = nodes(receiver.url)
        node.tick()
    for _ in range(3):
        node.tick()
    with receiver.listening():
        node.tick()
        node.tick()
    assert [paid(push) for push in receiver.pushes] == [1, 5, 6], "each push has all that was counted, and none is kept"
    assert node.counts == {"accepted": 3, "failed": 3}
    (sample,) = (
        value
        for (_, labels), value in receiver.pushes[-1].samples("gpu_efficiency_otlp_pushes_total").items()
        if ("outcome", "failed") in labels
    )
    assert sample == 3
    gone, back = (record.getMessage() for record in caplog.records)
    assert gone.startswith(f"OTLP: {receiver.url} takes no metrics: ")
    assert "refused" in gone
    assert back == f"OTLP: {receiver.url} takes metrics again, after 3 failed pushes"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, b"out of bounds", {}), "400 Bad Request: out of bounds"),
        ((404, b"", {}), "404 Not Found"),
        ((503, b"no room", {"Retry-After": "60"}), "503 Service Unavailable: no room"),
        ((308, b"", {"Location": "https://elsewhere/"}), "it redirects to https://elsewhere/"),
    ],
)
def test_what_the_receiver_refuses_is_logged_with_its_reason(
    receiver: Receiver,
    nodes: Callable[..., Node],
    caplog: pytest.LogCaptureFixture,
    answer: tuple[int, bytes, dict[str, str]],
    reason: str,
) -> None:
    receiver.status, receiver.answer, receiver.answer_headers = answer
    node = nodes(receiver.url)
    node.tick()
    assert node.counts == {"accepted": 0, "failed": 1}
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_what_a_scrape_would_refuse_is_not_pushed_nor_is_a_snapshot_twice(
    receiver: Receiver, nodes: Callable[..., Node]
) -> None:
    node = nodes(receiver.url)
    node.tick()
    node.pusher.push()
    node.problem = "the newest sample is old"
    node.tick()
    assert node.counts == {"accepted": 1, "failed": 0}
    assert len(receiver.pushes) == 1


def test_headers_are_read_for_each_push(receiver: Receiver, nodes: Callable[..., Node], tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer old\nX-Scope-OrgID: gpus\n", encoding="utf-8")
    node = nodes(receiver.url, headers_file=f"{file}")
    node.tick()
    file.write_text("Authorization: Bearer new\n", encoding="utf-8")
    node.tick()
    file.unlink()
    node.tick()
    assert [seen["authorization"] for seen in receiver.headers] == ["Bearer old", "Bearer new"]
    assert receiver.headers[0]["x-scope-orgid"] == "gpus"
    assert node.counts == {"accepted": 2, "failed": 1}


def test_over_tls_only_a_receiver_of_the_named_authority_gets_anything(
    nodes: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the environment names another for all programs."""
    own, other = Authority(tmp_path, "own"), Authority(tmp_path, "other")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", f"{other.certificate}")
    headers = tmp_path / "headers"
    headers.write_text("Authorization: Bearer secret\n")
    for authority in (own, other):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue(f"receiver of {authority.certificate.stem}"))
        receiver = Receiver(context)
        with receiver.listening():
            node = nodes(receiver.url, ca_file=f"{own.certificate}", headers_file=f"{headers}", timeout_seconds=5)
            node.tick()
            sent = [each["authorization"] for each in receiver.headers]
        trusted = authority is own
        assert (node.counts["accepted"], node.counts["failed"]) == ((1, 0) if trusted else (0, 1))
        assert [paid(push) for push in receiver.pushes] == ([1] if trusted else [])
        assert sent == (["Bearer secret"] if trusted else [])
    (refused,) = (record.getMessage() for record in caplog.records)
    assert "takes no metrics" in refused
    assert "certificate verify failed" in refused


def test_variables_of_the_sdk_hold_for_what_is_not_set(
    receiver: Receiver, nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-scope-orgid=gpus")
    nodes(receiver.url).tick()
    assert receiver.headers[0]["x-scope-orgid"] == "gpus"


def test_the_thread_pushes_and_ends(receiver: Receiver, nodes: Callable[..., Node]) -> None:
    node = nodes(receiver.url, interval_seconds=1.0)
    node.pusher.start()
    node.ticks = 1
    advance(node.ledger, seen(1, reading(0, 1)))
    wait_for(lambda: receiver.pushes, "the thread has pushed")
    node.pusher.close()
    assert "otlp" not in {thread.name for thread in threading.enumerate()}


def test_a_fault_of_ours_counts_as_failed_and_the_thread_goes_on(
    receiver: Receiver, nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes(receiver.url)
    with monkeypatch.context() as patched, suppress(ZeroDivisionError):
        patched.setattr("exporter.otlp.pusher.encode", lambda *_: 1 / 0)
        node.tick()
    node.tick()
    assert node.counts == {"accepted": 1, "failed": 1}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"endpoint": "ftp://collector"}, r"otlp.endpoint: 'ftp://collector' is not like http://collector:4318"),
        ({"endpoint": "http://"}, "otlp.endpoint: 'http://' is not like"),
        ({"ca_file": "/nowhere"}, "otlp.ca_file: /nowhere: no certificate"),
        ({"headers_file": "/nowhere"}, "otlp.headers_file: /nowhere: cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings: dict[str, str], problem: str) -> None:
    whole = msgspec.convert({"endpoint": "collector:4318/v1/metrics"} | settings, OtlpSettings)
    with pytest.raises(ConfigError, match=problem):
        open_pusher(whole, lambda: LatestSnapshot(None))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_secret_goes_over_https_or_stays_on_this_host(tmp_path: Path, host: str) -> None:
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer x\n", encoding="utf-8")

    def opened(endpoint: str) -> Pusher | None:
        return open_pusher(OtlpSettings(endpoint=endpoint, headers_file=f"{file}"), lambda: LatestSnapshot(None))

    for endpoint in (f"http://{host}:4318/v1/metrics", "https://collector/v1/metrics"):
        assert opened(endpoint) is not None
    with pytest.raises(ConfigError, match="is not https"):
        opened("http://collector/v1/metrics")


def test_without_an_endpoint_nothing_is_loaded() -> None:
    assert open_pusher(OtlpSettings(), lambda: LatestSnapshot(None)) is None


def test_the_log_names_no_password_of_the_endpoint(
    receiver: Receiver, nodes: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 404
    nodes(receiver.url.replace("127", "ada:hunter2@127")).tick()
    assert "hunter2" not in caplog.text
