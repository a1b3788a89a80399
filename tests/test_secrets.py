"""Secrets set everywhere, and everything made to fail: none of them is printed, logged, served or told as a fault."""

import argparse
import io
import json
import logging
import socket
from collections.abc import Callable
from itertools import product
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cli import main
from exporter.cli.wiring import configure
from exporter.config import Config, ConfigError, EngineEndpoint, EngineSettings, load
from exporter.core.job_record import JobRecordQuery
from exporter.engines.discovery import EngineDiscovery
from exporter.formatting import escape_surrogates
from exporter.logs import JsonFormatter, TextFormatter, set_redaction
from exporter.preview.prometheus import PrometheusClient, PrometheusError
from exporter.redact import HIDDEN, redact_secrets
from exporter.registry import SOURCES
from exporter.report.nodes import fetch_records
from exporter.schedulers.kubernetes.api import ApiServer, Informer
from exporter.schedulers.kubernetes.objects import Pod
from exporter.schedulers.slurm.client import SlurmUnavailableError
from exporter.schedulers.slurm.restd import RestClient
from exporter.sources.base import SourceError
from exporter.sources.dcgm_exporter.source import open_dcgm_exporter
from exporter.sources.selector import open_selector
from tests.each import each
from tests.rigs import Rig

SECRET = "hunter2"  # noqa: S105  what must never be seen
URLS = (
    "http://ada:hunter2@{host}{path}", "http://hunter2@{host}{path}", "http://:hunter2@{host}{path}",
    "http://ada:hun%40ter2hunter2@{host}{path}", "http://ada:x@hunter2@{host}{path}", "http://ada:x/hunter2@{host}{path}",
    "http://ada:x?hunter2@{host}{path}", "http://{host}{path}?token=hunter2", "http://{host}{path}?a=b&key=hunter2#x",
    "ada:hunter2@{host}{path}",
)  # fmt: skip


@each("shape, around", product(URLS, ["{}", "{!r} is no address", "({}): refused", "see {}, or {}.", "<{}>", '"{}"']))
def test_an_address_is_told_without_its_secret_wherever_it_stands(shape: str, around: str) -> None:
    url = shape.format(host="10.0.0.7:9400", path="/metrics")
    told = redact_secrets(around.format(url, url))
    assert SECRET not in told
    assert HIDDEN in told
    assert "10.0.0.7:9400/metrics" in told


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:9400/metrics", "https://[::1]:443/api?", "unix:/run/slurmrestd.sock", "user@1000.service",
        "alice@example.org has job 7: see http://h:1/a@b", "12:30:01 GPU 0: lost", "no @ here: none", "", "a\nb",
        "http://h/x?y and z=1", "basic training, bearer of news",
    ],
)  # fmt: skip
def test_what_has_no_secret_stays_as_it_is(text: str) -> None:
    assert redact_secrets(text) == text


@pytest.mark.parametrize(
    "text",
    ["Illegal header value b'Bearer hunter2\\nx'", "Authorization: Basic hunter2", "{'authorization': 'x hunter2'}"],
)
def test_a_header_that_a_library_repeats_is_hidden(text: str) -> None:
    assert SECRET not in redact_secrets(text)


@given(st.text())
def test_any_text_can_be_told_and_telling_it_twice_changes_nothing(text: str) -> None:
    once = redact_secrets(text)
    assert redact_secrets(once) == once
    assert escape_surrogates(text + "\udcff").encode()


# Those who ask, each with an address that fails.


@pytest.mark.slow
@pytest.mark.parametrize("shape", URLS)
def test_a_source_that_cannot_be_read(shape: str) -> None:
    config = load(
        None,
        environ={},
        flags={"dcgm_exporter.url": shape.format(host="127.0.0.1:1", path="/m"), "source": "dcgm-exporter"},
    )
    said = []
    try:
        source = open_dcgm_exporter(config)
        try:
            source.read(1)
        finally:
            source.close()
    except SourceError as err:
        said.append(str(err))
    ladder = open_selector(config)
    try:
        ladder.read(1)
    except SourceError as err:
        said.append(str(err))
    assert len(said) == 2
    assert SECRET not in "\n".join([*said, ladder.reason])


def _ask(url: str, token: Path) -> None:
    restd = RestClient(url, token_file=f"{token}")
    try:
        restd.job("7")
    finally:
        restd.close()


