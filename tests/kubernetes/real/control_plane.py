"""A real control plane on loopback: etcd, kube-apiserver and kube-controller-manager, started by one test run.

Has TLS, RBAC, signed service account tokens and all admission plugins that are on by default. There is no kubelet and
no scheduler: tests bind pods to nodes and report their phases themselves.
"""

import json
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.certificates import HERE, Authority, openssl
from tests.e2e.running import Program, environment, running
from tests.kubernetes.real.build import FOLDER
from tests.ports import free_port
from tests.waiting import wait_for

Json = dict[str, Any]
_ADMIN = "admin"
"""The token of a member of system:masters."""
_NODE_CONTROLLERS = ("node-lifecycle-controller", "taint-eviction-controller", "pod-garbage-collector-controller")
"""These would delete pods of nodes that have no kubelet."""


class ControlPlane:
    """The servers' addresses and credentials, and requests as an administrator."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Start all servers in `folder`; `stack` ends them."""
        self.folder, self._stack = folder, stack
        authority = Authority(folder)
        names = f"{HERE},DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:10.96.0.1"
        self.ca, (self._certificate, self._key) = authority.certificate, authority.issue("apiserver", names)
        self._signing = folder / "service-accounts.key"
        openssl("genrsa", "-out", f"{self._signing}", "2048")
        self._tokens = folder / "tokens.csv"
        self._tokens.write_text(f'{_ADMIN},admin,admin,"system:masters"\n')
        self.etcd_url = f"http://127.0.0.1:{free_port()}"
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))
        self.client = httpx.Client(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=f"{self.ca}"),
            headers={"Authorization": f"Bearer {_ADMIN}"},
            timeout=60,
            trust_env=False,
        )
        stack.callback(self.client.close)
        self._start("etcd", *self._etcd())
        self._api_server: Program
        self.start_api_server()
        self._start("kube-controller-manager", *self._controller_manager())
        wait_for(lambda: self._has_service_account("default"), "the controllers make service accounts", seconds=300)
        self._may_ask_kubelets()

    def start_api_server(self) -> None:
        """Start kube-apiserver and wait until it is ready."""
        self._api_server = self._start("kube-apiserver", *self._apiserver())
        wait_for(self._ready, "/readyz of kube-apiserver", seconds=300)

    def stop_api_server(self) -> None:
        """Kill it, as a node that loses power does."""
        self._api_server.process.kill()
        self._api_server.process.wait()

    def start_scheduler(self, stack: ExitStack) -> None:
        """Start kube-scheduler, which binds pods to nodes until `stack` ends."""
        flags = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1")
        words = [f"{FOLDER / 'kube-scheduler'}", *flags, f"--secure-port={free_port()}"]
        stack.enter_context(running(words, self.folder / "kube-scheduler.log", environment()))

    def compact(self) -> None:
        """Make etcd forget all but the newest revision of each object."""
        with httpx.Client(base_url=self.etcd_url, trust_env=False, timeout=60) as client:
            newest = client.post("/v3/kv/range", json={"key": "AA=="}).json()["header"]["revision"]
            done = client.post("/v3/kv/compaction", json={"revision": newest, "physical": True})
            assert done.status_code == 200, done.text

    # -- requests as an administrator --

    def get(self, path: str) -> Json:
        """Return an object or a list; raises AssertionError for any other answer."""
        answer = self.client.get(path)
        assert answer.status_code == 200, f"GET {path}: {answer.text}"
        found: Json = answer.json()
        return found

    def create(self, path: str, thing: Mapping[str, Any]) -> Json:
        """Create an object, with unknown fields refused."""
        answer = self.client.post(path, json=thing, params={"fieldValidation": "Strict"})
        assert answer.status_code in (200, 201), f"POST {path}: {answer.text}"
        made: Json = answer.json()
        return made

    def patch(self, path: str, change: Mapping[str, Any]) -> Json:
        """Change an object by a merge patch."""
        headers = {"Content-Type": "application/merge-patch+json"}
        answer = self.client.patch(path, content=json.dumps(change), headers=headers)
        assert answer.status_code == 200, f"PATCH {path}: {answer.text}"
        changed: Json = answer.json()
        return changed

    def delete(self, path: str) -> None:
        """Delete an object at once: there is no kubelet to wait for."""
        answer = self.client.request("DELETE", path, json={"gracePeriodSeconds": 0})
        assert answer.status_code in (200, 202), f"DELETE {path}: {answer.text}"

    def create_namespace(self, name: str, **labels: str) -> str:
        """Create a namespace, and wait for its service account, without which no pod is admitted."""
        self.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        wait_for(lambda: self._has_service_account(name), f"the service account of {name}")
        return name

    def token(self, namespace: str, account: str, seconds: int = 3600) -> str:
        """Return a new token of a service account, by the TokenRequest API."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        made = self.create(path, {"spec": {"expirationSeconds": seconds}})
        return str(made["status"]["token"])

    def apply_crd(self, definition: Mapping[str, Any]) -> None:
        """Create a custom resource definition and wait until its resources are served."""
        spec = self.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        wait_for(lambda: self.client.get(path).status_code == 200, f"{path} is served")

    def helm(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run the real helm against this cluster; its folders are this run's own."""
        own = {f"HELM_{kind}_HOME": f"{self.folder / 'helm' / kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA")}
        env = environment(KUBECONFIG=f"{self.kubeconfig}", **own)
        return subprocess.run([f"{FOLDER / 'helm'}", *words], env=env, capture_output=True, text=True, check=False)

    def package(self, chart: Path, folder: Path) -> str:
        """Return the archive that helm makes of a chart's folder."""
        done = self.helm("package", f"{chart}", "--destination", f"{folder}")
        assert done.returncode == 0, done.stderr
        (archive,) = folder.glob("*.tgz")
        return f"{archive}"

    # -- the servers --

    def _may_ask_kubelets(self) -> None:
        """Let the API server ask kubelets, as kubeadm does: by its certificate it is the user `apiserver` to them."""
        group = "rbac.authorization.k8s.io"
        self.create(f"/apis/{group}/v1/clusterrolebindings", {
            "metadata": {"name": "apiserver"},
            "subjects": [{"kind": "User", "name": "apiserver", "apiGroup": group}],
            "roleRef": {"kind": "ClusterRole", "name": "system:kubelet-api-admin", "apiGroup": group},
        })  # fmt: skip

    def _start(self, name: str, *flags: str) -> Program:
        words = [f"{FOLDER / name}", *flags]
        return self._stack.enter_context(running(words, self.folder / f"{name}.log", environment()))

    def _etcd(self) -> Iterator[str]:
        peer = f"http://127.0.0.1:{free_port()}"
        yield f"--data-dir={self.folder / 'etcd'}"
        yield f"--listen-client-urls={self.etcd_url}"
        yield f"--advertise-client-urls={self.etcd_url}"
        yield f"--listen-peer-urls={peer}"
        yield f"--initial-advertise-peer-urls={peer}"
        yield f"--initial-cluster=default={peer}"
        yield "--unsafe-no-fsync"
        yield "--log-level=warn"

    def _apiserver(self) -> Iterator[str]:
        yield f"--etcd-servers={self.etcd_url}"
        yield "--etcd-compaction-interval=0"
        yield "--bind-address=127.0.0.1"
        yield "--advertise-address=127.0.0.1"
        yield f"--secure-port={self.port}"
        yield f"--tls-cert-file={self._certificate}"
        yield f"--tls-private-key-file={self._key}"
        yield f"--client-ca-file={self.ca}"
        yield f"--kubelet-client-certificate={self._certificate}"
        yield f"--kubelet-client-key={self._key}"
        yield "--kubelet-preferred-address-types=InternalIP"
        yield f"--token-auth-file={self._tokens}"
        yield "--authorization-mode=Node,RBAC"
        yield "--service-account-issuer=https://kubernetes.default.svc"
        yield f"--service-account-key-file={self._signing}"
        yield f"--service-account-signing-key-file={self._signing}"
        yield "--service-cluster-ip-range=10.96.0.0/24"
        yield "--endpoint-reconciler-type=none"  # no endpoint of a Service may be on loopback
        yield "--allow-privileged=true"

    def _controller_manager(self) -> Iterator[str]:
        yield f"--kubeconfig={self.kubeconfig}"
        yield f"--authentication-kubeconfig={self.kubeconfig}"
        yield f"--authorization-kubeconfig={self.kubeconfig}"
        yield "--bind-address=127.0.0.1"
        yield f"--secure-port={free_port()}"
        yield "--leader-elect=false"
        yield f"--root-ca-file={self.ca}"
        yield f"--service-account-private-key-file={self._signing}"
        yield f"--controllers=*,{','.join(f'-{name}' for name in _NODE_CONTROLLERS)}"

    def _kubeconfig(self) -> Json:
        cluster = {"server": self.url, "certificate-authority": f"{self.ca}"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": _ADMIN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
            "current-context": "here",
        }

    def _ready(self) -> bool:
        self._api_server.alive()
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def _has_service_account(self, namespace: str) -> bool:
        return self.client.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default").status_code == 200


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Run a control plane for the length of a block."""
    with ExitStack() as stack:
        yield ControlPlane(folder, stack)
