"""Prompts with odd types, odd values and odd templates, in the process and on a server."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from luminosity import HttpModelHandler, Prompt, SentenceEmbedder, TextGenerator
from luminosity.errors import InvalidArgument, InvalidType
from tests.inference.handlers.model_server import serving
from tests.inference.prompts.chats import last, replying, talker
from tests.inference.prompts.models import save_writer
from tests.inference.texts import MINILM

pytestmark = pytest.mark.thorough


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclasses.dataclass
class Person:
    name: str
    age: Optional[int]  # noqa: UP045  # as users write it


@dataclasses.dataclass
class Film:
    director: Person
    actors: list[Person]
    mood: Mood
    size: Size
    stars: Literal[1, 2, 3]
    note: Optional[str] = None  # noqa: UP045


FILM = Film(Person("Ä. Öl", None), [Person("B", 5)], Mood.BAD, Size.LARGE, 2)
SAID = {
    "director": {"name": "Ä. Öl", "age": None},
    "actors": [{"name": "B", "age": 5}],
    "mood": "bad",
    "size": "LARGE",
    "stars": 2,
    "note": None,
}
DEFS: dict[str, Any] = {
    "$defs": {"flag": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
    "type": "object",
    "properties": {
        "flag": {"$ref": "#/$defs/flag"},
        "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 1},
    },
    "required": ["flag", "flags"],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_writer(tmp_path_factory.mktemp("models") / "writer")


def answers(prompt: Prompt, rows: list[dict[str, Any]]) -> list[Any]:
    return [each.inference for each in prompt.run_inference(rows, prompt.load_model())]


def test_nested_types_come_back_as_they_were_named() -> None:
    with serving(replying(lambda _: json.dumps(SAID))) as server:
        assert answers(Prompt(talker(server), "{text}", returns=Film), [{"text": "x"}]) == [FILM]
    with serving(replying(lambda _: json.dumps([SAID, SAID]))) as server:
        assert answers(Prompt(talker(server), "{text}", returns=list[Film]), [{"text": "x"}]) == [[FILM, FILM]]


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        (Literal[1, 2, 30], r"1|2|30"),
        (Mood, r"Mood\.(GOOD|BAD)"),
        (re.compile("[äöü]{2}|中文"), "[äöü]{2}|中文"),
        (Literal["ä|b", "{c}", '"d"'], r'ä\|b|\{c\}|"d"'),
        (DEFS, r"\{'flag': \{'on': (True|False)\}, 'flags': \[(\{'on': (True|False)\})?\]\}"),
    ],
    ids=["numbers", "enum", "characters", "marks", "references"],
)
def test_a_model_in_the_process_writes_odd_types(path: str, returns: Any, expected: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=60, generation_args={"do_sample": False})

    found = answers(Prompt(handler, "{text}", returns=returns), [{"text": text} for text in ("", "a", "}{")])

    assert all(re.fullmatch(expected, str(each)) for each in found), found


def test_odd_values_and_columns() -> None:
    row = {"class": "{None} }} {{", "a b": "<|im_end|>\n", "": 0, "é": "", "None": [1, None], "x": {"y": "ü"}}
    with serving(replying(last)) as server:
        prompt = Prompt(talker(server), "{class}|{a b}|{é}|{None}|{x}|{{x}}")

        assert prompt.columns == ("class", "a b", "é", "None", "x")
        assert answers(prompt, [row]) == ['{None} }} {{|<|im_end|>\n||[1, null]|{"y": "ü"}|{x}']


def test_the_end_of_a_prompt_beyond_the_models_limit_is_kept(path: str) -> None:
    handler = TextGenerator(path, device="CPU", max_new_tokens=8, generation_args={"do_sample": False})
    long, short = [Prompt(handler, "{text}").prepare([{"text": text}]) for text in ("good film " * 900, "good")]

    [ids], [whole] = (each.column("prepared").to_pylist() for each in (long, short))

    assert len(ids) == 512 - 8
    assert ids[-4:] == whole[-4:], "the beginning of the answer"
    assert answers(Prompt(handler, "{text}", returns=Mood), [{"text": "good film " * 900}])[0] in Mood


def test_examples_may_be_there_twice() -> None:
    shots = [({"text": "a"}, 1), ({"text": "a"}, 1)]

    with serving(replying(lambda messages: str(len(messages)))) as server:
        assert answers(Prompt(talker(server), "{text}", returns=int, examples=shots), [{"text": "b"}]) == [5]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("Hi {}", "found {} in the template, expected the name of a column in it"),
        ("{{ text }}", r"found no column .*; write the name of a column in single braces: \"Classify: {text}\""),
        (None, "found the template None, expected a text or a list of messages"),
        (7, "found the template 7, expected"),
    ],
)
def test_templates_that_ask_nothing(template: Any, said: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=said):
        Prompt(HttpModelHandler.chat("http://localhost:1", "m"), template)


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ("good|bad", r"name the allowed texts: Literal\['good', 'bad'\]"),
        (None, "leave returns= out for a text"),
        (Literal[1, "a"], "found a Literal of int, str"),
    ],
)
def test_types_that_are_none(returns: Any, said: str) -> None:
    with pytest.raises(InvalidType, match=said):
        Prompt(HttpModelHandler.chat("http://localhost:1", "m"), "{text}", returns=returns)


@pytest.mark.parametrize(
    "handler",
    [SentenceEmbedder(Path(MINILM)), HttpModelHandler.embeddings("http://localhost:1", "m")],
    ids=["process", "server"],
)
def test_models_that_write_no_texts_are_refused(handler: Any) -> None:
    with pytest.raises(InvalidType, match=r"whose predictions are .*list<.*, expected a model of chats"):
        Prompt(handler, "{text}")
