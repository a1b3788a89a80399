"""The Kubernetes scheduler with a kubelet over real gRPC and an API server over real HTTP and TLS."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from exporter.core.model import MS, SECOND, UNKNOWN_JOB, Device, Process, Reading
from exporter.schedulers.base import CONDITIONS, SchedulerError, SchedulerState
from exporter.schedulers.kubernetes.scheduler import WatchIntervals, open_kubernetes
from exporter.schedulers.rules import Rules
from tests.kubernetes.cluster import (
    GPUS,
    INTERVALS,
    NODE,
    Node,
    gpu_uuid,
    holds,
    instant,
    kept_by,
    node,
    node_object,
    offered,
    pod_object,
    requesting,
    slice_object,
    uid_of,
    wait_for,
)
from tests.kubernetes.kubelet import Kubelet, claim, container, devices, pod

pytestmark = pytest.mark.slow

SLOW = WatchIntervals(refresh=3600, sync=5, grace=1, settle=0, retry=0.05, publish=0.01, restart_grace=1)
"""Queries the kubelet at startup, and then only when something requires it."""


@pytest.fixture(name="here")
def _here() -> Iterator[Node]:
    with node() as made:
        yield made


@pytest.fixture(name="alone")
def _alone() -> Iterator[Node]:
    """A node without an API server."""
    with node(with_api=False) as made:
        yield made


def reading(index: int, *processes: Process, busy: float = 0.0) -> Reading:
    return Reading(gpu_uuid(index), 0, SECOND, processes=processes, gr_engine_active=busy)


# The kubelet alone.


def test_without_the_api_server_a_pod_is_its_namespace_and_name(alone: Node, caplog: pytest.LogCaptureFixture) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0), gpu_uuid(1))
    alone.kubelet.gives("other", gpu_uuid(5), namespace="web")
    with caplog.at_level("INFO"):
        state = alone.held((0, "ml/pod/train-0"), (1, "ml/pod/train-0"), (5, "web/pod/other"))
    one = next(each for each in state.allocations if each.uuid == gpu_uuid(0))
    assert (one.owner.scheduler, one.owner.namespace, one.owner.pod) == ("kubernetes", "ml", "train-0")
    assert (one.owner.kind, one.owner.user, one.gpus, one.restarts) == ("pod", "", 2, 0)
    assert (state.condition, state.faults, state.unanswered_since, dict(state.members)) == ("", (), None, {})
    assert sum("API server is not asked" in line for line in caplog.messages) == 1
    assert one.start % MS == 0
    assert one.start <= alone.clock.now()


def test_nothing_is_said_before_the_kubelet_has_answered_and_then_what_to_do(alone: Node) -> None:
    alone.kubelet.stop()
    said = alone.refusal()
    assert "kubelet.sock: no kubelet there" in said
    assert "mount the host's /var/lib/kubelet/pod-resources, the folder and not the socket" in said


def test_no_answer_is_none_not_nobody(alone: Node) -> None:
    going = threading.Event()

    def slow(_: Any) -> bytes:
        going.wait()
        return b""

    alone.kubelet.says = slow
    assert alone.look() is None
    going.set()
    assert alone.until(lambda _: True, "an answer").allocations == ()


def test_an_end_is_told_once_at_the_look_that_missed_it(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    (begun,) = alone.held((0, "ml/pod/train-0")).allocations
    alone.kubelet.drops("train-0")
    alone.held()
    (ended,) = alone.ended
    assert ended.start == begun.start < (ended.end or 0) <= alone.clock.now()
    alone.kubelet.gives("next", gpu_uuid(0))
    alone.held((0, "ml/pod/next"))
    assert len(alone.ended) == 1


def test_one_after_another_is_not_sharing(alone: Node) -> None:
    alone.kubelet.gives("first", gpu_uuid(0))
    alone.held((0, "ml/pod/first"))
    alone.kubelet.holds(pod("second", container(devices("nvidia.com/gpu", gpu_uuid(0)))))
    state = alone.held((0, "ml/pod/second"))
    second = next(each for each in state.allocations if each.end is None)
    assert alone.ended[0].end == second.start


def test_at_is_when_the_kubelet_was_asked_and_stays_while_it_is_silent(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    before = alone.clock.now()
    first = alone.held((0, "ml/pod/train-0"))
    assert before <= first.at <= alone.clock.now()
    alone.until(lambda state: state.at > first.at, "a later list")
    alone.kubelet.stop()
    silent = alone.until(lambda state: state.faults, "a fault")
    assert [fault.kind for fault in silent.faults] == ["scheduler_failed"]
    again = alone.until(lambda _: True, "another look")
    assert (again.at, holds(again)) == (silent.at, holds(first)), "the last word stands, and gets old"


def test_a_kubelet_started_again_on_a_new_socket_is_asked(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    alone.held((0, "ml/pod/train-0"))
    alone.kubelet.stop()
    alone.until(lambda state: state.faults, "a fault")
    alone.kubelet.gives("train-1", gpu_uuid(1))
    alone.kubelet.start()
    alone.held((0, "ml/pod/train-0"), (1, "ml/pod/train-1"))
    assert alone.until(lambda state: not state.faults, "no fault")
    assert alone.ended == []


def test_a_socket_replaced_under_a_live_connection_is_noticed(alone: Node) -> None:
    alone.kubelet.gives("old", gpu_uuid(0))
    alone.held((0, "ml/pod/old"))
    another = Kubelet(alone.kubelet.socket)  # the first one still serves its existing connections
    another.gives("old", gpu_uuid(0))
    another.gives("new", gpu_uuid(1))
    alone.held((0, "ml/pod/old"), (1, "ml/pod/new"))
    another.stop()


def test_a_kubelet_that_has_just_started_and_knows_no_pods_yet_ends_none(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    alone.held((0, "ml/pod/train-0"))
    alone.kubelet.stop()
    pods, alone.kubelet.pods = alone.kubelet.pods, {}
    lists = alone.kubelet.lists
    alone.kubelet.start()
    doubted = alone.until(lambda _: alone.kubelet.lists > lists + 2, "three empty lists")
    assert holds(doubted) == {(gpu_uuid(0), "ml/pod/train-0")}
    alone.kubelet.pods = pods
    alone.until(lambda state: state.at > doubted.at and not state.faults, "a list that is believed")
    assert alone.ended == []
    assert any("does not list ml/train-0 yet" in message for _, message in alone.faults)


def test_a_pod_that_is_still_not_listed_after_a_while_has_ended(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    alone.held((0, "ml/pod/train-0"))
    alone.kubelet.stop()
    alone.kubelet.holds()
    alone.kubelet.start()
    alone.held()


@pytest.mark.parametrize("noise", [b"\xff", b"\x0a\x05\x0a\x03ab", b"\x0a\x02\x0a\xff", b"\x0b"])
def test_an_answer_that_is_cut_short_or_no_answer_changes_nothing(alone: Node, noise: bytes) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    alone.held((0, "ml/pod/train-0"))
    alone.kubelet.says = lambda _: noise
    state = alone.until(lambda state: state.faults, "a fault")
    assert "cannot be read" in state.faults[0].message
    assert holds(state) == {(gpu_uuid(0), "ml/pod/train-0")}
    alone.kubelet.says = None
    alone.until(lambda state: not state.faults, "no fault")


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "older than 1.20"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too often"),
        (grpc.StatusCode.INTERNAL, "kubelet's log"),
    ],
)
def test_a_refusal_of_the_kubelets_is_told_in_its_words(alone: Node, code: grpc.StatusCode, advice: str) -> None:
    def refuse(context: Any) -> bytes:
        context.abort(code, "because of this")
        return b""

    alone.kubelet.says = refuse
    said = alone.refusal()
    assert f"List failed: {code.name}: because of this: " in said
    assert advice in said


def test_a_hanging_kubelet_is_given_up_after_its_deadline_and_delays_no_look(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    alone.held((0, "ml/pod/train-0"))
    going = threading.Event()

    def hang(_: Any) -> bytes:
        going.wait()
        return b""

    alone.kubelet.says = hang
    state = alone.until(lambda state: state.faults, "a fault")
    going.set()
    assert "DEADLINE_EXCEEDED" in state.faults[0].message
    assert holds(state) == {(gpu_uuid(0), "ml/pod/train-0")}


def test_closing_does_not_wait_for_a_hanging_kubelet(alone: Node) -> None:
    going = threading.Event()

    def hang(_: Any) -> bytes:
        going.wait()
        return b""

    alone.kubelet.says = hang
    scheduler = alone.opens()
    wait_for(lambda: alone.kubelet.lists, "the question")
    scheduler.close()
    assert not scheduler.alive
    going.set()
    with pytest.raises(SchedulerError, match="its thread has ended"):
        scheduler.poll(0, GPUS, ())
    scheduler.close()


def test_work_on_a_gpu_that_nobody_holds_has_the_kubelet_asked_once(alone: Node) -> None:
    alone.opens(SLOW)
    alone.held()
    alone.kubelet.gives("train-0", gpu_uuid(3))
    asked = alone.kubelet.lists
    at_work = (reading(3, Process(7)), reading(5, busy=0.001))
    alone.until(holds, "the pod", *at_work)
    assert alone.kubelet.lists == asked + 1
    alone.kubelet.drops("train-0")
    more = (*at_work, reading(4, busy=0.5))
    alone.until(lambda state: not holds(state), "a question for the work on GPU 4", *more)
    wait_for(lambda: alone.kubelet.lists == asked + 3, "a question for GPU 3, now nobody's")
    for _ in range(20):
        alone.look(*more)
        alone.look()  # not read again yet
        time.sleep(0.005)  # enough for a query that must not come
    assert alone.kubelet.lists == asked + 3, "the same work is no reason to ask again"


def test_what_the_kubelet_offers_is_said_once(alone: Node, caplog: pytest.LogCaptureFixture) -> None:
    alone.kubelet.offered = [devices("nvidia.com/gpu", *map(gpu_uuid, range(8))), devices("rdma/hca", "a")]
    with caplog.at_level("INFO"):
        first = alone.held()
        alone.until(lambda state: state.at > first.at, "another list")
    assert caplog.messages.count("the kubelet offers 8 nvidia.com/gpu") == 1
    assert not any("rdma" in line for line in caplog.messages)


def test_a_kubelet_without_gpus_to_give_is_said_with_what_to_do(alone: Node, caplog: pytest.LogCaptureFixture) -> None:
    alone.held()
    assert sum("offers no GPU to pods: is the device plugin running?" in line for line in caplog.messages) == 1


# Shares.


def test_replicas_of_one_gpu_are_several_owners_and_a_pod_with_two_is_one(alone: Node) -> None:
    replicas = [f"{gpu_uuid(0)}::{index}" for index in range(4)]
    alone.kubelet.gives("one", replicas[0], replicas[3], resource="nvidia.com/gpu.shared")
    alone.kubelet.gives("two", replicas[1], resource="nvidia.com/gpu.shared")
    state = alone.held((0, "ml/pod/one"), (0, "ml/pod/two"))
    assert [each.gpus for each in state.allocations] == [1, 1]
    alone.kubelet.drops("one")
    alone.held((0, "ml/pod/two"))
    assert [each.owner.pod for each in alone.ended] == ["one"]


def test_under_mps_pods_own_replicas_and_the_server_is_a_process_of_none(here: Node) -> None:
    """As NVIDIA's plugin shares by `sharing.mps`: what its daemon runs is in a pod without a GPU."""
    here.api.has(pod_object("one"), pod_object("two"), pod_object("mps-control-daemon", namespace="nvidia"))
    for index, name in enumerate(("one", "two")):
        here.kubelet.gives(name, f"{gpu_uuid(0)}::{index}")
    for pid, name in ((1, "ml/one"), (2, "ml/two"), (3, "nvidia/mps-control-daemon")):
        process(here, pid, f"0::/kubepods/pod{uid_of(name)}/{'a' * 64}")
    here.held((0, "ml/pod/one"), (0, "ml/pod/two"))
    state = here.look(reading(0, *map(Process, (1, 2, 3))))
    assert state is not None
    assert {pid: member.job_id for pid, member in state.members.items()} == {1: "ml/pod/one", 2: "ml/pod/two"}


