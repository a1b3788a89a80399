"""Reads the configuration: defaults, then a TOML file, then the environment, then flags; frozen once read.

Owns names, types, bounds and the order of precedence. An unknown key or a wrong type is an error that names its path.
Refuses to open any file but the one given, and, once asked for it, the file of carbon intensities.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, defstruct, structs

from exporter.carbon import MAX_GRAMS, read_hours
from exporter.core.model import SECOND, Spec
from exporter.core.policy import Policy
from exporter.core.prices import ANY_MODEL, NO_PRICE, CarbonIntensity, EnergyTerms, Price, Terms
from exporter.registry import (
    SCHEDULERS,
    SOURCES,
    DcgmExporterSettings,
    DcgmSettings,
    KubernetesSettings,
    MappingDirSettings,
    Positive,
    SlurmSettings,
    engine_ports,
    section_of,
)
from exporter.specs import find_spec, is_known
from exporter.urls import complete_url

PREFIX = "GPU_EFFICIENCY_"
DEFAULT_PORT = 19400
"""dcgm-exporter's 9400 plus 10,000: outside 9100-9999, which many exporters use."""
_SERVICE_LINK = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)$")
"""Rest of the names of variables that Kubernetes sets in pods for a Service called gpu-efficiency; they are ignored."""
if TYPE_CHECKING:  # mypy cannot evaluate choices that are only known at run time
    SourceName = str
    SchedulerName = str
    ClusterSchedulerName = str
else:
    SourceName = Literal[("auto", *SOURCES)]
    SchedulerName = Literal[("auto", *SCHEDULERS)]
    ClusterSchedulerName = Literal[("auto", *(name for name, entry in SCHEDULERS.items() if entry.cluster_opener))]
_LONGEST_LINE = 16_384
"""Most characters of a line of the file."""


class ConfigError(Exception):
    """The configuration cannot be used; the message names the place and the reason."""


class WebSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[web]."""

    listen_address: str = f":{DEFAULT_PORT}"
    """Address to listen on, host:port; an empty host means all addresses."""
    page_address: str = ""
    """Separate address (host:port) for the page and the JSON API; empty: listen_address serves them."""
    open_page: bool = False
    """Serve the page and the JSON API without authentication on all interfaces. false: beyond loopback only to clients
    that config_file authenticates."""
    config_file: str = ""
    """Web configuration file of Prometheus exporters (YAML): TLS, client certificates, users. Empty: none of them."""


class PrivacySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[privacy]: how user names appear in metrics, pages, logs and traces."""

    users: Literal["keep", "hash", "drop"] = "keep"
    """keep: user names unchanged; hash: a keyed hash, equal for the same user; drop: no user names."""
    key_file: str = ""
    """File with the secret of the hash, the same on all nodes; required for hash, advised for drop in Kubernetes."""


class SamplingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[sampling]."""

    interval_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 1.0
    """Seconds between two samples. The minimum is 0.1: the hardware counters are updated every 100 ms, and profiling
    values read more often are invalid on Hopper."""
    deadline_seconds: Positive = 10.0
    """Timeout of one read in seconds; the time of a read that exceeds it counts as unobserved."""
    pause_file: str = "/run/gpu-efficiency/pause"
    """While this file exists and holds a time in the future, nothing is read: see `gpu-efficiency pause`."""


class InventorySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[inventory]."""

    expected_gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Number of GPUs of this node; a missing GPU counts as unavailable, and is still paid for. 0: all seen before."""
    file: str = ""
    """File that stores the GPUs seen, for use after a restart; empty: not stored."""


_Flops = Annotated[float, Meta(ge=1e9, le=1e18)]
_BytesPerSecond = Annotated[float, Meta(ge=1e6, le=1e15)]


class BoardSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """[specs."NVIDIA H100 PCIe"]: specifications of a GPU model, by the driver's full name for it.

    Fields not set come from the built-in table, if it has the model. Minimums reject values in TFLOP/s, MHz or GB/s.
    """

    peak_flops: _Flops | None = None
    """Dense 16-bit tensor FLOP/s."""
    peak_flops_tf32: _Flops | None = None
    """Dense TF32 tensor FLOP/s."""
    peak_flops_fp8: _Flops | None = None
    """Dense FP8 tensor FLOP/s."""
    peak_flops_fp4: _Flops | None = None
    """Dense FP4 tensor FLOP/s."""
    tensor_reference_clock_hz: Annotated[float, Meta(ge=1e6, le=1e11)] | None = None
    """SM clock in Hz at which peak_flops holds."""
    memory_bandwidth_bytes_per_second: _BytesPerSecond | None = None
    """Nominal bandwidth of the device memory in bytes/s."""
    nvlink_bytes_per_second: _BytesPerSecond | None = None
    """Bytes/s in one direction, all NVLinks together."""
    nvlink_domain: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """GPUs in one NVLink domain that spans nodes; 0: the GPUs of one node."""
    pcie_bytes_per_second: _BytesPerSecond | None = None
    """Bytes/s in one direction of the PCIe link."""
    idle_context_watts: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """Board power in watts with a CUDA context and no kernel."""
    power_limit_watts: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """Board power limit in watts, used where the driver reports no enforced limit."""
    dram_ceiling: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The highest dram_active (0 to 1) that real copy kernels reach."""
    slices: Annotated[int, Meta(ge=0, le=16)] | None = None
    """MIG compute slices of a whole GPU; 0: no MIG."""
    memory_gb: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """Nominal memory size in GB."""


class HostSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[host]: paths of the host's file systems, for a container that mounts them elsewhere; the node's price pool."""

    proc: str = "/proc"
    """The host's /proc."""
    cgroup: str = "/sys/fs/cgroup"
    """The host's cgroup file system."""
    counters: bool = True
    """Read CPU time and pressure of the jobs from their control groups, and the counters of RDMA ports."""
    pool: str = ""
    """Capacity pool of this node, which selects its price: reserved, spot, ..."""


class WorkloadRule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """[[workload.rules]]: settings for jobs that match all given patterns (regular expressions, matched in full)."""

    workload_class: Literal["", "batch", "interactive", "serving"] = ""
    """Class of matching jobs; it selects the idle thresholds."""
    team: str = ""
    """Team of matching jobs, which their cost is charged to."""
    zombie_seconds: Positive | None = None
    """Seconds without work after which a matching job counts as a zombie."""
    hang_seconds: Positive | None = None
    """Seconds of spinning after which a matching job counts as hung; replaces all hang limits of [policy]."""
    useful_pipe: Literal["", "tensor", "fp64", "fp32", "none"] = ""
    """Pipe whose activity is the useful work of matching jobs; none: eMFU does not apply to them; empty: detected from
    the counters."""
    scheduler: str = ""
    """Pattern for the scheduler: slurm, kubernetes, mapping-dir, processes."""
    partition: str = ""
    """Pattern for the Slurm partition."""
    qos: str = ""
    """Pattern for the Slurm QOS."""
    account: str = ""
    """Pattern for the Slurm account."""
    user: str = ""
    """Pattern for the user name as the scheduler reports it, before privacy.users is applied."""
    namespace: str = ""
    """Pattern for the Kubernetes namespace."""
    name: str = ""
    """Pattern for the name of the job, or of the pod's owner."""
    kind: str = ""
    """Pattern for the kind of job or pod owner, such as array, interactive, deployment, jobset."""
    command: str = ""
    """Regular expression that is searched for anywhere in the command line."""
    label: str = ""
    """Label of the pod: key=regular expression."""


class WorkloadSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[workload]: class, team and thresholds of jobs."""

    rules: tuple[WorkloadRule, ...] = ()
    """Each setting comes from the first matching rule that has it."""
    defaults: bool = True
    """After [[workload.rules]], apply the built-in rules that determine the workload class."""


def _start_of(day: date) -> float:
    """00:00 UTC of a day in Unix seconds."""
    return datetime.combine(day, time(), UTC).timestamp()


_DEFAULT_CURRENCY = "USD"
Currency = Annotated[str, Meta(min_length=1, max_length=15, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
"""A code as in ISO 4217, or another name in letters: a symbol such as $ stands for several currencies."""


class Exemption(Struct, frozen=True, forbid_unknown_fields=True):
    """[[exemptions]]: jobs that may be idle until a given day; all given patterns must match."""

    id: Annotated[str, Meta(min_length=1, max_length=63)]
    """Short unique name."""
    reason: Annotated[str, Meta(min_length=1, max_length=200)]
    """Explanation, shown with every job that the exemption covers."""
    expires: date
    """The exemption ends when this day begins (UTC), and is then reported as expired."""
    namespace: str = ""
    """Pattern for the Kubernetes namespace."""
    job_id: str = ""
    """Pattern for the job_id as in the metrics."""
    partition: str = ""
    """Pattern for the Slurm partition."""
    account: str = ""
    """Pattern for the Slurm account."""
    user: str = ""
    """Pattern for the user name as the scheduler reports it, before privacy.users is applied."""
    name: str = ""
    """Pattern for the name of the job, or of the pod's owner."""
    qos: str = ""
    """Pattern for the Slurm QOS."""

    @property
    def expiry(self) -> float:
        """End of the exemption, Unix seconds."""
        return _start_of(self.expires)


