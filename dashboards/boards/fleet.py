"""For the one who pays: how much of it is useful, what the biggest leak is, whose, what it costs, what to do first."""

from collections.abc import Callable

from dashboards import bands, words
from dashboards.losses import LAYERS
from dashboards.owners import BILL, BILLED, to_bill, whose, whose_columns
from dashboards.parts import Board, Column, Figure, Lines, Matrix, Panel, Query, Row, Table
from dashboards.series import (
    IN_TROUBLE_SINCE,
    ITS_CLUSTER,
    TO_JOB,
    TO_NODE,
    a_month,
    at,
    hours,
    in_words,
    of_layers,
    over,
    part,
    product,
    ratio,
    to,
    total,
)
from dashboards.small_fleet import FIX, LEAK, ROLE, SMALL_FLEET
from dashboards.unbilled import NOBODY, named, nobodys_hours, nobodys_loss, nobodys_money
from dashboards.unseen import UNSEEN_NODES

_BANDS_SAID = ", ".join(
    f"{name} {100 * low:.0f} to {100 * high:.0f} %"
    for name, (low, high) in zip(("GAU", "ECTR", "eMFU"), bands.TRAINING.values(), strict=False)
)
_LOST: tuple[tuple[float | None, str], ...] = ((None, words.BAD),)
_PAID = "cluster:gpu_efficiency_cost_paid:per_hour"
_LEAK_COST = "cluster_leak:gpu_efficiency_cost:per_hour"
_ENERGY_COST = "cluster_layer:gpu_efficiency_energy_cost:per_hour"
_CARBON = "cluster_layer:gpu_efficiency_co2:grams_per_hour"
_WEEK_AGO = "$__range offset 7d"
_LOSSES = 'layer=~"gau|ectr|emfu"'
_IN_TROUBLE = 'state=~"hung|zombie"'
_TROUBLE = f"({at('job_state:gpu_efficiency_gpus', _IN_TROUBLE)} > 0)"
_WHOSE = f"* on (cluster, job_id) group_left (name, user, team, account) {at('job:gpu_efficiency_info')}"
_THE_TEAM = to("chargeback", "The team's board", team=BILLED)
_NO_SCRAPE = "nothing seen yet"


_SERVE = bands.most(total(LAYERS, bands.OF_SERVERS), total(LAYERS))
_JUDGED = {"gau": "GAU working", "ectr": "x ECTR computing", "emfu": "x eMFU FLOPs"}


def _product() -> tuple[Query, ...]:
    """The three factors and what they make, with their signs; beside it what the driver has for use."""
    shown = {which: (ratio("cluster", which), name) for which, name in _JUDGED.items()}
    shown["product"] = product("cluster"), "= useful"
    return (
        *(query for which, (expr, name) in shown.items() for query in bands.by_class(expr, which, _SERVE, legend=name)),
        Query(ratio("cluster", "kernel_utilization"), "nvidia-smi shows", steps=((None, words.UNKNOWN),)),
    )


_HIGH = bands.TRAINING["product"][1]


_NO_TEAM, _FREE = "jobs without a team", "nobody: "
_NO_OWNER = f"{_NO_TEAM}|{_FREE}.*"
_BIGGEST = f"topk(3, {a_month(_LEAK_COST, _LOSSES, by='leak, currency')})"
_BY_TEAM = hours("owner_leak:gpu_efficiency_cost:per_hour", _LOSSES, by="leak, currency, team")
_UNHELD = "cluster_leak:gpu_efficiency_cost_unheld:per_hour"
_HELD_BY_NONE = " or ".join(
    named("team", _FREE + said, hours(_UNHELD, f'leak="{leak}"', by="leak, currency")) for leak, said in NOBODY.items()
)
_MOSTLY = (
    f'topk by (leak, currency) (1, label_replace({_BY_TEAM}, "team", "{_NO_TEAM}", "team", "")'
    f" or {_HELD_BY_NONE}) and on (leak, currency) {_BIGGEST}"
)
"""The team whose jobs a leak takes most from, unless it takes more from GPUs that nobody holds."""

