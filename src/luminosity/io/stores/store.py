"""The door to vector stores: what a store does, how it is addressed, and what is written and searched for.

A new store is one file with a subclass of :class:`SharedStore` or :class:`StagedStore`, named in ``kinds.py``.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, InvalidArgument, InvalidType, StoreError
from luminosity.io.run_owner import owner_in_name
from luminosity.io.stores.points import Point, PointColumns, PointId, TableFacts
from luminosity.io.stores.query import Hit, Query

__all__ = [
    "COUNTERS",
    "DISTANCES",
    "Distance",
    "IfExists",
    "PointStore",
    "SharedStore",
    "Staged",
    "StagedStore",
    "StagedWriter",
    "Store",
    "StoreAddress",
    "Target",
    "Write",
    "WriteMode",
    "check_vectors",
    "chosen_vector",
    "is_abandoned",
    "missing",
    "staged_name",
]

COUNTERS = "luminosity.io.stores.write_vectors.WriteVectors"
"""The namespace of the counters of all stores."""
Distance = Literal["cosine", "dot", "euclid", "manhattan"]
DISTANCES: tuple[str, ...] = get_args(Distance)
IfExists = Literal["append", "replace", "fail"]
Write = tuple[Sequence[Point], Sequence[PointId]]
"""Points to upsert, and ids of points to delete."""
Staged = tuple[str, int]
"""The path of a file with rows of a run, and its number of rows."""

_ABANDONED_S = 86_400  # A collection of another machine that waits for so long was left by a run that was killed.
_SHOWN_VECTORS = 20  # in a message, which stays readable
_COLLECTION = re.compile(r"[^/\\.\s][^/\\]*")
_OTHER_COLLECTION = Fix(
    "write to another collection, or delete this one", command="pass another --collection, or delete this one"
)


@dataclass(frozen=True)
class WriteMode:
    """What a write does with a collection that exists, with one that does not, and with a table without rows."""

    distance: Distance
    create: bool = True
    if_exists: IfExists = "append"
    allow_empty: bool = False

    def check(self, address: StoreAddress, exists: bool) -> None:
        """Raise if the collection must not exist and does, or the other way round."""
        if exists and self.if_exists == "fail":
            raise StoreError(
                f"{address} exists already",
                fix=Fix("pass if_exists='append' or if_exists='replace', or choose another name"),
            )
        if not exists and not self.create:
            raise StoreError(f"{address} does not exist, and create=False", fix=Fix("pass create=True"))

    def check_rows(self, address: StoreAddress, rows: int) -> None:
        """Raise if a collection would be replaced by nothing."""
        if not rows and self.if_exists == "replace" and not self.allow_empty:
            raise StoreError(
                f"found no rows, expected some to replace {address}; it stays as it was",
                fix=Fix("check the input, or pass allow_empty=True if the collection may be empty"),
            )


@dataclass(frozen=True)
class StoreAddress:
    """The address of a collection and how to access it. It is sent to the workers, which open the collection."""

    where: str
    collection: str
    timeout: float = 120.0
    batch_size: int = 1_000
    api_key_env: str | None = None
    api_key: Callable[[], str] | None = None
    staged: str = ""
    """The collection that is written to instead, until it is published under the name of this one."""

    def __post_init__(self) -> None:
        if self.collection and not _COLLECTION.fullmatch(self.collection):
            raise InvalidArgument(f"found the collection name {self.collection!r}, expected a name such as 'reviews'")
        if self.timeout <= 0 or self.batch_size < 1:
            raise InvalidArgument(
                f"found timeout={self.timeout!r} and batch_size={self.batch_size!r}, expected both to be positive"
            )
        if self.api_key is not None and not callable(self.api_key):
            raise InvalidType(
                f"found api_key= of type {type(self.api_key).__name__}, expected a function that returns the key",
                fix=Fix("pass api_key_env= with the name of an environment variable that holds the key"),
            )
        if self.api_key is not None and self.api_key_env is not None:
            raise InvalidArgument("found both api_key_env and api_key, expected one of them")

    @property
    def name_to_use(self) -> str:
        """The name for requests. Messages have the name that the user gave."""
        return self.staged or self.collection

    def key(self) -> str | None:
        """Return the key or the password of the server, read on the worker; None if the user names none."""
        if self.api_key is not None:
            return self.api_key()
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise StoreError(
                f"the environment variable {self.api_key_env}, which api_key_env names, is not set on the worker",
                fix=f"set it before the pipeline starts: export {self.api_key_env}=...",
            )
        return key

    def __str__(self) -> str:
        return f"the collection {self.collection!r} at {self.where}" if self.collection else self.where


class StagedWriter(ABC):
    """Writes staged rows to a store that one process at a time may write. It is sent to the workers."""

    @property
    def has_keys(self) -> bool:
        """Whether rows replace others, so that panes must be committed one after the other."""
        return True

    @abstractmethod
    def check(self, batch: Any) -> Any:
        """Check a batch before it is staged, and return the rows to stage: a bad row must fail the run early."""

    @abstractmethod
    def commit(self, staged: Sequence[Staged], folder: str) -> list[Any]:
        """Make all rows of a table visible, and return the output. May be repeated with the same arguments.

        ``folder`` is the folder of the staged files, in which the writer may keep notes.
        """

    @abstractmethod
    def commit_pane(
        self, staged: Sequence[Staged], newer: Collection[Hashable], folder: str
    ) -> tuple[list[Any], Collection[Hashable], list[str]]:
        """Make the rows of a pane visible, except those whose key is in ``newer``. May be repeated.

        Returns the output, the keys that were written, and further files that can be removed with the staged ones.
        """


class Store(ABC):
    """A collection of points. Every call may be repeated with the same arguments to the same effect."""

    kind: ClassVar[str]
    """The name of the product in the records of runs."""
    form: ClassVar[str]
    """What addresses look like, in messages."""
    has_collections: ClassVar[bool] = True
    """Whether an address needs the name of a collection."""

    @abstractmethod
    def __init__(self, address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> None:
        """Open the store; ``on_retry`` is called before a request to a server is repeated."""

    @classmethod
    @abstractmethod
    def handles(cls, where: str) -> bool:
        """Return whether an address is one of this kind of store."""

    @classmethod
    def address(cls, where: str, collection: str | None, **settings: Any) -> StoreAddress:
        """Return the address, with the settings of :class:`StoreAddress`. Raises if it can't be one.

        Its collection is empty if neither argument names one.
        """
        return StoreAddress(where, collection or "", **settings)

    @classmethod
    def place(cls, address: StoreAddress) -> dict[str, str]:
        """Return what the annotations of a step say of the collection, see :data:`luminosity.core.READS`."""
        where = address.where if "://" in address.where else os.path.abspath(address.where)
        return {"path": where, "kind": cls.kind, "name": address.collection}

    @classmethod
    @abstractmethod
    def check_reachable(cls, address: StoreAddress) -> None:
        """Raise if the client library is not installed here, or if no server responds. Asks for no collection."""

    @classmethod
    def names(cls, address: StoreAddress) -> list[str]:
        """Return the names of the collections that are at the address, sorted."""
        return []

    @classmethod
    @abstractmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Raise if it is known without asking a server that the collection can't be written."""

    @abstractmethod
    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Return the size and distance of each vector, by name; None if the collection does not exist."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of points."""

    @abstractmethod
    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Return the nearest points of each vector, the best first."""

    @abstractmethod
    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return some points, at most ``limit``, without scores; with ``field``, points that have a value there."""

    @abstractmethod
    def close(self) -> None:
        """Release connections."""


