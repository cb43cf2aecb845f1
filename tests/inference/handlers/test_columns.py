"""Numbers go from Arrow to numpy and back as Arrow itself would convert them, and no process imports pandas for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.inference.handlers.columns import to_columns, to_numpy
from tests.runners import IS_CLUSTER, IS_REFERENCE

_NUMBERS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


@pytest.mark.parametrize("dtype", _NUMBERS)
def test_numbers_are_those_that_arrow_gives(dtype: str) -> None:
    numbers = np.arange(12, dtype=dtype)
    column = pa.array(numbers)
    for part in (column, column.slice(3), column.slice(2, 5), column.slice(12)):
        found, expected = to_numpy(part), part.to_numpy(zero_copy_only=False)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
        assert not found.flags.writeable
    assert to_columns(numbers).equals(column)
    assert to_columns(numbers[::2]).equals(pa.array(numbers[::2]))
    matrix = to_columns(numbers.reshape(3, 2, 2))
    assert matrix.to_pylist() == numbers.reshape(3, 2, 2).tolist()
    assert to_numpy(matrix.slice(1)).tolist() == numbers.reshape(3, 2, 2)[1:].tolist()
    assert to_columns(np.empty((0, 2), dtype)).type == pa.list_(column.type, 2)


def test_what_is_no_plain_number_is_left_to_arrow() -> None:
    with_null = to_numpy(pa.array([1, None, 3]))
    assert with_null.dtype == np.float64
    assert np.isnan(with_null[1])
    assert to_numpy(pa.array([True, False])).tolist() == [True, False]
    assert to_columns(np.array([True, False])).to_pylist() == [True, False]
    with pytest.raises(pa.ArrowNotImplementedError, match="yte-swapped"):
        to_columns(np.arange(3, dtype=">i4"))


_SCRIPT = """
import sys
import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from luminosity import Column, Enrich, Handler, LuminosityRunner, ReadTable, WriteTable

class Linear(Handler[None, float, np.ndarray]):
    columnar = True
    def load_model(self):
        return None
    def predict(self, model, batch, inference_args=None):
        return batch @ np.array([1.0, 10.0])

def unchanged(table):
    assert "pandas" not in sys.modules
    return table

if __name__ == "__main__":
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=1"])) as p:
        scored = p | ReadTable("in/*.parquet") | Enrich(score=Column(Linear(), ["a", "b"]))
        _ = scored | beam.Map(unchanged) | WriteTable("out")
"""


@pytest.mark.skipif(IS_CLUSTER or IS_REFERENCE, reason="one runner shows it")
def test_workers_predict_columns_of_numbers_without_pandas(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"a": np.arange(5.0), "b": np.arange(5)}), tmp_path / "in" / "rows.parquet")
    (tmp_path / "script.py").write_text(_SCRIPT)
    subprocess.run([sys.executable, "script.py"], check=True, cwd=tmp_path)
    assert pq.read_table(tmp_path / "out")["score"].to_pylist() == [11.0 * row for row in range(5)]
