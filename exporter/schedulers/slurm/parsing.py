"""Parses jobs and nodes from the text and JSON of scontrol, squeue, sinfo and slurmrestd, 22.05 to 26.05.

Raises ValueError instead of returning partial values. A job's name, comment and paths are written by its user and may
contain line breaks that imitate other fields, so a line of text counts only if it is the only one of its kind.
"""

import calendar
import re
import time
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.schedulers.procfs import SLUID
from exporter.schedulers.slurm.notation import (
    GPU_GRES,
    SHARED_GRES,
    Gres,
    count_gpus,
    expand_hostlist,
    parse_count,
    parse_gres,
    parse_requested_gres,
    parse_tres,
    tres_gpus,
)

MOST_TEXT_CHARS = 256
"""Characters kept of a name or comment."""
HOLDING_STATES = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING", "RESIZING"}
)
"""States in which a job has resources (squeue(1), JOB STATE CODES)."""


class SlurmJob(Struct, frozen=True):
    """One job as reported by the controller."""

    job_id: str
    states: tuple[str, ...]
    """Upper case; the base state first."""
    user: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    qos: str = ""
    name: str = ""
    comment: str = ""
    command: str = ""
    sluid: str = ""
    """Slurm's own name of the job, which its control group has (26.05); empty in older versions."""
    array_id: str = ""
    array_task_id: str = ""
    het_id: str = ""
    het_offset: str = ""
    batch: bool | None = None
    """False for srun and salloc: interactive."""
    nodes: int = 0
    hosts: str = ""
    """Its nodes, as a hostlist."""
    start: int | None = None
    """Unix seconds."""
    time_limit_seconds: float | None = None
    """None: unlimited or unknown."""
    restarts: int = 0
    gpus: int | None = None
    """Of the whole job; None when unknown. MIG instances count as one each."""
    gpus_here: int | None = None
    """On each of its nodes; None when unknown or not the same on all."""
    on_gpus: bool = True
    """Whether GPUs were requested; True also when unknown."""
    on_shares: bool = False
    """Whether these are parts of GPUs (shards, MPS), so that other jobs may have the rest."""
    given: Mapping[str, tuple[Gres, ...]] | None = None
    """Allocated resources by node; None when unknown."""

    @property
    def ended(self) -> bool:
        """It holds nothing any more and will not be restarted by itself."""
        return not HOLDING_STATES.intersection(self.states)


def _with_gpus(
    job: SlurmJob, requested: Mapping[str, str], allocated: str, *, nodes: int, tasks: int | None
) -> SlurmJob:
    """Return the job with its GPU counts, each from the most reliable source. Raises ValueError.

    `requested` has TRES by the unit of the request (Job, Node, Task, Socket), `allocated` is TRES of the whole job.
    """
    tres, gres = parse_tres(allocated), {unit: parse_requested_gres(text) for unit, text in requested.items()}
    given = [each for some in (job.given or {}).values() for each in some]
    counts = {unit: count_gpus(some) for unit, some in gres.items()}
    whole = tres_gpus(tres) or count_gpus(given) or counts["Job"]
    total = whole or counts["Node"] * nodes or counts["Task"] * (tasks or 0) or None
    names = {each.name for some in (given, *gres.values()) for each in some}
    names |= {name.removeprefix("gres/").partition(":")[0] for name in tres if name.startswith("gres/")}
    here = total if nodes == 1 else counts["Node"] or None
    on_gpus, on_shares = not names.isdisjoint(GPU_GRES), not names.isdisjoint(SHARED_GRES)
    return replace(job, nodes=nodes, gpus=total, gpus_here=here, on_gpus=on_gpus, on_shares=on_shares)


