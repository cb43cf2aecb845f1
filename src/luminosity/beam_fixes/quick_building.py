"""Builds pipelines faster: Beam parses the same options and inspects the same methods again for every step.

Building a pipeline of eight steps takes Beam 180 ms of CPU. Of these, ``PipelineOptions.view_as`` takes 100 ms, since
it makes a parser and parses all flags a hundred times. ``inspect.signature`` of each method of each ``DoFn`` takes 30
ms, and half of the time of ``to_runner_api``. The first step imports IPython, to ask whether this is a notebook.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
import types
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from apache_beam.options import pipeline_options
from apache_beam.options.pipeline_options import (
    DebugOptions,
    PipelineOptions,
    ProfilingOptions,
    SetupOptions,
    WorkerOptions,
)
from apache_beam.transforms import core
from apache_beam.utils import interactive_utils

__all__ = ["build_quickly", "make_worker_parsers"]

_MOST_VIEWS = 256  # a pipeline uses about ten classes of options
# Their options have the same defaults at any time. Those of other classes may have new ones for each pipeline, such as
# a random name or what an environment variable says.
_STEADY = ("apache_beam.options.pipeline_options", "luminosity.runner_options", "luminosity.inference.options")

_parsers: dict[tuple[Any, ...], argparse.ArgumentParser] = {}
_views: dict[tuple[Any, ...], dict[str, Any]] = {}
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
    interactive_utils.is_in_ipython = _is_in_imported_ipython


def make_worker_parsers() -> None:
    """Make the parsers that Beam's worker uses at its start, for workers that are forked from this process."""
    for kind in (DebugOptions, ProfilingOptions, SetupOptions, WorkerOptions):
        _parser_of(kind)


def _remembered_view(options: PipelineOptions, cls: type[PipelineOptions]) -> PipelineOptions:
    """Do what ``view_as`` does, and parse a list of flags once for each class of options."""
    if cls.__module__ not in _STEADY:
        return _view_as(options, cls)
    state = options.__dict__
    values, flags = state["_all_options"], state["_flags"]
    key = (cls, *(sys.argv[1:] if flags is None else flags))
    parsed = _views.get(key)
    if parsed is None:
        if len(_views) >= _MOST_VIEWS:
            _views.clear()
        parsed = _views[key] = vars(_parser_of(cls).parse_known_args(flags)[0])
    for name, value in parsed.items():
        if name not in values:
            values[name] = copy.deepcopy(value)  # the options of a pipeline may change their lists
    view = cls.__new__(cls)
    view.__dict__.update(_flags=flags, _visible_options=argparse.Namespace(**parsed), _all_options=values)
    return view


def _parser_of(cls: type[PipelineOptions]) -> argparse.ArgumentParser:
    key = (cls, os.environ.get("BEAM_SERVICE_OVERRIDES"))  # a default of CrossLanguageOptions
    if key not in _parsers:
        parser = _parsers[key] = _Parser(allow_abbrev=False)
        for each in cls.mro():
            if each is not PipelineOptions and "_add_argparse_args" in vars(each):
                each._add_argparse_args(parser)  # type: ignore[attr-defined]
    return _parsers[key]


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
        found = _parameters[method] = _args_defaults(function)
    return list(found[0]), list(found[1])


def _is_in_imported_ipython() -> bool:
    """Return whether an IPython shell runs, and don't import IPython to see that none does."""
    return "IPython" in sys.modules and _is_in_ipython()
