"""Inbox: rate limit, replays, queue and counts, with a manual clock."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.core.model import SECOND
from exporter.training import inbox as module
from exporter.training.inbox import CONNECTIONS_EACH, Inbox, QueuedReport, Sender
from exporter.training.message import OUTCOMES, ReportRefusedError
from exporter.training.peer import Peer
from exporter.workloads import WorkloadProcess

NOW = 10_000 * SECOND


class Post:
    """An inbox with one sender."""

    def __init__(self, per_second: float = 10.0, processes: int = 4) -> None:
        self.intake = Inbox(per_second=per_second, processes=processes)
        self.now = NOW
        self.sender = self.comes(7)
        self.sender.process = WorkloadProcess(7, "job")
        self.refused: ReportRefusedError | None = None

    def comes(self, pid: int, ticks: int = 1) -> Sender:
        return self.intake.sender(Peer(pid, ticks), begun=NOW - 100 * SECOND, now=self.now)

    def says(
        self, raw: bytes | None = None, sender: Sender | None = None, *, pid: int | None = None, **said: Any
    ) -> str:
        """Send a message; returns its outcome."""
        sender = sender or self.sender
        whole = json.dumps(said).encode() if raw is None else raw
        try:
            self.intake.receive(sender, whole, pid=sender.peer.pid if pid is None else pid, now=self.now)
        except ReportRefusedError as err:
            self.refused = err
            return err.outcome
        return "taken"

    def letters(self) -> list[QueuedReport]:
        return self.intake.drain(1000)


def test_messages_of_one_process_keep_their_order() -> None:
    post = Post()
    assert [post.says(step=step) for step in range(5)] == ["taken"] * 5
    assert [letter.message.step for letter in post.letters()] == [0, 1, 2, 3, 4]
    assert post.letters() == []


def test_a_bucket_fills_at_the_rate_and_no_further() -> None:
    post = Post(per_second=2.0)
    assert [post.says() for _ in range(7)] == ["taken"] * 5 + ["too_many"] * 2
    post.now += SECOND
    assert [post.says() for _ in range(4)] == ["taken"] * 2 + ["too_many"] * 2
    post.now += 3600 * SECOND
    assert [post.says() for _ in range(7)] == ["taken"] * 5 + ["too_many"] * 2
    assert dict(post.intake.counts())["too_many"] == 6


def test_that_it_is_too_fast_is_said_once_a_second() -> None:
    post = Post(per_second=0.5)
    said = []
    for _ in range(40):
        post.now += SECOND // 10
        post.says()
        said.append(post.refused is not None and not post.refused.silent)
        post.refused = None
    assert 2 <= sum(said) <= 5


def test_a_wrong_message_costs_as_much_as_a_right_one() -> None:
    post = Post(per_second=1.0)
    assert [post.says(b"x") for _ in range(7)] == ["malformed"] * 5 + ["too_many"] * 2


def test_one_process_s_haste_is_not_another_s() -> None:
    post = Post(per_second=1.0)
    for _ in range(50):
        post.says()
    other = post.comes(8)
    assert post.says(sender=other) == "taken"


def test_a_message_of_another_process_is_not_this_one_s() -> None:
    post = Post()
    assert post.says(pid=8) == "other_process"
    assert post.letters() == []
    with pytest.raises(ReportRefusedError, match="after a fork"):
        post.intake.receive(post.sender, b"{}", pid=None, now=post.now)


def test_a_message_that_is_too_long_is_not_read() -> None:
    assert Post().says(b"{" + b" " * 5000) == "too_large"
    assert Post().says(b"{" + b" " * 4094 + b"}") == "taken"


def test_an_interval_counts_once_also_over_a_new_connection() -> None:
    post = Post()
    at = post.now - SECOND
    assert post.says(at=at, seconds=5, tokens=1) == "taken"
    assert post.says(at=at, seconds=5, tokens=1) == "replayed"
    assert post.says(sender=post.comes(7), at=at, seconds=5, tokens=1) == "replayed"
    assert post.says(at=at, seconds=0.5, tokens=1) == "replayed"
    assert post.says(at=at + SECOND, seconds=1, tokens=1) == "taken"


def test_a_pid_used_again_has_a_past_of_its_own() -> None:
    post = Post()
    assert post.says(seconds=5) == "taken"
    assert post.comes(7, ticks=2) is not post.sender
    assert post.says(sender=post.comes(7, ticks=2), seconds=5) == "taken"


def test_an_event_does_not_hide_the_interval_around_it() -> None:
    post = Post()
    assert post.says(at=post.now, phase="checkpoint") == "taken"
    assert post.says(at=post.now, seconds=5, tokens=1) == "taken"


def test_the_same_event_again_is_a_replay_and_one_without_a_time_is_another() -> None:
    post = Post()
    event: dict[str, Any] = {"at": post.now, "checkpoints": 1}
    assert [post.says(**event), post.says(**event)] == ["taken", "replayed"]
    assert [post.says(checkpoints=1), post.says(checkpoints=1)] == ["taken", "taken"]


def test_what_is_refused_leaves_no_trace_in_the_sender_s_past() -> None:
    post = Post()
    assert post.says(at=post.now + 5 * SECOND, seconds=5) == "future"
    assert post.says(seconds=4000) == "before_start"
    assert post.says(seconds=5) == "taken"


def test_letters_of_whom_nobody_has_asked_about_wait_and_the_others_do_not() -> None:
    post = Post()
    new = post.comes(8)
    for step in range(3):
        post.says(sender=new, step=step)
        post.says(step=step)
    assert [letter.message.step for letter in post.letters()] == [0, 1, 2]
    assert post.letters() == []
    new.process = WorkloadProcess(8, "job")
    assert [letter.message.step for letter in post.letters()] == [0, 1, 2]


def test_processes_made_without_end_keep_nobody_s_words_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes can be started faster than they are looked up: their messages may use half of the queue."""
    monkeypatch.setattr(module, "MOST_WAITING", 8)
    monkeypatch.setattr(module, "MOST_UNMET", 4)
    post = Post()
    new = [post.comes(pid) for pid in range(100, 106)]
    assert [post.says(sender=sender) for sender in new] == ["taken"] * 4 + ["busy"] * 2
    assert [post.says(step=step) for step in range(5)] == ["taken"] * 4 + ["busy"]
    assert [letter.message.step for letter in post.intake.drain(3)] == [0, 1, 2]
    assert [letter.message.step for letter in post.intake.drain(3)] == [3]
    new[1].looked_up_at = post.now
    assert [letter.sender for letter in post.letters()] == [new[1]]


