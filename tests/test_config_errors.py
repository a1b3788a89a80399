"""Tests what an error of the configuration names: file and line, variable or flag, the nearest key, allowed values."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import Config, ConfigError, load, with_origin
from exporter.config_errors import KeyPath, choices_at, known_keys, locate, mentioned_key
from exporter.registry import SCHEDULERS, SOURCES

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpu-efficiency.toml"


def refused(path: Path | None, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, environ={f"GPU_EFFICIENCY_{name}": value for name, value in variables.items()})
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "more"),
    [
        ("\n[sampling]\n\ninterval = 2", 4, "did you mean interval_seconds?"),
        ("[samplng]\ninterval_seconds = 2", 1, "did you mean sampling?"),
        ("[log]\nlevel = 'info'\n[policy]\nhang_secs = 1", 4, "did you mean hang_seconds?"),
        ("[web]\ncolour = 1", 2, "known are listen_address, page_address, open_page, config_file"),
        ("# red\ncolour = 1", 2, "`gpu-efficiency check-config` prints the known keys"),
        ("source = 'amd'", 1, f"allowed are auto, {', '.join(SOURCES)}"),
        ("# it\nscheduler = 'lsf'", 2, f"allowed are auto, {', '.join(SCHEDULERS)}"),
        ("[log]\nformat = 'yaml'", 2, "allowed are text, json"),
        ("[[follow]]\n[[follow]]\n\nframework = 'x'", 4, "allowed are auto, megatron, torchtitan"),
        ("[workload]\nrules = [\n  {team = 'a'},\n  {team = 'b', workload_class = 'x'},\n]", 2,
         'allowed are "", batch, interactive, serving'),
        ("[[prices]]\nper_gpu_hour = 1\n[[prices]]\nmodel = 'x'", 3, ""),
        ("[[prices]]\nper_gpu_hour = 1\n[[prices]]\nper_gpu_hour = 1\nmodl = 'x'", 5, "did you mean model?"),
        ('[policy_by_model."A"]\nhang_seconds = 3\n[policy_by_model."NVIDIA L4"]\nhang_secs = 3', 4,
         "did you mean hang_seconds?"),
        ('[specs."A.B c"]\npeak_flop = 1e12', 2, "did you mean peak_flops?"),
        ("[engines.models.a]\nactive_parameters = 1\n[engines.models.b]\nactive = 2", 4,
         "did you mean active_parameters?"),
        ("[workload]\n[[workload.rules]]\nteam = 'y'\n[[workload.rules]]\nteam = 'x'\npartition = '('", 6, ""),
        ("[web]\nlisten_address = 'localhost'", 2, ""),
        ("sampling.interval_seconds = 0", 1, ""),
        ("[sampling]\r\ninterval_seconds = 0\r\n", 2, ""),
        ('[host]\npool = """\ninterval_seconds = 1\n[sampling]\n"""\n[sampling]\ninterval_seconds = 0', 7, ""),
    ],
)  # fmt: skip
def test_an_error_in_the_file_names_the_line_and_what_is_known(tmp_path: Path, text: str, line: int, more: str) -> None:
    path = tmp_path / "gpu-efficiency.toml"
    path.write_bytes(text.encode())
    message = refused(path)
    assert message.startswith(f"{path}: line {line}: ")
    assert more in message


def test_an_error_in_the_syntax_has_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "gpu-efficiency.toml"
    path.write_text("[web]\nlisten_address = :1\n", encoding="utf-8")
    assert refused(path) == f"{path}: not valid TOML: Invalid value (at line 2, column 18)"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SAMPLING_INTERVAL", "1", "did you mean GPU_EFFICIENCY_SAMPLING_INTERVAL_SECONDS?"),
        ("SAMPLNG_INTERVAL_SECONDS", "1", "did you mean GPU_EFFICIENCY_SAMPLING_INTERVAL_SECONDS?"),
        ("SUORCE", "nvml", "did you mean GPU_EFFICIENCY_SOURCE?"),
        ("LOG_FORMAT", "yaml", "allowed are text, json"),
        ("SAMPLING_INTERVAL_SECONDS", "soon", "Expected `float`"),
    ],
)
def test_an_error_in_the_environment_names_the_variable_and_what_is_known(
    tmp_path: Path, name: str, value: str, message: str
) -> None:
    path = tmp_path / "gpu-efficiency.toml"
    path.write_text("[sampling]\ninterval_seconds = 3\n", encoding="utf-8")
    found = refused(path, **{name: value})
    assert found.startswith(f"environment variable GPU_EFFICIENCY_{name}: ")
    assert message in found
    assert "line" not in found


def test_an_error_in_a_flag_names_the_flag_and_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"^flag --log\.format: .*; allowed are text, json$"):
        load(None, environ={}, flags={"log.format": "yaml"})


def test_an_error_that_is_found_later_names_its_origin_too(tmp_path: Path) -> None:
    path = tmp_path / "gpu-efficiency.toml"
    path.write_text("[privacy]\n\nkey_file = 'absent'\n[[engines.endpoints]]\njob_id = '('\n", encoding="utf-8")
    late = "privacy.key_file: absent: cannot be read"
    assert with_origin(late, path, environ={}) == f"{path}: line 3: {late}"
    assert with_origin(late, None, environ={}) == late
    variable = "GPU_EFFICIENCY_PRIVACY_KEY_FILE"
    assert with_origin(late, path, environ={variable: "x"}) == f"environment variable {variable}: {late}"
    assert with_origin(late, path, environ={variable: "x"}, flags=["privacy.key_file"]) == (
        f"flag --privacy.key-file: {late}"
    )
    assert with_origin("engines.endpoints[0].job_id: x", path, environ={}).startswith(f"{path}: line 5: ")
    for other in (
        "web.listen_address: not in the file",
        "privacy.users: neither, but its section is",
        "--header: x",
        "report: x",
        f"{path}: line 1: x",
        f"{path}: line 3: Expected `str`, got `int` - at `$.privacy.key_file`",
        "no key",
    ):
        assert with_origin(other, path, environ={}) == other


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("Object contains unknown field `a` - at `$.web`", (("web",), "a")),
        ("Object contains unknown field `a`", ((), "a")),
        ("Expected `int`, got `str` - at `$.workload.rules[1].team`", (("workload", "rules", 1, "team"), "")),
        ('specs."NVIDIA L4": Expected `float` - at `$.peak_flops`', (("specs", "NVIDIA L4", "peak_flops"), "")),
        ("exemptions[1]: there are two", (("exemptions", 1), "")),
        ("cannot be read: x", ((), "")),
    ],
)
def test_the_key_that_a_message_names(message: str, key: tuple[KeyPath, str]) -> None:
    assert mentioned_key(message) == key


def test_what_is_known_at_a_path() -> None:
    assert "sampling" in known_keys(Config, ())
    assert "hang_seconds" in known_keys(Config, ("policy_by_model", "NVIDIA L4"))
    assert "active_parameters" in known_keys(Config, ("engines", "models", "x"))
    for path in (("nothing",), ("web", "listen_address"), ("web", 0), ("follow", "x"), ("web", "nothing", "x")):
        assert known_keys(Config, path) == ()
    assert choices_at(Config, ("source",)) == ("auto", *SOURCES)
    assert choices_at(Config, ("web", "listen_address")) == ()


def paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """Every key and item below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in items for found in ((*path, key), *paths(each, (*path, key)))]


