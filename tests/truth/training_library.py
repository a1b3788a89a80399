"""Named training jobs: each a recipe that draws its figures from a seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from tests.truth.boards import H100, L40S, Board
from tests.truth.causes import UNATTRIBUTED_STALL
from tests.truth.kernels import (
    HOST_GAP,
    Mixture,
    convolution_step,
    decode,
    elementwise,
    fp32_step,
    gemm,
    host_bound_step,
    network_collective,
    nvlink_collective,
    optimiser,
    prefill,
    transformer_step,
)
from tests.truth.loads import GB, collective, mix, spin, wait
from tests.truth.tracks import Pattern, pattern
from tests.truth.training import Checkpoint, Data, Evaluation, Failure, Pipeline, Plan, Run, Straggler, train
from tests.truth.world import GPUS, Job, World, new_world


@dataclass(frozen=True)
class Setup:
    """A job and the node it needs."""

    plan: Plan
    nodes: int = 1
    board: Board = H100
    limit_watts: float | None = None
    locked_hz: float | None = None


Recipe = Callable[[Random], Setup]


def _spin(rng: Random) -> Plan:
    """Return an empty plan's polling kernel and noise, as a base for others."""
    return Plan(
        work=pattern("none", (1.0, HOST_GAP)), step_ms=1.0, collective=nvlink_collective(rng),
        spin=spin(sm=rng.uniform(0.06, 0.24), watts=rng.uniform(8, 60), pcie=rng.uniform(0, 0.05) * GB),
        jitter=rng.uniform(0.008, 0.04), skew=rng.uniform(0.003, 0.015), gap_ms=rng.uniform(1, 8),
        hiccups=rng.uniform(0, 8), startup_s=rng.uniform(30, 150), memory_bytes=rng.uniform(40e9, 76e9),
        model_share=rng.uniform(0.7, 0.97), dtype="bf16",
    )  # fmt: skip


def data_parallel_nvlink(rng: Random) -> Setup:
    """Data parallel inside a node; most of the exchange overlaps."""
    mixture = Mixture(inner=0.0, overlap_nvlink=rng.uniform(40, 160) * GB)
    work = transformer_step(rng, mixture)
    plan = replace(_spin(rng), work=work, step_ms=rng.uniform(250, 1200), collective_ms=rng.uniform(5, 40))
    return Setup(plan)


def data_parallel_infiniband(rng: Random) -> Setup:
    """Data parallel over 400 Gbit/s InfiniBand a GPU, with GPUDirect RDMA on PCIe in both directions."""
    mixture = Mixture(inner=0.0, overlap_nvlink=rng.uniform(30, 90) * GB, overlap_pcie=rng.uniform(8, 30) * GB)
    work = transformer_step(rng, mixture)
    alone = network_collective(rng, gigabytes=rng.uniform(25, 45))
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(400, 2500), collective=alone, collective_ms=rng.uniform(30, 200),
        remote=rng.uniform(0.005, 0.03), checkpoint=Checkpoint(every_s=rng.uniform(900, 1800)),
    )  # fmt: skip
    return Setup(plan, nodes=rng.choice((2, 4, 8, 16)))


def data_parallel_ethernet(rng: Random) -> Setup:
    """Data parallel over one slow 100 Gbit/s port a node: a large exposed share."""
    work = transformer_step(rng, Mixture(inner=0.0, overlap_pcie=rng.uniform(0.4, 1.4) * GB))
    step = rng.uniform(300, 1200)
    alone = network_collective(rng, gigabytes=rng.uniform(0.9, 1.5), rdma=rng.random() < 0.5)
    plan = replace(
        _spin(rng), work=work, step_ms=step, collective=alone, collective_ms=step * rng.uniform(0.4, 2.0),
        remote=rng.uniform(0.01, 0.05),
    )  # fmt: skip
    return Setup(plan, nodes=rng.choice((2, 4)))


