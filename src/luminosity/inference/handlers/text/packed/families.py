"""Tells which models the packed encoder computes, by their ``config.json``, and what their weights are named.

A model is computed as transformers computes it, or not at all: whatever this module does not know is left to
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MPNET_DISTANCES", "Names", "Shape", "Unfit", "shape_of"]


class Unfit(Exception):
    """The packed encoder does not compute this model; the message says why."""


@dataclass(frozen=True)
class Names:
    """What the tensors of a family are named in its files, without ``.weight`` and ``.bias``."""

    prefix: str
    """Stands before each name in the files of models with a head."""
    words: str
    norm: str
    layer: str
    """Stands before the names in a layer, with its number."""
    parts: Mapping[str, tuple[str, ...]]
    """The names in a layer; several are joined into one."""
    positions: str = ""
    types: str = ""
    last_norm: str = ""
    distances: str = ""
    """The embedding of the distance between two tokens, which attention adds."""
    has_bias: bool = True


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder, and what its layers do."""

    family: str
    names: Names
    vocabulary: int
    width: int
    inside: int
    heads: int
    layers: int
    epsilon: float
    positions: int
    """The number of learned positions; 0 for rotated ones."""
    types: int = 0
    padding: int | None = None
    """The token that has no position of its own; positions of the others begin after its number."""
    windows: tuple[int | None, ...] = ()
    """For each layer with rotated positions, how far away the tokens are that a token attends to; None for all."""
    bases: tuple[float, ...] = ()
    """For each layer with rotated positions, the base of the angles."""

    @property
    def is_rotary(self) -> bool:
        """Whether the layers rotate queries and keys, normalise first, and have gates: those of ModernBERT."""
        return bool(self.bases)

    @property
    def head_size(self) -> int:
        """The numbers of a token in one head of attention."""
        return self.width // self.heads


_BERT = Names(
    prefix="bert.",
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    parts={
        "joined": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "out": ("attention.output.dense",),
        "norm": ("attention.output.LayerNorm",),
        "up": ("intermediate.dense",),
        "down": ("output.dense",),
        "last": ("output.LayerNorm",),
    },
)
_ROBERTA = Names("roberta.", _BERT.words, _BERT.norm, _BERT.layer, _BERT.parts, _BERT.positions, _BERT.types)
_DISTILBERT = Names(
    prefix="distilbert.",
    words=_BERT.words,
    positions=_BERT.positions,
    norm=_BERT.norm,
    layer="transformer.layer.{}.",
    parts={
        "joined": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "out": ("attention.out_lin",),
        "norm": ("sa_layer_norm",),
        "up": ("ffn.lin1",),
        "down": ("ffn.lin2",),
        "last": ("output_layer_norm",),
    },
)
_MPNET = Names(
    prefix="mpnet.",
    words=_BERT.words,
    positions=_BERT.positions,
    norm=_BERT.norm,
    layer=_BERT.layer,
    distances="encoder.relative_attention_bias",
    parts={
        **_BERT.parts,
        "joined": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "out": ("attention.attn.o",),
        "norm": ("attention.LayerNorm",),
    },
)
_MODERNBERT = Names(
    prefix="model.",
    words="embeddings.tok_embeddings",
    norm="embeddings.norm",
    layer="layers.{}.",
    parts={
        "norm": ("attn_norm",),
        "joined": ("attn.Wqkv",),
        "out": ("attn.Wo",),
        "last": ("mlp_norm",),
        "up": ("mlp.Wi",),
        "down": ("mlp.Wo",),
    },
    last_norm="final_norm",
    has_bias=False,
)
_FAMILIES = {
    "bert": _BERT,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "mpnet": _MPNET,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
_MPNET_PADDING = 1  # whatever the configuration says
MPNET_DISTANCES = 32

# Settings that change nothing about the vectors of a trained encoder: names, training, heads, the tokenizer.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "attention_probs_dropout_prob", "bos_token_id",
    "classifier_activation", "classifier_bias", "classifier_dropout", "classifier_pooling", "cls_token_id",
    "decoder_bias", "deterministic_flash_attn", "directionality", "dropout", "dtype", "embedding_dropout",
    "eos_token_id", "finetuning_task", "gradient_checkpointing", "hidden_dropout_prob", "id2label",
    "initializer_cutoff_factor", "initializer_range", "label2id", "mask_token_id", "mlp_dropout", "model_max_length",
    "model_type", "num_labels", "output_past", "pad_token_id", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "position_ids", "problem_type", "qa_dropout",
    "reference_compile", "repad_logits_with_grad", "seq_classif_dropout", "sep_token_id", "sinusoidal_pos_embds",
    "sparse_pred_ignore_index", "sparse_prediction", "tie_word_embeddings", "tokenizer_class",
    "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip
_NAMES_OF_SIZES = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "dim"),
    "inside": ("intermediate_size", "hidden_dim"),
    "heads": ("num_attention_heads", "n_heads"),
    "layers": ("num_hidden_layers", "n_layers"),
    "positions": ("max_position_embeddings",),
}
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "activation": ("gelu",),
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "chunk_size_feed_forward": (0,),
    "hidden_act": ("gelu",),
    "hidden_activation": ("gelu",),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "norm_bias": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "position_embedding_type": ("absolute", "sans_pos"),
    "pruned_heads": ({},),
    "relative_attention_num_buckets": (MPNET_DISTANCES,),
    "return_dict": (True,),
    "torchscript": (False,),
    "use_bfloat16": (False,),
}
_NUMBERS = {
    "global_attn_every_n_layers", "global_rope_theta", "layer_norm_eps", "layer_types", "local_attention",
    "local_rope_theta", "norm_eps", "rope_parameters", "type_vocab_size",
}  # fmt: skip
_SIZES = {name for names in _NAMES_OF_SIZES.values() for name in names}


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a model's ``config.json`` describes. Raises ``Unfit`` if it has anything unknown.

    >>> shape_of({"model_type": "gpt2"})
    Traceback (most recent call last):
    luminosity.inference.handlers.text.packed.families.Unfit: models of the type 'gpt2' are not packed
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise Unfit(f"models of the type {family!r} are not packed")
    for name, value in config.items():
        if name in _ALLOWED:
            if value not in _ALLOWED[name]:
                raise Unfit(f"{name} is {value!r}")
        elif name not in _WITHOUT_EFFECT and name not in _NUMBERS and name not in _SIZES:
            raise Unfit(f"the setting {name!r} of config.json is not known")
    # sans_pos is what files of ModernBERT say: their positions are rotated. Those of other families would have none.
    if config.get("position_embedding_type", "absolute") != "absolute" and family != "modernbert":
        raise Unfit(f"position_embedding_type is {config['position_embedding_type']!r}")
    sizes = {name: _whole(config, *names) for name, names in _NAMES_OF_SIZES.items()}
    if sizes["width"] % sizes["heads"]:
        raise Unfit(f"{sizes['heads']} heads do not divide {sizes['width']}")
    names = _FAMILIES[family]
    if family == "modernbert":
        return _rotary(config, names, sizes)
    is_distilled = family == "distilbert"
    return Shape(
        family,
        names,
        vocabulary=sizes["vocabulary"],
        width=sizes["width"],
        inside=sizes["inside"],
        heads=sizes["heads"],
        layers=sizes["layers"],
        positions=sizes["positions"],
        epsilon=1e-12 if is_distilled else _number(config, "layer_norm_eps"),
        types=_whole(config, "type_vocab_size") if names.types else 0,
        padding=_MPNET_PADDING if family == "mpnet" else _whole(config, "pad_token_id") if names is _ROBERTA else None,
    )


