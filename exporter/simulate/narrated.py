"""What programs would say of themselves if they spoke: their stages as they are, with words to them.

Owns the words: which phase a stage is to the program, and how much of its kernels' work is the model's. Refuses to
change what goes on: every stage lasts as long, and does the same to the hardware.
"""

from math import floor
from random import Random

from msgspec.structs import replace

from exporter.simulate.boards import Board
from exporter.simulate.engines import TOKENS_A_MS, latencies
from exporter.simulate.plan import clock_ratio
from exporter.simulate.programs import Program
from exporter.simulate.steps import FLOPS_A_TOKEN
from exporter.simulate.words import Service, Step
from exporter.simulate.work import Mechanism, Segment, Stage, Stages

_FILLED = 0.92
"""Of what the tensor cores do in their time; the rest are tiles that a matrix fills in part only (an estimate)."""
_RECOMPUTED = 0.04
"""Of a step's FLOPs: attention alone is computed again (Korthikanti et al. 2022: 2 to 4 %)."""
_PADDED = 0.03
"""Of the tokens, where sequences are packed."""
_SPELLS = {
    "weights are loaded": "startup",
    "kernels are compiled": "startup",
    "waiting for input": "data",
    "input is copied in": "data",
    "a checkpoint is written": "checkpoint",
}
_WITHIN_A_STEP: dict[Mechanism, str] = {"computing": "compute", "exchanging": "communication", "idle": "compute"}
_KV_SHARE = 0.011
"""Of the KV cache, for each request: some 4,500 tokens of one that holds 420,000."""
_CACHED = 30.0
"""Tokens of a prompt that the prefix cache has, for each that it has not: a chat sends all that was said before."""
_TTFT = 0.004
"""Seconds to the first token, for each request that is in the batch already."""
_GRAIN = 1e-6
"""Of a step: where it ends is known to a few binary digits."""


def trainer(program: Program, board: Board) -> Program:
    """A training program that counts its steps, the same on every rank.

    Raises KeyError when a stage has a mechanism for which a step has no phase.
    """

    def stages(rng: Random) -> Stages:
        done = 0
        for stage in program(rng):
            step = _step(stage, board, after=done)
            yield replace(stage, step=step)
            if step is not None and step.after is not None:
                done += floor(stage.ms / stage.cycle(0).ms + _GRAIN)

    return stages


def _step(stage: Stage, board: Board, *, after: int) -> Step | None:
    if not stage.context:
        return None
    if stage.name in _SPELLS:
        phase = _SPELLS[stage.name]
        return Step(phases=(phase,), checkpoints=int(phase == "checkpoint"), within=phase == "data")
    segments = stage.cycle(0).segments
    done = sum(_work(stage, segment, board) for segment in segments) * board.peak_flops / 1000
    own = (1 - _RECOMPUTED) * done
    tokens = own / FLOPS_A_TOKEN
    return Step(
        phases=tuple(_WITHIN_A_STEP[segment.mechanism] for segment in segments),
        model_flops=own,
        hardware_flops=done,
        tokens=tokens,
        padding=_PADDED * tokens,
        after=after,
    )


def _work(stage: Stage, segment: Segment, board: Board) -> float:
    """Milliseconds of the board's peak that a segment comes to, at the clock it runs at: the same, the air hot or not.

    One clock holds throughout a cycle.
    """
    ratio = clock_ratio(board, stage.cycle(0).mean(), stage.climate(0))
    return _FILLED * ratio * segment.load.tensor * segment.ms


def server(program: Program, board: Board) -> Program:
    """A server on one GPU, whose engine answers while it decodes."""

    def stages(rng: Random) -> Stages:
        for stage in program(rng):
            yield replace(stage, service=_service(stage, board)) if stage.name == "decoding" else stage

    return stages


def _service(stage: Stage, board: Board) -> Service:
    """One pass: a token for each request in the batch, beside a piece of somebody's prompt."""
    cycle = stage.cycle(0)
    decode, prefill = cycle.segments[:2]
    generated, prompt = (TOKENS_A_MS * _work(stage, segment, board) for segment in (decode, prefill))
    mean, seconds = cycle.mean(), cycle.ms / 1000
    return Service(
        running=round(generated),
        kv_use=_KV_SHARE * generated,
        prompt_tokens=prompt,
        cached_tokens=_CACHED * prompt,
        generated_tokens=generated,
        passes=1,
        flops=(generated + prompt) / TOKENS_A_MS / 1000 * board.peak_flops,
        bytes=mean.dram * seconds * board.bandwidth,
        inter_token_seconds=seconds,
        calm_inter_token_seconds=seconds - prefill.ms / 1000,
        latencies=latencies(ttft=_TTFT * generated, itl=seconds, queue=0.02),
    )
