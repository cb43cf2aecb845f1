"""Decodes images: files on any file system, bytes, and arrays become RGB images of 8 bits."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.text import shorten
from luminosity.errors import InvalidArgument, InvalidType, LuminosityError
from luminosity.extras import require
from luminosity.inference.files.local import local_copy, near_path
from luminosity.inference.handlers.padding import Array

__all__ = ["decode", "is_image_type"]

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
