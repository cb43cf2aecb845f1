"""The cache of answers: what is in it is never asked again, what has changed is never returned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import HttpModelHandler, RunInference
from luminosity.errors import CacheError, IncompleteAnswer, InvalidArgument, RemoteModelError
from luminosity.inference import answer_cache
from luminosity.inference.answer_cache import AnswerCache, CacheSettings, open_cache
from tests.both_runners import Pipelines, counters
from tests.inference.handlers.model_server import Said, Seen, chat, embeddings, serving, vector_of

WORDS = [f"word {number}" for number in range(40)]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Let each test open files anew, as another run does."""
    yield
    _forget()


def _forget() -> None:
    for cache in answer_cache._open.values():
        cache.close()
    answer_cache._open.clear()


def ask(handler: HttpModelHandler, *examples: Any, **inference_args: Any) -> list[Any]:
    return [each.inference for each in handler.run_inference(examples, handler.load_model(), inference_args)]


def numbered(number: int) -> bytes:
    return number.to_bytes(32, "big")


class TestFile:
    def test_answers_survive_kill(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_put_and_hang, args=(tmp_path, writer))
        process.start()
        assert reader.recv() == 300
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(30)

        cache = AnswerCache(CacheSettings(str(tmp_path), 10**9))
        assert cache.get([numbered(each) for each in range(301)]) == {numbered(each): b"answer" for each in range(300)}

    def test_the_least_recently_used_answers_make_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("luminosity.inference.answer_cache.time.time", lambda: now[0])
        cache = AnswerCache(CacheSettings(str(tmp_path), 100_000))
        for number in range(90):
            now[0] += 7200
            cache.put({numbered(number): 850 * b"x"})
            assert cache.get([numbered(0)]), "used again and again"
        now[0] += 7200
        cache.put({numbered(90 + number): 850 * b"x" for number in range(40)})

        known = cache.get([numbered(number) for number in range(130)])
        assert numbered(0) in known
        assert numbered(1) not in known
        assert numbered(129) in known
        assert 60 < len(known) < 100
        size = sum(file.stat().st_size for file in tmp_path.glob("answers.sqlite"))
        assert size < 200_000

    def test_an_answer_that_has_changed_on_the_disk_is_not_returned(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = CacheSettings(str(tmp_path), 10**9)
        cache = AnswerCache(settings)
        cache.put({numbered(1): b"a right answer", numbered(2): b"another answer"})
        cache.close()
        with sqlite3.connect(tmp_path / "answers.sqlite") as database:
            database.execute("UPDATE answers SET answer = ? WHERE key = ?", [b"a wrong answer", numbered(1)])
        database.close()

        cache = AnswerCache(settings)
        assert cache.get([numbered(1), numbered(2)]) == {numbered(2): b"another answer"}
        assert "1 answers in" in caplog.text
        cache.put({numbered(1): b"a right answer"})
        assert cache.get([numbered(1)]) == {numbered(1): b"a right answer"}

    @pytest.mark.parametrize(
        "content", [b"no database at all, but long enough to be one" * 100, b"SQLite format 3\0" * 400]
    )
    def test_a_damaged_file_is_an_error_that_says_so(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "answers.sqlite").write_bytes(content)
        with pytest.raises(CacheError, match=r"answers.sqlite .*; move the file away|answers.sqlite can't be used"):
            AnswerCache(CacheSettings(str(tmp_path), 10**9))

    def test_a_folder_that_is_removed_is_made_again(self, tmp_path: Path) -> None:
        folder = tmp_path / "answers"
        with serving(chat) as server:
            handler = HttpModelHandler.chat(server.url, "talker", cache=folder)
            model = handler.load_model()
            for _ in range(2):
                list(handler.run_inference(["hello"], model))
                shutil.rmtree(folder)
            list(handler.run_inference(["hello"], model))
            _forget()
            assert ask(handler, "hello") == ["HELLO at None"]

        assert len(server.posts) == 3

    def test_a_folder_that_can_not_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CacheError, match="can't be used"):
            AnswerCache(CacheSettings(str(tmp_path / "file" / "folder"), 10**9))


def _put_and_hang(folder: Path, writer: Any) -> None:
    cache = AnswerCache(CacheSettings(str(folder), 10**9))
    for number in range(300):
        cache.put({numbered(number): b"answer"})
    writer.send(300)
    signal.pause()


