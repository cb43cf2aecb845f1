"""What the operations of simulated pipelines must give: computed with lists and dictionaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from apache_beam.transforms.window import IntervalWindow

from tests.engine.simulated.steps import MODULUS

__all__ = ["REFERENCE", "Element", "on_time", "watermarks", "window_of"]

Element = tuple[int, int, Any]  # a number, its time in microseconds, its window
_SECOND = 1_000_000


def window_of(second: int, size: int) -> IntervalWindow:
    """Return the window of a time, of windows of so many seconds."""
    start = second // size * size
    return IntervalWindow(start, start + size)


def watermarks(events: tuple[tuple[int, int], ...], *, is_late: bool) -> list[int]:
    """Return to which second the watermark of a TestStream moves after each three of its elements.

    It stays below all elements that are left, or, if some of them shall be late, 2 s behind the latest so far.
    """
    found = [0]
    for i in range(3, len(events) + 3, 3):
        moved = max(at for _, at in events[:i]) - 2 if is_late else min((at for _, at in events[i:]), default=0)
        found.append(max(found[-1], moved))
    return found[1:]


def on_time(events: tuple[tuple[int, int], ...], size: int, lateness: int) -> tuple[tuple[int, int], ...]:
    """Return the elements of a TestStream with late ones whose windows have not expired when they come."""
    before = [0, *watermarks(events, is_late=True)]
    return tuple(
        (number, at) for i, (number, at) in enumerate(events) if before[i // 3] < at // size * size + size + lateness
    )


def _end(inside: Any) -> int:
    return inside.max_timestamp().micros


def _groups(elements: Iterable[Element], n: int) -> dict[tuple[int, Any], list[int]]:
    groups: dict[tuple[int, Any], list[int]] = defaultdict(list)
    for number, _, inside in elements:
        groups[number % n, inside].append(number)
    return groups


def _squares(elements: list[Element], n: int) -> list[Element]:
    groups = _groups(elements, n).items()
    return [((key + sum((x + 1) ** 2 for x in xs)) % MODULUS, _end(w), w) for (key, w), xs in groups]


def _sessions(elements: list[Element], n: int) -> list[Element]:
    by_key: dict[int, list[tuple[int, int]]] = defaultdict(list)
    size = 0
    for number, at, inside in elements:
        by_key[number % n].append((-(-at // _SECOND) * _SECOND, number))
        size = (inside.end - inside.start).micros // _SECOND
    found: list[Element] = []
    for key, timed in by_key.items():
        sessions: list[tuple[int, list[int]]] = []
        for at, number in sorted(timed):
            numbers = sessions.pop()[1] if sessions and at < sessions[-1][0] else []
            sessions.append((at + n * _SECOND + _SECOND // 2, [*numbers, number]))
        for end, numbers in sessions:
            value = (key + sum((x + 1) ** 2 for x in numbers)) % MODULUS
            found.append((value, end - 1, window_of((end - 1) // _SECOND, size)))
    return found


def _by_window(elements: Iterable[Element]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = defaultdict(list)
    for number, _, inside in elements:
        found[inside].append(number)
    return found


def _with_totals(elements: list[Element], n: int) -> list[Element]:
    numbers = _by_window(elements)
    return [((x + n * sum(numbers[w])) % MODULUS, at, w) for x, at, w in elements]


def _with_every(elements: list[Element], n: int) -> list[Element]:
    sums = {w: sum(x for x in xs if x % n == 0) for w, xs in _by_window(elements).items()}
    return [((x + sums[w]) % MODULUS, at, w) for x, at, w in elements]


def _with_largest(elements: list[Element], n: int) -> list[Element]:
    largest = {key: max(xs) for key, xs in _groups(elements, n).items()}
    return [((x + largest[x % n, w]) % MODULUS, at, w) for x, at, w in elements]


REFERENCE: dict[str, Callable[[list[Element], int], list[Element]]] = {
    "map": lambda elements, n: [((3 * x + n) % MODULUS, at, w) for x, at, w in elements],
    "flat map": lambda elements, n: [((x + i) % MODULUS, at, w) for x, at, w in elements for i in range(x % n)],
    "flatten": lambda elements, n: elements + [((3 * x + n) % MODULUS, at, w) for x, at, w in elements],
    "reshuffle": lambda elements, n: elements,
    "group": _squares,
    "accumulate": _squares,
    "sessions": _sessions,
    "late": lambda elements, n: [(x, _end(w), w) for x, _, w in elements],
    "finalize": lambda elements, n: elements,
    "combine": lambda elements, n: [
        ((key + sum(xs)) % MODULUS, _end(w), w) for (key, w), xs in _groups(elements, n).items()
    ],
    "ungroup": lambda elements, n: [(x, _end(w), w) for x, _, w in elements],
    "count": lambda elements, n: [
        ((10 * (i + 1) + key) % MODULUS, _end(w), w)
        for (key, w), xs in _groups(elements, n).items()
        for i in range(len(xs))
    ],
    "position": lambda elements, n: [
        ((x + 50 * (i + 1)) % MODULUS, _end(w), w)
        for (_, w), xs in _groups(elements, n).items()
        for i, x in enumerate(xs)
    ],
    "gather": _squares,
    "batch": lambda elements, n: [(x, _end(w), w) for x, _, w in elements],
    "explode": lambda elements, n: [((x + i) % MODULUS, at, w) for x, at, w in elements for i in range(x % 6)],
    "constant": lambda elements, n: [((x + sum(range(n))) % MODULUS, at, w) for x, at, w in elements],
    "singleton": _with_totals,
    "iterable": _with_every,
    "dictionary": _with_largest,
}