def test_a_stranger_is_told_at_once_but_first_what_is_wrong_with_the_message() -> None:
    post = Post()
    stranger = post.comes(8)
    stranger.looked_up_at = post.now
    assert post.says(sender=stranger) == "unknown_process"
    assert "process 8 belongs to no job" in str(post.refused)
    assert post.says(b"x", stranger) == "malformed"


def test_a_queue_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    post = Post()
    assert [post.says() for _ in range(3)] == ["taken", "taken", "busy"]
    assert len(post.intake.drain(1)) == 1
    assert post.says() == "taken"


def test_those_that_are_gone_make_room_for_the_new_and_those_that_are_here_stay() -> None:
    post = Post(processes=2)
    post.intake.connect(post.sender)
    gone = post.comes(8)
    post.says(sender=gone)
    others = [post.comes(pid) for pid in range(100, 107)]
    assert post.comes(7) is post.sender
    assert post.comes(8) is not gone, "it was the first to speak of those that have gone"
    assert post.comes(106) is others[-1]
    assert [letter.sender for letter in post.letters()] == [gone], "nothing waits for ever"
    assert gone.unidentified


def test_connections_of_one_process_are_few() -> None:
    post = Post()
    for _ in range(CONNECTIONS_EACH):
        post.intake.connect(post.sender)
    with pytest.raises(ReportRefusedError, match="8 connections already"):
        post.intake.connect(post.sender)
    post.intake.disconnect(post.sender)
    post.intake.connect(post.sender)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=20))
def test_every_message_has_one_outcome_and_all_are_known_words(messages: list[bytes]) -> None:
    post = Post()
    outcomes = [post.says(raw) for raw in messages]
    counts = dict(post.intake.counts())
    assert counts.keys() == OUTCOMES.keys()
    assert sum(counts.values()) + len(post.letters()) == len(messages)
    assert all(counts[outcome] == outcomes.count(outcome) for outcome in counts if outcome != "taken")


def test_threads_that_speak_at_once_lose_nothing() -> None:
    post = Post(per_second=1e9)

    def speak(sender: Sender) -> None:
        for number in range(500):
            post.says(b"x" if number % 2 else b"{}", sender)

    senders = [post.comes(pid) for pid in (20, 21)]
    threads = [threading.Thread(target=speak, args=(sender,)) for sender in senders for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sender in senders:
        sender.looked_up_at = NOW
    assert len(post.intake.drain(10_000)) == 1000
    assert dict(post.intake.counts())["malformed"] == 1000
