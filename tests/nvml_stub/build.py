"""Builds the stand-in `libnvidia-ml.so.1` from the C beside it.

Run as a program it prints the folder to put first in LD_LIBRARY_PATH, so that any program that loads NVML, such as
a long-running daemon, meets the stand-in:

    LD_LIBRARY_PATH="$(python -m tests.nvml_stub.build)" gpu-efficiency serve
"""

from pathlib import Path

from tests.shared_library import built

LIBRARY = "libnvidia-ml.so.1"


def build(into: Path | None = None) -> Path:
    """Return the folder holding the library; see `built`."""
    return built(Path(__file__).resolve().parent, LIBRARY, into)


if __name__ == "__main__":
    print(build())  # noqa: T201  the folder is this command's answer
