"""Tests of the drawings of plans: nothing overlaps, nothing is missing, and all names are escaped."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import apache_beam as beam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from luminosity.engine.explain.explanation import Explanation
from luminosity.engine.explain.export import dot, plan_json
from luminosity.engine.explain.layout import Layout, Link, Point, Rectangle, Size, lay_out
from luminosity.engine.explain.svg import picture, svg, text_width, wrapped
from luminosity.engine.explain.text import print_plan
from luminosity.engine.resources.machine import Node
from tests.plans import branching, explained, pairs, same

_ROUNDING = 1e-6
_SVG = "{http://www.w3.org/2000/svg}"
_ODD_NAMES = ('<b> & "quotes" \\ back', "Größe → 数据 'x'", "[bold]rich[/bold] {brace}", "x" * 90)


def odd(p: beam.Pipeline) -> None:
    elements = pairs(p)
    for name in _ODD_NAMES:
        elements = elements | name >> beam.Map(same) | f"after {name}" >> beam.Reshuffle()
    _ = elements | "End" >> beam.Map(same)


def text_of(plan: Explanation, width: int) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    print_plan(console, plan, "pipeline.py")
    return console.file.getvalue()  # type: ignore[attr-defined]


def overlap(a: Rectangle, b: Rectangle) -> bool:
    is_aside = a.right <= b.left + _ROUNDING or b.right <= a.left + _ROUNDING
    return not is_aside and a.top < b.bottom and b.top < a.bottom


def points_on(route: list[Point]) -> Iterator[Point]:
    """Yield points along the straight parts and the curves of a link, as they are drawn."""
    for index, ((x1, y1), (x2, y2)) in enumerate(itertools.pairwise(route)):
        for t in (0.1, 0.3, 0.5, 0.7, 0.9):
            if index % 2 == 0:
                yield x1, y1 + (y2 - y1) * t
            else:
                aside = 3 * (1 - t) * t**2 + t**3  # of a cubic whose ends are upright
                yield x1 + (x2 - x1) * aside, y1 + (y2 - y1) * (1.5 * t * (1 - t) + t**3)


def check_layout(layout: Layout) -> None:
    for a, b in itertools.combinations(layout.boxes.values(), 2):
        assert not overlap(a, b)
    for link, route in layout.routes.items():
        assert all(y1 <= y2 for (_, y1), (_, y2) in itertools.pairwise(route))
        assert route[0][1] == layout.boxes[link.source].bottom
        assert route[-1][1] == layout.boxes[link.target].top
        for x, y in points_on(route):
            assert -_ROUNDING <= x <= layout.width + _ROUNDING
            assert not [b for b in layout.boxes.values() if b.left < x < b.right and b.top < y < b.bottom]
    for box in layout.boxes.values():
        assert box.left >= -_ROUNDING
        assert box.right <= layout.width + _ROUNDING
        assert box.bottom <= layout.height + _ROUNDING


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(20, 250), st.integers(20, 150)), min_size=1, max_size=14),
    ends=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13), st.integers(1, 2)), max_size=25),
)
def test_any_layout_is_without_overlaps(sizes: list[tuple[int, int]], ends: list[tuple[int, int, int]]) -> None:
    boxes = {str(i): Size(width, height) for i, (width, height) in enumerate(sizes)}
    pairs_seen = {(a, b): span for a, b, span in ends if a < b < len(sizes)}
    links = [Link(str(a), str(b), span) for (a, b), span in pairs_seen.items()]
    layout = lay_out(boxes, links)
    assert layout.boxes.keys() == boxes.keys()
    assert layout.routes.keys() == set(links)
    check_layout(layout)


def test_links_that_need_not_cross_do_not() -> None:
    sizes = {name: Size(100, 40) for name in ("a", "b", "side", "left", "right", "end")}
    links = [Link("a", "left"), Link("a", "right"), Link("side", "left"), Link("left", "end"), Link("right", "end")]
    boxes = lay_out(sizes, links).boxes
    assert (boxes["side"].left < boxes["a"].left) == (boxes["left"].left < boxes["right"].left)


def test_a_chain_is_straight() -> None:
    boxes = lay_out({n: Size(50 + 30 * i, 30) for i, n in enumerate("abcd")}, [Link(*ab) for ab in ("ab", "bc", "cd")])
    assert len({round(b.left + b.width / 2, 6) for b in boxes.boxes.values()}) == 1


def test_the_same_plan_gives_the_same_picture(tmp_path: Path) -> None:
    build = branching(tmp_path)
    assert svg({"p": explained(build)}) == svg({"p": explained(build)})


@pytest.mark.parametrize("is_full", [False, True])
def test_a_picture_has_everything(tmp_path: Path, is_full: bool) -> None:
    plan = explained(branching(tmp_path), "--accelerators=1", is_full=is_full)
    drawn = picture(plan)
    check_layout(drawn.layout)
    root = ElementTree.fromstring(svg({"branching.py": plan}))
    written = "".join("".join(text.itertext()) for text in root.iter(f"{_SVG}text"))
    written = re.sub(r"\s", "", written)
    for stage in plan.stages:
        for step in stage.steps:
            assert re.sub(r"\s", "", step.name) in written
    for a_break in plan.breaks:
        assert a_break.inside or re.sub(r"\s", "", a_break.short) in written
    assert "device:1worker" in written
    classes = [rect.get("class") for rect in root.iter(f"{_SVG}rect")]
    assert classes.count("stage pool0") == len(plan.stages) - 1 + 1  # those on the CPU, and the legend
    assert classes.count("stage pool1") == 2
    assert "background" in classes
    assert [path for path in root.iter(f"{_SVG}path") if "side" in (path.get("class") or "")]
    tooltips = [title.text or "" for title in root.iter(f"{_SVG}title")]
    assert any("different resources: 'Embed' asks for" in tip for tip in tooltips)


def test_odd_names_survive(tmp_path: Path) -> None:
    plan = explained(odd)
    root = ElementTree.fromstring(svg({'<title> & "more" \x07': plan}))
    tooltips = " ".join(title.text or "" for title in root.iter(f"{_SVG}title"))
    text = text_of(plan, 200)
    for name in _ODD_NAMES:
        assert name in tooltips
        assert name in text
    labels = re.findall(r'label=("(?:[^"\\]|\\.)*")', dot({'<title> & "more"': plan}))
    assert '"<title> & \\"more\\""' in labels
    assert any('<b> & \\"quotes\\" \\\\ back' in label for label in labels)


def test_several_plans_share_a_picture() -> None:
    plans = {f"pipeline {n}": explained(lambda p: pairs(p)) for n in (1, 2)}
    root = ElementTree.fromstring(svg(plans))
    assert [text.text for text in root.iter(f"{_SVG}text") if text.get("class") == "title"] == list(plans)
    assert "s1_1" in dot(plans)
    assert "s2_1" in dot(plans)


def test_an_empty_plan_is_no_problem() -> None:
    plan = explained(lambda p: None)
    ElementTree.fromstring(svg({"empty.py": plan}))
    assert dot({"empty.py": plan}).endswith("}\n")
    assert "0 stages" in text_of(plan, 80)


def test_dot_has_all_stages_and_edges(tmp_path: Path) -> None:
    plan = explained(branching(tmp_path), "--accelerators=1")
    text = dot({"branching.py": plan})
    assert text.count("{") == text.count("}")
    assert len(re.findall(r"^ +s1_\d+ \[label=", text, re.MULTILINE)) == len(plan.stages)
    edges = set(re.findall(r's1_(\d+) -> s1_(\d+) \[label="([^"]*)"(, style=dashed)?\]', text))
    assert edges == {
        (str(w), str(b.reader), b.short, ", style=dashed" if b.is_side_input else "")
        for b in plan.breaks
        for w in b.writers
    }
    assert 'label="device: 1 worker' in text


@pytest.mark.parametrize("width", [40, 60, 80, 160])
@pytest.mark.parametrize("is_full", [False, True])
def test_text_fits_and_has_everything(tmp_path: Path, width: int, is_full: bool) -> None:
    plan = explained(branching(tmp_path), "--accelerators=1", is_full=is_full)
    lines = text_of(plan, width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert lines == [line.rstrip() for line in lines]
    squeezed = re.sub(r"\s", "", "".join(lines))
    for stage in plan.stages:
        for step in stage.steps:
            assert re.sub(r"\s", "", step.name) in squeezed
    for heading in ("Pools", "Stages", "Breaks"):
        assert heading in lines


def test_text_tells_what_to_know(tmp_path: Path) -> None:
    text = text_of(explained(branching(tmp_path), "--accelerators=1"), 120)
    assert re.search(r"^ 4  Embed +device +2, side input 3 +6$", text, re.MULTILINE)
    assert re.search(r"^device +1 +1 core, .* RAM +declared:0 +1 +4$", text, re.MULTILINE)
    assert "2 → 4  different resources: 'Embed' asks for accelerator=count:1; 'Parse' for nothing" in text
    assert "4, 5 → 6  Flatten 'Join' joins 'Embed', 'Sum'" in text
    assert "6 → 8  'Write' writes a file per bundle, so it gathers elements first" in text
    assert "7-11  'Write' waits for side inputs that it makes itself (--all shows which)" in text


@given(text=st.text(min_size=1, max_size=60), limit=st.integers(30, 200))
def test_wrapping_keeps_every_letter(text: str, limit: int) -> None:
    lines = wrapped(text, 12, limit)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)
    assert all(text_width(line, 12) <= limit or len(line) == 1 for line in lines)


def _with_a_device(p: beam.Pipeline) -> None:
    hinted = beam.Map(same).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
    _ = pairs(p) | "Infer" >> hinted


def test_a_plan_for_a_cluster_says_what_fits_where() -> None:
    nodes = [
        Node("a" * 40, "10.0.0.1", 2.0, 8 << 30, is_driver=True),
        Node("b" * 40, "10.0.0.2", 4.0, 16 << 30, 2.0, "T4"),
        *(Node(f"{i}" * 40, "10.0.0.9", 1.0, 4 << 30) for i in range(9)),
    ]
    plan = explained(_with_a_device, "--cpu_workers=17", nodes=nodes)
    text = text_of(plan, 200)
    assert "on 11 nodes of a cluster with 15 cores, 60GiB RAM, 2 accelerators" in text
    rows = {line.split("  ")[0]: re.split(r"  +", line)[1:] for line in text.partition("Nodes")[2].splitlines()[2:4]}
    assert rows == {
        "cpu": ["1 core", "2 on 10.0.0.1, 4 on 10.0.0.2, 1 on each of 9 nodes, 2 wait for a node", "17"],
        "device T4": ["1 GPU T4", "2 on 10.0.0.2", "2"],
    }
    assert "ray:" not in text
    found = plan_json(plan, "pipeline.py")
    (device,) = [pool for pool in found["pools"] if pool["name"] == "device T4"]
    assert (device["workers_by_node"], device["asks_for"]["gpus"]) == ({"b" * 40: 2}, 1)
    assert [node["address"] for node in found["machine"]["nodes"]][:2] == ["10.0.0.1", "10.0.0.2"]
    assert json.loads(json.dumps(found))["pools"] == found["pools"]


def test_a_plan_as_json_has_all_stages_and_breaks(tmp_path: Path) -> None:
    plan = explained(branching(tmp_path))
    found = plan_json(plan, "pipeline.py")
    assert [stage["number"] for stage in found["stages"]] == [stage.number for stage in plan.stages]
    assert [(b["writers"], b["reader"]) for b in found["breaks"]] == [(list(b.writers), b.reader) for b in plan.breaks]
    assert (found["machine"]["nodes"], found["pools"][0]["asks_for"]) == ([], None)
    assert "Nodes" not in text_of(plan, 100)
