"""Past tests in a SQLite file."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

import luminosity.drift.history as history_module
from luminosity.drift import DriftHistory, MMDTestResult, PastTest, mmd_test
from luminosity.errors import DriftError

_WRITER = """
import sys
from luminosity.drift import DriftHistory, PastTest

for number in range(20):
    test = PastTest("now", "r", "c", "", "RBF", number, None, 0.0, 1.0, 0.05, False, 2, 2)
    DriftHistory(sys.argv[1]).append(test)
"""


@pytest.fixture(scope="module")
def result() -> MMDTestResult:
    rows = np.random.default_rng(0).normal(size=(100, 2))
    return mmd_test(rows[:50], rows[50:] + 2)


def test_what_is_appended_is_found_again(tmp_path: Path, result: MMDTestResult) -> None:
    history = DriftHistory(tmp_path / "drift.sqlite")
    for day in (1, 2, 3):
        time = datetime(2030, 1, day, tzinfo=timezone.utc)
        history.append(PastTest.of(result, reference="r", current=f"c{day}", columns="v", kernel="rbf", time=time))
    history.append(PastTest.of(result, reference="other", current="c", columns="v", settings={"rows": 7}))

    found = history.last("r", "v", "rbf", most=2)
    assert [test.current for test in found] == ["c2", "c3"]
    assert found[1].time == "2030-01-03T00:00:00.000+00:00"
    assert (found[1].p_value, found[1].drift, found[1].mmd2) == (result.p_value, True, result.mmd2)
    assert found[1].threshold == result.null_quantiles[0.95]
    assert history.last("other", "v")[0].settings == {"rows": 7}
    assert history.last("r", "another") == history.last("r", "v", "linear") == []
    assert history.last("r", "v", "rbf")[0].as_dict()["current"] == "c1"


def test_nothing_is_lost_if_two_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "drift.sqlite"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path)]) for _ in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert sorted(test.statistic for test in DriftHistory(path).last("r")) == sorted([*range(20)] * 2)


def test_a_history_that_another_process_is_creating_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: MMDTestResult
) -> None:
    path = tmp_path / "drift.sqlite"
    path.touch()
    makers: list[threading.Thread] = []

    def asked_whose_it_is(database: sqlite3.Connection) -> int:
        answer = database.execute("PRAGMA application_id").fetchone()[0]
        if not makers:  # The other process runs between two queries of this one.
            makers.append(threading.Thread(target=_append, args=(path, result)))
            makers[0].start()
            makers[0].join(0.3)
        return answer

    monkeypatch.setattr(history_module, "_application", asked_whose_it_is)
    assert DriftHistory(path).last("another") == []
    makers[0].join(120)
    assert len(DriftHistory(path).last("r")) == 1


def _append(path: Path, result: MMDTestResult) -> None:
    DriftHistory(path).append(PastTest.of(result, reference="r", current="c", columns=""))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, and long enough to tell " * 100)
    with pytest.raises(DriftError, match=r"notes\.txt: can't be used .* not a database"):
        DriftHistory(tmp_path / "notes.txt")
    with sqlite3.connect(tmp_path / "shop.sqlite") as database:
        database.execute("CREATE TABLE orders (id)")
    with pytest.raises(DriftError, match=r"something else \(tables: orders\)"):
        DriftHistory(tmp_path / "shop.sqlite")
    with pytest.raises(DriftError, match="there is no folder"):
        DriftHistory(tmp_path / "missing" / "drift.sqlite")


def test_a_file_of_version_1_is_converted(tmp_path: Path, result: MMDTestResult) -> None:
    """Its tests get verdicts, and keys that are gone can be added, which have no statistic."""
    path = tmp_path / "drift.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE tests (time TEXT NOT NULL, reference TEXT NOT NULL, current TEXT NOT NULL, columns TEXT NOT "
            "NULL, kernel TEXT NOT NULL, statistic REAL NOT NULL, threshold REAL, mmd2 REAL NOT NULL, p_value REAL NOT "
            "NULL, level REAL NOT NULL, drift INTEGER NOT NULL, reference_rows INTEGER NOT NULL, current_rows INTEGER "
            "NOT NULL, settings TEXT NOT NULL)"
        )
        database.execute("CREATE INDEX tests_of_one_kind ON tests (reference, columns, kernel)")
        database.execute("PRAGMA application_id = 0x4C554D44")
        database.execute("PRAGMA user_version = 1")
        row = ("2026-01-01T00:00:00.000+00:00", "r", "c", "", "rbf", 0.5, None, 0.5, 0.01, 0.05, 1, 10, 20, '{"a": 1}')
        database.execute(f"INSERT INTO tests VALUES ({', '.join('?' * len(row))})", row)
    history = DriftHistory(path)
    (old,) = history.last("r")
    assert (old.verdict, old.key, old.mmd2, old.settings) == ("drift", "", 0.5, {"a": 1})
    gone = replace(PastTest.of(result, reference="r", current="c", key="k=a"), statistic=math.nan, mmd2=math.nan)
    history.append(gone, PastTest.of(result, reference="r", current="c"))
    assert [test.mmd2 for test in history.last("r")] == [0.5, result.mmd2]
    (found,) = history.last("r", key="k=a")
    assert math.isnan(found.mmd2)
    assert found.verdict == "drift"


def test_another_version_is_refused(tmp_path: Path, result: MMDTestResult) -> None:
    path = tmp_path / "drift.sqlite"
    DriftHistory(path).append(PastTest.of(result, reference="r", current="c"))
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 3")
    with pytest.raises(DriftError, match="version 3, expected 2"):
        DriftHistory(path)


def test_an_empty_file_becomes_a_history(tmp_path: Path, result: MMDTestResult) -> None:
    path = tmp_path / "drift.sqlite"
    path.touch()
    history = DriftHistory(path)
    assert history.last("r") == []
    history.append(PastTest.of(result, reference="r", current="c"))
    assert len(history.last("r")) == 1


_OLD_COLUMNS = (
    "time, reference, current, columns, kernel, statistic, threshold, mmd2, p_value, level, drift, reference_rows, "
    "current_rows, settings, key, verdict"
)


def test_older_and_newer_versions_share_a_file(tmp_path: Path) -> None:
    """A version without windows reads and writes the columns that it knows, also after the others were added."""
    path = tmp_path / "drift.sqlite"
    test = PastTest("t1", "r", "c", "", "rbf", 0.5, None, 0.5, 0.01, 0.05, True, 10, 20)
    DriftHistory(path).append(test)
    with sqlite3.connect(path) as database:  # as the older version made the file
        database.execute("DROP INDEX tests_once")
        for name in ("window_start", "window_end", "bandwidth", "floor_mmd2", "report", "recorded_at", "once"):
            database.execute(f"ALTER TABLE tests DROP COLUMN {name}")
    assert DriftHistory(path, read_only=True).last("r") == [test]
    DriftHistory(path).append(replace(test, time="t2", window_end="t2", bandwidth=1.5, once="a"))
    with sqlite3.connect(path) as database:  # as the older version reads and writes
        rows = database.execute(f"SELECT {_OLD_COLUMNS} FROM tests ORDER BY time").fetchall()
        places = ", ".join("?" * len(rows[0]))
        database.execute(f"INSERT INTO tests ({_OLD_COLUMNS}) VALUES ({places})", ("t3", *rows[0][1:]))
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
    assert [(row[0], row[1]) for row in rows] == [("t1", "r"), ("t2", "r")]
    found = DriftHistory(path).last("r")
    assert [(each.time, each.bandwidth, each.window_end) for each in found] == [
        ("t1", None, None),
        ("t2", 1.5, "t2"),
        ("t3", None, None),
    ]


def test_rows_of_one_window_replace_each_other_and_the_oldest_go(tmp_path: Path) -> None:
    history = DriftHistory(tmp_path / "drift.sqlite", limit=20)
    test = PastTest("t", "r", "c", "", "rbf", 0.5, None, 0.5, 0.01, 0.05, True, 10, 20)
    history.append(test)
    for number in range(40):
        for p_value in (0.5, 0.25):
            history.append(replace(test, time=f"t{number:02}", p_value=p_value, once=f"window {number}"))
    found = history.last("r", most=1000)
    kept = [each for each in found if each.once is not None]
    assert 20 <= len(kept) <= 22
    assert kept[-1].time == "t39"
    assert {each.p_value for each in kept} == {0.25}
    assert len(kept) == len({each.once for each in kept})
    assert [each.time for each in found if each.once is None] == ["t"], "lum drift's own rows stay"
    assert [each.time for _, each in history.after(history.newest_number() - 1, "r")] == ["t39"]
