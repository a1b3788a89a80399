"""What NVML says of the driver and each board, for people who look whether an installation works.

Owns questions that no reading needs: the driver's version, MIG and persistence mode, GPM. Refuses hardware counters.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from exporter.sources import SourceError


class DescribedBoard(Struct, frozen=True):
    """One GPU; None is what NVML does not tell."""

    index: int
    name: str = ""
    uuid: str = ""
    gpm: bool | None = None
    mig: bool | None = None
    persistent: bool | None = None
    """Persistence mode: the driver stays loaded while nobody uses the GPU."""
    trouble: str = ""
    """Why it could not be asked."""


class Described(Struct, frozen=True):
    """The driver and its boards."""

    driver: str
    boards: tuple[DescribedBoard, ...]


def describe_nvml() -> Described:
    """Open NVML, ask and shut it down; raises SourceError as `open_nvml` does."""
    from exporter.sources.nvml import initialised  # noqa: PLC0415  it loads the binding

    nvml = initialised()
    try:
        return Described(_told(nvml, nvml.nvmlSystemGetDriverVersion) or "", tuple(_boards(nvml)))
    except nvml.NVMLError as error:
        raise SourceError(f"NVML: the driver's GPUs cannot be counted: {error}") from error
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _boards(nvml: Any) -> Iterator[DescribedBoard]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            yield DescribedBoard(index, trouble=f"{error}")
            continue
        mig = _told(nvml, nvml.nvmlDeviceGetMigMode, handle)
        persistence = _told(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
        gpm = _told(nvml, nvml.nvmlGpmQueryDeviceSupport, handle)
        yield DescribedBoard(
            index,
            name=_told(nvml, nvml.nvmlDeviceGetName, handle) or "",
            uuid=_told(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
            gpm=None if gpm is None else bool(gpm.isSupportedDevice),
            mig=None if mig is None else bool(mig[0]),
            persistent=None if persistence is None else bool(persistence),
        )


def _told(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer; None where there is none."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None
