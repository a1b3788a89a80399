"""What is remembered between reads of the GPUs and of their instances.

Owns the baselines that rates are taken from, and which calls a board has declined. Refuses to call NVML.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from exporter.core.model import NEVER, Device, Process, Spec
from exporter.sources.nvml.sharing import Taken

Fields = dict[str, Any]
"""Fields of `Reading`, by name; what is not in it was not seen."""
NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
MIG = "mig"
"""The probe that tells MIG mode, which no `Reading` carries."""


Call = Callable[["Unit", float], Fields]
"""Takes the unit and the seconds since its last read; raises NVMLError."""


class Probe(NamedTuple):
    """One thing to ask: the fields it gives and the calls that give it, the newer first."""

    fields: tuple[str, ...]
    calls: tuple[Call, ...]


class Unit:
    """What is one Device to the house: a board, what is left of one in MIG mode, or a GPU instance.

    `handle` is None while the driver does not give one; an instance has a handle for each compute instance in it.
    """

    def __init__(self, device: Device, asked: Mapping[str, Probe]) -> None:
        self.device = device
        self.handle: Any = None
        self.address: int | None = None
        """Where the last handle pointed: another one makes what was measured before worthless."""
        self.handles: tuple[Any, ...] = ()
        self.board: Unit | None = None
        """Of an instance, its board."""
        self.gi = -1
        """Of an instance, its GPU instance id."""
        self.doubtful = True
        """INVALID_ARGUMENT may mean that the handle is stale; False once NVML has given the same handle again."""
        self.samples: list[Any] = []
        """The pair of GPM samples, the older first; meaningful while `primed`."""
        self.adopt(asked)

    def adopt(self, asked: Mapping[str, Probe]) -> None:
        """Ask this from now on, and begin anew."""
        self.probes = asked
        self.forget()

    def forget(self) -> None:
        """Drop every baseline, and ask again for what was declined."""
        self.since: int | None = None
        self.calls = {name: list(probe.calls) for name, probe in self.probes.items()}
        self.primed = False
        self.energy: int | None = None
        self.links: list[int] | None = None
        self.stamp: int | None = None
        self.listed: tuple[Process, ...] = ()
        """Its processes, of this read."""
        self.taken = Taken()

    def gives(self) -> Iterator[str]:
        """Yield the fields of `Reading` that it has not declined and can have."""
        for name, probe in self.probes.items():
            if name != MIG and self.calls[name]:
                yield from (field for field in probe.fields if field not in self.device.lacks)


class Board:
    """A board: its own unit, the instances cut from it, and what is known of it for good."""

    def __init__(self, own: Unit, *, spec: Spec | None, gpm: bool, links: int) -> None:
        self.own, self.spec, self.gpm, self.links = own, spec, gpm, links
        self.instances: dict[str, Unit] = {}
        self.mig: bool | None = None
        """MIG mode as last told; None: never told."""
        self.layout: tuple[str, ...] | None = None
        """UUIDs of the MIG devices that `instances` was made from; None: to be laid out anew."""
        self.laid_out_at = NEVER
        self.places: dict[str, tuple[int, ...]] = {}
        """Of each instance, where its handles stand among those devices."""
        self.places_at_most = 0
        self.read_at: int | None = None
        """When its energy counter was last asked."""
        self.recovery = 0
        """nvmlDeviceGpuRecoveryAction_t that it asks for; 0: none."""
        self.examined_at: int | None = None
        """When its health was last asked."""
        self.checks: dict[str, list[Call]] | None = None
        self.wanted: list[tuple[str, int, int]] | None = None
        """What of its health it has not declined: calls, and field ids by name and scope. None: all, as at first."""

    def units(self) -> Iterator[Unit]:
        """Yield what is a Device: the board itself and its instances."""
        yield self.own
        yield from self.instances.values()

    def mark(self, condition: str) -> None:
        """Say why it cannot work, of it and of all that is cut from it; empty: it can."""
        if condition != self.own.device.condition or self.instances:
            for unit in self.units():
                unit.device = replace(unit.device, condition=condition)

    def forget(self) -> None:
        """Begin anew, with a new baseline for each unit."""
        self.read_at = self.examined_at = self.checks = self.wanted = None
        for unit in self.units():
            unit.forget()
