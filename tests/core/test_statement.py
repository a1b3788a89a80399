"""Job records: built from the ledger's own figures."""

import pytest
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample, build_job_record, job_sample
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, JobView, layers, take_snapshot
from tests.worlds import H100, JOB, RESTING, WORKING, device, first, held, reading, seen

WALL = 1_800_000_000.0


MIG = replace(H100, slices=7, memory_gb=80.0)


def viewed(*signals: dict[str, float], owner: Owner = JOB) -> JobView:
    """A job with 100 seconds of each of these signals."""
    ledger = Ledger()
    advance(ledger, first([device(spec=MIG)], [held(owner=owner)]))
    for n, each in enumerate(signals):
        advance(ledger, seen(100 * n + 100, reading(100 * n, 100 * n + 100, each)))
    return take_snapshot(ledger, DaemonMetadata()).jobs[0]


def stated(job: JobView, **more: object) -> JobRecord:
    """A record of the job, with tracked history."""
    known: dict[str, object] = {
        "node": "n1", "life": "a", "until": WALL, "money": {"USD": 2.0}, "gpus": {"GPU-0": "0"}, "models": ("H100",),
        "whole_gpus": 1.0, "happened": {"hung": 1, "xid": 0}, "samples": (), "simulated": False,
    }  # fmt: skip
    return build_job_record(job, **(known | more))  # type: ignore[arg-type]


def test_it_has_the_ledger_s_figures_to_the_nanosecond() -> None:
    job = viewed(WORKING, RESTING)
    statement = stated(job)
    assert sum(statement.parts.values()) == statement.paid == 200 * SECOND
    assert statement.layers == layers(job.counters.now.parts)
    assert sum(statement.energy.values()) == pytest.approx(600 * 100 + 112 * 100)
    assert (statement.owner, statement.running, statement.happened) == (JOB, True, {"hung": 1})
    assert statement.engine == 95 * SECOND
    assert 0 not in statement.parts.values()
    assert 0 not in statement.energy.values()
    assert (statement.first_work, statement.fitting, statement.unneeded) == (0.0, "", 0)


def test_it_does_not_begin_after_its_end() -> None:
    assert stated(viewed(WORKING), until=-5.0).start == -5.0


def test_a_job_that_has_not_worked_and_would_fit_into_a_slice() -> None:
    small = WORKING | {
        "sm_active": 0.1, "dram_active": 0.05, "tensor_active": 0.01, "memory_used_bytes": 4e9,
        "memory_total_bytes": 80e9,
    }  # fmt: skip
    statement = stated(viewed(*[small] * 40))
    assert statement.fitting == "1g.10gb"
    assert statement.unneeded > 0
    assert stated(viewed(RESTING)).first_work is None


def test_a_sample_has_each_layer_s_seconds() -> None:
    sample = job_sample(viewed(WORKING, RESTING), round(WALL * SECOND))
    told = layers(viewed(WORKING, RESTING).counters.now.parts)
    assert sample.at == WALL
    assert (sample.paid, sample.seen) == (200.0, 200.0)
    assert sample.occupied == pytest.approx(200.0 * (told.gau or 0))
    assert sample.computing == pytest.approx(sample.occupied * (told.ectr or 0))
    assert sample.useful == pytest.approx(sample.computing * (told.emfu or 0))
    assert sample.joules == pytest.approx(600 * 100 + 112 * 100)


def test_a_sample_of_nothing_is_nought() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    advance(ledger, seen(10))
    sample = job_sample(take_snapshot(ledger, DaemonMetadata()).jobs[0], 0)
    assert sample == JobSample(0.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("wanted", "has"),
    [
        (JobRecordQuery(), True),
        (JobRecordQuery(job_id="41"), True),
        (JobRecordQuery(job_id="4"), False),
        (JobRecordQuery(user="ada", account="nlp", namespace="ml"), True),
        (JobRecordQuery(user="bob"), False),
        (JobRecordQuery(account="vision"), False),
        (JobRecordQuery(namespace="default"), False),
        (JobRecordQuery(since=WALL), True),
        (JobRecordQuery(since=WALL + 1), False),
        (JobRecordQuery(until=0.0), True),
        (JobRecordQuery(until=-1.0), False),
    ],
)
def test_which_are_wanted(wanted: JobRecordQuery, has: bool) -> None:
    owner = Owner(job_id="41", user="ada", account="nlp", namespace="ml")
    assert wanted.matches(stated(viewed(WORKING, owner=owner))) is has