def test_init_and_sidecar_containers_of_a_pod_count_once(alone: Node) -> None:
    held = devices("nvidia.com/gpu", gpu_uuid(2))
    alone.kubelet.holds(pod("both", container(held, name="init"), container(held), container(name="sidecar")))
    (one,) = alone.held((2, "ml/pod/both")).allocations
    assert one.gpus == 1


def test_mig_instances_are_held_by_their_own_uuids_and_in_the_old_form(alone: Node) -> None:
    board, part, other = (
        gpu_uuid(0),
        "MIG-aaaaaaaa-0000-0000-0000-000000000001",
        "MIG-aaaaaaaa-0000-0000-0000-00000000000b",
    )
    alone.devices = (
        Device(board, "0", weight=0),
        Device(part, "0:1", weight=500_000, parent=board, profile="3g.40gb"),
        Device(other, "0:11", weight=500_000, parent=board, profile="3g.40gb"),
    )
    alone.kubelet.gives("new", part, resource="nvidia.com/mig-3g.40gb")
    alone.kubelet.gives("old", f"MIG-{board}/11/0", resource="nvidia.com/mig-3g.40gb")
    state = alone.until(lambda state: len(holds(state)) == 2, "two holders")
    assert holds(state) == {(part, "ml/pod/new"), (other, "ml/pod/old")}
    alone.kubelet.holds(pod("all", container(devices("nvidia.com/gpu", board))))
    state = alone.until(lambda state: len(holds(state)) == 2 and state.allocations[0].owner.pod == "all", "one holder")
    assert holds(state) == {(part, "ml/pod/all"), (other, "ml/pod/all")}


