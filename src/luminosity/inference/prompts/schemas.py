"""JSON schemas as prompts use them: one closed form for schemas that users write, and values that fit them."""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import pyarrow as pa

from luminosity._shared.text import did_you_mean, shorten_repr
from luminosity.errors import InvalidArgument
from luminosity.inference.prompts.keywords import check_keywords, check_limits

__all__ = ["Schema", "arrow_type", "checked", "closed", "nullable", "split_null", "words_for"]

Schema: TypeAlias = dict[str, Any]
"""A JSON schema. In closed form, each object names all of its properties, and null stands in an ``anyOf``."""

_NULL: Schema = {"type": "null"}
_BOUNDS = {
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("minItems", "maxItems", "items"),
    "object": ("properties", "required", "additionalProperties"),
    "boolean": (),
    "null": (),
}
"""The keywords that each type may have."""
_NOTES = ("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions")
"""Keywords that limit no value; only the description is kept, for the model."""
_FORMATS = {"date": datetime.date, "date-time": datetime.datetime}
_INT64 = 2**63
_MOST_FLOAT = sys.float_info.max  # Python compares any int with it, but can't make a float of each
_SHOWN = 80  # characters of a value in an error


def closed(schema: Any, path: str = "the answer", root: Any = None, inside: tuple[str, ...] = ()) -> Schema:
    """Return a user's schema in closed form. Raises ``InvalidArgument`` for what can't become a column.

    Properties that are not required may be null, unless they have a default: the model is asked for each of them.

    >>> closed({"type": "object", "properties": {"stars": {"type": ["integer", "null"]}}})["required"]
    ['stars']
    """
    if not isinstance(schema, Mapping):
        raise InvalidArgument(f"found the JSON schema {shorten_repr(schema, _SHOWN)} for {path}, expected an object")
    given = cast("dict[str, Any]", dict(schema))
    check_keywords(given, path)
    root = given if root is None else root
    if "$ref" in given:
        name = str(given["$ref"])
        if name in inside:
            raise InvalidArgument(
                f"{path} contains itself ({name}), which no column of a table can hold",
                fix="limit the depth: write out the levels that you need",
            )
        rest = {key: value for key, value in given.items() if key != "$ref"}
        return closed({**_referred(name, root, path), **rest}, path, root, (*inside, name))
    if "allOf" in given and len(given["allOf"]) == 1:  # as older versions of pydantic write a reference
        rest = {key: value for key, value in given.items() if key != "allOf"}
        return closed({**given["allOf"][0], **rest}, path, root, inside)
    note = {"description": given["description"]} if isinstance(given.get("description"), str) else {}
    choices = [name for name in ("anyOf", "oneOf") if name in given]
    if choices:
        kinds = [each for each in given[choices[0]] if each != _NULL]
        if len(kinds) != 1:
            raise _several(path)
        found = closed(kinds[0], path, root, inside)
        return {**(nullable(found) if len(kinds) < len(given[choices[0]]) else found), **note}
    if "const" in given:
        given["enum"] = [given.pop("const")]
    return {**_closed_type(given, path, root, inside), **note}


def _closed_type(given: dict[str, Any], path: str, root: Any, inside: tuple[str, ...]) -> Schema:
    listed = given.get("type", _type_of(given))
    types: list[Any] = list(cast("list[Any]", listed)) if isinstance(listed, list) else [listed]
    may_be_null = "null" in types or None in given.get("enum", ())
    types = [each for each in types if each != "null"]
    if len(types) != 1 or not types[0]:
        raise _several(path)
    kind = types[0]
    if kind not in _BOUNDS:
        raise InvalidArgument(
            f"found the type {kind!r} in the JSON schema of {path}, expected one of {', '.join(_BOUNDS)}",
            fix=did_you_mean(str(kind), _BOUNDS) or None,
        )
    for name in given:
        if name not in (*_BOUNDS[kind], *_NOTES, "type", "enum"):
            raise InvalidArgument(
                f"found {name!r} in the JSON schema of {path}, expected only what limits {kind} values: "
                f"{', '.join((*_BOUNDS[kind], 'enum'))}",
                fix=did_you_mean(name, _BOUNDS[kind]) or f"leave {name} out",
            )
    found: Schema = {"type": kind, **{name: given[name] for name in _BOUNDS[kind] if name in given}}
    if "enum" in given:
        found["enum"] = _choices([each for each in given["enum"] if each is not None], kind, path)
    if kind == "object":
        found |= _closed_object(given, path, root, inside)
    elif kind == "array":
        if "items" not in given:
            raise InvalidArgument(f"the JSON schema of {path} is an array without items, expected their schema")
        found["items"] = closed(given["items"], f"{path}[]", root, inside)
    check_limits(found, path)
    return nullable(found) if may_be_null else found


