"""Lakes to test with: an Iceberg table in a SQLite catalogue and a Delta table in a folder, written in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from luminosity import ReadDelta, ReadIceberg, ReadTable, WriteDelta, WriteIceberg
from luminosity.io.lakes.contract import Lake
from luminosity.io.lakes.delta_lake import DeltaLake
from luminosity.io.lakes.delta_log import DeltaAddress
from luminosity.io.lakes.iceberg_catalog import IcebergAddress
from luminosity.io.lakes.iceberg_lake import IcebergLake
from luminosity.io.lakes.write import WriteLake


class IcebergPlace:
    """A table that does not exist at first."""

    kind = "iceberg"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "warehouse"
        self.folder.mkdir(exist_ok=True)
        self.settings = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": str(self.folder)}
        self.catalog = load_catalog("main", **self.settings)
        self.catalog.create_namespace_if_not_exists("shop")

    @property
    def lake(self) -> Lake:
        return IcebergLake(IcebergAddress.of("main.shop.sales", self.settings))

    def write(self, **options: Any) -> WriteLake:
        return WriteIceberg("main.shop.sales", catalog=self.settings, **options)

    def read(self, *arguments: Any, **options: Any) -> ReadTable:
        return ReadIceberg("main.shop.sales", *arguments, catalog=self.settings, **options)

    @property
    def table(self) -> Any:
        return self.catalog.load_table("shop.sales")

    def rows(self) -> pa.Table:
        """Return the rows as the format's own reader has them."""
        return self.table.scan().to_arrow()

    def append(self, rows: pa.Table) -> None:
        """Append rows as another program does."""
        if not self.catalog.table_exists("shop.sales"):
            self.catalog.create_table("shop.sales", rows.schema)
        self.table.append(rows)

    def versions(self) -> list[Any]:
        return [snapshot.snapshot_id for snapshot in self.table.snapshots()]

    def referenced(self) -> set[str]:
        return {
            Path(str(path).removeprefix("file://")).name for path in self.table.inspect.files()["file_path"].to_pylist()
        }


class DeltaPlace:
    """The same as a Delta table."""

    kind = "delta"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "delta"

    @property
    def lake(self) -> Lake:
        return DeltaLake(DeltaAddress.of(str(self.folder), None))

    def write(self, **options: Any) -> WriteLake:
        return WriteDelta(self.folder, **options)

    def read(self, *arguments: Any, **options: Any) -> ReadTable:
        options = {"version" if name == "snapshot" else name: value for name, value in options.items()}
        return ReadDelta(self.folder, *arguments, **options)

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.folder)

    def rows(self) -> pa.Table:
        return self.table.to_pyarrow_table()

    def append(self, rows: pa.Table) -> None:
        write_deltalake(self.folder, rows, mode="append")

    def versions(self) -> list[Any]:
        return list(range(self.table.version() + 1))

    def referenced(self) -> set[str]:
        return {Path(path).name for path in self.table.file_uris()}


Place = IcebergPlace | DeltaPlace
PLACES = {"iceberg": IcebergPlace, "delta": DeltaPlace}


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return PLACES[request.param](tmp_path)


def data_files(place: Place) -> set[str]:
    """Return the names of all data files that are there, referenced or not."""
    return {path.name for path in place.folder.rglob("*.parquet") if "_delta_log" not in path.parts}
