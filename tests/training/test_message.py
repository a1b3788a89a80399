"""Messages: which are accepted, which are rejected and why, and FLOPs computed from a model's shape."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.core.model import DTYPES, PHASES
from exporter.training.message import (
    MOST_BYTES,
    OUTCOMES,
    Message,
    ReportRefusedError,
    Schedule,
    Shape,
    bubble_share,
    decode_message,
    flops_per_token,
    hardware_flops,
    model_flops,
    model_flops_16bit,
)

ROOT = Path(__file__).parents[2]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=8), some, max_size=4),
    max_leaves=8,
)
FIELDS = tuple(field.name for field in msgspec.structs.fields(Message))


def of(**fields: Any) -> Message:
    return decode_message(json.dumps(fields).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused_with_a_reason(raw: bytes) -> None:
    said = reason = None
    try:
        said = decode_message(raw)
    except ReportRefusedError as err:
        reason = str(err)
    assert isinstance(said, Message) or reason


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_whatever_a_field_holds_it_is_within_bounds_or_refused(fields: dict[str, Any]) -> None:
    try:
        message = of(**fields)
    except ReportRefusedError:
        return
    flops = model_flops(message)
    assert message.seconds >= 0
    assert flops is None or (flops >= 0 and math.isfinite(flops))


@given(st.integers(1, 2000))
def test_however_deep_it_nests_it_is_refused(depth: int) -> None:
    for raw in (b'{"quality": ' + b"[" * depth, b'{"x": ' + b'{"x":' * depth, b"[" * depth):
        with pytest.raises(ReportRefusedError):
            decode_message(raw)


@pytest.mark.parametrize(
    ("raw", "reason", "field"),
    [
        (b"", "truncated", ""),
        (b"nonsense", "malformed", ""),
        (b'{"run": "\xff"}', "utf-8", ""),
        (b"[]", "Expected `object`", ""),
        (b'{"v": 2}', "this daemon takes version 1", "$.v"),
        (b'{"stpe": 3}', "unknown field `stpe`", "$.stpe"),
        (b'{"step": "3"}', "Expected `int`, got `str`", "$.step"),
        (b'{"step": -1}', ">= 0", "$.step"),
        (b'{"step": 1e3}', "got `float`", "$.step"),
        (b'{"tokens": -1, "seconds": 1}', ">= 0", "$.tokens"),
        (b'{"tokens": 1e31, "seconds": 1}', "<= ", "$.tokens"),
        (b'{"tokens": NaN, "seconds": 1}', "malformed", ""),
        (b'{"quality": {"value": 1e999}}', "out of range", "$.quality.value"),
        (b'{"quality": {"value": 1, "goal": 2}}', "unknown field `goal`", "$.quality.goal"),
        (b'{"loss": "high"}', "Invalid enum value", "$.loss"),
        (b'{"phase": "lunch"}', "'lunch'", "$.phase"),
        (b'{"phases": {"": 1}, "seconds": 2}', "Invalid enum value", "$.phases"),
        (b'{"phases": {"data": -1}, "seconds": 2}', ">= 0", "$.phases[...]"),
        (b'{"phases": {"data": 3}, "seconds": 2}', "longer together", "$.phases"),
        (b'{"seconds": 86401}', "<= 86400", "$.seconds"),
        (b'{"tokens": 5}', "need its length", "$.seconds"),
        (b'{"tokens": 5, "padding": 6, "seconds": 1}', "more than the tokens", "$.padding"),
        (b'{"padding": 6, "seconds": 1}', "more than the tokens", "$.padding"),
        (b'{"steps": 4, "step": 3, "seconds": 1}', "more than the step", "$.steps"),
        (b'{"steps": 4, "seconds": 1}', "more than the step", "$.steps"),
        (b'{"model_flops": 2, "hardware_flops": 1, "seconds": 1}', "less than model_flops", "$.hardware_flops"),
        (b'{"model_flops": 2, "hardware_flops": 0, "seconds": 1}', "less than model_flops", "$.hardware_flops"),
        (b'{"parallel": {"tensor": 0}}', ">= 1", "$.parallel.tensor"),
        (b'{"world_size": 0}', ">= 1", "$.world_size"),
        (b'{"model": {"layers": 3}}', "`parameters`", "$.model"),
        (b'{"run": "' + b"a" * 129 + b'"}', "<= 128", "$.run"),
        (b" " * (MOST_BYTES + 1), "longer than 4096 bytes", ""),
    ],
)
def test_what_is_wrong_is_said_with_the_field(raw: bytes, reason: str, field: str) -> None:
    with pytest.raises(ReportRefusedError) as refused:
        decode_message(raw)
    assert reason in str(refused.value)
    assert refused.value.field == field
    assert len(str(refused.value)) <= 300


def test_a_long_name_is_not_given_back_whole() -> None:
    with pytest.raises(ReportRefusedError) as refused:
        decode_message(b'{"' + b"x" * 4000 + b'": 1}')
    assert len(str(refused.value)) <= 300


def test_everything_may_be_left_out() -> None:
    assert decode_message(b"{}") == Message()


def test_the_words_are_the_core_s() -> None:
    assert [of(phase=phase).phase for phase in PHASES] == list(PHASES)
    assert [of(dtype=dtype).dtype for dtype in DTYPES] == list(DTYPES)
    assert of(seconds=9, phases=dict.fromkeys(PHASES, 1.0)).phases == dict.fromkeys(PHASES, 1.0)


def test_flops_are_six_a_parameter_and_token_and_those_of_attention() -> None:
    """PaLM's appendix B: 6N + 12 LHQT, attention halved if causal. Computed by hand."""
    shape = Shape(parameters=1e9, layers=10, heads=8, head_size=64, sequence=1000, causal=False)
    assert flops_per_token(shape) == 6e9 + 12 * 10 * 8 * 64 * 1000
    assert flops_per_token(msgspec.structs.replace(shape, causal=True)) == 6e9 + 30_720_000
    assert model_flops(of(tokens=100, seconds=1, model={"parameters": 1e9})) == 6e11
    assert model_flops(of(tokens=100, seconds=1, model={"parameters": 1e9, "trained": 1e8})) == 100 * (3.6e9 + 6e8)
    assert model_flops(of(tokens=100, seconds=1, model={"parameters": 1e9}, model_flops=5.0)) == 5.0
    assert model_flops(of(tokens=100, seconds=1)) is None
    assert model_flops(of(samples=100, seconds=1, model={"parameters": 1e9})) is None


