"""Defines the message that a training process sends: its fields, their bounds, and the outcomes of receiving one.

`docs/report.schema.json` is derived from it. A message does not identify its sender or job.
"""

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from exporter.core.model import NARROW_DTYPES

OUTCOMES = {
    "taken": "accepted",
    "malformed": "not a valid message of this version",
    "too_large": "longer than MOST_BYTES",
    "too_many": "sent faster than reports.per_second",
    "too_many_connections": "more processes than reports.processes, or too many connections of one process",
    "busy": "arrived while the daemon's queue was full",
    "not_visible": "the sender's process is not visible to the daemon",
    "other_process": "sent by another process than the one that connected",
    "unknown_process": "the sender belongs to no job that holds a GPU of this node",
    "replayed": "covers time that the process has already reported",
    "before_start": "covers time before the process started",
    "future": "covers time in the future",
    "old": "ended more than an hour ago",
    "reported": "read from the log of a job that sends reports itself",
}
"""Outcomes of a message, counted by `gpu_efficiency_workload_messages_total{outcome}`. No other label values exist."""


class ReportRefusedError(Exception):
    """A message or a connection is rejected; the text is the reason, sent to the sender."""

    def __init__(self, outcome: str, reason: str, *, field: str = "", silent: bool = False) -> None:
        """`outcome` is one of OUTCOMES; `silent`: count it without a reply, because the sender was warned just now."""
        super().__init__(reason)
        self.outcome, self.field, self.silent = outcome, field, silent

    @property
    def packet(self) -> bytes:
        """The reply to the sender: JSON with `error` and `field`."""
        return msgspec.json.encode({"error": str(self), "field": self.field})


