"""Pipelines with a checkpoint that are killed and started again, as a script. Their results tell every repetition.

``python -m tests.durability.jobs NAME FOLDER [OPTION ...]`` runs one. With ``CRASH=POINT:N`` in the environment, the
process ends at the N-th time that it comes to a point: see ``_CRASHES``.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import VarIntCoder
from apache_beam.io import fileio
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsDict, AsSingleton
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import FixedWindows

from luminosity import (
    Handler,
    KafkaRecord,
    LuminosityRunner,
    ReadKafka,
    RunInference,
    TableFromRows,
    WriteKafka,
    WriteLance,
    WriteQdrant,
    WriteTable,
)
from luminosity.engine.debugging.dead_letters import DeadLetters
from luminosity.engine.durable import checkpointer, store, synced_log, writer
from tests.marks import first_time, note, wait_for_file

_WINDOW_S = 20
_PAUSE_S = 0.01
RECORDS_PER_SECOND = 100  # of event time: how many records have timestamps in one second

COUNTS = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("vector", pa.list_(pa.float32(), 2))])
GROUPS = pa.schema([("key", pa.int64()), ("sum", pa.int64()), ("count", pa.int64()), ("name", pa.string())])

ELEMENTS, KEYS = 1_500, 50
FAILING_EVERY, FAILING_KEY = 300, 7
SINK_ROWS = 20


class Count(beam.DoFn):
    """Emits each key with the number of its records so far."""

    _COUNT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("count", VarIntCoder()))

    def process(self, element: tuple[int, None], count: Any = _COUNT) -> Iterator[dict[str, Any]]:
        number = (count.read() or 0) + 1
        count.write(number)
        yield {"key": element[0], "n": number, "vector": [1.0, float(number)]}


def slowly(seconds: float) -> Callable[[Any], Any]:
    """Return a function that returns its argument, and takes so long on average.

    It sleeps once for several elements: on some machines each sleep, however short, lasts for tens of milliseconds.
    """
    owed = [0.0]

    def wait(value: Any) -> Any:
        owed[0] += seconds
        if owed[0] >= _PAUSE_S:
            time.sleep(owed[0])
            owed[0] = 0.0
        return value

    return wait


def count_stream(pipeline: beam.Pipeline, folder: Path) -> None:
    """Count the records of each key of a topic, and write each count to a table and the last one to a store."""
    servers = (folder / "servers").read_text()
    records: Any = pipeline | ReadKafka(servers, "in", max_out_of_orderness=0)
    counted = (
        records
        | "Slowly" >> beam.Map(slowly(0.0005)).with_output_types(KafkaRecord)
        | "Key" >> beam.Map(lambda record: (int(record.key), None)).with_output_types(tuple[int, None])
        | "Count" >> beam.ParDo(Count()).with_output_types(dict[str, Any])
        | beam.WindowInto(FixedWindows(_WINDOW_S))
        | TableFromRows(COUNTS)
    )
    _ = counted | WriteTable(folder / "table")
    _ = counted | WriteQdrant(folder / "qdrant", "counts", vectors="vector", id="key")
    _ = counted | WriteLance(folder / "counts.lance")


def publish_counts(pipeline: beam.Pipeline, folder: Path) -> None:
    """Count the records of each key of a topic, and write each count to another topic, once."""
    servers = (folder / "servers").read_text()
    records: Any = pipeline | ReadKafka(servers, "in", max_out_of_orderness=0)
    counted = (
        records
        | "Key" >> beam.Map(lambda record: (int(record.key), None)).with_output_types(tuple[int, None])
        | "Count" >> beam.ParDo(Count()).with_output_types(dict[str, Any])
    )
    pairs: Any = counted | beam.Map(lambda count: (str(count["key"]), str(count["n"])))
    _ = pairs | WriteKafka(servers, "out", exactly_once=os.environ.get("SINK", "counts"), shards=2)


class CountOfWindow(beam.DoFn):
    """Counts the records of a key in each window, and notes the count when a timer fires at the window's end."""

    _NUMBER = beam.DoFn.StateParam(ReadModifyWriteStateSpec("number", VarIntCoder()))
    _END_SPEC = TimerSpec("end", TimeDomain.WATERMARK)
    _END = beam.DoFn.TimerParam(_END_SPEC)

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(
        self, element: tuple[int, None], window: Any = beam.DoFn.WindowParam, number: Any = _NUMBER, end: Any = _END
    ) -> None:
        number.write((number.read() or 0) + 1)
        end.set(window.max_timestamp())

    @on_timer(_END_SPEC)
    def at_end(self, key: Any = beam.DoFn.KeyParam, window: Any = beam.DoFn.WindowParam, number: Any = _NUMBER) -> None:
        note(self._path, f"{key} {int(window.start)} {number.read()}")


