"""The images of this tree, with and without DCGM, made by running its Dockerfile, and kept until that changes.

Run as `python -m tests.image.ours` it fetches what a registry and a package index would give, and builds nothing.

Owns the context, the wheels and the images at hand. Refuses a registry: what stands for it is in `bare` and here.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.dcgm_stub import bindings
from tests.dcgm_stub import build as stub
from tests.image import bare
from tests.image.build import Builder, Image
from tests.image.cache import ROOT, kept
from tests.image.contained import why_not
from tests.image.context import context, copied
from tests.shared_library import compiler

PYTHON = "docker.io/library/python:3.11-slim-bookworm"
"""The default of PYTHON_IMAGE."""
DCGM = "nvcr.io/nvidia/cloud-native/dcgm:4.5.2-1-ubuntu22.04"
"""The default of DCGM_IMAGE."""
EPOCH = "1700000000"
_LOCKS = ("requirements-image.lock", "requirements-runtime.lock")


class Ours(NamedTuple):
    """The two images."""

    plain: Image
    with_dcgm: Image | None
    """None where there is nothing that could stand in for NVIDIA's image."""


def made() -> Ours:
    """Both, from `.cache` if nothing they are made of has changed."""
    folder = kept("ours", _inputs(), _make)
    dcgm = folder / "with_dcgm.json"
    return Ours(_read(folder / "plain.json"), _read(dcgm) if dcgm.exists() else None)


def _inputs() -> Iterator[bytes]:
    yield f"{bare.bare()} {without_dcgm()}".encode()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), ROOT / "Dockerfile", ROOT / ".dockerignore"):
        yield path.read_bytes()
    for name in context(ROOT):
        yield name.encode()
        yield (ROOT / name).read_bytes()


def _make(folder: Path) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    bases = {PYTHON: bare.python, DCGM: _dcgm}
    builder = Builder(folder / "work", context=copied(ROOT, folder / "work/context"), wheels=wheels(), bases=bases)
    _write(builder.build(text, SOURCE_DATE_EPOCH=EPOCH), folder / "plain")
    if not without_dcgm():
        again = builder.build(text, again="build", SOURCE_DATE_EPOCH=EPOCH, WITH_DCGM="1")
        _write(again, folder / "with_dcgm")
    shutil.rmtree(folder / "work")


def _write(image: Image, place: Path) -> None:
    image.root.rename(place)
    place.with_suffix(".json").write_bytes(msgspec.json.encode(image, enc_hook=str))


def _read(file: Path) -> Image:
    image = msgspec.json.decode(file.read_bytes(), type=Image, dec_hook=lambda kind, text: kind(text))
    image.root = file.with_suffix("")
    return image


def without_dcgm() -> str:
    """Say why nothing can stand in for NVIDIA's image, as the reason of a skip; empty when something can."""
    return bindings.missing() or (
        "" if compiler() else "needs NVIDIA's DCGM bindings, and a C compiler for what they load"
    )


def _dcgm(root: Path) -> Image:
    """NVIDIA's own bindings and our stand-in of its library, where the packages of DCGM 4 put theirs."""
    image = bare.python(root)
    libraries = root / f"usr/lib/{platform.machine()}-linux-gnu"
    shutil.copy2(stub.build() / stub.LIBRARY, libraries / f"{stub.LIBRARY}.5.2")
    for name in (stub.LIBRARY, "libdcgmmodulehealth.so.4", "libnvperf_dcgm_host.so", "libdcgm_cublas_proxy12.so.4"):
        (libraries / name).symlink_to(f"{stub.LIBRARY}.5.2")
    bindings.unpack(root / "usr/share/datacenter-gpu-manager-4/bindings/python3")
    (root / "usr/share/doc/datacenter-gpu-manager-4-core").mkdir()
    (root / "usr/share/doc/datacenter-gpu-manager-4-core/copyright").write_text("NVIDIA's\n")
    return image


def wheels() -> Path:
    """Every wheel of both locks, fetched by this machine's pip from wherever it fetches."""
    return kept("wheels", [(ROOT / name).read_bytes() for name in _LOCKS], _fetch)


def _fetch(folder: Path) -> None:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--python-version", "3.11", "--only-binary", ":all:", "--dest", f"{folder}"]
    for lock in _LOCKS:
        subprocess.run([*words, "--require-hashes", "-r", f"{ROOT / lock}"], check=True, timeout=300)


if __name__ == "__main__" and not why_not():
    bare.bare()
    wheels()
