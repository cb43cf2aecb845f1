"""How a sentence-transformers model makes an embedding of its tokens' vectors, as its own files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from luminosity.extras import require
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["POOLING_MODES", "SentenceRecipe", "check_modes", "dense_width", "load_dense", "pool"]


# In the order in which a model of several concatenates them.
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


def check_modes(modes: Sequence[str]) -> None:
    """
    >>> check_modes(["average"])
    Traceback (most recent call last):
    ValueError: pooling is 'average', expected some of cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken
    """
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ValueError(f"pooling is {mode!r}, expected some of {', '.join(POOLING_MODES)}")


def pool(vectors: Any, mask: Any, modes: Sequence[str]) -> Any:
    """One float32 vector per text, those of several modes side by side.

    `vectors` are texts by tokens by features; `mask` is true for the tokens that count, of which each text has one.
    """
    torch = require("torch", "torch")
    return torch.cat([_pooled(vectors, mask, mode) for mode in modes], dim=-1)


def _pooled(vectors: Any, mask: Any, mode: str) -> Any:
    torch = require("torch", "torch")
    if mode == "cls":
        return _at(vectors, mask.int().argmax(dim=1))
    if mode == "lasttoken":
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
        return _at(vectors, last)
    if mode == "max":
        return vectors.masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(dim=1).float()
    weights = mask.float()
    if mode == "weightedmean":
        weights = weights * torch.arange(1, mask.shape[1] + 1, device=mask.device)
        # Positions are large numbers, which 16 bits can't hold.
        return (vectors.float() * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    total = (vectors * mask.unsqueeze(-1)).sum(dim=1, dtype=torch.float32)
    count = weights.sum(dim=1, keepdim=True).clamp(min=1)
    return total / (count if mode == "mean" else count.sqrt())


def _at(vectors: Any, places: Any) -> Any:
    """Each text's vector at its place."""
    texts = require("torch", "torch").arange(len(vectors), device=vectors.device)
    return vectors[texts, places].float()


def dense_width(pretrained: Pretrained, folder: str) -> int:
    """The length of what the step in this folder makes."""
    return _config(pretrained, folder)["out_features"]


def load_dense(pretrained: Pretrained, folder: str) -> Any:
    """The step in this folder as a torch module, on the CPU."""
    torch = require("torch", "torch")
    config = _config(pretrained, folder)
    linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    linear.load_state_dict(
        {name.removeprefix("linear."): value for name, value in _weights(pretrained, folder).items()}
    )
    return torch.nn.Sequential(linear, _activation(config.get("activation_function", "torch.nn.Tanh")))


def _config(pretrained: Pretrained, folder: str) -> dict[str, Any]:
    config = pretrained.json(f"{folder}/config.json")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ValueError(
            f"{pretrained.path!r} has in {folder} a Dense step that is residual, or not over the embedding"
        )
    return config


def _weights(pretrained: Pretrained, folder: str) -> dict[str, Any]:
    path = pretrained.file(f"{folder}/model.safetensors")
    if path is not None:
        return require("safetensors.torch", "transformers").load_file(path)
    path = pretrained.file(f"{folder}/pytorch_model.bin")
    return require("torch", "torch").load(path, map_location="cpu", weights_only=True)


def _activation(name: str) -> Any:
    """The torch module of this name; nothing else is run because a model's file says so."""
    torch = require("torch", "torch")
    module, _, kind = name.rpartition(".")
    found = getattr(require(module, "torch"), kind, None) if module.startswith("torch.nn") else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ValueError(f"a Dense step has the activation {name!r}, expected a module of torch.nn")
    return found()
