"""Finds bundles that do nothing any more, says what their workers do, and ends workers whose element takes too long.

A worker is asked what a bundle does once the bundle takes longer than usual ones. The answer says for how long no step
has taken or emitted an element. A worker that does not answer is stopped, or native code holds its interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity._shared.hangs import ask_for_stacks, is_stopped, parse_stacks, read_stacks
from luminosity._shared.notebook import name_cells
from luminosity._shared.user_code import is_users_file
from luminosity.engine.data import wire
from luminosity.engine.loop.bundle import Attempt, Bundle, Overdue, new_instruction_id
from luminosity.engine.loop.workers import Worker
from luminosity.engine.workers.sdk.bundle_report import BundleReport, Doing, Stall, headline

__all__ = ["TIMES", "Quiet", "StallTimes", "Stalls"]

_LOGGER = logging.getLogger(__name__)

_USUAL_TIMES = 2.0  # a bundle is stalled after this many times the longest pause that other bundles of the stage had
_GAP_S = 3.0  # between two looks: the loop itself was held up, or this process was stopped, and the time does not count
_LEAST_ASK_S = 0.25  # between two questions to a worker
_ASKS_PER_TIMEOUT = 4.0  # so that an element is ended at most a quarter later than asked for
_SAMPLE_S = 2.0  # for a process to write its stacks
_BETWEEN_TOLD = 2.0  # a stall is told again when it has lasted this many times as long


@dataclass(frozen=True)
class StallTimes:
    """When bundles are looked at, and when they count as stalled; in seconds."""

    look: float = 1.0  # between two looks at all bundles
    ask_after: float = 5.0  # most bundles have ended by then
    ask_every: float = 5.0
    answer: float = 5.0  # a worker that takes longer does not answer
    stalled: float = 30.0  # longer than most elements take
    setup: float = 600.0  # models of many gigabytes are loaded from slow disks

    def for_timeout(self, timeout: float | None) -> StallTimes:
        """Return times that are short enough to notice an element that takes longer than ``timeout``."""
        if timeout is None:
            return self
        most = max(_LEAST_ASK_S, timeout / _ASKS_PER_TIMEOUT)
        return replace(
            self,
            look=min(self.look, most),
            ask_after=min(self.ask_after, most),
            ask_every=min(self.ask_every, most),
            answer=min(self.answer, max(most, timeout / 2)),
        )


TIMES = StallTimes()


class Quiet:
    """How long a bundle has done nothing. All times are given: it looks at no clock.

    >>> quiet = Quiet(started_at=0.0)
    >>> quiet.heard(BundleReport("process", moves=7, seconds=2.0), now=10.0)
    >>> quiet.seconds(now=11.0), quiet.doing(now=11.0, answer=5.0)
    (3.0, 'element')
    """

    def __init__(self, started_at: float) -> None:
        self.report: BundleReport | None = None
        self.longest = 0.0  # seconds of a pause that has ended
        self.asked_at: float | None = None  # when a question was asked that has no answer
        self._since = started_at
        self._outputs = 0

    def seconds(self, now: float) -> float:
        """Return for how long no step has taken or emitted an element, as far as known."""
        return max(0.0, now - self._since)

    def heard(self, report: BundleReport | None, now: float) -> None:
        """Take an answer; None if the worker can't tell."""
        self.asked_at = None
        if report is None:
            return
        seconds = report.seconds if report.phase != "ended" else 0.0
        if report.wait is not None:
            seconds = min(seconds, report.wait.quiet_seconds)
        self._move(now - seconds, is_setup=self.doing(now, float("inf")) in ("setup", "loading"))
        self.report = report

    def sent(self, outputs: int, now: float) -> None:
        """Note how many blocks of output have come: a new one is a sign of life, even if the worker is too busy."""
        if outputs != self._outputs:
            self._outputs = outputs
            self._move(now, is_setup=False)

    def skip(self, seconds: float) -> None:
        """Leave out time in which nobody looked."""
        self._since += seconds
        if self.asked_at is not None:
            self.asked_at += seconds

    def is_silent(self, now: float, answer: float) -> bool:
        """Return whether the worker takes longer than ``answer`` seconds to answer."""
        return self.asked_at is not None and now - self.asked_at >= answer

    def doing(self, now: float, answer: float) -> Doing:
        """Return what the bundle does."""
        if self.is_silent(now, answer):
            return "nothing"
        if self.report is None:
            return "element"
        if self.report.wait is not None and self.report.wait.is_loading:
            return "loading"
        return "element" if self.report.phase in ("process", "ended") else self.report.phase

    def _move(self, at: float, *, is_setup: bool) -> None:
        if at > self._since:
            if not is_setup:
                self.longest = max(self.longest, at - self._since)
            self._since = at


