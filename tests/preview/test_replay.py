"""Tests previews of recordings against results calculated by hand, in hours.

Work here keeps the engine busy all the time, so that effective work is simply the length of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.core.ledger import Ledger
from exporter.core.model import Allocation, Device, Observation, Owner, Process
from exporter.core.policy import Policy
from exporter.core.prices import Price
from exporter.preview.replay import TracePreview
from exporter.preview.scoring import PreviewResult, policy_rows
from tests.worlds import JOB, RESTING, SPINNING, WORKING, S, cut, device, first, held, reading, seen

Signals = dict[str, Any]
WORK = WORKING | {"gr_engine_active": 1.0}
BARE = RESTING | {"processes": ()}
MINUTE = 60.0
OTHER = Owner("42", user="bob", name="train")


def story(
    phases: Sequence[tuple[float, Sequence[Signals]]],
    *,
    devices: Sequence[Device] = (device(),),
    holds: Sequence[Allocation] = (held(),),
    changes: dict[float, Sequence[Allocation]] | None = None,
    silence: tuple[float, float] = (0.0, 0.0),
    step: float = MINUTE,
) -> Iterator[Observation]:
    """Phases of (minutes, signals of each GPU) in readings of `step` seconds; None for a GPU: no reading.

    `changes`: what the scheduler says from that minute on; `silence`: minutes in which it says nothing.
    """
    yield first(devices, holds)
    due = sorted((changes or {}).items())
    now, heard = 0.0, 0.0
    for minutes, signals in phases:
        end = now + minutes * MINUTE
        while now < end:
            stop = min(end, now + step)
            told = [said for at, said in due if now <= at * MINUTE < stop]
            heard = heard if silence[0] * MINUTE < stop <= silence[1] * MINUTE else stop
            rows_ = [reading(now, stop, s, d.uuid) for d, s in zip(devices, signals, strict=True) if s]
            said: dict[str, Any] = {"allocations": tuple(told[-1])} if told else {}
            yield seen(stop, *rows_, allocations_at=round(heard * S), **said)
            now = stop


def free(_device: Device, _wall: int) -> None:
    return None


def preview(
    *recordings: Iterable[Observation], wanted: Sequence[str] = ("zombie.batch=15m",), money: Callable[..., Any] = free
) -> PreviewResult:
    """One patience for every case: the tests are about what follows."""
    policy = Policy(hang_seconds=300.0, hang_peer_seconds=300.0, zombie_worked_factor=1.0)
    replay = TracePreview(policy_rows(policy, wanted), open_ledger=Ledger, price_of=money)
    for recording in recordings:
        assert replay.run(recording)
    return replay.result("by hand")


def freed(answer: PreviewResult) -> list[tuple[int, float, float]]:
    """Episodes, hours freed rightly and wrongly, of each row."""
    return [(row.episodes, round(row.gpu_hours_freed, 9), round(row.gpu_hours_wrongly_freed, 9)) for row in answer.rows]


def jobs(answer: PreviewResult) -> list[tuple[int, int]]:
    return [(row.jobs_hit, row.jobs_reclaimed) for row in answer.rows]


def test_what_rests_to_the_end_is_freed_from_the_threshold_on() -> None:
    answer = preview(story([(10, [WORK]), (60, [RESTING])]))
    assert freed(answer) == [(1, 0.5, 0.0), (1, 0.75, 0.0)]
    assert jobs(answer) == [(0, 1), (0, 1)]
    assert (answer.since, answer.until) == (0.0, 4200.0)
    assert answer.gpu_hours_held == pytest.approx(70 / 60)


def test_who_works_again_was_hit_and_the_rest_of_its_hold_is_freed_wrongly() -> None:
    answer = preview(story([(10, [WORK]), (50, [RESTING]), (10, [WORK])], step=10))
    assert freed(answer) == [(1, 0.0, 0.5), (1, 0.0, 0.75)]
    assert jobs(answer) == [(1, 1), (1, 1)]
    assert [row.gpu_hours_work_lost for row in answer.rows] == [pytest.approx(1 / 6)] * 2
    (hit,) = answer.rows[1].hits
    assert (hit.job_id, hit.user, hit.taken_at, hit.after_seconds) == ("41", "ada", 25 * 60, 35 * 60)
    assert [hit.gpu_hours, hit.work_gpu_hours] == pytest.approx([0.75, 1 / 6])


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "hit"), [(12, 0), (13, 1)])
def test_work_is_real_from_one_percent_of_the_rest_on(seconds: float, hit: int) -> None:
    """Of 20 minutes from the threshold on, when the core itself already has seen the GPU wake at 10 s."""
    answer = preview(story([(40, [RESTING]), (seconds / 60, [WORK]), (10 - seconds / 60, [RESTING])], step=1))
    assert jobs(answer)[0] == (hit, 1)
    assert answer.rows[0].gpu_hours_work_lost == pytest.approx(seconds / 3600)


@pytest.mark.parametrize(("seconds", "hit"), [(600, 0), (610, 1)])
def test_ten_minutes_in_all_are_real_work_however_long_the_rest(seconds: float, hit: int) -> None:
    """Two days: 1 % of it would be 29 minutes."""
    parts = [(30, [RESTING]), (seconds / 60, [WORK]), (2 * 1440, [RESTING])]
    assert jobs(preview(story(parts, step=seconds)))[0] == (hit, 1)


@pytest.mark.parametrize("wake", ["wake_seconds=1", "wake_seconds=900"])
def test_the_core_s_rule_for_leaving_a_zombie_changes_no_score(wake: str) -> None:
    told = [(40, [RESTING]), (2, [WORK]), (60, [RESTING]), (1, [WORK]), (9, [RESTING])]
    before, after = preview(story(told, step=10), wanted=["zombie.batch=30m", wake]).rows
    assert (before.episodes_wrong, before.episodes) == (1, 1)
    assert (before.hits, before.gpu_hours_wrongly_freed) == (after.hits, after.gpu_hours_wrongly_freed)


def test_the_longer_threshold_hits_nobody_where_the_shorter_does() -> None:
    answer = preview(story([(10, [WORK]), (20, [RESTING]), (30, [WORK]), (45, [RESTING])], step=10))
    assert freed(answer) == [(1, 0.25, 0.0), (1, 0.0, round(80 / 60, 9))]
    assert jobs(answer) == [(0, 1), (1, 1)]


def test_who_rests_twice_is_taken_back_once() -> None:
    answer = preview(story([(40, [RESTING]), (10, [WORK]), (20, [RESTING]), (10, [WORK])], step=10))
    (hit,) = answer.rows[1].hits
    assert (hit.times, hit.gpus, hit.taken_at, hit.after_seconds) == (1, {"GPU-0"}, 15 * 60, 25 * 60)
    assert [hit.gpu_hours, hit.work_gpu_hours] == pytest.approx([65 / 60, 20 / 60])


@pytest.mark.slow
def test_a_keeper_that_computes_a_second_in_29_minutes_has_not_worked_again() -> None:
    answer = preview(story([(29 - 1 / 60, [RESTING]), (1 / 60, [WORK])] * 4, step=1))
    assert jobs(answer) == [(0, 1), (0, 1)]
    assert freed(answer)[1] == (1, round((4 * 29 - 15) / 60, 9), 0.0)


def test_each_gpu_of_a_job_is_judged_by_itself() -> None:
    both = [device("GPU-0", "0"), device("GPU-1", "1")]
    holds = [held("GPU-0", gpus=2), held("GPU-1", gpus=2)]
    told = story([(60, [RESTING, RESTING]), (30, [WORK, RESTING])], devices=both, holds=holds, step=10)
    answer = preview(told)
    assert freed(answer)[0] == (2, 1.0, 1.0)
    assert jobs(answer)[0] == (1, 1)
    assert answer.rows[0].hits[0].gpus == {"GPU-0"}


def test_a_hold_that_ends_before_the_threshold_frees_nothing() -> None:
    assert freed(preview(story([(60, [RESTING])], changes={10: []}))) == [(0, 0.0, 0.0), (0, 0.0, 0.0)]


def test_the_end_of_the_hold_ends_what_is_freed() -> None:
    told = story([(90, [RESTING])], changes={50: []})
    assert freed(preview(told)) == [(1, round(20 / 60, 9), 0.0), (1, round(35 / 60, 9), 0.0)]


def test_a_hold_that_ends_within_a_reading_ends_what_is_freed_there() -> None:
    told = story([(90, [RESTING])], holds=[held(end=round(50.5 * MINUTE * S))])
    assert freed(preview(told))[0] == (1, round(20.5 / 60, 9), 0.0)


def test_work_of_the_next_holder_hits_nobody() -> None:
    told = story([(50, [RESTING]), (20, [WORK])], changes={50: [held(owner=OTHER, start=50 * MINUTE)]})
    answer = preview(told)
    assert freed(answer) == [(1, round(20 / 60, 9), 0.0), (1, round(35 / 60, 9), 0.0)]
    assert jobs(answer) == [(0, 1), (0, 1)]


def test_a_limit_of_the_job_s_own_wins_over_its_class_and_no_row_moves_it() -> None:
    own = Owner("43", zombie_seconds=50 * MINUTE)
    answer = preview(story([(60, [RESTING])], holds=[held(owner=own)]))
    assert freed(answer) == [(1, round(10 / 60, 9), 0.0)] * 2
    assert answer.notes == ("jobs with a limit of their own (zombie_seconds), which no row changes: 1 (43)",)


def test_a_limit_for_another_state_is_not_spoken_of() -> None:
    own = Owner("43", hang_seconds=50 * MINUTE)
    assert preview(story([(60, [RESTING])], holds=[held(owner=own)])).notes == ()


@pytest.mark.parametrize(("kind", "moved"), [("batch", False), ("interactive", True), ("novel", False)])
def test_only_the_class_that_is_named_moves(kind: str, moved: bool) -> None:
    told = story([(60, [RESTING])], holds=[held(owner=Owner("44", workload_class=kind))])
    before, after = freed(preview(told, wanted=["zombie.interactive=15m"]))
    assert (before != after) is moved


def test_nobody_s_job_is_taken_from_an_owner_who_is_not_known() -> None:
    """The scheduler does not answer from the first minute on, while a process is on the GPU."""
    answer = preview(story([(90, [RESTING])], silence=(1, 90)))
    assert freed(answer) == [(0, 0.0, 0.0)] * 2
    assert answer.notes == ("GPUs left alone because the scheduler did not report their owner: 1",)


@pytest.mark.parametrize("resting", [RESTING, BARE])
def test_a_scheduler_that_is_silent_for_a_while_ends_no_hold(resting: Signals) -> None:
    """With a process on it the GPU belongs to the unknown job meanwhile, without one its time is unobserved."""
    told = story([(60, [resting]), (10, [WORK])], silence=(40, 50), step=10)
    answer = preview(told, wanted=["zombie.batch=20m"])
    assert jobs(answer)[1] == (1, 1)
    (hit,) = answer.rows[1].hits
    assert (hit.taken_at, hit.times) == (20 * MINUTE, 1)
    assert hit.after_seconds == pytest.approx(40 * MINUTE, abs=10)


def test_a_silence_alone_is_no_work() -> None:
    told = story([(70, [RESTING])], silence=(40, 50), step=10)
    assert freed(preview(told, wanted=["zombie.batch=20m"]))[1] == (1, round(50 / 60, 9), 0.0)


def test_time_nobody_saw_ends_no_hold_and_is_no_work() -> None:
    told = story([(40, [RESTING]), (20, [{}]), (10, [RESTING])])
    assert freed(preview(told)) == [(1, round(40 / 60, 9), 0.0), (1, round(55 / 60, 9), 0.0)]


def test_an_exempted_job_is_left_alone_until_the_exemption_ends() -> None:
    spared = Owner("45", exemption="demo", exempt_until=50 * MINUTE)
    answer = preview(story([(60, [RESTING])], holds=[held(owner=spared)]))
    assert freed(answer) == [(1, round(10 / 60, 9), 0.0)] * 2
    assert answer.notes == ("jobs with an exemption, left alone while it lasted: 1 (45)",)


def test_an_exemption_that_outlasts_the_hold_frees_nothing() -> None:
    spared = Owner("45", exemption="demo", exempt_until=50 * MINUTE)
    told = story([(60, [RESTING])], holds=[held(owner=spared)], changes={45: []})
    assert freed(preview(told)) == [(0, 0.0, 0.0)] * 2


def test_two_jobs_on_one_gpu_lose_it_together() -> None:
    told = story([(60, [RESTING]), (10, [WORK])], holds=[held(), held(owner=OTHER)], step=10)
    answer = preview(told)
    assert (freed(answer)[0], jobs(answer)[0]) == ((1, 0.0, round(40 / 60, 9)), (2, 2))
    assert [hit.gpu_hours for hit in answer.rows[0].hits] == [pytest.approx(20 / 60)] * 2


def test_a_mig_instance_frees_its_share_of_a_board() -> None:
    devices = cut(3)
    told = story([(90, [{}, RESTING])], devices=devices, holds=[held(devices[1].uuid)])
    (before, _) = freed(preview(told))
    assert before[1] == pytest.approx(3 / 7, abs=1e-5)


def test_an_instance_that_is_given_back_ends_what_is_freed() -> None:
    told = list(story([(50, [RESTING])]))
    told.append(seen(3600, reading(3000, 3600, RESTING, "GPU-1"), devices=(device("GPU-1", "1"),), allocations=()))
    assert freed(preview(told))[0] == (1, round(20 / 60, 9), 0.0)


def test_money_is_that_of_the_moment_it_is_taken_back_and_currencies_are_kept_apart() -> None:
    both = [device("GPU-0", "0"), device("GPU-1", "1", model="NVIDIA L4")]
    holds = [held("GPU-0"), held("GPU-1", OTHER)]

    def money(board: Device, wall: int) -> Price:
        dear = Price(4.0 if wall < 15.5 * MINUTE * S else 2.0)
        return Price(1.0, "EUR") if board.model == "NVIDIA L4" else dear

    told = story([(90, [RESTING, RESTING])], devices=both, holds=holds)
    before, after = preview(told, money=money).rows
    assert before.money_freed == pytest.approx({"USD": 2.0, "EUR": 1.0})
    assert after.money_freed == pytest.approx({"USD": 5.0, "EUR": 1.25})
    assert after.money_wrongly_freed == {}


def test_money_of_what_was_freed_wrongly_is_kept_apart() -> None:
    told = story([(60, [RESTING]), (10, [WORK])], step=10)
    (row, _) = preview(told, money=lambda _device, _wall: Price(6.0)).rows
    assert row.money_freed == {}
    assert row.money_wrongly_freed == pytest.approx({"USD": 4.0})


def test_recordings_add_up_and_a_job_on_two_nodes_is_one_job() -> None:
    one, two = story([(60, [RESTING])]), story([(90, [RESTING])], devices=[device("GPU-9")], holds=[held("GPU-9")])
    answer = preview(one, two)
    assert (freed(answer)[0], jobs(answer)[0]) == ((2, 1.5, 0.0), (0, 1))
    assert answer.until == 90 * MINUTE
    assert answer.gpu_hours_held == pytest.approx(2.5)


def test_a_recording_without_an_observation_says_so() -> None:
    assert not TracePreview(policy_rows(Policy(), []), open_ledger=Ledger, price_of=free).run([])


def test_a_hang_takes_back_the_spinning_gpu_and_its_culprit() -> None:
    both = [device("GPU-0", "0"), device("GPU-1", "1")]
    holds = [held("GPU-0", gpus=2), held("GPU-1", gpus=2)]
    told = story([(5, [WORK, WORK]), (15, [SPINNING, RESTING])], devices=both, holds=holds)
    assert freed(preview(told, wanted=["hang=10m"])) == [(2, round(20 / 60, 9), 0.0), (2, round(10 / 60, 9), 0.0)]


def test_a_hang_that_ends_in_work_was_a_hit_and_one_that_ends_in_rest_was_not() -> None:
    for then, hit in ((WORK, 1), (RESTING, 0)):
        told = story([(10, [SPINNING]), (10, [then])], step=10)
        assert jobs(preview(told, wanted=["hang=4m"]))[0] == (hit, 1)


def test_a_job_without_a_process_is_taken_back_after_its_own_limit() -> None:
    told = story([(10, [WORK]), (80, [BARE])])
    assert freed(preview(told, wanted=["no_process=20m"])) == [(1, round(35 / 60, 9), 0.0), (1, 1.0, 0.0)]


def test_a_process_that_comes_back_and_rests_is_no_work_and_one_that_computes_is() -> None:
    for then, hit in ((RESTING, 0), (WORK, 1)):
        told = story([(40, [BARE]), (10, [then])], step=10)
        assert jobs(preview(told, wanted=["no_process=20m"]))[1] == (hit, 1)


def test_a_server_that_begins_to_poll_has_not_worked() -> None:
    server = Owner("46", workload_class="serving")
    polls = SPINNING | {"processes": (Process(1),)}
    for then, hit in ((polls, 0), (WORK, 1)):
        told = story([(60, [BARE]), (10, [then])], holds=[held(owner=server)], step=10)
        assert jobs(preview(told, wanted=["no_process=30m"]))[1] == (hit, 1)


def test_jobs_hit_soonest_come_first() -> None:
    both = [device("GPU-0", "0"), device("GPU-1", "1")]
    holds = [held("GPU-0", OTHER), held("GPU-1", JOB)]
    told = story(
        [(60, [RESTING, RESTING]), (5, [RESTING, WORK]), (5, [WORK, WORK])], devices=both, holds=holds, step=10
    )
    assert [hit.job_id for hit in preview(told).rows[0].hits] == ["41", "42"]


# -- one hold, whatever it is interrupted by --

NOBODY: tuple[Allocation, ...] = ()
LEAVES_AND_WORKS = [(50.0, [RESTING]), (20.0, [WORK])]


def test_an_answer_of_the_scheduler_without_the_job_is_no_new_hold() -> None:
    """For one reading, at minute 40, it lists nobody."""
    told = story(LEAVES_AND_WORKS, changes={40: NOBODY, 41: [held()]})
    assert freed(preview(told))[0] == (1, 0.0, round(40 / 60, 9))


def test_a_job_that_is_gone_for_longer_has_left() -> None:
    told = story(LEAVES_AND_WORKS, changes={40: NOBODY, 42: [held(start=42 * MINUTE)]})
    assert freed(preview(told))[0] == (1, round(10 / 60, 9), 0.0)


def test_a_job_that_is_back_under_the_same_start_was_never_away() -> None:
    told = story(LEAVES_AND_WORKS, changes={40: NOBODY, 41: [held()]}, step=30)
    assert freed(preview(told))[0] == (1, 0.0, round(40 / 60, 9))


def test_a_gap_in_which_nothing_was_observed_is_no_absence() -> None:
    """The job has another start after it, because the scheduler's answer was of a new daemon."""
    parts: list[tuple[float, list[Signals]]] = [(40, [RESTING]), (20, [{}]), (10, [RESTING]), (20, [WORK])]
    told = story(parts, changes={40: NOBODY, 60: [held(start=60 * MINUTE)]})
    assert freed(preview(told))[0] == (1, 0.0, 1.0)


