"""Checks for features that the engine does not support, before anything runs."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import grpc
from apache_beam import pvalue
from apache_beam.internal import pickler
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners import pipeline_context
from apache_beam.runners.common import DoFnSignature
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.transforms import core, external, ptransform

from luminosity._shared.user_code import calling_line
from luminosity.beam_fixes.stand_ins import stand_in_for
from luminosity.engine.plan.graph import may_never_end
from luminosity.engine.plan.translate import MOVE_URNS
from luminosity.errors import UnsupportedPipeline

__all__ = ["RUNS", "check", "expanded", "warn"]


_LOGGER = logging.getLogger(__name__)
_REQUIREMENTS = common_urns.requirements
_SUPPORTED_REQUIREMENTS = frozenset(
    [
        _REQUIREMENTS.REQUIRES_STATEFUL_PROCESSING.urn,
        _REQUIREMENTS.REQUIRES_BUNDLE_FINALIZATION.urn,
        _REQUIREMENTS.REQUIRES_SPLITTABLE_DOFN.urn,
    ]
)
# The primitives that the loop or a worker runs. Everything else without steps inside needs a runner that knows it.
RUNS = (
    frozenset(
        [
            common_urns.combine_components.COMBINE_GROUPED_VALUES.urn,
            common_urns.composites.COMBINE_PER_KEY.urn,
            common_urns.deprecated_primitives.READ.urn,
            common_urns.primitives.ASSIGN_WINDOWS.urn,
            common_urns.primitives.FLATTEN.urn,
            common_urns.primitives.GROUP_BY_KEY.urn,
            common_urns.primitives.IMPULSE.urn,
            common_urns.primitives.PAR_DO.urn,
            common_urns.primitives.TEST_STREAM.urn,
        ]
    )
    | MOVE_URNS
)
_NO_URNS = frozenset(["", python_urns.GENERIC_COMPOSITE_TRANSFORM, python_urns.PICKLED_TRANSFORM])
_PUBSUB_REMEDY = "use beam.io.ReadFromPubSub, whose steps here read the subscription from the workers"
_NO_STEPS_REMEDY = "let its expand() apply steps that exist, such as a ParDo"
# What to use in place of a primitive, by URN, or of a transform that Beam has in Java, by the name of its class.
_REMEDIES = {
    common_urns.composites.PUBSUB_READ.urn: _PUBSUB_REMEDY,
    common_urns.composites.PUBSUB_WRITE.urn: "use beam.io.WriteToPubSub, whose steps publish from the workers",
    "flink:transform:streaming_impulse:v1": "use PeriodicImpulse of apache_beam.transforms.periodicsequence",
    "GenerateSequence": "use PeriodicSequence of apache_beam.transforms.periodicsequence, or beam.Create(range(n))",
    "ReadFromJdbc": "query the database in a DoFn, with its driver for Python",
    "ReadFromKafka": "use luminosity.ReadKafka",
    "ReadFromPubSub": _PUBSUB_REMEDY,
    "StorageWriteToBigQuery": "pass method='FILE_LOADS' or method='STREAMING_INSERTS' to WriteToBigQuery",
    "WriteToJdbc": "insert rows in a DoFn, with the database's driver for Python",
    "WriteToKafka": "use luminosity.WriteKafka",
    "WriteToPubSub": "use beam.io.WriteToPubSub, which is written in Python",
}
_JAVA_REMEDY = "use a transform that is written in Python"
_NOT_RUN = "{} leaves its work to the runner ({}), and LuminosityRunner does not do this work"
_PRIMITIVES = (core.ParDo, core.GroupByKey, core.Flatten, core.Impulse)  # the usual ones, which need no look
_PYTHON_ENVIRONMENTS = frozenset([python_urns.EMBEDDED_PYTHON, python_urns.EMBEDDED_PYTHON_GRPC])


def check(pipeline: beam_runner_api_pb2.Pipeline) -> None:
    """Raise :class:`UnsupportedPipeline` if the engine can't run the pipeline. Names each feature and its step."""
    problems = list(dict.fromkeys(_problems(pipeline)))
    if problems:
        raise UnsupportedPipeline("this pipeline can't run here:\n" + "\n".join(f"  {p}" for p in problems))


