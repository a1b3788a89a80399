"""For those who serve: what servers lose, whose it is, and how full they are beside what their users wait for."""

from msgspec.structs import replace

from dashboards import bands, words
from dashboards.leak_table import table, waterfall
from dashboards.leaks import rows
from dashboards.losses import COST, INFERENCE, INFO, LAYERS, choice
from dashboards.parts import Board, Column, Figure, Lines, Panel, Query, Row, Table
from dashboards.series import CLUSTER, NAMESPACE, TO_JOB, a_month, at, of_layers, total
from dashboards.watching import SLOWEST, SPREAD, WORST, latency, spread

_NONE = "no server seen"
_SILENT = "no engine heard: see docs/engines.md"
_LOSSES = 'layer=~"gau|ectr|emfu"'
_HEARD = "class:gpu_efficiency_engine:gpus"
_LATENCY, _REQUESTS = "job:gpu_efficiency_latency:seconds", "job_state:gpu_efficiency_requests"
_TOKENS, _ALL_REQUESTS = "job:gpu_efficiency_generated_tokens:rate5m", "cluster_state:gpu_efficiency_requests"
_P99, _TTFT, _ITL, _QUEUE = 'percentile="p99"', 'kind="ttft"', 'kind="itl"', 'kind="queue"'
_RUNNING, _WAITING = 'state="running"', 'state="waiting"'
_ALL_TOKENS = "cluster:gpu_efficiency_generated_tokens:rate5m"
_A_MILLION = (
    f"1e6 * sum by (currency) ({at('cluster:gpu_efficiency_cost_served:per_hour')})"
    f" / on () group_left () (3600 * sum({at(_ALL_TOKENS)}) > 0)"
)


_FIRST = Row(
    "What servers give for what they hold",
    (
        Panel(
            title="Useful",
            kind=Figure(steps=bands.judged(bands.SERVING["product"])),
            shows="Share of the seen GPU time of servers that moved a model, in terms of the hardware's peak. Decoding"
            " waits for memory: 3 to 30 % is what most have.",
            bad="below 3 %",
            do="take the longest bar below that is not green",
            queries=(Query(of_layers("class", "floor", INFERENCE.where)),),
            unit="percentunit",
            decimals=1,
            width=3,
            height=4,
            empty=_NONE,
        ),
        Panel(
            title="Lost",
            kind=Figure(named=True, steps=((None, words.BAD),)),
            shows="What servers lose, in money a month (730 h) at the mean rate of the time shown.",
            bad="idle and oversized allocation in it: they serve nobody",
            do="begin with the dearest row of the table below",
            queries=(Query(a_month(COST, INFERENCE.where, _LOSSES, by="currency"), legend="{{currency}} a month"),),
            decimals=0,
            width=5,
            height=4,
            empty=_NONE,
        ),
        Panel(
            title="All servers now",
            kind=Figure(steps=((None, words.EXPECTED),), named=True),
            shows="Of the servers heard: tokens generated a second; what their GPUs cost for a million of them; time to"
            " the first token (TTFT) and between two tokens (ITL) of the slowest, 99th percentile; requests that wait"
            " for a place in a batch.",
            bad="a million tokens dearer than an API asks for the same model; a TTFT above what users were promised; an"
            " ITL above 100 ms, slower than people read; requests that wait while batches are not full",
            do="fuller batches and fewer replicas for the cost; chunked prefill, smaller batches, or a replica more for"
            " the latencies; leak 11 (under-filled batches) for requests that wait",
            queries=(
                Query(f"sum({at(_ALL_TOKENS)})", "tokens/s", "short"),
                Query(_A_MILLION, "1M tokens, {{currency}}", "short"),
                Query(f"max({at(WORST, _TTFT)})", "TTFT p99", "s"),
                Query(f"max({at(WORST, _ITL)})", "ITL p99", "s"),
                Query(f"sum({at(_ALL_REQUESTS, _WAITING)}) or 0 * sum({at(_ALL_TOKENS)})", "waiting", "none"),
            ),
            unit="short",
            width=12,
            height=4,
            empty="no engine heard",
        ),
        Panel(
            title="Engines",
            kind=Figure(steps=((None, words.UNKNOWN), (0.01, words.WATCH), (0.9, words.GOOD))),
            shows="Share of the GPU time of servers whose engine's metrics are read. Leaks 9 to 12 of the others are"
            " not seen, and count as something else.",
            bad="below 90 %: those leaks are larger than shown",
            do="let the exporter find the engine: docs/engines.md",
            queries=(
                Query(
                    f"clamp_max(({total(_HEARD, INFERENCE.where)} or 0 * {total(LAYERS, INFERENCE.where)})"
                    f" / ({total(LAYERS, INFERENCE.where)} > 0), 1)"
                ),
            ),
            unit="percentunit",
            decimals=0,
            width=4,
            height=4,
            empty=_NONE,
        ),
    ),
)

