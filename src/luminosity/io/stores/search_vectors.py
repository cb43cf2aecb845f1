"""The transform that adds the nearest points of a vector store as a column, of any kind or of Qdrant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics

from luminosity.core import READS
from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.stores.address import StoreAddress, chosen_vector
from luminosity.io.stores.kinds import QDRANT, StoreTransform, open_store
from luminosity.io.stores.points import read_vectors
from luminosity.io.stores.store import Hit, Query, Store, check_filter

__all__ = ["SearchQdrant", "SearchVectors"]


class SearchVectors(StoreTransform):
    """Adds a column with the nearest points of each row's vector, the best first.

    The column holds lists of structs with the fields ``id`` (as text), ``score``, and those of ``with_payload``. It is
    null in rows whose vector is null.

    >>> import tempfile
    >>> from luminosity import WriteQdrant
    >>> folder = tempfile.mkdtemp()
    >>> rows = pa.record_batch({"id": [1, 2], "text": ["up", "right"], "embedding": [[0.0, 1.0], [1.0, 0.0]]})
    >>> with beam.Pipeline() as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteQdrant(folder, "ways", vectors="embedding")
    >>> search = SearchVectors(folder, "ways", vector_column="embedding", limit=1, with_payload=["text"])
    >>> with beam.Pipeline() as pipeline:
    ...     found = pipeline | beam.Create([pa.record_batch({"embedding": [[0.1, 0.9]]})]) | search
    ...     _ = found | beam.Map(lambda batch: print(batch.column("neighbours")[0].as_py()[0]["text"]))
    up
    """

    _annotation = READS

    def __init__(
        self,
        where: str | os.PathLike[str],
        collection: str | None = None,
        *,
        vector_column: str,
        using: str | None = None,
        limit: int = 5,
        with_payload: Sequence[str] | Mapping[str, Any] = (),
        output: str = "neighbours",
        score_threshold: float | None = None,
        filter: Mapping[str, Any] | None = None,
        batch_size: int = 256,
        timeout: float = 120.0,
        api_key_env: str | None = None,
        api_key: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            where: a Qdrant server's address (``http://...``), a folder that ``WriteQdrant`` wrote, a Lance dataset (a
                path that ends in ``.lance``), or a table of Postgres (``postgresql://me@host/db?table=...``).
            collection: the name of the collection. A Lance dataset and an address with a table need none.
            vector_column: the column of the vectors to search for.
            using: the name of the vector to compare with; not needed if the collection has only one.
            limit: the most points of a row.
            with_payload: fields of the payload to return as text (other values as JSON); or a mapping of fields to
                Arrow types.
            output: the name of the new column.
            score_threshold: leave out points that are less similar (farther away, for distances).
            filter: the value that a payload field of a point must have, a list of values that it may have, or bounds
                such as ``{"gte": 4}``.
            batch_size: the most vectors of one request.
            timeout: how many seconds to retry while a server fails or other workers use the folder.
            api_key_env: the environment variable of the workers that holds the server's key.
            api_key: a function that returns the key; it is called in the workers.
        """
        if limit < 1:
            raise InvalidArgument(f"found limit={limit!r}, expected 1 or more")
        settings = {"timeout": timeout, "batch_size": batch_size, "api_key_env": api_key_env, "api_key": api_key}
        super().__init__(where, collection, **settings)
        types = dict(with_payload) if isinstance(with_payload, Mapping) else dict.fromkeys(with_payload, pa.string())
        if taken := types.keys() & {"id", "score"}:
            raise InvalidArgument(
                f"found {min(taken)!r} in with_payload, expected other names: every neighbour has this field"
            )
        query = Query(using, limit, list(types), score_threshold, check_filter(filter or {}))
        self._step = _Search(self._address, query, vector_column, output, types)

    def expand(self, input_or_inputs: Any) -> Any:
        """Search for the vectors of each batch, and append the points as a column."""
        return input_or_inputs | "Search" >> beam.ParDo(self._step).with_output_types(pa.RecordBatch)


class SearchQdrant(SearchVectors):
    """Adds a column with the nearest points of each row's vector: :class:`SearchVectors` for Qdrant alone."""

    _among = QDRANT


class _Search(beam.DoFn):
    def __init__(
        self, address: StoreAddress, query: Query, vector_column: str, output: str, types: Mapping[str, Any]
    ) -> None:
        self._address = address
        self._query = query
        self._vector_column = vector_column
        self._output = output
        self._types = types
        self._retries = Metrics.counter(SearchVectors, "retries")
        self._searches = Metrics.counter(SearchVectors, "vectors_searched")

    def setup(self) -> None:
        self._store: Store = open_store(self._address, self._retries.inc)
        self._is_checked = False

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        names = batch.schema.names
        if self._vector_column not in names:
            raise StoreError(f"there is no column {self._vector_column!r}, expected one of {', '.join(names)}")
        if self._output in names:
            raise StoreError(f"there is a column {self._output!r} already", fix=Fix("pass another output="))
        vectors = read_vectors(self._vector_column, batch.column(self._vector_column), "row {}".format).rows
        wanted = [vector for vector in vectors if vector is not None]
        neighbours = iter(self._neighbours(wanted))
        found = [None if vector is None else next(neighbours) for vector in vectors]
        self._searches.inc(len(wanted))
        yield batch.append_column(self._output, self._column(found))

    def teardown(self) -> None:
        self._store.close()

    def _neighbours(self, vectors: Sequence[Sequence[float]]) -> Iterator[list[Hit]]:
        if vectors and not self._is_checked:
            using = chosen_vector(self._address, self._store.vectors(), self._query.using)
            self._query = replace(self._query, using=using or None)
            self._is_checked = True
        for first in range(0, len(vectors), self._address.batch_size):
            yield from self._store.search(vectors[first : first + self._address.batch_size], self._query)

    def _column(self, found: Sequence[list[Hit] | None]) -> Any:
        hits = [hit for hits in found if hits is not None for hit in hits]
        offsets = [0]
        for row in found:
            offsets.append(offsets[-1] + len(row or ()))
        fields = {
            "id": pa.array([str(hit.id) for hit in hits], pa.string()),
            "score": pa.array([hit.score for hit in hits], pa.float32()),
        }
        for name, kind in self._types.items():
            fields[name] = _field(name, [hit.payload.get(name) for hit in hits], kind)
        structs = pa.StructArray.from_arrays(list(fields.values()), list(fields))
        missing = pa.array([row is None for row in found], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), structs, mask=missing)


def _field(name: str, values: list[Any], kind: Any) -> Any:
    """Return the values of a payload field as an array. Payloads are JSON, so times and decimals are texts.

    >>> _field("at", ["2026-03-01T12:00:00", None], pa.timestamp("s"))[0].as_py().hour
    12
    """
    try:
        if pa.types.is_string(kind):
            return pa.array([value if isinstance(value, str | None) else json.dumps(value) for value in values], kind)
        if any(isinstance(value, str) for value in values):
            return pa.array(values, pa.string()).cast(kind)
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise StoreError(
            f"the payload field {name!r} can't be read as {kind}: {error}",
            fix=Fix("pass another type in with_payload="),
        ) from error
