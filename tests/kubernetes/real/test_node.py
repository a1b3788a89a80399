"""Owners from a real kubelet: runc runs the pods, which have GPUs of device plugins and of a DRA driver."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from msgspec import structs

from exporter.core.model import UNKNOWN_JOB, Device
from exporter.schedulers.kubernetes.api import ApiTimeouts
from tests.e2e.running import Page, environment
from tests.helm.rendering import RELEASE
from tests.image import bare, ours
from tests.kubernetes.cluster import PACE, Node, gpu_uuid, node
from tests.kubernetes.real.build import FOLDER
from tests.kubernetes.real.control_plane import ControlPlane, Json
from tests.kubernetes.real.device_plugin import DevicePlugin
from tests.kubernetes.real.dra_driver import API, DRIVER, DraDriver, gpu, instance
from tests.kubernetes.real.node import NAME, PAUSE, POD_RESOURCES, RealNode, why_not
from tests.kubernetes.real.relay import Relay
from tests.kubernetes.real.test_watches import KUBEFLOW, gone
from tests.kubernetes.real.workloads import pod_path
from tests.nvml_stub.build import build
from tests.top.terminal import ENTER, ESCAPE, terminal
from tests.waiting import wait_for

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1200)]
NAMESPACE, JOBS = "node", "node-jobs"
IMAGE = "registry.example/gpu-efficiency"
PATHS = ["PATH=/usr/local/bin:/usr/bin:/bin"]
RUNTIME = ("/proc", "/dev", "/sys/fs/cgroup", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""Places that every container has writable, by runtime and kubelet; of control groups v1 only the folder of all."""
GPU, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb.shared"
"""Instances as the strategy "mixed" names them; the large one may be shared."""
MIXED, SINGLE, CLAIMED = 7, 8, 11
"""Boards whose instances are offered as such, as GPUs, and by DRA."""
WORLD = f"""
count 12
gpu {MIXED} mig 1g.10gb 1g.10gb 3g.40gb
gpu {SINGLE} mig 3g.40gb 3g.40gb
gpu {CLAIMED} mig 1g.10gb 2g.20gb 3g.40gb
"""
BOARDS = tuple(Device(gpu_uuid(index), f"{index}") for index in range(12))


def mig_uuid(board: int, number: int) -> str:
    """Return what the NVML stand-in calls an instance, which counts from 1."""
    return f"MIG-5700b000-{number:04d}-0000-0000-{board:012d}"


BY_CLAIM = {
    "gpu-4": gpu_uuid(9),
    "gpu-3": gpu_uuid(10),
    "gpu-5-mig-1g10gb-19-0": mig_uuid(CLAIMED, 1),
    "gpu-5-mig-2g20gb-14-2": mig_uuid(CLAIMED, 2),
}
"""What the DRA driver offers, whose numbers are of /dev and not NVML's."""


