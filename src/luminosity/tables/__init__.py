"""Tables: elements that are Arrow record batches, with many rows each.

Importing the package registers the coder of record batches.
"""

import pyarrow as pa
from apache_beam import coders

from luminosity.tables.schemas import RecordBatchCoder

__all__: list[str] = []

coders.registry.register_coder(pa.RecordBatch, RecordBatchCoder)
