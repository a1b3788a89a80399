"""CPU use, pressure and ports of the host: what is believed of them, and what explains a job's waiting.

The GPU rests for whole seconds, so that all of its time is `unattributed_stall`.
"""

from math import inf, nan
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.checkpoint import dump_ledger, load_ledger
from exporter.core.host import CAUSES, MAX_PORTS, RESOURCES, STALLS, stall_cause
from exporter.core.job_record import build_job_record
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import HostUsage, NetworkPort, Owner
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, JobView, Snapshot, take_snapshot
from tests.core.test_exposition import lines
from tests.worlds import RESTING, WORKING, S, device, first, held, reading, seen

OTHER = Owner("42")


def usage(start: float, end: float, job: str = "41", **values: Any) -> HostUsage:
    return HostUsage(job, round(start * S), round(end * S), **values)


def port(at: float, **values: Any) -> NetworkPort:
    usual: dict[str, Any] = {"link": "infiniband", "active": True, "bytes_per_second": 50e9} | values
    return NetworkPort(usual.pop("name", "mlx5_0:1"), round(at * S), **usual)


def opened(*owners: Owner, signals: dict[str, Any] = RESTING) -> Ledger:
    """A ledger whose GPUs, one per old job, have worked for a second and then do as `signals` say for 4 seconds."""
    boards = [device(f"GPU-{n}", f"{n}") for n in range(len(owners) or 1)]
    holders = owners or (Owner("41"),)
    ledger = Ledger()
    advance(ledger, first(boards, [held(b.uuid, owner, -60) for b, owner in zip(boards, holders, strict=True)]))
    advance(ledger, seen(1, *(reading(0, 1, uuid=b.uuid) for b in boards)))
    advance(ledger, seen(5, *(reading(1, 5, signals, uuid=b.uuid) for b in boards)))
    return ledger


def on(ledger: Ledger, start: float, end: float, signals: dict[str, Any] = RESTING, **more: Any) -> None:
    """Go on to `end`; what `more` has is applied before the readings, as all inputs are."""
    readings = [reading(start, end, signals, uuid=uuid) for uuid in ledger.gpus]
    advance(ledger, seen(end, *readings, **more))


def shown(ledger: Ledger) -> Snapshot:
    return take_snapshot(ledger, DaemonMetadata())


def job(ledger: Ledger) -> JobView:
    return next(view for view in shown(ledger).jobs if view.owner.job_id == "41")


def stalls(
    *intervals: dict[str, Any], ports: tuple[NetworkPort, ...] = (), owners: tuple[Owner, ...] = ()
) -> dict[str, float]:
    """GPU-seconds by cause after these five-second intervals of a GPU that rests."""
    ledger = opened(*owners)
    for number, values in enumerate(intervals, 1):
        start = 5 * number
        now = tuple(
            replace(each, at=start * S, transmitted_bytes=(each.transmitted_bytes or 0) * number) for each in ports
        )
        on(ledger, start, start + 5, hosts=(usage(start - 5, start, **values),), ports=now or None)
    assert ledger.refused["host"] == 0
    found = ledger.jobs["41"].host
    assert found is not None
    return {cause: spent / S for cause, spent in found.stalls.items()}


STORAGE: dict[str, Any] = {"io_pressure": 0.6, "cpu_pressure": 0.1}


def test_waiting_is_divided_by_what_explains_it_from_the_second_interval_on() -> None:
    assert stalls(STORAGE) == {}
    assert stalls(STORAGE, STORAGE, STORAGE) == {"storage": 10.0}
    assert stalls(STORAGE, STORAGE, {"cpu_throttled": 0.5, "cpu_pressure": 0.6}) == {"storage": 5.0, "cpu_quota": 5.0}
    assert stalls(STORAGE, {"io_pressure": 0.01}) == {}


def test_waiting_between_two_observations_is_divided_among_the_intervals_by_their_time() -> None:
    """A daemon that observes every 20 seconds, and reads the host every 5."""
    ledger = opened()
    on(ledger, 5, 25, hosts=(usage(0, 5),))
    shares: tuple[dict[str, Any], ...] = (STORAGE, {"cpu_pressure": 0.6}, STORAGE, {})
    on(ledger, 25, 45, hosts=tuple(usage(5 * n, 5 * n + 5, **values) for n, values in enumerate(shares, 1)))
    found = ledger.jobs["41"].host
    assert found is not None
    assert found.stalls == {"storage": 10 * S, "cpu": 5 * S}, "and 5 s of no cause"


