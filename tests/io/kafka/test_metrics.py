"""The metrics of ReadKafka and WriteKafka, as every runner adds them up."""

from __future__ import annotations

import time
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.utils.timestamp import MIN_TIMESTAMP

from luminosity import ReadKafka, WriteKafka
from luminosity._shared.kafka_metrics import BUCKET_LIMITS_MS, bucket_counts, percentile_ms
from luminosity.io.kafka.metrics import ReadMetrics, WriteMetrics
from luminosity.testing import KafkaBroker

_HOUR_MS = 3_600_000


class _Metric:
    """Stands in for a counter, gauge or distribution."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def inc(self, value: int = 1) -> None:
        self.values.append(value)

    set = update = inc


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Metric]:
    """Return what is made with ``Metrics``, by name."""
    found: dict[str, _Metric] = {}

    def make(_: str, name: str) -> _Metric:
        return found.setdefault(name, _Metric())

    for kind in ("counter", "distribution", "gauge"):
        monkeypatch.setattr(f"apache_beam.metrics.Metrics.{kind}", make)
    return found


def last(metrics: dict[str, _Metric], start: str) -> dict[str, int]:
    return {name: metric.values[-1] for name, metric in metrics.items() if name.startswith(start) and metric.values}


def test_a_run_counts_records_bytes_lags_times_and_dead_letters(runner_name: str) -> None:
    now_ms = time.time_ns() // 1_000_000
    with KafkaBroker({"in": 2, "out": 1}) as broker:
        for number, value in enumerate(["1", "2", "no number", "400"]):
            broker.produce("in", value, key="k", partition=number % 2, timestamp=now_ms - _HOUR_MS)
        broker.produce("in", "5", partition=1, timestamp=now_ms - 10 * _HOUR_MS)
        pipeline = beam.Pipeline(runner_name)
        read = ReadKafka(broker.bootstrap_servers, "in", stop="now", value=int).with_exception_handling()
        numbers, _ = pipeline | "Read" >> read
        write = WriteKafka(broker.bootstrap_servers, "out", key=lambda _: "k", value=lambda r: "x" * r.value)
        small = write.with_exception_handling()
        _ = numbers | beam.Filter(lambda record: record.value < 100) | "Write" >> small
        result: Any = pipeline.run()
        result.wait_until_finish()
    counters = found(result, "counters")
    assert {name: counters[name] for name in ("records_read", "bytes_read", "records_unreadable")} == {
        "records_read": 5,
        "bytes_read": 19,
        "records_unreadable": 1,
    }
    assert {name: counters[name] for name in ("records_written", "bytes_written", "records_unwritten")} == {
        "records_written": 3,
        "bytes_written": 11,
        "records_unwritten": 0,
    }
    ages, latencies = bucket_counts(counters, "age_ms"), bucket_counts(counters, "latency_ms")
    assert (sum(ages.values()), sum(latencies.values())) == (5, 3)
    for counts in (ages, latencies):
        assert percentile_ms(counts, 0.5) == pytest.approx(_HOUR_MS, rel=0.2)
        assert percentile_ms(counts, 0.99) == pytest.approx(10 * _HOUR_MS, rel=0.2)
    assert found(result, "gauges") == {
        "lag in[0]": 0,
        "lag in[1]": 0,
        "position in[0]": 2,
        "position in[1]": 3,
    }
    assert found(result, "distributions")["latency_ms"].max >= 10 * _HOUR_MS


def found(result: Any, kind: str) -> dict[str, Any]:
    listed = list(result.metrics().query(MetricsFilter())[kind])
    kafka = [each for each in listed if each.key.metric.namespace in ("ReadKafka", "WriteKafka")]
    values = {each.key.metric.name: each.committed for each in kafka}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def test_times_of_a_write_are_those_of_elements_and_rows(
    metrics: dict[str, _Metric], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_000)
    written = WriteMetrics()
    written.start()
    written.note(5_000_000 - 40_000)
    written.note(MIN_TIMESTAMP.micros)  # came from no source with times
    written.note(9_000_000)  # an early pane, before the end of its window
    plain = pa.record_batch({"n": [1, 2]})
    written.note_rows(plain, 4_000_000)
    written.note_rows(plain, MIN_TIMESTAMP.micros)
    times = pa.array([3_000, None, 4_999], pa.timestamp("ms", "UTC"))
    written.note_rows(pa.record_batch({"_timestamp": times}), 1)
    written.count(9, 100, 0)
    assert last(metrics, "latency_ms_to_") == {
        "latency_ms_to_0": 1,
        "latency_ms_to_1": 1,
        "latency_ms_to_40": 1,
        "latency_ms_to_1000": 2,
        "latency_ms_to_2000": 1,
    }
    assert metrics["latency_ms"].values == [2000]
    written.note(1)
    written.start()  # after a failed attempt
    written.count(0, 0, 0)
    assert metrics["latency_ms"].values == [2000]


def test_only_so_many_times_of_a_bundle_are_kept(metrics: dict[str, _Metric], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity.io.kafka.metrics._MOST_TIMES", 5)
    written = WriteMetrics()
    now = time.time_ns() // 1000
    for _ in range(4):
        written.note(now)
    written.note_rows(pa.record_batch({"n": range(10)}), now)
    written.note(now)
    written.count(15, 100, 0)
    assert sum(last(metrics, "latency_ms_to_").values()) == 5


def test_odd_timestamps_of_records_are_counted(metrics: dict[str, _Metric]) -> None:
    read = ReadMetrics()
    read.note([-1], 3, 1_700_000_000_000)  # has none
    read.count()
    assert last(metrics, "age_ms") == {}
    read.note([-1, 0, (1 << 63) - 1, 1_699_999_999_900], 3, 1_700_000_000_000)
    read.count()
    assert last(metrics, "age_ms") == {
        "age_ms": 1_700_000_000_000,
        "age_ms_to_0": 1,
        "age_ms_to_100": 1,
        "age_ms_to_2000000000000": 1,
    }
    assert metrics["records_read"].values == [1, 4]


def test_records_of_several_claims_are_counted_together_each_with_the_time_of_its_claim(
    metrics: dict[str, _Metric],
) -> None:
    read = ReadMetrics()
    read.note([1, 2], 5, 10)
    read.start()  # the bundle has failed
    read.note([1_000, 1_000], 30, 1_003)
    read.note([], 0, 1_500)
    read.note([1_000], 12, 1_080)
    read.count()
    read.count()
    assert last(metrics, "age_ms") == {"age_ms": 80, "age_ms_to_3": 2, "age_ms_to_80": 1}
    assert metrics["records_read"].values == [3]
    assert metrics["bytes_read"].values == [42]


def test_many_partitions_share_a_gauge_unless_they_are_far_behind(metrics: dict[str, _Metric]) -> None:
    read = ReadMetrics()
    positions = {("t", number): 0 for number in range(500)}
    read.set_lags(1, positions, {partition: partition[1] for partition in positions})
    lags = last(metrics, "lag ")
    assert len(lags) == 101
    assert lags["lag t[499]"] == 499
    assert lags["lag of others in group 1"] == sum(range(400))
    read.set_lags(1, positions, dict.fromkeys(positions, 2))
    assert sum(last(metrics, "lag ").values()) == 1000
    assert last(metrics, "lag ").keys() == lags.keys()


def test_partitions_that_the_reader_no_longer_has_are_left_out(metrics: dict[str, _Metric]) -> None:
    read = ReadMetrics()
    read.set_lags(0, {("t", 0): 7}, {("t", 0): 5, ("t", 1): 9})
    assert last(metrics, "lag ") == {"lag t[0]": 0}


@pytest.mark.parametrize("time_ms", [1, 2, 7, 11, 99, 101, 126, 999, 1_000, 45_678, 86_400_000, 999_999_999])
def test_a_percentile_is_within_15_percent(metrics: dict[str, _Metric], time_ms: int) -> None:
    read = ReadMetrics()
    read.note([0], 0, time_ms)
    read.count()
    counts = bucket_counts(last(metrics, "age_ms_"), "age_ms")
    assert percentile_ms(counts, 0.5) == pytest.approx(time_ms, rel=0.15)
    assert list(BUCKET_LIMITS_MS) == sorted(set(BUCKET_LIMITS_MS))