_HEAD = re.compile(r"JobId=(\d{1,10})((?: (?:Array|Het)\w+=\S+)*) JobName=(.*)")
_USER = re.compile(r"   UserId=([^\s()]+)\((\d{1,10})\) GroupId=.*")
_BEFORE_USER = re.compile(rf"   (?:SLUID={SLUID}|HetJobIdSet=[\d,\-\[\]]+)")
_FIELD = re.compile(r"([A-Z][A-Za-z/]*)=(\S*)")
_TIME = "%Y-%m-%dT%H:%M:%S"
_DURATION = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d\d)")
_SINGLE_LINES = (
    "UserId",
    "Priority",
    "JobState",
    "Requeue",
    "RunTime",
    "StartTime",
    "Partition",
    "NodeList",
    "NumNodes",
)
"""Kinds of lines that each job has exactly once, in every version and state."""
_REQUIRED = frozenset(
    {"Account", "QOS", "JobState", "BatchFlag", "Restarts", "TimeLimit", "StartTime", "Partition", "NodeList"}
)


def parse_job_text(text: str, job_id: str) -> SlurmJob:
    """Return job `job_id` from the output of `scontrol show job ID` with TZ=UTC, with or without -d.

    For the leader of an array or heterogeneous job all components are printed. Raises ValueError, also if a user
    could have written the text of another job.
    """
    if not text.endswith("\n\n"):
        raise ValueError("the text is cut off")
    blocks = _split_jobs(text.split("\n"))
    found = [block for block in blocks if block[0].startswith(f"JobId={job_id} ")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs of that number in the text")
    if len(blocks) > 1:
        _check_same_owner(blocks)
    return _parse_job_block(found[0])


def parse_duration(text: str) -> float | None:
    """Return the seconds of `[days-]hours:minutes:seconds`; None for UNLIMITED and the like. Raises ValueError."""
    if text in {"UNLIMITED", "INVALID", "Partition_Limit", "N/A", "NONE"}:
        return None
    match = _DURATION.fullmatch(text)
    if not match or not text.isascii():
        raise ValueError(f"no duration: {text[:40]!r}")
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_time(text: str) -> int | None:
    """Return the Unix seconds of `2026-11-21T09:36:41` (UTC); None for Unknown and the like. Raises ValueError."""
    if text in {"Unknown", "None", "N/A", "(null)"}:
        return None
    return calendar.timegm(time.strptime(text, _TIME))


# -- text --


def _split_jobs(lines: list[str]) -> list[list[str]]:
    """Return one list of lines per job; each begins with JobId= and has its UserId= where scontrol puts it."""
    starts = [place for place, line in enumerate(lines) if line.startswith("JobId=")]
    if starts[:1] != [0]:
        raise ValueError("it does not begin with JobId=")
    blocks = [lines[begin:end] for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    for block in blocks:
        # In between: SLUID= from 25.11 on, HetJobIdSet= of a component. A job's name could imitate what follows them.
        place = next((place for place, line in enumerate(block) if place and not _BEFORE_USER.fullmatch(line)), 0)
        if not place or not _USER.fullmatch(block[place]):
            raise ValueError("ambiguous: a name with line breaks, or no UserId after it")
    return blocks


def _check_same_owner(blocks: list[list[str]]) -> None:
    """Raise ValueError unless all are components of one user's array or heterogeneous job, on one account."""
    if not all(re.match(r"JobId=\d+ (Array|Het)JobId=", block[0]) for block in blocks):
        raise ValueError("ambiguous: several jobs where one was asked for")
    for kind, pattern in (("UserId", r"UserId=\S+"), ("Priority", r" Account=\S* QOS=\S*")):
        values = {match[0] for b in blocks for match in [re.search(pattern, _single_line(b, kind))] if match}
        if len(values) != 1:
            raise ValueError(f"ambiguous: several jobs that differ in {kind} where one was asked for")


def _single_line(block: list[str], kind: str) -> str:
    """Return the only line of that kind, without indentation. Raises ValueError."""
    found = [line for line in block if line.startswith(f"   {kind}=")]
    if len(found) != 1:
        raise ValueError(f"ambiguous or cut off: {len(found)} lines of {kind}=")
    return found[0].strip()


def _first_value(block: list[str], kind: str) -> str:
    """Return the value of the first line of that kind, or ""."""
    prefix = f"   {kind}="
    return next((line[len(prefix) :].strip() for line in block if line.startswith(prefix)), "")


def _only_value(block: list[str], kind: str) -> str:
    """Return the value of the only line of that kind, or "": a comment may precede and imitate it."""
    lines = [line for line in block if line.startswith(f"   {kind}=")]
    return lines[0].partition("=")[2].strip() if len(lines) == 1 else ""


def _parse_job_block(block: list[str]) -> SlurmJob:
    head, user = _HEAD.fullmatch(block[0]), _USER.fullmatch("   " + _single_line(block, "UserId"))
    if not head or not user:
        raise ValueError("its first lines are no job's")
    lines = " ".join(_single_line(block, kind) for kind in _SINGLE_LINES[1:])
    fields = {key: "" if value == "(null)" else value for key, value in reversed(_FIELD.findall(lines))}
    missing = _REQUIRED - fields.keys()
    if missing:
        raise ValueError(f"cut off: no {', '.join(sorted(missing))}")
    parts, command = dict(_FIELD.findall(head[2])), _first_value(block, "Command")
    fields |= {
        "JobId": head[1],
        "UserName": user[1],
        "UserID": user[2],
        "JobName": head[3],
        "Comment": _first_value(block, "Comment"),
        "Command": "" if command == "(null)" else command,
        "SLUID": _only_value(block, "SLUID"),
        **{name: parts.get(name, "") for name in ("ArrayJobId", "HetJobId", "HetJobOffset")},
        "ArrayTaskId": _task_id(parts.get("ArrayTaskId", "")),
        "AllocTRES": _first_value(block, "AllocTRES") or _first_value(block, "TRES"),
    }
    requested = {unit: _only_value(block, f"TresPer{unit}") for unit in ("Job", "Node", "Task", "Socket")}
    return _job_from_fields(fields, requested, _parse_gres_by_node(block))


def _job_from_fields(
    fields: Mapping[str, str], requested: Mapping[str, str], given: Mapping[str, tuple[Gres, ...]] | None
) -> SlurmJob:
    """Return a job from scontrol's fields, with those of `_parse_job_block`. Raises ValueError."""
    job = SlurmJob(
        fields["JobId"],
        (fields["JobState"],),
        user=fields["UserName"],
        uid=int(fields["UserID"]),
        account=fields["Account"],
        partition=fields["Partition"],
        qos=fields["QOS"],
        name=fields.get("JobName", "")[:MOST_TEXT_CHARS],
        comment=fields.get("Comment", "")[:MOST_TEXT_CHARS],
        command=fields.get("Command", ""),
        sluid=fields.get("SLUID", ""),
        array_id=fields["ArrayJobId"],
        array_task_id=fields["ArrayTaskId"],
        het_id=fields["HetJobId"],
        het_offset=fields["HetJobOffset"] if fields["HetJobId"] else "",
        batch=fields["BatchFlag"] != "0",
        hosts=fields["NodeList"],
        start=parse_time(fields["StartTime"]),
        time_limit_seconds=parse_duration(fields["TimeLimit"]),
        restarts=int(fields["Restarts"]),
        given=given,
    )
    nodes = parse_count(fields["NumNodes"].partition("-")[0])
    tasks = parse_count(fields["NumTasks"].partition("-")[0]) if "NumTasks" in fields else None
    return _with_gpus(job, requested, fields["AllocTRES"], nodes=nodes, tasks=tasks)


def _task_id(text: str) -> str:
    """Return an array task's index; empty for a pending array, of which all tasks are listed (`1-9%4`)."""
    return text if text.isascii() and text.isdigit() else ""


def _parse_gres_by_node(block: list[str]) -> Mapping[str, tuple[Gres, ...]] | None:
    """Parse the lines by node that -d puts after JOB_GRES=, before any text that a user can write."""
    begin = next((place for place, line in enumerate(block) if line.startswith("   JOB_GRES=")), None)
    if begin is None:
        return None
    gres_by_node: dict[str, tuple[Gres, ...]] = {}
    for line in block[begin + 1 :]:
        if not line.startswith("     Nodes="):
            break
        hosts, _, rest = line.strip().removeprefix("Nodes=").partition(" ")
        gres_by_node |= dict.fromkeys(expand_hostlist(hosts), parse_gres(rest.rpartition("GRES=")[2]))
    return gres_by_node


# -- columns --

SQUEUE_COLUMNS = {
    "JobID": "JobId", "State": "JobState", "UserName": "UserName", "UserID": "UserID", "Account": "Account",
    "Partition": "Partition", "QOS": "QOS", "BatchFlag": "BatchFlag", "NumNodes": "NumNodes", "NodeList": "NodeList",
    "StartTime": "StartTime", "TimeLimit": "TimeLimit", "RestartCnt": "Restarts", "ArrayJobID": "ArrayJobId",
    "ArrayTaskID": "ArrayTaskId", "HetJobID": "HetJobId", "HetJobOffset": "HetJobOffset", "tres-per-job": "Job",
    "tres-per-node": "Node", "tres-per-task": "Task", "tres-alloc": "AllocTRES", "NumTasks": "NumTasks",
}  # fmt: skip
"""Columns of `squeue -O` that users cannot write, with scontrol's name of the field, or the unit of a request."""
_EMPTY_COLUMNS = {"StartTime": "N/A", "TimeLimit": "N/A", "Restarts": "0", "NumTasks": "1"}


def parse_job_columns(text: str, job_id: str) -> SlurmJob:
    """Return job `job_id` from lines of SQUEUE_COLUMNS, each column followed by `|`. Raises ValueError."""
    rows = [line.split("|")[:-1] for line in text.splitlines()]
    found = [row for row in rows if row[:1] == [job_id]]
    if len(found) != 1 or len(found[0]) != len(SQUEUE_COLUMNS):
        raise ValueError(f"{len(found)} lines of job {job_id}, or not {len(SQUEUE_COLUMNS)} columns: {text[:80]!r}")
    cells = zip(SQUEUE_COLUMNS.values(), found[0], strict=True)
    fields = {name: _EMPTY_COLUMNS.get(name, "") if cell in {"", "(null)", "N/A"} else cell for name, cell in cells}
    # The column ArrayJobID of a job that is in no array has the job's own id.
    task = _task_id(fields["ArrayTaskId"])
    fields |= {"ArrayTaskId": task, "ArrayJobId": fields["ArrayJobId"] if task else ""}
    requested = {unit: fields[unit] for unit in ("Job", "Node", "Task")}
    return _job_from_fields(fields, requested, None)


# -- nodes --


class NodeState(Struct, frozen=True):
    """A node's state as reported by sinfo or slurmrestd."""

    name: str
    condition: str
    """One of the schedulers' CONDITIONS; empty if it takes new work."""
    state: str
    """As Slurm writes it."""


_CONDITIONS = (
    # The first match counts, the worse first. Long forms of sinfo(1), NODE STATE CODES, as names or as JSON's flags.
    (("down", "fail", "failed", "error", "future", "inval", "invalid_reg", "unknown", "not_responding",
      "reboot_issued", "rebooting", "powered_down", "powering_down", "powering_up", "power_down", "power_up",
      "powered_off", "no_respond"), "down"),
    (("maint", "maintenance"), "maintenance"),
    (("draining", "failing", "reboot", "reboot_requested", "power_drain"), "draining"),
    (("drained",), "drained"),
    (("reserved",), "reserved"),
    (("planned",), "planned"),
)  # fmt: skip
_SUFFIXES = {"*": "down", "~": "down", "#": "down", "%": "down", "^": "down", "$": "maintenance", "!": "draining",
             "@": "draining", "-": "planned", "+": ""}  # fmt: skip
_BUSY_STATES = frozenset({"allocated", "mixed", "completing"})


SINFO_COLUMNS = "NodeList:|,StateLong:|"
"""Columns of `sinfo -O`. Without Reason: an administrator's text, which may have line breaks, and nothing needs it."""


def parse_node_states(text: str) -> tuple[NodeState, ...]:
    """Parse lines `name|state|` of sinfo's SINFO_COLUMNS. Raises ValueError."""
    lines = [line.split("|") for line in text.splitlines() if line.strip()]
    if not all(len(line) == 3 and line[0] and line[1] and not line[2] for line in lines):  # noqa: PLR2004  and an end
        raise ValueError(f"no lines of name|state|: {text[:80]!r}")
    return tuple(NodeState(name, node_condition([state]), state) for name, state, _ in lines)


def node_condition(states: Iterable[str]) -> str:
    """Return one of CONDITIONS, or "", for sinfo's single state or for JSON's state and flags."""
    lowered = [state.lower() for state in states if state]
    flags = {flag for state in lowered for flag in state.rstrip("*~#!%$@^-+").split("+")}
    if "drain" in flags:
        flags.add("draining" if flags & _BUSY_STATES else "drained")
    suffixed = {_SUFFIXES[char] for state in lowered for char in state[len(state.rstrip("*~#!%$@^-+")) :]}
    found = [name for names, name in _CONDITIONS if not flags.isdisjoint(names) or name in suffixed]
    return found[0] if found else ""


_UNSET = 0xFFFFFFFC
"""NO_VAL, INFINITE and the like, in versions that write plain numbers."""


class _OptionalNumber(Struct):
    set: bool
    infinite: bool = False
    number: float = 0


SlurmNumber = int | float | _OptionalNumber | None
"""Plain before 23.02; since then an object with a flag `set`."""


class _StepIdJson(Struct):
    sluid: str | None = ""


class JobJson(Struct):
    """The fields of a job in JSON that the node or the cluster reads; the others are skipped."""

    job_id: int
    job_state: str | list[str]
    state_reason: str | None = ""
    user_name: str | None = ""
    user_id: int | None = None
    account: str | None = ""
    partition: str | None = ""
    qos: str | None = ""
    name: str | None = ""
    comment: str | Mapping[str, str | None] | None = ""
    command: str | None = ""
    array_job_id: SlurmNumber = None
    array_task_id: SlurmNumber = None
    array_task_string: str | None = ""
    het_job_id: SlurmNumber = None
    het_job_offset: SlurmNumber = None
    batch_flag: bool | None = None
    priority: SlurmNumber = None
    submit_time: SlurmNumber = None
    eligible_time: SlurmNumber = None
    preempt_time: SlurmNumber = None
    start_time: SlurmNumber = None
    end_time: SlurmNumber = None
    time_limit: SlurmNumber = None
    restart_cnt: int | None = 0
    node_count: SlurmNumber = None
    max_nodes: SlurmNumber = None
    tasks: SlurmNumber = None
    sockets_per_node: SlurmNumber = None
    nodes: str | None = ""
    required_nodes: str | None = ""
    excluded_nodes: str | None = ""
    failed_node: str | None = ""
    features: str | None = ""
    resv_name: str | None = ""
    tres_alloc_str: str | None = ""
    tres_per_job: str | None = ""
    tres_per_node: str | None = ""
    tres_per_task: str | None = ""
    tres_per_socket: str | None = ""
    gres_detail: list[str] | None = None
    step_id: _StepIdJson | None = None
    """From data_parser v0.0.45 on (26.05)."""

    @property
    def states(self) -> tuple[str, ...]:
        """Upper case; the base state first."""
        states = (self.job_state,) if isinstance(self.job_state, str) else self.job_state
        return tuple(state.upper() for state in states)


class JobsResponse(Struct):
    """A response about jobs. Each is decoded by itself, so that an invalid one does not affect the others."""

    jobs: list[msgspec.Raw]
    errors: list[msgspec.Raw] = []

    @property
    def error(self) -> str:
        """The first error on one line; empty if there is none."""
        return " ".join(bytes(self.errors[0]).decode(errors="replace").split()) if self.errors else ""


class NotJsonError(ValueError):
    """A command's output is no JSON response about jobs, as without Slurm's JSON plugin."""


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_JOB_DECODER = msgspec.json.Decoder(JobJson)


def decode_jobs(data: bytes | str) -> JobsResponse:
    """Decode the jobs of `scontrol show job --json`, `squeue --json` or slurmrestd. Raises NotJsonError."""
    try:
        return msgspec.json.decode(data, type=JobsResponse)
    except _UNREADABLE as err:
        raise NotJsonError(f"no JSON of jobs: {err}") from err


def decode_job(raw: msgspec.Raw) -> JobJson:
    """Decode one job of a response. Raises ValueError."""
    try:
        return _JOB_DECODER.decode(raw)
    except _UNREADABLE as err:
        raise ValueError(f"no JSON of a job: {err}") from err


def read_number(value: SlurmNumber) -> int | None:
    """Return the number; None if it is not set, infinite, or one of Slurm's values for that."""
    if isinstance(value, _OptionalNumber):
        value = value.number if value.set and not value.infinite else None
    return int(value) if value is not None and 0 <= value < _UNSET else None


def _number_text(value: SlurmNumber) -> str:
    number = read_number(value)
    return "" if number is None else str(number)


def _job_from_json(raw: JobJson) -> SlurmJob:
    if not raw.states:
        raise ValueError("a job without a state")
    per = {"Job": raw.tres_per_job, "Node": raw.tres_per_node, "Task": raw.tres_per_task, "Socket": raw.tres_per_socket}
    requested = {unit: text or "" for unit, text in per.items()}
    limit = read_number(raw.time_limit)
    comment = raw.comment if isinstance(raw.comment, str) else (raw.comment or {}).get("job")
    array_id, het_id = (str(read_number(number) or "") for number in (raw.array_job_id, raw.het_job_id))
    job = SlurmJob(
        str(raw.job_id),
        raw.states,
        user=raw.user_name or "",
        uid=raw.user_id,
        account=raw.account or "",
        partition=raw.partition or "",
        qos=raw.qos or "",
        name=(raw.name or "").partition("\n")[0][:MOST_TEXT_CHARS],
        comment=(comment or "").partition("\n")[0][:MOST_TEXT_CHARS],
        command=raw.command or "",
        sluid=(raw.step_id.sluid if raw.step_id else "") or "",
        array_id=array_id,
        array_task_id=_number_text(raw.array_task_id) if array_id else "",
        het_id=het_id,
        het_offset=_number_text(raw.het_job_offset) if het_id else "",
        batch=raw.batch_flag,
        hosts=raw.nodes or "",
        start=read_number(raw.start_time) or None,
        time_limit_seconds=None if limit is None else limit * 60.0,
        restarts=raw.restart_cnt or 0,
        given=gres_by_node_of(raw),
    )
    nodes = read_number(raw.node_count) or 0
    return _with_gpus(job, requested, raw.tres_alloc_str or "", nodes=nodes, tasks=read_number(raw.tasks))


def gres_by_node_of(raw: JobJson) -> Mapping[str, tuple[Gres, ...]] | None:
    """Return a job's resources by node; `gres_detail` has one text per node, in their order (measured).

    None if the number of texts is not that of the nodes. Raises ValueError.
    """
    hosts = expand_hostlist(raw.nodes or "")
    if not raw.gres_detail or len(hosts) != len(raw.gres_detail):
        return None
    return dict(zip(hosts, map(parse_gres, raw.gres_detail), strict=True))


class _NodeJson(Struct):
    name: str
    state: str | list[str]
    state_flags: list[str] = []


class _NodesResponse(Struct):
    nodes: list[_NodeJson] = []
    """26.05 leaves it out if there is no such node."""


def parse_job_json(data: bytes | str) -> tuple[SlurmJob, ...]:
    """Return the jobs in the output of `scontrol show job --json` or slurmrestd's response.

    Raises NotJsonError, and ValueError if one of the jobs is invalid.
    """
    response = decode_jobs(data)
    if response.errors:
        raise ValueError(f"the answer holds errors: {response.error[:200]}")
    return tuple(_job_from_json(decode_job(raw)) for raw in response.jobs)


def parse_node_json(data: bytes | str) -> tuple[NodeState, ...]:
    """Return the nodes in slurmrestd's response. Raises ValueError."""
    try:
        response = msgspec.json.decode(data, type=_NodesResponse)
    except _UNREADABLE as err:
        raise ValueError(f"no JSON of nodes: {err}") from err
    return tuple(_node_from_json(raw) for raw in response.nodes)


def _node_from_json(raw: _NodeJson) -> NodeState:
    base_states = [raw.state] if isinstance(raw.state, str) else raw.state
    states = [*base_states, *raw.state_flags]
    return NodeState(raw.name, node_condition(states), "+".join(states).lower())
