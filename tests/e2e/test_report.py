"""`gpu-efficiency report` against a real Prometheus with two hours of jobs whose figures were added up by hand.

The hours are `tests/report/stored.py`; nothing waits for a clock.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.checkpoint import dump_ledger, load_ledger
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import Owner, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.preview.prometheus import PrometheusClient
from tests.dashboards.past import prometheus
from tests.e2e.running import ROOT, Page
from tests.report.commands import run
from tests.report.stored import BEGIN, END, put, samples
from tests.schedulers.test_receipt_epilog import Node
from tests.worlds import WORKING, S, cut, device, first, held, reading, seen

pytestmark = pytest.mark.e2e
NOW = BEGIN + END * 60 + 17
SEEN = 57_600 + 56_880
"""GPU-seconds of job 41 that daemons counted: n1 all, n2 all but 120 s x 8 less the 240 it had on its return."""
TOLD = 57_600 + 28_320
"""Of them those that reports speak of."""
LIVES = ((0, 30), (32, 60))
"""Of the daemon of a real node, in minutes."""
Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(name="url", scope="module")
def _url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    found = samples()
    for minute, page in real_pages():
        for (name, labels), value in page.samples.items():
            put(found, name, dict(labels) | {"cluster": "real", "instance": "real:19400"}, float(value), minute)
    for minute, page in real_pages("63", remembers=True):
        place = {"cluster": "remembers", "instance": f"10.0.0.{1 + (minute > 30)}:19400"}
        for (name, labels), value in page.samples.items():
            put(found, name, dict(labels) | place, float(value), minute)
    for minute, page in slice_pages():
        for (name, labels), value in page.samples.items():
            put(found, name, dict(labels) | {"cluster": "sliced", "instance": "sliced:19400"}, float(value), minute)
    with prometheus(tmp_path_factory.mktemp("prometheus")) as past:
        past.write(found)
        yield past.url


def real_pages(job: str = "61", *, remembers: bool = False) -> Iterator[tuple[int, Page]]:
    """What a node says each minute of an hour of a job, on two GPUs; its daemon is away for two minutes.

    It begins anew after it, or `remembers`.
    """
    boards = [device("GPU-a", "0"), device("GPU-b", "1")]
    owner = Owner(job, user="ada", array_id="60", array_task_id="1")
    holds = [held(board.uuid, owner, gpus=2) for board in boards]
    frozen = b""
    for begin, end in LIVES:
        ledger, meta = Ledger(), DaemonMetadata(version="1", source="replay", terms=Terms(node="here"))
        if frozen and remembers:
            load_ledger(ledger, frozen)
        advance(ledger, replace(first(boards, holds), at=begin * 60 * S, wall=(BEGIN + begin * 60) * S))
        for minute in range(begin + 1, end + 1):
            at = minute * 60
            told = [reading(at - 60, at, WORKING, board.uuid) for board in boards]
            observed = seen(at, *told, reports=(report(at, job),))
            advance(ledger, replace(observed, wall=(BEGIN + at) * S))
            yield minute, Page(render(take_snapshot(ledger, meta)).decode())
        frozen = dump_ledger(ledger)


def slice_pages() -> Iterator[tuple[int, Page]]:
    """Half an hour of job 64 on a seventh of a GPU, which costs 7 USD an hour."""
    ledger, whole = Ledger(), cut(1)
    meta = DaemonMetadata(version="1", terms=Terms(node="sliced", prices=(Price(7.0, "USD"),)))
    advance(ledger, first(whole, [held(whole[1].uuid, Owner("64", user="ada"))]))
    for minute in range(1, 31):
        at = minute * 60
        observed = seen(at, *(reading(at - 60, at, WORKING, board.uuid) for board in whole))
        advance(ledger, replace(observed, wall=(BEGIN + at) * S))
        yield minute, Page(render(take_snapshot(ledger, meta)).decode())


def report(at: int, job: str = "61") -> TrainingReport:
    """Of the minute before: six steps, a tenth of them data, a hundredth padding."""
    return TrainingReport(
        job_id=job, start=(at - 60) * S, end=at * S, gpus=2, uuids=("GPU-a", "GPU-b"), rank="0", run="r",
        step=at // 10, steps=6, tokens=6000.0, padding=60.0, model_flops=2e16, phases=(("data", 6 * S),), world_size=2,
    )  # fmt: skip


@pytest.fixture(name="said")
def _said(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[int, str, str]]:
    """What `report` says a while after those hours."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return lambda words: run(f"--prometheus {url} --at {NOW} {words}")


