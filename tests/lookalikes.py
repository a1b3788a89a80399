"""Defines scenarios of jobs that hang, are gone or forgotten, and of healthy jobs that resemble them.

Used by tests and benchmarks, which decide what the expected classification is.
"""

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from exporter.simulate import kernels, programs
from exporter.simulate.boards import BoardModel
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner, notebook_owner, whole_node
from exporter.simulate.scenarios import SCENARIOS, all_gpus, rank0_checkpoint, rank0_evaluation, servers
from exporter.simulate.workload import (
    FOREVER_MS,
    IDLE_CYCLE,
    MINUTE_MS,
    Cycle,
    Load,
    Program,
    Segment,
    Stage,
    Stages,
    absent,
    as_program,
)

_HOUR = 3600


# -- kernels and programs --


def _exchanging(board: BoardModel) -> Cycle:
    """Long collectives without computation: weights or experts are redistributed."""
    return kernels.uniform(kernels.gradient_exchange(board).load, "exchanging")


def _one_pipe(pipe: str, share: float, *, sm: float = 0.9) -> Cycle:
    """Kernels that work on chip and use one pipe of the SM (a field of Load) at this share."""
    return kernels.uniform(Load(engine=1.0, sm=sm, occupancy=sm / 2, dram=0.001)._replace(**{pipe: share}), "computing")


def _walking(board: BoardModel) -> Cycle:
    """Pointer chasing through a graph in HBM: latency-bound, with idle pipes."""
    return kernels.uniform(Load(engine=1.0, sm=0.3, occupancy=0.1, dram=0.05 * board.dram_ceiling), "computing")


def _gathering(board: BoardModel) -> Cycle:
    """A kernel that reads rows of a table in host memory over PCIe (zero copy), with sums in registers."""
    return kernels.uniform(Load(engine=1.0, sm=0.25, occupancy=0.1, dram=0.002, pcie_rx=0.35 * board.pcie), "computing")


def _passing_on(board: BoardModel) -> Cycle:
    """Small one-sided puts between SMs of neighbouring GPUs, forwarded without use of HBM."""
    rate = 0.01 * board.peer_bytes_per_second
    return kernels.uniform(
        Load(engine=1.0, sm=0.2, occupancy=0.05, dram=0.004, peer_tx=rate, peer_rx=rate), "exchanging"
    )


def _pipeline(board: BoardModel, *, bubble: float) -> Cycle:
    """One stage of a pipeline-parallel step; for the share `bubble` of time it polls for activations."""
    working = kernels.training_kernels(board, 1.0)
    handed_on = Segment(3.0, kernels.gradient_exchange(board).load, "exchanging")
    work = Segment(1200.0 * (1 - bubble), working, "computing")
    return Cycle(Segment(1200.0 * bubble, kernels.SPIN, "waiting_peer"), work, handed_on)


def _tuning() -> Cycle:
    """Autotuning: short runs of kernel candidates between compilations on the host."""
    candidate = Load(engine=1.0, sm=0.9, occupancy=0.3, tensor=0.5, dram=0.3)
    return Cycle(Segment(400.0, candidate, "computing"), Segment(2600.0, Load(), "idle"))


def _tiny_kernels(board: BoardModel) -> Cycle:
    """Short integer kernels on a few SMs with pauses of the host, as of a simulator or a tokenizer."""
    step = Load(engine=1.0, sm=6.0 / board.sms, occupancy=0.01, dram=0.003, integer=0.01)
    return Cycle(Segment(3.0, step, "computing"), Segment(1.0, Load(), "idle"))


def _few_tokens(board: BoardModel) -> Cycle:
    """One request at a time: a second of decoding, then a pause."""
    thin = kernels.decode(board, batch=0.05).segments[0].load
    return Cycle(Segment(1_000.0, thin, "computing"), Segment(6_000.0, Load(), "idle"))


@as_program
def _pausing_steps(rng: Random, board: BoardModel, ranks: int, *, name: str, doing: Cycle, ms: int) -> Stages:
    """Training in which all ranks once do something other than steps."""
    yield from programs.first_minutes(rng, board, ranks)
    yield Stage(name, ms, (doing,), memory=0.85)
    yield programs.endless_training(board, alone=ranks == 1)


@as_program
def _slow_image_pull(rng: Random, board: BoardModel, *, minutes: int) -> Stages:
    """A job with a long pull of its container image before its first process."""
    yield absent("the image is pulled", minutes * MINUTE_MS + rng.randrange(30_000))
    yield from programs.training(board, 1)(rng)


