"""Tests the spec lookup: the right board or none, and the operator's overrides."""

import csv
import itertools
import re
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporter.config import BoardSettings, Config, ConfigError, load
from exporter.core.model import Spec
from exporter.specs import confidence, find_spec, mig_instance_spec, unknown_model
from tests.each import each

ROWS = list(csv.DictReader((resources.files("exporter") / "data" / "gpu_specs.csv").read_text("utf-8").splitlines()))


def _alternatives(pattern: str) -> list[str]:
    """Expand the names of a cell such as "(NVIDIA )?A100|NVIDIA RTX 4000 (Ada|SFF Ada) Generation"."""
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
        peak_flops_tf32=494.7e12,
        peak_flops_fp8=1978.9e12,
        tensor_reference_clock_hz=1830e6,
        memory_bandwidth_bytes_per_second=3350e9,
        nvlink_bytes_per_second=450e9,
        pcie_bytes_per_second=64e9,
        idle_context_watts=110.0,
        power_limit_watts=700.0,
        dram_ceiling=0.92,
        slices=7,
        memory_gb=80.0,
    )


def test_a_b200_is_not_given_its_sparse_peak() -> None:
    spec = find_spec("NVIDIA B200")
    assert spec is not None
    assert spec.peak_flops == 2.25e15


@each("model, name", NAMES)
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


def test_every_board_has_its_confidence_and_memory() -> None:
    assert {confidence(row["model"]) for row in ROWS} == {"high", "medium", "low"}
    assert (confidence("H100-PCIe"), confidence("A10G"), confidence("NVIDIA A10G")) == ("high", "low", "")
    memory = {spec.name: spec.memory_gb for _, name in NAMES if (spec := find_spec(name)) is not None}
    assert memory.keys() == {row["model"] for row in ROWS}
    assert all((gigabytes or 0) > 0 for gigabytes in memory.values())
    assert (memory["H200-SXM"], Spec("Mine").memory_gb) == (141.0, None)


def test_a_part_of_a_board_has_its_share_of_peak_and_bandwidth_alone() -> None:
    spec = find_spec("NVIDIA H100 80GB HBM3")
    assert spec is not None
    part = mig_instance_spec(spec, compute=3 / 7, memory=0.5)
    assert part.peak_flops == pytest.approx(989.4e12 * 3 / 7)
    assert part.memory_bandwidth_bytes_per_second == 3350e9 / 2
    assert part.peak_flops_fp8 == pytest.approx(1978.9e12 * 3 / 7)
    whole = {"peak_flops": 989.4e12, "peak_flops_tf32": 494.7e12, "peak_flops_fp8": 1978.9e12}
    assert msgspec.structs.replace(part, **whole, memory_bandwidth_bytes_per_second=3350e9) == spec
    assert mig_instance_spec(Spec("x"), compute=0.5, memory=0.5) == Spec("x")


def test_of_an_unknown_model_is_said_which_gpu_it_is_and_what_to_configure() -> None:
    fault = unknown_model("GPU-7", "NVIDIA H300")
    assert (fault.kind, fault.uuid) == ("unknown_model", "GPU-7")
    assert "GPU GPU-7 is a model without known peaks ('NVIDIA H300')" in fault.message
    assert '[specs."NVIDIA H300"]: peak_flops' in fault.message


# What an operator may say of a board: the section [specs] of the configuration.


def configured(folder: Path, text: str) -> Config:
    path = folder / "gpu-efficiency.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, environ={})


def test_what_is_configured_wins_and_the_rest_is_the_table_s(tmp_path: Path) -> None:
    config = configured(tmp_path, '[specs."NVIDIA H100 PCIe"]\npeak_flops = 700e12\ndram_ceiling = 0.9\n')
    table = find_spec("NVIDIA H100 PCIe")
    assert table is not None
    assert table.dram_ceiling != 0.9
    mine = msgspec.structs.replace(table, peak_flops=700e12, dram_ceiling=0.9)
    assert config.overrides() == {"NVIDIA H100 PCIe": mine}
    assert find_spec("NVIDIA H100 PCIe", "2331", overrides=config.overrides()) == mine


def test_a_board_that_the_table_lacks_is_what_is_configured_and_no_more(tmp_path: Path) -> None:
    config = configured(tmp_path, '[specs."NVIDIA H300"]\npeak_flops = 2_000_000_000_000_000\n')
    assert config.overrides() == {"NVIDIA H300": Spec("NVIDIA H300", peak_flops=2e15)}


def test_every_field_of_a_spec_but_its_name_can_be_configured_and_by_the_same_name() -> None:
    assert BoardSettings.__struct_fields__ == Spec.__struct_fields__[1:]
    figures = (1e12, 5e11, 2e12, 4e12, 1e9, 1e12, 1e11, 72, 1e10, 90.0, 700.0, 0.8, 7, 80.0)
    every: dict[str, Any] = dict(zip(BoardSettings.__struct_fields__, figures, strict=True))
    assert Config(specs={"Mine": BoardSettings(**every)}).overrides() == {"Mine": Spec("Mine", **every)}


def test_nothing_is_configured_unless_it_is() -> None:
    assert Config().overrides() == {}
    assert load(None, environ={}).specs == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peak_flop = 1e12", 'specs."A B": .*unknown field `peak_flop`'),
        ("peak_flops = 989.4", r'specs."A B": Expected `float` >= 1000000000.0 - at `\$.peak_flops`'),
        ("tensor_reference_clock_hz = 1830", r'specs."A B": .*at `\$.tensor_reference_clock_hz`'),
        ("memory_bandwidth_bytes_per_second = 3350", r'specs."A B": .*at `\$.memory_bandwidth_bytes_per_second`'),
        ("nvlink_bytes_per_second = -1e9", r'specs."A B": .*at `\$.nvlink_bytes_per_second`'),
        ("pcie_bytes_per_second = 0", r'specs."A B": .*at `\$.pcie_bytes_per_second`'),
        ("idle_context_watts = 0", r'specs."A B": Expected `float` > 0.0 - at `\$.idle_context_watts`'),
        ("idle_context_watts = inf", r'specs."A B": .*at `\$.idle_context_watts`'),
        ("dram_ceiling = 1.1", r'specs."A B": Expected `float` <= 1.0 - at `\$.dram_ceiling`'),
        ("dram_ceiling = nan", r'specs."A B": .*at `\$.dram_ceiling`'),
        ('peak_flops = "1e12"', r'specs."A B": .*got `str` - at `\$.peak_flops`'),
    ],
)
def test_what_cannot_be_is_refused_by_name_of_board_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"gpu-efficiency\.toml: line 2: {words}"):
        configured(tmp_path, f'[specs."A B"]\n{text}\n')


@pytest.mark.parametrize("text", ["specs = 3", "[specs]\npeak_flops = 1e12"])
def test_a_section_that_names_no_board_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="specs"):
        configured(tmp_path, text)


@pytest.mark.parametrize(("model", "domain"), [("NVIDIA GB200", 72), ("NVIDIA B200", 0), ("NVIDIA H100 80GB HBM3", 0)])
def test_boards_of_racks_are_joined_beyond_their_node(model: str, domain: int) -> None:
    spec = find_spec(model)
    assert spec is not None
    assert spec.nvlink_domain == domain
