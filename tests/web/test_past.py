"""Tests job records, events and accounts: the API, stored records merged with running jobs, and the pages."""

import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import pydantic
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample, NodeEvent
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Allocation, Observation, Owner, Parallel, Reading, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.prices import CarbonIntensity, EnergyTerms, Price, Terms
from exporter.core.progress import TrainingView
from exporter.core.serving import ServingView
from exporter.core.snapshot import Snapshot, take_snapshot
from exporter.formatting import date_time, energy, gpu_hours, money
from exporter.web import history_api
from exporter.web.api import AccountsOut, ReceiptsOut, accounts_out, jobs_out
from exporter.web.app import (
    DEFAULT_ITEMS,
    MAX_ITEMS,
    EventQuery,
    ReceiptQuery,
    create_app,
    without_pydantic_v1,
)
from exporter.web.history_api import (
    collect_records,
    combine_records,
    downsample,
    job_timeline,
    job_window,
    records_by_job,
)
from exporter.web.page import RECEIPTS_SHOWN, job_path, render_job_page
from tests.test_http import ADA, HOSTILE, META, NODE, WALL, WORKING, S, Tags, gpu, world
from tests.web.serving import served

pytestmark = pytest.mark.slow

NOW = WALL / S + 60
PRICED = replace(META, terms=Terms(node="n7", prices=(Price(3.6, "EUR"),)))
PAGES = ("/", "/jobs/4711")


def over(job_id: str = "4700", *, ago: float = 600.0, **changes: Any) -> JobRecord:
    """A job of one GPU that ran for an hour and ended `ago` seconds ago: half useful, a fifth hung, the rest stall."""
    known: dict[str, Any] = {
        "node": "n7", "life": "a", "owner": Owner(job_id, user="eve", name="old", account="x", namespace="ns"),
        "start": NOW - ago - 3600, "end": NOW - ago, "running": False, "paid": 3600 * S,
        "parts": {"useful": 1800 * S, "hung": 720 * S, "unattributed_stall": 1080 * S},
        "energy": {"useful": 1.2e6, "hung": 0.6e6}, "money": {"EUR": 3.6}, "gpus": {"GPU-0": "0"}, "models": ("H100",),
        "whole_gpus": 1.0, "first_work": 12.0, "happened": {"hung": 2}, "fitting": "3g.40gb",
    }  # fmt: skip
    return JobRecord(**known | changes)


class Shelf:
    """A store for tests with given results; it can be set to fail."""

    def __init__(self, *found: JobRecord, events: tuple[NodeEvent, ...] = (), fails: Exception | None = None) -> None:
        self.found, self.happened, self.fails = found, events, fails
        self.asked: list[JobRecordQuery | tuple[float, int]] = []
        self.covered: list[Snapshot] = []
        self.in_place: Snapshot | None = None
        """Return the snapshot that the test has set instead; None: no checkpoint yet."""
        self.covers = True

    def job_records(self, wanted: JobRecordQuery) -> list[JobRecord]:
        self.asked.append(wanted)
        if self.fails is not None:
            raise self.fails
        return [one for one in self.found if wanted.matches(one)][: wanted.limit]

    def events(self, since: float, limit: int) -> list[NodeEvent]:
        self.asked.append((since, limit))
        if self.fails is not None:
            raise self.fails
        return [one for one in self.happened if one.at >= since][:limit]

    def checkpointed_view(self, snapshot: Snapshot) -> Snapshot | None:
        self.covered.append(snapshot)
        return snapshot if self.covers else self.in_place


def app(kept: Shelf | None = None, *, snapshot: Snapshot | None = NODE, age: int = 0) -> FastAPI:
    now = (0 if snapshot is None else snapshot.at) + age
    return create_app(lambda: snapshot, now=lambda: now, max_age_seconds=10.0, history=kept)


@contextmanager
def site(kept: Shelf | None = None, *, snapshot: Snapshot | None = NODE, age: int = 0) -> Iterator[httpx.Client]:
    with served(app(kept, snapshot=snapshot, age=age)) as server, server.client() as client:
        yield client


def receipts(client: httpx.Client, **asked: Any) -> ReceiptsOut:
    answer = client.get("/api/v1/receipts", params=asked)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=ReceiptsOut)


def ids(answer: ReceiptsOut) -> list[str]:
    return [one.owner.job_id for one in answer.receipts]


# -- queries --


