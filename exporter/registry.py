"""Defines SOURCES, SCHEDULERS and ENGINES: one row for each implementation, with all that is special about it.

A row has the settings class of its section of the configuration, the function that opens it, its check for
install-check, and the signals it cannot measure. The configuration, install-check, `cardinality`, the chart's schema
and the documentation derive from these tables. Rows name code as "module:name", so that it is imported only when used.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from exporter.files import may_exist
from exporter.redact import redact_secrets
from exporter.urls import complete_url

Positive = Annotated[float, Meta(gt=0, le=1e9)]


def import_object(path: str) -> Any:
    """Import the object at "module:name"; raises ModuleNotFoundError if a package is missing."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


def section_of(name: str) -> str:
    """Return the section of the configuration for the row called `name`."""
    return name.replace("-", "_")


# -- sources --


class DcgmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[dcgm]."""

    address: str = "localhost:5555"
    """Address of the host engine: host:port, unix:/path, vsock:CID:PORT, or embedded to run one in this process."""
    bindings: str = ""
    """Folder of NVIDIA's Python bindings (dcgm_agent.py); empty: DCGM_BINDINGS, else where DCGM's packages install
    them."""
    library: str = ""
    """Folder of libdcgm.so; empty: the default of the bindings."""
    connect_timeout_seconds: Positive = 5.0
    """Timeout of one connection attempt in seconds."""


class DcgmExporterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[dcgm_exporter]."""

    url: str = "http://127.0.0.1:9400/metrics"
    """URL of its metrics: this node's own exporter, not a load-balanced address; http:// can be omitted."""
    timeout_seconds: Positive = 5.0
    """Timeout of one scrape in seconds."""
    max_gap_seconds: Positive = 90.0
    """If two successful scrapes are further apart than this many seconds, the time between them is unobserved."""
    hostname: str = ""
    """Use only GPUs of this host, if the address returns several hosts; empty: all."""
    collect_interval_seconds: Positive = 30.0
    """Seconds between two collections of that exporter (its -c or DCGM_EXPORTER_INTERVAL, there in milliseconds)."""

    def __post_init__(self) -> None:
        force_setattr(self, "url", complete_url(self.url))


PROFILING_SIGNALS = (
    "gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active",
    "fp32_active", "fp16_active", "int_active", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second",
    "c2c_tx_bytes_per_second", "c2c_rx_bytes_per_second",
)  # fmt: skip
"""Fields of a Reading that come from the profiling counters."""


class SourceEntry(Struct, frozen=True, kw_only=True):
    """A source of GPU telemetry."""

    opener: str
    """"module:function": takes the Config, returns a TelemetrySource, raises SourceError."""
    location: Callable[[Any], str]
    """Takes its settings (None if it has none); returns its address or library for messages, without secrets."""
    check: str
    """"module:function" of the check that install-check runs."""
    check_seconds: float
    """Timeout of that check in seconds."""
    advice: str
    """What to do if it cannot be opened or read and the error has no advice."""
    profiling_advice: str
    """What to do if it opens but reports no tensor activity."""
    settings: type[Struct] | None = None
    """Class of its section of the configuration; None: no section."""
    environment: tuple[str, ...] = ()
    """Prefixes of the environment variables that affect it."""
    process_list: str = ""
    """"module:function" of a ProcessLister that adds processes to the readings of sources without them; "": none."""
    unsupported_signals: tuple[str, ...] = ()
    """Fields of a Reading or a Health that it does not report for a whole board."""
    limited_variants: Mapping[str, tuple[str, ...]] = {}
    """The same for limited variants of the source, by the name that `cardinality --source` accepts."""


def _dcgm_location(settings: DcgmSettings) -> str:
    return "an engine of our own" if settings.address == "embedded" else f"host engine at {settings.address}"


