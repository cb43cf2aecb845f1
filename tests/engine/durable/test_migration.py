"""Tests of state that is changed for a new version of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import Coder, FloatCoder, StrUtf8Coder, VarIntCoder
from apache_beam.runners.runner import PipelineState
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec

from luminosity import Migration
from luminosity.engine.durable.stored_state import kept_by
from luminosity.errors import CheckpointError, OptionError
from tests.engine.durable.test_ends import Count, wait_until
from tests.marks import note, notes
from tests.runners import IS_REFERENCE, start

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

_EUROS = beam.DoFn.StateParam(ReadModifyWriteStateSpec("euros", FloatCoder()))
_SEEN = beam.DoFn.StateParam(BagStateSpec("seen", VarIntCoder()))
_CENTS = beam.DoFn.StateParam(ReadModifyWriteStateSpec("cents", VarIntCoder()))
_TEXTS = beam.DoFn.StateParam(BagStateSpec("seen", StrUtf8Coder()))


class InEuros(beam.DoFn):
    def __init__(self, path: Path) -> None:
        self._path = path

    def process(self, element: tuple[str, int], euros: Any = _EUROS, seen: Any = _SEEN) -> None:
        euros.write((euros.read() or 0.0) + 0.5)
        seen.add(element[1])
        note(self._path, element[1])


class InCents(beam.DoFn):
    """The next version: whole cents, and the numbers that were seen as texts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(self, element: tuple[str, int], cents: Any = _CENTS, seen: Any = _TEXTS) -> None:
        cents.write((cents.read() or 0) + 50)
        seen.add(str(element[1]))
        texts = sorted(map(int, seen.read()))
        note(self._path, f"{element[1]} {cents.read()} {texts == list(range(len(texts)))} {len(texts)}")


def counting(total: beam.DoFn) -> Callable[[beam.Pipeline], Any]:
    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Impulse() | "Count" >> beam.ParDo(Count()).with_output_types(int)
        keyed = numbers | "Key" >> beam.Map(lambda number: ("all", number)).with_output_types(tuple[str, int])
        _ = keyed | "Total" >> beam.ParDo(total)

    return build


def run_for_a_while(total: beam.DoFn, path: Path, *options: str) -> list[str]:
    """Run until some more elements have passed, then stop; return all that has been noted."""
    before = len(notes(path))
    result = start(counting(total), "--cpu_workers=1", *options)
    wait_until(lambda: len(notes(path)) > before + 5)
    assert result.cancel() == PipelineState.STOPPED
    return notes(path)


@pytest.fixture
def migrations() -> Iterator[ModuleType]:
    sys.modules["migrations_of_test"] = module = ModuleType("migrations_of_test")
    yield module
    del sys.modules["migrations_of_test"]


def to_cents(migration: Migration, coder: Coder | None = None) -> None:
    migration.convert(
        "Total", "euros", lambda euros: round(100 * euros), coder=VarIntCoder() if coder is None else coder
    )
    migration.rename("Total", "euros", "cents")
    migration.convert("Total", "seen", str, coder=StrUtf8Coder())


def test_values_are_converted_once_and_go_on(tmp_path: Path, migrations: Any) -> None:
    migrations.to_cents = to_cents
    options = [f"--checkpoint_dir={tmp_path / 'checkpoint'}"]
    old = run_for_a_while(InEuros(tmp_path / "old"), tmp_path / "old", *options)
    options.append("--migrate=migrations_of_test:to_cents")
    for _ in range(2):  # The second start has the option as well, and changes nothing.
        run_for_a_while(InCents(tmp_path / "new"), tmp_path / "new", *options)
    for number, line in enumerate(notes(tmp_path / "new"), start=len(old)):
        assert line == f"{number} {50 * (number + 1)} True {number + 1}"


def test_what_a_new_run_writes_is_not_migrated_later(tmp_path: Path, migrations: Any) -> None:
    migrations.to_cents = to_cents
    options = [f"--checkpoint_dir={tmp_path / 'checkpoint'}", "--migrate=migrations_of_test:to_cents"]
    for _ in range(2):
        run_for_a_while(InCents(tmp_path / "new"), tmp_path / "new", *options)
    new = notes(tmp_path / "new")
    assert [line.split()[1] for line in new] == [f"{50 * number}" for number in range(1, len(new) + 1)]


def test_a_dropped_state_is_empty(tmp_path: Path, migrations: Any) -> None:
    def drop(migration: Migration) -> None:
        to_cents(migration)
        migration.drop("Total", "seen")

    migrations.drop = drop
    options = [f"--checkpoint_dir={tmp_path / 'checkpoint'}"]
    old = run_for_a_while(InEuros(tmp_path / "old"), tmp_path / "old", *options)
    new = run_for_a_while(InCents(tmp_path / "new"), tmp_path / "new", *options, "--migrate=migrations_of_test:drop")
    assert new[0] == f"{len(old)} {50 * (len(old) + 1)} False 1"


def test_an_error_leaves_everything_as_it_was(tmp_path: Path, migrations: Any) -> None:
    def breaks(migration: Migration) -> None:
        migration.convert("Total", "seen", lambda number: "" if number else 1 / number, coder=StrUtf8Coder())

    def another_coder(migration: Migration) -> None:
        to_cents(migration, FloatCoder())

    def unknown_step(migration: Migration) -> None:
        migration.drop("Totals", "seen")

    def unknown_state(migration: Migration) -> None:
        migration.drop("Total", "sen")

    def taken(migration: Migration) -> None:
        migration.rename("Total", "euros", "seen")

    checkpoint = tmp_path / "checkpoint"
    run_for_a_while(InEuros(tmp_path / "old"), tmp_path / "old", f"--checkpoint_dir={checkpoint}")
    before = list(kept_by(str(checkpoint), "Total"))
    expected = {
        "breaks": "'Total', 'seen', key all: ZeroDivisionError",
        "another_coder": "the coder of the state 'cents' was double, and is varint now",
        "unknown_step": "no state of a step 'Totals'",
        "unknown_state": "no state 'sen'",
        "taken": "has a state 'seen' already",
    }
    for function in (breaks, another_coder, unknown_step, unknown_state, taken):
        setattr(migrations, function.__name__, function)
        with pytest.raises(CheckpointError) as caught:
            start(
                counting(InCents(tmp_path / "new")),
                f"--checkpoint_dir={checkpoint}",
                f"--migrate=migrations_of_test:{function.__name__}",
            )
        assert expected[function.__name__] in str(caught.value)
        assert list(kept_by(str(checkpoint), "Total")) == before
    for given, problem in {
        "migrations_of_test:none": "found no function 'none'",
        "no_such_module:f": "No module named 'no_such_module'",
        "migrations_of_test": "expected MODULE:FUNCTION",
    }.items():
        with pytest.raises(OptionError, match=problem):
            start(counting(InEuros(tmp_path / "old")), f"--checkpoint_dir={checkpoint}", f"--migrate={given}")
