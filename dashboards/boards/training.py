"""For those who train: what training loses, to which leak, whose it is; how runs run, scale, save and fail."""

from dashboards import bands, words
from dashboards.leak_table import table, waterfall
from dashboards.leaks import rows
from dashboards.losses import COST, INFO, LAYERS, TRAINING, choice
from dashboards.parts import Board, Column, Figure, Lines, Panel, Query, Row, Table
from dashboards.series import CLUSTER, TO_JOB, TO_NODE, a_month, at, latest, of_layers, total
from dashboards.watching import SPREAD, spread

_NONE = "no training job seen"
_SILENT = "no job reports: see docs/training-jobs.md"
_P50 = 'spread="p50"'
_LOSSES = 'layer=~"gau|ectr|emfu"'
_REPORTED = "class:gpu_efficiency_reported:gpus"
_NAMED = f"* on (cluster, job_id) group_left (name, user) {at(INFO)}"


def _layer(which: str, title: str, shows: str) -> Panel:
    low, high = bands.TRAINING[which]
    return Panel(
        title=title, kind=Figure(steps=bands.judged(bands.TRAINING[which])),
        shows=f"{shows} Of training jobs alone, over the time shown. Most fleets: {low:.0%} to {high:.0%}.",
        bad=f"below {low:.0%}", do="take the longest bar of that layer below",
        queries=(Query(of_layers("class", which, TRAINING.where)),),
        unit="percentunit", decimals=1, width=3, height=4, empty=_NONE,
    )  # fmt: skip


_FIRST = Row(
    "What training gets for what it holds",
    (
        Panel(
            title="Useful",
            kind=Figure(steps=bands.judged(bands.TRAINING["product"])),
            shows="Share of the seen GPU time of training jobs that moved a model, in terms of the hardware's peak.",
            bad="below 14 %",
            do="take the longest bar below that is not green",
            queries=(Query(of_layers("class", "floor", TRAINING.where)),),
            unit="percentunit",
            decimals=1,
            width=3,
            height=4,
            empty=_NONE,
        ),
        _layer("gau", "GAU", "Held and working / seen."),
        _layer("ectr", "ECTR", "Computing / held and working."),
        _layer("emfu", "eMFU", "Useful / computing."),
        Panel(
            title="Lost",
            kind=Figure(named=True, steps=((None, words.BAD),)),
            shows="What training jobs lose, in money a month (730 h) at the mean rate of the time shown.",
            bad="more than what is useful costs",
            do="begin with the dearest row of the table below",
            queries=(Query(a_month(COST, TRAINING.where, _LOSSES, by="currency"), legend="{{currency}} a month"),),
            decimals=0,
            width=3,
            height=4,
            empty=_NONE,
        ),
        Panel(
            title="Goodput",
            kind=Figure(steps=((None, words.BAD), (0.8, words.WATCH), (0.9, words.GOOD))),
            shows="Of a job's seen time since its start the share not spent on being ready: starting, saving, hanging,"
            " recovering, repeating. The median of batch jobs now, by the ledger.",
            bad="below 90 % for long runs",
            do="choose leak 5 at the top: failures and recovery",
            queries=(Query(f"max({latest('class_spread:gpu_efficiency_goodput:ratio', TRAINING.alike, _P50)})"),),
            unit="percentunit",
            decimals=1,
            width=3,
            height=4,
            empty=_NONE,
        ),
        Panel(
            title="MFU",
            kind=Figure(steps=((None, words.BAD), (0.3, words.EXPECTED), (0.5, words.GOOD))),
            shows="Model FLOPs Utilization by the jobs' own count; the median of those that report, now.",
            bad="below 30 % for dense models",
            do="open the job: its waterfall says where the rest went",
            queries=(Query(f"max({latest('cluster_spread:gpu_efficiency_reported_mfu:ratio_rate5m', _P50)})"),),
            decimals=1,
            width=3,
            height=4,
            empty="no report",
        ),
        Panel(
            title="Reports",
            kind=Figure(steps=((None, words.UNKNOWN), (0.01, words.WATCH), (0.9, words.GOOD))),
            shows="Share of the GPU time of training jobs that report their steps and phases. Bubbles, recomputation,"
            " padding and repeated steps of the others are not seen, and count as something else.",
            bad="below 90 %: those leaks are larger than shown",
            do="add the reporter to the training loop: docs/training-jobs.md",
            queries=(
                Query(
                    f"clamp_max(({total(_REPORTED, TRAINING.where)} or 0 * {total(LAYERS, TRAINING.where)})"
                    f" / ({total(LAYERS, TRAINING.where)} > 0), 1)"
                ),
            ),
            unit="percentunit",
            decimals=0,
            width=3,
            height=4,
            empty=_NONE,
        ),
    ),
)

_LEAKS = Row("Where it goes", (table(TRAINING, width=24, height=17),))
_CHOSEN, _WATCHED = rows(TRAINING)

