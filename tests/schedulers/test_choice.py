"""The choice of the scheduler: by what is installed on the node, and the reasons for rejecting the others."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.config import Config
from exporter.registry import SCHEDULERS, KubernetesSettings, MappingDirSettings, SlurmSettings
from exporter.schedulers.base import Scheduler, SchedulerError, choose_scheduler, open_scheduler
from exporter.schedulers.kubernetes.api import ApiTimeouts, find_api_server
from tests.ordinary import hidden

Choose = Callable[..., Scheduler]


@pytest.fixture(name="chosen")
def _chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Choose]:
    """Choose on a node that has only what the test put into its folder."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    opened: list[Scheduler] = []

    def choose_here(scheduler: Any = "auto") -> Scheduler:
        config = Config(
            scheduler=scheduler,
            slurm=SlurmSettings(node_name="n1", spool_dir=str(tmp_path / "spool")),
            kubernetes=KubernetesSettings(pod_resources_socket=str(tmp_path / "kubelet.sock"), api_url=""),
            mapping_dir=MappingDirSettings(str(tmp_path / "jobs")),
        )
        opened.append(choose_scheduler(config))
        return opened[-1]

    yield choose_here
    for scheduler in opened:
        scheduler.close()


def test_what_is_found_first_is_taken_slurm_before_a_kubelet_before_a_mapping(chosen: Choose, tmp_path: Path) -> None:
    assert chosen().name == "processes"
    (tmp_path / "jobs").mkdir()
    assert chosen().name == "mapping-dir"
    (tmp_path / "kubelet.sock").touch()
    assert chosen().name == "kubernetes"
    (tmp_path / "spool").mkdir()
    assert chosen().name == "slurm"


def test_the_log_says_which_and_why_not_the_others(chosen: Choose, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen()
    (line,) = (record.getMessage() for record in caplog.records if record.name == "exporter.schedulers.base")
    assert line.startswith("scheduler processes; slurm: ")
    assert all(state in line for state in ("spool is not there", "no kubelet at", "jobs: No such file"))


def test_what_is_named_is_taken_and_its_own_reason_given_where_it_is_not_there(chosen: Choose, tmp_path: Path) -> None:
    assert chosen("kubernetes").name == "kubernetes", "a kubelet may come up later"
    with pytest.raises(SchedulerError, match="spool is not there"):
        chosen("slurm")
    with pytest.raises(SchedulerError, match="jobs: No such file"):
        chosen("mapping-dir")
    (tmp_path / "jobs").mkdir()
    assert chosen("mapping-dir").name == "mapping-dir"


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith("exporter.schedulers.kubernetes")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    wanted = r"google.protobuf is missing: pip install 'gpu-efficiency-exporter\[kubernetes\]'"
    with pytest.raises(SchedulerError, match=wanted):
        open_scheduler("kubernetes", Config())


def test_a_node_without_a_kubelet_loads_nothing_of_it(chosen: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith("exporter.schedulers.kubernetes")]:
        monkeypatch.delitem(sys.modules, module)
    chosen()
    assert "exporter.schedulers.kubernetes.scheduler" not in sys.modules


def test_what_a_folder_hides_is_not_taken_for_absent(tmp_path: Path) -> None:
    """A kubelet's folder is root's alone; opened, it gives the reason."""
    absence = SCHEDULERS["kubernetes"].explain_absence
    assert absence is not None
    settings = KubernetesSettings(
        pod_resources_socket=f"{tmp_path}/kubelet.sock", token_file=f"{tmp_path}/token", ca_file=f"{tmp_path}/ca.crt"
    )
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert absence(settings).startswith("no kubelet at")
    assert find_api_server(settings, environ, ApiTimeouts()) is None
    with hidden(tmp_path):
        assert absence(settings) == ""
        assert find_api_server(settings, environ, ApiTimeouts()) is not None
