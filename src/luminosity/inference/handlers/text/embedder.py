"""``SentenceEmbedder``: texts to vectors, as the files of a sentence-transformers model say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
from typing_extensions import Self, Unpack

from luminosity.errors import InvalidArgument, MissingExtra
from luminosity.extras import check, require
from luminosity.inference.blocks import Block
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch, Outputs
from luminosity.inference.handlers.text.packed.packing import PackedEmbedder, Packing, check_int8, int8_packing_of
from luminosity.inference.handlers.text.pretrained import Pretrained, token_limit
from luminosity.inference.handlers.text.sentence_recipe import SentenceRecipe, check_modes
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.handlers.text.tokens import Tokenizer

__all__ = ["SentenceEmbedder"]


class SentenceEmbedder(TextHandler[str]):
    """Turns texts into vectors, with a model of sentence-transformers or any encoder of transformers.

    ::

        texts | RunInference(SentenceEmbedder("sentence-transformers/all-MiniLM-L6-v2"))

    Pooling, normalisation, prompts, lower case and the maximum length are read from the model's own files, and the
    vectors are those of ``SentenceTransformer.encode``; sentence-transformers itself is not needed. A prediction is a
    float32 numpy array, whatever the model's dtype.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        pooling: one mode or several, which are concatenated. The default is the model's own, or "mean".
        normalize: whether vectors have length 1. The default is the model's own, or False.
        prompt: a text to put before each example.
        prompt_name: the name of one of the model's own prompts, instead of ``prompt``.
        max_length: the number of tokens at which texts are cut. The default is the model's own.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: run the model in transformers, compiled by torch, and pad texts to few different lengths. Without it,
            known families run packed: on a GPU with kernels of their own, which are faster.
        precision: "int8" computes on the CPU in 8 bits, with ONNX Runtime: faster, and vectors differ a little.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    may_be_packed = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        precision: str | None = None,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        if precision is not None:
            device = _device_in_8_bits(precision, device, dtype, compile)
        super().__init__(path, max_length, device, dtype, compile, load_model_args, **options)
        self._precision = precision
        if prompt is not None and prompt_name is not None:
            raise InvalidArgument("found prompt= and prompt_name=, expected one of them")
        self._pooling = (pooling,) if isinstance(pooling, str) else None if pooling is None else tuple(pooling)
        check_modes(self._pooling or ())
        self._normalize = normalize
        self._prompt = prompt
        self._prompt_name = prompt_name

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A list of ``dimension`` float32 numbers."""
        return pa.list_(pa.float32(), self.dimension)

    @cached_property
    def dimension(self) -> int:
        """The length of a vector, as the model's files say."""
        widths = [dense_width(self._pretrained, folder) for kind, folder in self.recipe.steps if kind == "Dense"]
        if widths:
            return widths[-1]
        width = None if self.plain is None else self.plain.config.hidden_size
        return (width or self.config.get_text_config().hidden_size) * len(self.recipe.pooling)

    @cached_property
    def recipe(self) -> SentenceRecipe:
        """The steps after the encoder, from the model's files and the handler's arguments."""
        recipe = SentenceRecipe.read(self._pretrained)
        if self._pooling is not None:
            recipe = replace(recipe, pooling=self._pooling)
        if self._normalize is not None:
            others = tuple(step for step in recipe.steps if step[0] != "Normalize")
            recipe = replace(recipe, steps=(*others, ("Normalize", "")) if self._normalize else others)
        check_modes(recipe.pooling)
        return recipe

    @property
    def source(self) -> Pretrained:
        """The location of the encoder and its tokenizer, which may be in a subfolder of the model."""
        folder = {"subfolder": self.recipe.folder} if self.recipe.folder else {}
        return replace(self._pretrained, arguments={**self._pretrained.arguments, **folder})

    def limit_of(self, tokenizer: Any, config: Any) -> int | None:
        """Return the number of tokens at which texts are cut: ``max_length``, or the model's own limit."""
        return token_limit(self._max_length or self.recipe.max_length, tokenizer, config)

    def _tokenizer_of(self, whole: Any, config: Any) -> Tokenizer:
        tokenizer = super()._tokenizer_of(whole, config)
        if self.recipe.lower_case:
            tokenizer.lower_case()
        return tokenizer

    @cached_property
    def prompt(self) -> str:
        """The text that is put before each example."""
        return self.recipe.prompt(self._prompt, self._prompt_name)

    @cached_property
    def _prompt_tokens(self) -> int:
        """The number of tokens at each text's start that pooling leaves out: the prompt's, if the model excludes it."""
        if self.recipe.includes_prompt or not self.prompt:
            return 0
        ids = self.tokenizer.ids([self.prompt])[0].as_py()
        return len(ids) - (ids[-1] in self.tokenizer.whole.all_special_ids)

    def _is_packable(self) -> bool:
        if any(getattr(type(self), name) is not getattr(SentenceEmbedder, name) for name in _REPLACED_BY_PACKING):
            return False  # a subclass expects that its own method is called
        return self.recipe.includes_prompt or not self.prompt  # otherwise pooling leaves out some tokens

    @cached_property
    def packing(self) -> Packing | None:
        """How the model runs packed in this process; None if it runs with transformers."""
        if self._precision is None:
            return super().packing
        self._check_int8()
        return int8_packing_of(self.source)

    def check_files(self) -> None:
        """Raise if the model can't be found, or can't run in the precision that was asked for."""
        super().check_files()
        if self._precision is not None and os.path.isdir(self._pretrained.path):
            self._check_int8()

    def _check_int8(self) -> None:
        for module in ("onnxruntime", "onnx"):
            check(module, "onnx")
        if not self.packs_rows or self.source.path.endswith(".gguf") or not self._is_packable():
            raise InvalidArgument(
                f"found precision='int8' for {self.model_id!r} with packs_rows=False, a file of GGUF, a prompt that "
                "pooling leaves out, or methods of a subclass that load or call the model; expected none of these",
                fix="leave out precision",
            )
        check_int8(self.source)

    @property
    def takes_int8(self) -> bool:
        """Whether the model could run with ``precision="int8"``, and what that needs is installed."""
        try:
            self._check_int8()
        except (InvalidArgument, MissingExtra):
            return False
        return not self._compile

    def adjusted(self, device: str | None = None, dtype: str | None = None, way: str | None = None) -> Self:
        """Return a copy for another device, with another dtype or "int8", or run in another way; None changes none."""
        is_int8 = dtype == "int8" or (dtype is None and self._precision is not None)
        other = super().adjusted(device, None if is_int8 else dtype, way)
        other._precision = "int8" if is_int8 else None
        if is_int8:
            other._requested_device = _device_in_8_bits("int8", other._requested_device, None, self._compile)
            other._dtype_name = None
        return other

    def load_model(self) -> Any:
        """Return the encoder and the Dense steps."""
        if self.packing is None:
            return self._load_whole()
        self.choose_attention()
        steps = self.recipe.steps
        dense = self._load_dense()
        model = PackedEmbedder(self.packing, self.recipe.pooling, dense, partial(_finished, steps, dense))
        if self.packing.is_free and model.encoder.pads:  # our kernels fail for this model
            vars(self)["packing"] = replace(self.packing, is_free=False)
        return model

    def _load_whole(self) -> Any:
        encoder = self.load("AutoModel", optional=("pooler.",))
        return require("torch", "torch").nn.ModuleList([self.compiled(encoder), *self._load_dense()])

    def _load_dense(self) -> list[Any]:
        dense = [load_dense(self._pretrained, folder) for kind, folder in self.recipe.steps if kind == "Dense"]
        return [step.to(self.device).requires_grad_(False) for step in dense]

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Encode the batch, pool the vectors of its tokens, and apply the Dense and Normalize steps."""
        torch = require("torch", "torch")
        is_packed = "starts" in batch.inputs
        if is_packed and isinstance(model, PackedEmbedder) and not inference_args:
            return model(batch.inputs, batch.host_data)
        if self._precision is not None:
            raise InvalidArgument(
                f"found inference_args {', '.join(sorted(inference_args))}, expected none with precision='int8'",
                fix="leave out inference_args or precision",
            )
        model = self.whole if isinstance(model, PackedEmbedder) else model
        batch = self.padded(batch) if is_packed else batch
        encoder, *dense = model
        vectors = self.call(encoder, batch, inference_args)[0]
        mask = batch.inputs.get("attention_mask")
        mask = torch.ones_like(batch.inputs["input_ids"], dtype=torch.bool) if mask is None else mask
        if self._prompt_tokens:
            mask = mask & (torch.arange(mask.shape[1], device=mask.device) >= self._prompt_tokens)
        return _finished(self.recipe.steps, dense, pool_tokens(vectors, mask, self.recipe.pooling))

    def collect(self, outputs: Outputs) -> Block:
        """Return the embeddings as a numpy matrix, a row for each text."""
        return outputs.values.numpy(force=True)


def _device_in_8_bits(precision: str, device: str, dtype: Any, compile: bool) -> str:
    """Return the device for this precision. Raises if it can't be had with the other arguments."""
    if precision != "int8":
        raise InvalidArgument(f"found precision={precision!r}, expected 'int8' or None")
    found = {"dtype": dtype, "compile": compile or None}
    if device.lower() not in ("auto", "cpu"):
        found = {"device": device, **found}
    for name, value in found.items():
        if value is not None:
            raise InvalidArgument(
                f"found precision='int8' with {name}={value!r}, expected the CPU, no dtype and no compile=True",
                fix=f"leave out {name} or precision",
            )
    return "CPU"


_REPLACED_BY_PACKING = ("_load_whole", "call", "collate", "compiled", "load", "load_model", "padded")
_LEAST_LENGTH = 1e-12  # as torch's own normalize


def _finished(steps: Sequence[tuple[str, str]], dense: Sequence[Any], embeddings: Any) -> Any:
    """Return embeddings after the Dense and Normalize steps."""
    left = iter(dense)
    for kind, _ in steps:
        if kind == "Dense":
            embeddings = next(left)(embeddings)
        else:
            embeddings = embeddings / embeddings.norm(dim=-1, keepdim=True).clamp(min=_LEAST_LENGTH)
    return embeddings


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
