"""Tests the addresses that stand where a URL is expected, in flags and in the configuration."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs

from exporter import config, registry
from exporter.config import Config, load
from exporter.urls import complete_url


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("node7:19400", "http://node7:19400"),
        ("node7", "http://node7"),
        ("127.0.0.1:9400/metrics", "http://127.0.0.1:9400/metrics"),
        ("[::1]:19400", "http://[::1]:19400"),
        ("//node7:19400", "http://node7:19400"),
        ("ada:secret@node7:19400", "http://ada:secret@node7:19400"),
        ("unix.example:80", "http://unix.example:80"),
        ("http://node7:19400", "http://node7:19400"),
        ("HTTPS://node7", "HTTPS://node7"),
        ("unix:/run/slurmrestd.sock", "unix:/run/slurmrestd.sock"),
        ("ftp://node7", "ftp://node7"),
        ("", ""),
    ],
)
def test_an_address_without_a_scheme_is_http(address: str, url: str) -> None:
    assert complete_url(address) == url
    assert complete_url(url) == url


def url_keys() -> Iterator[tuple[type[Struct], str]]:
    """Every key of the configuration that takes a URL, by the struct that has it."""
    for struct in [*vars(config).values(), *vars(registry).values()]:
        if (
            isinstance(struct, type)
            and issubclass(struct, Struct)
            and struct.__name__.endswith(("Settings", "Endpoint"))
        ):
            yield from ((struct, name) for name in struct.__struct_fields__ if name.endswith("url"))


def test_every_key_that_takes_a_url_accepts_it_without_a_scheme() -> None:
    keys = list(url_keys())
    assert {f"{struct.__name__}.{name}" for struct, name in keys} >= {
        "DcgmExporterSettings.url", "SlurmSettings.restd_url", "KubernetesSettings.api_url", "EngineEndpoint.url",
    }  # fmt: skip
    for struct, name in keys:
        required = {field.name: "x" for field in structs.fields(struct) if field.required}
        made: Any = struct(**(required | {name: "node7:80"}))
        scheme = "https" if name == "api_url" else "http"
        assert getattr(made, name) == f"{scheme}://node7:80", f"{struct.__name__}.{name}"


def test_defaults_and_special_values_stay(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[slurm]\nrestd_url = "unix:/run/restd"\n[kubernetes]\napi_url = ""\n', encoding="utf-8")
    assert load(None, environ={}).kubernetes.api_url == "auto"
    found = load(path, environ={"GPU_EFFICIENCY_DCGM_EXPORTER_URL": "node7:9400/metrics"})
    assert (found.slurm.restd_url, found.kubernetes.api_url) == ("unix:/run/restd", "")
    assert found.dcgm_exporter.url == "http://node7:9400/metrics"
    assert Config().slurm.restd_url == ""
