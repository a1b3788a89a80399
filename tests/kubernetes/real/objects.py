"""What a cluster holds, of every kind that it can list, and which of that nobody installed."""

from typing import NamedTuple

from tests.kubernetes.real.control_plane import ControlPlane

_PASSING = {"Event", "Lease", "ComponentStatus", "APIService"}
"""Kinds that come and go by themselves."""
_METADATA = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}


class Kind(NamedTuple):
    """A kind of object: its version, and where its objects are."""

    version: str
    kind: str
    plural: str
    namespaced: bool

    def path(self, namespace: str = "") -> str:
        """Return the path of its objects: of all, or of a namespace."""
        root = f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if namespace else f"{root}/{self.plural}"


class Found(NamedTuple):
    """An object of a cluster."""

    kind: str
    namespace: str
    name: str
    uid: str


def kinds(cluster: ControlPlane) -> dict[str, Kind]:
    """Return the kinds that the server can list by name, in the version that it prefers."""
    groups = cluster.get("/apis")["groups"]
    versions = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
    found: dict[str, Kind] = {}
    for version in versions:
        listed = cluster.get(f"/apis/{version}" if "/" in version else f"/api/{version}")["resources"]
        for each in listed:
            if "list" in each["verbs"] and each["kind"] not in _PASSING:
                found.setdefault(each["kind"], Kind(version, each["kind"], each["name"], each["namespaced"]))
    return found


def everything(cluster: ControlPlane) -> set[Found]:
    """Return all objects of the cluster that stay until they are deleted."""
    found = set()
    for kind in kinds(cluster).values():
        answer = cluster.client.get(kind.path(), headers=_METADATA)
        assert answer.status_code == 200, f"{kind}: {answer.text}"
        for item in answer.json()["items"] or ():
            about = item["metadata"]
            found.add(Found(kind.kind, about.get("namespace", ""), about["name"], about["uid"]))
    return found
