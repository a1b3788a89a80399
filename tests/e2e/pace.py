"""A world that runs faster than ours: every time that the product is given is divided by FASTER.

Owns the change of pace in observations, policy, rules and routes; nothing of the product knows of it. The minute over
which the core judges how even a GPU's activity is stays a minute of ours: a story must not depend on it. Refuses to
start anything.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from msgspec import structs
from msgspec.structs import replace

from exporter.core.model import MS, Observation
from exporter.core.policy import Policy

PACES = (24, 8)
"""Seconds of the world in one of ours, one pace after the other where a busy machine does not keep up: sixty of them
must be enough to scrape, evaluate and send for real."""
FASTER = PACES[0]
"""The pace now."""
_LONG_HOLD, _SHORT_HOLD = 600_000, "5m"
"""Milliseconds: an alert that is held for longer, as its exporter may restart, is held for five minutes only: a test
that sees it resolved cannot wait for three quarters of an hour, even of these."""
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION = re.compile(r"(?:\d+(?:ms|[smhdw]))+")
_TIMED = re.compile(rf"(?<=\[){_DURATION.pattern}(?=[]:])|(?<=offset ){_DURATION.pattern}")
"""Ranges and offsets within an expression, and those within the queries of a template."""


@contextmanager
def at_pace(faster: int) -> Iterator[None]:
    """Let the world run so much faster than ours in the block."""
    global FASTER  # noqa: PLW0603  one world at a time in a process
    before, FASTER = FASTER, faster
    try:
        yield
    finally:
        FASTER = before


def period() -> float:
    """Seconds of the world between two observations: half of ours."""
    return FASTER / 2


def milliseconds(duration: str) -> int:
    """Read a duration as Prometheus writes it."""
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdw])", duration))


def sooner(duration: str) -> str:
    """The same duration in our time."""
    return f"{round(milliseconds(duration) / FASTER)}ms"


def faster_rules(text: str) -> str:
    """A file of rules with every duration in our time."""
    tree = yaml.safe_load(text)
    for group in tree["groups"]:
        _hasten(group, "interval")
        for rule in group["rules"]:
            if milliseconds(rule.get("keep_firing_for", "")) > _LONG_HOLD:
                rule["keep_firing_for"] = _SHORT_HOLD
            _hasten(rule, "for", "keep_firing_for")
    return _TIMED.sub(lambda found: sooner(found[0]), yaml.safe_dump(tree, width=1 << 20))


def faster_policy(**own: float) -> str:
    """Every threshold that is a time, in our time, as TOML; `own` are an operator's, in the world's seconds."""
    times = {name: value for name, value in structs.asdict(Policy()).items() if name.endswith("_seconds")} | own
    lines = (f"{name} = {value / FASTER}" for name, value in times.items())
    return "\n".join(("[policy]", *lines, ""))


def faster(seen: Observation) -> Observation:
    """The same observation at its moment in our time; what was used meanwhile is used up faster."""
    return replace(
        seen,
        at=_sooner(seen.at),
        wall=seen.wall // FASTER,
        readings=tuple(
            replace(r, start=_sooner(r.start), end=_sooner(r.end), energy_joules=(r.energy_joules or 0.0) / FASTER)
            for r in seen.readings
        ),
        allocations=None
        if seen.allocations is None
        else tuple(replace(a, start=_sooner(a.start), end=a.end and _sooner(a.end)) for a in seen.allocations),
    )


def _sooner(nanoseconds: int) -> int:
    moment, rest = divmod(nanoseconds, FASTER)
    assert rest == moment % MS == 0, f"{nanoseconds} ns is no whole millisecond in our time"
    return moment


def faster_routes(text: str, url: str) -> dict[str, Any]:
    """Alertmanager's example with its times in our time, and the webhook at `url` behind each receiver that has one."""
    tree: dict[str, Any] = yaml.safe_load(text)
    _hasten(tree["global"], "resolve_timeout")
    _hasten_route(tree["route"])
    for receiver in tree["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = url
    return tree


def _hasten_route(route: dict[str, Any]) -> None:
    _hasten(route, "group_wait", "group_interval", "repeat_interval")
    for child in route.get("routes", ()):
        _hasten_route(child)


def _hasten(place: dict[str, Any], *names: str) -> None:
    place.update({name: sooner(place[name]) for name in names if name in place})
