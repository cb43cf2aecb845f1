"""Tests of whole jobs from files to files: an error in one row or file fails the job, and leaves no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity import Column, Enrich, Handler, ReadTable, WriteTable
from tests.both_runners import Pipelines


class Lengths(Handler[str, int, None]):
    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> list[int]:
        return [len(text) for text in batch]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        table = pa.table({"id": range(number * 500, number * 500 + 500), "text": [f"text {number}"] * 500})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=100)
    return folder


def fails(pipelines: Pipelines, source: Path) -> str:
    """Run a job that fails, check that it leaves no output, and return its message."""
    with pytest.raises(Exception) as failure, pipelines() as (pipeline, _):  # noqa: PT011, PT012  # Runners differ in its type.
        table = pipeline | ReadTable(str(source))
        _ = table | Enrich(length=Column(Lengths(), "text")) | WriteTable(str(source.parent / "out"))
    out = source.parent / "out"
    assert [path for path in out.rglob("*.parquet") if not any(part.startswith(".") for part in path.parts)] == []
    return str(failure.value)


def test_a_row_with_a_null_text(pipelines: Pipelines, source: Path) -> None:
    pq.write_table(pa.table({"id": [1500, 1501], "text": ["fine", None]}), source / "part-3.parquet")
    said = fails(pipelines, source)
    assert "the column 'length' takes 'text', which is null in row 1 of its batch (id=1501, text=None)" in said
    assert "with_exception_handling()" in said


def test_a_file_with_another_schema(pipelines: Pipelines, source: Path) -> None:
    pq.write_table(pa.table({"id": ["1500"], "text": ["fine"]}), source / "part-3.parquet")
    said = fails(pipelines, source)
    assert "part-3.parquet" in said
    assert "part-0.parquet" in said
    assert "id" in said


def test_an_unreadable_file(pipelines: Pipelines, source: Path) -> None:
    whole = (source / "part-1.parquet").read_bytes()
    (source / "part-1.parquet").write_bytes(whole[: len(whole) // 2])
    assert "part-1.parquet" in fails(pipelines, source)
