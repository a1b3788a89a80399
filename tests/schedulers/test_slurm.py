"""A Slurm node's jobs, from their first socket to their last: on real sockets, with a simulated controller."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.config import Config, HostSettings, WorkloadRule, WorkloadSettings
from exporter.core.model import SECOND, Device, Process, Reading
from exporter.registry import SlurmSettings
from exporter.schedulers.base import Member, SchedulerError
from exporter.schedulers.slurm.local_node import JobTasks, Slot
from exporter.schedulers.slurm.notation import Gres
from exporter.schedulers.slurm.scheduler import SlurmScheduler, open_slurm
from tests.ordinary import hidden
from tests.schedulers.slurm_rig import BATCH, BEGIN, DEVICES, EXTERN, NODE, Proc, Rig, bind, job
from tests.waiting import wait_for

Slots = dict[str, tuple[Slot, ...]]
NO_ANSWER = "slurmd -N node1 -G: no answer within 30 s"


def free_but(*held: str) -> dict[str, str]:
    """All GPUs but these, which may be somebody's."""
    return {device.uuid: "unknown" for device in DEVICES if device.uuid not in held}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def mapped(tmp_path: Path) -> Rig:
    return Rig(tmp_path, mapping=True)


def test_a_job_is_told_with_its_owner_since_its_start(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, 2, comment="team=nlp", time_limit_seconds=1800.0, restarts=2)
    rig.socket("7")
    first, second = rig.told()
    assert {first.uuid, second.uuid} == {"GPU-0", "GPU-2"}
    owner = first.owner
    assert (owner.job_id, owner.scheduler, owner.user, owner.account, owner.partition, owner.qos, owner.name) == (
        "7", "slurm", "alice", "nlp", "gpu", "normal", "train",
    )  # fmt: skip
    assert (owner.comment, owner.nodes, owner.time_limit_seconds, owner.kind) == ("team=nlp", 1, 1800.0, "batch")
    assert (first.start, first.end, first.gpus, first.restarts) == (BEGIN - 5 * SECOND, None, 2, 2)


def test_the_start_follows_the_wall_clock_of_the_answer(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, started=100)
    rig.socket("7")
    (held,) = rig.told()
    assert held.start == BEGIN - 100 * SECOND
    rig.offset += 3600 * SECOND  # the clock was set: what is known stays
    (held,) = rig.told()
    assert held.start == BEGIN - 100 * SECOND


def test_a_job_change_is_one_question_and_none_when_nothing_changes(rig: Rig) -> None:
    rig.answers.jobs |= {"7": replace(job("7", 0), sluid="s321M8E9Y2V700"), "8": job("8", 1)}
    rig.socket("7")
    for _ in range(30):
        rig.tick()
    assert rig.answers.asked == ["7"]
    looked = list(rig.here.inspected)
    rig.socket("8")
    steps = [rig.socket("8", str(step)) for step in range(3)]
    for _ in range(20):
        rig.tick()
    rig.end(*steps)
    rig.tick()
    assert rig.answers.asked == ["7", "8"]
    assert rig.here.inspected == [*looked, "8"]
    assert rig.here.gpu_map_read == 1


def test_a_job_ends_when_its_last_trace_is_gone_and_is_told_once(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0)
    batch, step = rig.socket("7"), rig.socket("7", "0")
    rig.told()
    rig.end(batch)
    assert rig.held() == {"GPU-0": "7"}, "a step is still there"
    rig.end(step)
    (ended,) = rig.told()
    assert (ended.end, ended.uuid) == (rig.now, "GPU-0")
    assert rig.told() == ()
    assert rig.answers.asked == ["7"], "its batch script was seen: nobody need be asked whether it is over"


def test_the_mapping_is_kept_while_the_job_completes(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0)
    rig.socket("7")
    rig.told()
    rig.answers.jobs["7"] = job("7", state="COMPLETING", on_gpus=True)
    rig.socket("7", "0")
    assert rig.held(60.0) == {"GPU-0": "7"}


def test_a_requeued_job_is_another_run_even_within_a_tick(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0)
    batch = rig.socket("7")
    rig.told()
    rig.end(batch)
    rig.answers.jobs["7"] = job("7", 3, restarts=1, started=-1)
    other = rig.spool / "other"
    other.write_text("")  # so that the inode is not reused
    rig.socket("7")
    told = rig.told()
    assert [(a.uuid, a.end is None, a.restarts) for a in sorted(told, key=lambda a: a.uuid)] == [
        ("GPU-0", False, 0),
        ("GPU-3", True, 1),
    ]
    assert rig.answers.asked == ["7", "7"]


def test_an_answer_about_an_earlier_run_is_dropped(rig: Rig) -> None:
    rig.tick()
    rig.answers.jobs["7"] = job("7", 0)
    batch = rig.socket("7")
    rig.scheduler.poll(rig.now, DEVICES, ())
    rig.work()
    rig.end(batch)
    (rig.spool / "other").write_text("")
    rig.socket("7")
    polled = rig.scheduler.poll(rig.now + SECOND, DEVICES, ())
    assert polled is not None
    assert {a.owner.job_id for a in polled.allocations} == {"unknown"}, "the new run has not been told of yet"


def test_a_start_that_is_yet_to_come_is_not_believed(rig: Rig) -> None:
    """A requeued job that waits while its last run is completing; or a clock that is behind the controller's."""
    rig.answers.jobs["7"] = job("7", 0, started=-1000)
    rig.socket("7")
    assert [a.start for a in rig.told()] == [BEGIN + SECOND]
    assert [a.start for a in rig.told(50.0)] == [BEGIN + SECOND]


