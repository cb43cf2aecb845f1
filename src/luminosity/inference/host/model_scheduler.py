"""Decides which model is loaded next, and which models are evicted for it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from luminosity._shared.text import format_bytes
from luminosity.core import WorkerShare
from luminosity.errors import Fix, ModelTooLarge
from luminosity.inference.handler import Handler
from luminosity.inference.host.interface import Clock, Family
from luminosity.inference.host.lane import Lane
from luminosity.inference.host.model import Dropped, Loaded, Model, State
from luminosity.inference.host.residency import Residency

__all__ = ["Decision", "Load", "ModelScheduler"]

_LOGGER = logging.getLogger(__name__)
_WORTH_EVICTING = 1_000_000  # bytes; a smaller model frees too little for a batch or another model


@dataclass(frozen=True)
class Load:
    """A load to start: the model, the number of the attempt, and the evicted models to drop before it."""

    model: Model
    attempt: int
    evicted: Dropped


@dataclass(frozen=True)
class Decision:
    """The work that the host has to do after the scheduler has updated its books.

    The host carries out ``failed``, ``moved`` and ``load`` under the same lock as the decision, and drops ``dropped``
    after it has released the lock.
    """

    failed: tuple[tuple[Model, BaseException], ...] = ()
    """Models that can't be had: all their waiting examples fail."""
    moved: tuple[tuple[Lane, Lane], ...] = ()
    """The waiting examples of the first lane go to the second."""
    load: Load | None = None
    dropped: Dropped | None = None
    staying: tuple[Model, ...] = ()
    """Models that were about to leave and get batches again."""


_NOTHING = Decision()


