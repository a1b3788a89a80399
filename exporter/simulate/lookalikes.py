"""Stories of jobs that are stuck, gone or forgotten, and of others that only look so: one row a story.

Owns who holds which GPU and when. Refuses labels: a row says what happens, its reader what to call it. Those that
people would like to watch are scenarios too.
"""

from collections.abc import Callable

from msgspec.structs import replace

from exporter.simulate import habits, kernels, programs, waiting
from exporter.simulate.boards import Board
from exporter.simulate.plan import Job, Plan
from exporter.simulate.programs import MINUTE_MS, Program
from exporter.simulate.setting import Scenario, Setting, batch, interactive, server, whole_node
from exporter.simulate.work import FOREVER_MS, NOTHING, Cycle

_HOUR = 3600


def _ranks(make: Callable[[Board, int], Program]) -> Callable[[Setting], Plan]:
    """One batch job on all GPUs of the node."""
    return lambda setting: Plan(jobs=(whole_node(setting, "pretrain", make(setting.board, setting.gpus)),))


def _across(make: Callable[[Setting], Program]) -> Callable[[Setting], Plan]:
    """One batch job on all GPUs of this node and of another."""

    def plan(setting: Setting) -> Plan:
        owner = replace(batch(setting, 0, "pretrain-large"), job_id="40500")
        return Plan(jobs=(Job(owner=owner, slots=setting.slots, stages=make(setting), gpus=2 * setting.gpus),))

    return plan


def _serves(*rounds: tuple[str, float, Callable[[Board], Cycle]]) -> Callable[[Setting], Plan]:
    """A server on each GPU."""

    def plan(setting: Setting) -> Plan:
        made = [(name, minutes, cycle(setting.board)) for name, minutes, cycle in rounds]
        program = habits.by_and_by(*made, program="server", memory=0.9)
        return Plan(jobs=tuple(Job(owner=server(setting, n), slots=(n,), stages=program) for n in setting.slots))

    return plan


def _alone(make: Callable[[Board], Program], *, hold_ms: int = FOREVER_MS, orphan: bool = False) -> Callable[..., Plan]:
    """A batch job of its own on each GPU; with `orphan` its process outlives the hold."""
    left = frozenset({0}) if orphan else frozenset[int]()

    def plan(setting: Setting) -> Plan:
        return Plan(
            jobs=tuple(
                Job(owner=batch(setting, n, "sweep"), slots=(n,), stages=make(setting.board), hold_ms=hold_ms,
                    orphans=left)
                for n in setting.slots
            )
        )  # fmt: skip

    return plan


def _one_cycle(name: str, make: Callable[[Board], Cycle]) -> Callable[[Setting], Plan]:
    """Training's usual beginning, then one cycle on every GPU, each a job of its own."""
    return _alone(lambda board: habits.by_and_by((name, 60 * 24.0, make(board))))


def _notebook(setting: Setting) -> Plan:
    rounds = ("a cell runs", 3.0, kernels.training_step(setting.board, alone=True)), ("reading", 97.0, NOTHING)
    program = habits.by_and_by(*rounds)
    return Plan(jobs=tuple(Job(owner=interactive(setting, 500 + n), slots=(n,), stages=program) for n in setting.slots))


def _checkpoint(seconds: int) -> Callable[[Setting], Plan]:
    return _ranks(
        lambda board, ranks: waiting.alone_for_a_while(
            board, ranks, name="rank 0 writes a checkpoint", doing=kernels.copy_out(board, rate=3e9), ms=seconds * 1000
        )
    )


def _evaluation(board: Board, ranks: int, *, chief: bool = True) -> Program:
    return waiting.alone_for_a_while(
        board, ranks, name="rank 0 evaluates", doing=kernels.evaluation(), ms=20 * MINUTE_MS, chief=chief
    )


def _index(board: Board, ranks: int) -> Program:
    return waiting.alone_for_a_while(
        board, ranks, name="rank 0 builds an index", doing=NOTHING, ms=20 * MINUTE_MS, begun=False
    )


def _missing_rank(board: Board, ranks: int) -> Program:
    return waiting.stuck(board, ranks, name="one rank never comes", waits=kernels.polling(), absent=NOTHING)


def _all_wait(board: Board, ranks: int) -> Program:
    return waiting.stuck(board, ranks, name="all ranks wait", waits=kernels.polling())


def _nic(board: Board, ranks: int) -> Program:
    return waiting.stuck(board, ranks, name="the network card never answers", waits=kernels.polling_host(board))


def _one_gpu(board: Board, _: int = 1) -> Program:
    return waiting.stuck(board, 1, name="a kernel waits for ever", waits=kernels.one_block(board))


def _at_startup(board: Board, ranks: int) -> Program:
    return waiting.stuck(board, ranks, name="the first collective never ends", waits=kernels.polling(), begun=False)


def _half_the_job(setting: Setting) -> Program:
    """The second node's processes have stopped; the first node's wait."""
    if setting.node == 0:
        return waiting.stuck(setting.board, 2, name="the other node never comes", waits=kernels.polling())
    return waiting.stuck(setting.board, 2, name="the node's processes stand still", waits=NOTHING)


