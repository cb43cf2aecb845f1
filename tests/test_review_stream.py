"""The example with reviews from Kafka: stream and backfill give the same, and tombstones delete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import qdrant_edge

EXAMPLE = Path(__file__).parent.parent / "examples" / "reviews"

# All records are in the topic when the stream begins, with timestamps in three windows.
_SCRIPT = """
import json, sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import stream
from rich.console import Console
from luminosity.testing import KafkaBroker

def offset_of(record):
    return int(dict(record.headers)["offset"])

def main():
    out, windows = Path(sys.argv[2]), (0, 10_000, 20_000)
    (out / "prepared").mkdir(parents=True)
    stream.REFERENCE_ROWS, stream.TRAINING_ROWS = 20, 1_000
    reviews = stream.prepare(out / "prepared", 30, Console(stderr=True)).to_pylist()
    with KafkaBroker({"reviews": 2, "enriched": 2, "drift": 1}) as broker:
        def put(review, value, at):
            broker.produce("reviews", value, key=str(review["id"]), timestamp=1_700_000_000_000 + at)
        for number, review in enumerate(reviews):
            put(review, stream.json.dumps(review), windows[number // 10] + 100 * number)
        put(reviews[0], None, 1_500)  # in the window of its review
        put(reviews[1], None, 20_000)  # in a later window
        put(reviews[2], None, 3_000)
        put(reviews[2], stream.json.dumps({**reviews[2], "text": "it is back"}), 15_000)
        topics = stream.Topics(broker.bootstrap_servers)
        flags = ["--runner=luminosity.LuminosityRunner", "--progress=off"]
        later = datetime.now(timezone.utc) + timedelta(seconds=1)
        stream.run(flags, topics, out / "stream", out / "prepared", 10, later)
        enriched = broker.consume("enriched")
        drift = broker.consume("drift")
        stream.run(flags, topics, out / "backfill", out / "prepared", 10, "now")
        live, past = (stream.current_rows(out / name) for name in ("stream", "backfill"))
        print(json.dumps({
            "equal": live.equals(past),
            "given": [review["id"] for review in reviews],
            "ids": live["id"].to_pylist(),
            "back": [row["text"] for row in live.to_pylist() if row["id"] == reviews[2]["id"]],
            "enriched": len(enriched),
            "tombstones": [record.key.decode() for record in enriched if record.value is None],
            "last": {record.key.decode(): record.value is not None for record in sorted(enriched, key=offset_of)},
            "windows": sorted(json.loads(record.value)["from"] for record in drift),
        }))

if __name__ == "__main__":
    main()
"""


def points_of(folder: Path) -> dict[int, Any]:
    """The vectors in a store, by id."""
    shard = qdrant_edge.EdgeShard.load(str(folder / "reviews"))
    records, _ = shard.scroll(qdrant_edge.ScrollRequest(limit=1_000, with_payload=False, with_vector=True))
    return {record.id: record.vector for record in records}


@pytest.mark.alone  # It loads four models in several processes, twice.
def test_stream_and_backfill_are_equal_and_tombstones_delete(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, EXAMPLE, tmp_path], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second, third = found["given"][:3]
    assert found["equal"]
    assert found["ids"] == sorted(set(found["given"]) - {first, second})
    assert found["back"] == ["it is back"]
    assert found["enriched"] == 34
    assert sorted(found["tombstones"]) == sorted(map(str, (first, second, third)))
    assert {int(key) for key, has_value in found["last"].items() if has_value} == set(found["ids"])
    assert found["windows"] == [1_700_000_000.0, 1_700_000_010.0, 1_700_000_020.0]
    live, past = points_of(tmp_path / "stream" / "store"), points_of(tmp_path / "backfill" / "store")
    assert sorted(live) == found["ids"]
    assert live == past
