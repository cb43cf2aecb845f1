"""Groups of partitions: what is claimed, what is left, and that nothing is both or neither."""

from __future__ import annotations

import pickle

import pytest

from luminosity.errors import InvalidArgument
from luminosity.io.kafka.reading.restriction import LAST, Claim, GroupTracker, PartitionGroup, Span

_A, _B = ("t", 0), ("t", 1)


def test_a_runner_that_splits_is_refused_and_the_next_claim_fails() -> None:
    """Whatever it took away could run before the bundle is committed, and break the order of a partition."""
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 10)}))
    assert tracker.try_claim(Claim({_A: 3}))
    assert tracker.try_split(0.0) is None
    assert not tracker.try_claim(Claim({_A: 4}))
    assert not tracker.try_claim(Claim(ends={_A: 30}))  # the end is noted: the rest has it as its backlog
    assert tracker.try_claim(LAST)
    claimed, rest = tracker.try_split(0.0)
    assert claimed.spans == {_A: Span(0, 3, 3)}
    assert rest.spans == {_A: Span(3, 10, 30)}
    assert tracker.check_done()
    assert not tracker.try_claim(Claim({_A: 5}))
    assert tracker.try_split(0.0) is None


def test_a_group_that_is_done_has_no_rest() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 2), _B: Span(5, 5)}))
    assert tracker.try_claim(Claim({_A: 2}))
    assert tracker.try_claim(LAST)
    assert tracker.try_split(0.0) is None
    assert tracker.check_done()


def test_partitions_that_are_done_are_left_out_of_the_rest() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 2), _B: Span(5, 9)}))
    assert tracker.try_claim(Claim({_A: 2, _B: 6}))
    assert tracker.try_claim(LAST)
    _, rest = tracker.try_split(0.0)
    assert rest.spans == {_B: Span(6, 9)}


def test_offsets_that_are_neither_claimed_nor_deferred_are_an_error() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(0, 2)}))
    assert tracker.try_claim(Claim({_A: 1}))
    with pytest.raises(ValueError, match="not claimed"):
        tracker.check_done()


@pytest.mark.parametrize("offset", [3, 11])
def test_a_claim_moves_forward_and_not_beyond_the_end(offset: int) -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(5, 10)}))
    with pytest.raises(InvalidArgument, match=f"up to offset {offset}, expected one from 5 to 10"):
        tracker.try_claim(Claim({_A: offset}))


def test_an_open_group_is_never_done_and_takes_new_partitions() -> None:
    tracker = GroupTracker(PartitionGroup({}, is_open=True))
    assert not tracker.is_bounded()
    assert tracker.try_claim(Claim(found={_A: Span(0)}))
    assert tracker.try_claim(Claim({_A: 7}, ends={_A: 20}))
    assert tracker.try_claim(Claim(found={_A: Span(0)}))  # known: it stays where it is
    assert tracker.current_restriction() == PartitionGroup({_A: Span(7, None, 20)}, is_open=True)
    assert tracker.current_restriction().backlog == 13
    with pytest.raises(ValueError, match="not claimed"):
        tracker.check_done()
    tracker.try_claim(LAST)
    claimed, rest = tracker.try_split(0.0)
    assert claimed == PartitionGroup({_A: Span(0, 7, 7)})
    assert rest == PartitionGroup({_A: Span(7, None, 20)}, is_open=True)


def test_an_open_group_ends_where_it_is_told() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(5), _B: Span(9)}, is_open=True))
    assert tracker.try_claim(Claim(stops={_A: 8, _B: 3}))
    assert tracker.is_bounded()
    assert tracker.current_restriction().spans == {_A: Span(5, 8), _B: Span(9, 9)}
    assert tracker.try_claim(Claim({_A: 8}))
    assert tracker.check_done()


def test_progress_and_size_are_in_offsets() -> None:
    tracker = GroupTracker(PartitionGroup({_A: Span(5, 10), _B: Span(0, None, 3)}, is_open=True))
    assert tracker.try_claim(Claim({_A: 7}))
    progress = tracker.current_progress()
    assert (progress.completed_work, progress.remaining_work) == (2, 6)
    assert PartitionGroup({_A: Span(50, None, 3)}).backlog == 0


def test_a_reader_that_keeps_up_has_something_left() -> None:
    """Beam asks no reader to split whose progress is 1: its bundle would go on for as long as records come."""
    tracker = GroupTracker(PartitionGroup({_A: Span(5, None, 5)}, is_open=True))
    assert tracker.current_progress().fraction_completed == 0
    assert tracker.try_claim(Claim({_A: 7}, ends={_A: 7}))
    assert 0 < tracker.current_progress().fraction_completed < 1
    assert tracker.try_claim(Claim(stops={_A: 7}))
    assert tracker.current_progress().fraction_completed == 1


def test_groups_are_pickled() -> None:
    group = PartitionGroup({_A: Span(5, 10, 3)}, is_open=True)
    assert pickle.loads(pickle.dumps(group)) == group
