"""For the person on call: whom to call, since when, what it costs, and which rank is the culprit."""

import yaml

from dashboards import words
from dashboards.owners import whose, whose_columns
from dashboards.parts import Board, Column, Figure, Lines, Link, Panel, Query, Row, Table, Timeline, Variable
from dashboards.series import (
    ALERTS,
    CLICKED,
    CLUSTER,
    IN_TROUBLE_SINCE,
    JOB,
    JOB_INSTANCES,
    THIS_JOB,
    THIS_NODE,
    TO_NODE,
    at,
    culprits,
    field,
    hours,
    part,
    to,
    total,
)

_STATE = "job_state:gpu_efficiency_gpus"
_HUNG, _ZOMBIE = 'state="hung"', 'state="zombie"'
_SUSPECTED = at("job:gpu_efficiency_hang_suspected:gpus")
_INFO = at("job:gpu_efficiency_info")
_OWNER = f"* on (cluster, job_id) group_left (name, user, team, account) {_INFO}"
_EXEMPT = at("job:gpu_efficiency_exempt")
_OWNED = at("cluster:gpu_efficiency_owned:gpus")
_SEEN = at(part("cluster", "observed"))
_TROUBLE = (
    f"sum by (cluster, job_id) (max by (cluster, job_id) ({at(_STATE, _HUNG)} or {_SUSPECTED})"
    f" or {at(_STATE, _ZOMBIE)})"
)
"""GPUs of each job that hang, are suspected to, or are zombies. Of those that hang some are suspected, too."""
_ONLY_SUSPECTED = f"({_SUSPECTED} unless on (cluster, job_id) {at(_STATE, _HUNG)})"
_COST = (
    f"{_TROUBLE} / on (cluster, job_id) {at('job:gpu_efficiency_gpus')}"
    f" * on (cluster, job_id) group_right () {at('job:gpu_efficiency_price:per_hour')}"
)
_OUT = 'state=~"unowned|unavailable"'
_HANGS, _GONE = 'leak="hung"', 'leak="unavailable"'
_LEAK_COST = "cluster_leak:gpu_efficiency_cost:per_hour"
_IDLE_COST = "cluster:gpu_efficiency_cost_idle:per_hour"
_LOOK = to("zombies", "Look for yourself, below", job_id=CLICKED)
_TEAM = to("chargeback", "The team", team=CLICKED)
_RUNBOOKS = Variable(
    name="runbooks", label="Runbooks", text=True,
    says="Address of your copy of docs/runbooks of the exporter: the link of a runbook opens NAME.md below it. Without"
    " one there are no such links.",
)  # fmt: skip
_TO_RUNBOOK = Link("The runbook", "${runbooks:raw}/${__value.raw}.md")
_WORN = {
    "hung": ((None, words.QUIET), (1, words.BAD)),
    "suspected": ((None, words.QUIET), (1, words.WATCH)),
    "zombie": ((None, words.QUIET), (1, words.BAD)),
}  # fmt: skip
_ITS_BOARD = to("job", "The job's board", job_id=field("job_id"))


def _to_runbook(alert: str, expr: str) -> str:
    """The series with the name of its runbook, after the label `alert`; without it while no address is set."""
    address = f'label_replace({expr}, "runbook", "${{runbooks:raw}}", "", "")'
    both = f'label_join({address}, "runbook", " ", "runbook", "{alert}")'
    return (
        f'label_replace(label_replace({both}, "runbook", "$1", "runbook", ".+ (.*)"), "runbook", "", "runbook", " .*")'
    )


def _in_trouble(expr: str) -> str:
    return f"{expr} and on (cluster, job_id) {_TROUBLE}"


def _or_zero(expr: str) -> str:
    """Zero only where something of the fleet is seen."""
    return f"{expr} or 0 * (sum({_SEEN}) > 0)"


def _named() -> str:
    """Names of the alerts on jobs and on GPUs, as a regular expression."""
    groups = (
        group
        for file in ("gpus.yaml", "jobs.yaml")
        for group in yaml.safe_load((ALERTS / file).read_text(encoding="utf-8"))["groups"]
    )
    return "|".join(rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule)


