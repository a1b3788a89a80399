"""Signal against effect: what a node that cannot see one signal says of the same story, and why.

Each row takes signals away and names every leak that may change; all others must stay the same to the nanosecond.
What is not seen goes to the next residual or to `unresolved`; it is never guessed, and never proves a hang.
"""

from collections import Counter
from typing import NamedTuple

import pytest

from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.scenarios.stage import Case, Run, play

pytestmark = pytest.mark.slow

TENSOR, DRAM, SM, ENGINE = ("tensor_active",), ("dram_active",), ("sm_active",), ("gr_engine_active",)
NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
PCIE = ("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second")
PIPES = ("fp64_active", "fp32_active", "fp16_active")
POWER, CLOCK, PROCESSES = ("power_watts",), ("sm_clock_hz",), ("processes",)
OWNER, SPEC, UTILIZATION = ("owner",), ("spec",), ("gpu_utilization",)

SLACK = ("exposed_communication", "memory_bound", "low_parallelism", "other_compute")
KERNELS = (*SLACK, "throttled", "useful")
WAITING = ("startup", "checkpoint", "host_overhead", "unattributed_stall")
BUSY, REST = ("active", "computing"), ("stalled", "idle_context")
HUNG, CULPRIT = ("hung", "spinning"), ("hung", "culprit")
LEFT, FREE, BLIND = ("unowned", "leaked_process"), ("unallocated", "free"), ("unobserved", "no_engine_signal")


class Row(NamedTuple):
    """One scenario seen without some signals."""

    scenario: str
    missing: tuple[str, ...]
    why: str
    ending: tuple[tuple[str, str], ...]
    """State and reason of each GPU at the end, in any order."""
    gone: tuple[str, ...] = ()
    """Leaks that take nothing any more, though they did."""
    grown: tuple[str, ...] = ()
    """Leaks that take more, on the whole."""
    moved: tuple[str, ...] = ()
    """Leaks that may change either way, for they come after another in the waterfall."""
    suspected: bool = False
    """Is a hang suspected at the end?"""
    board: str = "H100-SXM5-80GB"

    def __str__(self) -> str:
        return f"{self.scenario}-without-{'+'.join(self.missing)}-{self.board}"


