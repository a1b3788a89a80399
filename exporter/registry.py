"""SOURCES, SCHEDULERS and ENGINES: one row for each entry, with all that is special about it.

A row brings the settings of its section of the configuration, where the entry is looked for, its diagnosis for
install-check, and what it cannot measure. The configuration, install-check, `cardinality`, the chart's schema and the
documentation derive from these tables. Rows name code as "module:name", so that it is imported only when it is used.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from exporter.redact import redact_secrets

Positive = Annotated[float, Meta(gt=0, le=1e9)]


def import_object(path: str) -> Any:
    """The object at "module:name"; raises ModuleNotFoundError where a package is missing."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


def section_of(name: str) -> str:
    """The section of the configuration that belongs to the entry called `name`."""
    return name.replace("-", "_")


# -- sources --


class DcgmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[dcgm]."""

    address: str = "localhost:5555"
    """The host engine: host:port, unix:/path, vsock:CID:PORT, or embedded for one of our own."""
    bindings: str = ""
    """Folder of NVIDIA's Python bindings (dcgm_agent.py); empty: where DCGM's packages put them. DCGM_BINDINGS does the
    same."""
    library: str = ""
    """Folder of libdcgm.so; empty: where the bindings look for it themselves."""
    connect_timeout_seconds: Positive = 5.0
    """For one attempt to connect."""


class DcgmExporterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[dcgm_exporter]."""

    url: str = "http://127.0.0.1:9400/metrics"
    """Its metrics page: this node's own exporter, not a load-balanced address."""
    timeout_seconds: Positive = 5.0
    """For one whole page."""
    max_gap_seconds: Positive = 90.0
    """Two scrapes further apart than this do not vouch for the time between them."""
    hostname: str = ""
    """Which host's GPUs to take, where one address answers for several."""
    collect_interval_seconds: Positive = 30.0
    """How often that exporter collects (its -c or DCGM_EXPORTER_INTERVAL, there in milliseconds)."""


PROFILING_SIGNALS = (
    "gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active",
    "fp32_active", "fp16_active", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second",
)  # fmt: skip
"""Fields of a Reading that come from the profiling counters."""


class SourceEntry(Struct, frozen=True, kw_only=True):
    """A source of telemetry."""

    opener: str
    """"module:function": takes the Config, returns a TelemetrySource, raises SourceError."""
    location: Callable[[Any], str]
    """Takes its settings, None where it has none; returns where it is, for people and without secrets."""
    check: str
    """"module:function" of install-check's diagnosis."""
    check_seconds: float
    """After which the diagnosis is given up."""
    advice: str
    """What to do where it cannot be opened or read, if its error does not say."""
    profiling_advice: str
    """What to do where it opens but gives no tensor activity."""
    settings: type[Struct] | None = None
    """Its section of the configuration; None: it has none."""
    environment: tuple[str, ...] = ()
    """Beginnings of the environment variables that change anything for it."""
    process_list: str = ""
    """"module:function" of a ProcessLister that completes the readings of sources without processes; "": none."""
    unsupported_signals: tuple[str, ...] = ()
    """Fields of a Reading or a Health that it does not report of a whole board."""
    limited_variants: Mapping[str, tuple[str, ...]] = {}
    """The same where it is limited, by a name that `cardinality --source` takes."""


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
        # With its default counters; with more of them it comes close to dcgm.
        unsupported_signals=(
            "sm_active", "sm_occupancy", "fp64_active", "fp32_active", "fp16_active", "enforced_power_limit_watts",
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
    """[slurm]. What is empty is found as Slurm's own commands find it."""

    node_name: str = ""
    """This node's NodeName."""
    conf: str = ""
    """slurm.conf; empty: SLURM_CONF, /etc/slurm/slurm.conf, /run/slurm/conf/slurm.conf."""
    spool_dir: str = ""
    """SlurmdSpoolDir, where each running step has a socket; empty: as slurm.conf says."""
    mapping_dir: str = ""
    """Where the prolog writes who holds each GPU; see slurm-prolog.sh. Empty: there is none."""
    bin_dir: str = ""
    """Where scontrol, sinfo and slurmd are; empty: on PATH."""
    timeout_seconds: Positive = 5.0
    """For one question to the controller."""
    node_state_seconds: Annotated[float, Meta(ge=0, le=1e6)] = 300.0
    """Between two questions about this node's state, asked only while a GPU is held by nobody; 0: never asked."""
    restd_url: str = ""
    """slurmrestd to ask instead of commands: http://host:port or unix:/path."""
    restd_token_file: str = ""
    """File with the token for it (JWT)."""


class KubernetesSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[kubernetes]."""

    pod_resources_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    """The kubelet's pod-resources service."""
    refresh_seconds: Positive = 10.0
    """Between two looks at it; a change that the API server tells of is looked at at once."""
    resources: tuple[str, ...] = ("nvidia.com/*",)
    """Which extended resources are GPUs; * is any text."""
    node_name: str = ""
    """This node's name; empty: NODE_NAME, else the host's."""
    api_url: str = "auto"
    """The API server; auto: the cluster this daemon runs in, if it does; empty: it is not asked."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105  a path
    """Of the service account, for the API server."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """The authority that has signed the API server's certificate."""


class MappingDirSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[mapping_dir]."""

    path: str = "/run/gpu-efficiency/jobs"
    """One file a GPU, named by its index, a job id a line; as dcgm-exporter's HPC job mapping."""


class SchedulerEntry(Struct, frozen=True, kw_only=True):
    """What knows which job holds a GPU."""

    opener: str
    """"module:function": takes the Config, returns a Scheduler, raises SchedulerError."""
    check: str
    """"module:function" of install-check's diagnosis."""
    check_seconds: float = 5.0
    """After which the diagnosis is given up."""
    settings: type[Struct] | None = None
    """Its section of the configuration; None: it has none."""
    environment: tuple[str, ...] = ()
    """Beginnings of the environment variables that change anything for it."""
    explain_absence: Callable[[Any], str] | None = None
    """Takes its settings, returns why it cannot work on this node, or "". `scheduler = "auto"` asks before it imports
    the code, whose libraries may be large."""
    in_pods: bool = False
    """The chart offers it."""
    cluster_opener: str = ""
    """"module:function": takes the Config, returns a ClusterSource, for the whole cluster; "": there is none."""


def _absent_kubelet(settings: KubernetesSettings) -> str:
    socket = settings.pod_resources_socket
    return "" if Path(socket).exists() else f"no kubelet at {socket}"


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
    """On which its metrics page is by default."""


ENGINES: dict[str, EngineEntry] = {
    "vllm": EngineEntry("exporter.engines.vllm:ENGINE", ports=(8000,)),
    "triton": EngineEntry("exporter.engines.trtllm:TRITON", ports=(8002,)),
    "sglang": EngineEntry("exporter.engines.sglang:ENGINE", ports=(30000,)),
    "trtllm-serve": EngineEntry("exporter.engines.trtllm:SERVE", ports=(8000,)),
    "dynamo": EngineEntry("exporter.engines.dynamo:ENGINE", ports=(8000, 8080, 9090, 8081)),
    "tgi": EngineEntry("exporter.engines.tgi:ENGINE", ports=(80, 3000)),
}
"""The first whose names a page has reads it: Dynamo's are on the pages of the engines that it runs, which come before.
Their ports are tried in this order."""


def engine_ports() -> tuple[int, ...]:
    """The default ports of all engines, each once, in the order in which they are tried."""
    return tuple(dict.fromkeys(port for entry in ENGINES.values() for port in entry.ports))
