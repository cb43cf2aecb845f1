"""The command ``lum``, and its commands, which are imported when they are run: most need Beam, which takes a second."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MODULES", "import_commands"]

MODULES = {
    "run": ("run",),
    "plan": ("plan",),
    "runs": ("runs",),
    "show": ("runs",),
    "advise": ("advise",),
    "ui": ("ui",),
    "metrics": ("ui",),
    "rerun": ("rerun.rerun",),
    "stop": ("stop",),
    "drain": ("stop",),
    "checkpoint": ("checkpoint.checkpoint",),
    "state": ("checkpoint.state",),
    "replay": ("run",),
    "simulate": ("simulate",),
    "enrich": ("enrich.enrich",),
    "bench": ("bench",),
    "serve": ("serve",),
    "drift": ("drift.command", "drift.watch"),
    "describe": ("describe",),
    "evaluate": ("evaluate.evaluate",),
    "ask": ("ask",),
    "image": ("image",),
    "export": ("export",),
}
"""The modules of each command, in the order in which the help lists them."""


def import_commands(name: str = "") -> dict[str, Any]:
    """Import the modules of a command, or of all commands if there is none of this name; return them by their names."""
    chosen = [MODULES[name]] if name in MODULES else MODULES.values()
    paths = dict.fromkeys(path for several in chosen for path in several)
    return {path: importlib.import_module(f"{__name__}.{path}") for path in paths}
