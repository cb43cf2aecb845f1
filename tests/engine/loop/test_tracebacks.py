"""Tests of what a failed step shows: the user's own frames first, and no frames of Beam and Luminosity."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pytest

from luminosity.errors import StepFailed
from tests.runners import IS_REFERENCE, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

_HIDDEN = ("apache_beam/", "luminosity/engine", "<frozen", "grpc")


class _Fails(beam.DoFn):
    def __init__(self, method: str) -> None:
        self._method = method

    def _raise(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError(f"größer in {method}")

    def setup(self) -> None:
        self._raise("setup")

    def start_bundle(self) -> None:
        self._raise("start_bundle")

    def process(self, element: Any) -> Iterator[Any]:
        self._raise("process")
        yield element

    def finish_bundle(self) -> None:
        self._raise("finish_bundle")


class _Divides(beam.CombineFn):
    def create_accumulator(self) -> int:
        return 0

    def add_input(self, mutable_accumulator: int, element: Any) -> int:
        return mutable_accumulator // 0

    def merge_accumulators(self, accumulators: Any) -> int:
        return sum(accumulators)

    def extract_output(self, accumulator: int) -> int:
        return accumulator


class _Unwritable:
    """Has a coder that can't write it."""


class _RefusingCoder(beam.coders.Coder):
    def encode(self, value: Any) -> bytes:
        raise ValueError("no such bytes")

    def is_deterministic(self) -> bool:
        return True


def _chained(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise KeyError(text) from error


def _recoded(numbers: Any) -> Any:
    beam.coders.registry.register_coder(_Unwritable, _RefusingCoder)
    return numbers | beam.Map(lambda _: _Unwritable()).with_output_types(_Unwritable) | beam.Reshuffle()


def _failed(apply: Callable[[Any], Any], *options: str) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        run(lambda pipeline: apply(pipeline | beam.Create(["n/a"])), "--debug", *options)
    return caught.value


@pytest.mark.parametrize(
    ("apply", "frames", "ending"),
    [
        *(
            pytest.param(
                lambda numbers, method=method: numbers | beam.ParDo(_Fails(method)),
                [method, "_raise"],
                f"RuntimeError: größer in {method}",
                id=method,
            )
            for method in ("setup", "start_bundle", "process", "finish_bundle")
        ),
        pytest.param(
            lambda numbers: numbers | beam.Map(lambda _: 1 / 0),
            ["<lambda>"],
            "ZeroDivisionError: division by zero",
            id="lambda",
        ),
        pytest.param(
            lambda numbers: numbers | beam.CombineGlobally(_Divides()),
            ["add_input"],
            "ZeroDivisionError: integer division or modulo by zero",
            id="combiner",
        ),
        pytest.param(_recoded, ["encode"], "ValueError: no such bytes", id="coder"),
        pytest.param(
            lambda texts: texts | beam.Map(_chained), ["_chained", "_chained"], "KeyError: 'n/a'", id="raise from"
        ),
        pytest.param(
            lambda texts: texts | beam.Map(json.loads),
            ["loads", "decode", "raw_decode"],
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            id="library",
        ),
        pytest.param(
            lambda texts: texts | beam.Map(float),
            [],
            "ValueError: could not convert string to float: 'n/a'",
            id="built-in",
        ),
    ],
)
def test_the_users_frames_come_first_and_no_internals(
    apply: Callable[[Any], Any], frames: list[str], ending: str
) -> None:
    error = _failed(apply)
    lines = str(error).splitlines()
    assert lines[0].startswith("step ")
    assert "failed: " in lines[0]
    assert [line.rpartition(", in ")[2] for line in lines if line.startswith("  File ")] == frames
    assert lines[-2] == ending
    assert "error.traceback has them" in lines[-1]
    assert not [line for line in lines[:-1] if any(hidden in line for hidden in _HIDDEN)]
    assert "apache_beam" in error.traceback
    if frames and frames != ["loads", "decode", "raw_decode"]:
        assert f"  at {__file__}:" in lines[1]


def test_python_shows_no_frames_of_the_loop() -> None:
    """They would come first, and are longer than the screen."""
    error = _failed(lambda texts: texts | beam.Map(_chained))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert not [file for file in files if "luminosity/engine/loop/" in file or file.endswith("engine/run.py")]
    assert error.__cause__ is not None
    assert traceback.extract_tb(error.__cause__.__traceback__)[0].filename == __file__
