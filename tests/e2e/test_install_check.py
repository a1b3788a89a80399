"""install-check beside real processes, present and broken in turn: the table in docs/install-check.md, row by row.

A scene is one node and one run of the command; several things that have nothing to do with one another are broken in
one scene. What cannot run here is a stand-in: see the document.
"""

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import bcrypt
import httpx
import pytest

from tests.certificates import Authority
from tests.e2e.checked import PACE, UUIDS, Node, Told, kubelet_of
from tests.e2e.running import ROOT, command, running
from tests.ports import free_port
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of
from tests.sources.exporter_pages import BUSY, gpu
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
DOCUMENT = ROOT / "docs/install-check.md"
_CLOCK = """
struct timex { unsigned modes; long offset, freq, maxerror, esterror; int status; };
int adjtimex(struct timex *t) { t->maxerror = 12000; t->status = %d; return %d; }
"""


def bare(node: Node) -> Told:
    told = node.checked()
    assert told.status == 3
    return told


def no_store(node: Node) -> Told:
    """An ordinary user, who may not write in /var/lib, whatever a daemon of this machine has left there."""
    return node.checked(nobody=True)


def clock(node: Node, status: int, returned: int) -> Told:
    (node.folder / "clock.c").write_text(_CLOCK % (status, returned))
    library = node.folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{library}", f"{node.folder / 'clock.c'}"], check=True)
    node.more["LD_PRELOAD"] = f"{library}"
    return node.checked()


def driver(node: Node) -> Told:
    node.driver()
    told = node.checked()
    assert told.status == 0, told.report
    return told


def not_loaded(node: Node, *words: str) -> Told:
    """And with it some things that have nothing to do with it."""
    node.driver("driver gone")
    held = node.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    node.env["WEB_LISTEN_ADDRESS"] = f"127.0.0.1:{held.getsockname()[1]}"
    (node.folder / "web.yaml").write_text("basic_auth_user: {}\n")
    node.env["WEB_CONFIG_FILE"] = f"{node.folder / 'web.yaml'}"
    (node.folder / "key").write_text("0123456789abcdef0123456789abcdef")
    (node.folder / "key").chmod(0o644)
    (node.folder / "history.db").write_text("GPUs once seen\n")
    node.env["HISTORY_FILE"] = f"{node.folder / 'history.db'}"
    node.env |= {"PRIVACY_USERS": "hash", "PRIVACY_KEY_FILE": f"{node.folder / 'key'}"}
    told = node.checked(*words)
    assert told.status == 3
    return told


def old_boards(node: Node) -> Told:
    """A100 without GPM, a driver that restricts profiling, and a user who may nothing."""
    node.driver("gpu * name NVIDIA A100-SXM4-80GB", "gpu * gpm 0")
    node.proc(restricted=True)
    kubelet_of(node)
    (node.folder / "closed").mkdir(mode=0o755)
    node.env["REPORTS_SOCKET"] = f"{node.folder}/closed/report.sock"
    node.env["HISTORY_FILE"] = f"{node.folder}/closed/history.db"
    return node.checked(nobody=True)


def pods(node: Node) -> Told:
    """In a cluster; and a driver that restricts what GPM does not need."""
    node.driver()
    node.proc(restricted=True)
    kubelet_of(node)
    return node.checked()


def no_pods(node: Node) -> Told:
    node.driver("gpu * name NVIDIA Unheard 9000", "gpu 3 lost")
    k8s = kubelet_of(node)
    k8s.kubelet.stop()
    stale = node.stack.enter_context(socket.socket(socket.AF_UNIX))
    stale.bind(f"{k8s.kubelet.socket}")
    k8s.api.forbidden.add("/api/v1/pods")
    node.env["HISTORY_FILE"] = "/dev/shm/history-of-nobody.db"  # noqa: S108  it is looked at, and not made
    return node.checked()


def engine(node: Node) -> Told:
    node.engine()
    node.page("".join(gpu(number, UUID=uuid) for number, uuid in enumerate(UUIDS)))
    return node.checked()


def engine_down(node: Node, *words: str) -> Told:
    node.engine("engine down")
    node.driver("error nvmlInitWithFlags 4")
    node.page("", seconds=1.5)
    node.env["DCGM_EXPORTER_TIMEOUT_SECONDS"] = "0.5"
    return node.checked(*words)


def unprofiled(node: Node) -> Told:
    node.engine("profiling -37")
    node.page(gpu(0) + gpu(1, Hostname="node2"))
    return node.checked()


def no_library(node: Node) -> Told:
    node.engine(library=False)
    return node.checked("--source", "auto")


