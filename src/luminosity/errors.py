"""Every exception that Luminosity raises on purpose.

::

    LuminosityError
    ├── InvalidArgument (ValueError)          an argument has a value that is not allowed
    ├── InvalidType (TypeError)               an argument or a value has a type that is not allowed
    ├── MissingExtra (ImportError)            an optional library is not installed
    ├── OptionError (ValueError)              a command-line option has a value that is not allowed
    ├── PipelineFileError (ValueError)        a pipeline in YAML has a mistake; the message names file and line
    ├── UnsupportedPipeline (ValueError)      the pipeline uses a feature that the engine does not have
    ├── ResourcesExceeded (ValueError)        a step asks for more than the machine has
    │   ├── ModelTooLarge                     a model needs more than the memory budget of its device
    │   └── ResourcesBusy                     other runs hold what a step asks for
    ├── ModelUnavailable (OSError)            the files of a model can't be found or fetched
    ├── HandlerError (ValueError)             a model handler returned something that breaks its contract
    ├── AnswerError (ValueError)              a model's answer is not what the prompt asks for; it tells the text
    ├── ModelFailed (RuntimeError)            a model ended its thread or process instead of raising an exception
    │   └── ModelDied                         a model that takes examples as they come can't answer any more
    ├── HostUnavailable (RuntimeError)        a model host has failed, or can't be started or reached
    ├── RemoteModelError (RuntimeError)       a model server refused a request or sent an unreadable response
    │   ├── BudgetReached                     a budget of money or tokens has no room for another request
    │   ├── EndpointError                     the endpoint is at fault: key, address, certificate, or it is down
    │   └── IncompleteAnswer                  a model's answer is cut, withheld, or not the JSON that was asked for
    ├── CacheError (OSError)                  a cache of answers can't be read or written
    ├── TableError (ValueError)               a table can't be read, or its files don't match
    ├── WriteError (OSError)                  a table can't be written
    ├── PathNotShared (OSError)               nodes of a cluster do not see the files that a path means
    ├── StoreError (RuntimeError)             a vector store refuses rows or can't be reached
    ├── KafkaError (RuntimeError)             Kafka refuses a request, can't be reached, or has lost records
    ├── PubSubError (RuntimeError)            Pub/Sub refuses a request or can't be reached
    ├── DriftError (ValueError)               samples can't be compared
    ├── CheckpointError (ValueError)          a checkpoint folder can't be used, or belongs to another pipeline
    │   └── CheckpointDamaged                 a file of a checkpoint is missing, or is not what was written
    ├── CopyError (OSError)                   the place of a copy of a checkpoint can't be reached
    ├── EvaluationError (ValueError)          predictions can't be evaluated, or a table can't be described
    ├── RecordError (ValueError)              a recorded run is missing or can't be read
    ├── ReplayError (ValueError)              a file can't be replayed
    └── RunFailed (RuntimeError)              the run ended before the pipeline was done
        ├── StepFailed                        a step raised on every attempt, or what no retry can help
        ├── ElementKillsWorker                one element ended its worker on every attempt
        ├── ElementTimeout                    one element took longer than --element_timeout on every attempt
        ├── WorkerStartFailed                 worker processes can't be started
        ├── SpillFailed                       the memory budget is used up and the disk is full
        ├── BlockLost                         the nodes of a cluster that held data are gone, or do not answer
        ├── CheckpointFailed                  a checkpoint can't be written; the last one stays as it is
        └── RunCancelled                      the run was cancelled

An error may carry a remedy, a :class:`Fix`, spelled for Python and for the command line. ``str(error)`` ends with the
Python spelling; the commands print :meth:`LuminosityError.for_command`.

:func:`may_pass` decides for every exception, also those that are not ours, whether a retry makes sense.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AnswerError",
    "BlockLost",
    "BudgetReached",
    "CacheError",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFailed",
    "CopyError",
    "DriftError",
    "ElementKillsWorker",
    "ElementTimeout",
    "EndpointError",
    "EvaluationError",
    "Fix",
    "HandlerError",
    "HostUnavailable",
    "IncompleteAnswer",
    "InvalidArgument",
    "InvalidType",
    "KafkaError",
    "LuminosityError",
    "MissingExtra",
    "ModelDied",
    "ModelFailed",
    "ModelTooLarge",
    "ModelUnavailable",
    "OptionError",
    "PathNotShared",
    "PipelineFileError",
    "PubSubError",
    "RecordError",
    "RemoteModelError",
    "ReplayError",
    "ResourcesBusy",
    "ResourcesExceeded",
    "RunCancelled",
    "RunFailed",
    "SpillFailed",
    "StepFailed",
    "StoreError",
    "TableError",
    "UnsupportedPipeline",
    "WorkerStartFailed",
    "WriteError",
    "may_pass",
]

# The file system refuses, whichever code asks: a retry finds the same disk and the same rights.
_REFUSALS = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC}
    | {errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
# A file is missing or in the way. User code may wait for another process to change that; readers and writers don't.
_WRONG_FILES = frozenset({errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY})
# A connection, a device or another process is in trouble. ``ConnectionError`` and ``TimeoutError`` count in any case.
_OUTAGES = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.EMFILE}
    | {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENFILE, errno.ENOMEM, errno.EREMOTEIO, errno.ESTALE}
)


@dataclass(frozen=True)
class Fix:
    """The remedy of an error: what the user can do about it.

    ``python`` is the advice for somebody who writes a pipeline, ``command`` the advice for somebody who typed a
    command. Either may be empty where no advice fits.

    >>> Fix("pass if_exists='replace'", command="add --if-exists replace").command
    'add --if-exists replace'
    """

    python: str
    command: str = ""


class LuminosityError(Exception):
    """The base class of all errors above.

    ``message`` says what was found and what was expected. ``fix`` says what to do, if that is known; a plain string
    is the same advice in both spellings.

    ``may_pass`` says that the same attempt may succeed later, for example because a server is down. It is False unless
    the class or the caller says otherwise: what we raise on purpose is about arguments, files and data, which stay the
    same.

    >>> error = LuminosityError("no such column: 'texts'", fix=Fix("pass columns=", command="use --columns"))
    >>> str(error), error.for_command()
    ("no such column: 'texts'; pass columns=", "no such column: 'texts'; use --columns")
    """

    may_pass: bool = False

    def __init__(self, message: str = "", *, fix: Fix | str | None = None, may_pass: bool | None = None) -> None:
        self.message = message
        if may_pass is not None:
            self.may_pass = may_pass
        self.fix = Fix(fix, command=fix) if isinstance(fix, str) else fix
        # The remedy is part of args: Beam makes a new error from these when it adds the name of the step.
        super().__init__(_joined(message, self.fix.python if self.fix else ""))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the frames of your own code, and the error. IPython calls it.

        ``traceback.print_exception(error)`` prints all frames.
        """
        from luminosity._shared.notebook import render_error

        return render_error(self, f"{type(self).__name__}: {self}")

    def for_command(self) -> str:
        """Return the message with the remedy as a user of the command ``lum`` spells it."""
        return _joined(self.message, self.fix.command if self.fix else "")


