"""The command over stores: a quarter of 256 simulated GPUs, and jobs written by hand into real SQLite files."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobSample
from exporter.core.model import Owner
from exporter.history.job_tracker import JobTracker
from exporter.history.store import HistoryStore
from tests.report.commands import run
from tests.report.sum_fleets import BEGIN, HOUR, Fleet, played, trained
from tests.report.test_sums import THURSDAY, statement

DAYS = 90
QUARTER = Fleet(
    story=trained(0.4, tells=False), nodes=128, gpus=2, price=2.5, length=DAYS * 24 * HOUR, period=2 * HOUR,
    scrape=2 * HOUR,
    spread=True,
)  # fmt: skip
AT = f"--at {THURSDAY + 4 * HOUR} --since 4h"


def statements(fleet: Fleet) -> list[JobRecord]:
    """Return what the nodes' stores have of the jobs."""
    remembering, last = JobTracker(node="n00", ledger_id="life-00", sample_seconds=fleet.scrape), None
    found = []
    for _, last in played(fleet):
        found += remembering.update(last)[1]
    assert last is not None
    found += remembering.running_records(last)
    return [_elsewhere(each, node, fleet) for node in range(fleet.nodes) for each in found]


def _elsewhere(statement: JobRecord, node: int, fleet: Fleet) -> JobRecord:
    own = statement.owner if fleet.spread else replace(statement.owner, job_id=f"{statement.owner.job_id}-{node}")
    return replace(statement, node=f"n{node:02}", life=f"life-{node:02}", owner=own)


def store(path: Path, *told: JobRecord) -> Path:
    opened = HistoryStore(path)
    opened.write(job_records=told)
    opened.close()
    return path


@pytest.fixture(name="quarter", scope="module")
def _quarter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("quarter") / "history.db", *statements(QUARTER))


def said(words: str) -> str:
    status, out, err = run(words)
    assert (status, err) == (0, "")
    return out


def told(words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(f"{words} --json"))
    return found


@pytest.mark.slow
def test_256_gpus_for_90_days_at_2_50_cost_1_38_million_and_60_percent_gives_a_fifth_back(quarter: Path) -> None:
    words = f"--user grace --store {quarter} --since {DAYS}d --at {BEGIN + QUARTER.length} --target-emfu 60%"
    found = told(words)
    assert found["whole"]["money"] == pytest.approx(1.38e6, abs=0.005e6)
    assert found["whole"]["layers"]["emfu"] == pytest.approx(0.40, abs=0.002)
    (gain,) = found["raised"]
    assert (round(gain["gpus"]), gain["money"]) == (51, pytest.approx(280_000, abs=5000))
    assert gain["time_saved"] == pytest.approx(1 / 3, abs=0.005)
    page = said(words)
    assert "256 GPUs on average" in page
    assert "eMFU 40.0 % -> 60.0 %: the work of 51.2 more GPUs" in page
    assert "or the same work in 33.3 % less time" in " ".join(page.split())
    assert len(found["trend"]) == 14  # weeks


@pytest.mark.slow
def test_a_month_of_a_longer_job_is_what_its_samples_say(quarter: Path) -> None:
    found = told(f"--all --store {quarter} --since 30d --at {BEGIN + QUARTER.length}")
    assert found["whole"]["gpu_hours"] == pytest.approx(256 * 24 * 30, rel=1e-6)
    assert found["whole"]["layers"]["product"] == pytest.approx(0.40, abs=0.002)
    assert (found["fleet"]["held"], found["fleet"]["held_peak"]) == (pytest.approx(256), 256)


