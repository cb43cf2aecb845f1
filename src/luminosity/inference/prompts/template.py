"""Templates of prompts: texts with ``{column}`` in them, filled with the values of rows."""

from __future__ import annotations

import datetime
import decimal
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa

from luminosity._shared.text import did_you_mean, list_some, shorten_repr
from luminosity.errors import InvalidArgument, InvalidType

__all__ = ["Messages", "NullValue", "Template", "check_columns", "check_type"]

Messages: TypeAlias = list[dict[str, str]]
"""The messages of a chat, each with a role and a content."""

_ROLES = ("system", "user", "assistant", "developer")
_PART = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
_SHOWN_COLUMNS = 20
_DOUBLE = "write {{ and }} for braces that are no column"


class NullValue(InvalidArgument):
    """A column of the template is null in a row."""


@dataclass(frozen=True)
class _Text:
    """A text with columns in it: literal texts, and between them the names of columns."""

    literals: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> _Text:
        literals, columns, start = [""], list[str](), 0
        for match in _PART.finditer(text):
            literals[-1] += text[start : match.start()]
            start = match.end()
            if match[0] in ("{{", "}}"):
                literals[-1] += match[0][0]
            elif text.startswith("{}", match.start()):
                raise InvalidArgument("found {} in the template, expected the name of a column in it", fix=_DOUBLE)
            elif match[1] is None:
                around = text[max(match.start() - 10, 0) : match.end() + 10]
                raise InvalidArgument(f"found a single {match[0]!r} in the template, near {around!r}", fix=_DOUBLE)
            else:
                columns.append(match[1].strip())
                literals.append("")
        literals[-1] += text[start:]
        return cls(tuple(literals), tuple(columns))

    def filled(self, row: Mapping[str, Any]) -> str:
        """Return the text with the values of a row. They are put in once: braces in a value mean nothing."""
        values = [_in_utf8(name, _text_of(name, row[name])) for name in self.columns]
        return "".join(part for pair in zip(self.literals, [*values, ""], strict=True) for part in pair)


class Template:
    """Messages of a chat with the columns of a row in them.

    >>> template = Template("Classify: {text}", system="Be brief, use {{}} never.")
    >>> template.columns
    ('text',)
    >>> template.messages({"text": "a {text} of braces"})[-1]
    {'role': 'user', 'content': 'Classify: a {text} of braces'}

    Args:
        template: the text of one message of a user, or a list of messages with roles.
        system: the text of a message to put before all others.
    """

    def __init__(
        self, template: str | Sequence[Mapping[str, str]], system: str | None = None, has_pictures: bool = False
    ) -> None:
        if not isinstance(template, str | Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidType(f"found the template {template!r}, expected a text or a list of messages")
        given: list[Any] = [{"role": "user", "content": template}] if isinstance(template, str) else list(template)
        if system is not None:
            given.insert(0, {"role": "system", "content": system})
        self.kind = repr(given)
        """A text that is equal for equal templates, in all processes."""
        self._texts = [_message_of(each) for each in given]
        self.columns = tuple(dict.fromkeys(name for _, text in self._texts for name in text.columns))
        if not self.columns and not has_pictures:
            raise InvalidArgument(
                "found no column in the template, so every row would get the same prompt",
                fix='write the name of a column in single braces: "Classify: {text}"',
            )
        if self._texts[-1][0] != "user":
            raise InvalidArgument(
                f"the last message of the template has the role {self._texts[-1][0]!r}, expected user"
            )

    def messages(self, row: Mapping[str, Any]) -> Messages:
        """Return the messages for a row. Raises if it lacks a column (``InvalidArgument``) or has a null in one."""
        check_columns(self.columns, row)
        return [{"role": role, "content": text.filled(row)} for role, text in self._texts]


def check_columns(columns: Sequence[str], there: Any) -> None:
    """Raise unless a row, or a table's schema, has these columns."""
    for name in columns:
        if name not in there:
            raise InvalidArgument(
                f"the template takes {name!r}, which is no column; there are {list_some(there, _SHOWN_COLUMNS)}",
                fix=did_you_mean(name, there) or _DOUBLE,
            )


def check_type(name: str, kind: pa.DataType) -> None:
    """Raise ``InvalidType`` if values of an Arrow type can't be put into a text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        raise InvalidType(
            f"the template takes {name!r}, which holds {kind}, expected text, numbers, dates, or lists of these",
            fix="decode the column to text first, for example with MapTable",
        )


def _message_of(message: Any) -> tuple[str, _Text]:
    if not isinstance(message, Mapping) or set(cast("Any", message)) != {"role", "content"}:
        raise InvalidArgument(
            f"found the message {shorten_repr(message, 80)}, expected one such as "
            '{"role": "user", "content": "Classify: {text}"}'
        )
    role, content = cast("Any", message["role"]), cast("Any", message["content"])
    if role not in _ROLES:
        raise InvalidArgument(
            f"found a message with the role {role!r}, expected one of {', '.join(_ROLES)}",
            fix=did_you_mean(str(role), _ROLES) or None,
        )
    if not isinstance(content, str):
        raise InvalidType(f"found a message whose content is of type {type(content).__name__}, expected a text")
    return role, _Text.of(content)


def _text_of(name: str, value: Any) -> str:
    """Return a value as a text: as it is, or as JSON if it has parts."""
    if value is None:
        raise NullValue(
            f"the template takes {name!r}, which is null",
            fix="filter these rows out first, or pass nulls='keep', with which their answers are null",
        )
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        raise InvalidType(f"found bytes in the column {name!r}, expected a text", fix="decode them first")
    if isinstance(value, bool | list | tuple | Mapping):
        return json.dumps(value, ensure_ascii=False, default=_plain)
    if isinstance(value, int | float | np.generic):
        return str(value)
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=_plain)


def _in_utf8(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidType(
            f"found {text[error.start]!r} in the column {name!r}, half of a character, which no text in UTF-8 can hold",
            fix="decode the text with errors='replace'",
        ) from None
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    item = getattr(value, "tolist", None)  # of numpy
    if item is None:
        raise InvalidType(f"found a value of type {type(value).__name__}, expected texts, numbers, lists and dicts")
    return item()
