"""A node that several jobs share, with GPUs that nobody holds for a while."""

from dataclasses import replace

from tests.truth.other_work import low_use
from tests.truth.training import train
from tests.truth.training_library import RECIPES
from tests.truth.world import Holding, Job, World, new_world

STARTUP_S = 30.0


def build(name: str, seed: int, seconds: float) -> World:
    """Four GPUs train one model, two fine-tune others, one serves 15 % of the time, and one is free.

    One of the fine-tuning jobs ends early; its GPU is free from then on.
    """
    world = new_world(name, seed, seconds)
    rng = world.random("story")
    plan = replace(RECIPES["data_parallel_nvlink"](rng).plan, startup_s=STARTUP_S)
    train(world, plan, Job(job_id=f"{8000 + seed}", name="four", gpus=4), (0, 1, 2, 3))
    for gpu, end in ((4, None), (5, seconds * rng.uniform(0.4, 0.7))):
        alone = replace(RECIPES["lora"](rng).plan, collective_ms=0.0, startup_s=STARTUP_S, end_s=end)
        job = Job(job_id=f"{8000 + seed}-{gpu}", name="one", gpus=1, user=f"user{gpu}")
        train(world, alone, job, (gpu,), purpose=f"gpu{gpu}")
    job = Job(job_id=f"{8000 + seed}-6", name="little", gpus=1, user="user6")
    world.holdings.append(Holding(job, (6,)))
    low_use(world, world.gpus[6], world.random("little"))
    return world.finish()