_ANSWER = Row(
    "What we get for what we pay",
    (
        Panel(
            title="What we get",
            kind=Figure(named=True),
            shows="GAU x ECTR x eMFU over the time shown: the share of the GPU time that advanced a model, in terms of"
            " the hardware's dense peak. Where no job reports, it is the hardware's upper bound.",
            bad="less than 14 % useful where most GPU time is training's (most such fleets: 20 to 25 %), less than 3 %"
            " where most is of servers",
            do="give the biggest leak, below, to the role that acts",
            queries=bands.by_class(
                f"100 * ({product('cluster')})", "product", _SERVE, legend="of the GPU time seen", times=100
            ),
            unit="suffix:% useful",
            decimals=1,
            width=8,
            height=5,
            empty=_NO_SCRAPE,
        ),
        Panel(
            title="Cost at the rate of the time shown",
            kind=Figure(named=True),
            shows="A month of 730 hours at the mean rate of the time shown: what all leaks together take, and what the"
            " GPUs cost, silent nodes included. Without a price table it is GPU-hours.",
            bad="more than three quarters of what is paid is lost",
            do="begin with the biggest leak; configure prices where it says GPU-hours",
            queries=(
                Query(a_month(_LEAK_COST, _LOSSES, by="currency"), "{{currency}}", "si: lost a month", _LOST),
                Query(a_month(_PAID, by="currency"), "of {{currency}}", "si: paid a month"),
            ),
            decimals=1,
            width=16,
            height=5,
            empty="no price seen",
        ),
        Panel(
            title="GAU x ECTR x eMFU = useful",
            kind=Figure(named=True),
            shows="GPU Allocation Utilization: held by a job that works / seen. Effective Compute Time Ratio: computing"
            " / allocated and working. Effective Model FLOPs Utilization: useful / computing. Their product is what you"
            " got. nvidia-smi: paid time with any kernel on the GPU, as the driver's utilisation has it; a kernel that"
            f" only waits for a peer counts in full. Blue: {_BANDS_SAID}, where most fleets that train are; the three"
            " are not judged where most GPU time is of servers.",
            bad="an orange factor; the gap between nvidia-smi and useful is what nvidia-smi hides",
            do="lowest GAU: reclaim zombies, backfill the queue (board Zombies and deadlocks); ECTR: data stalls,"
            " checkpoints, host overhead, hangs (board Training leaks); eMFU: bigger batches, fused kernels, fewer"
            " bubbles (boards Training leaks and Inference leaks)",
            queries=_product(),
            unit="percentunit",
            decimals=1,
            width=24,
            height=4,
            empty=_NO_SCRAPE,
        ),
        Panel(
            title="The biggest leaks",
            kind=Table(
                (
                    LEAK,
                    Column(of="A", title="A month", unit="short", decimals=1, width=85),
                    Column(of="currency", title="In", width=48),
                    Column(of="team", title="Mostly of team", link=_THE_TEAM, width=138),
                    BILL,
                    ROLE,
                    FIX,
                ),
                sort="A",
            ),
            shows="The three leaks that cost most a month (730 h) at the mean rate of the time shown, the team from"
            " whose jobs each takes most, which role can usually act on it (where the team cannot: platform), and what"
            " to do first.",
            bad="one that costs more than what is useful",
            do="give the first row to the team it is mostly of; with free GPUs to the role that acts",
            queries=(Query(in_words("fix", in_words("role", _BIGGEST))), Query(to_bill("team", _MOSTLY, _NO_OWNER))),
            width=24,
            height=5,
            empty="no price seen: the table below has the hours",
        ),
    ),
)

