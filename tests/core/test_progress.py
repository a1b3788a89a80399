"""Reported training progress and its series; every figure is calculated by hand."""

from itertools import count
from math import nan

import pytest
from msgspec.structs import replace

from exporter.core.ledger import Ledger
from exporter.core.model import Allocation, Owner, Parallel, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.progress import LOSS_EVENTS
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.core.test_exposition import lines
from tests.core.test_told import PEAK, said
from tests.worlds import H100, JOB, WORKING, S, device, first, held, reading, seen


def heard(*reports: TrainingReport, gpus: int = 2, policy: Policy | None = None, owner: Owner = JOB) -> Ledger:
    """A job on `gpus` GPUs of one node, which sends all reports at the end."""
    boards = [device(f"GPU-{n}", f"{n}") for n in range(gpus)]
    ledger = Ledger(policy)
    advance(ledger, first(boards, [held(b.uuid, owner, gpus=gpus) for b in boards]))
    end = max(report.end for report in reports) // S + 1
    advance(ledger, replace(seen(end, *(reading(0, end, uuid=b.uuid) for b in boards)), reports=reports))
    assert ledger.refused["report"] == 0
    return ledger


def shows(ledger: Ledger, name: str) -> dict[str, float]:
    """Values of a series of the job, by its labels other than the job ID."""
    found = {}
    for line in lines(take_snapshot(ledger, DaemonMetadata()), name):
        labels, value = line.rpartition(" ")[::2]
        found[labels.removeprefix(name).replace('{job_id="41"', "").strip(",}")] = float(value)
    return found


def value(ledger: Ledger, name: str) -> float | None:
    return shows(ledger, name).get("")


def test_the_share_of_this_node() -> None:
    """A job of 8 GPUs, 2 of them on this node, whose rank 0 reports for all: this node has a quarter of everything."""
    told = said(0, 10, gpus=8, world_size=8, tokens=800.0, padding=80.0, samples=8.0, model_flops=0.4 * 8 * PEAK * 10)
    ledger = heard(told)
    assert value(ledger, "job_tokens_total") == 200.0
    assert value(ledger, "job_padding_tokens_total") == 20.0
    assert value(ledger, "job_samples_total") == 2.0
    assert value(ledger, "job_model_flops_total") == pytest.approx(0.4 * 2 * PEAK * 10)
    assert value(ledger, "job_reported_gpu_seconds_total") == 20.0
    assert value(ledger, "job_world_size") == 8
    assert value(ledger, "job_reported_mfu_ratio") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("more", "hfu"),
    [({}, 0.3), ({"recompute": "full"}, 0.4), ({"hardware_flops": 0.36 * 2 * PEAK * 10}, 0.36)],
)
def test_hardware_flops_are_told_or_follow_from_full_recomputation(more: dict[str, object], hfu: float) -> None:
    ledger = heard(said(0, 10, gpus=2, model_flops=0.3 * 2 * PEAK * 10, **more))
    assert value(ledger, "job_reported_hfu_ratio") == pytest.approx(hfu)


def test_without_flops_there_is_no_utilisation() -> None:
    ledger = heard(said(0, 10, step=3, steps=3))
    assert (value(ledger, "job_reported_mfu_ratio"), value(ledger, "job_reported_hfu_ratio")) == (None, None)


def test_every_rank_counts_its_own_tokens_and_the_lowest_the_steps() -> None:
    """Two ranks with a GPU each, 30 tokens apiece; both report the same step, which counts once."""
    ranks = [said(0, 2, rank=f"{n}", uuids=(f"GPU-{n}",), tokens=30.0, step=1, steps=1) for n in (0, 1)]
    ledger = heard(*ranks)
    assert value(ledger, "job_tokens_total") == 60.0
    assert value(ledger, "job_steps_total") == 1
    assert value(ledger, "job_reported_gpu_seconds_total") == 4.0


def test_who_takes_over_does_not_tell_the_same_again() -> None:
    """After a daemon restart the ranks report the same ten steps in any order."""
    ranks = [said(0, 2, rank=f"{n}", uuids=(f"GPU-{n}",), step=100, steps=10, checkpoints=1) for n in (1, 0)]
    ledger = heard(*ranks, said(2, 4, rank="0", uuids=("GPU-0",), step=110, steps=10))
    assert (value(ledger, "job_steps_total"), value(ledger, "job_rework_steps_total")) == (20, 0)
    assert value(ledger, "job_checkpoints_total") == 1
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 0
    assert sum(shows(ledger, "job_run_seconds_total").values()) == 4.0
    assert value(ledger, "job_reported_gpu_seconds_total") == 6.0


