"""Builds the stand-in `libdcgm.so.4` from the C beside it.

Run as a program it prints a folder of NVIDIA's Python bindings that load the stand-in, so that any program that reads
DCGM through them meets it:

    DCGM_BINDINGS="$(python -m tests.dcgm_stub.build)" gpu-efficiency serve
"""

from pathlib import Path

from tests.dcgm_stub.bindings import missing, unpack
from tests.shared_library import built

LIBRARY = "libdcgm.so.4"


def build(into: Path | None = None) -> Path:
    """Return the folder holding the library; see `built`."""
    return built(Path(__file__).resolve().parent, LIBRARY, into)


def main() -> None:
    """Print the folder of bindings over the stand-in."""
    if reason := missing():
        raise SystemExit(reason)
    library = build()
    print(unpack(library / "bindings", library=library))  # noqa: T201  the folder is this command's answer


if __name__ == "__main__":
    main()
