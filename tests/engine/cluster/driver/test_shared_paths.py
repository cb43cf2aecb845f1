"""Paths that workers on nodes read and write: the same files as for the driver, or an error before the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import ReadTable, WriteTable
from luminosity.engine.cluster.driver import shared_paths
from luminosity.engine.cluster.driver.shared_paths import SharedPaths
from luminosity.engine.prepare import effects_of
from luminosity.engine.resources.machine import Node
from luminosity.errors import PathNotShared

_DRIVER = Node("driver", "10.0.0.1", 2.0, 0, is_driver=True)
_OTHER = Node("other", "10.0.0.2", 2.0, 0)
_IDLE = Node("idle", "10.0.0.3", 0.0, 0)  # no worker can run there

Question = Callable[[Mapping[str, str], Mapping[str, int]], frozenset[str]]


class _Nodes:
    """Answers as nodes do that do not see what is in some folders of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[str] = []
        self.asked: list[str] = []
        self.marks: list[str] = []
        monkeypatch.setattr(shared_paths, "_ask_nodes", self._ask)
        monkeypatch.setattr(shared_paths.ray_calls, "nodes", lambda: [_DRIVER, _OTHER])

    def _ask(
        self, found: Sequence[Node], question: Question, marks: Mapping[str, str], files: Mapping[str, int]
    ) -> dict[str, frozenset[str]]:
        self.asked += [node.id for node in found]
        self.marks += filter(None, marks.values())
        assert all(os.path.isdir(mark) for mark in self.marks)
        seen = {folder: mark if self._sees(mark) else f"{mark}-not" for folder, mark in marks.items()}
        hidden = {file for file in files if not self._sees(file)}
        return {node.id: question(seen, files) | hidden for node in found}

    def _sees(self, path: str) -> bool:
        return not path.startswith(tuple(self.hidden))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> _Nodes:
    return _Nodes(monkeypatch)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    for name in ("project/here.txt", "project/.hidden/a.txt", "data/in1.txt", "data/in2.txt", "tables/a.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("n\n1\n")
    monkeypatch.chdir(folder)
    return folder


def _paths(folder: Path, *transforms: Any) -> SharedPaths:
    """What a pipeline with these sources and sinks names, in a run whose copy of the folder has the visible files."""
    from luminosity import LuminosityRunner

    pipeline = beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions([]))
    for number, transform in enumerate(transforms):
        source = pipeline if "Read" in type(transform).__name__ else pipeline | f"Rows {number}" >> beam.Create([{}])
        _ = source | f"Step {number}" >> transform
    proto = pipeline.to_runner_api(default_environment=LuminosityRunner().default_environment(pipeline.options))
    return SharedPaths(effects_of(proto), str(folder), {"here.txt"})


def test_workers_run_in_the_folder_itself_if_all_nodes_see_it(nodes: _Nodes, project: Path) -> None:
    paths = _paths(project, beam.io.ReadFromText("../data/in*.txt"), beam.io.WriteToText("out/x"))
    paths.check([_DRIVER, _OTHER, _IDLE])
    assert paths.is_in_place
    assert nodes.asked == ["other"]
    assert not paths.is_apart("other")
    assert nodes.marks
    assert not [mark for mark in nodes.marks if os.path.exists(mark)]
    assert paths.why_not("other") == ""
    assert nodes.asked == ["other"]


def test_one_machine_alone_is_not_asked(nodes: _Nodes, project: Path) -> None:
    paths = _paths(project, beam.io.WriteToText("out/x"))
    paths.check([_DRIVER, _IDLE])
    assert paths.is_in_place
    assert nodes.asked == []


@pytest.mark.parametrize(
    "transform",
    [
        lambda: beam.io.ReadFromText("here.txt"),
        lambda: beam.io.ReadFromText("her*"),
        lambda: beam.io.ReadFromText("../not-yet/*.txt", validate=False),
        lambda: beam.io.ReadFromText("gs://bucket/in*", validate=False),
        lambda: beam.io.WriteToText("gs://bucket/out"),
    ],
)
def test_a_node_with_a_copy_reads_what_the_copy_has(nodes: _Nodes, project: Path, transform: Callable[[], Any]) -> None:
    nodes.hidden = [str(project)]
    paths = _paths(project, transform())
    paths.check([_DRIVER, _OTHER])
    assert not paths.is_in_place


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda _: beam.io.ReadFromText("../data/in*.txt"), "data/in1.txt"),
        (lambda _: beam.io.ReadFromText(".hidden/*"), ".hidden/a.txt"),
        (lambda folder: beam.io.ReadFromText(f"{folder}/here.txt"), "1 of 2 nodes"),
        (lambda _: ReadTable("../tables/a.csv"), "tables/a.csv"),
        (lambda _: beam.io.WriteToText("out/x"), "in or beside the working folder"),
        (lambda folder: beam.io.WriteToText(f"{folder.parent}/out/x"), "1 of 2 nodes"),
        (lambda folder: beam.io.WriteToParquet(f"{folder}/out/x", _schema()), "1 of 2 nodes"),
        (lambda _: WriteTable("out/"), "1 of 2 nodes"),
    ],
)
def test_what_a_node_does_not_see_is_refused_before_the_run(
    nodes: _Nodes, project: Path, transform: Callable[[Path], Any], words: str
) -> None:
    nodes.hidden = [str(project.parent)]
    paths = _paths(project, transform(project))
    with pytest.raises(PathNotShared, match="Step 0") as caught:
        paths.check([_DRIVER, _OTHER])
    assert words in caught.value.message
    assert "gs://" in str(caught.value)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("n", pa.int64())])


def test_files_that_differ_are_not_the_same(nodes: _Nodes, project: Path) -> None:
    paths = _paths(project, beam.io.ReadFromText("../data/in*.txt"))
    (project.parent / "data" / "in2.txt").write_text("more than before")
    with pytest.raises(PathNotShared, match=r"in2\.txt"):
        paths.check([_DRIVER, _OTHER])


def test_a_node_that_comes_later_is_asked_once(nodes: _Nodes, project: Path) -> None:
    paths = _paths(project, beam.io.WriteToText("out/x"))
    paths.check([_DRIVER])
    nodes.hidden = [str(project)]
    assert "does not see the working folder" in paths.why_not("other")
    assert paths.why_not("other")
    assert paths.why_not("driver") == ""
    assert nodes.asked == ["other"]