def test_when_the_lowest_rank_falls_silent_another_speaks() -> None:
    first_rank = said(0, 2, rank="0", step=1, steps=1)
    others = [said(at, at + 2, rank="1", step=at // 2 + 1, steps=1) for at in range(0, 80, 2)]
    ledger = heard(first_rank, *others)
    assert value(ledger, "job_step") == 40
    assert value(ledger, "job_steps_total") == 1 + 9  # the nine that ended over a minute after rank 0's report


@pytest.mark.parametrize("rank", ["0", ""])
def test_of_processes_with_the_same_rank_one_speaks(rank: str) -> None:
    """The first, whose GPUs are not known at once; when it falls silent, the other."""

    def told(end: float, step: int, *uuids: str) -> TrainingReport:
        return said(end - 2, end, rank=rank, uuids=uuids, step=step, steps=1)

    both = [each for n in (2, 3) for each in (told(2 * n, n, "GPU-0"), told(2 * n, n, "GPU-1"))]
    ledger = heard(told(2, 1), *both)
    assert (value(ledger, "job_steps_total"), value(ledger, "job_rework_steps_total")) == (3, 0)
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 0
    later = heard(told(2, 1), *both, told(66, 4, "GPU-1"), told(68, 5, "GPU-1"))
    assert (value(later, "job_step"), value(later, "job_steps_total")) == (5, 4)


def test_wall_time_by_phase() -> None:
    """Ten seconds: 1 loading, 2 communicating, 3 saving, the rest computing; then 5 unreported, then 2 evaluating."""
    ledger = heard(
        said(0, 10, step=2, steps=2, phases={"data": 1.0, "communication": 2.0, "checkpoint": 3.0}, checkpoints=1),
        said(15, 17, phases={"evaluation": 2.0}, epoch=0.5),
    )
    found = {name: spent for name, spent in shows(ledger, "job_run_seconds_total").items() if spent}
    assert found == {
        'phase="data"': 1.0, 'phase="communication"': 2.0, 'phase="checkpoint"': 3.0, 'phase="compute"': 4.0,
        'phase="unreported"': 5.0, 'phase="evaluation"': 2.0,
    }  # fmt: skip
    assert value(ledger, "job_goodput_ratio") == pytest.approx(6 / 17)
    assert value(ledger, "job_checkpoints_total") == 1
    assert value(ledger, "job_epoch") == 0.5
    assert value(ledger, "job_progress_ratio") == 1.0


def test_the_bubble_of_a_schedule_is_taken_from_communication_then_from_computing() -> None:
    """8 s of steps at 25 %: 2 s, of which 1.5 were reported as communication."""
    told = said(0, 10, step=2, steps=2, bubble=0.25, phases={"data": 2.0, "communication": 1.5})
    ledger = heard(told)
    found = shows(ledger, "job_run_seconds_total")
    assert (found['phase="bubble"'], found['phase="communication"'], found['phase="compute"']) == (2.0, 0.0, 6.0)
    assert value(ledger, "job_bubble_ratio") == pytest.approx(0.25)


def test_a_bubble_that_is_told_stands() -> None:
    ledger = heard(said(0, 10, step=2, steps=2, phases={"bubble": 1.0, "communication": 1.0}))
    assert value(ledger, "job_bubble_ratio") == pytest.approx(0.1)
    assert value(heard(said(0, 10, step=2, steps=2)), "job_bubble_ratio") is None


def run(*reports: TrainingReport) -> list[TrainingReport]:
    return [replace(report, run="base") for report in reports]


def test_a_rollback_costs_steps_and_time() -> None:
    """Steps 1 - 10 in 10 s, a crash; after 5 s it resumes from step 6 (restored in 2 s), and runs 7 - 12 in 6 s.

    Steps 7 to 10, 4 s, are repeated. From the end of step 10 to that of step 11 it was 5 + 4 + 1 s.
    """
    ledger = heard(
        *run(
            said(0, 10, step=10, steps=10, phases={}),
            said(13, 15, step=6, restart=True, phases={"restore": 2.0}),
            said(15, 18, step=9, steps=3),
            said(18, 19, step=10, steps=1),
            said(19, 21, step=12, steps=2),
        )
    )
    assert value(ledger, "job_steps_total") == 16
    assert value(ledger, "job_rework_steps_total") == 4
    assert value(ledger, "job_progress_ratio") == pytest.approx(0.75)
    assert value(ledger, "job_restarts_total") == 1
    assert value(ledger, "job_recovery_seconds_total") == 11.0  # told at the end of step 12, at 21 s
    found = shows(ledger, "job_run_seconds_total")
    assert (found['phase="rework"'], found['phase="restore"'], found['phase="compute"']) == (4.0, 2.0, 12.0)
    assert value(ledger, "job_goodput_ratio") == pytest.approx(12 / 21)
    assert shows(ledger, "job_run_info") == {'run="base"': 1.0}
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 0


def test_a_run_goes_on_under_another_job() -> None:
    """Job 41 reached step 10; job 43 of the same user and run begins at 8: two steps are rework."""
    ledger = heard(*run(said(0, 10, step=10, steps=10)))
    later = Owner("43", user=JOB.user)
    take_over = tuple(held(f"GPU-{n}", later, start=20, gpus=2) for n in (0, 1))
    told = [replace(r, job_id="43") for r in run(said(20.5, 21, step=8, restart=True), said(21, 24, step=11, steps=3))]
    both = tuple(reading(11, 25, uuid=f"GPU-{n}") for n in (0, 1))
    advance(ledger, replace(seen(25, *both), allocations=take_over))
    advance(ledger, replace(seen(26, *(reading(25, 26, uuid=f"GPU-{n}") for n in (0, 1))), reports=tuple(told)))
    progress = ledger.jobs["43"].progress
    assert progress is not None
    assert (progress.rework_steps, progress.recovery) == (2, 14 * S)


def test_nobody_else_can_say_how_far_a_run_has_come() -> None:
    ledger = heard(*run(said(0, 10, step=10**9, steps=10)), owner=replace(JOB, user="mallory"))
    assert list(ledger.runs) == [("mallory", "", "base")]


def test_steps_that_go_back_without_a_restart_are_a_rollback() -> None:
    ledger = heard(said(0, 10, step=10, steps=10), said(10, 12, step=6, steps=2))
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 1
    assert value(ledger, "job_rework_steps_total") == 2


def test_a_word_between_two_steps_is_no_rollback() -> None:
    ledger = heard(said(0, 10, step=10, steps=10), said(10, 11, step=10, phases={"checkpoint": 1.0}))
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 0


def test_step_times_of_the_ranks() -> None:
    """Two steps in 10 s, of which rank 0 saved for 2 and waited for 4; rank 1 never waits: it is the straggler."""
    ledger = heard(
        said(0, 10, rank="0", step=2, steps=2, phases={"checkpoint": 2.0, "communication": 3.0, "bubble": 1.0}),
        said(0, 10, rank="1", step=2, steps=2, phases={"checkpoint": 2.0, "data": 1.0}),
    )
    assert shows(ledger, "job_step_seconds") == {'rank="0"': 4.0, 'rank="1"': 4.0}
    assert shows(ledger, "job_rank_busy_seconds") == {'rank="0"': 2.0, 'rank="1"': 4.0}


def test_a_rank_that_is_silent_has_no_step_time() -> None:
    ledger = heard(said(0, 10, rank="0", step=2, steps=2))
    for end in (60, 80):
        advance(ledger, seen(end, *(reading(end - 20, end, uuid=f"GPU-{n}") for n in (0, 1))))
    assert shows(ledger, "job_step_seconds") == {}


def test_there_is_an_end_to_ranks() -> None:
    """At most 64 at a time; an elastic job that comes back with other ranks shows these."""
    told = [said(0, 1, rank=f"{n}", step=1, steps=1) for n in range(100)]
    first = [f"{n}" for n in range(64)]
    for later, expected in ((61, first), (62, [*first[1:], "200"])):
        progress = heard(*told, said(later - 1, later, rank="200", step=2, steps=1)).jobs["41"].progress
        assert progress is not None
        assert list(progress.ranks) == expected


def test_a_name_is_a_namespace_s_own() -> None:
    """Pods have no known user: runs of two namespaces may have the same name."""
    boards = [device(f"GPU-{n}", f"{n}") for n in range(2)]
    owners = [replace(JOB, job_id=f"{n}", user="", namespace=f"team-{n}") for n in range(2)]
    ledger = Ledger()
    advance(ledger, first(boards, [held(b.uuid, owner) for b, owner in zip(boards, owners, strict=True)]))
    told = [replace(said(0, 10, run="train", step=10**n, steps=10**n), job_id=f"{n}") for n in (1, 0)]
    advance(ledger, replace(seen(10, *(reading(0, 10, uuid=b.uuid) for b in boards)), reports=tuple(told)))
    assert [job.progress and job.progress.rework_steps for job in ledger.jobs.values()] == [0, 0]


def test_another_run_of_the_same_job_begins_anew() -> None:
    """A run of 1000 steps, then a fine-tuning run of ten: no rework, and the first run is kept."""
    told = [said(0, 10, step=1000, steps=1000, run="pre"), said(10, 20, step=10, steps=10, run="fine")]
    ledger = heard(*told, said(20, 21, step=20, steps=10, run="fine"))
    assert (value(ledger, "job_rework_steps_total"), value(ledger, "job_steps_total")) == (0, 1020)
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 0
    assert shows(ledger, "job_run_info") == {'run="fine"': 1.0}
    assert [run.highest for run in ledger.runs.values()] == [1000, 20]


def test_each_of_many_runs_of_a_job_is_its_own() -> None:
    """A search of 40 trials in one job: no trial repeats another's steps. Only the first 16 names are shown."""
    told = [said(n, n + 1, step=10, steps=10, run=f"r{n}") for n in range(40)]
    ledger = heard(*told)
    assert (value(ledger, "job_rework_steps_total"), value(ledger, "job_steps_total")) == (0, 400)
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 0
    assert len(ledger.runs) == 40
    shown = [shows(heard(*told[: n + 1]), "job_run_info") for n in (15, 16)]
    assert shown == [{'run="r15"': 1.0}, {'run="other"': 1.0}]
    again = heard(*told, said(40, 41, step=20, steps=10, run="r15"))
    assert shows(again, "job_run_info") == {'run="r15"': 1.0}
    assert value(again, "job_rework_steps_total") == 0


def test_runs_that_a_job_reports_in_turn_are_each_its_own() -> None:
    """A search with a trial on each GPU, of different speed and loss; each counts its steps, once."""
    slow = [said(end - 2, end, run="a", uuids=("GPU-0",), step=end // 2, steps=1, loss=9.0) for end in range(2, 62, 2)]
    fast = [said(end - 2, end, run="b", uuids=("GPU-1",), step=2 * end, steps=4, loss=1.0) for end in range(2, 62, 2)]
    ledger = heard(*(each for pair in zip(slow, fast, strict=True) for each in pair))
    assert (value(ledger, "job_steps_total"), value(ledger, "job_rework_steps_total")) == (150, 0)
    assert {key[2]: run.highest for key, run in ledger.runs.items()} == {"a": 30, "b": 120}
    assert shows(ledger, "job_loss_events_total") == {f'event="{name}"': 0.0 for name in LOSS_EVENTS}
    back = said(62, 64, run="a", uuids=("GPU-0",), step=21, steps=1)
    ledger = heard(*slow, *fast, back)
    assert value(ledger, "job_rework_steps_total") == 1
    assert shows(ledger, "job_loss_events_total")['event="rollback"'] == 1


def test_there_is_an_end_to_the_runs_that_a_job_has_open() -> None:
    """At most 64, without those that were reported longest ago."""
    told = [said(n, n + 1, step=10, steps=10, run=f"r{n}") for n in range(64)]
    progress = (
        heard(*told, said(64, 65, step=20, steps=10, run="r0"), said(65, 66, step=1, run="new")).jobs["41"].progress
    )
    assert progress is not None
    assert list(progress.runs) == [*(f"r{n}" for n in range(2, 64)), "r0", "new"]


def test_a_training_without_a_name_after_another_repeats_nothing_of_it_nor_of_other_jobs() -> None:
    """Cross-validation: the callbacks call the second training of a process #2, in each job of the same user."""
    boards = [device(f"GPU-{n}", f"{n}") for n in range(2)]
    ledger = Ledger()
    advance(ledger, first(boards, [held(b.uuid, replace(JOB, job_id=b.index)) for b in boards]))
    told = [
        replace(said(4 * n + at, 4 * n + at + 2, step=20, steps=20, run=run), job_id=f"{n}")
        for n in (0, 1) for at, run in ((0, ""), (2, "#2"))
    ]  # fmt: skip
    advance(ledger, replace(seen(8, *(reading(0, 8, uuid=b.uuid) for b in boards)), reports=tuple(told)))
    for job in ledger.jobs.values():
        assert job.progress is not None
        assert (job.progress.steps, job.progress.rework_steps, job.progress.events["rollback"]) == (40, 0, 0)
        assert job.progress.run_label == "#2"


def test_processes_without_a_rank_are_told_by_their_gpus() -> None:
    told = [said(0, 2, uuids=(f"GPU-{n}",), tokens=30.0) for n in (0, 1)]
    assert value(heard(*told), "job_tokens_total") == 60.0


def test_what_a_process_on_two_gpus_says_counts_once() -> None:
    """A process has contexts on both GPUs, and reports figures of one."""
    told = said(0, 10, gpus=1, uuids=("GPU-0", "GPU-1"), tokens=100.0, model_flops=0.4 * PEAK * 10)
    ledger = heard(told)
    assert value(ledger, "job_tokens_total") == 100.0
    assert value(ledger, "job_model_flops_total") == pytest.approx(0.4 * PEAK * 10)
    assert value(ledger, "job_reported_mfu_ratio") == pytest.approx(0.2)


def two_jobs(*told: tuple[str, str], most: int) -> Ledger:
    """Two jobs of one user, with room for `most` runs, which report a step each of (job, run) in turn."""
    boards = [device(f"GPU-{n}", f"{n}") for n in range(2)]
    ledger = Ledger(Policy(max_runs=most))
    advance(ledger, first(boards, [held(b.uuid, replace(JOB, job_id=b.index)) for b in boards]))
    reports = [replace(said(n, n + 1, run=run, step=n + 1, steps=1), job_id=job) for n, (job, run) in enumerate(told)]
    end = len(reports)
    advance(ledger, replace(seen(end, *(reading(0, end, uuid=b.uuid) for b in boards)), reports=tuple(reports)))
    return ledger


def test_there_is_an_end_to_runs() -> None:
    """The run that was reported longest ago is forgotten, not the one that was first reported longest ago."""
    ledger = two_jobs(("0", "base"), ("1", "a"), ("0", "base"), ("1", "b"), ("0", "base"), ("1", "c"), most=2)
    assert list(ledger.runs) == [("ada", "", "base"), ("ada", "", "c")]


def test_a_run_that_is_forgotten_between_two_of_its_reports_goes_on() -> None:
    ledger = two_jobs(("0", "base"), ("1", "a"), ("0", "base"), most=1)
    assert [job.progress and job.progress.run.highest for job in ledger.jobs.values()] == [3, 2]
    assert ledger.runs["ada", "", "base"].highest == 3


def losses(*values: float) -> Ledger:
    number = count(1)
    return heard(*(said(n - 1, n, step=n, steps=1, loss=loss) for loss in values for n in [next(number)]))


def test_a_spike_of_the_loss_is_told_once_and_does_not_move_the_mean() -> None:
    """Thirty alternating losses of 2.0 and 2.2 (mean 2.1, deviation 0.1), one of 3.0, then more."""
    smooth = [2.0, 2.2] * 15
    ledger = losses(*smooth, 3.0, *smooth)
    assert shows(ledger, "job_loss_events_total")['event="spike"'] == 1
    assert value(ledger, "job_loss_spread_ratio") == pytest.approx(0.1 / 2.1, rel=0.02)
    assert value(ledger, "job_loss") == 2.2
    assert shows(losses(*smooth, 2.4), "job_loss_events_total")['event="spike"'] == 0


@pytest.mark.parametrize(("odd", "spread"), [(1e200, 0.0), (-1.7e308, 0.0), (2.0, 0.0)])
def test_a_loss_beyond_all_measure_leaves_the_mean_alone(odd: float, spread: float) -> None:
    losses = [2.0, odd, *[2.0] * 30]
    ledger = heard(*(said(n, n + 1, step=n + 1, steps=1, loss=loss) for n, loss in enumerate(losses)))
    assert value(ledger, "job_loss_spread_ratio") == spread
    assert shows(ledger, "job_loss_events_total")['event="spike"'] == (odd != 2.0)


def test_losses_about_nothing_have_no_spread() -> None:
    losses = [1e90, -1e90, *[5e-320] * 30]
    assert value(heard(*(said(n, n + 1, loss=loss) for n, loss in enumerate(losses))), "job_loss_spread_ratio") is None


def test_a_loss_that_is_no_number_is_told() -> None:
    ledger = losses(2.0, nan)
    assert shows(ledger, "job_loss_events_total")['event="not_finite"'] == 1
    assert lines(take_snapshot(ledger, DaemonMetadata()), "job_loss") == ['job_loss{job_id="41"} NaN']
    assert value(ledger, "job_loss_spread_ratio") is None


def test_the_way_to_a_target() -> None:
    """0.5, then 0.7 with a target of 0.7; later values change nothing."""
    told = [
        said(n, n + 1, quality=q, quality_name="accuracy", quality_target=0.7) for n, q in enumerate((0.5, 0.7, 0.6))
    ]
    ledger = heard(*told)
    label = 'name="accuracy"'
    assert shows(ledger, "job_quality") == {label: 0.6}
    assert shows(ledger, "job_quality_start") == {label: 0.5}
    assert shows(ledger, "job_quality_target") == {label: 0.7}
    assert value(ledger, "job_target_reached_timestamp_seconds") == 2.0
    assert value(heard(told[0]), "job_target_reached_timestamp_seconds") is None


def test_another_figure_of_merit_begins_anew() -> None:
    one = said(0, 1, quality=0.9, quality_name="accuracy", quality_target=0.7)
    two = said(1, 2, quality=0.2, quality_name="f1", quality_target=0.7)
    ledger = heard(one, two)
    assert value(ledger, "job_target_reached_timestamp_seconds") is None
    assert shows(ledger, "job_quality_start") == {'name="f1"': 0.2}


def test_there_is_an_end_to_names_of_figures() -> None:
    told = [said(n, n + 1, quality=float(n), quality_name=f"accuracy of step {n}") for n in range(40)]
    again = said(40, 41, quality=7.0, quality_name="accuracy of step 3")
    assert shows(heard(*told), "job_quality") == {'name="accuracy of step 15"': 15.0}
    assert shows(heard(*told, again), "job_quality") == {'name="accuracy of step 3"': 7.0}


def test_a_target_may_lie_below() -> None:
    def told(end: float, quality: float, **more: object) -> TrainingReport:
        return said(end - 1, end, quality=quality, quality_name="loss", quality_falls=True, **more)

    ledger = heard(told(1, 3.0, quality_target=2.0), told(2, 1.9, quality_target=2.0))
    assert value(ledger, "job_target_reached_timestamp_seconds") == 2.0
    again = heard(told(1, 1.0, quality_target=2.0), told(2, 1.9))
    assert value(again, "job_target_reached_timestamp_seconds") is None
    assert shows(again, "job_quality_target") == {}


@pytest.mark.parametrize(
    ("tensor", "domain", "lost"), [(2, 0, None), (4, 0, 450e9 - 64e9), (4, 72, None), (1, 0, None)]
)
def test_tensor_parallel_groups_that_leave_nvlink(tensor: int, domain: int, lost: float | None) -> None:
    """Two GPUs on this node: a group of four uses PCIe, unless a rack is one NVLink domain."""
    ledger = heard(said(0, 1, parallel=Parallel(tensor=tensor, data=2)))
    for gpu in ledger.gpus.values():
        gpu.device = replace(gpu.device, spec=replace(H100, nvlink_domain=domain))
    assert value(ledger, "job_tensor_parallel_lost_bytes_per_second") == lost
    assert shows(ledger, "job_parallelism")['dimension="tensor"'] == tensor


def test_a_board_without_nvlink_has_none_to_leave() -> None:
    ledger = heard(said(0, 1, parallel=Parallel(tensor=4)))
    for gpu in ledger.gpus.values():
        gpu.device = replace(gpu.device, spec=replace(H100, nvlink_bytes_per_second=None))
    assert value(ledger, "job_tensor_parallel_lost_bytes_per_second") is None


def test_a_job_that_says_nothing_has_no_such_series() -> None:
    ledger = Ledger()
    held_by: Allocation = held()
    advance(ledger, first([device()], [held_by]))
    advance(ledger, seen(10, reading(0, 10, WORKING)))
    told = take_snapshot(ledger, DaemonMetadata())
    assert lines(told, "job_run_seconds_total") == lines(told, "job_steps_total") == lines(told, "job_requests") == []
