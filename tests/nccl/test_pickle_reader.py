"""Pickles of plain values are read as Python reads them; all others are refused, and nothing is run or allocated."""

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.nccl import pickle_reader
from exporter.nccl.pickle_reader import MOST_BYTES, PickleRefusedError, read_pickle

RECORDED = Path(__file__).with_name("recorded") / "gloo_rank0.pickle"
scalars = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@given(values, st.integers(2, 5))
def test_plain_values_are_read_as_by_python(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_a_dump_that_pytorch_wrote_is_read_as_by_python() -> None:
    data = RECORDED.read_bytes()
    assert read_pickle(data) == pickle.loads(data)  # noqa: S301  recorded by ourselves


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(PickleRefusedError):
        read_pickle(b"\x80\x02" + data)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('run')",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()), pickle.dumps({1, 2}), pickle.dumps(b"x"), pickle.dumps(Path("/x"), 2),
        pickle.dumps({(1, 2): 3}), b"", b"\x80\x02.", b"\x80\x02NN.", b"\x80\x02(.", b"\x80\x02]Na", b"\x80\x02a.",
        b"\x80\x02Na.", b"\x80\x02Ne.", b"\x80\x02]Ne.", b"\x80\x02}(Nu.", b"\x80\x02N\x87.", b"\x80\x02(N\x86.",
        b"\x80\x02h\x05.", b"\x80\x02q\x00.", b"\x80\x02Nu.", b"\x80\x02]Ns.", b"\x80\x02]NNs.", b"\x80\x02s.",
        b"\x80\x02NX\xff\xff\xff\x7fab.", b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"cos\nsystem\n(S'true'\ntR.", b"\x80\x02}(]Nu.", b"\x80\x02Nr\xff\xff\xff\x7f.", b"\x80\x02Nq\x01.",
    ],
)  # fmt: skip
def test_everything_else_is_refused(data: bytes) -> None:
    with pytest.raises(PickleRefusedError):
        read_pickle(data)


@pytest.mark.parametrize("key", [0, True, (1 << 61) - 1, ((1 << 61) - 1) << 5])
def test_keys_whose_hashes_can_be_chosen_are_refused(key: int) -> None:
    """All multiples of 2^61 - 1 have one hash: a dict of a million of them takes hours."""
    with pytest.raises(PickleRefusedError, match="keys other than text"):
        read_pickle(pickle.dumps({key: None}, 2))


def test_a_value_is_remembered_again_under_its_number() -> None:
    assert read_pickle(b"\x80\x02(Nq\x00\x88q\x00h\x00\x89q\x01h\x01t.") == (None, True, True, False, False)


def test_size_and_steps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PickleRefusedError, match="at most"):
        read_pickle(b"\x80\x02" + b"N" * MOST_BYTES)
    monkeypatch.setattr(pickle_reader, "MOST_OPCODES", 100)
    with pytest.raises(PickleRefusedError, match="more than 100 steps"):
        read_pickle(pickle.dumps([None] * 200))
    assert read_pickle(pickle.dumps([None] * 50)) == [None] * 50
