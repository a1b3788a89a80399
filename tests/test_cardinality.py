"""Tests `gpu-efficiency cardinality` against series counted in snapshots of simulated nodes.

What rules really record, and what a real Prometheus keeps after a profile, is in `e2e`.
"""

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alerts.build_recorded import FILE, READ, text, text_read
from exporter.cardinality import (
    MISSING_SIGNALS,
    PROFILES,
    FleetSize,
    kept_share,
    max_samples,
    read_by_rules,
    recorded_series,
    recording_rules,
    relabel_configs,
    scraped_series,
    series_counts,
)
from exporter.cli import main
from exporter.cli.cardinality import BYTES_OF_MEMORY, BYTES_RECORDED, BYTES_SCRAPED, estimate
from exporter.core.exposition import render
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.metrics import METRICS, UNHELD_LEAKS, max_series_of_scope
from exporter.core.model import SECOND, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import simulate
from exporter.sources.dcgm_exporter.source import DcgmExporterSource
from exporter.specs import find_spec
from tests.fleets import as_served, fleet_of, lines, told
from tests.fleets import shown as really_shown
from tests.hidden import without
from tests.scenarios import goldens
from tests.scenarios.goldens import GOLDENS
from tests.scenarios.stage import fed
from tests.sources import exporter_pages
from tests.worlds import RESTING, WORKING, cut, device, first, held, reading, seen

picture = cache(goldens.picture)
SCALE = Path(__file__).parents[1] / "docs" / "prometheus.md"
DOCUMENTED = 0.09
"""How far the maximum may exceed the counted series by docs/prometheus.md, on a node of this size with all signals."""
UNSEEN = {"lost_gpu"}
"""A GPU that fell off the bus has a quarter fewer series than the maximum."""
CALM = ("copy_loop", "healthy_training", "input_starved_training", "large_gemm", "memory_bound_decode", "straggler")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", GOLDENS)
def test_the_most_is_never_below_what_a_node_shows_and_near_it(scenario: str) -> None:
    snapshot = picture(scenario)
    truth, most = really_shown(snapshot), told(fleet_of(snapshot))
    assert truth <= most
    assert scenario in UNSEEN or most <= truth * (1 + DOCUMENTED)


@pytest.mark.parametrize("scenario", CALM)
def test_while_nothing_is_wrong_it_is_exact(scenario: str) -> None:
    """Without the time limit, which the jobs of these scenarios lack and a scheduler's usually have."""
    snapshot = picture(scenario)
    unlimited = sum(job.owner.time_limit_seconds is None for job in snapshot.jobs)
    assert unlimited == len(snapshot.jobs) > 0
    assert told(fleet_of(snapshot), calm=True) - unlimited == really_shown(snapshot)


def test_a_free_gpu_shows_two_less() -> None:
    """A GPU that is unallocated and has never been used."""
    kinds = series_counts("dcgm")
    assert dict(kinds.held).keys() - dict(kinds.free).keys() == {
        "gpu_efficiency_allocation_info", "gpu_efficiency_last_work_timestamp_seconds",
    }  # fmt: skip
    snapshot = picture("leaked_process")
    free = [gpu.device.uuid for gpu in snapshot.gpus if not gpu.owners]
    page = lines(render(snapshot).decode())
    assert free
    assert {sum(f'uuid="{uuid}"' in line for line in page) for uuid in free} == {sum(kinds.free.values())}


def test_of_a_whole_gpu_and_a_job_the_most_is_the_catalogue_s_budget() -> None:
    one = FleetSize(listening=False)
    by_scope = dict.fromkeys(("gpu", "job", "node", "model", "account"), 0.0)
    scopes = {metric.name: metric.scope for metric in METRICS}
    for name, count in scraped_series(one).items():
        if scopes.get(name) in by_scope:
            by_scope[scopes[name]] += count
    assert by_scope["gpu"] == 8 * max_series_of_scope("gpu")
    assert by_scope["job"] == max_series_of_scope("job") + 5  # its eight GPUs may be in six states at once
    assert (by_scope["node"], by_scope["model"], by_scope["account"]) == (
        max_series_of_scope("node"), max_series_of_scope("model"), max_series_of_scope("account"),
    )  # fmt: skip


