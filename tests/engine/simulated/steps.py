"""The steps of simulated pipelines. All of them take numbers and give numbers, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam.coders import VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms import window
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, CombiningValueStateSpec, TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfoTiming

from luminosity.engine.simulated.chaos import Chaos
from luminosity.engine.simulated.simulation import Simulation
from luminosity.engine.simulated.worker import WorkerDies

MODULUS = 997  # numbers stay small, however many steps there are

_BAG = BagStateSpec("bag", VarIntCoder())
_COUNT = CombiningValueStateSpec("count", sum)
_END = TimerSpec("end", TimeDomain.WATERMARK)
_LAST = TimerSpec("last", TimeDomain.WATERMARK)
_SOON = TimerSpec("soon", TimeDomain.REAL_TIME)
_BAG_PARAM = beam.DoFn.StateParam(_BAG)
_COUNT_PARAM = beam.DoFn.StateParam(_COUNT)
_END_PARAM = beam.DoFn.TimerParam(_END)
_LAST_PARAM = beam.DoFn.TimerParam(_LAST)
_SOON_PARAM = beam.DoFn.TimerParam(_SOON)


class ElementRaises(Exception):
    """What a step raises by order of a disaster."""


@dataclass
class World:
    """What steps see of the scenario that runs: they are pickled once for many scenarios."""

    data: list[tuple[int, int]] = field(default_factory=list)  # numbers and seconds of event time
    chaos: Chaos | None = None
    simulation: Simulation | None = None
    told: int = 0  # bundles that have told results, or that something is to be done when they are final
    finalized: list[int] = field(default_factory=list[int])  # numbers of bundles that are final

    def meet(self) -> None:
        """Let an element do what disasters have ordered."""
        chaos = self.chaos
        if chaos is None:
            return
        if chaos.kills:
            chaos.kills -= 1
            chaos.happened["worker killed by an element"] += 1
            raise WorkerDies
        if chaos.raises:
            chaos.raises -= 1
            chaos.happened["element raised"] += 1
            raise ElementRaises("by order")

    def pause(self, seconds: float = 0.0) -> None:
        """Let others run while a step is in the middle of an element."""
        if self.simulation is not None:
            self.simulation.pause(seconds)


WORLD = World()


class Meet(beam.DoFn):
    """Passes numbers on, and does what disasters have ordered."""

    def process(self, element: int) -> Iterable[int]:
        WORLD.meet()
        return (element,)


class Map(beam.DoFn):
    def __init__(self, n: int) -> None:
        self.n = n

    def process(self, element: int) -> Iterable[int]:
        WORLD.meet()
        return ((3 * element + self.n) % MODULUS,)


class FlatMap(beam.DoFn):
    def __init__(self, n: int) -> None:
        self.n = n

    def process(self, element: int) -> Iterable[int]:
        WORLD.meet()
        return [(element + i) % MODULUS for i in range(element % self.n)]


class Key(beam.DoFn):
    def __init__(self, n: int) -> None:
        self.n = n

    def process(self, element: int) -> Iterable[tuple[int, int]]:
        return ((element % self.n, element),)


class SumOfSquares(beam.DoFn):
    def process(self, element: tuple[int, Iterable[int]]) -> Iterable[int]:
        WORLD.meet()
        key, numbers = element
        return ((key + sum((x + 1) ** 2 for x in numbers)) % MODULUS,)


class FirstOfGroup(beam.DoFn):
    def process(self, element: tuple[int, Iterable[int]]) -> Iterable[int]:
        return (min(element[1]),)


class Ungroup(beam.DoFn):
    """Emits each number of a pane: panes that discard have each number once."""

    def process(self, element: tuple[int, Iterable[int]], at: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        WORLD.meet()
        for number in element[1]:
            yield window.TimestampedValue(number, at.max_timestamp())


class LastPane(beam.DoFn):
    """Gives the sum of squares of a key's last pane, at the end of its window."""

    def process(self, element: tuple[int, Iterable[int]], pane: Any = beam.DoFn.PaneInfoParam) -> Iterable[int]:
        WORLD.meet()
        key, numbers = element
        if pane.timing == PaneInfoTiming.EARLY:
            return ()
        return ((key + sum((x + 1) ** 2 for x in numbers)) % MODULUS,)