class StagedStore(Store):
    """A store of files. Workers stage the rows of a table beside it, and one step writes them all."""

    @classmethod
    @abstractmethod
    def staging_place(cls, address: StoreAddress) -> str:
        """Return the path beside which runs stage rows."""

    @classmethod
    @abstractmethod
    def writer(cls, address: StoreAddress, columns: PointColumns, mode: WriteMode, run: str) -> StagedWriter:
        """Return what writes the staged rows. ``run`` names a run with a checkpoint, or is empty."""


class PointStore(Store):
    """A store that takes points one write after the other."""

    @abstractmethod
    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the collection if it does not exist; raise if it has other vectors than these."""

    @abstractmethod
    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Write and delete points. They are durable when this returns."""


@dataclass(frozen=True)
class Target:
    """Where the points of a bounded table go. It is known, and the collection exists, before the first is written."""

    is_needed: bool = True  # False: there is nothing to write, or nothing to delete from
    staged: str = ""  # the collection that gets the points, if it is published later
    replaces: str = ""  # the collection that it stands for until then


class SharedStore(PointStore):
    """A store that many workers write at once: a server.

    A table goes through ``begin``, ``prepare``, ``write``, ``publish`` and ``clean_up``, in steps that may run on
    different machines and may be repeated.
    """

    @abstractmethod
    def begin(self, mode: WriteMode, owner: str) -> str:
        """Check that the collection can be written, remove what killed runs left, and return a name to write to.

        The name contains ``owner``; it is empty if points go directly to the collection. Runs when the pipeline starts.
        """

    @abstractmethod
    def prepare(self, staged: str, facts: TableFacts, columns: PointColumns, mode: WriteMode) -> Target:
        """Create what gets the points, ``staged`` if that is not empty. All rows are checked by now."""

    @abstractmethod
    def publish(self, target: Target, mode: WriteMode) -> None:
        """Show what was written to the target, all at once."""

    def clean_up(self, target: Target) -> None:
        """Remove what :meth:`publish` needs to recognize its own work. Called when that will not be repeated."""

    def write_together(self, writes: Iterable[Write]) -> None:
        """Apply the writes of a pane, all at once if the store can."""
        for points, deleted in writes:
            self.write(points, deleted)


