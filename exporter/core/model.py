"""Defines the input values of the exporter, as sources, schedulers, workloads and traces provide them.

`Observation` holds all of them; a trace is a list of observations. Contains no accounting logic.
Times are integer nanoseconds of the host's monotonic clock, on whole milliseconds; ratios run from 0 to 1, everything
else is in base units, and signals keep NVIDIA's names in lower case. `None` means *not measured*, never zero.
"""

import re
from enum import StrEnum

from msgspec import Struct

MS = 1_000_000
"""One millisecond in nanoseconds; every interval boundary in a ledger is a multiple of it."""
SECOND = 1_000 * MS
NEVER = -(1 << 60)
"""A time before any other, for events that have not happened."""
PPM = 1_000_000
"""One whole, in parts per million."""
JOULE = 1_000
"""One joule in millijoules, the unit of NVML's energy counter, in which energy is booked."""


DTYPES = ("bf16", "fp16", "tf32", "fp8", "fp4")
"""Number formats of tensor work; the peak FLOP/s depends on the format, 16-bit being the reference."""
NARROW_DTYPES = ("fp8", "fp4")
"""Formats that training uses for the products with weights only; attention and other products stay in 16 bits."""
PHASES = (
    "startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle",
)  # fmt: skip
"""Phases a training process can report. compute: forward, backward and the optimiser; bubble: waiting for the
neighbour stage of a pipeline; idle: waiting by design, for another program or for people."""


class Spec(Struct, frozen=True, omit_defaults=True):
    """Peak capabilities of a GPU board; dense figures, never sparse ones.

    Source: NVIDIA datasheets as collected in `exporter/data/gpu_specs.csv`, one row per board with its confidence.
    """

    name: str
    peak_flops: float | None = None
    """Dense 16-bit tensor FLOP/s."""
    peak_flops_tf32: float | None = None
    peak_flops_fp8: float | None = None
    peak_flops_fp4: float | None = None
    tensor_reference_clock_hz: float | None = None
    """SM clock at which `peak_flops` holds."""
    memory_bandwidth_bytes_per_second: float | None = None
    nvlink_bytes_per_second: float | None = None
    """One direction, all links."""
    nvlink_domain: int = 0
    """Number of GPUs in an NVLink domain that spans nodes (72 for a GB200 NVL72); 0: the domain is the node."""
    pcie_bytes_per_second: float | None = None
    """One direction."""
    idle_context_watts: float | None = None
    """Board power with a CUDA context and no kernel."""
    power_limit_watts: float | None = None
    """Board power limit by the data sheet (TDP), where the driver reports no enforced limit."""
    dram_ceiling: float = 0.9
    """Highest `dram_active` that copy kernels reach in practice."""
    slices: int = 0
    """MIG compute slices of a whole board: 7, or 4 for an A30; 0: no MIG support."""
    memory_gb: float | None = None
    """Nominal capacity, from which MIG profile names are derived."""

    def peak(self, dtype: str) -> float | None:
        """Dense tensor FLOP/s in one of DTYPES; None if the board does not support it or it is unknown."""
        return {"tf32": self.peak_flops_tf32, "fp8": self.peak_flops_fp8, "fp4": self.peak_flops_fp4}.get(
            dtype, self.peak_flops
        )


class Device(Struct, frozen=True, omit_defaults=True):
    """One GPU or MIG instance of the node's inventory; it counts as paid even when it does not respond."""

    uuid: str
    index: str = ""
    """The driver's device index ("0")."""
    model: str = ""
    spec: Spec | None = None
    lacks: tuple[str, ...] = ()
    """Signals this hardware does not support (no NVLink on a PCIe board): they count as zero, not as missing."""
    condition: str = ""
    """Reason the GPU is unusable, as one word ("lost", "missing", "drained"); empty when usable."""
    weight: int = PPM
    """Parts per million of one paid GPU. A MIG instance has its share of the compute slices, its parent board the
    unpartitioned remainder (possibly 0). Together they are exactly one GPU."""
    parent: str = ""
    """UUID of the parent board, for a MIG instance."""
    profile: str = ""
    """MIG profile name ("1g.10gb"); empty for a whole board."""
    stranded: bool = False
    """The remainder of a board in MIG mode that no profile can use."""

    @property
    def unpartitioned(self) -> bool:
        """Whether this is the part of a board in MIG mode that no instance has: it can never be allocated or busy."""
        return self.weight != PPM and not self.parent


