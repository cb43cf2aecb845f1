"""``TextClassifier``: texts to labels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.inference.blocks import Block
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch, Outputs
from luminosity.inference.handlers.padding import Array
from luminosity.inference.handlers.text.text_handler import TextHandler

__all__ = ["TextClassifier", "labels_of"]


class TextClassifier(TextHandler[str]):
    """Turns texts into labels, with a sequence classification model of transformers.

    ::

        texts | RunInference(TextClassifier("distilbert-base-uncased-finetuned-sst-2-english"))

    A prediction is ``{"label": "POSITIVE", "score": 0.98, "scores": {"NEGATIVE": 0.02, "POSITIVE": 0.98}}``: the best
    label, its score, and all scores. Scores are probabilities that sum to one. If the model's configuration says
    ``problem_type: multi_label_classification``, or has only one label, each score is a separate probability, and
    ``labels`` lists those of at least ``threshold``. The scores of a regression are its outputs.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        threshold: the lowest probability of the labels in ``labels``.
        max_length: the number of tokens at which texts are cut. The default is the model's own.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: compile the model, and pad to few different lengths.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.

    The ``inference_args`` of RunInference are passed to the model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threshold: float = 0.5,
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_length, device, dtype, compile, load_model_args, **options)
        self._threshold = threshold

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A struct with the fields of a prediction."""
        names = labels_of(self.config)
        empty = _table(np.zeros((0, len(names)), np.float32), names)
        return (_with_labels(empty, self._threshold) if _is_multi_label(self.config) else empty).type

    def load_model(self) -> Any:
        """Load the sequence classification model, compiled if ``compile`` is set."""
        return self.compiled(self.load("AutoModelForSequenceClassification"))

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the scores of all labels: softmax, sigmoid if multi-label, or a regression's outputs."""
        logits = self.call(model, batch, inference_args).logits.float()
        kind = model.config.problem_type
        if kind == "regression":
            scores = logits
        else:
            scores = logits.sigmoid() if _is_multi_label(model.config) else logits.softmax(dim=-1)
        return {"scores": scores, "config": model.config}

    def collect(self, outputs: Outputs) -> Block:
        """Return the best label and all scores of each text, with the list ``labels`` if multi-label."""
        config = outputs.values["config"]
        table = _table(outputs.values["scores"].numpy(force=True), labels_of(config))
        return _with_labels(table, self._threshold) if _is_multi_label(config) else table


def labels_of(config: Any) -> list[str]:
    """Return the model's labels, in the order of its outputs."""
    return [config.id2label[index] for index in range(config.num_labels)]


def _is_multi_label(config: Any) -> bool:
    one = config.num_labels == 1 and config.problem_type != "regression"
    return one or config.problem_type == "multi_label_classification"


def _table(scores: Array, names: Sequence[str]) -> Any:
    best = scores.argmax(axis=1)
    columns = {
        "label": pa.array(names, pa.string()).take(pa.array(best)),
        "score": pa.array(scores[np.arange(len(scores)), best], pa.float32()),
        "scores": pa.StructArray.from_arrays([pa.array(column) for column in scores.T], names),
    }
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def _with_labels(table: Any, threshold: float) -> Any:
    """Add a column with the labels whose score is high enough."""
    scores = table.field("scores")
    names = [scores.type.field(index).name for index in range(scores.type.num_fields)]
    chosen = np.stack([column.to_numpy() for column in scores.flatten()], axis=1) >= threshold
    offsets = np.concatenate([[0], chosen.sum(axis=1).cumsum()]).astype(np.int32)
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(chosen)[1]))
    labels = pa.ListArray.from_arrays(pa.array(offsets), values)
    fields = [table.field(index) for index in range(table.type.num_fields)]
    return pa.StructArray.from_arrays([*fields, labels], ["label", "score", "scores", "labels"])