class Rig:
    """The node, whose GPUs the device plugins and the DRA driver offer in all their ways."""

    def __init__(self, cluster: ControlPlane, folder: Path, stack: ExitStack) -> None:
        self.cluster = cluster
        self.node = RealNode(cluster, folder, stack)
        self.node.add_image(PAUSE, bare.bare() / "root", {"Entrypoint": ["/usr/bin/sleep", "infinity"], "Env": PATHS})
        plugins = (
            DevicePlugin(GPU, [gpu_uuid(index) for index in range(6)]),
            DevicePlugin(SHARED, [f"{gpu_uuid(6)}::{replica}" for replica in range(4)]),
            DevicePlugin(SMALL, [mig_uuid(MIXED, 1), mig_uuid(MIXED, 2)]),
            DevicePlugin(LARGE, [f"{mig_uuid(MIXED, 3)}::{replica}" for replica in range(2)]),
        )
        self.plugins = {each.resource: each for each in plugins}
        for plugin in plugins:
            stack.callback(plugin.stop)
        self.register()
        whole = [gpu(int(name[-1]), uuid) for name, uuid in BY_CLAIM.items() if uuid.startswith("GPU-")]
        static = instance(5, gpu_uuid(CLAIMED), "1g.10gb", "19-0", uuid=mig_uuid(CLAIMED, 1))
        self.dra = DraDriver(cluster, NAME, [*whole, static, instance(5, gpu_uuid(CLAIMED), "2g.20gb", "14-2")])
        stack.callback(self.dra.stop)
        self.dra.start()
        # The taint "not-ready" is taken away by a controller that is not run here.
        labels = {"nvidia.com/gpu.present": "true"}
        cluster.patch(f"/api/v1/nodes/{NAME}", {"metadata": {"labels": labels}, "spec": {"taints": None}})

    def register(self) -> None:
        """Register the plugins, and wait until the node offers their devices."""
        for plugin in self.plugins.values():
            plugin.start()
        offered = {name: f"{len(plugin.ids)}" for name, plugin in self.plugins.items()}
        wait_for(lambda: self._offers() == offered, "the node offers the GPUs")

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
        for kind in ("gpu", "mig"):
            of_kind = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
            spec = {"selectors": [{"cel": {"expression": of_kind}}]}
            cluster.create(f"{API}/deviceclasses", {"metadata": {"name": f"{kind}.nvidia.com"}, "spec": spec})
        for name, spec in (("gpu", claim_spec("gpu")), *((p, claim_spec("mig", p)) for p in ("1g.10gb", "2g.20gb"))):
            template = {"metadata": {"name": name}, "spec": {"spec": spec}}
            cluster.create(f"{API}/namespaces/{JOBS}/resourceclaimtemplates", template)
        image = rig_image()
        rig.node.add_image(f"{IMAGE}:test", image.root, {
            "Entrypoint": image.entrypoint, "Cmd": image.command, "User": image.user,
            "Env": [f"{key}={value}" for key, value in image.env.items()],
        })  # fmt: skip
        values = stack.enter_context((tmp_path_factory.mktemp("values") / "values.yaml").open("w"))
        world = tmp_path_factory.mktemp("world")
        (world / "world.txt").write_text(WORLD)
        yaml.safe_dump(chart_values(world), values)
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


def chart_values(world: Path) -> Json:
    """Return the default values, and what stands in for the NVIDIA runtime: the driver's library."""
    return {
        "image": {"repository": IMAGE, "tag": "test", "pullPolicy": "Never"},
        "source": "nvml",
        "extraVolumes": [
            {"name": "nvml", "hostPath": {"path": f"{build()}"}},
            {"name": "world", "hostPath": {"path": f"{world}"}},
        ],
        "extraVolumeMounts": [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in ("nvml", "world")],
        "extraEnv": [
            {"name": "LD_LIBRARY_PATH", "value": "/nvml"},
            {"name": "NVML_STUB_SCRIPT", "value": "/world/world.txt"},
        ],
    }


@pytest.fixture(name="relay")
def _relay(rig: Rig) -> Iterator[Relay]:
    made = Relay(rig.cluster.port)
    yield made
    made.close()


@pytest.fixture(name="here")
def _here(rig: Rig, relay: Relay, tmp_path: Path) -> Iterator[Node]:
    """The daemon's scheduler on the real socket and the real API server, with the chart's service account."""
    cluster = rig.cluster
    (tmp_path / "token").write_text(cluster.token(NAMESPACE, RELEASE))
    with node(with_api=False) as made:
        made.devices = BOARDS
        made.opens(
            pace=structs.replace(PACE, response=ApiTimeouts().response),  # pods are started meanwhile
            pod_resources_socket=f"{POD_RESOURCES}",
            node_name=NAME,
            api_url=f"https://127.0.0.1:{relay.port}",
            ca_file=f"{cluster.ca}",
            token_file=f"{tmp_path / 'token'}",
        )
        yield made
        clear(cluster)
        made.held()


def clear(cluster: ControlPlane) -> None:
    """Delete all pods of jobs, and their claims, for which the kubelet must have ended them."""
    claims = f"{API}/namespaces/{JOBS}/resourceclaims"
    for path in (pod_path(JOBS), claims):
        cluster.client.request("DELETE", path, json={"gracePeriodSeconds": 0})
    wait_for(lambda: not (cluster.get(pod_path(JOBS))["items"] or cluster.get(claims)["items"]), "nothing is left")


def container(words: str = "sleep 100000", **resources: Any) -> Json:
    """Return a container that has a whole GPU, or other resources."""
    return {
        "name": "main",
        "image": PAUSE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", words],
        "resources": resources or {"limits": {GPU: "1"}},
    }


def start(cluster: ControlPlane, name: str, resource: str = GPU, **labels: str) -> None:
    """Create a pod that asks for one device, and leave it to the scheduler and the kubelet."""
    create(cluster, name, {"containers": [container(limits={resource: "1"})]}, **labels)
    runs(cluster, name)


