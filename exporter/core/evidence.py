"""Turns one reading into `Evidence`: validated, clamped and split into integer pools of parts per million.

Stateless: uses one reading alone. Invalid values are dropped and listed in `rejected`, never replaced by a guess.
"""

from dataclasses import dataclass
from math import inf
from operator import attrgetter

from msgspec.structs import replace

from exporter.core.model import JOULE, MS, PPM, SECOND, Device, Reading
from exporter.core.policy import Policy

LARGEST_AMOUNT = 1e18
"""Above any plausible value of one GPU in watts, hertz, bytes or joules; sums of smaller values never overflow."""
RESULTS_BYTES_PER_SECOND = 1e9
"""E: a program that sends this much to the host delivers results, as of a video engine that no counter shows."""
_RESULTS = PPM // 10
"""E: a smaller share of that rate is logging and monitoring."""
_TEMPERATURE_NOISE = 3.0
"""E: a smaller temperature change does not show whether a board is idle."""
NO_SPIN, SPIN_IF_FLAT, SPIN, FUTILE = 0, 1, 2, 3
"""Whether the reading looks like a spinning kernel: no; only if the PCIe traffic is also flat; yes; or, of a job that
uses the tensor cores, like kernels one after another that compute nothing."""
_RATIOS = (
    "gr_engine_active",
    "sm_active",
    "tensor_active",
    "dram_active",
    "fp64_active",
    "fp32_active",
    "fp16_active",
    "int_active",
    "encoder_utilization",
    "decoder_utilization",
    "gpu_utilization",
)
_AMOUNTS = (
    "pcie_tx_bytes_per_second",
    "pcie_rx_bytes_per_second",
    "nvlink_tx_bytes_per_second",
    "nvlink_rx_bytes_per_second",
    "c2c_tx_bytes_per_second",
    "c2c_rx_bytes_per_second",
    "power_watts",
    "enforced_power_limit_watts",
    "energy_joules",
    "sm_clock_hz",
    "memory_used_bytes",
)
_ratios, _amounts = attrgetter(*_RATIOS), attrgetter(*_AMOUNTS)


@dataclass(slots=True, eq=False)
class Evidence:
    """The validated facts of one reading. Pools are parts per million of its time and add up to PPM."""

    reading: Reading
    """The reading without rejected fields."""
    device: Device
    distrust: str = ""
    """Why the reading is untrusted; if not empty, no other field may be used."""
    condition: str = ""
    """Why the GPU is unusable; empty when usable."""
    usable_by_holders: bool = False
    """In spite of `condition` the GPU works for those that hold it."""
    rejected: tuple[str, ...] = ()
    engine: float = 0.0
    kernel_runs: bool = False
    """A kernel runs: engine activity is above the noise threshold."""
    sm: float | None = None
    tensor: float | None = None
    dram: float | None = None
    clock: float = 1.0
    """SM clock over the reference clock while kernels run; above 1 on a board that boosts beyond its data sheet."""
    clock_known: bool = False
    """The clock was read while the GPU worked, so that it also holds for readings without such a clock."""
    utilization: float | None = None
    """The driver's utilization."""
    nvlink: float | None = None
    """The busier direction, bytes per second; 0 on a board without NVLink."""
    pcie_tx: float | None = None
    pcie_rx: float | None = None
    wait: int = PPM
    slack: int = 0
    clock_loss: int = 0
    ofu: int = 0
    """Tensor time at the reference clock: share of the dense peak delivered (OFU)."""
    unresolved: int = 0
    work: int = 0
    """Effective work, ppm: engine time with tensor, FP, integer or DRAM activity or the power of a kernel that
    computes; or the video engines' utilization, or the busiest link's, if that is more."""
    own_work: int = 0
    """What shows that its job works: kernels, video engines, or results sent to the host at a rate that counts in full;
    loading data to the GPU is no work yet, ppm."""
    video: int = 0
    """Part of `wait` in which NVENC or NVDEC worked, ppm: the job did not wait."""
    spin: int = NO_SPIN
    suspect_only: bool = False
    """A signal that could rule out a spin is missing: a hang may be suspected, never confirmed."""
    energy: int = 0
    """Millijoules of the whole reading; 0 without an energy counter or power reading."""
    flops: float = 0.0
    """Tensor FLOP/s, from activity and the board's peak."""
    bytes: float = 0.0
    """DRAM bytes per second, from activity and the board's peak."""


