"""WriteTable in a stream: the files of a window appear when it is complete, and none before."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.transforms import trigger
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.window import FixedWindows, GlobalWindows, IntervalWindow, Sessions, SlidingWindows
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN

from luminosity import WriteTable
from luminosity.engine.loop import sizing
from luminosity.errors import StepFailed, WriteError
from luminosity.io.writing import window_files, write_step
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.table_files import WrittenFile, final_names
from tests.both_runners import counters
from tests.io.written import everything_in, rows_of
from tests.runners import IS_REFERENCE, start
from tests.streams import Notes, names_in, run_stream, stream_of, tables, wait_for

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")

_FIRST = "part-1970-01-01T00-00-00_1970-01-01T00-00-10-00000-of-00001.parquet"
_SECOND = "part-1970-01-01T00-00-10_1970-01-01T00-00-20-00000-of-00001.parquet"


def _stream(*events: Any) -> Any:
    return stream_of(*events, element_type=pa.RecordBatch)


def _written(folder: Path, *rows: int, window: str = "w", **options: Any) -> tuple[Destination, list[WrittenFile]]:
    """Return a destination and temporary files with a row each."""
    destination = Destination.of(str(folder), **options).for_another_run()
    files: list[WrittenFile] = []
    for row in rows:
        opened = write_step.OpenFiles(destination)
        opened.add(pa.record_batch({"n": [row]}))
        files += opened.close()
    return destination, files


def test_the_files_of_a_window_appear_while_the_stream_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_GATHERING_S", "_MOST_GATHERING_S", "_GATHERING_IN_STREAM_S"):
        monkeypatch.setattr(sizing, limit, 3600.0)  # A TestStream waits for its sinks, so they must not wait for it.
    out, notes = tmp_path / "out", Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | _stream(tables(1, 2), tables(3), 10, tables(11), tables(12))
        _ = table | notes.step(lambda table: [table["n"].to_pylist(), names_in(out)])
        _ = table | beam.WindowInto(FixedWindows(10)) | WriteTable(out)

    result = run_stream(build)
    assert notes.read() == [[[1], []], [[2], []], [[3], []], [[11], [_FIRST]], [[12], [_FIRST]]]
    assert rows_of(out / _FIRST) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert rows_of(out / _SECOND) == [{"n": 11}, {"n": 12}]
    assert everything_in(out) == [_FIRST, _SECOND]
    assert counters(result)["rows_written"] == 5
    assert counters(result)["files_written"] == 2


def test_a_stream_without_end_writes_its_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_GATHERING_S", "_MOST_GATHERING_S"):
        monkeypatch.setattr(sizing, limit, 3600.0)  # The sink of a stream has a limit of its own.
    out = tmp_path / "out"

    def build(pipeline: beam.Pipeline) -> None:
        _ = (
            pipeline
            | PeriodicImpulse(fire_interval=0.25)
            | beam.Map(lambda _: pa.record_batch({"n": [1]})).with_output_types(pa.RecordBatch)
            | beam.WindowInto(FixedWindows(1))
            | WriteTable(out)
        )

    result = start(build, "--cpu_workers=1")
    assert wait_for(lambda: len(names_in(out)) > 1)
    result.cancel()
    result.wait_until_finish()
    assert len(rows_of(out)) >= 2
    assert everything_in(out) == names_in(out)  # A run that was cancelled leaves no temporary files.


def test_late_rows_get_files_of_their_own_and_no_row_is_written_twice(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def build(pipeline: beam.Pipeline) -> None:
        _ = (
            pipeline
            | _stream(tables(1), 10, tables(2), tables(3), 100, tables(4))
            | beam.WindowInto(
                FixedWindows(10),
                trigger=trigger.AfterWatermark(late=trigger.AfterCount(1)),
                accumulation_mode=trigger.AccumulationMode.ACCUMULATING,
                allowed_lateness=50,
            )
            | WriteTable(out)
        )

    run_stream(build)
    window = "part-1970-01-01T00-00-00_1970-01-01T00-00-10"
    assert names_in(out) == [_FIRST, *(f"{window}-pane-0000{n}-00000-of-00001.parquet" for n in (1, 2))]
    assert rows_of(out) == [{"n": 1}, {"n": 2}, {"n": 3}]  # Row 4 came after its window had expired.
    assert everything_in(out) == names_in(out)


def test_files_of_rows_that_came_too_late_are_removed_while_the_stream_runs(tmp_path: Path) -> None:
    out, notes = tmp_path / "out", Notes(tmp_path / "notes")

    def hidden() -> list[int]:
        return [rows_of(path)[0]["n"] for path in sorted(out.rglob(".*/*.parquet"))]

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | _stream(tables(1), 100, tables(2), tables(101), 102, tables(103), 170, tables(171))
        _ = table | notes.step(lambda table: [table["n"].to_pylist()[0], hidden()])
        _ = table | beam.WindowInto(FixedWindows(10), allowed_lateness=50) | WriteTable(out)

    run_stream(build)
    assert notes.read() == [[1, []], [2, []], [101, []], [103, [101]], [171, []]]
    assert [row["n"] for row in rows_of(out)] == [1, 101, 103, 171]


def test_a_trigger_writes_files_in_the_global_window(tmp_path: Path) -> None:
    out, notes = tmp_path / "out", Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | _stream(tables(1), tables(2), tables(3))
        _ = table | notes.step(lambda _: names_in(out))
        _ = (
            table
            | beam.WindowInto(
                GlobalWindows(),
                trigger=trigger.Repeatedly(trigger.AfterCount(1)),
                accumulation_mode=trigger.AccumulationMode.DISCARDING,
            )
            | WriteTable(out)
        )

    run_stream(build)
    assert [len(names) for names in notes.read()] == [0, 1, 2]
    assert names_in(out) == [f"part-pane-0000{n}-00000-of-00001.parquet" for n in range(3)]
    assert rows_of(out) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_sliding_windows_and_partitions(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        events = [(pa.record_batch({"n": [n, n], "of": ["a", "b"]}), n) for n in (6, 12)]
        _ = (
            pipeline
            | _stream(events)
            | beam.WindowInto(SlidingWindows(10, 5))
            | WriteTable(tmp_path / "out", partition_by="of")
        )

    run_stream(build)
    counts = {name: len(rows_of(tmp_path / "out" / name)) for name in names_in(tmp_path / "out")}
    ranges = {"00_": 1, "05_": 2, "10_": 1}
    expected = {(of, f"{start}1970-01-01T00-00-{int(start[:2]) + 10}"): n for start, n in ranges.items() for of in "ab"}
    assert {
        (of, window): next(n for name, n in counts.items() if f"of={of}/" in name and window in name)
        for of, window in expected
    } == expected
    assert len(counts) == len(expected)


def test_streams_that_would_write_nothing_are_refused(tmp_path: Path) -> None:
    table = beam.Pipeline() | _stream()
    with pytest.raises(WriteError, match=r"found a stream in the global window without a trigger.*FixedWindows"):
        _ = table | WriteTable(tmp_path / "out")
    with pytest.raises(WriteError, match=r"found Sessions, expected windows that don't merge"):
        _ = table | beam.WindowInto(Sessions(10)) | "Sessions" >> WriteTable(tmp_path / "out")
    with pytest.raises(WriteError, match=r"found the name of one file, expected a folder"):
        _ = table | "Fixed" >> beam.WindowInto(FixedWindows(10)) | "File" >> WriteTable(tmp_path / "out.parquet")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "part.parquet").touch()
    with pytest.raises(WriteError, match="expected it to be empty"):
        _ = table | "Again" >> beam.WindowInto(FixedWindows(10)) | "Full" >> WriteTable(tmp_path / "full")


def test_a_stream_replaces_or_appends(tmp_path: Path) -> None:
    for name, expected in (("replace", [{"n": 2}]), ("append", [{"n": 0}, {"n": 2}])):
        out = tmp_path / name
        for number in (0, 2):

            def build(pipeline: beam.Pipeline, out: Path = out, number: int = number, name: Any = name) -> None:
                table = pipeline | _stream(tables(number))
                _ = table | beam.WindowInto(FixedWindows(10)) | WriteTable(out, if_exists=name)

            run_stream(build)
        assert rows_of(out) == expected


def test_the_old_table_stays_until_the_first_window_is_complete(tmp_path: Path) -> None:
    (tmp_path / "a=1").mkdir()
    old = tmp_path / "a=1" / "old.parquet"
    old.touch()
    destination, written = _written(tmp_path, 1, 2, if_exists="replace")
    (begun,) = window_files.BeginStreamDoFn(destination).process(None)
    assert begun == [str(old)]
    assert old.exists()
    first = window_files.publish_pane(destination, written[:1], "w1", begun)
    assert names_in(tmp_path) == [os.path.basename(first[0])]  # The folder of the old partition is gone, too.
    second = window_files.publish_pane(destination, written[1:], "w2", begun)
    assert rows_of(tmp_path / os.path.basename(first[0])) + rows_of(second[0]) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("calls", range(7))
def test_a_pane_whose_step_is_killed_is_published_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Files of the same names are there, which the run replaces."""
    for _ in range(2):
        destination, written = _written(tmp_path / "out", 1, 2, 3, if_exists="replace")
        (begun,) = window_files.BeginStreamDoFn(destination).process(None)
        left = calls

        def call(real: Any, *arguments: Any, **options: Any) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            real(*arguments, **options)

        other = [written.pop()]
        with monkeypatch.context() as patched:
            for name in ("replace", "remove"):
                patched.setattr(os, name, functools.partial(call, getattr(os, name)))
            try:
                window_files.publish_pane(destination, list(written), "w1", begun)
            except KeyboardInterrupt:
                left = -1
        window_files.publish_pane(destination, other, "w2", begun)  # Another window comes before the retry.
        if left < 0:
            window_files.publish_pane(destination, list(written), "w1", begun)
        files = {name: rows_of(tmp_path / "out" / name) for name in names_in(tmp_path / "out")}
        assert list(files.values()) == [[{"n": 1}, {"n": 2}], [{"n": 3}]]


