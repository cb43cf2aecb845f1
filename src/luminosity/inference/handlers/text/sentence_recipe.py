"""How a sentence-transformers model turns its tokens' vectors into one, as its own files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["SentenceRecipe", "check_modes", "dense_width", "load_dense", "pool_tokens"]


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


def pool_tokens(vectors: Any, mask: Any, modes: Sequence[str]) -> Any:
    """Return one float32 vector per text; the vectors of several modes are concatenated.

    ``vectors`` has the shape (texts, tokens, features). ``mask`` is true for the tokens that count; each text has one
    at least.
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
        # 16 bits can't hold sums of positions, which are large.
        return (vectors.float() * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    total = (vectors * mask.unsqueeze(-1)).sum(dim=1, dtype=torch.float32)
    count = weights.sum(dim=1, keepdim=True).clamp(min=1)
    return total / (count if mode == "mean" else count.sqrt())


def _at(vectors: Any, places: Any) -> Any:
    """Return each text's vector at its place."""
    texts = require("torch", "torch").arange(len(vectors), device=vectors.device)
    return vectors[texts, places].float()


def dense_width(pretrained: Pretrained, folder: str) -> int:
    """Return the length of the vectors that the Dense step in this folder returns."""
    return _config(pretrained, folder)["out_features"]


def load_dense(pretrained: Pretrained, folder: str) -> Any:
    """Return the Dense step in this folder as a torch module, on the CPU."""
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
        raise InvalidArgument(
            f"found a Dense step in {folder} of {pretrained.path!r} that is residual or does not take the embedding, "
            "which is not supported"
        )
    return config


def _weights(pretrained: Pretrained, folder: str) -> dict[str, Any]:
    path = pretrained.file(f"{folder}/model.safetensors")
    if path is not None:
        return require("safetensors.torch", "transformers").load_file(path)
    path = pretrained.file(f"{folder}/pytorch_model.bin")
    return require("torch", "torch").load(path, map_location="cpu", weights_only=True)


def _activation(name: str) -> Any:
    """Return the torch module of this name. A model's file can't make any other code run."""
    torch = require("torch", "torch")
    module, _, kind = name.rpartition(".")
    found = getattr(require(module, "torch"), kind, None) if module.startswith("torch.nn") else None
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise InvalidArgument(f"found a Dense step with the activation {name!r}, expected a module of torch.nn")
    return found()
