"""Counts for a run: merged metrics of committed bundles, what bundles used, and the busy time of stages and workers."""

from __future__ import annotations

import marshal
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from apache_beam import coders
from apache_beam.metrics import monitoring_infos
from apache_beam.portability.api import metrics_pb2

from luminosity.engine.data.saved_rows import Changes
from luminosity.engine.data.world import Clock

__all__ = ["DROPPED_LATE", "LETTERS", "NAMESPACE", "BundleSample", "BusyTime", "RunMetrics", "StageUsage"]

LETTERS = "dead_letters"  # the counter of elements that were passed by because a step failed at them
DROPPED_LATE = "dropped_late"  # the counter of elements that came later than their windows allow
NAMESPACE = "luminosity"  # of the counters below
_MOST_PENDING = 16  # bundles whose metrics are not merged yet: enough for a burst, and responses may be large

_MOST_SAMPLED = 64  # bundles of a stage: enough for a spread, small in a record

_LABELS = struct.Struct(">I")  # the key of the row with the labels of a metric: its number
_Info = metrics_pb2.MonitoringInfo
_STRINGS: Any = coders.IterableCoder(coders.StrUtf8Coder())
_NUMBER: Any = coders.VarIntCoder().get_impl()


def _merge_string_sets(old: _Info, new: _Info) -> bytes:
    both = monitoring_infos.extract_string_set_value(old) | monitoring_infos.extract_string_set_value(new)
    return _STRINGS.encode(list(both))


def _merge_tries(old: _Info, new: _Info) -> bytes:
    both = monitoring_infos.extract_bounded_trie_value(old).combine(monitoring_infos.extract_bounded_trie_value(new))
    return both.to_proto().SerializeToString()


def _gauge(info: _Info) -> tuple[float, int]:
    """Return when a gauge was set, and its value."""
    return monitoring_infos.extract_gauge_value(info)  # pyright: ignore[reportUnknownMemberType]


def _merge_distributions(old: _Info, new: _Info) -> bytes:
    return monitoring_infos.distribution_payload_combiner(old.payload, new.payload)


# Beam's own merging knows only counters and distributions. It would keep values of the others side by side and show
# one. Counters, by far the most frequent, are added without a message, and of gauges the latest payload is kept.
_COMBINERS: dict[str, Callable[[_Info, _Info], bytes]] = {
    monitoring_infos.DISTRIBUTION_INT64_TYPE: _merge_distributions,
    monitoring_infos.STRING_SET_TYPE: _merge_string_sets,
    monitoring_infos.BOUNDED_TRIE_TYPE: _merge_tries,
}


def _key(info: _Info) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return what tells a metric of a stage from the others."""
    return info.urn, frozenset(info.labels.items())


class _Merged:
    """One metric of a stage, over all its committed bundles.

    A message keeps every payload that it ever had in memory until the message itself is freed. So the sum of a counter
    is a number, and any other merged value gets a new message.
    """

    def __init__(self, info: _Info) -> None:
        # A copy: an info of a response keeps the whole response in memory.
        self._info = _Info.FromString(info.SerializeToString())
        self._is_counter = info.type == monitoring_infos.SUM_INT64_TYPE
        self.name: str = info.labels.get(monitoring_infos.NAME_LABEL, "")
        self.step: str = info.labels.get(monitoring_infos.PTRANSFORM_LABEL, "")
        self.namespace: str = info.labels.get(monitoring_infos.NAMESPACE_LABEL, "")
        self.pcollection: str = info.labels.get(monitoring_infos.PCOLLECTION_LABEL, "")
        self.urn: str = info.urn
        self.count: int = _NUMBER.decode(info.payload) if self._is_counter else 0  # of a counter
        self._payload: bytes = info.payload
        self._gauge = _gauge(info) if info.type == monitoring_infos.LATEST_INT64_TYPE else None

    @property
    def number(self) -> int | None:
        """The value of a counter or gauge; None for other kinds."""
        return self.count if self._is_counter else None if self._gauge is None else self._gauge[1]

    def add(self, info: _Info) -> None:
        """Merge the metric of one more bundle."""
        if self._is_counter:
            self.count += _NUMBER.decode(info.payload)
        elif self._gauge is not None:
            gauge = _gauge(info)
            if gauge[0] >= self._gauge[0]:
                self._gauge = gauge
                self._payload = info.payload
        elif info.type in _COMBINERS:
            self._info = self._with(_COMBINERS[info.type](self._info, info))
        else:
            self._info = _Info.FromString(info.SerializeToString())

    def info(self) -> _Info:
        """Return the metric as Beam's message."""
        if self._is_counter:
            return self._with(_NUMBER.encode(self.count))
        return self._info if self._gauge is None else self._with(self._payload)

    def restore(self, value: int | bytes) -> None:
        """Set the value that :meth:`value` returned before a restart."""
        if isinstance(value, int):
            self.count = value
        else:
            self._info = self._with(value)
            self._payload = value
            self._gauge = _gauge(self._info) if self._gauge is not None else None

    @property
    def value(self) -> int | bytes:
        """The value alone, without the labels."""
        if self._is_counter:
            return self.count
        return self._info.payload if self._gauge is None else self._payload

    def _with(self, payload: bytes) -> _Info:
        info = _Info()
        info.CopyFrom(self._info)
        info.payload = payload
        return info


