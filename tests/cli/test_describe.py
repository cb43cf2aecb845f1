"""``lum describe``: a line for each column, JSON and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.cli.main import main
from tests.evaluation.test_describe import mixed_table


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    import pyarrow.parquet as pq

    for seed in (0, 1):
        pq.write_table(mixed_table(seed=seed), tmp_path / f"{seed}.parquet")
    return [str(tmp_path / f"{seed}.parquet") for seed in (0, 1)]


def test_a_line_for_each_column(tables: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", tables[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("500 rows, 10 columns · ")
    assert [line.split()[0] for line in lines[2:]] == mixed_table(1).schema.names
    whole = next(line for line in lines if line.startswith("  whole"))
    assert whole.split()[1:4] == ["numbers", "-", "10"]
    assert whole.endswith("-5 to 4, median -1")


def test_a_reference_json_and_a_report(tables: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    command = ["describe", tables[1], "--reference", tables[0], "--column", "whole,number"]
    assert main([*command, "--report", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "what changed most:" in printed
    assert ", p = 0." in printed
    page = report.read_text()
    assert "0 of 2 columns changed" in page
    assert "line: the reference" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [column["name"] for column in found["columns"]] == ["whole", "number"]
    assert {change["name"] for change in found["changes"]} == {"whole", "number"}
    assert main(["describe", tables[0], "--report", str(report)]) == 0
    for name in mixed_table(1).schema.names:
        assert f"<h2>{name}</h2>" in report.read_text()


def test_errors(tables: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", tables[0], "--column", "wole"]) == 1
    assert "did you mean 'whole'?" in capsys.readouterr().err
    assert main(["describe", " "]) == 2
    assert "is empty, expected a file" in capsys.readouterr().err


def test_a_table_without_rows_has_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"age": [1, 2], "name": ["a", "b"]})
    empty, full = (str(tmp_path / name) for name in ("empty.parquet", "full.parquet"))
    pq.write_table(table.slice(0, 0), empty)
    pq.write_table(table, full)

    assert main(["describe", empty, "--reference", full]) == 0

    out = capsys.readouterr().out
    assert out.startswith("0 rows, 2 columns against 2 rows of the reference")
    assert "the column is gone" not in out
    assert out.count("no rows to compare") == 2


def test_durations_are_no_dates_and_values_are_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {
        "took": pa.array([-3600, 5400, 90000], pa.duration("s")),
        "at": pa.array([3600, 7200, 3723], pa.time32("s")),
        "odd\nname": ["\x1b[2J", "two\nlines", "\x1b[2J"],
    }
    path, report = str(tmp_path / "odd.parquet"), tmp_path / "odd.html"
    pq.write_table(pa.table(columns), path)

    assert main(["describe", path, "--report", str(report)]) == 0

    out = capsys.readouterr().out
    assert "-01:00:00 to 25:00:00, median 01:30:00" in out
    assert "01:00:00 to 02:00:00, median 01:02:03" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out.splitlines()) == 5
    assert "1970-01-0" not in report.read_text()
