"""Settings of the client: which are allowed, and that secrets are seen by nobody but the client."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from luminosity.errors import InvalidArgument, InvalidType, KafkaError
from luminosity.io.kafka.client import KafkaClient

_SECRET = "hush-hush-1234"


def test_servers_are_a_text_or_a_list() -> None:
    assert KafkaClient("one:9092, two:9092").settings() == {"bootstrap.servers": "one:9092,two:9092"}
    assert KafkaClient(["one:9092", "two:9092"]).servers == "one:9092,two:9092"


@pytest.mark.parametrize("servers", ["", [], ["one:9092", " "], "one:9092,"])
def test_servers_are_needed(servers: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"bootstrap_servers="):
        KafkaClient(servers)


def test_secrets_come_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", _SECRET)
    (tmp_path / "key").write_text(f"{_SECRET}\n")
    client = KafkaClient(
        "one:9092",
        {"sasl.username": "me"},
        {"sasl.password": "env:KAFKA_PASSWORD", "ssl.key.password": f"file:{tmp_path}/key"},
    )
    assert client.settings()["sasl.password"] == _SECRET
    assert client.settings()["ssl.key.password"] == _SECRET
    assert _SECRET not in repr(client)
    assert _SECRET.encode() not in pickle.dumps(client)
    assert pickle.loads(pickle.dumps(client)).settings() == client.settings()


@pytest.mark.parametrize(
    "name",
    ["sasl.password", "ssl.key.password", "ssl.keystore.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"],
)
def test_a_secret_in_the_config_is_refused_and_not_shown(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"secrets=\{.*env:NAME") as caught:
        KafkaClient("one:9092", {name: _SECRET})
    assert _SECRET not in str(caught.value)


def test_a_secret_instead_of_its_place_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgument, match=r"secrets\['sasl.password'\]") as caught:
        KafkaClient("one:9092", secrets={"sasl.password": _SECRET})
    assert _SECRET not in str(caught.value)


def test_a_missing_secret_names_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(KafkaError, match=r"KAFKA_PASSWORD, which .* names, is not set"):
        KafkaClient("one:9092", secrets={"sasl.password": "env:KAFKA_PASSWORD"}).settings()
    with pytest.raises(KafkaError, match=r"No such file"):
        KafkaClient("one:9092", secrets={"sasl.password": f"file:{tmp_path}/none"}).settings()


def test_settings_of_the_transform_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'bootstrap.servers' in config=.*use bootstrap_servers="):
        KafkaClient("one:9092", {"bootstrap.servers": "two:9092"})
    with pytest.raises(InvalidArgument, match=r"'group.id' in config=.*use group_id="):
        KafkaClient("one:9092", {"group.id": "g"}, reserved={"group.id": "group_id="})


def test_settings_that_only_sound_secret_are_allowed() -> None:
    allowed = {"sasl.oauthbearer.token.endpoint.url": "https://a", "ssl.ca.pem": "-", "ssl.key.location": "/k"}
    assert KafkaClient("one:9092", allowed).settings() == {**allowed, "bootstrap.servers": "one:9092"}


def test_values_are_texts_or_numbers() -> None:
    with pytest.raises(InvalidType, match=r"'client.id' of type list"):
        KafkaClient("one:9092", {"client.id": ["a"]})


def test_an_unknown_setting_is_told_by_the_client() -> None:
    with pytest.raises(KafkaError, match=r"refuses its settings.*no.such.setting"):
        KafkaClient("one:9092", {"no.such.setting": 1}).producer({}, lambda error: None)
