"""The process of a page beside a run: gets its settings on standard input, and its listening socket from its parent."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

_NICE = 10  # the run comes first


def main() -> None:
    """Serve until the parent ends this process, or has ended itself."""
    os.nice(_NICE)
    # Only now: the imports take half a second of a core.
    from luminosity.operate.page.app import Sources
    from luminosity.operate.page.serving import end_with, serve_page

    settings = json.load(sys.stdin)
    end_with(settings["parent"])
    with socket.socket(fileno=settings["listener"]) as listener:
        serve_page(Sources(Path(settings["folder"])), settings["token"], listener, lambda _: None)


if __name__ == "__main__":
    main()
