"""The file of carbon intensities: its format, its bounds, and what a reload makes of it."""

from argparse import Namespace
from pathlib import Path

import pytest

from exporter import carbon
from exporter.carbon import read_hours
from exporter.cli.wiring import ConfigReloader, read_config
from exporter.config import Config, ConfigError
from exporter.core.prices import CarbonIntensity
from exporter.core.snapshot import ReloadStatus
from tests.each import each

HOUR = 1_767_225_600 // 3600
"""2026-01-01 00:00 UTC."""
HEAD = "Datetime (UTC),Zone id,Carbon intensity gCO2eq/kWh (direct),Carbon intensity gCO2eq/kWh (Life cycle)\n"
TWO = HEAD + "2026-01-01 00:00:00,SE,1.5,20\n2026-01-01 01:00:00,SE,2.5,30\n"


def read(path: Path) -> Config:
    return read_config(Namespace(config=path))


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "hours.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@each(
    "text, column, hours",
    [
        (TWO, "direct", {HOUR: 1.5, HOUR + 1: 2.5}),
        (TWO, "life_cycle", {HOUR: 20, HOUR + 1: 30}),
        ("\ufeff" + TWO.replace("\n", "\r\n"), "direct", {HOUR: 1.5, HOUR + 1: 2.5}),
        (TWO + TWO.replace("2026", "2027"), "direct", {HOUR: 1.5, HOUR + 1: 2.5, HOUR + 8760: 1.5, HOUR + 8761: 2.5}),
        (TWO.replace("Life cycle", "LCA").replace("intensity", "Intensity"), "life_cycle", {HOUR: 20, HOUR + 1: 30}),
        ("Datetime (UTC),Carbon intensity\n2026-01-01T02:00:00+01:00,7\n\n2026-01-01T00:00:00Z,6\n", "direct",
         {HOUR: 6, HOUR + 1: 7}),
        (TWO + "2026-01-01 02:00:00,SE,,\n", "direct", {HOUR: 1.5, HOUR + 1: 2.5}),
        (HEAD + "2026-01-01 00:00:00,SE,0,20\n", "direct", {HOUR: 0}),
    ],
)  # fmt: skip
def test_hours_are_read_as_they_are_exported(
    tmp_path_factory: pytest.TempPathFactory, text: str, column: str, hours: dict[int, float]
) -> None:
    found = read_hours(written(tmp_path_factory.mktemp("carbon"), text), column=column)
    assert (found, list(found)) == (hours, sorted(hours))


@each(
    "text, error",
    [
        ("", "line 1: has no column 'Datetime (UTC)'"),
        ("a,b\n1,2\n", "line 1: has no column 'Datetime (UTC)'"),
        ("Datetime (UTC),Renewable energy percentage (RE%)\n", "or not one column 'Carbon intensity' (life cycle)"),
        (TWO.replace("Life cycle", "marginal"), "or not one column 'Carbon intensity' (life cycle)"),
        (TWO + "2026-01-01 02:00:00,SE\n", "line 4: has 2 columns, and the first line 4: complete it"),
        (TWO + "1 January,SE,1,2\n", "line 4: '1 January' is no time: write it as 2026-01-31 23:00:00, in UTC"),
        (TWO + "2026-01-01 01:00:00,NO,1,2\n", "line 4: 2026-01-01 01:00:00 is in an hour that already has a value"),
        (TWO + "2026-01-01 01:15:00,SE,1,2\n", "keep one zone, and one line an hour"),
        (TWO + "2026-01-01 02:00:00,SE,1,-2\n", "line 4: '-2' is not from 0 to 100,000 grams"),
        (TWO + "2026-01-01 02:00:00,SE,1,nan\n", "line 4: 'nan' is not from 0 to 100,000 grams"),
        (TWO + '2026-01-01 02:00:00,SE,1,"2\n' + "x" * 140_000, "is no CSV: field larger than field limit"),
        (HEAD, "has no value: download the hourly data of your zone"),
        (TWO.replace("01:00", "03:00"), "has no two hours in succession: download the hourly data"),
        (b"Datetime (UTC)\xff", "is not UTF-8: export it as CSV in UTF-8"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_line_with_what_to_do(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes, error: str
) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        read_hours(written(tmp_path_factory.mktemp("carbon"), text), column="life_cycle")
    assert error in f"{raised.value}"


def test_no_more_than_a_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carbon, "MAX_BYTES", len(TWO))
    path = written(tmp_path, TWO)
    assert len(read_hours(path, column="direct")) == 2
    path.write_text(TWO + "\n")
    with pytest.raises(ValueError, match="MiB: keep one zone"):
        read_hours(path, column="direct")


def test_the_configuration_names_the_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f"[energy]\ngrams_co2_per_kwh = 9\ncarbon_intensity_file = '{tmp_path}/hours.csv'")
    with pytest.raises(ConfigError, match=r"^energy.carbon_intensity_file: .*hours.csv: cannot be read: No such file"):
        read(tmp_path / "c.toml")
    written(tmp_path, TWO)
    config = read(tmp_path / "c.toml")
    (tmp_path / "hours.csv").unlink()
    assert config.terms("n1").carbon == CarbonIntensity(9, (HOUR, HOUR + 1), (20, 30)), "read once, when it was loaded"


def test_a_reload_reads_the_file_again_and_keeps_the_old_hours_if_it_cannot(tmp_path: Path) -> None:
    hours = written(tmp_path, TWO)
    path, taken = tmp_path / "c.toml", list[tuple[Config, ReloadStatus]]()
    path.write_text(f"[energy]\ncarbon_intensity_file = '{hours}'\n")
    reloader = ConfigReloader(path, read(path), lambda: read(path))
    for text in (TWO + "2026-01-01 02:00:00,SE,3.5,40\n", TWO + "?"):
        written(tmp_path, text)
        reloader.poll(lambda config, told: taken.append((config, told)), requested=True)
    assert [config.terms("n1").carbon.grams for config, _ in taken] == [(20, 30, 40)] * 2
    assert not taken[0][1].refused
    assert "hours.csv: line 4: has 1 columns" in taken[1][1].refused
