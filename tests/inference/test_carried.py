"""Examples that pass through a process are unpickled only where they are looked into."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luminosity.inference.steps.carried import Carried, as_list, carried, joined, taken
from luminosity.inference.steps.messages import BlockCoder, PreparedBlock, ResultBlock


class Counted:
    """An example that counts how many of it were unpickled."""

    unpickled: ClassVar[int] = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, Any]) -> None:
        Counted.unpickled += 1
        self.__dict__ |= state


def counted(count: int) -> list[Counted]:
    return [Counted(number) for number in range(count)]


def through(examples: Any, times: list[Any] | None = None) -> PreparedBlock:
    block = PreparedBlock(examples, times or [0] * len(examples), None)
    return BlockCoder().decode(BlockCoder().encode(block))


def test_a_process_that_passes_examples_on_unpickles_none() -> None:
    before = Counted.unpickled
    found = through(through(counted(2000)).examples).examples
    assert len(found) == 2000
    assert Counted.unpickled == before
    assert [each.number for each in as_list(found)] == list(range(2000))
    assert Counted.unpickled == before + 2000


def test_a_range_unpickles_only_the_pieces_at_its_ends() -> None:
    found = through(counted(2048)).examples
    before = Counted.unpickled
    parts = [taken(found, np.arange(1000)), taken(found, np.arange(1000, 2048))]
    assert Counted.unpickled == before + 256
    assert [each.number for each in joined(parts)] == list(range(2048))


@given(st.lists(st.integers(), max_size=900), st.integers(0, 900), st.integers(0, 900))
def test_ranges_are_those_of_the_list(numbers: list[int], start: int, end: int) -> None:
    found = pickle.loads(pickle.dumps(Carried.of(numbers), pickle.HIGHEST_PROTOCOL))
    assert len(found) == len(numbers)
    assert list(found[start:end]) == numbers[start:end]
    assert list(joined([found[:start], numbers[start:]])) == numbers
    order = np.random.default_rng(start).permutation(len(numbers))
    assert list(taken(Carried.of(numbers), order)) == [numbers[place] for place in order]


@pytest.mark.parametrize("place", [0, 63, 299, -1])
def test_places_are_those_of_the_list(place: int) -> None:
    numbers = list(range(300))
    assert Carried.of(numbers)[place] == numbers[place]


@pytest.mark.parametrize("place", [300, -301])
def test_a_place_beyond_the_examples_is_an_error(place: int) -> None:
    with pytest.raises(IndexError):
        Carried.of(list(range(300)))[place]


def test_few_examples_stay_a_list() -> None:
    assert carried([1, 2]) == [1, 2]
    assert isinstance(through([1, 2]).examples, list)


def test_arrays_come_back_as_they_were_and_can_be_written_to() -> None:
    arrays = [np.full(5000, number) for number in range(100)]
    found = as_list(through(arrays).examples)
    np.testing.assert_array_equal(found, arrays)
    assert all(each.flags.writeable for each in found)


@pytest.mark.parametrize("times", [[7] * 500, list(range(500)), [7.5] * 499 + [8.5]], ids=["one", "all", "last"])
def test_each_example_keeps_its_timestamp(times: list[Any]) -> None:
    assert through(["text"] * 500, times).timestamps == times


def test_a_block_of_failures_alone_comes_back() -> None:
    block = ResultBlock([], [], [], None)
    assert BlockCoder().decode(BlockCoder().encode(block)) == block
