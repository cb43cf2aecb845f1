"""Types of answers: their schemas and columns, how texts become values, and which types are refused."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import pickle
import re
import typing
from typing import Annotated, Any, Literal, NewType, Optional, Union

import annotated_types
import pyarrow as pa
import pydantic
import pytest
import typing_extensions

from luminosity.errors import InvalidArgument, LuminosityError
from luminosity.inference.answer_format import AnswerFormat
from luminosity.inference.prompts.answers import AnswerType
from luminosity.inference.prompts.named_types import type_named
from luminosity.inference.prompts.schemas import closed


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Size(str, enum.Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Inner:
    size: Size
    when: datetime.date


@dataclasses.dataclass
class Outer:
    color: Color
    inner: list[Inner]
    note: str | None = None

    def __post_init__(self) -> None:
        if self.note == "refused":
            raise ValueError("a note that the class refuses")


class Typed(typing_extensions.TypedDict):
    stars: Annotated[int, pydantic.Field(ge=1, le=5, description="how good")]
    why: typing_extensions.NotRequired[str]


class Model(pydantic.BaseModel):
    stars: int = pydantic.Field(ge=1, le=5)
    note: str = ""
    size: Size | None = None


@dataclasses.dataclass
class Recursive:
    child: Recursive | None


class RecursiveModel(pydantic.BaseModel):
    children: list[RecursiveModel]


OUTER = Outer(Color.BLUE, [Inner(Size.SMALL, datetime.date(2024, 2, 29))], None)
OUTER_TEXT = '{"color": "BLUE", "inner": [{"size": "small", "when": "2024-02-29"}], "note": null}'
Stars = NewType("Stars", int)


@pytest.mark.parametrize(
    ("returns", "text", "value", "column"),
    [
        (str, " a text ", "a text", pa.string()),
        (Literal["good", "bad"], "Bad.", "bad", pa.string()),
        (Literal[1, 2], "2", 2, pa.int64()),
        (Color, "RED", Color.RED, pa.string()),
        (Size, "large", Size.LARGE, pa.string()),
        (bool, "yes", True, pa.bool_()),
        (int, " 7\n", 7, pa.int64()),
        (int, "7.0", 7, pa.int64()),
        (Stars, "7", 7, pa.int64()),
        (float, "1", 1.0, pa.float64()),
        (Optional[int], "null", None, pa.int64()),  # noqa: UP045
        (int | None, "3", 3, pa.int64()),
        (list[str], '["a", "b"]', ["a", "b"], pa.list_(pa.string())),
        (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29), pa.date32()),
        (
            datetime.datetime,
            "2024-02-29T12:00:00+02:00",
            datetime.datetime(2024, 2, 29, 10, tzinfo=datetime.timezone.utc),
            pa.timestamp("us", "UTC"),
        ),
        (Annotated[str, pydantic.Field(max_length=3)], "abc", "abc", pa.string()),
        (re.compile(r"\d+"), "12", "12", pa.string()),
        (Typed, '{"stars": 3}', {"stars": 3, "why": None}, pa.struct([("stars", pa.int64()), ("why", pa.string())])),
        ({"enum": ["a", None]}, '"a"', "a", pa.string()),
        ({"const": 3}, "3", 3, pa.int64()),
        (float, "1" + "0" * 30, 1e30, pa.float64()),
        (Literal["good", "bad"] | None, "Good.", "good", pa.string()),
        (Literal["good", "bad"] | None, "null", None, pa.string()),
        (str | None, "42", "42", pa.string()),
        (str | None, '"42"', "42", pa.string()),
        (Annotated[str, pydantic.Field(max_length=10)], "42", "42", pa.string()),
        (Literal["+", "*"], '"*"', "*", pa.string()),
    ],
)
def test_texts_become_values(returns: Any, text: str, value: Any, column: pa.DataType) -> None:
    answers = AnswerType(returns)
    plain = answers.parse(text)

    assert answers.arrow == column
    assert answers.typed(pa.array([plain], column).to_pylist()[0]) == value
    assert type(answers.typed(plain)) is type(value)
    assert answers.parse(answers.text_of(value)) == plain, "and back"


def test_classes_hold_classes() -> None:
    answers = AnswerType(Outer)
    plain = pa.array([answers.parse(OUTER_TEXT)], answers.arrow).to_pylist()[0]

    assert answers.typed(plain) == OUTER
    assert answers.text_of(OUTER) == OUTER_TEXT
    assert pickle.loads(pickle.dumps(answers)).arrow == copy.deepcopy(answers).arrow == answers.arrow
    with pytest.raises(ValueError, match="ValueError: a note that the class refuses"):
        answers.parse(OUTER_TEXT.replace('"note": null', '"note": "refused"'))


def test_models_of_pydantic_check_themselves() -> None:
    answers = AnswerType(Model)

    assert answers.typed(answers.parse('{"stars": 5, "note": "x", "size": "small"}')) == Model(
        stars=5, note="x", size=Size.SMALL
    )
    assert answers.schema["required"] == ["stars", "note", "size"], "the model is asked for each field"
    with pytest.raises(ValueError, match="stars: found 6, expected an integer of at least 1 and at most 5"):
        answers.parse('{"stars": 6, "note": "x", "size": null}')


@pytest.mark.parametrize(
    "text",
    ['{"stars": 3}', '```json\n{"stars": 3}\n```', 'Sure! {"stars": 3} Enjoy.', '<think>{"a"}</think>\n{"stars": 3}'],
)
def test_what_stands_around_an_answer_does_no_harm(text: str) -> None:
    assert AnswerType(Typed).parse(text) == {"stars": 3, "why": None}


@pytest.mark.parametrize(
    ("returns", "text", "message"),
    [
        (int, "NaN", "NaN is not JSON"),
        (int, "true", "found True, expected an integer"),
        (int, str(2**63), "expected an integer"),
        (int, "1" + "0" * 400, "expected an integer"),
        (float, "-1" + "0" * 400, "expected a number"),
        (Annotated[int, annotated_types.Gt(0)], "0", "found 0, expected an integer of more than 0"),
        (Annotated[int, annotated_types.Lt(0)], "0", "expected an integer of less than 0"),
        (Annotated[int, annotated_types.Le(0)], "1", "expected an integer of at most 0"),
        (Annotated[list[int], annotated_types.MaxLen(0)], "[1]", "expected a JSON list of at most 0 items"),
        (datetime.datetime, '"9999-12-31T23:59:59-05:00"', "found '9999-12-31T.*, expected a text of the format date"),
        (str, "a \ud800", "found half of a character"),
        (list[Typed], r'[{"stars": 3, "why": "\ud83d"}]', "found half of a character"),
        (Literal["+", "*"], "...", "found another text"),
        (float, "1e999", "found inf, expected a number"),
        (Literal["a", "b"], "a or b", "found another text, expected exactly one of a, b"),
        (Literal["a", "A"], "'a'.", "found another text"),
        (re.compile("a"), "b", "found a text that does not match, expected the form a"),
        (datetime.date, '"2023-02-29"', "the answer: found '2023-02-29', expected a text of the format date"),
        (list[int], '[1, "2"]', r"\[1\]: found '2', expected an integer"),
        (Typed, '{"why": "x"}', "stars: found nothing, expected an integer"),
        (Typed, '{"stars": 3, "more": 1}', "more: found a field that nobody asked for, expected stars, why"),
        (Typed, '{"stars": 3', "found a text that is not JSON"),
        (Typed, "[" * 100_000, "is not JSON"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1]", r"a JSON list of at least 2 items"),
    ],
)
def test_texts_that_are_no_answer(returns: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnswerType(returns).parse(text)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (dict, "found the type dict for the answer, .*: use a dataclass or a TypedDict"),
        (dict[str, int], r"found the type dict\[str, int\] for the answer"),
        (tuple[int, str], "use a list, or a dataclass with a name for each place"),
        (set[str], "use a list"),
        (list, r"say of what: list\[str\]"),
        (bytes, "use str"),
        (typing.Any, "name the type"),
        ("good|bad", r"name the allowed texts: Literal\['good', 'bad'\]"),
        (["good", "bad"], r"name the allowed texts: Literal\['good', 'bad'\]"),
        (Literal[()], "found a Literal without values for the answer"),
        (Literal[1, "a"], "found a Literal of int, str for the answer, expected values of one type"),
        (Literal[True], "one value asks for nothing"),
        (Union[int, str], "found a Union of int, str for the answer"),  # noqa: UP007
        (enum.Enum("Empty", []), "the Enum Empty for the answer has no members"),
        (Recursive, "child contains Recursive, which contains itself"),
        (RecursiveModel, r"children\[\] contains itself"),
        (
            Annotated[int, lambda value: value > 0],
            "in the Annotated type of the answer, expected a description",
        ),
        (Annotated[int, pydantic.Field(max_length=3)], "found 'maxLength' in the JSON schema of the answer"),
        (re.compile("a", re.IGNORECASE), r"without flags.*such as \[Aa\] for re.IGNORECASE"),
        (re.compile(b"a"), "expected one of texts and without flags"),
        ({"type": "objct"}, "found the type 'objct' .* did you mean 'object'"),
        ({"type": "object"}, "the answer is an object whose properties have any name"),
        ({"type": "array"}, "an array without items"),
        ({"type": ["integer", "string"]}, "may be of several types"),
        ({}, "may be of several types or of none"),
        ({"enum": []}, "of none that is named"),
        (
            {"enum": [1], "type": "string"},
            "found the allowed value 1 of the answer, expected values of the type",
        ),
        ({"$ref": "#/$defs/X"}, r"found \$ref '#/\$defs/X'"),
        ({"type": "string", "pattern": "["}, r"found the pattern '\[' of the answer: unterminated"),
        ({"type": "string", "format": "email"}, "found the format 'email' of the answer, expected date or date-time"),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}, "requires 'b', which is no"),
        ({"type": "object", "properties": ["a"]}, r"found 'properties': \['a'\] in the JSON schema of the answer, exp"),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": "a"}, "expected a list of names"),
        ({"type": "string", "enum": "abc"}, "found 'enum': 'abc' .*, expected a list of values"),
        ({"type": "string", "enum": None}, "found 'enum': None"),
        ({"type": {"a": 1}}, "found 'type': .*, expected the name of a type, or a list of them"),
        ({"type": ["integer", {}]}, "found 'type'"),
        ({"anyOf": "abc"}, "found 'anyOf': 'abc' .*, expected a list of schemas"),
        ({"anyOf": ["integer"]}, "expected a list of schemas"),
        ({"allOf": [3]}, "expected a list of schemas"),
        ({"type": "integer", "minimum": "1"}, "found 'minimum': '1' .*, expected a number"),
        ({"type": "integer", "minimum": True}, "found 'minimum': True"),
        ({"type": "number", "maximum": float("inf")}, "found 'maximum': inf"),
        ({"type": "string", "minLength": "2"}, "expected a whole number of at least 0"),
        ({"type": "integer", "multipleOf": 0}, "found 'multipleOf': 0 .*, expected a number above 0"),
        ({"type": "string", "pattern": 3}, "found 'pattern': 3 .*, expected a text"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "found minimum 5 and maximum 1 for the answer, which no val"),
        ({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}, "found minimum 5 and exclusiveMaximum 5"),
        ({"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 1}}, r"for the answer\[\], which"),
        ({"type": "string", "format": "date", "enum": ["2024-02-29"]}, "found a format and an enum for the answer"),
        (typing.List, "say of what"),  # noqa: UP006
        ({"type": "integer", "not": {"const": 3}}, "found 'not' in the JSON schema of the answer"),
    ],
)
def test_types_that_no_column_holds(returns: Any, message: str) -> None:
    with pytest.raises(LuminosityError, match=message):
        AnswerType(returns)


def test_schemas_are_closed() -> None:
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"type": "string", "default": "x"}}}
    found = closed({**node, "$defs": {"A": {"type": "integer", "title": "A"}}})

    assert found == {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "b": {"type": "string"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert closed(found) == found


def test_what_servers_are_asked_for() -> None:
    wanted = AnswerFormat.of_regex("a|b").response_format()["json_schema"]

    assert wanted["schema"]["properties"]["answer"] == {"type": "string", "pattern": "^(a|b)$"}
    assert wanted["strict"]
    whole = AnswerType(Outer).format
    assert whole is not None
    assert whole.response_format()["json_schema"]["schema"] == AnswerType(Outer).schema
    assert not AnswerFormat.of_json_schema({"type": "object"}).response_format()["json_schema"]["strict"]
    number = AnswerFormat.of_json_schema({"type": "integer"})
    assert [number.unwrapped(text) for text in ('{"answer": 3}', "3", "three")] == ["3", "3", "three"]


@pytest.mark.parametrize(
    "text",
    ['<think>{"answer": "bad"}?</think>\n{"answer": "good"}', '```json\n{"answer": "good"}\n```', '{"answer": "good"}'],
)
def test_an_answer_of_a_server_is_found_behind_thoughts_and_in_a_fence(text: str) -> None:
    answers = AnswerType(Literal["good", "bad"])
    assert answers.format is not None

    assert answers.parse(answers.format.unwrapped(text)) == "good"
    assert answers.format.unwrapped("<think>hm</think> good") == "<think>hm</think> good", "it has no wrapper"


def test_types_by_name(tmp_path: Any) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bad.json").write_text("{")

    assert type_named("a | b") == type_named(["a", "b"]) == Literal["a", "b"]
    assert [type_named(name) for name in ("text", "int", "float", "bool")] == [str, int, float, bool]
    assert type_named(str(tmp_path / "schema.json")) == type_named({"type": "integer"}) == {"type": "integer"}
    for name, message in [
        ("flot", "did you mean 'float'"),
        ("a|", "expected texts, none of them empty"),
        ([], "expected texts, none of them empty"),
        (7, "found the type 7, expected choices"),
        ("nowhere.json", "found no file 'nowhere.json'"),
        (str(tmp_path / "list.json"), "holds list, expected a JSON schema"),
        (str(tmp_path / "bad.json"), "is no JSON schema"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            type_named(name)