def _closed_object(given: dict[str, Any], path: str, root: Any, inside: tuple[str, ...]) -> Schema:
    properties = cast("dict[str, Any]", given.get("properties") or {})
    if not properties or given.get("additionalProperties", False) not in (False, True):
        raise InvalidArgument(
            f"{path} is an object whose properties have any name, expected named ones: they become columns",
            fix="name the properties, or ask for a list of objects with a name and a value",
        )
    required = given.get("required", ())
    if unknown := [name for name in required if name not in properties]:
        raise InvalidArgument(f"the JSON schema of {path} requires {unknown[0]!r}, which is no property of it")
    found: Schema = {}
    for name, each in properties.items():
        inner = closed(each, name if path == "the answer" else f"{path}.{name}", root, inside)
        has_default = isinstance(each, Mapping) and cast("Mapping[str, Any]", each).get("default") is not None
        found[name] = inner if name in required or has_default else nullable(inner)
    return {"properties": found, "required": list(found), "additionalProperties": False}


def _referred(name: str, root: Any, path: str) -> dict[str, Any]:
    found = root
    for part in name.removeprefix("#/").split("/") if name.startswith("#/") else [name]:
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise InvalidArgument(f"found $ref {name!r} in the JSON schema of {path}, which is nowhere in the schema")
    return cast("dict[str, Any]", dict(found))


def _type_of(given: dict[str, Any]) -> str:
    """Return the type of a schema that names none."""
    if "properties" in given:
        return "object"
    if "items" in given:
        return "array"
    kinds = {_json_type(each) for each in given.get("enum", ()) if each is not None}
    return kinds.pop() if len(kinds) == 1 else ""


def _several(path: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} may be of several types or of none that is named, expected one: a column has one type",
        fix="choose one type; it may be null, too",
    )


def _choices(values: list[Any], kind: str, path: str) -> list[Any]:
    if not values:
        raise InvalidArgument(f"{path} has no allowed value, expected at least one")
    for each in values:
        if _json_type(each) != kind and not (kind == "number" and _json_type(each) == "integer"):
            raise InvalidArgument(f"found the allowed value {each!r} of {path}, expected values of the type {kind}")
    return list(dict.fromkeys(values))


def _json_type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return kinds.get(type(value), type(value).__name__)


def nullable(schema: Schema) -> Schema:
    """Return a schema in closed form that also allows null."""
    return schema if "anyOf" in schema else {"anyOf": [schema, _NULL]}


def split_null(schema: Schema) -> tuple[Schema, bool]:
    """Return a closed schema without null, and whether it allowed null."""
    return (schema["anyOf"][0], True) if "anyOf" in schema else (schema, False)


def arrow_type(schema: Schema) -> pa.DataType:
    """Return the Arrow type of values of a closed schema.

    >>> arrow_type(closed({"type": "object", "properties": {"stars": {"type": "integer"}}}))
    StructType(struct<stars: int64>)
    """
    schema, _ = split_null(schema)
    kind = schema["type"]
    if kind == "object":
        return pa.struct([(name, arrow_type(each)) for name, each in schema["properties"].items()])
    if kind == "array":
        return pa.list_(arrow_type(schema["items"]))
    if "format" in schema:
        return pa.date32() if schema["format"] == "date" else pa.timestamp("us", "UTC")
    return {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(), "string": pa.string()}[kind]


