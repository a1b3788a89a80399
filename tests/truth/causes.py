"""Names the true causes of GPU time, and the layer in which each loss counts.

Every second of every GPU has exactly one cause, or is split among several by fractions that add up to one.
"""

USEFUL = "useful"
"""Tensor pipe active, in equivalents of the reference clock: active share x min(1, clock / reference clock). Of a job
that hardly uses the tensor cores: the FP64 or FP32 pipe."""
IDLE_ALLOCATION = "idle_allocation"
"""Allocated, and nothing to do: a zombie, or a server without requests."""
HUNG = "hung"
"""The job will never make progress again, whatever its kernels seem to do."""
STARTUP = "startup"
"""From the allocation to the first step: imports, communicators, weights, compilation."""
FAILURE_RECOVERY = "failure_recovery"
"""From a crash to the first step after it: restart and restore."""
CHECKPOINT = "checkpoint"
"""Saving, and waiting for others to save."""
DATA_STALL = "data_stall"
"""No kernel, because the next batch is not there."""
PIPELINE_BUBBLE = "pipeline_bubble"
"""Waiting for the neighbour stage by the pipeline's schedule, idle or inside a polling kernel."""
HOST_OVERHEAD = "host_overhead"
"""Gaps between small kernels, because the CPU launches them too slowly."""
UNATTRIBUTED_STALL = "unattributed_stall"
"""Any other wait without a kernel."""
EXPOSED_COMMUNICATION = "exposed_communication"
"""A collective kernel alone, or a kernel that waits for a peer."""
MEMORY_BOUND = "memory_bound"
"""The slack of a resident kernel that DRAM limits."""
LOW_PARALLELISM = "low_parallelism"
"""SMs without a warp while a kernel is resident that does not communicate."""
OTHER_COMPUTE = "other_compute"
"""The remaining slack of resident kernels."""
THROTTLED = "throttled"
"""Tensor pipe active at a clock below the reference: active share x (1 - clock / reference clock)."""
UNALLOCATED = "unallocated"
"""Paid for, and no job holds it."""

CAUSES = (
    USEFUL, IDLE_ALLOCATION, HUNG, STARTUP, FAILURE_RECOVERY, CHECKPOINT, DATA_STALL, PIPELINE_BUBBLE, HOST_OVERHEAD,
    UNATTRIBUTED_STALL, EXPOSED_COMMUNICATION, MEMORY_BOUND, LOW_PARALLELISM, OTHER_COMPUTE, THROTTLED, UNALLOCATED,
)  # fmt: skip

ALLOCATION = frozenset({IDLE_ALLOCATION, UNALLOCATED})
COMPUTE_TIME = frozenset({
    HUNG, STARTUP, FAILURE_RECOVERY, CHECKPOINT, DATA_STALL, HOST_OVERHEAD, UNATTRIBUTED_STALL, EXPOSED_COMMUNICATION,
})  # fmt: skip
MODEL_FLOPS = frozenset(CAUSES) - ALLOCATION - COMPUTE_TIME - {USEFUL}


def layer(cause: str) -> str:
    """Return the layer a cause is lost in: allocation, compute_time or model_flops; useful for what is not lost."""
    if cause in ALLOCATION:
        return "allocation"
    if cause in COMPUTE_TIME:
        return "compute_time"
    return "model_flops" if cause in MODEL_FLOPS else USEFUL
