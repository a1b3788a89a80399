"""The spec lookup: the right board or none."""

import csv
import itertools
import re
from importlib import resources

import pytest

from exporter.core.model import Spec
from exporter.specs import find_spec

ROWS = list(csv.DictReader((resources.files("exporter") / "data" / "gpu_specs.csv").read_text("utf-8").splitlines()))


def _alternatives(pattern: str) -> list[str]:
    """Spell out the names of a cell such as "(NVIDIA )?A100|NVIDIA RTX 4000 (Ada|SFF Ada) Generation"."""
    parts = re.split(r"\|(?![^(]*\))", pattern)
    return [name for part in parts for name in _spelled(part.replace(".*", "").replace("e?", "e"))]


def _spelled(part: str) -> list[str]:
    group = re.search(r"\(([^)]*)\)(\??)", part)
    if group is None:
        return [part]
    choices = [*group[1].split("|"), *([""] if group[2] else [])]
    return [part[: group.start()] + choice + part[group.end() :] for choice in choices]


NAMES = [(row["model"], name) for row in ROWS for name in _alternatives(row["nvml_name_patterns"])]


def test_an_h100_has_the_dense_figures_in_base_units() -> None:
    assert find_spec("NVIDIA H100 80GB HBM3") == Spec(
        name="H100-SXM5-80GB",
        peak_flops=989.4e12,
        tensor_reference_clock_hz=1830e6,
        memory_bandwidth_bytes_per_second=3350e9,
        nvlink_bytes_per_second=450e9,
        pcie_bytes_per_second=64e9,
        idle_context_watts=110.0,
        dram_ceiling=0.92,
    )


def test_a_b200_is_not_given_its_sparse_peak() -> None:
    spec = find_spec("NVIDIA B200")
    assert spec is not None
    assert spec.peak_flops == 2.25e15


@pytest.mark.parametrize(("model", "name"), NAMES)
def test_every_name_in_the_table_means_its_own_row(model: str, name: str) -> None:
    spec = find_spec(name)
    assert spec is not None
    assert spec.name == model


def test_no_name_matches_two_rows() -> None:
    for (model, name), row in itertools.product(NAMES, ROWS):
        assert model == row["model"] or not re.fullmatch(row["nvml_name_patterns"], name), (
            name,
            row["model"],
        )


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H300",
        "NVIDIA H200 NVL MIG",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "xNVIDIA L4",
        "NVIDIA L4 ",
        "",
    ],
)
def test_an_unknown_model_has_no_spec(name: str) -> None:
    assert find_spec(name) is None


@pytest.mark.parametrize("spelling", ["2330", "0x2330", "233010de", "0x233010DE"])
def test_a_pci_device_id_is_known_in_every_spelling_and_wins_over_the_name(spelling: str) -> None:
    spec = find_spec("Some vendor's own name", spelling)
    assert spec is not None
    assert spec.name == "H100-SXM5-80GB"


@pytest.mark.parametrize(("identifier", "model"), [("1db8", "V100-SXM2-32GB"), ("232c", "H20"), ("233a", "H100-NVL")])
def test_an_id_beside_others_or_with_a_note_is_found(identifier: str, model: str) -> None:
    spec = find_spec("", identifier)
    assert spec is not None
    assert spec.name == model


@pytest.mark.parametrize(("name", "model"), [("NVIDIA A2", "A2"), ("NVIDIA A16", "A16")])
def test_an_id_that_two_boards_share_falls_through_to_the_name(name: str, model: str) -> None:
    spec = find_spec(name, "25b6")
    assert spec is not None
    assert spec.name == model
    assert find_spec("NVIDIA A2 or A16", "25b6") is None


def test_an_unknown_id_falls_through_to_the_name() -> None:
    assert find_spec("NVIDIA L4", "ffff") == find_spec("NVIDIA L4", "27b8")


def test_an_override_wins_over_id_and_name() -> None:
    mine = Spec(name="A10G", peak_flops=125e12)
    assert find_spec("NVIDIA A10G", "2237", overrides={"NVIDIA A10G": mine}) is mine


@pytest.mark.parametrize(
    ("name", "ceiling"),
    [
        ("NVIDIA B200", 0.92),
        ("NVIDIA H200", 0.92),
        ("NVIDIA A100-SXM4-80GB", 0.80),
        ("NVIDIA GeForce RTX 5090", 0.80),
    ],
)
def test_only_hbm3_class_boards_have_the_high_ceiling(name: str, ceiling: float) -> None:
    spec = find_spec(name)
    assert spec is not None
    assert spec.dram_ceiling == ceiling


def test_what_the_table_leaves_empty_is_none_not_zero() -> None:
    spec = find_spec("NVIDIA L4")
    assert spec is not None
    assert spec.nvlink_bytes_per_second is None
    assert spec.idle_context_watts == 28.0
