"""Pods and nodes of a whole Kubernetes cluster: parsing, and that they come by one list and one watch."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from exporter.cluster.analysis import spread
from exporter.cluster.kubernetes import (
    Disruptions,
    KubernetesCluster,
    open_kubernetes,
    read_nodes,
    read_pods,
)
from exporter.cluster.metrics import page
from exporter.cluster.model import Jobs, Nodes, Reservations
from exporter.cluster.pods import ClusterPod
from exporter.cluster.watcher import (
    ClusterUnavailableError,
    ClusterView,
    QuestionStatus,
    QueueTotals,
    fitting_now,
    fitting_totals,
    queue_totals,
)
from exporter.config import Config, ConfigError
from exporter.registry import KubernetesSettings
from exporter.schedulers.kubernetes.objects import KubernetesNode
from exporter.schedulers.kubernetes.requests import gpus_of_pod
from tests.cluster.served import (
    GPU,
    LATER,
    MADE,
    NOW,
    PACE,
    WHOLE,
    Looks,
    ended,
    node,
    of_job,
    pod,
    serving,
    watching,
)
from tests.e2e.running import Page
from tests.kubernetes.api import ApiServer, Json
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def jobs(pods: list[Json], nodes: list[Json], *, disruptions: Disruptions | None = None) -> Jobs:
    told = disruptions.pods() if disruptions else ()
    return read_pods(
        msgspec.convert(pods, list[ClusterPod]),
        msgspec.convert(nodes, list[KubernetesNode]),
        resources=GPU,
        disruptions=told,
    )


def nodes_of(nodes: list[Json], pods: list[Json]) -> Nodes:
    return read_nodes(
        msgspec.convert(nodes, list[KubernetesNode]), msgspec.convert(pods, list[ClusterPod]), resources=GPU
    )


def fitting(pods: list[Json], nodes: list[Json]) -> QueueTotals:
    found = jobs(pods, nodes)
    queue = queue_totals(found.pending, now=NOW)
    return fitting_totals(fitting_now(found, nodes_of(nodes, pods), reservations=Reservations(), now=NOW), queue)


def fits(pods: list[Json], nodes: list[Json]) -> int:
    return sum(fitting(pods, nodes).gpus.values())


def test_the_queue_by_namespace_and_reason() -> None:
    pods = [
        pod("a", 8),
        pod("b", 2),
        pod("gated", 4, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}]),
        pod("web"),
        pod("works", 1, node="n1"),
        pod("starts", 1, node="n1", phase="Pending"),
        pod("over", 4, phase="Succeeded"),
    ]
    queue = queue_totals(jobs(pods, [node("n1")]).pending, now=NOW)
    assert queue.jobs == {("ml", "unschedulable"): 2, ("ml", "gated"): 1}
    assert queue.gpus == {("ml", "unschedulable"): 10, ("ml", "gated"): 4}
    assert queue.waits == {"ml": 600.0}


def test_nodes_expected_allocated_and_free() -> None:
    pods = [pod("a", 3, node="n1"), pod("b", 1, node="n1", phase="Pending"), pod("c", 4, node="n1", phase="Failed")]
    things = [node("n1", offered=7), node("n2", ready="Unknown"), node("n3", unschedulable=True), node("n4")]
    one, two, three, four = nodes_of(things, pods).nodes
    assert (one.gpus, one.used, one.free) == ({"gpu": 8}, {"gpu": 4}, {"gpu": 3})
    assert [each.state for each in (one, two, three, four)] == ["mixed", "not_ready", "cordoned", "idle"]
    assert (two.free, three.free) == ({}, {})
    assert nodes_of([node("cpu", gpus=0)], []).nodes == ()


def test_other_devices_of_nvidias_operators_are_no_gpus() -> None:
    thing = node("n1")
    thing["status"]["capacity"] |= {
        f"nvidia.com/{name}": "16" for name in ("hostdev", "mlnxnics", "gpumem", "gpucores")
    }
    nic = pod("nic", 2, node="n1", resource="nvidia.com/hostdev")
    (found,) = nodes_of([thing], [nic]).nodes
    assert (found.gpus, found.used, jobs([nic], [thing]).runs) == ({"gpu": 8}, {"gpu": 0}, ())
    assert nodes_of([node("n2") | {"status": {"capacity": {"nvidia.com/mig-1g.10gb.shared": "7"}}}], []).nodes != ()


GKE_SHARED = {
    "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
    "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
}


def test_a_shared_gpu_is_one_gpu() -> None:
    labels = {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"}
    (shared,) = nodes_of([node("n1", 32, labels=labels)], []).nodes
    assert (shared.total, shared.shares) == (32, 4)
    (whole,) = nodes_of([node("n1", 8, labels={"nvidia.com/gpu.replicas": "1"})], []).nodes
    assert whole.shares == 1
    unshared = {"nvidia.com/gpu.replicas": "1", "nvidia.com/gpu.sharing-strategy": "none"}
    for labels in (GKE_SHARED, GKE_SHARED | unshared):
        assert [each.shares for each in nodes_of([node("n1", 32, labels=labels)], []).nodes] == [4]


UUIDS = ("GPU-5700b000-0000-0000-0000-000000000000", "GPU-5700b000-0000-0000-0000-000000000001")
HAMI, VOLCANO = "hami.io/node-nvidia-register", "volcano.sh/node-vgpu-register"


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (HAMI, json.dumps([{"id": uuid, "index": 1, "count": 10} for uuid in UUIDS], separators=(",", ":"))),
        (HAMI, "".join(f"{uuid},10,81920,100,NVIDIA-H100,0,true,{n},hami-core:" for n, uuid in enumerate(UUIDS))),
        (VOLCANO, "".join(f"{uuid},10,81920,NVIDIA-H100,true,hami-core:" for uuid in UUIDS)),
    ],
)
def test_a_gpu_that_hami_or_volcano_offers_as_several_is_one_gpu(annotation: str, text: str) -> None:
    thing = node("n1", 20)
    thing["metadata"]["annotations"] = {annotation: text}
    (split,) = nodes_of([thing], []).nodes
    assert (split.total, split.shares) == (20, 10)
    thing["metadata"]["annotations"] = {annotation: text.replace("10", "ten")}
    assert nodes_of([thing], []).nodes[0].shares == 1


@pytest.mark.parametrize(
    ("labels", "kind", "gpus"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "gpu", 56),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}, "mig-1g.10gb", 56),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1c.2g.20gb.me-SHARED"}, "mig-1c.2g.20gb.me", 56),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-INVALID"}, "gpu", 56),
        ({"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}, "mig-1g.5gb", 56),
        ({"cloud.google.com/gke-gpu-partition-size": "1g.5gb"} | GKE_SHARED, "mig-1g.5gb", 14),
    ],
)
def test_mig_instances_that_are_called_gpus_have_the_type_of_their_profile(
    labels: dict[str, str], kind: str, gpus: int
) -> None:
    """Strategy single of NVIDIA's plugin, and GKE: the recording rules count boards, and leave out types of MIG."""
    things = [node("n1", 56, labels=labels)]
    found = nodes_of(things, [pod("a", 4, node="n1")])
    answered = QuestionStatus("nodes", interval=60, at=0)
    samples = Page(page(ClusterView(scheduler="kubernetes", questions=(answered,), nodes=found.nodes), now=0).decode())
    for name, count in (("expected", gpus), ("allocated", gpus / 14)):
        ((labelled, value),) = samples.rows(f"cluster_node_{name}_gpus")
        assert (labelled, float(value)) == ({"node": "n1", "gpu_type": kind}, count)
    assert fits([pod("b", 1)], things) == 1, "pods request what the node offers: nvidia.com/gpu"


