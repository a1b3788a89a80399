"""Simulated reports agree with the GPU activity, are never early, and are valid messages."""

from collections import defaultdict
from functools import cache
from itertools import islice, pairwise

import msgspec
import pytest

from exporter.core.model import MS, PHASES, SECOND, Observation, Owner, ServingReport, TrainingReport
from exporter.simulate import reporting
from exporter.simulate.boards import BOARDS
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.plan import Plan, SimulatedJob
from exporter.simulate.reporting import reports, servings
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.stages import idle_part, phase_stage, steps
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from exporter.simulate.workload import (
    Cycle,
    Load,
    ReportingOptions,
    Segment,
    ServingCounts,
    Stage,
    StepCounts,
    absent,
    seeded_random,
)
from exporter.training.message import Schedule, bubble_share, decode_message
from tests.each import each
from tests.lookalikes import LOOKALIKES
from tests.test_simulate import check_gaps, check_reading

pytestmark = pytest.mark.slow

TABLE = LEAK_SCENARIOS | WATERFALL_SCENARIOS | {"demo": SCENARIOS["demo"]}
FLOPS_A_TOKEN = 6 * 8e9
"""FLOPs per token of the model that all training jobs here train: 8e9 parameters."""
TOKENS_A_SECOND = 60_000
"""Tokens per millisecond of the model that all servers here serve, at one GPU's peak."""
ALONE_LOSES = 0.02
"""Share of unreported work: steps and polls that are unfinished at the end."""

stories = each("story", TABLE)


class Played(msgspec.Struct, frozen=True):
    """A simulation, and its reports and polls."""

    simulation: Simulation
    observations: tuple[Observation, ...]

    @property
    def reports(self) -> list[TrainingReport]:
        return [report for o in self.observations for report in o.reports]

    @property
    def servings(self) -> list[ServingReport]:
        return [answer for o in self.observations for answer in o.serving]

    def by_process(self) -> dict[tuple[str, str], list[TrainingReport]]:
        said = defaultdict(list)
        for report in self.reports:
            said[report.job_id, report.rank].append(report)
        return said

    def by_replica(self) -> dict[tuple[str, ...], list[ServingReport]]:
        said = defaultdict(list)
        for answer in self.servings:
            said[answer.job_id, *answer.uuids].append(answer)
        return said


@cache
def play(story: str, *, seed: int = 0, period: float = 0.0) -> Played:
    row = TABLE[story]
    gpus = max(row.min_gpus, {"idle": 4, "demo": 8}.get(story[:4], 2))
    period = period or (60.0 if row.duration_seconds > 3600 else 5.0)
    simulation = simulate(story, stories=TABLE, seed=seed, gpus=gpus, period_seconds=period)
    return Played(simulation, tuple(simulation.observations))


