"""What is read of the daemon's JSON API. Fields that this view does not use are left out and may come and go.

Owns these shapes. Refuses to fetch, and to format. `tests/top/test_answers.py` holds them against the real app.
"""

from msgspec import Struct

_UNKNOWN = ("unresolved", "unobserved")
"""Outcomes that are neither useful nor a leak."""


class Window(Struct, frozen=True, kw_only=True):
    """A stretch of the latest past: layers 0-1, and GPU-seconds by leak."""

    seconds: float
    gau: float | None = None
    ectr: float | None = None
    emfu: float | None = None
    product: float | None = None
    coverage: float | None = None
    driver_utilization: float | None = None
    leaks: dict[str, float] = {}

    def parts(self) -> list[tuple[str, float]]:
        """(name, share of the paid time) of all that is not nothing and not useful, the largest first."""
        if not self.seconds:
            return []
        shares = ((name, part / self.seconds) for name, part in self.leaks.items() if name != "useful" and part > 0)
        return sorted(shares, key=lambda pair: -pair[1])

    def losses(self) -> list[tuple[str, float]]:
        """The same without time of which nobody can say what it was worth."""
        return [pair for pair in self.parts() if pair[0] not in _UNKNOWN]

    def lost(self) -> float:
        """Share of the paid time that leaked."""
        return sum(share for _, share in self.losses())

    def share(self, name: str) -> float:
        """Of the paid time."""
        return self.leaks.get(name, 0.0) / self.seconds if self.seconds else 0.0


class Owner(Struct, frozen=True, kw_only=True):
    """Who holds a GPU; empty where the scheduler has no word for it."""

    job_id: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    namespace: str = ""
    workload_class: str = ""
    team: str = ""

    @property
    def who(self) -> str:
        """Whom to talk to."""
        return self.user or self.namespace or self.account


class Health(Struct, frozen=True, kw_only=True):
    """A board's condition."""

    last_xid: int | None = None
    recovery_action: int | None = None
    ecc_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    clock_limited_seconds: dict[str, float] = {}


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU, or a MIG instance of one."""

    uuid: str
    index: str
    model: str
    state: str
    last_5_minutes: Window
    last_hour: Window
    reason: str = ""
    state_seconds: float = 0.0
    hang_suspected: bool = False
    hang_confidence: float | None = None
    hang_signs: dict[str, bool] = {}
    owners: list[Owner] = []
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    live: bool = True
    age_seconds: float | None = None
    profile: str = ""
    parent: str = ""
    health: Health = Health()


class Training(Struct, frozen=True, kw_only=True):
    """What a training job reports."""

    step: int | None = None
    mfu: float | None = None
    goodput: float | None = None
    rework_steps: int = 0
    restarts: int = 0
    recovery_seconds: float = 0.0
    checkpoints: int = 0
    loss: float | None = None
    phase_seconds: dict[str, float] = {}


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds below which so many requests stayed."""

    p50: float
    p99: float


class Serving(Struct, frozen=True, kw_only=True):
    """What serving engines say."""

    engine: str = ""
    running: float | None = None
    waiting: float | None = None
    batch_fill: float | None = None
    kv_cache: float | None = None
    preemptions: float = 0.0
    draft_acceptance: float | None = None
    latency_seconds: dict[str, Latency] = {}


class Job(Struct, frozen=True, kw_only=True):
    """One job's part of a node."""

    owner: Owner
    last_5_minutes: Window
    last_hour: Window
    gpus: list[str] = []
    paid_seconds: float = 0.0
    useful_seconds: float = 0.0
    energy_joules: float = 0.0
    started_at: float = 0.0
    first_work_seconds: float | None = None
    training: Training | None = None
    serving: Serving | None = None


class Node(Struct, frozen=True, kw_only=True):
    """The node itself."""

    host: str
    sampled_at: float
    last_5_minutes: Window
    last_hour: Window
    source: str = ""
    simulated: bool = False
    version: str = ""
    age_seconds: float = 0.0
    last_error: str = ""


class Gpus(Struct, frozen=True):
    """Answer of /api/v1/gpus."""

    node: Node
    gpus: list[Gpu]


class Jobs(Struct, frozen=True):
    """Answer of /api/v1/jobs."""

    node: Node
    jobs: list[Job]


class Account(Struct, frozen=True, kw_only=True):
    """A window of the node in money, by currency and leak; None: not known."""

    money: dict[str, dict[str, float]] | None = None


class Accounts(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/node."""

    prices: dict[str, float] = {}
    """What the node's GPUs cost an hour, by currency."""
    last_5_minutes: Account = Account()
    last_hour: Account = Account()

    def lost(self, window: str) -> tuple[float, float, str] | None:
        """What leaks of the price of an hour, that price, and the currency; None where there is not just one."""
        said: Account = getattr(self, window)
        if len(self.prices) != 1 or said.money is None:
            return None
        (currency, price), *_ = self.prices.items()
        parts = said.money.get(currency, {})
        whole = sum(parts.values())
        if not whole:
            return None
        kept = sum(parts.get(name, 0.0) for name in ("useful", *_UNKNOWN))
        return price * (1 - kept / whole), price, currency


class Part(Struct, frozen=True, kw_only=True):
    """What a node says of a job's whole time there. Nanoseconds of GPUs; Unix seconds."""

    node: str
    start: float
    end: float
    running: bool
    paid: int
    parts: dict[str, int] = {}
    energy: dict[str, float] = {}
    money: dict[str, float] = {}
    happened: dict[str, int] = {}


class Receipts(Struct, frozen=True):
    """Answer of /api/v1/receipts."""

    receipts: list[Part]


class Problem(Struct, frozen=True):
    """Why there is no answer, in the daemon's words."""

    detail: str
