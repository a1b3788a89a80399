"""The archive of `install-check --bundle`, made beside a running daemon, with a secret planted wherever one can be."""

import gzip
import json
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.checked import PACE, Node, kubelet_of
from tests.e2e.running import command, running
from tests.kubernetes.cluster import gpu_uuid
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
SECRETS = {
    "key": "key-of-the-hash-0123456789abcdef", "token": "token-of-slurmrestd", "url": "password-in-an-address",
    "jwt": "jwt-in-the-environment", "log": "hunter2-in-the-log", "pod": "swordfish-in-a-pods-name",
}  # fmt: skip
"""By where each is planted."""


@pytest.fixture(name="busy", scope="module")
def _busy() -> Iterator[Node]:
    """Somebody's pod on a node whose daemon runs, with a secret in every place that can hold one."""
    with tempfile.TemporaryDirectory(prefix="check-") as name, ExitStack() as stack:
        node = Node(Path(name), stack)
        node.driver()
        k8s = kubelet_of(node)
        node.kubelet = k8s.kubelet
        k8s.kubelet.gives(f"ada-token={SECRETS['pod']}", gpu_uuid(2), namespace="lovelace")
        for file in ("key", "token"):
            (node.folder / file).write_text(f"{SECRETS[file]}\n")
        node.env |= {
            "PRIVACY_USERS": "hash", "PRIVACY_KEY_FILE": f"{node.folder / 'key'}",
            "SLURM_RESTD_TOKEN_FILE": f"{node.folder / 'token'}",
            "DCGM_EXPORTER_URL": f"http://ada:{SECRETS['url']}@127.0.0.1:1/metrics?token={SECRETS['url']}",
            "WEB_LISTEN_ADDRESS": f"127.0.0.1:{free_port()}",
            "INVENTORY_FILE": f"{node.folder / 'inventory.json'}",
        }  # fmt: skip
        node.more["SLURM_JWT"] = SECRETS["jwt"]
        lines = [f"login password={SECRETS['log']}", f"pod lovelace/ada of {SECRETS['token']}"]
        (node.folder / "daemon.log").write_text("\n".join(lines))
        words = [*command("serve"), *PACE]
        program = stack.enter_context(running(words, node.folder / "serve.log", node.environ))
        port = int(node.env["WEB_LISTEN_ADDRESS"].rpartition(":")[2])
        wait_for(lambda: program.alive() and _holds(port), "the daemon knows who holds the GPUs")
        yield node
        assert program.end() == 0
        assert "Traceback" not in program.log()


def _holds(port: int) -> bool:
    try:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    except httpx.HTTPError:
        return False
    return "lovelace" in page


def bundled(node: Node, *words: str) -> tuple[dict[str, bytes], str]:
    """The archive's files, unpacked, those within them as well; and what was printed about it.

    With a longer trace if it does not yet hold who holds the GPUs: a busy machine takes seconds to ask the kubelet.
    """
    for seconds in ("2.5", "30"):
        found, printed = _bundle(node, "--trace-seconds", seconds, *words)
        if b'"job_id":"' in found["trace.jsonl"]:
            break
    return found, printed


def _bundle(node: Node, *words: str) -> tuple[dict[str, bytes], str]:
    path = node.folder / "report.tar.gz"
    line = command("install-check", *PACE, "--bundle", f"{path}", "--force", *words)
    log = ("--log", f"{node.folder / 'daemon.log'}")
    done = subprocess.run([*line, *log], env=node.environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.removeprefix("report/")] = file.read()
    found["trace.jsonl"] = gzip.decompress(found.pop("trace.jsonl.gz"))
    return found, done.stderr


WHOLE = {
    "MANIFEST.txt", "install-check.txt", "install-check.json", "config.toml", "environment.txt", "daemon.log",
    "metrics.prom", "check.log", "trace.jsonl",
}  # fmt: skip


