"""Language models with random weights, a tokenizer of as many words, and requests of skewed lengths."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from _accelerator_models import has_cuda, is_small, path_of

__all__ = ["SHAPES", "handler", "ids_of", "make", "models", "path_of", "requests", "shape_of", "text_of"]

_LONGEST = 1024  # tokens of a prompt: a longer one would lose its first tokens, which prompts share
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "equal": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
    },
}
"""The sizes of the models: that of Llama 3.2 1B, and one whose answers are compared."""


def shape_of(name: str) -> dict[str, Any]:
    """Return the sizes of a model."""
    small = {**_SMALL, "num_key_value_heads": 2, "vocab_size": 512}
    return small if is_small() else SHAPES[name]


def requests(rows: int, seed: int) -> list[dict[str, Any]]:
    """Return prompts of 40 to 200 tokens that want 8 to 512 new ones, most of them few."""
    generator = np.random.default_rng(seed)
    words = shape_of("1b")["vocab_size"]
    lengths = generator.integers(4, 20, rows) if is_small() else generator.integers(40, 200, rows)
    new = np.clip(generator.lognormal(3.6, 1.1, rows).astype(int), 8, 512)
    new = np.minimum(new, 24) if is_small() else new
    return [
        {"prompt": text_of(generator.integers(0, words, length)), "max_new_tokens": limit}
        for length, limit in zip(lengths.tolist(), new.tolist(), strict=True)
    ]


def text_of(ids: Any) -> str:
    """Return a text of these tokens."""
    return " ".join(f"w{number}" for number in ids.tolist())


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [int(word[1:]) for word in text.split()]


def handler(name: str = "1b", dtype: str | None = None, **options: Any) -> Any:
    """Return a generator that runs in slots."""
    from luminosity import TextGenerator

    dtype = dtype or ("bfloat16" if has_cuda() else "float32")
    made = TextGenerator(path_of(name), dtype=dtype, max_new_tokens=24 if is_small() else 512, **options)
    made.slot_devices = ("cpu", "cuda")
    return made


def make(name: str, folder: Path) -> None:
    """Save a model with random weights, and its tokenizer."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from luminosity.inference.handlers.text.slots.families import decoder_shape_of

    folder.mkdir()
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,  # random weights end no text: each request says how long its answer is
        "pad_token_id": 0,
        **shape_of(name),
    }
    device, dtype = ("cuda", torch.bfloat16) if has_cuda() else ("cpu", torch.float32)
    dtype = torch.float32 if name == "equal" else dtype
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        each: torch.ones(sizes, dtype=dtype)
        if "norm" in each
        else (torch.randn(sizes, device=device, generator=generator) * 0.02).to(dtype).cpu()
        for each, sizes in decoder_shape_of(config).tensors()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0}))
    built = Tokenizer(models.WordLevel({f"w{number}": number for number in range(config["vocab_size"])}, "w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["w0"])
    built.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "model_max_length": _LONGEST}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def models() -> None:
    """Print what runs here, and save the models that the sections need."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    print(
        f"{device}, {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}, torch {torch.__version__},"
    )
    print(f"transformers {version('transformers')}; models with random weights, {'tiny' if is_small() else 'whole'}")
    needs_all = "equality" in os.environ["ACCELERATOR_SECTIONS"].split(",")
    for name in SHAPES if needs_all else ["1b"]:
        make(name, Path(os.environ["ACCELERATOR_MODELS"], name))
