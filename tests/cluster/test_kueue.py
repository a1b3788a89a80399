"""Workloads of Kueue: those that wait, and who evicted whom.

The objects are made by hand after Kueue's types (apis/kueue/v1beta1 and v1beta2) and the texts of its conditions: no
real Kueue was run.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from exporter.cluster.kubernetes import KubernetesCluster, read_nodes, read_pods
from exporter.cluster.kueue import LOCAL_QUEUES, WORKLOADS, Evictions, LocalQueue, Queues, Workload, add_workloads
from exporter.cluster.model import REASONS, Demand, Jobs, Reservations
from exporter.cluster.pods import ClusterPod, NodeLabels
from exporter.cluster.watcher import ClusterUnavailableError, fitting_now, fitting_totals, queue_totals
from exporter.schedulers.kubernetes.objects import KubernetesNode
from tests.cluster.served import GPU, LATER, MADE, NOW, WHOLE, Looks, node, of_job, pod, serving, watching
from tests.each import each
from tests.kubernetes.api import ApiServer, Json
from tests.kubernetes.cluster import uid_of
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
GATED: Json = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
SAID = {
    "the workload alone": "Preempted to accommodate a workload (UID: {uid}) due to prioritization in the ClusterQueue",
    "and its job": (
        "Preempted to accommodate a workload (UID: {uid}, JobUID: UNKNOWN) due to reclamation within the cohort"
    ),
    "and its queue": (
        "Preempted to accommodate a workload (UID: {uid}, JobUID: 4c) due to Fair Sharing within the cohort;"
        " preemptor path: /all/research/urgent; preemptee path: /all/batch"
    ),
}


def condition(kind: str, status: str = "True", reason: str = "", message: str = "", at: str = LATER) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at}


def workload(job: str, gpus: int = 8, *conditions: Json, count: int = 1, queue: str = "", **more: object) -> Json:
    """Return the workload of a Job with so many pods of so many GPUs; with `queue` this ClusterQueue admitted it."""
    asked = {"limits": {WHOLE: f"{gpus}"}} if gpus else {}
    template = {"metadata": {}, "spec": {"containers": [{"name": "main", "resources": asked}]}}
    admitted = [condition("QuotaReserved"), condition("Admitted")] if queue else []
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": f"job-{job}-5f0a1",
            "namespace": "ml",
            "uid": uid_of(f"workload {job}"),
            "creationTimestamp": MADE,
            "ownerReferences": [{"kind": "Job", "name": job, "controller": True}],
        },
        "spec": {"queueName": "team", "podSets": [{"name": "main", "count": count, "template": template}]} | more,
        "status": ({"admission": {"clusterQueue": queue}} if queue else {}) | {"conditions": [*admitted, *conditions]},
    }


def local_queue(name: str = "team", cluster_queue: str = "batch") -> Json:
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": "ml", "uid": uid_of(f"queue {name}")},
        "spec": {"clusterQueue": cluster_queue},
    }


def evicted(thing: Json, reason: str, message: str = "", at: str = LATER) -> Json:
    """Return the workload as it is when it has been evicted and lost its quota."""
    lost = [condition("QuotaReserved", "False", "Pending"), condition("Admitted", "False", "NoReservation")]
    return thing | {"status": {"conditions": [*lost, condition("Evicted", "True", reason, message, at)]}}


def told(workloads: list[Json], pods: list[Json], nodes: list[Json], evictions: Evictions | None = None) -> Jobs:
    queues = Queues(msgspec.convert(workloads, list[Workload]), msgspec.convert([local_queue()], list[LocalQueue]))
    things = msgspec.convert(nodes, list[KubernetesNode])
    jobs = read_pods(
        msgspec.convert(pods, list[ClusterPod]), things, resources=GPU, disruptions=(), queues=queues.by_job
    )
    gone = evictions.workloads() if evictions else ()
    return add_workloads(jobs, queues, gone, labels=NodeLabels(things), resources=GPU)


def test_the_queue_is_the_workloads_and_no_pod_of_theirs_counts_twice() -> None:
    pods = [
        of_job(pod("a-0", 8, **GATED), "a"),
        of_job(pod("run-0", 4, node="n1"), "run"),
        of_job(pod("late-0", 4), "late"),
        pod("alone", 2),
        pod("topology", 1, schedulingGates=[{"name": "kueue.x-k8s.io/topology"}]),
    ]
    workloads = [
        workload("a", 8, condition("QuotaReserved", "False", "Pending"), count=3),
        workload("run", 4, queue="batch"),
        workload("late", 4, queue="batch"),
        workload("over", 4, condition("Finished")),
    ]
    found = told(workloads, pods, [node("n1")])
    queue = queue_totals(found.pending, now=NOW)
    assert queue.jobs == {
        ("batch", "limit"): 1,
        ("batch", "unschedulable"): 1,
        ("ml", "unschedulable"): 1,
        ("ml", "gated"): 1,
    }
    assert queue.gpus["batch", "limit"] == 24
    assert queue.waits == {"batch": 600.0, "ml": 600.0}
    assert {run.job_id: run.partition for run in found.runs} == {"ml/job/run": "batch"}


QUOTA = {
    "": "none",
    "Pending": "limit",
    "WaitingForQuota": "limit",
    "WaitingForPreemptedWorkloads": "resources",
    "Inadmissible": "impossible",
    "ExceedsMaxQuota": "impossible",
    "OnHold": "held",
    "SomethingNew": "other",
}
WAITING = [
    *((reason, workload("a", 1, condition("QuotaReserved", "False", said))) for said, reason in QUOTA.items()),
    ("none", workload("a", 1)),
    ("held", workload("a", 1, active=False)),
    ("starting", workload("a", 1, condition("QuotaReserved"))),
    ("begin_time", workload("a", 1, condition("Requeued", "False", "PodsReadyTimeout"))),
    ("held", workload("a", 1, condition("Requeued", "False", "ClusterQueueStopped"))),
    ("limit", evicted(workload("a", 1), "Preempted")),
]


@each("reason, thing", WAITING)
def test_why_a_workload_waits(reason: str, thing: Json) -> None:
    (job,) = told([thing], [], []).pending
    assert job.reason == reason
    assert reason in REASONS


def test_the_wait_begins_anew_with_an_eviction_and_is_none_of_what_is_held() -> None:
    (back,) = told([evicted(workload("a", 1), "Preempted")], [], []).pending
    (held,) = told([workload("a", 1, active=False)], [], []).pending
    assert (back.since, held.since) == (NOW, None)


def test_a_workload_fits_as_a_whole_where_its_pods_may_run() -> None:
    def fits(*workloads: Json, nodes: list[Json]) -> float:
        found = told(list(workloads), [], nodes)
        known = read_nodes(msgspec.convert(nodes, list[KubernetesNode]), [], resources=GPU)
        queue = queue_totals(found.pending, now=NOW)
        fitting = fitting_now(found, known, reservations=Reservations(), now=NOW)
        return sum(fitting_totals(fitting, queue).gpus.values())

    waiting = condition("QuotaReserved", "False", "Pending")
    assert fits(workload("a", 4, waiting, count=4), nodes=[node("n1"), node("n2")]) == 16
    assert fits(workload("a", 4, waiting, count=5), nodes=[node("n1"), node("n2")]) == 0
    assert fits(workload("a", 5, waiting, count=2), nodes=[node("n1")]) == 0, "two pods of 5 need two nodes"
    assert fits(workload("a", 1, waiting, count=300), nodes=[node(f"n{n}") for n in range(50)]) == 0, "not examined"
    placed = workload("a", 4, waiting)
    placed["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] = {"pool": "train"}
    assert fits(placed, nodes=[node("n1")]) == 0
    assert fits(placed, nodes=[node("n1", labels={"pool": "train"})]) == 4


def test_a_job_of_several_sets_of_pods() -> None:
    thing = workload("a", 0, priority=7)
    sets = [workload("x", gpus, count=count)["spec"]["podSets"][0] for gpus, count in ((0, 1), (2, 2), (1, 1))]
    thing["spec"]["podSets"] = sets
    (job,) = told([thing], [], []).pending
    assert [(part.gpus, part.per_node) for part in job.parts] == [(2, 2), (2, 2), (1, 1)]
    assert (job.job_id, job.priority) == ("ml/job/a", 7)
    assert isinstance(job.parts[0], Demand)


def test_a_group_of_pods_and_a_queue_that_is_gone() -> None:
    thing = workload("a", 1, queueName="nowhere")
    thing["metadata"] |= {"name": "grp", "ownerReferences": [{"kind": "Pod", "name": f"p{n}"} for n in (0, 1)]}
    (job,) = told([thing], [], []).pending
    assert (job.job_id, job.partition) == ("ml/podgroup/grp", "unknown")


def test_an_unreadable_workload_is_counted_and_costs_no_other() -> None:
    bad = workload("bad", 1)
    bad["spec"]["podSets"][0]["template"]["spec"]["containers"][0]["resources"]["limits"][WHOLE] = "1.5"
    found = told([bad, workload("good", 1)], [], [])
    assert (found.refused, [job.job_id for job in found.pending]) == (1, ["ml/job/good"])


def seen(*things: Json) -> Evictions:
    found = Evictions()
    for thing in things:
        found.observe(None, msgspec.convert(thing, Workload))
    return found


@pytest.mark.parametrize("named", SAID)
def test_who_evicted_whom_in_the_words_of_each_version(named: str) -> None:
    high = workload("high", 8, queue="urgent")
    gone = evicted(workload("a", 8), "Preempted", SAID[named].format(uid=high["metadata"]["uid"]))
    again = gone | {"status": {"conditions": [*gone["status"]["conditions"], condition("PodsReady", "False")]}}
    (run,) = (each for each in told([gone, high], [], [], seen(gone, again)).runs if each.job_id == "ml/job/a")
    assert (run.restarts, run.cause, run.left, run.partition) == (1, "preempted", NOW, "batch")
    assert run.by is not None
    assert (run.by.job_id, run.by.partition) == ("ml/job/high", "urgent")


def test_of_an_evicting_workload_that_is_gone_the_queue_is_still_known() -> None:
    message = SAID["and its queue"].format(uid="gone")
    (run,) = told([], [], [], seen(evicted(workload("a", 8), "Preempted", message))).runs
    assert run.by is not None
    assert (run.by.job_id, run.by.partition) == ("unknown", "urgent")
    pathless = message.replace("/all/research/urgent", "UNKNOWN")
    for unknown in (SAID["and its job"].format(uid="UNKNOWN"), pathless, "anything else"):
        (run,) = told([], [], [], seen(evicted(workload("a", 8), "Preempted", unknown))).runs
        assert (run.cause, run.by) == ("preempted", None)


def test_each_eviction_counts_once_and_not_every_reason_does() -> None:
    thing = workload("a", 8)
    later = evicted(thing, "PodsReadyTimeout", at="2026-01-02T04:00:00Z")
    over = evicted(thing, "Preempted")
    over["status"]["conditions"][-1]["status"] = "False"
    own = (evicted(thing, reason) for reason in ("Deactivated", "WorkloadSliceReplaced", "NodeFailures"))
    (run,) = told([], [], [], seen(evicted(thing, "Preempted"), later, over, *own)).runs
    assert (run.restarts, run.cause, run.by) == (2, "", None)


# -- on an API server --


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with serving(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def source(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesCluster]:
    with watching(server, tmp_path, kueue=True) as made:
        yield made


def test_a_preemption_across_queues_from_the_queue_to_its_cost(server: ApiServer, source: KubernetesCluster) -> None:
    victim = of_job(pod("a-0", 8, node="n1"), "a")
    victim["status"]["startTime"] = MADE
    server.has(node("n1"), victim, workload("a", 8, queue="batch"), local_queue(), local_queue("high", "urgent"))
    server.has(workload("web", 0), workload("over", 8, condition("Finished")))
    looks = Looks(source)
    wait_for(lambda: looks.total("job_gpus", job_id="ml/job/a") == 8, "the job is told")
    high = workload("high", 8, condition("QuotaReserved", "False", "Pending"), queueName="high")
    server.has(high)
    wait_for(lambda: looks.total("queue_gpus", partition="urgent", reason="limit") == 8, "the workload waits")
    server.has(evicted(workload("a", 8), "Preempted", SAID["and its job"].format(uid=high["metadata"]["uid"])))
    server.deletes(victim)
    server.has(workload("high", 8, queue="urgent", queueName="high"))
    wait_for(lambda: looks.total("preemptions_total", partition="batch", by_partition="urgent") == 1, "it is counted")
    found = looks.page()
    assert found.total("cluster_queue_gpus", partition="batch", reason="limit") == 8, "it is back in the queue"
    assert found.total("cluster_interruptions_total", partition="batch", cause="preempted", outcome="requeued") == 1
    assert found.total("cluster_preempted_gpu_seconds_total", by_partition="urgent") == 8 * 600
    ((cause, cost),) = found.rows("cluster_preemption_cost_gpu_seconds")
    assert cause == {"job_id": "ml/job/high", "partition": "urgent"}
    assert cost == 8 * 600
    assert {thing.job_id for thing in source._kueue.workloads.objects.values()} == {"ml/job/a", "ml/job/high"}  # type: ignore[union-attr]


def test_an_older_version_of_the_objects_is_read_too(server: ApiServer, tmp_path: Path) -> None:
    server.missing |= {path for path in (*WORKLOADS, *LOCAL_QUEUES) if "v1beta2" in path}
    server.has(*(thing | {"apiVersion": "kueue.x-k8s.io/v1beta1"} for thing in (workload("a", 8), local_queue())))
    with watching(server, tmp_path, kueue=True) as source:
        looks = Looks(source)
        wait_for(lambda: looks.total("queue_gpus", partition="batch") == 8, "the workload waits")


def test_where_there_is_no_kueue_it_is_said(server: ApiServer, tmp_path: Path) -> None:
    server.missing |= {*WORKLOADS, *LOCAL_QUEUES}
    with watching(server, tmp_path, kueue=True) as source, pytest.raises(ClusterUnavailableError, match=r"kueue.*404"):
        source.questions[0].ask()


def test_without_the_setting_nothing_of_kueue_is_asked(server: ApiServer, tmp_path: Path) -> None:
    server.has(node("n1"), pod("a", 8, **GATED))
    with watching(server, tmp_path) as source:
        looks = Looks(source)
        wait_for(lambda: looks.total("queue_gpus", partition="ml", reason="gated") == 8, "the pod waits")
    assert not [path for path, _ in server.requests if "kueue" in path]
