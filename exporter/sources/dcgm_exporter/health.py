"""A board's condition beside its work, from one page and the one before.

Owns which critical errors are new, and the making of `Health`. Refuses to judge: what an error means is the core's.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from exporter.core.model import Health
from exporter.sources.dcgm_exporter.names import XID_COUNTS
from exporter.sources.dcgm_exporter.page import GpuLines

_AT_MOST = 16
"""Errors of one code told for one page: a board in real trouble says no more with more, and a broken counter cannot
flood the daemon."""
_NVLINK = (
    ("nvlink_crc_flit", "nvlink_crc_data", "nvlink_replay", "nvlink_recovery"),
    ("nvlink_dl_crc", "nvlink_dl_replay", "nvlink_dl_recovery"),
)
"""Two sets of counters for the same errors: the first set of which anything is shown counts."""
_PLAIN: dict[str, Callable[[float], float]] = {
    "recovery_action": int,
    "ecc_corrected": int,
    "ecc_uncorrected": int,
    "row_remap_pending": bool,
    "row_remap_failed": bool,
    "memory_temperature_celsius": float,
    "power_smoothing": bool,
}
"""Fields of `Health` that are one figure of the page, and their types."""


class Xids:
    """The critical errors of one board that came after the first page.

    The gauge (DCGM_FI_DEV_XID_ERRORS) keeps the last error for ever: only its change is news, and the same error again
    is not seen. Where the exporter counts errors by code, the counts speak instead; those within a window fall when
    errors leave it, so that they give the least number of new ones.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] | None = None
        self._counts: dict[str, dict[int, int]] = {}
        self._ahead: Counter[int] = Counter()

    def news(self, gpu: GpuLines) -> tuple[int, ...]:
        """Give the new errors of a page that was collected anew; the first page gives none."""
        first, before = self._last is None, self._last or {}
        counting = next((name for name in XID_COUNTS if name in gpu.xid_counts), "")
        new = self._risen(counting, gpu.xid_counts[counting]) if counting else _changed(before, gpu.xids)
        new = [] if first else new
        # A count may come one collection after the gauge, or its line only with the first error.
        self._last, self._counts, self._ahead = gpu.xids, gpu.xid_counts, Counter(() if counting else new)
        return tuple(new)

    def _risen(self, name: str, counts: dict[int, int]) -> list[int]:
        before = self._counts.get(name, {})
        new: list[int] = []
        for code, count in sorted(counts.items()):
            known = before.get(code, 0)
            restarted = count < known and name == XID_COUNTS[0]
            rise = (count if restarted else count - known) - self._ahead[code]
            if code:
                new += [code] * min(rise, _AT_MOST)
        return new


def _changed(before: dict[str, int], now: dict[str, int]) -> list[int]:
    """Codes on lines that changed; the line of a new instance repeats what the board's others said before."""
    old = set(before.values())
    changed = ((line, code) for line, code in now.items() if code and code != before.get(line))
    return sorted({code for line, code in changed if line in before or code not in old})


def health_of(uuid: str, gpu: GpuLines, xids: tuple[int, ...] = ()) -> Health | None:
    """What the page says of the board's health; None when it says nothing."""
    told = gpu.figures
    figures: dict[str, Any] = {name: kind(told[name]) for name, kind in _PLAIN.items() if name in told}
    errors, margin = _nvlink_errors(told), _margin(told)
    health = Health(uuid, xids=xids, nvlink_errors=errors, temperature_margin_celsius=margin, **figures)
    return None if health == Health(uuid) else health


def _nvlink_errors(told: dict[str, float]) -> int | None:
    for names in _NVLINK:
        shown = [told[name] for name in names if name in told]
        if shown:
            return int(sum(shown))
    return None


def _margin(told: dict[str, float]) -> float | None:
    """Degrees to the slowdown: as DCGM gives them, else what the threshold leaves."""
    if "temperature_margin_celsius" in told:
        return told["temperature_margin_celsius"]
    if {"slowdown_celsius", "temperature_celsius"} <= told.keys():
        return told["slowdown_celsius"] - told["temperature_celsius"]
    return None
