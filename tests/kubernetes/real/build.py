"""Builds Kubernetes, kubectl, etcd and Helm from their Go modules: `python -m tests.kubernetes.real.build`.

go.mod beside this file pins all versions and go.sum their hashes; the programs lie in `.cache/kubernetes` and are built
anew when one of the two files changes. Needs Go (go.dev) on the PATH: Debian 12's is too old. The first build took
24 minutes on two busy processors.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(__file__).resolve().parents[3] / ".cache" / "kubernetes"
_STAMP = FOLDER / ".built"
PROGRAMS = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}
OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
"""The module whose example/prometheus-operator-crd has the custom resource definitions."""


class BuildError(Exception):
    """A program could not be built; the message has what to do."""


def version_of(module: str) -> str:
    """Return the version that go.mod requires, as v1.2.3."""
    found = re.search(rf"^\s*(?:require )?{re.escape(module)} (v\S+)", (HERE / "go.mod").read_text(), re.MULTILINE)
    assert found, f"go.mod requires no {module}"
    return found[1]


def missing() -> str:
    """Return why the programs cannot be used; "" if they are those of go.mod."""
    if _is_of_go_mod() and all((FOLDER / name).is_file() for name in PROGRAMS):
        return ""
    return "Kubernetes is not built, or from another go.mod: make test-kubernetes"


def build() -> None:
    """Build what is missing. Raises BuildError."""
    if not missing():
        return
    go = shutil.which("go")
    if go is None:
        raise BuildError("no Go on the PATH: install 1.25 or newer from go.dev/doc/install")
    if not _is_of_go_mod():
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    left = {name: package for name, package in PROGRAMS.items() if not (FOLDER / name).is_file()}
    for name, package in left.items():
        sys.stdout.write(f"Building {name} from {package} ...\n")
        sys.stdout.flush()
        _run(go, "build", "-p", "2", "-ldflags", _flags(), "-o", f"{FOLDER / name}", package)
    crds = FOLDER / "crds"
    shutil.rmtree(crds, ignore_errors=True)
    module = json.loads(_run(go, "mod", "download", "-json", OPERATOR))
    shutil.copytree(Path(module["Dir"]) / "example" / "prometheus-operator-crd", crds)
    crds.chmod(0o755)  # Go's copies are read-only
    _STAMP.write_text(_digest())


def _is_of_go_mod() -> bool:
    return _STAMP.is_file() and _STAMP.read_text() == _digest()


def _digest() -> str:
    files = (HERE / "go.mod", HERE / "go.sum")
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _flags() -> str:
    """Return the linker's flags: no symbols, and the version that these programs report."""
    version = version_of("k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(["-s -w", *(f"-X {package}.{key}={values[key]}" for package in packages for key in values)])


def _run(*words: str) -> str:
    env = os.environ | {"CGO_ENABLED": "0"}
    done = subprocess.run(words, cwd=HERE, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(words)} ended with status {done.returncode}")
    return done.stdout


def main() -> int:
    """Return 0 when all programs are there; 1, with the reason on standard error, if one cannot be built."""
    try:
        build()
    except BuildError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
