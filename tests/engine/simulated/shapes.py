"""Random pipelines, and what they must give: computed with lists and dictionaries."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsDict, AsIter, AsSingleton
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger, window
from apache_beam.transforms.window import FixedWindows, GlobalWindow, Sessions
from apache_beam.utils.timestamp import Timestamp

from luminosity.engine.prepare import prepare, worker_environment
from luminosity.engine.simulated.simulated_run import SimulatedPlan
from tests.engine.simulated import results, sources, steps
from tests.engine.simulated.reference import REFERENCE, Element, on_time, watermarks, window_of

Source = str  # "create", "read", "stream" or "test stream"
Data = tuple[tuple[int, int], ...]

SOURCES = ("create", "read", "stream", "test stream")
_PLANS_KEPT = 400
_ANY_TIME = ("map", "flat map", "flatten", "reshuffle", "explode", "finalize")  # operations that take late elements


@dataclass(frozen=True)
class Shape:
    """A pipeline: where its numbers come from, their windows, and the steps with a parameter each."""

    source: Source
    window_s: int | None
    operations: tuple[tuple[str, int], ...]
    is_durable: bool = False
    events: Data = ()  # of a TestStream, which is a part of the pipeline

    @property
    def is_stream(self) -> bool:
        return self.source in ("stream", "test stream")

    def plan(self) -> SimulatedPlan:
        """Return the plan, which is made once."""
        return _plan(self)

    def expected(self, data: Data) -> Counter[str]:
        """Return the results and how often they come."""
        elements: list[Element] = []
        late = [n for name, n in self.operations if name == "late"]
        if late and self.window_s is not None:
            data = on_time(data, self.window_s, _lateness(late[0]))
        for number, second in data:
            at = Timestamp(second)
            inside = GlobalWindow() if self.window_s is None else window_of(second, self.window_s)
            elements.append((number, at.micros, inside))
        for name, n in self.operations:
            elements = REFERENCE[name](elements, n)
        return Counter(f"{number} {at // 1000} {inside}" for number, at, inside in elements)


@functools.lru_cache(_PLANS_KEPT)
def _plan(shape: Shape) -> SimulatedPlan:
    flags = ["--cpu_workers=2", "--accelerators=0", "--progress=off", "--run_dir=off"]
    if shape.is_stream:
        flags.append("--streaming")
    if shape.is_durable:
        flags.append("--checkpoint_dir=/nowhere")
    options = PipelineOptions(flags)
    pipeline = beam.Pipeline(options=options)
    numbers = _source(pipeline, shape)
    if shape.window_s is not None:
        numbers |= "Window" >> beam.WindowInto(FixedWindows(shape.window_s))
    for i, (name, n) in enumerate(shape.operations):
        numbers = numbers | f"{i} {name}" >> beam.ptransform_fn(OPERATIONS[name])(n)
    _ = numbers | "Tell" >> beam.ParDo(results.Tell())
    return SimulatedPlan(prepare(pipeline.to_runner_api(default_environment=worker_environment(options)), options))


def _lateness(n: int) -> int:
    """Return how many seconds elements of an operation may be late."""
    return 3 * (n - 2)


def _source(pipeline: beam.Pipeline, shape: Shape) -> Any:
    if shape.source == "test stream":
        return pipeline | _test_stream(shape) | "Meet" >> beam.ParDo(steps.Meet()).with_output_types(int)
    impulse = pipeline | beam.Impulse()
    if shape.source == "create":
        numbers = impulse | "Emit" >> beam.ParDo(sources.Emit()).with_output_types(int)
        return numbers | beam.Reshuffle() | "Meet" >> beam.ParDo(steps.Meet()).with_output_types(int)
    source = sources.Read() if shape.source == "read" else sources.Stream()
    numbers = impulse | "Read" >> beam.ParDo(source).with_output_types(int)
    return numbers | "Meet" >> beam.ParDo(steps.Meet()).with_output_types(int)


def _test_stream(shape: Shape) -> Any:
    stream: Any = TestStream(coder=beam.coders.VarIntCoder())
    before, is_late = 0, any(name == "late" for name, _ in shape.operations)
    for i, watermark in enumerate(watermarks(shape.events, is_late=is_late)):
        stream = stream.add_elements([window.TimestampedValue(n, at) for n, at in shape.events[3 * i : 3 * i + 3]])
        if watermark > before:
            before = watermark
            stream = stream.advance_watermark_to(watermark)
        if i % 2:
            stream = stream.advance_processing_time(1)
    return stream.advance_watermark_to_infinity()


# The operations, each as a part of a pipeline and as a function of lists.


def _do(numbers: Any, name: str, fn: beam.DoFn, *sides: Any) -> Any:
    return numbers | name >> beam.ParDo(fn, *sides).with_output_types(int)


def _keyed(numbers: Any, n: int) -> Any:
    return numbers | "Key" >> beam.ParDo(steps.Key(n)).with_output_types(tuple[int, int])


def _flatten(numbers: Any, n: int) -> Any:
    return (numbers, _do(numbers, "Map", steps.Map(n))) | beam.Flatten()


def _ungroup(numbers: Any, n: int) -> Any:
    return _panes(numbers, n, trigger.AccumulationMode.DISCARDING, steps.Ungroup())


def _panes(numbers: Any, n: int, mode: Any, fn: beam.DoFn) -> Any:
    """Group in panes of some elements each, and give them to a step."""
    windowing = numbers.windowing.windowfn
    early = trigger.AfterWatermark(early=trigger.AfterCount(n))
    fired = _keyed(numbers, n) | "Early" >> beam.WindowInto(windowing, trigger=early, accumulation_mode=mode)
    return _do(fired | beam.GroupByKey(), "Panes", fn) | "At the end" >> _plain(windowing)


def _accumulate(numbers: Any, n: int) -> Any:
    """Sum up the last pane alone, which has all that the early ones had."""
    return _panes(numbers, n, trigger.AccumulationMode.ACCUMULATING, steps.LastPane())


def _late(numbers: Any, n: int) -> Any:
    """Pass on what is not too late, in panes. What comes next must take late elements as they are."""
    late = trigger.AfterWatermark(early=trigger.AfterCount(n), late=trigger.AfterCount(1))
    windows = beam.WindowInto(
        numbers.windowing.windowfn,
        trigger=late if n % 2 else trigger.DefaultTrigger(),
        accumulation_mode=trigger.AccumulationMode.DISCARDING,
        allowed_lateness=_lateness(n),
    )
    return _do(_keyed(numbers, n) | "Late" >> windows | beam.GroupByKey(), "Ungroup", steps.Ungroup())


def _sessions(numbers: Any, n: int) -> Any:
    windowing = numbers.windowing.windowfn
    sessions = _do(numbers, "Round", steps.RoundUp()) | "Sessions" >> _plain(Sessions(n + 0.5))
    return _do(_keyed(sessions, n) | beam.GroupByKey(), "Sum", steps.SumOfSquares()) | "Windows" >> _plain(windowing)


def _plain(windowing: Any) -> Any:
    return beam.WindowInto(
        windowing, trigger=trigger.DefaultTrigger(), accumulation_mode=trigger.AccumulationMode.DISCARDING
    )


def _constant(numbers: Any, n: int) -> Any:
    """Add the sum of a bounded side input, for which a stream waits at first."""
    bounded = numbers.pipeline | "Bounded" >> beam.Create(list(range(2 * n)))
    grouped = _keyed(bounded, n) | "Group" >> beam.GroupByKey()
    return _do(numbers, "Add", steps.AddSum(), AsIter(_do(grouped, "Keys", steps.FirstOfGroup())))


def _singleton(numbers: Any, n: int) -> Any:
    total = AsSingleton(numbers | beam.CombineGlobally(sum).without_defaults(), default_value=0)
    return _do(numbers, "Add", steps.AddTotal(n), total)


def _iterable(numbers: Any, n: int) -> Any:
    return _do(numbers, "Add", steps.AddSum(), AsIter(_do(numbers, "Every", steps.EveryNth(n))))


def _dictionary(numbers: Any, n: int) -> Any:
    largest = AsDict(_keyed(numbers, n) | beam.CombinePerKey(max))
    return _do(numbers, "Add", steps.AddLargest(n), largest)


OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "map": lambda numbers, n: _do(numbers, "Do", steps.Map(n)),
    "flat map": lambda numbers, n: _do(numbers, "Do", steps.FlatMap(n)),
    "flatten": _flatten,
    "reshuffle": lambda numbers, n: numbers | beam.Reshuffle(),
    "group": lambda numbers, n: _do(_keyed(numbers, n) | beam.GroupByKey(), "Sum", steps.SumOfSquares()),
    "combine": lambda numbers, n: _do(_keyed(numbers, n) | beam.CombinePerKey(sum), "Add", steps.AddKey()),
    "ungroup": _ungroup,
    "accumulate": _accumulate,
    "sessions": _sessions,
    "late": _late,
    "finalize": lambda numbers, n: _do(numbers, "Finalize", results.Finalize()),
    "count": lambda numbers, n: _do(_keyed(numbers, n), "Count", steps.Count()),
    "position": lambda numbers, n: _do(_keyed(numbers, n), "Position", steps.Position()),
    "gather": lambda numbers, n: _do(_keyed(numbers, n), "Gather", steps.Gather()),
    "batch": lambda numbers, n: _do(_keyed(numbers, n), "Batch", steps.Batch()),
    "explode": lambda numbers, n: _do(numbers, "Explode", steps.Explode()),
    "constant": _constant,
    "singleton": _singleton,
    "iterable": _iterable,
    "dictionary": _dictionary,
}


def random_data(chance: random.Random, *, is_stream: bool, most_back: int = 3) -> Data:
    """Return numbers with their seconds, which go back a little in a stream."""
    count = chance.choice(
        (chance.randint(1, 12), chance.randint(1, 12), chance.randint(10, 40), chance.randint(10, 100))
    )
    if not is_stream:
        return tuple((chance.randrange(50), chance.randrange(40)) for _ in range(count))
    return tuple((chance.randrange(50), max(0, i // 2 + chance.randint(-most_back, 3))) for i in range(min(count, 60)))


def random_shape(chance: random.Random) -> Shape:
    """Return a pipeline of one to six operations. Each draws which kinds of operations there are at all."""
    source = chance.choices(SOURCES, (4, 3, 4, 2))[0]
    is_stream = source in ("stream", "test stream")
    has_late = source == "test stream" and chance.random() < 0.35
    window_s = chance.choice((5, 10, 30)) if is_stream else chance.choice((None, None, 5, 20))
    left_out = {"position", "late"} if window_s is not None else {"position", "late", "sessions"}
    possible = [name for name in OPERATIONS if (name in _ANY_TIME if has_late else name not in left_out)]
    names = [name for name in possible if chance.random() < 0.6] or ["map"]
    operations = tuple((chance.choice(names), chance.randint(2, 4)) for _ in range(chance.randint(1, 6)))
    growing = 0
    most = chance.choice((1, 1, 2))
    kept: list[tuple[str, int]] = []
    for name, n in operations:
        growing += name in ("flatten", "explode", "flat map")
        if growing <= most or name not in ("flatten", "explode", "flat map"):
            kept.append((name, n))
    if has_late:
        kept.insert(0, ("late", chance.randint(2, 4)))
    elif source == "test stream" and chance.random() < 0.5:
        kept.insert(0, ("position", chance.randint(1, 3)))
    shape = Shape(
        source,
        window_s,
        tuple(kept),
        is_durable=source != "test stream" and chance.random() < 0.5,
        events=random_data(chance, is_stream=True, most_back=12 if has_late else 3) if source == "test stream" else (),
    )
    if source == "stream" and chance.random() < 0.5:  # last, so that the seeds before this was tried stay what they are
        shape = replace(shape, operations=(("position", chance.randint(1, 3)), *shape.operations))
    return shape
