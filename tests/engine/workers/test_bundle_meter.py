"""Tests of the CPU time and memory that workers measure for their bundles."""

from __future__ import annotations

import os
import threading
import time

import pytest
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.workers.sdk.bundle_report import BundleMeter

_BURNT_S = 0.05
_MB = 1 << 20


def burn() -> None:
    until = time.thread_time() + _BURNT_S
    while time.thread_time() < until:
        pass


def usage(response: beam_fn_api_pb2.InstructionResponse) -> tuple[float, int]:
    seconds, resident, pid = wire.unpack_usage(response.process_bundle.monitoring_data[wire.USAGE])
    assert pid == os.getpid()
    return seconds, resident


def test_a_bundle_gets_the_time_of_its_own_thread_and_its_part_of_the_others() -> None:
    meter = BundleMeter()
    has_begun, may_end = threading.Event(), threading.Event()
    waiting: list[float] = []

    def wait() -> beam_fn_api_pb2.InstructionResponse:
        has_begun.set()
        may_end.wait(60)
        return beam_fn_api_pb2.InstructionResponse()

    def work() -> beam_fn_api_pb2.InstructionResponse:
        burn()
        helper = threading.Thread(target=burn)  # as the thread of a model does
        helper.start()
        helper.join()
        return beam_fn_api_pb2.InstructionResponse()

    thread = threading.Thread(target=lambda: waiting.append(usage(meter.measure(wait))[0]))
    before = time.process_time()
    thread.start()
    assert has_begun.wait(60)
    busy, _ = usage(meter.measure(work))
    may_end.set()
    thread.join()
    took = time.process_time() - before
    # The helper's time is shared by both, the own time is not.
    assert busy >= 1.4 * _BURNT_S
    assert 0.4 * _BURNT_S <= waiting[0] < busy
    assert busy + waiting[0] <= took + 0.001


def test_a_bundle_that_fails_takes_no_time_from_later_ones() -> None:
    meter = BundleMeter()

    def fail() -> beam_fn_api_pb2.InstructionResponse:
        burn()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        meter.measure(fail)
    burn()  # between two bundles
    seconds, resident = usage(meter.measure(beam_fn_api_pb2.InstructionResponse))
    assert seconds < _BURNT_S
    assert resident > _MB


def test_a_worker_that_does_not_measure_used_nothing() -> None:
    assert wire.unpack_usage(b"") == (0.0, 0, 0)
    assert wire.unpack_usage(wire.pack_usage(1.5, 7, 4711)) == (1.5, 7, 4711)
