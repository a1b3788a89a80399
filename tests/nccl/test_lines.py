"""Lines of NCCL Inspector in all its formats and of CoMMA, and what is no such line."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.nccl.comma import CommaReader
from exporter.nccl.events import CollectiveEvent, EventError
from exporter.nccl.inspector import InspectorReader
from tests.each import each
from tests.nccl import plugins

AT = 1_748_030_377_748_202


def read(*lines: bytes) -> list[CollectiveEvent]:
    reader = InspectorReader()
    return [event for line in lines if (event := reader.read(line)) is not None]


def refused(line: bytes, reader: InspectorReader | CommaReader | None = None) -> str:
    with pytest.raises(EventError) as caught:
        (reader or InspectorReader()).read(line)
    return caught.value.kind


def test_a_line_of_the_format_4_0() -> None:
    """The README's example: 16 GiB in 61,974 us are 277 GB/s, by eight ranks 485 GB/s on the bus."""
    (event,) = read(plugins.collective(AT, 61974, coll_msg_size_bytes=17179869184))
    assert event == CollectiveEvent(
        name="AllReduce", end=AT, duration=61974, bytes=17179869184, communicator="0x1", rank=2, ranks=8, nodes=1,
        sequence=1407, peer=None, exact=False, algorithm_bandwidth=277.210914e9, bus_bandwidth=485.119099e9,
        timing="kernel_gpu",
    )  # fmt: skip
    assert event.start == AT - 61974


@each("version", ["v4.0", "v4.1", "v4.2", "v4.9"])
def test_minor_versions_are_read_alike(version: str) -> None:
    (event,) = read(plugins.collective(AT, 10, version=version, coll_algo="RING", coll_proto="LL"))
    assert event.duration == 10


def test_with_an_event_trace_the_end_is_when_the_last_channel_stopped() -> None:
    (event,) = read(plugins.collective(AT, 41057, kernel_stop=AT - 5000))
    assert (event.end, event.exact) == (AT - 5000, True)
    (other,) = read(plugins.collective(AT, 41057, event_trace_ts={"kernel_events": []}))
    assert (other.end, other.exact) == (AT, False)


def test_a_transfer_has_its_peer() -> None:
    (event,) = read(
        plugins.line(header=plugins.header(), metadata=plugins.metadata(AT), p2p_perf=plugins.p2p_perf(7, 5))
    )
    assert (event.name, event.peer, event.bytes, event.duration, event.bus_bandwidth) == ("Send", 5, 4096, 7, 1e9)


def test_since_4_3_the_line_of_the_dump_has_the_header_of_those_behind_it() -> None:
    reader = InspectorReader()
    assert refused(plugins.line(coll_perf=plugins.coll_perf(5)), reader) == "no_context"
    assert reader.read(plugins.dump(AT, dropped=3, rank=6)) is None
    event = reader.read(plugins.line(coll_perf=plugins.coll_perf(5)))
    assert event is not None
    assert (event.rank, event.end, reader.dropped) == (6, AT, 3)
    reader.read(plugins.dump(AT + 1, dropped=2, rank=7))
    event = reader.read(plugins.line(p2p_perf=plugins.p2p_perf(5, 1)))
    assert event is not None
    assert (event.rank, event.end, reader.dropped) == (7, AT + 1, 5)
    reader.reset()
    assert refused(plugins.line(coll_perf=plugins.coll_perf(5)), reader) == "no_context"


def test_a_proxy_trace_is_no_event() -> None:
    assert read(plugins.dump(AT), plugins.line(proxy_trace={"record_type": "proxy_op"})) == []


def test_an_unknown_version_is_not_read_nor_is_what_belongs_to_it() -> None:
    reader = InspectorReader()
    reader.read(plugins.dump(AT))
    assert refused(plugins.dump(AT, version="v5.1"), reader) == "unknown_version"
    assert refused(plugins.line(coll_perf=plugins.coll_perf(5)), reader) == "no_context"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("untimed", {"coll_exec_time_us": None}),
    ("absurd", {"coll_exec_time_us": -1}),
    ("absurd", {"coll_exec_time_us": 1e18}),
    ("absurd", {"coll_msg_size_bytes": -5}),
    ("absurd", {"coll_msg_size_bytes": 1 << 60}),
    ("absurd", {"coll_busbw_gbs": 1e300}),
    ("absurd", {"coll_busbw_gbs": -1.0}),
    ("absurd", {"coll_sn": -1}),
    ("absurd", {"kernel_stop": 1 << 60}),
    ("malformed", {"coll": 5}),
    ("malformed", {"coll_timing_source": 5}),
    ("absurd", {"coll_msg_size_bytes": 10**400}),
    ("malformed", {"coll_busbw_gbs": {}}),
]


