"""The kinds of vector stores, each found by what its addresses look like."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from luminosity.errors import InvalidArgument
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.lance_store import LanceStore
from luminosity.io.stores.postgres import PostgresStore
from luminosity.io.stores.qdrant_server import ServerCollection
from luminosity.io.stores.store import Store

__all__ = ["QDRANT", "STORES", "address_of", "kind_of", "open_store"]

QDRANT: tuple[type[Store], ...] = (ServerCollection, EmbeddedCollection)
STORES: tuple[type[Store], ...] = (PostgresStore, LanceStore, *QDRANT)
"""All kinds. The first that handles an address has it. Add yours before Qdrant, whose folders can have any name."""


def kind_of(where: str, among: Sequence[type[Store]] = STORES) -> type[Store]:
    """Return the class of the stores at an address.

    >>> kind_of("http://localhost:6333").kind, kind_of("data/reviews.lance").kind
    ('qdrant', 'lance')
    """
    for kind in among:
        if kind.handles(where):
            return kind
    forms = " or ".join(kind.form for kind in among)
    raise InvalidArgument(f"found where={where!r}, expected {forms}")


def address_of(
    where: str | os.PathLike[str], collection: str | None, among: Sequence[type[Store]] = STORES, **settings: Any
) -> StoreAddress:
    """Return the address of a collection, checked; ``settings`` are those of :class:`StoreAddress`."""
    kind = kind_of(os.fspath(where), among)
    address = kind.address(os.fspath(where), collection, **settings)
    if kind.has_collections and not address.collection:
        raise InvalidArgument(f"found no collection for {address.where}, expected a name such as 'reviews'")
    return address


def open_store(address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> Store:
    """Open the collection at ``address``; ``on_retry`` is called before a request to a server is repeated."""
    return kind_of(address.where)(address, on_retry)
