"""Encoding and decoding a ledger: no counter is lost, and counting continues as if uninterrupted."""

import re
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporter.core.checkpoint import CheckpointError, CheckpointHeader, dump_ledger, load_ledger, read_header
from exporter.core.communication import ShortReading
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import PPM, SECOND, Fault, Observation, Owner, ServingReport, State, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.simulate.simulation import simulate
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from tests.scenarios.stage import SIZES, Case, play
from tests.worlds import RESTING, SPINNING, WORKING, cut, device, first, held, reading, seen

_JOB_FIELDS = 10
"""Fields of a job in the oldest checkpoints; later ones follow them."""
OTHER = Owner(job_id="42", user="bob", account="vision")
DOWN = Fault("exporter_down", "away for a while")


def again(ledger: Ledger, policy: Policy | None = None) -> Ledger:
    """A new ledger restored from the bytes of another."""
    other = Ledger(policy)
    load_ledger(other, dump_ledger(ledger))
    return other


def books(ledger: Ledger) -> object:
    """The decoded bytes, independent of order."""
    return sorted_sets(msgspec.msgpack.decode(read_header(dump_ledger(ledger)).body))


GONE = {"wake", "rx_sum", "rx_peak", "turns", "speaker", "repeated", "losses"}
"""Fields of timers and of training progress that older versions stored."""
ENERGY = re.compile(r"\.[01]\.\d+\.2\.2\.\d+")
"""Joules by leak in the book of a GPU or a job: older versions added up floats, now a millijoule is added."""
DERIVED = {"hang", "hang_leave"}
"""Fields that follow the current policy."""


