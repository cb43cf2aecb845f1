"""``ImageClassifier``, images to labels, and ``ImageEmbedder``, images to vectors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.errors import HandlerError, InvalidArgument
from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.images.image_handler import ImageHandler
from luminosity.inference.handlers.images.recipe import ImageRecipe
from luminosity.inference.handlers.on_torch import Batch, Labels, Outputs, likely_labels, names_at
from luminosity.inference.handlers.padding import Array

__all__ = ["ImageClassifier", "ImageEmbedder"]

Pooling = Literal["cls", "mean", "pooler"]
_FIRST_TOKENS = ("cls_token", "class_embedding")  # the names of the parameters of a model that has such a token


class ImageClassifier(ImageHandler):
    """Turns images into labels, with an image classification model of transformers or a torch module of your own.

    ::

        paths | RunInference(ImageClassifier("google/vit-base-patch16-224"))
        table | Enrich(label=Column(ImageClassifier("google/vit-base-patch16-224"), "photo"))

    An example is the path of a file, on any file system that Beam knows, the bytes of a file, an array of uint8, or a
    dict with ``bytes`` or ``path``, as the library datasets stores images. CPU workers decode and resize. An image that
    can't be decoded, or has more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``, is a failure of its own example.

    A prediction is ``{"label": "daisy", "score": 0.9, "top": [{"label": "daisy", "score": 0.9}, …]}``: the best label,
    its probability, and the ``top_k`` best ones. If the model's configuration says
    ``problem_type: multi_label_classification``, or has only one label, each score is a separate probability, and
    ``labels`` lists those of at least ``threshold``.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        model_class: a class, or any function, that returns a torch module with its weights, instead of ``path``. The
            module gets a tensor (images, 3, height, width) and returns a number for each label; pass ``labels`` and
            ``recipe``, too.
        model_params: the keyword arguments of ``model_class``.
        labels: the names of the labels, in the order of the outputs. The default is the model's own.
        top_k: how many labels ``top`` has.
        threshold: the lowest probability of the labels in ``labels``.
        recipe: how images are resized and normalised. The default is that of the model's image processor.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: compile the model.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.

    The ``inference_args`` of RunInference are passed to the model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model_class: Callable[..., Any] | None = None,
        model_params: Mapping[str, Any] | None = None,
        labels: Sequence[str] | None = None,
        top_k: int = 5,
        threshold: float = 0.5,
        recipe: ImageRecipe | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, model_class, model_params, recipe, device, dtype, compile, load_model_args, **options)
        if top_k < 1:
            raise InvalidArgument(f"found top_k={top_k}, expected at least one label")
        if self._model_class is not None and labels is None:
            raise InvalidArgument("found model_class= without labels=, expected both")
        self._labels = None if labels is None else tuple(labels)
        self._top_k = top_k
        self._threshold = threshold

    @property
    def labels(self) -> Labels:
        """The labels: those that you gave, or the model's own."""
        if self._model_class is not None:
            return Labels(self._labels or ())
        own = Labels.of(self.config)
        return own if self._labels is None else Labels(self._labels, own.kind)

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A struct with the fields of a prediction."""
        labels = self.labels
        return self._table(np.zeros((0, len(labels.names)), np.float32), labels).type

    def load_model(self) -> Any:
        """Load the image classification model, compiled if ``compile`` is set."""
        return self.load("AutoModelForImageClassification")

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the scores of all labels: softmax, sigmoid if multi-label, or a regression's outputs."""
        output = self.call(model, batch, inference_args)
        logits = getattr(output, "logits", output)
        labels = self.labels
        if tuple(logits.shape) != (batch.count, len(labels.names)):
            raise HandlerError(
                f"the model's output has the shape {tuple(logits.shape)} for {batch.count} images and "
                f"{len(labels.names)} labels, expected one number for each label",
                fix="pass labels= with a name for each output",
            )
        return {"scores": labels.scores(logits.float()), "labels": labels}

    def collect(self, outputs: Outputs) -> Block:
        """Return the best labels of each image, with the list ``labels`` if multi-label."""
        return self._table(outputs.values["scores"].numpy(force=True), outputs.values["labels"])

    def _table(self, scores: Array, labels: Labels) -> Any:
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top_k]
        names = names_at(labels.names, best.reshape(-1))
        values = pa.array(np.take_along_axis(scores, best, axis=1).reshape(-1), pa.float32())
        first = pa.array(np.arange(len(scores)) * best.shape[1])
        offsets = pa.array(np.arange(len(scores) + 1, dtype=np.int32) * np.int32(best.shape[1]))
        top = pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays([names, values], ["label", "score"]))
        columns = {"label": names.take(first), "score": values.take(first), "top": top}
        if labels.are_several:
            columns["labels"] = likely_labels(labels.names, scores, self._threshold)
        return pa.StructArray.from_arrays(list(columns.values()), list(columns))


