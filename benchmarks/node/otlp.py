"""What pushing over OTLP costs a node: two daemons side by side, one of which pushes to a receiver that takes all."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

from benchmarks.figures import Row, row
from benchmarks.group import Group, Measured
from benchmarks.rig.daemon import cpu_seconds, memory, running
from tests.nvml_stub.build import build

_GPUS = 8
_PUSH_SECONDS = 10
_WARM_UP_SECONDS = 15.0
_SLICES = 7
_SLICE_SECONDS = 10.0
_SERVE = ("-m", "exporter", "serve", "--web.listen-address", "127.0.0.1:0", "--source", "nvml", "--history.file", "")


@contextmanager
def _receiver() -> Iterator[tuple[str, list[int]]]:
    """Yield the address of a receiver and the sizes of what it gets, until the block ends."""
    sizes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1/metrics", sizes
        http.shutdown()


def otlp() -> list[Row]:
    """Watch both daemons for a minute."""
    stand_in = {"LD_LIBRARY_PATH": str(build())}
    with ExitStack() as stack:
        url, sizes = stack.enter_context(_receiver())
        pushing = {"GPU_EFFICIENCY_OTLP_ENDPOINT": url, "GPU_EFFICIENCY_OTLP_INTERVAL_SECONDS": f"{_PUSH_SECONDS}"}
        daemons = {
            "without": stack.enter_context(running(_SERVE, stand_in)),
            f"a push every {_PUSH_SECONDS} s": stack.enter_context(running(_SERVE, stand_in | pushing)),
        }
        time.sleep(_WARM_UP_SECONDS)
        looks: dict[str, list[tuple[float, float]]] = {about: [] for about in daemons}
        for number in range(_SLICES + 1):
            for about, daemon in daemons.items():
                looks[about].append((time.perf_counter(), cpu_seconds(daemon.pid)))
            time.sleep(_SLICE_SECONDS if number < _SLICES else 0)
        resident = {about: memory(daemon.pid) for about, daemon in daemons.items()}
    rows = []
    for about, seen in looks.items():
        percents = [100 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(seen)]
        whole = 100 * (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        spread = f"{min(percents):.2f} - {max(percents):.2f}, whole time {whole:.2f}"
        rows += [
            row(
                "otlp", f"CPU of one core, {_GPUS} GPUs at 1 s ({about})",
                often=f"{_SLICES} x {_SLICE_SECONDS:.0f} s", values=percents, unit="%", digits=2, spread=spread,
            ),
            row(
                "otlp", f"Resident memory ({about})", often="at the end", values=[resident[about].now], unit="MiB",
                spread=f"peak {resident[about].peak:.1f}",
            ),
        ]  # fmt: skip
    size = [count / 1024 for count in sizes]
    return [*rows, row("otlp", "Size of a push", often=f"{len(size)} pushes", values=size, unit="KiB")]


OTLP = Group(
    name="otlp",
    title="Pushes over OTLP",
    about=(
        "Two daemons side by side on eight GPUs of the stand-in NVML, without a job, a history store and scrapes; one "
        "pushes [over OTLP](prometheus.md#push-over-otlp), uncompressed, to a receiver on the same machine. The "
        "difference in memory is OpenTelemetry's SDK with what it imports."
    ),
    measures=("exporter/otlp", "exporter/core/metrics.py", "exporter/worker.py"),
    run=lambda: Measured(rows=otlp()),
)