def test_a_gpu_that_works_has_no_waiting_to_explain() -> None:
    ledger = opened(signals=WORKING)
    for start in (5, 10):
        on(ledger, start, start + 5, WORKING, hosts=(usage(start - 5, start, **STORAGE),))
    found = ledger.jobs["41"].host
    assert found is not None
    unexplained = ledger.jobs["41"].book.parts[STALLS[1]] / S
    assert found.stalls.get("storage", 0) / S == pytest.approx(unexplained * 5 / 15, abs=0.3)


@pytest.mark.parametrize(
    ("shares", "network", "cause"),
    [
        ({"io": 0.6}, 0.0, "storage"),
        ({"io": 0.1}, 0.0, "storage"),
        ({"io": 0.09}, 0.0, ""),
        ({"cpu": 0.9, "cpu_quota": 0.8}, 0.0, "cpu_quota"),
        ({"cpu": 0.9, "cpu_quota": 0.04}, 0.0, "cpu"),
        ({"cpu": 0.29}, 0.0, ""),
        ({"memory": 0.5, "io": 0.5}, 0.0, "memory"),
        ({"memory": 0.06, "io": 0.5}, 0.0, "storage"),
        ({}, 0.5, "network"),
        ({}, 0.49, ""),
        ({"io": 0.2}, 0.9, "storage"),
        ({"io": 0.12}, 0.9, "network"),
        ({}, 0.0, ""),
    ],
)
def test_the_cause_that_exceeds_its_threshold_by_most(shares: dict[str, float], network: float, cause: str) -> None:
    assert stall_cause(shares, network, Policy()) == cause


def test_a_quota_is_no_contention_and_thresholds_are_the_policys() -> None:
    assert stall_cause({"cpu": 0.5, "cpu_quota": 0.5}, 0.0, Policy(stall_throttled_share=1.0)) == ""
    assert stall_cause({"io": 0.01}, 0.0, Policy(stall_io_share=0.005)) == "storage"


FULL = port(0, transmitted_bytes=200_000_000_000)
"""Sends 40 GB/s of 50 in five seconds."""


def test_the_network_explains_waiting_only_where_the_job_has_the_node_to_itself() -> None:
    idle: dict[str, Any] = {"cpu_pressure": 0.0}
    assert stalls(idle, idle, idle, ports=(FULL,)) == {"network": 10.0}
    assert stalls(idle, idle, idle, ports=(replace(FULL, active=False),)) == {}
    assert stalls(idle, idle, idle, ports=(FULL,), owners=(Owner("41"), OTHER)) == {}


def test_cpu_use_is_a_total_and_a_number_of_cores_while_it_is_current() -> None:
    ledger = opened()
    on(ledger, 5, 10, hosts=(usage(0, 5, cpu_seconds=20.0, cpu_pressure=0.25, memory_pressure=0.5),))
    view = job(ledger).host
    assert view is not None
    assert (view.cpu_seconds, view.cpu_cores, view.shares) == (20.0, 4.0, (("cpu", 0.25), ("memory", 0.5)))
    on(ledger, 10, 15, hosts=(usage(5, 10, cpu_seconds=5.0),))
    view = job(ledger).host
    assert view is not None
    assert (view.cpu_seconds, view.cpu_cores, view.shares) == (25.0, 1.0, ())
    on(ledger, 15, 30)
    assert job(ledger).host is not None
    host = ledger.jobs["41"].host
    assert host is not None
    assert host.current(30 * S)
    assert host.waited == {"cpu": 1.25, "memory": 2.5}
    on(ledger, 30, 40)
    view = job(ledger).host
    assert view is not None
    assert (view.cpu_seconds, view.cpu_cores, view.shares) == (25.0, None, ())


def test_without_cpu_time_there_are_no_cores() -> None:
    ledger = opened()
    on(ledger, 5, 10, hosts=(usage(0, 5, io_pressure=0.5),))
    view = job(ledger).host
    assert view is not None
    assert (view.cpu_seconds, view.cpu_cores) == (0.0, None)


def test_waiting_in_a_gap_between_two_intervals_is_not_explained_by_the_later_one() -> None:
    ledger = opened()
    on(ledger, 5, 10, hosts=(usage(0, 5, **STORAGE),))
    on(ledger, 10, 100)
    on(ledger, 100, 105, hosts=(usage(95, 100, **STORAGE),))
    host = ledger.jobs["41"].host
    assert host is not None
    assert host.stalls == {}
    on(ledger, 105, 110, hosts=(usage(100, 105, **STORAGE),))
    assert host.stalls == {"storage": 5 * S}


