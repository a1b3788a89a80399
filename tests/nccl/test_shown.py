"""Where the culprit of a hang is shown: the JSON API, the page, `top` and the node's events."""

from exporter.cli.serve import _open_listeners
from exporter.clock import SystemClock
from exporter.config import Config, HangSettings, ReportsSettings
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, HangFinding
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.job_tracker import JobTracker
from exporter.nccl.investigator import HangInvestigator, LatestSnapshot
from exporter.web.api import CulpritOut, jobs_out
from exporter.web.page import render_node_page
from tests.test_http import view_of
from tests.top.nodes import answers, view
from tests.top.nodes import seen as polled_node
from tests.top.test_screen import text
from tests.worlds import SPINNING, device, first, held, reading, seen

CULPRIT = HangFinding(
    "41", 60 * SECOND, moving=False, stuck=True, rank="3", host="n<1>", pid=77, gpu="1", collective="AllReduce",
    sequence=12, stack="save (a.py:1)", source="nccl_ras",
)  # fmt: skip
WORDS = "rank 3 (host n<1>, pid 77, GPU 1), in AllReduce number 12; top of its stack: save (a.py:1)"


def hanging(finding: HangFinding, *, events: list[str] | None = None) -> Snapshot:
    """A job on one GPU that has spun for 65 seconds; the finding came after 60."""
    ledger, tracker = Ledger(), JobTracker(node="n", ledger_id="l")
    advance(ledger, first([device()], [held()]))
    for at in range(0, 70, 5):
        findings = (finding,) if at == 60 else ()
        advance(ledger, seen(at + 5, reading(at, at + 5, SPINNING), findings=findings))
        found, _ = tracker.update(take_snapshot(ledger, DaemonMetadata()))
        if events is not None:
            events += [f"{event.kind}: {event.text}" for event in found]
    return take_snapshot(ledger, DaemonMetadata())


def test_the_json_api_has_every_field() -> None:
    (job,) = jobs_out(hanging(CULPRIT), 0).jobs
    assert job.hang_culprit == CulpritOut(
        text=WORDS, stuck=True, rank="3", host="n<1>", pid=77, gpu="1", collective="AllReduce", sequence=12,
        stack="save (a.py:1)", source="nccl_ras",
    )  # fmt: skip


def test_the_page_names_the_culprit_and_escapes_it() -> None:
    shown = render_node_page(view_of(hanging(CULPRIT), live=True))
    assert "hangs, waits for rank 3 (host n&lt;1&gt;, pid 77" in shown
    waiting = HangFinding("41", 60 * SECOND, moving=False, rank="3")
    assert "may hang, waits for rank 3</small>" in render_node_page(view_of(hanging(waiting), live=True))


def test_top_names_the_culprit_on_the_page_of_the_job() -> None:
    told = answers(hanging(CULPRIT))
    node = polled_node(told=told)
    shown = text(view(node), kind="jobs", opened=("job", node.address, "41"), width=160, height=60)
    assert f"waits for {WORDS}" in " ".join(shown.split())


def test_the_event_of_the_hang_names_the_culprit() -> None:
    events: list[str] = []
    hanging(CULPRIT, events=events)
    assert events == [f"hung: spinning; its job waits for {WORDS}"]


# The daemon.


def test_the_daemon_asks_unless_it_is_disabled() -> None:
    for enabled in (True, False):
        config = Config(reports=ReportsSettings(socket=""), hangs=HangSettings(enabled=enabled))
        listeners = _open_listeners(config, SystemClock(), LatestSnapshot())
        assert any(isinstance(listener, HangInvestigator) for listener in listeners) is enabled
        for listener in listeners:
            listener.close()
