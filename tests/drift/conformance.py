"""What every drift test must do: the contract as checks, for the registered tests and for your own.

>>> check_drift_test(MyTest(), same=(january, other_january), shifted=(january, february))  # doctest: +SKIP
"""

from __future__ import annotations

import json
import math
import pickle
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luminosity.drift import DriftHistory, DriftResult, DriftTest
from luminosity.drift.by_key import compare_keys_with
from luminosity.drift.watch.rounds import RoundSettings, compare_round

_LEVEL = 0.01


def check_drift_test(test: DriftTest, same: tuple[Any, Any], shifted: tuple[Any, Any], folder: Path) -> None:
    """Check a test: ``same`` are two samples of one distribution, ``shifted`` two of different ones."""
    steady = check_result(test, test.compare(*same, level=_LEVEL, seed=0).result)
    assert (steady.drift, steady.verdict) == (False, "no drift")
    comparison = test.compare(*shifted, level=_LEVEL, seed=0)
    drifted = check_result(test, comparison.result)
    assert (drifted.drift, drifted.verdict) == (True, "drift")
    assert drifted.effect > steady.effect
    assert test.compare(*shifted, level=_LEVEL, seed=0).result == drifted, "the same samples give the same result"
    check_untested(test)
    check_report_and_history(comparison, folder)
    check_keys(test, same, shifted, folder)
    check_watch(test, same, shifted, folder)


def check_result(test: DriftTest, result: DriftResult) -> DriftResult:
    assert isinstance(result, DriftResult)
    assert (result.test, result.effect_name) == (test.name, test.effect_name)
    assert 0 <= result.p_value <= 1
    assert result.drift == (result.p_value <= result.level)
    assert result.effect <= test.largest_effect
    assert result.is_compared
    assert min(result.reference_rows, result.current_rows) >= 2
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert (plain["drift"], plain["verdict"], plain["p_value"]) == (result.drift, result.verdict, result.p_value)
    assert pickle.loads(pickle.dumps(result)) == result
    assert str(result).startswith(f"{result.verdict}: p = {result.p_value:.4g}")
    assert result.verdict in result._repr_html_()  # pyright: ignore[reportPrivateUsage]
    return result


def check_untested(test: DriftTest) -> None:
    for rows, verdict in (((5, 0), "gone"), ((0, 5), "new"), ((1, 5), "too few rows")):
        result = test.untested(*rows, level=_LEVEL, seed=0)
        assert (result.verdict, result.is_compared, result.drift) == (verdict, False, verdict != "too few rows")
        assert math.isnan(result.effect)
        json.dumps(result.as_dict(), allow_nan=False)


def check_report_and_history(comparison: Any, folder: Path) -> None:
    row = comparison.as_past_test(reference="r", current="c")
    history = DriftHistory(folder / f"{comparison.result.test}.sqlite")
    history.append(row)
    (read,) = history.last("r")
    assert (read.test, read.size, read.size_name) == (row.test, row.size, comparison.result.effect_name)
    assert read.size == comparison.result.effect
    assert read.verdict == "drift"
    comparison.write_report(folder / "report.html", names=("old", "new"), history=[row, read])
    page = (folder / "report.html").read_text()
    assert "Drift" in page
    assert "new against old" in page
    assert "Over time" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert {"rows_read", "rows_skipped"} <= set(comparison.settings())


def check_keys(test: DriftTest, same: tuple[Any, Any], shifted: tuple[Any, Any], folder: Path) -> None:
    reference = {"same": same[0], "shifted": shifted[0], "gone": same[0]}
    found = compare_keys_with(test, reference, {"same": same[1], "shifted": shifted[1]}, by="key", level=_LEVEL)
    assert {key: result.verdict for key, result in found.results.items()} == {
        "gone": "gone",
        "shifted": "drift",
        "same": "no drift",
    }
    assert found.results["same"].level == _LEVEL / 2, "two keys share the level"
    found.write_report(folder / "keys.html")
    assert "2 of 3 values of key drifted" in (folder / "keys.html").read_text()


def check_watch(test: DriftTest, same: tuple[Any, Any], shifted: tuple[Any, Any], folder: Path) -> None:
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    settings = RoundSettings(
        test=test, names=("r", "c"), by="key", level=0.05, now=now, reports=str(folder / "reports")
    )
    reference, current = {"a": same[0], "b": shifted[0]}, {"a": same[1], "b": shifted[1]}
    found = compare_round(reference, current, settings=settings)
    assert {row.key: row.drift for row in found.tests} == {"key=a": False, "key=b": True}
    drifted = next(row for row in found.tests if row.drift)
    assert "Drift" in Path(drifted.report or "").read_text()
    again = compare_round(reference, current, settings=settings)
    assert [row.size for row in again.tests] == [row.size for row in found.tests]
