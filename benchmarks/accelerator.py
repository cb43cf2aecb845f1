"""What one accelerator does: encoders alone and in pipelines, several models, too little memory, images, drift.

    python benchmarks/accelerator.py                        # everything: at most 400 s on an NVIDIA H200
    python benchmarks/accelerator.py --only module,drift    # these sections
    python benchmarks/accelerator.py --small                # tiny sizes, also without a CUDA device: a try

Each section runs in a process of its own. One that fails prints its error, the others go on, and the exit code is 1.
"""

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

from _accelerator_models import has_cuda

_SECTIONS = {
    "module": ("_accelerator_encoder", 60),
    "equality": ("_accelerator_encoder", 120),
    "pipeline": ("_accelerator_pipelines", 150),
    "three_models": ("_accelerator_pipelines", 110),
    "out_of_memory": ("_accelerator_pipelines", 60),
    "classifier": ("_accelerator_pipelines", 60),
    "images": ("_accelerator_images", 110),
    "drift": ("_accelerator_drift", 120),
}
"""The module with each section's function, and the seconds after which the section counts as failed."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_SLOWER_WHEN_SMALL = 10  # on a CPU that others use, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(_SECTIONS), help="sections, separated by commas")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        sys.exit(_run_here(arguments.section))
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - _SECTIONS.keys():
        parser.error(f"found --only {', '.join(sorted(unknown))}, expected some of {', '.join(_SECTIONS)}")
    if not arguments.small and not has_cuda():
        print("Nothing is measured: this machine has no CUDA device. Use --small to try the script.")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a section must not outlive this process
    begun, failed = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ACCELERATOR_MODELS": folder, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        os.environ |= {"ACCELERATOR_SMALL": "1" if arguments.small else ""}
        # Beam's worker processes import these modules, too, and don't know where the script lies.
        os.environ["PYTHONPATH"] = os.pathsep.join([_HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in ("models", *chosen):
            print(f"\n## {name}", flush=True)
            limit_s = _SECTIONS.get(name, ("", 60))[1] * (_SLOWER_WHEN_SMALL if arguments.small else 1)
            started = time.monotonic()
            if reason := _in_a_process(name, limit_s):
                print(f"FAILED: {name}: {reason}", flush=True)
                failed.append(name)
            print(f"({name}: {time.monotonic() - started:.0f} s)", flush=True)
    print(f"\n{len(chosen)} sections in {time.monotonic() - begun:.0f} s; failed: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


def _in_a_process(name: str, limit_s: float) -> str:
    """Run a section in a process of its own, and return why it failed."""
    command = [sys.executable, os.path.abspath(__file__), "--section", name]
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            code = child.wait(limit_s)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"it was not done after {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


def _run_here(name: str) -> int:
    module = "_accelerator_models" if name == "models" else _SECTIONS[name][0]
    try:
        getattr(importlib.import_module(module), name)()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    return 0


if __name__ == "__main__":
    main()
