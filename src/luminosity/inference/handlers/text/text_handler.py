"""The base class of all handlers for text models of transformers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Self, Unpack

from luminosity.core import InferenceMetrics
from luminosity.errors import Fix, HandlerError, InvalidArgument, InvalidType, ModelUnavailable
from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.handler import ExampleT, HandlerOptions, note
from luminosity.inference.handlers.on_torch import Batch
from luminosity.inference.handlers.padding import pad_rows
from luminosity.inference.handlers.text.packed.packing import Packing, packing_of
from luminosity.inference.handlers.text.plain.tokenizer import PlainModel
from luminosity.inference.handlers.text.pretrained import token_limit
from luminosity.inference.handlers.text.tokens import (
    Lists,
    Tokenizer,
    flat_values,
    is_same_tokenizer,
    offsets_of,
    pad_tokens,
    texts_of,
    token_counts,
)
from luminosity.inference.handlers.text.transformers_handler import TransformersHandler

__all__ = ["TextHandler", "takes_masks_by_key"]


FORK_SAFE_IMPORTS = ("tokenizers",)
"""Libraries that each worker with a text model needs: the engine imports them once, before it forks workers."""

_CLOSE = 0.02  # how much two masks' outputs may differ, as a share of what the mask changes
_LOCAL_ATTENTION = ("attention_window", "layer_types", "local_attention", "sliding_window")
"""Settings of models that attend to near tokens only; they change the mask that they are given."""


_DECODE = Fix("decode the column to text first, for example with MapTable", command="convert the column to text first")
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def _is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type holds texts.

    >>> _is_text(pa.dictionary(pa.int8(), pa.string())), _is_text(pa.binary())
    (True, False)
    """
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _TEXT_TYPES


