"""What the kubelet's pod-resources service says on the wire, read without generated code.

Owns the few fields of kubelet's `v1` messages that name GPUs. Refuses a message that is cut short or breaks the
encoding, as a whole: half of a list of owners would make GPUs look unallocated. Fields it does not know are skipped,
as the encoding asks, so newer kubelets are read too.

Sources: kubernetes/kubelet pkg/apis/podresources/v1/api.proto for the field numbers, protobuf.dev's "Encoding" for the
bytes. protobuf's own package would cost 3 MiB resident for five small messages.
"""

from msgspec import Struct

Fields = dict[int, list[bytes]]
LIST = "/v1.PodResourcesLister/List"
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT = 10


class Devices(Struct, frozen=True):
    """ContainerDevices: ids as the device plugin that offers `resource` made them."""

    resource: str
    ids: tuple[str, ...]


class Claimed(Struct, frozen=True):
    """ClaimResource of a DynamicResource: a device that a DRA driver gave to a claim."""

    cdi: tuple[str, ...] = ()
    """Container Device Interface names, `vendor/class=device`."""
    driver: str = ""
    """Empty from kubelets before 1.34."""
    pool: str = ""
    device: str = ""


class Held(Struct, frozen=True):
    """PodResources: all that a pod's containers hold, init and sidecar containers included."""

    namespace: str
    name: str
    devices: tuple[Devices, ...] = ()
    claims: tuple[Claimed, ...] = ()


def read_list(message: bytes) -> tuple[Held, ...]:
    """Read a ListPodResourcesResponse; raises ValueError for one that cannot be believed."""
    return tuple(_held(_fields(pod)) for pod in _fields(message).get(1, ()))


def read_allocatable(message: bytes) -> tuple[Devices, ...]:
    """Read the devices of an AllocatableResourcesResponse; raises ValueError for one that cannot be believed."""
    return tuple(_devices(_fields(each)) for each in _fields(message).get(1, ()))


def _held(pod: Fields) -> Held:
    containers = [_fields(container) for container in pod.get(3, ())]
    dynamic = [_fields(resource) for one in containers for resource in one.get(5, ())]
    return Held(
        namespace=_text(pod, 2),
        name=_text(pod, 1),
        devices=tuple(_devices(_fields(each)) for one in containers for each in one.get(2, ())),
        claims=tuple(_claimed(_fields(claim)) for each in dynamic for claim in each.get(4, ())),
    )


def _devices(devices: Fields) -> Devices:
    return Devices(_text(devices, 1), tuple(name.decode() for name in devices.get(2, ())))


def _claimed(claim: Fields) -> Claimed:
    cdi = tuple(_text(_fields(device), 1) for device in claim.get(1, ()))
    return Claimed(cdi, _text(claim, 2), _text(claim, 3), _text(claim, 4))


def _text(fields: Fields, number: int) -> str:
    """Of a field that is there twice the last counts (Encoding: "last one wins")."""
    return fields[number][-1].decode() if number in fields else ""


def _fields(message: bytes) -> Fields:
    """Contents of the fields that have a length, by number; plain numbers are stepped over."""
    found: Fields = {}
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _BYTES:
            length, at = _varint(message, at)
            found.setdefault(key >> 3, []).append(message[at : at + length])
            at += length
        elif kind == _VARINT:
            _, at = _varint(message, at)
        else:
            at += _width(kind)
        if at > end:
            raise ValueError("the message is cut short")
    return found


def _width(kind: int) -> int:
    if kind not in _WIDTHS:
        raise ValueError(f"a field of wire type {kind}, which these messages do not have")
    return _WIDTHS[kind]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Give the number that begins there, and where it ends."""
    value = 0
    for place in range(_LONGEST_VARINT):
        if at + place >= len(message):
            raise ValueError("the message is cut short")
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:  # noqa: PLR2004  the top bit says that more follows
            return value, at + place + 1
    raise ValueError("a number of more than ten bytes")
