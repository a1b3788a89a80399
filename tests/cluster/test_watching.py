"""The watcher's loop: which questions are asked when, a silent scheduler, and the exposition."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporter.cluster.metrics import METRICS, page
from exporter.cluster.model import (
    ClusterJob,
    ClusterNode,
    Demand,
    Jobs,
    NodeRequirements,
    Nodes,
    Partition,
    PendingJob,
    Reservation,
    Reservations,
    Topology,
)
from exporter.cluster.watcher import MOST_PARTITIONS, ClusterUnavailableError, ClusterWatcher, Question
from exporter.core.model import SECOND
from tests.clocks import JumpClock

MINUTE = 60 * SECOND
P = "gpu_efficiency_cluster_"


class Scheduler:
    """Returns set answers; raises what `trouble` has for a question; records when each was asked."""

    name = "fake"

    def __init__(self, clock: JumpClock) -> None:
        self._clock = clock
        self.asked: list[tuple[int, str, int]] = []
        self.trouble: dict[str, Exception] = {}
        self._left, self._stop = -1, threading.Event()
        self.says: dict[str, Any] = {
            "jobs": Jobs(
                (PendingJob("2", "gpu", "resources", (Demand(2, 2),), since=0.0),),
                (ClusterJob("1", "gpu", {"n1": 4}, ("n1",), running=True),),
                {"": NodeRequirements()},
            ),
            "nodes": Nodes((ClusterNode("n1", {"h100": 8}, {"h100": 4}, state="mixed", partitions=("gpu",)),)),
            "reservations": Reservations((Reservation("r", 10.0, 20.0, ("n1",)),)),
            "topology": Topology({"switch": {"n1": "s1"}}),
        }

    @property
    def questions(self) -> Sequence[Question]:
        rows = (("jobs", 1, 1), ("nodes", 2, 2), ("reservations", 2, 1), ("topology", 60, 1))
        return [Question(name, every, calls, self._answer(name, calls)) for name, every, calls in rows]

    def end_after(self, turns: int, stop: threading.Event) -> None:
        self._left, self._stop = turns, stop

    def _answer(self, name: str, calls: int) -> Callable[[], Any]:
        def ask() -> Any:
            self.asked.append((self._clock.now(), name, calls))
            self._left -= name == "jobs"
            if not self._left:
                self._stop.set()
            if name in self.trouble:
                raise self.trouble[name]
            return self.says[name]

        return ask

    def close(self) -> None:
        """Do nothing: no resource is held."""


class Hour:
    """A watcher whose turns take no time."""

    def __init__(self) -> None:
        self.clock = JumpClock()
        self.scheduler = Scheduler(self.clock)
        self.watch = ClusterWatcher(self.scheduler, self.clock, refresh_seconds=60, max_jobs=10)

    def minutes(self, number: int) -> dict[str, float]:
        for _ in range(number):
            self.watch.turn()
            self.clock.wait(self.clock.now() + MINUTE, threading.Event())
        return self.samples()

    def samples(self) -> dict[str, float]:
        """By name and label values."""
        text = page(self.watch.view, now=self.clock.now()).decode()
        return {
            "/".join((sample.name.removeprefix(P), *sample.labels.values())): sample.value
            for family in parse_text(text)
            for sample in family.samples
        }


@pytest.fixture
def hour() -> Hour:
    return Hour()


def test_three_calls_a_minute_at_most_and_all_is_asked(hour: Hour) -> None:
    hour.minutes(125)
    calls: Counter[int] = Counter()
    for at, _, cost in hour.scheduler.asked:
        calls[at // MINUTE] += cost
    assert max(calls.values()) == 3
    assert Counter(name for _, name, _ in hour.scheduler.asked) == {
        "jobs": 125,
        "nodes": 63,
        "reservations": 62,
        "topology": 3,
    }


def test_after_failures_no_more_is_asked_than_before(hour: Hour) -> None:
    hour.scheduler.trouble = {name: ClusterUnavailableError("gone") for name in hour.scheduler.says}
    found = hour.minutes(30)
    calls: Counter[int] = Counter()
    for at, _, cost in hour.scheduler.asked:
        calls[at // MINUTE] += cost
    assert max(calls.values()) <= 3
    assert Counter(at // MINUTE for at, _, _ in hour.scheduler.asked) == dict.fromkeys(range(30), 1), "one is enough"
    assert all(found[f"failed_questions_total/{name}/silent"] >= 5 for name in hour.scheduler.says), "in turn"


@pytest.mark.parametrize("broken", ["jobs", "nodes", "reservations", "topology"])
def test_one_question_that_always_fails_holds_no_other_up(hour: Hour, broken: str) -> None:
    hour.scheduler.trouble = {broken: ClusterUnavailableError("without the JSON plugin")}
    found = hour.minutes(60)
    assert found[f"failed_questions_total/{broken}/silent"] > 20
    for name, seconds in {"jobs": 120, "nodes": 240, "reservations": 240, "topology": 3600}.items():
        assert name == broken or found[f"answer_age_seconds/{name}"] <= seconds


def test_an_answer_that_nobody_expected_is_unreadable_and_holds_no_other_up(
    hour: Hour, caplog: pytest.LogCaptureFixture
) -> None:
    hour.scheduler.trouble = {"jobs": KeyError("odd")}
    found = hour.minutes(10)
    assert found["failed_questions_total/jobs/unreadable"] >= 4
    assert found["answer_age_seconds/nodes"] <= 240
    assert "jobs: the answer cannot be read; please report this" in caplog.text


def test_a_turn_that_fails_is_an_error_and_the_next_comes_when_it_is_due(
    hour: Hour, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(hour.watch, "_build_view", fail)
    stop = threading.Event()
    hour.scheduler.end_after(5, stop)
    hour.watch.run(stop)
    assert [at // MINUTE for at, name, _ in hour.scheduler.asked if name == "jobs"] == [0, 1, 2, 3, 4]
    assert hour.watch.error == "a turn failed: RuntimeError('odd')"
    assert "please report this" in caplog.text


def test_the_page_says_what_was_told(hour: Hour) -> None:
    found = hour.minutes(2)
    wall = hour.clock.wall() / SECOND
    assert found["queue_jobs/gpu/resources"] == 1
    assert found["queue_gpus/gpu/resources"] == 2
    assert found["queue_fitting_jobs/gpu/resources"] == 1
    assert found["queue_longest_wait_seconds/gpu"] == pytest.approx(wall - 60.0, abs=1)
    assert found["node_expected_gpus/n1/h100"] == 8
    assert found["node_allocated_gpus/n1/h100"] == 4
    assert found["node_state/n1/mixed"] == 1
    assert found["reservation_gpus/r"] == 8
    assert found["reservation_end_timestamp_seconds/r"] == 20
    assert found["job_gpus/1"] == 4
    assert found["job_span/1/switch"] == 1
    assert found["answer_age_seconds/jobs"] == 60
    assert found["questions_total/nodes"] == 1


def test_silence_takes_the_queue_away_and_leaves_what_is_paid_for(hour: Hour) -> None:
    hour.minutes(2)
    hour.scheduler.trouble = {name: ClusterUnavailableError("no answer within 30 s") for name in hour.scheduler.says}
    found = hour.minutes(2)
    assert "queue_jobs/gpu/resources" in found, "180 s old: three intervals"
    found = hour.minutes(1)
    assert not [key for key in found if key.startswith(("queue", "job_"))]
    assert found["node_state/n1/mixed"] == 1, "nodes are asked every two minutes"
    found = hour.minutes(10)
    assert not [key for key in found if key.startswith(("node_state", "node_allocated", "reservation", "partition"))]
    assert found["node_expected_gpus/n1/h100"] == 8
    assert found["answer_age_seconds/jobs"] == 14 * 60
    assert "no answer" in hour.watch.error
    hour.scheduler.trouble = {}
    assert hour.minutes(2)["queue_jobs/gpu/resources"] == 1


def test_counters_outlive_silence(hour: Hour) -> None:
    hour.minutes(1)
    hour.scheduler.says["jobs"] = Jobs((), (ClusterJob("1", "gpu", restarts=1),))
    hour.scheduler.says["nodes"] = Nodes((ClusterNode("n1", {"h100": 8}, state="down"),))
    hour.minutes(2)
    hour.scheduler.trouble = {name: ValueError("no JSON") for name in hour.scheduler.says}
    found = hour.minutes(20)
    assert found["interruptions_total/gpu/node_failure/requeued"] == 1
    assert found["interrupted_gpus_total/gpu/node_failure/requeued"] == 4
    assert "node_failure_timestamp_seconds/n1/1/gpu" in found
    assert found["failed_questions_total/jobs/unreadable"] == 20


def test_the_page_says_who_preempted_whom_and_what_it_cost(hour: Hour) -> None:
    partitions = {"gpu": Partition(1, preemptable=True), "urgent": Partition(2, preemptable=False)}
    hour.scheduler.says["nodes"] = Nodes(hour.scheduler.says["nodes"].nodes, partitions)
    first = ClusterJob("1", "gpu", {"n1": 4}, ("n1",), running=True, qos="p", started=100)
    hour.scheduler.says["jobs"] = Jobs((), (first,))
    hour.minutes(2)
    high = ClusterJob("7", "urgent", {"n1": 8}, ("n1",), running=True, qos="q", started=150)
    hour.scheduler.says["jobs"] = Jobs((), (ClusterJob("1", "gpu", restarts=1, left=150), high))
    found = hour.minutes(3)
    assert found["preemptions_total/gpu/p/urgent/q"] == 1
    assert found["preempted_gpu_seconds_total/gpu/p/urgent/q"] == 200
    assert found["interrupted_gpu_seconds_total/gpu/preempted/requeued"] == 200
    assert found["preemption_timestamp_seconds/1/7"] == pytest.approx(hour.clock.wall() / SECOND - 180, abs=1)
    assert found["preemption_cost_gpu_seconds/7/urgent"] == 200


def test_nothing_is_said_of_what_was_never_answered(hour: Hour) -> None:
    hour.scheduler.trouble = {"jobs": ClusterUnavailableError("x"), "nodes": ClusterUnavailableError("y")}
    found = hour.minutes(1)
    assert not [key for key in found if key.startswith(("queue", "node_", "job_", "answer_age"))]
    assert found["questions_total/jobs"] == 1


def test_what_was_refused_is_counted(hour: Hour) -> None:
    hour.scheduler.says["jobs"] = Jobs(refused=3)
    assert hour.minutes(2)["refused_total/jobs"] == 6


def test_partitions_beyond_the_bound_are_one(hour: Hour) -> None:
    pending = [
        PendingJob(
            f"{number}",
            f"p{number:03}",
            "resources",
            (Demand(1, 1),),
            since=0.0,
            count=1 + (number < 10),
            priority=number,
        )
        for number in range(300)
    ]
    hour.scheduler.says["jobs"] = Jobs(tuple(pending), (), {"": NodeRequirements()})
    found = hour.minutes(1)
    partitions = {key.split("/")[1] for key in found if key.startswith("queue_jobs/")}
    assert len(partitions) == MOST_PARTITIONS
    assert {"other", *(f"p{number:03}" for number in range(10))} <= partitions
    assert sum(value for key, value in found.items() if key.startswith("queue_jobs/")) == 310
    assert sum(value for key, value in found.items() if key.startswith("queue_fitting_jobs/")) == 4
    assert found["queue_fitting_jobs/other/resources"] == 4, "the last ones have the highest priority"


def test_free_gpus_are_those_that_anybody_may_have(hour: Hour) -> None:
    both = ("gpu", "late")
    hour.scheduler.says["nodes"] = Nodes((
        ClusterNode("n1", {"h100": 8}, {"h100": 3}, state="mixed", partitions=both, open_partitions=("gpu",)),
        ClusterNode("n2", {"h100": 8}, state="drained", partitions=both, open_partitions=both),
        ClusterNode("n3", {"h100": 8}, state="reserved", partitions=both, open_partitions=both),
    ))  # fmt: skip
    found = hour.minutes(1)
    assert (found["partition_free_gpus/gpu"], found["partition_free_gpus/late"]) == (5, 0)


def test_a_job_is_stuck_once_it_has_fitted_for_a_quarter_of_an_hour(hour: Hour) -> None:
    assert hour.minutes(15)["queue_stuck_gpus/gpu/resources"] == 0
    assert hour.minutes(1)["queue_stuck_gpus/gpu/resources"] == 2
    full = ClusterNode("n1", {"h100": 8}, {"h100": 8}, state="allocated", partitions=("gpu",))
    room, hour.scheduler.says["nodes"] = hour.scheduler.says["nodes"], Nodes((full,))
    hour.minutes(2)
    hour.scheduler.says["nodes"] = room
    assert hour.minutes(15)["queue_stuck_gpus/gpu/resources"] == 0, "for a moment it did not fit"


@pytest.mark.parametrize("silent", ["jobs", "nodes"])
def test_a_job_is_not_stuck_because_the_scheduler_was_silent(hour: Hour, silent: str) -> None:
    hour.minutes(2)
    hour.scheduler.trouble = {silent: ClusterUnavailableError("gone")}
    hour.minutes(20)
    hour.scheduler.trouble = {}
    found = [hour.minutes(1).get("queue_stuck_gpus/gpu/resources") for _ in range(25)]
    known = [value for value in found if value is not None]
    assert (known[:15], known[-1]) == ([0] * 15, 2), "a quarter of an hour of answers"


@pytest.mark.parametrize("array", [True, False])
def test_jobs_that_start_and_make_room_for_others_are_not_stuck(hour: Hour, *, array: bool) -> None:
    for number in range(60):
        tasks = 100 - number if array else 1
        job = PendingJob("2" if array else f"{number}", "gpu", "priority", (Demand(2, 2),), count=tasks, since=0.0)
        hour.scheduler.says["jobs"] = Jobs((job,), (), {"": NodeRequirements()})
        found = hour.minutes(1)
        assert (found["queue_fitting_jobs/gpu/priority"] > 0, found["queue_stuck_gpus/gpu/priority"]) == (True, 0)


def test_a_node_that_is_powered_down_is_not_expected(hour: Hour) -> None:
    (node,) = hour.scheduler.says["nodes"].nodes
    asleep = structs.replace(node, name="n2", used={}, state="powered_down")
    hour.scheduler.says["nodes"] = Nodes((node, asleep))
    found = hour.minutes(1)
    assert [key for key in found if key.startswith("node_expected_gpus")] == ["node_expected_gpus/n1/h100"]
    assert found["node_state/n2/powered_down"] == 1
    assert found["partition_free_gpus/gpu"] == 0


def test_shares_of_a_gpu_are_not_gpus(hour: Hour) -> None:
    hour.scheduler.says["nodes"] = Nodes((ClusterNode("n1", {"gpu": 32}, {"gpu": 2}, shares=4, model="NVIDIA-L4"),))
    found = hour.minutes(1)
    assert (found["node_expected_gpus/n1/gpu"], found["node_allocated_gpus/n1/gpu"]) == (8, 0.5)
    assert found["node_info/n1/NVIDIA-L4"] == 1


def test_the_loop_takes_a_turn_a_minute_until_it_is_told_to_end(hour: Hour) -> None:
    stop = threading.Event()
    hour.scheduler.end_after(10, stop)
    hour.watch.run(stop)
    assert [at // MINUTE for at, name, _ in hour.scheduler.asked if name == "jobs"] == list(range(10))


def test_both_formats_are_what_prometheus_reads(hour: Hour) -> None:
    hour.minutes(2)
    view, now = hour.watch.view, hour.clock.now()
    families = list(parse_text(page(view, now=now).decode()))
    open_families = list(parse_openmetrics((page(view, now=now, openmetrics=True) + b"# EOF\n").decode()))  # type: ignore[no-untyped-call]
    assert len(families) == len(open_families)
    assert {family.name for family in families} <= {metric.name.removesuffix("_total") for metric in METRICS}


def test_names_units_and_helps() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.name.startswith(P)
        assert metric.help.endswith(".")
        assert (metric.type == "counter") == metric.name.endswith("_total")
        assert not metric.unit or metric.name.endswith(metric.unit)
        assert not {"user", "name", "account", "job", "instance"} & set(metric.labels)