_NAMES = f'alertname=~"{_named()}"'
_FIRING = at("ALERTS", _NAMES, 'alertstate="firing"')
_SEVERITY = {str(weight): severity for weight, severity in enumerate(tuple(words.SEVERITIES)[::-1], 1)}
"""What sorts alerts: a page is 3."""
_WEIGHT = " or ".join(
    f'label_replace(vector({weight}), "severity", "{severity}", "", "")' for weight, severity in _SEVERITY.items()
)
_ALERTS = _to_runbook(
    "alertname",
    "max by (cluster, severity, alertname, job_id, user, team, node, reason, layer) (("
    f"{_FIRING} * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info')}"
    f" or on (cluster, alertname, instance, job_id) {_FIRING}) * on (severity) group_left () ({_WEIGHT}))",
)
_SAME_ALERT = "cluster, severity, alertname, user, team, runbook"

_FOR, _SINCE = f"time() - {IN_TROUBLE_SINCE}", f"1000 * {IN_TROUBLE_SINCE}"
"""Seconds for which a job has been spinning, or without work; and since when, as Grafana reads a moment."""
_CLOCK = "time:MM-DD HH:mm"
"""Grafana's unit of a moment: at night the hour counts, not the year."""
_WORST = f"topk(1, {_COST} unless on (cluster, job_id) {_EXEMPT})"
_WITH_RANK = 'rank!=""'
_BY_NCCL = f'label_replace({at("gpu_efficiency_job_hang_culprit")}, "node", "$1", "host", "(.*)")'
_WHICH_RANK = (
    f"topk by (cluster, job_id) (1, max by (cluster, job_id, node, gpu, rank) ({culprits(_WITH_RANK)}"
    f" or on (cluster, job_id) {_BY_NCCL} or on (cluster, job_id) {culprits()}))"
)
"""The GPU that does not spin; where its rank is not known, what NCCL or PyTorch say of the rank that is waited for."""
_DO_FIRST = {
    "GPUEfficiencyJobDeadlocked": "py-spy dump on the culprit, then restart the job",
    "GPUEfficiencyGPUZombie": "ask the owner, then cancel the job",
}


def _with_runbook() -> str:
    """GPUs in trouble of the worst job, with its owner and the page that says what to do."""
    owned = whose(f"{_TROUBLE} {_OWNER} and on (cluster, job_id) {_WORST}")
    hangs = f"({at(_STATE, _HUNG)} or {_SUSPECTED})"
    hung, at_rest = (
        _to_runbook("do", f'label_replace({which}, "do", "{alert}", "", "")')
        for which, alert in (
            (f"{owned} and on (cluster, job_id) {hangs}", "GPUEfficiencyJobDeadlocked"),
            (owned, "GPUEfficiencyGPUZombie"),
        )
    )
    return f"{hung} or on (cluster, job_id) {at_rest}"


