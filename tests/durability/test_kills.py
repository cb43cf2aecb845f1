"""Whole runs that are killed with kill -9, process, workers and model host, and started again: results are exact."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import lancedb
import pyarrow.parquet as pq
import pytest

from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.store import Query
from luminosity.testing import KafkaBroker
from tests.durability import jobs
from tests.durability.kills import Job, produce, published_rows
from tests.io.written import rows_of

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]  # many starts, each of which imports everything

_KEYS, _PER_KEY = 10_000, 2


def check_stream(folder: Path, keys: int, per_key: int) -> None:
    """Raise unless all counts of all keys are in the table and the dataset once, and the last ones in the store."""
    expected = Counter({(key, number + 1): 1 for key in range(keys) for number in range(per_key)})
    table = pq.read_table(folder / "table", columns=["key", "n"])
    assert _differences(Counter(zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True)), expected) == []
    rows = lancedb.connect(folder).open_table("counts").to_arrow()
    assert _differences(Counter(zip(rows["key"].to_pylist(), rows["n"].to_pylist(), strict=True)), expected) == []
    collection = EmbeddedCollection(StoreAddress(str(folder / "qdrant"), "counts"))
    assert collection.count() == keys
    query = Query(None, keys, ["n"], None, {})
    found = collection.search([[1.0, 1.0]], query)[0]
    assert Counter(hit.payload["n"] for hit in found) == {per_key: keys}


def check_batch(folder: Path) -> None:
    """Raise unless every sink of the batch has every group once."""
    members = [[n for n in range(jobs.ELEMENTS) if n % jobs.KEYS == key] for key in range(jobs.KEYS)]
    expected = Counter((key, 3 * sum(values), len(values)) for key, values in enumerate(members))
    for table in (pq.read_table(folder / "table"), lancedb.connect(folder).open_table("groups").to_arrow()):
        found = Counter((row["key"], row["sum"], row["count"]) for row in table.to_pylist())
        assert _differences(found, expected) == []
    for name in ("text", "files"):
        lines = [line for path in (folder / name).glob("*-of-*") for line in path.read_text().splitlines()]
        found = Counter((int(key), int(total), int(count)) for key, total, count in map(str.split, lines))
        assert _differences(found, expected) == [], name


def _differences(found: Counter[tuple[int, ...]], expected: Counter[tuple[int, ...]]) -> list[tuple[Any, int, int]]:
    """Return the first entries with different counts: what is found, and what is expected."""
    return [(key, found[key], expected[key]) for key in sorted(found | expected) if found[key] != expected[key]][:10]


def is_complete(folder: Path, keys: int, per_key: int) -> bool:
    """Return whether all sinks of the stream have all they should have."""
    if published_rows(folder / "table") < keys * per_key:
        return False
    table = lancedb.connect(folder)
    if "counts" not in table.list_tables().tables or table.open_table("counts").count_rows() < keys * per_key:
        return False
    collection = EmbeddedCollection(StoreAddress(str(folder / "qdrant"), "counts"))
    if collection.vectors() is None or collection.count() < keys:
        return False
    found = collection.search([[1.0, 1.0]], Query(None, keys, ["n"], None, {}))[0]
    return all(hit.payload["n"] == per_key for hit in found)


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it if the test fails
    return random.Random(seed)


def test_a_stream_of_counts(tmp_path: Path, chance: random.Random) -> None:
    with KafkaBroker() as broker, Job("stream", tmp_path) as job:
        produce(broker, tmp_path, _KEYS, _PER_KEY)
        assert job.kill_at_random(chance, kills=3, spread_s=2.0) == 3
        job.start()
        job.wait_for(lambda: is_complete(tmp_path, _KEYS, _PER_KEY), "all results")
        assert job.is_running, job.output[-5_000:]
        job.kill()
        check_stream(tmp_path, _KEYS, _PER_KEY)


def test_a_batch_with_a_model_groups_and_side_inputs(tmp_path: Path, chance: random.Random) -> None:
    with Job("batch", tmp_path, "--checkpoint_interval=100ms") as job:
        job.kill_at_random(chance, kills=3, spread_s=1.5)
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
        check_batch(tmp_path)
        job.start()
        assert job.wait() == 0
        assert "has finished already: nothing to do" in job.output
        check_batch(tmp_path)


@pytest.mark.parametrize(
    "point",
    [
        "in a transaction",
        pytest.param("before files are removed", marks=pytest.mark.slow),
        pytest.param("before finalization", marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_crashes_while_it_is_saved(tmp_path: Path, point: str) -> None:
    with Job("batch", tmp_path, "--checkpoint_interval=100ms") as job:
        for number in (1, 3):
            job.start(crash=f"{point}:{number}")
            assert job.wait() == 1, job.output[-5_000:]
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
        check_batch(tmp_path)


def test_a_run_that_is_killed_after_each_of_its_sinks_has_published(tmp_path: Path) -> None:
    with Job("sinks", tmp_path) as job:
        status = -1
        while status and job.starts < 9:
            job.start()
            status = job.wait()
        assert (status, job.starts) == (0, 8), job.output[-5_000:]
    expected = list(range(jobs.SINK_ROWS))
    for name in ("table", "appended"):
        assert sorted(pq.read_table(tmp_path / name)["key"].to_pylist()) == expected, name
    assert sorted(row["key"] for row in rows_of(tmp_path / "one.jsonl")) == expected
    assert sorted(lancedb.connect(tmp_path).open_table("rows").to_arrow()["key"].to_pylist()) == expected
    assert EmbeddedCollection(StoreAddress(str(tmp_path), "points")).count() == jobs.SINK_ROWS
    for name in ("text", "files"):
        lines = [line for path in (tmp_path / name).glob("*-of-*") for line in path.read_text().splitlines()]
        assert sorted(map(int, lines)) == expected, name
    assert not [path.name for path in tmp_path.rglob(".luminosity-write-*")]
    assert not [path.name for path in tmp_path.glob("*.staged-*")]
