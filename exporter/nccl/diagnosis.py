"""Determines for each process that uses NCCL whether a profiler plugin times it, what is wrong, and what to do.

Reads what `files` reads, once, and the process's memory map for the libraries that it has loaded. Changes nothing.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from exporter.job_files import FileRefusedError, open_written_file
from exporter.nccl.collectives import MICROSECOND
from exporter.nccl.events import LINE_BYTES, CollectiveEvent, EventError
from exporter.nccl.files import PluginFile, find_plugin_file
from exporter.nccl.settings import PluginSettings, read_settings
from exporter.procfs import command_name, read_bytes

TAIL_BYTES = 512 * 1024
"""Bytes read of the end of a file."""
OLD_SECONDS = 60.0
"""A last event older than this is worth a look."""
INTERVAL = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
_MAP_BYTES = 8 * 1024 * 1024
_PLUGIN_LIBRARY = "libnccl-profiler"
_LINE_PROBLEMS = {
    "malformed": "are no JSON of this plugin",
    "unknown_version": "have a format that this version does not know",
    "untimed": "have no time of execution",
    "absurd": "have impossible numbers",
}  # fmt: skip


class Problem(Struct, frozen=True):
    """What is wrong, and what to do."""

    message: str
    do: str


class ProcessDiagnosis(Struct, frozen=True, kw_only=True):
    """What was found of one process."""

    pid: int
    command: str
    user: int
    plugin: str
    """Name or path of the plugin's library; empty: not set."""
    origin: str
    """Where that is set."""
    loaded: tuple[str, ...]
    """Paths of the plugins' libraries that the process has mapped."""
    file: str
    """Name of the plugin's file; empty: none is open."""
    bytes: int = 0
    """Its size."""
    last_event: str = ""
    """Name of the last collective in it."""
    age_seconds: float | None = None
    """Seconds since that ended."""
    problems: tuple[Problem, ...] = ()


def diagnose_processes(proc: Path, *, wall: int) -> Iterator[ProcessDiagnosis]:
    """Diagnose all processes that have NCCL or one of its plugins loaded, or settings of a plugin."""
    for folder in sorted(
        (entry for entry in proc.iterdir() if entry.name.isdecimal()), key=lambda found: int(found.name)
    ):
        settings, libraries = read_settings(folder), _nccl_libraries(folder)
        if libraries or "environment" in settings.origins.values():
            found = _diagnose(folder, settings, libraries, wall=wall)
            if found is not None:
                yield found


def _diagnose(
    folder: Path, settings: PluginSettings, libraries: tuple[str, ...], *, wall: int
) -> ProcessDiagnosis | None:
    try:
        user = folder.stat().st_uid
    except OSError:
        return None  # it has ended
    loaded = tuple(path for path in libraries if _is_plugin(path, settings))
    file, size, event, problems = _read_file(folder, settings)
    age = None if event is None else (wall - event.end * MICROSECOND) / 1e9
    return ProcessDiagnosis(
        pid=int(folder.name),
        command=command_name(folder),
        user=user,
        plugin=settings.plugin,
        origin=settings.origins.get("NCCL_PROFILER_PLUGIN", ""),
        loaded=loaded,
        file="" if file is None else file.name,
        bytes=size,
        last_event="" if event is None else event.name,
        age_seconds=age,
        problems=(
            *problems,
            *(() if file is not None or problems else _setting_problems(folder, settings, libraries, loaded)),
            *_file_problems(settings, file, age),
        ),
    )


def _nccl_libraries(folder: Path) -> tuple[str, ...]:
    """Paths of NCCL's libraries, plugins included, in the process's memory map; none if it cannot be read."""
    try:
        mapped = read_bytes(folder / "maps", _MAP_BYTES)
    except OSError:
        return ()
    paths = {line.rpartition(b" ")[2] for line in mapped.split(b"\n") if b"nccl" in line}
    return tuple(sorted(os.fsdecode(path) for path in paths if b".so" in path.rpartition(b"/")[2]))


def _is_plugin(path: str, settings: PluginSettings) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith(_PLUGIN_LIBRARY) or (bool(settings.plugin) and name == settings.plugin.rpartition("/")[2])


