"""Requests that are sent a second time: when, how often, and what they count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from luminosity import HttpModelHandler
from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument, RemoteModelError
from luminosity.inference.handler import noting
from tests.inference.handlers.model_server import ModelServer, Said, Seen, serving

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


def said(text: str) -> Said:
    return Said({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": USAGE})


def asked(script: Callable[[Seen, threading.Event], Said], **options: Any) -> tuple[Any, dict[str, int], ModelServer]:
    """Ask one question; the script gets an event that is set when the answer is there."""
    answered = threading.Event()
    with serving(lambda seen: script(seen, answered)) as server:
        handler = HttpModelHandler.chat(server.url, "talker", **{"hedge": 0.05, **options})
        with noting() as notes:
            try:
                found: Any = list(handler.load_model().predict([[{"role": "user", "content": "hi"}]], {}).values)
            except RemoteModelError as error:
                found = error
            finally:
                answered.set()
    return found, dict(notes), server


def test_the_second_one_answers_for_the_first_and_both_are_counted() -> None:
    def script(seen: Seen, answered: threading.Event) -> Said:
        if seen.number == 0:
            assert answered.wait(60)
        return said(f"number {seen.number}")

    found, notes, server = asked(script, prices=(1.0, 1.0))

    assert found == ["number 1"]
    assert len(server.seen) == 2
    assert server.seen[0].body == server.seen[1].body
    assert (notes[InferenceMetrics.REQUESTS], notes[InferenceMetrics.HEDGES]) == (2, 1)
    assert InferenceMetrics.RETRIES not in notes
    assert (notes["prompt_tokens"], notes["cost_nanos"]) == (20, 24_000)


def test_a_quick_answer_is_not_hedged() -> None:
    found, notes, server = asked(lambda seen, _: said("at once"), hedge=30.0)
    assert (found, len(server.seen)) == (["at once"], 1)
    assert InferenceMetrics.HEDGES not in notes


def test_an_error_of_one_waits_for_the_other() -> None:
    second_failed = threading.Event()

    def script(seen: Seen, _: threading.Event) -> Said:
        if seen.number == 1:
            second_failed.set()
            return Said({"error": "busy"}, 503)
        assert second_failed.wait(60)
        return said("first")

    found, notes, server = asked(script)
    assert (found, len(server.seen)) == (["first"], 2)
    assert InferenceMetrics.RETRIES not in notes


def test_a_request_is_hedged_once_whatever_its_retries() -> None:
    both = threading.Barrier(2)

    def script(seen: Seen, _: threading.Event) -> Said:
        if seen.number < 2:
            both.wait(60)
            return Said({"error": "busy"}, 503, {"Retry-After": "0"})
        threading.Event().wait(0.3)  # longer than the hedge
        return said("at last")

    found, notes, server = asked(script)
    assert (found, len(server.seen)) == (["at last"], 3)
    assert (notes[InferenceMetrics.HEDGES], notes[InferenceMetrics.RETRIES]) == (1, 1)


def test_no_second_one_without_room_in_the_budget() -> None:
    def script(seen: Seen, _: threading.Event) -> Said:
        threading.Event().wait(0.3)
        return said("alone")

    found, notes, server = asked(script, max_total_tokens=150, parameters={"max_tokens": 2})
    assert (found, len(server.seen)) == (["alone"], 1)
    assert InferenceMetrics.HEDGES not in notes


def test_what_makes_no_sense_is_refused() -> None:
    for hedge in (0, -1.0, 60.0, True):
        with pytest.raises(InvalidArgument, match="expected seconds above 0 and below timeout=60"):
            HttpModelHandler.chat("http://localhost:9", "m", hedge=hedge)
    with pytest.raises(InvalidArgument, match="whose requests go in files"):
        HttpModelHandler.chat("http://localhost:9", "m", hedge=5.0, completion_window="24h")
