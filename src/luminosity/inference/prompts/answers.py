"""What a prompt returns: the format of an answer, the type of the column, and how a text becomes a value."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NoReturn, cast

import pyarrow as pa

from luminosity.errors import InvalidArgument
from luminosity.inference.answer_format import AnswerFormat, without_fence, without_thoughts
from luminosity.inference.prompts.schemas import Schema, arrow_type, checked, closed, split_null, words_for
from luminosity.inference.prompts.types import Described, described

__all__ = ["AnswerType"]

_QUOTES = " \t\r\n\"'"
_AROUND = f"{_QUOTES}`*."  # what models write around a word
_YES_OR_NO = {"true": True, "yes": True, "false": False, "no": False}


class AnswerType:
    """The type of a prompt's answers, made from what ``returns=`` names.

    >>> import typing
    >>> mood = AnswerType(typing.Literal["good", "bad"])
    >>> mood.arrow, mood.parse(" Good. "), mood.instruction
    (DataType(string), 'good', 'Answer with exactly one of these, and with nothing else: good, bad.')

    Raises ``InvalidType`` or ``InvalidArgument`` for a type whose values a column can't hold.
    """

    def __init__(self, returns: Any) -> None:
        self.returns = returns
        self._described  # noqa: B018  # raise now

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerType, (self.returns,)

    @cached_property
    def _described(self) -> Described:
        if isinstance(self.returns, re.Pattern):
            return _of_pattern(cast("re.Pattern[Any]", self.returns))
        if isinstance(self.returns, Mapping):
            return Described(closed(self.returns), lambda value: value)
        return described(self.returns)

    @property
    def schema(self) -> Schema:
        """The JSON schema of an answer, in closed form."""
        return self._described.schema

    @cached_property
    def arrow(self) -> pa.DataType:
        """The type of the new column."""
        return arrow_type(self.schema)

    @cached_property
    def format(self) -> AnswerFormat | None:
        """What the model may write; None if any text is an answer."""
        if isinstance(self.returns, re.Pattern):
            return AnswerFormat.of_regex(self.returns.pattern)
        if self.schema == {"type": "string"}:
            return None
        if self._is_choice:
            return AnswerFormat.of_choices(self.schema["enum"])
        name = re.sub(r"[^A-Za-z0-9_-]", "_", getattr(self.returns, "__name__", "") or "answer")
        return AnswerFormat.of_json_schema(self.schema, name[:64])

    @property
    def _is_choice(self) -> bool:
        return self.schema.get("type") == "string" and "enum" in self.schema

    @property
    def instruction(self) -> str:
        """The sentence that tells the model what to answer; empty if any text is an answer."""
        if self.format is None:
            return ""
        if self.format.kind == "regex":
            return f"Answer with a text that matches {self.format.text} and with nothing else."
        if self.format.kind == "choices":
            return f"Answer with exactly one of these, and with nothing else: {', '.join(self.format.choices)}."
        inner, _ = split_null(self.schema)
        if inner["type"] in ("object", "array"):
            shown = json.dumps(self.schema, ensure_ascii=False)
            return f"Answer with JSON of this JSON schema, and with nothing else: {shown}"
        return f"Answer with {words_for(self.schema)}, and with nothing else."

    def shown_by(self, texts: Iterable[str]) -> bool:
        """Return whether texts name every choice, so that nothing is left to explain."""
        return self.format is not None and self.format.kind == "choices" and {*self.format.choices} <= {*texts}

    def parse(self, text: str) -> Any:
        """Return what a model wrote as a plain value for the column. Raises ``ValueError`` with the reason if it can't.

        A model that is not limited to the format may write spaces, quotes or a fence of Markdown around its answer.
        """
        found = self._read(without_thoughts(text))
        if not _is_utf8(found):
            raise ValueError("found half of a character, which no text in UTF-8 can hold")
        try:
            self.typed(found)  # the user's class may refuse it
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return found

    def _read(self, text: str) -> Any:
        if self.format is None:
            return text
        if self.format.kind == "regex":
            if self.returns.fullmatch(text) is None:
                raise ValueError(f"found a text that does not match, expected the form {self.format.text}")
            return text
        if self.format.kind == "choices":
            return _choice(text, self.format.choices)
        return checked(_json_value(text, split_null(self.schema)[0]), self.schema)

    def typed(self, plain: Any) -> Any:
        """Return a plain value as the type that ``returns=`` names; null stays None."""
        return None if plain is None else self._described.build(plain)

    def text_of(self, answer: Any) -> str:
        """Return an answer as a model would write it. Raises ``InvalidArgument`` if it is none.

        >>> AnswerType(list[int]).text_of([1, 2])
        '[1, 2]'
        """
        plain = _plain(answer)
        text = plain if isinstance(plain, str) and (self.format is None or self.format.kind != "json_schema") else None
        text = json.dumps(plain, ensure_ascii=False) if text is None else text
        try:
            self.parse(text)
        except ValueError as error:
            raise InvalidArgument(f"the answer of an example is {answer!r}: {error}") from None
        return text


def _of_pattern(pattern: re.Pattern[Any]) -> Described:
    if not isinstance(pattern.pattern, str) or pattern.flags & ~re.UNICODE:
        raise InvalidArgument(
            f"found the regular expression {pattern!r}, expected one of texts and without flags: servers know none",
            fix="write what the flag means into the expression, such as [Aa] for re.IGNORECASE",
        )
    return Described({"type": "string"}, lambda value: value)


def _choice(text: str, choices: tuple[str, ...]) -> str:
    """Return the choice that a text is, whatever stands around it and however its letters are written."""
    if text in choices:
        return text
    for around in (_QUOTES, _AROUND):  # a choice may consist of what stands around others: "*"
        bare = text.strip(around).casefold()
        found = [each for each in choices if bare and each.strip(around).casefold() == bare]
        if len(found) == 1:
            return found[0]
    raise ValueError(f"found another text, expected exactly one of {', '.join(choices)}")


def _is_utf8(value: Any) -> bool:
    """Return whether UTF-8 can hold all texts in a plain value."""
    if isinstance(value, list):
        return all(map(_is_utf8, cast("list[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_utf8, cast("dict[str, Any]", value).values()))
    return not isinstance(value, str) or value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)


def _json_value(text: str, schema: Schema) -> Any:
    text = without_fence(text)
    kind = schema["type"]
    if kind == "string":
        return _text_value(text, schema)
    bare = text.strip(_AROUND).casefold()
    if kind == "boolean" and bare in _YES_OR_NO:
        return _YES_OR_NO[bare]
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
    start = text.find("{" if kind == "object" else "[") if kind in ("object", "array") else -1
    if start > 0:
        try:
            return json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text[start:])[0]
        except (ValueError, RecursionError):
            pass  # the first reason says more
    raise ValueError(f"found a text that is not JSON ({reason}), expected {words_for(schema)}")


def _text_value(text: str, schema: Schema) -> str | None:
    """Return the text, or null, that a model wrote as JSON, or without its quotes."""
    found = _decoded(text)
    if found is None:
        return None
    found = found if isinstance(found, str) else text
    return _choice(found, tuple(schema["enum"])) if "enum" in schema else found


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _plain(answer: Any) -> Any:
    """Return an answer of a user's type as a JSON value."""
    if isinstance(answer, enum.Enum):
        return answer.value if all(isinstance(each.value, str) for each in type(answer)) else answer.name
    if isinstance(answer, Mapping):
        return {name: _plain(each) for name, each in cast("Mapping[str, Any]", answer).items()}
    if hasattr(answer, "model_dump"):  # pydantic
        return answer.model_dump(mode="json")
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return {each.name: _plain(getattr(answer, each.name)) for each in dataclasses.fields(answer)}
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in cast("list[Any]", answer)]
    return answer.isoformat() if isinstance(answer, datetime.date) else answer
