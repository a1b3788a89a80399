"""NVML, NVIDIA's own library, through nvidia-ml-py: every GPU's figures without DCGM.

Owns the order of a read, and the opening and closing of the library; what is asked is `probes`, what an answer means
`asking`, which boards there are `inventory`, how one is cut up `mig`, how it fares `health`. Refuses to fill in: what
NVML did not say is None, never zero and never the last good value.

Hopper and later answer GPM (`nvmlGpm*`): hardware counters between two samples, so means over the whole
interval. Older boards give no profiling figures here: their `gpu_utilization` is the mean of the driver's sample
buffer, and PCIe throughput is left out, for `nvmlDeviceGetPcieThroughput` blocks 20 ms a call to measure 20 ms
(NVML reference): 0.3 s a tick on eight GPUs to see 2 % of the interval. A vGPU guest gives what it gives.

In MIG mode each GPU instance is a Device, and so is what is left of the board. Nobody measures an instance's energy:
it is the board's, by weight. Its power, temperature and links are the board's alone, its SM clock is the board's too.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from exporter.core.model import MS, PPM, SECOND, Reading, Spec
from exporter.sources import Batch, SourceError
from exporter.sources.nvml.asking import Asking
from exporter.sources.nvml.gpm import COMPUTE, LINKS, SHORTEST, Gpm, free
from exporter.sources.nvml.health import Examiner
from exporter.sources.nvml.inventory import Inventory, none_visible
from exporter.sources.nvml.mig import Mig
from exporter.sources.nvml.probes import NOTHING_RUNS
from exporter.sources.nvml.units import MIG, Board, Fields, Unit


class NvmlSource:
    """`Source` over an initialised NVML, which it shuts down when closed; made by `open_nvml`.

    `overrides` are the operator's specs by model name. A GPU in trouble stays in the inventory with a condition,
    and is asked for anew at each read; when it answers, its readings begin again with a new baseline.
    """

    name = "nvml"

    def __init__(self, nvml: Any, *, overrides: Mapping[str, Spec] | None = None) -> None:
        self._nvml, specs = nvml, overrides or {}
        self._asking = asking = Asking(nvml)
        whole = Gpm(nvml, COMPUTE + LINKS, fault=asking.metric_fault)
        self._mig = Mig(asking, (whole, Gpm(nvml, COMPUTE, fault=asking.metric_fault)), specs)
        self._inventory = Inventory(asking, whole, specs)
        self._examiner = Examiner(asking)
        self._boards = self._inventory.boards
        self._closed = False
        self._inventory.refresh()
        none_visible(self._boards)
        self._examiner.begin(self._boards.values())
        self._inventory.changed = False

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that some board here can give; settled after the first read."""
        units = [unit for board in self._boards.values() for unit in board.units()]
        known = NOTHING_RUNS if any(board.mig for board in self._boards.values()) else ()
        return frozenset(field for unit in units for field in unit.gives()).union(known)

    def read(self, now: int) -> Batch:
        """Read every GPU; see `Source.read`. Raises SourceError when the driver is gone or the source closed."""
        if self._closed:
            raise SourceError("NVML: this source was closed: open a new one")
        self._inventory.refresh()
        boards = tuple(self._boards.values())
        readings = tuple(reading for board in boards for reading in self._guarded(board, now))
        changed, self._inventory.changed = self._inventory.changed, False
        health = tuple(self._examiner.examine(boards, now, changed=changed))
        devices = tuple(unit.device for board in boards for unit in board.units())
        early = [board.read_at for board in boards if board.read_at is not None and _unripe(board, now)]
        return Batch(devices, readings, self._asking.told(), health, min(early, default=None))

    def resync(self) -> None:
        """Forget the baselines; see `Source.resync`. What boards did not support is asked once more."""
        for board in self._boards.values():
            board.forget()

    def pause(self) -> None:
        """Give the GPM samples back; see `Source.pause`. Critical errors go on being collected."""
        for board in self._boards.values():
            board.forget()
            self._free(board)

    def close(self) -> None:
        """Free the GPM samples and the event set, and shut NVML down, once. Never raises."""
        if self._closed:
            return
        self._closed = True
        for board in self._boards.values():
            self._free(board)
        self._examiner.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _free(self, board: Board) -> None:
        for unit in board.units():
            free(self._nvml, unit)

    # -- the readings --

    def _guarded(self, board: Board, now: int) -> list[Reading]:
        """Read a board and its instances; all of them or none, for a board lost halfway was lost."""
        if board.own.handle is None or _unripe(board, now):
            return []
        try:
            return list(self._read(board, now))
        except self._nvml.NVMLError as error:
            self._asking.raise_if_fatal(error, "read the GPUs")
            condition = self._asking.gone(error)
            if condition:
                self._inventory.condemn(board, condition, str(error))
            else:
                self._inventory.drop(board)
                said = f"no longer knows its handle: {error}: it was reset, or is being; it is asked for anew"
                self._asking.fault(board.own, "handle_stale", said)
            return []

    def _read(self, board: Board, now: int) -> Iterator[Reading]:
        own = board.own
        if not self._mig.follow(board, now):
            board.forget()
            return
        board.read_at = now
        values = self._values(own, now)
        if not values and any(own.calls.values()):
            self._inventory.drop(board)  # it said nothing at all: the handle may have gone stale
            return
        if not board.mig:
            yield from self._reading(own, now, values)
            return
        left = {**values, **NOTHING_RUNS, **_share(values, own)}
        yield from self._reading(own, now, left)
        for unit in board.instances.values():
            found = {**self._values(unit, now), **_share(values, unit)}
            if "sm_clock_hz" in values:
                found["sm_clock_hz"] = values["sm_clock_hz"]
            yield from self._reading(unit, now, found)

    def _values(self, unit: Unit, now: int) -> Fields:
        seconds = 0.0 if unit.since is None else (now - unit.since) / SECOND
        values: Fields = {}
        for name in unit.probes:
            if name != MIG:
                values.update(self._asking.ask(unit, name, seconds))
        return values

    def _reading(self, unit: Unit, now: int, values: Fields) -> Iterator[Reading]:
        since, unit.since = unit.since, now
        if since is None:
            return
        yield Reading(uuid=unit.device.uuid, start=since, end=now, **values)


