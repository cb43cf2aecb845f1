"""Tests of durable names, of a pipeline's shape, and of the comparison of two shapes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsList
from apache_beam.transforms import trigger
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import FixedWindows

from luminosity.engine.durable.comparison import Comparison, compare, fit
from luminosity.engine.durable.names import Names
from luminosity.engine.durable.shape import describe
from luminosity.engine.plan.graph import Graph
from luminosity.engine.plan.planner import plan
from luminosity.engine.prepare import worker_environment
from luminosity.errors import CheckpointError

Build = Callable[[beam.Pipeline], Any]


def proto_of(build: Build) -> Any:
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    build(pipeline)
    return pipeline.to_runner_api(default_environment=worker_environment(PipelineOptions([])))


def planned(build: Build, roots: Iterable[str] = (), *, is_drain: bool = False) -> Graph:
    return plan(proto_of(build), is_drain=is_drain, is_durable=True, roots=frozenset(roots))


@functools.cache
def json_of(build: Build) -> str:
    return json.dumps(describe(planned(build)))


def shape(build: Build) -> dict[str, Any]:
    return json.loads(json_of(build))


def compared(
    old: Build,
    new: Build,
    has_data: Iterable[str],
    mapping: dict[str, str] | None = None,
    dropped: Iterable[str] = (),
) -> Comparison:
    before = shape(old)
    parts = {*before["steps"], *before["reads"], *before["buffers"], *before["stages"]}
    assert {owner.split("/")[1] for owner in has_data} <= parts
    return compare(before, shape(new), mapping or {}, list(dropped), set(has_data))


def stateful(spec: Any = None, timer_domain: str = TimeDomain.WATERMARK, timer: str = "flush") -> beam.DoFn:
    state = spec or BagStateSpec("seen", VarIntCoder())
    timer_spec = TimerSpec(timer, timer_domain)
    state_parameter, timer_parameter = beam.DoFn.StateParam(state), beam.DoFn.TimerParam(timer_spec)

    class Stateful(beam.DoFn):
        def process(self, element: Any, state: Any = state_parameter, timer: Any = timer_parameter) -> Any:
            yield element

        @on_timer(timer_spec)
        def flush(self) -> Any:
            yield from ()

    return Stateful()


class Stateless(beam.DoFn):
    def process(self, element: Any) -> Any:
        yield element


class Provider(beam.transforms.core.RestrictionProvider):
    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 10)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return restriction.size()


_TRACKER = beam.DoFn.RestrictionParam(Provider())


class Splittable(beam.DoFn):
    @beam.DoFn.unbounded_per_element()
    def process(self, element: Any, tracker: Any = _TRACKER) -> Any:
        yield element


def source(pipeline: beam.Pipeline) -> Any:
    return (
        pipeline
        | "Read" >> beam.Create([("a", 1)])
        | "Parse" >> beam.Map(lambda x: x).with_output_types(tuple[str, int])
    )


def everything(pipeline: beam.Pipeline) -> None:
    parsed = source(pipeline)
    parsed | "Remember" >> beam.ParDo(stateful()) | "Print" >> beam.Map(print)
    parsed | "Sum" >> beam.CombinePerKey(sum) | "Show" >> beam.Map(print)
    more = pipeline | "More" >> beam.Create([("b", 1)])
    both = (parsed, more) | "Both" >> beam.Flatten()
    both | "Move" >> beam.Reshuffle() | "Count" >> beam.Map(len)
    both | "Group" >> beam.GroupByKey() | "With" >> beam.Map(lambda x, side: x, AsList(more))
    tagged = parsed | "Tag" >> beam.ParDo(Stateless()).with_outputs("late", main="early")
    tagged.late | "Late" >> beam.ParDo(stateful())
    pipeline | "Start" >> beam.Impulse() | "Stream" >> beam.ParDo(Splittable()) | beam.Map(lambda x: x)


def everything_in_another_order(pipeline: beam.Pipeline) -> None:
    """The same steps, built last to first, with lambdas in other lines and another branch."""
    pipeline | "Start" >> beam.Impulse() | "Stream" >> beam.ParDo(Splittable()) | beam.Map(lambda x: x + 1)
    more = pipeline | "More" >> beam.Create([("b", 1), ("c", 2)])
    parsed = source(pipeline)
    tagged = parsed | "Tag" >> beam.ParDo(Stateless()).with_outputs("late", main="early")
    tagged.late | "Late" >> beam.ParDo(stateful())
    both = (more, parsed) | "Both" >> beam.Flatten()
    both | "Group" >> beam.GroupByKey() | "With" >> beam.Map(lambda x, side: x, AsList(more))
    both | "Move" >> beam.Reshuffle() | "Count" >> beam.Map(len)
    (pipeline | "Other" >> beam.Create([("x", 1)]) | "Double" >> beam.GroupByKey() | beam.Map(lambda x: x))
    parsed | "Sum" >> beam.CombinePerKey(sum) | "Show" >> beam.Map(print)
    parsed | "Mean" >> beam.CombinePerKey(beam.combiners.MeanCombineFn())
    parsed | "Remember" >> beam.ParDo(stateful()) | "Print" >> beam.Map(str)


def names_of(graph: Graph) -> dict[str, set[str]]:
    names = Names(graph)
    transforms = [t for s in graph.stages for t in s.transforms if "runner:" not in t.spec.urn]
    found = {
        "steps": [names.of_step(t.unique_name) for t in transforms],
        "reads": [names.of_read(stage, read) for stage in graph.stages for read in stage.reads],
        "buffers": [names.of_buffer(buffer_id) for buffer_id in graph.buffers],
        "stages": [names.of_stage(stage) for stage in graph.stages],
    }
    for each in found.values():
        assert len(each) == len(set(each))
        assert not [name for name in each if "ref_" in name or "/" in name or ".py" in name or "pcollection" in name]
    return {kind: set(each) for kind, each in found.items()}


def test_names_are_unique_and_without_beams_numbers() -> None:
    names = names_of(planned(everything))
    assert {"Parse|Remember", "Sum%2FGroup|Sum%2FMerge", "Move|Count", "Tag%2FParDo(Stateless):late|Late"} <= names[
        "reads"
    ]
    assert {"Sum%2FGroup", "Group", "More%2FMap(decode)"} <= names["buffers"]


def test_names_outlive_other_branches_and_another_order() -> None:
    before, after = names_of(planned(everything)), names_of(planned(everything_in_another_order))
    for kind, names in before.items():
        assert names <= after[kind]


def test_a_drain_has_the_same_names() -> None:
    before, drained = describe(planned(everything)), describe(planned(everything, is_drain=True))
    assert [before[part] for part in ("reads", "buffers", "stages")] == [
        drained[part] for part in ("reads", "buffers", "stages")
    ]


def test_a_shape_is_the_same_each_time() -> None:
    assert json_of.__wrapped__(everything) == json_of.__wrapped__(everything)


def test_an_unchanged_pipeline_needs_nothing() -> None:
    before = shape(everything)
    owners = {f"queue/{read}" for read in before["reads"]} | {f"metrics/{stage}" for stage in before["stages"]}
    owners |= {f"grouping/{b}/rows" for b, each in before["buffers"].items() if each["kind"] == "group"}
    owners |= {f"side/{b}" for b, each in before["buffers"].items() if each["side_inputs"]}
    owners |= {"state/Remember", "timers/Remember/ts-flush", "state/Late"}
    assert compare(before, shape(everything), {}, [], owners) == Comparison()
    assert compare(before, shape(everything_in_another_order), {}, [], owners).moves == {}


def moved(*takers: str, is_stateful: bool = False) -> Build:
    def build(pipeline: beam.Pipeline) -> None:
        output = source(pipeline) | "Move" >> beam.Reshuffle()
        for taker in takers:
            output | taker >> beam.ParDo(stateful() if is_stateful else Stateless())

    return build


def test_a_new_step_in_the_same_stage_gets_the_elements_that_wait() -> None:
    found = compared(moved("A"), moved("A", "B"), ["queue/Move|A", "metrics/Move|A"])
    assert found.moves == {"queue/Move|A": ("queue/Move|A&B",), "metrics/Move|A": ("metrics/Move|A&B",)}
    assert not found.roots


def test_steps_that_part_get_the_elements_both() -> None:
    found = compared(moved("A", "B"), moved("A", "B", is_stateful=True), ["queue/Move|A&B"])
    assert found.moves == {"queue/Move|A&B": ("queue/Move|A", "queue/Move|B")}


def test_steps_that_would_meet_are_planned_apart_while_elements_wait() -> None:
    old, proto = shape(moved("A", "B", is_stateful=True)), proto_of(moved("A", "B"))
    graph, found = fit(lambda roots: plan(proto, is_durable=True, roots=roots), old, {}, [], {"queue/Move|A"})
    assert {"Move|A", "Move|B"} <= names_of(graph)["reads"]
    assert found.moves == {}
    graph, found = fit(lambda roots: plan(proto, is_durable=True, roots=roots), old, {}, [], {"metrics/Move|A"})
    assert "Move|A&B" in names_of(graph)["reads"]


def test_a_step_that_would_be_fused_starts_a_stage_while_elements_wait() -> None:
    def build(do_fn: beam.DoFn) -> Build:
        return lambda pipeline: source(pipeline) | "A" >> beam.ParDo(do_fn)

    proto = proto_of(build(Stateless()))
    graph, found = fit(
        lambda roots: plan(proto, is_durable=True, roots=roots), shape(build(stateful())), {}, [], {"queue/Parse|A"}
    )
    assert "Parse|A" in names_of(graph)["reads"]
    assert found.moves == {}


def flattened(*readers: str) -> Build:
    def build(pipeline: beam.Pipeline) -> None:
        both = (source(pipeline), pipeline | "More" >> beam.Create([("b", 1)])) | "Both" >> beam.Flatten()
        for reader in readers:
            both | reader >> beam.GroupByKey()

    return build


def test_elements_that_wait_before_a_grouping_keep_their_reader() -> None:
    old = shape(flattened("G", "H"))
    assert [read for read in old["reads"] if read.startswith("Both|")]
    proto = proto_of(flattened("G"))
    (owner,) = [f"queue/{read}" for read in old["reads"] if read.startswith("Both|")]
    graph, found = fit(lambda roots: plan(proto, is_durable=True, roots=roots), old, {}, [], {owner})
    (target,) = found.moves.get(owner, (owner,))
    assert target.removeprefix("queue/") in names_of(graph)["reads"]


def test_a_new_combiner_changes_no_other() -> None:
    def build(*names: str) -> Build:
        def apply(pipeline: beam.Pipeline) -> None:
            parsed = source(pipeline)
            for name in names:
                parsed | name >> beam.CombinePerKey(sum)

        return apply

    assert compared(build("Sum"), build("Sum", "Again"), ["grouping/Sum%2FGroup/rows"]) == Comparison()


def with_state(do_fn: beam.DoFn, name: str = "Remember", windows: Any = None) -> Build:
    def build(pipeline: beam.Pipeline) -> None:
        parsed = source(pipeline)
        if windows is not None:
            parsed = parsed | "Windows" >> windows
        parsed | name >> beam.ParDo(do_fn)

    return build


_REMEMBER = with_state(stateful())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            with_state(stateful(BagStateSpec("seen", StrUtf8Coder()))),
            "element coder of the state 'seen' was varint, and is string_utf8 now",
        ),
        (with_state(stateful(ReadModifyWriteStateSpec("seen", VarIntCoder()))), "the kind of the state 'seen' was bag"),
        (
            with_state(stateful(BagStateSpec("seem", VarIntCoder()))),
            "the state 'seen' is missing; did you mean 'seem'?",
        ),
        (with_state(stateful(timer_domain=TimeDomain.REAL_TIME)), "time domain of the timer 'flush' was event_time"),
        (with_state(stateful(timer="flash")), "the timer 'flush' is missing; did you mean 'flash'?"),
        (with_state(stateful(), windows=beam.WindowInto(FixedWindows(60))), "the windows was global_windows"),
        (with_state(Stateless()), "had state, and has no state or timers now"),
    ],
)
def test_changed_state_is_refused(changed: Build, message: str) -> None:
    owners, old = ["state/Remember", "timers/Remember/ts-flush"], _REMEMBER
    with pytest.raises(CheckpointError) as error:
        compared(old, changed, owners)
    assert "step 'Remember': " in str(error.value)
    assert message in str(error.value)
    assert "--drop_state=STEP" in str(error.value)
    assert not compared(old, changed, []).dropped
    assert compared(old, changed, owners, dropped=["Remember"]).dropped == set(owners)


def test_more_state_and_other_code_are_compatible() -> None:
    seen_parameter = beam.DoFn.StateParam(BagStateSpec("seen", VarIntCoder()))
    new_parameter = beam.DoFn.StateParam(BagStateSpec("new", VarIntCoder()))

    class More(beam.DoFn):
        def process(self, element: Any, seen: Any = seen_parameter, new: Any = new_parameter) -> Any:
            yield element

    assert compared(_REMEMBER, with_state(More()), ["state/Remember"]) == Comparison()


def test_a_renamed_step_needs_a_mapping() -> None:
    old, new = _REMEMBER, with_state(stateful(), "Recall")
    owners = ["state/Remember", "queue/Parse|Remember"]
    with pytest.raises(CheckpointError, match=r"'Remember': is missing, and 'Recall' is new there") as error:
        compared(old, new, owners)
    assert """--transform_name_mapping='{"Remember": "Recall"}'""" in str(error.value)
    assert "has no state" not in str(error.value)  # one difference is told once
    found = compared(old, new, owners, {"Remember": "Recall"})
    assert found.moves == {"state/Remember": ("state/Recall",), "queue/Parse|Remember": ("queue/Parse|Recall",)}
    assert found.renamed == {"Remember": "Recall"}


class Inner(beam.PTransform):
    def expand(self, pcoll: Any) -> Any:
        return pcoll | "Remember" >> beam.ParDo(stateful()) | beam.Map(lambda x: x) | beam.Reshuffle()


def test_a_mapping_renames_a_composite_with_its_parts() -> None:
    def build(name: str) -> Build:
        return lambda pipeline: source(pipeline) | name >> Inner() | "Sum" >> beam.CombinePerKey(sum)

    owners = ["state/Old%2FRemember", "queue/Old%2FReshuffle|Sum%2FPrecombine"]
    found = compared(build("Old"), build("New"), owners, {"Old": "New"})
    assert found.moves == {owner: (owner.replace("Old", "New"),) for owner in owners}


@pytest.mark.parametrize(
    ("mapping", "dropped", "message"),
    [
        ({"Remembr": "Recall"}, [], "the checkpoint has no step 'Remembr'; did you mean 'Remember'?"),
        ({"Remember": "Recall"}, [], "the pipeline has no step 'Recall'"),
        ({}, ["Parsed"], "--drop_state: the checkpoint has no step 'Parsed'; did you mean 'Parse'?"),
    ],
)
def test_arguments_must_name_steps(mapping: dict[str, str], dropped: list[str], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        compared(_REMEMBER, _REMEMBER, [], mapping, dropped)
    assert message in str(error.value)


def test_what_a_removed_branch_stored_is_dropped() -> None:
    def without(pipeline: beam.Pipeline) -> None:
        source(pipeline) | "Keep" >> beam.ParDo(stateful())

    def both(pipeline: beam.Pipeline) -> None:
        parsed = source(pipeline)
        parsed | "Keep" >> beam.ParDo(stateful())
        parsed | "Remember" >> beam.ParDo(stateful()) | "Sum" >> beam.CombinePerKey(sum) | "Show" >> beam.Map(print)

    owners = {"state/Remember", "queue/Parse|Remember", "grouping/Sum%2FGroup/rows"}
    found = compared(both, without, {*owners, "state/Keep"})
    assert found.dropped == owners
    assert any("'Remember' was removed" in note and "dropped" in note for note in found.notes)
    assert not found.moves


def test_a_removed_step_before_others_is_refused() -> None:
    def build(*steps: Any) -> Build:
        def apply(pipeline: beam.Pipeline) -> None:
            parsed = source(pipeline)
            for step in steps:
                parsed = parsed | step

        return apply

    step, show = "Remember" >> beam.ParDo(stateful()), "Show" >> beam.Map(print)
    with pytest.raises(CheckpointError, match="'Remember': is missing, but 'Show', which read its output, is there"):
        compared(build(step, show), build(show), ["state/Remember"])
    assert compared(build(step, show), build(show), ["state/Remember"], dropped=["Remember"]).dropped


def test_a_step_inserted_before_waiting_elements_is_refused() -> None:
    def inserted(pipeline: beam.Pipeline) -> None:
        (
            source(pipeline)
            | "Clean" >> beam.ParDo(Stateless()).with_output_types(tuple[str, int])
            | "Remember" >> beam.ParDo(stateful())
        )

    with pytest.raises(CheckpointError, match="'Remember': elements of 'Parse' wait for it, and it reads 'Clean' now"):
        compared(_REMEMBER, inserted, ["queue/Parse|Remember"])
    assert compared(_REMEMBER, inserted, ["state/Remember"]) == Comparison()
    found = compared(_REMEMBER, inserted, ["queue/Parse|Remember"], {"Parse": "Clean"})
    assert found.moves == {"queue/Parse|Remember": ("queue/Clean|Remember",)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (beam.WindowInto(FixedWindows(30)), "the windows of its input was fixed_windows"),
        (
            beam.WindowInto(FixedWindows(60), allowed_lateness=9),
            "the allowed lateness of its input was 0 s, and is 9 s",
        ),
        (
            beam.WindowInto(
                FixedWindows(60),
                trigger=trigger.AfterWatermark(early=trigger.AfterCount(2)),
                accumulation_mode=trigger.AccumulationMode.ACCUMULATING,
            ),
            "the accumulation of its input was discarding, and is accumulating",
        ),
    ],
)
def test_changed_windowing_of_a_grouping_is_refused(changed: Any, message: str) -> None:
    def build(windows: Any) -> Build:
        return lambda pipeline: source(pipeline) | "Windows" >> windows | "Group" >> beam.GroupByKey()

    old = build(beam.WindowInto(FixedWindows(60)))
    with pytest.raises(CheckpointError) as error:
        compared(old, build(changed), ["grouping/Group/rows"])
    assert f"step 'Group': {message}" in str(error.value)
    assert not compared(old, build(changed), []).moves


def streaming(do_fn: beam.DoFn) -> Build:
    return lambda pipeline: pipeline | "Start" >> beam.Impulse() | "Stream" >> beam.ParDo(do_fn)


def test_a_source_that_is_no_longer_splittable_is_refused() -> None:
    owner = "queue/Stream%2FReshuffle|Stream%2FProcess"
    assert compared(streaming(Splittable()), streaming(Splittable()), [owner]) == Comparison()
    with pytest.raises(CheckpointError, match="step 'Stream': is no longer splittable"):
        compared(streaming(Splittable()), streaming(Stateless()), [owner])


def test_a_changed_coder_of_waiting_elements_is_refused() -> None:
    def build(hint: Any) -> Build:
        return lambda pipeline: (
            pipeline
            | "Read" >> beam.Create([1])
            | "Parse" >> beam.Map(lambda x: x).with_output_types(hint)
            | "Move" >> beam.Reshuffle()
            | "A" >> beam.ParDo(Stateless())
        )

    with pytest.raises(CheckpointError, match=r"step 'A': the coder of its input was .*varint.*, and is .*string_utf8"):
        compared(build(int), build(str), ["queue/Move|A"])


def test_a_side_input_finds_its_readers() -> None:
    def build(*readers: str) -> Build:
        def apply(pipeline: beam.Pipeline) -> None:
            side = pipeline | "Side" >> beam.Create([1]) | "Prepare" >> beam.ParDo(Stateless())
            for reader in readers:
                main = pipeline | f"Main {reader}" >> beam.Create([1])
                main | reader >> beam.Map(lambda x, side: x, AsList(side))

        return apply

    for old, new in ((build("A"), build("B", "A")), (build("A", "B"), build("B"))):
        found = compared(old, new, ["side/Prepare"])
        assert (found.moves, found.dropped) == ({}, set())
    assert compared(build("A"), lambda pipeline: source(pipeline), ["side/Prepare"], dropped=["A"]).dropped


def test_a_new_source_still_needs_its_impulse() -> None:
    def two(pipeline: beam.Pipeline) -> None:
        streaming(Splittable())(pipeline)
        pipeline | "More" >> beam.Create([1])

    found = compared(streaming(Splittable()), two, [])
    (name,) = found.new_sources
    assert name.startswith("More%2FImpulse|")
