"""Serving reports as shares of a GPU's time and as series; every figure is calculated by hand.

A second of WORKING is 0.05 wait, 0.50 slack, 0.45 tensor.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Latency, Owner, ServingReport
from exporter.core.pipeline import advance
from exporter.core.serving import computed_tokens
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.core.test_exposition import lines
from tests.core.test_progress import shows, value
from tests.core.test_told import HALF, PEAK, lost, parts
from tests.worlds import RESTING, SPINNING, WORKING, S, device, first, held, reading, seen

SERVER = Owner("41", workload_class="serving")
DECODING: dict[str, Any] = WORKING | {"sm_active": 0.95, "dram_active": 0.92 * 0.95}
"""All of its slack waits for memory."""


def word(start: float, end: float, **more: Any) -> ServingReport:
    return ServingReport("41", round(start * S), round(end * S), "vllm", **more)


def opened(gpus: int = 1) -> Ledger:
    boards = [device(f"GPU-{n}", f"{n}") for n in range(gpus)]
    ledger = Ledger()
    advance(ledger, first(boards, [held(b.uuid, SERVER, start=-60.0, gpus=2) for b in boards]))
    advance(ledger, seen(1, *(reading(0, 1, uuid=b.uuid) for b in boards)))
    return ledger


def after(*words: ServingReport, signals: dict[str, Any] = WORKING, seconds: float = 1) -> dict[str, float]:
    """Leaks of the time after these reports."""
    ledger = opened()
    before = parts(ledger)
    now = 6 + seconds
    advance(ledger, replace(seen(6), serving=words))
    before = parts(ledger)
    advance(ledger, seen(now, reading(6, now, signals)))
    assert ledger.refused["serving"] == 0
    return lost(ledger, before)


BUSY: dict[str, Any] = {"running": 8.0, "waiting": 4.0, "kv_use": 0.5, "generated_tokens": 100.0}


def test_a_server_without_requests_is_idle() -> None:
    idle = word(1, 6, running=0.0, waiting=0.0, generated_tokens=0.0, prompt_tokens=0.0)
    assert after(idle, signals=RESTING) == {"idle_allocation": 1.0}
    assert after(idle)["idle_allocation"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "more",
    [
        {"running": 1.0}, {"waiting": 1.0}, {"waiting": 1.0, "deferred": 1.0}, {"generated_tokens": 5.0},
        {"prompt_tokens": 5.0}, {"running": 1.0, "prompt_tokens": 5.0, "last_pass": True},
    ],
)  # fmt: skip
def test_one_that_has_or_had_a_request_is_not(more: dict[str, Any]) -> None:
    told = word(1, 6, **({"running": 0.0, "waiting": 0.0} | more))
    assert "idle_allocation" not in after(told, signals=RESTING)


STALE: dict[str, Any] = {"running": 1.0, "waiting": 0.0, "generated_tokens": 0.0, "prompt_tokens": 0.0} | {
    "last_pass": True
}
"""An engine that has been idle since its last forward pass, whose request has ended."""


@pytest.mark.parametrize("told", [word(1, 6, **STALE), word(1, 6, **STALE | {"running": None})])
def test_an_engine_that_does_not_show_whether_it_has_requests_leaves_it_to_the_counters(told: ServingReport) -> None:
    assert after(told, signals=RESTING) == {"idle_allocation": 1.0}
    assert "idle_allocation" not in after(told, signals=HALF), "a request may run that has no token yet"


def test_a_kernel_that_polls_beside_requests_of_an_earlier_pass_may_be_their_hang() -> None:
    assert "idle_allocation" not in after(word(1, 6, **STALE), signals=SPINNING)
    assert after(word(1, 6, **STALE | {"running": None}), signals=SPINNING) == {"idle_allocation": pytest.approx(1.0)}


def test_a_server_that_polls_for_requests_by_a_kernel_is_idle_too() -> None:
    idle = word(1, 6, running=0.0, waiting=0.0)
    assert after(idle, signals=SPINNING) == {"idle_allocation": pytest.approx(1.0)}


def test_waiting_because_the_kv_cache_is_full() -> None:
    found = after(word(1, 6, **BUSY | {"kv_use": 0.95, "slots": 16.0}))
    assert found["kv_cache_wait"] == pytest.approx(0.05)
    assert "kv_cache_wait" not in after(word(1, 6, **BUSY | {"kv_use": 0.99, "waiting": 0.0}))
    full = BUSY | {"kv_use": 0.95, "slots": 32.0}
    assert "batching" not in after(word(1, 3, **full), word(3, 6, **full)), "no request could fill the empty slots"


def test_empty_slots_while_requests_queue() -> None:
    """8 of 32 slots are filled: three quarters of wait and slack."""
    queued = word(1, 3, **BUSY, slots=32.0)
    found = after(queued, word(3, 6, **BUSY, slots=32.0))
    assert found["batching"] == pytest.approx(0.75 * 0.55)
    assert "kv_cache_wait" not in found
    assert "batching" not in after(queued, word(3, 6, **BUSY | {"waiting": 0.0}, slots=32.0))
    assert "batching" not in after(queued, word(3, 6, **BUSY))


def test_requests_that_wait_at_a_single_report_may_start_at_once() -> None:
    """A decode server reports 20 waiting requests once, with 12 of its 256 slots filled."""
    calm, queue = {"running": 12.0, "slots": 256.0, "kv_use": 0.3}, {"waiting": 20.0}
    before, after_it = word(1, 3, waiting=0.0, **calm), word(4, 6, waiting=0.0, **calm)
    assert "batching" not in after(before, word(3, 6, **calm, **queue))
    assert "batching" not in after(word(1, 3, **calm, **queue), word(3, 4, **calm, **queue), after_it)
    assert "batching" in after(word(1, 3, **calm, **queue), word(3, 6, **calm, **queue))


def test_requests_that_cannot_join_the_batch_wait_neither_for_a_slot_nor_for_the_kv_cache() -> None:
    """The KV cache of all four is on its way from or to another server."""
    sending = word(1, 3, **BUSY, slots=32.0, deferred=4.0), word(3, 6, **BUSY, slots=32.0, deferred=4.0)
    assert "batching" not in after(*sending)
    assert "batching" not in after(sending[0], word(3, 6, **BUSY, slots=32.0))
    assert "kv_cache_wait" not in after(word(1, 6, **BUSY | {"kv_use": 0.95}, deferred=4.0))
    some = word(1, 3, **BUSY, slots=32.0, deferred=3.0), word(3, 6, **BUSY, slots=32.0, deferred=3.0)
    assert after(*some)["batching"] == pytest.approx(0.75 * 0.55)


def test_decode_steps_stretched_by_prefills() -> None:
    """40 ms instead of 30 between two tokens: a quarter of the slack that communication leaves.

    Of that, a tenth of what idle SMs allow: (.955 * .95 - .8) / (.955 - .14).
    """
    communication = 0.1 * (0.955 * 0.95 - 0.8) / (0.955 - 0.14)
    slow = {"inter_token_seconds": 0.04, "calm_inter_token_seconds": 0.03}
    found = after(word(1, 6, **BUSY, prompt_tokens=100.0, **slow))
    assert found["prefill_decode_interference"] == pytest.approx(0.25 * (0.5 - communication), abs=2e-6)
    assert "prefill_decode_interference" not in after(word(1, 6, **BUSY, **slow))
    assert "prefill_decode_interference" not in after(word(1, 6, **BUSY, prompt_tokens=9.0, inter_token_seconds=0.04))
    fast = {"inter_token_seconds": 0.02, "calm_inter_token_seconds": 0.03}
    assert "prefill_decode_interference" not in after(word(1, 6, **BUSY, prompt_tokens=9.0, **fast))


def test_rejected_drafts_and_tokens_computed_twice() -> None:
    """100 prompt tokens (30 of them recomputed), 80 drafts of which 50 are accepted, 150 generated: 280 computed."""
    told = word(
        1, 6, prompt_tokens=100.0, recomputed_tokens=30.0, drafted_tokens=80.0, accepted_tokens=50.0,
        generated_tokens=150.0,
    )  # fmt: skip
    assert computed_tokens(told) == 280.0
    found = after(told)
    assert found["rejected_speculation"] == pytest.approx(0.45 * 30 / 280, abs=1e-6)
    assert found["kv_cache_pressure"] == pytest.approx(0.45 * 30 / 280, abs=1e-6)
    assert found["useful"] == pytest.approx(0.45 * 220 / 280, abs=2e-6)


def test_an_engine_s_flops_stand_for_the_model_s() -> None:
    """FLOPs at 0.28 of the peak, a fifth of them rejected drafts: 0.224 useful, 0.09 rejected, the rest padding."""
    told = word(
        1, 6, flops=0.28 * PEAK * 5, drafted_tokens=40.0, accepted_tokens=20.0, generated_tokens=80.0,
    )  # fmt: skip
    found = after(told, seconds=1)
    assert found["rejected_speculation"] == pytest.approx(0.45 * 0.2)
    assert found["useful"] == pytest.approx(0.36)  # the reported five seconds are booked first
    found = after(told, seconds=5)
    assert found["useful"] == pytest.approx(0.224 * 5)
    assert found["padding"] == pytest.approx((0.36 - 0.224) * 5)


def test_a_word_holds_until_three_more_should_have_come() -> None:
    """Reports every five seconds: after twenty seconds without one the shares expire."""
    told = word(0, 1, **BUSY, slots=32.0), word(1, 6, **BUSY, slots=32.0)
    ledger = opened()
    advance(ledger, replace(seen(6), serving=told))
    advance(ledger, seen(26, reading(6, 26)))
    before = parts(ledger)
    advance(ledger, seen(27, reading(26, 27)))
    assert "batching" in lost(ledger, before)
    before = parts(ledger)
    advance(ledger, seen(28, reading(27, 28)))
    assert "batching" not in lost(ledger, before)


@pytest.mark.parametrize(("end", "leak"), [(26, "unattributed_stall"), (27, "idle_allocation")])
def test_a_word_shows_requests_only_for_readings_that_it_outlasts(end: int, leak: str) -> None:
    """It holds until second 26."""
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(word(1, 6, running=1.0, waiting=0.0, generated_tokens=5.0),)))
    advance(ledger, seen(20, reading(6, 20)))
    before = parts(ledger)
    advance(ledger, seen(end, reading(20, end, RESTING)))
    assert lost(ledger, before) == {leak: end - 20.0}


@pytest.mark.parametrize(
    "lie",
    [
        word(6, 5), word(1, 7), word(1, 6, running=-1.0), word(1, 6, flops=float("nan")),
        word(1, 6, flops=1e308), word(1, 6, flops=1e17), word(1, 6, generated_tokens=1e31),
        word(1, 6, latencies=(Latency("ttft", 1.0, float("nan"), 2.0),)),
        replace(word(1, 6), job_id="42"), word(1, 6, uuids=("GPU-9",)),
    ],
)  # fmt: skip
def test_a_lie_moves_nothing_but_a_counter(lie: ServingReport) -> None:
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(lie,)))
    assert ledger.refused["serving"] == 1
    assert not ledger.gpus["GPU-0"].credits


def test_the_first_word_is_of_a_moment() -> None:
    """The first report has gauges, valid for five seconds, and no counts."""
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(word(6, 6, running=0.0, waiting=0.0, flops=1e15),)))
    before = parts(ledger)
    advance(ledger, seen(8, reading(6, 8, HALF)))
    assert lost(ledger, before)["idle_allocation"] == 1.0
    assert ledger.jobs["41"].book.reportable == 0.0
    advance(ledger, seen(12, reading(8, 12, HALF)))
    before = parts(ledger)
    advance(ledger, seen(13, reading(12, 13, HALF)))
    assert lost(ledger, before)["unattributed_stall"] == 0.5


@pytest.mark.parametrize(("engine", "leak"), [(0.29, "idle_allocation"), (0.3, "unattributed_stall")])
def test_a_server_that_reports_nothing_is_idle_while_no_kernel_runs_for_most_of_the_time(
    engine: float, leak: str
) -> None:
    ledger = opened()
    before = parts(ledger)
    some = HALF | {"gr_engine_active": engine, "sm_active": engine, "tensor_active": 0.1}
    advance(ledger, seen(2, reading(1, 2, some)))
    assert lost(ledger, before)[leak] == pytest.approx(1 - engine)
    busy = word(1, 2, running=1.0, waiting=0.0, generated_tokens=5.0)
    advance(ledger, replace(seen(2), serving=(busy,)))
    before = parts(ledger)
    advance(ledger, seen(3, reading(2, 3, some)))
    assert "idle_allocation" not in lost(ledger, before), "its engine reports requests"


def test_a_server_starts_before_it_is_idle() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=SERVER)]))
    advance(ledger, seen(600, reading(0, 600, RESTING)))
    assert lost(ledger) == {"startup": 600.0}


def test_a_server_s_even_gaps_are_its_host_s_whatever_its_kernels() -> None:
    """Half of each second waits, for two minutes; the SMs are full while a kernel runs."""
    ledger = opened()
    advance(ledger, seen(120, reading(1, 120, HALF)))
    before = parts(ledger)
    advance(ledger, seen(121, reading(120, 121, HALF)))
    assert lost(ledger, before)["host_overhead"] == pytest.approx(0.5)


def test_series_of_a_server_with_two_replicas() -> None:
    ledger = opened(2)
    slow, fast = Latency("ttft", 1.0, 2.0, 3.0), Latency("ttft", 0.1, 0.2, 0.3)
    one = word(
        1, 6, uuids=("GPU-0",), running=6.0, waiting=1.0, slots=8.0, kv_use=0.4, preemptions=2.0,
        generated_tokens=100.0, accepted_tokens=50.0, drafted_tokens=80.0, latencies=(fast,), bytes=0.5 * 3350e9 * 5,
    )  # fmt: skip
    two = word(1, 6, uuids=("GPU-1",), running=2.0, waiting=0.0, slots=8.0, kv_use=0.9, latencies=(slow, fast))
    advance(ledger, replace(seen(6), serving=(one, two)))
    assert shows(ledger, "job_requests") == {'state="running"': 8.0, 'state="waiting"': 1.0}
    assert value(ledger, "job_batch_fill_ratio") == 0.5
    assert value(ledger, "job_kv_cache_ratio") == 0.9
    assert value(ledger, "job_preemptions_total") == 2.0
    assert shows(ledger, "job_engine_tokens_total")['kind="drafted"'] == 80.0
    assert value(ledger, "job_draft_acceptance_ratio") == 0.625
    assert value(ledger, "job_tokens_per_pass_ratio") == 2.0
    assert value(ledger, "job_mbu_ratio") == pytest.approx(0.5)
    assert shows(ledger, "job_latency_seconds")['kind="ttft",percentile="p99"'] == 3.0
    assert shows(ledger, "job_engine_info") == {'engine="vllm"': 1.0}


def test_no_more_drafts_are_accepted_than_there_were() -> None:
    """Inconsistent values, as from a page read while it is written."""
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(word(1, 6, drafted_tokens=5e-324, accepted_tokens=50.0),)))
    assert value(ledger, "job_draft_acceptance_ratio") == 1.0


def test_latencies_are_shown_for_a_minute_after_a_request() -> None:
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(word(1, 6, latencies=(Latency("itl", 0.1, 0.2, 0.3),)),)))
    for at, shown in ((30, 3), (66, 3), (70, 0)):
        advance(ledger, replace(seen(at), serving=(word(at - 4, at, running=1.0),)))
        assert len(shows(ledger, "job_latency_seconds")) == shown


def test_gauges_of_an_engine_that_is_gone_are_not_shown() -> None:
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(word(1, 6, **BUSY, bytes=1.0),)))
    advance(ledger, seen(100))
    assert shows(ledger, "job_requests") == {}
    assert value(ledger, "job_mbu_ratio") is None
    assert value(ledger, "job_tokens_per_pass_ratio") is None
    assert shows(ledger, "job_engine_tokens_total")['kind="generated"'] == 100.0


def test_drafts_that_are_not_used_are_advice() -> None:
    """Half of the second's 0.5 of slack, all of it memory-bound; nothing with speculative decoding."""
    ledger = opened()
    advance(ledger, replace(seen(6), serving=(word(1, 6, generated_tokens=10.0),)))
    advance(ledger, seen(7, reading(6, 7, DECODING)))
    assert shows(ledger, "job_advice_seconds_total") == {'advice="speculative_decoding"': pytest.approx(0.25)}
    names = dict(zip(LEAK_NAMES, ledger.jobs["41"].book.parts, strict=True))
    assert names["memory_bound"] / S == pytest.approx(0.5, abs=0.6)
    drafting = opened()
    told = word(1, 6, generated_tokens=10.0, drafted_tokens=5.0)
    advance(drafting, replace(seen(6), serving=(told,)))
    advance(drafting, seen(7, reading(6, 7, DECODING)))
    assert lines(take_snapshot(drafting, DaemonMetadata()), "job_advice_seconds_total") == []
