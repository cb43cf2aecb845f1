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
    processed = bundle.count - attempt.given_back
    stage.finished(bundle)
    left = attempt.given_back_size + sum(splits.queue_residual(bundle, r, now) for r in response.residual_roots)
    if stage.sized_work is not None:
        stage.sized_work.committed(bundle.inputs, left)
    _end(bundle, attempt)
    for transform_id, block in attempt.outputs:
        parts.buffers[stage.written_buffers[transform_id]].deliver(block)
    for family, encoded in attempt.timers:
        records = stage.timers_in_time(family, stage.timer_codecs[family].records(encoded))
        shard.timers.apply(family, records)
        if stage.expiry is not None:
            shard.timers.note_windows(family, records)
    cells = parts.state.commit(attempt.instruction_id)
    if stage.expiry is not None:
        shard.cell_expiry.note(cells, stage.expiry)
    parts.metrics.add(stage.id, response.monitoring_infos)
    bundle.release()
    stage.elements_done += processed
    stage.bundles_done += 1
    parts.outflows[stage.id].learn(attempt.pending_output, processed)
    stage.size.learn(processed, now - attempt.started_at, is_warm=attempt.is_warm, was_cut=bool(attempt.ends))
    parts.failures.after_commit(bundle)


def give_up(bundle: Bundle, attempt: Attempt, parts: RunParts) -> None:
    """Discard everything that the attempt did, except its splits. What is left of the bundle can then be retried."""
    _end(bundle, attempt)
    attempt.drop_outputs()
    if attempt.ends or attempt.primary_roots:
        bundle.stage.replace_inputs(bundle, bundle.kept_inputs(attempt))
    parts.state.discard(attempt.instruction_id)
    bundle.shard.renew_state_token()
    bundle.attempt = None


def _end(bundle: Bundle, attempt: Attempt) -> None:
    """Unpin the input, which no worker reads any more, and stop counting the output as pending."""
    bundle.unpin()
    attempt.pending_output.end()