def test_what_runs_in_a_pod_is_not_even_decoded() -> None:
    thing = pod("a", 1)
    secret = {"command": ["hunter2"], "args": ["hunter2"], "env": [{"name": "TOKEN", "value": "hunter2"}]}
    thing["spec"]["containers"][0] |= secret
    assert "hunter2" not in repr(msgspec.convert(thing, ClusterPod))


def test_what_a_pod_is_set_aside() -> None:
    thing = pod("a", 2)
    thing["spec"]["containers"].append(
        {
            "name": "two",
            "image": "x",
            "resources": {"requests": {WHOLE: "1"}, "limits": {WHOLE: "1"}},
        }
    )
    thing["spec"]["initContainers"] = [{"name": "i", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "5"}}}]
    assert gpus_of_pod(msgspec.convert(thing, ClusterPod), GPU) == {"nvidia.com/gpu": 5}
    thing["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    assert gpus_of_pod(msgspec.convert(thing, ClusterPod), GPU) == {"nvidia.com/gpu": 8}


def test_one_unreadable_pod_is_counted_and_costs_no_other() -> None:
    bad = pod("bad", 1)
    bad["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1.5"
    found = jobs([bad, pod("good", 1)], [])
    assert (found.refused, [each.job_id for each in found.pending]) == (1, ["ml/pod/good"])


def test_pods_fit_by_gpus_selector_affinity_and_taints() -> None:
    things = [node("n1", labels={"pool": "train", "zone": "a"}, taints=[{"key": "gpu", "effect": "NoSchedule"}])]
    tolerant: Json = {"tolerations": [{"key": "gpu", "operator": "Exists"}]}
    assert fits([pod("a", 4)], things) == 0, "the taint"
    assert fits([pod("a", 4, **tolerant)], things) == 4
    assert fits([pod("a", 9, **tolerant)], things) == 0
    assert fits([pod("a", 4, nodeSelector={"pool": "train"}, **tolerant)], things) == 4
    assert fits([pod("a", 4, nodeSelector={"pool": "serve"}, **tolerant)], things) == 0
    assert fits([pod("a", 4, **affine("zone", "In", "b", "a"), **tolerant)], things) == 4
    assert fits([pod("a", 4, **affine("zone", "In", "b"), **tolerant)], things) == 0
    assert fits([pod("a", 4, **affine("zone", "Exists"), **tolerant)], things) == 4
    assert fits([pod("a", 4, **affine("rack", "Exists"), **tolerant)], things) == 0
    assert fits([pod("a", 4, **affine("zone", "NotIn", "c"), **tolerant)], things) == 0, (
        "not understood: not known to fit"
    )
    assert fits([pod("a", 4, schedulingGates=[{"name": "x"}], **tolerant)], things) == 0


def affine(key: str, operator: str, *values: str) -> Json:
    expression: Json = {"key": key, "operator": operator} | ({"values": list(values)} if values else {})
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def test_priority_goes_first() -> None:
    found = fitting([pod("low", 5, priority=1), pod("high", 6, priority=9)], [node("n1")])
    assert sum(found.gpus.values()) == 6


def test_mig_and_whole_gpus_are_not_mixed_up() -> None:
    assert fits([pod("a", 1, resource="nvidia.com/mig-1g.10gb")], [node("n1")]) == 0


def test_placement_of_a_job_of_several_pods() -> None:
    labels = {"network.topology.nvidia.com/leaf": "s1", "topology.kubernetes.io/zone": "a"}
    things = [
        node("n1", labels=labels | {"nvidia.com/gpu.clique": "c1"}),
        node("n2", labels=labels | {"nvidia.com/gpu.clique": "c2"}),
    ]
    pods = [of_job(pod("a-0", 4, node="n1"), "a"), of_job(pod("a-1", 4, node="n2"), "a")]
    placed = spread(jobs(pods, things).runs, nodes_of(things, pods).nodes, groups={}, most=10)
    assert placed.gpus == (("ml/job/a", 8),)
    found = {each.level: (each.spans, each.fewest) for each in placed.placements}
    assert found == {"node": (2, 1), "switch": (1, 1), "nvlink_domain": (2, 1), "zone": (1, 1)}


def disrupted(thing: Json, reason: str) -> Json:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": LATER}
    return thing | {"status": thing["status"] | {"conditions": [condition]}}


@pytest.mark.parametrize(
    ("reason", "cause", "culprit"),
    [
        ("PreemptionByScheduler", "preempted", ""),
        ("DeletionByTaintManager", "node_failure", "n1"),
        ("TerminationByKubelet", "node_failure", "n1"),
        ("EvictionByEvictionAPI", "", ""),
    ],
)
def test_disruptions_are_told_with_their_cause(reason: str, cause: str, culprit: str) -> None:
    seen = Disruptions()
    thing = disrupted(of_job(pod("a-0", 4, node="n1"), "a"), reason)
    spared = disrupted(of_job(pod("a-2", 4, node="n1"), "a"), reason)
    spared["status"]["conditions"][0]["status"] = "False"
    for each in (thing, thing, of_job(pod("a-1", 4, node="n1"), "a"), spared):
        seen.observe(None, msgspec.convert(each, ClusterPod))
    (run,) = jobs([], [], disruptions=seen).runs
    assert run.left == NOW
    assert (run.job_id, run.restarts, run.each, run.cause, run.culprit) == ("ml/job/a", 1, 4, cause, culprit)


def test_a_pod_that_was_disrupted_before_is_not_disrupted_by_another_change() -> None:
    seen = Disruptions()
    before, gone = (msgspec.convert(disrupted(pod("a", 4, node="n1"), "DeletionByPodGC"), ClusterPod) for _ in range(2))
    seen.observe(before, gone)
    assert seen.pods() == ()
    seen.observe(msgspec.convert(pod("a", 4, node="n1"), ClusterPod), gone)
    assert seen.pods() == ((gone, "node_failure"),)


def test_a_job_runs_since_its_first_pod_began_with_the_priority_of_its_pods() -> None:
    first, second = (of_job(pod(f"a-{n}", 4, node="n1", priority=7), "a") for n in (0, 1))
    first["status"]["startTime"], second["status"]["startTime"] = LATER, MADE
    waiting = of_job(pod("a-2", 4, node="n1", priority=7), "a")
    (run,) = jobs([first, second, waiting], []).runs
    assert (run.started, run.priority) == (NOW - 600, 7)


# -- on an API server --


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with serving(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def source(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesCluster]:
    with watching(server, tmp_path) as made:
        yield made


def test_one_list_and_one_watch_of_each_kind(server: ApiServer, source: KubernetesCluster) -> None:
    server.has(node("n1"), node("n2", gpus=4), pod("a", 2, node="n1"), pod("b", 8), pod("over", 8, phase="Succeeded"))
    looks = Looks(source)
    wait_for(lambda: looks.total("node_expected_gpus") == 12, "both nodes are told")
    wait_for(lambda: looks.total("node_allocated_gpus") == 2, "the pod that runs")
    wait_for(lambda: looks.total("queue_gpus", partition="ml", reason="unschedulable") == 8, "the pod that waits")
    for _ in range(20):
        looks.page()
    selected = {"/api/v1/pods": ["status.phase!=Succeeded,status.phase!=Failed", "status.phase=Failed"]}
    for path in ("/api/v1/pods", "/api/v1/nodes"):
        for watch in (False, True):
            asked = sorted(each["fieldSelector"] for each in server.asked(path, watch=watch))
            assert asked == selected.get(path, [""]), "the many that succeeded stay away"
    server.has(pod("b", 8, node="n2"))
    wait_for(lambda: looks.total("queue_gpus") == 0, "the pod was scheduled")


def test_pods_that_ask_for_no_gpu_are_not_kept(server: ApiServer, source: KubernetesCluster) -> None:
    web = pod("web", 0, node="n1")
    web["spec"]["containers"] = [{"name": "main"}]
    server.has(node("n1"), web, pod("a", 2, node="n1"))
    looks = Looks(source)
    wait_for(lambda: looks.total("node_allocated_gpus") == 2, "the pod that runs")
    late = pod("late", 0, node="n1")
    late["spec"]["containers"] = [{"name": "main"}]
    server.has(late, pod("b", 1, node="n1"))
    wait_for(lambda: looks.total("node_allocated_gpus") == 3, "the pod that came")
    server.deletes(late)
    server.has(pod("c", 1, node="n1"))
    wait_for(lambda: looks.total("node_allocated_gpus") == 4, "and one after that")
    assert {each.metadata.name for each in source._pod_informer.objects.values()} == {"a", "b", "c"}


def test_a_preempted_pod_that_is_gone_before_the_next_look_is_counted(
    server: ApiServer, source: KubernetesCluster
) -> None:
    thing, other = of_job(pod("a-0", 4, node="n1"), "a"), of_job(pod("a-1", 4, node="n1"), "a")
    thing["status"]["startTime"] = MADE
    server.has(node("n1"), thing, other)
    looks = Looks(source)
    wait_for(lambda: looks.total("job_gpus", job_id="ml/job/a") == 8, "the job is told")
    server.has(disrupted(thing, "PreemptionByScheduler"))
    server.deletes(thing)
    server.has(pod("high", 4, node="n1", priority=1000))
    wait_for(lambda: looks.total("node_allocated_gpus") == 8, "another has its place")
    wait_for(lambda: looks.total("interruptions_total", partition="ml", cause="preempted") == 1, "it is counted")
    found = looks.page()
    assert found.total("cluster_interrupted_gpus_total", cause="preempted") == 4
    assert found.total("cluster_interrupted_gpu_seconds_total", cause="preempted") == 4 * 600
    assert [labels for labels, _ in found.rows("cluster_preemption_timestamp_seconds")] == [
        {"job_id": "ml/job/a", "by_job_id": "ml/pod/high"}
    ]


@pytest.mark.parametrize("reason", ["DeletionByPodGC", "TerminationByKubelet"])
def test_a_pod_that_fails_with_its_node_is_counted(server: ApiServer, source: KubernetesCluster, reason: str) -> None:
    """Condition and phase come at once, so the watch of pods that have not ended sees a pod deleted without either."""
    gone, stays = of_job(pod("a-0", 4, node="n1"), "a"), of_job(pod("a-1", 4, node="n2"), "a")
    old = disrupted(of_job(pod("a-old", 4, node="n1", phase="Failed"), "a"), reason)
    server.has(node("n1"), node("n2"), gone, stays, old)
    looks = Looks(source)
    wait_for(lambda: looks.total("job_gpus", job_id="ml/job/a") == 8, "the job is told")
    server.has(old | {"metadata": old["metadata"] | {"labels": {"seen": "by-hand"}}})
    server.has(disrupted(gone, reason) | {"status": disrupted(gone, reason)["status"] | {"phase": "Failed"}})
    server.deletes(gone)
    wait_for(lambda: looks.total("interruptions_total", cause="node_failure") == 1, "it is counted")
    wait_for(lambda: looks.total("job_gpus", job_id="ml/job/a") == 4, "one pod is left")
    found = looks.page()
    assert found.total("cluster_interruptions_total") == 1, "the pod that had failed before counts no more"
    assert found.total("cluster_interrupted_gpus_total", cause="node_failure") == 4
    assert [labels["node"] for labels, _ in found.rows("cluster_node_failure_timestamp_seconds")] == ["n1"]


def test_a_disruption_that_no_watch_showed_is_counted_from_the_next_list(
    server: ApiServer, source: KubernetesCluster
) -> None:
    server.has(node("n1"), of_job(pod("a-0", 4, node="n1"), "a"), of_job(pod("a-1", 4, node="n1"), "a"))
    looks = Looks(source)
    wait_for(lambda: looks.total("job_gpus", job_id="ml/job/a") == 8, "the job is told")
    server.stop()
    gone = disrupted(of_job(pod("a-0", 4, node="n1", phase="Failed"), "a"), "DeletionByPodGC")
    server.has(gone, disrupted(of_job(pod("a-1", 4, node="n1"), "a"), "PreemptionByScheduler"))
    server.forgets()
    server.start()
    wait_for(lambda: looks.total("interruptions_total") == 2, "both are counted")


def test_a_server_that_goes_and_comes_back(server: ApiServer, source: KubernetesCluster) -> None:
    server.has(node("n1"), pod("b", 8))
    looks = Looks(source)
    wait_for(lambda: looks.total("queue_gpus") == 8, "the queue is told")
    server.stop()
    wait_for(lambda: looks.total("failed_questions_total", kind="silent") > 0, "the silence is noticed")
    assert server.url in looks.watch.error
    assert looks.total("node_expected_gpus") == 8
    server.start()
    wait_for(lambda: not (looks.page() and looks.watch.error), "it answers again")


def test_what_the_account_may_not_is_said(server: ApiServer, tmp_path: Path) -> None:
    server.forbidden.add("/api/v1/nodes")
    config = Config(
        kubernetes=KubernetesSettings(api_url=server.url, token_file=f"{tmp_path / 'token'}", ca_file=f"{server.ca}")
    )
    source = open_kubernetes(config, timeouts=PACE)
    try:
        with pytest.raises(ClusterUnavailableError, match=r"403.*ClusterRole"):
            source.questions[1].ask()
    finally:
        ended(source)
        source.close()


def test_after_its_end_it_answers_nothing(source: KubernetesCluster) -> None:
    ended(source)
    with pytest.raises(ClusterUnavailableError, match="restart"):
        source.questions[0].ask()


def test_outside_a_cluster_it_does_not_open() -> None:
    with pytest.raises(ConfigError, match="api_url"):
        open_kubernetes(Config(), environ={})
