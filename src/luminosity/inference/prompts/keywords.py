"""Checks what the keywords of a JSON schema that a user wrote hold, before anything is done with them."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from luminosity._shared.text import shorten_repr
from luminosity.errors import InvalidArgument

__all__ = ["check_keywords", "check_limits"]

_SHOWN = 80  # characters of a value in an error
_FORMATS = ("date", "date-time")
_RANGES = (
    *itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)  # pyright: ignore[reportUnknownVariableType]


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)  # pyright: ignore[reportUnknownVariableType]


_NUMBER = (_is_number, "a number")
_COUNT = (_is_count, "a whole number of at least 0")
_TEXT = (lambda value: isinstance(value, str), "a text")
_OBJECTS = (_is_list_of_objects, "a list of schemas")
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _OBJECTS),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "type": (lambda value: isinstance(value, str) or _is_list_of_texts(value), "the name of a type, or a list of them"),
    "enum": (lambda value: isinstance(value, list | tuple), "a list of values"),
    "properties": (lambda value: isinstance(value, Mapping), "an object of names and schemas"),
    "required": (_is_list_of_texts, "a list of names"),
}


def check_keywords(given: Mapping[str, Any], path: str) -> None:
    """Raise ``InvalidArgument`` unless each keyword of a schema holds a value of its kind.

    >>> check_keywords({"minimum": "1"}, "stars")
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found 'minimum': '1' in the JSON schema of stars, expected a number
    """
    for name, value in given.items():
        fits, expected = _EXPECTED.get(name, (None, ""))
        if fits is not None and not fits(value):
            raise InvalidArgument(
                f"found {name!r}: {shorten_repr(value, _SHOWN)} in the JSON schema of {path}, expected {expected}"
            )


def check_limits(schema: Mapping[str, Any], path: str) -> None:
    """Raise ``InvalidArgument`` if the limits of a schema with checked keywords allow no value."""
    if schema.get("format", "date") not in _FORMATS:
        raise InvalidArgument(f"found the format {schema['format']!r} of {path}, expected {' or '.join(_FORMATS)}")
    if "format" in schema and "enum" in schema:
        raise InvalidArgument(
            f"found a format and an enum for {path}, expected one of them", fix="leave out the format"
        )
    if "pattern" in schema:
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            raise InvalidArgument(f"found the pattern {schema['pattern']!r} of {path}: {error}") from None
    for low, high in _RANGES:
        is_open = low.startswith("exclusive") or high.startswith("exclusive")
        least, most = schema.get(low), schema.get(high)
        if least is not None and most is not None and (least > most or (is_open and least == most)):
            raise InvalidArgument(f"found {low} {least} and {high} {most} for {path}, which no value fits")