_RUNS = Row(
    "Where 100 hours went, and how different jobs are",
    (
        waterfall(TRAINING, width=8, height=11),
        Panel(
            title="Useful, across jobs",
            kind=Lines(colours=SPREAD, top=1),
            shows="GAU x ECTR x eMFU of batch jobs: the 10th, 50th and 90th percentile of them, each counted once.",
            bad="p90 far above p50: some know how, the others do not",
            do="compare a job near p90 with one near p10 on their boards",
            queries=spread("job:gpu_efficiency_product:ratio_rate5m", TRAINING),
            width=8,
            height=11,
            empty=_NONE,
        ),
        Panel(
            title="Goodput, across jobs",
            kind=Lines(
                colours=SPREAD | {"p50 by the jobs' word": words.GOOD}, top=1, dashed=("p50 by the jobs' word",)
            ),
            shows="Share of the time since a job's start that was not spent on being ready, by the ledger; beside it"
            " the median of what jobs say of themselves: time in new steps.",
            bad="p10 below 80 %: some runs fail, save or repeat too often",
            do="choose leak 5 at the top: failures and recovery",
            queries=(
                *spread("job:gpu_efficiency_goodput:ratio", TRAINING),
                Query(
                    f"max({latest('cluster_spread:gpu_efficiency_reported_goodput:ratio', _P50)})",
                    "p50 by the jobs' word",
                ),
            ),
            unit="percentunit",
            width=8,
            height=11,
            empty=_NONE,
        ),
    ),
)

_GPUS = "job:gpu_efficiency_gpus"
_TOKENS, _SAMPLES = "job:gpu_efficiency_tokens:per_gpu_second_rate5m", "job:gpu_efficiency_samples:rate5m"


def _of(name: str, worst: str) -> Query:
    return Query(f"max by (cluster, job_id) ({at(name)}) and on (cluster, job_id) {worst}")


def _scaling() -> Panel:
    largest = f"topk(12, {at(_GPUS)} and on (cluster, job_id) {at('job:gpu_efficiency_steps:rate5m')})"
    return Panel(
        title="Scaling: the largest jobs that report",
        kind=Table(
            (
                Column(of="job_id", title="Job", link=TO_JOB, width=110),
                Column(of="name", title="Name"),
                Column(of="A", title="GPUs", unit="none", decimals=0, width=65),
                Column(of="B", title="Tokens a GPU-s", unit="short", decimals=1, width=130),
                Column(of="C", title="MFU", unit="percentunit", decimals=1, width=75),
                Column(of="D", title="HFU", unit="percentunit", decimals=1, width=75),
                Column(of="E", title="Padding", unit="percentunit", decimals=1, width=80),
                Column(of="F", title="Slowest rank", unit="none", decimals=2, width=110),
            ),
            sort="A",
        ),
        shows="Throughput of each GPU: of two jobs of one model the quotient of their tokens a GPU-second is scaling"
        " efficiency. Slowest rank: how much longer it works on a step than the middle one."
        " 1.2 costs all a sixth.",
        bad="fewer tokens a GPU-second at more GPUs; a slowest rank above 1.1",
        do="keep tensor parallelism inside the NVLink domain, overlap communication, find the straggler",
        queries=(
            Query(f"{largest} {_NAMED}"),
            _of(_TOKENS, largest),
            _of("job:gpu_efficiency_reported_mfu:ratio_rate5m", largest),
            _of("job:gpu_efficiency_reported_hfu:ratio_rate5m", largest),
            _of("job:gpu_efficiency_padding:ratio_rate5m", largest),
            _of("job:gpu_efficiency_step_spread:ratio", largest),
        ),
        width=16,
        height=9,
        empty=_SILENT,
    )


def _saving() -> Panel:
    dearest = (
        f"topk(12, {at('job:gpu_efficiency_checkpoint:cost')} > 0 and on (cluster, job_id) {at(INFO, TRAINING.alike)})"
    )
    return Panel(
        title="Checkpoints and restarts",
        kind=Table(
            (
                Column(of="job_id", title="Job", link=TO_JOB, width=110),
                Column(of="name", title="Name"),
                Column(of="A", title="Checkpoints cost", unit="short", decimals=2, width=150),
                Column(of="currency", title="Currency", width=80),
                Column(of="B", title="One takes", unit="s", decimals=1, width=90, empty="not told"),
                Column(of="C", title="Restarts", unit="none", decimals=0, width=80, empty="not told"),
                Column(of="D", title="To recover", unit="s", decimals=0, width=90),
                Column(of="E", title="New steps", unit="percentunit", decimals=1, width=85, empty="not told"),
            ),
            sort="A",
        ),
        shows="Since each job's start: what its waiting for checkpoints has cost, how long one takes, how often it was"
        " restarted and how long it took to make new steps again, and the share of its steps that were new.",
        bad="checkpoints that cost more than what restarts repeat; steps made twice",
        do="save asynchronously and in shards; as often as sqrt(2 x time of one x mean time between failures)",
        queries=(
            Query(f"{dearest} {_NAMED}"),
            _of("job:gpu_efficiency_checkpoint:mean_seconds", dearest),
            _of("job:gpu_efficiency_restarts", dearest),
            _of("job:gpu_efficiency_time_to_recover:mean_seconds", dearest),
            _of("job:gpu_efficiency_progress:ratio", dearest),
        ),
        width=14,
        height=9,
        empty=_NONE,
    )


