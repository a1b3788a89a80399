"""Every world of the catalogue: its truth adds up, it repeats, and it tells the story its name says."""

import pytest

from tests.truth import BUILDERS, build, doubts_between, hang_of, is_zombie, random_training_job, truth, truth_between
from tests.truth.causes import (
    CHECKPOINT,
    DATA_STALL,
    EXPOSED_COMMUNICATION,
    FAILURE_RECOVERY,
    HOST_OVERHEAD,
    HUNG,
    IDLE_ALLOCATION,
    PIPELINE_BUBBLE,
    STARTUP,
    THROTTLED,
    UNALLOCATED,
    USEFUL,
)
from tests.truth.world import World

HANGS = sorted(name for name in BUILDERS if name.startswith("hang_"))
LOOKALIKES = sorted(name for name in BUILDERS if name.startswith("lookalike_"))
ZOMBIES = sorted(name for name in BUILDERS if name.startswith("zombie_"))


def share(world: World, cause: str) -> float:
    """Share of the node's time that has a cause."""
    return sum(causes[cause] for causes in truth(world).values()) / world.seconds / len(world.gpus)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_truth_adds_up_to_the_time_paid(name: str) -> None:
    world = build(name, seed=7, seconds=400)
    for causes in truth(world).values():
        assert sum(causes.values()) == pytest.approx(400, abs=1e-7)
        assert all(value >= 0 for value in causes.values())
    for gpu in world.gpus:
        assert gpu.track.end == 400_000
        assert sum(gpu.track.durations) == 400_000


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_load_is_physical(name: str) -> None:
    """A build asserts the order of the activities; here, that the board can do it."""
    world = build(name, seed=8, seconds=200)
    for gpu in world.gpus:
        board = gpu.condition.board
        for load in (load for pattern in gpu.track.patterns for load in pattern.loads):
            assert 0 <= load.tensor <= load.sm + 1e-9 <= load.resident + 2e-9 <= 1 + 3e-9
            assert max(load.pcie_tx, load.pcie_rx) <= board.pcie_bytes
            assert max(load.nvlink_tx, load.nvlink_rx) <= (board.nvlink_bytes or 0.0)
            power, clock = gpu.condition.power_and_clock(load)
            assert board.idle_watts <= power <= gpu.condition.limit_watts
            assert board.idle_hz <= clock <= board.max_hz


@pytest.mark.parametrize("name", ["random_training_job", "hang_network_polling", "inference_bursty", "zombie_keeper"])
def test_the_same_seed_gives_the_same_truth(name: str) -> None:
    assert truth(build(name, seed=3, seconds=300)) == truth(build(name, seed=3, seconds=300))
    assert truth(build(name, seed=3, seconds=300)) != truth(build(name, seed=4, seconds=300))


@pytest.mark.parametrize("name", HANGS)
def test_a_hung_job_never_works_again(name: str) -> None:
    world = build(name, seed=1, seconds=2400)
    hang = hang_of(world)
    assert hang is not None
    before = truth_between(world, 0, hang.onset)
    assert all(causes[HUNG] == 0 for causes in before.values())
    assert sum(causes[USEFUL] for causes in before.values()) > 0
    expected = FAILURE_RECOVERY if name == "hang_crash_loop" else HUNG
    end = world.seconds if hang.end is None else hang.end
    for causes in truth_between(world, hang.onset, end).values():
        assert causes[expected] == pytest.approx(end - hang.onset, abs=1e-6)
    if hang.end is not None:
        assert all(c[UNALLOCATED] > 0 for c in truth_between(world, hang.end, world.seconds).values())


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_goes_on(name: str) -> None:
    world = build(name, seed=1, seconds=5400)
    assert hang_of(world) is None
    assert not world.zombies
    assert share(world, HUNG) == 0
    if name != "lookalike_integer":
        parts = [truth_between(world, k * 1800, (k + 1) * 1800) for k in range(3)]
        assert all(sum(c[USEFUL] for c in part.values()) > 30 for part in parts[1:])


