"""What is in the container image that the Dockerfile's own steps make; how it runs is told by `test_image`."""

import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from exporter import __version__
from tests.e2e.running import ROOT
from tests.image import bare, ours
from tests.image.build import Image
from tests.image.contained import why_not
from tests.image.ours import Ours, made

pytestmark = [pytest.mark.e2e, pytest.mark.release, pytest.mark.skipif(bool(why_not()), reason=why_not())]
DOCUMENTS = "usr/share/doc/gpu-efficiency-exporter"


@pytest.fixture(name="images", scope="module")
def _images() -> Ours:
    return made()


@pytest.fixture(name="image", scope="module")
def _image(images: Ours) -> Image:
    return images.plain


def test_the_labels_and_settings_are_those_of_this_release(image: Image) -> None:
    kinds = {name.removeprefix("org.opencontainers.image."): value for name, value in image.labels.items()}
    assert kinds.pop("title") == "gpu-efficiency-exporter"
    assert kinds.pop("version") == __version__
    assert kinds.pop("licenses") == "Apache-2.0"
    assert kinds.pop("base.name") == ours.PYTHON
    assert set(kinds) == {"description", "revision", "created"}
    assert (image.user, image.ports, image.stop_signal) == ("65532:65532", ["19400"], "SIGTERM")
    assert image.env["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert not [name for name in image.env if name.startswith("GPU_EFFICIENCY_")], "a file could not override it"


def added(image: Image) -> Iterator[Path]:
    """Every path that is not as in the base image."""
    base = bare.bare() / "root"
    for path in sorted(image.root.rglob("*")):
        below = base / path.relative_to(image.root)
        if not os.path.lexists(below) or (path.is_file() and path.lstat().st_mtime_ns != below.lstat().st_mtime_ns):
            yield path


def test_only_its_own_folders_are_added_and_nobody_but_root_can_write_there(image: Image) -> None:
    paths = [path.relative_to(image.root) for path in added(image)]
    tops = ("opt/gpu-efficiency", DOCUMENTS)
    assert not [path for path in paths if not f"{path}/".startswith(tuple(f"{top}/" for top in tops))]
    assert len(paths) > 1000
    for path in paths:
        status = (image.root / path).lstat()
        assert (status.st_uid, status.st_gid) == (0, 0), path
        assert stat.S_ISLNK(status.st_mode) or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
        assert not status.st_mode & (stat.S_ISUID | stat.S_ISGID), path
    removed = [
        p
        for p in (bare.bare() / "root").rglob("*")
        if not os.path.lexists(image.root / p.relative_to(bare.bare() / "root"))
    ]
    assert not removed


def packages(image: Image) -> dict[str, str]:
    """What is installed in the environment, by its normal name."""
    (folder,) = (image.root / "opt/gpu-efficiency").glob("lib/python3.*/site-packages")
    return {normal(found.name): found.version for found in distributions(path=[f"{folder}"])}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_environment_has_what_the_lock_names_and_ours_and_no_pip(image: Image) -> None:
    pinned = re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / "requirements-runtime.lock").read_text(), re.MULTILINE)
    assert packages(image) == {normal(name): version for name, version in pinned} | {
        "gpu-efficiency-exporter": __version__
    }
    assert not list((image.root / "opt/gpu-efficiency/bin").glob("pip*"))


def test_its_bill_of_materials_names_exactly_what_is_installed(image: Image) -> None:
    text = (image.root / DOCUMENTS / "sbom.cdx.json").read_text()
    bill = json.loads(text)
    # Here, because it takes two seconds, and every worker imports every file.
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    version = SchemaVersion[f"V{bill['specVersion'].replace('.', '_')}"]
    assert JsonStrictValidator(version).validate_str(text) is None
    itself = bill["metadata"]["component"]
    named = {normal(part["name"]): part["version"] for part in [itself, *bill["components"]]}
    assert named == packages(image)
    assert itself["name"] == "gpu-efficiency-exporter"
    assert {part["purl"].partition("@")[0] for part in bill["components"]} == {
        f"pkg:pypi/{name}" for name in set(named) - {"gpu-efficiency-exporter"}
    }
    assert bill["metadata"]["timestamp"].startswith("2023-11-14"), "SOURCE_DATE_EPOCH"


def test_every_module_is_compiled_to_the_same_bytes_in_every_build(image: Image) -> None:
    (folder,) = (image.root / "opt/gpu-efficiency").glob("lib/python3.*/site-packages/exporter")
    for source in folder.rglob("*.py"):
        (compiled,) = (source.parent / "__pycache__").glob(f"{source.stem}.cpython-*.pyc")
        assert struct.unpack("<I", compiled.read_bytes()[4:8]) == (1,), "by hash, never compared (PEP 552)"


def test_with_dcgm_it_has_the_libraries_and_bindings_and_nothing_else_more(images: Ours) -> None:
    image, with_dcgm = images
    if with_dcgm is None:
        pytest.skip(ours.without_dcgm())
    before = {path.relative_to(image.root) for path in added(image)}
    after = {path.relative_to(with_dcgm.root) for path in added(with_dcgm)}
    assert before < after
    more = {f"{path}" for path in after - before}
    assert {path.rpartition("/")[2] for path in more if path.startswith("usr/lib/")} == {
        "libdcgm.so.4", "libdcgm.so.4.5.2", "libdcgmmodulehealth.so.4", "libnvperf_dcgm_host.so",
    }  # fmt: skip
    assert "usr/share/datacenter-gpu-manager-4/bindings/python3/dcgm_agent.py" in more
    assert "usr/share/doc/datacenter-gpu-manager-4-core/copyright" in more
    places = ("usr/lib/", "usr/share/datacenter-gpu-manager-4", "usr/share/doc/datacenter-gpu-manager-4-core")
    assert not [path for path in more if not path.startswith(places) or "__pycache__" in path]
