"""The values that flow through the exporter: what sources, schedulers, workloads and traces provide.

Owns these shapes; `Observation` holds all of them and is what a trace stores. Refuses behaviour: nothing here judges.
Times are integer nanoseconds of the host's monotonic clock, on whole milliseconds; ratios run from 0 to 1, everything
else is in base units, and signals keep NVIDIA's names in lower case. `None` means *not seen*, never zero.
"""

from enum import StrEnum

from msgspec import Struct

MS = 1_000_000
"""One millisecond in nanoseconds: the grid of every boundary in a ledger."""
SECOND = 1_000 * MS
NEVER = -(1 << 60)
"""A time before all others, for what was never known."""
PPM = 1_000_000
"""The whole of a span, in parts per million."""


DTYPES = ("bf16", "fp16", "tf32", "fp8", "fp4")
"""Number formats of tensor work; peaks differ by them, 16 bits being the common measure."""
PHASES = (
    "startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle",
)  # fmt: skip
"""What a training process may say it is doing. compute: forward, backward and the optimiser; bubble: waiting for the
neighbour stage of a pipeline; idle: waiting by design, for another program or for people."""


class Spec(Struct, frozen=True, omit_defaults=True):
    """What a board can do at best; dense figures, never sparse ones.

    Source: NVIDIA datasheets as collected in `exporter/data/gpu_specs.csv`, one row a board with its confidence.
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
    """GPUs that NVLink joins beyond one node's (72 of a GB200 NVL72); 0: those of the node."""
    pcie_bytes_per_second: float | None = None
    """One direction."""
    idle_context_watts: float | None = None
    """Board power with a CUDA context and no kernel."""
    dram_ceiling: float = 0.9
    """The highest `dram_active` that real copy kernels reach."""
    slices: int = 0
    """MIG compute slices of a whole board: 7, 4 of an A30; 0: it has no MIG."""
    memory_gb: float | None = None
    """As sold, which is how MIG profiles count it."""

    def peak(self, dtype: str) -> float | None:
        """Dense tensor FLOP/s in one of DTYPES; None where the board is not known to have it."""
        return {"tf32": self.peak_flops_tf32, "fp8": self.peak_flops_fp8, "fp4": self.peak_flops_fp4}.get(
            dtype, self.peak_flops
        )


class Device(Struct, frozen=True, omit_defaults=True):
    """One GPU of the node's inventory: paid for whether or not it answers."""

    uuid: str
    index: str = ""
    """The driver's ordinal, as people name it ("0")."""
    model: str = ""
    spec: Spec | None = None
    lacks: tuple[str, ...] = ()
    """Signals this hardware cannot have (no NVLink on a PCIe board): they count as zero, not as missing."""
    condition: str = ""
    """Why the GPU cannot work, in one word ("lost", "missing", "drained"); empty when it can."""
    weight: int = PPM
    """Parts per million of one paid GPU. A MIG instance has its share of the compute slices, the board it is cut
    from what no instance has (perhaps 0): together they are one GPU, exactly."""
    parent: str = ""
    """UUID of the board, for a MIG instance."""
    profile: str = ""
    """MIG profile as NVIDIA writes it ("1g.10gb"); empty for a whole board."""
    stranded: bool = False
    """What is left of a board in MIG mode, which no profile can reach."""

    @property
    def unpartitioned(self) -> bool:
        """What no instance has of a board in MIG mode: nobody can hold it, and nothing runs on it."""
        return self.weight != PPM and not self.parent


class Process(Struct, frozen=True, omit_defaults=True):
    """A process with a context on the GPU, as the driver lists it."""

    pid: int
    memory_bytes: int | None = None
    name: str = ""
    sm_active: float | None = None
    """Share of the SMs' time it used, 0-1, as the driver samples it: the mean since the last reading."""
    job_id: str = ""
    """The job it belongs to, as its cgroup or its environment says; empty: not known."""


class Reading(Struct, frozen=True, omit_defaults=True):
    """One GPU's telemetry over the interval its counters describe: [start, end).

    Ratios and rates are means over the interval; power, temperature, clocks and memory are the latest value
    unless the source averages them. Rates are bytes per second as the GPU sees them: `tx` leaves the GPU
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
    pcie_tx_bytes_per_second: float | None = None
    pcie_rx_bytes_per_second: float | None = None
    nvlink_tx_bytes_per_second: float | None = None
    nvlink_rx_bytes_per_second: float | None = None
    gpu_utilization: float | None = None
    """The driver's own "utilisation": the share of time with a kernel, the 98 % of `nvidia-smi`."""
    power_watts: float | None = None
    """The board's: never copied to an instance."""
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
    """Why the source itself does not vouch for these figures, in one word ("stale", "blank"); else empty."""


