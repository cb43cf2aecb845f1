"""The kinds of vector stores, each found by what its addresses look like, and what their transforms share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import apache_beam as beam

from luminosity.errors import InvalidArgument
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.lance_store import LanceStore
from luminosity.io.stores.postgres import PostgresStore
from luminosity.io.stores.qdrant_server import ServerCollection
from luminosity.io.stores.store import Store

__all__ = ["QDRANT", "STORES", "StoreTransform", "address_of", "kind_of", "open_store"]

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


class StoreTransform(beam.PTransform[Any, Any]):
    """A transform that reads or writes a collection, which its annotations and its label name."""

    _among: ClassVar[Sequence[type[Store]]] = STORES
    _annotation: ClassVar[str]  # ``READS`` or ``WRITES``

    def __init__(self, where: str | os.PathLike[str], collection: str | None, **settings: Any) -> None:
        super().__init__()
        self._address = address_of(where, collection, self._among, **settings)

    @property
    def address(self) -> StoreAddress:
        """The address of the collection."""
        return self._address

    @property
    def kind(self) -> type[Store]:
        """The class of the store."""
        return kind_of(self._address.where)

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the collection."""
        return {**super().annotations(), self._annotation: json.dumps([self.kind.place(self._address)])}

    def default_label(self) -> str:
        """Return a label with the collection's name, such as ``WriteVectors(reviews)``."""
        return f"{type(self).__name__}({self._address.collection or os.path.basename(self._address.where)})"
