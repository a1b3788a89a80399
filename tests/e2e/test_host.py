"""The whole daemon beside a real job: its control group is real, its GPU a stand-in that rests while CPUs are busy."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.e2e.running import daemon
from tests.nvml_stub.build import build

pytestmark = pytest.mark.e2e
ROOT = Path("/sys/fs/cgroup")
BURN = "import os\nos.nice(19)\nwhile True:\n    sum(range(100000))\n"
WORKS = "gpu 0 gr 90\ngpu 0 tensor 40\n"
RESTS = "".join(f"gpu 0 {rate} 0\n" for rate in ("gr", "sm", "occ", "tensor", "dram", "fp32", "fp16", "int", "util"))


@pytest.fixture(name="group")
def _group() -> Iterator[Path]:
    """The group of a job of Slurm, made by us and removed by its path."""
    mounts = (mount for mount in (ROOT, ROOT / "unified") if (mount / "cpu.pressure").exists())
    mount = next(mounts, None)
    if mount is None or os.geteuid() != 0 or not os.access(mount, os.W_OK):
        pytest.skip("needs control groups of its own: root, and cgroup v2 with PSI")
    slice_ = mount / "system.slice"
    made = not slice_.exists()
    scope = slice_ / f"gpu-efficiency-test-{os.getpid()}_slurmstepd.scope"
    job = scope / "job_4711"
    try:
        slice_.mkdir(exist_ok=True)
        scope.mkdir()
        job.mkdir()
    except OSError as err:
        pytest.skip(f"needs control groups of its own: {err}")
    yield job
    job.rmdir()
    scope.rmdir()
    if made:
        with suppress(OSError):  # somebody else's groups may be there by now
            slice_.rmdir()


def test_a_job_whose_processes_wait_for_a_core_is_told_so(group: Path, tmp_path: Path) -> None:
    script, jobs = tmp_path / "world.txt", tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "0").write_text("4711\n")
    with ExitStack() as stack:
        burners = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", BURN]))
            for _ in range(2 * (os.cpu_count() or 1) + 1)
        ]
        for burner in burners:
            stack.callback(burner.kill)  # before Popen's own end, which waits
            (group / "cgroup.procs").write_text(f"{burner.pid}\n")
        ours = f"count 1\ngpu 0 idle\ngpu 0 process {burners[0].pid} 1024\n"
        script.write_text(ours + WORKS)
        env = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{script}"}
        env |= {"GPU_EFFICIENCY_MAPPING_DIR_PATH": f"{jobs}"}
        served = stack.enter_context(daemon(tmp_path, "serve", "--source", "nvml", "--scheduler", "mapping-dir", **env))
        served.until(lambda page: page.total("job_seconds_total", job_id="4711", leak="useful"), "useful time")
        script.with_suffix(".draft").write_text(ours + RESTS)
        script.with_suffix(".draft").replace(script)
        page = served.until(
            lambda page: page.total("job_stall_seconds_total", job_id="4711", cause="cpu"), "a cause of waiting"
        )
        stalls = page.by("cause", "job_stall_seconds_total", job_id="4711")
        waited = page.by("leak", "job_seconds_total", job_id="4711")
        (job,) = served.get("/api/v1/jobs").json()["jobs"]
    assert stalls.keys() == {"cpu"}
    assert stalls["cpu"] <= waited["unattributed_stall"] + waited["data_stall"]
    assert page.total("job_cpu_cores", job_id="4711") > 0
    assert page.total("job_pressure_ratio", job_id="4711", resource="cpu") > 0
    assert page.total("faults_total", kind="host_unread") == 0
    assert job["cpu_seconds"] > 0
    assert job["pressure"].keys() >= {"cpu", "io", "memory"}
