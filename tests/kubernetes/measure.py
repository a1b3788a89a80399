"""What one refresh costs: our own CPU time and resident memory with fifty pods, the stand-ins in another process.

    python -m tests.kubernetes.measure

Owns the measuring alone. Refuses to judge: the budgets are 5 ms of CPU a refresh and, for the daemon, 110 MiB.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import structs

from exporter.clock import SystemClock
from exporter.config import Config, Kubernetes
from exporter.core.model import Device
from exporter.schedulers.kubernetes import open_kubernetes
from exporter.schedulers.kubernetes.watching import Patience

PODS, REFRESHES = 50, 300
DEVICES = tuple(Device(f"GPU-5700b000-0000-0000-0000-{index:012d}", f"{index}") for index in range(8))


def serve(folder: Path) -> None:
    """Run the stand-ins until standard input ends; say where the API server is."""
    from tests.kubernetes.cluster import gpu_uuid, kept_by, node, node_object, pod_object  # noqa: PLC0415

    with node() as made:
        for index in range(PODS):
            made.kubelet.gives(f"p-{index}", f"{gpu_uuid(index % 8)}::{index}")
            made.api.has(pod_object(f"p-{index}", ownerReferences=kept_by("Job", f"j-{index}")))
        made.api.has(node_object())
        (folder / "where").write_text(f"{made.kubelet.socket} {made.api.url} {made.token} {made.api.ca}")
        sys.stdin.read()


def measure(folder: Path) -> str:
    """Refresh often, beside looks at their own pace."""
    socket, url, token, ca = (folder / "where").read_text().split()
    settings = Kubernetes(pod_resources_socket=socket, api_url=url, token_file=token, ca_file=ca, node_name="node-1")
    patience = structs.replace(Patience(), refresh=0.02)
    scheduler = open_kubernetes(Config(scheduler="kubernetes", kubernetes=settings), patience=patience)
    clock, ats = SystemClock(), set[int]()
    while (word := scheduler.look(clock.now(), DEVICES, ())) is None or len(word.allocations) < PODS:
        time.sleep(0.05)
    began = time.process_time()
    while len(ats) < REFRESHES:
        word = scheduler.look(clock.now(), DEVICES, ())
        ats.add(word.at if word else 0)
        time.sleep(0.01)
    spent = (time.process_time() - began) / len(ats)
    scheduler.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{spent * 1000:.2f} ms of CPU a refresh with {PODS} pods, {peak:.0f} MiB resident at most without a web server"
    )


def main() -> None:
    """Start the stand-ins and measure, or be the stand-ins."""
    if len(sys.argv) > 1:
        serve(Path(sys.argv[1]))
        return
    with TemporaryDirectory() as name:
        words = [sys.executable, "-m", "tests.kubernetes.measure", name]
        child = subprocess.Popen(words, stdin=subprocess.PIPE)
        try:
            while not (Path(name) / "where").exists():
                time.sleep(0.1)
            time.sleep(0.2)
            sys.stdout.write(measure(Path(name)) + "\n")
        finally:
            child.communicate()


if __name__ == "__main__":
    main()
