"""Where the page draws the author's steps: folded and open composites, links into them, and damaged records."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pytest

from luminosity.engine.reporting import author_transforms as author_transforms_module
from luminosity.engine.reporting.author_transforms import author_transforms
from luminosity.events import RunStarted, StageInfo, TransformInfo, to_json
from luminosity.operate.page.graph_data import StepTree, stage_graph


def tree(*transforms: TransformInfo, steps: tuple[str, ...] = ()) -> StepTree:
    stages = (StageInfo("s1", "all", "cpu", steps=steps),)
    return StepTree(to_json(RunStarted("r", 0.0, "p.py", 0.0, stages, (), 0, transforms=transforms)))


def labels(graph: dict[str, Any]) -> list[str]:
    return [node["label"] for node in graph["nodes"]]


def links(graph: dict[str, Any], direction: str = "down") -> set[tuple[int, int]]:
    return {(route["from"], route["to"]) for route in graph["layouts"][direction]["routes"]}


_READ, _CLEAN, _SPLIT, _WRITE = range(4)
_CHAIN = (
    TransformInfo("Read"),
    TransformInfo("Clean"),
    TransformInfo("Trim", _CLEAN, (_READ,)),
    TransformInfo("Lower", _CLEAN, (2,)),
    TransformInfo("Write", reads_from=(3,), side_inputs_from=(_READ,)),
)


def test_a_pipeline_is_drawn_as_its_author_wrote_it() -> None:
    pipeline = beam.Pipeline()
    numbers = pipeline | "Numbers" >> beam.Create(range(100)) | beam.Reshuffle() | "Add" >> beam.Map(lambda n: n + 1)
    _ = numbers | "Write" >> beam.io.WriteToText("/nowhere")
    found = tree(*author_transforms(pipeline.to_runner_api()))
    graph = found.drawn(())
    assert labels(graph) == ["Numbers", "Reshuffle", "Add", "Write"]
    assert len(graph["layouts"]["down"]["routes"]) == 3
    names = [each["name"] for each in found.content()["transforms"]]
    opened = found.drawn([names.index("Write")])
    # A composite with a single part opens with it: Write, WriteToText's Write and its WriteImpl.
    assert [names[place] for place in opened["open"]] == ["Write", "Write/Write", "Write/Write/WriteImpl"]
    assert {"WriteBundles", "GroupByKey", "FinalizeWrite"} < set(labels(opened))


def test_links_of_folded_composites_go_into_the_open_ones() -> None:
    folded = tree(*_CHAIN).drawn(())
    assert (labels(folded), links(folded)) == (["Read", "Clean", "Write"], {(0, 1), (1, 4), (0, 4)})
    for direction in ("down", "right"):
        opened = tree(*_CHAIN).drawn([_CLEAN])
        layout = opened["layouts"][direction]
        assert labels(opened) == ["Read", "Trim", "Lower", "Write"]
        assert links(opened, direction) == {(0, 2), (2, 3), (3, 4), (0, 4)}
        ((across, along, width, height),) = [frame["box"] for frame in layout["frames"]]
        for part in (2, 3):  # inside the frame
            x, y = layout["at"][part]
            assert across < x < across + width
            assert along < y < along + height
        heads = [route["to"] for route in layout["routes"] if route["has_head"]]
        assert sorted(heads) == [2, 3, 4, 4]  # one arrow head for each link
    assert {route["is_side"] for route in folded["layouts"]["down"]["routes"] if route["to"] == 4} == {True, False}


def test_steps_that_the_planner_makes_belong_to_the_transform_of_the_author() -> None:
    found = tree(*_CHAIN, steps=("Read/Split", "Clean/Trim", "Clean/Lower", "Other"))
    assert found.content()["homes"] == {"s1": [0, 2, 3, -1]}


def test_a_record_of_an_older_version_has_stages_alone() -> None:
    assert not tree().is_known
    assert tree().drawn([3, 5])["nodes"] == []
    stages = [{"id": "a", "label": "A"}, {"id": "b", "label": "B", "reads_from": ["a"]}]
    graph = stage_graph(stages)
    assert graph["nodes"] == [{"id": 0, "label": "A", "stage": "a"}, {"id": 1, "label": "B", "stage": "b"}]
    assert links(graph) == {(0, 1)}


def test_a_damaged_record_makes_no_circle() -> None:
    circle = (TransformInfo("A", 1, (1, 7, -3)), TransformInfo("B", 1, (0,)), TransformInfo("C", 0, (0,)))
    found = tree(*circle)
    assert labels(found.drawn(range(9)))
    assert links(found.drawn(())) == {(0, 1)}
    stages = [{"id": "a", "label": "A", "reads_from": ["b", "a", "?"]}, {"id": "b", "label": "B", "reads_from": ["a"]}]
    assert links(stage_graph(stages)) == {(0, 1)}


def test_a_large_pipeline_is_told_without_its_innermost_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(author_transforms_module, "_MOST", 40)

    class Deep(beam.PTransform[Any, Any]):
        def expand(self, input_or_inputs: Any) -> Any:
            for number in range(6):
                input_or_inputs = input_or_inputs | f"Step {number}" >> beam.Map(lambda each: each)
            return input_or_inputs

    pipeline = beam.Pipeline()
    for number in range(8):
        _ = pipeline | f"Make {number}" >> beam.Create([1]) | f"Deep {number}" >> Deep()
    found = author_transforms(pipeline.to_runner_api())
    assert len(found) == 16
    assert [found[each.reads_from[0]].name for each in found if each.reads_from] == [f"Make {n}" for n in range(8)]