@pytest.fixture(name="ask")
def _ask(said: Callable[[str], tuple[int, str, str]]) -> Ask:
    def ask(words: str) -> dict[str, Any]:
        status, out, err = said(f"{words} --json --quiet")
        assert (status, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return ask


def test_whose_it_is_when_it_ran_and_what_was_held(ask: Ask) -> None:
    found = ask("41")
    who = found["who"]
    assert (who["job_id"], who["cluster"], who["name"], who["user"], who["account"]) == (
        "41", "a", "train-41", "ada", "nlp",
    )  # fmt: skip
    assert found["when"] == {"start": BEGIN, "end": BEGIN + 7200, "running": False}
    assert (found["gpus"], found["models"]) == (16, ["NVIDIA H100 80GB HBM3"])
    assert found["gpu_hours"] == pytest.approx(32)
    assert found["seen_gpu_hours"] == pytest.approx(SEEN / 3600)
    assert found["coverage"] == pytest.approx(SEEN / 115_200)
    assert (found["currency"], found["money"]) == ("USD", pytest.approx(64))
    assert found["energy_kwh"] == pytest.approx(0.1 * (120 + 118.5))


def test_an_instance_costs_its_share_of_the_board(ask: Ask) -> None:
    """Half an hour of a seventh of 7 USD an hour."""
    found = ask("64")
    assert found["gpu_hours"] == pytest.approx(0.5 / 7, rel=1e-3)
    assert found["money"] == pytest.approx(0.5, rel=1e-3)


def test_a_daemon_that_counts_on_under_another_address_is_counted_once(ask: Ask) -> None:
    """As where a pod is replaced: an hour of two GPUs, of which nobody saw two minutes."""
    found = ask("63")
    parts = {part["name"]: part["gpu_hours"] for part in found["parts"]}
    assert found["gpu_hours"] == pytest.approx(2)
    assert sum(parts.values()) == pytest.approx(2)
    assert parts["unobserved"] == pytest.approx(4 / 60)
    assert found["truth"]["tokens"] == pytest.approx(58 * 6000)
    assert [(node["name"], node["unseen_gpu_hours"]) for node in found["nodes"]] == [("here", 0.0)]
    assert found["seen_gpu_hours"] == pytest.approx(2)


def test_the_waterfall_adds_up_to_the_time_held_with_the_restart_in_it(ask: Ask) -> None:
    found = ask("41")
    seconds = {part["name"]: part["gpu_hours"] * 3600 for part in found["parts"]}
    # A minute of n1 120 times; of n2 50 times, half of one, and 68 times more.
    assert seconds == {
        "exposed_communication": pytest.approx(14_220), "throttled": pytest.approx(14_220),
        "data_stall": pytest.approx(11_520), "memory_bound": pytest.approx(11_520),
        "checkpoint": pytest.approx(5_760), "idle_allocation": pytest.approx(5_760),
        "useful": pytest.approx(51_480), "unobserved": pytest.approx(720),
    }  # fmt: skip
    assert list(seconds)[0::7] == ["exposed_communication", "unobserved"]
    for part in found["parts"]:
        assert part["money"] == pytest.approx(seconds[part["name"]] / 1800)
        assert part["share"] == pytest.approx(seconds[part["name"]] / 115_200)
    assert found["layers"] == {
        "gau": pytest.approx(108_720 / 114_480), "ectr": pytest.approx(77_220 / 108_720),
        "emfu": pytest.approx(2 / 3), "product": pytest.approx(51_480 / 114_480),
        "floor": pytest.approx(51_480 / 114_480),
    }  # fmt: skip
    assert found["evidence"] == {"measured": pytest.approx(0.5), "reported": pytest.approx(0.5)}


def test_each_node_has_its_part(ask: Ask) -> None:
    first, second = ask("41")["nodes"]
    assert (first["name"], first["gpus"], first["gpu_hours"]) == ("n1", 8, pytest.approx(16))
    assert (first["product"], first["worst"], first["worst_share"]) == (pytest.approx(0.4), "data_stall", 0.2)
    assert (second["name"], second["product"]) == ("n2", pytest.approx(0.5))
    assert second["unseen_gpu_hours"] == pytest.approx(0.2)


def test_what_the_job_reported(ask: Ask) -> None:
    told = ask("41")["truth"]
    tokens, spent = 10 * 57_600 + 11 * 28_320, TOLD / 1800
    run = 7_200 + 3_000 + 4_080
    expected = {
        "told_share": TOLD / SEEN,
        "mfu": (0.4 * 57_600 + 0.3 * 28_320) / TOLD, "hfu": (0.5 * 57_600 + 0.45 * 28_320) / TOLD,
        "gap": (0.1 * 57_600 + 0.15 * 28_320) / TOLD, "goodput": (5_400 + 2_250 + 3_060) / run,
        "progress": 0.95, "steps": 720, "rework_steps": 36, "tokens": tokens, "tokens_per_gpu_second": tokens / TOLD,
        "tokens_per_second": 16 * tokens / TOLD, "samples": 5_760, "samples_per_gpu_second": 5_760 / TOLD,
        "padding": (57_600 + 0.2 * 311_520) / tokens, "checkpoints": 4, "checkpoint_seconds": 180,
        "checkpoint_gpu_hours": 1.6, "checkpoint_money": 3.2, "restarts": 2, "recovery_seconds": 120, "bubble": 0.05,
        "loss": 2.5, "cost_per_step": SEEN / 1800 / 720, "cost_per_token": spent / tokens,
        "cost_per_sample": spent / 5_760, "tokens_per_cost": tokens / spent,
    }  # fmt: skip
    assert {name: told[name] for name in expected} == {name: pytest.approx(value) for name, value in expected.items()}
    assert told["loss_events"] == {"spike": 3}
    # Of n2: 2,250 s of compute before it was down, 45 of each of the last 68 minutes.
    assert told["phases"] == {
        "compute": pytest.approx((4_320 + 2_250 + 3_060) / run), "unreported": pytest.approx((750 + 1_020) / run),
        "communication": pytest.approx(720 / run), "checkpoint": pytest.approx(720 / run),
        "data": pytest.approx(720 / run), "bubble": pytest.approx(360 / run), "rework": pytest.approx(360 / run),
    }  # fmt: skip


def test_quality_and_what_it_cost(ask: Ask) -> None:
    told = ask("41")["truth"]
    ((quality,), target) = told["qualities"], told["target"]
    assert (quality["start"], quality["last"], quality["best"], quality["target"]) == (0.2, 0.7, 0.7, 0.65)
    assert quality["cost_per_unit"] == pytest.approx(SEEN / 1800 / 0.5)
    assert quality["track"] == [[0, 0.2], [1800, 0.4], [3600, 0.6], [5400, 0.7]]
    assert (target["seconds"], target["cost"]) == (5400, pytest.approx(48))


def test_what_failed_and_what_it_cost(ask: Ask) -> None:
    assert ask("41")["failures"] == [
        {"kind": "restart", "times": 2, "leak": "failure_recovery", "gpu_hours": 0, "money": 0},
        {"kind": "rework", "times": 36, "leak": "rework", "gpu_hours": 0, "money": 0},
    ]


def test_what_a_change_would_gain(ask: Ask) -> None:
    fixed, raised = ask("41 --target-emfu 80%")["what_if"]
    # 14,220 of 115,200 GPU-seconds; at 80 % eMFU a sixth of 77,220.
    assert (fixed["of"], fixed["gpu_hours"], fixed["money"]) == (
        "exposed_communication", pytest.approx(3.95), pytest.approx(7.9),
    )  # fmt: skip
    assert (raised["of"], raised["gpu_hours"]) == ("80 %", pytest.approx(77_220 / 6 / 3600))
    assert raised["sooner"] == pytest.approx(77_220 / 6 / 16)
    assert raised["gained_gpus"] == pytest.approx(77_220 * (0.8 - 2 / 3) / 7200)
    sized = ask("42")["what_if"][0]
    assert (sized["of"], sized["gpu_hours"], sized["money"]) == (
        "3g.40gb", pytest.approx(1.5), pytest.approx(3.75),
    )  # fmt: skip


def test_carbon_where_a_node_tells_it(ask: Ask) -> None:
    assert ask("41")["co2_kg"] == pytest.approx(0.4 * 0.1 * (120 + 118.5))
    assert ask("42")["co2_kg"] is None
    told = ask("41")
    assert (told["energy_money"], told["energy_currency"]) == (pytest.approx(0.12 * 0.1 * (120 + 118.5)), "USD")
    assert "energy_money" not in ask("42")


def test_a_job_of_a_simulated_node_is_called_so(ask: Ask) -> None:
    assert [ask(job)["simulated"] for job in ("41", "42")] == [True, False]


def test_ranks_and_activity(ask: Ask) -> None:
    found = ask("41")
    assert [(rank["rank"], rank["node"]) for rank in found["ranks"]] == [
        ("9", "n2"), ("8", "n2"), ("1", "n1"), ("0", "n1"),
    ]  # fmt: skip
    assert found["ranks"][0]["of_median"] == pytest.approx(2.2 / 1.15)
    assert found["activity"] == {"p10": pytest.approx(0.2), "p50": pytest.approx(0.8), "p90": pytest.approx(1.0)}
    assert (found["activity_deviation"], found["ofu"]) == (pytest.approx(0.25), pytest.approx(0.45))


def test_what_could_not_be_seen_is_said(ask: Ask) -> None:
    said = "\n".join(ask("41")["unseen"])
    assert "node n2: 0.20 GPU-hours are unobserved" in said
    assert "began anew in the run: n2" in said
    assert "speaks of 24 GPUs, 16 were seen" in said
    assert "reports speak of 75.1 % of its GPU time" in said


def test_warnings_of_the_prometheus_are_said(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrometheusClient, "remarks", property(lambda _: iter(["no store"])))
    assert ask("41")["unseen"][-1] == "no store"


def test_a_server_and_a_node_that_died(ask: Ask) -> None:
    found = ask("inference/chat")
    assert (found["gpu_hours"], found["money"], found["truth"]) == (pytest.approx(8), None, None)
    assert found["coverage"] == pytest.approx(0.75)
    assert [(node["name"], node["unseen_gpu_hours"]) for node in found["nodes"]] == [
        ("n5", pytest.approx(2)),
        ("n4", 0),
    ]
    served = found["served"]
    assert (served["engines"], served["running"], served["waiting"]) == (["vllm"], 16, 4)
    assert served["batch_fill"] == pytest.approx((0.5 * 2 + 0.25 * 1) / 3)
    assert (served["kv_mean"], served["kv_most"]) == (pytest.approx((0.4 * 2 + 0.97) / 3), 0.97)
    assert served["preemptions"] == 720 + 720
    assert served["tokens"] == {"accepted": 57_600 + 7_200, "drafted": 72_000 + 36_000, "generated": 720_000 + 180_000}
    assert served["acceptance"] == pytest.approx(0.6)
    assert served["tokens_per_pass"] == pytest.approx(900_000 / (360_000 + 180_000))
    assert served["mbu"] == pytest.approx(0.6)
    assert served["generated_per_cost"] == pytest.approx(900_000 / 6)
    assert served["latencies"] == [
        {"kind": "ttft", "percentile": "p99", "last": 1.5, "worst": 1.5},
        {"kind": "itl", "percentile": "p50", "last": 0.03, "worst": 0.03},
    ]


def test_a_job_that_runs_is_reported_as_far_as_it_has_come(ask: Ask) -> None:
    found = ask("42")
    assert found["when"] == {"start": BEGIN, "end": BEGIN + END * 60, "running": True}
    assert (found["gpu_hours"], found["coverage"], found["money"]) == (pytest.approx(12), 1, pytest.approx(30))
    assert found["layers"]["product"] == pytest.approx(0.6)
    assert any("count of FLOPs" in line for line in found["unseen"]) is False


def test_two_jobs_side_by_side(ask: Ask) -> None:
    found = ask("--compare 41 42")
    tokens = 10 * 57_600 + 11 * 28_320
    assert found["of"] == "tokens"
    assert found["per_gpu"] == [pytest.approx(tokens / TOLD), pytest.approx(12)]
    assert found["per_cost"] == [pytest.approx(1800 * tokens / TOLD), pytest.approx(12 * 1440)]
    assert found["scaling"] == pytest.approx(tokens / TOLD / 12)
    grown = {each["name"]: each["second"] - each["first"] for each in found["differences"]}
    assert grown["useful"] == pytest.approx(0.6 - 51_480 / 115_200)
    assert grown["memory_bound"] == pytest.approx(0.1)
    (same,) = found["same"]
    assert (same["name"], same["quality"]) == ("accuracy", 0.6)
    assert same["seconds"] == [3600, 6000]
    assert same["cost"] == [pytest.approx(32), pytest.approx(50 / 3)]


def test_the_last_run_under_an_id_and_the_one_before(ask: Ask, url: str) -> None:
    found = ask("77")
    assert (found["when"]["start"], found["gpu_hours"]) == (BEGIN + 3600, pytest.approx(0.5))
    assert found["unseen"][0].startswith("an earlier run under the same id ended 2026-01-01 00:20 UTC")
    status, out, _ = run(f"77 --prometheus {url} --at 2026-01-01T00:40 --json")
    assert (status, json.loads(out)["gpu_hours"]) == (0, pytest.approx(1 / 3))


def test_what_was_counted_before_each_of_two_restarts_counts_once(ask: Ask) -> None:
    found = ask("55")
    # 10 minutes, 2.5 and 6.5; half a minute twice in nobody's books. The middle one heard no report.
    assert found["seen_gpu_hours"] == pytest.approx(19 / 60)
    assert found["gpu_hours"] == pytest.approx(20 / 60)
    assert found["truth"]["tokens"] == pytest.approx(10 * 60 * (10 + 6.5))
    assert found["truth"]["told_share"] == pytest.approx(16.5 / 19)


def test_the_pages_of_a_real_node_give_what_its_books_hold(ask: Ask) -> None:
    found = ask("61 --match 'cluster=\"real\"'")
    pages = dict(real_pages())
    first_life, second_life = (pages[end] for _, end in LIVES)
    books: dict[str, float] = {}
    for page in (first_life, second_life):
        for leak, seconds in page.by("leak", "job_seconds_total", job_id="61").items():
            books[leak] = books.get(leak, 0.0) + float(seconds)
    books["unobserved"] += 2 * 120
    told = {part["name"]: part["gpu_hours"] * 3600 for part in found["parts"]}
    assert told == {leak: pytest.approx(seconds) for leak, seconds in books.items() if seconds}
    assert (found["gpus"], found["gpu_hours"]) == (2, pytest.approx(2))
    truth = found["truth"]
    assert truth["tokens"] == pytest.approx(sum(float(p.total("job_tokens_total")) for p in (first_life, second_life)))
    assert truth["padding"] == pytest.approx(0.01)
    assert truth["steps"] == pytest.approx(sum(float(p.total("job_steps_total")) for p in (first_life, second_life)))
    assert 0 < truth["mfu"] < 1
    assert truth["phases"]["data"] > 0


def test_in_small_parts_the_answer_is_the_same(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask("--compare 41 42")
    monkeypatch.setattr("exporter.report.query.MAX_SAMPLES_RETURNED", 50)
    monkeypatch.setattr("exporter.report.query.MAX_SAMPLES_READ", 100)
    monkeypatch.setattr("exporter.report.prometheus_run.MAX_SAMPLES_READ", 100)
    assert ask("--compare 41 42") == alike(whole)


def alike(found: Any) -> Any:
    """The same to the last digits."""
    match found:
        case dict():
            return {key: alike(value) for key, value in found.items()}
        case list():
            return [alike(value) for value in found]
        case float():
            return pytest.approx(found)
        case _:
            return found


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("nope", "no job nope is stored there in the 30 days before"),
        ("99", "several clusters (a, b): pick one with --match 'cluster=\"a\"'"),
        ("41 --at 1767200000", "nothing of gpu-efficiency is stored there"),
        ("41 --match cluster=a", "refused a query"),
    ],
)
def test_an_error_is_one_line_and_says_what_to_do(
    said: Callable[[str], tuple[int, str, str]], words: str, hint: str
) -> None:
    status, out, err = said(words)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert hint in err


