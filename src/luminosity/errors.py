"""Every exception that Luminosity raises on purpose.

::

    LuminosityError
    ├── InvalidArgument (ValueError)          an argument has a value that is not allowed
    ├── InvalidType (TypeError)               an argument or a value has a type that is not allowed
    ├── MissingExtra (ImportError)            an optional library is not installed
    ├── OptionError (ValueError)              a command-line option has a value that is not allowed
    ├── UnsupportedPipeline (ValueError)      the pipeline uses a feature that the engine does not have
    ├── ResourcesExceeded (ValueError)        a step asks for more than the machine has
    │   └── ModelTooLarge                     a model needs more than the memory budget of its device
    ├── ModelUnavailable (OSError)            the files of a model can't be found or fetched
    ├── HandlerError (ValueError)             a model handler returned something that breaks its contract
    ├── ModelFailed (RuntimeError)            a model ended its thread or process instead of raising an exception
    ├── HostUnavailable (RuntimeError)        a model host has failed, or can't be started or reached
    ├── RemoteModelError (RuntimeError)       a model server refused a request or sent an unreadable response
    │   └── EndpointError                     the endpoint is at fault: key, address, certificate, or it is down
    ├── TableError (ValueError)               a table can't be read, or its files don't match
    ├── WriteError (OSError)                  a table can't be written
    ├── StoreError (RuntimeError)             a vector store refuses rows or can't be reached
    ├── DriftError (ValueError)               samples can't be compared
    ├── RecordError (ValueError)              a recorded run is missing or can't be read
    ├── ReplayError (ValueError)              a file can't be replayed
    └── RunFailed (RuntimeError)              the run ended before the pipeline was done
        ├── StepFailed                        user code raised on every attempt
        ├── ElementKillsWorker                one element ended its worker on every attempt
        ├── WorkerStartFailed                 worker processes can't be started
        ├── SpillFailed                       the memory budget is used up and the disk is full
        └── RunCancelled                      the run was cancelled

An error may carry a remedy, a :class:`Fix`, spelled for Python and for the command line. ``str(error)`` ends with the
Python spelling; the commands print :meth:`LuminosityError.for_command`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DriftError",
    "ElementKillsWorker",
    "EndpointError",
    "Fix",
    "HandlerError",
    "HostUnavailable",
    "InvalidArgument",
    "InvalidType",
    "LuminosityError",
    "MissingExtra",
    "ModelFailed",
    "ModelTooLarge",
    "ModelUnavailable",
    "OptionError",
    "RecordError",
    "RemoteModelError",
    "ReplayError",
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
]


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

    >>> error = LuminosityError("no such column: 'texts'", fix=Fix("pass columns=", command="use --columns"))
    >>> str(error), error.for_command()
    ("no such column: 'texts'; pass columns=", "no such column: 'texts'; use --columns")
    """

    def __init__(self, message: str = "", *, fix: Fix | str | None = None) -> None:
        self.message = message
        self.fix = Fix(fix, command=fix) if isinstance(fix, str) else fix
        # The remedy is part of args: Beam makes a new error from these when it adds the name of the step.
        super().__init__(_joined(message, self.fix.python if self.fix else ""))

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
    """An optional library is not installed; the remedy names the command that installs it."""

    def __init__(self, message: str = "", *, fix: Fix | str | None = None, name: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.name = name


class OptionError(LuminosityError, ValueError):
    """A command-line option has a value that is not allowed."""


class UnsupportedPipeline(LuminosityError, ValueError):
    """The pipeline uses a feature that the engine does not have."""


class ResourcesExceeded(LuminosityError, ValueError):
    """A step asks for more than the machine has."""


class ModelTooLarge(ResourcesExceeded):
    """A model needs more memory than the budget of its device allows."""


class ModelUnavailable(LuminosityError, OSError):
    """The files of a model are missing, too large for the cache, or changed while they were fetched."""


class HandlerError(LuminosityError, ValueError):
    """A model handler returned something that breaks its contract, such as too few predictions."""


class ModelFailed(LuminosityError, RuntimeError):
    """A model ended its thread or its process, for example by ``sys.exit()``, instead of raising an exception."""


class HostUnavailable(LuminosityError, RuntimeError):
    """A model host has failed. If it is the shared host of all workers: it can't be started or reached."""


class RemoteModelError(LuminosityError, RuntimeError):
    """A model server refused a request or sent a response that can't be read."""


class EndpointError(RemoteModelError):
    """The endpoint is at fault, whatever the examples: the key, the address, the certificate, or it is down."""


class TableError(LuminosityError, ValueError):
    """A table can't be read, or one of its files doesn't match the others."""


class WriteError(LuminosityError, OSError):
    """A table can't be written."""


class StoreError(LuminosityError, RuntimeError):
    """A vector store refuses rows or can't be reached."""


class DriftError(LuminosityError, ValueError):
    """Samples can't be compared, or a drift test has settings that contradict each other."""


class RecordError(LuminosityError, ValueError):
    """A recorded run is missing or can't be read."""


class ReplayError(LuminosityError, ValueError):
    """A file can't be replayed."""


class RunFailed(LuminosityError, RuntimeError):
    """The run ended before the pipeline was done; ``headline`` says why in one line."""

    def __init__(self, message: str = "", headline: str = "", *, fix: Fix | str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.headline = headline or message.partition("\n")[0]


class StepFailed(RunFailed):
    """User code raised an exception on every attempt."""


class ElementKillsWorker(RunFailed):
    """One element ended its worker process on every attempt."""


class WorkerStartFailed(RunFailed):
    """Worker processes can't be started."""


class SpillFailed(RunFailed):
    """Data beyond the memory budget finds no room on the disk."""


class RunCancelled(RunFailed):
    """The run was cancelled by ``cancel()`` or Ctrl-C."""
