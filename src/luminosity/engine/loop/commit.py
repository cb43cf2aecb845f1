"""The end of an attempt: all its effects count at once, or none does."""

from __future__ import annotations

import time

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from luminosity.engine.loop.parts import RunParts

__all__ = ["commit", "give_up"]


def commit(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.ProcessBundleResponse, parts: RunParts) -> None:
    """Apply everything that the attempt did: inputs taken, outputs, state, timers, residuals, metrics."""
    stage, shard, now = bundle.stage, bundle.shard, time.monotonic()
    left_over = splits.residual_blocks(bundle, attempt)
    processed = bundle.count - sum(block.count for _, blocks in left_over for block in blocks)
    stage.finished(bundle)
    for read_id, blocks in reversed(left_over):
        shard.prepend(read_id, blocks)
    residuals = [splits.residual_root(bundle, r) for r in (*attempt.residual_roots, *response.residual_roots)]
    if stage.sized_work is not None:
        left = [*left_over, *((read_id, [block]) for read_id, block, _ in residuals)]
        stage.sized_work.committed(bundle.inputs, left)
    for read_id, block, delay in residuals:
        if delay > 0:
            stage.add_delayed(read_id, block, now + delay)
        else:
            shard.append(read_id, block)
    _end(bundle, attempt)
    for transform_id, block in attempt.outputs:
        parts.buffers[stage.written_buffers[transform_id]].deliver(block)
    for family, encoded in attempt.timers:
        shard.timers.apply(family, stage.timer_codecs[family].records(encoded))
    parts.state.commit(attempt.instruction_id)
    parts.metrics.add(stage.id, response.monitoring_infos)
    bundle.release()
    if attempt.residual_roots:
        stage.size.was_split(has_output=bool(attempt.outputs))
    stage.elements_done += processed
    stage.bundles_done += 1
    parts.outflows[stage.id].learn(attempt.pending_output, processed)
    if attempt.is_warm or stage.plan.is_sink:
        stage.size.learn(processed, now - attempt.started_at)
    parts.failures.after_commit(bundle)


def give_up(bundle: Bundle, attempt: Attempt, parts: RunParts) -> None:
    """Discard everything that the attempt did. The bundle can then be retried."""
    _end(bundle, attempt)
    attempt.drop_outputs()
    parts.state.discard(attempt.instruction_id)
    bundle.attempt = None


def _end(bundle: Bundle, attempt: Attempt) -> None:
    """Unpin the input, which no worker reads any more, and stop counting the output as pending."""
    bundle.unpin()
    attempt.pending_output.end()
