"""A job of eight ranks that hangs on a real daemon: page, report and top say so first, and the same."""

import json
import re
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.running import Daemon, command, daemon, environment

pytestmark = pytest.mark.e2e
JOB = "41001"
WAITS = r"GPU 2 \(pid (\d+)\) does not, the others wait for it"


@pytest.fixture(name="hung", scope="module")
def _hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("hung"), "demo", "deadlock", "--preroll", "2400") as served:
        yield served


def printed(*arguments: str) -> str:
    found = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env=environment())
    assert found.returncode == 0, found.stderr
    return " ".join(found.stdout.split())


def plain(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", page).split())


def test_page_report_and_top_say_first_that_it_hangs_and_what_to_do(hung: Daemon) -> None:
    page = plain(httpx.get(hung.url).text)
    whole = plain(httpx.get(f"{hung.url}/jobs/{JOB}").text)
    report = printed("report", JOB, "--node", hung.url)
    markdown = printed("report", JOB, "--node", hung.url, "--markdown")
    top = printed("top", "--url", hung.url, "--once")
    for text in (page, whole, report, markdown, top):
        began = text.index("Hung since ")
        assert all(
            began < text.index(leak) for leak in ("exposed communication", "exposed_communication") if leak in text
        )
        waits = re.search(WAITS, text.replace("\\", ""))
        assert waits, text
        assert f"py-spy dump --pid {waits[1]})" in text.replace("\\", "")
        cost = re.search(r"(\d\.\d\d) GPU-hours so far, (\d\.\d\d) of them before it was confirmed", text)
        assert cost, text
        assert float(cost[1]) > float(cost[2]) == pytest.approx(8 * 300 / 3600, abs=0.03)
    assert "1. hung: " in report
    found = json.loads(printed("report", JOB, "--node", hung.url, "--json"))
    assert found["hang"]["nodes"][0]["gpus"] == 8
    assert found["hang"]["seconds"] == pytest.approx(2400 - 15 * 60, abs=120)
