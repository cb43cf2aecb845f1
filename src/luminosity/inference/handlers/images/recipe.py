"""``ImageRecipe``: what happens to an image before a model gets it, from the decoded image to normalised pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handlers.padding import Array

__all__ = ["ImageRecipe", "stacked"]

Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # in the order of Pillow's numbers

_CHANNELS = 3
# Processors of transformers that do nothing but what a recipe can say.
_PLAIN_PROCESSORS = ("Bit", "CLIP", "DeiT", "Siglip", "ViT")
_SETTINGS = ("do_resize", "size", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
_CROPS = ("do_center_crop", "crop_size")
# Settings that say nothing about pixels, or nothing that we do differently.
_WITHOUT_EFFECT = (
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "do_pad",
    "feature_extractor_type",
    "image_processor_type",
    "image_seq_length",
    "input_data_format",
    "pad_size",
    "processor_class",
    "return_tensors",
)


@dataclass(frozen=True)
class ImageRecipe:
    """The steps from a decoded image to the pixels of a model: resize, crop, scale, normalise.

    Workers resize and crop; an image then has one byte per value. Scaling and normalising happen on the model's device.

    >>> ImageRecipe(size=256, crop=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3).crop
    (224, 224)

    Args:
        size: the height and width to resize to; one number is the length of the shorter edge; None leaves the size.
        crop: the height and width that are cut out of the centre, after resizing; a smaller image is filled up with 0.
        resample: how to resize: "nearest", "lanczos", "bilinear", "bicubic", "box" or "hamming".
        scale: the factor for the values, which are from 0 to 255.
        mean: subtracted from the scaled values, for red, green and blue.
        std: divides what is left, for red, green and blue.
    """

    size: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    resample: Resample = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,) * _CHANNELS
    std: tuple[float, ...] = (1.0,) * _CHANNELS

    def __post_init__(self) -> None:
        if self.resample not in get_args(Resample):
            raise InvalidArgument(f"found resample={self.resample!r}, expected one of {', '.join(get_args(Resample))}")
        for name, lengths in (("size", self.size), ("crop", self.crop)):
            lengths = (lengths,) if isinstance(lengths, int) else lengths
            if lengths is not None and (len(lengths) > 2 or min(lengths) < 1):
                raise InvalidArgument(f"found {name}={getattr(self, name)!r}, expected at least one pixel")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != _CHANNELS:
                raise InvalidArgument(f"found {name}={values!r}, expected {_CHANNELS} numbers: red, green and blue")

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> ImageRecipe | None:
        """Return the recipe that a ``preprocessor_config.json`` describes; None if only transformers can follow it."""
        kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
        for suffix in ("Pil", "Fast", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(suffix)
        given = {name for name, value in settings.items() if value is not None}
        if kind not in _PLAIN_PROCESSORS or not given <= {*_SETTINGS, *_CROPS, *_WITHOUT_EFFECT}:
            return None
        if not given >= set(_SETTINGS) or ("do_center_crop" not in settings and kind not in ("Siglip", "ViT")):
            return None  # what is missing depends on the class
        if settings.get("do_pad") or not isinstance(settings["resample"], int):
            return None
        size, crop = _lengths(settings["size"]), _lengths(settings.get("crop_size"))
        is_cropped = bool(settings.get("do_center_crop"))
        if (settings["do_resize"] and size is None) or (is_cropped and not isinstance(crop, tuple)):
            return None
        return cls(
            size=size if settings["do_resize"] else None,
            crop=crop if is_cropped and isinstance(crop, tuple) else None,
            resample=get_args(Resample)[settings["resample"]],
            scale=float(settings["rescale_factor"]) if settings["do_rescale"] else 1.0,
            mean=tuple(settings["image_mean"]) if settings["do_normalize"] else (0.0,) * _CHANNELS,
            std=tuple(settings["image_std"]) if settings["do_normalize"] else (1.0,) * _CHANNELS,
        )

    def pixels(self, image: Any) -> Array:
        """Return the pixels of an RGB image of Pillow, resized and cropped: uint8, (height, width, 3)."""
        if self.size is not None:
            height, width = self._new_size(*reversed(image.size))
            image = image.resize((width, height), get_args(Resample).index(self.resample))
        pixels = np.asarray(image)
        return pixels if self.crop is None else _cropped(pixels, self.crop)

    def normalised(self, pixels: Any, dtype: Any) -> Any:
        """Return a batch of pixels as a tensor for the model: floating-point, (images, 3, height, width)."""
        torch = require("torch", "torch")
        mean, std = (torch.tensor(each, device=pixels.device).view(1, -1, 1, 1) for each in (self.mean, self.std))
        return ((pixels.permute(0, 3, 1, 2).float() * self.scale - mean) / std).to(dtype)

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        shorter = self.size or 1
        longer = max(1, int(shorter * max(height, width) / min(height, width)))
        return (shorter, longer) if height <= width else (longer, shorter)


def stacked(arrays: Sequence[Array]) -> Any:
    """Return arrays of one shape as one array, others as a list.

    >>> stacked([np.zeros((2, 2)), np.ones((2, 2))]).shape, len(stacked([np.zeros(1), np.zeros(2)]))
    ((2, 2, 2), 2)
    """
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else list(arrays)


def _lengths(size: Any) -> int | tuple[int, int] | None:
    if isinstance(size, Mapping):
        given = {name: value for name, value in size.items() if value is not None}
        if given.keys() == {"height", "width"}:
            return int(given["height"]), int(given["width"])
        if given.keys() == {"shortest_edge"}:
            return int(given["shortest_edge"])
    return None


def _cropped(pixels: Array, crop: tuple[int, int]) -> Array:
    """Return the centre of an image, with a black border if the image is smaller."""
    height, width = (max(0, wanted - found) for wanted, found in zip(crop, pixels.shape, strict=False))
    if height or width:
        above, left = -(-height // 2), -(-width // 2)
        pixels = np.pad(pixels, np.array([(above, height - above), (left, width - left), (0, 0)]))
    top, left = ((found - wanted) // 2 for wanted, found in zip(crop, pixels.shape, strict=False))
    return pixels[top : top + crop[0], left : left + crop[1]]
