"""A model that turns a text into another: ``Summarizer``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from typing_extensions import Unpack

from luminosity.errors import InvalidArgument
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch
from luminosity.inference.handlers.text.generating import GeneratingHandler

__all__ = ["Summarizer"]


class Summarizer(GeneratingHandler[str]):
    """Summarises texts, with a sequence-to-sequence model of transformers, such as BART, Pegasus or T5.

    ::

        texts | RunInference(Summarizer("sshleifer/distilbart-cnn-12-6", max_new_tokens=60))

    A prediction is the new text. With another prompt, the same models translate or answer. For a causal language model,
    such as Llama or SmolLM, put the texts into prompts and use ``TextGenerator``. A text costs its tokens plus
    ``max_new_tokens``.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        max_new_tokens: the most tokens of a summary.
            Texts that need more are cut; the run's views and metrics count them.
        prompt: a text to put before each example. The default is the model's own for summaries ("summarize: " for T5),
            or none.
        generation_args: passed to ``model.generate``, such as ``num_beams``, ``min_new_tokens``,
            ``no_repeat_ngram_size``; the defaults are in the model's files. RunInference's ``inference_args`` override
            them.
        max_length: the number of tokens at which texts are cut. The default is the model's own.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_new_tokens: int = 128,
        prompt: str | None = None,
        generation_args: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_new_tokens, generation_args, max_length, device, dtype, load_model_args, **options)
        self._prompt = prompt

    @cached_property
    def prompt(self) -> str:
        """The text that is put before each example."""
        if self._prompt is not None:
            return self._prompt
        tasks = getattr(self.config, "task_specific_params", None) or {}
        return (tasks.get("summarization") or {}).get("prefix") or ""

    def load_model(self) -> Any:
        """Load the sequence-to-sequence model. Raises ``InvalidArgument`` for a model of another kind."""
        if not getattr(self.config, "is_encoder_decoder", False):
            raise InvalidArgument(
                f"{self.model_id!r} is a model of the type {self.config.model_type!r}, expected a sequence-to-sequence "
                "model such as BART or T5",
                fix="use TextGenerator, with the texts in prompts, if it is a causal language model",
            )
        return self.load("AutoModelForSeq2SeqLM")

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Generate the summaries' tokens."""
        return self.generate(model, batch, inference_args)
