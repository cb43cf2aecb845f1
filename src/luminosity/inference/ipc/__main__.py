"""The serving process: ``python -m luminosity.inference.ipc RUN_ID MODULE:FUNCTION``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import pkgutil
import signal
import threading

from luminosity._shared import descendants
from luminosity._shared.hangs import write_stacks_on_signal
from luminosity.inference.ipc.channel import LogCollector
from luminosity.inference.ipc.folder import HostFolder
from luminosity.inference.ipc.server import serve

__all__ = ["main"]

_EXIT_S = 10.0  # how long libraries may clean up as the interpreter ends


def main() -> None:
    """Parse the arguments, serve clients until the last one has left, and exit."""
    parser = argparse.ArgumentParser(prog="python -m luminosity.inference.ipc")
    parser.add_argument("run_id", help="hexadecimal digits that all processes of a run know")
    parser.add_argument("serve_client", metavar="MODULE:FUNCTION", help="called with a channel to each client")
    parser.add_argument("--idle_seconds", type=float, default=2.0, help="exit after this time without a client")
    arguments = parser.parse_args()
    descendants.join_inherited()  # it outlives the worker that started it, and owns what models start

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the clients, which then disconnect.
    faulthandler.enable()
    write_stacks_on_signal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    collector = LogCollector()
    logging.getLogger().addHandler(collector)

    folder = HostFolder(arguments.run_id)
    folder.make()
    serve_client = pkgutil.resolve_name(arguments.serve_client)
    serve(folder, serve_client, idle_seconds=arguments.idle_seconds, stop=stop, take_log_values=collector.take)
    _exit_soon()
    descendants.end_started()  # otherwise multiprocessing would wait for its processes


def _exit_soon() -> None:
    """Let libraries clean up, but exit even if one of their threads never ends."""
    timer = threading.Timer(_EXIT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