def _beside_another(setting: Setting) -> Plan:
    """Two jobs on one node, the first is stuck."""
    half = setting.gpus // 2
    first, rest = setting.slots[:half], setting.slots[half:]
    return Plan(
        jobs=(
            Job(owner=batch(setting, 1, "ablation"), slots=first, stages=_missing_rank(setting.board, half)),
            Job(owner=batch(setting, 2, "pretrain"), slots=rest, stages=programs.training(setting.board, half)),
        )
    )


def _smoothed(setting: Setting) -> Plan:
    return replace(_ranks(_all_wait)(setting), power_floor=0.45)


def _drained(setting: Setting) -> Plan:
    """Half the GPUs are drained while their job works, and it ends six minutes later."""
    job = whole_node(setting, "pretrain", programs.training(setting.board, setting.gpus), hold_ms=16 * MINUTE_MS)
    drained = dict.fromkeys(setting.slots[: max(1, setting.gpus // 2)], 10 * MINUTE_MS + 300)
    return Plan(jobs=(job,), drained_ms=drained)


def _profiler(setting: Setting) -> Plan:
    job = whole_node(setting, "pretrain", programs.training(setting.board, setting.gpus))
    return Plan(jobs=(job,), profiler_ms=((5 * MINUTE_MS + 400, 15 * MINUTE_MS + 400),))


def _pace(bubble: float) -> Callable[[Board, int], Program]:
    return lambda board, ranks: waiting.busy_together(
        board, ranks, name="pipeline stages", doing=kernels.pipeline(board, bubble=bubble), ms=FOREVER_MS
    )


def _row(plan: Callable[[Setting], Plan], seconds: float, description: str, *, min_gpus: int = 1) -> Scenario:
    return Scenario(description=description, plan=plan, duration_seconds=round(seconds), min_gpus=min_gpus)


_GEMM = kernels.large_gemm()
_EXCHANGE_MS = 8 * MINUTE_MS
STORIES: dict[str, Scenario] = {
    # Stuck.
    "missing_rank": _row(_ranks(_missing_rank), 1320, "one rank stops, the others wait", min_gpus=2),
    "all_ranks_wait": _row(_ranks(_all_wait), 1320, "every rank waits in a collective, none is to blame", min_gpus=2),
    "deadlock_across": _row(
        _across(lambda setting: _all_wait(setting.board, 2)), 1320, "all ranks on two nodes wait for ever"
    ),
    "missing_node": _row(_across(_half_the_job), 1320, "one node of two stops, the other waits"),
    "nic_hang": _row(_ranks(_nic), 1320, "a collective waits for its network card, polling host memory"),
    "one_gpu_hang": _row(_alone(_one_gpu), 1320, "the only kernel of a one-GPU job waits for ever"),
    "startup_hang": _row(_ranks(_at_startup), 960, "the first collective of a job never ends", min_gpus=2),
    "smoothed_hang": _row(_smoothed, 1320, "all ranks wait on boards that hold their power up", min_gpus=2),
    "hang_beside_training": _row(_beside_another, 1320, "one of two jobs on a node is stuck", min_gpus=4),
    # Waiting, and going on.
    "rank0_checkpoint": _row(_checkpoint(90), 900, "rank 0 writes a checkpoint for 90 s, the others wait", min_gpus=2),
    "rank0_long_checkpoint": _row(
        _checkpoint(240), 1080, "rank 0 writes a checkpoint for four minutes, the others wait", min_gpus=2
    ),
    "rank0_slow_checkpoint": _row(_checkpoint(480), 1320, "the same for eight minutes", min_gpus=2),
    "rank0_evaluation": _row(_ranks(_evaluation), 1800, "rank 0 evaluates for 20 minutes, others wait", min_gpus=2),
    "evaluation_elsewhere": _row(
        _across(lambda setting: _evaluation(setting.board, setting.gpus, chief=setting.node == 0)),
        1800,
        "rank 0 evaluates for 20 minutes on one node, all ranks of the other wait",
    ),
    "index_on_rank0": _row(
        _ranks(_index), 1500, "rank 0 builds an index on its host for 20 minutes, others wait", min_gpus=2
    ),
    "pipeline_bubbles": _row(_ranks(_pace(0.4)), 1080, "pipeline stages that wait 40 % of each step", min_gpus=2),
    "collectives": _row(
        _ranks(
            lambda board, ranks: waiting.busy_together(
                board, ranks, name="weights are laid out anew", doing=kernels.exchanging(board), ms=_EXCHANGE_MS
            )
        ),
        1200,
        "eight minutes of nothing but large collectives",
        min_gpus=2,
    ),
    # Getting ready.
    "autotune": _row(
        _ranks(lambda b, n: habits.preparing(b, n, name="kernels are tuned", doing=kernels.tuning(), minutes=15)),
        1200,
        "kernels are compiled and tuned for a quarter of an hour",
    ),
    "long_first_step": _row(
        _ranks(lambda b, n: habits.preparing(b, n, name="first step", doing=kernels.now_and_then(), minutes=22)),
        1800,
        "the first step takes 22 minutes, most of them on the host",
    ),
    "slow_image": _row(
        _alone(lambda board: habits.coming_late(board, minutes=20)), 1800, "an image is pulled for 20 minutes"
    ),
    "two_parts": _row(
        _alone(lambda board: habits.in_two_parts(board, pause_minutes=25)),
        2400,
        "a script that works on the host for 25 minutes between two programs",
    ),
    # Serving.
    "serving_lull": _row(
        _serves(("answering", 8.0, kernels.decode), ("nobody asks", 240.0, lambda _: NOTHING)),
        4.5 * _HOUR,
        "a server with four hours between two bursts of requests",
    ),
    "serving_for_nobody": _row(
        _serves(("answering", 8.0, kernels.decode), ("nobody asks", 24 * 60.0, lambda _: NOTHING)),
        5.6 * _HOUR,
        "a server that nobody asks any more",
    ),
    "idle_poller": _row(
        _serves(("polling", 40.0, kernels.polling_queue), ("answering", 8.0, kernels.decode)),
        3600,
        "a server whose resident kernel polls an empty queue for 40 minutes at a time",
    ),
    "host_poller": _row(
        _serves(("polling", 40.0, kernels.polling_host), ("answering", 8.0, kernels.decode)),
        3600,
        "the same, with the queue in host memory",
    ),
    "few_requests": _row(_serves(("answering", 60.0, kernels.few_tokens)), 1500, "a server seldom asked"),
    # Work that shows in one place only.
    "fp64_in_registers": _row(
        _one_cycle("integrating", lambda _: kernels.one_pipe("fp64", 0.6)), 900, "FP64 without memory traffic"
    ),
    "fp32_in_registers": _row(
        _one_cycle("integrating", lambda _: kernels.one_pipe("fp32", 0.5)), 900, "FP32 without memory traffic"
    ),
    "integers_in_registers": _row(
        _one_cycle("searching", lambda _: kernels.one_pipe("integer", 0.8)), 900, "integers without memory traffic"
    ),
    "tiny_kernels": _row(_one_cycle("stepping", kernels.tiny_kernels), 900, "short kernels that leave no trace"),
    "thin_fp64": _row(
        _one_cycle("integrating", lambda _: kernels.one_pipe("fp64", 0.03, sm=0.1)), 900, "a few warps of FP64"
    ),
    "thin_tensor": _row(
        _one_cycle("recurring", lambda _: kernels.one_pipe("tensor", 0.02, sm=0.2)), 900, "weights held in registers"
    ),
    "pointer_chase": _row(_one_cycle("walking", kernels.walking), 900, "a graph is walked in device memory"),
    "host_gather": _row(_one_cycle("gathering", kernels.gathering), 900, "rows are read from host memory by kernels"),
    "small_puts": _row(
        _ranks(
            lambda board, ranks: waiting.busy_together(
                board, ranks, name="puts", doing=kernels.passing_on(board), ms=FOREVER_MS
            )
        ),
        900,
        "small messages go from GPU to GPU and nothing else",
        min_gpus=2,
    ),
    "slow_loader": _row(_alone(habits.fed_slowly), 1800, "each batch takes the loader most of a minute"),
    # Forgotten, or seldom used.
    "keeper": _row(
        _alone(lambda _: habits.by_and_by(("keeping", 1 / 60, _GEMM), ("resting", 29 - 1 / 60, NOTHING))),
        2 * _HOUR,
        "a program that computes for one second every 29 minutes",
    ),
    "used_notebook": _row(_notebook, 3.6 * _HOUR, "a notebook used for three minutes every 100"),
    "dead_program": _row(
        _alone(lambda board: habits.ending(board, after_ms=10 * MINUTE_MS + 123)),
        4500,
        "a program ends, and its hold goes on",
    ),
    # Nobody's.
    "slow_epilog": _row(
        _alone(lambda board: habits.ending(board, after_ms=10 * MINUTE_MS + 45_000), hold_ms=10 * MINUTE_MS,
               orphan=True),
        1500,
        "processes are killed 45 s after their job's end",
    ),
    "agent_on_free_gpu": _row(
        _alone(lambda _: programs.one_thing("an agent looks on", NOTHING, memory=0.0), hold_ms=1000, orphan=True),
        1800,
        "a monitoring agent holds a context on a GPU nobody has",
    ),
    # Telemetry and health.
    "profiler_attached": _row(_profiler, 1500, "someone's profiler has the counters for ten minutes of training"),
    "drained_gpus": _row(_drained, 1500, "GPUs are drained while their job goes on"),
}  # fmt: skip
SHOWN = ("rank0_checkpoint", "rank0_evaluation", "long_first_step", "serving_lull", "idle_poller", "nic_hang")
"""Stories that are scenarios of the command line as well."""