def count_by_windows(pipeline: beam.Pipeline, folder: Path) -> None:
    """Note the records of each key and window of a topic, with state and timers. Large blocks wait on the way."""
    servers = (folder / "servers").read_text()
    records: Any = pipeline | ReadKafka(servers, "in", max_out_of_orderness=0)
    padded = records | "Pad" >> beam.Map(lambda record: (int(record.key), os.urandom(2_000)))
    slow = padded | beam.Reshuffle() | "Slowly" >> beam.Map(slowly(0.0005))
    _ = (
        slow
        | "Key" >> beam.Map(lambda pair: (pair[0], None)).with_output_types(tuple[int, None])
        | beam.WindowInto(FixedWindows(_WINDOW_S))
        | "Count" >> beam.ParDo(CountOfWindow(folder / "counts"))
    )


class Tally(beam.DoFn):
    """Counts the elements of a window, and notes the count when the window ends."""

    _NUMBER = beam.DoFn.StateParam(ReadModifyWriteStateSpec("number", VarIntCoder()))
    _END_SPEC = TimerSpec("end", TimeDomain.WATERMARK)
    _END = beam.DoFn.TimerParam(_END_SPEC)

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(
        self, element: Any, window: Any = beam.DoFn.WindowParam, number: Any = _NUMBER, end: Any = _END
    ) -> None:
        if not (before := number.read() or 0):
            first_time(f"{self._path}-has-begun")
        number.write(before + 1)
        end.set(window.max_timestamp())

    @on_timer(_END_SPEC)
    def at_end(self, number: Any = _NUMBER) -> None:
        note(self._path, number.read())


def count_in_open_windows(pipeline: beam.Pipeline, folder: Path) -> None:
    """Count the records of each key of a topic in a window that no record closes, and write and tally the counts."""
    servers = (folder / "servers").read_text()
    records: Any = pipeline | ReadKafka(servers, "in", max_out_of_orderness=0)
    counts = (
        records
        | "Slowly" >> beam.Map(slowly(0.001)).with_output_types(KafkaRecord)
        | "Key" >> beam.Map(lambda record: (int(record.key), None)).with_output_types(tuple[int, None])
        | "Count" >> beam.ParDo(Count()).with_output_types(dict[str, Any])
        | beam.WindowInto(FixedWindows(10**9))
    )
    tallied = counts | "One" >> beam.Map(lambda _: (0, None)).with_output_types(tuple[int, None])
    _ = tallied | "Tally" >> beam.ParDo(Tally(folder / "tally"))
    table = counts | TableFromRows(COUNTS)
    _ = table | WriteTable(folder / "table")
    _ = table | WriteQdrant(folder / "qdrant", "counts", vectors="vector", id="key")


class Triple(Handler[int, int, None]):
    """A model in the shared host."""

    def load_model(self) -> None:
        return None

    def share_model_across_processes(self) -> bool:
        return True

    def predict(self, model: None, batch: Sequence[int], inference_args: Any = None) -> list[int]:
        time.sleep(0.001 * len(batch))
        return [3 * example for example in batch]


def group_batch(pipeline: beam.Pipeline, folder: Path) -> None:
    """Run a model, group its predictions, join them with side inputs, and write them with several sinks."""
    padded = pipeline | beam.Create(range(ELEMENTS)) | "Pad" >> beam.Map(lambda number: (number, bytes(4_000)))
    numbers = padded | beam.Reshuffle() | "Unpad" >> beam.Map(lambda padded: padded[0])  # Blocks of it are files.
    total: Any = numbers | "Total" >> beam.CombineGlobally(sum)
    names = pipeline | "Keys" >> beam.Create([(key, f"key {key}") for key in range(KEYS)])
    predicted = numbers | "Slowly" >> beam.Map(slowly(0.002)) | RunInference(Triple())

    def describe(group: tuple[int, Any], total: int, names: dict[int, str]) -> dict[str, Any]:
        key, values = group[0], list(group[1])
        assert total == sum(range(ELEMENTS)), f"the side input is {total}"
        return {"key": key, "sum": sum(values), "count": len(values), "name": names[key]}

    groups = (
        predicted
        | beam.Map(lambda result: (result.example % KEYS, result.inference))
        | beam.GroupByKey()
        | "SlowlyToo" >> beam.Map(slowly(0.02))
        | beam.Map(describe, AsSingleton(total), AsDict(names))
    )
    table = groups | TableFromRows(GROUPS)
    _ = table | WriteTable(folder / "table")
    _ = table | WriteLance(folder / "groups.lance")
    lines = groups | beam.Map(lambda row: f"{row['key']} {row['sum']} {row['count']}")
    _ = lines | beam.io.WriteToText(str(folder / "text" / "part"))
    _ = lines | fileio.WriteToFiles(str(folder / "files"))


