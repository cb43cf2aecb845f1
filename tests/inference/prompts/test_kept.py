"""The answers of models in the process are computed once in a run, and with a cache once in all runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import Enrich, Handler, HttpModelHandler, Prompt, TextGenerator
from luminosity.core import InferenceMetrics
from luminosity.errors import IncompleteAnswer, InvalidArgument
from luminosity.inference.answer_cache import AnswerCache, CacheSettings
from luminosity.inference.continuous import ContinuousModel
from luminosity.inference.handler import noting
from luminosity.inference.prompts.kept import KeptTexts, Text
from tests.both_runners import Pipelines, counters
from tests.both_runners import pipelines as pipelines
from tests.both_runners import runner_name as runner_name
from tests.inference.handlers.model_server import serving
from tests.inference.prompts.chats import last, replying
from tests.inference.prompts.models import save_writer

GREEDY = {"do_sample": False}
TEXTS = [f"film {number % 600}" for number in range(1000)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_writer(tmp_path_factory.mktemp("models") / "llama")


class Scribe(Handler[Any, str, str]):
    """Answers a chat with its last message in capitals, and writes down in a file what it was asked."""

    def __init__(self, book: Path, version: str = "1") -> None:
        super().__init__(max_batch_size=8)
        self.book, self.version = book, version

    def load_model(self) -> str:
        return "scribe"

    def texts_version(self) -> str:
        return self.version

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> list[str]:
        asked = [last(chat) for chat in batch]
        with self.book.open("a") as book:
            book.write("".join(f"{text}\n" for text in asked))  # one write: several processes append
        return [text.upper() for text in asked]


def asked_by(scribe: Scribe) -> list[str]:
    return scribe.book.read_text().splitlines() if scribe.book.exists() else []


def run(pipelines: Pipelines, prompt: Prompt, texts: list[str]) -> dict[str, int]:
    with pipelines("--cpu_workers=2") as (pipeline, result):
        tables = [pa.record_batch({"text": texts[start : start + 50]}) for start in range(0, len(texts), 50)]
        found = pipeline | beam.Create(tables) | Enrich(answer=prompt)
        rows = found | beam.FlatMap(
            lambda batch: zip(batch["text"].to_pylist(), batch["answer"].to_pylist(), strict=True)
        )
        assert_that(rows, equal_to([(text, text.upper()) for text in texts]))
    return counters(result.result)


@pytest.mark.parametrize("runner_name", ["luminosity.LuminosityRunner"])
def test_400_of_1000_rows_that_repeat_others_are_not_asked_and_none_by_a_second_run(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path / "book")
    prompt = Prompt(scribe, "{text}", cache=tmp_path / "answers")

    first = run(pipelines, prompt, TEXTS)
    asked = asked_by(scribe)
    second = run(pipelines, prompt, TEXTS)

    assert sorted(asked) == sorted(set(TEXTS))
    assert len(asked) == 600
    saved = [InferenceMetrics.REPEATED_PROMPTS, InferenceMetrics.CACHED_ANSWERS]
    assert sum(first.get(name, 0) for name in saved) == 400
    assert len(asked_by(scribe)) == 600, "the second run asks nothing"
    assert sum(second.get(name, 0) for name in saved) == 1000
    assert second[InferenceMetrics.CACHED_ANSWERS] >= 600


@pytest.mark.parametrize("runner_name", ["luminosity.LuminosityRunner"])
def test_equal_prompts_are_asked_once_by_all_workers_without_a_cache(pipelines: Pipelines, tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "book")

    found = run(pipelines, Prompt(scribe, "{text}"), TEXTS)

    assert len(asked_by(scribe)) == 600
    assert found[InferenceMetrics.REPEATED_PROMPTS] == 400
    assert InferenceMetrics.CACHED_ANSWERS not in found


@pytest.mark.parametrize("in_slots", [False, True], ids=["transformers", "slots"])
def test_a_generator_computes_no_answer_of_the_cache(llama: str, tmp_path: Path, in_slots: bool) -> None:
    handler = TextGenerator(llama, device="CPU", max_new_tokens=3, generation_args=GREEDY)
    handler.slot_devices = ("cpu",) if in_slots else ()
    prompt = Prompt(handler, "{text}", cache=tmp_path / "answers")
    rows = [{"text": text} for text in TEXTS[:20] + TEXTS[600:610]]
    found: list[list[Any]] = []
    noted: list[dict[str, int]] = []
    for _ in range(2):
        model = prompt.load_model()
        assert isinstance(model.inner, ContinuousModel) is in_slots
        with noting() as notes:
            found.append([each.inference for each in prompt.run_inference(rows, model)])
        noted.append(dict(notes))

    assert found[0] == found[1]
    assert noted[0][InferenceMetrics.IN_SLOTS if in_slots else InferenceMetrics.BY_TRANSFORMERS] == 20
    assert noted[0][InferenceMetrics.REPEATED_PROMPTS] == 10
    assert noted[1] == {InferenceMetrics.CACHED_ANSWERS: 20, InferenceMetrics.REPEATED_PROMPTS: 10}


def test_another_version_prompt_or_setting_is_asked(llama: str, tmp_path: Path) -> None:
    def news(arguments: dict[str, Any] | None = None, **settings: Any) -> int:
        handler = TextGenerator(llama, device="CPU", **{"max_new_tokens": 1, "generation_args": GREEDY, **settings})
        handler.slot_devices = ()
        prompt = Prompt(handler, "{text}", cache=tmp_path / "answers")
        with noting() as notes:
            prompt.run_inference([{"text": "film"}], prompt.load_model(), arguments)
        return notes.get(InferenceMetrics.BY_TRANSFORMERS, 0)

    assert news() == 1
    assert news() == 0
    assert news(max_new_tokens=2) == 1
    assert news(generation_args={"do_sample": True, "seed": 1}) == 1
    assert news(generation_args={"do_sample": True, "seed": 1}) == 0
    assert news({"repetition_penalty": 1.1}) == 1
    os.utime(Path(llama) / "config.json", (1, 1))
    assert news() == 1, "the model's files have changed"


def test_a_cut_answer_is_not_computed_again(llama: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    handler = TextGenerator(llama, device="CPU", max_new_tokens=1, generation_args=GREEDY)
    prompt = Prompt(handler, "{text}", returns=Literal["a long one", "another one"], cache=tmp_path / "answers")
    reasons: list[str] = []
    for news in (1, 0):
        with noting() as notes, pytest.raises(IncompleteAnswer) as caught:
            prompt.run_inference([{"text": "film"}], prompt.load_model())
        reasons.append(str(caught.value))
        assert notes.get(InferenceMetrics.BY_TRANSFORMERS, 0) == news

    assert reasons[0] == reasons[1]


class TestSettings:
    def test_a_handler_that_says_nothing_about_its_version_has_no_cache(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"cache= for Unversioned.* add a method texts_version"):
            Prompt(Unversioned(), "{text}", cache=tmp_path)

    def test_sampled_answers_need_a_seed(self, llama: str, tmp_path: Path) -> None:
        sampled = TextGenerator(llama, device="CPU", generation_args={"do_sample": True})
        with pytest.raises(InvalidArgument, match="no seed"):
            Prompt(sampled, "{text}", cache=tmp_path)
        greedy = TextGenerator(llama, device="CPU", generation_args=GREEDY)
        with pytest.raises(InvalidArgument, match="no seed"):
            Prompt(greedy, "{text}", cache=tmp_path).validate_inference_args({"do_sample": True})

    def test_a_server_keeps_its_own_answers(self, tmp_path: Path) -> None:
        with serving(replying(lambda messages: "good")) as server:
            chat = HttpModelHandler.chat(server.url, "talker")
            for _ in range(2):
                prompt = Prompt(chat, "{text}", cache=tmp_path / "answers")
                [found] = prompt.run_inference([{"text": "nice"}], prompt.load_model())
                assert found.inference == "good"
            assert len(server.seen) == 1
            with pytest.raises(InvalidArgument, match="two caches"):
                Prompt(HttpModelHandler.chat(server.url, "talker", cache=tmp_path / "a"), "{text}", cache=tmp_path)


class Unversioned(Handler[Any, str, str]):
    def load_model(self) -> str:
        return ""

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> list[str]:
        return [""] * len(batch)


class TestClaims:
    def kept(self, folder: Path) -> KeptTexts:
        return KeptTexts(CacheSettings(str(folder), 10**6), "1", of_run=False)

    def test_what_another_asks_is_waited_for(self, tmp_path: Path) -> None:
        began, may_end, asked = threading.Event(), threading.Event(), list[str]()
        found: list[list[Text]] = []

        def slow(places: list[int]) -> list[Text]:
            asked.append("slow")
            began.set()
            assert may_end.wait(60)
            return ["slow"] * len(places)

        def quick(places: list[int]) -> list[Text]:
            asked.append("quick")
            may_end.set()
            return ["quick"] * len(places)

        first = threading.Thread(target=lambda: found.append(self.kept(tmp_path).texts(["a"], {}, slow)))
        first.start()
        assert began.wait(60)
        assert self.kept(tmp_path).texts(["a", "b"], {}, quick) == ["slow", "quick"]
        first.join(60)

        assert found == [["slow"]]
        assert asked == ["slow", "quick"]

    def test_the_claims_of_a_process_that_was_killed_are_free(self, tmp_path: Path) -> None:
        code = (
            "import os, signal, sys; from luminosity.inference.answer_cache import *\n"
            "assert AnswerCache(CacheSettings(sys.argv[1], 10**6)).claim([b'a', b'b']) == [b'a', b'b']\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
        cache = AnswerCache(CacheSettings(str(tmp_path), 10**6))

        assert cache.claim([b"a"]) == [b"a"]
        assert cache.claim([b"a", b"b"]) == [b"b"], "this process still asks the first"
        cache.release([b"a"])
        assert cache.claim([b"a"]) == [b"a"]
        cache.close()

    def test_a_failure_leaves_no_claim(self, tmp_path: Path) -> None:
        def fail(places: list[int]) -> list[Text]:
            raise ConnectionError("lost")

        with pytest.raises(ConnectionError):
            self.kept(tmp_path).texts(["a"], {}, fail)

        errors: list[Text] = [ValueError("only this prompt")]
        assert self.kept(tmp_path).texts(["a"], {}, lambda places: errors) == errors
        assert self.kept(tmp_path).texts(["a"], {}, lambda places: ["asked again"]) == ["asked again"]