_FIGURES = (
    Panel(
        title="The worst now: call its owner",
        kind=Table(
            (
                Column(of="job_id", title="Job", link=_LOOK, width=90),
                Column(of="user", title="Owner", width=75),
                Column(of="C", title="For", unit="s", decimals=1, width=80),
                Column(of="B", title="An hour", unit="short", decimals=2, width=70),
                Column(of="D", title="So far", unit="short", decimals=2, width=70),
                Column(of="currency", title="In", width=50),
                Column(of="A", title="GPUs", unit="none", decimals=0, width=55),
                Column(of="node", title="Culprit on", link=TO_NODE),
                Column(of="gpu", title="its GPU", width=65),
                Column(of="rank", title="its rank", width=70),
                Column(of="do", title="Do first", texts=_DO_FIRST, width=230, wrapped=True),
                *whose_columns("Owner's team"),
                Column(of="F", title="Since", unit=_CLOCK, width=100),
                Column(of="runbook", title="Runbook", link=_TO_RUNBOOK, width=120),
            )
        ),
        shows="The job whose hung, suspected and zombie GPUs cost most an hour: whose it is, how many GPUs, since when"
        " and for how long (spinning, or without work), what that has cost until now, and in a hang the rank that does"
        " not spin itself. Exempt jobs are left out.",
        bad="a row",
        do="call the owner, and where nobody answers the platform team, which can cancel the job; follow the runbook;"
        " click on the job to see its signals below",
        queries=(
            Query(_with_runbook()),
            Query(_WORST),
            Query(f"{_FOR} and on (cluster, job_id) {_WORST}"),
            Query(f"{_WORST} * on (cluster, job_id) group_left () max by (cluster, job_id) ({_FOR}) / 3600"),
            Query(f"{_WHICH_RANK} and on (cluster, job_id) {_WORST}"),
            Query(f"{_SINCE} and on (cluster, job_id) {_WORST}"),
        ),
        unit="none",
        width=24,
        height=4,
        empty="of what is seen no job hangs, and none is a zombie",
        fills="deadlock",
    ),
    Panel(
        title="GPUs in trouble now",
        kind=Figure(steps=((None, words.QUIET), (1, words.BAD)), named=True),
        shows="Hung: spin without progress, proven; suspected: spin, not proven yet; zombie: held and at rest for"
        " longer than their class may; no process: held, and nothing runs on them.",
        bad="any of them for longer than it takes to call somebody",
        do="call the owners in the table below, dearest first",
        queries=(
            Query(_or_zero(f"sum({at(_STATE, _HUNG)})"), legend="hung"),
            Query(_or_zero(f"sum({_ONLY_SUSPECTED})"), legend="suspected"),
            Query(_or_zero(f"sum({at(_STATE, _ZOMBIE)})"), legend="zombie"),
            Query(_or_zero(f"sum({at('job:gpu_efficiency_no_process:gpus')})"), legend="no process"),
        ),
        unit="none",
        decimals=0,
        width=13,
        height=4,
        empty="no exporter heard",
    ),
    Panel(
        title="Leaked, out of service, or not seen now",
        kind=Figure(steps=((None, words.QUIET), (1, words.BAD)), named=True),
        shows="Leaked: nobody holds them and something computes; out of service: cannot be used; not seen: nobody"
        " knows, they may be any of these or in trouble.",
        bad="any of them for longer than it takes to call somebody",
        do="see the node under Leaked processes, below; for what is not seen the board Data quality",
        queries=(
            Query(_or_zero(f"sum({at('cluster:gpu_efficiency_unowned:gpus')})"), legend="leaked"),
            Query(_or_zero(f"sum({at('cluster_reason:gpu_efficiency_unavailable:gpus')})"), legend="out of service"),
            Query(f"clamp_min(sum({_OWNED}) - (sum({_SEEN}) or 0 * sum({_OWNED})), 0)", legend="not seen"),
        ),
        unit="none",
        decimals=0,
        width=11,
        height=4,
        empty="no exporter heard",
    ),
    Panel(
        title="Lost an hour, now",
        kind=Figure(steps=((None, words.BAD),), named=True),
        shows="Price of the GPUs that hang, are suspected to, or are zombies, at this moment. Exempt jobs are left"
        " out.",
        bad="any",
        do="call the owner of the dearest row below",
        queries=(
            Query(
                f"sum by (currency) ({_COST} unless on (cluster, job_id) {_EXEMPT})",
                legend="hung, suspected and zombie, {{currency}}",
            ),
        ),
        decimals=2,
        width=7,
        height=4,
        empty="none seen",
        fills="deadlock",
    ),
    Panel(
        title="Lost over the time shown",
        kind=Figure(steps=((None, words.BAD),), named=True),
        shows="What hung GPUs have cost over the time shown, and GPUs that were held and did nothing (zombies, and"
        " servers nobody asked). A zombie counts from when it was found; its rest before is an unattributed stall."
        " Exempt jobs count here. Recorded every four minutes: the last minutes are not in it yet.",
        bad="more than a person's wage for the same time",
        do="the larger of the two first: hangs need watchdogs, idle GPUs need time limits",
        queries=(
            Query(hours(_LEAK_COST, _HANGS, by="currency"), legend="hung, {{currency}}"),
            Query(hours(_IDLE_COST, by="currency"), legend="held and idle, {{currency}}"),
        ),
        decimals=0,
        width=7,
        height=4,
        empty="none seen",
        fills="deadlock",
    ),
    Panel(
        title="Time to detect, and the longest hang now",
        kind=Figure(steps=((None, words.EXPECTED),), named=True),
        shows="From the first sign of a hang or of rest until it was called so, means over the time shown; and for how"
        " long the job that has hung longest has been spinning at this moment.",
        bad="more than 6 minutes to detect a hang; more than 30 minutes in one",
        do="page somebody on GPUEfficiencyJobDeadlocked; set a timeout for collectives, so that a job ends by itself",
        queries=(
            Query(
                f"{total('cluster_state:gpu_efficiency_detection_seconds:rate5m', by='state')}"
                f" / ({total('cluster_state:gpu_efficiency_detections:rate5m', by='state')} > 0)",
                legend="detect {{state}}",
            ),
            Query(
                f"max({_FOR} and on (cluster, job_id) {at(_STATE, _HUNG)} > 0)",
                legend="longest hang now",
            ),
        ),
        unit="s",
        decimals=1,
        width=10,
        height=4,
        empty="none found",
        fills="deadlock",
    ),
)

