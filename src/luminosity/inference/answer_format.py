"""``AnswerFormat``: what a model that writes text may write, in words that models in the process and servers share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

__all__ = ["AnswerFormat", "FormatsAnswers"]

HandlerT_co = TypeVar("HandlerT_co", covariant=True)


@dataclass(frozen=True)
class AnswerFormat:
    """A JSON schema, a regular expression, or a list of texts, one of which is the whole answer.

    It is a plain, hashable value: it can be part of the key of a cache.

    >>> AnswerFormat.of_choices(["good", "bad"]).choices
    ('good', 'bad')
    >>> AnswerFormat.of_json_schema({"type": "object"}, "Review").json_schema
    {'type': 'object'}
    """

    kind: Literal["json_schema", "regex", "choices"]
    text: str
    """The schema or the list of choices as JSON, or the regular expression."""
    name: str = "answer"
    """The name by which a server knows the schema: letters, digits, ``_`` and ``-``."""

    @classmethod
    def of_json_schema(cls, schema: dict[str, Any], name: str = "answer") -> AnswerFormat:
        """Return the format of a JSON value with this schema."""
        return cls("json_schema", json.dumps(schema), name)

    @classmethod
    def of_regex(cls, pattern: str) -> AnswerFormat:
        """Return the format of a text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def of_choices(cls, choices: list[str]) -> AnswerFormat:
        """Return the format of an answer that is one of these texts."""
        return cls("choices", json.dumps(choices))

    @property
    def json_schema(self) -> dict[str, Any]:
        """The JSON schema; only for this kind."""
        return json.loads(self.text)

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts, one of which is the answer; only for this kind."""
        return tuple(json.loads(self.text))


@runtime_checkable
class FormatsAnswers(Protocol[HandlerT_co]):
    """A handler whose answers can be limited to a format: a generator in the process, or a server of chats."""

    def with_answer_format(self, answer_format: AnswerFormat) -> HandlerT_co:
        """Return a copy of the handler whose answers all have this format."""
        ...