def test_an_id_that_is_no_gpu_is_refused_with_the_reason_and_nothing_else_is_lost(alone: Node) -> None:
    alone.kubelet.gives("good", gpu_uuid(0))
    alone.kubelet.gives("half", gpu_uuid(1), "GPU-nonsense")
    alone.kubelet.gives("hami", f"{gpu_uuid(3)}-7")
    state = alone.held((0, "ml/pod/good"), (1, "ml/pod/half"), *((n, UNKNOWN_JOB) for n in range(2, 8)))
    (fault,) = state.faults
    assert fault.kind == "scheduler_refused"
    assert "ml/half holds 'GPU-nonsense': no GPU of the source has this id" in fault.message
    assert f"ml/hami holds '{gpu_uuid(3)}-7'" in fault.message


def test_while_an_id_is_not_resolved_no_gpu_that_it_may_be_is_unallocated(alone: Node) -> None:
    board, part = gpu_uuid(0), "MIG-aaaaaaaa-0000-0000-0000-000000000001"
    free = Device("MIG-aaaaaaaa-0000-0000-0000-000000000002", "0:2", weight=500_000, parent=board, profile="3g.40gb")
    alone.devices = (
        Device(board, "0", weight=0),
        Device(part, "0:1", weight=500_000, parent=board, profile="3g.40gb"),
        free,
        Device(gpu_uuid(1), "1"),
    )
    alone.kubelet.gives("mine", part)
    alone.kubelet.gives("unseen", "MIG-aaaaaaaa-0000-0000-0000-000000000009")
    first = alone.until(lambda state: len(holds(state)) == 2, "the instance that may be its")
    assert holds(first) == {(part, "ml/pod/mine"), (free.uuid, UNKNOWN_JOB)}, "a board without instances is free"
    later = alone.until(lambda state: state.at > first.at, "another list")
    assert {each.start for each in later.allocations} == {each.start for each in first.allocations}
    alone.kubelet.gives("hami", f"{gpu_uuid(1)}-7")
    alone.until(lambda state: (gpu_uuid(1), UNKNOWN_JOB) in holds(state), "any GPU may be its")
    alone.kubelet.drops("unseen")
    alone.kubelet.drops("hami")
    last = alone.until(lambda state: len(holds(state)) == 1, "nothing is unknown")
    assert {each.uuid for each in alone.ended if each.owner.job_id == UNKNOWN_JOB} == {free.uuid, gpu_uuid(1)}
    assert last.faults == ()


def test_a_gpu_of_unknown_owner_that_begins_to_work_has_the_kubelet_asked(alone: Node) -> None:
    alone.kubelet.gives("hami", f"{gpu_uuid(1)}-7")
    alone.opens(SLOW)
    alone.held(*((n, UNKNOWN_JOB) for n in range(8)))
    alone.kubelet.gives("train-0", gpu_uuid(3))
    work = reading(3, Process(7))
    alone.until(lambda state: (gpu_uuid(3), "ml/pod/train-0") in holds(state), "the pod", work)


