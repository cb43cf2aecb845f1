"""A torch module from its class and weights, or from one file that holds both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from luminosity.extras import require
from luminosity.inference.files.local import local_copy

__all__ = ["ModuleFiles"]


@dataclass(frozen=True)
class ModuleFiles:
    """Where a module comes from; `load` makes it."""

    state_dict_path: str | None = None
    model_class: Callable[..., Any] | None = None
    model_params: dict[str, Any] = field(default_factory=dict[str, Any])
    torch_script_model_path: str | None = None
    exported_model_path: str | None = None
    load_model_args: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        given = [name for name in ("model_class", "torch_script_model_path", "exported_model_path") if self._has(name)]
        if len(given) != 1:
            raise ValueError(
                f"a torch model comes from one of model_class, torch_script_model_path and exported_model_path; "
                f"found {' and '.join(given) or 'none of them'}"
            )
        if given != ["model_class"] and (self.state_dict_path or self.model_params):
            raise ValueError(f"{given[0]} holds the weights, too: state_dict_path and model_params go with model_class")

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def path(self) -> str | None:
        """The file that changes when the model does."""
        return self.torch_script_model_path or self.exported_model_path or self.state_dict_path

    def at(self, path: str) -> ModuleFiles:
        """The same model, from another file."""
        if self.torch_script_model_path:
            return replace(self, torch_script_model_path=path)
        if self.exported_model_path:
            return replace(self, exported_model_path=path)
        return replace(self, state_dict_path=path)

    def load(self, device: Any) -> Any:
        """The module on its device, ready to predict."""
        torch = require("torch", "torch")
        if self.exported_model_path:
            # A graph with its weights; it has no mode to switch.
            return torch.export.load(local_copy(self.exported_model_path), **self.load_model_args).module().to(device)
        if self.torch_script_model_path:
            path = local_copy(self.torch_script_model_path)
            return torch.jit.load(path, map_location=device, **self.load_model_args).eval()
        assert self.model_class is not None
        module = self.model_class(**self.model_params)
        if self.state_dict_path:
            module.load_state_dict(self._weights(local_copy(self.state_dict_path)))
        return module.to(device).eval().requires_grad_(False)

    def _weights(self, path: str) -> dict[str, Any]:
        if path.endswith(".safetensors"):
            return require("safetensors.torch", "torch").load_file(path, **self.load_model_args)
        # A pickle could run code: only tensors are read, unless the user's own arguments say otherwise.
        arguments = {"map_location": "cpu", "weights_only": True, **self.load_model_args}
        return require("torch", "torch").load(path, **arguments)
