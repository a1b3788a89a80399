"""For whoever runs the exporters: can the figures be trusted, what is not seen and why, which nodes to look at."""

from dashboards import words
from dashboards.parts import Board, Column, Figure, Lines, Panel, Query, Row, Table
from dashboards.series import CLUSTER, TO_NODE, at, hours, latest, part, total
from dashboards.unseen import OWNED, SILENT_COST, SILENT_SINCE, silent

_OWNED, _HEARD = "cluster:gpu_efficiency_owned:gpus", "cluster:gpu_efficiency_heard:gpus"
_UNSEEN = "cluster_reason:gpu_efficiency_unobserved_seconds:rate5m"
_REFUSED = "cluster_reason:gpu_efficiency_rejected:rate5m"
_FAULTS, _NODE_FAULTS = "cluster:gpu_efficiency_faults:rate10m", "node:gpu_efficiency_faults:rate10m"
_ERRORS = "cluster:gpu_efficiency_errors:rate5m"
_MESSAGES = "cluster:gpu_efficiency_workload_messages:rate5m"
_TICKS = "cluster:gpu_efficiency_ticks:rate5m"
_AGE, _UNANSWERED = (
    "cluster:gpu_efficiency_allocations_age:seconds",
    "cluster:gpu_efficiency_scheduler_unanswered:seconds",
)
_EXPIRY = "cluster:gpu_efficiency_exemption_expiry:timestamp_seconds"
_NODES, _INFO = "node:gpu_efficiency_gpus", "node:gpu_efficiency_info"
_FIRING = {
    "GPUEfficiencyFleetBlind": "targets page: network, rollout; then GPUEfficiencyExporterBlind",
    "GPUEfficiencyExporterDown": "is the node up? then the daemon's log on it",
    "GPUEfficiencyNodeScrapedTwice": "leave it one scrape job and one daemon; every node needs its own name",
    "GPUEfficiencyExporterMissing": "deploy it; compare its node's name with the scheduler's",
    "GPUEfficiencyExporterBlind": "the daemon's log: nv-hostengine, driver, permissions",
    "GPUEfficiencyExporterProfilingBlocked": "who profiles there? pause; else dcgmi profile --resume",
    "GPUEfficiencyExporterClockSkew": "chronyc tracking on the node; many: on Prometheus",
    "GPUEfficiencyHistoryFailing": "df -h and df -i of the history's file system; the daemon's log",
    "GPUEfficiencySchedulerDataStale": "one node: slurmd or kubelet; many: the controller",
    "GPUEfficiencyConservationBroken": "record some minutes, report with version, restart",
    "GPUEfficiencyExemptionExpired": "renew its date or remove it from the configuration",
}
"""Alerts that concern the exporter, and what to do first."""
_THESE = f'alertname=~"{"|".join(_FIRING)}"'
_HOUR = 3600
_NO_EXPORTER = "no exporter seen"
_BAD_IF_ANY = ((None, words.GOOD), (1, words.BAD))
_WATCH_IF_ANY = ((None, words.GOOD), (1, words.WATCH))


def _or_zero(expr: str) -> str:
    """What did not happen has no sample: 0, as long as there is an exporter at all."""
    return f"{expr} or 0 * sum({at(_OWNED)})"


def _times(name: str, *where: str, by: str = "") -> str:
    """How often it happened in the time shown."""
    return f"{hours(name, *where, by=by)} * {_HOUR}"


def _kind(words_: str) -> str:
    return f'kind=~"{words_}"'


