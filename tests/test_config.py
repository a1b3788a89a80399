"""Tests the configuration: precedence, rejected values and their messages. Other tests cover what a key does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporter.agent.agent import Agent
from exporter.config import Config, ConfigError, load, split_address
from exporter.core.model import Observation, State
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata
from tests.worlds import SPINNING, S, device, first, held, reading, seen

NOTHING: Mapping[str, str] = {}


def written(folder: Path, text: str) -> Path:
    path = folder / "gpu-efficiency.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path | None, environ: Mapping[str, str] = NOTHING, **flags: Any) -> str:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    with pytest.raises(ConfigError) as caught:
        load(path, environ=environ, flags=dotted)
    return str(caught.value)


def test_no_file_no_environment_no_flags_are_the_defaults() -> None:
    assert load(None, environ=NOTHING) == Config()
    assert Config().web.listen_address == ":19400"


def test_flags_beat_the_environment_beats_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, '[web]\nlisten_address = "file:1"\n[log]\nformat = "json"\nlevel = "error"\n')
    environ = {"GPU_EFFICIENCY_WEB_LISTEN_ADDRESS": "environment:2", "GPU_EFFICIENCY_LOG_LEVEL": "debug"}
    flags = {"web.listen_address": "flag:3"}
    assert load(path, environ=NOTHING).web.listen_address == "file:1"
    assert load(path, environ=environ).web.listen_address == "environment:2"
    config = load(path, environ=environ, flags=flags)
    assert config.web.listen_address == "flag:3"
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert config.sampling.interval_seconds == 1.0


def test_the_process_s_own_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_SAMPLING_INTERVAL_SECONDS", "2.5")
    assert load(None).sampling.interval_seconds == 2.5


GPUS = ("nvidia.com/gpu", "example.com/*")


@pytest.mark.parametrize(
    ("name", "value", "where", "found"),
    [
        ("SOURCE", "nvml", "source", "nvml"),
        ("SAMPLING_DEADLINE_SECONDS", "3", "sampling.deadline_seconds", 3.0),
        ("DCGM_EXPORTER_URL", "http://127.0.0.1:1/metrics", "dcgm_exporter.url", "http://127.0.0.1:1/metrics"),
        ("DCGM_EXPORTER_COLLECT_INTERVAL_SECONDS", "10", "dcgm_exporter.collect_interval_seconds", 10.0),
        ("POLICY_MAX_JOBS", "7", "policy.max_jobs", 7),
        ("POLICY_HANG_SECONDS", "60", "policy.hang_seconds", 60.0),
        ("POLICY_FATAL_XIDS", "[48, 79] ", "policy.fatal_xids", (48, 79)),
        ("KUBERNETES_RESOURCES", "[nvidia.com/gpu, example.com/*]", "kubernetes.resources", GPUS),
        ("WEB_LISTEN_ADDRESS", "[::1]:19400", "web.listen_address", "[::1]:19400"),
        ("DCGM_ADDRESS", "[fd00::7]:5555", "dcgm.address", "[fd00::7]:5555"),
    ],
)
def test_a_variable_names_its_section_and_key(name: str, value: str, where: str, found: object) -> None:
    section, _, key = where.rpartition(".")
    config = load(None, environ={f"GPU_EFFICIENCY_{name}": value})
    assert getattr(getattr(config, section) if section else config, key) == found


@pytest.mark.parametrize("section", [None, "web", "sampling", "inventory", "dcgm", "dcgm_exporter", "log", "policy"])
def test_every_section_s_every_key_can_come_from_the_environment(section: str | None) -> None:
    part = Config() if section is None else getattr(Config(), section)
    for field, value in msgspec.structs.asdict(part).items():
        if not isinstance(value, msgspec.Struct | dict) and field not in {
            "prices",
            "exemptions",
        }:  # tables: in the file
            name = "_".join(filter(None, ("GPU_EFFICIENCY", section, field))).upper()
            assert load(None, environ={name: f"{list(value) if isinstance(value, tuple) else value}"}) == Config()


@pytest.mark.parametrize(
    "name",
    ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_19400_TCP", "PORT_19400_TCP_ADDR"],
)
def test_what_kubernetes_says_of_a_service_of_our_name_is_not_ours(name: str) -> None:
    assert load(None, environ={f"GPU_EFFICIENCY_{name}": "tcp://10.0.0.1:19400"}) == Config()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("colour = 1", "unknown field `colour`"),
        ("[web]\nlisten = 1", "unknown field `listen` - at `$.web`"),
        ("[policy]\nhang_secs = 1", "unknown field `hang_secs` - at `$.policy`"),
        ('source = "amd"', "'amd' - at `$.source`"),
        ("[web]\nlisten_address = 19400", "`$.web.listen_address`"),
        ('[sampling]\ninterval_seconds = "fast"', "`$.sampling.interval_seconds`"),
        ("[sampling]\ninterval_seconds = 0.01", ">= 0.1 - at `$.sampling.interval_seconds`"),
        ("[sampling]\ninterval_seconds = 0.099", "invalid on Hopper (NVIDIA/DCGM#310)"),
        ("[sampling]\ninterval_seconds = 1e4", "<= 300.0 - at `$.sampling.interval_seconds`"),
        ("[sampling]\ninterval_seconds = nan", "`$.sampling.interval_seconds`"),
        ("[sampling]\ndeadline_seconds = 0", "> 0.0 - at `$.sampling.deadline_seconds`"),
        ("[policy]\nstalled_engine = 1.5", "<= 1.0 - at `$.policy.stalled_engine`"),
        ("[policy]\nzombie_duty = 0", ">= 1e-06 - at `$.policy.zombie_duty`"),
        ("[policy]\nworking_int = 0", ">= 1e-06 - at `$.policy.working_int`"),
        ("[policy]\ncomputing_sm = 0.14", "collective_sm, 0.14, is not below computing_sm, 0.14 - at `$.policy`"),
        ('[policy_by_model."L4"]\ncollective_sm = 1.0', 'policy_by_model."L4": collective_sm, 1, is not below'),
        ("[policy]\nmax_jobs = 0", ">= 1 - at `$.policy.max_jobs`"),
        ("web = 1", "`$.web`"),
        ("[web", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_the_key_s_path(tmp_path: Path, text: str, why: str) -> None:
    path = written(tmp_path, text)
    said = refused(path)
    assert said.startswith(f"{path}: ")
    assert why in said


def test_a_file_that_is_not_there_or_not_text_says_so(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    assert refused(absent) == f"{absent}: cannot be read: No such file or directory"
    assert refused(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert refused(binary).startswith(f"{binary}: not valid TOML")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("SAMPLING_INTERVAL", "1", "unknown field `interval` - at `$.sampling`"),
        ("COLOUR", "red", "unknown field `colour`"),
        ("SAMPLING_INTERVAL_SECONDS", "soon", "`$.sampling.interval_seconds`"),
        ("LOG_FORMAT", "yaml", "`$.log.format`"),
        ("WEB", "1", "`$.web`"),
        ("WEB_LISTEN_ADDRESS", "19400", "web.listen_address: '19400' is not host:port"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(name: str, value: str, why: str) -> None:
    said = refused(None, {f"GPU_EFFICIENCY_{name}": value})
    assert said.startswith(f"environment variable GPU_EFFICIENCY_{name}: ")
    assert why in said


def test_a_wrong_flag_is_refused_by_its_name() -> None:
    assert refused(None, sampling__interval_seconds="0").startswith("flag --sampling.interval-seconds: ")
    assert refused(None, source="amd").startswith("flag --source: ")
    assert refused(None, web__listen_address="localhost").startswith("flag --web.listen-address: web.listen_address: ")


def test_a_wrong_file_is_not_hidden_by_a_right_flag(tmp_path: Path) -> None:
    path = written(tmp_path, "[sampling]\ninterval_seconds = 0")
    assert refused(path, sampling__interval_seconds="1").startswith(f"{path}: ")


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "0"])
@pytest.mark.parametrize("name", ["SAMPLING_DEADLINE_SECONDS", "DCGM_EXPORTER_TIMEOUT_SECONDS", "POLICY_HANG_SECONDS"])
def test_a_time_is_a_number_of_seconds_above_zero_and_not_for_ever(name: str, value: str) -> None:
    assert refused(None, {f"GPU_EFFICIENCY_{name}": value}).startswith(f"environment variable GPU_EFFICIENCY_{name}: ")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":19400", ("", 19400)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:80", ("::1", 80)),
        ("node-7:65535", ("node-7", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "19400", "localhost", "localhost:", ":http", ":65536", ":-1", "a:1.5"])
def test_what_is_no_address_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not host:port \(examples: :19400, "):
        split_address(text)


def spin(policy: Policy, seconds: int) -> Agent:
    """A GPU that spins from the first second on."""
    agent = Agent(meta=DaemonMetadata(), policy=policy)

    def story() -> list[Observation]:
        later = [seen(at, reading(at - 1, at, SPINNING)) for at in range(1, seconds + 1)]
        return [first([device()], [held(gpus=2)]), *later]

    agent.run(story())
    return agent


def test_a_threshold_of_the_file_reaches_the_ledger(tmp_path: Path) -> None:
    path = written(tmp_path, "[policy]\nhang_seconds = 30\nhang_peer_seconds = 30\nhang_suspect_seconds = 10\n")
    soon, late = spin(load(path, environ=NOTHING).policy, 60), spin(Policy(), 60)
    assert soon.ledger.gpus["GPU-0"].state is State.HUNG
    assert soon.ledger.gpus["GPU-0"].since <= 31 * S
    assert late.ledger.gpus["GPU-0"].state is State.ACTIVE


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ('partition = "("\nteam = "x"', "workload.rules[1].partition: '(' is no regular expression: missing )"),
        ('command = "*"\nteam = "x"', "workload.rules[1].command: '*' is no regular expression: nothing to repeat"),
        ('label = "app"\nteam = "x"', "workload.rules[1].label: 'app' is not key=regular expression"),
        ('label = "app=["\nteam = "x"', "workload.rules[1].label: '[' is no regular expression"),
        (
            'partition = "gpu"',
            "workload.rules[1]: gives nothing; give it one of workload_class, team, useful_pipe, zombie_seconds",
        ),
        ('workload_class = "lazy"', "Invalid enum value 'lazy'"),
        ('team = "x"\nlabels = "a=b"', "unknown field `labels`"),
    ],
)
def test_a_rule_that_cannot_be_used_is_named(tmp_path: Path, rule: str, wrong: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[[workload.rules]]\nteam = "y"\n[[workload.rules]]\n{rule}\n')
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert wrong in str(caught.value)
    assert str(caught.value).startswith(str(file))
