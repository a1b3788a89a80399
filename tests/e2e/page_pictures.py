"""Draws docs/pictures/page*.png: the page of a simulated node with a past, as Debian's Chromium shows it.

    python -m tests.e2e.page_pictures [FOLDER]

Owns what stands in the pictures. The node is the scenario `demo`, frozen at one moment; its past is made of other
scenarios, moved before that moment and given other names. Real books, real statements, no hardware.
"""

import base64
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from fastapi import FastAPI
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample, NodeEvent
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.core.prices import CarbonIntensity, EnergyTerms, Price, Terms
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.job_tracker import JobTracker
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from exporter.web.app import create_app
from exporter.web.server import listen, uvicorn_config
from tests.e2e.chromium import Browser, browser

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
META = DaemonMetadata(
    version="0.1.0", source="simulation", scheduler="simulation", simulated=True, host="gpu-node-00", interval=1.0,
    terms=Terms(prices=(Price(2.5),), energy=EnergyTerms(0.12, "USD"), carbon=CarbonIntensity(380.0)),
)  # fmt: skip
_STORIES = {**SCENARIOS, **LEAK_SCENARIOS, **WATERFALL_SCENARIOS}
_SHOTS = (
    ("page", "/", 884, 800, False),
    ("page-desk-light", "/", 1280, 1400, False),
    ("page-desk-dark", "/", 1280, 1400, True),
    ("page-phone-light", "/", 390, 1500, False),
    ("page-phone-dark", "/", 390, 1500, True),
    ("page-job-desk-light", "/jobs/41009", 1280, 1400, False),
    ("page-job-phone-dark", "/jobs/41009", 390, 2000, True),
)
"""Name, path, width, height and whether it is dark."""
_PAST = (
    ("lost_gpu", "41009", "ada", "pretrain", 35),
    ("failure_recovery", "41007", "barbara", "finetune", 140),
    ("memory_bound", "41006", "edsger", "eval", 300),
    ("hung", "inference/batch-7f9c", "inference", "embed", 420),
    ("rework", "40990", "ada", "pretrain", 1500),
)
"""Scenario, job, user, name, and minutes since its end."""


class Told(Struct):
    """A past that does not change: what a store would say."""

    found: list[JobRecord]
    happened: list[NodeEvent]

    def job_records(self, wanted: JobRecordQuery) -> list[JobRecord]:
        """Those that fit, the newest end first."""
        fitting = [one for one in self.found if wanted.matches(one)]
        return sorted(fitting, key=lambda one: -one.end)[: wanted.limit]

    def events(self, since: float, limit: int) -> list[NodeEvent]:
        """The latest first."""
        return sorted((one for one in self.happened if one.at >= since), key=lambda one: -one.at)[:limit]

    def checkpointed_view(self, snapshot: Snapshot) -> Snapshot:
        """Nothing is written."""
        return snapshot


def played(simulation: Simulation, *, until: int) -> tuple[Snapshot, list[JobRecord], list[NodeEvent]]:
    """The node when `until` nanoseconds of the story are over; statements of all its jobs, and what happened."""
    ledger, memory = Ledger(), JobTracker(node=simulation.host, ledger_id=simulation.scenario, sample_seconds=30.0)
    events: list[NodeEvent] = []
    snapshot = None
    for observation in simulation.observations:
        if observation.at - simulation.start > until:
            break
        advance(ledger, observation)
        snapshot = take_snapshot(ledger, META)
        events += memory.update(snapshot)[0]
    assert snapshot is not None
    return snapshot, memory.all_records(snapshot), events


def moved(statement: JobRecord, seconds: float, **names: str) -> JobRecord:
    """The same at another time, of a job of another name."""
    samples = tuple(JobSample(one.at + seconds, *(getattr(one, name) for name in one.__struct_fields__[1:]))
                    for one in statement.samples)  # fmt: skip
    return replace(
        statement, owner=replace(statement.owner, **names), start=statement.start + seconds,
        end=statement.end + seconds, samples=samples, running=False,
    )  # fmt: skip


def stage() -> tuple[Snapshot, Told]:
    """The node of the pictures, and its past."""
    demo = simulate("demo", stories=_STORIES, duration_seconds=20)
    now, running, events = played(demo, until=demo.live_from - demo.start + 15 * SECOND)
    past = Told([replace(one, running=True) for one in running if _holds(one, now)], events)
    for scenario, job_id, user, name, minutes in _PAST:
        simulation = simulate(scenario, stories=_STORIES, gpus=8, duration_seconds=1500)
        _, statements, happened = played(simulation, until=1500 * SECOND)
        statement = max(statements, key=lambda one: one.paid)
        later = now.wall / SECOND - 60 * minutes - statement.end
        past.found.append(moved(statement, later, job_id=job_id, user=user, name=name, account="research"))
        past.happened += [replace(one, at=one.at + later, job_id=job_id) for one in happened]
    return now, past


def _holds(statement: JobRecord, snapshot: Snapshot) -> bool:
    return any(job.owner.job_id == statement.owner.job_id and job.gpus for job in snapshot.jobs)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address at which the app answers."""
    with listen("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def shot(tab: Browser, address: str, file: Path, *, width: int, high: int, dark: bool) -> None:
    """One picture, from the top; what is below `high` pixels is more of the same."""
    tab.call("Emulation.setScrollbarsHidden", hidden=True)
    tab.open(address, width=width, dark=dark)
    high = min(high, tab.value("document.documentElement.scrollHeight"))
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=high, deviceScaleFactor=1, mobile=width < 500)
    said = tab.call("Page.captureScreenshot", format="png")
    file.write_bytes(base64.b64decode(said["data"]))


def draw(folder: Path) -> None:
    """All pictures."""
    snapshot, past = stage()
    app = create_app(lambda: snapshot, now=lambda: snapshot.at, max_age_seconds=60.0, history=past)
    with TemporaryDirectory() as profile, served(app) as address, browser(Path(profile)) as tab:
        for name, path, width, high, dark in _SHOTS:
            shot(tab, address + path, folder / f"{name}.png", width=width, high=high, dark=dark)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