def test_names_are_unique_where_folders_have_no_locks() -> None:
    """Two workers may begin a stream at once: the second must not remove a new file that has an old file's name."""
    destination = Destination.of("gs://bucket/table", if_exists="replace")
    files = [WrittenFile(f"gs://bucket/table/.of-run-{run}/1", "", 1, 1, pa.schema([])) for run in range(2)]
    assert len({final_names(destination, [file], "w1")[0].final for file in files}) == 2


def test_a_runner_that_does_not_number_panes_loses_none(tmp_path: Path) -> None:
    destination, written = _written(tmp_path, 1, 2)
    name = window_files.NamePaneDoFn(FixedWindows(10).get_window_coder())
    publish = window_files.PublishPaneDoFn(destination)
    for file in written:
        for _ in range(2):  # the step is retried
            (named,) = name.process([file], IntervalWindow(0, 10), PANE_INFO_UNKNOWN)
            list(publish.process(named, [[]]))
    assert sorted(row["n"] for name in names_in(tmp_path) for row in rows_of(tmp_path / name)) == [1, 2]


def test_files_that_are_gone_are_no_success(tmp_path: Path) -> None:
    destination, written = _written(tmp_path, 1)
    os.remove(written[0].path)
    with pytest.raises(WriteError, match="found neither the file nor the temporary files"):
        window_files.publish_pane(destination, written, "w", [])


