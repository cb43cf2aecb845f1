"""``TextGenerator``: text from a causal language model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch
from luminosity.inference.handlers.text.generating import GeneratingHandler
from luminosity.inference.handlers.text.tokens import texts_of

__all__ = ["TextGenerator"]

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"


class TextGenerator(GeneratingHandler["str | Messages"]):
    """Continues prompts, with a causal language model of transformers.

    ::

        prompts | RunInference(TextGenerator("HuggingFaceTB/SmolLM2-135M-Instruct", max_new_tokens=64))

    An example is a prompt, or a list of messages (``[{"role": "user", "content": "Hello"}]``) that the model's chat
    template turns into a prompt. A prediction is the new text only. A prompt costs its tokens plus ``max_new_tokens``.

    Args:
        path: a folder, on any file system that Beam knows, a name on the Hugging Face hub, or a GGUF file.
        max_new_tokens: the most tokens to generate.
            Texts that need more are cut; the run's views and metrics count them.
        generation_args: passed to ``model.generate``, such as ``do_sample``, ``temperature``, ``stop_strings``; the
            defaults are in the model's files. RunInference's ``inference_args`` override them.
        chat_template_args: passed to the chat template.
        max_length: the most tokens of a prompt; only the end of a longer prompt is kept. A prompt and its new tokens
            never take more than the model's own limit.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    padding_side = "left"  # so that new tokens follow the prompt
    cut_side = "left"  # so that the end of the prompt, usually the question, is kept

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
        super().__init__(path, max_new_tokens, generation_args, max_length, device, dtype, load_model_args, **options)
        self._chat_template_args = dict(chat_template_args or {})

    def limit_of(self, tokenizer: Any, config: Any) -> int | None:
        """Return how many tokens a prompt may have, so that the model has room for the new ones; None for no limit."""
        limit = super().limit_of(tokenizer, config)
        return None if limit is None else self._room(limit, config)

    def _room(self, limit: int, config: Any) -> int:
        """Return how many tokens are left for the prompt."""
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or limit
        room = min(limit, positions - self._max_new_tokens)
        if room < 1:
            raise InvalidArgument(
                f"found max_new_tokens={self._max_new_tokens}, expected less than the {positions} tokens that "
                f"{self.model_id!r} takes in all: nothing is left for a prompt"
            )
        return room

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise ``InvalidType`` unless a column of this type holds prompts or lists of messages."""
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not (is_list and (pa.types.is_struct(kind.value_type) or pa.types.is_map(kind.value_type))):
            super().check_input_type(kind)

    def prepare(self, block: Block) -> Block:
        """Tokenise the prompts, and the chats after the chat template has rendered them."""
        examples = list(rows(block))
        chats = [not isinstance(example, str) for example in examples]
        if not any(chats):
            return self.tokenizer.ids(examples)
        # The chat template writes the special tokens itself.
        prompts = self.tokenizer.ids([e for e, chat in zip(examples, chats, strict=True) if not chat])
        rendered = texts_of([self._rendered(e) for e, chat in zip(examples, chats, strict=True) if chat])
        both = pa.concat_arrays([prompts, self.tokenizer.ids(rendered, special=False)])
        # `both` has prompts first, then chats: undo the stable sort by the flags.
        return both.take(pa.array(np.argsort(np.argsort(chats, kind="stable"))))

    def prepare_key(self) -> None:
        """Return None: prompts depend on the chat template."""

    def _rendered(self, messages: Any) -> str:
        listed: list[Any] = cast("list[Any]", list(messages)) if isinstance(messages, list | tuple) else []
        if not listed or not all(isinstance(message, Mapping) for message in listed):
            raise InvalidType(
                f"found an example of type {type(messages).__name__}, expected a prompt (str) or a list of messages "
                'such as {"role": "user", "content": "Hello"}'
            )
        arguments = {"add_generation_prompt": True, **self._chat_template_args}
        return self.tokenizer.whole.apply_chat_template(listed, tokenize=False, **arguments)

    def load_model(self) -> Any:
        """Load the causal language model. Raises ``InvalidArgument`` for a sequence-to-sequence model."""
        if getattr(self.config, "is_encoder_decoder", False):
            raise InvalidArgument(
                f"{self.model_id!r} is a sequence-to-sequence model of the type {self.config.model_type!r}, expected a "
                "causal language model",
                fix="use Summarizer, whose prompt= may ask for other tasks, too",
            )
        return self.load("AutoModelForCausalLM")

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Generate, and return only the new tokens."""
        return self.generate(model, batch, inference_args)[:, batch.inputs["input_ids"].shape[1] :]
