"""GPU-hours and money that no job is billed for: free GPUs, those out of service, those that are not seen.

Owns their names and how they are asked for: with what jobs held they are all GPU-hours that are owned.
"""

from dashboards.series import hours, part, total

NOBODY = {"idle_allocation": "free GPUs", "unavailable": "GPUs out of service", "unobserved": "free GPUs, not seen"}
"""By what books them."""
SILENT = "GPUs not reporting"
_LOSSES = ("idle_allocation", "unavailable")
_OWNED, _HEARD = "cluster:gpu_efficiency_owned:gpus", "cluster:gpu_efficiency_heard:gpus"
_TIME, _COST = "cluster_leak:gpu_efficiency_unheld_seconds:rate5m", "cluster_leak:gpu_efficiency_cost_unheld:per_hour"
_SILENT_COST = "cluster:gpu_efficiency_cost_silent:per_hour"
_SILENT_TIME = f"clamp_min({hours(_OWNED)} - ({hours(_HEARD)} or 0 * {hours(_OWNED)}), 0)"
ALL_TIME = f"({hours(part('cluster', 'paid'))} + {_SILENT_TIME})"
"""GPU-hours of everything that is owned, whether it was heard or not."""


def named(label: str, value: str, expr: str) -> str:
    """An expression with one more label."""
    return f'label_replace({expr}, "{label}", "{value}", "", "")'


def _of(leak: str) -> str:
    return f'leak="{leak}"'


def nobodys_hours(label: str, prefix: str = "") -> str:
    """GPU-hours over the time shown, each with its name under that label."""
    heard = (named(label, prefix + said, hours(_TIME, _of(leak))) for leak, said in NOBODY.items())
    return " or ".join((*heard, named(label, prefix + SILENT, _SILENT_TIME)))


def nobodys_money(label: str, prefix: str = "") -> str:
    """What they cost, by currency."""
    heard = (named(label, prefix + said, hours(_COST, _of(leak), by="currency")) for leak, said in NOBODY.items())
    return " or ".join((*heard, named(label, prefix + SILENT, hours(_SILENT_COST, by="currency"))))


def nobodys_loss(label: str, prefix: str = "") -> str:
    """The part of it that was lost: what is not seen may be anything."""
    lost = ((NOBODY[leak], hours(_COST, _of(leak), by="currency")) for leak in _LOSSES)
    return " or ".join(named(label, prefix + said, money) for said, money in lost)


def nobodys_gpus() -> list[tuple[str, str]]:
    """Their names, and GPUs at each moment."""
    now, heard = total(_OWNED, time=""), total(_HEARD, time="")
    free = [(said, f"{total(_TIME, _of(leak), time='')} or 0 * {now}") for leak, said in NOBODY.items()]
    return [*free, (SILENT, f"clamp_min({now} - ({heard} or 0 * {now}), 0)")]
