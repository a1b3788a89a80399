"""Who started whom on this node, as far as one job's processes go.

Owns /proc/PID/stat and cmdline, and the bounds of looking around: an engine's server is often the parent, or the
launcher's other child, of the process that is on the GPU. Refuses to say whose job a process is: the scheduler knows.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

HEIGHT = 8
"""Ancestors looked at."""
MOST = 512
"""Relatives of all processes on GPUs together."""
_COMMAND_BYTES = 16384


class Family(Struct, frozen=True):
    """Parents and children by pid, as they are now."""

    parents: Mapping[int, int]
    children: Mapping[int, tuple[int, ...]]

    def ancestors(self, pid: int) -> Iterator[int]:
        """From the parent upwards, without init."""
        for _ in range(HEIGHT):
            pid = self.parents.get(pid, 0)
            if pid <= 1:
                return
            yield pid

    def below(self, pid: int) -> set[int]:
        """The process and all that came of it."""
        return set(self._spread([pid]))

    def around(self, pids: Iterable[int]) -> tuple[int, ...]:
        """These, their ancestors, and what came of those, the nearest first."""
        found: dict[int, None] = {}
        for start in (line for pid in pids for line in (pid, *self.ancestors(pid))):
            found.update(dict.fromkeys(self._spread([start])))
            if len(found) >= MOST:
                break
        return tuple(found)[:MOST]

    def _spread(self, start: list[int]) -> Iterator[int]:
        queue, seen = deque(start), 0
        while queue and seen < MOST:
            pid = queue.popleft()
            seen += 1
            yield pid
            queue.extend(self.children.get(pid, ()))


def look(proc: Path) -> Family:
    """Everybody's parent, now. Raises OSError where `proc` is no process tree."""
    parents = {int(folder.name): _parent(folder) for folder in proc.iterdir() if folder.name.isdecimal()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    return Family(parents, {parent: tuple(sorted(born)) for parent, born in children.items()})


def _parent(folder: Path) -> int:
    """Field 4 of stat (proc(5)); the name in field 2 may hold spaces and brackets. 0: it has just ended."""
    try:
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def command(proc: Path, pid: int) -> str:
    """The command line with a space for each NUL; empty when it may not be read."""
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            return file.read(_COMMAND_BYTES).decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""
