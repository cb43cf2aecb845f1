"""With --dead_letters, elements at which a step fails on every attempt are passed by, counted and described."""

from __future__ import annotations

import base64
import errno
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.userstate import CombiningValueStateSpec

from luminosity.engine.debugging import letter_files
from luminosity.engine.debugging.dead_letters import DeadLetters
from luminosity.engine.loop import splits
from luminosity.engine.workers.sdk import passing
from luminosity.errors import OptionError, StepFailed
from tests.marks import note, notes
from tests.runners import IS_REFERENCE, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


def _letters(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("letters-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _parse(x: int) -> int:
    if x % 25 == 7:
        raise ValueError(f"no good: {x}")
    return x


class Spread(beam.DoFn):
    """Emits two values, and fails between them."""

    def process(self, element: int) -> Iterator[int]:
        yield element
        if element == 13:
            raise RuntimeError("in the middle")
        yield -element


@pytest.mark.parametrize("flag", ["--cpu_workers=2", "--debug"])
def test_elements_that_fail_are_passed_by_and_described(
    flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, bad = tmp_path / "letters", (7, 32, 57, 82)

    def build(pipeline: beam.Pipeline) -> None:
        values: Any = (
            pipeline | beam.Create(range(100)) | "Parse" >> beam.Map(_parse) | "Spread" >> beam.ParDo(Spread())
        )
        good = [n for n in range(100) if n not in (*bad, 13)]
        assert_that(values, equal_to([*good, *(-n for n in good)]))

    run(build, flag, f"--dead_letters={folder}")
    letters = _letters(folder)
    assert sorted((each["step"], each["exception"]) for each in letters) == [
        *sorted(("Parse", f"ValueError: no good: {n}") for n in bad),
        ("Spread", "RuntimeError: in the middle"),
    ]
    of_7 = next(each for each in letters if each["exception"].endswith(": 7"))
    assert of_7["element"] == "7"
    assert pickle.loads(base64.b64decode(of_7["pickle"])) == 7
    assert "in _parse" in of_7["traceback"]
    assert of_7["place"].startswith(__file__)
    assert len({each["id"] for each in letters}) == len(letters)
    assert oct(next(folder.iterdir()).stat().st_mode)[-3:] == "600"
    assert (
        f"5 elements were passed by, because a step failed at them on every attempt: see the dead letters in {folder}"
        in (caplog.text)
    )


_sum: Any = sum
_SEEN = beam.DoFn.StateParam(CombiningValueStateSpec("seen", _sum))


class CountedOnce(beam.DoFn):
    def __init__(self, tries: Path) -> None:
        self._tries = tries

    def process(self, element: tuple[int, int], seen: Any = _SEEN, at: Any = beam.DoFn.TimestampParam) -> Iterator[Any]:
        if element[1] == 5:
            note(self._tries)
            raise ValueError("five")
        seen.add(1)
        yield element[0], seen.read()


def test_steps_with_state_and_parameters_have_all_their_attempts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "can_split", lambda bundle: False)  # what is split off a bundle has all its attempts
    folder, tries = tmp_path / "letters", tmp_path / "tries"

    def build(pipeline: beam.Pipeline) -> None:
        keyed: Any = pipeline | beam.Create([(0, n) for n in range(10)])
        assert_that(keyed | beam.ParDo(CountedOnce(tries)), equal_to([(0, n) for n in range(1, 10)]))

    run(build, "--cpu_workers=1", f"--dead_letters={folder}")
    assert len(notes(tries)) == 5  # four attempts, and the one that passes it by
    assert [each["element"] for each in _letters(folder)] == ["(0, 5)"]


def _no_space(x: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


class FailingAtTheEnd(beam.DoFn):
    def process(self, element: int) -> Iterator[int]:
        yield element

    def finish_bundle(self) -> None:
        raise ValueError("at the end")


@pytest.mark.parametrize("step", [beam.Map(_no_space), beam.ParDo(FailingAtTheEnd())])
def test_what_is_no_elements_fault_still_ends_the_run(step: Any, tmp_path: Path) -> None:
    with pytest.raises(StepFailed):
        run(lambda p: p | beam.Create(range(10)) | step, "--cpu_workers=1", f"--dead_letters={tmp_path}")
    assert _letters(tmp_path) == []


def test_without_the_option_the_run_fails() -> None:
    with pytest.raises(StepFailed, match="no good: 7"):
        run(lambda p: p | beam.Create(range(10)) | beam.Map(_parse), "--debug")


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    flags = [f"--dead_letters={tmp_path}", f"--save_failed={tmp_path / 'x'}"]
    with pytest.raises(OptionError, match="--save_failed and --dead_letters"):
        run(lambda p: p | beam.Create([1]), *flags)


def test_files_and_the_folder_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_files, "_FILE_BYTES", 100)
    monkeypatch.setattr(letter_files, "_MOST_BYTES", 400)
    box = DeadLetters(str(tmp_path / "of" / "letters"))
    line = json.dumps({"step": "Parse", "exception": "ValueError", "element": "x" * 40}).encode() + b"\n"
    assert box.write(line * 2) == {"Parse": 2}
    assert box.write(line) == {"Parse": 1}
    assert [path.stat().st_size for path in sorted((tmp_path / "of" / "letters").iterdir())] == [
        2 * len(line),
        len(line),
    ]
    with pytest.raises(StepFailed, match="'Parse' fails at too many elements"):
        box.write(line * 5)


def test_an_element_that_can_not_be_pickled_is_described() -> None:
    failure = passing.Failure("ValueError: no", "")
    letter = json.loads(passing.letter_line("Step", [lambda: None, "x" * 20_000], failure))
    assert letter["pickle"] is None
    assert len(letter["element"]) <= 10_000
    assert len(letter["id"]) == 16
