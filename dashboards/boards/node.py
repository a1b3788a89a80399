"""For who cares for machines: what a node got of what was paid, and what each of its GPUs does, loses and suffers."""

from collections.abc import Iterable, Iterator

from dashboards import bands, words
from dashboards.parts import Bars, Board, Column, Figure, Kind, Lines, Panel, Query, Row, Table, Timeline
from dashboards.raw import (
    COMPUTING,
    LOST,
    NOW,
    OBSERVED,
    OCCUPIED,
    RESOLVED,
    USEFUL,
    kernels,
    money,
    product,
    ratio,
    seconds,
)
from dashboards.series import (
    GPU,
    INSTANCE,
    ITS_CLUSTER,
    NODE,
    THIS_NODE,
    TO_JOB,
    at,
    to,
)
from exporter.core.metrics import UNOBSERVED_REASONS
from exporter.web.summary import STATE_SYMBOLS

_CHOSEN_GPUS = 'gpu=~"$gpu"'
_NOT_HEARD = "not reporting"
_NOT_SEEN = "nothing seen"
_UNHEALTHY = "the board does not say"
_STATES = tuple(words.STATES)
_SECONDS, _PAID = "gpu_efficiency_seconds_total", "gpu_efficiency_paid_seconds_total"
_RECENT = "[5m]"
"""Of rates over time: as the recorded ones, so that any scrape interval up to two minutes has a rate."""


def _gpus(name: str, *where: str) -> str:
    """A series of the chosen GPUs of the node."""
    return at(name, THIS_NODE, _CHOSEN_GPUS, *where)


def _each(name: str, *labels: str) -> str:
    """One series a GPU, though an exporter that restarted is there twice."""
    return f"max by ({', '.join(('cluster', 'gpu', *labels))}) ({_gpus(name)})"


def _grown(name: str, *where: str, by: str = "") -> str:
    """What a counter has grown over the time shown."""
    return f"sum by ({by}) (increase({_gpus(name, *where)}[$__range]))"


def _share(above: str, below: str) -> str:
    """Of the time of each GPU over the time shown; nothing where there was none."""
    by = "cluster, gpu"
    return f"{_grown(_SECONDS, above, by=by)} / ({_grown(_SECONDS, below, by=by)} > 0)"


_SEEN = f"on () {seconds(THIS_NODE, OBSERVED)} > 0"
"""Where nothing was seen, nothing is 0: it is not known."""


_OF_JOBS = f"sum by (cluster, job_id) (increase({at('gpu_efficiency_job_paid_seconds_total', THIS_NODE)}[$__range]))"
_OF_SERVERS = f"max by (cluster, job_id) ({at('gpu_efficiency_job_info', THIS_NODE, bands.OF_SERVERS)})"
_SERVES = bands.most(f"sum({_OF_JOBS} and on (cluster, job_id) {_OF_SERVERS})", f"sum({_OF_JOBS})")


def _layer(which: str, title: str, *, shows: str, do: str) -> Panel:
    low = round(100 * bands.TRAINING[which][0])
    return Panel(
        title=title, kind=Figure(), shows=shows, bad=f"below {low} %, unless it mostly serves", do=do,
        queries=bands.by_class(ratio(which, THIS_NODE), which, _SERVES), unit="percentunit", decimals=1, width=4,
        height=4, empty="none",
    )  # fmt: skip


