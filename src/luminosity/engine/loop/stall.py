"""What is known about a bundle that takes long, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from luminosity._shared.text import Private, duration
from luminosity.engine.workers.failure import describe_location

__all__ = ["Doing", "Stall", "headline"]

_STATES = {"stopped": "is stopped, by a signal or a debugger", "does not answer": "does not answer"}

Doing = Literal["element", "start", "finish", "setup", "loading", "nothing"]
"""What a bundle does: ``loading``: it waits for a model that is loaded; ``nothing``: its worker does not answer."""


@dataclass(frozen=True)
class Stall:
    """A bundle that takes long, and what its worker says about it."""

    doing: Doing
    seconds: float  # for which no step has taken or emitted an element
    is_stalled: bool  # False: it takes long, but may well do so
    step: str
    worker: str
    pid: int = 0  # 0 on a cluster
    node: str = ""
    state: str = ""  # of the worker's process, or of the one it waits for: "stopped" or "does not answer"
    waits_for: str = ""  # such as the name of a model
    location: str = ""  # file and line of the user's code
    stack: str = ""
    element: str = ""  # shortened; data, so that it must not be recorded

    def details(self) -> tuple[str, Private, str]:
        """Return the place, the element and the stack, each as lines that follow others, or empty."""
        place = f"\n  at {describe_location(self.location)}" if self.location else ""
        element = Private(f"\n  element: {self.element}" if self.element else "")
        stack = f"\n  stack (most recent call last):\n{self.stack}" if self.stack else ""
        return place, element, stack


def headline(stall: Stall) -> str:
    """Return in one line which step does not go on, for how long, and where.

    >>> headline(Stall("element", 42.0, True, "Parse", "w3", pid=1234))
    "step 'Parse' has worked on one element for 42 s, in worker w3 (pid 1234)"
    >>> headline(Stall("nothing", 42.0, True, "Parse", "w3", pid=1234, state="stopped"))
    "step 'Parse' has done nothing for 42 s: worker w3 (pid 1234) is stopped, by a signal or a debugger"
    """
    where = f"worker {stall.worker}"
    if stall.pid:
        where += f" (pid {stall.pid})"
    if stall.node:
        where += f" on node {stall.node[:8]}"
    took, state = duration(stall.seconds), _STATES.get(stall.state, stall.state)
    if stall.doing == "nothing":
        return f"step {stall.step!r} has done nothing for {took}: {where} {state}"
    words = {
        "element": "has worked on one element",
        "start": "has been in start_bundle",
        "finish": "has been in finish_bundle",
        "setup": "sets up",
        "loading": f"waits for {stall.waits_for} to be loaded",
    }[stall.doing]
    if stall.waits_for and stall.doing != "loading":
        words = f"has waited for {stall.waits_for}"
    return f"step {stall.step!r} {words} for {took}, in {where}" + (f": it {state}" if state else "")