_NOW = Row(
    "Who hangs, who holds GPUs for nothing, and what is not seen, now",
    (
        Panel(
            title="Hung and zombie GPUs now: whose they are, dearest first",
            kind=Table(
                (
                    Column(of="state", title="State", words=words.STATES, width=85, link=to("zombies", "Who to call")),
                    Column(of="user", title="Owner", width=90),
                    *whose_columns("Owner's team", 120),
                    Column(of="name", title="Name of the jobs"),
                    Column(of="C", title="Jobs", unit="none", decimals=0, width=60),
                    Column(of="job_id", title="Job, or the largest", link=TO_JOB, width=148),
                    Column(of="A", title="GPUs", unit="none", decimals=0, width=60),
                    Column(of="B", title="An hour", unit="short", decimals=2, bar=words.BAD, width=140),
                    Column(of="currency", title="In", width=60),
                    Column(of="D", title="For", unit="s", decimals=1, width=100),
                ),
                sort="B",
            ),
            shows="Hung and zombie GPUs, together for the jobs of a user in a cluster that have the same name: what"
            " they cost an hour, and for how long the first of them has been spinning, or without work.",
            bad="a row",
            do="call the owner, and where nobody answers the platform team, which can cancel the jobs; the board"
            " Zombies and deadlocks has each job and its runbook",
            queries=(
                Query(whose(f"sum by (cluster, state, user, team, account, name) ({_TROUBLE} {_WHOSE})")),
                Query(
                    f"sum by (cluster, state, user, team, account, name, currency) ({_TROUBLE}"
                    f" / on (cluster, job_id) group_left () {at('job:gpu_efficiency_gpus')}"
                    f" * on (cluster, job_id) group_left (currency) {at('job:gpu_efficiency_price:per_hour')} {_WHOSE})"
                ),
                Query(f"count by (cluster, state, user, team, account, name) ({_TROUBLE} {_WHOSE})"),
                Query(
                    f"max by (cluster, state, user, team, account, name) (({_TROUBLE} > bool 0)"
                    f" * on (cluster, job_id) group_left () (time() - {IN_TROUBLE_SINCE}) {_WHOSE})"
                ),
                Query(f"topk by (cluster, state, user, team, account, name) (1, {_TROUBLE} {_WHOSE})"),
            ),
            unit="none",
            width=24,
            height=6,
            empty="of what is seen no job hangs, and none is a zombie",
        ),
        Panel(
            title="Coverage",
            kind=Figure(steps=((None, words.BAD), (0.95, words.WATCH), (0.99, words.GOOD)), named=True),
            shows="Share of the time of all GPUs owned that was seen, now. What was not seen is in none of the ratios.",
            bad="below 95 %: the other figures speak of a part of the fleet",
            do="see the nodes beside it",
            queries=(
                Query(
                    f"sum({at('cluster:gpu_efficiency_coverage:ratio_rate5m')}"
                    f" * {at('cluster:gpu_efficiency_owned:gpus')}) / sum({at('cluster:gpu_efficiency_owned:gpus')})",
                    legend="of all GPUs owned",
                ),
            ),
            unit="percentunit",
            decimals=1,
            width=4,
            height=5,
            empty="no exporter heard",
        ),
        UNSEEN_NODES,
    ),
)


def _share(*where: str) -> str:
    return (
        f"100 * {total('cluster_leak:gpu_efficiency_seconds:rate5m', *where, by='leak')}"
        f" / on () group_left () ({total(part('cluster', 'paid'))} > 0)"
    )


_WATERFALL = Row(
    "Where 100 GPU-hours went",
    (
        Panel(
            title="Of 100 GPU-hours paid",
            kind=Table(
                (
                    LEAK,
                    Column(of="A", title="Of 100 h", unit="none", decimals=1, width=130, bar=words.UNKNOWN),
                    Column(of="B", title="Cost of these", unit="short", decimals=2, width=106),
                    Column(of="C", title="A month", unit="short", decimals=1, width=90),
                    Column(of="currency", title="In", width=60),
                    ROLE,
                    FIX,
                ),
                sort="A",
            ),
            shows="Where 100 paid GPU-hours went over the time shown; all rows together are 100. What these hours cost,"
            " and what that is a month (730 h) at the mean rate; of a loss also which role usually acts, and what it"
            " does first. Warm: allocation losses (GAU); purple: compute-time losses (ECTR); blue: model-FLOPs losses"
            " (eMFU); green: useful; grey: not known.",
            bad="a loss above useful",
            do="give the first loss to who acts on it; its metric to watch is on the board Training leaks or Inference"
            " leaks",
            queries=(
                Query(in_words("fix", in_words("role", _share()))),
                Query(
                    f"100 * sum by (leak, currency) ({over(_LEAK_COST)})"
                    f" / on () group_left () ({total(part('cluster', 'paid'))} > 0)"
                ),
                Query(a_month(_LEAK_COST, by="leak, currency")),
            ),
            width=24,
            height=18,
            empty=_NO_SCRAPE,
        ),
    ),
)


