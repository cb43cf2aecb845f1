"""Models that a registry names, in pipelines: one version for all workers, recorded, and new versions while it runs."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from luminosity import Column, Enrich, Handler, LuminosityRunner, RunInference, RunStarted, TorchModelHandler
from luminosity.engine.explain.explain import plan_pipeline
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.adapting.adapt import THE_MODEL, ModelSet
from luminosity.inference.model_names import handler_of
from luminosity.inference.registry import resolve as resolving
from luminosity.inference.registry.file_registry import register_model
from luminosity.inference.registry.resolve import resolve
from luminosity.inference.steps import versions as steps_versions
from luminosity.inference.steps.pinning import pin_here, pin_models, registry_watch
from luminosity.inference.steps.versions import FileWatcher, RegistryWatch, RegistryWatcher, Watch


class FromFile(Handler[int, Any, int]):
    """Adds the number that its file holds; waits for a new version after some examples."""

    output_type = pa.int64()

    def __init__(self, path: str, seen: Path | None = None) -> None:
        super().__init__(max_batch_size=5)
        self._path = path
        self._seen = seen

    @property
    def model_id(self) -> str:
        return self._path

    def update_model_path(self, model_path: str | None = None) -> None:
        self._path = model_path or self._path

    def load_model(self) -> int:
        return int(Path(self._path).read_text())

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        if self._seen is not None:
            with open(self._seen, "a") as file:
                file.write(f"{model}\n" * len(batch))
            numbers = self._seen.read_text().split()
            if len(numbers) > 100 and len(set(numbers)) == 1:
                time.sleep(0.5)  # for the new version, which a busy machine notices late
        return [example + model for example in batch]


def registered(folder: Path, number: int, *aliases: str) -> str:
    path = folder / f"{number}.txt"
    path.write_text(str(number))
    return register_model(folder / "sum.json", path, aliases=aliases)


def linear(path: Path, slope: float) -> Path:
    from sklearn.linear_model import LinearRegression

    path.write_bytes(pickle.dumps(LinearRegression().fit([[0.0], [1.0]], [0.0, slope])))
    return path


def path_of(handler: Any) -> str | None:
    return ModelSet(handler).handlers[THE_MODEL].path_of_model()


def fnapi() -> beam.Pipeline:
    return beam.Pipeline("FnApiRunner")


def test_an_alias_that_moves_while_a_pipeline_runs(tmp_path: Path) -> None:
    """All examples are there, each says which version added what, and the run records the one it began with."""
    registered(tmp_path, 1000, "prod")
    seen, events, results = tmp_path / "seen", list[Any](), tmp_path / "results"
    handler = FromFile(f"registry://{tmp_path}/sum@prod", seen)
    stop = threading.Event()

    def release() -> None:
        while not stop.wait(0.02) and not (seen.exists() and seen.read_text()):
            pass
        registered(tmp_path, 2000, "prod")

    author = threading.Thread(target=release, daemon=True)
    options = PipelineOptions(["--progress=off", "--cpu_workers=1"])
    with beam.Pipeline(LuminosityRunner(on_event=events.append), options) as pipeline:
        predicted = pipeline | beam.Create(range(400)) | RunInference(handler, watch_registry=True, interval=0.1)
        lines = predicted | beam.Map(lambda each: json.dumps([each.example, each.inference, each.model_id]))
        _ = lines | beam.io.WriteToText(str(results))
        author.start()
    stop.set()

    found = [json.loads(line) for path in tmp_path.glob("results*") for line in path.read_text().splitlines()]
    assert sorted(example for example, *_ in found) == list(range(400))
    names = {f"registry://{tmp_path}/sum@{version}": 1000 * version for version in (1, 2)}
    assert {model_id for *_, model_id in found} == set(names)
    assert all(value == example + names[model_id] for example, value, model_id in found)
    (run,) = [event for event in events if isinstance(event, RunStarted)]
    (model,) = run.models
    assert (model.name, model.version) == (f"registry://{tmp_path}/sum@prod", "1")
    assert (model.digest, model.path) == (resolve(f"registry://{tmp_path}/sum@1").digest, str(tmp_path / "1000.txt"))


def test_predictions_of_beams_handlers_and_of_keys_name_their_version(tmp_path: Path) -> None:
    for number in (1, 2):
        register_model(tmp_path / "slope.json", linear(tmp_path / f"{number}.pkl", number), aliases=[f"v{number}"])
    handlers = {key: SklearnModelHandlerNumpy(f"registry://{tmp_path}/slope@v{n}") for key, n in (("a", 1), ("b", 2))}
    handler = KeyedModelHandler([KeyModelMapping([key], each) for key, each in handlers.items()])
    with fnapi() as pipeline:
        import numpy as np

        rows = pipeline | beam.Create([(key, np.array([3.0])) for key in "ab"])
        found = rows | RunInference(handler) | beam.MapTuple(lambda key, each: (key, each.model_id, each.inference))
        expected = [(key, f"registry://{tmp_path}/slope@{n}", n) for key, n in (("a", 1), ("b", 2))]
        assert_that(
            found | beam.MapTuple(lambda key, model_id, value: (key, model_id, round(float(value) / 3))),
            equal_to(expected),
        )


def test_enrich_takes_names_of_a_registry(tmp_path: Path) -> None:
    registered(tmp_path, 1000, "prod")
    handler = FromFile(f"registry://{tmp_path}/sum@prod")
    with fnapi() as pipeline:
        table = pipeline | beam.Create([pa.record_batch({"n": [1, 2]})])
        found = table | Enrich(sum=Column(handler, "n"), again=Column(handler, "n"))
        assert_that(found | beam.FlatMap(lambda batch: batch.column("again").to_pylist()), equal_to([1001, 1002]))
    assert handler.model_id == f"registry://{tmp_path}/sum@prod", "the user's own handler is unchanged"


def test_handlers_get_the_path_of_their_version(tmp_path: Path) -> None:
    registered(tmp_path, 1, "prod")
    name, path = f"registry://{tmp_path}/sum@prod", str(tmp_path / "1.txt")
    torch = TorchModelHandler(torch_script_model_path=name)
    sklearn = SklearnModelHandlerNumpy(name)
    functions = FromFile(name).with_preprocess_fn(int).with_postprocess_fn(int)
    for handler in (torch, sklearn, KeyedModelHandler(FromFile(name)), functions, FromFile(name).with_no_batching()):
        pinned: Any = pin_here(handler)
        assert path_of(pinned.handler) == path
        assert path_of(handler) == name
        assert pinned.registered[THE_MODEL].version == "1"
    plain = FromFile("models/sum.txt")
    assert pin_here(plain).handler is plain


def test_commands_take_names_of_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(tmp_path, 1, "prod")
    (tmp_path / "sums_of_a_test.py").write_text(
        "from tests.inference.registry.test_pinning import FromFile\n"
        f"def make():\n    return FromFile('registry://{tmp_path}/sum@prod')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert handler_of("sums_of_a_test:make").path_of_model() == str(tmp_path / "1.txt")


def test_a_wrong_digest_is_an_error_before_the_run(tmp_path: Path) -> None:
    registered(tmp_path, 1, "prod")
    (tmp_path / "1.txt").write_text("2")
    with pytest.raises(ModelUnavailable, match="have the digest"):
        _ = fnapi() | beam.Create([1]) | RunInference(FromFile(f"registry://{tmp_path}/sum@prod"))


def test_only_the_name_is_looked_up_for_workers_elsewhere(tmp_path: Path) -> None:
    """Their files are not here: the worker that loads the model compares the digest."""
    registered(tmp_path, 1, "prod")
    (tmp_path / "1.txt").unlink()
    pipeline = beam.Pipeline("FlinkRunner")
    pinned = pin_models(FromFile(f"registry://{tmp_path}/sum@prod"), pipeline)
    assert path_of(pinned.handler) == str(tmp_path / "1.txt")
    (tmp_path / "1.txt").write_text("another")
    with pytest.raises(ModelUnavailable, match="have the digest"):
        pinned.registered[THE_MODEL].local_path()


def test_a_plan_shows_versions_without_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(tmp_path, 1, "prod")
    (tmp_path / "1.txt").unlink()
    monkeypatch.setattr(LuminosityRunner, "warms_up", False)
    pipeline = beam.Pipeline(LuminosityRunner())
    _ = pipeline | beam.Create([1]) | RunInference(FromFile(f"registry://{tmp_path}/sum@prod"))
    (model,) = plan_pipeline(pipeline).explanation.models
    assert (model.step, model.version) == ("RunInference/Infer", "1")
    assert "Models" in str(plan_pipeline(pipeline))


def test_a_handler_without_updates_takes_no_name(tmp_path: Path) -> None:
    class Fixed(Handler[int, int, None]):
        model_id = f"registry://{tmp_path}/sum@prod"  # type: ignore[assignment]

        def predict(self, model: None, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
            return batch

    with pytest.raises(InvalidArgument, match="Fixed has no update_model_path"):
        _ = fnapi() | beam.Create([1]) | RunInference(Fixed())


def test_watch_registry_needs_an_alias(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no model is named by a registry"):
        _ = fnapi() | beam.Create([1]) | RunInference(FromFile("x.txt"), watch_registry=True)
    with pytest.raises(InvalidArgument, match="watch_model_pattern and watch_registry, expected one"):
        RunInference(FromFile("x.txt"), watch_registry=True, watch_model_pattern="*")
    registered(tmp_path, 1, "prod")
    model = resolve(f"registry://{tmp_path}/sum@prod")
    fixed = {THE_MODEL: model.__class__(**{**vars(model), "name": "models:/sum/7"})}
    with pytest.raises(InvalidArgument, match="'models:/sum/7', which always stands for the same version"):
        registry_watch(ModelSet(FromFile("x")), fixed, 1, 0)


def test_a_registry_that_goes_away_is_reported_once_and_the_model_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registered(tmp_path, 1, "prod")
    name = f"registry://{tmp_path}/sum@prod"
    watcher = RegistryWatcher(RegistryWatch({"a": resolve(name).checked(), "b": resolve(name).checked()}, 1e9, 1e12))
    watcher.look()
    assert watcher.newest("a").path == ""
    registered(tmp_path, 2, "prod")
    watcher.look()
    new = watcher.newest("a")
    assert new.registered is not None
    assert (new.registered.version, new.name, watcher.newest("b")) == ("2", "sum-2", new)
    watcher.look()
    assert watcher.newest("a") == new, "the same version is not taken over again"

    good = (tmp_path / "sum.json").read_text()
    for content in ("{broken", "[]", '{"versions": {}}'):
        (tmp_path / "sum.json").write_text(content)
        watcher.look()
    (tmp_path / "sum.json").unlink()
    watcher.look()
    assert watcher.newest("a") == new
    assert caplog.text.count("the model in use stays") == 1
    (tmp_path / "sum.json").write_text(good)
    watcher.look()
    assert "answers again" in caplog.text
    (tmp_path / "sum.json").unlink()
    watcher.look()
    assert caplog.text.count("the model in use stays") == 2

    (tmp_path / "sum.json").write_text(good)
    register_model(tmp_path / "sum.json", tmp_path / "1.txt", aliases=["prod"])
    watcher.look()
    assert watcher.newest("a").path == "", "back to the version with which the run began"


def test_a_slow_look_does_not_put_an_older_version_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(tmp_path, 1, "prod")
    first = resolve(f"registry://{tmp_path}/sum@prod")
    asked, answered = threading.Event(), threading.Event()
    versions = iter([first, first.__class__(**{**vars(first), "version": "2", "uri": "the second"})])

    def answer_slowly(name: str) -> Any:
        version = next(versions)
        if version is first:
            asked.set()
            assert answered.wait(60)
        return version

    monkeypatch.setattr(steps_versions, "resolve", answer_slowly)
    watcher = RegistryWatcher(RegistryWatch({THE_MODEL: first}, 1e9, 1e12))
    watcher.newest(THE_MODEL)  # begins a look in the background
    assert asked.wait(60)
    second_look = threading.Thread(target=watcher.look)
    second_look.start()
    answered.set()
    second_look.join(60)
    found = watcher.newest(THE_MODEL).registered
    assert found is not None
    assert found.version == "2"


def test_a_version_of_the_same_name_with_other_files_is_new(tmp_path: Path) -> None:
    registered(tmp_path, 1, "prod")
    name = f"registry://{tmp_path}/sum@prod"
    watcher = RegistryWatcher(RegistryWatch({THE_MODEL: resolve(name).checked()}, 1e9, 1e12))
    content = json.loads((tmp_path / "sum.json").read_text())
    content["versions"]["1"]["digest"] = "sha256:" + "0" * 64
    (tmp_path / "sum.json").write_text(json.dumps(content))
    watcher.look()
    assert watcher.newest(THE_MODEL).path.endswith("0000")


def test_each_name_is_asked_for_once_in_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(tmp_path, 1, "prod")
    model = resolve(f"registry://{tmp_path}/sum@prod")
    asked: list[str] = []
    monkeypatch.setattr(resolving, "_resolve_now", lambda name: asked.append(name) or model)
    RegistryWatcher(RegistryWatch(dict.fromkeys(range(100), model), 1e9, 1e12)).look()
    assert asked == [model.name]


def touch(path: Path, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    os.utime(path, (seconds, seconds))


@pytest.mark.parametrize("keyed", [False, True])
def test_folders_can_be_watched(tmp_path: Path, keyed: bool) -> None:
    """Those with a name for unfinished ones, and those from before the run, are none."""
    touch(tmp_path / "en" / "old" / "config.json", 50)
    touch(tmp_path / "en" / "1" / "config.json", 101)
    touch(tmp_path / "en" / "1" / "model" / "weights", 300)
    touch(tmp_path / "en" / "2" / "config.json", 102)
    for number, name in enumerate([".3", "_3", "3.tmp", "3.part"]):
        touch(tmp_path / "en" / name / "config.json", 200 + number)
    touch(tmp_path / "en" / "a file", 300)
    (tmp_path / "en" / "empty").mkdir()
    pattern = str(tmp_path / ("{key}" if keyed else "en") / "*") + "/"
    watcher = FileWatcher(Watch(pattern, 1e9, 1e12, since=100), ["en"])
    watcher.look()
    assert (watcher.newest("en").path, watcher.newest("en").name) == (str(tmp_path / "en" / "2"), "2")
    (tmp_path / "en" / "3.tmp").rename(tmp_path / "en" / "3")
    watcher.look()
    assert watcher.newest("en").path == str(tmp_path / "en" / "3")


def test_a_marker_says_that_a_folder_is_complete(tmp_path: Path) -> None:
    touch(tmp_path / "1" / "config.json", 101)
    touch(tmp_path / "1" / "_SUCCESS", 102)
    touch(tmp_path / "2" / "config.json", 201)
    watcher = FileWatcher(Watch(f"{tmp_path}/*/_SUCCESS", 1e9, 1e12, since=100), [THE_MODEL])
    watcher.look()
    assert watcher.newest(THE_MODEL).path == str(tmp_path / "1")
    touch(tmp_path / "2" / "_SUCCESS", 202)
    watcher.look()
    assert watcher.newest(THE_MODEL).path == str(tmp_path / "2")


def test_a_pattern_without_folders_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watcher = FileWatcher(Watch(f"{tmp_path}/*/", 1e9, 1e12, since=100), [THE_MODEL])
    watcher.look()
    watcher.look()
    assert caplog.text.count("No folder matches watch_model_pattern=") == 1
