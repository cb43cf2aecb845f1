"""Registries that are JSON files: what a name stands for, and what is said of names and files that are wrong."""

from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.registry import resolve as resolving
from luminosity.inference.registry.file_registry import register_model
from luminosity.inference.registry.resolve import resolve
from luminosity.inference.registry.resolved import RegistryName, model_digest
from tests.inference.stores import ROOT


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A registry with two versions of a model, a file and a folder."""
    (tmp_path / "mood" / "2").mkdir(parents=True)
    (tmp_path / "mood" / "1.pt").write_bytes(b"first")
    (tmp_path / "mood" / "2" / "config.json").write_text("{}")
    register_model(tmp_path / "mood.json", tmp_path / "mood" / "1.pt", aliases=["prod"])
    register_model(tmp_path / "mood.json", tmp_path / "mood" / "2", aliases=["canary"])
    return tmp_path


def rewrite(registry: Path, **changes: Any) -> None:
    registry.write_text(json.dumps({**json.loads(registry.read_text()), **changes}))


def test_an_alias_and_a_version_stand_for_files_with_a_digest(models: Path) -> None:
    found = resolve(f"registry://{models}/mood@prod")
    assert (found.version, found.path) == ("1", str(models / "mood" / "1.pt"))
    assert found.digest == model_digest(models / "mood" / "1.pt")
    assert found.uri == f"registry://{models}/mood@1"
    assert found.checked().local_path() == found.path
    assert resolve(found.uri).identity == found.identity
    assert resolve(f"registry://{models}/mood.json@canary").path == str(models / "mood" / "2")


def test_a_registry_of_the_current_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    found = resolve("registry://mood@prod")
    assert found.path == str(models / "mood" / "1.pt"), "workers may have another current folder"


def test_the_digest_of_a_folder_is_that_of_sha256sum(tmp_path: Path) -> None:
    names = ["config.json", "Z.bin", "a/b.txt", "a-b.txt", "späte Datei"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    command = "find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    expected = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = model_digest(tmp_path)
    assert found == f"sha256:{expected.split()[0]}"
    (tmp_path / "a" / "b.txt").rename(tmp_path / "a" / "c.txt")
    assert model_digest(tmp_path) != found


def test_a_registry_and_its_models_in_a_bucket(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ROOT, str(models))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = resolve("registry://teststore://mood@canary")
    assert found.path == "teststore://mood/2"
    local = found.checked().local
    assert Path(local, "config.json").read_text() == "{}"
    (models / "mood" / "2" / "config.json").write_text("changed")
    with pytest.raises(ModelUnavailable, match=r"mood@2: .* have the digest sha256:.* expected sha256:"):
        found.checked()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mood@prd", r"has no alias or version 'prd'; it has 'prod', 'canary', '1', '2'; did you mean 'prod'\?"),
        ("mood@9", "has no alias or version '9'"),
        ("modo@prod", r"found no registry '.*/modo.json'; did you mean '.*/mood.json'\?"),
    ],
)
def test_a_name_that_does_not_exist(models: Path, name: str, message: str) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        resolve(f"registry://{models}/{name}")


@pytest.mark.parametrize(
    "name",
    [
        *("registry://models/mood", "registry://@prod", "registry://models/@prod", "registry://a@b/mood"),
        *("models:/", "models:/mood", "models:/mood@", "models:/@prod", "models:/a/b/c", "models:/mood/2@prod"),
    ],
)
def test_a_name_that_lacks_a_part(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"found the model .* expected (models:/NAME@|registry://FOLDER)"):
        RegistryName.parse(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is broken: Expecting value"),
        ('{"versions": {"1"', "is broken: Expecting"),
        (b"\xff\xfe\x00", "is broken: .*decode"),
        ("[1]", "found a list, expected an object"),
        pytest.param("[" * 100_000, "is broken: maximum recursion depth", id="deep"),
        ('{"aliases": {}}', "found no object 'versions'"),
        ('{"versions": {"1": "mood/1.pt"}}', "the version '1' has no 'path'"),
        ('{"versions": {"1": {"path": 3}}}', "the version '1' has no 'path'"),
        ('{"versions": {"1": {"path": "x", "digest": "md5:00"}}}', "has the digest 'md5:00', expected sha256:"),
        ('{"versions": {}, "aliases": ["prod"]}', "found 'aliases' that is not an object"),
        ('{"versions": {}, "aliases": {"prod": null}}', "the alias 'prod' stands for None, expected a version"),
        ('{"versions": {}, "aliases": {"prod": 4}}', "the alias 'prod' stands for the version '4', which is not among"),
    ],
)
def test_a_broken_registry(tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "mood.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelUnavailable, match=message):
        resolve(f"registry://{tmp_path}/mood@prod")


def test_a_registry_that_is_a_folder_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "mood.json").mkdir()
    with pytest.raises(ModelUnavailable, match=r"mood.json( can't be read|')"):
        resolve(f"registry://{tmp_path}/mood@prod")


def test_files_that_are_gone_and_files_that_have_changed(models: Path) -> None:
    found = resolve(f"registry://{models}/mood@prod")
    (models / "mood" / "1.pt").write_bytes(b"another")
    with pytest.raises(ModelUnavailable, match=r"have the digest sha256:\w+, expected sha256:\w+, as the"):
        found.checked()
    (models / "mood" / "1.pt").unlink()
    with pytest.raises(ModelUnavailable, match=r"mood@1: found no file or folder .*1.pt', which the registry names"):
        found.checked()


def test_a_version_without_a_digest_gets_one(models: Path) -> None:
    rewrite(models / "mood.json", versions={"1": {"path": "mood/1.pt"}})
    found = resolve(f"registry://{models}/mood@prod")
    assert found.digest == ""
    assert found.checked().digest == model_digest(models / "mood" / "1.pt")


def test_a_registry_that_never_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a run looks: each request that hangs would keep its thread."""
    answer, calls = threading.Event(), list[str]()

    def hang(name: str) -> Any:
        calls.append(name)
        answer.wait(60)
        raise ModelUnavailable("the registry is back, and has no model")

    monkeypatch.setattr(resolving, "_resolve_now", hang)
    for _ in range(3):
        with pytest.raises(ModelUnavailable, match="has not answered within 0 s"):
            resolve("registry://models/mood@prod", timeout_s=0.01)
    answer.set()
    with pytest.raises(ModelUnavailable, match="has no model"):
        resolve("registry://models/mood@prod", timeout_s=60)
    assert len(calls) <= 2, "the last call may come after the first request has ended"


