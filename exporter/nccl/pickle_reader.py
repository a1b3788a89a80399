"""Decodes pickles of plain containers and scalars without running anything that a pickle can ask for.

Python's own Unpickler, even with `find_class` refused, allocates what a few bytes claim (PEP 3154's counted objects,
the memo). This one knows only the opcodes of dict, list, tuple, str, int, float, bool and None; `pickletools.genops`
checks every length against the data. PyTorch's Flight Recorder writes protocol 2.
"""

import pickletools  # nosec B403
from collections.abc import Callable

MOST_OPCODES = 2_000_000
MOST_BYTES = 8 << 20
_MARK = object()


class PickleRefusedError(Exception):
    """The bytes are no pickle of plain values, or a larger one than is read."""


def read_pickle(data: bytes) -> object:
    """Return the value that is pickled. Containers may contain each other, so it must not be walked recursively.

    Raises PickleRefusedError.
    """
    if len(data) > MOST_BYTES:
        raise PickleRefusedError(f"a pickle of {len(data)} bytes; at most {MOST_BYTES} are read")
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MOST_OPCODES:
                raise PickleRefusedError(f"a pickle of more than {MOST_OPCODES} steps")
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as err:
        raise PickleRefusedError(f"not a pickle of plain values: {err}") from err
    if len(machine.stack) != 1 or machine.stack[0] is _MARK:
        raise PickleRefusedError("a pickle that leaves no single value")
    return machine.stack[0]


class _Machine:
    """The stack and the memo of the pickle machine."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self._memo: list[object] = []

    def step(self, name: str, argument: object) -> None:
        """Run one opcode."""
        if name in _IGNORED:
            return
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        else:
            raise PickleRefusedError(f"its pickle has the opcode {name}, which no plain value needs")

    def put(self, argument: object) -> None:
        """Remember the topmost value under a number, of which each is one more than the last, or under the next one."""
        number = argument if isinstance(argument, int) else len(self._memo)
        if number > len(self._memo):
            raise PickleRefusedError("a value that is remembered under a number out of turn")
        self._memo[number : number + 1] = [self.stack[-1]]

    def get(self, argument: object) -> None:
        """Push a remembered value."""
        self.stack.append(self._memo[argument])  # type: ignore[call-overload]

    def tuple_of(self, count: int) -> None:
        """Replace the topmost values by a tuple of them."""
        items = tuple(self.stack[len(self.stack) - count :])
        if len(items) != count or _MARK in items:
            raise PickleRefusedError("a tuple of values that are not there")
        del self.stack[len(self.stack) - count :]
        self.stack.append(items)

    def marked(self) -> list[object]:
        """Take the values after the last mark, and the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleRefusedError("a container without a beginning")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def extend(self, items: list[object]) -> None:
        """Add values to the list on top."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise PickleRefusedError("values that are added to no list")
        target += items

    def update(self, items: list[object]) -> None:
        """Add keys and values, alternately, to the dict on top."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise PickleRefusedError("keys and values that are added to no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):  # integers can be chosen to collide; hashing a tuple would walk all in it
                raise PickleRefusedError("a dict with keys other than text")
            target[key] = value

    def pop(self, count: int) -> list[object]:
        """Take the topmost values."""
        items = self.stack[-count:]
        if len(items) != count:
            raise PickleRefusedError("values that are not there")
        del self.stack[-count:]
        return items


_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})
_PUSHED = frozenset({
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
})  # fmt: skip
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list, "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple, "MARK": lambda: _MARK,
}  # fmt: skip
_ACTIONS: dict[str, Callable[[_Machine, object], None]] = {
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda machine, _: machine.put(None),
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.extend(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.marked()),
    "SETITEM": lambda machine, _: machine.update(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.marked()),
}