class RunMetrics:
    """The merged metrics of all committed bundles; a retried bundle counts once. Any thread may use it.

    Merging costs more than the rest of a commit. So metrics are merged when the loop has nothing else to do
    (:meth:`merge_one`), when they are asked for, or when too many wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[str, Iterable[_Info]]] = deque()  # of bundles: stage and metrics
        self._by_stage: dict[str, dict[Any, _Merged]] = {}
        self._changed: set[str] = set()  # stages, since the last checkpoint
        self._saved: dict[str, int] = {}  # how many metrics of a stage have their labels in the checkpoint

    def add(self, stage: str, infos: Iterable[_Info]) -> None:
        """Take the metrics of a committed bundle, which are added to those of its stage. Takes over the messages."""
        with self._lock:
            self._pending.append((stage, infos))
            while len(self._pending) > _MOST_PENDING:
                self._merge_first()

    def merge_one(self) -> bool:
        """Merge the metrics of one bundle. Returns whether there were any."""
        with self._lock:
            if not self._pending:
                return False
            self._merge_first()
            return True

    def _merge_first(self) -> None:
        stage, infos = self._pending.popleft()
        known = self._by_stage.setdefault(stage, {})
        self._changed.add(stage)
        for info in infos:
            key = _key(info)
            if (merged := known.get(key)) is None:
                known[key] = _Merged(info)
            else:
                merged.add(info)

    def _merge_all(self) -> None:
        while self._pending:
            self._merge_first()

    def save(self, changes: Changes, owner_of: Callable[[str], str]) -> None:
        """Add what has changed to a checkpoint. Labels are written once, values together."""
        with self._lock:
            self._merge_all()
            changed, self._changed = self._changed, set()
            for stage in changed:
                metrics, owner = list(self._by_stage[stage].values()), owner_of(stage)
                for number in range(self._saved.get(stage, 0), len(metrics)):
                    changes.put(owner, _LABELS.pack(number), metrics[number].info().SerializeToString())
                self._saved[stage] = len(metrics)
                changes.put(owner, b"", marshal.dumps([metric.value for metric in metrics]))

    def restore(self, stage: str, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Put back the metrics of a stage, given the keys and values that :meth:`save` has written."""
        with self._lock:
            values, known = list[int | bytes](), self._by_stage.setdefault(stage, {})
            for key, row in rows:
                if not key:
                    values = marshal.loads(row)
                else:
                    info = _Info.FromString(row)
                    known[_key(info)] = _Merged(info)
            for metric, value in zip(known.values(), values, strict=True):
                metric.restore(value)
            self._saved[stage] = len(known)

    def count_dropped(self, stage: str, step: str, elements: int) -> None:
        """Count elements that a step dropped because they came later than their windows allow."""
        self.count(DROPPED_LATE, stage, step, elements)

    def count(self, name: str, stage: str, step: str, elements: int) -> None:
        """Count elements of a step in a counter of ours."""
        self.add(stage, [monitoring_infos.int64_user_counter(NAMESPACE, name, elements, ptransform=step)])

    def dropped(self, stage: str) -> int:
        """Return how many elements were dropped before or in a stage because they came too late."""
        by_step = self.counters(stage, (DROPPED_LATE,)).values()
        return sum(namespaces.get(NAMESPACE, {}).get(DROPPED_LATE, 0) for namespaces in by_step)

    def elements(self, stage: str) -> int:
        """Return the number of elements in the largest PCollection of a stage."""
        with self._lock:
            self._merge_all()
            metrics = self._by_stage.get(stage, {}).values()
            counts = [metric.count for metric in metrics if metric.urn == monitoring_infos.ELEMENT_COUNT_URN]
        return max(counts, default=0)

    def of_steps(self, stage: str) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds that workers spent in each step of a stage, and the elements of each PCollection."""
        seconds: dict[str, float] = {}
        elements: dict[str, int] = {}
        with self._lock:
            self._merge_all()
            for metric in self._by_stage.get(stage, {}).values():
                if metric.urn == monitoring_infos.TOTAL_MSECS_URN:
                    seconds[metric.step] = metric.count / 1000
                elif metric.urn == monitoring_infos.ELEMENT_COUNT_URN:
                    elements[metric.pcollection] = metric.count
        return seconds, elements

    def counters(self, stage: str, names: Collection[str]) -> dict[str, dict[str, dict[str, int]]]:
        """Return the user counters with these names, by step and namespace."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        with self._lock:
            self._merge_all()
            for metric in self._by_stage.get(stage, {}).values():
                if metric.urn == monitoring_infos.USER_COUNTER_URN and metric.name in names:
                    of_namespace = found.setdefault(metric.step, {}).setdefault(metric.namespace, {})
                    of_namespace[metric.name] = of_namespace.get(metric.name, 0) + metric.count
        return found

    def count_of(self, namespace: str, name: str) -> int:
        """Return the sum of a user counter over all stages."""
        with self._lock:
            self._merge_all()
            every = [metric for metrics in self._by_stage.values() for metric in metrics.values()]
        return sum(metric.count for metric in every if (metric.namespace, metric.name) == (namespace, name))

    def numbers(self, stage: str, namespaces: Collection[str]) -> dict[tuple[str, str], dict[str, int]]:
        """Return counters and gauges in these namespaces, by step and namespace."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        with self._lock:
            self._merge_all()
            for metric in self._by_stage.get(stage, {}).values():
                if metric.namespace in namespaces and (number := metric.number) is not None:
                    found.setdefault((metric.step, metric.namespace), {})[metric.name] = number
        return found

    def by_stage(self) -> dict[str, list[_Info]]:
        """Return all metrics by stage id."""
        with self._lock:
            self._merge_all()
            return {stage: [metric.info() for metric in known.values()] for stage, known in self._by_stage.items()}


@dataclass
class StageUsage:
    """Sums over the attempts of a stage's bundles since the run started. Only the loop's thread uses it."""

    failed: int = 0  # attempts, because user code raised or because the worker was lost
    cpu_seconds: float = 0.0  # this and the following: of committed bundles
    peak_resident: int = 0
    output_bytes: int = 0

    def __post_init__(self) -> None:
        self.sample = BundleSample(_MOST_SAMPLED)

    def committed(self, seconds: float, elements: int, cpu_seconds: float, resident: int, output_bytes: int) -> None:
        """Count a committed bundle."""
        self.cpu_seconds += cpu_seconds
        self.peak_resident = max(self.peak_resident, resident)
        self.output_bytes += output_bytes
        self.sample.add(seconds, elements)


class BundleSample:
    """Seconds and elements of at most ``most`` bundles, each of which is kept with the same chance.

    The choice is the same in every run with the same number of bundles.

    >>> sample = BundleSample(most=2)
    >>> for number in range(100):
    ...     sample.add(seconds=number / 10, elements=number)
    >>> len(sample.kept), all(seconds == elements / 10 for seconds, elements in sample.kept)
    (2, True)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen = 0
        self._random = random.Random(0)
        self.kept: list[tuple[float, int]] = []

    def add(self, seconds: float, elements: int) -> None:
        """Note one more bundle."""
        self._seen += 1
        if len(self.kept) < self._most:
            self.kept.append((seconds, elements))
        elif (place := self._random.randrange(self._seen)) < self._most:
            self.kept[place] = seconds, elements


class BusyTime:
    """Measures how long bundles run, also if several run at once. Only the loop's thread uses it."""

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self._running = 0
        self._counted_until = 0.0
        self._summed = 0.0
        self._spanned = 0.0
        self._began_at: float | None = None
        self._ended_at: float | None = None

    def begin(self) -> None:
        """Note that a bundle starts."""
        self._count()
        self._running += 1
        if self._began_at is None:
            self._began_at = self._counted_until

    def end(self) -> None:
        """Note that a bundle ends."""
        self._count()
        self._running -= 1
        self._ended_at = self._counted_until

    @property
    def seconds(self) -> float:
        """The seconds summed over all bundles, including those that run now."""
        self._count()
        return self._summed

    @property
    def spanned_seconds(self) -> float:
        """The seconds in which at least one bundle ran."""
        self._count()
        return self._spanned

    @property
    def first_to_last_seconds(self) -> float:
        """The seconds from the first begin to the last end. Metrics of ended bundles stem from this time."""
        return 0.0 if self._began_at is None or self._ended_at is None else self._ended_at - self._began_at

    def _count(self) -> None:
        now = self._monotonic()
        if self._running:
            self._summed += self._running * (now - self._counted_until)
            self._spanned += now - self._counted_until
        self._counted_until = now
