"""Batching decisions with a given time: no threads, no sleeping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luminosity._shared.cost_line import CostLine
from luminosity.inference.batching import Arrivals, Backlog, BatchPolicy, Budget, Cut, QueuedExamples, first_cut
from luminosity.inference.handler import Limits, warn_of_settings_without_meaning
from luminosity.inference.steps.dofns import BlockSize


class TestBlockSize:
    """Calls of ``learn(examples, bytes, seconds)``, as a handler would cause them."""

    def settled(self, seconds: Callable[[int], float], block_size: BlockSize | None = None) -> BlockSize:
        block_size = block_size or BlockSize()
        for _ in range(200):
            block_size.learn(block_size.examples, 10 * block_size.examples, seconds(block_size.examples))
        return block_size

    def test_it_grows_while_that_is_quick(self) -> None:
        assert self.settled(lambda examples: 1e-6 * examples).examples == 1024
        assert self.settled(lambda examples: 0.02).examples == 1024

    def test_it_shrinks_where_examples_take_long(self) -> None:
        assert self.settled(lambda examples: 0.03 * examples).examples <= 4
        assert self.settled(lambda examples: 3.0 * examples).examples == 1

    def test_a_machine_that_was_busy_leaves_no_mark(self) -> None:
        stalled = self.settled(lambda examples: 0.06 + 0.2 * examples)
        assert stalled.examples == 1
        assert self.settled(lambda examples: 0.06 + 1e-6 * examples, stalled).examples == 1024

    @pytest.mark.parametrize("seconds", [0.09, 0.11, 2.0])
    def test_it_is_large_where_each_call_has_its_price_however_high(self, seconds: float) -> None:
        assert self.settled(lambda examples: seconds + 1e-6 * examples).examples == 1024

    def test_the_end_of_a_bundle_tells_nothing(self) -> None:
        block_size = BlockSize()
        block_size.learn(3, 30, 0.0001)
        assert block_size.examples == 64

    def test_large_examples_make_small_blocks(self) -> None:
        block_size = BlockSize()
        block_size.learn(64, 64_000_000, 0.001)
        assert block_size.examples == 16


def pool_of(*costs: float, now: float = 0.0, weights: list[float] | None = None) -> Backlog:
    pool = Backlog()
    pool.put(1, QueuedExamples.new(np.array(costs, float), None if weights is None else np.array(weights), now))
    return pool


def all_batches(policy: BatchPolicy, pool: Backlog) -> list[list[float]]:
    batches: list[list[float]] = []
    while len(pool):
        cut = policy.next(pool, 0.0, more_coming=False)
        assert isinstance(cut, Cut)
        batches.append(pool.take(cut.start, cut.count).costs.tolist())
    return batches


def taught(policy: BatchPolicy, fixed: float, per_cost: float) -> BatchPolicy:
    """Return a policy that has seen batches of a device with these times."""
    policy.budget.limit(1)
    for cost in [2.0**power for power in range(14)]:
        policy.budget.succeeded(cost, fixed + per_cost * cost)
    return policy


def test_nothing_waits_for_nothing() -> None:
    assert BatchPolicy(Limits()).next(Backlog(), 0.0, more_coming=True) is None


def test_longest_first() -> None:
    batches = all_batches(BatchPolicy(Limits()), pool_of(3, 90, 1, 40, 90))
    assert batches[0] == [90, 90]
    assert [batch[0] for batch in batches] == sorted((batch[0] for batch in batches), reverse=True)


def test_padded_cost_stays_within_the_budget() -> None:
    policy = taught(BatchPolicy(Limits()), fixed=1.0, per_cost=0.01)
    budget = policy.budget.limit(1)
    for batch in all_batches(policy, pool_of(*np.random.default_rng(0).integers(1, 300, 2000))):
        assert len(batch) == 1 or max(batch) * len(batch) <= budget


def test_waits_for_company_but_not_for_long() -> None:
    policy = BatchPolicy(Limits())
    wait = policy.next(pool_of(1.0), 0.0, more_coming=True)
    assert isinstance(wait, float)
    assert 0 < wait <= 0.05
    assert isinstance(policy.next(pool_of(1.0), wait, more_coming=True), Cut)


def test_an_idle_device_waits_less_than_a_busy_one() -> None:
    policy = taught(BatchPolicy(Limits()), fixed=1.0, per_cost=0.01)
    busy, idle = (policy.next(pool_of(1.0), 0.0, more_coming=True, idle=idle) for idle in (False, True))
    assert isinstance(busy, float)
    assert isinstance(idle, float)
    assert 0 < idle < busy


def test_goes_at_once_when_nobody_else_is_coming() -> None:
    assert isinstance(BatchPolicy(Limits()).next(pool_of(1.0), 0.0, more_coming=False), Cut)


def test_max_batch_duration_bounds_the_wait() -> None:
    policy = BatchPolicy(Limits.from_beam({"min_batch_size": 100, "max_batch_duration_secs": 7}))
    pool = pool_of(1.0, now=10.0)
    assert policy.next(pool, 11.0, more_coming=True) == 6
    assert policy.next(pool, 17.0, more_coming=True) == Cut(0, 1, 100.0)


def test_who_waited_too_long_goes_first_whatever_its_length() -> None:
    policy = BatchPolicy(Limits.from_beam({"max_batch_duration_secs": 5, "max_batch_size": 2}))
    pool = pool_of(2.0, now=0.0)
    pool.put(2, QueuedExamples.new(np.array([100.0] * 8), None, 4.9))
    cut = policy.next(pool, 5.0, more_coming=True)
    assert isinstance(cut, Cut)
    assert pool.take(cut.start, cut.count).costs.tolist() == [2.0]


def test_a_minimum_is_waited_for_until_the_bundle_ends() -> None:
    policy = BatchPolicy(Limits.from_beam({"min_batch_size": 100}))
    assert policy.next(pool_of(*[1.0] * 99), 1e9, more_coming=True) == math.inf
    assert policy.next(pool_of(*[1.0] * 99), 0.0, more_coming=False) == Cut(0, 99, 100.0)
    assert policy.next(pool_of(*[1.0] * 120), 0.0, more_coming=True) == Cut(0, 100, 100.0)


def test_a_minimum_is_waited_for_at_most_as_long_as_a_stream_allows() -> None:
    policy = BatchPolicy(Limits.from_beam({"min_batch_size": 100}), longest_wait=0.1)
    pool = pool_of(*[1.0] * 99)
    left = policy.next(pool, 0.0, more_coming=True, idle=True)
    assert left == pytest.approx(0.1)
    assert policy.next(pool, 0.1, more_coming=True) == Cut(0, 99, 100.0)
    own = BatchPolicy(Limits.from_beam({"min_batch_size": 100, "max_batch_duration_secs": 2}), longest_wait=0.1)
    assert own.next(pool, 0.1, more_coming=True) == pytest.approx(1.9)


def test_maximum_count_and_weight() -> None:
    batches = all_batches(BatchPolicy(Limits.from_beam({"max_batch_size": 3})), pool_of(*[1.0] * 7))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    weighed = Limits.from_beam({"max_batch_weight": 10, "element_size_fn": len})
    batches = all_batches(BatchPolicy(weighed), pool_of(*[1.0] * 6, weights=[4, 4, 4, 11, 1, 1]))
    assert [len(batch) for batch in batches] == [2, 1, 1, 2]


def test_lengths_on_two_sides_of_a_boundary_never_meet() -> None:
    limits = Limits.from_beam({"length_fn": len, "bucket_boundaries": [10, 50]})
    policy = taught(BatchPolicy(limits), fixed=100.0, per_cost=0.001)
    assert all_batches(policy, pool_of(9, 10, 49, 50, 51, 1)) == [[51, 50], [49, 10], [9, 1]]


def test_target_duration_bounds_a_batch() -> None:
    policy = taught(BatchPolicy(Limits.from_beam({"target_batch_duration_secs": 2})), fixed=1.0, per_cost=0.01)
    assert policy.budget.limit(1) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_boundaries": [1]}, "batch_length_fn"),
        ({"max_batch_weight": 1}, "element_size_fn"),
        ({"min_batch_size": 5, "max_batch_size": 4}, "found min_batch_size=5, expected at most max_batch_size=4"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits.from_beam(settings)


def test_settings_without_meaning_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_settings_without_meaning({"variance": 0.25, "max_batch_size": 8})
    assert "variance=0.25 has no effect" in caplog.text
    assert "max_batch_size" not in caplog.text


def test_timing_is_not_bent_by_disturbed_batches() -> None:
    timing = CostLine()
    rng = np.random.default_rng(1)
    for number in range(48):
        cost = float(rng.integers(10, 1000))
        timing.observe(cost, (0.02 + 0.0004 * cost) * (10 if number % 6 == 0 else 1))
    assert timing.fixed == pytest.approx(0.02, rel=0.2)
    assert timing.per_unit == pytest.approx(0.0004, rel=0.2)


def test_budget_grows_until_the_fixed_part_is_small_and_no_further() -> None:
    policy = BatchPolicy(Limits())
    sizes: list[int] = []
    for _ in range(20):
        pool = pool_of(*[1.0] * 5000)
        cut = policy.next(pool, 0.0, more_coming=True)
        assert isinstance(cut, Cut)
        sizes.append(cut.count)
        policy.budget.succeeded(cut.count, 50e-6 + 1e-6 * cut.count)
    assert sizes[:4] == [16, 32, 64, 128]
    assert sizes[-1] == pytest.approx(950, rel=0.01)
    assert policy.budget.settled


@pytest.mark.parametrize("memory", [10, 100, 999, 5000])
def test_out_of_memory_settles_below_what_fits(memory: int) -> None:
    budget = Budget(Limits(), CostLine())
    failures = 0
    for _ in range(100):
        cost = budget.limit(1.0)
        if cost > memory:
            failures += 1
            budget.out_of_memory(cost, 2)
        else:
            budget.succeeded(cost, 1.0 + 0.001 * cost)
    assert memory / 4 <= budget.limit(1.0) <= memory
    assert failures <= 4
    assert budget.settled


def test_one_example_may_always_go() -> None:
    budget = Budget(Limits(), CostLine())
    budget.limit(1.0)
    budget.out_of_memory(4.0, 2)
    assert budget.limit(50.0) == 50.0


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 100), st.integers(1, 9))
def test_small_pools_are_cut_as_well_as_can_be(lengths: list[int], overhead: int, most: int) -> None:
    costs = np.sort(np.array(lengths, float))[::-1]
    budget = most * costs[0]

    def time_of(cuts: list[int]) -> float:
        ends = [*cuts, len(costs)]
        return sum(overhead + costs[a] * (b - a) for a, b in zip([0, *cuts], ends, strict=True))

    def fits(cuts: list[int]) -> bool:
        return all(
            b - a == 1 or costs[a] * (b - a) <= budget for a, b in zip([0, *cuts], [*cuts, len(costs)], strict=True)
        )

    inner = len(costs) - 1
    partitions = [[i + 1 for i in range(inner) if chosen >> i & 1] for chosen in range(2**inner)]
    best = min(time_of(cuts) for cuts in partitions if fits(cuts))
    first = first_cut(costs, most, overhead)
    begun_so = [cuts for cuts in partitions if fits(cuts) and ([*cuts, len(costs)][0] == first)]
    assert min(time_of(cuts) for cuts in begun_so) == pytest.approx(best)


@pytest.mark.parametrize("size", [300, 3000])
def test_large_pools_are_cut_nearly_as_well(size: int) -> None:
    costs = np.sort(np.clip(np.exp(np.random.default_rng(0).normal(2.5, 0.65, size)).round(), 3, 256))[::-1]
    overhead, budget = 55.0, 1045.0
    padded, batches, rest = 0.0, 0, costs
    while len(rest):
        count = first_cut(rest, max(1, int(budget // rest[0])), overhead)
        padded, batches, rest = padded + rest[0] * count, batches + 1, rest[count:]
    assert 1 - costs.sum() / padded < 0.10
    assert padded + overhead * batches < 1.35 * costs.sum()


def test_a_pool_that_is_refilled_is_batched_as_well_as_one_that_is_not() -> None:
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(3.5, 0.7, 20_000)).round(), 3, 512)
    policy, pool, now, padded, batches = BatchPolicy(Limits()), Backlog(), 0.0, 0.0, 0
    blocks = [lengths[start : start + 256] for start in range(0, len(lengths), 256)]
    while blocks or len(pool):
        while blocks and len(pool) < 4096:
            pool.put(len(blocks), QueuedExamples.new(blocks.pop(), None, now))
        cut = policy.next(pool, now, more_coming=False)
        assert isinstance(cut, Cut)
        cost = float(pool.take(cut.start, cut.count).costs[0] * cut.count)
        seconds = 0.002 + 0.00002 * cost
        policy.budget.succeeded(cost, seconds)
        now, padded, batches = now + seconds, padded + cost, batches + 1
    assert 1 - lengths.sum() / padded < 0.03
    assert len(lengths) / batches > 50


def test_pool_forgets_a_submission() -> None:
    pool = pool_of(1, 2, 3)
    pool.put(2, QueuedExamples.new(np.array([9.0, 8.0]), None, 0.0))
    pool.drop({1})
    assert pool.take(0, 5).costs.tolist() == [9, 8]


class TestArrivals:
    """The examples of a model that does not pad."""

    def queue(self, *costs: list[float]) -> Arrivals:
        arrivals = Arrivals()
        for owner, each in enumerate(costs):
            arrivals.put(owner, QueuedExamples.new(np.array(each), None, float(owner)))
        return arrivals

    def test_a_batch_is_so_many_tokens_in_order_of_arrival(self) -> None:
        arrivals = self.queue([5, 1, 7], [2, 2, 9])
        policy = BatchPolicy(Limits())
        policy.budget.succeeded(0.0, 1.0)
        limit = policy.budget.limit(1.0)  # sixteen of the first example's cost

        cut = policy.next(arrivals, now=9.0, more_coming=False)

        assert limit == 16.0
        assert isinstance(cut, Cut)
        assert cut == Cut(0, 4, 16.0)  # 5 + 1 + 7 + 2 is within it, and 2 more are not
        taken = arrivals.take(cut.start, cut.count)
        assert taken.costs.tolist() == [5, 1, 7, 2]
        assert taken.owners.tolist() == [0, 0, 0, 1]
        assert taken.places.tolist() == [0, 1, 2, 0]
        assert (len(arrivals), arrivals.total, arrivals.oldest()) == (2, 11.0, 1.0)

    @pytest.mark.parametrize(
        ("budget", "most", "weight", "expected"),
        [(1.0, 9, math.inf, 1), (13.0, 9, math.inf, 3), (100.0, 9, math.inf, 6), (100.0, 4, math.inf, 4)],
    )
    def test_limits(self, budget: float, most: int, weight: float, expected: int) -> None:
        assert self.queue([5, 1, 7], [2, 2, 9]).fitting(budget, most, weight) == expected

    def test_weights_limit_a_batch_too(self) -> None:
        arrivals = Arrivals()
        arrivals.put(0, QueuedExamples.new(np.ones(3), np.array([2.0, 2.0, 2.0]), 0.0))
        assert arrivals.fitting(100.0, 100, 4.0) == 2
        assert arrivals.total_weight == 6.0

    def test_dropping_a_submission(self) -> None:
        arrivals = self.queue([5, 1], [2], [4, 4])
        arrivals.drop({0, 2})
        assert (len(arrivals), arrivals.total, arrivals.costs.tolist()) == (1, 2.0, [2.0])
        arrivals.take(0, 5)
        assert (len(arrivals), arrivals.total) == (0, 0.0)

    @given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5), st.integers(1, 30))
    def test_every_example_is_taken_once(self, costs: list[list[int]], count: int) -> None:
        backlog = Backlog()
        for owner, each in enumerate(costs):
            backlog.put(owner, QueuedExamples.new(np.array(each, float), None, float(owner)))
        arrivals = backlog.in_order_of_arrival()
        found: list[tuple[int, int]] = []
        while len(arrivals):
            taken = arrivals.take(0, count)
            found += zip(taken.owners.tolist(), taken.places.tolist(), strict=True)
        assert sorted(found) == [(owner, place) for owner, each in enumerate(costs) for place in range(len(each))]
        assert [owner for owner, _ in found] == sorted(owner for owner, _ in found)
