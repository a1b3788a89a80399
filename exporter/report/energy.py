"""Computes what energy cost and emitted, by leak; weighs the carbon intensity of each hour by the energy used in it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from exporter.core.prices import JOULES_PER_KWH, CarbonIntensity
from exporter.formatting import format_amount, format_percent
from exporter.report.model import WaterfallPart

Amounts = Mapping[str, float]
"""By leak, useful, unresolved, unobserved."""


def with_energy(
    parts: Iterable[WaterfallPart], joules: Amounts, *, money: Amounts | None, grams: Amounts | None
) -> tuple[WaterfallPart, ...]:
    """Return the parts with their energy, what it cost and the CO2 that it emitted; as they are if none is by leak."""
    if not joules:
        return tuple(parts)
    return tuple(
        replace(
            part,
            energy_kwh=joules.get(part.name, 0.0) / JOULES_PER_KWH,
            energy_money=UNSET if money is None else money.get(part.name, 0.0),
            co2_kg=UNSET if grams is None else grams.get(part.name, 0.0) / 1000,
        )
        for part in parts
    )


class EnergyInterval(NamedTuple):
    """Energy that was used evenly from `start` to `end`, Unix seconds."""

    start: float
    end: float
    joules: float


class MeanIntensity(NamedTuple):
    """The carbon intensity of some energy."""

    grams_per_kwh: float | None
    """None if it is not known of all hours."""
    hours_unknown: float
    """Share of the energy that was used in hours for which there is no value of their own."""


def mean_intensity(intervals: Iterable[EnergyInterval], carbon: CarbonIntensity) -> MeanIntensity:
    """Return the mean of the hours in which the energy was used, weighted by it."""
    if not carbon.hours:
        return MeanIntensity(carbon.otherwise, 0.0)
    joules = grams = unknown = 0.0
    for interval in intervals:
        mean, share = carbon.mean_of_hours(interval.start, interval.end)
        joules += interval.joules
        grams += mean * interval.joules
        unknown += share * interval.joules
    if not joules:
        return MeanIntensity(carbon.otherwise, 0.0)
    if unknown and carbon.otherwise is None:
        return MeanIntensity(None, unknown / joules)
    return MeanIntensity((grams + unknown * (carbon.otherwise or 0.0)) / joules, unknown / joules)


def carbon_notes(hours_unknown: float, carbon: CarbonIntensity) -> Iterator[str]:
    """Say of how much energy the hours are in no file, and what applies instead."""
    if carbon.hours and hours_unknown:
        without = f"{format_percent(hours_unknown)} of the energy is of hours without a carbon intensity"
        if carbon.otherwise is None:
            yield f"{without}: set grams_co2_per_kwh for them, or complete the file, and its carbon is shown"
        else:
            yield f"{without}: for them it is grams_co2_per_kwh, {format_amount(carbon.otherwise)}"
