"""Checks for features that the engine does not support, before anything runs."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.internal import pickler
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.common import DoFnSignature
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.transforms import external

from luminosity.engine.plan.graph import may_never_end
from luminosity.errors import UnsupportedPipeline

__all__ = ["check", "refuse_java", "warn"]


_LOGGER = logging.getLogger(__name__)
_REQUIREMENTS = common_urns.requirements
_SUPPORTED_REQUIREMENTS = frozenset(
    [
        _REQUIREMENTS.REQUIRES_STATEFUL_PROCESSING.urn,
        _REQUIREMENTS.REQUIRES_BUNDLE_FINALIZATION.urn,
        _REQUIREMENTS.REQUIRES_SPLITTABLE_DOFN.urn,
    ]
)
# What to use in place of a transform that Beam has in Java.
_WITHOUT_JAVA = {
    "ReadFromKafka": "use luminosity.ReadKafka",
    "StorageWriteToBigQuery": "pass method='FILE_LOADS' or method='STREAMING_INSERTS' to WriteToBigQuery",
    "WriteToKafka": "use luminosity.WriteKafka",
}
_PYTHON_ENVIRONMENTS = frozenset([python_urns.EMBEDDED_PYTHON, python_urns.EMBEDDED_PYTHON_GRPC])


def check(pipeline: beam_runner_api_pb2.Pipeline) -> None:
    """Raise :class:`UnsupportedPipeline` if the engine can't run the pipeline. Names each feature and its step."""
    problems = list(dict.fromkeys(_problems(pipeline)))
    if problems:
        raise UnsupportedPipeline("this pipeline can't run here:\n" + "\n".join(f"  {p}" for p in problems))


def refuse_java(transform: Any) -> None:
    """Raise :class:`UnsupportedPipeline` for a transform in Java, before Beam downloads and starts a service for it."""
    if isinstance(getattr(transform, "_expansion_service", None), external.JavaJarExpansionService):
        name = type(transform).__name__
        raise UnsupportedPipeline(
            f"Beam runs {name} ({transform.label}) in Java, and LuminosityRunner runs Python only",
            fix=_WITHOUT_JAVA.get(name, "use a transform that is written in Python"),
        )


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
            yield f"step {name}: found environment {environment.urn}, expected a Python step"
        if step.spec.urn in translations.PAR_DO_URNS:
            yield from _pardo_problems(name, step.spec.payload)
    found = {p for p in pipeline.requirements if p not in _SUPPORTED_REQUIREMENTS}
    named = {
        _REQUIREMENTS.REQUIRES_STABLE_INPUT.urn,
        _REQUIREMENTS.REQUIRES_TIME_SORTED_INPUT.urn,
        _REQUIREMENTS.REQUIRES_ON_WINDOW_EXPIRATION.urn,
    }
    for requirement in sorted(found - named):
        yield f"the pipeline requires {requirement}"


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
