"""Tables of Postgres with pgvector as stores of points.

A run writes to a table of its own, and publishes it in one transaction: rows are merged into the table that exists, or
the new table takes its name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.extras import require
from luminosity.io.stores.address import (
    StoreAddress,
    TransientError,
    check_vectors,
    is_abandoned,
    missing,
    retry,
    staged_name,
)
from luminosity.io.stores.points import Point, PointColumns, PointId, TableFacts
from luminosity.io.stores.postgres_tables import OPERATORS, PostgresTables, vector_text
from luminosity.io.stores.store import Distance, Hit, Query, SharedStore, Target, Write, WriteMode, is_near

__all__ = ["PostgresStore"]

_CONNECT_S = 10  # a server that is up responds much sooner
_LARGEST_SEARCH = 1_000  # the most candidates that an HNSW index looks at in one scan
_SIGNS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_MAY_PASS = ("starting up", "shutting down", "recovery mode", "too many", "terminating connection")

T = TypeVar("T")


class PostgresStore(SharedStore):
    """A table of a Postgres database. Work is repeated until the address's timeout if the connection breaks.

    Owned by one thread.
    """

    kind = "postgres"
    form = "postgresql://..."

    def __init__(self, address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> None:
        self._psycopg = require("psycopg", "postgres")
        self._address = address
        self._on_retry = on_retry
        self._connection: Any = None

    @classmethod
    def handles(cls, where: str) -> bool:
        """Return whether it is the address of a database."""
        return where.startswith(("postgresql://", "postgres://"))

    @classmethod
    def address(cls, where: str, collection: str | None, **settings: Any) -> StoreAddress:
        """Return the address. The table may be a part of it: ``postgresql://host/database?table=reviews``."""
        parts = urlsplit(where)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.password or "password" in query:
            raise InvalidArgument(
                f"found a password in the address of {parts.hostname or 'the database'}, where logs show it",
                fix=Fix(
                    "pass api_key_env= with the name of an environment variable that holds it, or set PGPASSWORD",
                    command="set the environment variable PGPASSWORD instead",
                ),
            )
        table = query.pop("table", None)
        if table and collection and table != collection:
            raise InvalidArgument(f"found the tables {table!r} and {collection!r}, expected one")
        return super().address(
            urlunsplit(parts._replace(query=urlencode(query, safe="/"))), collection or table, **settings
        )

    @classmethod
    def check_reachable(cls, address: StoreAddress) -> None:
        """Raise if the client is not installed here, or if no database accepts the connection."""
        with contextlib.closing(cls(address)) as store:
            try:
                store._connected()
            except TransientError as error:
                raise StoreError(str(error), fix="check the address, and that the server runs") from None

    @classmethod
    def names(cls, address: StoreAddress) -> list[str]:
        """Return the tables that have an id, a payload and a vector."""
        with contextlib.closing(cls(address)) as store:
            return store._run(lambda tables: tables.names())

    @classmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Do nothing: the server is asked when the pipeline starts."""

    def begin(self, mode: WriteMode, owner: str) -> str:
        """Return the name of a new table, and drop those of killed runs."""
        exists = self.vectors() is not None
        mode.check(self._address, exists)
        may_share = exists and mode.if_exists == "append"
        for name in self._run(lambda tables: tables.staged_names()):
            is_ours = name.startswith(f"{self._address.collection}--")
            if is_ours and is_abandoned(self._address, name, owner, may_share=may_share):
                self._run(lambda tables, name=name: tables.drop(name))
        return staged_name(self._address, owner)

    def prepare(self, staged: str, facts: TableFacts, columns: PointColumns, mode: WriteMode) -> Target:
        """Create the table that gets the points."""
        there = self.vectors()
        if not facts.points and mode.if_exists != "replace" and (there is None or not facts.rows):
            return Target(is_needed=False)
        sizes = facts.sizes_for(there, columns)
        if there is not None and mode.if_exists == "append":
            check_vectors(self._address, there, sizes, mode.distance)
        self._run(lambda tables: tables.create(staged, sizes, mode.distance, is_staged=True))
        return Target(staged=staged)

    def publish(self, target: Target, mode: WriteMode) -> None:
        """Merge the rows into the table that exists, or give their table its name, in one transaction."""
        self._run(lambda tables: tables.publish(target.staged, mode))

    def clean_up(self, target: Target) -> None:
        """Drop the table that says that its rows are published."""
        self._run(lambda tables: tables.drop(target.staged))

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the table if it is missing, and check its vectors."""
        found = self.vectors()
        WriteMode(distance, create).check(self._address, found is not None)
        if found is None:
            self._run(lambda tables: tables.create(self._address.collection, sizes, distance, is_staged=False))
            found = self.vectors()
        check_vectors(self._address, found or {}, sizes, distance)

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Read the columns of vectors from the catalogue."""
        return self._run(lambda tables: tables.vectors())

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Upsert and delete rows in one transaction."""
        self.write_together([(points, deleted)])

    def write_together(self, writes: Iterable[Write]) -> None:
        """Apply all writes in one transaction."""
        every = list(writes)  # The transaction may be repeated.
        self._run(lambda tables: [tables.write(*each) for each in every])

    def count(self) -> int:
        """Return the exact number of rows."""
        return self._run(lambda tables: tables.run("SELECT count(*) FROM {}", tables.used).fetchone())[0]

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Search for one vector after the other; all see the same rows."""
        there = self.vectors() or {}
        using = query.using if query.using is not None else next(iter(there), "")
        if using not in there:
            raise missing(self._address)
        distance = there[using][1]
        order = f"{{1}} {OPERATORS[distance][0]} %s::vector"
        fields = ", ".join(["%s::text, payload -> %s::text"] * len(query.payload))
        conditions, values = _conditions(query.equal)
        statement = (
            f"SELECT id, {order}, jsonb_build_object({fields}) FROM {{0}} "
            f"WHERE {{1}} IS NOT NULL{conditions} ORDER BY {order} LIMIT %s"
        )
        names = [name for each in query.payload for name in (each, each)]

        def searched(tables: PostgresTables) -> list[list[Any]]:
            tables.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            _tune(tables, query.limit)
            asked = [[text, *names, *values, text, query.limit] for text in map(vector_text, vectors)]
            column = tables.column(using)
            return [tables.run(statement, tables.used, column, values=each).fetchall() for each in asked]

        found = [
            [Hit(_identity(row[0]), _score(distance, row[1]), row[2]) for row in rows] for rows in self._run(searched)
        ]
        return [[hit for hit in hits if is_near(distance, hit.score, query.score_threshold)] for hits in found]

    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return some rows, or some with a value in the payload."""
        condition = "" if field is None else " WHERE payload -> %s::text <> 'null'::jsonb"
        statement = "SELECT id, payload FROM {}" + condition + " LIMIT %s"
        values = [limit] if field is None else [field, limit]
        rows = self._run(lambda tables: tables.run(statement, tables.used, values=values).fetchall())
        return [Hit(_identity(identity), 0.0, payload) for identity, payload in rows]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, work: Callable[[PostgresTables], T]) -> T:
        """Return the result of ``work`` in a transaction, which is repeated if the connection breaks."""
        return retry(lambda: self._run_once(work), self._address.timeout, self._on_retry)

    def _run_once(self, work: Callable[[PostgresTables], T]) -> T:
        connection = self._connected()
        errors = self._psycopg.errors
        try:
            with connection.transaction():
                return work(PostgresTables(connection, self._address))
        except (self._psycopg.OperationalError, self._psycopg.InterfaceError) as error:
            self.close()
            raise TransientError(f"{self._address}: {_said(error)}") from error
        except errors.UndefinedTable:
            raise missing(self._address) from None
        except self._psycopg.Error as error:
            raise StoreError(f"{self._address}: Postgres refused: {_said(error)}") from error

    def _connected(self) -> Any:
        """Return the connection. Raises ``TransientError`` if another attempt may help."""
        if self._connection is not None:
            return self._connection
        key = self._address.key()
        try:
            self._connection = self._psycopg.connect(
                self._address.where, autocommit=True, connect_timeout=_CONNECT_S, **({"password": key} if key else {})
            )
        except self._psycopg.OperationalError as error:
            message = f"{self._address} can't be reached: {_said(error)}"
            if "FATAL" in str(error) and not any(words in str(error) for words in _MAY_PASS):
                raise StoreError(message, fix="check the user, the password and the name of the database") from None
            raise TransientError(message) from error
        self._extend(self._connection)
        return self._connection

    def _extend(self, connection: Any) -> None:
        """Create pgvector's type in the database if it is missing."""
        if connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone() is not None:
            return
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except self._psycopg.errors.UniqueViolation:
            return  # Another worker was first.
        except self._psycopg.Error as error:
            raise StoreError(
                f"{self._address}: the database has no pgvector: {_said(error)}",
                fix="install pgvector on the server, and run CREATE EXTENSION vector",
            ) from None


