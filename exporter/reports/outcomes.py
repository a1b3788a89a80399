"""What can become of a message, in fixed words, and the answer to one that is refused."""

import msgspec

OUTCOMES = {
    "taken": "was taken",
    "malformed": "is no message of this version",
    "too_large": "is longer than a message may be",
    "too_many": "came faster than reports.per_second",
    "too_many_connections": "more processes than reports.processes, or many connections of one",
    "busy": "came while the daemon was behind",
    "not_visible": "its sender's process cannot be seen from here",
    "other_process": "was sent by another process than the one that connected",
    "unknown_process": "its sender is of no job that holds a GPU here",
    "replayed": "speaks of time that the process has spoken of",
    "before_start": "speaks of time before the process began",
    "future": "speaks of time to come",
    "old": "is of more than an hour ago",
    "reported": "was found in the log of a job that reports by itself",
}
"""Of a message, what `gpu_efficiency_workload_messages_total{outcome}` counts. Nothing else is counted."""


class RefusedError(Exception):
    """A message or a connection is not taken; the text is the reason, for its sender."""

    def __init__(self, outcome: str, reason: str, *, field: str = "", silent: bool = False) -> None:
        """`outcome` is one of OUTCOMES; `silent`: the sender has just been told."""
        super().__init__(reason)
        self.outcome, self.field, self.silent = outcome, field, silent

    @property
    def packet(self) -> bytes:
        """The answer."""
        return msgspec.json.encode({"error": str(self), "field": self.field})
