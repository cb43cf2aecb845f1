"""What is shown of the state and timers in a checkpoint, after a stream that wrote every kind of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import BytesCoder, PickleCoder, StrUtf8Coder, VarIntCoder, coder_impl
from apache_beam.coders.coders import Coder, FastPrimitivesCoder, FloatCoder, IterableCoder, TupleCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    OrderedListStateSpec,
    ReadModifyWriteStateSpec,
    SetStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import FixedWindows
from apache_beam.utils.timestamp import Timestamp

from luminosity.cli.main import main
from luminosity.engine.durable.stored_values import Undecoded, ValueReader
from luminosity.errors import CheckpointError
from tests.engine.durable.test_ends import Count, wait_until
from tests.marks import note, notes
from tests.runners import IS_REFERENCE, start

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

_NUMBERS = 6  # of which state is kept: three of each key


_LAST = beam.DoFn.StateParam(ReadModifyWriteStateSpec("last", VarIntCoder()))
_ALL = beam.DoFn.StateParam(BagStateSpec("all", StrUtf8Coder()))
_HOW_MANY = beam.DoFn.StateParam(CombiningValueStateSpec("how many", VarIntCoder(), beam.combiners.CountCombineFn()))
_ODD = beam.DoFn.StateParam(SetStateSpec("odd", FastPrimitivesCoder()))
_ORDERED = beam.DoFn.StateParam(OrderedListStateSpec("ordered", VarIntCoder()))
_PICKLED = beam.DoFn.StateParam(ReadModifyWriteStateSpec("pickled", PickleCoder()))
_TIMER = TimerSpec("end", TimeDomain.WATERMARK)
_END = beam.DoFn.TimerParam(_TIMER)


class Keep(beam.DoFn):
    """Keeps the first numbers in every kind of state."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(
        self,
        element: tuple[str, int],
        value: Any = _LAST,
        bag: Any = _ALL,
        total: Any = _HOW_MANY,
        odd: Any = _ODD,
        ordered: Any = _ORDERED,
        pickled: Any = _PICKLED,
        timer: Any = _END,
    ) -> None:
        key, number = element
        if number >= _NUMBERS:
            note(self._path, key)
            return
        value.write(number)
        bag.add(f"number {number}")
        total.add(number)
        odd.add(number % 2 == 1)
        ordered.add((Timestamp(100 - number), number))
        pickled.write({number})
        timer.set(Timestamp(3_000))

    @on_timer(_TIMER)
    def _end(self) -> None:
        raise AssertionError("the window does not end in this test")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("state")
    seen = place / "seen"

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Impulse() | "Count" >> beam.ParDo(Count()).with_output_types(int)
        keyed = numbers | beam.Map(lambda number: ("ab"[number % 2], number)).with_output_types(tuple[str, int])
        windows = keyed | beam.WindowInto(FixedWindows(3600))
        _ = windows | "Orders" >> _Composite(seen)

    result = start(build, f"--checkpoint_dir={place / 'checkpoint'}", "--cpu_workers=1")
    wait_until(lambda: {*notes(seen)} == {"a", "b"})  # each key has its numbers in their order
    result.cancel()
    return place / "checkpoint"


class _Composite(beam.PTransform[Any, Any]):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def expand(self, input_or_inputs: beam.PCollection[tuple[str, int]]) -> Any:
        return input_or_inputs | "Keep" >> beam.ParDo(Keep(self._path))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["state", *words]) == 0
    return capsys.readouterr().out


def test_every_kind_of_state_and_timers(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(checkpoint)) == "Orders/Keep\n"
    lines = [json.loads(line) for line in shown(capsys, str(checkpoint), "Keep", "--key=b", "--json").splitlines()]
    assert {(line["step"], line["key"], *line["window"]) for line in lines} == {("Orders/Keep", "b", 0.0, 3600.0)}
    found = {line["name"]: (line["kind"], line["value"]) for line in lines}
    pickled, counts = found.pop("pickled"), found.pop("how many")
    assert found == {
        "last": ("value", 5),
        "all": ("bag", ["number 1", "number 3", "number 5"]),
        "odd": ("set", [True]),
        "ordered": ("ordered list", [[95.0, 5], [97.0, 3], [99.0, 1]]),
        "end": ("event time timer", 3000.0),
    }
    assert (counts[0], sum(counts[1])) == ("combining", 3)  # one accumulator a bundle
    assert pickled[1]["coder"] == "PickleCoder"


def test_a_table_is_cut(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys, str(checkpoint), "Orders/Keep", "--limit=4")
    assert "and 10 more: choose with --key" in table
    assert len(table.splitlines()) == 1 + 4 + 1
    whole = shown(capsys, str(checkpoint), "Orders/Keep")
    assert len(whole.splitlines()) == 1 + 14
    assert "bytes of PickleCoder>" in whole
    assert "no state or timers of this key" in shown(capsys, str(checkpoint), "Keep", "--key=c")


def test_wrong_names_are_told(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", str(checkpoint), "Kept"]) == 2
    assert "'Kept', expected one of 'Orders/Keep'" in capsys.readouterr().err
    assert main(["state", str(tmp_path)]) == 2
    assert "found no checkpoint in it" in capsys.readouterr().err


_NUMBERS_CODER = TupleCoder([VarIntCoder(), FloatCoder()])
_OTHERS = ["PickleCoder", "kv(varint,MyCoder)", "iterable(MyCoder)", "row(a:int64)", "MyCoder(varint)"]


def _encoded(coder: Coder, *values: Any) -> bytes:
    stream = coder_impl.create_OutputStream()
    for value in values:
        coder.get_impl().encode_to_stream(value, stream, True)
    return stream.get()


@pytest.mark.parametrize(
    ("name", "coder", "values"),
    [
        ("kv(string_utf8,varint)", TupleCoder([StrUtf8Coder(), VarIntCoder()]), [("a", 1), ("ü", -2)]),
        ("kv(bytes,kv(varint,double))", TupleCoder([BytesCoder(), _NUMBERS_CODER]), [(b"", (1, 0.5))]),
        ("iterable(double)", IterableCoder(FloatCoder()), [[], [1.5, -2.0]]),
        (
            "FastPrimitivesCoder",
            FastPrimitivesCoder(),
            [None, -1, 2.5, b"x", "ü", True, [1, [2]], (1, "a"), {1, 2}, {"a": {"b": None}}, ""],
        ),
    ],
)
def test_values_that_need_no_program(name: str, coder: Coder, values: list[Any]) -> None:
    assert list(ValueReader(name).values(_encoded(coder, *values))) == values


@pytest.mark.parametrize("name", _OTHERS)
def test_other_coders_are_named(name: str) -> None:
    assert list(ValueReader(name).values(b"abc")) == [Undecoded(b"abc", name)]


def test_types_of_a_program_are_not_unpickled() -> None:
    data = _encoded(FastPrimitivesCoder(), 1) + _encoded(FastPrimitivesCoder(), CheckpointError)
    assert list(ValueReader("FastPrimitivesCoder").values(data)) == [Undecoded(data, "FastPrimitivesCoder")]
