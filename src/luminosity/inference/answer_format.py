"""``AnswerFormat``: what a model that writes text may write, in words that models in the process and servers share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

__all__ = ["AnswerFormat", "FormatsAnswers", "without_fence", "without_thoughts"]

_WRAPPER = "answer"  # the name of the property with the answer, if it is no object
_THOUGHTS = re.compile(r"\A\s*<(think|thinking|reasoning)>.*?</\1>", re.DOTALL)
_FENCE = re.compile(r"\A```\w*\s*\n(.*?)\n?\s*```\Z", re.DOTALL)

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

    def response_format(self) -> dict[str, Any]:
        """Return the ``response_format`` of a request, as OpenAI's servers and vLLM know it.

        They want an object: other values are wrapped into ``{"answer": ...}``, which :meth:`unwrapped` takes away.

        >>> AnswerFormat.of_choices(["good", "bad"]).response_format()["json_schema"]["schema"]["properties"]
        {'answer': {'type': 'string', 'enum': ['good', 'bad']}}
        """
        schema = self._schema
        if not self._is_object:
            schema = {
                "type": "object",
                "properties": {_WRAPPER: schema},
                "required": [_WRAPPER],
                "additionalProperties": False,
            }
        return {
            "type": "json_schema",
            "json_schema": {"name": self.name, "strict": _is_strict(schema), "schema": schema},
        }

    def unwrapped(self, text: str) -> str:
        """Return the answer in the text of a server that was asked for :meth:`response_format`.

        A server that does not know ``response_format`` sends another text, which is returned as it is.

        >>> AnswerFormat.of_choices(["good", "bad"]).unwrapped('{"answer": "good"}')
        'good'
        """
        if self._is_object:
            return text
        try:
            found: Any = json.loads(without_fence(without_thoughts(text)))
        except (ValueError, RecursionError):
            return text
        if not isinstance(found, dict) or list(cast("dict[str, Any]", found)) != [_WRAPPER]:
            return text
        answer: Any = found[_WRAPPER]
        return answer if isinstance(answer, str) and self.kind != "json_schema" else json.dumps(answer)

    @property
    def _schema(self) -> dict[str, Any]:
        if self.kind == "json_schema":
            return self.json_schema
        if self.kind == "choices":
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string", "pattern": f"^({self.text})$"}

    @property
    def _is_object(self) -> bool:
        return self.kind == "json_schema" and self.json_schema.get("type") == "object"

    @property
    def json_schema(self) -> dict[str, Any]:
        """The JSON schema; only for this kind."""
        return json.loads(self.text)

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts, one of which is the answer; only for this kind."""
        return tuple(json.loads(self.text))


def without_thoughts(text: str) -> str:
    """Return what a model wrote behind its thoughts, without spaces around it.

    >>> without_thoughts("<think>Is it?</think> Yes. ")
    'Yes.'
    """
    return _THOUGHTS.sub("", text).strip()


def without_fence(text: str) -> str:
    """Return what stands in a fence of Markdown, if the whole text is one."""
    fenced = _FENCE.match(text)
    return fenced[1].strip() if fenced else text


def _is_strict(schema: Any) -> bool:
    """Return whether each object of a schema requires all of its properties and no others, as strict servers want it.

    >>> _is_strict({"type": "object", "properties": {"a": {"type": "string"}}})
    False
    """
    if isinstance(schema, list):
        return all(map(_is_strict, cast("list[Any]", schema)))
    if not isinstance(schema, dict):
        return True
    given = cast("dict[str, Any]", schema)
    names = list(given.get("properties", ()))
    is_closed = given.get("additionalProperties") is False and sorted(given.get("required", ())) == sorted(names)
    return (given.get("type") != "object" or is_closed) and all(map(_is_strict, given.values()))


@runtime_checkable
class FormatsAnswers(Protocol[HandlerT_co]):
    """A handler whose answers can be limited to a format: a generator in the process, or a server of chats."""

    def with_answer_format(self, answer_format: AnswerFormat) -> HandlerT_co:
        """Return a copy of the handler whose answers all have this format."""
        ...
