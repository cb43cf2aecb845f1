"""The tables of a collection in Postgres: their columns, and the statements that create, fill and publish them.

A table has the columns ``id`` (text), ``payload`` (jsonb), and one for each vector; the comment of a vector's column
says how it is compared. The table to which a run writes also marks rows to delete, and its comment tells the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from luminosity._shared.shared_files import text_digest
from luminosity.errors import InvalidArgument, StoreError
from luminosity.extras import require
from luminosity.io.stores.address import StoreAddress, check_vectors, missing
from luminosity.io.stores.points import Point, PointId
from luminosity.io.stores.store import Distance, WriteMode

__all__ = ["OPERATORS", "PostgresTables", "vector_text"]

OPERATORS = {
    "cosine": ("<=>", "vector_cosine_ops"),
    "dot": ("<#>", "vector_ip_ops"),
    "euclid": ("<->", "vector_l2_ops"),
    "manhattan": ("<+>", "vector_l1_ops"),
}
"""How pgvector compares vectors at each distance, and how it indexes them."""

_INDEX_ROWS = 10_000  # Below, a scan takes milliseconds, and is exact.
_INDEX_SIZE = 2_000  # the most numbers of a vector that pgvector indexes
_UNNAMED = "vector"  # the column of a vector without a name
_PUBLISHED = "published "  # begins the comment of a table whose rows are published
_VECTORS = """
SELECT attname, atttypmod, col_description(attrelid, attnum) FROM pg_attribute
WHERE attrelid = to_regclass(quote_ident(%s)) AND atttypid = to_regtype('vector') AND NOT attisdropped AND attnum > 0
ORDER BY attnum
"""
_TABLES = """
SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND pg_table_is_visible(oid)
AND relname NOT LIKE 'luminosity\\_%'
AND EXISTS (SELECT 1 FROM pg_attribute WHERE attrelid = pg_class.oid AND atttypid = to_regtype('vector') AND attnum > 0)
AND 2 = (SELECT count(*) FROM pg_attribute WHERE attrelid = pg_class.oid AND attname IN ('id', 'payload'))
ORDER BY relname
"""
_STAGED = """
SELECT obj_description(oid) FROM pg_class
WHERE relname LIKE 'luminosity\\_%' AND relkind = 'r' AND obj_description(oid) IS NOT NULL
"""
_INDEXES = """
SELECT 1 FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey)
WHERE indrelid = to_regclass(quote_ident(%s)) AND attname = %s
"""


class PostgresTables:
    """The tables of a collection within one transaction."""

    def __init__(self, connection: Any, address: StoreAddress) -> None:
        self._connection = connection
        self._address = address
        self._sql = require("psycopg.sql", "postgres")
        self._used = self._table(address.name_to_use)
        self.used = self._sql.Identifier(self._used)
        """The table that points are written to and read from."""

    def run(self, text: str, *parts: Any, values: Sequence[Any] = ()) -> Any:
        """Execute a statement with ``parts``, such as identifiers, in its braces; return its cursor."""
        return self._connection.execute(self._sql.SQL(text).format(*parts), values or None)

    def column(self, vector: str) -> Any:
        """Return the identifier of a vector's column."""
        return self._sql.Identifier(vector or _UNNAMED)

    def names(self) -> list[str]:
        """Return the tables that have an id, a payload and a vector."""
        return [name for (name,) in self.run(_TABLES).fetchall()]

    def staged_names(self) -> list[str]:
        """Return the names that :meth:`create` and :meth:`publish` noted of tables that runs have not dropped."""
        return [comment.removeprefix(_PUBLISHED) for (comment,) in self.run(_STAGED).fetchall()]

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Return the size and distance of each vector, by name; None if the table does not exist."""
        return self._vectors(self._used)

    def create(self, name: str, sizes: Mapping[str, int], distance: Distance, *, is_staged: bool) -> None:
        """Create a table, unless another worker was first."""
        if taken := {vector or _UNNAMED for vector in sizes} & {"id", "payload", "is_deleted"}:
            raise InvalidArgument(f"found the vector name {min(taken)!r}, expected another: the table has this column")
        self._lock(name)
        table = self._table(name)
        if self.run("SELECT to_regclass(quote_ident(%s))", values=[table]).fetchone()[0] is not None:
            return
        own, literal = self._sql.Identifier(table), self._sql.Literal
        columns = [self._sql.SQL("{} vector({})").format(self.column(each), size) for each, size in sizes.items()]
        if is_staged:
            columns.append(self._sql.SQL("is_deleted boolean NOT NULL"))
        self.run("CREATE TABLE {} (id text PRIMARY KEY, payload jsonb NOT NULL, {})", own, self._listed(columns))
        for vector in sizes:
            comment = literal(distance if vector else f"{distance} without a name")
            self.run("COMMENT ON COLUMN {}.{} IS {}", own, self.column(vector), comment)
        if is_staged:
            self.run("COMMENT ON TABLE {} IS {}", own, literal(name))

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Upsert and delete rows, or mark them as deleted in the table of a run."""
        is_staged, there = bool(self._address.staged), self.vectors()
        if there is None:
            if points:
                raise missing(self._address)
            return
        flag = [False] if is_staged else []
        rows = [
            [str(point.id), json.dumps(point.payload), *(vector_text(point.vectors.get(name)) for name in there), *flag]
            for point in points
        ]
        if is_staged:
            rows += [[str(identity), "{}", *(None for _ in there), True] for identity in deleted]
        rows.sort(key=lambda row: str(row[0]))  # Workers that lock rows in one order never wait in a circle.
        columns = self._columns(there, is_staged)
        values = self._listed([self._sql.Placeholder() for _ in columns])
        upsert = self._sql.SQL("INSERT INTO {} (id, {}) VALUES (%s, {}) ON CONFLICT (id) DO UPDATE SET {}").format(
            self.used, self._listed(columns), values, self._replaced(columns)
        )
        if rows:
            with self._connection.cursor() as cursor:
                cursor.executemany(upsert, rows)
        if deleted and not is_staged:
            self.run("DELETE FROM {} WHERE id = ANY(%s)", self.used, values=[[str(each) for each in deleted]])

    def publish(self, staged: str, mode: WriteMode) -> None:
        """Merge the rows of a run's table into the table that exists, or give it that name. Does so once."""
        name, table = self._address.collection, self._table(staged)
        own, final = self._sql.Identifier(table), self._sql.Identifier(name)
        self._lock(name)
        (comment,) = self.run("SELECT obj_description(to_regclass(%s))", values=[table]).fetchone()
        if comment is None:
            raise StoreError(f"{self._address}: the table of this run, {table}, is gone", fix="run it again")
        if comment.startswith(_PUBLISHED):
            return
        there = self._vectors(name)
        if there is not None and mode.if_exists == "fail":
            mode.check(self._address, exists=True)
        if there is not None and mode.if_exists == "append":
            sizes = {vector: size for vector, (size, _) in (self._vectors(table) or {}).items()}
            check_vectors(self._address, there, sizes, mode.distance)
            self._merge(own, final, self._columns(sizes))
            self.run("TRUNCATE {}", own)
            self._index(name)
        else:
            self.run("DELETE FROM {} WHERE is_deleted", own)
            self.run("ALTER TABLE {} DROP COLUMN is_deleted", own)
            self.run("COMMENT ON TABLE {} IS NULL", own)
            self._index(table)
            self.run("DROP TABLE IF EXISTS {}", final)
            self.run("ALTER TABLE {} RENAME TO {}", own, final)
            self.run("CREATE TABLE {} ()", own)
        self.run("COMMENT ON TABLE {} IS {}", own, self._sql.Literal(_PUBLISHED + staged))

    def drop(self, staged: str) -> None:
        """Drop the table of a run."""
        self.run("DROP TABLE IF EXISTS {}", self._sql.Identifier(self._table(staged)))

    def _vectors(self, table: str) -> dict[str, tuple[int, str]] | None:
        found: dict[str, tuple[int, str]] = {}
        for column, size, comment in self.run(_VECTORS, values=[table]).fetchall():
            distance, _, unnamed = (comment or "cosine").partition(" ")
            found["" if unnamed else column] = (size, distance if distance in OPERATORS else "cosine")
        return found or None

    def _merge(self, own: Any, final: Any, columns: Sequence[Any]) -> None:
        self.run(
            "INSERT INTO {0} (id, {1}) SELECT id, {1} FROM {2} WHERE NOT is_deleted ORDER BY id "
            "ON CONFLICT (id) DO UPDATE SET {3}",
            *(final, self._listed(columns), own, self._replaced(columns)),
        )
        self.run("DELETE FROM {0} USING {1} WHERE {0}.id = {1}.id AND is_deleted", final, own)

    def _index(self, table: str) -> None:
        """Create an index for each vector that has none, if the table is large."""
        identifier = self._sql.Identifier(table)
        (rows,) = self.run("SELECT count(*) FROM {}", identifier).fetchone()
        for vector, (size, distance) in (self._vectors(table) or {}).items():
            if rows < _INDEX_ROWS or size > _INDEX_SIZE:
                continue
            if self.run(_INDEXES, values=[table, vector or _UNNAMED]).fetchone() is None:
                operators = self._sql.SQL(OPERATORS[distance][1])
                self.run("CREATE INDEX ON {} USING hnsw ({} {})", identifier, self.column(vector), operators)

    def _lock(self, name: str) -> None:
        """Hold a lock on a name until the transaction ends: another run must not create or replace the same table."""
        self.run("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", values=[f"luminosity {name}"])

    def _table(self, name: str) -> str:
        """Return the table of a name: that of a run is a digest, since Postgres cuts off names after 63 bytes."""
        return name if name == self._address.collection else f"luminosity_{text_digest(name, digits=24)}"

    def _columns(self, vectors: Iterable[str], is_staged: bool = False) -> list[Any]:
        marks = [self._sql.Identifier("is_deleted")] if is_staged else []
        return [self._sql.Identifier("payload"), *map(self.column, vectors), *marks]

    def _listed(self, parts: Sequence[Any]) -> Any:
        return self._sql.SQL(", ").join(parts)

    def _replaced(self, columns: Sequence[Any]) -> Any:
        return self._listed([self._sql.SQL("{0} = EXCLUDED.{0}").format(each) for each in columns])


def vector_text(vector: Sequence[float] | None) -> str | None:
    """Return a vector as pgvector reads it.

    >>> vector_text([1.0, 0.5])
    '[1.0, 0.5]'
    """
    return None if vector is None else str(list(vector))
