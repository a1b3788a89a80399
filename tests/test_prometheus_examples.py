"""The files of examples/prometheus and the table in docs/prometheus.md: checked by promtool, and by what they say."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.prometheus.build import BEGIN, END, block, lost, panels_lost, refreshed, rules_lost
from exporter.cardinality import PROFILES, FleetSize
from exporter.cli.cardinality import estimate, relabel_text
from exporter.config import DEFAULT_PORT
from tests.alerts import packs
from tests.alerts.lint import rules
from tests.alerts.test_intervals import documented as faster_profile

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "prometheus"
PAGE = ROOT / "docs" / "prometheus.md"
CONFIGS = ("scrape.yaml", "tls.yaml", "central.yaml", "federate.yaml", "slurmctld.yaml")
AGENTS = ("agent.yaml", "shard.yaml")
_GROUPS_OF_A_TENANT = 70
"""Mimir's default."""
SCRAPES = ("scrape.yaml", "kubernetes.yaml", "tls.yaml", "agent.yaml", "shard.yaml", "vmagent.yaml")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """The examples as they would lie beside the rules, with a certificate and a password that they name."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "alerts", tmp_path / "alerts", ignore=shutil.ignore_patterns("*.py", "tests", "examples"))
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "password").write_text("secret\n")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=example", "-days", "2"]
    ca = ["-keyout", f"{tmp_path}/tls/key.pem", "-out", f"{tmp_path}/tls/ca.pem"]
    subprocess.run([*words, *ca], check=True, capture_output=True)
    return tmp_path


def example(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def checked(folder: Path, name: str, *words: str) -> str:
    done = subprocess.run(
        ["promtool", "check", "config", *words, name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def promtool_agrees(file: Path, test: dict[str, Any]) -> None:
    """Run one of promtool's tests of rules and queries."""
    file.write_text(yaml.safe_dump({"tests": [test]}))
    words = ["promtool", "test", "rules", f"{file}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_promtool_takes_each_configuration(folder: Path, name: str) -> None:
    said = checked(folder, name)
    if "rule_files" in example(name):
        found = sum(int(count) for count in re.findall(r"SUCCESS: (\d+) rules found", said))
        assert found == len(rules())


@pytest.mark.parametrize("name", AGENTS)
def test_promtool_takes_each_agent_s(folder: Path, name: str) -> None:
    checked(folder, name, "--agent")


@pytest.mark.slow
def test_money_of_opencost_is_split_as_time_is(folder: Path) -> None:
    for rules_of in ("recording.yaml", "recording-jobs.yaml"):
        shutil.copy(folder / "alerts" / rules_of, folder)
    shutil.copy(ROOT / "tests" / "opencost_rules.yaml", folder)
    words = ["promtool", "test", "rules", "opencost_rules.yaml"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_time_by_a_pod_label_counts_each_job_once(tmp_path: Path) -> None:
    """A job whose nodes differ in the label, one that has ended, and two clusters with a job of the same name."""
    page = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    query = re.search(r"# GPU-seconds of the last day by application\n(.*?)```", page, re.DOTALL)
    assert query is not None
    names, labels = "gpu_efficiency_job_paid_seconds_total", "gpu_efficiency_job_label_info"
    series = {
        names: ("n1 ml/job/a east 0+60x1440", "n2 ml/job/a east 0+60x1440", "n3 ml/job/a west 0+60x1440"),
        labels: ("n1 ml/job/a east a-old", "n2 ml/job/a east a-new", "n3 ml/job/a west b", "n4 ml/job/c east c"),
    }
    rows = []
    for name, found in series.items():
        for instance, job_id, cluster, last in map(str.split, found):
            more = f',key="app.kubernetes.io/part-of",value="{last}"' if name == labels else ""
            of = f'{name}{{cluster="{cluster}",instance="{instance}",job_id="{job_id}"{more}}}'
            rows.append({"series": of, "values": "1x600 stale" if last == "c" else "1x1440" if more else last})
    rows.append({"series": f'{names}{{cluster="east",instance="n4",job_id="ml/job/c"}}', "values": "0+60x600 stale"})
    hours = {"a": 48, "b": 24, "c": 10}
    asked = {
        "expr": f'round(label_replace({query[1]}, "value", "a", "value", "a-.*") / 3600)',
        "eval_time": "1d",
        "exp_samples": [{"labels": f'{{value="{value}"}}', "value": number} for value, number in hours.items()],
    }
    test = {"interval": "1m", "input_series": rows, "promql_expr_test": [asked]}
    promtool_agrees(tmp_path / "labels.yaml", test)


def test_of_slurm_s_own_metrics_no_user_s_is_kept() -> None:
    (drop,) = example("slurmctld.yaml")["scrape_configs"][0]["metric_relabel_configs"]
    assert drop["action"] == "drop"
    dropped = {
        "slurm_user_jobs_gpus_alloc",
        "slurm_node_cpus",
        "slurm_node_memory_free_bytes",
        "slurm_partition_nodes_mem_tot",
    }
    kept = {
        "slurm_node_gpus", "slurm_node_gpus_alloc", "slurm_partition_gpus", "slurm_partition_nodes_drained",
        "slurm_partition_jobs_pending", "slurm_account_jobs_gpus_alloc", "slurm_nodes_down", "slurm_bf_last_depth",
    }  # fmt: skip
    assert {name for name in dropped | kept if re.fullmatch(drop["regex"], name)} == dropped


@pytest.mark.slow
def test_slurm_s_own_metrics_show_what_is_missing_of_ours(tmp_path: Path) -> None:
    """Of three nodes one has no daemon; one account has jobs there, one has no job, and one is not of Slurm."""
    page = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    block = re.search(r"```promql\n(# nodes with GPUs for which no daemon answers.*?)```", page, re.DOTALL)
    assert block is not None
    missing, covered, left = (part.partition("\n")[2] for part in block[1].strip().split("\n\n"))
    seconds = "account_layer:gpu_efficiency_seconds:rate5m"
    series = {
        **{
            f'slurm_node_gpus{{cluster="alps",node="{node}"}}': gpus
            for node, gpus in zip("abcd", (8, 8, 8, 0), strict=True)
        },
        **{f'gpu_efficiency_node_info{{cluster="alps",node="{node}"}}': 1 for node in "ab"},
        'gpu_efficiency_node_info{cluster="jura",node="c"}': 1,
        'slurm_account_jobs_gpus_alloc{cluster="alps",account="physics"}': 8,
        'slurm_account_jobs_gpus_alloc{cluster="alps",account="maths"}': 0,
        f'{seconds}{{cluster="alps",account="physics",layer="useful"}}': 1.5,
        f'{seconds}{{cluster="alps",account="physics",layer="unobserved"}}': 0.5,
        f'{seconds}{{cluster="alps",account="other",layer="useful"}}': 3,
        'slurm_bf_queue_len{cluster="alps"}': 500,
        'slurm_bf_last_depth{cluster="alps"}': 100,
        'slurm_bf_queue_len{cluster="jura"}': 7,
        'slurm_bf_last_depth{cluster="jura"}': 7,
    }
    expected = (
        (missing, '{cluster="alps",node="c"}', 8),
        (covered, '{cluster="alps",account="physics"}', 0.25),
        (left, '{cluster="alps"}', 400),
    )
    asked = [
        {"expr": expr, "eval_time": "1m", "exp_samples": [{"labels": labels, "value": value}]}
        for expr, labels, value in expected
    ]
    rows = [{"series": name, "values": f"{value}x2"} for name, value in series.items()]
    promtool_agrees(tmp_path / "slurm.yaml", {"interval": "1m", "input_series": rows, "promql_expr_test": asked})


def test_promtool_takes_kubernetes_but_for_its_discovery(folder: Path) -> None:
    """Debian's Prometheus has no discovery of Kubernetes."""
    found = example("kubernetes.yaml")
    (discovery,) = found["scrape_configs"][0].pop("kubernetes_sd_configs")
    assert discovery == {"role": "pod", "namespaces": {"names": ["gpu-efficiency"]}}
    (folder / "rest.yaml").write_text(yaml.safe_dump(found))
    checked(folder, "rest.yaml")


def test_kubernetes_keeps_the_chart_s_pods() -> None:
    chart = ROOT / "helm" / "gpu-efficiency" / "templates"
    keep = example("kubernetes.yaml")["scrape_configs"][0]["relabel_configs"][0]
    assert keep["regex"] == "gpu-efficiency;metrics"
    assert "app.kubernetes.io/name" in (chart / "_helpers.tpl").read_text()
    assert "- name: metrics" in (chart / "daemonset.yaml").read_text()


@pytest.mark.parametrize("name", SCRAPES)
def test_one_scrape_job_with_the_node_s_name(name: str) -> None:
    job = example(name)["scrape_configs"][0]
    assert job["job_name"] == "gpu-efficiency"
    assert any(rule.get("target_label") == "instance" for rule in job["relabel_configs"])


def test_limits_in_the_examples_are_those_of_eight_gpus() -> None:
    found = estimate(FleetSize(gpus=8, jobs=8, reporting=8, serving=8))
    for name in SCRAPES:
        job = example(name)["scrape_configs"][0]
        assert 0.9 * found.sample_limit <= job.get("sample_limit", found.sample_limit) <= 1.1 * found.sample_limit
        assert job.get("label_limit", found.label_limit) == found.label_limit
        assert job.get("label_value_length_limit", 1024) == found.label_value_length_limit


def test_ports_and_clusters() -> None:
    (nodes,) = example("nodes.yaml")
    assert all(target.endswith(f":{DEFAULT_PORT}") for target in nodes["targets"])
    assert nodes["labels"]["cluster"] == example("agent.yaml")["global"]["external_labels"]["cluster"]


def test_the_agent_sends_what_rules_read() -> None:
    (write,) = example("agent.yaml")["remote_write"]
    (keep,) = write["write_relabel_configs"]
    assert keep["action"] == "keep"
    scraped = {"up", "gpu_efficiency_state", "gpu_efficiency_job_info", "process_resident_memory_bytes"}
    assert all(re.fullmatch(keep["regex"], name) for name in scraped)
    assert not re.fullmatch(keep["regex"], "go_goroutines")


def test_a_shard_keeps_whole_nodes() -> None:
    named, hashed, kept = example("shard.yaml")["scrape_configs"][0]["relabel_configs"]
    assert hashed["source_labels"] == [named["target_label"]]
    assert (hashed["action"], hashed["modulus"], kept["regex"]) == ("hashmod", 4, "0")
    assert "rule_files" not in example("shard.yaml")


def test_mimir_s_groups_are_within_its_limits() -> None:
    limits = example("mimir-limits.yaml")["overrides"]["gpus"]
    groups = [group for found in packs.groups().values() for group in found]
    assert max(len(group["rules"]) for group in groups) <= limits["ruler_max_rules_per_rule_group"]
    assert len(groups) <= _GROUPS_OF_A_TENANT / 2, "a tenant has rules of its own, too"


# -- profiles --


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"full"}))
def test_relabelling_is_what_the_command_prints(profile: str) -> None:
    """After a change of the catalogue or of a rule: make docs."""
    assert (FOLDER / f"relabel-{profile}.yaml").read_text(encoding="utf-8") == relabel_text(profile)