def test_a_bundle_holds_what_a_bug_report_needs_and_no_secret(busy: Node) -> None:
    found, printed = bundled(busy)
    assert set(found) - {"nvidia-smi.txt"} == WHOLE
    whole = b"\n".join(found.values()).decode()
    assert {place: secret for place, secret in SECRETS.items() if secret in whole} == {}
    assert [
        name for name in WHOLE - {"MANIFEST.txt", "trace.jsonl"} if name not in found["MANIFEST.txt"].decode()
    ] == []
    assert [name for name in WHOLE - {"MANIFEST.txt", "trace.jsonl"} if name not in printed] == []
    assert "Check its content before you send it" in printed
    assert "--anonymous" in printed
    for name in ("metrics.prom", "trace.jsonl", "daemon.log"):
        assert "lovelace" in found[name].decode(), name
    assert 'users = "hash"' in found["config.toml"].decode()
    assert "GPU_EFFICIENCY_PRIVACY_USERS=hash" in found["environment.txt"].decode()
    assert json.loads(found["install-check.json"])["status"] == 0
    assert "gpu_efficiency_build_info" in found["metrics.prom"].decode()


def test_an_anonymous_bundle_names_nobody_and_its_trace_can_be_replayed(busy: Node) -> None:
    """One pod has gone and is known to the daemon's page alone; without that page the trace alone tells the names."""
    assert "train-0" in httpx.get(f"http://{busy.env['WEB_LISTEN_ADDRESS']}/metrics", trust_env=False).text
    busy.kubelet.drops("train-0")
    found, _ = bundled(busy, "--anonymous")
    whole = b"\n".join(found.values()).decode()
    host = platform.node()
    names = ("lovelace", "ada-token", "train-0", *SECRETS.values())
    assert [name for name in names if name in whole] == []
    assert f'"{host}"' not in whole
    assert gpu_uuid(2) in whole
    (busy.folder / "trace.jsonl").write_bytes(found["trace.jsonl"])
    line = command("replay", f"{busy.folder / 'trace.jsonl'}")
    told = subprocess.run(line, env=busy.environ, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "conservation errors: 0" in told
    jobs = set(re.findall(r'"job_id":"([^"]*)"', found["trace.jsonl"].decode()))
    assert len(jobs) == 1
    assert all(re.fullmatch(r"job-[0-9a-f]{8}", job) for job in jobs)
    assert jobs < set(re.findall(r'job_id="([^"]*)"', found["metrics.prom"].decode()))
    (busy.folder / "daemon.log").write_text("lovelace holds a GPU")
    found, _ = bundled(busy, "--anonymous", "--web.listen-address", "127.0.0.1:0")
    assert [name for name in names if name in b"\n".join(found.values()).decode()] == []
    assert "metrics.prom" not in found
    assert "no daemon answers" in found["MANIFEST.txt"].decode()


def test_a_bundle_overwrites_nothing_and_says_so_before_it_looks_at_anything(busy: Node) -> None:
    path = busy.folder / "mine.tar.gz"
    path.write_bytes(b"mine")
    line = command("install-check", "--bundle", f"{path}")
    done = subprocess.run(line, env=busy.environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, path.read_bytes()) == (1, "", b"mine")
    assert "--force" in done.stderr


def test_looking_changes_nothing_on_the_node(busy: Node) -> None:
    """Beside a daemon that runs: files, and what is known of GPUs across restarts."""
    before = kept(busy.folder)
    assert busy.checked().status == 0
    assert kept(busy.folder) == before


def kept(folder: Path) -> dict[Path, bytes]:
    """All files but those that the daemon goes on writing: its log and its history."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "log" not in path.name and not path.name.startswith("history.db")
    }


def test_no_colour_but_on_a_terminal_and_not_against_the_wish(busy: Node) -> None:
    """script(1) gives it a terminal."""
    line = f"{sys.executable} -m exporter install-check --sampling.interval-seconds 0.1"
    words = ["script", "-qec", line, "/dev/null"]
    told = subprocess.run(words, env=busy.environ, capture_output=True, text=True, timeout=60, check=True).stdout
    plain = subprocess.run(
        words, env={**busy.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "\x1b[32mok" in told
    assert "\x1b[3" not in plain
    assert "ok    versions" in plain
