"""Models in a stream: results come while it runs, in the windows of their examples, and no batch waits for the next."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.window import FixedWindows

from luminosity import Column, Enrich, Handler, RunInference
from luminosity.errors import InvalidArgument
from luminosity.inference.steps import routing
from tests.runners import IS_REFERENCE, start
from tests.streams import Notes, run_stream, stream_of, tables, wait_for

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")


class Adds(Handler[int, int, int]):
    """Adds the number in a file, or 10; odd examples above 100 fail."""

    def __init__(self, notes: Notes, path: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._notes = notes
        self._path = path

    def update_model_path(self, model_path: str | None = None) -> None:
        self._path = model_path or self._path

    def load_model(self) -> int:
        return int(Path(self._path).read_text()) if self._path else 10

    def predict(self, model: int, batch: list[int], inference_args: dict[str, Any] | None = None) -> list[int]:
        if any(example > 100 and example % 2 for example in batch):
            raise ValueError("odd")
        self._notes.write(["batch", len(batch)])
        return [example + model for example in batch]


def _shown(result: Any, window: Any = beam.DoFn.WindowParam, timestamp: Any = beam.DoFn.TimestampParam) -> list[Any]:
    key, result = ("", result) if hasattr(result, "inference") else result
    return [f"{key}{result.inference}", float(window.start), float(timestamp)]


def test_results_come_while_the_stream_runs_in_the_windows_of_their_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause of the machine must not cut the first batch, which the host does not hold for longer than this.
    monkeypatch.setattr(routing, "_LONGEST_WAIT_IN_STREAM_S", 600.0)
    notes, batches = Notes(tmp_path / "notes"), Notes(tmp_path / "batches")

    def build(pipeline: beam.Pipeline) -> None:
        examples = pipeline | stream_of([(n, n) for n in range(8, 13)], [(14, 14)], 20, [(3, 3), (21, 21)])
        _ = examples | notes.step(lambda number: number)
        results = examples | beam.WindowInto(FixedWindows(10)) | RunInference(Adds(batches, min_batch_size=4))
        _ = results | beam.Map(_shown) | "Note" >> notes.step(lambda shown: shown)

    run_stream(build)
    found = [note for note in notes.read() if isinstance(note, list)]
    assert sorted(found) == sorted([str(n + 10), n // 10 * 10.0, float(n)] for n in (8, 9, 10, 11, 12, 14, 3, 21))
    assert notes.read().index(["24", 10.0, 14.0]) < notes.read().index(21)  # before the next event
    sizes = [size for _, size in batches.read()]
    assert sum(sizes) == 8
    assert sizes.index(1) > 0  # The first examples came together, and 14 did not wait for others.


def test_keys_and_dead_letters_in_a_stream(tmp_path: Path) -> None:
    notes, batches = Notes(tmp_path / "notes"), Notes(tmp_path / "batches")
    handler = KeyedModelHandler([KeyModelMapping([key], Adds(batches)) for key in "ab"])

    def build(pipeline: beam.Pipeline) -> None:
        events = [[(("a", 1), 1), (("b", 101), 2)], 10, [(("a", 103), 11), (("b", 2), 12)], [(("a", 3), 13)]]
        examples = pipeline | stream_of(*events)
        _ = examples | notes.step(lambda pair: pair[1])
        infer = RunInference(handler).with_exception_handling(threshold=0.9)
        windows: Any = examples | beam.WindowInto(FixedWindows(10))
        good, bad = windows | infer
        _ = good | beam.Map(_shown) | "Good" >> notes.step(lambda shown: shown)
        _ = bad.failed_inferences | "Bad" >> notes.step(lambda letter: ["failed", letter[0][0][1]])

    run_stream(build)
    found = notes.read()
    letters = {note[1] for note in found if isinstance(note, list) and note[0] == "failed"}
    good = sorted(note for note in found if isinstance(note, list) and note[0] != "failed")
    assert letters == {101, 103}
    assert good == [["a11", 0.0, 1.0], ["a13", 10.0, 13.0], ["b12", 10.0, 12.0]]
    assert found.index(["failed", 103]) < found.index(3)


def test_a_threshold_needs_windows_in_a_stream(tmp_path: Path) -> None:
    examples = beam.Pipeline() | stream_of()
    infer = RunInference(Adds(Notes(tmp_path / "notes"))).with_exception_handling(threshold=0.5)
    with pytest.raises(InvalidArgument, match=r"found threshold=0.5 in a stream that has no windows"):
        _ = examples | infer


def test_columns_of_a_stream(tmp_path: Path) -> None:
    notes, batches = Notes(tmp_path / "notes"), Notes(tmp_path / "batches")

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | stream_of(tables(1, 2), 10, tables(11), element_type=pa.RecordBatch)
        _ = table | notes.step(lambda table: table["n"].to_pylist())
        enriched = table | beam.WindowInto(FixedWindows(10)) | Enrich(sum=Column(Adds(batches), "n"))
        _ = enriched | "Note" >> notes.step(lambda table: table.to_pylist()[0])

    run_stream(build)
    found = notes.read()
    first, second, third = ({"n": n, "sum": n + 10} for n in (1, 2, 11))
    assert max(found.index(first), found.index(second)) < found.index([11])
    assert found[-1] == third
    assert len(found) == 6


def test_a_stream_without_end_gets_the_results_of_a_batch_that_is_not_full(tmp_path: Path) -> None:
    """A handler of Beam's with a real model, which wants more examples than will ever come at once."""
    import torch  # here alone, since workers import this module for its other handler
    from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerTensor

    notes = Notes(tmp_path / "notes")
    path = str(tmp_path / "model.pt")
    torch.save({"weight": torch.tensor([[0.5]])}, path)
    one_weight = {"in_features": 1, "out_features": 1, "bias": False}
    handler = PytorchModelHandlerTensor(path, torch.nn.Linear, one_weight, min_batch_size=10_000, max_batch_size=10_000)

    def build(pipeline: beam.Pipeline) -> None:
        ticks = pipeline | PeriodicImpulse(fire_interval=0.2)
        results = ticks | beam.Map(lambda _: torch.tensor([3.0])) | RunInference(handler)
        _ = results | notes.step(lambda result: float(result.inference[0]))

    result = start(build, "--cpu_workers=1")
    assert wait_for(lambda: len(notes.read()) >= 3)
    result.cancel()
    result.wait_until_finish()
    assert set(notes.read()) == {1.5}


