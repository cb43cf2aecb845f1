"""How far a run is, said on standard error."""

from __future__ import annotations

import shutil
import sys
import time

from apache_beam.runners.runner import PipelineState

from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun

_LIVE_EVERY_S = 0.2
_PLAIN_EVERY_S = 5.0
# A short run says nothing: its results are there before anyone wonders.
_LIVE_AFTER_S = 1.0
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """``tick`` is called by the loop, often; it writes now and then."""

    def __init__(self, mode: str, stages: list[StageRun], pools: list[PoolRun]) -> None:
        self._stages = stages
        self._pools = pools
        self._is_off = mode == "off"
        self._is_live = mode == "auto" and sys.stderr.isatty()
        self._started_at = time.monotonic()
        self._has_line = False
        first = _LIVE_AFTER_S if self._is_live else _PLAIN_EVERY_S
        self._next_at = self._started_at + first

    def tick(self) -> None:
        now = time.monotonic()
        if self._is_off or now < self._next_at:
            return
        self._next_at = now + (_LIVE_EVERY_S if self._is_live else _PLAIN_EVERY_S)
        self._write(self._line(now))

    def finish(self, state: str) -> None:
        if self._is_off or not self._has_line:
            return
        seconds = time.monotonic() - self._started_at
        elements = sum(stage.elements_done for stage in self._stages)
        ending = "done" if state == PipelineState.DONE else state.lower()
        self._write(f"{seconds:6.0f} s  {ending}: {len(self._stages)} stages, {elements:,} elements through them")
        if self._is_live and not self._is_off:
            sys.stderr.write("\n")

    def _line(self, now: float) -> str:
        done = sum(stage.is_done() for stage in self._stages)
        active = [s for s in self._stages if not s.is_done() and s.bundles_done]
        parts = [f"{now - self._started_at:6.0f} s", f"{done}/{len(self._stages)} stages done"]
        parts += [f"{s.stage.label[:40]}: {s.elements_done:,} done, {s.queued:,} waiting" for s in active[-2:]]
        busy = sum(len(w.bundles) for p in self._pools for w in p.workers.values())
        parts.append(f"{busy} busy of {sum(len(p.workers) for p in self._pools)} workers")
        return "  ".join(parts)

    def _write(self, line: str) -> None:
        self._has_line = True
        try:
            self._write_line(line)
        except (OSError, ValueError):
            self._is_off = True  # nobody reads standard error any more; the run goes on

    def _write_line(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"{_CLEAR_LINE}{line[:width]}" if self._is_live else f"{line}\n")
        sys.stderr.flush()
