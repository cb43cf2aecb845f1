"""What the source registers for the end of the process, which tests do themselves: their server is gone by then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


class AtEnd:
    """Stands in for ``atexit``."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def register(self, function: Callable[..., Any], *args: Any) -> None:
        self.calls.append(partial(function, *args))


@pytest.fixture(autouse=True)
def at_end(monkeypatch: pytest.MonkeyPatch) -> AtEnd:
    from luminosity.io.pubsub import for_beam

    found = AtEnd()
    monkeypatch.setattr(for_beam, "atexit", found)
    return found
