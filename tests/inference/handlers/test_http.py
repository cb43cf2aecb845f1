"""HttpModelHandler, over real connections to a server in this process."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.ml.inference.base import RunInference as BeamRunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from luminosity import HttpModelHandler, RunInference
from luminosity.cli.main import main
from luminosity.errors import EndpointError, IncompleteAnswer, RemoteModelError, may_pass
from luminosity.inference.handlers.http import HttpProtocol, Predictions, Request, Response
from luminosity.inference.handlers.http.gate import AdaptiveLimit, Gate
from luminosity.inference.handlers.http.retries import CircuitBreaker
from luminosity.testing import FakeClock
from tests.both_runners import Pipelines, counters
from tests.inference.handlers.model_server import (
    ModelServer,
    Said,
    Seen,
    chat,
    embeddings,
    kserve,
    self_signed,
    serving,
    vector_of,
)
from tests.runners import IS_REFERENCE

SECRET = "sk-never-to-be-seen-0123456789"
VARIABLE = "LUMINOSITY_TEST_KEY"
WORDS = [f"{'a' * (number % 7)}{number}" for number in range(200)]


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten waits, in this process only; no test depends on how long a wait is."""
    monkeypatch.setattr("luminosity.inference.handlers.http.retries._FIRST_S", 0.01)


@pytest.fixture
def embedding_server() -> Iterator[ModelServer]:
    with serving(embeddings) as server:
        yield server


@pytest.fixture
def url_of_nobody() -> Iterator[str]:
    """Return a URL whose port is bound but not listening, so that no other process can use it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


class Times:
    """Replaces the module ``time`` for retries: its clock can be advanced."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    made = Times()
    monkeypatch.setattr("luminosity.inference.handlers.http.remote_model.time", made)
    return made


def ask(handler: HttpModelHandler, *examples: Any) -> list[Any]:
    return [result.inference for result in handler.run_inference(examples, handler.load_model())]


def _answer(content: Any = "Once upon", finish_reason: str | None = "stop", **message: Any) -> Said:
    """Return an answer like those of chat servers."""
    choice = {"message": {"content": content, **message}, "finish_reason": finish_reason or None}
    return Said({"choices": [choice], "model": "talker"})


def failing_at_first(answers: list[Said]) -> Any:
    """Return a script that sends these responses first, and embeddings afterwards."""
    left = list(answers)
    return lambda seen: left.pop(0) if left else embeddings(seen)


