"""`gpu-efficiency preview --prometheus`, against a real Prometheus with six hours of a fleet whose answer is known.

Beside it stand six hours of the exporter's own pages, of which the recording must give the same answer. Nothing
waits for a clock.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import Observation, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.trace import TraceHeader, TraceWriter
from tests.dashboards.past import Series, named, prometheus
from tests.e2e.running import Page
from tests.preview.commands import preview
from tests.worlds import RESTING, WORKING, S, device, first, held, reading, seen

pytestmark = pytest.mark.e2e
BEGIN = 1_767_225_600
"""2026-01-01 00:00 UTC."""
MINUTES = 360
END = BEGIN + MINUTES * 60
H100 = "NVIDIA H100 80GB HBM3"
NEVER = MINUTES + 1


class Stay(Struct, frozen=True, kw_only=True):
    """A job on one GPU from a minute to another, at work until `works` and again from `again` on."""

    uuid: str
    job: str
    kind: str = "batch"
    start: int = 0
    end: int = MINUTES
    works: int = 0
    again: int = NEVER
    limit: float | None = None
    exempt: bool = False
    node: str = "n1"
    cluster: str = "a"
    share: float = 1.0

    def worked(self, minute: int) -> int:
        """The minute of its last work, as its daemon says."""
        if minute >= self.again or minute <= self.works:
            return minute
        return RESTARTED if self.node == "n2" and minute >= RESTARTED else max(self.works, self.start)


RESTARTED = 100
"""Minute at which the daemon of node n2 starts anew, two minutes after its last word."""
FLEET = (
    Stay(uuid="GPU-0", job="41", works=60),
    Stay(uuid="GPU-1", job="42", kind="interactive", again=180),
    Stay(uuid="GPU-2", job="43", end=20),
    Stay(uuid="GPU-2", job="44", start=21, works=MINUTES),
    Stay(uuid="GPU-3", job="45", limit=3000),
    Stay(uuid="GPU-4", job="46", exempt=True),
    Stay(uuid="GPU-5", job="47", node="n2"),
    Stay(uuid="MIG-7", job="48", share=3 / 7),
    Stay(uuid="GPU-8", job="41", cluster="b", again=80, node="n9"),
    Stay(uuid="GPU-9", job="unknown"),
    Stay(uuid="MIG-9", job="49", start=120, end=240, share=3 / 7, cluster="mig"),
)
ASKED_FOR = {
    f"gpu_efficiency_{name}"
    for name in (
        "allocation_info", "build_info", "gpu_info", "job_exempt", "job_info", "job_zombie_limit_seconds",
        "last_work_timestamp_seconds", "paid_seconds_total", "price_per_gpu_hour",
    )
}  # fmt: skip


def put(samples: Series, name: str, labels: dict[str, str], value: float, minute: int) -> None:
    samples.setdefault(named(name, **labels), []).append((BEGIN + minute * 60, value))


def tell_stay(samples: Series, stay: Stay, minute: int) -> None:
    page = {"cluster": stay.cluster, "job": "gpu", "instance": f"{stay.node}:19400"}
    gpu = page | {"uuid": stay.uuid, "gpu": "0"}
    put(samples, "gpu_efficiency_allocation_info", gpu | {"job_id": stay.job, "rank": "0"}, 1, minute)
    put(samples, "gpu_efficiency_last_work_timestamp_seconds", gpu, BEGIN + 60 * stay.worked(minute), minute)
    parent = {"parent": "GPU-7" if stay.share < 1 else ""}
    put(samples, "gpu_efficiency_gpu_info", gpu | {"model": H100} | parent, 1, minute)
    paid = minute - stay.start + (60 if stay.cluster == "mig" and minute >= 180 else 0)  # an hour at a daemon's start
    put(samples, "gpu_efficiency_paid_seconds_total", gpu, 60.0 * stay.share * paid, minute)
    who = {"job_id": stay.job, "name": f"train-{stay.job}", "user": "ada", "workload_class": stay.kind}
    put(samples, "gpu_efficiency_job_info", page | who, 1, minute)
    if stay.limit is not None:
        put(samples, "gpu_efficiency_job_zombie_limit_seconds", page | {"job_id": stay.job}, stay.limit, minute)
    if stay.exempt:
        put(samples, "gpu_efficiency_job_exempt", page | {"job_id": stay.job, "exemption": "demo"}, 1, minute)


def tell_node(samples: Series, cluster: str, node: str, minute: int) -> None:
    page = {"cluster": cluster, "job": "gpu", "instance": f"{node}:19400"}
    since = BEGIN + (60 * RESTARTED - 5 if node == "n2" and minute >= RESTARTED else -3600)
    put(samples, "gpu_efficiency_build_info", page | {"version": "1"}, 1, minute)
    put(samples, "process_start_time_seconds", page, since, minute)
    known = node == "n1"
    price = {"model": H100, "pool": "", "currency": "USD" if known else "GPU-hours", "basis": "allocated"}
    for had, value in (("true", 4.0 if known else 1.0), ("false", 0.0)):
        put(samples, "gpu_efficiency_price_per_gpu_hour", page | price | {"held": had}, value, minute)


def fleet() -> Series:
    """Six hours, a sample a minute; node n2 is silent for two minutes before its daemon starts anew."""
    samples: Series = {}
    for minute in range(MINUTES + 1):
        silent = {"n2"} if RESTARTED - 2 < minute < RESTARTED else set()
        for cluster, node in {(stay.cluster, stay.node) for stay in FLEET}:
            if node not in silent:
                tell_node(samples, cluster, node, minute)
        for stay in FLEET:
            if stay.start <= minute <= stay.end and stay.node not in silent:
                tell_stay(samples, stay, minute)
    return samples


NODE = {"cluster": "real", "job": "gpu", "instance": "real:19400"}
STORY = [(60.0, [WORKING, RESTING, RESTING]), (90.0, [RESTING] * 3), (210.0, [RESTING, WORKING, RESTING])]
"""Minutes and what three GPUs do in them."""
HOLDERS = [
    held("GPU-a", Owner("51", name="train", user="ada"), gpus=1),
    held("GPU-b", Owner("52", name="notebook", user="bob", workload_class="interactive"), gpus=1),
    held("GPU-c", Owner("53", zombie_seconds=3000), gpus=1),
]
BOARDS = [device(f"GPU-{letter}", f"{number}") for number, letter in enumerate("abc")]


def node() -> Iterator[Observation]:
    """The same six hours of a node that the core itself watches, a reading a minute."""
    yield replace(first(BOARDS, HOLDERS), wall=BEGIN * S)
    minute = 0
    for minutes, signals in STORY:
        for _ in range(round(minutes)):
            minute += 1
            end = minute * 60
            told = [reading(end - 60, end, s, d.uuid) for s, d in zip(signals, BOARDS, strict=True)]
            yield replace(seen(end, *told), wall=(BEGIN + end) * S)


def tell_real_pages(samples: Series) -> None:
    """What the real exporter would have said of that node, page by page."""
    ledger, meta = Ledger(), DaemonMetadata(version="1", source="replay")
    for minute, observation in enumerate(node()):
        advance(ledger, observation)
        for (name, labels), value in Page(render(take_snapshot(ledger, meta)).decode()).samples.items():
            if name in ASKED_FOR:
                put(samples, name, dict(labels) | NODE, float(value), minute)
        put(samples, "process_start_time_seconds", NODE, BEGIN - 3600, minute)


@pytest.fixture(name="url", scope="module")
def _url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has stored the fleet, and the pages of a node."""
    samples = fleet()
    tell_real_pages(samples)
    with prometheus(tmp_path_factory.mktemp("prometheus"), lookback="59s") as past:
        past.write(samples)
        yield past.url