_CALL = Row(
    "Who to call",
    (
        *_FIGURES,
        Panel(
            title="Jobs that hang, and jobs that hold GPUs for nothing",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=_LOOK, width=105),
                    Column(of="user", title="Owner", width=85),
                    *whose_columns("Owner's team"),
                    Column(of="C", title="Hung", unit="none", decimals=0, width=60, steps=_WORN["hung"]),
                    Column(of="D", title="Suspected", unit="none", decimals=0, width=90, steps=_WORN["suspected"]),
                    Column(of="E", title="Zombie", unit="none", decimals=0, width=70, steps=_WORN["zombie"]),
                    Column(of="K", title="Since", unit=_CLOCK, width=100),
                    Column(of="H", title="For", unit="s", decimals=1, width=80),
                    Column(of="B", title="An hour", unit="short", decimals=2, width=115, bar=words.BAD),
                    Column(of="currency", title="In", width=60),
                    Column(of="I", title="No useful work for", unit="s", decimals=1, width=140),
                    Column(of="F", title="No process", unit="none", decimals=0, width=90),
                    Column(of="G", title="Of GPUs", unit="none", decimals=0, width=75),
                    Column(of="exemption", title="Exempt by", width=110),
                    Column(of="name", title="Name", link=_ITS_BOARD),
                ),
                sort="B",
            ),
            shows="Every job with GPUs that hang, are suspected to, or are zombies: whose it is, how many of its"
            " GPUs, since when and for how long (spinning, or without work), how long ago any of its GPUs worked last,"
            " and what these GPUs cost an hour. Exempt: the operator has decided that it may.",
            bad="a row without an exemption",
            do="call the owner, dearest first; click on the job's number to look at its signals below, on its name for"
            " its own board",
            queries=(
                Query(whose(f"{_TROUBLE} {_OWNER}")),
                Query(_COST),
                Query(f"sum by (cluster, job_id) ({at(_STATE, _HUNG)})"),
                Query(f"sum by (cluster, job_id) ({_ONLY_SUSPECTED})"),
                Query(f"sum by (cluster, job_id) ({at(_STATE, _ZOMBIE)})"),
                Query(_in_trouble(f"sum by (cluster, job_id) ({at('job:gpu_efficiency_no_process:gpus')})")),
                Query(_in_trouble(f"sum by (cluster, job_id) ({at('job:gpu_efficiency_gpus')})")),
                Query(_in_trouble(_FOR)),
                Query(_in_trouble(f"time() - {at('job:gpu_efficiency_last_work:timestamp_seconds')}")),
                Query(_in_trouble(f"sum by (cluster, job_id, exemption) ({_EXEMPT})")),
                Query(_in_trouble(_SINCE)),
            ),
            unit="none",
            width=24,
            height=15,
            empty="of what is seen no job hangs, and none is a zombie",
            fills="deadlock",
        ),
        Panel(
            title="Firing alerts on jobs and GPUs",
            kind=Table(
                (
                    Column(
                        of="A",
                        title="Severity",
                        unit="none",
                        width=86,
                        texts=_SEVERITY,
                        words={weight: words.SEVERITIES[severity] for weight, severity in _SEVERITY.items()},
                    ),
                    Column(of="alertname", title="Alert", width=300),
                    Column(of="B", title="How many", unit="none", decimals=0, width=90),
                    Column(of="job_id", title="Job, or one of them", link=_LOOK, width=150),
                    Column(of="node", title="Node", link=TO_NODE, width=150),
                    Column(of="reason", title="Reason", width=110, ours=True),
                    Column(of="user", title="User", width=100),
                    Column(of="team", title="Team", link=_TEAM, width=110),
                    Column(of="runbook", title="Runbook", link=_TO_RUNBOOK),
                ),
                sort="A",
            ),
            shows="Alerts of the packs for jobs and GPUs that fire now, one line for all of the same kind of a user and"
            " team, and the runbook of each. Alerts on money and"
            " on the exporter itself are not among them.",
            bad="a page that nobody has taken; a ticket older than a day",
            do="what the runbook says; its first line is what to do first",
            queries=(
                Query(f"max by ({_SAME_ALERT}) ({_ALERTS})"),
                Query(f"count by ({_SAME_ALERT}) ({_ALERTS})"),
                Query(f"topk by ({_SAME_ALERT}) (1, {_ALERTS})"),
            ),
            unit="none",
            width=24,
            height=8,
            empty="nothing fires, or Prometheus does not evaluate alerts/gpus.yaml and alerts/jobs.yaml",
            fills="deadlock",
        ),
    ),
)