ROWS = (
    Row("healthy_training", TENSOR, "no tensor counter: kernel time is computing, its worth unknown",
        (BUSY, BUSY), gone=(*SLACK, "useful"), grown=("unresolved",)),
    Row("healthy_training", SPEC, "an unknown board has no peak: the same", (BUSY, BUSY),
        gone=(*SLACK, "useful"), grown=("unresolved",)),
    Row("healthy_training", DRAM, "memory's share goes to the rest", (BUSY, BUSY),
        gone=("memory_bound",), grown=("other_compute",)),
    Row("healthy_training", SM, "neither empty SMs nor a collective mixed into a second can be told; memory has its "
        "part of all slack", (BUSY, BUSY),
        gone=("exposed_communication", "low_parallelism"), grown=("other_compute",), moved=("memory_bound",)),
    Row("healthy_training", NVLINK, "no link: idle SMs alone show less communication", (BUSY, BUSY),
        grown=("memory_bound",), moved=("exposed_communication", "other_compute")),
    Row("healthy_training", PCIE, "what flowed to the host cannot be told: a checkpoint is a stall like any other",
        (BUSY, BUSY), gone=("checkpoint",), grown=("unattributed_stall",)),
    Row("healthy_training", NVLINK, "L40S has no NVLink: the fields it cannot have are zero, and PCIe is its link",
        (BUSY, BUSY), board="L40S"),
    Row("healthy_training", PCIE, "on L40S that is also the link between the GPUs", (BUSY, BUSY), board="L40S",
        gone=("checkpoint",), moved=("exposed_communication", "startup"),
        grown=("memory_bound", "other_compute", "unattributed_stall")),
    Row("healthy_training", POWER, "power only acquits spins; energy has a counter of its own", (BUSY, BUSY)),
    Row("healthy_training", UTILIZATION, "the driver's own figure decides nothing beside the profiler's", (BUSY, BUSY)),
    Row("healthy_training", PROCESSES, "an owned GPU that computes needs no process list", (BUSY, BUSY)),
    Row("healthy_training", CLOCK, "H100 trains above its reference clock: absent counts as 1", (BUSY, BUSY),
        grown=("other_compute",), moved=("useful",)),
    Row("healthy_training", ENGINE, "the driver's utilisation stands in, rounded up to whole percents: less waiting",
        (BUSY, BUSY), moved=(*WAITING, *SLACK)),
    Row("healthy_training", ENGINE + UTILIZATION, "no engine signal at all: the reading is worth nothing",
        (BLIND, BLIND), gone=(*WAITING, *SLACK, "useful"), grown=("unobserved",)),
    Row("healthy_training", OWNER, "nobody's, and free: work since the checkpoint's rest is not yet a minute long",
        (FREE, FREE), gone=(*WAITING, *SLACK, "useful"), grown=("idle_allocation",)),
    Row("memory_bound_decode", DRAM, "decode without DRAM: not memory-bound but other compute, and idle SMs might be "
        "a collective's", (BUSY,) * 4, gone=("memory_bound",), grown=("exposed_communication", "other_compute"),
        moved=("low_parallelism",)),
    Row("memory_bound_decode", TENSOR, "no tensor counter: nothing is known to be memory's fault", (BUSY,) * 4,
        gone=(*SLACK, "useful"), grown=("unresolved",)),
    Row("memory_bound_decode", SM, "memory comes before parallelism: it stays, or takes what the link gave",
        (BUSY,) * 4, gone=("exposed_communication", "low_parallelism"), grown=("memory_bound", "other_compute")),
    Row("memory_bound_decode", OWNER, "a server nobody owns", (LEFT,) * 4,
        gone=("startup", "host_overhead", "unattributed_stall", *SLACK, "useful"), grown=("idle_allocation",)),
    Row("input_starved_training", PCIE, "no host-to-device bursts: the pauses have no known cause", (BUSY, BUSY),
        gone=("data_stall",), grown=("unattributed_stall",)),
    Row("input_starved_training", TENSOR, "pauses are told by the engine, not by the tensor cores", (BUSY, BUSY),
        gone=(*SLACK, "useful"), grown=("unresolved",)),
    Row("input_starved_training", UTILIZATION, "nor by the driver's utilisation, but it tells at which clock "
        "the GPU works", (BUSY, BUSY), moved=("other_compute", "useful")),
    Row("zombie_notebook", PROCESSES, "still a zombie, but not how deep", (("zombie", "processes_unseen"),) * 2),
    Row("zombie_notebook", OWNER, "nobody's and at rest: free, its context makes no difference", (FREE, FREE),
        gone=("startup", "unattributed_stall", *SLACK[1:], "useful"), grown=("idle_allocation",)),
    Row("zombie_notebook", TENSOR, "work is also seen by its DRAM and FP pipes: the same two hours",
        (("zombie", "idle_context"),) * 2, gone=(*SLACK[1:], "useful"), grown=("unresolved",)),
    Row("idle_context", PROCESSES, "still a zombie, but not how deep", (("zombie", "processes_unseen"),)),
    Row("idle_context", SPEC, "waiting needs no peak; without PCIe's width the driver's polling is no work at all",
        (("zombie", "idle_context"),), moved=("startup", "idle_allocation")),
    Row("idle_context", ENGINE, "the driver says 0 % as well", (("zombie", "idle_context"),)),
    Row("leaked_process", PROCESSES, "a kernel nobody owns is proof enough of a process", (LEFT, FREE, FREE, FREE)),
    Row("leaked_process", UTILIZATION, "the engine counter sees the kernel", (LEFT, FREE, FREE, FREE)),
    Row("leaked_process", TENSOR, "so it does without tensor cores", (LEFT, FREE, FREE, FREE),
        gone=(*SLACK, "useful"), grown=("unresolved",)),
    Row("deadlock", DRAM, "a spin that might be moving memory is only suspected, and waits for a peer",
        (BUSY, BUSY, BUSY, REST), suspected=True, gone=("hung", "memory_bound"),
        grown=("exposed_communication", "other_compute", "unattributed_stall")),
    Row("deadlock", NVLINK, "nor is one whose link is not seen", (BUSY, BUSY, BUSY, REST), suspected=True,
        gone=("hung",), moved=SLACK, grown=("exposed_communication", "unattributed_stall")),
    Row("deadlock", PCIE, "nor one whose host link is not seen", (BUSY, BUSY, BUSY, REST), suspected=True,
        gone=("hung",), grown=("exposed_communication", "unattributed_stall")),
    Row("deadlock", TENSOR, "without the tensor counter nothing spins, not even on suspicion",
        (BUSY, BUSY, BUSY, REST), gone=("hung", *SLACK, "useful"), grown=("unresolved", "unattributed_stall")),
    Row("deadlock", ENGINE, "the driver's 100 % is no proof of fresh profiling data: no spin", (BUSY, BUSY, BUSY, REST),
        gone=("hung",), moved=(*WAITING, *SLACK), grown=("low_parallelism",)),
    Row("deadlock", SM, "a spin is not told by its SMs", (HUNG, HUNG, HUNG, CULPRIT),
        gone=("low_parallelism",), moved=SLACK),
    Row("deadlock", POWER, "FP pipes at rest acquit in power's place", (HUNG, HUNG, HUNG, CULPRIT)),
    Row("deadlock", PIPES, "a job of the tensor cores is not judged by its power: FP work could look the same",
        (BUSY, BUSY, BUSY, REST), suspected=True, gone=("hung",),
        grown=("exposed_communication", "unattributed_stall")),
    Row("deadlock", POWER + PIPES, "nor without it",
        (BUSY, BUSY, BUSY, REST), suspected=True, gone=("hung",),
        grown=("exposed_communication", "unattributed_stall")),
    Row("deadlock", SPEC, "hung needs no peak; what was computed before is unresolved", (HUNG, HUNG, HUNG, CULPRIT),
        gone=(*SLACK, "useful"), grown=("unresolved",)),
    Row("deadlock", OWNER, "nobody's GPU is never hung: whoever spins there is a leak", (LEFT, LEFT, LEFT, FREE),
        gone=("hung", "startup", "host_overhead", "unattributed_stall", *SLACK, "useful"), grown=("idle_allocation",)),
    Row("deadlock", PROCESSES, "hung needs no process list", (HUNG, HUNG, HUNG, CULPRIT)),
    Row("deadlock", NVLINK, "what a board cannot have does not keep it from being hung", (HUNG, HUNG, HUNG, CULPRIT),
        board="L40S"),
    Row("spin_kernel", DRAM, "only suspected: it has never worked, and might still start up", (BUSY, BUSY),
        suspected=True, gone=("hung",), grown=("startup",)),
    Row("spin_kernel", NVLINK, "only suspected", (BUSY, BUSY), suspected=True, gone=("hung",), grown=("startup",)),
    Row("spin_kernel", SM, "hung all the same", (HUNG, HUNG)),
    Row("spin_kernel", OWNER, "unowned, never hung", (LEFT, LEFT), gone=("hung", "startup"),
        grown=("idle_allocation",)),
    Row("straggler", NVLINK, "without the link idle SMs alone show that anyone waits", (BUSY,) * 3,
        grown=("memory_bound",), moved=("exposed_communication", "other_compute")),
    Row("throttled", CLOCK, "an unseen clock counts as full: nothing is throttled", (BUSY, BUSY),
        gone=("throttled",), grown=("useful",), moved=("other_compute",)),
    Row("throttled", TENSOR, "a clock without tensor work loses nothing that is known", (BUSY, BUSY),
        gone=KERNELS, grown=("unresolved",)),
    Row("lost_gpu", DRAM, "lost is the driver's word; the siblings wait for it all the same",
        (FREE, FREE, ("unavailable", "lost")), gone=("memory_bound",), grown=("other_compute",)),
    Row("lost_gpu", OWNER, "nobody's, and still lost", (FREE, FREE, ("unavailable", "lost")),
        gone=("startup", "host_overhead", "unattributed_stall", *SLACK, "useful"), grown=("idle_allocation",)),
    Row("telemetry_outage", POWER, "the silence is as long, with or without power", (BUSY, BUSY)),
    Row("copy_loop", DRAM, "full speed by the driver's word, but why it computes nothing is unknown", (BUSY,),
        gone=("memory_bound",), grown=("other_compute",), moved=("startup", "unattributed_stall")),
    Row("copy_loop", SM, "its DRAM is at the ceiling: all of it is memory's", (BUSY,),
        gone=("low_parallelism",), grown=("memory_bound",), moved=("other_compute",)),
    Row("copy_loop", TENSOR, "a copy and a matrix product look the same without the tensor counter", (BUSY,),
        gone=SLACK[1:], grown=("unresolved",)),
    Row("large_gemm", CLOCK, "an unseen clock counts as full", (BUSY,), gone=("throttled",), grown=("useful",)),
    Row("large_gemm", DRAM, "the little that was memory's goes on", (BUSY,),
        gone=("memory_bound",), grown=("other_compute",)),
    Row("carpenter", TENSOR, "half the day computes, nobody knows to what end", (REST,),
        gone=(*SLACK[1:], "useful"), grown=("unresolved",)),
    Row("carpenter", PROCESSES, "a pause is a pause", (("stalled", "processes_unseen"),)),
)  # fmt: skip