def _tune(tables: PostgresTables, limit: int) -> None:
    """Let an index find as many rows as are asked for, also with a filter."""
    (version,) = tables.run("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
    candidates = str(max(40, min(2 * limit, _LARGEST_SEARCH)))
    tables.run("SELECT set_config('hnsw.ef_search', %s, true)", values=[candidates])
    if [int(each) for each in version.split(".")[:2]] >= [0, 8]:
        tables.run("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")


def _conditions(equal: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return a filter as SQL, and the values in it."""
    parts: list[str] = []
    values: list[Any] = []
    for name, value in equal.items():
        if isinstance(value, Mapping):
            for sign, bound in value.items():
                parts.append(
                    " AND CASE WHEN jsonb_typeof(payload -> %s::text) = 'number' "
                    f"THEN (payload ->> %s::text)::float8 {_SIGNS[sign]} %s::float8 ELSE false END"
                )
                values += [name, name, bound]
        else:
            parts.append(" AND payload -> %s::text = ANY(%s::jsonb[])")
            values += [name, [json.dumps(each) for each in (value if isinstance(value, list) else [value])]]
    return "".join(parts), values


def _score(distance: str, value: float) -> float:
    """Return the value of pgvector's operator as the score that other stores give.

    >>> _score("cosine", 0.25), _score("dot", -2.0), _score("euclid", 3.0)
    (0.75, 2.0, 3.0)
    """
    return 1 - value if distance == "cosine" else -value if distance == "dot" else value


def _identity(text: str) -> PointId:
    return int(text) if text.isdigit() else text


def _said(error: Exception) -> str:
    """Return the first line of an error, which has no values of rows."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
