"""``SentenceEmbedder``: texts to vectors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow as pa
from typing_extensions import Unpack

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch, Outputs
from luminosity.inference.handlers.text.pretrained import Pretrained, token_limit
from luminosity.inference.handlers.text.sentence_recipe import (
    SentenceRecipe,
    check_modes,
    dense_width,
    load_dense,
    pool_tokens,
)
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.handlers.text.tokens import Tokenizer

__all__ = ["SentenceEmbedder"]


class SentenceEmbedder(TextHandler[str]):
    """Turns texts into vectors, with a model of sentence-transformers or any encoder of transformers.

    ::

        texts | RunInference(SentenceEmbedder("sentence-transformers/all-MiniLM-L6-v2"))

    Pooling, normalisation, prompts, lower case and the maximum length are read from the model's own files, and the
    vectors are those of ``SentenceTransformer.encode``; sentence-transformers itself is not needed. A prediction is a
    float32 numpy array, whatever the model's dtype.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        pooling: one mode or several, which are concatenated. The default is the model's own, or "mean".
        normalize: whether vectors have length 1. The default is the model's own, or False.
        prompt: a text to put before each example.
        prompt_name: the name of one of the model's own prompts, instead of ``prompt``.
        max_length: the number of tokens at which texts are cut. The default is the model's own.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: compile the encoder, and pad to few different lengths.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_length, device, dtype, compile, load_model_args, **options)
        if prompt is not None and prompt_name is not None:
            raise InvalidArgument("found prompt= and prompt_name=, expected one of them")
        self._pooling = (pooling,) if isinstance(pooling, str) else None if pooling is None else tuple(pooling)
        check_modes(self._pooling or ())
        self._normalize = normalize
        self._prompt = prompt
        self._prompt_name = prompt_name

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A list of ``dimension`` float32 numbers."""
        return pa.list_(pa.float32(), self.dimension)

    @cached_property
    def dimension(self) -> int:
        """The length of a vector, as the model's files say."""
        widths = [dense_width(self._pretrained, folder) for kind, folder in self.recipe.steps if kind == "Dense"]
        if widths:
            return widths[-1]
        width = None if self.plain is None else self.plain.config.hidden_size
        return (width or self.config.get_text_config().hidden_size) * len(self.recipe.pooling)

    @cached_property
    def recipe(self) -> SentenceRecipe:
        """The steps after the encoder, from the model's files and the handler's arguments."""
        recipe = SentenceRecipe.read(self._pretrained)
        if self._pooling is not None:
            recipe = replace(recipe, pooling=self._pooling)
        if self._normalize is not None:
            others = tuple(step for step in recipe.steps if step[0] != "Normalize")
            recipe = replace(recipe, steps=(*others, ("Normalize", "")) if self._normalize else others)
        check_modes(recipe.pooling)
        return recipe

    @property
    def source(self) -> Pretrained:
        """The location of the encoder and its tokenizer, which may be in a subfolder of the model."""
        folder = {"subfolder": self.recipe.folder} if self.recipe.folder else {}
        return replace(self._pretrained, arguments={**self._pretrained.arguments, **folder})

    def limit_of(self, tokenizer: Any, config: Any) -> int | None:
        """Return the number of tokens at which texts are cut: ``max_length``, or the model's own limit."""
        return token_limit(self._max_length or self.recipe.max_length, tokenizer, config)

    def _tokenizer_of(self, whole: Any, config: Any) -> Tokenizer:
        tokenizer = super()._tokenizer_of(whole, config)
        if self.recipe.lower_case:
            tokenizer.lower_case()
        return tokenizer

    @cached_property
    def prompt(self) -> str:
        """The text that is put before each example."""
        return self.recipe.prompt(self._prompt, self._prompt_name)

    @cached_property
    def _prompt_tokens(self) -> int:
        """The number of tokens at each text's start that pooling leaves out: the prompt's, if the model excludes it."""
        if self.recipe.includes_prompt or not self.prompt:
            return 0
        ids = self.tokenizer.ids([self.prompt])[0].as_py()
        return len(ids) - (ids[-1] in self.tokenizer.whole.all_special_ids)

    def load_model(self) -> Any:
        """Return the encoder and the Dense steps."""
        torch = require("torch", "torch")
        encoder = self.load("AutoModel", optional=("pooler.",))
        dense = [load_dense(self._pretrained, folder) for kind, folder in self.recipe.steps if kind == "Dense"]
        dense = [step.to(self.device).requires_grad_(False) for step in dense]
        return torch.nn.ModuleList([self.compiled(encoder), *dense])

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Encode the batch, pool the vectors of its tokens, and apply the Dense and Normalize steps."""
        torch = require("torch", "torch")
        encoder, *dense = model
        vectors = self.call(encoder, batch, inference_args)[0]
        mask = batch.inputs.get("attention_mask")
        mask = torch.ones_like(batch.inputs["input_ids"], dtype=torch.bool) if mask is None else mask
        if self._prompt_tokens:
            mask = mask & (torch.arange(mask.shape[1], device=mask.device) >= self._prompt_tokens)
        embeddings = pool_tokens(vectors, mask, self.recipe.pooling)
        for kind, _ in self.recipe.steps:
            if kind == "Dense":
                embeddings = dense.pop(0)(embeddings)
            else:
                embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
        return embeddings

    def collect(self, outputs: Outputs) -> Block:
        """Return the embeddings as a numpy matrix, a row for each text."""
        return outputs.values.numpy(force=True)
