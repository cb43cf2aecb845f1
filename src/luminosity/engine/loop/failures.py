"""What a failure means for a bundle: try it again, or end the run with a message that a person can act on."""

from __future__ import annotations

import logging
import signal

from luminosity.engine import notebook
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.workers.failure import Failure, shorten
from luminosity.errors import ElementKillsWorker, StepFailed

MAX_TRIES = 4

_LOGGER = logging.getLogger("luminosity")


def after_exception(bundle: Bundle, failure: Failure) -> list[Bundle]:
    """The bundles to try in place of ``bundle``, in which user code raised."""
    bundle.failures += 1
    step = failure.step or bundle.stage.stage.label
    if bundle.failures < MAX_TRIES:
        _LOGGER.warning("step %r failed, try %d of %d: %s", step, bundle.failures, MAX_TRIES, failure.exception)
        return [bundle]
    lines = [f"step {step!r} failed {MAX_TRIES} times: {failure.exception}"]
    if failure.location:
        lines.append(f"  at {notebook.place(failure.location)}")
    if failure.element:
        lines.append(f"  element: {failure.element}")
    # The summary comes last: that is what is left on the screen.
    trace = notebook.with_cells_named(failure.traceback)
    raise StepFailed(f"{failure.exception}\n\nThe worker's traceback:\n{trace}\n" + "\n".join(lines))


def after_death(bundle: Bundle, exit_code: int, was_alone: bool, codecs: Codecs) -> list[Bundle]:
    """The bundles to try in place of ``bundle``, whose worker ended; not one of the user's tries."""
    bundle.stage.size.shrink()
    if not was_alone:
        bundle.is_suspect = True
        return [bundle]
    if bundle.count > 1:
        return bundle.halves()
    bundle.deaths += 1
    if bundle.deaths < MAX_TRIES:
        return [bundle]
    raise ElementKillsWorker(
        f"the worker {describe_exit(exit_code)} each of the {MAX_TRIES} times that it ran one element\n"
        f"  of step {bundle.stage.stage.label!r} ({', '.join(bundle.stage.stage.steps)})\n"
        f"  element: {_only_element(bundle, codecs)}\n"
        "Likely causes: it runs out of memory (the kernel kills it), or a native library crashes on it."
    )


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
    for read in bundle.stage.stage.reads:
        for block in bundle.inputs.get(read.transform_id, ()):
            return shorten(codecs.impl(read.coder_id).decode_nested(block.data()).value)
    return f"timers of {len(bundle.timers)} families"
