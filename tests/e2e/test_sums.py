"""`gpu-efficiency report --all` and its like, against a real Prometheus.

Two kinds of past are in it: simulated fleets, whose figures the users' documents work out, and three hours of counters
that are written by hand and added up by hand. Nothing waits for a clock.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exporter.preview.prometheus import PrometheusClient
from exporter.report.query import InstanceKey
from exporter.report.scrape_gaps import ScrapeGap, ScrapeGaps
from tests.dashboards.past import Past, named, prometheus, rules
from tests.e2e.running import ROOT
from tests.report.commands import run
from tests.report.sum_counters import END, MINUTE, SILENT, SILENT_END, by_hand, reloaded, silent
from tests.report.sum_fleets import BEGIN, HOUR, HOUR_MS, Fleet, pages, taught, tidal, trained

pytestmark = pytest.mark.e2e
ANEW = (150, 245)
"""Minutes within SILENT: in an hour before that of the next scrape, and in the same."""
FLEETS = {
    "thirty": Fleet(
        story=taught(0.6, free_ms=2 * HOUR_MS, works_ms=1_200_000, rests_ms=600_000),
        nodes=16, gpus=8, price=2.0, length=8 * HOUR, period=300, scrape=1200, spread=True,
    ),
    "carpenter": Fleet(
        story=taught(0.4, free_ms=2 * HOUR_MS, works_ms=1_200_000, rests_ms=600_000),
        nodes=1, gpus=8, price=2.0, length=8 * HOUR, period=300,
    ),
    "ruled": Fleet(
        story=taught(0.6, free_ms=2 * HOUR_MS, works_ms=1_200_000, rests_ms=600_000),
        nodes=2, gpus=2, price=2.0, length=8 * HOUR, scrape=60,
    ),
    "tidal": Fleet(story=tidal(10), nodes=5, gpus=20, price=2.0, length=10 * HOUR, period=300),
    "trained": Fleet(
        story=trained(0.4, tells=True), nodes=16, gpus=8, price=2.5, length=8 * HOUR, scrape=1200, spread=True
    ),
}  # fmt: skip
"""By cluster. Nodes of one are alike: one is simulated, and stands under all their names."""
RECORDED = frozenset({"node_model_leak:gpu_efficiency_seconds:rate5m", "job_leak:gpu_efficiency_seconds:rate5m"})


@pytest.fixture(name="past", scope="module")
def _past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    with prometheus(tmp_path_factory.mktemp("prometheus")) as past:
        for cluster, fleet in FLEETS.items():
            past.write(pages(fleet, cluster))
        end = BEGIN + FLEETS["carpenter"].length
        where = {"cluster": "carpenter", "instance": "n00:19400", "job": "gpu"}
        past.write({named("gpu_efficiency_simulated", **where): [(end, 1.0)]})
        past.write(by_hand())
        past.write(reloaded())
        past.write(silent("silent"))
        past.write(silent("booted", booted=240))
        past.write(silent("replaced", booted=-100_000))
        for minute in ANEW:
            past.write(silent(f"anew-{minute}", anew=minute))
        yield past


Ask = Callable[[str], str]


@pytest.fixture(name="ask")
def _ask(past: Past, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What the command prints."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def ask(words: str) -> str:
        status, out, err = run(f"--quiet --prometheus {past.url} {words}")
        assert (status, err) == (0, "")
        return out

    return ask


def of(cluster: str) -> str:
    """All of a fleet, from its beginning to its end."""
    length = FLEETS[cluster].length
    return f"--all --match 'cluster=\"{cluster}\"' --since {length}s --at {BEGIN + length}"


# -- the worked figures --


def test_128_gpus_at_30_percent_and_2_dollars_waste_1_57_million_a_year(ask: Ask) -> None:
    found = json.loads(ask(f"{of('thirty')} --json"))
    assert found["fleet"]["gpus"] == pytest.approx(128, abs=0.5)
    assert found["whole"]["layers"]["product"] == pytest.approx(0.30, abs=0.005)
    said = ask(of("thirty"))
    assert amount_before(said, " USD", after="at this rate ") == pytest.approx(1.57e6, abs=0.005e6)
    assert "8 h 00 min" in said


def test_2_dollars_at_30_percent_are_6_67_a_useful_hour_against_4_21(ask: Ask) -> None:
    said = ask(f"{of('thirty')} --rent 4.00@0.95")
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert rows["own"].split()[1:] == ["2.00", "USD", "30.0", "%", "6.67", "USD"]
    assert rows["rent 4.00 at 95 %"].split()[5:] == ["4.00", "USD", "95.0", "%", "4.21", "USD", "47.5", "%"]
    assert "own GPUs pay from 47.5 % useful on; here it is 30.0 %" in said.replace("\n  ", " ")


def test_the_document_shows_what_the_command_says(ask: Ask) -> None:
    said = ask(f"{of('thirty')} --rent 4.00@0.95")
    shown = (ROOT / "docs" / "job-reports.md").read_text(encoding="utf-8")
    assert f"```text\n{said}```" in shown


def test_what_no_hardware_measured_is_marked_as_simulated(ask: Ask) -> None:
    assert "(SIMULATED)" in ask(of("carpenter")).splitlines()[0]
    assert json.loads(ask(f"{of('carpenter')} --json"))["simulated"] is True
    assert "SIMULATED" not in ask(of("ruled"))


def test_75_times_67_times_40_percent_is_20(ask: Ask) -> None:
    assert "GAU 75.0 % x ECTR 66.7 % x eMFU 40.0 % = 20.0 %" in ask(of("carpenter"))


def test_a_peak_of_100_and_a_mean_of_40_leave_60_idle(ask: Ask) -> None:
    said = ask(of("tidal"))
    assert "allocated, at the peak          100 (" in said
    assert "allocated, on average           40\n" in said
    assert "kept for the peak, and idle     60 GPUs on average, 1,200.00 USD" in said


def test_128_gpus_at_40_percent_do_the_work_of_51_and_60_gives_25_back(ask: Ask) -> None:
    found = json.loads(ask(f"{of('trained')} --json"))
    assert found["whole"]["layers"]["emfu"] == pytest.approx(0.40, abs=0.002)
    said = ask(f"{of('trained')} --target-emfu 0.6")
    assert "1 job\n128 GPUs on average" in said
    assert amount_before(said, " that never wait", after="did the work of ") == pytest.approx(51, abs=0.5)
    assert amount_before(said, " more GPUs", after="60.0 %: the work of ") == pytest.approx(25.6, abs=0.3)


def amount_before(said: str, what: str, *, after: str) -> float:
    """A figure as it is printed."""
    return float(" ".join(said.split()).split(after)[1].split(what.strip())[0].replace(",", ""))


@pytest.mark.parametrize("seconds", [1500, 1799, 3000])
def test_a_short_time_has_the_gpus_that_there_are(ask: Ask, seconds: int) -> None:
    """Whenever it ends: the end of what is stored is not rounded to the steps of a query."""
    for end in (BEGIN + 7200, BEGIN + 7200 + 299, BEGIN + 7200 + 140):
        found = json.loads(ask(f"--all --match 'cluster=\"ruled\"' --since {seconds}s --at {end} --json"))
        assert found["fleet"]["gpus"] == pytest.approx(4, rel=61 / seconds), "to a sample, one a minute"
        assert found["end"] - found["start"] == pytest.approx(seconds, abs=2 * 60)


# -- ranks, filters and forms --


def test_who_lost_most_is_first_and_nobody_is_in_the_ranking(ask: Ask) -> None:
    rows = json.loads(ask(f"{of('tidal')} --json"))["rows"]
    assert [(row["name"], row["jobs"]) for row in rows] == [("(nobody)", 0), ("eve", 5), ("ada", 5)]
    assert [row["lost_money"] for row in rows] == [pytest.approx(value) for value in (1200, 250, 150)]
    assert [row["worst"] for row in rows] == ["idle_allocation", "other_compute", "other_compute"]


def test_what_a_user_asks_for_is_hers_alone(ask: Ask) -> None:
    hers = of("tidal").replace("--all", "--user ada")
    found = json.loads(ask(f"{hers} --json"))
    assert (found["whole"]["jobs"], found["whole"]["gpu_hours"]) == (5, pytest.approx(150))
    assert found["fleet"] is None
    assert {row["name"] for row in found["rows"]} == {"ada"}
    by_job = json.loads(ask(f"{hers} --by job --json"))["rows"]
    assert (len(by_job), by_job[0]["gpu_hours"], by_job[0]["about"]) == (5, pytest.approx(30), "burst of ada")


def test_the_trend_is_by_the_hour_and_adds_up(ask: Ask) -> None:
    found = json.loads(ask(f"{of('tidal')} --json"))
    assert [round(each["gpu_hours"]) for each in found["trend"]] == [100] * 10
    assert [each["product"] for each in found["trend"]] == [
        pytest.approx(0.5 if n in {1, 2} else 0.125) for n in range(10)
    ]
    assert sum(each["lost_money"] for each in found["trend"]) == pytest.approx(found["whole"]["lost_money"])
    days = json.loads(ask(f"{of('tidal')} --every day --json"))["trend"]
    assert [each["gpu_hours"] for each in days] == [pytest.approx(1000)]


def test_a_line_for_each_row_and_one_for_all(ask: Ask) -> None:
    lines = ask(f"{of('tidal')} --line").splitlines()
    assert [line.split()[0] for line in lines] == ["(nobody)", "eve", "ada", "all"]
    assert "1,000.00 GPU-h" in lines[-1]
    assert "·▅▅·······" in lines[2]


def test_small_questions_give_the_same_answer(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(ask(f"{of('tidal')} --every day --json"))
    monkeypatch.setattr("exporter.report.usage_prometheus.MAX_SAMPLES_READ", 20_000)
    monkeypatch.setattr("exporter.report.usage_prometheus._JOBS_PER_QUERY", 2)
    parts = json.loads(ask(f"{of('tidal')} --every day --json"))
    assert parts["whole"]["gpu_hours"] == pytest.approx(whole["whole"]["gpu_hours"])
    assert [row["lost_money"] for row in parts["rows"]] == [pytest.approx(row["lost_money"]) for row in whole["rows"]]
    hers = of("tidal").replace("--all", "--user ada")
    assert json.loads(ask(f"{hers} --json"))["whole"]["gpu_hours"] == pytest.approx(150)


def test_what_is_much_is_split_by_recording_rules_and_counted_all_the_same(
    past: Past, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are evaluated by Prometheus itself, over what it has."""
    begin, end = BEGIN, BEGIN + FLEETS["ruled"].length
    past.record(
        [rule for rule in rules("recording.yaml", "recording-jobs.yaml") if rule.name in RECORDED], start=begin, end=end
    )
    monkeypatch.setattr("exporter.report.usage_prometheus.MAX_SAMPLES_READ", 200_000)
    found, fleet = json.loads(ask(f"{of('ruled')} --every day --json")), FLEETS["ruled"]
    assert found["whole"]["gpu_hours"] == pytest.approx(fleet.nodes * fleet.gpus * fleet.length / HOUR, rel=0.005)
    assert found["whole"]["layers"]["product"] == pytest.approx(0.3, abs=0.01)
    assert found["whole"]["layers"]["gau"] == pytest.approx(0.75, abs=0.01)
    rows = {row["name"]: (row["worst"], row["gpu_hours"]) for row in found["rows"]}
    assert rows["ada"] == ("unattributed_stall", pytest.approx(24))  # to the sample, rules or not
    assert rows["(nobody)"] == ("idle_allocation", pytest.approx(8, rel=0.02))
    assert any("as recording rules have it" in line for line in found["unseen"])


