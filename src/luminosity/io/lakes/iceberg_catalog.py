"""Finds Iceberg tables: the catalog that the first part of a name means, and what is wrong if there is none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from luminosity._shared.text import did_you_mean, first_line, list_some
from luminosity.errors import Fix, InvalidArgument, LuminosityError, TableError, may_pass
from luminosity.extras import require

__all__ = ["IcebergAddress", "iceberg_errors"]

_SQLITE = "sqlite:///"
_SHOWN_TABLES = 10
_SHOWN_CHARACTERS = 300  # of an error of a library


@dataclass(frozen=True)
class IcebergAddress:
    """The address of a table. ``properties`` are those of the catalog, found before the run: workers may lack them."""

    catalog: str
    table: str  # with its namespaces
    properties: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @classmethod
    def of(cls, name: str, catalog: Mapping[str, str] | None) -> IcebergAddress:
        """Return the address of ``CATALOG.NAMESPACE.TABLE``, after finding the catalog's properties.

        >>> IcebergAddress.of("main.reviews", {})
        Traceback (most recent call last):
        luminosity.errors.InvalidArgument: iceberg:main.reviews: found 2 names, expected CATALOG.NAMESPACE.TABLE
        """
        names = name.split(".")
        if len(names) < 3 or not all(names):
            raise InvalidArgument(f"iceberg:{name}: found {len(names)} names, expected CATALOG.NAMESPACE.TABLE")
        found = cls(names[0], ".".join(names[1:]), dict(catalog or {}))
        with iceberg_errors(str(found)):
            return cls(found.catalog, found.table, _absolute(found.load_catalog().properties))

    def load_catalog(self) -> Any:
        """Return the catalog. Without properties, pyiceberg looks for them in its file and the environment."""
        require("pyiceberg", "iceberg")
        from pyiceberg.catalog import load_catalog

        with iceberg_errors(str(self)):
            return load_catalog(self.catalog, **self.properties)

    def load(self) -> Any:
        """Return the table as it is now. Raises if it does not exist."""
        found = self.find()
        if found is None:
            raise TableError(f"{self}: no such table; {self._near()[0]}", fix=self._near()[1] or None)
        return found

    def find(self) -> Any:
        """Return the table, or None if it does not exist."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with iceberg_errors(str(self)):
            try:
                return self.load_catalog().load_table(self.table)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def _near(self) -> tuple[str, str]:
        """Return what is there instead, and a suggestion."""
        from pyiceberg.exceptions import NoSuchNamespaceError

        space, _, _ = self.table.rpartition(".")
        with iceberg_errors(str(self)):
            catalog = self.load_catalog()
            try:
                there = [".".join(found) for found in catalog.list_tables(space)]
            except NoSuchNamespaceError:
                spaces = [".".join(found) for found in catalog.list_namespaces()]
                has = list_some(spaces, _SHOWN_TABLES) if spaces else "none"
                return f"the catalog has the namespaces: {has}", did_you_mean(space, spaces)
        has = list_some(there, _SHOWN_TABLES) if there else "none"
        return f"the namespace {space} has the tables: {has}", did_you_mean(self.table, there)

    def __str__(self) -> str:
        return f"iceberg:{self.catalog}.{self.table}"


def _absolute(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties with the full path of a database file: workers may run in another folder."""
    uri = properties.get("uri", "")
    if uri.startswith(_SQLITE) and len(uri) > len(_SQLITE) and not uri.startswith(_SQLITE + ":"):
        return {**properties, "uri": _SQLITE + os.path.abspath(uri[len(_SQLITE) :])}
    return dict(properties)


@contextlib.contextmanager
def iceberg_errors(name: str) -> Generator[None]:
    """Turn the errors of a catalog into a ``TableError`` about a table."""
    require("pyiceberg", "iceberg")
    from pyiceberg.exceptions import (
        ForbiddenError,
        NoSuchNamespaceError,
        NoSuchTableError,
        NotInstalledError,
        OAuthError,
        RESTError,
        UnauthorizedError,
    )

    try:
        yield
    except (NoSuchTableError, NoSuchNamespaceError):
        raise
    except (ForbiddenError, OAuthError, UnauthorizedError) as error:
        raise TableError(
            f"{name}: the catalog refuses the credentials: {_line(error)}",
            fix="check the catalog's token or credential: in catalog=, ~/.pyiceberg.yaml or PYICEBERG_CATALOG__…",
        ) from error
    except NotInstalledError as error:
        text, _, install = _line(error).partition(": ")
        raise TableError(
            f"{name}: a library for the catalog is missing: {text}", fix=f"install it: {install}" if install else None
        ) from error
    except RESTError as error:
        raise TableError(f"{name}: the catalog answers: {_line(error)}", may_pass=True) from error
    except (ValueError, OSError) as error:
        if isinstance(error, LuminosityError):
            raise
        catalog = name.removeprefix("iceberg:").partition(".")[0]
        if "URI missing" in str(error) or "type" in str(error).lower():
            raise TableError(
                f"{name}: no settings for the catalog {catalog!r}: {_line(error)}",
                fix=Fix(
                    'pass catalog={"type": "rest", "uri": "https://…"}, or describe it in ~/.pyiceberg.yaml or '
                    f"PYICEBERG_CATALOG__{catalog.upper()}__URI",
                    command=f"describe it in ~/.pyiceberg.yaml, or set PYICEBERG_CATALOG__{catalog.upper()}__URI",
                ),
            ) from error
        raise TableError(
            f"{name}: can't be used: {_line(error)}", may_pass=may_pass(error, in_user_code=False)
        ) from error
    except Exception as error:
        if not type(error).__module__.startswith(("sqlalchemy", "sqlite3")):
            raise
        raise TableError(
            f"{name}: the database of the catalog can't be used: {_line(error)}",
            fix="check the path of the database, and that this user may write there",
        ) from error


def _line(error: BaseException) -> str:
    return first_line(str(error) or type(error).__name__, _SHOWN_CHARACTERS)