def missing(old: Any, new: Any, path: str = "") -> list[str]:
    """Where `new` differs from what `old` holds; it may hold more."""
    if isinstance(old, dict) and isinstance(new, dict):
        kept = old.keys() - GONE - DERIVED
        return [each for key in kept for each in missing(old[key], new.get(key), f"{path}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
        pairs = enumerate(zip(old, new, strict=False))
        return [each for n, (one, other) in pairs for each in missing(one, other, f"{path}.{n}")]
    more = ENERGY.fullmatch(path) and 0 < new - old < 0.002
    return [] if old == new or more else [f"{path}: {old} became {new}"]


def sorted_sets(value: Any) -> Any:
    """A copy with lists of strings sorted, as sets are stored in any order."""
    if isinstance(value, dict):
        return {key: sorted_sets(one) for key, one in value.items()}
    if isinstance(value, list):
        return sorted(value) if all(isinstance(one, str) for one in value) else [sorted_sets(one) for one in value]
    return value


def played(observations: Iterable[Observation], ledger: Ledger | None = None) -> Ledger:
    ledger = ledger or Ledger()
    for observation in observations:
        advance(ledger, observation)
    return ledger


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(SIZES))
def test_a_story_that_is_cut_in_four_ends_as_one_that_is_not(scenario: str) -> None:
    observations = play(Case(scenario)).observations
    whole, pieces = played(observations), Ledger()
    edges = [len(observations) * n // 4 for n in range(5)]
    for a, b in pairwise(edges):
        pieces = again(played(observations[a:b], pieces))
    assert books(pieces) == books(whole)
    assert pieces.conservation_errors == 0


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(WATERFALL_SCENARIOS))
def test_what_workloads_say_is_kept_as_well(scenario: str) -> None:
    """Job counters continue; only unspent credit from reports is lost. Their first hours have all that is reported."""
    story = simulate(scenario, stories=WATERFALL_SCENARIOS, gpus=10, period_seconds=30).observations
    ledger = played(islice(story, 250))
    told = take_snapshot(again(ledger), DaemonMetadata())
    before = take_snapshot(ledger, DaemonMetadata())
    assert any(job.progress or job.service for job in before.jobs)
    for now, then in zip(told.jobs, before.jobs, strict=True):
        assert now.progress == then.progress
        assert (now.service is None) == (then.service is None)
        if now.service is not None and then.service is not None:
            assert (now.service.tokens, now.service.preemptions) == (then.service.tokens, then.service.preemptions)
        assert now.counters.now.parts == then.counters.now.parts
        assert (now.smallest_slice, now.excess, now.first_work) == (then.smallest_slice, then.excess, then.first_work)
    assert (told.account_totals, told.state_entries, told.detections) == (
        before.account_totals,
        before.state_entries,
        before.detections,
    )


@pytest.mark.parametrize("written", sorted(Path(__file__).with_name("checkpoints").glob("*.bin")), ids=lambda p: p.stem)
def test_what_an_older_version_wrote_is_read_and_written_again_as_it_was(written: Path) -> None:
    ledger, head = Ledger(), read_header(written.read_bytes())
    load_ledger(ledger, written.read_bytes())
    assert missing(sorted_sets(msgspec.msgpack.decode(head.body)), sorted_sets(books(ledger))) == []
    assert sorted_sets(books(again(ledger))) == sorted_sets(books(ledger))
    assert read_header(dump_ledger(ledger)).edges == head.edges


@pytest.mark.parametrize("written", sorted(Path(__file__).with_name("checkpoints").glob("*.bin")), ids=lambda p: p.stem)
def test_who_had_worked_by_an_older_version_s_word_does_not_begin_anew(written: Path) -> None:
    """Older versions stored which indicators apply, and not which of them last."""
    ledger = Ledger()
    load_ledger(ledger, written.read_bytes())
    worked = [gpu.timers for gpu in ledger.gpus.values() if "beginning" not in gpu.timers.signs]
    assert worked
    for timers in worked:
        timers.end_minute(ledger.criteria)
        assert "beginning" not in timers.signs


def test_a_short_reading_that_an_older_version_left_pending_is_read() -> None:
    older = [20 * SECOND, 100, 0.5, 0.9, True, True]
    assert msgspec.convert(older, ShortReading) == ShortReading(
        20 * SECOND, 100, 0.5, 0.9, communicates=True, follows=True
    )


def test_the_clock_of_a_gpu_at_work_is_kept() -> None:
    """It worked at two thirds of the reference clock; the next clock is read at rest."""
    ledger = played([first([device()], [held()]), seen(10, reading(0, 10, sm_clock_hz=1220e6))])
    back, resting = again(ledger), WORKING | {"sm_clock_hz": 345e6, "gpu_utilization": 0.0}
    assert back.gpus["GPU-0"].held_clock == 1220 / 1830
    for one in (ledger, back):
        advance(one, seen(20, reading(10, 20, resting)))
    assert back.gpus["GPU-0"].book.parts == ledger.gpus["GPU-0"].book.parts
    assert back.gpus["GPU-0"].book.parts[LEAK_NAMES.index("throttled")] == pytest.approx(0.15 * 20 * SECOND)


def test_down_time_is_its_holder_s_and_unobserved() -> None:
    ledger = played([first([device()], [held()]), seen(10, reading(0, 10))])
    back = again(ledger)
    advance(back, seen(70, reading(69, 70), devices=(device(),), allocations=(held(),), faults=(DOWN,)))
    book = back.gpus["GPU-0"].book
    assert book.parts[LEAK_NAMES.index("unobserved")] == 59 * SECOND
    assert back.unobserved == {"exporter_down": 59 * SECOND}
    assert book.paid == 70 * SECOND == back.jobs["41"].book.paid
    assert conserved(book)


def test_a_job_that_has_ended_meanwhile_has_what_was_seen_of_it() -> None:
    ledger = played([first([device()], [held()]), seen(10, reading(0, 10))])
    back = again(ledger)
    later = held(owner=OTHER, start=60)
    advance(back, seen(70, reading(69, 70), devices=(device(),), allocations=(later,), faults=(DOWN,)))
    assert back.jobs["41"].book.paid == 10 * SECOND
    assert back.jobs["42"].book.paid == 10 * SECOND
    assert back.gpus["GPU-0"].book.paid == 70 * SECOND


def test_nobody_saw_a_job_begin_while_nobody_looked() -> None:
    """The first kernel may be long past: its time stays unknown, and start-up counts as over."""
    ledger = played([first([device()]), seen(10, reading(0, 10, RESTING))])
    for since, told in ((10.0, 9 * SECOND), (65.0, None)):
        back = again(ledger)
        back.watched_since = round(since * SECOND)
        late = held(owner=OTHER, start=61)
        advance(back, seen(70, reading(69, 70, RESTING), devices=(device(),), allocations=(late,), faults=(DOWN,)))
        assert ("beginning" in back.gpus["GPU-0"].timers.signs) is (told is not None)
        advance(back, seen(71, reading(70, 71)))
        assert back.jobs["42"].first_work == told


def test_a_report_may_open_the_books_of_a_job_that_began_unseen() -> None:
    back = again(played([first([device()]), seen(10, reading(0, 10, RESTING))]))
    back.watched_since = 65 * SECOND
    said = TrainingReport(job_id="42", start=69 * SECOND, end=70 * SECOND, phase="compute")
    advance(back, seen(70, allocations=(held(owner=OTHER, start=61),), reports=(said,)))
    assert not back.jobs["42"].awaits_work


def test_a_zombie_stays_one() -> None:
    ledger = played([first([device()], [held()]), seen(4000, reading(0, 4000, RESTING))])
    assert ledger.gpus["GPU-0"].state is State.ZOMBIE
    back = again(ledger)
    advance(back, seen(4060, reading(4059, 4060, RESTING), devices=(device(),), allocations=(held(),), faults=(DOWN,)))
    assert back.gpus["GPU-0"].state is State.ZOMBIE
    assert back.gpus["GPU-0"].timers.zombies == 1


def test_other_thresholds_hold_after_a_restart() -> None:
    ledger = played([first([device()], [held()]), seen(1200, reading(0, 1200, RESTING))])
    assert ledger.gpus["GPU-0"].state is State.STALLED
    back = again(ledger, Policy(zombie_batch_seconds=600))
    advance(back, seen(1201, reading(1200, 1201, RESTING)))
    assert back.gpus["GPU-0"].state is State.ZOMBIE


def test_instances_rest_and_what_is_left_of_a_board_is_kept() -> None:
    ledger = played([
        first(cut(3, 2), [held("MIG-GPU-0-0-3g")]),
        seen(10, reading(0, 10, uuid="MIG-GPU-0-0-3g"), reading(0, 10, SPINNING, uuid="MIG-GPU-0-3-2g")),
        seen(10, devices=cut(), allocations=()),
        seen(20, reading(10, 20)),
    ])  # fmt: skip
    back = again(ledger)
    assert books(back) == books(ledger)
    assert {uuid: gpu.listed for uuid, gpu in back.gpus.items()} == {
        "GPU-0": True, "MIG-GPU-0-0-3g": False, "MIG-GPU-0-3-2g": False,
    }  # fmt: skip
    assert sum(gpu.book.paid for gpu in back.gpus.values()) == 20 * SECOND
    assert read_header(dump_ledger(back)).edges == {"GPU-0": 20 * SECOND}


@pytest.mark.parametrize(("run", "shared"), [("llm", True), ("#2", False)])
def test_runs_are_shared_by_those_who_name_them(run: str, shared: bool) -> None:
    said = [TrainingReport(job_id=job, start=0, end=SECOND, step=5, steps=5, run=run) for job in ("41", "43")]
    ledger = played([
        first([device(), device("GPU-1", "1")], [held(), held("GPU-1", Owner(job_id="43", user="ada", account="nlp"))]),
        seen(1, reading(0, 1), reading(0, 1, uuid="GPU-1"), reports=tuple(said)),
    ])  # fmt: skip
    back = again(ledger)
    one, two = (back.jobs[job].progress for job in ("41", "43"))
    assert one is not None
    assert two is not None
    assert one.run is back.runs["ada", "", "llm" if shared else "41#2"]
    assert two.run is back.runs["ada", "", "llm" if shared else "43#2"]


def test_a_run_without_a_name_is_its_job_s_alone() -> None:
    said = TrainingReport(job_id="41", start=0, end=SECOND, step=5, steps=5)
    back = again(played([first([device()], [held()]), seen(1, reading(0, 1), reports=(said,))]))
    progress = back.jobs["41"].progress
    assert progress is not None
    assert progress.run.highest == 5
    assert back.runs == {}


def test_an_engine_s_counts_are_kept() -> None:
    said = ServingReport(job_id="41", start=0, end=SECOND, engine="vllm", generated_tokens=100.0, preemptions=3.0)
    back = again(played([first([device()], [held()]), seen(1, reading(0, 1), serving=(said,))]))
    service = back.jobs["41"].service
    assert service is not None
    assert service.tokens["generated"] == 100.0
    assert service.preemptions == 3.0


def test_a_word_that_is_too_old_stays_so() -> None:
    """Stale allocations are still stale after a restart."""
    ledger = played([first([device()], [held()]), seen(400, reading(0, 400), allocations_at=0)])
    back = again(ledger)
    assert back.allocations_at == ledger.allocations_at == 0
    advance(back, seen(410, reading(400, 410), allocations_at=0))
    assert back.jobs["unknown"].book.paid > 0


def test_energy_that_an_older_version_counted_to_fractions_of_a_millijoule_does_not_decrease() -> None:
    """A counter that is lower after an upgrade would be a restart to Prometheus, and all of it counted again."""
    ledger = played([first((device(),)), seen(10, reading(0, 10, energy_joules=1000.0))])
    head = read_header(dump_ledger(ledger))
    body = msgspec.msgpack.decode(head.body)
    assert body[0][0][2].pop() is True
    body[0][0][2][2] = {0: 5.0004, 1: 7.0, 2: 4_100_000_000.123}
    older = msgspec.structs.replace(head, body=msgspec.Raw(msgspec.msgpack.encode(body)))
    restored = Ledger()
    load_ledger(restored, msgspec.msgpack.encode(older))
    (energy,) = (gpu.book.energy for gpu in restored.gpus.values())
    assert energy[:4] == [5001, 7001, 4_100_000_000_124, 0]
    assert next(iter(again(restored).gpus.values())).book.energy == energy


def test_where_other_books_end_ours_begin() -> None:
    ledger = Ledger()
    ledger.paid_since = {"GPU-0": 5 * SECOND}
    gpus = device(), device("GPU-1", "1")
    advance(ledger, Observation(70 * SECOND, 70 * SECOND, devices=gpus, faults=(DOWN,)))
    advance(ledger, seen(71, reading(70, 71), reading(70, 71, uuid="GPU-1")))
    assert ledger.gpus["GPU-0"].book.paid == 66 * SECOND
    assert ledger.gpus["GPU-1"].book.paid == SECOND
    assert ledger.unobserved == {"exporter_down": 65 * SECOND}


def test_jobs_that_leave_are_shown_once() -> None:
    ledger = played([first([device()], [held()]), seen(10, reading(0, 10)), seen(10, allocations=())])
    ledger = again(ledger)
    seen_leaving: list[str] = []
    for at in range(20, 1000, 10):
        advance(ledger, seen(at, reading(at - 10, at, RESTING)))
        view = take_snapshot(ledger, DaemonMetadata())
        seen_leaving += [job.owner.job_id for job in view.departed]
        assert all(job.counters.now.paid == 10 * SECOND for job in view.departed)
    assert seen_leaving == ["41"]


# -- leaks of another version --


def renamed(frozen: bytes, names: dict[str, str]) -> bytes:
    head = read_header(frozen)
    leaks = tuple(names.get(leak, leak) for leak in head.leaks)
    return msgspec.msgpack.encode(CheckpointHeader(head.form, head.at, head.wall, leaks, head.edges, head.body))


def test_leaks_go_by_name_and_what_is_unknown_is_unresolved() -> None:
    """A checkpoint in which `useful` and `memory_bound` are swapped and `hung` has another name."""
    ledger = played([first([device()], [held()]), seen(10, reading(0, 10, WORKING))])
    before = dict(zip(LEAK_NAMES, ledger.gpus["GPU-0"].book.parts, strict=True))
    assert before["useful"]
    other = Ledger()
    load_ledger(other, renamed(dump_ledger(ledger), {"useful": "memory_bound", "memory_bound": "useful"}))
    after = dict(zip(LEAK_NAMES, other.gpus["GPU-0"].book.parts, strict=True))
    assert (after["useful"], after["memory_bound"]) == (before["memory_bound"], before["useful"])
    assert dict(zip(LEAK_NAMES, other.accounts["", "nlp", ""], strict=True)) == after or not any(
        ledger.accounts["", "nlp", ""]
    )
    unknown = Ledger()
    load_ledger(unknown, renamed(dump_ledger(ledger), {"useful": "wisdom"}))
    book = unknown.gpus["GPU-0"].book
    assert book.parts[LEAK_NAMES.index("unresolved")] == before["useful"] + before["unresolved"]

    several = Ledger()
    load_ledger(several, renamed(dump_ledger(ledger), {"useful": "wisdom", "other_compute": "magic"}))
    assert 0 not in (before["useful"], before["other_compute"])
    unresolved = several.gpus["GPU-0"].book.parts[LEAK_NAMES.index("unresolved")]
    assert unresolved == before["useful"] + before["other_compute"] + before["unresolved"]
    assert conserved(book)


# -- invalid checkpoints --


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (b"", "cannot be read"),
        (b"\x93\x01\x02", "cannot be read"),
        (
            msgspec.msgpack.encode(CheckpointHeader(2, 0, 0, LEAK_NAMES, {}, msgspec.Raw(b"\xc0"))),
            "form 2, this version reads form 1",
        ),
        (
            msgspec.msgpack.encode(CheckpointHeader(1, 0, 0, LEAK_NAMES, {}, msgspec.Raw(b"\xc0"))),
            "its books cannot be read",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(frozen: bytes, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_ledger(Ledger(), frozen)


def test_books_that_do_not_add_up_are_refused() -> None:
    ledger = played([first([device()], [held()]), seen(10, reading(0, 10))])
    ledger.gpus["GPU-0"].book.paid += 1
    with pytest.raises(CheckpointError, match="GPU-0 do not add up"):
        again(ledger)


def test_a_share_of_a_gpu_is_one() -> None:
    assert (
        again(played([first(cut(7)), seen(1, reading(0, 1, uuid="MIG-GPU-0-0-7g"))])).gpus["MIG-GPU-0-0-7g"].book.weight
        == PPM
    )
