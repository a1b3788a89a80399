"""For finance and team leads: what an owner used, what it cost and lost, and what nobody is billed for."""

from dashboards import bands, words
from dashboards.losses import INFO
from dashboards.owners import BILL, BILLED, to_bill
from dashboards.parts import Bars, Board, Column, Figure, Lines, Link, Panel, Query, Row, Table
from dashboards.series import (
    ACCOUNT,
    CLICKED,
    CLUSTER,
    NAMESPACE,
    TEAM,
    TO_JOB,
    at,
    hours,
    of_layers,
    part,
    to,
    total,
)
from dashboards.unbilled import ALL_TIME, NOBODY, SILENT, named, nobodys_gpus, nobodys_hours, nobodys_money

OWNED = ('team=~"$team"', 'account=~"$account"', 'workload_namespace=~"$namespace"')
"""Of the chosen owners; a job without a team, an account or a namespace is among those of All."""
_TIME, _LAYER_TIME = "owner:gpu_efficiency_paid_seconds:rate5m", "owner_layer:gpu_efficiency_seconds:rate5m"
_LEAK_TIME = "owner_leak:gpu_efficiency_seconds:rate5m"
_SUMS = ("paid", "lost", "idle")
_PAID = "owner:gpu_efficiency_cost_paid:per_hour"
_ENERGY_COST = "owner:gpu_efficiency_energy_cost:per_hour"
_LEAK_COST = "owner_leak:gpu_efficiency_cost:per_hour"
_JOB_LOST = "job:gpu_efficiency_cost_lost:per_hour"
_LOSSES, _SEEN = 'layer=~"gau|ectr|emfu"', 'layer!="unobserved"'
_WEEK_AGO = "$__range offset 7d"
_TRIPLE = "team, account, workload_namespace"
_SERVE = bands.most(
    *(
        f"sum({at('job:gpu_efficiency_gpus')} and on (cluster, job_id) {at(INFO, *OWNED, *kind)})"
        for kind in ((bands.OF_SERVERS,), ())
    )
)
_OF_ANY_CLASS = bands.judged(bands.ANY)
_NOTHING_HELD = "nothing was held"
_NO_PRICE = "no job ran"
_SAMPLED = "Money is that of the jobs that run, looked at every four minutes."


def _of_layer(layer: str) -> str:
    return f'layer="{layer}"'


def _or_none(label: str, expr: str) -> str:
    """Who has no such label is called so."""
    return f'label_replace({expr}, "{label}", "(none)", "{label}", "")'


# -- the bill --


def _money(which: str, by: str, level: str = "owner") -> str:
    """Paid, lost or idle over the time shown; 0 for who lost nothing of the kind and has a job that is seen."""
    own = hours(f"{level}:gpu_efficiency_cost_{which}:per_hour", *OWNED, by=by)
    if which == "paid":
        return own
    who = ", ".join(label for label in by.split(", ") if label != "currency")
    now = total(f"{level}:gpu_efficiency_cost_paid:per_hour", *OWNED, by=by, time="")
    seen = total(f"{level}_layer:gpu_efficiency_seconds:rate5m", *OWNED, _SEEN, by=who, time="")
    return f"{own} or 0 * ({now} and on ({who}) {seen} > 0)"


def _sum_of(
    which: str, title: str, colour: str, *beside: Query, shows: str, bad: str, do: str, width: int = 4
) -> Panel:
    return Panel(
        title=title, kind=Figure(steps=((None, colour),), named=True), shows=shows, bad=bad, do=do,
        queries=(Query(_money(which, "currency"), legend="{{currency}}"), *beside),
        width=width, height=4, empty=_NO_PRICE,
    )  # fmt: skip


_LAYERS = {
    "gau": "GAU: not working", "ectr": "ECTR: not computing", "emfu": "eMFU: not useful", "useful": "useful",
    "unresolved": "worth unknown", "unobserved": "not seen",
}  # fmt: skip
_FACTORS = {"floor": "Useful", "gau": "GAU", "ectr": "ECTR", "emfu": "eMFU"}


_USEFUL_GPUS = total(_LAYER_TIME, *OWNED, _of_layer("useful"), time="")


def _by_layer(time: str) -> str:
    held = total(_TIME, *OWNED, time=time)
    return f"{total(_LAYER_TIME, *OWNED, by='layer', time=time)} / on () group_left () ({held} > 0)"


