"""Which attention masks a transformer takes."""

from __future__ import annotations

from typing import Any

from luminosity.extras import require

__all__ = ["takes_masks_by_key"]

_CLOSE = 0.02
_NOT_ALL_TOKENS = ("attention_window", "layer_types", "local_attention", "sliding_window")
"""Settings of models that look at near tokens alone, and make other masks of the one they are given."""


def takes_masks_by_key(model: Any) -> bool:
    """Whether an encoder takes a mask of the shape (batch, 1, 1, tokens) for what it is: found by trying.

    Of a mask of the shape (batch, tokens) transformers asks whether anything is masked, and waits for the device to
    answer: nothing is enqueued meanwhile. And it makes one mask for each query of it, though all are the same.
    """
    torch = require("torch", "torch")
    config = model.config
    if getattr(config, "_attn_implementation", None) != "sdpa" or getattr(config, "is_encoder_decoder", False):
        return False
    if any(getattr(config, name, None) for name in _NOT_ALL_TOKENS):
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