def _of_layer(layer: str) -> str:
    return f'layer="{layer}"'


def _compared(which: str, title: str, time: str) -> str:
    expr = product("cluster", time=time) if which == "product" else ratio("cluster", which, time=time)
    return f'label_replace({expr}, "what", "{title}", "", "")'


_FACTORS = {"product": "useful", "gau": "GAU", "ectr": "ECTR", "emfu": "eMFU", "kernel_utilization": "nvidia-smi"}

_Amount = Callable[[str], str]
"""The time that it is asked for -> GPU-hours or money in that time."""


def _hours_in(*args: str, by: str = "") -> _Amount:
    return lambda time: hours(*args, by=by, time=time)


_AMOUNTS = (
    ("useful", _hours_in(part("cluster", "useful"))),
    ("lost", _hours_in("cluster_leak:gpu_efficiency_seconds:rate5m", _LOSSES)),
    ("paid", _hours_in(part("cluster", "paid"))),
    ("lost", _hours_in(_LEAK_COST, _LOSSES, by="currency")),
    ("paid", _hours_in(_PAID, by="currency")),
    ("paid for energy", _hours_in(_ENERGY_COST, by="currency")),
)


def _amounts(expr: Callable[[_Amount], str]) -> str:
    """A row of each: what it is, and in what it is counted."""
    rows = (named("what", what, f"({expr(amount)})") for what, amount in _AMOUNTS)
    counted = f'label_replace({" or ".join(rows)}, "in", "$1", "currency", "(.+)")'
    return f'label_replace({counted}, "in", "GPU-hours", "in", "")'


_TREND = Row(
    "Over time",
    (
        Panel(
            title="GPUs by what they did",
            kind=Lines(
                stacked=True, colours={words.LAYER_WORDS[layer]: colour for layer, colour in words.LAYERS.items()}
            ),
            shows="All GPUs that were heard, by layer: useful at the bottom, then what each layer lost.",
            bad="a warm or purple band that grows",
            do="open the waterfall for that time: choose it here, the bars above follow",
            queries=tuple(
                Query(
                    f"sum({at('cluster_leak:gpu_efficiency_seconds:rate5m', _of_layer(layer))})"
                    f" or 0 * sum({at(part('cluster', 'paid'))})",
                    legend=words.LAYER_WORDS[layer],
                )
                for layer in ("useful", "emfu", "ectr", "gau", "unresolved", "unobserved")
            ),
            unit="none",
            width=8,
            height=9,
        ),
        Panel(
            title="Useful, against a week ago",
            kind=Lines(
                top=1,
                colours={"useful": words.GOOD, "useful, a week ago": words.UNKNOWN, "nvidia-smi": words.WATCH},
                dashed=("useful, a week ago",),
            ),
            shows="The product now, the same seven days earlier, and the kernel utilisation that nvidia-smi shows.",
            bad="useful falls while nvidia-smi stays",
            do="see the figures beside it; which factor moved is in the row Comparisons",
            queries=(
                Query(product("cluster", time=""), legend="useful"),
                Query(product("cluster", time="offset 7d"), legend="useful, a week ago"),
                Query(ratio("cluster", "kernel_utilization", time=""), legend="nvidia-smi"),
            ),
            unit="percentunit",
            width=6,
            height=9,
        ),
        Panel(
            title="Change against a week ago",
            kind=Table(
                (
                    Column(of="what", title="Time shown", width=106),
                    Column(of="A", title="Now", unit="short", decimals=1, width=65),
                    Column(of="B", title="A week ago", unit="short", decimals=1, width=86),
                    Column(of="C", title="Change", unit="short", decimals=1, width=62),
                    Column(of="in", title="In", width=86),
                )
            ),
            shows="GPU-hours and money of the time shown, of the same time seven days earlier, and how much more (or,"
            " with a minus, less) it is now: what was useful, lost in any layer, and paid.",
            bad="useful falls or lost rises while what is paid stays",
            do="look in the changes of that day; the alert GPUEfficiencyRegressed names jobs",
            queries=(
                Query(_amounts(lambda amount: amount("$__range"))),
                Query(_amounts(lambda amount: amount(_WEEK_AGO))),
                Query(_amounts(lambda amount: f"{amount('$__range')} - {amount(_WEEK_AGO)}")),
            ),
            width=10,
            height=9,
            empty="no week of history yet",
        ),
    ),
)

