"""Commits data files to a lake: each commit once, however often it is tried, and the commits of a stream in order."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import Coder, PickleCoder
from apache_beam.metrics import Metrics
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import Fix, WriteError
from luminosity.io.lakes.columns import as_stored
from luminosity.io.lakes.contract import CommitNote, Conflict, DataFile, Lake, Layout
from luminosity.io.lakes.data_files import Begun
from luminosity.io.writing.destination import IfEmpty
from luminosity.io.writing.pane_steps import PaneOf, pane_of
from luminosity.io.writing.window_files import pane_name

__all__ = ["CommitOnce", "CommitPanesInOrder", "Committed", "Committer", "NamePanes", "RemoveStaged"]

_LOGGER = logging.getLogger(__name__)
_ATTEMPTS = 20  # a commit takes well below a second, so other writers would have to be faster again and again
_FIRST_WAIT_S = 0.1
_MOST_WAIT_S = 5.0
_BATCH_ROWS = 1 << 16  # of staged rows that are read at once


@dataclass(frozen=True)
class Committed:
    """A commit that is done: the table's name with its version, and files that are not needed any more."""

    version: str
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Committer:
    """Makes the commits of a run. It is sent to the worker that commits."""

    lake: Lake
    replaces: bool = False
    keys: tuple[str, ...] = ()
    if_empty: IfEmpty = "fail"

    def commit(self, files: Sequence[DataFile], note: CommitNote) -> Committed:
        """Commit the files unless that was done already. May be killed at any point, and called again."""
        lake = self.lake
        has_rows = any(file.rows for file in files)
        if not has_rows and (not self.replaces or self.if_empty == "keep" or not lake.has_rows()):
            return self._done(lake.version(), files)
        last: Conflict | None = None
        for attempt in range(_ATTEMPTS):
            if (version := lake.committed(note)) is not None:
                _LOGGER.info("%s: commit %d of run %s is there already", lake.name, note.number, note.run)
                Metrics.counter(lake.kind, "commits_recognised").inc()
                return self._done(version, files)
            if not has_rows and self.if_empty == "fail":
                raise WriteError(
                    f"{lake.name}: found no rows, expected some to overwrite the table; it stays as it was",
                    fix=Fix(
                        "check the input and the dead letters, or pass allow_empty=True if the table may be empty",
                        command="check the input, or add --allow-empty if the table may be empty",
                    ),
                )
            try:
                if self.keys:
                    if not attempt:
                        self._check_keys(files, lake.layout())
                    version = lake.upsert(self._staged(files, lake.layout()), self.keys, note)
                else:
                    version = lake.commit(files, note, replace=self.replaces)
            except Conflict as error:
                last = error
                _LOGGER.info("%s: another writer was faster (%s)", lake.name, error)
                Metrics.counter(lake.kind, "conflicts").inc()
                time.sleep(min(_FIRST_WAIT_S * 2**attempt, _MOST_WAIT_S) * random.uniform(0.5, 1))
                continue
            Metrics.counter(lake.kind, "commits").inc()
            Metrics.counter(lake.kind, "files_written").inc(0 if self.keys else len(files))
            return self._done(version, files)
        raise WriteError(
            f"{lake.name}: {_ATTEMPTS} attempts to commit failed because other writers were faster: {last}",
            fix="let fewer jobs write the table at the same time, or commit less often",
            may_pass=True,
        )

    def _done(self, version: int | None, files: Sequence[DataFile]) -> Committed:
        name = self.lake.name if version is None else f"{self.lake.name}@{version}"
        return Committed(name, tuple(file.path for file in files) if self.keys else ())

    def _check_keys(self, files: Sequence[DataFile], layout: Layout) -> None:
        """Raise if two rows have the same keys. Only the keys are held in memory."""
        schema = pa.schema([layout.schema.field(key) for key in self.keys])
        rows = pa.Table.from_batches(_rows(files, layout, schema), schema)
        if rows.group_by(list(self.keys)).aggregate([]).num_rows < rows.num_rows:
            raise WriteError(
                f"{self.lake.name}: found several rows with the same {', '.join(self.keys)}, expected one of each",
                fix=Fix("keep one row of each key before the write, for example with a GroupByKey"),
            )

    def _staged(self, files: Sequence[DataFile], layout: Layout) -> pa.RecordBatchReader:
        """Return the rows to upsert. Before the commit is recognised, no file of them is removed."""
        return pa.RecordBatchReader.from_batches(layout.schema, _rows(files, layout, layout.schema))


