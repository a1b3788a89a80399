"""The demo's programs report what they actually do, and the core accepts their reports."""

from functools import cache
from itertools import islice
from math import fsum
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Job as Books
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation, Parallel, TrainingReport
from exporter.core.pipeline import advance
from exporter.simulate.boards import BOARDS
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.programs import decoding, disturbed_training, straggling
from exporter.simulate.reporting import reporting_server, reporting_trainer
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from exporter.simulate.workload import Stage, seeded_random
from tests.lookalikes import LOOKALIKES

pytestmark = pytest.mark.slow

HOURS = 2.0
SHORT = 0.5
"""Hours of the stories with another seed or board."""
TRAINING, CHAT = "41001", "inference/chat-0-4"
PERIOD = 2.0


@cache
def story(
    seed: int = 0, board: str = "H100-SXM5-80GB", hours: float = HOURS
) -> tuple[Simulation, tuple[Observation, ...]]:
    simulation = simulate("demo", seed=seed, board=board, period_seconds=PERIOD, duration_seconds=hours * 3600)
    return simulation, tuple(simulation.observations)


@cache
def fed(seed: int = 0, board: str = "H100-SXM5-80GB", hours: float = HOURS) -> Ledger:
    ledger = Ledger()
    for observation in story(seed, board, hours)[1]:
        advance(ledger, observation)
    return ledger


def lost(job: Books, leak: str) -> float:
    """Return one leak's share of a job's GPU time."""
    return job.book.parts[LEAK_NAMES.index(leak)] / job.book.paid


def said() -> list[TrainingReport]:
    """Return the reports of rank 0 in the live part."""
    simulation, observations = story()
    return [r for o in observations for r in o.reports if r.rank == "0" and r.steps and r.start > simulation.live_from]


def dumb(simulation: Simulation) -> Simulation:
    """Return the same node without any reports."""
    jobs = tuple(replace(job, reporting=None, serves=False) for job in simulation.plan.jobs)
    return replace(simulation, plan=replace(simulation.plan, jobs=jobs))


def test_nothing_but_words_is_added_by_speaking() -> None:
    simulation, observations = story()
    silent = dumb(simulation)
    for spoken, unspoken in zip(observations, silent.observations, strict=True):
        assert replace(spoken, reports=(), serving=()) == unspoken
    assert list(simulation.truth) == list(silent.truth)


def outline(stage: Stage) -> tuple[object, ...]:
    """Return a stage without its counts."""
    cycles = tuple(cycle.segments for cycle in stage.cycles)
    return stage.name, stage.ms, cycles, stage.memory, stage.program, stage.context, stage.climates


def test_programs_that_speak_do_what_they_did() -> None:
    board = BOARDS["H100-SXM5-80GB"]
    for add, program in (
        (reporting_trainer, disturbed_training(board, 4, undisturbed_ms=60_000)),
        (reporting_server, decoding(board, 1)),
    ):
        spoken, unspoken = (islice(made(seeded_random("any")), 200) for made in (add(program, board), program))
        assert [outline(stage) for stage in spoken] == [outline(stage) for stage in unspoken]


def test_of_the_demo_two_jobs_speak_and_no_other_story_of_its_table_does() -> None:
    speakers = {
        (name, job.owner.job_id)
        for table in (SCENARIOS, LOOKALIKES)
        for name in table
        for job in simulate(name, stories=table).plan.jobs
        if job.reporting or job.serves
    }
    assert speakers == {("demo", TRAINING), ("demo", CHAT)}
    assert not {"demo"} & (LEAK_SCENARIOS.keys() | WATERFALL_SCENARIOS.keys())


@pytest.mark.parametrize(
    "told", [(), (7, "H100-SXM5-80GB", SHORT), (0, "L40S", SHORT)], ids=["its own", "another seed", "another board"]
)
def test_the_core_believes_every_word(told: tuple[Any, ...]) -> None:
    ledger = fed(*told)
    assert not ledger.refused
    assert not ledger.rejected
    assert not ledger.faults
    assert ledger.conservation_errors == 0


def test_the_training_says_how_far_it_has_come() -> None:
    job = fed().jobs[TRAINING]
    progress = job.progress
    assert progress is not None
    assert (progress.run_id, progress.world, progress.checkpoints, progress.restarts) == ("pretrain-8b", 4, 1, 0)
    assert progress.steps == progress.step
    assert set(progress.ranks) == {"0", "1", "2", "3"}
    assert not any(progress.events.values())
    assert progress.padding == pytest.approx(0.03 * progress.tokens)
    spent = {name: lasted for name, lasted in progress.phases.items() if lasted}
    assert spent.keys() == {"startup", "data", "compute", "communication", "checkpoint"}


