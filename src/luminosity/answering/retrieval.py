"""The search: the nearest rows of questions, by one vector of the store or several."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luminosity._shared.text import did_you_mean, list_some
from luminosity.answering.answer import Question, SourceRow
from luminosity.answering.excerpts import excerpt
from luminosity.errors import Fix, InvalidArgument, LuminosityError, StoreError
from luminosity.io.stores.address import StoreAddress, missing
from luminosity.io.stores.kinds import open_store
from luminosity.io.stores.points import UUID, point_id
from luminosity.io.stores.store import Hit, Query, Store, check_filter

__all__ = ["Retrieved", "Retriever", "SearchSettings", "rows_for"]

_SAMPLE_POINTS = 100  # read to name the columns of a store: more would hardly show others
_SHOWN_COLUMNS = 20  # in a message
_RANK_OFFSET = 60  # of reciprocal rank fusion, as in the paper: the first ranks differ, but not by much
_WIDER = 3  # with several vectors, each search finds this many times more rows: the best in sum may be first in none
_ID_NAME = re.compile(r"(?:^|_|-)id$|[a-z]I[dD]$|^(?:ID|Id)$|_ID$")
_MOST_ROWS = 50  # a prompt with more rows has a few words of each


@dataclass(frozen=True)
class SearchSettings:
    """What all searches of a transform share."""

    address: StoreAddress
    text_column: str = "text"
    columns: tuple[str, ...] = ()
    id_column: str | None = None
    """The column with which rows are cited; None looks for it."""
    k: int = 5
    filters: Mapping[str, Any] | None = None
    score_threshold: float | None = None
    context_tokens: int = 1_000

    def __post_init__(self) -> None:
        if not 1 <= self.k <= _MOST_ROWS:
            raise InvalidArgument(f"found k={self.k!r}, expected 1 to {_MOST_ROWS} rows")
        if self.context_tokens < 10 * self.k:
            raise InvalidArgument(
                f"found context_tokens={self.context_tokens!r}, expected at least 10 for each of the {self.k} rows"
            )
        check_filter(self.filters or {})


@dataclass(frozen=True)
class Retrieved:
    """The rows of a question, as the model sees them, and how many sentences were left out of them."""

    rows: tuple[SourceRow, ...]
    found: int
    withheld: int


class Retriever:
    """Searches a collection. Opens it at the first search, and checks once that it exists and has what is asked for.

    Owned by one thread. ``close`` releases the connection.
    """

    def __init__(self, settings: SearchSettings, on_retry: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._on_retry = on_retry
        self._opened: Store | None = None
        self._vectors: dict[str, tuple[int, str]] | None = None
        self._columns: set[str] = set()
        """Columns that are known to have values."""
        self._id_column: str | None = None

    def vectors(self) -> dict[str, tuple[int, str]]:
        """Return the size and distance of each vector of the store. Raises if there is no store, or no point in it."""
        if self._vectors is None:
            found = self._store.vectors()
            if found is None:
                raise missing(self._settings.address)
            if not self._store.sample(1):
                raise StoreError(
                    f"{self._settings.address} is empty, expected rows to answer from", fix="write rows to it first"
                )
            self._check_column(self._settings.text_column, "the texts")
            for column in self._settings.columns:
                self._check_column(column, "the cited rows")
            if self._settings.id_column is not None:
                self._check_column(self._settings.id_column, "the ids")
            self._id_column = self._settings.id_column or _id_column(self._store.sample(_SAMPLE_POINTS))
            self._vectors = found
        return self._vectors

    @property
    def id_column(self) -> str | None:
        """The column that holds the rows' own ids; None if the ids of points are all that the store has."""
        self.vectors()
        return self._id_column

    def search(
        self, questions: Sequence[Question], vectors: Sequence[Mapping[str, Sequence[float]]]
    ) -> list[list[Hit] | LuminosityError]:
        """Return the nearest rows of each question, the best first, or the error that belongs to it.

        ``vectors`` holds, for each question, its vector for every vector name to search by.
        """
        by_filter: dict[str, list[int]] = {}
        found: list[list[Hit] | LuminosityError] = [[] for _ in questions]
        for place, question in enumerate(questions):
            combined = {**(self._settings.filters or {}), **question.filters}
            by_filter.setdefault(json.dumps(combined, sort_keys=True), []).append(place)
        for key, places in by_filter.items():
            try:
                results = self._search(json.loads(key), [vectors[place] for place in places])
            except LuminosityError as error:
                results = [error] * len(places)
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return found

    def values_of(self, column: str) -> list[Any]:
        """Return some values of a column. Raises if it has none."""
        self.vectors()
        self._check_column(column, "a filter")
        return [point.payload.get(column) for point in self._store.sample(_SAMPLE_POINTS, column)]

    def close(self) -> None:
        """Release the connection."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = open_store(self._settings.address, self._on_retry)
        return self._opened

    def _search(
        self, filters: Mapping[str, Any], vectors: Sequence[Mapping[str, Sequence[float]]]
    ) -> list[list[Hit] | LuminosityError]:
        self.vectors()
        for column in filters:
            self._check_column(column, "a filter")
        names = list(vectors[0])
        good: list[int] = []
        results: list[list[Hit] | LuminosityError] = [[] for _ in vectors]
        for place, named in enumerate(vectors):
            try:
                for name, vector in named.items():
                    self._check_vector(self._vector_name(name, len(vector)), vector)
                good.append(place)
            except LuminosityError as error:
                results[place] = error
        own_id = [] if self._id_column is None else [self._id_column]
        rankings: list[list[list[Hit]]] = []
        for name in names if good else ():
            using = self._vector_name(name, len(vectors[good[0]][name]))
            query = Query(
                using or None,
                self._settings.k * (_WIDER if len(names) > 1 else 1),
                list(dict.fromkeys([self._settings.text_column, *self._settings.columns, *own_id])),
                self._settings.score_threshold,
                check_filter(filters),
            )
            rankings.append(self._in_requests([vectors[place][name] for place in good], query))
        for number, place in enumerate(good):
            results[place] = _fused([ranking[number] for ranking in rankings], self._settings.k)
        return results

    def _in_requests(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        size = self._settings.address.batch_size
        parts = (vectors[first : first + size] for first in range(0, len(vectors), size))
        return [hits for part in parts for hits in self._store.search(part, query)]

    def _vector_name(self, name: str, size: int) -> str:
        """Return the store's vector of this name; without a name, its only vector, or its only one of this size."""
        there = self.vectors()
        if name in there or (not name and len(there) == 1):
            return name if name in there else next(iter(there))
        address, shown = self._settings.address, list_some(there, _SHOWN_COLUMNS) or "no vectors"
        if name:
            raise StoreError(
                f"found the vector name {name!r}, but {address} has {shown}",
                fix=did_you_mean(name, there) or "choose one of its vectors",
            )
        fitting = [each for each, (numbers, _) in there.items() if numbers == size]
        if len(fitting) == 1:
            return fitting[0]
        raise StoreError(
            f"found no vector name for questions of {size} numbers, but {address} has "
            + ", ".join(f"{each} ({numbers} numbers)" for each, (numbers, _) in list(there.items())[:_SHOWN_COLUMNS]),
            fix=Fix(
                f"choose one and its model: embed={{{next(iter(there), '')!r}: model}}",
                command="choose one with --vector, and its model with --embed",
            ),
        )

    def _check_vector(self, name: str, vector: Sequence[float]) -> None:
        size = self.vectors()[name][0]
        if len(vector) != size:
            raise StoreError(
                f"found a question's vector of {len(vector)} numbers, expected {size}, as the vector {name!r} of "
                f"{self._settings.address} has",
                fix=Fix(
                    "pass embed= with the model that made the store's vectors",
                    command="pass the model that made the store's vectors with --embed, or choose another --vector",
                ),
            )
        if not all(map(math.isfinite, vector)):
            raise StoreError("found a question's vector with NaN or infinite numbers in it, expected finite numbers")

    def _check_column(self, column: str, purpose: str) -> None:
        """Raise if no point has a value in the column: a search would find nothing, and not say why."""
        if column in self._columns:
            return
        if self._store.sample(1, column):
            self._columns.add(column)
            return
        there = sorted({name for point in self._store.sample(_SAMPLE_POINTS) for name in point.payload})
        raise StoreError(
            f"found the column {column!r} for {purpose}, but {self._settings.address} has no values in it; its columns "
            f"are {list_some(there, _SHOWN_COLUMNS) or 'none'}",
            fix=did_you_mean(column, there) or "choose one of these",
        )


