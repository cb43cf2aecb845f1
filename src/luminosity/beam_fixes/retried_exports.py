"""Exports of BigQuery that may be tried again: Beam's source expects that the first attempt succeeds.

If an attempt fails or loses its worker, Beam leaves its temporary dataset with the result of the query, and its files.
The next attempt exports to the same folder, maybe to fewer files, and would read those of the first one, too.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Generator
from typing import Any

from apache_beam.io.filesystems import FileSystems
from apache_beam.io.gcp import bigquery
from apache_beam.io.gcp.bigquery_read_internal import bigquery_export_destination_uri
from apache_beam.options.pipeline_options import GoogleCloudOptions

__all__ = ["RetriedExport", "read_export"]

_LOGGER = logging.getLogger(__name__)
_Source: Any = vars(bigquery)["_CustomBigQuerySource"]


def read_export(read: Any, pipeline_begin: Any) -> Any:
    """Return the rows of Beam's source, whose exports then remove what an earlier attempt has left."""
    source = copy.copy(read.source)
    source.__class__ = RetriedExport
    read.source = source
    return read.expand(pipeline_begin)


class RetriedExport(_Source):
    """Beam's source of files that BigQuery exports, with an empty folder for each attempt, which cleans up behind it.

    What an attempt of a worker that is lost has queried stays: its dataset has another name.
    """

    def _execute_query(self, bq: Any) -> Any:
        with self._dataset_only_if_it_succeeds(bq):
            return super()._execute_query(bq)

    def _export_files(self, bq: Any) -> Any:
        location = self.options.view_as(GoogleCloudOptions).temp_location
        pattern = bigquery_export_destination_uri(self.gcs_location, location, self._source_uuid)
        _remove(pattern)
        with self._dataset_only_if_it_succeeds(bq):
            try:
                return super()._export_files(bq)
            except Exception:
                with _ignoring("files of the export"):
                    _remove(pattern)
                raise

    @contextlib.contextmanager
    def _dataset_only_if_it_succeeds(self, bq: Any) -> Generator[None]:
        try:
            yield
        except Exception:
            if self.query is not None:
                with _ignoring("temporary dataset"):
                    bq.clean_up_temporary_dataset(self._get_project())
            raise


def _remove(pattern: str) -> None:
    (found,) = FileSystems.match([pattern])
    if found.metadata_list:
        FileSystems.delete([each.path for each in found.metadata_list])


@contextlib.contextmanager
def _ignoring(kind: str) -> Generator[None]:
    """Log an error of the cleanup: the one that led to it tells more."""
    try:
        yield
    except Exception:
        _LOGGER.warning("could not remove the %s of a read from BigQuery that failed", kind, exc_info=True)
