"""Histories and alerts as plain values for a page."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from luminosity.drift import DriftHistory, PastTest
from luminosity.drift.watch.page_data import drift_data, histories
from luminosity.drift.watch.state import Alert, KeyState, WatchMemory, load_state, state_file, state_to_change
from luminosity.errors import DriftError

_TEST = PastTest("2030-01-01T00:00:00.000+00:00", "r", "c", "v", "rbf", 0.5, 0.1, 0.5, 0.01, 0.05, True, 10, 20)


def test_a_page_gets_series_states_and_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMINOSITY_DRIFT_DIR", str(tmp_path))
    path = tmp_path / "shop.sqlite"
    window = {"window_start": "2030-01-01T00:00:00+00:00", "window_end": "2030-01-02T00:00:00+00:00"}
    DriftHistory(path).append(
        replace(_TEST, key="language=de", report="de.html", **window),
        replace(_TEST, key="language=en", drift=False, verdict="gone", statistic=nan, mmd2=nan),
    )
    alert = Alert(_TEST.time, "shop", "r", "language=de", "drift", "drift began", window=("a", "b"))
    with state_to_change(state_file(path)) as state:
        state.watches["shop"] = WatchMemory("r", {"language=de": KeyState(is_drift=True)})
        state.alerts.append(alert)
    (tmp_path / "broken.sqlite").write_text("not a database" * 100)

    found = drift_data()
    german, english = found["histories"]
    assert (german["reference"], german["key"], german["state"]) == ("r", "language=de", "drift")
    assert german["rows"][0]["window"] == list(window.values())
    assert (german["rows"][0]["is_drift"], german["rows"][0]["report"]) == (True, "de.html")
    assert (english["state"], english["rows"][0]["statistic"], english["rows"][0]["verdict"]) == (None, None, "gone")
    assert [each["message"] for each in found["alerts"]] == ["drift began"]
    assert [Path(each["file"]).name for each in found["damaged"]] == ["broken.sqlite"]
    assert json.loads(json.dumps(found, allow_nan=False))["histories"] == histories([path])
    assert load_state(state_file(path)).alerts == [alert]


def test_a_state_of_a_newer_version_is_read_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"watches": {"a": {"cursor": 7, "later": 1, "keys": {"k": {"novel": 2}}}}, "more": 3}))
    state = load_state(path)
    assert (state.watches["a"].cursor, state.watches["a"].keys) == (7, {"k": KeyState()})
    path.write_text("[]")
    with pytest.raises(DriftError, match=r"state\.json: found no state of a watch .* move the file away"):
        load_state(path)


def test_without_a_watch_tests_say_when_drift_began_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "stream.sqlite"
    drifts = (False, True, True, False, True)
    tests = [
        replace(_TEST, time=f"2030-01-0{day}T00:00:00.000+00:00", drift=each) for day, each in enumerate(drifts, 1)
    ]
    DriftHistory(path).append(*tests, replace(_TEST, time="2030-01-09T00:00:00.000+00:00", drift=False, verdict="gone"))
    said = [(each["time"][:10], each["kind"], each["p_value"]) for each in drift_data([path])["alerts"]]
    assert said == [
        ("2030-01-05", "drift", 0.01),
        ("2030-01-04", "resolved", 0.01),
        ("2030-01-02", "drift", 0.01),
    ]
    with state_to_change(state_file(path)) as state:  # a watch says it itself
        state.watches["shop"] = WatchMemory("r", {"": KeyState(is_drift=True)})
    assert drift_data([path])["alerts"] == []
