"""Output of Slurm recorded from both versions: the same scenario on four nodes of eight GPUs.

The recordings are complete but for paths and cores of jobs; the nodes' names are made the same. The last two columns
of nodes were asked for later, of the same versions and configuration.
"""

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cluster.analysis import spread
from exporter.cluster.model import NODE_STATES, REASONS, ClusterNode, Demand, Jobs, Reservation
from exporter.cluster.slurm import (
    SINFO,
    SlurmCluster,
    parse_jobs,
    parse_nodes,
    parse_reservations,
    parse_topology,
)
from exporter.cluster.watcher import (
    ClusterUnavailableError,
    fitting_now,
    fitting_totals,
    free_gpus,
    queue_totals,
    reserved_gpus,
)

RECORDED = Path(__file__).parent / "recorded"
SHARED = Path(__file__).parents[3] / "shared/samples"
VERSIONS = {"slurm-22.05": 31, "slurm-24.11": 21}
"""Recordings, with the number of the first job in each."""
AFTER_1 = {"slurm-22.05": "priority", "slurm-24.11": "dependency"}
"""Why the job that depends on job 1 is pending: 22.05 had forgotten job 1 when it was submitted."""
LATER = 1_795_259_000.0
"""Unix seconds after the scenario, and before its reservations."""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def text(version: str, name: str) -> str:
    return (RECORDED / version / name).read_text(encoding="utf-8")


def jobs_of(version: str) -> Jobs:
    return parse_jobs(text(version, "squeue.json"))


def nodes_of(version: str) -> dict[str, ClusterNode]:
    return {node.name: node for node in parse_nodes(text(version, "sinfo.txt")).nodes}


def test_the_queue_is_what_was_submitted(version: str) -> None:
    """An array of 3 tasks with 2 GPUs each beyond its limit, 16 at once, 3 + 1 as one heterogeneous job, and so on."""
    jobs = jobs_of(version)
    queue = queue_totals(jobs.pending, now=LATER)
    assert jobs.refused == 0
    assert queue.jobs == {
        ("gpu", "limit"): 3,
        ("gpu", "resources"): 2,
        ("gpu", "held"): 9,
        ("gpu", "begin_time"): 1,
        ("gpu", AFTER_1[version]): 1,
    }
    assert queue.gpus == {
        ("gpu", "limit"): 6,
        ("gpu", "resources"): 20,
        ("gpu", "held"): 9,
        ("gpu", "begin_time"): 2,
        ("gpu", AFTER_1[version]): 8,
    }


def test_the_longest_wait_is_from_when_a_job_could_have_run(version: str) -> None:
    jobs = jobs_of(version)
    waiting = {job.job_id: job.since for job in jobs.pending}
    first = VERSIONS[version]
    assert waiting[f"{first + 8}"] is None, "held"
    assert waiting[f"{first + 9}"] is None, "until a time"
    assert (waiting[f"{first + 10}"] is None) == (AFTER_1[version] == "dependency")
    since = waiting[f"{first + 7}"]
    assert since is not None
    assert queue_totals(jobs.pending, now=since + 100.0).waits == pytest.approx({"gpu": 100.0}, abs=20.0)


def test_demands_keep_how_they_were_asked_for(version: str) -> None:
    first, jobs = VERSIONS[version], {job.job_id: job for job in jobs_of(version).pending}
    big, sweep, het = jobs[f"{first + 7}"], jobs[f"{first + 2}"], jobs[f"{first + 11}"]
    shapes = [[(d.gpus, d.per_node, d.nodes, d.type) for d in job.parts] for job in (big, sweep)]
    assert shapes == [[(16, 0, 2, "")], [(2, 0, 1, "")]]
    assert sorted((d.gpus, d.per_node) for d in het.parts) == [(1, 1), (3, 0)]
    assert sweep.count == 3


def test_nodes_and_their_gpus(version: str) -> None:
    nodes = nodes_of(version)
    assert {name: node.gpus for name, node in nodes.items()} == {f"node0{n}": {"h100": 8} for n in (1, 2, 3, 4)}
    assert [nodes[f"node0{n}"].used["h100"] for n in (1, 2, 3, 4)] == [7, 4, 6, 8]
    assert nodes["node02"].state == "draining"
    assert nodes["node02"].free == {}
    assert nodes["node03"].free == {"h100": 2}
    assert sorted(nodes["node01"].partitions) == ["gpu", "high"]
    assert nodes["node01"].features == {"h100", "nvlink"}


def test_of_the_queue_one_task_fits(version: str) -> None:
    """Free are 1 on the first node and 2 on the third: room for one task of two GPUs, not for 16 or 3 + 1."""
    jobs, nodes = jobs_of(version), parse_nodes(text(version, "sinfo.txt"))
    reservations = parse_reservations(text(version, "reservations.txt"))
    queue = queue_totals(jobs.pending, now=LATER)
    found = fitting_totals(fitting_now(jobs, nodes, reservations=reservations, now=LATER), queue)
    assert {key: count for key, count in found.jobs.items() if count} == {("gpu", "limit"): 1}
    assert found.gpus["gpu", "limit"] == 2


def test_reservations(version: str) -> None:
    found = {each.name: each for each in parse_reservations(text(version, "reservations.txt")).reservations}
    start = 1_798_070_400.0  # 2026-12-24T00:00:00Z
    assert found["upkeep"] == Reservation("upkeep", start, start + 7200, ("node04",), whole=True)
    assert found["slice"].whole is False
    nodes = nodes_of(version)
    assert reserved_gpus(found["upkeep"], nodes) == 8
    assert reserved_gpus(found["slice"], nodes) is None, "of some cores nobody says how many GPUs"


def test_placement_of_what_runs(version: str) -> None:
    """4 + 4 on one switch; 3 + 1 across two, where one node would do."""
    jobs, nodes = jobs_of(version), parse_nodes(text(version, "sinfo.txt"))
    groups = parse_topology(text(version, "topology.txt")).groups
    placed = spread(jobs.runs, nodes.nodes, groups=groups, most=100)
    first = VERSIONS[version]
    found = {(int(p.job_id) - first, p.level): (p.spans, p.fewest) for p in placed.placements}
    assert found[0, "node"] == (2, 1)
    assert found[0, "switch"] == (1, 1)
    assert found[1, "node"] == (1, 1)
    assert found[3, "node"] == (2, 1)
    assert found[3, "switch"] == (2, 1)
    assert {level for _, level in found} == {"node", "switch"}, "of NVLink and zones nothing is known"
    assert dict(placed.gpus)[f"{first}"] == 8
    assert f"{first + 4}" not in dict(placed.gpus), "it has no GPU"


def test_a_job_is_never_another_for_its_name(version: str) -> None:
    """One of the recorded jobs is called `x", (line break) "job_id": 1, "account": "evil`."""
    jobs = jobs_of(version)
    assert "evil" in text(version, "squeue.json")
    numbers = [int(run.job_id) for run in jobs.runs]
    assert min(numbers) >= 21
    assert len(numbers) == len(set(numbers))


def test_one_bad_job_spoils_no_other(version: str) -> None:
    answer = msgspec.json.decode(text(version, "squeue.json"))
    whole = parse_jobs(msgspec.json.encode(answer))
    answer["jobs"][3]["partition"] = ["not", "a", "text"]
    answer["jobs"].append("no job at all")
    torn = parse_jobs(msgspec.json.encode(answer))
    assert torn.refused == 2
    assert len(torn.runs) == len(whole.runs) - 1


@pytest.mark.parametrize(
    ("said", "tasks"), [("", 1), ("5", 1), ("0-9", 10), ("0-9%2", 10), ("1-9:2,20,30-31%3", 8), ("1-399:2", 200)]
)
def test_tasks_of_an_array(said: str, tasks: int) -> None:
    answer = {"jobs": [_pending(array_task_string=said)]}
    (job,) = parse_jobs(msgspec.json.encode(answer)).pending
    assert job.count == tasks
    assert job.gpus == 2 * tasks


@pytest.mark.parametrize("said", ["1,3-4,6,8...", "9-1", "1-4:0", "x", "\u0661"])
def test_a_list_of_tasks_that_is_cut_off_is_refused(said: str) -> None:
    found = parse_jobs(msgspec.json.encode({"jobs": [_pending(array_task_string=said), _pending(job_id=2)]}))
    assert found.refused == 1
    assert [job.job_id for job in found.pending] == ["2"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Resources", "resources"),
        ("Priority", "priority"),
        ("QOSMaxGRESPerUser", "limit"),
        ("AssocGrpGRES", "limit"),
        ("JobArrayTaskLimit", "limit"),
        ("DependencyNeverSatisfied", "dependency"),
        ("JobHeldAdmin", "held"),
        ("ReqNodeNotAvail, May be reserved for other job", "node_unavailable"),
        ("PartitionDown", "node_unavailable"),
        ("PartitionTimeLimit", "impossible"),
        ("BadConstraints", "impossible"),
        ("Reservation", "reservation"),
        ("None", "none"),
        ("SomethingNew_2031", "other"),
    ],
)
def test_reasons_are_of_a_closed_vocabulary(said: str, reason: str) -> None:
    (job,) = parse_jobs(msgspec.json.encode({"jobs": [_pending(state_reason=said)]})).pending
    assert job.reason == reason
    assert reason in REASONS


@pytest.mark.parametrize(
    ("asked", "demand"),
    [
        ({"tres_per_node": "gres/gpu:h100:4", "node_count": 2}, Demand(8, 4, 2, 2, "h100")),
        ({"tres_per_job": "gres:gpu:6", "node_count": 2, "max_nodes": 3}, Demand(6, 0, 2, 3)),
        ({"tres_per_task": "gres/gpu=1", "tasks": 12}, Demand(12, 0, 1, 0)),
        ({"tres_per_socket": "gres/gpu:2", "sockets_per_node": 2, "node_count": 3}, Demand(12, 4, 3, 3)),
        ({"tres_per_job": "gres:gpu:6", "tres_per_node": "gres:gpu:3", "node_count": 2}, Demand(6, 3, 2, 2)),
        ({"tres_per_node": "gres/gpu"}, Demand(1, 1, 1, 1)),
    ],
)
def test_what_is_asked_for(asked: dict[str, object], demand: Demand) -> None:
    (job,) = parse_jobs(msgspec.json.encode({"jobs": [_pending(**{"tres_per_node": "", **asked})]})).pending
    assert [msgspec.structs.replace(part, place="") for part in job.parts] == [demand]


@pytest.mark.parametrize(
    ("states", "running", "ended", "cause"),
    [
        (["RUNNING"], True, False, ""),
        (["SUSPENDED"], True, False, ""),
        (["RUNNING", "COMPLETING"], False, False, ""),
        (["COMPLETING"], False, False, ""),
        (["NODE_FAIL"], False, True, "node_failure"),
        (["PREEMPTED"], False, True, "preempted"),
        (["PENDING", "REQUEUED"], False, False, ""),
    ],
)
def test_states_of_jobs(states: list[str], *, running: bool, ended: bool, cause: str) -> None:
    job = _pending(job_state=states, nodes="n1", gres_detail=["gpu:h100:2(IDX:0-1)"], restart_cnt=2)
    (run,) = parse_jobs(msgspec.json.encode({"jobs": [job]})).runs
    assert (run.running, run.ended, run.cause, run.restarts) == (running, ended, cause, 2)


def test_shards_are_not_whole_gpus() -> None:
    (job,) = parse_jobs(msgspec.json.encode({"jobs": [_pending(tres_per_node="gres/shard:4")]})).pending
    assert job.gpus == 0
    assert queue_totals([job], now=LATER).jobs == {}


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("idle", "idle"),
        ("mixed", "mixed"),
        ("allocated", "allocated"),
        ("completing", "mixed"),
        ("mixed+planned", "planned"),
        ("idle+drain", "drained"),
        ("allocated+drain", "draining"),
        ("down*", "down"),
        ("idle*", "down"),
        ("down+not_responding", "down"),
        ("idle+cloud+powered_down", "powered_down"),
        ("down+cloud+powered_down+not_responding", "powered_down"),
        ("idle+drain+powering_down", "powered_down"),
        ("idle~", "powered_down"),
        ("idle%", "powered_down"),
        ("mixed+cloud+powering_up", "down"),
        ("mixed+power_down", "down"),
        ("allocated#", "down"),
        ("idle+maintenance", "maintenance"),
        ("mixed+reserved", "reserved"),
        ("whatever", "unknown"),
        ("", "unknown"),
    ],
)
def test_node_states(word: str, state: str) -> None:
    line = f"n1\x1fgpu\x1fup\x1fgpu:h100:8(S:0-1)\x1fgpu:h100:0(IDX:N/A)\x1f{word}\x1f(null)\x1f1\x1fOFF\x1f"
    (node,) = parse_nodes(line).nodes
    assert node.state == state
    assert state in NODE_STATES


def test_a_node_without_gpus_is_not_told_of_and_a_bad_line_is_counted() -> None:
    lines = "n1\x1fcpu\x1fup\x1f(null)\x1f(null)\x1fidle\x1f(null)\x1f1\x1fOFF\x1f\nn2\x1fgpu\x1fup\x1fgpu:8\n"
    found = parse_nodes(lines)
    assert (found.nodes, found.refused) == ((), 1)


def test_types_with_dots_and_several_of_them() -> None:
    gres = "gpu:h100:4(S:0),gpu:h100:2(S:1),gpu:a100_1g.10gb:4,shard:h100:8"
    used = "gpu:h100:3(IDX:0-2),gpu:a100_1g.10gb:1(IDX:4),shard:h100:0(IDX:N/A)"
    (node,) = parse_nodes(f"n1\x1fgpu\x1fup\x1f{gres}\x1f{used}\x1fmixed\x1f\x1f1\x1fOFF\x1f").nodes
    assert node.gpus == {"h100": 6, "a100_1g.10gb": 4}
    assert node.free == {"h100": 3, "a100_1g.10gb": 3}


@pytest.mark.parametrize(
    ("gres", "used", "free"),
    [
        # Slurm counts one GPU as allocated: the parts of two others are not in its number.
        ("gpu:h100:4,shard:h100:16", "gpu:h100:1(IDX:0),shard:h100:6(0/4,4/4,2/4,0/4)", {"h100": 1}),
        ("gpu:4,mps:400", "gpu:(null):1(IDX:0),mps:(null):50(0/100,50/100,0/100,0/100)", {"": 2}),
        (
            "gpu:h100:2,gpu:a100:2,shard:8",
            "gpu:h100:0(IDX:N/A),gpu:a100:1(IDX:3),shard:1(0/2,0/2,1/2,-/2)",
            {"h100": 2},
        ),
        ("gpu:h100:4,shard:16", "gpu:h100:2(IDX:0-1),shard:2(IDX:1)", {"h100": 2}),
    ],
)
def test_a_gpu_with_a_shared_part_is_not_free(gres: str, used: str, free: dict[str, int]) -> None:
    line = f"n1\x1fgpu\x1fup\x1f{gres}\x1f{used}\x1fmixed\x1f(null)\x1f1\x1fOFF\x1f"
    nodes = parse_nodes(line)
    assert nodes.nodes[0].free == free
    assert free_gpus(nodes.nodes) == {"gpu": sum(free.values())}


def test_a_partition_that_is_down_gives_no_room() -> None:
    line = "n1\x1fgpu\x1fdown\x1fgpu:8\x1fgpu:0\x1fidle\x1f\x1f1\x1fOFF\x1f"
    nodes = parse_nodes(line)
    assert nodes.nodes[0].partitions == ("gpu",)
    jobs = parse_jobs(msgspec.json.encode({"jobs": [_pending()]}))
    queue = queue_totals(jobs.pending, now=LATER)
    found = fitting_totals(fitting_now(jobs, nodes, reservations=parse_reservations(""), now=LATER), queue)
    assert found.jobs == {("gpu", "priority"): 0}


def test_no_reservation_is_no_error() -> None:
    found = parse_reservations("No reservations in the system\n")
    assert (found.reservations, found.refused) == ((), 0)


def test_reserved_gpus_as_slurm_counts_them() -> None:
    line = "ReservationName=r StartTime=2026-12-24T00:00:00 EndTime=Unknown Nodes=n[1-2] TRES=cpu=4,gres/gpu=6"
    (found,) = parse_reservations(line).reservations
    assert (found.gpus, found.end) == (6, None)


def test_topology_of_blocks_and_of_a_file() -> None:
    said = "BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4\nBlockName=b2 BlockIndex=1 Nodes=n[5-8] BlockSize=4\n"
    assert parse_topology(said).groups["nvlink_domain"]["n5"] == "b2"
    file = "# leaves\nSwitchName=s0 Nodes=n[1-2]\nswitchname=s1 nodes=n[3-4] # two\nSwitchName=top Switches=s[0-1]\n"
    assert parse_topology(file).groups == {"switch": {"n1": "s0", "n2": "s0", "n3": "s1", "n4": "s1"}}


def test_a_node_under_two_leaves_is_under_none() -> None:
    said = "SwitchName=s0 Level=0 Nodes=n[1-2]\nSwitchName=s1 Level=0 Nodes=n[2-3]\n"
    assert parse_topology(said).groups == {"switch": {"n1": "s0", "n3": "s1"}}


