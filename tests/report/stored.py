"""Two hours of four jobs, a sample a minute, as their daemons would have told them: small enough to add up by hand.

Job 41 (16 GPUs, 2 USD a GPU-hour) runs on n1 and n2 from minute 0 to 120. The daemon of n2 is last heard at minute 50,
begins anew at 51.5 and is scraped again at 52. Job 42 (4 GPUs, 2.50 USD) runs on n3 and has not ended at minute 180.
Job inference/chat (2 + 2 GPUs, no price) runs on n4 and n5; n5's daemon is not heard after minute 60, it ends at 120.
Job 55 (1 GPU) runs on n10 from minute 0 to 20; the daemon begins anew at 10.5 and at 13.5, and hears no report between.
Job 88 (8 GPUs) runs on n11 for 35 s, job 89 (4 GPUs) for as long between two scrapes of n12; a GPU-hour costs 2 USD.
Job 77 ran twice: on n6 until minute 20, and on n7 from 60 to 90. Job 99 is in two clusters.
"""

from tests.dashboards.past import Series, named

BEGIN = 1_767_225_600
"""2026-01-01 00:00 UTC."""
END = 180
LINGER = 5
"""Minutes for which a daemon exports an ended job."""
H100 = "NVIDIA H100 80GB HBM3"
GAUGES = {
    "41": {
        "n1": {
            "reported_mfu_ratio": 0.4, "reported_hfu_ratio": 0.5, "ofu_ratio": 0.45, "bubble_ratio": 0.05, "loss": 2.5,
            "world_size": 24, "rank_busy_seconds{rank=0}": 1.0, "rank_busy_seconds{rank=1}": 1.1,
            "quality_target{name=accuracy}": 0.65, "quality_start{name=accuracy}": 0.2,
            "activity_ratio{percentile=p10}": 0.2, "activity_ratio{percentile=p50}": 0.8,
            "activity_ratio{percentile=p90}": 1.0, "activity_deviation_ratio": 0.25,
        },
        "n2": {
            "reported_mfu_ratio": 0.3, "reported_hfu_ratio": 0.45, "ofu_ratio": 0.45,
            "rank_busy_seconds{rank=8}": 1.2, "rank_busy_seconds{rank=9}": 2.2,
        },
    },
    "42": {
        "n3": {
            "reported_mfu_ratio": 0.6, "ofu_ratio": 0.6, "quality_start{name=accuracy}": 0.2,
            "activity_ratio{percentile=p10}": 0.5, "activity_ratio{percentile=p50}": 0.9,
            "fitting_slice_ratio{profile=3g.40gb}": 0.43,
            "activity_ratio{percentile=p90}": 1.0,
        },
    },
    "inference/chat": {
        "n4": {
            "requests{state=running}": 10, "requests{state=waiting}": 0, "batch_fill_ratio": 0.5, "kv_cache_ratio": 0.4,
            "mbu_ratio": 0.6, "tokens_per_pass_ratio": 2, "latency_seconds{kind=ttft,percentile=p99}": 0.2,
            "latency_seconds{kind=itl,percentile=p50}": 0.03, "engine_info{engine=vllm}": 1,
        },
        "n5": {
            "requests{state=running}": 6, "requests{state=waiting}": 4, "batch_fill_ratio": 0.25,
            "kv_cache_ratio": 0.97, "tokens_per_pass_ratio": 1, "latency_seconds{kind=ttft,percentile=p99}": 1.5,
            "latency_seconds{kind=itl,percentile=p50}": 0.02,
        },
    },
}  # fmt: skip
"""Constant series by job and node."""
RATES = {
    "41": {
        "n1": {
            "paid_seconds_total": 480, "energy_joules_total": 360_000,
            "seconds_total{leak=useful,layer=useful}": 192, "seconds_total{leak=data_stall,layer=ectr}": 96,
            "seconds_total{leak=memory_bound,layer=emfu}": 96, "seconds_total{leak=idle_allocation,layer=gau}": 48,
            "seconds_total{leak=checkpoint,layer=ectr}": 48, "seconds_total{leak=hung,layer=ectr}": 0,
        },
        "n2": {
            "paid_seconds_total": 480, "energy_joules_total": 360_000,
            "seconds_total{leak=useful,layer=useful}": 240, "seconds_total{leak=throttled,layer=emfu}": 120,
            "seconds_total{leak=exposed_communication,layer=ectr}": 120,
        },
    },
    "42": {
        "n3": {
            "paid_seconds_total": 240, "seconds_total{leak=useful,layer=useful}": 144, "unneeded_seconds_total": 30,
            "seconds_total{leak=data_stall,layer=ectr}": 48, "seconds_total{leak=memory_bound,layer=emfu}": 48,
        },
    },
    "inference/chat": {
        "n4": {
            "paid_seconds_total": 120, "seconds_total{leak=useful,layer=useful}": 60,
            "seconds_total{leak=memory_bound,layer=emfu}": 60,
        },
        "n5": {"paid_seconds_total": 120, "seconds_total{leak=idle_allocation,layer=gau}": 120},
    },
}  # fmt: skip
"""Growth per minute of the daemon's counters by job and node."""
TOLD = {
    "41": {
        "n1": {
            "reported_gpu_seconds_total": 480, "tokens_total": 4800, "padding_tokens_total": 480, "samples_total": 48,
            "steps_total": 6, "run_seconds_total{phase=compute}": 36, "run_seconds_total{phase=communication}": 6,
            "run_seconds_total{phase=bubble}": 3, "run_seconds_total{phase=checkpoint}": 6,
            "run_seconds_total{phase=data}": 6, "run_seconds_total{phase=rework}": 3,
            "run_seconds_total{phase=idle}": 0,
        },
        "n2": {
            "reported_gpu_seconds_total": 240, "tokens_total": 2640, "padding_tokens_total": 528, "steps_total": 6,
            "run_seconds_total{phase=compute}": 45, "run_seconds_total{phase=unreported}": 15,
        },
    },
    "42": {"n3": {"reported_gpu_seconds_total": 240, "tokens_total": 2880, "steps_total": 3}},
    "inference/chat": {
        "n4": {
            "preemptions_total": 6, "engine_tokens_total{kind=generated}": 6000,
            "engine_tokens_total{kind=drafted}": 600, "engine_tokens_total{kind=accepted}": 480,
        },
        "n5": {
            "preemptions_total": 12, "engine_tokens_total{kind=generated}": 3000,
            "engine_tokens_total{kind=drafted}": 600, "engine_tokens_total{kind=accepted}": 120,
        },
    },
}  # fmt: skip
"""Series that exist once the job or its engine has reported: a minute later after a restart."""
SIZES = {"41": 8, "42": 4, "inference/chat": 2}
PRICES = {"41": (16.0, "USD"), "42": (10.0, "USD"), "inference/chat": (2.0, "GPU-hours")}
STAYS = (("41", "n1", 0, 120), ("41", "n2", 0, 120), ("42", "n3", 0, END), ("inference/chat", "n4", 0, 120),
         ("inference/chat", "n5", 0, 60))  # fmt: skip