def test_versions_that_are_registered_at_once_are_all_there(tmp_path: Path) -> None:
    def register(number: int) -> str:
        path = tmp_path / f"{number}.pt"
        path.write_bytes(bytes([number]))
        return register_model(tmp_path / "mood.json", path)

    with ThreadPoolExecutor(4) as threads:
        versions = list(threads.map(register, range(12)))
    assert sorted(versions, key=int) == [str(number) for number in range(1, 13)]
    assert set(json.loads((tmp_path / "mood.json").read_text())["versions"]) == set(versions)


def test_registering_again_moves_the_alias_only(models: Path) -> None:
    rewrite(models / "mood.json", owner="us")
    assert register_model(f"registry://{models}/mood", models / "mood" / "2", aliases=["prod"]) == "2"
    content = json.loads((models / "mood.json").read_text())
    assert content["aliases"] == {"prod": "2", "canary": "2"}
    assert (list(content["versions"]), content["owner"]) == (["1", "2"], "us")
    with pytest.raises(InvalidArgument, match="has a version '1' with other files already"):
        register_model(models / "mood.json", models / "mood" / "2", version="1")
    with pytest.raises(InvalidArgument, match="names without @ and /"):
        register_model(models / "mood.json", models / "mood" / "2", aliases=["a/b"])


@pytest.mark.parametrize("name", ["mood[2]", "mo*d", "mood?", "my mood"])
def test_a_name_that_is_a_pattern_keeps_its_versions(models: Path, name: str) -> None:
    register_model(f"registry://{models}/{name}", models / "mood" / "1.pt", aliases=["prod"])
    assert register_model(f"registry://{models}/{name}", models / "mood" / "2", aliases=["canary"]) == "2"
    assert resolve(f"registry://{models}/{name}@prod").version == "1"
    with pytest.raises(ModelUnavailable, match=r"found no registry '.*/moo\*.json'"):
        resolve(f"registry://{models}/moo*@prod")


def test_a_model_or_an_alias_that_can_not_be_registered(models: Path) -> None:
    before = (models / "mood.json").read_bytes()
    with pytest.raises(ModelUnavailable, match=r"found no file or folder '.*/3.pt' to register"):
        register_model(models / "mood.json", models / "mood" / "3.pt")
    with pytest.raises(InvalidArgument, match=r"found the alias '1' for the version '2', but .* has a version of this"):
        register_model(models / "mood.json", models / "mood" / "2", aliases=["1"])
    assert (models / "mood.json").read_bytes() == before