class Process(Struct, frozen=True, omit_defaults=True):
    """A process with a context on the GPU, from the driver's process list."""

    pid: int
    memory_bytes: int | None = None
    name: str = ""
    sm_active: float | None = None
    """Share of SM time the process used, 0-1: the driver's mean since the last reading."""
    job_id: str = ""
    """The job it belongs to, from its cgroup or environment; empty: unknown."""


class Reading(Struct, frozen=True, omit_defaults=True):
    """One GPU's telemetry over the interval [start, end) that its counters cover.

    Ratios and rates are means over the interval; power, temperature, clocks and memory are the latest value
    unless the source averages them. Rates are bytes per second from the GPU's point of view: `tx` leaves the GPU
    (device to host, or to a peer), `rx` enters it (DCGM fields 1009-1012).
    """

    uuid: str
    start: int
    end: int
    gr_engine_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    fp64_active: float | None = None
    fp32_active: float | None = None
    fp16_active: float | None = None
    int_active: float | None = None
    """Integer pipe (DCGM field 1016, GPM metric 4)."""
    pcie_tx_bytes_per_second: float | None = None
    pcie_rx_bytes_per_second: float | None = None
    nvlink_tx_bytes_per_second: float | None = None
    nvlink_rx_bytes_per_second: float | None = None
    c2c_tx_bytes_per_second: float | None = None
    c2c_rx_bytes_per_second: float | None = None
    """Of the chip-to-chip link to the CPU, on boards that have one."""
    encoder_utilization: float | None = None
    decoder_utilization: float | None = None
    """The driver's utilization of NVENC and NVDEC, which are no part of the graphics engine's activity."""
    gpu_utilization: float | None = None
    """The driver's utilization, as `nvidia-smi` shows it: the share of time with a kernel running."""
    power_watts: float | None = None
    """Of the whole board; never set for a MIG instance."""
    enforced_power_limit_watts: float | None = None
    energy_joules: float | None = None
    """Used during the interval."""
    temperature_celsius: float | None = None
    sm_clock_hz: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    clock_event_reasons: int | None = None
    """Bits of NVML's clock event reasons (`nvmlClocksEventReasons`)."""
    processes: tuple[Process, ...] | None = None
    distrust: str = ""
    """Reason the source marked these values as untrusted, as one word ("stale", "blank"); else empty."""


class Health(Struct, frozen=True, omit_defaults=True):
    """The latest health reading of a board. Counters start when the driver is loaded."""

    uuid: str
    xids: tuple[int, ...] = ()
    """Xid errors reported since the last Health, oldest first (NVIDIA's "Xid errors" document)."""
    recovery_action: int | None = None
    """nvmlDeviceGpuRecoveryAction_t: 0 none, 1 reset the GPU, 2 reboot, 3 drain peers, 4 drain and reset, ..."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    """A GPU reset is needed to activate a row remapping."""
    row_remap_failed: bool | None = None
    """No spare row was left; the board should be replaced."""
    nvlink_errors: int | None = None
    """Sum of CRC, replay and recovery errors of all links."""
    memory_temperature_celsius: float | None = None
    temperature_margin_celsius: float | None = None
    """Degrees left until thermal slowdown."""
    power_smoothing: bool | None = None
    """Power smoothing is enabled: power draw is no evidence of work."""


class Owner(Struct, frozen=True, omit_defaults=True):
    """The job that holds a GPU, with the attributes its scheduler reports."""

    job_id: str
    scheduler: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    namespace: str = ""
    pod: str = ""
    name: str = ""
    workload_class: str = "batch"
    """batch, interactive or serving; decides how long a GPU may idle before it is a zombie."""
    qos: str = ""
    team: str = ""
    """The team that is billed, by the operator's own rules."""
    kind: str = ""
    """Kind of job or controller, as one lower-case word: array, interactive, deployment, jobset, ..."""
    array_id: str = ""
    """ID of the job array or heterogeneous job that contains the job."""
    array_task_id: str = ""
    """Index of the job in its array; empty if it is in none, or unknown."""
    het_job_offset: str = ""
    """Offset of the job in its heterogeneous job; empty if it is in none, or unknown."""
    comment: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of its pod by key, as far as the operator exports them."""
    nodes: int = 0
    """Nodes of the whole job; 0: unknown."""
    time_limit_seconds: float | None = None
    zombie_seconds: float | None = None
    """Idle time after which the job is a zombie; None: the default of its workload class."""
    hang_seconds: float | None = None
    """Time of spinning without progress after which the job counts as hung; None: the policy's default."""
    useful_pipe: str = ""
    """The pipe whose activity is its useful work, by the operator's own rules, one of PIPES; empty: as seen."""
    exemption: str = ""
    """Name of the operator's exemption that covers the job."""
    exempt_until: float = 0.0
    """Expiry of the exemption, Unix seconds."""

    @property
    def display_id(self) -> str:
        """The id under which users know the job; see `display_job_id`."""
        return display_job_id(self.job_id, self.array_id, self.array_task_id, self.het_job_offset)


