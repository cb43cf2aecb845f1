"""The last step of writing a table: give the files their names, then remove old and temporary files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics

from luminosity.errors import Fix, WriteError
from luminosity.io.folders import lock_folder
from luminosity.io.writing import existing, filesystem
from luminosity.io.writing.destination import Destination, check_same, check_writable
from luminosity.io.writing.filesystem import clear_errors
from luminosity.io.writing.table_files import FileWriter, Move, WrittenFile, final_names, joined
from luminosity.io.writing.write_step import NAMESPACE

__all__ = ["BeginDoFn", "CollectDoFn", "FinishDoFn", "finish"]

_LOGGER = logging.getLogger(__name__)
_BEGUN = "begun"
_LOST = "lost"
_LOCK_TIMEOUT_S = 60.0  # how long another job may take to give its files their names in the same folder


class BeginDoFn(beam.DoFn):
    """Makes the temporary folder when a run starts: its name tells other runs which process writes the table.

    Emits the folder of the table if that did not exist before.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def process(self, element: object) -> Iterator[str]:
        """Make the folder. Other file systems know no folders without files."""
        if not filesystem.is_local(self._destination.path):
            return
        with clear_errors(self._destination.path):
            is_new = not filesystem.exists(self._destination.folder)
            existing.make_temporary_folder(self._destination)
        if is_new:
            yield self._destination.folder


class CollectDoFn(beam.DoFn):
    """Collects the temporary files of all bundles, and what ``BeginDoFn`` emits, into one element."""

    def process(
        self, element: object, written: Iterable[WrittenFile], made: Iterable[str]
    ) -> Iterator[tuple[list[WrittenFile], list[str]]]:
        """Emit two lists."""
        yield list(written), list(made)


class FinishDoFn(beam.DoFn):
    """Finishes the table and emits the names of its files. May be repeated with the same element."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def process(self, element: tuple[list[WrittenFile], list[str]]) -> Iterator[str]:
        """Give the temporary files their final names, and emit these. The element is of ``CollectDoFn``."""
        written, folders = element
        with clear_errors(self._destination.path):
            try:
                names = finish(self._destination, written)
            finally:
                for folder in folders:
                    filesystem.remove_folders_if_empty(folder, filesystem.split(folder)[0])
            Metrics.counter(NAMESPACE, "files_written").inc(len(names))
            Metrics.counter(NAMESPACE, "bytes_written").inc(sum(map(filesystem.size, names)))
        yield from names


def finish(destination: Destination, written: list[WrittenFile]) -> list[str]:
    """Give the files their final names, and return these. The function may be killed at any point and run again.

    A mark in the temporary folder says that the final files belong to this run from now on. The folder is removed
    last: if both the temporary files and the mark are gone, an earlier attempt finished.
    """
    for file in written[1:]:
        check_same(destination.path, written[0].schema, file.schema)
    if not any(file.rows for file in written):
        if destination.if_empty == "keep" or (destination.if_exists == "replace" and destination.if_empty == "fail"):
            filesystem.remove_folder(destination.temporary_folder)
            return _keep_old(destination)
        written = _without_rows(destination, written)
    moves = final_names(destination, written)
    there = filesystem.names_in(destination.temporary_folder)
    is_begun = _BEGUN in there
    if _LOST in there:
        _check_not_removed(destination, set())
    if is_begun or all(_has_sources(move, there) for move in moves):
        # Join files before taking the lock, which may take long. The lock makes the second of two jobs that end at
        # the same time see the files of the first.
        complete = [(joined(destination, move.sources), move.final) for move in moves if _has_sources(move, there)]
        with lock_folder(destination.folder, _LOCK_TIMEOUT_S):
            if not is_begun:
                existing.check(destination)
                _check_not_removed(destination, {source for source, _ in complete})
                if moves:
                    filesystem.OutputFile(filesystem.join(destination.temporary_folder, _BEGUN), None).close()
            for source, final in complete:
                filesystem.move(source, final)
            if destination.checkpoint_dir:
                filesystem.sync(*{filesystem.split(final)[0] for _, final in complete})
            if destination.if_exists == "replace":
                _remove_old(destination, {move.final for move in moves})
            for folder in existing.leftovers(destination):
                filesystem.remove_folder(folder)
        _remove_temporary(destination, moves)
        return [_checked(destination, move.final) for move in moves]
    names = [_checked(destination, move.final) for move in moves]
    filesystem.remove_folder(destination.temporary_folder)  # The earlier attempt may have been killed while it did so.
    return names


def _keep_old(destination: Destination) -> list[str]:
    """Leave the table as it is; raise unless the destination says that this is no error."""
    old = "the table that is there stays as it was" if existing.table_files(destination) else "nothing is written"
    if destination.if_empty == "keep":
        _LOGGER.info("%s: no row was written; %s", destination.path, old)
        return []
    raise WriteError(
        f"{destination.path}: found no rows, expected some to replace the table; {old}",
        fix=Fix(
            "check the input and the dead letters, or pass allow_empty=True if the table may be empty",
            command="check the input and the dead letters, or add --allow-empty if the table may be empty",
        ),
    )


def _without_rows(destination: Destination, written: list[WrittenFile]) -> list[WrittenFile]:
    """Return the empty file of a table without rows, or no file if its schema is unknown or in other files already."""
    if destination.if_exists == "append" and existing.table_files(destination):
        return []  # The files that are there have the schema.
    if not written and destination.empty_schema is not None and not destination.partition_by:
        check_writable(destination, destination.empty_schema)
        return [FileWriter(destination, "", destination.empty_schema).close(destination.empty_schema)]
    if not written:
        _LOGGER.info("%s: no row was written, and there is no file", destination.path)
    return written[:1]


def _has_sources(move: Move, there: set[str]) -> bool:
    return all(filesystem.split(source.path)[1] in there for source in move.sources)


def _check_not_removed(destination: Destination, sources: set[str]) -> None:
    """Raise if temporary files are gone. After the mark is set, a retry would mistake missing files for moved ones.

    Another mark makes retries fail, too: they would mistake the files of another run for their own.
    """
    there = filesystem.names_in(destination.temporary_folder)
    if _LOST in there or not {filesystem.split(source)[1] for source in sources} <= there:
        filesystem.OutputFile(filesystem.join(destination.temporary_folder, _LOST), None).close()
        raise WriteError(
            f"{destination.path}: the files that this run wrote are gone from {destination.temporary_folder}",
            fix="check whether another run replaced the table at the same time",
        )


def _remove_temporary(destination: Destination, moves: list[Move]) -> None:
    """Remove the files before the mark: without it, a retry would mistake them for files that wait for their names."""
    for move in moves:
        if destination.is_one_file or len(move.sources) > 1:  # Other files were moved.
            for source in move.sources:
                filesystem.remove_file(source.path)
    filesystem.remove_folder(destination.temporary_folder)


def _remove_old(destination: Destination, new: set[str]) -> None:
    for path in existing.table_files(destination):
        if path not in new:
            filesystem.remove_file(path)
            filesystem.remove_folders_if_empty(filesystem.split(path)[0], destination.path)


def _checked(destination: Destination, path: str) -> str:
    if not filesystem.exists(path):
        raise WriteError(
            f"{path}: found neither the file nor the temporary files for it",
            fix=f"check whether another run or program removed {destination.temporary_folder}",
        )
    return path
