"""Each scenario ends in the state it is named after, entered when its rule allows, on every board."""

import pytest

from exporter.core.model import SECOND
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.scenarios.physics import FACTS, first_work, hang_begin, spin_begin, works, zombie_begin
from tests.scenarios.stage import Case, Run, cases, fed, play

pytestmark = pytest.mark.slow


POLLING = 0.001
"""Of a zombie's window: the driver's own polling over PCIe, 60 kB/s of 31.5 GB/s or more, counts as two millionths of
work, each of which drains 200 times as much."""


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Run:
    case: Case = request.param
    return play(case)


def on(*scenarios: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", cases(*scenarios), indirect=True, ids=str)


def at(seconds: float) -> int:
    return round(seconds * 1000) * SECOND // 1000


@on()
def test_the_law_holds_and_nothing_is_refused(run: Run) -> None:
    """Sound telemetry: no reading refused, no error of conservation, every GPU paid for from first to last."""
    assert not run.ledger.rejected
    assert run.ledger.conservation_errors == 0
    assert [gpu.book.paid for gpu in run.ledger.gpus.values()] == [run.end] * len(run.uuids)
    assert [sum(gpu.book.parts) for gpu in run.ledger.gpus.values()] == [run.end] * len(run.uuids)


@on("healthy_training", "memory_bound_decode", "straggler", "throttled", "copy_loop", "large_gemm")
def test_a_gpu_that_computes_is_active_from_its_first_kernels_on(run: Run) -> None:
    """g >= 0.01, and never anything worse. A checkpoint rests the engine for 9 s and more: stalled, active again."""
    allowed = {"unobserved", "stalled", "active"}
    for uuid in run.uuids:
        assert run.final(uuid) == ("active", "computing")
        begin = next(r.start for r in run.readings(uuid) if (r.gr_engine_active or 0.0) >= 0.01)
        assert run.entered(uuid, "active") == begin <= first_work(run, uuid)
        assert {state for _, state, _ in run.moods[uuid]} <= allowed


@on("input_starved_training")
def test_starved_training_swings_between_stalled_and_active(run: Run) -> None:
    """A round is 4-9 s of waiting, under a second of copying and 5-10 s of work: some sixty of them in 14 minutes."""
    for uuid in run.uuids:
        states = [state for _, state, _ in run.moods[uuid][3:]]
        assert set(states) == {"stalled", "active"}
        assert 40 <= states.count("stalled") <= 90


@on("zombie_notebook")
def test_a_notebook_is_a_zombie_two_hours_after_the_minute_of_its_last_cell(run: Run) -> None:
    """Interactive: 120 min from the end of the last minute with any use. 0.5 % of them would be 36 s of work."""
    for uuid in run.uuids:
        last = max(r.end for r in run.readings(uuid) if works(r, FACTS[run.case.board]))
        begin = -(-last // at(60)) * at(60) + at(7200)
        assert run.final(uuid) == ("zombie", "idle_context")
        assert run.entered(uuid, "zombie") == pytest.approx(begin, abs=POLLING * at(7200))
        assert run.entered(uuid, "zombie") == pytest.approx(zombie_begin(run, uuid), abs=at(0.002))
        trailing = [r for r in run.readings(uuid) if r.start >= last]
        assert sum((r.gr_engine_active or 0.0) * (r.end - r.start) for r in trailing) < at(36)


@on("idle_context")
def test_a_sleeping_batch_job_is_a_zombie_after_half_an_hour(run: Run) -> None:
    for uuid in run.uuids:
        assert run.entered(uuid, "stalled") == 0
        assert run.entered(uuid, "zombie") == pytest.approx(at(1800), abs=POLLING * at(1800))
        assert run.entered(uuid, "zombie") == pytest.approx(zombie_begin(run, uuid), abs=at(0.002))
        assert run.final(uuid) == ("zombie", "idle_context")


@on("leaked_process")
def test_what_computes_after_its_job_is_unowned_after_a_minute(run: Run) -> None:
    """The hold ends at 600.25 s, within a reading; one of the four processes lives on."""
    left, *others = run.uuids
    for uuid in run.uuids:
        assert run.entered(uuid, "unallocated") == at(600.25)
    assert run.final(left) == ("unowned", "leaked_process")
    assert run.entered(left, "unowned") == at(660.25)
    for uuid in others:
        assert run.final(uuid) == ("unallocated", "free")
        assert run.entered(uuid, "unowned") is None


@on("deadlock")
def test_a_deadlock_hangs_every_rank_and_names_the_culprit(run: Run) -> None:
    """All together, exactly 300 s after the first spinning reading, which is the first after 900 s."""
    missing = [uuid for uuid in run.uuids if run.truth(uuid)[-1].waiting_peer_share == 0]
    assert len(missing) == 1
    for uuid in run.uuids:
        assert run.final(uuid) == ("hung", "culprit" if uuid in missing else "spinning")
        assert run.entered(uuid, "hung") == hang_begin(run, uuid) == at(1200)


@on("deadlock", "spin_kernel")
def test_a_hang_is_suspected_before_it_is_called(run: Run) -> None:
    """Suspicion is a credit of 120 s: no state, no second of it is booked as hung."""
    for uuid in run.uuids:
        begin = spin_begin(run, uuid)
        if begin is None:
            continue
        for seconds, suspected in ((115, False), (120, True), (295, True)):
            ledger, _ = fed(o for o in run.observations if o.at <= begin + at(seconds))
            seen = {gpu.device.uuid: gpu for gpu in take_snapshot(ledger, DaemonMetadata()).gpus}[uuid]
            assert seen.hang_suspected is suspected
            assert seen.state == "active"


@on("spin_kernel")
def test_a_spin_kernel_hangs_after_five_minutes(run: Run) -> None:
    for uuid in run.uuids:
        assert run.final(uuid) == ("hung", "spinning")
        assert run.entered(uuid, "hung") == at(300)


@on("lost_gpu")
def test_a_lost_gpu_is_unavailable_at_once_and_its_siblings_wait_for_the_watchdog(run: Run) -> None:
    """Off the bus at 600.4 s: the reading that would have ended at 605 never comes. The hold ends at 1,200.4 s.

    The others spin from 605 s on, for less than the ten minutes after which a job is hung.
    """
    *left, lost = run.uuids
    assert run.final(lost) == ("unavailable", "lost")
    assert run.entered(lost, "unavailable") == at(600)
    for uuid in left:
        assert run.entered(uuid, "hung") is hang_begin(run, uuid) is None
        assert run.entered(uuid, "unallocated") == at(1200.4)
        assert run.final(uuid) == ("unallocated", "free")


@on("telemetry_outage")
def test_an_outage_is_unobserved_and_work_goes_on_after_it(run: Run) -> None:
    for uuid in run.uuids:
        outage = [mood for mood in run.moods[uuid] if mood[1] == "unobserved" and mood[0]]
        assert outage == [(at(600), "unobserved", "source_failed"), (at(600), "unobserved", "gap")]
        assert run.moods[uuid][-1] == (at(905), "active", "computing")


@on("carpenter")
def test_the_carpenters_day(run: Run) -> None:
    """Two hours of nobody's, then 20 min of work and 10 of pause by turns: pauses of 10 min make no zombie."""
    (uuid,) = run.uuids
    day = [(0, "unallocated", "free")]
    for round_ in range(12):
        begin = 7200 + 1800 * round_
        day += [(at(begin), "active", "computing"), (at(begin + 1200), "stalled", "idle_context")]
    assert run.moods[uuid][1:] == day
