"""Work without training or language models: solvers, graphics, video, folding, simulators, and other long waits.

None of these jobs is a zombie, however rarely it uses its GPU. A wait for the CPU part of the same program is an
unattributed stall; a wait for data from elsewhere is a data stall. For many of them both are fair.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.truth.boards import H100, Board
from tests.truth.causes import (
    DATA_STALL,
    EXPOSED_COMMUNICATION,
    IDLE_ALLOCATION,
    OTHER_COMPUTE,
    STARTUP,
    UNATTRIBUTED_STALL,
)
from tests.truth.kernels import attention, convolution_step, elementwise, fp32_step, gemm, small_kernel
from tests.truth.loads import GB, Load, kernel, launch_bound, mix, wait
from tests.truth.tracks import Pattern, pattern
from tests.truth.world import GPUS, Gpu, Holding, Job, World, new_world

Story = Callable[[World, Gpu, Random], None]
"""What one GPU does until the world's end."""


def per_gpu(
    name: str, seed: int, seconds: float, story: Story, *, workload_class: str = "batch", board: Board = H100,
    memory: tuple[float, float] = (5e9, 60e9), startup: bool = True,
) -> World:  # fmt: skip
    """Return a node with one job a GPU, each with a story of its own."""
    world = new_world(name, seed, seconds, board=board)
    for gpu in world.gpus:
        rng = world.random(f"story:{gpu.index}")
        job = Job(
            job_id=f"{7000 + 10 * seed + gpu.index}", name=name, gpus=1, user=f"user{gpu.index}",
            workload_class=workload_class,
        )  # fmt: skip
        if startup:
            world.holdings.append(Holding(job, (gpu.index,)))
            gpu.track.add(rng.uniform(5e3, 40e3), wait(STARTUP, context=False))
        else:
            world.holdings.append(Holding(job, (gpu.index,), start=-round(rng.uniform(1e6, 9e6))))
        gpu.memory.append((gpu.track.end, rng.uniform(*memory)))
        story(world, gpu, rng)
    return world.finish()


def either(cause: str, *others: str, **what: float) -> Load:
    """Return a wait for `cause` that may as fairly be called one of the others."""
    load = wait(cause, **what)  # type: ignore[arg-type]
    return replace(load, doubts=tuple((cause, other, 1.0) for other in others))


def alternate(world: World, gpu: Gpu, rng: Random, *parts: tuple[Load | Pattern, float, float]) -> None:
    """Repeat loads, each for a time between two limits (milliseconds), until the world ends."""
    while gpu.track.end < world.milliseconds:
        for load, low, high in parts:
            gpu.track.add(rng.uniform(low, high), load)


def stencil(world: World, gpu: Gpu, rng: Random) -> None:
    """An FP32 stencil limited by DRAM, with output now and then."""
    work = kernel("stencil", sm=rng.uniform(0.95, 1.0), dram=rng.uniform(0.7, 0.9), fp32=rng.uniform(0.1, 0.3),
                  memory_bound=True, occupancy=0.6)  # fmt: skip
    alternate(world, gpu, rng, (work, 5e3, 60e3), (wait(UNATTRIBUTED_STALL, pcie_tx=9 * GB, dram=0.01), 50, 2000))


def integer(world: World, gpu: Gpu, rng: Random) -> None:
    """Integer work at 300 W: no pipe that telemetry knows of."""
    work = kernel("integer", sm=rng.uniform(0.96, 1.0), dram=0.03, watts=rng.uniform(75, 110), occupancy=0.8)
    alternate(world, gpu, rng, (work, 20e3, 600e3), (wait(UNATTRIBUTED_STALL), 5, 300))


def transcode(world: World, gpu: Gpu, rng: Random) -> None:
    """Video through the encoders and decoders: no kernel, PCIe traffic, power above idle."""
    busy = either(UNATTRIBUTED_STALL, OTHER_COMPUTE, pcie_tx=rng.uniform(0.3, 2) * GB, pcie_rx=rng.uniform(0.2, 1) * GB,
                  dram=0.03, codec=rng.uniform(0.5, 1.0))  # fmt: skip
    alternate(world, gpu, rng, (busy, 60e3, 900e3), (wait(UNATTRIBUTED_STALL), 200, 3000))


def graphics(world: World, gpu: Gpu, rng: Random) -> None:
    """Rendering at a fixed rate of frames; the rest of each frame waits."""
    sm = rng.uniform(0.5, 0.9)
    frame = kernel("frame", sm=sm, dram=rng.uniform(0.2, 0.5), fp32=sm * rng.uniform(0.2, 0.5), occupancy=0.3)
    scenes = [
        launch_bound(frame, rng.uniform(0.25, 0.95), cause=UNATTRIBUTED_STALL, driver=rng.uniform(0.6, 1.0))
        for _ in range(8)
    ]
    while gpu.track.end < world.milliseconds:
        gpu.track.add(rng.uniform(3e3, 90e3), rng.choice(scenes))


def folding(world: World, gpu: Gpu, rng: Random) -> None:
    """Searching on the CPU for 15 to 50 minutes, then folding on the GPU for 2 to 9 minutes."""
    work = mix("fold", ((0.4, gemm(rng)), (0.25, attention(rng)), (0.2, elementwise(rng)), (0.15, small_kernel(rng))))
    search = either(UNATTRIBUTED_STALL, DATA_STALL, IDLE_ALLOCATION)
    alternate(world, gpu, rng, (search, 15 * 60e3, 50 * 60e3), (work, 120e3, 540e3))