def fully_sharded(rng: Random) -> Setup:
    """FSDP or ZeRO-3: parameters gathered layer by layer, mostly overlapped."""
    nodes = rng.choice((1, 1, 2, 4))
    inner = nvlink_collective(rng) if nodes == 1 else network_collective(rng, gigabytes=rng.uniform(20, 42))
    mixture = Mixture(
        inner=rng.uniform(0.03, 0.22), gaps=rng.uniform(0.01, 0.05), overlap_nvlink=rng.uniform(60, 200) * GB,
        overlap_pcie=0.0 if nodes == 1 else rng.uniform(10, 35) * GB,
    )  # fmt: skip
    work = transformer_step(rng, mixture, inner)
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(800, 6000), collective=inner, collective_ms=rng.uniform(5, 60),
        checkpoint=Checkpoint(every_s=rng.uniform(600, 1500), who=rng.choice(("all", "async"))), remote=0.01,
    )  # fmt: skip
    return Setup(plan, nodes=nodes)


def tensor_parallel(rng: Random) -> Setup:
    """Tensor parallelism in the node: two small collectives a layer and pass, nothing overlaps."""
    inner = collective(sm=rng.uniform(0.12, 0.3), dram=rng.uniform(0.1, 0.2), nvlink=rng.uniform(120, 260) * GB)
    mixture = Mixture(gemm=0.55, inner=rng.uniform(0.12, 0.3), gaps=rng.uniform(0.01, 0.04))
    work = transformer_step(rng, mixture, inner)
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(700, 5000), collective_ms=rng.uniform(5, 50), skew=0.003,
        accumulate=rng.choice((1, 2, 4)),
    )  # fmt: skip
    return Setup(plan, nodes=rng.choice((1, 2, 8)))


def _pipelined(rng: Random, *, polls: bool) -> Setup:
    inner = collective(sm=0.03, dram=0.02, nvlink=rng.uniform(20, 80) * GB, watts=10)
    work = transformer_step(rng, Mixture(inner=rng.uniform(0.01, 0.05), gaps=0.02), inner)
    pipe = Pipeline(stages=rng.choice((2, 4, 8)), microbatches=rng.choice((4, 8, 16, 32)), polls=polls)
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(1500, 9000), pipeline=pipe, collective_ms=rng.uniform(20, 200),
        skew=rng.uniform(0.002, 0.006),
    )  # fmt: skip
    return Setup(plan, nodes=rng.choice((1, 4)))


def pipeline_idle(rng: Random) -> Setup:
    """Pipeline parallelism whose waiting stages have no kernel."""
    return _pipelined(rng, polls=False)


def pipeline_polling(rng: Random) -> Setup:
    """Pipeline parallelism whose waiting stages poll inside a receive kernel on a few SMs."""
    return _pipelined(rng, polls=True)


def mixture_of_experts(rng: Random) -> Setup:
    """Mixture of experts: all-to-all twice a layer, small matrix products, uneven experts."""
    inner = collective(sm=rng.uniform(0.1, 0.25), dram=rng.uniform(0.1, 0.3), nvlink=rng.uniform(80, 220) * GB)
    mixture = Mixture(gemm=0.4, attention=0.12, elementwise=0.22, inner=rng.uniform(0.15, 0.35), gaps=0.04)
    work = transformer_step(rng, mixture, inner, tensor=rng.uniform(0.45, 0.65))
    plan = replace(_spin(rng), work=work, step_ms=rng.uniform(500, 4000), collective_ms=30.0, skew=0.02, jitter=0.05)
    return Setup(plan, nodes=rng.choice((1, 2, 4)))


def straggler(rng: Random) -> Setup:
    """One rank is 5 to 30 % slower; the others poll inside the collective."""
    setup = data_parallel_nvlink(rng) if rng.random() < 0.5 else fully_sharded(rng)
    slow = Straggler(rng.randrange(GPUS), 1 + rng.uniform(0.05, 0.3), rng.choice(("clock", "host", "load")))
    return replace(setup, plan=replace(setup.plan, stragglers=(slow,)))


def _images(rng: Random, data: Data) -> Setup:
    plan = replace(
        _spin(rng), work=convolution_step(rng), step_ms=rng.uniform(150, 600), collective_ms=rng.uniform(5, 40),
        data=data, dtype=rng.choice(("bf16", "fp16")),
    )  # fmt: skip
    return Setup(plan)


