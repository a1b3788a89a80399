"""An independent generator of truth: GPU nodes whose every second has a known cause, and their telemetry.

It judges the accounting, so it shares nothing with it: no code, no rules, no thresholds. It is a model of what GPUs do.

**A world** is a node of GPUs for some time. Each GPU has a track: a row of pieces during which nothing changes. In
each piece the GPU runs a kernel, or waits without one, or does both in a fine mixture. The piece says which share of
the time a kernel is resident, which share of the SMs has warps, how busy the tensor pipe, the DRAM and the other
pipes are, what crosses NVLink and PCIe, how much power it takes, and *why the rest of the time is lost*. Whoever wrote
the workload chose that reason from what the program does there, never from the counters.

**The truth** of a GPU is the sum over its pieces. Tensor activity is useful, times the clock over the one for which
the peak is defined. What a lower clock takes is throttled; what a higher one adds comes out of the slack, for useful
time is the share of the peak. The slack of a kernel goes to the kernel's own nature: SMs without a warp are low
parallelism; the rest is memory bound if DRAM limits that kernel, and other compute if not. A kernel that only moves
data to peers or polls for them is exposed communication throughout. Time without a kernel goes to the reason of the
wait. A job that is hung, or pretends to work, loses all its time, whatever its kernels do. So the seconds of all
causes add up to the time paid.

**The telemetry** is the exact mean of the same pieces over reading windows, with the habits of the real counters (see
`sampler`). It contains nothing that a real agent could not see.

Some seconds have two fair answers, as when a rank polls in a collective because another one saves a checkpoint. They
count under what the whole job does (checkpoint); `doubts_between` returns them with the other answers.

`build` makes a world from a name, a seed and a length; the same three always give the same world. On the command line:
`python -m tests.truth list`, and `python -m tests.truth write NAME --seed 1 --seconds 3600 --reading 1 -o trace.jsonl
--truth truth.json`.
"""

from tests.truth.catalogue import BUILDERS, build
from tests.truth.causes import ALLOCATION, CAUSES, COMPUTE_TIME, MODEL_FLOPS, layer
from tests.truth.sampler import Options, trace_lines, write_trace
from tests.truth.training_library import random_training_job
from tests.truth.world import (
    Hang,
    World,
    doubts_between,
    hang_of,
    is_zombie,
    truth,
    truth_between,
    truth_windows,
)

__all__ = [
    "ALLOCATION",
    "BUILDERS",
    "CAUSES",
    "COMPUTE_TIME",
    "MODEL_FLOPS",
    "Hang",
    "Options",
    "World",
    "build",
    "doubts_between",
    "hang_of",
    "is_zombie",
    "layer",
    "random_training_job",
    "trace_lines",
    "truth",
    "truth_between",
    "truth_windows",
    "write_trace",
]
