"""``lum``: run Beam pipelines pleasantly."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from luminosity.cli import plan, replay, run, runs, serve, show
from luminosity.cli.bench import command as bench
from luminosity.cli.drift import command as drift
from luminosity.cli.enrich import command as enrich
from luminosity.cli.exits import WRONG_USE, discard_output, fail
from luminosity.errors import LuminosityError

_EXAMPLES = """\
examples:
  lum run pipeline.py                         run a pipeline on this machine
  lum run pipeline.py --input=in.csv          its own options follow its name
  lum run pipeline.py --cpu_workers=4         at most four CPU worker processes
  lum run pipeline.py --accelerators=2        the pools of another machine
  lum plan pipeline.py                        stages and pools; nothing runs
  lum plan pipeline.py --svg plan.svg         draw that
  lum run pipeline.py --debug                 in one process: breakpoint() works
  lum run pipeline.py --save_failed=bad.lum   save the element that fails
  lum replay bad.lum                          run it alone
  lum runs                                    past runs and those under way
  lum show last                               what the newest run did
  lum enrich in.parquet out --embed text=MODEL  run models over a table
  lum bench embed:MODEL --data docs.parquet   the best settings on your data
  lum serve embed:MODEL                       a model behind HTTP, here
  lum drift old.parquet new.parquet           whether embeddings have drifted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="lum",
        description="Run Apache Beam pipelines on this machine, with workers fitted to each step.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"luminosity {version('luminosity')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in (run, plan, runs, show, replay, enrich, bench, serve, drift):
        subcommand.add_to(commands)
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = {"run": run.run, "plan": plan.plan, "enrich": enrich.enrich}.get(words[0] if words else "")
    if command and words[1:2] not in (["-h"], ["--help"]):
        return command(words[1:])  # what follows is the pipeline's, or the runner's: argparse must not look at it
    parsed = parser.parse_args(words)
    try:
        code = parsed.command(parsed)
        print(end="", flush=True)  # which minds no output that was closed
        return code
    except BrokenPipeError:  # The reader has seen enough, as `head` does.
        discard_output()
        return 0
    except LuminosityError as error:
        return fail(words[0], error, WRONG_USE)


if __name__ == "__main__":
    sys.exit(main())
