"""The smallest MIG slice that would have held what a job needed so far.

Owns the table of slices and the peak of a need. Refuses to book anything: a slice is advice, and the seconds beyond it
stay what they were.

Source: NVIDIA's Multi-Instance GPU user guide. Memory comes in eighths of the board (an A30's in quarters), and a
slice has the same share of the memory's bandwidth.
"""

from math import floor

from msgspec import Struct

from exporter.core.evidence import Evidence
from exporter.core.model import PPM, SECOND, Owner, Spec
from exporter.core.policy import Policy

_SLICES = {7: ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4)), 4: ((1, 1), (2, 2))}
"""By the compute slices of a whole board: compute and memory slices of each profile, the smallest first."""


class Slice(Struct, frozen=True):
    """A MIG profile, as a part of its board."""

    profile: str
    """As NVIDIA writes it: 1g.10gb."""
    compute: int
    """Parts per million of the board's compute slices."""
    memory: float
    """Share of its memory, and of its bandwidth."""


def slices(spec: Spec) -> tuple[Slice, ...]:
    """Profiles smaller than the whole board, the smallest first; none where it has no MIG or is not known."""
    whole, memory = spec.slices, spec.memory_gb
    if whole not in _SLICES or memory is None:
        return ()
    parts = 8 if whole == 7 else 4  # noqa: PLR2004  as the guide has it
    return tuple(
        Slice(f"{g}g.{floor(memory * m / parts + 0.5)}gb", g * PPM // whole, m / parts) for g, m in _SLICES[whole]
    )


class Need(Struct, eq=False):
    """The most that a job on one GPU has used of it so far, and the time beyond the slice that would have held it."""

    sm: float = 0.0
    bandwidth: float = 0.0
    memory: float = 0.0
    """Peaks, as shares of the GPU."""
    known: bool = True
    """Nothing that must be known was ever missing."""
    seen: int = 0
    """Nanoseconds of readings."""
    fitting: Slice | None = None
    unneeded: int = 0
    """Nanoseconds of the GPU beyond the slice, since it was known."""

    def see(self, ev: Evidence, start: int, end: int, *, owner: Owner, policy: Policy) -> None:
        """Take in one piece of a reading of a whole GPU that the job has for itself."""
        reading = ev.reading
        used, total = reading.memory_used_bytes, reading.memory_total_bytes
        if ev.distrust or ev.sm is None or ev.dram is None or used is None or not total:
            if not ev.distrust:  # what was not told may have been needed
                self.known, self.fitting = False, None
            return
        self.seen += end - start
        share = used / total
        if ev.sm > self.sm or ev.dram > self.bandwidth or share > self.memory:
            self.sm, self.bandwidth = max(self.sm, ev.sm), max(self.bandwidth, ev.dram)
            self.memory = max(self.memory, share)
            self.fitting = None
        wait = policy.size_batch_seconds if owner.workload_class == "batch" else policy.size_serving_seconds
        if self.fitting is None and self.known and self.seen >= wait * SECOND:
            self.fitting = self._smallest(ev.device.spec, policy)
        if self.fitting is not None and self.known:
            self.unneeded += (end - start) * (PPM - self.fitting.compute) // PPM

    def _smallest(self, spec: Spec | None, policy: Policy) -> Slice | None:
        for part in slices(spec) if spec is not None else ():
            roomy = self.memory <= part.memory * policy.slice_memory_share and self.bandwidth <= part.memory
            if roomy and self.sm * PPM <= part.compute:
                return part
        return None
