"""The benchmark of the rules: its fleet is of different nodes, its rows say what the server said."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import rules_fleet
from benchmarks.rules import past_of, rows, rules, shares
from benchmarks.rules_fleet import SCENARIOS, Site, cluster, named, role
from tests.e2e.running import Page

PAGE = b"""gpu_efficiency_state{uuid="GPU-1",gpu="0",state="active",reason=""} 1
gpu_efficiency_job_info{job_id="41",name="a",user="ada",account="research",team="",partition="gpu"} 1
gpu_efficiency_node_info{node="gpu-node-03",pool=""} 1
"""


def test_a_copy_is_another_node() -> None:
    page = Page(named(PAGE, 3 + 2 * len(SCENARIOS)).decode())
    ((board, _),) = page.rows("state")
    ((job, _),) = page.rows("job_info")
    ((node, _),) = page.rows("node_info")
    assert board["uuid"] == f"GPU-{3 + 2 * len(SCENARIOS):05d}-1"
    assert (job["job_id"], job["user"], job["account"], job["team"]) == ("2-41", "ada-2", "research-2", "team-2")
    assert node["node"] == f"gpu-node-{3 + 2 * len(SCENARIOS):05d}"


def test_most_of_a_fleet_is_calm_and_a_job_of_two_nodes_stays_one() -> None:
    roles = [role(number) for number in range(1250)]
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
    assert text.count('job:gpu_efficiency_gau:ratio_mean1h{job_id="past-3"} ') == 360


def group(name: str, every: float, *times: float) -> Mapping[str, Any]:
    return {
        "name": name, "interval": every, "evaluationTime": sum(times),
        "rules": [{"name": f"{name}{n}", "evaluationTime": time} for n, time in enumerate(times)],
    }  # fmt: skip


def test_rows_are_of_groups_then_of_the_slowest_rules() -> None:
    looks = [[group("a", 60, 0.001, 0.010), group("b", 240, 0.1)], [group("a", 60, 0.001, 0.030), group("b", 240, 0.1)]]
    found = [(line.what, line.median) for line in rows(looks)]
    assert found == [
        ("Group a: 2 rules every 60 s, wall", "21 ms"), ("Group b: 1 rules every 240 s, wall", "100 ms"),
        ("- b0, wall", "100 ms"), ("- a1, wall", "20 ms"), ("- a0, wall", "1 ms"),
    ]  # fmt: skip


def test_the_budget_is_of_what_the_rules_add() -> None:
    here, larger, scraping = shares([0.31, 0.32, 0.33], 0.3, 10_000)
    assert (here.median, here.budget, here.met) == ("2.0 %", "<= 2.5 %", True)
    assert (larger.median, larger.budget, larger.met) == ("20.0 %", "<= 25 %", True)
    assert (scraping.median, scraping.budget) == ("30.0 %", "")
    assert shares([0.34], 0.3, 10_000)[0].met is False


@pytest.mark.e2e
def test_a_small_fleet_is_scraped_and_every_rule_is_evaluated() -> None:
    found = {line.what: line.median for line in rules(quick=True)}
    assert any(what.startswith("Group gpu-efficiency:") for what in found)
    assert int(found["Series recorded"].split()[0].replace(",", "")) > 1000