def display_job_id(job_id: str, array_id: str, array_task_id: str, het_job_offset: str) -> str:
    """Return a job's id as squeue and sacct show it: `6_1` in an array, `7+0` in a heterogeneous job, else `job_id`.

    That is sacct's JobID; `job_id` is its JobIDRaw (sacct(1)).
    """
    if not array_id or not (array_task_id or het_job_offset):
        return job_id
    return f"{array_id}_{array_task_id}" if array_task_id else f"{array_id}+{het_job_offset}"


_DISPLAY_ID = re.compile(r"(\d{1,10})([_+])(\d{1,10})")


def parse_display_id(text: str) -> tuple[str, str, str] | None:
    """Return array_id, array_task_id and het_job_offset of `6_1` and `7+0`; None if the text is neither."""
    match = _DISPLAY_ID.fullmatch(text)
    if match is None or not text.isascii():
        return None
    return (match[1], match[3], "") if match[2] == "_" else (match[1], "", match[3])


UNKNOWN_JOB = "unknown"
"""Job ID used when the owner cannot be determined: a GPU that works is attributed to it, an idle one may be free."""


class Allocation(Struct, frozen=True, omit_defaults=True):
    """One job's allocation of one GPU over [start, end); `end` is None while it lasts."""

    uuid: str
    owner: Owner
    start: int
    end: int | None = None
    gpus: int = 1
    """GPUs that work together: of the whole job on all its nodes, or of its `group`; one GPU alone has no peer."""
    restarts: int = 0
    """Number of times the scheduler has restarted the job."""
    ranks: str = ""
    """Ranks of the job whose processes run on the GPU ("0", "4,5"); empty: unknown."""
    group: str = ""
    """The replica of the job that has the GPU, where replicas work independently of each other; else empty."""


class Fault(Struct, frozen=True, omit_defaults=True):
    """A failed or implausible read; counted by `kind`, described by `message`."""

    kind: str
    message: str = ""
    uuid: str = ""


class Parallel(Struct, frozen=True, omit_defaults=True):
    """Parallelism degrees of a whole job."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1


class TrainingReport(Struct, frozen=True, omit_defaults=True):
    """A training process's report about [start, end); an empty interval only announces a new phase.

    FLOPs, tokens and samples are totals of `gpus` GPUs, on any node, and are divided equally among them.
    """

    job_id: str
    start: int
    end: int
    model_flops: float | None = None
    """FLOPs of forward and backward passes (accounting, section 9), including padded tokens, without recomputation."""
    gpus: int = 0
    """0: the job's GPUs on this node."""
    each: bool = False
    """The figures are a mean over the job's GPUs, as in a log; they apply to every GPU without a report of its own."""
    uuids: tuple[str, ...] = ()
    """GPUs of this node that the process uses; empty: unknown."""
    rank: str = ""
    """Global rank of the process, in digits."""
    run: str = ""
    """Run ID, shared by a job and its restarts."""
    step: int | None = None
    """Number of the last completed optimiser step."""
    steps: int = 0
    """Steps completed in the interval."""
    highest_step: int | None = None
    """Highest step the run had reached before, as read from its checkpoint; None: not reported."""
    epoch: float | None = None
    tokens: float | None = None
    padding: float | None = None
    """Padding tokens, included in `tokens`."""
    samples: float | None = None
    hardware_flops: float | None = None
    """Model FLOPs plus recomputation."""
    dtype: str = ""
    """One of DTYPES; empty: 16-bit."""
    model_flops_16bit: float | None = None
    """The part of `model_flops` that is computed in a 16-bit format all the same, as attention in FP8 training."""
    recompute: str = ""
    """none, selective, full; empty: not reported."""
    phase: str = ""
    """One of PHASES, in progress since `end`; empty: not reported."""
    phases: tuple[tuple[str, int], ...] = ()
    """Nanoseconds of the interval by phase; the remainder is `compute`."""
    bubble: float | None = None
    """Bubble share of a step under the pipeline's schedule, 0-1."""
    checkpoints: int = 0
    """Checkpoints saved in the interval."""
    restart: bool = False
    """This is the first report after a restart of the run."""
    loss: float | None = None
    """May be NaN or infinite, which is counted as an event."""
    quality: float | None = None
    quality_name: str = ""
    quality_target: float | None = None
    quality_falls: bool = False
    """Lower is better."""
    parallel: Parallel | None = None
    world_size: int = 0
    """GPUs of the whole job; 0: not reported."""


