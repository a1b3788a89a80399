"""What a node itself shows of its jobs: sockets, processes, device files, slurm.conf; on made-up trees."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import Device
from exporter.schedulers.procfs import read_uuids
from exporter.schedulers.slurm.client import MissingCommandError, SlurmUnavailableError
from exporter.schedulers.slurm.local_node import (
    GpuMap,
    JobTasks,
    LocalNode,
    Slot,
    SlurmConf,
    SpoolReader,
    find_conf,
    parse_slots,
    read_conf,
    read_instances,
)
from tests.schedulers.slurm_rig import BATCH, DEVICES, EXTERN, Proc, bind, recorded

UUIDS = [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(6)]


# Sockets and mapping files.


def test_a_job_has_a_socket_a_step(tmp_path: Path) -> None:
    for name in (f"n1_7.{BATCH}", "n1_7.0", "n1_7.1", f"n1_8.{EXTERN}", "n1_9.0.1", "n2_7.0", "x_3.4"):
        bind(tmp_path / name)
    (tmp_path / "hwloc_topo_7.0.xml").write_text("")
    (tmp_path / "n1_11.0").write_text("no socket")
    (tmp_path / "cred_state").write_text("")
    (tmp_path / "job00007").mkdir()
    seen = SpoolReader("n1", spool=tmp_path, mapping=None).read(0)
    assert {job: {name for name, _, _ in trace.sockets} for job, trace in seen.jobs.items()} == {
        "7": {f"n1_7.{BATCH}", "n1_7.0", "n1_7.1"},
        "8": {f"n1_8.{EXTERN}"},
        "9": {"n1_9.0.1"},
    }
    assert {job: bool(trace.lasting) for job, trace in seen.jobs.items()} == {"7": True, "8": True, "9": False}
    assert seen.foreign_nodes == ("n2", "x")


def test_node_names_may_hold_what_separates(tmp_path: Path) -> None:
    bind(tmp_path / "gpu_1.a_12.0")
    assert set(SpoolReader("gpu_1.a", spool=tmp_path, mapping=None).read(0).jobs) == {"12"}
    assert SpoolReader("gpu", spool=tmp_path, mapping=None).read(0).jobs == {}


def test_mapping_files_are_traces_too(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("7\n8\n")
    (tmp_path / "1").write_text("7\n")
    os.utime(tmp_path / "1", ns=(5, 5))
    (tmp_path / "notes").write_text("9\n")
    jobs = SpoolReader("n1", spool=None, mapping=tmp_path).read(10**18).jobs
    assert {job: trace.files for job, trace in jobs.items()} == {"7": ("0", "1"), "8": ("0",)}
    assert jobs["7"].written == 5


def test_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    for spool, mapping in ((tmp_path / "no", None), (None, tmp_path / "no")):
        with pytest.raises(OSError, match="no"):
            SpoolReader("n1", spool=spool, mapping=mapping).read(0)


# Processes.


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def look(proc: Proc, *jobs: str, name: str = "n1") -> dict[str, JobTasks]:
    node = LocalNode(name, slots=str, proc=proc.root, cgroup=proc.root.parent / "cgroup")
    return node.inspect_jobs(jobs)


def environ(job: str, **said: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "n1", **said}


def test_a_batch_script_says_all_its_gpus_a_step_its_own(proc: Proc) -> None:
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS="0,2"))
    proc.add(61, environ=environ("7", SLURM_JOB_GPUS="0,2", SLURM_STEP_GPUS="2", SLURM_STEPID="0"))
    proc.add(62, environ=environ("8", SLURM_JOB_GPUS="5", SLURM_STEP_GPUS="3-4", SLURM_STEPID="0"))
    found = look(proc, "7", "8", "9")
    assert (found["7"].batch, found["7"].steps, found["7"].processes) == ((0, 2), frozenset({2}), 2)
    assert (found["8"].batch, found["8"].steps) == (None, frozenset({3, 4})), "inherited from another node: wrong here"
    assert found["9"] == JobTasks()
    assert "train.py" in found["7"].command
    assert found["7"].user


@pytest.mark.parametrize("name", ["bash", "slurmstepd"])
def test_only_what_slurmstepd_started_counts(proc: Proc, name: str) -> None:
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS="0"))
    proc.add(61, parent=60, environ=environ("7", SLURM_JOB_GPUS="0,1,2,3"))
    proc.add(70, parent=60, comm=name if name == "bash" else "a) slurmstepd")
    proc.add(71, parent=70, environ=environ("7", SLURM_STEP_GPUS="3", SLURM_STEPID="0"))
    found = look(proc, "7")["7"]
    assert (found.batch, found.steps, found.processes) == ((0,), frozenset(), 1)


@pytest.mark.parametrize("effective", [4242, 0])
def test_a_user_s_process_of_that_name_is_not_slurmstepd(proc: Proc, effective: int) -> None:
    """Even one that is setuid: root owns its /proc/PID then, but the real uid is of who began it."""
    proc.add(70, parent=1, comm="slurmstepd")
    (proc.root / "70/status").write_text(f"Name:\tslurmstepd\nUid:\t4242\t{effective}\t0\t0\n")
    proc.add(71, parent=70, environ=environ("7", SLURM_JOB_GPUS="3"))
    assert look(proc, "7")["7"] == JobTasks()


def test_other_slurmds_on_the_host_are_not_ours(proc: Proc) -> None:
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS="0") | {"SLURMD_NODENAME": "n2"})
    assert look(proc, "7")["7"].batch is None
    assert look(proc, "7", name="n2")["7"].batch == (0,)


@pytest.mark.parametrize(
    "path",
    [
        "freezer/slurm_n1/uid_1001/job_7/step_batch",
        "devices/slurm/uid_1001/job_7/step_0/task_0",
        "system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        "system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_special",
        "system.slice/n1_slurmstepd.scope/s321M8E9Y2V700/step_batch/user/task_0",
        "gpu.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0",
        "gpu.slice/gpu-batch.slice/slurmstepd.scope/s321M8E9Y2V700/step_batch/user/task_0",
    ],
)
def test_control_groups_spare_the_walk_through_proc(proc: Proc, path: str) -> None:
    group = proc.root.parent / "cgroup" / path
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("60\n99\n")
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS="1"))
    proc.add(61, environ=environ("7", SLURM_STEP_GPUS="5", SLURM_STEPID="0"))
    found = look(proc, "7")["7"]
    assert (found.batch, found.steps) == ((1,), frozenset()), "61 is not in the group"


@pytest.mark.parametrize("said", ["", "x", "0,,1", "0-99999999", "²", "-1"])
def test_numbers_that_are_none_are_nothing(proc: Proc, said: str) -> None:
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS=said, SLURM_STEP_GPUS=said))
    assert (look(proc, "7")["7"].batch, look(proc, "7")["7"].steps) == (None, frozenset())


def test_visible_devices_count_only_as_uuids(proc: Proc) -> None:
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS="3", CUDA_VISIBLE_DEVICES="MIG-a,MIG-b"))
    proc.add(61, environ=environ("8", SLURM_JOB_GPUS="3", CUDA_VISIBLE_DEVICES="0"))
    found = look(proc, "7", "8")
    assert (found["7"].uuids, found["8"].uuids) == (("MIG-a", "MIG-b"), ())


def test_sockets_that_are_bound(proc: Proc) -> None:
    node = LocalNode("n1", slots=str, proc=proc.root)
    assert node.listening() == frozenset()
    proc.sockets("/var/spool/slurmd/n1_7.0", "@/tmp/.X11", "/run/systemd/notify")
    assert "n1_7.0" in node.listening()


# Resolving GPUs.


@pytest.mark.parametrize("version", ["slurm-22.05", "slurm-24.11"])
def test_an_index_is_a_place_in_the_list_not_the_number_that_is_printed(version: str) -> None:
    slots = parse_slots(recorded(f"{version}/slurmd-G.reordered.txt"))
    assert [slot.minor for slot in slots["gpu"]] == [4, 5, 1, 2]
    assert slots["shard"] == slots["gpu"]
    plain = parse_slots(recorded(f"{version}/slurmd-G.txt"))
    assert [slot.minor for slot in plain["gpu"]] == list(range(8))


def test_a_mig_instance_is_one_place_with_several_files() -> None:
    assert parse_slots(recorded("slurm-24.11/slurmd-G.mig.txt"))["gpu"] == (
        Slot(0, (21, 30)),
        Slot(1, (12, 30)),
        Slot(3),
    )
    assert parse_slots(recorded("slurm-22.05/slurmd-G.mig.txt"))["gpu"] == (Slot(0, (21, 30)), Slot(1, (30,)), Slot(3))


def test_other_shapes_of_slurmd_s_list() -> None:
    said = "slurmd: Gres Name=gpu Type=(null) Count=2 ID=1 File=/dev/nvidia[4-5] (null)\n"
    assert parse_slots(said)["gpu"] == (Slot(4), Slot(5))
    assert parse_slots("slurmd: Gres Name=gpu Type=x Count=2 Index=-1 ID=1 (null)")["gpu"] == (Slot(), Slot())
    with pytest.raises(ValueError, match="no GPU"):
        parse_slots("slurmd: fatal: can't stat gres.conf file /dev/nvidia0")


@pytest.fixture
def places(proc: Proc) -> GpuMap:
    """Boards whose minors differ from the driver's order, one of them in MIG mode."""
    for minor in range(4):
        proc.board(minor, UUIDS[minor])
    proc.board(5, "GPU-????????-????-????-????-????????????")
    proc.capability(2, "gi7", 21)
    proc.capability(2, "gi7/ci0", 22)
    proc.capability(2, "gi9", 30)
    slots = {"gpu": (Slot(1), Slot(0), Slot(2, (21, 22)), Slot(2, (30,)), Slot(2), Slot(), Slot(5), Slot(3, (99,)))}
    return GpuMap(slots, read_uuids(proc.root), read_instances(proc.root))