_OUT_NOW = (
    f"count by (cluster, node, state, reason) ({at('gpu_efficiency_state', _OUT)}"
    f" * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info')})"
)
_FIRST_SEEN = f"min_over_time(timestamp({at('gpu_efficiency_state', _OUT)})[$__range:1m])"
_FIRST_SEEN_AGO = (
    f"time() - min by (cluster, node, state, reason) ({_FIRST_SEEN}"
    f" * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info')})"
    f" and on (cluster, node, state, reason) {_OUT_NOW}"
)
_RANKS = Row(
    "Which rank, which GPU",
    (
        Panel(
            title="Culprits of hangs",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=_LOOK, width=90),
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="gpu", title="GPU", width=52),
                    Column(of="rank", title="Rank", width=60),
                )
            ),
            shows="In jobs with hung GPUs: those that do not spin themselves, so that the others wait for them. None"
            " for a job: all its ranks spin, think of the network.",
            bad="any row",
            do="dump the stacks of that rank (py-spy dump, or gdb), read its node's dmesg, restart from the checkpoint",
            queries=(Query(culprits()),),
            unit="none",
            width=8,
            height=8,
            empty="no hang with a culprit",
            fills="deadlock",
        ),
        Panel(
            title="Stragglers: slow ranks",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=_LOOK, width=85),
                    Column(of="node", title="Node", link=TO_NODE, width=110),
                    Column(of="gpu", title="GPU", width=52),
                    Column(of="rank", title="Rank", width=60),
                    Column(of="Value", title="Waited", unit="percentunit", decimals=0, width=85, bar=words.WATCH),
                ),
                sort="Value",
            ),
            shows="Stragglers: how much more of the time the other ranks wait than this one. In a job that is"
            " suspected to hang it is the likely culprit.",
            bad="more than 10 % for a quarter of an hour",
            do="compare clocks, heat and links of that GPU with its neighbours on the node's board; then ask the owner"
            " whether that rank has more work",
            queries=(Query(at("job_rank:gpu_efficiency_straggler")),),
            unit="none",
            width=9,
            height=8,
            empty="no straggler",
            fills="straggler",
        ),
        Panel(
            title="Leaked processes, and GPUs out of service",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="state", title="State", words=words.STATES, width=95),
                    Column(of="reason", title="Reason", width=110, ours=True),
                    Column(of="A", title="GPUs", unit="none", decimals=0, width=55),
                    Column(of="B", title="First seen ago", unit="s", decimals=1, width=130),
                ),
                sort="B",
            ),
            shows="Unowned: processes compute on GPUs that nobody holds. Unavailable: GPUs that cannot be used, by"
            " reason. First seen so within the time shown: it may have been well in between; the node's board has each"
            " GPU's own time.",
            bad="unowned; lost, missing, xid, recovery, reset_required; drained for days",
            do="unowned: find and kill the processes (runbook GPUEfficiencyGPUUnownedProcess); lost: drain, reset"
            " or repair (GPUEfficiencyGPULost)",
            queries=(
                Query(_OUT_NOW),
                Query(_FIRST_SEEN_AGO),
            ),
            unit="none",
            width=7,
            height=8,
            empty="of what is seen all is in service, and nothing has leaked",
            fills="lost_gpu",
        ),
        Panel(
            title="Money an hour",
            kind=Lines(
                stacked=True,
                colours={
                    "hung": words.LEAKS["hung"],
                    "held and idle": words.LEAKS["idle_allocation"],
                    "unavailable": words.LEAKS["unavailable"],
                },
            ),
            shows="What hung GPUs, GPUs that are held and do nothing, and GPUs out of service cost an hour, in the"
            " currency of the price table.",
            bad="a step that stays",
            do="choose the time in which it began; see who held the GPUs then",
            queries=(
                Query(_or_zero(f"sum({at(_LEAK_COST, _HANGS)})"), legend="hung"),
                Query(_or_zero(f"sum({at(_IDLE_COST)})"), legend="held and idle"),
                Query(_or_zero(f"sum({at(_LEAK_COST, _GONE)})"), legend="unavailable"),
            ),
            width=16,
            height=7,
            empty="nothing seen",
        ),
        Panel(
            title="GPUs newly found hung or zombie",
            kind=Lines(colours=words.STATES, steps=True),
            shows="GPUs that were found hung or zombie within the last five minutes, at each moment.",
            bad="more of them since a new image, driver or library",
            do="look in the changes of that day",
            queries=(
                Query(
                    f"300 * sum by (state) ({at('cluster_state:gpu_efficiency_detections:rate5m')})",
                    legend="{{state}}",
                ),
            ),
            unit="none",
            width=8,
            height=7,
            empty="no exporter heard",
        ),
    ),
)