class Latency(Struct, frozen=True):
    """Latency percentiles of the requests that ended in an interval, seconds."""

    kind: str
    """ttft (to the first token), itl (between tokens), queue, e2e (whole requests)."""
    p50: float
    p95: float
    p99: float


class ServingReport(Struct, frozen=True, omit_defaults=True):
    """A serving engine's figures for [start, end), of one replica: counts over the interval, gauges at its end.

    Counts are totals of the replica's `gpus` GPUs. None: not reported by this engine or version.
    """

    job_id: str
    start: int
    end: int
    engine: str
    """vllm, sglang, trtllm, tgi, dynamo."""
    gpus: int = 0
    """0: the job's GPUs on this node."""
    uuids: tuple[str, ...] = ()
    """The replica's GPUs on this node; empty: all GPUs the job has on this node."""
    running: float | None = None
    """Requests in the batch."""
    waiting: float | None = None
    """Requests that are not in the batch."""
    deferred: float | None = None
    """Of `waiting`, those that could not join the batch if it had room: their KV cache is transferred, for instance."""
    last_pass: bool = False
    """The gauges may be those of the last forward pass, with requests that have ended since."""
    slots: float | None = None
    """Maximum number of requests in a batch."""
    kv_use: float | None = None
    """Share of KV cache blocks in use, 0-1."""
    preemptions: float | None = None
    prompt_tokens: float | None = None
    """Prompt tokens computed, without those found in the prefix cache."""
    cached_tokens: float | None = None
    generated_tokens: float | None = None
    recomputed_tokens: float | None = None
    """Prompt tokens computed again because they had been evicted."""
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    passes: float | None = None
    """Forward passes."""
    flops: float | None = None
    """FLOPs of all tokens computed, per GPU, by the engine's estimate or as 2N per token."""
    bytes: float | None = None
    """Bytes read from and written to device memory, per GPU, by the engine's estimate."""
    inter_token_seconds: float | None = None
    """Mean inter-token latency over the interval."""
    calm_inter_token_seconds: float | None = None
    """Mean inter-token latency at a similar batch size while no prefill ran; None: not measured yet."""
    latencies: tuple[Latency, ...] = ()


class CollectiveUse(Struct, frozen=True):
    """Collectives or point-to-point transfers of one kind that one process executed in an interval."""

    name: str
    """NCCL's name of the function: AllReduce, AllGather, ReduceScatter, Broadcast, AllToAll, Send, Recv, ..."""
    calls: int
    nanoseconds: int
    """Sum of their execution times, which may overlap."""
    bytes: float
    """Message bytes."""
    bus_bytes: float | None = None
    """Bytes on the slowest link by NCCL's convention (its "bus bandwidth" times the time); None: not reported."""


class CollectiveReport(Struct, frozen=True, omit_defaults=True):
    """Communication of one process over [start, end), as timed by an NCCL profiler plugin (Inspector, CoMMA).

    Without any change to the job; it includes communication that overlaps with computation.
    """

    job_id: str
    start: int
    end: int
    busy: int
    """Nanoseconds in which at least one collective executed: the union over communicators."""
    uuids: tuple[str, ...] = ()
    """GPUs of this node that the process uses; empty: unknown."""
    rank: str = ""
    """Global rank, or the rank in the largest communicator, in digits."""
    collectives: tuple[CollectiveUse, ...] = ()
    source: str = ""
    """inspector or comma."""


