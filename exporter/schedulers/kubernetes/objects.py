"""The parts of Kubernetes' API objects that say who holds a GPU and whether this node takes work.

Owns their shapes (Kubernetes API reference: Pod v1, Node v1, ResourceSlice resource.k8s.io). Everything else in an
object is skipped unread. Refuses an object whose parts have other types than the reference says, by itself: the
others of a list are still good.
"""

from datetime import datetime

from msgspec import Raw, Struct


class OwnerReference(Struct, frozen=True):
    """Who made an object; of several the one with `controller` keeps it."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class Metadata(Struct, frozen=True, rename="camel"):
    """ObjectMeta and ListMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class Variable(Struct, frozen=True):
    """EnvVar of a container; `value` is empty where it comes from elsewhere."""

    name: str = ""
    value: str | None = None


class Container(Struct, frozen=True):
    """A container as the pod asks for it."""

    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None
    env: tuple[Variable, ...] | None = None


class PodSpec(Struct, frozen=True, rename="camel"):
    """What was asked for."""

    containers: tuple[Container, ...] | None = None
    priority_class_name: str = ""
    active_deadline_seconds: int | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """How a container fares."""

    restart_count: int = 0


class PodStatus(Struct, frozen=True, rename="camel"):
    """How the pod fares."""

    phase: str = ""
    start_time: datetime | None = None
    """When the kubelet took it in, which is when it gave it its devices, before any image was pulled."""
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(Struct, frozen=True):
    """A pod of this node."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def terminal(self) -> bool:
        """Ended: its containers will not start again, so it holds nothing, whatever older kubelets list."""
        return self.status.phase in ("Succeeded", "Failed")


class Taint(Struct, frozen=True):
    """What keeps pods off a node."""

    key: str = ""


class NodeSpec(Struct, frozen=True):
    """What was decided about the node."""

    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


class Condition(Struct, frozen=True):
    """One of a node's conditions; `status` is True, False or Unknown, as text."""

    type: str = ""
    status: str = ""


class NodeStatus(Struct, frozen=True):
    """How the node fares."""

    conditions: tuple[Condition, ...] | None = None


class Node(Struct, frozen=True):
    """This node."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Attribute(Struct, frozen=True):
    """A DRA device's attribute; only texts matter here."""

    string: str | None = None


class BasicDevice(Struct, frozen=True):
    """Where resource.k8s.io/v1beta1 has a device's attributes."""

    attributes: dict[str, Attribute] | None = None


class SliceDevice(Struct, frozen=True):
    """A device that a driver offers on this node."""

    name: str = ""
    attributes: dict[str, Attribute] | None = None
    basic: BasicDevice | None = None


class Pool(Struct, frozen=True):
    """Which pool a slice belongs to; of a pool only the slices of its highest generation are valid."""

    name: str = ""
    generation: int = 0


class SliceSpec(Struct, frozen=True):
    """What a slice offers."""

    driver: str = ""
    pool: Pool = Pool()
    devices: tuple[SliceDevice, ...] | None = None


class ResourceSlice(Struct, frozen=True):
    """Devices that a DRA driver offers on this node."""

    metadata: Metadata
    spec: SliceSpec = SliceSpec()


class Listed(Struct, frozen=True):
    """The answer to a list; items are read one by one, so that a bad one spoils no other."""

    metadata: Metadata = Metadata()
    items: tuple[Raw, ...] | None = None


class Event(Struct, frozen=True):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, with the object or a Status."""

    type: str
    object: Raw


class Status(Struct, frozen=True):
    """What the API server says of a refusal."""

    code: int = 0
    message: str = ""


Thing = Pod | Node | ResourceSlice
