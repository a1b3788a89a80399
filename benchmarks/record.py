"""Records of runs: figures with the commit, the day and the machine they are of, one JSON file a group.

Owns `benchmarks/records`, and three questions to a record: has the code it measured changed since, was it written by a
run and not by hand, and was it stamped anew without one. Refuses to write a record of code that is not committed.
"""

import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.figures import Row
from benchmarks.group import Curves, Group, Measured, Table
from benchmarks.machine import ROOT

RECORDS = ROOT / "benchmarks" / "records"


class Stamp(Struct, frozen=True, kw_only=True):
    """When, where and of which code."""

    commit: str
    day: str
    machine: str
    """Processor, cores, Python, and how busy it was before."""
    took: float
    """Seconds, as the clock gave them: two runs never take the same."""


class Record(Struct, frozen=True, kw_only=True):
    """What one run of a group found, and of what."""

    group: str
    stamp: Stamp
    code: dict[str, str]
    """Each file or folder that was measured, and a digest of what was in it."""
    rows: list[Row]
    tables: list[Table] = []
    curves: Curves = {}
    seal: str = ""
    """A digest of all the rest: a figure changed by hand breaks it."""


class RecordError(RuntimeError):
    """A record cannot be written or read; the message says why, and what to do."""


def path_of(name: str) -> Path:
    """The file of a group's record."""
    return RECORDS / f"{name}.json"


def read(name: str) -> Record | None:
    """The record of a group, if it was ever measured; raises RecordError where the file is none."""
    try:
        return msgspec.json.decode(path_of(name).read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path_of(name)} is no record: {error}. Measure the group again.") from error


def uncommitted(measures: Sequence[str]) -> list[str]:
    """Measured files that differ from the commit, or are not in it."""
    return [line[3:] for line in _git("status", "--porcelain", "--", *measures).splitlines()]


def made(group: Group, found: Measured, stamp: Stamp) -> Record:
    """Bind figures to the code they are of, and seal them; raises RecordError for code that is not committed."""
    if changed := uncommitted(group.measures):
        raise RecordError(f"{', '.join(changed[:3])} is not committed: a record must name its code. Commit, run again.")
    code = {path: digest(_on_disk(path)) for path in group.measures}
    record = Record(group=group.name, stamp=stamp, code=code, rows=found.rows, tables=found.tables, curves=found.curves)
    return replace(record, seal=sealed(record))


def write(record: Record) -> None:
    """Keep it, a figure a line, so that a change can be read."""
    RECORDS.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    path_of(record.group).write_bytes(text + b"\n")


def sealed(record: Record) -> str:
    """The seal that belongs to what a record says."""
    words = msgspec.json.encode(replace(record, seal=""), order="deterministic")
    return hashlib.sha256(words).hexdigest()


def changed(group: Group, record: Record) -> list[str]:
    """What of the measured code is not as it was then; what is measured now and was not named then, too."""
    now = {path: digest(_on_disk(path)) for path in group.measures}
    return sorted(path for path in now.keys() | record.code.keys() if now.get(path) != record.code.get(path))


# -- digests: of the disk, and of a commit, by what git calls a file's content --


def digest(contents: Mapping[str, str]) -> str:
    """A digest of files by their names and contents."""
    lines = "".join(f"{path} {contents[path]}\n" for path in sorted(contents))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _on_disk(path: str) -> dict[str, str]:
    whole = ROOT / path
    if not whole.exists():
        return {}
    files = [whole] if whole.is_file() else (file for file in whole.rglob("*") if file.is_file())
    return {str(file.relative_to(ROOT)): _blob(file.read_bytes()) for file in files if file.suffix != ".pyc"}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _at_commit(commit: str, path: str) -> dict[str, str]:
    listed = _git("ls-tree", "-r", commit, "--", path).splitlines()
    return {line.split("\t")[1]: line.split()[2] for line in listed}


# -- whether a record is what it says --


def faults(record: Record) -> Iterator[str]:
    """What is untrue of a record as it stands, and of every version of it that was committed before."""
    if record.seal != sealed(record):
        yield f"{record.group}: changed by hand since it was measured (its seal does not fit)"
    for path, then in record.code.items():
        if digest(_at_commit(record.stamp.commit, path)) != then:
            yield f"{record.group}: {path} was not like this at commit {record.stamp.commit}"
    yield from stamped_anew([*_versions(record.group), record])


def stamped_anew(versions: Iterable[Record]) -> Iterator[str]:
    """Two versions that say the same of two moments: nothing was run between them."""
    last: Record | None = None
    for one in versions:
        if last is not None and last.stamp != one.stamp and last.stamp.took == one.stamp.took:
            yield (
                f"{one.group}: stamped {one.stamp.commit}, {one.stamp.day} with the run of {last.stamp.commit}, "
                f"{last.stamp.day}"
            )
        last = one


def whole_history() -> bool:
    """Whether git is here and knows all commits: a shallow clone or a source archive does not."""
    return _git("rev-parse", "--is-shallow-repository").strip() == "false"


def _versions(name: str) -> Iterator[Record]:
    """All that were committed, the oldest first."""
    path = path_of(name).relative_to(ROOT)
    for commit in _git("log", "--reverse", "--format=%H", "--", str(path)).split():
        if text := _git("show", f"{commit}:{path}"):
            yield msgspec.json.decode(text, type=Record)


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout
