"""Output of Slurm recorded from 22.05.8, 24.11.5 and 26.05.5, and garbage in its place."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.schedulers.base import CONDITIONS
from exporter.schedulers.slurm.local_node import parse_slots
from exporter.schedulers.slurm.notation import (
    Gres,
    expand_hostlist,
    parse_count,
    parse_gres,
    parse_requested_gres,
    parse_tres,
    tres_gpus,
)
from exporter.schedulers.slurm.parsing import (
    SlurmJob,
    node_condition,
    parse_duration,
    parse_job_columns,
    parse_job_json,
    parse_job_text,
    parse_node_json,
    parse_node_states,
    parse_time,
)
from tests.schedulers.slurm_rig import recorded

VERSIONS = ("slurm-22.05", "slurm-24.11")


def text(version: str, name: str) -> SlurmJob:
    said = recorded(f"{version}/{name}.txt")
    return parse_job_text(said, said.split()[0].removeprefix("JobId="))


def from_json(name: str, job_id: str | None = None) -> SlurmJob:
    jobs = parse_job_json(recorded(f"slurm-24.11/{name}.json"))
    return next(job for job in jobs if job_id in {None, job.job_id})


# Jobs as text.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("detail", ["", ".d"])
def test_a_running_job_is_told_whole(version: str, detail: str) -> None:
    job = text(version, f"running{detail}")
    assert (job.job_id, job.states, job.user, job.uid) == ("2", ("RUNNING",), "alice", 1001)
    assert (job.account, job.partition, job.qos, job.name, job.comment) == ("", "gpu", "", "train-llama", "team=nlp")
    assert (job.command, job.batch, job.nodes, job.hosts) == ("/home/alice/train.sh", True, 1, "node1")
    assert (job.time_limit_seconds, job.restarts, job.gpus, job.gpus_here, job.on_gpus) == (1800.0, 0, 2, 2, True)
    assert job.given == ({"node1": (Gres("gpu", "h100", 2, (0, 1)),)} if detail else None)
    assert not job.ended


def test_a_start_is_read_as_utc() -> None:
    said = recorded("slurm-22.05/running.txt")
    printed = re.search(r"StartTime=(\S+)", said)
    assert printed is not None
    assert printed[1] == "2026-11-21T09:36:37"
    assert text("slurm-22.05", "running").start == 1_795_253_797


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_on_two_nodes(version: str) -> None:
    job = text(version, "two_nodes.d")
    assert (job.nodes, job.hosts, job.gpus, job.gpus_here) == (2, "node[1-2]", 2, 1)
    assert job.given is not None
    assert {node: gres[0].indices for node, gres in job.given.items()} == {"node1": (2,), "node2": (0,)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "gpus", "here"), [("per_job", 4, None), ("per_task", 2, 2), ("mig", 1, 1), ("pending", 6, 6)]
)
def test_gpus_are_counted_however_they_were_asked_for(version: str, name: str, gpus: int, here: int | None) -> None:
    job = text(version, name)
    assert (job.gpus, job.gpus_here, job.on_gpus) == (gpus, here, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_parts_of_gpus_are_known_with_and_without_their_places(version: str) -> None:
    assert text(version, "shards").given is None
    assert [text(version, name).on_shares for name in ("shards", "shards.d", "running", "running.d")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_types_keep_their_dots(version: str) -> None:
    assert text(version, "mig.d").given == {"node1": (Gres("gpu", "h100_1g.10gb", 1, (6,)),)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "state", "over"),
    [
        ("suspended", "SUSPENDED", False),
        ("completed", "COMPLETED", True),
        ("cancelled", "CANCELLED", True),
        ("pending", "PENDING", True),
        ("requeued_pending", "PENDING", True),
        ("requeued_running", "RUNNING", False),
    ],
)
def test_states(version: str, name: str, state: str, over: bool) -> None:
    job = text(version, name)
    assert (job.states, job.ended) == ((state,), over)
    assert job.restarts == (1 if name.startswith("requeued") else 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_suspended_job_still_has_its_gpus_a_cancelled_one_none(version: str) -> None:
    assert text(version, "suspended.d").given == {"node1": (Gres("gpu", "h100", 2, (0, 1)),)}
    assert text(version, "cancelled.d").given == {"node2": ()}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bare_srun_is_interactive(version: str) -> None:
    assert text(version, "bare_srun").batch is False


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["array", "array.d"])
def test_an_array_s_last_task_has_the_array_s_own_id(version: str, name: str) -> None:
    said = recorded(f"{version}/{name}.txt")
    assert said.count("JobId=") > 2, "all tasks are printed"
    task, other = parse_job_text(said, "5"), parse_job_text(said, "8")
    assert (task.job_id, task.array_id, task.array_task_id) == ("5", "5", "4")
    assert (other.job_id, other.array_id, other.array_task_id) == ("8", "5", "3")
    assert (task.het_id, task.het_offset) == ("", "")
    with pytest.raises(ValueError, match="0 jobs"):
        parse_job_text(said, "9")


@pytest.mark.parametrize("version", VERSIONS)
def test_parts_of_a_heterogeneous_job_are_told_apart(version: str) -> None:
    said = recorded(f"{version}/het.txt")
    leader, other = parse_job_text(said, "6"), parse_job_text(said, "7")
    assert (leader.het_id, leader.het_offset, leader.hosts, leader.on_gpus) == ("6", "0", "node1", False)
    assert (other.het_id, other.het_offset, other.hosts, other.gpus) == ("6", "1", "node2", 1)


# Jobs as text that imitates another's.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["evil_name", "evil_comment"])
def test_recorded_imitations_are_refused(version: str, name: str) -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        text(version, name)


FORGED = "   UserId=root(0) GroupId=root(0) MCS_label=N/A\n   Priority=1 Nice=0 Account=evil QOS=(null)"


@pytest.mark.parametrize(
    "forged",
    [
        FORGED,
        FORGED + "\nJobId=999 JobName=z",
        FORGED + "\n\nJobId=999 ArrayJobId=5 ArrayTaskId=3 JobName=z",
        FORGED.replace("root(0)", "alice(1001)") + "\n\nJobId=999 ArrayJobId=5 ArrayTaskId=3 JobName=z",
        "   Account=evil",
        "JobId=5 JobName=b",
        "",
    ],
)
@pytest.mark.parametrize("name", ["running", "array"])
def test_a_name_with_line_breaks_never_changes_the_account(name: str, forged: str) -> None:
    said = recorded(f"slurm-22.05/{name}.txt")
    true = text("slurm-22.05", name)
    evil = re.sub(r"^(JobId=\d+ .*JobName=)\S+$", lambda m: f"{m[1]}a\n{forged}", said, count=1, flags=re.MULTILINE)
    with pytest.raises(ValueError, match=r"ambiguous|jobs of that number"):
        parse_job_text(evil, true.job_id)


@pytest.mark.parametrize(("kind", "evil"), [("Account=(null)", "Account=evil"), ("alice(1001)", "root(0)")])
def test_a_whole_job_in_a_name_is_refused(kind: str, evil: str) -> None:
    """The task's own lines follow those of its name, under another task's number."""
    said = recorded("slurm-22.05/array.txt")
    first, _, rest = said.partition("\n\nJobId=")
    head, _, body = first.partition("\n")
    forged = (
        f"{head}\n{body.replace(kind, evil)}\n\nJobId=999 ArrayJobId=5 ArrayTaskId=9 JobName=z\n{body}\n\nJobId={rest}"
    )
    assert evil in forged
    with pytest.raises(ValueError, match="ambiguous: several jobs that differ"):
        parse_job_text(forged, "5")


@pytest.mark.parametrize(
    "forged",
    [
        "   Account=evil",
        "   TresPerNode=gres:gpu:8",
        "   JOB_GRES=gpu:8\n     Nodes=node1 CPU_IDs=0 Mem=1 GRES=gpu:8(IDX:0-7)",
        "   TRES=cpu=1,gres/gpu=8",
    ],
)
def test_a_comment_with_line_breaks_changes_nothing_that_counts(forged: str) -> None:
    said = recorded("slurm-22.05/running.d.txt").replace("Comment=team=nlp", f"Comment=team=nlp\n{forged}")
    job, true = parse_job_text(said, "2"), text("slurm-22.05", "running.d")
    assert (job.user, job.account, job.given, job.gpus) == (true.user, true.account, true.given, true.gpus)


@pytest.mark.parametrize("name", ["running", "running.d", "array"])
@given(cut=st.integers(0, 2600))
def test_a_text_that_is_cut_is_refused(name: str, cut: int) -> None:
    said = recorded(f"slurm-22.05/{name}.txt")
    cut %= len(said)
    if said[:cut].endswith("\n\n"):
        return
    with pytest.raises(ValueError):  # noqa: PT011  any of its reasons
        parse_job_text(said[:cut], said.split()[0].removeprefix("JobId="))


# Jobs as JSON.


@pytest.mark.parametrize(
    "name", ["running", "two_nodes", "mig", "suspended", "bare_srun", "requeued_running", "per_job", "per_task"]
)
def test_json_says_what_text_says(name: str) -> None:
    said, read = from_json(name), text("slurm-24.11", f"{name}.d")
    for field in SlurmJob.__struct_fields__:
        if field not in {"command", "given"}:
            assert getattr(said, field) == getattr(read, field), field
    assert said.given is not None
    assert {node: [g for g in gres if g.indices] for node, gres in said.given.items()} == {
        node: [g for g in gres if g.indices] for node, gres in (read.given or {}).items()
    }


def test_json_has_arrays_het_jobs_and_no_doubt_about_names() -> None:
    task, last, leader, other = (
        from_json(name, job) for name, job in (("array", "8"), ("array", "5"), ("het", "6"), ("het", "7"))
    )
    assert [(job.array_id, job.array_task_id) for job in (task, last, other)] == [("5", "3"), ("5", "4"), ("", "")]
    assert [(job.het_id, job.het_offset) for job in (leader, other, task)] == [("6", "0"), ("6", "1"), ("", "")]
    evil = from_json("evil_name")
    assert (evil.user, evil.account, evil.name) == ("alice", "", "a")
    assert from_json("evil_comment").comment == "x"
    assert parse_job_json(recorded("slurm-24.11/unknown.json")) == ()
    assert from_json("cancelled").given is None
    assert from_json("cancelled").ended


def test_slurmrestd_of_22_05_writes_plain_numbers() -> None:
    (job,) = parse_job_json(recorded("slurm-22.05/restd.job.json"))
    assert (job.user, job.partition, job.name, job.comment, job.time_limit_seconds) == (
        "alice", "gpu", "train-llama", "team=nlp", 1800.0,
    )  # fmt: skip
    assert (job.array_id, job.array_task_id, job.het_id, job.het_offset) == ("", "", "", "")
    assert job.given is not None
    assert {node: gres[0].indices for node, gres in job.given.items()} == {"node1": (0, 1), "node2": (0, 1)}
    (node,) = parse_node_json(recorded("slurm-22.05/restd.node.json"))
    assert (node.name, node.condition) == ("node1", "")
    with pytest.raises(ValueError, match="Invalid job id"):
        parse_job_json(recorded("slurm-22.05/restd.unknown.json"))


@pytest.mark.parametrize("value", ["null", "4294967295", '{"set":true,"infinite":true,"number":0}', '{"set":false}'])
def test_no_limit_in_every_spelling(value: str) -> None:
    (job,) = parse_job_json(f'{{"jobs":[{{"job_id":1,"job_state":"RUNNING","time_limit":{value}}}]}}')
    assert job.time_limit_seconds is None


def test_slurm_s_own_name_of_a_job_is_read_from_json_and_text() -> None:
    (job,) = parse_job_json(recorded("slurm-26.05/running.json"))
    assert (job.sluid, job.user, job.states, job.gpus) == ("s615M8EA205100", "games", ("RUNNING",), 3)
    assert job.given == {"node1": (Gres("gpu", "", 3, (0, 1, 2)),)}
    said = text("slurm-26.05", "running.d")
    assert (said.sluid, said.user, said.given) == (job.sluid, job.user, job.given)
    assert text("slurm-26.05", "running").gpus == 3


def test_a_job_s_name_is_not_slurm_s_own_name_of_it() -> None:
    forged = recorded("slurm-26.05/running.d.txt").replace("=wrap", "=wrap\n   SLUID=s321M8E9Y2V700")
    assert parse_job_text(forged, "1").sluid == ""


# Parts.


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("gpu:h100:3(IDX:2-4)", (Gres("gpu", "h100", 3, (2, 3, 4)),)),
        ("gpu:h100:3(IDX:2-3,7),shard:2(IDX:0)", (Gres("gpu", "h100", 3, (2, 3, 7)), Gres("shard", "", 2, (0,)))),
        ("gpu:h100:1(IDX:3),gpu:a100_1g.10gb:0(IDX:)", (Gres("gpu", "h100", 1, (3,)), Gres("gpu", "a100_1g.10gb"))),
        ("gpu:2(IDX:0-1)", (Gres("gpu", "", 2, (0, 1)),)),
        ("gpu(IDX:0-1)", (Gres("gpu", "", 2, (0, 1)),)),
        ("shard:2(0/4,0/4,2/4,0/4)", (Gres("shard", "", 2, (2,)),)),
        ("shard:5(4/4,0/4,0/4,1/4)", (Gres("shard", "", 5, (0, 3)),)),
        ("craynetwork:1", (Gres("craynetwork", "", 1),)),
        ("gpu:tesla:2(CNT:2)", (Gres("gpu", "tesla", 2),)),
        # What sinfo prints of nodes: untyped GPUs bound to cores (22.05 and 24.11, then 26.05), and what they have.
        ("gpu:(null):5(IDX:0-4),shard:0", (Gres("gpu", "", 5, (0, 1, 2, 3, 4)), Gres("shard"))),
        ("gpu:(null):5(IDX:0-4)", (Gres("gpu", "", 5, (0, 1, 2, 3, 4)),)),
        ("gpu:(null):0(IDX:N/A)", (Gres("gpu"),)),
        ("gpu:5(IDX:0-4)", (Gres("gpu", "", 5, (0, 1, 2, 3, 4)),)),
        ("gpu:8(S:0-1)", (Gres("gpu", "", 8),)),
        ("gpu:a100:2(S:0-1)", (Gres("gpu", "a100", 2),)),
        ("gpu:a100:4(S:0),gpu:h100:2(S:1)", (Gres("gpu", "a100", 4), Gres("gpu", "h100", 2))),
        ("gpu:1g.10gb:7(S:0),shard:16(S:0-1)", (Gres("gpu", "1g.10gb", 7), Gres("shard", "", 16))),
        ("mps:2K,gpu:4", (Gres("mps", "", 2048), Gres("gpu", "", 4))),
        ("bandwidth:lustre:no_consume:4G", (Gres("bandwidth", "lustre:no_consume", 4 * 1024**3),)),
        ("gpu:8(S:0-1),mps:800(S:0-1)", (Gres("gpu", "", 8), Gres("mps", "", 800))),
        ("gpu:(null):2(IDX:0,4),mps:(null):0(IDX:N/A)", (Gres("gpu", "", 2, (0, 4)), Gres("mps"))),
        ("mps:(null):50(0/100,50/100)", (Gres("mps", "", 50, (1,)),)),
        # 26.05 marks a GPU that is allocated as a whole, of which no part can be.
        ("gpu:a100:1(IDX:1),shard:a100:1(1/2,-/2,0/2)", (Gres("gpu", "a100", 1, (1,)), Gres("shard", "a100", 1, (0,)))),
        ("gpu:3(IDX:0-2),mps:0(-/100,-/100,-/100,0/100)", (Gres("gpu", "", 3, (0, 1, 2)), Gres("mps"))),
        ("(null)", ()),
        ("N/A", ()),
        ("", ()),
    ],
)
def test_given_gres(said: str, expected: tuple[Gres, ...]) -> None:
    assert parse_gres(said) == expected


@pytest.mark.parametrize(
    "said",
    [
        "gpu:h100:1(IDX:3",
        "gpu:1(IDX:4-2)",
        "gpu:1(IDX:0-99999999)",
        "gpu:1(x)",
        "3(IDX:1)",
        "shard:1(--/2)",
        "shard:1(-)",
    ],
)
def test_gres_that_are_none(said: str) -> None:
    with pytest.raises(ValueError, match=r"no|range"):
        parse_gres(said)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("gres:gpu:h100:3", (Gres("gpu", "h100", 3),)),
        ("gres/gpu:h100_1g.10gb:1", (Gres("gpu", "h100_1g.10gb", 1),)),
        ("gres:gpu", (Gres("gpu", "", 1),)),
        ("gres:gpu:h100", (Gres("gpu", "h100", 1),)),
        ("cpu=1,gres/gpu=2", (Gres("gpu", "", 2),)),
        ("gres:gpu:1,gres:shard:4", (Gres("gpu", "", 1), Gres("shard", "", 4))),
        ("gres/gpu:tesla=2", (Gres("gpu", "tesla", 2),)),
        ("gres/gpu:a100=4", (Gres("gpu", "a100", 4),)),
        ("gres:gpu:a100:1,gres:gpu:v100:2", (Gres("gpu", "a100", 1), Gres("gpu", "v100", 2))),
        ("gres/gpu:a100:1,gres/shard:4", (Gres("gpu", "a100", 1), Gres("shard", "", 4))),
        ("gres/mps:150,gres/gpu", (Gres("mps", "", 150), Gres("gpu", "", 1))),
        ("gres/gpu:1K", (Gres("gpu", "", 1024),)),
        ("gres/gpu:a100_3g.20gb=2", (Gres("gpu", "a100_3g.20gb", 2),)),
        ("license/abaqus=2,bb/datawarp=1G,gres/gpu=1", (Gres("gpu", "", 1),)),
        ("gres:none", (Gres("none", "", 1),)),
        ("gres/local-ssd:1,gres/gpu:4", (Gres("local-ssd", "", 1), Gres("gpu", "", 4))),
        ("N/A", ()),
        ("gres/gpu:(null)=2", (Gres("gpu", "", 2),)),
        ("gres/gpu:(null):2", (Gres("gpu", "", 2),)),
    ],
)
def test_asked_gres(said: str, expected: tuple[Gres, ...]) -> None:
    assert parse_requested_gres(said) == expected


_TYPES = st.sampled_from(["", "h100", "a100_1g.10gb", "1g.10gb", "nvidia_a100-sxm4-80gb", "gtx1080"])
_GIVEN = st.builds(
    lambda name, kind, indices: Gres(name, kind, len(indices), tuple(sorted(indices))),
    st.sampled_from(["gpu", "shard", "mps"]),
    _TYPES,
    st.sets(st.integers(0, 15), max_size=8),
)


def printed(gres: Gres, no_type: str) -> str:
    """Write it as scontrol does; versions differ in what they write for no type."""
    kind = f":{gres.type}" if gres.type else no_type
    return f"{gres.name}{kind}:{gres.count}(IDX:{','.join(map(str, gres.indices)) or 'N/A'})"


@given(st.lists(_GIVEN, min_size=1, max_size=4), st.sampled_from(["", ":(null)"]))
def test_what_is_printed_of_gres_and_parsed_again_is_equal(gres: list[Gres], no_type: str) -> None:
    assert parse_gres(",".join(printed(each, no_type) for each in gres)) == tuple(gres)


@given(st.lists(_GIVEN, min_size=1, max_size=4))
def test_what_is_printed_of_a_request_and_parsed_again_is_equal(gres: list[Gres]) -> None:
    asked = tuple(Gres(each.name, each.type, each.count) for each in gres)
    text = (f"gres/{each.name}{':' + each.type if each.type else ''}" for each in asked)
    counts = [str(each.count) for each in asked]
    pairs = list(zip(text, counts, strict=True))
    assert parse_requested_gres(",".join(map(":".join, pairs))) == asked
    assert parse_requested_gres(",".join(map("=".join, pairs))) == asked


def test_tres_strings() -> None:
    said = parse_tres("cpu=4,mem=8G,node=1,billing=4,gres/gpu=2,gres/gpu:h100=2")
    assert (said["mem"], tres_gpus(said)) == (8 * 1024**3, 2)
    assert tres_gpus(parse_tres("gres/gpu:h100=2,gres/gpu:a100=1")) == 3
    assert tres_gpus(parse_tres("cpu=4,mem=1.50G")) is None
    assert (parse_count("1.50G"), parse_count("1K")) == (3 * 1024**3 // 2, 1024)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("gpu[01-03,07],login1", ("gpu01", "gpu02", "gpu03", "gpu07", "login1")),
        ("r[1-2]n[8-10]x", ("r1n8x", "r1n9x", "r1n10x", "r2n8x", "r2n9x", "r2n10x")),
        ("n1", ("n1",)),
        ("", ()),
    ],
)
def test_hostlists(said: str, names: tuple[str, ...]) -> None:
    assert expand_hostlist(said) == names


@pytest.mark.parametrize("said", ["a[1", "a]1", "a[[1]]", "a[2-1]", "a[x]", "a[]", "a,,b", "a[0-9999999]", "a b"])
def test_hostlists_that_are_none(said: str) -> None:
    with pytest.raises(ValueError, match=r"hostlist|brackets|numbers|range"):
        expand_hostlist(said)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("7-00:00:00", 604800.0), ("00:30:00", 1800.0), ("30:00", 1800.0), ("UNLIMITED", None), ("N/A", None)],
)
def test_durations(said: str, seconds: float | None) -> None:
    assert parse_duration(said) == seconds


def test_times() -> None:
    assert (parse_time("1970-01-02T00:00:01"), parse_time("Unknown")) == (86401, None)


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_node_states(version: str) -> None:
    (mixed,), (draining,) = (parse_node_states(recorded(f"{version}/sinfo.{n}.txt")) for n in ("mixed", "draining"))
    assert [(each.name, each.condition) for each in (mixed, draining)] == [("node1", ""), ("node1", "draining")]
    with pytest.raises(ValueError, match=r"no lines of name\|state\|"):
        parse_node_states("node1|drained|bad|\n")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["idle"], ""), (["mixed"], ""), (["allocated"], ""), (["completing"], ""), (["drained"], "drained"),
        (["draining"], "draining"), (["drained*"], "down"), (["down*"], "down"), (["idle*"], "down"),
        (["idle~"], "down"),
        (["maint"], "maintenance"), (["mixed$"], "maintenance"), (["reserved"], "reserved"), (["planned"], "planned"),
        (["mixed-"], "planned"), (["mixed@"], "draining"), (["reboot^"], "down"), (["fail"], "down"),
        (["failing"], "draining"), (["IDLE", "DRAIN"], "drained"), (["MIXED", "DRAIN"], "draining"),
        (["ALLOCATED", "DRAIN", "NOT_RESPONDING"], "down"), (["MIXED+DRAIN"], "draining"), (["IDLE",
        "PLANNED"], "planned"),
        (["IDLE", "RESERVED", "MAINTENANCE"], "maintenance"), (["IDLE+POWERED_DOWN"], "down"), ([], ""),
        (["idle+"], ""), (["inval"], "down"), (["IDLE+INVALID_REG"], "down"), (["IDLE", "INVALID_REG"], "down"),
    ],
)  # fmt: skip
def test_conditions(states: list[str], expected: str) -> None:
    assert node_condition(states) == expected


# Garbage.

SCRAPS = st.sampled_from([
    "JobId=5 JobName=a\n", "   UserId=alice(1001) GroupId=alice(1001)\n", "   Priority=1 Account=a QOS=b\n",
    "gpu", ":", "(IDX:",
    ")", "0-3", ",", "[", "]", "/", "=", "gres/", "gres:", "1K", "9" * 30, "-", "\n\n", "|", "idle", "{", "}",
    '"jobs":', "[{",
    '"job_id":1,', '"job_state":', '"nodes":', "null", "T", "2026-11-21T09:36:37", "00:30:00", "slurmd: Gres Name=gpu ",
    "Type=h100 ", "Count=1 ", "Index=0 ", "File=/dev/nvidia[0-3] ", "²", "\udcff",
])  # fmt: skip
GARBAGE = st.one_of(st.text(max_size=80), st.lists(SCRAPS, max_size=12).map("".join))
PARSERS: list[Callable[[str], Any]] = [
    lambda said: parse_job_text(said, "5"),
    parse_job_json,
    parse_node_json,
    parse_node_states,
    parse_gres,
    parse_requested_gres,
    parse_tres,
    parse_count,
    expand_hostlist,
    parse_duration,
    parse_time,
    parse_slots,
]


@pytest.mark.parametrize("parse", PARSERS)
@given(said=GARBAGE)
def test_garbage_is_a_value_or_a_value_error(parse: Callable[[str], Any], said: str) -> None:
    with suppress(ValueError):
        parse(said)


@given(said=st.lists(GARBAGE))
def test_a_condition_is_one_of_the_known_ones(said: list[str]) -> None:
    assert node_condition(said) in {"", *CONDITIONS}


@pytest.mark.parametrize("version", VERSIONS)
@given(data=st.data())
def test_a_changed_character_never_gives_another_user(version: str, data: st.DataObject) -> None:
    """Anywhere but in the line that names the user."""
    said = recorded(f"{version}/running.d.txt")
    place = data.draw(st.integers(0, len(said) - 1))
    begin = said.index("UserId=")
    if begin - 4 <= place <= said.index("\n", begin):
        return
    changed = said[:place] + data.draw(st.characters()) + said[place + 1 :]
    try:
        job = parse_job_text(changed, "2")
    except ValueError:
        return
    assert (job.job_id, job.user, job.uid) == ("2", "alice", 1001)


def test_columns_of_an_array_are_told_apart_by_their_own_ids() -> None:
    said = recorded("slurm-22.05/array.columns.txt")
    task, leader = parse_job_columns(said, "7"), parse_job_columns(said, "6")
    assert (task.array_id, task.gpus, task.time_limit_seconds, task.batch) == ("6", 1, 300.0, True)
    assert (task.array_task_id, leader.array_id, leader.array_task_id) == ("3", "6", "4")
    alone = parse_job_columns(recorded("slurm-22.05/spoof.columns.txt"), "5")
    assert (alone.array_id, alone.array_task_id, alone.het_id, alone.het_offset) == ("", "", "", "")
    pending = said.replace("6|RUNNING", "6|PENDING").replace("|6|4|", "|6|1-3%1|")
    assert parse_job_columns(pending, "6").array_id == "", "of all tasks at once it is none"
    part = parse_job_columns(said.replace("|6|3|N/A|N/A|", "|7|N/A|6|1|"), "7")
    assert (part.array_id, part.het_id, part.het_offset) == ("", "6", "1")
    assert task.start == 1795257046
    with pytest.raises(ValueError, match="0 lines of job 8"):
        parse_job_columns(said, "8")


@given(st.text(alphabet="|0123456789:-abc(nul)\n ", max_size=300) | st.text(max_size=80))
def test_garbage_in_columns_is_refused_or_read_whole(text: str) -> None:
    for said in (text, f"7{text}", recorded("slurm-22.05/array.columns.txt").replace("gpu", text, 1)):
        with suppress(ValueError):
            assert parse_job_columns(said, "7").job_id == "7"
