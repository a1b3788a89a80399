"""Tests which control group is a job's, and its counters: in files as the kernel's documentation shows them."""

from pathlib import Path

import pytest

from exporter.host.cgroups import CgroupTree, JobGroup, exclusive, job_path, levels, parse_paths, read_counters

POD = "8f2f9a3e-1b7c-4f0e-9a55-0d6a0e1f7c11"
CONTAINER = "c" * 64
SLUID = "s0123456789ABC"
SCOPE = "/system.slice/slurmstepd.scope"
SLICE = f"kubepods-burstable-pod{POD.replace('-', '_')}.slice"
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/{SLICE}"


@pytest.mark.parametrize(
    ("path", "job_id", "top"),
    [
        (f"{SCOPE}/job_4711/step_0/user/task_0", "4711", f"{SCOPE}/job_4711"),
        ("/system.slice/n1_slurmstepd.scope/job_7/step_0", "7", "/system.slice/n1_slurmstepd.scope/job_7"),
        (f"{SCOPE}/{SLUID}/step_0/user", "7", f"{SCOPE}/{SLUID}"),
        (f"{SCOPE}/system", "7", ""),
        ("/slurm/uid_1000/job_55/step_batch/task_0", "55", "/slurm/uid_1000/job_55"),
        ("/slurm_n1/uid_1000/job_55/step_batch", "55", "/slurm_n1/uid_1000/job_55"),
        ("/user.slice/user-1000.slice/job_55", "55", ""),
        (f"{BURSTABLE}/cri-containerd-{CONTAINER}.scope", "ml/pod", BURSTABLE),
        (f"/kubepods/besteffort/pod{POD}/{CONTAINER}", "ml/pod", f"/kubepods/besteffort/pod{POD}"),
        (f"/kubepods/pod{'0' * 32}/{CONTAINER}", "ml/static", f"/kubepods/pod{'0' * 32}"),
        (f"/system.slice/docker-{CONTAINER}.scope", "any", f"/system.slice/docker-{CONTAINER}.scope"),
        ("/lxc.payload.box/user.slice", "any", "/lxc.payload.box"),
        ("/system.slice/train.service", "ada/train.service", "/system.slice/train.service"),
        ("/system.slice/train.service", "ada/other.service", ""),
        ("/system.slice/slurmd.service", "4711", ""),
        ("/user.slice/user-1000.slice/session-3.scope", "ada/no-unit", ""),
        ("/", "4711", ""),
    ],
)  # fmt: skip
def test_a_jobs_own_group_is_found_and_no_other_taken_for_it(path: str, job_id: str, top: str) -> None:
    assert job_path(path, job_id) == top


def test_lines_that_are_no_hierarchy_are_skipped() -> None:
    text = "0::/a:b\n3:cpu,cpuacct:/c\nnonsense\n7:x\n1:name=systemd:relative\n\n"
    assert list(parse_paths(text)) == [("", "/a:b"), ("cpu,cpuacct", "/c")]


def made(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
    (root / "cgroup.procs").touch()
    return root


def test_the_unified_hierarchy_may_be_mounted_beside_version_1(tmp_path: Path) -> None:
    job = "system.slice/slurmstepd.scope/job_7"
    made(tmp_path / "unified", job)
    (tmp_path / "cpuacct/slurm/uid_1/job_7/step_0").mkdir(parents=True)
    text = f"4:memory:/slurm/uid_1/job_7\n3:cpuacct:/slurm/uid_1/job_7/step_0\n2:cpu:/gone\n0::/{job}\n"
    assert list(CgroupTree(tmp_path).groups(text, "7")) == [
        JobGroup("cpuacct", tmp_path / "cpuacct/slurm/uid_1/job_7", tmp_path / "cpuacct/slurm/uid_1/job_7/step_0"),
        JobGroup("", tmp_path / "unified" / job, tmp_path / "unified" / job),
    ]


def test_a_path_outside_of_our_namespace_is_found_below_a_known_parent(tmp_path: Path) -> None:
    made(tmp_path, f"{BURSTABLE[1:]}/cri-containerd-{CONTAINER}.scope")
    text = f"0::/../../{SLICE}/cri-containerd-{CONTAINER}.scope\n"
    (group,) = CgroupTree(tmp_path).groups(text, "ml/pod")
    assert group.top == tmp_path / BURSTABLE[1:]
    assert [path.name for path in levels(group)] == [f"cri-containerd-{CONTAINER}.scope", SLICE]


@pytest.mark.parametrize(
    "path", ["/../../../etc", "/../a/../../etc", "/job_1/../../../etc", "/nowhere", "/", "/job_1\0", "/" + "x" * 5000]
)
def test_no_path_leads_out_of_the_hierarchy(tmp_path: Path, path: str) -> None:
    root = made(tmp_path / "a/b", "job_1")
    (tmp_path / "etc").mkdir()
    assert list(CgroupTree(root).groups(f"0::{path}\n", "1")) == []


def test_a_group_that_two_jobs_or_this_daemon_share_belongs_to_none(tmp_path: Path) -> None:
    def group(name: str) -> JobGroup:
        return JobGroup("", tmp_path / name, tmp_path / name)

    by_job = {"a": [group("pod"), group("own")], "b": [group("pod/inner")], "c": [group("us")]}
    assert exclusive(by_job, [group("us/daemon")]) == {"a": (group("own"),), "b": (group("pod/inner"),), "c": ()}


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


PRESSURE = "some avg10=0.72 avg60=0.54 avg300=1.04 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.14 total=1\n"


def test_counters_of_version_2_are_in_seconds(tmp_path: Path) -> None:
    stat = "usage_usec 2500000\nuser_usec 1\nsystem_usec 1\nnr_periods 90\nnr_throttled 20\nthrottled_usec 1500000\n"
    written(tmp_path, cpu__stat=stat, cpu__max="200000 100000\n", io__pressure=PRESSURE.format(some=16057337))
    written(tmp_path, cpu__pressure=PRESSURE.format(some=7), memory__pressure=PRESSURE.format(some=0))
    assert read_counters(tmp_path) == {
        "cpu": 2.5, "throttled": 1.5, "throttled_periods": pytest.approx(2.0), "pressure_cpu": 7e-6,
        "pressure_io": 16.057337, "pressure_memory": 0.0,
    }  # fmt: skip


def test_counters_of_version_1_have_other_names_and_units(tmp_path: Path) -> None:
    written(
        tmp_path, cpuacct__usage="3000000000\n", cpu__stat="nr_periods 9\nnr_throttled 5\nthrottled_time 400000000\n"
    )
    written(tmp_path, cpu__cfs_period_us="100000\n")
    assert read_counters(tmp_path) == {"cpu": 3.0, "throttled": 0.4, "throttled_periods": pytest.approx(0.5)}


@pytest.mark.parametrize(
    "text",
    ["", "some", "some total=", "some total=-5", "some avg10=x total=1e9", "full total=5", "some total=" + "9" * 30],
)
def test_pressure_that_cannot_be_read_is_missing(tmp_path: Path, text: str) -> None:
    written(tmp_path, cpu__stat="usage_usec many\nusage_usec\n\0", io__pressure=text)
    (tmp_path / "memory.pressure").mkdir()
    assert read_counters(tmp_path) == {}


def test_what_is_endless_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "io.pressure").symlink_to("/dev/zero")
    written(tmp_path, cpu__stat="x" * 1_000_000)
    assert read_counters(tmp_path) == {}
