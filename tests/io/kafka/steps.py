"""Runs the step of WriteKafka without a pipeline."""

from __future__ import annotations

from typing import Any

from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import GlobalWindow, WindowedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.outgoing import RecordParts
from luminosity.io.kafka.write import WriteDoFn
from luminosity.testing import KafkaBroker

_GLOBAL = (GlobalWindow(),)


class WriteStep:
    """Runs bundles of a ``WriteDoFn`` as a worker does, until its context ends."""

    def __init__(
        self, broker: KafkaBroker, *, letters: bool = False, timeout_s: float = 60, config: Any = None, **parts: Any
    ) -> None:
        client = KafkaClient(broker.bootstrap_servers, {"retry.backoff.ms": 10, **(config or {})})
        self.step = WriteDoFn(client, RecordParts(**{"topic": "t", **parts}), timeout_s, letters)
        self.step.setup()

    def bundle(self, *elements: Any) -> list[Any]:
        """Run one bundle; return the values of its outputs."""
        self.step.start_bundle()
        for element in elements:
            self.process(element)
        return self.finish()

    def process(self, element: Any, windows: tuple[Any, ...] = _GLOBAL) -> None:
        self.step.process(element, WindowedValue(element, Timestamp(0), windows))

    def finish(self) -> list[Any]:
        outputs = list(self.step.finish_bundle())
        return [output.value.value if isinstance(output, TaggedOutput) else output.value for output in outputs]

    def __enter__(self) -> WriteStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.step.teardown()


def values(broker: KafkaBroker, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in broker.consume(topic)]
