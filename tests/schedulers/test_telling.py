"""User names in a scheduler's word: kept, hashed or dropped."""

import logging
import os
import string
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.agent.sampler import Collector
from exporter.cli import main
from exporter.config import ConfigError, Exemption, PrivacySettings, WorkloadRule, WorkloadSettings
from exporter.core.model import SECOND, Fault, Owner, Process, Reading
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.privacy import MaskedScheduler, UserMask, open_mask
from exporter.schedulers.processes import ProcessesScheduler
from exporter.schedulers.rules import Rules
from tests.rigs import FakeScheduler, FakeSource, Rig, ladder
from tests.schedulers.test_processes import ALICE, BOB, Proc, gpu
from tests.worlds import held

KEY = b"k" * 32


def owner(user: str = "alice", scheduler: str = "slurm", **more: object) -> Owner:
    return Owner("42", scheduler, user, **more)  # type: ignore[arg-type]  # as each test names them


@pytest.fixture(name="hashed")
def _hashed() -> UserMask:
    return UserMask(KEY)


@pytest.fixture(name="dropped")
def _dropped() -> UserMask:
    return UserMask(os.urandom(32), drop=True)


# One name.


def test_the_same_person_is_the_same_hash_with_the_same_key_and_another_with_another(hashed: UserMask) -> None:
    told = hashed.user("alice")
    assert told == UserMask(KEY).user("alice") != UserMask(b"other" * 8).user("alice")
    assert (len(told), set(told) <= set("0123456789abcdef")) == (12, True)
    assert told != hashed.user("bob")


def test_who_has_no_name_gets_none(hashed: UserMask, dropped: UserMask) -> None:
    assert (hashed.user(""), dropped.user(""), dropped.user("alice")) == ("", "", "")
    assert hashed.owner(owner("")) == owner("")


@given(st.text(string.ascii_letters + string.digits + "._-@\\", min_size=1))
def test_no_name_is_left_in_what_is_told_of_its_owner(user: str) -> None:
    mask = UserMask(KEY)
    said = Owner(
        f"{user}/train.service", "processes", user, user, "p", user, f"jupyter-{user}", f"{user}-run", comment=user
    )
    told = mask.owner(said)
    assert told.user == mask.user(user)
    wanted = mask.user(user)
    assert told.job_id == f"{wanted}/train.service"
    assert (told.account, told.namespace, told.comment) == (wanted, wanted, wanted)
    assert told.partition == "p"


# Whole owners.


def test_a_job_s_number_is_never_touched_though_a_user_is_called_so(hashed: UserMask) -> None:
    told = hashed.owner(Owner("1000", "slurm", "1000", partition="1000", name="run 1000", array_id="1000"))
    assert (told.job_id, told.partition, told.array_id) == ("1000", "1000", "1000")
    assert told.name == f"run {hashed.user('1000')}"


@pytest.mark.parametrize(
    ("unit", "told"),
    [
        ("jupyter-alice.service", "jupyter-{}.service"), ("user@1001.service", "user@{}.service"),
        ("alice2.service", "alice2.service"), ("session-3.scope", "session-3.scope"), ("pod-1001", "pod-1001"),
    ],
)  # fmt: skip
def test_a_unit_named_after_its_user(hashed: UserMask, unit: str, told: str) -> None:
    found = hashed.owner(Owner(f"alice/{unit}", "processes", "alice", name=unit))
    mine = hashed.user("alice")
    assert (found.name, found.job_id) == (told.format(mine), f"{mine}/{told.format(mine)}")


def test_a_notebook_s_pod_is_named_after_its_user(hashed: UserMask) -> None:
    said = Owner(
        "hub/notebook/jupyter-alice", "kubernetes", "alice", namespace="hub", pod="jupyter-alice", name="jupyter-alice"
    )
    told = hashed.owner(said)
    mine = hashed.user("alice")
    assert (told.job_id, told.pod, told.namespace) == (f"hub/notebook/jupyter-{mine}", f"jupyter-{mine}", "hub")


