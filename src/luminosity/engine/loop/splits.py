"""Asks running bundles to stop early, and takes back the input that they have not processed."""

from __future__ import annotations

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.watermarks import MIN
from luminosity.engine.loop.bundle import Attempt, Bundle, new_instruction_id, slice_blocks

__all__ = ["apply", "can_split", "request", "residual_blocks", "residual_root"]

# How much of the rest of the element in progress the bundle keeps. A bounded source refuses 0, so later requests offer
# more.
_FRACTIONS = (0.0, 0.02, 0.1, 0.5)
_REQUEST_AGAIN_S = 0.05  # enough for an element that had not begun to begin


def can_split(bundle: Bundle) -> bool:
    """Return whether the bundle could stop early and leave some of its input."""
    if bundle.search is not None:
        return False  # a search must run every part of the bundle itself
    return bool(bundle.inputs) and (bundle.stage.plan.is_splittable or bundle.count > 1)


def request(bundle: Bundle, attempt: Attempt) -> None:
    """Ask the worker to split the bundle. The bundle commits only after the worker has responded."""
    fraction = _FRACTIONS[attempt.splits_requested % len(_FRACTIONS)] if bundle.stage.plan.is_splittable else 0.0
    message = beam_fn_api_pb2.InstructionRequest(instruction_id=new_instruction_id("split"))
    message.process_bundle_split.instruction_id = attempt.instruction_id
    for read_id, blocks in bundle.inputs.items():
        desired = message.process_bundle_split.desired_splits[read_id]
        desired.fraction_of_remainder = fraction
        desired.estimated_input_elements = sum(block.count for block in blocks)
    attempt.splits_requested += 1
    attempt.split_at = float("inf")
    attempt.pending_splits.add(message.instruction_id)
    attempt.worker.instruct(message)


def apply(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.InstructionResponse, now: float) -> None:
    """Note what a split took from the bundle, or when to request another if it took nothing."""
    attempt.pending_splits.discard(response.instruction_id)
    split = response.process_bundle_split
    for channel in split.channel_splits:
        read_id = channel.transform_id
        end = attempt.ends.get(read_id, sum(b.count for b in bundle.inputs.get(read_id, ())))
        if channel.first_residual_element < end:
            attempt.residual_ranges.append((read_id, channel.first_residual_element, end))
            attempt.ends[read_id] = channel.first_residual_element
    attempt.residual_roots.extend(split.residual_roots)
    has_split = bool(split.residual_roots) or (bool(split.channel_splits) and not bundle.stage.plan.is_splittable)
    if not has_split and attempt.response is None:
        # The request came too early, or during an element that could not be cut.
        is_last_fraction = attempt.splits_requested % len(_FRACTIONS) == 0
        wait = bundle.stage.size.deadline_seconds(now) if is_last_fraction else _REQUEST_AGAIN_S
        attempt.split_at = now + wait


def residual_blocks(bundle: Bundle, attempt: Attempt) -> list[tuple[str, list[Block]]]:
    """Return the whole elements that splits took from the bundle, by read id, in their order."""
    return [
        (read_id, slice_blocks(bundle.inputs[read_id], bundle.stage.codec(read_id), start, stop))
        for read_id, start, stop in sorted(attempt.residual_ranges)
    ]


def residual_root(bundle: Bundle, residual: beam_fn_api_pb2.DelayedBundleApplication) -> tuple[str, Block, float]:
    """Return the rest of a split element: its read id, the block that holds it, and its delay in seconds."""
    application = residual.application
    read_id = bundle.stage.plan.residual_reads[application.transform_id, application.input_id]
    # ToMicroseconds() would raise at the first and last timestamps of Beam.
    reported = [w.seconds * 1_000_000 + w.nanos // 1000 for w in application.output_watermarks.values()]
    hold = max(bundle.hold, min(reported, default=MIN))
    delay = residual.requested_time_delay.ToMicroseconds() / 1e6
    return read_id, bundle.stage.blocks.of_bytes(application.element, 1, hold), delay
