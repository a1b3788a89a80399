"""The whole daemon on stand-ins of NVML, a kubelet and an API server; and real containers in a kubelet's cgroups."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.core.model import SECOND, Process, Reading
from tests.e2e.running import Daemon, Page, daemon
from tests.kubernetes.cluster import NODE, Node, gpu_uuid, kept_by, node, node_object, pod_object, uid_of
from tests.nvml_stub.build import build
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
PACE = ("--sampling.interval-seconds", "0.5")
BUDGET_MIB = 110.0
"""Resident memory with this scheduler on."""


@pytest.fixture(name="here")
def _here() -> Iterator[Node]:
    with node() as made:
        yield made


@pytest.fixture(name="serve")
def _serve(tmp_path: Path, here: Node) -> Iterator[Callable[..., Daemon]]:
    (tmp_path / "world.txt").write_text("")
    driver = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{tmp_path / 'world.txt'}"}
    ours = {
        "POD_RESOURCES_SOCKET": f"{here.kubelet.socket}",
        "REFRESH_SECONDS": "1",
        "NODE_NAME": NODE,
        "API_URL": here.api.url,
        "TOKEN_FILE": f"{here.token}",
        "CA_FILE": f"{here.api.ca}",
    }
    env = {f"GPU_EFFICIENCY_KUBERNETES_{key}": value for key, value in ours.items()}
    words = ("serve", "--source", "nvml", "--scheduler", "kubernetes", *PACE)
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(daemon(tmp_path, *words, **driver, **(env | more)))


def holders(page: Page) -> dict[str, set[str]]:
    """Job ids by GPU."""
    found: dict[str, set[str]] = {}
    for labels, _ in page.rows("allocation_info"):
        found.setdefault(labels["gpu"], set()).add(labels["job_id"])
    return found


def train(here: Node) -> None:
    """Two pods of one Job on GPUs 0 to 3, and two servers that share GPU 4."""
    here.api.has(*(pod_object(f"train-{i}", ownerReferences=kept_by("Job", "train")) for i in range(2)))
    for index in range(2):
        thing = pod_object(f"web-{index}", ownerReferences=kept_by("ReplicaSet", f"web{index}-abc", "apps/v1"))
        thing["metadata"]["labels"] = {"pod-template-hash": "abc"}
        here.api.has(thing)
        here.kubelet.gives(f"web-{index}", f"{gpu_uuid(4)}::{index}", resource="nvidia.com/gpu.shared")
        here.kubelet.gives(f"train-{index}", gpu_uuid(2 * index), gpu_uuid(2 * index + 1))


HELD = {gpu: {"ml/job/train"} for gpu in "0123"} | {"4": {"ml/deployment/web0", "ml/deployment/web1"}}


def test_jobs_shares_and_a_cordon_from_pod_to_page(here: Node, serve: Callable[..., Daemon]) -> None:
    train(here)
    served = serve()
    page = served.until(lambda page: holders(page) == HELD, "who holds which GPU")
    rows = {labels["job_id"]: labels for labels, _ in page.rows("job_info")}
    assert (rows["ml/job/train"]["workload_namespace"], rows["ml/job/train"]["kind"]) == ("ml", "job")
    assert rows["ml/job/train"]["workload_pod"] == "train-0"
    assert {labels["scheduler"] for labels in rows.values()} == {"kubernetes"}
    assert page.by("node", "node_info") == {NODE: 1}
    assert rows["ml/deployment/web0"]["workload_class"] == "serving"
    served.after(4)
    page = served.until(lambda page: page.total("job_seconds_total", leak="useful"), "useful time")
    shared = page.by("job_id", "job_paid_seconds_total")
    assert float(shared["ml/deployment/web0"]) == pytest.approx(float(shared["ml/deployment/web1"]), rel=0.1)
    assert page.states()["0"][0] == "active"

    here.api.has(node_object(unschedulable=True))
    page = served.until(lambda page: page.total("seconds_total", leak="unavailable"), "the cordon")
    assert page.states()["0"][0] == "active", "who works there works on"

    here.api.has(pod_object("train-0", phase="Succeeded", ownerReferences=kept_by("Job", "train")))
    here.kubelet.drops("train-1")
    here.api.deletes(pod_object("train-1"))
    served.until(lambda page: set(holders(page)) == {"4"}, "the end of the Job")
    assert served.page().total("faults_total", kind="scheduler_refused") == 0


def test_a_kubelet_that_starts_again_and_an_api_server_that_is_gone(here: Node, serve: Callable[..., Daemon]) -> None:
    train(here)
    served = serve()
    served.until(lambda page: holders(page) == HELD, "who holds which GPU")
    here.api.stop()
    served.until(lambda page: page.total("scheduler_unanswered_seconds"), "the silence is told")
    here.kubelet.stop()
    served.until(lambda page: page.total("faults_total", kind="scheduler_failed"), "the kubelet's absence is told")
    assert holders(served.page()) == HELD
    here.kubelet.start()
    here.kubelet.gives("late", gpu_uuid(7))
    served.until(lambda page: holders(page) == HELD | {"7": {"ml/pod/late"}}, "the kubelet's word alone")
    here.api.has(pod_object("late", ownerReferences=kept_by("Job", "later")))
    here.api.start()
    served.until(lambda page: holders(page).get("7") == {"ml/job/later"}, "the API server's word")
    served.until(lambda page: page.total("scheduler_unanswered_seconds") == 0, "no question is open")


def test_without_an_api_server_it_stays_within_its_memory(here: Node, serve: Callable[..., Daemon]) -> None:
    train(here)
    served = serve(GPU_EFFICIENCY_KUBERNETES_API_URL="")
    names = {"0": {"ml/pod/train-0"}, "2": {"ml/pod/train-1"}, "4": {"ml/pod/web-0", "ml/pod/web-1"}}
    served.until(lambda page: names.items() <= holders(page).items(), "pods by name")
    assert "the API server is not asked" in served.program.log()
    assert resident(served) < BUDGET_MIB


def test_with_fifty_pods_it_stays_within_its_memory(here: Node, serve: Callable[..., Daemon]) -> None:
    for index in range(50):
        here.kubelet.gives(f"p-{index}", f"{gpu_uuid(index % 8)}::{index}", resource="nvidia.com/gpu.shared")
        here.api.has(pod_object(f"p-{index}", ownerReferences=kept_by("Job", f"j-{index}")))
    served = serve()
    served.until(lambda page: sum(map(len, holders(page).values())) == 50, "fifty holders")
    served.after(6)
    assert resident(served) < BUDGET_MIB


def resident(served: Daemon) -> float:
    """Highest resident memory of the daemon so far, MiB."""
    status = Path(f"/proc/{served.program.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


# Real containers.


@contextmanager
def contained(folder: Path, cgroup: str) -> Iterator[int]:
    """A container that runc runs in that cgroup, sleeping as rank 3; gives its pid on the host."""
    name = f"gpu-efficiency-{os.getpid()}"
    runc = ["runc", "--root", f"{folder / 'state'}"]
    (folder / "rootfs").mkdir()
    binds = [bound(part) for part in ("/bin", "/lib", "/lib64", "/usr") if Path(part).exists()]
    config = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sleep", "600"],
            "env": ["PATH=/usr/bin:/bin", "RANK=3"],
            "cwd": "/",
        },
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, *binds],
        "linux": {"cgroupsPath": cgroup, "namespaces": [{"type": "mount"}, {"type": "pid"}]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = [*runc, "run", "--detach", "--pid-file", f"{folder / 'pid'}", "--bundle", f"{folder}", name]
    with (folder / "said").open("wb") as said:
        ran = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False)
    try:
        if ran.returncode:
            pytest.skip(f"needs runc in cgroups of its own: {(folder / 'said').read_text()[-200:].strip()}")
        yield int((folder / "pid").read_text())
    finally:
        subprocess.run([*runc, "delete", "--force", name], check=False, capture_output=True)
        for hierarchy in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
            remove(hierarchy / cgroup.split("/")[1])


def bound(part: str) -> dict[str, Any]:
    return {"destination": part, "type": "bind", "source": part, "options": ["rbind", "ro"]}


def remove(cgroup: Path) -> None:
    """Take away the empty cgroups that a deleted container leaves."""
    for folder in sorted(cgroup.glob("**/"), reverse=True):
        folder.rmdir()


@pytest.mark.skipif(
    not (shutil.which("runc") and os.geteuid() == 0), reason="needs runc in cgroups of its own: runc, as root"
)
@pytest.mark.parametrize("driver", ["cgroupfs", "systemd"])
def test_a_process_in_a_real_container_is_its_pods_and_known_by_rank(here: Node, driver: str, tmp_path: Path) -> None:
    uid = uid_of("ml/train-0")
    top, slices = f"kubelet{os.getpid()}", f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    cgroup = {
        "cgroupfs": f"/{top}/kubepods/burstable/pod{uid}/{'a' * 64}",
        "systemd": f"/{top}/kubepods.slice/kubepods-burstable.slice/{slices}/cri-containerd-{'a' * 64}.scope",
    }[driver]
    here.proc = Path("/proc")
    here.api.has(pod_object("train-0", ownerReferences=kept_by("Job", "train")))
    here.kubelet.gives("train-0", gpu_uuid(0))
    with contained(tmp_path, cgroup) as pid:
        assert cgroup in Path(f"/proc/{pid}/cgroup").read_text()
        here.held((0, "ml/job/train"))
        # RANK is seen once the container's own program has taken runc's place.
        wait_for(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes(), "the container's program")
        word = here.look(Reading(gpu_uuid(0), 0, SECOND, processes=(Process(pid), Process(os.getpid()))))
        assert word is not None
        assert {p: (m.job_id, m.rank) for p, m in word.members.items()} == {pid: ("ml/job/train", "3")}
