"""Defines the scenarios of `demo` and `simulate`: which jobs run on which GPUs and when."""

from collections.abc import Callable

from msgspec.structs import replace

from exporter.core.model import Parallel
from exporter.simulate import kernels, programs, reporting
from exporter.simulate.boards import BoardModel
from exporter.simulate.plan import (
    Plan,
    Scenario,
    Setting,
    SimulatedJob,
    batch_owner,
    impatient,
    notebook_owner,
    one_each,
    server_owner,
    whole_node,
)
from exporter.simulate.workload import HOUR_MS, IDLE_CYCLE, MINUTE_MS, Cycle, Program, ReportingOptions

_HOUR = 3600


def all_gpus(name: str, make: Callable[[BoardModel, int], Program]) -> Callable[[Setting], Plan]:
    """Plan one batch job on all GPUs of the node; `make` is called with their number."""
    return lambda setting: Plan(jobs=(whole_node(setting, name, make(setting.board, setting.gpus)),))


def each_gpu(name: str, make: Callable[[BoardModel], Program]) -> Callable[[Setting], Plan]:
    """Plan one batch job per GPU."""
    return lambda setting: Plan(jobs=one_each(setting, name, make(setting.board)))


def servers(*rounds: tuple[str, float, Callable[[BoardModel], Cycle]]) -> Callable[[Setting], Plan]:
    """Plan one server per GPU, which runs these in turn: name, minutes, cycle."""

    def plan(setting: Setting) -> Plan:
        made = [(name, minutes, cycle(setting.board)) for name, minutes, cycle in rounds]
        program = programs.repeating(*made, program="server", memory=0.9)
        return Plan(
            jobs=tuple(SimulatedJob(owner=server_owner(setting, n), slots=(n,), stages=program) for n in setting.slots)
        )

    return plan


def rank0_checkpoint(seconds: int) -> Callable[[Setting], Plan]:
    """Plan training in which rank 0 writes a checkpoint for `seconds`, while all others wait."""

    def make(board: BoardModel, ranks: int) -> Program:
        doing = kernels.copy_out(board, rate=3e9)
        return programs.rank0_alone(board, ranks, name="rank 0 writes a checkpoint", doing=doing, ms=seconds * 1000)

    return all_gpus("pretrain", make)


def rank0_evaluation(board: BoardModel, ranks: int, *, rank0_here: bool = True) -> Program:
    """Training in which rank 0, on this node or another, evaluates for 20 minutes, while all others wait."""
    doing = kernels.evaluation()
    return programs.rank0_alone(
        board, ranks, name="rank 0 evaluates", doing=doing, ms=20 * MINUTE_MS, rank0_here=rank0_here
    )


def _long_first_step(board: BoardModel, ranks: int) -> Program:
    return programs.long_preparation(board, ranks, name="first step", doing=kernels.now_and_then(), minutes=22)


def _nic_hang(setting: Setting) -> Plan:
    waits = kernels.polling_host(setting.board)
    program = programs.hanging(setting.board, setting.gpus, name="the network card never answers", waits=waits)
    return Plan(jobs=(impatient(whole_node(setting, "pretrain", program)),))


def _spin_kernel(setting: Setting) -> Plan:
    program = programs.single_cycle("one block waits for a flag", kernels.one_block(setting.board))
    return Plan(jobs=tuple(map(impatient, one_each(setting, "spin", program))))


_healthy_training = all_gpus("pretrain", programs.training)


def _memory_bound_decode(setting: Setting) -> Plan:
    half = setting.gpus // 2
    shared = setting.slots[:half] if half > 1 else ()
    singles = setting.slots[len(shared) :]
    together = SimulatedJob(
        owner=server_owner(setting, 100), slots=shared, stages=programs.decoding(setting.board, half)
    )
    alone = (
        SimulatedJob(owner=server_owner(setting, slot), slots=(slot,), stages=programs.decoding(setting.board, 1))
        for slot in singles
    )
    return Plan(jobs=((together,) if shared else ()) + tuple(alone))


def _notebook(setting: Setting, slot: int, *, start_ms: int) -> SimulatedJob:
    return SimulatedJob(
        owner=notebook_owner(setting, 500 + slot),
        slots=(slot,),
        stages=programs.notebook(setting.board),
        start_ms=start_ms,
    )


def _zombie_notebook(setting: Setting) -> Plan:
    # Starts are not on the sampling grid, as in practice.
    return Plan(jobs=tuple(_notebook(setting, slot, start_ms=2_345 + 5_000 * slot) for slot in setting.slots))


