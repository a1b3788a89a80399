"""Builds the Debian package of the last commit into dist/: `make deb`. `python -m release` builds it too.

It has the wheel and its pinned dependencies in /opt/gpu-efficiency, where docs/bare-metal.md puts them, so that units,
drop-ins and pages are the same for both. Libraries are compiled for one Python: the package is for the release of
Debian whose `python3` has the version of the Python that builds it, 3.11 for Debian 12.
"""

import gzip
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter import __version__
from release import build, installed
from release.build import ReleaseError, run

NAME = "gpu-efficiency-exporter"
HOME = "opt/gpu-efficiency"
CONFIG = "etc/gpu-efficiency/config.toml"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/gpu-efficiency",
    "zsh": "usr/share/zsh/vendor-completions/_gpu-efficiency",
    "fish": "usr/share/fish/vendor_completions.d/gpu-efficiency.fish",
}
_SCRIPTS = ("postinst", "prerm", "postrm")
_COMMAND = f"""#!/{HOME}/bin/python
import sys

from exporter.cli import main

sys.exit(main())
"""
_COMPLETE = """
import sys
from contextlib import redirect_stdout

from exporter.cli import main

for shell, name in zip(sys.argv[1::2], sys.argv[2::2]):
    with open(name, "w", encoding="utf-8") as file, redirect_stdout(file):
        main(["completion", shell])
"""
"""Writes all of them in one process, given each shell and file."""
_PIPS = ("RECORD", "direct_url.json")
"""What tells pip where a library is from and which files to change: they are dpkg's."""
_GLIBC = re.compile(r"^Tag: .*manylinux_(\d+)_(\d+)_", re.MULTILINE)
_CONTROL = """Package: {name}
Version: {version}
Architecture: {architecture}
Maintainer: The maintainers of gpu-efficiency-exporter
Installed-Size: {size}
Depends: {python}, libc6 (>= {glibc}), libgcc-s1, libstdc++6, adduser
Recommends: systemd
Suggests: bash-completion, prometheus
Section: net
Priority: optional
Description: exporter that accounts for every paid GPU-second
 A daemon for GPU nodes. It divides the paid time of each GPU between useful
 work and named leaks, from the counters of DCGM or NVML, and exports the
 result to Prometheus.
"""


def debian_version(version: str) -> str:
    """Return a version that dpkg sorts as Python does: 1.2.0~rc1 comes before 1.2.0."""
    return re.sub(r"(?=a|b|rc)", "~", version, count=1)


