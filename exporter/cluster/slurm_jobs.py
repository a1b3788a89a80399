"""Slurm's jobs: the JSON of `squeue --json`, from 22.05 (plain numbers) to 25.11 ({set, infinite, number}).

Owns what is read of a job and what its words mean. Refuses a job that cannot be read, by itself and counted; names,
comments and paths are passed over unread. Sources: squeue(1), "JOB REASON CODES" and "JOB STATE CODES"; sbatch(1) for
what --gpus, --gres and their like ask for; the shapes as printed by 22.05.8 and 24.11.5.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from exporter.cluster.model import BLOCKED, Demand, Jobs, Pending, Place, Run
from exporter.schedulers.slurm.gres import gpu_count, parse_asked, parse_gres
from exporter.schedulers.slurm.hostlist import expand_hostlist
from exporter.schedulers.slurm.parsing_json import Count, number

_WORKING = frozenset({"RUNNING", "SUSPENDED"})
_LEAVING = frozenset({"COMPLETING", "SIGNALING", "STAGE_OUT"})
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ENDED = {"NODE_FAIL": "node_failure", "BOOT_FAIL": "node_failure", "PREEMPTED": "preempted"}
_REASONS = (
    # The first that fits the whole word, as JSON writes it.
    (r"None", "none"),
    (r"Resources", "resources"),
    (r"Priority", "priority"),
    (r"Dependency\w*", "dependency"),
    (r"JobHeld\w*|JobHoldMaxRequeue|\w*Held\w*", "held"),
    (r"BeginTime|DeadLine", "begin_time"),
    (r"Reservation\w*", "reservation"),
    (r"ReqNodeNotAvail.*|NodeDown|Node.*|Partition(Down|Inactive)|FrontEndDown|BootFail\w*", "node_unavailable"),
    (r"BadConstraints|Partition(Node|Time)Limit|Invalid(Account|QOS)|Account\w*|QOSNotAllowed", "impossible"),
    (r"JobArrayTaskLimit|(QOS|Assoc|Max|Max.*Per).*|Licenses|Cleaning|ReqBurstBuffer|BurstBuffer\w*", "limit"),
    (r"Prolog|Configuring|JobLaunchFailure|LaunchFailure", "starting"),
)  # fmt: skip
_PATTERNS = tuple((re.compile(pattern), reason) for pattern, reason in _REASONS)
_FEATURES = re.compile(r"[^\s|*()\[\]&,]+(?:[&,][^\s|*()\[\]&,]+)*")
"""All of several names; anything else (or, counts, groups) is not understood."""
_TASKS = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


class NotAskedError(Exception):
    """The command says in its JSON that it had no answer: 22.05 then exits with 0."""


_Words = str | list[str] | None


class _Raw(Struct):
    job_id: int
    job_state: str | list[str]
    state_reason: str | None = ""
    partition: str | None = ""
    array_task_string: str | None = ""
    het_job_id: Count = None
    priority: Count = None
    submit_time: Count = None
    eligible_time: Count = None
    preempt_time: Count = None
    restart_cnt: int | None = 0
    node_count: Count = None
    max_nodes: Count = None
    tasks: Count = None
    sockets_per_node: Count = None
    shared: _Words = None
    nodes: str | None = ""
    required_nodes: str | None = ""
    excluded_nodes: str | None = ""
    features: str | None = ""
    resv_name: str | None = ""
    failed_node: str | None = ""
    tres_per_job: str | None = ""
    tres_per_node: str | None = ""
    tres_per_task: str | None = ""
    tres_per_socket: str | None = ""
    gres_detail: list[str] | None = None


class _Answer(Struct):
    jobs: list[msgspec.Raw]
    errors: list[msgspec.Raw] = []


_DECODER = msgspec.json.Decoder(_Raw)


def parse_jobs(text: str | bytes) -> Jobs:
    """Give all jobs that hold or want GPUs; raises NotAskedError, and ValueError where it is no answer at all."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ValueError(f"no JSON of jobs: {err}") from err
    if answer.errors and not answer.jobs:
        said = " ".join(bytes(answer.errors[0]).decode(errors="replace").split())
        raise NotAskedError(f"squeue had no answer from slurmctld: {said[:300]}")
    return _collect(answer.jobs)


def _collect(raws: Iterable[msgspec.Raw]) -> Jobs:
    pending: dict[str, Pending] = {}
    runs: list[Run] = []
    places: dict[str, Place] = {}
    refused = 0
    for each in raws:
        try:
            raw = _DECODER.decode(each)
            run, waiting = _run(raw), _pending(raw)
            place = _place(raw) if waiting else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            refused += 1
            continue
        if run is not None:
            runs.append(run)
        if waiting is not None and place is not None:
            places[_key(raw)] = place
            # A heterogeneous job starts as one: its parts are one job's.
            leader = waiting.job_id
            pending[leader] = _joined(pending[leader], waiting) if leader in pending else waiting
    return Jobs(tuple(pending.values()), tuple(runs), places, refused)


