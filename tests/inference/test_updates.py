"""New versions of a model while a pipeline runs: no example is lost, no batch mixed, a broken version ignored."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    KeyModelMapping,
    KeyModelPathMapping,
    ModelMetadata,
)
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window

from luminosity import Handler, RunInference
from tests.both_runners import Pipelines, counters

pytestmark = pytest.mark.thorough


class FromFile(Handler[int, Any, int]):
    """Adds the number that its file holds; each prediction names its batch."""

    def __init__(self, path: str, seconds: float = 0.0, log: Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._path = path
        self._log = log
        self._seconds = seconds

    @property
    def model_id(self) -> str:
        return self._path

    def update_model_path(self, model_path: str | None = None) -> None:
        self._path = model_path or self._path

    def load_model(self) -> int:
        return int(Path(self._path).read_text())

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        time.sleep(self._seconds)
        if self._log is not None:
            with open(self._log, "a") as file:
                file.write(str(model)[0] * len(batch))
        name = f"{os.getpid()} {time.monotonic_ns()}"
        return [(example + model, name) for example in batch]


def written(path: Path, text: str) -> str:
    """Write the file so that it appears at once, complete."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)
    return str(path)


class Awaits(FromFile):
    """Waits for a new version after this many examples: a busy machine notices it late."""

    def __init__(self, path: str, version: str, after: int, log: Path, **options: Any) -> None:
        super().__init__(path, log=log, **options)
        self._version = version
        self._after = after

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        assert self._log is not None
        if examples_in(self._log) > self._after and self._version not in predicted_by(self._log):
            time.sleep(0.5)
        return super().predict(model, batch, inference_args)


def predicted_by(log: Path) -> str:
    """Return the first digit of each example's model."""
    return log.read_text() if log.exists() else ""


