"""Small inputs for Beam's examples, and stand-ins for the services that some of them read from and write to.

Numbers are such that sums of them are exact, whatever the order.
"""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import fastavro
import numpy as np
from apache_beam.examples.inference import sklearn_japanese_housing_regression as houses
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

_TEXT = """\
Flourish of trumpets, Flourish again: the king's men enter, and a Flourish ends it
    with no stomach for it, Sir, 'tis not the king

to be or not to be, that is the question of the king
"""
_SCORES = [("user{0}_team{1}", 0, 1), ("user{0}_team{1}", 60, 4), ("robot{0}_team{1}", 7_300, 9_000)]
_GAME_STARTS_S = 1_447_686_000


def write_inputs(folder: Path) -> None:
    """All files that the table of examples names."""
    texts = {
        "lines.txt": _TEXT,
        "document-1.txt": "abc def ghi\nabc",
        "document-2.txt": "abc def",
        "matrix.txt": "0:1 2 0\n1:0 1 1\n2:3 0 1",
        "vector.txt": "1 2 3",
        "crops.csv": "OP01,8,12,0,12\nOP02,30,14,3,12\nOP03,25,7,3,14\nOP04,87,7,2,2",
        "players.csv": "joe,10\nfred,3\nmary,7\njoe,20\nann,5",
        "email.tsv": "ada\tada@x.org\nbob\tbob@x.org\nada\tada@y.org",
        "phone.tsv": "ada\t123\ncyd\t456",
        "address.tsv": "bob\t1 Main St\ndan\t2 Main St",
        "scores.csv": "\n".join(_scores()),
        "words.topic": "10|to be or\n20|not to be\n130|to be",
        "zones.csv": "LocationID,Borough\n7,Queens\n239,Manhattan",
        "housing.csv": "longitude,latitude,median_income\n"
        + "\n".join(f"{n % 6},{n // 6 % 4},{n % 5}.5" for n in range(120)),
        "adults.csv": "\n".join(_adult(n) for n in range(60)),
        "digits.csv": "\n".join(f"{n % 2},{n},{n % 2}" for n in range(40)),
        "houses.csv": "\n".join(_houses()),
    }
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")
    for n in range(3):
        rides = [f"{1 + i % 3},{(7, 239)[i % 2]}" for i in range(20)]
        (folder / f"rides-{n}.csv").write_text("\n".join(["passenger_count,DOLocationID", *rides]) + "\n")
    _write_json(folder / "matches.json", _matches())
    _write_json(folder / "edits.json", _edits())
    _write_json(folder / "rows.jsonl", ({"id": f"row {n}", "x": n, "y": n / 4} for n in range(50)))
    _write_trips(folder / "trips.avro")
    _write_models(folder)


def _write_json(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _scores() -> Iterable[str]:
    for user in range(1, 9):
        for name, seconds, score in _SCORES[: 2 + (user == 3)]:
            team = 1 + user % 3
            milliseconds = (_GAME_STARTS_S + user * 600 + seconds) * 1000
            yield f"{name.format(user, team)},team{team},{score * user},{milliseconds},2015-11-16 16:11:03.921"
    # Enough of one user for a trigger that counts to ten.
    yield from (f"user9_team1,team1,1,{(_GAME_STARTS_S + n) * 1000},2015-11-16 16:11:03.921" for n in range(12))
    yield "this line can't be parsed"


def _matches() -> Iterable[dict[str, Any]]:
    for n in range(12):
        yield {"host": [f"club {n % 4}", n % 3], "guest": [f"club {(n + 1) % 4}", n % 2]}


def _edits() -> Iterable[dict[str, Any]]:
    for n in range(12):
        yield {"contributor_username": f"editor {n % 2}", "timestamp": n * 1_700, "title": "a page"}
    yield {"contributor_username": "editor 0", "timestamp": 4_000_000}


def _adult(n: int) -> str:
    education = (" Bachelors", " Masters", " Doctorate", " HS-grad")[n % 4]
    fields = [str(20 + n), " Private", "1", education, *["x"] * 10, " >50K" if n % 8 < 4 else " <=50K"]
    return ",".join(fields)


def _houses() -> Iterable[str]:
    """Rows that lack features, so that each of the example's models gets some."""
    names = houses.MODELS[0]["required_features"]
    yield ",".join([*names, "TradePrice"])
    for n in range(20):
        known = houses.MODELS[n % 4]["required_features"]
        yield ",".join([*(str(n + 1) if name in known else "" for name in names), str(100 * n)])


def _write_trips(path: Path) -> None:
    times = ("request_datetime", "on_scene_datetime", "pickup_datetime", "dropoff_datetime")
    amounts = "tolls bcf sales_tax congestion_surcharge airport_fee tips base_passenger_fare driver_pay trip_miles"
    fields = {"hvfhs_license_num": "string", "trip_time": "long"}
    fields |= dict.fromkeys(times, "long") | dict.fromkeys(amounts.split(), "double")
    schema = {"type": "record", "name": "trip", "fields": [{"name": n, "type": ["null", t]} for n, t in fields.items()]}
    trips: list[dict[str, Any]] = []
    for n in range(40):
        trip: dict[str, Any] = {"hvfhs_license_num": f"HV000{2 + n % 5}", "trip_time": 60 * (n + 1)}
        trip |= dict.fromkeys(times, 1_675_300_000_000 + n * 86_400_000)
        trip |= {name: (n + i) / 4 for i, name in enumerate(amounts.split(), 1)}
        trips.append(trip | ({"tips": None} if n == 7 else {}))
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), trips)


