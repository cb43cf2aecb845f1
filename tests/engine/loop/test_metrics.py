"""Tests of merged metrics: every kind is merged, and a long run keeps one value of each."""

from __future__ import annotations

import os
from typing import Any

from apache_beam.metrics import monitoring_infos
from apache_beam.metrics.cells import DistributionData, GaugeData
from apache_beam.portability.api import beam_fn_api_pb2, metrics_pb2

from luminosity.engine.loop.metrics import RunMetrics

_LONG = "x" * 500_000


def of_a_bundle(number: int) -> list[metrics_pb2.MonitoringInfo]:
    counted = DistributionData(sum=10 * number, count=2, min=number, max=9 * number)
    return [
        monitoring_infos.int64_user_counter("mine", "words", number, ptransform="Parse"),
        monitoring_infos.int64_user_counter("mine", "words", 1, ptransform="Join"),
        monitoring_infos.int64_counter(monitoring_infos.ELEMENT_COUNT_URN, 100 * number, pcollection="p"),
        monitoring_infos.int64_user_distribution("mine", "length", counted, ptransform="Parse"),
        monitoring_infos.int64_user_gauge("mine", "open", GaugeData(number, timestamp=number), ptransform="Parse"),
        monitoring_infos.user_set_string("mine", "files", {f"file {number}"}, ptransform="Parse"),
    ]


def test_all_kinds_of_metrics_are_merged() -> None:
    metrics = RunMetrics()
    for number in (1, 3, 2):
        metrics.add("s", of_a_bundle(number))
    words, others, elements, length, opened, files = metrics.by_stage()["s"]
    assert monitoring_infos.extract_counter_value(words) == 6
    assert monitoring_infos.extract_counter_value(others) == 3
    assert monitoring_infos.extract_counter_value(elements) == metrics.elements("s") == 600
    assert monitoring_infos.extract_distribution(length) == (6, 60, 1, 27)
    assert monitoring_infos.extract_gauge_value(opened)[1] == 3  # the latest
    assert monitoring_infos.extract_string_set_value(files) == {"file 1", "file 2", "file 3"}
    assert words.labels["PTRANSFORM"] == "Parse"
    assert metrics.counters("s", {"words"}) == {"Parse": {"mine": {"words": 6}}, "Join": {"mine": {"words": 3}}}


def test_what_is_read_is_not_changed_by_later_bundles() -> None:
    metrics = RunMetrics()
    metrics.add("s", of_a_bundle(1))
    before = metrics.by_stage()["s"]
    values = [info.SerializeToString() for info in before]
    metrics.add("s", of_a_bundle(2))
    assert [info.SerializeToString() for info in before] == values


class Rows(dict[bytes, bytes]):
    """The rows of a checkpoint with one stage."""

    def put(self, owner: str, key: bytes, value: bytes) -> None:
        self[key] = value


def test_all_kinds_of_metrics_continue_after_a_restart() -> None:
    metrics, rows = RunMetrics(), Rows()
    saved: Any = rows
    for number in (1, 3):  # labels are written with the first values
        metrics.add("s", of_a_bundle(number))
        metrics.save(saved, str)
    again = RunMetrics()
    again.restore("s", rows.items())
    assert [info.payload for info in again.by_stage()["s"]] == [info.payload for info in metrics.by_stage()["s"]]
    assert again.numbers("s", {"mine"})["Parse", "mine"] == {"words": 4, "open": 3}
    again.add("s", of_a_bundle(2))
    assert again.numbers("s", {"mine"})["Parse", "mine"] == {"words": 6, "open": 3}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_merging_for_months_does_not_grow() -> None:
    """A message keeps each payload that was assigned to it, and the whole response that it is a part of."""
    metrics = RunMetrics()
    of_long = monitoring_infos.user_set_string("mine", "files", {_LONG}, ptransform="Parse")
    response = beam_fn_api_pb2.ProcessBundleResponse(monitoring_infos=[of_long]).SerializeToString()

    def merge(times: int) -> None:
        for _ in range(times):
            metrics.add("s", beam_fn_api_pb2.ProcessBundleResponse.FromString(response).monitoring_infos)
            metrics.elements("s")  # merges what waits

    merge(10)
    before = resident_bytes()
    merge(100)
    assert resident_bytes() - before < 20 * len(_LONG)