# -- what simulated stories do not tell --


def _played(*observations: object) -> Snapshot:
    ledger = Ledger()
    for observation in observations:
        advance(ledger, observation)  # type: ignore[arg-type]
    return take_snapshot(ledger, DaemonMetadata())


INSTANCE = {k: v for k, v in WORKING.items() if not k.startswith(("pcie", "nvlink", "power", "enforced", "gpu_util"))}


def test_mig_instances_show_what_an_instance_can() -> None:
    parts = cut(1, 2, 4)
    jobs = [held(part.uuid, Owner(job_id=f"j{n}")) for n, part in enumerate(parts[1:])]
    rows = [reading(0, 5, INSTANCE | {"memory_used_bytes": 1e9}, part.uuid) for part in parts[1:]]
    rest = reading(0, 5, RESTING | {"processes": ()}, parts[0].uuid)
    snapshot = _played(first(parts, jobs), seen(5, rest, *rows))
    fleet = fleet_of(snapshot)
    assert (fleet.gpus, fleet.mig_boards, fleet.mig_instances) == (1, 1, 3)
    truth, most = really_shown(snapshot), told(fleet)
    assert truth <= most <= truth * 1.12
    of_one = sum(f'uuid="{parts[1].uuid}"' in line for line in lines(render(snapshot).decode()))
    assert of_one <= sum(series_counts("dcgm").instance.values()) <= of_one + 2


def test_sharers_have_a_series_each_on_the_gpu_they_share() -> None:
    sharers = [held(owner=Owner(job_id=name)) for name in "abcd"]
    snapshot = _played(first([device(), device("GPU-1", "1")], [*sharers, held("GPU-1", Owner(job_id="e"))]),
                       seen(10, reading(0, 10), reading(0, 10, uuid="GPU-1")))  # fmt: skip
    fleet = fleet_of(snapshot)
    assert (fleet.shared, fleet.sharers) == (1, 4)
    found = scraped_series(fleet)
    assert found["gpu_efficiency_allocation_info"] == 5
    assert found["gpu_efficiency_shared_seconds_total"] == 2
    assert really_shown(snapshot) <= told(fleet)


@pytest.mark.parametrize("board", ["A100-SXM4-80GB", "L40S"])
def test_boards_before_hopper_by_the_driver_alone(board: str) -> None:
    """The same scenario without signals that the driver does not provide."""
    story = simulate("healthy_training", seed=1, board=board, gpus=4, period_seconds=10, duration_seconds=900)
    ledger, _ = fed(without(story.observations, signals=MISSING_SIGNALS["driver"]))
    snapshot = take_snapshot(ledger, DaemonMetadata(simulated=True))
    truth = really_shown(snapshot)
    assert truth <= told(fleet_of(snapshot, source="driver")) <= truth * (1 + DOCUMENTED)
    assert told(fleet_of(snapshot, source="driver")) < told(fleet_of(snapshot))


DEFAULT_COUNTERS = {
    "DCGM_FI_DEV_SM_CLOCK": "1500", "DCGM_FI_DEV_MEM_CLOCK": "2619", "DCGM_FI_DEV_MEMORY_TEMP": "60",
    "DCGM_FI_DEV_GPU_TEMP": "50", "DCGM_FI_DEV_POWER_USAGE": "512.25",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "1000000", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "0",
    "DCGM_FI_DEV_GPU_UTIL": "99", "DCGM_FI_DEV_MEM_COPY_UTIL": "40", "DCGM_FI_DEV_XID_ERRORS": "0",
    "DCGM_FI_DEV_FB_FREE": "1000", "DCGM_FI_DEV_FB_USED": "60000", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "0",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "0", "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "0",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "0", "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.95",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.4", "DCGM_FI_PROF_DRAM_ACTIVE": "0.3",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "100000", "DCGM_FI_PROF_PCIE_RX_BYTES": "100000",
}  # fmt: skip
"""Counters that dcgm-exporter's etc/default-counters.csv enables."""


