"""What a scenario is made of: the node it is told about, a row of the table, and who asks for the GPUs.

Owns the shapes and the owners. Refuses stories: those are `scenarios` and `lookalikes`.
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import Owner
from exporter.simulate.boards import Board
from exporter.simulate.plan import Job, Plan
from exporter.simulate.programs import Program


class Setting(Struct, frozen=True, kw_only=True):
    """What a scenario is told: the node's boards, its number in the fleet, and how long the story will be."""

    board: Board
    gpus: int
    node: int
    preroll_ms: int
    duration_ms: int
    """Altogether, the pre-roll included."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Every GPU of the node."""
        return tuple(range(self.gpus))


class Scenario(Struct, frozen=True, kw_only=True):
    """One row: what it shows, how long it takes to show it, and how to build it."""

    description: str
    plan: Callable[[Setting], Plan]
    duration_seconds: int = 1800
    preroll_seconds: int = 0
    """How much of the story has to have happened before anyone watches; told in steps of a minute."""
    min_gpus: int = 1


def batch(setting: Setting, number: int, name: str, *, user: str = "ada") -> Owner:
    """Make a Slurm batch job; numbers do not repeat within a fleet."""
    return Owner(
        job_id=str(41_000 + 1_000 * setting.node + number),
        scheduler="slurm",
        user=user,
        account="research",
        partition="gpu",
        name=name,
    )


def interactive(setting: Setting, number: int) -> Owner:
    """Make a notebook under Slurm."""
    return Owner(
        job_id=str(41_000 + 1_000 * setting.node + number),
        scheduler="slurm",
        user="grace",
        account="research",
        partition="interactive",
        name="jupyter",
        workload_class="interactive",
    )


def server(setting: Setting, number: int) -> Owner:
    """Make a language-model server's pod."""
    pod = f"chat-{setting.node}-{number}"
    return Owner(
        job_id=f"inference/{pod}",
        scheduler="kubernetes",
        namespace="inference",
        pod=pod,
        name="chat",
        workload_class="serving",
    )


def whole_node(setting: Setting, name: str, program: Program, *, hold_ms: int | None = None) -> Job:
    """Give all GPUs of the node to one batch job."""
    job = Job(owner=batch(setting, 1, name), slots=setting.slots, stages=program)
    return job if hold_ms is None else replace(job, hold_ms=hold_ms)


def one_each(setting: Setting, name: str, program: Program) -> tuple[Job, ...]:
    """Give a job of its own to every GPU."""
    return tuple(Job(owner=batch(setting, slot, name), slots=(slot,), stages=program) for slot in setting.slots)
