r"""slurm.conf: the three things a node's observer needs of it.

Owns SlurmdSpoolDir, the nodes of this host, and Include. Refuses to judge the rest.
Source: slurm.conf(5): keys in any case, `#` comments, `\` at a line's end, %n and %h in SlurmdSpoolDir.
"""

import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from exporter.schedulers.slurm.hostlist import expand_hostlist

PLACES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""As the packages have it, and where slurmd puts what it is given by the controller ("configless")."""
DEFAULT_SPOOL = "/var/spool/slurmd"
_DEEP = 8
_BYTES = 64 * 1024 * 1024


class Conf(Struct, frozen=True):
    """Of one slurm.conf, with all that it includes."""

    path: str
    spool: str = DEFAULT_SPOOL
    """With its %n and %h."""
    nodes: tuple[str, ...] = ()
    """NodeNames that are this host."""

    def spool_dir(self, node: str, *, host: str | None = None) -> Path:
        """The spool directory of the slurmd of `node`."""
        return Path(self.spool.replace("%n", node).replace("%h", host or short_hostname()))


def find_conf(configured: str, environ: Mapping[str, str]) -> str:
    """Path of slurm.conf: as configured, as SLURM_CONF says, or where it usually is; empty: there is none."""
    said = configured or environ.get("SLURM_CONF", "")
    return said or next((place for place in PLACES if Path(place).is_file()), "")


def read_conf(path: str, *, host: str | None = None) -> Conf:
    """Read it; `host` is this host's short name. Raises OSError, ValueError."""
    host, spool, nodes = host or short_hostname(), DEFAULT_SPOOL, []
    for line in _lines(Path(path), _DEEP):
        key, _, value = (part.strip() for part in line.partition("="))
        if key.lower() == "slurmdspooldir":
            spool = value.strip('"')
        elif key.lower() == "nodename":
            nodes += _here(line, host)
    return Conf(path, spool, tuple(nodes))


def short_hostname() -> str:
    """As `hostname -s`."""
    return socket.gethostname().partition(".")[0]


def _lines(path: Path, deep: int) -> Iterator[str]:
    """Give lines without comments, continued ones joined, included files in their place."""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_BYTES)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        stripped = re.sub(r"(?<!\\)#.*", "", line).strip()
        word, _, rest = stripped.partition(" ")
        if word.lower() == "include":
            if not deep:
                raise ValueError(f"{path}: more than {_DEEP} files include one another")
            yield from _lines(path.parent / rest.strip().strip('"'), deep - 1)
        elif stripped:
            yield stripped


def _here(line: str, host: str) -> list[str]:
    """Give the names in a NodeName= line that are this host."""
    said = {key.lower(): value for key, _, value in (word.partition("=") for word in shlex.split(line))}
    names = expand_hostlist(said.get("nodename", ""))
    if names == ("DEFAULT",):
        return []
    hosts = expand_hostlist(said.get("nodehostname", "")) or names
    if len(hosts) != len(names):
        hosts = (hosts * len(names))[: len(names)]
    return [name for name, its in zip(names, hosts, strict=True) if its.partition(".")[0] == host]