@pytest.mark.parametrize(
    "wrong",
    [
        usage(4, 4), usage(5, 4), usage(4, 11), usage(-400, 5), usage(0, 5, job="nobody"),
        *(usage(0, 5, cpu_seconds=value) for value in (-1.0, nan, inf, 1e9)),
        *(usage(0, 5, "41", **{name: value}) for value in (-0.1, 1.1, nan, inf)
          for name in ("cpu_throttled", "cpu_pressure", "io_pressure", "memory_pressure")),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_counted(wrong: HostUsage) -> None:
    ledger = opened()
    on(ledger, 5, 10, hosts=(wrong,))
    assert ledger.refused["host"] == 1
    assert ledger.jobs["41"].host is None
    assert 'rejected_total{uuid="",gpu="",reason="host"} 1' in lines(shown(ledger), "rejected_total")


def test_the_same_time_counts_once() -> None:
    ledger = opened()
    on(ledger, 5, 10, hosts=(usage(0, 5, cpu_seconds=5.0), usage(4, 6, cpu_seconds=5.0), usage(5, 7, cpu_seconds=1.0)))
    assert ledger.refused["host"] == 1
    assert ledger.jobs["41"].host is not None
    assert ledger.jobs["41"].host.cpu_seconds == 6.0


def test_no_entry_of_the_ledger_depends_on_it() -> None:
    with_host, without = opened(), opened()
    for start in (5, 10, 15):
        on(
            with_host,
            start,
            start + 5,
            hosts=(usage(start - 5, start, **STORAGE),),
            ports=(replace(FULL, at=start * S),),
        )
        on(without, start, start + 5)
    assert with_host.jobs["41"].book.parts == without.jobs["41"].book.parts
    assert sum(with_host.jobs["41"].book.parts) == with_host.jobs["41"].book.paid


# -- ports --


def rates(before: NetworkPort, after: NetworkPort) -> tuple[float | None, float | None, float | None]:
    ledger = opened()
    on(ledger, 5, 10, ports=(before,))
    on(ledger, 10, 15, ports=(after,))
    (state,) = shown(ledger).ports
    return state.sent, state.received, state.waiting


def test_rates_are_differences_of_the_kernels_counters() -> None:
    before = port(5, transmitted_bytes=100, received_bytes=1000, wait_ticks=10)
    after = port(10, transmitted_bytes=500, received_bytes=6000, wait_ticks=310)
    assert rates(before, after) == (80.0, 1000.0, 0.75)
    assert rates(before, replace(before, at=10 * S)) == (0.0, 0.0, 0.0)


def test_a_counter_that_wrapped_or_began_anew_has_no_rate() -> None:
    before = port(5, transmitted_bytes=2**64 - 10, received_bytes=1000, wait_ticks=10)
    assert rates(before, port(10, transmitted_bytes=5, received_bytes=2000, wait_ticks=20)) == (None, 200.0, None)
    assert rates(before, port(10)) == (None, None, None)
    assert rates(before, replace(before, at=5 * S)) == (None, None, None)


def test_a_port_that_waits_is_busy_whatever_it_sends() -> None:
    ledger = opened()
    on(ledger, 5, 10, ports=(port(5, transmitted_bytes=0, wait_ticks=0, bytes_per_second=None),))
    on(ledger, 10, 15, ports=(port(10, transmitted_bytes=400, wait_ticks=900, bytes_per_second=None),))
    (state,) = shown(ledger).ports
    assert state.busy() == pytest.approx(0.9)


def test_ports_that_cannot_be_are_refused_and_too_many_as_well() -> None:
    ledger = opened()
    wrong = (
        port(11), port(5, transmitted_bytes=-1), port(5, received_bytes=-1), port(5, wait_ticks=-1),
        *(port(5, bytes_per_second=rate) for rate in (0.0, -1.0, nan, inf, 1e15)),
    )  # fmt: skip
    on(ledger, 5, 10, ports=(*wrong, port(5), port(5)))
    assert ledger.refused["host"] == len(wrong) + 1
    assert list(ledger.ports) == ["mlx5_0:1"]
    on(ledger, 10, 15, ports=tuple(port(10, name=f"mlx5_{n}:1") for n in range(MAX_PORTS + 3)))
    assert ledger.refused["host"] == len(wrong) + 4
    assert len(ledger.ports) == MAX_PORTS


def test_a_port_that_is_no_longer_read_is_not_shown() -> None:
    ledger = opened()
    on(ledger, 5, 10, ports=(port(5),))
    on(ledger, 10, 60)
    assert len(shown(ledger).ports) == 1
    on(ledger, 60, 70)
    assert shown(ledger).ports == ()
    on(ledger, 70, 75, ports=())
    assert ledger.ports == {}


# -- what is shown and kept --


def test_the_series_of_a_job_and_of_ports() -> None:
    ledger = opened()
    values: dict[str, Any] = {
        "cpu_seconds": 10.0,
        "cpu_throttled": 0.25,
        "cpu_pressure": 0.5,
        "io_pressure": 0.0,
        "memory_pressure": 0.0,
    }
    for start in (5, 10):
        now = port(start, transmitted_bytes=8 * start, received_bytes=4, wait_ticks=2)
        on(
            ledger,
            start,
            start + 5,
            hosts=(usage(start - 5, start, **values),),
            ports=(now, port(start, name="efa_0:1", link="efa", active=False, bytes_per_second=None)),
        )
    snapshot = shown(ledger)
    assert lines(snapshot, "job_cpu_cores") == ['job_cpu_cores{job_id="41"} 2.0']
    assert lines(snapshot, "job_pressure_ratio") == [
        'job_pressure_ratio{job_id="41",resource="cpu"} 0.5',
        'job_pressure_ratio{job_id="41",resource="cpu_quota"} 0.25',
        'job_pressure_ratio{job_id="41",resource="io"} 0.0',
        'job_pressure_ratio{job_id="41",resource="memory"} 0.0',
    ]
    assert lines(snapshot, "job_stall_seconds_total") == ['job_stall_seconds_total{job_id="41",cause="cpu_quota"} 5.0']
    assert lines(snapshot, "rdma_bytes_total") == [
        'rdma_bytes_total{port="mlx5_0:1",direction="tx"} 80', 'rdma_bytes_total{port="mlx5_0:1",direction="rx"} 4',
    ]  # fmt: skip
    assert lines(snapshot, "rdma_wait_ticks_total") == ['rdma_wait_ticks_total{port="mlx5_0:1"} 2']
    assert lines(snapshot, "rdma_rate_bytes_per_second") == [
        'rdma_rate_bytes_per_second{port="mlx5_0:1"} 50000000000.0'
    ]
    assert lines(snapshot, "rdma_active") == [
        'rdma_active{port="mlx5_0:1",link="infiniband"} 1', 'rdma_active{port="efa_0:1",link="efa"} 0',
    ]  # fmt: skip


def test_video_engines_and_chip_links_have_series_where_they_are_used() -> None:
    more = {"encoder_utilization": 0.0, "decoder_utilization": 0.7, "c2c_tx_bytes_per_second": 5.0}
    ledger = opened(signals=WORKING | more)
    assert lines(shown(ledger), "video_engine_ratio") == [
        'video_engine_ratio{uuid="GPU-0",gpu="0",engine="decoder"} 0.7'
    ]
    assert lines(shown(ledger), "c2c_bytes_per_second") == [
        'c2c_bytes_per_second{uuid="GPU-0",gpu="0",direction="tx"} 5.0'
    ]
    advance(ledger, seen(10))
    assert lines(shown(ledger), "video_engine_ratio") + lines(shown(ledger), "c2c_bytes_per_second") == []


def test_a_checkpoint_keeps_it() -> None:
    ledger = opened()
    for start in (5, 10):
        on(ledger, start, start + 5, hosts=(usage(start - 5, start, cpu_seconds=5.0, **STORAGE),))
    other = Ledger()
    load_ledger(other, dump_ledger(ledger))
    before, after = ledger.jobs["41"].host, other.jobs["41"].host
    assert before is not None
    assert after is not None
    names = before.__struct_fields__
    assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names]
    on(other, 15, 20, hosts=(usage(10, 15, cpu_seconds=5.0, **STORAGE),))
    assert after.stalls == {"storage": 10 * S}


def test_a_record_has_the_causes_and_the_cpu_time() -> None:
    ledger = opened()
    for start in (5, 10):
        on(ledger, start, start + 5, hosts=(usage(start - 5, start, cpu_seconds=5.0, **STORAGE),))
    more: dict[str, Any] = {
        "node": "n", "life": "l", "until": 15.0, "money": {}, "gpus": {}, "models": (), "whole_gpus": 1.0,
        "happened": {}, "samples": (), "simulated": False,
    }  # fmt: skip
    record = build_job_record(job(ledger), **more)
    assert (record.stalls, record.cpu_seconds) == ({"storage": 5 * S}, 10.0)
    silent = build_job_record(job(opened()), **more)
    assert (silent.stalls, silent.cpu_seconds) == ({}, 0.0)


def test_names_are_those_of_the_ledger() -> None:
    assert [LEAK_NAMES[index] for index in STALLS] == ["data_stall", "unattributed_stall"]
    assert len(set(CAUSES)) == 5
    assert len(set(RESOURCES)) == 4
