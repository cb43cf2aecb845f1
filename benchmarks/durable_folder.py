"""Runs a stream with a checkpoint for minutes, and shows how large its folder is beside the data that is in it.

2,000 records a second with 10,000 keys go through a Reshuffle, sliding windows, and a stateful step with a looping
timer. Every minute you get a line with the live bytes (rows, data of blocks, and files that the checkpoint refers to),
those of the whole folder, and their ratio. A database has about a megabyte of empty pages and a log besides its data,
so the target counts from there.

    python benchmarks/durable_folder.py
    DURABLE_SECONDS=1200 python benchmarks/durable_folder.py
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import _measure
import apache_beam as beam
import stream_soak
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import window

from luminosity import LuminosityRunner

_SECONDS = float(os.environ.get("DURABLE_SECONDS", "300"))
_RATE = float(os.environ.get("DURABLE_RATE", "2000"))  # records a second
_EVERY_S = min(60.0, _SECONDS / 4)
_AT_MOST = 2.0  # times the live bytes
_FIXED_BYTES = 8 << 20  # that do not count: the log, up to its limit, and its last part before it is cut


class _Sizes(NamedTuple):
    rows: int
    contents: int
    files: int  # that the checkpoint refers to
    database: int
    log: int
    all_files: int  # below blocks/

    @property
    def live(self) -> int:
        return self.rows + self.contents + self.files

    @property
    def folder(self) -> int:
        return self.database + self.log + self.all_files


def _build(pipeline: beam.Pipeline) -> None:
    start: Any = pipeline | beam.Create([(time.time(), _RATE)])
    records = start | "Source" >> beam.ParDo(stream_soak.Source())
    shuffled = records | beam.Reshuffle()
    _ = (
        shuffled
        | "Sliding" >> beam.WindowInto(window.SlidingWindows(20, 5))
        | "Sums" >> beam.CombinePerKey(sum)
        | "Forget" >> beam.Map(lambda each: None)
    )
    _ = shuffled | "Fixed" >> beam.WindowInto(window.FixedWindows(60)) | "Looping" >> beam.ParDo(stream_soak.Looping())


def _measured(folder: Path) -> _Sizes:
    """Return the sizes at about one moment, while the run goes on."""
    path = folder / "checkpoint.sqlite"
    with contextlib.closing(sqlite3.connect(path, timeout=30)) as database:
        database.execute("BEGIN")
        rows, contents = (
            database.execute(query).fetchone()[0] or 0
            for query in (
                "SELECT sum(length(owner) + length(key) + length(value)) FROM rows",
                "SELECT sum(length(data)) FROM contents",
            )
        )
        paths = {path for (path,) in database.execute("SELECT path FROM contents WHERE path IS NOT NULL")}
        groups = database.execute("SELECT value FROM rows WHERE owner = 'groups'")
        paths |= {marshal.loads(value)[0] for (value,) in groups}
    return _Sizes(
        rows,
        contents,
        sum(_size(folder / path) for path in paths),
        _size(path),
        _size(folder / "checkpoint.sqlite-wal") + _size(folder / "checkpoint.sqlite-shm"),
        sum(_size(each) for each in (folder / "blocks").rglob("*")),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if not path.is_dir() else 0
    except FileNotFoundError:  # it was removed meanwhile
        return 0


def _show(seconds: float, sizes: _Sizes) -> None:
    megabytes = {name: size / 1e6 for name, size in sizes._asdict().items()}
    print(
        f"{seconds:6.0f} s  live {sizes.live / 1e6:6.1f} MB (rows {megabytes['rows']:.1f}, blocks "
        f"{megabytes['contents']:.1f}, files {megabytes['files']:.1f})  folder {sizes.folder / 1e6:6.1f} MB (database "
        f"{megabytes['database']:.1f}, log {megabytes['log']:.1f}, files {megabytes['all_files']:.1f})  ratio "
        f"{sizes.folder / sizes.live:.2f}, {_ratio(sizes):.2f} without what is fixed",
        flush=True,
    )


def _ratio(sizes: _Sizes) -> float:
    return max(0, sizes.folder - _FIXED_BYTES) / sizes.live


def main() -> int:
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as name:
        folder = Path(name, "checkpoint")
        options = PipelineOptions(["--progress=off", "--run_dir=off", f"--checkpoint_dir={folder}"])
        pipeline = beam.Pipeline(LuminosityRunner(), options)
        _build(pipeline)
        result: Any = pipeline.run()
        began_at = time.monotonic()
        ratios: list[float] = []
        while (seconds := time.monotonic() - began_at) < _SECONDS:
            left = min(_EVERY_S, _SECONDS - seconds)
            if result.wait_until_finish(duration=1000 * left) is not None:
                print(f"the run has ended: {result.state}")
                return 1
            sizes = _measured(folder)
            _show(time.monotonic() - began_at, sizes)
            ratios.append(_ratio(sizes))
        result.cancel()
    _measure.print_figure("folder / live data, at the end", ratios[-1], at_most=_AT_MOST)
    _measure.print_figure("folder / live data, at most", max(ratios), at_most=_AT_MOST)
    return 0


if __name__ == "__main__":
    sys.exit(main())