def _through_dcgm_exporter(figures: dict[str, str]) -> Snapshot:
    page = "".join(exporter_pages.gpu(n, figures) for n in range(4))
    source = DcgmExporterSource(
        "http://node1:9400/metrics",
        fetch=exporter_pages.Pages(page),
        lookup=find_spec,
        hostname="",
        max_gap_seconds=90.0,
    )
    ledger = Ledger()
    for second in range(0, 61, 30):
        batch = source.read(second * SECOND)
        jobs = tuple(held(each.uuid) for each in batch.devices)
        advance(ledger, seen(second, *batch.readings, devices=batch.devices, allocations=jobs, health=batch.health))
    return take_snapshot(ledger, DaemonMetadata())


def test_an_existing_dcgm_exporter_with_its_default_counters() -> None:
    snapshot = _through_dcgm_exporter(DEFAULT_COUNTERS)
    truth, fleet = really_shown(snapshot), fleet_of(snapshot, source="dcgm-exporter")
    assert truth <= told(fleet) <= truth * (1 + DOCUMENTED)
    of_one = sum('uuid="GPU-1"' in line for line in lines(render(snapshot).decode()))
    assert sum(series_counts("dcgm-exporter").held.values()) == of_one


# -- profiles --


def _relabelled(page: str, profile: str) -> list[str]:
    """Series of a page that Prometheus' drop actions keep: regexes are anchored, an absent label is empty."""
    left = lines(page)
    for row in relabel_configs(profile):
        regex, sources = re.compile(str(row["regex"])), row["source_labels"]
        assert row["action"] == "drop"
        assert isinstance(sources, list)
        left = [line for line in left if not regex.fullmatch(";".join(_label(line, name) for name in sources))]
    return left


def _label(line: str, name: str) -> str:
    if name == "__name__":
        return re.split(r"[{ ]", line)[0]
    found = re.search(rf'[{{,]{name}="([^"]*)"', line)
    return found[1] if found else ""


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("scenario", ["demo", "healthy_training", "telemetry_outage"])
def test_a_profile_keeps_what_the_calculator_says(scenario: str, profile: str) -> None:
    snapshot = as_served(picture(scenario))
    left = len(_relabelled(render(snapshot).decode(), profile))
    fleet = replace(fleet_of(snapshot), listening=False)
    beside = ("process", "scrape")
    most = sum(count * kept_share(name, profile) for name, count in scraped_series(fleet).items() if name not in beside)
    assert left <= most <= left * 1.15
    assert left <= max_samples(fleet, profile)


def test_each_profile_keeps_less() -> None:
    totals = [estimate(FleetSize(nodes=10, jobs=10), profile=name).scraped for name in PROFILES]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(PROFILES)


def test_what_rules_read_is_never_dropped_by_the_profile_for_them() -> None:
    for name, leaks in read_by_rules().items():
        share = kept_share(name, "rules")
        assert share == 1.0 if not leaks else 0 < share < 1, name


def test_what_no_rule_reads_of_single_gpus_goes_and_what_has_no_gpu_stays() -> None:
    of_gpus = {metric.name for metric in METRICS if "uuid" in metric.labels and metric.scope != "node"}
    dropped = {name for name in of_gpus if not kept_share(name, "rules")}
    assert dropped == of_gpus - read_by_rules().keys()
    assert "gpu_efficiency_power_watts" in dropped
    assert {kept_share("gpu_efficiency_rejected_total", profile) for profile in PROFILES} == {1.0}
    assert {kept_share("gpu_efficiency_node_gpus", profile) for profile in PROFILES} == {1.0}


# -- files and figures --


def test_the_tables_of_rules_are_those_of_the_rules() -> None:
    """After a change of alerts/*.yaml: make docs."""
    assert FILE.read_text(encoding="utf-8") == text()
    assert READ.read_text(encoding="utf-8") == text_read()


def test_the_costs_are_the_measured_ones() -> None:
    said = SCALE.read_text(encoding="utf-8")
    plan = said.split("## Sizing a Prometheus for 10,000 GPUs")[1].split("## ")[0]
    row = dict(re.findall(r"^\| (series scraped|series recorded|memory) \| ([\d,]+)", plan, re.MULTILINE))
    series = sum(int(row[name].replace(",", "")) for name in ("series scraped", "series recorded"))
    assert pytest.approx(int(row["memory"]) * 2**30 / series) == BYTES_OF_MEMORY
    assert f"{BYTES_SCRAPED} bytes a sample" in said
    assert f"{BYTES_RECORDED} bytes a sample" in said