@dataclass(eq=False)
class _Watched:
    """One attempt that takes long, and the state of the questions about it."""

    worker: Worker
    bundle: Bundle
    attempt: Attempt
    quiet: Quiet
    ask_at: float
    question: str = ""  # the instruction id of the question without an answer
    tell_at: float = 0.0  # after so many seconds it is told
    sampled_at: float | None = None  # when the process was asked for its stacks
    stacks_from: int = 0
    dump: str = ""
    place: tuple[str, int] | None = None  # of the element that was described last: its read, and the place there
    element: str = ""
    is_ending: bool = False  # whether its worker is ended because of it


class Stalls:
    """Looks at running bundles about once a second, on the loop's thread. Waits for nothing."""

    def __init__(
        self,
        on_stalled: Callable[[Bundle, Stall], None],
        describe: Callable[[Bundle, str, int], str],
        element_timeout: float | None = None,
        times: StallTimes | None = None,
    ) -> None:
        """``on_stalled`` is called when a bundle stalls, and again when it has for twice as long.

        ``describe`` returns an element of a bundle as text, given its read and its place there.
        """
        self.element_timeout = element_timeout
        self.times = (times or TIMES).for_timeout(element_timeout)
        self._on_stalled = on_stalled
        self._describe = describe
        self._watched: dict[str, _Watched] = {}  # by instruction id
        self._usual: dict[str, float] = {}  # by stage id: the longest pause of a bundle that went on
        self._looked_at: float | None = None

    def look(self, workers: Iterable[Worker], now: float) -> None:
        """Ask, tell and end what is due. Cheap if it is too early for another look."""
        before = self._looked_at
        if before is not None and now - before < self.times.look:
            return
        self._looked_at = now
        gap = 0.0 if before is None or now - before < self.times.look + _GAP_S else now - before
        running: set[str] = set()
        told: set[str] = set()  # workers that do not answer: one message is enough for all of their bundles
        for worker in list(workers):
            for instruction_id, bundle in worker.bundles.items():
                attempt = bundle.attempt
                if attempt is None or now - attempt.started_at < self.times.ask_after:
                    continue
                running.add(instruction_id)
                watched = self._watched.get(instruction_id)
                if watched is None:
                    quiet = Quiet(attempt.started_at)
                    watched = self._watched[instruction_id] = _Watched(worker, bundle, attempt, quiet, now)
                watched.quiet.skip(gap)
                self._look_at(watched, told, now)
        for instruction_id in self._watched.keys() - running:
            self._forget(self._watched.pop(instruction_id), now)

    def answered(self, worker: Worker, response: beam_fn_api_pb2.InstructionResponse, now: float) -> bool:
        """Take a worker's response. Returns False if it is none about a bundle's progress."""
        for instruction_id in worker.bundles:
            watched = self._watched.get(instruction_id)
            if watched is not None and watched.question == response.instruction_id:
                data = response.process_bundle_progress.monitoring_data.get(wire.REPORT)
                watched.question = ""
                report = None if data is None else BundleReport.from_json(data)
                # A partition may take minutes to be grouped, in no step: that its worker answers is a sign of life.
                watched.quiet.heard(BundleReport("ended") if watched.bundle.stage.plan.partitions else report, now)
                return True
        return False

    def _look_at(self, watched: _Watched, told: set[str], now: float) -> None:
        quiet, attempt, worker = watched.quiet, watched.attempt, watched.worker
        quiet.sent(len(attempt.outputs), now)
        self._learn(watched)
        if not watched.question and now >= watched.ask_at:
            self._ask(watched, now)
        doing, seconds = quiet.doing(now, self.times.answer), quiet.seconds(now)
        limit = self._limit(watched.bundle, doing)
        is_overdue = self._is_overdue(watched.bundle, doing, seconds)
        if seconds < min(limit, self.times.stalled) and not is_overdue:
            self._goes_on(watched)
            return
        if doing == "nothing":
            if self._is_being_sampled(watched, seconds, now):
                return
            is_overdue = is_overdue and not (watched.dump and not _is_in_bundle(watched.dump))
        stall = self._stall(watched, doing, seconds, is_stalled=seconds >= limit or is_overdue)
        if stall.is_stalled and seconds >= watched.tell_at and not (doing == "nothing" and worker.id in told):
            watched.tell_at = seconds * _BETWEEN_TOLD
            self._on_stalled(watched.bundle, stall)
            if not is_overdue:  # otherwise it is told what follows
                _LOGGER.warning("%s%s%s%s", headline(stall), *stall.details())
        if doing == "nothing":
            told.add(worker.id)
        attempt.stall = stall
        if is_overdue and not watched.is_ending:
            self._end(watched, stall)

    def _limit(self, bundle: Bundle, doing: Doing) -> float:
        """Return after how many seconds without an element a bundle is stalled."""
        if doing in ("setup", "loading"):
            return self.times.setup
        if doing != "nothing" and bundle.stage.is_source:
            return float("inf")  # it may wait for records as long as it likes
        return max(self.times.stalled, _USUAL_TIMES * self._usual.get(bundle.stage.id, 0.0))

    def _is_overdue(self, bundle: Bundle, doing: Doing, seconds: float) -> bool:
        if self.element_timeout is None or seconds < self.element_timeout or doing in ("setup", "loading"):
            return False
        if bundle.stage.plan.partitions:
            return False  # no element of the user's is late
        return not bundle.stage.is_source or doing == "nothing"

    def _ask(self, watched: _Watched, now: float) -> None:
        watched.question = new_instruction_id("report")
        watched.ask_at = now + self.times.ask_every
        watched.quiet.asked_at = now
        request = beam_fn_api_pb2.InstructionRequest(instruction_id=watched.question)
        request.process_bundle_progress.instruction_id = watched.attempt.instruction_id
        watched.worker.instruct(request)

    def _is_being_sampled(self, watched: _Watched, seconds: float, now: float) -> bool:
        """Ask a process that does not answer for its stacks, once for each message. Returns whether they are to come.

        Workers of other machines are not asked: they answer themselves, or not at all.
        """
        process = watched.worker.process
        if process is None or process.node() or not process.pid or is_stopped(process.pid):
            return False
        if watched.sampled_at is None or (watched.dump and seconds >= watched.tell_at > 0):
            begin = ask_for_stacks(process.pid)
            watched.sampled_at, watched.stacks_from, watched.dump = now, begin or 0, ""
            return begin is not None
        if not watched.dump:
            watched.dump = read_stacks(process.pid, watched.stacks_from)
        return not watched.dump and now - watched.sampled_at < _SAMPLE_S

    def _stall(self, watched: _Watched, doing: Doing, seconds: float, *, is_stalled: bool) -> Stall:
        worker, report, stage = watched.worker, watched.quiet.report, watched.bundle.stage.plan
        process = worker.process
        stall = Stall(
            doing,
            seconds,
            is_stalled,
            step=report.step if report is not None and report.step else stage.label,
            worker=worker.id,
            pid=process.pid if process is not None else 0,
            node=process.node() if process is not None else "",
        )
        if doing == "nothing":
            state = "stopped" if stall.pid and not stall.node and is_stopped(stall.pid) else "does not answer"
            location, stack = _of_bundle(watched.dump) if state != "stopped" else ("", "")
            return replace(
                stall, state=state, location=location, stack=name_cells(stack), element=self._element(watched)
            )
        if report is None:
            return stall
        stall = replace(stall, location=report.location, stack=name_cells(report.stack), element=report.element)
        if report.wait is not None:
            wait = report.wait
            stack = "\n".join(text for text in (name_cells(wait.stack), stall.stack) if text)
            stall = replace(stall, waits_for=wait.what, state=wait.state, stack=stack)
        return stall if stall.element or doing != "element" else replace(stall, element=self._element(watched))

    def _element(self, watched: _Watched) -> str:
        """Return the element of the bundle's input that is in progress, or how many may be; empty if unknown."""
        process = watched.worker.process
        if process is None or process.node():
            return ""  # the data may lie on another machine
        found = _in_progress(watched)
        if found is None:
            return ""
        if watched.place != found[:2]:
            watched.place, watched.element = found[:2], self._describe(watched.bundle, *found[:2])
        _, first, last = found
        return watched.element if first == last else f"one of {last - first + 1}, the first of them {watched.element}"

    def _goes_on(self, watched: _Watched) -> None:
        if watched.attempt.stall is not None and watched.tell_at:
            _LOGGER.info("step %r goes on in worker %s", watched.attempt.stall.step, watched.worker.id)
        watched.attempt.stall, watched.tell_at, watched.sampled_at = None, 0.0, None

    def _end(self, watched: _Watched, stall: Stall) -> None:
        """End the worker, and the model host for which it waits: the bundle is tried again in another worker."""
        watched.is_ending = True
        worker, report = watched.worker, watched.quiet.report
        found = _in_progress(watched)
        place = found[:2] if found is not None and found[1] == found[2] else None
        worker.overdue = Overdue(watched.bundle, stall, place)
        wait = report.wait if report is not None else None
        if wait is not None and wait.pid and not stall.node:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(wait.pid, signal.SIGKILL)
        worker.kill()

    def _forget(self, watched: _Watched, now: float) -> None:
        """Learn from a bundle that has been committed how long such bundles may pause."""
        response, quiet = watched.attempt.response, watched.quiet
        if response is None or response.error:
            return
        quiet.heard(BundleReport("ended"), now)
        self._learn(watched)

    def _learn(self, watched: _Watched) -> None:
        stage_id = watched.bundle.stage.id
        self._usual[stage_id] = max(watched.quiet.longest, self._usual.get(stage_id, 0.0))


