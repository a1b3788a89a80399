"""Reads a file with the carbon intensity of each hour: a CSV with the columns of Electricity Maps' hourly exports.

Owns the file's format and its bounds. Refuses a file with a value that cannot be used, rather than skip the line.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from exporter.core.prices import HOUR_SECONDS

TIME_COLUMN = "Datetime (UTC)"
INTENSITY_COLUMN = "Carbon intensity"
"""Beginning of the names of both intensities; the unit and, in parentheses, the kind follow. Case is ignored."""
KINDS = {"direct": ("direct",), "life_cycle": ("life cycle", "lca")}
"""What tells the columns of the two kinds; files up to 2023 have LCA."""
MAX_BYTES = 32 * 1024 * 1024
"""About 20 years of one zone."""
MAX_GRAMS = 1e5
"""Highest intensity per kilowatt-hour, here and of the setting grams_co2_per_kwh."""


def read_hours(path: Path, *, column: str) -> dict[int, float]:
    """Return grams of CO2 per kilowatt-hour by hour since 1970-01-01 00:00 UTC, ascending.

    `column` is the kind that applies if the file has several. Raises ValueError with the line and the remedy.
    """
    reader = csv.reader(io.StringIO(_read_text(path), newline=""))
    try:
        header = next(reader, [])
        rows = ((reader.line_num, row) for row in reader)
        hours = dict(sorted(_parse_rows(rows, header, *_find_columns(header, column)).items()))
    except csv.Error as err:
        raise ValueError(f"line {reader.line_num}: is no CSV: {err}") from err
    if not hours:
        raise ValueError("has no value: download the hourly data of your zone")
    if len(hours) > 1 and all(after - before > 1 for before, after in pairwise(hours)):
        raise ValueError("has no two hours in succession: download the hourly data, not that of days, months or years")
    return hours


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES // 1024 // 1024} MiB: keep one zone, and the years in question")
        return content.decode("utf-8-sig")
    except OSError as err:
        raise ValueError(f"cannot be read: {err.strerror or err}") from err
    except UnicodeDecodeError as err:
        raise ValueError("is not UTF-8: export it as CSV in UTF-8") from err


def _find_columns(header: Sequence[str], kind: str) -> tuple[int, int]:
    """Return the indices of the time and of the intensity."""
    names = [name.strip().casefold() for name in header]
    intensities = [index for index, name in enumerate(names) if name.startswith(INTENSITY_COLUMN.casefold())]
    if len(intensities) > 1:
        intensities = [index for index in intensities if any(word in names[index] for word in KINDS[kind])]
    if TIME_COLUMN.casefold() not in names or len(intensities) != 1:
        raise ValueError(
            f"line 1: has no column {TIME_COLUMN!r}, or not one column {INTENSITY_COLUMN!r} ({kind.replace('_', ' ')}):"
            " write them as in the hourly files of Electricity Maps, separated by commas"
        )
    return names.index(TIME_COLUMN.casefold()), intensities[0]


def _parse_rows(
    rows: Iterable[tuple[int, list[str]]], header: Sequence[str], time_column: int, intensity_column: int
) -> dict[int, float]:
    """Return grams by hour of numbered rows."""
    hours: dict[int, float] = {}
    for line, row in rows:
        if not row or row == header:  # of a second file that was appended
            continue
        if len(row) <= max(time_column, intensity_column):
            raise ValueError(f"line {line}: has {len(row)} columns, and the first line {len(header)}: complete it")
        hour = _parse_hour(row[time_column], line)
        if hour in hours:
            raise ValueError(
                f"line {line}: {row[time_column]} is in an hour that already has a value: keep one zone, and one line"
                " an hour"
            )
        if row[intensity_column].strip():
            hours[hour] = _parse_grams(row[intensity_column], line)
    return hours


def _parse_hour(text: str, line: int) -> int:
    try:
        at = datetime.fromisoformat(text.strip())
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() // HOUR_SECONDS)
    except (ValueError, OverflowError) as err:
        raise ValueError(f"line {line}: {text[:40]!r} is no time: write it as 2026-01-31 23:00:00, in UTC") from err


def _parse_grams(text: str, line: int) -> float:
    try:
        grams = float(text)
    except ValueError:
        grams = -1.0
    if not 0 <= grams <= MAX_GRAMS:
        raise ValueError(
            f"line {line}: {text[:40]!r} is not from 0 to {MAX_GRAMS:,.0f} grams of CO2 per kilowatt-hour: correct it,"
            " or leave it empty if it is not known"
        )
    return grams
