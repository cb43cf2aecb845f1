"""The progress of steps that read or write Kafka, from their metrics."""

from __future__ import annotations

from collections.abc import Mapping

from apache_beam.metrics import monitoring_infos
from apache_beam.metrics.cells import GaugeData

from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.reporting.step_metrics import KafkaProgress
from luminosity.events import KafkaView, PartitionLag


class Stage:
    """A stage with a step that reads, and its progress."""

    def __init__(self, step: str = "Read/Read/Process", namespace: str = "ReadKafka") -> None:
        self._metrics = RunMetrics()
        self._place = step, namespace
        self.progress = KafkaProgress("s", self._metrics)

    def commit(self, seconds: float, counters: Mapping[str, int], lags: Mapping[str, tuple[int, int]]) -> None:
        """Commit a bundle with counters, and with gauges as pairs of time and value."""
        step, namespace = self._place
        infos = [monitoring_infos.int64_user_counter(namespace, n, v, ptransform=step) for n, v in counters.items()]
        for name, (at, value) in lags.items():
            data = GaugeData(value, timestamp=at)
            infos.append(monitoring_infos.int64_user_gauge(namespace, f"lag {name}", data, ptransform=step))
        self._metrics.add("s", infos)
        self.progress.update(seconds)

    def view(self, seconds: float, *, is_last: bool = False) -> KafkaView:
        (view,) = self.progress.views(seconds, is_last=is_last)
        return view


def test_a_stage_without_kafka_has_no_views() -> None:
    metrics = RunMetrics()
    metrics.add("s", [monitoring_infos.int64_user_counter("mine", "records_read", 3, ptransform="Read")])
    progress = KafkaProgress("s", metrics)
    progress.update(1.0)
    assert progress.views(1.0) == ()


def test_rates_and_times_are_those_of_the_last_minute_and_at_the_end_of_the_run() -> None:
    stage = Stage()
    stage.commit(10.0, {"records_read": 600, "bytes_read": 6_000, "age_ms_to_100": 600}, {})
    slow = stage.view(10.0)
    assert (slow.records_per_second, slow.bytes_per_second, slow.p50_ms) == (60.0, 600.0, 90.0)
    stage.commit(100.0, {"records_read": 60, "bytes_read": 600, "age_ms_to_3": 59, "age_ms_to_6": 1}, {})
    now = stage.view(100.0)
    assert (now.step, now.kind, now.records, now.bytes) == ("Read", "read", 660, 6_600)
    assert (now.records_per_second, now.p50_ms, now.p99_ms) == (1.0, 3.0, 6.0)
    idle = stage.view(300.0)
    assert (idle.records_per_second, idle.p50_ms) == (0.0, None)
    whole = stage.view(300.0, is_last=True)
    assert (whole.records_per_second, whole.p50_ms) == (2.2, 90.0)


def test_points_are_forgotten_after_a_minute() -> None:
    stage = Stage()
    for second in range(1000):
        stage.commit(float(second), {"records_read": 1}, {})
        stage.view(float(second))
    (step,) = stage.progress._steps.values()  # pyright: ignore[reportPrivateUsage]
    assert len(step._points) < 40  # pyright: ignore[reportPrivateUsage]


def test_the_largest_lags_are_named_and_all_are_summed() -> None:
    stage = Stage()
    stage.commit(1.0, {}, {f"t[{number}]": (5, number) for number in range(1000)})
    stage.commit(2.0, {}, {"t[999]": (4, 1), "t[7]": (6, 5000)})  # the first was set earlier, and came late
    view = stage.view(2.0)
    assert view.lags[:2] == (PartitionLag("t[7]", 5000), PartitionLag("t[999]", 999))
    assert (len(view.lags), view.partitions, view.lag) == (5, 1000, sum(range(1000)) - 7 + 5000)
    assert len(stage.view(2.0, is_last=True).lags) == 1000
    stage.commit(3.0, {}, {f"t[{number}]": (7, 0) for number in range(1000)})
    assert stage.view(3.0).lags == ()


def test_a_write_has_latencies_and_dead_letters() -> None:
    stage = Stage("Out/Publish/Write", "WriteKafka")
    stage.commit(10.0, {"records_written": 20, "bytes_written": 40, "records_unwritten": 3, "latency_ms_to_8": 20}, {})
    view = stage.view(10.0)
    assert (view.step, view.kind, view.records, view.dead_letters, view.partitions) == (
        "Out/Publish",
        "write",
        20,
        3,
        0,
    )
    assert view.p99_ms == 7.48
