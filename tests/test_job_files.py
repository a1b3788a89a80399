"""Files that a process has open: read only if it writes them. Rules for files found by path: test_log_watcher.py."""

import os
from collections import Counter
from pathlib import Path

import pytest

from exporter.job_files import FileRefusedError, FileTail, open_job_file, open_written_file
from tests.each import each


def descriptor(path: Path, flags: int) -> tuple[int, str]:
    handle = os.open(path, flags)
    return handle, f"/proc/self/fd/{handle}"


@each("flags, written", [
    (os.O_WRONLY, True), (os.O_RDWR, True), (os.O_WRONLY | os.O_APPEND, True), (os.O_RDONLY, False), (os.O_PATH, False),
])  # fmt: skip
def test_a_file_that_is_only_read_or_only_named_is_refused(flags: int, written: bool, tmp_path: Path) -> None:
    """O_PATH opens any file, without a right to read it: it proves nothing."""
    (tmp_path / "x").write_text("12")
    handle, path = descriptor(tmp_path / "x", flags)
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        if written:
            opened = open_written_file(path)
            assert os.pread(opened, 9, 0) == b"12"
            os.close(opened)
        else:
            with pytest.raises(FileRefusedError, match="not open for writing"):
                open_written_file(path)
    finally:
        os.close(handle)
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1  # nothing is left open


def test_a_descriptor_that_is_replaced_in_between_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process puts another file into its place after the first was opened."""
    (tmp_path / "x").write_text("12")
    (tmp_path / "secret").write_text("13")
    handle, path = descriptor(tmp_path / "x", os.O_WRONLY)
    other = os.open(tmp_path / "secret", os.O_WRONLY)

    def opened_and_replaced(path: str, owners: frozenset[int] | None) -> int:
        found = open_job_file(path, owners)
        os.dup2(other, handle)
        return found

    monkeypatch.setattr("exporter.job_files.open_job_file", opened_and_replaced)
    with pytest.raises(FileRefusedError) as caught:
        open_written_file(path)
    assert caught.value.kind == "not_written"
    os.close(handle)
    os.close(other)


@each("append, size, polled", [
    (append, size, polled) for append in (0, os.O_APPEND) for size in (1 << 12, 64 << 20) for polled in (False, True)
])  # fmt: skip
def test_a_file_that_is_emptied_while_it_is_written_is_read_on(
    append: int, size: int, polled: bool, tmp_path: Path
) -> None:
    """As the guide of `gpu-efficiency nccl` has it; what does not append goes on behind a hole of zeros."""
    writer = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | append)
    os.write(writer, b"the first line")
    os.truncate(tmp_path / "x", size)
    os.lseek(writer, 0, os.SEEK_END)
    os.write(writer, b"\nbefore\n")
    counts = Counter[str]()
    tail = FileTail(os.open(tmp_path / "x", os.O_RDONLY), counts, offset=size)
    assert tail.read(1 << 20).lines == (b"before",)
    os.truncate(tmp_path / "x", 0)
    if polled:
        assert tail.read(1 << 20).lines == ()
    os.write(writer, b"first\n" + b"then\n" * 3)
    lines = tail.read(1 << 20).lines
    assert lines[-3:] == (b"then",) * 3
    assert set(lines) <= {b"first", b"then"}
    os.write(writer, b"later\n")
    assert tail.read(1 << 20).lines == (b"later",)
    assert counts["log_truncated"] >= 1
    assert counts["log_too_long"] == 0
    os.close(writer)
    tail.close()


def test_a_tail_knows_what_is_unread(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"one\ntwo\n")
    tail = FileTail(os.open(tmp_path / "x", os.O_RDONLY), Counter(), offset=0, prefix="any", line_bytes=10)
    assert tail.unread() == 8
    assert tail.read(4).lines == (b"one",)
    assert tail.unread() == 4
    tail.close()
    assert tail.unread() == 0
