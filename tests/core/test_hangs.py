"""A hang that lasts: since when, on which GPUs, what it has cost so far, and in which words."""

import pytest
from msgspec.structs import replace

from exporter.core.hangs import Hang, HungGpu, current_hang, describe_hang, hang_advice, hang_cost
from exporter.core.ledger import Ledger
from exporter.core.model import HangFinding
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.core.test_crash_loop import crashing
from tests.core.test_states import story
from tests.worlds import JOB, SPINNING, WORKING, S

WALL = 1_000_000 * S
SPINS = HungGpu(gpu="0", spins=True, since=900_000.0, pids=(7,))
WAITED_FOR = HungGpu(gpu="3", spins=False, since=900_000.0, pids=(8, 9, 10, 11, 12))
HANG = Hang(since=900_000.0, count=2, gpus=(SPINS, WAITED_FOR), seconds=7200.0, unconfirmed_seconds=1200.0)


def hang_of(ledger: Ledger, finding: HangFinding | None = None) -> Hang | None:
    return current_hang(JOB.job_id, ledger.gpus.values(), finding, at=ledger.at or 0, wall=WALL)


def test_a_hang_begins_with_the_spin_and_not_with_its_confirmation() -> None:
    """Of 1000 s of spinning, the first 600 are not confirmed."""
    assert hang_of(story([(60, WORKING), (590, SPINNING)])) is None
    found = hang_of(story([(60, WORKING), (1000, SPINNING)]))
    assert found is not None
    assert (found.since, found.count, found.seconds, found.unconfirmed_seconds) == (999_000.0, 1, 1000.0, 600.0)
    assert [(gpu.gpu, gpu.spins, gpu.since) for gpu in found.gpus] == [("0", True, 999_000.0)]
    assert hang_of(story([(60, WORKING), (1000, SPINNING), (60, WORKING)])) is None


def test_the_page_knows_since_when_each_gpu_hangs() -> None:
    snapshot = take_snapshot(story([(60, WORKING), (1000, SPINNING)]), DaemonMetadata())
    assert snapshot.hung_since == {"0": 60.0}
    assert take_snapshot(story([(60, WORKING)]), DaemonMetadata()).hung_since == {}


def test_a_missing_reading_confirms_no_hang_anew() -> None:
    """Its state is a new one after the reading that was rejected, 1000 s after the spin began."""
    found = hang_of(story([(60, WORKING), (1000, SPINNING), (10, SPINNING | {"distrust": "stale"}), (90, SPINNING)]))
    assert found is not None
    assert (found.seconds, found.unconfirmed_seconds) == (1100.0, 600.0)


def test_a_crash_loop_begins_with_the_first_attempt_that_failed_and_does_not_spin() -> None:
    found = hang_of(crashing(6))
    assert found is not None
    assert (found.crash_loop, found.seconds, found.unconfirmed_seconds) == (True, 660.0, 600.0)
    assert describe_hang(found) == "its processes on GPU 0 crash again and again and never get to work"
    assert hang_advice(found) == (
        "Read the log of its latest crash, end the job, and mend the cause before it starts again."
    )


def test_a_rank_that_the_job_names_is_the_one_to_look_at() -> None:
    finding = HangFinding(job_id=JOB.job_id, at=0, moving=False, rank="3", host="n2", pid=77, collective="AllReduce")
    found = hang_of(story([(60, WORKING), (1000, SPINNING)]), finding)
    assert found is not None
    assert describe_hang(found) == ("GPU 0 spins without progress; waits for rank 3 (host n2, pid 77), in AllReduce")
    assert "(py-spy dump --pid 77)" in hang_advice(found)
    assert "(py-spy dump --pid 77 on n2)" in hang_advice(found, node="n1"), "not where the others wait"


@pytest.mark.parametrize(("hang", "text", "advice"), [
    (HANG, "GPU 0 spins without progress; GPU 3 (pid 8, 9, 10, 11, ...) does not, the others wait for it",
     "Dump the stacks of that rank (py-spy dump --pid 8), then restart from the last checkpoint."),
    (replace(HANG, gpus=(SPINS, replace(SPINS, gpu="1"))), "GPUs 0, 1 spin without progress",
     "Dump the stacks of two ranks (py-spy dump --pid 7), then restart from the last checkpoint."),
    (Hang(since=1.0, count=8), "8 GPUs hang",
     "Dump the stacks of two ranks (py-spy dump), then restart from the last checkpoint."),
    (Hang(since=1.0, count=1, crash_loop=True), "its processes on 1 GPU crash again and again and never get to work",
     "Read the log of its latest crash, end the job, and mend the cause before it starts again."),
])  # fmt: skip
def test_a_hang_in_words(hang: Hang, text: str, advice: str) -> None:
    assert (describe_hang(hang), hang_advice(hang)) == (text, advice)


def test_what_it_has_cost_includes_the_time_before_it_was_confirmed() -> None:
    assert hang_cost(2.0, 1 / 3) == "2.00 GPU-hours so far, 0.33 of them before it was confirmed"
    assert hang_cost(0.5, 0.001) == "0.50 GPU-hours so far"
