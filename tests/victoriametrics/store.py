"""A plugin of pytest (`-p tests.victoriametrics.store`): the simulated world of the boards lies in VictoriaMetrics.

VictoriaMetrics then evaluates the rules over the whole past, and is asked by the panels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.dashboards import past, world
from tests.e2e.databases import victoria


class Flushed(past.Past):
    """What was written is read at once: VictoriaMetrics itself makes it readable within some seconds."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(f"{client.base_url}", client)
        self._flushed = False

    def write(self, *args: Any) -> None:
        super().write(*args)
        self._flushed = False

    def _get(self, *args: Any, **more: Any) -> Any:
        if not self._flushed:
            self._client.get("/internal/force_flush").raise_for_status()
            self._flushed = True
        return super()._get(*args, **more)


@contextmanager
def _store(folder: Path) -> Iterator[past.Past]:
    with victoria(folder) as client:
        yield Flushed(client)


world.prometheus = _store  # type: ignore[attr-defined,assignment]