def upstream(world: World, gpu: Gpu, rng: Random) -> None:
    """Batch work that waits for some 45 minutes for the previous stage's data in the middle."""
    work, rest = convolution_step(rng), either(DATA_STALL, UNATTRIBUTED_STALL, IDLE_ALLOCATION)
    while gpu.track.end < world.milliseconds:
        end = gpu.track.end + rng.uniform(120e3, 900e3)
        while gpu.track.end < end:
            gpu.track.add(rng.uniform(300, 900), work)
            gpu.track.add(rng.uniform(5, 80), wait(DATA_STALL, pcie_rx=3 * GB))
        gpu.track.add(rng.uniform(40, 48) * 60e3, rest)


def simulators(world: World, gpu: Gpu, rng: Random) -> None:
    """Reinforcement learning whose simulators run on the CPU: tiny bursts on the GPU."""
    burst = launch_bound(small_kernel(rng), 0.6, cause=UNATTRIBUTED_STALL, driver=0.9)
    wait_ = either(DATA_STALL, UNATTRIBUTED_STALL)
    period = rng.uniform(700, 4000)
    alternate(world, gpu, rng, (wait_, period * 0.6, period * 1.4), (burst, 15, 90))


def copies(world: World, gpu: Gpu, rng: Random) -> None:
    """A cache in device memory that network cards read and write directly: traffic without kernels."""
    loads = [
        either(UNATTRIBUTED_STALL, EXPOSED_COMMUNICATION, DATA_STALL, pcie_tx=rng.uniform(2, 20) * GB,
               pcie_rx=rng.uniform(2, 20) * GB, dram=rng.uniform(0.01, 0.03))
        for _ in range(12)
    ]  # fmt: skip
    while gpu.track.end < world.milliseconds:
        gpu.track.add(rng.uniform(500, 20e3), rng.choice(loads))


def low_use(world: World, gpu: Gpu, rng: Random) -> None:
    """Steady work at a duty of 15 %."""
    period, work = rng.uniform(4e3, 30e3), pattern("work", (0.9, gemm(rng)), (0.1, elementwise(rng)))
    rest = either(DATA_STALL, UNATTRIBUTED_STALL)
    alternate(world, gpu, rng, (work, period * 0.12, period * 0.18), (rest, period * 0.75, period * 0.95))


def notebook(world: World, gpu: Gpu, rng: Random) -> None:
    """A person at a notebook: some cells, then a pause of 1 to 20 minutes to think; no zombie."""
    work = pattern("cell", (0.5, gemm(rng)), (0.2, elementwise(rng)), (0.3, wait(UNATTRIBUTED_STALL)))
    pause = either(UNATTRIBUTED_STALL, IDLE_ALLOCATION)
    alternate(world, gpu, rng, (work, 1e3, 90e3), (pause, 60e3, 20 * 60e3))


def build_solver(name: str, seed: int, seconds: float) -> World:
    """An FP64 solver over eight GPUs: dense and sparse kernels, halo exchange by MPI without kernels."""
    world = new_world(name, seed, seconds)
    rng = world.random("story")
    world.holdings.append(Holding(Job(job_id=f"{7000 + seed}", name=name), tuple(range(GPUS))))
    dense = kernel("dense", sm=rng.uniform(0.92, 0.99), dram=0.3, fp64=rng.uniform(0.5, 0.85))
    sparse = kernel("sparse", sm=rng.uniform(0.9, 0.98), dram=rng.uniform(0.75, 0.9), fp64=rng.uniform(0.08, 0.2),
                    memory_bound=True)  # fmt: skip
    work = pattern("iteration", (0.4, dense), (0.5, sparse), (0.1, small_kernel(rng)))
    halo = either(UNATTRIBUTED_STALL, EXPOSED_COMMUNICATION, pcie_tx=6 * GB, pcie_rx=6 * GB)
    for gpu in world.gpus:
        gpu.track.add(rng.uniform(15e3, 16e3), wait(STARTUP, context=False))
        gpu.memory.append((gpu.track.end, 50e9))
    whole = rng.uniform(300, 1500)
    while world.gpus[0].track.end < world.milliseconds:
        for gpu in world.gpus:
            gpu.track.add(whole * rng.gauss(1.0, 0.02), work)
        end = max(gpu.track.end for gpu in world.gpus) + round(rng.uniform(0.03, 0.12) * whole)
        for gpu in world.gpus:
            gpu.track.until(end, halo)
    return world.finish()


def build_simple(name: str, seed: int, seconds: float) -> World:
    """One job a GPU, each with the named story."""
    story, workload_class = STORIES[name]
    return per_gpu(f"other_{name}", seed, seconds, story, workload_class=workload_class)


def fp32_batch(world: World, gpu: Gpu, rng: Random) -> None:
    """FP32 training on one GPU, without reports."""
    alternate(world, gpu, rng, (fp32_step(rng), 200, 500), (wait(DATA_STALL, pcie_rx=GB), 2, 40))


STORIES: dict[str, tuple[Story, str]] = {
    "stencil": (stencil, "batch"),
    "integer": (integer, "batch"),
    "transcode": (transcode, "batch"),
    "graphics": (graphics, "interactive"),
    "folding": (folding, "batch"),
    "upstream_wait": (upstream, "batch"),
    "simulators": (simulators, "batch"),
    "copies": (copies, "batch"),
    "low_use": (low_use, "batch"),
    "notebook": (notebook, "interactive"),
    "fp32_single": (fp32_batch, "batch"),
}
