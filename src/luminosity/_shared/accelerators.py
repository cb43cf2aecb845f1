"""The accelerators that a model can use, found from its handler without loading the model.

The result is an annotation of the step that runs the model. The engine reads the annotation and gives the step a device
if the machine has one. All handlers of Beam's are known here by their module and attributes: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "GPU",
    "accelerators_of",
    "accelerators_of_device",
    "parse_accelerator",
    "read_accelerators",
    "write_accelerators",
]

GPU = ("gpu",)

_NONE = "none"
_UNKNOWN = "unknown"
_BEAM = "apache_beam.ml.inference."
_EMBEDDINGS = "apache_beam.ml.transforms.embeddings."
# Handlers that have no argument for a device: they use a GPU if their process sees one, or can't run without one.
_ALWAYS_GPU = frozenset([f"{_BEAM}{name}_inference" for name in ("tensorflow", "tensorrt", "vllm")])
_NEVER = frozenset(
    [
        f"{_BEAM}sklearn_inference.SklearnModelHandlerNumpy",
        f"{_BEAM}sklearn_inference.SklearnModelHandlerPandas",
        f"{_BEAM}base.RemoteModelHandler",
        f"{_EMBEDDINGS}huggingface._InferenceAPIHandler",
    ]
)
_GPU_NAMES = frozenset(["gpu", "cuda", "rocm"])


def accelerators_of(handler: Any) -> tuple[str, ...] | None:
    """Return the kinds of accelerators that a handler's model uses if it can, such as ``("gpu", "tpu")``.

    ``()`` means that the model never uses one. None means that the handler does not say.

    >>> class Mine:
    ...     def __init__(self, device):
    ...         self._device = device
    >>> accelerators_of(Mine("GPU")), accelerators_of(Mine("cpu")), accelerators_of(Mine(None))
    (('gpu',), (), None)
    """
    declared = getattr(handler, "accelerators", None)
    if isinstance(declared, tuple):  # a Handler of ours; any other handler may use the name for something else
        return declared  # pyright: ignore[reportUnknownVariableType]
    fields: dict[str, Any] = getattr(handler, "__dict__", {})
    for name in ("_unkeyed", "_base", "_underlying"):  # what Beam's wrappers call the handler inside
        if hasattr(fields.get(name), "load_model"):
            return accelerators_of(fields[name])
    if by_key := fields.get("_id_to_mh_map"):
        return _together(accelerators_of(each) for each in by_key.values())
    kinds = type(handler).__mro__
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    if names & _NEVER:
        return ()
    if any(kind.__module__ in _ALWAYS_GPU for kind in kinds):
        return GPU
    if f"{_EMBEDDINGS}huggingface._SentenceTransformerModelHandler" in names:
        device = (fields.get("_load_model_args") or {}).get("device")
        return GPU if device is None else accelerators_of_device(device)
    if any(kind.__module__ == f"{_BEAM}onnx_inference" for kind in kinds):
        return _of_onnx(fields.get("_providers"))
    pipeline: dict[str, Any] = fields.get("_load_pipeline_args") or {}
    for named in (pipeline.get("device"), pipeline.get("device_map"), fields.get("_device"), fields.get("device")):
        if named is not None:
            return accelerators_of_device(named)
    return None


def accelerators_of_device(device: object) -> tuple[str, ...] | None:
    """Return the kinds of accelerators that the name of a device stands for; None for a name that says nothing.

    A worker sees its own device as the first one, so a name with another index asks for nothing.

    >>> [accelerators_of_device(name) for name in ("auto", "cuda:0", "tpu", "CPU", "cuda:1", -1)]
    [('gpu',), ('gpu',), ('tpu',), (), None, ()]
    """
    if isinstance(device, int):  # transformers: the index of a GPU, or -1
        device = "cpu" if device < 0 else f"gpu:{device}"
    name, _, index = str(device).lower().partition(":")
    if name == "cpu":
        return ()
    if index not in ("", "0"):
        return None
    if name in _GPU_NAMES or name == "auto":
        return GPU
    return ("tpu",) if name == "tpu" else None


def write_accelerators(kinds: tuple[str, ...] | None) -> str:
    """Return the value of the annotation for what :func:`accelerators_of` found.

    >>> write_accelerators(("gpu", "tpu")), read_accelerators(b"gpu,tpu"), read_accelerators(b"none")
    ('gpu,tpu', ('gpu', 'tpu'), ())
    """
    if kinds is None:
        return _UNKNOWN
    return ",".join(kinds) or _NONE


def read_accelerators(annotation: bytes) -> tuple[str, ...] | None:
    """Return what :func:`write_accelerators` wrote."""
    text = annotation.decode()
    if text == _UNKNOWN:
        return None
    return () if text == _NONE else tuple(text.split(","))


def parse_accelerator(hint: str) -> tuple[int, str] | None:
    """Return the count and the type in a resource hint ``accelerator``; None if the count is not a whole number.

    >>> parse_accelerator("type:nvidia-l4;count:2;install-nvidia-driver"), parse_accelerator("count:x")
    ((2, 'nvidia-l4'), None)
    """
    fields = dict(part.split(":", 1) for part in hint.split(";") if ":" in part)
    count = fields.get("count", "1")
    return (int(count), fields.get("type", "")) if count.isdigit() else None


def _together(found: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Return the kinds that any of several models uses; () if no model uses one."""
    found = list(found)
    kinds = tuple(dict.fromkeys(kind for each in found if each for kind in each))
    return kinds or (() if all(each == () for each in found) else None)


def _of_onnx(providers: Any) -> tuple[str, ...]:
    """Return the kinds for ONNX Runtime's providers: those that are listed and that the installed build has."""
    import onnxruntime  # Beam's module of the handler has imported it

    listed = {each[0] if isinstance(each, tuple) else each for each in providers or ()}
    usable = listed & set(onnxruntime.get_available_providers())
    return GPU if any(name.startswith(("CUDA", "Tensorrt", "ROCM", "MIGraphX")) for name in usable) else ()