def paused(node: Node) -> Told:
    node.driver()
    (node.folder / "pause").write_text(json.dumps({"until": time.time() + 600, "reason": "ncu"}))
    return node.checked()


def blind_page(node: Node) -> Told:
    """Of another machine, too; and it names the GPUs' pod."""
    node.proc()
    figures = {name: value for name, value in BUSY.items() if "PROF" not in name}
    node.page("".join(gpu(n, figures, UUID=f"GPU-far-{n}", pod="train-0", namespace="ml") for n in (0, 1)))
    return node.checked("--source", "dcgm-exporter")


def page_500(node: Node) -> Told:
    """And beside it a host engine that profiles but one board."""
    node.engine("gpu 1 profiling -37")
    node.page("broken", status=500)
    return node.checked()


def guarded(node: Node) -> Told:
    """A password for nobody in particular: what is asked is only whether it is the daemon."""
    certificate, key = Authority(node.folder).issue("server")
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    tls = f"tls_server_config:\n  cert_file: {certificate}\n  key_file: {key}\n"
    (node.folder / "web.yaml").write_text(f"{tls}basic_auth_users:\n  ada: {hashed}\n")
    node.env["WEB_CONFIG_FILE"] = f"{node.folder / 'web.yaml'}"
    return daemon_running(node)


def daemon_running(node: Node) -> Told:
    """The daemon itself, on the port and the socket that install-check is told of."""
    node.driver()
    port = free_port()
    node.env |= {"WEB_LISTEN_ADDRESS": f"127.0.0.1:{port}", "HISTORY_FILE": f"{node.folder / 'history.db'}"}
    words = [*command("serve"), *PACE]
    program = node.stack.enter_context(running(words, node.folder / "serve.log", node.environ))
    scheme = "https" if "WEB_CONFIG_FILE" in node.env else "http"
    wait_for(lambda: program.alive() and _ready(f"{scheme}://127.0.0.1:{port}/readyz"), "the daemon is ready")
    told = node.checked()
    assert program.end() == 0
    assert "Traceback" not in program.log()
    return told


def _ready(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, verify=False).status_code == 200  # noqa: S501  our own, a moment old
    except httpx.HTTPError:
        return False


SCENES: dict[str, Callable[[Node], Told]] = {
    "a bare machine: no driver, no scheduler": bare,
    "the clock is synchronised": lambda node: clock(node, 0x2001, 0),
    "the clock is not synchronised": lambda node: clock(node, 0x40, 5),
    "a driver, eight H100": driver,
    "the kernel module is not loaded": not_loaded,
    "the kernel module is not loaded, source = nvml": lambda node: not_loaded(node, "--source", "nvml"),
    "the daemon's user may not use the driver": engine_down,
    "boards before Hopper, no DCGM": old_boards,
    "profiling for administrators only, as an ordinary user": old_boards,
    "profiling for administrators only, with GPM": pods,
    "a board that the table does not have": no_pods,
    "a GPU that fell off the bus": no_pods,
    "a host engine": engine,
    "the host engine is down": engine_down,
    "the host engine is down, source = dcgm": lambda node: engine_down(node, "--source", "dcgm"),
    "the host engine has no profiling module": unprofiled,
    "the host engine profiles one GPU of two": page_500,
    "libdcgm is missing": no_library,
    "a pause for a profiler": paused,
    "a dcgm-exporter with profiling fields": engine,
    "a dcgm-exporter without profiling fields": blind_page,
    "dcgm-exporter's metrics name pods, no scheduler": blind_page,
    "dcgm-exporter answers 500": page_500,
    "dcgm-exporter hangs": engine_down,
    "dcgm-exporter's metrics are another machine's": blind_page,
    "dcgm-exporter's metrics are of several hosts": unprofiled,
    "a kubelet and an API server": pods,
    "the kubelet's socket is root's, as an ordinary user": old_boards,
    "the kubelet is gone, its socket is not": no_pods,
    "the service account may not list pods": no_pods,
    "the reports' folder is root's, as an ordinary user": old_boards,
    "everybody can read the key of the hash": not_loaded,
    "no history file is configured": no_store,
    "the store's folder is root's, as an ordinary user": old_boards,
    "the store is on tmpfs": no_pods,
    "another file has the store's name": not_loaded,
    "the port is another program's": not_loaded,
    "the daemon is running": daemon_running,
    "the daemon is running, behind TLS and a password": guarded,
    "the web configuration cannot be used": not_loaded,
}
"""By what the document calls the situation; the same function is one run."""
SLURM = (
    "a Slurm node", "slurm.node_name is another node's", "slurmctld is stopped",
    "a drained node; the prolog's directory is missing", "the spool directory is root's, as an ordinary user",
)  # fmt: skip


