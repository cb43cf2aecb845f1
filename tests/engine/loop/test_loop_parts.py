"""Unit tests of parts of the loop: bundle sizes, timers, holds, failures."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from apache_beam.metrics import monitoring_infos

from luminosity.engine.data.event_time import MAX, Holds
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.timers import TimerStore
from luminosity.engine.data.world import THIS_MACHINE, WallClock
from luminosity.engine.loop import scheduler
from luminosity.engine.loop.buffers import BufferRun, Outflow
from luminosity.engine.loop.bundle import Bundle, Deadlines
from luminosity.engine.loop.dispatch import rank
from luminosity.engine.loop.failures import Failures
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.loop.sizing import BundleSize, SourceTurns
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.splits import hasten
from luminosity.engine.plan.codecs import TimerRecord
from luminosity.engine.workers.failure import Failure
from luminosity.engine.workers.sdk.channel import TimerStream
from luminosity.errors import Fix, StepFailed

_FAMILY = ("step", "timer")


def timer(key: bytes, fire: int, tag: bytes = b"", is_clear: bool = False) -> TimerRecord:
    return TimerRecord(key + tag, key, is_clear, fire, fire, b"%s at %d" % (key, fire))


def fired(store: TimerStore, now: int) -> list[bytes]:
    return [t.encoded for timers in store.take_due({_FAMILY: now}, limit=100).values() for t in timers]


@pytest.mark.parametrize(
    ("is_stream", "waited_s", "expected"),
    [
        (True, 0.1, ["first", "late", "middle", "source"]),
        (True, 5.0, ["source", "first", "late", "middle"]),  # the timers of a late stage may never leave a worker free
        (False, 5.0, ["first", "late", "middle", "source"]),
    ],
)
def test_late_stages_get_workers_first_but_starve_no_stage_of_a_stream(
    is_stream: bool, waited_s: float, expected: list[str]
) -> None:
    plan = SimpleNamespace(has_endless_input=is_stream)
    latest_first = [
        cast(Any, SimpleNamespace(id=name, plan=plan, has_begun=name != "first"))
        for name in ("late", "middle", "first", "source")
    ]
    order = rank(latest_first, {"source": 100.0, "middle": 100.0 + waited_s}, 100.0 + waited_s)
    assert [stage.id for stage in order] == expected


def test_a_stage_with_bounded_input_does_not_starve_beside_a_stream() -> None:
    """If both meet in a Flatten, the watermark of the stream would wait for it, too."""
    latest_first = [
        cast(Any, SimpleNamespace(id=name, plan=SimpleNamespace(has_endless_input=name == "stream"), has_begun=True))
        for name in ("stream", "bounded")
    ]
    assert [stage.id for stage in rank(latest_first, {"bounded": 100.0}, 100.1)] == ["stream", "bounded"]
    assert [stage.id for stage in rank(latest_first, {"bounded": 100.0}, 105.0)] == ["bounded", "stream"]


class _FakeBundle(SimpleNamespace):
    split_at = Bundle.split_at


def _running(turns: SourceTurns, queued: int, patient: int, slots: int = 4) -> list[Any]:
    """Return the attempts of a source whose slots are all taken, after they were asked to make room."""
    plan = SimpleNamespace(is_splittable=True, can_cut_elements=True)
    stage = cast(Any, SimpleNamespace(turns=turns, queued=queued, plan=plan, takes_all=False))
    attempts = [
        SimpleNamespace(
            started_at=100.0, split_at=101.6, splits_requested=0, is_patient=number < patient, deadlines=Deadlines()
        )
        for number in range(slots)
    ]
    bundles = [_FakeBundle(stage=stage, attempt=a, search=None, inputs={"read": []}, count=1) for a in attempts]
    workers = {0: SimpleNamespace(bundles=dict(enumerate(bundles)))}
    stage.pool = SimpleNamespace(workers=workers)
    hasten(stage)
    return attempts


def test_only_the_last_deadline_of_an_attempt_that_still_runs_counts() -> None:
    deadlines = Deadlines()
    attempts = [SimpleNamespace(split_at=math.inf, response=None, number=number) for number in range(300)]
    bundles = [SimpleNamespace(attempt=attempt) for attempt in attempts]
    for at in (30.0, 20.0, 10.0):
        for bundle, attempt in zip(bundles, attempts, strict=True):
            deadlines.set(cast(Any, bundle), cast(Any, attempt), at + attempt.number)
    attempts[0].response = object()
    bundles[1].attempt = None  # it was given up
    attempts[2].split_at = math.inf
    assert deadlines.next() == 13.0
    assert [attempt.number for _, attempt in cast(Any, deadlines.take_due(15.5))] == [3, 4, 5]
    assert deadlines.next() == 16.0
    assert len([*deadlines.take_due(math.nextafter(math.inf, 0))]) == 294
    assert deadlines.next() == math.inf


def test_restrictions_of_a_source_take_turns_if_there_are_more_than_slots() -> None:
    """Those without records would otherwise keep the slots for as long as a source may be slow to start."""
    turns = SourceTurns()
    # As long as no record has come, all may be slow to start.
    assert {attempt.split_at for attempt in _running(turns, queued=26, patient=0)} == {101.6}
    turns.started(0.01)
    few, many = _running(turns, queued=4, patient=1), _running(turns, queued=26, patient=0)
    assert few[0].split_at == 101.6  # this one may start slowly
    assert few[1].split_at == pytest.approx(100.25)
    assert many[1].split_at == pytest.approx(100.0625)
    assert sum(turns.next_is_patient() for _ in range(170)) == 10


def test_a_source_whose_workers_are_all_lost_has_no_turns() -> None:
    """Its bundles wait to be retried: they neither run nor are queued."""
    turns = SourceTurns()
    turns.started(0.01)
    assert _running(turns, queued=0, patient=0, slots=0) == []


def test_bundles_of_a_stream_take_longer_if_there_is_no_hurry() -> None:
    for kind, usual in (("source", 0.025), ("stream", 0.05)):
        size = BundleSize(kind)
        assert size.target_seconds(0.0) == usual
        size.no_hurry(0.25)
        assert size.target_seconds(0.0) == 0.25


def test_a_short_input_of_unknown_speed_stays_whole() -> None:
    assert BundleSize().next(0.0, queued=35, slots=2) == 35


def test_the_first_bundle_has_a_limit() -> None:
    assert BundleSize().next(0.0, queued=10**9, slots=1) == 1000


def test_a_step_that_begins_all_its_elements_gets_few_groups_at_first() -> None:
    assert BundleSize(sorts=True).next(0.0, queued=100, slots=2) == 50
    size = BundleSize(sorts=True)
    size.expect_large_elements()
    assert size.next(0.0, queued=100, slots=2) == 2


def test_bundles_grow_to_a_second_of_work() -> None:
    size = BundleSize()
    now = 0.0
    sizes: list[int] = []
    for _ in range(200):
        elements = size.next(now, queued=10**9, slots=1)
        # As the loop does, end the bundle at its deadline.
        elements = min(elements, int(size.deadline_seconds(now) / 0.001))
        sizes.append(elements)
        size.learn(elements, elements * 0.001)
        now += elements * 0.001
    assert sizes[0] <= 50
    assert 900 <= sizes[-1] <= 1000


def test_bundles_grow_until_a_fixed_price_is_small() -> None:
    size = BundleSize()
    now = seconds = 0.0
    for _ in range(20):
        elements = size.next(now, queued=10**9, slots=1)
        elements = min(elements, max(1, int((size.deadline_seconds(now) - 0.6) / 0.001)))
        size.speed.had_begun(elements)
        seconds = 0.6 + elements * 0.001
        size.learn(elements, seconds)
        now += seconds
    assert 0.6 / seconds < 0.08


def test_spread_in_the_cost_of_elements_is_no_fixed_price() -> None:
    size, chance = BundleSize(), random.Random(1)
    now = longest = 0.0
    for _ in range(300):
        elements, seconds, deadline = 0, 0.002, size.deadline_seconds(now)
        for _ in range(size.next(now, queued=10**9, slots=1)):
            elements, seconds = elements + 1, seconds + 0.02 * chance.lognormvariate(-0.125, 0.5)
            if seconds > deadline:
                break
        size.speed.had_begun(elements)
        size.learn(elements, seconds, was_cut=seconds > deadline)
        longest, now = max(longest, seconds), now + seconds
    assert longest < 3.0


def test_a_step_that_sorts_gets_more_than_one_element_however_high_its_fixed_price() -> None:
    size, now, elements = BundleSize(sorts=True), 0.0, 0
    for _ in range(10):
        elements = size.next(now, queued=10**6, slots=1)
        size.learn(elements, 6.0 + 0.01 * elements)
        now += 6.0 + 0.01 * elements
    assert elements >= 500


def test_a_sink_with_a_model_shares_its_first_elements() -> None:
    """Idle workers can't take what a step that sorts its bundle has begun."""
    size = BundleSize("sink", sorts=True)
    size.expect_large_elements()
    assert size.next(0.0, queued=13, slots=2) == 7
    assert size.next(0.0, queued=6, slots=1) == 6
    assert BundleSize("sink").next(0.0, queued=13, slots=2) == 13