def test_the_measured_fleet_of_docs_scale() -> None:
    """10,000 GPUs: 624,000 series of single GPUs and 236,000 recorded ones were measured there."""
    fleet = FleetSize(
        nodes=1250, jobs=2450, nodes_per_job=1.4, reporting=966, serving=314, models=2, owners=50, users=200, pairs=200,
        churn=1500, node_accounts=2,
    )  # fmt: skip
    found = estimate(fleet)
    assert 624_000 <= found.series["single GPUs"] <= 624_000 * 1.03
    assert 236_000 <= found.recorded <= 236_000 * 1.4
    assert found.recorded_at_most >= 236_000


@pytest.mark.slow
def test_a_limit_that_no_story_reaches() -> None:
    for scenario in GOLDENS:
        snapshot = picture(scenario)
        found = estimate(fleet_of(snapshot))
        assert really_shown(snapshot) < max_samples(fleet_of(snapshot)) < found.sample_limit
    assert estimate(FleetSize()).sample_limit % 100 == 0
    trouble = FleetSize(jobs=8, trouble=8, spinning=8, reasons=19, node_accounts=33)
    assert max_samples(FleetSize()) == sum(scraped_series(trouble).values()) - scraped_series(trouble)["scrape"]
    assert max(len(metric.labels) for metric in METRICS) + 3 < found.label_limit


fleets = st.builds(
    FleetSize,
    nodes=st.integers(1, 5000), gpus=st.integers(1, 16), jobs=st.integers(1, 9000), owners=st.integers(1, 50),
    users=st.integers(1, 200), churn=st.floats(0, 1e5), source=st.sampled_from(list(MISSING_SIGNALS)),
)  # fmt: skip


@given(fleets, st.sampled_from(["nodes", "gpus", "jobs", "reporting", "serving", "spinning", "trouble", "users"]))
def test_more_of_anything_is_never_fewer_series(fleet: FleetSize, what: str) -> None:
    more = replace(fleet, **{what: getattr(fleet, what) + 1})
    was, now = estimate(fleet), estimate(more)
    assert was.scraped <= now.scraped
    assert was.recorded_at_most <= now.recorded_at_most
    assert (was.scraped_calm, was.recorded) <= (was.scraped, was.recorded_at_most)


def test_twice_the_nodes_and_jobs_is_twice_the_series() -> None:
    """All rules except those of the whole cluster."""
    one, two = FleetSize(nodes=1000, jobs=2000), FleetSize(nodes=2000, jobs=4000)
    assert estimate(two).scraped == 2 * estimate(one).scraped
    assert 1.99 < estimate(two).recorded / estimate(one).recorded <= 2


def test_rules_over_what_nobody_tells_record_nothing() -> None:
    silent, speaking = FleetSize(jobs=5), FleetSize(jobs=5, reporting=2, serving=1)
    of_reports = [rule for rule in recording_rules() if rule.scope == "reporting job"]
    assert of_reports
    assert {recorded_series(silent, rule) for rule in of_reports} == {0.0}
    assert all(recorded_series(speaking, rule) > 0 for rule in of_reports)


def test_what_was_not_seen_is_a_series_for_each_reason_and_prometheus_adds_its_own() -> None:
    found = scraped_series(FleetSize(nodes=3, reasons=4))
    assert found["gpu_efficiency_unobserved_seconds_total"] == 3 * 8 * 4
    assert found["scrape"] == 3 * len(("up", "duration", "samples", "samples after relabelling", "series added"))
    assert found["process"] > 0


def test_what_nobody_holds_is_apart_in_the_nodes_leaks() -> None:
    (rule,) = [each for each in recording_rules() if each.record == "node_model_leak:gpu_efficiency_seconds:rate5m"]
    assert recorded_series(FleetSize(nodes=2), rule) == 2 * (len(LEAK_NAMES) + len(UNHELD_LEAKS))
    assert recorded_series(FleetSize(nodes=2, leaks=5), rule) == 2 * (5 + len(UNHELD_LEAKS))