_ANSWER = Row(
    "What the node got of what was paid",
    (
        Panel(
            title="Useful",
            kind=Figure(),
            shows="GAU x ECTR x eMFU of this node over the time shown: the share of GPU time that advanced a model.",
            bad="below 14 %; below 3 % where servers had most of its GPU time",
            do="look which factor is lowest, then at the longest bar of Where 100 GPU-hours went",
            queries=bands.by_class(product(THIS_NODE), "product", _SERVES),
            unit="percentunit",
            decimals=1,
            width=4,
            height=4,
            empty=_NOT_SEEN,
        ),
        _layer(
            "gau",
            "GAU",
            shows="Held by a job that works / seen. None: nothing was seen.",
            do="see who rests in the table of GPUs: state zombie, unallocated or unavailable",
        ),
        _layer(
            "ectr",
            "ECTR",
            shows="Computing / allocated and working. None: no GPU was held and worked.",
            do="see the purple leaks below, then the job's own board",
        ),
        _layer(
            "emfu",
            "eMFU",
            shows="Useful / computing. None: nothing computed, or its worth cannot be known.",
            do="see the blue leaks below; if throttled is among them it is this machine, else it is the job",
        ),
        Panel(
            title="nvidia-smi",
            kind=Figure(steps=((None, words.UNKNOWN),)),
            shows="Paid time with any kernel on a GPU, as the driver's utilisation counts. A kernel that only waits"
            " counts in full.",
            bad="nothing by itself: the gap to the first figure is what it hides",
            do="do not judge the node by it",
            queries=(Query(f"{kernels(THIS_NODE)} and {_SEEN}"),),
            unit="percentunit",
            decimals=1,
            width=4,
            height=4,
            empty=_NOT_SEEN,
        ),
        Panel(
            title="Coverage",
            kind=Figure(steps=((None, words.BAD), (0.95, words.WATCH), (0.99, words.GOOD))),
            shows="Share of the node's paid GPU time that was seen, over the time shown.",
            bad="below 95 %: the other figures speak of a part of the time",
            do="see Not seen, by reason at the bottom",
            queries=(Query(ratio("coverage", THIS_NODE)),),
            unit="percentunit",
            decimals=1,
            width=4,
            height=4,
            empty=_NOT_HEARD,
        ),
        Panel(
            title="GPUs",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="GPUs in the node's inventory by model, now. A board that is cut into MIG instances counts as one.",
            bad="fewer than were bought",
            do="look for a GPU that is lost below; then at dmesg",
            queries=(Query(f"sum by (model) ({at('gpu_efficiency_node_gpus', THIS_NODE)})", legend="{{model}}"),),
            decimals=0,
            width=4,
            height=4,
            empty=_NOT_HEARD,
        ),
        Panel(
            title="Paid an hour",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="What the node's GPUs cost an hour now. Without a price table it is GPU-hours.",
            bad="nothing by itself",
            do="configure prices where it says GPU-hours",
            queries=(Query(money(THIS_NODE, time=NOW), legend="{{currency}}"),),
            unit="short",
            decimals=2,
            width=4,
            height=4,
            empty=_NOT_HEARD,
        ),
        Panel(
            title="Lost an hour",
            kind=Figure(steps=((None, words.BAD),), named=True),
            shows="How much of that the losses of all three layers take, now.",
            bad="more than three quarters of what is paid",
            do="begin with the dearest row of What it lost",
            queries=(
                Query(
                    f"{money(THIS_NODE, LOST, time=NOW)} and {_SEEN}",
                    legend="{{currency}}",
                ),
            ),
            unit="short",
            decimals=2,
            width=4,
            height=4,
            empty=_NOT_SEEN,
        ),
        Panel(
            title="Where these figures come from",
            kind=Table(
                (
                    Column(of="source", title="Telemetry", width=110),
                    Column(of="scheduler", title="Scheduler", width=100),
                    Column(of="reason", title="Why that source"),
                    Column(
                        of="C",
                        title="Kind",
                        unit="none",
                        width=90,
                        texts={"0": "hardware", "1": "simulated"},
                        words={"0": words.GOOD, "1": words.WATCH},
                    ),
                    Column(of="version", title="Exporter", width=80),
                )
            ),
            shows="Who tells of the GPUs and of their holders, why that source was taken, and the exporter's version.",
            bad="a source without performance counters: layers are then upper bounds, or unresolved",
            do="see docs/sources.md for what each source can tell",
            queries=(
                Query(
                    f"max by (cluster, source, scheduler, reason) ({at('gpu_efficiency_source_info', THIS_NODE)})",
                ),
                Query(f"max by (cluster, version) ({at('gpu_efficiency_build_info', THIS_NODE)})"),
                Query(f"max by (cluster) ({at('gpu_efficiency_simulated', THIS_NODE)})"),
            ),
            unit="none",
            width=12,
            height=4,
            empty=_NOT_HEARD,
        ),
    ),
)


