"""Determines how NCCL's profiler plugins are set up in a process: by its environment and NCCL's configuration files.

NCCL (src/misc/param.cc) adds the lines NAME=VALUE of NCCL_CONF_FILE, or else of ~/.nccl.conf, and then of
/etc/nccl.conf to the environment, without replacing a variable. The files are those in the process's own root, so that
a container has its own. All of this a user can write: it decides only which of the process's files are read.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from exporter.job_files import FileRefusedError, open_job_file
from exporter.procfs import read_environ

SYSTEM_FILE = "/etc/nccl.conf"
_KEPT = re.compile(rb"NCCL_(?:PROFILER|INSPECTOR)_\w+|NCCL_CONF_FILE|HOME")
_KEPT_IN_FILE = re.compile(r"NCCL_(?:PROFILER|INSPECTOR)_\w+")
_NUMBER = re.compile(r"\s*([+-]?\d{1,18})")
_CONF_BYTES = 64 * 1024
_VALUE_CHARS = 1023
"""NCCL truncates values to this."""


class PluginSettings(Struct, frozen=True):
    """Variables of NCCL's profiler plugins that apply to a process."""

    values: Mapping[str, str] = {}
    origins: Mapping[str, str] = {}
    """Where each comes from: environment, or the path of a file in the process's root."""

    @property
    def plugin(self) -> str:
        """Name or path of the plugin's library; empty: none is loaded."""
        return self.values.get("NCCL_PROFILER_PLUGIN", "")

    @property
    def inspector(self) -> bool:
        """Whether NCCL Inspector is enabled."""
        return self.number("NCCL_INSPECTOR_ENABLE") != 0

    @property
    def prometheus(self) -> bool:
        """Whether Inspector writes means for Prometheus instead of single collectives."""
        return self.number("NCCL_INSPECTOR_PROM_DUMP") != 0

    @property
    def dump_folder(self) -> str:
        """Where Inspector writes; empty: below the process's working directory."""
        return self.values.get("NCCL_INSPECTOR_DUMP_DIR", "")

    @property
    def latency_file(self) -> str:
        """Where CoMMA writes, with %p for the pid; empty: nowhere."""
        return self.values.get("NCCL_PROFILER_LATENCY_FILE", "")

    def number(self, name: str, otherwise: int = 0) -> int:
        """A variable as a number, as atoi(3) reads it: 0 if it is none."""
        text = self.values.get(name)
        if text is None:
            return otherwise
        found = _NUMBER.match(text)
        return int(found[1]) if found else 0

    def source_of(self, name: str, pid: int) -> str:
        """The plugin that gives its file this name in the process: inspector or comma; empty: none.

        `pid` is the process's in its own namespace.
        """
        if self.inspector and not self.prometheus and name.endswith(f"-pid{pid}.log"):
            return "inspector"
        comma = self.latency_file.replace("%p", str(pid)).rpartition("/")[2]
        return "comma" if comma and name == comma else ""


def read_settings(folder: Path) -> PluginSettings:
    """Read what applies to the process with this /proc directory; empty if it cannot be read."""
    environ = read_environ(folder, _KEPT)
    values = {name: value for name, value in environ.items() if _KEPT_IN_FILE.fullmatch(name)}
    origins = dict.fromkeys(values, "environment")
    for path in _configuration_files(environ):
        inside = f"{folder}/root{path}" if path.startswith("/") else f"{folder}/cwd/{path}"
        for name, value in configuration_lines(inside):
            if name not in values:
                values[name], origins[name] = value, path
    return PluginSettings(values, origins)


def _configuration_files(environ: Mapping[str, str]) -> Iterator[str]:
    if environ.get("NCCL_CONF_FILE"):
        yield environ["NCCL_CONF_FILE"]
    elif environ.get("HOME"):
        yield f"{environ['HOME']}/.nccl.conf"
    yield SYSTEM_FILE


def configuration_lines(path: str) -> Iterator[tuple[str, str]]:
    """Variables of profiler plugins in a configuration file of NCCL; none if it cannot be read."""
    try:
        handle = open_job_file(path, None)
    except (OSError, ValueError, FileRefusedError):
        return
    try:
        content = os.pread(handle, _CONF_BYTES, 0)
    except OSError:
        return
    finally:
        os.close(handle)
    for line in content.decode(errors="replace").split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#") and _KEPT_IN_FILE.fullmatch(name):
            yield name, value[:_VALUE_CHARS]