def test_a_restart_of_the_job_is_a_new_hold() -> None:
    told = story(LEAVES_AND_WORKS, changes={50: [held(start=50 * MINUTE, restarts=1)]})
    assert freed(preview(told))[0] == (1, round(20 / 60, 9), 0.0)


def test_work_while_the_owner_is_not_known_counts_if_it_was_the_same_job() -> None:
    parts = [(40.0, [RESTING]), (10.0, [WORK]), (20.0, [RESTING])]
    same = story(parts, silence=(38, 55), step=10)
    other = story(parts, silence=(38, 55), changes={55: [held(owner=OTHER, start=45 * MINUTE)]}, step=10)
    assert [jobs(preview(told))[0] for told in (same, other)] == [(1, 1), (0, 1)]


def test_little_seen_is_neither_right_nor_wrong() -> None:
    answer = preview(story([(35, [RESTING]), (20, [{}]), (5, [RESTING])]))
    before, after = answer.rows
    assert (before.episodes_unjudged, before.precision, before.gpu_hours_unjudged) == (1, None, 0.5)
    assert (before.gpu_hours_freed, before.gpu_hours_wrongly_freed) == (0.0, 0.0)
    assert (after.episodes_right, after.precision) == (1, 1.0), "more than half was seen"
    (note,) = answer.notes
    assert note.endswith("less than half of the time afterwards was observed: as configured 1")


