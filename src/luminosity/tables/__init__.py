"""Tables: elements that are Arrow record batches, with many rows each.

Importing the package registers the coder of record batches.
"""

from luminosity.tables import coder as _coder

__all__: list[str] = []

_coder.register()
