"""The reasons for each buffer between two stages.

Some steps need a buffer: GroupByKey, Reshuffle, Flatten and splittable steps. Other buffers exist because a step can't
be fused with the stage that makes its input. The finished plan shows why: the resource hints differ, the step keeps
state, it waits for a side input that the same stage makes, or two stages would wait for each other's side inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor
from apache_beam.transforms import trigger, window
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import AccumulationMode, TriggerFn

from luminosity.engine.explain.explanation import Outline, Reason, ReasonKind
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import Buffer, BufferKind, Graph, SideInput, Stage
from luminosity.engine.plan.planner import SINK_STARTS
from luminosity.engine.plan.translate import MOVE_URNS
from luminosity.engine.resources.hints import describe_hints

__all__ = ["Reasons", "when_in_words", "windows_in_words"]


def windows_in_words(windowing: Windowing) -> str:
    """Return the windows of a PCollection.

    >>> windows_in_words(Windowing(window.FixedWindows(5))), windows_in_words(Windowing(window.SlidingWindows(60, 10)))
    ('fixed windows of 5 s', 'sliding windows of 60 s every 10 s')
    >>> windows_in_words(Windowing(window.Sessions(30))), windows_in_words(Windowing(window.GlobalWindows()))
    ('sessions with gaps of 30 s', 'the global window')
    """
    windows: Any = windowing.windowfn
    if isinstance(windows, window.GlobalWindows):
        return "the global window"
    if isinstance(windows, window.FixedWindows):
        return f"fixed windows of {_seconds(windows.size)}"
    if isinstance(windows, window.SlidingWindows):
        return f"sliding windows of {_seconds(windows.size)} every {_seconds(windows.period)}"
    if isinstance(windows, window.Sessions):
        return f"sessions with gaps of {_seconds(windows.gap_size)}"
    return f"windows of {type(windows).__name__}"


def when_in_words(windowing: Windowing) -> str:
    """Return when a grouping of a stream emits the values of a window, and what happens to late ones.

    >>> when_in_words(Windowing(window.FixedWindows(5)))
    'when a window ends'
    >>> when_in_words(Windowing(window.GlobalWindows()))
    'when the stream ends'
    >>> early = trigger.AfterWatermark(early=trigger.AfterProcessingTime(10), late=trigger.AfterCount(1))
    >>> when_in_words(Windowing(window.FixedWindows(60), early, AccumulationMode.ACCUMULATING, allowed_lateness=30))
    'when a window ends (before: again and again 10 s after an element; late: again and again after 1 element), with all values so far each time; late elements count for 30 s'
    """  # noqa: E501
    triggerfn: Any = windowing.triggerfn
    end = "when the stream ends" if isinstance(windowing.windowfn, window.GlobalWindows) else "when a window ends"
    parts = [_trigger(triggerfn, end)]
    lateness = windowing.allowed_lateness.micros / 1e6
    fires_once = isinstance(triggerfn, trigger.DefaultTrigger) and not lateness
    if windowing.accumulation_mode == AccumulationMode.ACCUMULATING and not fires_once:
        parts.append(", with all values so far each time")
    if lateness:
        parts.append(f"; late elements count for {_seconds(lateness)}")
    return "".join(parts)


def _trigger(triggerfn: TriggerFn, end: str) -> str:
    """Return when a trigger fires. ``end`` says when a window ends."""
    found: Any = triggerfn
    match found:
        case trigger.DefaultTrigger():
            return end
        case trigger.AfterWatermark():
            around = {"before": found.early, "late": found.late}
            parts = [f"{name}: {_trigger(inner, end)}" for name, inner in around.items() if inner is not None]
            return f"{end} ({'; '.join(parts)})" if parts else end
        case trigger.AfterProcessingTime():
            return f"{_seconds(found.delay)} after an element" if found.delay else "soon after an element"
        case trigger.AfterCount():
            return f"after {found.count:,} element{'s' if found.count != 1 else ''}"
        case trigger.Always():
            return "with every element"
        case trigger.Repeatedly():
            return f"again and again {_trigger(found.underlying, end)}"
        case trigger.OrFinally():
            main, last = found.triggers
            return f"{_trigger(main, end)}, until {_trigger(last, end)}"
        case trigger.AfterAny() | trigger.AfterAll() | trigger.AfterEach():
            words = {trigger.AfterAny: " or ", trigger.AfterAll: " and ", trigger.AfterEach: ", then "}[type(found)]
            return words.join(_trigger(inner, end) for inner in found.triggers)
        case _:
            return f"as {found!r} says"


def _seconds(duration: Any) -> str:
    """
    >>> _seconds(0.5), _seconds(60)
    ('0.5 s', '60 s')
    """
    seconds = duration.micros / 1e6 if hasattr(duration, "micros") else float(duration)
    return f"{seconds:,.6g} s"


_PRECOMBINE_URN = common_urns.combine_components.COMBINE_PER_KEY_PRECOMBINE.urn
_FLATTEN_URN = common_urns.primitives.FLATTEN.urn
_RESHUFFLE_URN = common_urns.composites.RESHUFFLE.urn


class Reasons:
    """Finds the reasons in a finished plan."""

    def __init__(self, graph: Graph, outline: Outline) -> None:
        self._graph = graph
        self._outline = outline
        self._writers: dict[bytes, list[Stage]] = {buffer_id: [] for buffer_id in graph.buffers}
        for stage in graph.stages:
            for buffer_id in dict.fromkeys(write.buffer_id for write in stage.writes):
                self._writers[buffer_id].append(stage)
        self._upstream: dict[str, set[str]] = {}
        for stage in graph.stages:  # writers come before readers
            sources = [w for r in (*stage.reads, *stage.side_inputs) for w in self._writers[r.buffer_id]]
            self._upstream[stage.id] = {w.id for w in sources}.union(*(self._upstream[w.id] for w in sources))

    def writers(self, buffer: Buffer) -> list[Stage]:
        """Return the stages that write into ``buffer``."""
        return self._writers[buffer.id]

    def from_steps(self, buffer: Buffer, *stages: Stage) -> tuple[str, ...]:
        """Return the author's steps that write into ``buffer``, in ``stages`` or, without those, in any stage."""
        names: list[str] = []
        for stage in stages or self.writers(buffer):
            for write in _ports(stage, bundle_processor.DATA_OUTPUT_URN, buffer.id):
                (pcollection,) = write.inputs.values()
                names.append(self._outline.step(self._producer(stage, pcollection)))
        return tuple(dict.fromkeys(names))

    def to_steps(self, buffer: Buffer, reader: Stage) -> tuple[str, ...]:
        """Return the author's steps in ``reader`` that consume what it reads from ``buffer``."""
        return tuple(dict.fromkeys(self._outline.step(t.unique_name) for t in _consumers(reader, buffer.id)))

    def made_by(self, buffer: Buffer) -> str:
        """Return the name of the transform that needs the buffer, or an empty string if fusion broke there."""
        if buffer.kind is BufferKind.IMPULSE:
            return ""
        name = translations.split_buffer_id(buffer.id)[1]
        if buffer.kind is BufferKind.GROUP:
            return self._graph.components.transforms[name].unique_name
        return "" if name in self._graph.components.pcollections else name

    def of_unread(self, buffer: Buffer) -> tuple[Reason, ...]:
        """Return the reasons for a buffer that nothing reads."""
        return tuple(self._of_maker(buffer))

    def of_read(self, buffer: Buffer, reader: Stage) -> tuple[Reason, ...]:
        """Return the reasons why ``reader`` gets its main input through ``buffer``."""
        made = tuple(self._of_maker(buffer))
        refused = (
            *self._state(buffer, reader),
            *self._files(buffer, reader),
            *self._resources(buffer, reader),
            *self._windows(reader),
        )
        if made:
            return (*made, *refused)
        return (*refused, *self._waits(buffer, reader)) or tuple(self._would_wait(reader))

    def of_side_input(self, buffer: Buffer, side_input: SideInput) -> tuple[Reason, ...]:
        """Return the reasons why a step gets a side input through ``buffer``."""
        step = self._outline.step(side_input.transform_id)
        source = _quoted(*self._source(buffer))
        text = f"{_quoted(step)} needs {source} complete as a side input"
        if side_input.is_unbounded:
            text = f"{_quoted(step)} reads {source} as a side input, window by window"
        return (*self._of_maker(buffer), Reason(ReasonKind.SIDE_INPUT, "side input", text))

    def _producer(self, stage: Stage, pcollection_id: str) -> str:
        """Return the name of the transform that makes a PCollection, in ``stage`` or before it."""
        for transform in stage.transforms:
            if pcollection_id in transform.outputs.values():
                if self._outline.is_recoding(transform):
                    return self._producer(stage, next(iter(transform.inputs.values())))
                if transform.spec.urn != bundle_processor.DATA_INPUT_URN:
                    return transform.unique_name
        return self._outline.producer(pcollection_id)

    def _source(self, buffer: Buffer) -> tuple[str, ...]:
        """Return the author's steps whose output the buffer holds."""
        name = self.made_by(buffer)
        return (self._outline.step(name),) if name else self.from_steps(buffer)

    def _of_maker(self, buffer: Buffer) -> Iterator[Reason]:
        name = self.made_by(buffer)
        if not name:
            return
        step = self._outline.step(name)
        urn = self._outline.urn(name)
        if buffer.kind is BufferKind.GROUP:
            yield self._group(buffer, name)
        elif urn == _FLATTEN_URN:
            title = _title("Flatten", name, step)
            yield Reason(ReasonKind.FLATTEN, title, f"{title} joins {_quoted(*self.from_steps(buffer))}")
        elif urn in MOVE_URNS:
            title = _title("Reshuffle" if urn == _RESHUFFLE_URN else "Redistribute", name, step)
            yield Reason(ReasonKind.MOVE, title, f"{title} redistributes elements among the workers")
        else:  # the planner's own buffer, in the middle of a splittable step
            splittable = _quoted(self._outline.step(name.rpartition("/")[0]))
            text = f"{splittable} is splittable: its parts are distributed among the workers"
            yield Reason(ReasonKind.PARTS, f"parts of {splittable}", text)

    def _group(self, buffer: Buffer, name: str) -> Reason:
        before = [t for stage in self.writers(buffer) for t in stage.transforms if t.spec.urn == _PRECOMBINE_URN]
        combine = [t.unique_name for t in before if buffer.pcollection_id in t.outputs.values()]
        if combine:
            name = combine[0].rpartition("/")[0]
            title = _title("Combine", name, self._outline.step(name))
            text = f"{title} combines each bundle first, then needs everything of a key"
            return Reason(ReasonKind.COMBINE, title, text + _by_workers(buffer) + self._in_windows(buffer))
        title = _title("GroupByKey", name, self._outline.step(name))
        return Reason(
            ReasonKind.GROUP, title, f"{title} needs all values of a key{_by_workers(buffer)}{self._in_windows(buffer)}"
        )

    def _in_windows(self, buffer: Buffer) -> str:
        """Return the windows and triggers of a grouping whose input may never end."""
        if not buffer.is_unbounded:
            return ""
        windowing = Codecs(self._graph).windowing(buffer.pcollection_id)
        return f", in {windows_in_words(windowing)}; it emits them {when_in_words(windowing)}"

    def _state(self, buffer: Buffer, reader: Stage) -> Iterator[Reason]:
        for transform in _consumers(reader, buffer.id):
            if _keeps_state(transform):
                step = _quoted(self._outline.step(transform.unique_name))
                text = f"{step} keeps state per key, so its input is routed by key"
                yield Reason(ReasonKind.STATE, f"state of {step}", text)

    def _files(self, buffer: Buffer, reader: Stage) -> Iterator[Reason]:
        for transform in _consumers(reader, buffer.id):
            if transform.unique_name.endswith(SINK_STARTS):
                step = _quoted(self._outline.step(transform.unique_name))
                text = f"{step} writes a file per bundle, so it gathers elements first"
                yield Reason(ReasonKind.FILES, f"files of {step}", text)

    def _resources(self, buffer: Buffer, reader: Stage) -> Iterator[Reason]:
        others = [w for w in self.writers(buffer) if w.environment_id != reader.environment_id]
        if not others:
            return
        wishes = [(self.to_steps(buffer, reader), self._wish(reader))]
        wishes += [(self.from_steps(buffer, writer), self._wish(writer)) for writer in others]
        if len({wish for _, wish in wishes}) == 1:
            text = " and ".join(_quoted(*steps) for steps, _ in wishes)
            yield Reason(ReasonKind.RESOURCES, "environments", f"{text} belong to different environments")
            return
        wishes.sort(key=lambda wish: not wish[1])  # steps with hints come first
        (first, wish), *rest = wishes
        parts = [f"{_quoted(*first)} asks for {wish}"]
        parts += [f"{_quoted(*steps)} for {wish or 'nothing'}" for steps, wish in rest]
        yield Reason(ReasonKind.RESOURCES, "resources", f"different resources: {'; '.join(parts)}")

    def _waits(self, buffer: Buffer, reader: Stage) -> Iterator[Reason]:
        """Yield the side inputs of the reader that are made from the writers' output, too."""
        writers = {stage.id for stage in self.writers(buffer)}
        needed: dict[str, list[str]] = {}
        for side_input in self._complete(reader):
            source = self._graph.buffers[side_input.buffer_id]
            makers = {stage.id for stage in self.writers(source)}
            if writers & makers.union(*(self._upstream[stage_id] for stage_id in makers)):
                needed.setdefault(self._outline.step(side_input.transform_id), []).extend(self._source(source))
        for step, sources in needed.items():
            names = _quoted(*dict.fromkeys(sources))
            text = f"{_quoted(step)} needs {names} complete as a side input, and the same stage feeds both"
            yield Reason(ReasonKind.WAIT, f"waits for {names}", text)

    def _would_wait(self, reader: Stage) -> Iterator[Reason]:
        """Yield the side inputs because of which the reader was not fused: the fused stage would wait for itself."""
        for side_input in self._complete(reader):
            step = _quoted(self._outline.step(side_input.transform_id))
            names = _quoted(*self._source(self._graph.buffers[side_input.buffer_id]))
            text = f"{step} needs {names} complete as a side input, which in turn needs this stage"
            yield Reason(ReasonKind.WAIT, f"waits for {names}", text)

    def _windows(self, reader: Stage) -> Iterator[Reason]:
        """Yield the side inputs for whose windows the reader's elements wait before it."""
        for side_input in reader.side_inputs:
            if side_input.is_unbounded:
                step = _quoted(self._outline.step(side_input.transform_id))
                names = _quoted(*self._source(self._graph.buffers[side_input.buffer_id]))
                text = f"each element of {step} waits for its window of {names}, an unbounded side input"
                yield Reason(ReasonKind.WAIT, f"waits for windows of {names}", text)

    @staticmethod
    def _complete(reader: Stage) -> list[SideInput]:
        """Return the side inputs that must be complete before the reader starts."""
        return [side_input for side_input in reader.side_inputs if not side_input.is_unbounded]

    def _wish(self, stage: Stage) -> str:
        return describe_hints(self._graph.components.environments[stage.environment_id])