@pytest.mark.parametrize("shape", URLS)
def test_a_controller_that_cannot_be_asked(shape: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hunter2\nhunter2")
    url = shape.format(host="127.0.0.1:1", path="")
    with pytest.raises((SlurmUnavailableError, ValueError)) as told:
        _ask(url, token)
    assert SECRET not in str(told.value)


def test_a_token_of_two_lines_is_not_repeated_as_the_illegal_header_that_it_makes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hunter2\nhunter2")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SlurmUnavailableError) as told:
        _ask(f"http://127.0.0.1:{server.getsockname()[1]}", token)
    assert "llegal header value ***" in str(told.value)
    assert SECRET not in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("shape", URLS)
def test_a_prometheus_that_cannot_be_asked(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = shape.format(host="127.0.0.1:1", path="")
    with PrometheusClient(url, {"X": "a"}) as server, pytest.raises(PrometheusError) as told:
        server.instant_query("up", 1.0)
    assert SECRET not in str(told.value)
    assert main(["report", "7", "--prometheus", url, "--header", "Authorization: hunter2"]) == 1
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("shape", URLS)
def test_a_node_that_cannot_be_asked_for_its_records(shape: str) -> None:
    answer = fetch_records([shape.format(host="127.0.0.1:1", path="")], JobRecordQuery())
    assert len(answer.unanswered) == 1
    assert SECRET not in answer.unanswered[0]


def test_an_api_server_that_cannot_be_asked(tmp_path: Path) -> None:
    access = ApiServer("https://ada:hunter2@127.0.0.1:1", f"{tmp_path}/none", f"{tmp_path}/ca")
    store = Informer(
        access,
        Pod,
        paths=("/api/v1/pods",),
        selector="",
        significant=str,
        on_update=lambda: None,
        on_change=lambda: None,
        now=lambda: 0,
    )
    store._record_failure(httpx.ConnectError("https://ada:hunter2@127.0.0.1:1 is not there"))
    assert SECRET not in store.error
    assert "127.0.0.1:1/api/v1/pods" in store.error


def test_an_engine_s_address_that_is_none() -> None:
    engines = EngineSettings(endpoints=(EngineEndpoint("ftp://ada:hunter2@h/x", "7"),))
    with pytest.raises(ConfigError) as told:
        EngineDiscovery(engines)
    assert SECRET not in str(told.value)


# What is printed and logged.


def test_the_configuration_is_printed_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[dcgm_exporter]\nurl = "http://ada:hunter2@h:9400/metrics"\n[slurm]\nrestd_url = "http://h:1/?t=hunter2"\n'
        '[kubernetes]\napi_url = "https://hunter2@h"\n'
        '[[engines.endpoints]]\nurl = "http://a:hunter2@h/m"\njob_id = "7"\n'
        '[[engines.endpoints]]\nurl = "http://b:hunter2@h/m"\njob_id = "8"\n'
    )
    assert main(["check-config", "--config", f"{file}"]) == 0
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert 'url = "http://***@h:9400/metrics"' in said.out


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_no_line_of_the_log_has_one_whoever_wrote_it(form: logging.Formatter) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(form)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "asking %s", ("http://ada:hunter2@h/",), None)
    set_redaction(redact_secrets)
    try:
        err = RuntimeError("http://ada:hunter2@h/ is gone")
        record.exc_info = (type(err), err, None)
        handler.emit(record)
    finally:
        set_redaction(str)
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count(HIDDEN) == 2
    assert stream.getvalue().count("\n") == 1


def test_setting_up_the_log_sees_to_that(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        configure(argparse.Namespace(config=None))
        logging.getLogger("exporter").warning("asking http://ada:hunter2@h/")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        set_redaction(str)
    said = capsys.readouterr().err
    assert "asking http://***@h/" in said


def test_an_error_that_ends_a_command_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[engines]\nports = "http://ada:hunter2@h"\n[web]\nlisten_address = "ada:hunter2@h"\n')
    assert main(["check-config", "--config", f"{file}"]) == 2
    file.write_text('[web]\nlisten_address = "http://ada:hunter2@h"\n')
    assert main(["check-config", "--config", f"{file}"]) == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err


def test_what_reaches_the_pages_has_none(rigs: Callable[..., Rig]) -> None:
    """Whatever a source or a scheduler says of its failure: faults and reasons go through one place."""
    rig = rigs()
    rig.tick()
    rig.source.trouble.append(SourceError("http://ada:hunter2@h/m could not be read"))
    rig.scheduler.trouble = RuntimeError("http://ada:hunter2@h/s")
    for _ in range(3):
        said = rig.tick()
        assert SECRET not in json.dumps([fault.message for fault in said.faults])
        assert SECRET not in rig.agent.last_error()
        assert SECRET not in repr(rig.agent.latest())


def test_a_default_configuration_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config"]) == 0
    assert HIDDEN not in capsys.readouterr().out
    assert Config().dcgm_exporter.url == redact_secrets(Config().dcgm_exporter.url)


def test_where_a_source_was_found_is_told_without_them() -> None:
    config = load(None, environ={}, flags={"dcgm_exporter.url": "http://ada:hunter2@h:9400/metrics"})
    assert SOURCES["dcgm-exporter"].location(config.dcgm_exporter) == "http://***@h:9400/metrics"
