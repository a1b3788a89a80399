"""Checks whether /etc/nccl.conf has NCCL time the communication of this node's jobs."""

from collections.abc import Iterator

from exporter.checkup.base import INFO, OK, WARN, CheckContext, Finding, Findings
from exporter.checkup.schedulers import JOBS
from exporter.files import may_exist
from exporter.nccl.settings import PluginSettings, configuration_lines

_CHECK = "communication"


def check_communication(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Report which profiler plugin all jobs of the node load; nothing if its files are not read."""
    if not context.config.nccl.enabled:
        return
    path = context.etc / "nccl.conf"
    settings = PluginSettings(dict(configuration_lines(str(path))))
    if not settings.plugin:
        message = f"{path} has no profiler plugin for NCCL: the communication of jobs is estimated from link traffic"
        yield Finding(JOBS, _CHECK, INFO, message, "`gpu-efficiency nccl` prints how to have it timed")
    elif settings.plugin.startswith("/") and not may_exist(context.root / settings.plugin[1:]):
        message = f"{path} names {settings.plugin}, which does not exist"
        yield Finding(JOBS, _CHECK, WARN, message, "install it: `gpu-efficiency nccl` prints how; NCCL goes on without")
    else:
        message = f"{path} has NCCL load {settings.plugin}; `gpu-efficiency nccl --check` checks the jobs that run"
        yield Finding(JOBS, _CHECK, OK, message)
