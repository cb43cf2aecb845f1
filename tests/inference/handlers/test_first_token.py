"""The time to the first token: of answers that stream, of slots and of batches; and what is shown if it is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luminosity import HttpModelHandler, TextGenerator
from luminosity._shared.kafka_metrics import bucket_counts, percentile_ms
from luminosity.core import InferenceMetrics
from luminosity.errors import EndpointError, IncompleteAnswer, RemoteModelError
from luminosity.events import InferenceView
from luminosity.inference.handler import noting
from luminosity.runs.views.step_lines import parts
from tests.inference.handlers.model_server import Said, Seen, serving
from tests.inference.prompts.models import save_writer

USAGE = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}


def event(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"model": "talker-2", "choices": [choice], **more}).encode() + b"\n\n"


def stream(*events: bytes, done: bytes = b"data: [DONE]\n\n") -> Said:
    return Said(b": hello\n\n" + b"".join(events) + done, headers={"Content-Type": "text/event-stream"})


def first_tokens(notes: dict[str, int]) -> int:
    return sum(bucket_counts(notes, InferenceMetrics.FIRST_TOKEN).values())


class TestStream:
    def asked(self, *said: Said, **options: Any) -> tuple[Any, dict[str, int], list[Seen]]:
        script = list(said)
        with serving(lambda seen: script.pop(0) if len(script) > 1 else script[0]) as server, noting() as notes:
            handler = HttpModelHandler.chat(server.url, "talker", stream=True, **options)
            [found] = handler.run_inference(["hello"], handler.load_model())
        return found, dict(notes), server.seen

    def test_the_pieces_are_one_answer_and_the_first_has_a_time(self) -> None:
        whole = stream(event(""), event("Good "), event("day"), event(finish="stop"), event(usage=USAGE))
        found, notes, seen = self.asked(whole)

        assert (found.inference, found.model_id) == ("Good day", "talker-2")
        assert (notes["prompt_tokens"], notes["new_tokens"]) == (12, 2)
        assert first_tokens(notes) == 1
        assert (seen[0].json["stream"], seen[0].json["stream_options"]) == (True, {"include_usage": True})

    def test_the_first_token_comes_before_a_slow_rest(self) -> None:
        slow = stream(event("Good "), event("x" * 10), event(finish="stop"))
        slow.drip_s = 0.001  # some 400 bytes, one by one: the first token is there after a third of them
        with serving(lambda seen: slow) as server, noting() as notes:
            handler = HttpModelHandler.chat(server.url, "talker", stream=True)
            model = handler.load_model()
            found = model.predict([[{"role": "user", "content": "hello"}]], {})
        assert list(found.values) == ["Good " + "x" * 10]
        first_ms = percentile_ms(bucket_counts(notes, InferenceMetrics.FIRST_TOKEN), 0.5)
        assert first_ms is not None
        assert first_ms >= 50, "60 bytes and more come before it, a millisecond each"

    def test_a_stream_that_breaks_off_is_asked_again(self) -> None:
        broken = stream(event("Go"), done=b"")
        found, notes, seen = self.asked(broken, stream(event("Good"), event(finish="stop")))
        assert (found.inference, len(seen), notes["server_retries"]) == ("Good", 2, 1)

    def test_a_server_without_streams_answers_as_a_whole(self) -> None:
        choice = {"message": {"content": "Good"}, "finish_reason": "stop"}
        found, notes, _ = self.asked(Said({"choices": [choice]}))
        assert (found.inference, first_tokens(notes)) == ("Good", 0)

    @pytest.mark.parametrize(
        ("said", "error", "words"),
        [
            (stream(event("Go"), event(finish="length")), IncompleteAnswer, "cut at its limit of tokens.*Go"),
            (stream(b'data: {"error": {"message": "no room"}}\n\n'), RemoteModelError, "no room"),
            (stream(b"data: <html>\n\n"), EndpointError, "the event '<html>', expected a JSON object"),
            (stream(event("a").replace(b'"index": 0', b'"index": 1')), RemoteModelError, "several choices"),
        ],
    )
    def test_what_a_stream_says_about_errors_counts(self, said: Said, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            self.asked(said)


@pytest.mark.parametrize("in_slots", [False, True], ids=["transformers", "slots"])
def test_models_in_the_process_count_it_for_each_prompt(tmp_path: Path, in_slots: bool) -> None:
    handler = TextGenerator(save_writer(tmp_path), device="CPU", max_new_tokens=3, generation_args={"do_sample": False})
    handler.slot_devices = ("cpu",) if in_slots else ()
    with noting() as notes:
        list(handler.run_inference([f"film {number}" for number in range(5)], handler.load_model()))

    assert first_tokens(notes) == 5


def test_the_line_of_a_model_says_it_or_that_it_is_unknown() -> None:
    view = InferenceView("Ask", inferences=9, batches=9, prompt_tokens=40, new_tokens=9)
    assert "first token unknown" in parts(view)
    known = InferenceView("Ask", 9, 9, new_tokens=9, first_token_p50_ms=89.8, first_token_p99_ms=1234.0)
    assert "first token p50 90 ms, p99 1,234 ms" in parts(known)
    assert not any("first token" in part for part in parts(InferenceView("Embed", 9, 9)))