@as_program
def _two_programs(rng: Random, board: BoardModel, *, pause_minutes: int) -> Stages:
    """A batch script with CPU work between two GPU programs."""
    yield from programs.until(programs.training(board, 1)(rng), 5 * MINUTE_MS + rng.randrange(30_000))
    yield absent("results are packed", pause_minutes * MINUTE_MS)
    yield from programs.training(board, 1)(rng)  # another program, with its own start


def _ending_training(board: BoardModel, *, after_ms: int) -> Program:
    """Training that ends by itself, independent of the allocation."""
    return lambda rng: programs.until(programs.training(board, 1)(rng), after_ms)


@as_program
def _slowly_fed_training(rng: Random, board: BoardModel) -> Stages:
    """Training with a data loader that takes most of a minute per batch."""
    step = kernels.training_step(board, alone=True)
    yield from programs.bring_up(rng, board)
    while True:
        yield Stage("waiting for input", rng.randrange(20_000, 60_000), (kernels.no_input(),), memory=0.85)
        yield Stage("input is copied in", rng.randrange(1_000, 3_000), (kernels.copy_in(board),), memory=0.85)
        yield Stage("training", rng.randrange(8_000, 20_000), (step,), memory=0.85)


# -- plans --


def _ranks(make: Callable[[BoardModel, int], Program]) -> Callable[[Setting], Plan]:
    """Plan one batch job on all GPUs of the node."""
    return all_gpus("pretrain", make)


def _across(make: Callable[[Setting], Program]) -> Callable[[Setting], Plan]:
    """Plan one batch job on all GPUs of this node and of another."""

    def plan(setting: Setting) -> Plan:
        owner = replace(batch_owner(setting, 0, "pretrain-large"), job_id="40500")
        return Plan(jobs=(SimulatedJob(owner=owner, slots=setting.slots, stages=make(setting), gpus=2 * setting.gpus),))

    return plan


def _alone(
    make: Callable[[BoardModel], Program], *, hold_ms: int = FOREVER_MS, orphan: bool = False
) -> Callable[..., Plan]:
    """Plan one batch job per GPU; with `orphan` its process survives the allocation."""
    left = frozenset({0}) if orphan else frozenset[int]()

    def plan(setting: Setting) -> Plan:
        return Plan(
            jobs=tuple(
                SimulatedJob(
                    owner=batch_owner(setting, n, "sweep"),
                    slots=(n,),
                    stages=make(setting.board),
                    hold_ms=hold_ms,
                    orphans=left,
                )
                for n in setting.slots
            )
        )

    return plan


def _one_cycle(name: str, make: Callable[[BoardModel], Cycle]) -> Callable[[Setting], Plan]:
    """Plan one job per GPU, which repeats one cycle after the usual start of training."""
    return _alone(lambda board: programs.repeating((name, 60 * 24.0, make(board))))


def _notebook(setting: Setting) -> Plan:
    rounds = ("a cell runs", 3.0, kernels.training_step(setting.board, alone=True)), ("reading", 97.0, IDLE_CYCLE)
    program = programs.repeating(*rounds)
    return Plan(
        jobs=tuple(
            SimulatedJob(owner=notebook_owner(setting, 500 + n), slots=(n,), stages=program) for n in setting.slots
        )
    )


def _index(board: BoardModel, ranks: int) -> Program:
    return programs.rank0_alone(
        board, ranks, name="rank 0 builds an index", doing=IDLE_CYCLE, ms=20 * MINUTE_MS, begun=False
    )


def _missing_rank(board: BoardModel, ranks: int) -> Program:
    return programs.hanging(board, ranks, name="one rank never comes", waits=kernels.polling(), absent=IDLE_CYCLE)


def _all_wait(board: BoardModel, ranks: int) -> Program:
    return programs.hanging(board, ranks, name="all ranks wait", waits=kernels.polling())


def _one_gpu(board: BoardModel, _: int = 1) -> Program:
    return programs.hanging(board, 1, name="a kernel waits for ever", waits=kernels.one_block(board))


def _at_startup(board: BoardModel, ranks: int) -> Program:
    return programs.hanging(board, ranks, name="the first collective never ends", waits=kernels.polling(), begun=False)


def _half_the_job(setting: Setting) -> Program:
    """The processes of the second node have stopped, and those of the first wait."""
    if setting.node == 0:
        return programs.hanging(setting.board, 2, name="the other node never comes", waits=kernels.polling())
    return programs.hanging(setting.board, 2, name="the node's processes stand still", waits=IDLE_CYCLE)


