"""Tests the check of /etc/nccl.conf."""

from pathlib import Path

from exporter.checkup.base import INFO, OK, WARN, CheckContext
from exporter.checkup.nccl import check_communication
from exporter.config import Config, NcclSettings


def found(folder: Path, content: str | None, *, enabled: bool = True) -> list[tuple[str, str]]:
    (folder / "etc").mkdir(exist_ok=True)
    if content is not None:
        (folder / "etc" / "nccl.conf").write_text(content)
    config = Config(nccl=NcclSettings(enabled=enabled))
    context = CheckContext(config=config, etc=folder / "etc", root=folder)
    return [(finding.verdict, finding.message) for finding in check_communication(context, ())]


def test_a_node_is_asked_which_plugin_its_jobs_load(tmp_path: Path) -> None:
    for content in (None, "", "NCCL_DEBUG=INFO\n", "#NCCL_PROFILER_PLUGIN=/x.so\n"):
        ((verdict, message),) = found(tmp_path, content)
        assert (verdict, "has no profiler plugin" in message) == (INFO, True)
    set_up = "NCCL_PROFILER_PLUGIN=/opt/x.so\nNCCL_INSPECTOR_ENABLE=1\n"
    ((verdict, message),) = found(tmp_path, set_up)
    assert (verdict, message.endswith("/opt/x.so, which does not exist")) == (WARN, True)
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "x.so").touch()
    assert found(tmp_path, set_up)[0][0] == OK
    assert found(tmp_path, "NCCL_PROFILER_PLUGIN=inspector")[0][0] == OK
    assert found(tmp_path, set_up, enabled=False) == []
