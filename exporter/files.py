"""Small files written whole or not at all: a reader never finds half of one.

Owns the writing. Refuses to say what went wrong: OSError passes through, the caller knows what the file is for.
"""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` (mode 0644) in the place of whatever `path` was; folders above it are made. Raises OSError."""
    _make_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 hides it from a daemon that runs as somebody else
            os.fsync(file.fileno())  # or a power cut leaves the new name on an empty file
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    """With mode 0755 whatever the umask, for the same reason."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in made:
        place.chmod(0o755)
