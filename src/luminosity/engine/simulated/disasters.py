"""What goes wrong in a simulated run, as a list: a failing run is made smaller by leaving some of it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Disaster", "Weather"]


@dataclass(frozen=True)
class Disaster:
    """One thing that goes wrong, once the loop has taken so many messages.

    ======================  =============================================================================
    kind                    what happens
    ======================  =============================================================================
    kill worker             a worker that is connected dies, with all that it runs
    kill busy worker        the same, of those that run a bundle
    kill starting worker    the next worker that starts dies before it is ready
    freeze worker           a worker does nothing for ``amount`` seconds
    slow worker             a worker takes ``amount`` times as long from now on
    jump clock              the wall time jumps by ``amount`` seconds
    kill driver             the run's own process dies, and is started again from its checkpoint
    lose power              the same, and only what was synced is left
    stop driver             the run is asked to stop, and started again
    fail disk               writes and syncs of the checkpoint fail for ``amount`` seconds
    fill disk               nothing can be spilled for ``amount`` seconds
    slow disk               each sync takes ``amount`` seconds from now on
    raise                   the next element at which a step looks raises, ``amount`` times
    kill at element         the next element at which a step looks kills its worker
    leave                   a worker's machine will be gone soon: it gets no more bundles
    ======================  =============================================================================
    """

    kind: str
    message: int
    amount: float = 0.0
    choice: int = 0  # which of the workers there are, counted round and round


@dataclass(frozen=True)
class Weather:
    """How a simulated world is all the time. Every value may be 0."""

    delay_s: float = 0.002  # the longest delay of most messages
    far_delay_s: float = 0.0  # of some
    far_part: float = 0.0  # how many these are
    element_s: float = 0.001  # how long most elements take
    slow_part: float = 0.0  # of the elements take ``slow_s``
    slow_s: float = 0.0
    start_s: float = 0.1  # the longest start of a worker
    loop_s: float = 1e-6  # a look of the loop at its clock: a slow driver
    stall_part: float = 0.0  # of these looks take ``stall_s``: the machine has stopped the driver for a moment
    stall_s: float = 0.03
    block: int = 4  # elements in a block of output, at most
    may_reorder: bool = False  # whether messages overtake each other as far as the protocol allows
    disasters: Sequence[Disaster] = field(default=())