class TestProtocols:
    @pytest.mark.parametrize("base64_too", [True, False], ids=["base64", "digits"])
    def test_embeddings_are_in_the_order_of_their_texts(self, base64_too: bool) -> None:
        with serving(lambda seen: embeddings(seen, base64_too)) as server:
            handler = HttpModelHandler.embeddings(server.url, "small", parameters={"dimensions": 3})
            results = list(handler.run_inference(["banana", "b"], handler.load_model()))

        assert [result.inference.tolist() for result in results] == [vector_of("banana"), vector_of("b")]
        assert results[0].inference.dtype == np.float32
        assert results[0].model_id == "small-2026"
        assert server.seen[0].path == "/v1/embeddings"
        assert server.seen[0].json["dimensions"] == 3

    def test_chat_takes_messages_and_lists_of_them(self) -> None:
        with serving(chat) as server:
            handler = HttpModelHandler.chat(f"{server.url}/v1/", "talker", parameters={"temperature": 0})
            messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "bye"}]
            results = list(handler.run_inference(["hello", messages], handler.load_model(), {"seed": 7}))

        assert [result.inference for result in results] == ["HELLO at 0", "BYE at 0"]
        assert {seen.path for seen in server.seen} == {"/v1/chat/completions"}
        assert {seen.json["seed"] for seen in server.seen} == {7}

    @pytest.mark.parametrize("binary", [True, False], ids=["bytes", "json"])
    def test_kserve_stacks_inputs_and_splits_outputs(self, binary: bool) -> None:
        examples = [{"x": np.array([1.0, 2, 3]), "scale": 2}, {"x": np.array([0.5, 0, 0]), "scale": 4}]
        with serving(lambda seen: kserve(seen, binary)) as server:
            both = HttpModelHandler.kserve(server.url, "sums")
            results = list(both.run_inference(examples, both.load_model()))
            totals = ask(HttpModelHandler.kserve(server.url, "sums", outputs=["total"]), *examples)
            texts = ask(HttpModelHandler.kserve(server.url, "shout"), "ab", "äß")

        assert [float(result.inference["total"]) for result in results] == [12.0, 2.0]
        assert results[1].inference["halves"].tolist() == [0.25, 0.0, 0.0]
        assert results[0].model_id == "sums/versions/3"
        assert [float(total) for total in totals] == [12.0, 2.0]
        assert texts == ["AB", "ÄSS"]
        assert ("Inference-Header-Content-Length" in server.posts[0].headers) == binary

    def test_kserve_says_what_the_model_takes(self) -> None:
        with serving(kserve) as server:
            handler = HttpModelHandler.kserve(server.url, "sums")
            with pytest.raises(ValueError, match=r"expected a dict: .* \['scale', 'x'\]"):
                ask(handler, np.zeros(3))
            with pytest.raises(ValueError, match=r"input 'scale': found numbers of type float64, expected INT32"):
                ask(handler, {"x": np.zeros(3), "scale": 0.5})
            with pytest.raises(ValueError, match=r"shapes \[\(2,\), \(3,\)\]"):
                ask(handler, {"x": np.zeros(3), "scale": 1}, {"x": np.zeros(2), "scale": 1})
            with pytest.raises(EndpointError, match="unknown model: 'summs'"):
                HttpModelHandler.kserve(server.url, "summs").load_model()

    def test_a_kserve_server_that_tells_nothing_of_itself(self) -> None:
        with serving(lambda seen: Said(b"", 404) if seen.path == "/v2" else kserve(seen, binary=False)) as server:
            assert ask(HttpModelHandler.kserve(server.url, "shout"), "ab") == ["AB"]

    def test_a_protocol_of_ones_own(self) -> None:
        with serving(lambda seen: Said([len(text) for text in seen.json])) as server:
            assert ask(HttpModelHandler(server.url, Lengths("any")), "a", "bcd") == [1, 3]

    def test_one_connection_serves_many_requests(self, embedding_server: ModelServer) -> None:
        handler = HttpModelHandler.embeddings(embedding_server.url, "small")
        model = handler.load_model()
        for _ in range(10):
            list(handler.run_inference(["a"], model))

        assert embedding_server.connections == 1


class Lengths(HttpProtocol):
    def request(self, prepared: Any, arguments: dict[str, Any], facts: Any) -> Request:
        return Request("/lengths", json.dumps(prepared).encode())

    def read(self, response: Response, count: int, facts: Any) -> Predictions:
        return Predictions(json.loads(response.body))


