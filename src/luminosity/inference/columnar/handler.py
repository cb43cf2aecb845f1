"""A handler of Beam's, asked for all examples at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler

from luminosity.inference.blocks import Block
from luminosity.inference.handlers.columns import to_columns, to_numpy, to_tree
from luminosity.inference.wrapping import BeamContract

__all__ = ["Call", "WholeColumns"]

Call: TypeAlias = Callable[[Any, Any, Any, dict[str, Any]], Any]
"""What is computed: of the handler, its model, the inputs (an array, or a dict of arrays) and the inference_args."""


class WholeColumns(BeamContract):
    """Beam's contract makes a list of rows for the model and a result object for each: a second for a million rows.

    Everything else, from the files of the model to the limits of batches, is as the handler says.
    """

    columnar = True

    def __init__(self, handler: ModelHandler[Any, Any, Any], call: Call, model_id: str | None) -> None:
        super().__init__(handler)
        self._call = call
        self._model_id = model_id

    @property
    def model_id(self) -> str | None:
        return self._model_id

    def prepare(self, block: Block) -> Block:
        columns = to_columns(block)
        return columns if isinstance(columns, pa.RecordBatch) else to_numpy(columns)

    def collate(self, prepared: Block) -> Any:
        return to_tree(prepared, to_numpy) if isinstance(prepared, pa.RecordBatch) else prepared

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return self._call(self._handler, model, batch, inference_args or {})

    def get_num_bytes(self, batch: Any) -> int:
        arrays = batch.values() if isinstance(batch, dict) else [batch]
        return sum(array.nbytes for array in arrays)
