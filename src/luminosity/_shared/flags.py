"""The command-line flags of the runner and of models, described once.

``--help`` texts, the options' parsers and the table in ``docs/options.md`` are all made from these descriptions. The
module imports no Beam, so that ``lum --help`` stays fast.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HANDLER_HELP", "MODEL_FLAGS", "RUNNER_FLAGS", "Flag", "add_arguments", "help_text", "markdown_table"]

HANDLER_HELP = (
    "embed:MODEL or classify:MODEL for texts, summarize:MODEL, generate:MODEL, embed-images:MODEL or "
    "classify-images:MODEL (a folder, a name on the Hugging Face hub or in a registry), xgboost:FILE or "
    "lightgbm:FILE, with #predict_proba, #raw or #leaf behind it if you want that, chat:URL#MODEL, or "
    "module:object (a handler, or a class or function that makes one)"
)
"""The names by which commands take a model."""
_HELP_COLUMN = 27  # where the meaning starts, as wide as argparse's own help
_HELP_WIDTH = 79  # fits a terminal of 80 columns


@dataclass(frozen=True)
class Flag:
    """One flag: its name, what it takes, and its meaning in words.

    >>> Flag("spill_dir", "DIR", "folder for spilled data", default="a temporary folder").usage
    '--spill_dir=DIR'
    """

    name: str  # without the dashes
    metavar: str  # what the flag takes, such as "N" or "warn|fail"; empty for a switch
    meaning: str  # lower case, no final period
    default: str = ""  # the default in words; empty if there is nothing to say
    initial: str | bool | None = None  # the value that options have if nothing is given
    page: str = ""  # the page under docs/ that says more
    is_list: bool = False  # whether it may be given several times; the value is a list then
    is_beams: bool = False  # whether Beam's own options have it already

    @property
    def usage(self) -> str:
        """The flag as it is typed."""
        return f"--{self.name}={self.metavar}" if self.metavar else f"--{self.name}"

    @property
    def help(self) -> str:
        """The meaning with the default, as help texts show it."""
        return f"{self.meaning} (default: {self.default})" if self.default else self.meaning


RUNNER_FLAGS = (
    Flag(
        "cpu_workers",
        "N",
        "the most worker processes for steps without an accelerator, summed over all pools",
        default="the number of cores",
    ),
    Flag(
        "accelerators",
        "N",
        "accelerators to use; more than the machine has declares the missing ones, to try out pools",
        default="all that are detected",
    ),
    Flag(
        "max_workers",
        "[POOL=]N",
        "on a Ray cluster: the most workers of each pool, or of the pools whose names begin with POOL; more than the "
        "nodes have room for are asked for while work for them is left; may be given several times",
        default="what there is room for",
        page="scale-out.md",
        is_list=True,
    ),
    Flag(
        "min_workers",
        "[POOL=]N",
        "on a Ray cluster: the workers that each pool, or the pools whose names begin with POOL, starts with and keeps "
        "while it has work to come; may be given several times",
        default="1",
        page="scale-out.md",
        is_list=True,
    ),
    Flag(
        "idle_timeout",
        "TIME",
        "on a Ray cluster: end a worker that has had nothing to do for this long, such as 30s or 10m, and give its "
        "node back once it has none",
        default="60s",
        page="scale-out.md",
    ),
    Flag(
        "missing_resources",
        "warn|fail",
        "if steps ask for more accelerators, RAM or cores than the machine has, run them with less and a warning "
        "(warn) or refuse the pipeline (fail)",
        default="warn",
        initial="warn",
        page="plan.md",
    ),
    Flag(
        "pools",
        "hints|uniform|fitted",
        "what workers are made for: the resource hints of each step (hints), the most that any step asks for, in one "
        "pool (uniform), or the hints in the file of --hints (fitted)",
        default="hints",
        initial="hints",
        page="operate.md",
    ),
    Flag(
        "hints",
        "FILE",
        "the resource hints of steps for --pools=fitted, as `lum advise --write` writes them",
        page="operate.md",
    ),
    Flag(
        "when_busy",
        "share|wait|fail",
        "if other runs on this machine hold the accelerators or the RAM that steps ask for, take what is left, or else "
        "the same beside them, and say so (share), wait until enough is free (wait), or refuse the pipeline (fail)",
        default="share",
        initial="share",
        page="operate.md",
    ),
    Flag(
        "memory_budget",
        "SIZE",
        "memory for data between steps, groupings, side inputs and state, such as 512MB or 4GB; data beyond it is "
        "spilled to disk",
        default="a quarter of RAM",
        page="memory.md",
    ),
    Flag(
        "spill_dir",
        "DIR",
        "folder for data beyond the memory budget",
        default="a private temporary folder",
        page="memory.md",
    ),
    Flag(
        "progress",
        "auto|plain|off",
        "show a live view on a terminal and lines elsewhere (auto), lines only (plain), or nothing (off)",
        default="auto",
        initial="auto",
        page="progress.md",
    ),
    Flag(
        "run_dir",
        "DIR|off",
        "folder in which the run is recorded for `lum runs` and `lum show`; off records nothing",
        default="$LUMINOSITY_RUN_DIR, or ~/.luminosity/runs",
        page="progress.md",
    ),
    Flag(
        "manifest",
        "quick|full|off",
        "write down what a run was made from, for `lum rerun`: with digests that read a part of large files (quick), "
        "digests of all bytes (full), or not at all (off)",
        default="quick",
        initial="quick",
        page="reproduce.md",
    ),
    Flag(
        "telemetry",
        "off|otlp",
        "send traces and metrics of the run to the OpenTelemetry collector that OTEL_EXPORTER_OTLP_ENDPOINT names "
        "(otlp), or nothing (off)",
        default="off",
        initial="off",
        page="operate.md",
    ),
    Flag(
        "worker_start",
        "auto|fork|spawn",
        "how worker processes start: fork is fast, spawn is safe everywhere, auto forks on Linux and spawns on macOS",
        default="auto",
        initial="auto",
    ),
    Flag(
        "element_timeout",
        "TIME",
        "end a worker if no step of its bundle has taken or emitted an element for this long, such as 10s or 2m, and "
        "try the element again; after 4 attempts the run fails and names the element",
        default="no limit",
        page="progress.md",
    ),
    Flag(
        "ray_address",
        "auto|HOST:PORT|local",
        "run on a Ray cluster: the one of this node (auto), the one whose head is at HOST:PORT, or a Ray that the run "
        "starts on this machine (local)",
        default="this machine, without Ray",
        page="scale-out.md",
    ),
    Flag(
        "debug",
        "",
        "run everything in this process, one bundle at a time, so that breakpoint() works; a step that fails is not "
        "retried, and resource hints have no effect",
        initial=False,
        page="debugging.md",
    ),
    Flag(
        "save_failed",
        "FILE",
        "save the element that fails the run to FILE, for `lum replay FILE`",
        page="debugging.md",
    ),
    Flag(
        "dead_letters",
        "FOLDER",
        "pass an element by at which a step of yours fails on every attempt, and write it, the step and the traceback "
        "to FOLDER; without it the run fails",
        page="debugging.md",
    ),
    Flag(
        "late_elements",
        "FOLDER",
        "write the elements to FOLDER that groupings of a stream drop because they come later than their windows allow",
        page="streaming.md",
    ),
    Flag(
        "skip_record",
        "TOPIC[PARTITION]@OFFSET",
        "leave out one record of Kafka, such as reviews[3]@1204, and count it; may be given several times",
        page="kafka.md",
        is_list=True,
    ),
    Flag(
        "checkpoint_dir",
        "DIR",
        "folder in which the run keeps itself, so that the next start with the same folder continues it; on a local or "
        "mounted disk",
        page="durable-runs.md",
    ),
    Flag(
        "checkpoint_copy",
        "URL",
        "a folder or a URL such as s3://bucket/folder that gets a copy of what is in --checkpoint_dir, a second or two "
        "later, so that another machine can continue the run",
        page="durable-runs.md",
    ),
    Flag(
        "restore_from",
        "URL",
        "the copy with which an empty --checkpoint_dir begins; refused while another run writes the copy",
        page="durable-runs.md",
    ),
    Flag(
        "savepoint",
        "DIR",
        "the savepoint with which an empty --checkpoint_dir begins, as `lum checkpoint save` names it; it stays as it "
        "is, so several runs can begin with it",
        page="durable-runs.md",
    ),
    Flag(
        "copy_lease",
        "TIME",
        "how long a run may write its copy without renewing its lease: a run that can't renew it for so long ends, and "
        "another machine can go on after that and half the time more",
        default="60s",
        page="durable-runs.md",
    ),
    Flag(
        "checkpoint_interval",
        "TIME",
        "time between two checkpoints, such as 50ms or 10s",
        default="50ms if a source is unbounded, 10s otherwise",
        page="durable-runs.md",
    ),
    Flag(
        "checkpoint_keep",
        "N",
        "earlier states to keep in --checkpoint_dir, one each ten minutes, in case that it is damaged; 0 keeps none",
        default="2",
        page="durable-runs.md",
    ),
    Flag(
        "stop_timeout",
        "TIME",
        "how long a stop waits for running bundles, such as 30s or 2m; those that take longer run again after the next "
        "start",
        default="30s",
        page="durable-runs.md",
    ),
    Flag(
        "restart",
        "",
        "forget what is in --checkpoint_dir and begin again",
        initial=False,
        page="durable-runs.md",
    ),
    Flag(
        "migrate",
        "MODULE:FUNCTION",
        "change the state of the checkpoint as a function says, once, before this version of the pipeline continues",
        page="durable-runs.md",
    ),
    Flag(
        "continue_from",
        "DIR",
        "begin where the sources of a drained run have ended: the folder that was its --checkpoint_dir",
        page="durable-runs.md",
    ),
    Flag(
        "transform_name_mapping",
        "JSON",
        'the steps that were renamed since the checkpoint, old to new, such as {"Count": "CountWords"}',
        page="durable-runs.md",
        is_beams=True,
    ),
    Flag(
        "drop_state",
        "STEP",
        "forget everything that the checkpoint has of one step; may be given several times",
        page="durable-runs.md",
        is_list=True,
    ),
)

MODEL_FLAGS = (
    Flag(
        "model_memory_budget",
        "SIZE",
        "memory for all models together, such as 8GB: on each accelerator, and on the CPU summed over all workers",
        default="90% of an accelerator's memory, half of the machine's RAM",
        page="models.md",
    ),
    Flag(
        "model_threads",
        "N",
        "threads that numerical libraries may start in each worker process",
        default="the process's share of the cores",
        page="models.md",
    ),
    Flag(
        "model_cache",
        "DIR",
        "folder for downloaded models, on each machine",
        default="luminosity/models in $XDG_CACHE_HOME or ~/.cache",
        page="models.md",
    ),
    Flag(
        "model_cache_limit",
        "SIZE",
        "how much the model cache may hold, such as 20GB",
        default="50GB, but at most half of the disk space that is free or already used by the cache",
        page="models.md",
    ),
    Flag(
        "max_cost",
        "AMOUNT",
        "the most that the tokens of all models on servers may cost in this run, by the prices of their handlers",
        default="no limit",
        page="remote.md",
    ),
    Flag(
        "show_prompts",
        "N",
        "print N prompts of each template with their answers at the end of the run, cut at the terminal's width",
        default="none",
        page="prompts.md",
    ),
)


def add_arguments(
    parser: argparse.ArgumentParser, flags: Iterable[Flag], defaults: Mapping[str, Any] | None = None
) -> None:
    """Add ``flags`` to a parser, but those that Beam has already. ``defaults`` override their initial values."""
    for flag in flags:
        if flag.is_beams:
            continue
        default = flag.initial if defaults is None else defaults[flag.name]
        text = flag.help.replace("%", "%%")
        if flag.is_list:
            parser.add_argument(f"--{flag.name}", metavar=flag.metavar, action="append", default=default, help=text)
        elif flag.metavar:
            parser.add_argument(f"--{flag.name}", metavar=flag.metavar, default=default, help=text)
        else:
            parser.add_argument(f"--{flag.name}", action="store_true", default=default, help=text)


def help_text(flags: Iterable[Flag]) -> str:
    """Return the flags as lines of a help text, in two columns.

    >>> print(help_text([Flag("spill_dir", "DIR", "folder for spilled data")]), end="")
      --spill_dir=DIR          folder for spilled data
    """
    indent = " " * _HELP_COLUMN
    lines: list[str] = []
    for flag in flags:
        first = f"  {flag.usage}".ljust(_HELP_COLUMN)
        if len(first) > _HELP_COLUMN or not first.endswith(" "):
            lines.append(first.rstrip())
            first = indent
        lines += textwrap.wrap(flag.help, _HELP_WIDTH, initial_indent=first, subsequent_indent=indent)
    return "".join(f"{line}\n" for line in lines)


def markdown_table(flags: Iterable[Flag], folder: str = "") -> str:
    """Return the flags as a Markdown table. ``folder`` is the way from the page with the table to ``docs/``.

    >>> print(markdown_table([Flag("progress", "auto|off", "what to show", default="auto")]), end="")
    | option | default | meaning |
    |---|---|---|
    | `--progress=auto\\|off` | auto | what to show |
    """
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for flag in flags:
        more = f": [{flag.page}]({folder}{flag.page})" if flag.page else ""
        usage = flag.usage.replace("|", r"\|")
        lines.append(f"| `{usage}` | {flag.default} | {flag.meaning}{more} |")
    return "".join(f"{line}\n" for line in lines)
