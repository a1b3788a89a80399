"""The thresholds of timed states for one GPU model and its owner, in nanoseconds and parts per million."""

from msgspec import Struct

from exporter.core.model import MS, PPM, SECOND, Owner
from exporter.core.policy import Policy

MINUTE = 60 * SECOND
TENSOR_JOB = 60_000 * PPM
"""E: a minute of tensor work at the peak, in milliseconds times parts per million: the job uses the tensor cores, and
a busy engine without any other activity is no other kind of work, whatever its power."""
LONG_RUN = 300_000 * PPM
"""E: five minutes of effective work, likewise: shorter programs may run one after another."""
UNLIMITED = 1 << 62
"""A threshold that no credit reaches."""


class Criteria(Struct, frozen=True):
    """The policy of one GPU model, with its timed thresholds in nanoseconds and parts per million."""

    policy: Policy
    hang: int
    hang_peer: int
    hang_suspect: int
    stray_cost: int
    hang_margin: int
    """Nanoseconds of credit that a hang loses before it ends."""
    duty: int
    windows: dict[str, int]
    zombie_margin: int
    """Nanoseconds of credit that a zombie loses before it ends: the mirror of how it began."""
    worked: int
    """Effective work after which a batch job may wait longer, nanoseconds times parts per million."""
    startup_work: int
    """Effective work that ends the start-up of batch jobs, nanoseconds times parts per million."""
    attempts: int
    """Restarts in a row without work after which the job is hung."""
    unowned: int
    allocations_stale: int


def criteria_of(policy: Policy) -> Criteria:
    """Derive the thresholds of `policy`; every duration is rounded to whole milliseconds."""
    wake, duty = _ns(policy.wake_seconds), round(1 / policy.zombie_duty)
    stray = round(PPM * (1 - policy.hang_stray_share) / policy.hang_stray_share)
    hang = _ns(policy.hang_seconds)
    return Criteria(
        policy,
        hang=hang,
        hang_peer=max(hang, _ns(policy.hang_peer_seconds)),
        hang_suspect=_ns(policy.hang_suspect_seconds),
        stray_cost=stray,
        hang_margin=wake * stray // PPM,
        duty=duty,
        windows={
            "batch": _ns(policy.zombie_batch_seconds),
            "interactive": _ns(policy.zombie_interactive_seconds),
            "serving": _ns(policy.zombie_serving_seconds),
        },
        zombie_margin=wake * duty,
        worked=_ns(policy.zombie_worked_seconds) // MS * PPM,
        startup_work=_ns(policy.startup_work_seconds) // MS * PPM,
        attempts=policy.crash_loop_restarts,
        unowned=_ns(policy.unowned_seconds),
        allocations_stale=_ns(policy.allocation_stale_seconds),
    )


def zombie_window(criteria: Criteria, owner: Owner) -> int:
    """Nanoseconds `owner` may idle: its own limit, else its workload class's, else that of batch."""
    if owner.zombie_seconds is not None:
        return _ns(owner.zombie_seconds)
    return criteria.windows.get(owner.workload_class, criteria.windows["batch"])


def hang_window(criteria: Criteria, owner: Owner) -> int:
    """Nanoseconds `owner` may spin before it counts as hung: its own limit, else the policy's."""
    return own_hang_window(owner) or criteria.hang


def own_hang_window(owner: Owner) -> int:
    """The limit that the operator set for the job, in nanoseconds; 0: none."""
    return 0 if owner.hang_seconds is None else _ns(owner.hang_seconds)


def hang_windows(
    criteria: Criteria, *, own: int, longest: int, begun: bool, alone: bool, works: bool, earlier: int
) -> tuple[int, int]:
    """How long a GPU must spin to be hung, and to be suspected to be, in nanoseconds.

    `own`: the limit that the operator set for the job, which then applies to every case, or 0; `longest`: how long the
    job spun before, and then worked; `begun`: it has worked; `alone`: no other GPU of the job does anything else.
    Where one rests, or before the first work, a process may compute or save on the CPU; where one works, the others
    wait for it, and only after twice that time it is taken to work for ever. `earlier`: how long the GPU had spun when
    the last of the others began to spin or to rest, which proves nothing about them.
    """
    policy, suspect = criteria.policy, criteria.hang_suspect
    if own:
        return own, min(own, suspect)
    peer = max(criteria.hang_peer, round(longest * policy.hang_earlier_peer_factor))
    if works and not alone:
        return 2 * peer, peer
    if alone and begun:
        hang = max(criteria.hang, round(longest * policy.hang_earlier_factor))
        return min(hang + earlier, 2 * peer), min(hang, suspect)
    hang = min(peer + earlier, 2 * peer)
    return hang, min(hang, suspect) if alone else hang - peer // 6


def _ns(seconds: float) -> int:
    """Nanoseconds, on whole milliseconds, at least one: a credit with a threshold of 0 would toggle forever."""
    return max(1, round(seconds * 1000)) * MS
