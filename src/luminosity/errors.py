"""Every exception that Luminosity raises on purpose.

::

    LuminosityError
    ├── MissingExtra (ImportError)            a library that this needs is not installed
    ├── OptionError (ValueError)              a flag has a value that is not allowed
    ├── UnsupportedPipeline (ValueError)      the pipeline uses a feature the engine does not have
    ├── ResourcesExceeded (ValueError)        a step asks for more than the machine has
    │   └── ModelTooLarge                     a model takes more than all models of its device may
    ├── ModelUnavailable (OSError)            a model's files can't be had on this machine
    ├── HostUnavailable (RuntimeError)        the process that runs models for all workers can't be started or reached
    ├── RemoteModelError (RuntimeError)       a model's server refused examples, or answered what nobody can read
    │   └── EndpointError                     the endpoint is at fault: key, address, certificate, or it is down
    ├── TableError (ValueError)               a table's file can't be read, or is not like the others
    ├── WriteError (OSError)                  a table can't be written
    ├── StoreError (RuntimeError)             a vector store refuses rows, or can't be reached
    ├── DriftError (ValueError)               samples can't be compared, or a test is told what it can't do
    ├── RecordError (ValueError)              a recorded run is not there, or can't be read
    ├── ReplayError (ValueError)              a file can't be replayed
    └── RunFailed (RuntimeError)              the run ended before the pipeline was done
        ├── StepFailed                        user code raised on every try
        ├── ElementKillsWorker                one element ended its worker on every try
        ├── WorkerStartFailed                 worker processes can't be started
        ├── SpillFailed                       the disk is full, and memory too
        └── RunCancelled                      cancel() or Ctrl-C
"""

from __future__ import annotations

__all__ = [
    "DriftError",
    "ElementKillsWorker",
    "EndpointError",
    "HostUnavailable",
    "LuminosityError",
    "MissingExtra",
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


class LuminosityError(Exception):
    """The root of the tree above."""


class MissingExtra(LuminosityError, ImportError):
    """A library that this needs is not installed; the message names the command that installs it."""


class OptionError(LuminosityError, ValueError):
    """A flag has a value that is not allowed."""


class UnsupportedPipeline(LuminosityError, ValueError):
    """The pipeline uses a feature the engine does not have."""


class ResourcesExceeded(LuminosityError, ValueError):
    """A step asks for more than the machine has."""


class ModelUnavailable(LuminosityError, OSError):
    """A model's files can't be had on this machine: not there, too large, or changed while they were fetched."""


class ModelTooLarge(ResourcesExceeded):
    """A model takes more than all models of its device may."""


class HostUnavailable(LuminosityError, RuntimeError):
    """The process that runs models for all workers can't be started or reached."""


class RemoteModelError(LuminosityError, RuntimeError):
    """A model's server refused examples, or answered them with what nobody can read."""


class EndpointError(RemoteModelError):
    """The endpoint is at fault, whatever the examples: the key, the address, the certificate, or it is down."""


class TableError(LuminosityError, ValueError):
    """A table's file can't be read, or is not like the others."""


class WriteError(LuminosityError, OSError):
    """A table can't be written."""


class StoreError(LuminosityError, RuntimeError):
    """A vector store refuses rows, or can't be reached."""


class DriftError(LuminosityError, ValueError):
    """Samples can't be compared, or a test is told what it can't do."""


class RecordError(LuminosityError, ValueError):
    """A recorded run is not there, or can't be read."""


class ReplayError(LuminosityError, ValueError):
    """A file can't be replayed."""


class RunFailed(LuminosityError, RuntimeError):
    """The run ended before the pipeline was done; ``headline`` says why in one line."""

    def __init__(self, message: str, headline: str = "") -> None:
        super().__init__(message)
        self.headline = headline or message.partition("\n")[0]


class StepFailed(RunFailed):
    """User code raised on every try."""


class ElementKillsWorker(RunFailed):
    """One element ended its worker on every try."""


class WorkerStartFailed(RunFailed):
    """Worker processes can't be started."""


class SpillFailed(RunFailed):
    """What is beyond the memory budget finds no room on the disk."""


class RunCancelled(RunFailed):
    """The run was cancelled by ``cancel()`` or Ctrl-C."""
