"""Findings about hangs: what moves acquits at once, what is proven confirms at once, and the culprit is shown."""

from typing import Any

import pytest

from exporter.core.checkpoint import dump_ledger, load_ledger
from exporter.core.exposition import render
from exporter.core.findings import describe_culprit
from exporter.core.ledger import Ledger
from exporter.core.model import HangFinding, Owner, State
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, JobView, take_snapshot
from tests.core.test_detectors import processes_of
from tests.worlds import SPINNING, WORKING, S, device, first, held, reading, seen

UUIDS = ("GPU-0", "GPU-1")
ROTTEN = SPINNING | {"dram_active": None}
"""A spin that a board without profiling fields shows: suspicion, and no more."""
OTHER = Owner(job_id="42", user="bob")


def found(at: float, *, moving: bool = False, stuck: bool = False, **fields: Any) -> HangFinding:
    return HangFinding("41", round(at * S), moving=moving, stuck=stuck, **fields)


NAMED: dict[str, Any] = {
    "rank": "3", "host": "n1", "pid": 77, "gpu": "1", "collective": "AllReduce", "sequence": 12, "stack": "f (a.py:1)",
    "source": "nccl_ras",
}  # fmt: skip


def opened(*owners: Owner) -> Ledger:
    """A job on two GPUs, which `owners` share."""
    ledger = Ledger()
    shared = [held(uuid, owner=owner) for uuid in UUIDS for owner in owners]
    advance(ledger, first([device(uuid) for uuid in UUIDS], [held(uuid) for uuid in UUIDS] + shared))
    return ledger


def spin(
    ledger: Ledger, start: float, end: float, signals: dict[str, Any] | None = None, finding: HangFinding | None = None
) -> Ledger:
    """Both GPUs spin in readings of 5 s; the finding arrives with the first."""
    now = start
    while now < end:
        readings = [reading(now, now + 5, signals or SPINNING, uuid) for uuid in UUIDS]
        advance(ledger, seen(now + 5, *readings, findings=(finding,) if finding and now == start else ()))
        now += 5
    return ledger


def job_of(ledger: Ledger) -> JobView:
    return next(job for job in take_snapshot(ledger, DaemonMetadata()).jobs if job.owner.job_id == "41")


def hung_since(ledger: Ledger) -> float | None:
    gpu = ledger.gpus["GPU-0"]
    return gpu.since / S if gpu.state is State.HUNG else None


def test_a_proven_hang_is_confirmed_within_two_minutes() -> None:
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, stuck=True))
    assert hung_since(ledger) == 60.0
    assert dict(job_of(ledger).states) == {State.HUNG: 2}
    assert take_snapshot(ledger, DaemonMetadata()).detections[0][1:] == (2, 2 * 60 * S)


def test_a_proven_hang_ends_as_any_other() -> None:
    ledger = spin(spin(opened(), 0, 60), 60, 100, finding=found(60, stuck=True))
    assert hung_since(spin(ledger, 100, 140, WORKING)) is None
    assert hung_since(spin(ledger, 140, 735)) is None, "the proof was of the earlier spin"
    assert hung_since(spin(ledger, 735, 750)) == 740.0


@pytest.mark.parametrize("finding", [found(60), found(60, **NAMED)])
def test_a_rank_that_is_waited_for_proves_nothing(finding: HangFinding) -> None:
    ledger = spin(spin(opened(), 0, 60, WORKING), 60, 120)
    assert hung_since(spin(ledger, 120, 660, finding=finding)) is None
    assert hung_since(spin(ledger, 660, 665)) == 660.0


def test_a_proof_needs_a_spin_that_lasts() -> None:
    at_work = spin(spin(opened(), 0, 60, WORKING), 60, 120, WORKING, finding=found(60, stuck=True))
    assert hung_since(spin(at_work, 120, 720)) is None
    just_over = spin(spin(opened(), 0, 60), 60, 65, WORKING, finding=found(60, stuck=True))
    assert hung_since(just_over) is None


def test_what_moves_is_acquitted_at_once() -> None:
    ledger = spin(spin(opened(), 0, 60, WORKING), 60, 350)
    assert job_of(ledger).suspected == 2
    ledger = spin(ledger, 350, 950, finding=found(350, moving=True))
    assert hung_since(ledger) is None
    assert job_of(ledger).spin_since == 350 * S
    assert hung_since(spin(ledger, 950, 960)) == 950.0, "600 s after the last movement"


def test_movement_ends_a_hang() -> None:
    ledger = spin(spin(opened(), 0, 60, WORKING), 60, 680)
    assert hung_since(ledger) == 660.0
    assert hung_since(spin(ledger, 680, 685, finding=found(680, moving=True))) is None


def test_boards_that_can_only_be_suspected_are_confirmed_too() -> None:
    ledger = spin(spin(opened(), 0, 60, ROTTEN), 60, 80, ROTTEN, finding=found(60, stuck=True))
    assert hung_since(ledger) == 65.0, "from the reading after it"
    assert hung_since(spin(ledger, 80, 200, ROTTEN)) == 65.0
    assert hung_since(spin(spin(ledger, 200, 300, WORKING), 300, 900, ROTTEN)) is None


