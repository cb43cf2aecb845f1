"""The arguments that ``Ask`` and ``Answerer`` share, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from typing_extensions import TypedDict

from luminosity.answering.default_models import default_embedder, default_generator
from luminosity.answering.prompt import PromptStyle
from luminosity.answering.retrieval import SearchSettings
from luminosity.errors import HandlerError, InvalidArgument
from luminosity.inference.adapting.adapt import check_handler
from luminosity.io.stores.kinds import address_of

__all__ = ["AskSettings", "Options", "text_of"]

_SMALL_MODEL_SHARED = 0.5  # the default model invents a lot: what it says must be in the row that it cites


class Options(TypedDict, total=False):
    """The keyword arguments of :class:`~luminosity.answering.ask.Ask`, which explains them."""

    embed: Any
    generator: Any
    text_column: str
    columns: Sequence[str]
    id_column: str | None
    filters: Mapping[str, Any] | None
    k: int
    score_threshold: float | None
    quotes: bool
    rows_name: str
    most_bullets: int
    most_follow_ups: int
    context_tokens: int
    least_shared: float
    timeout: float
    api_key_env: str | None


@dataclass(frozen=True)
class AskSettings:
    """The store, the models, and the words and limits of prompts and answers."""

    search: SearchSettings
    style: PromptStyle
    embed: Mapping[str, Any]
    """The embedder of each vector to search by; the name "" is that of the store's only vector."""
    generator: Any
    quotes: bool

    @classmethod
    def of(cls, where: str | os.PathLike[str], collection: str | None, options: Options) -> AskSettings:
        """Return the settings. Raises if an argument is wrong, or if a default model is not installed."""
        given: dict[str, Any] = {**options}
        embed = given.pop("embed", None)
        generator = given.pop("generator", None)
        quotes = bool(given.pop("quotes", False))
        address = address_of(
            where,
            collection,
            timeout=given.pop("timeout", 120.0),
            batch_size=256,
            api_key_env=given.pop("api_key_env", None),
        )
        if generator is None:
            given.setdefault("least_shared", _SMALL_MODEL_SHARED)
        words: dict[str, Any] = {
            name: given.pop(name)
            for name in ("rows_name", "most_bullets", "most_follow_ups", "context_tokens", "least_shared")
            if name in given
        }
        style = PromptStyle(**words)
        given["columns"] = tuple(given.get("columns", ()))
        search = SearchSettings(address, context_tokens=style.context_tokens, **given)
        if embed is None:
            embed = default_embedder()
        named = dict(cast("Mapping[str, Any]", embed)) if isinstance(embed, Mapping) else {"": embed}
        if not named:
            raise InvalidArgument("found embed={}, expected at least one vector to search by")
        generator = default_generator() if generator is None else generator
        for handler in (*named.values(), generator):
            check_handler(handler)
        return cls(search, style, named, generator, quotes)


def text_of(inference: object, handler: Any) -> str:
    """Return what a generator returned as a text. None and an empty text mean that it told nothing."""
    if inference is None:
        return ""
    if not isinstance(inference, str):
        raise HandlerError(
            f"found an answer of type {type(inference).__name__} from {handler}, expected a text",
            fix="use a TextGenerator, HttpModelHandler.chat or another handler that returns texts",
        )
    return inference