class PriceRow(Struct, frozen=True, forbid_unknown_fields=True):
    """[[prices]]: price of a GPU-hour. Of the matching rows the most specific wins, then the latest valid_from."""

    per_gpu_hour: Annotated[float, Meta(ge=0, le=1e6)]
    """Price of a whole GPU for an hour; a MIG instance costs its share."""
    currency: Currency = _DEFAULT_CURRENCY
    """Currency of the price, any name in letters. Use one per cluster: costs in different currencies are not added."""
    model: str = "*"
    """GPU model: the driver's full name, or its name in the table of specifications; *: any."""
    pool: str = ""
    """Applies to nodes of this pool (host.pool); empty: to all nodes."""
    basis: Literal["paid", "allocated"] = "paid"
    """paid: every second of the GPU has a cost; allocated: only the seconds in which a job holds it."""
    valid_from: date | None = None
    """First day on which the price applies, from 00:00 UTC; not set: always."""

    @property
    def price(self) -> Price:
        """The row as the value that the core uses."""
        since = 0 if self.valid_from is None else int(_start_of(self.valid_from))
        return Price(self.per_gpu_hour, self.currency, self.model, self.pool, self.basis, since * SECOND)


class EnergySettings(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """[energy]: cost and carbon dioxide emissions of a kilowatt-hour."""

    price_per_kwh: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """Price of a kilowatt-hour; not set: no cost of energy is reported."""
    currency: Currency = _DEFAULT_CURRENCY
    """Currency of price_per_kwh."""
    grams_co2_per_kwh: Annotated[float, Meta(ge=0, le=MAX_GRAMS)] | None = None
    """Carbon intensity of the grid, where carbon_intensity_file has no value; not set: it is not known there."""
    carbon_intensity_file: str = ""
    """CSV with the carbon intensity of each hour, as Electricity Maps exports it; empty: none. Read with this file."""
    carbon_intensity_column: Literal["life_cycle", "direct"] = "life_cycle"
    """Which carbon intensity of the file applies, if it has both."""

    @property
    def terms(self) -> EnergyTerms:
        """What a kilowatt-hour costs."""
        return EnergyTerms(self.price_per_kwh, self.currency)

    @cached_property
    def carbon(self) -> CarbonIntensity:
        """Carbon intensity, with the content that the file had at the first access; raises ConfigError."""
        if not self.carbon_intensity_file:
            return CarbonIntensity(self.grams_co2_per_kwh)
        try:
            hours = read_hours(Path(self.carbon_intensity_file), column=self.carbon_intensity_column)
        except ValueError as err:
            raise ConfigError(f"energy.carbon_intensity_file: {self.carbon_intensity_file}: {err}") from err
        return CarbonIntensity(self.grams_co2_per_kwh, tuple(hours), tuple(hours.values()))


class BudgetSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[budget]: loss above which an alert fires; for the whole cluster, and the same on all its nodes."""

    idle_per_hour: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """Money per hour lost on unallocated and idle GPUs; not set: no alert."""
    currency: Currency | None = None
    """Currency of idle_per_hour, one of [[prices]]. Not set: USD if it is one of them, otherwise the alphabetically
    first. Without [[prices]] the budget is in GPU-hours."""


class ClusterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[cluster]: settings of the command `gpu-efficiency cluster`."""

    listen_address: str = ":19401"
    """Address to listen on, host:port; an empty host means all addresses."""
    scheduler: ClusterSchedulerName = "auto"
    """Scheduler to query; auto: Kubernetes in a pod, else Slurm."""
    refresh_seconds: Annotated[float, Meta(ge=20, le=3600)] = 60.0
    """Seconds between two polls; each sends at most three requests to Slurm's controller."""
    max_jobs: Annotated[int, Meta(ge=0, le=20_000)] = 2000
    """Number of running jobs, the largest first, whose placement is reported."""
    kueue: bool = False
    """Whether workloads of Kueue are read on Kubernetes: needs list and watch of its workloads and localqueues."""


class GatewaySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[gateway]: settings of the command `gpu-efficiency gateway`, which answers each user for his own jobs."""

    socket: str = "/run/gpu-efficiency/gateway.sock"
    """Unix socket on which it serves all users of this host; `gpu-efficiency report` finds it here."""
    nodes: tuple[str, ...] = ()
    """Addresses of the nodes' daemons. {node} in one stands for each node on which the user's jobs ran, by sacct:
    https://{node}:19400."""
    header_file: str = ""
    """File with the header lines to send to the nodes, such as Authorization; all of them must then be https.
    Empty: none."""
    ca_file: str = ""
    """Certificate authority of the nodes, if they have TLS with a private one; empty: the system's."""
    proxy_user: str = ""
    """User as which the site's authenticating proxy runs: its requests are answered for the user that it names; empty:
    none."""
    user_header: str = "X-Remote-User"
    """Header in which that proxy names the user."""


class ReportsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[reports]: receives reports that training jobs send."""

    socket: str = "/run/gpu-efficiency/report.sock"
    """Unix socket (SOCK_SEQPACKET) that receives reports from jobs of this node; empty: none."""
    http: str = ""
    """Loopback address (host:port) for reports over HTTP, for jobs that cannot reach the socket; empty: none."""
    per_second: Annotated[float, Meta(gt=0, le=1000)] = 10.0
    """Most messages per second from one process."""
    processes: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """Most processes that may report at the same time."""


class FollowSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[[follow]]: log files of training jobs, parsed for progress instead of reports."""

    framework: Literal["auto", "megatron", "torchtitan", "maxtext", "nanotron", "huggingface"] = "auto"
    """Framework that writes the log; auto: detected from the lines."""
    path: str = ""
    """Path of the log, with {job_id} for the job's id and * for any text; empty: the standard output of the
    processes on the GPUs, if it is a file."""
    workload_class: Literal["batch", "interactive", "serving"] = "batch"
    """Follow only jobs of this class."""


class EngineEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """[[engines.endpoints]]: a serving engine that automatic discovery does not find."""

    url: Annotated[str, Meta(min_length=1)]
    """URL of its metrics; http:// can be omitted."""
    job_id: Annotated[str, Meta(min_length=1)]
    """Regular expression that matches the id of its job."""

    def __post_init__(self) -> None:
        structs.force_setattr(self, "url", complete_url(self.url))


class ServedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """[engines.models."NAME"]: a served model, by the name that its engine uses."""

    active_parameters: Annotated[float, Meta(gt=0, le=1e15)]
    """Active parameters; each counts 2 FLOPs per token unless the engine estimates its FLOPs itself."""


class EngineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[engines]: discovery and scraping of serving engines on this node."""

    enabled: bool = True
    """Discover and scrape serving engines."""
    interval_seconds: Annotated[float, Meta(ge=1, le=300)] = 5.0
    """Seconds between two scrapes of one engine."""
    timeout_seconds: Positive = 2.0
    """Timeout of one scrape in seconds."""
    ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = engine_ports()
    """Ports to try, if a process of a serving job listens on them."""
    endpoints: tuple[EngineEndpoint, ...] = ()
    models: dict[str, ServedModel] = {}


class HangSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[hangs]: queries NCCL's RAS or PyTorch's Flight Recorder in jobs that may hang, to name the rank at fault."""

    enabled: bool = True
    """Query jobs whose GPUs spin without progress. Healthy jobs are never queried."""
    ask_after_seconds: Annotated[float, Meta(ge=10, le=3600)] = 45.0
    """Seconds for which a GPU of the job must have spun before the first query."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=120)] = 15.0
    """Timeout of one query to RAS, in seconds; RAS itself may wait 5 s for each unresponsive process."""
    ras_ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = (28028,)
    """Ports of RAS to try beside that of the job's NCCL_RAS_ADDR, if a process of the job listens on them."""
    flight_recorder: bool = True
    """Also ask the control plane of PyTorch workers that were started with TORCH_WORKER_SERVER_SOCKET and run in
    worker_main()."""
    flight_recorder_dump: bool = False
    """Let PyTorch workers without it, but with TORCH_NCCL_DEBUG_INFO_PIPE_FILE and TORCH_FR_DUMP_TEMP_FILE, dump their
    Flight Recorder: each question then overwrites the dump files of the job."""


class NcclSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[nccl]: communication of jobs, as NCCL's profiler plugins (Inspector, CoMMA) time it."""

    enabled: bool = True
    """Read the files that these plugins write in the processes of jobs, where the jobs or /etc/nccl.conf load them."""


class HistorySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[history]: data kept on this node's disk, so that a restart of the daemon loses nothing."""

    file: str = "auto"
    """Path of the store (SQLite). auto: history.db in systemd's STATE_DIRECTORY, else in /var/lib/gpu-efficiency if
    that is writable, else none. Empty: none."""
    checkpoint_seconds: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    """Seconds between two checkpoints, the most that a power failure loses. Each scrape is saved before the reply."""
    sample_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """Seconds between two samples of a job; long jobs are sampled less often."""
    keep_days: Annotated[float, Meta(gt=0, le=36_500)] = 400.0
    """Days for which reports of ended jobs and events are kept."""
    max_mebibytes: Annotated[float, Meta(ge=1, le=1_000_000)] = 200.0
    """Size limit of the store. To stay below it, the oldest events are deleted, down to an eighth of it, then the
    oldest job reports."""


class ReceiptSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[receipts]: where the report of an ended job is published, so that its user sees it.

    On Slurm the epilog slurm-receipt.sh does that, with settings of its own.
    """

    kubernetes: Literal["none", "event", "annotation"] = "none"
    """An Event about the job's pod, or the annotation gpu-efficiency.io/receipt on it; either needs a permission that
    the daemon does not have otherwise: see docs/job-reports.md."""


class OtlpSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[otlp]: pushes the figures of /metrics to a receiver of OTLP/HTTP; needs the extra `otlp`: docs/prometheus.md.

    What is not set here, the SDK takes from OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_COMPRESSION.
    """

    endpoint: str = ""
    """URL of the receiver for metrics, with its path: http://collector:4318/v1/metrics, or for Prometheus
    http://prometheus:9090/api/v1/otlp/v1/metrics. Empty: nothing is pushed."""
    headers_file: str = ""
    """File with header lines to send, such as Authorization, reread for each push; sent to other hosts only over https.
    Empty: none."""
    ca_file: str = ""
    """Certificate authority of the receiver, if it has TLS with a private one; empty: the usual ones."""
    interval_seconds: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """Seconds between two pushes."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=300)] = 10.0
    """Timeout of a push, retries included, in seconds; the next push includes its data."""

    def __post_init__(self) -> None:
        structs.force_setattr(self, "endpoint", complete_url(self.endpoint))


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[log]."""

    format: Literal["text", "json"] = "text"
    """Format of log lines; both write one line per event."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration file."""

    source: SourceName = "auto"
    """Source of GPU telemetry; auto: the first of these, from left to right, that reports tensor activity, else the
    first that works."""
    scheduler: SchedulerName = "auto"
    """Scheduler that allocates GPUs to jobs; auto: the first of these, from left to right, that this node has."""
    web: WebSettings = WebSettings()
    privacy: PrivacySettings = PrivacySettings()
    sampling: SamplingSettings = SamplingSettings()
    inventory: InventorySettings = InventorySettings()
    dcgm: DcgmSettings = DcgmSettings()
    dcgm_exporter: DcgmExporterSettings = DcgmExporterSettings()
    host: HostSettings = HostSettings()
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    mapping_dir: MappingDirSettings = MappingDirSettings()
    workload: WorkloadSettings = WorkloadSettings()
    cluster: ClusterSettings = ClusterSettings()
    gateway: GatewaySettings = GatewaySettings()
    reports: ReportsSettings = ReportsSettings()
    follow: tuple[FollowSettings, ...] = ()
    engines: EngineSettings = EngineSettings()
    hangs: HangSettings = HangSettings()
    nccl: NcclSettings = NcclSettings()
    history: HistorySettings = HistorySettings()
    receipts: ReceiptSettings = ReceiptSettings()
    otlp: OtlpSettings = OtlpSettings()
    log: LogSettings = LogSettings()
    policy: Policy = Policy()
    policy_by_model: dict[str, dict[str, Any]] = {}
    """Thresholds for one GPU model, by the driver's full name or the table's; only in the file."""
    prices: tuple[PriceRow, ...] = ()
    energy: EnergySettings = EnergySettings()
    budget: BudgetSettings = BudgetSettings()
    exemptions: tuple[Exemption, ...] = ()
    specs: dict[str, BoardSettings] = {}
    """GPU models that the built-in table lacks or has wrong, by the driver's full name; only in the file."""

    def overrides(self) -> Mapping[str, Spec]:
        """The operator's specifications by the driver's name of the GPU model; they override the table."""
        return {
            name: structs.replace(find_spec(name) or Spec(name=name), **msgspec.to_builtins(board))
            for name, board in self.specs.items()
        }

    def terms(self, node: str) -> Terms:
        """Prices, budget and exemptions for the node of that name."""
        return Terms(
            node=node,
            pool=self.host.pool,
            prices=tuple(row.price for row in self.prices),
            unknown_models=self.unknown_price_models,
            energy=self.energy.terms,
            carbon=self.energy.carbon,
            idle_budget=self.budget.idle_per_hour,
            idle_budget_currency=self.idle_budget_currency,
            exemptions=tuple((exemption.id, exemption.reason, exemption.expiry) for exemption in self.exemptions),
        )

    @property
    def idle_budget_currency(self) -> str:
        """Currency of the idle budget: one of [[prices]], because costs in another are not compared with it."""
        currencies = {row.currency for row in self.prices}
        if not currencies:
            return NO_PRICE.currency
        return self.budget.currency or (_DEFAULT_CURRENCY if _DEFAULT_CURRENCY in currencies else min(currencies))

    @property
    def unknown_price_models(self) -> tuple[str, ...]:
        """Models that rows of [[prices]] name and that neither the table of specifications nor [specs] knows."""
        named = {row.model for row in self.prices} - {ANY_MODEL} - self.specs.keys()
        return tuple(sorted(model for model in named if not is_known(model)))

    def policies(self) -> Mapping[str, Policy]:
        """The policy of each GPU model that has thresholds of its own."""
        return {model: self.model_policy(own) for model, own in self.policy_by_model.items()}

    def model_policy(self, own: Mapping[str, Any]) -> Policy:
        """The policy with the thresholds `own`; raises msgspec.ValidationError."""
        return msgspec.convert({**structs.asdict(self.policy), **own}, Policy)


def _with_sections(config: type[Struct]) -> type[Struct]:
    """Add to `config` a section for each source and scheduler that has settings but no typed field above."""
    settings = [(section_of(name), entry.settings) for name, entry in SOURCES.items()]
    settings += [(section_of(name), entry.settings) for name, entry in SCHEDULERS.items()]
    added = [
        (section, struct, msgspec.field(default_factory=struct))
        for section, struct in settings
        if struct is not None and section not in config.__struct_fields__
    ]
    return defstruct("Config", added, bases=(config,), frozen=True, forbid_unknown_fields=True) if added else config


if not TYPE_CHECKING:
    Config = _with_sections(Config)


LIVE = ("workload", "exemptions", "prices", "energy", "budget", "policy", "policy_by_model", "log")
"""Sections that a running daemon reloads on SIGHUP or when the file changes; the others need a restart."""


def with_live_settings(current: Config, new: Config, live: Iterable[str] = LIVE) -> Config:
    """Return `current` with the live sections of `new`."""
    return structs.replace(current, **{name: getattr(new, name) for name in live})


def changed_settings(current: object, new: object, path: str = "") -> tuple[str, ...]:
    """Dotted names of the settings in which two configurations differ; a list or table counts as one setting."""
    if current == new:
        return ()
    if not isinstance(current, Struct) or type(current) is not type(new):
        return (path,)
    fields = ((name, f"{path}.{name}" if path else name) for name in current.__struct_fields__)
    return tuple(
        found for name, at in fields for found in changed_settings(getattr(current, name), getattr(new, name), at)
    )


def load(
    path: Path | None, *, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Read defaults < file < environment < flags. `flags` maps dotted names ("web.listen_address") to values.

    Raises ConfigError naming the file, key or variable, and what is wrong with it.
    """
    content, tree = ("", {}) if path is None else _read_file(path)
    _check(tree, where=f"{path}", strict=True, content=content)
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX) and not _SERVICE_LINK.match(name, len(PREFIX)):
            _set(tree, _config_key(name), _parse_list(text) if _LIST.fullmatch(text) else text)
            _check(tree, where=f"environment variable {name}", variable=name)
    for dotted, value in (flags or {}).items():
        _set(tree, dotted, value)
        _check(tree, where=_flag(dotted))
    config = _check(tree, where="configuration")
    if problem := _budget_problem(config):  # only now: the file may have the budget, and the environment its currency
        raise ConfigError(with_origin(problem, path, environ=environ, flags=flags or ()))
    return config


def with_origin(
    message: str, path: Path | None, *, environ: Mapping[str, str] | None = None, flags: Iterable[str] = ()
) -> str:
    """Add to a message that begins with a key where it is set: the flag, the variable, or the file and the line."""
    from exporter.config_errors import has_key, locate, mentioned_key  # noqa: PLC0415  only if there is an error

    key, _ = mentioned_key(message)
    if not has_key(Config, key) or not message.startswith(str(key[0])):
        return message
    dotted = ".".join(map(str, key))
    variable = PREFIX + dotted.replace(".", "_").upper()
    if dotted in flags:
        return f"{_flag(dotted)}: {message}"
    if variable in (os.environ if environ is None else environ):
        return f"environment variable {variable}: {message}"
    line, depth = (0, 0) if path is None else locate(_read_file(path)[0], key)
    return f"{path}: line {line}: {message}" if depth == len(key) else message


def _flag(dotted: str) -> str:
    """Return the flag that sets a key, for messages."""
    return f"flag --{dotted.replace('_', '-')}"


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the file's text and what it defines; raises ConfigError."""
    try:
        content = _check_line_lengths(path.read_text(encoding="utf-8"))
        return content, tomllib.loads(content)
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror or err}") from err
    except ValueError as err:  # invalid TOML or UTF-8, or a number with thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {err}") from err
    except RecursionError as err:
        raise ConfigError(f"{path}: tables or lists inside each other, thousands deep") from err


def _check_line_lengths(text: str) -> str:
    """Return the text; raises ValueError for a line that is too long.

    A key of a hundred thousand parts would take the parser half a minute.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"line {number} has more than {_LONGEST_LINE:,} characters")
    return text


def _check(tree: dict[str, Any], *, where: str, strict: bool = False, content: str = "", variable: str = "") -> Config:
    """Convert and validate; not `strict` accepts numbers as text, as environment variables and flags have them.

    Errors name `where`, and the line in the file's `content`.
    """
    try:
        _check_named("specs", tree.get("specs"), lambda board: msgspec.convert(board, BoardSettings, strict=strict))
        engines = tree.get("engines")
        models = engines.get("models") if isinstance(engines, dict) else None
        _check_named("engines.models", models, lambda model: msgspec.convert(model, ServedModel, strict=strict))
        config = msgspec.convert(tree, Config, strict=strict)
        check_rules(config.workload.rules)
        check_exemptions(config.exemptions)
        _check_named("policy_by_model", config.policy_by_model, config.model_policy)
        split_address(config.web.listen_address)
        if config.web.page_address:
            split_address(config.web.page_address, name="web.page_address")
        _check_privacy(config.privacy)
    except (msgspec.ValidationError, ConfigError) as err:
        from exporter.config_errors import explain  # noqa: PLC0415  only if there is an error

        known = (variable, *_variables()) if variable else ()
        raise ConfigError(f"{where}: {explain(f'{err}', Config, text=content, variables=known)}") from err
    return config


MATCHED = ("scheduler", "partition", "qos", "account", "user", "namespace", "name", "kind")
"""Fields of a WorkloadRule that are patterns for the same fields of an Owner."""


def check_rules(rules: Iterable[WorkloadRule]) -> None:
    """Raise ConfigError that names the first invalid rule, its field, and the reason."""
    for index, rule in enumerate(rules):
        where = f"workload.rules[{index}]"
        limits = (rule.zombie_seconds, rule.hang_seconds)
        if not (rule.workload_class or rule.team or rule.useful_pipe) and limits == (None, None):
            choices = "workload_class, team, useful_pipe, zombie_seconds or hang_seconds"
            raise ConfigError(f"{where}: gives nothing; give it one of {choices}")
        for field in (*MATCHED, "command"):
            _check_pattern(f"{where}.{field}", getattr(rule, field))
        key, equals, pattern = rule.label.partition("=")
        if rule.label and not (key and equals):
            raise ConfigError(f"{where}.label: {rule.label!r} is not key=regular expression (example: app=vllm.*)")
        _check_pattern(f"{where}.label", pattern)


EXEMPTED = ("job_id", "namespace", "partition", "account", "user", "name", "qos")
"""Fields of an Exemption that are patterns for the same fields of an Owner."""


def check_exemptions(exemptions: Iterable[Exemption]) -> None:
    """Raise ConfigError that names the first invalid exemption, and the reason."""
    known: set[str] = set()
    for index, exemption in enumerate(exemptions):
        where = f"exemptions[{index}]"
        if exemption.id in known:
            raise ConfigError(f"{where}: there are two with the id {exemption.id!r}")
        known.add(exemption.id)
        if not any(getattr(exemption, field) for field in EXEMPTED):
            raise ConfigError(f"{where}: would exempt every job; give it one of {', '.join(EXEMPTED)}")
        for field in EXEMPTED:
            _check_pattern(f"{where}.{field}", getattr(exemption, field))


def _budget_problem(config: Config) -> str:
    """Return what is wrong with the budget's currency, or an empty text."""
    named, priced = config.idle_budget_currency, sorted({row.currency for row in config.prices})
    if config.budget.idle_per_hour is None or not priced or named in priced:
        return ""
    return f"budget.currency: no row of [[prices]] is in {named}: it is one of {', '.join(priced)}"


def _check_privacy(privacy: PrivacySettings) -> None:
    if privacy.users == "hash" and not privacy.key_file:
        raise ConfigError('privacy.users: "hash" needs privacy.key_file, a file with a secret')


def _check_pattern(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {err}") from err


def _check_named(section: str, tables: object, check: Callable[[Any], object]) -> None:
    """Check each table of `section` in a way that errors have its name: msgspec's own have `[...]` for any key."""
    for name, table in tables.items() if isinstance(tables, dict) else ():
        try:
            check(table)
        except msgspec.ValidationError as err:
            raise ConfigError(f'{section}."{name}": {err}') from err


_LIST = re.compile(r"\[.*\] *")
"""Not [::1]:19400, which is an address."""


def _parse_list(text: str) -> list[str]:
    """Items of a list of strings without quotes: [a, b]."""
    return [item for item in text.strip("[] ").replace(" ", "").split(",") if item]


def _sections() -> dict[str, type[Struct]]:
    """Sections of the configuration, without lists and named tables."""
    fields = {field.name: field.type for field in structs.fields(Config)}
    return {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Struct)}


def _variables() -> Iterator[str]:
    """Names of the environment variables of all keys."""
    sections = _sections()
    keys = [key for key in Config.__struct_fields__ if key not in sections]
    keys += [f"{section}_{key}" for section, kind in sections.items() for key in kind.__struct_fields__]
    yield from (f"{PREFIX}{key.upper()}" for key in keys)


def _config_key(name: str) -> str:
    """Return web.listen_address for GPU_EFFICIENCY_WEB_LISTEN_ADDRESS; a name without a section has no dot."""
    key, sections = name.removeprefix(PREFIX).lower(), _sections()
    section = max((s for s in sections if key.startswith(s + "_")), key=len, default=None)
    return key if section is None else f"{section}.{key[len(section) + 1 :]}"


def _set(tree: dict[str, Any], dotted: str, value: object) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def split_address(address: str, *, name: str = "web.listen_address") -> tuple[str, int]:
    """Split "host:port", ":port" or "[::1]:port"; raises ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or len(port) > 5 or int(port) > 65535:  # noqa: PLR2004  the highest port
        raise ConfigError(f"{name}: {address!r} is not host:port (examples: :{DEFAULT_PORT}, 127.0.0.1:0)")
    return host.strip("[]"), int(port)
