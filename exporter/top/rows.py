"""Rows of the two lists, before they have a width: one a GPU, or one a job on a node.

Owns what is searched and by what can be sorted. Refuses to draw.
"""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from exporter.top.answers import Gpu, Job, Owner, Window
from exporter.top.seen import Seen, View

Key = tuple[str, str, str]
"""What a row is of, for as long as it is there: gpu or job, the node's address, UUID or job id."""
Kind = Literal["gpus", "jobs"]
WORST = ("unavailable", "hung", "unobserved", "unowned", "zombie", "unallocated", "stalled", "active")
"""States, the one that most needs somebody first."""


class Row(Struct, frozen=True, kw_only=True):
    """What both kinds have."""

    key: Key
    seen: Seen
    node: str
    state: str
    suspect: bool
    since: float
    """Seconds."""
    owners: list[Owner]
    window: Window
    order: tuple[int, int, str]
    gpu: Gpu | None = None
    job: Job | None = None
    states: tuple[str, ...] = ()
    """Of a job: those of its GPUs."""

    @property
    def live(self) -> bool:
        """Its figures are the present."""
        return self.seen.live and (self.gpu is None or self.gpu.live)

    @property
    def owner(self) -> Owner:
        """The first of those who hold it."""
        return self.owners[0] if self.owners else Owner()

    def says(self) -> str:
        """All of its words, for a search."""
        of_gpu = (self.gpu.index, self.gpu.model, self.gpu.reason, self.gpu.uuid) if self.gpu else ()
        people = [word for owner in self.owners for word in _words(owner)]
        leaks = [name for name, _ in self.window.losses()[:2]]
        words = (self.node, self.state, *self.states, *of_gpu, *people, *leaks, "hang?" if self.suspect else "")
        return " ".join(words).replace("_", " ").casefold()


def _words(owner: Owner) -> tuple[str, ...]:
    return (
        owner.job_id, owner.name, owner.user, owner.account, owner.partition, owner.namespace, owner.workload_class,
        owner.team,
    )  # fmt: skip


def gpu_rows(view: View, window: str) -> list[Row]:
    """All GPUs of all nodes."""
    return [
        _gpu(gpu, seen, view, place=place, window=window)
        for place, seen in enumerate(view.nodes)
        if seen.gpus is not None
        for gpu in seen.gpus.gpus
    ]


def _gpu(gpu: Gpu, seen: Seen, view: View, *, place: int, window: str) -> Row:
    number = int(gpu.index) if gpu.index.isdecimal() else 1 << 30
    return Row(
        key=("gpu", seen.address, gpu.uuid),
        seen=seen,
        node=view.names[place],
        state=gpu.state,
        suspect=gpu.hang_suspected and gpu.state != "hung",
        since=gpu.state_seconds + seen.passed(view.now),
        owners=gpu.owners,
        window=getattr(gpu, window),
        order=(place, number, gpu.uuid),
        gpu=gpu,
    )


def job_rows(view: View, window: str) -> list[Row]:
    """All jobs of all nodes; one that several nodes share has a row for each."""
    return [
        _job(job, seen, view, place=place, number=number, window=window)
        for place, seen in enumerate(view.nodes)
        if seen.jobs is not None
        for number, job in enumerate(seen.jobs.jobs)
    ]


def _job(job: Job, seen: Seen, view: View, *, place: int, number: int, window: str) -> Row:
    held = held_by(job.owner.job_id, seen)
    states = tuple(gpu.state for gpu in held)
    sampled = seen.jobs.node.sampled_at if seen.jobs else 0.0
    return Row(
        key=("job", seen.address, job.owner.job_id),
        seen=seen,
        node=view.names[place],
        state=min(states, key=urgency) if states else "ended",
        suspect=any(gpu.hang_suspected and gpu.state != "hung" for gpu in held),
        since=max(0.0, sampled - job.started_at) + seen.passed(view.now),
        owners=[job.owner],
        window=getattr(job, window),
        order=(place, number, job.owner.job_id),
        job=job,
        states=states,
    )


def held_by(job_id: str, seen: Seen) -> list[Gpu]:
    """GPUs that the job holds on this node."""
    gpus = seen.gpus.gpus if seen.gpus else []
    return [gpu for gpu in gpus if any(owner.job_id == job_id for owner in gpu.owners)]


def urgency(state: str) -> int:
    """Its place among the states; one that is not known here comes after those that are trouble."""
    return WORST.index(state) if state in WORST else len(WORST) - 1


def _lowest(value: float | None) -> tuple[bool, float]:
    """What has no figure comes last."""
    return value is None, value or 0.0


def _lost_seconds(row: Row) -> float:
    return row.window.lost() * row.window.seconds


def _power(row: Row) -> float:
    return row.gpu.power_watts or 0.0 if row.gpu else 0.0


def _memory(row: Row) -> float:
    return row.gpu.memory_used_bytes or 0.0 if row.gpu else 0.0


Sort = tuple[str, str, Callable[[Row], tuple[object, ...]]]
"""Name, the column that it marks, and the key."""
_LOST: Sort = ("lost", "leak", lambda row: (-_lost_seconds(row),))
_BOTH: tuple[Sort, ...] = (
    ("product", "got", lambda row: _lowest(row.window.product)),
    ("state", "state", lambda row: (not row.suspect, urgency(row.state)) if row.state != "ended" else (True, 99)),
    ("user", "user", lambda row: (not row.owner.who, row.owner.who)),
    ("job", "job", lambda row: (not row.owner.job_id, row.owner.job_id)),
    ("longest", "since", lambda row: (-row.since,)),
)
SORTS: dict[Kind, tuple[Sort, ...]] = {
    "gpus": (
        ("gpu", "gpu", lambda _: ()),
        _LOST,
        *_BOTH,
        ("power", "power", lambda row: (-_power(row),)),
        ("memory", "memory", lambda row: (-_memory(row),)),
    ),
    "jobs": (_LOST, *_BOTH),
}
"""What the rows can be sorted by; the first is how they come."""


def listed(rows: list[Row], kind: Kind, *, sort: int = 0, reverse: bool = False, text: str = "") -> list[Row]:
    """Those that have all words of the text, in the order asked for; equal ones in the nodes' own order."""
    wanted = text.replace("_", " ").casefold().split()
    found = [row for row in rows if all(word in row.says() for word in wanted)]
    by = SORTS[kind][sort % len(SORTS[kind])][2]
    return sorted(found, key=lambda row: (by(row), row.order), reverse=reverse)