LAST, DOWN, AGAIN = 50, 51.5, 52
"""Restart of n2: last scrape, start, next scrape."""


def samples() -> Series:
    """Return all samples by metric."""
    found: Series = {}
    for job, node, start, end in STAYS:
        for minute in range(start, min(end + LINGER, END) + 1):
            if (node, minute) == ("n2", 51) or (node == "n5" and minute > end):
                continue
            _tell_node(found, "a", node, minute)
            _tell(found, job, node, minute, end)
    for minute in range(END + 1):
        _tell_short(found, minute)
    for minute in range(20 + LINGER + 1):
        _tell_restless(found, minute)
    for minute in range(30, 30 + LINGER + 1):
        _tell_brief(found, minute)
    return found


def _tell(found: Series, job: str, node: str, minute: int, end: int) -> None:
    page = {"cluster": "a", "instance": f"{node}:19400", "job_id": job}
    put(found, "start_timestamp_seconds", page, BEGIN, minute)
    for name, rate in RATES[job][node].items():
        put(found, name, page, rate * _minutes(node, minute, end), minute)
    since = _since_heard(node, minute, end)
    for name, rate in TOLD[job].get(node, {}).items():
        if since is not None:
            put(found, name, page, rate * since, minute)
    put(found, "info", page | {"name": f"train-{job}", "user": "ada", "account": "nlp"}, 1, minute)
    if job == "41":
        _tell_events(found, page, node, minute)
    if minute <= end:
        _tell_held(found, job, node, page, minute)


def _minutes(node: str, minute: int, end: int) -> float:
    """Return the seconds that a daemon has counted."""
    return min(minute, end) - (DOWN if node == "n2" and minute > LAST else 0)


def _since_heard(node: str, minute: int, end: int) -> float | None:
    """Return the minutes reported so far; None before the first."""
    at = min(minute, end) - (AGAIN if node == "n2" and minute > LAST else 0)
    return None if node == "n2" and minute == AGAIN else at


