"""Where receipts of jobs that have ended are put by the daemon itself, as [receipts] says: on Kubernetes.

Owns the wiring: words from exporter.receipt, requests from exporter.schedulers.kubernetes. Slurm's is an epilog's work.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from exporter.config import Config
from exporter.core.statement import Statement

log = logging.getLogger("gpu-efficiency")


def _nowhere(_: Statement) -> None:
    """Nobody has asked for more than the store."""


@contextmanager
def placing(config: Config, node: str) -> Iterator[Callable[[Statement], None]]:
    """What a history is to call with each statement of a job that has ended; it never waits."""
    if config.receipts.kubernetes == "none":
        yield _nowhere
        return
    from exporter.schedulers.kubernetes import access  # noqa: PLC0415  who asks for nothing pays for nothing
    from exporter.schedulers.kubernetes.api import Pace  # noqa: PLC0415  likewise
    from exporter.schedulers.kubernetes.placing import Placing  # noqa: PLC0415  likewise

    server = access(config.kubernetes, os.environ, Pace())
    if server is None:
        log.warning("receipts.kubernetes = %r and no API server is asked: none is placed", config.receipts.kubernetes)
        yield _nowhere
        return
    writer = Placing(server, config.receipts.kubernetes, node=node, say=words)
    try:
        yield writer.place
    finally:
        writer.close()


def words(statement: Statement) -> str:
    """One line of what this life of this node's books has of the job."""
    from exporter.receipt.joining import joined  # noqa: PLC0415  only once a job has ended
    from exporter.receipt.short import line  # noqa: PLC0415  likewise

    return line(joined([statement], job_id=statement.owner.job_id, at=statement.end))
