"""Cases of what serves: the demo's stories with all their pages, a daemon on hardware, a cluster, and a Prometheus."""

import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.compat import node
from tests.compat.checkouts import NOW, PATIENCE, UPTIME, Checkout, Daemon, DriverError
from tests.compat.plays import Play, must
from tests.ports import free_port

STORIES = {
    "demo": (10800,), "leaked_process": (3600,), "deadlock": (3600,), "lost_gpu": (3600,), "zombie_notebook": (10800,),
    "telemetry_outage": (3600,), "throttled": (3600,), "carpenter_told": (14400,), "pipeline_bubble": (3600,),
    "failure_recovery": (3600,), "kv_cache_pressure": (3600,), "idle_allocation_twin": (3600,),
    "prefill_decode_interference": (3600,), "fleet": (7200,),
}  # fmt: skip
"""Seconds of each that are over when its pages are asked for."""
PAGES = (
    "/metrics", "/", "/api/v1/node", "/api/v1/gpus", "/api/v1/jobs", "/api/v1/receipts", "/api/v1/events", "/readyz",
    "/healthz",
)  # fmt: skip
ONCE = (
    "/openapi.json", "/nonsense", "/jobs/", "/jobs/none", "/api/v1/nonsense", "/api/v1/receipts?limit=1",
    "/api/v1/receipts?job_id=41001", "/api/v1/receipts?user=ada&since=1795390000&until=1795391000",
    "/api/v1/receipts?namespace=inference", "/api/v1/receipts?limit=0", "/api/v1/receipts?nonsense=1",
    "/api/v1/receipts?since=x", "/api/v1/receipts?limit=1&limit=2", "/api/v1/events?limit=2", "/api/v1/events?since=x",
    "/api/v1/events?since=1795391000",
)  # fmt: skip
"""Asked of one story alone."""
_MOST_JOBS = 3
_FLEETS_NODE = 3
_HASH = "$2b$04$zpuZ7ki.kcqK0nhTRXNKz.2HbQrYUy4gVvZ9BmWHNwGWPqZbKTLLK"


def demo(play: Play, *, story: str) -> None:
    """All pages of a story's end; then the same a minute later, when they are old."""
    words = ["demo", story, "--preroll", f"{STORIES[story][0]}", "--config", "config.toml"]
    words += ["--node", f"{_FLEETS_NODE}"] if story == "fleet" else []
    with play.checkout.daemon(play.folder, *words) as daemon:
        play.meet(daemon)
        daemon.until_sampled(1)
        daemon.move(2, 0)
        _pages(play, daemon)
        if story == "demo":
            _once(play, daemon)
            _clients(play, daemon)
        daemon.move(62, 0)
        for path in ("/metrics", "/", "/readyz", "/api/v1/gpus", "/api/v1/receipts"):
            play.ask(daemon, path, name=f"GET {path}, old")
        play.tell("log", f"exit status {daemon.end()}\n{daemon.log()}")


def _pages(play: Play, daemon: Daemon) -> None:
    for path in PAGES:
        play.ask(daemon, path)
    play.ask(daemon, "/metrics", name="GET /metrics, OpenMetrics", accept="application/openmetrics-text; version=1.0.0")
    for job in _jobs(daemon):
        play.ask(daemon, f"/jobs/{job}")


def _jobs(daemon: Daemon) -> list[str]:
    """Some of the jobs that it knows."""
    told = json.loads(daemon.get("/api/v1/receipts").body)["receipts"]
    return sorted({receipt["owner"]["job_id"] for receipt in told})[:_MOST_JOBS]


def _once(play: Play, daemon: Daemon) -> None:
    for path in ONCE:
        play.ask(daemon, path)
    for path in ("/metrics", "/", "/api/v1/gpus"):
        play.ask(daemon, path, method="HEAD")
        answer = daemon.get(path, accept_encoding="gzip")
        play.tell(f"GET {path}, compressed", f"{answer.status}\n{answer.headers.get('content-encoding')}")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        play.ask(daemon, "/metrics", method=method)


