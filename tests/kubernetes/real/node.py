"""A real node: containerd, runc and kubelet, which take over folders of this mount namespace.

Only for a process in namespaces of its own (`make test-kubernetes`): /run, /var/log and /var/lib/kubelet become empty
file systems in memory, and the network gets a bridge for pods. Images are imported; no registry is asked.
"""

import hashlib
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.running import Program, environment, running
from tests.kubernetes.real.build import FOLDER
from tests.kubernetes.real.control_plane import ControlPlane
from tests.ports import free_port
from tests.waiting import wait_for

NAME = "gpu-1"
ROOT = Path("/var/lib/kubelet")
POD_RESOURCES = ROOT / "pod-resources" / "kubelet.sock"
PAUSE = "registry.example/pause:1"
_TAKEN = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/gpu-efficiency", "/var/lib/cni")
_PODS, _ADDRESS = "10.88.0.0/24", "10.88.0.1"
"""The network of pods, and the node's own address in it."""
_SERVICE = "10.96.0.1"
"""The address of the API server's own Service."""


def why_not() -> str:
    """Return why no node can run here; "" if one can."""
    here = os.environ.get("NAMESPACES_OF_ITS_OWN") == "yes" and os.geteuid() == 0
    return "" if here else "a node needs root and namespaces of its own: make test-kubernetes"


class RealNode:
    """containerd and kubelet of one node, from construction until the stack ends."""

    def __init__(self, cluster: ControlPlane, folder: Path, stack: ExitStack) -> None:
        self.cluster, self.folder, self._stack = cluster, folder, stack
        stack.callback(_remove_control_groups)
        for place in _TAKEN:
            Path(place).mkdir(parents=True, exist_ok=True)
            _command("mount", "-t", "tmpfs", "none", place)
        self._containerd_socket = Path("/run/containerd.sock")
        self._network()
        self._start("containerd", "containerd", "--config", f"{self._containerd()}")
        wait_for(self._containerd_is_up, "containerd answers")
        self.kubelet: Program
        self.start_kubelet()

    def start_kubelet(self) -> None:
        """Start the kubelet and wait until its node is ready."""
        words = (f"{FOLDER / 'kubelet'}", f"--config={self._kubelet()}", f"--kubeconfig={self.cluster.kubeconfig}")
        self.kubelet = self._start("kubelet", *words, f"--hostname-override={NAME}", f"--node-ip={_ADDRESS}")
        wait_for(self._ready, "the node is ready", seconds=300)

    def stop_kubelet(self) -> None:
        """Stop it; containers go on."""
        self.kubelet.end()

    def add_image(self, name: str, root: Path, config: Mapping[str, Any]) -> None:
        """Import a root file system as an image."""
        archive = self.folder / "image.tar"
        write_archive(archive, name, root, config)
        self._ctr("images", "import", f"{archive}")
        archive.unlink()

    def containers(self) -> list[str]:
        """Return the ids of all containers that run."""
        return self._ctr("tasks", "list", "--quiet").split()

    def execute(self, container: str, *words: str) -> str:
        """Run a command in a container; return what it prints, whatever its status."""
        return self._ctr("tasks", "exec", "--exec-id", "test", container, *words, check=False)

    def _ctr(self, *words: str, check: bool = True) -> str:
        line = ["ctr", f"--address={self._containerd_socket}", "--namespace=k8s.io", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=check)
        return done.stdout + done.stderr

    def _ready(self) -> bool:
        self.kubelet.alive()
        answer = self.cluster.client.get(f"/api/v1/nodes/{NAME}")
        conditions = answer.json().get("status", {}).get("conditions", ()) if answer.status_code == 200 else ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def _containerd_is_up(self) -> bool:
        return "Server:" in self._ctr("version", check=False)

    def _start(self, name: str, *words: str) -> Program:
        return self._stack.enter_context(running(list(words), self.folder / f"{name}.log", environment()))

    def _network(self) -> None:
        """Describe a bridge for pods, and lead the API server's Service to it."""
        plugins = [
            {
                "type": "bridge",
                "bridge": "pods0",
                "isGateway": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": _PODS}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ]
        folder = self.folder / "cni"
        folder.mkdir()
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
        (folder / "pods.conflist").write_text(json.dumps(network))
        _command("ip", "link", "add", "pods0", "type", "bridge")
        _command("ip", "address", "add", f"{_ADDRESS}/24", "dev", "pods0")
        _command("ip", "link", "set", "pods0", "up")
        Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1")
        for chain in ("PREROUTING", "OUTPUT"):
            _command("iptables", "-t", "nat", "-A", chain, "-d", _SERVICE, "-p", "tcp", "--dport", "443",
                     "-j", "DNAT", "--to-destination", f"127.0.0.1:{self.cluster.port}")  # fmt: skip

    def _containerd(self) -> Path:
        file = self.folder / "containerd.toml"
        file.write_text(f"""
version = 2
root = "{self.folder / "containerd"}"
state = "/run/containerd"
[grpc]
address = "{self._containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{self.folder / "opt"}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{self.folder / "cni"}"
""")
        return file

    def _kubelet(self) -> Path:
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": _ADDRESS,
            "port": free_port(),
            "healthzPort": 0,
            "authentication": {"x509": {"clientCAFile": f"{self.cluster.ca}"}},
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "containerRuntimeEndpoint": f"unix://{self._containerd_socket}",
            "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "memory.available": "1Mi"},
            "failSwapOn": False,
            "registerNode": True,
            "clusterDomain": "cluster.local",
            "clusterDNS": ["10.96.0.10"],
        }
        file = self.folder / "kubelet.yaml"
        file.write_text(yaml.safe_dump(settings))
        return file


def write_archive(archive: Path, name: str, root: Path, config: Mapping[str, Any]) -> None:
    """Write an image of one layer as `docker save` does."""
    layer = archive.with_suffix(".layer")
    _command("tar", "--create", f"--file={layer}", f"--directory={root}", "--numeric-owner", ".")
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    about = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    parts = {
        "config.json": about,
        "manifest.json": [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}],
    }
    folder = archive.parent
    with tarfile.open(archive, "w") as file:
        for part, content in parts.items():
            (folder / part).write_text(json.dumps(content))
            file.add(folder / part, part)
        file.add(layer, "layer.tar")
    layer.unlink()


def _remove_control_groups() -> None:
    """Remove the groups of pods, which are all empty once their containers have ended."""
    for group in Path("/sys/fs/cgroup").glob("*/kubepods"):
        for folder in sorted((group, *(each for each in group.rglob("*") if each.is_dir())), reverse=True):
            with suppress(OSError):
                folder.rmdir()


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