@pytest.mark.slow
def test_the_page_s_table_is_the_rules_and_boards() -> None:
    """After a change of a rule or a board: make docs."""
    page = PAGE.read_text(encoding="utf-8")
    assert block() in page
    assert refreshed(page) == page
    with pytest.raises(ValueError, match="needs the lines"):
        refreshed(page.replace(BEGIN, ""))
    assert END in page


def test_the_profile_for_rules_costs_no_rule_and_no_alert() -> None:
    assert rules_lost("rules") == rules_lost("full") == (frozenset(), frozenset())
    assert all(some == 0 for some, _ in panels_lost("full").values())
    assert {title for title, (some, _) in panels_lost("rules").items() if some} == {
        "Job", "Node and GPU", "Zombies and deadlocks",
    }  # fmt: skip


def test_each_profile_costs_more() -> None:
    costs = [sum(map(len, rules_lost(profile))) for profile in PROFILES]
    assert costs == sorted(costs)
    assert "GPUEfficiencyJobDeadlocked" in rules_lost("nodes")[1]
    assert "GPUEfficiencyGPULost" in rules_lost("jobs")[1] - rules_lost("rules")[1]


@pytest.mark.parametrize(
    ("expr", "profile", "gone"),
    [
        ("gpu_efficiency_power_watts", "rules", True),
        ("gpu_efficiency_power_watts", "full", False),
        ('rate(gpu_efficiency_seconds_total{leak="throttled"}[5m])', "rules", False),
        ('rate(gpu_efficiency_seconds_total{leak=~"throttled|useful"}[5m])', "rules", True),
        ("rate(gpu_efficiency_seconds_total[$__rate_interval])", "rules", True),
        ("gpu_efficiency_state", "rules", False),
        ("gpu_efficiency_state", "jobs", True),
        ("gpu_efficiency_job_info", "jobs", False),
        ("gpu_efficiency_job_info", "nodes", True),
        ("gpu_efficiency_node_gpus", "nodes", False),
        ("sum(up) or gpu_efficiency_last_xid", "rules", True),
    ],
)
def test_what_an_expression_lacks(expr: str, profile: str, *, gone: bool) -> None:
    assert lost(expr, profile) is gone
    assert lost("level:some:record", profile, frozenset({"level:some:record"}))


