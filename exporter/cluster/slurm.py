"""The `ClusterSource` of Slurm: runs squeue, sinfo and scontrol, at most three calls per turn, and parses them.

A job or line that cannot be parsed is rejected by itself and counted; names, comments and paths of jobs are not kept.
Sources: squeue(1) "JOB REASON CODES" and "JOB STATE CODES", sinfo(1) "NODE STATE CODES", scontrol(1), topology.conf(5);
output recorded from 22.05.8 and 24.11.5, whose calls were counted with sdiag.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import structs

from exporter.cluster.model import (
    BLOCKED,
    NODE_STATES,
    POWERED_DOWN,
    ClusterJob,
    ClusterNode,
    Demand,
    Jobs,
    NodeRequirements,
    Nodes,
    Partition,
    PendingJob,
    Reservation,
    Reservations,
    Topology,
    parse_each,
)
from exporter.cluster.watcher import ClusterUnavailableError, Question
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError
from exporter.schedulers.slurm.notation import (
    SHARED_GRES,
    Gres,
    count_gpus,
    expand_hostlist,
    gpus_by_type,
    parse_count,
    parse_gres,
    parse_requested_gres,
    parse_tres,
    tres_gpus,
)
from exporter.schedulers.slurm.parsing import (
    JobJson,
    decode_job,
    decode_jobs,
    gres_by_node_of,
    node_condition,
    parse_time,
    read_number,
)

_RUNNING_STATES = frozenset({"RUNNING", "SUSPENDED"})
_ENDING_STATES = frozenset({"COMPLETING", "SIGNALING", "STAGE_OUT"})
_PENDING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_FAILED_STATES = {"NODE_FAIL": "node_failure", "BOOT_FAIL": "node_failure", "PREEMPTED": "preempted"}
_REASONS = (
    # The first that matches the whole reason, as JSON writes it.
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
"""Several names that are all required; anything else (or, counts, groups) is unsupported."""
_TASK_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


def parse_jobs(text: str | bytes) -> Jobs:
    """Return all jobs that hold or need GPUs. Raises ClusterUnavailableError, and ValueError if it is no JSON."""
    response = decode_jobs(text)
    if response.errors and not response.jobs:  # 22.05 exits with 0 then
        raise ClusterUnavailableError(f"squeue had no answer from slurmctld: {response.error[:300]}")
    found, refused = parse_each(_read_job, response.jobs)
    pending: dict[str, PendingJob] = {}
    for job in (job for _, job, _ in found if job is not None):
        # A heterogeneous job starts as one: its components are one job.
        pending[job.job_id] = _merge_components(pending[job.job_id], job) if job.job_id in pending else job
    places = {key: place for _, _, requirements in found for key, place in requirements.items()}
    return Jobs(tuple(pending.values()), tuple(run for run, _, _ in found), places, refused)


def _read_job(text: msgspec.Raw) -> tuple[ClusterJob, PendingJob | None, dict[str, NodeRequirements]]:
    """Return one job as it runs and as it is pending, and the latter's requirements by key. Raises ValueError."""
    raw = decode_job(text)
    run, job = _cluster_job(raw), _pending(raw)
    return run, job, {_requirements_key(raw): _requirements(raw)} if job else {}


def _merge_components(first: PendingJob, other: PendingJob) -> PendingJob:
    return structs.replace(
        first,
        parts=first.parts + other.parts,
        since=first.since if first.reason in BLOCKED else other.since,
        reason=first.reason if first.reason in BLOCKED else other.reason,
    )


def _cluster_job(raw: JobJson) -> ClusterJob:
    """Return what the job holds or held; empty fields for a job that never ran."""
    states = set(raw.states)
    gpus = _gpus_by_node(raw) if states & (_RUNNING_STATES | _ENDING_STATES) else {}
    running = bool(states & _RUNNING_STATES and not states & _ENDING_STATES)
    cause = next((_FAILED_STATES[state] for state in states & _FAILED_STATES.keys()), "")
    preempted, ended = bool(read_number(raw.preempt_time)), bool(states & _FAILED_STATES.keys())
    if not cause and preempted and not running:
        cause = "preempted"
    return ClusterJob(
        str(raw.job_id),
        (raw.partition or "").partition(",")[0],
        gpus,
        nodes=expand_hostlist(raw.nodes or "") if gpus or running else (),
        restarts=max(0, raw.restart_cnt or 0),
        running=running,
        qos=raw.qos or "",
        started=read_number(raw.start_time) if running else None,
        left=_left(raw, ended=ended, running=running),
        in_grace=running and preempted,
        cause=cause,
        culprit=raw.failed_node or "",
        ended=ended,
    )


