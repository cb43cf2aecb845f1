"""The shape of a pipeline: what a checkpoint must know of it to tell whether another pipeline can continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from apache_beam.internal import pickler
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2, schema_pb2, standard_window_fns_pb2
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor
from google.protobuf import json_format, wrappers_pb2
from google.protobuf.message import Message

from luminosity.engine.durable.names import Names, side_input_tags, written_buffer
from luminosity.engine.plan.graph import Buffer, BufferKind, Graph

__all__ = ["coder_structure", "describe"]

_PICKLED_CODERS = frozenset([python_urns.PICKLED_CODER, "beam:coder:pickled_python:v1"])
_ROOT = "ref_AppliedPTransform_"  # how Beam names the pipeline itself, and no step
_STATE_BACKED_URN = common_urns.coders.STATE_BACKED_ITERABLE.urn
_ROW_URN = common_urns.coders.ROW.urn
_SDF_PROCESS_URN = common_urns.sdf_components.PROCESS_SIZED_ELEMENTS_AND_RESTRICTIONS.urn
_WINDOW_PAYLOADS: dict[str, type[Message]] = {
    common_urns.fixed_windows.urn: standard_window_fns_pb2.FixedWindowsPayload,
    common_urns.sliding_windows.urn: standard_window_fns_pb2.SlidingWindowsPayload,
    common_urns.session_windows.urn: standard_window_fns_pb2.SessionWindowsPayload,
}


def describe(graph: Graph) -> dict[str, Any]:
    """Return the shape of a pipeline as plain JSON: its steps, what stages read, buffers, and stages.

    All keys and names of parts are durable names. Coders are described by their structure; a pickled coder only by the
    name of its class, since its bytes differ from run to run.
    """
    names = Names(graph)
    shapes = _Shapes(graph.components)
    steps = _steps(graph, names)
    reads: dict[str, Any] = {}
    for stage in graph.stages:
        for transform in stage.transforms:
            if details := shapes.step(transform):
                steps[names.of_step(transform.unique_name)] |= details
        for read in stage.reads:
            consumers = names.consumers(stage, read)
            reads[names.of_read(stage, read)] = {
                "producer": names.of_pcollection(names.pcollection(stage, read)),
                "consumers": {names.of_step(consumer): consumer for consumer in consumers},
                "coder": shapes.coder(read.coder_id) if read.coder_id else "",
                "is_impulse": graph.buffers[read.buffer_id].kind is BufferKind.IMPULSE,
            }
    return {
        "steps": steps,
        "reads": reads,
        "buffers": {
            names.of_buffer(b.id): _buffer(b, graph, names, shapes)
            for b in graph.buffers.values()
            if b.kind is not BufferKind.IMPULSE
        },
        "stages": {
            names.of_stage(stage): [names.of_read(stage, read) for read in stage.reads] for stage in graph.stages
        },
    }


def coder_structure(components: beam_runner_api_pb2.Components, coder_id: str) -> str:
    """Return the structure of a coder, as a shape describes it."""
    return _Shapes(components).coder(coder_id)


def _steps(graph: Graph, names: Names) -> dict[str, Any]:
    """Return all steps of the pipeline, composites, and steps that only the plan has, with those before each."""
    makers = names.makers()
    steps: dict[str, Any] = {}
    transforms = [t for t in graph.components.transforms.values() if not t.unique_name.startswith(_ROOT)]
    planned = [t for stage in graph.stages for t in stage.transforms]
    for number, transform in enumerate([*transforms, *planned]):
        name = written_buffer(transform)
        if transform.spec.urn == bundle_processor.DATA_INPUT_URN or name in graph.components.pcollections:
            continue
        before = {names.of_step(makers[p]) for p in transform.inputs.values() if p in makers}
        step = steps.setdefault(names.of_step(name), {"name": name, "after": []})
        step["after"] = sorted({*step["after"], *before} - {names.of_step(name)})
        if number >= len(transforms):
            step["runs"] = True  # it is no composite, which has the inputs of its parts
    return steps


def _buffer(buffer: Buffer, graph: Graph, names: Names, shapes: _Shapes) -> dict[str, Any]:
    is_group = buffer.kind is BufferKind.GROUP
    return {
        "step": buffer.step,
        "kind": buffer.kind.value,
        "is_unbounded": buffer.is_unbounded,
        "coder": shapes.coder(buffer.coder_id),
        "windowing": shapes.windowing(buffer.pcollection_id) if is_group or _is_side(buffer, graph) else {},
        "side_inputs": sorted(
            [names.of_step(side.transform_id), side.tag]
            for stage in graph.stages
            for side in stage.side_inputs
            if side.buffer_id == buffer.id
        ),
    }


def _is_side(buffer: Buffer, graph: Graph) -> bool:
    return any(side.buffer_id == buffer.id for stage in graph.stages for side in stage.side_inputs)


class _Shapes:
    """Describes coders, windowing and steps of one pipeline in words that stay the same from run to run."""

    def __init__(self, components: beam_runner_api_pb2.Components) -> None:
        self._components = components

    def step(self, transform: beam_runner_api_pb2.PTransform) -> dict[str, Any]:
        """Return what a step keeps from bundle to bundle; empty if it keeps nothing."""
        if transform.spec.urn not in translations.PAR_DO_URNS:
            return {}
        payload = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
        if transform.spec.urn == _SDF_PROCESS_URN:
            return {"restriction": self.coder(payload.restriction_coder_id)}
        if not payload.state_specs and not payload.timer_family_specs:
            return {}
        sides = side_input_tags(transform)
        main = self._components.pcollections[next(p for tag, p in transform.inputs.items() if tag not in sides)]
        return {
            "state": {name: dict(self._state(spec)) for name, spec in sorted(payload.state_specs.items())},
            "timers": {
                name: beam_runner_api_pb2.TimeDomain.Enum.Name(spec.time_domain).lower()
                for name, spec in sorted(payload.timer_family_specs.items())
            },
            "key": self._key(main.coder_id),
            "windows": self._windows(self._components.windowing_strategies[main.windowing_strategy_id].window_fn),
        }

    def coder(self, coder_id: str) -> str:
        """Return the structure of a coder: ``windowed_value(kv(string_utf8,varint),global_window)``."""
        coder = self._components.coders[coder_id]
        urn = coder.spec.urn
        if urn in _PICKLED_CODERS:
            # The name of the class and the pickled object.
            return wrappers_pb2.BytesValue.FromString(coder.spec.payload).value.partition(b"$")[0].decode()
        if urn == _ROW_URN:
            return f"row({','.join(_fields(schema_pb2.Schema.FromString(coder.spec.payload)))})"
        # Which of the two is used depends on the order of planning. Only what a grouping emits can tell them apart.
        name = "iterable" if urn == _STATE_BACKED_URN else _short(urn)
        inner = ",".join(self.coder(each) for each in coder.component_coder_ids)
        return f"{name}({inner})" if inner else name

    def windowing(self, pcollection_id: str) -> dict[str, Any]:
        """Return the windowing of a PCollection."""
        strategy_id = self._components.pcollections[pcollection_id].windowing_strategy_id
        strategy = self._components.windowing_strategies[strategy_id]
        return {
            "windows": self._windows(strategy.window_fn),
            "trigger": _plain_json(strategy.trigger),
            "accumulation": beam_runner_api_pb2.AccumulationMode.Enum.Name(strategy.accumulation_mode).lower(),
            "allowed lateness": f"{strategy.allowed_lateness / 1000:g} s",
            "timestamps": beam_runner_api_pb2.OutputTime.Enum.Name(strategy.output_time).lower(),
        }

    def _windows(self, window_fn: beam_runner_api_pb2.FunctionSpec) -> str:
        if (payload := _WINDOW_PAYLOADS.get(window_fn.urn)) is not None:
            return f"{_short(window_fn.urn)} {_plain_json(payload.FromString(window_fn.payload))}"
        return _pickled_type(window_fn.payload) if window_fn.payload else _short(window_fn.urn)

    def _key(self, coder_id: str) -> str:
        """Return the structure of the key's coder, as the worker encodes keys for the runner."""
        coder = self._components.coders[coder_id]
        return self.coder(coder.component_coder_ids[0]) if coder.component_coder_ids else self.coder(coder_id)

    def _state(self, spec: beam_runner_api_pb2.StateSpec) -> Iterator[tuple[str, str]]:
        kind = str(spec.WhichOneof("spec"))
        yield "kind", kind.removesuffix("_spec").replace("_", " ")
        inner = getattr(spec, kind)
        for field in inner.DESCRIPTOR.fields:
            if field.name.endswith("coder_id"):
                name = field.name.removesuffix("_id").replace("_", " ")
                yield name, self.coder(getattr(inner, field.name))


