"""The stories a simulated node can tell: one row a scenario.

Owns who holds which GPU and when. Refuses figures of any kind of kernel (`kernels`) and what the processes do
(`programs`).
"""

from msgspec.structs import replace

from exporter.core.model import Parallel
from exporter.simulate import kernels, narrated, programs
from exporter.simulate.lookalikes import SHOWN, STORIES
from exporter.simulate.plan import Job, Plan
from exporter.simulate.programs import MINUTE_MS, Program
from exporter.simulate.setting import Scenario, Setting, batch, interactive, one_each, server, whole_node
from exporter.simulate.words import Voice
from exporter.simulate.work import NOTHING

_HOUR_MS = 60 * MINUTE_MS
_HOUR = 3600


def _healthy_training(setting: Setting) -> Plan:
    return Plan(jobs=(whole_node(setting, "pretrain", programs.training(setting.board, setting.gpus)),))


def _memory_bound_decode(setting: Setting) -> Plan:
    half = setting.gpus // 2
    shared = setting.slots[:half] if half > 1 else ()
    singles = setting.slots[len(shared) :]
    together = Job(owner=server(setting, 100), slots=shared, stages=programs.decoding(setting.board, half))
    alone = (
        Job(owner=server(setting, slot), slots=(slot,), stages=programs.decoding(setting.board, 1)) for slot in singles
    )
    return Plan(jobs=((together,) if shared else ()) + tuple(alone))


def _input_starved_training(setting: Setting) -> Plan:
    program = programs.starved_training(setting.board, setting.gpus)
    return Plan(jobs=(whole_node(setting, "vision", program),))


def _notebook(setting: Setting, slot: int, *, start_ms: int) -> Job:
    return Job(
        owner=interactive(setting, 500 + slot),
        slots=(slot,),
        stages=programs.notebook(setting.board),
        start_ms=start_ms,
    )


def _zombie_notebook(setting: Setting) -> Plan:
    # Starts off the sampling grid, as people do.
    return Plan(jobs=tuple(_notebook(setting, slot, start_ms=2_345 + 5_000 * slot) for slot in setting.slots))


