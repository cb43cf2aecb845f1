"""Decides what follows a failure: retry the bundle, or end the run with a message that says what to do."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

from luminosity._shared.notebook import name_cells
from luminosity._shared.text import LOST_WITH_FORK_SERVER, LOST_WITH_NODE, describe_exit
from luminosity._shared.user_code import fold, from_user_code
from luminosity.engine.loop.bundle import Bundle, Overdue, Search, slice_blocks
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.process import explain_exit, oom_kills
from luminosity.engine.workers.failure import Failure, describe_input, describe_location
from luminosity.engine.workers.sdk.bundle_report import headline
from luminosity.errors import BlockLost, ElementKillsWorker, ElementTimeout, Fix, SpillFailed, StepFailed

__all__ = ["MAX_ATTEMPTS", "Failures", "Save"]

_LOGGER = logging.getLogger(__name__)

MAX_ATTEMPTS = 4  # as Dataflow makes for a batch bundle

_TIMEOUT_FIX = Fix(
    "make the step faster or let it give up by itself, or pass a longer --element_timeout",
    command="use a longer --element_timeout",
)
_WHOLE = "(Frames of Beam and Luminosity are left out; error.traceback has them, and `lum show last --traceback`.)"
_FIXES: tuple[tuple[re.Pattern[str], str], ...] = (  # for exceptions of Python, by their text
    (re.compile(r"^BdbQuit"), "run with --debug: breakpoint() works only if everything runs in one process"),
    (
        re.compile(r"^PicklingError: .* on __main__ failed$"),
        "move what it names from your script or notebook into a module: processes that a step starts look for its name",
    ),
)

# Saves a failed bundle so that it can be replayed, given the failure and the worker's exit code, if it exited. Returns
# a line for the error message that says where. See debugging/saving.py.
Save = Callable[[Bundle, Failure, int | None], str]


class Failures:
    """Decides how often bundles are retried.

    A bundle in which user code raises is attempted ``attempts`` times before the run ends; only once if the worker
    reports that another attempt can't succeed (:func:`luminosity.errors.may_pass`). If ``save`` is given, the bundle is
    then cut in halves until the one element is found that fails alone, and that element is saved. If ``passes_by``, one
    more attempt passes the elements by at which a step fails.
    """

    def __init__(
        self,
        codecs: Codecs,
        attempts: int = MAX_ATTEMPTS,
        save: Save | None = None,
        element_timeout: float | None = None,
        *,
        passes_by: bool = False,
    ) -> None:
        self._codecs = codecs
        self._element_timeout = element_timeout or 0.0
        self._attempts = attempts
        self._save = save
        self._passes_by = passes_by
        self._oom_kills = oom_kills()

    def after_exception(self, bundle: Bundle, failure: Failure, cause: BaseException | None) -> list[Bundle]:
        """Return the bundles to run in place of ``bundle``, in which user code raised.

        Raises ``StepFailed`` if there are no attempts left, or none of them could succeed.
        """
        if failure.is_full_disk:
            # A retry would find the same disk.
            raise SpillFailed(failure.exception.partition(": ")[2], fix=failure.fix)
        bundle.failures += 1
        step = failure.step or bundle.stage.plan.label
        if bundle.search is None and failure.may_pass and bundle.failures < self._attempts:
            _LOGGER.warning(
                "step %r failed%s, attempt %d of %d: %s",
                step,
                f" at the record {failure.record}" if failure.record else "",
                bundle.failures,
                self._attempts,
                failure.exception,
            )
            return [bundle]
        if self._passes_by and failure.may_pass and not bundle.passes_by and not failure.is_lost_block:
            bundle.passes_by = True
            return [bundle]
        if failure.is_lost_block:
            raise BlockLost(failure.exception.partition(": ")[2], fix=failure.fix)
        if bundle.search is not None and bundle.pieces > 1:
            return _in_halves(bundle, bundle.search)
        attempts = bundle.failures if bundle.search is None else bundle.search.attempts
        times = f" {attempts} times" if attempts > 1 else ""
        lines = [f"step {step!r} failed{times}: {failure.exception}"]
        headline = lines[0]
        if failure.location:
            place = describe_location(failure.location)
            headline += f" (at {place})"
            lines.append(f"  at {place}")
        if failure.element:
            lines.append(f"  element: {failure.element}")
        if failure.record:
            lines.append(f"  record: {failure.record}")
        save = self._saver(bundle)
        saved = [save(bundle, failure, None)] if save is not None else []
        # An error with a remedy and without a line of the user's code is ours: there is no traceback to show.
        shown = ["", _shown(failure)] if failure.location or failure.fix is None else []
        message = "\n".join([*lines, *shown, *saved])
        fix = next((fix for pattern, fix in _FIXES if pattern.search(failure.exception)), failure.fix)
        if fix is None and failure.record:
            fix = _leave_out([failure.record])
        error = StepFailed(message, headline=headline, summary="\n".join([*lines, *saved]), fix=fix)
        error.step, error.traceback = step, name_cells(failure.traceback)
        error.place = describe_location(failure.location) if failure.location else ""
        error.element = failure.element
        if cause is not None:  # with --debug
            error.__cause__ = cause.with_traceback(from_user_code(cause.__traceback__))
        if save is None or bundle.pieces < 2:
            raise error
        _LOGGER.warning("step %r failed%s; searching its bundle for the element to save", step, times)
        return _in_halves(bundle, Search(error, attempts))

    def after_commit(self, bundle: Bundle) -> None:
        """Count a committed part of a search. Raises the search's error if no part has failed."""
        if bundle.search is not None:
            bundle.search.parts -= 1
            if not bundle.search.parts:
                raise bundle.search.error

    def after_exit(self, bundle: Bundle, exit_code: int, was_alone: bool, records: Sequence[str] = ()) -> list[Bundle]:
        """Return the bundles to run in place of ``bundle``, whose worker exited. It was at these ``records``.

        This does not count against the attempts of user code that raises. An element is not to blame for the loss of a
        whole node or of the fork server. Raises ``ElementKillsWorker`` if a single element ends its worker on every
        attempt.
        """
        if exit_code in (LOST_WITH_NODE, LOST_WITH_FORK_SERVER):
            return [bundle]
        bundle.stage.size.shrink()
        if not was_alone:
            bundle.is_suspect = True
            return [bundle]
        if bundle.pieces > 1:
            return _in_halves(bundle, bundle.search) if bundle.search is not None else bundle.halves()
        bundle.exits += 1
        if bundle.exits < MAX_ATTEMPTS:
            return [bundle]
        stage, element = bundle.stage.plan, self._only_element(bundle)
        cause, fix = explain_exit(exit_code, self._oom_kills, is_here=bundle.stage.pool_plan.lease is None)
        lines = [
            f"the worker {describe_exit(exit_code)} in each of {MAX_ATTEMPTS} attempts to process one element",
            f"  of step {stage.label!r} ({', '.join(stage.steps)})",
            *([f"  element: {element}"] if element else []),
            *([f"  record: {', '.join(records)}"] if records else []),
            cause,
        ]
        if (save := self._saver(bundle)) is not None:
            failure = Failure(f"the worker {describe_exit(exit_code)}", "", stage.label, element=element)
            lines.append(save(bundle, failure, exit_code))
            fix = None  # the line says what to do
        if records:
            fix = _leave_out(records)
        raise ElementKillsWorker("\n".join(lines), fix=fix)

    def after_timeout(self, bundle: Bundle, overdue: Overdue, records: Sequence[str] = ()) -> list[Bundle]:
        """Return the bundles to run in place of ``bundle``, whose worker was ended because an element took too long.

        The element is tried again alone, and bundles that only ran in the same worker are, too. Raises
        ``ElementTimeout`` if it takes too long on every attempt.
        """
        if overdue.bundle is not bundle:
            return [bundle]
        stall, limit = overdue.stall, f"--element_timeout={self._element_timeout:g}s"
        is_found = bundle.pieces == 1
        if is_found:
            stall = replace(stall, element=stall.element or self._only_element(bundle))
            bundle.exits += 1
        if not is_found or bundle.exits < MAX_ATTEMPTS:
            _LOGGER.warning(
                "%s, longer than %s: the worker is ended, and the element is tried again, attempt %d of %d%s%s%s",
                headline(stall),
                limit,
                max(1, bundle.exits),
                MAX_ATTEMPTS,
                *stall.details(),
            )
            if is_found:
                return [bundle]
            if bundle.search is not None:
                return _in_halves(bundle, bundle.search)
            if overdue.place is None:
                return bundle.halves()
            parts, alone = bundle.without_element(*overdue.place)
            alone.exits = 1
            return parts
        summary = f"step {stall.step!r}: one element took longer than {limit} in each of {MAX_ATTEMPTS} attempts"
        place, element, _ = stall.details()
        text = f"{summary}{place}{element}" + (f"; record: {', '.join(records)}" if records else "")
        if (save := self._saver(bundle)) is not None:
            failure = Failure(summary, "", stall.step, element=stall.element)
            text = f"{text}\n{save(bundle, failure, None)}"
        stack = f"The worker's stack when it was ended:\n{stall.stack}\n\n" if stall.stack else ""
        error = ElementTimeout(f"{stack}{text}", headline=summary, summary=text, fix=_TIMEOUT_FIX)
        error.traceback = stall.stack
        raise error

    def _saver(self, bundle: Bundle) -> Callable[[Bundle, Failure, int | None], str] | None:
        """Return what saves the failing element for a debugger; None without one, or if no step has failed."""
        return None if bundle.stage.plan.partitions else self._save

    def element(self, bundle: Bundle, read_id: str, index: int) -> str:
        """Return one line about an element of a bundle, given its read and its place there."""
        coder_id = next(read.coder_id for read in bundle.stage.plan.reads if read.transform_id == read_id)
        parts = slice_blocks(bundle.inputs[read_id], bundle.stage.codec(read_id), index, index + 1)
        try:
            return describe_input(self._codecs.impl(coder_id).decode_nested(parts[0].data()).value)
        except Exception as error:  # the coder is the user's
            return f"<can't be decoded: {type(error).__name__}>"
        finally:
            for part in parts:
                part.release()

    def _only_element(self, bundle: Bundle) -> str:
        for read in bundle.stage.plan.reads:
            if bundle.inputs.get(read.transform_id):
                return self.element(bundle, read.transform_id, 0)
        return f"a timer of {', '.join(family for _, family in bundle.timers)}"


def _leave_out(records: Sequence[str]) -> Fix:
    places = [f"--skip_record={place}" for place in records if " " not in place]
    skipped, letters = "to leave the record out", "--dead_letters=FOLDER to go on without all elements that fail"
    if not places:
        return Fix(f"mend the step; or pass {letters}")
    return Fix(
        f"mend the step; or pass {' '.join(places)} {skipped}, or {letters}",
        # Shells take [0] for a pattern of file names.
        command=f"mend the step; or add {' '.join(map(shlex.quote, places))} {skipped}, or {letters}",
    )


def _shown(failure: Failure) -> str:
    """Return the traceback as far as it says something about the user's code, and where the rest is."""
    return f"{name_cells((failure.shown or fold(failure.traceback)).rstrip())}\n{_WHOLE}"


def _in_halves(bundle: Bundle, search: Search) -> list[Bundle]:
    """Return two halves that are attempted once each. The search's error ends the run if neither fails."""
    halves = bundle.halves()
    search = Search(search.error, search.attempts, len(halves))
    for half in halves:
        half.search = search
    return halves