class ModelScheduler:
    """Decides which models are in memory; the host carries the decisions out.

    Models are loaded one at a time: two at once would need more memory than either, and could not be measured. The
    model whose work has waited longest is next. It takes the room of models without work, or otherwise of a model that
    has run long enough to justify its own load. So every model gets its turn.

    The scheduler starts no threads, takes no locks and knows the time only from its caller. The caller holds the
    host's lock in every method.
    """

    def __init__(self, budget: int | None, device: str) -> None:
        """``budget``: the bytes for all models together; None for no limit."""
        self._residency = Residency(budget)
        self._device = device
        self._models: dict[Hashable, Model] = {}
        self._lanes: dict[Model, list[Lane]] = {}
        self._requests: OrderedDict[Model, None] = OrderedDict()
        """Absent models for which there is work, a waiting thread, or a request ahead of work; the first is next.

        A model stays here when it is no longer needed, until :meth:`plan` finds it.
        """
        self._loading: set[Model] = set()
        self._leaving: set[Model] = set()
        self._successions: dict[Model, list[tuple[Lane, Lane]]] = {}
        """For models that fit only in place of another one: the lanes to move work from and to after the load."""
        self._dropping = 0
        """Threads that drop models after a load; the next load waits until they have freed the memory."""

    @property
    def has_budget(self) -> bool:
        """Whether the memory of the models is limited."""
        return self._residency.budget is not None

    @property
    def is_loading(self) -> bool:
        """Whether a model is loading or requested."""
        return bool(self._loading or self._requests)

    def model(
        self, key: Hashable, handler: Handler[Any, Any, Any], clock: Clock, family: Family | None, now: float
    ) -> Model:
        """Return the model with this key, which the first call creates."""
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = Model(key, handler, clock, family)
            model.absent_since = now
        return model

    def add_lane(self, lane: Lane) -> None:
        """Take a new lane into account."""
        self._lanes.setdefault(lane.model, []).append(lane)

    def remove_lane(self, lane: Lane, now: float) -> Dropped:
        """Remove a lane; if its model has no other lane, remove the model, too, and return its copies."""
        left = self._lanes[lane.model]
        left.remove(lane)
        if left:
            return []
        del self._lanes[lane.model]
        return self._forget(lane.model, now)

    def lanes_of(self, model: Model) -> Sequence[Lane]:
        """Return the lanes of a model."""
        return self._lanes.get(model, ())

    def request(self, model: Model) -> None:
        """Have a model loaded, after the models that were requested before."""
        if model.state is State.ABSENT:
            self._requests.setdefault(model)

    def plan(self, now: float) -> Decision:
        """Start the next load if there is room; otherwise mark the models that have to leave first."""
        were_leaving, self._leaving = self._leaving, set()
        for model in were_leaving:
            model.is_leaving = False
        decision = self._plan_load(now)
        staying = tuple(were_leaving - self._leaving)
        return replace(decision, staying=staying) if staying else decision

    def _plan_load(self, now: float) -> Decision:
        if self._dropping or any(not model.is_overdue for model in self._loading):
            return _NOTHING
        failed: list[tuple[Model, BaseException]] = []
        while self._requests:
            model = next(iter(self._requests))
            predecessors = self._predecessors(model)
            is_needed = self._has_work(model) or bool(predecessors)
            if model.state is not State.ABSENT or not (is_needed or model.is_awaited):
                del self._requests[model]
                continue
            if self._residency.is_too_large(model):
                failed.append(self._fail(model, self._too_large(model), now))
                continue
            has_work = partial(self._has_work, unless=predecessors)
            verdict = self._residency.room_for(model, has_work, may_displace=is_needed)
            if verdict.fits:
                evicted = [self._evict(each, now) for each in verdict.evicted]
                self._residency.reserve(model)
                del self._requests[model]
                self._loading.add(model)
                return Decision(failed=tuple(failed), load=Load(model, model.begin_load(now), evicted))
            self._leaving.update(verdict.leaving, predecessors)
            for each in self._leaving:
                each.is_leaving = True
            if is_needed:
                break  # No later model is served before this one.
            model.does_not_fit_beside, model.is_awaited = True, False
            del self._requests[model]
        return Decision(failed=tuple(failed)) if failed else _NOTHING

    def finish_load(self, model: Model, attempt: int, loaded: Loaded, now: float) -> Decision:
        """Take the result of a load: keep the model, load it again later, or fail it if it is too large."""
        if attempt != model.attempt or model.state is not State.LOADING:
            return Decision(dropped=[loaded.release()])  # This load was given up meanwhile.
        model.count_load(loaded.stats)
        self._loading.discard(model)
        self._residency.release(model)
        if loaded.is_estimate and not model.is_measured_again and self._residency.exceeds(loaded.size):
            # The first model of a kind grows the process by more than itself, such as by its library.
            model.unload(now)
            model.is_measured_again = model.is_awaited = True
            self.request(model)
            return Decision(dropped=[loaded.release()])
        # A later load may reuse memory that the process already has, and then seems smaller than it is.
        model.size = max(loaded.size, model.size or 0) if loaded.is_estimate else loaded.size
        verdict = self._residency.room_for(model, self._has_work, may_displace=False)
        if verdict.fits:
            evicted = [self._evict(each, now) for each in verdict.evicted]
            self._residency.hold(model, model.size)
            model.arrived(loaded, now)
            return Decision(moved=tuple(self._successions.pop(model, ())), dropped=evicted)
        model.unload(now)
        if self._residency.is_too_large(model):
            failed = self._fail_load(model, self._too_large(model), now)
            return Decision(failed=(failed,), dropped=[loaded.release()])
        # The model is larger than expected. Now its size is known, and it is loaded again when there is room.
        model.does_not_fit_beside = True
        self._request_if_needed(model)
        return Decision(dropped=[loaded.release()])

    def begin_drop(self) -> None:
        """Start no load until :meth:`end_drop`: the host is about to drop what :meth:`finish_load` returned."""
        self._dropping += 1

    def end_drop(self) -> None:
        """Note that the host has dropped it, or that the drop failed."""
        self._dropping -= 1

    def fail_load(self, model: Model, attempt: int, error: BaseException, now: float) -> Decision:
        """Take the error of a load."""
        if attempt != model.attempt or model.state is not State.LOADING:
            return _NOTHING  # This load was given up meanwhile.
        self._loading.discard(model)
        self._residency.release(model)
        model.unload(now)
        return Decision(failed=(self._fail_load(model, error, now),))

    def replace(self, old: Lane, new: Lane) -> None:
        """Load the model of ``new`` in place of the model of ``old``; if the load fails, the old model comes back."""
        pairs = self._successions.setdefault(new.model, [])
        if (old, new) not in pairs:
            pairs.append((old, new))

    def evict_one_idle(self, now: float) -> Dropped:
        """Evict the least recently used model without work, unless it is too small to matter."""
        idle = [
            each
            for each in self._residency.models()
            if each.is_ready and not each.users and not self._has_work(each) and (each.size or 0) >= _WORTH_EVICTING
        ]
        return [self._evict(min(idle, key=lambda each: each.used_at), now)] if idle else []

    def mark_overdue(self, model: Model, abandon: bool, now: float) -> None:
        """Note that a load exceeds a timeout; with ``abandon``, the next attempt does not wait for its end."""
        if model.state is not State.LOADING:
            return  # Another lane of this model was overdue, too.
        model.is_overdue = True
        if abandon:
            self._loading.discard(model)
            self._residency.release(model)
            model.attempt += 1
            model.unload(now)
            self._request_if_needed(model)

    def retire(self, model: Model, now: float) -> Dropped:
        """Evict a model in use, so that the next batch loads it again; running batches keep the old copies."""
        return [self._evict(model, now)] if model.is_ready else []

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books are inconsistent."""
        self._residency.check_integrity()
        present = set(self._residency.models())
        for model in self._models.values():
            assert model.users >= 0, f"{model.key}: negative counts"
            assert (model in present) == (model.state is not State.ABSENT), f"{model.key}: miscounted"
            is_lost = model.state is State.ABSENT and self._has_work(model) and model not in self._requests
            assert not is_lost, f"{model.key}: has work and is not requested"
        assert present <= set(self._models.values()), "memory is held by unknown models"
        assert self._loading == {model for model in present if model.state is State.LOADING}, "loads are miscounted"

    def _forget(self, model: Model, now: float) -> Dropped:
        self._models.pop(model.key, None)
        self._successions.pop(model, None)
        if model.is_ready:
            return [self._evict(model, now)]
        self.mark_overdue(model, abandon=True, now=now)
        self._requests.pop(model, None)
        return []

    def _has_work(self, model: Model, unless: Collection[Model] = ()) -> bool:
        """Return whether a model has work or a thread that waits for its load; False for those in ``unless``."""
        if model in unless:
            return False
        return model.waiters > 0 or any(lane.has_work() for lane in self._lanes.get(model, ()))

    def _request_if_needed(self, model: Model) -> None:
        if model.is_awaited or self._has_work(model):
            self.request(model)

    def _predecessors(self, model: Model) -> set[Model]:
        return {old.model for old, _ in self._successions.get(model, ()) if old.model.is_ready}

    def _evict(self, model: Model, now: float) -> tuple[tuple[Any, ...], int]:
        self._residency.release(model)
        self._leaving.discard(model)
        copies = model.unload(now)
        self._request_if_needed(model)
        return copies, model.size or 0

    def _fail_load(self, model: Model, error: BaseException, now: float) -> tuple[Model, BaseException]:
        if not model.waiters:  # Otherwise the waiting threads raise the error.
            rest = "" if self._has_work(model) else "; the version before it goes on"
            _LOGGER.error("The model of %s can't be loaded: %r%s", model.label, error, rest)
        return self._fail(model, error, now)

    def _fail(self, model: Model, error: BaseException, now: float) -> tuple[Model, BaseException]:
        model.error, model.failed_at, model.is_awaited = error, now, False
        model.failures += 1
        self._successions.pop(model, None)
        self._requests.pop(model, None)
        model.waiters = 0  # They see the failure. A thread that waits anew has the model loaded again.
        return model, error

    def _too_large(self, model: Model) -> ModelTooLarge:
        fix = "raise --model_memory_budget if there is more memory for it"
        once = ", or load it once for all workers with large_model=True on the handler"
        is_alone = WorkerShare.current().workers <= 1
        return ModelTooLarge(
            f"the model of {model.label} takes {format_bytes(model.size or 0)}, and the models of this process on "
            f"{self._device} may take {format_bytes(self._residency.budget or 0)} together",
            fix=Fix(fix if is_alone else fix + once, command=fix),
        )