def _leaked_process(setting: Setting) -> Plan:
    job = Job(
        owner=batch(setting, 1, "sweep"),
        slots=setting.slots,
        stages=programs.training(setting.board, 1),
        hold_ms=10 * MINUTE_MS + 250,
        orphans=frozenset(setting.slots[: max(1, setting.gpus // 4)]),
    )
    return Plan(jobs=(job,))


def _deadlock(setting: Setting) -> Plan:
    program = programs.deadlocking(setting.board, setting.gpus, after_ms=15 * MINUTE_MS)
    return Plan(jobs=(whole_node(setting, "pretrain", program),))


def _straggler(setting: Setting) -> Plan:
    return Plan(jobs=(whole_node(setting, "pretrain", programs.straggling(setting.board, setting.gpus)),))


def _throttled(setting: Setting) -> Plan:
    program = programs.slowed_training(setting.board, setting.gpus)
    return Plan(jobs=(whole_node(setting, "pretrain", program),))


def _lost_gpu(setting: Setting) -> Plan:
    missing, when = setting.gpus - 1, 10 * MINUTE_MS + 400
    program = programs.losing(setting.board, setting.gpus, missing=missing, after_ms=when)
    # The collective library's watchdog gives up after ten minutes by default, and the job fails.
    job = whole_node(setting, "pretrain", program, hold_ms=when + 10 * MINUTE_MS)
    return Plan(jobs=(job,), lost_ms={missing: when})


def _telemetry_outage(setting: Setting) -> Plan:
    silence = (10 * MINUTE_MS + 500, 15 * MINUTE_MS + 500)
    return replace(_healthy_training(setting), silent_ms=(silence,))


def _copy_loop(setting: Setting) -> Plan:
    program = programs.one_thing("copying on the board", kernels.copy_on_board(setting.board))
    return Plan(jobs=one_each(setting, "copy", program))


def _large_gemm(setting: Setting) -> Plan:
    program = programs.one_thing("multiplying matrices", kernels.large_gemm(), memory=0.3)
    return Plan(jobs=one_each(setting, "gemm", program))


def _spin_kernel(setting: Setting) -> Plan:
    program = programs.one_thing("one block waits for a flag", kernels.one_block(setting.board))
    return Plan(jobs=one_each(setting, "spin", program))


def _idle_context(setting: Setting) -> Plan:
    program = programs.one_thing("a context and no kernel", NOTHING, memory=0.0, program="sleep")
    return Plan(jobs=one_each(setting, "sleep", program))


def _carpenter(setting: Setting) -> Plan:
    program = programs.by_turns(setting.board)
    jobs = one_each(setting, "carpenter", program)
    return Plan(jobs=tuple(replace(job, start_ms=2 * _HOUR_MS) for job in jobs), noise=0.0)


_ROUND_MS = 30 * MINUTE_MS


def _demo(setting: Setting) -> Plan:
    """Eight GPUs, four tenants, of whom two speak; `live` is when someone starts to watch."""
    board, live = setting.board, setting.preroll_ms
    chat = narrated.server(programs.decoding(board, 1), board)
    jobs = (
        _demo_trainer(setting, start_ms=max(0, live - 40 * MINUTE_MS)),
        Job(owner=server(setting, 4), slots=(4,), stages=chat, serves=True),
        _notebook(setting, 5, start_ms=2_345),
        *_demo_pair(setting, first=max(0, live - 510_000)),
    )
    return Plan(jobs=tuple(job for job in jobs if max(job.slots) < setting.gpus))


def _demo_trainer(setting: Setting, *, start_ms: int) -> Job:
    calm = setting.preroll_ms - start_ms + 3 * MINUTE_MS
    return Job(
        owner=batch(setting, 1, "pretrain"),
        slots=(0, 1, 2, 3),
        stages=narrated.trainer(programs.eventful_training(setting.board, 4, calm_ms=calm), setting.board),
        start_ms=start_ms,
        voice=Voice(run="pretrain-8b", recompute="selective", parallel=Parallel(data=4)),
    )


def _demo_pair(setting: Setting, *, first: int) -> tuple[Job, ...]:
    """Give two GPUs to one job that deadlocks, is cancelled, and one that leaves a process behind; again and again."""
    end = min(setting.duration_ms, first + 7 * 24 * _HOUR_MS)
    rounds = range(first, end, _ROUND_MS)
    return tuple(job for number, start in enumerate(rounds) for job in _demo_round(setting, number, start))


def _demo_round(setting: Setting, number: int, start: int) -> tuple[Job, Job]:
    board = setting.board

    def finite(minutes: int) -> Program:
        return lambda rng: programs.until(programs.training(board, 2)(rng), minutes * MINUTE_MS)

    stuck = Job(
        owner=batch(setting, 10 + 2 * number, "ablation", user="barbara"),
        slots=(6, 7),
        stages=programs.deadlocking(board, 2, after_ms=5 * MINUTE_MS),
        start_ms=start,
        hold_ms=16 * MINUTE_MS,
    )
    leaky = Job(
        owner=batch(setting, 11 + 2 * number, "evaluate", user="barbara"),
        slots=(6, 7),
        stages=finite(10),
        start_ms=start + 18 * MINUTE_MS,
        hold_ms=7 * MINUTE_MS,
        orphans=frozenset({0}),
    )
    return stuck, leaky


def _across_nodes(setting: Setting) -> Plan:
    """Half of a job that spans this node and its neighbour."""
    pair = setting.node // len(_FLEET)
    owner = replace(batch(setting, 0, "pretrain-large"), job_id=str(40_000 + pair))
    program = programs.training(setting.board, 2 * setting.gpus)
    return Plan(jobs=(Job(owner=owner, slots=setting.slots, stages=program, gpus=2 * setting.gpus),))


def _empty(_: Setting) -> Plan:
    return Plan()


_FLEET = (
    _across_nodes,
    _across_nodes,
    _memory_bound_decode,
    _input_starved_training,
    _deadlock,
    _zombie_notebook,
    _throttled,
    _empty,
)


def _fleet(setting: Setting) -> Plan:
    return _FLEET[setting.node % len(_FLEET)](setting)


SCENARIOS: dict[str, Scenario] = {
    "demo": Scenario(
        description="eight GPUs, four tenants: training, a chat server, a forgotten notebook, a job that deadlocks",
        plan=_demo,
        duration_seconds=_HOUR,
        preroll_seconds=3 * _HOUR,
    ),
    "healthy_training": Scenario(
        description="one data-parallel job on all GPUs, with short exchanges and a checkpoint every half hour",
        plan=_healthy_training,
    ),
    "memory_bound_decode": Scenario(
        description="language-model servers generating tokens, one GPU each or tensor-parallel",
        plan=_memory_bound_decode,
    ),
    "input_starved_training": Scenario(
        description="training that waits for seconds at a time for its input pipeline",
        plan=_input_starved_training,
    ),
    "zombie_notebook": Scenario(
        description="notebooks used for some minutes and then left open for hours",
        plan=_zombie_notebook,
        duration_seconds=3 * _HOUR,
    ),
    "leaked_process": Scenario(
        description="a job that ends for the scheduler while some of its processes compute on",
        plan=_leaked_process,
    ),
    "deadlock": Scenario(
        description="training until one rank stops, and all others poll in a collective for ever",
        plan=_deadlock,
        duration_seconds=2700,
        min_gpus=2,
    ),
    "straggler": Scenario(
        description="training in which every step waits for one rank with a slow host",
        plan=_straggler,
        min_gpus=2,
    ),
    "throttled": Scenario(
        description="training whose clocks are held down by hot air, then by a power brake",
        plan=_throttled,
    ),
    "lost_gpu": Scenario(
        description="a GPU falls off the bus; the job waits for it until its watchdog ends it",
        plan=_lost_gpu,
        duration_seconds=2400,
        min_gpus=2,
    ),
    "telemetry_outage": Scenario(
        description="healthy training, while the telemetry source is silent for five minutes",
        plan=_telemetry_outage,
    ),
    "fleet": Scenario(
        description="a node of a mixed cluster; which one depends on the node's number",
        plan=_fleet,
        duration_seconds=_HOUR,
        min_gpus=2,
    ),
    "copy_loop": Scenario(
        description="device memory copied to device memory without a pause",
        plan=_copy_loop,
        duration_seconds=600,
    ),
    "large_gemm": Scenario(
        description="large BF16 matrix products without a pause",
        plan=_large_gemm,
        duration_seconds=600,
    ),
    "spin_kernel": Scenario(
        description="a kernel of one thread block that waits for a flag for ever",
        plan=_spin_kernel,
        duration_seconds=900,
    ),
    "idle_context": Scenario(
        description="a process that opens a CUDA context and sleeps",
        plan=_idle_context,
        duration_seconds=_HOUR,
    ),
    "carpenter": Scenario(
        description="eight hours, without noise: two held by nobody, four of even work, two of pauses in between",
        plan=_carpenter,
        duration_seconds=8 * _HOUR,
    ),
    **{name: STORIES[name] for name in SHOWN},
}
