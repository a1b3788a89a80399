"""The chart, rendered by Helm itself: its SDK (4.2) in this process, no cluster and no network.

Owns how values files become manifests. Refuses to know what should be in them.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart, values_from_yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "gpu-efficiency"
VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
ENVIRONMENTS = [path.stem for path in VALUES]
RELEASE, NAMESPACE = "gpu-efficiency", "gpus"
IMAGE = {"image": {"repository": "registry.example/gpu-efficiency"}}
Manifest = dict[str, Any]


@cache
def chart() -> Chart:
    """Load the chart once: it never changes."""
    return Chart.load(CHART)


def values_of(name: str) -> dict[str, Any]:
    """Values of an environment, as Helm reads them: dates stay text."""
    return values_from_yaml((Path(__file__).parent / "values" / f"{name}.yaml").read_text())


def texts(values: Mapping[str, Any], *, of: Chart | None = None, name: str = RELEASE) -> dict[str, str]:
    """Rendered templates by the path in the chart; raises HelmError with what the chart says of the values."""
    rendered = (of or chart()).render(dict(values), name=name, namespace=NAMESPACE)
    return {path.split("/templates/")[1]: text for path, text in rendered.items()}


def manifests(values: Mapping[str, Any], *, of: Chart | None = None, name: str = RELEASE) -> list[Manifest]:
    """All objects that Helm would send."""
    found: list[Manifest] = []
    for path, text in texts(values, of=of, name=name).items():
        if path.endswith(".yaml"):
            found += [document for document in yaml.load_all(text, yaml.CSafeLoader) if document is not None]
    return found


@cache
def environment(name: str) -> tuple[Manifest, ...]:
    """Objects of one of tests/helm/values."""
    return tuple(manifests(values_of(name)))


def notes(values: Mapping[str, Any]) -> str:
    """What Helm tells after an install."""
    return texts(values)["NOTES.txt"]


def of_kind(found: Iterator[Manifest] | list[Manifest] | tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    """Those of some kinds, as they come."""
    return [one for one in found if one["kind"] in kinds]


def the(found: list[Manifest] | tuple[Manifest, ...], kind: str, ending: str = "") -> Manifest:
    """The only one of a kind whose name has that ending."""
    (one,) = [one for one in of_kind(found, kind) if one["metadata"]["name"].endswith(ending)]
    return one


def pod(found: list[Manifest] | tuple[Manifest, ...], kind: str = "DaemonSet") -> Manifest:
    """The pod template of the exporters, or of the cluster's Deployment."""
    template: Manifest = the(found, kind)["spec"]["template"]
    return template


def container(found: list[Manifest] | tuple[Manifest, ...], kind: str = "DaemonSet") -> Manifest:
    """Our own container of that pod."""
    first: Manifest = pod(found, kind)["spec"]["containers"][0]
    return first


def environ(found: list[Manifest] | tuple[Manifest, ...], kind: str = "DaemonSet") -> dict[str, Any]:
    """Name of each variable of that container -> its text, or where it comes from."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(found, kind)["env"]}
