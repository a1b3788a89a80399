"""Reads the configuration: defaults, then a TOML file, then the environment, then flags; frozen once read.

Owns names, types, bounds, and the origin of each value. An unknown key or a wrong type is an error that names its path.
Refuses to open any file but the one given.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, defstruct, structs

from exporter.core.model import SECOND, Spec
from exporter.core.policy import Policy
from exporter.core.prices import NO_PRICE, Price, Terms
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
from exporter.specs import find_spec

PREFIX = "GPU_EFFICIENCY_"
DEFAULT_PORT = 19400
"""dcgm-exporter's 9400 and 10,000: outside 9100-9999, where exporters crowd."""
_SERVICE_LINK = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)$")
"""What Kubernetes itself puts into the environment for a Service called gpu-efficiency."""
if TYPE_CHECKING:  # mypy cannot read choices that are only known at run time
    SourceName = str
    SchedulerName = str
    ClusterSchedulerName = str
else:
    SourceName = Literal[("auto", *SOURCES)]
    SchedulerName = Literal[("auto", *SCHEDULERS)]
    ClusterSchedulerName = Literal[("auto", *(name for name, entry in SCHEDULERS.items() if entry.cluster_opener))]
_LONGEST_LINE = 16_384
"""Characters of a line of the file."""


class ConfigError(Exception):
    """The configuration cannot be used; the message names the place and the reason."""


class WebSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[web]."""

    listen_address: str = f":{DEFAULT_PORT}"
    """host:port; an empty host is every address."""
    page_address: str = ""
    """host:port where alone the page and the JSON API are then served; empty: at listen_address."""
    open_page: bool = False
    """The page and the JSON API to whoever can reach them. false: without authentication only over loopback."""
    config_file: str = ""
    """Web configuration of Prometheus' exporters (YAML): TLS, client certificates, users. Empty: neither."""


class PrivacySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[privacy]: what of people leaves this daemon, in metrics, pages, logs and traces."""

    users: Literal["keep", "hash", "drop"] = "keep"
    """User names as they are, as a keyed hash (the same person, the same hash), or not at all."""
    key_file: str = ""
    """Secret of the hash, the same file on all nodes; needed for hash."""


class SamplingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[sampling]."""

    interval_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 1.0
    """Between two samples; shorter ones measure nothing, for the counters themselves need 100 ms."""
    deadline_seconds: Positive = 10.0
    """A read that takes longer is given up and its time is unobserved."""
    pause_file: str = "/run/gpu-efficiency/pause"
    """While it exists and names a time to come, nothing is read: see `gpu-efficiency pause`."""


class InventorySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[inventory]."""

    expected_gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    """GPUs this node is supposed to have; a lost one is unavailable, and still paid for. 0: those seen before."""
    file: str = ""
    """Where GPUs once seen are remembered across restarts; empty: not remembered."""


class BoardSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """[specs."NVIDIA H100 PCIe"]: a board, by the driver's full name for it.

    What is not given comes from the table, if it has the board. The lower bounds catch figures in TFLOP/s, MHz or GB/s.
    """

    peak_flops: Annotated[float, Meta(ge=1e9, le=1e18)] | None = None
    """Dense 16-bit tensor FLOP/s."""
    peak_flops_tf32: Annotated[float, Meta(ge=1e9, le=1e18)] | None = None
    """Dense, like all of them."""
    peak_flops_fp8: Annotated[float, Meta(ge=1e9, le=1e18)] | None = None
    """Likewise."""
    peak_flops_fp4: Annotated[float, Meta(ge=1e9, le=1e18)] | None = None
    """Likewise."""
    tensor_reference_clock_hz: Annotated[float, Meta(ge=1e6, le=1e11)] | None = None
    """SM clock at which peak_flops holds."""
    memory_bandwidth_bytes_per_second: Annotated[float, Meta(ge=1e6, le=1e15)] | None = None
    """Of the device memory, as sold."""
    nvlink_bytes_per_second: Annotated[float, Meta(ge=1e6, le=1e15)] | None = None
    """One direction, all links."""
    nvlink_domain: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """GPUs that NVLink joins beyond one node's; 0: those of the node."""
    pcie_bytes_per_second: Annotated[float, Meta(ge=1e6, le=1e15)] | None = None
    """One direction."""
    idle_context_watts: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """Board power with a CUDA context and no kernel."""
    dram_ceiling: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The highest dram_active that real copy kernels reach."""
    slices: Annotated[int, Meta(ge=0, le=16)] | None = None
    """MIG compute slices of a whole board."""
    memory_gb: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """As sold."""

    def spec(self, name: str) -> Spec:
        """What holds for the board of that name: these figures over the table's."""
        given = {field: value for field, value in structs.asdict(self).items() if value is not None}
        return structs.replace(find_spec(name) or Spec(name=name), **given)


class HostSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[host]: where this node's own trees are, in a container that has them elsewhere."""

    proc: str = "/proc"
    """The host's process tree."""
    cgroup: str = "/sys/fs/cgroup"
    """The host's control groups."""
    pool: str = ""
    """What kind of capacity this node is, for its price: reserved, spot, ..."""


class WorkloadRule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """[[workload.rules]]: for whoever matches all that is given, regular expressions that fit the whole value."""

    workload_class: Literal["", "batch", "interactive", "serving"] = ""
    """Given to those that fit: how long idling is normal for them."""
    team: str = ""
    """Given to those that fit: who pays."""
    zombie_seconds: Positive | None = None
    """How long such a job may rest before it is a zombie."""
    hang_seconds: Positive | None = None
    """How long it may spin without progress before it hangs."""
    scheduler: str = ""
    """Pattern: slurm, kubernetes, mapping-dir, processes."""
    partition: str = ""
    """Pattern, of Slurm's."""
    qos: str = ""
    """Pattern, of Slurm's."""
    account: str = ""
    """Pattern, of Slurm's."""
    user: str = ""
    """Pattern: the name as the scheduler has it, before privacy.users."""
    namespace: str = ""
    """Pattern, of Kubernetes'."""
    name: str = ""
    """Pattern: the job's, or the pod's owner's."""
    kind: str = ""
    """Pattern: what made it, in one word, such as array, interactive, deployment, jobset."""
    command: str = ""
    """Fits where it is found anywhere in the command line."""
    label: str = ""
    """A pod's label: key=regular expression."""


class WorkloadSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[workload]: what kind of work a job is, and who pays for it."""

    rules: tuple[WorkloadRule, ...] = ()
    """Each of class, team and zombie_seconds comes from the first rule that fits and gives it."""
    defaults: bool = True
    """After these rules come the built-in ones for the class."""


class Exemption(Struct, frozen=True, forbid_unknown_fields=True):
    """[[exemptions]]: jobs that may rest, for a reason and until a day; all patterns that are given must fit."""

    id: Annotated[str, Meta(min_length=1, max_length=63)]
    """A short name, unlike the others."""
    reason: Annotated[str, Meta(min_length=1, max_length=200)]
    """For people: shown with every job that it covers."""
    expires: date
    """From the beginning of that day on, UTC, it exempts nobody, and is told as expired."""
    namespace: str = ""
    """Pattern, of Kubernetes'."""
    job_id: str = ""
    """Pattern: as the metrics have it."""
    partition: str = ""
    """Pattern, of Slurm's."""
    account: str = ""
    """Pattern, of Slurm's."""
    user: str = ""
    """Pattern: the name as the scheduler has it, before privacy.users."""
    name: str = ""
    """Pattern: the job's, or the pod's owner's."""
    qos: str = ""
    """Pattern, of Slurm's."""

    @property
    def expiry(self) -> float:
        """Unix seconds."""
        return datetime.combine(self.expires, time(), UTC).timestamp()


class PriceRow(Struct, frozen=True, forbid_unknown_fields=True):
    """[[prices]]: what a GPU costs. Of the rows that fit, the one that names more wins, then the latest valid one."""

    per_gpu_hour: Annotated[float, Meta(ge=0, le=1e6)]
    """Of a whole GPU; a MIG instance costs its share."""
    currency: Annotated[str, Meta(min_length=1, max_length=15)] = "USD"
    """Any name; one for a cluster, or its costs do not add up."""
    model: str = "*"
    """The driver's full name for the board, or its name in the table of specifications; *: any."""
    pool: str = ""
    """Only on nodes of that pool (host.pool); empty: on any."""
    basis: Literal["paid", "allocated"] = "paid"
    """paid: every second of the GPU costs; allocated: only those in which somebody has it."""
    valid_from: date | None = None
    """From the beginning of that day, UTC; none: always."""

    @property
    def price(self) -> Price:
        """The same for the core."""
        since = 0 if self.valid_from is None else datetime.combine(self.valid_from, time(), UTC).timestamp()
        return Price(self.per_gpu_hour, self.currency, self.model, self.pool, self.basis, int(since) * SECOND)


class EnergySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[energy]: what a kilowatt-hour costs, in money and in carbon dioxide."""

    price_per_kwh: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """Money; not set: energy costs nothing that is told."""
    currency: Annotated[str, Meta(min_length=1, max_length=15)] = "USD"
    """That money's name."""
    grams_co2_per_kwh: Annotated[float, Meta(ge=0, le=1e5)] | None = None
    """Of the grid; not set: no carbon dioxide is told."""


class BudgetSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[budget]: what may be lost before somebody is called; of the whole cluster, and the same on all its nodes."""

    idle_per_hour: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """Money an hour in GPUs that nobody has or that rest; none: nobody is called."""
    currency: Annotated[str, Meta(min_length=1, max_length=15)] = "USD"
    """Without prices it is GPU-hours."""


class ClusterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[cluster]: of `gpu-efficiency cluster` alone."""

    listen_address: str = ":19401"
    """host:port; an empty host is every address."""
    scheduler: ClusterSchedulerName = "auto"
    """Whom to ask; auto: Kubernetes in a pod, else Slurm."""
    refresh_seconds: Annotated[float, Meta(ge=20, le=3600)] = 60.0
    """Between two looks; each asks Slurm's controller three times at most."""
    max_jobs: Annotated[int, Meta(ge=0, le=20_000)] = 2000
    """Running jobs whose placement is told, the largest ones."""


class ReportsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[reports]: what training jobs say of themselves."""

    socket: str = "/run/gpu-efficiency/report.sock"
    """Unix socket (SOCK_SEQPACKET) on which jobs of this node report; empty: none."""
    http: str = ""
    """host:port on loopback for jobs that cannot see the socket; empty: none."""
    per_second: Annotated[float, Meta(gt=0, le=1000)] = 10.0
    """Messages that one process may send."""
    processes: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """That may report at a time."""


class FollowSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[[follow]]: logs of training jobs that say what a report would."""

    framework: Literal["auto", "megatron", "torchtitan", "maxtext", "nanotron", "huggingface"] = "auto"
    """Whose lines they are; auto: told by the lines themselves."""
    path: str = ""
    """Where they are, {job_id} standing for the job's id and * for any text; empty: the standard output of the
    processes on the GPUs, where it is a file."""
    workload_class: Literal["batch", "interactive", "serving"] = "batch"
    """Only of jobs of that class."""


class EngineEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """[[engines.endpoints]]: a serving engine that is not found by itself."""

    url: Annotated[str, Meta(min_length=1)]
    """Its metrics page."""
    job_id: Annotated[str, Meta(min_length=1)]
    """A regular expression that fits the id of its job."""


class ServedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """[engines.models."NAME"]: a model that is served, by the name its engine has for it."""

    active_parameters: Annotated[float, Meta(gt=0, le=1e15)]
    """2 FLOPs a token each, where the engine does not estimate its FLOPs itself."""


class EngineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[engines]: serving engines on this node."""

    enabled: bool = True
    """Whether they are looked for and asked."""
    interval_seconds: Annotated[float, Meta(ge=1, le=300)] = 5.0
    """Between two looks at one engine."""
    timeout_seconds: Positive = 2.0
    """For one page."""
    ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = engine_ports()
    """Tried, of those on which the processes of a serving job listen."""
    endpoints: tuple[EngineEndpoint, ...] = ()
    models: dict[str, ServedModel] = {}


class HistorySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[history]: what is kept on this node's disk, so that nothing is forgotten when the daemon stops."""

    file: str = "auto"
    """The store (SQLite). auto: history.db in the folder that systemd gives the unit (STATE_DIRECTORY), else in
    /var/lib/gpu-efficiency where that may be written, else none. Empty: none."""
    checkpoint_seconds: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    """Between two checkpoints: a power cut loses no more than this. What a scrape was told is saved before it."""
    sample_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """Between two samples of a job's course; of a long job they lie further apart."""
    keep_days: Annotated[float, Meta(gt=0, le=36_500)] = 400.0
    """How long receipts of ended jobs and events are kept."""
    max_mebibytes: Annotated[float, Meta(ge=1, le=1_000_000)] = 200.0
    """The oldest receipts go before the store is larger than this."""


class ReceiptSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[receipts]: where the receipt of a job that has ended is put, so that its user sees it.

    On Slurm an epilog does that, slurm-receipt.sh, which has settings of its own.
    """

    kubernetes: Literal["none", "event", "annotation"] = "none"
    """An Event about the job's pod, or the annotation gpu-efficiency.io/receipt on it; either needs a right more than
    the daemon has else: see docs/receipts-for-users.md."""


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """[log]."""

    format: Literal["text", "json"] = "text"
    """One line an event in either."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """What is less important is not written."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    source: SourceName = "auto"
    """Where telemetry comes from; auto is the first of these, from left to right, that sees the most."""
    scheduler: SchedulerName = "auto"
    """Who says which job holds a GPU; auto is the first of these, from left to right, that is at home on this node."""
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
    reports: ReportsSettings = ReportsSettings()
    follow: tuple[FollowSettings, ...] = ()
    engines: EngineSettings = EngineSettings()
    history: HistorySettings = HistorySettings()
    receipts: ReceiptSettings = ReceiptSettings()
    log: LogSettings = LogSettings()
    policy: Policy = Policy()
    policy_by_model: dict[str, dict[str, Any]] = {}
    """Other thresholds for one model, by the driver's full name or the table's; only in the file."""
    prices: tuple[PriceRow, ...] = ()
    energy: EnergySettings = EnergySettings()
    budget: BudgetSettings = BudgetSettings()
    exemptions: tuple[Exemption, ...] = ()
    specs: dict[str, BoardSettings] = {}
    """Boards the table lacks or has wrong, by the driver's full name; only in the file."""

    def overrides(self) -> Mapping[str, Spec]:
        """The operator's specs, by the driver's full name for the board: they win over the table."""
        return {name: board.spec(name) for name, board in self.specs.items()}

    def terms(self, node: str) -> Terms:
        """What is said of prices and exemptions, for the node of that name."""
        return Terms(
            node=node,
            pool=self.host.pool,
            prices=tuple(row.price for row in self.prices),
            per_kwh=self.energy.price_per_kwh,
            per_kwh_currency=self.energy.currency,
            grams_co2_per_kwh=self.energy.grams_co2_per_kwh,
            idle_budget=self.budget.idle_per_hour,
            idle_budget_currency=self.budget.currency if self.prices else NO_PRICE.currency,
            exemptions=tuple((exemption.id, exemption.reason, exemption.expiry) for exemption in self.exemptions),
        )

    def policies(self) -> Mapping[str, Policy]:
        """The policy of each model that has thresholds of its own."""
        whole = structs.asdict(self.policy)
        return {model: msgspec.convert(whole | own, Policy) for model, own in self.policy_by_model.items()}


def _with_sections(config: type[Struct]) -> type[Struct]:
    """`config` with a section for each source and scheduler that has settings and no typed field above."""
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
"""Sections that a running daemon takes anew, by SIGHUP or where their file has changed; the others need a restart."""


def with_live_settings(current: Config, new: Config, live: Iterable[str] = LIVE) -> Config:
    """What holds after a reload: the live sections of what was read, all else as it is."""
    return structs.replace(current, **{name: getattr(new, name) for name in live})


def changed_settings(current: object, new: object, path: str = "") -> tuple[str, ...]:
    """Dotted names of the settings in which two configurations differ; a list or table that differs is one."""
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
    tree = {} if path is None else _read_file(path)
    _check(tree, where=f"{path}", strict=True)
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX) and not _SERVICE_LINK.match(name, len(PREFIX)):
            _set(tree, _config_key(name), _parse_list(text) if text.startswith("[") else text)
            _check(tree, where=f"environment variable {name}")
    for dotted, value in (flags or {}).items():
        _set(tree, dotted, value)
        _check(tree, where=f"flag --{dotted.replace('_', '-')}")
    return _check(tree, where="configuration")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_check_line_lengths(path.read_text(encoding="utf-8")))
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror or err}") from err
    except ValueError as err:  # of TOML, of UTF-8, or of a number with thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {err}") from err
    except RecursionError as err:
        raise ConfigError(f"{path}: tables or lists inside each other, thousands deep") from err


