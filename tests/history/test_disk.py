"""The fault-injecting disk library passes calls through without rules, and applies exactly the rules given."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.history.disk.build import Disk
from tests.history.journal import SECTOR, Entry, PowerCut, entries

_TRY = """
import errno, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
def tried(call):
    try:
        return str(call())
    except OSError as err:
        return errno.errorcode[err.errno]
print(tried(lambda: os.pwrite(file, b"x" * 1000, 0)), tried(lambda: os.pwrite(file, b"y" * 1000, 0)),
      tried(lambda: os.fsync(file)), tried(lambda: os.ftruncate(file, 10)), tried(lambda: len(os.pread(file, 5, 0))),
      tried(lambda: os.unlink(sys.argv[1])))
"""
_STORM = """
import os, random, sys
folder, chance = sys.argv[1], random.Random(int(sys.argv[2]))
files = {}
for number in range(400):
    name = f"{folder}/{chance.randrange(4)}"
    act = chance.choice(("pwrite", "pwrite", "pwrite", "write", "append", "truncate", "sync", "unlink", "rename"))
    if act in ("unlink", "rename") and not os.path.exists(name):
        continue
    if act == "unlink":
        os.unlink(name)
    elif act == "rename":
        os.rename(name, f"{folder}/{chance.randrange(4)}")
    else:
        file = os.open(name, os.O_RDWR | os.O_CREAT | (os.O_APPEND if act == "append" else 0), 0o600)
        data = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 3000)))
        if act == "pwrite":
            os.pwrite(file, data, chance.randrange(5000))
        elif act in ("write", "append"):
            os.lseek(file, chance.randrange(4000), os.SEEK_SET)
            os.write(file, data)
        elif act == "truncate":
            os.ftruncate(file, chance.randrange(6000))
        else:
            os.fsync(file)
        os.close(file)
"""


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def said(disk: Disk, name: str = "file", *, folder: Path | None = None) -> list[str]:
    """Return the results of two writes, a sync, a truncation, a read and a removal."""
    done = subprocess.run(
        [sys.executable, "-c", _TRY, f"{(folder or disk.folder) / name}"],
        env=os.environ | disk.recorded, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


WELL = ["1000", "1000", "None", "None", "5", "None"]


def test_without_rules_it_is_the_kernels_disk(disk: Disk) -> None:
    assert said(disk) == WELL


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        ("write * 1 0 ENOSPC", ["ENOSPC", "ENOSPC", *WELL[2:]]),
        ("write file 2 1 EIO", ["1000", "EIO", *WELL[2:]]),
        ("write other 1 0 EIO", WELL),
        ("write * 1 1 short 7", ["7", *WELL[1:]]),
        ("sync * 1 0 EIO", [*WELL[:2], "EIO", *WELL[3:]]),
        ("truncate * 1 0 EROFS", [*WELL[:3], "EROFS", *WELL[4:]]),
        ("read * 1 0 EIO", [*WELL[:4], "EIO", WELL[5]]),
        ("unlink * 1 0 EROFS", [*WELL[:5], "EROFS"]),
        ("* * 3 2 EROFS", [WELL[0], "EROFS", "EROFS", *WELL[3:]]),
        ("write * 1 1 slow 30", WELL),
    ],
)
def test_a_rule_is_kept_to_the_call(disk: Disk, rule: str, got: list[str]) -> None:
    disk.fails(rule)
    assert said(disk) == got


def test_files_elsewhere_are_left_alone(disk: Disk, tmp_path: Path) -> None:
    disk.fails("* * 1 0 EIO")
    other = tmp_path / "disk-of-others"
    other.mkdir()
    assert said(disk, folder=other) == WELL


@pytest.mark.slow
def test_one_that_hangs_goes_on_when_it_is_well_again(disk: Disk) -> None:
    disk.fails("sync * 1 0 hang")
    words = [sys.executable, "-c", _TRY, f"{disk.folder / 'file'}"]
    with subprocess.Popen(words, env=os.environ | disk.env, stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        disk.fails()
        assert process.communicate()[0].split() == WELL


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_journal_tells_all_that_is_on_the_disk(disk: Disk, seed: int) -> None:
    """Replaying the journal without a power cut gives the kernel's own files."""
    subprocess.run(
        [sys.executable, "-c", _STORM, f"{disk.folder}", f"{seed}"], env=os.environ | disk.recorded, check=True
    )
    there = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in disk.folder.iterdir()}
    told = PowerCut(entries(disk.journal), "disk").left(None)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in told.items()} == there
    assert there


def wrote(data: bytes, offset: int = 0, name: str = "f") -> Entry:
    return Entry("W", name, offset, data)


def did(kind: str, name: str = "f") -> Entry:
    return Entry(kind, name, 0, b"")


def left(told: list[Entry], cuts: int = 60) -> set[tuple[tuple[str, bytes], ...]]:
    return {tuple(sorted(PowerCut(told, "disk").left(seed).items())) for seed in range(cuts)}


def test_what_was_synced_is_there_whatever_the_coin_says() -> None:
    assert left([did("C"), wrote(b"abc"), did("S")]) == {(("f", b"abc"),)}


def test_what_was_not_may_be_there_sector_by_sector() -> None:
    old, new = b"o" * 3 * SECTOR, b"n" * 3 * SECTOR
    found = {dict(each)["f"] for each in left([did("C"), wrote(old), did("S"), wrote(new)])}
    assert len(found) == 8
    assert {content[SECTOR : 2 * SECTOR] for content in found} == {b"o" * SECTOR, b"n" * SECTOR}


def test_names_are_sure_once_the_folder_is_synced_or_the_file_itself() -> None:
    assert left([did("C")]) == {(), (("f", b""),)}
    assert left([did("C"), Entry("S", "disk", 0, b"")]) == {(("f", b""),)}
    gone = left([did("C"), wrote(b"abc"), did("S"), did("U")])
    assert gone == {(), (("f", b"abc"),)}, "a removal that was not synced may be undone"


def test_a_write_is_lost_with_what_it_made_the_file_grow_by() -> None:
    found = {dict(each)["f"] for each in left([did("C"), wrote(b"a"), did("S"), wrote(b"b", offset=SECTOR)])}
    assert found == {b"a", b"a" + bytes(SECTOR - 1) + b"b"}
