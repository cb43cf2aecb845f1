"""``lum run PIPELINE.py [options]``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any

from luminosity.cli.exits import INTERRUPTED, cancel_runs, treat_sigterm_as_ctrl_c
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import LuminosityError
from luminosity.lean_beam import import_beam

_RUNNER = "luminosity.LuminosityRunner"

_DESCRIPTION = """\
Run a script that builds and runs a Beam pipeline, on LuminosityRunner unless
the script or --runner names another. The script sees all options in sys.argv,
where Beam's PipelineOptions finds them.
"""
_OPTIONS = """\
options of the runner:
  --cpu_workers=N          CPU worker processes (default: cores)
  --accelerators=N         accelerators to use (default: those detected)
  --missing_accelerator=cpu|fail
                           where a step asks for one that is not there
                           (default: cpu)
  --progress=auto|plain|off
                           a live view on a terminal and lines elsewhere (auto,
                           the default), lines, nothing
  --memory_budget=SIZE     memory for data between steps, such as 512MB
                           (default: a quarter of RAM)
  --spill_dir=DIR          where what is beyond the budget goes (default: the
                           folder for temporary files)
  --worker_start=auto|fork|spawn
                           how worker processes start (default: auto)
  --run_dir=DIR|off        where the run is recorded for `lum runs` (default:
                           ~/.luminosity/runs)
  --debug                  run in this process, one bundle at a time:
                           breakpoint() works
  --save_failed=FILE       save the element that fails the run, for
                           `lum replay FILE`

options of RunInference, on any runner:
  --model_memory_budget=SIZE
                           memory for all models together: on each accelerator,
                           and on the CPU summed over workers (default: 90% of
                           an accelerator's, half of the machine's)
  --model_threads=N        threads of numerical libraries in each worker
                           (default: its share of the cores)
  --model_cache=DIR        where models from elsewhere are kept (default:
                           ~/.cache/luminosity/models)
  --model_cache_limit=SIZE
                           how much is kept there (default: 50GB, but at most
                           half of what is free)

example:
  lum run examples/bulk_inference.py --cpu_workers=2
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        usage="lum run PIPELINE.py [options]",
        help="run a pipeline script",
        description=_DESCRIPTION,
        epilog=_OPTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="PIPELINE.py [options]", help="the script, then its options")
    parser.set_defaults(command=lambda parsed: run(parsed.words))


def run(words: list[str]) -> int:
    script, *options = words or [""]
    if wrong := problem(script):
        print(f"lum run: {wrong}; expected PIPELINE.py, then options", file=sys.stderr)
        return 2
    treat_sigterm_as_ctrl_c()
    warm_up("auto")  # the worker's imports run beside the script's own
    import_beam()
    try:
        run_script(script, options)
    except LuminosityError as error:
        print(f"lum run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        cancel_runs()
        print("lum run: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def run_script(script: str, options: list[str]) -> None:
    """Run it as Python would, with ``options`` in its command line."""
    sys.argv = [script, *_apply(options)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def problem(script: str) -> str:
    """What is wrong with the word in the script's place."""
    if not script:
        return "which script?"
    if script.startswith("-"):
        return f"{script} stands before the script"
    if os.path.isdir(script):
        return f"{script} is a folder"
    return "" if os.path.exists(script) else f"{script}: no such file"


def _apply(options: list[str]) -> list[str]:
    """The options for the script; those of the runner also hold where the script hands none to its pipeline."""
    from apache_beam.options.pipeline_options import StandardOptions

    from luminosity.engine.options import LuminosityOptions

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runner", default=_RUNNER)
    for name, default in LuminosityOptions.defaults.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true", default=None)
        else:
            parser.add_argument(f"--{name}")
    known = vars(parser.parse_known_args(options)[0])
    StandardOptions.DEFAULT_RUNNER = runner = known.pop("runner")
    LuminosityOptions.defaults.update({name: value for name, value in known.items() if value is not None})
    is_named = any(option.split("=", 1)[0] == "--runner" for option in options)
    return options if is_named else [f"--runner={runner}", *options]
