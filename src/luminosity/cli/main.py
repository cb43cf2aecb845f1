"""``lum``: the command with all its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from luminosity._flags import MODEL_FLAGS, RUNNER_FLAGS
from luminosity._process_limits import limits_named
from luminosity.cli.exits import (
    FAILED,
    WRONG_USE,
    cancel_runs,
    discard_output,
    end_process,
    fail,
    interrupted,
    print_any_character,
    set_options,
    sigterm_as_ctrl_c,
)
from luminosity.errors import LuminosityError, ResourcesExceeded
from luminosity.manifest.surroundings import remember_command

try:
    with limits_named():
        from luminosity.cli import checkpoint, plan, replay, run, runs, serve, show, stop
        from luminosity.cli.advise import command as advise
        from luminosity.cli.ask import command as ask
        from luminosity.cli.bench import command as bench
        from luminosity.cli.describe import command as describe
        from luminosity.cli.drift import command as drift
        from luminosity.cli.drift import watch as drift_watch
        from luminosity.cli.enrich import command as enrich
        from luminosity.cli.evaluate import command as evaluate
        from luminosity.cli.image import command as image
        from luminosity.cli.metrics import command as metrics
        from luminosity.cli.rerun import command as rerun
        from luminosity.cli.simulate import command as simulate
        from luminosity.cli.ui import command as ui
except ResourcesExceeded as error:
    raise SystemExit(f"lum: {error.for_command()}") from None

__all__ = ["main"]

_DESCRIPTION = """\
Run Apache Beam pipelines on this machine, with workers that fit each step, and
run models over tables. `lum COMMAND --help` shows the options of a command.
"""
_EXAMPLES = """\
examples:
  lum run pipeline.py                         run a pipeline on this machine
  lum run pipeline.py --input=in.csv          pass an option to the script
  lum run pipeline.yaml                       run a pipeline in Beam's YAML
  lum run project.toml                        run several, skip what is done
  lum run pipeline.py --cpu_workers=4         use four CPU worker processes
  lum run pipeline.py --debug                 debug it with breakpoint()
  lum run pipeline.py --save_failed=bad.lum   save the element that fails
  lum replay bad.lum                          run the saved element alone
  lum plan pipeline.py                        show stages and pools, run nothing
  lum plan pipeline.py --svg plan.svg         draw them
  lum runs                                    list past and current runs
  lum show last                               show the newest run
  lum ui                                      watch runs in the browser
  lum advise last                             say what it needed, what to save
  lum metrics --out FILE.prom                 metrics for Prometheus
  lum rerun last                              do it again, compare its outputs
  lum stop last                               stop it; its next start continues
  lum simulate last --rows=100M               estimate what a larger run takes
  lum enrich in.parquet out --embed text=MODEL  run models over a table
  lum bench embed:MODEL --data docs.parquet   find the best settings for a model
  lum serve embed:MODEL                       serve a model over HTTP
  lum drift old.parquet new.parquet           test embeddings for drift
  lum drift watch watch.toml                  alert when drift begins or ends
  lum describe reviews.parquet                describe the columns of a table
  lum evaluate t.csv --label y --prediction p  compare predictions with labels
  lum ask store "Is it scary?"                answer from a store, citing rows
  lum image image pipeline.py                 write the recipe of a container
"""
_WITH_USER_CODE = ("plan", "replay", "run")  # commands whose script may have registered functions for its exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lum",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"luminosity {version('luminosity')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in (
        run,
        plan,
        runs,
        show,
        advise,
        ui,
        metrics,
        rerun,
        stop,
        checkpoint,
        replay,
        simulate,
        enrich,
        bench,
        serve,
        drift,
        drift_watch,
        describe,
        evaluate,
        ask,
        image,
    ):
        subcommand.add_to(commands)
    set_options(_options(commands.choices))
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == drift_watch.NAME.split():  # a file with this name is ./watch
        words = [drift_watch.NAME, *words[2:]]
    remember_command(list(sys.argv[1:] if arguments is None else arguments))
    print_any_character()
    with sigterm_as_ctrl_c():
        try:
            with limits_named():
                return _run(parser, words)
        except ResourcesExceeded as error:
            return fail(words[0], error, FAILED)
        except KeyboardInterrupt as error:  # the command has not handled it, and may not have begun
            cancel_runs()
            code = interrupted(words[0], str(error))
            if arguments is None and words[0] not in _WITH_USER_CODE:
                end_process(code)
            return code


def _options(parsers: Mapping[str, argparse.ArgumentParser]) -> dict[str, set[str]]:
    """Return the options of each command, but those whose options the user's script decides on."""
    of_runner = {f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS)}
    return {
        name: {option for action in each._actions for option in action.option_strings}  # pyright: ignore[reportPrivateUsage]
        | (of_runner if name == "enrich" else set[str]())
        for name, each in parsers.items()
        if name not in ("plan", "run")
    }


def _run(parser: argparse.ArgumentParser, words: list[str]) -> int:
    command = {"run": run.run, "plan": plan.plan, "enrich": enrich.enrich}.get(words[0] if words else "")
    if command and words[1:2] not in (["-h"], ["--help"]):
        return command(words[1:])  # further options belong to the script or the runner: argparse must not see them
    is_rerun = words[:1] == ["rerun"] and "--" in words
    end = words.index("--") if is_rerun else len(words)  # what follows belongs to the command that runs again
    parsed = parser.parse_args(words[:end])
    parsed.more = words[end + 1 :]
    try:
        code = parsed.command(parsed)
        print(end="", flush=True)  # raises BrokenPipeError here rather than at exit; works if stdout is closed, too
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        discard_output()
        return 0
    except LuminosityError as error:
        return fail(words[0], error, WRONG_USE)


if __name__ == "__main__":
    sys.exit(main())