class Health(Struct, frozen=True, omit_defaults=True):
    """A board's condition beside its work, as last read. Counters count from the load of the driver."""

    uuid: str
    xids: tuple[int, ...] = ()
    """Critical errors told since the last Health, oldest first (NVIDIA's "Xid errors" document)."""
    recovery_action: int | None = None
    """nvmlDeviceGpuRecoveryAction_t: 0 none, 1 reset the GPU, 2 reboot, 3 drain peers, 4 drain and reset, ..."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    """A reset is needed to put a spare row to use."""
    row_remap_failed: bool | None = None
    """No spare row was left: the board should be replaced."""
    nvlink_errors: int | None = None
    """CRC, replay and recovery errors of all links together."""
    memory_temperature_celsius: float | None = None
    temperature_margin_celsius: float | None = None
    """Degrees left until the board slows down."""
    power_smoothing: bool | None = None
    """The board keeps its power draw flat on purpose: power proves nothing about work."""


class Owner(Struct, frozen=True, omit_defaults=True):
    """Who holds a GPU, in the scheduler's own words."""

    job_id: str
    scheduler: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    namespace: str = ""
    pod: str = ""
    name: str = ""
    workload_class: str = "batch"
    """batch, interactive or serving: how long idling is normal."""
    qos: str = ""
    team: str = ""
    """Who pays, by the operator's own rules."""
    kind: str = ""
    """What made it, in one lower-case word: array, interactive, deployment, jobset, ..."""
    array_id: str = ""
    """The job array or heterogeneous job it is part of."""
    comment: str = ""
    nodes: int = 0
    """Nodes of the whole job; 0: not known."""
    time_limit_seconds: float | None = None
    zombie_seconds: float | None = None
    """How long it may rest before it is a zombie; None: as its class."""
    hang_seconds: float | None = None
    """How long it may spin without progress before it hangs; None: as the policy says."""
    exemption: str = ""
    """Name of the operator's exemption that covers it."""
    exempt_until: float = 0.0
    """Unix seconds at which that ends."""


UNKNOWN_JOB = "unknown"
"""The job of what somebody may hold and nobody can say who: a GPU that works is its, one that rests may be free."""


class Allocation(Struct, frozen=True, omit_defaults=True):
    """One owner's hold on one GPU over [start, end); `end` is None while it lasts."""

    uuid: str
    owner: Owner
    start: int
    end: int | None = None
    gpus: int = 1
    """GPUs of the whole job, on all its nodes: a job of one cannot wait for a peer."""
    restarts: int = 0
    """How often the scheduler has restarted the job."""
    ranks: str = ""
    """Ranks of the job whose processes are on the GPU ("0", "4,5"); empty: not known."""


class Fault(Struct, frozen=True, omit_defaults=True):
    """Something that could not be read or believed; counted by `kind`, told by `message`."""

    kind: str
    message: str = ""
    uuid: str = ""


class Parallel(Struct, frozen=True, omit_defaults=True):
    """Degrees of parallelism of a whole job."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1


class TrainingReport(Struct, frozen=True, omit_defaults=True):
    """What a process of a job says of itself over [start, end), which may be empty: then only a phase begins.

    FLOPs, tokens and samples are those of `gpus` GPUs together, wherever they are: a share of each falls to every GPU.
    """

    job_id: str
    start: int
    end: int
    model_flops: float | None = None
    """FLOPs of the model's own passes (accounting, section 9), padded tokens included, recomputation not."""
    gpus: int = 0
    """0: the job's GPUs on this node."""
    each: bool = False
    """The figures are a mean over the job's GPUs, and so any GPU's of whom nobody says more, as a log has them."""
    uuids: tuple[str, ...] = ()
    """GPUs of this node that the process works on; empty: not known."""
    rank: str = ""
    """Global rank of the process, digits."""
    run: str = ""
    """What a job and its restarts have in common."""
    step: int | None = None
    """The last optimiser step that ended."""
    steps: int = 0
    """Steps that ended in the interval."""
    highest_step: int | None = None
    """How far the run had come before, as the process has read in its checkpoint; None: it does not say."""
    epoch: float | None = None
    tokens: float | None = None
    padding: float | None = None
    """Of the tokens those that only fill up."""
    samples: float | None = None
    hardware_flops: float | None = None
    """Model FLOPs and those of recomputation."""
    dtype: str = ""
    """One of DTYPES; empty: 16 bits."""
    recompute: str = ""
    """none, selective, full; empty: not told."""
    phase: str = ""
    """One of PHASES, which goes on from `end`; empty: none is said to."""
    phases: tuple[tuple[str, int], ...] = ()
    """Nanoseconds of the interval by phase; what is left is `compute`."""
    bubble: float | None = None
    """Share of a step that the pipeline's schedule leaves empty, 0-1."""
    checkpoints: int = 0
    """Made in the interval."""
    restart: bool = False
    """The first word after the run began anew."""
    loss: float | None = None
    """May be nan or infinite: that is told."""
    quality: float | None = None
    quality_name: str = ""
    quality_target: float | None = None
    quality_falls: bool = False
    """Less is better."""
    parallel: Parallel | None = None
    world_size: int = 0
    """GPUs of the whole job; 0: not told."""


