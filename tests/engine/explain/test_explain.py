"""Tests of explanations: every place where fusion breaks has its true reason, with the author's step names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity.engine.explain.explanation import ReasonKind
from tests.dofns import Numbers
from tests.plans import Stateful, branching, break_between, explained, pairs, same, stage_with
from tests.recipes import OPERATIONS


def with_reshuffle(p: beam.Pipeline, *, is_there: bool) -> None:
    first = pairs(p) | "A" >> beam.Map(same)
    _ = (first | "R" >> beam.Reshuffle() if is_there else first) | "B" >> beam.Map(same)


def with_group(p: beam.Pipeline, *, is_there: bool) -> None:
    first = pairs(p) | "A" >> beam.Map(same).with_output_types(tuple[int, int])
    _ = (first | "G" >> beam.GroupByKey() if is_there else first) | "B" >> beam.Map(same)


def with_combine(p: beam.Pipeline, *, is_there: bool) -> None:
    first = pairs(p) | "A" >> beam.Map(same).with_output_types(tuple[int, int])
    _ = (first | "C" >> beam.CombinePerKey(sum) if is_there else first) | "B" >> beam.Map(same)


def with_flatten(p: beam.Pipeline, *, is_there: bool) -> None:
    first, other = pairs(p) | "A" >> beam.Map(same), pairs(p, "Other") | "O" >> beam.Map(same)
    _ = ((first, other) | "F" >> beam.Flatten() if is_there else first) | "B" >> beam.Map(same)


def with_state(p: beam.Pipeline, *, is_there: bool) -> None:
    first = pairs(p) | "A" >> beam.Map(same).with_output_types(tuple[int, int])
    _ = first | "B" >> (beam.ParDo(Stateful()) if is_there else beam.Map(same))


def with_hints(p: beam.Pipeline, *, is_there: bool) -> None:
    hints = {"min_ram": "1GiB", "cpu_count": "1"} if is_there else {}
    _ = pairs(p) | "A" >> beam.Map(same) | "B" >> beam.Map(same).with_resource_hints(**hints)


def with_own_side_input(p: beam.Pipeline, *, is_there: bool) -> None:
    first = pairs(p) | "A" >> beam.Map(same)
    side = (first if is_there else pairs(p, "Other")) | "Side" >> beam.Map(same)
    _ = first | "B" >> beam.Map(lambda x, _: x, beam.pvalue.AsList(side))


@pytest.mark.parametrize(
    ("build", "kind", "text"),
    [
        (with_reshuffle, ReasonKind.MOVE, "Reshuffle 'R' redistributes elements among the workers"),
        (with_group, ReasonKind.GROUP, "GroupByKey 'G' needs all values of a key; workers group it if it is large"),
        (
            with_combine,
            ReasonKind.COMBINE,
            "Combine 'C' combines each bundle first, then needs everything of a key; workers group it if it is large",
        ),
        (with_flatten, ReasonKind.FLATTEN, "Flatten 'F' joins 'A', 'O'"),
        (with_state, ReasonKind.STATE, "'B' keeps state per key, so its input is routed by key"),
        (
            with_hints,
            ReasonKind.RESOURCES,
            "different resources: 'B' asks for cpu_count=1, min_ram=1GiB; 'A' for nothing",
        ),
        (
            with_own_side_input,
            ReasonKind.WAIT,
            "'B' needs 'Side' complete as a side input, and the same stage feeds both",
        ),
    ],
)
def test_a_reason_is_given_and_without_it_there_is_no_break(
    build: Callable[..., None], kind: ReasonKind, text: str
) -> None:
    plan = explained(lambda p: build(p, is_there=True))
    before, after = stage_with(plan, "A").number, stage_with(plan, "B").number
    breaks = [b for b in plan.breaks if before in b.writers and b.reader == after and not b.is_side_input]
    assert [(reason.kind, reason.text) for b in breaks for reason in b.reasons] == [(kind, text)]

    without = explained(lambda p: build(p, is_there=False))
    assert stage_with(without, "A") is stage_with(without, "B")


def test_a_side_input_must_be_complete() -> None:
    plan = explained(lambda p: with_own_side_input(p, is_there=False))
    found = break_between(plan, "Side", "B")
    assert found.is_side_input
    assert [reason.text for reason in found.reasons] == ["'B' needs 'Side' complete as a side input"]


def test_a_group_can_be_a_side_input() -> None:
    def build(p: beam.Pipeline) -> None:
        groups = pairs(p, "Other") | "G" >> beam.GroupByKey()
        _ = pairs(p) | "B" >> beam.Map(lambda x, _: x, beam.pvalue.AsDict(groups))

    found = break_between(explained(build), "Other", "B")
    assert [reason.kind for reason in found.reasons] == [ReasonKind.GROUP, ReasonKind.SIDE_INPUT]
    assert found.reasons[1].text == "'B' needs 'G' complete as a side input"
    assert found.short == "GroupByKey 'G' · side input"


def test_a_splittable_step_shares_out_its_parts() -> None:
    plan = explained(lambda p: p | beam.Create([(0, 9)]) | "Numbers" >> beam.ParDo(Numbers(0.0)))
    found = break_between(plan, "Numbers", "Numbers")
    assert [r.text for r in found.reasons] == ["'Numbers' is splittable: its parts are distributed among the workers"]
    assert [step.part for stage in plan.stages for step in stage.steps if step.name == "Numbers"] == [
        "into parts",
        "part by part",
    ]


def test_all_reasons_are_given_where_there_are_several() -> None:
    def build(p: beam.Pipeline) -> None:
        step = beam.ParDo(Stateful()).with_resource_hints(min_ram="1GiB")
        _ = pairs(p) | "R" >> beam.Reshuffle() | "S" >> step

    found = break_between(explained(build), "Create", "S")
    assert [reason.kind for reason in found.reasons] == [ReasonKind.MOVE, ReasonKind.STATE, ReasonKind.RESOURCES]


def test_each_reader_has_its_own_reason() -> None:
    def build(p: beam.Pipeline) -> None:
        first = pairs(p) | "A" >> beam.Map(same)
        _ = first | "Hinted" >> beam.Map(same).with_resource_hints(min_ram="1GiB")
        _ = pairs(p, "Other") | "Sided" >> beam.Map(lambda x, _: x, beam.pvalue.AsList(first))

    plan = explained(build)
    hinted, sided = break_between(plan, "A", "Hinted"), break_between(plan, "A", "Sided")
    assert hinted.buffer_id == sided.buffer_id
    assert [r.kind for r in hinted.reasons] == [ReasonKind.RESOURCES]
    assert [r.kind for r in sided.reasons] == [ReasonKind.SIDE_INPUT]


def test_what_nothing_reads_is_shown() -> None:
    plan = explained(lambda p: pairs(p) | "G" >> beam.GroupByKey())
    (found,) = plan.breaks
    assert found.reader is None
    assert found.short == "GroupByKey 'G'"


def test_steps_that_do_what_their_neighbour_does_are_named() -> None:
    def build(p: beam.Pipeline) -> None:
        joined = (pairs(p), pairs(p, "Other")) | "F" >> beam.Flatten()
        groups = joined | "G" >> beam.GroupByKey() | "R" >> beam.Reshuffle()
        _ = groups | "B" >> beam.Map(same)

    plan = explained(build)
    assert plan.absorbed == ("F", "R")
    assert [b.short for b in plan.breaks] == ["GroupByKey 'G'"]


@beam.ptransform_fn
def _clean(lines: beam.PCollection) -> beam.PCollection:
    return lines | "Strip" >> beam.Map(str.strip) | "Split" >> beam.FlatMap(str.split)


class Score(beam.PTransform):
    def expand(self, input_or_inputs: beam.PCollection) -> beam.PCollection:
        return input_or_inputs | "Pair" >> beam.WithKeys(0) | "Sum" >> beam.CombinePerKey(max)


def test_the_authors_composites_are_opened_and_beams_are_not() -> None:
    def build(p: beam.Pipeline) -> None:
        _ = p | "Lines" >> beam.Create(["a"]) | "Clean" >> _clean() | "Score" >> Score()

    assert [[step.name for step in stage.steps] for stage in explained(build).stages] == [
        ["Lines", "Clean/Strip", "Clean/Split", "Score/Pair", "Score/Sum"],
        ["Score/Sum"],
    ]
    full = [step.name for stage in explained(build, is_full=True).stages for step in stage.steps]
    assert "Lines/Map(decode)" in full
    assert "Score/Sum/Precombine" in full


def test_a_sinks_inner_side_inputs_are_its_own_matter(tmp_path: Path) -> None:
    plan = explained(branching(tmp_path), "--accelerators=1")
    assert {b.inside for b in plan.breaks if b.inside} == {"Write"}
    assert [b.short for b in plan.breaks if not b.inside] == [
        "parts of 'Read'",
        "resources",
        "side input",
        "GroupByKey 'Group'",
        "Flatten 'Join' · resources",
        "files of 'Write'",
        "GroupByKey in 'Write'",
    ]
    assert stage_with(plan, "Embed").pool.name == "device"
    assert stage_with(plan, "Embed").asks_for == "accelerator=count:1"
    full = explained(branching(tmp_path), is_full=True)
    assert not [b for b in full.breaks if b.inside]
    texts = [reason.text for b in full.breaks for reason in b.reasons]
    impl = "Write/Write/WriteImpl"
    assert f"'{impl}/WriteBundles' needs '{impl}/InitializeWrite' complete as a side input" in texts


_OPERATION = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(2, 4), st.sampled_from([None, "1MB", "2MB"]))


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(operations=st.lists(_OPERATION, min_size=1, max_size=6), is_full=st.booleans())
def test_every_break_of_any_pipeline_has_a_reason(operations: list[tuple[str, int, str | None]], is_full: bool) -> None:
    def build(p: beam.Pipeline) -> None:
        numbers: Any = p | beam.Create([1, 2, 3])
        for i, (name, parameter, ram) in enumerate(operations):
            hints = {"min_ram": ram} if ram else {}
            step = beam.ptransform_fn(OPERATIONS[name])(parameter).with_resource_hints(**hints)
            numbers = numbers | f"{i} {name}" >> step

    plan = explained(build, is_full=is_full)
    asks = {stage.number: stage.asks_for for stage in plan.stages}
    read = {b.reader for b in plan.breaks if not b.is_side_input}
    for stage in plan.stages:
        assert stage.is_source != (stage.number in read)
    for a_break in plan.breaks:
        assert a_break.reasons
        assert a_break.writers
        steps = (*a_break.from_steps, *a_break.to_steps)
        assert not [name for name in steps if not name or name.startswith("ref_")]
        assert a_break.from_steps
        assert (a_break.to_steps == ()) == (a_break.reader is None)
        assert a_break.reader is None or max(a_break.writers) < a_break.reader
        differs = any(a_break.reader and asks[writer] != asks[a_break.reader] for writer in a_break.writers)
        named = any(reason.kind is ReasonKind.RESOURCES for reason in a_break.reasons)
        assert named == (differs and not a_break.is_side_input)
