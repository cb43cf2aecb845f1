"""Open a collection of Qdrant, on a server or in a folder of this machine, or check that a server responds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from luminosity.errors import StoreError
from luminosity.extras import require
from luminosity.io.folder_access import why_not_writable
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.qdrant_collection import CollectionAddress, QdrantCollection, WriteMode
from luminosity.io.stores.qdrant_server import ServerCollection

__all__ = ["check_folder", "check_reachable", "open_collection"]

_RESPONSE_TIMEOUT_S = 10.0  # A server that is up responds much sooner, even from another continent.


def open_collection(address: CollectionAddress, on_retry: Callable[[], None]) -> QdrantCollection:
    """Open the collection at ``address``; ``on_retry`` is called before a request to a server is repeated."""
    return ServerCollection(address, on_retry) if address.is_server else EmbeddedCollection(address)


def check_folder(address: CollectionAddress, mode: WriteMode) -> None:
    """Raise if a collection can't be written to its folder, or if it exists and must not."""
    if reason := why_not_writable(address.where):
        raise StoreError(f"{address} can't be written: {reason}", fix="choose another folder, or make it writable")
    mode = replace(mode, create=True)  # Another pipeline may still create it.
    mode.check(address, os.path.isdir(os.path.join(address.where, address.collection)))
    if mode.if_exists != "append" and (owner := EmbeddedCollection(address).writer()):
        raise StoreError(
            f"{address}: {owner.describe()} is writing it right now",
            fix="wait until that run has ended",
        )


def check_reachable(address: CollectionAddress) -> None:
    """Raise if the client library is not installed here, or if no server responds at ``address``.

    Any response counts, also an error: whether the key is valid and the collection exists is not checked.
    """
    require("qdrant_client" if address.is_server else "qdrant_edge", "qdrant")
    if not address.is_server:
        return
    import urllib3

    try:
        urllib3.request("GET", address.where, timeout=_RESPONSE_TIMEOUT_S, retries=False)
    except urllib3.exceptions.HTTPError as error:
        raise StoreError(
            f"no server responds at {address.where} ({error})",
            fix="check that the server runs, or write to a folder, which needs no server",
        ) from None
