r"""What Slurm's commands print about jobs and nodes, as values; JSON is in `parsing_json`.

Owns the text of `scontrol show job` and `sinfo`, times and durations. Refuses half of anything: ValueError, or the
whole value.

A job's name, comment and paths are its user's own and may hold line breaks, so text can look as if it were somebody
else's (`-J $'a\n   UserId=root(0)'`). A line is believed only where it is the one and only of its kind; what comes
from several lines of one kind is refused as ambiguous.
"""

import calendar
import re
import time
from collections.abc import Iterable, Mapping

from msgspec import Struct

from exporter.schedulers.slurm.gres import Gres, parse_asked, parse_count, parse_gres, parse_tres
from exporter.schedulers.slurm.hostlist import expand_hostlist
from exporter.schedulers.slurm.jobs import LONGEST, Job, count, on_gpus

_HEAD = re.compile(r"JobId=(\d{1,10})((?: (?:Array|Het)\w+=\S+)*) JobName=(.*)")
_USER = re.compile(r"   UserId=([^\s()]+)\((\d{1,10})\) GroupId=.*")
_FACTS = re.compile(r"([A-Z][A-Za-z/]*)=(\S*)")
_TIME = "%Y-%m-%dT%H:%M:%S"
_DURATION = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d\d)")
_ONCE = ("UserId", "Priority", "JobState", "Requeue", "RunTime", "StartTime", "Partition", "NodeList", "NumNodes")
"""Kinds of lines that each job has exactly once, in every version and state."""
_NEEDED = frozenset(
    {"Account", "QOS", "JobState", "BatchFlag", "Restarts", "TimeLimit", "StartTime", "Partition", "NodeList"}
)


def parse_job_text(text: str, job_id: str) -> Job:
    """Give job `job_id` out of what `scontrol show job ID` printed with TZ=UTC, with or without -d.

    An array's or a heterogeneous job's leader is printed with all its other parts. Raises ValueError, also where
    the text could be another's words: see above.
    """
    if not text.endswith("\n\n"):
        raise ValueError("the text is cut off")
    blocks = _blocks(text.split("\n"))
    found = [block for block in blocks if block[0].startswith(f"JobId={job_id} ")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} jobs of that number in the text")
    if len(blocks) > 1:
        _check_alike(blocks)
    return _job(found[0])


def parse_duration(text: str) -> float | None:
    """Seconds of `[days-]hours:minutes:seconds`; None for UNLIMITED and its like. Raises ValueError."""
    if text in {"UNLIMITED", "INVALID", "Partition_Limit", "N/A", "NONE"}:
        return None
    match = _DURATION.fullmatch(text)
    if not match or not text.isascii():
        raise ValueError(f"no duration: {text[:40]!r}")
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_time(text: str) -> int | None:
    """Unix seconds of `2026-11-21T09:36:41` in UTC; None for Unknown and its like. Raises ValueError."""
    if text in {"Unknown", "None", "N/A", "(null)"}:
        return None
    return calendar.timegm(time.strptime(text, _TIME))


# -- text --