UTILIZATION_LAG = 2_000 * MS
"""The driver's utilization is a mean over up to a second, and read up to a second later."""


def evaluate(
    reading: Reading,
    device: Device,
    policy: Policy,
    *,
    power_smoothed: bool = False,
    held_clock: float | None = None,
    tensor_job: bool = False,
    driver_lags: bool = False,
    shared: bool = False,
) -> Evidence:
    """Validate one reading. Never raises on any float; `distrust` gives the reason a reading is unusable, as one word.

    `power_smoothed`: the board draws power while idle, so power draw is no evidence against a spin. `tensor_job`: the
    job is known to use the tensor cores, so that power without any tensor, DRAM, FP or integer activity is none either.
    `held_clock`: the last known clock over the reference clock, for a reading whose clock was read at rest.
    `driver_lags`: the GPU worked until a moment ago, so that the driver's utilization may still be of that time.
    `shared`: several jobs hold the GPU, of which one may use a video engine while a kernel of another spins.
    """
    ev = Evidence(reading, device, reading.distrust, device.condition)
    if ev.distrust:
        return ev
    valid = ev.reading = _without_invalid(reading, policy, ev)
    engine = valid.gr_engine_active
    # A board's utilization does not describe its unpartitioned remainder.
    ev.utilization = driver = None if device.unpartitioned else valid.gpu_utilization
    ev.engine = engine if engine is not None else (driver or 0.0)
    ev.kernel_runs = ev.engine >= policy.stalled_engine
    if engine is None and driver is None:
        ev.distrust = "no_engine_signal"
        return ev
    ev.sm, ev.tensor, ev.dram = valid.sm_active, valid.tensor_active, valid.dram_active
    ev.distrust = _check_order(ev, policy, driver_lags=driver_lags)
    if ev.distrust:
        return ev
    _links(ev, valid)
    _pools(ev, valid, policy, held_clock)
    _energy_and_rates(ev, valid)
    _work_or_spin(ev, policy, profiled=engine is not None, power_usable=not power_smoothed, tensor_job=tensor_job)
    # A job's kernel may wait for its own video engine. Of several jobs nobody knows whose engine works.
    if ev.spin != NO_SPIN and _video_utilization(valid) >= policy.stalled_engine:
        ev.spin, ev.suspect_only = ev.spin if shared else NO_SPIN, shared
    _work_beside_kernels(ev, valid)
    return ev


def _without_invalid(reading: Reading, policy: Policy, ev: Evidence) -> Reading:
    """Return the reading itself if all values are in range, else a copy with invalid values clamped or removed."""
    for value in _ratios(reading):
        if value is not None and not 0.0 <= value <= 1.0:
            return _repaired(reading, policy, ev)
    for value in _amounts(reading):
        if value is not None and not 0.0 <= value < LARGEST_AMOUNT:
            return _repaired(reading, policy, ev)
    return reading


def _repaired(reading: Reading, policy: Policy, ev: Evidence) -> Reading:
    repaired: dict[str, float | None] = {}
    for name, value in zip(_RATIOS, _ratios(reading), strict=True):
        if value is not None and not 0.0 <= value <= 1.0:
            repaired[name] = 1.0 if 1.0 < value <= 1.0 + policy.clamp_excess else None
            ev.rejected += (_rejection(value, policy),)
    for name, value in zip(_AMOUNTS, _amounts(reading), strict=True):
        if value is not None and not 0.0 <= value < LARGEST_AMOUNT:
            repaired[name] = None
            ev.rejected += ("too_large" if LARGEST_AMOUNT <= value < inf else _rejection(value, policy),)
    return replace(reading, **repaired)


def _rejection(value: float, policy: Policy) -> str:
    if value < 0:
        return "negative"
    if value <= 1.0 + policy.clamp_excess:
        return "clamped"
    return "above_one" if value < inf else "not_finite"


