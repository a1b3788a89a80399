"""GPUs that HAMi's and Volcano's schedulers name in annotations: the forms, and who is believed.

The forms follow Project-HAMi/HAMi (docs/develop/protocol.md, pkg/device/devices.go,
pkg/device/nvidia/mig_allocations.go) and volcano-sh/volcano (pkg/scheduler/api/devices/nvidia/vgpu/utils.go, mig.go).
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import UNKNOWN_JOB, Device
from exporter.schedulers.base import SchedulerState
from exporter.schedulers.kubernetes.kubelet import ContainerDevices, DeviceResolver, is_virtual
from exporter.schedulers.kubernetes.objects import Pod
from exporter.schedulers.kubernetes.vgpu import Assigned, Assignments
from tests.each import each
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import Node, gpu_uuid, holds, node, pod_object

HAMI, HAMI_MIG, VOLCANO = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-mig-allocations", "volcano.sh/vgpu-ids-new"
A, B, C = (gpu_uuid(index) for index in range(3))
INSTANCES = tuple(f"MIG-aaaaaaaa-0000-0000-0000-00000000000{n}" for n in (1, 2))


def device(gpu: str) -> str:
    return f"{gpu},NVIDIA,3000,30:"


def hami(*containers: tuple[str, ...], **more: str) -> Json:
    """Return HAMi's annotations of a pod whose containers have these GPUs, once it has them."""
    text = "".join("".join(map(device, gpus)) + ";" for gpus in containers)
    left = {"hami.io/vgpu-node": "node-1", "hami.io/vgpu-devices-to-allocate": ";" * len(containers)}
    return left | {HAMI: text, "hami.io/bind-phase": "success"} | more


def volcano(*containers: tuple[str, ...], **more: str) -> Json:
    """Return Volcano's annotations, which leave out containers that request no GPU."""
    text = ";".join("".join(map(device, gpus)) for gpus in containers)
    return {"volcano.sh/vgpu-node": "node-1", VOLCANO: text, "volcano.sh/bind-phase": "success"} | more


def instances(*found: tuple[int, int, str, str]) -> Json:
    """Return HAMi's annotation of MIG instances: container, device, GPU and instance."""
    made = [
        {
            "containerIndex": container,
            "deviceIndex": index,
            "gpuUUID": gpu,
            "profile": "1g.10gb",
            "placement": {"start": 2, "size": 1},
        }
        | ({"migUUID": instance, "gpuInstanceID": 9, "computeInstanceID": 0} if instance else {})
        for container, index, gpu, instance in found
    ]
    return {HAMI_MIG: msgspec.json.encode(made).decode()}


def sharing(
    annotations: Json, *, name: str = "notebook", init: tuple[int, ...] = (), sidecars: int = 0, main: int = 1
) -> Json:
    """Return a pod with init containers that request so many GPUs each, sidecars, and other containers."""
    thing = pod_object(name, annotations=annotations)
    first = thing["spec"]["containers"][0]
    thing["spec"]["containers"] = [first | {"name": f"main-{n}"} for n in range(main)]
    limits = [{"resources": {"limits": {"nvidia.com/gpu": f"{gpus}"}}} for gpus in init]
    ordinary = [{"name": f"init-{n}", "image": "i"} | each for n, each in enumerate(limits)]
    beside = [{"name": f"beside-{n}", "image": "i", "restartPolicy": "Always"} for n in range(sidecars)]
    thing["spec"]["initContainers"] = [*ordinary, *beside]
    return thing


def initialized(thing: Json) -> Json:
    condition = {"type": "Initialized", "status": "True"}
    return thing | {"status": thing["status"] | {"conditions": [condition]}}


def decoded(thing: Json) -> Pod:
    return msgspec.json.decode(msgspec.json.encode(thing), type=Pod)


def listed(count: int, resource: str = "nvidia.com/gpu") -> tuple[ContainerDevices, ...]:
    """The kubelet's devices, which are of other GPUs than the annotations name."""
    return (ContainerDevices(resource, tuple(f"{gpu_uuid(7)}-{n}" for n in range(count))),)


