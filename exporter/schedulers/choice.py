"""Which scheduler is at home on this node, for `scheduler = "auto"`.

Owns the order and the words that say why. Refuses to change its mind: what opens at the start is kept, so name the
scheduler in the configuration where it may come up later than this daemon.
"""

import logging
from pathlib import Path
from typing import Any

from exporter.schedulers import SCHEDULERS, Scheduler, SchedulerError, open_scheduler

log = logging.getLogger(__name__)


def choose(config: Any) -> Scheduler:
    """Open the scheduler that `config` names, or the first of SCHEDULERS that is at home; raises SchedulerError."""
    if config.scheduler in SCHEDULERS:
        return open_scheduler(config.scheduler, config)
    refusals = []
    for name in SCHEDULERS:
        try:
            _at_home(name, config)
            scheduler = open_scheduler(name, config)
        except SchedulerError as err:
            refusals.append(f"{name}: {err}")
            continue
        log.info("scheduler %s; %s", name, "; ".join(refusals) or "the first that was tried")
        return scheduler
    raise SchedulerError("\n".join(refusals))


def _at_home(name: str, config: Any) -> None:
    """Refuse before 20 MiB of libraries are loaded, which a node without a kubelet has no use for."""
    socket = config.kubernetes.pod_resources_socket
    if name == "kubernetes" and not Path(socket).exists():
        raise SchedulerError(f"no kubelet at {socket}")