VERSION: Final = 1
MOST_BYTES = 4096
"""Maximum length of a message; a longer one is rejected without being parsed."""
_REASON_CHARS = 300
Text = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=10**15)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
Ranks = Annotated[int, Meta(ge=1, le=10**6)]
Dtype = Literal["", "bf16", "fp16", "tf32", "fp8", "fp4"]
PhaseName = Literal[
    "startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle"
]
Phase = Literal["", PhaseName]
_FIELD = re.compile(r"\$[\w.\[\]]*")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class Shape(Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder's shape, from which FLOPs are counted: 6N a token, and attention's 12*L*H*Q*T, half of it if causal.

    Of a mixture of experts N is the active parameters. Source: PaLM (Chowdhery et al. 2022), appendix B.
    """

    parameters: Annotated[float, Meta(gt=0, le=1e15)]
    """Active parameters."""
    layers: Annotated[int, Meta(ge=0, le=10**5)] = 0
    """0: FLOPs of the attention products are not counted."""
    heads: Annotated[int, Meta(ge=0, le=10**5)] = 0
    head_size: Annotated[int, Meta(ge=0, le=10**5)] = 0
    sequence: Annotated[int, Meta(ge=0, le=10**8)] = 0
    causal: bool = True
    trained: Annotated[float, Meta(ge=0, le=1e15)] | None = None
    """Trainable parameters, as with LoRA; None: all of them."""


class Degrees(Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees of parallelism of the whole job."""

    tensor: Ranks = 1
    pipeline: Ranks = 1
    data: Ranks = 1
    context: Ranks = 1
    expert: Ranks = 1


class Schedule(Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline's schedule: (p - 1) / (v * m + p - 1) of a step is a bubble (Narayanan et al. 2021)."""

    stages: Ranks
    microbatches: Ranks
    chunks: Ranks = 1
    """Model chunks per rank (interleaved schedule)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of what the model is good for, with the value that is wanted."""

    value: float
    name: Text = ""
    target: float | None = None
    falls: bool = False
    """Lower values are better."""


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. Everything may be left out.

    FLOPs, tokens and samples are those of `gpus` GPUs together over the interval of `seconds` that ends at `at`.
    """

    v: Literal[1] = VERSION
    at: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None
    """End of the interval: CLOCK_MONOTONIC nanoseconds, the same for all processes of a host; None: time of arrival."""
    seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Length of the interval that the figures cover."""
    run: Text = ""
    """Name of the training run, shared by a job and its restarts."""
    rank: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    world_size: Ranks | None = None
    gpus: Ranks | None = None
    """GPUs that the figures cover; None: the world size, or 1 without one."""
    step: Count | None = None
    """Number of the last completed optimiser step."""
    steps: Count = 0
    """Steps completed in the interval."""
    highest_step: Count | None = None
    """Highest step of the run so far, where the process knows it (from its checkpoint)."""
    epoch: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    tokens: Amount | None = None
    """Including padding."""
    padding: Amount | None = None
    samples: Amount | None = None
    model_flops: Amount | None = None
    """FLOPs of forward and backward passes, including padded tokens, excluding recomputation."""
    hardware_flops: Amount | None = None
    """`model_flops` plus recomputation."""
    model: Shape | None = None
    """Model shape, from which FLOPs are computed if `model_flops` is missing."""
    dtype: Dtype = ""
    """Number format of most tensor operations; empty: a 16-bit format."""
    model_flops_16bit: Amount | None = None
    """The part of the model's FLOPs in a 16-bit format, if `dtype` is another one; None: attention, for FP8 and FP4."""
    parallel: Degrees | None = None
    pipeline: Schedule | None = None
    recompute: Literal["", "none", "selective", "full"] = ""
    phase: Phase = ""
    """Phase that the process is in from `at` on; empty: unchanged."""
    phases: dict[PhaseName, Annotated[float, Meta(ge=0, le=86400)]] = {}
    """Seconds of the interval by phase; the remainder is compute."""
    checkpoints: Annotated[int, Meta(ge=0, le=10**6)] = 0
    restart: bool = False
    loss: float | Literal["nan", "inf", "-inf"] | None = None
    quality: Quality | None = None


class LoggedMessage(Struct, frozen=True):
    """A message derived from a job's log; it has no sender to reply to."""

    pid: int
    """Process that wrote the log, in the host's pid namespace."""
    job_id: str
    message: Message
    at: int
    """End of the interval if `message.at` is None; monotonic nanoseconds."""


_decoder = msgspec.json.Decoder(Message)


def decode_message(raw: bytes) -> Message:
    """Decode and validate a message; raises ReportRefusedError, "too_large" or "malformed"."""
    if len(raw) > MOST_BYTES:
        raise ReportRefusedError("too_large", f"longer than {MOST_BYTES} bytes")
    try:
        message = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise _malformed(_reason(err)) from err
    _check(message)
    return message


def _reason(err: Exception) -> str:
    text = str(err).replace(" | null`", "`")[:_REASON_CHARS]
    return f"this daemon takes version {VERSION} - at `$.v`" if text.endswith("`$.v`") else text


def _malformed(reason: str) -> ReportRefusedError:
    """The error with the path of the invalid field in the reason, such as `$.model.layers`, if it names one."""
    found, unknown = _FIELD.search(reason), _UNKNOWN.search(reason)
    path = found[0] if found else "$" if unknown else ""
    return ReportRefusedError("malformed", reason, field=f"{path}.{unknown[1]}" if unknown else path)


def _check(message: Message) -> None:
    if message.padding is not None and message.padding > (message.tokens or 0.0):
        raise _malformed("$.padding: more than the tokens")
    if message.steps and (message.step is None or message.steps > message.step):
        raise _malformed("$.steps: more than the step that ended last")
    if message.phases and sum(message.phases.values()) > message.seconds * 1.01 + 0.001:
        raise _malformed("$.phases: longer together than $.seconds")
    given = (message.tokens, message.samples, message.model_flops, message.hardware_flops, message.steps or None)
    if not message.seconds and any(given):
        raise _malformed("$.seconds: figures of an interval need its length")
    if (message.model_flops_16bit or 0.0) > (model_flops(message) or 0.0):
        raise _malformed("$.model_flops_16bit: more than model_flops")
    if message.hardware_flops is not None and message.hardware_flops < (model_flops(message) or 0.0):
        raise _malformed("$.hardware_flops: less than model_flops")


def model_flops(message: Message) -> float | None:
    """FLOPs of the model's passes in the interval, over all its GPUs; None where not reported."""
    if message.model_flops is not None:
        return message.model_flops
    if message.model is None or message.tokens is None:
        return None
    return message.tokens * flops_per_token(message.model)


def model_flops_16bit(message: Message) -> float | None:
    """The part of the model's FLOPs in a 16-bit format, if most are in another one; None: none, or not known.

    Recipes for FP8 and FP4 convert linear layers; the products of attention stay in 16 bits unless they are asked for
    (Transformer Engine's `fp8_dpa` is off by default; torchao converts `nn.Linear` alone).
    """
    if message.model_flops_16bit is not None or message.dtype not in NARROW_DTYPES:
        return message.model_flops_16bit
    flops = model_flops(message)
    if flops is None or message.model is None or message.tokens is None:
        return None
    return min(flops, message.tokens * attention_flops(message.model))


def hardware_flops(message: Message) -> float | None:
    """FLOPs with those of the second forward pass, if all activations are recomputed; None where not reported.

    Of a known shape: the second pass adds a third to a step whose parameters are all trained, half if all are frozen.
    """
    model = model_flops(message)
    if message.hardware_flops is not None or message.recompute != "full" or message.model is None or model is None:
        return message.hardware_flops
    shape = message.model
    forward = 2.0 * shape.parameters + attention_flops(shape) / 3.0
    return model * (1.0 + forward / flops_per_token(shape))


def flops_per_token(shape: Shape) -> float:
    """Training FLOPs per token: 6N + 12*L*H*Q*T, attention halved if causal; frozen parameters count 4, trained 6."""
    trained = shape.parameters if shape.trained is None else min(shape.trained, shape.parameters)
    return 4.0 * (shape.parameters - trained) + 6.0 * trained + attention_flops(shape)


def attention_flops(shape: Shape) -> float:
    """FLOPs per token of attention's products."""
    products = 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence
    return products * (0.5 if shape.causal else 1.0)


def bubble_share(schedule: Schedule | None) -> float | None:
    """Share of a step that is pipeline bubble, 0-1; 0 for zero-bubble schedules; None without a schedule."""
    if schedule is None:
        return None
    if schedule.schedule == "zero-bubble":
        return 0.0
    empty = schedule.stages - 1
    return empty / (schedule.chunks * schedule.microbatches + empty)