def rows() -> list[list[str]]:
    """The document's table: situation, check, verdict, says, do."""
    _, _, table = DOCUMENT.read_text(encoding="utf-8").partition("## Messages in typical situations")
    lines = table.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [[*row, ""][:5] for row in cells[1:]]


ROWS = rows()


@pytest.fixture(name="told", scope="module")
def _told() -> Callable[[str], Told]:
    known: dict[object, Told] = {}

    def tell(situation: str) -> Told:
        scene = SCENES[situation]
        if scene not in known:
            known[scene] = _played(scene)
        return known[scene]

    return tell


def _played(scene: Callable[[Node], Told]) -> Told:
    with tempfile.TemporaryDirectory(prefix="check-") as name, ExitStack() as stack:
        Path(name).chmod(0o755)
        return scene(Node(Path(name), stack))


@pytest.fixture(name="slurm", scope="module", params=ONE_OR_MORE)
def _slurm(request: pytest.FixtureRequest) -> Iterator[dict[str, Told]]:
    plan = Plan(nodes=1, root=root_of(request.param))
    with SlurmRig(plan) as rig, tempfile.TemporaryDirectory(prefix="check-") as name, ExitStack() as stack:
        Path(name).chmod(0o755)
        yield dict(zip(SLURM, _slurm_scenes(rig, Node(Path(name), stack)), strict=True))


def _slurm_scenes(rig: SlurmRig, node: Node) -> Iterator[Told]:
    node.driver()
    name = rig.nodes[0]
    node.more["TMPDIR"] = f"{rig.plan.root / 'tmp'}"  # where slurmd finds its copy of slurm.conf
    node.env |= {"SLURM_CONF": f"{rig.conf}", "SLURM_BIN_DIR": f"{rig.commands(name)}"}
    node.env |= {"SLURM_NODE_NAME": name, "SLURM_SPOOL_DIR": f"{rig.spool(name)}"}
    well = node.checked()
    node.env["SLURM_NODE_NAME"] = "another"
    misnamed = node.checked()
    node.env["SLURM_NODE_NAME"] = name
    rig.spool(name).chmod(0o700)
    rig.drain(name)
    node.env["SLURM_MAPPING_DIR"] = f"{node.folder / 'jobs'}"
    drained, forbidden = node.checked("--scheduler", "slurm"), node.checked("--scheduler", "slurm", nobody=True)
    del node.env["SLURM_MAPPING_DIR"]
    rig.undrain(name)
    rig.stop_controller()
    node.env["SLURM_TIMEOUT_SECONDS"] = "1"
    stopped = node.checked()
    rig.start_controller()
    yield from (well, misnamed, stopped, drained, forbidden)


def test_every_situation_is_in_the_document_and_no_other() -> None:
    assert list(dict.fromkeys(row[0] for row in ROWS)) == list(dict.fromkeys(_in_order()))
    assert {row[2] for row in ROWS} == {"ok", "info", "warn", "fail"}


def _in_order() -> Iterator[str]:
    known = {*SCENES, *SLURM}
    yield from (row[0] for row in ROWS if row[0] in known)
    yield from sorted(known - {row[0] for row in ROWS})


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] not in SLURM], ids=lambda row: f"{row[0]}: {row[1]}")
def test_the_table(told: Callable[[str], Told], row: list[str]) -> None:
    holds(told(row[0]), *row[1:])


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] in SLURM], ids=lambda row: f"{row[0]}: {row[1]}")
def test_the_table_on_slurm(slurm: dict[str, Told], row: list[str]) -> None:
    holds(slurm[row[0]], *row[1:])


def holds(told: Told, check: str, verdict: str, says: str, do: str) -> None:
    found = told.found(check)
    assert found["verdict"] == verdict, found
    assert stands_in(says, found["message"]), found
    assert stands_in(do, found["do"]), found
    assert (told.status == 0) == all(each["verdict"] != "fail" for each in told.report["findings"])


def stands_in(cell: str, text: str) -> bool:
    """Whether a text has the words of a cell; `...` stands for anything."""
    return re.search(".*".join(map(re.escape, cell.split("..."))), text, re.DOTALL) is not None


@pytest.mark.parametrize(
    ("cell", "stands"),
    [("GPU ... is lost", True), ("is lost", True), ("", True), ("GPU (...) is lost", False), ("is ... GPU", False)],
)
def test_a_cell_stands_in_a_text_that_has_its_words_in_order(cell: str, stands: bool) -> None:
    assert stands_in(cell, "GPU 3 is lost: reset it") == stands