def _read_file(
    folder: Path, settings: PluginSettings
) -> tuple[PluginFile | None, int, CollectiveEvent | None, list[Problem]]:
    """The plugin's file with its size and last event, and what is wrong with its lines."""
    try:
        file = find_plugin_file(folder, settings)
        if file is None:
            return None, 0, None, []
        handle = open_written_file(file.path)
    except PermissionError:
        return None, 0, None, [Problem("its open files may not be listed", "run this as root, or as the job's user")]
    except (OSError, FileRefusedError) as err:
        return None, 0, None, [Problem(f"its file cannot be read: {err}", "look at the file system it is on")]
    try:
        size = os.fstat(handle).st_size
        event, kinds = _last_event(
            file, os.pread(handle, TAIL_BYTES, max(0, size - TAIL_BYTES)), whole=size <= TAIL_BYTES
        )
    finally:
        os.close(handle)
    return file, size, event, [_line_problem(kind, count) for kind, count in kinds.items() if kind in _LINE_PROBLEMS]


def _last_event(file: PluginFile, chunk: bytes, *, whole: bool) -> tuple[CollectiveEvent | None, Counter[str]]:
    """The last event of the end of a file, and how many lines were rejected for which reason."""
    reader, last, kinds = file.open_reader(), None, Counter[str]()
    for raw in chunk.split(b"\n")[0 if whole else 1 : -1]:
        try:
            last = (reader.read(raw) if len(raw) <= LINE_BYTES else None) or last
        except EventError as err:
            kinds[err.kind] += 1
    return last, kinds


def _line_problem(kind: str, count: int) -> Problem:
    do = (
        "set NCCL_PROFILER_TRACK_KERNEL_CH=true (CoMMA)" if kind == "untimed" else "report it with a few of these lines"
    )
    return Problem(f"{count} of its last lines {_LINE_PROBLEMS[kind]}", do)


def _setting_problems(
    folder: Path, settings: PluginSettings, libraries: tuple[str, ...], loaded: tuple[str, ...]
) -> Iterator[Problem]:
    if not settings.plugin and not loaded:
        yield Problem(
            "no plugin is set for it",
            "write /etc/nccl.conf as `gpu-efficiency nccl` prints it; mount it into containers; NCCL reads it when a"
            " job starts",
        )
        return
    if settings.plugin.startswith("/") and not _exists(folder, settings.plugin):
        yield Problem(
            f"{settings.plugin} does not exist where the process runs", "mount the library into the container"
        )
    elif libraries and not loaded:
        yield Problem(
            f"{settings.plugin} is not loaded",
            "it may come with the first communicator; otherwise NCCL is older than 2.28 (CoMMA: 2.23), or the library"
            " was built for another one: look for PROFILER in the job's output with NCCL_DEBUG=INFO",
        )
    if not settings.latency_file:
        yield from _inspector_problems(folder, settings)
    yield Problem(
        "it has no file of the plugin open",
        "it comes with the first collectives; otherwise look for PROFILER in the job's output with NCCL_DEBUG=INFO",
    )


def _exists(folder: Path, path: str) -> bool:
    """Whether a path exists in the process's root; True if that cannot be determined."""
    try:
        (folder / "root" / path.lstrip("/")).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        pass
    return True


def _inspector_problems(folder: Path, settings: PluginSettings) -> Iterator[Problem]:
    if not settings.inspector:
        yield Problem(
            "NCCL_INSPECTOR_ENABLE is not 1, and NCCL_PROFILER_LATENCY_FILE (CoMMA) is not set", "set either of them"
        )
        return
    if settings.prometheus:
        yield Problem("NCCL_INSPECTOR_PROM_DUMP=1 writes means only, without times", "set it to 0")
    if settings.number(INTERVAL, -1) < 1:
        yield Problem(f"{INTERVAL} is not set: nothing is written before the job ends", f"set {INTERVAL}=100000")
    dumps = settings.dump_folder
    if dumps.startswith("/") and not _exists(folder, dumps):
        yield Problem(
            f"{dumps} does not exist where the process runs",
            "create it with mode 1777, and mount it into the container",
        )


def _file_problems(settings: PluginSettings, file: PluginFile | None, age: float | None) -> Iterator[Problem]:
    if settings.latency_file and "%p" not in settings.latency_file:
        yield Problem(
            "NCCL_PROFILER_LATENCY_FILE has no %p: the processes of a job write the same file, which is not read",
            "add %p, which becomes the pid",
        )
    if file is not None and age is None:
        yield Problem("the end of its file has no timed collective", "wait for the job's first steps, and check again")
    elif age is not None and age > OLD_SECONDS:
        yield Problem(f"its last collective ended {age:,.0f} s ago", "look whether the job still makes steps")