class RoundUp(beam.DoFn):
    """Moves numbers on to a whole second: a time within a millisecond is cut off wherever elements are stored."""

    def process(self, element: int, at: Any = beam.DoFn.TimestampParam) -> Iterator[Any]:
        yield window.TimestampedValue(element, -(-at.micros // 1_000_000))


class AddKey(beam.DoFn):
    def process(self, element: tuple[int, int]) -> Iterable[int]:
        return (sum(element) % MODULUS,)


class Count(beam.DoFn):
    """Numbers what comes, all at the window's end: which element gets which number is left open."""

    def process(
        self, element: tuple[int, int], count: Any = _COUNT_PARAM, at: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        WORLD.meet()
        count.add(1)
        yield window.TimestampedValue((10 * count.read() + element[0]) % MODULUS, at.max_timestamp())


class Position(beam.DoFn):
    """Adds to each number which one of its key it is: the order in which a stream emits elements is kept."""

    def process(
        self, element: tuple[int, int], count: Any = _COUNT_PARAM, at: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        WORLD.meet()
        count.add(1)
        yield window.TimestampedValue((element[1] + 50 * count.read()) % MODULUS, at.max_timestamp())


class Gather(beam.DoFn):
    """Keeps what comes, and gives its sum of squares when the window ends."""

    def process(
        self,
        element: tuple[int, int],
        bag: Any = _BAG_PARAM,
        end: Any = _END_PARAM,
        at: Any = beam.DoFn.WindowParam,
    ) -> None:
        WORLD.meet()
        bag.add(element[1])
        end.set(at.max_timestamp())

    @on_timer(_END)
    def at_the_end(self, key: Any = beam.DoFn.KeyParam, bag: Any = _BAG_PARAM) -> Iterable[int]:
        numbers = list(bag.read())
        bag.clear()
        yield (key + sum((x + 1) ** 2 for x in numbers)) % MODULUS


class Batch(beam.DoFn):
    """Keeps what comes, and passes it on a moment later, or when the window ends."""

    def process(
        self,
        element: tuple[int, int],
        bag: Any = _BAG_PARAM,
        soon: Any = _SOON_PARAM,
        end: Any = _LAST_PARAM,
        at: Any = beam.DoFn.WindowParam,
    ) -> None:
        WORLD.meet()
        bag.add(element[1])
        end.set(at.max_timestamp())
        micros = WORLD.simulation.clock.micros() if WORLD.simulation is not None else 0
        soon.set(Timestamp(micros=micros + 300_000))

    @on_timer(_LAST)
    def at_the_end(self, bag: Any = _BAG_PARAM, at: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        yield from self._flush(bag, at)

    @on_timer(_SOON)
    def soon(self, bag: Any = _BAG_PARAM, at: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        yield from self._flush(bag, at)

    def _flush(self, bag: Any, at: Any) -> Iterator[Any]:
        numbers = list(bag.read())
        bag.clear()
        for number in numbers:
            yield window.TimestampedValue(number, at.max_timestamp())


class _UpToNumber(RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, element % 6)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return restriction.size()


_UP_TO_PARAM = beam.DoFn.RestrictionParam(_UpToNumber())


class Explode(beam.DoFn):
    """A splittable step: each number becomes up to five."""

    def process(self, element: int, tracker: Any = _UP_TO_PARAM) -> Iterator[int]:
        position = tracker.current_restriction().start
        while tracker.try_claim(position):
            WORLD.meet()
            WORLD.pause(0.002)
            yield (element + position) % MODULUS
            position += 1


class AddSum(beam.DoFn):
    def process(self, element: int, others: Iterable[int]) -> Iterable[int]:
        WORLD.meet()
        return ((element + sum(others)) % MODULUS,)


class AddTotal(beam.DoFn):
    def __init__(self, n: int) -> None:
        self.n = n

    def process(self, element: int, total: int) -> Iterable[int]:
        WORLD.meet()
        return ((element + self.n * total) % MODULUS,)


class AddLargest(beam.DoFn):
    def __init__(self, n: int) -> None:
        self.n = n

    def process(self, element: int, largest: dict[int, int]) -> Iterable[int]:
        WORLD.meet()
        return ((element + largest[element % self.n]) % MODULUS,)


class EveryNth(beam.DoFn):
    def __init__(self, n: int) -> None:
        self.n = n

    def process(self, element: int) -> Iterable[int]:
        return (element,) if element % self.n == 0 else ()
