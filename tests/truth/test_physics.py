"""Single pieces and patterns, against figures computed by hand."""

from dataclasses import replace

import pytest

from tests.truth.boards import A100, H100, Condition
from tests.truth.causes import (
    ALLOCATION,
    CAUSES,
    COMPUTE_TIME,
    DATA_STALL,
    EXPOSED_COMMUNICATION,
    HOST_OVERHEAD,
    HUNG,
    LOW_PARALLELISM,
    MEMORY_BOUND,
    MODEL_FLOPS,
    OTHER_COMPUTE,
    PIPELINE_BUBBLE,
    THROTTLED,
    USEFUL,
)
from tests.truth.kernels import HOST_GAP
from tests.truth.loads import Load, collective, kernel, launch_bound, mix, spin, wait, worthless
from tests.truth.tracks import Integrals, Pattern, Track, chain, pattern
from tests.truth.training import Pipeline, Plan, train
from tests.truth.world import Job, World, new_world, truth, truth_between

GEMM = kernel("gemm", sm=0.9, tensor=0.5, dram=0.3)
COPY = kernel("copy", sm=0.8, dram=0.85, memory_bound=True)


def one_gpu(*parts: tuple[float, Load | Pattern], locked_hz: float | None = None) -> World:
    """Return a world with one GPU that does the parts, each for its milliseconds."""
    world = new_world("hand", 0, sum(length for length, _ in parts) / 1e3, gpus=1, locked_hz=locked_hz)
    for length, what in parts:
        world.gpus[0].track.add(length, what)
    return world.finish()


def seconds(world: World) -> dict[str, float]:
    (causes,) = truth(world).values()
    return {cause: value for cause, value in causes.items() if value}


def test_the_slack_of_a_kernel_goes_to_its_own_nature() -> None:
    at_reference = one_gpu((10_000, GEMM), locked_hz=1830e6)
    assert seconds(at_reference) == pytest.approx({USEFUL: 5, LOW_PARALLELISM: 1, OTHER_COMPUTE: 4})
    assert seconds(one_gpu((10_000, COPY))) == pytest.approx({LOW_PARALLELISM: 2, MEMORY_BOUND: 8})
    assert seconds(one_gpu((10_000, collective(sm=0.1)))) == pytest.approx({EXPOSED_COMMUNICATION: 10})


def test_half_the_reference_clock_throttles_half_of_the_tensor_work() -> None:
    expected = {USEFUL: 2.5, THROTTLED: 2.5, LOW_PARALLELISM: 1, OTHER_COMPUTE: 4}
    assert seconds(one_gpu((10_000, GEMM), locked_hz=915e6)) == pytest.approx(expected)


def test_a_clock_above_the_reference_adds_useful_time_out_of_the_slack() -> None:
    """1980 of 1830 MHz: 5.41 s at the data sheet's peak in 5 s of tensor work; the slack of 5 s shrinks."""
    assert Condition(H100, 700.0).power_and_clock(GEMM)[1] == 1980e6
    assert Condition(H100, 700.0).clock_ratio(GEMM) == pytest.approx(1980 / 1830)
    useful = 5 * 1980 / 1830
    left = (10 - useful) / 5
    expected = {USEFUL: useful, LOW_PARALLELISM: left, OTHER_COMPUTE: 4 * left}
    assert seconds(one_gpu((10_000, GEMM))) == pytest.approx(expected)


def test_gaps_between_small_kernels_are_the_hosts() -> None:
    small = kernel("small", sm=0.5, tensor=0.25)
    world = one_gpu((10_000, launch_bound(small, 0.4, cause=HOST_OVERHEAD, driver=0.8)), locked_hz=1830e6)
    expected = {USEFUL: 1.0, LOW_PARALLELISM: 2.0, OTHER_COMPUTE: 1.0, HOST_OVERHEAD: 6.0}
    assert seconds(world) == pytest.approx(expected)


def test_a_hung_job_loses_its_tensor_work_too() -> None:
    assert seconds(one_gpu((10_000, worthless(GEMM, HUNG)))) == pytest.approx({HUNG: 10})


def test_power_by_hand() -> None:
    """110 + 15 + 85 x 0.9 + 450 x 0.5 + 170 x 0.3 = 477.5 W."""
    assert Condition(H100, 700.0).power_and_clock(GEMM) == pytest.approx((477.5, 1980e6))
    assert Condition(H100, 700.0).power_and_clock(wait(DATA_STALL)) == (110.0, 1980e6)
    assert Condition(H100, 700.0).power_and_clock(wait(DATA_STALL, context=False)) == (69.0, 345e6)