def test_dropped_is_not_even_a_hash_but_two_people_s_jobs_stay_two(dropped: UserMask) -> None:
    alice, bob = (
        dropped.owner(Owner(f"{user}/no-unit", "processes", user, name=f"{user} x")) for user in ("alice", "bob")
    )
    assert (alice.user, alice.name) == ("", "user x")
    assert alice.job_id != bob.job_id
    assert "alice" not in repr(alice)
    again = UserMask(os.urandom(32), drop=True).owner(Owner("alice/no-unit", "processes", "alice"))
    assert again.job_id != alice.job_id  # valid for one run of the daemon, so users cannot be tracked


def test_the_user_s_name_in_labels_that_are_exported_is_masked(hashed: UserMask, dropped: UserMask) -> None:
    said = owner(labels=(("owner", "alice"), ("app", "llama")))
    assert hashed.owner(said).labels == (("owner", hashed.user("alice")), ("app", "llama"))
    assert dropped.owner(said).labels == (("owner", "user"), ("app", "llama"))


def test_where_a_pod_is_stays_known_to_those_who_write_to_it_and_to_nobody_else(dropped: UserMask) -> None:
    pods = [Owner(f"{user}/pod/p", "kubernetes", user, namespace=user, pod="p") for user in ("alice", "bob")]
    words = [SchedulerState((held(owner=each),), 0) for each in pods]
    masked = [dropped.owner(each) for each in pods]
    assert [dropped.pod(each) for each in masked] == [("", ""), ("", "")], "before they hold a GPU"
    for word in words:
        MaskedScheduler(Fixed(word), dropped).poll(0, (), ())
    assert masked[0].namespace == masked[1].namespace == "user"
    assert [dropped.pod(each) for each in masked] == [("alice", "p"), ("bob", "p")]
    for n in range(1023):
        MaskedScheduler(Fixed(SchedulerState((held(owner=owner(pod=f"{n}")), *words[0].allocations), 0)), dropped).poll(
            0, (), ()
        )
    assert [dropped.pod(each) for each in masked] == [("alice", "p"), ("", "")], "who holds a GPU is not forgotten"


def test_the_pod_of_an_owner_without_a_user_is_known_also_after_a_restart(hashed: UserMask, dropped: UserMask) -> None:
    """Unless names are dropped: then the record of a masked owner looks the same."""
    pod = Owner("ml/pod/p", "kubernetes", namespace="ml", pod="p")
    assert (hashed.pod(hashed.owner(pod)), dropped.pod(dropped.owner(pod))) == (("ml", "p"), ("", ""))
    assert hashed.pod(hashed.owner(replace(pod, user="alice"))) == ("", "")


def test_a_pod_whose_user_an_earlier_run_dropped_is_not_taken_for_one_without_a_user(hashed: UserMask) -> None:
    """With `hash` since the restart, a record of the run before has no user, and `user` in its pod's name."""
    earlier = UserMask(KEY, drop=True).owner(
        Owner("ml/pod/jupyter-alice", "kubernetes", "alice", namespace="ml", pod="jupyter-alice")
    )
    assert (earlier.user, earlier.pod) == ("", "jupyter-user")
    assert hashed.pod(earlier) == ("", "")
    true = Owner("ml/pod/user-service", "kubernetes", namespace="ml", pod="user-service")
    MaskedScheduler(Fixed(SchedulerState((held(owner=true),), 0)), hashed).poll(0, (), ())
    assert hashed.pod(true) == ("ml", "user-service"), "seen by this run"


# Texts.


def test_in_texts_the_names_of_those_who_were_seen_are_told_likewise(hashed: UserMask, dropped: UserMask) -> None:
    words = "log_owner /home/alice/run.out: alice's, not alice2's or malice's"
    assert hashed.text(words) == words
    for mask, name in ((hashed, hashed.user("alice")), (dropped, "user")):
        mask.owner(owner("alice"))
        assert mask.text(words) == f"log_owner /home/{name}/run.out: {name}'s, not alice2's or malice's"


def test_a_number_and_root_stand_in_texts_for_other_things(hashed: UserMask) -> None:
    hashed.owner(owner("1000"))
    hashed.owner(owner("root"))
    assert hashed.text("run as root: 1000 lines") == "run as root: 1000 lines"


def test_of_too_many_names_the_first_are_forgotten_and_no_more_are_kept(hashed: UserMask) -> None:
    for n in range(1100):
        hashed.owner(owner(f"user{n}x"))
    assert hashed.text("user0x") == "user0x"
    assert hashed.text("user1099x") == hashed.user("user1099x")


