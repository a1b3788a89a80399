"""What NVML's answers mean: a refusal for good, a fault of one signal, the end of a GPU, a handle or the driver.

Owns the meaning of error codes and the faults told since the last read. Refuses to act on them: who asked does.
"""

from typing import Any

from exporter.core.model import Fault
from exporter.sources import SourceError
from exporter.sources.nvml.units import Call, Fields, Unit

_DECLINED = ("not_supported", "function_not_found", "argument_version_mismatch", "deprecated")
"""This driver or board does not have the call at all: not a fault, and not worth asking again."""
_FATAL = ("uninitialized", "driver_not_loaded", "lib_rm_version_mismatch")
"""The driver went away under us."""
_GONE = {"gpu_is_lost": "lost", "gpu_not_found": "lost", "reset_required": "reset_required"}
"""The GPU cannot work: its condition."""


class Asking:
    """Makes a unit's calls; takes the binding as an argument, for only `open_nvml` imports it."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        prefix = "NVML_ERROR_"
        self._names: dict[int, str] = {
            getattr(nvml, name): name.removeprefix(prefix).lower() for name in dir(nvml) if name.startswith(prefix)
        }
        self._faults: list[Fault] = []

    def ask(self, unit: Unit, name: str, seconds: float = 0.0) -> Fields:
        """Make the probe's call; see `first`."""
        return self.first(unit, unit.calls[name], what=name, seconds=seconds)

    def first(self, unit: Unit, calls: list[Call], *, what: str, seconds: float = 0.0) -> Fields:
        """Make the first of `calls` that is not declined; a declined one is dropped and not made again.

        Raises NVMLError when the GPU, the driver, or the handle itself is no longer good. Any other error costs the
        signal a fault.
        """
        while calls:
            try:
                return calls[0](unit, seconds)
            except self.nvml.NVMLError as error:
                if self.declined(error):
                    del calls[0]
                    continue
                if self.lost(unit, error):
                    raise
                self.signal_fault(unit, what, error.value)
                return {}
        return {}

    def declined(self, error: Any) -> bool:
        """Whether this driver or board has no such call."""
        return self._names.get(error.value) in _DECLINED

    def gone(self, error: Any) -> str:
        """The condition of a GPU that gave this error; empty when it says nothing of that kind."""
        return _GONE.get(self._names.get(error.value, ""), "")

    def fatal(self, error: Any) -> bool:
        """Whether the driver went away under us."""
        return self._names.get(error.value) in _FATAL

    def ends(self, error: Any) -> bool:
        """Whether there is nothing more to be had from this GPU, or from any."""
        return bool(self.gone(error)) or self.fatal(error)

    def stale(self, error: Any) -> bool:
        """Whether the handle is no longer good: a GPU that was reset has another."""
        return bool(error.value == self.nvml.NVML_ERROR_INVALID_ARGUMENT)

    def lost(self, unit: Unit, error: Any) -> bool:
        """Whether the unit cannot be asked on: nothing more to be had, or by this handle not."""
        return self.ends(error) or (unit.doubtful and self.stale(error))

    def raise_if_fatal(self, error: Any, doing: str) -> None:
        """Turn the loss of the driver into a SourceError."""
        if self.fatal(error):
            raise unusable(error, doing) from error

    def metric_fault(self, unit: Unit, field: str, code: int) -> None:
        """Tell of one GPM metric that failed; that the board has no such metric is not a fault."""
        if code != self.nvml.NVML_ERROR_NOT_SUPPORTED:
            self.signal_fault(unit, field, code)

    def signal_fault(self, unit: Unit, what: str, code: int) -> None:
        """Tell of one signal that did not come, in NVML's words."""
        kind = self._names.get(code, str(code))
        self.fault(unit, f"nvml_{kind}", f"gave no {what}: {kind} (error {code})")

    def fault(self, unit: Unit, kind: str, what: str) -> None:
        """Tell what is wrong with a GPU or an instance of it."""
        device = unit.device
        self.tell(Fault(kind, f"NVML: GPU {device.index} ({device.uuid}) {what}", device.uuid))

    def tell(self, fault: Fault) -> None:
        """Keep a fault for the next `told`."""
        self._faults.append(fault)

    def told(self) -> tuple[Fault, ...]:
        """Give the faults since the last call, each once: what stands is told at every read, by whoever finds it."""
        faults, self._faults = tuple(dict.fromkeys(self._faults)), []
        return faults


def unusable(error: Any, doing: str) -> SourceError:
    """Say that the driver answers nobody here any longer, and what to do."""
    return SourceError(
        f"NVML: {doing}, and the driver answered {error} (error {error.value}): it was unloaded or updated under"
        " this process. If `nvidia-smi` works, NVML must be opened anew; after an update, restart this process"
    )
