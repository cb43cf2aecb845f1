"""Chooses how many elements a stage's next bundle gets, from how long earlier ones took and how much work is left.

``StageRun`` in ``stage.py`` asks. It takes all elements where a stage must, and fewer if they are too large.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from luminosity._shared.cost_line import CostLine
from luminosity.engine.data.blocks import Block
from luminosity.engine.plan.codecs import ElementCodec

__all__ = ["SINK_ELEMENTS", "BundleSize", "Gathering", "Kind", "SizedWork", "SourceTurns", "Speed"]

Kind = Literal["batch", "stream", "source", "sink", "source and sink"]
"""What a stage does. "source" is the source of a stream: the source of a batch is "batch", as any other of its stages.

A sink writes a file per bundle, in batch and in streams.
"""

SINK_ELEMENTS = 1000  # worth a file, as long as the sink's speed is unknown

_SHORTEST_S = 0.02  # shorter bundles cost more in messages than in work
_LONGEST_S = 1.0  # longer bundles gain nothing, and a retry repeats more
# A bundle takes at most this part of the time that its stage has run. The end of the run is then delayed by no more
# than that, and the number of bundles grows with the logarithm of the run's length.
_PART_OF_ELAPSED = 0.05
# A step that sorts its bundle gains more from a long bundle than the end of the run loses.
_LONGEST_SORTED_S = 5.0
_PART_OF_ELAPSED_SORTED = 0.2
_ENDLESS_S = 0.05  # of a bundle in a stream: each element waits for the end of its bundle
_SOURCE_S = 0.025  # of a source's bundle in a stream, from its first output on
_ROUND_S = 0.5  # in which each of a source's restrictions gets a slot, if they are more than slots
_SHORTEST_TURN_S = 0.05  # of a restriction in a slot: with less, most of the time goes into bundles without records
_PATIENT_ONE_IN = 17  # turns is as long as if no restriction waited: a reader may need long to start
_REMEMBERED_STARTS = 16  # bundles: enough that some of them had a record to emit at once
_FIXED_PART = 0.05  # of a bundle's time: if a bundle has a fixed price, bundles grow until it is no more than this
_FIXED_PART_SORTED = 0.02  # of a longer bundle
_FIXED_PART_ENDLESS = 0.5  # of a bundle in a stream: it should be early rather than cheap
_FIXED_PART_OF_SINK = 0.2  # a file is opened and closed, and should not be late
_LONGEST_FIRST_OF_SINK_S = 5.0  # until it is known how long a file takes to open
_LONGEST_FIXED_S = 8.0  # or four times a higher price: a retry repeats the whole bundle, and the price may be chance
_REMEMBERED_SPLITS = 4  # enough to tell batches from chance
_GROWTH = 8  # a bundle has at most 8 times the elements of the one before, whose speed may have been luck
_REMEMBERED = 16  # bundles: enough to separate a fixed price from noise, few enough to follow data that changes
_FIRST_ELEMENTS = 1000  # while the speed is unknown: a deadline ends the bundle if that is too much
_FIRST_SORTED_ELEMENTS = 64  # the same for a step that begins all elements of a bundle at once: no deadline helps
_FIRST_SORTED_BLOCKS = 2  # if its elements are blocks of rows
_FEW_ELEMENTS = 2048  # bundles up to this size end by their deadline, larger ones by their number of elements
_SHORTEST_DEADLINE_S = 0.05  # below this, timing noise would cause splits
_WORTH_SEVERAL_FILES = 16_000_000  # bytes of a sink's first input that are worth one file per slot
_MOST_PATIENCE = 64  # times the target: also a slow start of a source fits

_SINK_BYTES = 8 << 20  # enough for a file of a useful size
_GATHERING_S = 5.0  # how long a sink waits for more input, at least: files of less are too many
_MOST_GATHERING_S = 30.0  # and at most, so that output appears
_GATHERING_IN_STREAM_S = 1.0  # how long a sink in a stream waits: its windows are late by that much

_SIZE = struct.Struct(">d")  # the last bytes of an element: the size that its restriction provider reported
_MOST_ELEMENTS = 10_000  # decoding more would slow the loop down


class Speed:
    """How long the bundles of a stage take, learned from those that have ended."""

    def __init__(self) -> None:
        self._line = CostLine(_REMEMBERED, follows_time=True)
        self._pace = 1.0  # how long recent bundles took, compared with the line
        self._cold: tuple[int, float] | None = None  # elements and seconds of a bundle in a worker without the stage
        self._begun: deque[int] = deque(maxlen=_REMEMBERED_SPLITS)
        self.last = 0  # elements of the last bundle, or half of those of larger ones before
        self.last_seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the fixed price of a bundle can be told from the price of its elements."""
        return self._line.known

    @property
    def is_observed(self) -> bool:
        """Whether a bundle has ended."""
        return bool(self._line.observed)

    def price(self) -> tuple[float, float]:
        """Return the fixed seconds of a bundle, and the seconds per element, at the pace of recent bundles."""
        # Half-known is not known: a line through noise has a fixed part by chance.
        fixed = max(0.0, self._line.fixed - self._line.noise) if self._line.known else 0.0
        return self._pace * fixed, max(self._pace * self._line.per_unit, 1e-7)

    def seconds_left(self, elements: int, elapsed: float) -> float | None:
        """Return how long a bundle of ``elements`` that has run for ``elapsed`` will run on, or None if unknown."""
        return self._pace * self._line.seconds(elements) - elapsed if self._line.observed else None

    def setup_seconds(self) -> float:
        """Return how much longer a bundle takes in a worker that has not run the stage before."""
        if self._cold is None:
            return 0.0
        elements, seconds = self._cold
        return max(0.0, seconds - self._line.seconds(elements))

    def learn(self, elements: int, seconds: float, *, is_warm: bool, was_cut: bool) -> None:
        """Learn from a bundle that has ended."""
        if not is_warm:
            self._cold = elements, seconds
            return
        self._line.observe(elements, max(seconds, 1e-7 * elements), was_cut=was_cut)
        ratio = seconds / max(self._line.seconds(elements), 1e-7)
        self._pace = 0.5 * (self._pace + min(4.0, max(0.25, ratio)))
        self.last = max(elements, self.last // 2)
        self.last_seconds = seconds

    def had_begun(self, elements: int) -> None:
        """Note how many elements a bundle had begun when it was split."""
        if elements:
            self._begun.append(elements)

    def whole_batches(self, elements: int) -> int:
        """Round up to whole batches, if a step seems to make batches.

        Such a step is busy with whole batches whenever its bundle is split.
        """
        batch = min(math.gcd(*self._begun) or 1, _FEW_ELEMENTS)
        return math.ceil(elements / batch) * batch


class SourceTurns:
    """How long the restrictions of a source keep their slots while others wait."""

    def __init__(self) -> None:
        self._turns = 0
        self._starts: deque[float] = deque(maxlen=_REMEMBERED_STARTS)

    def started(self, seconds: float) -> None:
        """Note how long a bundle took until its first output."""
        self._starts.append(seconds)

    def next_is_patient(self) -> bool:
        """Return whether the next bundle may run to its deadline even if other restrictions wait."""
        self._turns += 1
        return self._turns % _PATIENT_ONE_IN == 0

    def seconds(self, restrictions: int, slots: int) -> float:
        """Return how long a bundle may run while some of the ``restrictions`` wait for one of the ``slots``.

        As long as no restriction has had output, nothing is known about how long readers need to start.
        """
        if not self._starts:
            return float("inf")
        rounds = math.ceil(restrictions / max(1, slots))
        return max(_SHORTEST_TURN_S, _ROUND_S / rounds, 2 * min(self._starts))


class BundleSize:
    """Chooses the size and the deadline of a stage's bundles.

    The first bundle gets what is queued: a short input stays whole, and so do the batches that a step makes of it.
    Later ones take up to a second of work, or five seconds if a step sorts its bundle, or as long as it takes to make a
    fixed price per bundle small.

    A bundle gets more elements than fit into its time, and is split at its deadline. A step that gathers a batch and
    then computes it spends its time in the batch's last element, so that the split falls between two batches, whose
    size the engine does not know.

    Bundles of a stream take 50 ms, or twice a fixed price per bundle. A bundle of its source is asked to end 25 ms
    after its first output.
    """

    def __init__(self, kind: Kind = "batch", *, sorts: bool = False) -> None:
        self._is_sink = kind.endswith("sink")
        self._is_source = kind.startswith("source")
        self._is_stream = kind == "stream"
        self._sorts = sorts
        self._first_sorted = _FIRST_SORTED_ELEMENTS
        self._longest = _LONGEST_SORTED_S if sorts else _LONGEST_S
        self._started_at: float | None = None
        self._patience = 1
        self._least_in_stream = 0.0
        self.speed = Speed()

    def expect_large_elements(self) -> None:
        """Begin with few elements: each may stand for many, as a group does, and a step that sorts begins all at once.

        Call it before the first bundle.
        """
        self._first_sorted = _FIRST_SORTED_BLOCKS

    def no_hurry(self, seconds: float) -> None:
        """Let bundles of a stream take so long at least: their output waits for something anyway."""
        self._least_in_stream = seconds

    def target_seconds(self, now: float) -> float:
        """Return how long a bundle that starts now should take."""
        longest = _LONGEST_FIXED_S
        if self._is_sink:
            target, part = _LONGEST_S, _FIXED_PART_OF_SINK
        elif self._is_source:
            return max(_SOURCE_S, self._least_in_stream)
        elif self._is_stream:
            target, part = max(_ENDLESS_S, self._least_in_stream), _FIXED_PART_ENDLESS
            if not self.speed.is_known and self.speed.last_seconds <= _ENDLESS_S:
                return target
        elif self._started_at is None:
            return _SHORTEST_S
        else:
            of_elapsed = (_PART_OF_ELAPSED_SORTED if self._sorts else _PART_OF_ELAPSED) * (now - self._started_at)
            target = min(self._longest, max(_SHORTEST_S, of_elapsed))
            part = _FIXED_PART_SORTED if self._sorts else _FIXED_PART
            longest = self._longest if self._sorts else longest
        if not self.speed.is_known:
            # A longer bundle will show how much of the price is fixed. One that can't be cut must not be too long.
            longer = 2 * self.speed.last_seconds
            return max(target, min(longer, self._longest) if self._sorts else longer)
        fixed, _ = self.speed.price()
        return max(target, min(fixed / part, max(longest, 4 * fixed)))

    def next(self, now: float, queued: int, slots: int, queued_size: float = 0.0, *, is_ending: bool = False) -> int:
        """Return the number of elements for the next bundle.

        ``queued`` elements wait, and ``slots`` slots share them. ``queued_size`` is the size of the queued elements, or
        of the work that they stand for, in bytes, as far as that is known. ``is_ending`` says that no more will come
        and that other stages wait for the output: then the last bundles get shorter and shorter.
        """
        is_first = self._started_at is None
        if self._started_at is None:
            self._started_at = now
        if self._is_sink:
            return self._next_of_sink(queued, slots, queued_size)
        fair = math.ceil(queued / max(1, slots))
        if not self.speed.is_observed:
            if self._sorts:
                return max(1, min(fair, self._first_sorted))
            # Workers without work take what this bundle does not begin. That keeps a short input whole if it is quick.
            return max(1, min(queued if is_first else self.speed.whole_batches(fair), _FIRST_ELEMENTS))
        fixed, per_element = self.speed.price()
        fitting = min(self._fitting(now), self.speed.last * _GROWTH)
        if not self._sorts:
            fitting = self.speed.whole_batches(fitting) * (2 if fitting <= _FEW_ELEMENTS else 1)
        # The slots share what is queued, unless it is too little to be worth sharing.
        worth_sharing = int(max(_SHORTEST_S, fixed) / per_element)
        if is_ending and not self._sorts:
            fair = math.ceil(fair / 2)
        return max(1, min(fitting, self.speed.whole_batches(max(fair, worth_sharing))))

    def _fitting(self, now: float) -> int:
        """Return how many elements fit into a bundle: at least half of it is work, even if its fixed price is high."""
        fixed, per_element = self.speed.price()
        return max(1, int(max(self.target_seconds(now) - fixed, fixed) / per_element))

    def _next_of_sink(self, queued: int, slots: int, queued_size: float) -> int:
        """Return the size of a sink's bundle. Each bundle writes a file, so bundles should be few and large."""
        if not self.speed.is_observed:
            # A model in the same stage takes longer than a file, and idle workers can't take what it has begun.
            files = slots if self._sorts or queued_size >= _WORTH_SEVERAL_FILES else 1
            return min(math.ceil(queued / max(1, files)), SINK_ELEMENTS)
        fixed, per_element = self.speed.price()
        if queued * per_element < max(_LONGEST_S / 2, fixed):
            return queued
        return min(self._fitting(0.0), math.ceil(queued / max(1, slots)))

    def deadline_seconds(self, now: float) -> float:
        """Return after how many seconds a bundle that starts now should be asked to split."""
        target = self.target_seconds(now)
        if self._is_source:
            return self._patience * target
        if self._is_sink and not self.speed.is_observed:
            target = _LONGEST_FIRST_OF_SINK_S
        if self.speed.last > _FEW_ELEMENTS:
            target *= 1.5  # its size was chosen to end it in time, so the deadline is for those that are late
        return self._patience * max(_SHORTEST_DEADLINE_S, target)

    def worth_taking(self, elements: int, elapsed: float, *, is_cold: bool, start_seconds: float = 0.0) -> bool:
        """Return whether an idle worker should take elements from a bundle that has run for ``elapsed`` seconds.

        ``is_cold`` says that the idle worker has not run the stage yet, so that it must set up its steps first.
        ``start_seconds`` is how long it takes to start, if it has not started.
        """
        left = self.speed.seconds_left(elements, elapsed)
        if left is None or left < 0:
            return True  # unknown, or not what was expected
        fixed, _ = self.speed.price()
        return left > 2 * max(_SHORTEST_S, fixed) + (self.speed.setup_seconds() if is_cold else 0.0) + start_seconds

    def takes_less(self, elements: int, seconds: float) -> bool:
        """Return whether one worker is known to take less than ``seconds`` for ``elements``."""
        if not self.speed.is_observed:
            return False
        fixed, per_element = self.speed.price()
        return fixed + elements * per_element < seconds

    def was_split(self, *, has_output: bool) -> None:
        """Note that a bundle was split. If it had no output yet, the next one gets more time."""
        self._patience = max(1, self._patience // 2) if has_output else min(_MOST_PATIENCE, 2 * self._patience)

    def learn(self, elements: int, seconds: float, *, is_warm: bool = True, was_cut: bool = False) -> None:
        """Learn the stage's speed from a bundle.

        ``is_warm`` says that its worker had run the stage before, and ``was_cut`` that a split ended it.
        """
        if elements:
            self.speed.learn(elements, seconds, is_warm=is_warm or self._is_sink, was_cut=was_cut)

    def shrink(self) -> None:
        """Halve the next bundle, because a worker was lost."""
        self.speed.last = max(1, self.speed.last // 2)


class Gathering:
    """Decides how long a sink waits for more input, since it writes a file per bundle."""

    def __init__(self, queue_limit: int, is_endless: bool) -> None:
        self._enough_bytes = min(_SINK_BYTES, queue_limit // 4)  # well before its writers are held back
        self._is_endless = is_endless
        self._first_at: float | None = None
        self._since: float | None = None

    def is_worth_it(self, now: float, queued_bytes: int) -> bool:
        """Return whether to wait for more than ``queued_bytes``."""
        if self._since is None:
            self._since = now
        if self._first_at is None:
            self._first_at = now
        # Wait as long as the sink has run so far: the number of files grows with the logarithm of the time.
        patience = min(_MOST_GATHERING_S, max(_GATHERING_S, now - self._first_at))
        if self._is_endless:
            patience = _GATHERING_IN_STREAM_S
        return queued_bytes < self._enough_bytes and now - self._since < patience

    def end(self) -> None:
        """Note that a bundle takes what was gathered."""
        self._since = None


class SizedWork:
    """Tracks how much of a splittable stage's work is done, in the sizes of its restrictions.

    If there are too many elements to decode, the total is unknown.
    """

    def __init__(self, codec: Callable[[str], ElementCodec]) -> None:
        self._codec = codec  # by read id
        self._seen = 0
        self._total = 0.0
        self._done = 0.0

    @property
    def done(self) -> float:
        """The size of the committed work."""
        return self._done

    @property
    def total(self) -> float | None:
        """The size of all work that arrived, or None if it is unknown."""
        is_known = self._seen <= _MOST_ELEMENTS and math.isfinite(self._total) and self._total > 0
        return self._total if is_known else None

    @property
    def left(self) -> float:
        """The size of the work that is left, or 0 if it is unknown."""
        return max(0.0, (self.total or 0.0) - self._done)

    def arrived(self, read_id: str, block: Block) -> None:
        """Count a block from upstream."""
        self._total += self.size(read_id, (block,))

    def committed(self, taken: dict[str, list[Block]], left: float) -> None:
        """Count a committed bundle that took ``taken`` and left work of the size ``left``."""
        self._done += sum(self.size(read_id, blocks) for read_id, blocks in taken.items()) - left

    def size(self, read_id: str, blocks: Iterable[Block]) -> float:
        """Return the size of the work that these blocks stand for, or 0 after too many elements were decoded."""
        total = 0.0
        for block in blocks:
            self._seen += block.count
            if self._seen <= _MOST_ELEMENTS:
                elements = self._codec(read_id).elements(block.data())
                total += sum(_SIZE.unpack(value[-_SIZE.size :])[0] for _, value in elements)
        return total