# -- commands of the pages --

_SINFO = """\
n1 idle gpu:h100:8(S:0-1)
n2 mixed gpu:h100:8(S:0-1)
n2 mixed gpu:h100:8(S:0-1)
n3 idle~ gpu:h100:8
n4 idle% gpu:h100:8
n5 allocated# gpu:h100:8
n6 down* gpu:h100:8
cpu1 idle (null)
"""


def _command(page: str, begin: str) -> str:
    """The indented block of a page that begins so."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.search(rf"^    {re.escape(begin)}.*\n(?:^    .*\n)*", text, re.MULTILINE).group()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("listed", "targets"),
    [
        (_SINFO, ["n1:19400", "n2:19400", "n6:19400"]),
        ("n3 idle~ gpu:h100:8\n", None),
        ("cpu1 idle (null)\n", ["before"]),
        ("", ["before"]),
    ],
    ids=["some are powered down", "all are", "no GPU", "no answer"],
)
def test_targets_from_slurm_are_nodes_that_are_on(tmp_path: Path, listed: str, targets: list[str] | None) -> None:
    (tmp_path / "nodes.yaml").write_text("- targets: [before]\n")
    (tmp_path / "listed").write_text(listed)
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text('#!/bin/sh\n[ "$*" = "-h -N -o %N %T %G" ] && [ -s listed ] && cat listed\n')
    sinfo.chmod(0o755)
    path = f"{sinfo.parent}:{os.environ['PATH']}"
    command = ["sh", "-c", _command("prometheus.md", "sinfo -h -N")]
    subprocess.run(command, cwd=tmp_path, env={"PATH": path}, check=False, timeout=60)
    (group,) = yaml.safe_load((tmp_path / "nodes.yaml").read_text())
    assert group["targets"] == targets


@pytest.mark.slow
def test_the_faster_profile_has_every_group_twice_as_often(folder: Path) -> None:
    subprocess.run(["sh", "-c", faster_profile()], cwd=folder, check=True, timeout=60)
    slow, fast = (
        {
            group["name"]: group.get("interval")
            for path in sorted(place.glob("*.yaml"))
            for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        }
        for place in (ROOT / "alerts", folder / "alerts")
    )
    assert "4m" in slow.values()
    assert fast == {name: "2m" if interval == "4m" else interval for name, interval in slow.items()}
    # What is evaluated twice as often says the same: the worked example of the documents, which promtool evaluates.
    shutil.copytree(ROOT / "alerts" / "tests", folder / "alerts" / "tests")
    words = ["promtool", "test", "rules", "alerts/tests/worked-example_test.yaml"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checked(folder, "scrape.yaml")
