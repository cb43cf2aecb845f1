"""Tests of how an exception in a worker is described in the runner's process."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import apache_beam as beam
import pytest

from luminosity.engine.workers.failure import Failure
from luminosity.engine.workers.harness import ReportingHarness
from luminosity.errors import Fix, InvalidArgument, LuminosityError, SpillFailed, StepFailed
from tests.runners import run

_FIX = Fix("pass columns=['text']", command="add --columns text")


def refuse(element: int) -> int:
    raise InvalidArgument(f"found column {element}, expected 'text'", fix=_FIX)


def raised(error: BaseException) -> BaseException:
    """Return ``error`` with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("flags", [["--cpu_workers=1"], ["--debug"]], ids=["in a worker", "in this process"])
def test_the_remedy_of_an_error_in_a_worker_reaches_the_runner(flags: list[str]) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create([7]) | "Refuse" >> beam.Map(refuse)

    with pytest.raises(StepFailed) as caught:
        run(build, *flags)
    error = caught.value
    assert error.fix == _FIX
    assert str(error).count(_FIX.python) == 1
    assert str(error).endswith(f"\nTo fix this: {_FIX.python}")
    assert "InvalidArgument: found column 7, expected 'text'\n  at " in error.for_command()
    assert error.for_command().endswith(f"\nTo fix this: {_FIX.command}")
    assert _FIX.python not in error.for_command()
    assert error.headline.startswith("step 'Refuse' failed")
    assert _FIX.python not in error.headline


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no good"),
        LuminosityError("no good"),
        InvalidArgument("no good", fix="pass another"),
        SpillFailed("the disk\nis full", fix=_FIX),
    ],
)
def test_a_failure_crosses_a_process_as_it_is(error: Exception) -> None:
    failure = Failure.of(raised(error))
    assert Failure.from_json(failure.to_json()) == failure
    assert failure.fix == getattr(error, "fix", None)
    assert failure.exception == f"{type(error).__name__}: {getattr(error, 'message', error.args[0])}"
    assert failure.is_full_disk == isinstance(error, SpillFailed)


def test_the_traceback_does_not_repeat_the_remedy() -> None:
    failure = Failure.of(raised(InvalidArgument("no good", fix=_FIX)))
    assert failure.traceback.endswith("InvalidArgument: no good\n")


@pytest.mark.parametrize("text", ["Traceback:\nValueError: no good", "", "3", "[]", '{"step": "a"}'])
def test_what_is_not_a_failure_in_json_is_taken_for_a_traceback(text: str) -> None:
    failure = Failure.from_json(text)
    assert failure.traceback == text
    assert failure.exception == (text.splitlines()[-1] if text else "unknown error")


_ELSEWHERE = """Traceback (most recent call last):
  File "/home/user/model.py", line 12, in predict
    return weights[number]
  File "<string>", line 2, in predict
IndexError: list index out of range
"""


def with_note(error: Exception) -> Exception:
    error.__notes__ = [f"in the process of the model:\n{_ELSEWHERE}"]  # type: ignore[attr-defined]
    return error


def with_text_as_cause(error: Exception) -> Exception:
    error.__cause__ = RuntimeError(_ELSEWHERE)
    return error


@pytest.mark.parametrize(
    "error",
    [
        with_note(IndexError("no")),
        with_text_as_cause(IndexError("no")),
        RuntimeError(f"process crashed:\n{_ELSEWHERE}"),
    ],
)
def test_the_line_is_that_of_the_process_that_raised(error: Exception) -> None:
    assert Failure.of(raised(error)).location == "/home/user/model.py:12"


def test_a_pool_of_processes_names_the_line() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(refuse, 7).exception()
    assert error is not None
    code = refuse.__code__
    assert Failure.of(raised(error)).location == f"{code.co_filename}:{code.co_firstlineno + 1}"


def test_a_cause_of_this_process_does_not_change_the_line() -> None:
    error = RuntimeError("no good")
    error.__cause__ = raised(ValueError(_ELSEWHERE))
    assert Failure.of(raised(error)).location.startswith(f"{__file__}:")


def test_a_failure_on_a_node_names_the_users_files_and_not_those_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReportingHarness, "copied", ("/tmp/copy/work", "/home/me/my shop"))
    found = Failure("ValueError: x", 'File "/tmp/copy/work/sub/a.py", line 7; /tmp/copy/workshop/b.py', "Map")
    harness = object.__new__(ReportingHarness)
    named = Failure.from_json(harness._named(found.to_json()))
    assert named.traceback == 'File "/home/me/my shop/sub/a.py", line 7; /tmp/copy/workshop/b.py'
    monkeypatch.setattr(ReportingHarness, "copied", None)
    assert Failure.from_json(harness._named(found.to_json())) == found
