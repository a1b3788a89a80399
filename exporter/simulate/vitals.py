"""What a simulated board says of its health: nothing is wrong, but for the error with which a GPU falls off the bus.

Owns when it is read. Refuses to influence work or sensors.
"""

from exporter.core.model import Health, Reading
from exporter.simulate.boards import Board
from exporter.simulate.plan import Plan

PERIOD_MS = 10_000
"""As a daemon reads it."""
_OFF_THE_BUS = 79
"""NVIDIA's Xid document: "GPU has fallen off the bus"."""
_SLOWDOWN_CELSIUS = 87.0
_MEMORY_ABOVE_CHIP = 6.0


def vitals(
    plan: Plan, board: Board, uuids: tuple[str, ...], readings: tuple[Reading, ...], *, before: int, now: int
) -> tuple[Health, ...]:
    """Health of the boards that answered, where its time came between two ticks (milliseconds); and a last word."""
    told = [
        Health(uuids[slot], xids=(_OFF_THE_BUS,))
        for slot, moment in sorted(plan.lost_ms.items())
        if before < moment <= now
    ]
    if now // PERIOD_MS > before // PERIOD_MS:
        told += [_well(reading, board, smooths=plan.power_floor > 0) for reading in readings]
    return tuple(told)


def _well(reading: Reading, board: Board, *, smooths: bool) -> Health:
    celsius = reading.temperature_celsius or 0.0
    return Health(
        uuid=reading.uuid,
        recovery_action=0,
        ecc_corrected=0,
        ecc_uncorrected=0,
        row_remap_pending=False,
        row_remap_failed=False,
        nvlink_errors=0 if board.nvlink else None,
        memory_temperature_celsius=celsius + _MEMORY_ABOVE_CHIP,
        temperature_margin_celsius=_SLOWDOWN_CELSIUS - celsius,
        power_smoothing=smooths,
    )