_HEARD_GPUS = _or_zero(f"sum({at(_HEARD)})")
_SILENT_GPUS = f"clamp_min(sum({at(_OWNED)}) - ({_HEARD_GPUS}), 0)"
_NOT_HEARD = f"{at('node:gpu_efficiency_owned:gpus')} unless on (cluster, node) {at(_NODES)}"
_TRUST = Row(
    "Can the figures be trusted?",
    (
        Panel(
            title="Coverage",
            kind=Figure(steps=((None, words.BAD), (0.95, words.WATCH), (0.99, words.GOOD))),
            shows="Share of the time of all GPUs owned that was seen, now. What was not seen is in none of the ratios.",
            bad="below 95 %: all other boards speak of a part of the fleet",
            do="see below what is not seen, and why",
            queries=(
                Query(f"sum({at('cluster:gpu_efficiency_coverage:ratio_rate5m')} * {at(_OWNED)}) / sum({at(_OWNED)})"),
            ),
            unit="percentunit",
            decimals=1,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="GPUs owned, heard, silent",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="GPUs that are paid for now; of them those on nodes whose exporter was heard within five minutes; and"
            " the rest.",
            bad="any that are silent for longer than a reboot takes",
            do="see the nodes below",
            queries=(
                Query(f"sum({at(_OWNED)})", legend="owned"),
                Query(_HEARD_GPUS, legend="heard"),
                Query(_SILENT_GPUS, legend="silent"),
            ),
            decimals=0,
            width=8,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Silent nodes",
            kind=Figure(steps=_BAD_IF_ANY),
            shows="Nodes that the scheduler has GPUs on, or that were heard within a day, and that say nothing now.",
            bad="any that is not being repaired",
            do="see which, in the table below",
            queries=(Query(_or_zero(f"count({_NOT_HEARD})")),),
            unit="none",
            decimals=0,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Booked wrongly",
            kind=Figure(steps=_BAD_IF_ANY),
            shows="Times that the parts of a GPU's time did not add up to what was paid, since the daemons started.",
            bad="anything but 0: a bug of the exporter, and figures of that node are wrong",
            do="the alert GPUEfficiencyConservationBroken names the node; its runbook says what to keep and to report",
            queries=(Query(f"sum({at('cluster:gpu_efficiency_conservation_errors')})"),),
            unit="none",
            decimals=0,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Simulated",
            kind=Figure(steps=_BAD_IF_ANY),
            shows="Exporters that say that their figures come from a simulation or a recording, not from hardware.",
            bad="any, unless this is a demonstration: all figures of these nodes are made up",
            do="take them out of the scrape, or give them a cluster label of their own",
            queries=(Query(f"sum({at('cluster:gpu_efficiency_simulated:nodes')})"),),
            unit="none",
            decimals=0,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Refused",
            kind=Figure(steps=((None, words.GOOD), (1, words.WATCH), (1000, words.BAD))),
            shows="Readings and fields of them, in the time shown, that could not be true and were not believed: their"
            " time is not seen, never guessed.",
            bad="thousands: a source that lies, or a clock that jumps",
            do="see the reasons below",
            queries=(Query(_or_zero(_times(_REFUSED))),),
            unit="short",
            decimals=0,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Faults",
            kind=Figure(steps=((None, words.GOOD), (1, words.WATCH), (1000, words.BAD))),
            shows="Failures to read something, in the time shown; one that lasts counts at every tick.",
            bad="thousands: something has been broken for long",
            do="see kinds and nodes below",
            queries=(Query(_or_zero(_times(_FAULTS))),),
            unit="short",
            decimals=0,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Failed scrapes",
            kind=Figure(steps=_BAD_IF_ANY),
            shows="Exporters that Prometheus knows and that do not answer it now.",
            bad="any for longer than a restart takes",
            do="the alert GPUEfficiencyExporterDown names them; is the node up, is the daemon?",
            queries=(Query(_or_zero(f"sum({at('cluster:gpu_efficiency_down:nodes')})")),),
            unit="none",
            decimals=0,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Scheduler age",
            kind=Figure(steps=((None, words.GOOD), (60, words.WATCH), (300, words.BAD))),
            shows="Seconds since the scheduler last confirmed GPU allocations, on the node where that is longest ago.",
            bad="minutes: owners become unknown, and time not seen",
            do="one node: its slurmd or kubelet; many: the controller or API server",
            queries=(Query(f"max({at(_AGE)})"),),
            unit="s",
            width=4,
            height=4,
            empty="no scheduler is asked",
        ),
        Panel(
            title="Worth unknown",
            kind=Figure(steps=((None, words.GOOD), (0.05, words.WATCH), (0.25, words.BAD))),
            shows="Of the computing time shown the share whose worth cannot be known: no tensor counter, or a board"
            " that is not in the table. It is in neither side of eMFU.",
            bad="above 25 %: eMFU and the product speak of a part of the work",
            do="allow the profiling counters; add the board's peaks to the configuration",
            queries=(
                Query(
                    f"1 - ({_or_zero(total(part('cluster', 'resolved')))})"
                    f" / ({total(part('cluster', 'computing'))} > 0)"
                ),
            ),
            unit="percentunit",
            decimals=1,
            width=4,
            height=4,
            empty="nothing computed",
        ),
        Panel(
            title="Late ticks",
            kind=Figure(steps=((None, words.GOOD), (0.01, words.WATCH), (0.1, words.BAD))),
            shows="Of all ticks in the time shown, those that began more than half an interval late.",
            bad="above 1 %: nodes without spare CPU, or sources that answer slowly",
            do="see seconds a tick below; give the daemon its CPU share",
            queries=(Query(f"{total('cluster:gpu_efficiency_late_ticks:rate5m')} / ({total(_TICKS)} > 0)"),),
            unit="percentunit",
            decimals=2,
            width=4,
            height=4,
            empty=_NO_EXPORTER,
        ),
    ),
)

