"""How commands end that are told to."""

from __future__ import annotations

import signal

__all__ = ["INTERRUPTED", "cancel_runs", "end_as_by_ctrl_c"]

INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended
_CANCEL_TIMEOUT_S = 15.0


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM do what Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def cancel_runs() -> None:
    """Where Ctrl-C came while the script did something else than wait for its run."""
    from luminosity.engine.run import cancel_all

    cancel_all(_CANCEL_TIMEOUT_S)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
