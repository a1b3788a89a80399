"""GPUs that pods hold and that the kubelet lists for no container."""

import msgspec
import pytest

from exporter.schedulers.kubernetes.kubelet import ClaimResource, ContainerDevices, PodResources
from exporter.schedulers.kubernetes.objects import Pod
from exporter.schedulers.kubernetes.pod_table import PodName, PodTable
from exporter.schedulers.rules import Rules
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import requesting

NAME: PodName = ("ml", "train-0")


def unlisted(
    thing: Json, *ids: str, claims: int = 0, listed: bool = True, admitted: bool = True
) -> dict[PodName, dict[str, int]]:
    """What of the pod's GPUs is on no list, if the kubelet lists these ids."""
    table = PodTable(Rules(), ("nvidia.com/gpu", "nvidia.com/mig-*"))
    devices = (ContainerDevices("nvidia.com/gpu", ids),) if ids else ()
    one = PodResources(*NAME, devices, (ClaimResource(driver="gpu.nvidia.com"),) * claims)
    pods = (one,) if listed else ()
    table.replace_list(table.with_gpus(pods), listed=pods, admitted=[NAME] if admitted else [], silent=False)
    table.gpu_pods({NAME: msgspec.json.decode(msgspec.json.encode(thing), type=Pod)})
    return {name: dict(gpus) for name, gpus in table.unlisted().items()}


@pytest.mark.parametrize(
    ("init", "main", "sidecar", "ids", "missing"),
    [
        (5, 2, 0, "ab", 3),
        (5, 1, 1, "ab", 3),
        (2, 0, 0, "", 2),
        (2, 2, 0, "ab", 0),
        (1, 2, 0, "ab", 0),
        (0, 2, 0, "ab", 0),
        (0, 0, 0, "", 0),
        (0, 2, 0, "abc", 0),
    ],
)
def test_an_init_container_reserves_what_it_requests_beyond_the_others(
    init: int, main: int, sidecar: int, ids: str, missing: int
) -> None:
    found = unlisted(requesting("train-0", init=init, main=main, sidecar=sidecar), *ids)
    assert found == ({NAME: {"nvidia.com/gpu": missing}} if missing else {})


def test_each_resource_is_counted_by_itself() -> None:
    thing = requesting("train-0", init=2, main=1)
    thing["spec"]["initContainers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] = "1"
    thing["spec"]["containers"][0]["resources"]["limits"]["rdma/hca"] = "8"
    assert unlisted(thing, "a") == {NAME: {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 1}}


def test_a_pod_counts_once_the_kubelet_has_allocated_it_and_until_it_has_ended() -> None:
    thing = requesting("train-0", init=5, main=2)
    assert unlisted(thing, "a", "b", listed=False) == {}, "the kubelet does not know it yet"
    assert unlisted(thing, admitted=False) == {}, "the list may be older than the allocation"
    assert unlisted(requesting("train-0", init=5, main=2, phase="Failed"), "a", "b") == {}
    del thing["status"]["startTime"]
    assert unlisted(thing) == {}, "another pod of that name had been admitted"


def test_gpus_requested_by_name_and_allocated_by_a_dra_driver_are_listed_as_claims() -> None:
    assert unlisted(requesting("train-0", init=0, main=2), claims=2) == {}


@pytest.mark.parametrize("phase", ["hami.io/bind-phase", "volcano.sh/bind-phase"])
def test_a_pod_whose_gpus_are_about_to_be_named_is_waited_for_once(phase: str) -> None:
    table = PodTable(Rules(), ("nvidia.com/gpu",))
    pods = (PodResources(*NAME, (ContainerDevices("nvidia.com/gpu", ("GPU-a",)),)),)

    def reported(value: str) -> dict[PodName, Pod]:
        thing = requesting("train-0", init=0, main=1, annotations={phase: value})
        return {NAME: msgspec.json.decode(msgspec.json.encode(thing), type=Pod)}

    table.gpu_pods(reported("allocating"))
    assert table.unknown_pods(pods, reported("success")) == set()
    assert table.unknown_pods(pods, reported("allocating")) == {NAME}
    table.replace_list(pods, listed=pods, admitted=[NAME], silent=False)
    table.gpu_pods(reported("allocating"))
    assert table.unknown_pods(pods, reported("allocating")) == set()


def test_gpus_of_hamis_init_containers_are_in_its_annotation() -> None:
    assert unlisted(requesting("train-0", init=2, main=1), "GPU-5700b000-0000-0000-0000-00000000000a-7") == {}


@pytest.mark.parametrize("amount", ["1k", "0.5", ""])
def test_an_amount_that_is_no_number_of_gpus_is_none(amount: str) -> None:
    thing = requesting("train-0", init=5, main=1)
    thing["spec"]["initContainers"][0]["resources"]["limits"]["nvidia.com/gpu"] = amount
    assert unlisted(thing, "a") == {}
