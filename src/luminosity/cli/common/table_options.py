"""Tables of commands: the options that say how CSV is written, and lines that can't be read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from luminosity.cli.common.exits import fail
from luminosity.errors import OptionError

if TYPE_CHECKING:
    import pyarrow as pa

    from luminosity.io.read_table import ReadTable
    from luminosity.io.reading.text_lines import Unreadable

__all__ = ["TableReader", "add_csv_options", "add_table_options", "csv_arguments", "tell_doubts"]

_OPTIONS = {
    "delimiter": "--delimiter",
    "encoding": "--encoding",
    "decimal_point": "--decimal-comma",
    "null_values": "--null-values",
}
_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}
_LETTERS_HELD = 1_000  # lines in memory before they are written
_MOST_TOLD = 1_000  # doubts in a process: one that watches files for months must not print them again and again
_told: set[str] = set()
_SHOWN_LINES = 3  # on standard error; the file has all


def add_csv_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--delimiter``, ``--encoding``, ``--decimal-comma`` and ``--null-values``."""
    parser.add_argument(
        "--delimiter",
        type=_delimiter,
        metavar="C",
        help="character between the values of CSV: ';', tab, … (default: recognised by content)",
    )
    parser.add_argument(
        "--encoding", metavar="NAME", help="encoding of CSV, such as cp1252 (default: UTF-8, or as the file says)"
    )
    parser.add_argument(
        "--decimal-comma",
        dest="decimal_point",
        action="store_const",
        const=",",
        help="numbers of CSV have a decimal comma: 1,5 (default: such values are texts)",
    )
    parser.add_argument(
        "--null-values",
        action="append",
        metavar="TEXT,...",
        help="texts that mean null in all columns of CSV, beside empty values; may be repeated (default: NA, NULL and "
        "the like, and only in columns of numbers, times and booleans)",
    )


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for CSV, and ``--dead-letters``."""
    add_csv_options(parser)
    parser.add_argument(
        "--dead-letters",
        metavar="FILE",
        help="write lines that can't be read to this file, with the reason, and go on (default: an error)",
    )


def csv_arguments(parsed: argparse.Namespace, *patterns: str) -> list[dict[str, Any]]:
    """Return the arguments of ``ReadTable`` for each pattern: none for a table without CSV files.

    Raises an error if an option is given and no table has a CSV file.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(parsed, name)) is not None}
    if not given:
        return [{} for _ in patterns]
    if "null_values" in given:
        given["null_values"] = list(
            dict.fromkeys(["", *(each for text in parsed.null_values for each in text.split(","))])
        )
    found = [given if _has_csv(pattern) else {} for pattern in patterns]
    if not any(found):
        names = " and ".join(_OPTIONS[name] for name in given)
        raise OptionError(f"found {names}, which {'is' if len(given) == 1 else 'are'} for CSV, but no CSV file")
    return found


def tell_doubts(command: str, table: ReadTable) -> None:
    """Print what is doubtful about the types of a table's columns, once in this process."""
    for doubt in table.take_doubts():
        if str(doubt) not in _told and len(_told) < _MOST_TOLD:
            _told.add(str(doubt))
            fail(command, doubt, 0)


class TableReader:
    """Reads the tables of a command, and sets lines aside that can't be read if ``--dead-letters`` asks for it.

    As a context, it finishes the file of these lines, or removes it if the command fails.
    """

    def __init__(self, command: str, path: str | None = None) -> None:
        self._command = command
        self._path = path
        self._file = _LetterFile(path) if path is not None else None
        self._first: list[str] = []
        self.unreadable = 0

    def open(self, pattern: str, columns: Sequence[str] | None, csv: Mapping[str, Any]) -> ReadTable:
        """Return the table with these columns, and print what is doubtful about their types."""
        from luminosity.io.read_table import ReadTable

        table = ReadTable(pattern, columns, **csv)
        tell_doubts(self._command, table)
        return table

    def rows(self, table: ReadTable) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the rows of a table, each batch with the path of its file."""
        return table.all() if self._file is None else table.all(self._set_aside)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON says about the lines that were set aside; nothing without ``--dead-letters``."""
        return {} if self._file is None else {"lines_unreadable": self.unreadable, "dead_letters": self._path}

    def _set_aside(self, line: Unreadable) -> None:
        assert self._file is not None
        self._file.add(line)
        self.unreadable += 1
        if len(self._first) < _SHOWN_LINES:
            self._first.append(f"{line.place}: {line.reason}")

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is None:
            return
        if kind is not None:
            self._file.abandon()
            return
        self._file.finish()
        if self.unreadable:
            count = f"{self.unreadable:,} {'line' if self.unreadable == 1 else 'lines'}"
            more = "; and more" if self.unreadable > len(self._first) else ""
            fail(
                self._command,
                f"{count} can't be read and {'is' if self.unreadable == 1 else 'are'} set aside in {self._path}: "
                f"{'; '.join(self._first)}{more}",
                0,
            )


class _LetterFile:
    """The file of ``--dead-letters``. It has its name when it is complete."""

    def __init__(self, path: str) -> None:
        from luminosity.io.reading.text_lines import LETTERS
        from luminosity.io.writing import existing
        from luminosity.io.writing.destination import Destination
        from luminosity.io.writing.encoders import encoder
        from luminosity.io.writing.filesystem import OutputFile, exists, join, split

        destination = Destination.of(path)
        if not destination.is_one_file:
            raise OptionError(f"--dead-letters={path}: expected the name of a file, such as bad.jsonl")
        if exists(destination.path):
            raise OptionError(f"--dead-letters={path}: it exists already", fix="choose another name, or remove it")
        existing.check(destination)
        existing.check_access(destination)
        folder, name = split(destination.path)
        self._path = destination.path
        self._held: list[Unreadable] = []
        self._file = OutputFile(join(folder, f".{os.getpid()}-{name}"), destination.whole_file_compression)
        self._encoder = encoder(destination, self._file.sink, LETTERS)

    def add(self, line: Unreadable) -> None:
        self._held.append(line)
        if len(self._held) >= _LETTERS_HELD:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        from luminosity.io.reading.text_lines import letters

        self._encoder.write(pa.Table.from_batches([letters(self._held)]))
        self._held.clear()

    def finish(self) -> None:
        from luminosity.io.writing.filesystem import move

        self._write()
        self._encoder.close()
        self._file.close()
        move(self._file.path, self._path)

    def abandon(self) -> None:
        self._file.abandon()


def _has_csv(pattern: str) -> bool:
    from luminosity.io.lakes.by_name import is_name
    from luminosity.io.reading.find_files import find_files

    if is_name(pattern) or pattern.lower().endswith(".npy"):
        return False
    return any(file.format.is_csv for file in find_files([pattern], None))


def _delimiter(text: str) -> str:
    """Return the character that an option means.

    >>> _delimiter(";"), _delimiter("tab"), _delimiter("\\\\t")
    (';', '\\t', '\\t')
    """
    found = _NAMES.get(text.lower(), text)
    if len(found) != 1 or not found.isascii() or found in '"\r\n':
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one ASCII character, such as ';', or tab")
    return found