def _unripe(board: Board, now: int) -> bool:
    """Whether it is too soon to read it again; its next reading then covers this time too."""
    if board.read_at is None:
        return False
    shortest = SHORTEST if any(unit.calls.get("gpm") for unit in board.units()) else MS
    return now - board.read_at < shortest


def _share(values: Fields, unit: Unit) -> Fields:
    """Give a unit its part of the board's energy."""
    energy = values.get("energy_joules")
    return {} if energy is None else {"energy_joules": energy * unit.device.weight / PPM}


def open_nvml(config: Any) -> NvmlSource:
    """Initialise NVML on this node. Raises SourceError when the library, the driver or every GPU is missing."""
    nvml = initialised()
    try:
        return NvmlSource(nvml, overrides=None if config is None else config.overrides())
    except SourceError:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        raise


def initialised() -> Any:
    """The binding, its library initialised: whoever has it shuts it down. Raises SourceError."""
    import pynvml  # noqa: PLC0415  only a node with a driver needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _not_opened(pynvml, error) from error
    return pynvml


def _not_opened(nvml: Any, error: Any) -> SourceError:
    """Turn nvmlInit's code into what to do about it."""
    advice = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 not found: is the NVIDIA driver installed on this"
        " node, and in a container, mounted by the NVIDIA runtime (NVIDIA_DRIVER_CAPABILITIES=utility)?",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the kernel driver is not loaded: run `nvidia-smi`, then see dmesg",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "libnvidia-ml.so.1 and the loaded kernel driver differ in"
        " version: reboot or reload the driver, then restart this process",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to talk to the driver: may this user open /dev/nvidiactl?",
    }
    return SourceError(f"NVML: {advice.get(error.value, f'nvmlInit failed: {error} (error {error.value})')}")