_BILL = Row(
    "The bill of the chosen owners",
    (
        Panel(
            title="GPU-hours",
            kind=Figure(steps=((None, words.EXPECTED),)),
            shows="GPU-hours that jobs of the chosen owners held over the time shown, by the daemons' account books: a"
            " job stays in them after it has ended.",
            bad="nothing by itself",
            do="compare it with what was agreed",
            queries=(Query(hours(_TIME, *OWNED)),),
            unit="short",
            width=4,
            height=4,
            empty=_NOTHING_HELD,
        ),
        _sum_of(
            "paid",
            "Paid",
            words.EXPECTED,
            Query(hours(_ENERGY_COST, *OWNED, by="currency"), legend="{{currency}} for energy"),
            shows=f"What their jobs cost over the time shown. {_SAMPLED} Without a price table it is GPU-hours. Beside"
            " it what the energy of their boards costs where [energy] price_per_kwh is set: a price of a GPU-hour may"
            " include it.",
            bad="more than was agreed",
            do="see which owner and which user in the tables below",
            width=6,
        ),
        _sum_of(
            "lost",
            "Lost of it",
            words.BAD,
            shows="The part of it that went into leaks of any layer: not working, not computing, not useful.",
            bad="more than three quarters of what was paid",
            do="begin with the longest bar of the leaks, below",
        ),
        _sum_of(
            "idle",
            "Idle of it",
            words.WATCH,
            shows="The part of it for GPUs that were held and rested: zombies, and servers that nobody asked.",
            bad="any that comes back every day",
            do="end these jobs, or scale the servers down: board Zombies and deadlocks",
            width=3,
        ),
        Panel(
            title="Useful",
            kind=Figure(),
            shows="Share of their GPU time, as far as it was seen, that advanced a model, in terms of the hardware's"
            " dense peak. Most who train lie at 14 to 38 %, servers at 3 to 30 %: judged by what most of their GPUs"
            " do now.",
            bad="below 14 % if they train, below 3 % if they serve",
            do="see which layer took most, below",
            queries=bands.by_class(of_layers("owner", "floor", *OWNED), "product", _SERVE),
            unit="percentunit",
            decimals=1,
            width=3,
            height=4,
            empty=_NOTHING_HELD,
        ),
        Panel(
            title="Billed to nobody",
            kind=Figure(steps=((None, words.GOOD), (0.1, words.WATCH), (0.3, words.BAD))),
            shows="Of all GPU-hours that were paid for in the chosen clusters, the share that no job held, whoever is"
            " chosen above.",
            bad="above 10 %: it is in no owner's bill, and somebody pays it",
            do="see what it is under Billed to nobody; whoever runs the fleet must answer for it",
            queries=(Query(f"clamp_min(1 - ({hours(_TIME)} or 0 * {ALL_TIME}) / {ALL_TIME}, 0)"),),
            unit="percentunit",
            decimals=1,
            width=4,
            height=4,
            empty="no GPU is seen",
        ),
        Panel(
            title="Where these GPU-hours went",
            kind=Bars(colours={_LAYERS[layer]: colour for layer, colour in words.LAYERS.items()}),
            shows="The chosen owners' GPU-hours by layer: what each layer lost, what was useful, what was unobserved.",
            bad="a loss longer than the useful bar",
            do="GAU: reclaim; ECTR: see the leaks below; eMFU: bigger batches, fused kernels",
            queries=tuple(
                Query(
                    f"{hours(_LAYER_TIME, *OWNED, _of_layer(layer))} or 0 * {hours(_TIME, *OWNED)}",
                    legend=said,
                )
                for layer, said in _LAYERS.items()
            ),
            unit="short",
            width=9,
            height=8,
            empty=_NOTHING_HELD,
        ),
        Panel(
            title="Against the week before",
            kind=Table(
                (
                    Column(of="layer", title="Of their GPU-hours", texts=_LAYERS, words=words.LAYERS),
                    Column(of="A", title="Now", unit="percentunit", decimals=1, width=65),
                    Column(of="B", title="A week ago", unit="percentunit", decimals=1, width=90),
                )
            ),
            shows="What the GPU-hours of the chosen owners went into over the time shown, and over the same time seven"
            " days earlier.",
            bad="a useful share that fell by a tenth or more",
            do="look what changed that day; the alert GPUEfficiencyRegressed names jobs",
            queries=(Query(_by_layer("$__range")), Query(_by_layer(_WEEK_AGO))),
            unit="percentunit",
            width=7,
            height=8,
            empty=_NOTHING_HELD,
        ),
        Panel(
            title="GPUs held, against a week ago",
            kind=Lines(
                colours={"now": words.EXPECTED, "a week ago": words.UNKNOWN, "useful": words.GOOD},
                dashed=("a week ago",),
            ),
            shows="GPUs that the chosen owners held, the same seven days earlier, and what of now's was useful.",
            bad="held far above useful all the time; twice the GPUs of a week ago without a reason",
            do="ask the owner with the largest bill below",
            queries=(
                Query(total(_TIME, *OWNED, time=""), legend="now"),
                Query(total(_TIME, *OWNED, time="offset 7d"), legend="a week ago"),
                Query(f"{_USEFUL_GPUS} or 0 * {total(_TIME, *OWNED, time='')}", legend="useful"),
            ),
            unit="none",
            width=8,
            height=8,
            empty=_NOTHING_HELD,
        ),
    ),
)


