"""Inbox: rate limit, replays, queue and counts, with a manual clock."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import SECOND
from exporter.training import inbox as module
from exporter.training.inbox import CONNECTIONS_EACH, Inbox, QueuedReport, Sender
from exporter.training.message import OUTCOMES, ReportRefusedError
from exporter.training.peer import Peer
from exporter.workloads import WorkloadProcess

NOW = 10_000 * SECOND


class Harness:
    """An inbox with one sender."""

    def __init__(self, per_second: float = 10.0, processes: int = 4) -> None:
        self.inbox = Inbox(per_second=per_second, processes=processes)
        self.now = NOW
        self.sender = self.add_sender(7)
        self.sender.process = WorkloadProcess(7, "job")
        self.refused: ReportRefusedError | None = None

    def add_sender(self, pid: int, ticks: int = 1) -> Sender:
        return self.inbox.sender(Peer(pid, ticks), begun=NOW - 100 * SECOND)

    def send(
        self, raw: bytes | None = None, sender: Sender | None = None, *, pid: int | None = None, **said: Any
    ) -> str:
        """Send a message; returns its outcome."""
        sender = sender or self.sender
        whole = json.dumps(said).encode() if raw is None else raw
        try:
            self.inbox.receive(sender, whole, pid=sender.peer.pid if pid is None else pid, now=self.now)
        except ReportRefusedError as err:
            self.refused = err
            return err.outcome
        return "taken"

    def drain(self) -> list[QueuedReport]:
        return self.inbox.drain(1000)


def test_messages_of_one_process_keep_their_order() -> None:
    harness = Harness()
    assert [harness.send(step=step) for step in range(5)] == ["taken"] * 5
    assert [queued.message.step for queued in harness.drain()] == [0, 1, 2, 3, 4]
    assert harness.drain() == []


def test_a_bucket_fills_at_the_rate_and_no_further() -> None:
    harness = Harness(per_second=2.0)
    assert [harness.send() for _ in range(7)] == ["taken"] * 5 + ["too_many"] * 2
    harness.now += SECOND
    assert [harness.send() for _ in range(4)] == ["taken"] * 2 + ["too_many"] * 2
    harness.now += 3600 * SECOND
    assert [harness.send() for _ in range(7)] == ["taken"] * 5 + ["too_many"] * 2
    assert dict(harness.inbox.counts())["too_many"] == 6


def test_that_it_is_too_fast_is_said_once_a_second() -> None:
    harness = Harness(per_second=0.5)
    said = []
    for _ in range(40):
        harness.now += SECOND // 10
        harness.send()
        said.append(harness.refused is not None and not harness.refused.silent)
        harness.refused = None
    assert 2 <= sum(said) <= 5


def test_a_wrong_message_costs_as_much_as_a_right_one() -> None:
    harness = Harness(per_second=1.0)
    assert [harness.send(b"x") for _ in range(7)] == ["malformed"] * 5 + ["too_many"] * 2


def test_one_process_s_haste_is_not_another_s() -> None:
    harness = Harness(per_second=1.0)
    for _ in range(50):
        harness.send()
    other = harness.add_sender(8)
    assert harness.send(sender=other) == "taken"


def test_a_message_of_another_process_is_not_this_one_s() -> None:
    harness = Harness()
    assert harness.send(pid=8) == "other_process"
    assert harness.drain() == []
    with pytest.raises(ReportRefusedError, match="after a fork"):
        harness.inbox.receive(harness.sender, b"{}", pid=None, now=harness.now)


def test_a_message_that_is_too_long_is_not_read() -> None:
    assert Harness().send(b"{" + b" " * 5000) == "too_large"
    assert Harness().send(b"{" + b" " * 4094 + b"}") == "taken"


def test_an_interval_counts_once_also_over_a_new_connection() -> None:
    harness = Harness()
    at = harness.now - SECOND
    assert harness.send(at=at, seconds=5, tokens=1) == "taken"
    assert harness.send(at=at, seconds=5, tokens=1) == "replayed"
    assert harness.send(sender=harness.add_sender(7), at=at, seconds=5, tokens=1) == "replayed"
    assert harness.send(at=at, seconds=0.5, tokens=1) == "replayed"
    assert harness.send(at=at + SECOND, seconds=1, tokens=1) == "taken"


def test_a_pid_used_again_has_a_past_of_its_own() -> None:
    harness = Harness()
    assert harness.send(seconds=5) == "taken"
    assert harness.add_sender(7, ticks=2) is not harness.sender
    assert harness.send(sender=harness.add_sender(7, ticks=2), seconds=5) == "taken"


def test_an_event_does_not_hide_the_interval_around_it() -> None:
    harness = Harness()
    assert harness.send(at=harness.now, phase="checkpoint") == "taken"
    assert harness.send(at=harness.now, seconds=5, tokens=1) == "taken"


def test_the_same_event_again_is_a_replay_and_one_without_a_time_is_another() -> None:
    harness = Harness()
    event: dict[str, Any] = {"at": harness.now, "checkpoints": 1}
    assert [harness.send(**event), harness.send(**event)] == ["taken", "replayed"]
    assert [harness.send(checkpoints=1), harness.send(checkpoints=1)] == ["taken", "taken"]


def test_what_is_refused_leaves_no_trace_in_the_sender_s_past() -> None:
    harness = Harness()
    assert harness.send(at=harness.now + 5 * SECOND, seconds=5) == "future"
    assert harness.send(seconds=4000) == "before_start"
    assert harness.send(seconds=5) == "taken"


def test_letters_of_whom_nobody_has_asked_about_wait_and_the_others_do_not() -> None:
    harness = Harness()
    new = harness.add_sender(8)
    for step in range(3):
        harness.send(sender=new, step=step)
        harness.send(step=step)
    assert [queued.message.step for queued in harness.drain()] == [0, 1, 2]
    assert harness.drain() == []
    new.process = WorkloadProcess(8, "job")
    assert [queued.message.step for queued in harness.drain()] == [0, 1, 2]


def test_processes_made_without_end_keep_nobody_s_words_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes can be started faster than they are looked up: their messages may use half of the queue."""
    monkeypatch.setattr(module, "MOST_WAITING", 8)
    monkeypatch.setattr(module, "MOST_UNIDENTIFIED", 4)
    harness = Harness()
    new = [harness.add_sender(pid) for pid in range(100, 106)]
    assert [harness.send(sender=sender) for sender in new] == ["taken"] * 4 + ["busy"] * 2
    assert [harness.send(step=step) for step in range(5)] == ["taken"] * 4 + ["busy"]
    assert [queued.message.step for queued in harness.inbox.drain(3)] == [0, 1, 2]
    assert [queued.message.step for queued in harness.inbox.drain(3)] == [3]
    new[1].looked_up_at = harness.now
    assert [queued.sender for queued in harness.drain()] == [new[1]]


