"""Assigns GPUs by the labels of a dcgm-exporter's page, where `scheduler = "auto"` finds no scheduler.

That is second-hand: the page has the pod that the kubelet named to dcgm-exporter, or the job of its mapping directory,
and nothing else. Such owners have the scheduler DCGM_EXPORTER. Sources: dcgm-exporter's internal/pkg/transformation
(kubernetes.go, hpc.go, const.go).
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from exporter.core.model import UNKNOWN_JOB, Allocation, Device, Fault, Owner
from exporter.registry import SCHEDULERS
from exporter.schedulers.base import Scheduler, SchedulerState
from exporter.schedulers.kubernetes.objects import pod_owner
from exporter.schedulers.mapping_dir import JOBS_PER_GPU, job_of_line
from exporter.schedulers.processes import ProcessesScheduler
from exporter.schedulers.rules import Rules
from exporter.workloads import OwnerLabels

log = logging.getLogger(__name__)
DCGM_EXPORTER = "dcgm-exporter"
"""`Owner.scheduler` of an owner that only a dcgm-exporter's page names."""
_POD, _NAMESPACE = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}"), re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Names of pods and of namespaces (Kubernetes, "Object Names and IDs"), at most as long as these may be."""
_UNKNOWN = Owner(UNKNOWN_JOB, DCGM_EXPORTER, name="the page of dcgm-exporter does not tell")


class PageOwners:
    """Turns the owner labels of successive pages into scheduler states."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self._held: dict[tuple[str, str], Allocation] = {}
        self._named = False
        """A page has named owners."""

    def poll(
        self, now: int, devices: Sequence[Device], labels: Mapping[str, Collection[OwnerLabels]] | None
    ) -> SchedulerState | None:
        """Return one allocation per owner and GPU, and once, with `end=now`, each that has ended.

        `labels` is `ReadResult.owner_labels`. A GPU without an owner on a page that has such labels is unallocated. A
        page without any tells nothing: before the first one that has them the result is None, and afterwards
        UNKNOWN_JOB holds all GPUs, because the mapping may be off. An owner holds a GPU from the first page that names
        it.
        """
        if labels is None or not (labels or self._named):
            self._held = {}
            return None
        if not self._named:
            self._named = True
            log.info("no scheduler is here: the labels of dcgm-exporter's page name the owners of GPUs, at second hand")
        faults: list[Fault] = []
        present: dict[tuple[str, str], Owner] = {}
        for device in devices:
            if device.unpartitioned or device.condition == "missing":
                continue
            owners = self._owners(device, labels.get(device.uuid, ()), faults) if labels else (_UNKNOWN,)
            present |= {(device.uuid, owner.job_id): owner for owner in owners}
        counts = Counter(job for _, job in present)
        ended = [structs.replace(held, end=now) for key, held in self._held.items() if key not in present]
        self._held = {
            key: Allocation(key[0], owner, self._held[key].start if key in self._held else now, gpus=counts[key[1]])
            for key, owner in present.items()
        }
        return SchedulerState((*self._held.values(), *ended), now, faults=tuple(faults))

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: each poll applies the rules to all owners."""
        self._rules = rules

    def _owners(self, device: Device, labels: Iterable[OwnerLabels], faults: list[Fault]) -> list[Owner]:
        """Return the GPU's owners; UNKNOWN_JOB if it has some and none is valid."""
        named = sorted(each for each in labels if each.pod or each.hpc_job)
        valid = [owner for owner in map(_owner, named[:JOBS_PER_GPU]) if owner is not None]
        if len(valid) < len(named):
            faults.append(_refused(device, named))
        return [self._rules.apply(owner) for owner in valid] if valid or not named else [_UNKNOWN]


def open_page_owners(config: Any, scheduler: Scheduler) -> PageOwners | None:
    """Return what reads the labels; None if `scheduler` is configured, or is more than the last that `auto` tries."""
    if config.scheduler in SCHEDULERS or scheduler.name != ProcessesScheduler.name:
        return None
    return PageOwners(Rules(config.workload, config.exemptions))


def _owner(labels: OwnerLabels) -> Owner | None:
    """Return the job of the mapping directory, or else the pod, in which that job may run; None if it is neither."""
    if labels.hpc_job:
        job = job_of_line(labels.hpc_job)
        return Owner(job, DCGM_EXPORTER) if job else None
    if _POD.fullmatch(labels.pod) and _NAMESPACE.fullmatch(labels.namespace):
        return structs.replace(pod_owner(labels.namespace, labels.pod), scheduler=DCGM_EXPORTER)
    return None


def _refused(device: Device, named: Sequence[OwnerLabels]) -> Fault:
    invalid = next((each for each in named if _owner(each) is None), None)
    why = f"{len(named)} owners, more than {JOBS_PER_GPU}"
    if invalid is not None:
        text = invalid.hpc_job or f"{invalid.namespace}/{invalid.pod}"
        why = f"the owner {text[:40]!r}, which is no pod and no job"
    return Fault("scheduler_refused", f"dcgm-exporter's page gives GPU {device.index} {why}", device.uuid)
