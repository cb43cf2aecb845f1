"""Tiny language models of each family, and what transformers makes of prompts one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from luminosity.inference.handlers.text.pretrained import Pretrained
from luminosity.inference.handlers.text.slots.choice import SlotPlan
from luminosity.inference.handlers.text.slots.decoder import Decoder
from luminosity.inference.handlers.text.slots.device_slots import Slots
from luminosity.inference.handlers.text.slots.model import SlotModel
from luminosity.inference.handlers.text.slots.settings import Answer

VOCABULARY = 320
FAMILIES = ("llama", "llama3", "linear", "biased", "smollm", "qwen2", "qwen3", "mistral")
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # large, so that tokens differ from prompt to prompt
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def made(family: str, folder: Path, **more: Any) -> tuple[Any, str]:
    """Return a model of transformers, and the folder where it is saved."""
    import torch
    import transformers

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {"num_key_value_heads": 4}),
        "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
        "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}),
        "biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        "smollm": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"head_dim": 16}),
        "mistral": ("Mistral", {"sliding_window": 100}),
    }
    name, special = kinds[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **special, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if tensor_name.endswith("bias") or "norm" in tensor_name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if family == "qwen3" else {}))
    return model, str(folder)


def alone(model: Any, prompt: Sequence[int], limit: int, **arguments: Any) -> list[int]:
    """Return the new tokens of one prompt, by transformers."""
    import torch

    ids = torch.tensor([list(prompt)])
    arguments = {"do_sample": False, "pad_token_id": 0, **arguments}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **arguments)
    return found[0, len(prompt) :].tolist()


def slot_model(path: str, *, count: int = 4, length: int = 192, **options: Any) -> SlotModel:
    """Return a model behind slots on the CPU."""
    import torch

    from luminosity.inference.handlers.text.slots.choice import slot_plan_of

    plan = slot_plan_of(Pretrained(path), torch.device("cpu"), None)
    assert isinstance(plan, SlotPlan)
    with torch.inference_mode():
        decoder = Decoder(plan.weights.shape, *plan.weights.load(plan.device, plan.dtype))

    def make(count: int, length: int, recorded: bool) -> Slots:
        return Slots(decoder, count, length, is_recorded=False, is_free=False)

    settings: dict[str, Any] = {
        "defaults": {**plan.defaults, "max_new_tokens": 16},
        "decode": lambda tokens: " ".join(map(str, tokens)),
        "fallback": no_fallback,
    }
    return SlotModel(decoder, make, count, length, **{**settings, **options})


def no_fallback(ids: list[int], arguments: Mapping[str, Any]) -> Any:
    raise AssertionError(f"{len(ids)} tokens with {arguments} went to transformers")


def prompts(lengths: Sequence[int], seed: int = 0, before: Sequence[int] = ()) -> list[list[int]]:
    """Return random prompts of these lengths, which begin with the same tokens."""
    generator = np.random.default_rng(seed)
    return [[*before, *generator.integers(3, VOCABULARY, length).tolist()] for length in lengths]


def answers(model: SlotModel, asked: Sequence[Sequence[int]], arguments: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Return the answers to all prompts, which are submitted at once."""
    futures: list[Future[Any]] = [model.submit(list(ids), each) for ids, each in zip(asked, arguments, strict=True)]
    return [future.result(timeout=120) for future in futures]
