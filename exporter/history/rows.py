"""How a Statement lies in the store: what is short of it apart from what is large, and what is read of it for sums.

Owns these shapes and their bytes. Refuses SQL.
"""

import zlib
from itertools import accumulate, pairwise

import msgspec
from msgspec import Struct

from exporter.core.model import Owner
from exporter.core.progress import ProgressView
from exporter.core.served import ServiceView
from exporter.core.statement import Sample, Statement

_FINE = 1000
_Course = tuple[tuple[int, ...], ...]
"""Samples by field, in thousandths, each as what it is more than the one before."""


class Brief(Struct, frozen=True, kw_only=True):
    """What sums need of a Statement, by the same names: of fifty thousand, each field that is decoded costs time."""

    node: str
    life: str
    owner: Owner
    start: float
    end: float
    paid: int
    parts: dict[str, int]
    money: dict[str, float] = {}
    models: tuple[str, ...] = ()
    whole_gpus: float = 0.0
    samples: tuple[Sample, ...] = ()
    simulated: bool = False


class _Rest(Struct, array_like=True):
    """What is large of a Statement, and that sums hardly ever need: it lies apart, so that they need not read it."""

    training: ProgressView | None
    service: ServiceView | None
    course: _Course


class _CourseAlone(Struct, array_like=True):
    """The same, of which only the course is looked at."""

    training: msgspec.Raw
    service: msgspec.Raw
    course: _Course


_encode = msgspec.msgpack.Encoder().encode
_decode_rest = msgspec.msgpack.Decoder(_Rest).decode
_decode_course = msgspec.msgpack.Decoder(_CourseAlone).decode
_decode_statement = msgspec.msgpack.Decoder(Statement).decode
brief_of = msgspec.msgpack.Decoder(Brief).decode
"""Of the short bytes."""


def split(statement: Statement) -> tuple[bytes, bytes]:
    """Its short bytes and the rest."""
    rest = _Rest(statement.training, statement.service, _columns(statement.samples))
    short = msgspec.structs.replace(statement, training=None, service=None, samples=())
    return _encode(short), zlib.compress(_encode(rest), 6)


def whole(short: bytes, rest: bytes) -> Statement:
    """The Statement again."""
    more = _decode_rest(zlib.decompress(rest))
    return msgspec.structs.replace(
        _decode_statement(short), training=more.training, service=more.service, samples=_samples(more.course)
    )


def with_course(brief: Brief, rest: bytes) -> Brief:
    """It, and its samples."""
    course = _decode_course(zlib.decompress(rest)).course
    return msgspec.structs.replace(brief, samples=_samples(course))


def _columns(samples: tuple[Sample, ...]) -> _Course:
    columns = zip(*(msgspec.structs.astuple(sample) for sample in samples), strict=True)
    exact = [[0, *(round(value * _FINE) for value in column)] for column in columns]
    return tuple(tuple(b - a for a, b in pairwise(column)) for column in exact)


def _samples(course: _Course) -> tuple[Sample, ...]:
    values = [[value / _FINE for value in accumulate(column)] for column in course]
    return tuple(Sample(*row) for row in zip(*values, strict=True))