def test_a_sinks_files_do_not_shrink_because_they_take_long_to_close() -> None:
    size, now, elements = BundleSize("sink"), 0.0, 0
    for _ in range(10):
        elements = size.next(now, queued=8_000, slots=1)
        size.learn(elements, 1.2 + 0.0005 * elements)
        now += 1.2 + 0.0005 * elements
    assert elements >= 1000


def test_a_slow_element_is_a_bundle() -> None:
    size = BundleSize()
    now, taken, elements = 0.0, 0, 0
    for _ in range(10):
        taken = size.next(now, queued=64, slots=1)
        elements = min(taken, math.ceil(size.deadline_seconds(now) / 5.0))
        size.speed.had_begun(elements)
        size.learn(elements, 5.0 * elements)
        now += 5.0 * elements
    assert elements == 1
    assert taken == 2


def test_bundles_hold_whole_batches() -> None:
    size = BundleSize()
    size.next(0.0, 320, 2)
    size.speed.had_begun(16)
    assert size.next(0.1, queued=300, slots=2) == 160
    size.learn(16, 0.6)
    assert size.next(1.0, queued=40, slots=2) % 16 == 0


def test_a_step_that_begins_its_bundle_at_once_gets_a_share_of_the_first_input() -> None:
    size = BundleSize(sorts=True)
    assert size.next(0.0, queued=64, slots=2) == 32
    assert size.next(0.0, queued=10**6, slots=2) == 64
    of_blocks = BundleSize(sorts=True)
    of_blocks.expect_large_elements()
    assert of_blocks.next(0.0, queued=10**6, slots=2) == 2


