"""The handler: the contract between a model and the host that runs it; and the limits of batches that it sets."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from typing_extensions import TypedDict, Unpack

from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.blocks import Block, rows, size
from luminosity.inference.continuous import ContinuousModel, answers_of

__all__ = [
    "Handler",
    "HandlerOptions",
    "Limits",
    "PartlyFailed",
    "check_handler_options",
    "limits_of",
    "note",
    "noting",
    "warn_of_settings_without_meaning",
]
_LOGGER = logging.getLogger(__name__)
_MAX_COUNT = 10_000  # as in Beam's BatchElements
_BUCKETS = (16, 32, 64, 128, 256, 512)  # as in Beam, if lengths are given and boundaries are not
_HEEDED = {
    "min_batch_size",
    "max_batch_size",
    "max_batch_duration_secs",
    "target_batch_duration_secs",
    "target_batch_overhead",
    "max_batch_weight",
    "element_size_fn",
    "length_fn",
    "bucket_boundaries",
}
_WITHOUT_MEANING = {
    "clock": "the host has one clock for all batches",
    "record_metrics": "the host always records them",
    "target_batch_duration_secs_including_fixed_cost": "use target_batch_duration_secs, which includes it here",
    "variance": "batches differ in cost by themselves, and the host learns from that",
}

ExampleT = TypeVar("ExampleT")
PredictionT = TypeVar("PredictionT")
ModelT = TypeVar("ModelT")


class Handler(ModelHandler[ExampleT, PredictionT, ModelT]):
    """A Beam ModelHandler with more hooks, so that the model host can prepare, batch and measure.

    ``load_model`` and ``predict`` make a complete handler; every other hook has a default. The host calls the hooks in
    this order:

    | hook         | where                            | what                                                       |
    |--------------|----------------------------------|------------------------------------------------------------|
    | ``prepare``  | CPU workers, many blocks at once | tokenise, decode, resize: one prepared example per example |
    | ``cost``     | CPU workers                      | the cost of each prepared example: tokens, pixels          |
    | ``collate``  | beside the device, one thread    | pad and stack the examples of one batch                    |
    | ``transfer`` | beside the device, one thread    | move the batch to the device                               |
    | ``predict``  | the device, ``concurrency`` calls| compute; may return before the device is done              |
    | ``wait``     | beside the device, one thread    | block until the outputs of ``predict`` are computed        |
    | ``collect``  | beside the device, one thread    | turn the outputs into one value per example                |

    The cost of a batch is that of its most costly example times the number of examples. The host finds how much a
    batch may cost. After an exception that means "out of memory" it retries with half of the batch; other exceptions
    belong to the examples of the batch.

    A handler is pickled for the workers, with everything it holds: load heavy things lazily. Beam's own RunInference
    can run it, too.

    >>> class Doubler(Handler[int, int, str]):
    ...     def load_model(self):
    ...         return "twice"
    ...
    ...     def predict(self, model, batch, inference_args=None):
    ...         return [2 * example for example in batch]
    >>> Doubler().run_inference([1, 2], "twice")
    [PredictionResult(example=1, inference=2, model_id=None), PredictionResult(example=2, inference=4, model_id=None)]
    """

    output_type: pa.DataType | None = None
    """The Arrow type of one prediction, for predictions that become a column of a table."""
    self_batching: bool = False
    """Whether ``predict`` gets one example at a time, in up to ``concurrency`` calls at once.

    A model that takes examples as they come, as vLLM does, needs no threads for that and no ``predict``: let
    ``load_model`` return a :class:`~luminosity.inference.continuous.ContinuousModel`."""
    columnar: bool = False
    """Whether the handler takes columns of a table: ``prepare`` then gets an Arrow array, a numpy matrix or a record
    batch instead of a list of examples, and does almost no work per row."""
    sums_costs: bool = False
    """Whether a batch costs the sum of its examples' costs, because none is padded to the most costly one.

    The host asks when the model is loaded. ``collate`` then gets slices of what ``prepare`` returned, and must not
    change them: the same examples may be computed again."""
    concurrency: int = 1
    """How many calls of ``predict`` may run at once; above 1 only for thread-safe models."""
    takes_nulls: bool = False
    """Whether ``Enrich`` passes on rows in which an input is null, which otherwise fail."""
    prefers_one_copy: bool = False
    """Whether all workers of a machine should use one model, in the shared host, because it remembers its answers."""

    def __init__(self, **options: Unpack[HandlerOptions]) -> None:
        """The options are those of Beam's ModelHandler, whose documentation explains them; all are optional."""
        super().__init__(**check_handler_options(options, type(self)))

    def __str__(self) -> str:
        """Return the handler's name in errors; a wrapper returns the name of the handler that it wraps."""
        return type(self).__name__

    @property
    def accelerators(self) -> tuple[str, ...] | None:
        """The kinds of accelerators that the model uses if it can, such as ``("gpu",)`` or ``("gpu", "tpu")``.

        The step then runs on an accelerator of the machine, if it has one of this kind. ``()`` means that the model
        never uses one. None, the default, means that it gets one only if a resource hint or an option asks for it.
        """
        return None

    @property
    def model_id(self) -> str | None:
        """The ``model_id`` of this model's ``PredictionResult``."""
        return None

    def path_of_model(self) -> str | None:
        """Return the path, or the name in a registry, that the handler was given; None if it has none.

        The default is ``model_id``.
        """
        return self.model_id

    def check_files(self) -> None:
        """Raise ``ModelUnavailable`` if the model's files can't be found from this process.

        Called while a pipeline is built whose workers run on this machine, so that a wrong path is known before
        anything runs. Must be quick. The default checks nothing.
        """

    def check_run_budget(self, max_cost: float) -> None:
        """Raise ``InvalidArgument`` if the model costs money, and the cost of what it does is not known.

        Called while a pipeline with the option ``--max_cost`` is built. The default does nothing.
        """

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise ``InvalidType`` if examples can't be values of this Arrow type.

        ``Enrich`` calls it before a model is loaded: when the pipeline is built if the table's columns are known then,
        otherwise with the first table. The default accepts every type.
        """

    def prepare(self, block: Block) -> Block:
        """Return one prepared example for each example, in the same order."""
        return block

    def prepare_key(self) -> Hashable | None:
        """Return a key that is equal for handlers whose ``prepare`` gives the same result for every example.

        Several models of one table then prepare it once. None means that no other handler prepares alike.
        """
        return None

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the cost of each prepared example."""
        return np.ones(len(prepared))

    def collate(self, prepared: Block) -> Any:
        """Pad and stack the examples of one batch."""
        return prepared

    def transfer(self, batch: Any) -> Any:
        """Move a collated batch to the device."""
        return batch

    def predict(self, model: ModelT, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Run the model on a batch; may return before the device is done."""
        if isinstance(model, ContinuousModel):  # where no model host is
            return answers_of(model, rows(batch), inference_args)
        raise NotImplementedError(f"{type(self).__name__} has no method predict")

    def wait(self, outputs: Any) -> None:
        """Block until the outputs of ``predict`` are computed."""

    def collect(self, outputs: Any) -> Block:
        """Return one value for each example of the batch, in the same order; ``PartlyFailed`` if some have failed."""
        return outputs

    def warm_up(self, model: ModelT) -> None:
        """Run the model once before the first batch, to compile and allocate."""

    def memory(self, model: ModelT) -> int | None:
        """Return the bytes that this model takes on its device, or None to let the host measure."""
        return None

    def abandon(self, model: ModelT) -> None:
        """Stop what this model still computes: a batch exceeded its timeout, and the model is loaded again."""

    def submits(self, inference_args: Mapping[str, Any] | None) -> bool:
        """Return whether examples with these arguments go to the ``submit`` of a ``ContinuousModel``.

        Otherwise batches of them go to ``predict``, as for other models.
        """
        return True

    def is_repeatable(self, inference_args: Mapping[str, Any] | None) -> bool | None:
        """Return whether equal examples always get equal predictions, so that ``Enrich`` may compute one for all.

        False for models that draw by chance. None, the default, if it is not known: only a ``Column`` that asks for it
        then does so.
        """
        return None

    def takes_updates(self) -> bool:
        """Return whether the handler can load a new version: whether it implements ``update_model_path``."""
        return type(self).update_model_path is not ModelHandler.update_model_path

    def check_prepares_like(self, first: Any) -> None:
        """Raise if this new version of a model can't use examples that ``prepare`` of the first version made.

        CPU workers keep preparing with the first version.
        """

    def num_examples(self, collated: Any, count: int) -> int:
        """Return how many predictions a batch counts as, if not one for each example."""
        return count

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        """Return what RunInference emits for an example and its prediction."""
        return PredictionResult(None if drop_example else example, value, model_id)

    def batch_results(
        self, examples: Sequence[Any], values: Sequence[Any], model_id: str | None, drop_example: bool
    ) -> Sequence[Any]:
        """Return what RunInference emits for several examples and their predictions: one ``result`` for each."""
        result = self.result
        return [result(*pair, model_id, drop_example) for pair in zip(examples, values, strict=True)]

    def get_num_bytes(self, batch: Any) -> int:
        """Return the bytes of a collated batch, for the metrics; an estimate is enough, and must be quick."""
        return size(batch) if isinstance(batch, list) else int(getattr(batch, "nbytes", 0))

    def run_inference(
        self, batch: Sequence[ExampleT], model: ModelT, inference_args: dict[str, Any] | None = None
    ) -> Iterable[PredictionT]:
        """Call all hooks in order, as Beam's own RunInference needs it."""
        examples = list(batch)
        prepared = self.prepare(examples)
        if isinstance(model, ContinuousModel) and self.submits(inference_args):
            outputs = answers_of(model, rows(prepared), inference_args)
        else:
            outputs = self.predict(model, self.transfer(self.collate(prepared)), inference_args)
            self.wait(outputs)
        found = self.collect(outputs)
        if isinstance(found, PartlyFailed):
            raise next(iter(found.errors.values()))
        values = rows(found)
        return [PredictionResult(*pair, self.model_id) for pair in zip(examples, values, strict=True)]  # type: ignore[misc]


@dataclass(frozen=True)
class PartlyFailed:
    """What ``collect`` returns if some examples of a batch have failed by themselves: the others are not at fault."""

    values: Block
    """A value for each example; those of failed examples are ignored."""
    errors: Mapping[int, Exception]
    """The errors of failed examples, by their places in the batch."""


def limits_of(handler: Handler[Any, Any, Any]) -> Limits:
    """Return the limits of batches that a handler's author has set."""
    limits = Limits.from_beam(handler.batch_elements_kwargs())
    # A model that batches by itself gets one example at a time, whatever its weight.
    return Limits(max_count=1, max_wait=limits.max_wait) if handler.self_batching else limits


_noted = threading.local()


@contextmanager
def noting() -> Generator[dict[str, int]]:
    """Collect what this thread notes with :func:`note`. The host does so around each call of ``predict``."""
    _noted.now = found = dict[str, int]()
    try:
        yield found
    finally:
        _noted.now = None


def note(name: str, amount: int = 1) -> None:
    """Add to a counter of :class:`luminosity.core.InferenceMetrics` for the batch that this thread computes.

    Does nothing outside of a model host.
    """
    found: dict[str, int] | None = getattr(_noted, "now", None)
    if found is not None:
        found[name] = found.get(name, 0) + amount


class HandlerOptions(TypedDict, total=False):
    """The keyword arguments of Beam's ModelHandler, whose documentation explains them."""

    min_batch_size: int | None
    max_batch_size: int | None
    max_batch_duration_secs: int | None
    max_batch_weight: int | None
    element_size_fn: Callable[[Any], int] | None
    batch_length_fn: Callable[[Any], int] | None
    batch_bucket_boundaries: list[int] | None
    large_model: bool
    model_copies: int | None
    env_vars: dict[str, str]


def check_handler_options(options: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Return the options. Raises for a misspelt one, which Beam's ModelHandler would ignore.

    >>> check_handler_options({"max_batch_sise": 8}, int)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    luminosity.errors.InvalidType: int got an unexpected keyword argument 'max_batch_sise'; did you mean ...
    """
    for name in options:
        if name not in HandlerOptions.__annotations__:
            raise InvalidType(
                f"{owner.__name__} got an unexpected keyword argument {name!r}",
                fix=did_you_mean(name, HandlerOptions.__annotations__),
            )
    return dict(options)


@dataclass(frozen=True)
class Limits:
    """The limits of batches, from Beam's ``batch_elements_kwargs``."""

    min_count: int = 1
    max_count: int = _MAX_COUNT
    max_wait: float | None = None
    """How long an example may wait for others (``max_batch_duration_secs``)."""
    max_seconds: float | None = None
    """How long one batch should take at most (``target_batch_duration_secs``)."""
    overhead_share: float = 0.05
    """Batches grow until their fixed costs take at most this share of their time (``target_batch_overhead``)."""
    max_weight: float = math.inf
    weigh: Callable[[Any], float] | None = None
    length: Callable[[Any], float] | None = None
    boundaries: tuple[float, ...] = ()
    """Examples whose lengths lie on two sides of a boundary never share a batch."""

    @classmethod
    def from_beam(cls, settings: Mapping[str, Any]) -> Limits:
        """Return the limits that these settings of Beam mean.

        >>> Limits.from_beam({"min_batch_size": 4, "max_batch_size": 8}).max_count
        8
        """
        length = settings.get("length_fn")
        boundaries = settings.get("bucket_boundaries")
        if boundaries is not None and length is None:
            raise InvalidArgument(
                "found batch_bucket_boundaries without batch_length_fn",
                fix="pass batch_length_fn, the length of an example",
            )
        weigh, max_weight = settings.get("element_size_fn"), settings.get("max_batch_weight")
        if max_weight is not None and weigh is None:
            raise InvalidArgument(
                "found max_batch_weight without element_size_fn", fix="pass element_size_fn, the weight of an example"
            )
        limits = cls(
            min_count=settings.get("min_batch_size") or 1,
            max_count=settings.get("max_batch_size") or _MAX_COUNT,
            max_wait=settings.get("max_batch_duration_secs"),
            max_seconds=settings.get("target_batch_duration_secs"),
            overhead_share=settings.get("target_batch_overhead") or cls.overhead_share,
            max_weight=math.inf if max_weight is None else max_weight,
            weigh=weigh,
            length=length,
            boundaries=tuple(_BUCKETS if boundaries is None else boundaries) if length is not None else (),
        )
        if limits.min_count <= limits.max_count:
            return limits
        if settings.get("max_batch_size") is not None:
            raise InvalidArgument(
                f"found min_batch_size={limits.min_count}, expected at most max_batch_size={limits.max_count}"
            )
        return replace(limits, max_count=limits.min_count)


def warn_of_settings_without_meaning(settings: Mapping[str, Any]) -> None:
    """Log a warning for each setting of a handler that has no effect here."""
    for name, value in settings.items():
        if value is not None and name not in _HEEDED:
            reason = _WITHOUT_MEANING.get(name, "it is not one of Beam's")
            _LOGGER.warning("The batch setting %s=%r has no effect: %s.", name, value, reason)
