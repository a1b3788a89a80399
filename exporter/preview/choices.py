"""Which thresholds are to be tried: `zombie.batch=15m,30m` becomes policies, one a row of the answer.

Owns the short names and the reading of times. Refuses values that the policy itself would refuse.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import product

import msgspec
from msgspec import Struct, structs

from exporter.config import ConfigError
from exporter.core.policy import Policy

SHORT_NAMES = {
    "zombie.batch": "zombie_batch_seconds",
    "zombie.interactive": "zombie_interactive_seconds",
    "zombie.serving": "zombie_serving_seconds",
    "zombie.duty": "zombie_duty",
    "hang": "hang_seconds",
    "no_process": "no_process_seconds",
}
BASELINE = "as configured"
MOST_ROWS = 24
"""Each row is a whole ledger, or a pass over all samples."""
ZOMBIE, HUNG, NO_PROCESS = "zombie", "hung", "no_process"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)")


class Row(Struct, frozen=True):
    """One line of the answer: a policy, and what it is called."""

    label: str
    settings: dict[str, float]
    """The thresholds that differ from the configuration, by their own names."""
    policy: Policy


def duration(text: str) -> float:
    """Seconds in "90s", "30m", "2h", "1d" or "1800"; raises ValueError."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time such as 90s, 30m, 2h, 1d, or seconds")
    return float(found[1]) * _UNITS[found[2]]


def rows(configured: Policy, wanted: Iterable[str]) -> list[Row]:
    """The configured policy, then one row for each combination of the values wanted; raises ConfigError."""
    choices: dict[str, list[tuple[str, float]]] = {}
    for text in wanted:
        name, values = _choice(text)
        choices.setdefault(name, []).extend(values)
    found = [Row(BASELINE, {}, configured)]
    for combination in product(*choices.values()):
        settings = {_field(name): value for name, (_, value) in zip(choices, combination, strict=True)}
        label = " ".join(f"{name}={text}" for name, (text, _) in zip(choices, combination, strict=True))
        found.append(Row(label, settings, _policy(configured, settings, label)))
    if len(found) > MOST_ROWS:
        raise ConfigError(f"--policy: {len(found) - 1} combinations of values; {MOST_ROWS - 1} at most")
    return found


def _choice(text: str) -> tuple[str, list[tuple[str, float]]]:
    """A name and its values, each as it was written and as a number."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--policy {text}: is not NAME=VALUE (example: zombie.batch=30m)")
    return name, [(value.strip(), _value(text, _field(name), value)) for value in values.split(",")]


def _field(name: str) -> str:
    field = SHORT_NAMES.get(name, name)
    if field not in _numbers():
        known = ", ".join((*SHORT_NAMES, *sorted(set(_numbers()) - set(SHORT_NAMES.values()))))
        raise ConfigError(f"--policy: there is no threshold {name!r}; known are {known}")
    return field


def _numbers() -> list[str]:
    """Thresholds that are one number."""
    return [field.name for field in structs.fields(Policy) if not isinstance(field.default, tuple)]


def _value(text: str, field: str, value: str) -> float:
    try:
        return duration(value) if field.endswith("_seconds") else float(value)
    except ValueError as err:
        why = str(err) if field.endswith("_seconds") else f"{value!r} is not a number"
        raise ConfigError(f"--policy {text}: {why}") from err


def _policy(configured: Policy, settings: dict[str, float], label: str) -> Policy:
    try:
        return msgspec.convert(structs.asdict(configured) | settings, Policy, strict=False)
    except msgspec.ValidationError as err:
        raise ConfigError(f"--policy {label}: {err}") from err


def triggers(found: Sequence[Row]) -> frozenset[str]:
    """Which states take a GPU back, the same in every row: those that the thresholds tried lead to."""
    names = {name for row in found for name in row.settings}
    return frozenset(_trigger(name) for name in names)


def _trigger(field: str) -> str:
    if field == SHORT_NAMES["no_process"]:
        return NO_PROCESS
    return HUNG if field.startswith(("hang_", "spin_")) else ZOMBIE
