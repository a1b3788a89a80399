"""A pod's job from the labels and owners that controllers set."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import WorkloadRule, WorkloadSettings
from exporter.core.model import Owner
from exporter.schedulers.kubernetes.objects import (
    KubernetesNode,
    Pod,
    PodObject,
    gpu_groups,
    is_independent,
    node_condition,
    owner_of,
    reserves_gpu,
    restarts_of,
    size_of,
)
from exporter.schedulers.rules import Rules
from tests.kubernetes.cluster import kept_by, pod_object

RULES = Rules()


def read(thing: dict[str, Any]) -> Pod:
    return msgspec.json.decode(msgspec.json.encode(thing), type=Pod)


def owner(labels: dict[str, str], keeper: tuple[str, str] | None = None, **metadata: Any) -> Owner:
    if keeper:
        metadata["ownerReferences"] = kept_by(*keeper)
    return owner_of("ml", "pod-0", read(pod_object("pod-0", labels=labels, **metadata)), RULES)


KUBEFLOW = {"training.kubeflow.org/job-name": "bert", "training.kubeflow.org/replica-type": "worker"}


@pytest.mark.parametrize(
    ("labels", "keeper", "job"),
    [
        ({}, None, "pod/pod-0"),
        ({"app": "x"}, ("Node", "node-1"), "pod/pod-0"),
        ({"batch.kubernetes.io/job-name": "train"}, ("Job", "train"), "job/train"),
        ({"jobset.sigs.k8s.io/jobset-name": "llama"}, ("Job", "llama-workers-0"), "jobset/llama"),
        (
            KUBEFLOW | {"training.kubeflow.org/operator-name": "pytorchjob-controller"},
            ("PyTorchJob", "bert"),
            "pytorchjob/bert",
        ),
        (KUBEFLOW | {"training.kubeflow.org/operator-name": "mpi-operator"}, ("Job", "bert-launcher"), "mpijob/bert"),
        (KUBEFLOW | {"training.kubeflow.org/operator-name": "mpi-operator"}, ("MPIJob", "bert"), "mpijob/bert"),
        (KUBEFLOW, ("TFJob", "bert"), "tfjob/bert"),
        (KUBEFLOW, None, "trainingjob/bert"),
        ({"ray.io/cluster": "c-x7"}, ("RayCluster", "c-x7"), "raycluster/c-x7"),
        (
            {
                "ray.io/cluster": "c-x7",
                "ray.io/originated-from-crd": "RayJob",
                "ray.io/originated-from-cr-name": "tune",
            },
            ("RayCluster", "c-x7"),
            "rayjob/tune",
        ),
        ({"leaderworkerset.sigs.k8s.io/name": "lws"}, ("StatefulSet", "lws-0"), "leaderworkerset/lws"),
        ({"pod-template-hash": "6d4cf56db6"}, ("ReplicaSet", "web-api-6d4cf56db6"), "deployment/web-api"),
        ({"rollouts-pod-template-hash": "abc"}, ("ReplicaSet", "web-abc"), "rollout/web"),
        ({"pod-template-hash": "zzz"}, ("ReplicaSet", "web-abc"), "replicaset/web-abc"),
        ({}, ("StatefulSet", "db"), "statefulset/db"),
        ({}, ("DaemonSet", "agent"), "daemonset/agent"),
        ({"notebook-name": "my-nb"}, ("StatefulSet", "my-nb"), "notebook/my-nb"),
        ({"hub.jupyter.org/username": "alice", "component": "singleuser-server"}, None, "notebook/pod-0"),
        (
            {"serving.kserve.io/inferenceservice": "llama", "serving.knative.dev/service": "llama-predictor"},
            ("ReplicaSet", "llama-predictor-0001-deployment-abc"),
            "inferenceservice/llama",
        ),
        ({"serving.knative.dev/service": "fn"}, ("ReplicaSet", "fn-1"), "ksvc/fn"),
        ({"volcano.sh/job-name": "v"}, ("Job", "v"), "vcjob/v"),
        ({"workflows.argoproj.io/workflow": "etl-x1"}, ("Workflow", "etl-x1"), "workflow/etl-x1"),
        ({"spark-app-name": "pi", "spark-role": "executor"}, ("Pod", "pi-driver"), "spark/pi"),
        ({"sparkoperator.k8s.io/app-name": "pi", "spark-app-name": "other"}, None, "sparkapplication/pi"),
        ({"nvidia.com/dynamo-graph-deployment-name": "g"}, ("PodClique", "g-0"), "dynamographdeployment/g"),
        ({"kueue.x-k8s.io/pod-group-name": "grp"}, None, "podgroup/grp"),
        ({}, ("VirtualMachineInstance", "vm-1"), "virtualmachineinstance/vm-1"),
        ({"jobset.sigs.k8s.io/jobset-name": ""}, ("Job", "x"), "job/x"),
    ],
)
def test_the_job_is_the_outermost_that_left_its_name(
    labels: dict[str, str], keeper: tuple[str, str] | None, job: str
) -> None:
    found = owner(labels, keeper)
    assert (found.job_id, f"{found.kind}/{found.name}") == (f"ml/{job}", job)
    assert (found.scheduler, found.namespace, found.pod) == ("kubernetes", "ml", "pod-0")


@pytest.mark.parametrize(
    ("job", "made", "expected"),
    [
        ("nightly-29460000", "2026-01-05T08:00:07Z", "cronjob/nightly"),
        ("nightly-29460000", "2026-01-06T07:00:00Z", "cronjob/nightly"),
        ("nightly-29460000", "2026-01-07T00:00:00Z", "job/nightly-29460000"),
        ("nightly-29460000", "2026-01-05T07:59:00Z", "job/nightly-29460000"),
        ("run-20260105", "2026-01-05T00:00:07Z", "job/run-20260105"),
        ("nightly-29460000", None, "job/nightly-29460000"),
    ],
)
def test_runs_of_a_cron_job_are_one_job(job: str, made: str | None, expected: str) -> None:
    assert owner({}, ("Job", job), creationTimestamp=made).job_id == f"ml/{expected}"


def test_only_the_controller_keeps_a_pod() -> None:
    references = [{"kind": "Workflow", "name": "other", "uid": "u", "apiVersion": "v1"}, *kept_by("Job", "mine")]
    assert owner({}, ownerReferences=references).job_id == "ml/job/mine"


def test_users_queues_priority_and_deadline_are_told_where_documented() -> None:
    thing = pod_object("p", labels={"hub.jupyter.org/username": "alice", "kueue.x-k8s.io/queue-name": "gold"})
    thing["spec"] |= {"priorityClassName": "low", "activeDeadlineSeconds": 3600}
    found = owner_of("ml", "p", read(thing), RULES)
    assert (found.user, found.partition, found.qos, found.time_limit_seconds) == ("alice", "gold", "low", 3600)
    assert found.workload_class == "interactive"


def test_no_label_of_a_pod_is_told_but_those_that_are_documented_or_named_by_a_rule() -> None:
    labels = {"example.com/secret": "hush", "app": "hush", "team": "hush", "owner": "hush", "user": "hush"}
    found = owner_of("ml", "p", read(pod_object("p", labels=labels)), RULES)
    assert "hush" not in str(found)
    assert found == owner_of("ml", "p", read(pod_object("p", labels={})), RULES)
    named = Rules(WorkloadSettings(rules=(WorkloadRule(team="quiet", label="team=h.*"),)))
    assert owner_of("ml", "p", read(pod_object("p", labels=labels)), named).team == "quiet"


def test_labels_that_the_operator_lists_are_kept_in_his_order() -> None:
    thing = read(pod_object("p", labels={"app": "llama", "team": "nlp", "empty": "", "secret": "hush"}))
    keys = ("team", "app", "empty", "absent")
    assert owner_of("ml", "p", thing, RULES, exported=keys).labels == (("team", "nlp"), ("app", "llama"))
    assert owner_of("ml", "p", None, RULES, exported=keys).labels == ()


def test_the_class_follows_kind_and_command() -> None:
    assert owner({"pod-template-hash": "a"}, ("ReplicaSet", "w-a")).workload_class == "serving"
    assert owner({"notebook-name": "n"}).workload_class == "interactive"
    assert owner({}, ("Job", "j")).workload_class == "batch"


def test_without_the_api_server_a_pod_is_itself() -> None:
    found = owner_of("ml", "p", None, RULES)
    assert (found.job_id, found.kind, found.name, found.workload_class) == ("ml/pod/p", "pod", "p", "batch")
    assert (size_of(None), restarts_of(None, None)) == ((0, 0), 0)


@pytest.mark.parametrize(
    ("annotations", "environ", "size"),
    [
        ({}, {}, (0, 0)),
        ({"leaderworkerset.sigs.k8s.io/size": "4"}, {}, (4, 0)),
        ({"kueue.x-k8s.io/pod-group-total-count": "3"}, {"PET_NNODES": "8"}, (8, 0)),
        ({}, {"WORLD_SIZE": "16"}, (0, 16)),
        ({}, {"RAY_NODE_COUNT": "2"}, (2, 0)),
        ({"leaderworkerset.sigs.k8s.io/size": "-4"}, {"WORLD_SIZE": "1e9", "PET_NNODES": "1:4"}, (0, 0)),
        ({}, {"WORLD_SIZE": "999999999"}, (0, 100_000)),
        ({}, {"WORLD_SIZE": "٣"}, (0, 0)),
    ],
)
def test_the_size_of_a_job_is_what_its_launcher_wrote(
    annotations: dict[str, str], environ: dict[str, str], size: tuple[int, int]
) -> None:
    thing = pod_object("p", annotations=annotations)
    thing["spec"]["containers"][0]["env"] = [{"name": key, "value": value} for key, value in environ.items()]
    assert size_of(read(thing)) == size


def test_restarts_are_those_of_the_containers_that_have_a_gpu() -> None:
    counts = {"train": 1, "log": 4}
    statuses = [{"name": name, "restartCount": count} for name, count in counts.items()]
    status = {"containerStatuses": statuses, "initContainerStatuses": [{"name": "mps", "restartCount": 9}]}
    found = read(pod_object("p") | {"status": status})
    assert [restarts_of(found, {name}) for name in (*counts, "mps", "unheard")] == [1, 4, 9, 0]
    assert restarts_of(found, None) == 4, "where it is unknown which container has the GPU: of those that run"


@pytest.mark.parametrize(
    ("taint", "condition"),
    [
        ("karpenter.sh/disrupted", "draining"),
        ("karpenter.sh/disruption", "draining"),
        ("karpenter.sh/unregistered", "not_ready"),
        ("example.com/gpu", ""),
    ],
)
def test_a_taint_that_keeps_all_new_pods_away_is_a_condition(taint: str, condition: str) -> None:
    spec = {"taints": [{"key": taint, "effect": "NoSchedule"}]}
    assert node_condition(msgspec.convert({"metadata": {}, "spec": spec}, KubernetesNode)) == condition


@pytest.mark.parametrize("kind", ["ReplicaSet", "DaemonSet", "Job", "Workflow"])
def test_replicas_and_separate_tasks_work_independently(kind: str) -> None:
    assert is_independent(read(pod_object("p", ownerReferences=kept_by(kind, "x"))))


@pytest.mark.parametrize("kind", ["StatefulSet", "PyTorchJob", "LeaderWorkerSet", "JobSet", "RayCluster", "Unheard"])
def test_what_may_be_a_group_is_taken_for_one(kind: str) -> None:
    assert not is_independent(read(pod_object("p", ownerReferences=kept_by(kind, "x"))))


@pytest.mark.parametrize(
    ("environ", "command", "independent"),
    [
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "PET_NNODES": "1"}, "torchrun --nnodes=1 train.py", True),
        ({}, "torchrun --nnodes 1 --nproc-per-node 4 train.py", True),
        ({}, "torchrun --nnodes=1 --rdzv-endpoint=localhost:29400 train.py", True),
        ({"RANK": "0"}, "vllm serve llama --tensor-parallel-size 4", True),
        ({"WORLD_SIZE": "2"}, "", False),
        ({"PET_NNODES": "1:4"}, "", False),
        ({"RAY_NODE_COUNT": "2"}, "", False),
        ({"MASTER_ADDR": "head"}, "", False),
        ({"JAX_COORDINATOR_ADDRESS": None}, "", False),
        ({}, "torchrun --nnodes=2 train.py", False),
        ({}, "torchrun --nnodes=1:4 --rdzv-backend=c10d train.py", False),
        ({}, "torchrun --nnodes 16 train.py", False),
        ({}, "accelerate launch --num_machines 2 train.py", False),
        ({}, "python -m sglang.launch_server --dist-init-addr head:5000", False),
        ({}, "ray start --address=head:6379 --block", False),
    ],
)
def test_a_pod_that_is_launched_as_part_of_a_group_is_not_independent(
    environ: dict[str, str | None], command: str, *, independent: bool
) -> None:
    thing = pod_object("p", ownerReferences=kept_by("Job", "x"))
    env = [{"name": key} | ({"value": value} if value else {}) for key, value in environ.items()]
    thing["spec"]["containers"][0] |= {"env": env, "command": ["sh", "-c"], "args": [command]}
    assert is_independent(read(thing)) is independent


def test_ranks_of_an_indexed_job_may_be_a_group() -> None:
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    assert not is_independent(read(pod_object("p", annotations=index, ownerReferences=kept_by("Job", "x"))))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TEXTS = st.dictionaries(
    st.sampled_from(["ray.io/cluster", "notebook-name", "pod-template-hash", "spark-app-name", *KUBEFLOW]) | st.text(),
    st.text(max_size=12),
    max_size=5,
)


@given(JSON, JSON, JSON)
def test_garbage_objects_are_refused_or_read_and_never_crash(metadata: Any, spec: Any, status: Any) -> None:
    for kind in (Pod, KubernetesNode):
        try:
            thing: Any = msgspec.json.decode(
                msgspec.json.encode({"metadata": metadata, "spec": spec, "status": status}), type=kind
            )
        except msgspec.MsgspecError:
            continue
        if isinstance(thing, PodObject):
            owner_of("ml", "p", thing, RULES)
            is_independent(thing)
            assert restarts_of(thing, None) >= 0
        else:
            node_condition(thing)


@given(TEXTS, TEXTS, st.text(max_size=20), st.text(max_size=20))
def test_whatever_is_written_on_a_pod_it_has_one_job(
    labels: dict[str, str], annotations: dict[str, str], kind: str, name: str
) -> None:
    thing = read(pod_object("p", labels=labels, annotations=annotations, ownerReferences=kept_by(kind, name)))
    found = owner_of("ml", "p", thing, RULES)
    assert found.job_id == f"ml/{found.kind}/{found.name}"
    assert found.kind == found.kind.lower()
    pods, world = size_of(thing)
    assert min(pods, world) >= 0


@pytest.mark.parametrize(
    ("namespace", "labels", "groups", "reserves"),
    [
        ("kai-resource-reservation", {"runai-gpu-group": "a"}, {"a"}, True),
        ("runai-reservation", {"runai-gpu-group": "a"}, {"a"}, True),
        ("kai-resource-reservation", {"app": "a"}, set(), False),
        ("ml", {"runai-gpu-group": "a"}, {"a"}, False),
        ("ml", {"runai-gpu-group/a": "a", "runai-gpu-group/b": "b", "runai-gpu-groups": "c"}, {"a", "b"}, False),
        ("ml", {}, set(), False),
    ],
)
def test_kais_reservations_are_in_its_namespaces_and_the_pods_of_a_group_have_its_label(
    namespace: str, labels: dict[str, str], groups: set[str], *, reserves: bool
) -> None:
    thing = read({"metadata": {"namespace": namespace, "labels": labels}})
    assert (set(gpu_groups(thing)), reserves_gpu(thing)) == (groups, reserves)
