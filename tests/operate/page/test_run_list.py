"""The list of runs: what it reads of thousands of records, how it searches, and what it says of jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luminosity.events import to_json
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.page.run_data import RunFiles
from luminosity.operate.page.run_list import Asked, jobs_of
from luminosity.runs import records
from tests.operate.page.one_run import STARTED, ended

_MOST_READS = 100


def run_id(number: int) -> str:
    return f"20260301T{number // 3600:02}{number // 60 % 60:02}{number % 60:02}-{number:06x}"


def write(records_of: Path, number: int, **fields: Any) -> None:
    """Write a record as the recorder does at the end of a run."""
    run = run_id(number)
    last = ended(run)
    content = {
        "format": records.FORMAT,
        "process": records.this_process(),
        "pipeline": ("reviews.py", ""),
        "started": to_json(replace(STARTED, run=run, **fields)),
        "ended": to_json(replace(last, state="done", failure="")),
        "number": 3,
        "left_out": 0,
        "happenings": [],
        "snapshots": [],
    }
    (records_of / f"{run}.json").write_text(json.dumps(content, separators=(",", ":")))


def listed(folder: Path) -> RunFiles:
    return RunFiles(folder, load_prices())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(250):
        write(tmp_path, number)
    return tmp_path


def test_a_list_reads_a_bounded_part_of_what_it_does_not_know(folder: Path) -> None:
    files = listed(folder)
    first = files.lines.content(Asked())
    assert (files.lines.reads, first["unread"], len(first["runs"])) == (_MOST_READS, 150, _MOST_READS)
    assert first["runs"][0]["id"] == run_id(249)  # the newest ones first
    files.lines.content(Asked())
    whole = files.lines.content(Asked(limit=1_000))
    assert (files.lines.reads, whole["unread"], len(whole["runs"])) == (250, 0, 250)
    files.lines.content(Asked())
    assert files.lines.reads == 250  # nothing is read twice


def test_the_next_server_reads_only_what_is_new(folder: Path) -> None:
    files = listed(folder)
    while files.lines.content(Asked())["unread"]:
        pass
    (cache,) = folder.glob("*.cache.json")
    assert cache.stat().st_mode & 0o077 == 0  # commands and failures are for this user alone
    again = listed(folder)
    assert again.lines.content(Asked(limit=1_000))["runs"] == files.lines.content(Asked(limit=1_000))["runs"]
    assert again.lines.reads == 0
    write(folder, 300)
    write(folder, 7, job="renamed")
    (folder / f"{run_id(8)}.json").unlink()
    found = again.lines.content(Asked(limit=1_000))
    assert (again.lines.reads, found["total"]) == (2, 250)
    assert [line["id"] for line in found["runs"] if line["name"] == "renamed"] == [run_id(7)]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 0}', '{"format": 1, "lines": {"a": 1}}'])
def test_a_damaged_file_of_lines_is_made_again(tmp_path: Path, content: str) -> None:
    write(tmp_path, 1)
    assert listed(tmp_path).lines.content(Asked())["total"] == 1
    (cache,) = tmp_path.glob("*.cache.json")
    cache.write_text(content)
    files = listed(tmp_path)
    assert (files.lines.content(Asked())["total"], files.lines.reads) == (1, 1)


def test_other_prices_have_lines_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, 1)
    prices = load_prices()
    for sheet in (prices, replace(prices, currency="EUR")):
        files = RunFiles(tmp_path, sheet)
        (found,) = files.lines.content(Asked())["runs"]
        assert (found["cost"]["currency"], files.lines.reads) == (sheet.currency, 1)


def test_the_lists_of_few_price_sheets_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1)
    kept: list[set[str]] = []
    for number in range(6):
        RunFiles(tmp_path, replace(load_prices(), region=f"region {number}")).lines.content(Asked())
        kept.append({path.name for path in tmp_path.glob("*.cache.json")})
        for path in tmp_path.glob("*.cache.json"):  # so that their order does not depend on the clock
            time = path.stat().st_mtime - 1
            os.utime(path, (time, time))

    assert [len(each) for each in kept] == [1, 2, 3, 4, 4, 4]
    assert not kept[0] & kept[-1], "the oldest ones made room"


def test_words_groups_and_jobs_choose_runs(tmp_path: Path) -> None:
    write(tmp_path, 1, job="nightly", user="ana", arguments=("python", "p.py", "--rows=5", "--token=***"))
    write(tmp_path, 2, job="hourly", user="ben", folder="/srv/ben")
    write(tmp_path, 3, folder="/srv/cho")
    lines = listed(tmp_path).lines

    def found(**asked: Any) -> list[str]:
        return [line["id"][-1] for line in lines.content(Asked(**asked))["runs"]]

    assert found() == ["3", "2", "1"]
    assert (found(words="ANA"), found(words="--rows=5 p.py"), found(words="srv cho")) == (["1"], ["1"], ["3"])
    assert (found(group="done"), found(group="failed"), found(limit=1)) == (["3", "2", "1"], [], ["3"])
    assert (found(job="hourly"), found(job="reviews.py", folder="/srv/cho")) == (["2"], ["3"])
    assert found(job="reviews.py", folder="/srv/other") == []
    content = lines.content(Asked(words="ana", group="failed"))
    assert (content["total"], content["matches"], content["groups"]) == (3, 0, {"done": 1})


def line(number: int, seconds: float, elements: int, state: str = "done", name: str = "nightly") -> dict[str, Any]:
    about = {"id": run_id(number), "name": name, "folder": "", "state": state, "started_at": float(number)}
    return {**about, "seconds": seconds, "elements": elements, "is_stream": False, "cost": {"total": seconds / 100}}


@pytest.mark.parametrize(
    ("newest", "before", "ratio"),
    [
        ((200.0, 1000), [100.0, 100.0, 100.0], 2.0),
        ((200.0, 2000), [100.0, 100.0, 100.0], None),  # twice the elements
        ((50.0, 1000), [100.0, 100.0, 400.0], 0.5),  # against the median
        ((110.0, 1000), [100.0, 100.0], None),  # about the same
        ((200.0, 1000), [100.0], None),  # one run before says nothing
        ((0.2, 1000), [0.1, 0.1, 0.1], None),  # less than a second
    ],
)
def test_a_job_says_if_it_got_slower(newest: tuple[float, int], before: Sequence[float], ratio: float | None) -> None:
    runs = [line(9, *newest), *(line(8 - place, seconds, 1000) for place, seconds in enumerate(before))]
    runs.insert(1, line(10, 1.0, 5, "failed"))
    (job,) = jobs_of(runs)
    assert job["ratio"] == ratio
    assert (job["runs"], job["states"]["failed"], job["newest"]["state"]) == (len(runs), 1, "failed")
    assert [point["id"] for point in job["history"]] == sorted(run["id"] for run in runs)  # the newest at the right


def test_jobs_are_bounded() -> None:
    jobs = jobs_of(line(number, 5.0, 10, name=f"job {number % 300}") for number in range(9_000, 0, -1))
    assert len(jobs) == 200
    assert {len(job["history"]) for job in jobs} == {20}