def _by_workers(buffer: Buffer) -> str:
    """Say who groups, if it is not the runner alone."""
    return "; workers group it if it is large" if buffer.partitions else ""


def _title(kind: str, name: str, step: str) -> str:
    return f"{kind} {_quoted(step)}" if name == step else f"{kind} in {_quoted(step)}"


def _quoted(*names: str) -> str:
    """
    >>> _quoted("A", "B")
    "'A', 'B'"
    """
    return ", ".join(f"'{name}'" for name in names)


def _ports(stage: Stage, urn: str, buffer_id: bytes) -> Iterator[beam_runner_api_pb2.PTransform]:
    for transform in stage.transforms:
        if transform.spec.urn == urn and transform.spec.payload == buffer_id:
            yield transform


def _consumers(stage: Stage, buffer_id: bytes) -> Iterator[beam_runner_api_pb2.PTransform]:
    """Return the transforms whose main input is what ``stage`` reads from a buffer."""
    reads = {p for port in _ports(stage, bundle_processor.DATA_INPUT_URN, buffer_id) for p in port.outputs.values()}
    return (t for t in stage.transforms if not reads.isdisjoint(_main_inputs(t)))


def _main_inputs(transform: beam_runner_api_pb2.PTransform) -> Iterable[str]:
    side_inputs: dict[str, str] = translations.side_inputs(transform)
    return [pcollection for tag, pcollection in transform.inputs.items() if tag not in side_inputs]


def _keeps_state(transform: beam_runner_api_pb2.PTransform) -> bool:
    if transform.spec.urn != common_urns.primitives.PAR_DO.urn:
        return False
    payload = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
    return bool(payload.state_specs or payload.timer_family_specs)