def test_hardware_flops_are_held_against_a_shape_s_too() -> None:
    with pytest.raises(ReportRefusedError, match="less than model_flops"):
        of(tokens=100, seconds=1, model={"parameters": 1e9}, hardware_flops=5e11)
    assert of(tokens=100, seconds=1, model={"parameters": 1e9}, hardware_flops=8e11).hardware_flops == 8e11


@pytest.mark.parametrize(
    ("more", "times"),
    [
        ({"recompute": "full"}, 4 / 3),
        ({"recompute": "full", "trained": 0}, 3 / 2),
        ({"recompute": "full", "trained": 2.5e8}, 1 + 2 / 4.5),
        ({"recompute": "selective"}, None),
        ({}, None),
    ],
)
def test_a_second_forward_pass_is_a_larger_part_where_weights_are_frozen(more: dict[str, Any], times: float) -> None:
    """Forward and backward passes take 2 and 4 FLOPs a parameter and token, 2 and 2 if it is frozen."""
    shape = {"parameters": 1e9, **{name: more.pop(name) for name in ("trained",) if name in more}}
    said = of(tokens=100, seconds=1, model=shape, **more)
    assert hardware_flops(said) == (None if times is None else pytest.approx((model_flops(said) or 0) * times))
    told = of(model_flops=9e11, hardware_flops=1e12, seconds=1, model=shape, **more)
    assert hardware_flops(told) == 1e12
    assert hardware_flops(of(model_flops=9e11, seconds=1, **more)) is None


def test_attention_of_narrow_formats_is_in_16_bits() -> None:
    """12 x 10 x 8 x 64 x 1000 / 2 a token, unless it is told."""
    shape = {"parameters": 1e9, "layers": 10, "heads": 8, "head_size": 64, "sequence": 1000}
    attention = 100 * 30_720_000
    for dtype in ("fp8", "fp4"):
        assert model_flops_16bit(of(tokens=100, seconds=1, model=shape, dtype=dtype)) == attention
        assert model_flops_16bit(of(tokens=100, seconds=1, model=shape, dtype=dtype, model_flops=5.0)) == 5.0
        assert model_flops_16bit(of(tokens=100, seconds=1, model=shape, dtype=dtype, model_flops_16bit=7.0)) == 7.0
        assert model_flops_16bit(of(seconds=1, model_flops=5.0, dtype=dtype)) is None
        assert model_flops_16bit(of(seconds=1, tokens=100, dtype=dtype)) is None
        assert model_flops_16bit(of(seconds=1, model_flops=5.0, model=shape, dtype=dtype)) is None
    assert model_flops_16bit(of(tokens=100, seconds=1, model=shape)) is None
    with pytest.raises(ReportRefusedError, match="more than model_flops") as refused:
        of(seconds=1, model_flops=5.0, model_flops_16bit=6.0)
    assert refused.value.field == "$.model_flops_16bit"


def test_a_schedule_s_bubble() -> None:
    """(p - 1) / (v m + p - 1), computed by hand."""
    assert bubble_share(Schedule(4, 12)) == pytest.approx(3 / 15)
    assert bubble_share(Schedule(4, 12, 2)) == pytest.approx(3 / 27)
    assert bubble_share(Schedule(4, 12, schedule="zero-bubble")) == 0.0
    assert bubble_share(Schedule(1, 8)) == 0.0
    assert bubble_share(None) is None


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a message."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A report of a training process"}
    schema = about | msgspec.json.schema(Message)
    for kind in schema["$defs"].values():
        kind["description"] = " ".join(kind["description"].split())
    return schema


def schema_text() -> str:
    """The schema as written to `docs/report.schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


def test_the_published_schema_is_the_message_s() -> None:
    """To update the file: `python -c "from tests.training.test_message import *; print(schema_text(), end='')"`."""
    assert (ROOT / "docs/report.schema.json").read_text(encoding="utf-8") == schema_text()
    message = json_schema()["$defs"]["Message"]
    assert set(message["properties"]) == set(FIELDS)
    assert message["additionalProperties"] is False


def test_the_page_has_every_field_phase_and_outcome() -> None:
    page = (ROOT / "docs/training-jobs.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    assert [name for name in (*FIELDS, *OUTCOMES) if f"`{name}`" not in rows] == []
    assert [phase for phase in PHASES if f"`{phase}`" not in page] == []
    assert f"{MOST_BYTES} bytes" in page