# -- who is billed --


def _bills(label: str, title: str, column: str, link: Link) -> Panel:
    """A line for each owner by one of the labels."""
    held = total(_TIME, *OWNED, by=label)
    ratios = (of_layers("owner", which, *OWNED, by=label, nothing=held) for which in _FACTORS)
    return Panel(
        title=title,
        kind=Table(
            (
                Column(of=label, title=column, link=link, width=130),
                BILL,
                Column(of="A", title="GPU-hours", unit="short", bar=words.EXPECTED),
                Column(of="B", title="Paid", unit="short", width=100),
                Column(of="C", title="Lost", unit="short", width=100),
                Column(of="D", title="Idle", unit="short", width=90),
                Column(of="I", title="For energy", unit="short", width=86),
                Column(of="currency", title="Currency", width=78),
                Column(of="E", title="Useful", unit="percentunit", decimals=1, width=70, steps=_OF_ANY_CLASS),
                Column(of="F", title="GAU", unit="percentunit", decimals=1, width=70),
                Column(of="G", title="ECTR", unit="percentunit", decimals=1, width=70),
                Column(of="H", title="eMFU", unit="percentunit", decimals=1, width=70),
            ),
            sort="A",
        ),
        shows="GPU-hours held, what they cost, what of that was lost in any layer and what was only held and rested;"
        " what their energy cost, where it has a price (a price of a GPU-hour may include it);"
        f" the share that was useful, and its three factors. {_SAMPLED} All lines together are the bill above.",
        bad="a large bill with a low useful share",
        do="click on the name: this board shows it alone",
        queries=(
            Query(to_bill(label, _or_none(label, hours(_TIME, *OWNED, by=label)), "[(]none[)]")),
            *(Query(_or_none(label, _money(which, f"{label}, currency"))) for which in _SUMS),
            *(Query(_or_none(label, ratio)) for ratio in ratios),
            Query(_or_none(label, hours(_ENERGY_COST, *OWNED, by=f"{label}, currency"))),
        ),
        width=24,
        height=7,
        empty=_NOTHING_HELD,
    )  # fmt: skip


_BY_USER = "user, team, account"
_USER_TIME = "owner_user:gpu_efficiency_paid_seconds:rate5m"
_USERS = Panel(
    title="Users",
    kind=Table(
        (
            Column(of="user", title="User", width=150),
            Column(of="A", title="GPU-hours", unit="short", bar=words.EXPECTED),
            Column(of="B", title="Paid", unit="short", width=100),
            Column(of="C", title="Lost", unit="short", width=100),
            Column(of="D", title="Idle", unit="short", width=90),
            Column(of="currency", title="Currency", width=90),
            Column(of="team", title="Team", width=120, link=to("chargeback", "The team's bill", team=CLICKED)),
            Column(of="account", title="Account", width=120, link=to("chargeback", "Its bill", account=CLICKED)),
        ),
        sort="A",
    ),
    shows="The same by who started the jobs. Time is that of jobs while they are exported: what is past of one that has"
    " ended is in the books of its owner only.",
    bad="one user with most of what an owner lost",
    do="talk to that user first; click on the team for its jobs",
    queries=(
        Query(_or_none("user", hours(_USER_TIME, *OWNED, by=_BY_USER))),
        *(Query(_or_none("user", _money(which, f"{_BY_USER}, currency", "owner_user"))) for which in _SUMS),
    ),
    width=24,
    height=7,
    empty=_NOTHING_HELD,
)

