"""For the owner of one job and whoever helps: what it costs, where its time goes, whether it is alive, how long yet.

Figures of the whole job are since it began, by the daemons' own counters, so that they are the receipt's; curves are of
the time shown. A job that has ended keeps its last figures as long as the time shown reaches back to them. What is told
of single GPUs is of those that the job holds, at the moments at which it holds them: nodes may be shared.
"""

from dashboards import bands, words
from dashboards.parts import Bars, Board, Column, Figure, Lines, Note, Panel, Query, Row, Table, Timeline
from dashboards.series import (
    CLICKED,
    ITS_CLUSTER,
    ITS_NODES,
    JOB,
    JOB_INSTANCES,
    THIS_JOB,
    TO_JOB,
    TO_NODE,
    at,
    culprits,
    hours,
    in_words,
    product,
    ratio,
    to,
)

_NONE = "no such job in this time"
_UNKNOWN = "not known"
_MUTE = "the job does not report"
_NO_ENGINE = "no serving engine found"
_NOT_NOW = "it holds no GPU now"
_TO_TEAM = to("chargeback", "The team's board", team=CLICKED)
_TO_ACCOUNT = to("chargeback", "The account's board", account=CLICKED)
_TO_TRAINING = to("training", "Training leaks")
_LOSSES, _SEEN = 'layer=~"gau|ectr|emfu"', 'layer!="unobserved"'
_BAD_STATES, _UNSEEN = 'state=~"hung|zombie|unavailable|unobserved"', 'state="unobserved"'
_SHOWN = 24
"""Stripes and rows of single GPUs at most."""


# -- series of this job --


def _of(name: str, *where: str) -> str:
    return at(name, THIS_JOB, *where)


_STATES = "gpu_efficiency_job_state_gpus"
_GPUS = f"sum by (cluster, job_id) ({_of(_STATES)})"
"""Now; none of a job that has ended."""


def _last(name: str, *where: str) -> str:
    """Its last value in the time shown, also of a job that has ended."""
    return f"last_over_time({_of(name, *where)}[$__range])"


def _now_or_then(now: str, then: str) -> str:
    """The past only of a job that has ended: its number may have been another job's in the time shown."""
    return f"({now} or on (cluster) ({then} unless on (cluster) {_GPUS}))"


def _latest(taken: str, name: str, *where: str) -> str:
    """What its series say now, also those of a job that has ended; `taken`: an aggregation, such as "max by (run)"."""
    return _now_or_then(f"{taken} ({_of(name, *where)})", f"{taken} ({_last(name, *where)})")


def _one(name: str, *where: str, of: str = "max") -> str:
    """What each of its nodes tells alike of the whole job: one of them, also of a job that has ended."""
    return _latest(f"{of} by (cluster)", name, *where)


def _so_far(expr: str, *, then: str = "last", every: str = "5m") -> str:
    """The figure of now; where the job has ended, the `last` of the time shown, or the `max` of what only grows."""
    return f"({expr} or {then}_over_time(({expr})[$__range:{every}]))"


_SECONDS = "gpu_efficiency_job_seconds_total"
_RECORDED = "job_leak:gpu_efficiency_seconds:rate5m"


def _hours(*where: str, by: str = "cluster") -> str:
    """GPU-hours since the job began; of one that has ended those of the time shown: to read every counter is slow."""
    return f"(sum by ({by}) ({_of(_SECONDS, *where)}) / 3600 or {hours(_RECORDED, THIS_JOB, *where, by=by)})"


_SUM = "sum by (cluster) ({})"
_PARTS = {
    "gau": ('layer!~"unobserved|gau"', 'layer!="unobserved"'),
    "ectr": ('layer!~"unobserved|gau|ectr"', 'layer!~"unobserved|gau"'),
    "emfu": ('layer="useful"', 'layer=~"emfu|useful"'),
    "floor": ('layer="useful"', 'layer!="unobserved"'),
}


def _counted(which: str) -> str:
    """One of the ratios since the job began."""
    above, below = (f"sum by (cluster) ({_of(_SECONDS, part)})" for part in _PARTS[which])
    return f"{above} / ({below} > 0)"


def _ratio(which: str) -> str:
    """The same; of a job that has ended, of the time shown."""
    return f"{_counted(which)} or {ratio('job', which, THIS_JOB, by='cluster')}"


_PRODUCT = (
    " * ".join(f"({_counted(which)})" for which in ("gau", "ectr", "emfu"))
    + f" or {_counted('floor')} or {product('job', THIS_JOB, by='cluster')}"
)


_PAID = "gpu_efficiency_job_paid_seconds_total"
_ALLOCATED = 'held="true"'
_PER_HOUR = (
    "topk by (cluster, instance) (1, max by (cluster, instance, currency)"
    f" ({at('gpu_efficiency_price_per_gpu_hour', ITS_NODES, _ALLOCATED)}))"
)
_COST = (
    f"sum by (cluster, job_id, currency) ({_of(_PAID)} / 3600 * on (cluster, instance) group_left (currency)"
    f" {_PER_HOUR})"
)
"""As rules record it."""
_PRICE = (
    f"(3600 * {_last('job:gpu_efficiency_price:per_gpu_second')} or on (cluster)"
    f" {_COST} / on (cluster, job_id) group_left () (sum by (cluster, job_id) ({_of(_PAID)}) / 3600 > 0))"
)


def _money(gpu_hours: str) -> str:
    return f"{gpu_hours} * on (cluster) group_left (currency) {_PRICE}"


