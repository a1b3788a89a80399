"""What came of the attempts of an attack: how many there were, and how each ended."""

import json
import re
from collections import Counter


class Tally:
    """Attempts and outcomes; the outcomes are short texts, so that they can be read as they are."""

    def __init__(self) -> None:
        self.attempts = 0
        self.outcomes: Counter[str] = Counter()

    def attempt(self, number: int = 1) -> None:
        self.attempts += number

    def came(self, outcome: str, number: int = 1) -> None:
        self.outcomes[outcome] += number

    def add(self, other: "Tally") -> None:
        self.attempts += other.attempts
        self.outcomes.update(other.outcomes)

    def dump(self) -> bytes:
        return json.dumps([self.attempts, self.outcomes]).encode()

    @classmethod
    def load(cls, text: bytes) -> "Tally":
        """Read what `dump` wrote; an empty text is that of a process that was ended."""
        tally = cls()
        if text:
            tally.attempts, outcomes = json.loads(text)
            tally.outcomes.update(outcomes)
        return tally


def reason(answer: bytes) -> str:
    """Return why the daemon refused a report: the beginning of what it answered, without numbers."""
    try:
        text = str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        text = answer.decode(errors="replace")
    return "refused: " + re.sub(r"\d+", "N", text)[:50]


def outcome(error: BaseException) -> str:
    """Name how a connection ended."""
    known = {
        ConnectionRefusedError: "refused",
        ConnectionResetError: "reset",
        BrokenPipeError: "reset",
        ConnectionAbortedError: "reset",
        TimeoutError: "no answer in time",
        EOFError: "closed",
    }
    for kind, name in known.items():
        if isinstance(error, kind):
            return name
    return f"{type(error).__name__}: {error}"[:60]