def test_all_windows_have_one_schema(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | _stream(tables(1), 10, [(pa.record_batch({"n": ["text"]}), 11)])
        _ = table | beam.WindowInto(FixedWindows(10)) | WriteTable(tmp_path / "out")

    with pytest.raises(StepFailed, match="found batches with different schemas"):
        run_stream(build)
    assert everything_in(tmp_path / "out") == [_FIRST]


def test_a_bundle_with_many_windows_has_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_step, "_MOST_WINDOWS", 2)
    destination, _ = _written(tmp_path)
    step = write_step.WriteDoFn(destination)
    step.start_bundle()
    for number in range(9):
        window = IntervalWindow(number % 3, number % 3 + 1)
        step.process(pa.record_batch({"n": [number]}), window)
        assert len(step._files) <= 2  # pyright: ignore[reportPrivateUsage]
    emitted = list(step.finish_bundle())
    rows = {value.windows[0].start.micros // 10**6: 0 for value in emitted}
    for value in emitted:
        rows[value.windows[0].start.micros // 10**6] += value.value.rows
    assert rows == {0: 3, 1: 3, 2: 3}
    step.process(pa.record_batch({"n": [1]}), IntervalWindow(0, 1))
    step.start_bundle()  # The bundle failed.
    assert {Path(value.value.path) for value in emitted} == set((tmp_path).rglob("*.parquet"))


class _Named(IntervalWindow):
    pass


def test_windows_of_your_own_have_names_of_their_own() -> None:
    coder: Any = beam.coders.PickleCoder()
    names = {
        window_files.pane_name(window, PANE_INFO_UNKNOWN, coder)
        for window in (IntervalWindow(0, 10), _Named(0, 10), _Named(5, 10))
    }
    assert len(names) == 3
    far = IntervalWindow(Timestamp(micros=2**62), Timestamp(micros=2**62 + 1))
    assert window_files.pane_name(far, PANE_INFO_UNKNOWN, coder) == f"{2**62}_{2**62 + 1}"