def _in_progress(watched: _Watched) -> tuple[str, int, int] | None:
    """Return a read, and the first and the last place there that the bundle may work on; None if that is unknown.

    A worker that does not answer may have gone on since it last did.
    """
    bundle, report = watched.bundle, watched.quiet.report
    if report is not None and (report.phase not in ("process", "setup") or report.wait is not None):
        return None  # all of its elements have begun
    for read_id, blocks in bundle.inputs.items():
        count = sum(block.count for block in blocks)
        # A split takes all that has not begun. Then only the last one is left to do.
        last = watched.attempt.ends.get(read_id, count) - 1
        first = last if read_id in watched.attempt.ends else 0
        if report is not None:
            first = max(first, report.indexes.get(read_id, 0))
            last = first if watched.quiet.asked_at is None else last
        if 0 <= first <= last < count:
            return read_id, first, last
    return None


def _is_in_bundle(dump: str) -> bool:
    return any(_is_of_bundle(stack) for stack in parse_stacks(dump))


def _is_of_bundle(stack: list[tuple[str, int, str]]) -> bool:
    return any(name == "process_bundle" and path.endswith("bundle_processor.py") for path, _, name in stack)


def _of_bundle(dump: str) -> tuple[str, str]:
    """Return the innermost line of the user's code in the threads of bundles, and their stacks from that code on."""
    location, texts = "", list[str]()
    for stack in parse_stacks(dump):
        if _is_of_bundle(stack):
            users = [place for place, (path, _, _) in enumerate(stack) if is_users_file(path)]
            shown = stack[users[0] :] if users else stack
            if users:
                path, line, _ = stack[users[-1]]
                location = f"{path}:{line}"
            texts.append("\n".join(f'  File "{path}", line {line}, in {name}' for path, line, name in shown))
    return location, "\n\n".join(texts)