_LEAKS = Row("Where it goes", (table(INFERENCE, width=24, height=19),))
_CHOSEN, _WATCHED = rows(INFERENCE)


_STATES = {"waiting": words.WATCH, "running": words.EXPECTED}


def _chart(title: str, shows: str, bad: str, do: str, *, queries: tuple[Query, ...], unit: str = "") -> Panel:
    return Panel(
        title=title, kind=Lines(colours=SPREAD | _STATES, dashed=(SLOWEST,)), shows=shows,
        bad=bad, do=do, queries=queries, unit=unit, width=8, height=8, empty=_SILENT,
    )  # fmt: skip


_ACROSS = "The 10th, 50th and 90th percentile across servers."
_MIDDLE = " p50, p95 and p99 of the server in the middle, and the p99 of the slowest."

_BESIDE = Row(
    "What users wait for, beside how full the servers are",
    (
        _chart(
            "Time to first token", f"From the request to its first token:{_MIDDLE}", "p99 far above p50",
            "see the queue and the batches of the same time, below", queries=latency(_TTFT),
        ),
        _chart(
            "Time between tokens", f"While an answer is written:{_MIDDLE}", "p99 that rises with prompts: prefills",
            "leak 10: chunked prefill, or prefill and decode on GPUs of their own",
            queries=latency(_ITL),
        ),
        _chart(
            "Time in the queue", f"From the request to its place in a batch:{_MIDDLE}", "seconds, and batches not full",
            "raise the batch limit; continuous batching", queries=latency(_QUEUE),
        ),
        _chart(
            "Batch fill", f"Requests in the batch over its slots. {_ACROSS}",
            "half empty while requests wait; full while p99 is too high", "leak 11: fewer, fuller replicas",
            queries=spread("job:gpu_efficiency_batch_fill:ratio", INFERENCE),
        ),
        _chart(
            "KV cache in use", f"Of the fullest replica of each server. {_ACROSS}", "p90 at 100 %: evictions",
            "leak 9: quantise the KV cache, give it more memory",
            queries=spread("job:gpu_efficiency_kv_cache:ratio", INFERENCE),
        ),
        _chart(
            "Useful, across servers", f"GAU x ECTR x eMFU of servers. {_ACROSS} Each counted once.",
            "p90 far above p50: some are much fuller than others", "move requests to fewer replicas",
            queries=spread("job:gpu_efficiency_product:ratio_rate5m", INFERENCE),
        ),
    ),
)  # fmt: skip

_COLUMNS = (
    ("Lost an hour", "short", 2, at("job:gpu_efficiency_cost_lost:per_hour")),
    ("GPUs", "none", 0, at("job:gpu_efficiency_gpus")),
    ("Running", "none", 0, at(_REQUESTS, _RUNNING)),
    ("Waiting", "none", 0, at(_REQUESTS, _WAITING)),
    ("Batch fill", "percentunit", 0, at("job:gpu_efficiency_batch_fill:ratio")),
    ("KV cache", "percentunit", 0, at("job:gpu_efficiency_kv_cache:ratio")),
    ("MBU", "percentunit", 0, at("job:gpu_efficiency_mbu:ratio")),
    ("TTFT p99", "s", 1, at(_LATENCY, _TTFT, _P99)),
    ("ITL p99", "s", 0, at(_LATENCY, _ITL, _P99)),
    ("Tokens/s", "short", 0, at(_TOKENS)),
    ("Tok/pass", "none", 2, at("job:gpu_efficiency_tokens_per_pass:ratio_rate5m")),
    ("Accepted", "percentunit", 0, at("job:gpu_efficiency_draft_acceptance:ratio_rate5m")),
)


