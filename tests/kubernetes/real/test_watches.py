"""The node's scheduler on a real API server: owners of real controllers' pods, churn, and a server that is lost.

The kubelet's socket is our stand-in: it lists the pods that the test has bound to the node.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.helm.rendering import RELEASE
from tests.kubernetes.cluster import NODE, Node, gpu_uuid, node
from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.kubernetes.real.relay import Relay
from tests.kubernetes.real.workloads import add_node, add_pod, pod_path, pod_spec, pods_of, report
from tests.waiting import wait_for

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]
NAMESPACE, JOBS = "watches", "watches-jobs"
KUBEFLOW = "training.kubeflow.org/job-name"


@pytest.fixture(scope="module", name="plane")
def _plane(cluster: ControlPlane, chart: str) -> Iterator[ControlPlane]:
    """The cluster with the chart, for its roles, and a node."""
    cluster.create_namespace(NAMESPACE)
    image = ("--set", "image.repository=registry.example/gpu-efficiency")
    done = cluster.helm("install", RELEASE, chart, "--namespace", NAMESPACE, *image)
    assert done.returncode == 0, done.stderr
    add_node(cluster)
    yield cluster
    cluster.delete(f"/api/v1/namespaces/{NAMESPACE}")
    cluster.delete(f"/api/v1/nodes/{NODE}")
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE)


@pytest.fixture(name="relay")
def _relay(plane: ControlPlane) -> Iterator[Relay]:
    made = Relay(plane.port)
    yield made
    made.close()


@pytest.fixture(name="here")
def _here(plane: ControlPlane, relay: Relay, tmp_path: Path) -> Iterator[Node]:
    """The node's scheduler, with the chart's service account and its token, and an empty namespace for workloads."""
    plane.create_namespace(JOBS)
    (tmp_path / "token").write_text(plane.token(NAMESPACE, RELEASE))
    with node(with_api=False) as made:
        made.opens(api_url=f"https://127.0.0.1:{relay.port}", ca_file=f"{plane.ca}", token_file=f"{tmp_path / 'token'}")
        yield made
    plane.delete(f"/api/v1/namespaces/{JOBS}")
    wait_for(lambda: _emptied(plane), f"namespace {JOBS} is gone")


def _emptied(plane: ControlPlane) -> bool:
    """Delete the pods of the namespace at once, as their kubelet would; return whether the namespace is gone."""
    for pod in plane.get(pod_path(JOBS))["items"]:
        plane.client.request("DELETE", pod_path(JOBS, pod["metadata"]["name"]), json={"gracePeriodSeconds": 0})
    return plane.client.get(f"/api/v1/namespaces/{JOBS}").status_code == 404


def train(plane: ControlPlane, here: Node, index: int, job: str = "") -> str:
    """Start a pod of a training job on the GPU of that number; return the job's id."""
    name = f"{job or 'run'}-{index}"
    add_pod(plane, JOBS, name, labels={KUBEFLOW: job or name})
    here.kubelet.gives(name, gpu_uuid(index % 8), namespace=JOBS)
    return f"{JOBS}/trainingjob/{job or name}"


def leave(plane: ControlPlane, here: Node, name: str) -> None:
    """Let a pod end and be deleted."""
    report(plane, JOBS, name, "Succeeded")
    plane.delete(pod_path(JOBS, name))
    here.kubelet.drops(name, JOBS)


