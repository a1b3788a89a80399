"""Runs the daemon of one node of a Slurm cluster, on simulated boards.

It is started as an operator would on that node, with the stand-in for NVML (tests/nvml_stub).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.running import Daemon, Page, command, environment, running
from tests.nvml_stub.build import build
from tests.slurm.rig import SlurmRig
from tests.waiting import wait_for

INTERVAL = 0.25
_SERVING = "serving http://"
UUID = "GPU-5700b000-0000-0000-0000-{:012d}"
"""UUIDs of the stand-in's boards, by the driver's ordinal."""
REST = (
    "gpu * idle",
    "gpu * util 0",
    *(f"gpu * {rate} 0" for rate in ("gr", "sm", "occ", "tensor", "dram", "fp16", "fp32", "fp64")),
)
"""The stand-in's values for idle boards."""
_DRIVER = """
set -e
mount -t tmpfs tmpfs /proc/driver
mkdir -p /proc/driver/nvidia
cp -r "$1" /proc/driver/nvidia/gpus
shift
exec "$@"
"""


class Observer:
    """A node's daemon and its boards."""

    def __init__(self, served: Daemon, node: str, boards: Path, *, spool: Path) -> None:
        self.served, self.node, self._boards, self._spool = served, node, boards, spool

    def boards(self, *lines: str) -> None:
        """Set the driver's values; see tests/nvml_stub/world.h."""
        _say(self._boards, lines)

    def page(self) -> Page:
        return self.served.page()

    def held(self, page: Page | None = None) -> dict[str, set[str]]:
        """Return the ordinals of each job's GPUs."""
        found: dict[str, set[str]] = {}
        for labels, _ in (page or self.page()).rows("allocation_info"):
            found.setdefault(labels["job_id"], set()).add(labels["gpu"])
        return found

    def until(self, true: Callable[[dict[str, set[str]]], object], what: str) -> Page:
        """Scrape until `true` holds for the jobs' GPUs, and return that page."""
        return self.watch(lambda page: true(self.held(page)), what)

    def watch(self, true: Callable[[Page], object], what: str) -> Page:
        """Scrape until `true` holds for a page, and return that page."""
        try:
            return self.served.until(true, f"{self.node}: {what}")
        except AssertionError as err:
            page = self.page()
            err.add_note(f"held {self.held(page)}\nstates {page.states()}")
            err.add_note(f"in the spool directory: {sorted(path.name for path in self._spool.iterdir())}")
            raise

    def ticks(self) -> int:
        return int(self.page().total("ticks_total"))

    def job(self, job: str) -> dict[str, str]:
        """Return the labels of a job on the page, once slurmctld has answered: its GPUs may be known before."""

        def described(page: Page) -> bool:
            return any(labels["partition"] for labels, _ in page.rows("job_info", job_id=job))

        rows = self.watch(described, f"job {job} has a partition").rows("job_info", job_id=job)
        assert len(rows) == 1, rows
        return rows[0][0]


@contextmanager
def observed(
    rig: SlurmRig,
    node: str,
    folder: Path,
    *,
    minors: Sequence[int] = (),
    boards: Sequence[str] = (),
    scheduler: str = "slurm",
    settings: Mapping[str, str] | None = None,
    around: Callable[[list[str], Path], list[str]] | None = None,
) -> Iterator[Observer]:
    """Serve for `node` until the block ends; `minors`: of each board in the driver's order, if they differ from it.

    `around` changes the daemon's command line, given the folder of its boards; see `unprivileged`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "boards.txt"
    _say(script, boards)
    words = command("serve", "--source", "nvml", "--scheduler", scheduler, "--web.listen-address", "127.0.0.1:0")
    words += ["--sampling.interval-seconds", f"{INTERVAL}"]
    if around:
        words = around(words, folder)
    if minors:
        words = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            _DRIVER,
            "sh",
            _tree(folder, minors),
            *words,
        ]
    known = {
        "LD_LIBRARY_PATH": f"{build()}",
        "NVML_STUB_SCRIPT": f"{script}",
        "TMPDIR": f"{rig.plan.root / 'tmp'}",
        "GPU_EFFICIENCY_SLURM_CONF": f"{rig.conf}",
        "GPU_EFFICIENCY_SLURM_NODE_NAME": node,
        "GPU_EFFICIENCY_SLURM_SPOOL_DIR": f"{rig.spool(node)}",
        "GPU_EFFICIENCY_SLURM_BIN_DIR": f"{rig.commands(node)}",
    }
    more = {f"GPU_EFFICIENCY_{name}": value for name, value in (settings or {}).items()}
    with running(words, folder / "serve.log", environment(**known | more)) as program:
        port = wait_for(lambda: program.alive() and _port(program.log()), "it says where it serves")
        served = Daemon(program, port)
        wait_for(served.ready, "/readyz")
        yield Observer(served, node, script, spool=rig.spool(node))
        served.client.close()
        assert program.end() == 0
        assert "Traceback" not in program.log()


def _port(said: str) -> int:
    return int(said.partition(_SERVING)[2].partition("/")[0].rpartition(":")[2] or 0)


def _say(script: Path, lines: Sequence[str]) -> None:
    draft = script.with_suffix(".draft")
    draft.write_text("".join(f"{line}\n" for line in lines))
    draft.replace(script)


def _tree(folder: Path, minors: Sequence[int]) -> str:
    """Write the driver's /proc/driver/nvidia/gpus (NVIDIA driver README, "proc interface")."""
    root = folder / "gpus"
    for ordinal, minor in enumerate(minors):
        board = root / f"0000:{ordinal:02x}:00.0"
        board.mkdir(parents=True)
        (board / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t {UUID.format(ordinal)}\nDevice Minor: \t {minor}\n"
        )
    return f"{root}"
