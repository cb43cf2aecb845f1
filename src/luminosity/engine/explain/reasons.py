"""The reasons for each buffer between two stages.

Some steps need a buffer: GroupByKey, Reshuffle, Flatten and splittable steps. Other buffers exist because a step can't
be fused with the stage that makes its input. The finished plan shows why: the resource hints differ, the step keeps
state, it waits for a side input that the same stage makes, or two stages would wait for each other's side inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.explain.explanation import Reason, ReasonKind
from luminosity.engine.explain.outline import Outline
from luminosity.engine.explain.windowing import when_in_words, windows_in_words
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import Buffer, BufferKind, Graph, SideInput, Stage
from luminosity.engine.plan.planner import SINK_STARTS
from luminosity.engine.plan.translate import MOVE_URNS
from luminosity.engine.resources.hints import describe_hints

__all__ = ["Reasons"]


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
            return Reason(ReasonKind.COMBINE, title, text + self._in_windows(buffer))
        title = _title("GroupByKey", name, self._outline.step(name))
        return Reason(ReasonKind.GROUP, title, f"{title} needs all values of a key" + self._in_windows(buffer))

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
