"""Builds the image a second time and compares it with the one that the tests run: `make release`.

The context's files have other times. Compared are every path with its kind, mode, owner and content, and what an engine
is told of the image; not the times, which BuildKit sets from SOURCE_DATE_EPOCH.
"""

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.image import bare
from tests.image.build import Builder, Image
from tests.image.cache import ROOT
from tests.image.contained import why_not
from tests.image.context import copied
from tests.image.ours import EPOCH, PYTHON, made, wheels


def content(image: Image) -> Iterator[str]:
    """A line for each path of an image, and one for what an engine is told of it."""
    told = msgspec.to_builtins(image, enc_hook=str)
    del told["root"]
    yield msgspec.json.encode(told, order="sorted").decode()
    for path in sorted(image.root.rglob("*")):
        status = path.lstat()
        what = f"{path.readlink()}" if stat.S_ISLNK(status.st_mode) else ""
        if stat.S_ISREG(status.st_mode):
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        yield f"{path.relative_to(image.root)} {status.st_mode:o} {status.st_uid}:{status.st_gid} {what}"


def again(folder: Path) -> Image:
    """Build the image without DCGM in `folder`."""
    context = copied(ROOT, folder / "context")
    for path in context.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    builder = Builder(folder, context=context, wheels=wheels(), bases={PYTHON: bare.python})
    return builder.build((ROOT / "Dockerfile").read_text(encoding="utf-8"), SOURCE_DATE_EPOCH=EPOCH)


def main() -> int:
    """Return 0 if both builds are equal, 1 with what differs on standard error otherwise."""
    if why_not():
        print(f"The image is not built: {why_not()}", file=sys.stderr)  # noqa: T201
        return 1
    with tempfile.TemporaryDirectory() as folder:
        first, second = list(content(made().plain)), list(content(again(Path(folder))))
    differ = sorted(set(first) ^ set(second))
    for line in differ:
        print(f"differs: {line}", file=sys.stderr)  # noqa: T201
    digest = hashlib.sha256("\n".join(first).encode()).hexdigest()
    print(f"image, built twice: {len(first)} paths, {len(differ)} differ, sha256:{digest}")  # noqa: T201
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