def assigned(thing: Json, count: int, resource: str = "nvidia.com/gpu") -> Assigned:
    return Assignments(("nvidia.com/gpu", "volcano.sh/vgpu-number")).of(decoded(thing), listed(count, resource))


# The forms.


@each(
    "thing, count, gpus",
    [
        (sharing(hami((A,))), 1, (A,)),
        (sharing(hami((A, B))), 2, (A, B)),
        (sharing(hami((), (A,), ()), main=3), 1, (A,)),
        (sharing(hami((A,), (A,)), main=2), 2, (A, A)),
        (sharing(hami((C,), (A,)), init=(1,)), 1, (A, C)),
        (initialized(sharing(hami((C,), (A,)), init=(1,))), 1, (A,)),
        (initialized(sharing(hami((C,), (B,), (A,)), init=(1,), sidecars=1)), 2, (B, A)),
        (sharing(hami((A,)), init=(1,)), 1, (A,)),
        (sharing(hami((A,)) | {HAMI: f",,0,0:;{device(A)};;,,0,0:;"}, main=4), 1, (A,)),
        (sharing(hami((A,), **instances((0, 0, A, INSTANCES[0])))), 1, (f"{A}[{INSTANCES[0]}]",)),
        (
            sharing(hami((A,), (B, A), **instances((1, 1, A, INSTANCES[0]), (1, 0, B, ""))), main=2),
            3,
            (A, B, f"{A}[{INSTANCES[0]}]"),
        ),
        (sharing(hami((f"{A}[0-1]",))), 1, (f"{A}[0-1]",)),
    ],
)
def test_gpus_that_hami_names(thing: Json, count: int, gpus: tuple[str, ...]) -> None:
    """Of containers; of init containers until they have ended; of versions that left out init containers; of MIG."""
    assert assigned(thing, count) == Assigned(gpus)


@each(
    "thing, count, gpus",
    [
        (sharing(volcano((A,))), 1, (A,)),
        (sharing(volcano((A,), (B,)), main=3), 2, (A, B)),
        (sharing(volcano((A,), (B,)), init=(1,), main=2), 2, (A, B)),
        (sharing(volcano((f"{A}[group2-3]",))), 1, (f"{A}[group2-3]",)),
        (sharing(volcano((A,)) | hami((B,))), 1, (A,)),
    ],
)
def test_gpus_that_volcano_names(thing: Json, count: int, gpus: tuple[str, ...]) -> None:
    assert assigned(thing, count, "volcano.sh/vgpu-number") == Assigned(gpus)


@each("name, virtual", [(f"{A}-0", True), (f"{A}-12", True), (A, False), (f"{A}::0", False), (f"{A}-", False)])
def test_which_device_ids_do_not_show_their_gpu(name: str, *, virtual: bool) -> None:
    assert is_virtual(name) == virtual


# Who is believed.