class TestInPipelines:
    def test_every_text_gets_its_vector(self, pipelines: Pipelines, embedding_server: ModelServer) -> None:
        handler = HttpModelHandler.embeddings(embedding_server.url, "small")

        def check(results: list[PredictionResult]) -> None:
            assert sorted(result.example for result in results) == sorted(WORDS)
            assert all(result.inference.tolist() == vector_of(result.example) for result in results)
            assert {result.model_id for result in results} == {"small-2026"}

        with pipelines() as (pipeline, _):
            assert_that(pipeline | beam.Create(WORDS) | RunInference(handler), check)

        assert all(len(seen.json["input"]) <= 64 for seen in embedding_server.seen)

    def test_keys_and_chats(self, pipelines: Pipelines) -> None:
        with serving(chat) as server, pipelines() as (pipeline, _):
            handler = KeyedModelHandler(HttpModelHandler.chat(server.url, "talker"))
            answers = pipeline | beam.Create(list(enumerate(WORDS[:20]))) | RunInference(handler)
            assert_that(answers, _check_keyed)

    def test_beams_own_run_inference(self, embedding_server: ModelServer) -> None:
        handler = HttpModelHandler.embeddings(embedding_server.url, "small")
        with serving(chat) as chatting, beam.Pipeline("FnApiRunner") as pipeline:
            words = pipeline | beam.Create(WORDS[:40])
            vectors = words | "Embed" >> BeamRunInference(handler)
            assert_that(vectors, _check_vectors, label="vectors")
            answers = words | "Chat" >> BeamRunInference(HttpModelHandler.chat(chatting.url, "talker"))
            assert_that(answers, _check_answers, label="answers")

    def test_the_one_bad_example_is_a_dead_letter(self, pipelines: Pipelines) -> None:
        def script(seen: Seen) -> Said:
            if "bad" in seen.json["input"]:
                return Said({"error": {"message": "input is too long"}}, status=400)
            return embeddings(seen)

        with serving(script) as server, pipelines() as (pipeline, _):
            examples = pipeline | beam.Create([*WORDS, "bad"])
            handler = HttpModelHandler.embeddings(server.url, "small")
            good, failed = examples | RunInference(handler).with_exception_handling()
            assert_that(good, _check_vectors, label="good")
            assert_that(failed.failed_inferences, _check_bad, label="bad")

    def test_a_cut_answer_is_a_dead_letter(self, pipelines: Pipelines) -> None:
        def script(seen: Seen) -> Said:
            text = seen.json["messages"][0]["content"]
            return _answer(text.upper(), "length" if text == "long" else "stop")

        with serving(script) as server, pipelines() as (pipeline, _):
            examples = pipeline | beam.Create(["short", "long", "brief"])
            handler = HttpModelHandler.chat(server.url, "talker")
            good, failed = examples | RunInference(handler).with_exception_handling()
            assert_that(good | beam.Map(lambda result: result.inference), equal_to(["SHORT", "BRIEF"]), label="good")
            assert_that(failed.failed_inferences, _check_cut, label="cut")

    @pytest.mark.skipif(IS_REFERENCE, reason="only our runner shows models")
    def test_retries_are_counted_and_shown(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        refusals = [Said(status=429), Said(status=503, headers={"Retry-After": "0"}), Said(status=503)]
        with serving(failing_at_first(refusals)) as server:
            handler = HttpModelHandler.embeddings(server.url, "small", concurrency=1)
            pipeline = beam.Pipeline(
                "luminosity.LuminosityRunner", PipelineOptions(["--debug", f"--run_dir={tmp_path}"])
            )
            _ = pipeline | beam.Create(WORDS[:10]) | "Embed" >> RunInference(handler)
            result: Any = pipeline.run()
            result.wait_until_finish()

        found = counters(result)
        assert found["server_requests"] == len(server.seen)
        assert (found["server_retries"], found["server_throttled"]) == (3, 2)
        assert found["server_wait_micro_secs"] > 0
        assert main(["show", "last", f"--run_dir={tmp_path}"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"3 of {len(server.seen)} requests sent again (2 times the server asked to send less)" in shown
        assert "requests in flight" in shown
        assert "device" not in shown

    def test_tokens_are_counted_also_of_answers_that_are_refused(self, pipelines: Pipelines) -> None:
        def script(seen: Seen) -> Said:
            said = _answer("text", "length" if seen.json["messages"][0]["content"] == "long" else "stop")
            said.body["usage"] = {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            return said

        with serving(script) as server:
            with pipelines() as (pipeline, ran):
                examples = pipeline | beam.Create(["short", "long", "brief"])
                handler = HttpModelHandler.chat(server.url, "talker")
                _ = examples | RunInference(handler).with_exception_handling()
            found = counters(ran.result)

        assert (found["prompt_tokens"], found["new_tokens"], found["cached_prompt_tokens"]) == (30, 9, 12)

    @pytest.mark.parametrize("usage", [None, {}, "many", {"prompt_tokens": "ten"}, {"prompt_tokens": -1}])
    def test_usage_that_says_nothing(self, usage: Any) -> None:
        said = _answer("text")
        said.body["usage"] = usage
        with serving(lambda _: said) as server:
            assert ask(HttpModelHandler.chat(server.url, "talker"), "hello") == ["text"]

    def test_a_wrong_key_is_not_tried_per_example(self, pipelines: Pipelines) -> None:
        with serving(lambda seen: Said({"error": "who are you?"}, status=401)) as server, pipelines() as (pipeline, _):
            handler = HttpModelHandler.embeddings(server.url, "small")
            good, failed = pipeline | beam.Create(WORDS) | RunInference(handler).with_exception_handling()
            assert_that(good, lambda results: _equal(results, []), label="good")
            assert_that(failed.failed_inferences, _check_all_refused, label="bad")

        processes = 2 * (os.cpu_count() or 1)
        assert len(server.seen) <= 4 * processes  # as many as were in flight at once


def _equal(found: Any, expected: Any) -> None:
    assert found == expected


def _check_keyed(results: list[Any]) -> None:
    assert sorted(key for key, _ in results) == list(range(20))
    assert all(result.inference == f"{WORDS[key].upper()} at None" for key, result in results)


def _check_vectors(results: list[PredictionResult]) -> None:
    assert results
    assert all(result.inference.tolist() == vector_of(result.example) for result in results)


def _check_answers(results: list[PredictionResult]) -> None:
    assert {result.inference for result in results} == {f"{word.upper()} at None" for word in WORDS[:40]}


def _check_bad(letters: list[Any]) -> None:
    ((examples, (_, message, _)),) = letters
    assert examples == ["bad"]
    assert "answered 400: input is too long" in message


def _check_cut(letters: list[Any]) -> None:
    ((examples, (_, message, _)),) = letters
    assert examples == ["long"]
    assert "a text that it cut at its limit of tokens (finish_reason 'length'): 'LONG'; raise max_tokens" in message


def _check_all_refused(letters: list[Any]) -> None:
    assert sorted(letter[0][0] for letter in letters) == sorted(WORDS)
    assert all("answered 401: who are you?" in letter[1][1] for letter in letters)


class TestTrouble:
    def test_429_is_tried_again_when_the_server_says(self, times: Times) -> None:
        busy = [Said({"error": "slowly"}, 429, {"Retry-After": "7"}), Said(b"", 429)]
        with serving(failing_at_first(busy)) as server:
            found = ask(HttpModelHandler.embeddings(server.url, "small"), "a")

        assert found[0].tolist() == vector_of("a")
        assert len(server.seen) == 3
        assert times.slept[0] >= 7 > times.slept[1]

    def test_a_wait_beyond_the_deadline_is_not_begun(self) -> None:
        with serving(lambda _: Said({"error": "slowly"}, 429, {"Retry-After": "3600"})) as server:
            handler = HttpModelHandler.embeddings(server.url, "small", deadline=600)
            expected = r"429: slowly. Tried once within deadline=600 seconds. It asked to wait for 3.6e\+03"
            with pytest.raises(EndpointError, match=expected):
                ask(handler, "a")

        assert len(server.seen) == 1

    def test_bursts_of_503_pass(self) -> None:
        with serving(failing_at_first([Said(b"", status) for status in (503, 502, 504, 503, 408)])) as server:
            assert ask(HttpModelHandler.embeddings(server.url, "small"), "a")[0].tolist() == vector_of("a")

        assert len(server.seen) == 6

    def test_a_server_that_hangs_meets_the_deadline(self, times: Times) -> None:
        """The deadline ends when the server has seen the second attempt, however long that takes."""
        with serving(embeddings) as server:

            def script(seen: Seen) -> Said:
                times.ahead = 600.0 if seen.number else 0.0
                return Said({"waited": server.stopped.wait(30)}, 503)

            server.script = script
            handler = HttpModelHandler.embeddings(server.url, "small", timeout=0.1, deadline=600)
            with pytest.raises(RemoteModelError, match=r"did not answer within .* seconds. Tried .* times"):
                ask(handler, "a")
            server.stopped.set()

        assert len(server.seen) > 1

    def test_a_server_that_drips_meets_the_deadline(self) -> None:
        with serving(lambda _: Said(b" " * 1000, drip_s=0.02)) as server:
            handler = HttpModelHandler.embeddings(server.url, "small", timeout=0.1, deadline=0.2)
            with pytest.raises(RemoteModelError, match="did not answer within"):
                ask(handler, "a")
            server.stopped.set()

    def test_nobody_listens(self, url_of_nobody: str) -> None:
        with pytest.raises(EndpointError, match=r"can't be reached: .*refused"):
            ask(HttpModelHandler.embeddings(url_of_nobody, "small", deadline=0.1), "a")

    def test_a_server_that_is_down_is_asked_now_and_then(self, url_of_nobody: str) -> None:
        handler = HttpModelHandler.embeddings(url_of_nobody, "small", deadline=0.1)
        model = handler.load_model()
        for _ in range(3):
            with pytest.raises(EndpointError, match="can't be reached"):
                list(handler.run_inference(["a"], model))

    def test_one_example_that_hangs_the_server_does_not_take_others_along(self) -> None:
        clock = FakeClock()
        breaker = CircuitBreaker(clock.monotonic)
        for _ in range(2):
            halves = [breaker.gave_up("hangs", True, 0.0) for _ in range(7)]  # a batch of 64, and its halves
            assert {type(error) for error in halves} == {RemoteModelError}
            breaker.check()
            breaker.succeeded()

        errors = [breaker.gave_up("hangs", True, 0.0) for _ in range(8)]
        assert type(errors[-1]) is EndpointError
        with pytest.raises(EndpointError, match="hangs"):
            breaker.check()
        clock.advance(60)
        breaker.check()

    def test_one_request_that_starves_while_others_are_answered(self) -> None:
        clock = FakeClock(100.0)
        breaker = CircuitBreaker(clock.monotonic)
        clock.advance(1)
        breaker.succeeded()
        assert type(breaker.gave_up("429", by_examples=False, began=100.0)) is RemoteModelError
        assert type(breaker.gave_up("429", by_examples=False, began=102.0)) is EndpointError

    def test_a_server_that_forbids_one_text_answers_the_others(self) -> None:
        def script(seen: Seen) -> Said:
            return Said(b"", 403) if seen.json["input"] == ["drop table"] else embeddings(seen)

        with serving(script) as server:
            handler = HttpModelHandler.embeddings(server.url, "small")
            model = handler.load_model()
            list(handler.run_inference(["a"], model))
            with pytest.raises(RemoteModelError, match="answered 403") as caught:
                list(handler.run_inference(["drop table"], model))
            list(handler.run_inference(["b"], model))

        assert not isinstance(caught.value, EndpointError)

    def test_400_is_the_examples_fault_and_not_tried_again(self) -> None:
        script = failing_at_first([Said({"error": {"message": "x" * 5000}}, 400)])
        with serving(script) as server, pytest.raises(RemoteModelError, match="answered 400: xxx") as caught:
            ask(HttpModelHandler.embeddings(server.url, "small"), "a")

        assert not isinstance(caught.value, EndpointError)
        assert len(str(caught.value)) < 500
        assert len(server.seen) == 1
        assert type(pickle.loads(pickle.dumps(caught.value))) is RemoteModelError

    @pytest.mark.parametrize("status", [301, 401, 403, 404])
    def test_the_endpoints_fault_fails_once(self, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("luminosity.inference.handlers.http.retries._OPEN_S", 600)  # longer than any machine stalls
        with serving(lambda _: Said(b"no", status, {"Location": "http://127.0.0.1:1/"})) as server:
            handler = HttpModelHandler.embeddings(server.url, "small")
            model = handler.load_model()
            for _ in range(5):
                with pytest.raises(EndpointError, match=f"answered {status}"):
                    list(handler.run_inference(["a"], model))

        assert len(server.seen) == 1

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (b"<html><body>Welcome!</body></html>", r"answered the text '<html><body>Welcome!.*expected a JSON object"),
            ({"object": "list"}, r"an object with \['object'\], expected a list `data`"),
            ({"data": [{"embedding": [1.0]}]}, "1 vectors for 2 texts, expected one for each"),
            ({"data": [{"embedding": [1.0], "index": 0}] * 2}, r"the indices \[0, 0\], expected 0 to 1"),
            ({"data": [{"embedding": [1.0]}, {"embedding": [1.0, 2.0]}]}, r"the lengths \[1, 2\]"),
            ({"data": [{"embedding": [1.0]}, {"embedding": [float("nan")]}]}, "NaN or infinite"),
            ({"data": [{"embedding": [1.0]}, {"embedding": "?"}]}, "an `embedding` that can't be read"),
        ],
        ids=["page", "no data", "too few", "indices", "lengths", "nan", "no numbers"],
    )
    def test_a_wrong_schema_says_what_was_found(self, body: Any, expected: str) -> None:
        with serving(lambda _: Said(body)) as server, pytest.raises(RemoteModelError, match=expected):
            ask(HttpModelHandler.embeddings(server.url, "small"), "a", "b")

    def test_answers_are_bounded(self, embedding_server: ModelServer) -> None:
        handler = HttpModelHandler.embeddings(embedding_server.url, "small", max_response_bytes=1000)
        with pytest.raises(RemoteModelError, match="more than 1,000 bytes"):
            ask(handler, *WORDS[:50])

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (
                {"finish_reason": "length"},
                r"cut at max_tokens=16 \(finish_reason 'length'\): 'Once upon'; raise max_tok",
            ),
            ({"finish_reason": "MAX_TOKENS"}, r"cut at max_tokens=16 .*: 'Once upon'"),
            ({"finish_reason": "content_filter"}, r"its filter cut or removed .*: 'Once upon'; change the prompt"),
            (
                {"finish_reason": "surprise"},
                r"finish_reason 'surprise', which is none of \['complete'.*allow_incomplete",
            ),
            ({"content": None, "refusal": "I can't"}, r"a refusal \(I can't\), without text; change the prompt"),
            ({"content": None, "tool_calls": [{}], "finish_reason": "tool_calls"}, r"a call of a tool .*remove tools"),
            ({"content": None, "finish_reason": "length"}, r"cut at max_tokens=16 .*, without text"),
            ({"content": " \n"}, r"an empty message \(finish_reason 'stop'\)"),
        ],
        ids=lambda said: "-".join(map(str, said.values())) if isinstance(said, dict) else "",
    )
    def test_an_incomplete_answer_is_an_error_of_its_example(self, said: dict[str, Any], why: str) -> None:
        with serving(lambda _: _answer(**said)) as server, pytest.raises(IncompleteAnswer, match=why) as caught:
            ask(HttpModelHandler.chat(server.url, "talker", parameters={"max_tokens": 16}), "hello")

        assert len(server.seen) == 1, "the same request gets the same answer"
        assert not may_pass(caught.value)

    @pytest.mark.parametrize(
        ("text", "kind", "why"),
        [
            ('{"name": "Ki', "json_object", "Unterminated string.*line 1 column 10"),
            ('```json\n{"name": "Kim"}\n```', "json_schema", "Expecting value, line 1 column 1"),
            ('{"score": NaN}', "json_schema", "NaN is not JSON"),
            ('["Kim"]', "json_object", "a list, expected an object"),
        ],
    )
    def test_a_text_that_is_not_the_json_asked_for_is_an_error(self, text: str, kind: str, why: str) -> None:
        """Also if RunInference's arguments ask for it."""
        with serving(lambda _: _answer(text)) as server:
            handler = HttpModelHandler.chat(server.url, "talker")
            with pytest.raises(IncompleteAnswer, match=rf"not the JSON that response_format asks for \({why}"):
                handler.run_inference(["hello"], handler.load_model(), {"response_format": {"type": kind}})
            assert ask(handler, "hello") == [text]
            assert ask(
                HttpModelHandler.chat(server.url, "talker", parameters={"response_format": {"type": "text"}}), ""
            )

    def test_complete_answers_and_those_that_you_allow(self) -> None:
        wanted = {"response_format": {"type": "json_object"}, "max_tokens": 16}
        with serving(lambda seen: _answer(*seen.json["messages"][0]["content"].split("|"))) as server:
            strict = HttpModelHandler.chat(server.url, "talker", parameters=wanted)
            kept = HttpModelHandler.chat(server.url, "talker", parameters=wanted, allow_incomplete=True)
            assert ask(strict, '{"a": 1}|stop', "{}|eos_token", "{}|") == ['{"a": 1}', "{}", "{}"]
            assert ask(kept, '{"a|length', "half|content_filter", "|stop") == ['{"a', "half", ""]

    @pytest.mark.parametrize(
        ("body", "why", "passes"),
        [
            ({"error": {"message": "the GPU is gone"}}, "the error .*the GPU is gone.*, expected an answer", True),
            ({"choices": []}, r"an object with \['choices'\], expected `choices` with a `message`", False),
            ({"choices": [{"text": "of a legacy completion"}]}, "expected `choices` with a `message`", False),
            ({"choices": [{"message": {"content": "a"}}] * 2}, "2 choices, expected one", False),
            ({"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]}, "it broke off .*'abort'", True),
        ],
        ids=["error", "no choice", "legacy", "two", "abort"],
    )
    def test_chats_with_other_numbers_of_choices(self, body: Any, why: str, passes: bool) -> None:
        with serving(lambda _: Said(body)) as server, pytest.raises(RemoteModelError, match=why) as caught:
            ask(HttpModelHandler.chat(server.url, "talker"), "hello")

        assert may_pass(caught.value) is passes

    def test_tls_of_a_stranger_is_refused_once(self, tmp_path: Path) -> None:
        certificate = self_signed(tmp_path)
        with serving(embeddings, certificate) as server:
            with pytest.raises(EndpointError, match=r"TLS was refused: .*self-signed certificate.*ca_file"):
                ask(HttpModelHandler.embeddings(server.url, "small"), "a")
            assert server.connections == 1
            trusting = HttpModelHandler.embeddings(server.url, "small", ca_file=str(tmp_path / "certificate.pem"))
            assert ask(trusting, "a")[0].tolist() == vector_of("a")

    def test_a_server_without_tls(self, embedding_server: ModelServer) -> None:
        url = embedding_server.url.replace("http:", "https:")
        with pytest.raises(EndpointError, match=r"TLS was refused: .*begins with http://"):
            ask(HttpModelHandler.embeddings(url, "small"), "a")


class TestSecrets:
    def test_the_key_reaches_the_server_and_nobody_else(
        self,
        pipelines: Pipelines,
        embedding_server: ModelServer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv(VARIABLE, f"{SECRET}\n")
        handler = HttpModelHandler.embeddings(embedding_server.url, "small", api_key_env=VARIABLE)
        model = handler.load_model()
        with caplog.at_level(logging.DEBUG), pipelines() as (pipeline, _):
            _ = pipeline | beam.Create(WORDS[:10]) | RunInference(handler)
            plan = str(pipeline.to_runner_api())

        assert {seen.headers["Authorization"] for seen in embedding_server.seen} == {f"Bearer {SECRET}"}
        shown = [repr(handler), str(handler), repr(model), repr(vars(model)), plan, caplog.text]
        assert not any(SECRET in text for text in shown)
        assert SECRET.encode() not in pickle.dumps(handler)
        with pytest.raises(TypeError, match="stays in the process"):
            pickle.Pickler(io.BytesIO()).dump(model._key)

    def test_a_server_that_tells_the_key_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, SECRET)
        with serving(lambda seen: Said({"error": f"wrong: {seen.headers['api-key']}"}, 401)) as server:
            handler = HttpModelHandler.embeddings(server.url, "m", api_key_env=VARIABLE, api_key_header="api-key")
            with pytest.raises(EndpointError, match=r"401: wrong: \*\*\*; check the key .* api_key_env") as caught:
                ask(handler, "a")

        assert SECRET not in repr(caught.value)

    def test_a_missing_key_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        handler = HttpModelHandler.embeddings("http://127.0.0.1:1", "small", api_key_env=VARIABLE)
        with pytest.raises(EndpointError, match=f"environment variable {VARIABLE}.*export {VARIABLE}="):
            handler.load_model()

    def test_a_key_that_is_none_is_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "two\nlines")
        handler = HttpModelHandler.embeddings("http://127.0.0.1:1", "small", api_key_env=VARIABLE)
        with pytest.raises(EndpointError, match="characters that no API key has") as caught:
            handler.load_model()

        assert "two" not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            (f"https://me:{SECRET}@example.com", {}),
            (f"https://{SECRET}@example.com", {}),
            (f"ftp://me:{SECRET}@example.com", {}),
            (f"https://example.com?api_key={SECRET}", {}),
            ("https://example.com", {"headers": {"Authorization": f"Bearer {SECRET}"}}),
            ("https://example.com", {"headers": {"X-Auth-Token": SECRET}}),
            ("https://example.com", {"headers": {"ocp-apim-subscription-KEY": SECRET}}),
            ("https://example.com", {"api_key_env": VARIABLE, "env_vars": {VARIABLE: SECRET}}),
        ],
    )
    def test_secrets_are_refused_where_they_would_travel(self, url: str, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"found .* expected|api_key_env|set it on the workers") as caught:
            HttpModelHandler.embeddings(url, "small", **options)

        assert SECRET not in str(caught.value)

    def test_errors_show_no_query(self) -> None:
        with serving(lambda _: Said(b"no", 400)) as server, pytest.raises(RemoteModelError) as caught:
            ask(HttpModelHandler.embeddings(f"{server.url}/?tenant=private", "small"), "a")

        assert "private" not in str(caught.value)
        assert server.seen[0].path == "/v1/embeddings?tenant=private"


