"""Lets ``lum enrich --resume`` continue an interrupted run: finds its checkpoint, and tells whether it belongs.

Each run has a folder of its own below a hidden folder that belongs to OUT, with the checkpoint and the command that it
belongs to. A run that finishes removes them all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityOptions
from luminosity._shared.shared_files import file_digest, replace_file, text_digest
from luminosity._shared.text import list_some
from luminosity.cli.enrich.columns import ColumnRequest
from luminosity.core import InferenceMetrics
from luminosity.engine.durable.inspection import saved_counters
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.errors import CheckpointError, CheckpointFailed, LuminosityError, SpillFailed
from luminosity.io.folders import why_not_writable
from luminosity.io.lakes.by_name import place_of
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.readers import RowCount
from luminosity.runs.run_ids import is_at_work

__all__ = ["Command", "ResumableRun", "checkpointed", "find_run", "places", "rows_of"]

_PREFIX = ".luminosity-enrich-"
_COMMAND = "command.json"
_CHECKPOINT = "checkpoint"
_FREE_OPTIONS = frozenset({"checkpoint", "prompt_cache", "resume", "show"})  # what they say changes no row
_PATHS = frozenset({"table", "out", "dead_letters", "vector_store"})
_STOP_TIMEOUT = "10s"  # unless --stop_timeout is given: a user who presses Ctrl-C waits for it
_TELLING = ("luminosity.engine.durable.resume", "luminosity.engine.run")  # loggers that name the checkpoint folder
_MOST_FILES = 1_000  # of which each is noted: of more, the digest of all
_MOST_DIFFERENCES = 5  # named in a refusal
_NAME_CHARACTERS = 80  # of OUT, in the name of its folder: names have at most 255 bytes


@dataclass(frozen=True)
class Command:
    """What a run reads, computes and writes. Only a command with the same may continue it."""

    options: dict[str, str]

    files: dict[str, str]  # of IN, the models and JSON schemas: path to size and time of the last change
    code: dict[str, str] = field(default_factory=dict[str, str])  # module of a handler to a digest of its source
    columns: list[str] = field(default_factory=list[str])  # that models add

    @classmethod
    def of(cls, parsed: argparse.Namespace, requests: Sequence[ColumnRequest], table: Sequence[TableFile]) -> Command:
        """Return what a command line means now. The modules of its handlers are imported already."""
        given = {name: value for name, value in vars(parsed).items() if name not in _FREE_OPTIONS and value}
        modules = [each.model.partition(":")[0] for each in requests if each.option in ("model", "prompt")]
        files = [*_noted({file.path: file.size for file in table}, "IN")]
        for path in dict.fromkeys(path for each in requests for path in each.files):
            files += _noted(_sizes_below(path), path)
        return cls(
            {_option(name): _text(name, value) for name, value in given.items()},
            dict(files),
            {name: digest for name in modules if (digest := _source_digest(name))},
            [each.name for each in requests],
        )

    def differences(self, now: Command) -> list[str]:
        """Return how another command differs from this one, in words."""
        found: list[str] = []
        for name in sorted({*self.options, *now.options}):
            before, after = (each.options.get(name, "not given") for each in (self, now))
            if before != after:
                found.append(f"{name} was {before}, and is {after} now")
        for path in sorted({*self.files, *now.files}):
            if path not in now.files:
                found.append(f"{path} is missing now")
            elif path not in self.files:
                found.append(f"{path} was not there then")
            elif self.files[path] != now.files[path]:
                found.append(f"{path} has changed since")
        return found


@dataclass
class ResumableRun:
    """A run that can be continued if it is interrupted, or that continues another one.

    Call :meth:`begin` before the run starts, and :meth:`remove` if it has finished.
    """

    folder: Path
    command: Command
    is_requested: bool = False  # with --resume
    is_resumed: bool = False
    rows_done: int = 0  # before this start
    others: list[Path] = field(default_factory=list[Path])  # folders of other runs of the same OUT
    earlier: ResumableRun | None = None  # the run that this one could have continued, and does not
    changed_modules: list[str] = field(default_factory=list[str])  # of handlers, since the start that is continued
    is_begun: bool = False

    @property
    def checkpoint_dir(self) -> str:
        """The checkpoint folder of the run."""
        return str(self.folder / _CHECKPOINT)

    def begin(self) -> None:
        """Make the folder, and remove those of runs that can't be continued any more.

        Raises ``OSError`` or :class:`CheckpointError` if the folder can't have a checkpoint.
        """
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(self.folder / _COMMAND, json.dumps(asdict(self.command)))
        if not self.is_resumed:
            CheckpointFolder(self.checkpoint_dir).close()  # not every network disk has locks and shared memory
        for other in self.others:
            if self.earlier is None or other != self.earlier.folder:
                _remove(other)
        self.is_begun = True

    def rows_saved(self) -> int:
        """Return how many rows the run with the most rows has saved that ``--resume`` would continue now."""
        return max(_rows_done(self) or 0, self.earlier.rows_done if self.earlier is not None else 0)

    def remove(self) -> None:
        """Remove the folders of this run and of the others with the same OUT: the table is written."""
        for folder in (self.folder, *self.others):
            _remove(folder)
        for parent in {folder.parent for folder in (self.folder, *self.others)}:
            with contextlib.suppress(OSError):  # another run of the same OUT is at work
                parent.rmdir()


def find_run(command: Command, roots: Sequence[str], *, resume: bool) -> ResumableRun:
    """Return the run that ``command`` starts or, with ``resume``, continues. Changes nothing on the disk.

    ``roots`` are the folders in which runs may have kept their checkpoints; the first one is for a new run. With
    ``resume`` and nothing to continue, a new run is returned. Raises :class:`CheckpointError` if there are interrupted
    runs and none is one of this command, or if the run is at work.
    """
    out = command.options[_option("out")]
    found = [run for root in roots for run in _runs_in(_home(root, out))]
    furthest = max(
        (run for run in found if not run.command.differences(command)),
        key=lambda run: (run.command.code == command.code, run.rows_done, run.folder.name),
        default=None,
    )
    others = [run.folder for run in found if not is_at_work(run.checkpoint_dir)]
    if not resume:
        taken = [int(run.folder.name) for run in found]
        folder = _home(roots[0], out) / str(max(taken, default=0) + 1)
        earlier = furthest if furthest is not None and furthest.rows_done and furthest.folder in others else None
        return ResumableRun(folder, command, others=others, earlier=earlier)
    if furthest is not None:
        if furthest.folder not in others:
            raise CheckpointError(
                f"the run that writes {out} is at work and can't be continued by another one",
                fix="wait for it, or stop it with `lum stop`",
            )
        others.remove(furthest.folder)
        changed = [name for name, digest in command.code.items() if furthest.command.code.get(name) != digest]
        return ResumableRun(furthest.folder, command, True, True, furthest.rows_done, others, changed_modules=changed)
    if found:
        differences = found[-1].command.differences(command)
        lines = "\n".join(f"  {each}" for each in differences[:_MOST_DIFFERENCES])
        more = f"\n  and {len(differences) - _MOST_DIFFERENCES} more" if len(differences) > _MOST_DIFFERENCES else ""
        raise CheckpointError(
            f"--resume: the interrupted run of {out} was another one:\n{lines}{more}",
            fix="repeat its command, or leave out --resume to begin again",
        )
    return replace(find_run(command, roots, resume=False), is_requested=True)


def places(out: str, spill_dir: str | None) -> list[str]:
    """Return the folders in which the checkpoint of a run that writes ``out`` may be, the best one first.

    Beside the table, where it is found from every machine and container that can write the table. In the user's folder
    if that is not possible. In ``--spill_dir`` if it is given, which has room for data.
    """
    found = [os.path.abspath(os.path.expanduser(spill_dir))] if spill_dir else []
    place = place_of(out)
    beside = os.path.dirname(os.path.abspath(place))
    if FileSystems.get_scheme(place) is None and why_not_writable(beside) is None:
        found.append(beside)
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        found.append(str(Path.home() / ".luminosity" / "enrich"))
    return found


@contextlib.contextmanager
def checkpointed(run: ResumableRun, options: PipelineOptions, total: RowCount | None) -> Generator[None]:
    """Let the pipeline with these options keep its checkpoint in the folder of ``run``, and say what that means.

    If the folder can't have a checkpoint, a line says so, and the run goes on without one.
    """
    try:
        run.begin()
    except (OSError, LuminosityError) as error:
        _tell(f"this run can't be continued if it is interrupted: {error}")
        yield
        return
    ours = options.view_as(LuminosityOptions)
    ours.checkpoint_dir, ours.spill_dir = run.checkpoint_dir, None
    ours.stop_timeout = ours.stop_timeout or _STOP_TIMEOUT
    if run.is_resumed:
        _tell(f"continuing: {rows_of(run.rows_done, total)} are done")
        for name in run.changed_modules:
            _tell(f"{name} has changed since; rows that are done keep their results")
    elif run.earlier is not None:
        done = rows_of(run.earlier.rows_done, total)
        _tell(f"beginning again; an interrupted run has {done}: to continue it, stop this one and add --resume")
    elif run.is_requested:
        _tell("nothing to continue; beginning with the first row")
    try:
        with _without_engine_hints(run.checkpoint_dir):
            yield
    except CheckpointError as error:
        fix = "leave out --resume to begin again" if run.is_resumed else "add --no-checkpoint"
        raise CheckpointError(error.message, fix=fix) from error
    except (CheckpointFailed, SpillFailed) as error:
        raise type(error)(error.message, fix="make room, then repeat the command with --resume") from error


def rows_of(done: int, total: RowCount | None) -> str:
    """Return a number of rows in words.

    >>> rows_of(1200, RowCount(30_000, is_exact=False)), rows_of(1, None)
    ('1,200 of about 30,000 rows', '1 row')
    """
    if total is None or total.rows < done:
        return f"{done:,} {'row' if done == 1 else 'rows'}"
    return f"{done:,} of {'' if total.is_exact else 'about '}{total.rows:,} rows"


@contextlib.contextmanager
def _without_engine_hints(checkpoint_dir: str) -> Generator[None]:
    """Within the context, drop warnings of the engine that name the checkpoint folder: users don't know it."""

    def is_for_users(record: logging.LogRecord) -> bool:
        return checkpoint_dir not in record.getMessage()

    loggers = [logging.getLogger(name) for name in _TELLING]
    for logger in loggers:
        logger.addFilter(is_for_users)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_for_users)


