"""Pictures in prompts: files or bytes become parts of a message, checked and within limits."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from typing import Any, cast

import pyarrow as pa
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import BeamIOError, FileSystems

from luminosity._shared.text import format_bytes, shorten
from luminosity.errors import InvalidArgument, InvalidType, may_pass
from luminosity.extras import require

__all__ = ["is_picture_type", "picture_part"]

_KINDS = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp"}
"""The formats that servers take; others are sent as PNG."""
_NAME_CHARACTERS = 200


def is_picture_type(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type can hold pictures."""
    from luminosity.inference.handlers.images.image_handler import is_image_type

    return is_image_type(kind)


def picture_part(value: Any, column: str, most_bytes: int) -> dict[str, Any]:
    """Return a picture as a part of a message: ``image_url`` with a data URI.

    Raises ``InvalidArgument`` if there is no such file, if it is larger than ``most_bytes``, or if it can't be decoded.
    """
    from luminosity.inference.handlers.images.image_handler import decode

    raw = _bytes_of(value, column, most_bytes)
    if len(raw) > most_bytes:
        raise InvalidArgument(
            f"found a picture of more than {format_bytes(most_bytes)} in the column {column!r}",
            fix="make the pictures smaller first, or pass a larger max_picture_bytes",
        )
    image = decode(raw)  # the whole picture: one whose end is missing would be paid for, too
    kind = _KINDS.get(_format_of(raw))
    if kind is None:
        file = io.BytesIO()
        image.save(file, "PNG")
        kind, raw = _KINDS["PNG"], file.getvalue()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(raw).decode()}"}}


def _format_of(raw: bytes) -> str:
    with require("PIL.Image", "images").open(io.BytesIO(raw)) as image:
        return str(image.format)


def _bytes_of(value: Any, column: str, most_bytes: int) -> bytes:
    if isinstance(value, Mapping):  # as the library datasets stores images in tables
        found = cast("Mapping[str, Any]", value)
        inner = next((found[name] for name in ("bytes", "path") if found.get(name) is not None), None)
        if inner is None:
            raise InvalidArgument(f"found a dict without bytes or path in the column {column!r}, expected a picture")
        return _bytes_of(inner, column, most_bytes)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str | os.PathLike):
        raise InvalidType(
            f"found a value of type {type(value).__name__} in the column {column!r}, expected a path or bytes"
        )
    path = os.fspath(cast("str", value))
    try:
        with FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED) as file:
            return file.read(most_bytes + 1)
    except (OSError, BeamIOError) as error:
        shown = shorten(path, _NAME_CHARACTERS)
        passes = may_pass(error, in_user_code=False)
        raise InvalidArgument(f"{shown!r} can't be read: {error}", may_pass=passes) from error
