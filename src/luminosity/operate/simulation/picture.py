"""A forecast as sentences, for the terminal, and as a page: workers and rows over time, waits, and all inputs."""

from __future__ import annotations

from luminosity.operate.cost.bill import money
from luminosity.operate.simulation.fitting import BETWEEN_RUNS
from luminosity.operate.simulation.forecast import Forecast
from luminosity.operate.simulation.simulator import Point
from luminosity.report_page.axes import Frame, drawing
from luminosity.report_page.document import document, headline, section, table
from luminosity.report_page.markup import Markup, element
from luminosity.runs.views import words

__all__ = ["check_sentence", "cost_sentence", "hold_up_sentence", "hours", "main_state", "page", "range_sentence"]
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


_WIDTH, _HEIGHT = 940.0, 300.0  # pixels
_FRAME = Frame(left=64, top=52, right=916, bottom=244)
_SHORT_S = 600.0  # below this, the axis counts seconds
_LONG_S = 7200.0  # and from this on, hours


def page(forecast: Forecast, title: str) -> str:
    """Return the whole page."""
    median = forecast.seconds[1]
    facts = [
        ("time", hours(median), range_sentence(forecast)),
        ("cost", cost_sentence(forecast).partition(" (")[0], cost_sentence(forecast).partition(" (")[2].rstrip(")")),
        ("most workers", f"{sum(forecast.middle.most_workers.values()):,}", _pools(forecast)),
        ("lost workers", f"{forecast.middle.lost_workers:,}", "each is replaced"),
    ]
    said = f"Held back by {hold_up_sentence(forecast)}." if forecast.hold_up.pool else _sentence(forecast)
    measured = f"simulated from run {forecast.run}"
    parts = [headline(f"{title}: {hours(median)}", "steady", measured, said, facts)]
    parts.append(
        section(
            "Workers over time",
            "The solid line is the number of workers that are up or start; the dashed line those that run a bundle.",
            *(_workers_chart(forecast, pool.name) for pool in forecast.workload.pools),
        )
    )
    parts.append(section("Work over time", "The part of the work of all stages that is done.", _work_chart(forecast)))
    parts.append(
        section(
            "What stages wait for",
            "How each stage spends its time until it is done, and the time of workers that it takes.",
            table(("stage", "pool", "worker hours", "its time goes to"), _stage_rows(forecast), ("worker hours",)),
        )
    )
    rows = [(i.name, i.value, "measured" if i.is_measured else "assumed", i.note) for i in forecast.inputs]
    parts.append(
        section(
            "Inputs",
            f"Each number is measured, or assumed because you gave it or the record does not know it. As a check, "
            f"{check_sentence(forecast)}.",
            table(("input", "value", "source", "note"), rows),
        )
    )
    bill = forecast.bill
    if bill is not None:
        notes = element("ul", *(element("li", text) for text in (*bill.reasons, *bill.notes)))
        parts.append(section("Cost", cost_sentence(forecast), notes))
    return document(title, parts)


def _sentence(forecast: Forecast) -> str:
    said = hold_up_sentence(forecast)
    return f"{said[0].upper()}{said[1:]}."


def _pools(forecast: Forecast) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in forecast.middle.most_workers.items())


def _stage_rows(forecast: Forecast) -> list[tuple[str, str, str, str]]:
    rows = forecast.workload.rows
    return [
        (
            words.shortened(stage.label, 48),
            stage.pool,
            f"{stage.seconds_per_row * rows / 3600:,.2f}",
            main_state(forecast.middle.states[stage.id]),
        )
        for stage in forecast.workload.stages
    ]


def _workers_chart(forecast: Forecast, pool: str) -> Markup:
    points = forecast.middle.points
    up = _from_start([(point.seconds, float(point.workers[pool])) for point in points])
    busy = _from_start([(point.seconds, point.busy[pool]) for point in points])
    most = max(value for _, value in up)
    return _chart(f"workers of pool {pool}", points, most, [(up, "outline reference"), (busy, "outline current")])


def _work_chart(forecast: Forecast) -> Markup:
    points = forecast.middle.points
    line = [(0.0, 0.0), *((point.seconds, 100 * point.done) for point in points)]
    return _chart("percent", points, 100.0, [(line, "outline reference")])


def _chart(
    title: str, points: tuple[Point, ...], most: float, lines: list[tuple[list[tuple[float, float]], str]]
) -> Markup:
    end = max(points[-1].seconds, 1e-3)
    unit, name = (1.0, "seconds") if end < _SHORT_S else (60.0, "minutes") if end < _LONG_S else (3600.0, "hours")
    x, y = _FRAME.x(0, end / unit), _FRAME.y(0, max(most, 1.0) * 1.04)
    parts = [_FRAME.y_axis(y, title), _FRAME.x_axis(x, name)]
    for line, kind in lines:
        path = "M" + "L".join(f"{x(at / unit):.1f} {y(value):.1f}" for at, value in line)
        parts.append(element("path", d=path, class_=kind))
    return drawing(_WIDTH, _HEIGHT, f"{title} over time", *parts)


def _from_start(values: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line that begins at the start.

    >>> _from_start([(1.0, 4.0), (2.0, 5.0)])
    [(0.0, 4.0), (1.0, 4.0), (2.0, 5.0)]
    """
    return [(0.0, values[0][1]), *values]
