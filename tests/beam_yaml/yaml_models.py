"""Handlers that the YAML files of these tests name."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from luminosity import Handler


class Lengths(Handler[str, int, None]):
    output_type = pa.int64()

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> Any:
        return [len(text) for text in batch]


class Vectors(Handler[str, Any, None]):
    output_type = pa.list_(pa.float32(), 2)

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> Any:
        return [[float(len(text)), 1.0] for text in batch]


class Untyped(Handler[str, int, None]):
    """Its column's type is known only when it has computed. Fails on one text."""

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> Any:
        if "bad" in batch:
            raise ValueError("found 'bad'")
        return [-len(text) for text in batch]
