"""Time that stands still until the process's driver moves it. Python loads this itself: its folder is on PYTHONPATH.

The environment says how late it is: COMPAT_WALL (Unix nanoseconds) and COMPAT_MONOTONIC (nanoseconds). Where
COMPAT_MOVED names a file, that holds two numbers of nanoseconds: by how much the clocks have been moved, and by how
much of it those who wait with a time limit have noticed. So a driver can make a sample old without another being taken.
Until the file is there, nobody who waits with a time limit wakes: a daemon plays its story to the end first, whatever
its threads do meanwhile. Without COMPAT_WALL nothing is changed.

`time.monotonic()` stays real: event loops and sockets live by it. Chance is always the same chance.
"""

import os
import random
import threading
import time
from typing import Any

_POLL_SECONDS = 0.005
_stands = {"wall": 0, "monotonic": 0}
_wait = threading.Condition.wait


def _moved() -> tuple[int, int] | None:
    """By how much the clocks and those who wait were moved; None: time has not begun."""
    path = os.environ.get("COMPAT_MOVED")
    if not path:
        return 0, 0
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  pathlib is not loaded by every program
            clocks, waits = file.read().split()
    except FileNotFoundError:
        return None
    return int(clocks), int(waits)


def _clocks() -> int:
    return (_moved() or (0, 0))[0]


def _patiently(condition: Any, timeout: float | None = None) -> bool:
    """See threading.Condition.wait, of which this is a copy; `timeout` is of the driver's time."""
    if timeout is None or timeout <= 0:
        return bool(_wait(condition, timeout))
    if not condition._is_owned():
        raise RuntimeError("cannot wait on un-acquired lock")
    waiter = threading.Lock()
    waiter.acquire()
    condition._waiters.append(waiter)
    state = condition._release_save()
    told = False
    try:
        told = _told(waiter, timeout)
    finally:
        condition._acquire_restore(state)
        if not told:
            try:
                condition._waiters.remove(waiter)
            except ValueError:  # told since
                told = True
    return told


def _told(waiter: "threading.Lock", timeout: float) -> bool:
    """Wait until somebody has released it and time has begun, or until that much time has gone by; was it the first?"""
    began, told = (_moved() or (0, 0))[1], False
    while True:
        if told:
            time.sleep(_POLL_SECONDS)
        told = told or waiter.acquire(timeout=_POLL_SECONDS)
        moved = _moved()
        if moved is not None and (told or moved[1] - began >= timeout * 1e9):
            return told


def begin() -> None:
    """Let time stand as the environment says; once more in a process that was forked."""
    if "COMPAT_WALL" not in os.environ:
        return
    chance = int(os.environ.get("COMPAT_CHANCE", "0"))
    _stands["wall"], _stands["monotonic"] = int(os.environ["COMPAT_WALL"]), int(os.environ["COMPAT_MONOTONIC"])
    time.time_ns = lambda: _stands["wall"] + _clocks()
    time.time = lambda: (_stands["wall"] + _clocks()) / 1e9
    time.monotonic_ns = lambda: _stands["monotonic"] + _clocks()
    time.perf_counter = lambda: 0.0
    time.perf_counter_ns = lambda: 0
    random.seed(chance)
    os.urandom = lambda size: random.Random(chance).randbytes(size)  # noqa: S311  not for secrets
    threading.Condition.wait = _patiently if "COMPAT_MOVED" in os.environ else _wait  # type: ignore[method-assign, assignment]


begin()
