"""The process of the model host: ``python -m luminosity.inference.ipc RUN_ID MODULE:FUNCTION``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import pkgutil
import signal
import threading

from luminosity.inference.ipc.folder import HostFolder
from luminosity.inference.ipc.logs import Records
from luminosity.inference.ipc.server import serve

_END_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m luminosity.inference.ipc")
    parser.add_argument("run_id", help="hexadecimal digits that all processes of a run know")
    parser.add_argument("talk", metavar="MODULE:FUNCTION", help="called with a channel to each client")
    parser.add_argument("--idle_seconds", type=float, default=2.0, help="ends when there was no client for so long")
    arguments = parser.parse_args()

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the clients, which then leave
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    records = Records()
    logging.getLogger().addHandler(records)

    folder = HostFolder(arguments.run_id)
    folder.make()
    talk = pkgutil.resolve_name(arguments.talk)
    serve(folder, talk, idle_seconds=arguments.idle_seconds, stop=stop, take_logged=records.take)
    _end_soon()


def _end_soon() -> None:
    """Libraries may clean up as the interpreter ends, but a thread of theirs that waits forever shall not keep it."""
    timer = threading.Timer(_END_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
