"""Splits observations, so that a replay sees every change of a GPU's owners and readings, however long these are."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from exporter.core.model import MS, Allocation, Observation, Reading


class ObservationSplitter:
    """Splits the observations of one recording where an allocation begins or ends between two of them.

    Also where it does so within a reading, and where a reading ends that another one or a gap follows. The core's
    results do not depend on how time is divided.
    """

    def __init__(self) -> None:
        self._edges: dict[str, set[int]] = {}
        """Times at which allocations begin or end, nanoseconds on whole milliseconds, by UUID."""
        self._at: int | None = None

    def split(self, observation: Observation) -> Iterator[Observation]:
        """Yield the observation in parts, in order of time; most have one."""
        if observation.allocations is not None:
            self._edges = _edges_of(observation.allocations)
        rest = observation
        for cut in sorted(self._cuts(observation)):
            before, rest = _split_at(rest, cut, earliest=cut if self._at is None else max(cut, self._at))
            yield before
        self._at = observation.at
        yield rest

    def _cuts(self, observation: Observation) -> set[int]:
        since, until = observation.at if self._at is None else self._at, observation.at
        cuts = {edge for edges in self._edges.values() for edge in edges if since < edge < until}
        ends: dict[str, list[int]] = {}
        for reading in observation.readings:
            inside = self._edges.get(reading.uuid, ())
            cuts.update(edge for edge in inside if reading.start < edge < reading.end <= observation.at)
            ends.setdefault(reading.uuid, []).append(reading.end)
        settled = until if observation.settled is None else observation.settled
        for of_one in ends.values():
            cuts.update(end for end in of_one if end < min(until, max(settled, *of_one)))
        return cuts


def _edges_of(allocations: Iterable[Allocation]) -> dict[str, set[int]]:
    edges: dict[str, set[int]] = {}
    for allocation in allocations:
        times = (allocation.start,) if allocation.end is None else (allocation.start, allocation.end)
        edges.setdefault(allocation.uuid, set()).update(time - time % MS for time in times)
    return edges


def _split_at(observation: Observation, cut: int, *, earliest: int) -> tuple[Observation, Observation]:
    """The part before `cut`, observed at `earliest`, and the rest. Owners and inventory belong to the first part."""
    halves = [_cut_reading(reading, cut) for reading in observation.readings]
    settled = observation.at if observation.settled is None else observation.settled
    owners_at = observation.at if observation.allocations_at is None else observation.allocations_at
    before = Observation(
        min(earliest, observation.at),
        observation.wall - observation.at + min(earliest, observation.at),
        readings=tuple(first for first, _ in halves if first is not None),
        settled=min(settled, cut),
        devices=observation.devices,
        allocations=observation.allocations,
        allocations_at=owners_at,
        source=observation.source,
        faults=observation.faults,
        health=observation.health,
    )
    after = replace(
        observation,
        readings=tuple(second for _, second in halves if second is not None),
        devices=None,
        allocations=None,
        allocations_at=owners_at,
        health=(),
    )
    return before, after


def _cut_reading(reading: Reading, cut: int) -> tuple[Reading | None, Reading | None]:
    """The parts of a reading before and after `cut`; energy is divided in proportion to time."""
    if reading.end <= cut or reading.end <= reading.start:
        return reading, None
    if reading.start >= cut:
        return None, reading
    energy, share = reading.energy_joules, (cut - reading.start) / (reading.end - reading.start)
    return (
        replace(reading, end=cut, energy_joules=None if energy is None else energy * share),
        replace(reading, start=cut, energy_joules=None if energy is None else energy * (1 - share)),
    )
