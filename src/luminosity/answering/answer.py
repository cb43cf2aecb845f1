"""A question with its filters, and its answer: bullets with citations, the cited rows, and further questions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from luminosity._shared.text import did_you_mean, list_some, shorten, shorten_repr
from luminosity.answering.excerpts import clean
from luminosity.errors import Fix, InvalidArgument, InvalidType
from luminosity.io.stores.store import check_filter

__all__ = ["Answer", "Bullet", "Outcome", "Question", "SourceRow", "question_of"]

_SHOWN_FIELDS = 10  # in a message
_SHOWN_OF_VALUE = 60  # of a value in a message
_MOST_CHARACTERS = 4_000  # of a question: an embedding model reads far less, and the prompt must have room for rows


@dataclass(frozen=True)
class Question:
    """A question about the rows of a store.

    >>> Question("Is it loud?", {"product": "kettle", "rating": {"lte": 2}}).text
    'Is it loud?'
    """

    text: str
    filters: Mapping[str, Any] = field(default_factory=dict)
    """The value that a column must have, a list of values that it may have, or bounds such as ``{"gte": 4}``."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the row that holds the question. They are kept in the answer."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidType(f"found a question of type {type(self.text).__name__}, expected a text")
        if not any(character.isalnum() for character in self.text):
            raise InvalidArgument(
                f"found the question {shorten_repr(self.text, _SHOWN_OF_VALUE)}, expected words",
                fix=Fix("leave out empty questions, or use with_exception_handling()", command="ask something"),
            )
        if len(self.text) > _MOST_CHARACTERS:
            raise InvalidArgument(
                f"found a question of {len(self.text):,} characters, expected at most {_MOST_CHARACTERS:,}"
            )
        check_filter(self.filters)


def question_of(element: Any, name: str = "question", filter_fields: Sequence[str] = ()) -> Question:
    """Return an element as a question: a text, a ``Question``, or a row (a mapping, a ``beam.Row``, a named tuple).

    The text of a row's question is in the field ``name``. Its ``filter_fields`` become filters, unless they are None.

    >>> question_of({"question": "Is it loud?", "product": "kettle", "id": 7}, filter_fields=["product"])
    Question(text='Is it loud?', filters={'product': 'kettle'}, fields={'id': 7})
    """
    if isinstance(element, Question):
        return element
    if isinstance(element, str):
        if filter_fields:
            raise InvalidType(
                f"found a question as a text, expected a row with the fields {list_some(filter_fields, _SHOWN_FIELDS)}",
                fix=Fix("pass rows, or leave filter_fields out"),
            )
        return Question(element)
    row = _as_mapping(element)
    for field_name in (name, *filter_fields):
        if field_name not in row:
            raise InvalidArgument(
                f"found a row without the field {field_name!r}, it has {list_some(row, _SHOWN_FIELDS) or 'none'}",
                fix=did_you_mean(field_name, map(str, row)) or None,
            )
    filters = {each: row[each] for each in filter_fields if row[each] is not None}
    return Question(row[name], filters, {key: row[key] for key in row if key != name and key not in filter_fields})


def _as_mapping(element: Any) -> Mapping[str, Any]:
    if isinstance(element, Mapping):
        return cast("Mapping[str, Any]", element)
    as_dict = getattr(element, "_asdict", None)  # named tuples and beam.Row
    if callable(as_dict):
        return cast("Mapping[str, Any]", as_dict())
    raise InvalidType(
        f"found a question of type {type(element).__name__}, expected a text, a Question or a row",
        fix=Fix("for (key, question) pairs, both must be in a tuple"),
    )


Outcome = Literal["answered", "quoted", "not_told", "no_rows"]
_SHOWN_CHARACTERS = 240  # of a cited row in the text of an answer; ``rows`` has all that the model saw
_FIELD_CHARACTERS = 120  # of one of its columns


@dataclass(frozen=True)
class Bullet:
    """A statement, without marks of citations, and the numbers of the rows that it cites."""

    text: str
    citations: tuple[int, ...]

    def __str__(self) -> str:
        return f"- {self.text} {''.join(f'[{number}]' for number in self.citations)}"


@dataclass(frozen=True)
class SourceRow:
    """A row that the search found. ``text`` is the excerpt that the model saw, not the whole text.

    ``id`` is the row's own id, from the column ``id_column`` of the store if it has one. ``point_id`` is the id of the
    point in the store, which is a UUID made from the row's own id if that is a text.
    """

    number: int
    id: str
    score: float
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    id_column: str = "id"
    point_id: str = ""

    def __str__(self) -> str:
        # Columns come from the store, as the text does: a value must not look like a part of the answer.
        others = {name: value for name, value in self.fields.items() if name != self.id_column}
        about = "".join(f", {name}: {_field(value)}" for name, value in others.items() if value is not None)
        shown = textwrap.shorten(self.text, _SHOWN_CHARACTERS, placeholder=" …")
        return f"[{self.number}] {shown} ({_field(self.id_column)} {_field(self.id)}{about})"


@dataclass(frozen=True)
class Answer:
    """The answer to a question. ``str(answer)`` is its text, always in the same format."""

    question: str
    outcome: Outcome
    """``"answered"``: the model cites rows. ``"quoted"``: it cites none, and bullets quote the nearest rows.
    ``"not_told"``: it cites none. ``"no_rows"``: the search found no row, and no model was asked."""
    bullets: tuple[Bullet, ...] = ()
    rows: tuple[SourceRow, ...] = ()
    """The rows that bullets cite, by number. A citation of a bullet is always the number of one of them."""
    follow_ups: tuple[str, ...] = ()
    retrieved: int = 0
    """How many rows the search found."""
    citations_removed: int = 0
    """How many citations of the model named no row that it was given."""
    citations_unsupported: int = 0
    """How many citations named a row that has too few of the statement's words: see ``least_shared``."""
    withheld: int = 0
    """How many sentences of rows were left out of the prompt because they read like instructions to a model."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the question's row."""
    rows_name: str = "reviews"

    @property
    def is_answered(self) -> bool:
        """Whether the model answered with at least one citation that resolves."""
        return self.outcome == "answered"

    @property
    def citations(self) -> tuple[int, ...]:
        """The citations of all bullets, in order."""
        return tuple(number for bullet in self.bullets for number in bullet.citations)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as plain values, for JSON."""
        found = asdict(self)
        found.pop("rows_name")
        return {**found, "is_answered": self.is_answered, "text": str(self)}

    def __str__(self) -> str:
        lines = [str(bullet) for bullet in self.bullets]
        if not self.is_answered:
            why = " None match the question's filters." if self.outcome == "no_rows" else ""
            lines.insert(0, f"The {self.rows_name} do not tell.{why}")
        if self.outcome == "quoted":
            lines.insert(1, f"The nearest {self.rows_name} say:")
        if self.rows:
            lines += ["", *map(str, self.rows)]
        if self.follow_ups:
            lines += ["", "Further questions:", *(f"- {each}" for each in self.follow_ups)]
        return "\n".join(lines)


def _field(value: object) -> str:
    return shorten(clean(str(value)), _FIELD_CHARACTERS)