def _leaked_process(setting: Setting) -> Plan:
    job = SimulatedJob(
        owner=batch_owner(setting, 1, "sweep"),
        slots=setting.slots,
        stages=programs.training(setting.board, 1),
        hold_ms=10 * MINUTE_MS + 250,
        orphans=frozenset(setting.slots[: max(1, setting.gpus // 4)]),
    )
    return Plan(jobs=(job,))


def _deadlock(setting: Setting) -> Plan:
    program = programs.deadlocking(setting.board, setting.gpus, after_ms=15 * MINUTE_MS)
    return Plan(jobs=(impatient(whole_node(setting, "pretrain", program)),))


_input_starved_training = all_gpus("vision", programs.starved_training)
_throttled = all_gpus("pretrain", programs.slowed_training)


def _lost_gpu(setting: Setting) -> Plan:
    missing, when = setting.gpus - 1, 10 * MINUTE_MS + 400
    program = programs.losing(setting.board, setting.gpus, missing=missing, after_ms=when)
    # By default the watchdog of the collective library ends the job after ten minutes.
    job = whole_node(setting, "pretrain", program, hold_ms=when + 10 * MINUTE_MS)
    return Plan(jobs=(job,), lost_ms={missing: when})


def _telemetry_outage(setting: Setting) -> Plan:
    silence = (10 * MINUTE_MS + 500, 15 * MINUTE_MS + 500)
    return replace(_healthy_training(setting), silent_ms=(silence,))


def _carpenter(setting: Setting) -> Plan:
    program = programs.alternating(setting.board)
    jobs = one_each(setting, "carpenter", program)
    return Plan(jobs=tuple(replace(job, start_ms=2 * HOUR_MS) for job in jobs), noise=0.0)


_ROUND_MS = 30 * MINUTE_MS


def _demo(setting: Setting) -> Plan:
    """Plan eight GPUs with four tenants, two of which report; `live` is the end of the pre-roll."""
    board, live = setting.board, setting.preroll_ms
    chat = reporting.reporting_server(programs.decoding(board, 1), board)
    jobs = (
        _demo_trainer(setting, start_ms=max(0, live - 40 * MINUTE_MS)),
        SimulatedJob(owner=server_owner(setting, 4), slots=(4,), stages=chat, serves=True),
        _notebook(setting, 5, start_ms=2_345),
        *_demo_pair(setting, first=max(0, live - 510_000)),
    )
    return Plan(jobs=tuple(job for job in jobs if max(job.slots) < setting.gpus))


def _demo_trainer(setting: Setting, *, start_ms: int) -> SimulatedJob:
    calm = setting.preroll_ms - start_ms + 3 * MINUTE_MS
    return SimulatedJob(
        owner=batch_owner(setting, 1, "pretrain"),
        slots=(0, 1, 2, 3),
        stages=reporting.reporting_trainer(
            programs.disturbed_training(setting.board, 4, undisturbed_ms=calm), setting.board
        ),
        start_ms=start_ms,
        reporting=ReportingOptions(run="pretrain-8b", recompute="selective", parallel=Parallel(data=4)),
    )


def _demo_pair(setting: Setting, *, first: int) -> tuple[SimulatedJob, ...]:
    """Plan two GPUs for a job that deadlocks and is cancelled, and one that leaves a process behind, repeatedly."""
    end = min(setting.duration_ms, first + 7 * 24 * HOUR_MS)
    rounds = range(first, end, _ROUND_MS)
    return tuple(job for number, start in enumerate(rounds) for job in _demo_round(setting, number, start))


def _demo_round(setting: Setting, number: int, start: int) -> tuple[SimulatedJob, SimulatedJob]:
    board = setting.board

    def finite(minutes: int) -> Program:
        return lambda rng: programs.until(programs.training(board, 2)(rng), minutes * MINUTE_MS)

    stuck = SimulatedJob(
        owner=batch_owner(setting, 10 + 2 * number, "ablation", user="barbara"),
        slots=(6, 7),
        stages=programs.deadlocking(board, 2, after_ms=5 * MINUTE_MS),
        start_ms=start,
        hold_ms=16 * MINUTE_MS,
    )
    leaky = SimulatedJob(
        owner=batch_owner(setting, 11 + 2 * number, "evaluate", user="barbara"),
        slots=(6, 7),
        stages=finite(10),
        start_ms=start + 18 * MINUTE_MS,
        hold_ms=7 * MINUTE_MS,
        orphans=frozenset({0}),
    )
    return impatient(stuck), leaky


def _across_nodes(setting: Setting) -> Plan:
    """Plan half of a job that spans this node and its neighbour."""
    pair = setting.node // len(_FLEET)
    owner = replace(batch_owner(setting, 0, "pretrain-large"), job_id=str(40_000 + pair))
    program = programs.training(setting.board, 2 * setting.gpus)
    return Plan(jobs=(SimulatedJob(owner=owner, slots=setting.slots, stages=program, gpus=2 * setting.gpus),))


_FLEET = (
    _across_nodes,
    _across_nodes,
    _memory_bound_decode,
    _input_starved_training,
    _deadlock,
    _zombie_notebook,
    _throttled,
    lambda _: Plan(),
)


def _fleet(setting: Setting) -> Plan:
    return _FLEET[setting.node % len(_FLEET)](setting)


SCENARIOS: dict[str, Scenario] = {
    "demo": Scenario(
        _demo, _HOUR, "eight GPUs, four tenants: training, a chat server, a forgotten notebook, a job that deadlocks",
        preroll_seconds=3 * _HOUR,
    ),
    "healthy_training": Scenario(
        _healthy_training, 1800,
        "one data-parallel job on all GPUs, with short exchanges and a checkpoint every half hour",
    ),
    "memory_bound_decode": Scenario(
        _memory_bound_decode, 1800, "language-model servers generating tokens, one GPU each or tensor-parallel"
    ),
    "input_starved_training": Scenario(
        _input_starved_training, 1800, "training that waits for seconds at a time for its input pipeline"
    ),
    "zombie_notebook": Scenario(
        _zombie_notebook, 3 * _HOUR, "notebooks used for some minutes and then left open for hours"
    ),
    "leaked_process": Scenario(
        _leaked_process, 1800, "a job that ends for the scheduler while some of its processes continue"
    ),
    "deadlock": Scenario(
        _deadlock, 2700, "training until one rank stops, and all others poll in a collective without end", min_gpus=2
    ),
    "straggler": Scenario(
        all_gpus("pretrain", programs.straggling), 1800,
        "training in which every step waits for one rank with a slow host", min_gpus=2,
    ),
    "throttled": Scenario(
        _throttled, 1800, "training whose clocks are held down by hot air, then by a power brake"
    ),
    "lost_gpu": Scenario(
        _lost_gpu, 2400, "a GPU falls off the bus; the job waits for it until its watchdog ends it", min_gpus=2
    ),
    "telemetry_outage": Scenario(
        _telemetry_outage, 1800, "healthy training, while the telemetry source is silent for five minutes"
    ),
    "fleet": Scenario(
        _fleet, _HOUR, "a node of a mixed cluster; which one depends on the node's number", min_gpus=2
    ),
    "copy_loop": Scenario(
        each_gpu("copy", lambda board: programs.single_cycle("copying on the board", kernels.copy_on_board(board))),
        600, "device memory copied to device memory without a pause",
    ),
    "large_gemm": Scenario(
        each_gpu("gemm", lambda _: programs.single_cycle("multiplying matrices", kernels.large_gemm(), memory=0.3)),
        600, "large BF16 matrix products without a pause",
    ),
    "spin_kernel": Scenario(
        _spin_kernel, 900, "a kernel of one thread block that waits for a flag without end",
    ),
    "idle_context": Scenario(
        each_gpu(
            "sleep",
            lambda _: programs.single_cycle("a context and no kernel", IDLE_CYCLE, memory=0.0, program="sleep"),
        ),
        _HOUR, "a process that opens a CUDA context and sleeps",
    ),
    "carpenter": Scenario(
        _carpenter, 8 * _HOUR,
        "eight hours, without noise: two unallocated, four of constant work, two of pauses in between",
    ),
    "rank0_checkpoint": Scenario(
        rank0_checkpoint(90), 900, "rank 0 writes a checkpoint for 90 s, the others wait", min_gpus=2
    ),
    "rank0_evaluation": Scenario(
        all_gpus("pretrain", rank0_evaluation), 1800, "rank 0 evaluates for 20 minutes, others wait", min_gpus=2
    ),
    "long_first_step": Scenario(
        all_gpus("pretrain", _long_first_step), 1800, "the first step takes 22 minutes, most of them on the host"
    ),
    "serving_lull": Scenario(
        servers(("answering", 8.0, kernels.decode), ("nobody asks", 240.0, lambda _: IDLE_CYCLE)),
        round(4.5 * _HOUR), "a server with four hours between two bursts of requests",
    ),
    "idle_poller": Scenario(
        servers(("polling", 40.0, kernels.polling_queue), ("answering", 8.0, kernels.decode)),
        _HOUR, "a server whose resident kernel polls an empty queue for 40 minutes at a time",
    ),
    "nic_hang": Scenario(
        _nic_hang, 1320, "a collective waits for its network card, polling host memory"
    ),
}  # fmt: skip
