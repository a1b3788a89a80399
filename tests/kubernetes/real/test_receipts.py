"""Job reports as Events and annotations on a real API server, under the chart's own roles and admission policy."""

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from exporter.core.job_record import JobRecord
from exporter.core.model import Owner
from exporter.schedulers.kubernetes.api import ApiServer
from exporter.schedulers.kubernetes.publisher import ANNOTATION, Destination, JobReportPublisher
from tests.helm.rendering import RELEASE
from tests.kubernetes.cluster import NODE
from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.kubernetes.real.workloads import add_node, add_pod, pod_path
from tests.waiting import wait_for

pytestmark = pytest.mark.kubernetes
NAMESPACE, JOBS = "receipts", "receipts-jobs"
POD = "train-0"
SUMMARY = "42.0 % useful of 8 GPU-hours, 3.20 EUR"


@pytest.fixture(scope="module", name="here")
def _here(cluster: ControlPlane) -> Iterator[ControlPlane]:
    cluster.create_namespace(NAMESPACE)
    cluster.create_namespace(JOBS)
    add_node(cluster)
    add_pod(cluster, JOBS, POD, labels={"app": "train"}, annotations={"owner": "ml"})
    yield cluster
    for path in (f"/api/v1/namespaces/{NAMESPACE}", f"/api/v1/namespaces/{JOBS}", f"/api/v1/nodes/{NODE}"):
        cluster.delete(path)


def install(cluster: ControlPlane, chart: str, destination: Destination) -> str:
    """Install the chart, and return a token of its service account."""
    settings = ("image.repository=registry.example/gpu-efficiency", f"receipts.kubernetes={destination}")
    words = [word for setting in settings for word in ("--set", setting)]
    done = cluster.helm("upgrade", "--install", RELEASE, chart, "--namespace", NAMESPACE, *words)
    assert done.returncode == 0, done.stderr
    return cluster.token(NAMESPACE, RELEASE)


def publish(cluster: ControlPlane, destination: Destination, token: Path, pod: str = POD) -> tuple[int, int]:
    """Publish the summary of a job that has just ended; return how many were published and how many failed."""
    end = time.time()
    owner = Owner(f"{JOBS}/pod/{pod}", "kubernetes", namespace=JOBS, pod=pod, name=pod, kind="pod")
    record = JobRecord(
        node=NODE, life="a", owner=owner, start=end - 60, end=end, running=False, paid=1, parts={}, energy={}
    )
    access = ApiServer(cluster.url, f"{token}", f"{cluster.ca}")
    publisher = JobReportPublisher(access, destination, node=NODE, render=lambda _: SUMMARY, between=0.0)
    try:
        publisher.publish(record)
        wait_for(lambda: publisher.published + publisher.failed, "written or failed")
        return publisher.published, publisher.failed
    finally:
        publisher.close()


def events(cluster: ControlPlane, selector: str) -> list[Json]:
    found: list[Json] = cluster.get(f"/api/v1/namespaces/{JOBS}/events?fieldSelector={selector}")["items"]
    return found


@pytest.fixture(name="token")
def _token(tmp_path: Path) -> Path:
    return tmp_path / "token"


def test_an_event_is_found_as_kubectl_describe_looks_for_it(here: ControlPlane, chart: str, token: Path) -> None:
    token.write_text(install(here, chart, "event"))
    assert publish(here, "event", token) == (1, 0)
    uid = here.get(pod_path(JOBS, POD))["metadata"]["uid"]
    (event,) = events(here, f"involvedObject.name={POD},involvedObject.uid={uid},involvedObject.kind=Pod")
    assert (event["reason"], event["type"], event["message"]) == ("GPUEfficiency", "Normal", SUMMARY)
    assert event["source"] == {"component": "gpu-efficiency", "host": NODE}
    assert publish(here, "annotation", token) == (0, 1), "this role may not patch a pod"


def test_a_pod_that_is_gone_has_its_event(here: ControlPlane, chart: str, token: Path) -> None:
    token.write_text(install(here, chart, "event"))
    assert publish(here, "event", token, pod="gone") == (1, 0)
    (event,) = events(here, "involvedObject.name=gone,reason=GPUEfficiency")
    assert event["message"] == SUMMARY


