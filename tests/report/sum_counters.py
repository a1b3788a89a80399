"""Three hours of a few jobs' counters, a sample a minute, small enough to add up by hand.

Job old runs all the time; new runs from minute 70.5 to 100, and its first sample is half a minute; late is old, but its
node n2 is scraped from minute 80 on. The daemon of n3, and so the counter of anew, restarts from 0 at minute 120; that
of moved restarts at another address at 91 and resumes its counters. Each of n1 to n3 has four GPUs, two of them
unallocated. A GPU that is held draws 500 W, and one that is not 100 W. The price of energy is known of n1 and n2, its
carbon intensity of n1.
"""

from tests.dashboards.past import Series, named
from tests.report.sum_fleets import BEGIN

MINUTE = 60
END = 180
"""Minutes."""


def by_hand() -> Series:
    """Return three hours of each daemon's counters in seconds, a sample a minute."""
    found: Series = {}
    for minute in range(END + 1):
        for node, price, currency in (("n1", 2.0, "USD"), ("n2", 4.0, "USD"), ("n3", 1.0, "GPU-hours")):
            if node != "n2" or minute >= 80:  # n2 is scraped from minute 80 on
                tell_node(found, node, price, currency, minute)
        tell_job(found, "n1", "old", minute, start=0, end=END)
        tell_job(found, "n1", "new", minute, start=70.5, end=100)
        if minute >= 80:
            tell_job(found, "n2", "late", minute, start=0, end=END, account="nlp")
        tell_job(found, "n3", "anew", minute, start=0, end=END, again=120)
        if not 90 < minute < 92:  # the daemon restarts at another address and resumes its counters
            tell_job(found, "n4" if minute <= 90 else "n5", "moved", minute, start=70, end=110)
    return found


def tell_node(found: Series, node: str, price: float, currency: str, minute: int) -> None:
    put(found, "node_gpus", node, 4, minute, model="H")
    put(found, "ticks_total", node, minute - (120 if node == "n3" and minute >= 120 else 0), minute)
    for held in ("true", "false"):
        put(found, "price_per_gpu_hour", node, price, minute, model="H", held=held, currency=currency)
    since = minute - (120 if node == "n3" and minute >= 120 else 0)
    put(found, "paid_seconds_total", node, since * MINUTE * 4.0, minute, uuid="GPU-0", gpu="0")
    put(found, "node_energy_joules_total", node, since * MINUTE * 1000.0, minute, model="H", layer="useful")
    put(found, "node_energy_joules_total", node, since * MINUTE * 200.0, minute, model="H", layer="gau")
    if node != "n3":
        put(found, "price_per_kwh", node, 0.2 if node == "n1" else 0.5, minute, currency="EUR")
    if node == "n1":
        put(found, "grams_co2_per_kwh", node, 300 + 200 * (minute % 2), minute)
    for held, leak, rate in (("true", "useful", 2.0), ("false", "idle_allocation", 2.0)):
        put(found, "node_seconds_total", node, since * MINUTE * rate, minute, model="H", held=held, leak=leak)


def tell_job(
    found: Series,
    node: str,
    job: str,
    minute: int,
    *,
    start: float,
    end: float,
    again: int = END + 1,
    account: str = "",
) -> None:
    """Add a job with one GPU, all of it useful; its series are exported for five minutes after its end."""
    if not start <= minute <= end + 5:
        return
    paid = (min(minute, end) - (again if minute >= again else start)) * MINUTE
    own = {"job_id": job}
    since = 91 if node == "n5" else -60
    found.setdefault(
        named("process_start_time_seconds", cluster="hand", instance=f"{node}:19400", job="gpu"), []
    ).append((BEGIN + minute * MINUTE, BEGIN + since * MINUTE))
    put(found, "job_start_timestamp_seconds", node, BEGIN + start * MINUTE, minute, **own)
    put(found, "job_paid_seconds_total", node, paid, minute, **own)
    put(found, "job_energy_joules_total", node, paid * 500, minute, **own)
    put(found, "job_seconds_total", node, paid, minute, leak="useful", layer="useful", **own)
    put(found, "job_info", node, 1, minute, user="ada" if job == "old" else "bob", account=account, **own)


def put(found: Series, name: str, node: str, value: float, minute: int, **labels: str) -> None:
    where = {"cluster": "hand", "instance": f"{node}:19400", "job": "gpu"}
    found.setdefault(named(f"gpu_efficiency_{name}", **labels, **where), []).append((BEGIN + minute * MINUTE, value))


def reloaded() -> Series:
    """Return three hours of a job in a cluster of its own: team red has it, blue from minute 65 to 120, red again."""
    found: Series = {}
    for minute in range(END + 1):
        where = {"cluster": "reloaded", "instance": "n1:19400", "job": "gpu"}
        seconds = minute * MINUTE
        for name, value, labels in (
            ("ticks_total", minute, {}),
            ("job_start_timestamp_seconds", BEGIN, {"job_id": "passed"}),
            ("job_paid_seconds_total", seconds, {"job_id": "passed"}),
            ("job_seconds_total", seconds, {"job_id": "passed", "leak": "useful", "layer": "useful"}),
            ("job_info", 1, {"job_id": "passed", "team": "blue" if 65 <= minute <= 120 else "red"}),
        ):
            series = found.setdefault(named(f"gpu_efficiency_{name}", **labels, **where), [])
            series.append((BEGIN + seconds, value))
    return found


SILENT = (100, 255)
"""Minutes of the last scrape of a node before a gap, and of the first one after it."""
SILENT_END = 480


def silent(cluster: str, *, booted: int = 0, anew: int = 0) -> Series:
    """Return eight hours of two nodes in a cluster of their own, four GPUs each with a job.

    n2 is not scraped in SILENT, and boots at minute `booted`. Its job ends with SILENT's beginning and begins anew at
    minute `anew`, with the same ID.
    """
    found: Series = {}
    for minute in range(SILENT_END + 1):
        for node in ("n1", "n2") if not SILENT[0] < minute < SILENT[1] else ("n1",):
            where = {"cluster": cluster, "instance": f"{node}:19400", "job": "gpu"}
            job = {"job_id": f"on-{node}"}
            seconds = (minute - (booted if node == "n2" and minute >= SILENT[1] else 0)) * MINUTE
            again = anew if node == "n2" and minute >= SILENT[1] else 0
            of_job = seconds - again * MINUTE
            for name, value, labels in (
                ("ticks_total", minute, {}),
                ("node_gpus", 4, {"model": "H"}),
                ("price_per_gpu_hour", 2.0, {"model": "H", "held": "true", "currency": "USD"}),
                ("paid_seconds_total", seconds * 4.0, {"uuid": node, "gpu": "0"}),
                ("node_seconds_total", seconds * 4.0, {"model": "H", "held": "true", "leak": "useful"}),
                ("node_energy_joules_total", seconds * 1000.0, {"model": "H", "layer": "useful"}),
                ("job_start_timestamp_seconds", BEGIN + (again * MINUTE or -MINUTE), job),
                ("job_paid_seconds_total", of_job * 4.0, job),
                ("job_seconds_total", of_job * 4.0, job | {"leak": "useful", "layer": "useful"}),
                ("job_energy_joules_total", of_job * 1000.0, job),
                ("job_info", 1, job | {"user": "ada" if node == "n1" else "bob"}),
            ):
                series = found.setdefault(named(f"gpu_efficiency_{name}", **labels, **where), [])
                series.append((BEGIN + minute * MINUTE, value))
    return found