CUT = (
    *(Device(UUIDS[minor], str(3 - minor)) for minor in range(4)),
    Device("MIG-seven", "1:7", parent=UUIDS[2]),
    Device("MIG-nine", "1:9", parent=UUIDS[2]),
)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, (UUIDS[1],)),
        (1, (UUIDS[0],)),
        (2, ("MIG-seven",)),
        (3, ("MIG-nine",)),
        (4, ("MIG-seven", "MIG-nine")),
    ],
)
def test_from_index_to_uuid(places: GpuMap, index: int, expected: tuple[str, ...]) -> None:
    assert places.uuids_at("gpu", index, CUT) == expected
    assert places.uuids_at("mps", index, CUT) == expected, "counts the same list"


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (5, "no device file"),
        (6, "nvidia5 is not in /proc/driver/nvidia"),
        (7, "nvidia-cap99 is no MIG instance"),
        (8, "lists 8"),
    ],
)
def test_what_leads_nowhere_is_a_reason(places: GpuMap, index: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        places.uuids_at("gpu", index, CUT)


def test_a_gpu_that_the_source_does_not_see_is_a_reason(places: GpuMap) -> None:
    with pytest.raises(ValueError, match="no GPU that the source sees"):
        places.uuids_at("gpu", 0, DEVICES)
    with pytest.raises(ValueError, match="GPU instance 9 of /dev/nvidia2 is no device"):
        places.uuids_at("gpu", 3, CUT[:5])


def test_without_the_driver_s_proc_a_minor_is_the_driver_s_ordinal() -> None:
    assert GpuMap({"gpu": (Slot(3),)}).uuids_at("gpu", 0, DEVICES) == ("GPU-3",)
    assert GpuMap(None).uuids_at("gpu", 2, DEVICES) == ("GPU-2",)


def test_slurmd_s_list_is_read_or_taken_for_granted_or_empty(proc: Proc) -> None:
    def places(slots: str | Exception) -> GpuMap:
        def say() -> str:
            if isinstance(slots, str):
                return slots
            raise slots

        return LocalNode("n1", slots=say, proc=proc.root).gpu_map()

    assert places(recorded("slurm-22.05/slurmd-G.reordered.txt")).uuids_at("gpu", 0, (*CUT[:1], Device("G", "4"))) == (
        "G",
    )
    assert places(recorded("slurm-22.05/slurmd-G.txt")).problem == ""
    absent = places(MissingCommandError("no slurmd"))
    assert (absent.uuids_at("gpu", 2, DEVICES), absent.fault) == (
        ("GPU-2",),
        "gres index N is taken for /dev/nvidiaN, because no slurmd",
    )
    for failed in ("slurmd: fatal: nothing", SlurmUnavailableError("slurmd -G: no answer, nothing")):
        with pytest.raises(ValueError, match="lists 0"):
            places(failed).uuids_at("gpu", 0, DEVICES)
        assert re.match("the GPUs of jobs are unknown: .*nothing", places(failed).fault)


# slurm.conf.


def test_slurm_conf_with_includes_and_continued_lines(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "# SlurmdSpoolDir=/no\nClusterName=c\nslurmdspooldir=/var/spool/%h/%n # ours\nInclude nodes.conf\n"
    )
    (tmp_path / "nodes.conf").write_text(
        "NodeName=DEFAULT CPUs=4\nNodeName=gpu[01-03] \\\n  Gres=gpu:8 State=UNKNOWN\n"
        'NodeName=a[1-2] NodeHostname=b[1-2] Reason="x y"\nNodeName=c[1-2] NodeHostname=c0\n'
    )
    path = str(tmp_path / "slurm.conf")
    assert read_conf(path, host="gpu02").nodes == ("gpu02",)
    assert read_conf(path, host="b2").nodes == ("a2",)
    assert read_conf(path, host="c0").nodes == ("c1", "c2")
    assert read_conf(path, host="gpu02").spool_dir("gpu02", host="h") == Path("/var/spool/h/gpu02")
    assert SlurmConf("x").spool_dir("n") == Path("/var/spool/slurmd")


def test_a_conf_that_includes_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("include slurm.conf\n")
    with pytest.raises(ValueError, match="include one another"):
        read_conf(str(tmp_path / "slurm.conf"))


def test_where_slurm_conf_is() -> None:
    assert find_conf("/a", {"SLURM_CONF": "/b"}) == "/a"
    assert find_conf("", {"SLURM_CONF": "/b"}) == "/b"


@given(said=st.text(max_size=200))
def test_any_conf_is_read_or_refused(said: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("conf") / "slurm.conf"
    path.write_text(said, errors="ignore")
    try:
        read_conf(str(path))
    except (ValueError, OSError):
        return


@given(data=st.binary(max_size=200))
def test_any_environment_is_read(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    proc = Proc(tmp_path_factory.mktemp("p") / "proc")
    proc.add(60)
    (proc.root / "60/environ").write_bytes(b"SLURM_JOB_ID=7\0SLURM_JOB_GPUS=" + data)
    found = look(proc, "7")["7"]
    assert found.batch is None or all(gpu >= 0 for gpu in found.batch)


def test_groups_of_a_job_that_ends_meanwhile_end_no_inspection(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that inspects would end with it, and no job be known any more."""
    group = proc.root.parent / "cgroup/system.slice/slurmstepd.scope/s321M8E9Y2V700"
    group.mkdir(parents=True)
    proc.add(60, environ=environ("7", SLURM_JOB_GPUS="1"))
    glob = Path.glob

    def gone(path: Path, pattern: str) -> Iterator[Path]:
        yield from glob(path, pattern)
        if path.name == "slurmstepd.scope":
            raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "glob", gone)
    assert look(proc, "7")["7"].batch == (1,)