class Latency(Struct, frozen=True):
    """Of the requests that ended in an interval, seconds below which the share of them stayed."""

    kind: str
    """ttft (to the first token), itl (between tokens), queue, e2e (whole requests)."""
    p50: float
    p95: float
    p99: float


class ServingReport(Struct, frozen=True, omit_defaults=True):
    """What a serving engine says of [start, end): counts are those of the interval, gauges its end's.

    Of one replica; counts are of the replica's `gpus` GPUs together. None: this engine, or this version, does not say.
    """

    job_id: str
    start: int
    end: int
    engine: str
    """vllm, sglang, trtllm, tgi, dynamo."""
    gpus: int = 0
    """0: the job's GPUs on this node."""
    uuids: tuple[str, ...] = ()
    """Its GPUs on this node; empty: all that the job has here."""
    running: float | None = None
    """Requests in the batch."""
    waiting: float | None = None
    """Requests that queue."""
    slots: float | None = None
    """Requests that fit into a batch."""
    kv_use: float | None = None
    """Share of the KV cache's blocks that hold tokens, 0-1."""
    preemptions: float | None = None
    prompt_tokens: float | None = None
    """Computed anew: without those that a prefix cache had."""
    cached_tokens: float | None = None
    generated_tokens: float | None = None
    recomputed_tokens: float | None = None
    """Of the prompt tokens those that had been computed before, and were evicted."""
    drafted_tokens: float | None = None
    accepted_tokens: float | None = None
    passes: float | None = None
    """Forward passes."""
    flops: float | None = None
    """FLOPs of all tokens that went through the model, per GPU, as the engine estimates them or by 2N a token."""
    bytes: float | None = None
    """Read from and written to device memory, per GPU, as the engine estimates them."""
    inter_token_seconds: float | None = None
    """Mean over the interval."""
    calm_inter_token_seconds: float | None = None
    """The mean at about the same batch while no prefill ran; None: not seen yet."""
    latencies: tuple[Latency, ...] = ()


class Observation(Struct, frozen=True, omit_defaults=True):
    """All that was seen at one moment. A trace is a header and a list of these; replay needs no clock.

    `devices` (the whole inventory) and `allocations` are change-points: None means "as before". `settled` is the
    instant up to which nothing more will come: what no reading covers before it is posted as unobserved.
    """

    at: int
    wall: int
    """The same moment in Unix nanoseconds, for people; never used for arithmetic."""
    readings: tuple[Reading, ...] = ()
    settled: int | None = None
    """None: `at`."""
    devices: tuple[Device, ...] | None = None
    allocations: tuple[Allocation, ...] | None = None
    allocations_at: int | None = None
    """When the allocations, new or "as before", were last known to be true. None: `at`."""
    source: str = ""
    faults: tuple[Fault, ...] = ()
    health: tuple[Health, ...] = ()
    """Of the boards it was read for, whole each time."""
    reports: tuple[TrainingReport, ...] = ()
    serving: tuple[ServingReport, ...] = ()


class State(StrEnum):
    """What a GPU is doing, exclusively; RULES in `classification` decide, the first match wins."""

    UNAVAILABLE = "unavailable"
    UNOBSERVED = "unobserved"
    UNOWNED = "unowned"
    UNALLOCATED = "unallocated"
    HUNG = "hung"
    ZOMBIE = "zombie"
    STALLED = "stalled"
    ACTIVE = "active"