def test_a_stranger_is_told_at_once_but_first_what_is_wrong_with_the_message() -> None:
    harness = Harness()
    unidentified = harness.add_sender(8)
    unidentified.looked_up_at = harness.now
    assert harness.send(sender=unidentified) == "unknown_process"
    assert "process 8 belongs to no job" in str(harness.refused)
    assert harness.send(b"x", unidentified) == "malformed"


def test_a_queue_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    harness = Harness()
    assert [harness.send() for _ in range(3)] == ["taken", "taken", "busy"]
    assert len(harness.inbox.drain(1)) == 1
    assert harness.send() == "taken"


def test_those_that_are_gone_make_room_for_the_new_and_those_that_are_here_stay() -> None:
    harness = Harness(processes=2)
    harness.inbox.connect(harness.sender)
    gone = harness.add_sender(8)
    harness.send(sender=gone)
    others = [harness.add_sender(pid) for pid in range(100, 107)]
    assert harness.add_sender(7) is harness.sender
    assert harness.add_sender(8) is not gone, "it was the first to speak of those that have gone"
    assert harness.add_sender(106) is others[-1]
    assert [queued.sender for queued in harness.drain()] == [gone], "nothing waits for ever"
    assert gone.unidentified


def test_connections_of_one_process_are_few() -> None:
    harness = Harness()
    for _ in range(CONNECTIONS_EACH):
        harness.inbox.connect(harness.sender)
    with pytest.raises(ReportRefusedError, match="8 connections already"):
        harness.inbox.connect(harness.sender)
    harness.inbox.disconnect(harness.sender)
    harness.inbox.connect(harness.sender)


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_every_message_has_one_outcome_and_all_are_known_words(messages: list[bytes]) -> None:
    harness = Harness()
    outcomes = [harness.send(raw) for raw in messages]
    counts = dict(harness.inbox.counts())
    assert counts.keys() == OUTCOMES.keys()
    assert sum(counts.values()) + len(harness.drain()) == len(messages)
    assert all(counts[outcome] == outcomes.count(outcome) for outcome in counts if outcome != "taken")


def test_threads_that_speak_at_once_lose_nothing() -> None:
    harness = Harness(per_second=1e9)

    def speak(sender: Sender) -> None:
        for number in range(500):
            harness.send(b"x" if number % 2 else b"{}", sender)

    senders = [harness.add_sender(pid) for pid in (20, 21)]
    threads = [threading.Thread(target=speak, args=(sender,)) for sender in senders for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sender in senders:
        sender.looked_up_at = NOW
    assert len(harness.inbox.drain(10_000)) == 1000
    assert dict(harness.inbox.counts())["malformed"] == 1000