_COVERED = "node:gpu_efficiency_coverage:ratio_rate5m"
_FIRES = at("ALERTS", _THESE, 'alertstate="firing"')


def _named(expr: str) -> str:
    """With the node's name, by which its board is found."""
    return f"{expr} * on (cluster, instance) group_left (node) {at(_INFO)}"


_LOOK = Row(
    "What is wrong, and where",
    (
        Panel(
            title="Alerts on the exporter",
            kind=Table(
                (
                    Column(of="alertname", title="Alert", width=285),
                    Column(of="severity", title="Severity", width=75),
                    Column(of="A", title="Now", unit="none", decimals=0, width=55),
                    Column(of="B", title="Time shown", unit="none", decimals=0, width=115),
                    Column(of="first", title="Do first", texts=_FIRING, wrapped=True),
                ),
                sort="B",
            ),
            shows="Alerts that concern the exporter: how many fire at this moment, and how many did in the time shown,"
            " each node's once.",
            bad="GPUEfficiencyFleetBlind: no other alert can be trusted while it fires",
            do="what its last column says; the rest is in its runbook",
            queries=(
                Query(f"count by (alertname, severity) ({_FIRES})"),
                Query(
                    f"label_replace(count by (alertname, severity) (count_over_time({_FIRES}[$__range])),"
                    ' "first", "$1", "alertname", "(.*)")'
                ),
            ),
            unit="none",
            width=15,
            height=8,
            fills="telemetry_outage",
            empty="none fired in the time shown",
        ),
        Panel(
            title="Nodes seen least, now",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="A", title="Seen", unit="percentunit", decimals=1, bar=words.EXPECTED, width=140),
                    Column(of="B", title="Not seen", unit="none", decimals=1, width=90),
                ),
                sort="A",
                rising=True,
            ),
            shows="Of the nodes that are heard the ten with the lowest coverage of the last five minutes.",
            bad="nodes below 95 %",
            do="click on the node: its board says why; then its daemon's log",
            queries=(
                Query(_named(f"bottomk(10, {at(_COVERED)})")),
                Query(
                    _named(
                        f"({at(part('node', 'paid'))} - {at(part('node', 'observed'))}"
                        f" and on (cluster, instance) bottomk(10, {at(_COVERED)}))"
                    )
                ),
            ),
            width=9,
            height=8,
            empty="no node is heard",
        ),
        Panel(
            title="Nodes not reporting now",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="A", title="GPUs", unit="none", decimals=0, width=70),
                    Column(of="B", title="Silent for", unit="s", width=120),
                    Column(of="C", title="Cost an hour", unit="short", decimals=2, width=105),
                    Column(of="currency", title="Currency", width=85),
                ),
                sort="A",
            ),
            shows="Nodes whose exporter says nothing, that were heard within a day or that the scheduler has GPUs on;"
            " what they cost all the same, as they were last heard.",
            bad="nodes that are up and do not report",
            do="never heard: deploy the exporter there; else: is the node up, then systemctl status gpu-efficiency",
            queries=(
                Query(silent(OWNED)),
                Query(f"time() - {SILENT_SINCE}"),
                Query(silent(SILENT_COST, "cluster, node, currency")),
            ),
            width=12,
            height=8,
            empty="every node is heard",
        ),
        Panel(
            title="Nodes with faults",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="kind", title="Fault", width=170, ours=True),
                    Column(of="Value", title="Times", unit="short", decimals=0, bar=words.WATCH, width=200),
                ),
                sort="Value",
            ),
            shows="Faults by node and kind in the time shown, the twenty that occurred most; one that lasts counts at"
            " every tick.",
            bad="a node that is there alone: something is broken on it",
            do="click on the node; its daemon's log names what failed and what to do",
            queries=(Query(_named(f"topk(20, {_times(_NODE_FAULTS, by='cluster, instance, kind')})")),),
            width=12,
            height=8,
            fills="telemetry_outage",
            empty="none in the time shown",
        ),
    ),
)