_DEMAND = "cluster:gpu_efficiency_demand:gpus"
_DAYS = {"0": "Mon", "1": "Tue", "2": "Wed", "3": "Thu", "4": "Fri", "5": "Sat", "6": "Sun"}
_BY_HOUR = (
    f"avg by (hour, day) (avg_over_time((sum({at(_DEMAND)}) / sum({at('cluster:gpu_efficiency_owned:gpus')})"
    ' * on () group_left (hour, day) (count_values("hour", hour()) * on () group_left (day)'
    ' count_values("day", (day_of_week() + 6) % 7)))[7d:10m]))'
)
_WITH_NAMES = f'label_replace({_BY_HOUR}, "hour", "0$1", "hour", "(.)")'

_PREEMPTED_BY = "partition, qos, by_partition, by_qos"
_COST = "gpu_efficiency_cluster_preemption_cost_gpu_seconds"


def _preempted(name: str) -> str:
    """What a counter of preemptions grew by in the time shown: one that is younger began at its first value."""
    series = at(f"gpu_efficiency_cluster_{name}_total")
    grown, first = f"increase({series}[$__range])", f"min_over_time({series}[$__range])"
    before = f"last_over_time({series}[1h] offset $__range)"
    counted = f"({grown} + ({first} unless {before}) or {grown} or {first})"
    return f"(sum by ({_PREEMPTED_BY}) (max by (cluster, {_PREEMPTED_BY}) ({counted})) > 0)"