_OWNERS = Row(
    "Who is billed",
    (
        _bills("team", "Teams", "Team", to("chargeback", "The team's bill", team=BILLED)),
        _bills("account", "Accounts", "Account", to("chargeback", "The account's bill", account=BILLED)),
        _bills(
            "workload_namespace", "Namespaces", "Namespace",
            to("chargeback", "The namespace's bill", namespace=BILLED),
        ),
        _USERS,
    ),
)  # fmt: skip

_TEN = f"topk(10, sum by ({_TRIPLE}) (sum_over_time({at(_TIME, *OWNED)}[$__range] @ end())))"
_OF_TEN = f"on ({_TRIPLE}) {_TEN}"
_OVER_TIME = Row(
    "Over time",
    (
        Panel(
            title="GPUs by owner",
            kind=Lines(stacked=True, colours={"all others": words.UNKNOWN}, table=True),
            shows="GPUs held over time by the ten owners (team, account, namespace) that held most in the time shown,"
            " and by all others of those chosen.",
            bad="one owner that takes what others wait for",
            do="compare with its agreed share; the Fleet board has the queue",
            queries=(
                Query(
                    f"sum by ({_TRIPLE}) ({at(_TIME, *OWNED)}) and {_OF_TEN}",
                    legend="{{team}} {{account}} {{workload_namespace}}",
                ),
                Query(f"sum({at(_TIME, *OWNED)} unless {_OF_TEN})", legend="all others"),
            ),
            unit="none",
            width=24,
            height=9,
            empty=_NOTHING_HELD,
        ),
    ),
    folded=True,
)

# -- what they lose --

_WORST = f"topk(15, {at(_JOB_LOST)} and on (cluster, job_id) {at('job:gpu_efficiency_info', *OWNED)})"
_LEAKS = Row(
    "What the chosen owners lose",
    (
        Panel(
            title="GPU-hours lost by leak",
            kind=Bars(colours=words.LEAKS),
            shows="GPU-hours that the twelve largest leaks took from jobs of the chosen owners over the time shown.",
            bad="the longest bar",
            do="see its price and what to do first in the table beside it",
            queries=(Query(f"topk(12, {hours(_LEAK_TIME, *OWNED, _LOSSES, by='leak')})", legend="{{leak}}"),),
            unit="short",
            width=9,
            height=14,
            empty="nothing was lost",
        ),
        Panel(
            title="What each leak costs, and what to do first",
            kind=Table(
                (
                    Column(of="leak", title="Leak", words=words.LEAKS, texts=words.LEAK_NAMES, width=195),
                    Column(of="A", title="Of their time", unit="percentunit", decimals=1, width=105),
                    Column(of="B", title="Cost", unit="short", decimals=2, width=80),
                    Column(of="currency", title="Currency", width=85),
                    Column(of="fix", title="Do first", texts=words.FIXES),
                ),
                sort="B",
            ),
            shows="Each leak's share of the chosen owners' GPU time over the time shown, and what that cost.",
            bad="the first row",
            do="what its last column says; the metric to watch is on the board Training leaks or Inference leaks",
            queries=(
                Query(
                    f"label_replace({total(_LEAK_TIME, *OWNED, _LOSSES, by='leak')}"
                    f' / on () group_left () ({total(_TIME, *OWNED)} > 0), "fix", "$1", "leak", "(.*)")'
                ),
                Query(hours(_LEAK_COST, *OWNED, _LOSSES, by="leak, currency")),
            ),
            width=15,
            height=14,
            empty="nothing was lost",
        ),
        Panel(
            title="Jobs that lose most now",
            kind=Table(
                (
                    Column(of="job_id", title="Job", link=TO_JOB, width=180),
                    Column(of="name", title="Name"),
                    Column(of="user", title="User", width=100),
                    Column(of="team", title="Team", width=110, link=to("chargeback", "The team's bill", team=CLICKED)),
                    Column(
                        of="account", title="Account", width=110, link=to("chargeback", "Its bill", account=CLICKED)
                    ),
                    Column(of="B", title="GPUs", unit="none", decimals=0, width=70),
                    Column(of="C", title="Useful", unit="percentunit", decimals=1, width=80, steps=_OF_ANY_CLASS),
                    Column(of="A", title="Lost an hour", unit="short", decimals=2, bar=words.BAD),
                    Column(of="currency", title="Currency", width=90),
                ),
                sort="A",
            ),
            shows="The fifteen running jobs of the chosen owners that lose most money an hour at this moment.",
            bad="a job that loses nearly its whole price",
            do="click on the job: its board says why",
            queries=(
                Query(
                    f"topk(15, {at(_JOB_LOST)} * on (cluster, job_id) group_left (name, user, team, account)"
                    f" {at('job:gpu_efficiency_info', *OWNED)})"
                ),
                *(
                    Query(f"max by (cluster, job_id) ({at(name)} and on (cluster, job_id) {_WORST})")
                    for name in ("job:gpu_efficiency_gpus", "job:gpu_efficiency_product_floor:ratio_rate5m")
                ),
            ),
            width=24,
            height=9,
            empty="no job of theirs loses anything",
        ),
    ),
)

