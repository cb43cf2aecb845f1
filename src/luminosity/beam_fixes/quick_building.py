"""Builds pipelines faster: Beam parses the same options and inspects the same methods again for every step.

Building a pipeline of eight steps takes Beam 180 ms of CPU. Of these, ``PipelineOptions.view_as`` takes 100 ms, since
it makes a parser and parses all flags a hundred times. ``inspect.signature`` of each method of each ``DoFn`` takes 30
ms, and half of the time of ``to_runner_api``. The first step and the end
of a run import IPython, to ask whether this is a notebook.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import types
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from apache_beam import pipeline
from apache_beam.options import pipeline_options
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import core
from apache_beam.utils import interactive_utils

__all__ = ["build_quickly"]

_MOST_VIEWS = 128  # a pipeline uses about ten classes of options
_MOST_METHODS = 4096  # of steps: a DoFn has about 30. A timer's default names its own method, and so keeps it alive
# Classes of users are not remembered: Beam looks at all that exist, so those of a function must go with it.
_OF_MODULES = ("apache_beam.options.pipeline_options", "luminosity.runner_options")


class _View(NamedTuple):
    """What one class of options found in the flags of a pipeline."""

    values: dict[str, Any]  # of all options of the pipeline, which its views share. Kept, so that its id stays its own
    flags: list[str]
    visible: dict[str, Any]


_views: dict[tuple[int, type[PipelineOptions]], _View] = {}
_parameters: weakref.WeakKeyDictionary[Callable[..., Any], tuple[list[str], list[Any]]] = weakref.WeakKeyDictionary()
_Parser: type[argparse.ArgumentParser] = vars(pipeline_options)["_BeamArgumentParser"]
_view_as = PipelineOptions.view_as
_args_defaults = core.get_function_args_defaults
_is_in_ipython = interactive_utils.is_in_ipython


def build_quickly() -> None:
    """Let Beam remember parsed options and inspected methods. Calling it again changes nothing."""
    PipelineOptions.view_as = _remembered_view  # type: ignore[assignment, method-assign]
    _Parser.__init__ = _init_parser  # type: ignore[method-assign]
    core.get_function_args_defaults = _remembered_args_defaults
    for module in (interactive_utils, pipeline):
        vars(module)["is_in_ipython"] = _is_in_imported_ipython


def _remembered_view(options: PipelineOptions, cls: type[PipelineOptions]) -> PipelineOptions:
    """Do what ``view_as`` does, and parse the flags of a pipeline once for each class of options.

    Defaults are looked up again for each pipeline: they may be random, or set by a command.
    """
    if cls.__module__ not in _OF_MODULES:
        return _view_as(options, cls)
    state = options.__dict__
    values, flags = state["_all_options"], state["_flags"]
    key, given = (id(values), cls), list(sys.argv[1:] if flags is None else flags)
    known = _views.get(key)
    if known is None or known.values is not values or known.flags != given:
        view = _view_as(options, cls)
        if len(_views) >= _MOST_VIEWS:
            _views.clear()
        _views[key] = _View(values, given, dict(vars(view.__dict__["_visible_options"])))
        return view
    for name, value in known.visible.items():
        values.setdefault(name, value)
    view = cls.__new__(cls)
    view.__dict__.update(_flags=flags, _visible_options=argparse.Namespace(**known.visible), _all_options=values)
    return view


def _init_parser(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
    argparse.ArgumentParser.__init__(self, *args, **{"formatter_class": _Formatter, **kwargs})


class _Formatter(argparse.HelpFormatter):
    """Asks once how wide the terminal is. A parser makes a formatter for each option that it gets."""

    def __init__(self, prog: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(prog, *args, **{"width": _width(), **kwargs})


@cache
def _width() -> int:
    return shutil.get_terminal_size().columns - 2  # as argparse does


def _remembered_args_defaults(function: Callable[..., Any]) -> tuple[list[str], list[Any]]:
    """Return the names and the defaults of the parameters of a function, inspected once if it is a method."""
    method = function.__func__ if isinstance(function, types.MethodType) else None
    if not isinstance(method, types.FunctionType):
        return _args_defaults(function)
    found = _parameters.get(method)
    if found is None:
        if len(_parameters) >= _MOST_METHODS:
            _parameters.clear()
        found = _parameters[method] = _args_defaults(function)
    return list(found[0]), list(found[1])


def _is_in_imported_ipython() -> bool:
    """Return whether an IPython shell runs, and don't import IPython to see that none does."""
    return "IPython" in sys.modules and _is_in_ipython()
