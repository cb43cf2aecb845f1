"""Run the models of the demo over a Kafka topic, as a stream, and again over the topic's past: both give the same.

::

    lum run examples/reviews/stream.py
    lum run examples/reviews/stream.py --seconds=300 --window=60 --rate=50 --out=enriched

Each review gets its language, its embedding and its sentiment. Enriched reviews go to another topic at once. Every
window, its rows go to a table and to a vector store, and a test says whether the embeddings have drifted away from a
reference. A record without a value, a tombstone, deletes the row and the vector of its key. The broker runs inside
this script; pass --bootstrap-servers and --topic to read your own.

Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import apache_beam as beam
import dataset
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import sentiment
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows, GlobalWindows
from cleaning import clean
from feed import Feed
from language import Language
from pipeline import MOST_TOKENS, TRAINING_ROWS, embedder_path
from rich.console import Console

from luminosity import (
    Column,
    Enrich,
    MapTable,
    ReadKafka,
    SentenceEmbedder,
    WindowTable,
    WriteKafka,
    WriteQdrant,
    WriteTable,
)
from luminosity.drift import MMDTest, MMDTestResult
from luminosity.testing import KafkaBroker

COLLECTION = "reviews"
PARTITIONS = 4
REFERENCE_ROWS = 200
QUIET_S = 2  # the stream ends so long after the last review
VALUE = pa.schema([("source", pa.string()), ("label", pa.int64()), ("text", pa.string())])

RecordBatch = Any  # a pyarrow.RecordBatch; pyarrow has no type annotations


@dataclass(frozen=True)
class Topics:
    """Where reviews come from, and where results go."""

    servers: str
    reviews: str = "reviews"
    enriched: str = "enriched"
    drift: str = "drift"


def build(pipeline: beam.Pipeline, topics: Topics, out: Path, prepared: Path, window_s: float, stop: Any) -> None:
    """Add all steps to the pipeline. A stream and a backfill differ in ``stop`` alone.

    Args:
        pipeline: the pipeline.
        topics: the topics.
        out: the folder for the tables and the store.
        prepared: the folder with the parameters of the sentiment model and the reference embeddings.
        window_s: the length of a window, in seconds.
        stop: where to stop reading: a time, or ``"now"`` for what is in the topic.
    """
    parameters = prepared / "sentiment.npz"
    enriched = (
        pipeline
        | "Read"
        >> ReadKafka(topics.servers, topics.reviews, stop=stop, key="utf8", value="json", as_table=True, schema=VALUE)
        | "Clean" >> MapTable(reviews_of)
        | "Enrich"
        >> Enrich(
            language=Column(Language(), "text"),
            semantic=Column(embedder(), "text"),
            tone=Column(sentiment.Tone(parameters), "text"),
            sentiment=Column(sentiment.sentiment_of_tone(parameters), "tone"),
        )
    )
    _ = (
        enriched
        | "WithoutVectors" >> MapTable(lambda rows: rows.drop_columns(["semantic", "tone"]))
        | "Publish"
        >> WriteKafka(
            topics.servers,
            topics.enriched,
            key=lambda row: str(row["id"]),
            value=record_of,
            # Models run in parallel, so records of a key may change places: the offset says which is the last.
            headers=lambda row: {"offset": str(row["_offset"])},
        )
    )
    latest = (
        enriched
        | "Windows" >> WindowTable(FixedWindows(window_s))
        | "ByPartition" >> beam.Map(lambda rows: (rows["_partition"][0].as_py(), rows))
        | "Collect" >> beam.GroupByKey()
        | "Latest" >> beam.MapTuple(lambda _, batches: latest_of(batches)).with_output_types(pa.RecordBatch)
    )
    _ = latest | "Rows" >> MapTable(lambda rows: chosen(rows, deleted=False)) | WriteTable(out / "enriched")
    _ = latest | "Deletions" >> MapTable(deletions_of) | "WriteDeletions" >> WriteTable(out / "deleted")
    _ = (
        for_store(latest)
        | "Points" >> MapTable(lambda rows: rows.select(["id", "text", "sentiment", "semantic", "_deleted"]))
        | "Store" >> WriteQdrant(out / "store", COLLECTION, vectors="semantic")
    )
    results, _ = (
        latest
        | "Embeddings" >> MapTable(lambda rows: chosen(rows, deleted=False).select(["id", "semantic"]))
        | "Drift" >> MMDTest(prepared / "reference.npy", column="semantic", id="id").with_exception_handling()
    )
    _ = results | "Report" >> beam.ParDo(ReportDrift()) | "PublishDrift" >> WriteKafka(topics.servers, topics.drift)


def for_store(latest: Any) -> Any:
    """Return the rows that the store gets.

    A stream writes one window after the other. A batch has all windows at once, in any order, so that a deletion may
    come before the row: there, only the last row of each id is kept.
    """
    if not latest.is_bounded:
        return latest
    return (
        latest
        | "AllWindows" >> beam.WindowInto(GlobalWindows())
        | "ByPartitionAgain" >> beam.Map(lambda rows: (rows["_partition"][0].as_py(), rows))
        | "CollectAll" >> beam.GroupByKey()
        | "LatestOfAll" >> beam.MapTuple(lambda _, batches: latest_of(batches)).with_output_types(pa.RecordBatch)
    )


def embedder() -> SentenceEmbedder:
    """Return the embedder. Batches of one text: the last bits of a vector depend on the texts beside it."""
    return SentenceEmbedder(embedder_path(), max_length=MOST_TOKENS, normalize=True, max_batch_size=1)


def reviews_of(records: RecordBatch) -> RecordBatch:
    """Return records as reviews with clean texts. The key of a record is the id of its review."""
    texts = pc.fill_null(records["text"], "")  # of tombstones
    reviews = records.set_column(records.schema.get_field_index("text"), "text", texts)
    reviews = reviews.add_column(0, "id", pc.cast(records["_key"], pa.int64()))
    kept = ["id", "source", "label", "text", "_partition", "_offset", "_timestamp", "_deleted"]
    return clean(reviews.select(kept))


def record_of(row: dict[str, Any]) -> str | None:
    """Return the value of an enriched record: JSON, or None for a tombstone."""
    if row["_deleted"]:
        return None
    return json.dumps({name: row[name] for name in ("source", "text", "language", "sentiment")})


def latest_of(batches: Any) -> RecordBatch:
    """Return the last row of each id, in the order of offsets: a later record replaces an earlier one."""
    rows = pa.Table.from_batches(list(batches)).sort_by("_offset")
    last = {row_id: row for row, row_id in enumerate(rows["id"].to_pylist())}
    return rows.take(pa.array(sorted(last.values()), pa.int64())).combine_chunks().to_batches()[0]


def chosen(rows: RecordBatch, *, deleted: bool) -> RecordBatch:
    """Return the rows that are marked as deleted, or the others."""
    is_deleted = rows["_deleted"].to_numpy(zero_copy_only=False)
    return rows.filter(pa.array(is_deleted if deleted else ~is_deleted))


def deletions_of(rows: RecordBatch) -> RecordBatch:
    """Return the ids of deleted rows, with the offsets of their tombstones."""
    return chosen(rows, deleted=True).select(["id", "_partition", "_offset"])


class ReportDrift(beam.DoFn):
    """Turns the result of each window into a JSON text, and counts windows with and without drift."""

    def __init__(self) -> None:
        super().__init__()
        self._windows = {
            drift: Metrics.counter("Drift", "windows_with_drift" if drift else "windows_without_drift")
            for drift in (True, False)
        }
        self._p_value = Metrics.distribution("Drift", "p_value_per_mille")

    def process(self, element: MMDTestResult, window: Any = beam.DoFn.WindowParam) -> Iterator[str]:
        self._windows[bool(element.drift)].inc()
        self._p_value.update(round(1000 * element.p_value))
        found = {"drift": bool(element.drift), "p_value": element.p_value, "mmd2": element.mmd2}
        yield json.dumps({"from": float(window.start), "to": float(window.end), **found})


def current_rows(out: Path) -> Any:
    """Return the table as it is: without rows that a later record replaced or deleted, by id."""
    rows = pyarrow.parquet.read_table(out / "enriched")
    gone = pyarrow.parquet.read_table(out / "deleted").to_pylist() if (out / "deleted").is_dir() else []
    last: dict[int, tuple[int, int | None]] = {row["id"]: (row["_offset"], None) for row in gone}
    for number, (row_id, offset) in enumerate(zip(rows["id"].to_pylist(), rows["_offset"].to_pylist(), strict=True)):
        if offset > last.get(row_id, (-1, None))[0]:
            last[row_id] = (offset, number)
    kept = [number for _, number in last.values() if number is not None]
    return rows.take(pa.array(kept, pa.int64())).sort_by("id")


def prepare(folder: Path, rows: int, console: Console) -> Any:
    """Train the sentiment model, embed the reference, and return the reviews to stream.

    The second half of the stream has long reviews only, so that its embeddings drift.
    """
    reviews = dataset.load(2 * (rows + REFERENCE_ROWS), TRAINING_ROWS)
    sentiment.train(reviews.training, folder / "sentiment.npz")
    mixed, is_long = reviews.shown, pc.field("source") == "imdb"
    reference, streamed = mixed.slice(0, REFERENCE_ROWS), mixed.slice(REFERENCE_ROWS)
    handler = embedder()
    texts = clean(reference.combine_chunks().to_batches()[0])["text"].to_pylist()
    vectors = [np.asarray(each.inference) for each in handler.run_inference(texts, handler.load_model())]
    np.save(folder / "reference.npy", np.stack(vectors))
    console.print(f"Trained the sentiment model on {len(reviews.training):,} reviews, embedded {len(vectors)} others.")
    half = rows // 2
    long_ones = streamed.slice(half).filter(is_long)
    return pa.concat_tables([streamed.slice(0, half), long_ones.slice(0, rows - half)])


def run(flags: Sequence[str], *arguments: Any) -> Any:
    """Build and run a pipeline; return its result."""
    pipeline = beam.Pipeline(options=PipelineOptions(list(flags)))
    build(pipeline, *arguments)
    result = pipeline.run()
    result.wait_until_finish()
    return result


def report(console: Console, broker: KafkaBroker | None, topics: Topics, out: Path) -> None:
    """Print what the stream wrote."""
    live, past = current_rows(out / "stream"), current_rows(out / "backfill")
    equal = "equal, byte for byte" if live.equals(past) else "NOT EQUAL"
    console.print(f"stream: {len(live):,} rows; backfill over the same topic: {len(past):,} rows; {equal}")
    if broker is not None:
        # The backfill published everything again.
        found = {json.loads(each.value)["from"]: json.loads(each.value) for each in broker.consume(topics.drift)}
        for begin in sorted(found):
            words = "drift" if found[begin]["drift"] else "no drift"
            at = datetime.fromtimestamp(begin)
            console.print(f"window of {at:%H:%M:%S}: {words} (p = {found[begin]['p_value']:.3f})")
    console.print(f"tables {out / 'stream' / 'enriched'}\nstore  {out / 'stream' / 'store'}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run three models over a topic of reviews.", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to stream (default: 60)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window (default: 10)")
    parser.add_argument("--rate", type=float, default=10.0, help="reviews per second of the feed (default: 10)")
    parser.add_argument("--bootstrap-servers", help="your brokers (default: one inside this script, and a feed)")
    parser.add_argument("--topic", default="reviews", help="the topic of the reviews (default: reviews)")
    parser.add_argument("--out", type=Path, help="folder for all files (default: a temporary one)")
    own, flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    out = own.out or Path(tempfile.mkdtemp(prefix="review-stream-"))
    prepared = out / "prepared"
    prepared.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    reviews = prepare(prepared, round(own.rate * own.seconds), console)
    with ExitStack() as stack:
        broker = None
        end = datetime.now(timezone.utc) + timedelta(seconds=own.seconds + QUIET_S)
        if own.bootstrap_servers is None:
            names = {own.topic: PARTITIONS, Topics.enriched: PARTITIONS, Topics.drift: 1}
            broker = stack.enter_context(KafkaBroker(names))
            # A broker for tests can't find offsets by time, so nothing may come close to the end.
            feed = Feed(broker, own.topic, reviews, own.rate, end.timestamp() - QUIET_S)
            stack.callback(feed.close)
            feed.start()
            own.bootstrap_servers = broker.bootstrap_servers
        topics = Topics(own.bootstrap_servers, own.topic)
        console.print(f"Stream of {own.seconds:g} s: {topics.reviews} to {topics.enriched}, {topics.drift}, and {out}")
        run(flags, topics, out / "stream", prepared, own.window, end)
        console.print("Backfill: the same pipeline, as a batch over what is in the topic")
        run(flags, topics, out / "backfill", prepared, own.window, end)
        report(console, broker, topics, out)


if __name__ == "__main__":
    main()