def _rows(files: Sequence[DataFile], layout: Layout, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    from pyarrow import parquet

    for file in files:
        with layout.open_input(file.path) as source:
            for batch in parquet.ParquetFile(source).iter_batches(_BATCH_ROWS, columns=schema.names):
                yield as_stored(layout.name, batch, schema)  # Others may have added columns meanwhile.


class CommitOnce(beam.DoFn):
    """Commits all files of a table that ends, and removes those of failed bundles: no other run has their names."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def process(self, element: tuple[list[DataFile], Begun]) -> Iterator[Committed]:
        """Make the only commit of the run."""
        files, begun = element
        files = sorted((file for file in files if file.rows), key=lambda file: file.path)
        done = self._committer.commit(files, CommitNote(begun.run, 0))
        if files:
            lake = self._committer.lake
            _sweep(lake.layout(), begun, {file.path for file in files})
        yield done


def _sweep(layout: Layout, begun: Begun, kept: set[str]) -> None:
    """Remove the run's files that were not committed, on this machine. All bundles are done."""
    local = layout.local(layout.staged_path("x") if begun.is_staged else layout.new_path(None, "x"))
    if local is None:
        return
    wanted = {layout.local(path) for path in kept}
    for folder, _, names in os.walk(os.path.dirname(local)):
        for each in names:
            path = os.path.join(folder, each)
            if each.startswith(f"luminosity-{begun.run}-") and path not in wanted:
                os.remove(path)


class NamePanes(beam.DoFn):
    """Adds the name of the window to the files of a pane, and prepares them for the numbering."""

    def __init__(self, window_coder: Coder) -> None:
        self._window_coder = window_coder

    def process(
        self,
        element: list[DataFile],
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
        pane: Any = beam.DoFn.PaneInfoParam,
    ) -> Iterator[tuple[bytes, Any]]:
        """Emit all panes with the same key."""
        yield pane_of(window, timestamp, pane, (pane_name(window, pane, self._window_coder), element))


_COUNT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("count", PickleCoder()))
_NEXT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("next", PickleCoder()))
_WAITING = beam.DoFn.StateParam(BagStateSpec("waiting", PickleCoder()))


class CommitPanesInOrder(beam.PTransform[Any, Any]):
    """Numbers panes, and commits them in this order, one after the other.

    Behind the numbers is a barrier: after a restart, a pane has the number that it had. So the last number that the
    table knows tells which panes are in it.
    """

    def __init__(self, committer: Committer, windowing: Windowing, begun: Any) -> None:
        """``windowing`` is that of the panes, ``begun`` a side input. The output is in the windows of the panes."""
        super().__init__()
        self._committer = committer
        self._windowing = windowing
        self._begun = begun

    def expand(self, input_or_inputs: Any) -> Any:
        """Commit what ``NamePanes`` made of each pane."""
        panes = input_or_inputs | "Global" >> beam.WindowInto(GlobalWindows()).with_output_types(tuple[bytes, Any])
        numbered = panes | "Number" >> beam.ParDo(_Number()).with_output_types(tuple[bytes, Any])
        step = _CommitInOrder(self._committer)
        return numbered | "Stable" >> beam.Reshuffle() | "InOrder" >> _InWindows(step, self._windowing, self._begun)


class _InWindows(beam.ParDo):
    """A ParDo whose output is in the windows that its elements say."""

    def __init__(self, step: beam.DoFn, windowing: Windowing, begun: Any) -> None:
        super().__init__(step, begun)
        self._output_windowing = windowing

    def get_windowing(self, inputs: Any) -> Windowing:
        return self._output_windowing


class _Number(beam.DoFn):
    def process(self, element: tuple[bytes, Any], count: Any = _COUNT) -> Iterator[tuple[bytes, Any]]:
        number = count.read() or 0
        count.write(number + 1)
        yield b"", (number, element[1])


class _CommitInOrder(beam.DoFn):
    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def process(
        self, element: tuple[bytes, Any], begun: Begun, following: Any = _NEXT, waiting: Any = _WAITING
    ) -> Iterator[WindowedValue]:
        expected = following.read() or 0
        number, pane = element[1]
        if number > expected:
            waiting.add((number, pane))
            return
        there = dict([*waiting.read(), (number, pane)]) if number == expected else {number: pane}
        while expected in there:
            yield self._commit(expected, there.pop(expected), begun)
            expected += 1
        following.write(expected)
        waiting.clear()
        for each in there.items():
            waiting.add(each)

    def _commit(self, number: int, pane: PaneOf, begun: Begun) -> WindowedValue:
        name, files = pane.content
        done = self._committer.commit(files, CommitNote(begun.run, number, name))
        return WindowedValue(done, pane.timestamp, (pane.window,))


class RemoveStaged(beam.DoFn):
    """Emits the version of each commit, and removes its staged files.

    With ``is_durable``, they go only once no loss of the machine can take back that the rows are committed.
    """

    def __init__(self, lake: Lake, *, is_durable: bool) -> None:
        self._lake = lake
        self._is_durable = is_durable

    def process(self, element: Committed, finalizer: Any = beam.DoFn.BundleFinalizerParam) -> Iterator[str]:
        """Remove the files."""

        def remove() -> None:
            if element.leftovers:
                layout = self._lake.layout()
                for path in element.leftovers:
                    layout.remove(path)

        if self._is_durable and element.leftovers:
            finalizer.register(remove)
        else:
            remove()
        yield element.version
