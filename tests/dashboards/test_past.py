"""A past of two nodes with constant rates: what the rules say of it is arithmetic."""

from collections.abc import Iterator

import pytest

from tests.alerts.packs import FOLDER
from tests.dashboards.past import Past, Rule, Series, Target, named, prometheus, rules, seconds
from tests.dashboards.past import in_order as levels

pytestmark = pytest.mark.e2e
END = 1_767_873_600.0
BEGIN = END - 7200
MODEL = "NVIDIA H100 80GB HBM3"
RATES = {
    "n1": {"useful": ("useful", 4.0), "memory_bound": ("emfu", 2.0), "data_stall": ("ectr", 2.0)},
    "n2": {"useful": ("useful", 1.0), "idle_allocation": ("gau", 3.0)},
}
"""GPUs by what they do."""
SILENT = END - 600
"""Node n2 is not heard any more from then on."""
WEEKS_AGO = END - 21 * 86_400


def page(node: str, at: float) -> str:
    lines = [
        f'gpu_efficiency_node_seconds_total{{model="{MODEL}",held="true",leak="{leak}",layer="{layer}"}} '
        f"{rate * (at - BEGIN)}"
        for leak, (layer, rate) in RATES[node].items()
    ]
    price = f'gpu_efficiency_price_per_gpu_hour{{model="{MODEL}",pool="",currency="USD",basis="paid",held="true"}} 2'
    who = f'gpu_efficiency_node_info{{node="{node}",pool=""}} 1'
    build = 'gpu_efficiency_build_info{version="1"} 1'
    mood = f'mood{{of="{"new" if at >= END - 3600 else "old"}"}} 1'
    return "\n".join(
        ("# HELP words", *lines, price, who, build, mood, f'gpu_efficiency_node_gpus{{model="{MODEL}"}} 8')
    )


def node(name: str) -> Series:
    target = Target(cluster="a", instance=f"{name}:1", job="gpu")
    for minute in range(121):
        at = BEGIN + 60 * minute
        if name == "n2" and at >= SILENT:
            target.failed(at)
        else:
            target.scraped(at, page(name, at))
    return target.series


@pytest.fixture(name="past", scope="module")
def _past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    with prometheus(tmp_path_factory.mktemp("prometheus")) as past:
        past.write(node("n1") | node("n2"))
        past.write({named("cluster:gpu_efficiency_owned:gpus", cluster="b"): [(WEEKS_AGO, 7.0)]})
        past.record(rules("recording.yaml", "recording-days.yaml", "exporter.yaml"), start=BEGIN, end=END)
        yield past


def one(past: Past, query: str, at: float = END) -> float:
    ((_, value),) = past.ask(query, at)
    return value


def test_a_rule_of_the_first_level(past: Past) -> None:
    found = past.ask('node_leak:gpu_efficiency_seconds:rate5m{instance="n1:1"}', END)
    assert {labels["leak"]: value for labels, value in found} == {
        "useful": pytest.approx(4), "memory_bound": pytest.approx(2), "data_stall": pytest.approx(2),
    }  # fmt: skip


def test_rules_that_read_others_see_them(past: Past) -> None:
    while_both = SILENT - 120
    # 12 GPUs, of them 3 idle, 2 stalled, 2 waiting for memory, 5 useful.
    assert one(past, "cluster:gpu_efficiency_gau:ratio_rate5m", while_both) == pytest.approx(9 / 12)
    assert one(past, "cluster:gpu_efficiency_ectr:ratio_rate5m", while_both) == pytest.approx(7 / 9)
    assert one(past, "cluster:gpu_efficiency_product:ratio_rate5m", while_both) == pytest.approx(5 / 12)
    assert one(past, "cluster:gpu_efficiency_cost_paid:per_hour", while_both) == pytest.approx(24)
    assert one(past, "cluster:gpu_efficiency_product:ratio_rate5m") == pytest.approx(4 / 8)


def test_the_mean_of_an_hour(past: Past) -> None:
    at = SILENT - 240
    assert one(past, "cluster:gpu_efficiency_gau:ratio_mean1h", at) == pytest.approx(9 / 12)
    assert one(past, "cluster:gpu_efficiency_emfu:ratio_mean1h", at) == pytest.approx(5 / 7)


def test_every_rule_has_a_sample_at_the_end_and_at_its_own_interval(past: Past) -> None:
    for name, interval in (
        ("cluster:gpu_efficiency_gau:ratio_rate5m", 240),
        ("cluster:gpu_efficiency_gau:median_7d", 1200),
    ):
        ((_, found),) = past.ask_range(f"timestamp({name})", END - 3600, end=END, step=60)
        assert sorted({at for _, at in found})[-2:] == [END - interval, END]


def test_what_a_scrape_no_longer_has_ends_at_once(past: Past) -> None:
    moods = {
        at: [labels["of"] for labels, _ in past.ask("mood{instance='n1:1'}", at)] for at in (END - 3601, END - 3600)
    }
    assert moods == {END - 3601: ["old"], END - 3600: ["new"]}
    assert past.ask('gpu_efficiency_node_info{node="n2"}', SILENT) == []
    assert one(past, 'up{instance="n2:1"}') == 0