def _clients(play: Play, daemon: Daemon) -> None:
    """Commands that ask a daemon."""
    for words in ("", "--jobs", "--hour", "--filter ada", "--ascii", "--jobs --filter nobody"):
        play.run(f"top {words}", "top", "--once", "--url", daemon.url, *words.split())
    for form in ("", "--json", "--short", "--html"):
        play.run(f"report {form}", "report", "41001", "--node", daemon.url, "--quiet", *form.split())
    play.run("sums", "report", "--all", "--node", daemon.url, "--quiet", "--since", "1d")
    play.run("report, one silent", "report", "41001", "--node", daemon.url, "--node", "http://127.0.0.1:1", "--quiet")


def guarded(play: Play) -> None:
    """Who may see what, where the web has users."""
    play.write("web.yaml", f"basic_auth_users:\n  ada: {_HASH}\n")
    words = ("demo", "--preroll", "600", "--config", "config.toml", "--web.config-file", "web.yaml")
    with play.checkout.daemon(play.folder, *words) as daemon:
        play.meet(daemon)
        daemon.until(lambda: daemon.status("/readyz") == http.client.OK, "it is not ready")
        for path in ("/", "/metrics", "/api/v1/node", "/readyz", "/healthz"):
            play.ask(daemon, path)
        play.ask(daemon, "/metrics", name="a wrong password", authorization="Basic YWRhOndyb25n")
        play.tell("log", f"exit status {daemon.end()}\n{daemon.log()}")


# -- on hardware --