# -- look for yourself --

_NODES = Variable(
    name="node", label="Its nodes", many=True, every=".*", says="Nodes of the job: choose some of a large job.",
    query='label_values(node:gpu_efficiency_info{cluster=~"$cluster", instance=~"$job_instances"}, node)',
)  # fmt: skip
_INSTANCE = Variable(
    name="instance", label="Instance", hidden=True, many=True, each=True,
    query='label_values(node:gpu_efficiency_info{cluster=~"$cluster", instance=~"$job_instances", node=~"$node"},'
    " instance)",
)  # fmt: skip
_HELD = at("gpu_efficiency_allocation_info", THIS_NODE, THIS_JOB)
_AT_MOST = 64
"""Lines that one can tell apart in a chart; of more GPUs the highest, the middle and the lowest are drawn."""
_FEW, _MANY = f"and on () (count({_HELD}) <= {_AT_MOST})", f"and on () (count({_HELD}) > {_AT_MOST})"
_THIS = "{{node}} GPU {{gpu}}{{of}}"
_CHOOSE = "click on a job above, or type its number at the top"
_OF_LINKS = 'leak="exposed_communication"'
_STATES = tuple(words.STATES)


def _of_job(expr: str) -> str:
    """Of the GPUs that the job holds, with their node and rank."""
    ranked = f'label_replace(max by (cluster, instance, uuid, rank) ({_HELD}), "of", ", rank $1", "rank", "(.+)")'
    return (
        f"({expr}) * on (cluster, instance, uuid) group_left (rank, of) {ranked}"
        f" * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info', THIS_NODE)}"
    )