def test_without_receipts_nothing_can_be_written(here: ControlPlane, chart: str, token: Path) -> None:
    token.write_text(install(here, chart, "none"))  # type: ignore[arg-type]
    assert publish(here, "event", token) == (0, 1)
    assert publish(here, "annotation", token) == (0, 1)


def change(cluster: ControlPlane, token: str, body: Any, *, pod: str = POD, part: str = "") -> httpx.Response:
    """Patch a pod as the service account: containers by their names."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/strategic-merge-patch+json"}
    return cluster.client.patch(f"{pod_path(JOBS, pod)}{part}", content=json.dumps(body), headers=headers)


OTHER_CHANGES: dict[str, tuple[Json, str]] = {
    "another image": (
        {"spec": {"containers": [{"name": "main", "image": "evil"}]}}, "its spec may not be changed",
    ),
    "a deadline": ({"spec": {"activeDeadlineSeconds": 1}}, "its spec may not be changed"),
    "a label": ({"metadata": {"labels": {"app": "other"}}}, "neither its labels"),
    "a label more": ({"metadata": {"labels": {"more": "b"}}}, "neither its labels"),
    "no labels": ({"metadata": {"labels": None}}, "neither its labels"),
    "a finalizer": ({"metadata": {"finalizers": ["example.com/keep"]}}, "neither its labels"),
    "another annotation": ({"metadata": {"annotations": {"owner": "me"}}}, "of its annotations"),
    "an annotation more": ({"metadata": {"annotations": {"new": "b"}}}, "of its annotations"),
    "one annotation less": ({"metadata": {"annotations": {"owner": None}}}, "of its annotations"),
    "no annotations": ({"metadata": {"annotations": None}}, "of its annotations"),
    "the summary and another image": (
        {
            "metadata": {"annotations": {ANNOTATION: "a"}},
            "spec": {"containers": [{"name": "main", "image": "evil"}]},
        },
        "its spec may not be changed",
    ),
}  # fmt: skip


def test_the_policy_lets_the_summary_pass_and_nothing_else(here: ControlPlane, chart: str, token: Path) -> None:
    token.write_text(install(here, chart, "annotation"))
    path = pod_path(JOBS, POD)
    # A new policy is in force some moments after it was made; until then each of these changes the pod.
    numbers = count()
    wait_for(
        lambda: (
            change(here, token.read_text(), {"metadata": {"labels": {"app": f"{next(numbers)}"}}}).status_code == 422
        ),
        "the policy is in force",
    )
    here.patch(path, {"metadata": {"labels": {"app": "train"}}})

    assert publish(here, "annotation", token) == (1, 0)
    before = here.get(path)
    assert before["metadata"]["annotations"] == {"owner": "ml", ANNOTATION: SUMMARY}

    answers = {what: change(here, token.read_text(), body) for what, (body, _) in OTHER_CHANGES.items()}
    for what, (_, message) in OTHER_CHANGES.items():
        assert answers[what].status_code == 422, f"{what}: {answers[what].text}"
        assert message in answers[what].json()["message"], what
    assert here.get(path) == before

    assert change(here, token.read_text(), {"metadata": {"annotations": {ANNOTATION: "another"}}}).is_success
    assert change(here, token.read_text(), {"metadata": {"annotations": {ANNOTATION: None}}}).is_success
    for part in ("/status", "/ephemeralcontainers", "/resize"):
        assert change(here, token.read_text(), {}, part=part).status_code == 403, part

    here.patch(path, {"metadata": {"labels": {"app": "train3"}}})
    assert here.get(path)["metadata"]["labels"] == {"app": "train3"}, "others may still change their pods"


def test_a_pod_without_annotations_gets_its_first(here: ControlPlane, chart: str, token: Path) -> None:
    token.write_text(install(here, chart, "annotation"))
    add_pod(here, JOBS, "bare")
    assert publish(here, "annotation", token, pod="bare") == (1, 0)
    assert here.get(pod_path(JOBS, "bare"))["metadata"]["annotations"] == {ANNOTATION: SUMMARY}
    assert publish(here, "annotation", token, pod="gone") == (0, 1)
