"""Reads the tokenizers of common models without transformers, whose import takes seconds in every process.

transformers does not use ``tokenizer.json`` as it is: it reads ``tokenizer_config.json`` as well, and most of its
classes build the tokenizer anew from the vocabulary. So these modules know what these classes build. If the file has
exactly that, or can be changed to it, the library ``tokenizers`` reads it. In every other case the answer is None, and
transformers is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from luminosity.extras import require
from luminosity.inference.handlers.text.plain.chats import render_chat
from luminosity.inference.handlers.text.plain.decoders import (
    DECODER_TOKENS,
    DECODERS,
    class_of_decoder,
    rebuild_decoder,
    rebuilds_tokenizers,
)
from luminosity.inference.handlers.text.plain.encoders import DEFAULT_TOKENS, GENERAL, class_of_encoder, encoder_rules

__all__ = ["PADDED_POSITIONS", "PlainConfig", "PlainModel", "PlainTokenizer", "read_plain", "rules_of"]

# Token positions of these models start after the padding's.
PADDED_POSITIONS = ("camembert", "longformer", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")

_NO_LIMIT = int(1e30)  # the ``model_max_length`` of transformers for a tokenizer without one

_NAMED_TOKENS = ("bos_token", "eos_token", "sep_token", "cls_token", "unk_token", "pad_token", "mask_token")

# Settings whose effect these modules know; a file with any other needs transformers.
_KNOWN_SETTINGS = {
    *_NAMED_TOKENS,
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "clean_up_tokenization_spaces",
    "do_basic_tokenize",
    "do_lower_case",
    "errors",
    "extra_special_tokens",
    "is_local",
    "local_files_only",
    "max_len",
    "max_length",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "never_split",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "padding_side",
    "special_tokens_map_file",
    "stride",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "tokenizer_file",
    "trim_offsets",
    "truncation_side",
    "truncation_strategy",
}
_OF_DECODERS = {
    "chat_template",
    "legacy",
    "sp_model_kwargs",
    "spaces_between_special_tokens",
    "use_default_system_prompt",
    "vocab_size",
}


class _Files(Protocol):
    """The files of a model."""

    def json(self, name: str) -> Any: ...

    def file(self, name: str) -> str | None: ...


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer of the library ``tokenizers`` with what handlers need of transformers' tokenizers."""

    backend_tokenizer: Any
    model_max_length: int
    bos_token_id: int | None
    cls_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    all_special_ids: list[int]
    special_tokens_map: Mapping[str, str] = field(default_factory=dict[str, str])
    """The special tokens by their names, such as ``bos_token``."""
    chat_template: str | None = None
    is_fast: bool = True

    def get_added_vocab(self) -> dict[str, int]:
        """Return the numbers of the tokens that are not found by splitting words: special ones, and some others."""
        decoder: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in decoder.items()}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of some tokens."""
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, rows: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: Literal[False] | None = None
    ) -> list[str]:
        """Return the text of each row of tokens; ``rows`` are lists or a matrix.

        Spaces before punctuation stay, as in transformers: the tokenizers that write texts are of bytes.
        """
        lists: Any = rows if isinstance(rows, list) else rows.tolist()
        return self.backend_tokenizer.decode_batch(lists, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **arguments: Any):
        """Return the text of a chat that :func:`~luminosity.inference.handlers.text.plain.chats.can_render` allows."""
        return render_chat(self.chat_template or "", messages, self.special_tokens_map, arguments)


@dataclass(frozen=True)
class PlainConfig:
    """The settings of a model that preparing its texts needs, with the names of transformers' configurations."""

    model_type: str
    max_position_embeddings: int
    hidden_size: int | None
    pad_token_id: int | None
    vocab_size: int | None = None

    def get_text_config(self) -> PlainConfig:
        """Return this configuration: these models take nothing but text."""
        return self


@dataclass(frozen=True)
class PlainModel:
    """A model's tokenizer and configuration, read without transformers."""

    tokenizer: PlainTokenizer
    config: PlainConfig


def read_plain(files: _Files) -> PlainModel | None:
    """Return a model's tokenizer and configuration, or None if they need transformers."""
    config, settings = files.json("config.json"), files.json("tokenizer_config.json")
    path = files.file("tokenizer.json")
    if config is None or settings is None or path is None or "auto_map" in settings:
        return None
    settings = {name: value for name, value in settings.items() if value or name != "split_special_tokens"}
    plain_config = _plain_config(config)
    writes = config.get("model_type") in DECODERS
    if files.file("added_tokens.json") is not None and not (writes and "added_tokens_decoder" in settings):
        return None
    if config.get("model_type") == "mistral" and files.file("tekken.json") is not None:
        return None  # another library may read it
    if plain_config is None or not settings.keys() <= _KNOWN_SETTINGS | (_OF_DECODERS if writes else set()):
        return None
    backend = require("tokenizers", "transformers").Tokenizer.from_file(path)
    rules = json.loads(backend.to_str())
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    kind = class_of_decoder(plain_config.model_type, named, rules) if writes else class_of_encoder(config, named)
    if kind is None:
        return None
    if rules["padding"] is not None:  # names the token if nothing else does
        settings = {"pad_token": rules["padding"]["pad_token"], **settings}
    defaults = (DECODER_TOKENS if writes else DEFAULT_TOKENS)[kind]
    names = _named_tokens(defaults, settings, files.json("special_tokens_map.json"), needs_all=not writes)
    if names is None or not _has_tokens(rules, settings, names):
        return None
    template = None
    if writes:
        found = _chat_template(files, settings)
        if found is None or not rebuild_decoder(kind, backend, rules, settings) or _cleans_up(rules, settings):
            return None
        template = found or None
    elif not _is_built_alike(kind, rules, settings, names):
        return None
    limit = settings.get("model_max_length", settings.get("max_len"))
    ids = {name: backend.token_to_id(token) for name, token in names.items()}
    extra = [backend.token_to_id(token) for token in _extra_tokens(settings) or ()]
    tokenizer = PlainTokenizer(
        backend,
        _NO_LIMIT if limit is None else int(limit),
        *(ids.get(name) for name in ("bos_token", "cls_token", "eos_token", "pad_token")),
        all_special_ids=sorted({*ids.values(), *extra}),
        special_tokens_map=names,
        chat_template=template,
    )
    return PlainModel(tokenizer, plain_config)


