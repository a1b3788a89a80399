"""Decoding of pod-resources messages, compared with the official message set, and of garbage."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.schedulers.kubernetes import podresources_pb2
from exporter.schedulers.kubernetes.kubelet import (
    ClaimResource,
    ContainerDevices,
    PodResources,
    read_allocatable,
    read_list,
)
from tests.kubernetes.kubelet import MESSAGES, claim, container, devices, pod

ROOT = Path(__file__).parents[2]
TEXT = st.text(max_size=20)
DEVICES = st.builds(devices, TEXT, *[TEXT] * 2)
CLAIMS = st.builds(claim, TEXT, driver=TEXT, pool=TEXT, device=TEXT)
CONTAINERS = st.builds(
    lambda held, claims, name: container(*held, name=name, claims=claims),
    st.lists(DEVICES, max_size=3),
    st.lists(CLAIMS, max_size=3),
    TEXT,
)
PODS = st.builds(
    lambda name, place, held: pod(name, *held, namespace=place), TEXT, TEXT, st.lists(CONTAINERS, max_size=3)
)


def message(*pods: Any) -> Any:
    return MESSAGES["ListPodResourcesResponse"](pod_resources=pods)


def expected(each: Any) -> PodResources:
    """Its content, decoded by the official names."""
    return PodResources(
        each.namespace,
        each.name,
        tuple(
            ContainerDevices(d.resource_name, tuple(d.device_ids), c.name) for c in each.containers for d in c.devices
        ),
        tuple(
            ClaimResource(tuple(d.name for d in r.cdi_devices), r.driver_name, r.pool_name, r.device_name, c.name)
            for c in each.containers
            for dynamic in c.dynamic_resources
            for r in dynamic.claim_resources
        ),
    )


def test_the_generated_messages_are_those_of_the_proto(tmp_path: Path) -> None:
    """After a change of podresources.proto run make proto."""
    source = podresources_pb2.DESCRIPTOR.name
    compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", source]
    subprocess.run(compiler, cwd=ROOT, check=True, timeout=60)
    generated = Path(source.replace(".proto", "_pb2.py"))
    assert described(ROOT / generated) == described(tmp_path / generated), "run `make proto`"


def described(file: Path) -> str:
    """The line with the messages; the lines around it differ between versions of the compiler."""
    return next(line for line in file.read_text().splitlines() if line.startswith("DESCRIPTOR = "))


@given(st.lists(PODS, max_size=4))
def test_what_a_kubelet_writes_is_read_the_same(pods: list[Any]) -> None:
    assert read_list(message(*pods).SerializeToString()) == tuple(map(expected, pods))


@given(st.binary(max_size=200))
def test_garbage_is_read_or_refused_and_never_crashes(noise: bytes) -> None:
    for read in (read_list, read_allocatable):
        try:
            read(noise)
        except ValueError:
            continue


@given(PODS, st.data())
def test_no_part_of_a_message_that_was_cut_is_believed(one: Any, data: st.DataObject) -> None:
    whole = message(one).SerializeToString()
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(ValueError, match="bytes that are no ListPodResourcesResponse"):
        read_list(whole[:cut])


def test_fields_of_newer_kubelets_are_skipped() -> None:
    text = b"\x12\x04ml-x"
    fixed = b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\xa8\x06\xff\xff\x03" + b"\xfa\x3f\x02hi"
    inner = b"\x0a\x01p" + fixed + text
    assert read_list(b"\x0a%c%b" % (len(inner), inner)) == (PodResources("ml-x", "p"),)


def test_of_a_field_that_is_there_twice_the_last_counts() -> None:
    inner = b"\x0a\x01a\x12\x01n\x0a\x01b"
    assert read_list(b"\x0a%c%b" % (len(inner), inner)) == (PodResources("n", "b"),)


def test_what_the_device_plugins_offer_is_read() -> None:
    offered = devices("nvidia.com/gpu", "GPU-a", "GPU-b")
    said = MESSAGES["AllocatableResourcesResponse"](devices=[offered], cpu_ids=[1, 2]).SerializeToString()
    assert read_allocatable(said) == (ContainerDevices("nvidia.com/gpu", ("GPU-a", "GPU-b")),)


@pytest.mark.parametrize(
    "noise", [b"\x0b", b"\x0c", b"\x0f", b"\x08" + b"\xff" * 11, b"\x0a\x02\x0a\xfe", b"\x0a\x03\x0a\x01\xff"]
)
def test_what_breaks_the_encoding_is_refused(noise: bytes) -> None:
    with pytest.raises(ValueError, match="bytes that are no"):
        read_list(noise)
