"""Allocations without any work to come: idle notebooks, leaked contexts, finished jobs, keepers that pretend to work.

Every GPU of such a world becomes a zombie at its own time; `is_zombie` is true from the moment the last work ended.
"""

from random import Random

from tests.truth.causes import IDLE_ALLOCATION, UNATTRIBUTED_STALL
from tests.truth.kernels import elementwise, gemm
from tests.truth.loads import GB, wait, worthless
from tests.truth.other_work import Story, alternate, per_gpu
from tests.truth.tracks import pattern
from tests.truth.world import Gpu, World, Zombie

NOTHING = wait(IDLE_ALLOCATION)


def _works(world: World, gpu: Gpu, rng: Random, end: float) -> None:
    """Work in cells or steps until `end` (milliseconds)."""
    work = pattern("work", (0.6, gemm(rng)), (0.25, elementwise(rng)), (0.15, wait(UNATTRIBUTED_STALL)))
    pause = wait(UNATTRIBUTED_STALL, pcie_rx=0.5 * GB)
    while gpu.track.end < min(end, world.milliseconds):
        gpu.track.add(rng.uniform(500, 20e3), work)
        gpu.track.add(rng.uniform(50, 4e3), pause)


def _becomes_zombie(world: World, gpu: Gpu) -> None:
    world.zombies.append(Zombie(gpu.uuid, gpu.track.end / 1e3, None))


def notebook_idle(world: World, gpu: Gpu, rng: Random) -> None:
    """A notebook that nobody uses any more, its memory still full."""
    _works(world, gpu, rng, world.milliseconds * rng.uniform(0.05, 0.3))
    _becomes_zombie(world, gpu)
    gpu.track.until(world.milliseconds, NOTHING)


def leaked_context(world: World, gpu: Gpu, rng: Random) -> None:
    """A process that a dead job left behind; nothing has run since long before."""
    gpu.memory[:] = [(0, rng.uniform(0.9e9, 40e9))]
    _becomes_zombie(world, gpu)
    gpu.track.until(world.milliseconds, NOTHING)


def finished(world: World, gpu: Gpu, rng: Random) -> None:
    """A job that has finished computing and does not exit; a thread still reads 4 bytes a minute from the device."""
    _works(world, gpu, rng, world.milliseconds * rng.uniform(0.1, 0.4))
    _becomes_zombie(world, gpu)
    alternate(world, gpu, rng, (NOTHING, 55e3, 65e3), (wait(IDLE_ALLOCATION, pcie_tx=0.001 * GB), 1, 3))


def keeper(world: World, gpu: Gpu, rng: Random) -> None:
    """A script that multiplies matrices for a second every 29 minutes so that the GPU is not taken back."""
    pretence = worthless(gemm(rng), IDLE_ALLOCATION)
    gpu.track.add(rng.uniform(0, 29 * 60e3), NOTHING)
    world.zombies.append(Zombie(gpu.uuid, 0.0, None))
    alternate(world, gpu, rng, (pretence, 900, 1100), (NOTHING, 28.9 * 60e3, 29.1 * 60e3))


STORIES: dict[str, tuple[Story, str, bool]] = {
    "notebook_idle": (notebook_idle, "interactive", True),
    "leaked_context": (leaked_context, "batch", False),
    "finished": (finished, "batch", True),
    "keeper": (keeper, "batch", False),
}
"""Story, workload class, and whether the job starts within the world."""


def build_zombies(name: str, seed: int, seconds: float) -> World:
    """Return a node with a zombie on every GPU."""
    story, workload_class, startup = STORIES[name]
    return per_gpu(f"zombie_{name}", seed, seconds, story, workload_class=workload_class, startup=startup)
