"""Models that take examples as they come and answer each when it is done, as engines with continuous batching do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

__all__ = ["ContinuousModel", "answers_of", "outcomes_of"]


@runtime_checkable
class ContinuousModel(Protocol):
    """A model that makes its own batches: what a handler's ``load_model`` returns for such a model.

    The model host then gives it one prepared example after the other, up to ``capacity`` at once, from all bundles.
    It hands each answer back when it is there. No thread waits for it. The handler's ``collect`` gets a list with one
    answer, and returns a list with one value; ``collate``, ``transfer``, ``predict`` and ``wait`` are not called.

    A future with an exception fails its example alone. With :class:`luminosity.errors.ModelDied`, the model is loaded
    again for the next example. An example that nobody waits for any more, or that exceeds its timeout, is cancelled by
    ``future.cancel()``.
    """

    @property
    def capacity(self) -> int:
        """How many examples the model wants at once: those that it computes, and some that follow."""
        ...

    def submit(self, example: Any, inference_args: Mapping[str, Any] | None) -> Future[Any]:
        """Take a prepared example, and return its future answer. Must not block, and may be called from any thread."""
        ...

    def close(self) -> None:
        """Cancel the futures that are not done, and free the memory. The host gives the examples to the next copy."""


def answers_of(model: ContinuousModel, examples: Sequence[Any], inference_args: Mapping[str, Any] | None) -> list[Any]:
    """Return the model's answers to these examples, in order; raise the error of the first that fails."""
    outcomes = outcomes_of(model, examples, inference_args)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def outcomes_of(model: ContinuousModel, examples: Sequence[Any], inference_args: Mapping[str, Any] | None) -> list[Any]:
    """Return the model's answer to each example, in order, or the exception with which it failed."""
    outcomes: list[Any] = []
    waiting: deque[Future[Any]] = deque()
    try:
        for example in examples:
            if len(waiting) >= max(model.capacity, 1):
                outcomes.append(_outcome(waiting.popleft()))
            waiting.append(model.submit(example, inference_args))
        while waiting:
            outcomes.append(_outcome(waiting.popleft()))
    finally:
        for future in waiting:  # after an error of ``submit``
            future.cancel()
    return outcomes


def _outcome(future: Future[Any]) -> Any:
    error = future.exception()
    return future.result() if error is None else error