def staged_name(address: StoreAddress, owner: str) -> str:
    """Return a name for what a run writes to until it publishes the collection. It tells the run and the time."""
    return f"{address.collection}--{owner}-{int(time.time()):x}-{secrets.token_hex(2)}"


def is_abandoned(address: StoreAddress, name: str, mine: str, *, may_share: bool = False) -> bool:
    """Return whether :func:`staged_name` made a name for a run that was killed.

    Raises if the run still writes, unless several runs ``may_share`` the collection.

    If the first step is repeated, ``mine`` owns a collection that no step knows. The folder that tells whether a run
    with a checkpoint is over is not known here: its collection counts as that of another machine.
    """
    owner = owner_in_name(name)
    if owner is None:
        return False  # It belongs to the user.
    if str(owner) == mine:
        return True
    is_alive = owner.is_alive("")
    if is_alive is None:
        return time.time() - int(name.split("-")[-2], 16) >= _ABANDONED_S
    if is_alive and may_share:
        return False
    if is_alive:
        raise StoreError(
            f"{address}: {owner.describe()} is writing it right now, to {name!r}",
            fix="wait until that run has ended, or write to another collection",
        )
    return True


def missing(address: StoreAddress) -> StoreError:
    """Return the error for a collection that does not exist."""
    return StoreError(f"{address} does not exist", fix="check the name and the place, and that it was written before")


def chosen_vector(address: StoreAddress, found: Mapping[str, tuple[int, str]] | None, using: str | None) -> str:
    """Return the name of the vector to compare with: ``using``, or the only one of the collection.

    >>> chosen_vector(StoreAddress("stores", "reviews"), {"mood": (3, "cosine")}, None)
    'mood'
    """
    if found is None:
        raise missing(address)
    if using is None and len(found) == 1:
        return next(iter(found))
    if using is not None and using in found:
        return using
    if list(found) == [""]:
        raise StoreError(
            f"found using={using!r}, but {address} has one vector without a name", fix=Fix("leave out using=")
        )
    names = f"the vectors {list_some(list(found), _SHOWN_VECTORS)}" if found else "no vectors to search"
    if using is None:
        fix = Fix(f"choose one, such as using={next(iter(found))!r}") if found else None
        raise StoreError(f"found no using=, but {address} has {names}", fix=fix)
    fix = Fix(did_you_mean(using, found) or "choose one of them")
    raise StoreError(f"found using={using!r}, but {address} has {names}", fix=fix if found else None)


def check_vectors(
    address: StoreAddress, found: Mapping[str, tuple[int, str]], sizes: Mapping[str, int], distance: str
) -> None:
    """Raise unless the collection has these vectors; ``found`` holds the size and distance of the vectors it has."""
    for name, size in sizes.items():
        title = f"vector {name!r}" if name else "vector without a name"
        if name not in found:
            there = ", ".join(repr(other) for other in found) if any(found) else "one without a name"
            raise StoreError(f"{address} has no {title}, it has {there}", fix=_OTHER_COLLECTION)
        if found[name] != (size, distance):
            raise StoreError(
                f"{address} has a {title} of {found[name][0]} numbers with {found[name][1]} distance, expected {size} "
                f"numbers with {distance} distance",
                fix=_OTHER_COLLECTION,
            )
