"""Tests of ReadTable on a remote file system."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.io.filesystem import FileMetadata, FileSystem
from apache_beam.testing.util import assert_that, equal_to

from luminosity import ReadTable
from luminosity.errors import TableError
from tests.io.reading.reads import numbered, read_alone, write

STORED: dict[str, bytes] = {}


class ShelfFileSystem(FileSystem):
    """A file system in this process, at shelf://…, with a flat space of names as in object stores."""

    @classmethod
    def scheme(cls) -> str:
        return "shelf"

    def has_dirs(self) -> bool:
        return False

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        return (self.metadata(path) for path in STORED if path.startswith(dir_or_prefix))

    def exists(self, path: str) -> bool:
        return path in STORED

    def metadata(self, path: str) -> FileMetadata:
        return FileMetadata(path, len(STORED[path]), 0.0)

    def open(self, path: str, mime_type: str = "", compression_type: str = "") -> Any:
        if path not in STORED:
            raise FileNotFoundError(path)
        return io.BytesIO(STORED[path])

    def _not_needed(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    join = split = mkdirs = create = copy = rename = size = last_updated = checksum = delete = _not_needed


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path) -> Iterator[None]:
    for at, name in enumerate(["a.parquet", "b.arrow", "c.csv", "d.jsonl.gz"]):
        write(tmp_path / name, numbered(400).slice(100 * at, 100), 30)
        STORED[f"shelf://reviews/{name}"] = (tmp_path / name).read_bytes()
    yield
    STORED.clear()


@pytest.mark.parametrize("pattern", ["shelf://reviews/*", "shelf://reviews", "shelf://reviews/"])
def test_every_format(pattern: str) -> None:
    for seed in range(3):
        found = read_alone(ReadTable(pattern), random.Random(seed))
        assert sorted(found, key=lambda row: row["id"]) == numbered(400).to_pylist()


def test_in_a_pipeline() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        read = pipeline | ReadTable("shelf://reviews/*", columns=["text"], where=pc.field("id").isin([10, 210]))
        assert_that(read | beam.FlatMap(pa.RecordBatch.to_pylist), equal_to([{"text": "row 10"}, {"text": "row 210"}]))


def test_what_is_gone() -> None:
    transform = ReadTable("shelf://reviews/*")
    del STORED["shelf://reviews/b.arrow"]
    with pytest.raises(TableError, match=r"shelf://reviews/b\.arrow: can't be read as arrow: the file existed .* gone"):
        read_alone(transform)
    with pytest.raises(TableError, match=r"no table file matches shelf://views/\*; check the address"):
        ReadTable("shelf://views/*")