def test_what_is_left_is_shared_among_workers() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for _ in range(20):
        size.learn(64, 0.64)
    assert size.next(1000.0, queued=10, slots=2) == 5


def test_the_last_bundles_get_shorter_while_other_stages_wait_for_them() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for elements in (16, 32, 64, 64):
        size.learn(elements, 0.01 * elements)
    left, sizes = 64, []
    while left:
        sizes.append(min(left, size.next(1000.0, queued=left, slots=1, is_ending=True)))
        left -= sizes[-1]
    assert sizes[0] == 32
    assert sizes[-1] <= 4


def test_little_work_is_not_worth_sharing() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for _ in range(20):
        size.learn(1000, 0.001)
    assert size.next(1000.0, queued=100, slots=4) >= 100


def test_idle_workers_take_work_while_the_speed_is_unknown_or_much_is_left() -> None:
    size = BundleSize()
    assert size.worth_taking(2, 0.03, is_cold=True)
    for elements in (10, 20, 40, 80):
        size.learn(elements, 0.5 + 0.01 * elements)
    assert size.worth_taking(1000, 1.0, is_cold=False)
    assert not size.worth_taking(100, 1.0, is_cold=False)  # a bundle of its own would cost as much
    size.learn(10, 20.0, is_warm=False)
    assert not size.worth_taking(1000, 1.0, is_cold=True)


def test_a_lost_worker_makes_bundles_smaller() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for _ in range(20):
        size.learn(64, 0.00064)
    before = size.next(1000.0, queued=10**6, slots=1)
    size.shrink()
    assert size.next(1000.0, queued=10**6, slots=1) < before


def test_a_sinks_first_bundle_is_all_there_is_unless_that_is_a_lot() -> None:
    assert BundleSize("sink").next(0.0, queued=8, slots=2, queued_size=1e6) == 8
    assert BundleSize("sink").next(0.0, queued=8, slots=2, queued_size=1e8) == 4