def examples_in(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def wait_until(reached: Callable[[], bool], stop: threading.Event) -> None:
    while not stop.wait(0.01) and not reached():
        pass


def lines(path: Path) -> Iterator[Any]:
    for part in path.parent.glob(f"{path.name}*"):
        for line in part.read_text().splitlines():
            yield json.loads(line)


def test_versions_that_appear_in_the_middle_of_ten_thousand_examples(pipelines: Pipelines, tmp_path: Path) -> None:
    """The second version is broken, and only the log reports it."""
    models, results, log = tmp_path / "models", tmp_path / "results", tmp_path / "log"
    models.mkdir()
    first = written(models / "v1.txt", "1000000")
    handler = Awaits(first, "4", 7000, log, seconds=0.02, max_batch_size=25)
    stop = threading.Event()

    def release() -> None:
        wait_until(lambda: examples_in(log) >= 2000, stop)
        written(models / "v2.txt", "2000000")
        wait_until(lambda: "2" in predicted_by(log), stop)
        written(models / "v3.txt", "this is no number")
        seen = examples_in(log)
        wait_until(lambda: examples_in(log) >= seen + 1000, stop)
        written(models / "v4.txt", "4000000")

    def line(result: Any) -> str:
        return json.dumps([result.example, *result.inference, os.path.basename(result.model_id)])

    author = threading.Thread(target=release, daemon=True)
    with pipelines() as (pipeline, _):
        pattern = str(models / "*.txt")
        predicted = (
            pipeline | beam.Create(range(10_000)) | RunInference(handler, watch_model_pattern=pattern, interval=0.1)
        )
        _ = predicted | beam.Map(line) | beam.io.WriteToText(str(results))
        time.sleep(0.01)  # A file as old as the pipeline is not new.
        author.start()
    stop.set()

    found = list(lines(results))
    assert sorted(example for example, *_ in found) == list(range(10_000))
    versions = Counter(model_id for *_, model_id in found)
    assert set(versions) == {"v1.txt", "v2.txt", "v4.txt"}
    assert all(value == example + int(model_id[1]) * 1_000_000 for example, value, _, model_id in found)
    by_batch: dict[str, set[str]] = {}
    for _, _, batch, model_id in found:
        by_batch.setdefault(batch, set()).add(model_id)
    assert all(len(ids) == 1 for ids in by_batch.values())


def test_each_window_gets_the_model_that_it_names(pipelines: Pipelines, tmp_path: Path) -> None:
    """A backfill must not depend on how long the model loads."""
    paths = [written(tmp_path / f"{number}.txt", str(1000 * number)) for number in range(3)]
    with pipelines() as (pipeline, _):
        stamped = beam.Map(lambda value: window.TimestampedValue(value[1], value[0]))
        metadata = (
            pipeline
            | "versions"
            >> beam.Create([(10 * number, ModelMetadata(path, f"v{number}")) for number, path in enumerate(paths)])
            | "times of versions" >> stamped
            | "windows of versions" >> beam.WindowInto(window.FixedWindows(10))
        )
        predicted = (
            pipeline
            | beam.Create([(number, number) for number in range(30)])
            | "times" >> stamped
            | beam.WindowInto(window.FixedWindows(10))
            | RunInference(FromFile(paths[0]), model_metadata_pcoll=metadata)
        )
        values = predicted | beam.Map(lambda result: (result.example, result.inference[0], result.model_id))
        assert_that(values, equal_to([(n, n + n // 10 * 1000, paths[n // 10]) for n in range(30)]))


def test_a_side_input_for_each_key(pipelines: Pipelines, tmp_path: Path) -> None:
    old = written(tmp_path / "old.txt", "0")
    new = [written(tmp_path / f"{name}.txt", str(number)) for number, name in ((100, "a"), (200, "b"))]
    handler = KeyedModelHandler([KeyModelMapping(["a", "b"], FromFile(old))])
    with pipelines() as (pipeline, run):
        mappings = [KeyModelPathMapping(["a"], new[0], "a"), KeyModelPathMapping(["b"], new[1], "b")]
        predicted = (
            pipeline
            | beam.Create([(key, number) for number in range(50) for key in "ab"])
            | RunInference(handler, model_metadata_pcoll=pipeline | "paths" >> beam.Create([mappings]))
        )

        def added(result: Any) -> Any:
            key, predicted = result
            return key, predicted.inference[0] - predicted.example, predicted.model_id

        assert_that(predicted | beam.Map(added), equal_to([("a", 100, new[0])] * 50 + [("b", 200, new[1])] * 50))
    assert counters(run.result)["examples"] == 100


def test_examples_of_all_versions_are_counted(pipelines: Pipelines, tmp_path: Path) -> None:
    path = written(tmp_path / "v2.txt", "2")
    with pipelines() as (pipeline, run):
        metadata = pipeline | "paths" >> beam.Create([ModelMetadata(path, "v2")])
        _ = pipeline | beam.Create(range(50)) | RunInference(FromFile(path), model_metadata_pcoll=metadata)
    assert counters(run.result)["examples"] == counters(run.result)["v2_num_inferences"] == 50


def test_watched_files_for_each_key(pipelines: Pipelines, tmp_path: Path) -> None:
    for key in "ab":
        (tmp_path / key).mkdir()
    log, stop = tmp_path / "log", threading.Event()
    a, b = (written(tmp_path / key / "v1.txt", "0") for key in "ab")
    of_b = Awaits(b, "1", 200, log, seconds=0.01, max_batch_size=5)
    handler = KeyedModelHandler([KeyModelMapping(["a"], FromFile(a)), KeyModelMapping(["b"], of_b)])

    def release() -> None:
        wait_until(lambda: examples_in(log) >= 100, stop)
        written(tmp_path / "b" / "v2.txt", "1000")

    author = threading.Thread(target=release, daemon=True)
    with pipelines() as (pipeline, _):
        predicted = (
            pipeline
            | beam.Create([(key, number) for number in range(1000) for key in "ab"])
            | RunInference(handler, watch_model_pattern=str(tmp_path / "{key}" / "*.txt"), interval=0.1)
        )
        names = predicted | beam.Map(lambda result: (result[0], os.path.basename(result[1].model_id)))

        def check(found: list[tuple[str, str]]) -> None:
            assert Counter(key for key, _ in found) == {"a": 1000, "b": 1000}
            assert set(found) == {("a", "v1.txt"), ("b", "v1.txt"), ("b", "v2.txt")}

        assert_that(names, check)
        author.start()
    stop.set()


@pytest.mark.parametrize(
    ("keyed", "pattern", "message"),
    [(True, "models/*.txt", r"expected \{key\}"), (False, "models/{key}/*.txt", "there are no keys")],
)
def test_patterns_and_keys_belong_together(keyed: bool, pattern: str, message: str) -> None:
    handler: Any = FromFile("x")
    handler = KeyedModelHandler([KeyModelMapping(["a"], handler)]) if keyed else handler
    with pytest.raises(ValueError, match=message):
        _ = beam.Pipeline("FnApiRunner") | beam.Create([1]) | RunInference(handler, watch_model_pattern=pattern)


def test_a_side_input_and_a_pattern_are_too_much() -> None:
    metadata = beam.Pipeline("FnApiRunner") | beam.Create([ModelMetadata("x", "x")])
    with pytest.raises(ValueError, match="expected one of them"):
        RunInference(FromFile("x"), model_metadata_pcoll=metadata, watch_model_pattern="*")


@pytest.mark.parametrize(
    ("keyed", "found", "expected"),
    [
        (False, "v2.txt", "expected ModelMetadata.*there are no keys"),
        (False, [KeyModelPathMapping(["a"], "v2.txt", "")], "expected ModelMetadata.*there are no keys"),
        (True, ModelMetadata("v2.txt", ""), r"found ModelMetadata\(.* list of KeyModelPathMapping"),
        (True, KeyModelPathMapping(["a"], "v2.txt", ""), r"found KeyModelPathMapping\(.* list of KeyModelPathMapping"),
    ],
)
def test_a_side_input_of_another_kind(keyed: bool, found: Any, expected: str) -> None:
    handler: Any = FromFile("x")
    handler = KeyedModelHandler([KeyModelMapping(["a"], handler)]) if keyed else handler
    pipeline = beam.Pipeline("FnApiRunner")
    metadata = pipeline | "paths" >> beam.Create([found])
    _ = pipeline | beam.Create([("a", 1)]) | RunInference(handler, model_metadata_pcoll=metadata)
    with pytest.raises(Exception, match=expected):
        pipeline.run()


def test_a_first_model_that_cannot_be_loaded_is_tried_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "v1.txt", "this is no number")
    with pytest.raises(Exception, match="invalid literal"), beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([1]) | RunInference(FromFile(path))
    assert "can't be loaded" not in caplog.text, "the model was loaded again without a waiting thread"


def test_of_many_models_the_one_that_cannot_be_loaded_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [written(tmp_path / "good.txt", "1"), written(tmp_path / "bad.txt", "this is no number")]
    handler = KeyedModelHandler([KeyModelMapping([key], FromFile(path)) for key, path in zip("ab", paths, strict=True)])
    with pytest.raises(Exception, match="invalid literal"), beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([("a", 1), ("b", 1)]) | RunInference(handler)
    assert f"The model of FromFile, key 'b', {paths[1]} can't be loaded: ValueError(" in caplog.text