_PER_KWH = f"max by (cluster, instance, currency) ({at('gpu_efficiency_price_per_kwh', ITS_NODES)})"
_ENERGY_MONEY = (
    f"sum by (cluster, currency) ({_of('gpu_efficiency_job_energy_joules_total')} / 3.6e6"
    f" * on (cluster, instance) group_left (currency) topk by (cluster, instance) (1, {_PER_KWH}))"
)
_FIRES, _NAMED = 'alertstate="firing"', 'job_id!=""'
"""Of alerts: without a job chosen, those that concern no job are not meant."""
_BLIND = f"(sum by (cluster, job_id) ({_of(_STATES, _UNSEEN)}) >= on (cluster, job_id) {_GPUS})"
"""None of its GPUs is seen."""
_RUNS = f"(time() - min by (cluster) ({_of('gpu_efficiency_job_start_timestamp_seconds')}) and on (cluster) {_GPUS})"
_AGE = _so_far(_RUNS, every="1m")
_BEGAN = _one("gpu_efficiency_job_start_timestamp_seconds", of="min")
_LIMIT = _one("gpu_efficiency_job_time_limit_seconds")
_LEFT = f"({_BEGAN} + {_LIMIT} - time() and on (cluster) {_GPUS})"
_PACE = _of("job:gpu_efficiency_steps:rate5m")
"""Steps a second."""


# -- series of its GPUs --

_INFO = at("gpu_efficiency_node_info", ITS_NODES)
_NAMED_NODES = "topk by (cluster, instance) (1, max by (cluster, instance, node) ({}))"
_HELD = _of("gpu_efficiency_allocation_info")
"""Its GPUs, at each moment."""
_ON_GPU = "on (cluster, instance, uuid)"
_EACH = "by (cluster, instance, uuid)"
_RANKED = f"topk {_EACH} (1, count_over_time({_HELD}[$__range] @ end()))"
"""Its GPUs of all the time shown, each with the rank it was for longest. `@ end()`: one answer for all of a curve."""
_TROUBLE = 'state=~"stalled|hung|zombie|unavailable|unobserved"'
_TROUBLED = (
    f"(sum {_EACH} (count_over_time({at('gpu_efficiency_state', ITS_NODES, _TROUBLE)}[$__range] @ end()))"
    f" or 0 * max {_EACH} ({at('gpu_efficiency_gpu_info', ITS_NODES)} @ end()))"
)
_WORST = f"topk by (cluster) ({_SHOWN}, 0 * {_RANKED} + {_ON_GPU} group_left () {_TROUBLED})"
_CODES = " or ".join(
    f'label_replace(vector({number}), "state", "{state}", "", "")' for number, state in enumerate(words.STATES, 1)
)
_STRIPE = (
    f"(max {_EACH} (({at('gpu_efficiency_state', ITS_NODES)} and {_ON_GPU} {_WORST})"
    f" * on (state) group_left () ({_CODES})) and {_ON_GPU} {_HELD})"
    f" * {_ON_GPU} group_left (gpu, rank) ({_WORST} ^ 0)"
    f" * on (cluster, instance) group_left (node) {_NAMED_NODES.format(f'last_over_time({_INFO}[$__range] @ end())')}"
)
_STRIPES = f'label_replace({_STRIPE}, "of", ", rank $1", "rank", "(.+)")'


def _across(quantile: float, name: str) -> str:
    return f"quantile by (cluster) ({quantile}, {at(name, ITS_NODES)} and {_ON_GPU} {_HELD})"


_SCORE = f"sum {_EACH} ({at('gpu_efficiency_state', ITS_NODES)} * on (state) group_left () ({_CODES}))"
_LEAST = (
    f"topk by (cluster) ({_SHOWN}, ({_SCORE} - {_ON_GPU} {at('gpu_efficiency_ofu_ratio', ITS_NODES)} or {_SCORE})"
    f" and {_ON_GPU} {_HELD})"
)
"""Its GPUs that are worst off at this moment: by state, then by the least compute."""


def _row(expr: str, more: str = "") -> str:
    """A figure of each of those, for a table."""
    return (
        f"max by (cluster, node, gpu, rank{more}) (({expr} and {_ON_GPU} {_LEAST})"
        f" * {_ON_GPU} group_left (rank) {_HELD}"
        f" * on (cluster, instance) group_left (node) {_NAMED_NODES.format(_INFO)})"
    )


# -- the receipt --


_PLAIN: tuple[tuple[float | None, str], ...] = ((None, words.EXPECTED),)


def _figure(
    title: str, *queries: Query, shows: str, bad: str, do: str, unit: str = "", decimals: int | None = None,
    steps: tuple[tuple[float | None, str], ...] = _PLAIN, empty: str = _NONE, width: int = 4,
) -> Panel:  # fmt: skip
    return Panel(
        title=title, kind=Figure(steps=steps, named=bool(queries[0].legend)), shows=shows, bad=bad, do=do,
        queries=queries, unit=unit, decimals=decimals, width=width, height=4, empty=empty,
    )  # fmt: skip


_IS_SERVER = f"max by (cluster) ({_last('job:gpu_efficiency_info', bands.OF_SERVERS)})"


def _by_class(expr: str, which: str) -> tuple[Query, Query]:
    return bands.by_class(expr, which, _IS_SERVER, on="cluster")


def _layer(which: str, title: str, *, shows: str, do: str) -> Panel:
    low, high = (round(100 * edge) for edge in bands.TRAINING[which])
    return _figure(
        title, *_by_class(_ratio(which), which),
        shows=f"{shows} Most training jobs: {low} to {high} %. A server has no band here, and no colour of judgement.",
        bad=f"below {low} % in training", do=do, unit="percentunit", decimals=1, empty=_UNKNOWN,
    )  # fmt: skip