_MFU = Panel(
    title="MFU and HFU, across jobs",
    kind=Lines(colours=SPREAD | {"HFU p50": words.GOOD}, dashed=("HFU p50",)),
    shows="Model FLOPs Utilization by the jobs' own count, across those that report; the median of HFU, which"
    " counts recomputed FLOPs too. What lies between is recomputation.",
    bad="HFU well above MFU; MFU below 30 %",
    do="see rows 8 and 1",
    queries=(
        *spread("job:gpu_efficiency_reported_mfu:ratio_rate5m", TRAINING),
        Query(f"max({latest('cluster_spread:gpu_efficiency_reported_hfu:ratio_rate5m', _P50)})", legend="HFU p50"),
    ),
    width=8,
    height=9,
    empty=_SILENT,
)

_STRAGGLERS = Panel(
    title="Stragglers now",
    kind=Table(
        (
            Column(of="job_id", title="Job", link=TO_JOB, width=100),
            Column(of="node", title="Node", link=TO_NODE),
            Column(of="gpu", title="GPU", width=60),
            Column(of="rank", title="Rank", width=65),
            Column(of="Value", title="Others wait more", unit="percentunit", decimals=0, width=150),
        ),
        sort="Value",
    ),
    shows="Ranks that wait less for their peers than these do for them, by the share of time between.",
    bad="any that stays",
    do="look at its clocks, its links and its data; move it to another node",
    queries=(Query(f"topk(10, {at('job_rank:gpu_efficiency_straggler')})"),),
    width=10,
    height=9,
    empty="no straggler found",
)

_SCALE = Row("Scaling, checkpoints, restarts, stragglers", (_MFU, _scaling(), _saving(), _STRAGGLERS), folded=True)

_DISRUPTIONS = "cluster_cause:gpu_efficiency_disruptions:per_day_1000_gpus"
_PHASES = "job_phase:gpu_efficiency_run:seconds"
_HANGS = 'state="hung"'
_NO_STEPS = 'phase!~"compute|communication|bubble"'

_FAILURES = Row(
    "Failures",
    (
        Panel(
            title="Time to detect, time to recover",
            kind=Figure(named=True),
            shows="Means of the last 24 hours: from the first sign of a hang or a zombie to its state; how long a GPU"
            " stayed hung, which is not shown of a cluster in which one is hung now: it has not recovered.",
            bad="minutes to detect; a hang that lasts until somebody comes to work",
            do="let the alert GPUEfficiencyJobDeadlocked restart the job",
            queries=(
                Query(
                    f"max by (state) ({at('cluster_state:gpu_efficiency_time_to_detect:mean_seconds_1d')})",
                    legend="to detect: {{state}}",
                ),
                Query(
                    f"max({at('cluster:gpu_efficiency_time_to_recover:mean_seconds_1d')} unless on (cluster)"
                    f" {at('job_state:gpu_efficiency_gpus', _HANGS)} > 0)",
                    legend="to recover: hung",
                ),
            ),
            decimals=1,
            width=6,
            height=8,
            empty="no hang or zombie within a day",
        ),
        Panel(
            title="Disruptions a day of 1,000 GPUs",
            kind=Table(
                (
                    Column(of="cause", title="Cause", ours=True),
                    Column(of="Value", title="A day", unit="none", decimals=1, width=110, bar=words.WATCH),
                )
            ),
            shows="Jobs thrown back into the queue or ended by something else than themselves in the last 24 hours, by"
            " cause. Needs `gpu-efficiency cluster`.",
            bad="more than a few node failures",
            do="drain the nodes that fail again and again",
            queries=(Query(f"sort_desc(sum by (cause) ({at(_DISRUPTIONS)}))"),),
            width=8,
            height=8,
            empty="none seen: or gpu-efficiency cluster does not run",
        ),
        Panel(
            title="Run time without new steps, by phase",
            kind=Table(
                (
                    Column(of="phase", title="Phase", words=words.PHASES),
                    Column(of="Value", title="Of run time", unit="percentunit", decimals=1, width=140, bar=words.WATCH),
                )
            ),
            shows="Of the wall time of runs that report, since their start, what was no step or a step made twice.",
            bad="a tenth in any of them",
            do="data: choose data stall at the top; checkpoint, restore, rework: leak 5",
            queries=(
                Query(f"sort_desc(sum by (phase) ({at(_PHASES, _NO_STEPS)}) / on () group_left () sum({at(_PHASES)}))"),
            ),
            unit="percentunit",
            width=10,
            height=8,
            empty=_SILENT,
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="training",
    title="Training leaks",
    says="For those who train: which leak takes most of the GPU time of training jobs, what it costs a month, whose it"
    " is and what to do; how different runs are, how they scale, save and fail.",
    variables=(CLUSTER, choice(TRAINING)),
    rows=(_FIRST, _LEAKS, _CHOSEN, _RUNS, _SCALE, _FAILURES, _WATCHED),
)
