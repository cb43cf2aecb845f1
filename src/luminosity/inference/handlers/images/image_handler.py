"""The base class of all handlers for models of images, which decodes files, bytes and arrays."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems
from typing_extensions import Unpack

from luminosity._shared.text import shorten
from luminosity.errors import HandlerError, InvalidArgument, InvalidType, LuminosityError, ModelUnavailable
from luminosity.extras import require
from luminosity.inference.blocks import Block, rows
from luminosity.inference.files.local import local_copy, near_path
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.images.recipe import ImageRecipe, TransformersRecipe, stacked
from luminosity.inference.handlers.on_torch import Batch
from luminosity.inference.handlers.padding import Array
from luminosity.inference.handlers.text.transformers_handler import TransformersHandler

__all__ = ["ImageHandler", "decode"]
FORK_SAFE_IMPORTS = ("PIL.Image",)
"""Libraries that each worker with a model of images needs: the engine imports them once, before it forks workers."""
_SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageHandler(TransformersHandler[Any]):
    """A handler whose examples are images.

    Workers decode, resize and crop; the process that predicts gets arrays of uint8, and scales and normalises them on
    the device. Workers import neither torch nor transformers if the model's processor does only what an ``ImageRecipe``
    can say.
    """

    reads_processor_json = True
    """Set it to False on a handler to prepare images with transformers in any case."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        model_class: Callable[..., Any] | None,
        model_params: Mapping[str, Any] | None,
        recipe: ImageRecipe | None,
        device: str,
        dtype: Any,
        compile: bool,
        load_model_args: Mapping[str, Any] | None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        _check_source(path, model_class, model_params, recipe, load_model_args)
        super().__init__("" if path is None else path, device, dtype, compile, load_model_args, **options)
        self._model_class = model_class
        self._model_params = dict(model_params or {})
        self._recipe = recipe

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise ``InvalidType`` unless a column of this type can hold images."""
        if not is_image_type(kind):
            raise InvalidType(f"found {kind}, expected paths (text), images (binary), or a struct with bytes or path")

    @property
    def model_id(self) -> str | None:
        """The folder of the model, or its name on the hub; None for a module of your own."""
        return None if self._model_class is not None else self._pretrained.path

    def check_files(self) -> None:
        """Raise if the model can't be found, or is a folder without the settings of an image processor."""
        if self._model_class is not None:
            return
        super().check_files()
        if FileSystems.get_scheme(self._pretrained.path) in (None, "file"):
            folder = local_copy(self._pretrained.path)
            if self._recipe is None and os.path.isdir(folder) and self._processor_settings is None:
                raise ModelUnavailable(
                    f"{self.model_id!r}: found no {_SETTINGS_FILES[0]}, expected a model of images",
                    fix="pass recipe=ImageRecipe(...) if the model takes images",
                )

    def is_repeatable(self, inference_args: Mapping[str, Any] | None) -> bool | None:
        """Return True for a model of transformers; a module of your own may do anything."""
        return None if self._model_class is not None else True

    def takes_updates(self) -> bool:
        """Return whether the model has a path, which may change."""
        return self._model_class is None

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch to another version of the model, if it has a path."""
        if self.takes_updates():
            super().update_model_path(model_path)

    def check_prepares_like(self, first: ImageHandler) -> None:
        """Raise if images are prepared otherwise than ``first`` does."""
        if self.recipe != first.recipe:
            raise ModelUnavailable(
                f"{self.model_id!r} needs other sizes or values of images than {first.model_id!r}, with which the "
                "pipeline started and which prepares its images",
                fix="start a new run for a model with other settings of its image processor",
            )

    @cached_property
    def recipe(self) -> ImageRecipe | TransformersRecipe:
        """What happens to images before the model: the argument, or the settings in the model's files."""
        if self._recipe is not None:
            return self._recipe
        settings = self._processor_settings if self.reads_processor_json else None
        return (ImageRecipe.read(settings) if settings else None) or TransformersRecipe(self._pretrained)

    @cached_property
    def _processor_settings(self) -> Mapping[str, Any] | None:
        for name in _SETTINGS_FILES:
            found = self._pretrained.json(name)
            if found is not None:
                return found.get("image_processor", found)
        return None

    def prepare(self, block: Block) -> Block:
        """Decode, resize and crop the images: one array of uint8 if all get the same size.

        Arrays that need none of this are returned as they are, so that each goes to the model's process once.
        """
        examples, recipe = rows(block), self.recipe
        if all(map(recipe.keeps, examples)):
            return block
        return stacked([recipe.pixels(decode(example)) for example in examples])

    @property
    def sums_costs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether all images have one size, so that a batch needs no images of similar sizes."""
        return self.recipe.has_one_size

    def prepare_key(self) -> Hashable | None:
        """Return the recipe: models with the same recipe share the prepared images."""
        return self.recipe

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of pixels of each image."""
        return np.fromiter((array.shape[0] * array.shape[1] for array in prepared), np.float64, len(prepared))

    def collate(self, prepared: Block) -> Batch:
        """Stack the images of a batch."""
        torch = require("torch", "torch")
        if isinstance(prepared, np.ndarray):
            return Batch(torch.from_numpy(np.require(prepared, requirements=["C", "W"])), len(prepared))
        if len(shapes := {(array.shape, array.dtype) for array in prepared}) > 1:
            raise InvalidArgument(
                f"found images of the sizes {sorted(shape[:2] for shape, _ in shapes)[:3]} in one batch, expected "
                "one size",
                fix="pass recipe=ImageRecipe(size=(height, width)), or max_batch_size=1",
            )
        # Stacked where the device copies from: another copy takes longer than the model.
        first = torch.from_numpy(np.empty((0, *prepared[0].shape), prepared[0].dtype))
        batch = first.new_empty((len(prepared), *first.shape[1:]), pin_memory=self.device.type == "cuda")
        np.stack(prepared, out=batch.numpy())
        return Batch(batch, len(prepared))

    def load(self, kind: str, optional: tuple[str, ...] = ()) -> Any:
        """Load the model of this kind, or the user's own module, onto its device."""
        self.choose_attention()
        if self._model_class is None:
            module = self.on_device(kind, optional)
            self._check_recipe()
            return self.compiled(module)
        module = self._model_class(**self._model_params)
        if not isinstance(module, require("torch", "torch").nn.Module):
            raise InvalidType(
                f"found a model of type {type(module).__name__} from model_class={self._model_class!r}, expected a "
                "torch.nn.Module"
            )
        module = module.eval().requires_grad_(False)
        module = module if self.dtype is None else module.to(self.dtype)
        return self.compiled(module.to(self.device))

    def _check_recipe(self) -> None:
        """Raise if transformers, which the model needs anyway, prepares images otherwise than the workers do."""
        if self._recipe is not None or not isinstance(self.recipe, ImageRecipe):
            return
        if not TransformersRecipe(self._pretrained).is_close_to(self.recipe):
            raise HandlerError(
                f"the image processor of {self.model_id!r} differs from what its settings say to transformers "
                f"{require('transformers', 'transformers').__version__}",
                fix="set `reads_processor_json = False` on the handler, which then prepares images with transformers",
            )

    def pixel_values(self, model: Any, batch: Batch) -> Any:
        """Return the images of a batch as the tensor that the model takes."""
        torch = require("torch", "torch")
        found = (each.dtype for each in model.parameters() if each.is_floating_point())
        return self.recipe.normalised(batch.inputs, next(found, torch.float32))

    def call(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the model's output for a batch."""
        pixels = self.pixel_values(model, batch)
        if self._model_class is not None:
            return model(pixels, **inference_args)
        return model(pixel_values=pixels, **inference_args)

    def warm_up(self, model: Any) -> None:
        """Run the model once on a grey image."""
        list(self.run_inference([np.full((32, 32, 3), 127, np.uint8)], model))


def _check_source(
    path: str | os.PathLike[str] | None,
    model_class: Callable[..., Any] | None,
    model_params: Mapping[str, Any] | None,
    recipe: ImageRecipe | None,
    load_model_args: Mapping[str, Any] | None,
) -> None:
    """Raise unless the arguments name one model, and say how to prepare images for it."""
    if (path is None) == (model_class is None):
        found = "neither" if path is None else "both"
        raise InvalidArgument(f"found {found} of path and model_class=, expected one of them")
    if model_class is None:
        if model_params:
            raise InvalidArgument("found model_params= without model_class=, whose arguments they are")
        return
    if recipe is None:
        raise InvalidArgument(
            "found model_class= without recipe=, expected both",
            fix="pass recipe=ImageRecipe(size=..., mean=..., std=...), as the model was trained",
        )
    if load_model_args:
        raise InvalidArgument("found load_model_args= with model_class=, expected model_params=")


_EXPECTED = "a path (str), the bytes of a file, an array of uint8, or a dict with bytes or path"
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
_REFUSED = ("EPS",)  # Pillow would run another program, Ghostscript, on the file
_REASON_CHARACTERS = 200
_NAME_CHARACTERS = 200
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())


