"""The configuration: defaults that need no file, then TOML, then environment, then flags; frozen once read.

Owns names, types, bounds and where a value came from. An unknown key or a wrong type is an error that names its
path, never a shrug. Refuses to open anything but the one file.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from exporter.core.model import Spec
from exporter.core.policy import Policy
from exporter.specs import find_spec

PREFIX = "GPU_EFFICIENCY_"
DEFAULT_PORT = 19400
"""dcgm-exporter's 9400 and 10,000: outside 9100-9999, where exporters crowd."""
_SERVICE_LINK = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)$")
"""What Kubernetes itself puts into the environment for a Service called gpu-efficiency."""
Positive = Annotated[float, Meta(gt=0, le=1e9)]


class ConfigError(Exception):
    """The configuration cannot be used; the message names the place and the reason."""


class Web(Struct, frozen=True, forbid_unknown_fields=True):
    """[web]."""

    listen_address: str = f":{DEFAULT_PORT}"
    """host:port; an empty host is every address."""


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """[sampling]."""

    interval_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 1.0
    """Between two samples; shorter ones measure nothing, for the counters themselves need 100 ms."""
    deadline_seconds: Positive = 10.0
    """A read that takes longer is given up and its time is unobserved."""
    pause_file: str = "/run/gpu-efficiency/pause"
    """While it exists and names a time to come, nothing is read: see `gpu-efficiency pause`."""


class Dcgm(Struct, frozen=True, forbid_unknown_fields=True):
    """[dcgm]."""

    address: str = "localhost:5555"
    """The host engine: host:port, unix:/path, vsock:CID:PORT, or embedded for one of our own."""
    bindings: str = ""
    """Folder of NVIDIA's Python bindings (dcgm_agent.py); empty: where DCGM's packages put them. DCGM_BINDINGS does the
    same."""
    library: str = ""
    """Folder of libdcgm.so; empty: where the bindings look for it themselves."""
    connect_timeout_seconds: Positive = 5.0
    """For one attempt to connect."""


class Inventory(Struct, frozen=True, forbid_unknown_fields=True):
    """[inventory]."""

    expected_gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    """GPUs this node is supposed to have; a lost one is unavailable, and still paid for. 0: those seen before."""
    file: str = ""
    """Where GPUs once seen are remembered across restarts; empty: not remembered."""


class DcgmExporter(Struct, frozen=True, forbid_unknown_fields=True):
    """[dcgm_exporter]."""

    url: str = "http://127.0.0.1:9400/metrics"
    """Its metrics page: this node's own exporter, not a load-balanced address."""
    timeout_seconds: Positive = 5.0
    """For one whole page."""
    max_gap_seconds: Positive = 90.0
    """Two scrapes further apart than this do not vouch for the time between them."""
    hostname: str = ""
    """Which host's GPUs to take, where one address answers for several."""
    collect_interval_seconds: Positive = 30.0
    """How often that exporter collects (its -c or DCGM_EXPORTER_INTERVAL, there in milliseconds)."""