def _rotary(config: Mapping[str, Any], names: Names, sizes: Mapping[str, int]) -> Shape:
    layers, every = sizes["layers"], config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [
        "sliding_attention" if number % every else "full_attention" for number in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise Unfit(f"layer_types is {kinds!r}")
    given = config.get("rope_parameters") or {}
    defaults = {
        "full_attention": config.get("global_rope_theta", 160_000.0),
        "sliding_attention": config.get("local_rope_theta", 10_000.0),
    }
    bases: dict[str, float] = {}
    for kind, default in defaults.items():
        rotation = given.get(kind) or {}
        if rotation.get("rope_type", "default") != "default" or not rotation.keys() <= {"rope_type", "rope_theta"}:
            raise Unfit(f"rope_parameters is {given!r}")
        bases[kind] = float(rotation.get("rope_theta", default))
    if not given.keys() <= defaults.keys():
        raise Unfit(f"rope_parameters is {given!r}")
    near = _whole(config, "local_attention") // 2
    return Shape(
        "modernbert",
        names,
        vocabulary=sizes["vocabulary"],
        width=sizes["width"],
        inside=sizes["inside"],
        heads=sizes["heads"],
        layers=layers,
        positions=0,
        epsilon=_number(config, "norm_eps"),
        windows=tuple(near if kind == "sliding_attention" else None for kind in kinds),
        bases=tuple(bases[kind] for kind in kinds),
    )


def _whole(config: Mapping[str, Any], *names: str) -> int:
    """Return the number that has one of these names; transformers may have another default than this module."""
    found = next((config[name] for name in names if name in config), None)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise Unfit(f"{names[0]} is {found!r}")
    return found


def _number(config: Mapping[str, Any], name: str) -> float:
    found = config.get(name)
    if not isinstance(found, int | float):
        raise Unfit(f"{name} is {found!r}")
    return float(found)