def _left(raw: JobJson, *, ended: bool, running: bool) -> float | None:
    """Return when its last run ended: a requeue is a submission, at the moment when all nodes are free (measured)."""
    if ended:
        return read_number(raw.end_time)
    leaving = 0 if running else read_number(raw.preempt_time) or 0
    return max(read_number(raw.submit_time) or 0, leaving) or None


def _gpus_by_node(raw: JobJson) -> Mapping[str, int]:
    """Return GPUs by node; empty if unknown."""
    counts = {host: count_gpus(gres) for host, gres in (gres_by_node_of(raw) or {}).items()}
    return {host: count for host, count in counts.items() if count}


def _pending(raw: JobJson) -> PendingJob | None:
    states = set(raw.states)
    if not states & _PENDING_STATES or states & (_RUNNING_STATES | _ENDING_STATES):
        return None
    reason = "held" if states & {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"} else _reason(raw.state_reason or "")
    if read_number(raw.priority) == 0:
        reason = "held" if reason in {"none", "priority", "resources", "other"} else reason
    since = read_number(raw.eligible_time) or read_number(raw.submit_time)
    return PendingJob(
        str(read_number(raw.het_job_id) or raw.job_id),
        (raw.partition or "").partition(",")[0],
        reason,
        _demands(raw),
        count=_array_tasks(raw.array_task_string or ""),
        since=None if reason in BLOCKED or since is None else float(since),
        priority=read_number(raw.priority) or 0,
    )


def _requirements_key(raw: JobJson) -> str:
    """Return a key that jobs with the same requirements share."""
    fields = (raw.partition, raw.features, raw.required_nodes, raw.excluded_nodes, raw.resv_name)
    return "\n".join(each or "" for each in fields)


def _reason(text: str) -> str:
    return next((reason for pattern, reason in _PATTERNS if pattern.fullmatch(text)), "other")


def _array_tasks(text: str) -> int:
    """Return the number of tasks in `0-9,12-20:2%4`; 1 for a job that is no array. Raises ValueError."""
    if not text:
        return 1
    total = 0
    for part in text.partition("%")[0].split(","):
        match = _TASK_RANGE.fullmatch(part)
        if not match or not part.isascii():
            raise ValueError(f"no list of tasks: {part[:80]!r}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or not step:
            raise ValueError(f"no list of tasks: {part[:80]!r}")
        total += (last - first) // step + 1
    return total


def _demands(raw: JobJson) -> tuple[Demand, ...]:
    """Return the requested GPUs; a resource of two types is requested twice."""
    nodes, most = max(1, read_number(raw.node_count) or 1), read_number(raw.max_nodes) or 0
    place = _requirements_key(raw)
    per_node = _requested_gpus(raw.tres_per_node)
    per_socket = {
        kind: n * (read_number(raw.sockets_per_node) or 1) for kind, n in _requested_gpus(raw.tres_per_socket).items()
    }
    if per_node or per_socket:
        each = per_node or per_socket
        return tuple(Demand(n * nodes, n, nodes, nodes, kind, place) for kind, n in sorted(each.items()))
    whole = _requested_gpus(raw.tres_per_job)
    if not whole:
        tasks = read_number(raw.tasks) or 1
        whole = {kind: n * tasks for kind, n in _requested_gpus(raw.tres_per_task).items()}
    return tuple(Demand(n, 0, nodes, most, kind, place) for kind, n in sorted(whole.items()))


def _requested_gpus(text: str | None) -> dict[str, int]:
    """Return GPUs by type in `gres/gpu:h100:4` and the like."""
    return {kind: count for kind, count in gpus_by_type(parse_requested_gres(text or "")).items() if count}


def _requirements(raw: JobJson) -> NodeRequirements:
    features = raw.features or ""
    known = not features or _FEATURES.fullmatch(features) is not None
    return NodeRequirements(
        tuple(filter(None, (raw.partition or "").split(","))),
        features=frozenset(re.split("[&,]", features)) if features and known else frozenset(),
        required=frozenset(expand_hostlist(raw.required_nodes or "")),
        excluded=frozenset(expand_hostlist(raw.excluded_nodes or "")),
        reservation=raw.resv_name or "",
        known=known,
    )


_SEPARATOR = "\x1f"
"""Printed after each field; no name or list contains it."""
_FIELDS = (
    "NodeList", "PartitionName", "Available", "Gres", "GresUsed", "StateComplete", "Features", "PriorityTier",
    "PreemptMode",
)  # fmt: skip
SINFO = ("--local", "-a", "-N", "-h", "-O", ",".join(f"{field}:{_SEPARATOR}" for field in _FIELDS))
"""Arguments of sinfo for `parse_nodes`: a line for each node in each partition."""
_PAIR = re.compile(r"(\w+)=(\S*)")
_NONE = frozenset({"", "(null)", "N/A"})


def parse_nodes(text: str) -> Nodes:
    """Return each node that has GPUs, once. sinfo does not list a node without a partition."""
    lines, refused = parse_each(_node, filter(None, text.split("\n")))
    found: dict[str, ClusterNode] = {}
    for node in (node for node, _ in lines if node.gpus):
        found[node.name] = _merge_partitions(found[node.name], node) if node.name in found else node
    partitions = {name: partition for node, partition in lines for name in node.partitions}
    return Nodes(tuple(found.values()), partitions, refused)


def _node(line: str) -> tuple[ClusterNode, Partition]:
    name, partition, available, configured, used, state, features, tier, preempt_mode, rest = line.split(_SEPARATOR)
    if rest or not name:
        raise ValueError("not the fields that were asked for")
    partitions = (partition,) if partition else ()
    gpus = gpus_by_type(parse_gres(configured))
    node = ClusterNode(
        name,
        gpus,
        _used_gpus(parse_gres(used), gpus),
        state=_state(state),
        partitions=partitions,
        open_partitions=partitions if available == "up" else (),
        features=frozenset() if features in _NONE else frozenset(features.split(",")),
    )
    return node, Partition(parse_count(tier), preempt_mode not in {"OFF", "GANG"})


def _used_gpus(used: tuple[Gres, ...], gpus: Mapping[str, int]) -> dict[str, int]:
    """Return the GPUs of which jobs have any part, by type: nobody else can have such a GPU as a whole.

    Slurm does not count a GPU of which only shards or MPS are allocated as allocated. For these it writes a type only
    where gres.conf gives them one; otherwise the type is that of the GPU's position in the node's list.
    """
    counts = gpus_by_type(used)
    whole = {index for each in used if each.name == "gpu" for index in each.indices}
    kinds = [kind for kind, count in gpus.items() for _ in range(count)]
    shared = {index: each.type for each in used if each.name in SHARED_GRES for index in each.indices}
    for index in sorted(shared.keys() - whole):
        kind = shared[index] or (kinds[index] if index < len(kinds) else "")
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _merge_partitions(first: ClusterNode, other: ClusterNode) -> ClusterNode:
    return structs.replace(
        first,
        partitions=first.partitions + other.partitions,
        open_partitions=first.open_partitions + other.open_partitions,
    )


_POWERED_DOWN = re.compile(r"\+power(ed|ing)_(down|off)\b|[~%]$")
"""The flags after the base state, as in `idle+cloud+powered_down`, or their suffix, as in `idle~`."""


def _state(text: str) -> str:
    """Return why the node takes no work, else its use, from `mixed+planned`, `idle+drain`, `down*`."""
    if _POWERED_DOWN.search(text.lower()):
        return POWERED_DOWN
    base = re.split(r"[+*~#!%$@^-]", text.lower(), maxsplit=1)[0]
    base = {"completing": "mixed"}.get(base, base)
    found = node_condition([text]) or base
    return found if found in NODE_STATES else "unknown"


def parse_reservations(text: str) -> Reservations:
    """Parse `scontrol -a -o show reservation`, with times in UTC."""
    lines = (line for line in text.split("\n") if line.strip() and not line.startswith("No reservations"))
    found, refused = parse_each(_reservation, lines)
    return Reservations(tuple(found), refused)


def _reservation(line: str) -> Reservation:
    """Parse one line; without CoreIDs the reservation has whole nodes (measured)."""
    if not line.startswith("ReservationName="):
        raise ValueError("no line of a reservation")
    fields = dict(reversed(_PAIR.findall(line)))
    nodes, tres = fields.get("Nodes", ""), fields.get("TRES", "")
    return Reservation(
        fields["ReservationName"],
        _seconds(fields.get("StartTime", "Unknown")),
        _seconds(fields.get("EndTime", "Unknown")),
        () if nodes in _NONE else expand_hostlist(nodes),
        whole="CoreIDs" not in fields,
        gpus=tres_gpus(parse_tres(tres)),
    )


def _seconds(text: str) -> float | None:
    moment = parse_time(text)
    return None if moment is None else float(moment)


def parse_topology(text: str) -> Topology:
    """Parse the leaf switches and blocks of `scontrol show topology`, or of a topology.conf; skip anything else.

    A switch that has switches below it is no leaf. A node in two leaves or two blocks (several topologies, 25.05) is
    left out, because it is unknown which counts.
    """
    groups: dict[str, dict[str, str]] = {"switch": {}, "nvlink_domain": {}}
    doubtful: set[tuple[str, str]] = set()
    refused = 0
    for line in text.split("\n"):
        fields = {key.lower(): value for key, value in reversed(_PAIR.findall(line.partition("#")[0]))}
        level = "switch" if "switchname" in fields else "nvlink_domain" if "blockname" in fields else ""
        try:
            names = expand_hostlist(fields.get("nodes", "")) if level else ()
        except ValueError:
            refused += 1
            continue
        if "nodes" in fields and fields.get("level", "0") == "0":
            for name in names:
                group = fields["switchname" if level == "switch" else "blockname"]
                if groups[level].setdefault(name, group) != group:
                    doubtful.add((level, name))
    for level, name in doubtful:
        del groups[level][name]
    return Topology({level: names for level, names in groups.items() if names}, refused)


_STATES = "PD,R,S,CG,CF,RQ,RH,SE,SI,SO,ST,NF,PR,BF"
"""All states but those of jobs that ended by themselves; 22.05 lists those all the same."""
SQUEUE = ("--local", "-a", "-t", _STATES, "--json")
_LEAST_TIMEOUT = 30.0
"""Seconds; a table of 10,000 jobs takes longer than one job."""


class SlurmCluster:
    """The `ClusterSource` of a Slurm cluster."""

    name = "slurm"

    def __init__(self, run: Callable[..., str], *, refresh_seconds: float) -> None:
        """`run` returns a command's output, as `Commands.output` in schedulers.slurm.client."""
        self._run = run
        self._no_job = False
        """Whether squeue's last list was empty."""
        self._held = 0
        """GPUs that were allocated after that."""
        hourly = max(2, round(3600 / refresh_seconds))
        self.questions = (
            Question("jobs", 1, 1, self._jobs),
            Question("nodes", 2, 2, self._nodes),
            Question(
                "reservations",
                2,
                1,
                lambda: parse_reservations(self._ask("scontrol", "-a", "-o", "show", "reservation")),
            ),
            Question("topology", hourly, 1, lambda: parse_topology(self._ask("scontrol", "show", "topology"))),
        )

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _jobs(self) -> Jobs:
        jobs = parse_jobs(self._ask("squeue", *SQUEUE))
        self._no_job = not jobs.runs and not jobs.refused
        if self._no_job and self._held:
            # To others than operators it prints an empty list, with exit status 0; sinfo fails if nodes are private.
            raise ValueError(
                f"squeue lists no job, but {self._held} GPUs are allocated: with PrivateData=jobs in slurm.conf this"
                " user must be an operator (sacctmgr add user NAME account=root adminlevel=operator) or SlurmUser"
            )
        return jobs

    def _nodes(self) -> Nodes:
        nodes = parse_nodes(self._ask("sinfo", *SINFO))
        self._held = sum(sum(node.used.values()) for node in nodes.nodes) if self._no_job else 0
        return nodes

    def _ask(self, *arguments: str) -> str:
        try:
            return self._run(*arguments)
        except SlurmUnavailableError as err:
            raise ClusterUnavailableError(str(err)) from err


def open_slurm(config: Any) -> SlurmCluster:
    """Open with the commands configured in `config.slurm`."""
    slurm = config.slurm
    commands = Commands(bin_dir=slurm.bin_dir, conf=slurm.conf, timeout=max(_LEAST_TIMEOUT, slurm.timeout_seconds))
    return SlurmCluster(commands.output, refresh_seconds=config.cluster.refresh_seconds)
