"""Tests reloads of the configuration: when, which sections, and with what result; no second is lost."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.agent.agent import AgentSettings
from exporter.cli import main, wiring
from exporter.cli.simulate import _OwnerRules
from exporter.cli.wiring import ConfigReloader, on_sighup, reload_in_background
from exporter.config import (
    LIVE,
    Config,
    EnergySettings,
    Exemption,
    WebSettings,
    WorkloadRule,
    WorkloadSettings,
    changed_settings,
    load,
    with_live_settings,
)
from exporter.core.exposition import render
from exporter.core.model import Observation, State
from exporter.core.policy import Policy
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import ReloadStatus
from exporter.schedulers.rules import Rules
from tests.rigs import FakeScheduler, Rig
from tests.waiting import PATIENCE
from tests.worlds import JOB, RESTING, held

HEP = WorkloadRule(team="hep", user=".*")
Taken = list[tuple[Config, ReloadStatus]]


class File:
    """A configuration file, its reloader, and the configurations that it applied."""

    def __init__(self, path: Path, text: str = "", **more: Any) -> None:
        self.path, self.now, self.taken = path, 1000.0, list[tuple[Config, ReloadStatus]]()
        self.path.write_text(text)
        self.reloading = ConfigReloader(path, self.read(), self.read, wall=lambda: self.now, **more)

    def read(self) -> Config:
        return load(self.path, environ={}, flags={"log.format": "json"})

    def says(self, text: str, *, looks: int = 2) -> Taken:
        """Configurations applied in so many polls after the file has this content."""
        self.path.write_text(text)
        return self.look(looks)

    def look(self, looks: int = 1, *, asked: bool = False) -> Taken:
        before, self.now = len(self.taken), self.now + 10
        for _ in range(looks):
            self.reloading.poll(lambda config, told: self.taken.append((config, told)), requested=asked)
        return self.taken[before:]


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> File:
    return File(tmp_path / "c.toml", "[[prices]]\nper_gpu_hour = 2.0\n")


# What has changed.


def test_live_sections_are_those_of_the_contract_and_all_are_sections() -> None:
    assert set(LIVE) == {"workload", "exemptions", "prices", "energy", "budget", "policy", "policy_by_model", "log"}
    assert set(LIVE) <= set(Config.__struct_fields__)


def test_of_what_was_read_only_live_sections_are_adopted() -> None:
    old = Config()
    new = Config(
        source="nvml", web=WebSettings(":1"), workload=WorkloadSettings((HEP,)), policy=Policy(hang_seconds=1.0)
    )
    both = with_live_settings(old, new)
    assert (both.workload, both.policy, both.web, both.source) == (new.workload, new.policy, old.web, old.source)


def test_each_setting_that_differs_is_named_by_its_path() -> None:
    new = load(None, environ={"GPU_EFFICIENCY_WEB_LISTEN_ADDRESS": ":1", "GPU_EFFICIENCY_SOURCE": "nvml"})
    new = replace(new, specs={"x": None}, prices=(None,))
    assert changed_settings(Config(), new) == ("source", "web.listen_address", "prices", "specs")
    assert changed_settings(new, new) == ()


# When it is read.


def test_a_file_that_says_the_same_is_not_read_again(file: File) -> None:
    assert file.look(5) == []
    os.utime(file.path)
    assert file.look(2) == []
    assert file.reloading.status == ReloadStatus(at=1000.0)


def test_a_change_counts_once_it_has_stood_for_a_look(file: File) -> None:
    """A file is not read while it is being written: a table cut off at a line's end is still TOML."""
    assert file.says("[[prices]]\nper_gpu_hour = 3.0\n", looks=1) == []
    assert file.says("[[prices]]\nper_gpu_hour = 3.0\n[energy]\nprice_per_kwh = 0.2\n", looks=1) == []
    ((config, told),) = file.look(3)
    assert (config.prices[0].per_gpu_hour, config.energy.price_per_kwh) == (3.0, 0.2)
    assert told == ReloadStatus(at=1030.0)


def test_a_change_taken_back_at_once_was_none(file: File) -> None:
    text = file.path.read_text()
    file.says("[energy]\n", looks=1)
    assert file.says(text, looks=3) == []


def test_asked_it_is_read_at_once_changed_or_not(file: File) -> None:
    file.path.write_text("[[prices]]\nper_gpu_hour = 4.0\n")
    ((config, _),) = file.look(asked=True)
    assert config.prices[0].per_gpu_hour == 4.0
    ((same, told),) = file.look(asked=True)
    assert (same, told.at) == (config, 1020.0)
    assert file.look(3) == []