@pytest.mark.parametrize(("job_id", "claimed"), [(TRAINING, 0.92 * 0.96), (CHAT, 0.92)])
def test_less_is_claimed_than_the_tensor_cores_did(job_id: str, claimed: float) -> None:
    """Tiles are filled to 0.92, and 0.04 of a step is attention computed again, at whatever clock.

    1 %: start-up is not reported, and sensors see the clock one step low in a fifth of their readings.
    """
    book = fed().jobs[job_id].book
    mfu, pipes = book.reported / book.reportable, book.ofu / book.tensor_seen
    assert mfu / pipes == pytest.approx(claimed, rel=0.01)


def test_what_does_not_move_the_model_is_small_and_visible() -> None:
    """0.404 of the time the tensor cores deliver: 0.04 of it is recomputed, 0.08 + 0.03 x 0.88 unfilled and padded."""
    job = fed().jobs[TRAINING]
    assert 0.01 < lost(job, "recomputation") < 0.02
    assert 0.03 < lost(job, "padding") < 0.05
    assert lost(job, "rework") == 0


@pytest.mark.parametrize("board", BOARDS)
def test_a_step_is_worth_the_same_in_hot_air(board: str) -> None:
    """The batch is the same but takes longer."""
    simulation = simulate("demo", board=board, period_seconds=60, duration_seconds=1800)
    words = [r for o in simulation.observations for r in o.reports if r.steps]
    assert {(r.recompute, r.parallel, r.gpus) for r in words} == {("selective", Parallel(data=4), 1)}
    each = {round((r.tokens or 0.0) / r.steps, 6) for r in words}
    assert len(each) == 1
    lasted = {round((r.end - r.start) / r.steps / SECOND, 1) for r in words}
    assert max(lasted) > 1.3 * min(lasted)


def test_no_stretch_is_told_at_more_than_its_pipes_did() -> None:
    """In every report a step has 450 ms of kernels at 49 %, 38.9 ms of communication and a 12 ms pause of the host."""
    calm = [r for r in said() if not dict(r.phases)["data"]]
    rates = [(r.hardware_flops or 0.0) / ((r.end - r.start) / SECOND) / 989.4e12 for r in calm]
    assert max(rates) < 0.49 * 450 / 500.9
    assert {round((r.model_flops or 0.0) / (r.hardware_flops or 1.0), 6) for r in calm} == {0.96}


def test_the_wait_for_input_is_told_with_the_step_that_it_delays() -> None:
    """Compare with the wait and the copy after it on the hardware."""
    simulation, _ = story()
    waits = [dict(r.phases)["data"] / SECOND for r in said()]
    uuid = simulation.uuids[0]
    truth = [e for e in simulation.truth if e.uuid == uuid and e.at > simulation.live_from]
    ends = [*(entry.at for entry in truth[1:]), simulation.duration_ms * SECOND // 1000]
    real = fsum(
        (end - entry.at) / SECOND
        for entry, end in zip(truth, ends, strict=True)
        if entry.phase in ("waiting for input", "input is copied in")
    )
    assert fsum(waits) == pytest.approx(real, abs=10)
    assert max(waits) < 10
    assert fsum(waits) > 600


def test_the_chat_server_is_busy_and_not_in_trouble() -> None:
    _, observations = story()
    for answer in (answer for o in observations for answer in o.serving):
        assert 30 <= (answer.running or 0) <= 45
        assert (answer.waiting, answer.preemptions) == (0, 0)
        assert 0.3 < (answer.kv_use or 0) < 0.5
        assert {latency.kind for latency in answer.latencies} == {"ttft", "itl", "queue", "e2e"}
    job = fed().jobs[CHAT]
    assert job.service is not None
    assert lost(job, "idle_allocation") == lost(job, "kv_cache_wait") == lost(job, "batching") == 0
    assert 0 < lost(job, "prefill_decode_interference") < 0.05
    # d 0.76 of 0.92 x 0.96, times s 0.72: 0.61 while it decodes.
    assert 0.58 < lost(job, "memory_bound") < 0.64


def test_a_stage_for_whose_mechanism_a_step_has_no_phase_is_refused() -> None:
    board = BOARDS["H100-SXM5-80GB"]
    with pytest.raises(KeyError, match="waiting_peer"):
        list(reporting_trainer(straggling(board, 3), board)(seeded_random("any")))
