"""The content of a mapping directory."""

import time
from pathlib import Path

from exporter.schedulers.mapping_dir import JobFiles


def read_mapping(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the job ids by file name. Raises OSError."""
    return {name: content.jobs for name, content in JobFiles(path).read(time.time_ns()).items()}
