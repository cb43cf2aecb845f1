"""The steps of a sentence-transformers model, as its files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["POOLING_MODES", "SentenceRecipe", "check_modes"]

# In the order in which a model with several modes concatenates them.
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@dataclass(frozen=True)
class SentenceRecipe:
    """The steps of a sentence-transformers model. The defaults are for a model without its files: mean pooling only."""

    folder: str = ""
    """The folder of the transformer, relative to the model's folder."""
    pooling: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True
    steps: tuple[tuple[str, str], ...] = ()
    """The steps after pooling in order: kind ("Dense" or "Normalize") and folder."""
    max_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None

    @classmethod
    def read(cls, pretrained: Pretrained) -> SentenceRecipe:
        """Read the recipe from the files of a model."""
        modules = pretrained.json("modules.json")
        if modules is None:
            return cls()
        kinds = [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
        if [kind for kind, _ in kinds[:2]] != ["Transformer", "Pooling"]:
            raise _unknown(pretrained, " and ".join(kind for kind, _ in kinds[:2]), "Transformer and Pooling first")
        for kind, _ in kinds[2:]:
            if kind not in ("Dense", "Normalize"):
                raise _unknown(pretrained, kind, "Dense or Normalize after pooling")
        folder = kinds[0][1]
        transformer = pretrained.json(_inside(folder, "sentence_bert_config.json")) or {}
        pooling = pretrained.json(_inside(kinds[1][1], "config.json")) or {}
        prompts = pretrained.json("config_sentence_transformers.json") or {}
        return cls(
            folder,
            _modes(pooling),
            pooling.get("include_prompt", True),
            tuple(kinds[2:]),
            transformer.get("max_seq_length"),
            transformer.get("do_lower_case", False),
            {name: text for name, text in (prompts.get("prompts") or {}).items() if text is not None},
            prompts.get("default_prompt_name"),
        )

    def prompt(self, text: str | None, name: str | None) -> str:
        """Return the text to put before each example: ``text``, the model's prompt of this name, or its default."""
        if text is not None:
            return text
        if name is not None and name not in self.prompts:
            known = ", ".join(map(repr, sorted(self.prompts))) or "none, it has no prompts"
            raise InvalidArgument(f"found prompt_name={name!r}, expected one of the model's prompts: {known}")
        return self.prompts.get(name or self.default_prompt or "", "")


def _modes(pooling: dict[str, Any]) -> tuple[str, ...]:
    modes = pooling.get("pooling_mode")
    if modes is None:
        return tuple(mode for name, mode in _OLD_NAMES.items() if pooling.get(name)) or ("mean",)
    return (modes,) if isinstance(modes, str) else tuple(modes)


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _unknown(pretrained: Pretrained, found: str, expected: str) -> InvalidArgument:
    return InvalidArgument(f"the sentence-transformers model {pretrained.path!r} has {found}, expected {expected}")


def check_modes(modes: Sequence[str]) -> None:
    """Raise if a pooling mode is unknown.

    >>> check_modes(["average"])
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found pooling='average', expected some of cls, max, mean, ...
    """
    for mode in modes:
        if mode not in POOLING_MODES:
            raise InvalidArgument(f"found pooling={mode!r}, expected some of {', '.join(POOLING_MODES)}")