# -- counters by hand --


HAND = f"--match 'cluster=\"hand\"' --since 2h --at {BEGIN + END * MINUTE} --by job --json"


def rows_of(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["gpu_hours"] * HOUR for row in found["rows"]}


def test_counters_are_counted_to_the_sample_whenever_they_began(ask: Ask) -> None:
    seconds = rows_of(json.loads(ask(f"--all {HAND}")))
    assert seconds["old"] == pytest.approx(7200)
    assert seconds["new"] == pytest.approx(29.5 * MINUTE)  # from nothing, though the first sample says half a minute
    assert seconds["late"] == pytest.approx(6000)  # what it had when it was heard first is nobody's to share out
    assert seconds["anew"] == pytest.approx(7140, abs=2 * MINUTE)
    assert seconds["moved"] == pytest.approx(20 * MINUTE + 18 * MINUTE)  # what its first daemon counted counts once
    assert seconds["(nobody)"] == pytest.approx(2 * (7200 + 6000 + 7140), abs=4 * MINUTE)


def test_what_no_job_tells_of_is_a_row_of_its_own(ask: Ask) -> None:
    found = json.loads(ask(f"--all {HAND}"))
    untold = 2 * 7200 - 7200 - 29.5 * MINUTE + 6000 + 7140
    assert rows_of(found)["(not told)"] == pytest.approx(untold, abs=4 * MINUTE)
    assert any(line.startswith("(not told)") for line in found["unseen"])
    assert any("began anew 1 times" in line for line in found["unseen"])


