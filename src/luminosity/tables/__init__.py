"""Tables: elements that are Arrow record batches, many rows each."""

from luminosity.tables import coder as _coder

__all__: list[str] = []

_coder.register()
