from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModel

from luminosity.inference.handlers.text.text_handler import takes_masks_by_key

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("kind", "attention", "settings", "takes_them"),
    [
        ("bert", "sdpa", SMALL, True),
        ("bert", "eager", SMALL, False),
        ("gpt2", "sdpa", SMALL_GPT, False),  # each token sees only those before it
        ("modernbert", "sdpa", {**SMALL, "pad_token_id": 0}, False),  # most layers see only near tokens
        ("t5", "sdpa", {"vocab_size": 100, "d_model": 32, "num_layers": 1, "num_heads": 4}, False),
    ],
)
def test_models_that_take_one_mask_for_all_queries(
    kind: str, attention: str, settings: dict[str, Any], takes_them: bool
) -> None:
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModel.from_config(config, attn_implementation=attention).eval()

    assert takes_masks_by_key(model) is takes_them
