"""Jobs that look as if they hung for some minutes, and go on: none may cause a page.

What a rank does on its CPU meanwhile is its own wait without a kernel; ranks that poll for it are in exposed
communication; what the whole job does together (saving, starting, recovering) has its own cause.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.truth.boards import L40S
from tests.truth.causes import (
    CHECKPOINT,
    EXPOSED_COMMUNICATION,
    FAILURE_RECOVERY,
    STARTUP,
    UNATTRIBUTED_STALL,
)
from tests.truth.hangs import start
from tests.truth.kernels import prefill
from tests.truth.loads import GB, Load, collective, kernel, mix, spin, wait, worthless
from tests.truth.tracks import Pattern
from tests.truth.training import Run
from tests.truth.world import Holding, Job, World, new_world

Episode = Callable[[Run, Random], None]
MINUTE_MS = 60e3


def alone(run: Run, milliseconds: float, what: Load | Pattern, others: Load, rank: int = 0) -> None:
    """One rank does something while the others wait."""
    run.tracks[rank].until(run.now + round(milliseconds), what)
    run.together(others)


def _polling(rng: Random, cause: str = EXPOSED_COMMUNICATION) -> Load:
    doubt = "" if cause == EXPOSED_COMMUNICATION else EXPOSED_COMMUNICATION
    return spin(cause, sm=rng.uniform(0.05, 0.24), watts=rng.uniform(8, 50), doubt=doubt)


def cpu_evaluation(run: Run, rng: Random) -> None:
    """Rank 0 evaluates on its CPU for 4 to 15 minutes; the others poll in a barrier."""
    begin = run.now
    alone(run, rng.uniform(4, 15) * MINUTE_MS, wait(UNATTRIBUTED_STALL), _polling(rng))
    run.note(begin, "evaluation")


def slow_save(run: Run, rng: Random) -> None:
    """Rank 0 saves everything to slow storage for 4 to 12 minutes; the others poll in a barrier."""
    begin = run.now
    copy = wait(CHECKPOINT, pcie_tx=rng.uniform(2, 12) * GB, dram=0.01)
    alone(run, rng.uniform(10, 30) * 1e3, copy, _polling(rng, CHECKPOINT))
    alone(run, rng.uniform(4, 12) * MINUTE_MS, wait(CHECKPOINT), _polling(rng, CHECKPOINT))
    run.note(begin, "checkpoint")


def long_evaluation(run: Run, rng: Random) -> None:
    """Rank 0 evaluates on its GPU for 15 minutes; the others poll in a barrier."""
    begin = run.now
    alone(run, rng.uniform(14.5, 15.5) * MINUTE_MS, prefill(rng), _polling(rng))
    run.note(begin, "evaluation")


def shard_by_shard(run: Run, rng: Random) -> None:
    """Each rank in turn saves its shard for 40 to 100 s."""
    begin, polling = run.now, _polling(rng, CHECKPOINT)
    for rank in run.ranks:
        alone(run, rng.uniform(5, 15) * 1e3, wait(CHECKPOINT, pcie_tx=4 * GB, dram=0.01), polling, rank)
        alone(run, rng.uniform(35, 85) * 1e3, wait(CHECKPOINT), polling, rank)
    run.note(begin, "checkpoint")


def elastic_wait(run: Run, rng: Random) -> None:
    """A node of the job was lost; the processes restart and wait 5 to 12 minutes for another one."""
    run.memory(0.62e9)
    run.together(wait(FAILURE_RECOVERY, context=False), rng.uniform(5, 12) * MINUTE_MS)
    begin = run.now
    run.together(wait(FAILURE_RECOVERY, pcie_rx=6 * GB), rng.uniform(15, 40) * 1e3)
    run.memory(run.plan.memory_bytes)
    run.note(begin, "restore")


def long_gather(run: Run, rng: Random) -> None:
    """A legitimate all-gather over a slow network: 3 to 8 minutes of one collective that does move data."""
    moved, sm, end = rng.uniform(0.8, 2.5) * GB, rng.uniform(0.05, 0.2), run.now + rng.uniform(3, 8) * MINUTE_MS
    pieces = [
        collective(sm=sm, dram=0.02, nvlink=moved * share * 2.0, pcie=moved * share)
        for share in (rng.uniform(0.85, 1.1) for _ in range(12))
    ]
    while run.now < end:
        run.together(rng.choice(pieces), rng.uniform(300, 3000))


EPISODES: dict[str, Episode] = {
    "cpu_evaluation": cpu_evaluation,
    "slow_save": slow_save,
    "long_evaluation": long_evaluation,
    "shard_by_shard": shard_by_shard,
    "elastic_wait": elastic_wait,
    "long_gather": long_gather,
}
_APART = {"long_evaluation": (40.0, 60.0)}
"""Minutes of training between two episodes."""


def _alternate(run: Run, rng: Random, episode: Episode, apart: tuple[float, float]) -> None:
    """Train, then the episode, again and again; never stop within an episode."""
    world = run.world
    while run.now < world.milliseconds:
        run.run(run.now + round(rng.uniform(*apart) * MINUTE_MS))
        if run.now < world.milliseconds:
            episode(run, rng)


def build_lookalike(name: str, seed: int, seconds: float) -> World:
    """Return a job with regular episodes that look like a hang. The first comes within ten minutes."""
    run, rng = start(f"lookalike_{name}", seed, seconds)
    run.startup(run.plan.startup_s)
    run.run(run.now + round(rng.uniform(3, 8) * MINUTE_MS))
    EPISODES[name](run, rng)
    _alternate(run, rng, EPISODES[name], _APART.get(name, (10.0, 25.0)))
    return run.world.finish()


def build_index(name: str, seed: int, seconds: float) -> World:
    """Rank 0 builds the index of the data set for 8 to 20 minutes before the first step; the others poll."""
    run, rng = start(name, seed, seconds)
    run.together(wait(STARTUP, context=False), rng.uniform(15, 40) * 1e3)
    run.memory(2e9)
    begin = run.now
    alone(run, rng.uniform(8, 20) * MINUTE_MS, wait(STARTUP), _polling(rng, STARTUP))
    run.note(begin, "startup")
    run.startup(run.plan.startup_s)
    run.run()
    return run.world.finish()


def build_compile(name: str, seed: int, seconds: float) -> World:
    """All ranks compile for 10 to 25 minutes, with a trial kernel now and then."""
    run, rng = start(name, seed, seconds)
    run.together(wait(STARTUP, context=False), rng.uniform(15, 40) * 1e3)
    run.memory(30e9)
    begin = run.now
    end = begin + rng.uniform(10, 25) * MINUTE_MS
    trial = worthless(mix("trial", ((0.4, prefill(rng)), (0.6, wait(STARTUP)))), STARTUP)
    while run.now < end:
        run.together(wait(STARTUP), rng.uniform(20e3, 120e3))
        run.together(trial, rng.uniform(200, 4000))
    run.note(begin, "startup")
    run.startup(20.0)
    run.run()
    return run.world.finish()


def build_integer(name: str, seed: int, seconds: float) -> World:
    """Integer work on L40S boards: all SMs busy at high power, and no pipe that telemetry knows of. One job a GPU."""
    world = new_world(name, seed, seconds, board=L40S)
    rng = world.random("story")
    for gpu in world.gpus:
        job = Job(job_id=f"{6000 + 10 * seed + gpu.index}", name=name, gpus=1, user=f"user{gpu.index}")
        world.holdings.append(Holding(job, (gpu.index,)))
        gpu.track.add(rng.uniform(5, 20) * 1e3, wait(STARTUP, context=False))
        gpu.memory.append((gpu.track.end, rng.uniform(2e9, 20e9)))
        work = kernel("integer", sm=rng.uniform(0.96, 1.0), dram=rng.uniform(0.01, 0.08), watts=rng.uniform(340, 440),
                      occupancy=rng.uniform(0.5, 0.9))  # fmt: skip
        between = wait(UNATTRIBUTED_STALL, pcie_rx=0.1 * GB)
        while gpu.track.end < world.milliseconds:
            gpu.track.add(rng.uniform(20e3, 600e3), work)
            gpu.track.add(rng.uniform(5, 400), between)
    return world.finish()


def debugging_pause(run: Run, rng: Random) -> None:
    """A developer stops rank 0 in a debugger; the others poll until the step goes on."""
    alone(run, rng.uniform(3, 25) * MINUTE_MS, wait(UNATTRIBUTED_STALL), _polling(rng))


def build_debugging(name: str, seed: int, seconds: float) -> World:
    """An interactive session: some steps, a breakpoint for 3 to 25 minutes, some steps."""
    run, rng = start(name, seed, seconds, workload_class="interactive")
    run.plan = replace(run.plan, startup_s=20.0)
    run.startup(20.0)
    while run.now < run.world.milliseconds:
        run.run(run.now + round(rng.uniform(0.3, 6) * MINUTE_MS))
        debugging_pause(run, rng)
    return run.world.finish()
