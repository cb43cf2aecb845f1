"""Which messages of a worker on a node reach the loop."""

from __future__ import annotations

import threading
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.cluster.driver.leases import NodeProcess
from luminosity.engine.cluster.driver.node_launcher import NodeLauncher
from luminosity.engine.cluster.driver.ray_calls import Calls
from luminosity.engine.data import wire
from luminosity.engine.resources.machine import LeaseNeeds
from luminosity.errors import BlockLost


def _elements(data: bytes, is_last: bool = False) -> beam_fn_api_pb2.Elements:
    return beam_fn_api_pb2.Elements(
        data=[beam_fn_api_pb2.Elements.Data(instruction_id="i", transform_id="t", data=data, is_last=is_last)]
    )


def test_after_a_lost_block_no_later_message_can_complete_the_bundle() -> None:
    """The worker lives on for a moment: the end of its output must not count without the block."""
    launcher: Any = NodeLauncher.__new__(NodeLauncher)
    launcher._lock, launcher._calls = threading.Lock(), Calls()

    def lose(process: NodeProcess, keys: list[str]) -> None:
        raise BlockLost(f"the store is full: {keys}")

    launcher._take = lose
    needs = LeaseNeeds(cpus=1, memory=0, gpus=0)
    process = NodeProcess("w1", needs, on_exit=lambda _: None, on_killed=lambda _: None, on_ended=lambda _: None)
    launcher._processes = {"w1": process}
    assert launcher.secure("w1", _elements(wire.pack_bytes(1, b"small")))
    assert not launcher.secure("w1", _elements(wire.pack_object(1, wire.ObjectSpan("w1.1", 0, 10))))
    assert process.is_killed
    assert not launcher.secure("w1", _elements(b"", is_last=True))
    process.ended(-9)
    assert not launcher.secure("w1", _elements(b"", is_last=True))
    assert not launcher.secure("unknown", _elements(b"", is_last=True))