_PODS = tuple(which("gpu_efficiency_job_info", 'workload_pod!=""') for which in (_of, _last))
_WHO = Panel(
    title="Who it is",
    kind=Table(
        (
            Column(of="name", title="Name", width=120),
            Column(of="user", title="User", width=70),
            Column(of="account", title="Account", link=_TO_ACCOUNT, width=95),
            Column(of="team", title="Team", link=_TO_TEAM, width=95),
            Column(of="partition", title="Partition", width=80),
            Column(of="workload_namespace", title="Namespace", width=95),
            Column(of="workload_pod", title="Pod", width=110),
            Column(of="workload_class", title="Kind", width=80),
            Column(of="run", title="Run", width=95),
            Column(of="engine", title="Engine", width=80),
            Column(of="E", title="GPUs", unit="none", decimals=0, width=60),
            Column(of="F", title="Nodes", unit="none", decimals=0, width=60),
            Column(of="model", title="GPU"),
            Column(of="cluster", title="Cluster", width=90),
        )
    ),
    shows="Owner of the job in its scheduler, and one of its pods; its run, if it reports; its engine, if it serves;"
    " the GPUs it has, or had last.",
    bad="two rows: two clusters have a job of this number; choose the cluster at the top",
    do="click on the account or the team to see what else they run",
    queries=(
        Query(
            _now_or_then(_of("job:gpu_efficiency_info"), f"topk by (cluster) (1, {_last('job:gpu_efficiency_info')})")
        ),
        Query(_latest("max by (cluster, run)", "gpu_efficiency_job_run_info")),
        Query(_latest("max by (cluster, engine)", "gpu_efficiency_job_engine_info")),
        Query(
            "topk by (cluster) (1, count by (cluster, model)"
            f" ({at('gpu_efficiency_gpu_info', ITS_NODES)} and {_ON_GPU} {_HELD}))"
        ),
        Query(_one("job:gpu_efficiency_gpus")),
        Query(_latest("count by (cluster)", "gpu_efficiency_job_paid_seconds_total")),
        Query(_now_or_then(*(f"topk by (cluster) (1, max by (cluster, workload_pod) ({pods}))" for pods in _PODS))),
    ),
    unit="none",
    width=24,
    height=3,
    empty=_NONE,
)

_YET = Panel(
    title="How long yet",
    kind=Table(
        (
            Column(of="A", title="Began", unit="dateTimeAsIso"),
            Column(of="B", title="Has run", unit="s", decimals=1, width=90),
            Column(of="C", title="May run", unit="s", decimals=1, width=90),
            Column(
                of="D",
                title="Used",
                unit="percentunit",
                decimals=1,
                width=80,
                steps=((None, words.EXPECTED), (0.9, words.WATCH)),
            ),
            Column(of="E", title="Is cut at", unit="dateTimeAsIso"),
            Column(of="F", title="Step", unit="none", decimals=0),
            Column(of="G", title="Steps an hour", unit="none", decimals=0),
            Column(of="H", title="Step when it is cut", unit="none", decimals=0),
        )
    ),
    shows="Time used against the scheduler's limit, when the scheduler will end the job, and, if it reports, which step"
    " it will have reached then at its present pace. Empty cells: it has no limit, or does not report.",
    bad="the step it will have reached is fewer than it needs; more than 90 % used",
    do="save a checkpoint before that time; ask for more time, or plan the run that goes on from it",
    queries=(
        Query(f"1000 * {_BEGAN}"),
        Query(_AGE),
        Query(_LIMIT),
        Query(f"{_AGE} / {_LIMIT}"),
        Query(f"1000 * ({_BEGAN} + {_LIMIT})"),
        Query(_one("gpu_efficiency_job_step")),
        Query(f"3600 * max by (cluster) ({_PACE})"),
        Query(f"{_one('gpu_efficiency_job_step')} + max by (cluster) ({_PACE}) * clamp_min({_LEFT}, 0)"),
    ),
    unit="none",
    width=24,
    height=3,
    empty=_NONE,
)