@pytest.fixture(name="ask")
def _ask(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """The answer to `preview` at the end of those hours."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("exporter.cli.preview.time.time", lambda: END + 17.0)

    def ask(words: str) -> dict[str, Any]:
        status, out, err = preview(f"--prometheus {url} --since 6h --json --quiet {words}")
        assert (status, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return ask


IN_A = "--match 'cluster=\"a\"'"
TRIED = "--policy zombie.batch=15m --policy zombie.interactive=1h"


def test_each_row_frees_and_hits_what_the_fleet_did(ask: Callable[[str], dict[str, Any]]) -> None:
    found = ask(f"{IN_A} {TRIED}")
    before, after = found["rows"]
    # GPU-0 from minute 120 (it has worked), GPU-3 from 50 (its own limit), GPU-5 from 30, 3/7 of MIG-7 from 30.
    rightly = (240 + 310 + 330 + 330 * 3 / 7) / 60
    assert (before["episodes"], before["jobs_reclaimed"], before["jobs_hit"]) == (5, 5, 1)
    assert before["gpu_hours_freed"] == pytest.approx(rightly, abs=0.02)
    assert before["gpu_hours_wrongly_freed"] == pytest.approx(4.0), "the rest of its hold"
    assert before["gpu_hours_work_lost"] == pytest.approx(3.0, abs=0.02)
    assert {kind["label"]: (kind["episodes"], kind["jobs_hit"]) for kind in before["by_class"]} == {
        "batch": (4, 0), "interactive": (1, 1),
    }  # fmt: skip
    # Half an hour more of GPU-0, a quarter of GPU-5 and MIG-7, five minutes of GPU-2, an hour more of GPU-1.
    assert (after["episodes"], after["jobs_reclaimed"], after["jobs_hit"]) == (6, 6, 1)
    assert after["gpu_hours_freed"] == pytest.approx(rightly + (30 + 15 + 15 * 3 / 7 + 5) / 60, abs=0.02)
    assert after["gpu_hours_wrongly_freed"] == pytest.approx(5.0)
    # The plain rule: GPU-3, GPU-5 and MIG-7, an hour each.
    assert (found["plain_rule"]["episodes"], found["plain_rule"]["jobs_hit"]) == (3, 0)
    assert found["plain_rule"]["gpu_hours_freed"] == pytest.approx(2 + 3 / 7, abs=0.02)


def test_the_job_that_is_hit_has_a_name_and_a_time(ask: Callable[[str], dict[str, Any]]) -> None:
    ((hit,), _) = (row["hits"] for row in ask(f"{IN_A} {TRIED}")["rows"])
    assert (hit["job_id"], hit["name"], hit["user"], hit["cluster"], hit["gpus"]) == (
        "42", "train-42", "ada", "a", ["GPU-1"],
    )  # fmt: skip
    assert (hit["taken_at"], hit["after_seconds"]) == (BEGIN + 120 * 60, 3600)


def test_money_is_what_the_nodes_say_and_none_where_they_have_no_price(ask: Callable[[str], dict[str, Any]]) -> None:
    before, _ = ask(f"{IN_A} {TRIED}")["rows"]
    assert before["money_freed"] == {"USD": pytest.approx(4 * (240 + 310 + 330 * 3 / 7) / 60, abs=0.1)}
    assert before["money_wrongly_freed"] == {"USD": pytest.approx(16.0)}


def test_a_mig_instance_that_exists_for_a_while_has_its_whole_share(ask: Callable[[str], dict[str, Any]]) -> None:
    found = ask(f"{TRIED} --match 'cluster=\"mig\"'")
    assert found["gpu_hours_held"] == pytest.approx(2 * 3 / 7)
    assert found["rows"][0]["gpu_hours_freed"] == pytest.approx(1.5 * 3 / 7)
    assert found["rows"][0]["money_freed"] == {"USD": pytest.approx(1.5 * 3 / 7 * 4)}


def test_what_no_row_moves_is_said(ask: Callable[[str], dict[str, Any]]) -> None:
    notes = "\n".join(ask(f"{IN_A} {TRIED}")["notes"])
    assert "duty cycle is not stored" in notes
    assert "which no row changes: 1 (45)" in notes
    assert "left alone: 1 (46)" in notes
    assert "did not report their owner: 1" in notes


@pytest.mark.parametrize("tried", [TRIED, "--policy zombie.batch=10m,1h", "--policy zombie.interactive=3h"])
def test_the_pages_of_a_node_and_its_recording_give_the_same_answer(
    ask: Callable[[str], dict[str, Any]], tmp_path: Path, tried: str
) -> None:
    """Work that is lost differs: its page does not say how much of a minute was work."""
    with TraceWriter(tmp_path / "node.jsonl", TraceHeader()) as trace:
        for observation in node():
            trace.append(observation)
    recorded = json.loads(preview(f"{tmp_path / 'node.jsonl'} {tried} --json")[1])["rows"]
    stored = ask(f"--match 'cluster=\"real\"' {tried}")["rows"]
    assert len(recorded) == len(stored)
    for by_trace, by_pages in zip(recorded, stored, strict=True):
        for name in ("label", "settings", "episodes", "episodes_right", "precision", "jobs_reclaimed", "jobs_hit"):
            assert by_pages[name] == by_trace[name], name
        for name in ("gpu_hours_freed", "gpu_hours_wrongly_freed"):
            assert by_pages[name] == pytest.approx(by_trace[name], abs=0.02), name
        assert [hit["job_id"] for hit in by_pages["hits"]] == [hit["job_id"] for hit in by_trace["hits"]]


def test_jobs_of_two_clusters_with_one_id_are_two_jobs(ask: Callable[[str], dict[str, Any]]) -> None:
    before, _ = ask(f"{TRIED} --match 'cluster=~\"a|b\"'")["rows"]
    assert (before["jobs_reclaimed"], before["jobs_hit"]) == (6, 2)
    assert [(hit["cluster"], hit["job_id"]) for hit in before["hits"]] == [("b", "41"), ("a", "42")]


def test_what_rested_before_is_freed_from_the_beginning_on(ask: Callable[[str], dict[str, Any]]) -> None:
    before, _ = ask(f"{IN_A} {TRIED} --since 3h")["rows"]
    assert before["gpu_hours_freed"] == pytest.approx((3 + 3 / 7) * 3, abs=0.02)
    assert before["jobs_hit"] == 0


def test_many_small_windows_give_the_same_answer(
    ask: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(f"{IN_A} {TRIED}")
    monkeypatch.setattr("exporter.preview.history.MAX_SAMPLES", 500)
    parts = ask(f"{IN_A} {TRIED}")
    assert parts["rows"][1] == whole["rows"][1] | {
        "gpu_hours_freed": pytest.approx(whole["rows"][1]["gpu_hours_freed"], abs=0.02),
        "money_freed": {"USD": pytest.approx(whole["rows"][1]["money_freed"]["USD"], abs=0.1)},
        "by_class": parts["rows"][1]["by_class"],
    }
    assert [kind["episodes"] for kind in parts["rows"][1]["by_class"]] == [
        kind["episodes"] for kind in whole["rows"][1]["by_class"]
    ]


def test_time_held_is_that_of_the_gpus(ask: Callable[[str], dict[str, Any]]) -> None:
    found = ask(f"{IN_A} {TRIED}")
    assert (found["since"], found["until"]) == (BEGIN, END)
    assert found["gpu_hours_held"] == pytest.approx((7 * 360 - 1 + 360 * 3 / 7) / 60, abs=0.05)


def test_a_time_in_which_nothing_was_stored_is_an_error_that_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("exporter.cli.preview.time.time", lambda: END + 86400.0)
    status, out, err = preview(f"--prometheus {url} --since 6h {TRIED}")
    assert (status, out) == (1, "")
    assert "no gpu_efficiency_last_work_timestamp_seconds is stored there in that time" in err


def test_a_selector_that_is_none_is_prometheus_own_word_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    status, _, err = preview(f"--prometheus {url} --since 6h {TRIED} --match 'cluster=a'")
    assert (status, len(err.splitlines())) == (1, 1)
    assert "refused a query: invalid parameter" in err