def _write_models(folder: Path) -> None:
    pixels = np.array([[n, n % 2] for n in range(40)])
    tree = DecisionTreeClassifier(random_state=0).fit(pixels, pixels[:, 1])
    (folder / "digits.pickle").write_bytes(pickle.dumps(tree))
    steps = DecisionTreeRegressor(random_state=0).fit(pixels / 4, pixels.sum(axis=1))
    (folder / "rows.pickle").write_bytes(pickle.dumps(steps))
    for model in houses.MODELS:
        (folder / f"{model['name']}.pickle").write_bytes(pickle.dumps(_MeanOfFeatures(model["required_features"])))


class _MeanOfFeatures:
    """In place of the trained models of the Japanese housing example."""

    def __init__(self, features: list[str]) -> None:
        self._features = features

    def predict(self, rows: Any) -> list[float]:
        return list(rows[self._features].mean(axis=1))


# ---- services


class Topic(beam.PTransform):
    """In place of ``ReadFromPubSub``: the lines ``seconds|message`` of a file, or lines that are messages."""

    def __init__(self, topic: str = "", subscription: str = "", is_text: bool = False) -> None:
        super().__init__()
        self._path = topic or subscription
        self._is_text = is_text

    def expand(self, pipeline: Any) -> Any:
        return pipeline | beam.io.ReadFromText(self._path) | beam.Map(self._message)

    def _message(self, line: str) -> Any:
        seconds, bar, text = line.partition("|")
        message = text if bar else line
        return beam.window.TimestampedValue(
            message if self._is_text else message.encode(), float(seconds) if bar else 0.0
        )


class TextTopic(Topic):
    """The same, for an example that takes what it reads for text."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic, is_text=True)


class WriteTopic(beam.PTransform):
    """In place of ``WriteToPubSub``: a file in the current folder."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self._name = topic

    def expand(self, messages: Any) -> Any:
        return messages | beam.Map(bytes.decode) | beam.io.WriteToText(self._name)


_TABLES: dict[str, list[dict[str, Any]]] = {
    "weather": [
        {"year": 2000, "month": 1 + n % 12, "day": n, "mean_temp": n / 2, "tornado": n % 3 == 0} for n in range(48)
    ],
    "UNIQUE(corpus)": [{"f0": "ignored"}, {"f0": "kept"}],
    "UNIQUE(word)": [{"f0": "ignored"}, {"f0": "word"}],
    "airline_ontime_data": [
        {
            "date": datetime.date(2012, 12, 23 + n % 2),
            "airline": f"airline {n % 3}",
            "departure_airport": f"airport {n % 4}",
            "arrival_airport": f"airport {n % 5}",
            "departure_delay": n,
            "arrival_delay": n / 4,
        }
        for n in range(60)
    ],
}


class Table(beam.PTransform):
    """In place of ``ReadFromBigQuery``: the rows of the table that is named, or that the query names."""

    def __init__(self, table: str = "", query: str = "", **_: Any) -> None:
        super().__init__()
        self._rows = next(rows for name, rows in _TABLES.items() if name in table or name in query)

    def expand(self, pipeline: Any) -> Any:
        return pipeline | beam.Create(self._rows)


class WriteTable(beam.PTransform):
    """In place of ``WriteToBigQuery``: a file in the current folder, with a row of JSON per line."""

    Method = beam.io.WriteToBigQuery.Method

    def __init__(self, table: str, *_: Any, **__: Any) -> None:
        super().__init__()
        self._name = table

    def expand(self, rows: Any) -> Any:
        return rows | beam.Map(json.dumps, sort_keys=True) | beam.io.WriteToText(self._name)


SERVICES: dict[str, type[beam.PTransform]] = {
    "ReadFromPubSub": Topic,
    "WriteToPubSub": WriteTopic,
    "ReadFromBigQuery": Table,
    "WriteToBigQuery": WriteTable,
}