def expanded(transform: Any, source: Any, expand: Callable[[], Any]) -> Any:
    """Return what ``expand()`` makes of a transform that is applied to ``source``, while the pipeline is built.

    Raises :class:`UnsupportedPipeline` for a transform that can never run here: one in Java, before Beam downloads and
    starts a service for it, and one that leaves its work to a runner that knows it. The message names the line.
    """
    if _is_java(transform):
        raise _refusal(source, transform, "Beam runs {} in Java, and LuminosityRunner runs Python only", _JAVA_REMEDY)
    stand_in = stand_in_for(transform)
    try:
        result = expand() if stand_in is None else stand_in(transform, source)
    except grpc.RpcError as error:
        service: Any = getattr(transform, "_expansion_service", None)
        if not isinstance(service, str):
            raise
        message = f"{{}} is in another language, and its expansion service at {service} does not answer"
        raise _refusal(source, transform, message, _JAVA_REMEDY) from error
    applied = _applied(source)
    if isinstance(transform, _PRIMITIVES) or applied is None or applied.transform is not transform or applied.parts:
        return result
    values = [value for _, value in ptransform.get_named_nested_pvalues(result)]
    if any(isinstance(value, pvalue.PCollection) and value.producer is None for value in values):
        try:
            urn = str(transform.to_runner_api_parameter(pipeline_context.PipelineContext())[0])
        except NotImplementedError:  # Beam's Read does not know this kind of source
            kind = f"a source of the class {type(transform.source).__name__}"
            remedy = "derive the class from BoundedSource, or write the source as a splittable DoFn"
            raise _refusal(source, transform, _NOT_RUN.format("{}", kind), remedy) from None
        if urn not in RUNS:
            raise _refusal(source, transform, _NOT_RUN.format("{}", _named(urn)), _remedy_of(urn))
    return result


def _is_java(transform: Any) -> bool:
    return (
        isinstance(getattr(transform, "_expansion_service", None), external.JavaJarExpansionService)
        or isinstance(transform, external.JavaExternalTransform)
        or type(transform).__module__ == "apache_beam.transforms.managed"
    )


def _refusal(source: Any, transform: Any, message: str, remedy: str) -> UnsupportedPipeline:
    """Return the error for a transform, named as the user knows it: by the outermost transform of Beam's around it."""
    applied, around = _applied(source), [transform]
    while applied is not None and type(applied.transform).__module__.startswith("apache_beam."):
        around.append(applied.transform)
        applied = applied.parent
    names = [type(each).__name__ for each in around]
    names = names[:1] + [name for name in names[1:] if not name.startswith("_")]
    name = names[0] if names[0] == names[-1] else f"{names[0]} of {names[-1]}"
    place = calling_line()
    where = f"{around[-1].label!r}, at {place}" if place else repr(around[-1].label)
    remedies = [_REMEDIES[name] for name in names if name in _REMEDIES]
    return UnsupportedPipeline(message.format(f"{name} ({where})"), fix=(*remedies, remedy)[0])


def _applied(source: Any) -> Any | None:
    """Return what Beam knows about the transform that is being applied to ``source``; None if that can't be found."""
    if isinstance(source, Mapping):
        sources = [*cast("Mapping[str, Any]", source).values()]
    else:
        sources = [*cast("Iterable[Any]", source)] if isinstance(source, list | tuple) else [source]
    pipeline: Any = next((each.pipeline for each in sources if isinstance(each, pvalue.PValue)), None)
    return pipeline.transforms_stack[-1] if pipeline is not None and pipeline.transforms_stack else None


def _named(urn: str) -> str:
    return "a primitive of its own" if urn in _NO_URNS else urn


def _remedy_of(urn: str) -> str:
    return _REMEDIES.get(urn, _NO_STEPS_REMEDY if urn in _NO_URNS else "use a transform that has steps in Python")


