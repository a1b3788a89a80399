"""Who has a compute context on which GPU, for sources that show no processes, and which share is whose.

Owns handles and names, and what several processes on one GPU used of it. Refuses hardware counters: this may be asked
while another source reads them, and the driver's samples of processes are none.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from exporter.core.model import Process
from exporter.sources import SourceError
from exporter.sources.nvml.asking import Asking
from exporter.sources.nvml.sharing import Samples, Taken, samples_of, with_use


class _Shared:
    """What is remembered of a GPU that several processes share."""

    def __init__(self, calls: tuple[Samples, ...]) -> None:
        self.taken, self.calls = Taken(), list(calls)


class ProcessList:
    """The driver's list by UUID of the GPU or MIG device, as sources name them; made by `open_processes`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml, self._declined = nvml, Asking(nvml).declined
        self._shared: dict[str, _Shared] = {}

    def __call__(self) -> dict[str, tuple[Process, ...]]:
        """Processes of every device that answers. Raises SourceError when the driver does not.

        Of several on one GPU each has its `sm_active` since the last call, see `sharing`; None where that failed.
        """
        nvml = self._nvml
        try:
            found = dict(pair for index in range(nvml.nvmlDeviceGetCount()) for pair in self._of_board(index))
        except nvml.NVMLError as error:
            raise SourceError(f"the driver's process list could not be read: {error}") from error
        self._shared = {uuid: shared for uuid, shared in self._shared.items() if len(found.get(uuid, ())) > 1}
        return found

    def close(self) -> None:
        """Let go of NVML. Never raises."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _of_board(self, index: int) -> Iterator[tuple[str, tuple[Process, ...]]]:
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # a GPU in trouble shows no processes; the others do
            board = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(board)
            if self._cut(board):
                yield uuid, ()
                yield from self._of_instances(board, uuid)
            else:
                yield uuid, self._used(board, uuid, self._processes(board))

    def _used(self, board: Any, uuid: str, listed: tuple[Process, ...]) -> tuple[Process, ...]:
        if len(listed) < 2:  # noqa: PLR2004  with one there is nothing to share
            return listed
        shared = self._shared.setdefault(uuid, _Shared(samples_of(self._nvml)))
        while shared.calls:
            try:
                return with_use(self._nvml, shared.calls[0], handle=board, taken=shared.taken, listed=listed)
            except self._nvml.NVMLError as error:
                if not self._declined(error):
                    break
                del shared.calls[0]
        return listed

    def _cut(self, board: Any) -> bool:
        with suppress(self._nvml.NVMLError):
            return bool(self._nvml.nvmlDeviceGetMigMode(board)[0] == self._nvml.NVML_DEVICE_MIG_ENABLE)
        return False

    def _of_instances(self, board: Any, uuid: str) -> Iterator[tuple[str, tuple[Process, ...]]]:
        """By the MIG device's own name, and by that of a GPU instance with several of them."""
        nvml, together = self._nvml, dict[str, tuple[Process, ...]]()
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(board)):
            with suppress(nvml.NVMLError):  # an empty place answers NOT_FOUND
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, place)
                found = self._processes(device)
                instance = f"{uuid}/{nvml.nvmlDeviceGetGpuInstanceId(device)}"
                together[instance] = (*together.get(instance, ()), *found)
                yield nvml.nvmlDeviceGetUUID(device), found
        yield from together.items()

    def _processes(self, handle: Any) -> tuple[Process, ...]:
        listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return tuple(Process(pid=each.pid, memory_bytes=each.usedGpuMemory) for each in listed)


def open_processes() -> ProcessList:
    """Initialise NVML for the list alone. Raises SourceError where there is no driver library."""
    import pynvml  # noqa: PLC0415  only a node with a driver needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SourceError(f"the driver's process list cannot be had: {error}") from error
    return ProcessList(pynvml)
