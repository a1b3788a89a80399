"""Reads the node's RDMA ports from /sys/class/infiniband: InfiniBand, RoCE and EFA adapters.

Files and units: Documentation/ABI/stable/sysfs-class-infiniband of Linux (`port_xmit_data` and `port_rcv_data` count
4 bytes each); `hw_counters` of EFA: drivers/infiniband/hw/efa (tx_bytes, rx_bytes). Reading may block on an adapter
that does not respond.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from exporter.core.model import NetworkPort
from exporter.procfs import read_bytes

MAX_PORTS = 32
"""Ports that are read; nodes with 8 GPUs have up to 18, those with virtual functions hundreds."""
_FILE_BYTES = 256
_DATA_UNIT = 4
"""Bytes of a unit of port_xmit_data and port_rcv_data."""
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_DIGITS = 20
"""Digits of the largest 64-bit number."""


def read_ports(sysfs: Path, now: int) -> tuple[NetworkPort, ...]:
    """Read all ports of the adapters below `sysfs`; none without the directory. `now`: monotonic nanoseconds."""
    folder = sysfs / "class/infiniband"
    try:
        devices = sorted(folder.iterdir(), key=lambda device: _natural(device.name))
    except OSError:
        return ()
    found = (port for device in devices for port in _ports(device))
    return tuple(_read(*port, now) for port in islice(found, MAX_PORTS))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


def _ports(device: Path) -> Iterator[tuple[Path, str]]:
    try:
        numbers = sorted(port.name for port in (device / "ports").iterdir() if port.name.isdecimal())
    except OSError:
        return
    for number in numbers:
        yield device, number


def _read(device: Path, number: str, now: int) -> NetworkPort:
    port = device / "ports" / number
    state, rate = _text(port / "state"), _RATE.match(_text(port / "rate"))
    sent, received = _transferred(device, port)
    return NetworkPort(
        name=f"{device.name}:{number}",
        at=now,
        link=_link(device, port),
        active=state.partition(":")[2].strip() == "ACTIVE",
        bytes_per_second=float(rate[1]) * 1e9 / 8 if rate else None,
        transmitted_bytes=sent,
        received_bytes=received,
        wait_ticks=_number(port / "counters/port_xmit_wait"),
    )


def _transferred(device: Path, port: Path) -> tuple[int | None, int | None]:
    """Return the bytes sent and received: from the standard counters, or else from the driver's own."""
    units = [_number(port / "counters" / name) for name in ("port_xmit_data", "port_rcv_data")]
    if None not in units:
        sent, received = (None if unit is None else unit * _DATA_UNIT for unit in units)
        return sent, received
    for folder in (port / "hw_counters", device / "hw_counters"):
        found = _number(folder / "tx_bytes"), _number(folder / "rx_bytes")
        if None not in found:
            return found
    return None, None


def _link(device: Path, port: Path) -> str:
    try:
        driver = (device / "device/driver").readlink().name
    except OSError:
        driver = ""
    layer = _text(port / "link_layer")
    return "efa" if driver == "efa" else {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(layer, "")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _FILE_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
