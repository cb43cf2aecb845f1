"""The models of a host: which are here, which is loaded next, and who makes room for it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from luminosity._text import format_bytes
from luminosity.core import WorkerShare
from luminosity.errors import ModelTooLarge
from luminosity.inference.handler import Handler
from luminosity.inference.host import loader
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.loader import Dropped
from luminosity.inference.host.model import Clock, Family, Loaded, Model, State
from luminosity.inference.host.residency import Residency

if TYPE_CHECKING:
    from luminosity.inference.host.host import ModelHost

__all__ = ["ModelScheduler"]

_LOGGER = logging.getLogger(__name__)
_WORTH_EVICTING = 1_000_000
_OR_ONCE = "; or load it once for all workers, with large_model=True on the handler"


class ModelScheduler:
    """Models are loaded one at a time: two at once would take more memory than either, and could not be measured.

    Whoever has waited longest is next. It takes the room of models without work; else that of one which has run for
    long enough to have been worth its own load. So every model gets its turn. Guarded by the host's lock.
    """

    def __init__(self, host: ModelHost, budget: int | None, device: str) -> None:
        self.residency = Residency(budget)
        self._host = host
        self._device = device
        self._models: dict[Hashable, Model] = {}
        self._successions: dict[Model, list[tuple[Lane, Lane]]] = {}
        """Of models that can only come where another one goes: what waits in the one lane shall wait in the other."""
        self.dropping = 0
        """Threads that let go of models after a load: the next one waits for the memory."""

    def model(self, key: Hashable, handler: Handler[Any, Any, Any], clock: Clock, family: Family | None) -> Model:
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = Model(key, handler, clock, family)
            model.absent_since = self._host.now()
        return model

    def arrange(self, lanes: Iterable[Lane]) -> None:
        """Begin the next load if there is one to do and room for it; else see to it that there will be."""
        present = self.residency.models()
        for model in present:
            model.is_leaving = False
        if self.dropping or any(model.state is State.LOADING and not model.is_overdue for model in present):
            return
        working = self._working(lanes)
        for model in self._wanted(working):
            if self.residency.is_too_large(model):
                self._fail(model, self._too_large(model))
                continue
            predecessors = self._predecessors(model)
            needed = [each for each in working if each not in predecessors]
            is_needed = model in working or bool(predecessors)
            verdict = self.residency.room_for(model, set(needed).__contains__, may_displace=is_needed)
            if verdict.fits:
                dropped = [self._evict(each) for each in verdict.evicted]
                self.residency.reserve(model)
                loader.start(self._host, model, model.begin(self._host.now()), dropped)
                return
            for each in (*verdict.leaving, *predecessors):
                each.is_leaving = True
            if is_needed:
                return  # Nobody who came later is served before it.
            model.does_not_fit_beside, model.is_awaited = True, False

    def loaded(self, model: Model, attempt: int, loaded: Loaded, lanes: Iterable[Lane]) -> Dropped:
        """A load is done; returns what is to be dropped."""
        if attempt != model.attempt or model.state is not State.LOADING:
            return [loaded.let_go()]  # Given up meanwhile.
        now = self._host.now()
        model.count_load(loaded.stats)
        self.residency.release(model)
        if loaded.is_estimate and not model.is_measured_again and self.residency.exceeds(loaded.size):
            # The first of its kind grows the process by more than itself, such as its library.
            model.go(now)
            model.is_measured_again = model.is_awaited = True
            return [loaded.let_go()]
        # Of a later load into memory that was freed before, nothing is seen.
        model.size = max(loaded.size, model.size or 0) if loaded.is_estimate else loaded.size
        verdict = self.residency.room_for(model, self._working(lanes).__contains__, may_displace=False)
        if verdict.fits:
            dropped = [self._evict(each) for each in verdict.evicted]
            self.residency.hold(model, model.size)
            model.arrived(loaded, now)
            for old, new in self._successions.pop(model, ()):
                old.move_to(new)
            return dropped
        model.go(now)
        if self.residency.is_too_large(model):
            self._fail_load(model, self._too_large(model), lanes)
        else:  # It is larger than was thought. Now its size is known, and it comes again when there is room.
            model.does_not_fit_beside = True
        return [loaded.let_go()]

    def load_failed(self, model: Model, attempt: int, error: BaseException, lanes: Iterable[Lane]) -> None:
        if attempt == model.attempt and model.state is State.LOADING:
            self.residency.release(model)
            model.go(self._host.now())
            self._fail_load(model, error, lanes)

    def succeed(self, old: Lane, new: Lane) -> None:
        """Load the model of one lane in the place of the other's; if that fails, the other one comes back."""
        pairs = self._successions.setdefault(new.model, [])
        if (old, new) not in pairs:
            pairs.append((old, new))

    def evict_one_idle(self, lanes: Iterable[Lane]) -> Dropped:
        """The model that was used longest ago, of those that nobody needs now and that take some room."""
        working = self._working(lanes)
        idle = [
            each
            for each in self.residency.models()
            if each.is_ready and not each.users and each not in working and (each.size or 0) >= _WORTH_EVICTING
        ]
        return [self._evict(min(idle, key=lambda each: each.used_at))] if idle else []

    def overdue(self, model: Model, abandon: bool) -> None:
        """Its load takes too long for somebody; where it may hang for ever, the next attempt does not wait for it."""
        if model.state is not State.LOADING:
            return  # Another lane of it was late, too.
        model.is_overdue = True
        if abandon:
            self.residency.release(model)
            model.attempt += 1
            model.go(self._host.now())

    def retire(self, model: Model) -> None:
        """Let the next use load it anew. Who computes with the old copies keeps them."""
        if model.is_ready:
            copies, _ = gone = self._evict(model)
            for copy in copies:
                model.handler.abandon(copy)
            self.drop([gone])

    def forget(self, model: Model) -> None:
        """No lane has it any more."""
        self._models.pop(model.key, None)
        self._successions.pop(model, None)
        if model.is_ready:
            self.drop([self._evict(model)])
        elif model.state is State.LOADING:
            self.overdue(model, abandon=True)

    def drop(self, dropped: Dropped) -> None:
        threading.Thread(target=loader.drop, args=(dropped,), name="model-host-drop", daemon=True).start()

    def check_integrity(self) -> None:
        self.residency.check_integrity()
        present = set(self.residency.models())
        for model in self._models.values():
            assert model.users >= 0, f"{model.key}: negative counts"
            assert (model in present) == (model.state is not State.ABSENT), f"{model.key}: miscounted"
        assert present <= set(self._models.values()), "models that nobody knows"

    def _working(self, lanes: Iterable[Lane]) -> dict[Model, float]:
        """The models that have work, or somebody who waits for them alone, and since when."""
        since = {model: model.absent_since for model in self._models.values() if model.waiters}
        for lane in lanes:
            if lane.has_work():
                since[lane.model] = min(since.get(lane.model, math.inf), lane.waiting_since())
        return since

    def _predecessors(self, model: Model) -> set[Model]:
        return {old.model for old, _ in self._successions.get(model, ()) if old.model.is_ready}

    def _wanted(self, working: dict[Model, float]) -> list[Model]:
        """Those that are not here, whoever has waited longest first."""
        since = {model: max(waiting, model.absent_since) for model, waiting in working.items()}
        since |= {model: model.absent_since for model in self._models.values() if model.is_awaited}
        return sorted((model for model in since if model.state is State.ABSENT), key=since.__getitem__)

    def _evict(self, model: Model) -> tuple[tuple[Any, ...], int]:
        self.residency.release(model)
        return model.go(self._host.now()), model.size or 0

    def _fail_load(self, model: Model, error: BaseException, lanes: Iterable[Lane]) -> None:
        if not model.waiters:  # Nobody else will hear of it, or not of which model it was.
            rest = "" if model in self._working(lanes) else "; the version before it goes on"
            _LOGGER.error("The model of %s can't be loaded: %r%s", model.label, error, rest)
        self._fail(model, error)

    def _fail(self, model: Model, error: BaseException) -> None:
        model.error, model.failed_at, model.is_awaited = error, self._host.now(), False
        model.failures += 1
        self._successions.pop(model, None)
        model.waiters = 0  # They are told; who wants it after all waits anew, and only then is it loaded again.
        self._host.fail_work_of(model, error)

    def _too_large(self, model: Model) -> ModelTooLarge:
        return ModelTooLarge(
            f"The model of {model.label} takes {format_bytes(model.size or 0)}, and the models of this process on "
            f"{self._device} may take {format_bytes(self.residency.budget or 0)} together. If there is more memory "
            f"for it, say so with --model_memory_budget{_OR_ONCE if WorkerShare.current().workers > 1 else ''}"
        )
