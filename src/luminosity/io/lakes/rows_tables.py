"""Datasets of Hugging Face and of Lance, which are read by the numbers of their rows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, TableError
from luminosity.extras import require
from luminosity.io.formats import Format
from luminosity.io.reading.named_table import NamedTable, Part, RowsReader
from luminosity.io.reading.selection import Selection

__all__ = ["HuggingFaceTable", "LanceRows"]

_ROWS_PER_PART = 1 << 20  # enough that opening the dataset costs little beside reading
_SHOWN = 20


class HuggingFaceTable(NamedTable):
    """A dataset of Hugging Face: a folder that ``save_to_disk`` wrote, or one in the cache. Nothing is downloaded."""

    def __init__(self, name: str) -> None:
        self.name = f"hf:{name}"
        self._place = name
        dataset = self._load()
        self.stored = pa.schema([pa.field(field.name, field.type) for field in dataset.features.arrow_schema])
        self._rows = len(dataset)
        self._bytes = int(dataset.data.nbytes)

    def parts(self, where: Any) -> list[Part]:
        """Return ranges of rows."""
        return _ranges(self.name, self._rows, self._bytes)

    def reader(self, part: Part, selection: Selection, rows_per_batch: int) -> RowsReader:
        """Open a range of rows."""
        dataset = self._load().select_columns(selection.loaded.names).with_format("arrow")
        return _HuggingFaceRows(part, rows_per_batch, dataset, selection)

    def _load(self) -> Any:
        datasets = require("datasets", "datasets")
        if os.path.isdir(self._place):
            return self._one(self._from_disk(datasets, self._place), None)
        folder, _, split = self._place.rpartition("/")
        if folder and os.path.isdir(folder):
            return self._one(self._from_disk(datasets, folder), split)
        return self._one(self._from_cache(datasets, folder, split), None)

    def _from_disk(self, datasets: Any, folder: str) -> Any:
        try:
            return datasets.load_from_disk(folder)
        except IndexError as error:
            raise TableError(
                f"{self.name}: datasets can't load {folder}: it was saved without any row", fix="save it with rows"
            ) from error
        except (FileNotFoundError, ValueError) as error:
            raise TableError(
                f"{self.name}: {folder} is no dataset that save_to_disk wrote",
                fix="name the folder itself if it has Parquet, CSV or JSON lines, without hf:",
            ) from error

    def _from_cache(self, datasets: Any, name: str, split: str) -> Any:
        if not name:
            raise TableError(
                f"{self.name}: found no folder of this name, and no split, expected hf:FOLDER, hf:FOLDER/SPLIT or "
                "hf:DATASET/SPLIT"
            )
        hub: Any = importlib.import_module("huggingface_hub.constants")
        # The libraries read the environment when they are imported, and ask the hub otherwise.
        config = datasets.config
        before = config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE
        config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
        try:
            return datasets.load_dataset(name, split=split)
        except Exception as error:  # The library has many errors for what is not there.
            raise TableError(
                f"{self.name}: found neither a folder nor a dataset in the cache of this machine, and nothing is "
                "downloaded",
                fix=Fix(
                    f"fetch it first: datasets.load_dataset({name!r}, split={split!r})",
                    command=f'fetch it first: python -c "import datasets; datasets.load_dataset({name!r})"',
                ),
            ) from error
        finally:
            config.HF_HUB_OFFLINE, hub.HF_HUB_OFFLINE = before

    def _one(self, found: Any, split: str | None) -> Any:
        """Return the split of a dataset that has several."""
        if not hasattr(found, "keys"):
            if split is not None:
                raise TableError(f"{self.name}: the dataset has no splits, expected its folder alone")
            return found
        splits = list(found.keys())
        if split in splits:
            return found[split]
        if split is None and len(splits) == 1:
            return found[splits[0]]
        asked = "no split" if split is None else f"no split {split!r}"
        raise TableError(
            f"{self.name}: found {asked}; the dataset has {list_some(splits, _SHOWN)}",
            fix=did_you_mean(split, splits) or None if split else f"name one: {self.name}/{splits[0]}",
        )


class _HuggingFaceRows(RowsReader):
    def __init__(self, part: Part, rows_per_batch: int, dataset: Any, selection: Selection) -> None:
        super().__init__(part, rows_per_batch)
        self._dataset = dataset
        self._loaded = selection.loaded

    def take(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        first = self._part.detail
        for batch in self._dataset[first + start : first + stop].to_batches():
            yield batch.select(self._loaded.names).cast(self._loaded)


class LanceRows(NamedTable):
    """A Lance dataset at the version that it had when it was opened."""

    def __init__(self, path: str) -> None:
        self.name = f"lance:{path}"
        self._path = path if "://" in path else os.path.abspath(path)
        if not path.removesuffix("/").endswith(".lance"):
            raise TableError(f"{self.name}: found no suffix .lance, expected the folder of a dataset: NAME.lance")
        table = self._open(None)
        self._version = int(table.version)
        self.stored = pa.schema([pa.field(field.name, field.type) for field in table.schema])
        self._rows = int(table.count_rows())

    def parts(self, where: Any) -> list[Part]:
        """Return ranges of rows."""
        return _ranges(self.name, self._rows, 0)

    def reader(self, part: Part, selection: Selection, rows_per_batch: int) -> RowsReader:
        """Open a range of rows."""
        return _LanceRows(part, rows_per_batch, self._open(self._version), selection)

    def _open(self, version: int | None) -> Any:
        lancedb = require("lancedb", "lance")
        folder, name = os.path.split(self._path.rstrip("/"))
        try:
            if "://" not in folder and not os.path.isdir(self._path):
                raise ValueError("the folder does not exist")
            table = lancedb.connect(folder or ".").open_table(name.removesuffix(".lance"))
            if version is not None:
                table.checkout(version)
        except (ValueError, OSError, RuntimeError) as error:
            raise TableError(f"{self.name}: can't be opened as a Lance dataset: {error}") from error
        return table


class _LanceRows(RowsReader):
    def __init__(self, part: Part, rows_per_batch: int, table: Any, selection: Selection) -> None:
        super().__init__(part, rows_per_batch)
        self._table = table
        self._loaded = selection.loaded

    def take(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        query = self._table.search().select(self._loaded.names)
        for batch in query.offset(self._part.detail + start).limit(stop - start).to_batches():
            yield batch.select(self._loaded.names).cast(self._loaded)


def _ranges(name: str, rows: int, size: int) -> list[Part]:
    """Return parts of at most a million rows. ``size`` is that of all rows; 0 is not known."""
    parts: list[Part] = []
    for first in range(0, rows, _ROWS_PER_PART):
        count = min(_ROWS_PER_PART, rows - first)
        share = max(count, size * count // max(1, rows))
        parts.append(Part(f"{name}[{first}:{first + count}]", share, Format.ARROW, rows=count, detail=first))
    return parts