class Total(beam.DoFn):
    """Keeps the sum and the number of the values of each key, and emits them with the last value."""

    _TOTAL = beam.DoFn.StateParam(ReadModifyWriteStateSpec("total", VarIntCoder()))
    _NUMBER = beam.DoFn.StateParam(ReadModifyWriteStateSpec("number", VarIntCoder()))

    def process(self, element: tuple[int, int], total: Any = _TOTAL, number: Any = _NUMBER) -> Iterator[str]:
        total.write((total.read() or 0) + element[1])
        number.write((number.read() or 0) + 1)
        if number.read() == ELEMENTS // KEYS:
            yield f"{element[0]} {total.read()} {number.read()}"


def sum_in_state(pipeline: beam.Pipeline, folder: Path, step: Callable[[Any], Any] | None = None) -> None:
    """Sum the values of each key, and note the sums in a file. ``step`` gets each value before, and returns it."""
    numbers = pipeline | beam.Create(range(ELEMENTS)) | beam.Reshuffle() | "Slowly" >> beam.Map(step or slowly(0.003))
    keyed = numbers | beam.Map(lambda n: (n % KEYS, n)).with_output_types(tuple[int, int])
    _ = keyed | beam.ParDo(Total()) | beam.Map(lambda line: note(folder / "result", line))


def note_slowly(pipeline: beam.Pipeline, folder: Path) -> None:
    """Note each element in a file, slowly, so that a repeated one is there twice. One waits for the file ``go``."""

    def note_one(number: int) -> None:
        if number == ELEMENTS - 1:
            wait_for_file(folder / "go", timeout_s=300)
        note(folder / "notes", number)

    numbers = pipeline | beam.Create(range(ELEMENTS)) | beam.Reshuffle()
    _ = numbers | "Slowly" >> beam.Map(slowly(0.002)) | "Note" >> beam.Map(note_one)


def sum_with_a_step_that_hangs(pipeline: beam.Pipeline, folder: Path) -> None:
    """Sum the values of each key. In the first start, a step does not end for one of them."""

    def hang(number: int) -> int:
        if number == ELEMENTS // 2 and first_time(folder / "hangs"):
            time.sleep(3600)
        return number

    sum_in_state(pipeline, folder, hang)


def sum_with_a_step_that_fails(pipeline: beam.Pipeline, folder: Path) -> None:
    """Sum the values of each key. A step fails at some values of one key."""

    def fail(number: int) -> int:
        if number % FAILING_EVERY == FAILING_KEY:
            raise ValueError(f"no good: {number}")
        return number

    sum_in_state(pipeline, folder, fail)


def sum_large_elements(pipeline: beam.Pipeline, folder: Path) -> None:
    """Sum the values of each key. Some megabytes wait for a slow step."""
    numbers = pipeline | beam.Create(range(ELEMENTS)) | "Bytes" >> beam.Map(lambda n: (n, os.urandom(4_000)))
    small = (
        numbers | beam.Reshuffle() | "Slowly" >> beam.Map(slowly(0.003)) | "Number" >> beam.Map(lambda pair: pair[0])
    )
    keyed = small | beam.Map(lambda n: (n % KEYS, n)).with_output_types(tuple[int, int])
    _ = keyed | beam.ParDo(Total()) | beam.Map(lambda line: note(folder / "result", line))


class KillOnce(beam.DoFn):
    """Kills the whole run, once, right after the step before has done its work: nothing of it is saved yet."""

    def __init__(self, folder: Path, name: str) -> None:
        self._mark = folder / f"killed-{name}"

    def process(self, element: object) -> None:
        if first_time(self._mark):
            os.killpg(os.getpgid(0), signal.SIGKILL)


