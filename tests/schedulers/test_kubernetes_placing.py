"""Job reports as Events and annotations: the requests, their number, and the handling of errors."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from exporter.core.job_record import JobRecord
from exporter.core.model import Owner
from exporter.schedulers.kubernetes.api import ApiServer as Access
from exporter.schedulers.kubernetes.publisher import _MOST_WAITING, ANNOTATION, Destination, JobReportPublisher
from exporter.schedulers.privacy import MaskedScheduler, UserMask
from tests.kubernetes import schemas
from tests.kubernetes.api import VERSION, ApiServer, Json
from tests.kubernetes.cluster import PACE, pod_object, uid_of
from tests.rigs import FakeScheduler
from tests.waiting import wait_for
from tests.worlds import held

pytestmark = pytest.mark.slow

POD = "train-0"
OWNER = Owner("ml/job/train", "kubernetes", namespace="ml", pod=POD, name="train", kind="job")
END = 1_780_000_000.0
STATEMENT = JobRecord(
    node="node-1", life="a", owner=OWNER, start=END - 60, end=END, running=False, paid=1, parts={}, energy={}
)
Started = Callable[..., JobReportPublisher]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    server.writable = True
    yield server
    server.stop()


@pytest.fixture
def begun(api: ApiServer, tmp_path: Path) -> Iterator[Started]:
    token = tmp_path / "token"
    token.write_text(api.token)
    every: list[JobReportPublisher] = []

    def start(
        what: Destination = "event",
        say: Callable[[JobRecord], str] = lambda one: f"job {one.owner.job_id}",
        **more: Any,
    ) -> JobReportPublisher:
        access = Access(api.url, f"{token}", f"{api.ca}", PACE)
        every.append(JobReportPublisher(access, what, node="node-1", render=say, between=0.0, **more))
        return every[-1]

    yield start
    for each in every:
        each.close()


def done(placing: JobReportPublisher, *statements: JobRecord) -> tuple[int, int, int]:
    """Publish these and wait until all are written, failed or dropped."""
    for statement in statements:
        placing.publish(statement)
    wait_for(lambda: placing._queue.unfinished_tasks == 0, "nothing waits")
    return placing.published, placing.failed, placing.dropped


def of_pod(name: str) -> JobRecord:
    return structs.replace(STATEMENT, owner=structs.replace(OWNER, pod=name))


def events(api: ApiServer) -> list[Json]:
    return [thing for path, thing in api.written if path == "POST /api/v1/namespaces/ml/events"]


def test_an_event_names_the_pod_and_is_what_kubernetes_takes(api: ApiServer, begun: Started) -> None:
    api.has(pod_object(POD))
    assert done(begun(), STATEMENT) == (1, 0, 0)
    (event,) = events(api)
    schemas.validate(event, VERSION, strict=True)
    about = {"apiVersion": "v1", "kind": "Pod", "name": POD, "namespace": "ml", "uid": uid_of(f"ml/{POD}")}
    assert event["involvedObject"] == about
    assert event["metadata"]["namespace"] == "ml"
    assert (event["reason"], event["type"], event["message"]) == ("GPUEfficiency", "Normal", "job ml/job/train")
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-05-28T20:26:40Z"
    assert event["source"] == {"component": "gpu-efficiency", "host": "node-1"}


@pytest.mark.parametrize("drop", [False, True])
def test_the_pod_of_a_masked_owner_is_addressed_by_its_true_name(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture, *, drop: bool
) -> None:
    """A notebook in the namespace of its user: what is written about it names the user only in its place."""
    mask = UserMask(b"k" * 32, drop=drop)
    pod = "jupyter-alice"
    alice = Owner(f"alice/notebook/{pod}", "kubernetes", "alice", kind="notebook", namespace="alice", pod=pod, name=pod)
    state = MaskedScheduler(FakeScheduler(held(owner=alice)), mask).poll(0, (), ())
    assert state is not None
    masked = state.allocations[0].owner
    assert "alice" not in repr(masked)
    api.has(pod_object("jupyter-alice", namespace="alice"))
    record = structs.replace(STATEMENT, owner=masked)
    assert done(begun("event", pod_of=mask.pod), record) == (1, 0, 0)
    assert done(begun("annotation", pod_of=mask.pod), record) == (1, 0, 0)
    (posted, event), (patched, change) = api.written
    assert posted == "POST /api/v1/namespaces/alice/events"
    assert patched == "PATCH /api/v1/namespaces/alice/pods/jupyter-alice"
    uid = uid_of("alice/jupyter-alice")
    about = {"apiVersion": "v1", "kind": "Pod", "name": "jupyter-alice", "namespace": "alice", "uid": uid}
    assert event["involvedObject"] == about
    assert "alice" not in event["message"] + change["metadata"]["annotations"][ANNOTATION]
    known_before = structs.replace(STATEMENT, owner=structs.replace(masked, job_id="of-an-earlier-process"))
    assert done(begun("event", pod_of=mask.pod), known_before) == (0, 1, 0)
    assert len(api.written) == 2
    assert "of-an-earlier-process: its pod's true name is unknown" in caplog.text
    assert "alice" not in caplog.text


def test_a_pod_that_is_gone_still_has_its_event(api: ApiServer, begun: Started) -> None:
    assert done(begun(), STATEMENT) == (1, 0, 0)
    assert "uid" not in events(api)[0]["involvedObject"]


def test_the_next_pod_of_a_name_is_another(api: ApiServer, begun: Started) -> None:
    """A StatefulSet's next pod: created after the job's end."""
    api.has(pod_object(POD, creationTimestamp="2026-05-28T20:26:41Z"))
    assert done(begun(), STATEMENT) == (1, 0, 0)
    assert "uid" not in events(api)[0]["involvedObject"]
    assert done(begun("annotation"), STATEMENT) == (0, 1, 0)
    assert len(api.written) == 1


def test_an_annotation_goes_onto_this_pod_and_nothing_else_is_changed(api: ApiServer, begun: Started) -> None:
    api.has(pod_object(POD))
    assert done(begun("annotation"), STATEMENT) == (1, 0, 0)
    patch = {"metadata": {"uid": uid_of(f"ml/{POD}"), "annotations": {ANNOTATION: "job ml/job/train"}}}
    assert api.written == [(f"PATCH /api/v1/namespaces/ml/pods/{POD}", patch)]


def test_a_pod_that_is_gone_has_no_annotation_which_is_counted(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    assert done(begun("annotation"), STATEMENT) == (0, 1, 0)
    assert not api.written
    assert "pod ml/train-0 is gone" in caplog.text


def test_what_is_tried_again_is_there_once(api: ApiServer, begun: Started) -> None:
    """The response to the first try was lost: the Event exists, and the server answers 409."""
    api.answers += [500, 429]
    placing = begun()
    assert done(placing, STATEMENT) == (1, 0, 0)
    assert len(events(api)) == 1
    assert done(placing, STATEMENT) == (2, 0, 0)
    assert len(events(api)) == 1


def test_two_lives_and_two_jobs_are_events_of_their_own(api: ApiServer, begun: Started) -> None:
    other = structs.replace(STATEMENT, life="b")
    later = structs.replace(STATEMENT, start=END - 1)
    assert done(begun(), STATEMENT, other, later) == (3, 0, 0)
    assert len({event["metadata"]["name"] for event in events(api)}) == 3


@pytest.mark.parametrize(
    ("pod", "begins"), [("a" * 253, "a" * 230 + "."), ("a" * 229 + "-" + "b" * 23, "a" * 229 + ".")]
)
def test_a_long_name_is_cut_to_what_a_name_may_be(api: ApiServer, begun: Started, pod: str, begins: str) -> None:
    done(begun(), of_pod(pod))
    (event,) = events(api)
    assert event["metadata"]["name"].startswith(begins)
    assert len(event["metadata"]["name"]) <= 253
    assert event["involvedObject"]["name"] == pod


def test_what_is_said_is_one_line_of_1024_bytes(api: ApiServer, begun: Started) -> None:
    done(begun(say=lambda _: "a\n\tb" + "é" * 2000), STATEMENT)
    said = events(api)[0]["message"]
    assert said.startswith("a bé")
    assert len(said.encode()) == 1023, "no half of a character"


@pytest.mark.parametrize(
    "other",
    [
        {"running": True},
        {"owner": structs.replace(OWNER, scheduler="slurm")},
        {"owner": structs.replace(OWNER, pod="")},
        {"owner": structs.replace(OWNER, namespace="")},
    ],
    ids=["running", "slurm", "no pod", "no namespace"],
)
def test_who_has_no_pod_has_no_receipt_on_one(api: ApiServer, begun: Started, other: dict[str, Any]) -> None:
    assert done(begun(), structs.replace(STATEMENT, **other)) == (0, 0, 0)
    assert not api.requests


def test_a_refusal_says_which_right_and_is_told_once(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    api.writable = False
    placing = begun()
    assert done(placing, STATEMENT, of_pod("b")) == (0, 2, 0)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "may not create events: the chart's receipts.kubernetes grants it" in told[0].message
    api.writable = True
    assert done(placing, STATEMENT) == (1, 2, 0)
    api.writable = False
    assert done(placing, of_pod("c")) == (1, 3, 0)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2, "it had been well"


def test_annotations_have_a_right_of_their_own(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    api.has(pod_object(POD)).writable = False
    assert done(begun("annotation"), STATEMENT) == (0, 1, 0)
    assert "may not patch pods" in caplog.text


def test_nobody_waits_for_an_api_server_that_says_nothing(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    """Sampling continues: reports beyond the queue are dropped and counted."""
    api.deaf = True
    placing = begun()
    for number in range(_MOST_WAITING + 20):
        placing.publish(of_pod(f"p{number}"))
    assert placing.dropped >= 19
    assert "is dropped" in caplog.text
    api.stop()


def test_a_server_that_is_away_is_tried_a_few_times(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    placing = begun()
    api.stop()
    assert done(placing, STATEMENT) == (0, 1, 0)
    assert api.url in caplog.text
    api.start()
    assert done(placing, STATEMENT) == (1, 1, 0)


def test_words_that_cannot_be_found_cost_one_receipt(api: ApiServer, begun: Started) -> None:
    def say(statement: JobRecord) -> str:
        if statement.owner.pod == POD:
            raise ValueError("no such thing")
        return "good"

    assert done(begun(say=say), STATEMENT, of_pod("b")) == (1, 1, 0)
    assert events(api)[0]["message"] == "good"


def test_a_certificate_that_is_not_there_is_named(
    api: ApiServer, begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    api.ca.unlink()
    assert done(begun(), STATEMENT) == (0, 1, 0)
    assert f"{api.ca} cannot be used as the API server's CA" in caplog.text


# ssl.SSLContext.wrap_socket of CPython 3.11 does not close a socket that its peer has reset before the handshake.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
def test_it_ends_with_receipts_that_wait(api: ApiServer, begun: Started) -> None:
    api.deaf = True
    placing = begun()
    for number in range(_MOST_WAITING + 2):
        placing.publish(of_pod(f"p{number}"))
    api.stop()
    placing.close()
    assert not placing._thread.is_alive()