SOURCES: dict[str, SourceEntry] = {
    "dcgm": SourceEntry(
        opener="exporter.sources.dcgm.source:open_dcgm",
        settings=DcgmSettings,
        environment=("DCGM_BINDINGS",),
        location=_dcgm_location,
        check="exporter.checkup.telemetry:check_dcgm",
        check_seconds=20.0,
        advice="set dcgm.bindings, dcgm.library and dcgm.address to what is here, or name another source",
        profiling_advice=(
            "install datacenter-gpu-manager-4-proprietary for its profiling module, and run the host engine as root"
        ),
    ),
    "dcgm-exporter": SourceEntry(
        opener="exporter.sources.dcgm_exporter.source:open_dcgm_exporter",
        settings=DcgmExporterSettings,
        location=lambda settings: redact_secrets(settings.url),
        check="exporter.checkup.telemetry:check_dcgm_exporter",
        check_seconds=12.0,
        advice="set dcgm_exporter.url to this node's own exporter, or name another source",
        profiling_advice=(
            "give dcgm-exporter a counters file (-f) with DCGM_FI_PROF_* fields, and what they need to run"
        ),
        # With its default counters; with all counters it is close to dcgm.
        unsupported_signals=(
            "sm_active", "sm_occupancy", "fp64_active", "fp32_active", "fp16_active", "int_active",
            "c2c_tx_bytes_per_second", "c2c_rx_bytes_per_second", "enforced_power_limit_watts",
            "clock_event_reasons", "ecc_corrected", "ecc_uncorrected", "recovery_action", "nvlink_errors",
            "temperature_margin_celsius", "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second",
        ),
    ),
    "nvml": SourceEntry(
        opener="exporter.sources.nvml.source:open_nvml",
        location=lambda _: "the driver's own library",
        check="exporter.checkup.telemetry:check_nvml",
        check_seconds=20.0,
        advice="run `nvidia-smi` as this user, or name another source",
        profiling_advice="boards before Hopper have no counters in NVML: install DCGM",
        process_list="exporter.sources.nvml.source:open_nvml_processes",
        limited_variants={"driver": PROFILING_SIGNALS},
    ),
}  # fmt: skip
"""In the order in which `source = "auto"` tries them."""


# -- schedulers --


class SlurmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[slurm]. Unless stated otherwise, empty settings are detected in the same way as by Slurm's own commands."""

    node_name: str = ""
    """This node's NodeName."""
    conf: str = ""
    """slurm.conf; empty: SLURM_CONF, /etc/slurm/slurm.conf, /run/slurm/conf/slurm.conf."""
    spool_dir: str = ""
    """SlurmdSpoolDir, which holds a socket for each running step; empty: from slurm.conf."""
    mapping_dir: str = ""
    """Folder in which the prolog records the job of each GPU; see slurm-prolog.sh. Empty: none."""
    bin_dir: str = ""
    """Folder of scontrol and sinfo; slurmd is in it, in sbin beside it, or on PATH. Empty: all on PATH."""
    timeout_seconds: Positive = 5.0
    """Timeout of one request to the controller in seconds."""
    node_state_seconds: Annotated[float, Meta(ge=0, le=1e6)] = 300.0
    """Seconds between two queries of this node's state, sent only while a GPU is unallocated; 0: never."""
    restd_url: str = ""
    """slurmrestd to query instead of running commands: http://host:port or unix:/path; http:// can be omitted."""
    restd_token_file: str = ""
    """File with the token (JWT) for slurmrestd."""

    def __post_init__(self) -> None:
        force_setattr(self, "restd_url", complete_url(self.restd_url))


class KubernetesSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[kubernetes]."""

    pod_resources_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    """Socket of the kubelet's pod-resources service."""
    refresh_seconds: Positive = 10.0
    """Seconds between two queries of it; a change that the API server reports triggers one at once."""
    resources: tuple[str, ...] = (
        "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*", "volcano.sh/vgpu-number",
    )  # fmt: skip
    """Names of the extended resources that are GPUs; * is any text. The default is what the device plugins of NVIDIA,
    HAMi and Volcano offer."""
    pod_labels: tuple[str, ...] = ()
    """Keys of the pod labels that are exported for each job; none by default, as users write labels."""
    node_name: str = ""
    """This node's name; empty: NODE_NAME, else the host name."""
    api_url: str = "auto"
    """URL of the API server; auto: that of the cluster in which this daemon runs, if any; empty: not queried.
    Without a scheme it is https, because the token is sent to it."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105  a path
    """File with the service account's token for the API server."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """File with the CA certificate of the API server."""

    def __post_init__(self) -> None:
        if self.api_url != "auto":
            force_setattr(self, "api_url", complete_url(self.api_url, scheme="https"))


class MappingDirSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[mapping_dir]."""

    path: str = "/run/gpu-efficiency/jobs"
    """Folder with a file per GPU, named by its index, with one job id per line; as dcgm-exporter's HPC job mapping."""


class SchedulerEntry(Struct, frozen=True, kw_only=True):
    """A scheduler, which knows the job of each GPU."""

    opener: str
    """"module:function": takes the Config, returns a Scheduler, raises SchedulerError."""
    check: str
    """"module:function" of the check that install-check runs."""
    check_seconds: float = 5.0
    """Timeout of that check in seconds."""
    settings: type[Struct] | None = None
    """Class of its section of the configuration; None: no section."""
    environment: tuple[str, ...] = ()
    """Prefixes of the environment variables that affect it."""
    explain_absence: Callable[[Any], str] | None = None
    """Takes its settings, returns why it cannot work on this node, or "". `scheduler = "auto"` calls it before it
    imports the opener, whose libraries may be large."""
    in_pods: bool = False
    """Whether the Helm chart offers it."""
    cluster_opener: str = ""
    """"module:function": takes the Config, returns a ClusterSource for the command `cluster`; "": none."""


def _absent_kubelet(settings: KubernetesSettings) -> str:
    socket = settings.pod_resources_socket
    return "" if may_exist(Path(socket)) else f"no kubelet at {socket}"


SCHEDULERS: dict[str, SchedulerEntry] = {
    "slurm": SchedulerEntry(
        opener="exporter.schedulers.slurm.scheduler:open_slurm",
        settings=SlurmSettings,
        check="exporter.checkup.schedulers:check_slurm",
        check_seconds=15.0,
        environment=("SLURM_CONF", "SLURMD_NODENAME"),
        cluster_opener="exporter.cluster.slurm:open_slurm",
    ),
    "kubernetes": SchedulerEntry(
        opener="exporter.schedulers.kubernetes.scheduler:open_kubernetes",
        settings=KubernetesSettings,
        check="exporter.checkup.schedulers:check_kubernetes",
        check_seconds=12.0,
        explain_absence=_absent_kubelet,
        in_pods=True,
        environment=("NODE_NAME", "KUBERNETES_SERVICE_"),
        cluster_opener="exporter.cluster.kubernetes:open_kubernetes",
    ),
    "mapping-dir": SchedulerEntry(
        opener="exporter.schedulers.mapping_dir:open_mapping_dir",
        settings=MappingDirSettings,
        check="exporter.checkup.schedulers:check_mapping_dir",
    ),
    "processes": SchedulerEntry(
        opener="exporter.schedulers.processes:open_processes",
        check="exporter.checkup.schedulers:check_processes",
        in_pods=True,
    ),
}
"""In the order in which `scheduler = "auto"` tries them; the last opens on any node."""


# -- serving engines --


class EngineEntry(Struct, frozen=True):
    """A serving engine."""

    engine: str
    """"module:name" of its Engine."""
    ports: tuple[int, ...] = ()
    """Default ports of its metrics."""


ENGINES: dict[str, EngineEntry] = {
    "vllm": EngineEntry("exporter.engines.vllm:ENGINE", ports=(8000,)),
    "triton": EngineEntry("exporter.engines.trtllm:TRITON", ports=(8002,)),
    "sglang": EngineEntry("exporter.engines.sglang:ENGINE", ports=(30000,)),
    "trtllm-serve": EngineEntry("exporter.engines.trtllm:SERVE", ports=(8000,)),
    "dynamo": EngineEntry("exporter.engines.dynamo:ENGINE", ports=(8000, 8080, 9090, 8081)),
    "tgi": EngineEntry("exporter.engines.tgi:ENGINE", ports=(80, 3000)),
}
"""The first engine whose metric names are on a page reads it. Dynamo comes after the engines that it runs, because
their pages contain its names too. Ports are tried in this order."""


def engine_ports() -> tuple[int, ...]:
    """The default ports of all engines without duplicates, in the order in which they are tried."""
    return tuple(dict.fromkeys(port for entry in ENGINES.values() for port in entry.ports))
