"""What all commands that read tables share: nulls of CSV, doubtful columns, and lines that can't be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from luminosity.cli import import_commands
from luminosity.cli.main import main

_COMMANDS = {
    "describe": ["describe", "in.csv"],
    "evaluate": ["evaluate", "in.csv", "--label", "a", "--prediction", "b", "--resamples", "0"],
    "drift": ["drift", "in.csv", "in.csv", "--column", "a,b", "--permutations", "19"],
    "drift by": ["drift", "in.csv", "in.csv", "--column", "a,b", "--by", "country", "--permutations", "19"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(*bad: str) -> None:
    good = [f"{number % 7},{number % 5},{'NA' if number % 2 else 'DE'}" for number in range(60)]
    Path("in.csv").write_text("\n".join(["a,b,country", *good, *bad]) + "\n")


@pytest.mark.parametrize("command", _COMMANDS.values(), ids=_COMMANDS)
def test_a_line_that_cant_be_read_is_an_error_or_set_aside(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _write("1", "1,2,DE,3", "5,6,DE")
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "in.csv, line 62: found 1 value, expected 3 as in the header; the line is '1'; " in told
    assert told.endswith("or add --dead-letters FILE to set such lines aside\n")

    assert main([*command, "--dead-letters", "bad.jsonl"]) == 0
    told = capsys.readouterr().err
    letters = [json.loads(line) for line in Path("bad.jsonl").read_text().splitlines()]
    tables = 2 if command[0] == "drift" else 1
    assert [(letter["_line"], letter["_text"]) for letter in letters] == [(62, "1"), (63, "1,2,DE,3")] * tables
    assert f"lum {command[0]}: {2 * tables} lines can't be read and are set aside in bad.jsonl: " in told
    assert "in.csv, line 62: found 1 value, expected 3 as in the header; " in told
    assert sorted(path.name for path in Path().iterdir()) == ["bad.jsonl", "in.csv"]

    assert main([*command, "--dead-letters", "bad.jsonl"]) == 2
    assert "--dead-letters=bad.jsonl: it exists already; choose another name" in capsys.readouterr().err


def test_json_counts_the_lines_and_a_failure_leaves_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    _write("1")
    assert main(["describe", "in.csv", "--json", "--dead-letters", "bad.parquet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["lines_unreadable"], found["dead_letters"]) == (1, "bad.parquet")
    Path("bad.parquet").unlink()
    assert main(["describe", "in.csv", "--column", "nosuch", "--dead-letters", "bad.parquet"]) == 1
    assert main(["describe", "in.csv", "--dead-letters", "folder"]) == 2
    assert "expected the name of a file, such as bad.jsonl" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.csv"]


def test_texts_that_mean_null_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{number},5;{'NA' if number % 2 else 'DE'}" for number in range(50)]
    Path("in.csv").write_text("\n".join(["price;country", *rows, "NA;FR", "missing;DE", "-;DE"]) + "\n")
    assert main(["describe", "in.csv", "--decimal-comma"]) == 0
    printed = capsys.readouterr()
    assert "price    texts" in printed.out
    assert "column 'price' is text because of '-', 'missing' in 2 of 52 values; the others are numbers" in printed.err
    assert "add --null-values '-,missing' if that means null" in printed.err

    nulls = ["--null-values", "missing,-", "--null-values", "FR", "--json"]
    assert main(["describe", "in.csv", "--decimal-comma", *nulls]) == 0
    printed = capsys.readouterr()
    price, country = json.loads(printed.out)["columns"]
    assert (price["kind"], price["nulls"]) == ("numbers", 3)
    assert (country["kind"], country["nulls"]) == ("texts", 1)
    assert {"value": "NA", "count": 25} in country["top"]
    assert printed.err == ""


def test_every_command_that_reads_csv_has_the_options() -> None:
    import argparse

    commands = argparse.ArgumentParser().add_subparsers()
    for module in import_commands().values():
        module.add_to(commands)
    helps = {name: parser.format_help() for name, parser in commands.choices.items()}
    for option in ("--null-values", "--dead-letters"):
        found = {name for name, text in helps.items() if option in text}
        assert found == {"bench", "describe", "drift", "enrich", "evaluate"}


@pytest.mark.parametrize("command", ["describe", "drift", "evaluate"])
def test_a_report_follows_its_folder_and_keeps_its_mode(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _write()
    before = os.umask(0o022)
    try:
        for folder, mode, said in ((0o700, 0o600, ""), (0o750, 0o640, "its group"), (0o755, 0o644, "every user")):
            Path(f"{folder:o}").mkdir(mode=folder)
            report = Path(f"{folder:o}", "report.html")
            assert main([*_COMMANDS[command], "--report", str(report)]) == 0
            told = capsys.readouterr().err
            assert report.stat().st_mode & 0o777 == mode
            holds = f"{report} shows {'rows' if command == 'drift' else 'values'} of the data, and {said}"
            assert holds in told if said else "of the data" not in told
            assert "of the data" in report.read_text()
            report.chmod(0o600)
            assert main([*_COMMANDS[command], "--report", str(report)]) == 0
            assert report.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