_WRONG = ((None, words.QUIET), (1.0, words.BAD))
_URGENT = {str(number): state for number, state in enumerate(STATE_SYMBOLS, 1)}
_URGENT_COLOURS = {number: words.STATES[state] for number, state in _URGENT.items()}


def _numbered(name: str, states: Iterable[str]) -> Iterator[str]:
    """A state's number is its place among the states."""
    for number, state in enumerate(states, 1):
        chosen = f'state="{state}"'
        yield f"{number} * {_gpus(name, chosen)}"


_MODELS = _each("gpu_efficiency_gpu_info", "model", "profile")
_BOARD = f'label_replace(label_replace({_MODELS}, "board", "$1", "model", "(.*)"), "board", "$1", "profile", "(.+)")'
_NOW = Row(
    "Each GPU",
    (
        Panel(
            title="GPUs now",
            kind=Table(
                (
                    Column(of="gpu", title="GPU", width=60),
                    Column(of="A", title="State", unit="none", texts=_URGENT, words=_URGENT_COLOURS, width=110),
                    Column(of="reason", title="Why", width=110, ours=True),
                    Column(of="B", title="For", unit="s", decimals=1, width=90),
                    Column(of="job_id", title="Job", link=TO_JOB, width=150),
                    Column(of="rank", title="Rank", width=60),
                    Column(of="E", title="Useful", unit="percentunit", decimals=1, width=75),
                    Column(of="I", title="nvidia-smi", unit="percentunit", decimals=1, width=90),
                    Column(of="J", title="Of power limit", unit="percentunit", decimals=0, width=112),
                    Column(of="K", title="Heat", unit="celsius", decimals=0, width=70),
                    Column(of="L", title="Memory", unit="bytes", decimals=0, width=80),
                    Column(of="M", title="Last Xid", unit="none", decimals=0, width=80, steps=_WRONG),
                    Column(of="F", title="GAU", unit="percentunit", decimals=1, width=75),
                    Column(of="G", title="ECTR", unit="percentunit", decimals=1, width=75),
                    Column(of="H", title="eMFU", unit="percentunit", decimals=1, width=75),
                    Column(of="board", title="Board or MIG profile"),
                ),
                sort="A",
                rising=True,
            ),
            shows="Each GPU, those in trouble first: its state, why, since when; who holds it; what came of its time"
            " over the time shown; power, heat and memory now; the last Xid. -: not known, or nobody has it. 0:1 is MIG"
            " instance 1 of board 0; 0 is then what is left of that board.",
            bad="hung, zombie, unowned, unavailable; or a GPU that differs from its neighbours in the same job",
            do="click on the job; for a hang open Zombies and deadlocks; for an Xid see Errors below",
            queries=(
                Query(
                    f"max by (cluster, gpu, reason) ({' or '.join(_numbered('gpu_efficiency_state', STATE_SYMBOLS))})"
                ),
                Query(f"time() - {_each('gpu_efficiency_state_since_timestamp_seconds')}"),
                Query(_BOARD),
                Query(_each("gpu_efficiency_allocation_info", "job_id", "rank")),
                Query(_share(USEFUL, OBSERVED)),
                Query(_share(OCCUPIED, OBSERVED)),
                Query(_share(COMPUTING, OCCUPIED)),
                Query(_share(USEFUL, RESOLVED)),
                Query(
                    f"{_grown('gpu_efficiency_kernel_seconds_total', by='cluster, gpu')}"
                    f" / ({_grown(_PAID, by='cluster, gpu')} > 0)"
                    f" and on (cluster, gpu) {_grown(_SECONDS, OBSERVED, by='cluster, gpu')} > 0"
                ),
                Query(f"{_each('gpu_efficiency_power_watts')} / ({_each('gpu_efficiency_power_limit_watts')} > 0)"),
                Query(_each("gpu_efficiency_temperature_celsius")),
                Query(_each("gpu_efficiency_memory_used_bytes")),
                Query(_each("gpu_efficiency_last_xid")),
            ),
            unit="none",
            width=24,
            height=10,
            empty=_NOT_HEARD,
        ),
        Panel(
            title="States over time",
            kind=Timeline(words=_STATES, colours=words.STATES),
            shows="The state of each GPU. Grey: unobserved; no stripe: the exporter did not report.",
            bad="long stripes of anything but active",
            do="compare the moment a stripe begins with the errors and clocks below",
            queries=(
                Query(
                    f"max by (cluster, gpu) ({' or '.join(_numbered('gpu_efficiency_state', _STATES))})",
                    legend="GPU {{gpu}}",
                ),
            ),
            unit="none",
            width=24,
            height=8,
            empty=_NOT_HEARD,
        ),
    ),
)