def test_one_of_two_clusters_can_be_picked(ask: Ask) -> None:
    assert ask("99 --match 'cluster=\"b\"'")["who"]["cluster"] == "b"


def test_the_page_for_a_terminal_fits_and_has_the_figures(said: Callable[[str], tuple[int, str, str]]) -> None:
    status, out, _ = said("41")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    for line in (
        'Job 41 "train-41" of ada in a',
        "2026-01-01 00:00 UTC to 2026-01-01 02:00 UTC (2 h 00 min), ended",
        "32.00 GPU-hours allocated, 64.00 USD, 23.9 kWh, 99.4 % observed",
        "GAU 95.0 % x ECTR 71.0 % x eMFU 66.7 % = 45.0 %",
        "data_stall             ectr   reported       3.20   10.0 %   6.40",
        "  do: overlap with compute; place ranks closer; find the straggler",
        "  checkpoints                     4, 3 min each, 1.60 GPU-hours, 3.20 USD",
        "  cost a token                    5.378e-05 USD",
        "accuracy    0.2   0.7   0.7    0.65       127.2",
        "n2       8      16.00   50.0 %  exposed_communication  24.7 %",
        "of the loss: measured 50.0 %, reported 50.0 %",
    ):
        assert line in out, line


def test_the_page_for_two_jobs_fits(said: Callable[[str], tuple[int, str, str]]) -> None:
    status, out, _ = said("--compare 41 42")
    assert (status, max(map(len, out.splitlines())) <= 80) == (0, True)
    assert "accuracy 0.6: cost      32 USD   16.67 USD" in out
    assert "scaling efficiency 86.1 %" in out


