"""Our commands of the documents' code blocks, run: against a demo, a Prometheus that scrapes it, and recordings of it.

Placeholders of the pages (addresses, ids, files) are replaced by what is there. Commands that need a GPU must say so.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from ctypes.util import find_library
from pathlib import Path

import pytest
from msgspec import Struct

from tests.documents.blocks import ROOT, every_block
from tests.documents.ours import of_block
from tests.e2e.databases import started
from tests.e2e.running import Daemon, command, daemon, environment
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e

MADE_UP = frozenset({"acme", "flux"})
"""A source and a scheduler that a contributor is to write."""
NO_TELEMETRY = frozenset({"serve", "record", "install-check"})
"""What ends with 3 on a machine without a GPU, and says what it has tried."""
ENDED_JOBS = "--store"
"""A demo has no job that ends: tests/e2e/test_report.py and test_sums.py report from stores."""
WRITES = frozenset({"record", "simulate"})
SERVES = frozenset({"demo", "cluster"})
SIMULATED = frozenset({"backfill"})
"""What refuses simulated recordings unless a flag allows them."""
_NODE = re.compile(r"(?:https?://)?(?:(?:n|node)\d+|NODE):19400")
_PROMETHEUS = re.compile(r"http://prometheus:9090", re.IGNORECASE)


class World(Struct, frozen=True):
    """A folder with the files that the pages name, and the servers."""

    folder: Path
    demo: Daemon
    prometheus: str
    owner: Mapping[str, str]
    """Of a job of the demo."""

    def real(self, words: tuple[str, ...]) -> list[str]:
        """Put what is there in place of the placeholders."""
        made = [word for each in words for word in self._real(each)]
        if "--ca-file" in made:  # the demo has no TLS
            at = made.index("--ca-file")
            del made[at : at + 2]
        if "--bundle" in made:  # it overwrites nothing
            made[made.index("--bundle") + 1] = "report.tar.gz"
        if words[0] in SIMULATED:
            made.append("--simulated")
        if words[0] == "report" and not {"--node", "--store", "--prometheus"} & set(made):
            made += ["--node", self.demo.url]
        if words[0] == "serve":
            made += ["--web.listen-address", "127.0.0.1:0"]
        if words[0] == "top" and "--url" not in made:
            made += ["--url", self.demo.url]
        return made

    def _real(self, word: str) -> list[str]:
        jobs = dict.fromkeys(("41", "42", "4711", "JOB"), "job_id")
        names = jobs | {"nlp": "account", "ada": "user", "vision": "team"}
        if word in names:
            return [self.owner[names[word]]]
        if word.startswith(("/etc/gpu-efficiency/", "/tmp/")) or word == "FILE":  # noqa: S108 - a name in a page
            return ["trace.jsonl.gz" if word.endswith(".gz") else "config.toml"]
        if "*" in word:
            return sorted(path.name for path in self.folder.glob(word))
        if word == "http://localhost:9400/metrics":
            return ["http://127.0.0.1:1/metrics"]
        return [_PROMETHEUS.sub(self.prometheus, _NODE.sub(self.demo.url, word))]

    def run(self, *words: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command; it keeps no history, and finds no DCGM that somebody else may have on this machine."""
        kept = environment(
            GPU_EFFICIENCY_SAMPLING_PAUSE_FILE=f"{folder or self.folder}/pause",
            GPU_EFFICIENCY_HISTORY_FILE="",
            GPU_EFFICIENCY_REPORTS_SOCKET="",
            GPU_EFFICIENCY_DCGM_ADDRESS="127.0.0.1:1",
            GPU_EFFICIENCY_DCGM_EXPORTER_URL="http://127.0.0.1:1/metrics",
        )
        return subprocess.run(
            command(*words), cwd=folder or self.folder, env=kept, capture_output=True, text=True,
            timeout=3 * PATIENCE, check=False,
        )  # fmt: skip


@pytest.fixture(name="world", scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("documents")
    with ExitStack() as stack:
        (folder / "prices.toml").write_text("[[prices]]\nper_gpu_hour = 2.5\n", encoding="utf-8")
        demo = stack.enter_context(daemon(folder, "demo", "--config", f"{folder}/prices.toml"))
        jobs = demo.get("/api/v1/jobs").json()["jobs"]
        targets = [{"targets": [f"127.0.0.1:{demo.port}"]}]
        scrape = {"job_name": "nodes", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": targets}
        client = stack.enter_context(
            started(folder / "tsdb", {"scrape_configs": [scrape]}, f"--storage.tsdb.path={folder}/tsdb/data")
        )
        world = World(folder, demo, f"{client.base_url}".rstrip("/"), jobs[0]["owner"])
        (folder / "token").write_text("Authorization: Basic YTpi\n", encoding="utf-8")
        shutil.copy(ROOT / "systemd/config.toml", folder / "config.toml")
        shutil.copy(ROOT / "examples/gpu-efficiency.toml", folder / "my.toml")
        for name in ("trace.jsonl.gz", "node0.jsonl.gz", "node1.jsonl", "carpenter.jsonl"):
            done = world.run("simulate", "zombie_notebook", "--gpus", "2", "--period", "30", "-o", name)
            assert done.returncode == 0, done.stderr
        wait_for(lambda: _scraped(world), "Prometheus has scraped the job")
        yield world


def _scraped(world: World) -> bool:
    asked = (("report", world.owner["job_id"]), ("report", "--all", "--since", "30d"))
    return all(world.run(*words, "--prometheus", world.prometheus).returncode == 0 for words in asked)


def documented() -> dict[tuple[str, ...], str]:
    """Every command, and a page that has it."""
    blocks = [block for block in every_block() if block.language == "sh"]
    return {tuple(words): f"{block}" for block in blocks for words in of_block(block)}


LEFT_OUT = MADE_UP | {ENDED_JOBS}
CALLS = [words for words in documented() if not LEFT_OUT & set(words) and words[0] not in SERVES]


@pytest.mark.skipif(
    bool(find_library("nvidia-ml")), reason="needs a machine without a GPU, on which serve and record end"
)
@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_a_command_of_the_documents_does_what_it_can_here(words: tuple[str, ...], world: World, tmp_path: Path) -> None:
    """In a folder of its own, so that a file that one command writes does not stand in the way of another."""
    made = world.real(words)
    if "--trace-seconds" in made:
        made[made.index("--trace-seconds") + 1] = "1"
    for path in world.folder.glob("*"):
        if path.is_file() and (words[0] not in WRITES or path.name not in made):
            shutil.copy(path, tmp_path)
    done = world.run(*made, folder=tmp_path)
    # No job uses NCCL here, and the Prometheus is too young for weeks: they say so.
    empty = words == ("nccl", "--check") or (words[0] in {"preview", "advise"} and "--prometheus" in words)
    allowed = {0, 3} if words[0] in NO_TELEMETRY else {0, 1} if empty else {0}
    assert done.returncode in allowed, f"{made}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or empty or "telemetry" in done.stderr + done.stdout


@pytest.mark.parametrize("words", [words for words in documented() if words[0] == "demo"], ids=" ".join)
def test_a_demo_of_the_documents_serves(words: tuple[str, ...], tmp_path: Path) -> None:
    with daemon(tmp_path, *words) as demo:
        assert demo.page().total("paid_seconds_total") > 0