def test_flags_win_over_what_the_file_says_later_too(file: File) -> None:
    ((config, _),) = file.says('[log]\nformat = "text"\nlevel = "debug"\n')
    assert (config.log.format, config.log.level) == ("json", "debug")


def test_a_config_map_s_links_are_followed_to_what_they_mean_now(tmp_path: Path) -> None:
    """The kubelet swaps one link, ..data; neither the file's name nor its own link changes."""
    for name, price in (("..1", 1.0), ("..2", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[[prices]]\nper_gpu_hour = {price}\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "config.toml").symlink_to("..data/config.toml")
    path = tmp_path / "config.toml"
    taken: Taken = []
    reloading = ConfigReloader(path, load(path, environ={}), lambda: load(path, environ={}))
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    for _ in range(2):
        reloading.poll(lambda config, told: taken.append((config, told)))
    assert [config.prices[0].per_gpu_hour for config, _ in taken] == [2.0]


# What is refused.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[prices]]\nper_gpu_hour = -1\n", "prices"),
        ("nonsense = 1\n", "nonsense"),
        ("[policy\n", "not valid TOML"),
        ('[[workload.rules]]\nteam = "a"\nuser = "("\n', "no regular expression"),
        ("x = " + "[\n" * 100_000, "thousands deep"),
        ("x = " + "[" * 100_000, "more than 16,384 characters"),
        ("\xff", "TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_whole_and_the_old_holds(
    file: File, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid file is rejected as a whole, with its valid parts."""
    before = file.reloading.status.at
    ((config, told),) = file.says("[energy]\nprice_per_kwh = 9.0\n" + text)
    assert (config.prices[0].per_gpu_hour, config.energy.price_per_kwh) == (2.0, None)
    assert (told.at, told.restart) == (before, ())
    assert reason in told.refused
    assert any("rejected, and the old one stays in use" in line and str(file.path) in line for line in caplog.messages)
    assert file.look(5) == []  # told once, not every two seconds
    ((config, told),) = file.says("[[prices]]\nper_gpu_hour = 5.0\n")
    assert (config.prices[0].per_gpu_hour, told.refused) == (5.0, "")


def test_a_file_that_is_gone_is_refused_and_taken_again_when_it_is_back(file: File) -> None:
    text = file.path.read_text()
    file.path.unlink()
    ((config, told),) = file.look(4)
    assert (config.prices[0].per_gpu_hour, "cannot be read" in told.refused) == (2.0, True)
    ((_, told),) = file.says(text)
    assert told.refused == ""


# What needs a restart.


def test_what_needs_a_restart_is_named_and_the_rest_is_taken(file: File, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        text = '[web]\nlisten_address = ":7"\n[slurm]\nnode_name = "n"\n[policy]\nhang_seconds = 99.0\n'
        ((config, told),) = file.says(text)
    assert (config.policy.hang_seconds, config.web.listen_address, told.restart) == (
        99.0,
        Config().web.listen_address,
        ("web.listen_address", "slurm.node_name"),
    )
    assert "the configuration was read again: policy.hang_seconds, prices" in caplog.messages
    (warning,) = [line for line in caplog.messages if "restart" in line]
    assert "web.listen_address, slurm.node_name" in warning
    ((_, told),) = file.says(text.replace('":7"', f'"{Config().web.listen_address}"'))
    assert told.restart == ("slurm.node_name",)


def test_a_command_that_has_no_use_for_a_section_does_not_ask_for_a_restart(tmp_path: Path) -> None:
    file = File(tmp_path / "c.toml", live=("log",), used=("cluster", "log"))
    ((config, told),) = file.says('[log]\nlevel = "error"\n[web]\nlisten_address = ":7"\n[cluster]\nmax_jobs = 5\n')
    assert (config.log.level, config.cluster.max_jobs, told.restart) == ("error", 2000, ("cluster.max_jobs",))


# The thread, and SIGHUP.


def test_sighup_has_it_read_and_ends_nobody(tmp_path: Path) -> None:
    """Reload without a change of the file; [log] then applies."""
    file = File(tmp_path / "c.toml", '[log]\nlevel = "error"\n')
    got, stop = threading.Event(), threading.Event()
    seen: Taken = []

    def adopt(config: Config, told: ReloadStatus) -> None:
        seen.append((config, told))
        got.set()

    before = signal.getsignal(signal.SIGHUP)
    level = logging.getLogger().level
    handlers = list(logging.getLogger().handlers)
    try:
        with on_sighup(file.reloading), reload_in_background(file.reloading, adopt):
            os.kill(os.getpid(), signal.SIGHUP)
            assert got.wait(PATIENCE)
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
    assert seen[0][0].log.level == "error"
    assert signal.getsignal(signal.SIGHUP) == before
    assert not stop.is_set()


def test_sighup_before_the_command_can_reload_ends_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGHUP)
    ends: dict[str, bool] = {}
    try:
        for command in ("serve", "cluster", "record", "gateway"):
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            with pytest.raises(SystemExit):
                main([command, "--help"])
            ends[command] = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ends == {"serve": False, "cluster": False, "record": True, "gateway": True}
    assert capsys.readouterr().out


def test_without_a_file_sighup_is_heeded_too(caplog: pytest.LogCaptureFixture) -> None:
    reloading = ConfigReloader(None, Config(), Config)
    taken: Taken = []
    with caplog.at_level("INFO"):
        reloading.poll(lambda config, told: taken.append((config, told)), requested=True)
    assert [config for config, _ in taken] == [Config()]
    assert "without --config" in caplog.text


# What a daemon makes of it.


def settings(config: Config, **told: Any) -> AgentSettings:
    return wiring.live_settings(config, "n1", ReloadStatus(at=5.0, **told))


def page(rig: Rig) -> str:
    snapshot = rig.agent.latest()
    assert snapshot is not None
    return render(snapshot).decode()


def test_between_two_observations_and_not_a_second_is_lost(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.source.signals_of = dict.fromkeys(("GPU-0", "GPU-1"), RESTING)
    rig.tick(100)
    paid, since = rig.paid(), rig.ledger.gpus["GPU-0"].since
    rig.agent.update(settings(Config(policy=Policy(zombie_batch_seconds=60), energy=EnergySettings(0.3))))
    rig.hands.update(Rules(WorkloadSettings((HEP,))))
    rig.tick(2)
    assert rig.paid() == paid + 10
    assert rig.seconds("unobserved") == 0
    assert rig.ledger.gpus["GPU-0"].state is State.ZOMBIE
    assert rig.ledger.gpus["GPU-0"].since > since
    snapshot = rig.agent.latest()
    assert snapshot is not None
    assert {job.owner.team for job in snapshot.jobs} == {"hep"}
    assert dict(snapshot.thresholds)["zombie_batch_seconds"] == 60
    assert all(held.start == 1000 * 10**9 for gpu in rig.ledger.gpus.values() for held in gpu.holders)


def test_prices_and_what_became_of_the_file_are_told(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.tick()
    assert "config_" not in page(rig)  # nobody looks, and nobody says so
    rig.agent.update(settings(Config(), refused="no", restart=("web",)))
    terms = Terms(node="n", prices=(Price(7.0),))
    rig.agent.update(AgentSettings(terms=terms, policy=Policy(), by_model={}, reload=ReloadStatus(at=5)))
    rig.tick()
    body = page(rig).splitlines()
    assert "gpu_efficiency_config_last_reload_successful 1" in body
    assert "gpu_efficiency_config_last_reload_success_timestamp_seconds 5" in body
    assert "gpu_efficiency_config_restart_needed 0" in body
    assert any(line.startswith("gpu_efficiency_price_per_gpu_hour{") and line.endswith(" 7.0") for line in body)
    rig.agent.update(settings(Config(), refused="no", restart=("web",)))
    rig.tick()
    body = page(rig).splitlines()
    assert "gpu_efficiency_config_last_reload_successful 0" in body
    assert "gpu_efficiency_config_restart_needed 1" in body


def test_a_scheduler_that_fails_to_take_rules_stops_nobody(rigs: Callable[..., Rig]) -> None:
    class Odd(FakeScheduler):
        def adopt(self, rules: Rules) -> None:
            raise RuntimeError(f"a bug {rules}")

    rig = rigs(Odd(held(start=1000.0)))
    rig.hands.update(Rules())
    rig.tick(5)
    assert rig.seconds("unobserved") == 0


def test_the_demo_s_jobs_are_judged_anew_when_the_rules_are() -> None:
    judge = _OwnerRules(Config())
    story = [Observation(0, 0, allocations=(held(),)), *(Observation(n, n) for n in (1, 2, 3))]
    told = judge.apply(story)
    assert next(told).allocations == (held(),)
    assert next(told).allocations is None
    judge.rules = Rules(WorkloadSettings((HEP,)), [Exemption("x", "r", date(2999, 1, 1), user=JOB.user)])
    (again,) = next(told).allocations or ()
    assert (again.owner.team, again.owner.exemption, again.start) == ("hep", "x", held().start)
    assert next(told).allocations is None