def endings(run: Run) -> Counter[tuple[str, str]]:
    return Counter(run.final(uuid) for uuid in run.uuids)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_without_a_signal(row: Row) -> None:
    whole, part = play(Case(row.scenario, row.board)), play(Case(row.scenario, row.board, missing=row.missing))
    assert endings(part) == Counter(row.ending), row.why
    changed = {*row.gone, *row.grown, *row.moved}
    before, after = Counter[str](), Counter[str]()
    for uuid in whole.uuids:
        seen, left = whole.book(uuid), part.book(uuid)
        assert sum(left.values()) == sum(seen.values()), row.why
        different = {name for name in seen if seen[name] != left[name]}
        assert different <= changed, row.why
        before.update(seen)
        after.update(left)
    for name in row.gone:
        assert before[name] > 0 == after[name], f"{name}: {row.why}"
    for name in row.grown:
        assert after[name] > before[name], f"{name}: {row.why}"


@pytest.mark.parametrize("row", [row for row in ROWS if row.scenario in {"deadlock", "spin_kernel"}], ids=str)
def test_suspicion_without_a_signal(row: Row) -> None:
    """A hang that cannot be proven is still shown as suspected; one that cannot even be seen is not."""
    run = play(Case(row.scenario, row.board, missing=row.missing))
    hung = any(state == "hung" for state, _ in row.ending)
    seen = take_snapshot(run.ledger, DaemonMetadata()).gpus
    assert any(gpu.hang_suspected for gpu in seen) is (row.suspected or hung), row.why
    assert any(gpu.state == "hung" for gpu in seen) is hung, row.why


def test_the_table_covers_what_a_node_may_lack() -> None:
    missing = {signal for row in ROWS for signal in row.missing}
    assert missing >= {*TENSOR, *DRAM, *SM, *ENGINE, *NVLINK, *PCIE, *PIPES, *POWER, *CLOCK, *PROCESSES, *OWNER, *SPEC}
    assert len(ROWS) == len(set(map(str, ROWS))) >= 50
