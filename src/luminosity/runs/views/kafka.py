"""Lines about steps that read or write Kafka."""

from __future__ import annotations

from collections.abc import Iterable

from luminosity._shared.text import format_bytes
from luminosity.events import KafkaView, Snapshot
from luminosity.runs.views import words

__all__ = ["lines", "of", "parts", "sentence"]


_SEPARATOR = " · "
_MOST_LABEL = 40  # characters
_MOST_LAGS = 3  # partitions named


def of(snapshot: Snapshot) -> list[KafkaView]:
    """Return all steps that read or write Kafka, in the pipeline's order."""
    return [view for stage in snapshot.stages for view in stage.kafka]


def parts(view: KafkaView) -> list[str]:
    """Return what is known about a step, the most important first.

    >>> from luminosity.events import PartitionLag
    >>> lags = (PartitionLag("reviews[3]", 800), PartitionLag("reviews[1]", 404), PartitionLag("reviews[0]", 0))
    >>> for part in parts(KafkaView("Read", "read", 12_345, 9_876_543, 101.5, 81_200, 0, 7, 12, 1450, 1204, 4, lags)):
    ...     print(part)
    lag 1,204
    7 lost
    age p50 12 ms, p99 1.4 s
    102/s, 81.2 kB/s
    most in reviews[3] 800, reviews[1] 404
    no dead letters
    >>> parts(KafkaView("Publish", "write", 2, 9, dead_letters=1))
    ['1 dead letter', '0/s']
    """
    said = [f"lag {words.number(view.lag)}"] if view.partitions else []
    if view.dead_letters:
        said.append(_letters(view))
    if view.lost:
        said.append(f"{words.number(view.lost)} lost")
    said += _times(view)
    said.append(_rate(view))
    if view.lag and view.partitions > 1:
        said.append(f"most in {_lags(view)}")
    return said if view.dead_letters else [*said, _letters(view)]


def lines(views: Iterable[KafkaView], width: int, most: int) -> list[str]:
    """Return a line for each step with as many parts as fit into ``width`` columns; the last one counts the rest.

    >>> publish = KafkaView("Publish", "write", 600, 9000, 10.2, 1500.0, p50_ms=90.0, p99_ms=200.0)
    >>> lines([publish], 64, 3)
    ['kafka Publish: latency p50 90 ms, p99 200 ms · 10/s, 1.5 kB/s']
    >>> lines([publish, publish, publish], 50, 2)
    ['kafka Publish: latency p50 90 ms, p99 200 ms', 'and 2 more steps with Kafka']
    """
    texts = [_line(view, width) for view in views]
    return texts if len(texts) <= most else [*texts[: most - 1], f"and {len(texts) - most + 1} more steps with Kafka"]


def sentence(view: KafkaView) -> str:
    """Return the sums and all parts in one line.

    >>> sentence(KafkaView("Publish", "write", 600, 9000, 10.2, 153.0, p50_ms=90.0, p99_ms=200.0))
    'Publish: 600 records, 9 kB · 10/s, 153 B/s · latency p50 90 ms, p99 200 ms · no dead letters'
    """
    said = [f"{words.number(view.records)} records, {format_bytes(view.bytes)}", _rate(view), *_times(view)]
    if view.partitions:
        where = "1 partition" if view.partitions == 1 else f"{words.number(view.partitions)} partitions"
        said.append(f"lag {words.number(view.lag)} in {where}")
    if view.lag and view.partitions > 1:
        said.append(f"most in {_lags(view)}")
    if view.lost:
        said.append(f"{words.number(view.lost)} lost")
    return f"{view.step}: {_SEPARATOR.join([*said, _letters(view)])}"


def _line(view: KafkaView, width: int) -> str:
    text = f"kafka {words.shortened(view.step, min(_MOST_LABEL, width // 3))}: "
    is_first = True
    for part in parts(view):
        more = part if is_first else _SEPARATOR + part
        if is_first or len(text) + len(more) <= width:
            text += more
            is_first = False
    return text


def _rate(view: KafkaView) -> str:
    if not view.records_per_second:
        return "0/s"
    return f"{words.rate(view.records_per_second)}, {format_bytes(round(view.bytes_per_second))}/s"


def _times(view: KafkaView) -> list[str]:
    if view.p50_ms is None or view.p99_ms is None:
        return []
    name = "age" if view.kind == "read" else "latency"
    return [f"{name} p50 {_time(view.p50_ms)}, p99 {_time(view.p99_ms)}"]


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else words.duration(milliseconds / 1000)


def _lags(view: KafkaView) -> str:
    return ", ".join(
        f"{each.partition} {words.number(each.records)}" for each in view.lags[:_MOST_LAGS] if each.records
    )


def _letters(view: KafkaView) -> str:
    if view.dead_letters == 1:
        return "1 dead letter"
    return f"{words.number(view.dead_letters)} dead letters" if view.dead_letters else "no dead letters"