_GROUPS = {
    "paused on purpose": ("paused", words.WATCH),
    "the GPU is gone": ("gpu_lost|gpu_missing|mig_layout|handle_stale", words.STATES["unavailable"]),
    "counters refused": ("profiling_refused|multiplexed|no_engine_signal", words.STATES["stalled"]),
    "the source is silent or wrong": ("source_failed|source_hung|gap|stale|blank|zero_filled", words.BAD),
    "its holder is unknown": ("owner_unknown", words.STATES["unowned"]),
    "start, clock, others": ("starting|clock_step|other", words.UNKNOWN),
}
"""Reasons for not seeing by who mends them; all of `unobserved_seconds_total` are here."""
_SILENT = "node not reporting"


def _listed(label: str, title: str, value: str, *, bar: str, decimals: int = 0) -> Table:
    """Names and a bar each. A bar gauge would leave the name out where there is only one."""
    number = Column(of="Value", title=value, unit="short", width=110, bar=bar, decimals=decimals)
    return Table((Column(of=label, title=title, ours=True), number), sort="Value")


def _or_said(expr: str, label: str, nothing: str) -> str:
    """Where nothing happened one line says so, as long as there is an exporter at all."""
    return f'{expr} or on () label_replace(0 * sum({at(_OWNED)}), "{label}", "{nothing}", "", "")'


