"""Owners from a real kubelet: runc runs the pods, a device plugin offers GPUs, the real scheduler places them."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.running import Page
from tests.helm.rendering import RELEASE
from tests.image import bare, ours
from tests.kubernetes.cluster import Node, gpu_uuid, node
from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.kubernetes.real.device_plugin import DevicePlugin
from tests.kubernetes.real.node import NAME, PAUSE, POD_RESOURCES, RealNode, why_not
from tests.kubernetes.real.workloads import pod_path
from tests.nvml_stub.build import build
from tests.waiting import wait_for

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1200)]
NAMESPACE, JOBS = "node", "node-jobs"
IMAGE = "registry.example/gpu-efficiency"
PATHS = ["PATH=/usr/local/bin:/usr/bin:/bin"]
GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


class Rig:
    """The node, with plugins for six whole GPUs and one that four pods may share."""

    def __init__(self, cluster: ControlPlane, folder: Path, stack: ExitStack) -> None:
        self.cluster = cluster
        self.node = RealNode(cluster, folder, stack)
        self.node.add_image(PAUSE, bare.bare() / "root", {"Entrypoint": ["/usr/bin/sleep", "infinity"], "Env": PATHS})
        whole = [gpu_uuid(index) for index in range(6)]
        shared = [f"{gpu_uuid(6)}::{replica}" for replica in range(4)]
        self.plugins = [DevicePlugin(GPU, whole), DevicePlugin(SHARED, shared)]
        for plugin in self.plugins:
            stack.callback(plugin.stop)
        self.register()
        # The taint "not-ready" is taken away by a controller that is not run here.
        labels = {"nvidia.com/gpu.present": "true"}
        cluster.patch(f"/api/v1/nodes/{NAME}", {"metadata": {"labels": labels}, "spec": {"taints": None}})

    def register(self) -> None:
        """Register the plugins, and wait until the node offers their devices."""
        for plugin in self.plugins:
            plugin.start()
        wait_for(lambda: self._offers() == {GPU: "6", SHARED: "4"}, "the node offers the GPUs")

    def _offers(self) -> dict[str, str]:
        found = self.cluster.get(f"/api/v1/nodes/{NAME}")["status"]["allocatable"]
        return {name: count for name, count in found.items() if name.startswith("nvidia.com/")}


@pytest.fixture(scope="module", name="rig")
def _rig(cluster: ControlPlane, chart: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    reason = why_not()
    assert not reason, reason
    with ExitStack() as stack:
        cluster.start_scheduler(stack)
        rig = Rig(cluster, tmp_path_factory.mktemp("node"), stack)
        cluster.create_namespace(NAMESPACE)
        cluster.create_namespace(JOBS)
        image = rig_image()
        rig.node.add_image(f"{IMAGE}:test", image.root, {
            "Entrypoint": image.entrypoint, "Cmd": image.command, "User": image.user,
            "Env": [f"{key}={value}" for key, value in image.env.items()],
        })  # fmt: skip
        values = stack.enter_context((tmp_path_factory.mktemp("values") / "values.yaml").open("w"))
        yaml.safe_dump(chart_values(), values)
        values.flush()
        done = cluster.helm("install", RELEASE, chart, "--namespace", NAMESPACE, "--values", values.name)
        assert done.returncode == 0, done.stderr
        yield rig
        cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE)
        for name in (NAMESPACE, JOBS):
            cluster.delete(f"/api/v1/namespaces/{name}")
        wait_for(lambda: not rig.node.containers(), "all containers have ended")
        cluster.delete(f"/api/v1/nodes/{NAME}")


def rig_image() -> Any:
    """Return the image of this tree."""
    return ours.made().plain


def chart_values() -> Json:
    """Return the default values, and what stands in for the NVIDIA runtime: the driver's library."""
    return {
        "image": {"repository": IMAGE, "tag": "test", "pullPolicy": "Never"},
        "source": "nvml",
        "extraVolumes": [{"name": "nvml", "hostPath": {"path": f"{build()}"}}],
        "extraVolumeMounts": [{"name": "nvml", "mountPath": "/nvml", "readOnly": True}],
        "extraEnv": [{"name": "LD_LIBRARY_PATH", "value": "/nvml"}],
    }


@pytest.fixture(name="here")
def _here(rig: Rig, tmp_path: Path) -> Iterator[Node]:
    """The daemon's scheduler on the real socket and the real API server, with the chart's service account."""
    cluster = rig.cluster
    (tmp_path / "token").write_text(cluster.token(NAMESPACE, RELEASE))
    with node(with_api=False) as made:
        made.opens(
            pod_resources_socket=f"{POD_RESOURCES}",
            node_name=NAME,
            api_url=cluster.url,
            ca_file=f"{cluster.ca}",
            token_file=f"{tmp_path / 'token'}",
        )
        yield made
        for pod in cluster.get(pod_path(JOBS))["items"]:
            cluster.client.request("DELETE", pod_path(JOBS, pod["metadata"]["name"]), json={"gracePeriodSeconds": 0})
        made.held()


def container(resource: str = GPU, words: str = "sleep 100000") -> Json:
    return {
        "name": "main",
        "image": PAUSE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", words],
        "resources": {"limits": {resource: "1"}},
    }


