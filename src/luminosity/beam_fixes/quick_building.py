"""Builds pipelines faster: Beam parses the same options and inspects the same methods again for every step.

Building a pipeline of eight steps takes Beam 180 ms of CPU. Of these, ``PipelineOptions.view_as`` takes 100 ms, since
it makes a parser and parses all flags a hundred times. ``inspect.signature`` of each method of each ``DoFn`` takes 30
ms, and half of the time of ``to_runner_api``. The first step imports IPython, to ask whether this is a notebook.
"""

from __future__ import annotations

import copy
import os
import sys
import types
import weakref
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import core
from apache_beam.utils import interactive_utils

__all__ = ["build_quickly"]

_MOST_VIEWS = 256  # a pipeline uses about ten classes of options
# Their options have the same defaults at any time. Those of other classes may have new ones for each pipeline, such as
# a random name or what an environment variable says.
_STEADY = ("apache_beam.options.pipeline_options", "luminosity.runner_options", "luminosity.inference.options")

_views: dict[tuple[Any, ...], dict[str, Any]] = {}
_parameters: weakref.WeakKeyDictionary[Callable[..., Any], tuple[list[str], list[Any]]] = weakref.WeakKeyDictionary()
_view_as = PipelineOptions.view_as
_args_defaults = core.get_function_args_defaults
_is_in_ipython = interactive_utils.is_in_ipython


def build_quickly() -> None:
    """Let Beam remember parsed options and inspected methods. Calling it again changes nothing."""
    PipelineOptions.view_as = _remembered_view  # type: ignore[assignment, method-assign]
    core.get_function_args_defaults = _remembered_args_defaults
    interactive_utils.is_in_ipython = _is_in_imported_ipython


def _remembered_view(options: PipelineOptions, cls: type[PipelineOptions]) -> PipelineOptions:
    """Do what ``view_as`` does, and parse a list of flags once for each class of options."""
    if cls.__module__ not in _STEADY:
        return _view_as(options, cls)
    state = options.__dict__
    flags = state["_flags"]
    key = (cls, os.environ.get("BEAM_SERVICE_OVERRIDES"), *(sys.argv[1:] if flags is None else flags))
    parsed = _views.get(key)
    if parsed is None:
        view = _view_as(options, cls)
        if len(_views) >= _MOST_VIEWS:
            _views.clear()
        # A copy: the options of this pipeline may change their lists.
        _views[key] = copy.deepcopy(vars(view.__dict__["_visible_options"]))
        return view
    values = state["_all_options"]
    for name, value in parsed.items():
        if name not in values:
            values[name] = copy.deepcopy(value)
    view = cls.__new__(cls)
    view.__dict__.update(_flags=flags, _visible_options=Namespace(**parsed), _all_options=values)
    return view


def _remembered_args_defaults(function: Callable[..., Any]) -> tuple[list[str], list[Any]]:
    """Return the names and the defaults of the parameters of a function, inspected once if it is a method."""
    method = function.__func__ if isinstance(function, types.MethodType) else None
    if not isinstance(method, types.FunctionType):
        return _args_defaults(function)
    found = _parameters.get(method)
    if found is None:
        found = _parameters[method] = _args_defaults(function)
    return list(found[0]), list(found[1])


def _is_in_imported_ipython() -> bool:
    """Return whether an IPython shell runs, and don't import IPython to see that none does."""
    return "IPython" in sys.modules and _is_in_ipython()