_WANTED = Row(
    "Demand, and who gives way to whom",
    (
        Panel(
            title="Wanted against owned",
            kind=Lines(
                colours={"owned": words.QUIET, "held": words.EXPECTED, "held and queued": words.WATCH},
                dashed=("owned",),
            ),
            shows="GPUs that jobs hold, those and the queue's together, and all that are owned.",
            bad="demand far below owned all week: too many GPUs; far above: too few, or held by nobody who works",
            do="size the fleet by the mean, borrow for the peak",
            queries=(
                Query(f"sum({at('cluster:gpu_efficiency_owned:gpus')})", legend="owned"),
                Query(f"sum({at('cluster:gpu_efficiency_held:gpus')})", legend="held"),
                Query(f"sum({at(_DEMAND)})", legend="held and queued"),
            ),
            width=10,
            height=9,
        ),
        Panel(
            title="Demand, 24 h",
            kind=Figure(named=True),
            shows="Demand of the last 24 hours over what was owned.",
            bad="a mean below 60 %; a peak above 100 % with a low trough",
            do="move batch work into the trough",
            queries=tuple(
                Query(
                    f"sum({at(f'cluster:gpu_efficiency_demand_{which}:gpus_1d')})"
                    f" / sum({at('cluster:gpu_efficiency_owned_mean:gpus_1d')})",
                    legend=which,
                )
                for which in ("peak", "mean", "trough")
            ),
            unit="percentunit",
            decimals=0,
            width=4,
            height=9,
            empty="no day of history yet",
        ),
        Panel(
            title="Queue beside free GPUs",
            kind=Lines(colours={"free": words.GOOD, "queued": words.WATCH}),
            shows="GPUs that pending jobs want, and GPUs that nobody has on nodes that take work. Needs"
            " `gpu-efficiency cluster`.",
            bad="both high at the same time: the free ones do not fit, or a limit holds the queue back",
            do="see the alert GPUEfficiencyLowAllocationWithQueue and its runbook",
            queries=(
                Query(f"sum({at('cluster:gpu_efficiency_free:gpus')})", legend="free"),
                Query(f"sum({at('cluster:gpu_efficiency_queued:gpus')})", legend="queued"),
            ),
            width=10,
            height=9,
            empty="gpu-efficiency cluster does not run",
        ),
        Panel(
            title="Demand by hour of the week (UTC)",
            kind=Matrix(row="day", column="hour", names=_DAYS, top=1.2),
            shows="Mean demand of the last seven days over what is owned, by weekday and hour.",
            bad="dark days beside pale nights: people submit by day what could run at night",
            do="queue batch work for the pale hours; scale servers down in them",
            queries=(Query(_WITH_NAMES),),
            unit="percentunit",
            decimals=0,
            width=24,
            height=9,
            empty="no week of history yet",
        ),
        Panel(
            title="Preemptions: who gave way to whom",
            kind=Table(
                (
                    Column(of="partition", title="Preempted in", width=110),
                    Column(of="qos", title="QOS", width=90),
                    Column(of="by_partition", title="By a job in", width=110),
                    Column(of="by_qos", title="Its QOS", width=90),
                    Column(of="A", title="Times", unit="none", decimals=0, width=60),
                    Column(of="B", title="GPU-hours", unit="short", decimals=1, bar=words.WATCH),
                ),
                sort="B",
            ),
            shows="How often jobs were preempted in the time shown, by the partition and QOS of the job that gave way"
            " and of the one that took its GPUs, and the GPU-hours of their interrupted runs: the work lost at most."
            " Needs `gpu-efficiency cluster`.",
            bad="many GPU-hours: jobs are preempted long after their last checkpoint",
            do="let preemptable jobs checkpoint on the signal of their grace time, or requeue short ones first",
            queries=(Query(_preempted("preemptions")), Query(f"{_preempted('preempted_gpu_seconds')} / 3600")),
            unit="none",
            width=14,
            height=7,
            empty="no preemption was seen, or gpu-efficiency cluster does not run",
        ),
        Panel(
            title="Jobs whose start cost others most",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=TO_JOB),
                    Column(of="partition", title="Partition", width=120),
                    Column(of="A", title="GPU-hours", unit="short", decimals=1, bar=words.WATCH, width=140),
                ),
                sort="A",
            ),
            shows="Of the latest jobs that preempted others, the ten for which most work was lost, at most: that of the"
            " jobs which gave way, and of those that these preempted in turn.",
            bad="a short job that cost others many GPU-hours",
            do="ask whether it had to start at once; lower its QOS, or make its victims checkpoint",
            queries=(Query(f"topk(10, max by (cluster, job_id, partition) ({at(_COST)})) / 3600"),),
            unit="none",
            width=10,
            height=7,
            empty="no preemption was seen, or gpu-efficiency cluster does not run",
        ),
    ),
    folded=True,
)

_TIME = "owner:gpu_efficiency_paid_seconds:rate5m"
_TEAM_PAID, _TEAM_LOST = "owner:gpu_efficiency_cost_paid:per_hour", "owner:gpu_efficiency_cost_lost:per_hour"


def _of_teams(expr: str) -> str:
    """By team; jobs without one are together."""
    return f'label_replace({expr}, "team", "{_NO_TEAM}", "team", "")'


