"""The datasets of a fake BigQuery and the tables in them, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from luminosity.testing.bigquery.tables import Refused, StoredTable

__all__ = ["LOCATION", "Answer", "Key", "Store", "key_of", "name_of", "reference_of"]

Answer = dict[str, Any]  # an object of the REST API
Key = tuple[str, str, str]  # project, dataset, table

LOCATION = "US"
_LABEL = "labels."


class Store:
    """All datasets and tables. It has no lock: its owner holds one in every call."""

    def __init__(self, project: str, datasets: Iterable[str]) -> None:
        self.tables: dict[Key, StoredTable] = {}
        self._datasets: dict[tuple[str, str], Answer] = {}
        for name in datasets:
            self.create_dataset({"datasetReference": {"projectId": project, "datasetId": name}})

    @property
    def datasets(self) -> list[str]:
        """The names of all datasets: ``project:dataset``."""
        return [f"{project}:{name}" for project, name in self._datasets]

    def dataset(self, project: str, name: str) -> Answer:
        """Return a dataset as the REST API describes it, or raise :class:`Refused`."""
        if (project, name) not in self._datasets:
            raise Refused(f"Not found: Dataset {project}:{name}", "notFound")
        return self._datasets[project, name]

    def create_dataset(self, description: Answer) -> Answer:
        """Create a dataset, as a request describes it."""
        reference = description["datasetReference"]
        key = (reference["projectId"], reference["datasetId"])
        if key in self._datasets:
            raise Refused("Already Exists: Dataset {}:{}".format(*key), "duplicate")
        self._datasets[key] = {"location": LOCATION, **description}
        return self._datasets[key]

    def delete_dataset(self, project: str, name: str, *, with_tables: bool) -> None:
        """Delete a dataset. It must be empty, or its tables go, too."""
        self.dataset(project, name)
        inside = [key for key in self.tables if key[:2] == (project, name)]
        if inside and not with_tables:
            raise Refused(f"Dataset {project}:{name} is still in use", "resourceInUse")
        for key in inside:
            del self.tables[key]
        del self._datasets[project, name]

    def datasets_with(self, project: str, wanted: str) -> list[Answer]:
        """Return the datasets of a project that have labels, which are written as ``labels.name:value``."""
        labels = [each.removeprefix(_LABEL).partition(":")[::2] for each in wanted.split()]
        return [
            described
            for (owner, _), described in self._datasets.items()
            if owner == project and all(described.get("labels", {}).get(name) == value for name, value in labels)
        ]

    def table(self, key: Key) -> StoredTable:
        """Return a table, or raise :class:`Refused`."""
        if key not in self.tables:
            raise Refused(f"Not found: Table {name_of(key)}", "notFound")
        return self.tables[key]

    def put(self, key: Key, fields: list[Answer], rows: list[Answer], job: Answer, default: str) -> None:
        """Put the rows of a job into its table, as the dispositions say: all of them or, with an error, none."""
        self.dataset(*key[:2])
        table = self.tables.get(key)
        disposition = job.get("writeDisposition") or default
        if table is None:
            if job.get("createDisposition") == "CREATE_NEVER":
                raise Refused(f"Not found: Table {name_of(key)}", "notFound")
            self.tables[key] = StoredTable(fields, rows)
        elif disposition == "WRITE_TRUNCATE":
            self.tables[key] = StoredTable(fields, rows)
        elif disposition == "WRITE_EMPTY" and table.rows:
            raise Refused(f"Already Exists: Table {name_of(key)}", "duplicate")
        else:
            table.check_same_columns(fields, name_of(key))
            table.rows += rows


def name_of(key: Key) -> str:
    """Return a table's name.

    >>> name_of(("project", "dataset", "reviews"))
    'project:dataset.reviews'
    """
    return "{}:{}.{}".format(*key)


def key_of(reference: Answer) -> Key:
    """Return the key of a table from its reference in a request."""
    return reference["projectId"], reference["datasetId"], reference["tableId"]


def reference_of(key: Key) -> Answer:
    """Return a table's reference for a response."""
    return {"projectId": key[0], "datasetId": key[1], "tableId": key[2]}