def _short(urn: str) -> str:
    """Return the telling part of a URN: ``beam:coder:kv:v1`` is ``kv``."""
    parts = urn.split(":")
    return parts[-2] if len(parts) > 2 else urn


def _plain_json(message: Message) -> str:
    return json.dumps(json_format.MessageToDict(message), sort_keys=True).replace('"', "")


def _pickled_type(payload: bytes) -> str:
    """Return the name of a pickled object's class, without the module: a script is a module of another name."""
    return type(pickler.loads(payload)).__qualname__


def _fields(schema: schema_pb2.Schema) -> Iterator[str]:
    """Yield the fields of a row. The schema's own id is new in every process."""
    for field in schema.fields:
        yield f"{field.name}:{_field_type(field.type)}"


def _field_type(field: schema_pb2.FieldType) -> str:
    kind = str(field.WhichOneof("type_info"))
    optional = "?" if field.nullable else ""
    if kind == "atomic_type":
        return schema_pb2.AtomicType.Name(field.atomic_type).lower() + optional
    if kind == "array_type":
        return f"array({_field_type(field.array_type.element_type)}){optional}"
    if kind == "iterable_type":
        return f"iterable({_field_type(field.iterable_type.element_type)}){optional}"
    if kind == "map_type":
        return f"map({_field_type(field.map_type.key_type)},{_field_type(field.map_type.value_type)}){optional}"
    if kind == "row_type":
        return f"row({','.join(_fields(field.row_type.schema))}){optional}"
    return f"{field.logical_type.urn}{optional}"
