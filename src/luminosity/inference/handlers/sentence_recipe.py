"""How a sentence-transformers model makes an embedding of its tokens' vectors, as its own files say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from luminosity.inference.handlers.pretrained import Pretrained

__all__ = ["SentenceRecipe"]

# In the order in which a model of several concatenates them.
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class SentenceRecipe:
    """The defaults are for a model that has no such files: mean pooling, nothing else."""

    folder: str = ""
    """Where the transformer lies, below the model's folder."""
    pooling: tuple[str, ...] = ("mean",)
    includes_prompt: bool = True
    steps: tuple[tuple[str, str], ...] = ()
    """What follows pooling, in order: kind ("Dense" or "Normalize") and folder."""
    max_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None

    @classmethod
    def read(cls, pretrained: Pretrained) -> SentenceRecipe:
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
        """What stands before each text."""
        if text is not None:
            return text
        if name is not None and name not in self.prompts:
            known = ", ".join(map(repr, sorted(self.prompts))) or "none"
            raise ValueError(f"prompt_name is {name!r}, and the prompts that this model knows are: {known}")
        return self.prompts.get(name or self.default_prompt or "", "")


def _modes(pooling: dict[str, Any]) -> tuple[str, ...]:
    modes = pooling.get("pooling_mode")
    if modes is None:
        return tuple(mode for name, mode in _OLD_NAMES.items() if pooling.get(name)) or ("mean",)
    return (modes,) if isinstance(modes, str) else tuple(modes)


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _unknown(pretrained: Pretrained, found: str, expected: str) -> ValueError:
    return ValueError(f"the sentence-transformers model {pretrained.path!r} has {found}, expected {expected}")