def checked(value: Any, schema: Schema, path: str = "") -> Any:
    """Return a JSON value as the column holds it. Raises ``ValueError`` with what was found and what is expected.

    >>> checked({"stars": 6}, closed({"type": "object", "properties": {"stars": {"type": "integer", "maximum": 5}}}))
    Traceback (most recent call last):
    ValueError: stars: found 6, expected an integer of at most 5
    """
    schema, may_be_null = split_null(schema)
    if value is None and may_be_null:
        return None
    kind = schema["type"]
    if kind == "object" and isinstance(value, Mapping):
        return _checked_object(cast("Mapping[str, Any]", value), schema, path)
    if kind == "array" and isinstance(value, list):
        items = cast("list[Any]", value)
        if schema.get("minItems", 0) <= len(items) <= schema.get("maxItems", math.inf):
            return [checked(each, schema["items"], f"{path}[{place}]") for place, each in enumerate(items)]
    elif kind == "boolean" and isinstance(value, bool):
        return value
    elif kind == "string" and isinstance(value, str) and _fits_text(value, schema):
        return _dated(value, schema, path)
    elif kind in ("integer", "number") and _fits_number(value, schema):
        return {"integer": int, "number": float}[kind](cast("float", value))
    place = f"{path}: " if path else ""
    raise ValueError(f"{place}found {shorten_repr(value, _SHOWN)}, expected {words_for(schema)}")


def _checked_object(value: Mapping[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    properties = schema["properties"]
    prefix = f"{path}." if path else ""
    if unknown := [name for name in value if name not in properties]:
        raise ValueError(f"{prefix}{unknown[0]}: found a field that nobody asked for, expected {', '.join(properties)}")
    found: dict[str, Any] = {}
    for name, each in properties.items():
        if name not in value and not split_null(each)[1]:
            raise ValueError(f"{prefix}{name}: found nothing, expected {words_for(each)}")
        found[name] = checked(value.get(name), each, f"{prefix}{name}")
    return found


def _fits_text(value: str, schema: Schema) -> bool:
    pattern = schema.get("pattern")
    return (
        value in schema.get("enum", (value,))
        and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        and (pattern is None or re.search(pattern, value) is not None)
    )


def _fits_number(value: Any, schema: Schema) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not abs(value) < (_INT64 if schema["type"] == "integer" else _MOST_FLOAT):  # false for NaN, too
        return False
    if schema["type"] == "integer" and value != int(value):
        return False
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    step = schema.get("multipleOf")
    is_multiple = step is None or math.isclose(value / step, round(value / step), abs_tol=1e-9)
    is_choice = "enum" not in schema or value in schema["enum"]
    return least <= value <= most and above < value < below and is_multiple and is_choice


def _dated(value: str, schema: Schema, path: str) -> Any:
    kind = _FORMATS.get(schema.get("format", ""))
    if kind is None:
        return value
    try:
        found = kind.fromisoformat(value.upper().replace("Z", "+00:00"))
        if isinstance(found, datetime.datetime):
            zoned = found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)
            return zoned.astimezone(datetime.timezone.utc)  # may leave the years that there are
    except (ValueError, OverflowError):
        raise ValueError(f"{path or 'the answer'}: found {value!r}, expected {words_for(schema)}") from None
    return found


def words_for(schema: Schema) -> str:
    """Describe the values of a closed schema in a few words.

    >>> words_for({"type": "integer", "minimum": 1, "maximum": 5}), words_for({"type": "string", "enum": ["a", "b"]})
    ('an integer of at least 1 and at most 5', 'one of "a", "b"')
    """
    schema, may_be_null = split_null(schema)
    names = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a text"}
    names |= {"array": "a JSON list", "object": "a JSON object"}
    limits = {"minimum": "at least {}", "exclusiveMinimum": "more than {}", "maximum": "at most {}"}
    limits |= {"exclusiveMaximum": "less than {}", "multipleOf": "a multiple of {}", "pattern": "the form {}"}
    limits |= {"minLength": "at least {} characters", "maxLength": "at most {} characters"}
    limits |= {"minItems": "at least {} items", "maxItems": "at most {} items", "format": "the format {}"}
    if "enum" in schema:
        words = "one of " + ", ".join(json.dumps(each, ensure_ascii=False) for each in schema["enum"])
    else:
        told = [text.format(schema[name]) for name, text in limits.items() if name in schema]
        words = names[schema["type"]] + (f" of {' and '.join(told)}" if told else "")
        if schema["type"] == "object":
            words += f" with {', '.join(cast('Sequence[str]', list(schema['properties'])))}"
    return f"{words}, or null" if may_be_null else words
