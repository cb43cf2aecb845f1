"""A forecast in sentences, for the terminal and the page."""

from __future__ import annotations

from luminosity.operate.cost.bill import money
from luminosity.operate.simulation.fitting import BETWEEN_RUNS
from luminosity.operate.simulation.forecast import Forecast
from luminosity.runs.views import words

__all__ = ["check_sentence", "cost_sentence", "hold_up_sentence", "hours", "main_state", "range_sentence"]

_GOOD_CHECK = 0.1  # a larger difference from the measured run is worth a warning


def hours(seconds: float) -> str:
    """Return a time in hours, or in smaller units below a tenth of an hour.

    >>> hours(18_720), hours(3_600_000), hours(42)
    ('5.2 h', '1,000 h', '42 s')
    """
    if seconds < 360:
        return words.duration(seconds)
    return f"{seconds / 3600:,.1f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def range_sentence(forecast: Forecast) -> str:
    """Return the range of times over all seeds, with what two equal runs differ by."""
    low, _, high = forecast.seconds
    return (
        f"{hours(low)} to {hours(high)}: {len(forecast.outcomes)} simulations, and {BETWEEN_RUNS:.0%} between two runs"
    )


def cost_sentence(forecast: Forecast) -> str:
    """Return what it would cost."""
    bill = forecast.bill
    if bill is None:
        return "not known: the record does not say what a worker has; say cores= and ram= with --pool"
    return f"{money(bill.total, bill.currency)} ({money(bill.low, bill.currency)} to {money(bill.high, bill.currency)})"


def hold_up_sentence(forecast: Forecast) -> str:
    """Return what holds the run back."""
    hold_up = forecast.hold_up
    if not hold_up.pool:
        return (
            f"no pool is full: the fullest is {words.percent(hold_up.busy)} busy. Starts of workers, loads of models "
            "and stages that wait for others take the rest"
        )
    said = (
        f"pool {hold_up.pool}: its workers are {words.percent(hold_up.busy)} busy, mostly with "
        f"{words.shortened(hold_up.stage, 50)}"
    )
    if hold_up.doubled_seconds is None:
        return said
    return f"{said}; with twice as many of them it takes {hours(hold_up.doubled_seconds)}"


def check_sentence(forecast: Forecast) -> str:
    """Return how well the simulation explains the measured run itself."""
    check = forecast.check
    said = (
        f"the simulation of the measured run itself takes {words.duration(check.simulated_seconds)}; it took "
        f"{words.duration(check.measured_seconds)}"
    )
    difference = check.measured_seconds - check.simulated_seconds
    if difference > 0:
        said += f", and the {words.duration(difference)} that are missing are added"
    if abs(difference) > _GOOD_CHECK * check.measured_seconds:
        said += ". That is much: measure a longer run for a better forecast"
    return said


def main_state(states: dict[str, float]) -> str:
    """Return what a stage did for most of its time.

    >>> main_state({"busy": 0.7, "starved by Read": 0.3}), main_state({})
    ('busy 70%, starved by Read 30%', 'done at once')
    """
    said = ", ".join(f"{name} {words.percent(share)}" for name, share in list(states.items())[:2])
    return said or "done at once"
