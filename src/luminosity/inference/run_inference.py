"""RunInference: run a model on the elements of a PCollection, on any Beam runner."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import apache_beam as beam
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.ml.inference.base import ModelHandler, RunInferenceDLQ
from apache_beam.transforms import window

from luminosity.errors import InvalidArgument
from luminosity.inference.adapting.adapt import ModelSet, check_batching, check_files, check_handler
from luminosity.inference.host.interface import Clock
from luminosity.inference.prompts.prompt import Prompt
from luminosity.inference.steps.dofns import FAILED, InferDoFn, PrepareDoFn, ResultsDoFn
from luminosity.inference.steps.expanding import ModelNeeds, ModelTransform, by_needs, run_models
from luminosity.inference.steps.messages import PreparedBlock, ResultBlock, StepSettings
from luminosity.inference.steps.pinning import PinnedModels, annotate_models, pin_models
from luminosity.inference.steps.updates import Updates, warn_without_updates
from luminosity.tables.types import fields_of

__all__ = ["RunInference"]

Collection: TypeAlias = Any  # Beam annotates the result of | as PValue for every transform.


class RunInference(ModelTransform):
    """Predicts examples with a model; a drop-in replacement for Beam's transform of the same name.

    It takes any ModelHandler and all arguments of Beam's RunInference, and gives the same results and metrics. It
    batches by cost instead of count, across bundles. The CPU prepares examples while the device computes. A batch that
    is too large for the device's memory is halved and retried, and a failure belongs to the example at fault.

    It expands to the steps Prepare, Infer and Results. Resource hints, from the handler or given to this transform,
    apply only to Infer, so tokenising stays on CPU workers.

    With ``with_exception_handling()`` it returns ``(predictions, RunInferenceDLQ)``. ``failed_inferences`` holds
    ``([example], (error class, message, traceback))`` for exactly the examples that fail alone.
    ``failed_preprocessing`` and ``failed_postprocessing`` hold a PCollection for each function.

    >>> import apache_beam as beam
    >>> from luminosity import Handler, RunInference
    >>> class Doubler(Handler[int, int, None]):
    ...     def load_model(self):
    ...         return None
    ...
    ...     def predict(self, model, batch, inference_args=None):
    ...         return [2 * example for example in batch]
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     _ = pipeline | beam.Create([21]) | RunInference(Doubler()) | beam.Map(print)
    PredictionResult(example=21, inference=42, model_id=None)
    """

    def __init__(
        self,
        model_handler: ModelHandler[Any, Any, Any],
        clock: Clock = time,
        inference_args: dict[str, Any] | None = None,
        metrics_namespace: str | None = None,
        *,
        model_metadata_pcoll: Collection | None = None,
        watch_model_pattern: str | None = None,
        watch_registry: bool = False,
        model_identifier: str | None = None,
        use_model_manager: bool = False,
        model_manager_args: dict[str, Any] | None = None,
        monitoring_transform: beam.PTransform[Any, Any] | None = None,
        drop_example: bool = False,
        interval: float | None = None,
        stop_timestamp: Any = None,
    ) -> None:
        """Configure the transform.

        Args:
            model_handler: loads the model and runs it.
            clock: measures the times in Beam's metrics; for tests.
            inference_args: passed to every call of the model.
            metrics_namespace: the namespace of the metrics; the handler's unless given.
            model_metadata_pcoll: a side input with the ModelMetadata of the model to use, or, with a model for each
                key, a list of KeyModelPathMapping. The old version is used until the new one is loaded, unless the
                side input has windows: then each window gets the model that it names.
            watch_model_pattern: files to watch, on any file system of Beam's. The newest file that appears while the
                pipeline runs is the model to use. A pattern that ends with ``/`` or ``/_SUCCESS`` means folders. With a
                model for each key, ``{key}`` stands for the key. Each worker looks for itself, so this needs no
                streaming pipeline.
            watch_registry: whether to use the new version if the handler names its model by an alias of a registry,
                such as ``models:/sentiment@champion``, and the alias gets another version while the pipeline runs.
            model_identifier: transforms with the same one share a model.
            use_model_manager: no effect: models always share the device's memory.
            model_manager_args: not allowed: the model host replaces Beam's model manager.
            monitoring_transform: gets the predictions before the postprocess functions.
            drop_example: leave the example out of the results, to save memory.
            interval: seconds between two looks for new versions; 360 unless given.
            stop_timestamp: when to stop looking.
        """
        super().__init__()
        check_handler(model_handler)
        if model_manager_args:
            raise InvalidArgument(
                f"found model_manager_args={model_manager_args!r}, which configure Beam's model manager; here the "
                "model host replaces it",
                fix="leave model_manager_args out",
            )
        self._model_handler = model_handler
        self._clock = clock
        self._inference_args = inference_args
        self._metrics_namespace = metrics_namespace
        self._updates = Updates(model_metadata_pcoll, watch_model_pattern, watch_registry, interval, stop_timestamp)
        self._step_id = uuid.uuid4().hex
        self._model_tag = model_identifier or self._step_id
        self._monitoring_transform = monitoring_transform
        self._drop_example = drop_example

    @classmethod
    def from_callable(
        cls, model_handler_provider: Callable[..., ModelHandler[Any, Any, Any]], **kwargs: Any
    ) -> RunInference:
        """Create the transform from a function that returns the handler, as other SDKs need it."""
        return cls(model_handler_provider(**kwargs))

    def annotations(self) -> dict[str, Any]:
        """Return Beam's annotations of the transform, with the handler and the model."""
        monitoring = self._monitoring_transform
        return {
            "model_handler": str(self._model_handler),
            "model_handler_type": f"{type(self._model_handler).__module__}.{type(self._model_handler).__qualname__}",
            "model_identifier": self._model_tag,
            **({} if monitoring is None else {"monitoring_transform": str(monitoring)}),
            **annotate_models(self._model_handler),
            **super().annotations(),
        }

    def with_monitoring_transform(self, monitoring_transform: beam.PTransform[Any, Any]) -> RunInference:
        """Apply this transform to the predictions, before the postprocess functions."""
        self._monitoring_transform = monitoring_transform
        return self

    def expand(self, input_or_inputs: Collection) -> Any:
        """Apply the functions before the model, the three steps, and the functions after it."""
        handler = self._model_handler
        handler.validate_inference_args(self._inference_args)
        examples, failed_before = self._apply_functions(
            input_or_inputs, list(handler.get_preprocess_fns()), "BeamML_RunInference_Preprocess"
        )
        predictions, failed = self._predict(examples)
        if self._monitoring_transform is not None:
            with predictions.pipeline.transform_annotations(model_identifier=""):
                _ = predictions | "BeamML_RunInference_MonitoringOutlet" >> self._monitoring_transform
        results, failed_after = self._apply_functions(
            predictions, list(handler.get_postprocess_fns()), "BeamML_RunInference_Postprocess"
        )
        if failed is None:
            return results
        return results, RunInferenceDLQ(failed, failed_before, failed_after)

    def _predict(self, examples: Collection) -> tuple[Collection, Collection | None]:
        pinned = pin_models(self._model_handler, examples.pipeline)
        models = ModelSet(pinned.handler)
        _check_columns(examples, pinned.handler)
        check_batching(models.handlers.values())
        if self._updates.pattern is not None or self._updates.metadata is not None:
            warn_without_updates(models)
        elif not models.is_keyed or self._handling is None:  # otherwise the other keys' examples may succeed
            check_files(models.handlers.values(), examples.pipeline)
        settings = self._settings(examples, models, pinned)
        if settings.is_stream:
            # A source without end may have one bundle at a time: its elements go to all workers, and it need not wait
            # for the model.
            examples = examples | "Spread" >> beam.Reshuffle()
        blocks = self._infer(examples, pinned.handler, models, settings)
        results = beam.ParDo(ResultsDoFn(models, self._drop_example))
        if self._handling is None:
            return blocks | "Results" >> results, None
        outputs = blocks | "Results" >> results.with_outputs(FAILED, main="predicted")
        self._check_threshold(outputs.predicted, outputs[FAILED])
        return outputs.predicted, outputs[FAILED]

    def _infer(
        self, examples: Collection, handler: ModelHandler[Any, Any, Any], models: ModelSet, settings: StepSettings
    ) -> Collection:
        """Apply Prepare and Infer; with several Infer steps if models need different resources."""
        metadata = self._updates.metadata
        side_input = None if metadata is None else pvalue.AsSingleton(metadata)
        prepared = examples | "Prepare" >> beam.ParDo(PrepareDoFn(models, settings)).with_output_types(PreparedBlock)
        groups = list(by_needs({name: ModelNeeds.of(each, self._hints) for name, each in models.handlers.items()}))
        results: list[Collection] = []
        for number, (needs, names) in enumerate(groups, start=1):
            label = "Infer" if len(groups) == 1 else f"Infer {number}"
            mine = prepared
            if len(groups) > 1:
                mine = prepared | f"For {label}" >> beam.Filter(_is_for, frozenset(names))
            infer = beam.ParDo(InferDoFn(handler, settings), side_input).with_output_types(ResultBlock)
            versions = [each for name, each in settings.registered.items() if name in names]
            results.append(run_models(mine, label, infer, needs, versions, sorts=""))
        return results[0] if len(results) == 1 else results | beam.Flatten()

    def _settings(self, examples: Collection, models: ModelSet, pinned: PinnedModels) -> StepSettings:
        metadata = self._updates.metadata
        settings = StepSettings(
            step_id=self._step_id,
            model_tag=self._model_tag,
            metrics_namespace=self._metrics_namespace or self._model_handler.get_metrics_namespace(),
            inference_args=self._inference_args,
            clock=self._clock,
            load_late=metadata is not None,
            updates_may_lag=metadata is None or isinstance(metadata.windowing.windowfn, window.GlobalWindows),
            watch=self._updates.watch(models, pinned),
            registered=pinned.registered,
        )
        return self._settings_for(examples, settings, models.handlers.values())

    def _apply_functions(
        self, values: Collection, functions: Sequence[Callable[[Any], Any]], label: str
    ) -> tuple[Collection, Sequence[Collection]]:
        failed: list[Collection] = []
        for number, function in enumerate(functions):
            step = beam.Map(function)
            if self._handling is None:
                values = values | f"{label}-{number}" >> step
            else:
                handled = step.with_exception_handling(**asdict(self._handling))
                values, bad = values | f"{label}-{number}" >> handled
                failed.append(bad)
        return values, failed


def _is_for(block: PreparedBlock, names: frozenset[Hashable]) -> bool:
    return block.model in names


def _check_columns(examples: Collection, handler: ModelHandler[Any, Any, Any]) -> None:
    """Raise if rows, whose columns their type tells, lack a column that a prompt takes."""
    if isinstance(handler, Prompt) and (fields := fields_of(examples.element_type)) is not None:
        handler.check_input_type(pa.struct([(name, kind or pa.null()) for name, kind in fields.items()]))
