"""The transform that writes rows to Qdrant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import apache_beam as beam

from luminosity.core import WRITES
from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.stores.connect import check_folder, check_reachable
from luminosity.io.stores.points import PointColumns
from luminosity.io.stores.publish_panes import has_panes, publish_panes
from luminosity.io.stores.publish_points import publish_table
from luminosity.io.stores.qdrant_collection import DISTANCES, CollectionAddress, Distance, IfExists, WriteMode
from luminosity.io.stores.upsert_step import UpsertDoFn
from luminosity.runs.run_ids import RunIdentity, run_identity

__all__ = ["WriteQdrant"]


class WriteQdrant(beam.PTransform[Any, Any]):
    """Writes the rows of a table to Qdrant as points, and deletes the points of rows that are marked ``_deleted``.

    Nothing is written before all rows have arrived and are checked, so a run that fails leaves the collection as it
    was. A folder, and a collection of a server that is new or replaced, then get all points at once; a collection of
    a server that exists gets them batch by batch.

    In a stream, the points of a window are written when it ends, or when its trigger fires: in a folder all at once, on
    a server batch by batch. A point never replaces one of a later window. In the global window without a trigger, and
    in windows that merge, rows are written as they arrive.

    Writing a point again has no effect, so bundles may be retried. If rows of one batch have the same id, the last one
    counts; batches come in any order. The output is the number of rows of each write, once they are durable and
    visible: steps that must run after the writes can use it as a side input.

    >>> import tempfile
    >>> import pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> rows = pa.record_batch({"id": [1, 2], "text": ["a", "b"], "embedding": [[0.0, 1.0], [1.0, 0.0]]})
    >>> with beam.Pipeline() as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteQdrant(folder, "letters", vectors="embedding")
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        collection: str,
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
            where: a server's address (``http://...``), or a folder of this machine, in which Qdrant's engine keeps the
                collection without a server.
            collection: the name of the collection. It is created with the first row if it does not exist.
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
        super().__init__()
        if distance not in DISTANCES:
            raise InvalidArgument(f"found distance={distance!r}, expected one of {', '.join(DISTANCES)}")
        if if_exists not in get_args(IfExists):
            raise InvalidArgument(f"found if_exists={if_exists!r}, expected one of {', '.join(get_args(IfExists))}")
        named = {"": vectors} if isinstance(vectors, str) else dict(vectors)
        if not named:
            raise InvalidArgument("found no vectors, expected a column, or a mapping of vector names to columns")
        self._address = CollectionAddress.of(
            where, collection, timeout=timeout, batch_size=batch_size, api_key_env=api_key_env, api_key=api_key
        )
        self._columns = PointColumns(named, id, payload)
        self._mode = WriteMode(distance, create, if_exists, allow_empty)

    def check_reachable(self) -> None:
        """Raise if the client library is not installed here, or if no server responds at the address.

        Call it before a long pipeline runs: workers retry a server that does not respond until their timeout.
        """
        check_reachable(self._address)

    def check_writable(self) -> None:
        """Raise if the folder of the collection can't be written to, or if the collection exists and must not.

        This is also checked when the transform is applied. Servers are checked when the pipeline starts.
        """
        if not self._address.is_server:
            check_folder(self._address, self._mode)

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the collection that it writes."""
        return {**super().annotations(), WRITES: json.dumps([self._address.place])}

    def expand(self, input_or_inputs: Any) -> Any:
        """Write points, and emit the number of rows of each write."""
        rows = input_or_inputs
        identity = run_identity(rows.pipeline)
        if rows.is_bounded:
            self._check_writable(identity)
            return publish_table(rows, self._address, self._columns, self._mode, identity)
        if self._mode.if_exists != "append":
            raise StoreError(
                f"{self._address}: found unbounded input and if_exists={self._mode.if_exists!r}, expected bounded "
                "input: the new collection would never be complete",
                fix=Fix("pass if_exists='append'"),
            )
        if has_panes(rows.windowing):
            self._check_writable(identity)
            return publish_panes(rows, self._address, self._columns, self._mode, identity)
        upsert = UpsertDoFn(self._address, self._columns, self._mode)
        return identity.stable(rows) | "Upsert" >> beam.ParDo(upsert, None).with_output_types(int)

    def _check_writable(self, identity: RunIdentity) -> None:
        # A run that continues may have published the collection itself. The last step checks again.
        mode = replace(self._mode, if_exists="append") if identity.is_resumed else self._mode
        if not self._address.is_server:
            check_folder(self._address, mode)

    def default_label(self) -> str:
        """Return a label with the collection's name, such as ``WriteQdrant(reviews)``."""
        return f"WriteQdrant({self._address.collection})"
