"""What happened, as marks on the curves: alerts, jobs that begin and end, exporters that restart, Xid errors; and logs.

Owns which board marks what. A board of the whole fleet marks its largest jobs, and how many exporters restart and GPUs
fail at a time: thousands of jobs and nodes would cover its curves. All of these are asked for only once switched on.
"""

from msgspec.structs import replace

from dashboards import words
from dashboards.parts import Board, Link, Mark, Variable
from dashboards.series import ITS_NODES, THIS_JOB, THIS_NODE, at

_OURS, _FIRING = 'pack="gpu-efficiency"', 'alertstate="firing"'
_PAGES = Mark(
    name="Pages", colour=words.BAD, title="{{alertname}}", text="job {{job_id}} {{node}} {{instance}} {{user}}",
    expr=at("ALERTS", _OURS, _FIRING, 'severity="page"'),
)  # fmt: skip
_TICKETS = Mark(
    name="Tickets", colour=words.WATCH, title="{{alertname}}", text="job {{job_id}} {{node}} {{instance}} {{user}}",
    expr=at("ALERTS", _OURS, _FIRING, 'severity!="page"'), shown=False,
)  # fmt: skip


def _alerts(where: str) -> Mark:
    return replace(_PAGES, name="Alerts", expr=at("ALERTS", _OURS, _FIRING, where))


def _events(nodes: str, of_jobs: str) -> tuple[Mark, ...]:
    """Of the chosen nodes, and of their jobs or the one that is chosen."""
    job = at("gpu_efficiency_job_paid_seconds_total", nodes, *filter(None, [of_jobs]))
    began = at("gpu_efficiency_job_start_timestamp_seconds", nodes, *filter(None, [of_jobs]))
    return (
        Mark(
            name="Job starts", colour=words.GOOD, title="job {{job_id}} starts", at_value=True,
            expr=f"1000 * min by (cluster, job_id) ({began})",
        ),
        Mark(
            name="Job ends", colour=words.EXPECTED, title="job {{job_id}} ends",
            expr=f"sum by (cluster, job_id) ({job} offset 2m) unless on (cluster, job_id) {job}",
        ),
        Mark(
            name="Exporter restarts", colour=words.UNKNOWN, title="exporter restarts", text="{{instance}}",
            at_value=True, expr=f"1000 * ({at('process_start_time_seconds', nodes)}"
            f" and on (cluster, instance, job) {at('gpu_efficiency_build_info', nodes)})",
        ),
        Mark(
            name="Xid", colour=words.STATES["unavailable"], title="Xid on GPU {{gpu}}", text="{{instance}}",
            expr=f"changes({at('gpu_efficiency_xid_errors_total', nodes)}[2m]) > 0",
        ),
    )  # fmt: skip


_BEFORE = " offset 5m"


def _large(when: str = "") -> str:
    """Jobs with more than a twentieth of the GPUs of their cluster."""
    owned = f"0.05 * {at('cluster:gpu_efficiency_owned:gpus')}{when}"
    return f"{at('job:gpu_efficiency_gpus')}{when} > on (cluster) group_left () ({owned})"


def _number(label: str, expr: str) -> str:
    """How many series there are in each cluster, as a label: the text of a mark has labels alone."""
    return f'count_values by (cluster) ("{label}", count by (cluster) ({expr}))'


_JOBS, _CODE = at("job:gpu_efficiency_gpus"), at("gpu_efficiency_last_xid")
_OF_ONE = "on (cluster, instance, uuid)"
_OF_FLEET = (
    _PAGES,
    _TICKETS,
    Mark(
        name="Large jobs start", colour=words.GOOD, title="job {{job_id}} starts", text="{{cluster}}",
        expr=f"({_large()}) unless on (cluster, job_id) {_JOBS}{_BEFORE}", shown=False, step="5m",
    ),
    Mark(
        name="Large jobs end", colour=words.EXPECTED, title="job {{job_id}} ends", text="{{cluster}}",
        expr=f"({_large(_BEFORE)}) unless on (cluster, job_id) {_JOBS}", shown=False, step="5m",
    ),
    Mark(
        name="Exporters restart", colour=words.UNKNOWN, title="exporters restart: {{exporters}}", text="{{cluster}}",
        expr=_number(
            "exporters",
            f"changes({at('process_start_time_seconds')}[5m]) > 0"
            f" and on (cluster, instance, job) {at('gpu_efficiency_build_info')}",
        ),
        shown=False, step="5m",
    ),
    Mark(
        name="Xid errors", colour=words.STATES["unavailable"], title="GPUs with a new Xid: {{gpus}}",
        text="{{cluster}}",
        # Only GPUs that had one have a last: the counters are as many as there are GPUs.
        expr=_number(
            "gpus",
            f"{_CODE} unless {_OF_ONE} last_over_time({_CODE}[1h]{_BEFORE}) or changes({_CODE}[5m]) > 0",
        ),
        shown=False, step="5m",
    ),
)  # fmt: skip
_OF_BOARD = {
    "node": (_alerts(THIS_NODE), *_events(THIS_NODE, "")),
    "job": (_alerts(THIS_JOB), *_events(ITS_NODES, THIS_JOB)),
    "zombies": (_PAGES, _TICKETS, *_events(ITS_NODES, THIS_JOB)),
}


_LOGS = Variable(
    name="logs", label="Logs", text=True, default="/explore",
    says="Address that the link Logs opens, such as a dashboard of Loki; time range and variables are added to it.",
)  # fmt: skip
_TO_LOGS = Link("Logs", "${logs:raw}")
_WITH_LOGS = frozenset({"job", "node", "zombies", "quality"})


def with_marks(board: Board) -> Board:
    """The board with what it marks, and where it is about nodes or jobs, with the link to their logs."""
    board = replace(board, marks=_OF_BOARD.get(board.name, _OF_FLEET))
    if board.name not in _WITH_LOGS:
        return board
    return replace(board, links=(_TO_LOGS,), variables=(*board.variables, _LOGS))
