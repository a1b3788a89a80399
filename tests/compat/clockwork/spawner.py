"""Starts `python -m exporter` again and again without paying for Python and its modules each time: it forks.

What a command has loaded by its end, this loads too, for the next one: no name of a module is known here. A request is
a line of JSON on standard input: `{"words", "cwd", "environ", "out", "err"}` starts a command, `{"wait": pid}` waits
for its end. The answer is a process id, or an exit status; the first line of all says where the package is. It ends
with its standard input.
"""

import atexit
import gc
import importlib.util
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_LIBRARIES = ("asyncio", "fastapi.openapi.utils", "httpx", "msgspec", "prometheus_client", "sqlite3", "uvicorn")
_PROJECT = "exporter"


def _answer(told: object) -> None:
    os.write(1, f"{told}\n".encode())


def _begin(request: dict[str, Any]) -> list[str]:
    """Become the command: its folder, environment, clock and files. Its words."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    importlib.import_module("sitecustomize").begin()
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.path[0] = request["cwd"]
    atexit.register(_teach, Path(f"{request['err']}.modules"))
    return [_PROJECT, *request["words"]]


def _teach(file: Path) -> None:
    with suppress(OSError):
        file.write_text("\n".join(name for name in sys.modules if name.startswith(f"{_PROJECT}.")), encoding="utf-8")


def _taught(file: Path) -> list[str]:
    """What a command has loaded."""
    try:
        names = file.read_text(encoding="utf-8").split()
        file.unlink()
    except OSError:  # it was killed
        return []
    return names


def _learn(names: list[str]) -> None:
    """Load the same, but for what begins to run when it is."""
    for name in [name for name in names if name not in sys.modules and not name.endswith("__main__")]:
        with suppress(Exception):  # whoever needs it will say so
            importlib.import_module(name)
    gc.freeze()


def _serve() -> list[str]:
    """Answer requests; returns in each command's own process, with its words. Empty: there are no more requests."""
    files: dict[int, Path] = {}
    with open(os.dup(0), encoding="utf-8") as requests:  # noqa: PTH123  a descriptor
        while line := requests.readline():
            request = json.loads(line)
            if "wait" in request:
                status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
                names = _taught(files.pop(request["wait"]))
                _answer(status)
                _learn(names)  # while it is not waited for
                continue
            pid = os.fork()
            if pid == 0:
                return _begin(request)
            files[pid] = Path(f"{request['err']}.modules")
            _answer(pid)
    return []


if __name__ == "__main__":
    for library in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(library)
    gc.freeze()
    package = importlib.util.find_spec(_PROJECT)
    _answer(package.origin if package else None)
    words = _serve()
    if words:
        sys.argv = words
        runpy.run_module(_PROJECT, run_name="__main__", alter_sys=True)