# -- beside ours --


def test_the_plain_rule_takes_back_after_300_minutes_at_zero_whatever_the_class() -> None:
    both = [device("GPU-0", "0"), device("GPU-1", "1")]
    holds = [held("GPU-0"), held("GPU-1", Owner("46", workload_class="serving"))]
    told = story([(10, [WORK, WORK]), (330, [RESTING, RESTING]), (30, [RESTING, WORK])], devices=both, holds=holds)
    plain = preview(told).plain_rule
    assert plain is not None
    assert (plain.label, plain.episodes_right, plain.episodes_wrong) == ("engine at 0 for 300 min", 1, 1)
    assert (plain.gpu_hours_freed, plain.gpu_hours_wrongly_freed) == (1.0, 1.0)
    assert [(row.label, row.jobs_hit) for row in plain.by_class] == [("batch", 0), ("serving", 1)]


def test_any_activity_starts_the_plain_rule_anew_and_a_gap_does_not() -> None:
    keeper = preview(story([(200, [RESTING]), (1, [WORK]), (250, [RESTING])])).plain_rule
    blind = preview(story([(200, [RESTING]), (40, [{}]), (100, [RESTING])])).plain_rule
    assert keeper is not None
    assert blind is not None
    assert (keeper.episodes, blind.episodes) == (0, 1)
    assert blind.gpu_hours_freed == pytest.approx(40 / 60)


