"""`--source auto` on a node with everything: a host engine, and the driver beside it, both stand-ins."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter.registry import SOURCES
from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.build import build as build_dcgm
from tests.e2e.running import Daemon, Page, daemon
from tests.nvml_stub.build import build as build_nvml

pytestmark = pytest.mark.e2e
PACE = ("--sampling.interval-seconds", "0.3", "--dcgm-exporter-url", "http://127.0.0.1:1/metrics")


class Node:
    """A host engine that is up or down, two GPUs behind it, and the same two in the driver."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._script = folder / "dcgm.txt"
        self.engine("up 1")
        uuids = [f"gpu {n} uuid GPU-00000000-0000-0000-0000-{n:012}" for n in (0, 1)]
        (folder / "nvml.txt").write_text("\n".join(["count 2", *uuids, "gpu 1 idle"]))
        library = build_dcgm()
        self.env = {
            "DCGM_BINDINGS": f"{unpack(folder / 'bindings', library=library)}",
            "DCGM_STUB_SCRIPT": f"{self._script}",
            "GPU_EFFICIENCY_DCGM_ADDRESS": self.address,
            "LD_LIBRARY_PATH": f"{build_nvml()}",
            "NVML_STUB_SCRIPT": f"{folder / 'nvml.txt'}",
        }

    def engine(self, state: str) -> None:
        draft = self._script.with_suffix(".draft")
        draft.write_text(f"listen {self.address}\nengine {state}\n")
        draft.replace(self._script)


@pytest.fixture(name="node")
def _node(tmp_path: Path) -> Iterator[Node]:
    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Node(tmp_path, stack)


@pytest.fixture(name="serve")
def _serve(tmp_path: Path, node: Node) -> Iterator[Callable[[], Daemon]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(daemon(tmp_path, "serve", *PACE, **node.env))


def source(page: Page) -> tuple[str, str]:
    ((labels, _),) = page.rows("source_info")
    return labels["source"], labels["reason"]


def test_the_engine_is_taken_and_the_driver_says_who_is_there(serve: Callable[[], Daemon]) -> None:
    page = serve().until(lambda page: "on 2 of 2 GPUs" in source(page)[1], "the choice is explained")
    name, reason = source(page)
    assert name == "dcgm"
    assert reason.endswith(f"not asked: {', '.join([*SOURCES][1:])}")
    states = page.keeps_the_law().states()
    assert states["0"][0] in ("active", "stalled"), states
    assert states["1"] == ("unallocated", "free")


def test_without_an_engine_the_driver_is_read_and_the_log_says_why(node: Node, serve: Callable[[], Daemon]) -> None:
    node.engine("down")
    served = serve()
    name, reason = source(served.until(lambda page: "of 2 GPUs" in source(page)[1], "the choice is explained"))
    assert name == "nvml"
    assert "refused: dcgm: the host engine at" in reason
    (told,) = [line for line in served.program.log().splitlines() if "source nvml" in line]
    assert "dcgm-exporter: http://127.0.0.1:1/metrics could not be read" in told


def test_an_engine_that_dies_is_tried_again_then_the_driver_takes_over(node: Node, serve: Callable[[], Daemon]) -> None:
    served = serve()
    served.until(lambda page: source(page)[0] == "dcgm", "the engine is read")
    node.engine("down")
    page = served.until(lambda page: source(page)[0] == "nvml", "the driver takes over")
    assert page.total("faults_total", kind="source_failed") > 0
    before = page.total("seconds_total", leak="unobserved")
    after = served.until(lambda page: page.total("ticks_total") > 40, "it goes on").keeps_the_law()
    assert after.total("seconds_total", leak="unobserved") - before < 2
    assert {labels["uuid"] for labels, _ in after.rows("paid_seconds_total")} == {
        f"GPU-00000000-0000-0000-0000-{n:012}" for n in (0, 1)
    }
