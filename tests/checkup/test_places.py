"""Tests the checks of files, folders and addresses, which write nothing."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.checkup.base import FAIL, INFO, OK, WARN, CheckContext, Finding
from exporter.checkup.files import check_folders, check_ports, check_secrets, check_web_config, listen_error
from exporter.checkup.telemetry import check_nvml, check_pause, check_source_choice, no_source
from exporter.config import Config, InventorySettings, PrivacySettings, ReportsSettings, SamplingSettings, WebSettings
from exporter.registry import SlurmSettings

NOTHING = {"reports": ReportsSettings(socket=""), "sampling": SamplingSettings(pause_file="")}


def here(**config: Any) -> CheckContext:
    return CheckContext(config=Config(**{**NOTHING, **config}), environ={})


def only(found: Any) -> Finding:
    (finding,) = found
    assert isinstance(finding, Finding)
    return finding


def test_what_is_not_configured_is_not_looked_at() -> None:
    assert list(check_folders(here(), ())) == []
    assert list(check_secrets(here(), ())) == []
    assert list(check_pause(here(), ())) == []


def test_a_folder_that_can_be_made_is_as_good_as_one_that_is_there(tmp_path: Path) -> None:
    for path in (tmp_path / "report.sock", tmp_path / "deep/er/report.sock"):
        finding = only(check_folders(here(reports=ReportsSettings(socket=f"{path}")), ()))
        assert finding.verdict is OK
    assert "below" in finding.message
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"


def test_a_socket_that_is_none_and_a_file_below_a_file_are_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = only(check_folders(here(reports=ReportsSettings(socket=f"{tmp_path / 'file'}")), ()))
    assert (finding.verdict, finding.message.endswith("is no socket")) == (FAIL, True)
    finding = only(check_folders(here(inventory=InventorySettings(file=f"{tmp_path / 'file/inventory'}")), ()))
    assert finding.verdict is FAIL


def test_a_socket_on_which_somebody_listens_is_a_daemon_s_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as held:
        held.bind(f"{path}")
        held.listen()
        assert only(check_folders(here(reports=ReportsSettings(socket=f"{path}")), ())).message.endswith(
            "a daemon listens there"
        )
    assert "can be created" in only(check_folders(here(reports=ReportsSettings(socket=f"{path}")), ())).message


@pytest.mark.parametrize(("mode", "verdict"), [(0o400, OK), (0o640, OK), (0o644, WARN), (0o602, WARN)])
def test_a_secret_is_for_us_alone(tmp_path: Path, mode: int, verdict: str) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    finding = only(check_secrets(here(slurm=SlurmSettings(restd_token_file=f"{path}")), ()))
    assert (finding.check, finding.verdict) == ("slurm.restd_token_file", verdict)
    assert "secret\n" not in finding.message


def test_a_secret_that_is_not_there_fails(tmp_path: Path) -> None:
    config = here(privacy=PrivacySettings(users="hash", key_file=f"{tmp_path / 'absent'}"))
    finding = only(check_secrets(config, ()))
    assert (finding.check, finding.verdict) == ("privacy.key_file", FAIL)


def test_addresses_are_those_of_the_configuration_and_the_words_the_server_s() -> None:
    asked: list[tuple[str, int]] = []

    def refuses(host: str, port: int) -> str:
        asked.append((host, port))
        return "permission denied: read the manual" if port == 80 else ""

    web = WebSettings(listen_address=":80", page_address="127.0.0.1:0")
    node = CheckContext(
        config=Config(web=web, reports=ReportsSettings(http="127.0.0.1:5")), environ={}, listen_error=refuses
    )
    first, second, third = check_ports(node, ())
    assert asked == [("", 80), ("127.0.0.1", 0), ("127.0.0.1", 5)]
    assert (first.check, first.verdict, first.message) == ("web.listen_address", FAIL, "*:80: permission denied")
    assert first.do == "read the manual, or set web.listen_address to another address"
    assert (second.message, second.verdict) == ("any free port", OK)
    assert (third.check, third.message) == ("reports.http", "127.0.0.1:5 is free")


def _ports() -> Iterator[int]:
    """Ports that were free a moment ago; another connection may use one by now."""
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        yield port


@pytest.mark.parametrize("host", ["127.0.0.1", "", "localhost", "::1"])
def test_an_address_is_free_until_somebody_listens_and_again_after(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        host = "127.0.0.1"
    port = next(port for port in _ports() if listen_error(host, port) == listen_error(host, port) == "")
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.create_server((host or "127.0.0.1", port), family=family):
        assert "address in use" in listen_error(host, port)


def test_a_daemon_that_has_just_ended_is_not_in_the_way() -> None:
    """Connections of the stopped daemon are in TIME_WAIT on the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert listen_error("127.0.0.1", port) == ""


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    assert "no such address" in listen_error("192.0.2.1", 0)


def test_the_web_configuration_is_tried_by_whoever_will_use_it(tmp_path: Path) -> None:
    web = WebSettings(config_file=f"{tmp_path / 'web.yaml'}")
    good = CheckContext(config=Config(web=web), environ={})
    assert only(check_web_config(good, ())).verdict is OK
    bad = CheckContext(
        config=Config(web=web), environ={}, web_config_error=lambda path: f"{path}: is broken; read docs/security.md"
    )
    finding = only(check_web_config(bad, ()))
    assert (finding.verdict, finding.do) == (FAIL, "read docs/security.md")
    assert only(check_web_config(here(web=WebSettings(open_page=True)), ())).verdict is INFO


def test_a_pause_keeps_us_from_the_sources(tmp_path: Path) -> None:
    path = tmp_path / "pause"
    node = here(sampling=SamplingSettings(pause_file=f"{path}"))
    assert list(check_pause(node, ())) == []
    path.write_text(json.dumps({"until": time.time() + 600}))
    pause = only(check_pause(node, ()))
    assert pause.verdict is WARN
    assert list(check_nvml(node, (pause,))) == []
    assert list(check_source_choice(node, (pause,))) == []


def test_the_source_that_sees_is_chosen_before_one_that_only_opens() -> None:
    blind = Finding("telemetry", "dcgm", OK, ""), Finding("telemetry", "dcgm profiling", INFO, "", "install it")
    sees = Finding("telemetry", "nvml", OK, ""), Finding("telemetry", "nvml profiling", OK, "")
    assert only(check_source_choice(here(), (*blind, *sees))).message.startswith(
        "the daemon will read nvml, which sees"
    )
    chosen = only(check_source_choice(here(), blind))
    assert (chosen.verdict, chosen.do) == (WARN, "install it")
    nothing = only(check_source_choice(here(), (Finding("telemetry", "nvml", WARN, ""),)))
    assert no_source((nothing,))
    assert not no_source((chosen,))
