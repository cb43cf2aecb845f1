"""Finds Delta tables, and reads their log: the files that a version added, and when."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from luminosity._shared.text import first_line
from luminosity.errors import Fix, InvalidArgument, LuminosityError, TableError, may_pass
from luminosity.extras import require

__all__ = ["Added", "DeltaAddress", "appended_by", "made_at"]

_SHOWN_CHARACTERS = 300  # of an error of a library


@dataclass(frozen=True)
class DeltaAddress:
    """The folder of a table, on this machine or on a store that deltalake knows; ``options`` has the credentials."""

    path: str
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @classmethod
    def of(cls, path: str, options: Mapping[str, str] | None) -> DeltaAddress:
        """Return the address. Workers may run in another folder, so that paths are made absolute."""
        require("deltalake", "delta")
        return cls(path if "://" in path else os.path.abspath(path), dict(options or {}))

    @property
    def is_local(self) -> bool:
        """Whether the table is in a folder of this machine."""
        return "://" not in self.path

    def find(self, at: Any = None) -> Any:
        """Return the table at a version or time, or None if there is no table."""
        from deltalake import DeltaTable as Table
        from deltalake.exceptions import TableNotFoundError

        if isinstance(at, bool) or not isinstance(at, int | datetime.datetime | None):
            raise InvalidArgument(f"{self}: found the version {at!r}, expected a number or a time")
        with self.errors():
            if self.is_local and not os.path.isdir(os.path.join(self.path, "_delta_log")):
                return None  # deltalake would make the folder
            try:
                table = Table(self.path, storage_options=dict(self.options) or None)
            except TableNotFoundError:
                return None
            newest = table.version()
            if at is None or at == newest:
                return table
            if isinstance(at, int) and not 0 <= at <= newest:
                raise TableError(f"{self}: found the version {at}, expected 0 to {newest}")
            if isinstance(at, int):
                table.load_as_version(at)
                return table
            at = at.astimezone(datetime.timezone.utc)  # a time without a zone is that of this machine
            table.load_as_version(at)
            if (made := made_at(table)) is not None and at < made:
                raise TableError(
                    f"{self}: found the time {at.isoformat()}, expected {made.isoformat()}, its first version, or later"
                )
            return table

    def load(self, at: Any = None) -> Any:
        """Return the table. Raises if there is none."""
        found = self.find(at)
        if found is None:
            raise TableError(f"{self}: no Delta table: {self._instead()}")
        return found

    def _instead(self) -> str:
        if not self.is_local:
            return "it has no folder _delta_log"
        if not os.path.isdir(self.path):
            return "the folder does not exist"
        return "the folder has no _delta_log in it"

    @contextlib.contextmanager
    def errors(self) -> Generator[None]:
        """Turn the errors of deltalake into a ``TableError``."""
        require("deltalake", "delta")
        from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

        try:
            yield
        except (LuminosityError, CommitFailedError, TableNotFoundError):
            raise
        except Exception as error:
            # deltalake also raises plain Exceptions.
            if type(error) is not Exception and not isinstance(error, DeltaError | OSError | ValueError):
                raise
            text = first_line(str(error) or type(error).__name__, _SHOWN_CHARACTERS)
            fix = None
            if not self.is_local and any(
                word in str(error).lower() for word in ("credential", "forbidden", "403", "401")
            ):
                fix = Fix(
                    "pass storage_options= with the credentials", command="set the credentials in the environment"
                )
            raise TableError(
                f"{self}: can't be used: {text}", fix=fix, may_pass=may_pass(error, in_user_code=False)
            ) from error

    def open_file(self, path: str) -> Any:
        """Open a data file."""
        if "://" not in path:
            return pa.OSFile(path)
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        folder, _, name = path.rpartition("/")
        system = PyFileSystem(DeltaStorageHandler(folder, dict(self.options) or None))
        return system.open_input_file(name)

    def join(self, name: str) -> str:
        """Return the path of a data file from its name in the log, which may be a whole address."""
        return name if "://" in name else f"{self.path.rstrip('/')}/{unquote(name)}"

    def __str__(self) -> str:
        return f"delta:{self.path}"


def made_at(table: Any) -> datetime.datetime | None:
    """Return when the loaded version was committed; None if the log does not tell."""
    loaded = table.version()
    milliseconds = next((each.get("timestamp") for each in table.history() if each.get("version") == loaded), None)
    if milliseconds is None:
        return None
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.timezone.utc)


@dataclass(frozen=True)
class Added:
    """The files that a version appended. Those that it only moved, as compaction does, are left out."""

    version: int
    micros: int  # when it was committed, since 1970
    files: Sequence[Mapping[str, Any]]


def appended_by(address: DeltaAddress, version: int) -> Added:
    """Return what a version appended. Raises if it did more than that, or is not in the log any more."""
    path = address.join(f"_delta_log/{version:020d}.json")
    try:
        with address.errors(), address.open_file(path) as file:
            actions = [json.loads(line) for line in file.read().splitlines() if line]
    except (FileNotFoundError, TableError) as error:
        if not isinstance(error.__cause__ or error, FileNotFoundError):
            raise
        raise TableError(
            f"{address}: version {version} is not in the log any more, expected one that is kept until it is read",
            fix=Fix("keep the log for longer (delta.logRetentionDuration), and read the whole table once"),
        ) from error
    milliseconds = 0
    added: list[Mapping[str, Any]] = []
    for action in actions:
        (kind, value), *_ = action.items()
        if kind == "commitInfo":
            milliseconds = value.get("inCommitTimestamp") or value.get("timestamp") or 0
        elif kind == "add" and value["dataChange"]:
            added.append(value)
        if (kind == "remove" and value["dataChange"]) or (kind == "add" and value.get("deletionVector")):
            raise TableError(
                f"{address}: version {version} deleted or updated rows, expected only appended rows",
                fix=Fix(f"begin after it with since={version}, or read with changes_since= if the table records them"),
            )
    milliseconds = milliseconds or max((each.get("modificationTime") or 0 for each in added), default=0)
    return Added(version, milliseconds * 1000, added)
