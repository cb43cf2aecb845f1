"""Writes a table in a stream: each pane of a window gets its files when it is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import Coder
from apache_beam.metrics import Metrics
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import AccumulationMode, DefaultTrigger
from apache_beam.transforms.window import GlobalWindow, GlobalWindows, IntervalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming

from luminosity._shared.shared_files import text_digest
from luminosity.errors import Fix, WriteError
from luminosity.io.folders import lock_folder
from luminosity.io.writing import existing, filesystem
from luminosity.io.writing.destination import Destination, check_same
from luminosity.io.writing.filesystem import clear_errors
from luminosity.io.writing.table_files import WrittenFile, final_names, joined
from luminosity.io.writing.write_step import NAMESPACE

__all__ = [
    "BeginStreamDoFn",
    "GroupByPane",
    "KeyByPane",
    "NamePaneDoFn",
    "PublishPaneDoFn",
    "check_windows",
    "pane_name",
    "publish_pane",
]

_BEGUN = "begun"
_LOCK_TIMEOUT_S = 60.0  # how long another pane, or another job, may take to give its files their names


def check_windows(what: str, windowing: Windowing) -> None:
    """Raise if the windows of a stream would never be complete, or are not known before a GroupByKey.

    ``what`` is the destination, in messages.
    """
    if windowing.windowfn.is_merging():
        raise WriteError(
            f"{what}: found {type(windowing.windowfn).__name__}, expected windows that don't merge: the elements of a "
            "stream that is not grouped have a window each",
            fix=Fix("apply beam.WindowInto(FixedWindows(60)) first"),
        )
    if isinstance(windowing.windowfn, GlobalWindows) and isinstance(windowing.triggerfn, DefaultTrigger):
        raise WriteError(
            f"{what}: found a stream in the global window without a trigger, expected windows that end, or a trigger: "
            "nothing would be written before the stream ends",
            fix=Fix("apply beam.WindowInto(FixedWindows(60)) first, which writes every minute"),
        )


class GroupByPane(beam.PTransform[Any, Any]):
    """Groups all elements of a pane: one list for each pane that the trigger of the input fires.

    An element is in one pane only, in accumulating mode, too: what a pane names is written already when the next fires.
    """

    def expand(self, input_or_inputs: Any) -> Any:
        """Group the elements under one key."""
        keyed = input_or_inputs | KeyByPane(Any)
        return keyed | "Group" >> beam.GroupByKey() | "List" >> beam.Map(lambda pair: list(pair[1]))


class KeyByPane(beam.PTransform[Any, Any]):
    """Gives all elements the same key, so that a GroupByKey makes one group of each pane, in discarding mode."""

    def __init__(self, element_type: Any) -> None:
        super().__init__("Key")
        self._pair_type = tuple[None, element_type]

    def expand(self, input_or_inputs: Any) -> Any:
        """Pair each element with None."""
        return input_or_inputs | "Pair" >> _KeyDiscarding(_Key()).with_output_types(self._pair_type)


class _Key(beam.DoFn):
    def process(self, element: Any) -> Iterator[tuple[None, Any]]:
        yield None, element


class _KeyDiscarding(beam.ParDo):
    """A ParDo whose output has the windows and the trigger of its input, in discarding mode."""

    def get_windowing(self, inputs: Any) -> Windowing:
        """Return the windowing of the input, in discarding mode."""
        windowing = inputs[0].windowing
        return Windowing(
            windowing.windowfn,
            windowing.triggerfn,
            AccumulationMode.DISCARDING,
            windowing.timestamp_combiner,
            windowing.allowed_lateness,
            windowing.environment_id,
        )


class BeginStreamDoFn(beam.DoFn):
    """Makes the temporary folder when a run starts, and emits the files that the stream replaces."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def process(self, element: object) -> Iterator[list[str]]:
        """Check the destination again, and make the folder. Other file systems know no folders without files."""
        destination = self._destination
        with clear_errors(destination.path):
            # After a restart, the step may be repeated although panes are published: then no old files are left.
            if not filesystem.exists(filesystem.join(destination.temporary_folder, _BEGUN)):
                existing.check(destination)
            old = existing.table_files(destination) if destination.if_exists == "replace" else []
            if filesystem.is_local(destination.path):
                existing.make_temporary_folder(destination)
                for folder in existing.leftovers(destination):
                    filesystem.remove_folder(folder)
        yield old


class NamePaneDoFn(beam.DoFn):
    """Adds the part of the final names that tells the window and the pane."""

    def __init__(self, window_coder: Coder) -> None:
        self._window_coder = window_coder

    def process(
        self, element: list[WrittenFile], window: Any = beam.DoFn.WindowParam, pane: Any = beam.DoFn.PaneInfoParam
    ) -> Iterator[tuple[str, list[WrittenFile]]]:
        """Emit the name with the files of the pane."""
        name = pane_name(window, pane, self._window_coder)
        if pane.timing == PaneInfoTiming.UNKNOWN:
            # This runner does not number panes: a late one must not replace the files of the first.
            name += "-" + text_digest(*sorted(file.path for file in element), digits=12)
        yield name, element