_STACK = ("useful", "unresolved", "emfu", "ectr", "gau", "unobserved")


def _of_layer(layer: str) -> str:
    return f'layer="{layer}"'


_WATERFALL = Row(
    "Where its GPU-hours went",
    (
        Panel(
            title="Of 100 GPU-hours of the chosen GPUs",
            kind=Bars(colours=words.LEAKS),
            shows="Where 100 paid GPU-hours went over the time shown; all bars together are 100. Warm: not allocated or"
            " not working; purple: not computing; blue: computing without worth; green: useful; grey: not known.",
            bad="a loss that is longer than useful",
            do="take the longest bar that is not green; the table beside it says what to do",
            queries=(
                Query(
                    f"sort_desc(100 * {_grown(_SECONDS, by='leak')} / on () group_left () ({_grown(_PAID)} > 0) > 0)",
                    legend="{{leak}}",
                ),
            ),
            unit="none",
            decimals=1,
            width=9,
            height=11,
            empty=_NOT_HEARD,
        ),
        Panel(
            title="What the node lost",
            kind=Table(
                (
                    Column(of="leak", title="Leak", words=words.LEAKS, texts=words.LEAK_NAMES, width=200),
                    Column(of="A", title="GPU-hours", unit="none", decimals=2, width=110),
                    Column(of="B", title="Cost", unit="short", decimals=2, width=80),
                    Column(of="currency", title="Currency", width=90),
                    Column(of="fix", title="Do first", texts=words.FIXES),
                ),
                sort="A",
            ),
            shows="Of the whole node over the time shown: GPU-hours that each leak took, what they cost, and what its"
            " team does first.",
            bad="unavailable or throttled among the first: that is this machine, not its jobs",
            do="what the last column says",
            queries=(
                Query(f'label_replace({seconds(THIS_NODE, LOST, by="leak")} / 3600 > 0, "fix", "$1", "leak", "(.*)")'),
                Query(f"{money(THIS_NODE, LOST, by='leak, currency')} / 3600 > 0"),
            ),
            unit="none",
            width=15,
            height=11,
            empty="nothing lost, or nothing seen",
        ),
        Panel(
            title="The chosen GPUs by what they did",
            kind=Lines(stacked=True, colours=words.LEAKS),
            shows="GPUs by where their time went, means of five minutes: useful at the bottom, then what is unresolved,"
            " and the losses of eMFU, ECTR and GAU.",
            bad="a warm or purple band that grows",
            do="choose the time in which it grew, and see the states above",
            queries=tuple(
                Query(f"sum by (leak) (rate({_gpus(_SECONDS, _of_layer(layer))}{_RECENT})) > 0", legend="{{leak}}")
                for layer in _STACK
            ),
            unit="none",
            width=15,
            height=9,
            empty=_NOT_HEARD,
        ),
        Panel(
            title="Useful beside nvidia-smi",
            kind=Lines(top=1, colours={"useful": words.GOOD, "nvidia-smi": words.WATCH}, dashed=("nvidia-smi",)),
            shows="The node's product, and the kernel utilisation that nvidia-smi shows, means of five minutes.",
            bad="a wide gap: the GPUs look busy and get little done",
            do="see which leak fills the gap",
            queries=(
                Query(product(THIS_NODE, time=NOW), legend="useful"),
                Query(
                    f"{kernels(THIS_NODE, time=NOW)} and on () {seconds(THIS_NODE, OBSERVED, time=NOW)} > 0",
                    legend="nvidia-smi",
                ),
            ),
            unit="percentunit",
            width=9,
            height=9,
            empty=_NOT_SEEN,
        ),
    ),
)


