"""Output files: written atomically, and not through a symbolic link of another user."""

import os
from pathlib import Path

import pytest

from exporter.files import OutputError, write_output


def test_a_file_is_there_whole_and_has_the_usual_rights(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_output(tmp_path / "receipt", b"a")
    finally:
        os.umask(before)
    assert (tmp_path / "receipt").read_bytes() == b"a"
    assert (tmp_path / "receipt").stat().st_mode & 0o777 == 0o644


def test_it_takes_the_place_of_an_older_one_which_a_reader_keeps_whole(tmp_path: Path) -> None:
    (tmp_path / "receipt").write_text("old")
    with (tmp_path / "receipt").open() as reader:
        write_output(tmp_path / "receipt", b"new")
        assert reader.read() == "old"
    assert (tmp_path / "receipt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["receipt"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("secret")
    (tmp_path / "receipt").symlink_to(tmp_path / "shadow")
    with pytest.raises(OutputError, match="is no plain file and is left as it is"):
        write_output(tmp_path / "receipt", b"a")
    assert (tmp_path / "shadow").read_text() == "secret"
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(OutputError, match="no plain file"):
        write_output(tmp_path / "dangling", b"a")
    assert not (tmp_path / "nothing").exists()


def test_a_link_that_is_made_meanwhile_is_replaced_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shadow").write_text("secret")
    monkeypatch.setattr("exporter.files.os.path.lexists", lambda _: False)
    (tmp_path / "receipt").symlink_to(tmp_path / "shadow")
    write_output(tmp_path / "receipt", b"a")
    assert (tmp_path / "shadow").read_text() == "secret"
    assert (tmp_path / "receipt").read_bytes() == b"a"


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_what_is_no_file_is_left(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="no plain file"):
        write_output(tmp_path / name, b"a")


def test_where_it_cannot_be_written_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="absent/receipt: cannot be written: No such file"):
        write_output(tmp_path / "absent" / "receipt", b"a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("exporter.files.os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_output(tmp_path / "receipt", b"a")
    assert list(tmp_path.iterdir()) == []