_RECEIPT = Row(
    "The receipt: since the job began",
    (
        Panel(
            title="Job $job_id",
            kind=Note(
                "Nothing below? Type a job's number at the top (Kubernetes: namespace/kind/name), or open *Find a job*"
                " and click on one; it must have run in the time shown."
                " The same as text: `gpu-efficiency report $job_id`."
                " Leaks of [training](/d/gpu-efficiency-training?${__url_time_range}&${cluster:queryparam}) and"
                " [inference](/d/gpu-efficiency-inference?${__url_time_range}&${cluster:queryparam}) explained."
            ),
            shows="How to choose a job, and where the same is said as text.",
            bad="nothing",
            do="choose a job",
            width=24,
            height=3,
        ),
        _WHO,
        _figure(
            "Useful", *_by_class(_PRODUCT, "product"),
            shows="GAU x ECTR x eMFU since the job began: the share of its GPU time that advanced a model, of the"
            " hardware's dense peak. Where the job does not report, it is the hardware's upper bound.",
            bad="below 14 % in training; below 3 % in a server: decoding waits for memory",
            do="see which of the three beside it is lowest, then the longest bar below",
            unit="percentunit", decimals=1, empty=_UNKNOWN,
        ),
        _layer("gau", "GAU", shows="GPU Allocation Utilization: GPUs that work, of all it holds; zombies do not.",
               do="let go of GPUs that rest: see the table of its GPUs"),
        _layer("ectr", "ECTR", shows="Effective Compute Time Ratio: computing / working.",
               do="data stalls, checkpoints, host overhead, hangs, communication: the purple bars"),
        _layer("emfu", "eMFU", shows="Effective Model FLOPs Utilization: useful / computing.",
               do="bigger batches, fused kernels, fewer bubbles: the blue bars"),
        _figure(
            "Cost so far", Query(
                _now_or_then(
                    _COST, f"max_over_time({_of('job:gpu_efficiency_cost')}[$__range])"
                ),
                legend="{{currency}}",
            ),
            shows="GPU-hours held times the price of now. Without a price table it is GPU-hours.",
            bad="more than the job's result is worth", do="`gpu-efficiency report` has it at the prices of then",
            unit="short", decimals=2,
        ),
        _figure(
            "Lost so far", Query(
                f"{_money(_hours(_LOSSES))} and on (cluster) {_hours(_SEEN)} > 0", legend="{{currency}}"
            ),
            shows="What all losses together cost, at the price of now.",
            bad="more than three quarters of the cost", do="begin with the first row of the table below",
            unit="short", decimals=2,            steps=((None, words.BAD),), empty=_UNKNOWN,
        ),
        _figure(
            "In trouble now",
            Query(
                f"sum by (cluster) ({_of(_STATES, _BAD_STATES)})"
                f" or 0 * sum by (cluster) ({_GPUS})"
            ),
            shows="Of the job's GPUs those that are hung, zombies, sick or not seen at this moment.",
            bad="any for longer than a restart takes", do="see the stripes and the table of its GPUs",
            unit="none", decimals=0, steps=((None, words.EXPECTED), (1, words.BAD)), empty=_NOT_NOW, width=6,
        ),
        _figure(
            "Last work ago",
            Query(
                f"time() - max by (cluster) ({_of('gpu_efficiency_job_last_work_timestamp_seconds')})"
                f" and on (cluster) {_GPUS} unless on (cluster) {_BLIND}"
            ),
            shows="Time since any GPU of the job last did effective work.",
            bad="minutes in training; hours in a notebook", do="look at the process; cancel the job if nobody needs it",
            unit="s", decimals=0, steps=((None, words.EXPECTED), (300, words.WATCH), (1800, words.BAD)),
            empty="ended, or not seen", width=6,
        ),
        _figure(
            "Energy",
            Query(
                f"{_so_far(_SUM.format(_of('gpu_efficiency_job_energy_joules_total')), then='max')}"
                " / 3.6e6 > 0",
                legend="kWh",
            ),
            Query(_so_far(_ENERGY_MONEY, then="max"), legend="{{currency}}"),
            shows="Energy of the job's boards since it began, without hosts and cooling, and its cost at the price of"
            " now, where [energy] price_per_kwh is set. A price of a GPU-hour may include it.",
            bad="much for a job with a low useful share", do="the same leaks that waste its time waste this",
            unit="short", decimals=2, empty=_UNKNOWN, width=6,
        ),
        _figure(
            "GPU-hours", Query(
                f"{_so_far(_SUM.format(_of('gpu_efficiency_job_paid_seconds_total')), then='max')} / 3600"
            ),
            shows="GPU time the job has held so far; the bars below add up to it.",
            bad="nothing by itself", do="compare with what was asked for", unit="none", decimals=1, width=6,
        ),
        _YET,
    ),
)  # fmt: skip


_BY_LEAK, _USEFUL = "cluster, leak", 'leak="useful"'
_LOST = f"{_hours(_LOSSES, by=_BY_LEAK)} > 0"
_BARS = f"sort_desc({_hours(by=_BY_LEAK)} > 0 or {_hours(_USEFUL, by=_BY_LEAK)})"
"""Useful also where it is nothing: a bar that is alone has no name."""

_LEAKS = Row(
    "Where its GPU-hours went: since the job began",
    (
        Panel(
            title="GPU-hours by leak",
            kind=Bars(colours=words.LEAKS),
            shows="All GPU-hours of the job since it began; of one that has ended, of the time shown."
            " Warm: allocation losses (GAU); purple: compute-time losses"
            " (ECTR); blue: model-FLOPs losses (eMFU); green: useful; grey: not known.",
            bad="a loss that is longer than useful",
            do="take the longest bar that is not green; the table beside it says what to do",
            queries=(Query(_BARS, legend="{{leak}}"),),
            unit="none",
            decimals=2,
            width=7,
            height=12,
            empty=_NONE,
        ),
        Panel(
            title="What it costs and what to do first",
            kind=Table(
                (
                    Column(
                        of="leak", title="Leak", words=words.LEAKS, texts=words.LEAK_NAMES, width=170, link=_TO_TRAINING
                    ),
                    Column(of="A", title="Hours", unit="none", decimals=2, width=75),
                    Column(of="B", title="Share", unit="percentunit", decimals=1, width=65),
                    Column(of="C", title="Cost", unit="short", decimals=2, width=70),
                    Column(of="who", title="Who", texts=words.TEAMS, width=75),
                    Column(of="fix", title="Do first", texts=words.FIXES),
                ),
                sort="A",
            ),
            shows="The losses since the job began: GPU-hours, share of all it held, money at the price of now, who"
            " usually acts, and what to do first.",
            bad="the first row",
            do="do what it says; then compare two runs with `gpu-efficiency report --compare`",
            queries=(
                Query(in_words("fix", in_words("who", _LOST))),
                Query(f"({_LOST}) / on (cluster) group_left () {_hours()}"),
                Query(_money(f"({_LOST})")),
            ),
            width=17,
            height=12,
            empty="no loss seen",
        ),
    ),
)

# -- whether it is alive --

_ACTIVITY = "gpu_efficiency_job_activity_ratio"
_P10, _P50, _P90, _P95 = (f'percentile="p{which}"' for which in (10, 50, 90, 95))
_QUEUE, _WHOLE = 'kind="queue"', 'kind="e2e"'