def _tell(line: str) -> None:
    print(f"lum enrich: {line}", file=sys.stderr, flush=True)


def _home(root: str, out: str) -> Path:
    """Return the folder of all runs that write ``out``."""
    name = os.path.basename(out.rstrip("/")).encode("ascii", "replace").decode()[:_NAME_CHARACTERS].replace("?", "_")
    return Path(root, f"{_PREFIX}{name}-{text_digest(out, digits=8)}")


def _runs_in(home: Path) -> Iterator[ResumableRun]:
    """Yield the runs that can be continued, oldest first."""
    if not home.is_dir():
        return
    for folder in sorted((each for each in home.iterdir() if each.name.isdecimal()), key=lambda each: int(each.name)):
        try:
            command = Command(**json.loads((folder / _COMMAND).read_text()))
        except (OSError, ValueError, TypeError):
            continue  # a run was killed while it made it, or is about to make it
        run = ResumableRun(folder, command)
        rows = _rows_done(run)
        if rows is not None or is_at_work(run.checkpoint_dir):
            run.rows_done = rows or 0
            yield run


def _rows_done(run: ResumableRun) -> int | None:
    """Return how many rows of a run have gone through all models; None if nothing is saved."""
    saved = saved_counters(run.checkpoint_dir, {InferenceMetrics.EXAMPLES})
    if saved is None:
        return None
    return min(saved.get(name, {}).get(InferenceMetrics.EXAMPLES, 0) for name in run.command.columns)