class TestChat:
    def test_a_second_run_sends_nothing(self, pipelines: Pipelines, tmp_path: Path) -> None:
        with serving(chat) as server:
            for _ in range(2):
                handler = HttpModelHandler.chat(server.url, "talker", cache=tmp_path)
                with pipelines() as (pipeline, ran):
                    answers = pipeline | beam.Create(WORDS) | RunInference(handler)
                    expected = [f"{word.upper()} at None" for word in WORDS]
                    assert_that(answers | beam.Map(lambda each: each.inference), equal_to(expected))
                _forget()

            assert len(server.posts) == len(WORDS)
        found = counters(ran.result)
        assert (found["cached_answers"], found.get("server_requests", 0)) == (len(WORDS), 0)

    def test_all_that_an_answer_depends_on_is_the_question(self, tmp_path: Path) -> None:
        with serving(chat) as server, serving(chat) as other:
            ask(HttpModelHandler.chat(server.url, "talker", cache=tmp_path), "hello")
            for handler in (
                HttpModelHandler.chat(server.url, "walker", cache=tmp_path),
                HttpModelHandler.chat(server.url, "talker", cache=tmp_path, parameters={"max_tokens": 5}),
                HttpModelHandler.chat(server.url, "talker", cache=tmp_path, headers={"X-Team": "one"}),
                HttpModelHandler.chat(other.url, "talker", cache=tmp_path),
            ):
                ask(handler, "hello")
            ask(HttpModelHandler.chat(server.url, "talker", cache=tmp_path), "hello", seed=7)
            ask(HttpModelHandler.chat(server.url, "talker", cache=tmp_path), "hello")

        assert (len(server.posts), len(other.posts)) == (5, 1)

    def test_an_answer_that_was_cut_is_not_paid_for_again(self, tmp_path: Path) -> None:
        def script(_: Seen) -> Said:
            return Said({"choices": [{"message": {"content": "Once"}, "finish_reason": "length"}]})

        with serving(script) as server:
            handler = HttpModelHandler.chat(server.url, "talker", cache=tmp_path)
            for _ in range(2):
                with pytest.raises(IncompleteAnswer, match="a text that it cut"):
                    ask(handler, "hello")
            lenient = HttpModelHandler.chat(server.url, "talker", cache=tmp_path, allow_incomplete=True)
            assert ask(lenient, "hello") == ["Once"]

        assert len(server.posts) == 1

    def test_equal_questions_at_the_same_time_are_asked_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[None] = []
        get = AnswerCache.get

        def counted(cache: AnswerCache, keys: Sequence[bytes]) -> dict[bytes, bytes]:
            found = get(cache, keys)
            looks.append(None)
            return found

        def script(seen: Seen) -> Said:
            while len(looks) < 8:  # none knows of the answer
                time.sleep(0.001)
            return chat(seen)

        monkeypatch.setattr(AnswerCache, "get", counted)
        with serving(script) as server, ThreadPoolExecutor(8) as pool:
            handler = HttpModelHandler.chat(server.url, "talker", cache=tmp_path)
            waiting = [pool.submit(ask, handler, "hello") for _ in range(8)]
            assert [each.result(60) for each in waiting] == [["HELLO at None"]] * 8

        assert len(server.posts) == 1

    def test_the_next_is_asked_if_the_first_fails(self, tmp_path: Path) -> None:
        cache = AnswerCache(CacheSettings(str(tmp_path), 10**9))
        with contextlib.suppress(RuntimeError), cache.asking(b"key", 0.0):
            with cache.asking(b"key", 0.0), cache.asking(b"other", 0.0):
                assert cache._keys == {b"key", b"other"}, "nobody waits for longer than allowed"
            assert cache._keys == {b"key"}, "the first still holds it"
            raise RuntimeError
        assert not cache._keys

    @pytest.mark.parametrize("is_kept_already", [False, True])
    def test_a_text_that_the_server_broke_off_is_asked_again(self, tmp_path: Path, is_kept_already: bool) -> None:
        choices = [{"message": {"content": "HEL"}, "finish_reason": "abort"}]
        with serving(lambda seen: chat(seen) if seen.number else Said({"choices": choices})) as server:
            handler = HttpModelHandler.chat(server.url, "talker", cache=tmp_path, allow_incomplete=True)
            model = handler.load_model()
            assert [each.inference for each in handler.run_inference(["hello"], model)] == ["HEL"]
            if is_kept_already:
                assert model._cache_settings is not None
                prepared, arguments = model._protocol.prepare(["hello"]), dict[str, Any]()
                key = model._digest(model._request(prepared, arguments))
                open_cache(model._cache_settings).put({key: Said({"choices": choices}).bytes})
            for _ in range(2):
                assert ask(handler, "hello") == ["HELLO at None"]

        assert len(server.posts) == 2

    @pytest.mark.parametrize("first", [Said(b"<html>"), Said({"choices": []}), Said(b"", 500), Said({"error": "busy"})])
    def test_what_is_no_answer_is_not_kept(self, tmp_path: Path, first: Said) -> None:
        with serving(lambda seen: chat(seen) if seen.number else first) as server:
            handler = HttpModelHandler.chat(server.url, "talker", cache=tmp_path)
            with pytest.raises(RuntimeError):
                ask(handler, "hello")
            assert ask(handler, "hello") == ["HELLO at None"]

    def test_sampled_answers_need_a_seed(self, tmp_path: Path) -> None:
        sampled = {"temperature": 0.7}
        with pytest.raises(InvalidArgument, match=r"cache= with temperature=0.7 and no seed"):
            HttpModelHandler.chat("http://localhost", "talker", cache=tmp_path, parameters=sampled)
        handler = HttpModelHandler.chat("http://localhost", "talker", cache=tmp_path)
        with pytest.raises(InvalidArgument, match=r"cache= with temperature=0.7 and no seed"):
            handler.validate_inference_args(sampled)
        handler.validate_inference_args({**sampled, "seed": 7})

    def test_answers_of_the_cache_cost_nothing(self, tmp_path: Path) -> None:
        with serving(chat) as server:
            ask(HttpModelHandler.chat(server.url, "talker", cache=tmp_path), "hello")
            limited = HttpModelHandler.chat(
                server.url, "talker", cache=tmp_path, parameters={}, requests_per_minute=1, max_total_tokens=1
            )
            model = limited.load_model()
            for _ in range(3):
                assert [each.inference for each in limited.run_inference(["hello"], model)] == ["HELLO at None"]


