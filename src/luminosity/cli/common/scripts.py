"""The script or YAML file that ``lum run``, ``plan`` and ``export`` run, and its options."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import runpy
import sys
import traceback
from collections.abc import Generator
from typing import Any, TypeGuard

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS
from luminosity.cli.common.exits import FAILED, WRONG_USE, fail, interrupted, script_failed
from luminosity.errors import LuminosityError, OptionError, PipelineFileError

__all__ = ["ending_of", "is_wrong_file", "own_options", "problem", "run_script", "tell_ending"]

_RUNNER = "luminosity.LuminosityRunner"
_NEAR = 0.85  # similarity of an option that is most likely misspelt: a letter is wrong, or "-" stands for "_"


def run_script(script: str, options: list[str], runner: str = _RUNNER) -> None:
    """Run ``script`` as Python would, with ``options`` as its command line; build and run a pipeline in YAML.

    Pipelines run on ``runner``, unless ``options`` or the script name another one.
    """
    runner = _apply(options, runner)
    if not is_yaml(script):  # a pipeline in YAML refuses options that it does not know
        _name_misspelt(options)
    sys.argv = [script, *options]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with _runner_by_default(runner):
        if is_yaml(script):
            from luminosity.beam_yaml.pipeline_file import PipelineFile

            PipelineFile(script, options).run()
        else:
            runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _runner_by_default(runner: str) -> Generator[None]:
    """Within the context, ``runner`` is the default of ``--runner`` in each parser that has it: Beam's, a script's.

    The option is not added to ``sys.argv``: a script may count its arguments, or take all of them for its own.
    """
    parse = argparse.ArgumentParser.parse_known_args

    def parse_with_default(self: Any, args: Any = None, namespace: Any = None) -> Any:
        option = self._option_string_actions.get("--runner")
        if option is not None and option.nargs is None and (option.choices is None or runner in option.choices):
            option.default, option.required = runner, False
        return parse(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_with_default
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse


def ending_of(script: str, options: list[str], runner: str = _RUNNER) -> BaseException | None:
    """Run a script as :func:`run_script` does; return the exception that ended it, if any."""
    try:
        run_script(script, options, runner)
    except BaseException as ending:
        return ending
    return None


def tell_ending(
    command: str, ending: BaseException | None, script: str, *, has_pipeline: bool, unseen: str
) -> int | None:
    """Print how a script ended whose pipelines are not run, if that is not as it should be.

    Returns the exit code of the command, or None if there is a pipeline to show. ``unseen`` says what happens to
    pipelines after the end.
    """
    if isinstance(ending, KeyboardInterrupt):
        return interrupted(command)
    if is_wrong_file(ending, script):
        return fail(command, ending, WRONG_USE)
    if isinstance(ending, LuminosityError):
        return fail(command, str(ending), FAILED)  # the remedy for Python: the user has the script
    if isinstance(ending, SystemExit):
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)  # as Python does
        if not has_pipeline and (ending.code or {"-h", "--help"} & {*sys.argv}):
            return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    elif ending is not None:
        said = "".join(traceback.format_exception_only(ending)).strip()
        if not has_pipeline:
            if not isinstance(ending, Exception):
                raise ending
            script_failed(ending)
            return fail(command, f"{script} failed before it ran a pipeline: {said.splitlines()[0]}", FAILED)
        print(
            f"lum {command}: after that, the script ended with {said} ({_last_line(ending, script)}). Nothing was run, "
            f"so this is expected if the script reads its results. Pipelines after that line are {unseen}.",
            file=sys.stderr,
        )
    if has_pipeline:
        return None
    return fail(command, f"{script} ran no pipeline, expected a script that builds and runs one", FAILED)


def is_wrong_file(error: BaseException | None, script: str) -> TypeGuard[LuminosityError]:
    """Return whether an error is one of a file in YAML, which is input of the command, or of its options."""
    return is_yaml(script) and isinstance(error, OptionError | PipelineFileError)


def _last_line(ending: BaseException, script: str) -> str:
    """Return the script's line that was running when it ended, or the last line of any file."""
    frames = traceback.extract_tb(ending.__traceback__)
    own = [frame for frame in frames if frame.filename == script] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}"


def is_yaml(script: str) -> bool:
    """Return whether a file's name says that it is a pipeline in YAML."""
    return script.lower().endswith((".yaml", ".yml"))


def own_options(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's own options among ``words``, and the other words. All that follows ``--`` is the script's."""
    cut = words.index("--") if "--" in words else len(words)
    own, rest = parser.parse_known_args(words[:cut])
    return own, [*rest, *words[cut + 1 :]]


def problem(script: str) -> str:
    """Return what is wrong with the word in the script's place, or an empty string."""
    if not script:
        return "found no script"
    if script.startswith("-"):
        return f"found {script} before the script"
    if os.path.isdir(script):
        return f"{script} is a folder"
    return "" if os.path.exists(script) else f"{script}: no such file"


def _name_misspelt(options: list[str]) -> None:
    """Print the options that are nearly those of the runner: the script may have an option like this, or no one."""
    known = [f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS)]
    for word in options[: options.index("--") if "--" in options else None]:
        option = word.partition("=")[0]
        near = difflib.get_close_matches(option, known, 1, _NEAR) if option.startswith("--") else []
        if near and near[0] != option:
            print(f"lum: {option} is left to the script; did you mean {near[0]!r}?", file=sys.stderr)


def _apply(options: list[str], runner: str) -> str:
    """Make the runner's options among ``options`` the defaults of all pipelines; return the default runner's name."""
    from apache_beam.options.pipeline_options import StandardOptions

    from luminosity.runner_options import LuminosityOptions

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runner", default=runner)
    for flag in RUNNER_FLAGS:
        if flag.metavar:
            parser.add_argument(f"--{flag.name}", action="append" if flag.is_list else "store")
        else:
            parser.add_argument(f"--{flag.name}", action="store_true", default=None)
    known = vars(parser.parse_known_args(options)[0])
    StandardOptions.DEFAULT_RUNNER = named = known.pop("runner")
    LuminosityOptions.defaults.update({name: value for name, value in known.items() if value is not None})
    return named
