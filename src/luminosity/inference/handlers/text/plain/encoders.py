"""The tokenizers that transformers builds for common encoders from their vocabularies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from luminosity.extras import require

__all__ = ["DEFAULT_TOKENS", "GENERAL", "class_of_encoder", "encoder_rules"]

GENERAL = "TokenizersBackend"
"""The class that uses ``tokenizer.json`` as it is."""

# The classes that AutoTokenizer chooses if a model's files name no ``tokenizer_class``. If they name one, that one is
# built instead; but ModernBERT always has the general class.
_CLASS_OF_MODEL = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "modernbert": GENERAL,
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
_BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
DEFAULT_TOKENS: Mapping[str, Mapping[str, str]] = {
    "BertTokenizer": _BERT_TOKENS,
    "DistilBertTokenizer": _BERT_TOKENS,
    "MPNetTokenizer": {**_ROBERTA_TOKENS, "unk_token": "[UNK]"},
    "RobertaTokenizer": _ROBERTA_TOKENS,
    "XLMRobertaTokenizer": _ROBERTA_TOKENS,
    GENERAL: {},
}
"""The special tokens of each class if the files name no others."""


def class_of_encoder(config: Mapping[str, Any], named: str | None) -> str | None:
    """Return the class that AutoTokenizer builds for an encoder, or None if this module does not know it.

    ``named``: the class that the model's files name.
    """
    by_model = _CLASS_OF_MODEL.get(config.get("model_type", ""))
    if by_model is None or named is None or by_model == GENERAL:
        return by_model
    if named in ("PreTrainedTokenizerFast", GENERAL):
        return GENERAL
    name = named.removesuffix("Fast")
    return name if name in DEFAULT_TOKENS else None


def encoder_rules(
    kind: str, settings: Mapping[str, Any], names: Mapping[str, str], numbers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the rules of the tokenizer that a class of transformers builds, with a vocabulary of little."""
    library = require("tokenizers", "transformers")
    cls, sep = ((names[name], numbers[names[name]]) for name in ("cls_token", "sep_token"))
    model: Any
    if kind in ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer"):
        unknown = names["unk_token"]
        built = library.Tokenizer(library.models.WordPiece({unknown: 0}, unk_token=unknown))
        built.normalizer = library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            strip_accents=settings.get("strip_accents"),
            lowercase=settings.get("do_lower_case", True),
        )
        built.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        if kind == "MPNetTokenizer":
            built.post_processor = library.processors.RobertaProcessing(sep, cls, True, False)
        else:
            built.post_processor = library.processors.TemplateProcessing(
                single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
                pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
                special_tokens=[cls, sep],
            )
    elif kind == "RobertaTokenizer":
        has_space, trims = settings.get("add_prefix_space", False), settings.get("trim_offsets", True)
        model = library.models.BPE(
            vocab={}, merges=[], dropout=None, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
        built = library.Tokenizer(model)
        built.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=has_space)
        built.post_processor = library.processors.RobertaProcessing(sep, cls, trims, has_space)
    else:
        begin, end = ((names[name], numbers[names[name]]) for name in ("bos_token", "eos_token"))
        space = "always" if settings.get("add_prefix_space", True) else "never"
        # The model needs a vocabulary in which its unknown token has a place.
        model = library.models.Unigram([(str(number), 0.0) for number in range(4)], unk_id=3, byte_fallback=False)
        built = library.Tokenizer(model)
        built.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.WhitespaceSplit(),
                library.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=space),
            ]
        )
        built.post_processor = library.processors.TemplateProcessing(
            single=[begin[0], "$A", end[0]],
            pair=[begin[0], "$A", end[0], end[0], "$B", end[0]],
            special_tokens=[begin, end],
        )
    return json.loads(built.to_str())