_SILENT_HOURS = (
    f"label_replace(clamp_min(({hours(_OWNED)}) - ({hours(_HEARD)} or 0 * {hours(_OWNED)}), 0) > 0,"
    f' "reason", "{_SILENT}", "", "")'
)
_NOT_SEEN = Row(
    "What is not seen, and why",
    (
        Panel(
            title="GPUs not seen",
            kind=Lines(
                stacked=True,
                colours={said: colour for said, (_, colour) in _GROUPS.items()} | {_SILENT: words.QUIET},
            ),
            shows="GPUs with unobserved time, over time, by the reason, and those of nodes that do not report.",
            bad="any that stays but a pause that somebody asked for",
            do="gone: the Node board; refused: driver permissions and other profilers; silent source: nv-hostengine;"
            " owner unknown: the scheduler; not reporting: the table above",
            queries=(
                *(
                    Query(_or_zero(total(_UNSEEN, f'reason=~"{reasons}"', time="")), legend=said)
                    for said, (reasons, _) in _GROUPS.items()
                ),
                Query(_SILENT_GPUS, legend=_SILENT),
            ),
            unit="none",
            width=10,
            height=9,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="GPU-hours not seen, by reason",
            kind=_listed("reason", "Reason", "GPU-hours", bar=words.UNKNOWN, decimals=2),
            shows="GPU-hours of the time shown that were not observed, by reason, silent nodes included.",
            bad="one long bar",
            do="its meaning and remedy are in the runbook GPUEfficiencyExporterBlind",
            queries=(Query(_or_said(f"{hours(_UNSEEN, by='reason')} or {_SILENT_HOURS}", "reason", "all was seen")),),
            unit="short",
            decimals=2,
            width=7,
            height=9,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Readings refused, by reason",
            kind=_listed("reason", "Reason", "Times", bar=words.WATCH),
            shows="Readings and fields that could not be true, in the time shown, by what was wrong with them.",
            bad="thousands of one kind: a source that lies, a clock that jumps, two sources that contradict",
            do="record the node for some minutes (gpu-efficiency record) and look at the field",
            queries=(Query(_or_said(_times(_REFUSED, by="reason"), "reason", "none refused")),),
            unit="short",
            decimals=0,
            width=7,
            height=9,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Faults by kind",
            kind=_listed("kind", "Fault", "Times", bar=words.WATCH),
            shows="Failures to read something in the time shown, by kind; one that lasts counts at every tick. Failures"
            " that the sampling loop itself caught are named so.",
            bad="one long bar; any of the loop",
            do="see which nodes above; of the loop: report it with the daemon's log",
            queries=(
                Query(
                    _or_said(
                        f"({_times(_FAULTS, by='kind')} or label_replace({_times(_ERRORS, by='kind')},"
                        ' "kind", "sampling loop: $1", "kind", "(.*)"))',
                        "kind",
                        "no fault",
                    )
                ),
            ),
            unit="short",
            decimals=0,
            width=10,
            height=9,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Nodes whose counters are refused or paused",
            kind=Lines(
                steps=True,
                colours={"refused": words.BAD, "paused on purpose": words.WATCH},
            ),
            shows="Nodes on which the driver or DCGM refuses the profiling counters, and nodes on which somebody paused"
            " the exporter. Without counters useful work is not known, and a hang cannot be proven.",
            bad="refused for longer than somebody profiles there; paused for hours",
            do="refused: the alert GPUEfficiencyExporterProfilingBlocked says how to allow them; paused: ask who did",
            queries=tuple(
                Query(
                    _or_zero(f"count(count by (cluster, instance) ({latest(_NODE_FAULTS, _kind(kinds))}))"), legend=said
                )
                for said, kinds in (("refused", "profiling_refused"), ("paused on purpose", "paused"))
            ),
            unit="none",
            decimals=0,
            width=14,
            height=9,
            empty=_NO_EXPORTER,
        ),
    ),
    folded=True,
)

