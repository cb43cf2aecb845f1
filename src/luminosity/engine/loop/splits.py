"""Ask running bundles to stop early, and take in what they leave."""

from __future__ import annotations

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.watermarks import MIN
from luminosity.engine.loop.bundle import Attempt, Bundle, new_instruction_id, slice_blocks

# Of what remains of the element in progress, how much to keep. A bounded source refuses 0, so more is offered.
_FRACTIONS = (0.0, 0.02, 0.1, 0.5)
_ASK_AGAIN_S = 0.05


def can_split(bundle: Bundle) -> bool:
    if bundle.search is not None:
        return False  # the part that it would leave is to be tried, too
    return bool(bundle.inputs) and (bundle.stage.plan.is_splittable or bundle.count > 1)


def ask(bundle: Bundle, attempt: Attempt) -> None:
    """Send a split request. Its answer must come before the bundle can commit."""
    fraction = _FRACTIONS[attempt.splits_requested % len(_FRACTIONS)] if bundle.stage.plan.is_splittable else 0.0
    request = beam_fn_api_pb2.InstructionRequest(instruction_id=new_instruction_id("split"))
    request.process_bundle_split.instruction_id = attempt.instruction_id
    for read_id, blocks in bundle.inputs.items():
        desired = request.process_bundle_split.desired_splits[read_id]
        desired.fraction_of_remainder = fraction
        desired.estimated_input_elements = sum(block.count for block in blocks)
    attempt.splits_requested += 1
    attempt.split_at = float("inf")
    attempt.pending_splits.add(request.instruction_id)
    attempt.worker.instruct(request)


def answered(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.InstructionResponse, now: float) -> None:
    attempt.pending_splits.discard(response.instruction_id)
    split = response.process_bundle_split
    for channel in split.channel_splits:
        read_id = channel.transform_id
        end = attempt.ends.get(read_id, sum(b.count for b in bundle.inputs.get(read_id, ())))
        if channel.first_residual_element < end:
            attempt.residual_ranges.append((read_id, channel.first_residual_element, end))
            attempt.ends[read_id] = channel.first_residual_element
    attempt.residual_roots.extend(split.residual_roots)
    is_through = bool(split.residual_roots) or (bool(split.channel_splits) and not bundle.stage.plan.is_splittable)
    if not is_through and attempt.response is None:
        # Too early, or at an element that could not be cut.
        is_last_fraction = attempt.splits_requested % len(_FRACTIONS) == 0
        wait = bundle.stage.size.deadline_seconds(now) if is_last_fraction else _ASK_AGAIN_S
        attempt.split_at = now + wait


def residual_blocks(bundle: Bundle, attempt: Attempt) -> list[tuple[str, list[Block]]]:
    """The plain elements that splits took from the bundle, by read, in their order."""
    return [
        (read_id, slice_blocks(bundle.inputs[read_id], bundle.stage.codec(read_id), start, stop))
        for read_id, start, stop in sorted(attempt.residual_ranges)
    ]


def residual_root(bundle: Bundle, residual: beam_fn_api_pb2.DelayedBundleApplication) -> tuple[str, Block, float]:
    """A continuation of an element: its read, the block that holds it, and the seconds it asks to wait."""
    application = residual.application
    read_id = bundle.stage.plan.residual_reads[application.transform_id, application.input_id]
    # Not ToMicroseconds(): it refuses the ends of Beam's time.
    reported = [w.seconds * 1_000_000 + w.nanos // 1000 for w in application.output_watermarks.values()]
    hold = max(bundle.hold, min(reported, default=MIN))
    delay = residual.requested_time_delay.ToMicroseconds() / 1e6
    return read_id, bundle.stage.blocks.of_bytes(application.element, 1, hold), delay