def test_other_devices_of_nvidias_operators_are_no_gpus(alone: Node) -> None:
    """Of its network operators, whose ids may be numbers, and of HAMi, which counts memory and cores."""
    for resource in ("hostdev", "mlnxnics", "gpumem", "gpucores"):
        alone.kubelet.gives(resource, "0", "0000:3b:00.2", resource=f"nvidia.com/{resource}")
    alone.kubelet.gives("mine", gpu_uuid(1))
    assert alone.held((1, "ml/pod/mine")).faults == ()


def test_only_resources_that_are_gpus_count(alone: Node) -> None:
    alone.kubelet.gives("nic", "nonsense", resource="rdma/hca")
    alone.kubelet.gives("mine", gpu_uuid(1), resource="example.com/gold")
    alone.opens(resources=("nvidia.com/*", "example.com/gold*"))
    assert alone.held((1, "ml/pod/mine")).faults == ()


def test_what_a_gpu_is_follows_the_source(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0), gpu_uuid(9))
    alone.opens(SLOW)
    state = alone.until(lambda state: state.faults, "GPU 9 is not seen")
    assert holds(state) == {(gpu_uuid(0), "ml/pod/train-0")}
    alone.devices = (*GPUS, Device(gpu_uuid(9), "9"))
    state = alone.held((0, "ml/pod/train-0"), (9, "ml/pod/train-0"))
    assert (state.faults, state.allocations[0].gpus) == ((), 2)


# With the API server.


RESERVATIONS = "kai-resource-reservation"


def in_group(thing: dict[str, Any], *groups: str) -> dict[str, Any]:
    """Label the pod as KAI Scheduler does: by one group, or by several."""
    several = {f"runai-gpu-group/{group}": group for group in groups}
    thing["metadata"]["labels"] = {"runai-gpu-group": groups[0]} if len(groups) == 1 else several
    return thing


def test_a_gpu_that_kai_reserves_for_fractions_is_held_by_the_pods_that_share_it(here: Node) -> None:
    for index in (0, 1):
        here.api.has(in_group(pod_object(f"gpu-reservation-{index}", namespace=RESERVATIONS), f"group-{index}"))
        here.kubelet.gives(f"gpu-reservation-{index}", gpu_uuid(index), namespace=RESERVATIONS)
    here.held(*((n, f"{RESERVATIONS}/pod/gpu-reservation-{n}") for n in (0, 1)))
    train, serve = pod_object("train-0", ownerReferences=kept_by("Job", "train")), pod_object("serve", namespace="web")
    here.api.has(in_group(train, "group-0"), in_group(serve, "group-0", "group-1"))
    here.api.has(pod_object("cpu"), in_group(pod_object("over", phase="Failed"), "group-0"))
    here.held((0, "ml/job/train"), (0, "web/pod/serve"), (1, "web/pod/serve"))
    assert here.until(lambda state: state.allocations, "again").faults == ()
    process(here, 77, f"0::/kubepods/pod{train['metadata']['uid']}/c")
    assert here.scheduler is not None
    assert here.scheduler.members([77])[77].job_id == "ml/job/train", "their work divides what they share"
    here.api.deletes(train)
    here.held((0, "web/pod/serve"), (1, "web/pod/serve"))


def test_a_label_of_a_group_alone_gives_nobody_a_gpu(here: Node) -> None:
    """Only what KAI reserves, in its own namespace, is handed on to pods that say they are of the group."""
    here.api.has(in_group(pod_object("mine"), "group-0"), in_group(pod_object("other"), "group-0"))
    here.kubelet.gives("mine", gpu_uuid(0))
    here.held((0, "ml/pod/mine"))