class Board(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """[specs."NVIDIA H100 PCIe"]: a board, by the driver's full name for it.

    What is not given comes from the table, if it has the board. The lower bounds catch figures in TFLOP/s, MHz or GB/s.
    """

    peak_flops: Annotated[float, Meta(ge=1e9, le=1e18)] | None = None
    """Dense 16-bit tensor FLOP/s."""
    tensor_reference_clock_hz: Annotated[float, Meta(ge=1e6, le=1e11)] | None = None
    """SM clock at which peak_flops holds."""
    memory_bandwidth_bytes_per_second: Annotated[float, Meta(ge=1e6, le=1e15)] | None = None
    nvlink_bytes_per_second: Annotated[float, Meta(ge=1e6, le=1e15)] | None = None
    """One direction, all links."""
    pcie_bytes_per_second: Annotated[float, Meta(ge=1e6, le=1e15)] | None = None
    """One direction."""
    idle_context_watts: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """Board power with a CUDA context and no kernel."""
    dram_ceiling: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The highest dram_active that real copy kernels reach."""

    def spec(self, name: str) -> Spec:
        """What holds for the board of that name: these figures over the table's."""
        given = {field: value for field, value in structs.asdict(self).items() if value is not None}
        return structs.replace(find_spec(name) or Spec(name=name), **given)


class Log(Struct, frozen=True, forbid_unknown_fields=True):
    """[log]."""

    format: Literal["text", "json"] = "text"
    """One line an event in either."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """What is less important is not written."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    source: Literal["auto", "dcgm", "dcgm-exporter", "nvml"] = "auto"
    """Where telemetry comes from; auto is the first of these, from left to right, that sees the most."""
    scheduler: Literal["processes"] = "processes"
    """Who says which job holds a GPU."""
    web: Web = Web()
    sampling: Sampling = Sampling()
    inventory: Inventory = Inventory()
    dcgm: Dcgm = Dcgm()
    dcgm_exporter: DcgmExporter = DcgmExporter()
    log: Log = Log()
    policy: Policy = Policy()
    specs: dict[str, Board] = {}
    """Boards the table lacks or has wrong, by the driver's full name; only in the file."""

    def overrides(self) -> Mapping[str, Spec]:
        """The operator's specs, by the driver's full name for the board: they win over the table."""
        return {name: board.spec(name) for name, board in self.specs.items()}


def load(
    path: Path | None, *, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Read defaults < file < environment < flags. `flags` maps dotted names ("web.listen_address") to values.

    Raises ConfigError naming the file, key or variable, and what is wrong with it.
    """
    tree = {} if path is None else _file(path)
    _check(tree, where=f"{path}", strict=True)
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX) and not _SERVICE_LINK.match(name, len(PREFIX)):
            _put(tree, _dotted(name), text.strip("[] ").replace(" ", "").split(",") if text.startswith("[") else text)
            _check(tree, where=f"environment variable {name}")
    for dotted, value in (flags or {}).items():
        _put(tree, dotted, value)
        _check(tree, where=f"flag --{dotted.replace('_', '-')}")
    return _check(tree, where="configuration")


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror or err}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: not valid TOML: {err}") from err


def _check(tree: dict[str, Any], *, where: str, strict: bool = False) -> Config:
    """Not strict: an environment variable's or a flag's number is text."""
    try:
        _check_boards(tree.get("specs"), strict=strict)
        config = msgspec.convert(tree, Config, strict=strict)
        split_address(config.web.listen_address)
    except (msgspec.ValidationError, ConfigError) as err:
        raise ConfigError(f"{where}: {err}") from err
    return config


def _check_boards(boards: object, *, strict: bool) -> None:
    """Name the board in an error, as msgspec does not: to it every key of a table is `[...]`."""
    for name, board in boards.items() if isinstance(boards, dict) else ():
        try:
            msgspec.convert(board, Board, strict=strict)
        except msgspec.ValidationError as err:
            raise ConfigError(f'specs."{name}": {err}') from err


def _dotted(name: str) -> str:
    """GPU_EFFICIENCY_WEB_LISTEN_ADDRESS -> web.listen_address; a name without a section stays whole."""
    key = name.removeprefix(PREFIX).lower()
    fields = {f.name: f.type for f in msgspec.structs.fields(Config)}
    sections = [s for s, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Struct)]
    section = max((s for s in sections if key.startswith(s + "_")), key=len, default=None)
    return key if section is None else f"{section}.{key[len(section) + 1 :]}"


def _put(tree: dict[str, Any], dotted: str, value: object) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port", ":port" or "[::1]:port"; raise ConfigError when it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  the last port there is
        raise ConfigError(f"web.listen_address: {address!r} is not host:port (examples: :{DEFAULT_PORT}, 127.0.0.1:0)")
    return host.strip("[]"), int(port)
