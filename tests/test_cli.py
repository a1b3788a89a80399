"""Tests the command line: exit statuses, standard output and error, and reproducible results.

Runs `main` in this process where nothing is served; what serves is started for real in `e2e`.
"""

import gzip
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families as parse

from exporter import __version__
from exporter.agent.agent import Agent
from exporter.cli import main
from exporter.cli.drill import announcement
from exporter.config import Config, load
from exporter.core.exposition import render
from exporter.core.leaks import LEAKS
from exporter.core.metrics import METRICS, SERIES_BUDGET, max_series_of_scope
from exporter.core.model import Health, Observation, Owner
from exporter.core.snapshot import DaemonMetadata, Snapshot
from exporter.registry import SOURCES
from exporter.simulate.drills import DRILLS
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import simulate
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from exporter.sources.base import SourceError, TelemetrySource
from exporter.trace import TraceHeader, TraceWriter, read_trace
from tests.rigs import FakeSource
from tests.worlds import device, first, held, reading, seen

COMMANDS = (
    "serve", "demo", "record", "replay", "simulate", "preview", "pause", "resume", "check-config", "leaks", "metrics",
    "report", "install-check", "backfill", "top", "advise",
)  # fmt: skip
DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run the command in an empty folder and environment; return exit status, standard output, standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        try:
            status = main(shlex.split(line))
        except SystemExit as end:
            status = int(end.code or 0)
        told = capsys.readouterr()
        return status, told.out, told.err

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