def really(simulation: Simulation, field: str, *, jobs: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return GPU-seconds of a share in GroundTruth, by GPU, of all jobs or of these."""
    total: defaultdict[str, float] = defaultdict(float)
    by_gpu = defaultdict(list)
    for entry in simulation.truth:
        by_gpu[entry.uuid].append(entry)
    for uuid, entries in by_gpu.items():
        ends = [*(entry.at for entry in entries[1:]), simulation.duration_ms * MS]
        for entry, end in zip(entries, ends, strict=True):
            if not jobs or entry.job_id in jobs:
                clock = min(1.0, entry.clock_ratio) if field == "tensor_active" else 1.0
                total[uuid] += getattr(entry, field) * clock * (end - entry.at) / SECOND
    return total


@stories
def test_the_hardware_does_what_physics_allows(story: str) -> None:
    run = play(story)
    for uuid in run.simulation.uuids:
        readings = [r for o in run.observations for r in o.readings if r.uuid == uuid]
        check_gaps(run.simulation, readings)
        for reading in readings:
            check_reading(reading, run.simulation)


@stories
def test_a_report_comes_with_the_first_observation_after_it_was_made(story: str) -> None:
    run = play(story)
    for before, now in pairwise(run.observations):
        first = before.at == 0
        told: tuple[TrainingReport | ServingReport, ...] = (*now.reports, *now.serving)
        for said in told:
            assert said.start % MS == said.end % MS == 0
            assert said.start <= said.end <= now.at
            assert before.at < said.end or (first and said.end == 0)
        assert [r.end for r in now.reports] == sorted(r.end for r in now.reports)
    assert not run.observations[0].reports


@stories
def test_a_process_tells_each_moment_once(story: str) -> None:
    for said in play(story).by_process().values():
        for before, after in pairwise(said):
            assert before.end <= after.start
            if not after.restart and before.end < after.start:
                assert after.start == after.end  # the first report of a process: a phase begins


@stories
def test_steps_follow_one_another_but_for_restarts(story: str) -> None:
    for said in play(story).by_process().values():
        last, highest = 0, 0
        for report in said:
            if report.highest_step is not None:
                assert report.highest_step == highest
            if report.step is None:
                assert not report.steps
                continue
            assert report.step == last + report.steps or (report.phases and not report.steps)
            last, highest = report.step, max(highest, report.step)


@stories
def test_what_is_reported_is_plausible(story: str) -> None:
    for report in play(story).reports:
        told = dict(report.phases)
        assert set(told) <= set(PHASES)
        assert len(told) == len(report.phases)
        assert all(lasted >= 0 for lasted in told.values())
        assert sum(told.values()) <= report.end - report.start
        assert (report.padding or 0) <= (report.tokens or 0)
        assert 0 <= (report.bubble or 0) < 1
        assert report.tokens is None or report.model_flops == pytest.approx(FLOPS_A_TOKEN * report.tokens)
        assert (report.model_flops or 0) <= (report.hardware_flops or 1e30)
        assert set(report.uuids) <= set(play(story).simulation.uuids)


@stories
def test_every_report_could_have_been_sent(story: str) -> None:
    """Return the report as a message of the published schema."""
    for report in play(story).reports[:400]:
        message = {
            "v": 1, "at": report.end, "seconds": (report.end - report.start) / SECOND, "run": report.run,
            "rank": int(report.rank), "world_size": report.world_size, "gpus": report.gpus, "step": report.step,
            "steps": report.steps, "highest_step": report.highest_step, "tokens": report.tokens,
            "padding": report.padding, "model_flops": report.model_flops, "hardware_flops": report.hardware_flops,
            "dtype": report.dtype, "recompute": report.recompute, "phase": report.phase,
            "phases": {name: lasted / SECOND for name, lasted in report.phases}, "checkpoints": report.checkpoints,
            "restart": report.restart, "loss": report.loss,
        }  # fmt: skip
        sent = {name: value for name, value in message.items() if value is not None}
        assert decode_message(msgspec.json.encode(sent)).step == report.step


@stories
def test_flops_are_no_more_than_the_tensor_cores_did(story: str) -> None:
    """Nor are they less where nothing is recomputed, apart from steps unfinished at the end.

    The demo has more interrupted steps, and partially filled tiles.
    """
    run = play(story)
    peak = run.simulation.board.peak_flops
    told: defaultdict[str, float] = defaultdict(float)
    for report in run.reports:
        told[report.job_id] += report.hardware_flops or report.model_flops or 0.0
    for answer in run.servings:
        told[answer.job_id] += (answer.flops or 0.0) * answer.gpus
    for job, flops in told.items():
        busy = sum(really(run.simulation, "tensor_active", jobs=frozenset({job})).values()) * peak
        assert flops <= busy * 1.0001
        twice = {"recomputation": 0.75, "demo": 0.95}.get(story, 1.0)
        assert flops >= twice * busy * (1 - ALONE_LOSES) - 5 * peak


@pytest.mark.parametrize(
    ("story", "phase", "field"),
    [
        ("data_stall", "data", "waiting_input_share"), ("exposed_communication", "communication", "exchanging_share"),
        ("training_waterfall", "bubble", "waiting_peer_share"), ("checkpoint", "checkpoint", "copying_share"),
        ("carpenter_told", "data", "waiting_input_share"),
    ],
)  # fmt: skip
def test_seconds_by_phase_are_those_the_gpu_spent(story: str, phase: str, field: str) -> None:
    """Copying a batch counts as data (50 ms of 1,000), as do start-up copies; a hang polls for 750 s per GPU."""
    run = play(story)
    told = sum(dict(report.phases).get(phase, 0) * report.gpus for report in run.reports) / SECOND
    real = sum(really(run.simulation, field).values())
    if story == "data_stall":
        real *= 600 / 550
    if story == "checkpoint":
        real -= 2 * 20
    if story == "training_waterfall":
        real -= 8 * 750
    assert told == pytest.approx(real, rel=0.01)


@stories
def test_engines_answer_every_five_seconds_while_they_serve(story: str) -> None:
    for said in play(story).by_replica().values():
        for answer in said:
            assert answer.end - answer.start == 5 * SECOND
            assert answer.end % (5 * SECOND) == 0
        for before, after in pairwise(said):
            assert before.end <= after.start


@stories
def test_what_an_engine_says_is_possible(story: str) -> None:
    for answer in play(story).servings:
        assert 0 <= (answer.running or 0) <= (answer.slots or 0)
        assert 0 <= (answer.kv_use or 0) <= 1
        assert (answer.accepted_tokens or 0) <= (answer.drafted_tokens or 0)
        assert (answer.accepted_tokens or 0) <= (answer.generated_tokens or 0)
        assert (answer.recomputed_tokens or 0) <= (answer.prompt_tokens or 0)
        assert (answer.calm_inter_token_seconds or 0) <= (answer.inter_token_seconds or 1)
        assert all(0 < latency.p50 <= latency.p95 <= latency.p99 for latency in answer.latencies)
        assert bool(answer.recomputed_tokens) <= bool(answer.preemptions)


@stories
def test_tokens_cost_tensor_time(story: str) -> None:
    """Count prompt and draft tokens, and one token per pass; allow 2 % for rounding (waterfalls) and polls."""
    run = play(story)
    peak = run.simulation.board.peak_flops
    for said in run.by_replica().values():
        tokens = sum(
            (a.prompt_tokens or 0) + (a.drafted_tokens or 0) + (a.generated_tokens or 0) - (a.accepted_tokens or 0)
            for a in said
        )
        flops = sum((a.flops or 0) * a.gpus for a in said)
        assert tokens == pytest.approx(flops / peak * TOKENS_A_SECOND, rel=0.02, abs=200)


@stories
def test_the_time_between_tokens_is_what_the_batch_makes_of_it(story: str) -> None:
    """Requests in the batch over tokens per second obey Little's law, except where the kind of traffic changes."""
    said = play(story).servings
    steady = [b for a, b in pairwise(said) if a.uuids == b.uuids and a.running == b.running]
    for answer in steady:
        itl = [latency.p50 for latency in answer.latencies if latency.kind == "itl"]
        if itl and answer.generated_tokens:
            rate = answer.generated_tokens / 5.0
            assert itl[0] == pytest.approx((answer.running or 0) / rate, rel=0.08)
            if answer.inter_token_seconds:
                assert answer.inter_token_seconds == pytest.approx(itl[0], rel=0.05)


@pytest.mark.parametrize("story", ["checkpoint", "rework", "pipeline_bubble", "idle_allocation", "kv_cache_pressure"])
def test_what_is_said_does_not_depend_on_who_looks(story: str) -> None:
    """Reports do not depend on the period of the readings, noise and seed."""
    once, rarely, other = play(story), play(story, period=60.0), play(story, seed=3)
    end = rarely.observations[-1].at
    assert [r for r in once.reports if r.end <= end] == rarely.reports
    assert [a for a in once.servings if a.end <= end] == rarely.servings
    assert [(r.end, r.step) for r in once.reports] == [(r.end, r.step) for r in other.reports]


def test_start_moves_what_is_said() -> None:
    base, moved = (simulate("checkpoint", stories=LEAK_SCENARIOS, gpus=2, start=start) for start in (0, 5 * SECOND))
    for ours, theirs in zip(base.observations, moved.observations, strict=True):
        assert [(r.start + 5 * SECOND, r.end + 5 * SECOND, r.step) for r in ours.reports] == [
            (r.start, r.end, r.step) for r in theirs.reports
        ]


def test_programs_that_have_nothing_to_say_say_nothing() -> None:
    for table in (SCENARIOS, LOOKALIKES):
        for story in table.keys() - {"demo"}:
            simulation = simulate(story, stories=table, period_seconds=60, duration_seconds=300)
            assert not any(o.reports or o.serving for o in simulation.observations)


def test_a_phase_is_told_when_it_begins_and_when_it_ends() -> None:
    """Rank 0 reports for both GPUs: from 20 s on 100 steps of 1 s, then 96 s of checkpoint."""
    said = play("checkpoint").reports
    assert {(report.rank, report.gpus) for report in said} == {("0", 2)}
    begins = [report for report in said if report.phase == "checkpoint"]
    ends = [report for report in said if dict(report.phases).get("checkpoint")]
    assert [report.end // SECOND for report in begins] == [120 + 196 * k for k in range(6)]
    assert [report.end // SECOND for report in ends] == [216 + 196 * k for k in range(6)]
    assert all(report.start == report.end for report in begins)
    assert all(report.checkpoints == 1 and report.end - report.start == 96 * SECOND for report in ends)
    assert said[0].phase == "startup"
    assert said[0].start == said[0].end == 0
    steps = [report for report in said if report.steps]
    assert all(report.end - report.start == 2 * SECOND and report.steps == 2 for report in steps)
    one_gpu = 0.6 * 989.4e12
    assert {round((report.model_flops or 0) / one_gpu / 2, 6) for report in steps} == {2.0}


def test_a_run_goes_back_to_its_checkpoint() -> None:
    """300 steps, then 21 to 300 twice, then on to 590; the restored step is known when the restore ends."""
    for said in play("rework").by_process().values():
        restarts = [report for report in said if report.restart]
        assert [report.phase for report in restarts] == ["restore", "restore"]
        assert [report.highest_step for report in restarts] == [300, 300]
        assert [report.step for report in said if dict(report.phases).get("restore")] == [20, 20]
        assert sum(report.steps for report in said) == 300 + 280 + 570
        assert max(report.step or 0 for report in said) == 590


def test_the_dead_and_the_stuck_are_silent() -> None:
    stuck = play("hung")
    assert max(report.end for report in stuck.reports) == 600 * SECOND
    gone = play("idle_allocation_twin")
    assert max(answer.end for answer in gone.servings) == 315 * SECOND  # at 320 s the server is gone
    assert max(report.end for report in gone.reports) == 1200 * SECOND


def test_a_server_nobody_asks_says_so() -> None:
    late = [answer for answer in play("idle_allocation").servings if answer.start >= 320 * SECOND]
    assert len(late) == 176
    assert all(not (a.running or a.waiting or a.generated_tokens or a.prompt_tokens) for a in late)


def test_a_pipelines_bubble_is_what_its_schedule_leaves() -> None:
    """With 4 stages and 4 microbatches, the bubble and each GPU's polling are 3/7 of each step."""
    run = play("pipeline_bubble")
    assert {report.bubble for report in run.reports if report.steps} == {3 / 7}
    assert {report.parallel.pipeline for report in run.reports if report.parallel} == {4}
    assert bubble_share(Schedule(stages=4, microbatches=4)) == 3 / 7
    polled = really(run.simulation, "waiting_peer_share")
    assert all(seconds == pytest.approx(3 / 7 * 1179.5, abs=1) for seconds in polled.values())


def test_stories_run_on_other_boards() -> None:
    for board in ("A100-SXM4-80GB", "L40S", "B200-SXM"):
        for story in LEAK_SCENARIOS:
            gpus = max(LEAK_SCENARIOS[story].min_gpus, 2)
            simulation = simulate(
                story, stories=LEAK_SCENARIOS, board=board, gpus=gpus, period_seconds=60, duration_seconds=180
            )
            for observation in simulation.observations:
                for reading in observation.readings:
                    check_reading(reading, simulation)


def test_only_a_story_that_needs_it_knows_the_slices() -> None:
    for story, slices in (("oversized_allocation", 7), ("batching", 0)):
        first = next(simulate(story, stories=LEAK_SCENARIOS).observations)
        assert {device.spec.slices for device in first.devices or () if device.spec} == {slices}


def test_a_cycle_may_have_empty_segments() -> None:
    """The first and the last stage of a pipeline have such segments."""
    run = play("pipeline_bubble")
    stages = run.simulation.plan.jobs[0].stages(seeded_random("any"))
    stage = next(stage for stage in stages if stage.name == "training")
    assert all(cycle.ms == 700 for cycle in stage.cycles)
    assert [cycle.segments[0].ms for cycle in stage.cycles] == [0, 100, 200, 300]


def told_of(*stages: Stage, hold_ms: int = 60_000) -> list[TrainingReport]:
    """Return the reports of a one-GPU job that runs these stages and is killed at the end."""
    job = SimulatedJob(
        owner=Owner("1"), slots=(0,), stages=lambda _: iter(stages), hold_ms=hold_ms,
        reporting=ReportingOptions(run="r"),
    )  # fmt: skip
    return list(reports(Plan(jobs=(job,)), ("GPU-0",), board=BOARDS["H100-SXM5-80GB"], seed=0))


def seven(ms: int, *, after: int = 0) -> Stage:
    """Return a stage of steps of 300 ms of waiting for data and 400 ms of kernels."""
    cycle = Cycle(Segment(300.0, Load(), "waiting_input"), Segment(400.0, Load(engine=1.0), "computing"))
    return Stage("steps", ms, (cycle,), step=StepCounts(phases=("data", "compute"), model_flops=7.0, after=after))


def test_a_report_ends_with_the_first_step_that_is_due() -> None:
    """Reports follow 3 steps of 700 ms, or the end of a stage; after a kill at 9.8 s none is sent, as none was due."""
    killed, ended = told_of(seven(60_000), hold_ms=10_000), told_of(seven(9_800))
    assert [(r.start // MS, r.end // MS, r.steps, r.step) for r in killed[1:]] == [
        (0, 2100, 3, 3), (2100, 4200, 3, 6), (4200, 6300, 3, 9), (6300, 8400, 3, 12),
    ]  # fmt: skip
    assert ended[:5] == killed
    assert [(r.start // MS, r.end // MS, r.steps, r.step) for r in ended[5:]] == [(8400, 9800, 2, 14)]
    assert {dict(r.phases)["data"] // MS for r in killed[1:]} == {900}
    assert {r.model_flops for r in killed[1:]} == {21.0}


def test_a_wait_in_the_midst_of_steps_is_told_with_the_next_of_them() -> None:
    """Two waits of 5 s and 400 ms follow 1.4 s of steps; another one precedes all steps."""
    step = StepCounts(phases=("data",), within=True)
    long, short = (Stage("waits", ms, (Cycle(Segment(100.0, Load(), "idle")),), step=step) for ms in (5_000, 400))
    _, one, two, three = told_of(seven(1_400), long, short, seven(60_000, after=2), hold_ms=10_000)
    assert (one.start // MS, one.end // MS, dict(one.phases)["data"] // MS) == (0, 1_400, 600)
    assert (two.start // MS, two.end // MS, two.steps, dict(two.phases)["data"] // MS) == (1_400, 7_500, 1, 5_700)
    assert (three.start // MS, three.end // MS, three.steps, dict(three.phases)["data"] // MS) == (7_500, 9_600, 3, 900)
    begins, ends, first = told_of(short, seven(60_000), hold_ms=3_000)
    assert (begins.phase, ends.phases) == ("data", (("data", 400 * MS),))
    assert (first.start // MS, dict(first.phases)["data"] // MS) == (400, 900)


def test_an_unfinished_step_is_no_step() -> None:
    """The first stage ends 300 ms into its second step, whose time is reported but not its work."""
    first, one, two = told_of(seven(1000), seven(60_000, after=1), hold_ms=4_000)
    assert first.start == first.end == 0
    assert (one.start // MS, one.end // MS, one.steps, dict(one.phases)["data"] // MS) == (0, 700, 1, 300)
    assert (two.start // MS, two.end // MS, two.steps, two.step) == (700, 3100, 3, 4)
    assert dict(two.phases)["data"] // MS == 900


@pytest.mark.parametrize(("now", "passed"), [(0, 0), (300, 0), (650, 350), (700, 400), (1100, 500), (1400, 800)])
def test_how_much_of_a_segment_has_passed(now: int, passed: int) -> None:
    """The segment lasts 400 ms and begins 300 ms into each cycle of 700 ms."""
    assert reporting._time_in_segment(now, 300.0, 400.0, 700.0) == passed


def test_who_is_killed_in_a_phase_does_not_tell_its_end() -> None:
    board = BOARDS["H100-SXM5-80GB"]
    restoring = phase_stage("restoring", 5000, idle_part(1000.0, "restore"), restart=True, resumes=7, highest=9)
    for hold, words in ((4000, [(0, 0)]), (9000, [(0, 0), (0, 5000)])):
        told = told_of(restoring, steps(board, 2, idle_part(1000.0, "data"), after=7), hold_ms=hold)
        assert [(r.start // MS, r.end // MS) for r in told][:2] == words
        assert (told[0].phase, told[0].restart, told[0].step) == ("restore", True, None)
        assert [r.step for r in told[1:]] == ([] if hold == 4000 else [7, 9])
        assert {r.highest_step for r in told[:2]} == {9}


@pytest.mark.parametrize("late", [True, False])
def test_an_engine_is_asked_every_five_seconds_and_counts_from_the_answer_before(late: bool) -> None:
    """The engine responds from 7 s on, generates 10 tokens per second, 20 from 12.5 s on, and stops at 21 s.

    `late`: its job begins when it first responds.
    """
    cycle = Cycle(Segment(100.0, Load(engine=1.0), "computing"))
    some = [
        Stage(
            "serving", ms, (cycle,), service=ServingCounts(running=tokens, generated_tokens=tokens, flops=tokens * 1.5)
        )
        for ms, tokens in ((5_500, 1), (8_500, 2))
    ]
    stages = some if late else [absent("none", 7_000), *some]
    begins = 7_000 if late else 0
    job = SimulatedJob(owner=Owner("1"), slots=(0, 1), stages=lambda _: iter(stages), serves=True, start_ms=begins)
    told = list(islice(servings(Plan(jobs=(job,)), ("GPU-0", "GPU-1"), board=BOARDS["H100-SXM5-80GB"], seed=0), 3))
    assert [(a.start // SECOND, a.end // SECOND, a.generated_tokens, a.flops, a.running) for a in told] == [
        (10, 15, 75, 112.5, 2), (15, 20, 100, 150, 2),
    ]  # fmt: skip
    assert {(a.gpus, a.uuids) for a in told} == {(2, ("GPU-0", "GPU-1"))}
