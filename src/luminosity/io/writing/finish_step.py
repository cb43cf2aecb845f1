"""The last step: when all is written, files get their names, old ones go, and temporary ones, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics

from luminosity.errors import WriteError
from luminosity.io.folder_lock import lock_folder
from luminosity.io.writing import existing, filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.file_writer import FileWriter, WrittenFile
from luminosity.io.writing.final_files import Move, final_names, joined
from luminosity.io.writing.schema_checks import check_same, check_writable
from luminosity.io.writing.write_errors import clear_errors
from luminosity.io.writing.write_step import NAMESPACE

__all__ = ["FinishDoFn", "finish"]

_BEGUN = "begun"
_TURN_S = 60.0
"""For another job to give its files their names in the same folder."""


class FinishDoFn(beam.DoFn):
    """Gives the names of the table's files, once they are there."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def process(self, element: object, written: Iterable[WrittenFile]) -> Iterator[str]:
        with clear_errors(self._destination.path):
            names = finish(self._destination, list(written))
            Metrics.counter(NAMESPACE, "files_written").inc(len(names))
            Metrics.counter(NAMESPACE, "bytes_written").inc(sum(map(filesystem.size, names)))
        yield from names


def finish(destination: Destination, written: list[WrittenFile]) -> list[str]:
    """May be killed anywhere and run again.

    A mark in the temporary folder says that final files are this run's own from now on. The folder goes last:
    if temporary files are gone, and the mark with them, all was done before.
    """
    for file in written[1:]:
        check_same(destination.path, written[0].schema, file.schema)
    if not written and destination.schema is not None and not destination.partition_by:
        written = [_empty(destination)]
    moves = final_names(destination, written)
    there = filesystem.names_in(destination.temporary_folder)
    is_begun = _BEGUN in there
    if is_begun or all(_has_sources(move, there) for move in moves):
        # Joined first, which may take long. Of two jobs that end at once the second is to see the first one's files.
        complete = [(joined(destination, move.sources), move.final) for move in moves if _has_sources(move, there)]
        with lock_folder(destination.folder, _TURN_S):
            if not is_begun:
                existing.check(destination)
                _check_not_removed(destination, {source for source, _ in complete})
                if moves:
                    filesystem.OutputFile(filesystem.join(destination.temporary_folder, _BEGUN), None).close()
            for source, final in complete:
                filesystem.move(source, final)
            if destination.if_exists == "replace":
                _remove_old(destination, {move.final for move in moves})
        _remove_temporary(destination, moves)
    return [_checked(destination, move.final) for move in moves]


def _empty(destination: Destination) -> WrittenFile:
    assert destination.schema is not None
    check_writable(destination, destination.schema)
    return FileWriter(destination, "", destination.schema).close(destination.schema)


def _has_sources(move: Move, there: set[str]) -> bool:
    return all(filesystem.split(source.path)[1] in there for source in move.sources)


def _check_not_removed(destination: Destination, sources: set[str]) -> None:
    """Before the mark is set: beside it, a second try would take missing files for moved ones, and remove others'."""
    if not {filesystem.split(source)[1] for source in sources} <= filesystem.names_in(destination.temporary_folder):
        raise WriteError(
            f"{destination.path}: what this run had written is gone from {destination.temporary_folder}. "
            "Did another run replace the table at the same time?"
        )


def _remove_temporary(destination: Destination, moves: list[Move]) -> None:
    """The mark goes after the files: without it, a second try would take them for files that wait for their names."""
    for source in (source for move in moves for source in move.sources if destination.is_one_file):
        filesystem.remove_file(source.path)  # Others have been moved.
    filesystem.remove_folder(destination.temporary_folder)


def _remove_old(destination: Destination, new: set[str]) -> None:
    for path in existing.table_files(destination):
        if path not in new:
            filesystem.remove_file(path)
            filesystem.remove_folders_if_empty(filesystem.split(path)[0], destination.path)
    if not destination.is_one_file:
        for folder in existing.leftovers(destination):
            filesystem.remove_folder(folder)


def _checked(destination: Destination, path: str) -> str:
    if not filesystem.exists(path):
        raise WriteError(
            f"{path}: neither the file nor the temporary ones it was to be made of are there. Did another run, or "
            f"somebody, remove {destination.temporary_folder}?"
        )
    return path
