"""Decides which models fit into a device's memory at once, and which ones to evict.

It only keeps books; the host loads and drops models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from luminosity.inference.host.interface import Family
from luminosity.inference.host.model import Model

__all__ = ["Residency", "Verdict"]

_RUN_TO_LOAD = 2.0  # a model computes this many times its load time before a waiting model may take its place
_SHORTEST_RUN_S = 0.05  # the same for models that load at once


@dataclass(frozen=True)
class Verdict:
    """Whether a model fits once ``evicted`` are dropped; if not, ``leaving`` have to finish their batches first."""

    fits: bool
    evicted: list[Model] = field(default_factory=list[Model])
    leaving: list[Model] = field(default_factory=list[Model])


class Residency:
    """Accounts for every byte of the budget: it is free, or held by a model that is loading or ready.

    The caller holds the host's lock in every method.
    """

    def __init__(self, budget: int | None) -> None:
        """``budget``: in bytes; None for no limit."""
        self.budget = budget
        self._free = budget
        self._held: dict[Model, int] = {}
        self._sizes: dict[type, Counter[int]] = {}
        """How many models in memory have each size, by the class of their handler; only sizes that are known."""
        self._counted: dict[Model, int] = {}
        """The size with which a model is counted in ``_sizes``."""
        self._kin: Counter[Hashable] = Counter()
        """How many models of each family are in memory."""

    @property
    def held(self) -> int:
        """The bytes that all models hold together."""
        return sum(self._held.values())

    def models(self) -> list[Model]:
        """Return the models that are loading or ready."""
        return list(self._held)

    def exceeds(self, size: int) -> bool:
        """Return whether this many bytes are more than the whole budget."""
        return self.budget is not None and size > self.budget

    def is_too_large(self, model: Model) -> bool:
        """Return whether a model is known to be larger than the whole budget."""
        return model.size is not None and self.exceeds(model.size)

    def room_for(self, model: Model, has_work: Callable[[Model], bool], may_displace: bool) -> Verdict:
        """Return whether the model fits, and which models have to go for it.

        The least recently used models without work go first. If they are not enough, and ``may_displace`` is set,
        models go that have work and have run for long enough.
        """
        lack = self._lack(model)
        if lack.is_none:
            return Verdict(True)
        here = sorted((each for each in self._held if each.is_ready), key=lambda each: each.used_at)
        idle = [each for each in here if not each.users and not has_work(each)]
        evicted = self._enough_of(idle, lack)
        if lack.is_none:
            return Verdict(True, evicted)
        if not may_displace:
            return Verdict(False)
        # The model that was loaded first leaves first. The last use changes with every batch, and so would the choice.
        gone = set(evicted)
        done = [each for each in here if each not in gone and _has_run_long(each)]
        leaving = self._enough_of(sorted(done, key=lambda each: each.arrived_at), lack)
        if not lack.is_none:
            return Verdict(False)
        if any(each.users for each in leaving):
            return Verdict(False, leaving=leaving)
        return Verdict(True, evicted + leaving)

    def reserve(self, model: Model) -> None:
        """Hold the expected bytes of a model whose load begins."""
        self.hold(model, self._expected(model))

    def hold(self, model: Model, size: int) -> None:
        """Hold this many bytes for a model."""
        assert model not in self._held, f"{model.key} already holds memory"
        self._held[model] = size
        if self._free is not None:
            self._free -= size
        if model.size is not None:
            self._counted[model] = model.size
            self._sizes.setdefault(type(model.handler), Counter())[model.size] += 1
        if model.family is not None:
            self._kin[model.family.name] += 1

    def release(self, model: Model) -> None:
        """Free the bytes that a model holds."""
        freed = self._held.pop(model)
        if self._free is not None:
            self._free += freed
        if model in self._counted:
            kind = type(model.handler)
            _count_down(self._sizes[kind], self._counted.pop(model))
            if not self._sizes[kind]:
                del self._sizes[kind]
        if model.family is not None:
            _count_down(self._kin, model.family.name)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the books are inconsistent."""
        assert all(size >= 0 for size in self._held.values()), "a model holds a negative number of bytes"
        assert self._free is None or self._free >= 0, f"models hold {-(self._free or 0)} bytes more than the budget"
        if self.budget is not None:
            assert self.held + (self._free or 0) == self.budget, f"{self.held} + {self._free} is not {self.budget}"
        for family in {model.family for model in self._held if model.family is not None}:
            count = sum(each.family == family for each in self._held)
            assert count <= self._kin[family.name], f"{count} models of {family.name} are in memory, not counted"
            assert count <= family.most, f"{count} models of {family.name} are in memory, at most {family.most} may be"

    def _expected(self, model: Model) -> int:
        """Return a model's size, or that of similar models if it was never loaded."""
        if model.size is not None:
            return model.size
        alike = self._sizes.get(type(model.handler))
        kinds = self._sizes.values() if alike is None else [alike]
        expected = max((max(sizes) for sizes in kinds), default=0)
        return expected if self.budget is None else min(expected, self.budget)

    def _lack(self, model: Model) -> _Lack:
        size = 0 if self._free is None else self._expected(model) - self._free
        family = model.family
        if family is None:
            return _Lack(size, 0, None)
        return _Lack(size, self._kin[family.name] + 1 - family.most, family)

    def _enough_of(self, models: Iterable[Model], lack: _Lack) -> list[Model]:
        """Choose models in order until nothing is lacking; reduces ``lack``."""
        chosen: list[Model] = []
        for each in models:
            if lack.is_none:
                break
            if lack.is_reduced_by(each):
                lack.take(each, self._held[each])
                chosen.append(each)
        return chosen


@dataclass
class _Lack:
    """The bytes and the places in its family that a model lacks; negative if there are some to spare."""

    size: int
    places: int
    family: Family | None

    @property
    def is_none(self) -> bool:
        return self.size <= 0 and self.places <= 0

    def is_reduced_by(self, other: Model) -> bool:
        return self.size > 0 or self._is_kin(other)

    def take(self, other: Model, size: int) -> None:
        self.size -= size
        self.places -= self._is_kin(other)

    def _is_kin(self, other: Model) -> bool:
        return self.family is not None and other.family is not None and other.family.name == self.family.name


def _has_run_long(model: Model) -> bool:
    return model.run_seconds >= max(_RUN_TO_LOAD * model.load_seconds, _SHORTEST_RUN_S)


def _count_down(counts: Counter[Any], what: Hashable) -> None:
    counts[what] -= 1
    if not counts[what]:
        del counts[what]