def hardware(play: Play) -> None:
    """A daemon beside a dcgm-exporter and a directory of jobs: its life, a restart, and another after a reboot."""
    node.lay_out(play.folder)
    boards = node.Boards(("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    with node.exporter(boards) as url:
        play.hide_port(int(url.split(":")[2].split("/")[0]))
        node.give(play.folder, -100, gpu0="41", gpu1="41", gpu2="42")
        boards.say(node.BUSY, node.BUSY, node.IDLE, node.FREE)
        with node.served(play.checkout, play.folder, url, uptime=UPTIME, chance=1) as daemon:
            play.meet(daemon)
            _first_life(play, daemon, boards)
        for name, after, uptime in (("restart", 600, UPTIME + 600), ("reboot", 1200, 100)):
            with node.served(play.checkout, play.folder, url, wall=NOW + after, uptime=uptime, chance=after) as daemon:
                play.meet(daemon)
                for number in range(1, 4):
                    boards.say(node.BUSY, node.BUSY, node.IDLE, node.FREE)
                    node.step(daemon, number)
                for path in PAGES:
                    play.ask(daemon, path, name=f"{name}: GET {path}")
                play.tell(f"{name}: log", f"exit status {daemon.end()}\n{daemon.log()}")


def _first_life(play: Play, daemon: Daemon, boards: node.Boards) -> None:
    for number in range(1, 31):
        late = number > 20
        if number == 21:
            node.give(play.folder, 205, gpu2="", gpu3="43")
        xid = {"DEV_XID_ERRORS": 79.0} if number == 25 else {}
        first = node.SPINNING if late else {**node.BUSY, "DEV_GPU_TEMP": 60.0 + number % 7}
        boards.say(first, {**first, **xid}, node.FREE if late else node.IDLE, node.BUSY if late else node.FREE)
        node.step(daemon, number)
        if number in {20, 30}:
            for path in PAGES:
                play.ask(daemon, path, name=f"after {number}: GET {path}")
    play.run("pause", "pause", "--config", "config.toml", "--for", "20m")
    node.step(daemon, 31)
    play.ask(daemon, "/metrics", name="paused: GET /metrics")
    play.ask(daemon, "/", name="paused: GET /")
    play.run("resume", "resume", "--config", "config.toml")
    for job in _jobs(daemon):
        play.ask(daemon, f"/jobs/{job}")
    play.tell("log", f"exit status {daemon.end()}\n{daemon.log()}")


def recording(play: Play) -> None:
    """`record` beside the same."""
    node.lay_out(play.folder)
    boards = node.Boards(("GPU-a", "GPU-b"))
    node.give(play.folder, -100, gpu0="41")
    boards.say(node.BUSY, node.FREE)
    trace = play.folder / "trace.jsonl"
    with node.exporter(boards) as url:
        play.hide_port(int(url.split(":")[2].split("/")[0]))
        words = ("record", "trace.jsonl", "--config", "config.toml", "--dcgm-exporter-url", url, "--quiet")
        with play.checkout.daemon(play.folder, *words, begun=True) as daemon:
            play.meet(daemon)
            for number in range(4):
                boards.say({**node.BUSY, "DEV_GPU_TEMP": 60.0 + number}, node.FREE)
                daemon.move(number * node.PERIOD, number * node.PERIOD)
                daemon.until(lambda count=number + 2: _lines(trace) >= count, "nothing is recorded")  # type: ignore[misc]
            play.tell("log", f"exit status {daemon.end()}\n{daemon.log()}")
    play.tell("trace.jsonl", trace.read_text(encoding="utf-8"))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# -- a cluster --

_QUIET_SECONDS = 0.7
_SCRIPTS = {
    "squeue": "cat squeue.json",
    "sinfo": "cat sinfo.txt",
    "scontrol": 'case "$*" in *reservation*) cat reservations.txt;; *) cat topology.txt;; esac',
}


def cluster(play: Play, *, version: str) -> None:
    """`cluster` on what a real Slurm of that version has printed."""
    for name in ("squeue.json", "sinfo.txt", "reservations.txt", "topology.txt"):
        made = play.inputs.made(f"{version}-{name}", partial(_recorded, version=version, name=name))
        shutil.copyfile(made, play.folder / name)
    for name, script in _SCRIPTS.items():
        play.write(f"bin/{name}", f"#!/bin/sh\ncd {play.folder}\necho {name} >> calls\n{script}\n")
        (play.folder / "bin" / name).chmod(0o755)
    play.write("config.toml", f'[cluster]\nscheduler = "slurm"\n[slurm]\nbin_dir = "{play.folder}/bin"\n')
    words = ("cluster", "--config", "config.toml")
    with play.checkout.daemon(play.folder, *words, port_flag="--cluster.listen-address", begun=True) as daemon:
        play.meet(daemon)
        for turn in range(3):
            daemon.move(60 * turn, 60 * turn)
            _until_quiet(daemon, play.folder / "calls")
        for path in ("/metrics", "/", "/readyz", "/healthz", "/nonsense"):
            play.ask(daemon, path)
        accept = "application/openmetrics-text; version=1.0.0"
        play.ask(daemon, "/metrics", name="GET /metrics, OpenMetrics", accept=accept)
        play.tell("log", f"exit status {daemon.end()}\n{daemon.log()}")
    calls = (play.folder / "calls").read_text(encoding="utf-8").split()
    play.tell("calls", "\n".join(sorted(calls)))


def _recorded(old: Checkout, folder: Path, *, version: str, name: str) -> None:
    shutil.copyfile(old.path / "tests/cluster/recorded" / version / name, folder / f"{version}-{name}")


def _until_quiet(daemon: Daemon, calls: Path) -> None:
    """Wait until a turn's questions have been asked."""
    before, quiet_since = _lines(calls), time.monotonic()
    asked = False

    def quiet() -> bool:
        nonlocal before, quiet_since, asked
        now = _lines(calls)
        if now != before:
            before, quiet_since, asked = now, time.monotonic(), True
        return (asked or before > 0) and time.monotonic() - quiet_since > _QUIET_SECONDS

    daemon.until(quiet, "the scheduler is not asked")


# -- a Prometheus --

_BEGIN = 1_767_225_600
"""When simulated traces begin."""
_PAST = ("--since", "5h", "--at", f"{_BEGIN + 4 * 3600}")
_TRACES = {
    "one": ("demo", "--seed", "3", "--period", "20", "--duration", "3600"),
    "two": ("idle_allocation_twin", "--seed", "4", "--node", "1", "--period", "20", "--duration", "3600"),
    "three": ("pipeline_bubble", "--seed", "5", "--node", "2", "--period", "20", "--duration", "1200"),
}
_ASKED = (
    *(f"report {job} {form}" for job in ("41001", "41000", "inference/chat-1-1") for form in ("--json", "", "--html")),
    "report --compare 41001 41000", "report none", "report 41001 --line", "report 41001 --short",
    "report --all --by user --json", "report --all", "report --user ada --line", "report --all --markdown --gpus 3",
    "report --all --rent 4@0.9 --html",
)  # fmt: skip
_TRIED = ("--policy hang=5m,10m", "--policy zombie.batch=10m --json", "--policy no_process=10m")
HAVE_PROMETHEUS = shutil.which("prometheus") is not None and shutil.which("promtool") is not None


def prometheus(play: Play, *, part: int) -> None:
    """Reports and previews of what a real Prometheus has stored: an older version's backfill."""
    play.bring(play.inputs.made("blocks", partial(_blocks, traces=[_trace(play, name) for name in _TRACES])))
    with _server(play.folder) as port:
        play.hide_port(port)
        at = ("--prometheus", f"http://127.0.0.1:{port}", "--quiet")
        for asked in _ASKED[part::2]:
            play.run(asked.replace("/", "|"), *asked.split(), *at, *_PAST)
        for tried in _TRIED[part::2]:
            play.run(f"preview {tried}", "preview", *tried.split(), *at, "--since", "330d", "--step", "10m")


def _trace(play: Play, name: str) -> Path:
    return play.inputs.trace(f"{name}.jsonl", *_TRACES[name])


def _blocks(old: Checkout, folder: Path, *, traces: Sequence[Path]) -> None:
    words = ("--simulated", "--step", "60s", "--label", "cluster=a", "--quiet", "-o", "all.om", "--config", "c.toml")
    (folder / "c.toml").write_text("[[prices]]\nper_gpu_hour = 2.5\n", encoding="utf-8")
    must(old.run(folder, "backfill", *(f"{trace}" for trace in traces), *words))
    line = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", "all.om", "blocks"]
    subprocess.run(line, cwd=folder, check=True, capture_output=True)


@contextmanager
def _server(folder: Path) -> Iterator[int]:
    """A Prometheus on the folder's blocks; its port."""
    port = free_port()
    (folder / "prometheus.yaml").write_text("{}", encoding="utf-8")
    line = [
        "prometheus", "--config.file=prometheus.yaml", f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        "--storage.tsdb.path=blocks", "--storage.tsdb.retention.time=100y",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(line, cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DriverError("Prometheus does not come up")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/-/ready")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def installation(play: Play) -> None:
    """`install-check` on this machine, without its figures."""
    for words in ("install-check", "install-check --json", "install-check --config config.toml --json"):
        said = play.checkout.run(play.folder, *words.split())
        play.tell(words, re.sub(r"\d+(\.\d+)?", "N", f"exit status {said.status}\n{said.out}\n{said.err}"))


SERVED: dict[str, Callable[[Play], None]] = {
    **({f"prometheus-{part + 1}": partial(prometheus, part=part) for part in range(2)} if HAVE_PROMETHEUS else {}),
    "serve": hardware,
    **{f"http-{story}": partial(demo, story=story) for story in STORIES},
    "http-guarded": guarded,
    "record": recording,
    **{f"cluster-{version}": partial(cluster, version=version) for version in ("slurm-22.05", "slurm-24.11")},
    "install-check": installation,
}
"""Cases by name."""
