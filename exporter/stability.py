"""Declares which parts of the public surface are experimental; every other one is stable.

A stable part changes its meaning or goes only in a major version (docs/releasing.md). An experimental one may in any,
named in CHANGELOG.md. What is stable is recorded in `tests/compat/stable.txt`.
"""

EXPERIMENTAL_METRICS = (
    "gpu_efficiency_job_collective", "gpu_efficiency_job_communication_ratio", "gpu_efficiency_job_slowest_rank",
    "gpu_efficiency_job_hang_culprit", "gpu_efficiency_job_advice_seconds_total", "gpu_efficiency_rdma_",
    "gpu_efficiency_cluster_interrupt", "gpu_efficiency_cluster_preempt",
)  # fmt: skip
"""Beginnings of names. NCCL and the fabric: few versions of NCCL were seen; advice and interruptions: new."""
EXPERIMENTAL_SECTIONS = ("nccl", "hangs")
"""Sections of the configuration."""
EXPERIMENTAL_COMMANDS = ("advise", "nccl", "preview")
"""Commands, with all their flags."""


def experimental(metric: str) -> bool:
    """Whether that metric is experimental."""
    return metric.startswith(EXPERIMENTAL_METRICS)
