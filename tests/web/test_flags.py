"""Tests the web flags: both spellings of the configuration file's, and the demo's addresses, which must be local."""

import argparse
import gc
import logging
import sys
from pathlib import Path

import pytest

from exporter.cli import cluster
from exporter.cli.wiring import config_arguments, log_page_access, open_web_config, prepare_to_serve, read_config
from exporter.config import Config, ConfigError, WebSettings
from exporter.web.security import WebConfigWatcher

FLAGS = ("--web.config-file", "--web.config.file")


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    config_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("flag", FLAGS)
def test_the_file_has_two_spellings_here_and_for_the_cluster(flag: str) -> None:
    assert read_config(given(flag, "a.yml")).web.config_file == "a.yml"
    parser = argparse.ArgumentParser()
    cluster.cluster_arguments(parser)
    assert read_config(parser.parse_args([flag, "a.yml"])).web.config_file == "a.yml"


def test_a_demo_s_addresses_are_this_machine_s_own_unless_it_is_said() -> None:
    open_ones = given("--web.listen-address", ":7", "--web.page-address", ":8")
    web = read_config(open_ones, loopback=True).web
    assert (web.listen_address, web.page_address) == ("127.0.0.1:7", "127.0.0.1:8")
    assert read_config(open_ones).web.page_address == ":8"
    assert read_config(given("--web.listen-address", "0.0.0.0:7"), loopback=True).web.listen_address == "0.0.0.0:7"
    with pytest.raises(ConfigError, match=r"web\.page_address"):
        read_config(given("--web.page-address", "nowhere"))


def test_a_bad_file_ends_it_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("tls_config: {}")
    with pytest.raises(ConfigError, match="tls_config"):
        open_web_config(Config(web=WebSettings(config_file=f"{tmp_path / 'web.yml'}")))
    assert open_web_config(Config()).current.ssl_context is None


@pytest.mark.parametrize(("host", "open_page", "said"), [
    ("", False, True), ("10.0.0.7", False, True), ("", True, False), ("127.0.0.1", False, False),
    ("localhost", False, False),
])  # fmt: skip
def test_who_will_be_refused_is_said_at_the_start(
    host: str, caplog: pytest.LogCaptureFixture, *, open_page: bool, said: bool
) -> None:
    with caplog.at_level(logging.INFO):
        log_page_access(Config(web=WebSettings(open_page=open_page)), WebConfigWatcher(), host)
    assert ("docs/security.md" in caplog.text) is said


def test_what_a_server_was_loaded_with_is_no_part_of_a_collection() -> None:
    """A full collection, in which all threads stand still, took 50 to 100 ms while it went through every module."""
    interval = sys.getswitchinterval()
    own: list[object] = []
    try:
        prepare_to_serve()
        assert not any(each is own for each in gc.get_objects())
        assert sys.getswitchinterval() == pytest.approx(0.0001)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