def test_each_node_has_its_own_price_and_what_has_none_is_said(ask: Ask) -> None:
    found = json.loads(ask(f"--all {HAND}"))
    money = {row["name"]: row["money"] for row in found["rows"]}
    assert found["currency"] == "USD"
    assert money["old"] == pytest.approx(2 * 2.0)
    assert money["late"] == pytest.approx(6000 / HOUR * 4.0)
    assert money["anew"] == 0
    assert any("have no price" in line for line in found["unseen"])


def test_energy_has_the_price_and_the_carbon_of_its_node(ask: Ask) -> None:
    found = json.loads(ask(f"--all {HAND}"))
    assert found["energy_currency"] == "EUR"
    rows = {row["name"]: row for row in found["rows"]}
    shown = {name: (row["energy_kwh"], row["energy_money"], row["co2_kg"]) for name, row in rows.items()}
    assert shown["old"] == (pytest.approx(1), pytest.approx(0.2), pytest.approx(0.4, rel=0.01))
    assert shown["late"] == (pytest.approx(3 / 3.6), pytest.approx(1.5 / 3.6), None)
    assert shown["anew"] == (pytest.approx(7140 * 500 / 3.6e6, rel=0.02), 0, None)
    whole, moved = found["whole"], 38 / 60 * 0.5
    assert whole["energy_kwh"] == pytest.approx(1.2 * (2 + 6000 / HOUR + 7140 / HOUR) + moved, rel=0.01)
    assert sum(row["energy_kwh"] for row in rows.values()) == pytest.approx(whole["energy_kwh"])
    assert whole["co2_kg"] is None
    # n1: 2.4 kWh less those of old and new, by the time of nobody's two GPUs and of what is not told
    nobody, untold = 2 * 7200.0, 7200 - 29.5 * MINUTE
    of_n1 = (2.4 - 1 - 29.5 / 60 * 0.5) * nobody / (nobody + untold)
    of_others = (1.2 - 0.5) * (6000 + 7140) / HOUR * 2 / 3
    assert shown["(nobody)"][0] == pytest.approx(of_n1 + of_others, rel=0.05)
    assert {each for part in found["parts"] for each in part} & {"energy_kwh", "energy_money", "co2_kg"} == set()
    assert any("kWh have no price: they are in the energy" in line for line in found["unseen"])
    hers = json.loads(ask(f"--user ada {HAND}"))["whole"]
    assert (hers["energy_kwh"], hers["co2_kg"]) == (pytest.approx(1), pytest.approx(0.4, rel=0.01))


