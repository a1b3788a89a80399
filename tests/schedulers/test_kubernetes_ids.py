"""Device ids of all plugins and drivers are resolved to UUIDs or to a reason."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import Device
from exporter.schedulers.kubernetes.kubelet import (
    DRIVER,
    ClaimResource,
    DeviceResolver,
    UnknownIdError,
    dra_devices,
    is_gpu,
)
from exporter.schedulers.kubernetes.objects import (
    BasicDevice,
    DeviceAttribute,
    ObjectMeta,
    ResourcePool,
    ResourceSlice,
    ResourceSliceSpec,
    SliceDevice,
)

A, B = "GPU-5700b000-0000-0000-0000-00000000000a", "GPU-5700b000-0000-0000-0000-00000000000b"
M1, M2 = "MIG-5700b000-0000-0000-0000-000000000001", "MIG-5700b000-0000-0000-0000-000000000002"
DEVICES = (
    Device(A, "0"),
    Device(B, "1", weight=0),
    Device(M1, "1:3", parent=B, profile="1g.10gb"),
    Device(M2, "1:13", parent=B, profile="2g.20gb"),
)


def told(proc: Path, **minors: str) -> Path:
    """A /proc with the driver's minor numbers."""
    for uuid, minor in minors.items():
        folder = proc / "driver/nvidia/gpus" / uuid
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"GPU UUID: \t {globals()[uuid]}\nDevice Minor: \t {minor}\n")
    return proc


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (A, {A}),
        (f"{A}::0", {A}),
        (f"{A}::17", {A}),
        (M1, {M1}),
        (f"{M2}::1", {M2}),
        (f"MIG-{B}/3/0", {M1}),
        (f"MIG-{B}/13/0::2", {M2}),
        (B, {M1, M2}),
        ("0", {A}),
        ("1", {M1, M2}),
        ("nvidia0", {A}),
        ("nvidia0/vgpu5", {A}),
        ("nvidia1/gi3", {M1}),
        ("nvidia1/gi13/vgpu0", {M2}),
    ],
)
def test_ids_of_device_plugins(name: str, found: set[str], tmp_path: Path) -> None:
    assert set(DeviceResolver(DEVICES, proc=tmp_path).resolve_id(name)) == found


@pytest.mark.parametrize(
    "name",
    [
        *("", "::", "::1", f"{A}::", f"{A}::x", f"{A}-3", A.lower(), f"MIG-{B}/4/0", f"MIG-{A}/3/0", "nvidia2"),
        *("nvidia0/gi3", "2", "-1", "1:3", "nvidia", "nvidia1/gi1", "MIG-5700b000-0000-0000-0000-000000000009", "²"),
    ],
)
def test_what_is_no_gpu_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownIdError):
        DeviceResolver(DEVICES, proc=tmp_path).resolve_id(name)


def test_minor_numbers_are_not_ordinals(tmp_path: Path) -> None:
    boards = DeviceResolver(DEVICES, proc=told(tmp_path, A="7", B="0"))
    assert boards.resolve_id("nvidia7") == (A,)
    assert boards.resolve_id("nvidia0/gi3") == (M1,)
    assert boards.resolve_id("0") == (A,)
    with pytest.raises(UnknownIdError, match="minor number 1"):
        boards.resolve_id("nvidia1")


def test_minors_of_gpus_that_the_source_does_not_see_and_of_unreadable_files_do_not_count(tmp_path: Path) -> None:
    proc = told(tmp_path, M1="0")
    (proc / "driver/nvidia/gpus/broken/information").mkdir(parents=True)
    assert DeviceResolver(DEVICES[:2], proc=proc).resolve_id("nvidia0") == (A,)


def offers(**attributes: str) -> dict[tuple[str, str], SliceDevice]:
    said = {key: DeviceAttribute(value) for key, value in attributes.items()}
    return {("n", "gpu-0"): SliceDevice("gpu-0", said)}


def test_slices_count_before_names(tmp_path: Path) -> None:
    boards = DeviceResolver(DEVICES, proc=told(tmp_path, A="0", B="1"))
    claim = ClaimResource(driver=DRIVER, pool="n", device="gpu-0")
    assert boards.resolve_claim(claim, {}) == (A,)
    assert boards.resolve_claim(claim, offers(uuid=M2)) == (M2,)
    old = {("n", "gpu-0"): SliceDevice("gpu-0", None, BasicDevice({f"{DRIVER}/uuid": DeviceAttribute(M1)}))}
    assert boards.resolve_claim(claim, old) == (M1,)
    assert boards.resolve_claim(claim, offers(parentUUID=B, profile="2g.20gb")) == (M2,)
    with pytest.raises(UnknownIdError, match=r"gives no uuid, and .* has 0 7g"):
        boards.resolve_claim(claim, offers(parentUUID=B, profile="7g"))
    with pytest.raises(UnknownIdError, match="no board"):
        boards.resolve_claim(claim, offers(profile="2g.20gb"))


@pytest.mark.parametrize(
    ("cdi", "found"),
    [
        (f"k8s.gpu.nvidia.com/device=gpu-{A[4:]}", A),
        (f"k8s.gpu.nvidia.com/claim={A[4:]}-mig-{M1[4:]}", M1),
        ("k8s.gpu.nvidia.com/device=gpu-0", A),
        ("nvidia.com/gpu=gpu-0", A),
    ],
)
def test_cdi_names_of_older_kubelets(cdi: str, found: str, tmp_path: Path) -> None:
    claim = ClaimResource((cdi,))
    assert is_gpu(claim)
    assert DeviceResolver(DEVICES, proc=told(tmp_path, A="0")).resolve_claim(claim, {}) == (found,)