def _curves(expr: str) -> tuple[Query, ...]:
    """Each GPU of a job that has few, else what lies at both ends and in the middle."""
    of_job = _of_job(expr)
    spread = (("highest", f"max({of_job})"), ("median", f"quantile(0.5, {of_job})"), ("lowest", f"min({of_job})"))
    return (
        Query(f"{of_job} {_FEW}", legend=_THIS),
        *(Query(f"{inner} {_MANY}", legend=name) for name, inner in spread),
    )


def _strip(title: str, *queries: Query, shows: str, bad: str, top: float | None = None, unit: str = "",
           dashed: tuple[str, ...] = (), height: int = 5) -> Panel:  # fmt: skip
    """One of the curves under one another: all as wide, with the same room for the axis."""
    return Panel(
        title=title, queries=queries, shows=shows, bad=bad,
        kind=Lines(axis=75, top=top, legend=False, dashed=dashed, colours=dict.fromkeys(dashed, words.QUIET)),
        do="compare with the curves above and below at the same moment", unit=unit, width=24, height=height,
        empty=_CHOOSE, fills="deadlock",
    )  # fmt: skip


def _numbered() -> str:
    """A state's number is its place among words.STATES."""
    return " or ".join(
        f"{number} * {at('gpu_efficiency_state', THIS_NODE, _chosen(state))}" for number, state in enumerate(_STATES, 1)
    )


def _chosen(state: str) -> str:
    return f'state="{state}"'


_SIGNS = {
    "engine_busy": "Engine busy",
    "tensor_rest": "No tensor",
    "dram_rest": "No DRAM",
    "fp_rest": "No FP",
    "nvlink_rest": "No NVLink",
    "pcie_rest": "No PCIe",
    "power_flat": "Power flat",
    "temperature_falling": "Cools",
}
_AGREES = {"1": "yes", "0": "no", "2": "not spinning"}
_FOR_A_HANG = {"1": words.STATES["hung"], "0": words.GOOD, "2": words.WATCH}
_WAITED_FOR, _STANDS_OUT = {"culprit": "the culprit"}, {"culprit": words.WATCH}
_CULPRITS = 'state="hung",reason="culprit"'
_BY = "cluster, node, gpu"


def _sign(name: str) -> str:
    chosen = f'sign="{name}"'
    does_not = f"2 * {_of_job(at('gpu_efficiency_state', THIS_NODE, _CULPRITS))}"
    return f"max by ({_BY}) ({_of_job(at('gpu_efficiency_hang_sign', THIS_NODE, chosen))} or {does_not})"


_LETTERS = "CDEFGHIJ"
_EYE = Row(
    "Look for yourself: the job $job_id",
    (
        Panel(
            title="Signs of a hang",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="gpu", title="GPU", width=52),
                    Column(of="rank", title="Rank", width=60),
                    Column(of="state", title="State", words=words.STATES, width=90),
                    Column(of="reason", title="Why", width=130, ours=True, texts=_WAITED_FOR, words=_STANDS_OUT),
                    Column(of="B", title="Agree", unit="percentunit", decimals=0, width=70),
                    *(
                        Column(of=letter, title=title, unit="none", width=98, texts=_AGREES, words=_FOR_A_HANG)
                        for letter, title in zip(_LETTERS, _SIGNS.values(), strict=True)
                    ),
                ),
                sort="gpu",
                rising=True,
            ),
            shows="Each GPU of the job; while it is suspected, the eight signs: yes speaks for a hang, no against it, -"
            " cannot be seen or is not asked for; not spinning: the culprit, for which the others wait, does not spin"
            " itself. Agree: the share of those seen.",
            bad="all yes on all GPUs but one: that one is the culprit",
            do="believe it only if the curves below say the same; then call the owner",
            queries=(
                Query(f"max by ({_BY}, rank, state, reason) ({_of_job(at('gpu_efficiency_state', THIS_NODE))})"),
                Query(f"max by ({_BY}) ({_of_job(at('gpu_efficiency_hang_confidence_ratio', THIS_NODE))})"),
                *(Query(_sign(name)) for name in _SIGNS),
            ),
            unit="none",
            width=24,
            height=10,
            empty=_CHOOSE,
            fills="deadlock",
        ),
        Panel(
            title="State",
            kind=Timeline(words=_STATES, colours=words.STATES),
            shows="The state of each GPU of the job. For more than 64 GPUs choose nodes at the top.",
            bad="one stripe that changes minutes before the others: there it began",
            do="compare with the curves below at the same moment",
            queries=(Query(f"max by ({_BY}, of) ({_of_job(_numbered())}) {_FEW}", legend=_THIS),),
            unit="none",
            width=24,
            height=6,
            empty=_CHOOSE,
            fills="deadlock",
        ),
    ),
)

