"""``lum drift``, as people and schedulers run it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from luminosity.cli.main import main
from luminosity.drift import PCA, DriftHistory, mmd_test
from tests.processes import wait_for
from tests.warm import run_module

_RANDOM = np.random.default_rng(0)
_OLD = _RANDOM.normal(size=(400, 8)).astype(np.float32)
_SAME = _RANDOM.normal(size=(300, 8)).astype(np.float32)
_NEW = np.concatenate([_SAME[:250], _SAME[250:] + 3])


def table(rows: Any, **columns: Any) -> pa.Table:
    vectors = pa.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])
    return pa.table({"id": range(len(rows)), "text": [f"text {n}" for n in range(len(rows))], "v": vectors, **columns})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("old", _OLD), ("same", _SAME), ("new", _NEW)):
        pq.write_table(table(rows), f"{name}.parquet")
        np.save(f"{name}.npy", rows)
    return tmp_path


def lum(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("luminosity.cli.main", "drift", *arguments)


def test_the_exit_code_says_whether_there_is_drift() -> None:
    same = lum("old.parquet", "same.parquet", "--column", "v")
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.startswith("no drift: p = 0.")
    assert "· 400 rows against 300 ·" in same.stdout
    assert same.stdout.count("\n") == 1
    new = lum("old.npy", "new.npy", "--json")
    assert (new.returncode, new.stderr) == (3, "")
    assert json.loads(new.stdout)["drift"] is True


def test_json_has_the_result_of_the_library_and_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--permutations=199", "--level=0.1", "--seed=3", "--kernel=rbf", "--components=4"]
    assert main(["drift", "old.parquet", "new.npy", "--column=v", *arguments]) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    pca = PCA.fit(np.concatenate([_OLD, _NEW]), 4)
    expected = mmd_test(pca.transform(_OLD), pca.transform(_NEW), permutations=199, level=0.1, seed=3)
    settings, _ = found.pop("settings"), found.pop("seconds")
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert (settings["columns"], settings["kernel"], settings["width"], settings["components"]) == ("v", "rbf", 8, 4)
    assert settings["rows_read"] == [400, 300]
    assert captured.err == ""


@pytest.mark.parametrize("kernel", ["laplacian", "linear", "polynomial", "aggregate"])
def test_every_kernel_detects_a_shift(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "old.npy", "new.npy", f"--kernel={kernel}"]) == 3
    assert capsys.readouterr().out.startswith("drift: p = 0.000999, MMD² = ")


def test_patterns_formats_and_columns_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for part in range(3):
        pq.write_table(pa.table({"a": _OLD[part::3, 0], "b": (_OLD[part::3, 1] * 10).astype(int)}), f"part-{part}.pq")
    rows = [{"b": int(row[1] * 10), "a": float(row[0])} for row in _NEW]
    Path("new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), "new.csv")
    for current in ("new.jsonl", "new.csv"):
        assert main(["drift", "part-*.pq", current, "--column=a", "--column=b", "--json"]) == 3
        found = json.loads(capsys.readouterr().out)
        assert (found["reference_rows"], found["settings"]["columns"], found["settings"]["width"]) == (400, "a, b", 2)


def test_csv_with_semicolons_tabs_and_other_encodings(capsys: pytest.CaptureFixture[str]) -> None:
    for delimiter, name in ((";", "new.csv"), ("\t", "new.tsv"), (":", "other.csv")):
        lines = [f"größe{delimiter}b\n", *(f"{a}{delimiter}{b}\n" for a, b in _NEW[:, :2].tolist())]
        Path(name).write_text("".join(lines), encoding="cp1252")
    for current, options in (("new.csv", []), ("new.tsv", []), ("other.csv", ["--delimiter=:"])):
        arguments = ["--column=größe,b", "--encoding=cp1252", "--json", *options]
        assert main(["drift", current if options else "new.csv", current, *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["p_value"] > 0.5
    Path("comma.csv").write_text("b;c\n" + "".join(f"{a};{b}\n".replace(".", ",") for a, b in _NEW[:, :2].tolist()))
    assert main(["drift", "comma.csv", "comma.csv", "--column=b,c", "--decimal-comma"]) == 0
    capsys.readouterr()
    # The options are for the sample that is CSV.
    pq.write_table(pa.table({"b": _NEW[:, 1]}), "n.parquet")
    assert main(["drift", "n.parquet", "new.csv", "--column=b", "--encoding=cp1252"]) == 0
    capsys.readouterr()
    assert main(["drift", "old.parquet", "new.parquet", "--delimiter=tab"]) == 2
    assert "found --delimiter, which is for CSV, but no CSV file" in capsys.readouterr().err


def test_the_unit_of_columns_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    """Ages moved by one standard deviation; incomes, which are larger numbers, did not move."""
    random = np.random.default_rng(2)
    for name, shift in (("before", 0), ("after", 12)):
        years, incomes = random.normal(40 + shift, 12, 300), random.normal(50_000, 20_000, 300)
        pq.write_table(pa.table({"years": years, "income": incomes}), f"{name}.parquet")
    assert main(["drift", "before.parquet", "after.parquet", "--column=years,income"]) == 3
    assert main(["drift", "before.parquet", "after.parquet", "--column=income"]) == 0
    assert capsys.readouterr().err == ""


def test_wide_rows_are_projected(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(1)
    for name in ("a", "b"):
        np.save(f"{name}.npy", random.normal(size=(200, 70)).astype(np.float16))
    assert main(["drift", "a.npy", "b.npy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["components"] == 50
    assert main(["drift", "a.npy", "b.npy", "--json", "--components=0"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["components"] is None


def test_very_wide_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Components of few wide rows need no covariance matrix; many wide rows are refused at once."""
    np.save("wide.npy", np.random.default_rng(1).normal(size=(40, 20_000)).astype(np.float32))
    assert main(["drift", "wide.npy", "wide.npy", "--json", "--report=wide.html"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["components"] == 50
    monkeypatch.setattr("luminosity.drift.samples._WIDEST", 7)
    assert main(["drift", "old.npy", "new.npy", "--components=2"]) == 1
    assert "the rows have 8 numbers" in capsys.readouterr().err


def test_decimals_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for name, values in (("before", _OLD), ("after", _NEW)):
        prices = pa.array(values[:, 0]).cast(pa.decimal128(12, 3), safe=False)
        pq.write_table(pa.table({"price": prices}), f"{name}.parquet")
    assert main(["drift", "before.parquet", "after.parquet", "--column=price"]) == 3
    assert capsys.readouterr().err == ""


def test_drift_is_reported_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["drift", "old.npy", "new.npy"]) == 3
    assert b"MMD^2" in output.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_failed_report_leaves_the_old_one_and_no_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    Path("drift.html").write_text("of yesterday")
    monkeypatch.setattr("luminosity.drift.contract.page", interrupted)
    options = ["--report=drift.html", "--history=drift.sqlite"]
    assert main(["drift", "old.npy", "new.npy", *options]) == 130
    assert Path("drift.html").read_text() == "of yesterday"
    assert not Path("drift.sqlite").exists()
    assert capsys.readouterr().err == "lum drift: interrupted\n"


@pytest.mark.parametrize(("option", "file", "code"), [("--report", "d.html", 2), ("--history", "d.sqlite", 1)])
def test_a_folder_that_can_not_be_written_is_an_error_before_the_work(
    option: str, file: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "locked").mkdir()
    allowed = os.access  # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and allowed(path, mode))
    assert main(["drift", "gone.npy", "new.npy", f"{option}=locked/{file}"]) == code
    assert f"locked/{file}: can't " in capsys.readouterr().err


def test_the_exit_code_stays_if_the_output_is_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "luminosity.cli.main", "drift", "old.npy", "new.npy"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=280, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, b"")


