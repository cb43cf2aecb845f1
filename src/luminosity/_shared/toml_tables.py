"""Reads the tables of a TOML file, and names file and line of what is wrong.

Errors are of the class that the reader's owner raises: a ``DriftError`` for a watch, for example.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeAlias, cast

from luminosity._shared.text import did_you_mean, parse_duration

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

__all__ = ["MakeError", "TomlTable", "read_toml"]

MakeError: TypeAlias = Callable[[str, "str | None"], Exception]
"""Returns an error with a message and a remedy."""

_ANY_HEADER = re.compile(r"\s*\[")


def read_toml(path: str, make_error: MakeError) -> TomlTable:
    """Return the content of a file as a table. What is wrong is raised as ``make_error`` returns it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise make_error(f"{path}: {error}, expected TOML", None) from None
    except (OSError, UnicodeDecodeError) as error:
        raise make_error(f"{path} can't be read: {getattr(error, 'strerror', None) or error}", None) from None
    return TomlTable(content, path, text.splitlines(), 0, make_error)


class TomlTable:
    """A table of a file. Each value is taken once, with its type; ``finish`` refuses what nothing has taken."""

    def __init__(self, values: dict[str, Any], path: str, lines: list[str], line: int, make_error: MakeError) -> None:
        self._values = values
        self._path = path
        self._lines = lines
        self._line = line  # of the table's header; 0 for the whole file
        self._make_error = make_error
        self._taken: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def line(self) -> int:
        """The line of the table's header; 1 for the whole file."""
        return max(1, self._line)

    def value(self, name: str) -> Any:
        """Return a value of any type, or None."""
        self._taken[name] = None
        return self._values.get(name)

    def tables(self, name: str) -> list[TomlTable]:
        """Return the tables ``[[name]]``."""
        found = self.value(name)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in cast("list[Any]", found)):
            raise self.error(name, f"found {name}={found!r}, expected tables with the header [[{name}]]")
        header = re.compile(rf"\s*\[\[\s*[\"']?{re.escape(name)}[\"']?\s*\]\]")
        headers = [number for number, line in enumerate(self._lines, 1) if header.match(line)]
        headers += [self.line_of(name)] * len(cast("list[Any]", found))
        return [
            TomlTable(each, self._path, self._lines, headers[number], self._make_error)
            for number, each in enumerate(cast("list[dict[str, Any]]", found))
        ]

    def table(self, name: str) -> TomlTable:
        """Return the table ``[name]``, which is empty if it is not there."""
        found = self.value(name)
        if not isinstance(found, dict | None):
            raise self.error(name, f"found {name}={found!r}, expected a table with the header [{name}]")
        values = cast("dict[str, Any]", found or {})
        return TomlTable(values, self._path, self._lines, self.line_of(name), self._make_error)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text that is not empty."""
        found = self.value(name)
        if found is None:
            return default
        if not isinstance(found, str) or not found.strip():
            raise self.error(name, f"found {name}={found!r}, expected a text")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; one text is a list of one."""
        found = self.value(name)
        found = [found] if isinstance(found, str) else found
        if found is None:
            return ()
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in cast("list[Any]", found)):
            raise self.error(name, f"found {name}={found!r}, expected a list of texts")
        return tuple(cast("list[str]", found))

    def mapping(self, name: str) -> dict[str, str]:
        """Return a table of texts."""
        found = self.value(name)
        if found is None:
            return {}
        if not isinstance(found, dict) or not all(
            isinstance(each, str) for each in cast("dict[str, Any]", found).values()
        ):
            raise self.error(name, f"found {name}={found!r}, expected a table of texts")
        return cast("dict[str, str]", found)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        found = self.value(name)
        if found is not None and not isinstance(found, bool):
            raise self.error(name, f"found {name}={found!r}, expected true or false")
        return bool(found)

    def number(self, name: str, low: float, high: float, *, is_whole: bool = False) -> float | None:
        """Return a number above ``low`` (or equal, for whole numbers) and at most ``high``."""
        found = self.value(name)
        if found is None:
            return None
        kinds = (int,) if is_whole else (int, float)
        is_number = isinstance(found, kinds) and not isinstance(found, bool)
        if not is_number or not (low <= found <= high if is_whole else low < found <= high):
            kind = "a whole number from" if is_whole else "a number above"
            raise self.error(name, f"found {name}={found!r}, expected {kind} {low:g} up to {high:g}")
        return found

    def duration(self, name: str, *, never: bool = False) -> timedelta | None:
        """Return a time such as ``1h``; with ``never``, the text ``never`` is ``timedelta.max``."""
        found = self.value(name)
        if found is None:
            return None
        if never and found == "never":
            return timedelta.max
        parsed = parse_duration(found) if isinstance(found, str) else None
        if not parsed:
            raise self.error(
                name,
                f"found {name}={found!r}, expected a time such as '15m', '1h' or '1d'"
                + (" or 'never'" if never else ""),
            )
        return parsed

    def moment(self, name: str) -> datetime | None:
        """Return a date with a time; one without a zone is UTC."""
        found = self.value(name)
        if found is None:
            return None
        if not isinstance(found, datetime):
            raise self.error(name, f"found {name}={found!r}, expected a date with a time, such as 2030-01-31T08:00:00Z")
        return found if found.tzinfo else found.replace(tzinfo=timezone.utc)

    def unknown(self) -> str | None:
        """Return the first key that nothing has taken."""
        return next((name for name in self._values if name not in self._taken), None)

    def finish(self, where: str) -> None:
        """Raise an error for a key that nothing has taken."""
        if (name := self.unknown()) is not None:
            fix = did_you_mean(name, self._taken) or f"use {', '.join(self._taken)}"
            raise self.error(name, f"unknown key {name!r} in {where}", fix)

    def line_of(self, name: str) -> int:
        """Return the line of a key in this table, or of the table's header."""
        pattern = re.compile(rf"\s*\[*\s*[\"']?{re.escape(name)}[\"']?\s*[=\].]")
        for number, line in enumerate(self._lines[self._line :], self._line + 1):
            if pattern.match(line):
                return number
            if self._line and _ANY_HEADER.match(line):
                break
        return self.line

    def error(self, name: str, message: str, fix: str = "") -> Exception:
        """Return an error about a key, with file and line."""
        return self._make_error(f"{self._path}:{self.line_of(name)}: {message}", fix or None)

    def choose(self, names: Collection[str]) -> str | None:
        """Return which one of these keys is there, or None; several are an error."""
        found = [name for name in names if name in self._values]
        for name in names:
            self._taken[name] = None
        if len(found) > 1:
            raise self.error(found[1], f"found both {found[0]} and {found[1]}, expected one of {', '.join(names)}")
        return found[0] if found else None
