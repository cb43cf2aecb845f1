"""The base class of models that write text, token by token."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.blocks import Block, rows
from luminosity.inference.continuous import ContinuousModel, answers_of
from luminosity.inference.handler import ExampleT, HandlerOptions, note
from luminosity.inference.handlers.first_token import FirstTokenClock, note_first_token
from luminosity.inference.handlers.on_torch import Batch
from luminosity.inference.handlers.text.text_handler import TextHandler

__all__ = ["GeneratingHandler", "ends_of"]
_SETTINGS = (
    "_max_new_tokens",
    "_max_length",
    "_generation_args",
    "_chat_template_args",
    "_answer_format",
    "_dtype_name",
)
_WARM_UP_TOKENS = 9  # the first token comes from the prompt, and the slots take eight steps at once


class GeneratingHandler(TextHandler[ExampleT]):
    """A handler whose predictions are new texts of at most ``max_new_tokens`` tokens."""

    output_type = pa.string()
    reads_tokenizer_json = False  # most tokenizers decode only with transformers

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_new_tokens: int,
        generation_args: Mapping[str, Any] | None,
        max_length: int | None,
        device: str,
        dtype: Any,
        load_model_args: Mapping[str, Any] | None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_length, device, dtype, False, load_model_args, **options)
        if max_new_tokens < 1:
            raise InvalidArgument(f"found max_new_tokens={max_new_tokens}, expected at least one")
        self._max_new_tokens = max_new_tokens
        self._generation_args = dict(generation_args or {})
        self.validate_inference_args(self._generation_args)

    @cached_property
    def own_tokenizer(self) -> Any:
        """The tokenizer of transformers, for what no other does."""
        return self.tokenizer.whole if self.plain is None else self.source.tokenizer()

    def is_repeatable(self, inference_args: Mapping[str, Any] | None) -> bool | None:
        """Return False unless ``do_sample`` is false: the model's own settings may ask for sampling."""
        return False if {**self._generation_args, **(inference_args or {})}.get("do_sample", True) else None

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise if more than one sequence per example is requested, or more than its tokens."""
        count = (inference_args or {}).get("num_return_sequences", 1)
        if count != 1:
            raise InvalidArgument(f"found num_return_sequences={count}, expected 1: each example has one prediction")
        if (inference_args or {}).get("return_dict_in_generate"):
            raise InvalidArgument("found return_dict_in_generate=True, expected False: a prediction is a text")

    def texts_version(self) -> str:
        """Return a text that differs for each version of the model and for all settings on which its texts depend."""
        settings = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        parts = [self.source.version(), type(self).__qualname__, settings, dict(self.source.arguments)]
        return json.dumps(parts, sort_keys=True, default=repr)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of tokens of each text plus ``max_new_tokens``."""
        return super().cost(prepared) + self._max_new_tokens

    def generate(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the tokens that the model's own ``generate`` returns for a batch; count texts that it cuts."""
        arguments: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "pad_token_id": self.pad_id}
        arguments |= {**self._generation_args, **inference_args}
        seed = arguments.pop("seed", None)  # transformers does not know it
        if seed is not None:
            require("torch", "torch").manual_seed(seed)
        if "stop_strings" in arguments:
            arguments.setdefault("tokenizer", self.own_tokenizer)
        clock = FirstTokenClock()
        arguments["logits_processor"] = [*(arguments.get("logits_processor") or ()), clock]
        tokens = self.call(model.generate, batch, arguments)
        if clock.seconds is not None:
            note_first_token(clock.seconds, batch.count)
        given = 1 if getattr(self.config, "is_encoder_decoder", False) else batch.inputs["input_ids"].shape[1]
        ends = {self.pad_id, *ends_of(model, arguments)}
        new = tokens[:, given:].tolist()
        if tokens.shape[1] - given >= (arguments["max_new_tokens"] or math.inf):
            note(InferenceMetrics.CUT_TEXTS, sum(row[-1] not in ends for row in new))
        mask = batch.inputs.get("attention_mask")
        read = batch.inputs["input_ids"].numel() if mask is None else int(mask.sum())
        note(InferenceMetrics.PROMPT_TOKENS, read)
        note(InferenceMetrics.NEW_TOKENS, sum(_written(row, ends) for row in new))
        return tokens

    def warm_up(self, model: Any) -> None:
        """Write a few tokens. They are not decoded: a text that is cut may be an error."""
        arguments = {"max_new_tokens": min(_WARM_UP_TOKENS, self._max_new_tokens)}
        prepared = self.prepare(cast("list[ExampleT]", ["warm up"]))
        if isinstance(model, ContinuousModel) and self.submits(arguments):
            answers_of(model, rows(prepared), arguments)
        else:
            self.wait(self.predict(model, self.transfer(self.collate(prepared)), arguments))

    def collect(self, outputs: Any) -> Block:
        """Decode the new tokens to texts, without special tokens."""
        return self.tokenizer.whole.batch_decode(outputs.values.numpy(force=True), skip_special_tokens=True)


def ends_of(model: Any, arguments: Mapping[str, Any]) -> set[int]:
    """Return the tokens that end a text."""
    ends = arguments.get("eos_token_id", model.generation_config.eos_token_id)
    listed = cast("list[Any]", list(ends) if isinstance(ends, list | tuple) else [ends])
    return {each for each in listed if each is not None}


def _written(tokens: list[int], ends: set[int]) -> int:
    """Return how many tokens a text has, with the one that ends it."""
    return next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