TEMPLATE = {"metadata": {"labels": {"app": "a"}}, "spec": pod_spec()}
SELECTOR = {"matchLabels": {"app": "a"}}
CONTROLLERS: dict[str, tuple[str, Json, str]] = {
    "Job": (
        "/apis/batch/v1/namespaces/{}/jobs",
        {"template": {"spec": pod_spec() | {"restartPolicy": "Never"}}},
        "job/work",
    ),
    "Deployment": ("/apis/apps/v1/namespaces/{}/deployments", {"selector": SELECTOR, "template": TEMPLATE},
                   "deployment/work"),
    "StatefulSet": ("/apis/apps/v1/namespaces/{}/statefulsets",
                    {"selector": SELECTOR, "template": TEMPLATE, "serviceName": "none"}, "statefulset/work"),
    "ReplicaSet": ("/apis/apps/v1/namespaces/{}/replicasets", {"selector": SELECTOR, "template": TEMPLATE},
                   "replicaset/work"),
    "CronJob": (
        "/apis/batch/v1/namespaces/{}/cronjobs",
        {
            "schedule": "* * * * *",
            "jobTemplate": {"spec": {"template": {"spec": pod_spec() | {"restartPolicy": "Never"}}}},
        },
        "cronjob/work",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_the_owner_is_what_a_real_controller_wrote_on_its_pod(plane: ControlPlane, here: Node, kind: str) -> None:
    path, spec, job = CONTROLLERS[kind]
    plane.create(path.format(JOBS), {"metadata": {"name": "work"}, "spec": spec})
    (pod,) = wait_for(lambda: pods_of(plane, JOBS), f"the {kind} makes its pod")
    name = pod["metadata"]["name"]
    report(plane, JOBS, name, "Running")
    here.kubelet.gives(name, gpu_uuid(0), namespace=JOBS)
    here.held((0, f"{JOBS}/{job}"))
    report(plane, JOBS, name, "Succeeded" if kind.endswith("ob") else "Failed")
    if kind == "StatefulSet":  # it makes another of the same name at once
        here.kubelet.drops(name, JOBS)
    here.held()
    assert here.faults == set()


def test_no_owner_of_two_hundred_pods_is_lost(plane: ControlPlane, here: Node) -> None:
    """In rounds of eight, one on each GPU; each is seen with its job, and seen to end."""
    jobs = []
    for start in range(0, 200, 8):
        indices = range(start, start + 8)
        held = [(index % 8, train(plane, here, index)) for index in indices]
        here.held(*held)
        jobs += [job for _, job in held]
        for index in indices:
            leave(plane, here, f"run-{index}")
    here.held()
    assert sorted(each.owner.job_id for each in here.ended) == sorted(jobs)
    assert here.faults == set()


def lists(plane: ControlPlane) -> int:
    """Return how many lists of pods the server has answered, since it started."""
    wanted = ('resource="pods"', 'verb="LIST"', 'scope="cluster"', 'code="200"')
    rows = plane.client.get("/metrics").text.splitlines()
    return sum(
        int(float(row.rpartition(" ")[2]))
        for row in rows
        if row.startswith("apiserver_request_total{") and all(part in row for part in wanted)
    )


def gone(plane: ControlPlane, version: str) -> bool:
    """Whether the server answers a watch from this version with 410."""
    try:
        answer = plane.client.get(
            f"/api/v1/pods?fieldSelector=spec.nodeName={NODE}&watch=1&timeoutSeconds=1&resourceVersion={version}"
        )
    except httpx.TransportError:
        return False
    return answer.status_code == 410 or '"code":410' in answer.text


def lose(relay: Relay, here: Node, *held: tuple[int, str]) -> None:
    """Cut the way to the API server, and wait until the scheduler has noticed; nobody loses a GPU by that."""
    relay.cut()
    here.held(*held)
    wait_for(lambda: (here.look(), any(kind == "controller_silent" for kind, _ in here.faults))[1], "it is silent")


def test_changes_while_the_server_was_lost_are_caught_up(plane: ControlPlane, here: Node, relay: Relay) -> None:
    first, second = train(plane, here, 0), train(plane, here, 1)
    here.held((0, first), (1, second))
    asked = lists(plane)
    lose(relay, here, (0, first), (1, second))
    leave(plane, here, "run-1")
    third = train(plane, here, 2)
    here.held((0, first), (2, f"{JOBS}/pod/run-2"))  # the kubelet alone knows no job
    relay.mend()
    here.held((0, first), (2, third))
    assert lists(plane) == asked, "a watch that goes on needs no list"


def test_a_version_that_the_server_has_forgotten(plane: ControlPlane, here: Node, relay: Relay) -> None:
    """Two changes, a compaction and a restart: the server answers 410, and everything is listed again."""
    first, second = train(plane, here, 0), train(plane, here, 1)
    here.held((0, first), (1, second))
    old = plane.get("/api/v1/pods")["metadata"]["resourceVersion"]
    lose(relay, here, (0, first), (1, second))
    leave(plane, here, "run-1")
    third = train(plane, here, 2)
    plane.compact()
    plane.stop_api_server()
    plane.start_api_server()
    wait_for(lambda: gone(plane, old), "the server has forgotten the version")
    asked = lists(plane)
    relay.mend()
    here.held((0, first), (2, third))
    assert lists(plane) == asked + 1


def test_a_server_that_dies_and_starts_again(plane: ControlPlane, here: Node) -> None:
    first = train(plane, here, 0)
    here.held((0, first))
    plane.stop_api_server()
    here.kubelet.gives("unknown", gpu_uuid(3), namespace=JOBS)
    here.held((0, first), (3, f"{JOBS}/pod/unknown"))
    here.kubelet.drops("unknown", JOBS)
    plane.start_api_server()
    second = train(plane, here, 1)
    here.held((0, first), (1, second))
    report(plane, JOBS, "run-0", "Succeeded")
    here.held((1, second))


def silent(here: Node, why: str = "") -> Callable[[], bool]:
    """Return a condition: the newest state has the fault that the API server does not answer, with that reason."""

    def look() -> bool:
        here.faults.clear()
        here.look()
        return any(kind == "controller_silent" and why in message for kind, message in here.faults)

    return look


def test_a_token_that_is_replaced_and_one_that_is_dead(
    plane: ControlPlane, here: Node, relay: Relay, tmp_path: Path
) -> None:
    """A token that is bound to a pod ends with it: as an expired one does, which would take ten minutes."""
    token, account = tmp_path / "token", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{RELEASE}/token"

    def bound(name: str) -> str:
        spec = pod_spec() | {"serviceAccountName": RELEASE}
        made = plane.create(pod_path(NAMESPACE), {"metadata": {"name": name}, "spec": spec})
        to = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": made["metadata"]["uid"]}
        return str(plane.create(account, {"spec": {"boundObjectRef": to}})["status"]["token"])

    def accepted(text: str) -> bool:
        return plane.client.get("/api/v1/pods", headers={"Authorization": f"Bearer {text}"}).status_code == 200

    old, new = bound("old"), bound("new")
    token.write_text(old)
    first = train(plane, here, 0)
    here.held((0, first))
    token.write_text(new)
    plane.delete(pod_path(NAMESPACE, "old"))
    wait_for(lambda: not accepted(old), "the old token is dead")
    relay.cut()
    relay.mend()
    second = train(plane, here, 1)
    here.held((0, first), (1, second))

    plane.delete(pod_path(NAMESPACE, "new"))
    wait_for(lambda: not accepted(new), "the new token is dead too")
    relay.cut()
    relay.mend()
    wait_for(silent(here, "401"), "the server refuses the token")
    third = train(plane, here, 2)
    here.held((0, first), (1, second), (2, f"{JOBS}/pod/run-2"))
    token.write_text(plane.token(NAMESPACE, RELEASE))
    here.held((0, first), (1, second), (2, third))
    wait_for(lambda: not silent(here)(), "the server answers again")


def test_a_pod_that_is_evicted_and_replaced_under_its_name(plane: ControlPlane, here: Node) -> None:
    path, spec, job = CONTROLLERS["StatefulSet"]
    plane.create(path.format(JOBS), {"metadata": {"name": "work"}, "spec": spec})
    wait_for(lambda: pods_of(plane, JOBS), "the StatefulSet makes its pod")
    old = report(plane, JOBS, "work-0", "Running")["metadata"]["uid"]
    here.kubelet.gives("work-0", gpu_uuid(0), namespace=JOBS)
    here.held((0, f"{JOBS}/{job}"))
    plane.create(f"{pod_path(JOBS, 'work-0')}/eviction", {
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "work-0", "namespace": JOBS},
    })  # fmt: skip
    assert "deletionTimestamp" in plane.get(pod_path(JOBS, "work-0"))["metadata"]
    here.held((0, f"{JOBS}/{job}"))  # it holds its GPU until its kubelet has ended it
    here.kubelet.drops("work-0", JOBS)
    plane.delete(pod_path(JOBS, "work-0"))
    (pod,) = wait_for(lambda: pods_of(plane, JOBS), "the StatefulSet makes another")
    assert pod["metadata"]["uid"] != old
    report(plane, JOBS, "work-0", "Running")
    here.kubelet.gives("work-0", gpu_uuid(1), namespace=JOBS)
    here.held((1, f"{JOBS}/{job}"))
    assert [each.owner.job_id for each in here.ended] == [f"{JOBS}/{job}"]


def test_a_cordon_reaches_the_node(plane: ControlPlane, here: Node) -> None:
    here.until(lambda state: state.condition == "", "the node takes pods")
    plane.patch(f"/api/v1/nodes/{NODE}", {"spec": {"unschedulable": True}})
    here.until(lambda state: state.condition == "cordoned", "the cordon")
    plane.patch(f"/api/v1/nodes/{NODE}", {"spec": {"unschedulable": None, "taints": None}})
    here.until(lambda state: state.condition == "", "its end")
