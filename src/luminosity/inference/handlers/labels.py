"""The labels of a classifier: their names, their scores, and those that are likely enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from luminosity.inference.handlers.padding import Array

__all__ = ["Labels", "likely_labels", "names_at"]


@dataclass(frozen=True)
class Labels:
    """The names of a classifier's outputs, and what the outputs mean."""

    names: tuple[str, ...]
    kind: Literal["one", "several", "regression"] = "one"
    """Whether an example has one label or any number of them, or the outputs are numbers of a regression."""

    @classmethod
    def of(cls, config: Any) -> Labels:
        """Return the labels in the configuration of a model of transformers, in the order of its outputs."""
        names = tuple(config.id2label[index] for index in range(config.num_labels))
        if config.problem_type == "regression":
            return cls(names, "regression")
        is_several = config.num_labels == 1 or config.problem_type == "multi_label_classification"
        return cls(names, "several" if is_several else "one")

    @property
    def are_several(self) -> bool:
        """Whether each label has a probability of its own."""
        return self.kind == "several"

    def scores(self, logits: Any) -> Any:
        """Return the scores of logits: softmax, sigmoid if labels are several, or a regression's outputs."""
        if self.kind == "regression":
            return logits
        return logits.sigmoid() if self.are_several else logits.softmax(dim=-1)


def names_at(names: Sequence[str], places: Array) -> Any:
    """Return an Arrow array of the names at these places.

    >>> names_at(["cat", "dog"], np.array([1, 0])).to_pylist()
    ['dog', 'cat']
    """
    return pa.array(names, pa.string()).take(pa.array(places))


def likely_labels(names: Sequence[str], scores: Array, threshold: float) -> Any:
    """Return an Arrow array with a list for each row of ``scores``: the labels whose score is high enough.

    >>> likely_labels(["cat", "dog"], np.array([[0.7, 0.9], [0.1, 0.2]]), 0.5).to_pylist()
    [['cat', 'dog'], []]
    """
    chosen = scores >= threshold
    offsets = np.concatenate([[0], chosen.sum(axis=1).cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), names_at(names, np.nonzero(chosen)[1]))
