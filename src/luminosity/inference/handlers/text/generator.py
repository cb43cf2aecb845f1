"""Text from a causal language model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.inference.blocks import Block, rows
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch, Outputs
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.handlers.text.tokens import texts_of

__all__ = ["TextGenerator"]

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"


class TextGenerator(TextHandler["str | Messages"]):
    """Prompts to what a causal language model of transformers says next.

    ::

        prompts | RunInference(TextGenerator("HuggingFaceTB/SmolLM2-135M-Instruct", max_new_tokens=64))

    An example is a prompt, or a list of messages (`[{"role": "user", "content": "Hello"}]`), which the model's own chat
    template makes a prompt of. A prediction is the new text alone. `path` is a folder, a hub's name, or a GGUF file.

    `generation_args`, and RunInference's `inference_args` before them, go to `model.generate` (`do_sample`,
    `temperature`, `stop_strings`...); what they leave open is as the model's own files say. A prompt costs its tokens
    and `max_new_tokens`. Of a prompt longer than the model takes besides the new tokens (or than `max_length`) the end
    is kept. `chat_template_args` go to the chat template.
    """

    output_type = pa.string()
    padding_side = "left"  # so that new tokens follow the prompt
    cut_side = "left"  # so that the question and the beginning of the answer are kept

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_new_tokens: int = 128,
        generation_args: Mapping[str, Any] | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_length, device, dtype, False, load_model_args, **options)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, expected at least one")
        self._max_new_tokens = max_new_tokens
        self._generation_args = dict(generation_args or {})
        self._chat_template_args = dict(chat_template_args or {})
        self.validate_inference_args(self._generation_args)

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        count = (inference_args or {}).get("num_return_sequences", 1)
        if count != 1:
            raise ValueError(f"num_return_sequences is {count}, expected 1: each example has one prediction")

    def limit_of(self, tokenizer: Any) -> int | None:
        limit = super().limit_of(tokenizer)
        return None if limit is None else self._room(limit)

    def _room(self, limit: int) -> int:
        """What is left for the prompt."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None) or limit
        room = min(limit, positions - self._max_new_tokens)
        if room < 1:
            raise ValueError(
                f"max_new_tokens is {self._max_new_tokens}, and {self.model_id!r} takes {positions} tokens in all: "
                "nothing is left for a prompt"
            )
        return room

    def prepare(self, block: Block) -> Block:
        examples = list(rows(block))
        chats = [not isinstance(example, str) for example in examples]
        if not any(chats):
            return self.tokenizer.ids(examples)
        # A chat template writes the special tokens itself.
        prompts = self.tokenizer.ids([e for e, chat in zip(examples, chats, strict=True) if not chat])
        rendered = texts_of([self._rendered(e) for e, chat in zip(examples, chats, strict=True) if chat])
        both = pa.concat_arrays([prompts, self.tokenizer.ids(rendered, special=False)])
        # Prompts come first in `both`, then chats; the stable order of the flags tells whose place is where.
        return both.take(pa.array(np.argsort(np.argsort(chats, kind="stable"))))

    def prepare_key(self) -> None:
        """Its chat template writes prompts of its own."""

    def _rendered(self, messages: Any) -> str:
        listed: list[Any] = cast("list[Any]", list(messages)) if isinstance(messages, list | tuple) else []
        if not listed or not all(isinstance(message, Mapping) for message in listed):
            raise TypeError(
                f"an example is of type {type(messages).__name__}, expected a prompt (str) or a list of messages such "
                'as {"role": "user", "content": "Hello"}'
            )
        arguments = {"add_generation_prompt": True, **self._chat_template_args}
        return self.tokenizer.whole.apply_chat_template(listed, tokenize=False, **arguments)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return super().cost(prepared) + self._max_new_tokens

    def load_model(self) -> Any:
        return self.load("AutoModelForCausalLM")

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        arguments = {"max_new_tokens": self._max_new_tokens, "pad_token_id": self.pad_id}
        arguments |= {**self._generation_args, **inference_args}
        if "stop_strings" in arguments:
            arguments.setdefault("tokenizer", self.tokenizer.whole)
        tokens = self.call(model.generate, batch, arguments)
        return tokens[:, batch.inputs["input_ids"].shape[1] :]

    def collect(self, outputs: Outputs) -> Block:
        return self.tokenizer.whole.batch_decode(outputs.values.numpy(force=True), skip_special_tokens=True)
