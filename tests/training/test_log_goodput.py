"""From a followed log to the job's goodput: whatever a log prints how often, no training between two lines is lost."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from exporter.config import FollowSettings
from exporter.core.model import SECOND, TrainingReport
from exporter.training.inbox import Inbox
from exporter.training.logs.watcher import LogWatcher
from exporter.training.message import LoggedMessage
from exporter.training.receiver import ReportReceiver
from exporter.workloads import WorkloadProcess
from tests.core.test_progress import heard, shows, value
from tests.training import follow_logs as logs
from tests.worlds import JOB

STEP_SECONDS = 2
LOGGING_STEPS = 10
TOTAL = 100
CLEARED = "\r" + " " * 10 + "\r"
"""tqdm clears its bar before it writes a line, and redraws it below."""


class FollowedJob:
    """A job whose log the daemon reads once a second, from before its first line on; a `LogFollower`."""

    def __init__(self, folder: Path) -> None:
        self.path, self.now, self.reports = folder / f"{JOB.job_id}.log", 0, list[TrainingReport]()
        self.process = WorkloadProcess(os.getpid(), JOB.job_id, ("GPU-0",), "0")
        self._watcher = LogWatcher((FollowSettings(path=f"{folder}/{{job_id}}.log"),))
        self.receiver = ReportReceiver(Inbox(per_second=10.0, processes=10), proc=Path("/proc"), followers=self)
        self.read_until(10)

    def poll(self, processes: Sequence[WorkloadProcess]) -> tuple[LoggedMessage, ...]:
        return tuple(self._watcher.poll(self.now, wall=0, processes=processes))

    def faults(self) -> tuple[()]:
        return ()

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._watcher.close()

    def read_until(self, second: int) -> None:
        """Read once a second."""
        for now in range(self.now // SECOND, second):
            self.now = (now + 1) * SECOND
            self.reports += self.receiver.poll(self.now, [self.process], lambda _: {}).reports

    def write(self, text: str, *, at: int) -> None:
        """Write at that second."""
        self.read_until(at - 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        self.read_until(at)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FollowedJob]:
    followed = FollowedJob(tmp_path)
    yield followed
    followed.receiver.close()


def trainer_lines(step: int) -> str:
    """What the Trainer writes after a step, with its bar."""
    bar = logs.bar(step, TOTAL)
    loss = f"{CLEARED}{logs.trainer(loss=2.0, epoch=step / TOTAL)}\n{bar}"
    return bar + (loss if step and step % LOGGING_STEPS == 0 else "")


def test_a_trainer_that_prints_its_loss_every_ten_steps_has_the_steps_between(job: FollowedJob) -> None:
    began = 20
    for step in range(TOTAL + 1):
        job.write(trainer_lines(step), at=began + step * STEP_SECONDS)
    ledger = heard(*job.reports, gpus=1)
    seconds = TOTAL * STEP_SECONDS
    assert value(ledger, "job_steps_total") == TOTAL
    # A bar is a line only when it is redrawn: the first step is read when the second one is.
    assert shows(ledger, "job_run_seconds_total")['phase="compute"'] == pytest.approx(seconds, abs=STEP_SECONDS)
    assert value(ledger, "job_goodput_ratio") == pytest.approx(seconds / (began + seconds), abs=0.02)
    assert sum(report.end - report.start for report in job.reports) == pytest.approx(
        seconds * SECOND, abs=STEP_SECONDS * SECOND
    )


def test_a_loss_without_steps_is_no_time_without_progress(job: FollowedJob) -> None:
    """As of a Trainer without its bar: how many steps it made is not known, so there is no goodput instead of 0."""
    for step in range(LOGGING_STEPS, TOTAL, LOGGING_STEPS):
        job.write(f"{logs.trainer(loss=2.0, epoch=step / TOTAL)}\n", at=20 + step * STEP_SECONDS)
    ledger = heard(*job.reports, gpus=1)
    assert value(ledger, "job_loss") == 2.0
    assert value(ledger, "job_goodput_ratio") is None
    assert set(shows(ledger, "job_run_seconds_total").values()) <= {0.0}


def test_a_validation_between_two_lines_takes_nothing_from_the_steps_around_it(job: FollowedJob) -> None:
    """Lines every ten steps of 2 s; after the fifteenth a validation of 15 s, whose loss is a message of its own."""
    validated = "validate step: 15  loss:  5.1234  memory: 49.66GiB(52.28%)  tps: 9,000"
    job.write(f"{logs.titan(10, tps=1, stamp='2025-06-16 22:30:20,000')}\n", at=20)
    job.write(f"{logs.stamped(validated, '2025-06-16 22:30:45,000')}\n", at=45)
    job.write(f"{logs.titan(20, tps=1, stamp='2025-06-16 22:30:55,000')}\n", at=55)
    ledger = heard(*job.reports, gpus=1)
    (steps,) = [report for report in job.reports if report.step == 20]
    assert (steps.end - steps.start, steps.steps) == (20 * SECOND, 10)
    assert shows(ledger, "job_run_seconds_total")['phase="compute"'] == 20.0