@each(
    "annotations, init, why",
    [
        ({}, (), "hami.io/bind-phase is not success"),
        (hami((A,)) | {"hami.io/bind-phase": "allocating"}, (), "hami.io/bind-phase is not success"),
        (volcano((A,)), (), "hami.io/bind-phase is not success"),
        (hami(()), (), "it names 0 GPUs, and the kubelet lists 1 devices"),
        (hami((A, B)), (), "it names 2 GPUs, and the kubelet lists 1 devices"),
        (hami((A,), (B,)), (), "it names 2 GPUs, and the kubelet lists 1 devices"),
        (hami((A, B), (A,)), (1,), "it names 2 GPUs of init containers, which request 1"),
        (hami((A,)) | {HAMI: f"{A},NVIDIA,3000:;"}, (), "a device has fewer than 4 fields"),
        (hami(("GPU-0",)), (), "a device is not named by a GPU's UUID"),
        (hami((f"{A}[{'9' * 65}]",)), (), "a device is not named by a GPU's UUID"),
        (hami((A,), **instances((0, 0, A, "x" * 65))), (), "a device is not named by a GPU's UUID"),
        (hami((A,)) | {HAMI: ";" * 16_385}, (), "it has more than 16384 characters"),
        (hami((A,), **{HAMI_MIG: "[" * 16_385}), (), "it has more than 16384 characters"),
        (hami((A,), **{HAMI_MIG: "[" * 9_000}), (), f"{HAMI_MIG} cannot be read: "),
        (hami((A,), **{HAMI_MIG: '[{"containerIndex": "0"}]'}), (), f"{HAMI_MIG} cannot be read: "),
    ],
)
def test_an_annotation_that_cannot_be_right_is_refused_with_the_reason(
    annotations: Json, init: tuple[int, ...], why: str
) -> None:
    found = assigned(sharing(annotations, init=init), 1)
    assert found.gpus == ()
    assert found.problem.startswith(f"annotation {HAMI}: {why}")


def test_pods_whose_device_ids_show_their_gpu_have_no_other_by_annotation() -> None:
    ids = (A, f"{A}::3", INSTANCES[0], "nvidia0", "0")
    devices = (ContainerDevices("nvidia.com/gpu", ids),)
    assert Assignments(("nvidia.com/gpu",)).of(decoded(sharing(hami((B,)))), devices) == Assigned()


def test_what_was_first_believed_stays_whatever_the_user_writes_later() -> None:
    assignments = Assignments(("nvidia.com/gpu",))
    before = sharing(hami((A,)))
    assert assignments.of(decoded(before), listed(1)) == Assigned((A,))
    for annotations in (hami((B,)), hami((A, B)), {}, hami((A,), **instances((0, 0, A, INSTANCES[0])))):
        found = assignments.of(decoded(sharing(annotations)), listed(1))
        assert found.gpus == (A,)
        assert found.problem
    assert assignments.of(decoded(sharing(hami((A,)) | {"other": "x"})), listed(1)) == Assigned((A,))
    assignments.keep({decoded(before).metadata.uid})
    assert assignments.of(decoded(sharing(hami((B,)))), listed(1)).gpus == (A,)
    assignments.keep(())
    assert assignments.of(decoded(sharing(hami((B,)))), listed(1)) == Assigned((B,)), "another pod, or a restart"


DEVICES = (
    Device(A, "0"),
    Device(B, "1", weight=0),
    *(Device(uuid, f"1:{n}", parent=B, profile="1g.10gb") for n, uuid in enumerate(INSTANCES)),
)


@each(
    "name, taken, uuids, candidates",
    [
        (A, set(), (A,), set()),
        (f"{A}[0-1]", set(), (A,), set()),
        (f"{B}[{INSTANCES[0]}]", set(), INSTANCES[:1], set()),
        (f"{B}[0-1]", set(), (), set(INSTANCES)),
        (B, set(), (), set(INSTANCES)),
        (f"{A}[{INSTANCES[0]}]", set(), (A,), set()),
        (C, set(), (), {A, B, *INSTANCES}),
        (A, {A}, (), {A, B, *INSTANCES}),
        (f"{B}[{INSTANCES[0]}]", set(INSTANCES), (), {A, B, *INSTANCES}),
    ],
)
def test_only_gpus_of_this_node_that_nobody_has_by_an_id_are_assigned(
    name: str, taken: set[str], uuids: tuple[str, ...], candidates: set[str]
) -> None:
    found = DeviceResolver(DEVICES, proc="/nonexistent").resolve_assigned([name], taken)
    assert (found.uuids, set(found.candidates)) == (uuids, candidates)
    assert bool(found.unknown) == bool(candidates)


TEXTS = st.text(st.sampled_from(f";:,[]{A}MIG 0"), max_size=200) | st.text(max_size=50)


