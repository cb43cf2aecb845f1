"""The same with bytewax: ``python -m bytewax.run "count_by_bytewax:flow('SERVERS')"``."""

import json

import bytewax.operators as op
from bytewax.connectors.kafka import KafkaSinkMessage, KafkaSource, KafkaSourceMessage
from bytewax.connectors.kafka import operators as kafka
from bytewax.dataflow import Dataflow


def parse(record: KafkaSourceMessage) -> tuple[str, int]:
    value = json.loads(record.value)
    return value["key"], value["n"]


def count(seen: int | None, _: int) -> tuple[int, int]:
    seen = (seen or 0) + 1
    return seen, seen


def flow(servers: str) -> Dataflow:
    dataflow = Dataflow("count")
    records = op.input("read", dataflow, KafkaSource([servers], ["in"], tail=False))
    counts = op.stateful_map("count", op.map("parse", records, parse), count)
    messages = op.map("messages", counts, lambda pair: KafkaSinkMessage(pair[0].encode(), b"%d" % pair[1]))
    kafka.output("write", messages, brokers=[servers], topic="out")
    return dataflow
