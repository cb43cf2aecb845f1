"""Calls of steps with state, timers or windows, without what Beam's worker does for each argument of each element.

Beam compares every argument of such a step with seven kinds of parameters, for each element. Here they are compared
once, when the step is set up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.runners import common
from apache_beam.transforms import core
from apache_beam.transforms.timeutil import TimeDomain

__all__ = ["QuickRunner", "make_runner"]

_DoFn: Any = core.DoFn
_beams_runner: Any = common.DoFnRunner

# The parameters of ``process``, and what it gets for them.
_ARGUMENTS: dict[str, str] = {
    "ElementParam": "value",
    "KeyParam": "value[0]",
    "WindowParam": "window",
    "WindowedValueParam": "windowed",
    "TimestampParam": "windowed.timestamp",
    "PaneInfoParam": "windowed.pane_info",
}


def make_runner(
    fn: core.DoFn, args: Any, kwargs: Any, side_inputs: Any, windowing: Any, tagged_receivers: Any, **named: Any
) -> Any:
    """Return what calls a step: a :class:`QuickRunner` if it can. Stands in the place of Beam's class."""
    side_inputs = list(side_inputs)
    has_batches = fn._process_batch_defined or fn._process_yields_batches  # pyright: ignore
    is_counted = "outputs_per_element_counter" in RuntimeValueProvider.experiments
    is_plain = not (args or kwargs or side_inputs or has_batches or is_counted)
    call = _call_of(fn, named.get("user_state_context")) if is_plain else None
    arguments = (fn, args, kwargs, side_inputs, windowing, tagged_receivers)
    return _beams_runner(*arguments, **named) if call is None else QuickRunner(call, *arguments, **named)


def _call_of(fn: core.DoFn, context: Any) -> tuple[Callable[[Any, Any, Any], Any], bool] | None:
    """Return a function that calls ``process`` of a step, and whether elements must have keys.

    The function gets the windowed value, its value and its window. None if Beam must call the step.
    """
    names, defaults = core.get_function_arguments(fn, "process")
    if not defaults:
        return None  # Beam has a quick way for it
    kinds = [_kind(default) for default in defaults]
    places = [] if "ElementParam" in kinds else ["value"]
    if len(names) != len(places) + len(defaults):
        return None
    known: dict[str, Any] = {"process": fn.process}
    for number, (default, kind) in enumerate(zip(defaults, kinds, strict=True)):
        spec = f"spec_{number}"
        if isinstance(default, _DoFn.StateParam) and context is not None:
            known |= {spec: default.state_spec, "get_state": context.get_state}
            places.append(f"get_state({spec}, value[0], window)")
        elif isinstance(default, _DoFn.TimerParam) and context is not None:
            known |= {spec: default.timer_spec, "get_timer": context.get_timer}
            # A timer in event time does not look at the element's timestamp, which would be made for it.
            timestamp = "None" if TimeDomain.is_event_time(default.timer_spec.time_domain) else "windowed.timestamp"
            places.append(f"get_timer({spec}, value[0], window, {timestamp}, windowed.pane_info)")
        elif kind in _ARGUMENTS:
            places.append(_ARGUMENTS[kind])
        else:
            return None
    # As dataclasses do it. Nothing of the user's is in the text.
    source = f"lambda windowed, value, window: process({', '.join(places)})"
    call = eval(compile(source, __file__, "eval"), known)
    return call, context is not None or _ARGUMENTS["KeyParam"] in places


def _kind(default: Any) -> str:
    """Return which parameter of Beam a default value stands for; empty for state, timers and values of the user."""
    return default.param_id if type(default) is type(_DoFn.ElementParam) else ""


class QuickRunner(common.DoFnRunner):
    """Beam's runner of a step, but ``process`` is called with arguments whose kinds are known."""

    def __init__(
        self,
        call: tuple[Callable[[Any, Any, Any], Any], bool],
        fn: core.DoFn,
        args: Any,
        kwargs: Any,
        side_inputs: Any,
        windowing: Any,
        tagged_receivers: Any,
        **named: Any,
    ) -> None:
        super().__init__(fn, args, kwargs, side_inputs, windowing, tagged_receivers, **named)
        self._call, self._needs_key = call
        is_generator = inspect.isgeneratorfunction(fn.process)
        outputs: Any = common._OutputHandler(  # pyright: ignore
            windowing.windowfn,
            tagged_receivers[None],
            tagged_receivers,
            None,
            None,
            False,
            False,
            check_user_dofn_output=not isinstance(fn, core.CallableWrapperDoFn) and not is_generator,
        )
        self._emit = outputs.handle_process_outputs

    def process(self, windowed_value: Any) -> Any:
        """Call the step for an element, and pass on what it returns."""
        value, windows = windowed_value.value, windowed_value.windows
        if len(windows) != 1 or (self._needs_key and (type(value) is not tuple or len(value) != 2)):
            return super().process(windowed_value)  # for each window, or with Beam's error
        try:
            results = self._call(windowed_value, value, windows[0])
            if results is not None:
                self._emit(windowed_value, results)
        except BaseException as error:
            self._reraise_augmented(error, windowed_value)
        return None
