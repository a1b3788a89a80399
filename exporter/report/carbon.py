"""Weighs the carbon intensity of each hour by the energy that was used in it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from exporter.core.prices import CarbonIntensity
from exporter.formatting import format_amount, format_percent


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


def carbon_notes(mean: MeanIntensity, carbon: CarbonIntensity) -> Iterator[str]:
    """Say of how much energy the hours are in no file, and what applies instead."""
    if carbon.hours and mean.hours_unknown:
        without = f"{format_percent(mean.hours_unknown)} of the energy is of hours without a carbon intensity"
        if carbon.otherwise is None:
            yield f"{without}: set grams_co2_per_kwh for them, or complete the file, and its carbon is shown"
        else:
            yield f"{without}: for them it is grams_co2_per_kwh, {format_amount(carbon.otherwise)}"
