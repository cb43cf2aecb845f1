"""Python types as JSON schemas, and the values of these types that a model's answers become."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import types
import typing
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast, get_args, get_origin

import typing_extensions

from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.prompts.schemas import Schema, closed, nullable

__all__ = ["Described", "described"]

_PLAIN: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.datetime: {"type": "string", "format": "date-time"},
}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}
"""The attributes of bounds in ``Annotated``, as ``annotated_types`` and pydantic name them, and their keywords."""
_WRAPPERS = (typing_extensions.Required, typing_extensions.NotRequired, typing_extensions.ReadOnly)
_EXPECTED = (
    "str, int, float, bool, a date, a Literal, an Enum, a dataclass, a TypedDict, a pydantic model, a list of these, "
    "or one of these or None"
)


@dataclass(frozen=True)
class Described:
    """The schema of a type, and how a checked JSON value becomes a value of the type."""

    schema: Schema
    build: Callable[[Any], Any]


def described(kind: Any, path: str = "the answer", inside: tuple[Any, ...] = ()) -> Described:
    """Return the schema of a type in closed form. Raises if a column can't hold its values.

    >>> import typing
    >>> described(list[typing.Literal["a", "b"]]).schema
    {'type': 'array', 'items': {'type': 'string', 'enum': ['a', 'b']}}
    """
    while (named := getattr(kind, "__supertype__", None) or getattr(kind, "__value__", None)) is not None:
        kind = named  # of a NewType or of an alias
    if not isinstance(kind, Hashable):
        raise InvalidType(
            f"found {kind!r} for {path}, expected a type", fix="name the allowed texts: Literal['good', 'bad']"
        )
    if kind in inside:
        raise InvalidType(
            f"{path} contains {kind.__name__}, which contains itself: no column of a table can hold it",
            fix="limit the depth: write a type for each level that you need",
        )
    if kind in _PLAIN:
        return Described(dict(_PLAIN[kind]), lambda value: value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Annotated, typing_extensions.Annotated):
        return _with_bounds(described(arguments[0], path, inside), arguments[1:], path)
    if origin in _WRAPPERS:
        return described(arguments[0], path, inside)
    if origin in (typing.Literal, typing_extensions.Literal):
        return _literal(arguments, path)
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments, path, inside)
    if origin is list and arguments:  # `typing.List` has none
        inner = described(arguments[0], f"{path}[]", inside)
        return Described({"type": "array", "items": inner.schema}, lambda value: [inner.build(each) for each in value])
    if isinstance(kind, type):
        found = _of_class(kind, path, inside)
        if found is not None:
            return found
    raise _unsupported(kind, path)


def _of_class(kind: type, path: str, inside: tuple[Any, ...]) -> Described | None:
    if issubclass(kind, enum.Enum):
        return _of_enum(kind, path)
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate"):  # pydantic, which need not be installed
        model: Any = kind
        return Described(closed(model.model_json_schema(), path), model.model_validate)
    if typing_extensions.is_typeddict(kind):
        return _of_fields(kind, path, inside, lambda **values: values)
    if dataclasses.is_dataclass(kind):
        taken = [each.name for each in dataclasses.fields(kind) if each.init]
        return _of_fields(kind, path, inside, kind, taken)
    return None


def _of_fields(
    kind: type,
    path: str,
    inside: tuple[Any, ...],
    make: Callable[..., Any],
    names: list[str] | None = None,
) -> Described:
    try:
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise InvalidType(
            f"{kind.__name__}: {error}; its fields name a type that can't be found", fix="define the type in a module"
        ) from None
    names = list(hints) if names is None else names
    if not names:
        raise InvalidType(f"{kind.__name__} has no fields, expected at least one")
    fields: dict[str, Described] = {}
    for name in names:
        prefix = "" if path == "the answer" else f"{path}."
        found = described(hints[name], f"{prefix}{name}", (*inside, kind))
        fields[name] = found if _is_required(kind, name, hints[name]) else _or_none(found)
    schema: Schema = {
        "type": "object",
        "properties": {name: each.schema for name, each in fields.items()},
        "required": names,
        "additionalProperties": False,
    }
    return Described(schema, lambda value: make(**{name: each.build(value.get(name)) for name, each in fields.items()}))


def _is_required(kind: type, name: str, hint: Any) -> bool:
    """Return whether a class must have a field; only a TypedDict may do without."""
    origin = get_origin(hint)  # the class itself does not see it in annotations that are texts
    if origin in (typing_extensions.Required, typing_extensions.NotRequired):
        return origin is typing_extensions.Required
    return name in getattr(kind, "__required_keys__", (name,))


def _literal(values: tuple[Any, ...], path: str) -> Described:
    chosen = [each for each in values if each is not None]
    if not chosen:
        raise InvalidType(f"found a Literal without values for {path}, expected at least one: Literal['good', 'bad']")
    kinds = {type(each) for each in chosen}
    if len(kinds) > 1 or not kinds <= {str, int, bool}:
        raise InvalidType(
            f"found a Literal of {', '.join(sorted(each.__name__ for each in kinds))} for {path}, expected values of "
            "one type, all str or all int: a column has one type",
            fix="write the values as texts",
        )
    kind = "boolean" if kinds == {bool} else _PLAIN[kinds.pop()]["type"]
    schema: Schema = {"type": kind} if kind == "boolean" else {"type": kind, "enum": list(dict.fromkeys(chosen))}
    if kind == "boolean" and len(chosen) == 1:
        raise InvalidType(f"found Literal[{chosen[0]}] for {path}, expected bool: one value asks for nothing")
    found = Described(schema, lambda value: value)
    return found if len(chosen) == len(values) else _or_none(found)


def _of_enum(kind: type[enum.Enum], path: str) -> Described:
    """Return an Enum's schema: its values if all are texts, otherwise its names, which tell a model more."""
    members = list(kind)
    if not members:
        raise InvalidType(f"the Enum {kind.__name__} for {path} has no members, expected at least one")
    by_text = {each.value if _has_texts(kind) else each.name: each for each in members}
    return Described({"type": "string", "enum": list(by_text)}, by_text.__getitem__)