def test_a_pod_is_its_job_with_its_labels_class_and_restarts(here: Node) -> None:
    thing = pod_object("train-llama-0-xyz", ownerReferences=kept_by("Job", "train-llama"))
    thing["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    thing["status"]["containerStatuses"] = [status("main", 3), status("side", 7)]
    thing["spec"]["priorityClassName"] = "high"
    here.api.has(thing)
    here.kubelet.gives("train-llama-0-xyz", gpu_uuid(0))
    (one,) = here.held((0, "ml/job/train-llama")).allocations
    assert (one.owner.name, one.owner.kind, one.owner.pod) == ("train-llama", "job", "train-llama-0-xyz")
    assert (one.owner.partition, one.owner.qos, one.owner.workload_class) == ("research", "high", "batch")
    assert one.restarts == 3


def test_labels_of_pods_are_exported_if_their_keys_are_listed(here: Node) -> None:
    first = pod_object("train-0", labels={"app": "llama", "other": "x"}, ownerReferences=kept_by("Job", "train"))
    here.api.has(first)
    here.kubelet.gives("train-0", gpu_uuid(0))
    scheduler = here.opens(pod_labels=("app", "app"))
    (one,) = here.held((0, "ml/job/train")).allocations
    assert one.owner.labels == (("app", "llama"),)
    scheduler.update(Rules())
    here.api.has(first | {"metadata": first["metadata"] | {"labels": {"app": "mistral"}}})
    here.until(lambda state: state.allocations[0].owner.labels == (("app", "mistral"),), "the new label")


def status(name: str, restarts: int) -> dict[str, Any]:
    return {"name": name, "restartCount": restarts, "ready": True, "image": "i", "imageID": "i"}


def test_what_runs_decides_the_class(here: Node) -> None:
    thing = pod_object("server", ownerReferences=kept_by("Job", "server"))
    thing["spec"]["containers"][0] |= {"command": ["vllm", "serve"], "args": ["llama"]}
    here.api.has(thing)
    here.kubelet.gives("server", gpu_uuid(0))
    (one,) = here.held((0, "ml/job/server")).allocations
    assert one.owner.workload_class == "serving"


def test_a_gpu_is_held_since_the_kubelet_took_the_pod_in(here: Node) -> None:
    thing = pod_object("train-0")
    thing["status"]["startTime"] = instant(time.time() - 100)
    here.api.has(thing)
    here.kubelet.gives("train-0", gpu_uuid(0))
    (one,) = here.held((0, "ml/pod/train-0")).allocations
    assert 98 * SECOND < here.clock.now() - one.start < 115 * SECOND
    (again,) = here.held((0, "ml/pod/train-0")).allocations
    assert again.start == one.start, "a start once told stays"


def test_a_pod_that_an_earlier_list_did_not_name_began_after_it(here: Node) -> None:
    first = here.held()
    thing = pod_object("train-0")
    thing["status"]["startTime"] = instant(time.time() - 100)
    here.api.has(thing)
    here.kubelet.gives("train-0", gpu_uuid(0))
    (one,) = here.held((0, "ml/pod/train-0")).allocations
    assert one.start >= first.at


def test_replicas_on_one_gpu_are_one_owner_and_each_has_only_the_gpus_of_its_pod(here: Node) -> None:
    for index in range(3):
        thing = pod_object(f"web-{index}", ownerReferences=kept_by("ReplicaSet", "web-abc", "apps/v1"))
        thing["metadata"]["labels"] = {"pod-template-hash": "abc"}
        thing["status"]["containerStatuses"] = [status("main", index)]
        here.api.has(thing)
    here.kubelet.gives("web-2", f"{gpu_uuid(0)}::0")
    here.kubelet.gives("web-1", f"{gpu_uuid(0)}::1")
    here.kubelet.gives("web-0", gpu_uuid(1))
    state = here.held((0, "ml/deployment/web"), (1, "ml/deployment/web"))
    assert {(each.gpus, each.owner.pod) for each in state.allocations} == {(1, "web-0")}
    groups = {each.uuid: each.group for each in state.allocations}
    assert groups[gpu_uuid(1)] == uid_of("ml/web-0") != groups[gpu_uuid(0)]
    assert {each.uuid: each.restarts for each in state.allocations} == {gpu_uuid(0): 2, gpu_uuid(1): 0}


def test_only_restarts_of_containers_with_a_gpu_count(here: Node) -> None:
    """A proxy that restarts while the weights are loaded for the first time makes no restart of the job."""
    thing = pod_object("train-0")
    thing["status"]["containerStatuses"] = [status("train", 0), status("log", 4), status("dra", 1)]
    thing["status"]["initContainerStatuses"] = [status("istio-proxy", 3), status("mps", 2)]
    here.api.has(thing)
    gpus = [devices("nvidia.com/gpu", gpu_uuid(n)) for n in range(3)]
    proxy = container(devices("rdma/hca", "a"), name="istio-proxy")
    here.kubelet.holds(pod("train-0", container(gpus[0], name="train"), proxy, container(gpus[0], name="mps")))
    (one,) = here.held((0, "ml/pod/train-0")).allocations
    assert one.restarts == 2, "of a sidecar with a GPU"


def test_a_gpu_that_two_replicas_share_is_of_the_larger_one(here: Node) -> None:
    for name, gpus in (("web-0", [0]), ("web-1", [0, 1])):
        here.api.has(pod_object(name, ownerReferences=kept_by("ReplicaSet", "web", "apps/v1")))
        here.kubelet.gives(name, *(f"{gpu_uuid(gpu)}::{name[-1]}" for gpu in gpus))
    state = here.held((0, "ml/replicaset/web"), (1, "ml/replicaset/web"))
    assert {(each.gpus, each.group) for each in state.allocations} == {(2, uid_of("ml/web-1"))}


def test_pods_that_work_together_are_one_job_with_all_their_gpus(here: Node) -> None:
    for index in range(2):
        thing = pod_object(f"db-{index}", ownerReferences=kept_by("StatefulSet", "db", "apps/v1"))
        launched = pod_object(f"pt-{index}", ownerReferences=kept_by("Job", "pt"))
        launched["spec"]["containers"][0]["env"] = [{"name": "MASTER_ADDR", "value": "pt-0"}]
        here.api.has(thing, launched)
        here.kubelet.gives(f"db-{index}", gpu_uuid(index))
        here.kubelet.gives(f"pt-{index}", gpu_uuid(2 + index))
    jobs = ("ml/statefulset/db", "ml/statefulset/db", "ml/job/pt", "ml/job/pt")
    state = here.held(*enumerate(jobs))
    assert {(each.gpus, each.group) for each in state.allocations} == {(2, "")}


def test_a_group_that_says_its_size_has_gpus_elsewhere_too(here: Node) -> None:
    sized = pod_object("lws-0", annotations={"leaderworkerset.sigs.k8s.io/size": "4"})
    sized["metadata"]["labels"] = {"leaderworkerset.sigs.k8s.io/name": "llama"}
    world = pod_object("pt-0", ownerReferences=kept_by("PyTorchJob", "pt", "kubeflow.org/v1"))
    world["metadata"]["labels"] = {"training.kubeflow.org/job-name": "pt"}
    world["spec"]["containers"][0]["env"] = [{"name": "WORLD_SIZE", "value": "16"}]
    here.api.has(sized, world)
    here.kubelet.gives("lws-0", gpu_uuid(0), gpu_uuid(1))
    here.kubelet.gives("pt-0", gpu_uuid(2))
    state = here.held((0, "ml/leaderworkerset/llama"), (1, "ml/leaderworkerset/llama"), (2, "ml/pytorchjob/pt"))
    assert {each.owner.name: each.gpus for each in state.allocations} == {"llama": 8, "pt": 16}


def test_gpus_that_are_reserved_for_an_init_container_are_not_unallocated(
    here: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Five for the init container, of which the main one takes over two: three are on no list until the pod ends."""
    here.api.has(requesting("train-0", init=5, main=1, sidecar=1), requesting("first", init=0, main=1))
    sidecar = container(devices("nvidia.com/gpu", gpu_uuid(1)), name="beside")
    here.kubelet.gives("first", gpu_uuid(7))
    here.kubelet.pods["ml", "train-0"] = pod("train-0", container(devices("nvidia.com/gpu", gpu_uuid(0))), sidecar)
    known = ((0, "ml/pod/train-0"), (1, "ml/pod/train-0"), (7, "ml/pod/first"))
    with caplog.at_level("INFO"):
        state = here.held(*known, *((n, UNKNOWN_JOB) for n in range(2, 7)))
        later = here.until(lambda other: other.at > state.at, "another list")
    assert (later.faults, {each.start for each in later.allocations}) == (
        (),
        {each.start for each in state.allocations},
    )
    assert sum("pod ml/train-0 holds 3 nvidia.com/gpu for init containers" in line for line in caplog.messages) == 1
    here.api.has(requesting("train-0", init=5, main=1, sidecar=1, phase="Succeeded"))
    here.held((7, "ml/pod/first"))


def test_a_pod_whose_only_gpus_are_an_init_container_s_holds_them(here: Node) -> None:
    here.api.has(requesting("load", init=2, main=0))
    here.held()
    here.kubelet.holds(pod("load", container()))
    here.held(*((n, UNKNOWN_JOB) for n in range(8)))


def test_gpus_that_a_dra_driver_gave_for_a_resource_s_name_are_listed_as_claims(here: Node) -> None:
    here.api.has(slice_object(offered("gpu-0", uuid=gpu_uuid(6))), requesting("pod-gpu-0", init=0, main=1))
    here.kubelet.holds(dra("gpu-0"))
    here.held((6, "ml/pod/pod-gpu-0"))


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_in_a_terminal_phase_holds_nothing_though_the_kubelet_lists_it(here: Node, phase: str) -> None:
    here.api.has(pod_object("train-0"))
    here.kubelet.gives("train-0", gpu_uuid(0))
    here.held((0, "ml/pod/train-0"))
    here.api.has(pod_object("train-0", phase=phase))
    here.held()
    assert len(here.ended) == 1


def test_a_pod_being_deleted_holds_until_the_kubelet_lists_it_no_more(here: Node) -> None:
    thing = pod_object("train-0", ownerReferences=kept_by("Job", "train"))
    here.api.has(thing)
    here.kubelet.gives("train-0", gpu_uuid(0))
    held = here.held((0, "ml/job/train"))
    thing["metadata"] |= {"deletionTimestamp": instant(time.time()), "deletionGracePeriodSeconds": 30}
    here.api.has(thing)
    here.api.deletes(thing)
    later = here.until(lambda state: state.at > held.at + SECOND // 2, "lists after the deletion")
    assert holds(later) == holds(held), "and keeps its name"
    here.kubelet.drops("train-0")
    here.held()


def test_a_change_that_the_api_server_tells_of_is_looked_at_at_once(here: Node) -> None:
    here.opens(SLOW)
    here.held()
    here.kubelet.gives("train-0", gpu_uuid(0))
    here.api.has(pod_object("train-0", ownerReferences=kept_by("Job", "train")))
    here.held((0, "ml/job/train"))
    here.kubelet.drops("train-0")
    here.api.deletes(pod_object("train-0"))
    here.held()


def test_a_pod_named_by_the_kubelet_first_is_told_when_its_job_is_known(here: Node) -> None:
    here.held()
    here.kubelet.gives("train-0", gpu_uuid(0))
    asked = here.kubelet.lists
    wait_for(lambda: here.kubelet.lists > asked, "the kubelet's list")
    assert here.until(lambda _: True, "a look").allocations == ()
    here.api.has(pod_object("train-0", ownerReferences=kept_by("Job", "train")))
    here.held((0, "ml/job/train"))
    assert here.ended == [], "it was never told under another name"


def test_the_api_server_is_not_waited_for_for_ever(here: Node) -> None:
    here.kubelet.gives("static", gpu_uuid(0))
    here.held((0, "ml/pod/static"))


def test_the_end_of_a_name_and_the_next_begin_together(here: Node) -> None:
    here.kubelet.gives("train-0", gpu_uuid(0))
    first = here.held((0, "ml/pod/train-0"))
    here.until(lambda state: state.at > first.at, "another list")
    here.api.has(pod_object("train-0", ownerReferences=kept_by("Job", "train")))
    state = here.held((0, "ml/job/train"))
    begun = next(each for each in state.allocations if each.end is None)
    # On a busy machine the pod's start, which only the API server knows, may be before it was first seen.
    assert here.ended[0].end == max(begun.start, here.ended[0].start)


# The node.


@pytest.mark.parametrize(
    ("thing", "state"),
    [
        (node_object(), ""),
        (node_object(unschedulable=True), "cordoned"),
        (node_object(taints=[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]), "cordoned"),
        (node_object(ready="False"), "not_ready"),
        (node_object(ready="Unknown", unschedulable=True), "cordoned"),
        (node_object(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]), "not_ready"),
        (node_object(taints=[{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]), "down"),
        (node_object(taints=[{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]), "draining"),
        (node_object(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]), "draining"),
        (node_object(taints=[{"key": "karpenter.sh/disruption", "effect": "NoSchedule"}]), "draining"),
        (node_object(taints=[{"key": "karpenter.sh/unregistered", "effect": "NoExecute"}]), "not_ready"),
        (node_object(taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]), ""),
    ],
)
def test_why_the_node_takes_no_work(here: Node, thing: dict[str, Any], state: str) -> None:
    here.api.has(thing)
    assert here.until(lambda said: said.condition == state, state).condition in CONDITIONS | {""}


def test_a_cordon_is_seen_as_it_comes_and_goes(here: Node) -> None:
    here.until(lambda state: not state.condition, "open")
    here.api.has(node_object(unschedulable=True))
    here.until(lambda state: state.condition == "cordoned", "cordoned")
    here.api.has(node_object())
    here.until(lambda state: not state.condition, "open again")


def test_a_node_name_that_the_api_server_does_not_know_is_told(here: Node) -> None:
    here.opens(node_name="elsewhere")
    state = here.until(lambda state: state.faults, "a fault")
    assert "knows no node 'elsewhere': set kubernetes.node_name" in state.faults[0].message


# DRA.


def dra(name: str, *, pool: str = NODE, driver: str = "gpu.nvidia.com", cdi: str = "") -> Any:
    given = claim(cdi or f"k8s.gpu.nvidia.com/claim={uid_of(name)}-{name}", driver=driver, pool=pool, device=name)
    return pod(f"pod-{name}", container(claims=[given]))


def test_a_claim_is_the_gpu_that_its_resource_slice_says(here: Node) -> None:
    here.api.has(slice_object(offered("gpu-0", type="gpu", uuid=gpu_uuid(6))))
    here.kubelet.holds(dra("gpu-0"), dra("channel-3", driver="compute-domain.nvidia.com"))
    here.api.has(pod_object("pod-gpu-0", ownerReferences=kept_by("Job", "dra")), pod_object("pod-channel-3"))
    assert here.held((6, "ml/job/dra")).faults == ()


def test_of_a_pool_only_the_newest_generation_counts(here: Node) -> None:
    here.api.has(slice_object(offered("gpu-0", uuid=gpu_uuid(1)), generation=2, name="new"))
    here.api.has(slice_object(offered("gpu-0", uuid=gpu_uuid(0)), generation=1, name="old"))
    here.kubelet.holds(dra("gpu-0"))
    here.api.has(pod_object("pod-gpu-0"))
    here.held((1, "ml/pod/pod-gpu-0"))


def test_a_claim_that_is_held_outlives_its_slice_and_a_slice_without_its_device(here: Node) -> None:
    """The kubelet deletes the slices of a driver that is away; a driver leaves out what is unhealthy."""
    both = slice_object(offered("gpu-0", uuid=gpu_uuid(6)), offered("gpu-1", uuid=gpu_uuid(7)))
    here.api.has(both, pod_object("pod-gpu-0"), pod_object("pod-gpu-1"), pod_object("later"))
    here.kubelet.holds(dra("gpu-0"), dra("gpu-1"))
    here.held((6, "ml/pod/pod-gpu-0"), (7, "ml/pod/pod-gpu-1"))
    here.api.has(slice_object(offered("gpu-1", uuid=gpu_uuid(7)), generation=2))
    here.kubelet.gives("later", gpu_uuid(1))
    here.until(lambda state: (gpu_uuid(1), "ml/pod/later") in holds(state), "a later pod")
    assert here.ended == []
    here.api.deletes(both)
    here.kubelet.holds(dra("gpu-0"))
    here.until(lambda _: len(here.ended) > 1, "two ends")
    here.kubelet.holds(dra("gpu-0"), dra("gpu-1"))
    state = here.until(lambda state: state.faults, "what nobody held is not kept")
    assert "'gpu-1' of DRA pool 'node-1'" in state.faults[0].message
    assert {each.owner.pod for each in here.ended} == {"later", "pod-gpu-1"}, "who held a GPU held it throughout"


def test_a_mig_device_made_on_demand_is_the_only_one_of_its_profile_or_refused(here: Node) -> None:
    board, part = gpu_uuid(0), "MIG-aaaaaaaa-0000-0000-0000-000000000001"
    here.devices = (Device(board, "0", weight=0), Device(part, "0:1", parent=board, profile="1g.12gb"))
    here.api.has(slice_object(offered("gpu-0-mig-1g12gb-19-0", type="mig", parentUUID=board, profile="1g.12gb")))
    here.api.has(pod_object("pod-gpu-0-mig-1g12gb-19-0"))
    here.kubelet.holds(dra("gpu-0-mig-1g12gb-19-0"))
    here.until(lambda state: holds(state) == {(part, "ml/pod/pod-gpu-0-mig-1g12gb-19-0")}, "the instance")
    here.devices += (Device("MIG-b", "0:2", parent=board, profile="1g.12gb"),)
    state = here.until(lambda state: state.faults, "two that it may be")
    assert holds(state) == {(part, UNKNOWN_JOB), ("MIG-b", UNKNOWN_JOB)}
    assert "has 2 1g.12gb" in state.faults[0].message


def test_slices_are_asked_for_only_where_there_are_claims(here: Node) -> None:
    path = "/apis/resource.k8s.io/v1/resourceslices"
    here.api.has(pod_object("train-0"))
    here.kubelet.gives("train-0", gpu_uuid(0))
    here.held((0, "ml/pod/train-0"))
    assert here.api.asked(path, watch=False) == []
    here.api.has(slice_object(offered("gpu-0", uuid=gpu_uuid(6))), pod_object("pod-gpu-0"))
    here.kubelet.holds(dra("gpu-0"))
    here.held((6, "ml/pod/pod-gpu-0"))
    assert len(here.api.asked(path, watch=False)) == 1


def test_without_slices_a_name_counts_where_it_can_mean_one_gpu_only(alone: Node) -> None:
    alone.kubelet.holds(
        dra("gpu-0"), dra(f"gpu-{gpu_uuid(2)[4:]}"), pod("o", container(claims=[claim("nvidia.com/gpu=gpu-1")]))
    )
    state = alone.until(lambda state: state.faults, "gpu-0 may be several")
    assert {uuid for uuid, job in holds(state) if job != UNKNOWN_JOB} == {gpu_uuid(2)}
    assert {uuid for uuid, _ in holds(state)} == {device.uuid for device in GPUS}
    assert "let the daemon list resourceslices" in state.faults[0].message
    for index in (0, 1):
        folder = alone.proc / f"driver/nvidia/gpus/0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t H\nGPU UUID: \t {gpu_uuid(index)}\nDevice Minor: \t {index}\n")
    alone.devices = (*GPUS, Device("GPU-new", "8"))
    state = alone.until(lambda state: not state.faults, "minor and ordinal agree")
    assert {uuid for uuid, _ in holds(state)} == {gpu_uuid(0), gpu_uuid(1), gpu_uuid(2)}


# Members.


def test_processes_are_told_by_the_pod_in_their_cgroup(here: Node) -> None:
    here.api.has(pod_object("train-0", ownerReferences=kept_by("Job", "train")), pod_object("web"))
    here.kubelet.gives("train-0", gpu_uuid(0))
    uid, other = uid_of("ml/train-0"), uid_of("ml/web")
    slices = f"pod{uid.replace('-', '_')}.slice"
    forms = [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{slices}/cri-{'a' * 64}.scope",
        f"4:memory:/kubepods/besteffort/pod{uid}/{'a' * 64}\n1:name=systemd:/kubepods/besteffort/pod{uid}/{'a' * 64}",
        f"0::/../../kubepods-{slices}/crio-{'a' * 64}.scope/container",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-{slices}/x.scope",
        f"0::/kubepods/pod{uid}",
        f"0::/kubepods/pod{other}/{'a' * 64}",
        "0::/system.slice/ssh.service",
        f"0::/kubepods/pod{uid}0/x",
        f"0::/user.slice/user-1001.slice/user@1001.service/kubepods/pod{uid}",
        f"0::/system.slice/mine.service/kubepods/pod{uid}",
        f"0::/kubepods/pod{other}/{'a' * 64}/pod{uid}",
        f"0::/kubepods/pod{uid}/{'a' * 64}/system.slice/sshd.service/kubepods/pod{other}",
    ]
    theirs = {*range(100, 105), 100 + len(forms) - 1}
    for pid, cgroup in enumerate(forms, start=100):
        process(here, pid, cgroup)
    here.held((0, "ml/job/train"))
    state = here.look(reading(0, *(Process(pid) for pid in range(100, 100 + len(forms)))))
    assert state is not None
    assert {pid: member.job_id for pid, member in state.members.items()} == dict.fromkeys(theirs, "ml/job/train")
    assert state.members[101].rank == "101"
    assert here.scheduler is not None
    told = here.scheduler.members(range(99, 101 + len(forms)))
    assert {pid: member.job_id for pid, member in told.items()} == dict.fromkeys(theirs, "ml/job/train")
    assert told[101].rank == "101"


def test_without_the_api_server_nobody_s_pod_is_known(alone: Node) -> None:
    alone.kubelet.gives("train-0", gpu_uuid(0))
    process(alone, 100, f"0::/kubepods/pod{uid_of('ml/train-0')}")
    scheduler = alone.opens()
    assert scheduler.members([100]) == {}, "nor before the kubelet has answered"
    alone.held((0, "ml/pod/train-0"))
    assert scheduler.members([100]) == {}


def process(here: Node, pid: int, cgroup: str) -> None:
    folder = here.proc / f"{pid}"
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (python) S {' '.join(['0'] * 18)} 5 {' '.join(['0'] * 30)}\n")
    (folder / "cgroup").write_text(cgroup + "\n")
    (folder / "status").write_text("Name:\tpython\nUid:\t1000\t0\t0\t0\n")
    (folder / "environ").write_bytes(b"RANK=%d\0" % pid)
    (folder / "cmdline").write_bytes(b"python\0")


# Many.


def test_two_hundred_pods_come_and_go_and_every_hold_ends_once(here: Node) -> None:
    """Each of two hundred pods was held once, on its own GPU, by its own job."""
    here.held()
    names = [f"job-{index}-x" for index in range(200)]
    for index, name in enumerate(names):
        here.kubelet.gives(name, f"{gpu_uuid(index % 8)}::{index}")
        here.api.has(pod_object(name, ownerReferences=kept_by("Job", f"job-{index}")))
        here.look()
        if index >= 50:
            gone = names[index - 50]
            here.until(lambda state, g=index - 50: (gpu_uuid(g % 8), f"ml/job/job-{g}") in holds(state), gone)  # type: ignore[misc]
            here.kubelet.drops(gone)
            here.api.deletes(pod_object(gone))
    here.held(*((index % 8, f"ml/job/job-{index}") for index in range(150, 200)))
    here.kubelet.holds()
    here.held()
    told = [(each.uuid, each.owner.job_id) for each in here.ended]
    assert sorted(told) == sorted((gpu_uuid(index % 8), f"ml/job/job-{index}") for index in range(200))
    assert all(each.start <= (each.end or 0) for each in here.ended)
    assert {kind for kind, _ in here.faults} == set()


# Opening.


def test_where_it_runs_is_read_from_the_pods_environment(here: Node) -> None:
    here.api.has(pod_object("train-0", ownerReferences=kept_by("Job", "train")))
    here.kubelet.gives("train-0", gpu_uuid(0))
    config = here.config(api_url="auto", node_name="")
    environ = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": f"{here.api.port}",
        "NODE_NAME": NODE,
    }
    here.scheduler = open_kubernetes(config, environ=environ, intervals=INTERVALS)
    here.held((0, "ml/job/train"))


def test_the_words_of_a_look_are_whole(here: Node) -> None:
    state = here.until(lambda _: True, "a word")
    assert isinstance(state, SchedulerState)
    assert state == SchedulerState((), at=state.at)
