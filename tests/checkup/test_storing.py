"""Tests the check of the history store, which does not open it."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.checkup.base import FAIL, INFO, OK, WARN, CheckContext, Finding
from exporter.checkup.files import check_store, file_system
from exporter.config import Config, HistorySettings
from tests.ordinary import hidden

EXT4 = "36 35 98:0 / / rw,noatime master:1 - ext4 /dev/root rw\n"


def looked(tmp_path: Path, store: Path | None, mounts: str = EXT4, **history: Any) -> dict[str, Finding]:
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    config = Config(history=HistorySettings(**{"max_mebibytes": 1.0} | history))
    found = list(check_store(CheckContext(config=config, environ={}, proc=tmp_path / "proc", store=store), ()))
    assert all(each.area == "files" for each in found)
    return {each.check: each for each in found}


def test_a_store_that_can_be_made_is_well_and_is_not_made(tmp_path: Path) -> None:
    found = looked(tmp_path, tmp_path / "deep/er/history.db")
    assert {check: each.verdict for check, each in found.items()} == {
        "store": OK,
        "store's disk": OK,
        "store's size": OK,
    }
    assert "is on ext4" in found["store's disk"].message
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("file", "verdict", "said"), [("", INFO, "history.file is empty"), ("auto", WARN, "no STATE_DIRECTORY of systemd")]
)
def test_without_a_store_it_says_why(tmp_path: Path, file: str, verdict: object, said: str) -> None:
    (found,) = looked(tmp_path, None, file=file).values()
    assert found.verdict is verdict
    assert said in found.message


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "cifs"])
def test_a_file_system_of_many_machines_is_warned_of(tmp_path: Path, kind: str) -> None:
    found = looked(tmp_path, tmp_path / "history.db", f"{EXT4}40 36 0:50 / {tmp_path} rw - {kind} server:/a rw\n")
    assert found["store's disk"].verdict is WARN
    assert f"is on {kind}: SQLite's log needs memory" in found["store's disk"].message


@pytest.mark.parametrize(("kind", "said"), [("tmpfs", "next boot"), ("overlay", "is lost with the container")])
def test_what_is_forgotten_anyway_is_warned_of(tmp_path: Path, kind: str, said: str) -> None:
    found = looked(tmp_path, tmp_path / "history.db", f"40 36 0:50 / / rw - {kind} none rw\n")
    assert (found["store's disk"].verdict, said in found["store's disk"].message) == (WARN, True)


def test_of_several_mounts_the_innermost_and_latest_counts(tmp_path: Path) -> None:
    (tmp_path / "a b/c").mkdir(parents=True)
    escaped = f"{tmp_path}/a b".replace(" ", "\\040")
    lines = [
        f"41 36 0:51 / {escaped} rw - nfs4 s:/ rw",
        f"42 41 0:52 / {escaped} rw shared:7 - xfs /dev/a rw",
        "36 35 98:0 / / rw - ext4 /dev/root rw",
        f"43 36 0:53 / {tmp_path}/a rw - tmpfs none rw",
        "broken",
    ]
    mounts = tmp_path / "mountinfo"
    mounts.write_text("\n".join(lines))
    assert file_system(mounts, tmp_path / "a b/c") == "xfs"
    assert file_system(mounts, tmp_path) == "ext4"
    assert file_system(tmp_path / "none", tmp_path) == ""


def test_this_machines_own_mounts_can_be_read() -> None:
    assert file_system(Path("/proc/self/mountinfo"), Path("/proc")) == "proc"


def test_a_store_in_use_tells_its_size_and_age(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE a AS SELECT zeroblob(3000000) AS b")
        db.commit()
        os.utime(path, (0, 0))
        found = looked(tmp_path, path, max_mebibytes=9)
        assert found["checkpoint"].verdict is OK
        assert "d " not in found["checkpoint"].message, "the log was written just now, whatever the file itself says"
        assert found["store's size"].message.startswith("3 MiB, 9 at most")
    db.close()
    os.utime(path, (0, 0))
    assert " d " in looked(tmp_path, path)["checkpoint"].message


def test_a_disk_without_room_is_warned_of(tmp_path: Path) -> None:
    found = looked(tmp_path, tmp_path / "history.db", max_mebibytes=1e6)["store's size"]
    assert found.verdict is WARN
    assert "lower history.max_mebibytes" in found.do


def _text(path: Path) -> None:
    path.write_text("GPUs once seen\n")


@pytest.mark.parametrize(
    ("make", "verdict"), [(_text, FAIL), (Path.touch, OK), (Path.mkdir, FAIL)], ids=["text", "empty", "folder"]
)
def test_what_is_no_store_is_in_the_way(tmp_path: Path, make: Callable[[Path], None], verdict: object) -> None:
    make(tmp_path / "history.db")
    assert looked(tmp_path, tmp_path / "history.db")["checkpoint"].verdict is verdict


def test_what_is_in_a_folder_that_this_user_may_not_enter_is_not_said_to_be_absent(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    context = CheckContext(config=Config(), environ={}, proc=tmp_path, store=tmp_path / "state/deep/history.db")
    with hidden(tmp_path):
        (found,) = check_store(context, ())
    assert (found.verdict, "this user may not write in" in found.message) == (FAIL, True)
