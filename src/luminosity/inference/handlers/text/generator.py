"""A model that continues prompts: ``TextGenerator``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
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
from luminosity.inference.continuous import ContinuousModel
from luminosity.inference.handler import HandlerOptions, PartlyFailed, note, noting
from luminosity.inference.handlers.first_token import note_first_token
from luminosity.inference.handlers.on_torch import Batch
from luminosity.inference.handlers.text.answer_masks import AnswerMasks, check_answer_format, logits_processor, masks_of
from luminosity.inference.handlers.text.generating import GeneratingHandler, ends_of
from luminosity.inference.handlers.text.packed.families import Unfit
from luminosity.inference.handlers.text.plain.chats import can_render
from luminosity.inference.handlers.text.plain_text import PlainTexts
from luminosity.inference.handlers.text.prompt_arguments import (
    RowArguments,
    arguments_of,
    ids_of,
    limits_of,
    split,
    with_arguments,
)
from luminosity.inference.handlers.text.slots.choice import SlotPlan, slot_plan_of
from luminosity.inference.handlers.text.slots.rows import cut_behind
from luminosity.inference.handlers.text.slots.settings import Answer, settings_of
from luminosity.inference.handlers.text.tokens import texts_of, token_counts

__all__ = ["TextGenerator"]
_LOGGER = logging.getLogger(__name__)

_WARNED = set[str | None]()  # models, of which a process has few
_SHOWN_TEXT = 1000  # characters of a cut answer in its error


Messages: TypeAlias = "Sequence[Mapping[str, Any]] | Mapping[str, Any]"


class TextGenerator(GeneratingHandler["str | Messages"]):
    """Continues prompts, with a causal language model of transformers.

    ::

        prompts | RunInference(TextGenerator("HuggingFaceTB/SmolLM2-135M-Instruct", max_new_tokens=64))

    An example is a prompt, or a list of messages (``[{"role": "user", "content": "Hello"}]``) that the model's chat
    template turns into a prompt. A mapping with ``"prompt"`` or ``"messages"`` may have arguments of its own:
    ``max_new_tokens``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``stop_strings`` and ``seed``. A
    prediction is the new text only. A prompt costs its tokens plus ``max_new_tokens``.

    On a GPU, models of Llama's kind (Llama, Qwen2, Qwen3, Mistral, SmolLM) run in slots: each prompt starts when a slot
    is free, and its prediction is there when its own text ends. All others run in transformers, in batches.

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

    uses_slots = True
    """Set it to False on a handler to run the model with transformers in any case."""
    slot_devices: tuple[str, ...] = ("cuda",)
    """The devices on which models run in slots."""
    shares_prefixes = True
    """Whether the slots compute tokens once with which several prompts begin."""
    may_be_packed = True
    reads_tokenizer_json = True
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
        other = copy(self)
        other._answer_format = answer_format
        other.validate_inference_args(self._generation_args)
        return other

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise also for several beams with an answer format: each step follows one answer of a prompt."""
        super().validate_inference_args(inference_args)
        self._check_beams((inference_args or {}).get("num_beams"))

    def _check_beams(self, count: int | None) -> None:
        if self._answer_format is not None and count not in (None, 1):
            raise InvalidArgument(f"found num_beams={count}, expected 1 with an answer format")

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
        parts = [split(example) for example in rows(block)]
        prompts = self._prompts([prompt for prompt, _ in parts])
        self._warn_of_cut(prompts)
        return with_arguments(prompts, [own for _, own in parts])

    def _warn_of_cut(self, prompts: Any) -> None:
        """Say once in a process that prompts are as long as the model takes: what was longer has lost its beginning."""
        limit = self.tokenizer.limit
        if limit is None or self.model_id in _WARNED:
            return
        if long := int(np.count_nonzero(token_counts(prompts) >= limit)):
            _WARNED.add(self.model_id)
            _LOGGER.warning(
                "found %d prompt(s) in one batch that fill all %d tokens that %r takes; a longer prompt loses its "
                "beginning, and with it perhaps its instructions: make prompts shorter, or take a model with a longer "
                "context. This is said once for each process",
                *(long, limit, self.model_id),
            )

    def _prompts(self, examples: list[Any]) -> Any:
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
                'such as {"role": "user", "content": "Hello"}, or a mapping with one of them'
            )
        arguments = {"add_generation_prompt": True, **self._chat_template_args}
        if not (arguments.get("chat_template") or self.tokenizer.whole.chat_template):
            raise InvalidArgument(
                f"{self.model_id!r} has no chat template, so it takes prompts (str), but no messages",
                fix="use a model that was trained for chats, or pass chat_template_args={'chat_template': ...}",
            )
        marked = [self._plain_texts.marked(message) for message in listed]
        renders = self.plain is None or can_render(marked, arguments)
        whole = self.tokenizer.whole if renders else self.own_tokenizer
        return whole.apply_chat_template(marked, tokenize=False, **arguments)

    def load_model(self) -> Any:
        """Load the causal language model. Raises ``InvalidArgument`` for a sequence-to-sequence model."""
        plan = self.slot_plan
        if plan is not None:
            return self._model_in_slots(plan)
        if getattr(self.config, "is_encoder_decoder", False):
            raise InvalidArgument(
                f"{self.model_id!r} is a sequence-to-sequence model of the type {self.config.model_type!r}, expected a "
                "causal language model",
                fix="use Summarizer, whose prompt= may ask for other tasks, too",
            )
        return self._load_whole()

    def _model_in_slots(self, plan: SlotPlan) -> Any:
        with ThreadPoolExecutor(1, "tokenizer") as other:
            # A tokenizer that needs transformers imports it, which takes about as long as the weights.
            limit = other.submit(lambda: self.tokenizer.limit)
            return plan.model(
                lambda: (limit.result() or plan.weights.shape.longest) + self._max_new_tokens,
                defaults=self._defaults(plan),
                decode=lambda tokens: self.tokenizer.whole.decode(tokens),
                fallback=self._answer_by_transformers,
                make_matcher=self._matcher_maker(plan),
                shares_prefixes=self.shares_prefixes,
            )

    def _matcher_maker(self, plan: SlotPlan) -> Callable[[], Any] | None:
        """Return what makes a matcher of the answer format for each prompt; None without a format."""
        return None if self._answer_format is None else self._masks(settings_of(self._defaults(plan)).ends).matcher

    @cached_property
    def slot_plan(self) -> SlotPlan | None:
        """How the model runs in slots in this process; None if it runs with transformers."""
        is_here = self.uses_slots and self.device.type in self.slot_devices and not self.source.path.endswith(".gguf")
        plan = slot_plan_of(self.source, self.device, self.dtype) if is_here else None
        return plan if plan is None or _is_known(self._defaults(plan)) else None

    def _defaults(self, plan: SlotPlan) -> dict[str, Any]:
        return {**plan.defaults, "max_new_tokens": self._max_new_tokens, **self._generation_args}

    def submits(self, inference_args: Mapping[str, Any] | None) -> bool:
        """Return whether the slots know these arguments; otherwise transformers computes batches."""
        plan = self.slot_plan
        return plan is not None and _is_known({**self._defaults(plan), **(inference_args or {})})

    def memory(self, model: Any) -> int | None:
        """Return the bytes of the weights, and of the slots."""
        if isinstance(model, ContinuousModel):
            slots: Any = model
            return sum(tensor.nbytes for tensor in slots.parameters()) + slots.slots.nbytes
        return super().memory(model)

    def _load_whole(self) -> Any:
        """Load the model with transformers."""
        return self.load("AutoModelForCausalLM")

    def tokens_of(self, prepared: Block) -> Any:
        """Return the token ids of the prompts."""
        return ids_of(prepared)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of tokens of each prompt plus those that may follow."""
        return token_counts(ids_of(prepared)) + limits_of(prepared, self._max_new_tokens)

    def collate(self, prepared: Block) -> Batch:
        """Pad the prompts to one length, and keep the arguments of each."""
        own = arguments_of(prepared)
        batch = super().collate(ids_of(prepared))
        return replace(batch, host_data=own) if any(own) else batch

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Generate, and return only the new tokens."""
        whole = self.whole if isinstance(model, ContinuousModel) else model
        tokens = self._written(whole, batch, inference_args)
        if self._answer_format is None:
            return tokens
        masks = self._masks(self._ends(whole, {**self._generation_args, **inference_args}))
        are_complete = [masks.is_complete(_without_end(row, self.pad_id)) for row in tokens.tolist()]
        return {"tokens": tokens, "is_complete": require("torch", "torch").tensor(are_complete)}

    def _written(self, whole: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the new tokens; of prompts with equal arguments together, of those with a seed alone."""
        own: list[RowArguments] = batch.host_data or [{}] * batch.count
        if not any(own) and "seed" not in {**self._generation_args, **inference_args}:
            return self._new_tokens(whole, batch, inference_args)
        torch = require("torch", "torch")
        groups: dict[Any, list[int]] = {}
        for place, each in enumerate(own):
            arguments = {**self._generation_args, **inference_args, **each}
            alone = place if arguments.get("seed") is not None else None
            groups.setdefault((alone, json.dumps(each, sort_keys=True)), []).append(place)
        found: list[Any] = [None] * batch.count
        for places in groups.values():
            inputs = {name: tensor[places] for name, tensor in batch.inputs.items()}
            part = Batch(inputs, len(places))
            tokens = self._new_tokens(whole, part, {**inference_args, **own[places[0]]})
            for place, row in zip(places, tokens, strict=True):
                found[place] = row
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=self.pad_id)

    def _new_tokens(self, model: Any, batch: Batch, arguments: dict[str, Any]) -> Any:
        arguments = {**self._generation_args, **arguments}
        given = batch.inputs["input_ids"].shape[1]
        if self._answer_format is not None:
            self._check_beams(arguments.get("num_beams", model.generation_config.num_beams))  # a model's files set some
            ends = self._ends(model, arguments)
            limit = logits_processor(self._masks(ends), ends, given)
            arguments["logits_processor"] = [*arguments.get("logits_processor", ()), limit]
        return self.generate(model, batch, arguments)[:, given:]

    def _ends(self, model: Any, arguments: Mapping[str, Any]) -> set[int]:
        """Return the tokens that end a text, with the tokenizer's own if the model has none."""
        return ends_of(model, arguments) or {self.tokenizer.whole.eos_token_id} - {None}

    def _masks(self, ends: Collection[int]) -> AnswerMasks:
        """Return the compiled answer format for this model; ``ends`` are the tokens that end an answer."""
        assert self._answer_format is not None
        config: Any = self.config if self.plain is None else self.plain.config
        size = config.get_text_config().vocab_size
        return masks_of(self.tokenizer.whole, self._answer_format, size, ends)

    def _answer_by_transformers(self, ids: list[int], arguments: Mapping[str, Any]) -> Answer:
        """Answer one prompt that the slots don't compute as transformers does."""
        torch = require("torch", "torch")
        batch = Batch({"input_ids": torch.tensor([ids], device=self.device)}, 1)
        with torch.inference_mode(), noting() as notes:
            tokens = self._new_tokens(self.whole, batch, dict(arguments))[0].tolist()
        return Answer(tokens, len(ids), bool(notes.get(InferenceMetrics.CUT_TEXTS)), is_of_slots=False)

    def collect(self, outputs: Any) -> Block | PartlyFailed:
        """Decode the new tokens to texts, without special tokens; a text ends behind the stop string that ended it.

        Of answers with a format, those that are cut fail.
        """
        if not isinstance(outputs, list):
            if self._answer_format is None:
                return super().collect(outputs)
            tokens = outputs.values["tokens"].tolist()
            return self._checked(tokens, outputs.values["is_complete"].tolist())
        answers = cast("list[Answer]", outputs)
        for answer in answers:
            note(InferenceMetrics.IN_SLOTS if answer.is_of_slots else InferenceMetrics.BY_TRANSFORMERS)
            note(InferenceMetrics.PROMPT_TOKENS, answer.prompt_tokens)
            note(InferenceMetrics.NEW_TOKENS, len(answer.tokens))
            if answer.first_token_s is not None:
                note_first_token(answer.first_token_s)
            if answer.is_cut:
                note(InferenceMetrics.CUT_TEXTS)
        tokens = [answer.tokens for answer in answers]
        if self._answer_format is not None:
            assert self.slot_plan is not None
            masks = self._masks(settings_of(self._defaults(self.slot_plan)).ends)
            return self._checked(tokens, [masks.is_complete(row) for row in tokens])
        texts = self.tokenizer.whole.batch_decode(tokens, skip_special_tokens=True)
        return [cut_behind(text, answer.stops) or text for text, answer in zip(texts, answers, strict=True)]

    def _checked(self, tokens: list[list[int]], are_complete: list[bool]) -> Block | PartlyFailed:
        """Return the texts of answers that have a format, with an error for each that was cut."""
        whole = self.tokenizer.whole
        texts = whole.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        errors: dict[int, Exception] = {
            place: IncompleteAnswer(
                f"the model's answer was cut at {len(tokens[place])} tokens: {shorten(texts[place], _SHOWN_TEXT)!r}",
                fix="raise max_new_tokens, or ask for a shorter answer",
            )
            for place, is_complete in enumerate(are_complete)
            if not is_complete
        }
        return PartlyFailed(texts, errors) if errors else texts


def _without_end(tokens: list[int], padding: int) -> list[int]:
    """Return the tokens without those that fill a row.

    >>> _without_end([5, 0, 6, 0, 0], 0)
    [5, 0, 6]
    """
    count = len(tokens)
    while count and tokens[count - 1] == padding:
        count -= 1
    return tokens[:count]


def _is_known(arguments: Mapping[str, Any]) -> bool:
    """Return whether the slots know these arguments of ``generate``."""
    try:
        settings_of(arguments)
    except Unfit as error:
        _LOGGER.info("The prompts run in transformers, in batches: %s.", error)
        return False
    return True