def start_claiming(cluster: ControlPlane, name: str, **source: str) -> None:
    """Create a pod whose container uses a claim, from a template or of a name."""
    claims = [{"name": "device"} | source]
    run(cluster, name, {"containers": [container(claims=[{"name": "device"}])], "resourceClaims": claims})


def run(cluster: ControlPlane, name: str, spec: Json) -> None:
    create(cluster, name, spec)
    runs(cluster, name)


def create(cluster: ControlPlane, name: str, spec: Json, **labels: str) -> None:
    spec |= {"terminationGracePeriodSeconds": 0}
    cluster.create(pod_path(JOBS), {"metadata": {"name": name, "labels": labels}, "spec": spec})


def runs(cluster: ControlPlane, name: str) -> None:
    wait_for(lambda: phase(cluster, name) == "Running", f"{name} runs")


def claim_spec(kind: str, profile: str = "") -> Json:
    """Return a claim for a device of a class, if need be of a MIG profile."""
    exactly: Json = {"deviceClassName": f"{kind}.nvidia.com"}
    if profile:
        expression = f"device.attributes['{DRIVER}'].profile == '{profile}'"
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    return {"devices": {"requests": [{"name": "one", "exactly": exactly}]}}


def reserved(cluster: ControlPlane) -> dict[str, str]:
    """Return by pod the UUID of what the scheduler allocated to its claim."""
    claims = [each["status"] for each in cluster.get(f"{API}/namespaces/{JOBS}/resourceclaims")["items"]]
    return {
        pod["name"]: BY_CLAIM[result["device"]]
        for claim in claims
        for pod in claim["reservedFor"]
        for result in claim["allocation"]["devices"]["results"]
    }


def phase(cluster: ControlPlane, name: str) -> str:
    found: str = cluster.get(pod_path(JOBS, name))["status"]["phase"]
    return found


def jobs(state: Any) -> list[str]:
    """Return the job of each current allocation."""
    return sorted(each.owner.job_id for each in state.allocations if each.end is None)


def test_the_jobs_of_real_pods_hold_the_gpus_that_the_kubelet_gave_them(rig: Rig, here: Node) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [container("sleep 5")]}}
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
    """Nor while it has deleted the slices of a DRA driver that starts after it."""
    start(rig.cluster, "stays")
    start_claiming(rig.cluster, "claims", resourceClaimTemplateName="gpu")
    before = [f"{JOBS}/pod/claims", f"{JOBS}/pod/stays"]
    held = here.until(lambda state: jobs(state) == before, "the owners").allocations
    rig.dra.stop()
    rig.node.stop_kubelet()
    wait_for(lambda: (here.look(), any("kubelet" in message for _, message in here.faults))[1], "it is silent")
    rig.node.start_kubelet()
    wait_for(lambda: not rig.dra.slices(), "the kubelet deletes the driver's slices")
    rig.register()
    start(rig.cluster, "comes")
    state = here.until(
        lambda state: jobs(state) == sorted([*before, f"{JOBS}/pod/comes"]), "the pods before and the one after"
    )
    rig.dra.start()
    assert {(each.uuid, each.start) for each in held} < {(each.uuid, each.start) for each in state.allocations}
    assert here.ended == []


def test_a_pod_that_is_evicted_frees_its_gpu(rig: Rig, here: Node) -> None:
    start(rig.cluster, "evicted")
    here.until(lambda state: jobs(state) == [f"{JOBS}/pod/evicted"], "its owner")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted", "namespace": JOBS}}
    rig.cluster.create(f"{pod_path(JOBS, 'evicted')}/eviction", eviction)
    here.held()
    assert [each.owner.job_id for each in here.ended] == [f"{JOBS}/pod/evicted"]


def train(rig: Rig, name: str) -> str:
    """Start a pod of a training job; return the job's id, which only the API server tells."""
    start(rig.cluster, name, GPU, **{KUBEFLOW: name})
    return f"{JOBS}/trainingjob/{name}"


