"""Defines every threshold of the accounting in one table, each with the reason for its value.

Values marked E are engineering estimates. All can be overridden under `[policy]` in the configuration; msgspec checks
types and bounds.
"""

from typing import Annotated

from msgspec import Meta, Struct

Ratio = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Divisor = Annotated[float, Meta(ge=1e-6, le=1)]
"""A share by which something is divided: the reciprocal of 0 does not exist, and that of less is beyond integers."""
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]
Factor = Annotated[float, Meta(ge=1, le=100)]
Count = Annotated[int, Meta(ge=1)]


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of evidence, states and leaks. Ratios 0-1, seconds, bytes per second, watts per watt."""

    clamp_excess: Ratio = 0.05
    """E: a ratio above 1 by up to this is rounding or skew and is set to 1; beyond it the field is rejected"""
    stalled_engine: Divisor = 0.01
    """below this no kernel runs: DCGM's own noise floor (E)"""
    zero_fill_utilization: Ratio = 0.5
    """E: engine activity is exactly 0 while the driver reports at least this utilization: the profiling counters were
    zero-filled"""

    multiplexed_engine: Ratio = 0.1
    """E: an engine this busy has warps on some SM: an SM activity of exactly 0 was not measured"""

    working_tensor: Divisor = 0.002
    """E: less tensor activity than this is a polling kernel's noise"""
    working_dram: Divisor = 0.01
    """E: less DRAM activity than this moves no data"""
    working_fp: Divisor = 0.01
    """E: less FP64/32/16 pipe activity than this computes nothing"""
    working_int: Divisor = 0.05
    """E: a polling kernel computes addresses; more integer work than this is its purpose"""
    resting_utilization: Ratio = 0.2
    """E: a clock read while the GPU is used less than this is the clock of a GPU at rest"""
    resting_power_factor: Factor = 1.25
    """E: likewise while it draws no more than this multiple of an idle context's power"""

    spin_engine: Ratio = 0.98
    """a spin kernel never yields the engine"""
    spin_nvlink_bytes_per_second: Annotated[float, Meta(ge=1, le=1e15)] = 1e8
    """E: a stuck collective moves nothing"""
    spin_pcie_bytes_per_second: Rate = 1e7
    """E: driver heartbeat traffic stays below"""
    spin_pcie_flat_share: Ratio = 0.05
    """E: a collective waiting on a NIC polls host memory: flat and below this share of the link"""
    spin_power_share: Ratio = 0.08
    """E: a GPU that draws more than its idle context and this share of its power limit does not spin: it may compute in
    registers"""
    spin_power_share_with_fp: Ratio = 0.15
    """E: the same if FP activity is measured: higher, because power then adds less evidence"""
    futile_engine: Ratio = 0.1
    """E: a program that tries, fails and tries again keeps the engine this busy; a desktop or a notebook does not"""
    futile_pcie_bytes_per_second: Rate = 1e8
    """E: launching kernels that compute nothing takes tens of MB/s; more is data that somebody wants"""
    hang_suspect_seconds: Seconds = 120.0
    """longer than any collective of a healthy job (E)"""
    hang_seconds: Seconds = 600.0
    """E: a job hangs once all its GPUs on the node have spun this long; waits for a joining node are shorter"""
    hang_peer_seconds: Seconds = 1800.0
    """E: the same if one of its GPUs runs no kernel, or before its first work: one rank may evaluate, save or build an
    index on the CPU for that long; twice this if one of its GPUs works"""
    hang_earlier_factor: Factor = 1.2
    """E: a job that spun before and then worked has to spin this much longer than then to count as hung"""
    hang_earlier_peer_factor: Factor = 2.0
    """E: the same while one of its GPUs rests: evaluations and saves differ more in length"""
    hang_page_gpus: Count = 8
    """E: the hang of a job with fewer GPUs than this (8: a common node) is a ticket and does not page"""
    hang_stray_share: Divisor = 0.05
    """one stray reading must not restart a hang: 95 % of the time is enough"""
    crash_loop_restarts: Count = 5
    """E: a job that worked and then restarts so often without getting to work, for as long as a hang takes, is hung"""
    wake_seconds: Seconds = 10.0
    """this much work ends a hang or a zombie"""

    zombie_duty: Divisor = 0.005
    """E: a keeper computing 1 s in every 29 min is still a zombie; 0.8 s of inference in every 2 min is not"""
    minute_engine: Ratio = 0.001
    """E: engine activity of a minute in which the GPU was used; jobs that use it in every second minute are no
    zombies, however little they compute"""
    zombie_worked_seconds: Seconds = 60.0
    """E: a batch job that has worked this long has proven its purpose ..."""
    zombie_worked_factor: Factor = 2.0
    """E: ... and may wait this many times longer, as for the stage before it; so may one that was seen to start, holds
    memory and has run no kernel yet, as while its first stage runs on the CPU"""
    loaded_memory_share: Share = 0.02
    """E: of a GPU's memory; a context alone needs less"""
    working_cpu_cores: Rate = 2.0
    """E: a job that keeps this many CPU cores busy works on the CPU; a program that polls needs one"""
    zombie_batch_seconds: Seconds = 1800.0
    """E: batch work has no reason to rest half an hour"""
    zombie_interactive_seconds: Seconds = 7200.0
    """E: a long lunch with the notebook open"""
    zombie_serving_seconds: Seconds = 18000.0
    """E: real serving pods are silent for hours and work again later"""
    fatal_xids: tuple[int, ...] = (46, 62, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 158)
    """E, after NVIDIA's Xid catalogue: nothing runs before a reset or reboot (stopped engine, off the bus, halted
    microcontroller, uncontained ECC, GSP timeouts); a kernel seen later disproves it"""
    unowned_seconds: Seconds = 60.0
    """epilogs take up to a minute to kill what a job leaves"""
    allocation_stale_seconds: Seconds = 90.0
    """if the scheduler has not confirmed allocations for this long, the owner of an idle GPU is unknown"""

    startup_work_seconds: Seconds = 10.0
    """E: warm-up and tuning run kernels for less than this before the work begins"""
    checkpoint_pcie_bytes_per_second: Rate = 1e9
    """E: device-to-host beyond host-to-device at this rate with an idle engine is state being saved; GPUDirect traffic
    goes both ways"""
    checkpoint_engine: Ratio = 0.3
    """E: engine activity below which the GPU waits for the copy"""
    input_bytes_per_second: Rate = 2e7
    """E: host-to-device beyond device-to-host, mean of a minute: batches of images arrive; token batches are smaller"""
    input_engine: Ratio = 0.03
    """E: a job that works less than this of a minute does not wait for batches"""
    flat_spread: Ratio = 0.15
    """E: standard deviation of a minute's engine activity up to which it counts as even: the gaps lie between
    kernels"""
    host_bound_engine_low: Ratio = 0.3
    """E: below this engine activity the GPU waits for something other than kernel launches"""
    host_bound_engine_high: Ratio = 0.99
    """E: above this engine activity there are no gaps to explain"""
    host_gap_engine: Ratio = 0.9
    """E: from this engine activity on, if it is even, the remaining gaps are waits for kernel launches"""
    small_kernel_share: Ratio = 0.5
    """E: sm_active / engine below this: kernels too small"""
    launch_bound_sm: Ratio = 0.65
    """E: likewise of a reading with even gaps between kernels, of which some are large, as the optimiser's"""

    link_busy: Ratio = 0.1
    """E: link rate / capacity, per engine activity, of a communication second"""
    link_tensor: Ratio = 0.1
    """E: tensor per engine activity below which nothing is computed"""
    link_dram: Ratio = 0.35
    """E: DRAM activity beyond the link's own traffic, likewise"""
    link_achieved: Share = 0.75
    """E: a collective reaches this share of the link's capacity"""
    computing_sm: Share = 0.955
    """E: SM activity per engine activity of kernels that compute, until it was measured for the job"""
    collective_sm: Share = 0.14
    """E: the same of kernels that communicate or wait for a peer"""
    tensor_of_kernel: Share = 0.88
    """E: tensor activity of the densest kernels: tensor work lasts at least as long as it needs at that rate"""
    dense_kernel_sm: Ratio = 0.35
    """E: a job whose kernels fill this share of the SMs most of the time loses idle SMs to communication, not to
    small kernels"""
    exposed_share_dense: Ratio = 0.85
    """E: of the range between the bounds of exposed communication, for such a job"""
    exposed_share_sparse: Ratio = 0.1
    """E: the same for a job with small kernels"""
    tensor_dram: Ratio = 0.35
    """E: DRAM activity per tensor activity that feeds the tensor cores and limits nothing"""
    simd_dram: Ratio = 0.6
    """E: the same per FP64 or FP32 activity of a job that computes with that pipe"""
    dram_reached: Divisor = 0.96
    """E: of the DRAM ceiling, by a kernel that is limited by it"""

    stall_io_share: Share = 0.1
    """E: pressure counts any of dozens of data workers: less waiting for storage than this is hidden by the others"""
    stall_throttled_share: Share = 0.05
    """E: a quota stops all threads at once: less of the time than this costs no step"""
    stall_memory_share: Share = 0.05
    """E: a job that waits for memory at all is near its limit; less is the reclaiming of page cache"""
    stall_cpu_share: Share = 0.3
    """E: with as many data workers as cores some worker often waits, without loss"""
    stall_network_share: Share = 0.5
    """E: while a link is below half its rate, and data waits for it less than half of the time, the network has
    capacity left"""

    no_process_seconds: Seconds = 2700.0
    """E: pulling an image or weights holds a GPU without a process for up to half an hour"""
    unowned_alert_seconds: Seconds = 600.0
    """E: an epilog or a kubelet that retries has killed what was left by then"""
    straggler_wait_share: Share = 0.2
    """E: the other ranks wait this much more of the time than one: that one is waited for"""
    throttled_share: Share = 0.1
    """E: of a GPU's time lost to clocks; power capping alone costs healthy boards less"""
    oversized_share: Share = 0.5
    """E: a slice up to half the GPU is worth moving a job for"""
    size_batch_seconds: Seconds = 3600.0
    """E: a job's need is known after this long, start-up and first evaluation included"""
    size_serving_seconds: Seconds = 86400.0
    """E: servers and notebooks: after a whole day with its rush hour"""
    slice_memory_share: Share = 0.95
    """E: of a MIG slice's memory a job can have; the driver and contexts keep the rest"""
    regressed_share: Share = 0.7
    """E: GAU, ECTR or eMFU below this share of its own median has regressed; normal variation is smaller"""
    flops_excess: Factor = 1.25
    """E: reported MFU above this multiple of what the tensor pipes did is counted wrongly"""
    blind_coverage_share: Share = 0.9
    """E: if a smaller share of the paid time than this is observed, the ratios are not representative"""
    blind_page_gpus: Count = 64
    """E: this many GPUs on unobserved nodes (64: a rack) page, however large the cluster is"""
    clock_skew_seconds: Seconds = 30.0
    """E: more than a scrape interval apart, times of two nodes cannot be compared"""
    selective_recompute_share: Ratio = 0.04
    """E: selective recomputation repeats the cheap part of attention (Korthikanti et al. 2022)"""
    phase_patience_seconds: Seconds = 1800.0
    """E: no checkpoint or restore takes longer; a program that sends nothing for longer has died"""
    kv_full_share: Share = 0.95
    """E: above this KV-cache usage no request of usual length fits"""
    draft_gain_share: Ratio = 0.5
    """E: share of memory-bound decode time that a good draft model could save; exported as advice, never booked as a
    leak"""
    loss_spike_deviations: Factor = 6.0
    """E: a loss this many standard deviations above its running mean is a spike"""
    most_reported_share: Factor = 8.0
    """E: FLOPs beyond this multiple of the peak are refused; a wrong dtype alone gives a factor of two or four"""
    max_runs: Count = 256
    """training runs whose highest step a node remembers"""
    job_linger_seconds: Seconds = 600.0
    """series of an ended job stay this long, so that the last scrape sees the total"""
    max_accounts: Count = 32
    """accounts (team, account, namespace) of one node with series; the one without a job for longest makes room"""
    max_jobs: Count = 256
    """job series of one node at most; beyond it the oldest ended go first"""

    def __post_init__(self) -> None:
        """Raise ValueError for two levels that cannot be told apart: idle SMs are divided by their difference."""
        if self.collective_sm >= self.computing_sm:
            raise ValueError(f"collective_sm, {self.collective_sm:g}, is not below computing_sm, {self.computing_sm:g}")


EXPORTED_THRESHOLDS = (
    "allocation_stale_seconds", "blind_coverage_share", "blind_page_gpus", "clock_skew_seconds", "flops_excess",
    "hang_page_gpus", "hang_seconds", "hang_suspect_seconds", "no_process_seconds", "oversized_share",
    "regressed_share", "straggler_wait_share", "throttled_share", "unowned_alert_seconds", "unowned_seconds",
    "zombie_batch_seconds", "zombie_interactive_seconds", "zombie_serving_seconds",
)  # fmt: skip
"""Thresholds exported as series, for alert rules to compare with, so that no rule needs a template."""