def test_clock_under_a_power_limit_by_hand() -> None:
    """Demand 367.5 W above 110 W, room 183.75 W: 1980 MHz x 0.5^(1/2.4) = 1483.3, thus 1470 MHz in steps of 15."""
    condition = Condition(H100, 293.75)
    assert condition.power_and_clock(GEMM) == (293.75, 1470e6)
    assert condition.clock_ratio(GEMM) == pytest.approx(1470 / 1830)


def test_better_silicon_draws_less() -> None:
    assert (
        Condition(A100, 400.0, silicon=0.95).power_and_clock(GEMM)[0] < Condition(A100, 400.0).power_and_clock(GEMM)[0]
    )


def test_a_mixture_is_the_mean_of_its_parts() -> None:
    both = mix("both", ((3, GEMM), (1, HOST_GAP)))
    assert (both.resident, both.sm, both.tensor) == pytest.approx((0.75, 0.675, 0.375))
    assert dict(both.losses) == pytest.approx({LOW_PARALLELISM: 0.075, OTHER_COMPUTE: 0.3, HOST_OVERHEAD: 0.25})


def test_doubts_of_a_mixture_are_weighted() -> None:
    bubble = spin(PIPELINE_BUBBLE, doubt=EXPOSED_COMMUNICATION)
    assert mix("m", ((1, bubble), (3, GEMM))).doubts == ((PIPELINE_BUBBLE, EXPOSED_COMMUNICATION, 0.25),)


def test_impossible_loads_are_refused() -> None:
    with pytest.raises(AssertionError):
        kernel("no", sm=0.5, tensor=0.6)
    with pytest.raises(AssertionError):
        replace(GEMM, losses=())


def test_a_pattern_keeps_its_shares_in_a_stretched_block() -> None:
    step = pattern("step", (1, GEMM), (3, wait(DATA_STALL)))
    world = one_gpu((4_000, step), locked_hz=1830e6)
    assert seconds(world) == pytest.approx({USEFUL: 0.5, LOW_PARALLELISM: 0.1, OTHER_COMPUTE: 0.4, DATA_STALL: 3})
    (first,) = truth_between(world, 0.5, 1.5).values()
    assert (first[DATA_STALL], first[USEFUL]) == pytest.approx((0.5, 0.25))


def test_a_chain_of_patterns() -> None:
    inner = pattern("inner", (1, GEMM), (1, COPY))
    whole = chain("whole", (1, inner), (1, HOST_GAP))
    assert whole.shares == pytest.approx((0.25, 0.25, 0.5))
    assert whole.ends[-1] == 1.0


def test_trimming_cuts_within_a_pattern() -> None:
    track = Track()
    track.add(1000, COPY)
    track.add(1000, pattern("step", (1, GEMM), (1, HOST_GAP)))
    track.add(1000, COPY)
    track.trim(1750)
    assert track.end == 1750
    ends = [(segment.load.name, segment.start, segment.end) for segment in track.segments()]
    assert ends == [
        ("copy", 0, 1000), ("gemm", 1000, pytest.approx(1500)), (HOST_GAP.name, pytest.approx(1500), 1750),
    ]  # fmt: skip


def test_integrals_of_an_empty_time_are_zero() -> None:
    track = Track()
    track.add(1000, GEMM)
    assert Integrals(track, lambda load: [load.tensor]).until([0, 0.0, 1000, 5000]) == [[0, 0, 0.5, 0.5]]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_of_one_forward_one_backward(stages: int, microbatches: int) -> None:
    """Share of the step without work: (stages - 1) / (microbatches + stages - 1)."""
    plan = Plan(
        work=pattern("work", (1, GEMM)), step_ms=24_000, collective=collective(), jitter=0.0, skew=0.0, gap_ms=0.0,
        hiccups=0.0, startup_s=0.0, pipeline=Pipeline(stages=stages, microbatches=microbatches),
    )  # fmt: skip
    whole = 24.0 * (microbatches + stages - 1) / microbatches
    world = new_world("bubble", 0, whole * 5)
    train(world, plan, Job("1"))
    for causes in truth(world.finish()).values():
        assert causes[PIPELINE_BUBBLE] / world.seconds == pytest.approx(
            (stages - 1) / (microbatches + stages - 1), abs=2e-3
        )


def test_every_cause_has_one_layer() -> None:
    layers = [{USEFUL}, ALLOCATION, COMPUTE_TIME, MODEL_FLOPS]
    assert sorted(cause for layer in layers for cause in layer) == sorted(CAUSES)
