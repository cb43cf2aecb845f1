"""Cells of state as steps see them: values stay decoded until the bundle ends, and go to the bag below at once."""

from __future__ import annotations

import copy
import random
import types
from typing import Any

from apache_beam.runners.worker import bundle_processor
from apache_beam.transforms import core

__all__ = ["AddingState", "ValueState", "copy_of_callable"]

_OfCallable: Any = core.CallableWrapperCombineFn
_UNREAD: Any = object()  # in place of a value that was neither read nor written
_EMPTY: Any = object()  # in place of the value of an empty cell


class ValueState(bundle_processor.ReadModifyWriteRuntimeState):
    """Beam's state of one value, but it is read from the bag below at most once, and written once.

    Beam goes through the bag and its cache with each call.
    """

    _value = _UNREAD
    _is_written = False

    def read(self) -> Any:
        """Return the value, or None if the cell is empty. The first call may block."""
        if self._value is _UNREAD:
            self._value = next(iter(self._underlying_bag_state.read()), _EMPTY)
        return None if self._value is _EMPTY else self._value

    def write(self, value: Any) -> None:
        """Replace the value."""
        self._value, self._is_written = value, True

    def clear(self) -> None:
        """Empty the cell."""
        self._value, self._is_written = _EMPTY, True

    def commit(self) -> None:
        """Write the last value."""
        if self._is_written:
            self._underlying_bag_state.clear()
            if self._value is not _EMPTY:
                self._underlying_bag_state.add(self._value)
        super().commit()


def copy_of_callable(combine_fn: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of the ``CombineFn`` of a callable: itself for a function, which has nothing to copy.

    Stands in the place of ``CallableWrapperCombineFn.__deepcopy__``: Beam copies it for each cell of each bundle.
    """
    if isinstance(combine_fn._fn, types.FunctionType | types.BuiltinFunctionType) and type(combine_fn) is _OfCallable:
        return combine_fn
    made = copy.copy(combine_fn)
    made.__dict__ = copy.deepcopy(combine_fn.__dict__, memo)
    return made


class AddingState(bundle_processor.CombiningValueRuntimeState):
    """Beam's state of a combining value, but values that are added in turn go into one accumulator.

    Beam makes an accumulator for each value, and merges all of them with every second value.
    """

    _accumulator: Any
    _has_accumulator = False  # with values that are not in the bag yet

    def add(self, value: Any) -> None:
        """Add a value to the accumulator. May read the cell."""
        if not self._has_accumulator:
            # As Beam does it: without reading at times, but the bag must not grow with each bundle.
            is_blind = random.random() < 0.5
            self._accumulator = self._combinefn.create_accumulator() if is_blind else self._taken()
            self._has_accumulator = True
        self._accumulator = self._combinefn.add_input(self._accumulator, value)

    def clear(self) -> None:
        """Clear the cell, with what was added."""
        self._forget()
        super().clear()

    def commit(self) -> None:
        """Write what was added."""
        self._keep()
        super().commit()

    def _read_accumulator(self, rewrite: bool = True) -> Any:
        self._keep()
        return super()._read_accumulator(rewrite)

    def _taken(self) -> Any:
        merged = self._read_accumulator(rewrite=False)
        self._underlying_bag_state.clear()
        return merged

    def _keep(self) -> None:
        """Move the accumulator into the bag. It gets no more values: what is read may be the accumulator itself."""
        if self._has_accumulator:
            self._underlying_bag_state.add(self._accumulator)
            self._forget()

    def _forget(self) -> None:
        self._has_accumulator, self._accumulator = False, None