def _has_texts(kind: type[enum.Enum]) -> bool:
    return all(isinstance(each.value, str) for each in kind)


def _optional(arguments: tuple[Any, ...], path: str, inside: tuple[Any, ...]) -> Described:
    kinds = [each for each in arguments if each is not type(None)]
    if len(kinds) != 1:
        names = ", ".join(getattr(each, "__name__", str(each)) for each in kinds)
        raise InvalidType(
            f"found a Union of {names} for {path}, expected one type: a column has one type",
            fix="use a dataclass with an Optional field for each of them",
        )
    return _or_none(described(kinds[0], path, inside))


def _or_none(found: Described) -> Described:
    return Described(nullable(found.schema), lambda value: None if value is None else found.build(value))


def _with_bounds(found: Described, bounds: tuple[Any, ...], path: str) -> Described:
    inner = found.schema["anyOf"][0] if "anyOf" in found.schema else found.schema
    added: Schema = {}
    for each in bounds:
        if isinstance(each, str):
            added["description"] = each
        else:
            added |= _bounds_of(each, inner["type"], path)
    inner = closed({**inner, **added}, path)
    return Described(nullable(inner) if "anyOf" in found.schema else inner, found.build)


def _bounds_of(bound: Any, kind: str, path: str) -> Schema:
    if hasattr(bound, "metadata") and hasattr(bound, "description"):  # pydantic's Field()
        found: Schema = {} if bound.description is None else {"description": bound.description}
        for each in bound.metadata:
            found |= _bounds_of(each, kind, path)
        return found
    named = {_BOUNDS[name]: value for name in _BOUNDS if (value := getattr(bound, name, None)) is not None}
    if not named:
        raise InvalidType(
            f"found {bound!r} in the Annotated type of {path}, expected a description (str) or a bound: Ge, Gt, Le, "
            "Lt, Interval, MultipleOf, MinLen, MaxLen, Len"
        )
    if kind == "array":
        named = {name.replace("Length", "Items"): value for name, value in named.items()}
    # `Len(0, 5)` has a least length, too, which limits nothing.
    is_bound = {name: not (name in ("minLength", "minItems") and value == 0) for name, value in named.items()}
    return {name: getattr(value, "pattern", value) for name, value in named.items() if is_bound[name]}


_FIXES = {
    dict: "a table has named columns: use a dataclass or a TypedDict",
    tuple: "use a list, or a dataclass with a name for each place",
    set: "use a list",
    frozenset: "use a list",
    bytes: "use str",
    list: "say of what: list[str]",
    object: "name the type",
    Any: "name the type",
    complex: "use a dataclass with two numbers",
}


def _unsupported(kind: Any, path: str) -> InvalidType | InvalidArgument:
    origin = get_origin(kind) or kind
    shown = kind.__name__ if isinstance(kind, type) and not get_args(kind) else repr(kind)
    fix = _FIXES.get(origin) if isinstance(origin, type) or origin is Any else None
    if not isinstance(kind, type) and not get_origin(kind) and type(kind) in _PLAIN:
        fix = f"name a type, not a value: {cast('Any', type(kind)).__name__}"
    if isinstance(kind, str) and "|" in kind:
        fix = f"name the allowed texts: Literal[{', '.join(repr(each.strip()) for each in kind.split('|'))}]"
    if kind is None:
        fix = "leave returns= out for a text"
    return InvalidType(f"found the type {shown} for {path}, expected {_EXPECTED}", fix=fix)
