"""Whether a handler's model runs in slots, how many there are, and the model that does.

Nothing here imports torch before a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.extras import require
from luminosity.inference.handlers.text.packed.families import Unfit
from luminosity.inference.handlers.text.packed.packing import type_of
from luminosity.inference.handlers.text.slots.families import DecoderShape
from luminosity.inference.handlers.text.slots.settings import defaults_of
from luminosity.inference.handlers.text.slots.weights import DecoderWeights, ModelFiles

__all__ = ["SlotPlan", "room_for", "slot_plan_of"]

_LOGGER = logging.getLogger(__name__)

_MOST_SLOTS = 256  # more hardly compute more tokens a second
_FEW_SLOTS = 64  # rather shorter slots than fewer
_CPU_SLOTS = 16  # as large as usual batches; more rows wait longer for each step
_LONGEST = 4096  # tokens of a slot; the few rows that are longer get slots of their own
_SHORT = 1024  # tokens; rather fewer slots than shorter ones
_MEMORY_SHARE = 0.5  # of what is free; the rest is for prompts that are read, and for other models
_TRIED = (70, 33, 40)  # tokens of the rows with which torch's attention is compared, and those of their prefix
_LEAST_COSINE = 0.995


@dataclass(frozen=True)
class SlotPlan:
    """How a model runs in slots."""

    weights: DecoderWeights
    device: Any
    dtype: Any
    defaults: Mapping[str, Any]
    """The arguments of ``generate`` that the model's files set."""

    def model(self, longest: Callable[[], int], **options: Any) -> Any:
        """Load the weights onto the device, and return the model behind slots.

        Args:
            longest: returns the most tokens of a usual row with those of its prompt; called after the weights are read.
            options: those of :class:`SlotModel`.
        """
        # These modules import torch, which the processes that only tokenise don't need.
        from luminosity.inference.handlers.text.slots.decoder import Decoder, has_varlen
        from luminosity.inference.handlers.text.slots.device_slots import Slots
        from luminosity.inference.handlers.text.slots.model import SlotModel

        torch = require("torch", "torch")
        with torch.inference_mode():
            decoder = Decoder(self.weights.shape, *self.weights.load(self.device, self.dtype))
            shape, is_cuda = self.weights.shape, self.device.type == "cuda"
            is_free = has_varlen(self.device, self.dtype, shape.head_size) and _is_same(decoder, Slots)
        free = torch.cuda.mem_get_info(self.device)[0] if is_cuda else None
        count, length = room_for(shape, min(longest(), shape.longest), self.dtype.itemsize, free)

        def make_slots(count: int, length: int, recorded: bool) -> Any:
            return Slots(decoder, count, length, is_recorded=recorded and is_cuda, is_free=is_free)

        return SlotModel(decoder, make_slots, count, length, **options)


def slot_plan_of(files: ModelFiles, device: Any, dtype: Any) -> SlotPlan | None:
    """Return how a model runs in slots, or None if it needs transformers; a line of the log says why.

    ``dtype``: the type of the weights, or None for the one that the model was saved with.
    """
    try:
        return _plan_of(files, device, dtype)
    except Unfit as error:
        _LOGGER.info("The model runs in transformers, in batches: %s.", error)
        return None


def _plan_of(files: ModelFiles, device: Any, dtype: Any) -> SlotPlan:
    weights = DecoderWeights.of(files)
    dtype = type_of(weights.config, weights.dtype, device, dtype)
    defaults = defaults_of(weights.config, files.json("generation_config.json"))
    return SlotPlan(weights, device, dtype, defaults)


def room_for(shape: DecoderShape, wanted: int, bytes_of_one: int, free: int | None) -> tuple[int, int]:
    """Return how many slots there are, and how many tokens fit into each.

    ``free``: the bytes that are free on an accelerator; None for the CPU.
    """
    length = max(min(wanted, _LONGEST), 1)
    if free is None:
        return _CPU_SLOTS, min(length, _SHORT)
    count, of_token = _MOST_SLOTS, shape.numbers_of_a_token * bytes_of_one
    while count * (length * of_token + shape.vocabulary * bytes_of_one) > free * _MEMORY_SHARE and count > 1:
        if count <= _FEW_SLOTS and length > _SHORT:
            length //= 2
        else:
            count //= 2
    return count, length


def _is_same(decoder: Any, make: Callable[..., Any]) -> bool:
    """Return whether torch's attention for rows of different lengths gives what the plain one gives."""
    torch = require("torch", "torch")
    first, before, second = _TRIED
    ids = (np.arange(first + second, dtype=np.int32) * 7) % decoder.shape.vocabulary
    rows = [ids[:first], np.concatenate((ids[:before], ids[first : first + second - before]))]
    found: list[Any] = []
    try:
        for is_free in (True, False):
            slots = make(decoder, 2, max(_TRIED), is_recorded=False, is_free=is_free)
            both = slots.read(rows, [0, 1]), slots.read(rows, [0, 1], slots.prefix_of(ids[:before]))
            found.append(torch.cat(both).float())
        cosines = torch.nn.functional.cosine_similarity(*found, dim=1)
        if bool((cosines >= _LEAST_COSINE).all()):
            return True
        reason = f"least cosine {float(cosines.min()):.4f}"
    except Exception as error:  # whatever a kernel raises: prompts are read without it
        reason = f"{type(error).__name__}: {error}"
    _LOGGER.warning("Prompts are read one after the other, not packed: torch's attention differs (%s).", reason)
    return False
