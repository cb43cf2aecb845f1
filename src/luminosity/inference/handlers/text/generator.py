"""Models that write text, token by token: ``TextGenerator`` and ``Summarizer``."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Self, Unpack

from luminosity._shared.text import shorten
from luminosity.core import InferenceMetrics
from luminosity.errors import IncompleteAnswer, InvalidArgument, InvalidType
from luminosity.extras import require
from luminosity.inference.answer_format import AnswerFormat
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handler import ExampleT, HandlerOptions, PartlyFailed, note
from luminosity.inference.handlers.on_torch import Batch, Outputs
from luminosity.inference.handlers.text.answer_masks import AnswerMasks, check_answer_format, logits_processor, masks_of
from luminosity.inference.handlers.text.plain_text import PlainTexts
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.handlers.text.tokens import texts_of

__all__ = ["Summarizer", "TextGenerator"]


class GeneratingHandler(TextHandler[ExampleT]):
    """A handler whose predictions are new texts of at most ``max_new_tokens`` tokens."""

    output_type = pa.string()
    reads_tokenizer_json = False  # decoding needs transformers

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

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise if more than one sequence per example is requested."""
        count = (inference_args or {}).get("num_return_sequences", 1)
        if count != 1:
            raise InvalidArgument(f"found num_return_sequences={count}, expected 1: each example has one prediction")

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of tokens of each text plus ``max_new_tokens``."""
        return super().cost(prepared) + self._max_new_tokens

    def generate(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the tokens that the model's own ``generate`` returns for a batch; count texts that it cuts."""
        arguments = {"max_new_tokens": self._max_new_tokens, "pad_token_id": self.pad_id}
        arguments |= {**self._generation_args, **inference_args}
        if "stop_strings" in arguments:
            arguments.setdefault("tokenizer", self.tokenizer.whole)
        tokens = self.call(model.generate, batch, arguments)
        asked = batch.inputs["input_ids"]
        mask = batch.inputs.get("attention_mask")
        note(InferenceMetrics.PROMPT_TOKENS, int(asked.numel() if mask is None else mask.sum()))
        given = 1 if getattr(self.config, "is_encoder_decoder", False) else asked.shape[1]
        ends = {self.pad_id, *_ends(model, arguments)}
        written = tokens[:, given:].tolist()
        note(InferenceMetrics.NEW_TOKENS, sum(map(len, written)) - sum(_after_end(row, ends) for row in written))
        if tokens.shape[1] - given >= (arguments["max_new_tokens"] or math.inf):
            note(InferenceMetrics.CUT_TEXTS, sum(row[-1] not in ends for row in written))
        return tokens

    def collect(self, outputs: Outputs) -> Block:
        """Decode the new tokens to texts, without special tokens."""
        return self.tokenizer.whole.batch_decode(outputs.values.numpy(force=True), skip_special_tokens=True)


def _ends(model: Any, arguments: Mapping[str, Any]) -> set[int]:
    """Return the tokens that end a text."""
    ends = arguments.get("eos_token_id", model.generation_config.eos_token_id)
    return {each for each in (ends if isinstance(ends, list) else [ends]) if each is not None}


