"""The last step: when all is written, files get their names, old ones go, and temporary ones, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apache_beam as beam
from apache_beam.metrics import Metrics

from luminosity.errors import WriteError
from luminosity.io.turns import turn_in
from luminosity.io.writing import existing, files
from luminosity.io.writing.faults import clear_errors
from luminosity.io.writing.joining import joined
from luminosity.io.writing.naming import Move, final_names
from luminosity.io.writing.schemas import check_same, check_writable
from luminosity.io.writing.table_file import TableFile, Written
from luminosity.io.writing.target import Target
from luminosity.io.writing.write_step import NAMESPACE

__all__ = ["FinishDoFn", "finish"]

_BEGUN = "begun"
_TURN_S = 60.0
"""For another job to give its files their names in the same folder."""


class FinishDoFn(beam.DoFn):
    """Gives the names of the table's files, once they are there."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def process(self, element: object, written: Iterable[Written]) -> Iterator[str]:
        with clear_errors(self._target.path):
            names = finish(self._target, list(written))
            Metrics.counter(NAMESPACE, "files_written").inc(len(names))
            Metrics.counter(NAMESPACE, "bytes_written").inc(sum(map(files.size, names)))
        yield from names


def finish(target: Target, written: list[Written]) -> list[str]:
    """May be killed anywhere and run again.

    A mark in the temporary folder says that final files are this run's own from now on. The folder goes last:
    if temporary files are gone, and the mark with them, all was done before.
    """
    for file in written[1:]:
        check_same(target.path, written[0].schema, file.schema)
    if not written and target.schema is not None and not target.partition_by:
        written = [_empty(target)]
    moves = final_names(target, written)
    there = files.names_in(target.temporary_folder)
    is_begun = _BEGUN in there
    if is_begun or all(_has_sources(move, there) for move in moves):
        # Joined first, which may take long. Of two jobs that end at once the second is to see the first one's files.
        complete = [(joined(target, move.sources), move.final) for move in moves if _has_sources(move, there)]
        with turn_in(target.folder, _TURN_S):
            if not is_begun:
                existing.check(target)
                _check_not_removed(target, {source for source, _ in complete})
                if moves:
                    files.OutputFile(files.join(target.temporary_folder, _BEGUN), None).close()
            for source, final in complete:
                files.move(source, final)
            if target.if_exists == "replace":
                _remove_old(target, {move.final for move in moves})
        _remove_temporary(target, moves)
    return [_checked(target, move.final) for move in moves]


def _empty(target: Target) -> Written:
    assert target.schema is not None
    check_writable(target, target.schema)
    return TableFile(target, "", target.schema).close(target.schema)


def _has_sources(move: Move, there: set[str]) -> bool:
    return all(files.split(source.path)[1] in there for source in move.sources)


def _check_not_removed(target: Target, sources: set[str]) -> None:
    """Before the mark is set: beside it, a second try would take missing files for moved ones, and remove others'."""
    if not {files.split(source)[1] for source in sources} <= files.names_in(target.temporary_folder):
        raise WriteError(
            f"{target.path}: what this run had written is gone from {target.temporary_folder}. Did another run replace "
            "the table at the same time?"
        )


def _remove_temporary(target: Target, moves: list[Move]) -> None:
    """The mark goes after the files: without it, a second try would take them for files that wait for their names."""
    for source in (source for move in moves for source in move.sources if target.is_one_file):
        files.remove_file(source.path)  # Others have been moved.
    files.remove_folder(target.temporary_folder)


def _remove_old(target: Target, new: set[str]) -> None:
    for path in existing.table_files(target):
        if path not in new:
            files.remove_file(path)
            files.remove_folders_if_empty(files.split(path)[0], target.path)
    if not target.is_one_file:
        for folder in existing.leftovers(target):
            files.remove_folder(folder)


def _checked(target: Target, path: str) -> str:
    if not files.exists(path):
        raise WriteError(
            f"{path}: neither the file nor the temporary ones it was to be made of are there. Did another run, or "
            f"somebody, remove {target.temporary_folder}?"
        )
    return path
