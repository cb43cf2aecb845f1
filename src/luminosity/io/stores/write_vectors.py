"""The transform that writes rows to a vector store, of any kind or to Qdrant."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import apache_beam as beam
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import DefaultTrigger
from apache_beam.transforms.window import GlobalWindows

from luminosity.core import WRITES
from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.stores.kinds import QDRANT, StoreTransform
from luminosity.io.stores.points import PointColumns
from luminosity.io.stores.staging import write_staged
from luminosity.io.stores.store import DISTANCES, Distance, IfExists, PointStore, StagedStore, WriteMode
from luminosity.io.stores.write_shared import PointWrites, UpsertDoFn, write_panes, write_table
from luminosity.io.writing.window_files import check_windows
from luminosity.runs.run_ids import run_identity

__all__ = ["WriteQdrant", "WriteVectors"]


class WriteVectors(StoreTransform):
    """Writes the rows of a table to a vector store as points, and deletes the points of rows marked ``_deleted``.

    Nothing is written before all rows have arrived and are checked, so a run that fails leaves the store as it was.
    The store then gets all points at once, except a collection that exists on a Qdrant server, and rows that are added
    to a Lance dataset: these appear batch by batch.

    In a stream, the points of a window are written when it ends, or when its trigger fires. A point never replaces one
    of a later window. In the global window without a trigger, and in windows that merge, rows are written to Qdrant and
    Postgres as they arrive.

    Writing a point again has no effect, so bundles may be retried. If rows of one batch have the same id, the last one
    counts; batches come in any order. The output is the number of rows of each write, once they are durable and
    visible: steps that must run after the writes can use it as a side input.

    >>> import tempfile
    >>> import pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> rows = pa.record_batch({"id": [1, 2], "text": ["a", "b"], "embedding": [[0.0, 1.0], [1.0, 0.0]]})
    >>> with beam.Pipeline() as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteVectors(folder, "letters", vectors="embedding")
    """

    _annotation = WRITES

    def __init__(
        self,
        where: str | os.PathLike[str],
        collection: str | None = None,
        *,
        vectors: str | Mapping[str, str],
        id: str = "id",
        payload: Sequence[str] | None = None,
        distance: Distance = "cosine",
        create: bool = True,
        if_exists: IfExists = "append",
        allow_empty: bool = False,
        batch_size: int = 1_000,
        timeout: float = 120.0,
        api_key_env: str | None = None,
        api_key: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            where: a Qdrant server's address (``http://...``), or a folder of this machine, in which Qdrant's engine
                keeps the collection without a server; a Lance dataset, a path that ends in ``.lance``; or a table of
                Postgres (``postgresql://me@host/db?table=...``).
            collection: the name of the collection. It is created with the first row if it does not exist. A Lance
                dataset and an address with a table need none.
            vectors: the column of the vector, or a mapping of vector names to columns. Nulls are left out; a row needs
                at least one vector.
            id: a column of unsigned integers, UUIDs, or other texts, which become UUIDs and are kept in the payload.
                :class:`~luminosity.AddRowIds` makes one.
            payload: the columns to keep beside the vectors; by default all others.
            distance: ``"cosine"``, ``"dot"``, ``"euclid"`` or ``"manhattan"``, for a collection that is created.
            create: False raises an error if the collection does not exist.
            if_exists: what to do if the collection exists: ``"append"`` adds the points, and replaces those with the
                same ids; ``"replace"`` puts a collection with only these points in its place; ``"fail"``.
            allow_empty: whether ``"replace"`` may leave a collection without points. Otherwise a run without rows
                keeps the collection and fails.
            batch_size: the most points of one write.
            timeout: how many seconds to retry while a server fails or other workers write to the folder.
            api_key_env: the environment variable of the workers that holds the server's key.
            api_key: a function that returns the key; it is called in the workers.
        """
        if distance not in DISTANCES:
            raise InvalidArgument(f"found distance={distance!r}, expected one of {', '.join(DISTANCES)}")
        if if_exists not in get_args(IfExists):
            raise InvalidArgument(f"found if_exists={if_exists!r}, expected one of {', '.join(get_args(IfExists))}")
        named = {"": vectors} if isinstance(vectors, str) else dict(vectors)
        if not named:
            raise InvalidArgument("found no vectors, expected a column, or a mapping of vector names to columns")
        settings = {"timeout": timeout, "batch_size": batch_size, "api_key_env": api_key_env, "api_key": api_key}
        super().__init__(where, collection, **settings)
        self._columns = PointColumns(named, id, payload)
        self._mode = WriteMode(distance, create, if_exists, allow_empty)

    def check_reachable(self) -> None:
        """Raise if the client library is not installed here, or if no server responds at the address.

        Call it before a long pipeline runs: workers retry a server that does not respond until their timeout.
        """
        self.kind.check_reachable(self._address)

    def check_writable(self) -> None:
        """Raise if the files of the store can't be written to, or if the collection exists and must not.

        This is also checked when the transform is applied. Servers are checked when the pipeline starts.
        """
        self.kind.check_writable(self._address, self._mode)

    def expand(self, input_or_inputs: Any) -> Any:
        """Write points, and emit the number of rows of each write."""
        rows, kind = input_or_inputs, self.kind
        identity = run_identity(rows.pipeline)
        if not rows.is_bounded and self._mode.if_exists != "append":
            raise StoreError(
                f"{self._address}: found unbounded input and if_exists={self._mode.if_exists!r}, expected bounded "
                "input: the new collection would never be complete",
                fix=Fix("pass if_exists='append'"),
            )
        writes = PointWrites(self._address, self._columns, self._mode)
        if not rows.is_bounded and not _has_panes(rows.windowing):
            if not issubclass(kind, PointStore):
                check_windows(str(self._address), rows.windowing)
            upsert = beam.ParDo(UpsertDoFn(writes), None).with_output_types(int)
            return identity.stable(rows) | "Upsert" >> upsert
        # A run that continues may have published the collection itself. The last step checks again.
        mode = replace(self._mode, if_exists="append") if identity.is_resumed else self._mode
        kind.check_writable(self._address, mode)
        if not issubclass(kind, StagedStore):
            return (write_table if rows.is_bounded else write_panes)(rows, writes, identity)
        # A run with a checkpoint recognizes its own collection by the mark that it leaves there.
        run = f"{identity.run}-{identity.number(str(self._address))}" if identity.is_durable else ""
        writer = kind.writer(self._address, self._columns, self._mode, run)
        return write_staged(rows, kind.staging_place(self._address), writer, identity, int)


class WriteQdrant(WriteVectors):
    """Writes the rows of a table to Qdrant, on a server or in a folder: :class:`WriteVectors` for Qdrant alone.

    >>> import tempfile
    >>> import pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> rows = pa.record_batch({"id": [1, 2], "text": ["a", "b"], "embedding": [[0.0, 1.0], [1.0, 0.0]]})
    >>> with beam.Pipeline() as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteQdrant(folder, "letters", vectors="embedding")
    """

    _among = QDRANT


def _has_panes(windowing: Windowing) -> bool:
    """Return whether the rows of a stream come in panes that are complete at some time.

    They don't in the global window without a trigger, and in windows that merge, which rows have for themselves.
    """
    if windowing.windowfn.is_merging():
        return False
    return not (isinstance(windowing.windowfn, GlobalWindows) and isinstance(windowing.triggerfn, DefaultTrigger))
