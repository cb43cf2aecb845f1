"""Lead Beam's clients for BigQuery to a fake: Beam has no option for it, and its source takes no client.

Imported wherever a pipeline is built that uses the fake, and by its workers, because Beam's runners import the modules
of its plugins there. Nothing changes unless the environment variables name a fake.
"""

from __future__ import annotations

import os
from typing import Any

from apache_beam.io.gcp import bigquery, bigquery_tools
from apache_beam.utils.plugin import BeamPlugin

from luminosity.testing.bigquery.direct_reads import client_at
from luminosity.testing.bigquery.http import BigQueryClient

__all__ = ["READS_VARIABLE", "VARIABLE", "LedToFake", "client_of_fake"]

VARIABLE = "BIGQUERY_EMULATOR_HOST"  # Google's own client knows it, too
READS_VARIABLE = "BIGQUERY_STORAGE_EMULATOR_HOST"


class LedToFake(BeamPlugin):
    """Names this module to runners, which import it in workers."""


def client_of_fake() -> BigQueryClient | None:
    """Return a client of the fake that the environment names; None if it names none."""
    url = os.environ.get(VARIABLE)
    if url is None:
        return None
    return BigQueryClient(url if "://" in url else f"http://{url}", "project")


class _Storage:
    """Google's module of clients for direct reads, with another client while there is a fake."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def BigQueryReadClient(self, **settings: Any) -> Any:
        # In place of the class.
        host = os.environ.get(READS_VARIABLE)
        return self._module.BigQueryReadClient(**settings) if host is None else client_at(host)


def _lead() -> None:
    """Put our clients in place of Beam's, for the time in which the environment names a fake."""
    wrapper: Any = bigquery_tools.BigQueryWrapper
    beams_client, create = wrapper._bigquery_client, wrapper.__init__

    def client(pipeline_options: Any) -> Any:
        return client_of_fake() or beams_client(pipeline_options)

    def create_with_client(self: Any, client: Any = None, *args: Any, **settings: Any) -> None:
        create(self, client or client_of_fake(), *args, **settings)

    wrapper._bigquery_client = staticmethod(client)
    wrapper.__init__ = create_with_client
    beams: Any = bigquery
    if hasattr(beams, "bq_storage"):  # its package is installed
        beams.bq_storage = _Storage(beams.bq_storage)


_lead()