def _signal(title: str, kind: Kind, *queries: Query, shows: str, bad: str, do: str, empty: str = _UNHEALTHY,
            unit: str = "", fills: str = "") -> Panel:  # fmt: skip
    return Panel(
        title=title, kind=kind, queries=queries, shows=shows, bad=bad, do=do, width=12, height=7, empty=empty,
        unit=unit, fills=fills,
    )  # fmt: skip


_OF_GPU = "GPU {{gpu}}"
_SIGNALS = Row(
    "Signals",
    (
        _signal(
            "Power against its limit",
            Lines(dashed=("limit",), colours={"limit": words.QUIET}),
            Query(_each("gpu_efficiency_power_watts"), legend=_OF_GPU),
            Query(f"max({_gpus('gpu_efficiency_power_limit_watts')})", legend="limit"),
            shows="Power draw of each board, and the highest limit the driver enforces. MIG instances show their"
            " board's.",
            bad="flat and half of the limit under a busy kernel (a hang); flat at the limit (clocks are held down)",
            do="see Clocks held down; compare the enforced limit with the default (nvidia-smi -q -d POWER)",
        ),
        _signal(
            "Temperature",
            Lines(dashed=("hottest memory",), colours={"hottest memory": words.QUIET}),
            Query(_each("gpu_efficiency_temperature_celsius"), legend=_OF_GPU),
            Query(f"max({_gpus('gpu_efficiency_memory_temperature_celsius')})", legend="hottest memory"),
            shows="Temperature of each GPU, and of the hottest memory where boards have a sensor for it.",
            bad="one GPU hotter than its neighbours at the same power",
            do="look at fans, filters and the inlet air of that slot",
        ),
        _signal(
            "Degrees left until it slows down",
            Lines(),
            Query(_each("gpu_efficiency_temperature_margin_celsius"), legend=_OF_GPU),
            shows="How much hotter each GPU may become before it lowers its own clocks.",
            bad="below 5 degrees",
            do="cool it before the next long job; see Clocks held down: thermal",
            unit="celsius",
        ),
        _signal(
            "Clocks held down, by reason",
            Lines(
                colours={
                    "power": words.EXPECTED,
                    "thermal": words.BAD,
                    "hardware": words.LAYERS["ectr"],
                    "settings": words.WATCH,
                }
            ),
            Query(
                f"sum by (reason) (rate({_gpus('gpu_efficiency_clock_limited_seconds_total')}{_RECENT})) > 0",
                legend="{{reason}}",
            ),
            shows="How many GPUs have their clock held down: power (software cap), thermal, hardware (slowdown, power"
            " brake), settings (application clocks); several may hold one GPU. Power is usual under full load.",
            bad="thermal or hardware; power while the leak throttled is large",
            do="the runbook GPUEfficiencyGPUThrottledCostly",
            empty="no clock was held down, or nothing seen",
            unit="none",
            fills="throttled",
        ),
        _signal(
            "Memory used",
            Lines(),
            Query(_each("gpu_efficiency_memory_used_bytes"), legend=_OF_GPU),
            shows="Device memory in use on each GPU, whoever uses it.",
            bad="memory in use on a GPU that nobody holds; much more on one rank than on the others",
            do="see processes on the node: nvidia-smi --query-compute-apps=pid,name,gpu_uuid --format=csv",
        ),
        _signal(
            "Power by what it was spent on",
            Lines(stacked=True, colours={words.LAYER_WORDS[layer]: colour for layer, colour in words.LAYERS.items()}),
            *(
                Query(
                    f"sum({at('node_layer:gpu_efficiency_power:watts', THIS_NODE, _of_layer(layer))})",
                    legend=words.LAYER_WORDS[layer],
                )
                for layer in ("useful", "unresolved", "emfu", "ectr", "gau", "unobserved")
            ),
            shows="Power of all GPUs of the node by layer; the area is energy.",
            bad="much power in what is not useful",
            do="shut down what nobody uses; power caps cost little where memory is the limit",
        ),
    ),
    folded=True,
)

