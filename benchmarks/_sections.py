"""Runs the sections of a benchmark, each in a process of its own, on an accelerator."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping

from _accelerator_models import has_cuda

__all__ = ["main"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_SLOWER_WHEN_SMALL = 10  # on a CPU that others use, too


def main(about: str | None, sections: Mapping[str, tuple[str, float]], models: str) -> None:
    """Run the sections that the command line chooses.

    Args:
        about: the script's docstring.
        sections: the module with each section's function, and the seconds after which the section counts as failed.
        models: the module whose function ``models`` runs before the first section, and makes what they need.
    """
    sections = {"models": (models, 60.0), **sections}
    names = [name for name in sections if name != "models"]
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(names), help="sections, separated by commas")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        sys.exit(_run_here(sections[arguments.section][0], arguments.section))
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"found --only {', '.join(sorted(unknown))}, expected some of {', '.join(names)}")
    if not arguments.small and not has_cuda():
        print("Nothing is measured: this machine has no CUDA device. Use --small to try the script.")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a section must not outlive this process
    begun, failed = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ACCELERATOR_MODELS": folder, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        os.environ["ACCELERATOR_SECTIONS"] = ",".join(chosen)
        os.environ |= {"ACCELERATOR_SMALL": "1" if arguments.small else ""}
        # Beam's worker processes import these modules, too, and don't know where the script lies.
        os.environ["PYTHONPATH"] = os.pathsep.join([_HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in ("models", *chosen):
            print(f"\n## {name}", flush=True)
            limit_s = sections[name][1] * (_SLOWER_WHEN_SMALL if arguments.small else 1)
            started = time.monotonic()
            if reason := _in_a_process(name, limit_s):
                print(f"FAILED: {name}: {reason}", flush=True)
                failed.append(name)
            print(f"({name}: {time.monotonic() - started:.0f} s)", flush=True)
    print(f"\n{len(chosen)} sections in {time.monotonic() - begun:.0f} s; failed: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


def _in_a_process(name: str, limit_s: float) -> str:
    """Run a section in a process of its own, and return why it failed."""
    command = [sys.executable, os.path.abspath(sys.argv[0]), "--section", name]
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            code = child.wait(limit_s)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"it was not done after {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


def _run_here(module: str, name: str) -> int:
    try:
        getattr(importlib.import_module(module), name)()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    return 0