@pytest.mark.parametrize("name", ZOMBIES)
def test_a_zombie_has_nothing_to_do_from_its_beginning_on(name: str) -> None:
    world = build(name, seed=1, seconds=7200)
    assert len(world.zombies) == len(world.gpus)
    for zombie in world.zombies:
        assert is_zombie(world, zombie.uuid, world.seconds - 1)
        assert not is_zombie(world, zombie.uuid, zombie.start - 1)
        causes = truth_between(world, zombie.start, world.seconds)[zombie.uuid]
        assert causes[IDLE_ALLOCATION] == pytest.approx(world.seconds - zombie.start, abs=1e-6)


@pytest.mark.parametrize("name", sorted(name for name in BUILDERS if name.split("_")[0] in {"other", "training"}))
def test_work_has_no_zombies_and_no_hang(name: str) -> None:
    world = build(name, seed=1, seconds=100)
    assert not world.zombies
    assert hang_of(world) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause", "least"),
    [
        ("training_data_parallel_ethernet", EXPOSED_COMMUNICATION, 0.15),
        ("training_pipeline_idle", PIPELINE_BUBBLE, 0.02),
        ("training_pipeline_polling", PIPELINE_BUBBLE, 0.02),
        ("training_images_short_stalls", DATA_STALL, 0.05),
        ("training_images_long_stalls", DATA_STALL, 0.05),
        ("training_host_bound", HOST_OVERHEAD, 0.15),
        ("training_power_capped", THROTTLED, 0.003),
        ("training_clock_locked", THROTTLED, 0.02),
        ("training_saving_often", CHECKPOINT, 0.02),
        ("training_crashing", FAILURE_RECOVERY, 0.01),
        ("training_large_batches", USEFUL, 0.4),
        ("inference_empty", IDLE_ALLOCATION, 0.9),
        ("inference_polling_empty", IDLE_ALLOCATION, 0.9),
        ("lookalike_compile", STARTUP, 0.2),
    ],
)
def test_the_story_shows_in_the_truth(name: str, cause: str, least: float) -> None:
    for seed in range(3):
        assert share(build(name, seed=seed, seconds=2400), cause) > least


def test_a_straggler_makes_the_others_wait() -> None:
    world = build("training_straggler", seed=1, seconds=900)
    exposed = sorted(causes[EXPOSED_COMMUNICATION] for causes in truth(world).values())
    assert exposed[0] < exposed[1] * 0.9
    assert exposed[-1] < exposed[1] * 1.1


def test_seconds_with_two_answers_are_known() -> None:
    world = build("lookalike_slow_save", seed=1, seconds=1800)
    doubts, causes = doubts_between(world, 0, 1800), truth(world)
    for uuid, rows in doubts.items():
        for (first, _), value in rows.items():
            assert 0 <= value <= causes[uuid][first] + 1e-6
    polling = [rows.get((CHECKPOINT, EXPOSED_COMMUNICATION), 0.0) for rows in doubts.values()]
    assert polling[0] == 0.0
    assert min(polling[1:]) > 200


@pytest.mark.slow
def test_random_jobs_differ_and_cover_the_causes() -> None:
    seen: set[str] = set()
    useful = set()
    for seed in range(40):
        causes = next(iter(truth(random_training_job(seed, 1200)).values()))
        seen |= {cause for cause, value in causes.items() if value > 1}
        useful.add(round(causes[USEFUL]))
    assert len(useful) > 25
    assert seen >= {
        USEFUL, STARTUP, CHECKPOINT, DATA_STALL, PIPELINE_BUBBLE, HOST_OVERHEAD, EXPOSED_COMMUNICATION, THROTTLED,
        FAILURE_RECOVERY,
    }  # fmt: skip


def test_unknown_worlds_are_refused() -> None:
    with pytest.raises(KeyError):
        build("no_such_world")
