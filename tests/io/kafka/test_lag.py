"""The lag that views show is that of now: also while a bundle of the reader does not end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import KafkaClient, LuminosityRunner, ReadKafka
from luminosity.events import Event, Snapshot
from luminosity.io.kafka.consumer import ConsumerSettings
from luminosity.io.kafka.lag_probe import LagProbe
from luminosity.testing import KafkaBroker
from tests.marks import wait_for_file
from tests.runners import IS_REFERENCE, flags
from tests.streams import wait_for


def _lags(events: list[Event]) -> list[int]:
    snapshots = [event for event in events if isinstance(event, Snapshot)]
    return [view.lag for each in snapshots for stage in each.stages for view in stage.kafka if view.partitions]


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
def test_the_lag_grows_while_a_step_stands_still(tmp_path: Path) -> None:
    go_on, events = tmp_path / "go-on", list[Event]()

    def hold(x: int) -> int:
        if x == 5:
            wait_for_file(go_on)
        return x

    with KafkaBroker({"t": 1}) as broker:
        broker.produce_many("t", [str(n) for n in range(5)])
        options = PipelineOptions(flags("--cpu_workers=1"))
        pipeline = beam.Pipeline(runner=LuminosityRunner(on_event=events.append), options=options)
        values: Any = pipeline | ReadKafka(broker.bootstrap_servers, "t", value=int, values_only=True)
        _ = values | beam.Map(hold)
        result = pipeline.run()
        try:
            assert wait_for(lambda: bool(_lags(events)) and _lags(events)[-1] == 0)
            broker.produce("t", "5")
            broker.produce_many("t", [str(n) for n in range(6, 20)])
            assert wait_for(lambda: _lags(events)[-1] >= 14), _lags(events)[-5:]
            go_on.touch()
            assert wait_for(lambda: _lags(events)[-1] == 0), _lags(events)[-5:]
        finally:
            go_on.touch()
            result.cancel()


def test_a_probe_tells_what_it_can() -> None:
    with KafkaBroker({"t": 2}) as broker:
        broker.produce("t", "x", partition=1)
        probe = LagProbe(ConsumerSettings(KafkaClient(broker.bootstrap_servers), None, "read_committed", 60, "n"))
        try:
            assert probe.ends(["t[0]", "t[1]"]) == {"t[0]": 0, "t[1]": 1}
            broker.stop_broker()
            assert probe.ends(["t[0]"]) == {}
        finally:
            probe.close()
    secret = KafkaClient("nowhere:9092", secrets={"sasl.password": "env:LUMINOSITY_NO_SUCH_VARIABLE"})
    assert LagProbe(ConsumerSettings(secret, None, "read_committed", 60, "n")).ends(["t[0]"]) == {}
