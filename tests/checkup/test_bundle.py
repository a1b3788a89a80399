"""Tests the archive of install-check: its mode, its atomic writing, its manifest."""

import gzip
import tarfile
from pathlib import Path

import pytest

from exporter.checkup.bundle import (
    BundleError,
    BundleFile,
    OmittedFile,
    Redaction,
    compressed,
    describe_files,
    refuse_to_overwrite,
    text_file,
    without_serials,
    write_bundle,
)

PIECES = (BundleFile("a.txt", "because of a", b"hello"), BundleFile("b.gz", "because of b", compressed(b"world")))
MISSING = (OmittedFile("c.txt", "there is none"),)


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive:
            assert (entry.mode, entry.uid, entry.uname, entry.isfile()) == (0o600, 0, "", True)
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name] = file.read()
    return found


def test_all_pieces_in_a_folder_of_the_archive_s_name_and_a_manifest_of_them(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    write_bundle(path, PIECES, MISSING, head="one thing does not work")
    found = unpacked(path)
    assert list(found) == ["report/MANIFEST.txt", "report/a.txt", "report/b.gz"]
    assert gzip.decompress(found["report/b.gz"]) == b"world"
    manifest = found["report/MANIFEST.txt"].decode()
    assert manifest.startswith("one thing does not work\n")
    for name, why in (("a.txt", "because of a"), ("b.gz", "because of b"), ("c.txt", "there is none")):
        assert [line for line in manifest.splitlines() if name in line and why in line], manifest
    assert "c.txt" in describe_files(PIECES, MISSING)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_there_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_bytes(b"mine")
    path.chmod(0o644)
    with pytest.raises(BundleError, match="--force"):
        refuse_to_overwrite(path, force=False)
    with pytest.raises(BundleError, match="File exists"):
        write_bundle(path, PIECES, (), head="")
    assert path.read_bytes() == b"mine"
    refuse_to_overwrite(path, force=True)
    write_bundle(path, PIECES, (), head="", force=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "report/a.txt" in unpacked(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_refused_before_anything_is_gathered(tmp_path: Path) -> None:
    path = tmp_path / "absent/report.tar.gz"
    with pytest.raises(BundleError, match="may not write in"):
        refuse_to_overwrite(path, force=False)
    with pytest.raises(BundleError, match="No such file"):
        write_bundle(path, PIECES, (), head="")


def test_what_breaks_on_the_way_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = BundleFile("broken", "its content is none", content="text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_bundle(tmp_path / "report.tar.gz", (*PIECES, broken), (), head="")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_archive_s_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "report.tar.gz").symlink_to(tmp_path / "victim")
    write_bundle(tmp_path / "report.tar.gz", PIECES, (), head="", force=True)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_text_goes_through_the_redaction() -> None:
    piece = text_file("a", "b", "password=hunter2", Redaction())
    assert piece.content == b"password=***"


def test_nvidia_smi_without_serial_numbers_and_programs() -> None:
    text = """\
    Product Name                          : NVIDIA H100 80GB HBM3
    Serial Number                         : 1234567890
    GPU UUID                              : GPU-1
        Chassis Serial Number             : 99887
            Name                          : /home/ada/bin/train
"""
    found = without_serials(text)
    assert not [word for word in ("1234567890", "99887", "ada") if word in found]
    assert "NVIDIA H100" in found
    assert "GPU-1" in found
