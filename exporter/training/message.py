"""Defines the message that a training process sends: its fields, their bounds, and the outcomes of receiving one.

Owns the schema (`docs/report.schema.json` is printed from it), the FLOPs derived from a model's shape, and the answer
to a refused message. Refuses to know who sent it: a message names no job.
"""

import json
import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

OUTCOMES = {
    "taken": "was taken",
    "malformed": "is no message of this version",
    "too_large": "is longer than a message may be",
    "too_many": "came faster than reports.per_second",
    "too_many_connections": "more processes than reports.processes, or many connections of one",
    "busy": "came while the daemon was behind",
    "not_visible": "its sender's process cannot be seen from here",
    "other_process": "was sent by another process than the one that connected",
    "unknown_process": "its sender is of no job that holds a GPU here",
    "replayed": "speaks of time that the process has spoken of",
    "before_start": "speaks of time before the process began",
    "future": "speaks of time to come",
    "old": "is of more than an hour ago",
    "reported": "was found in the log of a job that reports by itself",
}
"""Of a message, what `gpu_efficiency_workload_messages_total{outcome}` counts. Nothing else is counted."""


class ReportRefusedError(Exception):
    """A message or a connection is not taken; the text is the reason, for its sender."""

    def __init__(self, outcome: str, reason: str, *, field: str = "", silent: bool = False) -> None:
        """`outcome` is one of OUTCOMES; `silent`: the sender has just been told."""
        super().__init__(reason)
        self.outcome, self.field, self.silent = outcome, field, silent

    @property
    def packet(self) -> bytes:
        """The answer."""
        return msgspec.json.encode({"error": str(self), "field": self.field})


VERSION: Final = 1
MOST_BYTES = 4096
"""A longer message is refused unread."""
_REASON_CHARS = 300
Text = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=10**15)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
Ranks = Annotated[int, Meta(ge=1, le=10**6)]
Dtype = Literal["", "bf16", "fp16", "tf32", "fp8", "fp4"]
PhaseName = Literal[
    "startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle"
]
Phase = Literal[
    "", "startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle"
]
_FIELD = re.compile(r"\$[\w.\[\]]*")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class MessageError(Exception):
    """The message cannot be used; the text says which field and why."""

    @property
    def field(self) -> str:
        """Path of the field, as in `$.model.layers`; empty: it is not one field's fault."""
        text = str(self)
        found, unknown = _FIELD.search(text), _UNKNOWN.search(text)
        path = found[0] if found else "$" if unknown else ""
        return f"{path}.{unknown[1]}" if unknown else path