def _check_order(ev: Evidence, policy: Policy, *, driver_lags: bool) -> str:
    """Enforce tensor <= SM <= engine: clamp a small excess, drop a large one. Return why it is all unusable, or "".

    A profiler whose counters are all zero (after an Xid, or because another client took them) shows as an engine at
    exactly 0 although the driver reports utilization, or as pipes busier than the engine; without an engine counter, as
    an SM activity of exactly 0. Pipes of a MIG instance that are busier than its engine are no zeros: DCGM shows the
    engine of an A100's larger instances as a fraction (NVIDIA/DCGM#138, #248). Multiplexed counters (a second client
    watches another metric group of an older board) show as a busy engine counter without any active warp.
    """
    g, s, t = ev.engine, ev.sm, ev.tensor
    tolerance, engine_counter = policy.clamp_excess, ev.reading.gr_engine_active
    if s is not None and t is not None and s > g + tolerance and t > g + tolerance:
        return "mig_layout" if ev.device.parent else "zero_filled"
    first = s if engine_counter is None else engine_counter
    driver = 0.0 if driver_lags else ev.utilization or 0.0
    if first == 0.0 and not s and not t and driver >= policy.zero_fill_utilization:
        return "zero_filled"
    if s == 0.0 and not t and engine_counter is not None and engine_counter >= policy.multiplexed_engine:
        return "multiplexed"
    if s is not None and s > g:
        ev.sm = g if s <= g + tolerance else None
        ev.rejected += ("clamped" if s <= g + tolerance else "order",)
    ceiling = g if ev.sm is None else ev.sm
    if t is not None and t > ceiling:
        ev.tensor = ceiling if t <= ceiling + tolerance else None
        ev.rejected += ("clamped" if t <= ceiling + tolerance else "order",)
    return ""


def _links(ev: Evidence, valid: Reading) -> None:
    lacks = ev.device.lacks
    ev.nvlink = busier(valid.nvlink_tx_bytes_per_second, valid.nvlink_rx_bytes_per_second)
    if ev.nvlink is None and "nvlink_tx_bytes_per_second" in lacks:
        ev.nvlink = 0.0
    ev.pcie_tx, ev.pcie_rx = valid.pcie_tx_bytes_per_second, valid.pcie_rx_bytes_per_second
    if ev.dram is None and "dram_active" in lacks:
        ev.dram = 0.0


def busier(one: float | None, other: float | None) -> float | None:
    """The larger of two rates, or the known one if the other is None."""
    if one is None or other is None:
        return one if other is None else other
    return one if one >= other else other


def _pools(ev: Evidence, valid: Reading, policy: Policy, held_clock: float | None) -> None:
    """Split it into wait, slack, clock and tensor; without tensor activity or peak, into wait and unresolved.

    Above the reference clock the tensor cores deliver more than their time at the data sheet's peak: the excess is
    taken from slack, so that useful time is the share of the dense peak.
    """
    engine = round(ev.engine * PPM)
    ev.wait = PPM - engine
    spec = ev.device.spec
    if ev.tensor is None or spec is None or spec.peak_flops is None:
        ev.unresolved = engine
        return
    tensor = min(engine, round(ev.tensor * PPM))
    reference, actual = spec.tensor_reference_clock_hz, valid.sm_clock_hz
    if reference and actual is not None:
        ev.clock_known = not _at_rest(ev, valid, policy)
        ev.clock = actual / reference if ev.clock_known else held_clock or 1.0
    ev.ofu = min(engine, int(tensor * ev.clock))
    ev.clock_loss = max(0, tensor - ev.ofu)
    ev.slack = engine - max(tensor, ev.ofu)


def _at_rest(ev: Evidence, valid: Reading, policy: Policy) -> bool:
    """Whether the GPU rested when its clock was read, at the reading's end: an idle H100 reads 345 MHz."""
    spec, power = ev.device.spec, valid.power_watts
    used = ev.engine if ev.utilization is None else ev.utilization
    idle = spec.idle_context_watts if spec is not None else None
    draws_little = power is not None and idle is not None and power <= policy.resting_power_factor * idle
    return used < policy.resting_utilization or draws_little