def images_short_stalls(rng: Random) -> Setup:
    """Image training that waits a fraction of a second for nearly every batch."""
    return _images(rng, Data(mean_ms=rng.uniform(60, 600), spread=rng.uniform(0.2, 0.7), shared=rng.random() < 0.4))


def images_long_stalls(rng: Random) -> Setup:
    """Image training that waits several seconds every few batches, when the workers' queue is empty."""
    data = Data(mean_ms=rng.uniform(2500, 9000), spread=0.3, every=rng.randint(8, 40), shared=rng.random() < 0.5)
    return _images(rng, data)


def _evaluation(rng: Random) -> Evaluation:
    forward = mix("evaluation", ((0.9, prefill(rng)), (0.1, HOST_GAP)))
    return Evaluation(rng.uniform(500, 1200), rng.uniform(15, 60), pattern("evaluation", (1.0, forward)))


def text(rng: Random) -> Setup:
    """Text training with hardly any input, regular evaluation and saving by rank 0."""
    work = transformer_step(rng, Mixture(inner=0.02, gaps=rng.uniform(0.01, 0.08), overlap_nvlink=60 * GB))
    save = Checkpoint(every_s=rng.uniform(500, 1200), copy_s=rng.uniform(2, 8), write_s=rng.uniform(8, 40), who="rank0")
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(300, 1500), collective_ms=10.0, evaluation=_evaluation(rng),
        checkpoint=save, data=Data(mean_ms=2.0, pcie_rx=0.02 * GB),
    )  # fmt: skip
    return Setup(plan)


def fp32(rng: Random) -> Setup:
    """Training without the tensor pipe."""
    return Setup(replace(_spin(rng), work=fp32_step(rng), step_ms=rng.uniform(200, 900), collective_ms=15.0, dtype=""))


def fp8(rng: Random) -> Setup:
    """FP8 training: matrix products take half the time, so that all else weighs more."""
    mixture = Mixture(gemm=0.45, attention=0.16, elementwise=0.26, inner=0.04, overlap_nvlink=rng.uniform(60, 200) * GB)
    work = transformer_step(rng, mixture, tensor=rng.uniform(0.55, 0.75))
    return Setup(replace(_spin(rng), work=work, step_ms=rng.uniform(400, 2500), collective_ms=20.0, dtype="fp8"))


def accumulation(rng: Random) -> Setup:
    """Gradient accumulation: 4 to 32 batches for each exchange."""
    work = transformer_step(rng, Mixture(inner=0.0, optimiser=0.01))
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(150, 600), accumulate=rng.choice((4, 8, 16, 32)),
        collective_ms=rng.uniform(60, 500),
    )  # fmt: skip
    return Setup(plan)


def host_bound(rng: Random) -> Setup:
    """Small kernels that the CPU launches too slowly."""
    work = host_bound_step(rng, rng.uniform(0.3, 0.75))
    plan = replace(_spin(rng), work=work, step_ms=rng.uniform(100, 500), collective_ms=6.0, gap_ms=rng.uniform(3, 15))
    return Setup(plan)