class Shape(Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder's shape, from which FLOPs are counted: 6N a token, and attention's 12*L*H*Q*T, half of it if causal.

    Of a mixture of experts N is the active parameters. Source: PaLM (Chowdhery et al. 2022), appendix B.
    """

    parameters: Annotated[float, Meta(gt=0, le=1e15)]
    """Active ones."""
    layers: Annotated[int, Meta(ge=0, le=10**5)] = 0
    """0: attention's own products are left out."""
    heads: Annotated[int, Meta(ge=0, le=10**5)] = 0
    head_size: Annotated[int, Meta(ge=0, le=10**5)] = 0
    sequence: Annotated[int, Meta(ge=0, le=10**8)] = 0
    causal: bool = True
    trained: Annotated[float, Meta(ge=0, le=1e15)] | None = None
    """Of the parameters those that are trained (LoRA); None: all."""


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
    """Model chunks a rank has (interleaved schedule)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"


class Quality(Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of what the model is good for, with the value that is wanted."""

    value: float
    name: Text = ""
    target: float | None = None
    falls: bool = False
    """Less is better."""


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. Everything may be left out.

    FLOPs, tokens and samples are those of `gpus` GPUs together over the interval of `seconds` that ends at `at`.
    """

    v: Literal[1] = VERSION
    at: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None
    """CLOCK_MONOTONIC in nanoseconds, which all processes of a host share; None: when it arrives."""
    seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Length of the interval that the figures speak of."""
    run: Text = ""
    """What a job and its restarts have in common."""
    rank: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    world_size: Ranks | None = None
    gpus: Ranks | None = None
    """None: the world size, or 1."""
    step: Count | None = None
    """The last optimiser step that ended."""
    steps: Count = 0
    """Steps that ended in the interval."""
    highest_step: Count | None = None
    """How far the run had come before, where the process knows it (from its checkpoint)."""
    epoch: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    tokens: Amount | None = None
    """Padding included."""
    padding: Amount | None = None
    samples: Amount | None = None
    model_flops: Amount | None = None
    """FLOPs of forward and backward passes, padded tokens included, recomputation not."""
    hardware_flops: Amount | None = None
    """The same with recomputation."""
    model: Shape | None = None
    """Instead of model_flops: they are counted from the tokens."""
    dtype: Dtype = ""
    """Of most tensor work; empty: 16 bits."""
    parallel: Degrees | None = None
    pipeline: Schedule | None = None
    recompute: Literal["", "none", "selective", "full"] = ""
    phase: Phase = ""
    """What the process does from `at` on."""
    phases: dict[PhaseName, Annotated[float, Meta(ge=0, le=86400)]] = {}
    """Seconds of the interval by phase; what is left is compute."""
    checkpoints: Annotated[int, Meta(ge=0, le=10**6)] = 0
    restart: bool = False
    loss: float | Literal["nan", "inf", "-inf"] | None = None
    quality: Quality | None = None


class LoggedMessage(Struct, frozen=True):
    """A message that was found in a log: nobody waits for an answer to it."""

    pid: int
    """Of the process whose log it is, in the host's pid namespace."""
    job_id: str
    message: Message
    at: int
    """When its interval ended, where the message does not say; monotonic nanoseconds."""


_decoder = msgspec.json.Decoder(Message)


def decode_message(raw: bytes) -> Message:
    """The message, checked; raises MessageError naming the field and the reason."""
    if len(raw) > MOST_BYTES:
        raise MessageError(f"{len(raw)} bytes: a message has {MOST_BYTES} at most")
    try:
        message = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise MessageError(_reason(err)) from err
    _check(message)
    return message


def _reason(err: Exception) -> str:
    text = str(err).replace(" | null`", "`")[:_REASON_CHARS]
    return f"this daemon takes version {VERSION} - at `$.v`" if text.endswith("`$.v`") else text


def _check(message: Message) -> None:
    if message.padding is not None and message.padding > (message.tokens or 0.0):
        raise MessageError("$.padding: more than the tokens")
    if message.steps and (message.step is None or message.steps > message.step):
        raise MessageError("$.steps: more than the step that ended last")
    if message.phases and sum(message.phases.values()) > message.seconds * 1.01 + 0.001:
        raise MessageError("$.phases: longer together than $.seconds")
    given = (message.tokens, message.samples, message.model_flops, message.hardware_flops, message.steps or None)
    if not message.seconds and any(given):
        raise MessageError("$.seconds: figures of an interval need its length")
    if message.hardware_flops is not None and message.hardware_flops < (model_flops(message) or 0.0):
        raise MessageError("$.hardware_flops: less than model_flops")


def model_flops(message: Message) -> float | None:
    """FLOPs of the model's own passes in the interval, of all its GPUs; None where they are not told."""
    if message.model_flops is not None:
        return message.model_flops
    if message.model is None or message.tokens is None:
        return None
    return message.tokens * flops_per_token(message.model)


def flops_per_token(shape: Shape) -> float:
    """Of training: 6N + 12*L*H*Q*T, half the attention term if causal; 4 a frozen parameter and 6 a trained one."""
    trained = shape.parameters if shape.trained is None else min(shape.trained, shape.parameters)
    attention = 12.0 * shape.layers * shape.heads * shape.head_size * shape.sequence
    return 4.0 * (shape.parameters - trained) + 6.0 * trained + attention * (0.5 if shape.causal else 1.0)


def bubble_share(schedule: Schedule | None) -> float | None:
    """Share of a step that the schedule leaves empty; 0 for zero-bubble schedules; None where none is told."""
    if schedule is None:
        return None
    if schedule.schedule == "zero-bubble":
        return 0.0
    empty = schedule.stages - 1
    return empty / (schedule.chunks * schedule.microbatches + empty)


def loss_value(message: Message) -> float | None:
    """The loss as a float; JSON has no words for nan and infinity, so they come as text."""
    return None if message.loss is None else float(message.loss)


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the message."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A report of a training process"}
    schema = about | msgspec.json.schema(Message)
    for kind in schema["$defs"].values():
        kind["description"] = " ".join(kind["description"].split())
    return schema


def schema_text() -> str:
    """Give the same as `docs/report.schema.json` has it."""
    return json.dumps(json_schema(), indent=2) + "\n"
