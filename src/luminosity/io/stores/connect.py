"""Open a collection of Qdrant, on a server or in a folder of this machine."""

from __future__ import annotations

from collections.abc import Callable

from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.qdrant_collection import CollectionAddress, QdrantCollection
from luminosity.io.stores.qdrant_server import ServerCollection

__all__ = ["open_collection"]


def open_collection(address: CollectionAddress, on_retry: Callable[[], None]) -> QdrantCollection:
    """Open the collection at ``address``; ``on_retry`` is called before a request to a server is repeated."""
    return ServerCollection(address, on_retry) if address.is_server else EmbeddedCollection(address)
