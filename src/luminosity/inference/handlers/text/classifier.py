"""``TextClassifier``: texts to labels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.inference.blocks import Block
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.labels import Labels, likely_labels, names_at
from luminosity.inference.handlers.on_torch import Batch, Outputs
from luminosity.inference.handlers.padding import Array
from luminosity.inference.handlers.text.text_handler import TextHandler

__all__ = ["TextClassifier"]


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
        labels = Labels.of(self.config)
        return self._table(np.zeros((0, len(labels.names)), np.float32), labels).type

    def load_model(self) -> Any:
        """Load the sequence classification model, compiled if ``compile`` is set."""
        return self.compiled(self.load("AutoModelForSequenceClassification"))

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the scores of all labels: softmax, sigmoid if multi-label, or a regression's outputs."""
        logits = self.call(model, batch, inference_args).logits.float()
        labels = Labels.of(model.config)
        return {"scores": labels.scores(logits), "labels": labels}

    def collect(self, outputs: Outputs) -> Block:
        """Return the best label and all scores of each text, with the list ``labels`` if multi-label."""
        return self._table(outputs.values["scores"].numpy(force=True), outputs.values["labels"])

    def _table(self, scores: Array, labels: Labels) -> Any:
        best = scores.argmax(axis=1)
        columns = {
            "label": names_at(labels.names, best),
            "score": pa.array(scores[np.arange(len(scores)), best], pa.float32()),
            "scores": pa.StructArray.from_arrays([pa.array(column) for column in scores.T], list(labels.names)),
        }
        if labels.are_several:
            columns["labels"] = likely_labels(labels.names, scores, self._threshold)
        return pa.StructArray.from_arrays(list(columns.values()), list(columns))
