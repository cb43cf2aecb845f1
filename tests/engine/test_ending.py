"""Tests of waiting for the end of a run while Ctrl-C is pressed."""

from __future__ import annotations

import sys
import threading
from typing import Any

from luminosity.engine.process import Ending


def interrupt(ending: Ending, step: int) -> bool:
    """Wait, with Ctrl-C at this step of the Python code. Return False if there are fewer steps."""
    left = step

    def trace(*_: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ending.wait(0.001)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_after_ctrl_c_at_any_moment_the_end_can_be_set_and_waited_for() -> None:
    steps = 0
    while interrupt(ending := Ending(), steps + 1):
        steps += 1
        telling = threading.Thread(target=ending.set, daemon=True)
        telling.start()
        telling.join(60)
        assert not telling.is_alive(), f"Ctrl-C at step {steps} left a lock behind"
        assert ending.wait(60)
    assert steps > 5