def package(python: Path, source: Path, into: Path, *, epoch: int, version: str = __version__) -> Path:
    """Build the package from that interpreter's environment, in which the wheel is installed; return the file.

    `source` has the maintainer scripts and the change log; `epoch` is the time of every file, in seconds since 1970.
    Raises ReleaseError.
    """
    if shutil.which("dpkg-deb") is None:
        raise ReleaseError("dpkg-deb is not installed: apt-get install dpkg")
    architecture = run("dpkg", "--print-architecture").strip()
    file = into / f"{NAME}_{debian_version(version)}_{architecture}.deb"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _program(tree, python, epoch=epoch)
        _system(tree, python, source)
        control = _CONTROL.format(
            name=NAME,
            version=debian_version(version),
            architecture=architecture,
            size=sum(-(-path.stat().st_size // 1024) for _, path in _files(tree)),
            python=PYTHON,
            glibc=_glibc(tree),
        )
        _describe(tree, source, control)
        _set_modes(tree)
        # More threads could give other bytes.
        run("dpkg-deb", "--root-owner-group", "-Zzstd", "--threads-max=1", "--build", tree, file, epoch=epoch)
    return file


def _program(tree: Path, python: Path, *, epoch: int) -> None:
    """Copy the environment to its place, with byte code that is never compared with its source and names that place.

    The environment has the byte code as well: root's first call writes none, which a removal would leave behind.
    """
    home, environment = tree / HOME, python.parents[1]
    words = ("-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash", "-s", environment)
    run(python, *words, "-p", f"/{HOME}", environment / "lib", epoch=epoch)
    for part in (f"lib/{PYTHON}/site-packages", "share/gpu-efficiency"):
        (home / part).parent.mkdir(parents=True)
        run("cp", "-R", environment / part, home / part)
    for info in home.rglob("*.dist-info"):
        (info / "INSTALLER").write_text("debian\n", encoding="ascii")
        for name in _PIPS:
            (info / name).unlink(missing_ok=True)
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(f"/usr/bin/{PYTHON}")
    for name in ("python3", PYTHON):
        (home / "bin" / name).symlink_to("python")
    (home / "bin/gpu-efficiency").write_text(_COMMAND, encoding="ascii")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n", encoding="ascii")


def _system(tree: Path, python: Path, source: Path) -> None:
    """Put what the system looks for where it looks: command, units, user, folders, manual page, completions."""
    share = tree / HOME / "share/gpu-efficiency"
    _copy(share / "systemd/gpu-efficiency.service", tree / "usr/lib/systemd/system")
    _copy(share / "systemd/gpu-efficiency-cluster.service", tree / "usr/lib/systemd/system")
    _copy(share / "systemd/gpu-efficiency-gateway.service", tree / "usr/lib/systemd/system")
    _copy(share / "sysusers.d/gpu-efficiency.conf", tree / "usr/lib/sysusers.d")
    _copy(share / "tmpfiles.d/gpu-efficiency.conf", tree / "usr/lib/tmpfiles.d")
    _copy(share / "examples" / Path(CONFIG).name, (tree / CONFIG).parent)
    documents = tree / "usr/share/doc" / NAME
    _copy(source / "release/debian/copyright", documents)
    _compress(source / "CHANGELOG.md", documents / "changelog.gz")
    page = python.parents[1] / "share/man/man1/gpu-efficiency.1"
    _compress(page, tree / "usr/share/man/man1" / f"{page.name}.gz")
    for name in COMPLETIONS.values():
        (tree / name).parent.mkdir(parents=True)
    run(python, "-c", _COMPLETE, *(word for shell, name in COMPLETIONS.items() for word in (shell, tree / name)))
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/gpu-efficiency").symlink_to(f"/{HOME}/bin/gpu-efficiency")


def _copy(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder)


def _compress(file: Path, into: Path) -> None:
    """Write what `gzip -n9` would."""
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


def _glibc(tree: Path) -> str:
    """Return the newest version of the C library that a compiled dependency names in its tags; 2.17 at least."""
    wheels = (path.read_text(encoding="utf-8") for path in tree.rglob("*.dist-info/WHEEL"))
    found = [(int(major), int(minor)) for text in wheels for major, minor in _GLIBC.findall(text)]
    return ".".join(map(str, max(found, default=(2, 17))))


def _describe(tree: Path, source: Path, control: str) -> None:
    """Write the package's control files, after all others are there."""
    digests = [f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {name}\n"
               for name, path in _files(tree) if name != CONFIG]  # fmt: skip
    folder = tree / "DEBIAN"
    folder.mkdir()
    for name in _SCRIPTS:
        shutil.copy(source / "release/debian" / name, folder)
    (folder / "control").write_text(control, encoding="ascii")
    (folder / "conffiles").write_text(f"/{CONFIG}\n", encoding="ascii")
    (folder / "md5sums").write_text("".join(digests), encoding="utf-8")


def _files(tree: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield f"{path.relative_to(tree)}", path


def _set_modes(tree: Path) -> None:
    """Give every file the mode that it has in a package, whatever the umask was."""
    programs = {f"{HOME}/bin/gpu-efficiency", *(f"DEBIAN/{name}" for name in _SCRIPTS)}
    for path in (tree, *tree.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    for name, path in _files(tree):
        scripts = name in programs or path.suffix == ".sh"
        path.chmod(0o755 if scripts else 0o640 if name == CONFIG else 0o644)


def main() -> int:
    """Return 0 if the package of the last commit is in dist/, 1 with the reason on standard error otherwise."""
    into = build.ROOT / "dist"
    with tempfile.TemporaryDirectory() as folder:
        source, wheels = Path(folder) / "source", Path(folder) / "wheels"
        try:
            epoch = build.export(source)
            build.distributions(source, wheels, epoch=epoch)
            python = installed.environment(Path(folder) / "installed", source)
            installed.install_wheel(python, wheels)
            into.mkdir(exist_ok=True)
            file = package(python, source, into, epoch=epoch)
        except ReleaseError as err:
            print(f"No package: {err}", file=sys.stderr)
            return 1
    print(file.relative_to(build.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