_WORST = Row(
    "Where to begin",
    (
        Panel(
            title="Teams, and what nobody holds",
            kind=Table(
                (
                    Column(of="team", title="Team", link=_THE_TEAM),
                    BILL,
                    Column(of="A", title="GPU-hours", unit="short", decimals=1, width=90),
                    Column(of="B", title="Paid", unit="short", decimals=1, width=65),
                    Column(of="C", title="Lost", unit="short", decimals=1, bar=words.WATCH, width=115),
                    Column(of="currency", title="In", width=45),
                    Column(of="D", title="Useful", unit="percentunit", decimals=1, width=65),
                ),
                sort="C",
            ),
            shows="All GPU-hours of the time shown by the team whose jobs held them, and those that no job held: the"
            " lines add up to all GPUs that are owned. What they cost, how much of that was lost, and of a team the"
            " useful share of its seen time. A price is known of nodes that were heard.",
            bad="much money and a low share; much that nobody holds while jobs wait",
            do="click on the team; free GPUs: see Queue beside free GPUs in the row Demand; not reporting: see GPUs not"
            " seen now, above",
            queries=(
                Query(
                    to_bill(
                        "team", f"({_of_teams(hours(_TIME, by='team'))} or {nobodys_hours('team', _FREE)})", _NO_OWNER
                    )
                ),
                Query(f"{_of_teams(hours(_TEAM_PAID, by='team, currency'))} or {nobodys_money('team', _FREE)}"),
                Query(f"{_of_teams(hours(_TEAM_LOST, by='team, currency'))} or {nobodys_loss('team', _FREE)}"),
                Query(_of_teams(of_layers("owner", "floor", by="team"))),
            ),
            width=13,
            height=12,
            empty=_NO_SCRAPE,
        ),
        Panel(
            title="Jobs that lose most, now",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=TO_JOB, width=150),
                    Column(of="A", title="Lost an hour", unit="short", decimals=1, bar=words.WATCH, width=115),
                    Column(of="currency", title="In", width=48),
                    Column(of="B", title="GPUs", unit="none", decimals=0, width=55),
                    *whose_columns(width=100),
                    Column(of="user", title="User", width=70),
                    Column(of="name", title="Name"),
                ),
                sort="A",
            ),
            shows="Money that running jobs lose an hour at this moment, whose they are, and how many GPUs they hold.",
            bad="a job that loses nearly its whole price",
            do="click on the job",
            queries=(
                Query(whose(f"topk(10, {at('job:gpu_efficiency_cost_lost:per_hour')}) {_WHOSE}")),
                Query(
                    f"{at('job:gpu_efficiency_gpus')} and on (cluster, job_id)"
                    f" topk(10, {at('job:gpu_efficiency_cost_lost:per_hour')})"
                ),
            ),
            width=11,
            height=12,
            empty="no job runs",
        ),
    ),
)

