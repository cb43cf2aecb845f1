"""What reaches the loop from other threads."""

from __future__ import annotations

from dataclasses import dataclass

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.loop.workers import Worker


@dataclass(frozen=True)
class Connected:
    worker: Worker


@dataclass(frozen=True)
class Responded:
    worker: Worker
    response: beam_fn_api_pb2.InstructionResponse


@dataclass(frozen=True)
class Sent:
    worker: Worker
    elements: beam_fn_api_pb2.Elements


@dataclass(frozen=True)
class Exited:
    worker: Worker
    code: int


class CancelAsked:
    pass


Message = Connected | Responded | Sent | Exited | CancelAsked