def start(cluster: ControlPlane, name: str, resource: str = GPU) -> None:
    """Create a pod that asks for one device, and leave it to the scheduler and the kubelet."""
    spec = {"containers": [container(resource)], "terminationGracePeriodSeconds": 0}
    cluster.create(pod_path(JOBS), {"metadata": {"name": name}, "spec": spec})
    wait_for(lambda: phase(cluster, name) == "Running", f"{name} runs")


def phase(cluster: ControlPlane, name: str) -> str:
    found: str = cluster.get(pod_path(JOBS, name))["status"]["phase"]
    return found


def jobs(state: Any) -> list[str]:
    """Return the job of each current allocation."""
    return sorted(each.owner.job_id for each in state.allocations if each.end is None)


def test_the_jobs_of_real_pods_hold_the_gpus_that_the_kubelet_gave_them(rig: Rig, here: Node) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [container(words="sleep 5")]}}
    spec = {"parallelism": 2, "completions": 2, "template": template}
    path = f"/apis/batch/v1/namespaces/{JOBS}/jobs"
    rig.cluster.create(path, {"metadata": {"name": "train"}, "spec": spec})
    here.until(lambda state: jobs(state) == [f"{JOBS}/job/train"] * 2, "two pods of the Job")
    here.held()
    assert wait_for(lambda: rig.cluster.get(f"{path}/train")["status"].get("succeeded"), "the Job succeeds") == 2
    assert [each.owner.job_id for each in here.ended] == [f"{JOBS}/job/train"] * 2
    assert {each.uuid for each in here.ended} <= {gpu_uuid(index) for index in range(6)}
    rig.cluster.delete(f"{path}/train")


def test_pods_that_share_a_gpu_by_time_slicing(rig: Rig, here: Node) -> None:
    for name in ("a", "b"):
        start(rig.cluster, name, SHARED)
    here.held((6, f"{JOBS}/pod/a"), (6, f"{JOBS}/pod/b"))


def test_a_kubelet_that_starts_again_takes_no_owner(rig: Rig, here: Node) -> None:
    start(rig.cluster, "stays")
    (held,) = here.until(lambda state: jobs(state) == [f"{JOBS}/pod/stays"], "its owner").allocations
    rig.node.stop_kubelet()
    wait_for(lambda: (here.look(), any("kubelet" in message for _, message in here.faults))[1], "it is silent")
    rig.node.start_kubelet()
    rig.register()
    start(rig.cluster, "comes")
    state = here.until(
        lambda state: jobs(state) == [f"{JOBS}/pod/comes", f"{JOBS}/pod/stays"], "the pod before and the one after"
    )
    assert (held.uuid, held.start) in {(each.uuid, each.start) for each in state.allocations}
    assert here.ended == []


def test_a_pod_that_is_evicted_frees_its_gpu(rig: Rig, here: Node) -> None:
    start(rig.cluster, "evicted")
    here.until(lambda state: jobs(state) == [f"{JOBS}/pod/evicted"], "its owner")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted", "namespace": JOBS}}
    rig.cluster.create(f"{pod_path(JOBS, 'evicted')}/eviction", eviction)
    here.held()
    assert [each.owner.job_id for each in here.ended] == [f"{JOBS}/pod/evicted"]


# -- the pod of the chart --


def exporter(cluster: ControlPlane) -> Json | None:
    """Return the DaemonSet's pod once it is ready."""
    for pod in cluster.get(pod_path(NAMESPACE))["items"]:
        conditions = pod["status"].get("conditions", ())
        if any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            ready: Json = pod
            return ready
    return None


def page(address: str) -> Page:
    answer = httpx.get(f"http://{address}:19400/metrics", trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return Page(answer.text).keeps_the_law()


def test_the_daemon_sets_pod_is_ready_and_exports_the_owners_of_real_pods(rig: Rig, here: Node) -> None:
    pod = wait_for(partial(exporter, rig.cluster), "the exporter's pod is ready")
    address = pod["status"]["podIP"]
    start(rig.cluster, "train")
    here.until(lambda state: jobs(state) == [f"{JOBS}/pod/train"], "its owner")
    rows = wait_for(lambda: page(address).rows("job_info", job_id=f"{JOBS}/pod/train"), "the job is on the page")
    assert {(labels["scheduler"], labels["workload_pod"]) for labels, _ in rows} == {("kubernetes", "train")}
    assert page(address).by("node", "node_info") == {NAME: 1}
    assert len(page(address).states()) == 8


def test_install_check_inside_the_pod_finds_kubelet_and_api_server(rig: Rig) -> None:
    pod = wait_for(partial(exporter, rig.cluster), "the exporter's pod is ready")
    (status,) = pod["status"]["containerStatuses"]
    done = rig.node.execute(status["containerID"].removeprefix("containerd://"), "gpu-efficiency", "install-check")
    good = [line.split()[1:3] for line in done.splitlines() if line.startswith("  ok ")]
    assert ["kubernetes", "the"] in good, done
    assert ["kubernetes", "api"] in good, done
    assert ["scheduler", "the"] in good, done