def _blocks(lines: list[str]) -> list[list[str]]:
    """One list of lines a job; each begins with JobId= and has its UserId= where scontrol puts it."""
    starts = [place for place, line in enumerate(lines) if line.startswith("JobId=")]
    if starts[:1] != [0]:
        raise ValueError("it does not begin with JobId=")
    blocks = [lines[begin:end] for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    for block in blocks:
        place = 2 if len(block) > 1 and block[1].startswith("   HetJobIdSet=") else 1
        if len(block) <= place or not _USER.fullmatch(block[place]):
            raise ValueError("ambiguous: a name with line breaks, or no UserId after it")
    return blocks


def _check_alike(blocks: list[list[str]]) -> None:
    """Parts of one array or heterogeneous job are one user's, on one account: else somebody may be imitated."""
    if not all(re.match(r"JobId=\d+ (Array|Het)JobId=", block[0]) for block in blocks):
        raise ValueError("ambiguous: several jobs where one was asked for")
    for kind, pattern in (("UserId", r"UserId=\S+"), ("Priority", r" Account=\S* QOS=\S*")):
        said = {match[0] for b in blocks for match in [re.search(pattern, _line(b, kind))] if match}
        if len(said) != 1:
            raise ValueError(f"ambiguous: several jobs that differ in {kind} where one was asked for")


def _line(block: list[str], kind: str) -> str:
    """Give the one line of that kind, without its indent."""
    found = [line for line in block if line.startswith(f"   {kind}=")]
    if len(found) != 1:
        raise ValueError(f"ambiguous or cut off: {len(found)} lines of {kind}=")
    return found[0].strip()


def _first(block: list[str], kind: str) -> str:
    """Give what the first line of that kind says, or nothing."""
    prefix = f"   {kind}="
    return next((line[len(prefix) :].strip() for line in block if line.startswith(prefix)), "")


def _only(block: list[str], kind: str) -> str:
    """Give what the only line of that kind says; nothing where there are several, for a comment comes before it."""
    said = [line for line in block if line.startswith(f"   {kind}=")]
    return said[0].partition("=")[2].strip() if len(said) == 1 else ""


def _job(block: list[str]) -> Job:
    head, user = _HEAD.fullmatch(block[0]), _USER.fullmatch("   " + _line(block, "UserId"))
    if not head or not user:
        raise ValueError("its first lines are no job's")
    lines = " ".join(_line(block, kind) for kind in _ONCE[1:])
    facts = {key: "" if value == "(null)" else value for key, value in reversed(_FACTS.findall(lines))}
    parts = dict(_FACTS.findall(head[2]))
    missing = _NEEDED - facts.keys()
    if missing:
        raise ValueError(f"cut off: no {', '.join(sorted(missing))}")
    nodes = parse_count(facts["NumNodes"].partition("-")[0])
    asked = {each: parse_asked(_only(block, f"TresPer{each}")) for each in ("Job", "Node", "Task", "Socket")}
    given = _given(block)
    tres = parse_tres(_first(block, "AllocTRES") or _first(block, "TRES"))
    gpus, here = count(asked, tres, given, nodes=nodes, tasks=_tasks(facts))
    return Job(
        head[1],
        (facts["JobState"],),
        user=user[1],
        uid=int(user[2]),
        account=facts["Account"],
        partition=facts["Partition"],
        qos=facts["QOS"],
        name=head[3][:LONGEST],
        comment=_first(block, "Comment")[:LONGEST],
        command=_null(_first(block, "Command")),
        array_id=parts.get("ArrayJobId", ""),
        het_id=parts.get("HetJobId", ""),
        batch=facts["BatchFlag"] != "0",
        nodes=nodes,
        hosts=facts["NodeList"],
        start=parse_time(facts["StartTime"]),
        time_limit_seconds=parse_duration(facts["TimeLimit"]),
        restarts=int(facts["Restarts"]),
        gpus=gpus,
        gpus_here=here,
        on_gpus=on_gpus(asked, tres, given),
        given=given,
    )


def _null(text: str) -> str:
    return "" if text == "(null)" else text


def _tasks(facts: Mapping[str, str]) -> int | None:
    return parse_count(facts["NumTasks"].partition("-")[0]) if "NumTasks" in facts else None


def _given(block: list[str]) -> Mapping[str, tuple[Gres, ...]] | None:
    """Read the lines by node that -d puts after JOB_GRES=; those are before anything a user may write."""
    begin = next((place for place, line in enumerate(block) if line.startswith("   JOB_GRES=")), None)
    if begin is None:
        return None
    given: dict[str, tuple[Gres, ...]] = {}
    for line in block[begin + 1 :]:
        if not line.startswith("     Nodes="):
            break
        hosts, _, rest = line.strip().removeprefix("Nodes=").partition(" ")
        given |= dict.fromkeys(expand_hostlist(hosts), parse_gres(rest.rpartition("GRES=")[2]))
    return given


# -- columns --

COLUMNS = (
    "JobID", "State", "UserName", "UserID", "Account", "Partition", "QOS", "BatchFlag", "NumNodes", "NodeList",
    "StartTime", "TimeLimit", "RestartCnt", "ArrayJobID", "HetJobID", "tres-per-job", "tres-per-node", "tres-per-task",
    "tres-alloc", "NumTasks",
)  # fmt: skip
"""Of `squeue -O`: none that a user may write as they like."""


def parse_job_columns(text: str, job_id: str) -> Job:
    """Give job `job_id` out of the lines of COLUMNS, each followed by `|`; raises ValueError."""
    rows = [line.split("|")[:-1] for line in text.splitlines()]
    found = [row for row in rows if row[:1] == [job_id]]
    if len(found) != 1 or len(found[0]) != len(COLUMNS):
        raise ValueError(f"{len(found)} lines of job {job_id}, or not {len(COLUMNS)} columns: {text[:80]!r}")
    said = {name: "" if cell in {"(null)", "N/A"} else cell for name, cell in zip(COLUMNS, found[0], strict=True)}
    nodes = parse_count(said["NumNodes"])
    asked = {each: parse_asked(said.get(f"tres-per-{each.lower()}", "")) for each in ("Job", "Node", "Task", "Socket")}
    tres = parse_tres(said["tres-alloc"])
    gpus, here = count(asked, tres, None, nodes=nodes, tasks=parse_count(said["NumTasks"] or "1"))
    return Job(
        job_id,
        (said["State"],),
        user=said["UserName"],
        uid=int(said["UserID"]),
        account=said["Account"],
        partition=said["Partition"],
        qos=said["QOS"],
        array_id=said["ArrayJobID"] if said["ArrayJobID"] != job_id else "",
        het_id=said["HetJobID"],
        batch=said["BatchFlag"] != "0",
        nodes=nodes,
        hosts=said["NodeList"],
        start=parse_time(said["StartTime"] or "N/A"),
        time_limit_seconds=parse_duration(said["TimeLimit"] or "N/A"),
        restarts=int(said["RestartCnt"] or 0),
        gpus=gpus,
        gpus_here=here,
        on_gpus=on_gpus(asked, tres, None),
    )


# -- nodes --


class NodeState(Struct, frozen=True):
    """A node as sinfo tells it."""

    name: str
    condition: str
    """One of the schedulers' CONDITIONS; empty: it takes new work."""
    state: str
    """As Slurm says it."""
    reason: str = ""


_CONDITIONS = (
    # The first that fits; the worse first. Long forms of sinfo(1), NODE STATE CODES, as words or as JSON's flags.
    (("down", "fail", "failed", "error", "future", "inval", "unknown", "not_responding", "reboot_issued", "rebooting",
      "powered_down", "powering_down", "powering_up", "power_down", "power_up", "powered_off", "no_respond"), "down"),
    (("maint", "maintenance"), "maintenance"),
    (("draining", "failing", "reboot", "reboot_requested", "power_drain"), "draining"),
    (("drained",), "drained"),
    (("reserved",), "reserved"),
    (("planned",), "planned"),
)  # fmt: skip
_SUFFIXES = {"*": "down", "~": "down", "#": "down", "%": "down", "^": "down", "$": "maintenance", "!": "draining",
             "@": "draining", "-": "planned", "+": ""}  # fmt: skip
_AT_WORK = frozenset({"allocated", "mixed", "completing"})


def parse_node_states(text: str) -> tuple[NodeState, ...]:
    """Each line `name|state|reason|` of `sinfo -h -N -O 'NodeList:|,StateLong:|,Reason:|'`; raises ValueError."""
    lines = [line.split("|", 2) for line in text.splitlines() if line.strip()]
    if not all(len(line) == 3 and line[0] and line[1] for line in lines):  # noqa: PLR2004  name, state, reason
        raise ValueError(f"no lines of name|state|reason: {text[:80]!r}")
    return tuple(
        NodeState(name, condition([state]), state, "" if reason.strip("|") == "none" else reason.strip("|"))
        for name, state, reason in lines
    )


def condition(states: Iterable[str]) -> str:
    """Why nothing new may be placed on a node in these states: sinfo's one word, or JSON's state and flags."""
    said = [state.lower() for state in states if state]
    words = {word for state in said for word in state.rstrip("*~#!%$@^-+").split("+")}
    if "drain" in words:
        words.add("draining" if words & _AT_WORK else "drained")
    suffixed = {_SUFFIXES[char] for state in said for char in state[len(state.rstrip("*~#!%$@^-+")) :]}
    found = [name for names, name in _CONDITIONS if not words.isdisjoint(names) or name in suffixed]
    return found[0] if found else ""
