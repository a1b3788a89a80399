"""What programs know of their own work: a training program of its steps, a serving engine of its requests.

Owns the vocabulary of what is said (`Voice`, `Step`, `Service`), as counted by the program itself. Refuses when it is
said, which is `speaking`'s, and what the hardware does meanwhile, which is `work`'s.
"""

from msgspec import Struct

from exporter.core.model import Latency, Parallel


class Voice(Struct, frozen=True, kw_only=True):
    """How the training processes of a job speak of themselves, whatever they do."""

    run: str
    """What the job and its restarts have in common."""
    alone: bool = False
    """Rank 0 speaks for the GPUs of the whole job; else each rank for its own."""
    every_ms: int = 2000
    """A report is made at the end of the first step that comes so long after the last."""
    times: tuple[str, ...] = ("data", "communication")
    """Phases within a step that the program measures: told even where they take no time."""
    recompute: str = "none"
    dtype: str = "bf16"
    parallel: Parallel | None = None
    bubble: float | None = None
    """What the pipeline's schedule leaves empty of each step, 0-1, as the program works it out."""


class Step(Struct, frozen=True, kw_only=True):
    """One time round of a cycle as a training program counts it, on one rank.

    Without `after` no optimiser step is made: a spell of one phase, which is told when it begins and when it ends.
    """

    phases: tuple[str, ...]
    """Of each segment of the cycle, one of model.PHASES."""
    model_flops: float = 0.0
    """Of the model's own passes, on one GPU."""
    hardware_flops: float | None = None
    """With those that are computed twice; None: the program does not count them."""
    tokens: float = 0.0
    """On one GPU."""
    padding: float = 0.0
    after: int | None = None
    """The last optimiser step that had ended before."""
    highest: int | None = None
    """How far the run had come, as the process has read in its checkpoint."""
    resumes: int | None = None
    """The step that it goes on from, as a process that has read its checkpoint knows when the spell ends."""
    restart: bool = False
    """The first word of a process that begins anew."""
    checkpoints: int = 0
    """Made by the end of it."""
    within: bool = False
    """A wait in the midst of steps: nothing is said until the next of them has ended, and then how long it was."""


class Service(Struct, frozen=True, kw_only=True):
    """One time round of a cycle as a serving engine counts it, of all its GPUs together; gauges hold throughout."""

    engine: str = "vllm"
    running: int = 0
    waiting: int = 0
    slots: int = 256
    kv_use: float = 0.0
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    drafted_tokens: float = 0.0
    accepted_tokens: float = 0.0
    passes: float = 0.0
    flops: float = 0.0
    """On one GPU."""
    bytes: float = 0.0
    """To and from one GPU's memory."""
    inter_token_seconds: float | None = None
    calm_inter_token_seconds: float | None = None
    latencies: tuple[Latency, ...] = ()