def test_a_new_holder_starts_the_plain_rule_anew() -> None:
    told = story([(500, [RESTING])], changes={250: [held(owner=OTHER, start=250 * MINUTE)]})
    plain = preview(told).plain_rule
    assert plain is not None
    assert plain.episodes == 0


def test_the_plain_rule_does_not_stand_beside_hangs() -> None:
    assert preview(story([(400, [RESTING])]), wanted=["hang=10m"]).plain_rule is None


def test_classes_add_up_to_their_row() -> None:
    both = [device("GPU-0", "0"), device("GPU-1", "1")]
    holds = [held("GPU-0"), held("GPU-1", Owner("47", workload_class="interactive"))]
    shared = [*holds, held("GPU-1", OTHER)]
    answer = preview(story([(180, [RESTING, RESTING]), (20, [RESTING, WORK])], devices=both, holds=holds))
    (row, _) = answer.rows
    assert [(kind.label, kind.jobs_hit, kind.hits) for kind in row.by_class] == [
        ("batch", 0, ()),
        ("interactive", 1, ()),
    ]
    assert sum(kind.gpu_hours_freed for kind in row.by_class) == row.gpu_hours_freed
    assert sum(kind.gpu_hours_work_lost for kind in row.by_class) == row.gpu_hours_work_lost
    mixed = preview(story([(180, [RESTING, RESTING])], devices=both, holds=shared)).rows[0]
    assert [kind.label for kind in mixed.by_class] == ["batch", "mixed"]


