"""Which nodes ran a user's jobs, by a stand-in for sacct that records how it is called.

A real sacct, above a real slurmdbd, is in tests/e2e/test_slurm_accounting.py.
"""

import time
from pathlib import Path

import pytest

from exporter.core.job_record import JobRecordQuery
from exporter.schedulers.slurm.accounting import nodes_of_jobs
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError


def sacct(folder: Path, output: str) -> Commands:
    """Commands whose sacct prints that, and writes its arguments to a file."""
    (folder / "said").write_text(output)
    program = folder / "sacct"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/asked"\ncat "{folder}/said"\n')
    program.chmod(0o755)
    return Commands(bin_dir=f"{folder}")


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_each_node_of_a_users_job_is_named_once(tmp_path: Path) -> None:
    commands = sacct(tmp_path, "cpu=4|gpu[01-02]\ncpu=4|gpu02\n|None assigned\n")
    assert nodes_of_jobs(commands, "ada", JobRecordQuery(job_id="6_1")) == ("gpu01", "gpu02")
    assert asked(tmp_path) == ["-X", "-D", "-n", "-P", "--user=ada", "-j", "6_1", "--format=AllocTRES,NodeList"]


def test_where_gpus_are_accounted_for_jobs_without_any_are_left_out(tmp_path: Path) -> None:
    rows = "cpu=4,gres/gpu=2|gpu01\ncpu=64|cpu[01-99]\ncpu=4,gres/gpu:a100=1,gres/gpu=1|gpu02\n"
    assert nodes_of_jobs(sacct(tmp_path, rows), "ada", JobRecordQuery()) == ("gpu01", "gpu02")


def test_of_all_jobs_the_time_is_narrowed(tmp_path: Path) -> None:
    commands = sacct(tmp_path, "")
    assert nodes_of_jobs(commands, "ada", JobRecordQuery(since=time.time() - 5000)) == ()
    began = int(asked(tmp_path)[6].removeprefix("now-"))
    assert 5000 <= began < 6000
    nodes_of_jobs(commands, "ada", JobRecordQuery())
    assert asked(tmp_path)[5:7] == ["-S", "now-2592000"]


@pytest.mark.parametrize(
    "job", ["ml/job/train", "-u bob", "4711;x", "4711,4712", "4711.batch", "4" * 11, "\uff14\uff17"]
)
def test_what_is_no_job_of_slurms_is_not_asked_for(tmp_path: Path, job: str) -> None:
    assert nodes_of_jobs(sacct(tmp_path, "|n1\n"), "ada", JobRecordQuery(job_id=job)) == ()
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("output", ["|n[1-\n", "|evil.example/@x\n", "|a:80\n"])
def test_an_answer_that_cannot_be_used_is_an_error(tmp_path: Path, output: str) -> None:
    with pytest.raises(SlurmUnavailableError, match="sacct"):
        nodes_of_jobs(sacct(tmp_path, output), "ada", JobRecordQuery(job_id="1"))
