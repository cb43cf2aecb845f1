"""Steps for sinks of streams: commit panes in the order of windows, and remove files of rows that came too late."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.coders import PickleCoder, StrUtf8Coder
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.utils.timestamp import Duration, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.io.writing import filesystem

__all__ = ["CommitPanes", "PaneCommitter", "PaneOf", "PaneOfElement", "RemoveDropped", "pane_of"]

_MOMENT = Duration(micros=1000)  # a timer at the very end of a window fires before its last pane is out
_END = GlobalWindow().max_timestamp()


class PaneOf(NamedTuple):
    """A pane of a window, or a part of one, with the content that is committed."""

    window: Any
    timestamp: Timestamp
    number: int  # among the panes of its window
    content: Any

    @property
    def version(self) -> tuple[int, int]:
        """Panes with larger versions replace what this one writes."""
        return self.window.end.micros, self.number


def pane_of(window: Any, timestamp: Timestamp, pane: Any, content: Any) -> tuple[bytes, Any]:
    """Return the input of :class:`CommitPanes`: all panes have the same key, whose coder is deterministic."""
    return b"", PaneOf(window, timestamp, pane.index, content)


class PaneOfElement(beam.DoFn):
    """Makes the input of :class:`CommitPanes` from the output of a GroupByKey: an element is what a pane has."""

    def process(
        self,
        element: Any,
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
        pane: Any = beam.DoFn.PaneInfoParam,
    ) -> Iterator[tuple[bytes, Any]]:
        """Add window and pane."""
        yield pane_of(window, timestamp, pane, element)


class PaneCommitter(ABC):
    """Commits panes to a store in which each row has a key."""

    @abstractmethod
    def commit(self, content: Any, newer: Collection[Hashable]) -> tuple[list[Any], Collection[Hashable]]:
        """Write rows, except those whose key is in ``newer``. Returns the output, and the keys that were written.

        May be called again with the same arguments, after it was killed at any point.
        """


class CommitPanes(beam.PTransform[Any, Any]):
    """Commits panes one after the other. A row never replaces one that a later window has written.

    Panes of several windows may be on their way at once, and a late pane comes when later windows are written. So one
    stateful step remembers the keys of each window until no earlier window can have another pane.
    """

    def __init__(self, committer: PaneCommitter, windowing: Windowing) -> None:
        """``windowing`` is that of the panes. The output is in their windows."""
        super().__init__()
        self._committer = committer
        self._windowing = windowing

    def expand(self, input_or_inputs: Any) -> Any:
        """Commit what :func:`pane_of` made of each pane."""
        step = _Commit(self._committer, self._windowing.allowed_lateness)
        panes = input_or_inputs | "Global" >> beam.WindowInto(GlobalWindows()).with_output_types(tuple[bytes, Any])
        return panes | "InOrder" >> _InWindows(step, self._windowing)


class _InWindows(beam.ParDo):
    """A ParDo whose output is in the windows that its elements say."""

    def __init__(self, step: beam.DoFn, windowing: Windowing) -> None:
        super().__init__(step)
        self._output_windowing = windowing

    def get_windowing(self, inputs: Any) -> Windowing:
        return self._output_windowing


_LAST = beam.DoFn.StateParam(ReadModifyWriteStateSpec("last", PickleCoder()))
_KEYS = beam.DoFn.StateParam(BagStateSpec("keys", PickleCoder()))
_VERSIONS = beam.DoFn.StateParam(BagStateSpec("versions", PickleCoder()))
_FORGET_SPEC = TimerSpec("forget", TimeDomain.WATERMARK)
_FORGET = beam.DoFn.TimerParam(_FORGET_SPEC)


class _Commit(beam.DoFn):
    def __init__(self, committer: PaneCommitter, lateness: Any) -> None:
        self._committer = committer
        self._lateness = Duration.of(lateness)

    def process(
        self,
        element: tuple[bytes, Any],
        last: Any = _LAST,
        keys: Any = _KEYS,
        versions: Any = _VERSIONS,
        forget: Any = _FORGET,
    ) -> Iterator[WindowedValue]:
        pane: PaneOf = element[1]
        before, newer = last.read(), set[Hashable]()
        if before is not None and pane.version < before:
            newer = {key for version, written in keys.read() if version > pane.version for key in written}
        output, written = self._committer.commit(pane.content, newer)
        if before is None or pane.version > before:
            last.write(pane.version)
        if pane.window.end < _END:  # Nothing is later than the global window.
            keys.add((pane.version, tuple(written)))
            versions.add(pane.version)
            at = pane.window.end + self._lateness + _MOMENT
            forget.set(at, dynamic_timer_tag=str(at.micros))
        for value in output:
            yield WindowedValue(value, pane.timestamp, (pane.window,))

    @on_timer(_FORGET_SPEC)
    def forget_keys(
        self,
        at: Any = beam.DoFn.TimestampParam,
        keys: Any = _KEYS,
        versions: Any = _VERSIONS,
    ) -> None:
        """Forget the keys of windows before which no pane can come. They are read only if that removes half of them."""
        known = list(versions.read())
        kept = [version for version in known if Timestamp(micros=version[0]) + self._lateness + _MOMENT > at]
        if 2 * len(kept) > len(known):
            return
        still = [entry for entry in keys.read() if entry[0] in kept]
        for state, entries in ((keys, still), (versions, kept)):
            state.clear()
            for entry in entries:
                state.add(entry)


class RemoveDropped(beam.PTransform[Any, Any]):
    """Removes temporary files of rows that came too late: the grouping by pane drops them, so that nothing names them.

    The input are two PCollections: the names of all files, each in the window of its rows, and what was published. The
    watermark of the second tells when no pane of a window is on its way.
    """

    def __init__(self, lateness: Any, *, is_durable: bool) -> None:
        """Remove files once their windows have expired by ``lateness``.

        With ``is_durable``, they go once the checkpoint can't be lost: a run that goes on from before it needs them.
        """
        super().__init__()
        self._lateness = lateness
        self._is_durable = is_durable

    def expand(self, input_or_inputs: Any) -> Any:
        """Remember each file until its window has expired, and remove it if it is still there."""
        files, published = input_or_inputs
        by_expiry = files | "ByExpiry" >> beam.ParDo(_ByExpiry(self._lateness)).with_output_types(tuple[str, str])
        nothing = published | "Nothing" >> beam.FlatMap(lambda _: ()).with_output_types(tuple[str, str])
        both = (
            by_expiry | "GlobalFiles" >> beam.WindowInto(GlobalWindows()),
            nothing | "GlobalNothing" >> beam.WindowInto(GlobalWindows()),
        )
        expired = both | "Flatten" >> beam.Flatten() | "Expire" >> beam.ParDo(_Expire()).with_output_types(str)
        return expired | "Remove" >> (
            beam.ParDo(_RemoveLater()) if self._is_durable else beam.Map(filesystem.remove_file)
        )


class _ByExpiry(beam.DoFn):
    def __init__(self, lateness: Any) -> None:
        self._lateness = Duration.of(lateness)

    def process(self, element: str, window: Any = beam.DoFn.WindowParam) -> Iterator[tuple[str, str]]:
        yield str((window.end + self._lateness + _MOMENT).micros), element


_PATHS = beam.DoFn.StateParam(BagStateSpec("paths", StrUtf8Coder()))
_REMOVE_SPEC = TimerSpec("remove", TimeDomain.WATERMARK)
_REMOVE = beam.DoFn.TimerParam(_REMOVE_SPEC)


class _Expire(beam.DoFn):
    def process(self, element: tuple[str, str], paths: Any = _PATHS, remove: Any = _REMOVE) -> None:
        expiry, path = element
        paths.add(path)
        remove.set(Timestamp(micros=int(expiry)))

    @on_timer(_REMOVE_SPEC)
    def expire(self, paths: Any = _PATHS) -> Iterator[str]:
        yield from list(paths.read())
        paths.clear()


class _RemoveLater(beam.DoFn):
    def process(self, element: str, finalizer: Any = beam.DoFn.BundleFinalizerParam) -> None:
        finalizer.register(partial(filesystem.remove_file, element))
