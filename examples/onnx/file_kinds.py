"""Magika's model: its file, the kinds of files that it knows, and the numbers that it takes for a file."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def _folder() -> Path:
    package = importlib.util.find_spec("magika")
    if package is None or package.origin is None:
        sys.exit("Found no model. Install one with: pip install magika")
    [file] = (Path(package.origin).parent / "models").glob("*/model.onnx")
    return file.parent


MODEL = _folder() / "model.onnx"
_SETTINGS: dict[str, Any] = json.loads((MODEL.parent / "config.min.json").read_text())
KINDS: list[str] = _SETTINGS["target_labels_space"]
WIDTH: int = _SETTINGS["beg_size"] + _SETTINGS["end_size"]


def features_of(content: bytes) -> npt.NDArray[np.int32]:
    """Return the first and the last bytes of a file as numbers, without white space around them, and filled up."""
    features = np.full(WIDTH, _SETTINGS["padding_token"], np.int32)
    block, first, last = (_SETTINGS[name] for name in ("block_size", "beg_size", "end_size"))
    begin = content[:block].lstrip()[:first]
    end = content[-block:].rstrip()[-last:]
    features[: len(begin)] = np.frombuffer(begin, np.uint8)
    features[WIDTH - len(end) :] = np.frombuffer(end, np.uint8)
    return features