def test_what_is_asked_is_read_and_what_is_not_given_is_everything() -> None:
    shelf = Shelf()
    with site(shelf) as client:
        for asked in ("job_id=a/b&user=u&account=&namespace=n&since=1.5e9&until=2e9&limit=7", ""):
            assert client.get(f"/api/v1/receipts?{asked}").status_code == 200
        for asked in ("", f"since=12&limit={MAX_ITEMS}"):
            assert client.get(f"/api/v1/events?{asked}").status_code == 200
    wanted = JobRecordQuery(job_id="a/b", user="u", namespace="n", since=1.5e9, until=2e9, limit=7)
    assert shelf.asked == [wanted, JobRecordQuery(limit=DEFAULT_ITEMS), (0.0, DEFAULT_ITEMS), (12.0, MAX_ITEMS)]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("limit", "0", "limit: '0' is no whole number from 1 to 5000"),
        ("limit", "5001", "is no whole number"),
        ("limit", "-1", "is no whole number"),
        ("limit", "", "is no whole number"),
        ("limit", "٣", "is no whole number"),
        ("limit", "9" * 5000, "is no whole number"),
        ("since", "yesterday", "since: 'yesterday' is no time in Unix seconds, such as 1767225600"),
        ("since", "-1", "is no time"),
        ("since", "nan", "is no time"),
        ("until", "inf", "is no time"),
        ("until", "1e999", "is no time"),
        ("until", "1_0", "is no time"),
        ("until", "", "is no time"),
        ("job_id", "x" * 513, "job_id: is longer than 512 characters"),
        ("usr", "ada", "no parameter 'usr'; there are job_id, array_id, user, account, namespace, since, until, limit"),
        ("x" * 900, "", "no parameter 'xxxxx"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(name: str, value: str, why: str) -> None:
    with site(Shelf()) as client:
        answer = client.get("/api/v1/receipts", params={name: value})
    assert (answer.status_code, set(answer.json())) == (422, {"detail"})
    assert why in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 200


def test_a_parameter_given_twice_is_refused_and_events_know_only_theirs() -> None:
    with site(Shelf()) as client:
        twice = client.get("/api/v1/receipts?user=a&user=b")
        assert (twice.status_code, twice.json()["detail"]) == (422, "user is given twice")
        foreign = client.get("/api/v1/events?user=a")
        assert (foreign.status_code, foreign.json()["detail"]) == (422, "no parameter 'user'; there are since, limit")


# -- job records --


def test_a_job_is_found_by_its_name_too_and_shown_under_it() -> None:
    task = Owner("4702", user="eve", array_id="4700", array_task_id="3")
    hung = NodeEvent(at=NOW, kind="hung", uuid="GPU-0", gpu="0", job_id="4702,9", text="spins")
    second = over(owner=replace(task, job_id="4703", array_task_id="4"))
    shelf = Shelf(over(owner=task), second, events=(hung,))
    with site(shelf, snapshot=world((gpu(0),), owner=replace(ADA, array_id="4700", array_task_id="5"))) as client:
        for name, found in (("4700_3", ["4702"]), ("4700_5", ["4711"]), ("4702", ["4702"]), ("4700", []), ("3", [])):
            assert ids(receipts(client, job_id=name)) == found
        assert ids(receipts(client, array_id="4700")) == ["4711", "4702", "4703"]
        (out,) = client.get("/api/v1/jobs").json()["jobs"]
        owner = {name: out["owner"][name] for name in ("job_id", "array_id", "array_task_id", "display_id")}
        assert owner == {"job_id": "4711", "array_id": "4700", "array_task_id": "5", "display_id": "4700_5"}
        for path in ("/jobs/4700_3", "/jobs/4702"):
            answer = client.get(path)
            assert (answer.status_code, "<h1>Job <bdi>4700_3</bdi>" in answer.text) == (200, True)
            assert "<title>Job 4700_3" in answer.text
        assert client.get("/jobs/4700").status_code == 404
        page = client.get("/").text
        for job, shown in (("4711", "4700_5"), ("4702", "4700_3"), ("9", "9")):
            assert f'<a href="/jobs/{job}"><bdi>{shown}</bdi></a>' in page


def test_a_jobs_page_by_name_has_its_older_records_and_those_of_no_other_job() -> None:
    before = over("4702", ago=4300.0, life="0")
    named = over(owner=Owner("4702", array_id="4700", array_task_id="3"))
    reused = over(owner=Owner("9", array_id="4700", array_task_id="3"), ago=90_000.0)
    found = history_api.records_of_job(Shelf(named, before, reused), None, "4700_3")
    assert found == [named, before]


def test_without_a_store_there_are_the_jobs_of_the_snapshot_and_it_says_so() -> None:
    with site(snapshot=world((gpu(0), gpu(1)), meta=PRICED)) as client:
        answer = receipts(client)
        assert (answer.node, answer.host, answer.at, answer.kept, answer.cut) == ("n7", "node-7", NOW, False, False)
        (one,) = answer.receipts
        assert (one.owner.job_id, one.running, one.paid, one.start, one.end) == ("4711", True, 60 * S, NOW - 60, NOW)
        assert sum(one.parts.values()) == one.paid
        assert one.parts["useful"] == 27 * S
        assert one.money == pytest.approx({"EUR": 0.06})
        assert (one.gpus, one.models, one.whole_gpus) == ({"GPU-0": "0"}, ("H100",), 1.0)
        assert ids(receipts(client, user="eve")) == []
        assert ids(receipts(client, since=NOW + 1)) == []
    with site() as client:
        assert receipts(client).receipts[0].money == {}, "GPU-hours are no money"
        assert client.get("/api/v1/events").json() == {
            "node": "node-7", "host": "node-7", "at": NOW, "kept": False, "events": [],
        }  # fmt: skip


def test_a_job_that_has_ended_is_told_until_it_is_forgotten_and_ends_when_it_did() -> None:
    ledger = Ledger()
    held = Allocation(uuid="GPU-0", owner=ADA, start=0, gpus=1)
    advance(ledger, Observation(0, WALL, devices=(gpu(0),), allocations=(held,)))
    advance(ledger, Observation(30 * S, WALL + 30 * S, readings=(Reading("GPU-0", 0, 30 * S, **WORKING),)))
    advance(ledger, Observation(31 * S, WALL + 31 * S, allocations=()))
    advance(ledger, Observation(60 * S, WALL + 60 * S, readings=(Reading("GPU-0", 31 * S, 60 * S, **WORKING),)))
    ended = take_snapshot(ledger, META)
    (one,) = collect_records(None, ended, JobRecordQuery())
    assert (one.running, one.end) == (False, WALL / S + 30), "as far as it is booked"
    assert collect_records(Shelf(), ended, JobRecordQuery()) == [], "what a store is asked for it has"


def test_what_is_kept_and_what_runs_are_told_together_and_nothing_twice() -> None:
    older, newer = over("1", ago=900), over("2", ago=60)
    with site(Shelf(newer, older)) as client:
        answer = receipts(client)
        assert (ids(answer), answer.kept) == (["4711", "2", "1"], True)
        assert answer.receipts[2] == older
        assert ids(receipts(client, limit=2)) == ["4711", "2"]
        assert ids(receipts(client, user="eve")) == ["2", "1"]
        assert ids(receipts(client, account="x", namespace="ns", job_id="1")) == ["1"]
        assert ids(receipts(client, until=NOW - 4000)) == ["1"]
    known = over("4711", running=True, end=NOW, life="b")
    assert [one.life for one in collect_records(Shelf(known), NODE, JobRecordQuery())] == ["b"]
    before = over("4711", life="z", ago=90)
    assert len(collect_records(Shelf(before), NODE, JobRecordQuery())) == 2, (
        "an earlier life does not stand for this one"
    )


def test_an_answer_that_grows_too_large_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(*(over(f"{number}") for number in range(50)))
    monkeypatch.setattr(history_api, "MAX_RESPONSE_BYTES", 5000)
    with site(shelf) as client:
        answer = receipts(client)
        assert answer.cut
        assert 1 < len(answer.receipts) < 20
        assert not receipts(client, limit=2).cut


def test_what_is_over_stays_true_while_nothing_is_sampled() -> None:
    shelf = Shelf(over(), events=(NodeEvent(at=5.0, kind="started"), NodeEvent(at=3.0, kind="stopped")))
    for snapshot, age, at in ((None, 0, 0.0), (NODE, 99 * S, NOW)):
        with site(shelf, snapshot=snapshot, age=age) as client:
            answer = receipts(client, job_id="4700")
            assert (ids(answer), answer.at) == (["4700"], at)
            told = client.get("/api/v1/events", params={"since": 4}).json()
            assert [one["kind"] for one in told["events"]] == ["started"]
            assert client.get("/jobs/4700").status_code == 200


@pytest.mark.parametrize(
    "error", [OSError("node.db: disk I/O error"), sqlite3.OperationalError("node.db: disk I/O error")]
)
def test_a_store_that_cannot_be_read_costs_the_past_alone(error: Exception) -> None:
    with site(Shelf(fails=error)) as client:
        for path in ("/api/v1/receipts", "/api/v1/events", "/jobs/1"):
            answer = client.get(path)
            assert answer.status_code == 503, path
            assert "cannot be read: node.db: disk I/O error" in answer.text
        page = client.get("/")
        assert page.status_code == 200
        assert "The store cannot be read: node.db: disk I/O error." in page.text
        assert "None yet." not in page.text
        assert "active" in page.text


def test_what_a_scrape_was_told_is_covered_and_nothing_else_is() -> None:
    shelf = Shelf()
    with site(shelf) as client:
        for path in ("/", "/api/v1/gpus", "/api/v1/receipts", "/readyz"):
            client.get(path)
        assert shelf.covered == []
        assert 'gpu="1"' in client.get("/metrics").text
        assert shelf.covered == [NODE]
        shelf.covers = False
        refused = client.get("/metrics")
        assert refused.status_code == 503
        assert "no checkpoint has been saved yet" in refused.text
        shelf.in_place = world((gpu(0),))
        assert 'gpu="1"' not in client.get("/metrics").text
    asked = len(shelf.covered)
    with site(shelf, age=99 * S) as client:
        assert client.get("/metrics").status_code == 503
    assert len(shelf.covered) == asked


# -- the node's account --


def account(snapshot: Snapshot) -> AccountsOut:
    return msgspec.json.decode(msgspec.json.encode(accounts_out(snapshot, 0)), type=AccountsOut)


def test_the_account_adds_up_in_time_energy_and_money() -> None:
    told = account(world((gpu(0), gpu(1)), meta=PRICED))
    assert (told.gpus, told.prices) == (2.0, {"EUR": 7.2})
    assert {state: count for state, count in told.states.items() if count} == {"active": 1, "unallocated": 1}
    for one in (told.last_5_minutes, told.last_hour, told.since_start):
        assert one.window.seconds == 120
        assert one.money is not None
        assert sum(one.money["EUR"].values()) == pytest.approx(0.12)
        assert one.money["EUR"]["useful"] == pytest.approx(0.027)
        assert set(one.money["EUR"]) == set(LEAK_NAMES)
    assert told.last_hour.energy_joules is None
    assert told.since_start.energy_joules is not None
    assert sum(told.since_start.energy_joules.values()) == pytest.approx(2 * 60 * 600.0)
    assert told.since_start.window.product == pytest.approx(0.225)


def test_energy_has_its_price_and_its_carbon_on_the_page_and_in_the_api_and_none_where_they_are_not_known() -> None:
    terms = Terms(prices=(Price(3.6, "EUR"),), energy=EnergyTerms(5.0, "CHF"), carbon=CarbonIntensity(400.0))
    priced, kwh = world((gpu(0), gpu(1)), meta=replace(META, terms=terms)), 2 * 60 * 600 / 3.6e6
    told = account(priced)
    assert told.last_hour.energy_money is None
    assert told.last_hour.co2_grams is None
    assert told.since_start.energy_money is not None
    (job,) = jobs_out(priced, 0).jobs
    assert job.energy_money == {"CHF": pytest.approx(5 * kwh / 2)}
    assert told.since_start.co2_grams == pytest.approx(400 * kwh)
    assert job.co2_grams == pytest.approx(200 * kwh)
    assert set(told.since_start.energy_money["CHF"]) == set(LEAK_NAMES)
    assert sum(told.since_start.energy_money["CHF"].values()) == pytest.approx(5 * kwh)
    with site(snapshot=priced) as client:
        page, of_job = words(client.get("/").text), words(client.get("/jobs/4711").text)
    assert "Energy since the start: 20 Wh for CHF 0.10, 22 % useful, 8 g of CO2." in page
    assert "In this hour" not in page
    assert "energy 10 Wh for CHF 0.05, 45 % useful, 4 g of CO2" in of_job
    with site() as client:
        assert "Energy since the start: 20 Wh, 22 % useful." in words(client.get("/").text)
        assert "CO2" not in client.get("/").text + client.get("/jobs/4711").text
    assert account(NODE).since_start.energy_money == {}
    (job,) = jobs_out(NODE, 0).jobs
    assert (job.energy_money, job.co2_grams, account(NODE).since_start.co2_grams) == ({}, None, None)


def test_the_page_and_the_api_have_the_carbon_intensity_of_the_hour_where_it_differs_by_the_hour() -> None:
    hour = int(NODE.wall / 1e9) // 3600
    carbon = CarbonIntensity(400.0, hours=(hour - 1, hour), grams=(90.0, 41.5))
    hourly = world((gpu(0), gpu(1)), meta=replace(META, terms=Terms(carbon=carbon)))
    assert (account(hourly).grams_co2_per_kwh, account(hourly).since_start.co2_grams) == (41.5, None)
    assert account(NODE).grams_co2_per_kwh is None
    with site(snapshot=hourly) as client:
        assert "22 % useful. In this hour: 42 g of CO2 per kWh." in words(client.get("/").text)


def test_where_only_allocated_time_costs_the_money_of_a_window_is_not_guessed() -> None:
    terms = Terms(prices=(Price(3.6, "EUR", basis="allocated"),))
    told = account(world((gpu(0), gpu(1)), meta=replace(META, terms=terms)))
    assert told.last_hour.money is told.last_5_minutes.money is None
    assert told.since_start.money is not None
    assert sum(told.since_start.money["EUR"].values()) == pytest.approx(0.06)
    assert told.since_start.money["EUR"]["idle_allocation"] == 0.0
    assert account(NODE).last_hour.money == account(NODE).since_start.money == {}


def test_a_gpu_that_is_gone_stays_in_the_account_since_the_start() -> None:
    ledger = Ledger()
    advance(ledger, Observation(0, WALL, devices=(gpu(0), gpu(1)), allocations=()))
    readings = tuple(Reading(uuid, 0, 60 * S, **WORKING) for uuid in ("GPU-0", "GPU-1"))
    advance(ledger, Observation(60 * S, WALL + 60 * S, readings=readings))
    advance(ledger, Observation(60 * S + 1, WALL + 60 * S + 1, devices=(gpu(0),)))
    told = account(take_snapshot(ledger, META))
    assert (told.gpus, told.since_start.window.seconds) == (1.0, 120.0)
    assert account(world(())).since_start.window.seconds == 0


# -- one job with several records --


def test_lives_are_added_and_what_holds_is_the_latest() -> None:
    first = over(ago=7200, life="a", gpus={"GPU-1": "1"}, whole_gpus=2.0)
    second = over(ago=0, life="b", running=True, first_work=None, models=("H200",))
    (lives,) = records_by_job([second, first])
    assert [one.life for one in lives] == ["a", "b"]
    job = combine_records(lives)
    assert (job.paid, job.parts["hung"], job.money, job.happened) == (7200 * S, 1440 * S, {"EUR": 7.2}, {"hung": 4})
    assert (job.start, job.end, job.running, job.life) == (first.start, second.end, True, "b")
    assert (job.gpus, job.models) == ({"GPU-1": "1", "GPU-0": "0"}, ("H100", "H200"))
    assert (job.whole_gpus, job.first_work) == (2.0, 12.0)
    assert job.energy == {"useful": 2.4e6, "hung": 1.2e6}
    assert job_window(job).product == pytest.approx(0.5)
    assert [[one.life for one in group] for group in records_by_job([first, over("9"), second])] == [["a", "b"], ["a"]]


def test_a_course_is_what_was_booked_between_samples_and_thinning_loses_none_of_it() -> None:
    samples = tuple(JobSample(NOW - 4200 + at, at, at, at, 0.7 * at, 0.5 * at, 0.0) for at in range(360, 3600, 360))
    parts = {"useful": 1800 * S, "throttled": 720 * S, "hung": 1080 * S}
    drawn = job_timeline([over(parts=parts, samples=samples)])
    assert len(drawn) == 10
    assert drawn[0].bands == pytest.approx((180, 72, 108, 0, 0))
    total = tuple(map(sum, zip(*(one.bands for one in drawn), strict=True)))
    assert total == pytest.approx((1800, 720, 1080, 0, 0))
    fewer = downsample(drawn, 3)
    assert len(fewer) == 3
    assert tuple(map(sum, zip(*(one.bands for one in fewer), strict=True))) == pytest.approx(total)
    assert (fewer[0].start, fewer[-1].end) == (drawn[0].start, drawn[-1].end)
    dark = over(parts={"unobserved": 1800 * S, "idle_allocation": 900 * S, "useful": 900 * S})
    assert job_timeline([dark])[0].bands == pytest.approx((900, 0, 0, 900, 1800))
    gap = job_timeline([over(ago=7200), over(ago=0, life="b")])
    assert gap[1].start - gap[0].end == 3600


# -- texts --


def test_money_hours_and_energy_are_said_as_people_are_billed() -> None:
    assert money({"USD": 1234.5, "EUR": 0.001, "CHF": 2.0}) == "CHF 2.00 + <€0.01 + $1,234"
    assert (money({}), money({"USD": 0.0})) == ("", "$0.00")
    assert [gpu_hours(seconds) for seconds in (0, 1, 5400, 3.6e7)] == ["0.00", "<0.01", "1.50", "10,000"]
    assert [energy(joules) for joules in (3600, 5.4e6, 3.6e9)] == [
        "1 Wh", "1.5 kWh", "1,000 kWh",
    ]  # fmt: skip


def test_a_moment_has_the_date_where_it_is_not_today_and_the_year_where_it_is_long_ago() -> None:
    assert date_time(NOW, now=NOW) == "00:01"
    assert date_time(NOW - 3600, now=NOW) == "31 Dec 23:01"
    assert date_time(NOW - 301 * 86400, now=NOW) == "6 Mar 2025"


@pytest.mark.parametrize("job_id", ["41", "ns/pod", "a b&c?d#e%2F", "../metrics", "a//b", "/x", "./..", "ü", '"><b>'])
def test_a_jobs_address_leads_to_its_page_whatever_it_is_called(job_id: str) -> None:
    path = job_path(job_id)
    assert re.fullmatch(r"/jobs/[\w.%/~-]+", path)
    assert unquote(path) == f"/jobs/{job_id}"
    assert not {".", "..", ""} & set(path.removeprefix("/jobs/").split("/"))
    with site(Shelf(over(job_id))) as client:
        answer = client.get(path)
        assert answer.status_code == 200, answer.text[-300:]
        assert "was allocated and working" in answer.text


# -- pages --


def words(page: str) -> str:
    return " ".join(" ".join(Tags(page).words).replace("\N{NO-BREAK SPACE}", " ").split())


class Fall(HTMLParser):
    """Parse a waterfall's bars: (key, start, width), as shares of the whole."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.key, self.bars = "", list[tuple[str, float, float]]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "li":
            self.key = known.get("data-key", "")
        if tag == "rect" and known.get("height") == "14" and "x" in known:
            self.bars.append((self.key, float(known["x"][:-1]) / 100, float(known["width"][:-1]) / 100))


def test_the_waterfall_steps_down_from_what_was_paid_to_what_was_useful() -> None:
    job = over(parts={"unobserved": 360 * S, "hung": 720 * S, "idle_allocation": 360 * S, "throttled": 360 * S,
                      "startup": 180 * S, "unresolved": 180 * S, "useful": 1440 * S})  # fmt: skip
    with site(Shelf(job)) as client:
        page = client.get("/jobs/4700").text
    bars = Fall(page).bars
    assert [(key, round(begin, 6), round(width, 6)) for key, begin, width in bars] == [
        ("sum-paid", 0.0, 1.0),
        ("leak-unobserved", 0.9, 0.1),
        ("sum-seen", 0.0, 0.9),
        ("leak-idle_allocation", 0.8, 0.1),
        ("sum-allocated-and-working", 0.0, 0.8),
        ("leak-hung", 0.6, 0.2),
        ("leak-startup", 0.55, 0.05),
        ("sum-computing", 0.0, 0.55),
        ("leak-unresolved", 0.5, 0.05),
        ("leak-throttled", 0.4, 0.1),
        ("leak-useful", 0.0, 0.4),
    ]
    told = words(page)
    assert "paid 100 % 1.00 €3.60" in told
    assert "computing 55 % 0.55 €1.98" in told
    assert "hung 20 % 0.20 €0.72 The job makes no progress" in told
    assert "First thing to do: dump stacks on the culprit rank" in told


def test_the_page_has_the_account_the_receipts_and_the_events() -> None:
    events = (
        NodeEvent(at=NOW - 5, kind="hung", gpu="0", job_id="4711,9", text="spinning"),
        NodeEvent(at=NOW - 5, kind="hung", uuid="GPU-1", gpu="1", job_id="4711,9", text="spinning"),
        NodeEvent(at=NOW - 9, kind="zombie_over", gpu="1", text="zombie is over; now active"),
        NodeEvent(at=NOW - 10, kind="started", text="the exporter began to watch"),
    )
    shelf = Shelf(over("1", ago=900), over("2", ago=60), events=events)
    with site(shelf, snapshot=world((gpu(0), gpu(1)), meta=PRICED)) as client:
        page = client.get("/").text
    told = words(page)
    assert "Lost: the equivalent of 1.6 of 2 GPUs, €5.58 of €7.20 per hour." in told
    assert "last hour 50 % 95 % 47 % 22 % 100 % 0.03 €0.12" in told
    assert re.search(r"since the start .* 20 Wh", told)
    rows = re.findall(r'<details class="receipt" data-key="job-(\w+)"', page)
    assert rows == ["2", "1"], "the latest first; what runs is among the jobs"
    assert "1 old eve ended 31 Dec 23:46 after 60 min hung: 12 min" in told.replace("useful: 30 min ", "")
    assert "50 % useful €3.60, 1.00 GPU-hours" in told
    assert 'data-from="/jobs/2"' in page
    assert '<a href="/jobs/4711"><bdi>4711</bdi></a> <small><bdi>pretrain' in page
    assert "00:00 hung GPU 0, 1 4711 9 spinning" in told
    assert "00:00 GPU 1 zombie is over; now active" in told
    assert "00:00 started the exporter began to watch" in told


def test_no_more_receipts_are_shown_than_fit_and_old_events_are_behind_a_click() -> None:
    shelf = Shelf(*(over(f"{number}", ago=number) for number in range(RECEIPTS_SHOWN + 5)))
    with site(shelf) as client:
        assert client.get("/").text.count('<details class="receipt"') == RECEIPTS_SHOWN
    events = (NodeEvent(at=NOW - number, kind="xid", text=f"number {number} of these") for number in range(11))
    with site(Shelf(events=tuple(events))) as client:
        shown = client.get("/").text
    assert shown.index("number 7 of") < shown.index("<details><summary>3 earlier") < shown.index("number 8 of")
    with site(Shelf()) as client:
        assert "None yet." in client.get("/").text
    with site() as client:
        assert "None yet." not in client.get("/").text


def test_the_page_says_where_nothing_is_kept_and_where_nothing_has_ended() -> None:
    with site() as client:
        assert "This node has no store" in client.get("/").text
    with site(Shelf()) as client:
        assert "No job has ended on this node yet." in client.get("/").text


def test_a_jobs_page_has_all_of_its_receipt() -> None:
    progress = TrainingView(
        run="base", step=1200, steps=900, rework_steps=30, epoch=None, world=16, flops=0.0, hardware_flops=0.0,
        tokens=5e6, padding=0.0, samples=0.0, gpu_time=0, phases=(("compute", 60 * S), ("data", 0)), goodput=0.8,
        checkpoints=3, restarts=1, recovery=90 * S, bubble=None, ranks=(("0", 1.0, 0.4), ("7", 1.0, 0.9)), loss=2.5,
        loss_spread=None, events=(), quality=("accuracy", 0.71, 0.1, None), target_at=None,
        parallel=Parallel(),
    )  # fmt: skip
    service = ServingView(
        engine="vllm", tokens=(("generated", 9e5),), preemptions=4.0, running=None, waiting=None, fill=0.5,
        kv_use=0.25, acceptance=None, per_pass=None, latencies=(), bytes_per_second=None, undrafted=0,
    )  # fmt: skip
    owner = Owner("4700", user="eve", name="old", nodes=8, partition="gpu")
    job = over(
        owner=owner, training=progress, service=service, samples=(JobSample(NOW - 2400, 1800, 1800, 1800, 900, 600, 0),)
    )
    with site(Shelf(job)) as client:
        page = client.get("/jobs/4700").text
    told = words(page)
    for said in (
        "Job 4700 old",
        "user eve",
        "Of 1.00 GPU-hours ( €3.60 ) paid here".replace("( ", "(").replace(" )", ")"),
        "energy 500 Wh, 67 % useful",
        "first work after 12 s",
        "2 \N{MULTIPLICATION SIGN} hung",
        "smallest MIG slice 3g.40gb",
        "one node's part of a job of 8 nodes",
        "gpu-efficiency report 4700",
        "hung 20 %, 0.20 GPU-hours, €0.72: dump stacks on the culprit rank, then restart from the checkpoint.",
        "run base step 1,200 steps on this node 900 steps repeated 30 goodput 80 % tokens 5,000,000 checkpoints 3",
        "restarts 1, 2 min to recover loss 2.5 quality accuracy 0.71 time by phase compute 60 s",
        "engine vllm tokens 900,000 generated preemptions 4 latest batch 50 % full KV cache 25 %",
    ):
        assert said in told, said
    assert page.index('data-key="rank-7"') < page.index('data-key="rank-0"'), "the slowest first"
    assert 'aria-label="useful share of what was paid, from first to last: 33' in page
    assert page.count("<path d=") == 5
    assert 'href="/api/v1/receipts?job_id=4700"' in page


def test_a_job_nobody_knows_has_a_page_that_says_so() -> None:
    with site(Shelf()) as client:
        answer = client.get("/jobs/none%3Cscript%3E")
        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("text/html")
        assert "has not held a GPU of this node, or its record is past retention" in answer.text
        assert "none<script>" not in answer.text
        assert client.head("/jobs/none").status_code == 404
    with site(Shelf(over())) as client:
        assert client.get("/jobs/").status_code == 404, "no name is not every name"
    with site() as client:
        assert "this node has no store" in client.get("/jobs/1").text


def test_a_running_job_is_live_until_the_samples_are_old_and_an_ended_one_never() -> None:
    def pulse(page: str) -> str:
        return str(re.findall(r'<p id="pulse"[^>]*>', page)[0])

    with site() as client:
        assert "data-live=1" in pulse(client.get("/jobs/4711").text)
    with site(Shelf(over()), age=99 * S) as client:
        stale = client.get("/jobs/4711").text
        assert "data-live=1" not in pulse(stale)
        assert "Not live. The newest sample is 99 s old" in stale
        assert "Not live" not in client.get("/jobs/4700").text
    with site(Shelf(over())) as client:
        assert "data-live=1" not in pulse(client.get("/jobs/4700").text)
    assert "as of" not in pulse(render_job_page("4700", [over()], now=None, kept=True))


def test_hostile_names_stay_text_in_receipts_and_events() -> None:
    job_id = HOSTILE.replace("\n", "")
    owner = Owner(
        job_id, user=HOSTILE, name=HOSTILE, account=HOSTILE, partition=HOSTILE, namespace=HOSTILE, team=HOSTILE
    )
    job = over(owner=owner, node=HOSTILE, gpus={HOSTILE: HOSTILE}, models=(HOSTILE,), fitting=HOSTILE,
               happened={HOSTILE: 1}, money={HOSTILE: 1.0})  # fmt: skip
    event = NodeEvent(at=NOW, kind=HOSTILE, uuid=HOSTILE, gpu=HOSTILE, job_id=HOSTILE, text=HOSTILE)
    with site(Shelf(job, events=(event,))) as client:
        for path in ("/", job_path(job_id)):
            page = Tags(client.get(path).text)
            assert not {"script", "img"} & page.tags, path
            assert not {"style", "src"} & page.attributes
            assert not {name for name in page.attributes if name.startswith("on")}
            assert any("<script>alert('x')</script>" in word for word in page.words)
            assert "\u202e" not in "".join(page.words)


def test_what_a_training_job_said_is_found_again_in_its_own_statement() -> None:
    """Render a page from the ledger's snapshot without a store."""
    ledger = Ledger()
    held = Allocation(uuid="GPU-0", owner=ADA, start=0, gpus=1)
    advance(ledger, Observation(0, WALL, devices=(gpu(0),), allocations=(held,)))
    reading = Reading("GPU-0", 0, 60 * S, **WORKING)
    report = TrainingReport("4711", 0, 60 * S, gpus=1, run="base", step=1200, steps=30)
    advance(ledger, Observation(60 * S, WALL + 60 * S, readings=(reading,), reports=(report,)))
    with site(snapshot=take_snapshot(ledger, META)) as client:
        assert "run base step 1,200" in words(client.get("/jobs/4711").text)


def test_a_query_accepts_its_own_defaults() -> None:
    """FastAPI 0.115 to 0.149 checks what a request leaves out."""
    for query in (EventQuery, ReceiptQuery):
        defaults = query.model_validate({})
        assert query.model_validate(defaults.model_dump()) == defaults


def test_whether_a_type_is_of_pydantic_1_is_answered_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI 0.128.0 asks like this, newer ones allow for an ImportError."""
    monkeypatch.delitem(sys.modules, "pydantic.v1", raising=False)
    monkeypatch.delattr(pydantic, "v1", raising=False)
    with without_pydantic_v1():
        from pydantic import v1  # noqa: PLC0415

        assert not issubclass(EventQuery, v1.BaseModel)
        assert not hasattr(v1, "Field")  # it is not the real one
    assert "pydantic.v1" not in sys.modules