def test_every_key_of_the_example_is_found_where_it_stands() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    lines, last = text.splitlines(), 0
    for path in paths(tomllib.loads(text)):
        line, depth = locate(text, path)
        name = next(part for part in reversed(path) if isinstance(part, str))
        assert depth == len(path), path
        assert name in lines[line - 1], path
        last = max(last, line)
    assert last > len(lines) // 2


KEYS = st.sampled_from(["a", "b", "'c.d'", '"e = [1]"'])
VALUES = st.sampled_from(
    [
        "1",
        "'x'",
        "[\n  1,\n  2, # ]\n]",
        '"""\n[a]\na = 1\n"""',
        "'''\n\"\"\"'''",
        "{a = 1, b = [{c = 2}]}",
        "[[1], [2]]",
    ]
)
STATEMENTS = st.one_of(
    st.just("# a = 1"), st.just(""), st.lists(KEYS, min_size=1, max_size=2).map(lambda keys: f"[{'.'.join(keys)}]"),
    st.lists(KEYS, min_size=1, max_size=2).map(lambda keys: f"[[{'.'.join(keys)}]]"),
    st.tuples(KEYS, VALUES).map(" = ".join),
)  # fmt: skip


@given(st.lists(STATEMENTS, max_size=12))
def test_every_key_of_any_document_is_found(statements: list[str]) -> None:
    """Whatever tomllib reads, has a place; and without the lines from there on, the key is not defined."""
    text = "\n".join(statements)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    for path in paths(tree):
        line, depth = locate(text, path)
        assert depth == len(path)
        before = tomllib.loads("\n".join(text.split("\n")[: line - 1]))
        assert path not in paths(before)


def test_a_path_that_is_not_there_is_found_as_far_as_it_is() -> None:
    text = "[web]\nopen_page = true\n"
    assert locate(text, ("web", "page_address")) == (1, 1)
    assert locate(text, ("log", "level")) == (0, 0)
    assert locate("", ("web",)) == (0, 0)


def test_a_value_of_very_many_lines_is_given_up() -> None:
    text = "a = [\n" + "1,\n" * 3000 + "]\nb = 1\n"
    assert locate(text, ("b",)) == (0, 0)