def test_who_comes_next_never_overlaps_who_was_there(rig: Rig) -> None:
    rig.answers.jobs |= {"7": job("7", 0), "8": job("8", 0, started=2)}
    batch = rig.socket("7")
    rig.told()
    rig.end(batch)
    rig.socket("8")
    ended, begun = sorted(rig.told(), key=lambda a: a.owner.job_id)
    assert (ended.owner.job_id, begun.owner.job_id) == ("7", "8")
    assert begun.start == ended.end == rig.now


def test_an_allocation_between_two_steps_is_asked_about_ever_more_seldom(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, batch=False)
    step = rig.socket("7", "0")
    (held,) = rig.told()
    assert held.owner.kind == "interactive"
    assert held.owner.workload_class == "interactive"
    rig.end(step)
    asked = []
    for _ in range(1000):
        before = len(rig.answers.asked)
        assert rig.held() == {"GPU-0": "7"}
        asked += [(rig.now - BEGIN) // SECOND] * (len(rig.answers.asked) - before)
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps == [30, 60, 120, 240, 300]
    rig.socket("7", "1")
    assert rig.held() == {"GPU-0": "7"}
    rig.end(rig.spool / f"{NODE}_7.1")
    rig.answers.jobs["7"] = job("7", state="COMPLETED", on_gpus=True)
    assert rig.held() == {}


@pytest.mark.parametrize("gone", ["unknown", "over", "elsewhere"])
def test_an_allocation_without_a_step_ends_when_the_controller_says_so(rig: Rig, gone: str) -> None:
    rig.answers.jobs["7"] = job("7", 0, batch=False)
    step = rig.socket("7", "0")
    rig.told()
    rig.end(step)
    if gone == "unknown":
        del rig.answers.jobs["7"]
    else:
        rig.answers.jobs["7"] = job("7", state="CANCELLED" if gone == "over" else "RUNNING", hosts="node2")
    (ended,) = rig.told()
    assert ended.end is not None


def test_an_extern_step_ends_with_the_allocation(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, batch=False)
    extern = rig.socket("7", EXTERN)
    rig.told()
    rig.end(extern)
    assert rig.held() == {}
    assert rig.answers.asked == ["7"]


def test_a_job_without_gpus_is_asked_about_once(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7")
    step = rig.socket("7", "0")
    for _ in range(40):
        assert rig.told() == ()
    rig.end(step)
    rig.tick()
    assert rig.answers.asked == ["7"]


def test_a_step_less_trace_that_never_had_a_gpu_is_dropped(rig: Rig) -> None:
    rig.answers.silent = "no answer"
    step = rig.socket("7", "0")
    rig.tick()
    rig.end(step)
    polled = rig.tick()
    assert polled is not None
    assert polled.unanswered_since is None, "what was asked about a job that is gone is asked no more"


# Precedence of sources.


def test_without_the_controller_s_list_the_batch_script_s_environment_says_which_gpus(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", gpus=2, gpus_here=2, on_gpus=True)
    rig.here.tasks["7"] = JobTasks("alice", batch=(1, 3), processes=1)
    rig.socket("7")
    assert rig.held() == {"GPU-1": "7", "GPU-3": "7"}
    assert rig.answers.asked == ["7"]


def test_an_environment_that_does_not_fit_what_was_asked_for_is_checked(rig: Rig) -> None:
    """A process may have replaced its environment."""
    rig.answers.jobs["7"] = job("7", gpus=1, gpus_here=1, on_gpus=True)
    rig.answers.details["7"] = job("7", 0)
    rig.here.tasks["7"] = JobTasks("alice", batch=(1, 3), processes=1)
    rig.socket("7")
    for _ in range(10):
        rig.tick()
    assert rig.held() == {"GPU-0": "7"}
    assert rig.answers.asked == ["7", "detail 7"]


def test_steps_say_it_where_they_have_all_that_was_asked_for(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", gpus=2, gpus_here=2, on_gpus=True)
    rig.here.tasks["7"] = JobTasks("alice", steps=frozenset({1}), processes=1)
    rig.socket("7", "0")
    assert rig.held() == {"GPU-1": "7"} | free_but("GPU-1"), "a part is better than nothing; any other may be its too"
    rig.here.tasks["7"] = JobTasks("alice", steps=frozenset({2}), processes=1)
    rig.socket("7", "1")
    rig.tick()
    assert rig.held(10.0) == {"GPU-1": "7", "GPU-2": "7"}
    assert rig.answers.asked == ["7"]


def test_the_price_of_a_detail_is_paid_once_after_looking_three_times(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", gpus=2, gpus_here=2, on_gpus=True)
    rig.answers.details["7"] = job("7", 0, 3)
    rig.socket("7")
    assert rig.held() == free_but()
    for _ in range(60):
        rig.tick()
    assert rig.held() == {"GPU-0": "7", "GPU-3": "7"}
    assert rig.answers.asked == ["7", "detail 7"]
    assert rig.here.inspected.count("7") <= 7


@pytest.mark.parametrize("steps_first", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_controller_s_list_counts_whatever_an_environment_says(rig: Rig, nodes: int, *, steps_first: bool) -> None:
    """A user writes it: `srun env SLURM_STEP_GPUS=3 python train.py`."""
    rig.answers.jobs["7"] = job("7", 0, nodes=nodes, hosts=f"node[1-{nodes}]")
    honest, forged = (JobTasks("alice", steps=frozenset({gpu}), processes=2) for gpu in (0, 3))
    rig.here.tasks["7"] = forged if steps_first else honest
    rig.socket("7", "0")
    assert rig.held() == {"GPU-0": "7"}
    rig.here.tasks["7"] = forged
    rig.socket("7", "1")
    for _ in range(70):
        rig.tick()
    assert rig.held() == {"GPU-0": "7"}
    told = [f for f in rig.faults() if "job 7: the controller lists GPU 0 for this node" in f]
    assert len(told) == 2 * (nodes > 1), "of a job on several nodes, the list may be another node's"


def test_the_controller_s_list_replaces_what_the_environment_said_before(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", gpus=1, gpus_here=1, on_gpus=True)
    rig.here.tasks["7"] = JobTasks("alice", batch=(3,), steps=frozenset({3}), processes=2)
    rig.socket("7")
    assert rig.held() == {"GPU-3": "7"}, "until the controller lists its GPUs"
    rig.answers.jobs["7"] = job("7", 0)
    rig.tick(40.0)
    rig.end(rig.spool / f"{NODE}_7.{BATCH}")
    rig.socket("7", "0")
    rig.tick()
    assert rig.held() == {"GPU-0": "7"}
    assert rig.answers.asked == ["7", "7"]


def test_a_mapping_file_goes_before_all(mapped: Rig) -> None:
    assert mapped.mapping is not None
    mapped.answers.jobs["7"] = job("7", 0)
    (mapped.mapping / "3").write_text("7\n")
    mapped.socket("7")
    assert mapped.held() == {"GPU-3": "7"}
    mapped.end(mapped.spool / f"{NODE}_7.{BATCH}")
    assert mapped.held() == {"GPU-3": "7"}, "an allocation without a step"
    (mapped.mapping / "3").unlink()
    assert mapped.held() == {}
    assert mapped.answers.asked == ["7"]


def test_a_job_whose_socket_comes_after_its_mapping_file_is_queried_once(mapped: Rig) -> None:
    """The prolog writes the file before slurmstepd binds the socket: an inspection in between finds neither."""
    assert mapped.mapping is not None
    for gpu, number in ((0, "7"), (1, "8")):
        mapped.answers.jobs[number] = job(number, gpu)
        (mapped.mapping / f"{gpu}").write_text(f"{number}\n")
    mapped.socket("7")
    mapped.tick()
    mapped.socket("8")
    mapped.tick()
    assert mapped.held() == {"GPU-0": "7", "GPU-1": "8"}
    assert mapped.answers.asked == ["7", "8"]


def test_mapping_files_may_name_instances_and_uuids(mapped: Rig) -> None:
    assert mapped.mapping is not None
    instance = Device("MIG-x", "3:7", parent="GPU-3", weight=142_857)
    mapped.answers.jobs["7"] = job("7")
    for name in ("3.7", "GPU-1", "9.9"):
        (mapped.mapping / name).write_text("7\n")
    held = {a.uuid: a.owner.job_id for a in mapped.told(devices=(*DEVICES, instance))}
    assert held == {"MIG-x": "7", "GPU-1": "7"} | free_but("GPU-1"), "the third may be any"
    assert any("9.9 names no GPU" in fault for fault in mapped.faults())


def test_shards_of_one_gpu_are_several_owners(rig: Rig) -> None:
    shard = job("7", 2)
    given = {NODE: (replace(shard.given[NODE][0], name="shard"),)} if shard.given else None
    rig.answers.jobs |= {n: replace(shard, job_id=n, given=given, gpus=None) for n in ("7", "8")}
    rig.socket("7")
    rig.socket("8")
    told = rig.told()
    assert sorted((a.uuid, a.owner.job_id, a.gpus) for a in told) == [("GPU-2", "7", 1), ("GPU-2", "8", 1)]
    for _ in range(90):
        rig.tick()
    assert rig.answers.asked == ["7", "8"], "that is what shards are for: nobody is asked why"


def test_shards_that_the_prolog_recorded_are_several_owners_too(mapped: Rig) -> None:
    """Its file of a shard's GPU is that of a whole one. 22.05 tells only what was requested."""
    assert mapped.mapping is not None
    (mapped.mapping / "2").write_text("7\n8\n")
    for number in ("7", "8"):
        mapped.answers.jobs[number] = job(number, gpus=None, on_gpus=True, on_shares=True)
        mapped.socket(number)
    for _ in range(400):
        told = mapped.told()
    assert sorted((a.uuid, a.owner.job_id) for a in told) == [("GPU-2", "7"), ("GPU-2", "8")]
    assert mapped.answers.asked == ["7", "8"]


def test_an_index_that_leads_to_no_gpu_is_a_fault_not_a_guess(rig: Rig) -> None:
    rig.here.slots = {"gpu": (Slot(0), Slot(1))}
    rig.answers.jobs["7"] = job("7", 1, 3)
    step = rig.socket("7")
    assert rig.held() == {"GPU-1": "7"} | free_but("GPU-1"), "nor is the GPU free that is not known"
    assert any("scheduler_refused" in f and "index 3 of gres/gpu is not in `slurmd -G`" in f for f in rig.faults())
    rig.tick()
    assert any("index 3 of gres/gpu" in f for f in rig.faults()), "as long as it is so"
    for _ in range(130):
        rig.tick()
    assert 2 <= rig.here.gpu_map_read <= 4, "the list is read again, at most once a minute"
    rig.end(step)
    assert rig.held() == {}


def test_while_slurmd_lists_nothing_no_gpu_is_free_beside_a_running_job(mapped: Rig) -> None:
    """As of a node that slurm.conf does not have: dynamic (slurmd -Z), or of a wrong slurm.node_name."""
    assert mapped.mapping is not None
    mapped.here.slots = {}
    mapped.answers.jobs |= {"7": job("7", 0), "8": job("8")}
    mapped.socket("8")
    assert mapped.held() == {}, "nor is one of a job that has none"
    mapped.socket("7")
    assert mapped.held() == free_but()
    (mapped.mapping / "2").write_text("7\n")
    assert mapped.held() == free_but()
    assert any("index 2 of gres/gpu is not in `slurmd -G`" in fault for fault in mapped.faults())
    mapped.here.slots = {"gpu": (Slot(3), Slot(2), Slot(1), Slot(0))}
    assert mapped.held(61.0) == {"GPU-1": "7"}


def test_slurmd_s_list_is_asked_for_each_minute_until_it_is_known_and_each_fault_says_why(rig: Rig) -> None:
    """At boot AutoDetect=nvml may take longer than a command may."""
    rig.answers.jobs["7"] = job("7", 0)
    rig.here.slots, rig.here.problem = {}, NO_ANSWER
    rig.socket("7")
    for _ in range(59):
        assert rig.held() == free_but()
        assert any("scheduler_refused" in f and f"the GPUs of jobs are unknown: {NO_ANSWER}" in f for f in rig.faults())
    assert rig.here.gpu_map_read == 1
    rig.here.slots, rig.here.problem = {"gpu": (Slot(3),)}, ""
    rig.tick(2.0)
    assert rig.held() == {"GPU-3": "7"}
    assert (rig.faults(), rig.here.gpu_map_read) == ([], 2)


def test_a_list_that_stays_unknown_is_asked_for_at_growing_pauses_and_a_new_problem_soon(rig: Rig) -> None:
    """Each try may take half a minute of the thread that queries jobs."""
    rig.here.slots, rig.here.problem = {}, NO_ANSWER
    read = []
    for _ in range(221):
        rig.tick(10.0)
        read.append(rig.here.gpu_map_read)
    assert [10 * read.index(number) for number in range(1, 8)] == [0, 60, 180, 420, 900, 1500, 2100]
    rig.here.slots, rig.here.problem = {"gpu": (Slot(0),)}, ""
    rig.tick(600.0)
    rig.here.problem = NO_ANSWER
    rig.tick(600.0)
    assert rig.here.gpu_map_read == 9
    for _ in range(6):
        rig.tick(10.0)
    assert rig.here.gpu_map_read == 10


@pytest.mark.parametrize("slots", [{}, None], ids=["no answer", "slurmd is being replaced"])
def test_a_list_that_slurmd_gave_once_outlasts_its_failures(rig: Rig, slots: Slots | None) -> None:
    rig.here.slots = {"gpu": (Slot(3), Slot(2), Slot(1), Slot(0))}
    rig.answers.jobs["7"] = job("7", 0)
    rig.socket("7")
    assert rig.held() == {"GPU-3": "7"}
    rig.here.slots, rig.here.problem = slots, NO_ANSWER
    for _ in range(80):
        assert [(a.uuid, a.owner.job_id, a.end) for a in rig.told(10.0)] == [("GPU-3", "7", None)]
    assert rig.here.gpu_map_read > 1
    used = f"scheduler_refused: Slurm: the last list of GPUs stays in use: {NO_ANSWER}"
    assert used in rig.faults()
    (held,) = rig.told(601.0, DEVICES[1:])
    assert (held.uuid, held.end) == ("GPU-3", None), "that another GPU is lost moves none"
    added = (*DEVICES, Device("GPU-new", "4"))
    for _ in range(4):
        told = rig.told(601.0, added)
    assert {(a.uuid, a.owner.job_id) for a in told} == {(device.uuid, "unknown") for device in added}
    assert any(f"the GPUs of jobs are unknown: {NO_ANSWER}" in fault for fault in rig.faults())


def test_no_poll_waits_for_the_disk_of_slurm_conf(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system whose server is gone blocks whoever looks at a file there."""
    looked, stat = [], Path.stat

    def seen(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        looked.append(path.name)
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", seen)
    for number in range(1, 4):
        rig.scheduler.poll(BEGIN + number * 10 * SECOND, DEVICES, ())
    assert not {"slurm.conf", "gres.conf"} & set(looked)
    rig.work()
    assert {"slurm.conf", "gres.conf"} <= set(looked)


def test_slurmd_s_list_is_read_anew_when_devices_or_the_configuration_change_and_else_seldom(rig: Rig) -> None:
    gres, conf = (rig.spool.with_name(name) for name in ("gres.conf", "slurm.conf"))
    rig.answers.jobs["7"] = job("7", 0)
    rig.socket("7")
    for _ in range(2):
        assert rig.held(10.0) == {"GPU-0": "7"}
    for number, file in enumerate((gres, conf, gres)):
        rig.here.slots = {"gpu": (Slot(number + 1),)}
        file.touch()
        os.utime(file, ns=(number, number + 1))
        assert rig.held(10.0) == {f"GPU-{number + 1}": "7"}
        assert rig.held(10.0) == {f"GPU-{number + 1}": "7"}
        assert rig.here.gpu_map_read == number + 2
    rig.tick(devices=DEVICES[1:])
    assert rig.here.gpu_map_read == 5
    for _ in range(7):
        rig.tick(devices=DEVICES)
        rig.tick(devices=DEVICES[1:])
    assert rig.here.gpu_map_read == 6, "a device that comes and goes starts no command each second"
    rig.tick(10.0, devices=DEVICES[1:])
    read = rig.here.gpu_map_read
    for _ in range(590):
        rig.tick(devices=DEVICES[1:])
    assert rig.here.gpu_map_read == read
    for _ in range(20):
        rig.tick(devices=DEVICES[1:])
    assert rig.here.gpu_map_read == read + 1


def test_a_job_that_has_gpus_on_other_nodes_only_leaves_all_free_here(rig: Rig) -> None:
    here = job("7", gpus=2, nodes=2, on_gpus=True)
    rig.answers.jobs["7"] = replace(here, given={NODE: (), "node2": (Gres("gpu", "h100", 2, (0, 1)),)})
    rig.socket("7")
    for _ in range(10):
        assert rig.held() == {}
    assert rig.answers.asked == ["7"]


def test_an_array_a_het_job_and_rules(rig: Rig) -> None:
    rig.answers.jobs |= {
        "7": job("7", 0, array_id="5", array_task_id="0"), "8": job("8", 1, het_id="6", het_offset="2"),
    }  # fmt: skip
    rig.socket("7")
    rig.socket("8")
    owners = {a.owner.job_id: a.owner for a in rig.told()}
    assert [(o.kind, o.array_id) for o in (owners["7"], owners["8"])] == [("array", "5"), ("het", "6")]
    assert [o.display_id for o in (owners["7"], owners["8"])] == ["5_0", "6+2"]


# The controller does not answer, or its answer is rejected.


def test_with_a_silent_controller_the_node_s_own_truth_is_told(rig: Rig) -> None:
    rig.answers.silent = "scontrol: no answer within 5 s"
    rig.here.tasks["7"] = JobTasks("alice", "bash train.sh", batch=(0,), processes=1)
    rig.socket("7")
    rig.tick()
    (fault,) = (fault for fault in rig.faults() if fault.startswith("controller_silent"))
    assert "no answer within 5 s" in fault
    assert rig.words[-1].unanswered_since == BEGIN + SECOND
    (held,) = rig.told()
    assert (held.owner.job_id, held.owner.user, held.owner.account, held.uuid) == ("7", "alice", "", "GPU-0")
    for _ in range(100):
        rig.tick()
    assert len(rig.answers.asked) <= 6, "5, 10, 20, 40, 60 s"
    assert any(fault.startswith("controller_silent") for fault in rig.faults()), "as long as it is so"
    rig.answers.silent = ""
    rig.answers.jobs["7"] = job("7", 0)
    for _ in range(61):
        polled = rig.tick()
    assert rig.faults() == []
    assert polled is not None
    assert polled.unanswered_since is None
    assert [a.owner.account for a in polled.allocations] == ["nlp"]


def test_a_job_without_a_step_is_kept_while_nobody_can_say(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, batch=False)
    step = rig.socket("7", "0")
    rig.told()
    rig.answers.silent = "down"
    rig.end(step)
    for _ in range(600):
        assert rig.held() == {"GPU-0": "7"}
    assert rig.words[-1].unanswered_since == BEGIN + 2 * SECOND


def test_text_that_may_be_another_s_words_is_refused_and_the_job_is_still_held(rig: Rig) -> None:
    rig.answers.refuse["7"] = "ambiguous: a name with line breaks"
    rig.here.tasks["7"] = JobTasks("alice", batch=(0,), processes=1)
    rig.socket("7")
    (held,) = rig.told()
    assert (held.owner.user, held.owner.account) == ("alice", "")
    assert any("scheduler_refused" in f and "job 7 is rejected: ambiguous" in f for f in rig.faults())
    for _ in range(20):
        rig.tick()
    assert rig.answers.asked == ["7"]


def test_a_socket_that_a_crash_left_holds_nothing(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", state="NODE_FAIL", on_gpus=True, gpus=1, gpus_here=1)
    bind(rig.spool / f"{NODE}_7.{BATCH}")  # no process listens
    bind(rig.spool / f"{NODE}_8.{BATCH}")  # a job that the controller no longer knows
    for _ in range(5):
        assert rig.told() == ()
    rig.scheduler.close()
    assert rig.answers.asked == ["7", "8"]


def test_a_job_that_was_requeued_to_another_node_after_a_power_loss_holds_nothing(rig: Rig) -> None:
    elsewhere = {"node2": (Gres("gpu", "h100", 2, (0, 1)),)}
    rig.answers.jobs |= {"7": job("7", 0, 1, hosts="node2", given=elsewhere), "8": job("8", 2)}
    bind(rig.spool / f"{NODE}_7.{BATCH}")  # of before; no process listens
    rig.socket("8")
    rig.tick()
    assert rig.held() == {"GPU-2": "8"}, "the others are free"
    assert any("job 7 has ended or runs elsewhere, and left a socket" in fault for fault in rig.faults())
    assert rig.answers.asked == ["7", "8"]
    rig.answers.jobs["7"] = job("7", 0, 1)
    (rig.spool / f"{NODE}_7.{BATCH}").unlink()
    rig.tick()
    rig.socket("7")
    assert rig.held() == {"GPU-0": "7", "GPU-1": "7", "GPU-2": "8"}, "it is back"
    assert rig.faults() == []


def test_a_slurmstepd_that_was_killed_is_found_out(rig: Rig) -> None:
    rig.answers.jobs |= {"7": replace(job("7", 0), sluid="s321M8E9Y2V700"), "8": job("8", 1)}
    rig.socket("7")
    rig.socket("8")
    assert rig.held() == {"GPU-0": "7", "GPU-1": "8"}
    rig.here.bound.discard(f"{NODE}_7.{BATCH}")
    rig.answers.jobs["7"] = job("7", state="FAILED", on_gpus=True)
    for _ in range(65):
        rig.tick()
    assert rig.held() == {"GPU-1": "8"}
    assert rig.answers.asked == ["7", "8", "7"]


def test_a_job_that_is_over_but_still_there_holds_its_gpus(rig: Rig) -> None:
    """As after a node was set down and up again: the job's processes still run, though the controller lost the job."""
    rig.here.tasks["7"] = JobTasks("alice", batch=(0,), processes=3)
    rig.socket("7")
    assert rig.held() == {"GPU-0": "7"}
    assert rig.held(120.0) == {"GPU-0": "7"}


def test_a_suspended_job_keeps_its_gpus_but_yields_them_to_who_was_given_them(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, 1)
    rig.socket("7")
    rig.told()
    rig.answers.jobs |= {"7": job("7", 0, 1, state="SUSPENDED"), "8": job("8", 0)}
    assert rig.held() == {"GPU-0": "7", "GPU-1": "7"}
    other = rig.socket("8")
    for _ in range(3):
        rig.tick()
    assert sorted((a.uuid, a.owner.job_id) for a in rig.told()) == [("GPU-0", "8"), ("GPU-1", "7")]
    rig.end(other)
    assert rig.held() == {"GPU-0": "7", "GPU-1": "7"}
    assert len(rig.answers.asked) <= 5


def test_an_allocation_whose_gpu_another_job_has_is_asked_about_at_once(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0, batch=False)
    step = rig.socket("7", "0")
    rig.told()
    rig.end(step)
    assert rig.held() == {"GPU-0": "7"}
    rig.answers.jobs |= {"7": job("7", state="COMPLETED", on_gpus=True), "8": job("8", 0)}
    rig.socket("8")
    rig.tick()
    assert rig.held() == {"GPU-0": "8"}
    assert rig.answers.asked == ["7", "7", "8", "7"]


def test_two_jobs_of_one_gpu_are_both_told_and_seldom_asked_about(rig: Rig) -> None:
    rig.answers.jobs |= {"7": job("7", 0), "8": job("8", 0)}
    rig.socket("7")
    rig.socket("8")
    for _ in range(300):
        told = rig.told()
    assert sorted(a.owner.job_id for a in told) == ["7", "8"]
    assert rig.answers.asked[:3] == ["7", "8", "7"]
    assert rig.answers.asked.count("8") == 1
    assert len(rig.answers.asked) <= 7, "30, 60, 120 s"


# The node.


def test_the_node_s_state_is_asked_when_a_job_has_left_and_while_a_gpu_is_free(tmp_path: Path) -> None:
    rig = Rig(tmp_path, node_state_seconds=300.0)
    rig.answers.jobs["7"] = job("7", 0, 1, 2, 3)
    batch = rig.socket("7")
    rig.tick()
    rig.answers.asked.clear()
    for _ in range(700):
        rig.tick()
    assert rig.answers.asked == [], "all are held"
    rig.answers.state = replace(rig.answers.state, condition="draining")
    rig.end(batch)
    polled = rig.tick()
    assert polled is not None
    assert (rig.answers.asked, polled.condition) == ([f"node {NODE}"], "draining")
    for _ in range(700):
        rig.tick()
    assert 4 <= rig.answers.asked.count(f"node {NODE}") <= 7


def test_the_nodes_that_a_large_job_leaves_do_not_all_ask_for_their_state_at_once(tmp_path: Path) -> None:
    """Their next regular query is overdue, because the job had all GPUs."""
    rig = Rig(tmp_path, node_state_seconds=300.0, phase=0.75)
    rig.answers.jobs["7"] = job("7", 0, 1, 2, 3)
    batch = rig.socket("7")
    for _ in range(1000):
        rig.tick()
    rig.end(batch)
    rig.answers.asked.clear()
    asked = [(rig.tick(), len(rig.answers.asked))[1] for _ in range(10)]
    assert asked == [0] * 8 + [1] * 2


def test_a_job_that_left_may_have_drained_the_node(tmp_path: Path) -> None:
    rig = Rig(tmp_path, node_state_seconds=100_000.0)
    rig.answers.jobs["7"] = job("7", 0)
    batch = rig.socket("7")
    rig.tick()
    rig.tick()
    rig.answers.asked.clear()
    for _ in range(30):
        rig.tick()
    assert rig.answers.asked == []
    rig.end(batch)
    rig.tick()
    rig.tick()
    assert rig.answers.asked == [f"node {NODE}"]


def test_the_node_s_state_need_not_be_asked(rig: Rig) -> None:
    for _ in range(50):
        rig.tick(60.0)
    assert rig.answers.asked == []


def test_another_node_s_sockets_are_pointed_out(rig: Rig) -> None:
    step = rig.socket("7", node="node9")
    assert rig.held() == free_but(), "it may have any"
    assert any("steps of node node9, not of node1: set slurm.node_name" in fault for fault in rig.faults())
    rig.end(step)
    assert rig.held() == {}


def test_another_node_s_sockets_are_pointed_out_beside_the_prolog_s_files(mapped: Rig) -> None:
    assert mapped.mapping is not None
    (mapped.mapping / "3").write_text("7\n")
    mapped.answers.jobs["7"] = job("7", 3)
    mapped.socket("7", node="node9")
    assert mapped.held() == {"GPU-3": "7"} | free_but("GPU-3")
    assert any("steps of node node9" in fault for fault in mapped.faults())
    mapped.socket("8")
    mapped.answers.jobs["8"] = job("8")
    assert mapped.held() == {"GPU-3": "7"}, "a slurmd of that name shares the directory"
    assert mapped.faults() == []


def test_nothing_is_said_before_it_is_known_which_gpu_is_which(rig: Rig) -> None:
    rig.socket("7")
    assert rig.scheduler.poll(rig.now, DEVICES, ()) is None
    rig.work()
    assert rig.scheduler.poll(rig.now, DEVICES, ()) is not None


def test_a_spool_that_cannot_be_read_is_an_error_and_forgets_nobody(rig: Rig) -> None:
    rig.answers.jobs["7"] = job("7", 0)
    rig.socket("7")
    rig.told()
    away = rig.spool.rename(rig.spool.with_name("away"))
    with pytest.raises(SchedulerError, match=r"SlurmdSpoolDir\? Set slurm.spool_dir"):
        rig.tick()
    away.rename(rig.spool)
    assert rig.held() == {"GPU-0": "7"}


def test_a_storm_of_jobs_leaves_nothing_behind(rig: Rig) -> None:
    rig.answers.silent = "too much"
    for number in range(300):
        step = rig.socket(str(number), "0")
        rig.scheduler.poll(rig.now, DEVICES, ())
        rig.now += SECOND // 100
        rig.end(step)
    rig.tick()
    assert len(rig.answers.asked) <= 2
    assert rig.words[-1].allocations == ()
    assert rig.words[-1].unanswered_since is None


# Processes.


@pytest.mark.parametrize(
    ("cgroup", "environ", "expected"),
    [
        ("5:devices:/slurm_node1/uid_1001/job_7/step_0/task_0", {"SLURM_PROCID": "3"}, "7"),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", {"SLURM_PROCID": "3"}, "7"),
        ("0::/user.slice", {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, "7"),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0", {"SLURM_JOB_ID": "8", "SLURM_PROCID": "3"}, "7"),
        ("0::/system.slice/node1_slurmstepd.scope/s321M8E9Y2V700/step_0/user/task_0", {"SLURM_PROCID": "3"}, "7"),
        ("0::/user.slice", {"SLURM_JOB_ID": "99"}, ""),
        ("0::/", {"SLURM_JOB_ID": "6", "SLURM_JOB_ID_HET_GROUP_1": "7", "SLURM_PROCID": "3"}, "7"),
        ("0::/user.slice/job_7x", {}, ""),
    ],
)
def test_processes_are_their_job_s_with_their_rank(
    tmp_path: Path, cgroup: str, environ: dict[str, str], expected: str
) -> None:
    rig, proc = Rig(tmp_path), Proc(tmp_path / "proc")
    proc.add(60, environ=environ, cgroup=cgroup)
    scheduler = SlurmScheduler(NODE, rig.scheduler._spool, rig.controller, proc=proc.root)
    rig.answers.jobs |= {"7": replace(job("7", 0), sluid="s321M8E9Y2V700"), "8": job("8", 1)}
    rig.socket("7")
    rig.socket("8")
    reading = Reading("GPU-0", BEGIN - SECOND, BEGIN, processes=(Process(60),))
    scheduler.poll(BEGIN, DEVICES, (reading,))
    rig.work()
    polled = scheduler.poll(BEGIN, DEVICES, (reading,))
    assert polled is not None
    assert polled.members == ({60: Member(expected, "3")} if expected else {})


@pytest.mark.parametrize(
    ("cgroup", "environ", "user", "expected"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", {"SLURM_PROCID": "3"}, "mallory", "7"),
        ("0::/system.slice/slurmstepd.scope/job_8/step_0", {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, "alice", "8"),
        ("0::/user.slice", {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, "alice", "7"),
        ("0::/user.slice", {"SLURM_JOB_ID": "7"}, "mallory", ""),
        ("0::/user.slice", {"SLURM_JOB_ID": "9"}, "alice", ""),
        ("0::/user.slice", {"SLURM_JOB_ID_HET_GROUP_1": "7"}, "mallory", ""),
        ("0::/user.slice/user-1001.slice/user@1001.service/job_7", {}, "mallory", ""),
        ("0::/user.slice/user@1001.service/system.slice/slurmstepd.scope/job_7", {}, "mallory", ""),
        ("0::/system.slice/mine.service/slurm/uid_1001/job_7", {}, "mallory", ""),
        ("0::/system.slice/slurmstepd.scope/job_8/step_0/job_7", {}, "mallory", "8"),
        ("0::/system.slice/slurmstepd.scope/s321M8E9Y2V700/step_0", {"SLURM_PROCID": "3"}, "mallory", "7"),
        ("0::/system.slice/mine.scope/s321M8E9Y2V700", {}, "mallory", ""),
        ("0::/system.slice/slurmstepd.scope/sILOU8E9Y2V700", {}, "mallory", ""),
        ("0::/../../system.slice/node1_slurmstepd.scope/job_7/step_0", {"SLURM_PROCID": "3"}, "mallory", "7"),
        ("0::/gpu.slice/slurmstepd.scope/job_7/step_0/user/task_0", {"SLURM_PROCID": "3"}, "mallory", "7"),
        ("0::/gpu.slice/gpu-batch.slice/n_slurmstepd.scope/job_7/step_0", {"SLURM_PROCID": "3"}, "mallory", "7"),
        ("0::/user.slice/user-1001.slice/user@1001.service/app.slice/slurmstepd.scope/job_7", {}, "mallory", ""),
        ("0::/user.slice/user-1001.slice/user@1001.service/slurmstepd.scope/job_7", {}, "mallory", ""),
        ("0::/slurmstepd.scope/job_7", {}, "mallory", ""),
    ],
)
def test_a_job_is_spoken_for_by_its_cgroup_or_its_user(
    tmp_path: Path, cgroup: str, environ: dict[str, str], user: str, expected: str
) -> None:
    """An environment is written by the process's user: it proves nothing."""
    rig, proc = Rig(tmp_path), Proc(tmp_path / "proc")
    proc.add(60, environ=environ, cgroup=cgroup)
    scheduler = SlurmScheduler(
        NODE, rig.scheduler._spool, rig.controller, proc=proc.root, user_of={os.getuid(): user}.__getitem__
    )
    rig.answers.jobs |= {"7": replace(job("7", 0), sluid="s321M8E9Y2V700"), "8": job("8", 1)}
    rig.socket("7")
    rig.socket("8")
    assert scheduler.members([60]) == {}, "no job is known yet"
    for _ in range(2):
        scheduler.poll(BEGIN, DEVICES, ())
        rig.work()
    assert scheduler.members([60, 61]) == ({60: Member(expected, environ.get("SLURM_PROCID", ""))} if expected else {})


def test_a_job_whose_user_nobody_knows_is_spoken_for_by_its_cgroup_alone(tmp_path: Path) -> None:
    rig, proc = Rig(tmp_path), Proc(tmp_path / "proc")
    proc.add(60, environ={"SLURM_JOB_ID": "7"}, cgroup="0::/user.slice")
    scheduler = SlurmScheduler(NODE, rig.scheduler._spool, rig.controller, proc=proc.root, user_of=lambda _: "")
    rig.answers.silent = "gone"
    rig.socket("7")
    scheduler.poll(BEGIN, DEVICES, ())
    rig.work()
    assert scheduler.members([60]) == {}


# Opening.


@pytest.fixture
def slurm_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    for name in ("SLURM_CONF", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)

    def write(text: str = "", **slurm: object) -> Config:
        path = tmp_path / "slurm.conf"
        path.write_text(f"SlurmdSpoolDir={tmp_path}/spool/%n\n{text}")
        host = HostSettings(proc=str(tmp_path / "proc"), cgroup=str(tmp_path / "cgroup"))
        said = SlurmSettings(**({"conf": str(path), "bin_dir": str(tmp_path)} | slurm))  # type: ignore[arg-type]
        return replace(
            Config(), slurm=said, host=host, workload=WorkloadSettings((WorkloadRule("serving", account="nlp"),))
        )

    return write


def test_no_slurm_is_an_error_that_says_what_to_do(slurm_conf: Callable[..., Config], tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match=r"spool/node1 is not there.*set slurm.conf or slurm.spool_dir"):
        open_slurm(slurm_conf(node_name="node1"))
    with pytest.raises(SchedulerError, match=r"none.*Set slurm.conf, or make it readable"):
        open_slurm(slurm_conf(conf=str(tmp_path / "none")))


def test_a_spool_that_is_hidden_is_an_error_when_it_is_read(slurm_conf: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "spool/node1").mkdir(parents=True)
    config = slurm_conf(node_name="node1")
    scheduler = open_slurm(config)
    with hidden(tmp_path), pytest.raises(SchedulerError, match=r"spool/node1.*Permission denied"):
        scheduler.poll(0, (), ())
    scheduler.close()
    with hidden(tmp_path), pytest.raises(SchedulerError, match=r"slurm\.conf.*Permission denied.*make it readable"):
        open_slurm(config)


def test_several_nodes_on_one_host_must_be_named(slurm_conf: Callable[..., Config]) -> None:
    host = os.uname().nodename.partition(".")[0]
    with pytest.raises(SchedulerError, match=r"several nodes.*\(a1, a2\): set slurm.node_name"):
        open_slurm(slurm_conf(f"NodeName=a[1-2] NodeHostname={host} CPUs=1\n"))


def test_a_url_that_is_none_is_an_error(slurm_conf: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "spool/node1").mkdir(parents=True)
    with pytest.raises(SchedulerError, match="restd_url: 'ftp://slurm:6820' is neither"):
        open_slurm(slurm_conf(node_name="node1", restd_url="ftp://slurm:6820"))


def test_it_opens_on_a_node_and_closes(slurm_conf: Callable[..., Config], tmp_path: Path) -> None:
    host = os.uname().nodename.partition(".")[0]
    (tmp_path / "spool/a1").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    scheduler = open_slurm(slurm_conf(f"NodeName=a1 NodeHostname={host} CPUs=1\n"))
    wait_for(lambda: scheduler.poll(BEGIN, DEVICES, ()) is not None, "the list of GPUs")
    assert scheduler._controller.alive
    scheduler.close()
    assert not scheduler._controller.alive


def test_what_a_job_has_of_which_nothing_can_be_told_may_be_any_gpu_that_seems_free(rig: Rig) -> None:
    """A daemon that starts while the controller is down, beside a job without a visible process."""
    rig.answers.jobs["7"] = job("7", 0)
    rig.socket("7")
    rig.told()
    rig.answers.silent = "down"
    rig.socket("8")
    assert rig.held() == {"GPU-0": "7"} | free_but("GPU-0")
    rig.here.tasks["8"] = JobTasks("bob", "sleep", processes=1)
    for _ in range(3):
        rig.tick()
    assert rig.held() == {"GPU-0": "7"}, "its processes say that it has none"


def test_a_socket_that_stays_while_its_job_completes_holds_nothing_longer_than_some_seconds(rig: Rig) -> None:
    """Slurm 24.11 sometimes fails to remove an extern step's socket; no process listens on it any more."""
    rig.answers.jobs |= {"7": replace(job("7", 0), sluid="s321M8E9Y2V700"), "8": job("8", 1)}
    extern, step = rig.socket("7", EXTERN), rig.socket("7", "0")
    rig.socket("8")
    assert rig.held() == {"GPU-0": "7", "GPU-1": "8"}
    rig.answers.jobs["7"] = job("7", 0, state="COMPLETING")
    rig.here.bound.discard(extern.name)
    rig.end(step)
    for _ in range(8):
        rig.tick()
    assert rig.held() == {"GPU-1": "8"}


def test_a_job_holds_its_gpus_until_the_epilog_has_removed_its_file_however_slow_it_is(mapped: Rig) -> None:
    """A health check may run before ours; the job is COMPLETING for as long."""
    assert mapped.mapping is not None
    mapped.answers.jobs |= {"7": job("7", 0), "8": job("8", 1)}
    (mapped.mapping / "0").write_text("7\n")
    batch = mapped.socket("7")
    mapped.socket("8")
    for _ in range(40):
        mapped.tick()
    mapped.answers.jobs["7"] = job("7", state="COMPLETING", on_gpus=True)
    mapped.end(batch)
    for _ in range(200):
        assert mapped.held() == {"GPU-0": "7", "GPU-1": "8"}
        assert mapped.faults() == []
    assert mapped.answers.asked.count("7") <= 5, "30, 60, 120 s"
    mapped.answers.jobs["7"] = job("7", state="COMPLETED", on_gpus=True)
    for _ in range(360):
        mapped.tick()
    assert mapped.held() == {"GPU-1": "8"}, "an epilog that never removes its file"
    assert any("job 7 has ended or runs elsewhere, and left a socket" in fault for fault in mapped.faults())


def test_of_many_jobs_that_leave_the_node_s_state_is_asked_for_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, node_state_seconds=300.0)
    rig.tick(20)
    asked = rig.answers.asked.count(f"node {NODE}")
    for number in range(10, 30):
        rig.answers.jobs[f"{number}"] = job(f"{number}", 0)
        batch = rig.socket(f"{number}")
        rig.tick()
        rig.end(batch)
        rig.tick()
    assert rig.answers.asked.count(f"node {NODE}") - asked in {1, 2}, "in forty seconds"
    rig.scheduler.close()
