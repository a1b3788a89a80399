"""Which nodes ran a user's jobs, by a stand-in for sacct that records how it is called."""

import time
from pathlib import Path

import pytest

from exporter.core.job_record import JobRecordQuery
from exporter.schedulers.slurm.accounting import nodes_of_jobs
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError


def sacct(folder: Path, output: str, *, status: int = 0) -> Commands:
    """Commands whose sacct prints that, and writes its arguments to a file."""
    (folder / "said").write_text(output)
    program = folder / "sacct"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/asked"\ncat "{folder}/said"\nexit {status}\n')
    program.chmod(0o755)
    return Commands(bin_dir=f"{folder}")


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


@pytest.mark.parametrize("job", ["4711", "6_1", "7+0"])
def test_the_nodes_of_one_job_of_that_user(tmp_path: Path, job: str) -> None:
    commands = sacct(tmp_path, "gpu[01-02]\ngpu02\nNone assigned\n")
    assert nodes_of_jobs(commands, "ada", JobRecordQuery(job_id=job)) == ("gpu01", "gpu02")
    assert asked(tmp_path) == ["-X", "-n", "-P", "--user=ada", "-j", job, "--format=NodeList"]


def test_all_of_an_array(tmp_path: Path) -> None:
    assert nodes_of_jobs(sacct(tmp_path, "n1\n"), "ada", JobRecordQuery(array_id="6")) == ("n1",)
    assert asked(tmp_path)[4:6] == ["-j", "6"]


def test_of_all_jobs_the_time_is_narrowed(tmp_path: Path) -> None:
    commands = sacct(tmp_path, "")
    assert nodes_of_jobs(commands, "ada", JobRecordQuery(since=time.time() - 5000)) == ()
    began = int(asked(tmp_path)[5].removeprefix("now-"))
    assert 5000 <= began < 6000
    nodes_of_jobs(commands, "ada", JobRecordQuery())
    assert asked(tmp_path)[4:6] == ["-S", "now-2592000"]


@pytest.mark.parametrize("job", ["ml/job/train", "-u bob", "4711;x", "4711,4712", "4711.batch", "4" * 11])
def test_what_is_no_job_of_slurms_is_not_asked_for(tmp_path: Path, job: str) -> None:
    assert nodes_of_jobs(sacct(tmp_path, "n1\n"), "ada", JobRecordQuery(job_id=job)) == ()
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(("output", "status"), [("", 1), ("n[1-\n", 0), ("evil.example/@x\n", 0), ("a:80\n", 0)])
def test_an_answer_that_cannot_be_used_is_an_error(tmp_path: Path, output: str, status: int) -> None:
    with pytest.raises(SlurmUnavailableError, match="sacct"):
        nodes_of_jobs(sacct(tmp_path, output, status=status), "ada", JobRecordQuery(job_id="1"))