class ImageEmbedder(ImageHandler):
    """Turns images into vectors, with a vision model of transformers or a torch module of your own.

    ::

        paths | RunInference(ImageEmbedder("facebook/dinov2-small"))
        table | Enrich(vector=Column(ImageEmbedder("openai/clip-vit-base-patch32"), "photo"))

    Examples are those of ``ImageClassifier``. A prediction is a float32 numpy array, whatever the model's dtype. Models
    that put images and texts into one space, such as CLIP and SigLIP, give the vectors of ``get_image_features``.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        model_class: a class, or any function, that returns a torch module with its weights, instead of ``path``. The
            module gets a tensor (images, 3, height, width) and returns a vector for each image; pass ``recipe``, too.
        model_params: the keyword arguments of ``model_class``.
        pooling: how the model's output becomes a vector: "cls", its first token; "mean", the mean of all tokens or
            places; "pooler", the model's own pooler. The default is "cls" if the model has such a token, otherwise
            "mean". Not for models with ``get_image_features`` and modules of your own.
        normalize: whether vectors have length 1.
        recipe: how images are resized and normalised. The default is that of the model's image processor.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: compile the model.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model_class: Callable[..., Any] | None = None,
        model_params: Mapping[str, Any] | None = None,
        pooling: Pooling | None = None,
        normalize: bool = False,
        recipe: ImageRecipe | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, model_class, model_params, recipe, device, dtype, compile, load_model_args, **options)
        if pooling is not None and pooling not in get_args(Pooling):
            raise InvalidArgument(f"found pooling={pooling!r}, expected one of {', '.join(get_args(Pooling))}")
        if pooling is not None and self._model_class is not None:
            raise InvalidArgument(f"found pooling={pooling!r} with model_class=, whose module returns vectors")
        self._pooling = pooling
        self._normalize = normalize

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A list of ``dimension`` float32 numbers; None if only the model knows the dimension."""
        return None if self.dimension is None else pa.list_(pa.float32(), self.dimension)

    @cached_property
    def dimension(self) -> int | None:
        """The length of a vector, as the model's configuration says; None if it does not."""
        if self._model_class is not None:
            return None
        config = self.config
        vision = getattr(config, "vision_config", None)
        if vision is not None:
            return getattr(config, "projection_dim", None) or getattr(vision, "hidden_size", None)
        sizes = getattr(config, "hidden_sizes", None)
        return getattr(config, "hidden_size", None) or (sizes[-1] if sizes else None)

    def load_model(self) -> Any:
        """Load the vision model, compiled if ``compile`` is set."""
        model = self.load("AutoModel", () if self._pooling == "pooler" else ("pooler.",))
        if self._pooling is not None and hasattr(model, "get_image_features"):
            raise InvalidArgument(
                f"found pooling={self._pooling!r}, but {self.model_id!r} has features of images", fix="leave it out"
            )
        return model

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return a vector for each image, of length 1 if ``normalize`` is set."""
        torch = require("torch", "torch")
        if self._model_class is None and hasattr(model, "get_image_features"):
            output = model.get_image_features(pixel_values=self.pixel_values(model, batch), **inference_args)
            vectors = getattr(output, "pooler_output", output)
        else:
            output = self.call(model, batch, inference_args)
            vectors = output if isinstance(output, torch.Tensor) else self._pooled(model, output)
        expected = (batch.count, vectors.shape[-1] if self.dimension is None else self.dimension)
        if tuple(vectors.shape) != expected:
            raise HandlerError(
                f"the model's output has the shape {tuple(vectors.shape)} for {batch.count} images, expected {expected}"
            )
        vectors = vectors.float()
        return torch.nn.functional.normalize(vectors, dim=-1) if self._normalize else vectors

    def _pooled(self, model: Any, output: Any) -> Any:
        if self._pooling == "pooler":
            vectors = getattr(output, "pooler_output", None)
            if vectors is None:
                raise InvalidArgument(f"{self.model_id!r} has no pooler", fix="pass pooling='cls' or 'mean'")
            return vectors.flatten(1)
        hidden = output.last_hidden_state
        if hidden.ndim == 4:  # a map (images, channels, height, width)
            return hidden.mean(dim=(2, 3))
        has_token = any(name.endswith(_FIRST_TOKENS) for name, _ in model.named_parameters())
        pooling = self._pooling or ("cls" if has_token else "mean")
        return hidden[:, 0] if pooling == "cls" else hidden.mean(dim=1)

    def collect(self, outputs: Outputs) -> Block:
        """Return the vectors as a numpy matrix, a row for each image."""
        return outputs.values.numpy(force=True)
