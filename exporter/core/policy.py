"""Defines every threshold of the accounting in one table, each with the reason for its value.

Values marked E are engineering estimates. All can be overridden under `[policy]` in the configuration; msgspec checks
types and bounds.
"""

from typing import Annotated

from msgspec import Meta, Struct

Ratio = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of evidence, states and leaks. Ratios 0-1, seconds, bytes per second, watts per watt."""

    clamp_excess: Annotated[
        Ratio,
        Meta(description="E: rounding and skew between counters; more than this and the field is not believed"),
    ] = 0.05
    stalled_engine: Annotated[Ratio, Meta(description="below this no kernel runs: DCGM's own noise floor (E)")] = 0.01
    zero_fill_utilization: Annotated[
        Ratio,
        Meta(
            description="E: engine exactly 0 while the driver says this busy: the profiler's counters were zero-filled"
        ),
    ] = 0.5

    multiplexed_engine: Annotated[
        Ratio,
        Meta(description="E: an engine this busy has warps on some SM: an SM activity of exactly 0 was not measured"),
    ] = 0.1

    working_tensor: Annotated[
        Ratio, Meta(description="E: less tensor activity than this is a polling kernel's noise")
    ] = 0.002
    working_dram: Annotated[Ratio, Meta(description="E: less DRAM activity than this moves no data")] = 0.01
    working_fp: Annotated[Ratio, Meta(description="E: less FP64/32/16 pipe activity than this computes nothing")] = 0.01

    spin_engine: Annotated[Ratio, Meta(description="a spin kernel never yields the engine")] = 0.98
    spin_nvlink_bytes_per_second: Annotated[Rate, Meta(description="E: a stuck collective moves nothing")] = 1e8
    spin_pcie_bytes_per_second: Annotated[Rate, Meta(description="E: driver heartbeat traffic stays below")] = 1e7
    spin_pcie_flat_share: Annotated[
        Ratio,
        Meta(description="E: a collective waiting on a NIC polls host memory: flat and below this share of the link"),
    ] = 0.05
    spin_power_share: Annotated[
        Ratio,
        Meta(description="E: of the enforced limit above idle-with-context; acquits register-bound work"),
    ] = 0.08
    spin_power_share_with_fp: Annotated[
        Ratio,
        Meta(description="E: wider where the FP pipes are seen to be at rest, for power says less then"),
    ] = 0.15
    hang_suspect_seconds: Annotated[Seconds, Meta(description="longer than any collective of a healthy job (E)")] = (
        120.0
    )
    hang_seconds: Annotated[
        Seconds, Meta(description="half of NCCL's default watchdog of 10 min: page before it kills")
    ] = 300.0
    hang_stray_share: Annotated[
        Share, Meta(description="one stray reading must not restart a hang: 95 % of the time is enough")
    ] = 0.05
    wake_seconds: Annotated[Seconds, Meta(description="this much work ends a hang or a zombie")] = 10.0
    wake_window_seconds: Annotated[Seconds, Meta(description="... within this window, for a zombie")] = 60.0

    zombie_duty: Annotated[Share, Meta(description="E: a keeper computing 1 s in every 29 min is still a zombie")] = (
        0.01
    )
    zombie_batch_seconds: Annotated[Seconds, Meta(description="E: batch work has no reason to rest half an hour")] = (
        1800.0
    )
    zombie_interactive_seconds: Annotated[Seconds, Meta(description="E: a long lunch with the notebook open")] = 7200.0
    zombie_serving_seconds: Annotated[
        Seconds, Meta(description="E: real serving pods are silent for hours and work again later")
    ] = 18000.0
    fatal_xids: Annotated[
        tuple[int, ...],
        Meta(
            description="E, after NVIDIA's Xid catalogue: nothing runs before a reset or reboot (stopped engine, off "
            "the bus, halted microcontroller, uncontained ECC, GSP timeouts); a kernel seen later disproves it"
        ),
    ] = (46, 62, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 158)
    unowned_seconds: Annotated[Seconds, Meta(description="epilogs take up to a minute to kill what a job leaves")] = (
        60.0
    )
    allocation_stale_seconds: Annotated[
        Seconds,
        Meta(description="three refreshes of a scheduler asked every 30 s; older ownership is unknown"),
    ] = 90.0

    checkpoint_pcie_bytes_per_second: Annotated[
        Rate,
        Meta(description="E: device-to-host at this rate with an idle engine is state being saved"),
    ] = 2e9
    checkpoint_engine: Annotated[
        Ratio, Meta(description="E: engine activity below which the GPU waits for the copy")
    ] = 0.3
    bimodal_spread: Annotated[
        Ratio,
        Meta(description="E: standard deviation of 1-s engine activity: the GPU works or waits, nothing between"),
    ] = 0.3
    input_burst_bytes_per_second: Annotated[
        Rate, Meta(description="E: a batch arriving from the host; token batches are far smaller")
    ] = 1e8
    flat_spread: Annotated[Ratio, Meta(description="E: engine activity this even over a minute is per-kernel gaps")] = (
        0.15
    )
    host_bound_engine_low: Annotated[Ratio, Meta(description="E: less is waiting for something else")] = 0.3
    host_bound_engine_high: Annotated[Ratio, Meta(description="E: more leaves no gaps to explain")] = 0.99
    small_kernel_share: Annotated[Ratio, Meta(description="E: sm_active / engine below this: kernels too small")] = 0.5

    link_busy: Annotated[
        Ratio, Meta(description="E: link rate / capacity, per engine activity, of a communication second")
    ] = 0.1
    link_tensor: Annotated[Ratio, Meta(description="E: tensor per engine activity below which nothing is computed")] = (
        0.1
    )
    link_dram: Annotated[Ratio, Meta(description="E: DRAM activity beyond the link's own traffic, likewise")] = 0.35
    link_achieved: Annotated[Share, Meta(description="E: a collective reaches this share of the link's capacity")] = (
        0.75
    )
    collective_idle_sms: Annotated[Share, Meta(description="E: a collective leaves this share of the SMs idle")] = 0.8

    no_process_seconds: Annotated[
        Seconds,
        Meta(description="E: pulling an image or weights holds a GPU without a process for up to half an hour"),
    ] = 2700.0
    unowned_alert_seconds: Annotated[
        Seconds, Meta(description="E: an epilog or a kubelet that retries has killed what was left by then")
    ] = 600.0
    straggler_wait_share: Annotated[
        Share,
        Meta(description="E: the other ranks wait this much more of the time than one: that one is waited for"),
    ] = 0.2
    throttled_share: Annotated[
        Share, Meta(description="E: of a GPU's time lost to clocks; power capping alone costs healthy boards less")
    ] = 0.1
    oversized_share: Annotated[Share, Meta(description="E: a slice up to half the GPU is worth moving a job for")] = 0.5
    size_batch_seconds: Annotated[
        Seconds, Meta(description="E: a job's need is known after this long, start-up and first evaluation included")
    ] = 3600.0
    size_serving_seconds: Annotated[
        Seconds, Meta(description="E: servers and notebooks: after a whole day with its rush hour")
    ] = 86400.0
    slice_memory_share: Annotated[
        Share, Meta(description="E: of a MIG slice's memory a job can have; the driver and contexts keep the rest")
    ] = 0.95
    regressed_share: Annotated[
        Share, Meta(description="E: below this share of its own median a layer has regressed; days differ by less")
    ] = 0.7
    flops_excess: Annotated[
        Annotated[float, Meta(ge=1, le=100)],
        Meta(description="E: reported MFU above this multiple of what the tensor pipes did is counted wrongly"),
    ] = 1.25
    blind_coverage_share: Annotated[
        Share, Meta(description="E: with more of the paid time unseen than the rest the ratios speak of the wrong part")
    ] = 0.9
    clock_skew_seconds: Annotated[
        Seconds, Meta(description="E: more than a scrape interval apart, times of two nodes cannot be compared")
    ] = 30.0
    selective_recompute_share: Annotated[
        Ratio,
        Meta(description="E: selective recomputation repeats the cheap part of attention (Korthikanti et al. 2022)"),
    ] = 0.04
    phase_patience_seconds: Annotated[
        Seconds, Meta(description="E: no checkpoint or restore takes longer; a program that says nothing more has died")
    ] = 1800.0
    kv_full_share: Annotated[
        Share, Meta(description="E: with less of the KV cache free than the rest no request of usual length fits")
    ] = 0.95
    draft_gain_share: Annotated[
        Ratio, Meta(description="E: of decoding's waits for memory what good drafts halve; advice, never booked")
    ] = 0.5
    loss_spike_deviations: Annotated[
        Annotated[float, Meta(ge=1, le=100)],
        Meta(description="E: a loss this many standard deviations above its running mean is a spike"),
    ] = 6.0
    most_reported_share: Annotated[
        Annotated[float, Meta(ge=1, le=100)],
        Meta(
            description="E: FLOPs beyond this multiple of the peak are refused; a wrong dtype alone reads two or four"
        ),
    ] = 8.0
    max_runs: Annotated[int, Meta(description="training runs whose highest step a node remembers", ge=1)] = 256
    job_linger_seconds: Annotated[
        Seconds,
        Meta(description="series of an ended job stay this long, so that the last scrape sees the total"),
    ] = 600.0
    max_accounts: Annotated[
        int,
        Meta(description="accounts (team, account, namespace) of one node with series; the rest are one: other", ge=1),
    ] = 32
    max_jobs: Annotated[
        int, Meta(description="job series of one node at most; beyond it the oldest ended go first", ge=1)
    ] = 256


EXPORTED_THRESHOLDS = (
    "allocation_stale_seconds", "blind_coverage_share", "clock_skew_seconds", "flops_excess", "hang_seconds",
    "hang_suspect_seconds", "no_process_seconds", "oversized_share", "regressed_share", "straggler_wait_share",
    "throttled_share", "unowned_alert_seconds", "unowned_seconds", "zombie_batch_seconds",
    "zombie_interactive_seconds", "zombie_serving_seconds",
)  # fmt: skip
"""Thresholds exported as series, for alert rules to compare with, so that no rule needs a template."""


def threshold_reasons() -> dict[str, str]:
    """Map each threshold's name to the reason for its value."""
    return {name: _reason(hint) for name, hint in Policy.__annotations__.items()}


def _reason(hint: object) -> str:
    return next(str(m.description) for m in reversed(hint.__metadata__) if m.description)  # type: ignore[attr-defined]