def _work_beside_kernels(ev: Evidence, valid: Reading) -> None:
    """Add work that no kernel does: video engines, and copies over PCIe or NVLink."""
    video = round(_video_utilization(valid) * PPM)
    ev.video = max(0, video - (PPM - ev.wait))
    spec = ev.device.spec
    nvlink = _share(ev.nvlink, spec.nvlink_bytes_per_second if spec is not None else None)
    capacity = spec.pcie_bytes_per_second if spec is not None else None
    done = max(ev.work, video, nvlink)
    sent = _share(ev.pcie_tx, capacity)
    ev.work = max(done, sent, _share(ev.pcie_rx, capacity))
    results = _share(ev.pcie_tx, RESULTS_BYTES_PER_SECOND)
    ev.own_work = max(done, results if results >= _RESULTS else sent)


def _video_utilization(reading: Reading) -> float:
    return busier(reading.encoder_utilization, reading.decoder_utilization) or 0.0


def _share(rate: float | None, capacity: float | None) -> int:
    """Rate over capacity, ppm; 0 if either is unknown."""
    return round(min(1.0, rate / capacity) * PPM) if rate and capacity else 0


def _energy_and_rates(ev: Evidence, valid: Reading) -> None:
    """Set energy, from its counter or else from the power at the reading's end, and FLOPs and bytes from the peaks."""
    joules = valid.energy_joules
    if joules is None:
        joules = (valid.power_watts or 0.0) * (valid.end - valid.start) / SECOND * ev.device.weight / PPM
    ev.energy = round(joules * JOULE)
    spec = ev.device.spec
    if spec is not None:
        ev.flops = ev.ofu / PPM * (spec.peak_flops or 0.0)
        ev.bytes = (ev.dram or 0.0) * (spec.memory_bandwidth_bytes_per_second or 0.0)


def _work_or_spin(ev: Evidence, policy: Policy, *, profiled: bool, power_usable: bool, tensor_job: bool) -> None:
    """Set effective work, and whether the reading looks like a kernel that only polls (accounting, section 5)."""
    tensor, dram = ev.tensor, ev.dram
    power_usable = power_usable and not tensor_job
    if not profiled and tensor is dram is None:
        ev.work = PPM - ev.wait
        _suspect_spin(ev, policy, power_usable=power_usable)
        return
    if (tensor or 0.0) >= policy.working_tensor or (dram or 0.0) >= policy.working_dram or tensor is dram is None:
        ev.work = PPM - ev.wait
        return
    fp = _fp_activity(ev.reading)
    computes = (fp is not None and fp >= policy.working_fp) or (ev.reading.int_active or 0.0) >= policy.working_int
    # Integer work shows in no older counter but power, which is its value at the reading's end.
    draws = power_usable and ev.kernel_runs and _power_is_conclusive(ev) and not _power_near_idle(ev, fp, policy)
    if computes or draws:
        ev.work = PPM - ev.wait
    elif profiled and tensor is not None:
        if ev.engine >= policy.spin_engine:
            _check_spin(ev, fp, policy, power_usable=power_usable)
        elif tensor_job and ev.kernel_runs and fp is not None and dram is not None:
            _check_futility(ev, policy)


def _suspect_spin(ev: Evidence, policy: Policy, *, power_usable: bool) -> None:
    """Suspect a spin without profiling counters: high utilization, a process, and the power draw of an idle context.

    Power can rule out a spin but not prove one: an idle board was once seen at a utilization of 1.0 for a long time.
    """
    no_process = ev.reading.processes == ()
    if ev.engine < policy.spin_engine or no_process or not (power_usable and _power_is_conclusive(ev)):
        return
    if _power_near_idle(ev, None, policy):
        ev.spin = _pcie_spin(ev, busier(ev.pcie_tx, ev.pcie_rx), policy)
        ev.suspect_only = True


def _fp_activity(reading: Reading) -> float | None:
    return busier(busier(reading.fp64_active, reading.fp32_active), reading.fp16_active)


def _check_spin(ev: Evidence, fp: float | None, policy: Policy, *, power_usable: bool) -> None:
    if (ev.nvlink or 0.0) >= policy.spin_nvlink_bytes_per_second or (
        power_usable and not _power_near_idle(ev, fp, policy)
    ):
        return
    pcie = busier(ev.pcie_tx, ev.pcie_rx)
    ev.spin = _pcie_spin(ev, pcie, policy)
    ev.suspect_only = (
        ev.dram is None
        or ev.nvlink is None
        or pcie is None
        or not (fp is not None or (power_usable and _power_is_conclusive(ev)))
    )