def test_the_page_in_markdown(said: Callable[[str], tuple[int, str, str]]) -> None:
    status, out, _ = said("41 --markdown")
    assert status == 0
    assert "| data\\_stall | ectr | reported | 3.20 | 10.0 % | 6.40 |" in out


def test_a_job_of_seconds_costs_its_seconds(ask: Ask) -> None:
    """One sample of it at work: its counter grows for less than the time between two samples."""
    found = ask("88")
    assert (found["gpus"], found["gpu_hours"]) == (8, pytest.approx(8 * 35 / 3600))
    assert (found["currency"], found["money"]) == ("USD", pytest.approx(2 * 8 * 35 / 3600))
    assert not any("scrape" in note for note in found["unseen"])


def test_a_job_between_two_scrapes_has_gpus_and_costs_its_seconds(ask: Ask) -> None:
    found = ask("89")
    assert (found["gpu_hours"], found["money"]) == (pytest.approx(4 * 35 / 3600), pytest.approx(2 * 4 * 35 / 3600))
    assert found["gpus"] == 3, "35 s of four, in 54 s"
    assert found["unseen"][0] == "no scrape of n12 met the job at work: it held at least as many GPUs as are shown"


def test_a_task_is_found_by_its_name_and_of_two_clusters_neither_is_taken_for_the_other(
    ask: Ask, said: Callable[[str], tuple[int, str, str]]
) -> None:
    for words, job, cluster in (
        ("60_1 --match 'cluster=\"real\"'", "61", "real"),
        ("60_1.batch --match 'cluster=\"remembers\"'", "63", "remembers"),
        ("63", "63", "remembers"),
    ):
        who = ask(words)["who"]
        assert (who["job_id"], who["display_id"], who["cluster"]) == (job, "60_1", cluster)
    status, out, err = said("60_1")
    assert (status, out) == (1, "")
    assert "60_1 has been the name of 2 jobs: " in err
    assert "(61 in real, 63 in remembers)" in err
    assert "there is no job 60 of its own, but 1 task of array 60: 60_1." in said("60")[2]
    assert "no job 60_2 is stored there" in said("60_2")[2]


def test_the_epilog_asks_a_prometheus_with_the_real_command(url: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    report = tmp_path / "report"
    report.write_text(f'#!/bin/sh\nexport NO_PROXY=127.0.0.1\nexec {sys.executable} -m exporter "$@"\n')
    report.chmod(0o755)
    node.settings |= {"command": f"{report}", "flags": f"--prometheus {url} --at {NOW}", "wait": "1"}
    node.environ |= {"SLURM_JOB_ID": "41", "RECORDS": "41|41|", "PYTHONPATH": f"{ROOT}"}
    assert node.write() == ""
    assert node.comment().startswith("gpu-efficiency: job 41 (SIMULATED): 45.0 % useful (GAU 95.0 % x ECTR 71.0 %")