def _states(raw: _Raw) -> frozenset[str]:
    return frozenset({raw.job_state} if isinstance(raw.job_state, str) else raw.job_state)


def _joined(first: Pending, other: Pending) -> Pending:
    return msgspec.structs.replace(
        first,
        parts=first.parts + other.parts,
        since=first.since if first.reason in BLOCKED else other.since,
        reason=first.reason if first.reason in BLOCKED else other.reason,
    )


def _run(raw: _Raw) -> Run | None:
    """What it has or had; None for a job that never was on a GPU and never came back."""
    states = _states(raw)
    gpus = _given(raw) if states & (_WORKING | _LEAVING) else {}
    cause = next((_ENDED[state] for state in states & _ENDED.keys()), "")
    if not cause and number(raw.preempt_time):
        cause = "preempted"
    return Run(
        str(raw.job_id),
        (raw.partition or "").partition(",")[0],
        gpus,
        nodes=expand_hostlist(raw.nodes or "") if gpus else (),
        restarts=max(0, raw.restart_cnt or 0),
        running=bool(gpus and states & _WORKING and not states & _LEAVING),
        cause=cause,
        culprit=raw.failed_node or "",
        ended=bool(states & _ENDED.keys()),
    )


def _given(raw: _Raw) -> Mapping[str, int]:
    """GPUs by node; one text a node, in their order (measured), else nothing is known."""
    hosts, detail = expand_hostlist(raw.nodes or ""), raw.gres_detail or []
    if len(hosts) != len(detail):
        return {}
    counts = {host: gpu_count(parse_gres(text)) for host, text in zip(hosts, detail, strict=True)}
    return {host: count for host, count in counts.items() if count}


def _pending(raw: _Raw) -> Pending | None:
    states = _states(raw)
    if not states & _WAITING or states & (_WORKING | _LEAVING):
        return None
    reason = "held" if states & {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"} else _reason(raw.state_reason or "")
    if number(raw.priority) == 0:
        reason = "held" if reason in {"none", "priority", "resources", "other"} else reason
    since = number(raw.eligible_time) or number(raw.submit_time)
    return Pending(
        str(number(raw.het_job_id) or raw.job_id),
        (raw.partition or "").partition(",")[0],
        reason,
        _demands(raw),
        count=_tasks(raw.array_task_string or ""),
        since=None if reason in BLOCKED or since is None else float(since),
        priority=number(raw.priority) or 0,
    )


def _key(raw: _Raw) -> str:
    """Jobs that ask the same of their nodes have the same."""
    said = (raw.partition, raw.features, raw.required_nodes, raw.excluded_nodes, raw.resv_name)
    return "\n".join(each or "" for each in said)


def _reason(word: str) -> str:
    return next((reason for pattern, reason in _PATTERNS if pattern.fullmatch(word)), "other")


def _tasks(text: str) -> int:
    """How many tasks of an array `0-9,12-20:2%4` names; 1 for a job that is none. Raises ValueError."""
    if not text:
        return 1
    total = 0
    for piece in text.partition("%")[0].split(","):
        match = _TASKS.fullmatch(piece)
        if not match or not piece.isascii():
            raise ValueError(f"no list of tasks: {piece[:80]!r}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or not step:
            raise ValueError(f"no list of tasks: {piece[:80]!r}")
        total += (last - first) // step + 1
    return total


def _demands(raw: _Raw) -> tuple[Demand, ...]:
    """GPUs as they were asked for; a resource of two types is asked for twice."""
    nodes, most, place = max(1, number(raw.node_count) or 1), number(raw.max_nodes) or 0, _key(raw)
    per_node = _types(raw.tres_per_node)
    per_socket = {kind: n * (number(raw.sockets_per_node) or 1) for kind, n in _types(raw.tres_per_socket).items()}
    if per_node or per_socket:
        each = per_node or per_socket
        return tuple(Demand(n * nodes, n, nodes, nodes, kind, place) for kind, n in sorted(each.items()))
    whole = _types(raw.tres_per_job)
    if not whole:
        tasks = number(raw.tasks) or 1
        whole = {kind: n * tasks for kind, n in _types(raw.tres_per_task).items()}
    return tuple(Demand(n, 0, nodes, most, kind, place) for kind, n in sorted(whole.items()))


def _types(text: str | None) -> dict[str, int]:
    """GPUs by type in `gres/gpu:h100:4` and its like."""
    counts: dict[str, int] = {}
    for each in parse_asked(text or ""):
        if each.name == "gpu" and each.count:
            counts[each.type] = counts.get(each.type, 0) + each.count
    return counts


def _place(raw: _Raw) -> Place:
    features = raw.features or ""
    known = not features or _FEATURES.fullmatch(features) is not None
    return Place(
        tuple(filter(None, (raw.partition or "").split(","))),
        features=frozenset(re.split("[&,]", features)) if features and known else frozenset(),
        required=frozenset(expand_hostlist(raw.required_nodes or "")),
        excluded=frozenset(expand_hostlist(raw.excluded_nodes or "")),
        reservation=raw.resv_name or "",
        known=known,
    )