def test_no_owner_of_two_hundred_pods_is_lost(rig: Rig, here: Node) -> None:
    """In rounds of five, each of a whole GPU; each is seen with its job, and seen to end."""
    ended = []
    for number in range(0, 200, 5):
        names = [f"run-{index}" for index in range(number, number + 5)]
        for name in names:
            spec = {"containers": [container()]}
            create(rig.cluster, name, spec, **{KUBEFLOW: name})
        wanted = sorted(f"{JOBS}/trainingjob/{name}" for name in names)
        here.until(lambda state: jobs(state) == wanted, f"{wanted}")  # noqa: B023  called here only
        for name in names:
            rig.cluster.client.request("DELETE", pod_path(JOBS, name))
        here.held()
        ended += wanted
    # On a busy machine the kubelet lists a pod moments before the API server tells of it, or moments longer.
    told = [each.owner.job_id for each in here.ended if each.owner.job_id != UNKNOWN_JOB]
    assert sorted(told) == sorted(ended)
    assert here.faults == set()


def test_a_token_that_is_replaced_and_a_version_that_the_server_has_forgotten(
    rig: Rig, here: Node, relay: Relay, tmp_path: Path
) -> None:
    """The kubelet goes on meanwhile: pods come and go on its socket, and their jobs are told afterwards."""
    cluster = rig.cluster
    first = train(rig, "a")
    here.until(lambda state: jobs(state) == [first], "the first")
    (tmp_path / "token").write_text(cluster.token(NAMESPACE, RELEASE))
    relay.cut()
    relay.mend()
    second = train(rig, "b")
    here.until(lambda state: jobs(state) == [first, second], "the second, by the new token")

    old = cluster.get("/api/v1/pods")["metadata"]["resourceVersion"]
    relay.cut()
    cluster.client.request("DELETE", pod_path(JOBS, "b"))
    third = train(rig, "c")
    here.until(lambda state: jobs(state) == [f"{JOBS}/pod/c", first], "the third, of which the kubelet knows no job")
    cluster.compact()
    cluster.stop_api_server()
    cluster.start_api_server()
    wait_for(lambda: gone(cluster, old), "the server has forgotten the version")
    relay.mend()
    here.until(lambda state: jobs(state) == [first, third], "all are listed again")
    assert [each.owner.job_id for each in here.ended if each.owner.job_id != f"{JOBS}/pod/c"] == [second]


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
    assert {"0", "6", "9", f"{MIXED}:1", f"{CLAIMED}:3"} <= page(address).states().keys()


@pytest.fixture(name="address")
def _address(rig: Rig) -> Iterator[str]:
    """Where the exporter's pod answers; nothing is left of what the test ran."""
    yield wait_for(partial(exporter, rig.cluster), "the exporter's pod is ready")["status"]["podIP"]
    clear(rig.cluster)


def holders(page: Page) -> dict[str, set[str]]:
    """Return job ids by UUID."""
    found: dict[str, set[str]] = {}
    for labels, _ in page.rows("allocation_info"):
        found.setdefault(labels["uuid"], set()).add(labels["job_id"])
    return found


def page_has(address: str, pods: Mapping[str, str]) -> Page:
    """Wait until these pods, by name, and no others hold these UUIDs; return the page."""
    wanted: dict[str, set[str]] = {}
    for name, uuid in pods.items():
        wanted.setdefault(uuid, set()).add(f"{JOBS}/pod/{name}")
    return wait_for(lambda: found if holders(found := page(address)) == wanted else None, f"{wanted}")


def test_the_page_names_the_owners_of_time_slices_and_of_mig_instances(rig: Rig, address: str) -> None:
    resources = {"a": SHARED, "b": SHARED, "small-a": SMALL, "small-b": SMALL, "large-a": LARGE, "large-b": LARGE}
    given = {}
    for name, resource in resources.items():
        start(rig.cluster, name, resource)
        given[name] = rig.plugins[resource].given[-1].partition("::")[0]
    assert set(given.values()) == {gpu_uuid(6), *(mig_uuid(MIXED, number) for number in (1, 2, 3))}
    page_has(address, given)


def test_under_the_single_strategy_instances_are_offered_as_gpus(rig: Rig, address: str) -> None:
    plugin = rig.plugins[GPU]
    whole, plugin.ids = plugin.ids, [mig_uuid(SINGLE, 1), mig_uuid(SINGLE, 2)]
    try:
        rig.register()
        given = {}
        for name in ("a", "b"):
            start(rig.cluster, name)
            given[name] = plugin.given[-1]
        assert set(given.values()) == set(plugin.ids)
        page_has(address, given)
    finally:
        plugin.ids = whole
        rig.register()


