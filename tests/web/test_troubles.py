"""The banner of the node's page: what hangs and what is held for nothing, whose it is, since when, and what to do."""

import re
from collections.abc import Callable

import pytest

from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.core.prices import Terms
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.simulate.simulation import simulate
from exporter.web.api import accounts_out, gpus_out, jobs_out
from exporter.web.page import LEAK_COLOURS, PageData, render_node_page

Page = Callable[[str], str]


@pytest.fixture(name="page", scope="module")
def _page() -> Page:
    def page(scenario: str) -> str:
        simulation = simulate(scenario, gpus=4, period_seconds=5.0, wall=1_767_225_600 * SECOND)
        ledger = Ledger()
        for observation in simulation.observations:
            advance(ledger, observation)
        meta = DaemonMetadata(host="gpu-efficiency-x7k2p", simulated=True, terms=Terms(node="n1"))
        snapshot = take_snapshot(ledger, meta)
        return render_node_page(
            PageData(accounts=accounts_out(snapshot, 0), gpus=gpus_out(snapshot, 0), jobs=jobs_out(snapshot, 0))
        )

    return page


def banners(page: str) -> list[str]:
    found = re.findall(r'<p class="banner (?:alarm|warn)" role="status".*?</p>', page, re.DOTALL)
    return [" ".join(re.sub(r"<[^>]+>", "", each).split()) for each in found]


@pytest.mark.slow
def test_in_a_pod_it_has_the_name_of_the_node(page: Page) -> None:
    (heading,) = re.findall("<h1><bdi>(.*?)</bdi>", page("deadlock"))
    title, *_ = re.findall("<title>(.*?)</title>", page("deadlock"))
    assert (heading, title[:2]) == ("n1", "n1")


def test_a_hang_is_named_with_owner_time_culprit_and_what_to_do(page: Page) -> None:
    (said,) = banners(page("deadlock"))
    found = re.match(
        r"Hung since 00:15:00 UTC, 30 min: job 41001 of ada, GPUs (.+) spin without progress;"
        r" GPU (.) \(pid (\d+)\) does not",
        said,
    )
    assert found, said
    assert {*found[1].split(", "), found[2]} == {"0", "1", "2", "3"}
    assert said.endswith(
        " 2.00 GPU-hours so far, 0.33 of them before it was confirmed."
        f" Dump the stacks of that rank (py-spy dump --pid {found[3]}), then restart from the last checkpoint."
    )


def test_a_job_that_hangs_loses_most_to_the_hang_from_its_first_second_on(page: Page) -> None:
    assert re.findall(r"</svg>hung 2\Wh 0\Wmin</td>", page("deadlock"))


@pytest.mark.slow
def test_a_zombie_is_named_with_owner_and_time(page: Page) -> None:
    said = banners(page("zombie_notebook"))
    assert said
    assert all(each.startswith("Zombie: no work since ") and "for nothing" in each for each in said)


def test_nothing_is_said_where_all_work(page: Page) -> None:
    assert banners(page("healthy_training")) == []


def test_gpus_in_trouble_come_first_and_others_in_their_order(page: Page) -> None:
    heading = r'<h3 title="[^"]+">GPU (\d)'
    assert re.findall(heading, page("lost_gpu")) == ["3", "0", "1", "2"]
    assert re.findall(heading, page("healthy_training")) == ["0", "1", "2", "3"]


def test_each_gpu_has_a_strip_of_its_last_hour_and_its_processes(page: Page) -> None:
    rows = page("deadlock").split('<li class="gpu hung"')[1:]
    assert len(rows) == 4
    for row in rows:
        strip = re.search(r'<svg class="strip".*?</svg>', row, re.DOTALL)
        assert strip, row
        *_, (x, width, fill) = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" height="10" fill="([^"]+)"', strip[0])
        assert float(x) + float(width) == pytest.approx(100, abs=0.02)
        assert fill == LEAK_COLOURS["hung"]
        assert float(width) == pytest.approx(100 * 30 / 60, abs=2), "30 minutes, with the 5 before it was confirmed"
        assert "30\N{NO-BREAK SPACE}min</time>" in row
        assert re.search(r"<dt>pid</dt><dd>\d+</dd>", row)
