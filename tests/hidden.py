"""Hides signals of simulated observations, as on a node that cannot measure them."""

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import fields, replace

from exporter.core.model import Observation, Reading

_SIGNALS = frozenset(field.name for field in fields(Reading)) - {"uuid", "start", "end", "distrust"}
_OTHER_SIGNALS = frozenset({"owner", "spec"})


def without(observations: Iterable[Observation], *, signals: Collection[str]) -> Iterator[Observation]:
    """Yield the same observations as from a node without these signals: fields of Reading, "owner" or "spec".

    "owner" removes the allocations, "spec" the devices' specs. Raises ValueError for any other name.
    """
    unknown = sorted(set(signals) - _SIGNALS - _OTHER_SIGNALS)
    if unknown:
        known = ", ".join(sorted(_SIGNALS | _OTHER_SIGNALS))
        raise ValueError(f"unknown signal {', '.join(unknown)}; known: {known}")
    blank: dict[str, None] = dict.fromkeys(_SIGNALS.intersection(signals))
    return (_blanked(observation, blank, frozenset(signals) & _OTHER_SIGNALS) for observation in observations)


def _blanked(observation: Observation, blank: dict[str, None], whole: frozenset[str]) -> Observation:
    devices = observation.devices
    if devices is not None and "spec" in whole:
        devices = tuple(replace(device, spec=None) for device in devices)
    return replace(
        observation,
        readings=tuple(replace(reading, **blank) for reading in observation.readings),
        devices=devices,
        allocations=None if "owner" in whole else observation.allocations,
    )
