"""Nodes, asked again and again, each on a thread of its own: one that hangs keeps none of the others waiting.

Owns the threads and what was seen last. Refuses to draw, and to forget what a node said when it falls silent: what it
said stays, with since when there is nothing new and why.
"""

import threading
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from exporter.top.asking import Asking, Place, SilentError
from exporter.top.seen import Seen


class Watched:
    """One node: the latest of what is known of it, replaced whole and never changed."""

    def __init__(self, place: Place) -> None:
        self.seen = Seen(address=place.address)
        self.place = place

    def look(self, asking: Asking, job_id: str = "") -> None:
        """Ask once. No failure of the node's leaves here."""
        before = self.seen
        try:
            gpus, jobs, accounts = asking.gpus(), asking.jobs(), asking.accounts()
            receipts = asking.receipts(job_id) if job_id else None
        except SilentError as err:
            since = before.since if before.problem else time.monotonic()
            self.seen = replace(before, problem=str(err), since=since)
        else:
            self.seen = Seen(
                address=before.address,
                gpus=gpus,
                jobs=jobs,
                accounts=accounts,
                receipts=receipts,
                at=time.monotonic(),
            )


class Watch:
    """All of them, for the length of a block; `changed` is called on their threads."""

    def __init__(self, places: Sequence[Place], *, interval: float, changed: Callable[[], None]) -> None:
        self._nodes = [Watched(place) for place in places]
        self._places, self._interval, self._changed = places, interval, changed
        self._stop = threading.Event()
        self._wake = [threading.Event() for _ in places]
        self._job = ""

    @property
    def seen(self) -> tuple[Seen, ...]:
        """In the order of the places."""
        return tuple(node.seen for node in self._nodes)

    def want(self, job_id: str) -> None:
        """Ask for this job's receipts too, and now; empty: for none."""
        if job_id != self._job:
            self._job = job_id
            for wake in self._wake if job_id else ():
                wake.set()

    def start(self) -> None:
        """Begin to ask. The threads end with the program: one may wait for a node for seconds."""
        for node, place, wake in zip(self._nodes, self._places, self._wake, strict=True):
            threading.Thread(target=self._work, args=(node, place, wake), daemon=True).start()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()
        for wake in self._wake:
            wake.set()

    def _work(self, node: Watched, place: Place, wake: threading.Event) -> None:
        with Asking(place) as asking:
            while not self._stop.is_set():
                wake.clear()
                node.look(asking, self._job)
                if not self._stop.is_set():
                    self._changed()
                wake.wait(self._interval)


def once(places: Sequence[Place]) -> tuple[Seen, ...]:
    """Ask each once, all at the same time."""
    nodes = [Watched(place) for place in places]

    def work(node: Watched, place: Place) -> None:
        with Asking(place) as asking:
            node.look(asking)

    threads = [
        threading.Thread(target=work, args=(node, place), daemon=True)
        for node, place in zip(nodes, places, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(node.seen for node in nodes)
