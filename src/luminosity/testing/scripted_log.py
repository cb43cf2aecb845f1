"""Partitions that a test writes down, with gaps, transactions and retention, and what a consumer sees of them."""

from __future__ import annotations

from typing import NamedTuple

from luminosity.errors import InvalidArgument

__all__ = ["Entry", "ScriptedPartition", "Transactions"]


class Entry(NamedTuple):
    """A record of a partition. ``transaction`` is the number of the transaction that it belongs to, if any."""

    offset: int
    timestamp_type: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    transaction: int | None


class Transactions:
    """Knows which transactions are open and which were committed. A name may be used again after its end."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._committed: set[int] = set()
        self._count = 0

    def number(self, name: str) -> int:
        """Return the number of the open transaction of this name; begin it if there is none."""
        if name not in self._open:
            self._count += 1
            self._open[name] = self._count
        return self._open[name]

    def end(self, name: str, *, commit: bool) -> int:
        """End a transaction, and return its number."""
        if name not in self._open:
            raise InvalidArgument(f"found no open transaction {name!r}, expected one with a record")
        number = self._open.pop(name)
        if commit:
            self._committed.add(number)
        return number

    def is_open(self, number: int | None) -> bool:
        """Return whether the transaction has not ended yet."""
        return number in self._open.values()

    def is_visible(self, number: int | None) -> bool:
        """Return whether ``read_committed`` shows the records of a transaction, or those of none."""
        return number is None or number in self._committed


class ScriptedPartition:
    """One partition: its records, the first offset that is left, the end, and errors that reads will meet."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.first = 0
        self.end = 0
        self._failures: list[tuple[int, int]] = []  # the position that meets an error, and its code

    def append(self, entry: Entry) -> None:
        """Add a record at the end, or behind a gap."""
        if entry.offset < self.end:
            raise InvalidArgument(f"found offset={entry.offset}, expected {self.end} or more: the partition has others")
        self.entries.append(entry)
        self.end = entry.offset + 1

    def has(self, transaction: int) -> bool:
        """Return whether a transaction has written to this partition."""
        return any(entry.transaction == transaction for entry in self.entries)

    def limit(self, transactions: Transactions, *, committed: bool) -> int:
        """Return the end, or, for ``read_committed``, the first offset of a transaction that is still open."""
        opened = (entry.offset for entry in self.entries if transactions.is_open(entry.transaction))
        return min(opened, default=self.end) if committed else self.end

    def read(self, at: int, count: int, transactions: Transactions, *, committed: bool) -> list[Entry]:
        """Return up to ``count`` records from an offset on, as a consumer sees them."""
        limit = self.limit(transactions, committed=committed)
        return [
            entry
            for entry in self.entries
            if max(at, self.first) <= entry.offset < limit
            and (not committed or transactions.is_visible(entry.transaction))
        ][:count]

    def offset_of(self, time_ms: int) -> int:
        """Return the offset of the first record with this timestamp or a later one, or -1 if there is none."""
        found = (entry.offset for entry in self.entries if entry.offset >= self.first and entry.timestamp >= time_ms)
        return min(found, default=-1)

    def fail(self, at: int, codes: list[int]) -> None:
        """Let the next reads at ``at`` or a later offset meet errors, one each."""
        self._failures += [(at, code) for code in codes]

    @property
    def fails_at(self) -> int | None:
        """The offset at which a read meets the next error, if any."""
        return min((at for at, _ in self._failures), default=None)

    def take_failure(self) -> int:
        """Return the code of the next error, and forget it."""
        failure = min(self._failures, key=lambda each: each[0])
        self._failures.remove(failure)
        return failure[1]