def test_help_lists_the_commands_and_version_says_which(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert [command for command in COMMANDS if command not in out] == []
    assert run("--version") == (0, f"gpu-efficiency {__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    status, out, _ = run(f"{command} --help")
    assert status == 0
    assert f"gpu-efficiency {command}" in out


@pytest.mark.parametrize(
    "line",
    [
        "",
        "watch",
        "serve --colour red",
        "replay",
        "simulate demo --seed many",
        "serve --source amd",
        "serve --config absent.toml",
        "record trace.jsonl --source amd",
        "demo --web.listen-address nowhere",
        "check-config --sampling.interval-seconds 0",
        "simulate no-such-scenario",
        "simulate demo --board no-such-board",
        "simulate demo --period 0.0005",
        "demo --board no-such-board",
        "demo --drill NoSuchAlert",
        "demo --past",
        "demo zombie_notebook --drill GPUEfficiencyGPUZombie",
        "demo --drill GPUEfficiencyGPUZombie --preroll 1h",
        "replay trace.jsonl --serve --speed 0",
        "replay trace.jsonl --serve --speed -1",
        "record trace.jsonl --duration -1",
        "pause --for 25h",
        "pause --config absent.toml",
        "resume --config absent.toml",
    ],
)
def test_wrong_usage_is_status_2_and_words_on_standard_error(run: Run, tmp_path: Path, line: str) -> None:
    status, out, err = run(line)
    assert (status, out) == (2, "")
    assert "gpu-efficiency" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_drills_has_each_alert_on_a_line_of_its_own(run: Run) -> None:
    status, out, _ = run("demo --drill list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == sorted(DRILLS)


def test_an_unknown_drill_is_answered_with_those_that_there_are(run: Run) -> None:
    assert all(name in run("demo --drill NoSuchAlert")[2] for name in DRILLS)


def test_a_drill_is_found_by_the_alerts_name_without_its_prefix_too(run: Run) -> None:
    assert run("demo --drill FleetBlind --past") == run("demo --drill GPUEfficiencyFleetBlind --past")


def test_a_past_belongs_to_a_drill_that_needs_one(run: Run) -> None:
    assert "needs no past" in run("demo --drill FleetBlind --past")[2]
    assert "name one with --drill" in run("demo --past")[2]


def test_a_drills_past_is_what_promtool_makes_blocks_of(run: Run, tmp_path: Path) -> None:
    """It covers the day before, as long as the alert looks back for it, and leaves Prometheus its own last hours."""
    _, out, _ = run("demo --drill Regressed --past")
    times = [int(line.rpartition(" ")[2]) for line in out.splitlines()[:-1]]
    assert min(times) < time.time() - 25 * 3600
    assert time.time() - 5 * 3600 < max(times) < time.time() - 3 * 3600
    (tmp_path / "past.txt").write_text(out)
    words = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "past.txt", "data"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_a_drill_of_two_nodes_says_how_to_start_the_second_and_scrapes_both() -> None:
    text = announcement("GPUEfficiencyFleetBlind", DRILLS["GPUEfficiencyFleetBlind"], "0.0.0.0:19400")
    assert "demo --drill GPUEfficiencyFleetBlind --node 1 --web.listen-address 0.0.0.0:19410" in text
    assert f"targets: ['{platform.node()}:19400', '{platform.node()}:19410']" in text
    second = announcement("GPUEfficiencyFleetBlind", DRILLS["GPUEfficiencyFleetBlind"], "0.0.0.0:19410", node=1)
    assert (second.count("\n"), "SIMULATED" in second) == (0, True)


def test_a_drill_with_two_scrape_jobs_names_them_apart() -> None:
    text = announcement("GPUEfficiencyNodeScrapedTwice", DRILLS["GPUEfficiencyNodeScrapedTwice"], "127.0.0.1:19400")
    assert text.count("targets: ['127.0.0.1:19400']") == 2
    assert text.index("job_name: drill-GPUEfficiencyNodeScrapedTwice\n") < text.index(
        "job_name: drill-GPUEfficiencyNodeScrapedTwice-2\n"
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("replay absent.jsonl", "absent.jsonl: cannot be opened: No such file or directory"),
        ("replay .", ".: cannot be opened: Is a directory"),
        ("simulate demo -o no/such/folder/trace.jsonl", "no/such/folder/trace.jsonl: cannot be created"),
    ],
)
def test_what_fails_while_running_is_status_1_and_one_line(run: Run, line: str, why: str) -> None:
    status, out, err = run(line)
    assert (status, out) == (1, "")
    assert err.startswith(f"gpu-efficiency: {why}")
    assert err.count("\n") == 1


def test_a_setting_that_fails_after_loading_is_named_with_its_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text('[privacy]\nusers = "hash"\nkey_file = "absent"\n')
    status, out, err = run("check-config --config c.toml")
    assert (status, out) == (2, "")
    assert err.startswith("gpu-efficiency: c.toml: line 3: privacy.key_file: ")
    monkeypatch.setenv("GPU_EFFICIENCY_PRIVACY_KEY_FILE", "missing")
    err = run("check-config --config c.toml")[2]
    assert err.startswith("gpu-efficiency: environment variable GPU_EFFICIENCY_PRIVACY_KEY_FILE: privacy.key_file: ")


def test_a_value_of_the_wrong_type_is_named_with_its_line_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[[prices]]\nper_gpu_hour = "much"\n')
    assert run("check-config --config c.toml") == (
        2, "", "gpu-efficiency: c.toml: line 2: Expected `float`, got `str` - at `$.prices[0].per_gpu_hour`\n"
    )  # fmt: skip


def test_a_file_that_is_no_trace_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n")
    status, _, err = run("replay notes.txt")
    assert status == 1
    assert "notes.txt: is not a trace" in err


def test_no_source_is_status_3_and_says_what_was_tried_and_what_to_do(run: Run) -> None:
    closed = "http://127.0.0.1:1/metrics"
    for command in ("serve", "record trace.jsonl"):
        status, out, err = run(f"{command} --source dcgm-exporter --dcgm-exporter-url {closed}")
        assert (status, out) == (3, "")
        assert f"tried dcgm-exporter: {closed} could not be read" in err
        assert "is dcgm-exporter running" in err
        assert "gpu-efficiency demo" in err


def test_every_source_that_was_tried_is_a_line_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, _: Config) -> TelemetrySource:
        raise SourceError(f"no {name} here: install it")

    monkeypatch.setattr("exporter.sources.selector.open_source", refuse)
    status, out, err = run("serve")
    assert (status, out) == (3, "")
    assert [line for line in err.splitlines() if line.startswith("  tried ")] == [
        f"  tried {name}: no {name} here: install it" for name in SOURCES
    ]


@pytest.fixture(name="served")
def _served(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeSource, list[tuple[Observation, Snapshot]]]:
    """Let `serve` find a source, and return its first observation instead of serving."""
    source, served = FakeSource(), list[tuple[Observation, Snapshot]]()

    def publish(
        agent: Agent, _: Config, observations: Callable[[threading.Event], Iterator[Observation]], **_more: object
    ) -> int:
        observation = next(observations(threading.Event()))
        agent.process(observation)
        snapshot = agent.latest()
        assert snapshot is not None
        served.append((observation, snapshot))
        return 0

    monkeypatch.setattr("exporter.sources.selector.open_source", lambda name, _: source.open(name))
    monkeypatch.setattr("exporter.cli.serve.publish", publish)
    return source, served


Served = tuple[FakeSource, list[tuple[Observation, Snapshot]]]


def test_serve_watches_the_source_and_the_inventory_that_are_configured(
    run: Run, served: Served, tmp_path: Path
) -> None:
    source, seen = served
    (tmp_path / "mine.toml").write_text("[inventory]\nexpected_gpus = 3\nfile = 'known.json'\n")
    assert run("serve --source nvml --config mine.toml")[:2] == (0, "")
    ((observation, snapshot),) = seen
    assert [d.uuid for d in observation.devices or ()] == ["GPU-0", "GPU-1", "missing-1"]
    assert snapshot.meta.source == "nvml"
    assert snapshot.meta.source_reason == (
        "nvml (the driver's own library): announces tensor activity; no other one is configured"
    )
    assert [board["uuid"] for board in json.loads((tmp_path / "known.json").read_bytes())] == ["GPU-0", "GPU-1"]
    assert (source.opens, source.closes) == (1, 1)
    (tmp_path / "known.json").write_text('[{"uuid": "GPU-9", "index": "9"}, {"uuid": "GPU-0"}, {"uuid": "GPU-1"}]')
    run("serve --source nvml --config mine.toml")
    assert [d.uuid for d in seen[1][0].devices or ()] == ["GPU-9", "GPU-0", "GPU-1"]


def test_serve_during_a_pause_waits_for_its_end_and_does_not_say_that_there_is_no_source(
    run: Run, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = served
    monkeypatch.setenv("GPU_EFFICIENCY_SAMPLING_PAUSE_FILE", str(tmp_path / "pause"))
    run("pause")
    assert run("serve")[0] == 0
    assert [fault.kind for fault in seen[0][0].faults] == ["paused"]
    assert source.opens == 0
    run("resume")
    assert run("serve")[0] == 0
    assert seen[1][0].devices == source.devices


def test_a_trace_without_any_gpu_is_summed_up_all_the_same(run: Run, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "empty.jsonl", TraceHeader(host="bare")) as trace:
        trace.append(Observation(0, 0, devices=()))
    status, out, err = run("replay empty.jsonl")
    assert (status, err) == (0, "")
    assert out.startswith("0 GPUs, 0.00 GPU-hours paid; GAU    -")


def test_simulate_lists_the_scenarios(run: Run) -> None:
    status, out, _ = run("simulate")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [*SCENARIOS, *LEAK_SCENARIOS, *WATERFALL_SCENARIOS]
    assert all(scenario.description in out for scenario in SCENARIOS.values())


def test_the_nodes_of_a_simulated_fleet_share_no_gpu(run: Run, tmp_path: Path) -> None:
    seen: set[str] = set()
    for node in range(3):
        name = f"node{node}.jsonl"
        assert run(f"simulate fleet --node {node} --gpus 4 --duration 5 -o {name}")[0] == 0
        with read_trace(tmp_path / name) as trace:
            assert trace.header.host == f"gpu-node-{node:02}"
            uuids = {device.uuid for device in next(iter(trace)).devices or ()}
        assert len(uuids) == 4
        assert not seen & uuids
        seen |= uuids


def test_simulate_writes_a_trace_marked_as_simulated_and_its_truth(run: Run, tmp_path: Path) -> None:
    status, out, err = run("simulate deadlock --duration 30 --seed 7 --truth truth.jsonl")
    assert (status, out, err) == (0, "", "31 observations in trace.jsonl\n")
    with read_trace("trace.jsonl") as trace:
        assert trace.header.simulated
        assert trace.header.note == "deadlock, seed 7"
        assert len(list(trace)) == 31
    assert (tmp_path / "truth.jsonl").stat().st_size > 0


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(run: Run, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(f"simulate straggler --duration 20 --seed {seed} -o {name}.jsonl")[0] == 0
    a, b, c = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b
    assert a.splitlines()[1:] != c.splitlines()[1:]


def test_a_file_is_not_overwritten_unless_forced(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "trace.jsonl"
    kept.write_text("a week of recordings")
    status, _, err = run("simulate straggler --duration 5")
    assert status == 1
    assert "trace.jsonl: a file of that name exists" in err
    assert kept.read_text() == "a week of recordings"
    assert run("simulate straggler --duration 5 --force")[0] == 0
    assert kept.read_text() != "a week of recordings"


def test_replay_sums_up_where_the_time_went(run: Run) -> None:
    run("simulate healthy_training --duration 120")
    status, out, err = run("replay trace.jsonl")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("8 GPUs, 0.27 GPU-hours paid; GAU 100.0 %")
    shares = [float(found[1]) for line in lines if (found := re.search(r" h +([\d.]+) %$", line))]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert shares == sorted(shares, reverse=True)
    assert sum(line.startswith("gpu ") for line in lines) == 8
    assert lines[-1] == "conservation errors: 0"


def test_replayed_metrics_are_the_same_bytes_each_time_and_say_that_they_are_no_measurement(run: Run) -> None:
    run("simulate deadlock --duration 60 -o trace.jsonl.gz")
    status, once, err = run("replay trace.jsonl.gz --metrics")
    assert (status, err) == (0, "")
    assert run("replay trace.jsonl.gz --metrics")[1] == once
    assert "\ngpu_efficiency_simulated 1\n" in once
    assert 'source="replay"' in once


def test_a_policy_changes_what_a_replay_finds(run: Run, tmp_path: Path) -> None:
    (tmp_path / "strict.toml").write_text("[policy]\nzombie_batch_seconds = 20\n")
    run("simulate idle_context --duration 60")
    assert " zombie " not in run("replay trace.jsonl")[1]
    assert " zombie " in run("replay trace.jsonl --config strict.toml")[1]


@pytest.mark.slow
def test_the_demo_s_hang_is_confirmed_while_someone_watches(run: Run) -> None:
    run("simulate demo --duration 150")
    states = Counter(re.findall(r'gpu_efficiency_state\{.*state="(\w+)"', run("replay trace.jsonl --metrics")[1]))
    assert (states["active"], states["zombie"], states["hung"]) == (5, 1, 2)


def test_a_trace_cut_off_is_replayed_to_its_end_and_the_cut_is_told(run: Run, tmp_path: Path) -> None:
    run("simulate straggler --duration 20")
    whole = (tmp_path / "trace.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole[:-100])
    for line in ("replay cut.jsonl", "replay cut.jsonl --metrics"):
        status, out, err = run(line)
        assert status == 0
        assert out
        assert re.fullmatch(r"gpu-efficiency: line 22 is cut off after .* 20 observations were read\n", err)


def test_a_packed_trace_cut_off_is_told_too(run: Run, tmp_path: Path) -> None:
    run("simulate straggler --duration 20 -o trace.jsonl.gz")
    packed = (tmp_path / "trace.jsonl.gz").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) - 200])
    status, out, err = run("replay cut.jsonl.gz")
    assert status == 0
    assert "conservation errors: 0" in out
    assert "gpu-efficiency: " in err


def test_a_trace_changed_in_the_middle_is_refused_by_its_line(run: Run, tmp_path: Path) -> None:
    run("simulate straggler --duration 20")
    lines = (tmp_path / "trace.jsonl").read_bytes().splitlines(keepends=True)
    lines[5] = b'{"at":"noon"}\n'
    (tmp_path / "trace.jsonl").write_bytes(b"".join(lines))
    status, out, err = run("replay trace.jsonl")
    assert (status, out) == (1, "")
    assert "trace.jsonl: line 6 is not an observation" in err


def test_a_trace_without_observations_is_status_1(run: Run, tmp_path: Path) -> None:
    run("simulate straggler --duration 5")
    header = (tmp_path / "trace.jsonl").read_bytes().splitlines(keepends=True)[0]
    with gzip.open(tmp_path / "empty.jsonl.gz", "wb") as file:
        file.write(header)
    assert run("replay empty.jsonl.gz") == (1, "", "gpu-efficiency: empty.jsonl.gz holds no observation\n")


def test_check_config_prints_what_load_reads_back(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'source = "nvml"\n[policy]\nhang_seconds = 17.5\nmax_jobs = 3\n[log]\nlevel = "debug"\n'
        '[[workload.rules]]\nteam = "nlp \\"x\\""\naccount = "nlp-.*"\n'
        '[[workload.rules]]\nzombie_seconds = 60\nlabel = "app=x"\n'
    )
    status, out, err = run("check-config --config mine.toml --web.listen-address [::1]:9 --sampling.interval-seconds 2")
    assert (status, err) == (0, "")
    (tmp_path / "printed.toml").write_text(out)
    printed = load(tmp_path / "printed.toml", environ={})
    flags = {"web.listen_address": "[::1]:9", "sampling.interval_seconds": 2}
    assert printed == load(tmp_path / "mine.toml", environ={}, flags=flags)
    assert (printed.policy.hang_seconds, printed.source, printed.web.listen_address) == (17.5, "nvml", "[::1]:9")


def test_check_config_names_what_no_longer_applies(run: Run, tmp_path: Path) -> None:
    row = '[[exemptions]]\nid = "{}"\nreason = "demo room"\nexpires = {}\nuser = "ann"\n'
    (tmp_path / "mine.toml").write_text(row.format("old", "2020-02-01") + row.format("new", "2999-01-01"))
    status, out, err = run("check-config --config mine.toml")
    assert status == 1
    assert 'id = "old"' in out
    assert err == (
        "gpu-efficiency: the exemption old has expired (2020-02-01) and exempts no job: remove it, or set a later"
        " `expires`\n"
    )


def test_check_config_names_prices_of_models_that_do_not_exist(run: Run, tmp_path: Path) -> None:
    rows = ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB", "My Board", "*", "NVIDIA H1OO")
    text = "".join(f'[[prices]]\nper_gpu_hour = 2.5\nmodel = "{model}"\n' for model in rows)
    (tmp_path / "mine.toml").write_text(f'{text}[specs."My Board"]\npeak_flops = 1e14\n')
    status, _, err = run("check-config --config mine.toml")
    assert status == 0
    assert err == (
        "gpu-efficiency: [[prices]] has a row for 'NVIDIA H1OO', which no table of specifications knows: it has an"
        " effect only if `nvidia-smi -L` calls a GPU exactly so\n"
    )


@pytest.mark.parametrize("currency", ["$", "€", "US D", "9"])
def test_a_currency_is_a_code_and_no_symbol(run: Run, tmp_path: Path, currency: str) -> None:
    (tmp_path / "mine.toml").write_text(f'[[prices]]\nper_gpu_hour = 2.5\ncurrency = "{currency}"\n')
    status, _, err = run("check-config --config mine.toml")
    assert status == 2
    assert "line 3: " in err
    assert "a code such as USD, or another name in letters; a symbol such as $ stands for several currencies" in err


@pytest.mark.slow
def test_what_an_encoding_lacks_is_replaced_and_nothing_fails(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[exemptions]]\nid = "a"\nreason = "Vorf\u00fchrung"\nexpires = 2999-01-01\nuser = "a"\n', "utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "exporter", "check-config", "--config", str(file)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert b'"Vorf?hrung"' in found.stdout


def test_check_config_without_anything_prints_the_defaults(run: Run, tmp_path: Path) -> None:
    (tmp_path / "printed.toml").write_text(run("check-config")[1])
    assert load(tmp_path / "printed.toml", environ={}) == Config()


@pytest.mark.parametrize("host", ['gpu"7', "gpu\\n7", "日本", "a b"])
def test_check_config_prints_any_text_so_that_it_reads_back(run: Run, tmp_path: Path, host: str) -> None:
    status, out, _ = run(f"check-config --dcgm-exporter-url {shlex.quote(f'http://{host}/metrics')}")
    assert status == 0
    (tmp_path / "printed.toml").write_text(out, encoding="utf-8")
    assert load(tmp_path / "printed.toml", environ={}).dcgm_exporter.url == f"http://{host}/metrics"


def test_check_config_names_what_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_POLICY_HANG_SECONDS", "-1")
    status, out, err = run("check-config")
    assert (status, out) == (2, "")
    assert err.startswith("gpu-efficiency: environment variable GPU_EFFICIENCY_POLICY_HANG_SECONDS: ")
    assert "`$.policy.hang_seconds`" in err


def test_metrics_prints_every_metric_with_its_meaning(run: Run) -> None:
    status, out, _ = run("metrics")
    assert status == 0
    assert [m.name for m in METRICS if m.help not in out or f"{m.name}" not in out] == []


def test_metrics_markdown_names_every_metric_and_leak_once_in_tables_that_hold(run: Run) -> None:
    status, out, _ = run("metrics --markdown")
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert {m.name: sum(row.startswith(f"| `{m.name}` |") for row in rows) for m in METRICS} == dict.fromkeys(
        (m.name for m in METRICS), 1
    )
    assert [leak.name for leak in LEAKS if not any(row.startswith(f"| `{leak.name}` |") for row in rows)] == []
    assert {row.count("|") for row in rows} <= {6, 7}


def test_the_documentation_of_the_metrics_is_what_the_command_prints(run: Run) -> None:
    assert run("metrics --markdown")[1] == DOCS.read_text(encoding="utf-8"), "run `make docs`"


def node(*, gpus: int, jobs: int) -> bytes:
    """Metrics of a node after ten minutes, with one GPU per job, of two; some unobserved time on each."""
    devices = [device(f"GPU-{n}", f"{n}") for n in range(gpus)]
    holding = [held(f"GPU-{n}", Owner(f"{n}", time_limit_seconds=3600), gpus=2) for n in range(jobs)]
    agent = Agent(meta=DaemonMetadata(version="1"))
    agent.run([first(devices, holding)])
    health = tuple(replace(HEALTH, uuid=d.uuid) for d in devices)
    for at in range(60, 660, 60):
        readings = [reading(at - 59, at, uuid=d.uuid, **SENSORS) for d in devices]
        agent.run([seen(at, *readings, health=health)])
    snapshot = agent.latest()
    assert snapshot is not None
    return render(snapshot)


SENSORS: dict[str, Any] = {
    "temperature_celsius": 61.0, "memory_used_bytes": 1e9, "energy_joules": 36e3, "clock_event_reasons": 0,
}  # fmt: skip
HEALTH = Health(
    "", xids=(13,), recovery_action=0, ecc_corrected=0, ecc_uncorrected=0, row_remap_pending=False, nvlink_errors=0,
    memory_temperature_celsius=70.0, temperature_margin_celsius=20.0,
)  # fmt: skip


def series(page: bytes, label: str | None) -> Counter[str]:
    """Series by the value of a label, or all series without a GPU and a job."""
    samples = [sample for family in parse(page.decode()) for sample in family.samples]
    if label is None:
        mine = (s for s in samples if "account" not in s.labels)
        return Counter("node" for s in mine if not (s.labels.get("uuid") or s.labels.get("job_id")))
    other = {"uuid": "", "job_id": "uuid"}[label]
    return Counter(s.labels[label] for s in samples if s.labels.get(label) and other not in s.labels)


def test_series_are_as_many_as_documented_and_within_their_budgets(run: Run) -> None:
    page = node(gpus=8, jobs=8)
    counts = {"gpu": series(page, "uuid"), "job": series(page, "job_id"), "node": series(page, None)}
    assert [len(counts[scope]) for scope in ("gpu", "job", "node")] == [8, 8, 1]
    assert set(counts["gpu"].values()) == {max_series_of_scope("gpu")}
    assert set(counts["job"].values()) == {max_series_of_scope("job") + max_series_of_scope("job on several GPUs")}
    # Kinds of errors_total that this agent cannot meet have no series yet.
    per_node = max_series_of_scope("node") + max_series_of_scope("model")
    absent = {
        "scheduler_unanswered_seconds", "price_per_kwh", "grams_co2_per_kwh", "idle_budget_per_hour",
        "config_last_reload_successful", "config_last_reload_success_timestamp_seconds", "config_restart_needed",
        "history_up", "history_last_checkpoint_timestamp_seconds", "history_failures_total", "history_size_bytes",
    }  # fmt: skip
    assert per_node - 4 - len(absent) < counts["node"]["node"] <= per_node - len(absent) + 1
    documented = re.search(
        rf"(\d+) per GPU \(budget {SERIES_BUDGET['gpu']}\), (\d+) per job on a node "
        rf"\(budget {SERIES_BUDGET['job']}\), (\d+) per node.*\(budget {SERIES_BUDGET['node']}\)",
        run("metrics --markdown")[1],
    )
    assert documented is not None
    assert [int(count) for count in documented.groups()] == [
        max_series_of_scope("gpu"),
        max_series_of_scope("job"),
        per_node,
    ]
    assert f"{max_series_of_scope('account')} per account" in run("metrics --markdown")[1]


_OF_A_GPU = ("gpu", "spinning GPU")
_OF_A_JOB = ("job", "job in trouble", "job on one GPU", "job on several GPUs", "reporting job", *["rank"] * 4)
"""A reporting job has four ranks at most; a serving job has fewer series than a reporting one."""


def test_series_grow_with_gpus_and_jobs_and_nothing_else() -> None:
    small, large = node(gpus=2, jobs=2), node(gpus=8, jobs=8)
    assert series(small, None) == series(large, None)
    total = {page: sum(len(family.samples) for family in parse(page.decode())) for page in (small, large)}
    of_one = sum(map(max_series_of_scope, ("gpu", "job", "job on several GPUs")))
    assert total[large] - total[small] == 6 * of_one


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_scenario_publishes_more_series_than_documented(scenario: str) -> None:
    agent = Agent(meta=DaemonMetadata())
    agent.run(simulate(scenario, period_seconds=60, duration_seconds=1200, preroll_seconds=0).observations)
    snapshot = agent.latest()
    assert snapshot is not None
    page = render(snapshot)
    for scopes, label in ((_OF_A_GPU, "uuid"), (_OF_A_JOB, "job_id"), (("node", "model"), None)):
        most = sum(max_series_of_scope(scope) for scope in scopes)
        assert all(count <= most for count in series(page, label).values()), scopes