def _check_futility(ev: Evidence, policy: Policy) -> None:
    """Kernels of a job that uses the tensor cores, one after another, that compute nothing and move no data."""
    pcie = busier(ev.pcie_tx, ev.pcie_rx)
    moves = (ev.nvlink or 0.0) >= policy.spin_nvlink_bytes_per_second or (
        (pcie or 0.0) >= policy.futile_pcie_bytes_per_second
    )
    if ev.engine >= policy.futile_engine and ev.nvlink is not None and not moves:
        ev.spin, ev.suspect_only = FUTILE, pcie is None


HANG_SIGNS = (
    "engine_busy", "tensor_rest", "dram_rest", "fp_rest", "nvlink_rest", "pcie_rest", "power_flat",
    "temperature_falling",
)  # fmt: skip
"""Indicators of a hang, one per counter."""


def hang_signs(ev: Evidence, policy: Policy, *, celsius: float | None) -> tuple[tuple[str, bool], ...]:
    """Each available indicator and whether it points to a hang; `celsius`: the temperature when the spin began."""
    pcie = busier(ev.pcie_tx, ev.pcie_rx)
    indicated = (
        ev.engine >= policy.spin_engine,
        _below(ev.tensor, policy.working_tensor),
        _below(ev.dram, policy.working_dram),
        _below(_fp_activity(ev.reading), policy.working_fp),
        _below(ev.nvlink, policy.spin_nvlink_bytes_per_second),
        None if pcie is None else _pcie_spin(ev, pcie, policy) != NO_SPIN,
        _power_near_idle(ev, _fp_activity(ev.reading), policy) if _power_is_conclusive(ev) else None,
        _temperature_falling(ev.reading.temperature_celsius, celsius),
    )
    return tuple((name, sign) for name, sign in zip(HANG_SIGNS, indicated, strict=True) if sign is not None)


def _below(value: float | None, threshold: float) -> bool | None:
    return None if value is None else value < threshold


def _temperature_falling(now: float | None, before: float | None) -> bool | None:
    """Whether the temperature fell (True) or rose (False) by more than sensor noise; None if unchanged or unknown."""
    if now is None or before is None or abs(now - before) < _TEMPERATURE_NOISE:
        return None
    return now < before


def activity_over_limits(ev: Evidence, policy: Policy) -> int:
    """Activity of the busiest signal, in multiples of the threshold below which it looks like a spin."""
    shares = (
        (ev.tensor or 0.0) / policy.working_tensor,
        (ev.dram or 0.0) / policy.working_dram,
        (_fp_activity(ev.reading) or 0.0) / policy.working_fp,
        (ev.reading.int_active or 0.0) / policy.working_int,
        (ev.nvlink or 0.0) / policy.spin_nvlink_bytes_per_second,
    )
    return int(max(shares))


def _power_near_idle(ev: Evidence, fp: float | None, policy: Policy) -> bool:
    """Whether power is near that of an idle context, which a spin kernel barely exceeds; True if it is unknown."""
    spec, limit, power = ev.device.spec, _power_limit(ev), ev.reading.power_watts
    if spec is None or spec.idle_context_watts is None or not limit or power is None:
        return True
    share = policy.spin_power_share if fp is None else policy.spin_power_share_with_fp
    return power <= spec.idle_context_watts + share * limit


def _power_is_conclusive(ev: Evidence) -> bool:
    """Whether the power reading would reveal register-bound work."""
    spec = ev.device.spec
    powered = ev.reading.power_watts is not None and _power_limit(ev) is not None
    return powered and spec is not None and spec.idle_context_watts is not None


def _power_limit(ev: Evidence) -> float | None:
    """The enforced limit in watts, else the data sheet's."""
    enforced, spec = ev.reading.enforced_power_limit_watts, ev.device.spec
    return enforced if enforced is not None or spec is None else spec.power_limit_watts


def _pcie_spin(ev: Evidence, pcie: float | None, policy: Policy) -> int:
    if pcie is None or pcie < policy.spin_pcie_bytes_per_second:
        return SPIN
    spec = ev.device.spec
    capacity = spec.pcie_bytes_per_second if spec is not None else None
    return SPIN_IF_FLAT if capacity and pcie < policy.spin_pcie_flat_share * capacity else NO_SPIN
