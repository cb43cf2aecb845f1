"""What transforms that run models share when the pipeline is built: settings, resources of steps, dead letters."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import apache_beam as beam
from apache_beam.transforms.trigger import DefaultTrigger
from apache_beam.transforms.window import GlobalWindows
from typing_extensions import Self

from luminosity._shared.accelerators import accelerators_of, write_accelerators
from luminosity._shared.environment_hint import PYTHON_ENVIRONMENT
from luminosity.core import ACCELERATORS, BUNDLES_PER_DEVICE, LOADS_MODELS, SORTS_ITS_BUNDLE
from luminosity.errors import HandlerError, InvalidArgument
from luminosity.inference.handler import Handler
from luminosity.inference.options import ModelCacheConfig, memory_budget_of, processes_of, threads_of
from luminosity.inference.registry.resolved import ResolvedModel
from luminosity.inference.run_settings import RunSettings
from luminosity.inference.steps.messages import StepSettings
from luminosity.inference.steps.pinning import annotate_versions

__all__ = ["ExceptionHandling", "ModelNeeds", "ModelTransform", "by_needs", "run_models"]

NameT = TypeVar("NameT", bound=Hashable)

_BUNDLES_PER_DEVICE = 8  # enough examples at once to fill batches

_run_ids: weakref.WeakKeyDictionary[beam.Pipeline, str] = weakref.WeakKeyDictionary()


def _one(_: Any) -> int:
    return 1


@dataclass(frozen=True)
class ExceptionHandling:
    """The arguments of ``with_exception_handling``."""

    exc_class: type[BaseException] | tuple[type[BaseException], ...] = Exception
    use_subprocess: bool = False
    threshold: float = 1
    timeout: float | None = None

    @property
    def caught(self) -> tuple[type[BaseException], ...]:
        """The classes of the errors that become dead letters."""
        return self.exc_class if isinstance(self.exc_class, tuple) else (self.exc_class,)


class ModelTransform(beam.PTransform[Any, Any]):
    """The base of transforms that run models: resource hints for the models, and dead letters."""

    def __init__(self) -> None:
        super().__init__()
        self._hints: dict[str, Any] = {}
        self._handling: ExceptionHandling | None = None

    def with_resource_hints(self, **kwargs: Any) -> Self:
        """Set hints for the steps that run models. They override the handlers' own hints.

        ``python_environment`` is for all steps of the transform: examples are prepared by the model's own libraries.
        """
        hints = dict(kwargs)
        of_all = {PYTHON_ENVIRONMENT: hints.pop(PYTHON_ENVIRONMENT)} if PYTHON_ENVIRONMENT in hints else {}
        self._hints.update(hints)
        super().with_resource_hints(**of_all)
        return self

    def with_exception_handling(
        self,
        *,
        exc_class: type[BaseException] | tuple[type[BaseException], ...] = Exception,
        use_subprocess: bool = False,
        threshold: float = 1,
        timeout: float | None = None,
    ) -> Self:
        """Return dead letters instead of failing the pipeline: the transform then has two outputs.

        Args:
            exc_class: the errors to catch.
            use_subprocess: run each model in its own process, so that a crash becomes a dead letter, too.
            threshold: the share of failures above which the pipeline fails.
            timeout: seconds for one batch, including the load of the model if it is not yet in memory.
        """
        self._handling = ExceptionHandling(exc_class, use_subprocess, threshold, timeout)
        return self

    def _settings_for(
        self, values: Any, settings: StepSettings, handlers: Iterable[Handler[Any, Any, Any]]
    ) -> StepSettings:
        """Complete the settings with the exception handling, and with the options and the runner of the pipeline."""
        pipeline: beam.Pipeline = values.pipeline
        options, handling = pipeline.options, self._handling
        run = RunSettings.of(options)
        if run.max_cost is not None:
            for handler in handlers:
                handler.check_run_budget(run.max_cost)
        if handling is not None:
            settings = replace(
                settings,
                load_late=settings.load_late or handling.timeout is not None,
                caught=handling.caught,
                timeout=handling.timeout,
                use_subprocess=handling.use_subprocess,
            )
        return replace(
            settings,
            is_stream=not values.is_bounded,
            model_cache=ModelCacheConfig.of(options),
            threads=threads_of(options),
            memory_budget=memory_budget_of(options),
            run=run,
            workers=processes_of(pipeline),
            # All transforms of a pipeline share it: their models share the memory of one machine.
            run_id=_run_ids.setdefault(pipeline, uuid.uuid4().hex),
        )

    def _check_threshold(self, good: Any, bad: Any, count: Callable[[Any], int] = _one) -> None:
        """Let the pipeline fail if a larger share of the examples of a window fails than the threshold allows.

        ``count`` returns how many examples an element holds.
        """
        threshold = 1 if self._handling is None else self._handling.threshold
        if threshold >= 1:
            return
        windowing = good.windowing
        is_global = isinstance(windowing.windowfn, GlobalWindows) and isinstance(windowing.triggerfn, DefaultTrigger)
        if is_global and not good.is_bounded:
            raise InvalidArgument(
                f"found threshold={threshold} in a stream that has no windows, expected windows to count failures in",
                fix="apply beam.WindowInto(FixedWindows(60)) first, or leave threshold out",
            )
        counts = beam.Map(lambda element: (0, count(element))).with_output_types(tuple[int, int])
        failures = beam.Map(lambda element: (count(element),) * 2).with_output_types(tuple[int, int])
        _ = (
            (good | "CountGood" >> counts, bad | "CountBad" >> failures)
            | "AllExamples" >> beam.Flatten()
            | "Total" >> beam.CombineGlobally(_sums).without_defaults()
            | "CheckThreshold" >> beam.Map(_check, threshold)
        )


@dataclass(frozen=True)
class ModelNeeds:
    """The resources of a step that runs models: resource hints, and the accelerators that the models use."""

    hints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    accelerators: tuple[str, ...] | None = None  # as Handler.accelerators

    @classmethod
    def of(cls, handler: Handler[Any, Any, Any], overriding: Mapping[str, Any]) -> ModelNeeds:
        """Return what a handler needs; ``overriding`` are the hints of the transform."""
        of_handler = handler.get_resource_hints()
        if PYTHON_ENVIRONMENT in of_handler:
            raise InvalidArgument(
                f"found {PYTHON_ENVIRONMENT} among the resource hints of {handler}, expected it on the transform, "
                "since all its steps run there",
                fix=f"transform.with_resource_hints({PYTHON_ENVIRONMENT}={of_handler[PYTHON_ENVIRONMENT]!r})",
            )
        hints = {**of_handler, **overriding}
        # A hint decides alone, so the handlers need not be told apart.
        return cls(hints, None if "accelerator" in hints else accelerators_of(handler))

    def can_share(self, other: ModelNeeds) -> bool:
        """Return whether models with these needs can run in one step."""
        if not self.accelerators or not other.accelerators:
            return self == other
        return self.hints == other.hints

    def annotations(self) -> dict[str, str]:
        """Return the annotations of the step, which tell the engine if it can use an accelerator."""
        found = write_accelerators(self.accelerators)
        return {ACCELERATORS: found, BUNDLES_PER_DEVICE: str(_BUNDLES_PER_DEVICE)}

    def shared_hints(self) -> dict[str, Any]:
        """Return the hints with a limit of active bundles: bundles share the model, and batches combine them."""
        limit = {"max_active_bundles_per_worker": str(_BUNDLES_PER_DEVICE)}
        return {**limit, **self.hints} if self.hints else {}


def by_needs(needs: Mapping[NameT, ModelNeeds]) -> Iterator[tuple[ModelNeeds, Sequence[NameT]]]:
    """Yield groups of names that can share a step: with the same hints, on a device or not.

    Models that use different kinds of accelerators stay together, so that the host can choose among their work.

    >>> large = ModelNeeds({"min_ram": "4GB"})
    >>> [names for _, names in by_needs({"a": ModelNeeds(), "b": large, "c": ModelNeeds()})]
    [['a', 'c'], ['b']]
    >>> list(by_needs({"a": ModelNeeds({}, ("gpu",)), "b": ModelNeeds({}, ("tpu",)), "c": ModelNeeds({}, ())}))
    [(ModelNeeds(hints={}, accelerators=('gpu', 'tpu')), ['a', 'b']), (ModelNeeds(hints={}, accelerators=()), ['c'])]
    """
    left = dict(needs)
    while left:
        first = next(iter(left.values()))
        same = {name: each for name, each in left.items() if each.can_share(first)}
        for name in same:
            del left[name]
        kinds = sorted({kind for each in same.values() for kind in each.accelerators or ()})
        yield replace(first, accelerators=tuple(kinds) or first.accelerators), list(same)


def run_models(
    blocks: Any, label: str, infer: Any, needs: ModelNeeds, versions: Iterable[ResolvedModel], sorts: str | None
) -> Any:
    """Apply the ParDo that runs models, with their resources, and annotations that tell the engine about them.

    ``sorts`` says what the step sorts by cost in its bundles: the value of ``SORTS_ITS_BUNDLE``; None for nothing.
    """
    sorting = {} if sorts is None else {SORTS_ITS_BUNDLE: sorts}
    annotations = {LOADS_MODELS: "", **sorting, **needs.annotations(), **annotate_versions(versions)}
    with blocks.pipeline.transform_annotations(**annotations):
        return blocks | label >> infer.with_resource_hints(**needs.shared_hints())


def _sums(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    failed, total = 0, 0
    for each in counts:
        failed, total = failed + each[0], total + each[1]
    return failed, total


def _check(counts: tuple[int, int], threshold: float, window: Any = beam.DoFn.WindowParam) -> None:
    bad, total = counts
    if bad > total * threshold:
        raise HandlerError(
            f"{bad} of {total} examples failed in the window {window!r}: found a share of {bad / total:.3g}, "
            f"expected at most threshold={threshold}"
        )