def _after_end(tokens: Sequence[int], ends: Collection[int | None]) -> int:
    """Return how many tokens fill a row after the one that ends its text.

    >>> _after_end([5, 6, 2, 0, 0], {0, 2}), _after_end([5, 6, 7], {0, 2})
    (2, 0)
    """
    filled = 0
    while filled < len(tokens) and tokens[len(tokens) - 1 - filled] in ends:
        filled += 1
    return max(0, filled - 1)


Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
_SHOWN_TEXT = 1000  # characters of a cut answer in its error


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
    _answer_format: AnswerFormat | None = None

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

    @property
    def answer_arguments(self) -> Mapping[str, Any]:
        """What ``model.generate`` is asked for, such as a temperature."""
        return self._generation_args

    def with_answer_format(self, answer_format: AnswerFormat) -> Self:
        """Return a copy that can write only answers of this format. One that is cut fails with ``IncompleteAnswer``.

        Raises ``InvalidArgument`` for a format that can't be enforced, and ``MissingExtra`` without llguidance.
        """
        check_answer_format(answer_format)
        if self._generation_args.get("num_beams", 1) != 1:
            raise InvalidArgument(
                f"found num_beams={self._generation_args['num_beams']}, expected 1 with an answer format"
            )
        other = copy(self)
        other._answer_format = answer_format
        return other

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
        """Tokenise the prompts, and the chats after the chat template has rendered them.

        The content of a message is text: special tokens of the model in it, such as ``<|im_end|>``, end no message.
        """
        examples = list(rows(block))
        chats = [not isinstance(example, str) for example in examples]
        if not any(chats):
            return self.tokenizer.ids(examples)
        # The chat template writes the special tokens itself.
        prompts = self.tokenizer.ids([e for e, chat in zip(examples, chats, strict=True) if not chat])
        rendered = texts_of([self._rendered(e) for e, chat in zip(examples, chats, strict=True) if chat])
        both = pa.concat_arrays([prompts, self._plain_texts.ids(rendered)])
        # `both` has prompts first, then chats: undo the stable sort by the flags.
        return both.take(pa.array(np.argsort(np.argsort(chats, kind="stable"))))

    def prepare_key(self) -> None:
        """Return None: prompts depend on the chat template."""

    @cached_property
    def _plain_texts(self) -> PlainTexts:
        return PlainTexts(self.tokenizer)

    def _rendered(self, messages: Any) -> str:
        listed: list[Any] = cast("list[Any]", list(messages)) if isinstance(messages, list | tuple) else []
        if not listed or not all(isinstance(message, Mapping) for message in listed):
            raise InvalidType(
                f"found an example of type {type(messages).__name__}, expected a prompt (str) or a list of messages "
                'such as {"role": "user", "content": "Hello"}'
            )
        arguments = {"add_generation_prompt": True, **self._chat_template_args}
        if not (arguments.get("chat_template") or self.tokenizer.whole.chat_template):
            raise InvalidArgument(
                f"{self.model_id!r} has no chat template, so it takes prompts (str), but no messages",
                fix="use a model that was trained for chats, or pass chat_template_args={'chat_template': ...}",
            )
        marked = [self._plain_texts.marked(message) for message in listed]
        return self.tokenizer.whole.apply_chat_template(marked, tokenize=False, **arguments)

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
        given = batch.inputs["input_ids"].shape[1]
        if self._answer_format is None:
            return self.generate(model, batch, inference_args)[:, given:]
        arguments = {**self._generation_args, **inference_args}
        masks, ends = self._masks(model, arguments)
        processors = [*arguments.get("logits_processor", ()), logits_processor(masks, ends, given)]
        tokens = self.generate(model, batch, {**inference_args, "logits_processor": processors})[:, given:]
        return {"tokens": tokens, "is_complete": self._are_complete(masks, tokens)}

    def _masks(self, model: Any, arguments: Mapping[str, Any]) -> tuple[AnswerMasks, set[int]]:
        """Return the compiled format for a model, and the tokens that end an answer."""
        assert self._answer_format is not None
        ends = _ends(model, arguments) or {self.tokenizer.whole.eos_token_id} - {None}
        size = self.config.get_text_config().vocab_size
        return masks_of(self.tokenizer.whole, self._answer_format, size, ends), ends

    def _are_complete(self, masks: AnswerMasks, tokens: Any) -> Any:
        torch = require("torch", "torch")
        return torch.tensor([masks.is_complete(row) for row in tokens.tolist()])

    def collect(self, outputs: Outputs) -> Block | PartlyFailed:
        """Decode the new tokens to texts, without special tokens. Of answers with a format, those that are cut fail."""
        if self._answer_format is None:
            return super().collect(outputs)
        tokens = outputs.values["tokens"].numpy(force=True)
        whole = self.tokenizer.whole
        texts = whole.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        errors: dict[int, Exception] = {
            place: IncompleteAnswer(
                f"the model's answer was cut at {tokens.shape[1]} tokens: {shorten(texts[place], _SHOWN_TEXT)!r}",
                fix="raise max_new_tokens, or ask for a shorter answer",
            )
            for place, is_complete in enumerate(outputs.values["is_complete"].tolist())
            if not is_complete
        }
        return PartlyFailed(texts, errors) if errors else texts


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
