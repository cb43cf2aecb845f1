"""Attempts of bundles: sends the input to a worker, receives the output, and commits it or gives it up.

All effects of an attempt count at once, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.shard import by_shard
from luminosity.engine.data.state import BundleShards, SideInputReader
from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Attempt, Bundle, new_instruction_id
from luminosity.engine.loop.metrics import LETTERS
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import Sent, Worker

__all__ = ["commit", "give_up", "receive", "start"]

_MESSAGE_BYTES = 4 << 20  # large enough to amortize a message's overhead, small beside a worker's memory


def start(bundle: Bundle, worker: Worker, parts: RunParts, now: float) -> None:
    """Start an attempt of ``bundle`` in ``worker``, which must have a free slot. Does not wait for the worker."""
    stage = bundle.stage
    passing = wire.PASSING_PREFIXES if bundle.passes_by else (wire.SOURCE_PREFIX, "bundle")
    instruction_id = new_instruction_id(passing[not stage.is_source])
    if any(parts.buffers[write.buffer_id].is_split for write in stage.plan.writes):
        instruction_id += wire.SPLIT_SUFFIX
    stream_id = worker.occupy(bundle, instruction_id)
    attempt = bundle.attempt = Attempt(
        instruction_id,
        worker,
        stream_id,
        now,
        output_hold=stage.output_watermark,
        is_warm=stage.id in worker.warm_stages,
        open_outputs={w.transform_id for w in stage.plan.writes} | {f.key for f in stage.plan.timers},
        pending_output=parts.outflows[stage.id].begin(bundle.count),
        deadlines=worker.pool.deadlines,
    )
    if splits.can_split(bundle):
        bundle.split_at(now + stage.size.deadline_seconds(now))
        splits.allow_taking(bundle, attempt, now)
    attempt.is_patient = stage.is_source and stage.turns.next_is_patient()
    shards = BundleShards(len(stage.shards), {shard.index: shard for shard in bundle.shards})
    parts.state.begin(instruction_id, shards, _open_side_inputs(attempt, stage, parts))
    request = beam_fn_api_pb2.InstructionRequest(instruction_id=instruction_id)
    request.process_bundle.process_bundle_descriptor_id = stage.id
    request.process_bundle.data_stream_id = stream_id
    for side_input in stage.plan.side_inputs:
        # Workers cache a side input from bundle to bundle as long as the token stays the same.
        live = parts.buffers[side_input.buffer_id].live_side_input
        version = b"complete" if live is None else b"%d" % attempt.side_versions[live]
        token = request.process_bundle.cache_tokens.add(token=version)
        token.side_input.transform_id = side_input.transform_id
        token.side_input.side_input_id = side_input.tag
    if stage.plan.is_stateful:
        tokens = {shard.index: shard.state_token(worker, now) for shard in bundle.shards}
        token = request.process_bundle.cache_tokens.add(token=wire.pack_tokens(shards.total, tokens, stage.expired_ms))
        token.user_state.SetInParent()
    if stage.plan.memory_part:
        attempt.memory = parts.blocks.ledger.limit // stage.plan.memory_part
        parts.blocks.ledger.hold(attempt.memory)
    worker.instruct(request)
    assert worker.connection is not None
    bundle.pin()
    worker.connection.send(stream_id, _input_elements(bundle, instruction_id))


def _open_side_inputs(attempt: Attempt, stage: StageInput, parts: RunParts) -> dict[tuple[str, str], SideInputReader]:
    """Return what reads the unbounded side inputs of an attempt: for each of them the version that is current now."""
    readers: dict[tuple[str, str], SideInputReader] = {}
    for side_input in stage.plan.side_inputs:
        live = parts.buffers[side_input.buffer_id].live_side_input
        if live is not None:
            if live not in attempt.side_versions:
                attempt.side_versions[live] = live.open()
            address = side_input.transform_id, side_input.tag
            only_last = side_input.is_singleton
            readers[address] = partial(live.read, attempt.side_versions[live], only_last=only_last)
    return readers


def _input_elements(bundle: Bundle, instruction_id: str) -> Iterator[beam_fn_api_pb2.Elements]:
    """Yield a bundle's whole input, with an end mark for each of its reads and timer families."""
    elements = beam_fn_api_pb2.Elements()
    size = 0
    for read in bundle.stage.plan.reads:
        for block in bundle.inputs.get(read.transform_id, ()):
            message = block.message()
            elements.data.add(instruction_id=instruction_id, transform_id=read.transform_id, data=message)
            size += len(message)
            if size >= _MESSAGE_BYTES:
                yield elements
                elements, size = beam_fn_api_pb2.Elements(), 0
        elements.data.add(instruction_id=instruction_id, transform_id=read.transform_id, is_last=True)
    for family in bundle.stage.plan.timers:
        address = {
            "instruction_id": instruction_id,
            "transform_id": family.transform_id,
            "timer_family_id": family.family_id,
        }
        if due := bundle.timers.get(family.key):
            elements.timers.add(timers=b"".join(timer.encoded for timer in due), **address)
        elements.timers.add(is_last=True, **address)
    yield elements