# -- the length of readings --

Piece = tuple[int, int]
"""Milliseconds, and index into PLAYED."""
KERNELS = SPINNING | {"gr_engine_active": 0.3}
PLAYED: tuple[Signals, ...] = (RESTING, WORK, WORKING, SPINNING, KERNELS, BARE, {})
PIECES = st.lists(
    st.tuples(st.integers(1, 40 * 60_000), st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6])), min_size=1, max_size=12
)


def pieces_story(pieces: Sequence[Piece]) -> Iterator[Observation]:
    """An observation for each piece; its job leaves a minute before the end."""
    end = sum(length for length, _ in pieces) / 1000
    yield first([device()], [held(end=round(max(1, end - 60) * 1000) * S // 1000)])
    now = 0
    for length, kind in pieces:
        stop = (now + length) / 1000
        yield seen(stop, *([reading(now / 1000, stop, PLAYED[kind])] if PLAYED[kind] else []))
        now += length


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    return [(sum(length for length, _ in group), kind) for kind, group in groupby(pieces, key=itemgetter(1))]


CUTS = st.lists(st.integers(0, 40 * 60_000), min_size=12, max_size=12)


@given(PIECES, CUTS)
@example([(900_001, 0), (60_000, 0)], [0] * 12)
@example([(900_000, 0), (120_000, 1)], [5_000] * 12)
@example([(900_000, 0), (60_001, 6)], [1] * 12)
@pytest.mark.parametrize("wanted", ["zombie.batch=15m", "hang=4m", "no_process=20m"])
def test_cutting_and_merging_readings_changes_no_score(wanted: str, pieces: list[Piece], cuts: list[int]) -> None:
    whole = preview(pieces_story(pieces), wanted=[wanted])
    halves = [
        (part, kind)
        for (length, kind), cut in zip(pieces, cuts, strict=False)
        for part in (min(cut, length), length - min(cut, length))
        if part
    ]
    for other in (halves, merged(pieces)):
        again = preview(pieces_story(other), wanted=[wanted])
        assert (again.rows, again.plain_rule) == (whole.rows, whole.plain_rule)


@given(PIECES, st.integers(1, 4))
def test_readings_that_come_together_score_as_those_that_come_one_by_one(pieces: list[Piece], number: int) -> None:
    beginning, *single = pieces_story(pieces)
    together = [
        replace(group[-1], readings=tuple(each for one in group for each in one.readings))
        for group in (single[n : n + number] for n in range(0, len(single), number))
    ]
    assert preview([beginning, *together]).rows == preview([beginning, *single]).rows