def test_the_name_of_one_who_still_runs_jobs_is_not_forgotten(hashed: UserMask) -> None:
    for n in range(1024):
        hashed.owner(owner("alice"))
        hashed.owner(owner(f"user{n}x"))
    assert hashed.text("alice") == hashed.user("alice")


def test_a_name_that_comes_while_another_thread_masks_a_text_is_masked_from_then_on(hashed: UserMask) -> None:
    hashed.owner(owner("bob"))
    building, added = threading.Event(), threading.Event()

    class Slow(dict[str, None]):
        """Names that are slow to be read."""

        def __iter__(self) -> Iterator[str]:
            names = list(super().__iter__())
            building.set()
            added.wait(0.2)
            return iter(names)

    hashed._names = Slow(hashed._names)
    logging_thread = threading.Thread(target=hashed.text, args=("bob is here",))
    logging_thread.start()
    assert building.wait(60)
    hashed.owner(owner("alice"))
    added.set()
    logging_thread.join()
    assert "alice" not in hashed.text("alice")


# A scheduler's word.


class Fixed(FakeScheduler):
    """Returns one word, and has set members."""

    def __init__(self, word: SchedulerState) -> None:
        super().__init__(*word.allocations)
        self.word = word

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        return {pid: one for pid, one in self.word.members.items() if pid in pids}


ALICES = Owner("alice/a.service", "processes", "alice")


def test_allocations_and_members_name_one_job_in_one_way(hashed: UserMask) -> None:
    others = {8: Member("unknown/x"), 9: Member("hub/notebook/jupyter-alice")}
    word = SchedulerState((held(owner=ALICES),), 0, members={7: Member("alice/a.service", "3"), **others})
    telling = MaskedScheduler(Fixed(word), hashed)
    said = telling.poll(0, (), (Reading("GPU-0", 0, SECOND, processes=tuple(map(Process, (7, 8, 9)))),))
    assert said is not None
    job = f"{hashed.user('alice')}/a.service"
    assert [one.owner.job_id for one in said.allocations] == [job]
    nobody_s = Member(f"hub/notebook/jupyter-{hashed.user('alice')}")
    assert said.members == {7: Member(job, "3"), 8: Member("unknown/x"), 9: nobody_s}
    assert telling.members([7, 8, 9]) == said.members
    assert (telling.name, telling.node) == ("fake", "fake")


def test_rules_and_exemptions_speak_of_true_names(hashed: UserMask) -> None:
    telling = MaskedScheduler(Fixed(SchedulerState((held(owner=ALICES),), 0)), hashed)
    rules = Rules(
        WorkloadSettings((WorkloadRule(team="hep", user="alice"),)),
        [Exemption("x", "r", date(2999, 1, 1), user="alice")],
    )
    telling.update(rules)
    said = telling.poll(0, (), ())
    assert said is not None
    assert (said.allocations[0].owner.team, said.allocations[0].owner.exemption) == ("hep", "x")
    assert said.allocations[0].owner.user == hashed.user("alice")


def test_nothing_that_comes_home_has_a_name(hashed: UserMask) -> None:
    """Readings, faults, reasons: all that is recorded, logged and served is made of these."""
    source = FakeSource()
    source.signals_of = {"GPU-0": {"processes": (Process(5, name="/home/alice/venv/bin/python"),)}}
    source.faults = (Fault("x", "cannot read /home/alice/x\udcff, http://u:secret@h/"),)
    scheduler = Fixed(SchedulerState((held(owner=ALICES, start=1000.0),), 0, members={5: Member("alice/a.service")}))
    hands = Collector(ladder(source), scheduler, mask=hashed)
    try:
        hands.collect_now(1)
        hands.request(10**9, resync=False)
        answer = hands.result(60)
        assert answer is not None
        scheduler.trouble = SchedulerError("alice has it")
        hands.request(2 * 10**9, resync=False)
        failed = hands.result(60)
    finally:
        hands.close()
    for brought in (answer, failed):
        assert brought is not None
        assert "alice" not in repr(brought), repr(brought)
        assert "secret" not in repr(brought)
    assert rf"/home/{hashed.user('alice')}/x\udcff, http://***@h/" in answer.faults[0].message
    assert answer.batch is not None
    assert [p.job_id for p in answer.batch.readings[0].processes or ()] == [f"{hashed.user('alice')}/a.service"]