@pytest.mark.parametrize(("start", "since"), [(0.0, "30m"), (HOUR / 2, "4h")])
def test_one_that_runs_over_a_cut_is_shared_by_its_samples(tmp_path: Path, start: float, since: str) -> None:
    # Idle for three quarters of its first half hour and useful for the rest; the period ends there.
    begin = THURSDAY + start
    half = JobSample(begin + HOUR / 2, paid=7200, seen=7200, occupied=3600, computing=3600, useful=3600, joules=0)
    path = store(tmp_path / "a.db", statement(start=begin, end=begin + HOUR, samples=(half,)))
    found = told(f"--all --store {path} --at {begin + HOUR} --since {since} --every hour")
    assert found["trend"][-1]["gpu_hours"] == pytest.approx(2.0)
    assert found["trend"][-1]["product"] == pytest.approx(0.0)
    later = {part["name"]: part["gpu_hours"] for part in found["parts"]}
    assert (later["data_stall"], later["memory_bound"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert ("useful" in later) == (since == "4h")


def test_a_simulated_node_among_others_makes_it_simulated(tmp_path: Path) -> None:
    path = store(tmp_path / "a.db", statement(simulated=True), statement(node="n2", life="l2"))
    assert told(f"--all --store {path} {AT}")["simulated"] is True
    assert told(f"--all --store {store(tmp_path / 'b.db', statement())} {AT}")["simulated"] is False


def test_the_time_is_from_the_first_job_s_start_to_the_last_one_s_end(tmp_path: Path) -> None:
    begin = THURSDAY + 2 * HOUR
    late = statement(node="n2", life="l2", start=begin + HOUR / 2, end=begin + HOUR * 3 / 2)
    path = store(tmp_path / "a.db", late, statement(start=begin, end=begin + HOUR))
    found = told(f"--all --by job --store {path} {AT}")
    assert (found["start"], found["end"]) == (begin, begin + HOUR * 3 / 2)
    assert [(row["name"], row["about"], row["jobs"]) for row in found["rows"]] == [("7", "train of ada", 1)]


def test_of_a_job_in_two_copies_the_later_word_counts(tmp_path: Path) -> None:
    later = statement(end=THURSDAY + 2 * HOUR, paid=2 * statement().paid, parts={"useful": 2 * statement().paid})
    copies = [store(tmp_path / "a.db", later), store(tmp_path / "b.db", statement())]
    for first, second in (copies, copies[::-1]):
        found = told(f"--all --store {first} --store {second} {AT}")
        assert (found["whole"]["gpu_hours"], found["whole"]["layers"]["product"]) == (8, 1)


def test_several_stores_are_added_and_what_is_in_both_is_counted_once(tmp_path: Path) -> None:
    first = store(tmp_path / "a.db", statement())
    second = store(tmp_path / "b.db", statement(), statement(node="n2", life="l2"))
    found = told(f"--all --store {first} --store {second} {AT}")
    assert (found["whole"]["jobs"], found["whole"]["gpu_hours"], found["whole"]["money"]) == (1, 8, 16)
    assert found["fleet"]["held_peak"] == 8


def test_the_energy_of_each_team_has_its_price_beside_that_of_its_time(tmp_path: Path) -> None:
    jobs = [
        statement(owner=Owner("7", user="ada", team="blue"), energy={"useful": 3.6e6, "data_stall": 1.8e6}),
        statement(owner=Owner("8", user="bob", team="red"), energy={"useful": 9e6}),
        statement(owner=Owner("9", user="eve", team="grey")),
    ]
    path, config = store(tmp_path / "a.db", *jobs), tmp_path / "c.toml"
    config.write_text("[energy]\nprice_per_kwh = 0.2\ncurrency = 'EUR'\n")
    found = told(f"--all --by team --store {path} {AT} --config {config}")
    assert (found["currency"], found["energy_currency"], found["whole"]["money"]) == ("USD", "EUR", 24)
    of_each = {row["name"]: (row["energy_kwh"], row["energy_money"]) for row in (*found["rows"], found["whole"])}
    assert of_each == {
        "blue": (1.5, pytest.approx(0.3)), "red": (2.5, pytest.approx(0.5)), "grey": (None, None),
        "all": (4, pytest.approx(0.8)),
    }  # fmt: skip
    page = said(f"--all --by team --store {path} {AT} --config {config}")
    assert "12.00 GPU-hours, 24.00 USD, 4 kWh for 0.80 EUR, 100.0 % observed" in page
    assert "Energy by team   kWh   EUR\nred             2.50  0.50\nblue            1.50  0.30\n\n" in page
    parts = {part["name"]: (part["energy_kwh"], part["energy_money"]) for part in found["parts"]}
    assert parts == {
        "useful": (3.5, pytest.approx(0.7)), "data_stall": (0.5, pytest.approx(0.1)), "idle_allocation": (0, 0),
        "memory_bound": (0, 0),
    }  # fmt: skip
    assert "Where the energy went   kWh    share   EUR\ndata_stall " in page
    assert "GPU-hours), 0.5 kWh for 0.10 EUR\n" in page
    unpriced = said(f"--team blue --by team --store {path} {AT}")
    assert "4.00 GPU-hours, 8.00 USD, 1.5 kWh, 100.0 % observed" in unpriced
    assert "Energy by" not in unpriced
    assert "Where the energy went" not in unpriced


def test_totals_have_the_carbon_of_each_hour_unless_one_is_not_known(tmp_path: Path) -> None:
    jobs = [
        statement(owner=Owner("7", team="blue"), energy={"useful": 3.6e6}),
        statement(owner=Owner("8", team="red"), start=THURSDAY + HOUR, end=THURSDAY + 2 * HOUR, energy={"hung": 7.2e6}),
    ]
    path, config = store(tmp_path / "a.db", *jobs), tmp_path / "c.toml"
    (tmp_path / "hours.csv").write_text(
        "Datetime (UTC),Carbon intensity\n2026-01-01 00:00:00,500\n2025-12-31 23:00:00,1\n"
    )
    settings = f"[energy]\ncarbon_intensity_file = '{tmp_path}/hours.csv'\n"
    config.write_text(f"{settings}grams_co2_per_kwh = 50\n")
    found = told(f"--all --by team --store {path} {AT} --config {config}")
    assert {row["name"]: row["co2_kg"] for row in (*found["rows"], found["whole"])} == {
        "blue": pytest.approx(0.5), "red": pytest.approx(0.1), "all": pytest.approx(0.6),
    }  # fmt: skip
    line = "66.7 % of the energy is of hours without a carbon intensity"
    assert f"{line}: for them it is grams_co2_per_kwh, 50" in found["unseen"]
    page = said(f"--all --by team --store {path} {AT} --config {config}")
    assert "3 kWh with 0.6 kg of CO2, 100.0 % observed" in page
    assert (
        "Energy by team   kWh  kg of CO2\nred             2.00       0.10\nblue            1.00       0.50\n\n" in page
    )
    config.write_text(settings)
    unknown = told(f"--all --by team --store {path} {AT} --config {config}")
    assert {row["name"]: row["co2_kg"] for row in (*unknown["rows"], unknown["whole"])} == {
        "blue": pytest.approx(0.5), "red": None, "all": None,
    }  # fmt: skip
    assert any(each.startswith(f"{line}: set grams_co2_per_kwh") for each in unknown["unseen"])


def test_of_many_jobs_none_is_left_out(tmp_path: Path) -> None:
    path = store(tmp_path / "a.db", *(statement(owner=Owner(f"{n}", user="ada")) for n in range(1200)))
    assert told(f"--all --store {path} {AT}")["whole"]["jobs"] == 1200


def test_only_those_who_are_asked_for(tmp_path: Path) -> None:
    own = {"user": "bob", "account": "cv", "namespace": "web", "team": "blue"}
    path = store(
        tmp_path / "a.db", statement(), *(
            statement(owner=replace(Owner(f"{field}", user="eve"), **{field: value}), life=field)
            for field, value in own.items()
        )
    )  # fmt: skip
    for field, value in own.items():
        assert [row["name"] for row in told(f"--{field} {value} --by job --store {path} {AT}")["rows"]] == [field]
    assert told(f"--all --store {path} {AT}")["whole"]["jobs"] == 5


def test_a_job_is_ranked_by_any_of_its_words(tmp_path: Path) -> None:
    owner = Owner("7", user="ada", account="nlp", namespace="web", team="blue", partition="gpu")
    path = store(tmp_path / "a.db", statement(owner=owner))
    for by, name in (
        ("user", "ada"),
        ("account", "nlp"),
        ("namespace", "web"),
        ("team", "blue"),
        ("partition", "gpu"),
        ("job", "7"),
    ):
        assert [row["name"] for row in told(f"--all --by {by} --store {path} {AT}")["rows"]] == [name]


@pytest.mark.parametrize(
    ("job", "gap"),
    [
        (statement(), "after 2026-01-01 01:00 UTC"),
        (statement(running=True), ""),
        (statement(start=THURSDAY + 2 * HOUR, end=THURSDAY + 4 * HOUR - 59), "before 2026-01-01 02:00 UTC"),
        (
            statement(start=THURSDAY + HOUR, end=THURSDAY + 2 * HOUR),
            "before 2026-01-01 01:00 UTC and after 2026-01-01 02:00 UTC",
        ),
    ],
)
def test_of_what_time_no_job_is_known_is_told_where_gpus_of_nobody_are_counted(
    tmp_path: Path, job: JobRecord, gap: str
) -> None:
    page = " ".join(said(f"--all --gpus 8 --store {store(tmp_path / 'a.db', job)} {AT}").split())
    assert ("no job is known" in page) == bool(gap)
    assert f"no job is known {gap}: the GPUs count as unallocated there" in page or not gap


def test_gpus_that_are_paid_for_make_a_fleet_of_it(tmp_path: Path) -> None:
    """In all of the four hours that are asked for, of which one has a job."""
    path = store(tmp_path / "a.db", statement())
    page = said(f"--all --gpus 8 --store {path} {AT}")
    assert "The whole fleet" in page
    assert "paid for, on average            8\n" in page
    assert "held by nobody                  7 GPUs on average, 56.00 USD" in page
    assert "by your word 8 GPUs are paid for" in page
    unknown = "no job is known after 2026-01-01 01:00 UTC: the GPUs count as unallocated there; use --since and --at"
    assert unknown in " ".join(page.split())
    assert "more than are paid for" not in page
    hour = f"--at {THURSDAY + HOUR} --since 1h"
    few = " ".join(said(f"--all --gpus 3 --store {path} {hour}").split())
    assert "jobs held 4.0 GPUs on average, more than are paid for by your word" in few
    assert "no job is known" not in few
    without = " ".join(said(f"--all --store {path} {AT}").split())
    assert "All jobs" in without
    assert "say how many are paid for with --gpus" in without
    assert "4.00 GPU-hours, 8.00 USD" in without


def test_a_job_in_two_ledgers_of_a_node_is_not_twice_as_large(tmp_path: Path) -> None:
    """The record of the second has the job's own start."""
    again = statement(life="l2", end=THURSDAY + 2 * HOUR)
    other = statement(life="l3", end=THURSDAY + 2 * HOUR, owner=Owner("8"), whole_gpus=1.0)
    path = store(tmp_path / "a.db", again, other, statement())
    assert told(f"--all --store {path} {AT}")["fleet"]["held_peak"] == 5


def test_a_rent_alone_is_of_all_jobs(tmp_path: Path) -> None:
    path = store(tmp_path / "a.db", statement())
    found = told(f"--rent 4@0.8 --rent spot=1@50% --store {path} {AT}")
    assert [(each["name"], each["break_even"]) for each in found["rents"]] == [
        ("4.00 at 80 %", pytest.approx(0.1 * 4)), ("spot", pytest.approx(1.0)),
    ]  # fmt: skip


def test_a_file_gets_the_page_and_the_terminal_nothing(tmp_path: Path) -> None:
    path = store(tmp_path / "a.db", statement())
    assert said(f"--all --store {path} {AT} -o {tmp_path / 'page.md'} --markdown") == ""
    assert (tmp_path / "page.md").read_text().startswith("## All jobs\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--all --user ada", "--all, or only user ada, and not both"),
        ("7 --all", "and not both"),
        ("--all --short", "--short is of one job"),
        ("--all --rent 4", "such as 4.00@0.95"),
        ("--user ada --gpus 8", "--gpus is the size of the whole fleet and cannot be combined with user ada"),
        ("--all --gpus 0", "is no number of GPUs"),
        ("--all --gpus many", "is no number of GPUs"),
        ("--user nobody", "no job of user nobody held a GPU in that time, as far as the stores know"),
        ("--user free --rent 4@0.9", "no price"),
        ("--all --at 2025-01-01T00:00", "no job held a GPU in that time, as far as the stores know"),
    ],
)
def test_bad_questions_are_refused_with_the_reason(tmp_path: Path, words: str, why: str) -> None:
    free = statement(owner=Owner("8", user="free"), money={}, life="l8")
    path = store(tmp_path / "a.db", statement(), free)
    status, out, err = run(f"{AT} --store {path} {words}")
    assert (status != 0, out) == (True, "")
    assert why in " ".join(err.split())