def rows_for(question: str, hits: Sequence[Hit], settings: SearchSettings, id_column: str | None) -> Retrieved:
    """Return the rows of a question with excerpts that fit into the budget of tokens together.

    ``id_column`` is that of the :class:`Retriever`. A row that is nothing but instructions to a model, or has no text,
    is left out.
    """
    share = settings.context_tokens // max(1, len(hits))
    rows: list[SourceRow] = []
    withheld = 0
    for hit in hits:
        text = hit.payload.get(settings.text_column)
        part = excerpt(text if isinstance(text, str) else "" if text is None else json.dumps(text), question, share)
        withheld += part.withheld
        if part.text:
            fields = {name: hit.payload.get(name) for name in settings.columns}
            own = None if id_column is None else hit.payload.get(id_column)
            named = ("id", hit.id) if own is None else (id_column or "id", own)
            rows.append(
                SourceRow(len(rows) + 1, str(named[1]), float(hit.score), part.text, fields, named[0], str(hit.id))
            )
    return Retrieved(tuple(rows), len(hits), withheld)


def _id_column(points: Sequence[Hit]) -> str | None:
    """Return the column of the rows' own ids, if the ids of points are UUIDs that were made from them or from the row.

    A text becomes the id of a point as a UUID, and stays in the payload. Rows without an id column get a hash as the id
    of their point; then a column that is named like an id, and has a value of its own in each row, is what users know.

    >>> made = point_id("r-7")[0]
    >>> _id_column([Hit(made, 0.0, {"user_id": "u-1", "review": "r-7"})])
    'review'
    >>> hashed = "0fd9d9a2-0b1e-4a6f-1c87-0a2f5f0d3e11"
    >>> _id_column([Hit(hashed, 0.0, {"review_id": 7, "text": "fine"})]), _id_column([Hit(7, 0.0, {"review_id": 8})])
    ('review_id', None)
    """
    made = [point for point in points if isinstance(point.id, str) and UUID.fullmatch(point.id)]
    if not made:
        return None  # Whole numbers and texts are the rows' own.
    for name, value in made[0].payload.items():
        if isinstance(value, str) and point_id(value)[0] == made[0].id:
            return name
    if all(uuid.UUID(str(point.id)).variant == uuid.RFC_4122 for point in made):
        return None  # These are UUIDs of the user. A hash has any bits, also where a UUID has its variant.
    named = {name for point in made for name in point.payload if _ID_NAME.search(name)}
    own = [name for name in sorted(named) if len({repr(point.payload.get(name)) for point in made}) == len(made)]
    return own[0] if len(own) == 1 else None


def _fused(rankings: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """Return the best of several rankings: by the sum of ``1 / (60 + rank)``, since scores of vectors don't compare.

    >>> first, second, third = (Hit(number, 0.5, {}) for number in range(3))
    >>> [hit.id for hit in _fused([[first, second], [third, second]], 2)]
    [1, 0]
    """
    if len(rankings) == 1:
        return list(rankings[0][:k])
    sums: dict[Any, float] = {}
    hits: dict[Any, Hit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking):
            hits.setdefault(hit.id, hit)
            sums[hit.id] = sums.get(hit.id, 0.0) + 1 / (_RANK_OFFSET + rank)
    best = sorted(sums, key=lambda each: (-sums[each], str(each)))[:k]
    return [hits[each] for each in best]
