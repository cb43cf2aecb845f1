"""The contract between a model and the host that runs it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from typing_extensions import TypedDict, Unpack

from luminosity.inference.batching.limits import Limits
from luminosity.inference.blocks import Block, rows, size

__all__ = ["Handler", "HandlerOptions", "check_handler_options", "limits_of"]


ExampleT = TypeVar("ExampleT")
PredictionT = TypeVar("PredictionT")
ModelT = TypeVar("ModelT")


class Handler(ModelHandler[ExampleT, PredictionT, ModelT]):
    """A Beam ModelHandler that tells the host more, so that it can do better.

    `load_model` and `predict` are a complete handler; every other hook has a default. The host calls them in
    this order, each where it says:

    | hook       | where                          | what                                                        |
    |------------|--------------------------------|-------------------------------------------------------------|
    | `prepare`  | a CPU worker, many at once     | tokenise, decode, resize: one prepared example per example  |
    | `cost`     | a CPU worker                   | what each prepared example costs: tokens, pixels            |
    | `collate`  | beside the device, one thread  | pad and stack the examples of one batch                     |
    | `transfer` | beside the device, one thread  | move the batch to the device                                |
    | `predict`  | the device, `concurrency` calls| compute; may return before the device is done               |
    | `wait`     | beside the device, one thread  | block until the outputs of `predict` are there              |
    | `collect`  | beside the device, one thread  | turn the outputs into one value per example                 |

    A batch is as large as the longest example times the number of examples, in units of `cost`, and never larger
    than what was found to pay or to fit. An exception that means "out of memory" halves the batch and is tried
    again; other exceptions belong to the examples of the batch.

    Everything a handler holds is pickled on its way to the workers: load heavy things lazily.

    It is a Beam ModelHandler: Beam's own RunInference runs it, too.

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
    """The Arrow type of one prediction, where predictions go into a table's column."""
    self_batching: bool = False
    """Whether the model batches by itself, as vLLM does: `predict` then gets one example at a time, `concurrency` of
    them at once."""
    columnar: bool = False
    """Whether it takes the columns of a table as they are: `prepare` gets an Arrow array, a numpy matrix or a record
    batch where it gets a list of examples else, and does next to nothing for each row."""
    concurrency: int = 1
    """How many calls of `predict` may run at once. More than one only for models that other threads may use."""

    def __init__(self, **options: Unpack[HandlerOptions]) -> None:
        """The options are those of Beam's ModelHandler, which tells what each means; none is needed."""
        super().__init__(**check_handler_options(options, type(self)))

    def __str__(self) -> str:
        """What errors call it: a wrapper goes by the name of what it wraps."""
        return type(self).__name__

    @property
    def model_id(self) -> str | None:
        """What `PredictionResult.model_id` says of this model."""
        return None

    def prepare(self, block: Block) -> Block:
        return block

    def prepare_key(self) -> Hashable | None:
        """Equal for handlers with the same `prepare` that make the same of every example: models of one table then
        have it made once. None: nobody else does."""
        return None

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return np.ones(len(prepared))

    def collate(self, prepared: Block) -> Any:
        return prepared

    def transfer(self, batch: Any) -> Any:
        return batch

    def predict(self, model: ModelT, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no `predict`")

    def wait(self, outputs: Any) -> None:
        """Block until what `predict` returned is computed."""

    def collect(self, outputs: Any) -> Block:
        return outputs

    def warm_up(self, model: ModelT) -> None:
        """Run the model once, before the first batch: compile, allocate."""

    def memory(self, model: ModelT) -> int | None:
        """The bytes this model takes on its device; None where only the host's own measurement tells."""
        return None

    def abandon(self, model: ModelT) -> None:
        """A batch took too long, and the next one gets a model that is loaded anew: end what this one still does."""

    def takes_updates(self) -> bool:
        """Whether a new version of the model can be had: by `update_model_path`, which does nothing of its own."""
        return type(self).update_model_path is not ModelHandler.update_model_path

    def check_prepares_like(self, first: Any) -> None:
        """Raise where this new version of a model can't use what `prepare` of the first one makes: workers that
        prepare examples go on with that."""

    def num_examples(self, collated: Any, count: int) -> int:
        """How many predictions a batch stands for, where that is not the number of its examples."""
        return count

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        """What RunInference emits for an example and its prediction."""
        return PredictionResult(None if drop_example else example, value, model_id)

    def get_num_bytes(self, batch: Any) -> int:
        """For the metrics: an estimate will do, and must be quick."""
        return size(batch) if isinstance(batch, list) else int(getattr(batch, "nbytes", 0))

    def run_inference(
        self, batch: Sequence[ExampleT], model: ModelT, inference_args: dict[str, Any] | None = None
    ) -> Iterable[PredictionT]:
        """All hooks in a row, for runners of handlers that know only this one."""
        examples = list(batch)
        outputs = self.predict(model, self.transfer(self.collate(self.prepare(examples))), inference_args)
        self.wait(outputs)
        values = rows(self.collect(outputs))
        return [PredictionResult(*pair, self.model_id) for pair in zip(examples, values, strict=True)]  # type: ignore[misc]


def limits_of(handler: Handler[Any, Any, Any]) -> Limits:
    """What this handler's author asked of batches."""
    limits = Limits.from_beam(handler.batch_elements_kwargs())
    # What batches itself gets one example at a time, whatever they weigh.
    return Limits(max_count=1, max_wait=limits.max_wait) if handler.self_batching else limits


class HandlerOptions(TypedDict, total=False):
    """The keyword arguments of Beam's ModelHandler, which says what each means."""

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
    """The options as they are; Beam's ModelHandler would take a misspelt one and say nothing.

    >>> checked({"max_batch_sise": 8}, int)
    Traceback (most recent call last):
    TypeError: int got an unexpected keyword argument 'max_batch_sise'; did you mean 'max_batch_size'?
    """
    for name in options:
        if name not in HandlerOptions.__annotations__:
            alike = difflib.get_close_matches(name, HandlerOptions.__annotations__, 1)
            hint = f"; did you mean {alike[0]!r}?" if alike else ""
            raise TypeError(f"{owner.__name__} got an unexpected keyword argument {name!r}{hint}")
    return dict(options)
