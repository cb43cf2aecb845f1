"""Sends a bundle's input to a worker, and receives its output."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.data.state import BundleShards, SideInputReader
from luminosity.engine.data.watermarks import MAX
from luminosity.engine.loop import idle_workers, splits
from luminosity.engine.loop.bundle import Attempt, Bundle, new_instruction_id
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import Sent, Worker

__all__ = ["receive", "start"]

_MESSAGE_BYTES = 4 << 20  # large enough to amortize a message's overhead, small beside a worker's memory


def start(bundle: Bundle, worker: Worker, parts: RunParts, now: float) -> None:
    """Start an attempt of ``bundle`` in ``worker``, which must have a free slot. Does not wait for the worker."""
    stage = bundle.stage
    instruction_id = new_instruction_id(wire.SOURCE_PREFIX if stage.is_source else "bundle")
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
        idle_workers.allow_taking(bundle, attempt, now)
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
