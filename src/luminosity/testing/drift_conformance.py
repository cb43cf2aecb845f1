"""Checks whether a drift test keeps the contract: in memory, by key, in a report, in a history and in a watch."""

from __future__ import annotations

import json
import math
import pickle
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luminosity.drift.by_key import compare_keys_with
from luminosity.drift.contract import Comparison, DriftTest
from luminosity.drift.history import DriftHistory
from luminosity.drift.result import DriftResult
from luminosity.drift.watch.rounds import RoundSettings, compare_round

__all__ = ["check_drift_test"]

_LEVEL = 0.01
_NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def check_drift_test(test: DriftTest, same: tuple[Any, Any], shifted: tuple[Any, Any], folder: Path) -> None:
    """Raise ``AssertionError`` unless a test keeps the contract of ``luminosity.drift.DriftTest``.

    Args:
        test: the test, with its options.
        same: two samples of one distribution, as the test reads them; it must find no drift at a level of 0.01.
        shifted: two samples of different distributions; it must find drift.
        folder: an existing folder for the reports and histories that are written, such as pytest's ``tmp_path``.
    """
    steady = _check_result(test, test.compare(*same, level=_LEVEL, seed=0).result)
    _equal(steady.verdict, "no drift", "the verdict on two samples of one distribution")
    comparison = test.compare(*shifted, level=_LEVEL, seed=0)
    drifted = _check_result(test, comparison.result)
    _equal(drifted.verdict, "drift", "the verdict on two samples of different distributions")
    _true(drifted.effect > steady.effect, "the effect is larger with drift than without")
    again = test.compare(*shifted, level=_LEVEL, seed=0).result
    _true(again == drifted, "the same samples and the same seed give the same result")
    _check_options(test)
    _check_untested(test)
    _check_report_and_history(comparison, folder)
    _check_keys(test, same, shifted, folder)
    _check_watch(test, same, shifted, folder)


def _check_result(test: DriftTest, result: Any) -> DriftResult:
    _true(isinstance(result, DriftResult), "a comparison has a DriftResult")
    _equal((result.test, result.effect_name), (test.name, test.effect_name), "test and effect_name of the result")
    _true(0 <= result.p_value <= 1, "the p-value is from 0 to 1")
    _equal(result.drift, result.p_value <= result.level, "drift, with this p-value and level")
    _true(result.effect <= test.largest_effect, "the effect is at most largest_effect")
    _true(result.is_compared and min(result.reference_rows, result.current_rows) >= 2, "rows were compared")
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    names = ("drift", "verdict", "p_value")
    _equal([plain[name] for name in names], [getattr(result, name) for name in names], "as_dict()")
    _true(pickle.loads(pickle.dumps(result)) == result, "a result can be pickled")
    _equal(str(result).partition(",")[0], f"{result.verdict}: p = {result.p_value:.4g}", "the start of str(result)")
    _true(result.verdict in result._repr_html_(), "a notebook shows the verdict")  # pyright: ignore[reportPrivateUsage]
    return result


def _check_options(test: DriftTest) -> None:
    names = [option.name for option in test.options]
    _equal(sorted(set(names)), sorted(names), "the names of the options, each once")
    for option in test.options:
        _true(option.name.isidentifier() and bool(option.meaning), f"the option {option.name!r} has a meaning")
    made = type(test).from_options({}, _LEVEL)
    _true(isinstance(made, type(test)), "from_options returns a test, also without options")


def _check_untested(test: DriftTest) -> None:
    for rows, verdict in (((5, 0), "gone"), ((0, 5), "new"), ((1, 5), "too few rows")):
        result = test.untested(*rows, level=_LEVEL, seed=0)
        found = result.verdict, result.is_compared, result.drift, math.isnan(result.effect)
        _equal(found, (verdict, False, verdict != "too few rows", True), f"the result of {rows} rows, untested")
        json.dumps(result.as_dict(), allow_nan=False)


def _check_report_and_history(comparison: Comparison[Any], folder: Path) -> None:
    result, row = comparison.result, comparison.as_past_test(reference="r", current="c")
    history = DriftHistory(folder / f"{result.test}.sqlite")
    history.append(row)
    (read,) = history.last("r")
    found = read.test, read.size, read.size_name, read.verdict
    _equal(found, (result.test, result.effect, result.effect_name, "drift"), "the row of a history")
    comparison.write_report(folder / "report.html", names=("old", "new"), history=[row, read])
    page = (folder / "report.html").read_text()
    for text in ("Drift", "new against old", "Over time"):
        _true(text in page, f"the report says {text!r}")
    _true("http://" not in page.replace("http://www.w3.org", ""), "the report loads nothing from the network")
    _true({"rows_read", "rows_skipped"} <= set(comparison.settings()), "settings() has rows_read and rows_skipped")


def _check_keys(test: DriftTest, same: tuple[Any, Any], shifted: tuple[Any, Any], folder: Path) -> None:
    reference = {"same": same[0], "shifted": shifted[0], "gone": same[0]}
    found = compare_keys_with(test, reference, {"same": same[1], "shifted": shifted[1]}, by="key", level=_LEVEL)
    verdicts = {key: result.verdict for key, result in found.results.items()}
    _equal(verdicts, {"gone": "gone", "shifted": "drift", "same": "no drift"}, "the verdict on each key")
    _equal(found.results["same"].level, _LEVEL / 2, "the level of one of two keys, which share it")
    found.write_report(folder / "keys.html")
    _true("2 of 3 values of key drifted" in (folder / "keys.html").read_text(), "the report counts the keys")


def _check_watch(test: DriftTest, same: tuple[Any, Any], shifted: tuple[Any, Any], folder: Path) -> None:
    settings = RoundSettings(
        test=test, names=("r", "c"), by="key", level=0.05, now=_NOW, reports=str(folder / "reports")
    )
    reference, current = {"a": same[0], "b": shifted[0]}, {"a": same[1], "b": shifted[1]}
    found, again = (compare_round(reference, current, settings=settings).tests for _ in range(2))
    _equal({row.key: row.drift for row in found}, {"key=a": False, "key=b": True}, "the drift of each key in a watch")
    drifted = next(row for row in found if row.drift)
    _true("Drift" in Path(drifted.report or "").read_text(), "a watch writes a report of a key that drifted")
    _equal([row.size for row in again], [row.size for row in found], "the effects of a second round")


def _equal(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: found {found!r}, expected {expected!r}")


def _true(is_true: bool, what: str) -> None:
    if not is_true:
        raise AssertionError(f"expected that {what}")