def test_what_a_rule_no_longer_gives_ends_at_its_next_step(past: Past) -> None:
    gone = 'node:gpu_efficiency_gpus{node="n2"}'
    next_step = END - (END - SILENT) // 240 * 240
    assert one(past, gone, next_step - 1) == 8
    assert past.ask(gone, next_step) == []


def test_a_rule_that_reads_its_own_last_value_hands_it_on(past: Past) -> None:
    assert one(past, 'node:gpu_efficiency_remembered:gpus{node="n2"}') == 8
    assert one(past, "cluster:gpu_efficiency_owned:gpus{cluster='a'}") == 16
    assert one(past, "cluster:gpu_efficiency_heard:gpus") == 8


def test_an_alert_is_there_while_its_expression_is_true(past: Past) -> None:
    ((labels, value),) = past.ask('ALERTS{alertname="GPUEfficiencyExporterDown"}', END)
    assert value == 1
    assert labels.items() >= {
        "alertstate": "firing", "instance": "n2:1", "cluster": "a", "severity": "ticket", "team": "platform",
    }.items()  # fmt: skip
    assert past.ask('ALERTS{alertname="GPUEfficiencyExporterDown"}', SILENT - 60) == []


def test_an_alert_is_its_jobs_teams_or_else_the_platforms(past: Past) -> None:
    target = Target(job="teams")
    target.scraped(END, 'owned{team="red"} 1\nowned{of="nobody"} 1\n')
    past.write(target.series)
    alert = next(rule for rule in rules("gpus.yaml") if rule.labels["alertname"] == "GPUEfficiencyGPUZombie")
    past.record([Rule(name="ALERTS", expr="owned", labels=alert.labels)], start=END, end=END)
    found = past.ask('ALERTS{alertname="GPUEfficiencyGPUZombie"}', END)
    assert sorted(labels["team"] for labels, _ in found) == ["platform", "red"]


def test_weeks_ago_is_there_too(past: Past) -> None:
    assert one(past, "cluster:gpu_efficiency_owned:gpus{cluster='b'}", WEEKS_AGO) == 7


def test_of_a_cluster_written_by_hand_nothing_is_recorded_before(past: Past) -> None:
    rule = Rule(name="here:up", expr="up", interval=60)
    past.record([rule], start=END - 600, end=END, since={"a": END - 120})
    assert past.ask("here:up", END - 121) == []
    assert len(past.ask("here:up", END - 120)) == 2


def test_a_rule_whose_halves_differ_in_name_alone_is_one_series(past: Past) -> None:
    new = 'label_replace(mood{of="new", instance="n1:1"}, "of", "", "", "")'
    halves = f'{new} or on (instance) up{{instance="n1:1"}}'
    past.record([Rule(name="either", expr=halves, interval=600)], start=BEGIN, end=END)
    ((_, points),) = past.ask_range("either", BEGIN, end=END, step=600)
    assert len(points) == 13


def test_a_rule_that_prometheus_refuses_is_named_with_its_words(past: Past) -> None:
    with pytest.raises(ValueError, match=r"^broken: .*expected type range vector in call to function \"rate\""):
        past.record([Rule(name="broken", expr="rate(up)")], start=BEGIN, end=END)


def test_samples_that_go_back_are_refused(past: Past) -> None:
    with pytest.raises(ValueError, match=r"refused samples: .*out of order"):
        past.write({named("cluster:gpu_efficiency_owned:gpus", cluster="b"): [(WEEKS_AGO - 60, 7.0)]})


def test_label_values_come_back_as_they_were_on_the_page(past: Past) -> None:
    target = Target(job="odd")
    target.scraped(END, 'odd{text="a \\"b\\" \\\\ c",empty=""} 3\nbare 4e-05\n')
    past.write(target.series)
    ((labels, value),) = past.ask("odd", END)
    assert (labels["text"], "empty" in labels, value) == ('a "b" \\ c', False, 3)
    assert one(past, "bare") == 4e-05


def test_levels_follow_what_reads_what() -> None:
    rows = {
        "c": Rule(name="c", expr="sum(a) / b"), "a": Rule(name="a", expr="rate(raw_total[5m])"),
        "b": Rule(name="b", expr="a or last_over_time(b[1h])"),
    }  # fmt: skip
    assert [[rule.name for rule in level] for level in levels(rows.values())] == [["a"], ["b"], ["c"]]


def test_all_rules_are_found_with_their_intervals() -> None:
    found = rules()
    assert len(found) == sum(path.read_text().count("      - record: ") for path in FOLDER.glob("*.yaml")) + sum(
        path.read_text().count("      - alert: ") for path in FOLDER.glob("*.yaml")
    )
    by_name = {rule.name: rule.interval for rule in found}
    assert by_name["cluster:gpu_efficiency_gau:median_7d"] == 1200
    assert by_name["job:gpu_efficiency_gpus"] == 120


def test_a_duration() -> None:
    assert (seconds("90s"), seconds("1.5h"), seconds("250ms"), seconds("2w")) == (90, 5400, 0.25, 1_209_600)
    with pytest.raises(ValueError, match="'5' is no duration"):
        seconds("5")