def _remove(folder: Path) -> None:
    """Remove the folder of a run, unless that has begun to work meanwhile."""
    if is_at_work(str(folder / _CHECKPOINT)):
        return
    shutil.rmtree(folder, ignore_errors=True)


def _option(name: str) -> str:
    """Return an option as users write it."""
    known = {"table": "IN", "out": "OUT", "decimal_point": "--decimal-comma"}
    return known.get(name, f"--{name.replace('_', '-')}")


def _text(name: str, value: Any) -> str:
    if name in _PATHS and "://" not in str(value):
        return os.path.abspath(str(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]


def _noted(sizes: Mapping[str, int], what: str) -> Iterator[tuple[str, str]]:
    """Yield what is noted of files: of each of them, or of all together if there are many."""
    states = {path: f"{size} bytes{_changed_at(path)}" for path, size in sizes.items()}
    if len(states) <= _MOST_FILES:
        yield from ((os.path.abspath(path) if "://" not in path else path, state) for path, state in states.items())
        return
    digest = text_digest(json.dumps(sorted(states.items())))
    yield f"{what} ({list_some(list(states), 1)})", f"{len(states)} files, {digest}"


def _changed_at(path: str) -> str:
    try:
        return f", changed at {os.stat(path).st_mtime_ns}"
    except OSError:
        return ""  # on another file system, where a listing gives the size alone


def _sizes_below(path: str) -> dict[str, int]:
    """Return a file, or the files of a folder, of this machine with their sizes. Names on a hub have none."""
    if os.path.isfile(path):
        return {path: os.path.getsize(path)}
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return {each: os.path.getsize(each) for each in found if os.path.isfile(each)}


def _source_digest(module: str) -> str:
    """Return a digest of the source of a module that is imported."""
    source = getattr(sys.modules.get(module), "__file__", None)
    return file_digest(source) if source and os.path.isfile(source) else ""
