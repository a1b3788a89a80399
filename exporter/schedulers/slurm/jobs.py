"""A job as the controller tells it, in whatever spelling.

Owns the value and how many GPUs it comes to. Refuses to know text or JSON.
"""

from collections.abc import Mapping

from msgspec import Struct

from exporter.schedulers.slurm.gres import ON_GPUS, Gres, gpu_count, gpus_of

LONGEST = 256
"""Characters kept of a name or a comment."""
HOLDING = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING", "RESIZING"}
)
"""States in which resources are a job's (squeue(1), JOB STATE CODES); in all others it has none, or not yet."""


class Job(Struct, frozen=True):
    """One job as the controller tells it."""

    job_id: str
    states: tuple[str, ...]
    """Upper case; the base state first."""
    user: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    qos: str = ""
    name: str = ""
    comment: str = ""
    command: str = ""
    array_id: str = ""
    het_id: str = ""
    batch: bool | None = None
    """False: srun or salloc, somebody waits at a terminal."""
    nodes: int = 0
    hosts: str = ""
    """Nodes that it has, as a hostlist."""
    start: int | None = None
    """Unix seconds."""
    time_limit_seconds: float | None = None
    """None: without a limit, or not said."""
    restarts: int = 0
    gpus: int | None = None
    """Of the whole job; None: not said. MIG instances count as one each."""
    gpus_here: int | None = None
    """On each of its nodes; None: not said, or not the same on all."""
    on_gpus: bool = True
    """It was asked for with GPUs, or that is not known."""
    given: Mapping[str, tuple[Gres, ...]] | None = None
    """What it has by node; None: not said."""

    @property
    def over(self) -> bool:
        """It has nothing any more and will not come back by itself."""
        return not HOLDING.intersection(self.states)


def count(
    asked: Mapping[str, tuple[Gres, ...]],
    tres: dict[str, int],
    given: Mapping[str, tuple[Gres, ...]] | None,
    *,
    nodes: int,
    tasks: int | None,
) -> tuple[int | None, int | None]:
    """GPUs of the whole job and of each of its nodes, from the surest word to the weakest; None: not said.

    `asked` is by what it was asked for: Job, Node, Task, Socket.
    """
    each = gpu_count(asked["Node"]) or None
    whole = gpus_of(tres) or sum(map(gpu_count, (given or {}).values())) or gpu_count(asked["Job"]) or None
    if whole is None and each and nodes:
        whole = each * nodes
    if whole is None and tasks:
        whole = gpu_count(asked["Task"]) * tasks or None
    return whole, whole if nodes == 1 else each


def on_gpus(
    asked: Mapping[str, tuple[Gres, ...]], tres: dict[str, int], given: Mapping[str, tuple[Gres, ...]] | None
) -> bool:
    """Whether anything is said of GPUs or parts of them."""
    names = {each.name for some in (*asked.values(), *(given or {}).values()) for each in some}
    names |= {name.removeprefix("gres/").partition(":")[0] for name in tres if name.startswith("gres/")}
    return not names.isdisjoint(ON_GPUS)