def test_a_job_that_begins_brings_its_own_series_and_those_of_its_rules() -> None:
    found = estimate(FleetSize(nodes=10, jobs=10, churn=100.0))
    assert 100 * (max_series_of_scope("job") + 30) < found.new_series_per_day < 100 * (max_series_of_scope("job") + 150)
    assert estimate(FleetSize(nodes=10, jobs=10)).new_series_per_day == 0
    assert found.scraped > estimate(FleetSize(nodes=10, jobs=10)).scraped  # some linger


def test_a_server_s_engine_tells_an_mfu_too() -> None:
    found = scraped_series(FleetSize(jobs=3, reporting=1, serving=2))
    assert found["gpu_efficiency_job_reported_mfu_ratio"] == 3
    assert found["gpu_efficiency_job_reported_hfu_ratio"] == 1


def test_every_metric_s_most_is_known() -> None:
    assert all(metric.max_series >= 0 for metric in METRICS)
    busy = FleetSize(
        measured=1,
        ports=1,
        coding=1,
        chip_links=1,
        reporting=1,
        serving=1,
        communicating=1,
        trouble=1,
        spinning=8,
        shared=1,
        exemptions=1,
        pod_labels=1,
        mig_boards=1,
        mig_instances=7,
        pushing=True,
    )
    assert {metric.name for metric in METRICS} <= scraped_series(busy).keys()
    assert set(SCENARIOS) > {"demo"}


# -- the command --


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    def run(line: str) -> tuple[int, str, str]:
        try:
            status = main(shlex.split(line))
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


Run = Callable[[str], tuple[int, str, str]]


def test_it_says_the_same_to_people_and_programs(run: Run) -> None:
    words = "cardinality --nodes 100 --gpus 4 --jobs 150 --reporting 20 --serving 5 --churn 1000 --interval 30"
    status, out, err = run(words)
    _, tree, _ = run(words + " --json")
    found = json.loads(tree)
    assert (status, err) == (0, "")
    assert (found["fleet"]["nodes"], found["fleet"]["churn"]) == (100, 1000.0)
    for name in ("scraped", "scraped_calm", "recorded", "recorded_at_most", "new_series_per_day"):
        assert f"{found[name]:,}" in out
    assert all(f"{count:,}" in out for count in found["series"].values())
    assert f"sample_limit: {found['sample_limit']}" in out
    assert found["scraped"] == pytest.approx(sum(found["series"].values()), abs=5)
    assert "100 nodes of 4 GPUs, 150 jobs" in out
    assert found["samples_per_second"] > found["scraped"] / 30


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--nodes 0", "0 is no whole number from 1"),
        ("--nodes many", "many is no whole number"),
        ("--nodes 1000000000000", "is no whole number"),
        ("--interval 0.5", "'0.5' is less than 1s"),
        ("--churn nan", "nan is not 0 or more"),
        ("--source magic", "invalid choice: 'magic'"),
        ("--profile some", "invalid choice: 'some'"),
        ("--mig-boards 9 --mig-instances 9", "--mig-boards 9 of 8 GPUs a node"),
        ("--mig-boards 1", "--mig-boards and --mig-instances go together"),
        ("--nodes-per-job 2", "--nodes-per-job 2 of 1 nodes"),
        ("--reporting 3", "--reporting 3 of 1 jobs"),
        ("--spinning 9", "--spinning 9 of 8 GPUs"),
        ("--free-gpus 9", "--free-gpus 9 of 8 GPUs"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(run: Run, words: str, reason: str) -> None:
    status, out, err = run(f"cardinality {words}")
    assert (status, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize("profile", PROFILES)
def test_the_relabelling_it_prints_is_the_profile(run: Run, profile: str) -> None:
    status, out, _ = run(f"cardinality --profile {profile} --relabel")
    assert status == 0
    assert yaml.safe_load(out) == {"metric_relabel_configs": relabel_configs(profile)}
    assert out.startswith(f"# Profile {profile}: ")
