"""Which DCGM is here, for people who look whether an installation works.

Owns the versions of bindings, library and host engine. Refuses to watch anything.
"""

import re
from typing import Any

from msgspec import Struct

from exporter.sources.dcgm.bindings import connect, load

_VERSION = re.compile(r"version:\s*([^;\s]+)")


class DescribedDcgm(Struct, frozen=True):
    """Where the bindings are; versions that are not told are empty."""

    place: str
    library: str = ""


def describe_dcgm(config: Any) -> DescribedDcgm:
    """Load the bindings and their library; raises SourceError as `open_dcgm` does."""
    bindings = load(config.dcgm.bindings, config.dcgm.library)
    return DescribedDcgm(bindings.place, _told(bindings.agent, "dcgmVersionInfo"))


def engine_version(config: Any) -> str:
    """That of the host engine; empty where it does not tell. Raises SourceError where it cannot be reached."""
    bindings = load(config.dcgm.bindings, config.dcgm.library)
    section = config.dcgm
    handle = connect(bindings, section.address, timeout_seconds=section.connect_timeout_seconds)
    try:
        return _told(bindings.agent, "dcgmHostengineVersionInfo", handle)
    finally:
        bindings.agent.dcgmDisconnect(handle)


def _told(agent: Any, name: str, *arguments: Any) -> str:
    """The version in the answer of a function that older bindings, or libraries, do not have."""
    try:
        said = getattr(agent, name)(*arguments).rawBuildInfoString
    except Exception:  # noqa: BLE001  a version is nothing to fail for, and bindings raise what they like
        return ""
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    found = _VERSION.search(text)
    return found[1] if found else text