def test_without_a_mask_all_is_as_it_was(rigs: Callable[..., Rig]) -> None:
    rig = rigs(FakeScheduler(held(owner=ALICES, start=1000.0)))
    rig.tick(2)
    assert set(rig.ledger.jobs) == {"alice/a.service"}


def test_with_names_dropped_people_who_share_a_gpu_share_no_job(tmp_path: Path, dropped: UserMask) -> None:
    """Both run a unit of the same name; one's process must never be booked for the other."""
    proc = Proc(tmp_path)
    users = {ALICE: "alice", BOB: "bob"}
    scheduler = ProcessesScheduler(proc=tmp_path, user_of=lambda uid: users[uid], suspended=lambda: 0)
    telling = MaskedScheduler(scheduler, dropped)
    word = telling.poll(100 * SECOND, (), [gpu(0, proc.add(10), proc.add(11, uid=BOB))])
    assert word is not None
    jobs = {one.owner.job_id for one in word.allocations}
    assert len(jobs) == 2
    assert {one.owner.user for one in word.allocations} == {""}
    assert {member.job_id for member in word.members.values()} == jobs
    assert telling.members([10, 11]) == word.members
    assert not any(name in repr(word) for name in users.values())


# The key.


def test_keep_needs_no_secret_and_drop_none_either(tmp_path: Path) -> None:
    assert open_mask(PrivacySettings()) is None
    mask = open_mask(PrivacySettings("drop"))
    assert mask is not None
    assert mask.user("alice") == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        open_mask(PrivacySettings("drop", f"{tmp_path}/none"))


def test_dropped_with_a_secret_a_job_has_one_id_on_all_its_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    job = Owner("ml/job/alice-train", "kubernetes", "alice", namespace="ml", name="alice-train")
    ids: dict[str, set[str]] = {}
    for key_file in ("", f"{tmp_path}/key"):
        caplog.clear()
        for _ in range(2):
            mask = open_mask(PrivacySettings("drop", key_file))
            assert mask is not None
            scheduler = FakeScheduler()
            scheduler.name = "kubernetes"
            MaskedScheduler(scheduler, mask)
            ids.setdefault(key_file, set()).add(mask.owner(job).job_id)
            assert mask.owner(job).name == "user-train"
        assert ("another id on each node" in caplog.text) is (not key_file)
    assert [len(each) for each in ids.values()] == [2, 1]
    assert not any("alice" in each for each in ids[f"{tmp_path}/key"])


def test_the_secret_is_read_from_its_file_and_white_space_around_it_is_none_of_it(tmp_path: Path) -> None:
    told = []
    for number, content in enumerate((KEY, KEY + b"\n", b"x" * 100, b"x" * 101)):
        path = tmp_path / f"key{number}"
        path.write_bytes(content)
        path.chmod(0o400)
        mask = open_mask(PrivacySettings("hash", f"{path}"))
        assert mask is not None
        told.append(mask.user("alice"))
    assert told[0] == told[1] == UserMask(KEY).user("alice")
    assert len({*told}) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: No such file"), (b"", "holds 0 bytes"), (b" short \n", "holds 5 bytes")],
)
def test_a_secret_that_cannot_be_used_is_refused_with_the_cure(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as told:
        open_mask(PrivacySettings("hash", f"{path}"))
    assert f"privacy.key_file: {path}: {words}" in str(told.value)
    assert "openssl rand -hex 32" in str(told.value)
    assert "short" not in str(told.value)


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o400, False), (0o440, False), (0o600, False), (0o644, True), (0o404, True)]
)
def test_a_secret_that_all_can_read_is_warned_of(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        open_mask(PrivacySettings("hash", f"{path}"))
    assert any("chmod 0400" in line for line in caplog.messages) is warned
    assert KEY.decode() not in caplog.text


def test_check_config_tries_the_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[privacy]\nusers = "hash"\nkey_file = "{tmp_path}/key"\n')
    assert main(["check-config", "--config", f"{file}"]) == 2
    assert f"privacy.key_file: {tmp_path}/key: cannot be read" in capsys.readouterr().err
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o400)
    assert main(["check-config", "--config", f"{file}"]) == 0
    assert KEY.decode() not in capsys.readouterr().out
