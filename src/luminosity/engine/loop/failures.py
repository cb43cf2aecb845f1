"""What a failure means for a bundle: try it again, or end the run with a message that a person can act on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from luminosity._text import shorten_repr
from luminosity.engine.loop.bundle import Bundle, Search
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.workers.failure import ELEMENT_CHARACTERS, Failure, describe_location, name_cells
from luminosity.errors import ElementKillsWorker, SpillFailed, StepFailed

MAX_TRIES = 4

_LOGGER = logging.getLogger("luminosity")

# Keeps what a bundle holds, so that it can be run again; gives a line that says where. See loop/saving.py.
Save = Callable[[Bundle, Failure, int | None], str]


class Failures:
    """User code gets ``tries`` before the run ends. What failed is then given to ``save``, cut down to one element."""

    def __init__(self, codecs: Codecs, tries: int = MAX_TRIES, save: Save | None = None) -> None:
        self._codecs = codecs
        self._tries = tries
        self._save = save

    def after_exception(self, bundle: Bundle, failure: Failure, cause: BaseException | None) -> list[Bundle]:
        """The bundles to try in place of ``bundle``, in which user code raised."""
        if failure.is_full_disk:
            raise SpillFailed(
                failure.exception.partition(": ")[2], fix=failure.fix
            )  # trying again would find the same disk
        bundle.failures += 1
        step = failure.step or bundle.stage.plan.label
        if bundle.search is None and bundle.failures < self._tries:
            _LOGGER.warning("step %r failed, try %d of %d: %s", step, bundle.failures, self._tries, failure.exception)
            return [bundle]
        if bundle.search is not None and bundle.pieces > 1:
            return _in_halves(bundle, bundle.search.error)
        times = f" {self._tries} times" if self._tries > 1 else ""
        lines = [f"step {step!r} failed{times}: {failure.exception}"]
        headline = lines[0]
        if failure.location:
            place = describe_location(failure.location)
            headline += f" (at {place})"
            lines.append(f"  at {place}")
        if failure.exception.startswith("BdbQuit"):
            lines.append("  breakpoint() works with --debug, which runs everything in one process")
        if failure.element:
            lines.append(f"  element: {failure.element}")
        if self._save is not None:
            lines.append(self._save(bundle, failure, None))
        # The summary comes last: that is what is left on the screen.
        trace = name_cells(failure.traceback)
        message = f"{failure.exception}\n\nThe worker's traceback:\n{trace}\n" + "\n".join(lines)
        error = StepFailed(message, headline=headline, fix=failure.fix)
        error.__cause__ = cause
        if self._save is None or bundle.pieces < 2:
            raise error
        _LOGGER.warning("step %r failed%s; its bundle is cut down to the element to save", step, times)
        return _in_halves(bundle, error)

    def after_commit(self, bundle: Bundle) -> None:
        """Where a bundle failed but none of its parts do, that is an end, too."""
        if bundle.search is not None:
            bundle.search.parts -= 1
            if not bundle.search.parts:
                raise bundle.search.error

    def after_death(self, bundle: Bundle, exit_code: int, was_alone: bool) -> list[Bundle]:
        """The bundles to try in place of ``bundle``, whose worker ended; not one of the user's tries."""
        bundle.stage.size.shrink()
        if not was_alone:
            bundle.is_suspect = True
            return [bundle]
        if bundle.pieces > 1:
            return _in_halves(bundle, bundle.search.error) if bundle.search is not None else bundle.halves()
        bundle.deaths += 1
        if bundle.deaths < MAX_TRIES:
            return [bundle]
        stage, element = bundle.stage.plan, _only_element(bundle, self._codecs)
        lines = [
            f"the worker {describe_exit(exit_code)} each of the {MAX_TRIES} times that it ran one element",
            f"  of step {stage.label!r} ({', '.join(stage.steps)})",
            f"  element: {element}",
            "Likely causes: it runs out of memory (the kernel kills it), or a native library crashes on it.",
        ]
        if self._save is not None:
            failure = Failure(f"the worker {describe_exit(exit_code)}", "", stage.label, element=element)
            lines.append(self._save(bundle, failure, exit_code))
        raise ElementKillsWorker("\n".join(lines))


def _in_halves(bundle: Bundle, error: StepFailed) -> list[Bundle]:
    """Both halves are tried once; ``error`` ends the run if neither fails."""
    halves = bundle.halves()
    search = Search(error, len(halves))
    for half in halves:
        half.search = search
    return halves


def describe_exit(code: int) -> str:
    """
    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with code 3')
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _only_element(bundle: Bundle, codecs: Codecs) -> str:
    for read in bundle.stage.plan.reads:
        for block in bundle.inputs.get(read.transform_id, ()):
            return shorten_repr(codecs.impl(read.coder_id).decode_nested(block.data()).value, ELEMENT_CHARACTERS)
    return f"a timer of {', '.join(family for _, family in bundle.timers)}"