_ALIVE = Row(
    "Is it alive?",
    (
        Panel(
            title="What its GPUs did",
            kind=Timeline(words=tuple(words.STATES), colours=words.STATES),
            shows="A stripe for each GPU (with its rank, where that is known) in the colour of its state, while the job"
            f" had it. Of more than {_SHOWN} GPUs those that were out of work longest.",
            bad="one stripe that differs from the others: a culprit or a straggler; all alike and not green: the job"
            " waits for something outside",
            do="go to the node of the odd one: the table below leads there",
            queries=(Query(_STRIPES, legend="{{node}} GPU {{gpu}}{{of}}"),),
            unit="none",
            width=24,
            height=10,
            points=300,
            empty=_NONE,
        ),
        Panel(
            title="Its GPUs now, the worst first",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="gpu", title="GPU", width=60),
                    Column(of="rank", title="Rank", width=60),
                    Column(of="state", title="State", words=words.STATES, width=90),
                    Column(of="reason", title="Reason", ours=True),
                    Column(of="B", title="For", unit="s", decimals=0, width=80),
                    Column(of="C", title="Last work", unit="s", decimals=0, width=85),
                    Column(of="D", title="Hang signs", unit="percentunit", decimals=0, width=90),
                    Column(of="E", title="Compute", unit="percentunit", decimals=1, width=80),
                    Column(of="F", title="Power", unit="watt", decimals=0, width=70),
                    Column(of="G", title="Heat", unit="celsius", decimals=0, width=70),
                )
            ),
            shows="State of each GPU, since when, how long ago it last did effective work, how many of the signs of a"
            " hang agree while it spins, and its share of the dense peak (OFU), power and temperature. Of more than"
            f" {_SHOWN} GPUs those that are worst off.",
            bad="hung with signs near 100 %: a deadlock; one GPU at rest while the rest spin: the culprit",
            do="click on the node; dump the culprit's stacks, then restart from the checkpoint",
            queries=(
                Query(_row(at("gpu_efficiency_state", ITS_NODES), ", state, reason")),
                Query(_row(f"time() - {at('gpu_efficiency_state_since_timestamp_seconds', ITS_NODES)}")),
                Query(_row(f"time() - {at('gpu_efficiency_last_work_timestamp_seconds', ITS_NODES)}")),
                Query(_row(at("gpu_efficiency_hang_confidence_ratio", ITS_NODES))),
                Query(_row(at("gpu_efficiency_ofu_ratio", ITS_NODES))),
                Query(_row(at("gpu_efficiency_power_watts", ITS_NODES))),
                Query(_row(at("gpu_efficiency_temperature_celsius", ITS_NODES))),
            ),
            unit="none",
            width=24,
            height=9,
            empty=_NOT_NOW,
        ),
    ),
)  # fmt: skip

_CURVES = Row(
    "Over the time shown",
    (
        Panel(
            title="ECTR against eMFU",
            kind=Lines(
                top=1,
                colours={
                    "ECTR: computing": words.LAYERS["ectr"],
                    "eMFU: useful FLOPs": words.LAYERS["emfu"],
                    "useful": words.GOOD,
                },
            ),
            shows="How much of its time the job computes, how good that is, and what both make together with GAU.",
            bad="ECTR falls: it waits more; eMFU falls: it computes worse, such as after a change of code or data",
            do="look at the same moment in the leaks beside it",
            queries=(
                Query(_of("job:gpu_efficiency_ectr:ratio_rate5m"), legend="ECTR: computing"),
                Query(_of("job:gpu_efficiency_emfu:ratio_rate5m"), legend="eMFU: useful FLOPs"),
                Query(_of("job:gpu_efficiency_product:ratio_rate5m"), legend="useful"),
            ),
            width=9,
            height=10,
            empty=_NONE,
        ),
        Panel(
            title="Its GPUs by leak",
            kind=Lines(stacked=True, colours=words.LEAKS, table=True),
            shows="What its GPUs did at each moment, in GPUs: useful and every leak. Colours as in the bars above.",
            bad="a leak that comes and grows",
            do="see what changed then: code, data, a node, a neighbour",
            queries=(
                Query(f"sum by (cluster, leak) ({_of('job_leak:gpu_efficiency_seconds:rate5m')})", legend="{{leak}}"),
            ),
            unit="none",
            decimals=2,
            width=15,
            height=10,
            empty=_NONE,
        ),
    ),
    folded=True,
)

_TROUBLE_ROW = Row(
    "In trouble: who the others wait for, and alerts",
    (
        Panel(
            title="Who the others wait for",
            kind=Table(
                (
                    Column(of="why", title="Why", texts={"culprit": "hang: does not spin", "straggler": "straggler"}),
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="gpu", title="GPU", width=60),
                    Column(of="rank", title="Rank", width=60),
                    Column(of="Value", title="They wait", unit="percentunit", decimals=0, width=90),
                )
            ),
            shows="The culprit of a hang (a GPU at rest while the others spin), and stragglers: how much more of their"
            " time the others wait than this one.",
            bad="any row",
            do="look at that node's board: throttling, errors, a slow host; move the rank",
            queries=(
                Query(
                    f'label_replace({culprits(THIS_JOB, nodes=ITS_NODES)}, "why", "culprit", "", "")'
                    f' or label_replace({_of("job_rank:gpu_efficiency_straggler")}, "why", "straggler", "", "")'
                ),
            ),
            unit="percentunit",
            width=14,
            height=4,
            empty="no hang and no straggler seen",
            fills="straggler",
        ),
        Panel(
            title="Alerts on it now",
            kind=Table(
                (
                    Column(of="alertname", title="Alert", link=to("zombies", "Who to call")),
                    Column(of="severity", title="Severity", width=90),
                    Column(of="Value", title="Series", unit="none", decimals=0, width=70),
                )
            ),
            shows="Alerts that fire for this job.",
            bad="any row",
            do="open the alert's runbook, docs/runbooks",
            queries=(Query(f"count by (alertname, severity) ({_of('ALERTS', _FIRES, _NAMED)})"),),
            unit="none",
            width=10,
            height=4,
            empty="none fires",
            fills="hung",
        ),
    ),
    folded=True,
)