def _check_line_lengths(text: str) -> str:
    """The same text, if it has lines: a key of a hundred thousand parts would take the parser half a minute."""
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"line {number} has more than {_LONGEST_LINE:,} characters")
    return text


def _check(tree: dict[str, Any], *, where: str, strict: bool = False) -> Config:
    """Not strict: an environment variable's or a flag's number is text."""
    try:
        _check_boards(tree.get("specs"), strict=strict)
        config = msgspec.convert(tree, Config, strict=strict)
        check_rules(config.workload.rules)
        check_exemptions(config.exemptions)
        _check_policies(config)
        split_address(config.web.listen_address)
        if config.web.page_address:
            split_address(config.web.page_address, name="web.page_address")
        _check_privacy(config.privacy)
    except (msgspec.ValidationError, ConfigError) as err:
        raise ConfigError(f"{where}: {err}") from err
    return config


MATCHED = ("scheduler", "partition", "qos", "account", "user", "namespace", "name", "kind")
"""Fields of a WorkloadRule that are fields of an Owner too."""


def check_rules(rules: Iterable[WorkloadRule]) -> None:
    """Raise ConfigError naming the first rule that cannot be used, its field, and why."""
    for index, rule in enumerate(rules):
        where = f"workload.rules[{index}]"
        limits = (rule.zombie_seconds, rule.hang_seconds)
        if not (rule.workload_class or rule.team) and limits == (None, None):
            choices = "workload_class, team, zombie_seconds or hang_seconds"
            raise ConfigError(f"{where}: gives nothing; give it one of {choices}")
        for field in (*MATCHED, "command"):
            _check_pattern(f"{where}.{field}", getattr(rule, field))
        key, equals, pattern = rule.label.partition("=")
        if rule.label and not (key and equals):
            raise ConfigError(f"{where}.label: {rule.label!r} is not key=regular expression (example: app=vllm.*)")
        _check_pattern(f"{where}.label", pattern)


EXEMPTED = ("job_id", "namespace", "partition", "account", "user", "name", "qos")
"""Fields of an Exemption that are fields of an Owner too."""


def check_exemptions(exemptions: Iterable[Exemption]) -> None:
    """Raise ConfigError naming the first exemption that cannot be used, and why."""
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


def _check_privacy(privacy: PrivacySettings) -> None:
    if privacy.users == "hash" and not privacy.key_file:
        raise ConfigError('privacy.users: "hash" needs privacy.key_file, a file with a secret')


def _check_policies(config: Config) -> None:
    """Name the model in an error, as for boards."""
    for model, own in config.policy_by_model.items():
        try:
            msgspec.convert(structs.asdict(config.policy) | own, Policy)
        except msgspec.ValidationError as err:
            raise ConfigError(f'policy_by_model."{model}": {err}') from err


def _check_pattern(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {err}") from err


def _check_boards(boards: object, *, strict: bool) -> None:
    """Name the board in an error, as msgspec does not: to it every key of a table is `[...]`."""
    for name, board in boards.items() if isinstance(boards, dict) else ():
        try:
            msgspec.convert(board, BoardSettings, strict=strict)
        except msgspec.ValidationError as err:
            raise ConfigError(f'specs."{name}": {err}') from err


def _parse_list(text: str) -> list[str]:
    """Items of a TOML list of strings that has no quotes: [a, b]."""
    return [item for item in text.strip("[] ").replace(" ", "").split(",") if item]


def _config_key(name: str) -> str:
    """GPU_EFFICIENCY_WEB_LISTEN_ADDRESS -> web.listen_address; a name without a section stays whole."""
    key = name.removeprefix(PREFIX).lower()
    fields = {f.name: f.type for f in msgspec.structs.fields(Config)}
    sections = [s for s, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Struct)]
    section = max((s for s in sections if key.startswith(s + "_")), key=len, default=None)
    return key if section is None else f"{section}.{key[len(section) + 1 :]}"


def _set(tree: dict[str, Any], dotted: str, value: object) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def split_address(address: str, *, name: str = "web.listen_address") -> tuple[str, int]:
    """Split "host:port", ":port" or "[::1]:port"; raise ConfigError when it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or len(port) > 5 or int(port) > 65535:  # noqa: PLR2004  the last port there is
        raise ConfigError(f"{name}: {address!r} is not host:port (examples: :{DEFAULT_PORT}, 127.0.0.1:0)")
    return host.strip("[]"), int(port)