def _joined(message: str, advice: str) -> str:
    separator = "\nTo fix this: " if "\n" in message else "; "
    return f"{message}{separator}{advice}" if message and advice else message or advice


class InvalidArgument(LuminosityError, ValueError):
    """An argument of a class or function of Luminosity has a value that is not allowed."""


class InvalidType(LuminosityError, TypeError):
    """An argument of a class or function of Luminosity, or a value in the data, has a type that is not allowed."""


class MissingExtra(LuminosityError, ImportError):
    """An optional library is not installed, or too new; the remedy names the command that installs it."""

    def __init__(self, message: str = "", *, fix: Fix | str | None = None, name: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.name = name


class OptionError(LuminosityError, ValueError):
    """A command-line option has a value that is not allowed."""


class PipelineFileError(LuminosityError, ValueError):
    """A pipeline in YAML has a mistake; the message begins with the file and the line."""


class UnsupportedPipeline(LuminosityError, ValueError):
    """The pipeline uses a feature that the engine does not have."""


class ResourcesExceeded(LuminosityError, ValueError):
    """A step asks for more than the machine has."""


class ModelTooLarge(ResourcesExceeded):
    """A model needs more memory than the budget of its device allows."""


class ResourcesBusy(ResourcesExceeded):
    """Other runs on this machine hold what a step asks for, and ``--when_busy=fail`` says not to share it."""


class ModelUnavailable(LuminosityError, OSError):
    """The files of a model are missing, too large for the cache, or changed while they were fetched."""


class HandlerError(LuminosityError, ValueError):
    """A model handler returned something that breaks its contract, such as too few predictions."""


class AnswerError(LuminosityError, ValueError):
    """A model's answer can't be read as what the prompt asks for; the message has the text that came."""


class ModelFailed(LuminosityError, RuntimeError):
    """A model ended its thread or its process, for example by ``sys.exit()``, instead of raising an exception."""

    may_pass = True


class ModelDied(ModelFailed):
    """A model that takes examples as they come can't answer any more; it is loaded again for the next example."""


class HostUnavailable(LuminosityError, RuntimeError):
    """A model host has failed. If it is the shared host of all workers: it can't be started or reached."""

    may_pass = True


class RemoteModelError(LuminosityError, RuntimeError):
    """A model server refused a request or sent a response that can't be read."""


class EndpointError(RemoteModelError):
    """The endpoint is at fault, whatever the examples: the key, the address, the certificate, or it is down."""


class BudgetReached(RemoteModelError):
    """The budget of money or tokens that the user has set has no room for another request to a model's server."""


class IncompleteAnswer(RemoteModelError):
    """A model's answer to one example is cut off, empty or withheld, or not the JSON that was asked for."""


class CacheError(LuminosityError, OSError):
    """A cache of answers can't be read or written."""


class TableError(LuminosityError, ValueError):
    """A table can't be read, or one of its files doesn't match the others."""


class WriteError(LuminosityError, OSError):
    """A table can't be written."""


class PathNotShared(LuminosityError, OSError):
    """A path means a file of the driver's machine, and nodes of the cluster do not see it, or would lose it."""


class StoreError(LuminosityError, RuntimeError):
    """A vector store refuses rows or can't be reached."""


class KafkaError(LuminosityError, RuntimeError):
    """Kafka refuses a request or a record, can't be reached, or no longer has the records that are to be read."""


class PubSubError(LuminosityError, RuntimeError):
    """Pub/Sub refuses a request, can't be reached, or has sent a message that can't be read."""


class DriftError(LuminosityError, ValueError):
    """Samples can't be compared, or a drift test has settings that contradict each other."""


class CheckpointError(LuminosityError, ValueError):
    """A checkpoint folder can't be used: it is in use, of another version, or belongs to another pipeline."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, or has other bytes than were written. The folder stays as it is."""


class CopyError(LuminosityError, OSError):
    """The place of a copy of a checkpoint can't be reached: a network, a server, or the rights to write there."""


class EvaluationError(LuminosityError, ValueError):
    """Predictions can't be evaluated, a table can't be described, or the settings for it contradict each other."""


class RecordError(LuminosityError, ValueError):
    """A recorded run is missing or can't be read."""


class ReplayError(LuminosityError, ValueError):
    """A file can't be replayed."""


class RunFailed(LuminosityError, RuntimeError):
    """The run ended before the pipeline was done.

    ``headline`` says why in one line, ``summary`` in a few. The message has more: the frames of the user's code.
    ``traceback`` is the whole traceback of the worker, with the frames of Beam and Luminosity; empty if there is none.
    """

    traceback = ""

    def __init__(
        self, message: str = "", headline: str = "", *, summary: str = "", fix: Fix | str | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.headline = headline or message.partition("\n")[0]
        self.summary = summary or message

    def _render_traceback_(self) -> list[str]:
        from luminosity._shared.notebook import render_error

        return render_error(self, _joined(self.summary, self.fix.python if self.fix else ""), self.traceback)


class StepFailed(RunFailed):
    """A step raised an exception on every attempt, or one that no retry can help: see :func:`may_pass`."""

    step = ""  # the name of the step
    place = ""  # file and line of the user's code, if known
    element = ""  # at which it failed, shortened, if known


class ElementKillsWorker(RunFailed):
    """One element ended its worker process on every attempt."""


class ElementTimeout(RunFailed):
    """One element took longer than ``--element_timeout`` on every attempt."""


class WorkerStartFailed(RunFailed):
    """Worker processes can't be started."""


class SpillFailed(RunFailed):
    """Data beyond the memory budget finds no room on the disk."""


class BlockLost(RunFailed):
    """The nodes of a cluster that held a block of elements are gone, or do not answer."""

    may_pass = True


class CheckpointFailed(RunFailed):
    """A checkpoint can't be written, for example because the disk is full. The last one stays as it is."""


class RunCancelled(RunFailed):
    """The run was cancelled by ``cancel()`` or Ctrl-C."""


def may_pass(error: BaseException, *, in_user_code: bool = True) -> bool:
    """Return whether the work that raised ``error`` may succeed on another attempt.

    This is the only rule: the runner retries a bundle if it returns True, and ends the run otherwise.

    - An error of this module passes if it says so itself, or if an outage (a lost connection, a timeout) caused it.
    - A module that is not installed does not appear.
    - A file system that refuses does so again: full disk, read-only disk, no permission.
    - A missing or existing file, and data that Arrow can't decode, stay as they are, unless user code raised the error:
      it may wait for what another process does.
    - Everything else may pass, as Beam promises for user code.

    >>> may_pass(ValueError("flaky")), may_pass(OSError(errno.ENOSPC, "disk full")), may_pass(TableError("damaged"))
    (True, False, False)
    >>> missing = FileNotFoundError(errno.ENOENT, "no such file")
    >>> may_pass(missing), may_pass(missing, in_user_code=False)
    (True, False)
    """
    if isinstance(error, LuminosityError):
        return error.may_pass or any(map(_is_outage, _causes(error)))
    if isinstance(error, ModuleNotFoundError):
        return False
    found = [error, *_collected(error)]
    if any(isinstance(each, OSError) and each.errno in _REFUSALS for each in found):
        return False
    if in_user_code:
        return True
    if any(isinstance(each, OSError) and each.errno in _WRONG_FILES for each in found):
        return False
    arrow: Any = sys.modules.get("pyarrow")
    return arrow is None or not isinstance(error, arrow.ArrowInvalid)


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and not isinstance(error, LuminosityError) and error.errno in _OUTAGES


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions from which ``error`` was raised, and those that they collect."""
    seen: set[int] = set()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
        yield error
        yield from _collected(error)


def _collected(error: BaseException) -> Iterator[BaseException]:
    """Yield what Beam's ``BeamIOError`` collects for several files, and the error that an ``OSError`` wraps."""
    details: Any = getattr(error, "exception_details", None)
    inner = [*details.values()] if isinstance(details, dict) else []
    for each in (*inner, *(error.args[:1] if isinstance(error, OSError) else ())):
        if isinstance(each, BaseException):
            yield each
            yield from _collected(each)
