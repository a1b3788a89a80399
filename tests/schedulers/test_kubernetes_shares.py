"""Pods that share GPUs, written by the functions of HAMi, Volcano and KAI Scheduler: recorded/shares/README.md."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from exporter.schedulers.kubernetes.kubelet import ContainerDevices
from exporter.schedulers.kubernetes.objects import Pod
from exporter.schedulers.kubernetes.vgpu import Assigned, Assignments
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import Node, gpu_uuid, node

FOLDER = Path(__file__).parent / "recorded" / "shares"
A, B, C, D = (gpu_uuid(index) for index in range(4))
INSTANCE = "MIG-aaaaaaaa-0000-0000-0000-000000000001"


def recorded(name: str) -> list[Json]:
    found: list[Json] = msgspec.json.decode((FOLDER / f"{name}.json").read_bytes())
    return found


@pytest.mark.parametrize(
    ("name", "number", "resource", "gpus"),
    [
        ("hami", 0, "nvidia.com/gpu", (A, B, A)),
        ("hami-mig", 0, "nvidia.com/gpu", (f"{A}[{INSTANCE}]",)),
        ("hami-mig", 1, "nvidia.com/gpu", (A,)),
        ("volcano", 0, "volcano.sh/vgpu-number", (C, D)),
    ],
)
def test_a_pod_has_the_gpus_that_the_scheduler_wrote(
    name: str, number: int, resource: str, gpus: tuple[str, ...]
) -> None:
    pod = msgspec.convert(recorded(name)[number], Pod)
    listed = ContainerDevices(resource, tuple(f"{gpu_uuid(7)}-{n}" for n in range(len(gpus))))
    assert Assignments(("nvidia.com/gpu", "volcano.sh/vgpu-number")).of(pod, (listed,)) == Assigned(gpus)


@pytest.fixture(name="here")
def _here() -> Iterator[Node]:
    with node() as made:
        yield made


def test_two_pods_have_the_gpu_that_kai_reserves_for_them(here: Node) -> None:
    reservation, *sharing = recorded("kai")
    metadata = reservation["metadata"]
    here.kubelet.gives(metadata["name"], gpu_uuid(4), namespace=metadata["namespace"])
    here.api.has(reservation, *sharing)
    state = here.held((4, "ml/pod/notebook"), (4, "ml/pod/train"))
    assert {each.owner.partition for each in state.allocations} == {"research"}