def test_other_drivers_devices_are_no_gpus() -> None:
    assert not is_gpu(ClaimResource(("k8s.compute-domain.nvidia.com/device=channel-0",)))
    assert not is_gpu(ClaimResource(("k8s.gpu.nvidia.com/device=gpu-0",), driver="compute-domain.nvidia.com"))
    assert not is_gpu(ClaimResource())
    assert is_gpu(ClaimResource(driver=DRIVER))


def test_a_numbered_name_needs_minor_and_ordinal_to_agree(tmp_path: Path) -> None:
    claim = ClaimResource(driver=DRIVER, device="gpu-0")
    with pytest.raises(UnknownIdError, match="name alone"):
        DeviceResolver(DEVICES, proc=told(tmp_path, A="1", B="0")).resolve_claim(claim, {})
    assert DeviceResolver(DEVICES[:1], proc=tmp_path / "none").resolve_claim(claim, {}) == (A,)
    for name in ("gpu-1", "gpu-0-mig-19-0-1", "", "gpu-vfio-0"):
        with pytest.raises(UnknownIdError):
            DeviceResolver(DEVICES[:1], proc=tmp_path / "none").resolve_claim(
                ClaimResource(driver=DRIVER, device=name), {}
            )


def test_each_gpu_counts_once_and_what_is_refused_costs_nothing_else(tmp_path: Path) -> None:
    claims = (ClaimResource(driver=DRIVER, pool="n", device="gpu-0"), ClaimResource(("nvidia.com/gpu=x",)))
    found = DeviceResolver(DEVICES, proc=tmp_path).resolve(["x", f"{A}::0", A], claims, offers(uuid=M1))
    assert found.uuids == (A, M1)
    assert [said.split(":")[0] for said in found.unknown] == ["'x'", "'nvidia.com/gpu=x' of DRA pool ''"]


C = "GPU-5700b000-0000-0000-0000-00000000000c"
"""Of no device here."""


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        (f"{A}-3", {A, B, M1, M2}),
        ("7", {A, B, M1, M2}),
        ("nvidia7", {A, B, M1, M2}),
        ("MIG-5700b000-0000-0000-0000-000000000009", {M1, M2}),
        (f"MIG-{B}/4/0", {M1, M2}),
        (f"MIG-{A}/4/0", {A}),
        (f"MIG-{C}/4/0", set()),
        (C, set()),
        (f"{C}::1", set()),
        (A, set()),
    ],
)
def test_an_id_that_cannot_be_resolved_may_be_any_gpu_but_one_that_is_elsewhere(
    name: str, candidates: set[str], tmp_path: Path
) -> None:
    assert DeviceResolver(DEVICES, proc=tmp_path).resolve([name], (), {}).candidates == candidates


def test_with_the_drivers_minor_numbers_another_number_is_no_gpu_of_these(tmp_path: Path) -> None:
    boards = DeviceResolver(DEVICES, proc=told(tmp_path, A="1", B="0"))
    assert boards.resolve(["nvidia7"], (), {}).candidates == set()


def test_without_a_mig_instance_an_unknown_one_may_be_of_any_board(tmp_path: Path) -> None:
    boards = DeviceResolver(DEVICES[:1], proc=tmp_path)
    assert boards.resolve(["MIG-5700b000-0000-0000-0000-000000000009"], (), {}).candidates == {A}


def test_a_claim_that_cannot_be_resolved_may_be_any_gpu_or_one_of_its_board(tmp_path: Path) -> None:
    boards = DeviceResolver(DEVICES, proc=tmp_path)
    of_b = offers(parentUUID=B, profile="7g.80gb")
    named, unnamed = ClaimResource(driver=DRIVER, pool="n", device="gpu-0"), ClaimResource(driver=DRIVER)
    assert boards.resolve((), [named], of_b).candidates == {M1, M2}
    assert boards.resolve((), [named], offers(profile="7g.80gb")).candidates == {A, B, M1, M2}
    assert boards.resolve((), [unnamed], {}).candidates == {A, B, M1, M2}
    assert boards.resolve((), [ClaimResource(driver=DRIVER, device="gpu-9")], {}).candidates == {A, B, M1, M2}


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_garbage_is_a_gpu_of_this_node_or_refused(name: str, device: str, value: str) -> None:
    boards = DeviceResolver(DEVICES, proc="/nonexistent")
    claims = (ClaimResource((name,), "", "n", device), ClaimResource((), DRIVER, "n", "gpu-0"))
    found = boards.resolve([name, value], claims, offers(uuid=value, parentUUID=name, profile=device))
    assert set(found.uuids) <= {A, M1, M2}
    assert found.candidates <= {A, B, M1, M2}


def test_of_a_pool_the_devices_of_its_newest_generation_are_there_whatever_the_order() -> None:
    old, new = (
        ResourceSlice(ObjectMeta(), ResourceSliceSpec(DRIVER, ResourcePool("n1", generation), (SliceDevice(name),)))
        for generation, name in ((1, "gone"), (2, "gpu-0"))
    )
    assert list(dra_devices([old, new])) == list(dra_devices([new, old])) == [("n1", "gpu-0")]


def test_a_resource_s_name_says_whether_its_devices_are_instances() -> None:
    whole = DeviceResolver((Device(A, "0"),))
    mixed = DeviceResolver(DEVICES)
    assert set(mixed.offered_as("nvidia.com/mig-1g.10gb")) == {M1, M2}
    assert set(mixed.offered_as("nvidia.com/gpu")) == {A, B, M1, M2}, "instances too, if all GPUs are in MIG mode"
    assert set(whole.offered_as("nvidia.com/gpu")) == set(whole.offered_as("nvidia.com/mig-1g.10gb")) == {A}
