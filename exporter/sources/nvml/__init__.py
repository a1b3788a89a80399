"""NVML, NVIDIA's own library, through nvidia-ml-py: every GPU's figures without DCGM.

Owns the inventory, the baselines and what each error code means; which call gives which signal is `probes`.
Refuses to fill in: what NVML did not say is None, never zero and never the last good value.

Hopper and later answer GPM (`nvmlGpm*`): hardware counters between two samples, so means over the whole
interval. Older boards give no profiling figures here: their `gpu_utilization` is the mean of the driver's sample
buffer, and PCIe throughput is left out, for `nvmlDeviceGetPcieThroughput` blocks 20 ms a call to measure 20 ms
(NVML reference): 0.3 s a tick on eight GPUs to see 2 % of the interval. Of a GPU in MIG mode nothing is read: its
figures belong to its instances.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from exporter.core.model import MS, SECOND, Device, Fault, Reading, Spec
from exporter.sources import Batch, SourceError
from exporter.sources.nvml.probes import GPM_SHORTEST, MIG, NVLINK, Board, Fields, Gpm, probes
from exporter.specs import find_spec

_DECLINED = ("not_supported", "function_not_found", "argument_version_mismatch", "deprecated")
"""This driver or board does not have the call at all: not a fault, and not worth asking again."""
_FATAL = ("uninitialized", "driver_not_loaded", "lib_rm_version_mismatch")
"""The driver went away under us."""
_GONE = {"gpu_is_lost": "lost", "gpu_not_found": "lost", "reset_required": "reset_required"}
"""The GPU cannot work: its condition."""


class NvmlSource:
    """`Source` over an initialised NVML, which it shuts down when closed; made by `open_nvml`.

    `overrides` are the operator's specs by model name. A GPU in trouble stays in the inventory with a condition,
    and is asked for anew at each read; when it answers, its readings begin again with a new baseline.
    """

    name = "nvml"

    def __init__(self, nvml: Any, *, overrides: Mapping[str, Spec] | None = None) -> None:
        self._nvml = nvml
        self._overrides = overrides or {}
        self._boards: dict[str, Board] = {}
        self._count = 0
        self._faults: list[Fault] = []
        self._closed = False
        self._codes = _error_names(nvml)
        self._gpm = Gpm(nvml, self._metric_fault)
        self._survey(self._ask_count())
        if not self._boards:
            raise SourceError("NVML: the driver lists no GPU that this process may see: try `nvidia-smi -L`")

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that some board here can give; settled after the first read."""
        return frozenset(field for board in self._boards.values() for field in board.gives())

    def read(self, now: int) -> Batch:
        """Read every GPU; see `Source.read`. Raises SourceError when the driver is gone or the source closed."""
        if self._closed:
            raise SourceError("NVML: this source was closed: open a new one")
        count = self._ask_count()
        if count != self._count or any(board.device.condition for board in self._boards.values()):
            self._survey(count)
        readings = tuple(self._readings(now))
        faults, self._faults = tuple(self._faults), []
        return Batch(tuple(board.device for board in self._boards.values()), readings, faults)

    def resync(self) -> None:
        """Forget the baselines; see `Source.resync`. What boards did not support is asked once more."""
        for board in self._boards.values():
            board.forget()

    def close(self) -> None:
        """Free the GPM samples and shut NVML down, once. Never raises."""
        if self._closed:
            return
        self._closed = True
        for sample in [sample for board in self._boards.values() for sample in board.samples]:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(sample)
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    # -- the inventory --

    def _ask_count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise _unusable(error, "asked for the number of GPUs") from error

    def _survey(self, count: int) -> None:
        """Match the driver's list with the boards remembered; a GPU once seen is never forgotten."""
        self._count = count
        for board in self._boards.values():
            board.handle = None
        for index in range(count):
            try:
                self._meet(index)
            except self._nvml.NVMLError as error:
                self._unreachable(index, error)
        for board in self._boards.values():
            if board.handle is None and board.device.condition in ("", "missing"):
                self._condemn(board, "missing", "it is no longer in the driver's list")

    def _meet(self, index: int) -> None:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        if uuid not in self._boards:
            self._boards[uuid] = self._introduce(handle, uuid)
        board = self._boards[uuid]
        board.handle = handle
        board.device = replace(board.device, index=str(index), condition="")
        self._boards.pop(_nameless(index), None)

    def _introduce(self, handle: Any, uuid: str) -> Board:
        nvml = self._nvml
        model, pci = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetPciInfo(handle)
        spec = find_spec(model, f"{pci.pciDeviceId:08x}", overrides=self._overrides)
        lacks = () if self._has_nvlink(handle) else NVLINK
        asked = probes(nvml, self._gpm if self._has_gpm(handle) else None)
        return Board(Device(uuid=uuid, model=model, spec=spec, lacks=lacks), asked)

    def _has_gpm(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except self._nvml.NVMLError as error:
            return not self._declined(error)  # any other error: reading will tell, loudly

    def _has_nvlink(self, handle: Any) -> bool:
        """Whether a link is up; False only where NVML says so. Links end at the first INVALID_ARGUMENT."""
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    return True
            except self._nvml.NVMLError as error:
                return not self._declined(error) and error.value != self._nvml.NVML_ERROR_INVALID_ARGUMENT
        return False

    def _unreachable(self, index: int, error: Any) -> None:
        """Book a GPU whose handle failed: a GPU off the bus often answers UNKNOWN here, not GPU_IS_LOST."""
        self._raise_if_fatal(error)
        if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
            message = f"NVML: GPU {index} is not visible to this process (no permission): it is left out"
            self._faults.append(Fault("nvml_no_permission", message))
            return
        known = (b for b in self._boards.values() if b.handle is None and b.device.index == str(index))
        board = next(known, None) or Board(Device(uuid=_nameless(index), index=str(index)), {})
        self._boards[board.device.uuid] = board
        self._condemn(board, self._gone(error) or "lost", str(error))

    def _condemn(self, board: Board, condition: str, why: str) -> None:
        board.handle = None
        board.forget()
        board.device = replace(board.device, condition=condition)
        self._fault(board, f"gpu_{condition}", f"is {condition}: {why}: find its Xid in dmesg, then reset or drain it")

    # -- the readings --

    def _readings(self, now: int) -> Iterator[Reading]:
        for board in self._boards.values():
            if board.handle is None or (board.since is not None and now <= board.since):
                continue
            try:
                reading = self._read_board(board, now)
            except self._nvml.NVMLError as error:
                self._raise_if_fatal(error)
                self._condemn(board, self._gone(error), str(error))
                continue
            if reading is not None:
                yield reading

    def _read_board(self, board: Board, now: int) -> Reading | None:
        if self._ask(board, MIG, 0.0).get(MIG):
            board.since, board.primed = None, False
            self._fault(board, "mig_not_read", "is in MIG mode: its instances are not read, so it is unobserved")
            return None
        since, board.since = board.since, now
        seconds = 0.0 if since is None else (now - since) / SECOND
        values: Fields = {}
        for name in board.probes:
            if name != MIG:
                values.update(self._ask(board, name, seconds))
        if since is None:
            return None
        if board.calls.get("gpm") and now - since < GPM_SHORTEST:
            ms = (now - since) // MS
            self._fault(board, "interval_too_short", f"was read {ms} ms ago: GPM needs 100 ms between samples")
            return None
        return Reading(uuid=board.device.uuid, start=since, end=now, **values)

    def _ask(self, board: Board, name: str, seconds: float) -> Fields:
        """Make the probe's call, an older one where the newer is declined; a declined call is not made again."""
        calls = board.calls[name]
        while calls:
            try:
                return calls[0](board, seconds)
            except self._nvml.NVMLError as error:
                if self._declined(error):
                    del calls[0]
                    continue
                if self._gone(error) or self._fatal(error):
                    raise
                self._signal_fault(board, name, error.value)
                return {}
        return {}

    # -- what an error code means --

    def _declined(self, error: Any) -> bool:
        return self._codes.get(error.value) in _DECLINED

    def _gone(self, error: Any) -> str:
        return _GONE.get(self._codes.get(error.value, ""), "")

    def _fatal(self, error: Any) -> bool:
        return self._codes.get(error.value) in _FATAL

    def _raise_if_fatal(self, error: Any) -> None:
        if self._fatal(error):
            raise _unusable(error, "read the GPUs") from error

    def _metric_fault(self, board: Board, field: str, code: int) -> None:
        if code != self._nvml.NVML_ERROR_NOT_SUPPORTED:
            self._signal_fault(board, field, code)

    def _signal_fault(self, board: Board, what: str, code: int) -> None:
        kind = self._codes.get(code, str(code))
        self._fault(board, f"nvml_{kind}", f"gave no {what}: {kind} (error {code})")

    def _fault(self, board: Board, kind: str, what: str) -> None:
        message = f"NVML: GPU {board.device.index} ({board.device.uuid}) {what}"
        self._faults.append(Fault(kind, message, board.device.uuid))


def open_nvml(_config: Any) -> NvmlSource:
    """Initialise NVML on this node. Raises SourceError when the library, the driver or every GPU is missing."""
    import pynvml  # noqa: PLC0415  only a node with a driver needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _not_opened(pynvml, error) from error
    try:
        return NvmlSource(pynvml)
    except SourceError:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        raise


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


def _unusable(error: Any, doing: str) -> SourceError:
    return SourceError(
        f"NVML: {doing}, and the driver answered {error} (error {error.value}): it was unloaded or updated under"
        " this process. If `nvidia-smi` works, NVML must be opened anew; after an update, restart this process"
    )


def _error_names(nvml: Any) -> dict[int, str]:
    prefix = "NVML_ERROR_"
    return {getattr(nvml, name): name.removeprefix(prefix).lower() for name in dir(nvml) if name.startswith(prefix)}


def _nameless(index: int) -> str:
    """Stand for a GPU that never gave its UUID, until it does."""
    return f"unknown-{index}"
