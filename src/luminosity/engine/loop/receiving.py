"""Takes in what a worker sends while it runs bundles: blocks and timers."""

from __future__ import annotations

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.watermarks import MAX
from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.workers import Sent

__all__ = ["take"]


def take(sent: Sent, parts: RunParts) -> list[Bundle]:
    """Add what was sent to the attempts it belongs to. Return the bundles of which some output is now complete."""
    if sent.worker.has_exited:
        return []  # its files are removed already
    touched: dict[str, Bundle] = {}
    for data in sent.elements.data:
        bundle = sent.worker.bundles.get(data.instruction_id)
        attempt = bundle.attempt if bundle is not None else None
        if bundle is None or attempt is None:
            if data.data:
                # The attempt was given up: take over the block's file only to remove it.
                parts.blocks.received(data.data, MAX, sent.worker.writer).release()
            continue
        if data.data:
            _take_block(bundle, attempt, data, parts)
        if data.is_last:
            attempt.open_outputs.discard(data.transform_id)
            touched[data.instruction_id] = bundle
    for timers in sent.elements.timers:
        bundle = sent.worker.bundles.get(timers.instruction_id)
        if bundle is None or bundle.attempt is None:
            continue
        family = timers.transform_id, timers.timer_family_id
        if timers.timers:
            bundle.attempt.timers.append((family, timers.timers))
        if timers.is_last:
            bundle.attempt.open_outputs.discard(family)
            touched[timers.instruction_id] = bundle
    return list(touched.values())


def _take_block(bundle: Bundle, attempt: Attempt, data: beam_fn_api_pb2.Elements.Data, parts: RunParts) -> None:
    block = parts.blocks.received(data.data, attempt.output_hold, attempt.worker.writer)
    attempt.outputs.append((data.transform_id, block))
    is_enough = attempt.pending_output.add(bundle.stage.written_buffers[data.transform_id], block.size)
    if is_enough and splits.can_split(bundle) and not attempt.splits_requested:
        attempt.split_at = 0.0  # the queue behind it is full: the rest of the input can wait