def publish_with_all_sinks(pipeline: beam.Pipeline, folder: Path) -> None:
    """Write a few rows with each sink. The run is killed after each of them."""
    rows = pipeline | beam.Create([{"key": key, "n": key, "vector": [1.0, float(key)]} for key in range(SINK_ROWS)])
    table = rows | TableFromRows(COUNTS)
    lines = rows | "Lines" >> beam.Map(lambda row: f"{row['key']}")
    (folder / "appended").mkdir(exist_ok=True)
    sinks: dict[str, Any] = {
        "table": table | "Table" >> WriteTable(folder / "table"),
        "appended": table | "Appended" >> WriteTable(folder / "appended", if_exists="append"),
        "one file": table | "OneFile" >> WriteTable(folder / "one.jsonl", if_exists="replace"),
        "lance": table | WriteLance(folder / "rows.lance"),
        "qdrant": table | WriteQdrant(folder, "points", vectors="vector", id="key", if_exists="fail"),
        "text": lines | beam.io.WriteToText(str(folder / "text" / "part"), num_shards=3),
        "files": lines | fileio.WriteToFiles(str(folder / "files")),
    }
    for name, written in sinks.items():
        _ = written | f"Kill after {name}" >> beam.ParDo(KillOnce(folder, name))


JOBS: dict[str, Callable[[beam.Pipeline, Path], None]] = {
    "stream": count_stream,
    "topic": publish_counts,
    "windows": count_by_windows,
    "batch": group_batch,
    "sinks": publish_with_all_sinks,
    "sums": sum_in_state,
    "notes": note_slowly,
    "large": sum_large_elements,
    "open windows": count_in_open_windows,
    "hanging": sum_with_a_step_that_hangs,
    "failing": sum_with_a_step_that_fails,
}


def _crash_in(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """Let a method end the process when it is called for the n-th time, before or after it has done its work."""
    real, left = getattr(owner, name), number

    def crash(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            os._exit(1)
        result = real(*arguments, **options)
        if left == 0:
            os._exit(1)
        return result

    setattr(owner, name, crash)


_CRASHES: dict[str, Callable[[int], None]] = {
    "in a transaction": lambda number: _crash_in(store.CheckpointFolder, "_apply", number, after=True),
    "before files are removed": lambda number: _crash_in(writer.Contents, "_let_go", number),
    "before the commit of letters": lambda number: _crash_in(DeadLetters, "write", number, after=True),
    "before finalization": lambda number: _crash_in(checkpointer.Checkpointer, "written", number),
}


def _note_syncs(folder: Path) -> None:
    """Note before each sync which files there are: the disk need not have others after a power loss.

    ``synced`` has those of the last sync, ``syncing`` those of the one that may be going on.
    """
    sync = store.CheckpointFolder.sync

    def note_and_sync(checkpoint: store.CheckpointFolder, files: Iterable[str] = ()) -> None:
        names = [str(path.relative_to(folder)) for path in Path(checkpoint.blocks).rglob("*")]
        (folder / "syncing.new").write_text("\n".join(names))
        (folder / "syncing.new").replace(folder / "syncing")
        sync(checkpoint, files)
        shutil.copy(folder / "syncing", folder / "synced.new")
        (folder / "synced.new").replace(folder / "synced")

    store.CheckpointFolder.sync = note_and_sync


def main(name: str, folder: str, *options: str) -> None:
    faulthandler.register(signal.SIGUSR1)  # a test that has waited for too long asks for the stacks
    if os.environ.get("NOTE_SYNCS"):
        _note_syncs(Path(folder))
    if boot_id := os.environ.get("BOOT_ID"):
        synced_log.boot_id = lambda: boot_id
    if crash := os.environ.get("CRASH"):
        point, _, number = crash.rpartition(":")
        _CRASHES[point](int(number))
    pipeline = beam.Pipeline(
        LuminosityRunner(),
        PipelineOptions(["--progress=off", "--cpu_workers=2", f"--checkpoint_dir={folder}/checkpoint", *options]),
    )
    JOBS[name](pipeline, Path(folder))
    result = pipeline.run()
    result.wait_until_finish()
    print("ended:", result.state)


if __name__ == "__main__":
    main(*sys.argv[1:])
