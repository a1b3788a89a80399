"""Tests the page of a row: every leak with its remedy, and all details of a job or a GPU."""

import re

import pytest

from exporter.core.job_record import JobRecord
from exporter.core.leaks import LEAK_NAMES, LEAKS
from exporter.core.model import Owner
from exporter.top.screen import ViewState, render_screen
from exporter.top.view import FIX_BY_LEAK
from exporter.web.api import ReceiptsOut
from tests.top.nodes import answers, seen, snapshot, view
from tests.top.test_screen import text, typed


@pytest.mark.slow
def test_every_leak_is_shown_with_what_to_do() -> None:
    assert set(FIX_BY_LEAK) | {"useful"} == set(LEAK_NAMES)
    told = answers(snapshot())
    job = told[1]["jobs"][0]
    job["last_5_minutes"].update(seconds=100.0, leaks={leak.name: 1.0 for leak in LEAKS})
    opened = ("job", seen().address, job["owner"]["job_id"])
    shown = text(view(seen(told=told)), kind="jobs", opened=opened, width=160, height=70)
    found = {leak.name for leak in LEAKS if leak.name.replace("_", " ") in shown and leak.fix in shown}
    assert found == {leak.name for leak in LEAKS}


def test_a_jobs_page_says_its_own_word_its_gpus_its_whole_time_and_its_other_nodes() -> None:
    told = answers(snapshot())
    job = told[1]["jobs"][0]
    owner = job["owner"]["job_id"]
    job["training"] = job["training"] or told[1]["jobs"][0]["training"]
    part = JobRecord(
        node="gpu-node-00", life="a", owner=Owner(owner), energy={}, start=0.0, end=1.0, running=True,
        paid=4 * 3600 * 10**9, money={"USD": 12.5},
        parts={"useful": 3600 * 10**9, "hung": 3 * 3600 * 10**9}, happened={"hung": 2},
    )  # fmt: skip
    here = seen(told=told, receipts=ReceiptsOut(receipts=[part]))
    shown = view(here, seen(address="http://b:1"))
    lines = "\n".join(
        line.text
        for line in render_screen(
            ViewState(kind="jobs", opened=("job", here.address, owner)), shown, width=120, height=60
        ).lines
    )
    for words in (
        f"job {owner} on", "training", "step ", "GPUs ", "total ", "on b:1", "4.0 GPU-hours, 12.50 USD, useful 25 %",
        "hung 75 %", "hung 2 times",
    ):  # fmt: skip
        assert words in lines, lines


def test_energy_of_a_job_has_its_price_and_its_carbon_where_they_are_known() -> None:
    told = answers(snapshot())
    job = told[1]["jobs"][0]
    job.update(energy_joules=9e6, energy_money={"CHF": 1250.5}, co2_grams=900.0)
    opened = ("job", seen().address, job["owner"]["job_id"])
    assert "2.5 kWh for 1,250.50 CHF, 900 g of CO2" in text(
        view(seen(told=told)), kind="jobs", opened=opened, width=160
    )
    listed = text(view(seen(told=told)), kind="jobs", width=300)
    assert re.search(r"kWh +FOR ENERGY", listed), listed
    assert re.search(r" 2\.5 +1,250\.50 CHF", listed), listed
    job.update(energy_money={}, co2_grams=None)
    shown = text(view(seen(told=told)), kind="jobs", opened=opened, width=160)
    assert re.search(r"2\.5 kWh *$", shown, re.MULTILINE), shown
    assert "FOR ENERGY" not in text(view(seen(told=told)), kind="jobs", width=300)


def test_a_gpus_page_says_its_signs_its_health_and_who_has_it() -> None:
    told = answers(snapshot())
    gpu = told[0]["gpus"][0]
    gpu.update(hang_suspected=True, hang_signs={"power_low": True, "moving": False})
    gpu["health"].update(last_xid=79, recovery_action=1, ecc_uncorrected=2, row_remap_failed=True,
                         clock_limited_seconds={"thermal": 61.0})  # fmt: skip
    shown = typed("d", shown=view(seen(told=told)), height=60, width=160)
    for words in ("UUID", "Xid 79", "reset this GPU", "replace the board", "clock throttled 61s by thermal",
                  "power low supports it", "moving contradicts it", "held by", gpu["uuid"]):  # fmt: skip
        assert words in shown, shown


def test_a_page_says_which_processes_to_look_at_and_what_the_last_hour_went_to() -> None:
    told = answers(snapshot())
    end = told[0]["node"]["sampled_at"]
    for gpu in told[0]["gpus"]:
        gpu["pids"] = []
    told[0]["gpus"][0].update(
        pids=[4711, 4712],
        hour=[
            {"start": end - 1800, "end": end - 600, "outcome": "useful"},
            {"start": end - 600, "end": end, "outcome": "hung"},
        ],
    )
    shown = view(seen(told=told))
    page = typed("d", shown=shown, height=60, width=92)
    assert "pids       4711, 4712" in page
    assert re.search(r"last hour  hung since 00:15:00 UTC, before useful since 23:55:00 UTC", page), page
    (strip,) = (line for line in page.splitlines() if "1 h ago" in line)
    columns = strip.removeprefix(" 1 h ago ").removesuffix(" now ").rstrip()
    fills = shown.glyphs.fills
    parts = [(" ", 39), (fills["useful"], 26), (fills["ectr"], 13)]
    assert all(abs(columns.count(fill) - count) <= 1 for fill, count in parts), strip
    job = told[0]["gpus"][0]["owners"][0]["job_id"]
    opened = ("job", seen().address, job)
    assert "GPU 0: 4711, 4712" in text(shown, kind="jobs", opened=opened, width=160, height=70)


def test_a_row_that_is_gone_while_its_page_is_open_says_so() -> None:
    assert "no longer reported by the node" in text(opened=("job", "http://nobody", "1"))


@pytest.mark.parametrize(
    ("seconds", "coverage", "words"),
    [
        (0.0, None, "no time yet"),
        (60.0, 0.0, "nothing was observed"),
        (60.0, 0.5, "nothing leaks of the 50 % observed"),
        (60.0, 1.0, "nothing leaks"),
    ],
)
def test_time_that_was_not_observed_is_not_said_to_be_without_leaks(
    seconds: float, coverage: float | None, words: str
) -> None:
    told = answers(snapshot())
    told[0]["node"]["last_5_minutes"] = {"seconds": seconds, "coverage": coverage, "leaks": {"useful": seconds}}
    lines = [line.text for line in render_screen(ViewState(), view(seen(told=told)), width=120, height=60).lines]
    assert any(line.strip() == words for line in lines), lines
