"""Whose time it is: ours, that of NVIDIA's Python bindings, or of the library beneath them.

Owns the change from one to the other at every call across, and back; also where the library calls us. Refuses to know
what is called. By the wall clock: a thread's own clock is a system call, dearer than most of what lies between two
changes, so look at medians.
"""

import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

OURS, LEDGER, BINDINGS, LIBRARY = range(4)
SIDES = 4
_EAR = "dcgmFieldValueEntityEnumeration_f"


class Meter:
    """Nanoseconds by side, since the last `take`; what nobody else claimed is OURS."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock, self._inside = clock, [OURS]
        self._spent, self._since = [0] * SIDES, clock()

    def take(self) -> list[int]:
        """Give what was spent since the last time, by side, and begin anew."""
        self._turn()
        spent, self._spent = self._spent, [0] * SIDES
        return spent

    def _turn(self) -> None:
        now = self._clock()
        self._spent[self._inside[-1]] += now - self._since
        self._since = now

    def timed(self, call: Callable[..., Any], side: int) -> Callable[..., Any]:
        """Give a function that does the same at the expense of `side`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._turn()
            self._inside.append(side)
            try:
                return call(*arguments, **named)
            finally:
                self._turn()
                self._inside.pop()

        return timed

    def split(self, calls: ModuleType, holder: ModuleType) -> None:
        """Time the bindings' functions in `calls`, and those of the library that `holder` has loaded; for good.

        Both bindings name their parts alike: dcgmLib and nvmlLib, and a cache of the functions found in it.
        """
        prefix = "nvml" if hasattr(holder, "nvmlLib") else "dcgm"
        setattr(holder, f"{prefix}Lib", _Library(getattr(holder, f"{prefix}Lib"), self))
        getattr(holder, f"_{prefix}GetFunctionPointer_cache").clear()
        ours = [name for name, value in vars(calls).items() if isinstance(value, FunctionType)]
        for name in ours:
            if name.startswith(prefix):
                setattr(calls, name, self.timed(getattr(calls, name), BINDINGS))
        if hasattr(calls, _EAR):
            ear = getattr(calls, _EAR)
            setattr(calls, _EAR, lambda hear: ear(self.timed(hear, OURS)))


class _Library:
    """A loaded library, its functions timed."""

    def __init__(self, library: Any, meter: Meter) -> None:
        self._library, self._meter = library, meter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._meter.timed(getattr(self._library, name), LIBRARY)
