"""What stores share: the address of a collection, checks of what is there, names of staged collections, retries."""

from __future__ import annotations

import os
import random
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, InvalidArgument, InvalidType, StoreError
from luminosity.io.run_owner import owner_in_name

__all__ = [
    "StoreAddress",
    "TransientError",
    "check_vectors",
    "chosen_vector",
    "is_abandoned",
    "missing",
    "retry",
    "staged_name",
]

_ABANDONED_S = 86_400  # A collection of another machine that waits for so long was left by a run that was killed.
_SHOWN_VECTORS = 20  # in a message, which stays readable
_COLLECTION = re.compile(r"[^/\\.\s][^/\\]*")
_OTHER_COLLECTION = Fix(
    "write to another collection, or delete this one", command="pass another --collection, or delete this one"
)
_FIRST_DELAY_S = 0.1  # doubled after every attempt
_LONGEST_DELAY_S = 10.0  # a server that is back is noticed within this time
_MOST_DOUBLINGS = 10  # beyond these, the delay is at its longest anyway

T = TypeVar("T")


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


class TransientError(Exception):
    """The server may accept the request later; ``wait`` is the number of seconds that it asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def retry(
    send: Callable[[], T],
    timeout: float,
    on_retry: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of ``send``, which is retried after a ``TransientError`` for ``timeout`` seconds.

    ``on_retry`` is called before every retry. Blocks between attempts.

    >>> responses = iter([TransientError("busy"), TransientError("busy", wait=1), "done"])
    >>> waits = []
    >>> def send():
    ...     response = next(responses)
    ...     if isinstance(response, TransientError):
    ...         raise response
    ...     return response
    >>> retry(send, 60, lambda: None, waits.append), len(waits), waits[1] >= 1
    ('done', 2, True)
    """
    give_up_at = time.monotonic() + timeout
    attempts = 0
    while True:
        try:
            return send()
        except TransientError as error:
            attempts += 1
            # The random spread keeps workers that failed together from retrying together.
            delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempts, _MOST_DOUBLINGS)) * random.uniform(0.5, 1)
            delay = max(delay, error.wait)
            if time.monotonic() + delay > give_up_at:
                raise StoreError(
                    f"{error}; gave up after {attempts} attempts in {timeout:.3g} s", may_pass=True
                ) from error
        on_retry()
        sleep(delay)