def test_a_bundle_with_output_of_unknown_size_stops_long_before_the_queue_is_full() -> None:
    queue = SimpleNamespace(grouping=None, limit=64, uncommitted_bytes=0, full_reader=lambda: None)
    outflow = Outflow([(b"queue", cast(BufferRun, queue))])
    first = outflow.begin(elements=100)
    assert [first.add(b"queue", size) for size in (4, 4, 1)] == [False, False, True]
    first.end()
    outflow.learn(first, elements=9)
    second = outflow.begin(elements=20)
    assert not second.add(b"queue", 20)  # as expected


def test_a_loop_that_was_stopped_beyond_its_deadline_does_not_take_a_buffer_for_done() -> None:
    """A TestStream plays its next event when no buffer has work."""
    pending = [b"first", b"second"]
    grouping = SimpleNamespace(pending=pending, absorb=pending.pop, is_exhausted=False, is_split=False)
    grouping.next_block = lambda: setattr(grouping, "is_exhausted", True)
    buffer = BufferRun(
        cast(Grouping, grouping), 64, cast(SpillPolicy, SimpleNamespace(check=lambda: None)), WallClock()
    )
    has_passed = time.monotonic() - 1
    assert [buffer.pump(has_passed) for _ in range(4)] == [True, True, True, False]
    assert pending == []


def test_a_timer_fires_when_its_time_has_come_and_once() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", 10), timer(b"b", 20)])
    assert fired(store, 9) == []
    assert fired(store, 10) == [b"a at 10"]
    assert fired(store, 30) == [b"b at 20"]
    assert len(store) == 0
    assert store.holds.minimum == MAX


def test_a_later_bundle_replaces_and_clears_timers() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", 10), timer(b"b", 10)])
    store.apply(_FAMILY, [timer(b"a", 50), timer(b"b", 0, is_clear=True)])
    assert fired(store, 40) == []
    assert store.holds.minimum == 50
    assert fired(store, 50) == [b"a at 50"]


def test_a_keys_later_timer_waits_for_what_its_earlier_one_does() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", 20, tag=b"2"), timer(b"a", 10, tag=b"1"), timer(b"b", 15)])
    assert fired(store, 100) == [b"a at 10", b"b at 15"]
    assert fired(store, 100) == [b"a at 20"]


def test_setting_a_timer_again_leaves_one_entry() -> None:
    store = TimerStore()
    for number in range(20_000):
        store.apply(_FAMILY, [timer(b"a", 10), timer(b"b", 10**6 - number)])
    assert len(store) == 2
    assert store.entries < 2000
    assert fired(store, 9) == []
    assert fired(store, 10**6) == [b"a at 10", b"b at 980001"]
    assert fired(store, 10**7) == []


def test_clearing_timers_leaves_nothing_behind() -> None:
    store = TimerStore()
    for number in range(10):
        timers = [timer(b"%d" % key, 10 + number, tag=b"%d" % number) for key in range(1000)]
        store.apply(_FAMILY, timers)
        store.note_windows(_FAMILY, timers)
        cleared = [timer(b"%d" % key, 0, tag=b"%d" % number, is_clear=True) for key in range(1000)]
        store.apply(_FAMILY, cleared)
        store.note_windows(_FAMILY, cleared)
    assert len(store) == 0
    assert store.entries <= 1001  # in the heap of times, and one window
    assert store.holds.minimum == MAX
    assert store.drop_expired(100) == 0
    assert store.entries <= 1000


def test_timers_of_expired_windows_are_dropped_some_at_a_time() -> None:
    store = TimerStore()
    timers = [timer(b"%d" % key, 10**9) for key in range(1000)]
    store.apply(_FAMILY, timers)
    store.note_windows(_FAMILY, timers)
    assert [store.drop_expired(1, limit=400) for _ in range(4)] == [400, 400, 200, 0]
    assert (len(store), store.next_fire(_FAMILY), store.holds.minimum) == (0, None, MAX)


def test_many_later_timers_of_a_key_do_not_hide_other_keys_for_good() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", n, tag=b"%d" % n) for n in range(1000)])
    store.apply(_FAMILY, [timer(b"b", 500)])
    found: list[bytes] = []
    bundles = 0
    while due := fired(store, 1000):
        found += due
        bundles += 1
    assert [entry for entry in found if entry.startswith(b"a")] == [b"a at %d" % n for n in range(1000)]
    assert found.count(b"b at 500") == 1
    assert bundles == 1000
    assert store.holds.minimum == MAX


