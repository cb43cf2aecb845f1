"""Tables of Postgres with pgvector as stores of points.

A table has the columns ``id`` (text), ``payload`` (jsonb), and one for each vector; the comment of a vector's column
says how it is compared. A run writes to a table of its own, whose comment tells the run, and publishes it in one
transaction: rows are merged into the table that exists, or the new table takes its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from luminosity._shared.digests import text_digest
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
from luminosity.io.stores.store import Distance, Hit, Query, SharedStore, Target, Write, WriteMode, is_near

__all__ = ["PostgresStore"]

_CONNECT_S = 10  # a server that is up responds much sooner
_INDEX_ROWS = 10_000  # Below, a scan takes milliseconds, and is exact.
_INDEX_SIZE = 2_000  # the most numbers of a vector that pgvector indexes
_LARGEST_SEARCH = 1_000  # the most candidates that an HNSW index looks at in one scan
_UNNAMED = "vector"  # the column of a vector without a name
_PUBLISHED = "published "  # begins the comment of a table whose rows are published
_OPERATORS = {
    "cosine": ("<=>", "vector_cosine_ops"),
    "dot": ("<#>", "vector_ip_ops"),
    "euclid": ("<->", "vector_l2_ops"),
    "manhattan": ("<+>", "vector_l1_ops"),
}
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
        self._sql = require("psycopg.sql", "postgres")
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
        store = cls(address)
        try:
            store._connected()
        except TransientError as error:
            raise StoreError(str(error), fix="check the address, and that the server runs") from None
        finally:
            store.close()

    @classmethod
    def names(cls, address: StoreAddress) -> list[str]:
        """Return the tables that have an id, a payload and a vector."""
        store = cls(address)
        try:
            found = store._run(lambda connection: connection.execute(_TABLES).fetchall())
        finally:
            store.close()
        return [name for (name,) in found]

    @classmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Do nothing: the server is asked when the pipeline starts."""

    def begin(self, mode: WriteMode, owner: str) -> str:
        """Return the name of a new table, and drop those of killed runs."""
        exists = self.vectors() is not None
        mode.check(self._address, exists)
        may_share = exists and mode.if_exists == "append"
        for (comment,) in self._run(lambda connection: connection.execute(_STAGED).fetchall()):
            name = comment.removeprefix(_PUBLISHED)
            if name.startswith(f"{self._address.collection}--") and is_abandoned(
                self._address, name, owner, may_share=may_share
            ):
                self._drop(name)
        return staged_name(self._address, owner)

    def prepare(self, staged: str, facts: TableFacts, columns: PointColumns, mode: WriteMode) -> Target:
        """Create the table that gets the points."""
        there = self.vectors()
        if not facts.points and mode.if_exists != "replace" and (there is None or not facts.rows):
            return Target(is_needed=False)
        sizes = facts.sizes_for(there, columns)
        if there is not None and mode.if_exists == "append":
            check_vectors(self._address, there, sizes, mode.distance)
        self._run(lambda connection: self._create(connection, staged, sizes, mode.distance, is_staged=True))
        return Target(staged=staged)

    def publish(self, target: Target, mode: WriteMode) -> None:
        """Merge the rows into the table that exists, or give their table its name, in one transaction."""
        self._run(lambda connection: self._publish(connection, target.staged, mode))

    def clean_up(self, target: Target) -> None:
        """Drop the table that says that its rows are published."""
        self._drop(target.staged)

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the table if it is missing, and check its vectors."""
        found = self.vectors()
        WriteMode(distance, create).check(self._address, found is not None)
        if found is None:
            name = self._address.collection
            self._run(lambda connection: self._create(connection, name, sizes, distance, is_staged=False))
            found = self.vectors()
        check_vectors(self._address, found or {}, sizes, distance)

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Read the columns of vectors from the catalogue."""
        return self._run(lambda connection: self._vectors(connection, self._table(self._address.name_to_use)))

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Upsert and delete rows in one transaction."""
        self.write_together([(points, deleted)])

    def write_together(self, writes: Iterable[Write]) -> None:
        """Apply all writes in one transaction."""
        every = list(writes)  # The transaction may be repeated.
        self._run(lambda connection: [self._write(connection, *each) for each in every])

    def count(self) -> int:
        """Return the exact number of rows."""
        (count,) = self._select(self._format("SELECT count(*) FROM {}", self._identifier()))[0]
        return count

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Search for one vector after the other; all see the same rows."""
        there = self.vectors() or {}
        using = query.using if query.using is not None else next(iter(there), "")
        if using not in there:
            raise missing(self._address)
        distance = there[using][1]
        column, value = self._column(using), self._sql.SQL("%s::vector")
        order = self._format("{} " + _OPERATORS[distance][0] + " {}", column, value)
        conditions, values = self._conditions(query.equal)
        fields = self._sql.SQL(", ").join([self._sql.SQL("%s::text, payload -> %s::text") for _ in query.payload])
        statement = self._format(
            "SELECT id, {0}, jsonb_build_object({1}) FROM {2} WHERE {3} IS NOT NULL{4} ORDER BY {0} LIMIT %s",
            *(order, fields, self._identifier(), column, conditions),
        )
        names = [name for each in query.payload for name in (each, each)]

        def searched(connection: Any) -> list[list[Any]]:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._tune(connection, query.limit)
            texts = [_text(vector) for vector in vectors]
            return [
                connection.execute(statement, [text, *names, *values, text, query.limit]).fetchall() for text in texts
            ]

        found = [
            [Hit(_identity(row[0]), _score(distance, row[1]), row[2]) for row in rows] for rows in self._run(searched)
        ]
        return [[hit for hit in hits if is_near(distance, hit.score, query.score_threshold)] for hits in found]

    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return some rows, or some with a value in the payload."""
        condition = "" if field is None else " WHERE payload -> %s::text <> 'null'::jsonb"
        statement = self._format("SELECT id, payload FROM {}" + condition + " LIMIT %s", self._identifier())
        rows = self._select(statement, [limit] if field is None else [field, limit])
        return [Hit(_identity(identity), 0.0, payload) for identity, payload in rows]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _publish(self, connection: Any, staged: str, mode: WriteMode) -> None:
        name, table = self._address.collection, self._table(staged)
        _lock(connection, name)
        (comment,) = connection.execute("SELECT obj_description(to_regclass(%s))", [table]).fetchone()
        if comment is None:
            raise StoreError(f"{self._address}: the table of this run, {table}, is gone", fix="run it again")
        if comment.startswith(_PUBLISHED):
            return
        there, new = self._vectors(connection, name), self._vectors(connection, table)
        if there is not None and mode.if_exists == "fail":
            mode.check(self._address, exists=True)
        own, final = self._sql.Identifier(table), self._sql.Identifier(name)
        if there is not None and mode.if_exists == "append":
            sizes = {vector: size for vector, (size, _) in (new or {}).items()}
            check_vectors(self._address, there, sizes, mode.distance)
            self._merge(connection, own, final, list(sizes))
            connection.execute(self._format("TRUNCATE {}", own))
        else:
            connection.execute(self._format("DELETE FROM {} WHERE is_deleted", own))
            connection.execute(self._format("ALTER TABLE {} DROP COLUMN is_deleted", own))
            connection.execute(self._format("COMMENT ON TABLE {} IS NULL", own))
            self._index(connection, table)
            connection.execute(self._format("DROP TABLE IF EXISTS {}", final))
            connection.execute(self._format("ALTER TABLE {} RENAME TO {}", own, final))
            connection.execute(self._format("CREATE TABLE {} ()", own))
        if there is not None and mode.if_exists == "append":
            self._index(connection, name)
        connection.execute(self._format("COMMENT ON TABLE {} IS {}", own, self._sql.Literal(_PUBLISHED + staged)))

    def _merge(self, connection: Any, own: Any, final: Any, vectors: Sequence[str]) -> None:
        sql = self._sql
        columns = [sql.Identifier("payload"), *map(self._column, vectors)]
        listed = sql.SQL(", ").join(columns)
        changed = sql.SQL(", ").join([self._format("{0} = EXCLUDED.{0}", each) for each in columns])
        connection.execute(
            self._format(
                "INSERT INTO {0} (id, {1}) SELECT id, {1} FROM {2} WHERE NOT is_deleted ORDER BY id "
                "ON CONFLICT (id) DO UPDATE SET {3}",
                *(final, listed, own, changed),
            )
        )
        connection.execute(self._format("DELETE FROM {0} USING {1} WHERE {0}.id = {1}.id AND is_deleted", final, own))

    def _index(self, connection: Any, table: str) -> None:
        """Create an index for each vector that has none, if the table is large."""
        identifier = self._sql.Identifier(table)
        (rows,) = connection.execute(self._format("SELECT count(*) FROM {}", identifier)).fetchone()
        for vector, (size, distance) in (self._vectors(connection, table) or {}).items():
            if rows < _INDEX_ROWS or size > _INDEX_SIZE:
                continue
            if connection.execute(_INDEXES, [table, self._name(vector)]).fetchone() is None:
                statement = "CREATE INDEX ON {} USING hnsw ({} " + _OPERATORS[distance][1] + ")"
                connection.execute(self._format(statement, identifier, self._column(vector)))

    def _write(self, connection: Any, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        table, is_staged = self._identifier(), bool(self._address.staged)
        there = self._vectors(connection, self._table(self._address.name_to_use))
        if there is None:
            if points:
                raise missing(self._address)
            return
        names = list(there)
        columns = [self._sql.Identifier("payload"), *map(self._column, names)]
        if is_staged:
            columns.append(self._sql.Identifier("is_deleted"))
        values = [self._sql.Placeholder() for _ in columns]
        upsert = self._format(
            "INSERT INTO {} (id, {}) VALUES (%s, {}) ON CONFLICT (id) DO UPDATE SET {}",
            *(table, self._sql.SQL(", ").join(columns), self._sql.SQL(", ").join(values)),
            self._sql.SQL(", ").join([self._format("{0} = EXCLUDED.{0}", each) for each in columns]),
        )
        flag = [False] if is_staged else []
        rows = [
            [str(point.id), json.dumps(point.payload), *(_text(point.vectors.get(name)) for name in names), *flag]
            for point in points
        ]
        if is_staged:
            rows += [[str(identity), "{}", *(None for _ in names), True] for identity in deleted]
        rows.sort(
            key=lambda row: str(row[0])
        )  # Workers that lock rows in one order never wait for each other in a circle.
        with connection.cursor() as cursor:
            if rows:
                cursor.executemany(upsert, rows)
            if deleted and not is_staged:
                cursor.execute(
                    self._format("DELETE FROM {} WHERE id = ANY(%s)", table), [[str(each) for each in deleted]]
                )

    def _create(
        self, connection: Any, name: str, sizes: Mapping[str, int], distance: Distance, *, is_staged: bool
    ) -> None:
        """Create a table, unless another worker was first."""
        if taken := {self._name(vector) for vector in sizes} & {"id", "payload", "is_deleted"}:
            raise InvalidArgument(f"found the vector name {min(taken)!r}, expected another: the table has this column")
        _lock(connection, name)
        table = self._table(name)
        if connection.execute("SELECT to_regclass(quote_ident(%s))", [table]).fetchone()[0] is not None:
            return
        identifier = self._sql.Identifier(table)
        columns = [self._format("{} vector({})", self._column(each), size) for each, size in sizes.items()]
        if is_staged:
            columns.append(self._sql.SQL("is_deleted boolean NOT NULL"))
        listed = self._sql.SQL(", ").join(columns)
        connection.execute(
            self._format("CREATE TABLE {} (id text PRIMARY KEY, payload jsonb NOT NULL, {})", identifier, listed)
        )
        for vector in sizes:
            comment = self._sql.Literal(distance if vector else f"{distance} without a name")
            connection.execute(self._format("COMMENT ON COLUMN {}.{} IS {}", identifier, self._column(vector), comment))
        if is_staged:
            connection.execute(self._format("COMMENT ON TABLE {} IS {}", identifier, self._sql.Literal(name)))

    def _vectors(self, connection: Any, table: str) -> dict[str, tuple[int, str]] | None:
        rows = connection.execute(_VECTORS, [table]).fetchall()
        if not rows:
            return None
        found: dict[str, tuple[int, str]] = {}
        for column, size, comment in rows:
            distance, _, unnamed = (comment or "cosine").partition(" ")
            found["" if unnamed else column] = (size, distance if distance in _OPERATORS else "cosine")
        return found

    def _tune(self, connection: Any, limit: int) -> None:
        """Let an index find as many rows as are asked for, also with a filter."""
        (version,) = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
        candidates = str(max(40, min(2 * limit, _LARGEST_SEARCH)))
        connection.execute("SELECT set_config('hnsw.ef_search', %s, true)", [candidates])
        if [int(each) for each in version.split(".")[:2]] >= [0, 8]:
            connection.execute("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")

    def _conditions(self, equal: Mapping[str, Any]) -> tuple[Any, list[Any]]:
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
        return self._sql.SQL("".join(parts)), values

    def _drop(self, staged: str) -> None:
        statement = self._format("DROP TABLE IF EXISTS {}", self._sql.Identifier(self._table(staged)))
        self._run(lambda connection: connection.execute(statement))

    def _select(self, statement: Any, values: Sequence[Any] = ()) -> list[Any]:
        return self._run(lambda connection: connection.execute(statement, values).fetchall())

    def _table(self, name: str) -> str:
        """Return the table of a name: that of a run is a digest, since Postgres cuts off names after 63 bytes."""
        return name if name == self._address.collection else f"luminosity_{text_digest(name, digits=24)}"

    def _identifier(self) -> Any:
        return self._sql.Identifier(self._table(self._address.name_to_use))

    @staticmethod
    def _name(vector: str) -> str:
        return vector or _UNNAMED

    def _column(self, vector: str) -> Any:
        return self._sql.Identifier(self._name(vector))

    def _format(self, text: str, *parts: Any) -> Any:
        return self._sql.SQL(text).format(*parts)

    def _run(self, work: Callable[[Any], T]) -> T:
        """Return the result of ``work`` in a transaction, which is repeated if the connection breaks."""
        return retry(lambda: self._run_once(work), self._address.timeout, self._on_retry)

    def _run_once(self, work: Callable[[Any], T]) -> T:
        connection = self._connected()
        errors = self._psycopg.errors
        try:
            with connection.transaction():
                return work(connection)
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


_VECTORS = """
SELECT attname, atttypmod, col_description(attrelid, attnum) FROM pg_attribute
WHERE attrelid = to_regclass(quote_ident(%s)) AND atttypid = to_regtype('vector') AND NOT attisdropped AND attnum > 0
ORDER BY attnum
"""
_TABLES = """
SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND pg_table_is_visible(oid)
AND relname NOT LIKE 'luminosity\\_%%'
AND EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = pg_class.oid AND atttypid = to_regtype('vector') AND attnum > 0)
AND 2 = (SELECT count(*) FROM pg_attribute WHERE attrelid = pg_class.oid AND attname IN ('id', 'payload'))
ORDER BY relname
"""
_STAGED = """
SELECT obj_description(oid) FROM pg_class
WHERE relname LIKE 'luminosity\\_%%' AND relkind = 'r' AND obj_description(oid) IS NOT NULL
"""
_INDEXES = """
SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey)
WHERE indrelid = to_regclass(quote_ident(%s)) AND attname = %s
"""


def _lock(connection: Any, name: str) -> None:
    """Hold a lock on a name until the transaction ends: another run must not create or replace the same table."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"luminosity {name}"])


def _text(vector: Sequence[float] | None) -> str | None:
    """Return a vector as pgvector reads it.

    >>> _text([1.0, 0.5])
    '[1.0, 0.5]'
    """
    return None if vector is None else str(list(vector))


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