def warn(pipeline: beam_runner_api_pb2.Pipeline, *, is_streaming: bool = False, is_debug: bool = False) -> None:
    """Warn about features that run correctly but may not behave as the author expects.

    ``is_streaming`` and ``is_debug`` say whether the options of these names are given.
    """
    components = pipeline.components
    if is_streaming and not any(may_never_end(each, components) for each in components.pcollections):
        _LOGGER.warning(
            "--streaming: no effect here, since all sources of the pipeline are bounded: groupings emit when their "
            "input is complete, and triggers fire nothing before. Read from an unbounded source, or use a TestStream"
        )
    if is_debug and (blocking := list(_blocking_sources(components))):
        _LOGGER.warning(
            "%s: this source has no end and does not call defer_remainder. With --debug nothing runs beside it, so "
            "that its elements go on only when process returns. Call tracker.defer_remainder() when no record is "
            "there, or run without --debug",
            ", ".join(blocking),
        )
    ends = [
        repr(step.unique_name)
        for step in components.transforms.values()
        if step.spec.urn in _NO_URNS and step.inputs and not step.outputs and not step.subtransforms
    ]
    if ends:
        _LOGGER.warning(
            "%s: its expand() applied no step, so its input goes nowhere. If it should write something, apply a ParDo",
            ", ".join(ends),
        )
    steps = [(step, set(tags)) for step in components.transforms.values() if (tags := _side_input_tags(step))]
    without_end = [
        repr(step.unique_name) for step, tags in steps if any(_never_fires(step.inputs[t], components) for t in tags)
    ]
    if without_end:
        _LOGGER.warning(
            "%s: a side input is unbounded, in the global window and without a trigger; elements wait until it has "
            "ended. Apply beam.WindowInto to it, with windows or with a trigger",
            ", ".join(without_end),
        )
    in_last_window = [repr(step.unique_name) for step, tags in steps if _reads_last_window(step, tags, components)]
    if in_last_window:
        _LOGGER.warning(
            "%s: a side input is unbounded and has windows, but the main input is in the global window; elements read "
            "the last window, and wait until the side input has ended. Apply beam.WindowInto to the main input, or "
            "let the side input be in the global window with a trigger",
            ", ".join(in_last_window),
        )


def _blocking_sources(components: beam_runner_api_pb2.Components) -> Iterator[str]:
    """Yield the names of unbounded splittable steps whose class never calls ``defer_remainder``."""
    for step in components.transforms.values():
        if step.spec.urn not in translations.PAR_DO_URNS or not any(
            may_never_end(output, components) for output in step.outputs.values()
        ):
            continue
        payload = beam_runner_api_pb2.ParDoPayload.FromString(step.spec.payload)
        if not payload.restriction_coder_id or payload.do_fn.urn != python_urns.PICKLED_DOFN_INFO:
            continue
        try:
            do_fn: Any = pickler.loads(payload.do_fn.payload)[0]
        except Exception as error:  # The worker unpickles it, too, and reports the error with the step.
            _LOGGER.debug("can't look at the source %s: %r", step.unique_name, error)
            continue
        if DoFnSignature(do_fn).is_unbounded_per_element() and not _names(type(do_fn), "defer_remainder"):
            yield repr(step.unique_name)


def _names(cls: type, name: str) -> bool:
    """Return whether a method of a class, or of its bases, has ``name`` in its code."""
    codes = [code for base in cls.__mro__ for each in vars(base).values() if (code := getattr(each, "__code__", None))]
    while codes:
        code = codes.pop()
        if name in code.co_names:
            return True
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return False


def _side_input_tags(transform: beam_runner_api_pb2.PTransform) -> Iterable[str]:
    if transform.spec.urn not in translations.PAR_DO_URNS:
        return ()
    return beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).side_inputs


def _never_fires(pcollection_id: str, components: beam_runner_api_pb2.Components) -> bool:
    """Return whether an unbounded PCollection has one window for all time, which no trigger fires before its end."""
    trigger = components.windowing_strategies[components.pcollections[pcollection_id].windowing_strategy_id].trigger
    fires = trigger.WhichOneof("trigger") not in ("default", "never", "after_end_of_window")
    return (
        may_never_end(pcollection_id, components)
        and _is_global(pcollection_id, components)
        and not fires
        and not trigger.after_end_of_window.HasField("early_firings")
    )


def _reads_last_window(
    step: beam_runner_api_pb2.PTransform, side_tags: set[str], components: beam_runner_api_pb2.Components
) -> bool:
    """Return whether a step in the global window has an unbounded side input with other windows."""
    main = [pcollection for tag, pcollection in step.inputs.items() if tag not in side_tags]
    streams = [step.inputs[tag] for tag in side_tags if may_never_end(step.inputs[tag], components)]
    return any(_is_global(each, components) for each in main) and not all(_is_global(s, components) for s in streams)


