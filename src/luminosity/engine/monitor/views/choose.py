"""Which view a run gets."""

from __future__ import annotations

from luminosity.engine.monitor.events import Subscriber
from luminosity.engine.monitor.views import live
from luminosity.engine.monitor.views.plain import PlainView


def is_live(mode: str) -> bool:
    return mode == "auto" and live.is_possible()


def view(mode: str) -> Subscriber | None:
    """For ``--progress=mode``."""
    if mode == "off":
        return None
    return live.LiveView() if is_live(mode) else PlainView()
