"""Tests that pipelines are built as Beam builds them, only faster."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import weakref
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options import pipeline_options
from apache_beam.options.pipeline_options import CrossLanguageOptions, DebugOptions, PipelineOptions, StandardOptions
from apache_beam.transforms import core
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, get_dofn_specs, on_timer
from apache_beam.utils import interactive_utils

from luminosity.beam_fixes import quick_building
from luminosity.beam_fixes.quick_building import build_quickly
from luminosity.runner_options import LuminosityOptions

BEAMS_VIEW_AS: Any = vars(quick_building)["_view_as"]
FLAGS = ["--streaming", "--experiments=one", "--experiments=two", "--runner=Direct", "--project=mine", "--unknown=3"]
CLASSES = [
    each
    for each in vars(pipeline_options).values()
    if isinstance(each, type) and issubclass(each, PipelineOptions) and each is not PipelineOptions
]


@pytest.fixture(autouse=True)
def quickly() -> None:
    build_quickly()


@pytest.mark.parametrize("flags", [[], FLAGS])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_view_is_the_one_of_beam(kind: type[PipelineOptions], flags: list[str]) -> None:
    ours, theirs = (PipelineOptions(flags, runner="Flink") for _ in range(2))
    for _ in range(2):  # the second view is remembered
        view, expected = ours.view_as(kind), BEAMS_VIEW_AS(theirs, kind)
        assert type(view) is kind
        assert view.__dict__ == expected.__dict__
        assert ours.get_all_options() == theirs.get_all_options()


def test_flags_of_the_command_line_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["script.py", f"--experiments={value}"])
        assert PipelineOptions().view_as(DebugOptions).experiments == [value]


def test_views_share_their_values_and_pipelines_do_not() -> None:
    first, second = PipelineOptions(FLAGS), PipelineOptions(FLAGS)
    first.view_as(DebugOptions).experiments.append("three")
    first.view_as(StandardOptions).streaming = False
    assert first.view_as(DebugOptions).experiments == ["one", "two", "three"]
    assert not first.view_as(StandardOptions).streaming
    assert second.view_as(DebugOptions).experiments == ["one", "two"]
    assert second.view_as(StandardOptions).streaming


def test_defaults_that_a_command_sets_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers, services in (("1", {}), ("2", {"a": "b"})):
        monkeypatch.setitem(LuminosityOptions.defaults, "cpu_workers", workers)
        monkeypatch.setenv("BEAM_SERVICE_OVERRIDES", json.dumps(services))
        options = PipelineOptions([])
        assert options.view_as(LuminosityOptions).cpu_workers == workers
        assert options.view_as(CrossLanguageOptions).beam_services == services


def test_options_of_users_may_have_a_new_default_for_each_pipeline() -> None:
    names = itertools.count()

    class Named(PipelineOptions):
        @classmethod
        def _add_argparse_args(cls, parser: Any) -> None:
            parser.add_argument("--our_name", default=f"run-{next(names)}")

    first, second = PipelineOptions([]), PipelineOptions([])
    assert first.view_as(Named).our_name != second.view_as(Named).our_name
    assert first.view_as(Named).our_name == first.view_as(Named).our_name
    gone = weakref.ref(Named)
    del Named
    gc.collect()
    assert gone() is None  # otherwise its flags would be parsed for all pipelines that follow


class Stateful(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())
    END = TimerSpec("end", beam.TimeDomain.WATERMARK)
    STATE = beam.DoFn.StateParam(COUNT)
    TIMER = beam.DoFn.TimerParam(END)

    def process(self, element: Any, count: Any = STATE, end: Any = TIMER): ...

    @on_timer(END)
    def ends(self, count: Any = STATE): ...


class Twice(beam.DoFn):
    def process(self, element: Any, a: Any = beam.DoFn.WindowParam, b: Any = beam.DoFn.WindowParam): ...


def test_state_and_timers_are_found_and_double_parameters_refused() -> None:
    for _ in range(2):
        assert get_dofn_specs(Stateful()) == ({Stateful.COUNT}, {Stateful.END})
        with pytest.raises(ValueError, match="duplicate process method parameters"):
            get_dofn_specs(Twice())


def test_what_is_remembered_of_a_method_can_be_changed_by_its_reader() -> None:
    for _ in range(2):
        names, defaults = core.get_function_args_defaults(Stateful().process)
        assert names == ["element", "count", "end"]
        assert defaults == [Stateful.STATE, Stateful.TIMER]
        names.clear()
        defaults.clear()


def test_only_so_many_methods_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> beam.DoFn:
        end = TimerSpec("end", beam.TimeDomain.WATERMARK)
        timer = beam.DoFn.TimerParam(end)

        class Local(beam.DoFn):
            def process(self, element: Any, timer: Any = timer): ...

            @on_timer(end)
            def ends(self, timer: Any = timer): ...

        return Local()

    monkeypatch.setattr(quick_building, "_MOST_METHODS", 50)
    for _ in range(100):
        assert len(get_dofn_specs(step())[1]) == 1
    assert len(vars(quick_building)["_parameters"]) <= 50


def test_ipython_is_not_imported_to_see_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not interactive_utils.is_in_ipython()
    assert "IPython" not in sys.modules