def _tell_events(found: Series, page: dict[str, str], node: str, minute: int) -> None:
    if node == "n2":
        put(found, "loss_events_total{event=spike}", page, 2 if minute > AGAIN else 0, minute)
        return
    put(found, "loss_events_total{event=spike}", page, 3 if minute > 70 else 0, minute)
    put(found, "loss_events_total{event=rollback}", page, 0, minute)
    put(found, "checkpoints_total", page, min(minute, 120) // 30, minute)
    put(found, "restarts_total", page, 2 if minute >= 60 else 0, minute)
    put(found, "recovery_seconds_total", page, 240 if minute >= 60 else 0, minute)
    put(found, "rework_steps_total", page, 36 if minute >= 60 else 0, minute)
    quality = next(value for since, value in ((90, 0.7), (60, 0.6), (30, 0.4), (0, 0.2)) if minute >= since)
    put(found, "quality{name=accuracy}", page, quality, minute)
    if minute >= 90:
        put(found, "target_reached_timestamp_seconds", page, BEGIN + 90 * 60, minute)


def _tell_held(found: Series, job: str, node: str, page: dict[str, str], minute: int) -> None:
    for name, value in GAUGES[job][node].items():
        put(found, name, page, value, minute)
    price, currency = PRICES[job]
    put(found, "price_per_hour", page | {"currency": currency}, price, minute)
    put(found, "state_gpus{state=active}", page, SIZES[job], minute)
    gpu = {"uuid": f"GPU-{node}", "gpu": "0"}
    put(found, "gpu_efficiency_allocation_info", page | gpu, 1, minute)
    put(
        found,
        "gpu_efficiency_gpu_info",
        {k: v for k, v in page.items() if k != "job_id"} | gpu | {"model": H100},
        1,
        minute,
    )
    if job == "42":
        put(found, "quality{name=accuracy}", page, 0.6 if minute >= 100 else 0.5 if minute >= 20 else 0.2, minute)


def _tell_node(found: Series, cluster: str, node: str, minute: int) -> None:
    page = {"cluster": cluster, "instance": f"{node}:19400"}
    put(found, "gpu_efficiency_node_info", page | {"node": node}, 1, minute)
    put(found, "gpu_efficiency_build_info", page | {"version": "1"}, 1, minute)
    if node in {"n1", "n3"}:
        of_hour = 300 + 200 * (minute % 2)  # 400 on average, and not last
        put(found, "gpu_efficiency_grams_co2_per_kwh", page, of_hour if node == "n1" else 900, minute)
        price = page | {"currency": "USD" if node == "n1" else "EUR"}
        put(found, "gpu_efficiency_price_per_kwh", price, 0.12 if node == "n1" else 0.3, minute)
    put(found, "gpu_efficiency_simulated", page, int(node == "n1"), minute)


def _tell_short(found: Series, minute: int) -> None:
    """Build job 77, which ran twice, and job 99, in two clusters; one GPU each, all of it useful."""
    for job, cluster, node, start, end in (
        ("77", "a", "n6", 0, 20), ("77", "a", "n7", 60, 90), ("99", "a", "n8", 0, 100), ("99", "b", "n8", 0, 100),
    ):  # fmt: skip
        if start <= minute <= end + LINGER:
            page = {"cluster": cluster, "instance": f"{node}:19400", "job_id": job}
            _tell_node(found, cluster, node, minute)
            put(found, "start_timestamp_seconds", page, BEGIN + start * 60, minute)
            paid = 60 * (min(minute, end) - start)
            put(found, "paid_seconds_total", page, paid, minute)
            put(found, "seconds_total{leak=useful,layer=useful}", page, paid, minute)
            if minute <= end:
                put(found, "state_gpus{state=active}", page, 1, minute)


def _tell_restless(found: Series, minute: int) -> None:
    """Count ten tokens per GPU-second while they are reported."""
    page = {"cluster": "a", "instance": "n10:19400", "job_id": "55"}
    begun = 13.5 if minute > 13 else 10.5 if minute > 10 else 0
    paid = 60 * (min(minute, 20) - begun)
    _tell_node(found, "a", "n10", minute)
    put(found, "start_timestamp_seconds", page, BEGIN, minute)
    put(found, "paid_seconds_total", page, paid, minute)
    put(found, "seconds_total{leak=useful,layer=useful}", page, paid, minute)
    put(found, "state_gpus{state=active}", page, 1, minute)
    if not 10 < minute <= 13:
        put(found, "reported_gpu_seconds_total", page, paid, minute)
        put(found, "tokens_total", page, 10 * paid, minute)


def _tell_brief(found: Series, minute: int) -> None:
    """Build jobs 88 and 89, which end before minute 31."""
    for job, node, gpus, start in (("88", "n11", 8, 1794), ("89", "n12", 4, 1806)):
        page = {"cluster": "a", "instance": f"{node}:19400", "job_id": job}
        _tell_node(found, "a", node, minute)
        node_price = {"cluster": "a", "instance": f"{node}:19400", "model": H100, "held": "true", "currency": "USD"}
        put(found, "gpu_efficiency_price_per_gpu_hour", node_price, 2.0, minute)
        if minute * 60 < start:
            continue
        paid = gpus * min(35, minute * 60 - start)
        put(found, "start_timestamp_seconds", page, BEGIN + start, minute)
        put(found, "paid_seconds_total", page, paid, minute)
        put(found, "seconds_total{leak=useful,layer=useful}", page, paid, minute)
        if minute == 30:
            put(found, "state_gpus{state=active}", page, gpus, minute)
            put(found, "price_per_hour", page | {"currency": "USD"}, 2.0 * gpus, minute)


def put(found: Series, name: str, labels: dict[str, str], value: float, minute: int) -> None:
    """Add a sample of a job's series; other series by their full name."""
    bare, _, inside = name.removesuffix("}").partition("{")
    full = bare if bare.startswith(("gpu_efficiency_", "process_")) else f"gpu_efficiency_job_{bare}"
    own = dict(pair.split("=") for pair in inside.split(",")) if inside else {}
    found.setdefault(named(full, **(labels | {"job": "gpu"} | own)), []).append((BEGIN + minute * 60, value))
