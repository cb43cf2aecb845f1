"""Tells which language models the slots compute, by their ``config.json``: those that are built as Llama is.

A model is computed as transformers computes it, or not at all: whatever this module does not know is left to
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from luminosity.inference.handlers.text.packed.families import Unfit

__all__ = ["DecoderShape", "decoder_shape_of"]

_LARGEST_HEAD = 256  # numbers of a token in a head that kernels of attention take
_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
"""The families, with the positions that transformers assumes where the file names none."""
_NOT_TOLD: Any = object()


@dataclass(frozen=True)
class Turning:
    """How positions turn queries and keys; ``factor`` 1 leaves the base's angles as they are."""

    base: float
    factor: float = 1.0
    low: float = 0.0
    """Llama 3: waves longer than ``positions / low`` are stretched by the factor, those in between partly."""
    high: float = 0.0
    """Llama 3: waves shorter than ``positions / high`` stay; 0 stretches all of them."""
    positions: int = 0
    """Llama 3: how many positions the model was first trained with."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a language model, and what its layers do."""

    family: str
    vocabulary: int
    width: int
    inside: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    epsilon: float
    turning: Turning
    positions: int
    """How many tokens a text may have, with the prompt."""
    window: int | None
    """How far back attention reaches; longer texts are left to transformers."""
    is_tied: bool
    """Whether the last matrix is that of the words."""
    has_joined_bias: bool
    """Whether queries, keys and values have a bias."""
    has_out_bias: bool
    has_inside_bias: bool
    has_head_norms: bool
    """Whether each head's queries and keys are normalised."""

    @property
    def longest(self) -> int:
        """The most tokens of a row that the slots compute as transformers does."""
        return self.positions if self.window is None else min(self.positions, self.window)

    @property
    def numbers_of_a_token(self) -> int:
        """How many numbers the keys and values of one token have in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name of each tensor that the model needs, and its sizes."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.width)
        yield "model.norm.weight", (self.width,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocabulary, self.width)
        for number in range(self.layers):
            for parts in self.parts(number).values():
                yield from parts

    def parts(self, number: int) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Return the tensors of a layer by our names; those of one name are joined."""
        before = f"model.layers.{number}."
        attention, mlp = f"{before}self_attn.", f"{before}mlp."
        all_heads, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        joined = [(f"{attention}{letter}_proj", rows) for letter, rows in (("q", all_heads), ("k", kv), ("v", kv))]
        linear = {
            "joined": (joined, self.width, self.has_joined_bias),
            "out": ([(f"{attention}o_proj", self.width)], all_heads, self.has_out_bias),
            "up": (
                [(f"{mlp}gate_proj", self.inside), (f"{mlp}up_proj", self.inside)],
                self.width,
                self.has_inside_bias,
            ),
            "down": ([(f"{mlp}down_proj", self.width)], self.inside, self.has_inside_bias),
        }
        found: dict[str, list[tuple[str, tuple[int, ...]]]] = {
            "norm": [(f"{before}input_layernorm.weight", (self.width,))],
            "last": [(f"{before}post_attention_layernorm.weight", (self.width,))],
        }
        for ours, (names, columns, has_bias) in linear.items():
            found[f"{ours}.weight"] = [(f"{name}.weight", (rows, columns)) for name, rows in names]
            if has_bias:
                found[f"{ours}.bias"] = [(f"{name}.bias", (rows,)) for name, rows in names]
        if self.has_head_norms:
            found["queries_norm"] = [(f"{attention}q_norm.weight", (self.head_size,))]
            found["keys_norm"] = [(f"{attention}k_norm.weight", (self.head_size,))]
        return found


def decoder_shape_of(config: Mapping[str, Any]) -> DecoderShape:
    """Return the shape that a ``config.json`` describes. Raises ``Unfit`` for a model that the slots don't compute.

    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    >>> decoder_shape_of({"model_type": "llama", "num_hidden_layers": 1, **sizes}).head_size
    4
    """
    family = str(config.get("model_type"))
    if family not in _POSITIONS:
        raise Unfit(f"its type is {family}")
    if config.get("quantization_config"):
        raise Unfit("its weights are quantized")
    for name, expected in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        if config.get(name) not in (None, expected):
            raise Unfit(f"{name} is {config[name]}")
    try:
        return _shape_of(family, config)
    except (KeyError, TypeError, ValueError) as error:
        raise Unfit(f"its config.json lacks {error}") from error


def _shape_of(family: str, config: Mapping[str, Any]) -> DecoderShape:
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_size = int(config.get("head_dim") or (128 if family == "qwen3" else width // heads))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads or head_size % 2 or head_size > _LARGEST_HEAD:
        raise Unfit(f"it has {heads} heads of {head_size} numbers, and {kv_heads} of keys")
    has_bias = bool(config.get("attention_bias"))
    return DecoderShape(
        family=family,
        vocabulary=int(config["vocab_size"]),
        width=width,
        inside=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        layers=int(config["num_hidden_layers"]),
        epsilon=float(config.get("rms_norm_eps") or 1e-6),
        turning=_turning_of(config),
        positions=int(config.get("max_position_embeddings") or _POSITIONS[family]),
        window=_window_of(family, config),
        is_tied=bool(config.get("tie_word_embeddings")),
        has_joined_bias=family == "qwen2" or has_bias,
        has_out_bias=family != "qwen2" and has_bias,
        has_inside_bias=family == "llama" and bool(config.get("mlp_bias")),
        has_head_norms=family == "qwen3",
    )


def _window_of(family: str, config: Mapping[str, Any]) -> int | None:
    if family == "mistral":
        found = config.get("sliding_window", _NOT_TOLD)
        return 4096 if found is _NOT_TOLD else found
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None


def _turning_of(config: Mapping[str, Any]) -> Turning:
    """Read the angles, which newer files keep in ``rope_parameters``."""
    told: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(told.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = told.get("rope_type") or told.get("type") or "default"
    if told.get("partial_rotary_factor") not in (None, 1.0):
        raise Unfit("only a part of each head is turned")
    if kind == "default":
        return Turning(base)
    if kind == "linear":
        return Turning(base, float(told["factor"]))
    if kind == "llama3":
        low, high = float(told["low_freq_factor"]), float(told["high_freq_factor"])
        return Turning(base, float(told["factor"]), low, high, int(told["original_max_position_embeddings"]))
    raise Unfit(f"its positions are turned by {kind}")