class TestLimit:
    """How the limit adapts to a server whose latency the test sets."""

    def steady(self, limit: AdaptiveLimit, clock: FakeClock, capacity: int, rounds: int) -> None:
        """Simulate a server that handles ``capacity`` requests at once; further ones wait."""
        for _ in range(rounds):
            began = clock.monotonic()
            clock.advance(0.1 * max(1.0, limit.now / capacity))
            for _ in range(limit.now):
                limit.answered(began, full=True)

    def test_it_grows_while_latency_allows(self) -> None:
        clock = FakeClock()
        limit = AdaptiveLimit(64, clock.monotonic)
        self.steady(limit, clock, capacity=1000, rounds=20)

        assert limit.now == 64

    def test_it_stops_where_the_server_is_full(self) -> None:
        clock = FakeClock()
        limit = AdaptiveLimit(1000, clock.monotonic)
        self.steady(limit, clock, capacity=20, rounds=100)

        assert 16 <= limit.now <= 40

    def test_it_tries_again_later(self) -> None:
        clock = FakeClock()
        limit = AdaptiveLimit(1000, clock.monotonic)
        self.steady(limit, clock, capacity=20, rounds=100)
        before = limit.now
        self.steady(limit, clock, capacity=200, rounds=300)

        assert limit.now > 4 * before

    def test_it_backs_off_once_for_all_that_were_under_way(self) -> None:
        clock = FakeClock()
        limit = AdaptiveLimit(64, clock.monotonic)
        self.steady(limit, clock, capacity=1000, rounds=20)
        began = clock.monotonic()
        clock.advance(1)
        for _ in range(10):
            limit.overloaded(began)
        assert limit.now == 32

        for _ in range(10):
            clock.advance(1)
            limit.overloaded(clock.monotonic())
        assert limit.now == 1

        self.steady(limit, clock, capacity=1000, rounds=1000)
        assert limit.now == 64

    def test_it_does_not_grow_where_nobody_waits(self) -> None:
        limit = AdaptiveLimit(64, FakeClock().monotonic)
        for _ in range(1000):
            limit.answered(0.0, full=False)

        assert limit.now == 4

    def test_a_gate_lets_no_more_through(self) -> None:
        gate = Gate(2)
        first, second = gate.enter(), gate.enter()
        assert first is not None
        assert second is not None
        with first, second:
            assert gate.enter(0.0) is None
        assert gate.in_flight == 0

    def test_many_requests_at_once_and_fewer_for_a_busy_server(self) -> None:
        """The server is slow until enough requests arrive at once: the limit must have grown."""
        wanted = 16
        enough = threading.Event()

        def script(seen: Seen) -> Said:
            if server.peak >= wanted:
                enough.set()
            else:
                time.sleep(0.2)  # far longer than everything around it, so more requests at once increase throughput
            return chat(seen)

        with serving(script) as server:
            handler = HttpModelHandler.chat(server.url, "talker", concurrency=32)
            model = handler.load_model()
            while not enough.is_set() and len(server.seen) < 2000:
                list(handler.run_inference(WORDS, model))
            assert enough.is_set()
            assert server.peak <= 32

            grown = model._gate.limit.now
            server.script = lambda seen: chat(seen) if seen.number % 3 else Said(b"", 503)
            list(handler.run_inference(WORDS[:50], model))
            assert model._gate.limit.now < grown

    def test_models_of_one_endpoint_share_their_limit(self, embedding_server: ModelServer) -> None:
        first = HttpModelHandler.embeddings(embedding_server.url, "small").load_model()
        second = HttpModelHandler.embeddings(embedding_server.url, "small").load_model()
        other = HttpModelHandler.embeddings(embedding_server.url, "large").load_model()

        assert first._gate is second._gate is not other._gate