def test_filters_of_each_kind(ask: Ask) -> None:
    assert set(rows_of(json.loads(ask(f"--user ada {HAND}")))) == {"old"}
    assert set(rows_of(json.loads(ask(f"--user bob {HAND}")))) == {"new", "late", "anew", "moved"}
    assert set(rows_of(json.loads(ask(f"--account nlp {HAND}")))) == {"late"}
    assert set(rows_of(json.loads(ask(f"--user bob --account nlp {HAND}")))) == {"late"}


def test_a_job_that_a_reload_gave_to_another_team_counts_once(ask: Ask) -> None:
    """For the team that has it last in each hour: blue in the second, red in the first and in the third."""
    words = f"--match 'cluster=\"reloaded\"' --since 3h --at {BEGIN + END * MINUTE} --json"
    hours = {who: json.loads(ask(f"{who} {words}"))["whole"]["gpu_hours"] for who in ("--team red", "--team blue")}
    assert hours == pytest.approx({"--team red": 2, "--team blue": 1})
    rows = json.loads(ask(f"--all --by team {words}"))["rows"]
    assert {row["name"]: row["gpu_hours"] for row in rows} == pytest.approx({"red": 2, "blue": 1})


def test_a_time_of_which_less_is_stored_is_cut_and_said(ask: Ask) -> None:
    found = json.loads(ask(f"--all {HAND.replace('--since 2h', '--since 10h')}"))
    assert (found["start"], found["end"]) == (BEGIN, BEGIN + END * MINUTE)
    assert any("less is stored than was asked for" in line for line in found["unseen"])
    assert len(found["trend"]) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"--all --at {BEGIN - 10 * HOUR} --since 1h", "nothing of gpu-efficiency is stored there in that time"),
        (f"--user nobody {HAND}", "no job of user nobody held a GPU in that time"),
        (f"--all --gpus 4 {HAND}", "--gpus is for stores and nodes"),
        (f"--all --node http://127.0.0.1:1 {HAND}", "and not both"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(
    past: Past, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    status, out, err = run(f"--quiet --prometheus {past.url} {words}")
    assert (status != 0, out, len(err.splitlines())) == (True, "", 1)
    assert said in err


def test_warnings_of_the_prometheus_are_said(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrometheusClient, "remarks", property(lambda _: iter(["no store"])))
    assert json.loads(ask(f"{of('carpenter')} --json"))["unseen"][-1] == "no store"


# -- a daemon that was not scraped for long --


def of_silent(start: int, end: int, *, cluster: str = "silent", match: str = "", words: str = "--all") -> str:
    """The nodes of which one was not scraped for a while, between two minutes."""
    matched = f"--match 'cluster=\"{cluster}\"{match}'"
    return f"{words} {matched} --since {(end - start) * MINUTE}s --at {BEGIN + end * MINUTE} --json"


@pytest.mark.parametrize("every", ["hour", "day"])
def test_periods_add_up_across_a_gap_of_scrapes_that_begins_in_one_and_ends_in_another(ask: Ask, every: str) -> None:
    found = json.loads(ask(f"{of_silent(0, SILENT_END)} --every {every}"))
    assert (found["whole"]["gpu_hours"], found["whole"]["money"]) == (pytest.approx(64), pytest.approx(128))
    assert found["whole"]["energy_kwh"] == pytest.approx(2 * 8.0)
    assert sum(each["gpu_hours"] for each in found["trend"]) == pytest.approx(64)
    told = any("not scraped for over an hour" in line for line in found["unseen"])
    assert told == (every == "hour")


def test_a_gap_is_searched_once_whatever_begins_in_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search reads two weeks of a daemon's scrapes."""
    searched: list[InstanceKey] = []
    search = ScrapeGaps._find

    def counted(gaps: ScrapeGaps, at: float, instances: frozenset[InstanceKey]) -> Iterator[ScrapeGap]:
        searched.extend(instances)
        return search(gaps, at, instances)

    monkeypatch.setattr(ScrapeGaps, "_find", counted)
    found = json.loads(ask(f"{of_silent(0, SILENT_END)} --every hour"))
    assert found["whole"]["gpu_hours"] == pytest.approx(64)
    assert searched == [("silent", "n2:19400")]


def test_the_time_of_a_gap_is_in_the_period_of_the_next_scrape(ask: Ask) -> None:
    hours = json.loads(ask(f"{of_silent(0, SILENT_END)} --every hour"))["trend"]
    last, _ = SILENT
    of_n2 = [4.0, 4 * (last - 60) / 60, 0, 0, 4 * (300 - last) / 60, 4.0, 4.0, 4.0]
    assert [each["gpu_hours"] for each in hours] == [pytest.approx(4 + gpu_hours) for gpu_hours in of_n2]


def test_a_gap_counts_for_the_job_of_that_node_and_for_no_other(ask: Ask) -> None:
    for user, match in (("ada", ""), ("bob", ""), ("bob", ',instance="n2:19400"')):
        found = json.loads(ask(f"{of_silent(0, SILENT_END, match=match, words=f'--user {user}')} --every hour"))
        assert found["whole"]["gpu_hours"] == pytest.approx(32)


def test_reports_on_both_sides_of_a_moment_in_a_gap_add_up_and_each_has_its_share(ask: Ask) -> None:
    before, after = (json.loads(ask(of_silent(*times))) for times in ((0, 180), (180, 480)))
    assert before["whole"]["gpu_hours"] + after["whole"]["gpu_hours"] == pytest.approx(64)
    assert before["whole"]["gpu_hours"] == pytest.approx(24, abs=4 * 5 / 60), "a gap's limits are known to five minutes"
    assert after["fleet"]["gpus"] == pytest.approx(8, rel=0.02)


def test_a_counter_that_begins_at_0_after_the_gap_counts_from_there(ask: Ask) -> None:
    """A node that boots while it is not scraped."""
    for every in ("hour", "day"):
        found = json.loads(ask(f"{of_silent(0, SILENT_END, cluster='booted')} --every {every}"))
        assert found["whole"]["gpu_hours"] == pytest.approx(32 + 4 * (100 + 240) / 60, rel=0.005)


def test_more_time_than_a_gap_has_is_another_machines_with_the_same_name(ask: Ask) -> None:
    found = json.loads(ask(f"{of_silent(0, SILENT_END, cluster='replaced')} --every hour"))
    assert found["whole"]["gpu_hours"] == pytest.approx(32 + 4 * (SILENT[0] + SILENT_END - SILENT[1]) / 60)


@pytest.mark.parametrize("minute", ANEW)
def test_a_job_that_begins_anew_within_a_gap_counts_once(ask: Ask, minute: int) -> None:
    """A Kubernetes workload keeps its ID; so does a job that is queued again."""
    found = json.loads(ask(f"{of_silent(0, SILENT_END, cluster=f'anew-{minute}')} --every hour --by user"))
    bob = (SILENT[0] + SILENT_END - minute) / 60 * 4
    hours = {row["name"]: row["gpu_hours"] for row in found["rows"]}
    assert found["whole"]["gpu_hours"] == pytest.approx(64)
    assert hours == pytest.approx({"ada": 32, "bob": bob, "(not told)": 32 - bob})


@pytest.mark.parametrize("minute", ANEW)
def test_of_a_job_that_begins_anew_within_a_gap_reports_on_both_sides_add_up(ask: Ask, minute: int) -> None:
    words = "--user bob"
    parts = [of_silent(*times, cluster=f"anew-{minute}", words=words) for times in ((0, 180), (180, 480))]
    assert sum(json.loads(ask(part))["whole"]["gpu_hours"] for part in parts) == pytest.approx(
        (SILENT[0] + SILENT_END - minute) / 60 * 4
    )


def test_parts_of_a_period_that_begin_in_a_gap_lose_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.report.usage_prometheus.MAX_SAMPLES_READ", 20_000)
    assert json.loads(ask(f"{of_silent(0, SILENT_END)} --every day"))["whole"]["gpu_hours"] == pytest.approx(64)
