"""Beam's own file sinks in a stream: the files of a window appear when it is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.io import fileio
from apache_beam.transforms.window import FixedWindows
from pyarrow import parquet

from tests.runners import IS_REFERENCE
from tests.streams import Notes, names_in, run_stream, stream_of

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")


def _text(folder: Path) -> Any:
    return beam.io.WriteToText(str(folder / "out"), ".txt")


def _files(folder: Path) -> Any:
    return fileio.WriteToFiles(
        str(folder), shards=1, max_writers_per_bundle=0, sink=lambda _: fileio.TextSink(), file_naming=_named
    )


def _named(window: Any, *_: Any) -> str:
    return f"out-{int(window.start)}.txt"


def _parquet(folder: Path) -> Any:
    write = beam.io.WriteToParquet(str(folder / "out"), pa.schema([("text", pa.string())]), file_name_suffix=".parquet")
    return "Rows" >> beam.Map(lambda text: {"text": text}) | write


def _lines(path: Path) -> list[str]:
    return parquet.read_table(path)["text"].to_pylist() if path.suffix == ".parquet" else path.read_text().split()


@pytest.mark.parametrize("sink", [_text, _files, _parquet])
def test_the_files_of_a_window_appear_while_the_stream_runs(tmp_path: Path, sink: Callable[[Path], Any]) -> None:
    out, notes = tmp_path / "out", Notes(tmp_path / "notes")
    out.mkdir()

    def written() -> list[list[str]]:
        return sorted(sorted(_lines(out / name)) for name in names_in(out))

    def build(pipeline: beam.Pipeline) -> None:
        texts = pipeline | stream_of([("a", 1)], [("b", 2)], 10, [("c", 11)], 20, [("d", 21)])
        _ = texts | notes.step(lambda text: [text, written()])
        _ = texts | beam.WindowInto(FixedWindows(10)) | sink(out)

    run_stream(build)
    assert notes.read() == [["a", []], ["b", []], ["c", [["a", "b"]]], ["d", [["a", "b"], ["c"]]]]
    assert written() == [["a", "b"], ["c"], ["d"]]