# -- nobody --

_THEIRS, _OTHERS = "billed to the chosen owners", "billed to other owners"


def _rest(whole: str, some: str, match: str = "") -> str:
    """The whole without some of it."""
    return f"clamp_min({whole} -{match} ({some} or 0 * {whole}), 0)"


_HELD_MONEY = hours(_PAID, by="currency")
_ALL_PARTS = " or ".join(
    (
        named("what", _THEIRS, hours(_TIME, *OWNED)),
        named("what", _OTHERS, _rest(hours(_TIME), hours(_TIME, *OWNED))),
        nobodys_hours("what"),
    )
)
_ALL_MONEY = " or ".join(
    (
        named("what", _THEIRS, hours(_PAID, *OWNED, by="currency")),
        named("what", _OTHERS, _rest(_HELD_MONEY, hours(_PAID, *OWNED, by="currency"))),
        nobodys_money("what"),
    )
)
_NOT_BILLED = Row(
    "Billed to nobody",
    (
        Panel(
            title="All that was paid for",
            kind=Table(
                (
                    Column(of="what", title="Whose"),
                    Column(of="A", title="GPU-hours", unit="short", bar=words.EXPECTED, width=130),
                    Column(of="B", title="Of all", unit="percentunit", decimals=1, width=70),
                    Column(of="C", title="Money", unit="short", decimals=1, width=80),
                    Column(of="currency", title="Currency", width=80),
                )
            ),
            shows="Every GPU-hour of the chosen clusters over the time shown, by who is billed for it: the lines add up"
            " to all GPUs that are owned. GPUs that are down are paid for.",
            bad="much that nobody had while jobs wait; much that is out of service",
            do="free: the Fleet board's queue beside free GPUs; out of service: repair or return; not reporting: the"
            " board Exporter and data quality",
            queries=(
                Query(_ALL_PARTS),
                Query(f"({_ALL_PARTS}) / on () group_left () ({ALL_TIME} > 0)"),
                Query(_ALL_MONEY),
            ),
            width=13,
            height=9,
            empty="no GPU is seen",
        ),
        Panel(
            title="GPUs billed to nobody",
            kind=Lines(
                stacked=True,
                colours={
                    NOBODY["idle_allocation"]: words.STATES["unallocated"],
                    NOBODY["unavailable"]: words.STATES["unavailable"],
                    NOBODY["unobserved"]: words.STATES["unobserved"],
                    SILENT: words.QUIET,
                },
            ),
            shows="GPUs that no job held over time: free ones, those out of service, and those nobody could see.",
            bad="a layer that is there day and night",
            do="buy less, or let jobs that wait run there",
            queries=(*(Query(gpus, legend=said) for said, gpus in nobodys_gpus()),),
            unit="none",
            width=7,
            height=9,
            empty="no GPU is seen",
        ),
        Panel(
            title="Used by no job",
            kind=Figure(steps=((None, words.GOOD), (1, words.BAD))),
            shows="GPUs that nobody has and on which somebody's processes run: left behind by a job, or started past"
            " the scheduler. Nobody is billed for them.",
            bad="any that lasts",
            do="the alert GPUEfficiencyGPUUnownedProcess names node and process; end it",
            queries=(
                Query(
                    f"{total('cluster:gpu_efficiency_unowned:gpus', time='')}"
                    f" or 0 * ({total(part('cluster', 'observed'), time='')} > 0)"
                ),
            ),
            decimals=0,
            width=4,
            height=9,
            empty="no GPU is seen",
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="chargeback",
    title="Team and account chargeback",
    says="For finance and team leads: what an owner used, what it cost, how much of it was lost to what, by whom, and"
    " what nobody is billed for.",
    variables=(CLUSTER, TEAM, ACCOUNT, NAMESPACE),
    rows=(_BILL, _OWNERS, _LEAKS, _OVER_TIME, _NOT_BILLED),
)