_COMPARED = Row(
    "Comparisons: the week before, GPU models, nodes, the price of a useful hour",
    (
        Panel(
            title="Against the week before",
            kind=Table(
                (
                    Column(of="what", title="Over the time shown"),
                    Column(of="A", title="Now", unit="percentunit", decimals=1, width=80),
                    Column(of="B", title="A week ago", unit="percentunit", decimals=1, width=90),
                )
            ),
            shows="Each factor over the time shown, and over the same time a week earlier.",
            bad="a factor that fell by a tenth or more",
            do="look in the changes of that day; the alert GPUEfficiencyRegressed names jobs",
            queries=(
                Query(" or ".join(_compared(which, title, "$__range") for which, title in _FACTORS.items())),
                Query(" or ".join(_compared(which, title, _WEEK_AGO) for which, title in _FACTORS.items())),
            ),
            unit="percentunit",
            width=8,
            height=8,
            empty="no week of history yet",
        ),
        Panel(
            title="By GPU model",
            kind=Table(
                (
                    Column(of="model", title="Model"),
                    Column(of="A", title="GPUs", unit="none", decimals=0, width=80),
                    Column(of="B", title="GAU", unit="percentunit", decimals=1, width=90),
                    Column(of="C", title="ECTR", unit="percentunit", decimals=1, width=90),
                    Column(of="D", title="eMFU", unit="percentunit", decimals=1, width=90),
                    Column(of="E", title="Useful", unit="percentunit", decimals=1, width=90),
                ),
                sort="A",
            ),
            shows="The three layers within each kind of board over the time shown: a mixed fleet's product is honest"
            " within a kind only.",
            bad="the dearest boards with the lowest share",
            do="move work that does not need them to smaller boards",
            queries=(
                Query(f"sum by (model) (avg_over_time({at(part('model', 'paid'))}[$__range]))"),
                Query(ratio("model", "gau", by="model")),
                Query(ratio("model", "ectr", by="model")),
                Query(ratio("model", "emfu", by="model")),
                Query(product("model", by="model")),
            ),
            width=16,
            height=8,
            empty=_NO_SCRAPE,
        ),
        Panel(
            title="Ten nodes with the least use",
            kind=Table(
                (
                    Column(of="node", title="Node", link=TO_NODE),
                    Column(of="A", title="Useful", unit="percentunit", decimals=1, bar=words.GOOD),
                ),
                sort="A",
                rising=True,
            ),
            shows="Nodes by the share of their seen GPU time that is useful, now.",
            bad="nodes at 0 % that are up",
            do="click on the node",
            queries=(
                Query(
                    f"bottomk(10, {at('node:gpu_efficiency_product:ratio_rate5m')})"
                    f" * on (cluster, instance) group_left (node) {at('node:gpu_efficiency_info')}"
                ),
            ),
            width=8,
            height=8,
            empty=_NO_SCRAPE,
        ),
        Panel(
            title="Weighted with each model's peak",
            kind=Lines(top=1, colours={"useful": words.GOOD, "by GPUs": words.UNKNOWN}, dashed=("by GPUs",)),
            shows="The product weighted with the boards' dense 16-bit peaks, beside the one in which every GPU counts"
            " the same. One cluster at a time.",
            bad="the weighted one is lower: the fast boards are used worst",
            do="see the table beside it",
            queries=(
                Query(at("cluster:gpu_efficiency_product:flops_ratio_rate5m"), legend="useful"),
                Query(at("cluster:gpu_efficiency_product:ratio_rate5m"), legend="by GPUs"),
            ),
            unit="percentunit",
            width=16,
            height=8,
            empty="no model with a known peak",
        ),
        Panel(
            title="A useful hour",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="Money for one GPU-hour at full peak that advanced a model, over the time shown.",
            bad="more than seven times the price of a GPU-hour",
            do="compare it with the price of renting the same",
            queries=(
                Query(
                    f"sum by (currency) ({over(_PAID)}) / on () group_left () ({total(part('cluster', 'useful'))} > 0)",
                    legend="{{currency}}",
                ),
            ),
            decimals=2,
            width=6,
            height=4,
            empty="nothing useful seen",
        ),
        Panel(
            title="Energy a month",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="What the energy of the boards, without hosts and cooling, costs a month (730 h) at the mean rate of"
            " the time shown, where [energy] price_per_kwh is set; and its carbon, where a carbon intensity is. A price"
            " of a GPU-hour may include it.",
            bad="much of what is paid for the GPUs",
            do="end what draws power without work: zombies and stalled jobs",
            queries=(
                Query(a_month(_ENERGY_COST, by="currency"), legend="{{currency}}"),
                Query(f"{a_month(_CARBON)} / 1000", legend="kg of CO2"),
            ),
            width=6,
            height=4,
            empty="no price and no carbon intensity of energy",
        ),
        Panel(
            title=f"Recoverable, if {100 * _HIGH:.0f} % were useful",
            kind=Figure(steps=((None, words.WATCH),), named=True),
            shows="How many GPUs fewer would do the same useful work with each layer at the top of its band"
            f" (85 % x 90 % x 50 % = {100 * _HIGH:.0f} %), as fleets that train can: GPUs seen less useful /"
            f" {_HIGH:g}.",
            bad="more than the next purchase would bring",
            do="recover before buying",
            queries=(
                Query(
                    f"clamp_min(sum(avg_over_time({at(part('cluster', 'observed'))}[$__range]))"
                    f" - sum(avg_over_time({at(part('cluster', 'useful'))}[$__range])) / {_HIGH:g}, 0)",
                    legend="GPUs",
                ),
            ),
            unit="none",
            decimals=0,
            width=6,
            height=4,
            empty=_NO_SCRAPE,
        ),
        Panel(
            title="GPUs owned",
            kind=Figure(steps=((None, words.EXPECTED),)),
            shows="GPUs that are paid for now: those heard, those heard within a day, and those of the scheduler's"
            " configuration.",
            bad="fewer than the invoice has",
            do="compare with the inventory; add the exporter where nodes are missing",
            queries=(Query(f"sum({at('cluster:gpu_efficiency_owned:gpus')})"),),
            decimals=0,
            width=6,
            height=4,
            empty=_NO_SCRAPE,
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="fleet",
    title="Fleet efficiency",
    says="For the one who pays: how much of what we pay for is useful, what the biggest leak is, whose it is, what it"
    " costs a month, and what to do first.",
    variables=(ITS_CLUSTER,),
    rows=(_ANSWER, _WATERFALL, _NOW, _WORST, _TREND, _COMPARED, _WANTED, SMALL_FLEET),
)
