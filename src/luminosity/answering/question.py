"""A question with its filters, and how the elements of a pipeline are read as questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from luminosity._shared.text import did_you_mean, list_some, shorten_repr
from luminosity.errors import Fix, InvalidArgument, InvalidType
from luminosity.io.stores.store import check_filter

__all__ = ["Question", "question_of"]

_SHOWN_FIELDS = 10  # in a message
_SHOWN_CHARACTERS = 60  # of a value in a message
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
                f"found the question {shorten_repr(self.text, _SHOWN_CHARACTERS)}, expected words",
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