def rules_of(backend: Any) -> dict[str, Any]:
    """Return everything that a tokenizer does to a text, except padding and truncation, which depend on its use."""
    rules: dict[str, Any] = json.loads(backend.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("decoder", "padding", "truncation")}


def _plain_config(config: Mapping[str, Any]) -> PlainConfig | None:
    """Return the configuration, or None if a value is missing for which transformers has its own default."""
    kind, positions = config.get("model_type", ""), config.get("max_position_embeddings")
    pad, width, words = (config.get(name) for name in ("pad_token_id", "hidden_size", "vocab_size"))
    has_pad = isinstance(pad, int) or kind not in PADDED_POSITIONS
    has_words = isinstance(words, int) or (words is None and kind not in DECODERS)
    if not (isinstance(positions, int) and (width is None or isinstance(width, int)) and has_pad and has_words):
        return None
    return PlainConfig(kind, positions, width, pad, words)


def _content(token: Any) -> str | None:
    """Return the text of a token, or None if it is neither a string nor a saved ``AddedToken``."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _named_tokens(
    defaults: Mapping[str, str], settings: Mapping[str, Any], saved_map: Any, needs_all: bool
) -> dict[str, str] | None:
    """Return the special tokens by name, or None if one of them can't be told."""
    named = {**defaults, **{name: settings[name] for name in _NAMED_TOKENS if name in settings}}
    if "added_tokens_decoder" not in settings:  # only older models use the file
        saved = cast("dict[str, Any]", saved_map or {})
        if not saved.keys() <= set(_NAMED_TOKENS):
            return None
        named |= saved
    found = {name: _content(token) for name, token in named.items() if token is not None}
    if None in found.values() or (needs_all and not found.keys() >= defaults.keys()):
        return None
    return cast("dict[str, str]", found)


def _extra_tokens(settings: Mapping[str, Any]) -> list[str] | None:
    """Return the further special tokens, or None if one of them can't be told."""
    extra: Any = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        return None
    contents = [_content(token) for token in cast("list[Any]", extra)]
    return None if None in contents else cast("list[str]", contents)


def _has_tokens(rules: Mapping[str, Any], settings: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether transformers would add no token to those in the file, and would change none of them."""
    added = {token["id"]: {**token} for token in rules["added_tokens"]}
    for token in added.values():
        del token["id"]
    special = {token["content"] for token in added.values() if token["special"]}
    extra = _extra_tokens(settings)
    if extra is None or not {*names.values(), *extra} <= special:
        return False
    decoder = settings.get("added_tokens_decoder")
    return decoder is None or {int(number): token for number, token in decoder.items()} == added


def _chat_template(files: _Files, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template, "" for a model without one, or None if transformers must choose one."""
    path = files.file("chat_template.jinja")
    if path is not None:
        with open(path, encoding="utf-8") as file:
            return file.read()
    found = settings.get("chat_template") or ""
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in cast("list[Any]", found)}.get("default")
    return found if isinstance(found, str) else None


def _cleans_up(rules: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether transformers may remove spaces from texts that it decodes; newer ones leave those of BPE."""
    asks = bool(settings.get("clean_up_tokenization_spaces"))
    return asks and not (rules["model"].get("type") == "BPE" and rebuilds_tokenizers())


def _is_built_alike(kind: str, rules: Mapping[str, Any], settings: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether the file has the same parts as the tokenizer that this class builds from its vocabulary."""
    if rules["post_processor"] is None:
        return False  # transformers makes one
    if kind == GENERAL:
        return True  # this class uses the file as it is
    vocabulary = rules["model"].get("vocab")
    numbers = vocabulary
    if isinstance(vocabulary, list):
        numbers = {token: number for number, (token, _) in enumerate(cast("list[tuple[str, float]]", vocabulary))}
    if any(numbers.get(token["content"]) != token["id"] for token in rules["added_tokens"]):
        return False
    built = encoder_rules(kind, settings, names, numbers)
    if kind == "XLMRobertaTokenizer" and (rules["normalizer"] or {}).get("type") == "Precompiled":
        built["normalizer"] = rules["normalizer"]  # this class takes it from the file, and no other
    parts = ("normalizer", "post_processor", "pre_tokenizer")
    return _without_vocabulary(built["model"]) == _without_vocabulary(rules["model"]) and all(
        built[part] == rules[part] for part in parts
    )


def _without_vocabulary(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in ("merges", "vocab")}
