"""Windows and triggers of a grouping in words."""

from __future__ import annotations

from typing import Any

from apache_beam.transforms import trigger, window
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import AccumulationMode, TriggerFn

__all__ = ["when_in_words", "windows_in_words"]


def windows_in_words(windowing: Windowing) -> str:
    """Return the windows of a PCollection.

    >>> windows_in_words(Windowing(window.FixedWindows(5))), windows_in_words(Windowing(window.SlidingWindows(60, 10)))
    ('fixed windows of 5 s', 'sliding windows of 60 s every 10 s')
    >>> windows_in_words(Windowing(window.Sessions(30))), windows_in_words(Windowing(window.GlobalWindows()))
    ('sessions with gaps of 30 s', 'the global window')
    """
    windows: Any = windowing.windowfn
    if isinstance(windows, window.GlobalWindows):
        return "the global window"
    if isinstance(windows, window.FixedWindows):
        return f"fixed windows of {_seconds(windows.size)}"
    if isinstance(windows, window.SlidingWindows):
        return f"sliding windows of {_seconds(windows.size)} every {_seconds(windows.period)}"
    if isinstance(windows, window.Sessions):
        return f"sessions with gaps of {_seconds(windows.gap_size)}"
    return f"windows of {type(windows).__name__}"


def when_in_words(windowing: Windowing) -> str:
    """Return when a grouping of a stream emits the values of a window, and what happens to late ones.

    >>> when_in_words(Windowing(window.FixedWindows(5)))
    'when a window ends'
    >>> when_in_words(Windowing(window.GlobalWindows()))
    'when the stream ends'
    >>> early = trigger.AfterWatermark(early=trigger.AfterProcessingTime(10), late=trigger.AfterCount(1))
    >>> when_in_words(Windowing(window.FixedWindows(60), early, AccumulationMode.ACCUMULATING, allowed_lateness=30))
    'when a window ends (before: again and again 10 s after an element; late: again and again after 1 element), with all values so far each time; late elements count for 30 s'
    """  # noqa: E501
    triggerfn: Any = windowing.triggerfn
    end = "when the stream ends" if isinstance(windowing.windowfn, window.GlobalWindows) else "when a window ends"
    parts = [_trigger(triggerfn, end)]
    lateness = windowing.allowed_lateness.micros / 1e6
    fires_once = isinstance(triggerfn, trigger.DefaultTrigger) and not lateness
    if windowing.accumulation_mode == AccumulationMode.ACCUMULATING and not fires_once:
        parts.append(", with all values so far each time")
    if lateness:
        parts.append(f"; late elements count for {_seconds(lateness)}")
    return "".join(parts)


def _trigger(triggerfn: TriggerFn, end: str) -> str:
    """Return when a trigger fires. ``end`` says when a window ends."""
    found: Any = triggerfn
    match found:
        case trigger.DefaultTrigger():
            return end
        case trigger.AfterWatermark():
            around = {"before": found.early, "late": found.late}
            parts = [f"{name}: {_trigger(inner, end)}" for name, inner in around.items() if inner is not None]
            return f"{end} ({'; '.join(parts)})" if parts else end
        case trigger.AfterProcessingTime():
            return f"{_seconds(found.delay)} after an element" if found.delay else "soon after an element"
        case trigger.AfterCount():
            return f"after {found.count:,} element{'s' if found.count != 1 else ''}"
        case trigger.Always():
            return "with every element"
        case trigger.Repeatedly():
            return f"again and again {_trigger(found.underlying, end)}"
        case trigger.OrFinally():
            main, last = found.triggers
            return f"{_trigger(main, end)}, until {_trigger(last, end)}"
        case trigger.AfterAny() | trigger.AfterAll() | trigger.AfterEach():
            words = {trigger.AfterAny: " or ", trigger.AfterAll: " and ", trigger.AfterEach: ", then "}[type(found)]
            return words.join(_trigger(inner, end) for inner in found.triggers)
        case _:
            return f"as {found!r} says"


def _seconds(duration: Any) -> str:
    """
    >>> _seconds(0.5), _seconds(60)
    ('0.5 s', '60 s')
    """
    seconds = duration.micros / 1e6 if hasattr(duration, "micros") else float(duration)
    return f"{seconds:,.6g} s"