_SPREAD = {"90 % of GPUs below": words.GOOD, "half below": words.EXPECTED, "10 % below": words.WATCH}
_QUANTILES = {"90 % of GPUs below": 0.9, "half below": 0.5, "10 % below": 0.1}


def _spread(name: str) -> tuple[Query, ...]:
    return tuple(Query(_across(quantile, name), legend=legend) for legend, quantile in _QUANTILES.items())


_BUSY = _of("gpu_efficiency_job_rank_busy_seconds")
_WITHIN = {"p90": "highest p90", "p50": "median p50", "p10": "lowest p10"}

_VARIANCE = Row(
    "Spread: averages hide stragglers",
    (
        Panel(
            title="Compute across its GPUs",
            kind=Lines(top=1, colours=_SPREAD),
            shows="OFU, the share of the dense peak, of the GPUs at the 10th, 50th and 90th percentile.",
            bad="curves far apart: some GPUs work, others wait or are not used",
            do="see its GPUs above, the worst first",
            queries=_spread("gpu_efficiency_ofu_ratio"),
            points=150,
            width=6,
            height=8,
            empty=_NONE,
        ),
        Panel(
            title="Power across its GPUs",
            kind=Lines(colours=_SPREAD),
            shows="Board power at the 10th, 50th and 90th percentile: a second witness, which needs no profiling.",
            bad="flat and low while it should compute; far apart: ranks have unequal work, or one is throttled",
            do="see its GPUs above; on the node's board the reasons why clocks were held down",
            queries=_spread("gpu_efficiency_power_watts"),
            points=150,
            width=6,
            height=8,
            empty=_NONE,
        ),
        Panel(
            title="Activity within five minutes",
            kind=Lines(
                top=1,
                colours={
                    "highest p90": words.GOOD,
                    "median p50": words.EXPECTED,
                    "lowest p10": words.WATCH,
                },
            ),
            shows="Spread of engine activity in time: the 10th percentile of the node where it is lowest, the median of"
            " the nodes' medians, the 90th of the node where it is highest.",
            bad="low p10 beside high p90: the job works in bursts, such as while it waits for input",
            do="data stalls and checkpoints in the bars above",
            queries=(
                Query(f"max by (cluster) ({_of(_ACTIVITY, _P90)})", legend="highest p90"),
                Query(f"quantile by (cluster) (0.5, {_of(_ACTIVITY, _P50)})", legend="median p50"),
                Query(f"min by (cluster) ({_of(_ACTIVITY, _P10)})", legend="lowest p10"),
            ),
            width=6,
            height=8,
            empty=_NONE,
        ),
        Panel(
            title="Seconds of a step across ranks",
            kind=Lines(
                colours={
                    "a step": words.QUIET,
                    "slowest rank works": words.BAD,
                    "median": words.EXPECTED,
                    "fastest rank works": words.GOOD,
                },
                dashed=("a step",),
            ),
            shows="Time of a step, and for how long of it the slowest, the middle and the fastest rank work themselves,"
            " without communication and bubbles.",
            bad="the slowest far above the middle: all others wait for it in every step",
            do="see who the others wait for; even out the work, or move that rank",
            queries=(
                Query(f"max by (cluster) ({_of('gpu_efficiency_job_step_seconds')})", legend="a step"),
                Query(f"max by (cluster) ({_BUSY})", legend="slowest rank works"),
                Query(f"quantile by (cluster) (0.5, {_BUSY})", legend="median"),
                Query(f"min by (cluster) ({_BUSY})", legend="fastest rank works"),
            ),
            points=150,
            width=6,
            height=8,
            empty=_MUTE,
            fills="rework",
        ),
    ),
    folded=True,
)

_PHASES = _last("job_phase:gpu_efficiency_run:seconds")
_MADE = "gpu_efficiency_job_{}_total"


def _count(what: str, *where: str) -> Query:
    """Of the node that has counted most: what is the whole job's, all tell alike."""
    return Query(_one(_MADE.format(what), *where))


