"""Secrets stay where they are: no error, log, plan, saved bundle or record of a run has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, ReadKafka, WriteKafka
from luminosity.errors import KafkaError, StepFailed
from luminosity.testing import KafkaBroker
from tests.io.kafka.sasl_broker import sasl_broker

_SECRET = "hush-hush-1234"


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", _SECRET)


def new_pipeline(*flags: str) -> beam.Pipeline:
    return beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", *flags]))


@pytest.mark.parametrize(
    "build",
    [
        lambda pipeline, *client, **settings: pipeline | ReadKafka(*client, **settings),
        lambda pipeline, *client, **settings: pipeline | beam.Create(["a"]) | WriteKafka(*client, **settings),
    ],
    ids=["read", "write"],
)
@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        ("PLAIN", r"SASL authentication error: wrong user or password .*_AUTHENTICATION"),
        ("SCRAM-SHA-256", r"Unsupported SASL mechanism: broker's supported mechanisms: PLAIN"),
    ],
)
def test_a_broker_that_refuses_the_client_is_named_and_its_password_is_not(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    build: Callable[..., Any],
    mechanism: str,
    words: str,
) -> None:
    config = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism, "sasl.username": "reader"}
    with (
        sasl_broker() as address,
        caplog.at_level(logging.DEBUG),
        pytest.raises(KafkaError, match=rf"the brokers at {address} refuse this client: .*{words}") as caught,
    ):
        build(new_pipeline(), address, "t", config=config, secrets={"sasl.password": "env:KAFKA_PASSWORD"})
    captured = capfd.readouterr()
    assert caplog.text
    for text in (str(caught.value), repr(caught.value), caplog.text, captured.out, captured.err):
        assert _SECRET not in text


def test_a_run_that_fails_leaves_no_secret_in_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, saved = tmp_path / "records", tmp_path / "failed.lum"
    monkeypatch.setenv("LUMINOSITY_RUN_DIR", str(records))
    with KafkaBroker({"t": 1, "out": 1}) as broker:
        broker.produce("t", "{bad")
        secrets = {"sasl.password": "env:KAFKA_PASSWORD"}  # The client reads it; the connection does not need it.
        pipeline = new_pipeline("--cpu_workers=1", f"--save_failed={saved}")
        objects = pipeline | ReadKafka(broker.bootstrap_servers, "t", stop="now", value="json", secrets=secrets)
        _ = objects | WriteKafka(broker.bootstrap_servers, "out", secrets=secrets)
        assert _SECRET.encode() not in pipeline.to_runner_api().SerializeToString()
        with pytest.raises(StepFailed, match=r"t\[0\] offset 0: the value is not JSON") as caught:
            pipeline.run().wait_until_finish()
    captured = capfd.readouterr()
    files = [saved, *(path for path in records.rglob("*") if path.is_file())]
    assert len(files) >= 2, "the bundle, a record of the run and, as soon as it is complete, its manifest"
    assert not [path for path in files if _SECRET.encode() in path.read_bytes()]
    assert _SECRET not in str(caught.value) + captured.out + captured.err