def test_another_job_s_spin_on_a_shared_gpu_is_left_alone() -> None:
    uses = {"41": 0.05, "42": 0.05}
    both = processes_of(SPINNING, uses)
    ledger = spin(spin(opened(OTHER), 0, 60, processes_of(WORKING, uses)), 60, 120, both)
    ledger = spin(ledger, 120, 125, both, found(120, stuck=True))
    assert hung_since(ledger) is None
    ledger = spin(ledger, 125, 665, both, found(125, moving=True))
    assert hung_since(ledger) == 660.0


def test_a_finding_of_one_application_is_about_its_gpus_alone() -> None:
    """Another one of the job runs on the same node."""
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, stuck=True, uuids=("GPU-1",), **NAMED))
    assert (hung_since(ledger), ledger.gpus["GPU-1"].state) == (None, State.HUNG)
    ledger = spin(ledger, 65, 70, finding=found(65, moving=True, uuids=("GPU-0",)))
    assert ledger.gpus["GPU-1"].state is State.HUNG, "what moves is the other one"
    assert job_of(ledger).spin_since == 0
    assert ledger.gpus["GPU-0"].timers.spin_since == 65 * S


def test_a_proven_culprit_is_kept_while_another_application_is_asked() -> None:
    proven = found(60, stuck=True, uuids=("GPU-1",), **NAMED)
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=proven)
    ledger = spin(ledger, 65, 70, finding=found(65, moving=True, uuids=("GPU-0",)))
    assert job_of(ledger).finding == proven
    later = found(70, stuck=True, uuids=("GPU-0",), **NAMED)
    assert job_of(spin(ledger, 70, 75, finding=later)).finding == later, "as well proven"
    own = found(75, uuids=("GPU-0", "GPU-1"), **NAMED)
    assert job_of(spin(ledger, 75, 80, finding=own)).finding == own, "of the same application"
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, stuck=True, **NAMED))
    doubted = found(65, **NAMED)
    assert job_of(spin(ledger, 65, 70, finding=doubted)).finding == doubted, "the job has only one"


def test_a_proven_culprit_is_not_kept_beyond_its_spin() -> None:
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, stuck=True, uuids=("GPU-1",), **NAMED))
    for at in range(65, 105, 5):  # its application works again, the other one spins on
        advance(ledger, seen(at + 5, reading(at, at + 5, SPINNING, "GPU-0"), reading(at, at + 5, WORKING, "GPU-1")))
    assert job_of(ledger).finding is None
    named = found(105, uuids=("GPU-0",), **NAMED)
    assert job_of(spin(ledger, 105, 110, finding=named)).finding == named


def test_a_finding_about_no_known_job_is_dropped() -> None:
    gone = HangFinding("no", 60 * S, moving=False, stuck=True)
    assert hung_since(spin(spin(opened(), 0, 60), 60, 65, finding=gone)) is None


def test_the_culprit_is_shown_while_the_spin_lasts() -> None:
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, stuck=True, **NAMED))
    assert job_of(ledger).finding == found(60, stuck=True, **NAMED)
    shown = render(take_snapshot(ledger, DaemonMetadata())).decode()
    labels = (
        'job_id="41",rank="3",host="n1",pid="77",gpu="1",collective="AllReduce",sequence="12",stack="f (a.py:1)",'
        'source="nccl_ras"'
    )
    assert f"\ngpu_efficiency_job_hang_culprit{{{labels}}} 1\n" in shown
    over = spin(ledger, 65, 105, WORKING)
    assert job_of(over).finding is None
    assert "job_hang_culprit" not in render(take_snapshot(over, DaemonMetadata())).decode()
    assert job_of(spin(over, 105, 400)).finding is None, "another spin"


def test_a_culprit_of_whom_little_is_known_has_empty_labels() -> None:
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, rank="3", source="nccl_ras"))
    labels = 'rank="3",host="",pid="",gpu="",collective="",sequence="",stack="",source="nccl_ras"'
    assert f'job_hang_culprit{{job_id="41",{labels}}} 0\n' in render(take_snapshot(ledger, DaemonMetadata())).decode()


def test_a_finding_that_names_nobody_is_not_shown() -> None:
    ledger = spin(spin(opened(), 0, 60), 60, 65, finding=found(60, stuck=True, source="nccl_ras"))
    assert job_of(ledger).finding is None


def test_a_restart_keeps_the_finding_and_the_proof() -> None:
    ledger = spin(spin(opened(), 0, 60, ROTTEN), 60, 65, ROTTEN, finding=found(60, stuck=True, **NAMED))
    back = Ledger()
    load_ledger(back, dump_ledger(ledger))
    assert back.jobs["41"].finding == ledger.jobs["41"].finding
    assert hung_since(spin(back, 65, 75, ROTTEN)) == 65.0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (NAMED, "rank 3 (host n1, pid 77, GPU 1), in AllReduce number 12; top of its stack: f (a.py:1)"),
        ({"pid": 7}, "rank unknown (pid 7)"),
        ({"rank": "0", "gpu": "0", "sequence": 0}, "rank 0 (GPU 0) number 0"),
        ({"rank": "0", "collective": "Reduce"}, "rank 0, in Reduce"),
    ],
)
def test_a_culprit_in_words(fields: dict[str, Any], text: str) -> None:
    assert describe_culprit(found(60, **fields)) == text