class TestOptions:
    def test_a_proxy_of_the_environment(self, embedding_server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", embedding_server.url.replace("http://", "http://me:word@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        found = ask(HttpModelHandler.embeddings("http://models.invalid", "small"), "a")

        assert found[0].tolist() == vector_of("a")
        assert embedding_server.seen[0].path == "http://models.invalid/v1/embeddings"
        assert embedding_server.seen[0].headers["proxy-authorization"].startswith("Basic ")

    def test_batches_are_as_small_as_asked(self, pipelines: Pipelines, embedding_server: ModelServer) -> None:
        handler = HttpModelHandler.embeddings(embedding_server.url, "small", max_batch_size=3)
        with pipelines() as (pipeline, _):
            assert_that(pipeline | beam.Create(WORDS[:20]) | RunInference(handler), _check_vectors)

        assert max(len(seen.json["input"]) for seen in embedding_server.seen) <= 3

    @pytest.mark.parametrize("name", ["timeout", "deadline", "concurrency", "max_response_bytes"])
    def test_nothing_is_too_little(self, name: str) -> None:
        options: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=f"found {name}=0"):
            HttpModelHandler.embeddings("http://localhost", "small", **options)

    def test_mistakes_are_named_where_the_pipeline_is_built(self) -> None:
        with pytest.raises(ValueError, match="expected one such as https://"):
            HttpModelHandler.embeddings("localhost:8000", "small")
        with pytest.raises(ValueError, match="found no model's name"):
            HttpModelHandler.embeddings("http://localhost", "")
        with pytest.raises(ValueError, match="n is 2, expected 1"):
            HttpModelHandler.chat("http://localhost", "talker", parameters={"n": 2})
        with pytest.raises(ValueError, match="stream is True"):
            RunInference(HttpModelHandler.chat("http://localhost", "t"), inference_args={"stream": True}).expand(None)  # type: ignore[arg-type]

    def test_another_model_of_the_same_server(self, embedding_server: ModelServer) -> None:
        handler = HttpModelHandler.embeddings(embedding_server.url, "small")
        handler.update_model_path("large")
        ask(handler, "a")

        assert embedding_server.seen[0].json["model"] == "large"
