"""The benchmark of the rules: its fleet is of different nodes, its rows say what the server said."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.fleet import packs
from benchmarks.fleet import site as rules_fleet
from benchmarks.fleet.past import past_of
from benchmarks.fleet.questions import QUESTIONS, Answer, cells
from benchmarks.fleet.rows import Cost, rows, shares, sizes, table, tightest
from benchmarks.fleet.rules import QUICK, measured
from benchmarks.fleet.server import only_in
from benchmarks.fleet.site import SCENARIOS, Site, cluster, named, role
from benchmarks.machine import ROOT
from tests.e2e.running import Page

PAGE = b"""gpu_efficiency_state{uuid="GPU-1",gpu="0",state="active",reason=""} 1
gpu_efficiency_job_info{job_id="41",name="a",user="ada",account="research",team="",partition="gpu"} 1
gpu_efficiency_node_info{node="gpu-node-03",pool=""} 1
"""


def test_a_copy_is_another_node() -> None:
    page = Page(named(PAGE, 3 + 2 * len(SCENARIOS), 1250).decode())
    ((board, _),) = page.rows("state")
    ((job, _),) = page.rows("job_info")
    ((node, _),) = page.rows("node_info")
    assert board["uuid"] == f"GPU-{3 + 2 * len(SCENARIOS):05d}-1"
    assert (job["job_id"], job["user"], job["account"], job["team"]) == ("2-41", "ada-2", "research-2", "team-2")
    assert node["node"] == f"gpu-node-{3 + 2 * len(SCENARIOS):05d}"


def test_most_of_a_fleet_is_calm_and_a_job_of_two_nodes_stays_one() -> None:
    roles = [role(number, 1250) for number in range(1250)]
    assert len(set(roles)) == 1250
    assert sum(SCENARIOS[kind] == "lost_gpu" for kind, _ in roles) == 10
    assert {copy for kind, copy in roles if kind == 0} - {copy for kind, copy in roles if kind == 1} <= {roles[-1][1]}


def test_a_site_s_pages_move_on_and_it_ends_when_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_fleet, "story", lambda kind: [b"%d:%d" % (kind, at) for at in range(2)])

    async def ask() -> list[bytes]:
        site = Site(2)
        server = await asyncio.start_server(site.answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        for name in ("1", "0", "1", "1"):
            writer.write(f"GET /{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        found = []
        for _ in range(4):
            head = await reader.readuntil(b"\r\n\r\n")
            found.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split()[0])))
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        return found

    assert asyncio.run(ask()) == [b"1:0", b"0:0", b"1:1", b"1:1"]


def test_the_cluster_s_page_expects_every_node() -> None:
    page = Page(cluster(3).decode())
    assert page.total("cluster_node_expected_gpus") == 24
    assert page.total("cluster_queue_gpus") == 400


def test_the_past_is_a_day_of_each_series() -> None:
    text = "".join(past_of(2, 86_400 * 10))
    assert text.endswith("# EOF\n")
    assert text.count('node:gpu_efficiency_gpus{node="gpu-node-00001"} ') == 1440
    assert text.count('job:gpu_efficiency_gau:ratio_mean1h{job_id="past-3"} ') == 72


def group(name: str, every: float, *times: float) -> Mapping[str, Any]:
    return {
        "name": name, "interval": every, "evaluationTime": sum(times),
        "rules": [{"name": f"{name}{n}", "evaluationTime": time} for n, time in enumerate(times)],
    }  # fmt: skip


def test_rows_are_of_groups_then_of_the_slowest_rules() -> None:
    looks = [[group("a", 60, 0.001, 0.010), group("b", 240, 0.1)], [group("a", 60, 0.001, 0.030), group("b", 240, 0.1)]]
    found = [(line.what, line.median) for line in rows(looks)]
    assert found == [
        ("Evaluated a: 2 rules every 60 s, wall", "21 ms"), ("Evaluated b: 1 rules every 240 s, wall", "100 ms"),
        ("- b0, wall", "100 ms"), ("- a1, wall", "20 ms"), ("- a0, wall", "1 ms"),
    ]  # fmt: skip


def cost(gpus: int = 10_000, **more: Any) -> Cost:
    looks = [[group("a", 60, 0.3), group("b", 240, 0.6)], [group("a", 60, 0.5), group("b", 240, 0.6)]]
    known: dict[str, Any] = {
        "scraped": 900.0, "recorded": 200.0, "samples": 15.0, "mebibytes": 2048.0, "with_rules": [0.31, 0.32, 0.33],
        "without": 0.3, "looks": looks,
    }  # fmt: skip
    return Cost(gpus=gpus, **(known | more))


def test_the_budget_is_of_what_the_rules_add() -> None:
    here, larger, scraping = shares(cost())
    assert (here.what, here.median, here.spread) == (
        "CPU of all rules, 10,000 GPUs, share of a core", "2.0 %", "1.0 - 3.0",
    )  # fmt: skip
    assert (here.budget, here.met) == ("<= 2.5 %", True)
    assert (larger.median, larger.spread, larger.budget, larger.met) == ("20.0 %", "10.0 - 30.0", "<= 25 %", True)
    assert (scraping.median, scraping.budget) == ("30.0 %", "")
    assert shares(cost(with_rules=[0.31, 0.37]))[0].met is False


def test_a_smaller_fleet_has_a_smaller_budget_and_is_not_extrapolated() -> None:
    found = shares(cost(1000, with_rules=[0.302, 0.302]))
    assert [(line.what, line.budget, line.met) for line in found] == [
        ("CPU of all rules, 1,000 GPUs, share of a core", "<= 0.25 %", True),
        ("CPU of scraping and storing alone, 1,000 GPUs, share of a core", "", None),
    ]


def test_what_it_holds_is_named_by_the_fleet() -> None:
    assert [(line.what, line.median) for line in sizes(cost())] == [
        ("Series scraped, 10,000 GPUs", "900 series"),
        ("Series recorded, 10,000 GPUs", "200 series"),
        ("Samples ingested, with those recorded, 10,000 GPUs", "15 a second"),
        ("Resident memory of Prometheus, 10,000 GPUs", "2,048 MiB"),
    ]


def test_the_tightest_group_is_the_one_that_fills_its_interval_not_the_slowest() -> None:
    name, share = tightest(cost().looks)
    assert name == "a"
    assert share == pytest.approx(0.4 / 60)


def test_the_table_has_a_column_for_each_fleet_and_one_ten_times_the_last() -> None:
    found = table([cost(1000, scraped=90.0), cost()])
    assert found.head == ("", "1,000 GPUs", "10,000 GPUs", "100,000 GPUs, extrapolated")
    lines = {line[0]: line[1:] for line in found.rows}
    assert lines["series scraped"] == ("90", "900", "9,000")
    assert lines["resident memory"] == ("2.0 GiB", "2.0 GiB", "20.0 GiB")
    assert lines["CPU of all rules, of a core"] == ("2.0 %", "2.0 %", "20.0 %")
    assert lines["CPU of scraping and storing, of a core"] == ("30.0 %", "30.0 %", "300.0 %")
    assert lines["group that takes most of its interval"] == ("a: 0.7 %", "a: 0.7 %", "a: 6.7 %")


def test_questions_are_asked_of_recorded_series_and_of_raw_ones() -> None:
    assert all(":gpu_efficiency_" in each.recorded for each in QUESTIONS)
    assert all("_total" in each.raw and "[5m]" in each.raw and ":" not in each.raw for each in QUESTIONS)
    assert len({each.asks for each in QUESTIONS}) == 5
    assert cells({"what": (Answer(1.25, 40), Answer(300.0, 80_000))}) == [
        ("what", "1.2", "40", "300.0", "80,000", "2,000")
    ]


def test_clocks_are_right_whenever_a_page_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fleet.site.time.time", lambda: 1700000000.25)
    page = named(b"a 1\ngpu_efficiency_observation_timestamp_seconds 12\nb 2\n", 0, 125)
    assert page == b"a 1\ngpu_efficiency_observation_timestamp_seconds 1700000000.250\nb 2\n"


@pytest.mark.benchmark
def test_a_small_fleet_is_scraped_and_every_rule_is_evaluated() -> None:
    found = measured(QUICK)
    told = {line.what: line.median for line in found.rows}
    assert any(what.startswith("Evaluated gpu-efficiency:") for what in told)
    assert int(told["Series recorded, 96 GPUs"].split()[0].replace(",", "")) > 1000
    assert len(found.tables[1].rows) == len(QUESTIONS)
    assert found.curves["gpus"] == [96]


def test_groups_take_turns_as_their_intervals_have_it(tmp_path: Path) -> None:
    named = {"name": "a", "rules": [{"record": "x:y:z", "expr": "vector(1)"}, {"alert": "A", "expr": "up == 0"}]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"groups": [named, named | {"name": "b", "interval": "1m30s"}]}))
    first, second = packs.groups(tmp_path)
    assert (first.interval, second.interval, first.expressions) == (60, 90, ("vector(1)", "up == 0"))
    assert packs.turns([first, second])[:5] == [0, 1, 0, 1, 0]
    assert [packs.turns([first, second]).count(number) for number in (0, 1)] == [20, 13]


def test_what_only_another_pack_records_is_recorded_too(tmp_path: Path) -> None:
    known = {"record": "cluster:gpu_efficiency_owned:gpus", "expr": "1"}
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "a", "rules": [known, {"record": "other", "expr": "2"}]}]})
    )
    assert only_in([tmp_path, ROOT / "alerts"]) == [{"record": "other", "expr": "2"}]


@pytest.mark.benchmark
def test_packs_are_compared_over_one_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert packs.main(["alerts", "--nodes", "12", "--rounds", "1"]) == 0
    first, *groups = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"alerts: \d+\.\d % of a core \(\d+\.\d\)", first)
    assert {line.split()[2] for line in groups} == {f"{rules.name}," for rules in packs.groups(Path("alerts"))}