_REMAP = {"0": "as built", "1": "waits for a reset", "2": "failed: replace"}
_ACTIONS = {"0": "nothing", "1": "reset GPU", "2": "reboot node", "3": "drain peers", "4": "drain and reset"}
_ECC = 'type="corrected"', 'type="uncorrected"'
_BY_GPU = "cluster, gpu"
_SHADES = (words.UNKNOWN, words.WATCH, words.LAYERS["ectr"], words.EXPECTED, words.BAD, words.QUIET)
_REASONS = {reason: _SHADES[n % len(_SHADES)] for n, reason in enumerate(sorted({*UNOBSERVED_REASONS, "other"}))}
"""What nobody saw is never green."""
_ERRORS = Row(
    "Errors and blind spots",
    (
        Panel(
            title="Errors",
            kind=Table(
                (
                    Column(of="gpu", title="GPU", width=60),
                    Column(of="A", title="Xids", unit="none", decimals=0, steps=_WRONG),
                    Column(of="B", title="Last Xid", unit="none", decimals=0),
                    Column(of="C", title="ECC corrected", unit="none", decimals=0),
                    Column(of="D", title="ECC uncorrected", unit="none", decimals=0, steps=_WRONG),
                    Column(of="E", title="NVLink errors", unit="none", decimals=0, steps=_WRONG),
                    Column(of="F", title="Memory rows", unit="none", texts=_REMAP, steps=_WRONG),
                    Column(of="G", title="Driver wants", unit="none", texts=_ACTIONS, steps=_WRONG),
                ),
                sort="gpu",
                rising=True,
            ),
            shows="Errors of each GPU over the time shown; the last Xid, spare memory rows and what the driver wants"
            " done, now. -: the board or the source does not say.",
            bad="an Xid, an uncorrected error, a row remap that failed, or anything in the last column",
            do="drain the node, read dmesg for Xid lines, reset the GPU; send it for repair if it comes back (runbook"
            " GPUEfficiencyGPULost)",
            queries=(
                Query(_grown("gpu_efficiency_xid_errors_total", by=_BY_GPU)),
                Query(_each("gpu_efficiency_last_xid")),
                Query(_grown("gpu_efficiency_ecc_errors_total", _ECC[0], by=_BY_GPU)),
                Query(_grown("gpu_efficiency_ecc_errors_total", _ECC[1], by=_BY_GPU)),
                Query(_grown("gpu_efficiency_nvlink_errors_total", by=_BY_GPU)),
                Query(_each("gpu_efficiency_row_remap")),
                Query(_each("gpu_efficiency_recovery_action")),
            ),
            unit="none",
            width=24,
            height=10,
            empty=_UNHEALTHY,
        ),
        Panel(
            title="Not seen, by reason",
            kind=Lines(stacked=True, colours=_REASONS),
            shows="How many of the chosen GPUs nobody could see, by the reason.",
            bad="anything that stays: these GPUs are paid for and nothing is known of them",
            do="open the board Exporter and data quality; the runbook GPUEfficiencyExporterBlind",
            queries=(
                Query(
                    f"sum by (reason) (rate({_gpus('gpu_efficiency_unobserved_seconds_total')}{_RECENT})) > 0",
                    legend="{{reason}}",
                ),
            ),
            unit="none",
            width=12,
            height=7,
            empty="all was seen",
            fills="telemetry_outage",
            link=to("quality", "Exporter and data quality"),
        ),
        Panel(
            title="Readings refused, by reason",
            kind=Lines(stacked=True),
            shows="Readings or fields a minute that could not be believed, by the reason. A refused field is not known;"
            " it is never replaced by a guess.",
            bad="a steady rate: a sensor or a driver tells nonsense",
            do="name it when you report the driver; the time is not lost, it is grey above",
            queries=(
                Query(
                    f"60 * sum by (reason) (rate({at('gpu_efficiency_rejected_total', THIS_NODE)}{_RECENT}))",
                    legend="{{reason}}",
                ),
            ),
            unit="none",
            width=12,
            height=7,
            empty=_NOT_HEARD,
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="node",
    title="Node and GPU",
    says="For who cares for machines: what a node got of what was paid, what each of its GPUs does now, where their"
    " time went, and what is wrong with the hardware.",
    variables=(ITS_CLUSTER, NODE, INSTANCE, GPU),
    rows=(_ANSWER, _NOW, _WATERFALL, _SIGNALS, _ERRORS),
)