def test_a_new_version_in_a_stream_loses_no_example(tmp_path: Path) -> None:
    notes, batches = Notes(tmp_path / "notes"), Notes(tmp_path / "batches")
    (tmp_path / "v1.model").write_text("10")
    handler = Adds(batches, str(tmp_path / "v1.model"))
    began = time.time()

    def build(pipeline: beam.Pipeline) -> None:
        ticks = pipeline | PeriodicImpulse(fire_interval=0.1)
        numbers = ticks | beam.Map(lambda tick: 2 * int((float(tick) - began) * 10 + 0.5))
        _ = numbers | "Examples" >> notes.step(lambda number: ["example", number])
        infer = RunInference(handler, watch_model_pattern=str(tmp_path / "*.model"), interval=0.2)
        _ = numbers | infer | "Results" >> notes.step(lambda result: ["result", result.example, result.inference])

    def added() -> set[int]:
        return {note[2] - note[1] for note in notes.read() if note[0] == "result"}

    result = start(build, "--cpu_workers=1")
    assert wait_for(lambda: added() == {10})
    (tmp_path / "v2.part").write_text("50")
    (tmp_path / "v2.part").rename(tmp_path / "v2.model")
    assert wait_for(lambda: added() == {10, 50})
    seen = len([note for note in notes.read() if note[0] == "example"])
    assert wait_for(lambda: len([note for note in notes.read() if note[0] == "result"]) >= seen)
    result.cancel()
    result.wait_until_finish()
    results = Counter(note[1] for note in notes.read() if note[0] == "result")
    examples = Counter(note[1] for note in notes.read() if note[0] == "example")
    assert not results - examples