@pytest.mark.parametrize("garbage", ["", "{", "[]", '{"jobs": 3}', '{"errors": []}', "\x00"])
def test_no_answer_is_an_error_not_an_empty_queue(garbage: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        parse_jobs(garbage)


def test_a_command_without_an_answer_is_no_empty_queue() -> None:
    """22.05, its controller stopped: exit status 0."""
    said = '{"jobs": [], "errors": [{"description": "Failed while looking for jobs", "error_number": -1}]}'
    with pytest.raises(ClusterUnavailableError, match="Failed while looking"):
        parse_jobs(said)


@given(st.text() | st.binary())
def test_garbage_never_crashes(garbage: str | bytes) -> None:
    with contextlib.suppress(ValueError, ClusterUnavailableError):
        parse_jobs(garbage)
    said = garbage if isinstance(garbage, str) else garbage.decode(errors="replace")
    for read in (parse_nodes, parse_reservations, parse_topology):
        read(said)


@given(st.data())
def test_half_an_answer_is_half_believed_at_most(data: st.DataObject) -> None:
    """Whatever is done to one field of one job, the others are parsed as before."""
    answer = msgspec.json.decode(text("slurm-24.11", "squeue.json"))
    before = parse_jobs(msgspec.json.encode(answer))
    place = data.draw(st.integers(0, len(answer["jobs"]) - 1))
    job = answer["jobs"][place]
    field = data.draw(st.sampled_from(sorted(job)))
    job[field] = data.draw(st.none() | st.integers() | st.text() | st.lists(st.text()) | st.floats(allow_nan=False))
    after = parse_jobs(msgspec.json.encode(answer))
    number = str(job["job_id"])
    kept = {run.job_id: run for run in after.runs}
    assert all(kept[run.job_id] == run for run in before.runs if run.job_id not in {number, _number(before, place)})
    assert after.refused <= 1


def _number(jobs: Jobs, place: int) -> str:
    """Return the number of the job at that index."""
    return jobs.runs[place].job_id


@pytest.mark.parametrize(
    "folder", ["slurm-22.05-live", "slurm-22.05-live/dbd", "slurm-22.05-live/shard-mixed", "slurm"]
)
def test_recordings_of_other_clusters_are_read(folder: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    for file in sorted((SHARED / folder).glob("*squeue*.json")):
        found = parse_jobs(file.read_bytes())
        assert found.refused == 0, file
        assert found.runs, file


def test_an_empty_queue_is_believed_only_where_no_gpu_is_allocated() -> None:
    """With PrivateData=jobs squeue prints one to everybody but operators, with exit status 0, in all versions."""
    none = '{"jobs": []}'
    node = "n1\x1fgpu\x1fup\x1fgpu:8\x1fgpu:{}\x1fmixed\x1f(null)\x1f1\x1fOFF\x1f\n"
    said = {"squeue": none, "sinfo": node.format(2)}
    source = SlurmCluster(lambda program, *_: said[program], refresh_seconds=60)
    ask = {question.name: question.ask for question in source.questions}
    assert ask["nodes"]().nodes, "squeue has not been asked yet"
    assert ask["jobs"]().runs == (), "the last job may have ended since"
    ask["nodes"]()
    with pytest.raises(ValueError, match=r"lists no job, but 2 GPUs are allocated: with PrivateData=jobs .* operator"):
        ask["jobs"]()
    said["squeue"] = msgspec.json.encode({"jobs": [_pending()]}).decode()
    assert ask["jobs"]().runs
    ask["nodes"]()
    said["squeue"] = none
    assert ask["jobs"]().runs == ()
    said["sinfo"] = node.format(0)
    ask["nodes"]()
    assert ask["jobs"]().runs == ()


def test_sinfo_is_asked_for_what_is_read() -> None:
    assert SINFO[-1].count("\x1f") == 9


def _pending(**more: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "job_id": 1,
        "job_state": "PENDING",
        "state_reason": "Priority",
        "partition": "gpu",
        "tres_per_node": "gres/gpu:2",
        "priority": 5,
        "node_count": 1,
        "submit_time": 1_795_000_000,
    }
    return usual | more


def test_untyped_gpus_that_are_bound_to_cores_are_a_node_s_gpus() -> None:
    """As 22.05.8, 24.11.5 and 26.05.5 print such a node; the first two write (null) for the type."""
    for used in ("gpu:(null):5(IDX:0-4),shard:0", "gpu:(null):5(IDX:0-4)", "gpu:5(IDX:0-4)"):
        found = parse_nodes(f"node1\x1fgpu\x1fup\x1fgpu:8(S:0-1)\x1f{used}\x1fmixed\x1f(null)\x1f1\x1fOFF\x1f")
        assert found.refused == 0
        assert [(node.gpus, node.used) for node in found.nodes] == [({"": 8}, {"": 5})]