class TextHandler(TransformersHandler[ExampleT]):
    """A handler whose examples are texts.

    Workers that prepare texts load only the tokenizer, and the process that predicts loads the model. Tokenizers of
    common encoders are read from ``tokenizer.json`` by the library ``tokenizers``; for others, workers import
    transformers, which takes seconds.
    """

    reads_tokenizer_json = True
    """Set it to False on a handler to tokenise with transformers in any case."""
    packs_rows = True
    """Set it to False on a handler to run the model with transformers in any case."""
    may_be_packed = False
    """Whether there are other ways to run such a model than in transformers."""
    padding_side = "right"
    cut_side = "right"

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_length: int | None,
        device: str,
        dtype: Any,
        compile: bool,
        load_model_args: Mapping[str, Any] | None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, device, dtype, compile, load_model_args, **options)
        if max_length is not None and max_length < 1:
            raise InvalidArgument(f"found max_length={max_length}, expected at least one token")
        self._max_length = max_length
        self._masks_by_key = False

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise ``InvalidType`` unless a column of this type holds texts."""
        if not _is_text(kind):
            raise InvalidType(f"found {kind}, expected text", fix=_DECODE if pa.types.is_binary(kind) else None)

    def check_prepares_like(self, first: TextHandler[Any]) -> None:
        """Raise if the tokenizer differs from that of ``first``."""
        if not is_same_tokenizer(self.source.tokenizer(), first.source.tokenizer()):
            raise ModelUnavailable(
                f"{self.model_id!r} has another tokenizer than {first.model_id!r}, with which the pipeline started and "
                "which prepares its texts",
                fix="start a new run for a model with another tokenizer",
            )

    @cached_property
    def plain(self) -> PlainModel | None:
        """The tokenizer and configuration, read without transformers on first use; None if that is not possible."""
        return self.source.plain() if self.reads_tokenizer_json else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use."""
        if self.plain is not None:
            return self._tokenizer_of(self.plain.tokenizer, self.plain.config)
        return self._tokenizer_of(self.source.tokenizer(), self.config)

    def _tokenizer_of(self, whole: Any, config: Any) -> Tokenizer:
        return Tokenizer(whole, self.limit_of(whole, config), self.cut_side)

    def limit_of(self, tokenizer: Any, config: Any) -> int | None:
        """Return the number of tokens at which texts are cut, or None for no limit."""
        return token_limit(self._max_length, tokenizer, config)

    def check_tokenizer(self) -> None:
        """Raise if transformers, which the model needs anyway, would tokenise otherwise than the workers do."""
        if self.plain is None:
            return
        expected = self._tokenizer_of(self.source.tokenizer(), self.config)
        if expected.rules != self.tokenizer.rules:
            raise HandlerError(
                f"the tokenizer of {self.model_id!r} differs from the one that transformers "
                f"{require('transformers', 'transformers').__version__} makes of the same files",
                fix="set `reads_tokenizer_json = False` on the handler, which then tokenises with transformers",
            )

    @cached_property
    def packing(self) -> Packing | None:
        """How the model runs packed in this process; None if it runs with transformers."""
        if not self.packs_rows or self._compile or self.source.path.endswith(".gguf") or not self._is_packable():
            return None
        return packing_of(self.source, self.device, self.dtype)

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which a GPU can run the model: some of "packed", "padded" (in transformers) and "compiled"."""
        if "compile" not in inspect.signature(type(self).__init__).parameters:
            return ()
        is_packed = self.adjusted("cpu", "float32", "packed").packing is not None  # the file decides, not the device
        return ("packed", "padded", "compiled") if is_packed else ("padded", "compiled")

    def adjusted(self, device: str | None = None, dtype: str | None = None, way: str | None = None) -> Self:
        """Return a copy for another device, with another dtype or run in another way; None keeps the current one."""
        other = super().adjusted(device, dtype)
        if way is not None:
            other.packs_rows, other._compile = way == "packed", way == "compiled"
        return other

    def _is_packable(self) -> bool:
        """Return whether the handler computes nothing that the packed model can't."""
        return False

    @property
    def sums_costs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a batch costs the sum of its texts' tokens: if none of them is padded."""
        return self.packing is not None and self.packing.is_free

    @cached_property
    def whole(self) -> Any:
        """The model of transformers, for a packed handler with arguments that only that one takes."""
        return self._load_whole()

    def _load_whole(self) -> Any:
        """Load the model with transformers."""
        raise NotImplementedError(f"{type(self).__name__} has no method `_load_whole`")

    @cached_property
    def pad_id(self) -> int:
        """The token id that fills the end of shorter texts."""
        candidates = (self.config.get_text_config().pad_token_id, self.tokenizer.whole.pad_token_id)
        return next((token for token in candidates if token is not None), 0)

    @cached_property
    def prompt(self) -> str:
        """The text that is put before each example."""
        return ""

    def prepare(self, block: Block) -> Block:
        """Tokenise the texts, with the prompt before each."""
        texts = texts_of(block)
        return self.tokenizer.ids([self.prompt + text for text in texts] if self.prompt else texts)

    def is_repeatable(self, inference_args: Mapping[str, Any] | None) -> bool | None:
        """Return True: vectors and labels depend on the text alone."""
        return True

    def prepare_key(self) -> Hashable | None:
        """Return the tokenizer's rules and the prompt, or None if the rules are not known."""
        rules = self.tokenizer.rules
        return None if rules is None else (rules, self.prompt)

    def tokens_of(self, prepared: Block) -> Lists:
        """Return the token ids in the output of ``prepare``."""
        return prepared

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of tokens of each text."""
        return token_counts(self.tokens_of(prepared))

    def collate(self, prepared: Block) -> Batch:
        """Join the token ids of all texts, or pad them to one length, with a mask if there is padding."""
        torch = require("torch", "torch")
        if self.packing is not None:
            tokens = self.tokens_of(prepared)
            counts, ids = token_counts(tokens), flat_values(tokens).astype(np.int32)  # a copy: Arrow's is read-only
            words = self.packing.weights.shape.vocabulary
            if int(ids.max()) >= words:  # a kernel would read another vector
                raise HandlerError(
                    f"found the token {ids.max()} of {self.model_id!r}, which has vectors for {words:,} tokens",
                    fix="use the tokenizer that belongs to the model",
                )
            inputs = {
                "ids": torch.from_numpy(ids),
                "starts": torch.from_numpy(offsets_of(counts, len(counts))),
            }
            return Batch(inputs, len(prepared), int(counts.max()))
        limit = self.tokenizer.limit if self._compile else None
        ids, mask = pad_tokens(self.tokens_of(prepared), self.pad_id, self.padding_side, self._compile, limit)
        inputs = {"input_ids": torch.from_numpy(ids)}
        if not mask.all():  # attention is faster without a mask
            inputs["attention_mask"] = torch.from_numpy(mask)
        return Batch(inputs, len(prepared))

    def padded(self, batch: Batch) -> Batch:
        """Return a packed batch as transformers takes it."""
        torch = require("torch", "torch")
        ids, starts = (batch.inputs[name].cpu().numpy() for name in ("ids", "starts"))
        values, mask = pad_rows(ids, np.diff(starts), batch.host_data, self.pad_id, self.padding_side)
        inputs = {"input_ids": torch.from_numpy(values), "attention_mask": torch.from_numpy(mask)}
        return replace(batch, inputs={name: tensor.to(self.device) for name, tensor in inputs.items()})

    def load(self, kind: str, optional: tuple[str, ...] = ()) -> Any:
        """Load the model of this kind onto its device."""
        self.choose_attention()
        self.check_tokenizer()
        model = self.on_device(kind, optional)
        self._masks_by_key = self.device.type == "cuda" and takes_masks_by_key(model)
        return model

    def call(self, module: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the transformer's output for a batch."""
        mask = batch.inputs.get("attention_mask")
        if mask is not None:
            mask = mask[:, None, None, :] if self._masks_by_key else mask.long()
        if self.may_be_packed:
            note(InferenceMetrics.BY_TRANSFORMERS, batch.count)
        return module(input_ids=batch.inputs["input_ids"].long(), attention_mask=mask, **inference_args)

    def warm_up(self, model: Any) -> None:
        """Run the model once on a short text."""
        example: Any = "warm up"
        list(self.run_inference([example], model))


def takes_masks_by_key(model: Any) -> bool:
    """Return whether an encoder gives the same result for a mask of the shape (batch, 1, 1, tokens), found by trying.

    With a mask of the shape (batch, tokens), transformers checks if anything is masked and waits for the device, so
    nothing is enqueued meanwhile. It also expands the mask for each query, though all are the same.
    """
    torch = require("torch", "torch")
    config = model.config
    if getattr(config, "_attn_implementation", None) != "sdpa" or getattr(config, "is_encoder_decoder", False):
        return False
    if any(getattr(config, name, None) for name in _LOCAL_ATTENTION):
        return False
    ids = torch.arange(1, 17, device=model.device).reshape(2, 8)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 3:] = False
    try:
        with torch.inference_mode():
            expected = model(input_ids=ids, attention_mask=mask.long())[0]
            found = model(input_ids=ids, attention_mask=mask[:, None, None, :])[0]
            without = model(input_ids=ids)[0]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    expected, found, without = (each[1, 0].float() for each in (expected, found, without))
    difference = float((expected - found).abs().max())
    return difference <= _CLOSE * float((expected - without).abs().max())
