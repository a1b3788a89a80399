"""A daemon that pushes over OTLP to a real receiver, which goes away and comes back."""

from pathlib import Path

import pytest

from tests.e2e.running import Page, daemon
from tests.otlp.receiver import Receiver
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e


def failed(page: Page) -> int:
    """Return how many pushes the daemon says have failed."""
    return int(page.total("otlp_pushes_total", outcome="failed"))


def test_a_daemon_pushes_what_it_serves(tmp_path: Path) -> None:
    receiver = Receiver()
    with receiver.listening():
        settings = {
            "GPU_EFFICIENCY_OTLP_ENDPOINT": receiver.url,
            "GPU_EFFICIENCY_OTLP_INTERVAL_SECONDS": "1",
            "GPU_EFFICIENCY_OTLP_TIMEOUT_SECONDS": "1",
        }
    with daemon(tmp_path, "demo", **settings) as served:
        served.until(failed, "a push fails, for there is no receiver yet")
        with receiver.listening():
            wait_for(lambda: len(receiver.pushes) > 1, "two pushes")
        down = failed(served.page())
        served.until(lambda page: failed(page) > down, "a push fails while the receiver is gone")
        page = served.page()
        with receiver.listening():
            before = len(receiver.pushes)
            wait_for(lambda: len(receiver.pushes) > before, "a push after the outage")
        push = receiver.pushes[-1]
        pushed = push.samples("gpu_efficiency_")
        sums = {
            name: sum(value for (metric, _), value in pushed.items() if metric == f"gpu_efficiency_{name}")
            for name in ("seconds_total", "paid_seconds_total")
        }
        assert sums["seconds_total"] == pytest.approx(sums["paid_seconds_total"], abs=1e-3)
        assert sums["paid_seconds_total"] >= float(page.total("paid_seconds_total")), "no second of the outage is lost"
        assert push.samples("hw.gpu.")
        assert 1 <= served.program.log().count("takes no metrics") <= 2, "a line for each of the two outages"