_TOLD = f"sum({at('job:gpu_efficiency_reported:gpus')})"
_SOFTWARE = Row(
    "Which exporters, and how fast",
    (
        Panel(
            title="Where figures come from",
            kind=Table(
                (
                    Column(of="source", title="Source"),
                    Column(of="scheduler", title="Scheduler"),
                    Column(of="Value", title="Nodes", unit="none", decimals=0, bar=words.EXPECTED, width=130),
                ),
                sort="Value",
            ),
            shows="Nodes by the source of their telemetry and by the scheduler that GPU allocations come from.",
            bad="a few nodes with another source than the rest; simulation or replay among real ones",
            do="open such a node's board: its source says in a sentence why it was taken",
            queries=(Query(f"sum by (source, scheduler) ({at('cluster:gpu_efficiency_sources:nodes')})"),),
            unit="none",
            width=10,
            height=7,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Versions",
            kind=Table(
                (
                    Column(of="version", title="Version"),
                    Column(of="Value", title="Nodes", unit="none", decimals=0, bar=words.EXPECTED, width=105),
                ),
                sort="Value",
            ),
            shows="Nodes by the exporter's version.",
            bad="several that stay: a rollout that stopped half-way",
            do="go on with it, or back",
            queries=(Query(f"sum by (version) ({at('cluster:gpu_efficiency_versions:nodes')})"),),
            unit="none",
            width=6,
            height=7,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Exemptions",
            kind=Table(
                (
                    Column(of="exemption", title="Exemption"),
                    Column(of="reason", title="Reason"),
                    Column(of="Value", title="Days left", unit="none", decimals=1, width=94, texts={"0": "-"}),
                ),
                sort="Value",
                rising=True,
            ),
            shows="Exemptions of jobs or nodes from being judged, and the days each has left.",
            bad="none left: its owners get tickets and its idle time counts again",
            do="ask whoever wrote its reason whether it still holds; renew or remove it on all nodes",
            queries=(
                Query(
                    _or_said(
                        f"(min by (exemption, reason) ({at(_EXPIRY)}) - time()) / 86400", "exemption", "none configured"
                    )
                ),
            ),
            unit="none",
            decimals=1,
            width=8,
            height=7,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Age of GPU allocations",
            kind=Lines(colours={"oldest": words.WATCH, "longest without an answer": words.BAD}),
            shows="Longest time since the scheduler of any node last confirmed GPU allocations, and the longest wait"
            " for a response of the scheduler.",
            bad="a line that climbs",
            do="the alert GPUEfficiencySchedulerDataStale names the nodes",
            queries=(
                Query(f"max({at(_AGE)})", legend="oldest"),
                Query(f"max({at(_UNANSWERED)})", legend="longest without an answer"),
            ),
            unit="s",
            width=7,
            height=8,
            empty="no scheduler is asked",
        ),
        Panel(
            title="Seconds a tick",
            kind=Lines(
                colours={
                    "reading": words.EXPECTED,
                    "accounting": words.WATCH,
                    "reading, slowest node": words.BAD,
                },
            ),
            shows="Wall time of a tick: reading source and scheduler, and accounting, as means of all nodes; and"
            " reading on the slowest node.",
            bad="near the sampling interval: ticks are late and readings miss",
            do="look at that node's driver and DCGM; give the daemon its CPU share",
            queries=(
                *(
                    Query(
                        f"{total(f'cluster:gpu_efficiency_{which}_seconds:rate5m', time='')}"
                        f" / ({total(_TICKS, time='')} > 0)",
                        legend=said,
                    )
                    for which, said in (("read", "reading"), ("core", "accounting"))
                ),
                Query(f"max({at('cluster:gpu_efficiency_read_slowest:mean_seconds')})", legend="reading, slowest node"),
            ),
            unit="s",
            width=7,
            height=8,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="Messages of jobs",
            kind=_listed("outcome", "Messages", "Times", bar=words.EXPECTED),
            shows="Messages of workloads in the time shown, by what became of them: taken, or why one was refused.",
            bad="refused ones that do not end",
            do="docs/training-jobs.md has what each refusal means; its sender has been told it too",
            queries=(Query(_or_said(_times(_MESSAGES, by="outcome"), "outcome", "none came")),),
            unit="short",
            decimals=0,
            width=6,
            height=8,
            empty=_NO_EXPORTER,
        ),
        Panel(
            title="GPUs that report",
            kind=Figure(steps=((None, words.EXPECTED),)),
            shows="Of the GPUs that are held now, those whose job tells its steps: for them checkpoints, data stalls"
            " and the like are told, for the others estimated from counters.",
            bad="nothing by itself",
            do="let the largest jobs report first: docs/training-jobs.md",
            queries=(Query(f"({_or_zero(_TOLD)}) / (sum({at('cluster:gpu_efficiency_held:gpus')}) > 0)"),),
            unit="percentunit",
            decimals=0,
            width=4,
            height=8,
            empty="no GPU is held",
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="quality",
    title="Exporter and data quality",
    says="For whoever runs the exporters: can the figures be trusted, what is not seen and why, and which nodes to look"
    " at.",
    variables=(CLUSTER,),
    rows=(_TRUST, _LOOK, _NOT_SEEN, _SOFTWARE),
)
