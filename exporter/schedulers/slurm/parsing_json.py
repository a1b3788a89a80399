"""Jobs and nodes in JSON, as scontrol and slurmrestd write them from 22.05 (v0.0.38) to 25.11 (v0.0.44).

Owns both spellings of a number: 22.05 writes it plainly, later versions as {set, infinite, number}. Refuses half of
anything: ValueError. What is not used is passed over unread (a job's cores alone can be megabytes).
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from exporter.schedulers.slurm.gres import Gres, parse_asked, parse_gres, parse_tres
from exporter.schedulers.slurm.hostlist import expand_hostlist
from exporter.schedulers.slurm.jobs import LONGEST, Job, count, on_gpus
from exporter.schedulers.slurm.parsing import NodeState, condition

_UNSET = 0xFFFFFFFC
"""NO_VAL, INFINITE and their like, where plain numbers are written."""


class _Number(Struct):
    set: bool
    infinite: bool = False
    number: float = 0


Count = int | float | _Number | None
"""A number in either spelling: plain before 23.02, and beside a word that it is set since."""


class _Raw(Struct):
    """Of a job in JSON, what is used; the rest is passed over unread."""

    job_id: int
    job_state: str | list[str]
    user_name: str | None = ""
    user_id: int | None = None
    account: str | None = ""
    partition: str | None = ""
    qos: str | None = ""
    name: str | None = ""
    comment: str | Mapping[str, str | None] | None = ""
    command: str | None = ""
    array_job_id: Count = None
    het_job_id: Count = None
    batch_flag: bool | None = None
    node_count: Count = None
    tasks: Count = None
    nodes: str | None = ""
    start_time: Count = None
    time_limit: Count = None
    restart_cnt: int | None = 0
    tres_alloc_str: str | None = ""
    tres_per_job: str | None = ""
    tres_per_node: str | None = ""
    tres_per_task: str | None = ""
    tres_per_socket: str | None = ""
    gres_detail: list[str] | None = None


class _Answer(Struct):
    jobs: list[_Raw]
    errors: list[msgspec.Raw] = []


def number(value: Count) -> int | None:
    """A number in either spelling; None where it is not set, infinite, or one of Slurm's words for that."""
    if isinstance(value, _Number):
        value = value.number if value.set and not value.infinite else None
    return int(value) if value is not None and 0 <= value < _UNSET else None


def _from_json(raw: _Raw) -> Job:
    states = (raw.job_state,) if isinstance(raw.job_state, str) else tuple(raw.job_state)
    if not states:
        raise ValueError("a job without a state")
    per = {"Job": raw.tres_per_job, "Node": raw.tres_per_node, "Task": raw.tres_per_task, "Socket": raw.tres_per_socket}
    asked = {name: parse_asked(text or "") for name, text in per.items()}
    given, nodes = _detail(raw), number(raw.node_count) or 0
    tres = parse_tres(raw.tres_alloc_str or "")
    gpus, here = count(asked, tres, given, nodes=nodes, tasks=number(raw.tasks))
    limit = number(raw.time_limit)
    comment = raw.comment if isinstance(raw.comment, str) else (raw.comment or {}).get("job")
    return Job(
        str(raw.job_id),
        tuple(state.upper() for state in states),
        user=raw.user_name or "",
        uid=raw.user_id,
        account=raw.account or "",
        partition=raw.partition or "",
        qos=raw.qos or "",
        name=(raw.name or "").partition("\n")[0][:LONGEST],
        comment=(comment or "").partition("\n")[0][:LONGEST],
        command=raw.command or "",
        array_id=str(number(raw.array_job_id) or ""),
        het_id=str(number(raw.het_job_id) or ""),
        batch=raw.batch_flag,
        nodes=nodes,
        hosts=raw.nodes or "",
        start=number(raw.start_time) or None,
        time_limit_seconds=None if limit is None else limit * 60.0,
        restarts=raw.restart_cnt or 0,
        gpus=gpus,
        gpus_here=here,
        on_gpus=on_gpus(asked, tres, given),
        given=given,
    )


def _detail(raw: _Raw) -> Mapping[str, tuple[Gres, ...]] | None:
    """What it has by node; the list has one text for each node, in their order. None where the two do not fit."""
    hosts = expand_hostlist(raw.nodes or "")
    if not raw.gres_detail or len(hosts) != len(raw.gres_detail):
        return None
    return dict(zip(hosts, map(parse_gres, raw.gres_detail), strict=True))


class _Node(Struct):
    name: str
    state: str | list[str]
    state_flags: list[str] = []
    reason: str | None = ""


class _Nodes(Struct):
    nodes: list[_Node]
    errors: list[msgspec.Raw] = []


def parse_job_json(data: bytes | str) -> tuple[Job, ...]:
    """Give the jobs in what `scontrol show job --json` printed or slurmrestd answered; raises ValueError."""
    try:
        answer = msgspec.json.decode(data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ValueError(f"no JSON of jobs: {err}") from err
    if answer.errors:
        raise ValueError(f"the answer holds errors: {bytes(answer.errors[0]).decode(errors='replace')[:200]}")
    return tuple(_from_json(raw) for raw in answer.jobs)


def parse_node_json(data: bytes | str) -> tuple[NodeState, ...]:
    """Give the nodes in slurmrestd's answer; raises ValueError."""
    try:
        answer = msgspec.json.decode(data, type=_Nodes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ValueError(f"no JSON of nodes: {err}") from err
    return tuple(_node(raw) for raw in answer.nodes)


def _node(raw: _Node) -> NodeState:
    said = [raw.state] if isinstance(raw.state, str) else raw.state
    states = [*said, *raw.state_flags]
    return NodeState(raw.name, condition(states), "+".join(states).lower(), raw.reason or "")
