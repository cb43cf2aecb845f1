"""Tests of models that are not there: the error comes before anything runs, after at most one request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import apache_beam as beam
import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping
from apache_beam.ml.inference.base import RunInference as BeamRunInference
from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from huggingface_hub import constants

from luminosity import (
    Column,
    Enrich,
    JaxModelHandler,
    LuminosityRunner,
    RunInference,
    SentenceEmbedder,
    TextClassifier,
    TorchModelHandler,
)
from luminosity.errors import ModelUnavailable
from luminosity.inference.handlers.text import pretrained
from luminosity.inference.handlers.text.pretrained import must_stay_offline
from luminosity.inference.model_names import handler_of

_MISSING_PATHS = ["/nowhere/model", "./nowhere", "a/b/c", "models/", "~nobody/model"]


class FakeHub(HTTPServer):
    """A hub that has the model ``org/there``, and counts the requests it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):  # the library has questions of its own
            self.server.paths.append(self.path)
        is_there = self.path.startswith("/api/models/org/there")
        body = json.dumps({"id": "org/there"} if is_there else {"error": "Repository not found"}).encode()
        self.send_response(200 if is_there else 404)
        if not is_there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Undo the suite's own HF_HUB_OFFLINE, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRANSFORMERS_CACHE", raising=False)
    huggingface_hub.close_session()
    monkeypatch.setattr(pretrained, "_answers", {})


@pytest.fixture
def fake_hub(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server
        server.shutdown()


def in_cache(name: str) -> None:
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots" / "0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("path", _MISSING_PATHS)
def test_a_path_is_known_to_be_missing_without_a_request(path: str, fake_hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match="found no file or folder '/"):
        SentenceEmbedder(path).check_files()
    assert not fake_hub.paths


def test_a_hub_without_the_model_is_asked_once(fake_hub: FakeHub) -> None:
    for _ in range(3):
        with pytest.raises(ModelUnavailable) as caught:
            must_stay_offline("models/minilm", {})
    message = str(caught.value)
    assert f"no folder '{Path.cwd()}/models/minilm'" in message
    assert f"no copy in the cache '{constants.HF_HUB_CACHE}'" in message
    assert f"no model of this name at {fake_hub.url}" in message
    assert fake_hub.paths == ["/api/models/models/minilm"]


def test_a_model_on_the_hub_is_there(fake_hub: FakeHub) -> None:
    assert not must_stay_offline("org/there", {})
    assert not must_stay_offline("org/there", {"revision": "v1"})
    assert fake_hub.paths == ["/api/models/org/there", "/api/models/org/there/revision/v1"]


def test_a_hub_that_can_not_be_reached(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelUnavailable, match=r"http://127.0.0.1:1 can't be reached \(.*hf download org/model"):
        must_stay_offline("org/model", {})
    in_cache("org/model")
    assert must_stay_offline("org/model", {})


def test_a_hub_that_does_not_answer_counts_as_unreachable(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(pretrained, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(pretrained, "_request", lambda *_: waits.wait(60))
    with pytest.raises(ModelUnavailable, match="no answer within 0 s"):
        must_stay_offline("org/model", {})
    waits.set()


@pytest.mark.parametrize("arguments", [{"local_files_only": True}, {}])
def test_the_hub_is_not_asked_if_that_is_forbidden(
    arguments: dict[str, Any], fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not arguments:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="forbids it"):
        must_stay_offline("org/there", arguments)
    in_cache("org/there")
    assert must_stay_offline("org/there", arguments)
    assert not fake_hub.paths


def test_a_similar_folder_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "minilm-l6").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("models/minilm-16", "./models/minilm-16"):
        with pytest.raises(ModelUnavailable, match=r"did you mean '(./)?models/minilm-l6'"):
            SentenceEmbedder(path).check_files()


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("nothing here")
    with pytest.raises(ModelUnavailable, match=r"found no config\.json in the folder"):
        TextClassifier(tmp_path).check_files()


def flat(params: Any, batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(
    "handler",
    [
        SentenceEmbedder("no/such/model"),
        TorchModelHandler("no/such/weights.pt", dict),
        TorchModelHandler(exported_model_path="no/such/weights.pt2"),
        JaxModelHandler(flat, "no/such/params.npz"),
        SklearnModelHandlerNumpy("no/such/model.pkl"),
        SklearnModelHandlerNumpy("no/such/model.pkl").with_preprocess_fn(str),
        OnnxModelHandlerNumpy("file:///no/such/model.onnx"),
        KeyedModelHandler(SklearnModelHandlerNumpy("no/such/model.pkl")),
        KeyedModelHandler([KeyModelMapping(["a"], SentenceEmbedder("/no/such/model"))]),
    ],
    ids=lambda handler: type(handler).__name__,
)
def test_a_pipeline_of_this_machine_can_not_be_built(handler: Any) -> None:
    pipeline = beam.Pipeline(runner=LuminosityRunner())
    with pytest.raises(ModelUnavailable, match="/no/such/"):
        _ = pipeline | beam.Create([("a", np.zeros(2))]) | RunInference(handler)
    # Other runners may have the files where their workers are.
    _ = beam.Pipeline(runner=FnApiRunner()) | beam.Create([("a", np.zeros(2))]) | RunInference(handler)


def test_a_table_of_this_machine_can_not_be_enriched() -> None:
    table = beam.Pipeline(runner=LuminosityRunner()) | beam.Create([pa.table({"a": ["x"]})])
    with pytest.raises(ModelUnavailable, match="/no/such/model"):
        _ = table | Enrich(vector=Column(SentenceEmbedder("/no/such/model"), "a"))


def test_commands_find_a_missing_model_before_they_load_it() -> None:
    with pytest.raises(ModelUnavailable, match="/no/such/model"):
        handler_of("embed:/no/such/model")


class OwnLoading(SklearnModelHandlerNumpy):
    """Uses its path in its own way."""

    def load_model(self) -> Any:
        return None


def test_what_may_come_later_is_not_checked() -> None:
    pipeline = beam.Pipeline(runner=LuminosityRunner())
    arrays = pipeline | beam.Create([np.zeros(2)])
    _ = arrays | "own" >> RunInference(OwnLoading("no/such/model.pkl"))
    _ = arrays | "remote" >> RunInference(SklearnModelHandlerNumpy("gs://bucket/model.pkl"))
    missing = SklearnModelHandlerNumpy("no/such/model.pkl")
    _ = arrays | "versions" >> RunInference(missing, watch_model_pattern="no/such/*.pkl")
    one_of_many = KeyedModelHandler([KeyModelMapping(["a"], missing), KeyModelMapping(["b"], OwnLoading("x"))])
    keyed = arrays | beam.Map(lambda array: ("b", array))
    _ = keyed | "some keys" >> RunInference(one_of_many).with_exception_handling()
    _ = arrays | "of Beam" >> BeamRunInference(missing)


def test_a_plan_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LuminosityRunner, "warms_up", False)
    pipeline = beam.Pipeline(runner=LuminosityRunner())
    results = pipeline | beam.Create(["text"]) | RunInference(SentenceEmbedder("/no/such/model"))
    assert isinstance(results, beam.PCollection)