def power_capped(rng: Random) -> Setup:
    """Data parallel under a power limit far below the board's."""
    return replace(data_parallel_nvlink(rng), limit_watts=rng.uniform(300, 480) // 10 * 10)


def clock_locked(rng: Random) -> Setup:
    """Fully sharded with clocks locked by an administrator."""
    return replace(fully_sharded(rng), locked_hz=rng.choice((1200e6, 1410e6, 1605e6)))


def saving_often(rng: Random) -> Setup:
    """Synchronous checkpoints every few minutes."""
    setup = fully_sharded(rng)
    save = Checkpoint(
        every_s=rng.uniform(180, 420), copy_s=rng.uniform(2, 10), write_s=rng.uniform(5, 60),
        who=rng.choice(("all", "rank0", "shards")), polls=rng.random() < 0.6, pcie_tx=rng.uniform(3, 22) * GB,
    )  # fmt: skip
    return replace(setup, plan=replace(setup.plan, checkpoint=save))


def lora(rng: Random) -> Setup:
    """LoRA fine-tuning on short sequences: forward pass and part of the backward pass, tiny exchange."""
    mixture = Mixture(gemm=0.5, elementwise=0.3, inner=0.0, gaps=rng.uniform(0.03, 0.2), optimiser=0.005)
    work = transformer_step(rng, mixture, tensor=rng.uniform(0.4, 0.7))
    plan = replace(_spin(rng), work=work, step_ms=rng.uniform(150, 800), collective_ms=2.0, model_share=0.66)
    return Setup(plan)


def crashing(rng: Random) -> Setup:
    """A crash after some ten minutes, noticed, restarted and restored."""
    setup = fully_sharded(rng)
    failure = Failure(
        at_s=rng.uniform(300, 900), detect_s=rng.uniform(5, 60), restart_s=rng.uniform(20, 90),
        restore_s=rng.uniform(10, 80), requeue=rng.random() < 0.5,
    )  # fmt: skip
    return replace(setup, plan=replace(setup.plan, failures=(failure,)))


def l40s(rng: Random) -> Setup:
    """Data parallel on boards without NVLink: the exchange crosses PCIe."""
    alone = collective(sm=rng.uniform(0.05, 0.15), dram=0.03, pcie=rng.uniform(8, 18) * GB)
    work = transformer_step(rng, Mixture(inner=0.0, overlap_pcie=rng.uniform(2, 9) * GB))
    plan = replace(
        _spin(rng), work=work, step_ms=rng.uniform(400, 1500), collective=alone, collective_ms=rng.uniform(40, 400),
        memory_bytes=rng.uniform(20e9, 44e9),
    )  # fmt: skip
    return Setup(plan, board=L40S)


def single_kernels(rng: Random) -> Setup:
    """Large batches without communication beyond a short exchange: as good as it gets."""
    work = pattern("step", (0.95, mix("pass", ((0.85, gemm(rng)), (0.15, elementwise(rng))))), (0.05, optimiser(rng)))
    return Setup(replace(_spin(rng), work=work, step_ms=rng.uniform(400, 1500), collective_ms=4.0))


RECIPES: Mapping[str, Recipe] = {
    "data_parallel_nvlink": data_parallel_nvlink,
    "data_parallel_infiniband": data_parallel_infiniband,
    "data_parallel_ethernet": data_parallel_ethernet,
    "fully_sharded": fully_sharded,
    "tensor_parallel": tensor_parallel,
    "pipeline_idle": pipeline_idle,
    "pipeline_polling": pipeline_polling,
    "mixture_of_experts": mixture_of_experts,
    "straggler": straggler,
    "images_short_stalls": images_short_stalls,
    "images_long_stalls": images_long_stalls,
    "text": text,
    "fp32": fp32,
    "fp8": fp8,
    "accumulation": accumulation,
    "host_bound": host_bound,
    "power_capped": power_capped,
    "clock_locked": clock_locked,
    "saving_often": saving_often,
    "lora": lora,
    "crashing": crashing,
    "l40s": l40s,
    "large_batches": single_kernels,
}


def build_setup(name: str, seed: int, seconds: float, setup: Setup) -> World:
    """Run a job on a node of its own."""
    world = new_world(
        name, seed, seconds, board=setup.board, limit_watts=setup.limit_watts, locked_hz=setup.locked_hz
    )  # fmt: skip
    job = Job(job_id=f"{4000 + seed}", name=name, gpus=GPUS * setup.nodes, nodes=setup.nodes)
    world.one_reporter = world.random("reporter").random() < 1 / 3
    train(world, setup.plan, job)
    return world.finish()


def build_recipe(name: str, seed: int, seconds: float) -> World:
    """Run a named recipe."""
    rng = Random(f"{name}:{seed}:recipe")  # noqa: S311  noise, no secret
    return build_setup(f"training_{name}", seed, seconds, RECIPES[name](rng))


def _rollout(run: Run, rng: Random, length: float, work: Pattern, tail: Pattern) -> None:
    """Generate until the longest answers of each rank are done; ranks that are done early wait without a kernel."""
    for track in run.tracks:
        own = length * rng.uniform(0.7, 1.0)
        track.add(own * 0.75, work)
        track.add(own * 0.25, tail)
    run.together(wait(UNATTRIBUTED_STALL))


def build_reinforcement(name: str, seed: int, seconds: float) -> World:
    """Reinforcement learning on language models: rollouts, rewards on the CPU, then training on the same GPUs."""
    world = new_world(f"training_{name}", seed, seconds)
    rng = world.random("recipe")
    plan = replace(fully_sharded(rng).plan, checkpoint=None)
    run = Run(world, Job(job_id=f"{4000 + seed}", name=name), range(GPUS), plan)
    world.dtype = "bf16"
    run.hold()
    run.startup(plan.startup_s)
    full = pattern("rollout", (0.08, prefill(rng)), (0.92, decode(rng, batch=0.9)))
    tail = pattern("tail", (1.0, decode(rng, batch=0.1, gaps=0.2)))
    length, updates = rng.uniform(20e3, 120e3), rng.randint(4, 16)
    while run.now < world.milliseconds:
        _rollout(run, rng, length, full, tail)
        run.together(wait(UNATTRIBUTED_STALL), rng.uniform(500, 5000))
        for step in range(updates):
            run.step(step)
        run.together(nvlink_collective(rng), rng.uniform(800, 4000))
    return world.finish()


def _any_step(rng: Random) -> Setup:
    return RECIPES[rng.choice(sorted(set(RECIPES) - {"l40s", "crashing", "power_capped", "clock_locked"}))](rng)


def _other_work(rng: Random) -> Pattern:
    """Return the computation of steps unlike the others: longer sequences, or many small kernels."""
    if rng.random() < 0.2:
        return host_bound_step(rng, rng.uniform(0.3, 0.8))
    attention = rng.uniform(0.1, 0.45)
    mixture = Mixture(gemm=0.75 - attention, attention=attention, inner=rng.uniform(0, 0.1), gaps=rng.uniform(0, 0.08))
    return transformer_step(rng, mixture)


def random_setup(rng: Random) -> Setup:
    """Draw a training job: a recipe, then further trouble on top of it."""
    setup = _any_step(rng)
    plan = setup.plan
    if rng.random() < 0.25 and not plan.stragglers:
        slow = Straggler(rng.randrange(GPUS), 1 + rng.uniform(0.03, 0.3), rng.choice(("clock", "host", "load")))
        plan = replace(plan, stragglers=(slow,))
    if rng.random() < 0.25 and not plan.data.mean_ms:
        plan = replace(plan, data=Data(mean_ms=plan.step_ms * rng.uniform(0.03, 0.6), spread=rng.uniform(0.2, 0.8),
                                       every=rng.choice((1, 1, 4, 10)), shared=rng.random() < 0.5))  # fmt: skip
    if rng.random() < 0.3 and plan.checkpoint is None:
        plan = replace(plan, checkpoint=Checkpoint(
            every_s=rng.uniform(300, 1500), copy_s=rng.uniform(1, 8), write_s=rng.uniform(3, 50),
            who=rng.choice(("all", "rank0", "shards", "async")), polls=rng.random() < 0.6,
        ))  # fmt: skip
    if rng.random() < 0.3:
        plan = replace(plan, other_share=rng.uniform(0.05, 0.5), other_ms=plan.step_ms * rng.uniform(0.5, 2.5),
                       other_work=_other_work(rng))  # fmt: skip
    if rng.random() < 0.15 and plan.evaluation is None:
        plan = replace(plan, evaluation=_evaluation(rng))
    if rng.random() < 0.1:
        plan = replace(plan, failures=(Failure(at_s=rng.uniform(200, 1200), requeue=rng.random() < 0.5),))
    if rng.random() < 0.15:
        plan = replace(plan, end_s=rng.uniform(900, 3300))
    limit = rng.uniform(350, 600) // 10 * 10 if rng.random() < 0.2 else None
    locked = rng.choice((1200e6, 1410e6, 1665e6)) if limit is None and rng.random() < 0.08 else None
    return replace(setup, plan=plan, limit_watts=limit, locked_hz=locked)


def random_training_job(seed: int, seconds: float = 3600.0) -> World:
    """Return a node with a random training job."""
    rng = Random(f"random:{seed}")  # noqa: S311  noise, no secret
    return build_setup("random_training_job", seed, seconds, random_setup(rng))
