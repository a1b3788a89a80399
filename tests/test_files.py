"""Looking for files never fails, and what is hidden is not taken for absent."""

from collections.abc import Iterator
from pathlib import Path

from exporter.files import may_exist, readable_part
from tests.ordinary import hidden


def test_what_a_folder_hides_may_exist(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert may_exist(tmp_path / "there")
    assert may_exist(tmp_path / "loop"), "opening it gives the reason"
    assert not may_exist(tmp_path / "missing")
    assert not may_exist(tmp_path / "there/below a file")
    assert not may_exist(Path("a\0b"))
    with hidden(tmp_path):
        assert may_exist(tmp_path / "there")


def test_a_listing_ends_where_a_folder_goes() -> None:
    def going() -> Iterator[Path]:
        yield Path("a")
        raise FileNotFoundError

    assert list(readable_part(going())) == [Path("a")]