def is_image_type(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type can hold images: paths, bytes, or structs with one of them.

    >>> is_image_type(pa.binary()), is_image_type(pa.struct({"bytes": pa.binary()})), is_image_type(pa.int64())
    (True, True, False)
    """
    if pa.types.is_dictionary(kind):
        return is_image_type(kind.value_type)
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return fields.get("bytes") in _BYTES or fields.get("path") in _TEXTS
    return kind in (*_TEXTS, *_BYTES, pa.null()) or pa.types.is_fixed_size_binary(kind)


def decode(example: Any) -> Any:
    """Return an example as an RGB image of Pillow, upright as its EXIF data says; of an animation, the first frame.

    Transparency is dropped, as transformers does. Raises ``InvalidArgument`` for an image that can't be decoded or that
    has more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``, and ``InvalidType`` for an example that is no image at all.
    """
    if isinstance(example, Mapping):  # as the library datasets stores images in tables
        found = next((example[name] for name in ("bytes", "path") if example.get(name) is not None), None)
        if found is None:
            raise InvalidArgument(f"found a dict with {sorted(map(str, example))}, expected a value in bytes or path")
        return decode(found)
    if isinstance(example, np.ndarray):
        return _of_array(example)
    if isinstance(example, bytes | bytearray | memoryview):
        return _decoded(io.BytesIO(example), f"an image of {len(example):,} bytes")
    if isinstance(example, str | os.PathLike):
        path: str = os.fspath(example)  # pyright: ignore[reportUnknownArgumentType, reportAssignmentType]
        with _opened(path) as file:
            return _decoded(file, repr(shorten(path, _NAME_CHARACTERS)))
    raise InvalidType(f"found an example of type {type(example).__name__}, expected {_EXPECTED}")


@contextmanager
def _opened(path: str) -> Generator[Any, None, None]:
    if FileSystems.get_scheme(path) in (None, "file"):
        local = local_copy(path)
        try:
            file: Any = open(local, "rb")  # noqa: SIM115  # closed below
        except FileNotFoundError:
            raise InvalidArgument(
                f"found no file {os.path.abspath(local)!r}, expected an image", fix=near_path(local) or None
            ) from None
    else:
        file = FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)
    with file:
        yield file


def _decoded(file: Any, name: str) -> Any:
    pillow = require("PIL.Image", "images")
    try:
        image = pillow.open(file)
        if image.format in _REFUSED:
            raise InvalidArgument(f"{name} is an image of the format {image.format}, which is not decoded")
        _check_pixels(image.size, name, pillow.MAX_IMAGE_PIXELS)
        return _as_rgb(require("PIL.ImageOps", "images").exif_transpose(image), image.format, name)
    except (LuminosityError, MemoryError):
        raise
    except pillow.DecompressionBombError as error:
        raise InvalidArgument(f"{name} is too large to decode: {_reason(error)}") from None
    except pillow.UnidentifiedImageError:
        raise InvalidArgument(f"{name} is no image of a format that Pillow knows") from None
    except Exception as error:  # damaged files make its decoders raise errors of any kind
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the file system's own error
        raise InvalidArgument(f"{name} can't be decoded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return shorten(str(error) or type(error).__name__, _REASON_CHARACTERS)


def _check_pixels(size: tuple[int, int], name: str, limit: int | None) -> None:
    width, height = size
    if limit is not None and width * height > limit:
        raise InvalidArgument(
            f"{name} has {width:,} x {height:,} pixels, expected at most {limit:,} in all",
            fix="make it smaller first; if you trust your images, raise PIL.Image.MAX_IMAGE_PIXELS in the workers",
        )


def _as_rgb(image: Any, format: str | None, name: str) -> Any:
    if image.mode in _SIXTEEN_BITS or (image.mode == "I" and format == "PNG"):
        return _of_sixteen_bits(np.asarray(image))
    if image.mode in ("I", "F"):
        raise InvalidArgument(
            f"{name} has pixels of 32 bits (mode {image.mode}), whose range is not known, expected 8 or 16 bits",
            fix="convert the image first",
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _of_sixteen_bits(values: Array) -> Any:
    """Return a grey image whose range of 65,536 values is scaled down to 256; Pillow would cut it off at 255."""
    scaled = (values.astype(np.uint32) * 255 + 32767) // 65535
    return require("PIL.Image", "images").fromarray(scaled.astype(np.uint8)).convert("RGB")


def _of_array(array: Array) -> Any:
    if array.dtype != np.uint8:
        raise InvalidType(
            f"found an array of {array.dtype}, expected uint8, from 0 to 255",
            fix="scale the values and convert them with astype(np.uint8)",
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not (is_image and array.size):
        raise InvalidArgument(
            f"found an array of the shape {array.shape}, expected (height, width) or (height, width, 1, 3 or 4)"
        )
    return require("PIL.Image", "images").fromarray(np.ascontiguousarray(array)).convert("RGB")