def test_the_exit_code_stays_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["drift", "old.npy", "new.npy"]) == 3


def test_the_report_of_an_array_shows_its_numbers() -> None:
    np.save("one.npy", _OLD[:, 0])
    np.save("far.npy", _OLD[:, 0] + 7)
    assert main(["drift", "one.npy", "far.npy", "--report=drift.html"]) == 3
    assert "<th>value</th>" in Path("drift.html").read_text()
    assert main(["drift", "old.npy", "new.npy", "--report=drift.html"]) == 3
    assert "… 8 numbers]" in Path("drift.html").read_text()


def test_columns_of_different_names_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"w": _SAME.tolist()}), "renamed.parquet")
    assert main(["drift", "old.parquet", "renamed.parquet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["columns"] == "v against w"


def test_rows_draws_random_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["drift", "old.parquet", "new.parquet", "--rows=100", "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out.partition("}\n{")[0] + "}")
    assert (found["reference_rows"], found["current_rows"]) == (100, 100)
    assert found["settings"]["rows_read"] == [400, 300]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.parquet", "new.parquet"], "no table file matches gone.parquet"),
        (["gone*.npy", "new.npy"], "no file matches gone*.npy"),
        (["old.parquet", "new.parquet", "--column=w"], "can't read the column 'w': "),
        (
            ["old.parquet", "new.parquet", "--column=text"],
            "column 'text' holds string, expected vectors or numbers; use one of id, v",
        ),
        (
            ["old.parquet", "tags.parquet", "--column=v"],
            "tags.parquet: column 'v' holds list<element: string>, expected",
        ),
        (["old.npy", "narrow.npy"], "rows of 8 numbers, the current sample of 3"),
        (
            ["old.npy", "new.npy", "--components=9"],
            "found 9 components to compare, expected at most 8: the rows have 8 numbers; lower --components",
        ),
        (["old.npy", "new.npy", "--history=old.npy"], "old.npy: can't be used as a history"),
        (["old.npy", "one.npy"], "one.npy has one row to compare; expected at least 2"),
        (["old.npy", "words.npy"], "words.npy: holds <U1, expected real numbers"),
        (["old.npy", "text.npy"], "text.npy: can't be read as a NumPy array"),
        (["old.npy", "empty.npy"], "empty.npy: can't be read as a NumPy array; it is damaged, cut off, or"),
        (["old.npy", "cut.npy"], "cut.npy: can't be read as a NumPy array; it is cut off"),
        (["old.npy", "objects.npy"], "it holds Python objects, which are not unpickled"),
        (
            ["old.npy", "tokens.npy"],
            "tokens.npy: has 3 dimensions (2, 3, 8), expected 2: one row per example; if these are",
        ),
        (["old.npy", "arrays.npy"], "arrays.npy is a folder, expected a NumPy file"),
        (["arrays.npy/in", "new.npy"], "use a quoted pattern: 'arrays.npy/in/*.npy'"),
        (["none.csv", "new.npy"], "none.csv is empty, expected a header; check what wrote it"),
        (["torn.parquet", "new.npy"], "torn.parquet: can't be read as parquet: it is damaged, incomplete"),
        (["notes.txt", "new.npy"], "optionally followed by .gz, .bz2, .zst, .lz4; or in .npy for NumPy arrays"),
        (["ab-*.csv", "new.npy", "--column=a"], "./ab-1.csv, line 2: found 'x' in column 'a', expected"),
        (["ab-*.jsonl", "new.npy", "--column=a"], "those of ./ab-0.jsonl; the line is"),
        (["hollow.parquet", "hollow.parquet"], "hollow.parquet has rows without numbers"),
        (["old.npy", "nan.npy"], "nan.npy: found NaN or infinity in row 7 (counted from 0)"),
        (["old.parquet", "null.parquet"], "null.parquet: found null in row 5 (counted from 0) of v"),
        (["old.parquet", "inner.parquet"], "inner.parquet: found NaN or infinity in row 1 (counted from 0) of v"),
        (["old.parquet", "ragged.parquet"], "ragged.parquet: row 2 (counted from 0) of column 'v' has 3 numbers"),
    ],
)
def test_errors_say_what_is_wrong_and_exit_with_1(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = _NEW.copy()
    broken[7, 2] = np.nan
    np.save("nan.npy", broken)
    np.save("narrow.npy", _NEW[:, :3])
    np.save("one.npy", _NEW[:1])
    np.save("words.npy", np.array(["a", "b"]))
    Path("text.npy").write_text("no array")
    Path("empty.npy").touch()
    np.save("objects.npy", np.array([{}, None]), allow_pickle=True)
    np.save("tokens.npy", _NEW[:6].reshape(2, 3, 8))
    Path("cut.npy").write_bytes(Path("new.npy").read_bytes()[:-100])
    Path("arrays.npy/in").mkdir(parents=True)
    np.save("arrays.npy/in/0.npy", _NEW)
    Path("none.csv").touch()
    Path("notes.txt").write_text("no table")
    for number, value in enumerate(["1", '"x"']):
        Path(f"ab-{number}.csv").write_text(f"a\n{value}\n{value}\n")
        Path(f"ab-{number}.jsonl").write_text(f'{{"a": {value}}}\n')
    whole = Path("new.parquet").read_bytes()
    Path("torn.parquet").write_bytes(bytes(len(whole) // 2) + whole[len(whole) // 2 :])
    pq.write_table(pa.table({"v": [["a", "b"]] * 3}), "tags.parquet")
    pq.write_table(pa.table({"v": pa.array([[], []], pa.list_(pa.float32()))}), "hollow.parquet")
    vectors = _NEW.tolist()
    pq.write_table(pa.table({"v": [*vectors[:5], None, *vectors[5:]]}), "null.parquet")
    pq.write_table(pa.table({"v": [vectors[0], [None, *vectors[1][1:]]]}), "inner.parquet")
    pq.write_table(pa.table({"v": [*vectors[:2], [1.0, 2.0, 3.0]]}), "ragged.parquet")
    assert main(["drift", *words]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("lum drift: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not re.search(
        r"\b(columns|schema|format|null_values|allow_pickle)=", captured.err
    )  # spellings for Python, not for the command
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["old.npy", "new.npy", "--column=v"], "--column is for tables"),
        (["old.parquet", "new.parquet", "--column=v,id,v"], "--column=v,id,v: found 'v' twice"),
        (
            ["plain.parquet", "new.parquet"],
            "plain.parquet has no column of vectors, expected one; its columns are a; use --column to name the column",
        ),
        (
            ["old.npy", "new.npy", "--bandwidth=1", "--kernel=linear"],
            "found a bandwidth with the kernel linear, which has none; remove the bandwidth",
        ),
        (["old.npy", "new.npy", "--permutations=10"], "found 10 permutations, expected at least 19"),
        (["old.npy", "new.npy", "--report=no/drift.html"], "--report=no/drift.html: expected the name of a file"),
        (
            ["", "new.npy"],
            "REFERENCE is empty, expected a file, a folder or a pattern; perhaps a shell variable is not set",
        ),
        (["old.parquet", "new.parquet", "--column=,"], "--column=,: expected the name of a column"),
    ],
)
def test_wrong_options_exit_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"a": [1.0, 2.0]}), "plain.parquet")
    assert main(["drift", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lum drift: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_skip_missing_leaves_out_rows(capsys: pytest.CaptureFixture[str]) -> None:
    vectors: list[Any] = _NEW.tolist()
    vectors[:0] = [None, None]
    vectors[100][3] = float("inf")
    pq.write_table(pa.table({"v": vectors}), "null.parquet")
    assert main(["drift", "old.parquet", "null.parquet", "--skip-missing", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["current_rows"] == 299
    assert found["settings"]["rows_skipped"] == [0, 3]
    assert main(["drift", "old.parquet", "null.parquet", "--skip-missing"]) == 3
    assert "0 and 3 rows with missing values skipped" in capsys.readouterr().out
    assert main(["drift", "old.parquet", "new.parquet", "--skip-missing"]) == 3
    assert "skipped" not in capsys.readouterr().out


def test_skip_missing_by_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    """A table with missing values only is an error, as it is without ``--by``: its keys are not gone."""
    pq.write_table(table(_NEW, k=["a"] * len(_NEW)), "full.parquet")
    part, none = _NEW.copy(), np.full_like(_NEW, np.nan)
    part[:2] = np.nan
    pq.write_table(table(part, k=["a"] * len(_NEW)), "part.parquet")
    pq.write_table(table(none, k=["a"] * len(_NEW)), "nan.parquet")
    assert main(["drift", "full.parquet", "part.parquet", "--by=k", "--column=v", "--skip-missing"]) == 0
    assert "0 and 2 rows with missing values skipped" in capsys.readouterr().out
    assert main(["drift", "full.parquet", "nan.parquet", "--by=k", "--column=v", "--skip-missing"]) == 1
    assert "nan.parquet has no rows to compare, and 300 with missing values" in capsys.readouterr().err


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["old.npy"],
        ["old.npy", "new.npy", "--kernel=best"],
        ["old.npy", "new.npy", "--rows=1"],
        ["old.npy", "new.npy", "--level=2"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(["drift", *words])
        assert exit.value.code == 2
    assert "'2': expected a number between 0 and 1" in capsys.readouterr().err


def test_the_report_shows_other_columns_and_past_tests(capsys: pytest.CaptureFixture[str]) -> None:
    for part in range(2):
        rows = _NEW[part * 150 : (part + 1) * 150]
        pq.write_table(table(rows, note=[f"<i>{part * 150 + n}</i>" for n in range(150)]), f"new-{part}.parquet")
    options = ["--report=drift.html", "--history=drift.sqlite", "--rows=290"]
    assert main(["drift", "old.parquet", "same.parquet", *options]) == 0
    assert main(["drift", "./old.parquet", "new-*.parquet", *options]) == 3
    assert main(["drift", "old.parquet", "new.parquet", *options, "--kernel=linear"]) == 3
    assert main(["drift", "old.parquet", "new-*.parquet", *options]) == 3
    page = Path("drift.html").read_text()
    shown = [number for number in range(300) if f"&lt;i&gt;{number}&lt;/i&gt;" in page]
    assert shown
    assert min(shown) >= 250  # the rows that were moved
    assert all(f"<td>{number - 150}</td>" in page for number in shown)  # the position in the second file
    assert "new-1.parquet" in page
    assert "The last 3 tests" in page  # the test with another kernel is left out
    assert "<i>" not in page
    with sqlite3.connect("drift.sqlite") as database:
        found = database.execute("SELECT drift, kernel, current FROM tests ORDER BY time").fetchall()
    assert [row[:2] for row in found] == [(0, "rbf"), (1, "rbf"), (1, "linear"), (1, "rbf")]
    assert found[0][2] == os.path.abspath("same.parquet")
    assert capsys.readouterr().err == ""


def languages(name: str, **counts: int) -> None:
    """Write a table with these numbers of rows of each language; rows of "moved" are far from all others."""
    random = np.random.default_rng(len(counts) * 1000 + sum(counts.values()))
    keys = [language for language, count in counts.items() for _ in range(count)]
    rows = random.normal(size=(len(keys), 5)) + [[9.0 if key.endswith("!") else 0.0] for key in keys]
    written = pa.array([None if key == "none" else key.rstrip("!") for key in keys], pa.string())
    pq.write_table(table(rows, language=written, note=[f"note {n}" for n in range(len(keys))]), f"{name}.parquet")


def test_by_a_column_says_what_is_gone_and_new(capsys: pytest.CaptureFixture[str]) -> None:
    languages("january", de=80, en=90, fr=30, nl=3, none=20)
    languages("february", de=70, **{"en!": 60}, it=25, nl=3, none=20)
    options = ["--by=language", "--report=d.html", "--history=d.sqlite"]
    assert main(["drift", "january.parquet", "february.parquet", *options]) == 3
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("drift: 3 of 6 values of language drifted · 223 rows against 178 · ")
    verdicts = [
        "fr      gone: no rows in the current sample, 30 rows in the reference",
        "it      new: no rows in the reference, 25 rows in the current sample",
        "en      drift: p = 0.000999, ",
        "nl      too few rows to tell: 3 against 3 can't give p <= 0.0125",
        "(none)  no drift: ",
        "de      no drift: ",
    ]
    found = [next((row for row in rows if row.strip().startswith(each)), "") for each in verdicts]
    assert all(found)
    assert rows.index(found[0]) == 0
    assert main(["drift", "january.parquet", "february.parquet", *options, "--json"]) == 3
    whole = json.loads(capsys.readouterr().out)
    assert (whole["drift"], whole["verdict"], whole["by"], whole["level"]) == (True, "drift", "language", 0.05)
    by_key = {each["key"]: each for each in whole["keys"]}
    assert by_key.keys() == {"de", "en", "fr", "it", "nl", None}
    assert (by_key["fr"]["verdict"], by_key["fr"]["drift"], by_key["fr"]["mmd2"]) == ("gone", True, None)
    assert by_key["de"]["level"] == 0.05 / 4
    page = Path("d.html").read_text()
    assert "3 of 6 values of language drifted (drift: 1, gone: 1, new: 1, too few rows: 1, no drift: 2)" in page
    assert '<td>fr</td><td class="drifted">gone</td>' in page
    assert "The last 2 tests" in page
    assert re.search(r"<td>note (8|9|1[0-6])\d</td>", page)  # the rows of "en": row numbers are those of the file
    past = DriftHistory("d.sqlite").last(os.path.abspath("january.parquet"), "v", "rbf", key="language=fr")
    assert [(test.verdict, test.drift, test.reference_rows) for test in past] == [("gone", True, 30)] * 2


def test_by_a_column_without_drift_or_with_few_rows(capsys: pytest.CaptureFixture[str]) -> None:
    languages("january", de=80, en=3)
    languages("february", de=70, en=2)
    languages("few", de=2, en=1)
    assert main(["drift", "january.parquet", "february.parquet", "--by=language", "--rows=60"]) == 0
    assert capsys.readouterr().out.startswith("no drift: 0 of 2 values of language drifted")
    assert main(["drift", "few.parquet", "few.parquet", "--by=language"]) == 4
    captured = capsys.readouterr()
    assert captured.out.startswith("too few rows to tell: 0 of 2")
    assert "REFERENCE and CURRENT are the same file" in captured.err
    assert (
        main(["drift", "few.parquet", "january.parquet", "--by=language", "--level=0.0001", "--permutations=10000"])
        == 4
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["old.npy", "new.npy", "--by=a"], "--by=a is for tables, but old.npy is a NumPy array"),
        (["old.parquet", "new.parquet", "--by=v"], "column 'v' holds .* expected texts, numbers or dates as keys"),
        (
            ["texts.parquet", "numbers.parquet", "--by=k", "--column=v"],
            "column 'k' holds texts in .*and numbers or dates",
        ),
        (["old.parquet", "new.parquet", "--by=langauge"], "langauge"),
    ],
)
def test_wrong_keys_are_errors(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(table(_NEW, k=["1"] * len(_NEW)), "texts.parquet")
    pq.write_table(table(_NEW, k=[1] * len(_NEW)), "numbers.parquet")
    assert main(["drift", *arguments]) in (1, 2)
    assert re.search(match, capsys.readouterr().err)


def test_the_same_rows_and_too_few_rows_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("shuffled.npy", np.random.default_rng(1).permutation(_NEW))
    assert main(["drift", "new.npy", "shuffled.npy", "--report=d.html"]) == 0
    assert "no drift: p = 1, " in (out := capsys.readouterr()).out
    assert "; both samples have the same rows · " in out.out
    assert out.err == ""
    assert "Both samples have the same rows" in Path("d.html").read_text()
    assert main(["drift", "new.npy", "./new.npy", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["same_rows"] is True
    assert captured.err == "lum drift: REFERENCE and CURRENT are the same file or pattern: new.npy\n"
    np.save("three.npy", _NEW[:3])
    np.save("others.npy", _NEW[:3] + 100)
    assert main(["drift", "three.npy", "others.npy", "--report=d.html"]) == 4
    assert capsys.readouterr().out.startswith("too few rows to tell: 3 against 3 can't give p <= 0.05")
    assert "<h1>Too few rows</h1>" in Path("d.html").read_text()


def test_ctrl_c_ends_the_command() -> None:
    rows = np.random.default_rng(0).normal(size=(200_000, 20)).astype(np.float32)
    np.save("large.npy", rows)
    np.save("other.npy", rows)
    command = [sys.executable, "-m", "luminosity.cli.main", "drift", "large.npy", "other.npy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert wait_for(lambda: "large.npy" in Path(f"/proc/{process.pid}/maps").read_text(), 120)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert (process.returncode, out, errors) == (130, "", "lum drift: interrupted\n")


def _people(count: int, paid: float, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    plans = random.choice(["free", "paid"], count, p=[1 - paid, paid])
    return pa.table({"age": random.normal(40, 9, count), "plan": plans, "land": ["de", "fr"] * (count // 2)})


def test_each_column_of_a_table_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, paid, seed in (("january", 0.3, 1), ("same", 0.3, 2), ("february", 0.6, 3)):
        pq.write_table(_people(400, paid, seed), f"{name}.parquet")
    columns = ["--test", "columns"]
    assert main(["drift", "january.parquet", "same.parquet", *columns]) == 0
    assert re.match(r"no drift: p = \S+, none of 3 columns drifted, the nearest to it is ", capsys.readouterr().out)
    arguments = [*columns, "--history=h.sqlite", "--report=r.html", "--json"]
    assert main(["drift", "january.parquet", "february.parquet", *arguments]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["drifted"], found["settings"]["test"]) == ("drift", ["plan"], "columns")
    assert found["settings"]["rows_read"] == [400, 400]
    (row,) = DriftHistory("h.sqlite").last(str(tmp_path / "january.parquet"), kernel="columns")
    assert (row.test, row.size, row.size_name) == ("columns", found["effect"], "distance")
    page = Path("r.html").read_text()
    assert "Each column" in page
    assert "plan ◆" in page
    assert main(["drift", "january.parquet", "february.parquet", *columns, "--by=land", "--report=k.html"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("drift: 2 of 2 values of land drifted · 400 rows against 400 · ")
    assert "  de  drift: p = " in out
    assert "land: de" in Path("k.html").read_text()
    assert main(["drift", "old.npy", "new.npy", *columns]) == 3
    assert "of 8 columns drifted" in capsys.readouterr().out
    for option in ("--rows=10", "--skip-missing", "--kernel=rbf", "--permutations=200"):
        assert main(["drift", "old.npy", "new.npy", *columns, option]) == 2
        said = f"found {option.partition('=')[0]}, which the test 'columns' does not have"
        assert said in capsys.readouterr().err
