"""``lum``: the command with all its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS
from luminosity._shared.text import did_you_mean
from luminosity.cli import MODULES, import_commands
from luminosity.cli.common.exits import (
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
from luminosity.engine.process import limits_named
from luminosity.errors import LuminosityError, ResourcesExceeded
from luminosity.runs.manifest.surroundings import remember_command

__all__ = ["main"]

_DRIFT_WATCH = "drift watch"
# Commands whose further options belong to the script or the runner: argparse must not see them.
_OWN_PARSING = ("run", "plan", "enrich", "export")
_HELP = (["-h"], ["--help"])

_DESCRIPTION = """\
Run Apache Beam pipelines on this machine or a Ray cluster, with workers that
fit each step, and run models over tables. `lum COMMAND --help` shows the
options of a command.
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
  lum export dataflow pipeline.py             check it for Dataflow
"""
_WITH_USER_CODE = (
    "export",
    "plan",
    "replay",
    "run",
)  # commands whose script may have registered functions for its exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lum",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="show program's version number and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-") and words[0] not in (*MODULES, _DRIFT_WATCH):
        advice = did_you_mean(words[0], MODULES) or "`lum --help` lists the commands"
        print(f"lum: there is no command {words[0]!r}; {advice}", file=sys.stderr)
        return WRONG_USE
    try:
        with limits_named():
            modules = import_commands(words[0] if words else "")
    except ResourcesExceeded as error:
        raise SystemExit(f"lum: {error.for_command()}") from None
    for module in modules.values():
        module.add_to(commands)
    set_options(_options(commands.choices))
    if words[:2] == _DRIFT_WATCH.split():  # a file with this name is ./watch
        words = [_DRIFT_WATCH, *words[2:]]
    remember_command(list(sys.argv[1:] if arguments is None else arguments))
    print_any_character()
    with sigterm_as_ctrl_c():
        try:
            with limits_named():
                return _run(parser, words, modules, commands.choices)
        except ResourcesExceeded as error:
            return fail(words[0], error, FAILED)
        except KeyboardInterrupt as error:  # the command has not handled it, and may not have begun
            cancel_runs()
            code = interrupted(words[0], str(error))
            if arguments is None and words[0] not in _WITH_USER_CODE:
                end_process(code)
            return code


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"luminosity {version('luminosity')}")
        parser.exit()


def _options(parsers: Mapping[str, argparse.ArgumentParser]) -> dict[str, set[str]]:
    """Return the options of each command, but those whose options the user's script decides on."""
    of_runner = {f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS)}
    return {
        name: {option for action in each._actions for option in action.option_strings}  # pyright: ignore[reportPrivateUsage]
        | (of_runner if name == "enrich" else set[str]())
        for name, each in parsers.items()
        if name not in ("export", "plan", "run")
    }


def _run(
    parser: argparse.ArgumentParser,
    words: list[str],
    modules: Mapping[str, Any],
    commands: Mapping[str, argparse.ArgumentParser],
) -> int:
    if words[:2] == ["export", "dataflow"] and words[2:] in _HELP:
        words = ["export", *words[2:]]
    if words and words[0] in _OWN_PARSING and words[1:2] not in _HELP:
        own: Callable[[list[str]], int] = getattr(modules[MODULES[words[0]][0]], words[0])
        return own(words[1:])
    is_rerun = words[:1] == ["rerun"] and "--" in words
    end = words.index("--") if is_rerun else len(words)  # what follows belongs to the command that runs again
    parsed, unknown = parser.parse_known_args(words[:end])
    if unknown:
        return fail(words[0], _what_is_wrong(unknown[0], words[0], commands[words[0]]), WRONG_USE)
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


def _what_is_wrong(word: str, name: str, command: argparse.ArgumentParser) -> str:
    """Return an error about a word that a command does not take."""
    if not word.startswith("-"):
        return f"found {word!r} after all that the command takes; see `lum {name} --help`"
    option = word.partition("=")[0]
    known = [each for action in command._actions for each in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    return f"there is no option {option}; {did_you_mean(option, known) or f'see `lum {name} --help`'}"


if __name__ == "__main__":
    sys.exit(main())
