"""One test over all rows of a table, for checks that run faster than a test is collected."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

Check = Callable[..., None]


def each(names: str, cases: Iterable[Any], ids: Callable[[Any], object] = repr) -> Callable[[Check], Check]:
    """Call the check once for each case, as `pytest.mark.parametrize` would, and report all the cases that fail.

    `names` are the arguments that a case fills, separated by commas; the others are fixtures. A check that changes
    what a fixture gave it needs tests of its own.
    """
    arguments, rows = [name.strip() for name in names.split(",")], list(cases)
    if not rows:
        raise ValueError(f"no case gives a value to {names}")

    def over(check: Check) -> Check:
        @wraps(check)
        def test(**fixtures: Any) -> None:
            faults = []
            for row in rows:
                values: Sequence[Any] = row if len(arguments) > 1 else (row,)
                try:
                    check(**fixtures, **dict(zip(arguments, values, strict=True)))
                except Exception as error:  # noqa: BLE001 - any fault is reported with its case
                    error.add_note(f"in the case {', '.join(str(ids(value)) for value in values)}")
                    faults.append(error)
            if faults:
                raise ExceptionGroup(f"{len(faults)} of {len(rows)} cases fail", faults)

        kept = inspect.signature(check)
        wanted = [value for name, value in kept.parameters.items() if name not in arguments]
        test.__signature__ = kept.replace(parameters=wanted)  # type: ignore[attr-defined]
        return test

    return over
