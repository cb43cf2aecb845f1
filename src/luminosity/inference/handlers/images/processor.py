"""Image processors of transformers, for models whose settings say more than an ``ImageRecipe`` can."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.handlers.images.recipe import ImageRecipe
from luminosity.inference.handlers.padding import Array
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["TransformersRecipe", "sample_image"]

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
