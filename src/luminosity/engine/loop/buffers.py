"""What lies between stages while a run lasts, and how far event time has come there."""

from __future__ import annotations

from collections.abc import Iterator

from luminosity.engine.blocks import Block
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.grouping import Grouping
from luminosity.engine.loop.sideinputs import SideInputData
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.watermarks import MAX
from luminosity.engine.plan.codecs import ElementCodec

QUEUE_BYTES = 64 << 20


class BufferRun:
    def __init__(self, folders: RunFolders, grouping: Grouping | None) -> None:
        self._folders = folders
        self._grouping = grouping
        self.writers: list[StageRun] = []
        self.readers: list[tuple[StageRun, str]] = []
        self._side_input: SideInputData | None = None
        self._side_input_bytes = 0

    def as_side_input(self, codec: ElementCodec) -> SideInputData:
        """Keep all that comes through, to be looked up."""
        if self._side_input is None:
            self._side_input = SideInputData(codec)
            if self._grouping is not None:
                # A side input's coder can't follow references into state.
                self._grouping.may_refer_to_state = False
        return self._side_input

    def side_input_data(self) -> Iterator[bytes]:
        """All that came through, encoded, for whoever copies it."""
        return self._side_input.data() if self._side_input is not None else iter(())

    def deliver(self, block: Block) -> None:
        """Take over a committed block."""
        if self._grouping is not None:
            self._grouping.add(block)
        else:
            self._fan_out(block)

    def watermark(self) -> int:
        """That of everything which is still to come out; a grouping comes out when all of its input is there."""
        watermark = min((writer.output_watermark for writer in self.writers), default=MAX)
        if self._grouping is not None and not self._grouping.is_released:
            if watermark < MAX:
                return watermark
            for block in self._grouping.release():
                self._fan_out(block)
        return watermark

    def holds_back(self) -> bool:
        """Whether its writers should wait: a reader that could run has enough to do.

        A reader that can't run yet never holds back, since it may be waiting for what its writers are doing.
        """
        if self._grouping is not None:
            return False
        return any(stage.is_ready and stage.queued_bytes > QUEUE_BYTES for stage, _ in self.readers)

    def release(self) -> None:
        if self._side_input is not None:
            self._side_input.release()

    def _fan_out(self, block: Block) -> None:
        for stage, read_id in self.readers:
            if not stage.is_ready and stage.queued_bytes > QUEUE_BYTES:
                self._spill(block)
            stage.add(read_id, block.share())
        if self._side_input is not None:
            self._side_input_bytes += block.size
            if self._side_input_bytes > QUEUE_BYTES:
                self._spill(block)
            self._side_input.add(block.share())
        block.release()

    def _spill(self, block: Block) -> None:
        block.spill(self._folders.memory, self._folders.disk)