class TestOthers:
    def test_of_embeddings_each_text_is_kept(self, tmp_path: Path) -> None:
        with serving(embeddings) as server:
            handler = HttpModelHandler.embeddings(server.url, "small", cache=tmp_path)
            ask(handler, *WORDS[:10])
            vectors = ask(handler, *WORDS[5:15], WORDS[0])
            assert [each.tolist() for each in vectors] == [vector_of(word) for word in [*WORDS[5:15], WORDS[0]]]
            assert vectors[0].dtype == np.float32
            assert server.posts[1].json["input"] == WORDS[10:15]
            ask(handler, *WORDS[:15])

        assert len(server.posts) == 2

    def test_a_model_that_has_changed_under_its_name_is_an_error(self, tmp_path: Path) -> None:
        def longer(seen: Seen) -> Said:
            data = [{"index": index, "embedding": [1.0, 2.0, 3.0, 4.0]} for index in range(len(seen.json["input"]))]
            return Said({"data": data})

        with serving(lambda seen: longer(seen) if seen.number else embeddings(seen)) as server:
            handler = HttpModelHandler.embeddings(server.url, "small", cache=tmp_path)
            ask(handler, "one")
            with pytest.raises(RemoteModelError, match=r"vectors of the lengths \[3, 4\] for 'small'.*another cache"):
                ask(handler, "one", "two")

    def test_a_protocol_that_does_not_say_how_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="found cache= for KServe"):
            HttpModelHandler.kserve("http://localhost", "resnet", cache=tmp_path)

    @pytest.mark.parametrize(
        ("folder", "limit"),
        [
            ("s3://bucket/answers", "1GB"),
            ("answers", "plenty"),
            ("", "1GB"),
            ("answers", None),
            ("answers", True),
            ("answers", 0),
            ("answers", 1e9),
        ],
    )
    def test_mistakes(self, folder: str, limit: Any) -> None:
        with pytest.raises(InvalidArgument):
            HttpModelHandler.chat("http://localhost", "talker", cache=folder, cache_limit=limit)


def test_the_server_is_not_needed_for_what_is_known(tmp_path: Path) -> None:
    with serving(chat) as server:
        handler = HttpModelHandler.chat(server.url, "talker", cache=tmp_path)
        assert ask(handler, "hello") == ["HELLO at None"]
    assert ask(handler, "hello") == ["HELLO at None"], "the server is gone"