def test_holds_are_exact_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity.engine.data.event_time._REMOVED_AT_LEAST", 10)
    chance = random.Random(1)
    holds, expected = Holds(), list[int]()
    for _ in range(5000):
        if expected and chance.random() < 0.5:
            holds.remove(expected.pop(chance.randrange(len(expected))))
        else:
            expected.append(chance.randrange(50))
            holds.add(expected[-1])
        assert holds.minimum == min(expected, default=MAX)
    assert len(holds._heap) < 200  # pyright: ignore[reportPrivateUsage]


def test_a_worker_sends_the_last_of_equal_timers() -> None:
    sent: list[bytes] = []
    stream = TimerStream(sent.append, lambda: sent.append(b"end"))
    for record in (b"a1", b"b1", b"a2", b"a1", b"a1"):
        stream.write(record)
        stream.maybe_flush()
    stream.close()
    assert sent == [b"b1a2a1", b"end"]


@pytest.mark.parametrize(
    ("fix", "location", "is_shown"),
    [
        (Fix("filter the rows"), "", False),  # ours, raised on purpose: the frames would be ours and Beam's
        (Fix("filter the rows"), "mine.py:3", True),
        (None, "", True),  # perhaps a defect of ours
    ],
)
def test_a_traceback_without_the_users_code_is_left_out_if_the_error_has_a_remedy(
    fix: Fix | None, location: str, is_shown: bool
) -> None:
    failure = Failure("TableError: a null", "Traceback: frames", "Enrich", location, "row 4", fix=fix, may_pass=False)
    bundle: Any = SimpleNamespace(
        failures=0, search=None, pieces=1, stage=SimpleNamespace(plan=SimpleNamespace(partitions=0))
    )
    codecs: Any = None
    with pytest.raises(StepFailed) as caught:
        Failures(codecs).after_exception(bundle, failure, None)
    message = caught.value.message
    assert ("Traceback: frames" in message) == is_shown
    assert message.startswith(caught.value.summary)
    assert "step 'Enrich' failed: TableError: a null" in caught.value.summary
    assert "element: row 4" in caught.value.summary


def test_metrics_of_a_bundle_are_merged_later_but_seen_at_once() -> None:
    metrics = RunMetrics()
    for number in range(1000):
        metrics.add("stage", [monitoring_infos.int64_user_counter("mine", "words", number, ptransform="step")])
    assert metrics.counters("stage", ["words"]) == {"step": {"mine": {"words": sum(range(1000))}}}
    assert not metrics.merge_one()
    metrics.add("stage", [monitoring_infos.int64_user_counter("mine", "words", 1, ptransform="step")])
    assert metrics.merge_one()
    assert not metrics.merge_one()
    ((info,),) = metrics.by_stage().values()
    assert monitoring_infos.extract_counter_value(info) == sum(range(1000)) + 1


def test_metrics_that_wait_to_be_merged_are_few() -> None:
    metrics = RunMetrics()
    for _ in range(1000):
        metrics.add("stage", [monitoring_infos.int64_user_counter("mine", "words", 1, ptransform="step")])
    left = 0
    while metrics.merge_one():
        left += 1
    assert 0 < left <= 16


@pytest.mark.parametrize(("handle_s", "expected"), [(0.0, [1, 2, 3]), (60.0, [3, 3, 3])])
def test_bundles_start_while_messages_wait(
    monkeypatch: pytest.MonkeyPatch, handle_s: float, expected: list[int]
) -> None:
    handled: list[object] = []
    monkeypatch.setattr(scheduler, "_HANDLE_S", handle_s)
    monkeypatch.setattr(Scheduler, "_handle", lambda _, message: handled.append(message))
    parts = SimpleNamespace(
        world=THIS_MACHINE,
        clock=THIS_MACHINE.clock,
        stages=[],
        all_stages=list,
        elastic=None,
        buffers={},
        pools=[],
        failures=SimpleNamespace(element=None),
        config=SimpleNamespace(element_timeout=None),
    )
    loop = Scheduler(cast(Any, parts), cast(Any, SimpleNamespace(bundle_stalled=None)))
    for _ in range(3):
        loop.cancel()
    counts: list[int] = []
    for _ in range(3):
        loop._handle_messages(0.0)  # pyright: ignore[reportPrivateUsage]
        counts.append(len(handled))
    assert counts == expected
