"""The stand-in libdcgm in a test's hands: its script, its clock, its counters, and NVIDIA's bindings above it.

    with stand_in(tmp_path, monkeypatch, bindings) as stub:
        agent = stub.agent                  # NVIDIA's dcgm_agent; structs, fields, pydcgm likewise
        stub.say("gpu 0 lost")              # holds from the last `run` on; seen at the next
        stub.run(stub.now + 1_000_000)      # one second of the engine's clock
        assert stub.count("groups") == 0

The script's language is told in `world.h`.
"""

import _ctypes
import ctypes
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.dcgm_stub.build import LIBRARY, build

START_US = 1_700_000_000_000_000
"""When the world begins: microseconds since 1970."""
MODULES = (
    *("pydcgm", "dcgm_agent", "dcgm_structs", "dcgm_fields", "dcgm_fields_internal", "dcgm_field_helpers", "dcgmvalue"),
    *("DcgmHandle", "DcgmGroup", "DcgmFieldGroup", "DcgmSystem", "DcgmStatus", "dcgm_errors"),
)


class Stub:
    """A world of two busy H100s, whose script is rewritten at every `run`."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.lines: list[str] = []
        self.incarnation = 0
        self._writes = 0
        self._sockets = ExitStack()
        self._library = ctypes.CDLL(str(folder / LIBRARY))
        self._library.dcgmStubCalls.restype = self._library.dcgmStubCount.restype = ctypes.c_ulong
        self.run(START_US)

    def say(self, *lines: str) -> None:
        """Add lines to the script; they hold from the last `run` on, and the library sees them at the next."""
        self.lines += lines

    def unsay(self, *lines: str) -> None:
        """Take lines back."""
        self.lines = [line for line in self.lines if line not in lines]

    def run(self, until_us: int) -> None:
        """Set the engine's clock; what happens on the way there happens at the library's next call."""
        self.now = until_us
        draft = self.script.with_suffix(".draft")
        draft.write_text("\n".join([*self.lines, f"clock {until_us}"]))
        self._writes += 1
        os.utime(draft, (self._writes, self._writes))  # the library looks at the file's time to see a change
        draft.replace(self.script)

    def restart(self) -> None:
        """Another engine answers from the next call on; what the former one knew is gone."""
        self.unsay(f"engine up {self.incarnation}")
        self.incarnation += 1
        self.say(f"engine up {self.incarnation}")
        self.run(self.now)

    def drop(self) -> None:
        """Break every connection there is or was, while the engine lives on."""
        self.lines = [line for line in self.lines if not line.startswith("drop ")]
        self.say(f"drop {self.calls('dcgmConnect_v2')}")
        self.run(self.now)

    def listen(self) -> str:
        """Really listen on a port of 127.0.0.1, for whoever knocks before connecting; give the engine's address."""
        server = self._sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        self.say(f"listen {address}")
        self.run(self.now)
        return address

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return int(self._library.dcgmStubCalls(name.encode()))

    def count(self, what: str) -> int:
        """How many groups, field_groups, watches or connections there are on the engine; its own do not count.

        Or how many `requests` for values it had, and how many `errors_logged` in its own log; see `world.h`.
        """
        return int(self._library.dcgmStubCount(what.encode()))

    def close(self) -> None:
        """Unload the library."""
        self._sockets.close()
        self._library.dcgmShutdown()
        _ctypes.dlclose(self._library._handle)

    @property
    def pydcgm(self) -> Any:
        """NVIDIA's module of classes."""
        return import_module("pydcgm")

    @property
    def agent(self) -> Any:
        """NVIDIA's module of functions."""
        return import_module("dcgm_agent")

    @property
    def structs(self) -> Any:
        """NVIDIA's module of structures and errors, its library loaded."""
        return import_module("dcgm_structs")

    @property
    def fields(self) -> Any:
        """NVIDIA's module of field numbers."""
        return import_module("dcgm_fields")

    def connect(self, address: str = "localhost:5555", *, persist: bool = False) -> Any:
        """Connect through the flat layer and give the handle."""
        self.structs._dcgmInit(str(self.folder))
        self.agent.dcgmInit()
        params = self.structs.c_dcgmConnectV2Params_v2()
        params.persistAfterDisconnect = int(persist)
        params.addressIsUnixSocket = int(address.startswith("/"))
        return self.agent.dcgmConnect_v2(address, params)


@contextmanager
def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bindings: Path, *, kind: Callable[[Path, Path], Any] = Stub
) -> Iterator[Any]:
    """A `kind` of Stub with its script in `folder`, and `bindings` (see `bindings.unpack`) first on the Python path.

    Afterwards neither library nor modules are left behind.
    """
    _forget()
    monkeypatch.setenv("DCGM_STUB_SCRIPT", str(folder / "dcgm-script"))
    monkeypatch.setenv("DCGM_BINDINGS", str(bindings))
    monkeypatch.syspath_prepend(str(bindings))
    stub = kind(folder / "dcgm-script", build())
    import_module("dcgm_structs")._LoadDcgmLibrary(str(stub.folder))
    try:
        yield stub
    finally:
        _unload()
        stub.close()
        _forget()


def _unload() -> None:
    structs: Any = sys.modules.get("dcgm_structs")
    if structs is not None and structs.dcgmLib is not None:
        _ctypes.dlclose(structs.dcgmLib._handle)
        structs.dcgmLib = None
        structs._dcgmGetFunctionPointer_cache.clear()


def _forget() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)