@given(TEXTS, TEXTS, st.integers(1, 3), st.integers(0, 2))
def test_whatever_is_written_names_no_more_gpus_than_the_kubelet_lists(
    text: str, mig: str, count: int, init: int
) -> None:
    annotations = hami((A,)) | {HAMI: text, HAMI_MIG: mig}
    found = assigned(sharing(annotations, init=(1,) * init), count)
    assert len(found.gpus) <= count + init
    assert bool(found.gpus) != bool(found.problem)


# With a kubelet and an API server.


@pytest.fixture(name="here")
def _here() -> Iterator[Node]:
    with node() as made:
        yield made


def gives(here: Node, name: str, annotations: Json, *, resource: str = "nvidia.com/gpu", **more: Any) -> Json:
    """Add a pod whose devices are of GPU 7, and whose annotations name others."""
    thing = sharing(annotations, name=name, **more)
    here.api.has(thing)
    number = len(here.kubelet.pods)
    here.kubelet.gives(name, f"{gpu_uuid(7)}-{number}", resource=resource)
    return thing


def refusals(state: SchedulerState) -> str:
    assert {fault.kind for fault in state.faults} <= {"scheduler_refused"}
    return "\n".join(fault.message for fault in state.faults)


@pytest.mark.slow
def test_pods_share_the_gpu_that_hamis_or_volcanos_annotation_names(here: Node) -> None:
    gives(here, "one", hami((A,)))
    gives(here, "two", hami((A,)))
    gives(here, "three", volcano((B,)), resource="volcano.sh/vgpu-number")
    state = here.held((0, "ml/pod/one"), (0, "ml/pod/two"), (1, "ml/pod/three"))
    assert (state.faults, [each.gpus for each in state.allocations]) == ((), [1, 1, 1])
    late = gives(here, "late", hami((C,)) | {"hami.io/bind-phase": "allocating"})
    here.until(lambda state: (C, UNKNOWN_JOB) in holds(state), "a pod without a GPU that is known yet")
    here.api.has(late | {"metadata": late["metadata"] | {"annotations": hami((C,))}})
    here.until(lambda state: (C, "ml/pod/late") in holds(state), "its GPU")
    here.api.deletes(late)
    here.kubelet.drops("late")
    here.held((0, "ml/pod/one"), (0, "ml/pod/two"), (1, "ml/pod/three"))


@pytest.mark.slow
def test_nobody_takes_a_gpu_by_writing_an_annotation(here: Node) -> None:
    """Neither one that another pod has by its id, nor one more, nor another than at first; nothing else is lost."""
    here.kubelet.gives("whole", C)
    honest = gives(here, "honest", hami((A,)))
    mine = [(0, "ml/pod/honest"), (2, "ml/pod/whole")]
    here.held(*mine)
    here.api.has(sharing(hami((A,)), name="listed"))
    here.kubelet.gives("listed", B)
    state = here.held(*mine, (1, "ml/pod/listed"))
    assert state.faults == ()
    here.kubelet.drops("listed")
    here.api.has(honest | {"metadata": honest["metadata"] | {"annotations": hami((B,))}})
    state = here.until(lambda state: state.faults, "a changed annotation")
    assert f"ml/honest: annotation {HAMI}: it has been changed, and what it said at first counts" in refusals(state)
    unknown = [(n, UNKNOWN_JOB) for n in (1, *range(3, 8))]
    gives(here, "thief", hami((C,)))
    gives(here, "greedy", hami((A, B)))
    gives(here, "elsewhere", hami((gpu_uuid(9),)))
    state = here.held(*mine, *unknown)
    said = refusals(here.until(lambda state: "elsewhere" in refusals(state), "all refusals"))
    assert f"ml/thief holds '{C}' by its annotation: the kubelet lists this GPU for another pod" in said
    assert f"ml/greedy: annotation {HAMI}: it names 2 GPUs, and the kubelet lists 1 devices" in said
    assert f"ml/elsewhere holds '{gpu_uuid(9)}' by its annotation: no GPU of the source has this UUID" in said
