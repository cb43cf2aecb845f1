"""The fakes that tests stand on."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import RunInference

from luminosity.inference.memory import is_out_of_memory
from luminosity.testing import FakeClock, FakeDevice, FakeDeviceHandler, FakeOutOfMemory
from tests.runners import run


def test_batches_of_all_processes_are_in_the_log(tmp_path: Path) -> None:
    device = FakeDevice(memory=1000, log=tmp_path / "batches")
    assert device.batches() == []
    examples = ["x" * (1 + n % 7) for n in range(200)]

    def build(pipeline: beam.Pipeline) -> None:
        spread = pipeline | beam.Create(examples) | beam.Reshuffle()
        _ = spread | RunInference(FakeDeviceHandler(device))

    run(build, "--cpu_workers=2")
    batches = device.batches()
    assert sum(batch.count for batch in batches) == 200
    assert sum(batch.cost for batch in batches) == sum(map(len, examples))
    assert all(batch.cost <= batch.padded_cost <= 1000 and batch.fitted for batch in batches)


def test_a_batch_that_does_not_fit_is_logged_and_raises(tmp_path: Path) -> None:
    device = FakeDevice(memory=10, log=tmp_path / "batches")
    handler = FakeDeviceHandler(device)
    with pytest.raises(FakeOutOfMemory, match="2 x 6 = 12") as caught:
        handler.run_inference(["a", "abcdef"], handler.load_model())
    assert is_out_of_memory(caught.value)
    (batch,) = device.batches()
    assert (batch.count, batch.cost, batch.padded_cost, batch.fitted) == (2, 7, 12, False)


def test_time_passes_on_its_clock_alone() -> None:
    clock = FakeClock()
    device = FakeDevice(memory=100, seconds_per_batch=1.0, seconds_per_cost=0.5, clock=clock)
    handler = FakeDeviceHandler(device, seconds_per_prepare=0.25, seconds_to_load=10)
    model = handler.load_model()
    assert clock.monotonic() == 10
    handler.prepare(["ab"])
    assert clock.monotonic() == 10.25
    first, second = (handler.predict(model, ["ab"]) for _ in range(2))
    assert clock.monotonic() == 10.25  # the device has only begun
    handler.wait(second)
    assert clock.monotonic() == 14.25  # one after the other
    handler.wait(first)
    assert clock.monotonic() == 14.25


@pytest.mark.parametrize("hook", ["prepare", "predict"])
def test_poison_raises_where_it_is_told_to(hook: str) -> None:
    handler = FakeDeviceHandler(FakeDevice(memory=100), poison=["bad"], poison_in=hook)  # type: ignore[arg-type]
    call = handler.prepare if hook == "prepare" else lambda block: handler.predict(handler.load_model(), block)
    call(["good"])
    with pytest.raises(ValueError, match="poison"):
        call(["good", "bad"])