class HangFinding(Struct, frozen=True, omit_defaults=True):
    """What the ranks of a job that may hang report about their collectives (NCCL RAS, PyTorch's Flight Recorder)."""

    job_id: str
    at: int
    moving: bool
    """Collectives were completed between two questions: the job does not hang."""
    stuck: bool = False
    """What the ranks wait for can never come: one is missing, or they are in different collectives."""
    rank: str = ""
    """The rank that the others wait for, in digits; empty: unknown."""
    host: str = ""
    pid: int = 0
    gpu: str = ""
    """The driver's index of the rank's GPU on its host; empty: unknown."""
    collective: str = ""
    """Name of the collective in which the others wait."""
    sequence: int | None = None
    """Its sequence number."""
    stack: str = ""
    """Top of the rank's stack, one line; empty: unknown."""
    source: str = ""
    """nccl_ras or flight_recorder."""
    uuids: tuple[str, ...] = ()
    """GPUs of this node that it is about; empty: all of the job's."""


class HostUsage(Struct, frozen=True, omit_defaults=True):
    """CPU time and pressure of one job's processes on this node over [start, end), from its cgroup (v2).

    Shares are 0-1: the share of time in which some task of the job waited for the resource ("some" of Linux's PSI).
    """

    job_id: str
    start: int
    end: int
    cpu_seconds: float | None = None
    """CPU time used, over all cores."""
    cpu_throttled: float | None = None
    """Share of time in which the CPU quota stopped the job."""
    cpu_pressure: float | None = None
    io_pressure: float | None = None
    memory_pressure: float | None = None


class NetworkPort(Struct, frozen=True, omit_defaults=True):
    """One RDMA port of this node (InfiniBand, RoCE or EFA) at one moment; counters are the kernel's own."""

    name: str
    """Device and port number ("mlx5_0:1")."""
    at: int
    link: str = ""
    """infiniband, roce or efa; empty: another."""
    active: bool = False
    """The port's state is ACTIVE."""
    bytes_per_second: float | None = None
    """Nominal rate of the link in one direction."""
    transmitted_bytes: int | None = None
    received_bytes: int | None = None
    wait_ticks: int | None = None
    """`port_xmit_wait`: ticks, of a length that the device defines, in which data waited and none was sent."""


class Observation(Struct, frozen=True, omit_defaults=True):
    """All inputs of one tick. A trace is a header and a list of these; replay needs no clock.

    `devices` (the whole inventory) and `allocations` are change-points: None means "unchanged". No reading will arrive
    later for time before `settled`; any part of it that no reading covers is posted as unobserved.
    """

    at: int
    wall: int
    """The same moment in Unix nanoseconds, for display only; never used for durations."""
    readings: tuple[Reading, ...] = ()
    settled: int | None = None
    """None: `at`."""
    devices: tuple[Device, ...] | None = None
    allocations: tuple[Allocation, ...] | None = None
    allocations_at: int | None = None
    """When the scheduler last confirmed the allocations, changed or not. None: `at`."""
    source: str = ""
    faults: tuple[Fault, ...] = ()
    health: tuple[Health, ...] = ()
    """Complete health readings of the boards that were read."""
    reports: tuple[TrainingReport, ...] = ()
    serving: tuple[ServingReport, ...] = ()
    collectives: tuple[CollectiveReport, ...] = ()
    findings: tuple[HangFinding, ...] = ()
    hosts: tuple[HostUsage, ...] = ()
    ports: tuple[NetworkPort, ...] | None = None
    """All RDMA ports of the node; None: not read since the last observation."""


class State(StrEnum):
    """The mutually exclusive states of a GPU; the first match in `states.RULES` wins."""

    UNAVAILABLE = "unavailable"
    UNOBSERVED = "unobserved"
    UNOWNED = "unowned"
    UNALLOCATED = "unallocated"
    HUNG = "hung"
    ZOMBIE = "zombie"
    STALLED = "stalled"
    ACTIVE = "active"
