"""Handwritten pages of a dcgm-exporter, and a source that reads them."""

from exporter.core.model import SECOND, Fault, Reading, Spec
from exporter.sources.base import SourceError
from exporter.sources.dcgm_exporter.source import DcgmExporterSource

H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
SPECS = {
    H100: Spec("H100", nvlink_bytes_per_second=450e9),
    L4: Spec("L4"),
}
ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
BUSY = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.95",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.4",
    "DCGM_FI_DEV_POWER_USAGE": "512.250",
}


class Pages:
    """A PageFetcher that returns the given pages in turn, then the last one for ever."""

    def __init__(self, *pages: str | bytes | SourceError) -> None:
        self.pages, self.closed = list(pages), False

    def __call__(self) -> bytes:
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        if isinstance(page, SourceError):
            raise page
        return page if isinstance(page, bytes) else page.encode()

    def close(self) -> None:
        self.closed = True


def gpu(index: int = 0, figures: dict[str, str] | None = None, **labels: str) -> str:
    """Return one GPU's lines; `labels` override or (as "") remove the usual ones."""
    named = {"gpu": str(index), "UUID": f"GPU-{index}", "modelName": H100, "Hostname": "node1", **labels}
    told = ",".join(f'{k}="{v}"' for k, v in named.items() if v)
    lines = [f"{name}{{{told}}} {value}" for name, value in (BUSY if figures is None else figures).items()]
    return "".join(f"{line}\n" for line in lines)


def source(*pages: str | bytes | SourceError, hostname: str = "", max_gap: float = 90.0) -> DcgmExporterSource:
    return DcgmExporterSource(
        "http://node1:9400/metrics",
        fetch=Pages(*pages),
        lookup=SPECS.get,
        hostname=hostname,
        max_gap_seconds=max_gap,
    )


def reading(figures: dict[str, str], **labels: str) -> Reading:
    """Return the reading of a page: the second of two identical reads, one second apart."""
    src = source(gpu(0, figures, **labels))
    src.read(0)
    (only,) = src.read(SECOND).readings
    return only


def kinds(faults: tuple[Fault, ...]) -> list[str]:
    return [fault.kind for fault in faults]