_TRAINS = Row(
    "If it trains and reports",
    (
        Panel(
            title="Tokens a second",
            kind=Lines(colours={"tokens": words.EXPECTED, "samples": words.LAYERS["ectr"]}),
            shows="Tokens, or samples where it tells these, that the whole job trains on, padding included.",
            bad="a fall that stays; a curve that sags before every checkpoint",
            do="look at the same moment in the leaks",
            queries=(
                Query(_of("job:gpu_efficiency_tokens:rate5m"), legend="tokens"),
                Query(_of("job:gpu_efficiency_samples:rate5m"), legend="samples"),
            ),
            unit="short",
            width=6,
            height=8,
            empty=_MUTE,
            fills="rework",
        ),
        Panel(
            title="MFU, HFU and OFU",
            kind=Lines(
                top=1,
                colours={
                    "MFU, told": words.GOOD,
                    "HFU, told": words.LEAKS["recomputation"],
                    "OFU, measured": words.QUIET,
                },
                dashed=("OFU, measured",),
            ),
            shows="Model and hardware FLOPs utilization by the job's own count, and the share of the peak that the"
            " hardware delivered.",
            bad="HFU far above MFU: activations are computed twice; MFU above OFU: the job counts wrongly",
            do="recompute selectively; check the job's count of FLOPs and its dtype",
            queries=(
                Query(_of("job:gpu_efficiency_reported_mfu:ratio_rate5m"), legend="MFU, told"),
                Query(_of("job:gpu_efficiency_reported_hfu:ratio_rate5m"), legend="HFU, told"),
                Query(_of("job:gpu_efficiency_ofu:ratio_rate5m"), legend="OFU, measured"),
            ),
            width=6,
            height=8,
            empty=_NONE,
        ),
        Panel(
            title="Its time as reported by training",
            kind=Bars(colours=words.PHASES),
            shows="What the program did since it began, as it tells: compute, communication and bubble are goodput, the"
            " rest is not. Restarts are in it.",
            bad="anything but compute that is long",
            do="rework and restore: checkpoint more often; data: more loader workers; checkpoint: save asynchronously",
            queries=(
                Query(
                    f"sort_desc(sum by (cluster, phase) ({_PHASES})"
                    f" / on (cluster) group_left () (sum by (cluster) ({_PHASES}) > 0) > 0)",
                    legend="{{phase}}",
                ),
            ),
            unit="percentunit",
            decimals=1,
            width=6,
            height=8,
            empty=_MUTE,
            fills="rework",
        ),
        Panel(
            title="Loss",
            kind=Lines(colours={"loss": words.EXPECTED}, bottom=None),
            shows="The latest loss that was reported.",
            bad="spikes, a plateau, or a gap: NaN is not drawn",
            do="see spikes and rollbacks in the table below; fall back to the checkpoint before",
            queries=(Query(f"max by (cluster) ({_of('gpu_efficiency_job_loss')})", legend="loss"),),
            unit="none",
            width=6,
            height=8,
            empty=_MUTE,
            fills="rework",
        ),
        Panel(
            title="Steps and checkpoints",
            kind=Table(
                (
                    Column(of="A", title="Steps", unit="none", decimals=0, width=65),
                    Column(of="B", title="Steps repeated", unit="none", decimals=0, width=112),
                    Column(of="C", title="Goodput", unit="percentunit", decimals=1, width=75),
                    Column(of="D", title="Checkpoints", unit="none", decimals=0, width=102),
                    Column(of="E", title="One takes", unit="s", decimals=1, width=80),
                    Column(of="F", title="All cost", unit="short", decimals=2, width=70),
                    Column(of="currency", title="In", width=45),
                )
            ),
            shows="Since the job began: steps and those it had made before, goodput over the whole run, checkpoints"
            " with the mean time of one and the money of all.",
            bad="steps made twice; checkpoints of minutes, or none for hours",
            do="checkpoint often, asynchronously and in shards",
            queries=(
                _count("steps"),
                _count("rework_steps"),
                Query(_one("job:gpu_efficiency_reported_goodput:ratio")),
                _count("checkpoints"),
                Query(_one("job:gpu_efficiency_checkpoint:mean_seconds")),
                Query(_latest("max by (cluster, currency)", "job:gpu_efficiency_checkpoint:cost")),
            ),
            unit="none",
            width=12,
            height=3,
            empty=_MUTE,
            fills="checkpoint",
        ),
        Panel(
            title="Failures",
            kind=Table(
                (
                    Column(of="A", title="Restarts", unit="none", decimals=0, width=72),
                    Column(of="B", title="To recover", unit="s", decimals=0, width=85),
                    Column(of="C", title="Loss spikes", unit="none", decimals=0, width=92),
                    Column(of="D", title="NaN losses", unit="none", decimals=0, width=90),
                    Column(of="E", title="Rollbacks", unit="none", decimals=0, width=80),
                    Column(of="F", title="Slowest rank", unit="none", decimals=2, width=98),
                )
            ),
            shows="Since the job began: restarts, with the mean time from the last new step before one to the first new"
            " step after it; what broke a smooth loss; and how many times as long as"
            " the middle rank the slowest works on a step.",
            bad="minutes to recover; rollbacks; a slowest rank above 1.1",
            do="restart in place; keep spare nodes; checkpoint more often",
            queries=(
                _count("restarts"),
                Query(_one("job:gpu_efficiency_time_to_recover:mean_seconds")),
                _count("loss_events", 'event="spike"'),
                _count("loss_events", 'event="not_finite"'),
                _count("loss_events", 'event="rollback"'),
                Query(_one("job:gpu_efficiency_step_spread:ratio")),
            ),
            unit="none",
            width=12,
            height=3,
            empty=_MUTE,
            fills="rework",
        ),
    ),
    folded=True,
)

_LATENCIES = {"p50": words.EXPECTED, "p95": words.WATCH, "p99": words.BAD}


def _latency(kind: str, title: str, *, shows: str, bad: str, do: str) -> Panel:
    return Panel(
        title=title, kind=Lines(colours=_LATENCIES), shows=shows, bad=bad, do=do,
        queries=(Query(_of("job:gpu_efficiency_latency:seconds", f'kind="{kind}"'), legend="{{percentile}}"),),
        width=6, height=8, empty=_NO_ENGINE, fills="kv_cache_pressure",
    )  # fmt: skip


