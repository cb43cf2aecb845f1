"""MLflow's registry, with MLflow's own client: aliases, versions, files that a server keeps, and what can be wrong."""

from __future__ import annotations

import importlib.util
import pickle
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from luminosity import TextClassifier
from luminosity.errors import MissingExtra, ModelUnavailable
from luminosity.inference.files.local import cached_copy, use_cache
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.registry import mlflow_registry
from luminosity.inference.registry.resolve import resolve
from luminosity.inference.registry.resolved import model_digest
from tests.inference.texts import MINILM, tiny_bert_config

with_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the extra mlflow")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a registry that MLflow keeps in a folder."""
    import mlflow

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient()


def registered(client: Any, folder: Path, *aliases: str, **tags: str) -> str:
    if not client.search_registered_models():
        client.create_registered_model("mood")
    version = client.create_model_version("mood", folder.as_uri(), tags=tags).version
    for alias in aliases:
        client.set_registered_model_alias("mood", alias, version)
    return str(version)


def model(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def test_without_mlflow_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtra, match=r"mlflow is not installed; .* pip install 'mlflow-skinny"):
        resolve("models:/mood@champion")


@with_mlflow
def test_aliases_and_versions(client: Any, tmp_path: Path) -> None:
    first, second = model(tmp_path / "one", config="1"), model(tmp_path / "two", config="2")
    registered(client, first, "champion")
    registered(client, second)
    found = resolve("models:/mood@champion")
    assert (found.version, found.uri, found.label) == ("1", "models:/mood/1", "mood-1")
    checked = pickle.loads(pickle.dumps(found.checked()))
    assert (checked.local_path(), checked.digest) == (str(first), model_digest(first))
    assert resolve("models:/mood/latest").checked().local == str(second)
    assert resolve("models:/mood/2#config").local_path() == str(second / "config")
    client.set_registered_model_alias("mood", "champion", "2")
    assert resolve("models:/mood@champion").version == "2"


@with_mlflow
def test_names_that_the_registry_does_not_know(client: Any, tmp_path: Path) -> None:
    registered(client, model(tmp_path / "one", config="1"), "champion")
    for name, message in {
        "models:/moot@champion": r"has no model 'moot'; it has 'mood'; did you mean 'mood'\?",
        "models:/mood@champ": r"no alias 'champ'; its aliases are 'champion' \(version 1\); did you mean 'champion'\?",
        "models:/mood/7": r"the model 'mood' has no version '7'",
        "models:/moot/latest": r"has no model 'moot'",
    }.items():
        with pytest.raises(ModelUnavailable, match=message):
            resolve(name)
    with pytest.raises(ModelUnavailable, match=r"models:/mood/1: found no 'x.pkl' in the model at"):
        resolve("models:/mood@champion#x.pkl").local_path()


@with_mlflow
def test_a_digest_in_a_tag_is_checked(client: Any, tmp_path: Path) -> None:
    folder = model(tmp_path / "one", config="1")
    registered(client, folder, "champion", digest=model_digest(folder))
    assert resolve("models:/mood@champion").checked().digest == model_digest(folder)
    (folder / "config").write_text("2")
    with pytest.raises(ModelUnavailable, match="have the digest"):
        resolve("models:/mood@champion").checked()
    registered(client, folder, "broken", digest="1234")
    with pytest.raises(ModelUnavailable, match="found the tag digest='1234', expected sha256:"):
        resolve("models:/mood@broken")


@with_mlflow
def test_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # where nothing listens once the socket is closed
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, f"http://user:secret@127.0.0.1:{port}")
    monkeypatch.setattr(mlflow_registry, "_BETWEEN_ATTEMPTS_S", 0.0)
    with pytest.raises(ModelUnavailable, match=rf"http://127.0.0.1:{port} can't be reached: .*refused") as raised:
        resolve("models:/mood@champion")
    assert raised.value.may_pass


@pytest.mark.parametrize(
    ("flavors", "inside"),
    [("sklearn: {pickled_model: model.pkl}", "model.pkl"), ("transformers: {model_binary: model}", "model")],
)
def test_a_model_that_mlflow_saved_is_found_in_its_folder(tmp_path: Path, flavors: str, inside: str) -> None:
    folder = model(tmp_path / "one", MLmodel="flavors:\n  python_function: {env: conda.yaml}\n  " + flavors)
    assert mlflow_registry._loadable(str(folder)) == inside


def test_a_model_that_no_handler_takes(tmp_path: Path) -> None:
    folder = model(tmp_path / "one", MLmodel="flavors:\n  prophet: {data: x}")
    with pytest.raises(ModelUnavailable, match=r"for prophet, expected one for sklearn, .*; name the file inside"):
        mlflow_registry._loadable(str(folder))


class Repository:
    """Files as MLflow's server lists and gives them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files
        self.downloads: list[str] = []

    def list_artifacts(self, path: str | None = None) -> list[Any]:
        prefix = f"{path}/" if path else ""
        found: dict[str, Any] = {}
        for name, content in self._files.items():
            if name.startswith(prefix):
                first, slash, _ = name.removeprefix(prefix).partition("/")
                found[first] = SimpleNamespace(
                    path=prefix + first, is_dir=bool(slash), file_size=None if slash else len(content)
                )
        return list(found.values())

    def download_artifacts(self, path: str, folder: str) -> str:
        self.downloads.append(path)
        target = Path(folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self._files[path])
        return str(target)


def test_files_of_a_server_are_fetched_once(tmp_path: Path) -> None:
    use_cache(ModelCacheConfig(folder=str(tmp_path / "cache")))
    repository = Repository({"config.json": b"{}", "a/weights": b"123", "a/b/more": b"4"})
    address = "mlflow-artifacts:/1/models/m-1/artifacts"
    try:
        for _ in range(2):
            local = cached_copy(mlflow_registry._source(repository, address))
    finally:
        use_cache(ModelCacheConfig())
    found = {str(path.relative_to(local)): path.read_bytes() for path in Path(local).rglob("*") if path.is_file()}
    assert found == {"config.json": b"{}", "a/weights": b"123", "a/b/more": b"4"}
    assert sorted(repository.downloads) == ["a/b/more", "a/weights", "config.json"]
    with pytest.raises(ModelUnavailable, match="found no files"):
        mlflow_registry._source(Repository({}), address)


def test_a_tokenizer_that_mlflow_saved_beside_its_model(tmp_path: Path) -> None:
    """As ``mlflow.transformers.save_model`` writes them."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    BertForSequenceClassification(tiny_bert_config()).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(tmp_path / "components" / "tokenizer")
    (tmp_path / "MLmodel").write_text("flavors:\n  transformers: {model_binary: model, components: [tokenizer]}\n")
    handler = TextClassifier(str(tmp_path / mlflow_registry._loadable(str(tmp_path))), device="CPU")
    assert handler.plain is not None, "read without transformers, as from one folder"
    (result,) = handler.run_inference(["a good film"], handler.load_model())
    assert result.inference["label"].startswith("LABEL_")