def _is_global(pcollection_id: str, components: beam_runner_api_pb2.Components) -> bool:
    strategy_id = components.pcollections[pcollection_id].windowing_strategy_id
    return components.windowing_strategies[strategy_id].window_fn.urn == common_urns.global_windows.urn


def _problems(pipeline: beam_runner_api_pb2.Pipeline) -> Iterator[str]:
    components = pipeline.components
    steps = [t for t in components.transforms.values() if not t.subtransforms]
    for step in steps:
        name = repr(step.unique_name)
        if step.spec.urn == common_urns.primitives.FLATTEN.urn and (windows := _different_windows(step, components)):
            yield (
                f"step {name}: found inputs with different windows ({windows}), expected the same; "
                "apply the same beam.WindowInto to each of them"
            )
        environment = components.environments.get(step.environment_id)
        if environment is not None and not _is_python(environment):
            yield (
                f"step {name}: found the environment {environment.urn}, expected a step in Python that runs in a "
                f"process of this machine; {_JAVA_REMEDY}"
            )
        if step.spec.urn in translations.PAR_DO_URNS:
            yield from _pardo_problems(name, step.spec.payload)
        elif step.spec.urn not in RUNS and not _does_nothing(step):
            yield f"{_NOT_RUN.format(f'step {name}', _named(step.spec.urn))}; {_remedy_of(step.spec.urn)}"
        elif step.spec.urn == common_urns.deprecated_primitives.READ.urn and _is_endless(step.spec.payload):
            yield f"{_NOT_RUN.format(f'step {name}', 'a source without an end')}; read it in a splittable DoFn"
    found = {p for p in pipeline.requirements if p not in _SUPPORTED_REQUIREMENTS}
    named = {
        _REQUIREMENTS.REQUIRES_STABLE_INPUT.urn,
        _REQUIREMENTS.REQUIRES_TIME_SORTED_INPUT.urn,
        _REQUIREMENTS.REQUIRES_ON_WINDOW_EXPIRATION.urn,
    }
    for requirement in sorted(found - named):
        yield f"the pipeline requires {requirement}"


def _does_nothing(step: beam_runner_api_pb2.PTransform) -> bool:
    """Return whether a step without a URN only hands on its input, or ends there: its ``expand`` applied no step."""
    return step.spec.urn in _NO_URNS and {*step.outputs.values()} <= {*step.inputs.values()}


def _is_endless(payload: bytes) -> bool:
    read = beam_runner_api_pb2.ReadPayload.FromString(payload)
    return read.is_bounded == beam_runner_api_pb2.IsBounded.UNBOUNDED


def _different_windows(flatten: beam_runner_api_pb2.PTransform, components: beam_runner_api_pb2.Components) -> str:
    """Return the window functions of a Flatten's inputs if their windows are encoded differently."""
    inputs = {components.pcollections[p].windowing_strategy_id for p in flatten.inputs.values()}
    strategies = [components.windowing_strategies[i] for i in inputs]
    coders = {components.coders[s.window_coder_id].SerializeToString(deterministic=True) for s in strategies}
    return ", ".join(sorted({s.window_fn.urn.split(":")[-2] for s in strategies})) if len(coders) > 1 else ""


def _pardo_problems(name: str, payload: bytes) -> Iterator[str]:
    pardo = beam_runner_api_pb2.ParDoPayload.FromString(payload)
    if pardo.requires_stable_input:
        yield f"step {name}: stable input is not supported"
    if pardo.requires_time_sorted_input:
        yield f"step {name}: time-sorted input is not supported"
    if pardo.on_window_expiration_timer_family_spec:
        yield f"step {name}: on_window_expiration is not supported"
    domains = (
        beam_runner_api_pb2.TimeDomain.EVENT_TIME,
        beam_runner_api_pb2.TimeDomain.PROCESSING_TIME,
    )
    for family, spec in pardo.timer_family_specs.items():
        if spec.time_domain not in domains:
            yield f"step {name}: timer {family!r} is in time domain {spec.time_domain}"


def _is_python(environment: beam_runner_api_pb2.Environment) -> bool:
    return environment.urn in _PYTHON_ENVIRONMENTS
