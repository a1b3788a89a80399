"""Tests the RDMA ports, in trees of files as Linux's documentation and its drivers show them."""

from pathlib import Path

import pytest

from exporter.core.model import NetworkPort
from exporter.host.rdma import MAX_PORTS, read_ports


def port(sysfs: Path, device: str, number: str = "1", **files: str) -> Path:
    """Write a port's files; __ in a name stands for /."""
    folder = sysfs / f"class/infiniband/{device}/ports/{number}"
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


IB = {
    "state": "4: ACTIVE\n", "rate": "400 Gb/sec (4X NDR)\n", "link_layer": "InfiniBand\n",
    "counters__port_xmit_data": "250\n", "counters__port_rcv_data": "1000\n", "counters__port_xmit_wait": "77\n",
}  # fmt: skip


def test_an_infiniband_port(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", **IB)
    assert read_ports(tmp_path, 5) == (
        NetworkPort("mlx5_0:1", 5, "infiniband", True, 50e9, 1000, 4000, 77),  # noqa: FBT003  in the order of its fields
    )


def test_a_roce_port_that_is_down_has_no_wait_counter(tmp_path: Path) -> None:
    files = IB | {"state": "1: DOWN\n", "rate": "2.5 Gb/sec (1X SDR)\n", "link_layer": "Ethernet\n"}
    del files["counters__port_xmit_wait"]
    port(tmp_path, "mlx5_1", "2", **files)
    assert read_ports(tmp_path, 5) == (
        NetworkPort("mlx5_1:2", 5, "roce", bytes_per_second=312.5e6, transmitted_bytes=1000, received_bytes=4000),
    )


def test_an_efa_port_counts_bytes_of_its_own(tmp_path: Path) -> None:
    port(tmp_path, "rdmap0s6", state="4: ACTIVE\n", rate="100 Gb/sec (4X EDR)\n", link_layer="Unknown\n",
         hw_counters__tx_bytes="123\n", hw_counters__rx_bytes="456\n")  # fmt: skip
    driver = tmp_path / "bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    device = tmp_path / "class/infiniband/rdmap0s6/device"
    device.mkdir()
    (device / "driver").symlink_to(driver)
    (found,) = read_ports(tmp_path, 5)
    assert (found.link, found.transmitted_bytes, found.received_bytes, found.wait_ticks) == ("efa", 123, 456, None)


def test_counters_of_the_device_serve_where_the_port_has_none(tmp_path: Path) -> None:
    port(tmp_path, "bnxt_re0", state="4: ACTIVE\n")
    counters = tmp_path / "class/infiniband/bnxt_re0/hw_counters"
    counters.mkdir()
    (counters / "tx_bytes").write_text("1\n")
    (counters / "rx_bytes").write_text("2\n")
    (found,) = read_ports(tmp_path, 5)
    assert (found.transmitted_bytes, found.received_bytes, found.bytes_per_second, found.link) == (1, 2, None, "")


def test_a_node_without_adapters_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path, 5) == ()
    (tmp_path / "class/infiniband/broken").mkdir(parents=True)
    assert read_ports(tmp_path, 5) == ()


@pytest.mark.parametrize("value", ["", "N/A (no PMA)\n", "-1\n", "0x10\n", "9" * 40, "1.5\n", "٣\n"])
def test_a_counter_that_is_no_number_is_missing(tmp_path: Path, value: str) -> None:
    port(
        tmp_path, "mlx5_0", **IB | {"counters__port_xmit_data": value, "counters__port_xmit_wait": value, "rate": value}
    )
    (found,) = read_ports(tmp_path, 5)
    assert (found.transmitted_bytes, found.received_bytes) == (None, None)
    assert (found.wait_ticks, found.bytes_per_second) == (None, None)


def test_ports_are_in_order_and_limited(tmp_path: Path) -> None:
    for number in range(MAX_PORTS + 8):
        port(tmp_path, f"mlx5_{number}", state="4: ACTIVE\n")
    assert [found.name for found in read_ports(tmp_path, 5)] == [f"mlx5_{number}:1" for number in range(MAX_PORTS)]