@each("kind, change", BAD)
def test_a_number_that_cannot_be_is_refused(kind: str, change: dict[str, Any]) -> None:
    us, stop = change.pop("coll_exec_time_us", 10), change.pop("kernel_stop", 0)
    assert refused(plugins.collective(AT, us, kernel_stop=stop, **change)) == kind


@each("text", [
    b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 60_000, b'{"header": []}', b'{"coll_perf": {"coll": "AllReduce"',
    b'{"header":{"id":"1","rank":NaN}}',
])  # fmt: skip
def test_what_is_no_line_of_it_is_malformed(text: bytes) -> None:
    assert refused(text) == "malformed"


def test_a_negative_count_of_dropped_operations_is_refused() -> None:
    assert refused(plugins.dump(AT, dropped=-1)) == "malformed"


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_an_event_or_refused(raw: bytes) -> None:
    for reader in (InspectorReader(), CommaReader()):
        try:
            reader.read(raw)
        except EventError as err:
            assert err.kind == "malformed"  # noqa: PT017  nothing else may be raised


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(plugins.coll_perf(1))), JSON)
def test_any_value_of_a_field_is_an_event_with_possible_numbers_or_refused(name: str, value: Any) -> None:
    body = json.loads(plugins.collective(AT, 10)) | {}
    body["coll_perf"][name] = value
    try:
        event = InspectorReader().read(json.dumps(body).encode())
    except EventError:
        return
    assert event is not None
    assert 0 <= event.duration <= 3600 * plugins.US
    assert 0 <= event.bytes <= 1 << 50


# -- CoMMA --


def test_a_record_of_comma_ends_with_its_enqueue_and_lasts_as_its_children() -> None:
    """The example of docs/json-format.md: the first step starts at 9624952, the last one ends at 9626408."""
    event = CommaReader().read(plugins.comma(9615369, 11039, 1456))
    assert event == CollectiveEvent(
        name="AllReduce", end=9626408, duration=1456, bytes=20971520, communicator="0x58aecebabb9e37af", rank=0,
        sequence=57,
    )  # fmt: skip
    assert event.start == 9624952
    assert event.exact


def test_a_transfer_of_comma_has_its_peer() -> None:
    event = CommaReader().read(plugins.comma(10, 10, 5, cat="P2P", name="send", peer=3))
    assert event is not None
    assert (event.name, event.peer) == ("Send", 3)


def test_without_children_it_is_not_timed() -> None:
    """dur is no execution: it begins with the enqueue."""
    assert refused(plugins.comma(10, 10, None), CommaReader()) == "untimed"


@each("category", ["PROXY", "GROUP", "anything"])
def test_other_records_of_comma_are_no_events(category: str) -> None:
    assert CommaReader().read(plugins.comma(10, 10, 5, cat=category)) is None


@each("change", [{"ts": -1}, {"dur": 1 << 60}, {"child_dur": -1}, {"args": {"size": 1 << 60}}, {"rank": -1}])
def test_numbers_of_comma_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    record = json.loads(plugins.comma(10, 10, 5)) | change
    assert refused(json.dumps(record).encode(), CommaReader()) == "absurd"


@each("name, known", [
    ("AllReduce", "AllReduce"), ("all_reduce", "AllReduce"), ("All2All", "AllToAll"),
    ("reduce_scatter", "ReduceScatter"),
    ("AllGatherV", "AllGatherV"), ("Invalid", "other"), ("x" * 1000, "other"), ("", "other"),
])  # fmt: skip
def test_names_are_nccls(name: str, known: str) -> None:
    event = CommaReader().read(plugins.comma(10, 10, 5, name=name))
    assert event is not None
    assert event.name == known


def test_nothing_is_left_of_a_reset() -> None:
    reader = CommaReader()
    reader.reset()
    assert reader.dropped == 0