def test_the_page_names_the_owners_of_claims(rig: Rig, address: str) -> None:
    """A whole GPU, one of which two pods share the claim, a MIG instance, and one that is made when it is claimed."""
    before = page(address).total("faults_total", kind="scheduler_refused")
    path = f"{API}/namespaces/{JOBS}/resourceclaims"
    rig.cluster.create(path, {"metadata": {"name": "both"}, "spec": claim_spec("gpu")})
    for name in ("a", "b"):
        start_claiming(rig.cluster, name, resourceClaimName="both")
    for name, template in (("whole", "gpu"), ("small", "1g.10gb"), ("made", "2g.20gb")):
        start_claiming(rig.cluster, name, resourceClaimTemplateName=template)
    given = reserved(rig.cluster)
    assert set(given.values()) == set(BY_CLAIM.values())
    assert given["a"] == given["b"]
    assert page_has(address, given).total("faults_total", kind="scheduler_refused") == before


def test_install_check_inside_the_pod_finds_kubelet_and_api_server(rig: Rig) -> None:
    pod = wait_for(partial(exporter, rig.cluster), "the exporter's pod is ready")
    done = rig.node.execute(container_id(pod), "gpu-efficiency", "install-check")
    good = [line.split()[1:3] for line in done.splitlines() if line.startswith("  ok ")]
    assert ["kubernetes", "the"] in good, done
    assert ["kubernetes", "api"] in good, done
    assert ["scheduler", "the"] in good, done


def test_the_pod_has_the_rights_that_the_chart_gives_it_and_no_others(rig: Rig) -> None:
    """As the kernel has them, of the daemon's own process: root, who may do nothing that needs a capability."""
    pod = wait_for(partial(exporter, rig.cluster), "the exporter's pod is ready")
    (container,) = pod["spec"]["containers"]
    status = dict(line.split(":\t", 1) for line in inside(rig, pod, "/proc/1/status").splitlines() if ":\t" in line)
    assert "gpu-efficiency" in inside(rig, pod, "/proc/1/cmdline")
    assert pod["spec"]["securityContext"] == {
        "runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert status["Uid"].split() == status["Gid"].split() == ["0"] * 4
    assert set(status["Groups"].split()) <= {"0"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {status[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    lines = inside(rig, pod, "/proc/1/mountinfo").splitlines()
    mounts = {fields[4]: fields[5].split(",") for line in lines if (fields := line.split())}
    assert "ro" in mounts["/"]
    asked = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert {place for place, options in mounts.items() if "rw" in options and not place.startswith(RUNTIME)} == asked
    refused = rig.node.execute(container_id(pod), "python", "-c", "open('/usr/x', 'w')")
    assert "Read-only file system" in refused


def container_id(pod: Json) -> str:
    """Return the container of the daemon, as containerd calls it."""
    (status,) = pod["status"]["containerStatuses"]
    found: str = status["containerID"].removeprefix("containerd://")
    return found


def inside(rig: Rig, pod: Json, file: str) -> str:
    """Return a file as the pod's container has it."""
    return rig.node.execute(container_id(pod), "python", "-c", f"print(open({file!r}).read())")


def test_top_on_a_terminal_through_kubectl_exec(rig: Rig, address: str) -> None:
    """At two sizes of the window, and it ends by its key."""
    pod = wait_for(partial(exporter, rig.cluster), "the exporter's pod is ready")
    start(rig.cluster, "shown")
    wait_for(lambda: page(address).rows("job_info", job_id=f"{JOBS}/pod/shown"), "the job is on the page")
    words = [f"{FOLDER / 'kubectl'}", "exec", "--stdin", "--tty", "--namespace", NAMESPACE, pod["metadata"]["name"]]
    env = environment(KUBECONFIG=f"{rig.cluster.kubeconfig}")
    with terminal([*words, "--", "gpu-efficiency", "top"], columns=120, lines=36, env=env) as top:
        top.shows("[GPUs]", "q quit", JOBS)
        top.resize(80, 24)
        top.until(lambda text: "q quit" in text.splitlines()[-1], "it fills the smaller window")
        top.press("/shown")
        top.shows("filter: shown_")
        top.press(ENTER)
        top.press(ENTER)
        top.shows(f"job {JOBS}/pod/shown on", "Esc back")
        top.press(ESCAPE)
        top.shows("[GPUs]")
        top.press("q")
        assert top.ended() == 0