def _beside_another(setting: Setting) -> Plan:
    """Plan two jobs on one node, the first of which hangs."""
    half = setting.gpus // 2
    first, rest = setting.slots[:half], setting.slots[half:]
    return Plan(
        jobs=(
            SimulatedJob(
                owner=batch_owner(setting, 1, "ablation"), slots=first, stages=_missing_rank(setting.board, half)
            ),
            SimulatedJob(
                owner=batch_owner(setting, 2, "pretrain"), slots=rest, stages=programs.training(setting.board, half)
            ),
        )
    )


def _smoothed(setting: Setting) -> Plan:
    return replace(_ranks(_all_wait)(setting), power_floor=0.45)


def _drained(setting: Setting) -> Plan:
    """Plan half the GPUs drained while their job runs; it ends six minutes later."""
    job = whole_node(setting, "pretrain", programs.training(setting.board, setting.gpus), hold_ms=16 * MINUTE_MS)
    drained = dict.fromkeys(setting.slots[: max(1, setting.gpus // 2)], 10 * MINUTE_MS + 300)
    return Plan(jobs=(job,), drained_ms=drained)


def _profiler(setting: Setting) -> Plan:
    job = whole_node(setting, "pretrain", programs.training(setting.board, setting.gpus))
    return Plan(jobs=(job,), profiler_ms=((5 * MINUTE_MS + 400, 15 * MINUTE_MS + 400),))


def _pace(bubble: float) -> Callable[[BoardModel, int], Program]:
    return lambda board, ranks: _pausing_steps(
        board, ranks, name="pipeline stages", doing=_pipeline(board, bubble=bubble), ms=FOREVER_MS
    )


_EXCHANGE_MS = 8 * MINUTE_MS
LOOKALIKES: dict[str, Scenario] = {
    # Stuck, for half an hour where a GPU rests or nothing has worked, so that the default policy calls it hung.
    "missing_rank": Scenario(_ranks(_missing_rank), 2520, "one rank stops, the others wait", min_gpus=2),
    "all_ranks_wait": Scenario(
        _ranks(_all_wait), 1320, "every rank waits in a collective, none is to blame", min_gpus=2
    ),
    "deadlock_across": Scenario(
        _across(lambda setting: _all_wait(setting.board, 2)), 1320, "all ranks on two nodes wait for ever"
    ),
    "missing_node": Scenario(_across(_half_the_job), 1320, "one node of two stops, the other waits"),
    "nic_hang": SCENARIOS["nic_hang"],
    "one_gpu_hang": Scenario(_alone(_one_gpu), 1320, "the only kernel of a one-GPU job waits for ever"),
    "startup_hang": Scenario(_ranks(_at_startup), 2100, "the first collective of a job never ends", min_gpus=2),
    "smoothed_hang": Scenario(_smoothed, 1320, "all ranks wait on boards that hold their power up", min_gpus=2),
    "hang_beside_training": Scenario(_beside_another, 2520, "one of two jobs on a node is stuck", min_gpus=4),
    # Waiting, and going on.
    "rank0_checkpoint": SCENARIOS["rank0_checkpoint"],
    "rank0_long_checkpoint": Scenario(
        rank0_checkpoint(240), 1080, "rank 0 writes a checkpoint for four minutes, the others wait", min_gpus=2
    ),
    "rank0_slow_checkpoint": Scenario(rank0_checkpoint(480), 1320, "the same for eight minutes", min_gpus=2),
    "rank0_evaluation": SCENARIOS["rank0_evaluation"],
    "evaluation_elsewhere": Scenario(
        _across(lambda setting: rank0_evaluation(setting.board, setting.gpus, rank0_here=setting.node == 0)),
        1800,
        "rank 0 evaluates for 20 minutes on one node, all ranks of the other wait",
    ),
    "index_on_rank0": Scenario(
        _ranks(_index), 1500, "rank 0 builds an index on its host for 20 minutes, others wait", min_gpus=2
    ),
    "pipeline_bubbles": Scenario(_ranks(_pace(0.4)), 1080, "pipeline stages that wait 40 % of each step", min_gpus=2),
    "collectives": Scenario(
        _ranks(
            lambda board, ranks: _pausing_steps(
                board, ranks, name="weights are laid out anew", doing=_exchanging(board), ms=_EXCHANGE_MS
            )
        ),
        1200,
        "eight minutes of nothing but large collectives",
        min_gpus=2,
    ),
    # Getting ready.
    "autotune": Scenario(
        _ranks(lambda b, n: programs.long_preparation(b, n, name="kernels are tuned", doing=_tuning(), minutes=15)),
        1200,
        "kernels are compiled and tuned for a quarter of an hour",
    ),
    "long_first_step": SCENARIOS["long_first_step"],
    "slow_image": Scenario(
        _alone(lambda board: _slow_image_pull(board, minutes=20)), 1800, "an image is pulled for 20 minutes"
    ),
    "two_parts": Scenario(
        _alone(lambda board: _two_programs(board, pause_minutes=25)),
        2400,
        "a script that works on the host for 25 minutes between two programs",
    ),
    # Serving.
    "serving_lull": SCENARIOS["serving_lull"],
    "serving_for_nobody": Scenario(
        servers(("answering", 8.0, kernels.decode), ("nobody asks", 24 * 60.0, lambda _: IDLE_CYCLE)),
        round(5.6 * _HOUR),
        "a server that nobody asks any more",
    ),
    "idle_poller": SCENARIOS["idle_poller"],
    "host_poller": Scenario(
        servers(("polling", 40.0, kernels.polling_host), ("answering", 8.0, kernels.decode)),
        3600,
        "the same, with the queue in host memory",
    ),
    "few_requests": Scenario(servers(("answering", 60.0, _few_tokens)), 1500, "a server seldom asked"),
    # Work that shows in one place only.
    "fp64_in_registers": Scenario(
        _one_cycle("integrating", lambda _: _one_pipe("fp64", 0.6)), 900, "FP64 without memory traffic"
    ),
    "fp32_in_registers": Scenario(
        _one_cycle("integrating", lambda _: _one_pipe("fp32", 0.5)), 900, "FP32 without memory traffic"
    ),
    "integers_in_registers": Scenario(
        _one_cycle("searching", lambda _: _one_pipe("integer", 0.8)), 900, "integers without memory traffic"
    ),
    "tiny_kernels": Scenario(_one_cycle("stepping", _tiny_kernels), 900, "short kernels that leave no trace"),
    "thin_fp64": Scenario(
        _one_cycle("integrating", lambda _: _one_pipe("fp64", 0.03, sm=0.1)), 900, "a few warps of FP64"
    ),
    "thin_tensor": Scenario(
        _one_cycle("recurring", lambda _: _one_pipe("tensor", 0.02, sm=0.2)), 900, "weights held in registers"
    ),
    "pointer_chase": Scenario(_one_cycle("walking", _walking), 900, "a graph is walked in device memory"),
    "host_gather": Scenario(_one_cycle("gathering", _gathering), 900, "rows are read from host memory by kernels"),
    "small_puts": Scenario(
        _ranks(lambda board, ranks: _pausing_steps(board, ranks, name="puts", doing=_passing_on(board), ms=FOREVER_MS)),
        900,
        "small messages go from GPU to GPU and nothing else",
        min_gpus=2,
    ),
    "slow_loader": Scenario(_alone(_slowly_fed_training), 1800, "each batch takes the loader most of a minute"),
    # Forgotten, or seldom used.
    "keeper": Scenario(
        _alone(
            lambda _: programs.repeating(
                ("keeping", 1 / 60, kernels.large_gemm()), ("resting", 29 - 1 / 60, IDLE_CYCLE)
            )
        ),
        2 * _HOUR,
        "a program that computes for one second every 29 minutes",
    ),
    "used_notebook": Scenario(_notebook, round(3.6 * _HOUR), "a notebook used for three minutes every 100"),
    "dead_program": Scenario(
        _alone(lambda board: _ending_training(board, after_ms=10 * MINUTE_MS + 123)),
        4500,
        "a program ends, and its hold goes on",
    ),
    # Nobody's.
    "slow_epilog": Scenario(
        _alone(
            lambda board: _ending_training(board, after_ms=10 * MINUTE_MS + 45_000), hold_ms=10 * MINUTE_MS, orphan=True
        ),
        1500,
        "processes are killed 45 s after their job's end",
    ),
    "agent_on_free_gpu": Scenario(
        _alone(lambda _: programs.single_cycle("an agent looks on", IDLE_CYCLE, memory=0.0), hold_ms=1000, orphan=True),
        1800,
        "a monitoring agent holds a context on a GPU nobody has",
    ),
    # Telemetry and health.
    "profiler_attached": Scenario(_profiler, 1500, "someone's profiler has the counters for ten minutes of training"),
    "drained_gpus": Scenario(_drained, 1500, "GPUs are drained while their job goes on"),
}
