"""Tests of scripts whose own classes and functions run in workers, for all ways to start a pipeline."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import files_of_runs, wait_for
from tests.runners import IS_REFERENCE
from tests.runners import flags as flags_of_runs

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
]

_DEFINITIONS = """
import asyncio
import dataclasses
import enum
import math
import multiprocessing
import os
import pickle
import sys
import threading
from typing import NamedTuple

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.typehints.schemas import LogicalType, NoArgumentLogicalType

from luminosity import LuminosityRunner

FACTOR = 10


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclasses.dataclass(frozen=True)
class Item:
    number: int
    colour: Colour

    @dataclasses.dataclass(frozen=True)
    class Part:
        name: str


class Money:
    def __init__(self, cents):
        self.cents = cents


@LogicalType.register_logical_type
class MoneyType(NoArgumentLogicalType):
    @classmethod
    def urn(cls):
        return "test:money:v1"

    @classmethod
    def representation_type(cls):
        return int

    @classmethod
    def language_type(cls):
        return Money

    def to_representation_type(self, value):
        return value.cents

    def to_language_type(self, value):
        return Money(value)


class Price(NamedTuple):
    shop: str
    amount: Money

    def label(self):
        return f"{self.shop} {self.amount.cents}"


beam.coders.registry.register_coder(Price, beam.coders.RowCoder)


class Painted(beam.DoFn):
    def process(self, number):
        yield Item(number * FACTOR, Colour.RED if number % 2 else Colour.BLUE)


class Total(beam.CombineFn):
    def create_accumulator(self):
        return Item(0, None)

    def add_input(self, total, item):
        return Item(total.number + item.number, item.colour)

    def merge_accumulators(self, totals):
        totals = list(totals)
        return Item(sum(total.number for total in totals), max(totals, key=lambda total: total.number).colour)

    def extract_output(self, total):
        return total


def root(item):
    assert type(item) is Item and type(item.colour) is Colour
    assert sys.argv[1] == "--progress=off", sys.argv  # the script's arguments, not those of the worker's process
    return math.isqrt(item.number), Item.Part(item.colour.name)


def with_class_kept(price):
    assert isinstance(price, Price) and isinstance(price.amount, Money)
    return price.label()


def work(output="out.txt"):
    with beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions(sys.argv[1:])) as pipeline:
        painted = pipeline | beam.Create([1, 2, 3, 4]) | beam.ParDo(Painted()) | "Moved" >> beam.Reshuffle()
        totals = painted | beam.Map(lambda item: (item.colour.value, item)) | beam.CombinePerKey(Total())
        roots = totals | beam.Values() | beam.Map(root) | beam.MapTuple(lambda n, part: f"{n} {part.name}")
        given = pipeline | "Given" >> beam.Create([Item(5, Colour.RED)]) | beam.Map(lambda item: f"{item.number}")
        prices = pipeline | "Prices" >> beam.Create([Price("x", Money(3))]).with_output_types(Price)
        labels = prices | "MovedPrices" >> beam.Reshuffle() | beam.Map(with_class_kept)
        (roots, given, labels) | beam.Flatten() | beam.io.WriteToText(os.path.abspath(output), shard_name_template="")

"""
_EXPECTED = ["5", "6 RED", "7 BLUE", "x 3"]  # the roots of 40 and 60, rounded down

_ENDINGS = {
    "plain": "work()",
    "guarded": "if __name__ == '__main__':\n    work()",
    "thread": "threading.Thread(target=work).start()  # the main thread ends first",
    "coroutine": """
        async def main():
            loop = asyncio.get_running_loop()
            beside = loop.run_in_executor(None, work, "beside.txt")
            work()
            await beside
            assert sorted(open("beside.txt")) == sorted(open("out.txt"))

        asyncio.run(main())
    """,
    "spawned process": """
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=work)
            child.start()
            child.join(100)
            sys.exit(child.exitcode)
    """,
}


def run_script(folder: Path, ending: str, *flags: str) -> list[str]:
    """Run the script and return the lines that it writes. It must log nothing."""
    script = folder / "script.py"
    script.write_text(_DEFINITIONS + textwrap.dedent(ending))
    words = [sys.executable, str(script), *flags_of_runs("--cpu_workers=2", *flags)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "apitools" not in line] == []
    return sorted((folder / "out.txt").read_text().splitlines())


@pytest.mark.parametrize("ending", _ENDINGS)
def test_what_a_script_defines_runs_in_workers(ending: str, tmp_path: Path) -> None:
    before = files_of_runs()
    assert run_script(tmp_path, _ENDINGS[ending]) == _EXPECTED
    assert wait_for(lambda: files_of_runs() <= before, timeout_s=60)


@pytest.mark.parametrize("ending", ["plain", pytest.param("spawned process", marks=pytest.mark.slow)])
def test_what_a_script_defines_runs_in_spawned_workers(ending: str, tmp_path: Path) -> None:
    assert run_script(tmp_path, _ENDINGS[ending], "--worker_start=spawn") == _EXPECTED
