"""What happens to a decoded image before a model gets it: ``ImageRecipe``, or an image processor of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import numpy as np

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handlers.padding import Array
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["ImageRecipe", "TransformersRecipe", "sample_image", "stacked"]
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

    def keeps(self, example: Any) -> bool:
        """Return whether ``pixels`` would return an example as it is: an array of RGB pixels of the right size."""
        if not (isinstance(example, np.ndarray) and example.dtype == np.uint8 and example.ndim == 3):
            return False
        height, width, channels = example.shape
        if channels != _CHANNELS or min(height, width) < 1:
            return False
        return (self.size is None or self._new_size(height, width) == (height, width)) and (
            self.crop is None or self.crop == (height, width)
        )

    @property
    def has_one_size(self) -> bool:
        """Whether all images get the same size, whatever theirs is."""
        return self.crop is not None or isinstance(self.size, tuple)

    def normalised(self, pixels: Any, dtype: Any) -> Any:
        """Return a batch of pixels as a tensor for the model: floating-point, (images, 3, height, width)."""
        factor, summand = _line(self, pixels.device)
        return (pixels.permute(0, 3, 1, 2) * factor).add_(summand).to(dtype)

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        shorter = self.size or 1
        longer = max(1, int(shorter * max(height, width) / min(height, width)))
        return (shorter, longer) if height <= width else (longer, shorter)


@lru_cache(maxsize=16)
def _line(recipe: ImageRecipe, device: Any) -> tuple[Any, Any]:
    """Return what the values of each channel are multiplied by, and what is then added to them.

    They stay on the device: to copy them there with each batch would wait for all batches before.
    """
    torch = require("torch", "torch")
    numbers = np.array([(recipe.scale / std, -mean / std) for mean, std in zip(recipe.mean, recipe.std, strict=True)])
    with torch.inference_mode(False):
        both = torch.tensor(numbers.T, dtype=torch.float32, device=device).view(2, 1, _CHANNELS, 1, 1)
    return both[0], both[1]


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


_CLOSE = 1e-3  # normalised pixels: two ways to compute them round differently


def sample_image() -> Any:
    """Return an image on which two recipes are compared: random values, always the same."""
    values = np.random.default_rng(0).integers(0, 256, (61, 83, 3), np.uint8)
    return require("PIL.Image", "images").fromarray(values)


class TransformersRecipe:
    """Prepares images as the model's image processor of transformers does, with Pillow.

    If the processor only resizes and crops before it scales and normalises, pixels are uint8, as with ``ImageRecipe``.
    Otherwise they are what the processor makes of an image: float32.
    """

    def __init__(self, source: Pretrained) -> None:
        self._source = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformersRecipe) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(TransformersRecipe)

    def pixels(self, image: Any) -> Array:
        """Return the prepared pixels of an RGB image of Pillow: (height, width, 3)."""
        values = self._raw(image) if self._after is not None else self.whole(image)
        return np.ascontiguousarray(np.moveaxis(values[0], 0, 2))

    def normalised(self, pixels: Any, dtype: Any) -> Any:
        """Return a batch of pixels as a tensor for the model: floating-point, (images, 3, height, width)."""
        return pixels.permute(0, 3, 1, 2).to(dtype) if self._after is None else self._after.normalised(pixels, dtype)

    def keeps(self, example: Any) -> bool:
        """Return False: the processor decides what becomes of any example."""
        return False

    @property
    def has_one_size(self) -> bool:
        """Whether all images get the same size: not known."""
        return False

    def is_close_to(self, recipe: ImageRecipe) -> bool:
        """Return whether a recipe prepares the sample image as the processor does."""
        torch = require("torch", "torch")
        image = sample_image()
        expected = self.whole(image)
        pixels = torch.from_numpy(np.array(recipe.pixels(image)[None]))
        found = recipe.normalised(pixels, torch.float32).numpy()
        return found.shape == expected.shape and float(np.abs(found - expected).max()) <= _CLOSE

    def whole(self, image: Any) -> Array:
        """Return what the processor makes of an image: float32, (1, 3, height, width)."""
        return self._call(image).astype(np.float32)

    def _raw(self, image: Any) -> Array:
        return self._call(image, do_rescale=False, do_normalize=False)

    def _call(self, image: Any, **arguments: Any) -> Array:
        pixels = np.asarray(self._processor(image, return_tensors="np", **arguments)["pixel_values"])
        if pixels.ndim != 4 or pixels.shape[:2] != (1, 3):
            raise InvalidArgument(
                f"the image processor of {self._source.path!r} makes arrays of the shape {pixels.shape}, expected one "
                "image (1, 3, height, width)"
            )
        return pixels

    @cached_property
    def _processor(self) -> Any:
        return self._source.image_processor()

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return self._processor.to_dict()

    @cached_property
    def _after(self) -> ImageRecipe | None:
        """How raw pixels are scaled and normalised; None if the processor does that in another way."""
        processor, torch = self._processor, require("torch", "torch")
        is_scaled, is_normalised = (getattr(processor, name, False) for name in ("do_rescale", "do_normalize"))
        after = ImageRecipe(
            scale=float(processor.rescale_factor) if is_scaled else 1.0,
            mean=tuple(processor.image_mean) if is_normalised else ImageRecipe.mean,
            std=tuple(processor.image_std) if is_normalised else ImageRecipe.std,
        )
        image = sample_image()
        raw = self._raw(image)
        if raw.dtype != np.uint8:
            return None
        found = after.normalised(torch.from_numpy(np.moveaxis(raw, 1, 3).copy()), torch.float32).numpy()
        return after if float(np.abs(found - self.whole(image)).max()) <= _CLOSE else None
