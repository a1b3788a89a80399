"""Real processes that stand for ranks of a job, each with a plugin's file."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nccl.plugins import JobProcess

StartProcess = Callable[..., JobProcess]


@pytest.fixture(name="start")
def _start(tmp_path: Path) -> Iterator[StartProcess]:
    """Start a process with these variables; its file is that of Inspector unless `file` names another."""
    started: list[JobProcess] = []

    def start(file: str = "dump/node-pid%p.log", **environ: str) -> JobProcess:
        variables = environ or {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": f"{tmp_path}/dump"}
        started.append(JobProcess(f"{tmp_path}/{file}", variables))
        return started[-1]

    yield start
    for process in started:
        process.close()
