"""The end of an attempt: all its effects count at once, or none does."""

from __future__ import annotations

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.shard import by_shard

__all__ = ["commit", "give_up"]


def commit(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.ProcessBundleResponse, parts: RunParts) -> None:
    """Apply everything that the attempt did: inputs taken, outputs, state, timers, residuals, metrics."""
    stage, now = bundle.stage, parts.clock.monotonic()
    processed = bundle.count - attempt.given_back
    bundle.finished()
    left = attempt.given_back_size + _queue_residuals(bundle, attempt, now)
    left += sum(splits.queue_residual(bundle, residual, now) for residual in response.residual_roots)
    if attempt.residuals or (stage.is_source and attempt.splits_requested):  # it may have refused, and ended itself
        stage.size.was_split(has_output=bool(attempt.outputs))
    if stage.sized_work is not None:
        stage.sized_work.committed(bundle.inputs, left)
    _end(bundle, attempt)
    output_bytes = sum(block.size for _, block in attempt.outputs)
    for transform_id, block in attempt.outputs:
        parts.buffers[stage.written_buffers[transform_id]].deliver(block)
    for shard in bundle.shards if bundle.timers else ():
        shard.timers.settle(bundle.timers)
    for family, encoded in attempt.timers:
        records = stage.timers_in_time(
            family, stage.timer_codecs[family].records(encoded), has_input=bool(bundle.inputs)
        )
        for shard, own in by_shard(records, lambda record: record.key, bundle.shards, stage.shards):
            shard.timers.apply(family, own)
            if stage.expiry is not None:
                shard.timers.note_windows(family, own)
    written = parts.state.commit(attempt.instruction_id)
    if stage.expiry is not None:
        for shard in bundle.shards:
            shard.cell_expiry.note(written.get(shard, {}), stage.expiry)
    parts.metrics.add(stage.id, response.monitoring_infos)
    bundle.release()
    stage.elements_done += processed
    stage.bundles_done += 1
    cpu_seconds, resident = wire.unpack_usage(response.monitoring_data.get(wire.USAGE, b""))
    attempt.worker.cpu_seconds += cpu_seconds
    attempt.worker.resident = resident
    stage.usage.committed(now - attempt.started_at, processed, cpu_seconds, resident, output_bytes)
    parts.outflows[stage.id].learn(attempt.pending_output, processed)
    stage.size.learn(processed, now - attempt.started_at, is_warm=attempt.is_warm, was_cut=bool(attempt.ends))
    parts.failures.after_commit(bundle)


def give_up(bundle: Bundle, attempt: Attempt, parts: RunParts) -> None:
    """Discard everything that the attempt did, except its splits. What is left of the bundle can then be retried."""
    _end(bundle, attempt)
    bundle.stage.usage.failed += 1
    attempt.drop_outputs()
    _queue_residuals(bundle, attempt, parts.clock.monotonic())
    if attempt.ends or attempt.primary_roots:
        bundle.replace_inputs(bundle.kept_inputs(attempt))
    parts.state.discard(attempt.instruction_id)
    for shard in bundle.shards:
        shard.renew_state_token()
    bundle.attempt = None


def _queue_residuals(bundle: Bundle, attempt: Attempt, now: float) -> float:
    """Queue what splits took from a source's restriction. Returns the size of the work that it stands for."""
    return sum(splits.queue_residual(bundle, residual, now) for residual in attempt.residuals)


def _end(bundle: Bundle, attempt: Attempt) -> None:
    """Give back the input and side inputs, which no worker reads any more; stop counting the output as pending."""
    bundle.unpin()
    attempt.pending_output.end()
    for side_input, version in attempt.side_versions.items():
        side_input.close(version)
    attempt.side_versions.clear()