def _servers() -> Panel:
    lost = f"({_COLUMNS[0][3]} and on (cluster, job_id) {at(INFO, INFERENCE.who)})"
    these = f"topk(50, {lost})"
    named = f"{these} * on (cluster, job_id) group_left (workload_namespace) {at(INFO)}"
    more = (f"max by (cluster, job_id) ({asked}) and on (cluster, job_id) {these}" for *_, asked in _COLUMNS[1:])
    engine = f"{at('job:gpu_efficiency_engine_info')} and on (cluster, job_id) {these}"
    million = (
        f"1e6 / ({at('job:gpu_efficiency_generated_tokens:per_cost_rate5m')} > 0) and on (cluster, job_id) {these}"
    )
    return Panel(
        title="Servers",
        kind=Table(
            (
                Column(of="job_id", title="Server", link=TO_JOB),
                Column(of="engine", title="Engine", width=90, empty="no data"),
                *(
                    Column(of=letter, title=title, unit=unit, decimals=decimals, width=115 if letter == "A" else 90)
                    for letter, (title, unit, decimals, _) in zip("ABCDEFGHIJKL", _COLUMNS, strict=True)
                ),
                Column(of="N", title="1M tokens", unit="short", decimals=2, width=88),
                Column(of="currency", title="Currency", width=80),
            ),
            sort="A",
        ),
        shows="The servers that lose most money an hour now, with what their engines say: requests, batches, KV cache,"
        " latencies of the slowest replica, tokens, drafts, and what a million generated tokens cost.",
        bad="waiting requests beside batches that are not full; a dear million",
        do="click on the server",
        queries=(Query(named), *(Query(query) for query in more), Query(engine), Query(million)),
        width=24,
        height=11,
        empty=_NONE,
    )


_MONEY_ROW = Row(
    "Servers, and what tokens cost",
    (
        _servers(),
        waterfall(INFERENCE, width=8, height=11),
        Panel(
            title="Cost of a million generated tokens",
            kind=Lines(),
            shows="What the GPUs of the servers heard cost, over the tokens they generate.",
            bad="a curve that falls by day and rises by night: too many replicas when few ask",
            do="scale servers to the demand",
            queries=(Query(_A_MILLION, legend="{{currency}}"),),
            unit="short",
            decimals=2,
            width=8,
            height=11,
            empty=_SILENT,
        ),
        Panel(
            title="Tokens for one unit of money",
            kind=Lines(colours=SPREAD),
            shows=f"Generated tokens for one unit of money (a GPU-hour, where there are no prices). {_ACROSS}",
            bad="p10 far below p50 for the same model",
            do="compare batch fill and draft acceptance in the table above",
            queries=spread("job:gpu_efficiency_generated_tokens:per_cost_rate5m", INFERENCE),
            unit="short",
            width=8,
            height=11,
            empty=_SILENT,
        ),
        _chart(
            "Memory bandwidth used (MBU)",
            f"Bytes the engine has to read, over what the memory could. {_ACROSS}",
            "below 50 % while decoding",
            "fewer, fuller replicas; CUDA graphs",
            queries=spread("job:gpu_efficiency_mbu:ratio", INFERENCE),
        ),
        _chart(
            "Requests",
            "Requests of all servers heard: in batches, and waiting for a place.",
            "waiting that grows",
            "see batch fill: if low, raise the limit; if full, a replica more",
            queries=(Query(f"sum by (state) ({at(_ALL_REQUESTS)})", legend="{{state}}"),),
            unit="none",
        ),
        _chart(
            "Computed twice",
            "Tokens a second that were computed again after an eviction, and requests put out of the"
            " batch a second, of all servers heard.",
            "any that stays: the KV cache is too small",
            "leak 9: KV-cache pressure",
            queries=(
                Query(f"sum({at('cluster:gpu_efficiency_recomputed_tokens:rate5m')})", legend="tokens again a second"),
                Query(f"sum({at('cluster:gpu_efficiency_preemptions:rate5m')})", legend="preemptions a second"),
            ),
            unit="short",
        ),
    ),
    folded=True,
)

BOARD = Board(
    name="inference",
    title="Inference leaks",
    says="For those who serve: which leak takes most of the GPU time of servers, what it costs a month, whose it is and"
    " what to do; latencies beside how full batches and caches are; what tokens cost.",
    variables=(
        CLUSTER,
        choice(INFERENCE),
        replace(NAMESPACE, says="Narrows the tables of servers; sums and curves are of all."),
    ),
    rows=(_FIRST, _LEAKS, _CHOSEN, _BESIDE, _MONEY_ROW, _WATCHED),
)