class PublishPaneDoFn(beam.DoFn):
    """Gives the files of one pane their final names, and emits these. May be repeated with the same element."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def process(self, element: tuple[str, list[WrittenFile]], begun: Iterable[list[str]]) -> Iterator[str]:
        """Publish the files of a pane, named by ``NamePaneDoFn``. ``begun`` is what ``BeginStreamDoFn`` emits."""
        old = [path for paths in begun for path in paths]
        name, written = element
        with clear_errors(self._destination.path):
            names = publish_pane(self._destination, written, name, old)
            Metrics.counter(NAMESPACE, "files_written").inc(len(names))
            Metrics.counter(NAMESPACE, "bytes_written").inc(sum(map(filesystem.size, names)))
        yield from names


def publish_pane(destination: Destination, written: list[WrittenFile], pane: str, old: list[str]) -> list[str]:
    """Give the files of a pane their final names, and return these. The function may be killed and run again.

    The first pane of a run removes the ``old`` files before its own get their names: a mark in the temporary folder
    says that this is done, and holds the schema that all panes have.
    """
    if not any(file.rows for file in written):
        for file in written:
            file.remove()
        return []
    for file in written[1:]:
        check_same(destination.path, written[0].schema, file.schema)
    moves = final_names(destination, written, pane)
    there = filesystem.names_in(destination.temporary_folder)
    # If a source is gone, an earlier attempt has moved its file: sources are removed after that.
    complete = [
        (joined(destination, move.sources), move.final)
        for move in moves
        if all(filesystem.split(source.path)[1] in there for source in move.sources)
    ]
    with lock_folder(destination.folder, _LOCK_TIMEOUT_S):
        _begin(destination, written[0].schema, old)
        for source, final in complete:
            filesystem.move(source, final)
        if destination.checkpoint_dir:
            filesystem.sync(*{filesystem.split(final)[0] for _, final in complete})
    for move in moves:
        for source in move.sources:
            filesystem.remove_file(source.path)
    for move in moves:
        if not filesystem.exists(move.final):
            raise WriteError(
                f"{move.final}: found neither the file nor the temporary files for it",
                fix=f"check whether another run or program removed {destination.temporary_folder}",
            )
    return [move.final for move in moves]


def _begin(destination: Destination, schema: pa.Schema, old: list[str]) -> None:
    """Remove the old files unless an earlier pane did, and check that all panes have the same schema."""
    mark = filesystem.join(destination.temporary_folder, _BEGUN)
    if filesystem.exists(mark):
        with filesystem.open_input(mark) as file:
            check_same(destination.path, pa.ipc.read_schema(file), schema)
        return
    for path in old:
        filesystem.remove_file(path)
        filesystem.remove_folders_if_empty(filesystem.split(path)[0], destination.path)
    output = filesystem.OutputFile(filesystem.new_path(destination.temporary_folder, ""), None)
    try:
        output.sink.write(schema.serialize())
        output.close()
    except BaseException:
        output.abandon()
        raise
    filesystem.move(output.path, mark)


def pane_name(window: Any, pane: PaneInfo, window_coder: Coder) -> str:
    """Return the part of a file's name that tells its window and pane.

    >>> from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, PaneInfo
    >>> from apache_beam.transforms.window import FixedWindows
    >>> coder = FixedWindows(60).get_window_coder()
    >>> pane_name(IntervalWindow(60, 120), PANE_INFO_UNKNOWN, coder)
    '1970-01-01T00-01-00_1970-01-01T00-02-00'
    >>> pane_name(IntervalWindow(0.5, 1), PaneInfo(False, False, 2, 1, 1), coder)
    '1970-01-01T00-00-00.500000_1970-01-01T00-00-01-pane-00001'
    """
    number = f"pane-{pane.index:05}"
    if isinstance(window, GlobalWindow):
        return number
    if type(window) is IntervalWindow:
        name = f"{_time(window.start)}_{_time(window.end)}"
    else:  # Windows of your own may differ in more than their times.
        digest = hashlib.sha256(window_coder.encode(window)).hexdigest()[:12]
        name = f"{_time(window.end)}_{digest}"
    return f"{name}-{number}" if pane.index else name


def _time(timestamp: Timestamp) -> str:
    """Return a time in UTC without colons, which some file systems refuse in names."""
    try:
        text = timestamp.to_utc_datetime().isoformat()
    except OverflowError:  # beyond the years that Python knows
        text = str(timestamp.micros)
    return text.replace(":", "-")