def receive(sent: Sent, parts: RunParts) -> list[Bundle]:
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
    if bundle.stage.is_source and len(attempt.outputs) == 1:
        now = parts.clock.monotonic()  # from now on an element waits for the end of the bundle
        bundle.stage.turns.started(now - attempt.started_at)
        if not attempt.splits_requested:
            split_at = min(attempt.split_at, now + bundle.stage.size.target_seconds(now))
            bundle.split_at(split_at)
    is_enough = attempt.pending_output.add(bundle.stage.written_buffers[data.transform_id], block.size)
    if is_enough and splits.can_split(bundle) and not attempt.splits_requested:
        # The queue behind it is full: the rest of the input can wait.
        bundle.split_at(0.0)


def commit(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.ProcessBundleResponse, parts: RunParts) -> None:
    """Apply everything that the attempt did: inputs taken, outputs, state, timers, residuals, metrics."""
    stage, now = bundle.stage, parts.clock.monotonic()
    if parts.dead_letters is not None and (letters := response.monitoring_data.get(wire.LETTERS)):
        for step, count in parts.dead_letters.write(letters).items():
            parts.metrics.count(LETTERS, stage.id, step, count)
    processed = bundle.count - attempt.given_back
    bundle.finished()
    residuals = (*attempt.residuals, *response.residual_roots)
    left = attempt.given_back_size + sum(splits.queue_residual(bundle, residual, now) for residual in residuals)
    if attempt.residuals or (stage.is_source and attempt.splits_requested):  # it may have refused, and ended itself
        stage.size.was_split(has_output=bool(attempt.outputs))
    if stage.sized_work is not None:
        stage.sized_work.committed(bundle.inputs, left)
    _end(bundle, attempt, parts)
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
    cpu_seconds, resident, pid = wire.unpack_usage(response.monitoring_data.get(wire.USAGE, b""))
    attempt.worker.cpu_seconds += cpu_seconds
    attempt.worker.resident, attempt.worker.pid = resident, pid
    stage.usage.committed(now - attempt.started_at, processed, cpu_seconds, resident, output_bytes)
    parts.outflows[stage.id].learn(attempt.pending_output, processed)
    stage.size.learn(processed, now - attempt.started_at, is_warm=attempt.is_warm, was_cut=bool(attempt.ends))
    parts.failures.after_commit(bundle)


def give_up(bundle: Bundle, attempt: Attempt, parts: RunParts) -> None:
    """Discard everything that the attempt did, except its splits. What is left of the bundle can then be retried.

    What splits took from a source's restriction was not queued yet: the bundle has it again. Otherwise the end of a
    restriction could be read before its beginning.
    """
    _end(bundle, attempt, parts)
    bundle.stage.usage.failed += 1
    attempt.drop_outputs()
    if attempt.ends or attempt.primary_roots:
        bundle.replace_inputs(bundle.kept_inputs(attempt))
    parts.state.discard(attempt.instruction_id)
    for shard in bundle.shards:
        shard.renew_state_token()
    bundle.attempt = None


def _end(bundle: Bundle, attempt: Attempt, parts: RunParts) -> None:
    """Give back the input and side inputs, which no worker reads any more; stop counting the output as pending."""
    bundle.unpin()
    parts.blocks.ledger.free(attempt.memory)
    attempt.memory = 0
    attempt.pending_output.end()
    for side_input, version in attempt.side_versions.items():
        side_input.close(version)
    attempt.side_versions.clear()