_SIGNALS = Row(
    "Its signals, one under another: the job $job_id",
    (
        _strip(
            "Utilisation, as nvidia-smi shows it",
            *_curves(at("gpu_efficiency_driver_utilization_ratio", THIS_NODE)),
            shows="The driver's own utilisation, means of five minutes. In a hang it stays at 100 %: waiting kernels"
            " run.",
            bad="nothing by itself; 100 % while all below has fallen is a hang",
            top=1,
        ),
        _strip(
            "Power draw against the limit",
            *_curves(at("gpu_efficiency_power_watts", THIS_NODE)),
            Query(f"max({_of_job(at('gpu_efficiency_power_limit_watts', THIS_NODE))})", legend="limit"),
            shows="Power draw of each board; dashed: the highest limit.",
            bad="a flat line far below the limit under a busy engine",
            dashed=("limit",),
        ),
        _strip(
            "Temperature",
            *_curves(at("gpu_efficiency_temperature_celsius", THIS_NODE)),
            shows="Temperature of each GPU: it follows the power within minutes.",
            bad="it falls while the engine stays busy",
        ),
        _strip(
            "Tensor activity (OFU)",
            *_curves(at("gpu_efficiency_ofu_ratio", THIS_NODE)),
            shows="Share of the dense tensor peak delivered, means of five minutes.",
            bad="zero while the engine is busy",
            top=1,
        ),
        _strip(
            "DRAM activity",
            *_curves(at("gpu_efficiency_spin_dram_active_ratio", THIS_NODE)),
            Query(
                f"max by (cluster, node) ({at('gpu_efficiency_job_dram_active_ratio', THIS_NODE, THIS_JOB)}"
                f" * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info', THIS_NODE)})",
                legend="{{node}}: mean of its GPUs",
            ),
            shows="Memory bandwidth in use by the job, by node, means of five minutes; and of each GPU as last read"
            " while it spins.",
            bad="zero while the engine is busy; one node alone that still reads",
            top=1,
        ),
        _strip(
            "Link traffic while a GPU spins",
            *_curves(f"sum without (link) ({at('gpu_efficiency_spin_link_bytes_per_second', THIS_NODE)})"),
            shows="Bytes a second on NVLink and PCIe, of each the busier direction, as last read. Only GPUs that spin"
            " have it: a collective that moves data is no hang.",
            bad="nothing but a trickle (below 0.1 GB/s) while the engine is busy",
            unit="Bps",
        ),
        _strip(
            "Links: time in exposed communication",
            *_curves(f"rate({at('gpu_efficiency_seconds_total', THIS_NODE, _OF_LINKS)}[5m])"),
            shows="Share of its time in which a GPU only moved data between GPUs or waited for a peer, means of five"
            " minutes.",
            bad="it rises to 100 % and then ends: from there on the time is booked as hung",
            unit="percentunit",
            top=1,
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="zombies",
    title="Zombies and deadlocks",
    says="For the person on call: whom to call, since when, what it costs an hour, which rank is the culprit, and the"
    " signals under one another, so that the eye can confirm it.",
    variables=(CLUSTER, JOB, JOB_INSTANCES, _NODES, _INSTANCE, _RUNBOOKS),
    rows=(_CALL, _RANKS, _EYE, _SIGNALS),
    since="now-6h",
)