_SERVES = Row(
    "If it serves",
    (
        _latency(
            "ttft", "Time to first token",
            shows="Latency of the slowest replica to the first token, at the 50th, 95th and 99th percentile.",
            bad="p99 beyond what users were promised", do="chunked prefill; more replicas; see the queue beside it",
        ),
        _latency(
            "itl", "Time between tokens",
            shows="Latency of the slowest replica between two tokens, at the 50th, 95th and 99th percentile.",
            bad="p99 far above p50: prefills of others stand between", do="chunked prefill; other GPUs for prefill",
        ),
        Panel(
            title="Utilisation beside it",
            kind=Lines(
                top=1,
                colours={
                    "batch fill": words.EXPECTED, "KV cache": words.WATCH, "memory bandwidth": words.LAYERS["ectr"],
                    "OFU": words.GOOD,
                },
            ),
            shows="Slots of the batch in use, KV cache of the fullest replica, memory bandwidth use by the engine's own"
            " estimate, and the share of the peak delivered.",
            bad="latency rises while the batch is not full; KV cache at 95 % and above",
            do="batch not full: raise its limit; KV cache full: quantise it or add a replica",
            queries=(
                Query(_of("job:gpu_efficiency_batch_fill:ratio"), legend="batch fill"),
                Query(_of("job:gpu_efficiency_kv_cache:ratio"), legend="KV cache"),
                Query(_of("job:gpu_efficiency_mbu:ratio"), legend="memory bandwidth"),
                Query(
                    f"{_of('job:gpu_efficiency_ofu:ratio_rate5m')}"
                    f" and on (cluster, job_id) {_of('job_state:gpu_efficiency_requests')}",
                    legend="OFU",
                ),
            ),
            width=6,
            height=8,
            empty=_NO_ENGINE,
            fills="kv_cache_pressure",
        ),
        Panel(
            title="Requests",
            kind=Lines(colours={"running": words.GOOD, "waiting": words.WATCH}),
            shows="Requests of all its replicas: in their batches, and waiting for a place.",
            bad="waiting while the batch is not full",
            do="see the panel beside it for what is full",
            queries=(
                Query(
                    f'label_replace({_of("job_state:gpu_efficiency_requests")}, "are", "$1", "state", "(.*)")',
                    legend="{{are}}",
                ),
            ),
            unit="none",
            width=6,
            height=8,
            empty=_NO_ENGINE,
            fills="kv_cache_pressure",
        ),
        Panel(
            title="The engine",
            kind=Table(
                (
                    Column(of="engine", title="Engine"),
                    Column(of="B", title="Tokens/s", unit="none", decimals=0, width=115),
                    Column(of="C", title="Tokens for one", unit="short", decimals=1, width=115),
                    Column(of="currency", title="In", width=50),
                    Column(of="D", title="Queue p95", unit="s", decimals=2, width=115),
                    Column(of="E", title="Whole p95", unit="s", decimals=2, width=115),
                    Column(of="F", title="Preempted/min", unit="none", decimals=1, width=115),
                    Column(of="G", title="Drafts accepted", unit="percentunit", decimals=0, width=120),
                    Column(of="H", title="Tokens a pass", unit="none", decimals=2, width=115),
                )
            ),
            shows="Tokens it generates, how many for a unit of money, waiting and whole time of a request at the 95th"
            " percentile, requests put out of the batch, drafts accepted, and tokens a sequence gains at each pass.",
            bad="preemptions; drafts accepted below a half; tokens a pass of 1 where few requests run",
            do="give the KV cache more memory; shorten drafts, or try them",
            queries=(
                Query(f"max by (cluster, engine) ({_of('gpu_efficiency_job_engine_info')})"),
                Query(f"max by (cluster) ({_of('job:gpu_efficiency_generated_tokens:rate5m')})"),
                Query(f"max by (cluster, currency) ({_of('job:gpu_efficiency_generated_tokens:per_cost_rate5m')})"),
                Query(f"max by (cluster) ({_of('job:gpu_efficiency_latency:seconds', _QUEUE, _P95)})"),
                Query(f"max by (cluster) ({_of('job:gpu_efficiency_latency:seconds', _WHOLE, _P95)})"),
                Query(f"60 * max by (cluster) ({_of('job:gpu_efficiency_preemptions:rate5m')})"),
                Query(f"max by (cluster) ({_of('job:gpu_efficiency_draft_acceptance:ratio_rate5m')})"),
                Query(f"max by (cluster) ({_of('job:gpu_efficiency_tokens_per_pass:ratio_rate5m')})"),
            ),
            unit="none",
            width=24,
            height=3,
            empty=_NO_ENGINE,
            fills="kv_cache_pressure",
        ),
    ),
    folded=True,
)  # fmt: skip

_JOB_GPUS = at("job:gpu_efficiency_gpus")


def _large(name: str, more: str = "") -> str:
    return f"max by (cluster, job_id{more}) ({at(name)} and on (cluster, job_id) topk(20, {_JOB_GPUS}))"


_FIND = Row(
    "Find a job",
    (
        Panel(
            title="The largest jobs that run now",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=TO_JOB, width=150),
                    Column(of="name", title="Name", width=150),
                    Column(of="user", title="User", width=90),
                    Column(of="account", title="Account", link=_TO_ACCOUNT, width=110),
                    Column(of="team", title="Team", link=_TO_TEAM, width=110),
                    Column(of="workload_class", title="Kind", width=90),
                    Column(of="A", title="GPUs", unit="none", decimals=0, bar=words.EXPECTED, width=140),
                    Column(of="B", title="Lost an hour", unit="short", decimals=2, width=98),
                    Column(of="currency", title="In", width=60),
                    Column(of="C", title="Useful", unit="percentunit", decimals=1, width=75),
                    Column(of="cluster", title="Cluster"),
                ),
                sort="A",
            ),
            shows="The twenty jobs with most GPUs now, what they lose an hour, and how much of it is useful.",
            bad="a large job with a low useful share",
            do="click on the job's number: this board shows it",
            queries=(
                Query(
                    f"topk(20, {_JOB_GPUS}) * on (cluster, job_id) group_left"
                    f" (name, user, account, team, workload_class) {at('job:gpu_efficiency_info')}"
                ),
                Query(_large("job:gpu_efficiency_cost_lost:per_hour", ", currency")),
                Query(_large("job:gpu_efficiency_product:ratio_rate5m")),
            ),
            unit="none",
            width=24,
            height=12,
            empty="no job runs",
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="job",
    title="Job",
    says="For the owner of one job and whoever helps: who it is, what it costs and loses, whether it is alive, what to"
    " do first, and how long yet.",
    variables=(ITS_CLUSTER, JOB, JOB_INSTANCES),
    rows=(_FIND, _RECEIPT, _LEAKS, _ALIVE, _TROUBLE_ROW, _CURVES, _VARIANCE, _TRAINS, _SERVES),
    since="now-6h",
)
