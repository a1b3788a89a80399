"""Jobs that hang: they work for a while, then never make progress again. Each deserves one page.

All time of a hung job counts as hung, whatever its kernels do, except in a crash loop: there every attempt is recovery,
and hung or startup are as fair.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tests.truth.causes import FAILURE_RECOVERY, HUNG, STARTUP
from tests.truth.kernels import gemm, small_kernel
from tests.truth.loads import GB, UNUSED, Load, launch_bound, mix, spin, wait, worthless
from tests.truth.training import Run
from tests.truth.training_library import RECIPES
from tests.truth.world import GPUS, Hang, Job, Progress, World, new_world

FOREVER_MS = 10**10


@dataclass(frozen=True)
class Frozen:
    """What a hung job does: `loads` of each rank, one after the other, for `piece_ms` each, over and over."""

    what: str
    culprit: int | None
    loads: tuple[tuple[Load, ...], ...]
    piece_ms: tuple[float, float] = (FOREVER_MS, FOREVER_MS)


Freeze = Callable[[Random, int], Frozen]


def _polling(rng: Random) -> Load:
    return spin(HUNG, sm=rng.uniform(0.05, 0.24), watts=rng.uniform(5, 60), dram=rng.uniform(0.0, 0.01))


def _others(rng: Random, ranks: int, culprit: int, its: Load) -> tuple[tuple[Load, ...], ...]:
    """Every rank polls but the culprit."""
    polling = _polling(rng)
    return tuple((its if rank == culprit else polling,) for rank in range(ranks))


def all_poll(rng: Random, ranks: int) -> Frozen:
    """A lost message: every rank polls in the same collective."""
    polling = _polling(rng)
    return Frozen("all ranks poll in a collective", None, tuple((polling,) for _ in range(ranks)))


def crashed_rank(rng: Random, ranks: int) -> Frozen:
    """One process has crashed and waits, with or without its context; the others poll."""
    culprit = rng.randrange(ranks)
    its = wait(HUNG, context=rng.random() < 0.5)
    return Frozen("one rank has crashed, the others poll", culprit, _others(rng, ranks, culprit, its))


def stuck_on_storage(rng: Random, ranks: int) -> Frozen:
    """One process waits for storage that never answers; the others poll."""
    culprit = rng.randrange(ranks)
    return Frozen("one rank is stuck on storage, the others poll", culprit, _others(rng, ranks, culprit, wait(HUNG)))


def network_polling(rng: Random, ranks: int) -> Frozen:
    """A collective that polls a network card: PCIe traffic that varies by 35 % and moves nothing."""
    base = rng.uniform(0.02, 0.6) * GB
    sm, watts = rng.uniform(0.05, 0.2), rng.uniform(10, 60)
    loads = tuple(spin(HUNG, sm=sm, watts=watts, pcie=base * rng.uniform(0.65, 1.35)) for _ in range(16))
    shuffled = tuple(tuple(rng.sample(loads, len(loads))) for _ in range(ranks))
    return Frozen("all ranks poll a network card", None, shuffled, piece_ms=(300.0, 4000.0))


def persistent_kernel(rng: Random, ranks: int) -> Frozen:
    """A persistent kernel with a warp on every SM that waits for a flag."""
    polling = spin(HUNG, sm=rng.uniform(0.97, 1.0), watts=rng.uniform(0, 40))
    return Frozen("a persistent kernel waits on all SMs", None, tuple((polling,) for _ in range(ranks)))


def endless_computation(rng: Random, ranks: int) -> Frozen:
    """One rank computes for ever (a loop that does not converge); the others poll."""
    culprit = rng.randrange(ranks)
    its = worthless(mix("loop", ((0.7, gemm(rng)), (0.3, small_kernel(rng)))), HUNG)
    return Frozen("one rank computes for ever, the others poll", culprit, _others(rng, ranks, culprit, its))


def livelock(rng: Random, ranks: int) -> Frozen:
    """All ranks try, fail and try again, with tiny kernels and no progress."""
    tiny = launch_bound(small_kernel(rng), rng.uniform(0.05, 0.5), cause=HUNG, driver=rng.uniform(0.6, 1.0))
    its = worthless(tiny, HUNG)
    return Frozen("all ranks repeat tiny kernels without progress", None, tuple((its,) for _ in range(ranks)))


FREEZES: dict[str, Freeze] = {
    "all_poll": all_poll,
    "crashed_rank": crashed_rank,
    "stuck_on_storage": stuck_on_storage,
    "network_polling": network_polling,
    "persistent_kernel": persistent_kernel,
    "endless_computation": endless_computation,
    "livelock": livelock,
}

_BASES = (
    "fully_sharded", "data_parallel_infiniband", "tensor_parallel", "text", "data_parallel_nvlink", "accumulation",
)  # fmt: skip


def start(name: str, seed: int, seconds: float, *, workload_class: str = "batch") -> tuple[Run, Random]:
    """Start an ordinary training job on a node, for something to happen to it; it saves nothing by itself."""
    world = new_world(name, seed, seconds)
    rng = world.random("story")
    setup = RECIPES[rng.choice(_BASES)](rng)
    plan = replace(setup.plan, checkpoint=None, evaluation=None, failures=(), hiccups=1.0)
    job = Job(
        job_id=f"{5000 + seed}", name=name, gpus=GPUS * setup.nodes, nodes=setup.nodes, workload_class=workload_class
    )  # fmt: skip
    world.dtype = plan.dtype
    run = Run(world, job, range(GPUS), plan)
    run.hold()
    return run, rng


def freeze(run: Run, frozen: Frozen, end: int) -> None:
    """Let every rank do what a hung job does until `end`."""
    rng = run.rng
    for track, loads in zip(run.tracks, frozen.loads, strict=True):
        turn = 0
        while track.end < end:
            length = rng.uniform(*frozen.piece_ms) if len(loads) > 1 else FOREVER_MS
            track.until(min(end, track.end + max(1, round(length))), loads[turn % len(loads)])
            turn += 1


def build_hang(name: str, seed: int, seconds: float) -> World:
    """Return a training job that hangs after a quarter to a half of the time; some are cancelled in the end."""
    run, rng = start(f"hang_{name}", seed, seconds)
    world = run.world
    run.startup(run.plan.startup_s)
    run.run(max(run.now, round(world.milliseconds * rng.uniform(0.25, 0.5))))
    onset = run.now
    frozen = FREEZES[name](rng, len(run.tracks))
    cancelled = rng.random() < 0.3
    end = round(onset + (world.milliseconds - onset) * rng.uniform(0.75, 0.95)) if cancelled else world.milliseconds
    freeze(run, frozen, end)
    if cancelled:
        run.release(end)
        run.memory(0.62e9)
        run.together(UNUSED)
    world.hang = Hang(run.job.job_id, onset / 1e3, end / 1e3 if cancelled else None, frozen.culprit, frozen.what)
    return world.finish()


def build_crash_loop(name: str, seed: int, seconds: float) -> World:
    """Return a job that crashes and then crashes again in every attempt, before its first step."""
    run, rng = start(name, seed, seconds)
    world = run.world
    run.startup(run.plan.startup_s)
    run.run(max(run.now, round(world.milliseconds * rng.uniform(0.2, 0.4))))
    onset = run.now
    down, up = _recovering(context=False), _recovering(pcie_rx=6 * GB)
    trial = worthless(mix("trial", ((0.3, gemm(rng)), (0.7, wait(FAILURE_RECOVERY)))), FAILURE_RECOVERY)
    trial = replace(trial, doubts=up.doubts)
    while run.now < world.milliseconds:
        run.memory(0.62e9)
        run.together(down, rng.uniform(8e3, 30e3))
        begin = run.now
        run.memory(20e9)
        run.together(up, rng.uniform(3e3, 15e3))
        run.together(trial, rng.uniform(1e3, 12e3))
        world.progress.append(Progress(job_id=run.job.job_id, start=begin, end=run.now, phase="restore"))
    world.hang = Hang(run.job.job_id, onset / 1e3, None, None, "every restart crashes before its first step")
    return world.finish()


def _recovering(*, context: bool = True, pcie_rx: float = 0.0) -> Load:
    load = wait(FAILURE_RECOVERY, context=context, pcie_rx=pcie_rx)
    return replace(load, doubts=((FAILURE_RECOVERY, HUNG, 1.0), (FAILURE_RECOVERY, STARTUP, 1.0)))
